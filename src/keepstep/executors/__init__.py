"""Executors, which run the bodies of steps."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .dask import Dask
    from .process import Process
    from .ray import Ray

_HOMES = {"Dask": "dask", "Process": "process", "Ray": "ray"}

__all__ = ["Dask", "Process", "Ray"]


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_HOMES[name]}", __name__), name)
