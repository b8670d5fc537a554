"""The jobs of graphs, through the public API alone: the same loop that LangGraph is given, and a large state."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import keepstep as ks

from . import gauges
from .ours import LEDGER, VICTIM, j6_resume, open_store

#: More passes than any job needs.
_ENOUGH = 10_000_000

# -- what the jobs run -------------------------------------------------------------------------------------------------


async def count(state: ks.State) -> dict[str, Any]:
    i = state["i"]
    return {"i": i + 1, "last": {"i": i, "ok": True}}


async def counted(state: ks.State) -> dict[str, Any]:
    LEDGER.enter(state["i"])
    return await count(state)


def looping(name: str, body: Any, **options: Any) -> ks.Graph:
    """A graph of one step that is passed `n` times."""
    graph = ks.Graph(name, max_iterations=_ENOUGH, **options)
    graph.add(body, name="step")
    graph.edge("step", "step", when=lambda state: state["i"] < state["n"])
    graph.entry("step")
    graph.exit("step")
    return graph


loop = looping("loop", count)
# The history of a long run is made quickly: nothing but its making depends on how often it was flushed.
tallied = looping("tallied", counted, durability=os.environ.get("BENCH_DURABILITY"))

editing = ks.Graph("editing", max_iterations=_ENOUGH)


@editing.step
async def edit(state: ks.State) -> dict[str, Any]:
    i, items = state["cursor"], list(state["items"])
    items[i] = {**items[i], "text": f"changed{i}"}
    return {"cursor": i + 1, "items": items}


editing.edge("edit", "edit", when=lambda state: state["cursor"] < state["n"])
editing.entry("edit")
editing.exit("edit")


# -- the jobs ----------------------------------------------------------------------------------------------------------


async def j1(where: Path, n: int = 1000, times: int = 1) -> dict[str, Any]:
    """One run, one step after the other, each durable before the next."""
    async with open_store(where) as engine:
        await (await engine.start(loop, i=0, n=20)).result()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await (await engine.start(loop, i=0, n=n)).result()
    return watch.rate(n * times)


async def j2(where: Path, runs: int = 200, steps: int = 20, times: int = 1) -> dict[str, Any]:
    """Many graphs at once in one process."""
    async with open_store(where) as engine:

        async def one() -> None:
            await (await engine.start(loop, i=0, n=steps)).result()

        await one()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await asyncio.gather(*[one() for _ in range(runs)])
    return watch.rate(runs * steps * times)


async def j5(where: Path, n: int = 100, size: int = 1_000_000) -> dict[str, Any]:
    """A large state of which every step changes a few bytes; what is on disk when all is closed."""
    state = {"cursor": 0, "n": n, **gauges.large_state(size)}
    async with open_store(where) as engine:
        await (await engine.start(loop, i=0, n=20)).result()
        with gauges.Stopwatch() as watch:
            await (await engine.start(editing, state)).result()
    stored = gauges.stored(where)
    return {**watch.rate(n), "stored": stored}


async def j6_kill(where: Path, n: int = 1000, at: int = 500) -> dict[str, Any]:
    """Run until the body of step `at`, which kills its process."""
    LEDGER.path, LEDGER.kill_at = str(where / "bodies"), at
    power_loss = "may_lose_last" if os.environ.get("BENCH_DURABILITY") else "loses_nothing"
    async with open_store(where, power_loss=power_loss) as engine:
        await (await engine.start(tallied, i=0, n=n, run_id=VICTIM)).result()
    return {}


JOBS = {job.__name__: job for job in (j1, j2, j5, j6_kill, j6_resume)}
