"""A transactional step writes to tables of the store's own file in one commit with its checkpoint (K14)."""

import asyncio
import subprocess
import sys

import apsw
import pytest

import keepstep as ks
from keepstep.stores.sqlite.store import SQLiteStore
from tests.engine.world import World, steps_of, until_at_last_wait

pytestmark = pytest.mark.parametrize("mode", ["live", "replay"])


@pytest.fixture
def shop(tmp_path, mode, monkeypatch):
    # A busy machine may stop a body for longer than the second that it may take by default.
    monkeypatch.setitem(SQLiteStore.__init__.__kwdefaults__, "within_seconds", 60.0)
    world = World("sqlite", mode, tmp_path / "runs.db")
    world.store().close()  # Keepstep makes the file; tables of others may join it
    connection = apsw.Connection(str(world.path))
    for statement in (
        "CREATE TABLE account (name TEXT PRIMARY KEY, balance INTEGER)",
        "INSERT INTO account VALUES ('a', 100), ('b', 0)",
    ):
        connection.execute(statement).fetchall()
    connection.close()
    return world


def balances(world):
    connection = apsw.Connection(str(world.path))
    try:
        return dict(connection.execute("SELECT name, balance FROM account").fetchall())
    finally:
        connection.close()


@ks.step(transactional=True)
def move(tx, amount, fail=False):
    tx.execute("UPDATE account SET balance = balance - ? WHERE name = 'a'", (amount,))
    if fail:
        raise ValueError("half-way")
    tx.execute("UPDATE account SET balance = balance + ? WHERE name = 'b'", (amount,))
    return amount


async def test_writes_and_checkpoint_are_one_commit(shop):
    @ks.workflow
    async def paying():
        got = [await move(10), await move(5)]
        await ks.wait_for("go")
        return got

    engine = await shop.started(linger_seconds=60)
    await engine.start(paying, run_id="r")
    await until_at_last_wait(engine, "r")
    for _ in range(2):
        engine = await shop.crash_and_recover(engine, linger_seconds=60)
        await until_at_last_wait(engine, "r")
    run = await engine.get("r")
    assert balances(shop) == {"a": 85, "b": 15}
    await run.signal("go")
    assert await run.result(30) == [10, 5]
    assert await steps_of(run) == ["move#1", "move#2"]
    await engine.close()
    await shop.end()


async def test_failed_body_leaves_no_writes(shop):
    @ks.workflow
    async def paying():
        try:
            await move(10, fail=True)
        except ks.StepFailed as error:
            return [error.error.type, await move(1)]

    async with shop.engine() as engine:
        run = await engine.start(paying)
        assert await run.result(30) == ["ValueError", 1]
        assert [one.step for one in await run.checkpoints(failed=True)] == ["move#1"]
    assert balances(shop) == {"a": 99, "b": 1}


async def test_retried_body_counts_once(shop):
    tries = []

    @ks.step(transactional=True, retry=ks.Retry(attempts=3, base_seconds=0))
    def flaky(tx):
        tries.append(1)
        tx.execute("UPDATE account SET balance = balance + 1 WHERE name = 'b'")
        if len(tries) < 3:
            raise ConnectionError
        return len(tries)

    @ks.workflow
    async def paying():
        return await flaky()

    async with shop.engine() as engine:
        assert await (await engine.start(paying)).result(30) == 3
    assert balances(shop)["b"] == 1


DYING = """
import asyncio, os, sys
import keepstep as ks

@ks.step(transactional=True)
def add(tx):
    tx.execute("UPDATE account SET balance = balance + 1 WHERE name = 'b'")
    os._exit(9)

@ks.workflow
async def adding():
    await add()

async def main():
    async with ks.open(sys.argv[1]) as engine:
        await (await engine.start(adding, run_id="r")).result()

asyncio.run(main())
"""


async def test_crash_inside_the_transaction_leaves_no_writes(shop):
    """The process dies after the body and before the commit: nothing of it is there, and the step runs once more."""

    @ks.step(transactional=True)
    def add(tx):
        tx.execute("UPDATE account SET balance = balance + 1 WHERE name = 'b'")

    @ks.workflow
    async def adding():
        await add()

    died = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", DYING, str(shop.path)], check=False)
    assert died.returncode == 9
    assert balances(shop)["b"] == 0
    async with shop.engine() as engine:
        run = await engine.get("r")
        await run.result(30)
        assert await steps_of(run) == ["add#1"]
    assert balances(shop)["b"] == 1


async def test_many_at_once_lose_no_update(shop):
    @ks.workflow
    async def paying():
        return sum(await ks.map(move, [1] * 20))

    async with shop.engine() as engine:
        runs = [await engine.start(paying) for _ in range(3)]
        assert [await run.result(60) for run in runs] == [20, 20, 20]
    assert balances(shop) == {"a": 40, "b": 60}


async def test_unstorable_result_leaves_no_writes(shop):
    @ks.step(transactional=True)
    def bad(tx):
        tx.execute("UPDATE account SET balance = balance + 1 WHERE name = 'b'")
        return object()

    @ks.workflow
    async def paying():
        await bad()

    async with shop.engine() as engine:
        with pytest.raises(ks.RunFailed, match="NotSerializable"):
            await (await engine.start(paying)).result(30)
    assert balances(shop)["b"] == 0


async def test_verb_inside_the_transaction_is_refused(shop):
    @ks.step(transactional=True)
    def bad(tx):
        ks.sleep(1)

    @ks.workflow
    async def paying():
        await bad()

    async with shop.engine() as engine:
        with pytest.raises(ks.RunFailed, match=r"ks\.sleep is called inside step"):
            await (await engine.start(paying)).result(30)


async def test_store_without_transactions_refuses_the_step(mode):
    @ks.workflow
    async def paying():
        await move(1)

    async with ks.Engine("memory:", replay_always=mode == "replay") as engine:
        with pytest.raises(ks.RunFailed, match="which store 'memory:' does not support; use SQLite or PostgreSQL"):
            await (await engine.start(paying)).result(30)


async def test_async_body_is_refused(mode):
    with pytest.raises(ks.DefinitionError, match="plain def"):

        @ks.step(transactional=True)
        async def bad(tx):
            pass


async def test_cancelled_step_has_both_writes_and_checkpoint_or_neither(shop):
    """Whatever came first, the writes are there exactly when a checkpoint says so."""

    @ks.workflow
    async def paying():
        task = asyncio.create_task(move(10))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    async with shop.engine() as engine:
        run = await engine.start(paying)
        assert await run.result(30) is True
        moved = balances(shop)["b"] == 10
        assert moved == ("move#1" in await steps_of(run))
