"""Health of an agent: a score from what its host tells, and the status that decides whether it gets tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ..model.agent import AgentRecord

HealthStatus = Literal["healthy", "degraded", "unhealthy", "offline"]

#: Seconds between two probes of an agent.
CHECK_SECONDS = 30.0
#: Checks without a sign of the host after which its agents are offline.
MOST_CHECKS = 3
#: Mean seconds of a task from which on an agent is slow, and the most that slowness costs.
SLOW_SECONDS = 10.0
MOST_FOR_SLOW = 30.0
#: Success rate below which each percent costs a point.
LEAST_SUCCESS = 0.8
#: Failures in a row that cost points, and how many.
FAILURES_IN_A_ROW = 3
FOR_FAILURES = 20.0
#: Seconds without a sign of the host that cost points, and how many.
UNSEEN_SECONDS = 60.0
FOR_UNSEEN = 40.0
#: The least score of each status, the best first.
LEAST: tuple[tuple[float, HealthStatus], ...] = ((80.0, "healthy"), (60.0, "degraded"), (20.0, "unhealthy"))
#: Statuses in which an agent gets tasks.
WORKING: frozenset[HealthStatus] = frozenset({"healthy", "degraded"})


@dataclass(frozen=True, slots=True)
class Health:
    """The health of an agent: a score from 0 to 100, its status, and the points that each part has cost."""

    score: float
    status: HealthStatus
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def works(self) -> bool:
        """Whether an agent in this health gets tasks."""
        return self.status in WORKING

    def __str__(self) -> str:
        costs = ", ".join(f"{name} -{points:g}" for name, points in self.parts.items())
        return f"{self.status} ({self.score:g}{': ' if costs else ''}{costs})"


#: The health of an agent that nothing speaks against, and of one without a living host.
WELL = Health(100.0, "healthy")
GONE = Health(0.0, "offline", MappingProxyType({"no living host": 100.0}))


def health_of(record: AgentRecord, unseen_seconds: float = 0.0, *, slow_seconds: float = SLOW_SECONDS) -> Health:
    """Return the health of an agent that its host has last told about `unseen_seconds` ago."""
    parts: dict[str, float] = {}
    rate, mean = record.success_rate, record.mean_seconds
    if mean is not None and mean > slow_seconds:
        parts["slow"] = min(MOST_FOR_SLOW, 10.0 * mean / slow_seconds)
    if rate is not None and rate < LEAST_SUCCESS:
        parts["failures"] = 100.0 * (LEAST_SUCCESS - rate)
    if record.failures_in_a_row >= FAILURES_IN_A_ROW:
        parts["failures in a row"] = FOR_FAILURES
    if unseen_seconds >= UNSEEN_SECONDS:
        parts["unseen"] = FOR_UNSEEN
    parts = {name: round(points, 1) for name, points in parts.items()}
    score = round(max(0.0, 100.0 - sum(parts.values())), 1)
    if unseen_seconds > MOST_CHECKS * CHECK_SECONDS:
        return Health(score, "offline", MappingProxyType(parts))
    status: HealthStatus = next((status for least, status in LEAST if score >= least), "offline")
    return Health(score, status, MappingProxyType(parts))
