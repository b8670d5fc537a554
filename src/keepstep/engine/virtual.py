"""Virtual time: an event loop that jumps to its next timer instead of waiting for it, and the clock that goes with it.

Both are used together: `asyncio.Runner(loop_factory=VirtualLoop).run(main())`, and in `main` an engine made with
`clock=VirtualClock()`.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..ports import SystemClock

if TYPE_CHECKING:
    from .engine import Engine

#: What a virtual wall clock shows when its loop begins: 2026-01-01 00:00 UTC.
EPOCH = 1_767_225_600.0
#: While something goes on outside, whether it still does is looked at this often.
LOOK_SECONDS = 0.01


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time stands still while code runs, and jumps to the next timer when nothing is ready.

    While something goes on outside it, it waits in real time, as any loop does: a file descriptor is registered, an
    executor is at work, or one of the checks given to `wait_while` holds.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._away = 0
        self._checks: list[Callable[[], bool]] = []
        super().__init__(_Jumps(self))
        self._clock_resolution = 1e-6  # after years, two instants that are nearer to each other are the same number

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds

    def wait_while(self, check: Callable[[], bool]) -> None:
        """Do not jump while this holds."""
        self._checks.append(check)

    def outside(self, registered: int) -> bool:
        """Whether anything that the loop does not do itself may be about to tell it something."""
        own = 1  # the pipe by which other threads wake the loop
        return registered > own or self._away > 0 or any(check() for check in self._checks)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._away += 1
        future.add_done_callback(self._came_back)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._away += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._away -= 1

    def _came_back(self, _: asyncio.Future[Any]) -> None:
        self._away -= 1


class _Jumps(selectors.DefaultSelector):
    """Where a loop waits: here it does not, unless someone outside may have a word for it."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if timeout is None:  # no timer: only the outside can go on
            return super().select(None)
        if not self._loop.outside(len(self.get_map())):
            found = super().select(0)  # a thread may have come back while it was asked for
            if not found:
                self._loop.advance(timeout)
            return found
        began = time.monotonic()
        found = super().select(min(timeout, LOOK_SECONDS))
        self._loop.advance(min(timeout, time.monotonic() - began))
        return found


class VirtualClock(SystemClock):
    """The wall clock of a virtual loop. Leases go by real time, so a jump loses none."""

    #: Time passes only when nothing in this process has anything to do, so there is no use in looking often.
    jumps = True

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, epoch: float = EPOCH) -> None:
        super().__init__()
        self._loop = loop or asyncio.get_running_loop()
        self._epoch = epoch

    def now(self) -> float:
        return self._epoch + self._loop.time()


def at_work(engine: Engine) -> bool:
    """Whether a thread of the engine runs a plain def step, workflow or hook, for `VirtualLoop.wait_while`."""
    busy = engine.step_threads.at_work + engine.aside_threads.at_work
    return busy > 0 or any(context.thread_busy for context in engine.live.values())
