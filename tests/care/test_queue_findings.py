"""What the doctor finds about queues with limits, from unfinished runs alone."""

from datetime import timedelta

import pytest

from keepstep.care.queue_findings import QueueLook
from keepstep.model import GateInfo, Status
from keepstep.testing.store_contract import START, queued

NOW = START + timedelta(days=2)
RECENT = NOW - timedelta(seconds=10)


def found(limits, *runs, used_until=0.0):
    gate = GateInfo("queue", "mail", limits, used_until=used_until)
    look = QueueLook(gate, {"digest"}, lambda worker: worker != "dead", NOW)
    for run in runs:
        look.add(run)
    return {concern.code: concern.runs for concern in look.concerns()}


def driven(name, worker="w1", **fields):
    return queued(name, status=Status.RUNNING, worker=worker, due_at=None, epoch=1, **fields)


def test_a_queue_within_its_limits_is_healthy():
    assert found({"concurrency": 1, "per_key": 1}, driven("a", key="k", holds=1), queued("b", due_at=RECENT)) == {}


def test_more_runs_than_places_are_found():
    runs = [driven("a"), driven("b"), driven("c", worker="dead")]
    assert found({"concurrency": 1}, *runs) == {"queue-over": ("a", "b")}
    assert found({"concurrency": 2}, *runs) == {}


def test_more_runs_of_a_key_than_it_may_have_are_found():
    runs = [driven("a", key="k", holds=1), driven("b", key="k", holds=1), driven("child", key="k", holds=2)]
    assert found({"per_key": 1}, *runs) == {"key-over": ("a", "b")}
    assert found({"per_key": 2}, *runs) == {}


@pytest.mark.parametrize(
    "limits, beside, used_until, is_late",
    [
        ({"concurrency": 2}, [driven("x")], 0.0, True),
        ({"concurrency": 1}, [driven("x")], 0.0, False),
        ({"per_key": 1}, [], 0.0, True),
        ({"per_key": 1}, [driven("x", key="k", holds=1)], 0.0, False),
        ({"rate": {"count": 1, "per": 60.0, "burst": 1}}, [], NOW.timestamp(), False),
        ({"rate": {"count": 1, "per": 60.0, "burst": 1}}, [], 0.0, True),
    ],
)
def test_a_run_that_is_ready_while_there_is_room_is_found(limits, beside, used_until, is_late):
    late = queued("late", key="k", due_at=NOW - timedelta(seconds=90))
    foreign = queued("foreign", workflow="unknown", due_at=START)
    assert found(limits, late, foreign, *beside, used_until=used_until) == ({"late": ("late",)} if is_late else {})


def test_the_holder_of_a_key_is_named_after_a_day():
    holder = queued("holder", key="k", holds=1, status=Status.WAITING, due_at=None, epoch=1)
    behind = queued("behind", key="k", due_at=NOW - timedelta(days=1, seconds=1))
    assert found({"per_key": 1}, holder, behind) == {"key-held": ("holder",)}
    assert found({"per_key": 1}, holder, queued("behind", key="k", due_at=RECENT)) == {}
