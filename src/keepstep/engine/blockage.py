"""Finds the code that blocks the event loop, by looking at the loop's thread from another one."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from ..kernel.calls import contained
from ..kernel.step import execute
from ..model.frames import Frame, is_own

#: Time in seconds without activity of the loop after which the code that blocks it is named in the log.
BLOCKED_SECONDS = 1.0
#: Interval in seconds between two looks at the loop. A look costs microseconds, and none of the loop's time.
LOOK_SECONDS = 0.5


def blocking_code(thread_id: int) -> tuple[str, str]:
    """Return the step or workflow whose code a thread is executing, and the line; "" twice if it executes neither."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - the documented way to see another thread
    place = ""
    while frame is not None:
        who = _who(frame)
        if who:
            return who, place
        if not place and is_own(frame.f_code.co_filename):
            place = f"{Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name).brief}"
        frame = frame.f_back
    return "", ""


def _who(frame: FrameType) -> str:
    """Return whose body or code a frame of the kernel runs; "" for every other frame."""
    if frame.f_code is execute.__code__:
        attempt: Any = frame.f_locals["attempt"]
        return f"step {attempt.key} of run {attempt.run.id}"
    if frame.f_code is contained.__code__:
        return f"workflow code of run {frame.f_locals['run'].id}"
    return ""
