"""Virtual time: an event loop that jumps to its next timer instead of waiting for it, and its wall clock.

Use both together: `asyncio.Runner(loop_factory=VirtualLoop).run(main())`, and in `main` an engine with
`clock=VirtualClock()`.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any

from ..ports import SystemClock

#: Time of a virtual wall clock when its loop begins: 2026-01-01 00:00 UTC, in Unix seconds.
EPOCH = 1_767_225_600.0
#: Interval in seconds at which the loop checks whether it still waits for outside work.
LOOK_SECONDS = 0.01


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time stands still while code runs, and jumps to the next timer when nothing is ready.

    It waits in real time, as any loop, for outside work: while a file descriptor is registered, an executor is busy,
    or one of the checks given to `wait_while` holds.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._away = 0
        self._checks: list[Callable[[], bool]] = []
        self._counts: list[Callable[[], int]] = []
        super().__init__(_Jumps(self))
        self._clock_resolution = 1e-6  # after years of virtual time, a float cannot tell closer instants apart

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the virtual time."""
        self._now += seconds

    def wait_while(self, check: Callable[[], bool]) -> None:
        """Wait in real time while `check` returns true."""
        self._checks.append(check)

    def disregard(self, count: Callable[[], int]) -> None:
        """Do not wait for as many file descriptors as `count` returns."""
        self._counts.append(count)

    @property
    def is_away(self) -> bool:
        """Whether an executor is working for code of this loop."""
        return self._away > 0

    def outside(self, registered: int) -> bool:
        """Whether outside work may still wake the loop. `registered` is its number of file descriptors."""
        own = 1 + sum(count() for count in self._counts)  # 1 is the pipe by which other threads wake the loop
        return registered > own or self._away > 0 or any(check() for check in self._checks)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._away += 1
        future.add_done_callback(self._executor_ended)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._away += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._away -= 1

    def _executor_ended(self, _: asyncio.Future[Any]) -> None:
        self._away -= 1


class _Jumps(selectors.DefaultSelector):
    """A selector that jumps to the next timer instead of waiting, unless there is outside work."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if timeout is None:  # without a timer, only outside work can wake the loop
            return super().select(None)
        if not self._loop.outside(len(self.get_map())):
            found = super().select(0)  # a thread may have woken the loop during the check
            if not found:
                self._loop.advance(timeout)
            return found
        began = time.monotonic()
        found = super().select(min(timeout, LOOK_SECONDS))
        self._loop.advance(min(timeout, time.monotonic() - began))
        return found


class VirtualClock(SystemClock):
    """The wall clock of a virtual loop. Leases use real time, so a jump does not end them."""

    #: Tells pollers to back off: time passes only while this process is idle, so frequent polls are useless.
    jumps = True

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, epoch: float = EPOCH) -> None:
        super().__init__()
        self._loop = loop or asyncio.get_running_loop()
        self._epoch = epoch

    def now(self) -> float:
        return self._epoch + self._loop.time()
