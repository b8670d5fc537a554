"""Worker processes that are restarted one after another under load: no run is lost, and no step runs twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.model import FINISHED, RunQuery
from tests.nightly import cases
from tests.postgres import empty_store

ROOT = Path(__file__).parents[2]
STORES = ["sqlite", "postgres"]

PROGRAM = """
import asyncio, os, random, time
from pathlib import Path
import keepstep as ks

def note(text):
    out = os.open("record", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(out, f"{text}\\n".encode())
    os.close(out)

@ks.step
async def soon(number):
    note(f"{ks.run_id()} {number}")
    await asyncio.sleep(random.uniform(0.05, 0.2))

@ks.step
def in_thread(number):
    note(f"{ks.run_id()} {number}")
    time.sleep(random.uniform(0.05, 0.2))

@ks.workflow
async def job():
    for number in range(0, 9, 3):
        await soon(number)
        await in_thread(number + 1)
        await ks.sleep(0.02)
        await ks.gather(soon(number + 2), ks.sleep(0.1))

@ks.step
async def endless():
    note(f"begun by {os.getpid()}")
    await asyncio.sleep(3600)

@ks.workflow
async def long():
    await endless()
"""


class Fleet:
    """Worker processes on one store, in one folder."""

    def __init__(self, url, folder):
        self.url, self.folder = url, folder
        self.environment = {**os.environ, "KEEPSTEP_STORE": url}
        self.workers = []
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")

    def keepstep(self, *words, source=ROOT / "src", **options):
        """Run a command, of this version or of the one in `source`."""
        command = [sys.executable, "-c", "import sys; from keepstep.cli import main; sys.exit(main())", *words]
        environment = {**self.environment, "PYTHONPATH": str(source)}
        return subprocess.Popen(command, cwd=self.folder, env=environment, **options)

    def hire(self, *options):
        """Start a worker, and wait until it is registered."""
        worker = self.keepstep("worker", "program.py", "-q", *options)
        self.workers.append(worker)
        wait_for(lambda: worker.pid in {one.pid for one in self.ask("workers") if one.alive}, pause=0.25)
        return worker

    def ask(self, method, *args):
        async def inside():
            async with ks.open(self.url, worker=False) as engine:
                return await getattr(engine, method)(*args)

        return asyncio.run(inside())

    def runs(self):
        return self.ask("list", RunQuery(limit=1000)).runs

    def record(self):
        path = self.folder / "record"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@contextmanager
def fleet_on(kind, folder):
    place = nullcontext(f"{folder}/runs.db") if kind == "sqlite" else empty_store("draining")
    with place as url:
        fleet = Fleet(url, folder)
        try:
            yield fleet
        finally:
            for worker in fleet.workers:
                worker.kill()
                worker.wait()


@pytest.fixture
def fleet(request, tmp_path):
    with fleet_on(request.param, tmp_path) as made:
        yield made


def wait_for(holds, seconds=60, pause=0.05):
    until = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < until, "nothing has come of it"
        time.sleep(pause)
    return found


async def start(url, workflow, ids):
    async with ks.open(url, worker=False) as engine:
        for one in ids:
            await engine.start(workflow, run_id=one)


@pytest.mark.parametrize("fleet", cases(STORES, quick=["sqlite"]), indirect=True)
def test_a_rolling_restart_loses_and_repeats_nothing(fleet):
    first = [fleet.hire() for _ in range(2)]

    async def job(): ...

    workflow = ks.workflow(name="job")(job)
    for batch, (worker, number) in enumerate(zip(first, (signal.SIGTERM, signal.SIGINT), strict=True)):
        fleet.hire()
        asyncio.run(start(fleet.url, workflow, [f"r{20 * batch + place}" for place in range(20)]))
        wait_for(lambda batch=batch: len(fleet.record()) > 180 * batch + 20)
        worker.send_signal(number)
        assert worker.wait(60) == 0
    wait_for(lambda: all(run.status in FINISHED for run in fleet.runs()), pause=0.25)
    assert {(run.status.value, run.recoveries) for run in fleet.runs()} == {("completed", 0)}
    assert Counter(fleet.record()) == {f"r{run} {number}": 1 for run in range(40) for number in range(9)}


@pytest.mark.parametrize("fleet", cases(STORES, quick=["postgres"]), indirect=True)
def test_a_drained_worker_ends_and_its_run_goes_on_elsewhere(fleet):
    worker = fleet.hire("--stop-seconds", "0.5")
    assert fleet.keepstep("start", "program.py:long", "--id", "x", stdout=subprocess.DEVNULL).wait(60) == 0
    wait_for(lambda: fleet.record() == [f"begun by {worker.pid}"])
    other = fleet.hire()
    assert fleet.ask("drain", fleet.runs()[0].worker)
    assert [one.pid for one in fleet.ask("workers") if one.claims] == [other.pid]
    assert worker.wait(60) == 0
    wait_for(lambda: fleet.record() == [f"begun by {one.pid}" for one in (worker, other)])
    (run,) = fleet.runs()
    assert run.recoveries == 0, "its lease was not handed back, but ended"
    assert [one.pid for one in fleet.ask("workers")] == [other.pid]
