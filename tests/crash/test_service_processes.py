"""Worker processes at one limited service, killed and stopped at random: an observer outside sees the limits hold.

The observer is the operating system. There are as many lock files as places, and a body that finds none free for longer
than a moment has met too many others. A killed process gives its locks back at once; a stopped one keeps them. Each
body also appends the time of its beginning to a file, from which the rate is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.model import RunQuery, Status
from tests.nightly import case
from tests.postgres import empty_store

ROOT = Path(__file__).parents[2]
PLACES, RATE, BURST, WORKERS = 3, 12.0, 2, 4
#: Workers that are killed or stopped at least, while runs go on.
LEAST = 5

PROGRAM = f'''
import asyncio, fcntl, os, sys, time
from pathlib import Path
import keepstep as ks

place, url = Path(sys.argv[1]), sys.argv[2]
ks.Service("api", concurrency={PLACES}, rate=ks.Rate({RATE}, per=1, burst={BURST}))

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

@ks.step(service="api")
def call(n):
    with (place / "begun").open("a") as begun:
        begun.write(f"{{time.time()}}\\n")
    slot = take([f"place-{{n}}" for n in range({PLACES})])
    if slot is None:
        (place / "violations").open("a").write(f"no place for call {{n}}\\n")
    time.sleep(0.15)
    if slot is not None:
        os.close(slot)

@ks.workflow
async def job(n):
    for part in range(3):
        await call(10 * n + part)

async def main():
    async with ks.open(url, recovery_limit=100, linger_seconds=0.1) as engine:
        if sys.argv[3:]:
            for n in range(int(sys.argv[3])):
                await engine.start(job, n, run_id=f"job-{{n}}")
            return
        await asyncio.sleep(3600)

asyncio.run(main())
'''


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("runs, seconds", [case(14, 90, nightly=False), case(200, 600, nightly=True)])
def test_limits_of_a_service_hold_across_processes(kind, runs, seconds, tmp_path):
    if kind == "sqlite":
        _drive(f"{tmp_path}/runs.db", runs, seconds, tmp_path)
    else:
        with empty_store("services") as url:
            _drive(url, runs, seconds, tmp_path)
    violations = tmp_path / "violations"
    assert not violations.exists(), violations.read_text()
    assert _beyond_rate(sorted(map(float, (tmp_path / "begun").read_text().split()))) <= WORKERS


#: A worker with a short lease at a service with one place. Each body tells when it begins and when it ends.
STOPPED = """
import asyncio, os, sys, time
from pathlib import Path
import keepstep as ks

place, url = Path(sys.argv[1]), sys.argv[2]
ks.Service("desk", concurrency=1)

def tell(what):
    out = os.open(place / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(out, f"{what} {os.getpid()} {ks.run_id()} {time.monotonic()}\\n".encode())
    os.close(out)

@ks.step(service="desk")
async def serve():
    tell("begin")
    try:
        await asyncio.sleep(0.3)
    finally:
        tell("end")

@ks.workflow
async def visit():
    await serve()
    await serve()

async def main():
    async with ks.open(url, recovery_limit=100, linger_seconds=0.1, lease_seconds=2.0) as engine:
        if sys.argv[3:]:
            for n in range(int(sys.argv[3])):
                await engine.start(visit, run_id=f"visit-{n}")
            return
        await asyncio.sleep(3600)

asyncio.run(main())
"""
VISITS = 6


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_place_of_a_worker_stopped_beyond_its_lease_goes_to_another(kind, tmp_path):
    if kind == "sqlite":
        _stop_in_a_body(f"{tmp_path}/runs.db", tmp_path)
    else:
        with empty_store("desk") as url:
            _stop_in_a_body(url, tmp_path)


def _stop_in_a_body(url, place):
    """Stop the worker that holds the only place, until another has used it, and let it go on."""
    told = place / "told"
    told.touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def started(*words):
        return subprocess.Popen([sys.executable, "-c", STOPPED, str(place), url, *words], env=environment)

    def events():
        return [line.split() for line in told.read_text().splitlines()]

    workers = [started(), started()]
    try:
        assert started(str(VISITS)).wait(60) == 0
        stopped = _stop_a_busy_one(url, workers, events)
        before = len(events())
        _wait_until(lambda: len([one for one in events()[before:] if one[0] == "begin"]) >= 2)
        woken = len(events())
        workers[stopped].send_signal(signal.SIGCONT)
        _wait_until(lambda: _open_runs(url) == 0, pause=0.3)
        late = str(workers[stopped].pid)
        assert any(one[:2] == ["end", late] for one in events()[woken:]), "its body was still under way"
        assert _most_at_once(events(), late, before, woken) == 1
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
            worker.kill()
            worker.wait()


def _stop_a_busy_one(url, workers, events):
    """Stop a worker inside a body, and not inside a write transaction of SQLite, where it would hold up all others."""
    pids = [str(worker.pid) for worker in workers]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        newest = events()[-1:]
        if newest and newest[0][0] == "begin":
            index = pids.index(newest[0][1])
            workers[index].send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            if events()[-1] == newest[0] and _is_writable(url):
                return index
            workers[index].send_signal(signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError("no worker was found in a body")


def _is_writable(url):
    if url.startswith("postgresql"):
        return True
    try:
        with contextlib.closing(sqlite3.connect(url, timeout=0.2, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return False
    return True


def _most_at_once(events, late, before, woken):
    """Return how many bodies ran at once at most, without the one in which its worker was stopped."""
    now = most = 0
    skipped = False
    for number, (what, pid, *_) in enumerate(events):
        if not skipped and number >= woken and (what, pid) == ("end", late):
            skipped = True  # the end of the body that was stopped
            continue
        if number == before - 1:  # its beginning
            continue
        now += 1 if what == "begin" else -1
        most = max(most, now)
    return most


def _wait_until(holds, seconds=60.0, pause=0.05):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(pause)


def _beyond_rate(begun):
    """Return by how many beginnings the worst window exceeds the promise.

    Each worker may be stopped between the grant of an attempt and its first line, and so begin one late.
    """
    windows = ((i, j) for i in range(len(begun)) for j in range(i, len(begun)))
    return max(j - i + 1 - (BURST + RATE * (begun[j] - begun[i] + 1)) for i, j in windows)


def _drive(url, runs, seconds, place):
    chance = random.Random(runs)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def started(*words):
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(place), url, *words], env=environment)

    workers = [started() for _ in range(WORKERS)]
    try:
        assert started(str(runs)).wait(60) == 0
        until, blows = time.monotonic() + seconds, 0
        while time.monotonic() < until and (blows < LEAST or _open_runs(url)):
            time.sleep(chance.uniform(0.2, 0.5))
            if blows < runs:
                blows += 1
                victim = chance.randrange(WORKERS)
                if chance.random() < 0.4:  # for less than a lease: after that it would count as dead
                    workers[victim].send_signal(signal.SIGSTOP)
                    time.sleep(chance.uniform(0.1, 0.8))
                    workers[victim].send_signal(signal.SIGCONT)
                else:
                    workers[victim].send_signal(signal.SIGKILL)
                    workers[victim].wait()
                    workers[victim] = started()
        assert _open_runs(url) == 0, "not every run has ended"
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _open_runs(url):
    async def count():
        async with ks.open(url, worker=False) as engine:
            page = await engine.list(RunQuery(limit=1000))
            return sum(run.status is not Status.COMPLETED for run in page.runs)

    return asyncio.run(count())
