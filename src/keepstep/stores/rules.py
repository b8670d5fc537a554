"""What every store decides alike, so that it is decided once: pure functions over the port's records."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError
from ..model import FINISHED, Kind, Run, RunQuery, Signal, Status, may_move
from ..model.run import ACTIVE
from ..model.series import SERIES
from ..ports import Advance, Answer, Change, Create, Row, Verdict
from .records import unseal

#: A page of checkpoints stops after about this many bytes, so that loading a long history needs bounded memory.
PAGE_BYTES = 4_000_000

_encode = msgspec.json.Encoder().encode

#: A cursor is the number of a run, which fits 64 bits; in a damaged row it may be any such number.
_CURSOR = re.compile(r"-?[0-9]{1,19}")

#: Statuses in which a run stays until a person acts: it has no owner, no wake-up and is never claimed by itself.
ENDED = FINISHED | {Status.SET_ASIDE}


class Head(Protocol):
    """What a change of a run's holder is held to."""

    @property
    def worker(self) -> str | None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def signals(self) -> int: ...


class Standing(Protocol):
    """What a query may ask about how a run stands."""

    @property
    def status(self) -> Status: ...
    @property
    def worker(self) -> str | None: ...
    @property
    def updated_at(self) -> datetime | None: ...


def extends(rows: Sequence[Row], after: int) -> bool:
    """Whether the rows carry on from `after` without a gap."""
    return all(row.seq == after + place for place, row in enumerate(rows, 1))


def author(change: Change) -> str | None:
    """The worker that is known to have made a change, or None when anyone may have."""
    if type(change) is Advance:
        return change.worker
    return change.run.worker if type(change) is Create else None


def check_create(create: Create) -> Run:
    """The run as it is to be stored. A queued run without a time is due at once: a run must never wait for nothing."""
    run = create.run
    if not extends(create.rows, 0) or run.seq != len(create.rows):
        raise ValueError(f"run {run.id!r}: its first rows must be numbered from 1 up to its seq, {run.seq}")
    # The count may be any number that someone wrote into an archive: it is never counted up to.
    numbered = all(signal.seq == place for place, signal in enumerate(create.signals, 1))
    if not numbered or len(create.signals) != run.signals:
        raise ValueError(f"run {run.id!r}: it must bring the {run.signals} signals that its head counts")
    if (run.worker is None) == run.status.active:
        raise ValueError(f"run {run.id!r}: it cannot be created {run.status} with the owner {run.worker!r}")
    updated_at = run.updated_at or run.created_at
    due_at = run.due_at
    if due_at is None and run.status is Status.QUEUED:
        due_at = run.created_at
    if updated_at is run.updated_at and due_at is run.due_at:
        return run
    return replace(run, updated_at=updated_at, due_at=due_at)


def may_replace(create: Create, worker: str | None, epoch: int, signals: int) -> bool:
    """Whether a run may be put in place of one whose head says this."""
    return worker is None and epoch == create.over and create.heard in (None, signals)


def seal_signal(signal: Signal, seq: int, now: datetime) -> Signal:
    """The signal as it is stored: with its number, its time, and a checksum over all of it."""
    numbered = replace(signal, seq=seq, sent_at=signal.sent_at or now, checksum="")
    object.__setattr__(numbered, "checksum", _signal_checksum(numbered))  # nobody else has seen it yet
    return numbered


def check_signal(signal: Signal) -> Signal:
    """The signal, if it is as it was written; those of the first schema have no checksum to be held to."""
    if signal.checksum and signal.checksum != _signal_checksum(signal):
        raise CheckpointCorrupt(f"run {signal.run!r}: its signal {signal.seq} is not as it was written")
    return signal


def _signal_checksum(signal: Signal) -> str:
    sent_at = None if signal.sent_at is None else signal.sent_at.timestamp()
    facts = (signal.run, signal.seq, signal.name, signal.id, signal.sender, sent_at)
    return sha256(_encode(facts) + signal.payload).hexdigest()


def refuse_outbox(
    change: Advance, conflicts: Callable[[Run], bool], refuse_send: Callable[[Signal], Answer | None]
) -> Answer | None:
    """Why the runs that a change creates and the signals that it sends cannot be written, or None.

    `conflicts` says of a run to create whether another one has its id, `refuse_send` why a signal would be refused that
    is sent by itself.
    """
    created: dict[str, Run] = {}
    for create in change.creates:
        wanted = check_create(create)
        if conflicts(wanted) or not same_child(created.setdefault(wanted.id, wanted), wanted):
            return Answer(Verdict.CONFLICT, about=wanted.id)
    for send in change.sends:
        refusal, target = refuse_send(send.signal), created.get(send.signal.run)
        if target is not None and refusal is not None and refusal.verdict is Verdict.NOT_FOUND:
            refusal = Answer(Verdict.FINISHED, about=target.id) if target.status.finished else None
        if refusal is not None and refusal.verdict is not Verdict.EXISTS:
            return refusal
    return None


def same_child(existing: Run, wanted: Run) -> bool:
    """Whether a run to create is there already: started by the same call, or continuing the same run."""
    if SERIES in wanted.tags and existing.seed != wanted.seed:  # another series had a run of that id before
        return False
    return _call(existing) == _call(wanted)


_call = attrgetter("workflow", "input", "parent", "parent_key", "created_by")


def fence(head: Head | None, change: Advance) -> Answer | None:
    """Why a change may not extend this head, or None. One with a function has no rows yet: those come of it."""
    if head is None or (head.worker, head.epoch, head.seq) != (change.worker, change.epoch, change.after):
        return Answer(Verdict.FENCED, about=change.run)
    if change.within is None and not extends(change.rows, change.after):
        return Answer(Verdict.FENCED, about=change.run)
    if change.signals_seen is not None and head.signals > change.signals_seen:
        return Answer(Verdict.MISSED)
    return None


def next_status(old: Status, change: Advance) -> Status | None:
    """The status after a change, None if it may not be made: progress makes a recovering run a running one."""
    status = change.status
    if status is None:
        recovered = old is Status.RECOVERING and change.progress and change.rows and not change.release
        status = Status.RUNNING if recovered else old
    if not may_move(old, status) or (status.active and releases(change, status)):
        return None
    return status


def releases(change: Advance, status: Status) -> bool:
    """Whether the owner gives the run up; an ended run has no owner."""
    return change.release or status in ENDED


def due_after(change: Advance, status: Status, at: datetime) -> datetime | None:
    """When a released run is due. A run handed back without a time is due at once."""
    if status in ENDED:
        return None
    if change.due_at is None and status is Status.QUEUED:
        return at
    return change.due_at


def status_when_claimed(old: Status, *, taken: bool) -> Status:
    """The status that a claim gives: a run whose owner died while executing it is recovering, any other running."""
    return Status.RECOVERING if taken and old in ACTIVE else Status.RUNNING


def claimable_by_name(status: Status, wanted: frozenset[Status]) -> bool:
    """Whether a person's command may claim a run in this status; a cancelled run is final."""
    return status in wanted and status is not Status.CANCELLED


def page_start(query: RunQuery) -> int | None:
    """The number of the run that ended the page before, or None for the first page."""
    if query.after is None:
        return None
    if not _CURSOR.fullmatch(query.after) or not -(2**63) <= int(query.after) < 2**63:
        raise DefinitionError(f"after={query.after[:60]!r} is not the `next` of a page of runs")
    return int(query.after)


def matches(query: RunQuery, run: Run, now: Standing | None = None) -> bool:
    """Whether a run is one that a query asks for; `now` is how it stands, if the run itself is as it was created."""
    now = now or run
    return (
        (query.workflow is None or run.workflow == query.workflow)
        and (not query.status or now.status in query.status)
        and (query.parent is None or run.parent == query.parent)
        and (query.worker is None or now.worker == query.worker)
        and all(run.tags.get(name) == value for name, value in query.tags.items())
        and (query.created_before is None or run.created_at < query.created_before)
        and (query.created_after is None or run.created_at > query.created_after)
        and (query.updated_before is None or (now.updated_at or run.created_at) < query.updated_before)
        and (query.id_prefix is None or run.id.startswith(query.id_prefix))
    )


def outcome_kind(status: Status) -> Kind | None:
    """The kind of record that says how a run in this status came to its end."""
    if status in FINISHED:
        return Kind.RUN_FINISHED
    return Kind.ERROR if status is Status.SET_ASIDE else None


#: The status that a run has after its end, by the outcome that is recorded there.
_ENDS = {"success": Status.COMPLETED, "failure": Status.FAILED, "cancelled": Status.CANCELLED}


def erasing(run_id: str) -> str:
    """The name of the mark that a store keeps while a run is erased; it must not tell the id of the run."""
    return f"erasing {sha256(run_id.encode('utf-8', 'surrogatepass')).hexdigest()}"


def with_outcome(run: Run, row: Row) -> Run:
    """The run with the output or the error that its newest final record holds."""
    record, checksum = next(unseal([row], run.id, after=row.seq - 1))
    if row.seq == run.seq and checksum != run.checksum:
        raise CheckpointCorrupt(
            f"run {run.id!r}: chain broken at seq {row.seq}: its last record is not what its head names"
        )
    if run.status in FINISHED and (row.seq != run.seq or _ENDS.get(record.outcome) is not run.status):
        raise CheckpointCorrupt(f"run {run.id!r}: it is {run.status.value}, but its last record does not say so")
    data: dict[str, Any] = record.data or {}
    output = None
    if run.status is Status.COMPLETED and isinstance(record.value, (bytes, msgspec.Raw)):
        output = bytes(record.value)
    error = record.error.info() if record.error else None
    return replace(run, output=output, error=error, continued_as=data.get("continued_as"))


#: The progress of runs, as the heartbeat of their worker holds it.
progress_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def progress_in(stored: Any) -> dict[str, msgspec.Raw]:
    """The progress that a heartbeat holds, if any: worth showing, never worth failing for."""
    try:
        return progress_of(stored) if stored is not None else {}
    except (TypeError, ValueError, msgspec.MsgspecError):
        return {}
