"""Detects when the tasks of a run have come to rest, so that the next outcome may be delivered.

A run is at rest when its event loop holds no ready callback that belongs to it.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .callbacks import Callbacks
    from .driver import RunDriver


class IdleWatch:
    """Checks the runs with a pending delivery, once per pass of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callbacks: Callbacks) -> None:
        self._loop = loop
        self.callbacks = callbacks
        #: Whether the loop has nothing else to do at the moment.
        self.nothing_ready = callbacks.is_idle
        #: The runs of which a callback waits for its turn.
        self.busy = callbacks.ready
        self._waiting: dict[RunDriver, None] = {}
        self._scheduled = False
        self._context = Context()

    def watch(self, run: RunDriver) -> None:
        """Have the next outcome delivered as soon as its tasks have come to rest."""
        if run not in self._waiting:
            self._waiting[run] = None
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._tick, context=self._context)

    def forget(self, run: RunDriver) -> None:
        """Forget a run that is no longer here."""
        self._waiting.pop(run, None)

    def has_ready(self, run: RunDriver) -> bool:
        """Whether a callback of the run may be ready; a long queue is not searched."""
        return not self.callbacks.is_short() or run in self.callbacks.ready()

    def _tick(self) -> None:
        self._scheduled = False
        waiting = self._waiting
        for run in [run for run in waiting if run.thread.busy]:
            del waiting[run]  # it is added again when its thread waits
        busy = self.busy()
        resting = [run for run in waiting if run not in busy]
        for run in resting:
            del waiting[run]
        for run in resting:
            try:
                run.deliver_next()
            except Exception as error:  # noqa: BLE001 - one run's trouble must not keep the others waiting
                run.engine_failed(error)
        if waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._tick, context=self._context)
