"""The job about topics as Keepstep does it, through its public API alone, in a process of its own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import keepstep as ks

from .ours import open_store

NEWS = ks.Topic("news")


@ks.workflow
async def subscriber(count: int) -> int:
    """Read so many messages, one by one."""
    read = 0
    async with NEWS.subscribe() as messages:
        ks.publish("subscribed", True)
        async for _ in messages:
            read += 1
            if read == count:
                break
    return read


@ks.workflow
async def publisher(count: int, size: int) -> None:
    """Publish so many messages of about 100 bytes, `size` in each commit."""
    for first in range(0, count, size):
        await NEWS.publish(*({"number": number, "text": "x" * 80} for number in range(first, min(first + size, count))))


async def pass_on(
    where: Path, n: int = 1000, publishers: int = 1, size: int = 1, subscribers: int = 10
) -> dict[str, Any]:
    """Publish n messages, and wait until every subscriber has read all of them."""
    async with open_store(where) as engine:
        readers = [await engine.start(subscriber, n) for _ in range(subscribers)]
        while not all([await one.published() for one in readers]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        commits, began = engine.counts.commits, time.perf_counter()
        for part in range(publishers):
            await engine.start(publisher, n // publishers + (part < n % publishers), size)
        read = [await one.result() for one in readers]
        seconds = time.perf_counter() - began
        return {
            "per_second": n / seconds,
            "count": sum(read),
            "seconds": seconds,
            "commits": engine.counts.commits - commits,
        }


JOBS = {"pass_on": pass_on}
