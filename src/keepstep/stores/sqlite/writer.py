"""The writing connection of a SQLite store: one transaction at a time, in turn with other processes."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import apsw

from ...errors import SchemaMismatch, StoreError, StoreUnavailable
from ...ports import WouldBlock
from ..migrations import pending
from ..os_locks import WorkerLocks, lock_holder
from .connection import APPLICATION_ID, Cursor, connect, not_askable, translated

if TYPE_CHECKING:
    from ..upgrade import OldWorker

T = TypeVar("T")

#: Maximum time in seconds for which emptying the log waits for readers, and thereby blocks other writers.
_READERS_SECONDS = 0.2

#: Maximum time in seconds to yield to the process that holds the "next" lock. Bounds the damage if that process is
#: stopped (SIGSTOP).
YIELD_SECONDS = 0.1
#: Time in seconds to ignore the "next" lock after a stopped process was bypassed.
_BYPASS_SECONDS = 1.0
#: Shortest and longest interval in seconds between two attempts to take the lock; it grows with the wait.
_POLL_SECONDS = 0.0001
_SLOW_POLL_SECONDS = 0.002


class Turnstile:
    """Cross-process write lock with FIFO hand-over: a waiter goes before a process that just released it.

    SQLite's own busy handler sleeps and retries, so a busy neighbour always wins against a sleeper. A single lock has
    the same problem: a process that releases and retakes it is faster than a waiter that must be woken. Therefore a
    waiter holds a second, "next" lock, and while that is held no other process takes the first. Locks are polled,
    because a wait in the kernel cannot have a timeout.
    """

    def __init__(self, path: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        try:
            self._next = os.open(f"{path}-next", flags, 0o666)
        except OSError:
            os.close(self._fd)
            raise
        self._bypass_until = 0.0
        self._closed = False
        #: Release the lock. Every write calls it, so it is a partial of a C function, without a Python frame.
        self.leave: Callable[[], None] = partial(fcntl.flock, self._fd, fcntl.LOCK_UN)

    def enter(self, seconds: float) -> bool:
        """Take the lock within `seconds`; return False on a timeout. Only one thread at a time may call this."""
        begun = now = time.monotonic()
        yield_until = begun if begun < self._bypass_until else begun + YIELD_SECONDS
        is_next = False
        try:
            while True:
                is_next = is_next or _locked(self._next)
                if _locked(self._fd):
                    if is_next:
                        return True
                    if now >= yield_until:
                        if begun >= self._bypass_until:  # otherwise the bypass would never end
                            self._bypass_until = now + _BYPASS_SECONDS
                        return True
                    fcntl.flock(self._fd, fcntl.LOCK_UN)  # leave it to the process that holds the "next" lock
                elif begun >= self._bypass_until:
                    yield_until = now + YIELD_SECONDS  # the waiter is not late while another process holds the lock
                if now - begun >= seconds:
                    return False
                time.sleep(_POLL_SECONDS if now - begun < YIELD_SECONDS else _SLOW_POLL_SECONDS)
                now = time.monotonic()
        finally:
            if is_next:
                fcntl.flock(self._next, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close both files, also in a forked child, whose copies would keep the parent's locks alive."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)
            os.close(self._next)


def _locked(fd: int) -> bool:
    """Take the lock if it is free; return whether it is held now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Writer:
    """The only writing connection. Any thread may use it: one transaction at a time, in turn with other processes."""

    def __init__(self, path: str, *, synchronous: str, busy_seconds: float) -> None:
        self._path = path
        self._synchronous = synchronous
        self._busy_seconds = busy_seconds
        self._timeout = busy_seconds
        self._lock = threading.Lock()
        self._gone = ""
        self.connection = connect(path, synchronous=synchronous, busy_seconds=busy_seconds)
        self.cursor: Cursor = self.connection.cursor()
        self._turnstile: Turnstile | None = None
        self._leave_turnstile: Callable[[], None]

    def run(self, work: Callable[[], T], *, wait: bool = True, durable: bool = True) -> T:
        """Run `work` in one transaction. If it raises, nothing is written.

        Unless it is `durable`, a loss of power may undo it until the next transaction that is.
        """
        self._enter(wait=wait)
        cursor, committing = self.cursor, False
        try:
            if not durable:
                cursor.execute("PRAGMA synchronous = NORMAL")
            cursor.execute("BEGIN IMMEDIATE")
            result = work()
            committing = True
            cursor.execute("COMMIT")
        except (apsw.Error, UnicodeDecodeError) as error:
            if isinstance(error, apsw.BusyError) and not committing and not self.connection.in_transaction:
                raise (self._blocked() if wait else WouldBlock()) from None
            raise translated(error, self._path, committing=committing) from error
        except (UnicodeEncodeError, OverflowError) as error:
            raise not_askable(error, self._path) from None
        else:
            return result
        finally:
            if self.connection.in_transaction:
                self._rollback()
            if not durable:
                cursor.execute(f"PRAGMA synchronous = {self._synchronous}")
            self._leave_turnstile()
            self._lock.release()

    def rewrite(self) -> None:
        """Rewrite the whole file and empty the log, so that neither holds removed data."""
        self._alone("VACUUM", self._busy_seconds)
        deadline = time.monotonic() + self._busy_seconds
        while self._alone("PRAGMA wal_checkpoint(TRUNCATE)", _READERS_SECONDS)[0][0]:
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"{self._path}: the log beside the file cannot be emptied, because another process still reads "
                    "older data; do it again"
                )
            time.sleep(_READERS_SECONDS)  # lets other writers in before the next try

    def _alone(self, statement: str, busy_seconds: float) -> list[Any]:
        """Execute a statement outside any transaction, waiting up to `busy_seconds` for readers."""
        self._enter(wait=True)
        try:
            self._wait_at_most(busy_seconds)
            rows: list[Any] = self.cursor.execute(statement).fetchall()
        except apsw.Error as error:
            raise translated(error, self._path) from error
        else:
            return rows
        finally:
            self._leave()

    def check_usable(self) -> None:
        """Raise if the store is closed, or belongs to the process that forked this one."""
        if self._gone:
            raise StoreError(self._gone)

    def foreign_writes(self) -> int | None:
        """Return a number that changes with every write of another connection; None while this one is busy."""
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
        self.check_usable()
        deadline = time.monotonic() + self._busy_seconds if wait else 0.0
        if not self._lock.acquire(timeout=self._busy_seconds if wait else 0):
            if not wait:
                raise WouldBlock
            raise self._blocked()
        try:
            self.check_usable()
            seconds = self._busy_seconds if wait else 0.0
            if seconds != self._timeout:
                self._wait_at_most(seconds)
            if self._turnstile is None:
                self._turnstile = self._open_turnstile()
                self._leave_turnstile = self._turnstile.leave
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
        self._leave_turnstile()
        self._lock.release()

    def _wait_at_most(self, seconds: float) -> None:
        self.connection.set_busy_timeout(int(seconds * 1000))
        self._timeout = seconds

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

    def migrate(self, locks: WorkerLocks) -> None:
        """Make the schema, or bring it up to date after older workers have stopped.

        Nothing is written to a file that is not a Keepstep store.
        """
        if not self._pending():
            return
        if self.connection.readonly("main"):
            raise StoreUnavailable(
                f"{self._path} was written by an older Keepstep and cannot be migrated, because it is read-only; copy "
                "it to a writable folder"
            )
        if self._version():
            from ..upgrade import wait_for_old_workers  # noqa: PLC0415 - only for a store of an older version

            wait_for_old_workers(self._path, self._pending, partial(self._living, locks))
        if self.connection.pragma("journal_mode") != "wal":
            self._enter(wait=True)
            try:
                self.connection.pragma("journal_mode", "wal")
            finally:
                self._leave()
        self.run(self._apply_scripts)

    def _living(self, locks: WorkerLocks) -> list[OldWorker]:
        """Return the workers whose lock file is held. Every schema has these columns."""
        from ..upgrade import OldWorker  # noqa: PLC0415 - only for a store of an older version

        rows = self.cursor.execute("SELECT id, host, pid, started_at FROM keepstep_worker WHERE gone_at IS NULL")
        return [OldWorker(*row) for row in rows.fetchall() if locks.proves_life(row[0])]

    def _pending(self) -> bool:
        return bool(pending("sqlite", self._version(), self._path))

    def _version(self) -> int:
        """Return the version of the schema in the file; 0 for an empty file."""
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
        # The version is read again inside the transaction, because another process may have migrated the file.
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
        """Become unusable in a forked child, without touching the parent's connection."""
        self._gone = (
            f"the store {self._path} was opened by the process that forked this one (pid {os.getppid()}): open it again"
        )
        if self._turnstile is not None:
            self._turnstile.close()
