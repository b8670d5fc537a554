"""A lease: the right to write one run, numbered by its epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from .agent import AGENTS, HostedAgent, agents_in
from .gate import AtService
from .keepers import KEEPER_QUEUE
from .run import Run, Status

#: Lifetime of a lease after a heartbeat, and the interval of heartbeats. Two heartbeats may be missed.
LEASE_SECONDS = 15.0
HEARTBEAT_SECONDS = 5.0
#: Key of a worker's queues among the progress of its runs; a worker that serves all queues has none.
QUEUES = "ks:queues"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one worker to write one run. A store refuses a write whose epoch is not the newest."""

    run: str
    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A run that a worker has just claimed. In a recovery, `taken_from` is the dead owner.

    `before` is the status before the claim. `since` is the last write to the run's row: the end of the previous lease.
    `service` is the service at which the run waited, if the worker's room there let it be claimed.
    `left` is the progress of the run in the heartbeats of its earlier owners, in no order.
    """

    run: Run
    lease: Lease
    taken_from: str | None = None
    before: Status | None = None
    since: datetime | None = None
    left: tuple[bytes, ...] = ()
    service: str | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """The answer to a claim: the claimed runs, and when the next known run is due.

    `at_services` names the services of the request at which more runs wait than it had room for. `elsewhere`: another
    worker looks for due runs and dead workers on behalf of the one that asked.
    """

    claims: tuple[Claim, ...] = ()
    next_due_at: datetime | None = None
    at_services: tuple[AtService, ...] = ()
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as its heartbeat row shows it. `leases` counts its runs; `damage` tells why a row is unreadable.

    `workflows` names the workflows that it knows. A pinned one is also there with its version, as `name@version`. Since
    `drain_at`, if given, it claims no more runs.
    """

    id: str
    host: str = ""
    pid: int = 0
    started_at: datetime | None = None
    renewed_at: datetime | None = None
    alive: bool = True
    leases: int = 0
    workflows: tuple[str, ...] = ()
    progress: dict[str, bytes] = field(default_factory=dict)
    damage: str = ""
    drain_at: datetime | None = None

    @property
    def claims(self) -> bool:
        """Whether it is alive and may claim runs."""
        return self.alive and self.drain_at is None

    @property
    def queues(self) -> tuple[str, ...] | None:
        """The queues whose runs it drives; None is all."""
        if QUEUES not in self.progress:
            return None
        from json import loads  # noqa: PLC0415 - driving a run does not need it

        try:
            return tuple(map(str, loads(self.progress[QUEUES])))
        except (ValueError, TypeError):
            return None

    @property
    def agents(self) -> tuple[HostedAgent, ...]:
        """The agents that it hosts."""
        return agents_in(self.progress.get(AGENTS))

    def serves(self, queue: str) -> bool:
        """Whether it drives runs of this queue."""
        return queue == KEEPER_QUEUE or self.queues is None or queue in self.queues

    @property
    def pins(self) -> dict[str, str]:
        """The versions of workflows of which the worker drives only that version."""
        return {name: version for name, at, version in (one.partition("@") for one in self.workflows) if at}

    @property
    def known(self) -> tuple[str, ...]:
        """The names of the workflows that it knows."""
        return tuple(name for name in self.workflows if "@" not in name)

    def drives(self, workflow: str, version: str) -> bool:
        """Whether the worker claims runs of this version of a workflow."""
        return self.claims and workflow in self.workflows and self.pins.get(workflow, version) == version


def versions_instead(workers: Iterable[WorkerInfo], workflow: str, version: str) -> tuple[str, ...]:
    """Return the pinned versions that living workers have instead of this one.

    Return nothing if one of them drives this version, or if none of them knows the workflow.
    """
    there = [worker for worker in workers if worker.claims and workflow in worker.workflows]
    if any(worker.drives(workflow, version) for worker in there):
        return ()
    return tuple(sorted({worker.pins[workflow] for worker in there}))
