"""A transactional step on PostgreSQL writes to tables of the same database in one commit with its checkpoint (K14)."""

import asyncio
import subprocess
import sys
import threading

import psycopg
import pytest

import keepstep as ks
from keepstep.stores.postgres.store import PostgresStore
from tests.engine.test_transactional import DYING, move
from tests.engine.world import World, steps_of, until_at_last_wait
from tests.postgres import empty_store, session_dsn


@pytest.fixture
def shop(monkeypatch):
    # A busy machine may stop a body for longer than the five seconds that it may take by default.
    monkeypatch.setitem(PostgresStore.__init__.__kwdefaults__, "within_seconds", 60.0)
    with empty_store() as url, psycopg.connect(session_dsn(), autocommit=True) as admin:
        schema = url.rpartition("=")[2]
        world = World("postgres", "live", f"{url}&options=-c%20search_path={schema}")
        world.store().close()
        admin.execute(f"SET search_path TO {schema}")
        admin.execute("CREATE TABLE account (name TEXT PRIMARY KEY, balance INTEGER)")
        admin.execute("INSERT INTO account VALUES ('a', 100), ('b', 0)")
        world.balances = lambda: dict(admin.execute("SELECT name, balance FROM account").fetchall())
        yield world
        admin.execute("DROP TABLE account")


async def test_writes_and_checkpoint_are_one_commit(shop):
    @ks.workflow
    async def paying():
        got = [await move(10), await move(5)]
        await ks.wait_for("go")
        return got

    engine = await shop.started(linger_seconds=60)
    await engine.start(paying, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await shop.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    run = await engine.get("r")
    assert shop.balances() == {"a": 85, "b": 15}
    await run.signal("go")
    assert await run.result(30) == [10, 5]
    assert await steps_of(run) == ["move#1", "move#2"]
    await engine.close()


async def test_failed_body_leaves_no_writes_and_no_update_is_lost(shop):
    @ks.workflow
    async def paying():
        try:
            await move(10, fail=True)
        except ks.StepFailed as error:
            return [error.error.type, sum(await ks.map(move, [1] * 10))]

    async with shop.engine() as engine:
        runs = [await engine.start(paying) for _ in range(3)]
        assert [await run.result(60) for run in runs] == [["ValueError", 10]] * 3
    assert shop.balances() == {"a": 70, "b": 30}


async def test_crash_inside_the_transaction_leaves_no_writes(shop):
    @ks.step(transactional=True)
    def add(tx):
        tx.execute("UPDATE account SET balance = balance + 1 WHERE name = 'b'")

    @ks.workflow
    async def adding():
        await add()

    died = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", DYING, shop.path], check=False)
    assert died.returncode == 9
    assert shop.balances()["b"] == 0
    async with shop.engine() as engine:
        run = await engine.get("r")
        await run.result(60)
        assert await steps_of(run) == ["add#1"]
    assert shop.balances()["b"] == 1


async def test_session_ended_inside_the_transaction_counts_once(shop):
    """The step is performed again in another transaction, and counts once."""
    inside, tries = threading.Event(), []

    @ks.step(transactional=True)
    def add(tx):
        tries.append(1)
        tx.execute("UPDATE account SET balance = balance + 1 WHERE name = 'b'")
        if len(tries) == 1:
            [(pid,)] = tx.execute("SELECT pg_backend_pid()")
            with psycopg.connect(session_dsn(), autocommit=True) as admin:
                admin.execute("SELECT pg_terminate_backend(%s)", (pid,))
            inside.set()
            tx.execute("SELECT 1")

    @ks.workflow
    async def adding():
        await add()

    async with shop.engine() as engine:
        await (await engine.start(adding)).result(60)
    assert len(tries) == 2
    assert shop.balances()["b"] == 1
