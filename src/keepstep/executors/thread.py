"""The executor of plain functions, on daemon threads, so that a hanging function cannot keep the process alive."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Protocol

from ..ports import BodyTimedOut, Work

#: Time in seconds after which an idle thread ends.
IDLE_SECONDS = 10.0


class Threads(Protocol):
    """Runs plain functions beside the event loop."""

    #: Number of submitted functions that have not returned.
    at_work: int
    #: Number of functions that it runs at once.
    limit: int

    def submit(self, context: Context, function: Callable[[], Any], /) -> Future[Any]: ...


class NotBegun(Exception):
    """The body was not called, because the run may already belong to another worker."""


class ThreadExecutor:
    """Runs each body on a thread of a pool."""

    is_far = adopts = False

    def __init__(self, pool: Threads) -> None:
        self.pool = pool
        #: Bodies of one map at once by default. A quarter of the pool leaves threads to other maps and runs.
        self.width = max(1, pool.limit // 4)

    async def execute(self, work: Work, seconds: float | None) -> Any:
        while True:
            future = self.pool.submit(copy_context(), partial(_call_body, work))
            body = asyncio.wrap_future(future)
            body.add_done_callback(forget)  # its step may not wait for it any more
            try:
                done, _ = await asyncio.wait([body], timeout=seconds)
            except asyncio.CancelledError:
                if not future.cancel():  # a body that is still queued never begins
                    work.outlived(body)
                raise
            if not done:  # a body that no thread has taken up never begins, so nobody waits for it
                raise BodyTimedOut(seconds or 0.0, None if future.cancel() else body)
            try:
                # asyncio copies a TimeoutError without its traceback; the future of the thread has the error itself.
                return body.result() if body.cancelled() else future.result()
            except NotBegun:
                if not work.may_begin():
                    raise asyncio.CancelledError from None


def _call_body(work: Work) -> Any:
    """Call a body under a fresh lease. It may have waited long for a thread."""
    if not work.holds_lease():
        raise NotBegun
    return work.call_body()


def forget(body: asyncio.Future[Any]) -> None:
    """Take the error of a future that nobody may wait for, so that asyncio does not log it."""
    if not body.cancelled():
        body.exception()


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function for a future. A `StopIteration` becomes a `RuntimeError`, because no future can hold it."""
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"the function raised StopIteration: {error}") from error


def in_own_thread(context: Context, function: Callable[[], Any]) -> Future[Any]:
    """Run a function on a new daemon thread, with these context variables."""
    future: Future[Any] = Future()
    threading.Thread(target=_do, args=(future, context, function), name="keepstep-branch", daemon=True).start()
    return future


class ThreadPool:
    """A pool of at most `limit` daemon threads; further work is queued."""

    def __init__(self, limit: int, name: str) -> None:
        self.limit = limit
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Context, Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._waiting = 0
        #: Number of submitted functions that have not returned.
        self.at_work = 0

    def submit(self, context: Context, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on a thread, with these context variables."""
        future: Future[Any] = Future()
        with self._lock:
            self._work.put((future, context, function))
            self._waiting += 1
            self.at_work += 1
            if self._waiting > self._idle and self._threads < self.limit:
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
                    if self._waiting <= self._idle:  # else this thread was counted on for work that has just come
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
    except BaseException as error:  # noqa: BLE001 - the future passes every error to the caller
        future.set_exception(error)
    else:
        future.set_result(value)
