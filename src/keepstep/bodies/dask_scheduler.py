"""The record of bodies on a Dask scheduler: each begins once, and its reports are kept until a worker has taken them.

A body is a task of Dask, whose key is the name of the attempt. Dask alone would run a task again when its Dask worker
is lost, forget it with its client, and keep nothing of what it has reported.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from distributed import SchedulerPlugin
from distributed.comm.core import CommClosedError
from tornado.ioloop import PeriodicCallback

from ..executors.task import Begun, Emitted, Logged, Lost, Reported, ToWorker, read_report

if TYPE_CHECKING:
    from distributed import Scheduler

log = logging.getLogger("keepstep")

#: Name of the plugins and of the topic; the number is that of the messages between them.
NAME = "keepstep-1"
#: The client of Dask in whose name keys are held.
HOLDER = "keepstep"
#: Seconds between two looks for bodies that no worker asks for.
LOOK_SECONDS = 1.0
#: Seconds after which a body that never became a task of Dask counts as lost.
SUBMIT_SECONDS = 60.0
#: Bytes of a body's reports that are kept. Beyond them, its tokens and log messages are not repeated.
MOST_KEPT = 1 << 20

_encode = msgspec.msgpack.Encoder().encode


class _Body:
    """One body: the client that asks for it, the Dask worker that has begun it, and what it has reported."""

    __slots__ = (
        *("abandoned_seconds", "asked_at", "began_at", "client", "is_large", "outcome"),
        *("reports", "seen", "size", "worker"),
    )

    def __init__(self, client: str, abandoned_seconds: float) -> None:
        self.client = client
        self.abandoned_seconds = abandoned_seconds
        #: When its client was last connected.
        self.asked_at = time.monotonic()
        self.worker = ""
        self.began_at = 0.0
        #: Reports with their numbers, and how many there were.
        self.reports: list[tuple[int, bytes]] = []
        self.seen = 0
        self.size = 0
        self.outcome: bytes | None = None
        #: Whether the outcome is too large for the scheduler, so that the Dask worker keeps it.
        self.is_large = False


class SchedulerBodies(SchedulerPlugin):
    """Keeps the bodies of one scheduler."""

    name = NAME
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._bodies: dict[str, _Body] = {}
        scheduler.handlers.update(
            keepstep_ask=self.ask,
            keepstep_begin=self.begin,
            keepstep_leave=self.leave,
            keepstep_release=self.release,
            keepstep_stop=self.stop,
        )
        scheduler.stream_handlers["keepstep_report"] = self.report
        looking = PeriodicCallback(self._look, LOOK_SECONDS * 1000)
        scheduler.periodic_callbacks[NAME] = looking
        looking.start()

    # -- asked by workers of Keepstep ----------------------------------------------------------------------------------

    def ask(self, client: str, bodies: Collection[tuple[str, int, bool]], abandoned_seconds: float) -> list[str]:
        """Send the reports of bodies to a client from now on. Return the names of those that are not known.

        Each is asked for by its name, the number of reports that are not to be repeated, and whether it may begin. It
        is abandoned if nobody asks for it during some seconds.
        """
        unknown = []
        for name, seen, may_begin in bodies:
            body = self._bodies.get(name)
            if body is not None:
                body.client, body.asked_at, body.abandoned_seconds = client, time.monotonic(), abandoned_seconds
                self._repeat(name, body, seen)
                continue
            unknown.append(name)
            if may_begin:
                self._bodies[name] = _Body(client, abandoned_seconds)
        return unknown

    def _repeat(self, name: str, body: _Body, seen: int) -> None:
        if body.began_at:
            self._send(name, body, [_encode(Begun(0, time.monotonic() - body.began_at))])
        self._send(name, body, [data for number, data in body.reports if number >= seen])
        if body.outcome is not None:
            self._send(name, body, [body.outcome])
        elif body.is_large and (task := self._scheduler.tasks.get(name)) is not None and task.state == "memory":
            self._send(name, body, [], is_large=True)

    def stop(self, name: str) -> None:
        """End a body. Its Dask worker reports the end of one that has begun."""
        body = self._bodies.get(name)
        if body is None or body.outcome is not None:
            return
        if body.is_large or not body.worker:
            self._lose(name, body, "was stopped")
        self._let_go([name])

    def leave(self, name: str, client: str) -> None:
        """Leave a body to the next client that asks for it."""
        body = self._bodies.get(name)
        if body is not None and body.client == client:
            body.client, body.asked_at = "", time.monotonic()

    def release(self, names: list[str]) -> None:
        """Forget bodies whose outcome is durable."""
        for name in names:
            self._bodies.pop(name, None)
        self._let_go(names)

    # -- asked by Dask workers -----------------------------------------------------------------------------------------

    def begin(self, name: str, worker: str) -> bool:
        """Give a body to a Dask worker. Return False if it must not begin: it has begun before, or is stopped."""
        body = self._bodies.get(name)
        if body is None or body.worker or body.outcome is not None or worker not in self._scheduler.workers:
            return False
        body.worker = worker
        return True

    def report(
        self, worker: str, name: str, reports: Sequence[bytes], outcome: bytes | None, *, begins: bool, is_large: bool
    ) -> None:
        """Keep what a body has reported, and send it to the client that asks for the body."""
        body = self._bodies.get(name)
        if body is None or body.worker != worker or body.outcome is not None:
            return
        if begins:
            body.began_at = time.monotonic()
            self._send(name, body, [_encode(Begun(0))])
        for data in reports:
            body.reports.append((body.seen, data))
            body.seen += 1
            body.size += len(data)
        if body.size > MOST_KEPT:
            _shorten(body)
        body.outcome, body.is_large = outcome, is_large
        self._send(name, body, [*reports, *([] if outcome is None else [outcome])])

    # -- told by the scheduler -----------------------------------------------------------------------------------------

    def update_graph(self, scheduler: Scheduler, *, keys: Collection[Any], **_: Any) -> None:
        """Hold the tasks of bodies, so that the scheduler does not forget them with their client."""
        mine = [key for key in keys if key in self._bodies]
        if mine:
            scheduler.client_desires_keys(mine, HOLDER)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **_: Any) -> None:
        """Take the end of a task that has no outcome here."""
        if finish not in ("memory", "erred", "forgotten"):
            return
        body = self._bodies.get(key)
        if body is None or body.outcome is not None:
            return
        if finish == "memory":
            self._send(key, body, [], is_large=body.is_large)
        elif finish == "erred":
            self._lose(key, body, f"failed in Dask: {self._scheduler.tasks[key].exception_text}")
        elif body.is_large or not body.worker:
            self._lose(key, body, "was cancelled in Dask")

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Take the end of a Dask worker, with all bodies that it has begun."""
        lost = [name for name, body in self._bodies.items() if body.worker == worker and body.outcome is None]
        for name in lost:
            self._lose(name, self._bodies[name], f"ended with its Dask worker {worker}")
        self._let_go(lost)  # Dask would give them to another Dask worker

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for body in self._bodies.values():
            if body.client == client:
                body.asked_at = time.monotonic()

    def _look(self) -> None:
        """End what nobody asks for any more."""
        now, scheduler = time.monotonic(), self._scheduler
        left = []
        for name, body in self._bodies.items():
            age = now - body.asked_at
            if body.client not in scheduler.client_comms:
                if age > body.abandoned_seconds:
                    left.append(name)
            elif body.outcome is None and name not in scheduler.tasks and not body.worker and age > SUBMIT_SECONDS:
                self._lose(name, body, "never reached the Dask scheduler")
        self.release(left)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _lose(self, name: str, body: _Body, why: str) -> None:
        body.outcome = _encode(Lost(0, why))
        self._send(name, body, [body.outcome])

    def _let_go(self, names: list[str]) -> None:
        """Let the scheduler forget tasks. A Dask worker that performs one of them stops it."""
        if names and HOLDER in self._scheduler.clients:
            self._scheduler.client_releases_keys(names, HOLDER)

    def _send(self, name: str, body: _Body, messages: list[bytes], *, is_large: bool = False) -> None:
        comm = self._scheduler.client_comms.get(body.client)
        if comm is not None and (messages or is_large):
            event = {"name": name, "messages": messages, "is_large": is_large}
            with contextlib.suppress(CommClosedError):
                comm.send({"op": "event", "topic": NAME, "event": event})


def _shorten(body: _Body) -> None:
    """Keep what counts: what a body has spent, saved and published."""
    kept: list[tuple[int, bytes]] = []
    for number, data in body.reports:
        message: ToWorker = read_report(data)
        if not isinstance(message, Emitted | Logged | Reported):
            kept.append((number, data))
    body.reports, body.size = kept, 0
