"""What a step in a process costs beside a bare pool of processes, and how a second processor helps."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import keepstep as ks

from . import gauges, measure, ours

#: Bodies that have run before the clock starts, so that every process is warm.
WARM = 20


def sleep_body(seconds: float) -> int:
    """Wait, as a body that calls something does."""
    time.sleep(seconds)
    return 1


def busy_body(seconds: float) -> int:
    """Compute for some processor time."""
    end = time.thread_time() + seconds
    number = 0
    while time.thread_time() < end:
        number += 1
    return number


BODIES = {"sleep": ks.step(sleep_body), "busy": ks.step(busy_body)}


async def steps(where: Path, body: str, seconds: float, items: int, workers: int) -> dict[str, Any]:
    """Map a step over items, in one run, on processes."""
    step = BODIES[body].options(executor=ks.executors.Process(workers=workers))

    @ks.workflow(name="mapped")
    async def mapped(count: int) -> int:
        return sum(await ks.map(step, [seconds] * count, concurrency=4 * workers))

    async with ours.open_store(where) as engine:
        await (await engine.start(mapped, WARM)).result()
        with gauges.Stopwatch() as watch:
            await (await engine.start(mapped, items)).result()
    return watch.rate(items)


async def bare(where: Path, body: str, seconds: float, items: int, workers: int) -> dict[str, Any]:
    """The same bodies in the standard library's pool, without a store."""
    function = {"sleep": sleep_body, "busy": busy_body}[body]
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(function, [seconds] * WARM))
        with gauges.Stopwatch() as watch:
            list(pool.map(function, [seconds] * items))
    return watch.rate(items)


JOBS = {"steps": steps, "bare": bare}


def findings(effort: measure.Effort) -> list[measure.Finding]:
    """Measure steps and the bare pool in turn; the ratio of each round is taken between neighbours."""
    found = []
    items = effort.size(4000, 800)
    for body in ("sleep", "busy"):
        for workers in (1, 2):
            given = {"body": body, "seconds": 0.001, "items": items, "workers": workers}
            pairs = [
                (measure.run("executors", "steps", **given), measure.run("executors", "bare", **given))
                for _ in range(effort.rounds(5))
            ]
            ratios = [mine["per_second"] / theirs["per_second"] for mine, theirs in pairs]
            found.append(
                measure.Finding(
                    "processes",
                    f"steps of 1 ms ({body}), {workers} processes, beside ProcessPoolExecutor",
                    statistics.median(mine["per_second"] for mine, _ in pairs),
                    "steps/s",
                    floor=statistics.median(theirs["per_second"] for _, theirs in pairs),
                    ratio=statistics.median(ratios),
                    least_ratio=0.7,
                    detail={"ratios": ratios},
                )
            )
    scaled = []
    for _ in range(effort.rounds(3)):
        one, two = (
            measure.run("executors", "steps", body="busy", seconds=0.05, items=effort.size(200, 60), workers=workers)
            for workers in (1, 2)
        )
        scaled.append(two["per_second"] / one["per_second"])
    found.append(
        measure.Finding(
            "processes",
            "two processes to one, bodies of 50 ms that compute",
            statistics.median(scaled),
            "times",
            ratio=statistics.median(scaled),
            least_ratio=1.7,
            detail={"ratios": scaled},
        )
    )
    return found
