"""What a step on Dask costs beside the bare cluster, with the same Dask workers."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keepstep as ks

from . import gauges, measure, ours
from .executors import sleep_body

#: Bodies that have run before the clock starts, so that every process is warm.
WARM = 20
#: Dask workers, each with one thread.
WORKERS = 2
_PATIENCE_SECONDS = 30.0

sleeping = ks.step(sleep_body)


async def steps(where: Path, address: str, seconds: float, items: int) -> dict[str, Any]:
    """Map a step over items, in one run, on the cluster."""
    step = sleeping.options(executor=ks.executors.Dask(address=address))

    @ks.workflow(name="mapped")
    async def mapped(count: int) -> int:
        return sum(await ks.map(step, [seconds] * count))

    async with ours.open_store(where) as engine:
        await (await engine.start(mapped, WARM)).result()
        with gauges.Stopwatch() as watch:
            await (await engine.start(mapped, items)).result()
    return watch.rate(items)


async def bare(where: Path, address: str, seconds: float, items: int) -> dict[str, Any]:
    """The same bodies as tasks of Dask, without a store."""
    from distributed import Client

    async with Client(address, asynchronous=True) as client:
        await client.gather([client.submit(sleep_body, seconds, pure=False) for _ in range(WARM)])
        with gauges.Stopwatch() as watch:
            await client.gather([client.submit(sleep_body, seconds, pure=False) for _ in range(items)])
    return watch.rate(items)


JOBS = {"steps": steps, "bare": bare}


@contextmanager
def cluster() -> Iterator[str]:
    """Start a cluster of processes on this machine, and give its address."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "scheduler.json")

        def start(kind: str, *options: str) -> subprocess.Popen[bytes]:
            given = [f"--scheduler-file={file}", "--host=127.0.0.1", "--dashboard-address=127.0.0.1:0"]
            command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *given, *options]
            return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)

        running = [start("scheduler", "--port=0")]
        try:
            options = ("--nthreads=1", "--no-nanny", f"--local-directory={folder}")
            running += [start("worker", *options) for _ in range(WORKERS)]
            end = time.monotonic() + _PATIENCE_SECONDS
            while not file.exists() and time.monotonic() < end:
                time.sleep(0.05)
            yield asyncio.run(_address(file))
        finally:
            for one in running:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()


async def _address(file: Path) -> str:
    from distributed import Client

    async with Client(scheduler_file=str(file), asynchronous=True) as client:
        await client.wait_for_workers(WORKERS, timeout=_PATIENCE_SECONDS)
        return str(client.scheduler.address)


def findings(effort: measure.Effort) -> list[measure.Finding]:
    """Measure steps and the bare cluster in turn; the ratio of each round is taken between neighbours."""
    with cluster() as address:
        given = {"address": address, "seconds": 0.01, "items": effort.size(1000, 300)}
        pairs = [
            (measure.run("dask", "steps", **given), measure.run("dask", "bare", **given))
            for _ in range(effort.rounds(5))
        ]
    ratios = [mine["per_second"] / theirs["per_second"] for mine, theirs in pairs]
    return [
        measure.Finding(
            "dask",
            f"steps of 10 ms on {WORKERS} Dask workers, beside the bare cluster",
            statistics.median(mine["per_second"] for mine, _ in pairs),
            "steps/s",
            floor=statistics.median(theirs["per_second"] for _, theirs in pairs),
            ratio=statistics.median(ratios),
            least_ratio=0.8,
            detail={"ratios": ratios},
        )
    ]
