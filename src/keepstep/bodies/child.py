"""The process of a worker's pool: it performs one body at a time, and ends at once when its worker does.

One end of a socket is given to it, whose other end only the worker holds. A thread reads it,
also while a body runs. The socket ends with the worker, whatever has ended that.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import DefinitionError
from ..executors.task import (
    Begun,
    Done,
    Failed,
    Frames,
    FromWorker,
    Given,
    Lost,
    Ready,
    Release,
    Report,
    Run,
    Stop,
    ToWorker,
    framed,
    read_order,
)
from .perform import FarLog, Stopped, perform

#: Exit code of a process whose worker has ended.
ORPHANED = 70
#: Bytes that are read from the worker at once.
CHUNK = 1 << 16


class Child:
    """A process that performs the bodies which its worker sends, one after the other."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._writing = threading.Lock()
        self._tasks: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self._dropped: set[int] = set()
        #: The body that runs, and the one that is to stop; 0 for none.
        self._current = 0
        self._stopping = 0
        self._cancel: Callable[[], None] | None = None
        self._main = threading.get_ident()
        self._is_sending = False
        self._is_forked = False

    def run(self) -> None:
        """Perform bodies until the worker ends."""
        logs = FarLog(self._log)
        logging.getLogger().addHandler(logs)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=lambda: self._forked(logs))
        threading.Thread(target=self._read, name="keepstep-lifeline", daemon=True).start()
        self._send(Ready())
        with asyncio.Runner() as runner:
            while True:
                order = self._tasks.get()
                try:
                    outcome = self._performed(order, runner.run)
                except Stopped:
                    outcome = Lost(order.body, "stopped")
                if self._is_forked:
                    _exit_fork()
                self._send(outcome)

    def _performed(self, order: Run, run: Callable[..., Any]) -> Done | Failed | Lost:
        if order.body in self._dropped:
            self._dropped.discard(order.body)
            return Lost(order.body, "stopped")

        def tell(message: Report) -> None:
            # A thread or a task that outlives its body keeps its number, so the worker ignores it.
            self._send(msgspec.structs.replace(message, body=order.body))

        self._current = order.body
        signal.signal(signal.SIGTERM, self._on_stop)  # the body before may have set another one
        try:
            outcome = perform(order.task, tell, lambda: self._send(Begun(order.body)), run, self._running)
            return msgspec.structs.replace(outcome, body=order.body)
        finally:
            self._current = 0

    def _log(self, message: Report) -> None:
        self._send(msgspec.structs.replace(message, body=self._current))

    def _send(self, message: ToWorker) -> None:
        """Send a message to the worker, from any thread. A stop waits until all of it is sent."""
        if self._is_forked:
            raise DefinitionError("a process that the body of a step has forked cannot speak for the step")
        data = framed(message)
        if threading.get_ident() != self._main:
            with self._writing:
                self._line.sendall(data)
            return
        self._is_sending = True
        try:
            with self._writing:
                self._line.sendall(data)
        finally:
            self._is_sending = False
        self._on_stop()

    def _forked(self, logs: logging.Handler) -> None:
        """Cut the line of a process that a body has forked: only the body itself may speak, and end the line."""
        self._is_forked = True
        self._line.close()
        logging.getLogger().removeHandler(logs)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _release()

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _running(self, cancel: Callable[[], None] | None) -> None:
        """Note how a body of async code is stopped."""
        self._cancel = cancel
        if cancel is not None:
            self._on_stop()

    def _stop(self, body: int) -> None:
        if body == self._current:
            self._stopping = body
            signal.pthread_kill(self._main, signal.SIGTERM)
        else:
            self._dropped.add(body)

    def _on_stop(self, *_: object) -> None:
        """Stop the body that runs. The main thread calls this, between two steps of the interpreter."""
        if not self._stopping or self._stopping != self._current or self._is_sending:
            return
        self._stopping = 0
        if self._cancel is None:
            raise Stopped
        self._cancel()

    # -- the lifeline --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._take_all()
        except BaseException:  # noqa: BLE001 - such as a MemoryError; without this thread, no worker reaches the body
            traceback.print_exc()
            leave()

    def _take_all(self) -> None:
        frames = Frames()
        while True:
            try:
                data = self._line.recv(CHUNK)
            except OSError:
                data = b""
            if not data:
                leave()
            for one in frames.take(data):
                self._take(read_order(one))

    def _take(self, message: FromWorker) -> None:
        match message:
            case Run():
                self._tasks.put(message)
            case Stop():
                self._stop(message.body)
            case Release():
                pass  # nothing of a body is kept here


def _hold() -> None:
    """Let a SIGTERM wait that comes while a process is forked, until its handler there is set."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _exit_fork() -> None:
    """End a forked process that has returned from the body of its parent."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def leave() -> None:
    """End this process and those that its bodies have started."""
    with contextlib.suppress(OSError):
        if os.getpgid(0) == os.getpid():  # the leader of a group of its own
            os.killpg(0, signal.SIGKILL)
    os._exit(ORPHANED)


def main(made: Callable[[socket.socket, Given], Child] = lambda line, _: Child(line)) -> None:
    """Perform bodies for the worker that holds the other end of the socket, as the first argument describes."""
    given = msgspec.json.decode(sys.argv[1], type=Given)
    del sys.argv[1:]
    faulthandler.enable()
    if given.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (given.memory_bytes, given.memory_bytes))
    for name, level in given.levels.items():
        logging.getLogger(name or None).setLevel(level)
    made(socket.socket(fileno=given.descriptor), given).run()
