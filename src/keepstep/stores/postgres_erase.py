"""How what was removed from a PostgreSQL store is removed from the server's files, too."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from ..errors import StoreError, StoreUnavailable
from . import rules
from .postgres_connection import Address, Connection
from .postgres_rows import texts

#: How long an erasure waits for transactions that began before it; and which they are.
_OUTLAST_SECONDS = 10.0
_OLDER = (
    "SELECT pid, application_name FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND greatest(age(backend_xmin), age(backend_xid)) > age(%s::xid)"
)
#: The tables that `VACUUM FULL` would skip, with a warning.
_NOT_OURS = (
    "SELECT c.relname, pg_get_userbyid(c.relowner) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname = %s AND c.relkind = 'r' AND c.relname IN ('keepstep_head', 'keepstep_run',"
    " 'keepstep_checkpoint', 'keepstep_signal', 'keepstep_worker') AND NOT (pg_has_role(c.relowner, 'USAGE')"
    " OR {granted} OR (SELECT pg_has_role(d.datdba, 'USAGE') FROM pg_database d WHERE d.datname = current_database()))"
)
_MAINTAIN = "has_table_privilege(c.oid, 'MAINTAIN')"
_MAINTAIN_SINCE = 170_000

_json = msgspec.json.Encoder().encode


class Eraser:
    """Erases in one schema."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._tables = tuple(map(address.table, ("head", "run", "checkpoint", "signal", "worker")))
        meta = address.table("meta")
        self._mark = f"INSERT INTO {meta} SELECT name, '' FROM unnest(%s) name ON CONFLICT (name) DO NOTHING"
        self._marked = f"SELECT name FROM {meta} WHERE name = ANY(%s)"
        self._unmark = f"DELETE FROM {meta} WHERE name = ANY(%s)"
        self._progress = f"SELECT id, progress FROM {address.table('worker')}"
        self._put_progress = f"UPDATE {address.table('worker')} SET progress = %s WHERE id = %s"

    def begin(self, connection: Connection, runs: Sequence[str]) -> None:
        """Mark runs as removed and not yet scrubbed, in the transaction that removes them."""
        connection.execute(self._mark, (texts(map(rules.erasing, runs)),))

    def begun(self, connection: Connection, runs: Sequence[str]) -> int:
        """How many of these runs are removed and not yet scrubbed."""
        return len(connection.execute(self._marked, (texts(map(rules.erasing, runs)),)).fetchall())

    def check_owner(self, connection: Connection) -> None:
        """Raise if the server would not write the tables anew for this role."""
        granted = _MAINTAIN if connection.info.server_version >= _MAINTAIN_SINCE else "false"
        if rows := connection.execute(_NOT_OURS.format(granted=granted), (self._address.schema,)).fetchall():
            whose = " or ".join(sorted({str(owner) for _, owner in rows}))
            raise StoreError(
                f"{self._address.text}: nothing was erased, because this role does not own the tables, and the server"
                f" writes them anew only for their owner; erase as {whose}"
            )

    def scrub(self, connection: Connection, runs: Sequence[str]) -> None:
        """Have the server write its tables anew, without what was removed; its log and its backups are not ours."""
        for worker, stored in connection.execute(self._progress).fetchall():
            told = rules.progress_in(stored)
            kept = {run: value for run, value in told.items() if run not in runs}
            if len(kept) < len(told):
                connection.execute(self._put_progress, (_json(kept), worker))
        self._outlast(connection)
        with self._address.patience(connection):  # or whoever reads them just now would keep it from being done
            for table in self._tables:
                connection.execute(f"VACUUM FULL {table}".encode(), prepare=False)
        connection.execute(self._unmark, (texts(map(rules.erasing, runs)),))

    def _outlast(self, connection: Connection) -> None:
        """Wait for transactions that still see what was removed: the server keeps it in its files for them."""
        ((now,),) = connection.execute("SELECT pg_current_xact_id()::xid::text").fetchall()
        deadline = time.monotonic() + _OUTLAST_SECONDS
        while older := connection.execute(_OLDER, (now,)).fetchall():
            if time.monotonic() > deadline:
                told = ", ".join(f"{pid} ({name or 'unnamed'})" for pid, name in older)
                raise StoreUnavailable(
                    f"{self._address.text}: it is removed, but a transaction of session {told} began before and still"
                    " sees it, so that it stays in the server's files; end that, and do it again"
                )
            time.sleep(0.05)
