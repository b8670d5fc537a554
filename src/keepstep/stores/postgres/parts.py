"""A divided history: the records of the runs of a few days are a table of their own, which is dropped as a whole.

The head of a run names the part in which all its records lie. A new run goes to the newest part. Records of removed
runs stay in an older part until it is dropped; nobody reads them, because no head names them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import TypeVar

from psycopg.errors import InsufficientPrivilege, LockNotAvailable

from ...errors import DefinitionError, StoreError, StoreUnavailable
from .pool import Address, Connection, quoted
from .rows import texts

T = TypeVar("T")

#: Time for which a part stays after another has become the newest, so that no statement still adds a run to it.
CLOSED = timedelta(hours=1)
#: A part is dropped when one in `ONE_OF` of its runs is left, and at most `MOST_MOVED`; these are moved to the newest.
ONE_OF, MOST_MOVED = 100, 10_000
#: Runs that one transaction moves.
_MOVED_AT_ONCE = 50
#: Seconds to wait in the queue for a table at once, because other clients queue behind; and in all.
_QUEUE_SECONDS, _PATIENCE_SECONDS = 0.25, 10.0
_LIKE = "INCLUDING DEFAULTS INCLUDING STORAGE"
_SETTINGS = "autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.05"


def newest(address: Address) -> str:
    """Return SQL for the part of new runs; 0 if the history is not divided."""
    return f"(SELECT coalesce(max(part), 0) FROM {address.table('part')})"


def part_to_read(address: Address, run: str) -> str:
    """Return SQL for the part in which the records of a run lie; without a head, where there are records of that id."""
    head, checkpoint = map(address.table, ("head", "checkpoint"))
    return (
        f"coalesce((SELECT part FROM {head} WHERE run = {run}), (SELECT max(part) FROM {checkpoint} WHERE run = {run}))"
    )


def part_to_write(address: Address, run: str) -> str:
    """Return SQL for the part to which the records of a run are added; of one that is born here, the newest."""
    return f"coalesce((SELECT part FROM {address.table('head')} WHERE run = {run}), {newest(address)})"


class Parts:
    """The parts of the history in one schema."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._schema = quoted(address.schema)
        self._table, self._heads, self._parts, self._meta = map(address.table, ("checkpoint", "head", "part", "meta"))

    def divide(self, connection: Connection, days: float, now: datetime) -> bool:
        """Divide the history into parts of `days` days from now on. Return False if only the days may have changed.

        The records that are there become the first part. They are read once, while runs go on, and not rewritten.
        """
        if not days > 0:
            raise DefinitionError(f"days must be greater than 0, got {days}")
        connection.execute(
            f"INSERT INTO {self._meta} VALUES ('days of a part', %s)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (repr(float(days)),),
        )
        if self._is_divided(connection):
            return False
        try:
            self._prepare(connection)
            self._patiently(connection, lambda: self._split(connection, now))
        except InsufficientPrivilege as error:
            raise self._not_ours(error) from None
        return True

    def tend(self, connection: Connection, now: datetime) -> int:
        """Begin a new part when it is time, and drop those without runs. Return the number of parts dropped.

        A few runs that are left in an old part are moved to the newest, unless a worker drives one of them.
        """
        if not self._is_divided(connection):
            return 0
        try:
            if self._is_due(connection, now):
                self._patiently(connection, lambda: self._add(connection, now))
            dropped = 0
            parts = self._known(connection)
            for (part, _, first), (_, closed_at, end) in pairwise(parts):
                if closed_at + CLOSED > now:
                    continue
                few = min((end - first) // ONE_OF, MOST_MOVED)
                left = self._runs_in(connection, part, few + 1)
                if left <= few and left == self._move(connection, part):
                    dropped += self._patiently(connection, partial(self._drop, connection, part))
            return dropped
        except InsufficientPrivilege as error:
            raise self._not_ours(error) from None

    # -- looking -------------------------------------------------------------------------------------------------------

    def _is_divided(self, connection: Connection) -> bool:
        return bool(connection.execute(f"SELECT FROM {self._parts} LIMIT 1").fetchall())

    def _known(self, connection: Connection) -> list[tuple[int, datetime, int]]:
        return connection.execute(f"SELECT part, began_at, first FROM {self._parts} ORDER BY part").fetchall()

    def _is_due(self, connection: Connection, now: datetime) -> bool:
        ((days,),) = connection.execute(
            f"SELECT coalesce((SELECT value FROM {self._meta} WHERE name = 'days of a part'), '7')::float8"
        ).fetchall()
        return bool(self._known(connection)[-1][1] + timedelta(days=days) <= now)

    def _runs_in(self, connection: Connection, part: int, most: int) -> int:
        sql = f"SELECT count(*) FROM (SELECT FROM {self._heads} WHERE part = %s LIMIT %s) x"
        ((runs,),) = connection.execute(sql, (part, most)).fetchall()
        return int(runs)

    # -- changing ------------------------------------------------------------------------------------------------------

    def _prepare(self, connection: Connection) -> None:
        """Prove that all records are of part 0, and index the heads, while runs go on: both may take a while."""
        name = "keepstep_checkpoint_first"
        add = (
            f"ALTER TABLE {self._table} DROP CONSTRAINT IF EXISTS {name},"
            f" ADD CONSTRAINT {name} CHECK (part = 0) NOT VALID"
        )
        self._patiently(connection, lambda: _run(connection, add))
        _run(connection, f"ALTER TABLE {self._table} VALIDATE CONSTRAINT {name}")
        _run(connection, f"DROP INDEX IF EXISTS {self._schema}.keepstep_head_part")
        _run(connection, f"CREATE INDEX CONCURRENTLY keepstep_head_part ON {self._heads} (part)")

    def _split(self, connection: Connection, now: datetime) -> bool:
        with connection.transaction():
            self._take_turn(connection)
            if self._is_divided(connection):  # another process was first
                return False
            old = self._table_of(0)
            for sql in (
                f"LOCK TABLE {self._table} IN ACCESS EXCLUSIVE MODE",
                f"ALTER TABLE {self._table} RENAME TO keepstep_checkpoint_0",
                f"CREATE TABLE {self._table} (LIKE {old} {_LIKE}) PARTITION BY LIST (part)",
                f"ALTER TABLE {self._table} ATTACH PARTITION {old} FOR VALUES IN (0)",
            ):
                _run(connection, sql)
            self._grant(connection, old, self._table)
            connection.execute(f"INSERT INTO {self._parts} VALUES (0, %s, 0)", (now,))
            self._add_next(connection, now)
            return True

    def _add(self, connection: Connection, now: datetime) -> None:
        with connection.transaction():
            self._take_turn(connection)
            if self._is_due(connection, now):  # or another process was first
                self._add_next(connection, now)

    def _add_next(self, connection: Connection, now: datetime) -> None:
        part = self._known(connection)[-1][0] + 1
        table = self._table_of(part)
        _run(
            connection,
            f"CREATE TABLE {table} (LIKE {self._table} {_LIKE}, PRIMARY KEY (run, seq),"
            f" CHECK (part = {part})) WITH ({_SETTINGS})",
        )
        _run(connection, f"ALTER TABLE {self._table} ATTACH PARTITION {table} FOR VALUES IN ({part})")
        self._grant(connection, self._table, table)
        number = f"SELECT last_value FROM {self._address.table('number')}"
        connection.execute(f"INSERT INTO {self._parts} SELECT %s, %s, ({number})", (part, now))

    def _move(self, connection: Connection, part: int) -> int:
        """Move the runs of a part that nobody drives to the newest part. Return their number.

        Records are added under a lease only, so none is added to the old part meanwhile.
        """
        moved = 0
        while True:
            with connection.transaction():
                locked = (
                    f"SELECT run FROM {self._heads} WHERE part = %s AND worker IS NULL ORDER BY run LIMIT %s"
                    " FOR UPDATE SKIP LOCKED"
                )
                runs = [run for (run,) in connection.execute(locked, (part, _MOVED_AT_ONCE)).fetchall()]
                if not runs:
                    return moved
                connection.execute(
                    f"WITH gone AS (DELETE FROM {self._table_of(part)} WHERE run = ANY(%s) RETURNING *)"
                    f" INSERT INTO {self._table} (run, seq, kind, record, body, part)"
                    f" SELECT run, seq, kind, record, body, {newest(self._address)} FROM gone",
                    (texts(runs),),
                )
                sql = f"UPDATE {self._heads} SET part = {newest(self._address)} WHERE run = ANY(%s)"
                moved += connection.execute(sql, (texts(runs),)).rowcount

    def _drop(self, connection: Connection, part: int) -> int:
        with connection.transaction():
            self._take_turn(connection)
            _run(connection, f"LOCK TABLE {self._table} IN ACCESS EXCLUSIVE MODE")
            is_there = connection.execute(f"SELECT FROM {self._parts} WHERE part = %s", (part,)).fetchall()
            if not is_there or self._runs_in(connection, part, 1):  # dropped already, or a run was repaired
                return 0
            _run(connection, f"ALTER TABLE {self._table} DETACH PARTITION {self._table_of(part)}")
            _run(connection, f"DROP TABLE {self._table_of(part)}")
            connection.execute(f"DELETE FROM {self._parts} WHERE part = %s", (part,))
            return 1

    def _grant(self, connection: Connection, old: str, new: str) -> None:
        """Give a new table the privileges of another."""
        sql = (
            "SELECT format('GRANT %%s ON %%s TO %%s', a.privilege_type, %s::text,"
            " CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)"
            " FROM pg_class c, aclexplode(c.relacl) a WHERE c.oid = %s::text::regclass AND a.grantee <> c.relowner"
        )
        for (grant,) in connection.execute(sql, (new, old)).fetchall():
            _run(connection, grant)

    def _take_turn(self, connection: Connection) -> None:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (self._address.key("parts"),))

    def _patiently(self, connection: Connection, work: Callable[[], T]) -> T:
        """Do what needs a lock of the whole table, without letting others queue behind it for long."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                with self._address.patience(connection, _QUEUE_SECONDS):
                    return work()
            except LockNotAvailable:
                if time.monotonic() > until:
                    raise StoreUnavailable(
                        f"{self._address.text}: {self._table} is always in use by other sessions, such as a backup"
                        " or a long query; `keepstep doctor` names old transactions. Try again later"
                    ) from None
                time.sleep(_QUEUE_SECONDS)

    def _table_of(self, part: int) -> str:
        return f"{self._schema}.keepstep_checkpoint_{part}"

    def _not_ours(self, error: Exception) -> StoreError:
        why = " ".join(str(error).split())
        failed = StoreError(
            f"{self._address.text}: this role may not divide the history or drop parts of it ({why}); run `keepstep"
            " retain` as the owner of the tables"
        )
        failed.denied = True
        return failed


def _run(connection: Connection, sql: str) -> None:
    connection.execute(sql.encode(), prepare=False)
