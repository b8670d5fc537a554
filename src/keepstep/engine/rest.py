"""Tells when the tasks of a run have come to rest, so that the next outcome may be delivered.

The event loop's queue of ready callbacks says it exactly: a run is at rest when none of them carries its context.
A loop that does not show its queue is given a number of quiet passes instead.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any

from ..ports import CURRENT
from .delivery import tell_next

if TYPE_CHECKING:
    from .context import RunContext

#: Passes without a move after which a run counts as at rest on a loop that hides its queue.
QUIET_PASSES = 8
#: A queue of ready callbacks that is quickly searched.
SHORT_QUEUE = 8


class RestWatch:
    """Watches, once per pass of the loop, the runs that have something to be told."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: Any = getattr(loop, "_ready", None)
        self.exact = self._ready is not None
        self._waiting: dict[RunContext, int] = {}
        self._scheduled = False
        self._context = Context()

    def watch(self, run: RunContext) -> None:
        """Have `tell_next` called as soon as its tasks have come to rest."""
        if run not in self._waiting:
            self._waiting[run] = 0
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._tick, context=self._context)

    def forget(self, run: RunContext) -> None:
        """The run is no longer here."""
        self._waiting.pop(run, None)

    def has_ready(self, run: RunContext) -> bool:
        """Whether a callback of the run may be waiting for its turn; a long queue is not searched."""
        ready = self._ready
        return ready is None or len(ready) > SHORT_QUEUE or run in self.busy()

    def _tick(self) -> None:
        self._scheduled = False
        waiting = self._waiting
        for run in [run for run in waiting if run.thread_busy]:
            del waiting[run]  # it asks again when its thread waits
        busy = self.busy()
        resting = [run for run in waiting if run not in busy]
        if not self.exact:
            resting = [run for run in resting if self._quiet(run)]
        for run in resting:
            del waiting[run]
        for run in resting:
            try:
                tell_next(run)
            except Exception as error:  # noqa: BLE001 - one run's trouble must not keep the others waiting
                run.engine_failed(error)
        if waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._tick, context=self._context)

    def busy(self) -> set[RunContext]:
        """The runs of which a callback waits for its turn."""
        busy: set[RunContext] = set()
        for handle in self._queue():
            context = handle._context  # noqa: SLF001 - the one place that says whose callback it is
            scope = context.get(CURRENT) if context is not None else None
            if scope is not None and not scope.in_step:
                busy.add(scope.run)
        return busy

    def _queue(self) -> tuple[Any, ...]:
        """The queue as it is now; other threads may add to it while it is copied."""
        while True:
            try:
                return tuple(self._ready or ())
            except RuntimeError:
                continue

    def nothing_ready(self) -> bool:
        """Whether the loop has nothing else to do at the moment."""
        return self._ready is not None and not self._ready

    def _quiet(self, run: RunContext) -> bool:
        passes = self._waiting[run] + 1
        if run.moves != run.moves_seen:
            run.moves_seen = run.moves
            passes = 0
        self._waiting[run] = passes
        return passes > QUIET_PASSES
