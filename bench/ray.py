"""What a step on Ray costs beside a plain task of Ray, on the same cluster of this machine."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

import keepstep as ks
from tests.executors.ray_cluster import AUTH, RayCluster

from . import gauges, measure, ours

#: Bodies that have run before the clock starts, so that every process of the cluster is warm.
WARM = 50


@ks.step
def nap(seconds: float) -> int:
    """Wait, as a body that calls something does."""
    time.sleep(seconds)
    return 1


@ks.workflow(name="mapped-on-ray")
async def mapped(count: int, seconds: float) -> int:
    """Map the step over items on Ray."""
    step = nap.options(executor=ks.executors.Ray())
    return sum(await ks.map(step, [seconds] * count, concurrency=count))


async def steps(where: Path, seconds: float, items: int) -> dict[str, Any]:
    """Map a step over items, in one run."""
    async with ours.open_store(where) as engine:
        await (await engine.start(mapped, WARM, seconds)).result()
        with gauges.Stopwatch() as watch:
            await (await engine.start(mapped, items, seconds)).result()
    return watch.rate(items)


async def bare(where: Path, seconds: float, items: int) -> dict[str, Any]:
    """The same bodies as plain tasks, without a store."""
    import ray

    def run(count: int) -> None:
        task = ray.remote(max_retries=0)(nap.fn)
        ray.get([task.remote(seconds) for _ in range(count)])

    await asyncio.to_thread(ray.init, "auto", log_to_driver=False)
    await asyncio.to_thread(run, WARM)
    with gauges.Stopwatch() as watch:
        await asyncio.to_thread(run, items)
    ray.shutdown()
    return watch.rate(items)


JOBS = {"steps": steps, "bare": bare}


def findings(effort: measure.Effort) -> list[measure.Finding]:
    """Measure steps and plain tasks in turn; the ratio of each round is taken between neighbours."""
    os.environ.update(AUTH)
    cluster = RayCluster()
    os.environ["RAY_ADDRESS"] = cluster.address
    given = {"seconds": 0.01, "items": effort.size(1000, 300)}
    try:
        pairs = [
            (measure.run("ray", "steps", **given), measure.run("ray", "bare", **given)) for _ in range(effort.rounds(5))
        ]
    finally:
        cluster.close()
        del os.environ["RAY_ADDRESS"]
    ratios = [mine["per_second"] / theirs["per_second"] for mine, theirs in pairs]
    return [
        measure.Finding(
            "ray",
            "steps of 10 ms on Ray, 2 processors, beside plain tasks",
            statistics.median(mine["per_second"] for mine, _ in pairs),
            "steps/s",
            floor=statistics.median(theirs["per_second"] for _, theirs in pairs),
            ratio=statistics.median(ratios),
            least_ratio=0.8,
            detail={"ratios": ratios},
        )
    ]
