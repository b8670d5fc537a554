"""Functions by name: how a worker names the function of a step, so that another process finds it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

from ..errors import DefinitionError
from .task import Function


def function_of(fn: Callable[..., Any], step: str) -> Function:
    """Return where another process finds a function. Raise `DefinitionError` if it cannot find it there."""
    why = why_not_found(fn)
    if why is not None:
        raise DefinitionError(
            f"step {step!r} cannot run in another process, because {why}; define it at the top of a module, or give "
            "it executor='thread' (async: executor='inline')"
        )
    module = sys.modules[fn.__module__]
    if fn.__module__ == "__main__" and module.__spec__ is not None:  # python -m package.module
        return Function(module.__spec__.name, fn.__qualname__, module.__spec__.origin or "")
    return Function(fn.__module__, fn.__qualname__, getattr(module, "__file__", None) or "")


def why_not_found(fn: Callable[..., Any]) -> str | None:
    """Return why another process cannot find a function by its name; None if it can."""
    if isinstance(fn, MethodType | partial) or not hasattr(fn, "__qualname__"):
        kind = "a method of an object" if isinstance(fn, MethodType) else f"a {type(fn).__name__}"
        return f"its function is {kind}"
    if "<lambda>" in fn.__qualname__:
        return "its function is a lambda"
    if "<locals>" in fn.__qualname__:
        return f"its function {fn.__qualname__!r} is defined inside another function"
    module = sys.modules.get(fn.__module__)
    if module is None:
        return f"its module {fn.__module__!r} is not imported"
    if fn.__module__ == "__main__" and not Path(getattr(module, "__file__", None) or "/").is_file():
        return "its program is no file, but an interactive session or standard input"
    found: Any = module
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not fn and getattr(found, "fn", None) is not fn:
        return f"{fn.__module__}:{fn.__qualname__} is something else now"
    return None
