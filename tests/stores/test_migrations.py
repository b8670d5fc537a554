"""The schema: made from nothing, brought up to date, refused when it is newer."""

from __future__ import annotations

import apsw
import pytest

from keepstep.errors import SchemaMismatch
from keepstep.records.record import check_origin
from keepstep.stores import migrations
from keepstep.stores.migrations import Script, pending, scripts
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import SteppedClock, everything, started


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


def raw(path, sql, *values):
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(sql, values).fetchall()
    finally:
        connection.close()


def version(path):
    return raw(path, "SELECT value FROM keepstep_meta WHERE name = 'schema'")[0][0]


def test_scripts_are_numbered_from_one():
    assert [script.number for script in scripts("sqlite")] == list(range(1, len(scripts("sqlite")) + 1))
    assert pending("sqlite", 0, "x") == scripts("sqlite")
    assert pending("sqlite", len(scripts("sqlite")), "x") == []


def test_an_empty_file_gets_every_script(path):
    SQLiteStore(path).close()
    assert version(path) == str(len(scripts("sqlite")))
    tables = {name for (name,) in raw(path, "SELECT name FROM sqlite_schema WHERE type = 'table'")}
    own = {"run", "head", "checkpoint", "signal", "worker", "meta", "gate", "share", "document", "tag"}
    assert tables == {f"keepstep_{name}" for name in own} | {"sqlite_sequence"}


def test_a_store_of_this_schema_is_only_read_when_it_is_opened(path):
    SQLiteStore(path).close()
    before = path.read_bytes()
    SQLiteStore(path).close()
    assert path.read_bytes() == before


def test_a_store_of_the_first_schema_is_brought_up_to_date_and_keeps_its_runs(path, monkeypatch):
    """With one more script that is made up here: what the next real one will go through."""
    first = scripts("sqlite")
    newest = len(first)
    monkeypatch.setattr(migrations, "scripts", lambda _: first)
    store = SQLiteStore(path, clock=SteppedClock())
    started(store, "r").write()
    before = everything(store)
    store.close()
    assert version(path) == str(newest)
    second = Script(
        newest + 1, "colour", "ALTER TABLE keepstep_worker ADD COLUMN colour TEXT; CREATE TABLE keepstep_new (x);"
    )
    monkeypatch.setattr(migrations, "scripts", lambda _: [*first, second])
    store = SQLiteStore(path, clock=SteppedClock())
    assert everything(store) == before
    store.close()
    assert version(path) == str(newest + 1)
    assert raw(path, "SELECT colour FROM keepstep_worker") == []
    monkeypatch.setattr(migrations, "scripts", lambda _: first)
    with pytest.raises(SchemaMismatch, match=f"schema {newest + 1}"):
        SQLiteStore(path)


def test_a_file_of_the_very_first_schema_is_taken_up(path):
    """Its runs have no creator, and their chains begin with nothing."""
    connection = apsw.Connection(str(path))
    connection.execute(f"PRAGMA application_id = {0x4B656570}")
    connection.execute(scripts("sqlite")[0].sql)
    connection.execute("INSERT INTO keepstep_meta VALUES ('schema', '1')")
    connection.execute(
        "INSERT INTO keepstep_run (id, workflow, version, fingerprint, queue, priority, input, seed, tags, created_at)"
        " VALUES ('old', 'digest', '1', '', 'default', 0, '1', 's', '', 1e9)"
    )
    connection.execute(
        "INSERT INTO keepstep_head VALUES"
        " ('old', 1, 'digest', '1', 'default', 0, 'queued', 0, '', 0, NULL, 1e9, '', 0, 0, 1e9)"
    )
    connection.close()
    store = SQLiteStore(path)
    run = store.get_run("old")
    store.close()
    assert (run.created_by, run.checksum) == ("", "")
    check_origin(run)
    assert version(path) == str(len(scripts("sqlite")))


def test_a_script_that_fails_changes_nothing(path, monkeypatch):
    SQLiteStore(path).close()
    real = scripts("sqlite")
    broken = Script(len(real) + 1, "broken", "CREATE TABLE keepstep_new (x); SELECT no_such_function();")
    monkeypatch.setattr(migrations, "scripts", lambda _: [*real, broken])
    with pytest.raises(Exception, match="no_such_function"):
        SQLiteStore(path)
    monkeypatch.undo()
    assert version(path) == str(len(real))
    assert raw(path, "SELECT name FROM sqlite_schema WHERE name = 'keepstep_new'") == []
    SQLiteStore(path).close()


def test_a_newer_schema_is_refused_and_left_alone(path):
    SQLiteStore(path).close()
    raw(path, "UPDATE keepstep_meta SET value = '99' WHERE name = 'schema'")
    before = path.read_bytes()
    with pytest.raises(SchemaMismatch, match=r"schema 99.*newer Keepstep"):
        SQLiteStore(path)
    assert path.read_bytes() == before
