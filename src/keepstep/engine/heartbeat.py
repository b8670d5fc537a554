"""The heartbeat of a worker, which renews the leases of its runs from a separate thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Protocol

from ..model import HEARTBEAT_SECONDS, LEASE_SECONDS
from .blockage import BLOCKED_SECONDS, LOOK_SECONDS

log = logging.getLogger("keepstep")

#: Interval of heartbeats as a share of the lease time, so that two of them may be lost.
HEARTBEAT_SHARE = HEARTBEAT_SECONDS / LEASE_SECONDS
#: Interval after a failed heartbeat, as a share of the lease time. Short, because a late worker may be declared dead.
RETRY_SHARE = HEARTBEAT_SHARE / 5
#: Time in seconds without activity after which the loop counts as stuck, and its leases are no longer renewed.
STUCK_SECONDS = 60.0
#: Minimum interval in seconds after an early heartbeat, so that reports of progress do not load the store.
PROGRESS_SECONDS = 0.5
#: Maximum time in seconds that a leaving worker waits for a heartbeat under way.
STOP_SECONDS = 10.0


class Beating(Protocol):
    """The part of a worker that its heart uses."""

    @property
    def lease_seconds(self) -> float: ...

    def is_abandoned(self) -> bool:
        """Whether the loop was closed without a close of the engine, so that no run is driven here."""

    def still_seconds(self) -> float:
        """Return the time since the last activity of the loop."""

    def blocking_code(self) -> tuple[str, str]:
        """Return the step or workflow that the loop's thread executes, and the line; "" twice if it executes none."""

    def beat_once(self) -> bool:
        """Renew the leases. Return False if the store did not take the heartbeat."""


class Heart(Protocol):
    """Triggers the heartbeats of a worker."""

    def start(self) -> None: ...

    def hurry(self) -> None:
        """Beat early, for example to report progress."""

    def stop(self) -> None:
        """Stop beating."""

    async def stopped(self) -> None:
        """Wait for the end of a heartbeat under way."""


class HeartThread:
    """A heart in its own thread, so that a busy loop keeps its leases. A stuck loop loses them."""

    def __init__(self, worker: Beating) -> None:
        self._worker = worker
        self._early = threading.Event()
        self._ended = threading.Event()
        self._suspect = ""  # the code that the loop executed at the last look, while it was late
        self._named = ""
        self._thread = threading.Thread(target=self._live, name="keepstep-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        self._early.set()

    def stop(self) -> None:
        self._ended.set()
        self._early.set()

    async def stopped(self) -> None:
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    def _live(self) -> None:
        worker, failed = self._worker, False
        while not self._ended.is_set():
            share = RETRY_SHARE if failed else HEARTBEAT_SHARE
            early = self._wait(worker.lease_seconds * share)
            if self._ended.is_set() or worker.is_abandoned():
                return
            if early:
                self._early.clear()
            if worker.still_seconds() > STUCK_SECONDS:
                log.error("the event loop has been stuck for %d s, so its leases are not renewed", STUCK_SECONDS)
                continue
            failed = not worker.beat_once()
            if early:
                self._ended.wait(PROGRESS_SECONDS)

    def _wait(self, seconds: float) -> bool:
        """Wait until the next heartbeat, and watch the loop meanwhile. Return whether the heartbeat is an early one."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._early.wait(min(left, LOOK_SECONDS)):
                return True
            self._look()
        return self._early.is_set()

    def _look(self) -> None:
        """Log once which code blocks the loop. Two looks must find the same code, because many steps may be busy."""
        seconds = self._worker.still_seconds()
        if seconds < LOOK_SECONDS:
            self._suspect = self._named = ""
            return
        before, (self._suspect, place) = self._suspect, self._worker.blocking_code()
        if seconds >= BLOCKED_SECONDS and self._suspect and self._suspect == before != self._named:
            self._named = self._suspect
            log.warning(
                "%s has blocked the event loop for %.1f s, at %s; nothing else goes on meanwhile: await the work, or "
                "move it to a plain def step, which runs in a thread",
                *(self._suspect, seconds, place or "an unknown place"),
            )
