"""Finds the lines of the user's code that make the current call of a run, or that wait for one."""

from __future__ import annotations

import asyncio
import sys
import traceback
from types import FrameType
from typing import Any

from ..model.frames import is_own
from ..workflows.source import Place

#: Module of asyncio that calls callbacks. The stack below it belongs to the loop, and to the caller of the loop.
_CALLS_BACK = "asyncio.events"


def code_frames(main: Any) -> list[FrameType]:
    """Return the frames of the user's code that make the current call, innermost last.

    Without any, return those in which the run's `main` task waits.
    """
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the only way to find the caller
    while frame is not None and frame.f_globals.get("__name__") != _CALLS_BACK:
        if is_own(frame.f_code.co_filename):
            found.insert(0, frame)
        frame = frame.f_back
    return found or (_waiting_in(main.get_coro()) if isinstance(main, asyncio.Task) else [])


def code_traceback(main: Any, place: Place) -> str:
    """Return these frames as a traceback's text; without any, the `place` of the workflow's definition."""
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in code_frames(main))
    if not summary and place.line:
        summary.append(traceback.FrameSummary(place.file, place.line, place.name.rpartition(".")[2]))
    return "".join(["Traceback (most recent call last):\n", *summary.format()]) if summary else ""


def _waiting_in(coroutine: Any) -> list[FrameType]:
    """Return the frames of the user's code in which a coroutine waits."""
    found = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None and is_own(frame.f_code.co_filename):
            found.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return found
