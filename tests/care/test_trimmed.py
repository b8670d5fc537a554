"""Runs whose older records were removed: they are verified and copied with their gap, and nothing else may miss."""

from __future__ import annotations

import io
from dataclasses import replace

import msgspec
import pytest

from keepstep.care.copying import copy_runs
from keepstep.care.transfer import export_runs, import_runs
from keepstep.care.verify import check_named, verify
from keepstep.model import Kind, Run, Signal, Status, WorkerInfo
from keepstep.ports import Create, Send
from keepstep.records.record import born
from keepstep.stores.files.store import FilesStore
from keepstep.stores.memory import MemoryStore
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import START, Holder, commit, record


@pytest.fixture(params=["memory", "sqlite", "files"])
def store(request, tmp_path):
    made = {
        "memory": MemoryStore,
        "sqlite": lambda: SQLiteStore(tmp_path / "runs.db"),
        "files": lambda: FilesStore(tmp_path / "runs"),
    }[request.param]()
    yield made
    made.close()


def trimmed(store, trim=7, **fields):
    """A run with ten records and five signals, whose older ones were removed."""
    store.renew_leases(WorkerInfo("w1"))
    run = Run("r", "digest", Status.RUNNING, START, worker="w1", epoch=1, updated_at=START)
    create = born(run, record("r", Kind.RUN_STARTED, None))
    commit(store, create)
    writer = Holder(store, create.run)
    for _ in range(5):
        commit(store, Send(Signal("r", "x")))
    for number in range(2, 10):
        writer.write(record("r", step=f"s#{number}", data={"signal": 3} if number == 3 else None))
    end = record("r", Kind.RUN_FINISHED)
    writer.write(end, trim=trim, trim_signals=4, status=Status.COMPLETED, release=True, **fields)
    return writer


def test_trimmed_run_is_sound(store):
    trimmed(store)
    found = verify(store)
    assert found.sound, found.damaged
    assert (found.records.total, found.records.valid) == (5, 5)


def without(store, *seqs):
    """The run in another store, without some of its rows."""
    rows = [row for row in store.list_checkpoints("r") if row.seq not in seqs]
    run = store.get_run("r")
    other = MemoryStore()
    other.commit([Create(replace(run, seq=0, kept_from=0, signals=0, signals_from=0), ())])
    entry = other._runs["r"]
    entry.rows, entry.signals = rows, store.list_signals("r")
    entry.head = replace_head(entry.head, run)
    return other


def replace_head(head, run):
    names = ("seq", "kept_from", "signals", "signals_from")
    return msgspec.structs.replace(head, **{name: getattr(run, name) for name in names})


@pytest.mark.parametrize("seq", [1, 7, 8, 9, 10])
def test_further_missing_record_is_found(store, seq):
    trimmed(store)
    assert check_named(without(store), "r").problems == []
    problems = check_named(without(store, seq), "r").problems
    assert problems
    assert "chain broken" in problems[0] or "it is completed, but" in problems[0]


def test_missing_signal_after_removed_ones_is_found(store):
    trimmed(store)
    other = without(store)
    del other._runs["r"].signals[-1]
    assert any("signals were accepted" in one for one in check_named(other, "r").problems)


def test_trimmed_run_is_exported_and_imported(store):
    trimmed(store)
    archive = io.BytesIO()
    assert export_runs(store, archive).damaged == {}
    archive.seek(0)
    target = MemoryStore()
    done = import_runs(target, archive, "archive", actor="ann")
    assert (done.written, done.damaged) == (1, {})
    assert target.list_checkpoints("r") == store.list_checkpoints("r")
    assert target.list_signals("r") == store.list_signals("r")
    assert target.get_run("r") == store.get_run("r")
    assert verify(target).sound


def test_archive_without_a_kept_record_is_refused(store):
    trimmed(store)
    archive = io.BytesIO()
    export_runs(store, archive)
    lines = archive.getvalue().splitlines(keepends=True)
    lines = [line for line in lines if b'"seq":8,' not in line]
    done = import_runs(MemoryStore(), io.BytesIO(b"".join(lines)), "archive", actor="ann", partial=True)
    assert done.written == 0
    assert done.damaged


def test_trimmed_run_is_copied_to_another_store(store, tmp_path):
    trimmed(store)
    target = SQLiteStore(tmp_path / "other.db")
    done = copy_runs(store, target, actor="ann")
    assert (done.written, done.damaged) == (1, {})
    assert target.list_checkpoints("r") == store.list_checkpoints("r")
    assert target.get_run("r") == store.get_run("r")
    target.close()
