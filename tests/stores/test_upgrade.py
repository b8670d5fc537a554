"""A store of an older schema is upgraded only after the workers that know no newer one have stopped."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import apsw
import psycopg
import pytest

from keepstep.errors import SchemaMismatch
from keepstep.stores import upgrade
from keepstep.stores.migrations import scripts
from keepstep.stores.open import open_store
from keepstep.stores.os_locks import WorkerLocks
from tests.postgres import session_dsn, store_url

FOLDER = Path(__file__).parents[1] / "fixtures"
OLD = FOLDER / "sqlite_schema_4.sql"
OLD_ON_SERVER = [FOLDER / f"postgres_schema_{number}.sql" for number in (1, 2)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(upgrade, "UPGRADE_SECONDS", 0.5)
    monkeypatch.setattr(upgrade, "LOOK_SECONDS", 0.02)


@pytest.fixture
def old(tmp_path):
    """A SQLite store of an older schema with one worker, whose lock is held here as its process would hold it."""
    path = tmp_path / "runs.db"
    database = apsw.Connection(str(path))
    database.execute(OLD.read_text(encoding="utf-8"))
    now = time.time()
    database.execute(
        "INSERT INTO keepstep_worker (id, host, pid, started_at, renewed_at, boot, boot_seconds, workflows, progress)"
        " VALUES ('worker-old', 'shop', 4711, ?, ?, 'b', 1.0, '[]', '{}')",
        (now, now),
    )
    database.close()
    locks = WorkerLocks(f"{path}-workers")
    assert locks.take("worker-old")
    yield path, locks
    locks.close()


def schema_of(path):
    database = apsw.Connection(str(path))
    [(version,)] = database.execute("SELECT value FROM keepstep_meta WHERE name = 'schema'").fetchall()
    database.close()
    return int(version)


def test_an_upgrade_names_the_older_workers_and_changes_nothing(old, caplog):
    path, _ = old
    with pytest.raises(SchemaMismatch, match=r"worker-old \(pid 4711 on shop, since .* UTC\); stop them, then open"):
        open_store(path)
    assert "waiting up to 0.5 s for them to stop" in caplog.text
    assert schema_of(path) == 4


def test_an_upgrade_begins_when_the_older_workers_have_stopped(old, monkeypatch):
    path, locks = old
    monkeypatch.setattr(upgrade, "UPGRADE_SECONDS", 30)
    timer = threading.Timer(0.2, locks.remove, ["worker-old"])
    timer.start()
    open_store(path).close()
    timer.join()
    assert schema_of(path) == len(scripts("sqlite"))


def test_a_worker_that_died_holds_up_no_upgrade(old):
    path, locks = old
    locks.close()  # as the system does when a process dies
    open_store(path).close()
    assert schema_of(path) == len(scripts("sqlite"))


def test_a_store_of_the_newest_schema_is_opened_beside_living_workers(old):
    path, locks = old
    locks.close()
    open_store(path).close()
    assert locks.take("worker-new")
    open_store(path).close()


def test_waiting_ends_when_another_process_has_upgraded_the_store():
    looks = iter([True, True, False])
    workers = [upgrade.OldWorker("w", "h", 1, 0.0)]
    upgrade.wait_for_old_workers("x", lambda: next(looks), lambda: workers)


@pytest.mark.parametrize("source", OLD_ON_SERVER, ids=lambda path: path.stem)
def test_a_server_is_upgraded_when_the_lease_of_older_workers_has_ended(source):
    schema = f"upgrade_{os.getpid()}"
    with psycopg.connect(session_dsn(), autocommit=True) as database:
        database.execute(f"CREATE SCHEMA {schema}; SET search_path TO {schema}")
        try:
            database.execute(source.read_bytes())
            database.execute(
                "INSERT INTO keepstep_worker"
                " (id, host, pid, started_at, renewed_at, boot, boot_seconds, workflows, progress)"
                " VALUES ('worker-old', 'shop', 4711, now(), now(), 'b', 1.0, '[]', '{}')"
            )
            with pytest.raises(SchemaMismatch, match=r"worker-old \(pid 4711 on shop, since"):
                open_store(store_url(schema))
            database.execute("UPDATE keepstep_worker SET renewed_at = now() - interval '1 minute'")
            open_store(store_url(schema)).close()
            [(version,)] = database.execute("SELECT value FROM keepstep_meta WHERE name = 'schema'").fetchall()
            assert int(version) == len(scripts("postgres"))
        finally:
            database.execute(f"DROP SCHEMA {schema} CASCADE")
