"""Retries a failed run from just before the delivery of the outcome that failed it.

Records from before that point keep counting. A later record counts only if its call was made before that point and it
is a success. Failures are tried again, and everything that the code did in reaction to the failure is superseded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from ..checks import check_text
from ..errors import AlreadyFinished, CheckpointCorrupt, RunConflict, RunNotFound
from ..history.series import newest_run
from ..kernel.failure_point import has_own_code
from ..kernel.graph.position import generation_in
from ..kernel.replay import Superseded, as_ended, read_records
from ..kernel.steering import DEADLINE
from ..model import Kind, Outcome, Status
from ..model.checkpoint import ABOUT_CHILD, ANSWERS_CALL, BY_CODE, ENDS_RUN, SAID_IN_STEP, is_timeout
from ..model.run import handed_over
from ..model.signal import CANCEL
from ..model.undo import AT_END, is_command, waits_for_answer
from ..records.data import ChildData, Data, RunFinishedData, StepCompletedData, SupersededData, data_of, new_data
from ..records.record import Record
from .commands import RETRIABLE, append_and_release, check_not_keeper, claim_by_name, hand_back_on_error
from .rewind import cancels, is_born_of, unfinished_children
from .undone import answer_undo, check_retry, has_undone

if TYPE_CHECKING:
    from ..model import Run
    from .host import CommandHost

#: Codes of failures after which an at-most-once step may or may not have happened.
_DOUBTS = frozenset({"ks:in-doubt", "ks:step-timed-out"})


@dataclass(frozen=True, slots=True)
class RetryPlan:
    """The effects of a retry: superseded records by number, and unfinished children that nobody waits for any more.

    `failed` are failed children that the run waits for again; they are retried with it.
    """

    seqs: list[int]
    left: list[str]
    failed: list[str]


async def retry(host: CommandHost, run_id: str, reason: str, actor: str, *, force: bool = False) -> None:
    """Let a failed run, or the newest run of its series, go on from just before it failed.

    A run that was handed over to another store goes on only with `force`.
    """
    check_text(reason, "reason")
    check_not_keeper(run_id, "retry")
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    if run.continued_as is not None:
        run = await host.call(newest_run, host.store, run)
        run_id = run.id
    run = await as_ended(host, run)  # if another command holds it, the claim fails
    if run.status not in RETRIABLE:
        raise AlreadyFinished(
            f"run {run_id!r} is {run.status.value}; only a failed or set-aside run can be retried", run_id
        )
    if waits_for_answer(run):
        await answer_undo(host, run_id, "retry", (), reason=reason, actor=actor)
        return
    host.encryption.cipher(run)  # nothing can be written without the run's key
    elsewhere = handed_over(run)
    if elsewhere and not force:
        raise RunConflict(
            f"run {run_id!r} was handed over: {elsewhere}; it would be driven in both stores. "
            "If it is missing or lost there, let it go on here with force=True (--force)",
            run_id,
        )
    # Plan before the claim, so that an unreadable history leaves the run untouched.
    plan = await plan_retry(host, run)
    await retry_children(host, plan, reason, actor)
    claim = await claim_by_name(host, run, RETRIABLE)
    why = host.redaction.redact(reason)
    data = new_data(SupersededData, actor=actor, reason=why, before=run.status.value, act="retry")
    record = Record(run_id, Kind.SUPERSEDED.value, worker=claim.lease.worker, trigger="manual", data=data)
    async with hand_back_on_error(host, claim):
        if claim.run.seq != run.seq:
            plan = await plan_retry(host, claim.run)
        data["seqs"] = plan.seqs
        await append_and_release(host, claim, record, Status.QUEUED, cancels(host, claim.run, plan.left))


async def retry_children(host: CommandHost, plan: RetryPlan, reason: str, actor: str) -> None:
    """Retry the failed children that a run waits for again. This comes first, because the run reads their statuses."""
    for child in plan.failed:
        with contextlib.suppress(AlreadyFinished):  # another process has retried it meanwhile
            await retry(host, child, reason, actor)


async def plan_retry(host: CommandHost, run: Run, *, has_failed: bool = False) -> RetryPlan:
    """Return the effects that a retry of a run would have. `has_failed` tells about one whose recovery has begun."""
    records = [record async for record, _ in read_records(host, run)]
    is_ended = run.status is Status.FAILED or any(record.kind == Kind.RUN_FINISHED for record in records[-1:])
    is_ended = is_ended or has_failed
    gone = Superseded()
    for record in records:
        if record.seq == run.kept_from:
            gone = Superseded(generation_in(record))
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
    counting = [record for record in records if record.seq not in gone]
    ends = [record for record in records if record.kind in ENDS_RUN]
    point = _Point.of(counting, ends[-1] if ends else None, own_code=has_own_code(run.fingerprint))
    if not is_ended and any(record.step == AT_END for record in counting):  # it goes on with its undo
        point = _Point(None, None, frozenset())
    while True:
        seqs = point.left(counting)
        kept = [record for record in counting if record.seq not in seqs]
        left = [record for record in counting if record.seq in seqs]
        failed, ended = await _sort_children(host, run, kept, left, gone.generation)
        if not ended:
            break
        point.go_back_before(ended)
    check_retry(run, records, seqs, is_ended=is_ended)
    children = {_started(record): record.step for record in left if _started(record)}
    going = await unfinished_children(host, run, children, gone.generation)
    return RetryPlan(sorted(seqs | {record.seq for record in ends[-1:]}), going, failed)


class _Point:
    """The outcome that failed a run, or None if the run was set aside; the run goes back to just before it."""

    def __init__(self, seq: int | None, at: datetime | None, named: frozenset[int]) -> None:
        self.seq = seq
        self.at = at
        self.named = named  # the causes of the run's error, and starts of children that cannot go on

    @classmethod
    def of(cls, counting: Sequence[Record], end: Record | None, *, own_code: bool) -> _Point:
        error = end.error if end is not None else None
        named = frozenset(error.caused_by if error is not None else ())
        seq: int | None = None
        if end is not None and end.kind == Kind.RUN_FINISHED:
            seq = data_of(end, RunFinishedData).get("failed_at")
            if not isinstance(seq, int):  # a record from before this was written down
                outcomes = [one.seq for one in counting if _is_final(one) and one.kind != Kind.STEP_CANCELLED]
                seq = (min if own_code else max)(named, default=max(outcomes, default=1))
        missed = [one.seq for one in counting if one.step == DEADLINE]
        seq = min((one for one in (seq, *missed) if one is not None), default=None)
        at = next((one.finished_at for one in counting if one.seq == seq), None)
        return cls(seq, at, named | frozenset(missed))

    def go_back_before(self, starts: Sequence[Record]) -> None:
        """Move the point to before the starts of children that cannot go on."""
        first = min(starts, key=lambda record: record.seq)
        self.named |= {record.seq for record in starts}
        if self.seq is None or first.seq < self.seq:
            self.seq, self.at = first.seq, first.finished_at

    def left(self, counting: Sequence[Record]) -> set[int]:
        """Return the numbers of the counting records to supersede."""
        if self.seq is None:
            return set()
        left = {record.seq for record in counting if self._leaves(record)}
        ended = {record.step for record in counting if record.seq not in left and _is_final(record)}
        left -= {one.seq for one in counting if one.kind in SAID_IN_STEP and one.step in ended}
        return left.union(of_unfinished(counting, left))

    def _leaves(self, record: Record) -> bool:
        if record.seq in self.named:
            return True
        if record.kind == Kind.STEP_CANCELLED and (record.asked or record.seq - 1) in self.named:
            return True  # a graph or dag may have failed later than a failure that its error names
        if self.seq is None or record.seq < self.seq or record.kind not in BY_CODE:
            return False
        if is_command(record.step):  # a command on the run as a whole
            return False
        return self._came_after(record) or (record.kind in ANSWERS_CALL and not _is_success(record))

    def _came_after(self, record: Record) -> bool:
        """Whether the code made the call, or wrote the record, after the failure was delivered."""
        assert self.seq is not None  # noqa: S101 - the caller checks it
        if record.asked:
            return record.asked >= self.seq
        # Without `asked`, the record before was the last one delivered, or the record is older than this field.
        begun = record.started_at
        return record.seq - 1 >= self.seq and not (begun is not None and self.at is not None and begun < self.at)


def of_unfinished(counting: Sequence[Record], left: set[int]) -> Iterator[int]:
    """Yield records of calls that no longer have an outcome: these calls begin again with all their attempts.

    The start mark of an at-most-once step stays, because the step may have happened, unless it reported a failure.
    """
    ended = {one.step for one in counting if one.seq not in left and _is_final(one)}
    failed = {
        one.step: one.error is None or one.error.code not in _DOUBTS
        for one in counting
        if one.seq in left and one.kind == Kind.STEP_FAILED and one.retry_at is None
    }
    for one in counting:
        if one.step in ended:
            continue
        is_attempt = one.kind == Kind.PROGRESS or (one.kind == Kind.STEP_FAILED and one.retry_at is not None)
        if is_attempt or (one.kind == Kind.STEP_STARTED and failed.get(one.step, False)):
            yield one.seq


async def _sort_children(
    host: CommandHost, run: Run, kept: Sequence[Record], left: Sequence[Record], generation: int
) -> tuple[list[str], list[Record]]:
    """Return the failed children that the run waits for again, and the start records of those that cannot go on.

    A child that has completed since, or is still going on, counts as it is. A failed child whose failure was not yet
    delivered would fail the run again. Children of a fork's original are not touched: the fork starts its own. A child
    whose id the code chose cannot be started again.
    """
    delivered = {one.digest for one in kept if one.kind in ABOUT_CHILD and not _started(one)}
    failures = {one.digest for one in left if one.kind in ABOUT_CHILD and not _started(one)}
    waited = {one.digest for one in left if not _started(one)}
    ended_names: dict[Status | None, set[str]] = {None: failures, Status.CANCELLED: waited}
    cancelled = {_target(one) for one in left if data_of(one, Data).get("signal_name") == CANCEL}
    failed: list[str] = []
    ended: list[Record] = []
    for start in kept:
        name = _started(start)
        if not name or name in delivered:
            continue
        child = await host.newest_of_series(name)
        child = child and await as_ended(host, child)
        status = child.status if child is not None else None
        is_undone = child is not None and status is Status.FAILED and await has_undone(host, child)
        if child is not None and status is Status.FAILED and child.parent == run.id and not is_undone:
            failed.append(child.id)
            continue
        is_over = is_undone or name in cancelled or name in ended_names.get(status, ())
        owner = run.id if child is None or child.parent is None else child.parent
        if owner != run.id:
            is_over = name in waited
        if status is not Status.COMPLETED and is_over and is_born_of(owner, name, start.step, generation):
            ended.append(start)
    return failed, ended


def _started(record: Record) -> str:
    """The child that a record says was started, if it is one of those."""
    return data_of(record, ChildData).get("child", "") if record.kind == Kind.CHILD else ""


def _target(record: Record) -> str:
    return data_of(record, StepCompletedData).get("to", "")


def _is_final(record: Record) -> bool:
    """Whether a record is the outcome of a call, which is delivered unless the code has cancelled the call."""
    return record.kind in ANSWERS_CALL and record.retry_at is None


def _is_success(record: Record) -> bool:
    """Whether an outcome would be the same without the failure; an expired timeout would not."""
    if record.kind in ABOUT_CHILD and not _started(record):
        return _status_in(record) == Status.COMPLETED
    if record.kind == Kind.TIMER and is_timeout(record.step):
        return False
    return record.outcome != Outcome.FAILURE


def _status_in(record: Record) -> str:
    """Return the final status of the child that a record is about."""
    try:
        return _word_in(record.raw()).status
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointCorrupt(
            f"run {record.run!r}: the record at seq {record.seq} holds no outcome of a child: {error}"
        ) from None


class _Word(msgspec.Struct):
    status: str


_word_in = msgspec.json.Decoder(_Word).decode
