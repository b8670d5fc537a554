"""The callbacks that an event loop holds, and the runs they belong to.

A callback belongs to a run if its context is that of the run's code. asyncio's own loops show their callbacks. A loop
that hides them (uvloop) has its scheduling methods wrapped instead, which gives the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from operator import not_
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import DefinitionError
from ..ports import CURRENT

if TYPE_CHECKING:
    from .driver import RunDriver

#: Length up to which searching the queue of ready callbacks costs less than a pass of the loop.
SHORT_QUEUE = 8
#: Number of followed callbacks below which cancelled ones are not looked for.
FEW_FOLLOWED = 64


class Callbacks(Protocol):
    """The callbacks that an event loop is about to call."""

    def ready(self) -> set[RunDriver]:
        """Return the runs with a callback in this pass of the loop or the next."""
        ...

    def timers(self) -> set[RunDriver]:
        """Return the runs with a timer that has not fired yet."""
        ...

    def is_short(self) -> bool:
        """Whether the ready callbacks are few enough to be searched often."""
        ...

    @property
    def is_idle(self) -> Callable[[], bool]:
        """Whether the loop is known to have no ready callback of any kind."""
        ...

    def close(self) -> None:
        """Restore the loop."""
        ...


def callbacks_of(loop: asyncio.AbstractEventLoop) -> Callbacks:
    """Return the callbacks of a loop, whether it exposes them or not."""
    if hasattr(loop, "_ready") and hasattr(loop, "_scheduled"):
        return ShownCallbacks(loop)
    return FollowedCallbacks(loop)


def run_of(context: Context | None) -> RunDriver | None:
    """Return the run whose code a context belongs to; the body of a step is not such code."""
    scope = None if context is None else context.get(CURRENT)
    return None if scope is None or scope.in_step else scope.run


class ShownCallbacks:
    """The callbacks of a loop that keeps them where asyncio's own loops do."""

    def __init__(self, loop: Any) -> None:
        self._ready = loop._ready  # noqa: SLF001 - the only place that says what is about to be called
        self._loop = loop
        self.is_idle: Callable[[], bool] = partial(not_, self._ready)  # asked at every step: no Python call

    def ready(self) -> set[RunDriver]:
        busy: set[RunDriver] = set()
        for handle in _copied(self._ready):
            context = handle._context  # noqa: SLF001 - a handle exposes its context nowhere else
            scope = context.get(CURRENT) if context is not None else None
            if scope is not None and not scope.in_step:  # inlined `run_of`, because every commit asks this
                busy.add(scope.run)
        return busy

    def timers(self) -> set[RunDriver]:
        timers = _copied(self._loop._scheduled)  # noqa: SLF001 - read each time: asyncio replaces a list of old timers
        runs = (run_of(handle._context) for handle in timers if not handle.cancelled())  # noqa: SLF001
        return {run for run in runs if run is not None}

    def is_short(self) -> bool:
        return len(self._ready) <= SHORT_QUEUE

    def close(self) -> None:
        pass


def _copied(handles: Any) -> tuple[Any, ...]:
    """Copy a queue to which other threads may be adding."""
    while True:
        try:
            return tuple(handles)
        except RuntimeError:
            continue


class _Followed:
    """One callback of a run that a loop has received and not yet called."""

    __slots__ = ("handle", "run")

    def __init__(self, run: RunDriver) -> None:
        self.run = run
        self.handle: asyncio.Handle | None = None


def _runs(followed: dict[_Followed, None]) -> set[RunDriver]:
    """Return the runs of some callbacks; drop cancelled ones, which are never called."""
    runs: set[RunDriver] = set()
    for one in _copied(followed):
        if one.handle is not None and one.handle.cancelled():
            followed.pop(one, None)
        else:
            runs.add(one.run)
    return runs


class FollowedCallbacks:
    """The callbacks of a loop that hides them, tracked where they are scheduled.

    asyncio's tasks and futures look these methods up on the loop each time, so wrapping them on the instance is enough.
    Only callbacks of a run are tracked; all others pass unchanged.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Any = loop
        self._ready: dict[_Followed, None] = {}
        self._timers: dict[_Followed, None] = {}
        self._sweep_at = FEW_FOLLOWED
        try:
            for name in ("call_soon", "call_soon_threadsafe"):
                setattr(loop, name, self._following(getattr(loop, name), self._ready, 0))
            for name in ("call_later", "call_at"):
                setattr(loop, name, self._following(getattr(loop, name), self._timers, 1))
        except AttributeError as error:
            raise DefinitionError(
                f"the event loop {type(loop).__name__} hides its callbacks and its methods cannot be wrapped, so "
                "Keepstep cannot see when a run is at rest; use asyncio's own loop or uvloop"
            ) from error

    def _following(self, schedule: Callable[..., Any], followed: dict[_Followed, None], leading: int) -> Any:
        """Wrap a scheduling method to track the callbacks of runs; `leading` arguments come before the callback."""

        def scheduled(*args: Any, context: Context | None = None) -> Any:
            if context is None:
                context = copy_context()
            run = run_of(context)
            if run is None:
                return schedule(*args, context=context)
            callback = args[leading]
            one = _Followed(run)

            def called(*given: Any) -> Any:
                followed.pop(one, None)
                return callback(*given)

            followed[one] = None  # added first, because a loop in another thread may call it at once
            one.handle = handle = schedule(*args[:leading], called, *args[leading + 1 :], context=context)
            if len(self._timers) > self._sweep_at:  # most of them may be cancelled
                _runs(self._timers)
                self._sweep_at = max(FEW_FOLLOWED, 2 * len(self._timers))
            return handle

        return scheduled

    def ready(self) -> set[RunDriver]:
        return _runs(self._ready)

    def timers(self) -> set[RunDriver]:
        return _runs(self._timers)

    def is_short(self) -> bool:
        return len(self._ready) <= SHORT_QUEUE

    def is_idle(self) -> bool:
        return False  # it may have callbacks that belong to no run

    def close(self) -> None:
        for name in ("call_soon", "call_soon_threadsafe", "call_later", "call_at"):
            delattr(self._loop, name)
