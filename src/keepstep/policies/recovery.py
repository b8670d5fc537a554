"""Recovery of a run whose worker died: drive it, drive it alone, or set it aside."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import check_count

#: Number of recoveries from which the run is driven alone in its process, so that a crash hits no other run.
ALONE_FROM = 2


@dataclass(frozen=True, slots=True)
class Recover:
    """Drive the run as usual."""


@dataclass(frozen=True, slots=True)
class RecoverAlone:
    """Drive the run while the process drives no other run."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Leave the run to a person; `reason` is a sentence for that person."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecoveryLimit:
    """The number of crashes in a row, without a new checkpoint between them, that a run may cause."""

    limit: int = 3

    def __post_init__(self) -> None:
        check_count(self.limit, "the limit of recoveries")

    def decide(self, recoveries: int) -> Recover | RecoverAlone | SetAside:
        """Decide about a run whose workers died `recoveries` times without progress."""
        if recoveries >= self.limit:
            times = "once" if recoveries == 1 else f"{recoveries} times"
            reason = f"its worker died {times} while executing it, without progress"
            return SetAside(f"{reason} (recovery_limit={self.limit})")
        return RecoverAlone() if recoveries >= ALONE_FROM else Recover()
