"""The callbacks that an event loop holds, and the runs they belong to.

A callback belongs to a run if its context is that of the run's code. asyncio's own loops show their callbacks. A loop
that hides them (uvloop) has its scheduling methods wrapped instead, which gives the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import DefinitionError
from ..ports import CURRENT

if TYPE_CHECKING:
    from .context import RunContext

#: Length up to which searching the queue of ready callbacks costs less than a pass of the loop.
SHORT_QUEUE = 8
#: Number of followed callbacks below which cancelled ones are not looked for.
FEW_FOLLOWED = 64


class Callbacks(Protocol):
    """What an event loop is about to call."""

    def ready(self) -> set[RunContext]:
        """The runs of which the loop calls a callback in this pass or the next."""
        ...

    def timers(self) -> set[RunContext]:
        """The runs of which a timer has yet to fire."""
        ...

    def is_short(self) -> bool:
        """Whether the ready callbacks are few enough to be searched often."""
        ...

    def is_idle(self) -> bool:
        """Whether the loop is known to have no ready callback of any kind."""
        ...

    def close(self) -> None:
        """Leave the loop as it was found."""
        ...


def callbacks_of(loop: asyncio.AbstractEventLoop) -> Callbacks:
    """The callbacks of a loop, whether it shows them or not."""
    if hasattr(loop, "_ready") and hasattr(loop, "_scheduled"):
        return ShownCallbacks(loop)
    return FollowedCallbacks(loop)


def run_of(context: Context | None) -> RunContext | None:
    """The run whose code a context belongs to; the body of a step is not such code."""
    scope = None if context is None else context.get(CURRENT)
    return None if scope is None or scope.in_step else scope.run


class ShownCallbacks:
    """The callbacks of a loop that keeps them where asyncio's own loops do."""

    def __init__(self, loop: Any) -> None:
        self._ready = loop._ready  # noqa: SLF001 - the only place that says what is about to be called
        self._timers = loop._scheduled  # noqa: SLF001 - as above

    def ready(self) -> set[RunContext]:
        busy: set[RunContext] = set()
        for handle in _copied(self._ready):
            context = handle._context  # noqa: SLF001 - a handle does not say otherwise whose it is
            scope = context.get(CURRENT) if context is not None else None
            if scope is not None and not scope.in_step:  # as `run_of`, without a call: this is asked at every commit
                busy.add(scope.run)
        return busy

    def timers(self) -> set[RunContext]:
        runs = (run_of(handle._context) for handle in _copied(self._timers) if not handle.cancelled())  # noqa: SLF001
        return {run for run in runs if run is not None}

    def is_short(self) -> bool:
        return len(self._ready) <= SHORT_QUEUE

    def is_idle(self) -> bool:
        return not self._ready

    def close(self) -> None:
        pass


def _copied(handles: Any) -> tuple[Any, ...]:
    """A copy of a queue to which other threads may add meanwhile."""
    while True:
        try:
            return tuple(handles)
        except RuntimeError:
            continue


class _Followed:
    """One callback of a run that a loop has been given and has not called."""

    __slots__ = ("handle", "run")

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self.handle: asyncio.Handle | None = None


def _runs(followed: dict[_Followed, None]) -> set[RunContext]:
    """The runs of some callbacks; those that were cancelled are dropped, since they are never called."""
    runs: set[RunContext] = set()
    for one in _copied(followed):
        if one.handle is not None and one.handle.cancelled():
            followed.pop(one, None)
        else:
            runs.add(one.run)
    return runs


class FollowedCallbacks:
    """The callbacks of a loop that hides them, followed from where they are scheduled.

    asyncio's tasks and futures look these methods up on the loop each time, so wrapping them on the instance is enough.
    Only callbacks of a run are followed; all others go straight through.
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
                f"the event loop {type(loop).__name__} hides its callbacks and its methods cannot be wrapped, so a run "
                "cannot be seen to come to rest; use asyncio's own loop or uvloop"
            ) from error

    def _following(self, schedule: Callable[..., Any], followed: dict[_Followed, None], leading: int) -> Any:
        """A scheduling method that notes the callbacks of runs; `leading` arguments come before the callback."""

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

            followed[one] = None  # first, since a loop in another thread may call it at once
            one.handle = handle = schedule(*args[:leading], called, *args[leading + 1 :], context=context)
            if len(self._timers) > self._sweep_at:  # most of them may have been cancelled
                _runs(self._timers)
                self._sweep_at = max(FEW_FOLLOWED, 2 * len(self._timers))
            return handle

        return scheduled

    def ready(self) -> set[RunContext]:
        return _runs(self._ready)

    def timers(self) -> set[RunContext]:
        return _runs(self._timers)

    def is_short(self) -> bool:
        return len(self._ready) <= SHORT_QUEUE

    def is_idle(self) -> bool:
        return False  # it may have callbacks that are no run's

    def close(self) -> None:
        for name in ("call_soon", "call_soon_threadsafe", "call_later", "call_at"):
            delattr(self._loop, name)
