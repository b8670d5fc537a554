"""Poll interval: constant on a real clock, exponential back-off on a virtual one."""

from __future__ import annotations

from ..ports import Clock, JumpingClock

#: Longest poll interval in seconds on a virtual clock, where it doubles with every poll that finds nothing.
LONGEST_SECONDS = 86_400.0


class PollInterval:
    """The pauses between two polls.

    A `JumpingClock` advances only when the process is idle, so frequent polls would be all that it does.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.jumps = isinstance(clock, JumpingClock)
        self._seconds = seconds
        self._pause = seconds

    def moved(self) -> None:
        """Reset the interval after an event."""
        self._pause = self._seconds

    def pause(self, until: float | None = None) -> float:
        """Return the seconds to wait before the next poll; `until` is the time until an expected event."""
        if not self.jumps:
            return self._seconds
        pause = self._pause
        self._pause = min(2 * pause, LONGEST_SECONDS)
        return pause if until is None else max(self._seconds, min(pause, until))
