"""Worker processes on limited queues, killed and stopped at random: an observer outside sees no limit exceeded.

The observer is the operating system. There are as many lock files as places, and a body that finds none free for longer
than a moment has met too many others. A killed process gives its locks back at once; a stopped one keeps its locks and
its places. Each run leaves a file when its first body begins, so that beginnings can be counted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.model import RunQuery, Status
from keepstep.policies.queue import DECLARED
from tests.nightly import case
from tests.postgres import empty_store

ROOT = Path(__file__).parents[2]
PLACES = 3
#: Beginnings in a second that the queue "calls" allows, beside the first.
RATE = 2
#: Runs that may have a token and begin later, all at once: one for each place, and two whose workers were killed.
LATE = PLACES + 2

PROGRAM = '''
import asyncio, fcntl, os, sys, time
from pathlib import Path
import keepstep as ks

place, url = Path(sys.argv[1]), sys.argv[2]
mail = ks.Queue("mail", concurrency=3, per_key=1)
calls = ks.Queue("calls", concurrency=3, rate=ks.Rate(2, per=1.0))

def take(names):
    """Take one of some locks; None if all of them are taken for longer than a moment."""
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        for name in names:
            fd = os.open(place / name, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except OSError:
                os.close(fd)
        time.sleep(0.005)
    return None

@ks.step
def work(key):
    slot = take([f"place-{n}" for n in range(3)])
    own = take([f"key-{key}"])
    if slot is None or own is None:
        (place / "violations").open("a").write(f"no place for {key}: {slot} {own}\\n")
    time.sleep(0.3)
    for fd in (slot, own):
        if fd is not None:
            os.close(fd)

@ks.step
def ring(number):
    slot = take([f"line-{n}" for n in range(3)])
    if slot is None:
        (place / "violations").open("a").write(f"no line for {number}\\n")
    try:
        os.close(os.open(place / f"began-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    time.sleep(0.1)
    if slot is not None:
        os.close(slot)

@ks.workflow(queue=mail)
async def job(customer):
    for _ in range(2):
        await work(customer)

@ks.workflow(queue=calls)
async def call(number):
    await ring(number)

async def main():
    async with ks.open(url, recovery_limit=100) as engine:
        if sys.argv[3:]:
            for n in range(int(sys.argv[3])):
                await engine.start(job, f"k{n % 5}", run_id=f"job-{n}", key=f"k{n % 5}")
                await engine.start(call, n, run_id=f"call-{n}")
            return
        await asyncio.sleep(3600)

asyncio.run(main())
'''


@pytest.fixture(autouse=True)
def _no_queues():
    DECLARED.clear()
    yield
    DECLARED.clear()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("runs, seconds", [case(12, 90, nightly=False), case(200, 900, nightly=True)])
def test_limits_hold_while_workers_are_killed_and_stopped(kind, runs, seconds, tmp_path):
    if kind == "sqlite":
        _drive(f"{tmp_path}/runs.db", runs, seconds, tmp_path)
    else:
        with empty_store("queues") as url:
            _drive(url, runs, seconds, tmp_path)


def _drive(url, runs, seconds, place):
    chance = random.Random(runs)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def started(*words):
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(place), url, *words], env=environment)

    workers = [started() for _ in range(4)]
    try:
        assert started(str(runs)).wait(60) == 0
        until, kills, stops = time.monotonic() + seconds, 0, 0
        while time.monotonic() < until and _open_runs(url):
            time.sleep(chance.uniform(0.2, 0.6))
            if kills + stops >= 2 * runs:
                continue
            victim = chance.randrange(4)
            if chance.random() < 0.6:
                kills += 1
                workers[victim].send_signal(signal.SIGKILL)
                workers[victim].wait()
                workers[victim] = started()
            else:
                stops += 1
                workers[victim].send_signal(signal.SIGSTOP)
                time.sleep(chance.uniform(0.1, 0.8))
                workers[victim].send_signal(signal.SIGCONT)
        assert _open_runs(url) == 0, "not every run has ended"
        assert kills
        assert stops
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    violations = place / "violations"
    assert not violations.exists(), violations.read_text()
    began = sorted((place / f"began-{n}").stat().st_mtime for n in range(runs))
    for first in range(runs):
        for last in range(first, runs):
            allowed = 1 + RATE * (began[last] - began[first]) + LATE
            assert last - first + 1 <= allowed, [one - began[0] for one in began]


def _open_runs(url):
    async def count():
        async with ks.open(url, worker=False) as engine:
            page = await engine.list(RunQuery(limit=1000))
            return sum(run.status is not Status.COMPLETED for run in page.runs)

    return asyncio.run(count())
