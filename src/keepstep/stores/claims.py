"""The decision of a claim, written once for every store.

A claim first takes over runs whose owner is dead. Then it takes free runs that are due, the highest priority first.
A store finds candidates in this order by its own index, asks `may_take` about the newest head of each, and writes the
head that `leased` returns. A store that decides in SQL takes its conditions and its order from here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from datetime import datetime
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from ..model import Claim, Lease, Run, Status
from ..model.run import ACTIVE
from ..ports import ClaimRequest
from .rules import ENDED
from .transition import Head

H = TypeVar("H", bound=Head)

#: Number of due runs of one workflow and queue below which a store with indexes reads all of them by time and sorts
#: them by priority. From this number on, it reads them by priority.
FEW = 100
#: Maximum number of priorities of one workflow and queue that a store with indexes looks up, one index step each.
#: Bounds the cost of a claim if the highest priorities belong to runs that are not due.
LEVELS = 64


class Facts(Protocol):
    """The fixed fields of a run that decide a claim."""

    @property
    def id(self) -> str: ...
    @property
    def workflow(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def priority(self) -> int: ...


class Standing(Protocol):
    """The fields of a head that decide a claim. A `Run` has them, too."""

    @property
    def status(self) -> Status: ...
    @property
    def worker(self) -> str | None: ...
    @property
    def due_at(self) -> datetime | None: ...
    @property
    def service(self) -> str | None: ...


# -- candidates --------------------------------------------------------------------------------------------------------

#: SQL condition of a free run. `due_at` is NULL while a worker owns the run, and after the run has ended. A run that
#: waits at a gate is found by another index.
FREE_SQL = "worker IS NULL AND due_at IS NOT NULL AND gate IS NULL"


def serves(request: ClaimRequest, workflow: str, version: str, queue: str) -> bool:
    """Whether a worker drives runs of this workflow, version and queue."""
    if workflow not in request.workflows or request.versions.get(workflow, version) != version:
        return False
    return request.queues is None or queue in request.queues


def is_free(head: Standing) -> bool:
    """Whether a run has no owner, has not ended, and has a due time."""
    return head.worker is None and head.due_at is not None and head.status not in ENDED


def may_name(status: Status, wanted: Container[Status]) -> bool:
    """Whether a person's command may claim a run in this status. A cancelled run is final."""
    return status in wanted and status is not Status.CANCELLED


def may_take(
    request: ClaimRequest, head: Standing, now: datetime, is_dead: Callable[[str], bool], service: str | None = None
) -> bool:
    """Whether a request may take the run with this head: its owner is dead, it is due, or the request names it.

    With `service`, a run that waits there may be taken, too.
    """
    if head.worker is not None and not is_dead(head.worker):
        return False
    if request.run is not None:
        return may_name(head.status, request.statuses)
    if service is not None and head.worker is None and head.service == service:
        return head.status not in ENDED
    return head.worker is not None or (head.due_at is not None and head.due_at <= now and is_free(head))


# -- order -------------------------------------------------------------------------------------------------------------


def takeover_rank(owner: str, workflow: str, queue: str, run: str) -> tuple[str, str, str, str]:
    """Return the sort key of a run whose owner is dead. Text compares byte by byte."""
    return owner, workflow, queue, run


def takeover_sql(head: str, owner: str = "worker") -> str:
    """Return the order of `takeover_rank` in SQL, over the columns of a head."""
    return f"{head}.{owner}, {head}.workflow, {head}.queue, {head}.run"


D = TypeVar("D", datetime, float)


def due_rank(priority: int, due_at: D, run: str) -> tuple[int, D, str]:
    """Return the sort key of a due run."""
    return -priority, due_at, run


def due_sql(head: str, due_at: str = "due_at") -> str:
    """Return the order of `due_rank` in SQL, over the columns of a head."""
    return f"{head}.priority DESC, {head}.{due_at}, {head}.run"


class Choice(NamedTuple):
    """The runs that a request takes, in order, and the earliest due time of the others."""

    runs: list[str]
    next_due_at: datetime | None


def choose(
    request: ClaimRequest,
    runs: Iterable[tuple[Facts, Standing]],
    now: datetime,
    is_dead: Callable[[str], bool],
    limited: Container[str] = (),
) -> Choice:
    """Choose among all runs that have not ended and are not in a `limited` queue, for a store without an index."""
    taken: list[tuple[tuple[str, str, str, str], str]] = []
    due: list[tuple[tuple[int, datetime, str], str]] = []
    next_due_at: datetime | None = None
    for run, head in runs:
        if not serves(request, run.workflow, run.version, run.queue):
            continue
        if run.queue in limited:
            if head.worker is None and head.due_at is not None and head.due_at > now and is_free(head):
                next_due_at = head.due_at if next_due_at is None else min(next_due_at, head.due_at)
        elif head.worker is not None:
            if is_dead(head.worker):
                taken.append((takeover_rank(head.worker, run.workflow, run.queue, run.id), run.id))
        elif head.due_at is not None and is_free(head):
            if head.due_at <= now:
                due.append((due_rank(run.priority, head.due_at, run.id), run.id))
            elif next_due_at is None or head.due_at < next_due_at:
                next_due_at = head.due_at
    chosen = [run for _, run in [*sorted(taken), *sorted(due)]]
    return Choice(chosen[: max(request.limit, 0)], next_due_at)


# -- the lease ---------------------------------------------------------------------------------------------------------

#: Statuses in which a run counts as recovering when it is taken from a dead owner, as an SQL list.
RECOVERING_SQL = ", ".join(f"'{status}'" for status in sorted(ACTIVE))


def is_recovery(before: Status, owner: str | None) -> bool:
    """Whether a claim is a recovery: the owner died while it drove the run. Waking a parked run is not one."""
    return owner is not None and before in ACTIVE


def status_after(before: Status, owner: str | None) -> Status:
    """Return the status of a run after a claim."""
    return Status.RECOVERING if is_recovery(before, owner) else Status.RUNNING


def leased(head: H, worker: str, now: datetime, *, holds: bool = False) -> H:
    """Return the head of a run that a worker has claimed. The new epoch fences the former owner.

    `holds`: the run has a key, and begins now or has begun.
    """
    return msgspec.structs.replace(
        head,
        status=status_after(head.status, head.worker),
        worker=worker,
        epoch=head.epoch + 1,
        due_at=None,
        wakes=(),
        recoveries=head.recoveries + is_recovery(head.status, head.worker),
        updated_at=now,
        holds=head.holds or int(holds),
        service=None,
    )


def leased_sql(
    *,
    status: str,
    worker: str,
    now: str,
    recovered: str,
    begins: str,
    gate: str,
    epoch: str = "epoch",
    recoveries: str = "recoveries",
    head: str = "",
) -> str:
    """Return the changes of `leased` as the assignments of an SQL UPDATE.

    `begins` is 1 for a worker's claim and 0 for a person's command, which lets no run begin. `gate` is the queue with
    limits whose place the run takes, or NULL. `head` is a prefix.
    """
    return (
        f"status = {status}, worker = {worker}, epoch = {epoch} + 1, due_at = NULL, wakes = '',"
        f" recoveries = {recoveries} + {recovered}, updated_at = {now},"
        f" gate = {gate}, since = NULL,"
        f" holds = CASE WHEN {head}holds = 0 AND {head}key IS NOT NULL THEN {begins} ELSE {head}holds END"
    )


#: SQL assignments that set aside a run whose rows cannot be read, so that it does not block the claim of others.
PUT_ASIDE_SQL = (
    f"status = '{Status.SET_ASIDE}', worker = NULL, due_at = NULL, wakes = '', gate = NULL, since = NULL, holds = 0"
)


def claim_of(run: Run, owner: str | None, before: Status, since: datetime | None, service: str | None = None) -> Claim:
    """Return the claim of a leased run, with its owner, its status and the time of its last write before the claim.

    `service` is the one at which the run waited, if it was claimed from there.
    """
    return Claim(run, Lease(run.id, run.worker or "", run.epoch), owner, before, since, service=service)
