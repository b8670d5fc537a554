"""The two connections of a SQLite store, one that writes and one that reads, and what SQLite's errors mean."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import apsw

from ..errors import CheckpointCorrupt, DefinitionError, SchemaMismatch, StoreError, StoreFull, StoreUnavailable
from ..ports import WouldBlock
from .liveness import Turnstile, lock_holder
from .migrations import pending

T = TypeVar("T")


class Cursor(Protocol):
    """What is used of apsw's cursor; the schema, not the type checker, knows what a row holds."""

    def execute(self, statements: str, bindings: Any = ..., /) -> Any: ...
    def executemany(self, statements: str, bindings: Any, /) -> Any: ...


#: Older ones can corrupt a database that two processes write (the WAL-reset bug, 3.7.0 to 3.51.2).
OLDEST_SQLITE = (3, 51, 3)

#: Written into the file's header, so that it is known for a Keepstep store: "Keep" in ASCII.
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

#: Errors that say something about the store, not about the statement.
OUTAGES = (*_UNAVAILABLE, apsw.FullError, apsw.CorruptError, apsw.NotADBError)

#: A table or column of ours is gone. Tables of users, in transactional steps, are named otherwise.
_LACKING = re.compile(r"no such (table|column): .*keepstep_")


def translated(error: apsw.Error | UnicodeDecodeError, path: str, *, committing: bool = False) -> StoreError:
    """SQLite's error as one of Keepstep's. A commit that failed while it was made durable may have happened."""
    if isinstance(error, apsw.FullError):
        return StoreFull(f"{path}: no room left to write ({error})")
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError, UnicodeDecodeError)):
        return CheckpointCorrupt(f"{path} is damaged: {error}; restore it, or copy out what can be read")
    if isinstance(error, apsw.ConstraintError) and "keepstep_" in str(error):
        return CheckpointCorrupt(
            f"{path}: there is something already that should follow what is known of a run ({error})"
        )
    if isinstance(error, _UNAVAILABLE):
        unavailable = StoreUnavailable(f"{path}: {error}", unknown=committing and isinstance(error, apsw.IOError))
        unavailable.denied = isinstance(error, apsw.ReadOnlyError)
        return unavailable
    if isinstance(error, apsw.SQLError) and _LACKING.match(str(error)):
        return SchemaMismatch(f"{path} is no whole Keepstep store ({error}); restore it from a copy")
    return StoreError(f"{path}: {type(error).__name__}: {error}")


def _not_askable(error: Exception, path: str) -> DefinitionError:
    """A text that is no Unicode, or a number beyond 64 bits: no store holds it, so nobody can mean it."""
    return DefinitionError(f"{path} cannot be asked for that: {error}")


def connect(path: str, *, synchronous: str, busy_seconds: float) -> apsw.Connection:
    """A connection with the settings that both need."""
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
    """Whether the file lies where nothing can be written, such as a copy on a disk that is mounted so.

    SQLite then needs to be told that nobody changes it, because it cannot make the files that writers agree by.
    """
    file = Path(path)
    if os.access(file.parent, os.W_OK) or not file.exists() or Path(f"{path}-shm").exists():
        return False
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        raise StoreUnavailable(
            f"{path} belongs together with {wal.name}, which is read only where something can be written: copy both "
            "to another folder"
        )
    return True


def refuse_old_sqlite(version: str) -> None:
    """Raise if this SQLite library may corrupt a shared database."""
    if tuple(int(part) for part in version.split(".")[:3]) < OLDEST_SQLITE:
        raise StoreError(
            f"SQLite {version} can corrupt a database that several processes write; "
            f"Keepstep needs {'.'.join(map(str, OLDEST_SQLITE))} or newer: upgrade the apsw package"
        )


class Writer:
    """The one connection that writes. Any thread may ask; one transaction at a time, in turn with other processes."""

    def __init__(self, path: str, *, synchronous: str, busy_seconds: float) -> None:
        self._path = path
        self._busy_seconds = busy_seconds
        self._timeout = busy_seconds
        self._lock = threading.Lock()
        self._gone = ""
        self.connection = connect(path, synchronous=synchronous, busy_seconds=busy_seconds)
        self.cursor: Cursor = self.connection.cursor()
        self._turnstile: Turnstile | None = None

    def run(self, work: Callable[[], T], *, wait: bool = True) -> T:
        """Do `work` in one durable transaction: all of it, or nothing and an error."""
        self.check_usable()
        self._enter(wait=wait)
        try:
            self._begin(wait=wait)
            try:
                result = work()
            except (apsw.Error, UnicodeDecodeError) as error:
                raise translated(error, self._path) from error
            except (UnicodeEncodeError, OverflowError) as error:
                raise _not_askable(error, self._path) from None
            self._commit()
            return result
        finally:
            self._leave()

    def rewrite(self) -> None:
        """Write the whole file anew, and empty the log, so that nothing that was removed is left in either."""
        self.check_usable()
        self._enter(wait=True)
        try:
            self.cursor.execute("VACUUM")
            deadline = time.monotonic() + self._busy_seconds
            while self.cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0][0]:
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"{self._path}: another process reads what was there before, so the log beside the file could "
                        "not be emptied yet; do it again"
                    )
        except apsw.Error as error:
            raise translated(error, self._path) from error
        finally:
            self._leave()

    def check_usable(self) -> None:
        """Raise if the store is closed, or belongs to the process that forked this one."""
        if self._gone:
            raise StoreError(self._gone)

    def foreign_writes(self) -> int | None:
        """A number that differs when another connection has written since; None while this one is busy."""
        self.check_usable()
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return int(self.cursor.execute("PRAGMA data_version").fetchall()[0][0])
        except apsw.Error as error:
            raise translated(error, self._path) from error
        finally:
            self._lock.release()

    def _enter(self, *, wait: bool) -> None:
        deadline = time.monotonic() + self._busy_seconds if wait else 0.0
        if not self._lock.acquire(timeout=self._busy_seconds if wait else 0):
            if not wait:
                raise WouldBlock
            raise self._blocked()
        try:
            self.check_usable()
            if self._turnstile is None:
                self._turnstile = self._open_turnstile()
            if not self._turnstile.enter(deadline - time.monotonic() if wait else 0.0):
                if not wait:
                    raise WouldBlock
                raise self._blocked()
        except BaseException:
            self._lock.release()
            raise

    def _leave(self) -> None:
        if self.connection.in_transaction:
            self._rollback()
        if self._turnstile is not None:
            self._turnstile.leave()
        self._lock.release()

    def _begin(self, *, wait: bool) -> None:
        timeout = self._busy_seconds if wait else 0.0
        if timeout != self._timeout:
            self.connection.set_busy_timeout(int(timeout * 1000))
            self._timeout = timeout
        try:
            self.cursor.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            if not wait:
                raise WouldBlock from None
            raise self._blocked() from None
        except apsw.Error as error:
            raise translated(error, self._path) from error

    def _commit(self) -> None:
        try:
            self.cursor.execute("COMMIT")
        except apsw.Error as error:
            raise translated(error, self._path, committing=True) from error

    def _rollback(self) -> None:
        try:
            self.cursor.execute("ROLLBACK")
        except apsw.Error:
            if self.connection.in_transaction:
                raise

    def _blocked(self) -> StoreUnavailable:
        holder = lock_holder(f"{self._path}-turnstile", f"{self._path}-shm")
        return StoreUnavailable(f"{self._path} has been locked by {holder} for more than {self._busy_seconds:g} s")

    def _open_turnstile(self) -> Turnstile:
        try:
            return Turnstile(f"{self._path}-turnstile")
        except OSError as error:
            raise StoreUnavailable(f"{self._path} cannot be written: {error}") from None

    def migrate(self) -> None:
        """Make the schema, or bring it up to date. Nothing is written to a file that is not a Keepstep store."""
        if not self._pending():
            return
        if self.connection.readonly("main"):
            raise StoreUnavailable(
                f"{self._path} was written by an older Keepstep and cannot be brought up to date, because it cannot be "
                "written: copy it to another folder"
            )
        if self.connection.pragma("journal_mode") != "wal":
            self._enter(wait=True)
            try:
                self.connection.pragma("journal_mode", "wal")
            finally:
                self._leave()
        self.run(self._apply_scripts)

    def _pending(self) -> bool:
        return bool(pending("sqlite", self._version(), self._path))

    def _version(self) -> int:
        """The version of the schema in the file, 0 for an empty file."""
        tables = {name for (name,) in self.cursor.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if not tables:
            return 0
        if self.connection.pragma("application_id") != APPLICATION_ID or "keepstep_meta" not in tables:
            raise SchemaMismatch(
                f"{self._path} is a SQLite database of another application ({', '.join(sorted(tables)[:3])}, …): "
                "choose another path; Keepstep writes only to files that it made"
            )
        rows = self.cursor.execute("SELECT value FROM keepstep_meta WHERE name = 'schema'").fetchall()
        version = str(rows[0][0]) if rows else "0"
        if not version.isdecimal() or len(version) > 9:
            raise SchemaMismatch(f"{self._path}: its schema is {version[:60]!r}, which no Keepstep wrote")
        return int(version)

    def _apply_scripts(self) -> None:
        # Read again inside the transaction: another process may have been first.
        for script in pending("sqlite", self._version(), self._path):
            self.connection.execute(script.sql).fetchall()
            self.cursor.execute("INSERT OR REPLACE INTO keepstep_meta VALUES ('schema', ?)", (str(script.number),))
        self.connection.pragma("application_id", APPLICATION_ID)

    def close(self) -> None:
        with self._lock:
            if not self._gone:
                self._gone = f"the store {self._path} is closed"
                self.connection.close()
                if self._turnstile is not None:
                    self._turnstile.close()

    def abandon(self) -> None:
        """Become unusable in a forked child, without touching what the parent uses."""
        self._gone = (
            f"the store {self._path} was opened by the process that forked this one (pid {os.getppid()}): open it again"
        )
        if self._turnstile is not None:
            self._turnstile.close()


class Reader:
    """The connection that reads; it never waits for a writer."""

    def __init__(self, path: str, *, busy_seconds: float) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._gone = ""
        self._connection = connect(path, synchronous="FULL", busy_seconds=busy_seconds)
        self._connection.pragma("query_only", True)
        self._cursor: Cursor = self._connection.cursor()

    def read(self, work: Callable[[Cursor], T]) -> T:
        """Do `work` with a cursor, in one consistent view of the store."""
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
                raise _not_askable(error, self._path) from None

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
