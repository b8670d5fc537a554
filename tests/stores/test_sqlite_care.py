"""The care of a SQLite store: what is removed for good, what is found wrong and mended, what cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from unittest.mock import Mock

import apsw
import pytest

import keepstep
from keepstep.care.verify import verify
from keepstep.errors import EraseUnfinished, StoreUnavailable
from keepstep.model import Kind, Signal, Status, WorkerInfo
from keepstep.ports import Create, Send, Verdict
from keepstep.records.record import Record, born
from keepstep.stores import migrations, rules
from keepstep.stores.migrations import scripts
from keepstep.stores.sqlite import writer as sqlite_connection
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import Holder, SteppedClock, commit, everything, queued, record, started


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


@pytest.fixture
def store(path):
    store = SQLiteStore(path, clock=SteppedClock())
    store.renew_leases(WorkerInfo("w1"))
    yield store
    store.close()


# -- nothing is left ---------------------------------------------------------------------------------------------------


def fill(store):
    """A run full of a word, among others that make its pages split and move."""
    writer = started(store, "told", input=b'"hush-input"', tags={"hush-tag": "1"})
    others = [started(store, f"other-{n:03}") for n in range(20)]
    for n in range(40):
        writer.write(record("told", value=b'"hush-%d%s"' % (n, b"-hush" * 60)))
        for other in others:
            other.write(record(other.run, value=b'"%s"' % (b"x" * (n * 7 % 300))))
        commit(store, Send(Signal("told", "word", b'"hush-signal-%d"' % n)))
        commit(store, Create(queued(f"more-{n}", input=b'"%s"' % (b"y" * 400))))
    store.renew_leases(WorkerInfo("w1", progress={"told": b'"hush-progress"'}))
    writer.write(status=Status.COMPLETED, release=True)


def files_that_hold(path, word):
    return [one.name for one in path.parent.rglob("*") if one.is_file() and word in one.read_bytes()]


def test_nothing_of_a_scrubbed_run_is_left_in_any_file(store, path):
    fill(store)
    assert files_that_hold(path, b"hush")
    before = everything(store)
    del before["told"]
    assert store.delete_runs(["told"], scrub=True) == 1
    assert files_that_hold(path, b"hush") == []
    assert everything(store) == before
    store.close()
    assert files_that_hold(path, b"hush") == []


def test_a_removal_without_scrubbing_may_leave_something(store, path):
    """Or the test above would hold for want of anything to scrub."""
    fill(store)
    assert store.delete_runs(["told"]) == 1
    assert files_that_hold(path, b"hush")


def test_run_that_is_still_read_is_scrubbed_the_next_time(path):
    store = SQLiteStore(path, clock=SteppedClock(), busy_seconds=0.05)
    store.renew_leases(WorkerInfo("w1"))
    fill(store)
    reader = SQLiteStore(path)
    connection = reader._reader._connection
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM keepstep_run").fetchall()
    with pytest.raises(StoreUnavailable, match="do it again"):
        store.delete_runs(["told"], scrub=True)
    assert store.get_run("told") is None
    connection.execute("COMMIT")
    reader.close()
    assert store.delete_runs(["told"], scrub=True) == 1, "what is scrubbed only now counts now"
    assert store.delete_runs(["told"], scrub=True) == 0
    assert files_that_hold(path, b"hush") == []
    store.close()


def test_large_store_reports_a_removed_run_as_not_yet_erased(store, path, monkeypatch):
    monkeypatch.setattr(rules, "REWRITTEN_AT_ONCE", 0)
    fill(store)
    rewrites = Mock(wraps=store._writer.rewrite)
    monkeypatch.setattr(store._writer, "rewrite", rewrites)
    for _ in range(2):  # asked again, it does not claim more
        with pytest.raises(EraseUnfinished, match=r"not yet erased.*keepstep erase --rewrite"):
            store.delete_runs(["told"], finished=True, scrub=True)
    assert store.get_run("told") is None
    assert not rewrites.called
    assert files_that_hold(path, b"hush")
    assert store.delete_runs(["nobody"], scrub=True) == 0


def test_one_rewrite_finishes_every_erasure(store, path, monkeypatch):
    fill(store)
    with monkeypatch.context() as patch:
        patch.setattr(rules, "REWRITTEN_AT_ONCE", 0)
        for name in ("told", "more-1"):
            with pytest.raises(EraseUnfinished):
                store.delete_runs([name], scrub=True)
    before = everything(store)
    assert store.rewrite() == 2
    assert files_that_hold(path, b"hush") == []
    assert everything(store) == before
    assert store.rewrite() == 0


def test_run_removed_during_a_rewrite_is_not_counted_as_erased(store, monkeypatch):
    monkeypatch.setattr(rules, "REWRITTEN_AT_ONCE", 0)

    def removed(name):
        commit(store, Create(queued(name)))
        with pytest.raises(EraseUnfinished):
            store.delete_runs([name], scrub=True)

    removed("told")
    with monkeypatch.context() as patch:
        patch.setattr(store._writer, "rewrite", lambda: [removed("told"), removed("later")])
        assert store.rewrite() == 1
    assert store.rewrite() == 2


def test_others_write_while_an_erasure_waits_for_a_reader(path, monkeypatch):
    store, other = SQLiteStore(path, busy_seconds=5.0), SQLiteStore(path, busy_seconds=0.1)
    commit(store, Create(queued("told")))
    reading, written = other._reader._connection, []
    reading.execute("BEGIN")
    reading.execute("SELECT count(*) FROM keepstep_run").fetchall()

    def pause(seconds):
        written.append(commit(other, Create(queued(f"new-{len(written)}"))).verdict)
        if len(written) == 2:
            reading.execute("COMMIT")

    monkeypatch.setattr(sqlite_connection, "time", Mock(sleep=pause, monotonic=time.monotonic))
    assert store.delete_runs(["told"], scrub=True) == 1
    assert written == [Verdict.DONE, Verdict.DONE]
    store.close()
    other.close()


# -- what does not fit, and its mending ------------------------------------------------------------------------------


def damage(path, *statements):
    database = apsw.Connection(str(path))
    for statement in statements:
        database.execute(statement)
    database.close()


def rows(path, sql):
    database = apsw.Connection(str(path))
    try:
        return database.execute(sql).fetchall()
    finally:
        database.close()


@pytest.fixture
def sound(store):
    """Three runs with chains that hold: one done, one parked with signals, one queued."""
    for name in ("done", "waits"):
        first = Record(name, Kind.RUN_STARTED.value, worker="w1", finished_at=queued("x").created_at)
        run = queued(name, status=Status.RUNNING, worker="w1", epoch=1, due_at=None, priority=3)
        create = born(run, first)
        store.commit([create])
        writer = Holder(store, create.run)
        writer.write(record(name))
        if name == "done":
            writer.write(record(name, Kind.RUN_FINISHED, b"7"), status=Status.COMPLETED, release=True)
        else:
            commit(store, Send(Signal(name, "a", id="1")))
            commit(store, Send(Signal(name, "b")))
            writer.write(record(name), status=Status.WAITING, release=True, wakes=("x",))
    store.commit([born(queued("later"))])
    assert verify(store).sound
    return store


#: What may be wrong, the kind of flaw, whom it is about, and whether the store is sound once it is mended.
FLAWS = {
    "checkpoints of no run": (
        "DELETE FROM keepstep_run WHERE id = 'done'",
        {"orphan": "done", "dangling": "done"},
        True,
    ),
    "signals of no run": (
        "INSERT INTO keepstep_signal VALUES (99, 'ghost', 1, 'a', '1', '', '', 1.0, '')",
        {"orphan": "ghost"},
        True,
    ),
    "a head without its run": ("DELETE FROM keepstep_run WHERE id = 'later'", {"dangling": "later"}, True),
    "a finished run without its head": ("DELETE FROM keepstep_head WHERE run = 'done'", {"dangling": "done"}, True),
    "a run without its head": ("DELETE FROM keepstep_head WHERE run = 'waits'", {"dangling": "waits"}, True),
    "a run without head and records": ("DELETE FROM keepstep_head WHERE run = 'later'", {"dangling": "later"}, False),
    "a head of another workflow": (
        "UPDATE keepstep_head SET workflow = 'other' WHERE run = 'done'",
        {"index": "done"},
        True,
    ),
    "a head of another priority": (
        "UPDATE keepstep_head SET priority = 9 WHERE run = 'waits'",
        {"index": "waits"},
        True,
    ),
    "a head that counts too few signals": (
        "UPDATE keepstep_head SET signals = 1 WHERE run = 'waits'",
        {"index": "waits"},
        True,
    ),
    "an index that is gone": ("DROP INDEX keepstep_head_due", {"index": "keepstep_head_due"}, True),
    "a unique index that is gone": (
        "DROP INDEX keepstep_checkpoint_place",
        {"index": "keepstep_checkpoint_place"},
        True,
    ),
    "a head that cannot be read": ("UPDATE keepstep_head SET status = 'flying' WHERE run = 'waits'", {}, True),
}


@pytest.mark.parametrize("what", FLAWS)
def test_a_flaw_is_found_mended_and_then_gone(sound, path, what):
    statement, expected, whole = FLAWS[what]
    damage(path, statement)
    found = sound.check()
    assert {flaw.kind: flaw.about for flaw in found} == expected
    assert not any(flaw.mended for flaw in found)
    assert not verify(sound).sound
    mended = sound.check(mend=True)
    assert mended
    assert all(flaw.mended for flaw in mended) is whole
    assert verify(sound).sound is whole
    assert [flaw.about for flaw in sound.check()] == ([] if whole else ["later"])


def test_rows_that_are_put_aside_are_kept_as_they_were(sound, path):
    before = rows(path, "SELECT run, seq, kind, record, body FROM keepstep_checkpoint WHERE run = 'done'")
    damage(path, "DELETE FROM keepstep_run WHERE id = 'done'")
    sound.check(mend=True)
    assert rows(path, "SELECT count(*) FROM keepstep_checkpoint WHERE run = 'done'") == [(0,)]
    kept = "SELECT run, seq, kind, record, body FROM keepstep_aside_checkpoint"
    assert rows(path, kept) == before
    assert rows(path, "SELECT run, status FROM keepstep_aside_head") == [("done", "completed")]


def test_more_is_put_aside_after_the_schema_has_grown(sound, path):
    damage(path, "INSERT INTO keepstep_signal VALUES (98, 'ghost', 1, 'a', '1', '', '', 1.0, '')")
    sound.check(mend=True)
    damage(
        path,
        "ALTER TABLE keepstep_signal ADD COLUMN colour TEXT",
        "INSERT INTO keepstep_signal VALUES (99, 'ghost', 1, 'b', '1', '', '', 1.0, '', 'red')",
    )
    sound.check(mend=True)
    kept = rows(path, "SELECT name, colour FROM keepstep_aside_signal ORDER BY name")
    assert kept == [("a", None), ("b", "red")]


def test_a_run_whose_head_was_lost_waits_for_a_person_or_is_as_it_ended(sound, path):
    damage(path, "DELETE FROM keepstep_head")
    damage(path, "DELETE FROM keepstep_run WHERE id = 'later'")
    sound.check(mend=True)
    found = {run.id: run for run in (sound.get_run("done"), sound.get_run("waits"))}
    assert found["done"].status is Status.COMPLETED
    assert found["done"].output == b"7"
    assert found["waits"].status is Status.SET_ASIDE
    assert "its head was lost" in found["waits"].error.message
    assert found["waits"].signals == 2
    assert found["waits"].epoch > 1


def test_a_head_whose_worker_lives_is_left_to_it(sound, path):
    writer = started(sound, "busy")
    damage(path, "UPDATE keepstep_head SET recoveries = 'many' WHERE run = 'busy'")
    [flaw] = sound.check(mend=True)
    assert (flaw.about, flaw.mended) == ("busy", "")
    assert writer.worker == "w1"


def test_an_index_that_lost_entries_is_made_again(sound, path):
    """As a page that was not written leaves it."""
    database = apsw.Connection(str(path))
    database.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
    database.execute("PRAGMA writable_schema = ON")
    [(sql,)] = database.execute("SELECT sql FROM sqlite_schema WHERE name = 'keepstep_head_status'").fetchall()
    database.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'keepstep_head_status'", (sql + " WHERE 0",))
    database.close()
    database = apsw.Connection(str(path))
    database.execute(
        "INSERT INTO keepstep_head (run, number, workflow, version, queue, priority, status, seq, checksum, epoch,"
        " worker, due_at, wakes, signals, recoveries, updated_at) SELECT 'x' || run, number + 50, workflow, version,"
        " queue, priority, status, seq, checksum, epoch, worker, due_at, wakes, signals, recoveries, updated_at"
        " FROM keepstep_head WHERE run = 'later'"
    )
    database.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
    database.execute("PRAGMA writable_schema = ON")
    database.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'keepstep_head_status'", (sql,))
    database.close()
    other = SQLiteStore(path, clock=SteppedClock())
    assert {flaw.kind for flaw in other.check()} == {"index"}
    mended = other.check(mend=True)
    assert ("dangling", "xlater") in {(flaw.kind, flaw.about) for flaw in mended}
    assert all(flaw.mended for flaw in mended)
    assert other.check() == []
    other.close()


def test_a_damaged_page_is_an_integrity_flaw_or_an_error(sound, path, tmp_path):
    for n in range(300):
        sound.commit([born(queued(f"more-{n}", input=b'"%s"' % (b"z" * 300)))])
    sound.close()
    damage(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    size, found = path.stat().st_size, 0
    for page in range(2, size // 4096, 5):
        copy = tmp_path / "copy.db"
        shutil.copy(path, copy)
        with copy.open("r+b") as file:
            file.seek(page * 4096)
            file.write(os.urandom(4096))
        try:
            store = SQLiteStore(copy, clock=SteppedClock())
        except keepstep.StoreError:
            found += 1
            continue
        found += not verify(store).sound
        store.close()
    assert found == len(range(2, size // 4096, 5))


# -- where nothing can be written --------------------------------------------------------------------------------------

AS_NOBODY = """
    import os, sys
    from keepstep.care.verify import verify
    from keepstep.errors import StoreUnavailable
    from keepstep.ports import Create
    from keepstep.stores.sqlite.store import SQLiteStore
    from keepstep.testing.store_contract import queued
    SQLiteStore(sys.argv[2]).close()  # so that everything it needs is loaded
    if os.geteuid() == 0:
        os.setgid(65534), os.setuid(65534)
    try:
        store = SQLiteStore(sys.argv[1])
        found = verify(store)
        print(found.sound, found.runs.total)
        store.commit([Create(queued("s"))])
    except StoreUnavailable as error:
        print("refused:", error)
"""


def by_nobody(path, tmp_path):
    """Verify a store in a folder that cannot be written, and try to write to it."""
    path.parent.chmod(0o555)
    path.chmod(0o444)
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(AS_NOBODY), str(path), str(tmp_path / "other.db")],
            env={**os.environ, "PYTHONPATH": str(Path(keepstep.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.parent.chmod(0o755)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def elsewhere():
    folder = Path(tempfile.mkdtemp(prefix="keepstep-"))
    yield folder / "runs.db"
    shutil.rmtree(folder)


def test_a_copy_where_nothing_can_be_written_is_verified(sound, path, elsewhere, tmp_path):
    sound.close()
    shutil.copy(path, elsewhere)
    said = by_nobody(elsewhere, tmp_path)
    assert said[0] == "True 3"
    assert said[1].startswith("refused: ")


def test_copy_with_a_log_beside_it_is_refused_with_advice(sound, path, elsewhere, tmp_path):
    shutil.copy(path, elsewhere)
    shutil.copy(f"{path}-wal", f"{elsewhere}-wal")
    [said] = by_nobody(elsewhere, tmp_path)
    assert "copy both to a writable folder" in said


def test_copy_of_an_older_schema_is_refused_with_advice(path, elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(migrations, "scripts", lambda _: scripts("sqlite")[:2])
    SQLiteStore(path).close()
    monkeypatch.undo()
    shutil.copy(path, elsewhere)
    [said] = by_nobody(elsewhere, tmp_path)
    assert "older Keepstep" in said


def test_raw_rows_are_given_as_they_are(sound, path):
    damage(
        path,
        "UPDATE keepstep_signal SET payload = CAST(x'ff00' AS TEXT) WHERE run = 'waits' AND seq = 1",
        "UPDATE keepstep_head SET status = 7 WHERE run = 'waits'",
    )
    found = sound.raw_rows("waits")
    assert [one["table"] for one in found] == ["keepstep_run", "keepstep_head", *["keepstep_signal"] * 2]
    assert found[1]["status"] == "7"
    assert found[1]["seq"] == {"integer": "3"}
    assert found[2]["payload"] == {"text": "/wA="}
