"""The worker's end of a cluster: one process speaks to the cluster, so that no end of its own can end the worker."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from .connection import Connection
from .far import Body, FarExecutor
from .task import Begun, Ended, Given, Lost, Ready, Release, Report, Run, Stop, ToWorker, Unfit

log = logging.getLogger("keepstep")

#: Seconds that a cluster may take to end a body. After that, its step goes on; the cluster ends it later.
STOP_SECONDS = 15.0
#: Processes in a row that end before they reach the cluster. After that, bodies fail instead of waiting for the next.
MOST_FALSE_STARTS = 3


class Bridge:
    """The process that speaks to one cluster for all bodies of a worker, and is started again if it ends.

    Bodies go on in the cluster without it. They are named, so the next process finds them again.
    """

    def __init__(self, module: str, settings: dict[str, Any], cluster: str) -> None:
        self._module = module
        #: The session names this engine to the cluster, whichever process speaks for it.
        self._settings = {**settings, "session": uuid.uuid4().hex}
        self._cluster = cluster
        self._bodies: dict[int, Body] = {}
        self._line: Connection | None = None
        self._false_starts = 0
        #: Whether a process has reached the cluster before, so that bodies may run there.
        self._was_ready = False
        self._unfit = ""
        self._closed = False

    @property
    def at_work(self) -> int:
        """Bodies that have not ended."""
        return len(self._bodies)

    @property
    def lines(self) -> int:
        """Connections to the process."""
        return int(self._line is not None and self._line.is_connected)

    def add(self, body: Body) -> None:
        """Send a body to the cluster."""
        self._bodies[body.number] = body
        if self._line is None:
            self._start()
        else:
            self._send(body)

    def _send(self, body: Body) -> None:
        if self._line is not None:
            self._line.send(Run(body.number, body.task, body.place.options, body.place.seen))

    def send(self, message: Stop | Release) -> None:
        """Send a message about a body, if the process is there."""
        if self._line is not None:
            self._line.send(message)

    def drop(self, body: Body) -> None:
        """Forget a body: it has ended, or is left to the cluster."""
        self._bodies.pop(body.number, None)

    # -- the process ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._unfit = ""
        self._line = Connection(self._reported, self._ended)
        try:
            self._line.start(self._module, Given(0, settings={**self._settings, "again": self._was_ready}))
        except OSError as error:
            self._line = None
            self._fail(f"cannot be started: {error}")
            return
        for body in list(self._bodies.values()):
            if body.place.was_sent:
                body.task = msgspec.structs.replace(body.task, may_begin=_may_begin(body))
            elif not body.may_begin():
                self.drop(body)
                continue
            self._send(body)
            body.place.was_sent = True
            if body.place.is_stopping:
                self.send(Stop(body.number))

    def _reported(self, message: ToWorker) -> None:
        if isinstance(message, Ready):
            self._false_starts, self._was_ready = 0, True
            return
        if isinstance(message, Unfit):
            self._unfit = message.why
            return
        body = self._bodies.get(message.body)
        if body is None:
            return
        if isinstance(message, Ended):
            self.drop(body)
            number = body.number
            if not isinstance(message, Lost):
                body.work.when_durable(lambda: self.send(Release(number)))
            body.settle(message)
        elif isinstance(message, Begun):
            if body.began_at is None:  # else another process has found it again
                body.place.executor.note_begun(body, message.seconds_ago)
        elif isinstance(message, Report) and not body.outcome.done():
            body.place.seen += 1
            body.work.take_report(message)

    def _ended(self, why: str) -> None:
        """Take the end of the process. Another one asks the cluster for the bodies that it was sent."""
        was_ready = self._line is not None and self._line.is_ready
        self._line = None
        self._false_starts = 0 if was_ready else self._false_starts + 1
        if self._closed:
            return
        if self._unfit:
            self._fail(self._unfit)
        elif self._false_starts >= MOST_FALSE_STARTS:
            self._fail(f"{why} before it reached the cluster; its standard error says why")
        elif self._bodies:
            log.warning("the process that speaks to %s %s; another one is started", self._cluster, why)
            self._start()

    def _fail(self, why: str) -> None:
        bodies, self._bodies = self._bodies, {}
        for body in bodies.values():
            body.settle(Lost(0, why))

    async def close(self) -> None:
        """End the process. Bodies in the cluster go on, for the next worker that asks for them."""
        self._closed = True
        self._fail("was left to the cluster, because the engine closed")
        line = self._line
        if line is not None:
            line.kill()
            await line.gone.wait()


def _may_begin(body: Body) -> bool:
    """Whether a body that was sent before may begin, if the cluster does not know it. If not, its attempt is lost."""
    is_new = body.began_at is None and not body.work.is_marked  # a marked one may have begun without a word
    return is_new and body.task.may_begin and body.work.holds_lease()


class _Place:
    """How a body is given to a cluster: by which executor, with which of the cluster's own options."""

    __slots__ = ("executor", "is_stopping", "options", "seen", "was_sent")

    def __init__(self, executor: ClusterExecutor) -> None:
        self.executor = executor
        self.options = executor.options
        self.was_sent = self.is_stopping = False
        #: Reports that were taken.
        self.seen = 0


class ClusterExecutor(FarExecutor):
    """Runs bodies on a cluster, with one set of the cluster's options; it shares a bridge with others."""

    adopts = True

    def __init__(self, host: Any, bridge: Bridge, options: dict[str, Any], width: int, *, pickled: bool) -> None:
        super().__init__(host)
        self._bridge = bridge
        self.options = options
        self.width = width
        self.pickled = pickled

    @property
    def at_work(self) -> int:
        """Bodies that have not ended, of all executors that share the bridge."""
        return self._bridge.at_work

    def submit(self, body: Body) -> None:
        body.place = _Place(self)
        if body.may_begin():
            self._bridge.add(body)
            body.place.was_sent = True

    def stop(self, body: Body) -> None:
        body.place.is_stopping = True
        self._bridge.send(Stop(body.number))
        self.loop.call_later(STOP_SECONDS, self._give_up, body, context=self.context)

    def leave(self, body: Body) -> None:
        self._bridge.send(Release(body.number))
        self._bridge.drop(body)

    def _give_up(self, body: Body) -> None:
        if not body.outcome.done():
            self._bridge.drop(body)
            body.settle(Lost(0, f"was not stopped by the cluster within {STOP_SECONDS:g} s"))

    @property
    def lines(self) -> int:
        """Connections to processes."""
        return self._bridge.lines

    async def close(self) -> None:
        await self._bridge.close()


def shared(host: Any, key: tuple[Any, ...], make: Callable[[], Bridge]) -> Bridge:
    """Return the bridge of an engine to one cluster."""
    bridges: dict[tuple[Any, ...], Bridge] = host.executors.shared
    if key not in bridges:
        bridges[key] = make()
    return bridges[key]
