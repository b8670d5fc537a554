"""A store at a glance, for `keepstep top`: rates, runs that need a person, queues, services, agents and workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from ..model import GateInfo, QueueCounts, RunQuery, Status, WorkerInfo
from ..model.gate import QUEUE, SERVICE
from ..policies.breaker import CLOSED
from ..ports import instant
from ..records.counts import Counts, Rates, SlowStep, counts_in
from ..stores.services import breaker_of, limits_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..model.agent import HostedAgent
    from ..ports import Store

#: Slow steps that are shown, those with the most time first.
MOST_SLOW = 10
#: Runs of one kind that are counted at most, so that a sample stays cheap.
MOST_COUNTED = 1000
#: The queue of runs that name none, which is shown beside those with limits.
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker and its counters."""

    worker: WorkerInfo
    counts: Counts


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One queue: the limits that hold now, and its runs."""

    name: str
    limits: dict[str, object]
    counts: QueueCounts

    @property
    def driven(self) -> int | None:
        """The number of its runs that are driven; None without limits, because a store counts only limited places."""
        return self.counts.driven if self.limits else None


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """One service: its limits in words, the attempts that run and that wait, and where its breaker stands."""

    name: str
    limits: str
    running: int
    waiting: int
    parked: int
    breaker: str


@dataclass(frozen=True, slots=True)
class AgentSample:
    """One agent: its living hosts, and the tasks that it performs, has completed and has failed there."""

    name: str
    hosts: int
    tasks: int
    places: int | None
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a store at one time. `rates` and the sums belong to its living workers.

    `needs_person`, `open_failures` and `set_aside` are counted up to 1,000.
    """

    at: datetime
    rates: Rates
    workers: tuple[WorkerSample, ...]
    queues: tuple[QueueSample, ...]
    services: tuple[ServiceSample, ...]
    slow: tuple[tuple[str, SlowStep], ...]
    save_failures: int
    halted: int
    set_aside: int
    needs_person: int
    open_failures: int
    agents: tuple[AgentSample, ...]

    @property
    def oldest_at(self) -> datetime | None:
        """The time since which the first run of all queues could have begun."""
        return min((one.counts.oldest_at for one in self.queues if one.counts.oldest_at is not None), default=None)


def sample(store: Store) -> Sample:
    """Return the state of a store now. Runs that wait to begin are counted; no other run is read."""
    workers = tuple(WorkerSample(one, counts_in(one.progress)) for one in store.list_workers())
    living = [one.counts for one in workers if one.worker.alive]
    gates = {gate.name: gate for gate in store.list_gates(QUEUE)}
    names = sorted({_DEFAULT, *gates})
    now = store.clock.now()
    return Sample(
        at=instant(now),
        rates=Rates(
            sum(one.rates.runs for one in living),
            sum(one.rates.steps for one in living),
            sum(one.rates.failures for one in living),
        ),
        workers=workers,
        queues=tuple(
            QueueSample(name, gates[name].limits if name in gates else {}, store.count_queue(name)) for name in names
        ),
        services=tuple(_service(gate, now) for gate in store.list_gates(SERVICE)),
        slow=_slowest(living),
        save_failures=sum(one.save_failures for one in living),
        halted=sum(one.halted for one in living),
        set_aside=_count(store, RunQuery(status=frozenset({Status.SET_ASIDE}))),
        needs_person=_count(store, RunQuery(needs_person=True)),
        open_failures=_count(store, RunQuery(open_failure=True)),
        agents=tuple(_agents(workers)),
    )


def _count(store: Store, query: RunQuery) -> int:
    return store.list_runs(replace(query, limit=0, count_to=MOST_COUNTED)).count or 0


def _agents(workers: Iterable[WorkerSample]) -> Iterator[AgentSample]:
    """Yield the agents that living workers host, by name."""
    found: dict[str, list[HostedAgent]] = {}
    for one in workers:
        for agent in one.worker.agents if one.worker.alive else ():
            found.setdefault(agent.name, []).append(agent)
    for name, hosted in sorted(found.items()):
        places = [agent.max_tasks for agent in hosted]
        yield AgentSample(
            name,
            len(hosted),
            sum(agent.tasks for agent in hosted),
            None if None in places else sum(one or 0 for one in places),
            sum(agent.record.completed for agent in hosted),
            sum(agent.record.failed for agent in hosted),
        )


def _service(gate: GateInfo, now: float) -> ServiceSample:
    limits = limits_of(gate)
    status = CLOSED if limits.breaker is None else limits.breaker.status(breaker_of(gate), now)
    held, need = sum(one.held for one in gate.shares), sum(one.need for one in gate.shares)
    return ServiceSample(gate.name, str(limits), min(held, need), max(need - held, 0), gate.parked, status)


def _slowest(counts: list[Counts]) -> tuple[tuple[str, SlowStep], ...]:
    """Return the slow steps of several workers together."""
    found: dict[str, SlowStep] = {}
    for one in counts:
        for name, slow in one.slow.items():
            known = found.get(name, SlowStep())
            longest = max(known.longest_seconds, slow.longest_seconds)
            found[name] = SlowStep(known.count + slow.count, known.seconds + slow.seconds, longest)
    return tuple(sorted(found.items(), key=lambda one: -one[1].seconds)[:MOST_SLOW])
