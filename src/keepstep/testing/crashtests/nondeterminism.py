"""Detects workflow code that reads the clock or draws random values, which differ on every replay."""

from __future__ import annotations

import datetime as dt
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...ports import CURRENT
from .effects import is_theirs

#: Built-in functions whose result differs on every replay, each with its replacement. Clocks that only measure
#: (`time.monotonic`, `time.perf_counter`) are not reported.
_INSTEAD = {
    "time": "ks.now()",
    "time_ns": "ks.now()",
    "now": "ks.now()",
    "utcnow": "ks.now()",
    "today": "ks.now()",
    "random": "ks.random()",
    "getrandbits": "ks.random()",
    "urandom": "ks.uuid() or ks.random()",
}
#: Modules that wrap these functions. A call is reported under the name that the module gives it.
_BETWEEN = frozenset({"random", "uuid", "secrets", "datetime"})
#: Modules that read clocks for their own purposes, whichever code calls them.
_LEAVE = frozenset({"logging", "asyncio", "warnings", "threading", "concurrent", "keepstep", "tempfile", "selectors"})


def notice(report: Callable[[str, str, str], None]) -> None:
    """Report each nondeterministic call in this process: its name, the line of the caller, and its replacement."""
    seen: set[tuple[str, int]] = set()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event != "c_call" or arg.__name__ not in _INSTEAD or not _is_chance(arg):
            return
        scope = CURRENT.get()
        if scope is None or scope.in_step or scope.run.stop.detached:
            return
        called = arg.__name__
        at: FrameType | None = frame
        while at is not None and _module(at) in _BETWEEN:
            called = f"{_module(at)}.{at.f_code.co_name}"
            at = at.f_back
        if at is None or _module(at) in _LEAVE or not is_theirs(at.f_code.co_filename):
            return
        place = (at.f_code.co_filename, at.f_lineno)
        if place not in seen:
            seen.add(place)
            report(_spelt(called, arg), f"{place[0]}:{place[1]}", _INSTEAD[arg.__name__])

    threading.setprofile(profile)
    sys.setprofile(profile)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_chance(function: Any) -> bool:
    """Whether a function is one of Python's own, not a namesake. A user's own seeded generator is fine."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random):
        return owner is _SHARED or isinstance(owner, random.SystemRandom)
    if isinstance(owner, type):
        return issubclass(owner, dt.date)
    return any(owner is one for one in _CLOCKS)


_SHARED = random._inst  # noqa: SLF001 - the generator behind random.random and its siblings
_CLOCKS = (time, sys.modules.get("posix", os))


def _spelt(called: str, function: Any) -> str:
    if "." in called:
        return called
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        return f"{owner.__name__}.{called}"
    if isinstance(owner, random.Random):
        return f"random.{called}"
    return f"{getattr(owner, '__name__', 'os').replace('posix', 'os')}.{called}"
