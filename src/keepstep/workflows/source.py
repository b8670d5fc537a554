"""The place of a definition in the user's code, for messages and to distinguish two of the same name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

#: Prefix of the modules that define workflows; their frames are not user code.
_OURS = __name__.rpartition(".")[0] + "."


#: Names of the main module, in the process itself, in its spawned children, and in the processes of its bodies.
_MAINS = frozenset(("__main__", "__mp_main__", "__keepstep_main__"))
#: Suffix of the name of a package's module that `python -m` runs.
_RUN = ".__main__"


def is_same_module(one: str, other: str) -> bool:
    """Whether two names may refer to one module, which may be imported from its package or as a file by itself.

    The `__main__` module of a package has the name of the package, whichever module imports it.
    """
    one, other = one.removesuffix(_RUN), other.removesuffix(_RUN)
    return not one or not other or f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


class Place(NamedTuple):
    """A place in the user's code: file and line, module, and the qualified name of the definition."""

    file: str
    line: int
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def is_local(self) -> bool:
        """Whether the place is inside a function, which may create the same definition again."""
        return "<locals>" in self.name

    @property
    def is_typed(self) -> bool:
        """Whether the place is a cell of a notebook or a prompt, where a changed cell defines the same name again."""
        return self.module == "__main__" and not getattr(sys.modules.get("__main__"), "__file__", None)

    @property
    def program(self) -> str:
        """The importable name of the module: a script is known by its file. Empty if the name is unknown."""
        if self.module not in _MAINS:
            return "" if self.module == "?" else self.module.removesuffix(_RUN)
        main = sys.modules.get(self.module)
        name = str(getattr(getattr(main, "__spec__", None), "name", "__main__")).removesuffix(_RUN)
        if name != "__main__":  # python -m package.module
            return name
        file = getattr(main, "__file__", None)  # notebooks and prompts have none
        path = Path(file) if file else None
        if path is None:
            return ""
        return path.resolve().parent.name if path.stem == "__main__" else path.stem

    @property
    def is_data(self) -> bool:
        """Whether the place is in a data file, which contains no functions."""
        return self.file.lower().endswith((".yaml", ".yml", ".json"))


def place_of(function: Callable[..., Any], name: str) -> Place:
    """Return the place of a function. A main module that is imported again under its own name is the same place."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", None) or "?"
    qualified = getattr(function, "__qualname__", name)
    if code is None:
        return Place(module, 0, module, qualified)
    return Place(code.co_filename, code.co_firstlineno, module, qualified)


def place_here(name: str) -> Place:
    """Return the place of the call that creates a definition: the innermost caller outside this package.

    `ks.Graph[Order](...)` passes through the typing module.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to inspect the callers
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith((_OURS, "typing.")):
        frame = frame.f_back
    code = frame.f_code
    inside = code.co_qualname
    qualified = name if inside == "<module>" else f"{inside}.<locals>.{name}"
    return Place(code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "?"), qualified)
