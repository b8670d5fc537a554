"""What a run waits for, and what can be done about it: told from the run alone."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from keepstep.cli.formatting import waits_in_words
from keepstep.model import ErrorInfo, Run, Status, WorkerInfo
from keepstep.model.signal import at_service
from keepstep.model.wakes import Wakes, sorted_wakes
from keepstep.views.waits import Act, Action, Wait, WaitKind, actions_for, doubts_called, is_due, waits_of, with_version

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
LATER, EARLIER = NOW + timedelta(hours=1), NOW - timedelta(hours=1)
#: One wake-up of each kind, and those that every parked run has.
EVERYTHING = (
    "approve",
    "ks:child:ship#1",
    "ks:resolve:pay#1",
    "ks:blocked:pack#1",
    "ks:go:send#1.before",
    "ks:cancel",
    "ks:pause",
)


def run(status, **fields):
    return Run("order-1", "order", status, EARLIER, **fields)


def acts(one):
    return [action.act for action in actions_for(one, NOW)]


def test_wake_ups_are_sorted_by_what_they_stand_for():
    assert sorted_wakes(EVERYTHING) == Wakes(("approve",), ("ship#1",), ("pay#1",), ("pack#1",), ("before send#1",))
    assert sorted_wakes(()) == Wakes()


def test_a_parked_run_waits_for_any_of_its_wake_ups_or_its_time():
    assert waits_of(run(Status.WAITING, wakes=EVERYTHING, due_at=LATER), NOW) == (
        Wait(WaitKind.SIGNAL, "approve"),
        Wait(WaitKind.CHILD, "ship#1"),
        Wait(WaitKind.VERDICT, "pay#1"),
        Wait(WaitKind.READINESS, "pack#1"),
        Wait(WaitKind.BREAKPOINT, "before send#1"),
        Wait(WaitKind.TIME, until=LATER),
    )


def test_a_run_at_a_service_says_which_limit_had_no_room():
    waits = waits_of(run(Status.WAITING, wakes=(at_service("open:ai", "rate"), at_service("mail", ""))), NOW)
    assert waits == (Wait(WaitKind.SERVICE, "open:ai", why="rate"), Wait(WaitKind.SERVICE, "mail"))
    assert waits_in_words(waits, NOW) == "open:ai (rate) or mail"


@pytest.mark.parametrize("due_at", [EARLIER, NOW])
def test_a_parked_run_that_is_due_waits_for_a_worker(due_at):
    waits = waits_of(run(Status.WAITING, wakes=EVERYTHING, due_at=due_at), NOW)
    assert waits == (Wait(WaitKind.WORKER),)
    assert is_due(waits)


@pytest.mark.parametrize(
    "status, fields, expected",
    [
        (Status.QUEUED, {}, Wait(WaitKind.WORKER)),
        (Status.QUEUED, {"due_at": EARLIER}, Wait(WaitKind.WORKER)),
        (Status.QUEUED, {"due_at": LATER}, Wait(WaitKind.TIME, until=LATER)),
        (Status.QUEUED, {"due_at": LATER, "epoch": 1}, Wait(WaitKind.WORKER, until=LATER)),
        (Status.PAUSED, {"wakes": EVERYTHING}, Wait(WaitKind.RESUME)),
        (Status.SET_ASIDE, {}, Wait(WaitKind.RETRY)),
    ],
)
def test_a_run_waits_for_one_thing(status, fields, expected):
    assert waits_of(run(status, **fields), NOW) == (expected,)


@pytest.mark.parametrize("status", [one for one in Status if one.active or one.finished])
def test_a_run_that_is_driven_or_has_ended_waits_for_nothing(status):
    assert waits_of(run(status, wakes=EVERYTHING, due_at=LATER), NOW) == ()


def test_a_run_that_was_given_back_is_not_due():
    assert not is_due(waits_of(run(Status.QUEUED, due_at=LATER, epoch=1), NOW))


@pytest.mark.parametrize("said", ["pay#1", "pay"])
def test_a_step_in_doubt_is_known_by_its_key_and_its_name(said):
    assert doubts_called(run(Status.WAITING, wakes=EVERYTHING), said) == ("pay#1",)


def test_a_step_in_doubt_of_a_branch_is_known_by_its_name_alone():
    wakes = ("ks:resolve:gather#1/0/pay#1", "ks:resolve:gather#1/1/pay#2")
    assert doubts_called(run(Status.WAITING, wakes=wakes), "pay") == ("gather#1/0/pay#1", "gather#1/1/pay#2")
    assert doubts_called(run(Status.WAITING, wakes=wakes), "gather#1/0/pay") == ("gather#1/0/pay#1",)
    assert doubts_called(run(Status.WAITING, wakes=wakes), "ship") == ()


# -- what can be done --------------------------------------------------------------------------------------------------


def test_a_parked_run_can_be_answered_resolved_and_resumed():
    assert actions_for(run(Status.WAITING, wakes=EVERYTHING), NOW) == (
        Action(Act.APPROVE, "order-1", "approve"),
        Action(Act.RESOLVE, "order-1", "pay#1"),
        Action(Act.RESUME, "order-1"),
    )


def test_a_run_that_is_due_needs_a_worker_and_no_answer():
    assert acts(run(Status.WAITING, wakes=("approve",), due_at=EARLIER)) == [Act.WORKER]
    assert acts(run(Status.QUEUED)) == [Act.WORKER]


def test_a_paused_run_can_be_resumed():
    assert acts(run(Status.PAUSED)) == [Act.RESUME]


def test_a_failed_run_can_be_retried_and_that_of_a_graph_edited():
    assert acts(run(Status.FAILED)) == [Act.RETRY]
    assert acts(run(Status.FAILED, fingerprint="graph:1")) == [Act.RETRY, Act.EDIT]
    assert acts(run(Status.SET_ASIDE, fingerprint="graph:1")) == [Act.RETRY]


def test_a_run_that_was_handed_over_is_not_retried():
    aside = run(Status.SET_ASIDE, error=ErrorInfo("Copy", "it goes on in other.db"))
    assert acts(aside) == []
    assert acts(replace(aside, error=ErrorInfo("Crash", "it goes on in other.db"))) == [Act.RETRY]


@pytest.mark.parametrize("status", [Status.RUNNING, Status.COMPLETED, Status.CANCELLED])
def test_nothing_can_be_done_about_a_run_that_goes_on_or_is_over(status):
    assert acts(run(status)) == []


def test_wait_for_a_worker_names_the_version_that_the_living_ones_lack():
    one = run(Status.QUEUED, version="1")
    [wait] = waits_of(one, NOW)
    second = WorkerInfo("w", workflows=("order", "order@2"))
    assert with_version(wait, one, [second]) == Wait(WaitKind.WORKER, "order", version="1", versions=("2",))
    for other in (
        WorkerInfo("w", workflows=("order", "order@1")),
        WorkerInfo("w", workflows=("order",)),  # not pinned: it takes any version
        WorkerInfo("w", workflows=("other",)),
    ):
        others = [other] if other.workflows == ("other",) else [second, other]
        assert with_version(wait, one, others) == wait
    assert with_version(wait, one, [replace(second, alive=False)]) == wait
    assert waits_in_words([with_version(wait, one, [second])]) == (
        "a worker with version 1 of order (workers here have 2)"
    )
