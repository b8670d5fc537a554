"""Those who only look read from a streaming replica; whoever acts or decides uses the primary."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
import uuid
from functools import partial, wraps

import httpx
import psycopg
import pytest

import keepstep as ks
from keepstep.errors import DefinitionError
from keepstep.model import RunQuery
from keepstep.ports import looking
from keepstep.stores.postgres import replica as replicas
from keepstep.web.application import build
from tests.engine.world import until
from tests.postgres import QUICK, Server


def asynchronous(test):
    """Let a test that is a coroutine run on a loop of its own."""

    @wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


@ks.workflow(name="replica_waits")
async def waits() -> str:
    return str(await ks.wait_for("go"))


@pytest.fixture(scope="module")
def servers():
    """A primary and its streaming replica."""
    primary = Server.make(QUICK)
    replica = primary.replica()
    yield primary, replica
    replica.remove()
    primary.remove()


@pytest.fixture
def pair(servers, monkeypatch):
    """The URL of a new store on the primary, that of the replica, and a connection to the replica."""
    primary, replica = servers
    monkeypatch.setattr(replicas, "AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(replicas, "MARK_SECONDS", 0.05)
    with psycopg.connect(replica.dsn, autocommit=True) as control:
        yield f"{primary.dsn}?schema=s{uuid.uuid4().hex[:8]}", replica.dsn, control
    with psycopg.connect(replica.dsn, autocommit=True) as again:  # a test may have stopped the server
        again.execute("SELECT pg_wal_replay_resume()")


def pause(control):
    control.execute("SELECT pg_wal_replay_pause()")
    while control.execute("SELECT pg_get_wal_replay_pause_state()").fetchone() != ("paused",):
        time.sleep(0.005)


async def replayed(engine):
    """Wait until the replica has replayed what anybody has written until now, and has been looked at."""
    primary, replica = engine._url.partition("?")[0], engine._store_options["replica"]
    with psycopg.connect(primary, autocommit=True) as one, psycopg.connect(replica, autocommit=True) as other:
        (written,) = one.execute("SELECT pg_current_wal_lsn()").fetchone()
        reached = partial(other.execute, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", (written,))
        await until(lambda: reached().fetchone()[0], "the replay")
    with looking():
        await engine.call(engine.store.list_runs, RunQuery())


async def listed(engine):
    return {run.id for run in (await engine.list()).runs}


@asynchronous
async def test_lists_are_read_from_the_replica_and_acts_go_to_the_primary(pair):
    url, replica, control = pair
    async with ks.open(url, worker=False) as other, ks.open(url, worker=False, replica=replica) as engine:
        await other.start(waits, run_id="first")
        await replayed(engine)
        assert await listed(engine) == {"first"}
        pause(control)
        await other.start(waits, run_id="second")
        await engine.call(time.sleep, 0.1)
        assert await listed(engine) == {"first"}  # the replica has answered: it does not have the second run yet
        assert (await engine.get("second")).id == "second"
        assert (await engine.stored_run("second")) is not None
        with looking():  # whoever names a run that the replica lacks gets it
            assert (await engine.stored_run("second")) is not None
            named = await engine.call(engine.store.list_runs, RunQuery(ids=frozenset({"first", "second"})))
            assert len(named.runs) == 2


@asynchronous
async def test_an_own_act_is_seen_at_once_even_if_the_replica_stands_still(pair, caplog):
    url, replica, control = pair
    async with ks.open(url, worker=False, replica=replica) as engine:
        await engine.start(waits, run_id="first")
        await replayed(engine)
        pause(control)
        await engine.start(waits, run_id="second")
        assert await listed(engine) == {"first", "second"}
        assert "lists and pages are read from the primary: the replica" in caplog.text
        assert "is behind by more than it may be" in caplog.text


@asynchronous
async def test_a_replica_that_is_further_behind_than_allowed_is_left_until_it_has_caught_up(pair, caplog):
    url, replica, control = pair
    caplog.set_level(logging.INFO, "keepstep")
    options = {"worker": False, "replica": replica, "replica_lag_seconds": 0.05}
    async with ks.open(url, worker=False) as other, ks.open(url, **options) as engine:
        await other.start(waits, run_id="first")
        await replayed(engine)
        pause(control)
        await other.start(waits, run_id="second")
        await engine.call(time.sleep, 0.2)
        assert await listed(engine) == {"first", "second"}
        assert "read from the primary" in caplog.text
        control.execute("SELECT pg_wal_replay_resume()")
        until = time.monotonic() + 10
        while "again" not in caplog.text and time.monotonic() < until:
            assert await listed(engine) == {"first", "second"}
            await engine.call(time.sleep, 0.05)
        assert "read from the replica" in caplog.text


@asynchronous
async def test_a_delayed_replica_shows_own_acts_as_soon_as_it_has_them(pair):
    url, replica, control = pair
    async with ks.open(url, worker=False, replica=replica) as engine:
        await replayed(engine)
        control.execute("ALTER SYSTEM SET recovery_min_apply_delay = '150ms'")
        control.execute("SELECT pg_reload_conf()")
        try:
            for number in range(3):
                await engine.start(waits, run_id=f"run-{number}")
                assert f"run-{number}" in await listed(engine)
        finally:
            control.execute("ALTER SYSTEM RESET recovery_min_apply_delay")
            control.execute("SELECT pg_reload_conf()")


@asynchronous
async def test_readers_look_again_when_the_replica_has_what_the_primary_has_told(pair, monkeypatch):
    url, replica, control = pair
    monkeypatch.setattr(replicas, "CATCH_UP_SECONDS", 0.02)
    async with ks.open(url, worker=False) as other, ks.open(url, worker=False, replica=replica) as engine:
        store = engine.store
        await replayed(engine)
        pause(control)
        await engine.call(store.news, "", 0)
        seen = store._replica.times_caught_up(store._presence.received)
        await other.start(waits, run_id="first")
        until = time.monotonic() + 10
        while not store._replica._told and time.monotonic() < until:
            await engine.call(store.news, "", 0)
            await engine.call(time.sleep, 0.01)
        assert store._replica.times_caught_up(store._presence.received) == seen
        control.execute("SELECT pg_wal_replay_resume()")
        while store._replica._told and time.monotonic() < until:
            await engine.call(store.news, "", 0)
            await engine.call(time.sleep, 0.01)
        assert store._replica.times_caught_up(store._presence.received) > seen


@asynchronous
async def test_a_replica_that_is_away_is_replaced_by_the_primary_until_it_is_back(servers, pair, caplog):
    url, replica, _ = pair
    caplog.set_level(logging.INFO, "keepstep")
    async with ks.open(url, worker=False, replica=replica) as engine:
        await engine.start(waits, run_id="first")
        await replayed(engine)
        servers[1].stop()
        try:
            assert await listed(engine) == {"first"}
            assert "read from the primary" in caplog.text
            async with ks.open(url, worker=False, replica=replica) as late:  # which opens without it
                assert await listed(late) == {"first"}
        finally:
            servers[1].start()
        until = time.monotonic() + 10
        while "again" not in caplog.text and time.monotonic() < until:
            await listed(engine)
            await engine.call(time.sleep, 0.05)
        assert "read from the replica" in caplog.text


@asynchronous
async def test_what_is_no_replica_of_the_store_is_refused(pair):
    url, replica, _ = pair
    other = Server.make(QUICK)
    try:
        async with ks.open(other.dsn, worker=False), ks.open(url, worker=False):
            pass
        with pytest.raises(DefinitionError, match=r"is no replica of .*: it belongs to another store"):
            await ks.open(url, worker=False, replica=f"{other.dsn}?schema={url.rpartition('=')[2]}").__aenter__()
    finally:
        other.remove()
    with pytest.raises(DefinitionError, match="is no replica: that server takes writes"):
        await ks.open(url, worker=False, replica=url).__aenter__()
    with pytest.raises(DefinitionError, match="the replica must have the schema of the primary"):
        await ks.open(url, worker=False, replica=f"{replica}?schema=elsewhere").__aenter__()
    with pytest.raises(TypeError, match="'replica'"):
        await ks.open("memory:", worker=False, replica=replica).__aenter__()


@asynchronous
async def test_a_replica_without_the_last_upgrade_is_not_read(pair, caplog):
    url, replica, control = pair
    async with ks.open(url, worker=False, replica=replica) as engine:
        await replayed(engine)
        pause(control)
        primary, _, schema = url.partition("?schema=")
        with psycopg.connect(primary, autocommit=True) as connection:
            connection.execute(f"UPDATE {schema}.keepstep_meta SET value = '99' WHERE name = 'schema'")
        engine.store._replica.connections.close("")
        engine.store._replica.connections._gone = ""
        await listed(engine)
        assert "and the primary 99: it has not replayed that" in caplog.text


@asynchronous
async def test_a_page_that_has_just_acted_shows_the_new_state(pair):
    url, replica, control = pair
    async with ks.open(url, worker=False, replica=replica) as engine:
        await engine.start(waits, run_id="first")
        await replayed(engine)
        pause(control)
        transport = httpx.ASGITransport(build(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/api/v1/runs/first")).json()["status"] == "queued"
            done = await client.post("/api/v1/runs/first/cancel", json={"reason": "not needed"})
            assert done.status_code == 202, done.text
            assert (await client.get("/api/v1/runs/first")).json()["status"] == "cancelled"
            page = await client.get("/runs")
            assert page.status_code == 200
            assert "cancelled" in page.text


def test_commands_that_look_read_from_the_replica(pair):
    url, replica, _ = pair
    with ks.open(url, worker=False) as engine:
        engine.start(waits, run_id="first")
    command = [sys.executable, "-m", "keepstep", "list", "--store", url, "--replica", replica, "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "first" in shown.stdout
    assert "primary" not in shown.stderr
    wrong = subprocess.run([*command[:4], "--replica", replica], capture_output=True, text=True, check=False)
    assert wrong.returncode == 6
    assert "--replica is for a PostgreSQL store" in wrong.stderr


@asynchronous
async def test_an_act_is_decided_by_the_primary(pair):
    url, replica, control = pair
    async with ks.open(url, worker=False) as other, ks.open(url, worker=False, replica=replica) as engine:
        handle = await other.start(waits, run_id="first")
        await replayed(engine)
        pause(control)
        await handle.signal("go", 1)
        transport = httpx.ASGITransport(build(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            shown = (await client.get("/api/v1/runs/first")).json()
            assert shown["signals"] == 0
            body = {"name": "go", "payload": 2, "seq": shown["seq"], "signals": 0}
            refused = await client.post("/api/v1/runs/first/signal", json=body)
            assert refused.status_code == 409, refused.text
