"""The jobs about services as Keepstep does them, through its public API alone. Each runs in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import keepstep as ks

from . import gauges
from .ours import open_store, trivial

#: A service that holds nobody up: what it costs is its places.
WIDE = "wide"


@ks.step(service=WIDE)
async def placed(i: int) -> dict[str, Any]:
    return {"i": i, "ok": True}


@ks.workflow
async def calls(n: int, *, placed_at_service: bool) -> int:
    call = placed if placed_at_service else trivial
    for i in range(n):
        await call(i)
    return n


async def j2(where: Path, runs: int = 200, steps: int = 20, times: int = 1, *, service: bool = False) -> dict[str, Any]:
    """Many runs at once in one process, each attempt with or without a place at a service."""
    ks.Service(WIDE, concurrency=1000)
    async with open_store(where) as engine:

        async def one() -> None:
            await (await engine.start(calls, steps, placed_at_service=service)).result()

        await one()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await asyncio.gather(*[one() for _ in range(runs)])
    return watch.rate(runs * steps * times)


JOBS = {"j2": j2}
