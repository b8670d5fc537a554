"""Rates: how often something may begin, counted by one number that survives crashes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..checks import check_limit, shown
from ..errors import DefinitionError

#: Shortest and longest time in seconds between two beginnings. The longest one, 30 years, is also the longest `per`.
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-12, 1e9
#: Errors of stored limits that are damaged, or have the form of a newer version.
UNREADABLE = (DefinitionError, ArithmeticError, LookupError, AttributeError, TypeError, ValueError)
#: Added before a number of tokens is rounded down: seconds since 1970 are exact to about a microsecond.
_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `count` in any `per` seconds on average, and at most `burst` at once (1 by default)."""

    count: float
    per: float = 1.0
    burst: int = 1

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("per", self.per)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise DefinitionError(f"ks.Rate: {name} must be a number greater than 0, got {shown(value)}")
        count, per = self.count, self.per
        is_counted = per <= LONGEST_SECONDS and count <= LONGEST_SECONDS / SHORTEST_SECONDS
        if not is_counted or not SHORTEST_SECONDS * count <= per <= LONGEST_SECONDS * count:
            raise DefinitionError(
                f"ks.Rate: {shown(count)} in {shown(per)} s cannot be counted: per must be at most {LONGEST_SECONDS:g}"
                f" s, and per / count from {SHORTEST_SECONDS:g} s to {LONGEST_SECONDS:g} s"
            )
        check_limit(self.burst, "ks.Rate: burst", 1)

    @property
    def interval(self) -> float:
        """Seconds between two beginnings at this rate."""
        return self.per / self.count

    def plain(self) -> dict[str, Any]:
        """Return the rate as plain data."""
        return {"count": self.count, "per": self.per, "burst": self.burst}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Rate:
        """Return the rate in plain data."""
        return cls(plain["count"], plain["per"], plain["burst"])

    @classmethod
    def written(cls, text: str) -> Rate:
        """Return the rate that a person has written, as in `100/60` or, with a burst, `100/60/10`."""
        try:
            count, per, *burst = text.split("/")
            return cls(float(count), float(per), *(int(one) for one in burst))
        except (ValueError, TypeError):
            raise DefinitionError(
                f"{text!r} is no rate; write COUNT/SECONDS or COUNT/SECONDS/BURST, as in 100/60/10"
            ) from None

    def __str__(self) -> str:
        burst = f", burst {self.burst}" if self.burst > 1 else ""
        return f"{self.count:g} in {self.per:g} s{burst}"


class Tokens(NamedTuple):
    """How many may begin now, and the time up to which the rate is used up."""

    left: int
    used_until: float

    def spend(self, rate: Rate, count: int) -> float:
        """Return the time up to which the rate is used up after `count` have begun."""
        return self.used_until + count * rate.interval


def tokens(rate: Rate, used_until: float, now: float, *, saved_seconds: float = 0.0) -> Tokens:
    """Return the tokens of a rate by GCRA.

    `used_until` is the only state. It is never believed to be more than one interval ahead, so that a clock that was
    set back stops nothing for longer than that. Tokens of the last `saved_seconds` are there beside the burst.
    """
    interval = rate.interval
    used_until = min(max(used_until, now - rate.burst * interval - saved_seconds), now + interval)
    return Tokens(max(0, math.floor((now - used_until) / interval + _ROUNDING)), used_until)


def spend_left(rate: Rate, spent_until: float, now: float, *, saved_seconds: float = 0.0) -> tuple[float, float]:
    """Return how much may be spent now, negative for a debt, and the time up to which the rate is used up.

    A debt never lasts longer than the time `per` of the rate, and neither does a clock that was set back.
    """
    interval = rate.interval
    spent_until = min(max(spent_until, now - rate.burst * interval - saved_seconds), now + rate.per)
    return (now - spent_until) / interval, spent_until


def next_token_at(rate: Rate, used_until: float) -> float:
    """Return the time at which the next token is there."""
    return used_until + rate.interval
