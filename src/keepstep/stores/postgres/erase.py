"""Erasure in a PostgreSQL store: tables are rewritten, so that the server's files hold nothing of removed runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from psycopg.errors import LockNotAvailable

from ...errors import StoreError, StoreUnavailable
from .. import rules
from .pool import Address, Connection
from .rows import texts

#: Time in seconds that an erasure waits for earlier transactions, and for readers of a table.
_OUTLAST_SECONDS = 10.0
#: Time in seconds that a rewrite waits in the queue for a table. Other clients queue behind it, so it gives up early
#: and retries.
_QUEUE_SECONDS = 0.25
#: Query for transactions that began before this one.
_OLDER = (
    "SELECT pid, application_name FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND greatest(age(backend_xmin), age(backend_xid)) > age(%s::xid)"
)
#: Query for the sessions that hold a lock on a table.
_HOLDERS = (
    "SELECT DISTINCT l.pid, a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid"
    " WHERE l.relation = %s::regclass AND l.granted AND l.pid <> pg_backend_pid()"
)
#: Query for the tables that `VACUUM FULL` would skip with a warning.
_NOT_OURS = (
    "SELECT c.relname, pg_get_userbyid(c.relowner) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname = %s AND c.relkind IN ('r', 'p') AND c.relname IN ('keepstep_head', 'keepstep_run',"
    " 'keepstep_checkpoint', 'keepstep_signal', 'keepstep_worker', 'keepstep_document')"
    " AND NOT (pg_has_role(c.relowner, 'USAGE')"
    " OR {granted} OR (SELECT pg_has_role(d.datdba, 'USAGE') FROM pg_database d WHERE d.datname = current_database()))"
)
_MAINTAIN = "has_table_privilege(c.oid, 'MAINTAIN')"
_MAINTAIN_SINCE = 170_000

_json = msgspec.json.Encoder().encode


class Eraser:
    """Erases runs in one schema."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._tables = tuple(map(address.table, ("head", "run", "checkpoint", "signal", "worker", "document")))
        meta = address.table("meta")
        # The value distinguishes a removal from a later one of the same id: a rewrite finishes only earlier removals.
        self._mark = (
            f"INSERT INTO {meta} SELECT name, pg_current_xact_id()::text FROM unnest(%s) name"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        )
        self._marked = f"SELECT name FROM {meta} WHERE name = ANY(%s)"
        self._marks = f"SELECT name, value FROM {meta} WHERE name LIKE 'erasing %'"
        self._unmark = f"DELETE FROM {meta} WHERE (name, value) IN (SELECT * FROM unnest(%s, %s))"
        self._size = (
            "SELECT sum(pg_total_relation_size(name::regclass) + coalesce((SELECT sum(pg_total_relation_size(inhrelid))"
            " FROM pg_inherits WHERE inhparent = name::regclass), 0))::bigint FROM unnest(%s) name"
        )
        self._progress = f"SELECT id, progress FROM {address.table('worker')}"
        self._put_progress = f"UPDATE {address.table('worker')} SET progress = %s WHERE id = %s"

    def begin(self, connection: Connection, runs: Sequence[str]) -> None:
        """Mark runs as removed but not yet scrubbed, in the transaction that removes them."""
        connection.execute(self._mark, (texts(map(rules.erasing, runs)),))

    def begun(self, connection: Connection, runs: Sequence[str]) -> int:
        """Return how many of these runs are removed but not yet scrubbed."""
        return len(connection.execute(self._marked, (texts(map(rules.erasing, runs)),)).fetchall())

    def marks(self, connection: Connection) -> list[tuple[str, str]]:
        """Return the marks of all runs that are removed but not yet scrubbed."""
        return connection.execute(self._marks).fetchall()

    def check_owner(self, connection: Connection) -> None:
        """Raise if the server would not rewrite the tables for this role."""
        granted = _MAINTAIN if connection.info.server_version >= _MAINTAIN_SINCE else "false"
        if rows := connection.execute(_NOT_OURS.format(granted=granted), (self._address.schema,)).fetchall():
            whose = " or ".join(sorted({str(owner) for _, owner in rows}))
            raise StoreError(
                f"{self._address.text}: nothing was erased, because this role does not own the tables, and the server"
                f" rewrites them only for their owner; erase as {whose}"
            )

    def forget_progress(self, connection: Connection, runs: Sequence[str]) -> None:
        """Remove the progress of these runs from the heartbeats of workers."""
        for worker, stored in connection.execute(self._progress).fetchall():
            progress = rules.progress_in(stored)
            kept = {run: value for run, value in progress.items() if run not in runs}
            if len(kept) < len(progress):
                connection.execute(self._put_progress, (_json(kept), worker))

    def size(self, connection: Connection) -> int:
        """Return the bytes of all tables, with their indexes and large values."""
        ((size,),) = connection.execute(self._size, (texts(self._tables),)).fetchall()
        return int(size)

    def rewrite(self, connection: Connection) -> int:
        """Let the server rewrite the tables without removed rows. Return the number of erasures that this finishes.

        The planner's statistics are collected again, because they hold values of rows. The server's log and backups are
        out of reach.
        """
        marks = self.marks(connection)
        self._outlast(connection)
        with self._address.patience(connection, _QUEUE_SECONDS):
            for table in self._tables:
                self._rewrite(connection, table, "VACUUM FULL")
                self._rewrite(connection, table, "ANALYZE")
        names, values = zip(*marks, strict=True) if marks else ((), ())
        connection.execute(self._unmark, (texts(names), texts(values)))
        return len(marks)

    def _rewrite(self, connection: Connection, table: str, how: str) -> None:
        deadline = time.monotonic() + _OUTLAST_SECONDS
        while True:
            try:
                connection.execute(f"{how} {table}".encode(), prepare=False)
            except LockNotAvailable:
                if time.monotonic() > deadline:
                    holders = _sessions(connection.execute(_HOLDERS, (table,)).fetchall())
                    raise StoreUnavailable(
                        f"{self._address.text}: removed, but not yet erased: {table} cannot be rewritten while session"
                        f" {holders} uses it. End that session and erase again"
                    ) from None
                time.sleep(_QUEUE_SECONDS)
            else:
                return

    def _outlast(self, connection: Connection) -> None:
        """Wait for transactions that can still see the removed rows, because the server keeps the rows for them."""
        ((now,),) = connection.execute("SELECT pg_current_xact_id()::xid::text").fetchall()
        deadline = time.monotonic() + _OUTLAST_SECONDS
        while older := connection.execute(_OLDER, (now,)).fetchall():
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"{self._address.text}: removed, but not yet erased: an earlier transaction of session"
                    f" {_sessions(older)} still sees the run. End that session and erase again"
                )
            time.sleep(0.05)


def _sessions(rows: Sequence[Any]) -> str:
    return ", ".join(f"{pid} ({name or 'unnamed'})" for pid, name in rows)
