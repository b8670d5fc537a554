"""What to do with a run that a worker has left behind: drive it, drive it alone, or set it aside."""

from __future__ import annotations

from dataclasses import dataclass

from .check import check_count

#: From this recovery on the run is driven alone in its process, so that it can take no neighbour down with it.
ALONE_FROM = 2


@dataclass(frozen=True, slots=True)
class Recover:
    """Drive the run like any other."""


@dataclass(frozen=True, slots=True)
class RecoverAlone:
    """Drive the run while the process drives no other."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Leave the run to a person; the reason is for that person to read."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecoveryLimit:
    """How many crashes in a row, without any new checkpoint between them, a run may cause."""

    limit: int = 3

    def __post_init__(self) -> None:
        check_count(self.limit, "the limit of recoveries")

    def decide(self, recoveries: int) -> Recover | RecoverAlone | SetAside:
        """What to do with a run whose workers died so many times while executing it without progress."""
        if recoveries >= self.limit:
            times = "once" if recoveries == 1 else f"{recoveries} times"
            reason = f"its worker died {times} while executing it, without progress"
            return SetAside(f"{reason} (recovery_limit={self.limit})")
        return RecoverAlone() if recoveries >= ALONE_FROM else Recover()
