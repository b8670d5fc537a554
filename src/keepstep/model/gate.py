"""A gate as stored: the limits of a queue or a service, and their last changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

#: Kind of the gate in front of runs.
QUEUE = "queue"
#: Kind of the gate in front of attempts that call an outside system.
SERVICE = "service"
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
class Share:
    """The places of a service that one worker holds, and the places that it needs.

    `since` is the time in seconds since 1970 from which its first waiting attempt has waited; None if none waits.
    """

    worker: str
    held: int = 0
    need: int = 0
    since: float | None = None


@dataclass(frozen=True, slots=True)
class GateInfo:
    """A gate: what code has declared, what a person has set instead, and its last changes, newest last.

    `used_until`, `turn` and `line_next` say where the rate and the turns of keys stand. A service also has its
    `spent_until`, where its spend stands, its `breaker` as plain data, the `shares` of living workers, and the number
    of runs that are `parked` there, the first of them since `parked_since`.
    """

    kind: str
    name: str
    declared: dict[str, Any] | None = None
    changed: dict[str, Any] | None = None
    log: tuple[GateChange, ...] = ()
    used_until: float = 0.0
    turn: str = ""
    line_next: bool = False
    spent_until: float = 0.0
    breaker: dict[str, Any] | None = None
    shares: tuple[Share, ...] = ()
    parked: int = 0
    parked_since: datetime | None = None

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


# -- what a worker and a service tell each other ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """The need of one worker at one service, and its news since the last ask.

    Until the answer is there, the worker lets no attempt begin that would make more than `running` run.
    """

    service: str
    #: Attempts whose bodies run here now.
    running: int = 0
    #: Attempts that wait here and could begin now, and parked runs that this worker could claim.
    waiting: int = 0
    #: How long the first of them has waited.
    waited_seconds: float = 0.0
    #: Attempts that have begun since the last ask.
    begun: int = 0
    #: Mean spend that is expected of one attempt.
    estimate: float = 0.0
    #: Real minus expected spend of attempts that have ended; minus the estimate for each token that has lapsed.
    spent: float = 0.0
    #: Failures that count for the breaker, except those of probes.
    failures: int = 0
    #: Probes that have succeeded, that have failed, and that were granted but will not begin.
    passed: int = 0
    failed: int = 0
    unused: int = 0
    #: Time for which a probe that begins now may run.
    probe_seconds: float = 60.0
    #: The worker gives its share back.
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer of a service to a worker."""

    service: str
    #: Attempts that may run here at once; None for any number. May be less than run now: then none begins.
    share: int | None = None
    #: Attempts that may begin within `tokens_seconds`; None for any number.
    tokens: int | None = None
    tokens_seconds: float = 0.0
    #: Attempts that may begin as probes, none otherwise; None if the breaker is closed.
    probes: int | None = None
    #: Asking again earlier, without a change of the need, is useless.
    again_seconds: float = 1.0
    #: Why less was granted than was asked for: "concurrency", "rate", "spend", "breaker", "lease", or nothing.
    why: str = ""
    #: Behaviour of attempts while the breaker is open: "wait" or "fail".
    when_open: str = "wait"
    #: Where the breaker stands: "closed", "open" or "half-open".
    breaker: str = "closed"
    #: "opened", "half-open" or "closed" if this ask has moved the breaker.
    moved: str = ""


@dataclass(frozen=True, slots=True)
class AtService:
    """Parked runs at a service that a worker could claim if it had places: their number, up to 100, and since when."""

    service: str
    runs: int
    since: datetime
