"""Commits that the engine begins and hears of by their sockets, while those sockets are lost, held up and closed."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import threading
import time

import psycopg
import pytest

import keepstep as ks
from keepstep.engine import journal
from keepstep.errors import StoreUnavailable
from keepstep.ports import Advance
from keepstep.records.keys import Keys
from keepstep.stores.memory import MemoryStore
from keepstep.stores.postgres.store import PostgresStore
from tests.engine.world import World, steps_of, until
from tests.postgres import empty_store, session_dsn

KEYS = Keys("first", {"first": b"k" * 32})


@pytest.fixture
def place():
    """A store in PostgreSQL, and engines on it."""
    with empty_store() as url:
        yield World("postgres", "live", url)


@pytest.fixture
def admin():
    with psycopg.connect(session_dsn(), autocommit=True) as connection:
        yield connection


def sessions(admin):
    """The sessions of this process that are left; one that was closed may take a moment to end."""
    mine = f"keepstep {os.getpid()}"
    return admin.execute("SELECT pid FROM pg_stat_activity WHERE application_name = %s", (mine,)).fetchall()


def losing(monkeypatch, admin, every):
    """Have every so many commits lose their connection while they are under way; how many were begun, and lost so.

    The server ends it, or, so that the commit is made and nobody hears of it, this end does.
    """
    counted = {"begun": 0, "ended": 0, "cut": 0}
    begin = PostgresStore.begin_commit

    def begun(self, changes):
        underway = begin(self, changes)
        if underway is not None:
            counted["begun"] += 1
            if counted["begun"] % (2 * every) == 0:
                counted["ended"] += 1
                admin.execute("SELECT pg_terminate_backend(%s)", (underway._connection.info.backend_pid,))
            elif counted["begun"] % every == 0:
                counted["cut"] += 1
                with socket.socket(fileno=os.dup(underway.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)
        return underway

    monkeypatch.setattr(PostgresStore, "begin_commit", begun)
    return counted


@pytest.fixture
def nothing_of_asyncio(caplog):
    """What the event loop itself complains about: callbacks that failed, errors that nobody took."""
    yield
    assert not [one for one in caplog.records if one.name == "asyncio" and one.levelno >= logging.WARNING]


@pytest.mark.usefixtures("nothing_of_asyncio")
@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "encrypted"])
async def test_connections_that_end_under_commits_lose_and_repeat_nothing(place, admin, effects, monkeypatch, keys):
    @ks.step
    async def work(name, number):
        effects.append((name, number))
        return os.urandom(3_000_000).hex() if number == 9 else f"{name}{number}"

    once = ks.step(work.fn, name="once", at_most_once=True)

    @ks.workflow
    async def working(name, large):
        one_by_one = [await work(name, 0), await once(name, 1), await work(name, 2)]
        at_once = await asyncio.gather(*(work(name, number) for number in range(3, 6)))
        return [*one_by_one, *at_once, len(await work(name, 9)) if large else 0]

    counted = losing(monkeypatch, admin, every=3)
    async with place.engine(keys=keys) as engine:
        runs = [await engine.start(working, f"r{n}-", n == 0, run_id=f"r{n}") for n in range(70)]
        for n, run in enumerate(runs):
            told = [f"r{n}-{number}" for number in range(6)]
            assert await run.result(60) == [*told, 0 if n else 6_000_000]
        assert sorted(await steps_of(runs[1])) == ["once#1", *(f"work#{n}" for n in range(1, 6))]
    assert counted["ended"]
    assert counted["cut"]
    assert set(effects.count_of().values()) == {1}
    await until(lambda: not sessions(admin), "the end of every session")


async def test_blocked_commit_is_logged_and_awaited_on_close(place, admin, effects, monkeypatch, logged):
    locked = contextlib.ExitStack()
    head = f"{place.url.rpartition('=')[2]}.keepstep_head"

    @ks.step
    async def work(number):
        effects.append(number)
        if number == 3:
            other = locked.enter_context(psycopg.connect(session_dsn()))
            other.execute(f"SELECT 1 FROM {head} WHERE run = 'r' FOR UPDATE")
        return number

    @ks.workflow
    async def counting():
        return [await work(number) for number in range(6)]

    def free(engine):
        while not engine.journal._closed:
            time.sleep(0.001)
        locked.close()

    engine = await place.started()
    await engine.start(counting, run_id="r")
    await until(lambda: effects[-1:] == [3] and engine.journal._underway is not None, "the commit under way")
    monkeypatch.setattr(journal, "UNANSWERED_SECONDS", 0.0)
    await asyncio.to_thread(engine.worker.beat_once)
    assert any("a commit has been under way for" in line for line in logged())
    freeing = asyncio.get_running_loop().run_in_executor(None, free, engine)
    await place.crash(engine)
    await freeing
    async with place.engine() as engine:
        run = await engine.get("r")
        assert await run.result(60) == list(range(6))
        assert await steps_of(run) == [f"work#{n}" for n in range(1, 7)]
    assert effects == list(range(6))
    await until(lambda: not sessions(admin), "the end of every session")


@pytest.mark.parametrize("fails", [False, True], ids=["goes on", "goes away"])
async def test_damaged_run_is_found_off_the_loop_and_others_are_written(place, admin, effects, monkeypatch, fails):
    """And if the server goes away meanwhile, it is not asked once more for each of them."""
    table, loop = f"{place.url.rpartition('=')[2]}.keepstep_checkpoint", threading.get_ident()
    begun, threads, written = asyncio.Event(), [], []
    commit = PostgresStore.commit

    def committed(self, changes, *, wait=True):
        threads.append(threading.get_ident())
        written.append([one.run for one in changes if type(one) is Advance and one.rows])
        if fails and written[-1] == ["r1"] and written.count(["r1"]) == 1:
            raise StoreUnavailable("it has gone away")
        return commit(self, changes, wait=wait)

    @ks.step
    async def work(number):
        effects.append(number)
        if effects.count(number) == 1:
            await begun.wait()
        return number

    @ks.workflow
    async def working(number):
        return await work(number)

    async with place.engine() as engine:
        runs = [await engine.start(working, number, run_id=f"r{number}") for number in range(8)]
        await until(lambda: len(effects) == 8, "the steps")
        await engine.journal.drained()
        seq = engine.live["r0"].seq + 1
        admin.execute(f"INSERT INTO {table} VALUES ('r0', {seq}, 'x', '', NULL)")
        monkeypatch.setattr(PostgresStore, "commit", committed)
        begun.set()
        await until(lambda: "r0" not in engine.live, "the end of the damaged run")
        for number, run in list(enumerate(runs))[1:]:
            assert await run.result(60) == number
    assert loop not in threads
    next_written = written[written.index(["r1"]) + 1]
    assert (next_written == ["r2"]) is not fails


@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
@pytest.mark.parametrize("worker", [True, False], ids=["with worker", "without"])
def test_engine_dropped_during_a_commit_leaves_no_session(place, admin, worker):
    @ks.workflow
    async def nothing():
        pass

    table = f"{place.url.rpartition('=')[2]}.keepstep_run"

    async def forget():
        engine = await place.started(workflows=[nothing], worker=worker, lease_seconds=0.3)
        for _ in range(3):  # so that it is prepared
            await engine.start(nothing)
            await until(lambda: not engine.live, "the end of the run")
            await engine.journal.drained()
        with psycopg.connect(session_dsn()) as other:
            other.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
            starting = asyncio.ensure_future(engine.start(nothing))
            await until(lambda: engine.journal._underway is not None, "the commit under way")
            starting.cancel()

    async def gone():
        gc.collect()
        return not sessions(admin)

    asyncio.run(forget())
    place._open.clear()
    asyncio.run(until(gone, "the end of every session"))


async def test_loop_without_add_reader_commits_in_a_thread(place, effects, monkeypatch):
    @ks.step
    async def work(number):
        effects.append(number)
        return number

    @ks.workflow
    async def counting():
        return [await work(number) for number in range(6)]

    def watches_none(*words):
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", watches_none)
    async with place.engine() as engine:
        assert await (await engine.start(counting)).result(60) == list(range(6))
        assert engine.journal._begin is None
    assert effects == list(range(6))


async def test_encrypted_store_gets_as_few_commits_as_a_plain_one():
    @ks.step
    async def work():
        return 1

    @ks.workflow
    async def working():
        return await work()

    commits = []
    for keys in (None, KEYS):
        async with ks.Engine(MemoryStore(), keys=keys) as engine:
            runs = await asyncio.gather(*(engine.start(working) for _ in range(150)))
            assert [await run.result(60) for run in runs] == [1] * 150
            commits.append(engine.journal.commits)
    assert commits[0] == commits[1]
