"""The store in memory: quick, for tests and throw-away runs."""

from __future__ import annotations

import os
import threading
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from ..errors import DefinitionError
from ..model import (
    LEASE_SECONDS,
    Ask,
    AtService,
    Claim,
    Claims,
    Flaw,
    GateChange,
    GateInfo,
    Grant,
    News,
    QueueCounts,
    Run,
    RunPage,
    RunQuery,
    Share,
    Signal,
    Status,
    WorkerInfo,
)
from ..model.gate import QUEUE, SERVICE
from ..ports import (
    Advance,
    Answer,
    Change,
    ClaimRequest,
    Clock,
    Create,
    Document,
    DocumentQuery,
    Put,
    Row,
    SystemClock,
    Written,
    instant,
)
from . import claims, documents, gates, queues, rules, services
from .transition import Head, Transition, Writes, head_of
from .watch import Watch
from .write_counts import Authors


@dataclass(slots=True)
class _Entry:
    """One run: what never changes, its head, and what belongs to it."""

    run: Run
    number: int
    head: Head
    rows: list[Row] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    signal_ids: dict[str, int] = field(default_factory=dict)

    def trim(self) -> None:
        """Remove what the head says is no longer kept."""
        kept_from, signals_from = self.head.kept_from, self.head.signals_from
        self.rows = [row for row in self.rows if row.seq == 1 or row.seq >= kept_from]
        self.signals = [signal for signal in self.signals if signal.seq >= signals_from]
        self.signal_ids = {signal.id: signal.seq for signal in self.signals if signal.id}

    def snapshot(self) -> Run:
        return self.head.of(self.run)

    def last_row(self) -> Row | None:
        return self.rows[-1] if self.rows else None


@dataclass(slots=True)
class _Worker:
    """A worker's newest heartbeat, and when it came by the clock that no one sets."""

    info: WorkerInfo
    boot: tuple[str, float]


class MemoryStore:
    """Keeps everything in this process, behind one lock; several engines of the process may share it.

    `close` keeps the contents: they live as long as the object.
    """

    quick = True
    transactional = False

    def __init__(self, *, clock: Clock | None = None, lease_seconds: float = LEASE_SECONDS) -> None:
        self.url = "memory:"
        self.clock = clock or SystemClock()
        self.lease_seconds = lease_seconds
        self._lock = threading.RLock()
        self._runs: dict[str, _Entry] = {}
        self._view = _View(self._runs)
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
        self._gates: dict[tuple[str, str], GateInfo] = {}
        self._shares: dict[str, dict[str, Share]] = {}  # by service and worker
        self._claims_made = 0
        self._artifacts = ""
        self._documents: dict[
            str, dict[str, list[documents.Stored]]
        ] = {}  # by collection and key, oldest version first

    # -- writing -----------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        for change in changes:
            for create in (change,) if isinstance(change, Create) else getattr(change, "creates", ()):
                rules.check_create(create)
        with self._lock:  # held for microseconds: never worth refusing to wait
            transition = Transition(self._view, instant(self.clock.now()))
            answers = [transition.apply(change) for change in changes]
            self._write(transition.writes)
            self._authors.committed(changes)
            return answers

    def _write(self, writes: Writes) -> None:
        for run_id in writes.removed:
            self._forget(run_id)
        for run in writes.runs.values():
            self._number += 1
            entry = self._runs[run.id] = _Entry(run, self._number, head_of(run))
            if run.status not in rules.ENDED:
                self._open[run.id] = entry
        for run_id, head in writes.heads.items():
            self._runs[run_id].head = head
            if head.status in rules.ENDED:
                self._open.pop(run_id, None)
        for run_id, key in writes.keys.items():
            self._runs[run_id].run = replace(self._runs[run_id].run, data_key=key)
        for run_id, row in writes.rows:
            self._runs[run_id].rows.append(row)
        self._add_signals(writes.signals)
        for run_id in writes.trims:
            self._runs[run_id].trim()

    def _add_signals(self, signals: Iterable[Signal]) -> None:
        for signal in signals:
            target = self._runs[signal.run]
            target.signals.append(signal)
            if signal.id:
                target.signal_ids[signal.id] = signal.seq
            self._position += 1
            self._arrivals.append((self._position, signal.run))

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
            now = instant(self.clock.now())
            if request.run is not None:
                entry = self._runs.get(request.run)
                if entry is None or not claims.may_take(request, entry.head, now, dead.__contains__):
                    return Claims()
                if entry.head.status.finished and entry.run.dedupe is not None:
                    rules.check_twin(entry.run.id, self._view.twin(entry.run.queue, entry.run.dedupe))
                if request.drives and not self._may_drive(entry, request, dead, now):
                    return Claims()
                return Claims((self._claim(request.run, request.worker, now, holds=request.drives),))
            limited = {name for kind, name in self._gates if kind == QUEUE}
            runs = ((entry.run, entry.head) for entry in self._open.values())
            taken: tuple[Claim, ...] = ()
            next_due_at: datetime | None = None
            served = limited if request.queues is None else limited & request.queues
            rooms = services.rooms_of(request, self._parked_at(), self._users)
            turns = {*served, *(f"{services.gate_text(name)}" for name in rooms)}
            for name in queues.in_turn(turns, self._claims_made):
                rest = replace(request, limit=request.limit - len(taken))
                service = services.service_in(name)
                at: datetime | None = None
                if service is not None:
                    places, workflows = rooms[service]
                    rest = replace(rest, workflows=workflows)
                    more = self._claim_parked(service, min(places, rest.limit), rest, dead, now)
                elif name is not None:
                    more, at = self._claim_queue(name, rest, dead, now)
                else:
                    chosen, at = claims.choose(rest, runs, now, dead.__contains__, limited)
                    more = tuple(self._claim(run, request.worker, now) for run in chosen)
                taken += more
                next_due_at = min(filter(None, (next_due_at, at)), default=None)
            self._claims_made += 1
            return Claims(taken, next_due_at, self._at_services(request))

    # -- runs that are parked at services ------------------------------------------------------------------------------

    def _parked_at(self) -> set[str]:
        return {entry.head.service for entry in self._open.values() if entry.head.service is not None}

    def _users(self, service: str) -> list[tuple[str, ...]]:
        """Return the workflows of each worker that uses a service, is not given up and does not drain."""
        workers = [self._workers[share.worker].info for share in self._living(service)]
        return [worker.workflows for worker in workers if worker.drain_at is None]

    def _parked(self, service: str, request: ClaimRequest) -> list[queues.Place]:
        """Return the runs that wait at a service and that the request serves."""
        found = [
            queues.waiting_place(self._place(entry, request), entry.head.updated_at.timestamp())
            for entry in self._open.values()
            if entry.head.service == service and entry.head.updated_at is not None
        ]
        return [place for place in found if place.served]

    def _claim_parked(
        self, service: str, room: int, request: ClaimRequest, dead: set[str], now: datetime
    ) -> tuple[Claim, ...]:
        """Claim runs that wait at a service and whose queues have a place."""
        gate = self._gates.get((SERVICE, service)) or GateInfo(SERVICE, service)
        parked = [
            place
            for place in self._parked(service, request)
            if self._may_drive(self._runs[place.run], request, dead, now)
        ]
        ground = queues.Listed(parked, request.worker, dead.__contains__, now.timestamp())
        decision = queues.decide_parked(gate, ground, room)
        if (SERVICE, service) in self._gates:
            self._gates[SERVICE, service] = decision.gate
        taken: list[Claim] = []
        through = service if service in request.rooms else None
        for run in decision.runs:
            entry = self._runs[run]
            if self._may_drive(entry, request, dead, now):
                taken.append(self._claim(run, request.worker, now, service=through))
        return tuple(taken)

    def _at_services(self, request: ClaimRequest) -> tuple[AtService, ...]:
        found: list[AtService] = []
        for service in sorted(request.rooms):
            since = [place.due for place in self._parked(service, request) if place.due is not None]
            if since:
                found.append(AtService(service, min(len(since), services.MOST_COUNTED), instant(min(since))))
        return tuple(found)

    def pass_gates(self, worker: str, asks: Sequence[Ask]) -> list[Grant]:
        with self._lock:
            if self._is_proven_dead(worker):
                return [services.refused(ask) for ask in asks]
            return [self._pass_gate(worker, ask, self.clock.now()) for ask in asks]

    def _pass_gate(self, worker: str, ask: Ask, now: float) -> Grant:
        shares = self._shares.setdefault(ask.service, {})
        for gone in [other for other in shares if self._is_given_up(other)]:
            del shares[gone]
        before = self._gates.get((SERVICE, ask.service))
        passage = services.decide(before or GateInfo(SERVICE, ask.service), [*shares.values()], worker, ask, now)
        if before is not None:
            self._gates[SERVICE, ask.service] = passage.gate
        if passage.share is None:
            shares.pop(worker, None)
        else:
            shares[worker] = passage.share
        return passage.grant

    def _claim_queue(
        self, name: str, request: ClaimRequest, dead: set[str], now: datetime
    ) -> tuple[tuple[Claim, ...], datetime | None]:
        ground = self._ground(name, request, dead, now)
        decision = queues.decide(self._gates[QUEUE, name], ground, request.limit, now.timestamp())
        self._gates[QUEUE, name] = decision.gate
        taken = tuple(self._claim(run, request.worker, now) for run in (*decision.orphans, *decision.runs))
        return taken, None if decision.next_at is None else instant(decision.next_at)

    def _may_drive(self, entry: _Entry, request: ClaimRequest, dead: set[str], now: datetime) -> bool:
        gate = self._gates.get((QUEUE, entry.run.queue))
        if gate is None:
            return True
        ground = self._ground(entry.run.queue, request, dead, now)
        return queues.may_drive(gate, ground, holds_key=entry.run.key is None or entry.head.holds > 0)

    def _ground(self, name: str, request: ClaimRequest, dead: set[str], now: datetime) -> queues.Listed:
        places = (self._place(entry, request) for entry in self._open.values() if entry.run.queue == name)
        return queues.Listed(places, request.worker, dead.__contains__, now.timestamp())

    @staticmethod
    def _place(entry: _Entry, request: ClaimRequest) -> queues.Place:
        run, head = entry.run, entry.head
        return queues.Place(
            run.id,
            entry.number,
            run.priority,
            run.key,
            head.due_at.timestamp() if head.due_at is not None and claims.is_free(head) else None,
            head.worker,
            head.epoch == 0,
            head.holds,
            claims.serves(request, run.workflow, run.version, run.queue),
            (head.worker or "", run.workflow),
        )

    def _claim(
        self, run_id: str, worker: str, now: datetime, *, holds: bool = True, service: str | None = None
    ) -> Claim:
        entry = self._open[run_id] = self._runs[run_id]
        old = entry.head
        entry.head = claims.leased(old, worker, now, holds=holds and entry.run.key is not None)
        self._authors.wrote({worker})
        return claims.claim_of(entry.snapshot(), old.worker, old.status, old.updated_at, service)

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

    def drain_worker(self, worker: str) -> bool:
        """Mark a registered worker as draining. Return False if there is none."""
        with self._lock:
            known = self._workers.get(worker)
            if known is None or worker in self._gone | self._killed:
                return False
            known.info = replace(known.info, drain_at=known.info.drain_at or instant(self.clock.now()))
            return True

    def is_draining(self, worker: str) -> bool:
        """Whether a worker is marked as draining."""
        with self._lock:
            return worker in self._workers and self._workers[worker].info.drain_at is not None

    def _enrol(self, worker: WorkerInfo) -> None:
        now = instant(self.clock.now())
        before = self._workers.get(worker.id)
        started_at = worker.started_at or (before.info.started_at if before else now)
        drain_at = before.info.drain_at if before else None
        info = replace(worker, alive=True, leases=0, started_at=started_at, renewed_at=now, drain_at=drain_at)
        self._workers[worker.id] = _Worker(info, self.clock.boot())

    def _observe(self) -> None:
        self._watch.observe({worker: known.boot for worker, known in self._workers.items()})

    def _is_proven_dead(self, worker: str) -> bool:
        known = self._workers.get(worker)
        return known is None or worker in self._gone | self._killed or known.boot[0] != self.clock.boot()[0]

    def _is_given_up(self, worker: str) -> bool:
        """Whether the worker has left, or the store has given it up."""
        return worker not in self._workers or worker in self._gone

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
        owners = {entry.head.worker for entry in self._open.values() if entry.head.worker not in (None, asker)}
        return {owner for owner in owners if owner is not None and self._is_proven_dead(owner)}

    def mark_dead(self, worker: str) -> None:
        """Have a worker dead at once, as if its process had been killed."""
        with self._lock:
            self._killed.add(worker)

    # -- gates -------------------------------------------------------------------------------------------------------

    def list_gates(self, kind: str) -> list[GateInfo]:
        with self._lock:
            found = [gate for (its_kind, _), gate in sorted(self._gates.items()) if its_kind == kind]
            return found if kind != SERVICE else [self._with_users(gate) for gate in found]

    def _with_users(self, gate: GateInfo) -> GateInfo:
        parked = [entry.head.updated_at for entry in self._open.values() if entry.head.service == gate.name]
        since = min(filter(None, parked), default=None)
        return replace(gate, shares=self._living(gate.name), parked=len(parked), parked_since=since)

    def _living(self, service: str) -> tuple[Share, ...]:
        shares = self._shares.get(service, {})
        return tuple(shares[worker] for worker in sorted(shares) if not self._is_given_up(worker))

    def change_gate(self, kind: str, name: str, change: GateChange) -> GateInfo:
        with self._lock:
            before = self._gates.get((kind, name)) or GateInfo(kind, name)
            self._gates[kind, name] = gates.changed(before, change)
            self._authors.wrote({None})
            return before

    def count_queue(self, name: str) -> QueueCounts:
        with self._lock:
            owners = {entry.head.worker for entry in self._open.values() if entry.head.worker is not None}
            dead = {owner for owner in owners if not self._is_shown_alive(owner)}
            served = ClaimRequest("", frozenset(entry.run.workflow for entry in self._open.values()))
            return self._ground(name, served, dead, instant(self.clock.now())).counts()

    # -- reading -----------------------------------------------------------------------------------------------------

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
        start = rules.page_start(query)
        narrow = rules.with_statuses(query)
        with self._lock:
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
        now = instant(self.clock.now())
        mended: set[str | None] = set()
        if query.open_failure:
            mended = {one.run.origin for one in self._runs.values() if one.head.status is Status.COMPLETED}
        for entry in newest_first:
            if rules.matches(query, entry.run, entry.head, now) and rules.is_open(
                query, entry.run.id, entry.head.status, entry.last_row, mended
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
            first = bisect(entry.rows, after, key=_row_seq) if entry else 0
            for row in entry.rows[first:] if entry else ():
                if len(page) >= limit or size >= rules.PAGE_BYTES:
                    break
                if not wanted or row.kind in wanted:
                    page.append(row)
                    size += len(row.record) + len(row.body or b"")
        return page

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        with self._lock:
            entry = self._runs.get(run_id)
            first = bisect(entry.signals, after, key=_signal_seq) if entry else 0
            return entry.signals[first:][: max(limit, 0)] if entry else []

    def news(self, worker: str, cursor: int) -> News:
        with self._lock:
            foreign = self._authors.others(worker)
            changed = self._seen_writes.get(worker) != foreign
            self._seen_writes[worker] = foreign
            if cursor >= self._position:
                return News(self._position, (), changed)
            start = bisect(self._arrivals, cursor, key=lambda arrival: arrival[0])
            fresh = sorted({run for _, run in self._arrivals[start:]})
            mine = tuple(run for run in fresh if run in self._runs and self._runs[run].head.worker == worker)
            return News(self._position, mine, changed)

    def list_workers(self, *, gone: bool = False) -> list[WorkerInfo]:
        with self._lock:
            leases: dict[str, int] = {}
            for entry in self._runs.values():
                if entry.head.worker is not None:
                    leases[entry.head.worker] = leases.get(entry.head.worker, 0) + 1
            return [
                replace(known.info, alive=self._is_shown_alive(name), leases=leases.get(name, 0))
                for name, known in sorted(self._workers.items())
                if gone or name not in self._gone or leases.get(name)
            ]

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        with self._lock:
            found = [self._runs[run] for run in dict.fromkeys(run_ids) if run in self._runs]
            free = [
                one.run.id for one in found if one.head.worker is None and (one.head.status.finished or not finished)
            ]
            for run in free:
                self._forget(run)
            self._remove_rows(lambda _, row: row.owner in free)
            self._arrivals = [arrival for arrival in self._arrivals if arrival[1] in self._runs]
            self._authors.wrote({None})
            return len(free)

    def _forget(self, run: str) -> None:
        del self._runs[run]
        self._open.pop(run, None)

    # -- documents ---------------------------------------------------------------------------------------------------

    def write_documents(self, batches: Sequence[Sequence[Put]]) -> list[Written]:
        """Write batches of documents at once."""
        documents.check_puts(batches)
        with self._lock:
            kept = {name: self._kept(*name, most) for name, most in documents.wanted(batches).items()}
            answers, changes = documents.decide(batches, kept, instant(self.clock.now()).timestamp())
            for (collection, key), change in changes.items():
                before = self._documents.get(collection, {}).get(key, [])
                rows = [*([] if change.removes else before), *change.rows]
                self._put_rows(collection, key, [row for row in rows if row.version > change.trim])
            return answers

    def _put_rows(self, collection: str, key: str, rows: list[documents.Stored]) -> None:
        stored = self._documents.setdefault(collection, {})
        if rows:
            stored[key] = rows
        else:
            stored.pop(key, None)
        if not stored:
            del self._documents[collection]

    def _kept(self, collection: str, key: str, most: int) -> list[documents.Kept]:
        rows = self._documents.get(collection, {}).get(key, [])
        return [documents.Kept(row.version, row.writer, row.at, row.expires_at) for row in rows[::-1][:most]]

    def list_documents(self, query: DocumentQuery) -> list[Document]:
        """Return one page of documents, by key."""
        wanted = documents.wanted_keys(query)
        now = instant(self.clock.now()).timestamp()
        with self._lock:
            stored = self._documents.get(query.collection, {})
            rows = (
                row if query.values else row._replace(value=b"")
                for key in sorted(filter(wanted.matches, query.keys or stored), reverse=query.reverse)
                for row in stored.get(key, [])[0 if query.all_versions else -1 :]
                if not documents.is_expired(row.expires_at, now)
            )
            return documents.page(query, rows)

    def list_collections(self) -> dict[str, int]:
        """Return the collections, each with the number of its keys."""
        with self._lock:
            return {name: len(self._documents[name]) for name in sorted(self._documents)}

    def remove_documents(self, collection: str, prefix: str = "", *, expired: bool = False, scrub: bool = False) -> int:
        """Remove documents. Return the number of keys."""
        now = instant(self.clock.now()).timestamp()

        def goes(name: str, row: documents.Stored) -> bool:
            if (collection or not expired) and (name != collection or not row.key.startswith(prefix)):
                return False
            is_orphan = row.owner is not None and row.at < now - documents.OWNER_SECONDS and row.owner not in self._runs
            return not expired or is_orphan or documents.is_expired(row.expires_at, now)

        with self._lock:
            return self._remove_rows(goes)

    def _remove_rows(self, goes: Callable[[str, documents.Stored], bool]) -> int:
        """Remove versions, then keys and collections that have none. Return the number of keys concerned."""
        removed = 0
        for name, stored in list(self._documents.items()):
            for key, rows in list(stored.items()):
                stay = [row for row in rows if not goes(name, row)]
                if len(stay) < len(rows):
                    removed += 1
                    self._put_rows(name, key, stay)
        return removed

    def artifacts_folder(self) -> str:
        """Return a temporary folder for artifacts, which is removed with the store."""
        with self._lock:
            if not self._artifacts:
                import tempfile  # noqa: PLC0415 - rarely needed
                import weakref  # noqa: PLC0415 - as above
                from shutil import rmtree  # noqa: PLC0415 - as above

                self._artifacts = tempfile.mkdtemp(prefix="keepstep-artifacts-")
                weakref.finalize(self, rmtree, self._artifacts, ignore_errors=True)
            return self._artifacts

    def check(self, *, mend: bool = False) -> list[Flaw]:
        return []

    def close(self) -> None:
        """Nothing to let go of."""


def _row_seq(row: Row) -> int:
    return row.seq


def _signal_seq(signal: Signal) -> int:
    return signal.seq


class _View:
    """The store as a decision sees it."""

    def __init__(self, runs: dict[str, _Entry]) -> None:
        self._runs = runs

    def head(self, run: str) -> Head | None:
        entry = self._runs.get(run)
        return entry.head if entry else None

    def run(self, run: str) -> Run | None:
        entry = self._runs.get(run)
        return entry.snapshot() if entry else None

    def data_key(self, run: str) -> str | None:
        entry = self._runs.get(run)
        return entry.run.data_key if entry else None

    def signal_seq(self, run: str, signal_id: str) -> int | None:
        entry = self._runs.get(run)
        return entry.signal_ids.get(signal_id) if entry else None

    def twin(self, queue: str, dedupe: str) -> str | None:
        wanted = (queue, dedupe)
        found = (entry for entry in self._runs.values() if (entry.run.queue, entry.run.dedupe) == wanted)
        return next((entry.run.id for entry in found if not entry.head.status.finished), None)

    def call(self, change: Advance) -> Exception:
        return DefinitionError("the memory store has no transactional steps")


def open_url(url: str, *, clock: Clock | None = None, **options: Any) -> MemoryStore:
    """A new, empty store for `memory:`."""
    if url.partition(":")[2].strip("/"):
        raise DefinitionError(f"{url!r}: a store in memory has no name, it is a new one each time; write memory:")
    return MemoryStore(clock=clock, **options)
