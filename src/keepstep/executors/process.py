"""The executor of bodies in processes of this machine: warm ones, each with one body at a time."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import check_count, check_seconds
from .connection import Connection
from .far import Body, FarExecutor
from .task import Begun, Ended, Given, Lost, Ready, Report, Run, Stop, ToWorker

#: Seconds of work that a process is sent beyond its current body, so that it need not wait for the worker.
AHEAD_SECONDS = 0.01
#: Bodies that a process is sent at most.
MOST_AHEAD = 8
#: Seconds between two looks for processes that are suspended or have nothing to do.
LOOK_SECONDS = 5.0
#: Processes in a row that end before they are ready. After that, bodies fail instead of waiting for the next one.
MOST_FALSE_STARTS = 3
#: Smallest limit of memory in bytes: what Python and Keepstep need themselves.
LEAST_MEMORY = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Process:
    """Bodies run in processes of this machine, which are kept warm: for work that computes, or that may crash.

    A body that times out or is cancelled is stopped: an exception is raised in it, and after `grace_seconds` its
    process is killed. A crash of a body is `ks.BodyLost`, which affects only its own attempt. No process outlives its
    worker.
    """

    #: Bodies at once, in one worker; by default one for each processor.
    workers: int | None = None
    #: Largest data of a process in bytes; an allocation beyond it raises `MemoryError` in the body.
    memory_bytes: int | None = None
    #: Seconds that a body has for its clean-up when it is stopped.
    grace_seconds: float = 1.0
    #: Seconds after which a process without a body is ended.
    idle_seconds: float = 60.0
    #: Seconds after which a suspended process counts as lost, with its body.
    suspended_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("grace_seconds", "idle_seconds", "suspended_seconds"):
            object.__setattr__(self, name, check_seconds(getattr(self, name), f"Process({name}=)", 0.0))
        if self.workers is not None:
            check_count(self.workers, "Process(workers=)", 1)
        if self.memory_bytes is not None:
            check_count(self.memory_bytes, "Process(memory_bytes=)", LEAST_MEMORY)

    def open(self, host: Any) -> ProcessPool:
        """Return the pool of a worker."""
        return ProcessPool(self, host)


class _Child:
    """One process of the pool, and the bodies that it was sent, in order; at most one has begun."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        self.bodies: deque[Body] = deque()
        self.idle_since = pool.loop.time()
        self.suspended_since: float | None = None
        self.line = Connection(self._reported, self._ended)
        self.line.start(pool.module, Given(0, pool.spec.memory_bytes or 0, settings=pool.settings))

    def send(self, body: Body) -> None:
        body.place = self
        self.bodies.append(body)
        self.line.send(Run(body.number, body.task))

    def _reported(self, message: ToWorker) -> None:
        if isinstance(message, Ready):
            self._pool.false_starts = 0
        elif isinstance(message, Ended):
            body = self.bodies.popleft()
            self.idle_since = self._pool.loop.time()
            self._pool.ended(body, message)
        elif isinstance(message, Begun):
            self._pool.note_begun(self.bodies[0])
        elif isinstance(message, Report) and self.bodies:
            body = self.bodies[0]
            # Others are of bodies that have ended; a log message has 0 if it comes from no body, as from an import.
            if message.body in (0, body.number) and not body.outcome.done():
                body.work.take_report(message)

    def _ended(self, why: str) -> None:
        self._pool.lost(self, why)


class ProcessPool(FarExecutor):
    """Warm processes, shared by all runs of a worker."""

    #: The module that a process runs, and its settings.
    module = "child"
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, spec: Process, host: Any) -> None:
        super().__init__(host)
        self.spec = spec
        self._limit = spec.workers or processors()
        self._children: list[_Child] = []
        self._waiting: deque[Body] = deque()
        self._average = 1.0  # seconds of a body, over the last few
        self.false_starts = 0
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def width(self) -> int:
        """Bodies that may usefully run and wait at once: the next ones are sent before the current one has ended."""
        return MOST_AHEAD * self._limit

    @property
    def at_work(self) -> int:
        """Bodies that have not ended."""
        return len(self._waiting) + sum(len(child.bodies) for child in self._children)

    @property
    def lines(self) -> int:
        """Connections to processes."""
        return sum(child.line.is_connected for child in self._children)

    def submit(self, body: Body) -> None:
        self._waiting.append(body)
        self._assign()

    # -- giving bodies to processes ------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Send waiting bodies to processes that are free, or soon will be."""
        while self._waiting and not self._closed:
            child = self._free()
            if child is None:
                return
            body = self._waiting.popleft()
            if body.may_begin():
                child.send(body)

    def _free(self) -> _Child | None:
        """Return a process for the next body; None if it must wait."""
        for child in self._children:
            if not child.bodies:
                return child
        if len(self._children) < self._limit:
            return self._started()
        ahead = min(MOST_AHEAD, 1 + int(AHEAD_SECONDS / max(self._average, 1e-6)))
        least = min(self._children, key=lambda child: len(child.bodies))
        return least if len(least.bodies) < ahead else None

    def _started(self) -> _Child | None:
        try:
            child = _Child(self)
        except OSError as error:
            if not self._children:
                self._fail_waiting(f"cannot be started: {error}")
            return None
        self._children.append(child)
        if self._looking is None:
            self._looking = self.loop.call_later(LOOK_SECONDS, self._look)
        return child

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            self._waiting.popleft().settle(Lost(0, why))

    # -- reports of processes ------------------------------------------------------------------------------------------

    def ended(self, body: Body, outcome: Ended) -> None:
        """Take the outcome of a body, and send the next one."""
        if body.began_at is not None:
            self._average += 0.2 * (self.loop.time() - body.began_at - self._average)
        body.settle(outcome)
        self._assign()

    def lost(self, child: _Child, why: str) -> None:
        """Take the end of a process. Its body is lost; one that had not begun gets another process."""
        self._children.remove(child)
        if not child.line.is_ready:
            self.false_starts += 1
        for body in reversed(child.bodies):
            if body.began_at is not None or (child.line.is_ready and body is child.bodies[0]):
                body.settle(Lost(0, why))  # it ran, or its module was being imported
            elif not body.outcome.done():
                self._waiting.appendleft(body)
        child.bodies.clear()
        if self._closed:
            self._fail_waiting("was stopped, because the engine closed")
        elif self.false_starts >= MOST_FALSE_STARTS:
            self._fail_waiting(f"{why} before it was ready; its standard error says why")
        self._assign()

    # -- stopping ------------------------------------------------------------------------------------------------------

    def stop(self, body: Body) -> None:
        """End a body: politely first, then with its process."""
        child = body.place
        if child is None or body not in child.bodies:
            if body in self._waiting:
                self._waiting.remove(body)
            body.settle(Lost(0, "was stopped"))
            return
        child.line.send(Stop(body.number))
        if body.began_at is None:
            body.settle(Lost(0, "was stopped"))
        self.loop.call_later(self.spec.grace_seconds, self._kill, body, context=self.context)

    def _kill(self, body: Body) -> None:
        child = body.place
        if child is not None and child.bodies and child.bodies[0] is body:
            child.line.kill()

    def _look(self) -> None:
        """End processes that have had nothing to do for long, or are suspended for long."""
        self._looking = None
        now = self.loop.time()
        for child in self._children:
            if not child.bodies:
                if now - child.idle_since >= self.spec.idle_seconds:
                    child.line.kill()
            elif not child.line.is_stopped():
                child.suspended_since = None
            elif child.suspended_since is None:
                child.suspended_since = now
            elif now - child.suspended_since >= self.spec.suspended_seconds:
                child.line.kill()
        if self._children:
            self._looking = self.loop.call_later(LOOK_SECONDS, self._look)

    async def close(self) -> None:
        """End all processes, with what runs in them."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        self._fail_waiting("was stopped, because the engine closed")
        children = list(self._children)
        for child in children:
            child.line.kill()
        for child in children:
            await child.line.gone.wait()


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
