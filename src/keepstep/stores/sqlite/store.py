"""The store in one SQLite file: embedded, shared by the processes of one machine, safe against power loss."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw
import msgspec

from ...checks import check_id
from ...errors import CheckpointCorrupt, DefinitionError, SchemaMismatch, StoreError, StoreFull, StoreUnavailable
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
from ...model.gate import QUEUE, SERVICE
from ...ports import (
    Answer,
    Change,
    ClaimRequest,
    Clock,
    Document,
    DocumentQuery,
    Put,
    Row,
    SystemClock,
    Written,
    instant,
)
from .. import documents, gates, queues, rules, services
from ..claims import PUT_ASIDE_SQL, claim_of, is_recovery, leased_sql, status_after
from ..os_locks import WorkerLocks, abandon_in_children, local_path
from ..watch import Watch
from ..write_counts import Authors
from . import documents as document_rows
from . import services as here
from .claims import Found, by_name, due_runs, has_due, in_order, next_times, orphans, sections
from .commit import Undone, apply_changes, forget, lower_position
from .connection import Cursor, Reader, refuse_old_sqlite, translated
from .lists import Search, place
from .queries import arrivals
from .queues import QueueGround, move_gate, put_gate, read_gates
from .rows import (
    RAW,
    names,
    names_text,
    read_run,
    row_from,
    run_from,
    run_name,
    seconds,
    signal_from,
    text_or_bytes,
    typed,
)
from .services import ParkedGround
from .writer import Writer

if TYPE_CHECKING:
    from ..mending import Finding

#: Values of `power_loss`, each with SQLite's value of `synchronous`.
POWER_LOSS = {"loses_nothing": "FULL", "may_lose_last": "NORMAL"}

#: Maximum number of runs that one transaction removes, so that other writers get their turn.
_DELETE_AT_ONCE = 100
#: Minimum size of a database in bytes. SQLite treats a shorter file as empty, and would overwrite it.
_SMALLEST_DATABASE = 512
#: Time for which a dead worker without runs is remembered, so that its late heartbeat is refused.
_REMEMBER_DEAD = timedelta(days=7)

_CLAIM = (
    "UPDATE keepstep_head SET"
    f" {leased_sql(status='?', worker='?', recovered='?', now='?', gate='?', begins='?')} WHERE run = ?"
)
_TWIN = (
    "SELECT t.run FROM keepstep_head h JOIN keepstep_head t ON t.queue = h.queue AND t.dedupe = h.dedupe"
    " AND t.run <> h.run AND t.status NOT IN ('completed', 'failed', 'cancelled')"
    " WHERE h.run = ? AND h.dedupe IS NOT NULL AND h.status IN ('completed', 'failed', 'cancelled')"
)
_PUT_ASIDE = f"UPDATE keepstep_head SET {PUT_ASIDE_SQL} WHERE run = ? OR run = CAST(? AS TEXT)"
_ENDED = " AND status IN ('completed', 'failed', 'cancelled')"
#: Marks a run as removed and not yet scrubbed. The random value identifies the removal: a rewrite must not finish a
#: later removal of the same id.
_MARK = "INSERT OR REPLACE INTO keepstep_meta VALUES (?, hex(randomblob(8)))"
_MARKED = "SELECT name FROM keepstep_meta WHERE name = ?"
_MARKS = "SELECT name, value FROM keepstep_meta WHERE name LIKE 'erasing %'"
_UNMARK = "DELETE FROM keepstep_meta WHERE name = ? AND value = ?"
_FORGET_PROGRESS = "UPDATE keepstep_worker SET progress = '{}' WHERE instr(progress, ?) > 0"
_ENROL = (
    "INSERT INTO keepstep_worker (host, pid, renewed_at, boot, boot_seconds, workflows, progress, lease_seconds,"
    " started_at, id) VALUES (?, ?, ?, ?, ?, ?, CAST(? AS TEXT), ?, ?, ?) ON CONFLICT (id) DO NOTHING"
)
_RENEW = (
    "UPDATE keepstep_worker SET host = ?, pid = ?, renewed_at = ?, boot = ?, boot_seconds = ?, workflows = ?,"
    " progress = CAST(? AS TEXT), lease_seconds = ?, started_at = coalesce(?, started_at)"
    " WHERE id = ? AND gone_at IS NULL"
)
_DRAIN = "UPDATE keepstep_worker SET drain_at = coalesce(drain_at, ?) WHERE id = ? AND gone_at IS NULL"

log = logging.getLogger("keepstep")

_json = msgspec.json.Encoder().encode


class _Seen(NamedTuple):
    """The state of the store at the last call of `news` by a worker."""

    version: int
    foreign: int
    signals: int
    position: int


class _Moment(NamedTuple):
    """The state of a store in which one claim is made."""

    cursor: Cursor
    alive: set[str]
    limited: dict[str, GateInfo]
    now: float


class SQLiteStore:
    """A store in one file, beside it a write lock and a folder with one lock file per living worker.

    `power_loss="may_lose_last"` is faster, but a power cut may lose the newest commits. A crash of the program loses
    nothing either way.
    """

    quick = True
    transactional = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        power_loss: str = "loses_nothing",
        busy_seconds: float = 5.0,
        lease_seconds: float = LEASE_SECONDS,
        within_seconds: float = 1.0,
        allow_network: bool = False,
    ) -> None:
        if power_loss not in POWER_LOSS:
            raise DefinitionError(f"power_loss must be one of {', '.join(map(repr, POWER_LOSS))}, got {power_loss!r}")
        refuse_old_sqlite(apsw.sqlite_lib_version())
        self._path = local_path(path, "a file that SQLite can open", _check_file, allow_network=allow_network)
        self.url = f"sqlite:///{self._path}"
        self.clock = clock or SystemClock()
        self.lease_seconds = lease_seconds
        self._within_seconds = within_seconds
        self._busy_seconds = busy_seconds
        self._locks = WorkerLocks(f"{self._path}-workers")
        self._watch = Watch(self.clock, lease_seconds)
        self._enrolled: set[str] = set()
        self._authors = Authors()
        self._signals = 0
        self._seen: dict[str, _Seen] = {}
        self._limited: frozenset[str] = frozenset()  # the queues with limits, as of the last look
        self._claims_made = 0
        self._open(POWER_LOSS[power_loss], busy_seconds)
        abandon_in_children(self)

    def _open(self, synchronous: str, busy_seconds: float) -> None:
        writer = None
        try:
            writer = Writer(self._path, synchronous=synchronous, busy_seconds=busy_seconds)
            writer.migrate(self._locks)
            self._reader = Reader(self._path, busy_seconds=busy_seconds)
        except BaseException as error:
            if writer is not None:
                writer.close()
            if isinstance(error, apsw.NotADBError):
                raise SchemaMismatch(f"{self._path} is not a SQLite database, or its first page is damaged") from None
            if isinstance(error, apsw.Error):
                raise translated(error, self._path) from error
            raise
        self._writer = writer
        self._file = _identity(self._path)

    # -- writing -----------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        writer = self._writer
        undone: dict[int, Exception] = {}
        work = partial(apply_changes, writer, self.clock, self._within_seconds, undone, changes, limited=self._limited)
        while True:
            try:
                answers, signals = writer.run(work, wait=wait)
            except Undone as failure:
                undone[id(failure.change)] = failure.error
            except StoreFull:  # the disk is full, or there is no position left for signals
                if not writer.run(lambda: lower_position(writer.cursor), wait=wait):
                    raise
            else:
                self._signals += signals
                return answers
            finally:  # a commit that failed may have happened
                self._authors.committed(changes)

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        wanted = list(dict.fromkeys(run_ids))
        removed, ended = 0, _ENDED if finished else ""
        for start in range(0, len(wanted), _DELETE_AT_ONCE):
            some = wanted[start : start + _DELETE_AT_ONCE]
            removed += self._writer.run(partial(self._delete, some, ended, scrub=scrub))
        if scrub and wanted:
            # Runs that an earlier call has removed and could not scrub are scrubbed now, and count.
            removed = self._reader.read(partial(_marked, wanted))
            if removed or not finished:
                self._writer.run(lambda: self._writer.cursor.executemany(_FORGET_PROGRESS, [(run,) for run in wanted]))
                size = self._reader.read(_size)
                if size <= rules.REWRITTEN_AT_ONCE:
                    self.rewrite()
                elif removed:
                    raise rules.erase_unfinished(self._path, size)
        return removed

    def unfinished_erasures(self) -> int:
        """Return the number of removed runs whose text may still be in the file."""
        return len(self._reader.read(_marks))

    def rewrite(self) -> int:
        """Rewrite the file without erased runs, while writers wait. Return the number of erasures it finished."""
        marks = self._reader.read(_marks)
        self._writer.rewrite()
        self._writer.run(lambda: self._writer.cursor.executemany(_UNMARK, marks))
        return len(marks)

    def _delete(self, run_ids: list[str], condition: str, *, scrub: bool) -> int:
        cursor, connection = self._writer.cursor, self._writer.connection
        removed = 0
        for run in run_ids:
            cursor.execute(f"DELETE FROM keepstep_head WHERE run = ? AND worker IS NULL{condition}", (run,))
            if connection.changes():
                removed += 1
                forget(cursor, run)
                document_rows.forget_owner(cursor, run)
                if scrub:
                    cursor.execute(_MARK, (rules.erasing(run),))
        self._authors.wrote({None})
        return removed

    # -- documents ---------------------------------------------------------------------------------------------------

    def write_documents(self, batches: Sequence[Sequence[Put]]) -> list[Written]:
        """Write batches of documents in one transaction."""
        documents.check_puts(batches)
        return self._writer.run(lambda: document_rows.write(self._writer.cursor, batches, self._now()))

    def list_documents(self, query: DocumentQuery) -> list[Document]:
        """Return one page of documents, by key."""
        read = document_rows.get if documents.is_of_one(query) else document_rows.read
        return self._reader.read(lambda cursor: read(cursor, query, self._now()))

    def list_collections(self) -> dict[str, int]:
        """Return the collections, each with the number of its keys."""
        return self._reader.read(document_rows.collections)

    def remove_documents(self, collection: str, prefix: str = "", *, expired: bool = False, scrub: bool = False) -> int:
        """Remove documents. Return the number of keys."""
        wanted = documents.wanted_keys(DocumentQuery(collection, prefix))
        cursor = self._writer.cursor

        def remove() -> int:
            if expired:
                return document_rows.remove_expired(cursor, collection, wanted, self._now())
            removed = document_rows.remove(cursor, collection, wanted)
            if scrub and removed:
                cursor.execute(_MARK, (rules.erasing(f"document {collection} {prefix}"),))
            return removed

        removed = self._writer.run(remove)
        if scrub and removed:
            size = self._reader.read(_size)
            if size > rules.REWRITTEN_AT_ONCE:
                raise rules.erase_unfinished(self._path, size)
            self.rewrite()
        return removed

    def artifacts_folder(self) -> str:
        """Return the folder beside the file for artifacts."""
        return f"{self._path}-artifacts"

    # -- leases ------------------------------------------------------------------------------------------------------

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        self._writer.check_usable()
        if leaving:
            return self._leave(worker.id)
        self._check_in_place()
        if worker.id not in self._locks and not self._lock(worker.id):
            return False
        try:
            known = self._writer.run(lambda: self._renew(worker))
        except StoreError:
            self._watch.failed(worker.id)
            raise
        if known:  # only after the commit, so that a first heartbeat that failed is repeated
            self._enrolled.add(worker.id)
            self._watch.renewed(worker.id)
        return known

    def _renew(self, worker: WorkerInfo) -> bool:
        now = self._now()
        boot_id, boot_seconds = self.clock.boot()
        progress = _json({run: msgspec.Raw(value) for run, value in worker.progress.items()})
        beat = (worker.host, worker.pid, now, boot_id, boot_seconds, names_text(worker.workflows), progress)
        row = (*beat, float(self.lease_seconds))
        cursor, connection = self._writer.cursor, self._writer.connection
        cursor.execute(_RENEW, (*row, seconds(worker.started_at), worker.id))
        renewed = connection.changes()
        self._enrolled_rows(cursor)
        if renewed:
            return True
        if worker.id in self._enrolled:  # its row is gone or marked, so it was declared dead
            return False
        cursor.execute(_ENROL, (*row, seconds(worker.started_at) or now, worker.id))
        return bool(connection.changes())

    def _lock(self, worker: str) -> bool:
        """Take the worker's lock, before its first lease. Return False if its id was used before."""
        check_id(worker, "worker id")
        return worker not in self._enrolled and self._locks.take(worker)

    def _leave(self, worker: str) -> bool:
        def leave() -> bool:
            self._writer.cursor.execute("DELETE FROM keepstep_worker WHERE id = ? AND gone_at IS NULL", (worker,))
            return bool(self._writer.connection.changes())

        alive = self._writer.run(leave)
        if worker in self._locks:
            self._locks.remove(worker)
        if alive:
            self._enrolled.discard(worker)
        return alive

    def _check_in_place(self) -> None:
        if _identity(self._path) != self._file:  # writes would go to the old file and be lost
            raise StoreUnavailable(f"{self._path} was moved or removed while it was open")

    def drain_worker(self, worker: str) -> bool:
        """Mark a registered worker as draining. Return False if there is none."""

        def drain() -> bool:
            self._writer.cursor.execute(_DRAIN, (self._now(), worker))
            return bool(self._writer.connection.changes())

        return self._writer.run(drain)

    def is_draining(self, worker: str) -> bool:
        """Whether a worker is marked as draining."""
        sql = "SELECT 1 FROM keepstep_worker WHERE id = ? AND drain_at IS NOT NULL"
        return bool(self._reader.read(lambda cursor: cursor.execute(sql, (worker,)).fetchall()))

    def claim_runs(self, request: ClaimRequest) -> Claims:
        if request.worker not in self._locks and not self.renew_leases(WorkerInfo(request.worker, pid=os.getpid())):
            return Claims()
        if request.run is None:
            # A read first, without the write lock, so that an idle worker never delays writers.
            nothing = self._reader.read(lambda cursor: self._nothing_to_claim(cursor, request))
            if nothing is not None:
                return nothing
        marked_dead: list[str] = []
        claims = self._writer.run(lambda: self._claim(request, marked_dead))
        for worker in marked_dead:
            self._locks.remove(worker)
        return claims

    def _nothing_to_claim(self, cursor: Cursor, request: ClaimRequest) -> Claims | None:
        """Return an empty result if there is nothing to claim and no dead worker to mark; else None."""
        if self._is_gone(cursor, request.worker):
            return Claims()
        alive, dead = self._liveness(cursor, request.worker)
        if dead:
            return None
        now = self._now()
        limited = self._look_at_gates(cursor)
        if orphans(cursor, replace(request, limit=min(request.limit, 1)), alive, limited):
            return None
        later: list[float] = []
        for queue, section in sections(cursor, request):
            if request.limit > 0 and queue not in limited and has_due(cursor, section, now):
                return None
            later += next_times(cursor, section, now)
        parked = here.parked_at(cursor)
        if parked and (here.timed_out(cursor, now) or self._has_room_for_parked(cursor, request, parked)):
            return None
        later += here.next_times(cursor, now) if parked else []
        for gate in self._served(request, limited):
            ground = QueueGround(cursor, gate.name, request, alive, now)
            decision = queues.decide(gate, ground, request.limit, now)
            if decision.orphans or decision.runs or decision.gate is not gate or ground.unripe():
                return None
            later += [] if decision.next_at is None else [decision.next_at]
        return Claims((), instant(min(later)) if later else None, self._at_services(cursor, request, parked))

    @staticmethod
    def _rooms(cursor: Cursor, request: ClaimRequest, parked: list[str]) -> dict[str, services.Room]:
        """Return the services at which runs wait that the request may take, and how many."""
        rooms = services.rooms_of(request, parked, partial(here.users, cursor))
        return {service: room for service, room in rooms.items() if service in parked and request.limit > 0}

    def _has_room_for_parked(self, cursor: Cursor, request: ClaimRequest, parked: list[str]) -> bool:
        rooms = self._rooms(cursor, request, parked)
        return any(
            ParkedGround(cursor, service, replace(request, workflows=room.workflows)).priorities()
            for service, room in rooms.items()
        )

    @staticmethod
    def _at_services(cursor: Cursor, request: ClaimRequest, parked: Iterable[str]) -> tuple[AtService, ...]:
        mine = [service for service in parked if service in request.rooms]
        found = [ParkedGround(cursor, service, request).waiting(service) for service in mine]
        return tuple(one for one in found if one is not None)

    def _claim(self, request: ClaimRequest, marked_dead: list[str]) -> Claims:
        cursor = self._writer.cursor
        if self._is_gone(cursor, request.worker):
            return Claims()
        now = self._now()
        alive, dead = self._liveness(cursor, request.worker)
        self._mark_dead(dead, now)
        marked_dead += dead
        moment = _Moment(cursor, alive, self._look_at_gates(cursor), now)
        if request.run is not None:
            return Claims(self._claim_by_name(moment, request))
        claims: tuple[Claim, ...] = ()
        later: list[float] = []
        served = [gate.name for gate in self._served(request, moment.limited)]
        parked = here.parked_at(cursor)
        if parked:
            here.go_on(cursor, here.timed_out(cursor, now))
            later += here.next_times(cursor, now)
        rooms = self._rooms(cursor, request, parked)
        for name in queues.in_turn([*served, *(f"{services.gate_text(one)}" for one in rooms)], self._claims_made):
            rest = replace(request, limit=request.limit - len(claims))
            service = services.service_in(name)
            if service is not None:
                places, workflows = rooms[service]
                rest = replace(rest, workflows=workflows)
                claims += self._claim_parked(moment, service, min(places, rest.limit), rest)
            elif name is not None:
                claims += self._claim_queue(moment, moment.limited[name], rest, later)
            else:
                claims += self._claim_others(moment, rest, later)
        self._claims_made += 1
        return Claims(claims, instant(min(later)) if later else None, self._at_services(cursor, request, parked))

    def _claim_parked(self, moment: _Moment, service: str, room: int, request: ClaimRequest) -> tuple[Claim, ...]:
        """Claim runs that wait at a service. One whose queue has no place waits in its queue from now on."""
        cursor, alive, limited, now = moment
        gate = here.service_gate(cursor, service)
        ground = ParkedGround(cursor, service, request)
        decision = queues.decide_parked(gate or GateInfo(SERVICE, service), ground, room)
        if gate is not None and decision.gate != gate:
            move_gate(cursor, decision.gate)
        claims: tuple[Claim, ...] = ()
        through = service if service in request.rooms else None
        for one in map(ground.found, decision.runs):
            queue = limited.get(ground.queue_of(str(one.run)))
            if queue is None:
                claims += self._take_all([one._replace(service=through)], request.worker, now)
            elif queues.may_drive(queue, QueueGround(cursor, queue.name, request, alive, now), holds_key=True):
                claims += self._take_all([one._replace(service=through, gate=queue.name)], request.worker, now)
            else:
                here.go_to_queue(cursor, str(one.run))
        return claims

    def _claim_others(self, moment: _Moment, request: ClaimRequest, later: list[float]) -> tuple[Claim, ...]:
        """Claim runs of queues without limits, and add the times at which more are due."""
        cursor, alive, limited, now = moment
        found = orphans(cursor, request, alive, limited)
        due: list[Found] = []
        for queue, section in sections(cursor, request):
            if queue not in limited:
                due += due_runs(cursor, section, request.limit - len(found), now)
            later += next_times(cursor, section, now)
        return self._take_all((found + in_order(due))[: max(request.limit, 0)], request.worker, now)

    def _claim_queue(
        self, moment: _Moment, gate: GateInfo, request: ClaimRequest, later: list[float]
    ) -> tuple[Claim, ...]:
        """Claim runs of a queue with limits. The write transaction is the lock of its gate."""
        cursor, now = moment.cursor, moment.now
        ground = QueueGround(cursor, gate.name, request, moment.alive, now)
        ground.ripen()
        decision = queues.decide(gate, ground, request.limit, now)
        if decision.gate is not gate:
            move_gate(cursor, decision.gate)
        later += [] if decision.next_at is None else [decision.next_at]
        taken_over = ground.orphans_found(len(decision.orphans))
        found = [one._replace(gate=gate.name) for one in [*taken_over, *map(ground.found, decision.runs)]]
        return self._take_all(found, request.worker, now)

    def _claim_by_name(self, moment: _Moment, request: ClaimRequest) -> tuple[Claim, ...]:
        cursor, alive, limited, now = moment
        found = by_name(cursor, request, alive, limited)
        for one in found:
            for (twin,) in cursor.execute(_TWIN, (one.run,)).fetchall():
                rules.check_twin(str(one.run), twin)
            if request.drives and one.gate is not None:
                ground = QueueGround(cursor, one.gate, request, alive, now)
                if not queues.may_drive(limited[one.gate], ground, holds_key=ground.holds_key(str(one.run))):
                    return ()
        return self._take_all(found, request.worker, now, begins=request.drives)

    def _look_at_gates(self, cursor: Cursor) -> dict[str, GateInfo]:
        """Return the queues with limits, by name."""
        found = {gate.name: gate for gate in read_gates(cursor, QUEUE)}
        if found.keys() != self._limited:
            self._limited = frozenset(found)
        return found

    @staticmethod
    def _served(request: ClaimRequest, limited: dict[str, GateInfo]) -> list[GateInfo]:
        return [gate for name, gate in limited.items() if request.queues is None or name in request.queues]

    def _take_all(self, found: list[Found], worker: str, now: float, *, begins: bool = True) -> tuple[Claim, ...]:
        taken = [self._take(one, worker, now, begins=begins) for one in found]
        return tuple(claim for claim in taken if claim is not None)

    def _take(self, one: Found, worker: str, now: float, *, begins: bool) -> Claim | None:
        """Lease one run. A run whose row cannot be read is set aside, so that it does not block the others."""
        cursor = self._writer.cursor
        try:
            if isinstance(one.run, bytes):
                raise CheckpointCorrupt("its id is not valid text")
            old = Status(one.status)
            is_recovered = int(is_recovery(old, one.owner))
            values = (status_after(old, one.owner), worker, is_recovered, now, one.gate, int(begins), one.run)
            cursor.execute(_CLAIM, values)
            run = read_run(cursor, one.run)
            if run is None:
                raise CheckpointCorrupt(f"run {one.run!r}: one of its two rows is missing")
        except (ValueError, CheckpointCorrupt) as error:
            log.error("run %s is set aside: %s", one.run, error)  # noqa: TRY400 - a traceback would not help
            cursor.execute(_PUT_ASIDE, (one.run, one.run))
            return None
        self._authors.wrote({worker})
        return claim_of(run, one.owner, old, _since(one.updated_at), one.service)

    def _liveness(self, cursor: Cursor, me: str) -> tuple[set[str], list[str]]:
        """Return the workers that are alive, `me` included, and those that must be marked dead."""
        alive: set[str] = {me}
        dead: list[str] = []
        for worker, boot, renewed, lease in self._enrolled_rows(cursor):
            if worker != me:
                is_dead = self._watch.is_silent(me, worker, lease) or self._is_proven_dead(worker, boot, renewed)
                (dead.append if is_dead else alive.add)(worker)
        return alive, dead

    def _enrolled_rows(self, cursor: Cursor) -> list[Any]:
        """Return the newest heartbeats of all workers, after the watch has noted them."""
        columns = ", ".join(map(RAW.format, ("id", "boot", "boot_seconds", "lease_seconds")))
        found = cursor.execute(f"SELECT {columns} FROM keepstep_worker WHERE gone_at IS NULL").fetchall()
        stored = [(text_or_bytes(worker), text_or_bytes(boot), *rest) for worker, boot, *rest in found]
        rows = [row for row in stored if isinstance(row[0], str)]  # any other id is damaged and belongs to no worker
        self._watch.observe({worker: (boot, renewed) for worker, boot, renewed, _ in rows})
        return rows

    @staticmethod
    def _is_gone(cursor: Cursor, worker: str) -> bool:
        rows: list[Any] = cursor.execute(
            "SELECT gone_at IS NULL FROM keepstep_worker WHERE id = ?", (worker,)
        ).fetchall()
        return rows != [(1,)]

    def _is_proven_dead(self, worker: str, boot: str, renewed: Any) -> bool:
        """Whether the worker's lock is free, or the machine was restarted after its heartbeat."""
        # A damaged row does not show the boot. Then only the lock counts, until the next heartbeat mends the row.
        return (isinstance(renewed, float) and boot != self.clock.boot()[0]) or self._locks.proves_death(worker)

    def _is_shown_alive(self, worker: str, boot: str, renewed: Any, lease: Any) -> bool:
        """Whether the worker's lease is valid, for a reader that has not watched it. Not enough to take its runs."""
        if isinstance(renewed, float) and self.clock.boot()[1] - renewed > self._watch.lease_of(lease):
            return False
        return not self._is_proven_dead(worker, boot, renewed)

    def _mark_dead(self, dead: list[str], now: float) -> None:
        cursor = self._writer.cursor
        for worker in dead:
            cursor.execute("UPDATE keepstep_worker SET gone_at = ? WHERE id = ?", (now, worker))
        if dead:
            cursor.execute(
                "DELETE FROM keepstep_worker WHERE gone_at < ?"
                " AND NOT EXISTS (SELECT 1 FROM keepstep_head WHERE worker = keepstep_worker.id)",
                (now - _REMEMBER_DEAD.total_seconds(),),
            )

    # -- gates -------------------------------------------------------------------------------------------------------

    def pass_gates(self, worker: str, asks: Sequence[Ask]) -> list[Grant]:
        def answer(cursor: Cursor, *, writes: bool) -> list[Grant] | None:
            if self._is_gone(cursor, worker):
                return [services.refused(ask) for ask in asks]
            return here.pass_gates(cursor, worker, asks, self._now(), writes=writes)

        # A read first, without the write lock: most asks tell nothing new.
        grants = self._reader.read(partial(answer, writes=False))
        if grants is None:
            grants = self._writer.run(lambda: answer(self._writer.cursor, writes=True), durable=False)
            self._authors.wrote({worker})
        return grants or []

    def list_gates(self, kind: str) -> list[GateInfo]:
        if kind == SERVICE:
            return self._reader.read(here.list_services)
        found = self._reader.read(lambda cursor: read_gates(cursor, kind))
        if kind == QUEUE:
            self._limited = frozenset(gate.name for gate in found)
        return found

    def change_gate(self, kind: str, name: str, change: GateChange) -> GateInfo:
        def write() -> GateInfo:
            cursor = self._writer.cursor
            found = [gate for gate in read_gates(cursor, kind) if gate.name == name]
            before = found[0] if found else GateInfo(kind, name)
            after = gates.changed(before, change)
            if after is not before:
                put_gate(cursor, after, is_new=not found)
            return before

        before = self._writer.run(write)
        self.list_gates(kind)
        self._authors.wrote({None})
        return before

    def count_queue(self, name: str) -> QueueCounts:
        def count(cursor: Cursor) -> QueueCounts:
            rows = self._enrolled_rows(cursor)
            alive = {worker for worker, *beat in rows if self._is_shown_alive(worker, *beat)}
            return QueueGround(cursor, name, ClaimRequest(""), alive, self._now()).counts()

        return self._reader.read(count)

    # -- reading -----------------------------------------------------------------------------------------------------

    def get_run(self, run_id: str) -> Run | None:
        return self._reader.read(lambda cursor: self._get(cursor, run_id))

    def _get(self, cursor: Cursor, run_id: str) -> Run | None:
        run = read_run(cursor, run_id)
        if run is None:
            return None
        kind = rules.outcome_kind(run.status)
        if kind is not None:
            final = cursor.execute(
                "SELECT seq, kind, CAST(record AS BLOB), CAST(body AS BLOB) FROM keepstep_checkpoint"
                " WHERE run = ? AND kind = ? ORDER BY seq DESC LIMIT 1",
                (run_id, kind),
            ).fetchall()
            if final:
                run = rules.with_outcome(run, Row(*final[0]))
        if run.worker is not None:
            rows = cursor.execute(
                "SELECT CAST(progress AS BLOB) FROM keepstep_worker WHERE id = ?", (run.worker,)
            ).fetchall()
            progress = rules.progress_in(rows[0][0]).get(run_id) if rows else None
            if progress is not None:
                run = replace(run, progress=bytes(progress))
        return run

    def list_runs(self, query: RunQuery) -> RunPage:
        return self._reader.read(lambda cursor: self._list(cursor, query))

    def _list(self, cursor: Cursor, asked: RunQuery) -> RunPage:
        start, limit = rules.page_start(asked), max(asked.limit, 0)
        query = rules.with_statuses(asked)
        if query is None:
            return RunPage(count=0 if asked.count_to else None)
        search = Search(cursor, query, self._now())
        rows = search.rows(start, limit + 1)
        page = rows[:limit]
        runs: list[Run] = []
        unreadable: list[str] = []
        for row in page:
            try:
                runs.append(run_from(row))
            except CheckpointCorrupt:
                unreadable.append(run_name(row))
        more = str(place(page[-1])) if page and len(rows) > len(page) else None
        count = search.count(query.count_to) if query.count_to else None
        return RunPage(tuple(runs), more, tuple(unreadable), count)

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        wanted = list(kinds)
        only = f" AND kind IN ({', '.join('?' * len(wanted))})" if wanted else ""
        sql = (
            "SELECT seq, kind, CAST(record AS BLOB), CAST(body AS BLOB) FROM keepstep_checkpoint"
            f" WHERE run = ? AND seq > ?{only} ORDER BY seq LIMIT ?"
        )

        def page(cursor: Cursor) -> list[Row]:
            rows: list[Row] = []
            size = 0
            for found in cursor.execute(sql, (run_id, after, *wanted, max(limit, 0))):
                row = row_from(run_id, found)
                rows.append(row)
                size += len(row.record) + len(row.body or b"")
                if size >= rules.PAGE_BYTES:
                    break
            return rows

        return self._reader.read(page)

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        sql = (
            "SELECT run, name, CAST(payload AS BLOB), id, sender, sent_at, seq, checksum FROM keepstep_signal"
            " WHERE run = ? AND seq > ? ORDER BY seq LIMIT ?"
        )
        rows = self._reader.read(lambda cursor: cursor.execute(sql, (run_id, after, max(limit, 0))).fetchall())
        return [signal_from(row) for row in rows]

    def news(self, worker: str, cursor: int) -> News:
        version = self._writer.foreign_writes()
        foreign, signals = self._authors.others(worker), self._signals
        before = self._seen.get(worker)
        if version is None:  # the writer is busy, so the store counts as changed, now and the next time
            version, changed = -1, True
        else:
            changed = before is None or (version, foreign) != (before.version, before.foreign)
        if before is not None and not changed and signals == before.signals and cursor >= before.position:
            return News(cursor)
        position, runs = self._reader.read(lambda sql: arrivals(sql, worker, cursor))
        self._seen[worker] = _Seen(version, foreign, signals, position)
        return News(position, runs, changed)

    def list_workers(self, *, gone: bool = False) -> list[WorkerInfo]:
        self._check_in_place()  # a process without a worker asks for them to learn whether the store answers
        return self._reader.read(partial(self._workers, gone=gone))

    def _workers(self, cursor: Cursor, *, gone: bool) -> list[WorkerInfo]:
        leases: dict[Any, int] = dict(
            cursor.execute(
                f"SELECT {RAW.format('worker')}, count(*) FROM keepstep_head WHERE worker IS NOT NULL GROUP BY worker"
            ).fetchall()
        )
        columns = (
            *("id", "host", "pid", "started_at", "renewed_at", "boot", "boot_seconds", "workflows", "progress"),
            *("lease_seconds", "drain_at"),
        )
        rows = cursor.execute(
            f"SELECT {', '.join(map(RAW.format, columns))}, gone_at IS NOT NULL FROM keepstep_worker ORDER BY id"
        ).fetchall()
        found = []
        for (
            stored,
            host,
            pid,
            started_at,
            renewed_at,
            boot,
            renewed,
            workflows,
            progress,
            lease,
            drain,
            is_gone,
        ) in rows:
            if is_gone and stored not in leases and not gone:
                continue
            worker = str(text_or_bytes(stored))
            alive = not is_gone and self._is_shown_alive(worker, text_or_bytes(boot), renewed, lease)
            one = WorkerInfo(worker, alive=alive, leases=leases.get(stored, 0))
            try:
                one = replace(
                    one,
                    host=typed(text_or_bytes(host), str),
                    pid=typed(pid, int),
                    started_at=instant(typed(started_at, float)),
                    renewed_at=instant(typed(renewed_at, float)),
                    workflows=names(typed(text_or_bytes(workflows), str)),
                    progress={run: bytes(value) for run, value in rules.progress_of(progress).items()},
                    drain_at=None if drain is None else instant(typed(drain, float)),
                )
            except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
                one = replace(one, damage=f"its row cannot be read: {error}")
            found.append(one)
        return found

    def check(self, *, mend: bool = False) -> list[Flaw]:
        from .check import look_into, mend_all  # noqa: PLC0415 - rarely needed

        if mend:
            return mend_all(self._path, self._busy_seconds, self.list_runs, self._mend)
        return [one.flaw for one in look_into(self._path, self._busy_seconds)]

    def raw_rows(self, run_id: str) -> list[dict[str, Any]]:
        """Return all rows of a run except its checkpoints, readable or not, for a repair to keep."""
        from .check import raw_rows  # noqa: PLC0415 - rarely needed

        return self._reader.read(lambda cursor: raw_rows(cursor, run_id))

    def _mend(self, found: list[Finding]) -> list[Flaw]:
        from .check import Tables  # noqa: PLC0415 - rarely needed

        def mend() -> list[Flaw]:
            alive, _ = self._liveness(self._writer.cursor, "")
            self._authors.wrote({None})
            return Tables(self._writer.cursor, self._now(), alive).mend(found)

        return self._writer.run(mend)

    # -- ends --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._locks.close()

    def abandon(self) -> None:
        """Disable the store in a forked child, which must not keep its parent's locks alive."""
        self._writer.abandon()
        self._reader.abandon()
        self._locks.close()

    def _now(self) -> float:
        # A datetime rounds to whole microseconds, as stored times are.
        return instant(self.clock.now()).timestamp()


def open_url(url: str, *, clock: Clock | None = None, **options: Any) -> SQLiteStore:
    """Open the store at `sqlite:///relative/path` or `sqlite:////absolute/path`."""
    path = url.removeprefix("sqlite:").removeprefix("///")
    if not path or path.startswith("//") or path == ":memory:":
        raise DefinitionError(
            f"a SQLite URL must name a file, as in sqlite:///runs.db or sqlite:////var/lib/runs.db, got {url!r}"
        )
    return SQLiteStore(path, clock=clock, **options)


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise StoreUnavailable(f"{path} cannot be opened: it is a folder")
    # Only the size is checked: opening and closing a database's file beside SQLite would drop this process's locks.
    if path.is_file() and 0 < path.stat().st_size < _SMALLEST_DATABASE:
        raise SchemaMismatch(f"{path} is not a SQLite database")


def _marks(cursor: Cursor) -> list[tuple[str, str]]:
    """Return the marks of all runs that are removed and not yet scrubbed."""
    marks: list[tuple[str, str]] = cursor.execute(_MARKS).fetchall()
    return marks


def _marked(runs: Sequence[str], cursor: Cursor) -> int:
    """Return the number of these runs that are removed and not yet scrubbed."""
    return sum(len(cursor.execute(_MARKED, (rules.erasing(run),)).fetchall()) for run in runs)


def _size(cursor: Cursor) -> int:
    """Return the size of the store's file in bytes."""
    ((pages,),) = cursor.execute("PRAGMA page_count").fetchall()
    ((bytes_each,),) = cursor.execute("PRAGMA page_size").fetchall()
    return int(pages) * int(bytes_each)


def _since(seconds: float) -> datetime | None:
    """Return the time of a row's last write; None if it is damaged, which does not prevent a claim."""
    try:
        return instant(seconds)
    except (ValueError, OverflowError, OSError):
        return None


def _identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of the file that a path names now; None without a file."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
