"""The care of a SQLite store: what is removed for good, what is found wrong and mended, what cannot be written."""

from __future__ import annotations

import pytest

from keepstep.errors import StoreUnavailable
from keepstep.model import Signal, Status, WorkerInfo
from keepstep.ports import Create, Send
from keepstep.stores.sqlite import SQLiteStore
from keepstep.testing.store_contract import SteppedClock, commit, everything, queued, record, started


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


def test_what_another_process_still_reads_is_told_and_scrubbed_the_next_time(path):
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
    assert store.delete_runs(["told"], scrub=True) == 0
    assert files_that_hold(path, b"hush") == []
    store.close()
