"""Limits on the time, steps, money and tokens that a run, or a workflow that it calls, may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..checks import check_count, check_number, check_seconds
from ..errors import DefinitionError

#: Share of a budget at which to warn.
WARN_AT = 0.9
#: Tolerance for rounding: a sum of many small amounts may fall this share short of a limit that it has reached.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Use:
    """The used amount of one limit of a budget."""

    kind: str
    used: float
    limit: float

    @property
    def share(self) -> float:
        """Used share of the limit; 1.0 is all of it."""
        return self.used / self.limit

    @property
    def warns(self) -> bool:
        """Whether the limit is nearly reached."""
        return self.share >= WARN_AT - ROUNDING

    @property
    def exceeded(self) -> bool:
        """Whether the limit is reached, so that no new step may start."""
        return self.share >= 1.0 - ROUNDING

    def __str__(self) -> str:
        return f"{_amount(self.used)} of {_amount(self.limit)} {self.kind}"


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for one run; None means no limit. A limit warns at 90 %; at 100 % no further step starts.

    `seconds` is the time since the run began, including waits and pauses. `steps` is the number of steps. `cost` and
    `tokens` are the sums that steps report with `ks.spend`, including those of failed attempts.
    """

    seconds: float | None = None
    steps: int | None = None
    cost: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, field.name) is None for field in fields(self)):
            raise DefinitionError("a budget needs a limit: seconds=, steps=, cost= or tokens=")
        for name, check in (("seconds", check_seconds), ("cost", check_number)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(value, f"the budget of {name}", 1e-6))
        for name in ("steps", "tokens"):
            value = getattr(self, name)
            if value is not None:
                check_count(value, f"the budget of {name}")

    def uses(self, used: Mapping[str, float]) -> list[Use]:
        """Return the used amount of each limit."""
        limits = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [Use(kind, used.get(kind, 0), limit) for kind, limit in limits if limit is not None]

    def exceeded(self, used: Mapping[str, float]) -> Use | None:
        """Return the most exceeded limit, or None."""
        over = [use for use in self.uses(used) if use.exceeded]
        return max(over, key=lambda use: use.share, default=None)


def _amount(number: float) -> str:
    return f"{number:,d}" if isinstance(number, int) else f"{number:,.6g}"
