"""The session that a PostgreSQL store holds: for notifications, and for the few statements of an idle worker."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import psycopg

from ...errors import StoreError, StoreUnavailable
from ...ports import Clock
from .pool import Address, Connection, close_socket, shut_socket
from .statements import DUE

log = logging.getLogger("keepstep")

#: Maximum time in seconds to wait for a new session, or for an answer of the session.
PATIENCE_SECONDS = 10.0
#: Shortest and longest pause in seconds before a lost session is opened again. The first attempt is immediate; each
#: pause doubles the one before.
_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
#: Time in seconds after which an idle session is checked. The heartbeats of a worker come more often.
_IDLE_SECONDS = 8.0


class WorkerSession:
    """One session, held by its own thread and reopened when it is lost."""

    def __init__(self, address: Address, clock: Clock, answers_after: Callable[[], float | None]) -> None:
        """`answers_after` tells after how many seconds a worker here claims when runs are due; None is never."""
        self._address = address
        self._clock = clock
        self._answers_after = answers_after
        self._answers_at = float("inf")
        self.channel = "keepstep_" + sha256(address.schema.encode()).hexdigest()[:24]
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._pid = 0
        self._read_end, self._write_end = os.pipe()
        self._tidings: set[str] = set()
        self._tasks: list[tuple[Callable[[Connection], Any], _Reply]] = []
        self._turned_at = 0.0
        self._ended = False
        #: Number of notifications received: those for any worker, and those for each worker.
        self.received = 0
        self.received_by: dict[str, int] = {}
        #: Number of times that a worker of this process was called to claim.
        self.called = 0
        #: Workers of this process; notifications for them are urgent.
        self.workers: set[str] = set()
        #: Functions to call at once when a run may be due, or when a worker's run was signalled.
        self.alerts: list[Callable[[], None]] = []
        #: Functions to call at once when something was written that readers of runs follow.
        self.readers: list[Callable[[], None]] = []

    # -- called from any thread ----------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Keep the session open from now on."""
        with self._mutex:
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._run, name="keepstep-session", daemon=True)
                self._thread.start()

    def notify(self, notifications: Iterable[str]) -> None:
        """Notify every other session soon; polling finds lost notifications."""
        self._tidings.update(notifications)
        self.listen()
        self._wake()

    def ask(self, task: Callable[[Connection], Any]) -> Any:
        """Run a task in the session and return its answer."""
        reply = _Reply()
        self._tasks.append((task, reply))
        self.listen()
        self._wake()
        return reply.wait(self._address)

    @property
    def is_free(self) -> bool:
        """Whether the session is open and has nothing to do."""
        return self._connection is not None and not self._tasks and not self._ended

    def give_up_silent(self, seconds: float) -> int:
        """End a session that has been silent for longer; the thread opens another."""
        connection = self._connection
        if connection is None or time.monotonic() - self._turned_at <= seconds + _IDLE_SECONDS:
            return 0
        self._turned_at = time.monotonic()
        shut_socket(connection)
        return 1

    def close_unused(self) -> None:
        """Keep the session: an idle worker needs it."""

    def close(self) -> None:
        """End the session after its last notification."""
        with self._mutex:
            self._ended = True
            thread = self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE_SECONDS)
        if thread is None or not thread.is_alive():
            self._close_pipe()

    def end_soon(self) -> None:
        """End the session soon and wait for nothing, after the store was garbage-collected without being closed."""
        self._ended = True
        self._wake()

    def cut_off(self) -> None:
        """End the session now, even while it waits."""
        self.end_soon()
        if (connection := self._connection) is not None:
            shut_socket(connection)

    def __del__(self) -> None:
        self._close_pipe()

    def abandon(self) -> None:
        """Close the session's socket in a forked child, whose copy would keep the parent's session alive."""
        self._ended = True
        if self._connection is not None:
            close_socket(self._connection)
        self._close_pipe()

    def _close_pipe(self) -> None:
        ends, self._read_end, self._write_end = (self._read_end, self._write_end), -1, -1
        for end in ends:
            if end >= 0:
                os.close(end)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write_end, b".")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.0
        while True:
            try:
                self._begin()
                pause = 0.0
                self._serve()
                return
            except (psycopg.Error, StoreError) as error:
                if not self._ended and not pause:
                    log.warning("the session of this store was lost and is opened again: %s", _brief(error))
                self._refuse_tasks(error)
            except Exception:
                log.exception("the session of this store failed and is opened again")
            finally:
                self._forget()
            if self._ended:
                return
            time.sleep(pause)
            pause = min(max(2 * pause, _PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)

    def _begin(self) -> None:
        connection = self._address.connect()
        self._turned_at = time.monotonic()
        self._connection = connection
        connection.add_notify_handler(self._hear)
        ((self._pid,),) = connection.execute("SELECT pg_backend_pid()").fetchall()  # a proxy reports another pid
        connection.execute(f"LISTEN {self.channel}")
        self.received += 1  # notifications may have been missed without a session, so count one of each kind
        self.called += 1

    def _serve(self) -> None:
        connection = self._connection
        if connection is None:
            return
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(self._read_end, select.POLLIN)
        while True:
            self._turned_at = time.monotonic()
            self._send(connection)
            self._do_tasks(connection)
            if self._ended and not self._tidings:
                return
            late_seconds = max(0.0, self._answers_at - time.monotonic())
            ready = dict(poll.poll(min(_IDLE_SECONDS, late_seconds) * 1000))
            if self._read_end in ready:
                os.read(self._read_end, 65_536)
            if time.monotonic() >= self._answers_at:
                self._call()
            elif not ready:
                connection.execute("SELECT 1")
            if connection.fileno() in ready:
                connection.pgconn.consume_input()
                while (notify := connection.pgconn.notifies()) is not None:
                    self._receive(notify.extra.decode("utf-8", "replace"), notify.be_pid)

    def _do_tasks(self, connection: Connection) -> None:
        while self._tasks:
            task, reply = self._tasks[0]
            if not reply.is_awaited:
                self._tasks.pop(0)
                continue
            try:
                answer = task(connection)
            except Exception as error:
                if connection.closed:  # the session has ended, and the error is passed to all that wait
                    raise
                connection.rollback()
                self._tasks.pop(0)
                reply.fail(error)
            else:
                self._tasks.pop(0)
                reply.give(answer)

    def _refuse_tasks(self, error: Exception) -> None:
        while self._tasks:
            self._tasks.pop(0)[1].fail(error)

    def _send(self, connection: Connection) -> None:
        notifications, self._tidings = self._tidings, set()
        if notifications:
            connection.execute(
                "SELECT pg_notify(%s, what) FROM unnest(%s::text[]) what", (self.channel, list(notifications))
            )

    def _hear(self, notify: psycopg.Notify) -> None:
        self._receive(notify.payload, notify.pid)

    def _receive(self, what: str, pid: int) -> None:
        if pid == self._pid:
            return
        if what.startswith("@"):
            self.received_by[what[1:]] = self.received_by.get(what[1:], 0) + 1
            urgent = what[1:] in self.workers
        else:
            self.received += 1
            urgent = what.startswith(DUE) and self._is_called(what[1:])
            for tell_reader in list(self.readers):
                tell_reader()
        if urgent:
            self._alert()

    def _is_called(self, later: str) -> bool:
        """Whether a worker here is to claim at once; not all of a fleet are. `later` may say when a run is due."""
        seconds = self._answers_after()
        if seconds is None:
            return False
        with contextlib.suppress(ValueError):  # the text of another client may be anything
            seconds += max(0.0, float(later or "0") - self._clock.now())
        if seconds > 0.0:
            self._answers_at = min(self._answers_at, time.monotonic() + seconds)
            return False
        self.called += 1
        return True

    def _call(self) -> None:
        self._answers_at = float("inf")
        self.called += 1
        self._alert()

    def _alert(self) -> None:
        for alert in list(self.alerts):
            alert()

    def _forget(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Reply:
    """A place for one answer."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self.is_awaited = True
        self._answer: Any = None
        self._error: Exception | None = None

    def give(self, answer: Any) -> None:
        self._answer = answer
        self._there.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._there.set()

    def wait(self, address: Address) -> Any:
        if not self._there.wait(PATIENCE_SECONDS):
            self.is_awaited = False
            raise StoreUnavailable(f"{address.text} has not answered for {PATIENCE_SECONDS:g} s")
        if self._error is not None:
            raise address.translated(self._error) if not isinstance(self._error, StoreError) else self._error
        return self._answer


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())
