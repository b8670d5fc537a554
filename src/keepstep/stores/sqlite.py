"""The store in one SQLite file: embedded, shared by the processes of one machine, safe against power loss."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, SchemaMismatch, StoreError, StoreFull, StoreUnavailable
from ..model import LEASE_SECONDS, Claim, Claims, Flaw, Lease, News, Run, RunPage, RunQuery, Signal, Status, WorkerInfo
from ..model.ids import check_id
from ..ports import Answer, Change, ClaimRequest, Clock, Row, SystemClock, instant
from ..values.kinds import is_text
from . import rules
from .authors import Authors
from .liveness import WorkerLocks, abandon_in_children, network_file_system
from .sqlite_check import Finding, Mender, look_into, mend_all, mended, raw_rows
from .sqlite_claims import Found, by_name, due_runs, in_order, later_times, orphans
from .sqlite_commit import Batch, Undone, forget, lower_position
from .sqlite_connection import Cursor, Reader, Writer, refuse_old_sqlite, translated
from .sqlite_queries import arrivals, conditions, having
from .sqlite_rows import (
    NUMBER,
    RAW,
    names,
    names_text,
    read_run,
    row_from,
    run_from,
    run_name,
    run_rows,
    seconds,
    signal_from,
    text_or_bytes,
    typed,
)
from .watch import Watch

#: What a commit survives, by name, and SQLite's word for it.
POWER_LOSS = {"loses_nothing": "FULL", "may_lose_last": "NORMAL"}

#: How many runs one transaction removes, so that other writers get their turn.
_DELETE_AT_ONCE = 100
#: SQLite takes a shorter file for an empty one, and would write over it.
_SMALLEST_DATABASE = 512
#: How long the id of a dead worker is remembered once it owns nothing.
_REMEMBER_DEAD = timedelta(days=7)

_CLAIM = (
    "UPDATE keepstep_head SET status = ?, epoch = epoch + 1, worker = ?, due_at = NULL, wakes = '',"
    " recoveries = recoveries + ?, updated_at = ? WHERE run = ?"
)
_PUT_ASIDE = (
    "UPDATE keepstep_head SET status = 'set aside', worker = NULL, due_at = NULL, wakes = ''"
    " WHERE run = ? OR run = CAST(? AS TEXT)"
)
_ENDED = " AND status IN ('completed', 'failed', 'cancelled')"
#: Marks a run as removed and not yet scrubbed.
_MARK = "INSERT OR REPLACE INTO keepstep_meta VALUES (?, '')"
_MARKED = "SELECT name FROM keepstep_meta WHERE name = ?"
_UNMARK = "DELETE FROM keepstep_meta WHERE name = ?"
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

log = logging.getLogger("keepstep")

_json = msgspec.json.Encoder().encode


class _Seen(NamedTuple):
    """What a worker knew when it last asked for news."""

    version: int
    foreign: int
    signals: int
    position: int


class SQLiteStore:
    """Keeps everything in one file, beside it a turnstile and a folder with one lock file per living worker.

    `power_loss="may_lose_last"` trades the newest commits in a power cut for speed; a crash of the program loses
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
            raise DefinitionError(f"power_loss={power_loss!r} is not one of {', '.join(map(repr, POWER_LOSS))}")
        refuse_old_sqlite(apsw.sqlite_lib_version())
        self._path = _check_path(path, allow_network=allow_network)
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
        self._open(POWER_LOSS[power_loss], busy_seconds)
        abandon_in_children(self)

    def _open(self, synchronous: str, busy_seconds: float) -> None:
        writer = None
        try:
            writer = Writer(self._path, synchronous=synchronous, busy_seconds=busy_seconds)
            writer.migrate()
            self._reader = Reader(self._path, busy_seconds=busy_seconds)
        except BaseException as error:
            if writer is not None:
                writer.close()
            if isinstance(error, apsw.NotADBError):
                raise SchemaMismatch(f"{self._path} is no SQLite database, or its first page is damaged") from None
            if isinstance(error, apsw.Error):
                raise translated(error, self._path) from error
            raise
        self._writer = writer
        self._file = _identity(self._path)

    # -- writing -----------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        undone: dict[int, Exception] = {}
        while True:
            try:
                return self._writer.run(lambda: self._apply(changes, undone), wait=wait)
            except Undone as failure:
                undone[id(failure.change)] = failure.error
            except StoreFull:  # of a disk, or of positions for signals
                if not self._writer.run(lambda: lower_position(self._writer.cursor), wait=wait):
                    raise

    def _apply(self, changes: Sequence[Change], undone: dict[int, Exception]) -> list[Answer]:
        writer = self._writer
        batch = Batch(writer.connection, writer.cursor, self._now(), self._within_seconds)
        answers = batch.apply(changes, undone)
        self._signals += batch.signals
        self._authors.wrote({rules.author(change) for change in changes})
        return answers

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        wanted = list(dict.fromkeys(run_ids))
        removed, ended = 0, _ENDED if finished else ""
        for start in range(0, len(wanted), _DELETE_AT_ONCE):
            some = wanted[start : start + _DELETE_AT_ONCE]
            removed += self._writer.run(partial(self._delete, some, ended, scrub=scrub))
        if scrub and wanted:
            # What an earlier call has removed and could not scrub is scrubbed now, and counts.
            marks = [(rules.erasing(run),) for run in wanted]
            removed = self._reader.read(partial(_marked, marks))
            if removed or not finished:
                self._writer.run(lambda: self._writer.cursor.executemany(_FORGET_PROGRESS, [(run,) for run in wanted]))
                self._writer.rewrite()
                self._writer.run(lambda: self._writer.cursor.executemany(_UNMARK, marks))
        return removed

    def _delete(self, run_ids: list[str], condition: str, *, scrub: bool) -> int:
        cursor, connection = self._writer.cursor, self._writer.connection
        removed = 0
        for run in run_ids:
            cursor.execute(f"DELETE FROM keepstep_head WHERE run = ? AND worker IS NULL{condition}", (run,))
            if connection.changes():
                removed += 1
                forget(cursor, run)
                if scrub:
                    cursor.execute(_MARK, (rules.erasing(run),))
        self._authors.wrote({None})
        return removed

    # -- leases ------------------------------------------------------------------------------------------------------

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        self._writer.check_usable()
        if leaving:
            return self._leave(worker.id)
        if _identity(self._path) != self._file:  # what is written now would be lost with the old file
            raise StoreUnavailable(f"{self._path} was moved or removed while it was open")
        if worker.id not in self._locks and not self._lock(worker.id):
            return False
        try:
            known = self._writer.run(lambda: self._renew(worker))
        except StoreError:
            self._watch.failed(worker.id)
            raise
        if known:  # told by the commit: a first heartbeat that could not be written is made again
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
        if worker.id in self._enrolled:  # its row is gone or marked: it was given up for dead
            return False
        cursor.execute(_ENROL, (*row, seconds(worker.started_at) or now, worker.id))
        return bool(connection.changes())

    def _lock(self, worker: str) -> bool:
        """Take the worker's lock, before anyone can see a lease of it; False if its id was used before."""
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

    def claim_runs(self, request: ClaimRequest) -> Claims:
        if request.worker not in self._locks and not self.renew_leases(WorkerInfo(request.worker, pid=os.getpid())):
            return Claims()
        if request.run is None:
            # Looking is free, a turn to write is not: an idle worker never disturbs the writers.
            nothing = self._reader.read(lambda cursor: self._nothing_to_claim(cursor, request))
            if nothing is not None:
                return nothing
        buried: list[str] = []
        claims = self._writer.run(lambda: self._claim(request, buried))
        for worker in buried:
            self._locks.remove(worker)
        return claims

    def _nothing_to_claim(self, cursor: Cursor, request: ClaimRequest) -> Claims | None:
        """The empty answer, if there is nothing to take and nobody to bury."""
        if self._is_gone(cursor, request.worker):
            return Claims()
        alive, dead = self._roll_call(cursor, request.worker)
        if dead:
            return None
        now = self._now()
        request = replace(request, limit=min(request.limit, 1))
        found = orphans(cursor, request, alive)
        later: list[float] = []
        for workflow in request.workflows:
            found += due_runs(cursor, request, workflow, now)
            later += later_times(cursor, request, workflow, now)
        return None if found else Claims((), instant(min(later)) if later else None)

    def _claim(self, request: ClaimRequest, buried: list[str]) -> Claims:
        cursor = self._writer.cursor
        if self._is_gone(cursor, request.worker):
            return Claims()
        now = self._now()
        alive, dead = self._roll_call(cursor, request.worker)
        self._bury(dead, now)
        buried += dead
        if request.run is not None:
            found = by_name(cursor, request, alive)
            return Claims(self._take_all(found, request.worker, now))
        found = orphans(cursor, request, alive)
        due = [one for workflow in request.workflows for one in due_runs(cursor, request, workflow, now)]
        found += in_order(due)
        claims = self._take_all(found[: max(request.limit, 0)], request.worker, now)
        later = [at for workflow in request.workflows for at in later_times(cursor, request, workflow, now)]
        return Claims(claims, instant(min(later)) if later else None)

    def _take_all(self, found: list[Found], worker: str, now: float) -> tuple[Claim, ...]:
        taken = [self._take(one, worker, now) for one in found]
        return tuple(claim for claim in taken if claim is not None)

    def _take(self, one: Found, worker: str, now: float) -> Claim | None:
        """Lease one run; one whose row cannot be read is set aside, so that it does not stop the others."""
        cursor = self._writer.cursor
        try:
            if isinstance(one.run, bytes):
                raise CheckpointCorrupt("its id is no text")
            old, taken = Status(one.status), one.owner is not None
            status = rules.status_when_claimed(old, taken=taken)
            cursor.execute(_CLAIM, (status, worker, int(taken and old.active), now, one.run))
            run = read_run(cursor, one.run)
            if run is None:
                raise CheckpointCorrupt(f"run {one.run!r}: of its two rows one is gone")
        except (ValueError, CheckpointCorrupt) as error:
            log.error("run %s is set aside: %s", one.run, error)  # noqa: TRY400 - said briefly
            cursor.execute(_PUT_ASIDE, (one.run, one.run))
            return None
        self._authors.wrote({worker})
        return Claim(run, Lease(run.id, worker, run.epoch), one.owner, old, _since(one.updated_at))

    def _roll_call(self, cursor: Cursor, me: str) -> tuple[set[str], list[str]]:
        """Who is alive, the asker included, and who must be given up for dead."""
        alive: set[str] = {me}
        dead: list[str] = []
        for worker, boot, renewed, lease in self._enrolled_rows(cursor):
            if worker != me:
                is_dead = self._watch.is_silent(me, worker, lease) or self._is_proven_dead(worker, boot, renewed)
                (dead.append if is_dead else alive.add)(worker)
        return alive, dead

    def _enrolled_rows(self, cursor: Cursor) -> list[Any]:
        """The heartbeats of all workers, noted by the watch."""
        columns = ", ".join(map(RAW.format, ("id", "boot", "boot_seconds", "lease_seconds")))
        found = cursor.execute(f"SELECT {columns} FROM keepstep_worker WHERE gone_at IS NULL").fetchall()
        stored = [(text_or_bytes(worker), text_or_bytes(boot), *rest) for worker, boot, *rest in found]
        rows = [row for row in stored if isinstance(row[0], str)]  # any other name is damage, and nobody's
        self._watch.observe({worker: (boot, renewed) for worker, boot, renewed, _ in rows})
        return rows

    @staticmethod
    def _is_gone(cursor: Cursor, worker: str) -> bool:
        rows: list[Any] = cursor.execute(
            "SELECT gone_at IS NULL FROM keepstep_worker WHERE id = ?", (worker,)
        ).fetchall()
        return rows != [(1,)]

    def _is_proven_dead(self, worker: str, boot: str, renewed: Any) -> bool:
        """Whether the worker's lock is free, or the machine has started again since its heartbeat."""
        # A damaged row says nothing of the boot: its lock does, and the next heartbeat mends it.
        return (isinstance(renewed, float) and boot != self.clock.boot()[0]) or self._locks.proves_death(worker)

    def _is_shown_alive(self, worker: str, boot: str, renewed: Any, lease: Any) -> bool:
        """Whether the worker's lease has not run out, for a reader that has not watched it; no ground to take a run."""
        if isinstance(renewed, float) and self.clock.boot()[1] - renewed > self._watch.lease_of(lease):
            return False
        return not self._is_proven_dead(worker, boot, renewed)

    def _bury(self, dead: list[str], now: float) -> None:
        cursor = self._writer.cursor
        for worker in dead:
            cursor.execute("UPDATE keepstep_worker SET gone_at = ? WHERE id = ?", (now, worker))
        if dead:
            cursor.execute(
                "DELETE FROM keepstep_worker WHERE gone_at < ?"
                " AND NOT EXISTS (SELECT 1 FROM keepstep_head WHERE worker = keepstep_worker.id)",
                (now - _REMEMBER_DEAD.total_seconds(),),
            )

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

    def _list(self, cursor: Cursor, query: RunQuery) -> RunPage:
        # One ordered read per status, because an index gives the order only within one.
        where, values = conditions(query)
        start, limit = rules.page_start(query), max(query.limit, 0)
        rows: list[Sequence[Any]] = []
        if not query.status:
            sql = f"FROM keepstep_run r LEFT JOIN keepstep_head h ON h.run = r.id WHERE {where}"
            after, bound = ("", []) if start is None else (" AND r.number < ?", [start])
            sql += f"{after} ORDER BY r.number DESC LIMIT ?"
            rows += run_rows(cursor, sql, (*values, *bound, limit + 1), whole=query.with_input)
        for which, status in having(cursor, query.status) if query.status else ():
            sql = f"FROM keepstep_head h LEFT JOIN keepstep_run r ON r.id = h.run WHERE {where}"
            after, bound = ("", []) if start is None else (" AND h.number < ?", [start])
            sql += f"{after} AND {which} ORDER BY h.number DESC LIMIT ?"
            asked = (*values, *bound, *status, limit + 1)
            rows += run_rows(cursor, sql, asked, NUMBER.format("h"), whole=query.with_input)
        rows.sort(key=_place, reverse=True)
        page = rows[:limit]
        runs: list[Run] = []
        unreadable: list[str] = []
        for row in page:
            try:
                runs.append(run_from(row))
            except CheckpointCorrupt:
                unreadable.append(run_name(row))
        more = str(_place(page[-1])) if page and len(rows) > len(page) else None
        return RunPage(tuple(runs), more, tuple(unreadable))

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
        if version is None:  # the writer is busy: look without it, and ask again next time
            version, changed = -1, True
        else:
            changed = before is None or (version, foreign) != (before.version, before.foreign)
        if before is not None and not changed and signals == before.signals and cursor >= before.position:
            return News(cursor)
        position, runs = self._reader.read(lambda sql: arrivals(sql, worker, cursor))
        self._seen[worker] = _Seen(version, foreign, signals, position)
        return News(position, runs, changed)

    def list_workers(self) -> list[WorkerInfo]:
        return self._reader.read(self._workers)

    def _workers(self, cursor: Cursor) -> list[WorkerInfo]:
        leases: dict[Any, int] = dict(
            cursor.execute(
                f"SELECT {RAW.format('worker')}, count(*) FROM keepstep_head WHERE worker IS NOT NULL GROUP BY worker"
            ).fetchall()
        )
        columns = (
            *("id", "host", "pid", "started_at", "renewed_at", "boot", "boot_seconds", "workflows", "progress"),
            "lease_seconds",
        )
        rows = cursor.execute(
            f"SELECT {', '.join(map(RAW.format, columns))}, gone_at IS NOT NULL FROM keepstep_worker ORDER BY id"
        ).fetchall()
        found = []
        for stored, host, pid, started_at, renewed_at, boot, renewed, workflows, progress, lease, gone in rows:
            if gone and stored not in leases:
                continue
            worker = str(text_or_bytes(stored))
            alive = not gone and self._is_shown_alive(worker, text_or_bytes(boot), renewed, lease)
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
                )
            except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
                one = replace(one, damage=f"its row cannot be read: {error}")
            found.append(one)
        return found

    def check(self, *, mend: bool = False) -> list[Flaw]:
        if mend:
            return mend_all(self._path, self._busy_seconds, self.list_runs, self._mend)
        return [one.flaw for one in look_into(self._path, self._busy_seconds)]

    def raw_rows(self, run_id: str) -> list[dict[str, Any]]:
        """What there is of a run beside its checkpoints, readable or not: for a repair to keep."""
        return self._reader.read(lambda cursor: raw_rows(cursor, run_id))

    def _mend(self, found: list[Finding]) -> list[Flaw]:
        def mend() -> list[Flaw]:
            alive, _ = self._roll_call(self._writer.cursor, "")
            mender = Mender(self._writer.cursor, self._now(), alive)
            self._authors.wrote({None})
            return [mended(one, mender) for one in found]

        return self._writer.run(mend)

    # -- ends --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._locks.close()

    def abandon(self) -> None:
        """Become unusable in a forked child, which must not keep its parent's locks alive."""
        self._writer.abandon()
        self._reader.abandon()
        self._locks.close()

    def _now(self) -> float:
        # Through a datetime, so that what is compared is what is stored: whole microseconds.
        return instant(self.clock.now()).timestamp()


def open_url(url: str, *, clock: Clock | None = None, **options: Any) -> SQLiteStore:
    """The store for `sqlite:///relative/path` or `sqlite:////absolute/path`."""
    path = url.removeprefix("sqlite:").removeprefix("///")
    if not path or path.startswith("//") or path == ":memory:":
        raise DefinitionError(
            f"{url!r} names no file: write sqlite:///runs.db or sqlite:////var/lib/runs.db, or memory:"
        )
    return SQLiteStore(path, clock=clock, **options)


def _check_path(path: str | os.PathLike[str], *, allow_network: bool) -> str:
    name = os.fspath(path)
    if "\0" in name or not is_text(name):
        raise DefinitionError(f"{name[:60]!r} is not the name of a file that SQLite can open")
    try:
        real = os.path.realpath(name)
        folder = Path(real).parent
        if not folder.is_dir():
            raise StoreUnavailable(f"{real} cannot be opened: the folder {folder} does not exist")
        if Path(real).is_dir():
            raise StoreUnavailable(f"{real} cannot be opened: it is a folder")
        # Told by its size alone: to open and close a database's file beside SQLite would drop this process's locks.
        if Path(real).is_file() and 0 < Path(real).stat().st_size < _SMALLEST_DATABASE:
            raise SchemaMismatch(f"{real} is no SQLite database")
    except OSError as error:
        raise StoreUnavailable(f"{name[:200]} cannot be opened: {error.strerror}") from None
    kind = None if allow_network else network_file_system(str(folder))
    if kind is not None:
        raise StoreUnavailable(
            f"{real} lies on a network file system ({kind}), where locks between machines do not hold: use a local "
            "disk, or PostgreSQL to share runs between machines; allow_network=True if one machine alone opens it"
        )
    return real


def _marked(marks: Sequence[tuple[str]], cursor: Cursor) -> int:
    return sum(len(cursor.execute(_MARKED, mark).fetchall()) for mark in marks)


def _place(row: Sequence[Any]) -> int:
    """Where a run stands in a list: by its number, or before all others if that is none."""
    return row[0] if isinstance(row[0], int) else 2**63 - 1


def _since(seconds: float) -> datetime | None:
    """When a row was last written, if that can be told: a claim does without."""
    try:
        return instant(seconds)
    except (ValueError, OverflowError, OSError):
        return None


def _identity(path: str) -> tuple[int, int] | None:
    """Which file a path names just now."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
