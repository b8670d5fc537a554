"""Shipped for those who extend Keepstep or test what they build on it; nothing in the library imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .crashtests.crashtest import Ask, Complete, crashproof, crashtest
    from .crashtests.effects import effect
    from .crashtests.report import Report
    from .events import Events
    from .histories import History, Replayed, replay
    from .stubs import Stub, stub
    from .worlds import World, in_virtual_time, run, world

__all__ = [
    "Ask",
    "Complete",
    "Events",
    "History",
    "Replayed",
    "Report",
    "Stub",
    "World",
    "crashproof",
    "crashtest",
    "effect",
    "in_virtual_time",
    "replay",
    "run",
    "stub",
    "world",
]

#: Where each name lives: it is loaded when it is used, since `effect` stands in programs that are not under test.
_PLACES = {
    "Ask": "crashtests.crashtest",
    "Complete": "crashtests.crashtest",
    "Events": "events",
    "History": "histories",
    "Replayed": "histories",
    "Report": "crashtests.report",
    "Stub": "stubs",
    "World": "worlds",
    "crashproof": "crashtests.crashtest",
    "crashtest": "crashtests.crashtest",
    "effect": "crashtests.effects",
    "in_virtual_time": "worlds",
    "replay": "histories",
    "run": "worlds",
    "stub": "stubs",
    "world": "worlds",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - nothing is loaded before it is asked for

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
