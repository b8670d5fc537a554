"""A divided history: old records are dropped as tables, and no run loses a record."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from datetime import timedelta

import psycopg
import pytest

import keepstep as ks
from keepstep.care.retention import purge
from keepstep.care.verify import verify
from keepstep.errors import DefinitionError, StoreUnavailable
from keepstep.model import FINISHED, RunQuery
from keepstep.stores.migrations import scripts
from keepstep.stores.open import open_store
from keepstep.stores.postgres import parts
from tests.postgres import session_dsn


@ks.step
async def twice(number: int) -> int:
    return 2 * number


@ks.workflow(name="parts_adds")
async def adds(number: int) -> int:
    return await twice(number) + await twice(number + 1)


@ks.workflow(name="parts_waits")
async def waits() -> int:
    return await twice(await ks.wait_for("go"))


@pytest.fixture
def server():
    """The server, and the URL of a store that is not there yet."""
    schema = f"parts_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(session_dsn(), autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        connection.execute("SET client_min_messages = error")
        connection.execute(f"SET search_path TO {schema}")
        yield connection, f"{session_dsn()}?schema={schema}"
        connection.execute(f"DROP SCHEMA {schema} CASCADE")


def tables(connection):
    sql = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'keepstep_checkpoint'::regclass"
    return sorted(int(name.rpartition("_")[2]) for (name,) in connection.execute(sql))


def age(connection, days):
    """Let the parts of the history have begun so many days earlier."""
    connection.execute("UPDATE keepstep_part SET began_at = began_at - %s", (timedelta(days=days),))


def part_of(connection, run):
    return connection.execute("SELECT part FROM keepstep_head WHERE run = %s", (run,)).fetchone()[0]


def rows_of(connection, run):
    sql = "SELECT part, count(*) FROM keepstep_checkpoint WHERE run = %s GROUP BY part ORDER BY part"
    return dict(connection.execute(sql, (run,)).fetchall())


async def done(engine, workflow, *args, run_id):
    return await (await engine.start(workflow, *args, run_id=run_id)).result()


def test_records_of_new_runs_lie_in_the_newest_part_and_old_ones_stay_readable(server):
    connection, url = server

    async def play():
        async with ks.open(url) as engine:
            await done(engine, adds, 1, run_id="old")
            parked = await engine.start(waits, run_id="parked")
            assert await engine.care.divide_history(days=7)
            assert not await engine.care.divide_history(days=5)
            assert await done(engine, adds, 2, run_id="new") == 10
            assert (part_of(connection, "old"), part_of(connection, "new")) == (0, 1)
            await parked.signal("go", 4)
            assert await parked.result() == 8  # its records are all in the part in which it began
            assert [len(rows_of(connection, run)) for run in ("old", "parked", "new")] == [1, 1, 1]
            assert (await engine.get("old")).id == "old"
            assert len(await (await engine.get("old")).checkpoints()) > 2

    asyncio.run(play())
    with_store(url, lambda store: verify(store).sound or pytest.fail("damaged"))


def with_store(url, act):
    store = open_store(url)
    try:
        return act(store)
    finally:
        store.close()


def test_retention_drops_the_table_of_old_runs_and_moves_the_few_that_are_left(server, monkeypatch):
    connection, url = server

    async def play():
        async with ks.open(url, worker=True) as engine:
            await engine.care.divide_history(days=1)
            await asyncio.gather(*(done(engine, adds, number, run_id=f"run-{number}") for number in range(8)))
            waiting = await engine.start(waits, run_id="waits")
            while (await waiting.info()).status != "waiting":
                await engine.changed(1.0)
            age(connection, 2)
            assert (await engine.care.purge(dry_run=True)).parts == 0
            purged = await engine.care.purge()
            assert (purged.removed, purged.parts) == (8, 1)  # part 0 was empty; part 1 is closed for no hour yet
            assert tables(connection) == [1, 2]
            assert len(rows_of(connection, "run-3")) == 0 or rows_of(connection, "run-3").keys() == {1}
            age(connection, 2)
            assert (await engine.care.purge()).parts == 0  # of these few runs, one is too many to be moved
            assert tables(connection) == [1, 2, 3]
            monkeypatch.setattr(parts, "ONE_OF", 2)
            assert (await engine.care.purge()).parts == 1
            assert tables(connection) == [2, 3]
            assert rows_of(connection, "waits").keys() == {part_of(connection, "waits")}
            assert part_of(connection, "waits") > 1
            await waiting.signal("go", 21)
            assert await waiting.result() == 42

    asyncio.run(play())
    with_store(url, lambda store: verify(store).sound or pytest.fail("damaged"))


def test_a_removed_id_begins_anew_beside_the_records_that_it_has_left(server):
    connection, url = server

    async def play():
        async with ks.open(url) as engine:
            await engine.care.divide_history(days=1)
            assert await done(engine, adds, 1, run_id="again") == 6
            age(connection, 2)
            await engine.call(engine.store.drop_history)  # begins part 2
            await engine.care.purge()
            assert rows_of(connection, "again").keys() == {1}
            assert await engine.call(engine.store.check) == []  # what is left is no damage
            assert await done(engine, adds, 2, run_id="again") == 10
            assert rows_of(connection, "again").keys() == {1, 2}
            assert len(await (await engine.get("again")).checkpoints()) == rows_of(connection, "again")[2]
            await engine.care.purge()  # from the newest part, its rows are deleted
            assert rows_of(connection, "again").keys() == {1}
            assert await done(engine, adds, 3, run_id="again") == 14
            await engine.care.erase("again")
            assert rows_of(connection, "again") == {}

    asyncio.run(play())


def test_records_that_a_purge_has_left_can_be_erased_by_their_id(server):
    connection, url = server

    async def play():
        async with ks.open(url) as engine:
            await engine.care.divide_history(days=1)
            await done(engine, adds, 1, run_id="private")
            age(connection, 2)
            await engine.call(engine.store.drop_history)
            await engine.care.purge()
            assert rows_of(connection, "private") != {}
            await engine.care.erase("private")
            assert rows_of(connection, "private") == {}

    asyncio.run(play())


def test_a_run_that_a_worker_drives_is_neither_moved_nor_dropped(server, monkeypatch):
    connection, url = server
    monkeypatch.setattr(parts, "ONE_OF", 1)
    begun, goes = threading.Event(), threading.Event()

    @ks.step
    def slow() -> int:
        begun.set()
        goes.wait(30)
        return 1

    @ks.workflow(name="parts_driven")
    async def driven() -> int:
        return await slow() + await twice(1)

    async def play():
        async with ks.open(url, workflows=[driven, adds]) as engine:
            await engine.care.divide_history(days=1)
            await asyncio.gather(*(done(engine, adds, number, run_id=f"other-{number}") for number in range(4)))
            handle = await engine.start(driven, run_id="driven")
            await engine.call(begun.wait, 30)
            age(connection, 2)
            await engine.call(engine.store.drop_history)
            age(connection, 2)
            await engine.care.purge()  # the driven run alone is left
            assert part_of(connection, "driven") == 1
            assert 1 in tables(connection)
            goes.set()
            assert await handle.result() == 3
            assert rows_of(connection, "driven").keys() == {1}
            await engine.call(engine.store.drop_history)
            assert 1 not in tables(connection)
            assert await (await engine.get("driven")).result() == 3

    asyncio.run(play())
    with_store(url, lambda store: verify(store).sound or pytest.fail("damaged"))


def test_a_long_reader_delays_a_drop_but_no_commit_waits_behind_it(server, monkeypatch):
    connection, url = server
    monkeypatch.setattr(parts, "_PATIENCE_SECONDS", 1.0)
    waiting = "SELECT FROM pg_locks WHERE relation = 'keepstep_checkpoint'::regclass AND NOT granted"

    async def play():
        async with ks.open(url) as engine:
            await engine.care.divide_history(days=1)
            age(connection, 2)
            with psycopg.connect(session_dsn()) as reader:
                reader.execute(f"SELECT count(*) FROM {url.rpartition('=')[2]}.keepstep_checkpoint")
                drop = asyncio.ensure_future(engine.call(engine.store.drop_history))
                while not connection.execute(waiting).fetchall():
                    await engine.call(time.sleep, 0.005)
                assert await asyncio.wait_for(done(engine, adds, 1, run_id="runs-on"), 5) == 6
                with pytest.raises(StoreUnavailable, match="is always in use by other sessions"):
                    await drop
            assert await engine.call(engine.store.drop_history) == 1

    asyncio.run(play())


def test_other_stores_say_that_they_keep_their_history_as_a_whole():
    async def play():
        async with ks.open("memory:") as engine:
            with pytest.raises(DefinitionError, match="only a PostgreSQL store divides it"):
                await engine.care.divide_history()

    asyncio.run(play())


def test_a_role_gets_the_privileges_of_the_table_for_its_parts(server):
    connection, url = server
    with_store(url, lambda _: None)
    connection.execute("DO $$ BEGIN CREATE ROLE parts_reader; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    connection.execute("GRANT SELECT ON keepstep_checkpoint TO parts_reader")
    with_store(url, lambda store: store.divide_history(7))
    for table in ("keepstep_checkpoint", "keepstep_checkpoint_0", "keepstep_checkpoint_1"):
        for privilege, has in (("SELECT", True), ("INSERT", False)):
            sql = "SELECT has_table_privilege('parts_reader', %s, %s)"
            assert connection.execute(sql, (table, privilege)).fetchone() == (has,)


def test_a_purge_counts_finished_runs_as_before(server):
    _, url = server

    async def play():
        async with ks.open(url) as engine:
            await engine.care.divide_history()
            await asyncio.gather(*(done(engine, adds, number, run_id=f"run-{number}") for number in range(3)))

    asyncio.run(play())
    assert with_store(url, purge).removed == 3
    assert with_store(url, lambda store: store.list_runs(RunQuery(status=FINISHED))).runs == ()


def test_a_role_may_use_a_store_that_its_owner_has_upgraded(server):
    connection, url = server
    schema = url.rpartition("=")[2]
    connection.execute("DO $$ BEGIN CREATE ROLE parts_worker LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    connection.execute(f"CREATE SCHEMA {schema}")
    for script in scripts("postgres")[:7]:
        connection.execute(script.sql.encode())
    connection.execute("INSERT INTO keepstep_meta VALUES ('schema', '7')")
    connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO parts_worker")
    connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO parts_worker")
    connection.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO parts_worker")
    with_store(url, lambda _: None)

    async def play():
        async with ks.open(url.replace("postgres@", "parts_worker@", 1)) as engine:
            assert await done(engine, adds, 1, run_id="upgraded") == 6

    asyncio.run(play())
