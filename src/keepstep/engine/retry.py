"""Retrying a run: it goes back to just before the outcome that failed it was delivered.

What the run had recorded by then counts as it did then. A later record counts only if its call had been asked by then
and it is a success; a failure is tried again, and whatever the code did knowing of the failure is left behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import AlreadyFinished, CheckpointCorrupt, RunConflict, RunNotFound
from ..model import Kind, Outcome, Status
from ..model.ids import check_text
from ..model.signal import CANCEL, RESERVED
from ..stores.records import Record
from .children import newest_of_series
from .control import RETRIABLE, append_and_release, claim_by_name, let_go_unless_done
from .copying import handed_over
from .failure_point import has_own_code
from .history import Superseded, read_records
from .rewind import cancels, going_children, is_born_of
from .steering import DEADLINE

if TYPE_CHECKING:
    from ..model import Run
    from .engine import Engine

#: Records of what the code has asked for, or written down without being asked.
_OF_THE_CODE = frozenset(
    {
        Kind.STEP_STARTED.value,
        Kind.STEP_COMPLETED.value,
        Kind.STEP_FAILED.value,
        Kind.STEP_CANCELLED.value,
        Kind.WAIT_STARTED.value,
        Kind.TIMER.value,
        Kind.SIGNAL.value,
        Kind.CHILD.value,
        Kind.BARRIER.value,
        Kind.DECISION.value,
        Kind.PATCH.value,
        Kind.PUBLISHED.value,
        Kind.EMITTED.value,
        Kind.REPLY.value,
    }
)
#: Of these, what is an answer to a call.
_OUTCOMES = frozenset(
    {
        Kind.STEP_COMPLETED.value,
        Kind.STEP_FAILED.value,
        Kind.STEP_CANCELLED.value,
        Kind.TIMER.value,
        Kind.SIGNAL.value,
        Kind.CHILD.value,
        Kind.BARRIER.value,
    }
)
#: What a step says while it is performed: it counts as its step does.
_SAID_MEANWHILE = frozenset({Kind.PUBLISHED.value, Kind.EMITTED.value})
#: Failures of an at-most-once step that do not say whether it happened.
_DOUBTS = frozenset({"ks:in-doubt", "ks:step-timed-out"})


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What a retry leaves behind: records by number, children that go on though nobody waits for them any more.

    `failed` are the children that have failed and that the run waits for again: they are retried with it.
    """

    seqs: list[int]
    left: list[str]
    failed: list[str]


async def retry(engine: Engine, run_id: str, reason: str, actor: str, *, force: bool = False) -> None:
    """Let a failed run go on from just before it failed; one that was handed over only by force."""
    check_text(reason, "reason")
    run = await engine.read(engine.store.get_run, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    if run.status not in RETRIABLE:
        raise AlreadyFinished(
            f"run {run_id!r} is {run.status.value}; only a failed or set-aside run can be retried", run_id
        )
    engine.encryption.cipher(run)  # without its key nothing can be written
    elsewhere = handed_over(run)
    if elsewhere and not force:
        raise RunConflict(
            f"run {run_id!r} was handed over: {elsewhere}; it would be driven in both stores. "
            "Only if it is not there, or is lost, let it go on here by force (force=True, or --force)",
            run_id,
        )
    plan = await taken_back(engine, run)  # before the claim: a history that cannot be read leaves the run as it is
    await retry_children(engine, plan, reason, actor)
    claim = await claim_by_name(engine, run, RETRIABLE)
    data: dict[str, Any] = {"actor": actor, "reason": engine.censor.redact(reason), "before": run.status.value}
    data["act"] = "retry"
    record = Record(run_id, Kind.SUPERSEDED.value, worker=claim.lease.worker, trigger="manual", data=data)
    async with let_go_unless_done(engine, claim):
        if claim.run.seq != run.seq:
            plan = await taken_back(engine, claim.run)
        data["seqs"] = plan.seqs
        await append_and_release(engine, claim, record, Status.QUEUED, cancels(engine, claim.run, plan.left))


async def retry_children(engine: Engine, plan: TakenBack, reason: str, actor: str) -> None:
    """Retry the failed children that a run waits for again, before the run: it believes what they are when it asks."""
    for child in plan.failed:
        with contextlib.suppress(AlreadyFinished):  # someone else has done it meanwhile
            await retry(engine, child, reason, actor)


async def taken_back(engine: Engine, run: Run) -> TakenBack:
    """What no longer counts when a run is retried."""
    records = [record async for record, _ in read_records(engine, run)]
    gone = Superseded()
    for record in records:
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
    counting = [record for record in records if record.seq not in gone]
    ends = [record for record in records if record.kind in (Kind.RUN_FINISHED, Kind.ERROR)]
    point = _Point.of(counting, ends[-1] if ends else None, own_code=has_own_code(run.fingerprint))
    while True:
        seqs = point.left(counting)
        kept = [record for record in counting if record.seq not in seqs]
        left = [record for record in counting if record.seq in seqs]
        failed, ended = await _look_at_children(engine, run, kept, left)
        ended = [one for one in ended if is_born_of(run, _started(one), one.step, gone.generation)]
        if not ended:
            break
        point.go_back_before(ended)
    children = {_started(record): record.step for record in left if _started(record)}
    going = await going_children(engine, run, children, gone.generation)
    return TakenBack(sorted(seqs | {record.seq for record in ends[-1:]}), going, failed)


class _Point:
    """The outcome that failed a run, or None if the run was set aside; the run goes back to just before it."""

    def __init__(self, seq: int | None, at: datetime | None, named: frozenset[int]) -> None:
        self.seq = seq
        self.at = at
        self.named = named  # what the run's error goes back to, and starts of children that cannot go on

    @classmethod
    def of(cls, counting: Sequence[Record], end: Record | None, *, own_code: bool) -> _Point:
        error = end.error if end is not None else None
        named = frozenset(error.caused_by if error is not None else ())
        seq: int | None = None
        if end is not None and end.kind == Kind.RUN_FINISHED:
            seq = (end.data or {}).get("failed_at")
            if not isinstance(seq, int):  # a record from before this was written down
                outcomes = [one.seq for one in counting if _is_final(one) and one.kind != Kind.STEP_CANCELLED]
                seq = (min if own_code else max)(named, default=max(outcomes, default=1))
        missed = [one.seq for one in counting if one.step == DEADLINE]
        seq = min((one for one in (seq, *missed) if one is not None), default=None)
        at = next((one.finished_at for one in counting if one.seq == seq), None)
        return cls(seq, at, named | frozenset(missed))

    def go_back_before(self, starts: Sequence[Record]) -> None:
        """Go back before children were started that cannot go on."""
        first = min(starts, key=lambda record: record.seq)
        self.named |= {record.seq for record in starts}
        if self.seq is None or first.seq < self.seq:
            self.seq, self.at = first.seq, first.finished_at

    def left(self, counting: Sequence[Record]) -> set[int]:
        """Which of the records that counted are left behind."""
        if self.seq is None:
            return set()
        left = {record.seq for record in counting if self._leaves(record)}
        ended = {record.step for record in counting if record.seq not in left and _is_final(record)}
        left -= {one.seq for one in counting if one.kind in _SAID_MEANWHILE and one.step in ended}
        return left.union(_of_unfinished(counting, left))

    def _leaves(self, record: Record) -> bool:
        if record.seq in self.named:
            return True
        if self.seq is None or record.seq < self.seq or record.kind not in _OF_THE_CODE:
            return False
        if record.step.startswith(RESERVED):  # what a person said about the run as a whole
            return False
        return self._came_after(record) or (record.kind in _OUTCOMES and not _is_success(record))

    def _came_after(self, record: Record) -> bool:
        """Whether the code asked for it, or wrote it down, when it knew of the failure."""
        assert self.seq is not None  # noqa: S101 - the caller has seen to it
        if record.asked:
            return record.asked >= self.seq
        # The record before it was the last one that the code was told of, or it is from before this was written down.
        begun = record.started_at
        return record.seq - 1 >= self.seq and not (begun is not None and self.at is not None and begun < self.at)


def _of_unfinished(counting: Sequence[Record], left: set[int]) -> Iterator[int]:
    """What is recorded of calls that have no outcome any more: they begin anew, with all their attempts.

    The start mark of an at-most-once step stays unless the step has said that it failed: it may have happened.
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
        is_attempt = one.kind == Kind.STEP_FAILED and one.retry_at is not None
        if is_attempt or (one.kind == Kind.STEP_STARTED and failed.get(one.step, False)):
            yield one.seq


async def _look_at_children(
    engine: Engine, run: Run, kept: Sequence[Record], left: Sequence[Record]
) -> tuple[list[str], list[Record]]:
    """The failed children that the run waits for again, and the starts of those that have ended for good.

    A child that has completed since is believed, and so is one that goes on. One that has failed, and whose failure the
    run has not yet heard of, would fail the run again.
    """
    heard = {one.digest for one in kept if one.kind == Kind.CHILD and not _started(one)}
    told = {one.digest for one in left if one.kind == Kind.CHILD and not _started(one)}
    waited = {one.digest for one in left if not _started(one)}
    over: dict[Status | None, set[str]] = {None: told, Status.CANCELLED: waited}
    cancelled = {_target(one) for one in left if (one.data or {}).get("signal_name") == CANCEL}
    failed: list[str] = []
    ended: list[Record] = []
    for start in kept:
        name = _started(start)
        if not name or name in heard:
            continue
        child = await newest_of_series(engine, name)
        status = child.status if child is not None else None
        if child is not None and status is Status.FAILED and child.parent == run.id:
            failed.append(child.id)
        elif status is not Status.COMPLETED and (name in cancelled or name in over.get(status, ())):
            ended.append(start)
    return failed, ended


def _started(record: Record) -> str:
    """The child that a record says was started, if it is one of those."""
    child: str = (record.data or {}).get("child", "") if record.kind == Kind.CHILD else ""
    return child


def _target(record: Record) -> str:
    target: str = (record.data or {}).get("to", "")
    return target


def _is_final(record: Record) -> bool:
    """Whether a record is the outcome of a call, which is delivered to the code unless the code has cancelled it."""
    return record.kind in _OUTCOMES and record.retry_at is None


def _is_success(record: Record) -> bool:
    """Whether an outcome would be the same if the failure had not been: a clock that has run out is no such outcome."""
    if record.kind == Kind.CHILD and not _started(record):
        return _status_in(record) == Status.COMPLETED
    if record.kind == Kind.TIMER and record.step.rpartition("/")[2].startswith("timeout#"):
        return False
    return record.outcome != Outcome.FAILURE


def _status_in(record: Record) -> str:
    """How the child has ended that a record tells of."""
    try:
        return _word_in(record.raw()).status
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointCorrupt(f"run {record.run!r}: the record at seq {record.seq} names no child: {error}") from None


class _Word(msgspec.Struct):
    status: str


_word_in = msgspec.json.Decoder(_Word).decode
