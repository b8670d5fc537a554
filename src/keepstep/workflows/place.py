"""Where in the user's code a definition is written, for messages and to tell two of one name apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

#: The definitions themselves, which are nobody's own code.
_OURS = __name__.rpartition(".")[0] + "."


#: Names of the module that a process runs, its own and as its spawned children know it.
_MAINS = frozenset(("__main__", "__mp_main__"))


def is_same_module(one: str, other: str) -> bool:
    """Whether two names may be of one module: it may be imported from within its package, or as a file by itself."""
    return not one or not other or f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


class Place(NamedTuple):
    """A place in the user's code: the file and line, the module, and the qualified name of what is defined there."""

    file: str
    line: int
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def is_local(self) -> bool:
        """Whether it is inside a function, which may define the same again."""
        return "<locals>" in self.name

    @property
    def program(self) -> str:
        """The module as others would import it: a script that is run goes by its file. Empty if there is no telling."""
        if self.module not in _MAINS:
            return "" if self.module == "?" else self.module
        main = sys.modules.get(self.module)
        name = str(getattr(getattr(main, "__spec__", None), "name", "__main__")).removesuffix(".__main__")
        if name != "__main__":  # python -m package.module
            return name
        file = getattr(main, "__file__", None)  # a notebook and a prompt have none
        path = Path(file) if file else None
        if path is None:
            return ""
        return path.resolve().parent.name if path.stem == "__main__" else path.stem

    @property
    def is_data(self) -> bool:
        """Whether it is in a file of data, which holds no functions."""
        return self.file.lower().endswith((".yaml", ".yml", ".json"))


def place_of(function: Callable[..., Any], name: str) -> Place:
    """Where a function is written: a main module that is imported again under its own name is the same place."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", None) or "?"
    qualified = getattr(function, "__qualname__", name)
    if code is None:
        return Place(module, 0, module, qualified)
    return Place(code.co_filename, code.co_firstlineno, module, qualified)


def place_here(name: str) -> Place:
    """Where the user's code is that defines something by a call: the innermost caller outside the definitions."""
    frame = sys._getframe(1)  # noqa: SLF001 - the way to look at one's callers
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    code = frame.f_code
    inside = code.co_qualname
    qualified = name if inside == "<module>" else f"{inside}.<locals>.{name}"
    return Place(code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "?"), qualified)
