"""The jobs about queues as Keepstep does them, through its public API alone. Each runs in a process of its own."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import keepstep as ks

from . import gauges
from .ours import DELAYS, LEDGER, arrival, open_store, sequence

#: A queue that holds nobody up: what it costs is its claims.
WIDE = "wide"


class Ended:
    """An observer that waits until so many runs have ended."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.all = asyncio.Event()

    def observe(self, event: ks.Event) -> None:
        if event.name == "run.completed":
            self._left -= 1
            if not self._left:
                self.all.set()


async def start_hear(where: Path, n: int = 100) -> dict[str, Any]:
    """The process that takes up what another one starts in a queue with a limit."""
    ks.Queue(WIDE, concurrency=100)
    async with open_store(where):
        await LEDGER.reached(n)
    return gauges.spread(DELAYS)


async def start_send(where: Path, n: int = 100) -> dict[str, Any]:
    """Starts runs in that queue, at moments that have nothing to do with the other process's rhythm."""
    ks.Queue(WIDE, concurrency=100)
    pause = random.Random(7)
    async with open_store(where, worker=False) as engine:
        while not [one for one in await engine.call(engine.store.list_workers) if one.alive]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for _ in range(n):
            await asyncio.sleep(pause.uniform(0.03, 0.06))
            await engine.start(arrival, time.monotonic(), queue=WIDE)
        await asyncio.sleep(1.0)
    return {}


async def drain(where: Path, runs: int = 10_000, limit: int | None = None, keys: int = 0) -> dict[str, Any]:
    """Leave runs in a queue, with a limit or without, and drive them: from the worker's start to the last end."""
    if limit is not None:
        ks.Queue(WIDE, concurrency=limit)
    async with open_store(where, worker=False) as engine:
        for first in range(0, runs, 500):
            some = range(first, min(runs, first + 500))
            key = [f"k{n % keys}" if keys else None for n in some]
            await asyncio.gather(*[engine.start(sequence, 1, queue=WIDE, key=one) for one in key])
    ended = Ended(runs)
    with gauges.Stopwatch() as watch:
        async with open_store(where, observers=ended):
            await ended.all.wait()
    return watch.rate(runs)


JOBS = {job.__name__: job for job in (start_hear, start_send, drain)}
