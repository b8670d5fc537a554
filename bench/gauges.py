"""What is read off while a job runs: time, memory, and how a list of measurements is spread."""

from __future__ import annotations

import random
import resource
import statistics
import string
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

MEGABYTE = 1_000_000


class Stopwatch:
    """Wall time and processor time of what happens inside it."""

    seconds = 0.0
    cpu_seconds = 0.0

    def __enter__(self) -> Self:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._wall
        self.cpu_seconds = time.process_time() - self._cpu

    def rate(self, count: int) -> dict[str, Any]:
        """So many things were done in that time."""
        return {
            "count": count,
            "seconds": self.seconds,
            "per_second": count / self.seconds,
            "cpu_us": self.cpu_seconds / count * 1e6,
        }


def resident() -> int:
    """Bytes of memory that this process holds now."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Processors:
    """How much of the time that the machine's processors were given is spent on anything, between two looks."""

    def __init__(self) -> None:
        self._before = self._look()

    def busy(self) -> float | None:
        """The share from 0 to 1 since this was made; None where nobody tells."""
        if self._before is None or (now := self._look()) is None:
            return None
        worked, idle = (after - before for before, after in zip(self._before, now, strict=True))
        return worked / (worked + idle) if worked + idle else None

    @staticmethod
    def _look() -> tuple[int, int] | None:
        """Time worked and time idle; what a neighbour on the same hardware took is neither."""
        try:
            first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        except OSError:  # not Linux
            return None
        user, nice, system, idle, waiting, interrupts, soft, *_ = map(int, first.split()[1:])
        return user + nice + system + interrupts + soft, idle + waiting


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and worst of a list."""
    ranked = sorted(values)
    return {
        "count": len(ranked),
        "median": statistics.median(ranked),
        "p99": ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))],
        "worst": ranked[-1],
    }


def text(size: int, seed: int) -> str:
    """A text of this size, another one for each seed."""
    letters = _letters()
    start = seed % 1000
    head = f"{seed:08d} "
    return head + (letters[start:] + letters * (size // len(letters) + 1))[: size - len(head)]


@cache
def _letters() -> str:
    return "".join(random.Random(7).choices(string.ascii_lowercase + " ", k=4000))


def large_state(size: int = 1_000_000) -> dict[str, Any]:
    """About so many bytes in items of 430: the same on every call."""
    draw = random.Random(7)
    letters = string.ascii_lowercase + " "
    return {"items": [{"k": k, "text": "".join(draw.choices(letters, k=400))} for k in range(size // 430 + 1)]}


def stored(where: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(one.stat().st_size for one in where.rglob("*") if one.is_file())
