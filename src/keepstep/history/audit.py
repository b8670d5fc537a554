"""The audit of a run: every action on it with its actor, time and reason, derived from the records alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RunNotFound
from ..kernel.graph.position import Position
from ..kernel.replay import read_records, superseded_by
from ..kernel.undo_records import Decided
from ..model import Kind, Outcome, Run, Signal, Status
from ..model.checkpoint import SAYS_CLAIM
from ..model.run import removed_records
from ..model.signal import BEAT, CANCEL, PAUSE, RESERVED, RESOLVE, RESUME
from ..records.data import Data, data_of
from ..records.record import Record, unseal_some

if TYPE_CHECKING:
    from .host import CommandHost

#: Records whose entries are made at once, for a door that shows only how a run ended.
NEWEST = 1000


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One event in the life of a run.

    `before` and `after` are its statuses; they are equal if the status did not change.

    `seq` is the checkpoint that proves the event, or 0 if the run's row or an unread signal proves it. `epoch` is the
    number of the lease: all entries of one lease share it. `seconds` is the duration of an attempt.
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
    agent: str | None = None
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One lease of a run: its worker, its begin and its end. `until` is None while the lease is held.

    A worker that claimed a run and recorded nothing leaves no incarnation: its epoch is missing. Takeovers from a dead
    worker are the exception: they are always counted.
    """

    epoch: int
    worker: str
    since: datetime
    until: datetime | None = None
    ended: str = ""


async def audit(host: CommandHost, run_id: str) -> list[AuditEntry]:
    """Return everything that happened to a run, in order: its creation, steps, transitions, recoveries and commands."""
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    story = _Story(host, run)
    story.created()
    async for record, _ in read_records(host, run):
        story.add(record)
    recorded = len(story.entries)
    story.now(run)
    seen = 0
    while signals := await host.signals(run_id, seen):
        seen = signals[-1].seq
        for signal in signals:
            story.unread(signal)
    tail = sorted(story.entries[recorded:], key=lambda entry: entry.at)
    # Entries without a record can only be ordered by time.
    story.entries[recorded:] = tail
    return await host.call(lambda: [_redacted(host, entry) for entry in story.entries])


async def newest_entries(host: CommandHost, run: Run) -> list[AuditEntry]:
    """Return the entries of the newest records of a run, at most `NEWEST`; of a short run, those of all records."""
    story = _Story(host, run)
    for record, _ in unseal_some(await host.records(run.id, max(run.seq - NEWEST, 0), NEWEST), run.id):
        story.add(record)
    story.now(run)
    return [_redacted(host, entry) for entry in story.entries]


class _Story:
    """Converts the records of one run into audit entries and tracks the run's status."""

    def __init__(self, host: CommandHost, run: Run) -> None:
        self.host = host
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
        data = data_of(record, Data)
        if record.seq == self.run.kept_from:
            self._removed(record)
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
                agent=record.agent,
                stage=record.stage,
            )
        )
        self.status = after

    def _removed(self, record: Record) -> None:
        """Add an entry for the records that were removed before a record, which is usually a consolidated state."""
        at = record.finished_at or self.run.created_at
        self._add_move(at, removed_records(self.run), "keepstep", Status.RUNNING)
        if record.kind == Kind.STATE:
            for first, last in Position.restored(record)[1].signals:
                self._read.update(range(first, last + 1))

    def _claimed(self, record: Record, data: Data) -> None:
        """The first record under a lease tells how the lease before it ended, and how this one began."""
        claimed = record.claimed
        if claimed is None:
            if record.kind == Kind.RUN_STARTED:  # created with a lease
                self.epoch = 1
        else:
            found = Status(claimed.before)
            if found is Status.RECOVERING:
                lost = min(claimed.epoch - self.epoch, data.get("recoveries", claimed.epoch)) - 1
                self._add_unrecorded_takeovers(lost, claimed.epoch, claimed.since or claimed.at)
            if found is not self.status and not self.status.finished:
                alone = claimed.epoch == self.epoch + 1
                actor = self.worker if alone else _NOBODY
                self._add_move(claimed.since or claimed.at, _LEFT.get(found, found.value), actor, found)
            self.epoch = claimed.epoch
            if record.kind not in SAYS_CLAIM and "act" not in data:
                after = Status.RECOVERING if found.active else Status.RUNNING
                what = "woken" if found is Status.WAITING else _TAKEN[after]
                self._add_move(claimed.at, what, record.worker, after)
        self.worker = record.worker

    def _add_unrecorded_takeovers(self, leases: int, before: int, at: datetime) -> None:
        """Add an entry for each takeover that left no record; the last of them had the epoch before `before`.

        Only their number is known, and the begin of the last one.
        """
        for epoch in range(before - leases, before):
            self.epoch = epoch
            self._add_move(at, f"{_TAKEN[Status.RECOVERING]}, nothing recorded", _NOBODY, Status.RECOVERING)

    def _add_move(self, at: datetime, what: str, actor: str, after: Status) -> None:
        self.entries.append(AuditEntry(at, self.run.id, what, actor, self.status, after, epoch=self.epoch))
        self.status = after

    def _move(self, record: Record) -> tuple[Status, Status]:
        """The status before and after a record."""
        data = data_of(record, Data)
        before = Status(data["before"]) if "before" in data else self.status
        if record.kind == Kind.RUN_FINISHED:
            ends = {"success": Status.COMPLETED, "failure": Status.FAILED, "cancelled": Status.CANCELLED}
            return before, ends[record.outcome]
        if record.kind == Kind.ERROR:
            return before, Status.SET_ASIDE
        if record.kind == Kind.RECOVERED and "act" in data:
            return before, Status.QUEUED
        if record.kind == Kind.SUPERSEDED and record.trigger == "recovery" and data.get("act") != "migrate":
            return self.status, self.status  # the verb that a recovery handler has chosen
        if record.kind == Kind.SUPERSEDED:  # editing the state of a paused run keeps it paused
            return before, Status.PAUSED if before is Status.PAUSED and data.get("act") == "edit" else Status.QUEUED
        if record.kind == Kind.UNDO and "act" in data:
            return before, Status.QUEUED
        if record.kind == Kind.RECOVERED:
            return before, Status.RECOVERING if "from" in data else Status.RUNNING
        if record.kind == Kind.SIGNAL and record.step == PAUSE:
            return before, Status.PAUSED
        return before, Status.RUNNING

    def _who_and_why(self, record: Record, data: Data) -> tuple[str, str]:
        actor = str(data.get("actor") or data.get("sender") or record.worker)
        reason = str(data.get("reason") or "")
        if record.kind == Kind.RECOVERED and ("act" in data or ("handler" in data and "from" not in data)):
            pass  # its own reason, if a person has given one
        elif record.kind == Kind.RECOVERED and "from" not in data:
            reason = f"{data.get('unrecorded', 'some')} leases before it recorded nothing"  # older records hide it
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
        """Add a signal that the run has not read yet; no record exists for it."""
        if signal.seq in self._read or signal.sent_at is None:
            return
        control = signal.name in (CANCEL, PAUSE, RESUME) or signal.name.startswith(f"{RESOLVE}:")
        reason = _reason_in(signal.payload) if control else ""
        what = f"{_signal_name(signal.name)} sent, not read yet"
        if signal.name.startswith(BEAT):  # no call ever reads it
            what = f"heartbeat for {signal.name.removeprefix(BEAT)} sent"
        self.entries.append(
            AuditEntry(signal.sent_at, self.run.id, what, signal.sender, self.status, self.status, reason=reason)
        )

    def now(self, run: Run) -> None:
        """Add the newest transition if no record describes it yet: parking, handing back, a claim."""
        if run.updated_at is None or (run.status is self.status and (run.epoch == self.epoch or run.worker is None)):
            return
        if run.status is Status.RECOVERING:
            self._add_unrecorded_takeovers(min(run.recoveries, run.epoch - self.epoch) - 1, run.epoch, run.updated_at)
        actor = run.worker or (self.worker if run.epoch == self.epoch else _NOBODY)
        if run.worker is not None:
            self.epoch = run.epoch
        what = _LEFT.get(run.status) or _TAKEN.get(run.status) or run.status.value
        self._add_move(run.updated_at, what, actor or "its worker", run.status)


_NOBODY = "a worker that recorded nothing"
#: How a lease ended, by the status it left behind; and how a lease began, by the status it set.
_LEFT = {Status.WAITING: "parked", Status.QUEUED: "handed back"}
_TAKEN = {Status.RUNNING: "claimed", Status.RECOVERING: "taken over from a dead worker"}


def _seconds(record: Record) -> float | None:
    if record.started_at is None or record.finished_at is None:
        return None
    return (record.finished_at - record.started_at).total_seconds()


def _what(record: Record, data: Data) -> str:
    """Describe a record in a few words."""
    if record.kind == Kind.SUPERSEDED:
        count = superseded_by(record)
        return f"{data.get('act', 'superseded')}, {count} record{'' if count == 1 else 's'} superseded"
    if record.kind == Kind.SIGNAL:
        return _received(record.step)
    if record.kind == Kind.RECOVERED and ("act" in data or "handler" in data):
        handler = f", handler {data['handler']}" if "handler" in data else ""
        return f"{'recovery asked for' if 'act' in data else 'recovered'}{handler}"
    if record.kind == Kind.UNDO:
        return _undo_in_words(record, data)
    if record.kind == Kind.RUN_FINISHED and data.get("not_undone"):
        return f"run finished, not undone: {', '.join(data['not_undone'])}"
    if record.kind == Kind.RUN_FINISHED and data.get("continued_as"):
        return f"run finished, continued as {data['continued_as']}"
    if record.kind == Kind.ERROR:
        return f"set aside by {data['act']}" if data.get("act") else "set aside"
    if record.kind == Kind.CHILD and data.get("child"):
        return f"child {data['child']} started"
    return record.kind


def _undo_in_words(record: Record, data: Data) -> str:
    if "act" in data:
        return f"undo {'skipped' if data['act'] == 'skip' else 'retried'}"
    decided = msgspec.json.decode(record.raw(), type=Decided)
    return f"undo begun, {len(decided.steps)} step{'' if len(decided.steps) == 1 else 's'}"


def _received(step: str) -> str:
    texts = {CANCEL: "cancel taken up", PAUSE: "paused", RESUME: "resumed"}
    return texts.get(step, "signal received")


def _signal_name(name: str) -> str:
    return name.removeprefix(RESERVED) if name.startswith(RESERVED) else f"signal {name}"


def _reason_in(payload: Any) -> str:
    """Return the reason that a person gave with a command."""
    try:
        value = msgspec.json.decode(bytes(payload))
    except (msgspec.MsgspecError, TypeError, ValueError):
        return ""
    return str(value.get("reason") or "") if isinstance(value, dict) else ""


def _redacted(host: CommandHost, entry: AuditEntry) -> AuditEntry:
    if not entry.reason:
        return entry
    return replace(entry, reason=host.redaction.redact(entry.reason))


def incarnations(entries: list[AuditEntry]) -> list[Incarnation]:
    """Derive the leases of a run from its audit, in order."""
    leases: list[Incarnation] = []
    for entry in entries:
        current = leases[-1] if leases and leases[-1].until is None else None
        if entry.epoch and entry.after.active and (current is None or current.epoch != entry.epoch):
            if current is not None:
                leases[-1] = replace(current, until=entry.at, ended="lost")
            leases.append(Incarnation(entry.epoch, entry.actor, entry.at))
        elif current is not None and entry.before is not entry.after and not entry.after.active:
            leases[-1] = replace(current, until=entry.at, ended=entry.what)
    return leases


def transitions(entries: list[AuditEntry]) -> Iterator[AuditEntry]:
    """Return only the entries that changed the status."""
    return (entry for entry in entries if entry.before is not entry.after)
