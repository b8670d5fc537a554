"""The store in a folder of readable files, for users who want to read, compare and keep their checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ...errors import CheckpointCorrupt, DefinitionError, SchemaMismatch, StoreError, StoreUnavailable
from ...model import (
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
    Signal,
    Status,
    WorkerInfo,
)
from ...model.gate import QUEUE, SERVICE, Share
from ...model.ids import draw, is_id
from ...ports import (
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
    Verdict,
    WouldBlock,
    Written,
    instant,
)
from .. import documents, queues, rules, services
from ..claims import claim_of, leased, may_take
from ..os_locks import abandon_in_children, local_path
from .check import Check
from .commit import Commits
from .disk import Disk, Steps, finish, translating
from .documents import FileDocuments
from .entry import LAYOUT, Draft, Facts, run_of
from .gates import Gates
from .index import Index, Line, line_of, may_match, parked_place
from .log import Logs, State
from .workers import Workers

#: Choices of `power_loss`, and whether each syncs every commit.
POWER_LOSS = {"loses_nothing": True, "may_lose_last": False}

#: File that identifies a folder as a store.
MARKER = "keepstep.json"
#: Content of .gitignore: everything except the runs can be rebuilt from them.
_IGNORED = b"/index/\n/workers/\n/trash/\n/aside/\n*.tmp\nlatest\n"
#: Number of changes above which a batch is not written on the event loop's thread.
_FEW = 4

log = logging.getLogger("keepstep")


class FilesStore:
    """A store with one folder per run and one file per checkpoint, all as readable JSON.

    `power_loss="may_lose_last"` is faster, but a power cut may lose the newest commits. A crash of the program loses
    nothing in either mode.
    """

    quick = True
    transactional = False
    #: Earlier entries hold data keys, too, so a change of keys affects every run.
    keeps_earlier_keys = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        power_loss: str = "loses_nothing",
        lease_seconds: float = LEASE_SECONDS,
        allow_network: bool = False,
        disk: Disk | None = None,
    ) -> None:
        if power_loss not in POWER_LOSS:
            raise DefinitionError(f"power_loss must be one of {', '.join(map(repr, POWER_LOSS))}, got {power_loss!r}")
        self._disk = disk or Disk(syncs=POWER_LOSS[power_loss])
        self._root = local_path(path, "a folder", _check_folder, allow_network=allow_network)
        self.url = f"files:{self._root}"
        self.clock = clock or SystemClock()
        self.lease_seconds = lease_seconds
        self._gone = ""
        with translating(self._root):
            _prepare(self._root, self._disk)
        self._identity = self._disk.identity(f"{self._root}/{MARKER}")
        tag = draw(6).hex()
        self._logs = Logs(self._root, self._disk, tag)
        self._index = Index(self._root, self._disk, self.clock, tag, self._scan)
        self._commits = Commits(self._logs, self._index, self._now)
        self._workers = Workers(f"{self._root}/workers", self._disk, self.clock, lease_seconds, self._logs.unique)
        self._gates = Gates(self._root, self._disk, tag)
        self._documents = FileDocuments(self._root, self._disk, self._logs.unique)
        self._broken: dict[str, int] = {}
        self._claims_made = 0
        abandon_in_children(self)

    # -- writing -----------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        self._must_be_open()
        if not wait and len(changes) > _FEW:
            raise WouldBlock
        if any(isinstance(change, Create) and change.run.dedupe is not None for change in changes):
            return self._commit_one_by_one(changes)
        return self._commits.apply(changes) if changes else []

    def _commit_one_by_one(self, changes: Sequence[Change]) -> list[Answer]:
        """Commit changes, some of which are runs with `dedupe`: no other process creates such a run meanwhile."""
        with self._gates.starting():
            self._catch_up()
            return [answer for change in changes for answer in self._commits.apply([change])]

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        self._must_be_open()
        named = list(dict.fromkeys(run_ids))
        wanted = [run for run in named if self._is_there(run)]
        # Runs that an earlier call removed but could not scrub are scrubbed now, and counted.
        begun = [run for run in named if scrub and run not in wanted and self._index.is_marked(run)]
        batch = self._index.will([*wanted, *begun])
        if scrub:
            self._index.mark(wanted)
        removed: list[str] = []

        def remove(run: str) -> Steps[None]:
            try:
                gone = yield from self._logs.steps_unless_removed(
                    run, partial(self._commits.delete, run, finished=finished)
                )
            except CheckpointCorrupt:  # even a broken log can be removed
                if finished or self._is_driven(run):
                    raise
                yield from self._commits.delete_broken(run)
                gone = True
            if gone:
                removed.append(run)
            else:
                yield from self._commits.settle(run)

        works = [remove(run) for run in wanted] + [self._commits.finish_removal(run) for run in begun]
        failures = self._commits.at_once(works)
        if failures:
            self._index.failed(batch)
            raise failures[0]
        self._index.did(batch, {None})
        self._documents.remove_owned([*removed, *begun])
        if scrub:
            if removed or begun or not finished:
                self._logs.empty_trash()
                self._catch_up()  # otherwise a dead process's file would be left to others
                self._index.scrub()
            self._index.unmark(named)
        return len(removed) + len(begun)

    def _is_there(self, run: str) -> bool:
        try:
            return self._logs.unless_removed(run, partial(self._logs.state, run)) is not None
        except CheckpointCorrupt:
            return True

    def _is_driven(self, run: str) -> bool:
        """Whether the newest readable entry of a broken log names a living worker."""
        state = self._commits.remains(run)
        return state is not None and state.head.worker is not None and self._workers.is_alive(state.head.worker)

    # -- documents ---------------------------------------------------------------------------------------------------

    def write_documents(self, batches: Sequence[Sequence[Put]]) -> list[Written]:
        """Write batches of documents in one transaction."""
        self._must_be_open()
        documents.check_puts(batches)
        return self._documents.write(batches, self._now().timestamp())

    def list_documents(self, query: DocumentQuery) -> list[Document]:
        """Return one page of documents, by key."""
        self._must_be_open()
        return self._documents.read(query, self._now().timestamp())

    def list_collections(self) -> dict[str, int]:
        """Return the collections, each with the number of its keys."""
        self._must_be_open()
        return self._documents.collections()

    def remove_documents(self, collection: str, prefix: str = "", *, expired: bool = False, scrub: bool = False) -> int:
        """Remove documents with their files, so that `scrub` has nothing to add. Return the number of keys."""
        self._must_be_open()
        wanted = documents.wanted_keys(DocumentQuery(collection, prefix))
        if not expired:
            return self._documents.remove(collection, wanted)
        return self._documents.remove_expired(collection, wanted, self._now().timestamp(), self._is_there)

    def artifacts_folder(self) -> str:
        """Return the folder of artifacts."""
        return f"{self._root}/artifacts"

    # -- leases ------------------------------------------------------------------------------------------------------

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        self._must_be_open()
        if leaving:
            return self._workers.leave(worker.id)
        self._check_in_place()
        known = self._workers.renew(worker)
        self._index.tend()
        return known

    def _check_in_place(self) -> None:
        if self._disk.identity(f"{self._root}/{MARKER}") != self._identity:  # the folder was replaced
            raise StoreUnavailable(f"{self._root} was moved or removed while it was open")

    def drain_worker(self, worker: str) -> bool:
        """Mark a registered worker as draining. Return False if there is none."""
        self._must_be_open()
        return self._workers.drain(worker)

    def is_draining(self, worker: str) -> bool:
        """Whether a worker is marked as draining."""
        self._must_be_open()
        return self._workers.drain_at(worker) is not None

    def claim_runs(self, request: ClaimRequest) -> Claims:
        self._must_be_open()
        if request.worker not in self._workers.locks and not self.renew_leases(
            WorkerInfo(request.worker, pid=os.getpid())
        ):
            return Claims()
        if self._workers.is_gone(request.worker):
            return Claims()
        alive, dead = self._workers.liveness_of_workers(request.worker)
        alive |= {worker for worker in dead if not self._workers.mark_dead(request.worker, worker)}
        limited = {gate.name: gate for gate in self._gates.list(QUEUE)}
        if request.run is not None:
            return Claims(self._claim_by_name(request, alive, limited))
        self._catch_up()
        if dead:
            self._workers.forget_long_dead(set(self._index.leases()))
        now = self._now().timestamp()
        claims: tuple[Claim, ...] = ()
        at: list[float | None] = []
        served = [name for name in limited if request.queues is None or name in request.queues]
        rooms = services.rooms_of(request, self._index.parked_at(), self._users)
        turns = [*served, *(f"{services.gate_text(name)}" for name in rooms)]
        for name in queues.in_turn(turns, self._claims_made):
            rest = replace(request, limit=request.limit - len(claims))
            service = services.service_in(name)
            if service is not None:
                places, workflows = rooms[service]
                rest = replace(rest, workflows=workflows)
                claims += self._claim_parked(service, min(places, rest.limit), rest, (alive, limited, now))
            elif name is None:
                claims += self._claim_others(rest, alive, limited, now)
            else:
                more, next_at = self._claim_queue(limited[name], rest, alive, now)
                claims += more
                at.append(next_at)
        self._claims_made += 1
        at.append(self._index.next_due(request, now))
        first = min((one for one in at if one is not None), default=None)
        return Claims(claims, None if first is None else instant(first), self._at_services(request))

    def _claim_by_name(self, request: ClaimRequest, alive: set[str], limited: dict[str, GateInfo]) -> tuple[Claim, ...]:
        run = request.run or ""
        line = self._index.loaded().line(run)
        if line is not None and line.dedupe is not None and Status(line.status).finished:
            rules.check_twin(run, self._index.twin(line.queue or "", line.dedupe))
        gate = limited.get(line.queue or "") if line is not None else None
        if line is None or gate is None or not request.drives:
            return self._take_all([run], request, alive)
        with self._gates.claiming(gate) as is_mine:
            self._catch_up()
            ground = self._ground(gate.name, request, alive, self._now().timestamp())
            if not is_mine or not queues.may_drive(gate, ground, holds_key=line.key is None or line.holds > 0):
                return ()
            return self._take_all([run], request, alive)

    def _claim_queue(
        self, gate: GateInfo, request: ClaimRequest, alive: set[str], now: float
    ) -> tuple[tuple[Claim, ...], float | None]:
        """Claim runs of a queue with limits, under its lock; nothing if another process has it."""
        with self._gates.claiming(gate) as is_mine:
            if not is_mine:
                return (), None
            self._catch_up()  # what the claim before this one has taken
            gate = self._gates.get(gate.kind, gate.name) or gate
            decision = queues.decide(gate, self._ground(gate.name, request, alive, now), request.limit, now)
            if decision.gate is not gate:  # before the runs begin: a crash may waste a token, but never give one twice
                self._gates.move(decision.gate)
            runs = [*decision.orphans, *decision.runs]
            return self._take_all(runs, request, alive) if runs else (), decision.next_at

    def _ground(self, name: str, request: ClaimRequest, alive: set[str], now: float) -> queues.Listed:
        places = [place for place in self._index.places(name, request) if place.run not in self._broken]
        return queues.Listed(places, request.worker, partial(self._is_dead, alive), now)

    def _claim_others(
        self, request: ClaimRequest, alive: set[str], limited: Container[str], now: float
    ) -> tuple[Claim, ...]:
        """Claim runs of queues without limits."""
        limit = max(request.limit, 0)
        found = [*self._index.orphans(request, alive, limited), *self._index.due(request, now, limited)]
        claims: list[Claim] = []
        for start in range(0, len(found), max(limit, 1)):
            if len(claims) >= limit:
                break
            some = found[start : start + limit - len(claims)]
            claims += self._take_all([line.run for line in some if not self._is_broken(line)], request, alive)
        return tuple(claims)

    # -- services ----------------------------------------------------------------------------------------------------

    def _claim_parked(
        self, service: str, room: int, request: ClaimRequest, moment: tuple[set[str], dict[str, GateInfo], float]
    ) -> tuple[Claim, ...]:
        """Claim runs that wait at a service and whose queues have a place."""
        alive, limited, now = moment
        full = {name for name, gate in limited.items() if not self._has_place(gate, request, alive, now)}
        lines = [line for line in self._index.parked(service, request) if not self._is_broken(line)]
        places = [parked_place(line) for line in lines if line.queue not in full]
        gate, is_declared = self._gates.service(service)
        ground = queues.Listed(places, request.worker, partial(self._is_dead, alive), now)
        decision = queues.decide_parked(gate, ground, room)
        if is_declared and decision.gate != gate:
            self._take_turn(decision.gate)
        claims: list[Claim] = []
        for run in decision.runs:
            line = self._index.line(run)
            queue = limited.get(line.queue or "") if line is not None else None
            if queue is None:
                claims += self._take_all([run], request, alive, service)
                continue
            with self._gates.claiming(queue) as is_mine:
                self._catch_up()
                if is_mine and self._has_place(queue, request, alive, now):
                    claims += self._take_all([run], request, alive, service)
        through = service if service in request.rooms else None
        return tuple(replace(claim, service=through) for claim in claims)

    def _take_turn(self, after: GateInfo) -> None:
        """Write whose turn it is at a service, unless another process is at it."""
        with self._gates.claiming(after) as is_mine:
            if is_mine:
                gate, _ = self._gates.service(after.name)
                self._gates.move(replace(gate, turn=after.turn, line_next=after.line_next))

    def _has_place(self, gate: GateInfo, request: ClaimRequest, alive: set[str], now: float) -> bool:
        return queues.may_drive(gate, self._ground(gate.name, request, alive, now), holds_key=True)

    def _users(self, service: str) -> list[tuple[str, ...]]:
        """Return the workflows of each worker that uses a service, is not given up and does not drain."""
        users = [share.worker for share in self._living(self._gates.service(service)[0])]
        return [self._workers.workflows(one) for one in users if self._workers.drain_at(one) is None]

    def _at_services(self, request: ClaimRequest) -> tuple[AtService, ...]:
        found: list[AtService] = []
        for service in sorted(request.rooms):
            since = [line.since or 0.0 for line in self._index.parked(service, request)]
            if since:
                found.append(AtService(service, min(len(since), services.MOST_COUNTED), instant(min(since))))
        return tuple(found)

    def _living(self, gate: GateInfo) -> tuple[Share, ...]:
        """Return the shares of workers that are not given up."""
        known = [share for share in gate.shares if is_id(share.worker)]
        return tuple(share for share in known if not self._workers.is_given_up(share.worker))

    def pass_gates(self, worker: str, asks: Sequence[Ask]) -> list[Grant]:
        self._must_be_open()
        if self._workers.is_gone(worker):
            return [services.refused(ask) for ask in asks]
        return [self._pass_gate(worker, ask) for ask in asks]

    def _pass_gate(self, worker: str, ask: Ask) -> Grant:
        # Most asks tell nothing new. Its own share is only written by its worker, so that it is read without the lock.
        before, after, grant = self._decide(worker, ask)
        if after != before:
            with self._gates.passing(ask.service):
                before, after, grant = self._decide(worker, ask)
                self._gates.move(after)
        return grant

    def _decide(self, worker: str, ask: Ask) -> tuple[GateInfo, GateInfo, Grant]:
        """Return a service before and after an ask, and the answer."""
        before, is_declared = self._gates.service(ask.service)
        shares = self._living(before)
        passage = services.decide(before, shares, worker, ask, self._now().timestamp())
        others = [share for share in shares if share.worker != worker]
        mine = [] if passage.share is None else [passage.share]
        after = replace(
            passage.gate if is_declared else before,
            shares=tuple(sorted([*others, *mine], key=lambda share: share.worker)),
        )
        return before, after, passage.grant

    def list_gates(self, kind: str) -> list[GateInfo]:
        self._must_be_open()
        found = self._gates.list(kind)
        if kind != SERVICE:
            return found
        self._catch_up_reading()
        return [self._with_users(gate) for gate in found]

    def _with_users(self, gate: GateInfo) -> GateInfo:
        since = [line.since or 0.0 for line in self._index.parked(gate.name)]
        at = instant(min(since)) if since else None
        return replace(gate, shares=self._living(gate), parked=len(since), parked_since=at)

    def change_gate(self, kind: str, name: str, change: GateChange) -> GateInfo:
        self._must_be_open()
        return self._gates.change(kind, name, change)

    def count_queue(self, name: str) -> QueueCounts:
        self._must_be_open()
        self._catch_up_reading()
        workflows = frozenset(line.workflow for line in self._index.lines())
        listed = self._workers.listed(self._index.leases(), gone=False)
        alive = {worker.id for worker in listed if worker.alive}
        return self._ground(name, ClaimRequest("", workflows), alive, self._now().timestamp()).counts()

    def _catch_up(self) -> None:
        """Read the changes of others, and finish the work of dead writers."""
        self._index.refresh()
        self._finish_for_the_dead()
        for batch, owed in self._index.owed().items():
            self._settle(owed)
            self._index.did(batch, {None})
        self._settle(self._index.doubtful())

    def _finish_for_the_dead(self) -> None:
        for name, runs in self._index.left_by_dead_writers():
            self._settle(runs)
            self._index.retire(name)

    def _settle(self, runs: Iterable[str]) -> None:
        for run in runs:
            try:
                finish(self._disk, self._commits.settle(run))
            except CheckpointCorrupt as error:
                log.error("run %s cannot be read: %s", run, error)  # noqa: TRY400 - one line is enough

    def _is_broken(self, line: Line) -> bool:
        return self._broken.get(line.run) == line.entry

    def _take_all(
        self, runs: list[str], request: ClaimRequest, alive: set[str], service: str | None = None
    ) -> tuple[Claim, ...]:
        taken: list[Claim | None] = [None] * len(runs)
        batch = self._index.will(runs)

        def take(i: int) -> Steps[None]:
            taken[i] = yield from self._take(runs[i], request, alive, service)

        failures = self._commits.at_once([take(i) for i in range(len(runs))])
        if failures:
            self._index.failed(batch)
            if not any(taken):
                raise failures[0]
        elif runs:
            self._index.did(batch, {request.worker})
        return tuple(claim for claim in taken if claim is not None)

    def _take(self, run: str, request: ClaimRequest, alive: set[str], service: str | None) -> Steps[Claim | None]:
        """Lease one run if it is still free. Skip an unreadable run, so that it does not block the others."""
        before: list[State] = []
        known = self._index.line(run)

        def decide(state: State | None) -> Draft | Answer:
            before[:] = [state] if state else []
            if state is not None and known is not None and state.number < known.entry:
                lost = self._commits.lost(run, known)
                if lost is not None:
                    raise lost
            is_dead = partial(self._is_dead, alive)
            if state is None or not may_take(request, state.head, self._now(), is_dead, service):
                return Answer(Verdict.FENCED)
            has_key = self._logs.facts(run, state.head).key is not None if known is None else known.key is not None
            begins = has_key and (request.run is None or request.drives)
            head = leased(state.head, request.worker, self._now(), holds=begins)
            return Draft("claimed", head, outbox=self._commits.undone(state.outbox))

        def take() -> Steps[tuple[State, Facts] | None]:
            draft, state = yield from self._logs.append(run, decide)
            if state is None:
                yield from self._commits.settle(run)
                return None
            self._commits.note(run, state, request.worker)
            return None if isinstance(draft, Answer) else (state, self._logs.facts(run, state.head))

        try:
            found = yield from self._logs.steps_unless_removed(run, take)
        except CheckpointCorrupt as error:
            log.error("run %s cannot be claimed: %s", run, error)  # noqa: TRY400 - one line is enough
            known = self._index.line(run)
            self._broken[run] = known.entry if known else 0
            return None
        if found is None:
            return None
        state, facts = found
        old = before[0].head
        if old.worker is not None:
            self._logs.sweep(run)
        return claim_of(run_of(run, facts, state.head), old.worker, old.status, old.updated_at)

    def _is_dead(self, alive: set[str], owner: str) -> bool:
        # A worker that joined after the check of liveness is alive, too, because it registers before it claims.
        return owner not in alive and not self._workers.is_alive(owner)

    def list_workers(self, *, gone: bool = False) -> list[WorkerInfo]:
        self._must_be_open()
        self._check_in_place()  # a process without a worker asks for them to learn whether the store answers
        self._index.refresh()
        return self._workers.listed(self._index.leases(), gone=gone)

    # -- reading -----------------------------------------------------------------------------------------------------

    def get_run(self, run_id: str) -> Run | None:
        self._must_be_open()
        return self._logs.unless_removed(run_id, lambda: self._get_run(run_id))

    def _get_run(self, run_id: str) -> Run | None:
        state = self._logs.state(run_id)
        if state is not None and state.head.status not in rules.ENDED:  # or a caller waits in vain
            state = self._not_behind(run_id)
        if state is None:
            return None
        if state.outbox:  # effects of this entry, such as a successor, must exist before it is visible
            finish(self._disk, self._commits.carry_on(state))
        head = state.head
        run = run_of(run_id, self._logs.facts(run_id, head), head)
        kind = rules.outcome_kind(head.status)
        if kind is not None:
            if not state.durable:
                self._logs.make_durable(run_id)
            final = self._final(run_id, head.outcome, kind) if head.outcome else None
            if final is not None:
                run = rules.with_outcome(run, final)
        progress = None if run.worker is None else self._workers.progress(run.worker, run_id)
        return run if progress is None else replace(run, progress=progress)

    def _not_behind(self, run_id: str) -> State | None:
        """Return the state of a run, unless the index says that the run has gone further."""
        known = self._index.loaded().line(run_id)
        state = self._logs.state(run_id, whole=True)
        if state is not None and known is not None and state.number < known.entry:
            lost = self._commits.lost(run_id, known)
            if lost is not None:
                raise lost
        return state

    def salvaged(self, run_id: str) -> Run | None:
        """Return a run with a broken log as of its newest readable entry, for a repair.

        The run has no lease if the worker named there is dead.
        """
        self._must_be_open()
        return self._logs.unless_removed(run_id, lambda: self._salvaged(run_id))

    def _salvaged(self, run_id: str) -> Run | None:
        state = self._commits.remains(run_id)
        if state is None:
            return None
        run = run_of(run_id, self._logs.facts(run_id, state.head), state.head)
        return run if self._is_driven(run_id) else replace(run, worker=None)

    def raw_rows(self, run_id: str) -> list[dict[str, Any]]:
        """Return the unreadable files of a run, to be kept before they are removed."""
        self._must_be_open()
        return self._logs.unreadable(run_id)

    def _final(self, run_id: str, number: int, kind: str) -> Row | None:
        rows = self._logs.rows_of(run_id, number)
        return next((row for row in reversed(rows) if row.kind == kind), None)

    def list_runs(self, query: RunQuery) -> RunPage:
        self._must_be_open()
        start, limit = rules.page_start(query), max(query.limit, 0)
        self._catch_up_reading()
        narrow = rules.with_statuses(query)
        found = [] if narrow is None else list(islice(self._matching(narrow, start), limit + 1))
        page = found[:limit]
        runs = tuple(run if query.with_input else replace(run, input=b"") for _, run in page if run is not None)
        unreadable = tuple(line.run for line, run in page if run is None)
        more = str(page[-1][0].number) if page and len(found) > len(page) else None
        count = None
        if query.count_to:
            count = 0 if narrow is None else sum(1 for _ in islice(self._matching(narrow, None), query.count_to))
        return RunPage(runs, more, unreadable, count)

    def _matching(self, query: RunQuery, start: int | None) -> Iterator[tuple[Line, Run | None]]:
        """Yield the runs that match a query, newest first, each with its line; None for a damaged run."""
        now = instant(self.clock.now())
        mended = self._mended() if query.open_failure else frozenset()
        for line in self._index.newest_first(start, query.ids):
            if not may_match(query, line):
                continue
            try:
                run = self._logs.unless_removed(line.run, partial(self._commits.run, line.run, line))
            except CheckpointCorrupt:
                yield line, None
                continue
            if run is None or not rules.matches(query, run, at=now):
                continue
            if rules.is_open(query, run.id, run.status, partial(self._last_row, run), mended):
                yield line, run

    def _mended(self) -> frozenset[str]:
        """Return the origins of forks that have completed."""
        done = [line for line in self._index.newest_first(None) if line.status == Status.COMPLETED.value]
        return frozenset(origin for line in done if (origin := self._origin(line)))

    def _origin(self, line: Line) -> str | None:
        if line.origin is not None:
            return line.origin
        with contextlib.suppress(StoreError):  # a damaged run mends no other
            run = self._logs.unless_removed(line.run, partial(self._commits.run, line.run, line))
            return None if run is None else run.origin
        return None

    def _last_row(self, run: Run) -> Row | None:
        rows = self._logs.unless_removed(run.id, lambda: self._logs.rows(run.id, run.seq - 1, 1, ()))
        return rows[0] if rows else None

    def _catch_up_reading(self) -> None:
        """Read the changes of others; unfinished work, and two lives of one run, are resolved by reading the folder."""
        self._index.refresh()
        with contextlib.suppress(StoreUnavailable):  # the store is read-only here, and visible as far as the index goes
            self._finish_for_the_dead()
        for run in self._index.doubtful():
            try:
                finish(self._disk, self._commits.settle(run))
            except StoreError as error:
                log.warning("run %s cannot be read: %s", run, error)

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        self._must_be_open()
        kinds = tuple(kinds)
        return self._logs.unless_removed(run_id, lambda: self._logs.rows(run_id, after, limit, kinds))

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        self._must_be_open()
        return self._logs.unless_removed(run_id, lambda: self._list_signals(run_id, after, limit))

    def _list_signals(self, run_id: str, after: int, limit: int) -> list[Signal]:
        state, _ = self._logs.state_to_read(run_id)  # reading the checkpoints reports a broken log
        if state is None:
            return []
        found: list[Signal] = []
        if limit > 0:
            for signal, _ in self._logs.signals(run_id, state, after):
                found.append(signal)
                if len(found) >= limit:
                    break
        return found

    def news(self, worker: str, cursor: int) -> News:
        self._must_be_open()
        self._index.refresh()
        return News(*self._index.news(worker, cursor))

    # -- care --------------------------------------------------------------------------------------------------------

    def _scan(self) -> Iterator[Line]:
        """Yield the index line of every run, read from its log; finish the work of dead writers."""
        for run in self._all_runs():
            try:
                line = self._logs.unless_removed(run, partial(self._line, run))
            except CheckpointCorrupt as error:
                log.error("run %s cannot be read: %s", run, error)  # noqa: TRY400 - one line is enough
                continue
            if line is not None:
                yield line

    def _line(self, run: str) -> Line | None:
        state = self._logs.state(run, whole=True)
        if state is None:
            return None
        if state.outbox:
            finish(self._disk, self._commits.settle(run))
        return line_of(run, self._logs.facts(run, state.head), state)

    def _all_runs(self) -> Iterator[str]:
        """Yield the id of every run whose log has a first entry, by folder."""
        for shard in sorted(self._disk.names(f"{self._root}/runs")):
            for name in sorted(self._disk.names(f"{self._root}/runs/{shard}")):
                run = self._logs.run_in(f"runs/{shard}/{name}")
                if run is not None:
                    yield run

    def check(self, *, mend: bool = False) -> list[Flaw]:
        self._must_be_open()
        self._catch_up_reading()
        return Check(self._root, self._disk, self._logs, self._index, self._commits, mend=mend).flaws()

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._gone:
            self._gone = f"the store {self._root} is closed"
            self._commits.close()
            self._index.close()
            self._workers.close()

    def abandon(self) -> None:
        """Become unusable in a forked child, which must not keep its parent's locks alive."""
        if not self._gone:
            self._gone = (
                f"the store {self._root} was opened by the process that forked this one (pid {os.getppid()}): "
                "open it again"
            )
            self._index.abandon()
            self._workers.close()

    def _must_be_open(self) -> None:
        if self._gone:
            raise StoreError(self._gone)

    def _now(self) -> datetime:
        return instant(self.clock.now())


def open_url(url: str, *, clock: Clock | None = None, **options: Any) -> FilesStore:
    """Open the store for `files:path`, `files:///relative/path` or `files:////absolute/path`."""
    path = url.partition(":")[2]
    path = path.removeprefix("///") if path.startswith("///") else path
    if not path or path.startswith("//"):
        raise DefinitionError(f"a files URL must name a folder, as in files:runs or files:/var/lib/runs, got {url!r}")
    return FilesStore(path, clock=clock, **options)


def _check_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise StoreUnavailable(f"{path} cannot be opened: it is a file, and a files store is a folder")


def _prepare(root: str, disk: Disk) -> None:
    """Make an empty folder a store; raise if it holds anything else."""
    try:
        text = disk.read(f"{root}/{MARKER}")
    except FileNotFoundError:
        _make(root, disk)
        text = disk.read(f"{root}/{MARKER}")
    try:
        layout = msgspec.json.decode(text)["layout"]
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError):
        raise SchemaMismatch(f"{root}/{MARKER} cannot be read: restore it, or write {_marker().decode()!r}") from None
    if not isinstance(layout, int) or layout > LAYOUT:
        raise SchemaMismatch(
            f"{root} has layout {layout}, but this Keepstep reads layouts up to {LAYOUT}. It was written by a newer "
            "Keepstep; upgrade this one"
        )


def _make(root: str, disk: Disk) -> None:
    disk.make_folder(root)
    strangers = sorted(name for name in disk.names(root) if not name.startswith(".") and name not in _OURS)
    if strangers:
        raise SchemaMismatch(
            f"{root} holds other files ({', '.join(strangers[:3])}, …). Choose another folder; Keepstep writes "
            "only to folders that it has created"
        )
    for name in ("runs", "trash"):
        disk.make_folder(f"{root}/{name}")
    word = draw(6).hex()
    try:
        finish(disk, disk.create(f"{root}/.{MARKER}-{word}.tmp", _marker()))
        if disk.identity(f"{root}/.gitignore") is None:
            disk.put(f"{root}/.gitignore", _IGNORED, f"{root}/.gitignore-{word}.tmp")
        _link_or_refuse(root, disk, word)
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(f"{root}/.{MARKER}-{word}.tmp")
    finish(disk, disk.sync_folder(root))
    finish(disk, disk.sync_folder(str(Path(root).parent)))


def _link_or_refuse(root: str, disk: Disk, word: str) -> None:
    try:
        disk.link(f"{root}/.{MARKER}-{word}.tmp", f"{root}/{MARKER}")
    except FileExistsError:  # another process was first
        pass
    except PermissionError as error:
        raise StoreUnavailable(f"{root}: this file system has no hard links, which a files store needs") from error


def _marker() -> bytes:
    return msgspec.json.format(msgspec.json.encode({"keepstep": "files", "layout": LAYOUT}), indent=2) + b"\n"


_OURS = {"runs", "trash", "index", "workers", "aside", "documents", "artifacts"}
