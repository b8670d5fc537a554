"""Timeouts of an attempt, and of a step with all its attempts and waits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ..checks import check_seconds
from ..errors import DefinitionError

#: Shortest accepted timeout in seconds. A smaller one is probably a mistake in the unit.
SHORTEST_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Timeout:
    """Limits in seconds; None means no limit.

    `attempt_seconds` limits each attempt. `step_seconds` counts from the first attempt and includes waits.
    """

    attempt_seconds: float | None = None
    step_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("attempt_seconds", "step_seconds"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_seconds(value, name, SHORTEST_SECONDS))

    @classmethod
    def of(cls, value: Timeout | float | timedelta | None) -> Timeout:
        """Return the timeout for an argument of a step; a bare number limits each attempt."""
        if value is None:
            return cls()
        if isinstance(value, Timeout):
            return value
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DefinitionError(f"a timeout must be a number of seconds or a Timeout, not {value!r}")
        return cls(attempt_seconds=value)

    def remaining(self, elapsed_seconds: float = 0.0) -> float | None:
        """Return the time for an attempt that starts `elapsed_seconds` after the first one; None means no limit."""
        limits = []
        if self.attempt_seconds is not None:
            limits.append(self.attempt_seconds)
        if self.step_seconds is not None:
            limits.append(max(0.0, self.step_seconds - max(0.0, elapsed_seconds)))
        return min(limits, default=None)

    def expired(self, elapsed_seconds: float) -> bool:
        """Whether an attempt that starts `elapsed_seconds` after the first one has no time left."""
        return self.remaining(elapsed_seconds) == 0.0
