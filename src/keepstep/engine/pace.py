"""How often to look at the store: always as often on a clock that runs, ever more seldom on one that jumps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..ports import Clock

#: On a clock that jumps, whoever looks and finds nothing waits twice as long each time, but no longer than this.
LONGEST_SECONDS = 86_400.0


class Pace:
    """The pauses between two looks.

    A clock with `jumps` passes time only when the process has nothing to do: looking often would be all it does.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.jumps = getattr(clock, "jumps", False)
        self._seconds = seconds
        self._pause = seconds

    def moved(self) -> None:
        """Something has happened: look soon again."""
        self._pause = self._seconds

    def pause(self, until: float | None = None) -> float:
        """How long to wait before the next look; `until` is after how many seconds there will be something to see."""
        if not self.jumps:
            return self._seconds
        pause = self._pause
        self._pause = min(2 * pause, LONGEST_SECONDS)
        return pause if until is None else max(self._seconds, min(pause, until))
