"""Resources of this process: its memory, its processor time and its threads."""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path

from ..records.counts import Resources

#: File of Linux in which the second number is the memory of this process in pages.
_PAGES = Path("/proc/self/statm")


def of_process(*, open_runs: int = 0, lag_seconds: float = 0.0) -> Resources:
    """Return what this process uses now. Any thread may call this; it takes some microseconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime
    return Resources(_resident_bytes(used.ru_maxrss), seconds, threading.active_count(), open_runs, lag_seconds)


def _resident_bytes(peak: int) -> int:
    try:
        return int(_PAGES.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):  # not Linux: the highest value so far
        return peak if sys.platform == "darwin" else peak * 1024
