"""What a run may use up: time, steps, money and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..errors import DefinitionError
from .check import check_count, check_number

#: From this share of a budget on it is worth a warning.
WARN_AT = 0.9
#: A sum of many small amounts may fall short of the limit by its rounding, and has reached it all the same.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Use:
    """How much of one kind of budget is used."""

    kind: str
    used: float
    limit: float

    @property
    def share(self) -> float:
        """1.0 is all of it."""
        return self.used / self.limit

    @property
    def warns(self) -> bool:
        """Whether it is nearly used up."""
        return self.share >= WARN_AT - ROUNDING

    @property
    def exceeded(self) -> bool:
        """Whether it is used up, so that nothing new may start."""
        return self.share >= 1.0 - ROUNDING

    def __str__(self) -> str:
        return f"{_amount(self.used)} of {_amount(self.limit)} {self.kind}"


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for one run; None is no limit. At 90 % of one there is a warning, at 100 % no step starts any more.

    `seconds` is the time since the run began, waits and pauses included; `cost` and `tokens` are what its steps told
    with `ks.spend`, in failed attempts too.
    """

    seconds: float | None = None
    steps: int | None = None
    cost: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, field.name) is None for field in fields(self)):
            raise DefinitionError("a budget needs a limit: seconds=, steps=, cost= or tokens=")
        for name in ("seconds", "cost"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_number(value, f"the budget of {name}", 1e-6))
        for name in ("steps", "tokens"):
            value = getattr(self, name)
            if value is not None:
                check_count(value, f"the budget of {name}")

    def uses(self, used: Mapping[str, float]) -> list[Use]:
        """How much is used of each kind that has a limit."""
        limits = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [Use(kind, used.get(kind, 0), limit) for kind, limit in limits if limit is not None]

    def exceeded(self, used: Mapping[str, float]) -> Use | None:
        """The kind that is used up, if one is: the one of which most is."""
        over = [use for use in self.uses(used) if use.exceeded]
        return max(over, key=lambda use: use.share, default=None)


def _amount(number: float) -> str:
    return f"{number:,d}" if isinstance(number, int) else f"{number:,.6g}"
