"""A gate as stored: the limits of a queue or a service, and their last changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

#: Kind of the gate in front of runs.
QUEUE = "queue"
#: Changes of a gate that are kept.
MOST_CHANGES = 20


@dataclass(frozen=True, slots=True)
class GateChange:
    """One change of a gate: what was set or declared, by whom, when and why. `limits` None is a reset."""

    at: datetime
    actor: str
    act: str
    limits: dict[str, Any] | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GateInfo:
    """A gate: what code has declared, what a person has set instead, and its last changes, newest last.

    `used_until`, `turn` and `line_next` say where the rate and the turns of keys stand.
    """

    kind: str
    name: str
    declared: dict[str, Any] | None = None
    changed: dict[str, Any] | None = None
    log: tuple[GateChange, ...] = ()
    used_until: float = 0.0
    turn: str = ""
    line_next: bool = False

    @property
    def limits(self) -> dict[str, Any]:
        """The limits that hold now."""
        return (self.declared or {}) if self.changed is None else self.changed


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """The runs of a queue now: those that living workers drive, those that are ready to begin, and held keys."""

    driven: int = 0
    waiting: int = 0
    #: The keys with the most runs that have begun and not ended, each with their number.
    keys: tuple[tuple[str, int], ...] = ()
    #: The time since which the first of the waiting runs could have begun.
    oldest_at: datetime | None = None
