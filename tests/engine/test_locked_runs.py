"""Runs that another session of the server has locked: they wait alone, lose nothing, and hold up no neighbour."""

import asyncio
import contextlib
import random

import psycopg
import pytest

import keepstep as ks
from keepstep.engine import engine as engine_module
from keepstep.engine import journal
from keepstep.errors import StoreUnavailable
from keepstep.ports import Advance, Answer, Verdict
from keepstep.stores.memory import MemoryStore
from keepstep.stores.postgres import pool as postgres_connection
from tests.engine.world import World, steps_of, until
from tests.postgres import empty_store, session_dsn

NEIGHBOURS = 50


@pytest.fixture
def place(monkeypatch):
    """A store in PostgreSQL that waits for a lock for a short while only, and engines on it."""
    monkeypatch.setattr(postgres_connection, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(journal, "HELD_SECONDS", 0.02)
    monkeypatch.setattr(engine_module, "LAST_WRITE_SECONDS", 0.2)
    with empty_store() as url:
        yield World("postgres", "live", url)


class Lock:
    """A session of somebody's that locks the head of a run, and holds it until it is told to let go."""

    def __init__(self, place):
        self._head = f"{place.url.rpartition('=')[2]}.keepstep_head"
        self._session = contextlib.ExitStack()
        self.taken = asyncio.Event()

    def take(self, run="locked"):
        session = self._session.enter_context(psycopg.connect(session_dsn()))
        session.execute(f"SELECT 1 FROM {self._head} WHERE run = %s FOR UPDATE", (run,))
        self.taken.set()

    def release(self):
        self._session.close()


@pytest.fixture
def flow(place, effects):
    """A workflow, one of whose runs is locked in its third step, and the others go on from there."""
    lock = Lock(place)

    @ks.step
    async def work(name, number):
        effects.append((name, number))
        if number == 2:
            if name == "locked" and not lock.taken.is_set():
                lock.take()
            await lock.taken.wait()
        return number

    @ks.workflow
    async def working(name):
        one_by_one = [await work(name, number) for number in range(4)]
        return [*one_by_one, *await asyncio.gather(*(work(name, number) for number in range(4, 7)))]

    yield working, lock
    lock.release()


async def start(engine, working):
    held = await engine.start(working, "locked", run_id="locked")
    return held, [await engine.start(working, f"n{n}", run_id=f"n{n}") for n in range(NEIGHBOURS)]


@pytest.mark.parametrize("way", ["begun", "thread"])
async def test_neighbours_of_a_locked_run_go_on_and_it_follows_later(place, flow, effects, logged, way):
    working, lock = flow
    async with place.engine() as engine:
        if way == "thread":
            engine.journal._begin = None
        held, neighbours = await start(engine, working)
        for run in neighbours:
            assert await run.result(60) == list(range(7))
        await until(lambda: engine.journal._held, "the run that waits")
        assert await held.status() == "running"
        assert ("locked", 3) not in effects
        assert any("has locked the head of run 'locked'" in line for line in logged())
        with pytest.raises(ks.StoreUnavailable, match="has locked the head"):
            await held.signal("anything")
        later = await engine.start(working, "later")  # what is new is written as quickly as ever
        assert await later.result(60) == list(range(7))
        lock.release()
        assert await held.result(60) == list(range(7))
        assert sorted(await steps_of(held)) == [f"work#{n}" for n in range(1, 8)]
    assert set(effects.count_of().values()) == {1}
    assert not any("halted" in line for line in logged())


async def test_records_of_a_locked_run_keep_their_order(place):
    lock, both = Lock(place), []

    @ks.step
    async def first():
        lock.take()
        return 1

    @ks.step
    async def second():
        await until(lambda: lock.taken.is_set() and engine.journal._in_flight, "the commit of the first")
        both.append(2)
        return 2

    @ks.workflow
    async def working():
        return await asyncio.gather(first(), second())

    async with place.engine() as engine:
        run = await engine.start(working, run_id="locked")
        await until(lambda: both and engine.journal._held, "both results")
        lock.release()
        assert await run.result(60) == [1, 2]
        assert await steps_of(run) == ["first#1", "second#1"]


async def test_engine_closes_while_a_run_is_locked_and_the_next_resumes_it(place, flow, effects):
    working, lock = flow
    engine = await place.started(stop_seconds=0.2)
    _, neighbours = await start(engine, working)
    await asyncio.gather(*(run.result(60) for run in neighbours))
    await until(lambda: engine.journal._held, "the run that waits")
    await engine.close()
    async with place.engine() as engine:
        held = await engine.get("locked")
        await asyncio.to_thread(engine.worker.beat_once)
        assert await held.status() == "running"  # nobody takes it yet
        lock.release()
        assert await held.result(60) == list(range(7))
    counts = effects.count_of()
    assert counts.pop(("locked", 2)) == 2  # its result could not be written
    assert set(counts.values()) == {1}


async def test_commit_that_meets_a_lock_does_not_delay_a_close(place, flow, effects):
    working, lock = flow
    engine = await place.started()
    await engine.start(working, "locked", run_id="locked")
    await until(lambda: lock.taken.is_set() and engine.journal._in_flight, "the commit under way")
    await place.crash(engine)
    lock.release()
    async with place.engine() as engine:
        assert await (await engine.get("locked")).result(60) == list(range(7))
    assert effects[:2] == [("locked", 0), ("locked", 1)]


async def test_worker_gives_back_other_runs_while_one_is_locked(place):
    @ks.workflow
    async def waiting():
        await ks.wait_for("go")

    lock = Lock(place)
    async with place.engine(workflows=[waiting], linger_seconds=60.0) as engine:
        runs = {name: await engine.start(waiting, run_id=name) for name in ("locked", "other")}
        await until(lambda: len(engine.live) == 2, "both runs")
        contexts = [engine.live[name] for name in runs]
        await engine.journal.drained()
        engine.worker.stop_claiming()
        lock.take()
        for context in contexts:
            context.detach("for this test")
            engine.worker.give_back_later(context)

        async def given_back():
            return await runs["other"].status() == "queued"

        await until(given_back, "the other run's return")
        assert await runs["locked"].status() == "running"
        lock.release()


@pytest.mark.parametrize("mode", ["live", "replay"])
async def test_runs_end_the_same_however_often_commits_are_held_up(effects, monkeypatch, mode):
    """One change in three is answered so, at random: ends, parkings, children's words, start marks."""
    chance, commit = random.Random(7), MemoryStore.commit
    told = {"held": 0}

    def committed(self, changes, *, wait=True):
        held = [type(change) is Advance and chance.random() < 0.3 for change in changes]
        told["held"] += sum(held)
        free = [change for change, is_held in zip(changes, held, strict=True) if not is_held]
        answers = iter(commit(self, free, wait=wait))
        locked = StoreUnavailable("it is locked")
        return [Answer(Verdict.HELD, error=locked) if one else next(answers) for one in held]

    @ks.step
    async def work(name, number):
        effects.append((name, number))
        return number

    once = ks.step(work.fn, name="once", at_most_once=True)

    @ks.workflow
    async def child(name):
        return await work(name, 100)

    @ks.workflow
    async def parent(name):
        found = await asyncio.gather(*(work(name, number) for number in range(4)), once(name, 4))
        await ks.sleep(0.01)
        handle = await ks.start(child, f"child of {name}")
        return [*found, await handle.result(), await ks.wait_for("go"), await work(name, 5)]

    monkeypatch.setattr(journal, "HELD_SECONDS", 0.001)
    place = World("memory", mode, None)
    async with place.engine(linger_seconds=0.0) as engine:
        monkeypatch.setattr(MemoryStore, "commit", committed)
        runs = [await engine.start(parent, f"r{n}", run_id=f"r{n}") for n in range(20)]
        for run in runs:
            await run.signal("go", 7)
        for run in runs:
            assert await run.result(60) == [0, 1, 2, 3, 4, 100, 7, 5]
        monkeypatch.setattr(MemoryStore, "commit", commit)
    assert told["held"] > 20
    assert set(effects.count_of().values()) == {1}
