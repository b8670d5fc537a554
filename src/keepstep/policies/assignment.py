"""Assignment of a task: the agents that can perform it, the best first, with the reason for each place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .health import WELL, Health

#: Weights of the three parts of a score.
FOR_MATCH, FOR_LOAD, FOR_RECORD = 0.6, 0.2, 0.2


@dataclass(frozen=True, slots=True)
class Candidate:
    """An agent as the assignment sees it. `places` is None without a limit; `withheld` tells why it gets no tasks."""

    name: str
    capabilities: Collection[str] = ()
    version: str = "1"
    tasks: int = 0
    places: int | None = None
    success_rate: float | None = None
    health: Health = WELL
    withheld: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one agent for one task, in parts from 0 to 1. `why_not` tells why it does not get the task."""

    agent: str
    score: float
    match: float
    load: float
    record: float
    health: str
    why_not: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the score as plain data, as it is recorded."""
        found = {name: getattr(self, name) for name in ("agent", "score", "match", "load", "record", "health")}
        return {**found, "why_not": self.why_not} if self.why_not else found


def match_of(needs: Collection[str], candidate: Candidate) -> float:
    """Return the share of the needed capabilities that an agent has. Its name alone is a full match."""
    if candidate.name in needs:
        return 1.0
    return sum(need in candidate.capabilities for need in needs) / len(needs) if needs else 1.0


def score_of(needs: Collection[str], candidate: Candidate, tried: Collection[str] = (), least: float = 1.0) -> Score:
    """Return the score of an agent, and why it does not get the task, if it does not."""
    match = match_of(needs, candidate)
    places = candidate.places or 1
    load = places / (places + candidate.tasks)  # never 0, so that agents with all places taken still differ
    record = 1.0 if candidate.success_rate is None else candidate.success_rate
    why_not = candidate.withheld
    if match < least or not match:
        why_not = "lacks a capability"
    elif candidate.name in tried:
        why_not = "was tried before"
    elif not why_not and not candidate.health.works:
        why_not = str(candidate.health)
    total = FOR_MATCH * match + FOR_LOAD * load + FOR_RECORD * record
    status = candidate.health.status
    return Score(candidate.name, round(total, 4), round(match, 4), round(load, 4), round(record, 4), status, why_not)


def rank(
    needs: Sequence[str], candidates: Iterable[Candidate], tried: Collection[str] = (), least: float = 1.0
) -> list[Score]:
    """Return the scores of all agents that match at all: those in question first, then by score and name."""
    scores = [score_of(needs, one, tried, least) for one in candidates]
    return sorted((one for one in scores if one.match), key=lambda one: (bool(one.why_not), -one.score, one.agent))
