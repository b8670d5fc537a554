"""A damaged run never gives a wrong result, in any store: it says that it is damaged."""

from __future__ import annotations

import asyncio

import pytest

import keepstep as ks
from keepstep.errors import CheckpointCorrupt
from keepstep.model import Kind, Status
from keepstep.ports import Row
from tests.care.stored import WORKFLOWS, tampered


def result_of(store, run_id):
    async def main():
        async with ks.Engine(store, workflows=WORKFLOWS, worker=False) as engine:
            return await (await engine.get(run_id)).result(30)

    return asyncio.run(main())


def kept_as(kind):
    return lambda rows: [*rows[:-1], Row(rows[-1].seq, kind, rows[-1].record, rows[-1].body)]


DAMAGE = {
    "its end is kept as another kind": {"rows": kept_as("step completed")},
    "its end is gone": {"rows": lambda rows: rows[:-1]},
    "its end is gone, and the head knows": {"rows": lambda rows: rows[:-1], "checksum": "of the one before"},
    "it is said to have failed": {"status": Status.FAILED},
    "it is said to be cancelled": {"status": Status.CANCELLED},
    "its end was edited": {"rows": lambda rows: [*rows[:-1], changed(rows[-1], b'"value":6', b'"value":7')]},
}


def changed(row, old, new):
    assert old in row.record
    return Row(row.seq, row.kind, row.record.replace(old, new), row.body)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_end_is_no_result(store, what):
    assert result_of(store, "done") == 6
    tampered(store, "done", **DAMAGE[what])
    with pytest.raises(CheckpointCorrupt, match="'done'"):
        result_of(store, "done")
    assert result_of(store, "neighbour") == 4


def test_an_older_end_is_not_taken_for_the_newest(store):
    """The first end of a run that was retried does not count any more."""

    def with_an_older_end(rows):
        end = rows[-1]
        return [*rows[:2], Row(3, end.kind, end.record, end.body), *rows[3:-1], Row(end.seq, Kind.TIMER, end.record)]

    tampered(store, "done", rows=with_an_older_end)
    with pytest.raises(CheckpointCorrupt, match="'done'"):
        result_of(store, "done")


def test_a_run_that_failed_is_never_completed(store):
    tampered(store, "failed", status=Status.COMPLETED)
    with pytest.raises(CheckpointCorrupt, match="'failed'"):
        result_of(store, "failed")
