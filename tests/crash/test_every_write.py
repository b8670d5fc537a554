"""A crash before and after every write of every example workflow, on every store, and the recovery from it."""

from __future__ import annotations

import asyncio
import itertools
import random

import apsw
import pytest

from keepstep.engine.engine import Engine
from keepstep.errors import RunCancelled
from keepstep.model import Kind, RunQuery, Status
from keepstep.records.keys import Keys
from keepstep.stores.postgres.store import PostgresStore
from keepstep.testing.faults.crash import (
    CrashPoint,
    FilesDisk,
    MemoryDisk,
    SQLiteDisk,
    crash_at,
    crash_everywhere,
    life,
    live,
)
from keepstep.testing.faults.recorder import repeated
from tests.nightly import case
from tests.postgres import empty_store

from . import programs

pytestmark = pytest.mark.crash

#: The examples that `make test` crashes on every store; each of the others it crashes on its first store only.
ON_EVERY_STORE = {"sequence", "parent", "conversation", "booking", "tally", "undoing"}
#: A case that takes most of a minute.
LONG = ("undoing", "postgres")
CASES = [
    case(
        example,
        store,
        id=f"{example}-{store}",
        nightly=(example.name, store) == LONG or (place > 0 and example.name not in ON_EVERY_STORE),
    )
    for example in programs.EXAMPLES
    for place, store in enumerate(example.stores)
]


class PostgresDisk:
    """A schema that every life opens for itself, and that holds nothing before the first."""

    def __init__(self, clock, **options):
        with empty_store() as url:
            schema = url.rpartition("=")[2]
            self.url = f"{url}&options=-c%20search_path={schema}"  # tables of users lie beside ours
        self.clock, self.options = clock, options
        store = self.open()
        store._pool.run(lambda connection: connection.execute("DROP TABLE IF EXISTS ledger"))
        store.close()

    def open(self):
        return PostgresStore(self.url, clock=self.clock, **self.options)

    def mark_dead(self, store, workers):
        store.close()


class Bench:
    """Makes a new disk and a new effects file for each crash, and judges what is left on them."""

    def __init__(self, example, store, folder):
        self.example, self.store, self.folder = example, store, folder
        self.numbers = itertools.count()
        self.clock = programs.FastClock()
        self.options = {}

    def disk(self):
        self.place = self.folder / str(next(self.numbers))
        self.place.mkdir()
        if self.store == "memory":
            return MemoryDisk(self.clock, **self.options)
        if self.store == "postgres":
            return PostgresDisk(self.clock, **self.options)
        if self.store == "files":
            return FilesDisk(self.place / "runs", self.clock, power_loss="may_lose_last", **self.options)
        return SQLiteDisk(self.place / "runs.db", self.clock, power_loss="may_lose_last", **self.options)

    def recorder(self):
        return programs.record_to(self.place / "effects")

    async def judge(self, disk, lives):
        where = f"{self.example} on {self.store}, crashed {lives.point or 'never'}"
        assert lives.result == self.example.result, where
        effects = programs.EFFECTS.effects()
        assert not repeated(effects), f"{where}: a step with a checkpoint ran again"
        for place, count in programs.EFFECTS.counts().items():
            assert count <= 1 + lives.crashes, f"{where}: {place} began {count} times"
            if place[1].startswith("charge"):
                assert count == 1, f"{where}: an at-most-once step happened {count} times"
        store = disk.open()
        try:
            await self.judge_store(store, where)
        finally:
            store.close()

    async def judge_store(self, store, where):
        runs = store.list_runs(RunQuery(limit=1000)).runs
        assert sum(run.parent is not None for run in runs) == self.example.children, where
        async with Engine(store, worker=False) as engine:
            for run in runs:
                assert run.status.finished, f"{where}: {run.id} is {run.status}"
                assert run.worker is None, where
                await self.judge_history(await engine.get(run.id), run, where)
        if self.example.name == "booking":
            assert sorted(self.booked(store)) == [1, 2, 3], where

    def booked(self, store):
        if self.store == "postgres":
            return [number for (number,) in store._rows("SELECT number FROM ledger", ())]
        db = apsw.Connection(str(self.place / "runs.db"))
        try:
            return [number for (number,) in db.execute("SELECT number FROM ledger")]
        finally:
            db.close()

    async def judge_history(self, handle, run, where):
        history = await handle.checkpoints()  # verifies the chain
        kept = [seq for seq in range(1, run.seq + 1) if seq == 1 or seq >= run.kept_from]
        assert [one.seq for one in history] == kept, where
        assert history[-1].checksum == run.checksum, where
        assert history[-1].kind is Kind.RUN_FINISHED, where
        for kind in (Kind.RUN_STARTED, Kind.RUN_FINISHED):
            assert sum(one.kind is kind for one in history) == 1, f"{where}: {run.id} has not one {kind}"
        succeeded = [one.step for one in history if one.kind is Kind.STEP_COMPLETED]
        assert len(succeeded) == len(set(succeeded)), f"{where}: a step succeeded twice"
        if run.id == "main":
            assert set(self.example.done) <= set(succeeded), f"{where}: only {succeeded} were done"
        heard = [(one.step, one.value) for one in history if one.kind is Kind.SIGNAL and not one.step.startswith("ks:")]
        assert len(heard) == len({step for step, _ in heard}), f"{where}: a wait was answered twice"


@pytest.mark.parametrize("example, store", CASES)
def test_a_crash_at_any_write_changes_nothing(example, store, tmp_path):
    bench = Bench(example, store, tmp_path)

    async def main():
        return await crash_everywhere(bench.disk, example.play, bench.judge, recorder=bench.recorder, clock=bench.clock)

    assert asyncio.run(main()) >= 8


#: Between them they write everything that is encrypted: children, messages, a transaction, a successor.
SEALED = ("parent", "conversation", "booking", "continuing")


@pytest.mark.parametrize("example", [pytest.param(one, id=one.name) for one in programs.EXAMPLES if one.name in SEALED])
def test_a_crash_at_any_write_changes_nothing_when_runs_are_encrypted(example, tmp_path):
    bench = Bench(example, example.stores[0], tmp_path)
    keys = Keys("one", {"one": b"k" * 32})

    async def main():
        await crash_everywhere(
            bench.disk, example.play, bench.judge, recorder=bench.recorder, clock=bench.clock, keys=keys
        )

    asyncio.run(main())


@pytest.mark.parametrize(
    "example, fault",
    [
        case(example, fault, id=f"{example}-{fault}", nightly=fault == "lost" and example.name not in ON_EVERY_STORE)
        for example in programs.EXAMPLES
        for fault in ("failed", "lost")
    ],
)
def test_a_write_that_fails_once_changes_nothing(example, fault, tmp_path):
    """The store does not answer once, having written or not: the same life settles it, and goes on."""
    bench = Bench(example, "sqlite" if fault == "lost" else example.stores[0], tmp_path)
    bench.options = {"lease_seconds": 0.6}
    seen = []

    async def judge(disk, lives):
        seen.append(lives)
        await bench.judge(disk, lives)

    async def main():
        await crash_everywhere(
            bench.disk, example.play, judge, recorder=bench.recorder, clock=bench.clock, faults=[fault]
        )

    asyncio.run(main())
    assert len(seen) >= 6


def test_cancel_repeated_after_a_crash_does_not_cut_the_cleanup(tmp_path):
    async def main():
        disk, effects = MemoryDisk(), programs.record_to(tmp_path / "effects")
        async with life(disk) as (engine, _):
            await engine.open()
            handle = await engine.start(programs.cancelled, run_id="main")
            await programs.until(handle, Status.WAITING)
            await handle.cancel()
            await handle.cancel()
            while not effects.bodies("main", "clean_up"):  # noqa: ASYNC110 - written to a file
                await asyncio.sleep(0)
        async with life(disk) as (engine, _):
            await engine.open()
            handle = await engine.get("main")
            await handle.cancel()
            with pytest.raises(RunCancelled):
                await handle.result(timeout=60)
            done = [one.step for one in await handle.checkpoints() if one.kind is Kind.STEP_COMPLETED]
            assert done[:3] == ["add#1", "clean_up#1", "add#2"]

    asyncio.run(main())


@pytest.mark.parametrize("example, store", CASES)
def test_a_crash_inside_the_recovery_changes_nothing(example, store, tmp_path):
    """A sample of crash points, each followed by crashes at two more writes while the run is being recovered."""
    bench = Bench(example, store, tmp_path)
    draw = random.Random(f"{example}{store}")

    async def main():
        _, _, writes = await live(bench.disk(), example.play, None, bench.recorder(), clock=bench.clock)
        for _ in range(4):
            numbers = [draw.randint(2, len(writes)), draw.randint(2, 5), draw.randint(2, 5)]
            points = [CrashPoint(number, draw.choice(["before", "after"])) for number in numbers]
            disk, recorder = bench.disk(), bench.recorder()
            options = {"clock": bench.clock, "recovery_limit": 9}
            await crash_at(disk, example.play, bench.judge, points, recorder=recorder, **options)

    asyncio.run(main())
