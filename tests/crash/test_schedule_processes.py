"""A schedule of real processes that are killed: every tick has its run, and none has two."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.engine.engine import Engine
from keepstep.model import Status
from keepstep.policies.schedule import tick_of
from tests import postgres
from tests.nightly import cases

pytestmark = pytest.mark.crash

ROOT = Path(__file__).parents[2]
#: Processes are killed for this time, after which one of them stays alive.
SECONDS = 6.0
WORKER = """
import asyncio, sys
import keepstep as ks

@ks.workflow(schedule=ks.Every(1, catch_up="all", overlap="allow"))
async def tick():
    return ks.run_id()

async def main():
    async with ks.open(sys.argv[1], lease_seconds=2.0):
        await asyncio.sleep(3600)

asyncio.run(main())
"""


def worker(url):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen([sys.executable, "-c", WORKER, url], env=env, stdout=subprocess.DEVNULL)


async def watch(url, processes):
    """Kill processes at random, and remove finished runs; return when each run was created, and the schedule."""
    seen: dict[str, set[object]] = {}
    chance = random.Random(7)
    async with Engine(url, worker=False) as engine:
        while not await engine.schedules.list():
            await engine.changed(1.0)
        end = time.monotonic() + SECONDS

        async def look():
            for run in (await engine.list(limit=1000)).runs:
                seen.setdefault(run.id, set()).add((run.created_at, run.seed))

        while time.monotonic() < end:
            await asyncio.sleep(0.3 + 0.5 * chance.random())
            await look()
            await engine.call(lambda: engine.store.delete_runs([*seen], finished=True))
            place = chance.randrange(len(processes))
            processes[place].send_signal(signal.SIGKILL)
            processes[place].wait()
            processes[place] = worker(url)
        before = await engine.schedules.get("tick")
        while (await engine.schedules.get("tick")).last <= before.last:
            await engine.changed(1.0)
        await engine.schedules.pause("tick")
        while not (found := await engine.schedules.get("tick")).paused:
            await engine.changed(1.0)
        await look()
        keeper = await (await engine.get("ks:schedule:tick")).run()
        report = await engine.care.verify()
    return seen, found, keeper, report


@pytest.mark.parametrize("which", cases(["sqlite", "files", "postgres"], ["sqlite", "postgres"]))
def test_every_tick_has_one_run_whoever_is_killed(tmp_path, which):
    url = {"sqlite": str(tmp_path / "runs.db"), "files": f"files:{tmp_path / 'runs'}"}.get(which)
    if url is None:
        with postgres.empty_store() as url:
            pass
    processes = [worker(url) for _ in range(2)]
    try:
        seen, found, keeper, report = asyncio.run(watch(url, processes))
    finally:
        for one in processes:
            one.kill()
            one.wait()
    ticks = sorted(tick_of(run.rpartition("@")[2]) for run in seen)
    assert len(ticks) >= SECONDS - 1
    assert all((after - before).total_seconds() == 1 for before, after in pairwise(ticks))
    assert all(len(births) == 1 for births in seen.values())
    assert found.fired == len(ticks)
    assert keeper.status is Status.PAUSED
    assert report.sound
    assert ks.Every(1).before(ticks[-1]) == found.last
