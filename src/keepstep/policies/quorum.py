"""Quorums: how many branches of a parallel part must succeed before the run continues."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..checks import check_count, check_number

#: Share of successful branches below which a parallel part counts as degraded.
DEGRADED_BELOW = 0.7
#: Tolerance for a share of failures, so that 0.29 of 100 is 29 in spite of binary fractions.
_ROUNDING = 1e-9


class Verdict(StrEnum):
    """The meaning of the outcomes so far for the wait."""

    DONE = "done"
    WAIT = "wait"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class All:
    """Every branch must succeed."""

    def enough(self, total: float, succeeded: int, failed: int) -> Verdict:
        """Whether the wait is over. Without any branches, it is over at once."""
        if failed:
            return Verdict.IMPOSSIBLE
        return Verdict.DONE if succeeded >= total else Verdict.WAIT


@dataclass(frozen=True, slots=True)
class Any:
    """One branch must succeed; the run does not wait for the others."""

    def enough(self, total: float, succeeded: int, failed: int) -> Verdict:
        """Whether the wait is over."""
        return _verdict(1, total, succeeded, failed)


@dataclass(frozen=True, slots=True)
class Quorum:
    """At least `n` branches must succeed; the run does not wait for the others."""

    n: int

    def __post_init__(self) -> None:
        check_count(self.n, "a quorum")

    def enough(self, total: float, succeeded: int, failed: int) -> Verdict:
        """Whether the wait is over."""
        return _verdict(self.n, total, succeeded, failed)


@dataclass(frozen=True, slots=True)
class Tolerate:
    """Every branch is awaited; up to `count` of them, and up to a `share` of them (0 to 1), may fail.

    At least `minimum` branches must succeed. The wait is over as soon as too many have failed.
    """

    count: int | None = None
    share: float | None = None
    minimum: int = 0

    def __post_init__(self) -> None:
        if self.count is not None:
            check_count(self.count, "the count of tolerated failures", 0)
        if self.share is not None:
            check_number(self.share, "the share of tolerated failures", 0, 1)
        check_count(self.minimum, "the minimum of successes", 0)

    def enough(self, total: float, succeeded: int, failed: int) -> Verdict:
        """Whether the wait is over."""
        if self.count is not None and failed > self.count:
            return Verdict.IMPOSSIBLE
        if self.share is not None and failed > self.share * total + _ROUNDING:
            return Verdict.IMPOSSIBLE
        if total - failed < self.minimum:
            return Verdict.IMPOSSIBLE
        return Verdict.DONE if succeeded + failed == total else Verdict.WAIT

    def __str__(self) -> str:
        limits = {"count": self.count, "share": self.share, "minimum": self.minimum or None}
        return f"Tolerate({', '.join(f'{name}={limit}' for name, limit in limits.items() if limit is not None)})"


WaitPolicy = All | Any | Quorum | Tolerate


def coverage(total: int, succeeded: int) -> float:
    """Return the share of branches that succeeded; 1 if there are no branches."""
    return succeeded / total if total else 1.0


def degraded(total: int, succeeded: int) -> bool:
    """Whether the share of successful branches is too small for a healthy part."""
    return coverage(total, succeeded) < DEGRADED_BELOW


def _verdict(needed: int, total: float, succeeded: int, failed: int) -> Verdict:
    if succeeded >= needed:
        return Verdict.DONE
    return Verdict.IMPOSSIBLE if total - failed < needed else Verdict.WAIT
