"""The decision of a commit, written once for every store.

A store passes a `View` of its data to a `Transition`, applies changes to it, and executes the collected `Writes`.
Changes are decided in order, on heads in memory. A refused change adds nothing to the writes.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from operator import attrgetter
from typing import Protocol, TypeVar

import msgspec

from ..errors import CheckpointCorrupt
from ..model import Run, Signal, Status, may_move
from ..model.series import SERIES
from ..ports import Advance, Answer, Change, Create, Rekey, Row, Send, Verdict
from ..records.record import Count, Instant
from .rules import ENDED, check_create, extends, seal_signal


class Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a run that changes after its creation."""

    status: Status
    seq: Count = 0
    checksum: str = ""
    epoch: Count = 0
    worker: str | None = None
    due_at: Instant | None = None
    wakes: tuple[str, ...] = ()
    signals: Count = 0
    recoveries: Count = 0
    updated_at: Instant | None = None
    signals_read: Count | None = None
    kept_from: Count = 0
    signals_from: Count = 0
    holds: Count = 0
    service: str | None = None

    def of(self, run: Run) -> Run:
        """Return the run with this head."""
        return replace(run, **{name: getattr(self, name) for name in HEAD_FIELDS})


#: Names of the fields of a run that belong to its head.
HEAD_FIELDS = Head.__struct_fields__

H = TypeVar("H", bound=Head)

#: Refusals of a signal that leave an optional one out.
_ENDED_OR_MISSING = frozenset((Verdict.FINISHED, Verdict.NOT_FOUND))
#: Number of the second record, which may be removed. The first one is always kept.
_SECOND = 2

_replace = msgspec.structs.replace


def head_of(run: Run) -> Head:
    """Return the head of a run."""
    return Head(
        run.status,
        run.seq,
        run.checksum,
        run.epoch,
        run.worker,
        run.due_at,
        run.wakes,
        run.signals,
        run.recoveries,
        run.updated_at,
        run.signals_read,
        run.kept_from,
        run.signals_from,
        run.holds,
        run.service,
    )


class View(Protocol):
    """The stored data on which changes are decided."""

    def head(self, run: str) -> Head | None:
        """Return the head of a run; its `updated_at` may be None. Raise `CheckpointCorrupt` if it cannot be read."""

    def run(self, run: str) -> Run | None:
        """Return a stored run. Raise `CheckpointCorrupt` if it cannot be read."""

    def data_key(self, run: str) -> str | None:
        """Return the data key of a run; None if there is no such run."""

    def signal_seq(self, run: str, signal_id: str) -> int | None:
        """Return the seq of the signal with this id that a run has received; None if there is none."""

    def twin(self, queue: str, dedupe: str) -> str | None:
        """Return the run of a queue with this `dedupe` that has not finished; None if there is none."""

    def call(self, change: Advance) -> Exception | None:
        """Call the function of a transactional change. Return the error that refuses the change, or None."""


class Writes(msgspec.Struct):
    """The writes of all accepted changes: first `removed`, then the rest in any order.

    `runs` holds new runs with their newest heads, `heads` the new heads of stored runs, `keys` new data keys by run.
    `trims` holds the runs whose head says that older rows or signals are to be removed.
    """

    removed: list[str] = []
    runs: dict[str, Run] = {}
    heads: dict[str, Head] = {}
    rows: list[tuple[str, Row]] = []
    signals: list[Signal] = []
    keys: dict[str, str] = {}
    trims: dict[str, None] = {}


class Transition(msgspec.Struct):
    """Decides changes in order, each on the data that the changes before it have left."""

    view: View
    now: datetime
    writes: Writes = msgspec.field(default_factory=Writes)
    _heads: dict[str, Head | None] = {}
    _runs: dict[str, Run | CheckpointCorrupt | None] = {}
    _signal_seqs: dict[tuple[str, str], int] = {}

    def apply(self, change: Change) -> Answer:
        """Decide one change, and collect its writes."""
        if type(change) is Advance:
            return self._advance(change)
        if type(change) is Create:
            return self._create(change)
        if type(change) is Rekey:
            return self._rekey(change)
        return self.send(change)  # type: ignore[arg-type]

    # -- the store's data, as the changes so far have left it ----------------------------------------------------------

    def _head(self, run: str) -> Head | None:
        heads = self._heads
        if run not in heads:
            heads[run] = self.view.head(run)
        return heads[run]

    def _run(self, run: str) -> Run | CheckpointCorrupt | None:
        """Return a run as it is or will be stored; the error if it cannot be read; None if there is none."""
        if run in self.writes.runs:
            return self.writes.runs[run]
        if run not in self._runs:
            try:
                self._runs[run] = self.view.run(run)
            except CheckpointCorrupt as error:
                self._runs[run] = error
        return self._runs[run]

    def _signal_seq(self, signal: Signal) -> int | None:
        if not signal.id:
            return None
        seq = self._signal_seqs.get((signal.run, signal.id))
        if seq is None and signal.run not in self.writes.runs:
            seq = self.view.signal_seq(signal.run, signal.id)
        return seq

    def _put(self, run: str, head: Head) -> None:
        self._heads[run] = head
        if run in self.writes.runs:
            self.writes.runs[run] = head.of(self.writes.runs[run])
        else:
            self.writes.heads[run] = head

    # -- the lease holder's changes ------------------------------------------------------------------------------------

    def _advance(self, change: Advance) -> Answer:
        head = self._head(change.run)
        refusal = fence(head, change)
        if head is None or refusal is not None:
            return refusal or Answer(Verdict.FENCED, about=change.run)
        if change.within is not None and (refusal := self._call(change)) is not None:
            return refusal
        status = next_status(head.status, change)
        if status is None:
            return Answer(Verdict.ILLEGAL)
        if (change.creates or change.sends) and (refusal := self._refuse_outbox(change)) is not None:
            return refusal
        new = moved(head, change, status, self.now)
        if change.signals_read is not None or change.trim is not None or change.trim_signals is not None:
            new = self._trimmed(new, change)
        self._extend(change, new)
        return Answer(Verdict.DONE, None, change.after + len(change.rows))

    def _call(self, change: Advance) -> Answer | None:
        """Call the function of a transactional change, which sets its rows. Return the refusal, or None."""
        error = self.view.call(change)
        if error is not None:
            return Answer(Verdict.FAILED, error=error)
        return None if extends(change.rows, change.after) else Answer(Verdict.FENCED, about=change.run)

    def _trimmed(self, head: Head, change: Advance) -> Head:
        """Return the head with the signals that the run has read, and with the start of what is kept."""
        kept_from, signals_from = head.kept_from, head.signals_from
        if change.trim is not None:
            kept = min(change.trim, change.after + bool(change.rows))  # the newest row stays
            kept_from = max(kept_from, kept) if kept > _SECOND else kept_from
        if change.trim_signals is not None:
            kept = min(change.trim_signals, head.signals + 1)
            signals_from = max(signals_from, kept) if kept > 1 else signals_from
        if (kept_from, signals_from) != (head.kept_from, head.signals_from):
            self.writes.trims[change.run] = None
        signals_read = head.signals_read if change.signals_read is None else change.signals_read
        return _replace(head, signals_read=signals_read, kept_from=kept_from, signals_from=signals_from)

    def _extend(self, change: Advance, head: Head) -> None:
        self._put(change.run, head)
        for row in change.rows:
            self.writes.rows.append((change.run, row))
        for create in change.creates:
            self._create(create)
        for send in change.sends:
            if self._signal_seq(send.signal) is None and not self.leaves_out(send):
                self._deliver(send.signal)

    def leaves_out(self, send: Send) -> bool:
        """Whether an optional signal is not sent, because its run has finished or does not exist."""
        if not send.optional:
            return False
        head = self._head(send.signal.run)
        return head is None or head.status.finished

    def _refuse_outbox(self, change: Advance) -> Answer | None:
        """Return the refusal of the runs that a change creates or the signals that it sends, or None."""
        created: dict[str, Run] = {}
        for create in change.creates:
            wanted = check_create(create)
            first = created.setdefault(wanted.id, wanted)
            existing = self._run(wanted.id) or first
            if isinstance(existing, CheckpointCorrupt) or not (
                same_child(existing, wanted) and same_child(first, wanted)
            ):
                return Answer(Verdict.CONFLICT, about=wanted.id)
        for send in change.sends:
            target = created.get(send.signal.run)
            refusal = self._refuse_send(send)
            if target is not None and refusal is not None and refusal.verdict is Verdict.NOT_FOUND:
                refusal = Answer(Verdict.FINISHED, about=target.id) if target.status.finished else None
            if refusal is None or refusal.verdict is Verdict.EXISTS:
                continue
            if not (send.optional and refusal.verdict in _ENDED_OR_MISSING):
                return refusal
        return None

    # -- anyone's changes ----------------------------------------------------------------------------------------------

    def _create(self, create: Create) -> Answer:
        run = check_create(create)
        is_there = self._run(run.id) is not None  # read before the head, which may be damaged and raise
        if is_there and create.over is None:
            return Answer(Verdict.EXISTS, run=self._shown(run.id))
        head = self._head(run.id)
        if head is not None and create.over is None:
            return Answer(Verdict.EXISTS)
        if head is not None and not may_replace(create, head.worker, head.epoch, head.signals):
            return Answer(Verdict.FENCED, run=self._shown(run.id), about=run.id)
        if run.dedupe is not None and not run.status.finished and (twin := self._twin(run)) is not None:
            return Answer(Verdict.EXISTS, run=self._shown(twin), about=twin)
        if is_there or head is not None:
            self._remove(run.id)
        self._heads[run.id] = head_of(run)
        writes = self.writes
        writes.runs[run.id] = run
        for row in create.rows:
            writes.rows.append((run.id, row))
        for signal in create.signals:
            writes.signals.append(signal)
            if signal.id:
                self._signal_seqs[run.id, signal.id] = signal.seq
        return Answer(Verdict.DONE, run, run.seq)

    def _twin(self, run: Run) -> str | None:
        """Return another run of the same queue and `dedupe` that has not finished, or None."""
        wanted = (run.queue, run.dedupe)
        born = (one for one in self.writes.runs.values() if (one.queue, one.dedupe) == wanted)
        found = next((one.id for one in born if not one.status.finished), None)
        if found is None:
            found = self.view.twin(run.queue, run.dedupe or "")
            head = None if found is None else self._head(found)
            if head is not None and head.status.finished:  # it ends in this batch
                found = None
        return None if found == run.id else found

    def _shown(self, run_id: str) -> Run | None:
        """Return a run as the changes so far have left it; None if it cannot be read."""
        run, head = self._run(run_id), self.writes.heads.get(run_id)
        if not isinstance(run, Run):
            return None
        return run if head is None else head.of(run)

    def _remove(self, run: str) -> None:
        """Remove a run, and the collected writes about it."""
        writes = self.writes
        if writes.runs.pop(run, None) is None:
            writes.removed.append(run)
        writes.heads.pop(run, None)
        writes.keys.pop(run, None)
        writes.rows = [one for one in writes.rows if one[0] != run]
        writes.signals = [one for one in writes.signals if one.run != run]
        self._signal_seqs = {key: seq for key, seq in self._signal_seqs.items() if key[0] != run}

    def _rekey(self, change: Rekey) -> Answer:
        writes = self.writes
        born = writes.runs.get(change.run)
        if born is not None:
            key: str | None = born.data_key
        else:
            key = writes.keys[change.run] if change.run in writes.keys else self.view.data_key(change.run)
        if key is None:
            return Answer(Verdict.NOT_FOUND, about=change.run)
        if key != change.old:
            return Answer(Verdict.FENCED, about=change.run)
        existing = self._runs.get(change.run)
        if born is not None:
            writes.runs[change.run] = replace(born, data_key=change.new)
        else:
            writes.keys[change.run] = change.new
        if isinstance(existing, Run):
            self._runs[change.run] = replace(existing, data_key=change.new)
        return Answer(Verdict.DONE)

    def send(self, send: Send, *, accepted: bool = False) -> Answer:
        """Decide a single signal. A finished run receives it only if it was `accepted` before."""
        refusal = self._refuse_send(send)
        if refusal is not None and not (accepted and refusal.verdict is Verdict.FINISHED):
            return refusal
        return Answer(Verdict.DONE, None, self._deliver(send.signal))

    def _refuse_send(self, send: Send) -> Answer | None:
        signal = send.signal
        head = self._head(signal.run)
        if head is None:
            return Answer(Verdict.NOT_FOUND, about=signal.run)
        seq = self._signal_seq(signal)
        if seq is not None:
            return Answer(Verdict.EXISTS, None, seq)
        if head.status.finished:
            return Answer(Verdict.FINISHED, about=signal.run)
        if send.room is not None and head.signals_read is not None and head.signals - head.signals_read >= send.room:
            return Answer(Verdict.FULL, about=signal.run)
        return None

    def _deliver(self, signal: Signal) -> int:
        """Append a signal to an existing run. A run that sends itself a signal with its end receives it, too."""
        head = self._head(signal.run)
        if head is None:
            raise ValueError(f"a signal cannot be delivered to run {signal.run!r}, because there is no such run")
        head = received(head, signal, self.now)
        self.writes.signals.append(seal_signal(signal, head.signals, self.now))
        if signal.id:
            self._signal_seqs[signal.run, signal.id] = head.signals
        self._put(signal.run, head)
        return head.signals


# -- one head --------------------------------------------------------------------------------------------------------


def fence(head: Head | None, change: Advance) -> Answer | None:
    """Return the refusal of a change that may not extend this head, or None. Transactional changes have no rows yet."""
    if (
        head is None
        or head.worker != change.worker
        or head.epoch != change.epoch
        or head.seq != change.after
        or (change.within is None and not extends(change.rows, change.after))
    ):
        return Answer(Verdict.FENCED, about=change.run)
    if change.signals_seen is not None and head.signals > change.signals_seen:
        return Answer(Verdict.MISSED)
    return None


def next_status(old: Status, change: Advance) -> Status | None:
    """Return the status after a change; None if the change is illegal. Progress ends the status `RECOVERING`."""
    status = change.status
    if status is None:
        recovered = old is Status.RECOVERING and change.progress and change.rows and not change.release
        status = Status.RUNNING if recovered else old
    if not may_move(old, status) or (status.active and releases(change, status)):
        return None
    return status


def releases(change: Advance, status: Status) -> bool:
    """Whether a change releases the lease, as every change does that ends the run."""
    return change.release or status in ENDED


def due_after(change: Advance, status: Status, at: datetime) -> datetime | None:
    """Return the time at which a released run is due. A run handed back without a time is due at once."""
    if status in ENDED:
        return None
    if change.due_at is None and status is Status.QUEUED:
        return at
    return change.due_at


def moved(head: H, change: Advance, status: Status, now: datetime) -> H:
    """Return the head after an accepted change."""
    at = change.at or now
    seq, checksum, recoveries = head.seq, head.checksum, head.recoveries
    if change.rows:
        seq, checksum = change.rows[-1].seq, change.checksum
        if change.progress:
            recoveries = 0
    if not releases(change, status):
        return _replace(head, status=status, seq=seq, checksum=checksum, recoveries=recoveries, updated_at=at)
    return _replace(
        head,
        status=status,
        seq=seq,
        checksum=checksum,
        worker=None,
        due_at=due_after(change, status, at),
        wakes=() if status in ENDED else tuple(change.wakes),
        recoveries=recoveries,
        updated_at=at,
        holds=0 if status in ENDED else head.holds,
        service=None if status in ENDED else change.service,
    )


def received(head: H, signal: Signal, now: datetime) -> H:
    """Return the head after one more signal. A run that is parked on the signal's name becomes due."""
    if head.worker is None and signal.name in head.wakes:
        return _replace(head, signals=head.signals + 1, due_at=min(head.due_at or now, now), service=None)
    return _replace(head, signals=head.signals + 1)


def may_replace(create: Create, worker: str | None, epoch: int, signals: int) -> bool:
    """Whether a run may replace the one with this worker, epoch and number of signals."""
    return worker is None and epoch == create.over and create.received in (None, signals)


def same_child(existing: Run, wanted: Run) -> bool:
    """Whether an existing run is the one to create: started by the same call, or continuing the same run."""
    if SERIES in wanted.tags and existing.seed != wanted.seed:  # a run of that id belongs to another series
        return False
    return _call(existing) == _call(wanted)


_call = attrgetter("workflow", "input", "parent", "parent_key", "created_by")
