"""The PostgreSQL store, shared by workers on many machines."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple, TypeVar

import msgspec
import psycopg

from ...checks import check_id
from ...errors import CheckpointCorrupt, DefinitionError, StoreError, StoreUnavailable
from ...model import (
    FINISHED,
    LEASE_SECONDS,
    Ask,
    Claims,
    Flaw,
    GateChange,
    GateInfo,
    Grant,
    Hindrance,
    News,
    QueueCounts,
    Run,
    RunPage,
    RunQuery,
    Signal,
    WorkerInfo,
)
from ...model.gate import QUEUE, SERVICE
from ...ports import (
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
    Store,
    Verdict,
    instant,
)
from ...ports import Written as DocumentsWritten
from .. import documents, gates, rules
from ..os_locks import abandon_in_children
from ..watch import Watch, process_identity
from ..write_counts import Authors
from .async_commit import Underway
from .check import Inspector, raw_rows
from .claims import Claimer
from .commit import Batch, in_one_go, one_statement
from .documents import Documents
from .erase import Eraser
from .horizon import hindrances
from .liveness import WorkerSession
from .locks import Locks
from .lookout import LOOK_SECONDS, Lookouts, Post
from .parts import Parts, newest
from .pool import NOT_FLUSHED, TRIES, UNUSED_SECONDS, Address, Connection, Connections, ServerClock, migrate
from .queues import GateStatements, Moment, QueueGround, gate_from, moved
from .reads import Reads
from .replica import LAG_SECONDS, Looking, Replica
from .rows import Array, names, names_text, original, plain, texts
from .services import ServiceStatements
from .statements import DUE, Statements, Written
from .user_transaction import commit_within
from .watchdog import Watchdog

log = logging.getLogger("keepstep")

#: Interval in seconds of polling for news, in case a notification was lost.
ASK_SECONDS = 1.0
#: Shortest time in seconds between two claims that this store suggests for runs that it has made due itself.
OWN_SECONDS = 0.25
#: Time in seconds after which a listening store assumes a change that its writer could not announce.
LOST_SECONDS = 30.0
#: Time in seconds after which a statement without an answer counts as lost and its connection is closed.
ANSWER_SECONDS = 30.0
#: Number of runs that one transaction removes; a small number keeps the waits of other clients short.
_DELETE_AT_ONCE = 500
#: Number of signal arrivals to remember. A worker is at most a second behind when it polls.
_ARRIVALS = 10_000

_json = msgspec.json.Encoder().encode
T = TypeVar("T")


class _Seen(NamedTuple):
    """The state that a worker saw when it last asked for news."""

    asked_at: float
    changed_at: float
    stamp: tuple[int, ...]
    signals: int
    called: tuple[int, ...] = ()


class PostgresStore:
    """A store in the tables of one schema; several stores may share a database.

    `connections` limits the connections of one process for reading and claiming; it opens one more to write, and closes
    those that are unused. It holds one session, which is all that an idle worker needs. `replica` is the URL of a
    streaming replica, which answers those who only look. `create=False` never creates a store. `proxy=True` is for a
    server behind a proxy that pools transactions (PgBouncer). Then no session is held: a death is detected by the
    lease, and news by polling.
    """

    quick = False
    transactional = True

    def __init__(
        self,
        url: str,
        *,
        schema: str | None = None,
        clock: Clock | None = None,
        connections: int = 4,
        wait_seconds: float = 5.0,
        lease_seconds: float = LEASE_SECONDS,
        within_seconds: float = 5.0,
        answer_seconds: float = ANSWER_SECONDS,
        proxy: bool = False,
        create: bool = True,
        replica: str | None = None,
        replica_lag_seconds: float = LAG_SECONDS,
    ) -> None:
        if connections < 1:
            raise DefinitionError(f"connections must be at least 1, got {connections}")
        if not answer_seconds > 0:
            raise DefinitionError(f"answer_seconds must be greater than 0, got {answer_seconds}")
        self._address = address = Address(url, schema=schema, proxy=proxy, idle_seconds=lease_seconds)
        self.url = address.text
        self._server_clock = ServerClock()
        self.clock: Clock = clock or self._server_clock
        self.lease_seconds = lease_seconds
        self._within_seconds = within_seconds
        self._pool = Connections(address, connections, wait_seconds)
        self._writer = Connections(address, 1, wait_seconds, spare=self._pool)
        self._lookouts = Lookouts(address, self.clock)
        self._presence = WorkerSession(address, self.clock, self._lookouts.answers_after)
        self._statements = Statements(address)
        self._sql = _Statements(address)
        self._gates, self._services = GateStatements(address), ServiceStatements(address)
        self._documents = Documents(address)
        self._reads = Reads(address, self._pool, self.clock)
        self._replica = (
            None if replica is None else self._beside(replica, connections, wait_seconds, replica_lag_seconds)
        )
        self._eraser = Eraser(address)
        self._parts = Parts(address)
        self._locks = Locks(address)
        self._watch = Watch(self.clock, lease_seconds)
        self._claimer = Claimer(address, self.clock, self._watch, self._lookouts)
        self._enrolled: set[str] = set()
        self._drains: dict[str, bool] = {}  # worker: whether it drains, as its last heartbeat found
        self._due_soon: list[float] = []  # a heap of times at which runs are due that were released here
        self._own_at = self._worked_at = float("-inf")  # the last times of an own look, and of a write or a claim
        self._leases = self._signals = 0  # numbers of times that a worker here may have got a lease, and of signals
        self._holds_none: dict[str, int] = {}  # worker: that number, when it was found to hold no run
        self._closed = False
        self._watchdog: Watchdog | None = None
        self._authors = Authors()
        self._seen: dict[str, _Seen] = {}
        self._signalled: dict[str, dict[str, int]] = {}  # worker: its runs, each with its known number of signals
        self._arrivals: deque[tuple[int, str, str]] = deque(maxlen=_ARRIVALS)  # (position, worker, run)
        self._news_lock = threading.Lock()
        try:
            self._pool.run(lambda connection: self._open(connection, create=create), patience_seconds=inf)
            if self._replica is not None:
                self._replica.check()
        except BaseException:
            self.close()
            raise
        replicas = () if self._replica is None else (self._replica,)
        self._watchdog = Watchdog((self._writer, self._pool, self._presence, *replicas), answer_seconds, self.url)
        weakref.finalize(self, self._watchdog.stop).atexit = False
        abandon_in_children(self)
        weakref.finalize(self, self._presence.end_soon).atexit = False

    def __repr__(self) -> str:
        return f"PostgresStore({self.url!r})"

    def _beside(self, url: str, connections: int, wait_seconds: float, lag_seconds: float) -> Replica:
        """Return a streaming replica of this store."""
        own = self._address
        there = Address(url, default_schema=own.schema, proxy=own.proxy, idle_seconds=self.lease_seconds)
        pool = Connections(there, connections, wait_seconds)
        return Replica(there, pool, own, self._pool, clock=self.clock, lag_seconds=lag_seconds)

    def _open(self, connection: Connection, *, create: bool) -> None:
        migrate(connection, self._address, create=create)
        self._server_clock.measure(connection)

    # -- writing -----------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        self._writer.check_usable()
        for change in changes:
            for create in (change,) if isinstance(change, Create) else getattr(change, "creates", ()):
                rules.check_create(create)
        answers: list[Answer] = []
        together: list[Change] = []
        for change in changes:
            if type(change) is Advance and change.within is not None:
                answers += self._commit(together, committed=answers)
                together = []
                answers.append(self._commit_within(change, committed=answers))
            else:
                together.append(change)
        return answers + self._commit(together, committed=answers)

    def begin_commit(self, changes: Sequence[Change]) -> Underway | None:
        if self._address.proxy:  # nothing is prepared behind a proxy
            return None
        if self._locks.suspects(changes):  # the commit would have to wait for these locks
            return None
        try:
            written, statement = one_statement(self._statements, changes, self._now())
        except (UnicodeEncodeError, OverflowError):  # `commit` raises a precise error
            return None
        if written is None or statement is None:
            return None

        def done() -> list[Answer]:
            self._tell(changes, written)
            return [_done(change) for change in changes]

        return Underway.begin(self._address, self._writer, statement, done, lambda: self._locks.suspect(changes))

    def _commit(self, changes: list[Change], *, committed: list[Answer]) -> list[Answer]:
        if not changes:
            return []
        try:
            if not self._locks.suspects(changes):
                try:
                    return self._write(changes)
                except StoreUnavailable as error:
                    if not error.held:
                        raise
                    self._locks.suspect(changes)
            return self._write_free(changes)
        except StoreUnavailable as error:
            error.unknown |= bool(committed)  # earlier parts are committed, whatever happened to this one
            raise

    def _write(self, changes: Sequence[Change]) -> list[Answer]:
        now = self._now()
        written = self._writer.run(lambda connection: in_one_go(connection, self._statements, changes, now))
        if written is not None:
            answers = [_done(change) for change in changes]
        else:
            answers, written = self._writer.run(lambda connection: self._decide(connection, changes))
        self._tell(changes, written)
        return answers

    def _write_free(self, changes: Sequence[Change]) -> list[Answer]:
        """Write the changes that are not locked. Answer HELD for the others, so that they block nobody."""
        try:
            self._writer.run(lambda connection: self._locks.look(connection, changes), again=True)
            answers = [self._locks.answer(change) for change in changes]
            free = [change for change, held in zip(changes, answers, strict=True) if held is None]
            written = iter(self._write(free) if free else ())
        except StoreUnavailable as error:
            if not error.held:
                raise
            return [Answer(Verdict.HELD, error=error) for _ in changes]  # all locked, or another lock came meanwhile
        return [next(written) if answer is None else answer for answer in answers]

    def _decide(self, connection: Connection, changes: Sequence[Change]) -> tuple[list[Answer], Written]:
        taken = ""
        for _ in range(TRIES):
            batch = Batch(connection, self._statements, changes, self._now())
            answers = batch.apply(changes)
            try:
                with connection.pipeline():
                    batch.write()
                    connection.execute("COMMIT")
            except psycopg.errors.UniqueViolation as error:  # another client has just created one of the runs
                connection.rollback()
                taken = f"{error.diag.table_name}: {error.diag.message_detail}"
                continue
            except psycopg.errors.InvalidTextRepresentation:  # heads are locked now, so they stay as read
                runs = ", ".join(sorted(batch.written.heads))
                raise CheckpointCorrupt(f"{self.url}: the head of one of these runs has no workflow: {runs}") from None
            return answers, batch.written
        if taken.startswith(("keepstep_checkpoint", "keepstep_signal")):  # or the head misses rows
            raise CheckpointCorrupt(f"{self.url}: the rows to write exist already, in {taken}")
        raise StoreUnavailable(f"{self.url}: other clients keep creating the same runs")

    def _commit_within(self, change: Advance, *, committed: list[Answer]) -> Answer:
        try:
            if self._locks.suspects([change]):  # do not call its function in vain
                self._pool.run(lambda connection: self._locks.look(connection, [change]), again=True)
                if (held := self._locks.answer(change)) is not None:
                    return held
            answer, written = self._pool.run(
                lambda connection: commit_within(connection, self._statements, change, self._now, self._within_seconds),
                patience_seconds=self._within_seconds,
            )
        except StoreUnavailable as error:
            if error.held:
                self._locks.suspect([change])
                return Answer(Verdict.HELD, error=error)
            error.unknown |= bool(committed)
            raise
        if written is not None:
            self._tell([change], written)
        return answer

    def _tell(self, changes: Sequence[Change], written: Written) -> None:
        self._signals += len(written.signals)
        self._authors.committed(changes)
        self._wrote()
        self._note(changes, written)
        if written.notifications and not self._address.proxy:
            self._presence.notify(written.notifications)

    def _note(self, changes: Sequence[Change], written: Written) -> None:
        """Note new leases, and runs that are due now or before the next look of the lookout."""
        now, self._worked_at = self.clock.now(), time.monotonic()
        soon = [at for at in map(_due_at, changes) if at is not None and now < at <= now + 2 * LOOK_SECONDS]
        if self._enrolled:
            self._leases += any(type(change) is Create or getattr(change, "creates", ()) for change in changes)
            for at in soon if DUE not in written.notifications else (now, *soon):
                heappush(self._due_soon, at)
        elif soon:
            written.notifications.add(f"{DUE}{min(soon)}")

    def _wrote(self) -> None:
        """Note that what is read from a replica from now on must include a write of this process."""
        if self._replica is not None:
            self._replica.wrote()

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        wanted = sorted(set(map(plain, run_ids)))
        if scrub and wanted:
            self.check_scrub()
        removed = 0
        for start in range(0, len(wanted), _DELETE_AT_ONCE):
            some = texts(wanted[start : start + _DELETE_AT_ONCE])
            removed += self._pool.run(
                lambda connection: self._delete(connection, some, finished=finished, scrub=scrub)  # noqa: B023
            )
        self._authors.wrote({None})
        self._wrote()
        if scrub and wanted:
            # Runs that an earlier call removed but could not scrub are scrubbed now, and counted.
            removed = self._pool.run(lambda connection: self._eraser.begun(connection, wanted), again=True)
            if removed or not finished:
                self._scrub(wanted, removed)
        return removed

    def _scrub(self, runs: Sequence[str], removed: int) -> None:
        """Rewrite the tables. If they are so large that this would block every run, raise `EraseUnfinished` instead."""
        self._pool.run(lambda connection: self._eraser.forget_progress(connection, runs))
        size = self._pool.run(self._eraser.size, again=True)
        if size <= rules.REWRITTEN_AT_ONCE:
            self.rewrite()
        elif removed:
            raise rules.erase_unfinished(self._address.text, size)

    def unfinished_erasures(self) -> int:
        """Return the number of removed runs whose text may still be in the server's files."""
        return len(self._pool.run(self._eraser.marks, again=True))

    def rewrite(self) -> int:
        """Rewrite the tables to finish all erasures, blocking all runs. Return the number of runs finished."""
        self.check_scrub()
        return self._pool.run(self._eraser.rewrite, patience_seconds=inf)

    def _delete(self, connection: Connection, runs: Array, *, finished: bool, scrub: bool) -> int:
        """Remove runs with all their rows.

        Their heads are locked first. Otherwise a concurrent write, such as a signal, would remain and be delivered to
        the next run with that id.
        """
        with connection.transaction():
            connection.execute(self._statements.lock, (runs,), binary=True)
            delete = self._sql.delete_everywhere if scrub else self._sql.delete
            gone = {run for (run,) in connection.execute(delete, (runs, not finished), binary=True).fetchall()}
            if scrub:
                gone |= {run for (run,) in connection.execute(self._sql.delete_left, (runs,), binary=True).fetchall()}
                self._eraser.begin(connection, sorted(gone))
            return len(gone)

    def divide_history(self, days: float) -> bool:
        """Keep the records of new runs in a table for each period of `days`, from now on."""
        return self._pool.run(lambda one: self._parts.divide(one, days, self._now()), patience_seconds=inf)

    def drop_history(self) -> int:
        """Drop the parts of a divided history whose runs were all removed. Return their number."""
        return self._pool.run(lambda one: self._parts.tend(one, self._now()), patience_seconds=inf)

    def hindrances(self) -> list[Hindrance]:
        """Return what holds vacuum back on the server, as far as this role may see it."""
        return self._pool.run(hindrances, again=True)

    def check_scrub(self) -> None:
        """Raise if the server would not rewrite the tables for this role; it would only warn and continue."""
        self._pool.run(self._eraser.check_owner, again=True)

    # -- documents ---------------------------------------------------------------------------------------------------

    def write_documents(self, batches: Sequence[Sequence[Put]]) -> list[DocumentsWritten]:
        """Write batches of documents in one transaction."""
        documents.check_puts(batches)
        now = self._now().timestamp()
        return self._pool.run(lambda connection: self._documents.write(connection, batches, now))

    def list_documents(self, query: DocumentQuery) -> list[Document]:
        """Return one page of documents, by key."""
        read = self._documents.get if documents.is_of_one(query) else self._documents.read
        return self._pool.run(lambda connection: read(connection, query, self._now()), again=True)

    def list_collections(self) -> dict[str, int]:
        """Return the collections, each with the number of its keys."""
        return self._pool.run(self._documents.collections, again=True)

    def remove_documents(self, collection: str, prefix: str = "", *, expired: bool = False, scrub: bool = False) -> int:
        """Remove documents. Return the number of keys."""
        wanted = documents.wanted_keys(DocumentQuery(collection, prefix))
        if expired:
            now = self._now()
            return self._pool.run(lambda one: self._documents.remove_expired(one, collection, wanted, now))
        if scrub:
            self.check_scrub()

        def remove(connection: Connection) -> int:
            with connection.transaction():
                removed = self._documents.remove(connection, collection, wanted)
                if scrub and removed:
                    self._eraser.begin(connection, [f"document {collection} {prefix}"])
                return removed

        removed = self._pool.run(remove)
        if scrub and removed:
            self._scrub([], removed)
        return removed

    # -- leases ------------------------------------------------------------------------------------------------------

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        self._pool.check_usable()
        if leaving:
            return self._leave(worker.id)
        check_id(worker.id, "worker id")
        try:
            known = self._quietly(lambda connection: self._renew(connection, worker))
        except StoreError:
            self._watch.failed(worker.id)
            raise
        if known:
            self._watch.renewed(worker.id)
            self._enrolled.add(worker.id)
            self._presence.workers.add(worker.id)
        else:
            self._lookouts.left(worker.id)
        return known

    def _renew(self, connection: Connection, worker: WorkerInfo) -> bool:
        post = self._lookouts.known(worker.id)
        is_server_clock = self.clock is self._server_clock  # then the server knows its time better
        values = {
            "id": worker.id,
            "host": plain(worker.host),
            "pid": worker.pid,
            "started_at": worker.started_at,
            "now": None if is_server_clock else self._now(),
            "boot": self.clock.boot()[0],
            "boot_seconds": None if is_server_clock else self.clock.now(),
            "workflows": names_text(worker.workflows),
            "progress": _json({run: msgspec.Raw(value) for run, value in worker.progress.items()}),
            "lease": float(self.lease_seconds),
            "process": plain(process_identity()),
            "post": "" if post is None else post.name,
        }
        if post is None:  # otherwise the lookout calls the roll
            self._claimer.observe(connection)
        began = self._server_clock.boot()[1]
        for server_seconds, drains, roll, _ in connection.execute(self._sql.renew, values).fetchall():
            self._server_clock.learn(server_seconds, began)
            self._drains[worker.id] = drains
            if post is not None:
                post.found(roll)
            return True
        if worker.id in self._enrolled:  # its row is missing or marked, so the worker was marked dead
            return False
        return bool(connection.execute(self._sql.enrol, values).rowcount)

    def _quietly(self, work: Callable[[Connection], T], *, again: bool = False) -> T:
        """Run `work` in the session that is open anyway, unless this process is busy: then others have connections."""
        is_idle = self._enrolled and time.monotonic() - self._worked_at > UNUSED_SECONDS
        if is_idle and self._presence.is_free:
            answer: T = self._presence.ask(work)
            return answer
        return self._pool.run(work, again=again)

    def _leave(self, worker: str) -> bool:
        post = self._lookouts.known(worker)
        values = {"id": worker, "post": "" if post is None else post.name, "roll": "" if post is None else post.text}
        values["roll"] = values["roll"] if post is not None and post.is_mine else ""
        alive = self._pool.run(lambda connection: bool(connection.execute(self._sql.leave, values).fetchall()))
        self._lookouts.left(worker)
        self._presence.workers.discard(worker)
        if alive:
            self._enrolled.discard(worker)
        return alive

    def drain_worker(self, worker: str) -> bool:
        """Mark a registered worker as draining. Return False if there is none."""
        self._drains.pop(worker, None)
        return bool(self._rows(self._sql.drain, (self._now(), plain(worker))))

    def is_draining(self, worker: str) -> bool:
        """Whether a worker is marked as draining. A heartbeat just before has asked already."""
        known = self._drains.pop(worker, None)
        return known if known is not None else bool(self._rows(self._sql.draining, (plain(worker),)))

    def claim_runs(self, request: ClaimRequest) -> Claims:
        if request.worker not in self._enrolled and not self.renew_leases(WorkerInfo(request.worker, pid=os.getpid())):
            return Claims()
        if request.run is not None:
            claims = self._pool.run(lambda connection: self._claimer.claim(connection, request, self._now()))
        else:
            claims = self._claim(request)
        self._statements.limited = self._claimer.limited
        if claims.claims:
            self._leases += 1
            self._worked_at = time.monotonic()
            self._authors.wrote({request.worker})
        return claims

    def _claim(self, request: ClaimRequest) -> Claims:
        post = self._lookouts.post_of(request.worker) if request.idle else self._lookouts.known(request.worker)
        if post is not None:
            post.belongs_to(request)
            if request.idle and not post.must_look():
                return Claims(next_due_at=post.next_due_at, elsewhere=post.is_elsewhere)
        claims = self._quietly(lambda connection: self._claimer.claim(connection, request, self._now(), post))
        if post is not None and post.needs_help(request.limit, len(claims.claims)):
            self._call_others(post)
        return claims

    def _call_others(self, post: Post) -> None:
        if not self._address.proxy:
            self._presence.notify({DUE})
        if post.is_mine:
            with contextlib.suppress(StoreError):  # another worker finds out that there is no lookout
                self._quietly(lambda connection: self._lookouts.resign(connection, post))

    # -- gates -------------------------------------------------------------------------------------------------------

    def pass_gates(self, worker: str, asks: Sequence[Ask]) -> list[Grant]:
        return self._pool.run(lambda connection: self._services.pass_gates(connection, worker, asks, self._now()))

    def list_gates(self, kind: str) -> list[GateInfo]:
        if kind == SERVICE:
            return self._pool.run(self._services.list_all, again=True)
        found = [gate_from(row) for row in self._rows(self._gates.list, (kind,))]
        if kind == QUEUE:
            self._statements.limited = frozenset(gate.name for gate in found)
        return found

    def change_gate(self, kind: str, name: str, change: GateChange) -> GateInfo:
        before = self._pool.run(lambda connection: self._change_gate(connection, kind, plain(name), change))
        self.list_gates(kind)
        self._authors.wrote({None})
        self._wrote()
        return before

    def _change_gate(self, connection: Connection, kind: str, name: str, change: GateChange) -> GateInfo:
        connection.execute("BEGIN")
        connection.execute(self._gates.add, (kind, name))
        before = gate_from(connection.execute(self._gates.wait_for, (kind, name), binary=True).fetchall()[0])
        after = gates.changed(before, change)
        if after is not before:
            connection.execute(self._gates.put, (kind, name, *map(plain, gates.texts_of(after))))
            if kind == SERVICE:
                connection.execute(self._gates.move, moved(after))
        if kind == QUEUE and not before.log:
            connection.execute(self._gates.hold_places, (name,))
        connection.execute("COMMIT")
        return before

    def count_queue(self, name: str) -> QueueCounts:
        def count(connection: Connection) -> QueueCounts:
            liveness = self._claimer.liveness_of_workers(connection)
            leased = {one.id for one in liveness.workers.values() if one.leased}
            moment = Moment(connection, sorted(liveness.owners - leased), liveness.limited, self._now())
            return QueueGround(moment, self._gates, name, ClaimRequest("")).counts()

        return self._pool.run(count, again=True)

    # -- reading -----------------------------------------------------------------------------------------------------

    def get_run(self, run_id: str) -> Run | None:
        return self._reads.get_run(run_id)

    def list_runs(self, query: RunQuery) -> RunPage:
        return self._reads.list_runs(query)

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        return self._reads.list_checkpoints(run_id, after, limit, kinds)

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        return self._reads.list_signals(run_id, after, limit)

    def looking(self) -> Store | None:
        """Return the store as those see it who only look: with a replica, its runs and records are read there."""
        return None if self._replica is None else Looking(self, self._replica)

    def list_workers(self, *, gone: bool = False) -> list[WorkerInfo]:
        return self._quietly(partial(self._workers, gone=gone), again=True)

    def _workers(self, connection: Connection, *, gone: bool) -> list[WorkerInfo]:
        rows = connection.execute(self._sql.workers, binary=True).fetchall()
        liveness = self._claimer.judged("", [row[:7] for row in rows])
        found = []
        for row in rows:
            worker, is_gone = row[0], row[3]
            host, pid, started_at, renewed_at, workflows, progress, drain_at, leases = row[7:]
            if is_gone and not leases and not gone:
                continue
            alive = not is_gone and liveness[worker].leased
            one = WorkerInfo(worker, alive=alive, leases=leases)
            try:
                one = replace(
                    one,
                    host=original(host),
                    pid=pid,
                    started_at=started_at.astimezone(UTC),
                    renewed_at=renewed_at.astimezone(UTC),
                    workflows=names(workflows),
                    progress={run: bytes(value) for run, value in rules.progress_of(progress).items()},
                    drain_at=None if drain_at is None else drain_at.astimezone(UTC),
                )
            except (ValueError, OverflowError, msgspec.MsgspecError) as error:
                one = replace(one, damage=f"its row cannot be read: {error}")
            found.append(one)
        return found

    # -- news --------------------------------------------------------------------------------------------------------

    def news(self, worker: str, cursor: int) -> News:
        self._pool.check_usable()
        if not self._address.proxy:
            self._presence.listen()
        with self._news_lock:
            return self._news(worker, cursor)

    def on_news(self, alert: Callable[[], None]) -> Callable[[], None]:
        """Call `alert`, on the store's thread, as soon as there is news for its workers. Return a function to stop."""
        self._presence.alerts.append(alert)
        return lambda: self._presence.alerts.remove(alert)

    def on_write(self, alert: Callable[[], None]) -> Callable[[], None]:
        """Call `alert`, on the store's thread, when another client has written what readers follow."""
        self._presence.readers.append(alert)
        return lambda: self._presence.readers.remove(alert)

    def _news(self, worker: str, cursor: int) -> News:
        now = time.monotonic()
        foreign = self._authors.others(worker)
        received = self._presence.received
        seen_again = 0 if self._replica is None else self._replica.times_caught_up(received)
        stamp = (received, self._presence.received_by.get(worker, 0), foreign, seen_again)
        called = (self._presence.called, foreign)
        before = self._seen.get(worker)
        lost_seconds = ASK_SECONDS if self._address.proxy else LOST_SECONDS
        changed = before is None or stamp != before.stamp or now - before.changed_at >= lost_seconds
        asks = before is None or before.signals != self._signals or now - before.asked_at >= ASK_SECONDS
        due = before is None or called != before.called or self._has_own_due(now)
        if changed or asks or due:
            changed_at = now if changed or before is None else before.changed_at
            asked_at = now if changed or asks or before is None else before.asked_at
            self._seen[worker] = _Seen(asked_at, changed_at, stamp, self._signals, called)
        if (changed or asks) and worker and self._holds_none.get(worker) != self._leases:
            self._look_for_signals(worker)
        mine = self._signalled.get(worker, {})
        runs = {run for position, owner, run in self._arrivals if position > cursor and owner == worker and run in mine}
        position = self._arrivals[-1][0] if self._arrivals else 0
        changed |= bool(runs)  # a signal is a change
        return News(max(position, cursor), tuple(sorted(runs)), changed, due)

    def _has_own_due(self, now: float) -> bool:
        """Whether a run is due that was released here, so that the worker here should claim."""
        if now - self._own_at < OWN_SECONDS or not self._due_soon or self._due_soon[0] > self.clock.now():
            return False
        self._own_at = now
        while self._due_soon and self._due_soon[0] <= self.clock.now():
            heappop(self._due_soon)
        return True

    def _look_for_signals(self, worker: str) -> None:
        """Find the worker's runs with more signals than at the last check, and record their arrival."""
        leases = self._leases
        rows = self._quietly(lambda one: one.execute(self._sql.signalled, (worker, worker), binary=True).fetchall())
        if not rows:
            self._holds_none[worker] = leases
        rows = [row for row in rows if row[0] is not None]
        known = self._signalled.get(worker, {})
        self._signalled[worker] = dict(rows)
        for run, signals in rows:
            if signals > known.get(run, 0):
                position = self._arrivals[-1][0] + 1 if self._arrivals else 1
                self._arrivals.append((position, worker, run))

    # -- closing -----------------------------------------------------------------------------------------------------

    def check(self, *, mend: bool = False) -> list[Flaw]:
        def look(connection: Connection) -> list[Flaw]:
            if not mend:
                return Inspector(connection, self._address, self._now()).look()
            liveness = self._claimer.liveness_of_workers(connection).workers.values()
            alive = {one.id for one in liveness if not one.dead}
            return Inspector(connection, self._address, self._now(), alive).mend()

        flaws = self._pool.run(look, again=not mend, patience_seconds=inf)
        if mend:
            self._authors.wrote({None})
            self._wrote()
        return flaws

    def raw_rows(self, run_id: str) -> list[dict[str, Any]]:
        """Return all rows of a run besides its checkpoints, readable or not, for a repair to keep."""
        return self._pool.run(lambda connection: raw_rows(connection, self._address, plain(run_id)), again=True)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._enrolled:
            with contextlib.suppress(StoreError):  # the end of the process or of its lease then frees the runs
                self._pool.run(lambda connection: connection.execute(self._sql.lapse, (texts(self._enrolled),)))
        self._presence.close()
        for connections in self._all_connections():
            connections.close(f"the store {self.url} is closed")
        if self._watchdog is not None:  # it ends connections that the lines above would wait for
            self._watchdog.stop()

    def cut_off(self) -> None:
        """Interrupt every thread that waits for the server, and close."""
        self._presence.cut_off()
        for connections in self._all_connections():
            connections.cut_off(f"the store {self.url} did not answer while it was being closed")

    def abandon(self) -> None:
        """Become unusable in a forked child, which must not keep its parent's sessions alive."""
        why = f"the store {self.url} was opened by the process that forked this one (pid {os.getppid()}): open it again"
        self._closed = True
        self._presence.abandon()
        for connections in self._all_connections():
            connections.abandon(why)

    def _all_connections(self) -> tuple[Connections, ...]:
        replicas = () if self._replica is None else (self._replica.connections,)
        return (self._writer, self._pool, *replicas)

    def _rows(self, sql: str, values: Sequence[Any], *, again: bool = True) -> list[Any]:
        return self._quietly(lambda one: one.execute(sql, values, binary=True).fetchall(), again=again)

    def _now(self) -> datetime:
        return instant(self.clock.now())


def open_url(url: str, *, clock: Clock | None = None, **options: Any) -> PostgresStore:
    """Open the store for `postgresql://user@host:5432/database?schema=name`."""
    return PostgresStore(url, clock=clock, **options)


def _due_at(change: Change) -> float | None:
    """Return when the run is due that a change creates or releases."""
    at = change.run.due_at if type(change) is Create else getattr(change, "due_at", None)
    return None if at is None else at.timestamp()


def _done(change: Change) -> Answer:
    if type(change) is Create:
        run = rules.check_create(change)
        return Answer(Verdict.DONE, run, run.seq)
    return Answer(Verdict.DONE, None, change.after + len(change.rows) if type(change) is Advance else 0)


class _Statements:
    """The statements of one schema that read, and those about workers."""

    def __init__(self, address: Address) -> None:
        run, head, checkpoint, signal, worker = map(address.table, ("run", "head", "checkpoint", "signal", "worker"))
        meta = address.table("meta")
        finished = ", ".join(f"'{status}'" for status in FINISHED)
        # A row without a run says that the worker holds runs.
        self.signalled = (
            f"SELECT run, signals FROM {head} WHERE worker = %s AND signals > 0"
            f" UNION ALL (SELECT NULL, NULL FROM {head} WHERE worker = %s LIMIT 1)"
        )
        self.workers = (
            f"SELECT id, boot, boot_seconds, gone_at IS NOT NULL, lease_seconds, process, false,"
            f" host, pid, started_at, renewed_at, workflows, progress, drain_at,"
            f" (SELECT count(*) FROM {head} h WHERE h.worker = w.id) FROM {worker} w ORDER BY id"
        )
        now = "coalesce(%(now)s, clock_timestamp())"
        boot_seconds = "coalesce(%(boot_seconds)s, extract(epoch FROM clock_timestamp())::float8)"
        self.enrol = (
            f"INSERT INTO {worker} (id, host, pid, started_at, renewed_at, boot, boot_seconds, workflows, progress,"
            f" lease_seconds, process) VALUES (%(id)s, %(host)s, %(pid)s, coalesce(%(started_at)s, {now}), {now},"
            f" %(boot)s, {boot_seconds}, %(workflows)s, %(progress)s, %(lease)s, %(process)s)"
            f" ON CONFLICT (id) DO NOTHING"
        )
        self.renew = (
            f"UPDATE {worker} SET host = %(host)s, pid = %(pid)s, renewed_at = {now}, boot = %(boot)s,"
            f" boot_seconds = {boot_seconds}, workflows = %(workflows)s, progress = %(progress)s,"
            f" lease_seconds = %(lease)s, process = %(process)s, lock = NULL,"
            f" started_at = coalesce(%(started_at)s, started_at) WHERE id = %(id)s AND gone_at IS NULL"
            f" RETURNING extract(epoch FROM clock_timestamp())::float8, drain_at IS NOT NULL,"
            f" (SELECT value FROM {meta} WHERE name = %(post)s), {NOT_FLUSHED}"
        )
        self.drain = (
            f"UPDATE {worker} SET drain_at = coalesce(drain_at, %s) WHERE id = %s AND gone_at IS NULL RETURNING 1"
        )
        self.draining = f"SELECT 1 FROM {worker} WHERE id = %s AND drain_at IS NOT NULL"
        self.leave = (
            f"WITH post AS (DELETE FROM {meta} WHERE name = %(post)s AND value = %(roll)s)"
            f" DELETE FROM {worker} WHERE id = %(id)s AND gone_at IS NULL RETURNING 1"
        )
        self.lapse = f"UPDATE {worker} SET boot = '' WHERE id = ANY(%s)"  # a lease under another clock has expired
        # Records in an old part of a divided history stay until it is dropped, unless they are erased.
        self.delete_everywhere = (
            f"WITH gone AS (DELETE FROM {head} WHERE run = ANY(%s) AND worker IS NULL"
            f" AND (%s OR status IN ({finished})) RETURNING run, part),"
            f" runs AS (DELETE FROM {run} r USING gone g WHERE r.id = g.run),"
            f" rows AS (DELETE FROM {checkpoint} c USING gone g WHERE c.run = g.run),"
            f" signals AS (DELETE FROM {signal} s USING gone g WHERE s.run = g.run),"
            f" documents AS (DELETE FROM {address.table('document')} d USING gone g WHERE d.owner = g.run)"
            " SELECT run FROM gone"
        )
        rows = "c.run = g.run"
        self.delete = self.delete_everywhere.replace(rows, f"{rows} AND c.part = g.part AND c.part = {newest(address)}")
        self.delete_left = (
            f"DELETE FROM {checkpoint} c WHERE run = ANY(%s) AND NOT EXISTS (SELECT FROM {head} h WHERE h.run = c.run)"
            " RETURNING run"
        )
