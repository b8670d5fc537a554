"""Plain functions run in daemon threads: one that never returns cannot keep the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context
from typing import Any

#: An idle thread beyond this leaves.
IDLE_SECONDS = 10.0


class ThreadExecutor:
    """At most `limit` daemon threads; more work waits its turn."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Context, Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._waiting = 0
        #: Functions that have been taken on and have not returned.
        self.at_work = 0

    def submit(self, context: Context, function: Callable[[], Any]) -> Future[Any]:
        """Run a function in a thread, with these context variables."""
        future: Future[Any] = Future()
        with self._lock:
            self._work.put((future, context, function))
            self._waiting += 1
            self.at_work += 1
            if self._waiting > self._idle and self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._loop, name=f"{self._name}-{self._threads}", daemon=True).start()
        return future

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                future, context, function = self._work.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    self._idle -= 1
                    if self._waiting == 0 or self._threads > 1:
                        self._threads -= 1
                        return
                continue
            with self._lock:
                self._idle -= 1
                self._waiting -= 1
            try:
                _do(future, context, function)
            finally:
                with self._lock:
                    self.at_work -= 1
            del future, context, function


def _do(future: Future[Any], context: Context, function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = context.run(function)
    except BaseException as error:  # noqa: BLE001 - whatever it was belongs to the one who asked
        future.set_exception(error)
    else:
        future.set_result(value)
