"""Connections to the file of a SQLite store, the reading one, and the translation of SQLite's errors."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import apsw

from ...errors import CheckpointCorrupt, DefinitionError, SchemaMismatch, StoreError, StoreFull, StoreUnavailable

T = TypeVar("T")


class Cursor(Protocol):
    """The methods of apsw's cursor that are used. Rows are untyped, because the schema determines their types."""

    def execute(self, statements: str, bindings: Any = ..., /) -> Any: ...
    def executemany(self, statements: str, bindings: Any, /) -> Any: ...


#: Oldest supported version of SQLite. Versions 3.7.0 to 3.51.2 can corrupt a database with two writing processes (the
#: WAL-reset bug).
OLDEST_SQLITE = (3, 51, 3)

#: Application id in the file's header, which marks a Keepstep store: "Keep" in ASCII.
APPLICATION_ID = 0x4B656570

_UNAVAILABLE = (
    apsw.BusyError,
    apsw.LockedError,
    apsw.ReadOnlyError,
    apsw.IOError,
    apsw.CantOpenError,
    apsw.PermissionsError,
    apsw.ProtocolError,
    apsw.NoMemError,
    apsw.InterruptError,
)

#: Errors that are caused by the store, not by the statement.
OUTAGES = (*_UNAVAILABLE, apsw.FullError, apsw.CorruptError, apsw.NotADBError)

#: Message of a missing table or column of Keepstep. Tables of users, in transactional steps, have other names.
_LACKING = re.compile(r"no such (table|column): .*keepstep_")


def translated(error: apsw.Error | UnicodeDecodeError, path: str, *, committing: bool = False) -> StoreError:
    """Return Keepstep's error for one of SQLite. `committing`: a failed commit may nevertheless have happened."""
    if isinstance(error, apsw.FullError):
        return StoreFull(f"{path}: no room left to write ({error})")
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError, UnicodeDecodeError)):
        return CheckpointCorrupt(f"{path} is damaged: {error}; restore it, or copy out what can be read")
    if isinstance(error, apsw.ConstraintError) and "keepstep_" in str(error):
        return CheckpointCorrupt(
            f"{path}: a row that should be new exists already, so a head does not fit it ({error})"
        )
    if isinstance(error, _UNAVAILABLE):
        unavailable = StoreUnavailable(f"{path}: {error}", unknown=committing and isinstance(error, apsw.IOError))
        unavailable.denied = isinstance(error, apsw.ReadOnlyError)
        return unavailable
    if isinstance(error, apsw.SQLError) and _LACKING.match(str(error)):
        return SchemaMismatch(f"{path} is not a complete Keepstep store ({error}); restore it from a copy")
    return StoreError(f"{path}: {type(error).__name__}: {error}")


def not_askable(error: Exception, path: str) -> DefinitionError:
    """Return the error for an argument that no store can hold: invalid Unicode, or a number beyond 64 bits."""
    return DefinitionError(f"{path} cannot be asked for that: {error}")


def connect(path: str, *, synchronous: str, busy_seconds: float) -> apsw.Connection:
    """Return a connection with the settings that the reader and the writer share."""
    if _is_frozen(path):
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        connection = apsw.Connection(f"file:{quote(path)}?immutable=1", flags=flags)
    else:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    connection.set_busy_timeout(int(busy_seconds * 1000))
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.pragma("trusted_schema", False)
    connection.pragma("cell_size_check", True)
    connection.pragma("mmap_size", 0)
    connection.pragma("synchronous", synchronous)
    return connection


def _is_frozen(path: str) -> bool:
    """Whether the file lies in a read-only folder, such as a copy on a read-only disk.

    SQLite must then open it as immutable, because it cannot create the lock files beside it.
    """
    file = Path(path)
    if os.access(file.parent, os.W_OK) or not file.exists() or Path(f"{path}-shm").exists():
        return False
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        raise StoreUnavailable(
            f"{path} needs its log {wal.name}, which SQLite cannot read in a read-only folder; copy both to a writable "
            "folder"
        )
    return True


def refuse_old_sqlite(version: str) -> None:
    """Raise if this SQLite library may corrupt a shared database."""
    if tuple(int(part) for part in version.split(".")[:3]) < OLDEST_SQLITE:
        raise StoreError(
            f"SQLite {version} can corrupt a database that several processes write; "
            f"Keepstep needs {'.'.join(map(str, OLDEST_SQLITE))} or newer: upgrade the apsw package"
        )


class Reader:
    """The reading connection, which never waits for a writer."""

    def __init__(self, path: str, *, busy_seconds: float) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._gone = ""
        self._connection = connect(path, synchronous="FULL", busy_seconds=busy_seconds)
        self._connection.pragma("query_only", True)
        self._cursor: Cursor = self._connection.cursor()

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Run `work` with a cursor, in one consistent view of the store."""
        if self._gone:
            raise StoreError(self._gone)
        with self._lock:
            if self._gone:
                raise StoreError(self._gone)
            cursor = self._cursor
            try:
                cursor.execute("BEGIN")
                try:
                    return work(cursor)
                finally:
                    if self._connection.in_transaction:
                        cursor.execute("COMMIT")
            except (apsw.Error, UnicodeDecodeError) as error:
                raise translated(error, self._path) from error
            except (UnicodeEncodeError, OverflowError) as error:
                raise not_askable(error, self._path) from None

    def close(self) -> None:
        with self._lock:
            if not self._gone:
                self._gone = f"the store {self._path} is closed"
                self._connection.close()

    def abandon(self) -> None:
        """Become unusable in a forked child."""
        self._gone = (
            f"the store {self._path} was opened by the process that forked this one (pid {os.getppid()}): open it again"
        )
