"""The processes of the fleet job: some that keep engines with workers open, and one that leaves runs for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import keepstep as ks

MAIL = ks.Queue("mail", concurrency=50, per_key=5)
REPORTS = ks.Queue("reports", concurrency=10)
MODEL = ks.Service("model", concurrency=20, rate=ks.Rate(500, per=60))


@ks.step
async def one(i: int) -> int:
    return i


@ks.step(service=MODEL)
async def ask(i: int) -> int:
    return i


@ks.workflow
async def sleeper(until: float, i: int) -> int:
    """Sleep until an instant, and do one step then."""
    await ks.sleep(max(0.1, until - ks.now().timestamp()))
    return await one(i)


@ks.workflow(queue=MAIL)
async def letter(i: int) -> int:
    return await ask(i)


@ks.workflow(queue=REPORTS, schedule=ks.Cron("0 7 * * *", tz="UTC"))
async def report() -> None: ...


class Clerk:
    """An agent that answers at once."""

    name = "clerk"
    capabilities = ("filing",)

    async def perform(self, task: Any) -> Any:
        return task


async def wait_idle(where: Path, engines: int = 5, agent: bool = False) -> dict[str, Any]:
    """Keep engines with workers open until the process is ended from outside."""
    async with contextlib.AsyncExitStack() as stack:
        for number in range(engines):
            agents = [Clerk()] if agent and not number else []
            await stack.enter_async_context(ks.open(os.environ["BENCH_STORE"], agents=agents))
        await asyncio.Event().wait()
    return {}


async def send(where: Path, runs: int = 10_000, seconds: float = 30.0) -> dict[str, Any]:
    """Start runs that all sleep until one instant, and wait until they are done; how long that took from then on."""
    async with ks.open(os.environ["BENCH_STORE"], worker=False) as engine:
        until = time.time() + seconds
        limit = asyncio.Semaphore(200)

        async def start(i: int) -> None:
            async with limit:
                await engine.start(sleeper, until, i)

        await asyncio.gather(*map(start, range(runs)))
        while (await _count(engine, "waiting")) < runs and time.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        asleep = await _count(engine, "waiting")
        late = time.time() - until
        await asyncio.sleep(max(0.0, -late))
        while (done := await _count(engine, "completed")) < runs:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        seconds = time.time() - until
    return {"seconds": seconds, "per_second": runs / seconds, "asleep": asleep, "late": late, "done": done}


async def _count(engine: ks.Engine, status: str) -> int:
    page = await engine.call(engine.store.list_runs, _asked(status))
    return page.count or 0


def _asked(status: str) -> Any:
    from keepstep.model import RunQuery, Status

    return RunQuery(status=frozenset({Status(status)}), workflow="sleeper", limit=0, count_to=1_000_000)


JOBS = {"wait_idle": wait_idle, "send": send}
