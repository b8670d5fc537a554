"""Large stores: care needs the same memory for any number of runs, and asks an index for those that it wants."""

from __future__ import annotations

import gc
import io
import tracemalloc
from datetime import UTC, datetime

import pytest

from keepstep.care.retention import purge, sweep
from keepstep.care.transfer import export_runs, import_runs
from keepstep.care.verify import verify
from keepstep.model import FINISHED, Kind, Run, RunQuery, Status
from keepstep.policies import Retain
from keepstep.ports import Create
from keepstep.records.record import Record, origin, seal
from keepstep.stores.sqlite.rows import run_rows
from keepstep.stores.sqlite.store import SQLiteStore

AT = datetime(2026, 1, 1, tzinfo=UTC)
FEW, MANY = 150, 450


def finished(number):
    """A run of three records that has ended."""
    run = Run(f"r{number:06}", "bulk", Status.COMPLETED, AT, updated_at=AT, input=b'["%s"]' % (b"x" * 200), seed="s")
    rows, checksum = [], origin(run)
    for seq, kind in enumerate((Kind.RUN_STARTED, Kind.STEP_COMPLETED, Kind.RUN_FINISHED), 1):
        record = Record(run.id, kind.value, finished_at=AT, step="" if seq != 2 else "a#1")
        row, checksum = seal(record, seq, checksum)
        rows.append(row)
    object.__setattr__(run, "seq", len(rows))
    object.__setattr__(run, "checksum", checksum)
    return Create(run, rows)


def full(path, count):
    store = SQLiteStore(path, power_loss="may_lose_last")
    for start in range(0, count, 500):
        store.commit([finished(number) for number in range(start, min(start + 500, count))])
    return store


class Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def writable(self):
        return True

    def write(self, data):
        return len(data)


def lines_of(store, path):
    with path.open("wb") as file:
        export_runs(store, file)
    return path


def taken_up(store, path):
    with path.open("rb") as file:
        import_runs(store, file, "x", actor="ann")


ACTS = {
    "verify": lambda store, _path: verify(store),
    "export": lambda store, _path: export_runs(store, Nowhere()),
    "import": taken_up,
    "retain": lambda store, _path: sweep(store, Retain(days=0, count=0), dry_run=True),
    "purge": lambda store, _path: purge(store),
}


def peaks(store, archive):
    found = {}
    for name, act in ACTS.items():
        gc.collect()
        tracemalloc.start()
        act(store, archive)
        found[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found


def test_memory_does_not_grow_with_the_number_of_runs(tmp_path, monkeypatch):
    for module in ("verify", "transfer", "retention"):
        monkeypatch.setattr(f"keepstep.care.{module}.PAGE", 50)
    monkeypatch.setattr("keepstep.care.transfer.BATCH", 25)
    stores = [full(tmp_path / f"{count}.db", count) for count in (FEW, MANY)]
    few, many = (peaks(store, lines_of(store, tmp_path / f"{n}.jsonl")) for n, store in enumerate(stores))
    for store in stores:
        assert store.list_runs(RunQuery(limit=1)).runs == ()
        store.close()
    grown = {name: many[name] / few[name] for name in ACTS if many[name] > 1.5 * few[name]}
    assert grown == {}, f"three times the runs, and so many times the memory: {grown}"


@pytest.mark.parametrize(
    "query",
    [
        RunQuery(status=FINISHED, updated_before=AT),
        RunQuery(status=frozenset({Status.FAILED}), workflow="bulk", updated_before=AT),
        RunQuery(status=FINISHED, after="1000"),
    ],
)
def test_runs_to_be_removed_are_found_through_an_index(tmp_path, query):
    store = full(tmp_path / "runs.db", 10)
    plans = []

    def explained(cursor, where, values, *number, whole):
        if "x''" not in where:  # which asks for statuses that are none, so for damage
            plan = cursor.execute(f"EXPLAIN QUERY PLAN SELECT r.id {where}", values).fetchall()
            plans.extend(str(row[3]) for row in plan)
        return run_rows(cursor, where, values, *number, whole=whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keepstep.stores.sqlite.lists.run_rows", explained)
        store.list_runs(query)
    store.close()
    assert plans
    assert not [plan for plan in plans if plan.startswith("SCAN") and "json_each" not in plan]  # of the statuses
