"""How many branches of a parallel part must succeed before the run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .check import check_count

#: A parallel part of which a smaller share than this has succeeded is degraded.
DEGRADED_BELOW = 0.7


class Verdict(StrEnum):
    """What the outcomes so far mean for the wait."""

    DONE = "done"
    WAIT = "wait"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class All:
    """Every branch must succeed."""

    def enough(self, total: int, succeeded: int, failed: int) -> Verdict:
        """Whether the wait is over; none of no branches is enough."""
        return _verdict(total, total, succeeded, failed)


@dataclass(frozen=True, slots=True)
class Any:
    """One branch must succeed; the others are no longer waited for."""

    def enough(self, total: int, succeeded: int, failed: int) -> Verdict:
        """Whether the wait is over."""
        return _verdict(1, total, succeeded, failed)


@dataclass(frozen=True, slots=True)
class Quorum:
    """At least `n` branches must succeed; the others are no longer waited for."""

    n: int

    def __post_init__(self) -> None:
        check_count(self.n, "a quorum")

    def enough(self, total: int, succeeded: int, failed: int) -> Verdict:
        """Whether the wait is over."""
        return _verdict(self.n, total, succeeded, failed)


WaitPolicy = All | Any | Quorum


def coverage(total: int, succeeded: int) -> float:
    """The share of the branches that has succeeded; nothing to do is wholly done."""
    return succeeded / total if total else 1.0


def degraded(total: int, succeeded: int) -> bool:
    """Whether too small a share has succeeded to call the part healthy."""
    return coverage(total, succeeded) < DEGRADED_BELOW


def _verdict(needed: int, total: int, succeeded: int, failed: int) -> Verdict:
    if succeeded >= needed:
        return Verdict.DONE
    return Verdict.IMPOSSIBLE if total - failed < needed else Verdict.WAIT
