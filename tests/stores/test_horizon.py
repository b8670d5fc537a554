"""What holds vacuum back is named, with the statement that ends it; Keepstep itself holds no transaction for long."""

from __future__ import annotations

import asyncio
import io
import os

import psycopg
import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.care.transfer import export_runs
from keepstep.stores.open import open_store
from keepstep.stores.postgres import horizon
from tests.postgres import QUICK, Server


@ks.workflow(name="horizon_waits")
async def waits() -> str:
    return str(await ks.wait_for("go"))


@pytest.fixture(scope="module")
def server():
    made = Server.make((*QUICK, "max_prepared_transactions=5"))
    yield made
    made.remove()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(horizon, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(horizon, "MUCH_LOG", 0)


def examined(url):
    async def examine_it():
        async with ks.open(url, worker=False) as engine:
            return await examine(engine)

    found = asyncio.run(examine_it()).findings
    return [(one.message, one.advice) for one in found if one.code == "vacuum-held"]


def test_the_doctor_names_an_open_transaction_a_prepared_one_and_an_unused_slot(server):
    assert examined(server.dsn) == []
    with psycopg.connect(server.dsn, application_name="report") as old, psycopg.connect(server.dsn) as other:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        pid = old.execute("SELECT pg_backend_pid(), count(*) FROM pg_class").fetchone()[0]
        ((message, advice),) = examined(server.dsn)
        assert f"session {pid} (report, role postgres, idle in transaction) has a transaction that has" in message
        assert advice == f"let it end, or end it: SELECT pg_terminate_backend({pid})"
        old.rollback()
        other.execute("CREATE TABLE IF NOT EXISTS anything (x int)")
        other.execute("PREPARE TRANSACTION 'it''s left'")
        other.commit()
        ((message, advice),) = examined(server.dsn)
        assert "was prepared" in message
        assert "ROLLBACK PREPARED 'it''s left'" in advice
        other.autocommit = True
        other.execute("ROLLBACK PREPARED 'it''s left'")
        other.execute("SELECT pg_create_physical_replication_slot('lost', true)")
        other.execute("CREATE TABLE something (x int)")
        ((message, advice),) = examined(server.dsn)
        assert 'the replication slot "lost" keeps' in message
        assert advice.endswith("SELECT pg_drop_replication_slot('lost')")
        other.execute("SELECT pg_drop_replication_slot('lost')")
    assert examined(server.dsn) == []


class Watched(io.BytesIO):
    """A file that tells, with each line, whether this process has a transaction open."""

    def __init__(self, connection):
        super().__init__()
        self.connection, self.states = connection, set()

    def write(self, data):
        sql = "SELECT state FROM pg_stat_activity WHERE application_name = %s AND pid <> pg_backend_pid()"
        self.states |= {state for (state,) in self.connection.execute(sql, (f"keepstep {os.getpid()}",))}
        return super().write(data)


def test_no_transaction_is_open_between_the_pages_of_an_export(server):
    url = f"{server.dsn}?schema=exported"

    async def fill():
        async with ks.open(url, worker=False) as engine:
            for number in range(3):
                await engine.start(waits, run_id=f"run-{number}")

    asyncio.run(fill())
    store = open_store(url)
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        file = Watched(connection)
        assert export_runs(store, file, made_by="test").written == 3
    store.close()
    assert file.states == {"idle"}
