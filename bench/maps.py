"""The job about large maps: memory while 100,000 items run and after a kill half-way, their speed, and their bytes.

`python -m bench.maps URL KIND ITEMS [KILL_AT [FILE]]` drives one run. The body that is called as number KILL_AT kills
the process; FILE gets the number of each item whose body is called.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import keepstep as ks

from .gauges import MEGABYTE, Stopwatch, resident
from .measure import PATIENCE_SECONDS, ROOT, Effort, Finding, folder
from .postgres import fresh, server

#: Items of a full and of a quick measurement.
ITEMS, FEW = 100_000, 5_000
#: Megabytes over the start that the worker may take.
TARGET_MB = 100.0
#: Items per second of a map of async steps, in terms of the same steps in a loop.
LEAST_RATIO = 3.0
#: Items that a map has under way by default.
AT_ONCE = 100


class Bodies:
    """Counts the bodies that are called, and kills the process in one of them."""

    def __init__(self, kill_at: int, file: str) -> None:
        self.called = 0
        self.kill_at = kill_at
        self.file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if file else None
        self._lock = threading.Lock()

    def call(self, number: int) -> int:
        with self._lock:
            self.called += 1
            if self.file is not None:
                os.write(self.file, b"%d\n" % number)
            if self.called == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return number % 7


def workflows(bodies: Bodies) -> dict[str, Any]:
    """Return the workflows by the kind of the run: a map of async or plain steps or of an iterator, and a loop."""

    @ks.step
    async def work(number: int) -> int:
        return bodies.call(number)

    @ks.step
    def work_in_thread(number: int) -> int:
        return bodies.call(number)

    def drawn(items: int) -> Iterator[int]:
        yield from range(items)

    @ks.workflow(name="async")
    async def of_async(items: int) -> int:
        return sum(await ks.map(work, range(items)))

    @ks.workflow(name="def")
    async def of_threads(items: int) -> int:
        return sum(await ks.map(work_in_thread, range(items)))

    @ks.workflow(name="iterator")
    async def of_iterator(items: int) -> int:
        return sum(await ks.map(work, drawn(items)))

    @ks.workflow(name="loop")
    async def of_loop(items: int) -> int:
        total = 0
        for number in range(items):
            total += await work(number)
        return total

    return {one.name: one for one in (of_async, of_threads, of_iterator, of_loop)}


async def drive(url: str, kind: str, items: int, bodies: Bodies) -> dict[str, Any]:
    """Start the run, or recover it, and return what it took."""
    async with ks.open(url, workflows=(workflow := workflows(bodies)[kind],)) as engine:
        start, watch = resident(), Stopwatch()
        with watch:
            result = await (await engine.start(workflow, items, run_id=kind)).result()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    grown = (peak - start) / MEGABYTE
    return {**watch.rate(items), "result": result, "grown_mb": grown, "bodies": bodies.called}


def ran(url: str, kind: str, items: int, kill_at: int = 0, file: str = "") -> dict[str, Any]:
    """Drive a run in a fresh process; return nothing if it was killed."""
    command = [sys.executable, "-m", "bench.maps", url, kind, *map(str, (items, kill_at)), file]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_SECONDS, check=not kill_at
    )
    if kill_at:
        if done.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the run was to be killed, and ended with {done.returncode}")
        return {}
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def findings(effort: Effort) -> list[Finding]:
    """Measure SQLite, and the memory on a PostgreSQL server that is started for it."""
    items = effort.size(ITEMS, FEW)
    with folder() as where:
        numbers = count()
        found = _memory("SQLite", lambda: f"sqlite:///{where / f'{next(numbers)}.db'}", items)
        found.append(_speed(where, items, effort.rounds(3)))
        size = _bytes(where / "bytes.db", items)
        found.append(Finding("map", "SQLite: bytes of the store for an item", size, "bytes"))
    with server() as dsn:
        return [*found, *_memory("PostgreSQL", lambda: fresh(dsn), items)]


def _memory(store: str, new: Callable[[], str], items: int) -> list[Finding]:
    found = []
    for kind in ("async", "def"):
        live, url = ran(new(), kind, items), new()
        ran(url, kind, items, items // 2)
        recovered = ran(url, kind, items)
        for when, one in (("live", live), ("killed half-way and recovered", recovered)):
            what = f"{store}: memory over the start, {items:,} {kind} items, {when}"
            found.append(Finding("map", what, one["grown_mb"], "MB", most=TARGET_MB, detail=one))
    return found


def _speed(where: Path, items: int, rounds: int) -> Finding:
    ours, loops = [], []
    for number in range(rounds):
        url = f"sqlite:///{where / f'speed{number}.db'}"
        ours.append(ran(url, "async", items)["per_second"])
        loops.append(ran(url, "loop", items)["per_second"])
    ratios = [one / loop for one, loop in zip(ours, loops, strict=True)]
    return Finding(
        "map",
        f"{items:,} async items, in terms of a loop of as many steps",
        statistics.median(ours),
        "items/s",
        floor=statistics.median(loops),
        ratio=statistics.median(ratios),
        least_ratio=LEAST_RATIO,
        detail={"ratios": ratios},
    )


def _bytes(path: Path, items: int) -> float:
    ran(f"sqlite:///{path}", "async", items)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.stat().st_size / items


def main() -> None:
    url, kind, items, *rest = sys.argv[1:]
    kill_at, file = int(rest[0]) if rest else 0, rest[1] if len(rest) > 1 else ""
    print(json.dumps(asyncio.run(drive(url, kind, int(items), Bodies(kill_at, file)))))


if __name__ == "__main__":
    main()
