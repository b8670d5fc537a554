"""What is wrong with a PostgreSQL store itself, and its mending: what cannot be derived is put aside, not destroyed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import datetime
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import psycopg

from ..errors import CheckpointCorrupt
from ..model import Flaw, Kind, Status
from ..model.ids import new_id
from .migrations import scripts
from .postgres_connection import PLAN_THEIRS, Address, Connection, quoted
from .records import Record, StoredError, seal

log = logging.getLogger("keepstep")

#: How many flaws of one sort are told one by one.
TOLD = 1000
#: What the head repeats of its run, so that a claim reads one index.
_REPEATED = ("number", "workflow", "version", "priority")
_TABLES = ("meta", "run", "head", "checkpoint", "signal", "worker")
_INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX (\w+)[^;]*;")
_ENDS = {"success": Status.COMPLETED, "failure": Status.FAILED, "cancelled": Status.CANCELLED}


class _End(msgspec.Struct):
    """As much of a record as tells how a run ended."""

    outcome: str = "success"


class _Claimed(msgspec.Struct):
    epoch: int = 0


class _Lease(msgspec.Struct):
    """As much of a record as tells of the lease under which it was written."""

    claimed: _Claimed = msgspec.field(default_factory=_Claimed)


class _Finding(NamedTuple):
    """A flaw, and what mends it; without that nothing can."""

    flaw: Flaw
    mend: Callable[[], str] | None = None


class Inspector:
    """Looks at one store, on one connection."""

    def __init__(self, connection: Connection, address: Address, now: datetime) -> None:
        self._connection = connection
        self._address = address
        self._now = now

    def look(self) -> list[Flaw]:
        """Everything that does not fit."""
        return [one.flaw for one in self._findings()]

    def mend(self, alive: set[str]) -> list[Flaw]:
        """Mend what can be, one thing after the other; runs of living workers are left to them."""
        return [self._mended(one) for one in self._findings(alive)]

    def _mended(self, found: _Finding) -> Flaw:
        flaw = found.flaw
        if found.mend is None:
            return flaw
        try:
            with self._connection.transaction():
                done = found.mend()
        except (CheckpointCorrupt, psycopg.Error, msgspec.MsgspecError) as error:
            if self._connection.closed:
                raise
            log.warning("%s, and cannot be mended: %s", flaw.what, error)
            done = ""
        return Flaw(flaw.kind, flaw.about, flaw.what, done)

    # -- looking -------------------------------------------------------------------------------------------------------

    def _findings(self, alive: set[str] | None = None) -> list[_Finding]:
        found = self._missing()
        if any(one.flaw.kind == "integrity" for one in found):
            return found
        run, head = self._address.table("run"), self._address.table("head")
        for name, what in (("checkpoint", "checkpoints"), ("signal", "signals")):
            table = self._address.table(name)
            for (lost,) in self._rows(
                f"SELECT DISTINCT run FROM {table} t WHERE NOT EXISTS (SELECT 1 FROM {run} r WHERE r.id = t.run)"
            ):
                flaw = Flaw("orphan", lost, f"there are {what} of a run {lost!r}, which is not there")
                found.append(_Finding(flaw, self._aside(name, lost)))
        for (lost,) in self._rows(
            f"SELECT run FROM {head} t WHERE NOT EXISTS (SELECT 1 FROM {run} r WHERE r.id = t.run)"
        ):
            flaw = Flaw("dangling", lost, f"there is a head of a run {lost!r}, which is not there")
            found.append(_Finding(flaw, self._aside("head", lost)))
        for (name,) in self._rows(
            f"SELECT id FROM {run} r WHERE NOT EXISTS (SELECT 1 FROM {head} h WHERE h.run = r.id)"
        ):
            found.append(_Finding(Flaw("dangling", name, f"run {name!r} has no head"), self._new_head(name)))
        known = ", ".join(f"'{status}'" for status in Status)
        for name, status, worker in self._rows(f"SELECT run, status, worker FROM {head} WHERE status NOT IN ({known})"):
            flaw = Flaw("dangling", name, f"run {name!r}: its status is {status[:60]!r}, which no Keepstep wrote")
            found.append(_Finding(flaw, None if worker in (alive or ()) else self._new_head(name, keep=True)))
        differs = " OR ".join(f"h.{column} IS DISTINCT FROM r.{column}" for column in _REPEATED)
        for (name,) in self._rows(f"SELECT r.id FROM {run} r JOIN {head} h ON h.run = r.id WHERE {differs}"):
            flaw = Flaw("index", name, f"run {name!r}: its head does not repeat what its row says")
            found.append(_Finding(flaw, self._same_again(name)))
        return found + self._miscounted()

    def _miscounted(self) -> list[_Finding]:
        head, signal = self._address.table("head"), self._address.table("signal")
        rows = self._rows(
            f"SELECT h.run, h.signals, count(*) FROM {head} h JOIN {signal} s ON s.run = h.run"
            f" GROUP BY h.run, h.signals HAVING count(*) > h.signals AND count(*) = max(s.seq)"
        )
        return [
            _Finding(
                Flaw("index", name, f"run {name!r}: its head counts {counted} signals, and {there} are there"),
                self._counted(name, there),
            )
            for name, counted, there in rows
        ]

    def _missing(self) -> list[_Finding]:
        """Tables and indexes that every store has, and this one has not."""
        there = {
            name
            for (name,) in self._connection.execute(
                "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s",
                (self._address.schema,),
            )
        }
        found = [
            _Finding(Flaw("integrity", f"keepstep_{name}", f"the table keepstep_{name} is gone"))
            for name in _TABLES
            if f"keepstep_{name}" not in there
        ]
        for script in scripts("postgres"):
            for index in _INDEX.finditer(script.sql):
                if index[1] not in there:
                    flaw = Flaw("index", index[1], f"the index {index[1]} is gone")
                    found.append(_Finding(flaw, self._made_again(index[0])))
        return found

    def _rows(self, sql: str) -> list[Any]:
        """Run one statement over whole tables, as the server plans it: by index steps it would take far longer."""
        with self._connection.transaction():
            self._connection.execute("; ".join(PLAN_THEIRS).encode(), prepare=False)
            return self._connection.execute(f"{sql} LIMIT {TOLD}".encode(), prepare=False).fetchall()

    # -- mending -------------------------------------------------------------------------------------------------------

    def _made_again(self, sql: str) -> Callable[[], str]:
        def mend() -> str:
            self._connection.execute(f"SET LOCAL search_path TO {quoted(self._address.schema)}".encode(), prepare=False)
            self._connection.execute(sql.encode(), prepare=False)
            return "it was made again"

        return mend

    def _aside(self, table: str, run: str) -> Callable[[], str]:
        def mend() -> str:
            return f"{self._put_aside(table, run)} rows were put aside in keepstep_aside_{table}"

        return mend

    def _put_aside(self, table: str, run: str) -> int:
        """Move rows into a table beside their own, as they are; how many there were."""
        source, aside = self._address.table(table), self._address.table(f"aside_{table}")
        execute = self._connection.execute
        execute(f"CREATE TABLE IF NOT EXISTS {aside} (put_aside_at timestamptz NOT NULL, LIKE {source})".encode())
        moved = execute(
            f"WITH gone AS (DELETE FROM {source} WHERE run = %s RETURNING *)"
            f" INSERT INTO {aside} SELECT %s, gone.* FROM gone".encode(),
            (run, self._now),
        )
        return moved.rowcount

    def _same_again(self, run: str) -> Callable[[], str]:
        def mend() -> str:
            columns = ", ".join(_REPEATED)
            self._connection.execute(
                f"UPDATE {self._address.table('head')} h SET ({columns}) = (SELECT {columns} FROM"
                f" {self._address.table('run')} r WHERE r.id = h.run) WHERE h.run = %s".encode(),
                (run,),
            )
            return "its head repeats it again"

        return mend

    def _counted(self, run: str, there: int) -> Callable[[], str]:
        def mend() -> str:
            sql = f"UPDATE {self._address.table('head')} SET signals = %s WHERE run = %s AND signals < %s"
            self._connection.execute(sql.encode(), (there, run, there))
            return f"its head counts {there} now"

        return mend

    def _new_head(self, run: str, *, keep: bool = False) -> Callable[[], str]:
        """Make a head from the records. Whether later ones were lost with it nobody can tell: a person decides."""

        def mend() -> str:
            epoch = self._last_epoch(run) + 1
            old = "; the old one was put aside in keepstep_aside_head" if keep and self._put_aside("head", run) else ""
            status = self._put_head(run, epoch)
            return f"its head was made again from its records, and it is {status.value}{old}"

        return mend

    def _put_head(self, run: str, epoch: int) -> Status:
        checkpoint, execute = self._address.table("checkpoint"), self._connection.execute
        newest = execute(
            f"SELECT seq, kind, record, body FROM {checkpoint} WHERE run = %s ORDER BY seq DESC LIMIT 1".encode(),
            (run,),
        ).fetchone()
        if newest is None:
            raise CheckpointCorrupt(f"run {run!r}: it has no records to make a head from")
        seq, kind, text, body = newest
        checksum = sha256(text + (body or b"")).hexdigest()
        status = Status.SET_ASIDE
        if kind == Kind.RUN_FINISHED:
            status = _ENDS.get(msgspec.json.decode(text, type=_End).outcome, status)
        if status is Status.SET_ASIDE:
            row, checksum = seal(_lost(run, self._now), seq + 1, checksum)
            seq = row.seq
            execute(
                f"INSERT INTO {checkpoint} (run, seq, kind, record) VALUES (%s, %s, %s, %s)".encode(),
                (run, row.seq, row.kind, row.record),
            )
        execute(
            f"INSERT INTO {self._address.table('head')} SELECT id, number, workflow, version, priority, %s, %s, %s, %s,"
            f" NULL, NULL, '', (SELECT count(*) FROM {self._address.table('signal')} s WHERE s.run = r.id), 0, %s"
            f" FROM {self._address.table('run')} r WHERE id = %s".encode(),
            (status.value, seq, checksum, epoch, self._now, run),
        )
        return status

    def _last_epoch(self, run: str) -> int:
        """The newest lease that the head, or else the records, tell of."""
        found = self._connection.execute(
            f"SELECT epoch FROM {self._address.table('head')} WHERE run = %s".encode(), (run,)
        ).fetchone()
        last = 1 if found is None else int(found[0])
        for (text,) in self._connection.execute(
            f"SELECT record FROM {self._address.table('checkpoint')} WHERE run = %s".encode(), (run,)
        ):
            try:
                last = max(last, msgspec.json.decode(text, type=_Lease).claimed.epoch)
            except (msgspec.MsgspecError, ValueError):
                continue
        return last


def _lost(run: str, now: datetime) -> Record:
    reason = "its head was lost; what was recorded is whole as far as it goes, but there may have been more"
    error = StoredError("CheckpointCorrupt", reason, error_class="permanent", id=new_id("error"))
    record = Record(run, Kind.ERROR.value, outcome="failure", worker="keepstep repair", error=error)
    record.finished_at = now
    return record


def raw_rows(connection: Connection, address: Address, run: str) -> list[dict[str, Any]]:
    """Everything that there is of a run beside its checkpoints, as text: to be kept before it is given up."""
    found: list[dict[str, Any]] = []
    for name, column in (("run", "id"), ("head", "run"), ("signal", "run")):
        cursor = connection.execute(f"SELECT t.* FROM {address.table(name)} t WHERE {column} = %s".encode(), (run,))
        names = [one.name for one in cursor.description or ()]
        found += [
            {"table": f"keepstep_{name}", **{key: _shown(value) for key, value in zip(names, row, strict=True)}}
            for row in cursor
        ]
    return found


def _shown(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.isoformat() if isinstance(value, datetime) else value
