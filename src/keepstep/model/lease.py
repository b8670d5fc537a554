"""A lease: the right to write one run, numbered by its epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from .run import Run, Status

#: How long a lease lasts without a heartbeat, and how often a heartbeat comes.
LEASE_SECONDS = 15.0
HEARTBEAT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one worker to write one run. A store refuses a write whose epoch is not the newest."""

    run: str
    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A run that a worker has just been given. `taken_from` names the dead owner when it is a recovery.

    `before` is the status that the run had, and `since` when its row was last written: the end of the lease before.
    """

    run: Run
    lease: Lease
    taken_from: str | None = None
    before: Status | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """The answer to a claim: what was given, and when the next known run is due."""

    claims: tuple[Claim, ...] = ()
    next_due_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as its heartbeat row shows it. `leases` counts its runs, `damage` says why it is unreadable."""

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
