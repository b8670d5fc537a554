"""The PostgreSQL store behind a proxy that pools sessions or transactions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import psycopg
import pytest

import keepstep as ks
from keepstep.engine import engine as engine_module
from keepstep.errors import StoreError
from keepstep.model import Signal, WorkerInfo
from keepstep.ports import ClaimRequest, Send
from keepstep.stores.postgres import liveness, sessions
from keepstep.stores.postgres.store import PostgresStore
from keepstep.testing.store_contract import commit, started
from tests.engine.world import until
from tests.pooler import NAME, Pooler
from tests.postgres import empty_store, session_dsn

pytestmark = pytest.mark.skipif(
    "KEEPSTEP_TEST_DSN" in os.environ, reason="the proxy of the tests speaks no password and no encryption"
)


@pytest.fixture
def pooled():
    """A URL of the store that leads through a proxy."""
    with empty_store() as url, contextlib.ExitStack() as open_ones:
        PostgresStore(url).close()  # its schema is there

        def through(**how):
            proxy = Pooler(session_dsn(), **how)
            through.proxies.append(proxy)
            open_ones.callback(proxy.close)
            return url.replace(session_dsn(), proxy.dsn)

        through.proxies = []
        yield through


def advisory_locks():
    """Those that sessions of the proxy hold."""
    held = (
        "SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND application_name = %s"
    )
    with psycopg.connect(session_dsn()) as connection:
        return connection.execute(held, (NAME,)).fetchall()


async def work_on(url):
    """Have a few runs done by an engine."""

    @ks.step
    async def double(number):
        return 2 * number

    @ks.step(transactional=True)
    def negate(tx, number):
        return tx.execute("SELECT -(?::int)", (number,))[0][0]

    @ks.workflow(name="pooled")
    async def working():
        doubled = await asyncio.gather(*(double(number) for number in range(3)))
        await ks.sleep(0.1)
        return [*doubled, await negate(5)]

    async with ks.open(url, workflows=[working], linger_seconds=0.0, stop_seconds=1.0) as engine:
        runs = [await engine.start(working) for _ in range(5)]
        return [await run.result(60) for run in runs]


def test_a_proxy_that_pools_transactions_is_refused_with_what_to_do(pooled):
    with pytest.raises(StoreError) as told:
        PostgresStore(pooled(transactions=True))
    for words in ("shares its sessions between clients", "could be marked dead", "pool_mode = session", "proxy=true"):
        assert words in str(told.value)
    assert not advisory_locks()


def test_pooling_proxy_is_refused_even_with_several_pools(pooled, monkeypatch):
    """Several processes of a proxy, or a busy one: only what becomes of a lock tells."""
    monkeypatch.setattr(sessions, "_CLEAN_SECONDS", 0.1)
    with pytest.raises(StoreError, match="shares its sessions between clients"):
        PostgresStore(pooled(transactions=True, pools=2))


def test_pooling_proxy_is_refused_even_with_an_inherited_session(pooled, monkeypatch):
    looks = iter((False, True, None))
    monkeypatch.setattr(sessions, "_held_by_me", lambda *_: next(looks))
    with pytest.raises(StoreError, match="shares its sessions between clients"):
        PostgresStore(pooled(transactions=True))


def test_a_proxy_that_pools_sessions_changes_nothing(pooled):
    url = pooled(transactions=False)
    mine, theirs = PostgresStore(url), PostgresStore(url)
    mine.renew_leases(WorkerInfo("w1"))
    held = started(mine, "r")
    mine._presence.ask(lambda connection: None)
    assert held.write().seq == 2
    assert mine.begin_commit([held.change()]).wait()  # and so the statement is prepared there
    received, called = mine._presence.received, asyncio.Event()
    mine._presence.alerts.append(called.set)
    commit(mine, Send(Signal("r", "x")))  # nobody is told of what they did themselves
    mine._presence.ask(lambda connection: connection.execute("SELECT 1"))
    assert (mine._presence.received, mine._presence.received_by, called.is_set()) == (received, {}, False)
    commit(theirs, Send(Signal("r", "y")))
    theirs._presence.ask(lambda connection: None)
    mine._presence.ask(lambda connection: connection.execute("SELECT 1"))
    assert mine._presence.received_by == {"w1": 1}
    assert theirs.claim_runs(ClaimRequest("w2", frozenset({"digest"}), 10)).claims == ()
    for store in (mine, theirs):
        store.close()


@pytest.mark.parametrize("way, worker", [("begun", False), ("thread", False), ("begun", True)])
def test_an_engine_closes_though_the_server_does_not_answer_any_more(pooled, monkeypatch, way, worker):
    for name in ("LAST_WRITE_SECONDS", "DRAIN_SECONDS", "LEAVE_SECONDS"):
        monkeypatch.setattr(engine_module, name, 0.1)
    url = pooled(transactions=False)

    @ks.workflow(name="pooled")
    async def nothing():
        pass

    async def leave():
        engine = ks.Engine(f"{url}&connect_timeout=2", workflows=[nothing], worker=worker, stop_seconds=0.0)
        await engine.open()
        for _ in range(3):  # so that it is prepared
            await engine.start(nothing)
            await until(lambda: not engine.live, "the end of the run")
            await engine.journal.drained()
        if way == "thread":
            engine.journal._begin = None
        pooled.proxies[-1].freeze()
        starting = asyncio.ensure_future(engine.start(nothing, run_id="r"))
        await until(lambda: engine.journal._in_flight, "the commit under way")
        assert (engine.journal._underway is not None) is (way == "begun")
        monkeypatch.setattr(liveness, "PATIENCE_SECONDS", 0.5)
        await engine.close()
        with pytest.raises(StoreError):
            await starting

    before = threading.enumerate()
    asyncio.run(leave())
    left = [one.name for one in threading.enumerate() if one not in before]
    assert not [name for name in left if name.startswith(("keepstep-writer", "keepstep-reader"))]


@pytest.mark.parametrize("how", ["sessions", "transactions"])
def test_runs_are_done_through_a_proxy(pooled, how):
    url = pooled(transactions=True) + "&proxy=true" if how == "transactions" else pooled(transactions=False)
    assert asyncio.run(work_on(url)) == [[0, 2, 4, -5]] * 5
