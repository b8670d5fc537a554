"""The audit of a run: who did what to it, when and why, derived from what is recorded and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RunNotFound
from ..model import Kind, Outcome, Run, Signal, Status
from ..model.signal import CANCEL, PAUSE, RESERVED, RESOLVE, RESUME
from ..stores.records import Record
from .history import read_records, superseded_by

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One thing that happened to a run. `before` and `after` are its statuses, the same when it did not move.

    `seq` is the checkpoint that proves it, 0 for what the run's row or an unread signal proves. `epoch` numbers the
    leases of the run: all that one worker did under one lease has the same. `seconds` is how long an attempt took.
    """

    at: datetime
    run: str
    what: str
    actor: str
    before: Status | None
    after: Status
    outcome: Outcome = Outcome.SUCCESS
    step: str = ""
    attempt: int = 0
    reason: str = ""
    seq: int = 0
    epoch: int = 0
    seconds: float | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One lease of a run: who drove it, from when to when, and how that ended; `until` is None while it goes on.

    A worker that took a run and recorded nothing leaves no incarnation, only a number that is missing, unless it took
    the run from a dead one: those are counted.
    """

    epoch: int
    worker: str
    since: datetime
    until: datetime | None = None
    ended: str = ""


async def audit(engine: Engine, run_id: str) -> list[AuditEntry]:
    """Everything that happened to a run, in order: its creation, each step, each transition, recovery and command."""
    run = await engine.read(engine.store.get_run, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    story = _Story(engine, run)
    story.created()
    async for record, _ in read_records(engine, run):
        story.add(record)
    recorded = len(story.entries)
    story.now(run)
    seen = 0
    while signals := await engine.read(engine.store.list_signals, run_id, seen):
        seen = signals[-1].seq
        for signal in signals:
            story.unread(signal)
    tail = sorted(story.entries[recorded:], key=lambda entry: entry.at)
    story.entries[recorded:] = tail  # what left no record has no place but its time
    return [_redacted(engine, entry) for entry in story.entries]


class _Story:
    """Tells the records of one run as a sequence of entries, keeping track of the status that they leave it in."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self.engine = engine
        self.run = run
        self.status = Status.QUEUED
        self.entries: list[AuditEntry] = []
        self.epoch = 0
        self.worker = ""
        self._read: set[int] = set()
        self._cancelled_by = ("", "")

    def created(self) -> None:
        run = self.run
        what = "created as a child" if run.parent is not None else "created"
        if run.origin is not None:
            what = f"created as a fork of {run.origin}"
        data = {"workflow": run.workflow, "version": run.version, "input": sha256(run.input).hexdigest()}
        self.entries.append(
            AuditEntry(run.created_at, run.id, what, run.created_by or "unknown", None, Status.QUEUED, data=data)
        )

    def add(self, record: Record) -> None:
        data = record.data or {}
        if "signal" in data:
            self._read.add(data["signal"])
        self._claimed(record, data)
        before, after = self._move(record)
        actor, reason = self._who_and_why(record, data)
        if record.kind == Kind.SIGNAL and record.step == CANCEL:
            self._cancelled_by = (actor, reason)
        self.entries.append(
            AuditEntry(
                at=record.finished_at or self.run.created_at,
                run=self.run.id,
                what=_what(record, data),
                actor=actor,
                before=before,
                after=after,
                outcome=Outcome(record.outcome),
                step=record.step,
                attempt=record.attempt,
                reason=reason,
                seq=record.seq,
                epoch=self.epoch,
                seconds=_seconds(record),
            )
        )
        self.status = after

    def _claimed(self, record: Record, data: dict[str, Any]) -> None:
        """The first record under a lease tells how the lease before it ended, and how this one began."""
        claimed = record.claimed
        if claimed is None:
            if record.kind == Kind.RUN_STARTED:  # leased at birth
                self.epoch = 1
        else:
            found = Status(claimed.before)
            if found is Status.RECOVERING:
                lost = min(claimed.epoch - self.epoch, data.get("recoveries", claimed.epoch)) - 1
                self._taken_in_vain(lost, claimed.epoch, claimed.since or claimed.at)
            if found is not self.status and not self.status.finished:
                alone = claimed.epoch == self.epoch + 1
                actor = self.worker if alone else _NOBODY
                self._add_move(claimed.since or claimed.at, _LEFT.get(found, found.value), actor, found)
            self.epoch = claimed.epoch
            if record.kind not in (Kind.RUN_STARTED, Kind.RECOVERED) and "act" not in data:
                after = Status.RECOVERING if found.active else Status.RUNNING
                what = "woken" if found is Status.WAITING else _TAKEN[after]
                self._add_move(claimed.at, what, record.worker, after)
        self.worker = record.worker

    def _taken_in_vain(self, leases: int, before: int, at: datetime) -> None:
        """Tell of takeovers that left no record: so many, the last of them under the epoch before this one.

        Only their number is known, and when the last of them began.
        """
        for epoch in range(before - leases, before):
            self.epoch = epoch
            self._add_move(at, f"{_TAKEN[Status.RECOVERING]}, nothing recorded", _NOBODY, Status.RECOVERING)

    def _add_move(self, at: datetime, what: str, actor: str, after: Status) -> None:
        self.entries.append(AuditEntry(at, self.run.id, what, actor, self.status, after, epoch=self.epoch))
        self.status = after

    def _move(self, record: Record) -> tuple[Status, Status]:
        """The status before and after a record."""
        data = record.data or {}
        before = Status(data["before"]) if "before" in data else self.status
        if record.kind == Kind.RUN_FINISHED:
            ends = {"success": Status.COMPLETED, "failure": Status.FAILED, "cancelled": Status.CANCELLED}
            return before, ends[record.outcome]
        if record.kind == Kind.ERROR:
            return before, Status.SET_ASIDE
        if record.kind == Kind.SUPERSEDED:  # who edits the state of a paused run leaves it so
            return before, Status.PAUSED if before is Status.PAUSED and data.get("act") == "edit" else Status.QUEUED
        if record.kind == Kind.RECOVERED:
            return before, Status.RECOVERING if "from" in data else Status.RUNNING
        if record.kind == Kind.SIGNAL and record.step == PAUSE:
            return before, Status.PAUSED
        return before, Status.RUNNING

    def _who_and_why(self, record: Record, data: dict[str, Any]) -> tuple[str, str]:
        actor = str(data.get("actor") or data.get("sender") or record.worker)
        reason = str(data.get("reason") or "")
        if record.kind == Kind.RECOVERED and "from" not in data:
            reason = f"{data.get('unrecorded')} leases before it recorded nothing"
        elif record.kind == Kind.RECOVERED:
            reason = f"its owner {data.get('from')} was dead (recovery {data.get('recoveries')})"
        elif record.kind == Kind.SIGNAL and record.step in (CANCEL, PAUSE, RESUME) and not reason:
            reason = _reason_in(record.value)
        elif record.kind == Kind.RUN_FINISHED and record.outcome == Outcome.CANCELLED and "actor" not in data:
            who, why = self._cancelled_by
            actor, reason = who or actor, why
        elif record.error is not None and not reason:
            reason = f"{record.error.type}: {record.error.message}"
        return actor, reason

    def unread(self, signal: Signal) -> None:
        """A signal that the run has not taken up leaves no record yet: it proves itself."""
        if signal.seq in self._read or signal.sent_at is None:
            return
        control = signal.name in (CANCEL, PAUSE, RESUME) or signal.name.startswith(f"{RESOLVE}:")
        reason = _reason_in(signal.payload) if control else ""
        what = f"{_signal_name(signal.name)} sent, not read yet"
        self.entries.append(
            AuditEntry(signal.sent_at, self.run.id, what, signal.sender, self.status, self.status, reason=reason)
        )

    def now(self, run: Run) -> None:
        """The newest move may be one that no record tells of yet: parking, handing back, a claim."""
        if run.updated_at is None or (run.status is self.status and (run.epoch == self.epoch or run.worker is None)):
            return
        if run.status is Status.RECOVERING:
            self._taken_in_vain(min(run.recoveries, run.epoch - self.epoch) - 1, run.epoch, run.updated_at)
        actor = run.worker or (self.worker if run.epoch == self.epoch else _NOBODY)
        if run.worker is not None:
            self.epoch = run.epoch
        what = _LEFT.get(run.status) or _TAKEN.get(run.status) or run.status.value
        self._add_move(run.updated_at, what, actor or "its worker", run.status)


_NOBODY = "a worker that recorded nothing"
#: What a lease ended with, by the status that it left, and how one begins, by the status that it gives.
_LEFT = {Status.WAITING: "parked", Status.QUEUED: "handed back"}
_TAKEN = {Status.RUNNING: "claimed", Status.RECOVERING: "taken over from a dead worker"}


def _seconds(record: Record) -> float | None:
    if record.started_at is None or record.finished_at is None:
        return None
    return (record.finished_at - record.started_at).total_seconds()


def _what(record: Record, data: dict[str, Any]) -> str:
    """What a record says happened, in a few words."""
    if record.kind == Kind.SUPERSEDED:
        count = superseded_by(record)
        return f"{data.get('act', 'superseded')}, {count} record{'' if count == 1 else 's'} superseded"
    if record.kind == Kind.SIGNAL:
        return _received(record.step)
    if record.kind == Kind.RUN_FINISHED and data.get("continued_as"):
        return f"run finished, continued as {data['continued_as']}"
    if record.kind == Kind.ERROR:
        return f"set aside by {data['act']}" if data.get("act") else "set aside"
    if record.kind == Kind.CHILD and data.get("child"):
        return f"child {data['child']} started"
    return record.kind


def _received(step: str) -> str:
    said = {CANCEL: "cancel taken up", PAUSE: "paused", RESUME: "resumed"}
    return said.get(step, "signal received")


def _signal_name(name: str) -> str:
    return name.removeprefix(RESERVED) if name.startswith(RESERVED) else f"signal {name}"


def _reason_in(payload: Any) -> str:
    """The reason that a person gave with a command."""
    try:
        value = msgspec.json.decode(bytes(payload))
    except (msgspec.MsgspecError, TypeError, ValueError):
        return ""
    return str(value.get("reason") or "") if isinstance(value, dict) else ""


def _redacted(engine: Engine, entry: AuditEntry) -> AuditEntry:
    if not entry.reason:
        return entry
    return replace(entry, reason=engine.censor.redact(entry.reason))


def incarnations(entries: list[AuditEntry]) -> list[Incarnation]:
    """Who drove a run, one lease after the other: told by its audit."""
    told: list[Incarnation] = []
    for entry in entries:
        going = told[-1] if told and told[-1].until is None else None
        if entry.epoch and entry.after.active and (going is None or going.epoch != entry.epoch):
            if going is not None:
                told[-1] = replace(going, until=entry.at, ended="lost")
            told.append(Incarnation(entry.epoch, entry.actor, entry.at))
        elif going is not None and entry.before is not entry.after and not entry.after.active:
            told[-1] = replace(going, until=entry.at, ended=entry.what)
    return told


def transitions(entries: list[AuditEntry]) -> Iterator[AuditEntry]:
    """Only what moved the run from one status to another."""
    return (entry for entry in entries if entry.before is not entry.after)
