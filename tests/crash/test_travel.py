"""A crash before and after every write of a rewind and of a fork, on every store: what was kept is never done again."""

from __future__ import annotations

import asyncio
import itertools

import pytest

import keepstep as ks
from keepstep.care.verify import verify
from keepstep.engine.engine import Engine
from keepstep.model import RunQuery
from keepstep.ports import CURRENT
from keepstep.testing.faults.crash import FilesDisk, MemoryDisk, SQLiteDisk, crash_everywhere
from keepstep.workflows.definition import Workflow
from tests.nightly import cases

from .programs import FastClock

pytestmark = pytest.mark.crash

#: What bodies really did, by run, step and generation: it outlives every process.
ran: list[tuple[str, str, int]] = []


def note(step):
    scope = CURRENT.get()
    ran.append((scope.run.id, step, scope.run.generation))


@ks.step
async def one():
    note("one")
    return 1


@ks.step
async def two(number):
    note("two")
    return number + 1


async def child(number):
    note_free = await two(number)
    return note_free * 10


CHILD = Workflow(child, name="travelling child")


async def traveller():
    number = await one()
    word = await ks.wait_for("word")
    number = await two(number)
    return [number, word, await (await ks.start(CHILD, number))]


TRAVELLER = Workflow(traveller, name="traveller")


async def play(engine):
    """Start, go back once, fork; said again after a crash, what was done is not done again."""
    handle = await engine.start(TRAVELLER, run_id="main")
    if not (await handle.run()).status.finished:
        await _unless(handle.signal("word", "hello", id="w"), ks.AlreadyFinished)
    first = await handle.result()
    if not [one for one in await handle.checkpoints() if one.kind == "superseded"]:
        while True:
            try:
                await handle.rewind(step="wait_for:word")
                break
            except ks.RunConflict:  # the life before had it, and died with it
                await handle.result()
    second = await handle.result()
    fork = await engine.fork("main", step="two", run_id="fork")
    return [first, second, await fork.result()]


async def _unless(awaitable, error):
    try:
        await awaitable
    except error:
        return


class Bench:
    def __init__(self, store, folder):
        self.store, self.folder = store, folder
        self.numbers = itertools.count()
        self.clock = FastClock()

    def disk(self):
        ran.clear()
        place = self.folder / str(next(self.numbers))
        place.mkdir()
        if self.store == "memory":
            return MemoryDisk(self.clock)
        if self.store == "files":
            return FilesDisk(place / "runs", self.clock, power_loss="may_lose_last")
        return SQLiteDisk(place / "runs.db", self.clock, power_loss="may_lose_last")

    async def judge(self, disk, lives):
        where = f"on {self.store}, crashed {lives.point or 'never'}"
        answer = [2, "hello", 30]
        assert lives.result == [answer] * 3, where
        kept = [entry for entry in ran if entry[1] == "one" and (entry[0] == "fork" or entry[2])]
        assert not kept, f"{where}: what was kept ran again: {kept}"
        for entry in set(ran):
            assert ran.count(entry) <= 1 + lives.crashes, f"{where}: {entry} began {ran.count(entry)} times"
        store = disk.open()
        try:
            assert verify(store).sound, where
            async with Engine(store, worker=False, workflows=[]) as engine:
                await self.judge_history(engine, store, where)
        finally:
            store.close()

    async def judge_history(self, engine, store, where):
        history = await (await engine.get("main")).checkpoints()
        rewinds = [one for one in history if one.kind == "superseded"]
        assert len(rewinds) == 1, where
        done = [one.step for one in history if one.kind == "step completed"]
        assert (done.count("one#1"), done.count("two#1")) == (1, 2), where
        heard = [one for one in history if one.kind == "signal received"]
        assert len(heard) == 2, f"{where}: the signal was free again, once"
        runs = store.list_runs(RunQuery(limit=100)).runs
        assert all(run.status == "completed" for run in runs), where
        assert sorted(run.parent or "" for run in runs) == ["", "", "fork", "main", "main"], where


@pytest.mark.parametrize("store", cases(["memory", "sqlite", "files"], quick=["memory"]))
def test_a_crash_at_any_write_of_a_rewind_and_a_fork_changes_nothing(store, tmp_path):
    bench = Bench(store, tmp_path)

    async def main():
        options = {"workflows": [TRAVELLER, CHILD], "clock": bench.clock}
        return await crash_everywhere(bench.disk, play, bench.judge, **options)

    assert asyncio.run(main()) >= 30
