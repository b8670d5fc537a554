"""Amounts of money and tokens, and limits on what a run, or a workflow that it calls, may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..checks import MOST_SPENT, check_count, check_number, check_seconds
from ..errors import DefinitionError

#: Share of a budget at which to warn.
WARN_AT = 0.9
#: Tolerance for rounding: a sum of many small amounts may fall this share short of a limit that it has reached.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Amount:
    """Money and tokens: those that were spent, or those that a step expects to spend."""

    cost: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", check_number(self.cost, "the cost of an amount", 0.0))
        check_count(self.tokens, "the tokens of an amount", 0)

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.cost + other.cost, self.tokens + other.tokens)

    @property
    def units(self) -> float:
        """The amount in the units of a service: its tokens or, without any, its cost."""
        return min(float(self.tokens or self.cost), MOST_SPENT)


@dataclass(frozen=True, slots=True)
class Use:
    """The used amount of one limit of a budget, and the amount that steps in progress and the next one expect."""

    kind: str
    used: float
    limit: float
    expected: float = 0.0

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
        """Whether the limit is reached, or would be exceeded, so that no new step may start."""
        return self.share >= 1.0 - ROUNDING or (self.used + self.expected) / self.limit > 1.0 + ROUNDING

    def __str__(self) -> str:
        used = _amount(self.used)
        if self.expected and self.share < 1.0 - ROUNDING:
            used = f"{used}, and {_amount(self.expected)} expected,"
        return f"{used} of {_amount(self.limit)} {self.kind}"


#: The amount of a step that reports nothing.
NOTHING = Amount()


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for one run; None means no limit. A limit warns at 90 %; at 100 % no further step starts.

    `seconds` is the time since the run began, including waits and pauses. `steps` is the number of steps. `cost` and
    `tokens` are the sums that steps report with `ks.spend`, including those of failed attempts. A step with an amount
    as `cost=` does not start if that amount would exceed a limit.
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

    def uses(self, used: Mapping[str, float], expected: Amount = NOTHING) -> list[Use]:
        """Return the used amount of each limit."""
        limits = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [
            Use(kind, used.get(kind, 0), limit, getattr(expected, kind, 0.0))
            for kind, limit in limits
            if limit is not None
        ]

    def exceeded(self, used: Mapping[str, float], expected: Amount = NOTHING) -> Use | None:
        """Return the most exceeded limit, or None. `expected` is the amount that steps in progress expect to spend."""
        over = [use for use in self.uses(used, expected) if use.exceeded]
        return max(over, key=lambda use: use.share, default=None)


def _amount(number: float) -> str:
    return f"{number:,d}" if isinstance(number, int) else f"{number:,.6g}"
