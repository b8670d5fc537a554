"""The model of a store, with which the property test compares every store.

It decides each change by itself and writes it at once. It shares no decision with `keepstep.stores.transition`
and `keepstep.stores.claims`: a mistake there shows as a difference.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from keepstep.errors import DefinitionError
from keepstep.model import (
    FINISHED,
    LEASE_SECONDS,
    Ask,
    Claim,
    Claims,
    Flaw,
    GateChange,
    GateInfo,
    Grant,
    Lease,
    News,
    QueueCounts,
    Run,
    RunPage,
    RunQuery,
    Signal,
    Status,
    WorkerInfo,
    may_move,
)
from keepstep.model.series import SERIES
from keepstep.ports import (
    Advance,
    Answer,
    Change,
    ClaimRequest,
    Clock,
    Create,
    Rekey,
    Row,
    Send,
    SystemClock,
    Verdict,
    instant,
)
from keepstep.stores import rules
from keepstep.stores.watch import Watch
from keepstep.stores.write_counts import Authors

#: Statuses in which a run has no owner and no wake-up.
ENDED = FINISHED | {Status.SET_ASIDE}


@dataclass(slots=True)
class _Entry:
    """One run: what never changes, and its head, which does."""

    run: Run
    number: int
    rows: list[Row]
    status: Status
    checksum: str
    epoch: int
    worker: str | None
    due_at: datetime | None
    wakes: tuple[str, ...]
    recoveries: int
    updated_at: datetime | None
    holds: int = 0
    signals: list[Signal] = field(default_factory=list)
    signal_ids: dict[str, int] = field(default_factory=dict)
    signals_read: int | None = 0
    kept_from: int = 0
    signals_from: int = 0

    @property
    def seq(self) -> int:
        return self.rows[-1].seq if self.rows else 0

    @property
    def received(self) -> int:
        return self.signals[-1].seq if self.signals else max(self.signals_from - 1, 0)

    def snapshot(self) -> Run:
        return replace(
            self.run,
            status=self.status,
            seq=self.seq,
            signals_read=self.signals_read,
            kept_from=self.kept_from,
            signals_from=self.signals_from,
            checksum=self.checksum,
            epoch=self.epoch,
            worker=self.worker,
            due_at=self.due_at,
            wakes=self.wakes,
            signals=self.received,
            recoveries=self.recoveries,
            updated_at=self.updated_at,
            holds=self.holds,
        )


@dataclass(slots=True)
class _Worker:
    """A worker's newest heartbeat, and when it came by the clock that no one sets."""

    info: WorkerInfo
    boot: tuple[str, float]


class ModelStore:
    """Keeps everything in this object; `close` keeps the contents."""

    quick = True
    transactional = False

    def __init__(self, *, clock: Clock | None = None, lease_seconds: float = LEASE_SECONDS) -> None:
        self.url = "model:"
        self.clock = clock or SystemClock()
        self.lease_seconds = lease_seconds
        self._lock = threading.RLock()
        self._runs: dict[str, _Entry] = {}
        self._open: dict[str, _Entry] = {}  # those that have not ended, so that a claim does not look at the others
        self._number = 0
        self._workers: dict[str, _Worker] = {}
        self._watch = Watch(self.clock, lease_seconds)
        self._killed: set[str] = set()  # dead, though their leases have not run out
        self._gone: set[str] = set()  # given up for dead; never valid again
        self._position = 0
        self._arrivals: list[tuple[int, str]] = []  # (position, run) of every signal
        self._authors = Authors()
        self._seen_writes: dict[str, int] = {}

    # -- writing -----------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        for change in changes:
            for create in (change,) if isinstance(change, Create) else getattr(change, "creates", ()):
                rules.check_create(create)
        with self._lock:  # held for microseconds: never worth refusing to wait
            answers = [self._apply(change) for change in changes]
            self._authors.committed(changes)
            return answers

    def _apply(self, change: Change) -> Answer:
        if isinstance(change, Advance):
            return self._advance(change)
        if isinstance(change, Create):
            return self._create(change)
        if isinstance(change, Rekey):
            return self._rekey(change)
        return self._send(change)

    def _create(self, create: Create) -> Answer:
        existing = self._runs.get(create.run.id)
        if existing is not None and create.over is None:
            return Answer(Verdict.EXISTS, run=existing.snapshot())
        if existing is not None and not _may_replace(create, existing):
            return Answer(Verdict.FENCED, run=existing.snapshot(), about=create.run.id)
        if existing is not None:
            self._forget(create.run.id)
        run = rules.check_create(create)
        self._number += 1
        entry = _Entry(
            run=run,
            number=self._number,
            rows=list(create.rows),
            status=run.status,
            checksum=run.checksum,
            epoch=run.epoch,
            worker=run.worker,
            due_at=run.due_at,
            wakes=run.wakes,
            recoveries=run.recoveries,
            updated_at=run.updated_at,
            signals=list(create.signals),
            signal_ids={signal.id: signal.seq for signal in create.signals if signal.id},
            signals_read=run.signals_read,
            kept_from=run.kept_from,
            signals_from=run.signals_from,
        )
        self._runs[run.id] = entry
        if run.status not in ENDED:
            self._open[run.id] = entry
        return Answer(Verdict.DONE, run=entry.snapshot(), seq=run.seq)

    def _rekey(self, change: Rekey) -> Answer:
        entry = self._runs.get(change.run)
        if entry is None:
            return Answer(Verdict.NOT_FOUND, about=change.run)
        if entry.run.data_key != change.old:
            return Answer(Verdict.FENCED, about=change.run)
        entry.run = replace(entry.run, data_key=change.new)
        return Answer(Verdict.DONE)

    def _send(self, send: Send) -> Answer:
        return self._refuse_send(send) or Answer(Verdict.DONE, seq=self._deliver(send.signal))

    def _refuse_send(self, send: Send) -> Answer | None:
        signal = send.signal
        target = self._runs.get(signal.run)
        if target is None:
            return Answer(Verdict.NOT_FOUND, about=signal.run)
        if signal.id in target.signal_ids:
            return Answer(Verdict.EXISTS, seq=target.signal_ids[signal.id])
        if target.status.finished:
            return Answer(Verdict.FINISHED, about=signal.run)
        if (
            send.room is not None
            and target.signals_read is not None
            and target.received >= target.signals_read + send.room
        ):
            return Answer(Verdict.FULL, about=signal.run)
        return None

    def _deliver(self, signal: Signal) -> int:
        target = self._runs[signal.run]
        now = instant(self.clock.now())
        seq = target.received + 1
        target.signals.append(rules.seal_signal(signal, seq, now))
        if signal.id:
            target.signal_ids[signal.id] = seq
        if target.worker is None and signal.name in target.wakes:
            target.due_at = min(target.due_at or now, now)
        self._position += 1
        self._arrivals.append((self._position, signal.run))
        return seq

    def _advance(self, change: Advance) -> Answer:
        entry = self._runs.get(change.run)
        if (
            entry is None
            or entry.worker != change.worker
            or entry.epoch != change.epoch
            or entry.seq != change.after
            or not rules.extends(change.rows, change.after)
        ):
            return Answer(Verdict.FENCED, about=change.run)
        if change.signals_seen is not None and entry.received > change.signals_seen:
            return Answer(Verdict.MISSED)
        status = _next_status(entry.status, change)
        if status is None:
            return Answer(Verdict.ILLEGAL)
        if change.within is not None:
            return Answer(Verdict.FAILED, error=DefinitionError("the model has no transactional steps"))
        refusal = self._refuse_outbox(change)
        if refusal is not None:
            return refusal
        self._write(entry, change, status)
        return Answer(Verdict.DONE, seq=entry.seq)

    def _refuse_outbox(self, change: Advance) -> Answer | None:
        created: dict[str, Run] = {}
        for create in change.creates:
            wanted = rules.check_create(create)
            if self._conflicts(wanted) or not _same_child(created.setdefault(wanted.id, wanted), wanted):
                return Answer(Verdict.CONFLICT, about=wanted.id)
        for send in change.sends:
            refusal, target = self._refuse_send(send), created.get(send.signal.run)
            if target is not None and refusal is not None and refusal.verdict is Verdict.NOT_FOUND:
                refusal = Answer(Verdict.FINISHED, about=target.id) if target.status.finished else None
            left_out = (Verdict.FINISHED, Verdict.NOT_FOUND) if send.optional else ()
            if refusal is not None and refusal.verdict not in (Verdict.EXISTS, *left_out):
                return refusal
        return None

    def _conflicts(self, wanted: Run) -> bool:
        existing = self._runs.get(wanted.id)
        return existing is not None and not _same_child(existing.run, wanted)

    def _write(self, entry: _Entry, change: Advance, status: Status) -> None:
        at = change.at or instant(self.clock.now())
        entry.status = status
        entry.updated_at = at
        if change.rows:
            entry.rows.extend(change.rows)
            entry.checksum = change.checksum
            if change.progress:
                entry.recoveries = 0
        if _releases(change, status):
            entry.worker = None
            entry.due_at = _due_after(change, status, at)
            entry.wakes = () if status in ENDED else change.wakes
        if status in ENDED:
            entry.holds = 0
            self._open.pop(change.run, None)
        for create in change.creates:
            self._create(create)
        self._send_all(change)
        if change.signals_read is not None:
            entry.signals_read = change.signals_read
        newest = change.after + bool(change.rows)
        if change.trim is not None and min(change.trim, newest) > max(entry.kept_from, 2):
            entry.kept_from = min(change.trim, newest)
            entry.rows = [row for row in entry.rows if row.seq == 1 or row.seq >= entry.kept_from]

    def _send_all(self, change: Advance) -> None:
        for send in change.sends:
            target = self._runs.get(send.signal.run)
            if send.optional and (target is None or target.status.finished):
                continue
            if send.signal.id not in self._runs[send.signal.run].signal_ids:
                self._deliver(send.signal)

    # -- leases ------------------------------------------------------------------------------------------------------

    def claim_runs(self, request: ClaimRequest) -> Claims:
        with self._lock:
            if request.worker not in self._workers and not self.renew_leases(
                WorkerInfo(request.worker, pid=os.getpid())
            ):
                return Claims()
            if request.worker in self._gone | self._killed:
                return Claims()
            dead = self._bury_the_dead(request.worker)
            if request.run is not None:
                return self._claim_by_name(request, dead)
            now = instant(self.clock.now())
            known = [entry for entry in self._open.values() if _knows(request, entry)]
            taken = [entry for entry in known if entry.worker is not None and entry.worker in dead]
            taken.sort(key=lambda entry: (entry.worker or "", entry.run.workflow, entry.run.queue, entry.run.id))
            timed = [(entry.due_at, entry) for entry in known if entry.worker is None and entry.due_at is not None]
            due = [(-entry.run.priority, due_at, entry.run.id, entry) for due_at, entry in timed if due_at <= now]
            due.sort(key=lambda ranked: ranked[:3])
            chosen = [*taken, *(ranked[3] for ranked in due)][: max(request.limit, 0)]
            for entry in chosen:
                entry.holds = entry.holds or int(entry.run.key is not None)
            claims = tuple(self._claim(entry, request.worker) for entry in chosen)
            later = [due_at for due_at, _ in timed if due_at > now]
            return Claims(claims, min(later, default=None))

    def _claim_by_name(self, request: ClaimRequest, dead: set[str]) -> Claims:
        entry = self._runs.get(request.run or "")
        if entry is None or entry.status not in request.statuses or entry.status is Status.CANCELLED:
            return Claims()
        if entry.worker is not None and entry.worker not in dead:
            return Claims()
        return Claims((self._claim(entry, request.worker),))

    def _claim(self, entry: _Entry, worker: str) -> Claim:
        owner, before, since = entry.worker, entry.status, entry.updated_at
        if owner is not None and entry.status.active:
            entry.recoveries += 1
            entry.status = Status.RECOVERING
        else:
            entry.status = Status.RUNNING
        entry.worker = worker
        entry.epoch += 1
        self._open[entry.run.id] = entry
        entry.due_at = None
        entry.wakes = ()
        entry.updated_at = instant(self.clock.now())
        self._authors.wrote({worker})
        return Claim(entry.snapshot(), Lease(entry.run.id, worker, entry.epoch), owner, before, since)

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        with self._lock:
            if worker.id in self._gone | self._killed:
                return False
            if leaving:
                return self._workers.pop(worker.id, None) is not None
            self._enrol(worker)
            self._watch.renewed(worker.id)
            self._observe()
            return True

    def _enrol(self, worker: WorkerInfo) -> None:
        now = instant(self.clock.now())
        before = self._workers.get(worker.id)
        started_at = worker.started_at or (before.info.started_at if before else now)
        info = replace(worker, alive=True, leases=0, started_at=started_at, renewed_at=now)
        self._workers[worker.id] = _Worker(info, self.clock.boot())

    def _observe(self) -> None:
        self._watch.observe({worker: known.boot for worker, known in self._workers.items()})

    def _is_proven_dead(self, worker: str) -> bool:
        known = self._workers.get(worker)
        return known is None or worker in self._gone | self._killed or known.boot[0] != self.clock.boot()[0]

    def _is_shown_alive(self, worker: str) -> bool:
        """Whether the worker's lease has not run out, for a reader that has not watched it; no ground to take a run."""
        if self._is_proven_dead(worker):
            return False
        return self.clock.boot()[1] - self._workers[worker].boot[1] <= self.lease_seconds

    def _bury_the_dead(self, asker: str) -> set[str]:
        """Give up every worker that is dead, for good, but not the one that asks; the owners of runs who are dead."""
        self._observe()
        for worker in self._workers:
            is_silent = self._watch.is_silent(asker, worker, self.lease_seconds)
            if worker != asker and (is_silent or self._is_proven_dead(worker)):
                self._gone.add(worker)
        owners = {entry.worker for entry in self._open.values() if entry.worker not in (None, asker)}
        return {owner for owner in owners if owner is not None and self._is_proven_dead(owner)}

    def mark_dead(self, worker: str) -> None:
        """Have a worker dead at once, as if its process had been killed."""
        with self._lock:
            self._killed.add(worker)

    # -- reading -----------------------------------------------------------------------------------------------------

    def list_gates(self, kind: str) -> list[GateInfo]:
        """Return no gate: queues with limits have a model of their own."""
        return []

    def change_gate(self, kind: str, name: str, change: GateChange) -> GateInfo:
        raise NotImplementedError

    def count_queue(self, name: str) -> QueueCounts:
        raise NotImplementedError

    def pass_gates(self, worker: str, asks: Sequence[Ask]) -> list[Grant]:
        raise NotImplementedError

    def get_run(self, run_id: str) -> Run | None:
        with self._lock:
            entry = self._runs.get(run_id)
            if entry is None:
                return None
            run = entry.snapshot()
            kind = rules.outcome_kind(run.status)
            final = next((row for row in reversed(entry.rows) if row.kind == kind), None)
            if final is not None:
                run = rules.with_outcome(run, final)
            owner = self._workers.get(run.worker or "")
            progress = owner.info.progress.get(run_id) if owner else None
            return run if progress is None else replace(run, progress=progress)

    def list_runs(self, query: RunQuery) -> RunPage:
        with self._lock:
            start, narrow = rules.page_start(query), rules.with_statuses(query)
            before = self._number + 1 if start is None else start
            matching = list(self._matching(narrow)) if narrow is not None else []
            found = [entry for entry in matching if entry.number < before]
            page = found[: max(query.limit, 0)]
            more = page and len(found) > len(page)
            runs = (entry.snapshot() for entry in page)
            listed = tuple(run if query.with_input else replace(run, input=b"") for run in runs)
            count = min(len(matching), query.count_to) if query.count_to else None
            return RunPage(listed, str(page[-1].number) if more else None, count=count)

    def _matching(self, query: RunQuery) -> Iterator[_Entry]:
        newest_first = reversed(self._runs.values()) if query.ids is None else self._newest_of(query.ids)
        mended = {entry.run.origin for entry in self._runs.values() if entry.status is Status.COMPLETED}
        for entry in newest_first:
            last = entry.rows[-1] if entry.rows else None
            if rules.matches(query, entry.run, entry, instant(self.clock.now())) and rules.is_open(
                query, entry.run.id, entry.status, lambda last=last: last, mended
            ):
                yield entry

    def _newest_of(self, ids: Iterable[str]) -> Iterator[_Entry]:
        found = [self._runs[run] for run in ids if run in self._runs]
        return iter(sorted(found, key=lambda entry: -entry.number))

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        wanted = frozenset(kinds)
        page: list[Row] = []
        size = 0
        with self._lock:
            entry = self._runs.get(run_id)
            for row in (row for row in entry.rows if row.seq > after) if entry else ():
                if len(page) >= limit or size >= rules.PAGE_BYTES:
                    break
                if not wanted or row.kind in wanted:
                    page.append(row)
                    size += len(row.record) + len(row.body or b"")
        return page

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        with self._lock:
            entry = self._runs.get(run_id)
            return [signal for signal in entry.signals if signal.seq > after][: max(limit, 0)] if entry else []

    def news(self, worker: str, cursor: int) -> News:
        with self._lock:
            foreign = self._authors.others(worker)
            changed = self._seen_writes.get(worker) != foreign
            self._seen_writes[worker] = foreign
            if cursor >= self._position:
                return News(self._position, (), changed)
            start = bisect(self._arrivals, cursor, key=lambda arrival: arrival[0])
            fresh = sorted({run for _, run in self._arrivals[start:]})
            mine = tuple(run for run in fresh if run in self._runs and self._runs[run].worker == worker)
            return News(self._position, mine, changed)

    def list_workers(self, *, gone: bool = False) -> list[WorkerInfo]:
        with self._lock:
            leases: dict[str, int] = {}
            for entry in self._runs.values():
                if entry.worker is not None:
                    leases[entry.worker] = leases.get(entry.worker, 0) + 1
            return [
                replace(known.info, alive=self._is_shown_alive(name), leases=leases.get(name, 0))
                for name, known in sorted(self._workers.items())
                if gone or name not in self._gone or leases.get(name)
            ]

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        with self._lock:
            found = [self._runs[run] for run in dict.fromkeys(run_ids) if run in self._runs]
            free = [one.run.id for one in found if one.worker is None and (one.status.finished or not finished)]
            for run in free:
                self._forget(run)
            self._arrivals = [arrival for arrival in self._arrivals if arrival[1] in self._runs]
            self._authors.wrote({None})
            return len(free)

    def _forget(self, run: str) -> None:
        del self._runs[run]
        self._open.pop(run, None)

    def check(self, *, mend: bool = False) -> list[Flaw]:
        return []

    def close(self) -> None:
        """Nothing to let go of."""


def _knows(request: ClaimRequest, entry: _Entry) -> bool:
    workflow = entry.run.workflow
    if workflow not in request.workflows:
        return False
    if request.queues is not None and entry.run.queue not in request.queues:
        return False
    return request.versions.get(workflow, entry.run.version) == entry.run.version


def _next_status(old: Status, change: Advance) -> Status | None:
    status = change.status
    if status is None:
        recovered = old is Status.RECOVERING and change.progress and change.rows and not change.release
        status = Status.RUNNING if recovered else old
    if not may_move(old, status) or (status.active and _releases(change, status)):
        return None
    return status


def _releases(change: Advance, status: Status) -> bool:
    return change.release or status in ENDED


def _due_after(change: Advance, status: Status, at: datetime) -> datetime | None:
    if status in ENDED:
        return None
    if change.due_at is None and status is Status.QUEUED:
        return at
    return change.due_at


def _may_replace(create: Create, there: _Entry) -> bool:
    return there.worker is None and there.epoch == create.over and create.received in (None, there.received)


def _same_child(existing: Run, wanted: Run) -> bool:
    if SERIES in wanted.tags and existing.seed != wanted.seed:
        return False
    calls = [(run.workflow, run.input, run.parent, run.parent_key, run.created_by) for run in (existing, wanted)]
    return calls[0] == calls[1]
