"""Flaws of a PostgreSQL store itself, and their repair: rows that cannot be derived are put aside, not destroyed."""

from __future__ import annotations

import re
from collections.abc import Container
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from typing import Any

import psycopg

from ...model import Flaw, Status
from ...ports import Row
from ..mending import MOST_FLAWS, REPEATED, Finding, findings, mended, new_head
from ..migrations import scripts
from .parts import newest, part_to_read, part_to_write
from .pool import PLAN_THEIRS, Address, Connection, quoted

_TABLES = ("meta", "run", "head", "checkpoint", "signal", "worker", "document", "part")
_INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX (\w+)[^;]*;")
_REPEATED = ", ".join(REPEATED)


class Inspector:
    """Inspects one store, on one connection; its tables as the mender asks and writes them.

    Runs of the workers that are `alive` are not mended.
    """

    def __init__(self, connection: Connection, address: Address, now: datetime, alive: Container[str] = ()) -> None:
        self._connection = connection
        self._address = address
        self.now = now
        self._alive = alive
        self._run, self._head, self._checkpoint, self._signal = map(
            address.table, ("run", "head", "checkpoint", "signal")
        )
        self._part = part_to_read(address, "%s")
        self._records = f"SELECT record FROM {self._checkpoint} WHERE run = %s AND part = {self._part}"

    def look(self) -> list[Flaw]:
        """Return every flaw."""
        return [one.flaw for one in self._findings()]

    def mend(self) -> list[Flaw]:
        """Mend what can be mended, one flaw at a time."""
        return [mended(one, self) for one in self._findings()]

    # -- inspection ----------------------------------------------------------------------------------------------------

    def _findings(self) -> list[Finding]:
        found = self._missing()
        if any(one.flaw.kind == "integrity" for one in found):
            return found
        known = ", ".join(f"'{status}'" for status in Status)
        for name, status in self._rows(f"SELECT run, status FROM {self._head} WHERE status NOT IN ({known})"):
            flaw = Flaw("dangling", name, f"run {name!r}: its status is {status[:60]!r}, which no Keepstep wrote")
            found.append(Finding(flaw, partial(new_head, name, keep=True)))
        return [*found, *findings(self)]

    def _missing(self) -> list[Finding]:
        """Return the required tables and indexes that are missing."""
        there = {
            name
            for (name,) in self._connection.execute(
                "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s",
                (self._address.schema,),
            )
        }
        found = [
            Finding(Flaw("integrity", f"keepstep_{name}", f"the table keepstep_{name} is gone"))
            for name in _TABLES
            if f"keepstep_{name}" not in there
        ]
        wanted = {index[1]: index[0] for script in scripts("postgres") for index in _INDEX.finditer(script.sql)}
        for name, sql in wanted.items():
            if name not in there:
                found.append(Finding(Flaw("index", name, f"the index {name} is gone"), partial(_make_again, sql)))
        return found

    def make_again(self, sql: str) -> None:
        """Create a missing index."""
        self._connection.execute(f"SET LOCAL search_path TO {quoted(self._address.schema)}".encode(), prepare=False)
        self._connection.execute(sql.encode(), prepare=False)

    def _rows(self, sql: str) -> list[Any]:
        """Run one statement over whole tables with the server's own plan; a plan of index steps would be far slower."""
        with self._connection.transaction():
            self._connection.execute("; ".join(PLAN_THEIRS).encode(), prepare=False)
            return self._connection.execute(f"{sql} LIMIT {MOST_FLAWS}".encode(), prepare=False).fetchall()

    def _names(self, sql: str) -> list[str]:
        return [name for (name,) in self._rows(sql)]

    def without_run(self, table: str) -> list[str]:
        # Records of removed runs stay in an old part of the history until it is dropped.
        kept = f"t.part >= {newest(self._address)} AND" if table == "checkpoint" else ""
        return self._names(
            f"SELECT DISTINCT run FROM {self._address.table(table)} t"
            f" WHERE {kept} NOT EXISTS (SELECT 1 FROM {self._run} r WHERE r.id = t.run)"
        )

    def without_head(self) -> list[str]:
        return self._names(
            f"SELECT id FROM {self._run} r WHERE NOT EXISTS (SELECT 1 FROM {self._head} h WHERE h.run = r.id)"
        )

    def differing(self) -> list[str]:
        differs = " OR ".join(f"h.{column} IS DISTINCT FROM r.{column}" for column in REPEATED)
        return self._names(f"SELECT r.id FROM {self._run} r JOIN {self._head} h ON h.run = r.id WHERE {differs}")

    def miscounted(self) -> list[tuple[str, int, int]]:
        return self._rows(
            f"SELECT h.run, h.signals, count(*) FROM {self._head} h JOIN {self._signal} s ON s.run = h.run"
            f" GROUP BY h.run, h.signals HAVING count(*) > h.signals AND count(*) = max(s.seq)"
        )

    # -- repair --------------------------------------------------------------------------------------------------------

    def tolerates(self, error: Exception) -> bool:
        return isinstance(error, psycopg.Error) and not self._connection.closed

    def attempt(self) -> AbstractContextManager[Any]:
        return self._connection.transaction()

    def _execute(self, sql: str, *values: Any) -> psycopg.Cursor[Any]:
        return self._connection.execute(sql.encode(), values)

    def put_aside(self, table: str, run: str) -> int:
        source, aside = self._address.table(table), self._address.table(f"aside_{table}")
        self._execute(f"CREATE TABLE IF NOT EXISTS {aside} (put_aside_at timestamptz NOT NULL, LIKE {source})")
        moved = self._execute(
            f"WITH gone AS (DELETE FROM {source} WHERE run = %s RETURNING *)"
            f" INSERT INTO {aside} SELECT %s, gone.* FROM gone",
            run,
            self.now,
        )
        return moved.rowcount

    def repeat(self, run: str) -> None:
        self._execute(
            f"UPDATE {self._head} h SET ({_REPEATED}) = (SELECT {_REPEATED} FROM {self._run} r WHERE r.id = h.run)"
            f" WHERE h.run = %s",
            run,
        )

    def count(self, run: str, signals: int) -> None:
        sql = f"UPDATE {self._head} SET signals = %s WHERE run = %s AND signals < %s"
        self._execute(sql, signals, run, signals)

    def is_held(self, run: str) -> bool:
        found = self._execute(f"SELECT worker FROM {self._head} WHERE run = %s", run).fetchone()
        return found is not None and found[0] in self._alive

    def newest(self, run: str) -> Row | None:
        sql = f"SELECT seq, kind, record, body FROM {self._checkpoint} WHERE run = %s"
        sql += f" AND part = {self._part} ORDER BY seq DESC LIMIT 1"
        found = self._execute(sql, run, run, run).fetchone()
        return None if found is None else Row(*found)

    def add(self, run: str, row: Row) -> None:
        sql = f"INSERT INTO {self._checkpoint} (run, seq, kind, record, part) SELECT %s, %s, %s, %s,"
        sql += part_to_write(self._address, "%s")
        self._execute(sql, run, row.seq, row.kind, row.record, run)

    def records(self, run: str) -> list[bytes]:
        found = self._execute(self._records, run, run, run)
        return [text for (text,) in found]

    def epochs(self, run: str) -> list[int]:
        return [epoch for (epoch,) in self._execute(f"SELECT epoch FROM {self._head} WHERE run = %s", run)]

    def put_head(self, run: str, status: Status, seq: int, checksum: str, epoch: int) -> None:
        self._execute(
            f"INSERT INTO {self._head} (run, {_REPEATED}, status, seq, checksum, epoch, wakes, signals, recoveries,"
            f" updated_at, signals_read, kept_from, signals_from, part) SELECT id, {_REPEATED}, %s, %s, %s, %s, '',"
            f" coalesce(s.last, 0), 0, %s, coalesce(s.last, 0),"
            f" coalesce((SELECT CASE WHEN seq > 2 AND kind IN ('consolidated state', 'kept state') THEN seq ELSE 0 END"
            f" FROM {self._checkpoint} c WHERE c.run = r.id AND seq > 1 ORDER BY seq LIMIT 1), 0),"
            f" CASE WHEN s.first > 1 THEN s.first ELSE 0 END,"
            f" coalesce({part_to_read(self._address, 'r.id')}, {newest(self._address)}) FROM {self._run} r,"
            f" LATERAL (SELECT min(seq) AS first, max(seq) AS last FROM {self._signal} WHERE run = r.id) s"
            f" WHERE id = %s",
            status.value,
            seq,
            checksum,
            epoch,
            self.now,
            run,
        )


def _make_again(sql: str, inspector: Inspector) -> str:
    inspector.make_again(sql)
    return "it was rebuilt"


def raw_rows(connection: Connection, address: Address, run: str) -> list[dict[str, Any]]:
    """Return all rows of a run besides its checkpoints, as text, to be kept before they are removed."""
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
