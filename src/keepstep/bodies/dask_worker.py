"""Bodies on a Dask worker: each is performed in a warm child process, because a thread of Dask cannot be stopped."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
from distributed import WorkerPlugin, get_worker
from distributed.utils import sync
from tornado.ioloop import PeriodicCallback

from ..executors.connection import end_of, kill, start_process
from ..executors.task import (
    Begun,
    Ended,
    Frames,
    FromWorker,
    Given,
    Lost,
    Ready,
    Run,
    Stop,
    Task,
    ToWorker,
    framed,
    read_report,
)
from .dask_scheduler import NAME

if TYPE_CHECKING:
    from distributed import Worker

log = logging.getLogger("keepstep")

#: Bytes of an outcome that go through the scheduler. A larger one stays on its Dask worker until it is fetched.
LARGE_BYTES = 100_000
#: Seconds after which a process without a body ends.
IDLE_SECONDS = 60.0
#: Seconds that a body may take beyond its time. Its worker stops it in time; this is for one that nobody asks for.
LATE_SECONDS = 5.0
CHUNK = 1 << 16


class Home(msgspec.Struct, frozen=True, array_like=True):
    """The kind of process in which a body runs. Those of one program share it, as long as that runs."""

    #: Differs after each start of the program, so that its new code is imported.
    program: str
    #: Folders of the program's code, which are searched after those of the Dask worker.
    path: tuple[str, ...] = ()
    memory_bytes: int = 0
    levels: dict[str, int] = {}


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """The argument of a task of Dask."""

    task: Task
    home: Home
    grace_seconds: float = 1.0


encode_sent = msgspec.msgpack.Encoder().encode
read_sent = msgspec.msgpack.Decoder(Sent).decode


def run_body(data: bytes) -> bytes | None:
    """Perform a body on this Dask worker. Return its outcome if that is large, and None if it has been reported."""
    plugin: Any = get_worker().plugins[NAME]
    outcome: bytes | None = plugin.perform(read_sent(data))
    return outcome


class _Child:
    """A process that performs one body at a time."""

    def __init__(self, home: Home) -> None:
        self.kind = encode_sent(home)
        given = Given(0, home.memory_bytes, home.levels)
        self._process, self._line = start_process("child", given, home.path)
        self._frames = Frames()
        self._messages: list[bytes] = []
        self.number = 0
        self.idle_since = 0.0
        self.has_ended = False
        try:
            if not self.read(None) or not isinstance(read_report(self._messages.pop(0)), Ready):
                raise RuntimeError(f"the process for bodies {self.end()} before it was ready")
        except BaseException:
            self.kill()
            raise

    def send(self, message: FromWorker) -> None:
        with contextlib.suppress(OSError):  # the end of the process is read
            self._line.sendall(framed(message))

    def read(self, seconds: float | None) -> bool:
        """Wait for messages. Return False if the process has ended. Raise `TimeoutError` after some seconds."""
        self._line.settimeout(seconds)
        while not self._messages:
            try:
                data = self._line.recv(CHUNK)
            except ConnectionError:
                data = b""
            if not data:
                return False
            self._messages = self._frames.take(data)
        return True

    def taken(self) -> list[bytes]:
        """Return the messages that have been read."""
        found, self._messages = self._messages, []
        return found

    def is_there(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        kill(self._process)

    def end(self) -> str:
        """End the process, and return how it has ended."""
        self.has_ended = True
        self.kill()
        self._line.close()
        try:
            return end_of(self._process.wait(10.0))
        except subprocess.TimeoutExpired:
            return end_of(None)


class _Performance:
    """A body that is being performed in a child. It may be stopped from another thread."""

    def __init__(self, plugin: WorkerBodies, sent: Sent, child: _Child) -> None:
        self._plugin = plugin
        self._sent = sent
        self.child = child
        self._lock = threading.Lock()
        self._has_begun = self.is_stopping = self._has_ended = False

    def begin(self) -> bool:
        """Give the body to the child, unless it has been stopped before."""
        with self._lock:
            if self.is_stopping:
                return False
            self._has_begun = True
            self.child.number += 1
            self.child.send(Run(self.child.number, self._sent.task))
            return True

    def stop(self) -> None:
        """End the body: politely first, then with its process. Called in the loop of the Dask worker."""
        with self._lock:
            if self.is_stopping or self._has_ended:
                return
            self.is_stopping = True
            if self._has_begun:
                self.child.send(Stop(self.child.number))
        self._plugin.worker.loop.call_later(self._sent.grace_seconds, self.kill)

    def kill(self) -> None:
        with self._lock:
            if not self._has_ended:
                self.child.kill()

    def end(self) -> None:
        """Note that the child is free, so that it is not killed for this body."""
        with self._lock:
            self._has_ended = True


class WorkerBodies(WorkerPlugin):
    """Performs the bodies of one Dask worker."""

    name = NAME
    idempotent = True

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._now: dict[str, _Performance] = {}
        worker.periodic_callbacks[NAME] = looking = PeriodicCallback(self._end_idle, IDLE_SECONDS * 250)
        looking.start()

    def teardown(self, worker: Worker) -> None:
        for one in list(self._now.values()):
            one.kill()
        for child in self._idle:
            child.kill()

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Stop a body whose task the scheduler has let go."""
        if finish in ("cancelled", "released", "forgotten") and (one := self._now.get(key)) is not None:
            one.stop()

    def perform(self, sent: Sent) -> bytes | None:
        """Perform a body in this thread."""
        name, worker = sent.task.name, self.worker
        child = self._child(sent.home)
        one = self._now[name] = _Performance(self, sent, child)
        try:
            may_begin = sync(worker.loop, worker.scheduler.keepstep_begin, name=name, worker=worker.address)
            if not may_begin or not one.begin():
                if may_begin:
                    self._report(name, [], msgspec.msgpack.encode(Lost(0, "was stopped")))
                return None
            outcome = self._outcome(one, sent.task)
        finally:
            one.end()
            self._rest(child)
            del self._now[name]
        is_large = len(outcome) > LARGE_BYTES
        self._report(name, [], None if is_large else outcome, is_large=is_large)
        return outcome if is_large else None

    def _outcome(self, one: _Performance, task: Task) -> bytes:
        """Wait for the outcome of a body, and pass its reports on."""
        child = one.child
        deadline: float | None = None
        while True:
            try:
                is_there = child.read(None if deadline is None else max(0.001, deadline - time.monotonic()))
            except TimeoutError:
                deadline = None
                self.worker.loop.add_callback(one.stop)
                continue
            if not is_there:
                why = child.end()
                return msgspec.msgpack.encode(Lost(0, "was stopped" if one.is_stopping else why))
            reports: list[bytes] = []
            begins = False
            for data in child.taken():
                message: ToWorker = read_report(data)
                if isinstance(message, Ended):
                    self._report(task.name, reports, None, begins=begins)
                    return data
                if isinstance(message, Begun):
                    begins = True
                    if task.seconds is not None:
                        deadline = time.monotonic() + task.seconds + LATE_SECONDS
                else:
                    reports.append(data)
            self._report(task.name, reports, None, begins=begins)

    def _report(
        self, name: str, reports: list[bytes], outcome: bytes | None, *, begins: bool = False, is_large: bool = False
    ) -> None:
        if reports or outcome is not None or begins or is_large:
            message: dict[str, Any] = {"op": "keepstep_report", "name": name, "reports": reports, "outcome": outcome}
            message |= {"begins": begins, "is_large": is_large}
            self.worker.loop.add_callback(self.worker.batched_send, message)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _child(self, home: Home) -> _Child:
        """Return a process that is free, or a new one."""
        kind = encode_sent(home)
        with self._lock:
            for place in range(len(self._idle) - 1, -1, -1):
                if self._idle[place].kind == kind and self._idle[place].is_there():
                    return self._idle.pop(place)
        return _Child(home)

    def _rest(self, child: _Child) -> None:
        """Keep a process for the next body, for a while."""
        child.idle_since = time.monotonic()
        if not child.has_ended:
            with self._lock:
                self._idle.append(child)

    def _end_idle(self) -> None:
        now = time.monotonic()
        with self._lock:
            over = [child for child in self._idle if now - child.idle_since >= IDLE_SECONDS]
            self._idle = [child for child in self._idle if child not in over]
        for child in over:
            threading.Thread(target=child.end, daemon=True).start()
