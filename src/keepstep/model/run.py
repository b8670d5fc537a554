"""A run: one execution of a workflow, its status, and the moves between statuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from .error import ErrorInfo


class Status(StrEnum):
    """Where a run stands. Four of them are ends."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    RECOVERING = "recovering"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SET_ASIDE = "set aside"

    @property
    def finished(self) -> bool:
        """The run has a result, an error or a cancellation, and no worker will take it by itself."""
        return self in FINISHED

    @property
    def active(self) -> bool:
        """A worker holds the run."""
        return self in ACTIVE


FINISHED = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})
ACTIVE = frozenset({Status.RUNNING, Status.RECOVERING})

_ENDS = (Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.SET_ASIDE)

#: Every legal move, and who makes it. Any other is refused by every store. Printed in docs/data.md.
MOVES: dict[tuple[Status, Status], str] = {
    (Status.QUEUED, Status.RUNNING): "a worker claims it",
    (Status.WAITING, Status.RUNNING): "a worker claims it when it is due",
    (Status.PAUSED, Status.RUNNING): "a worker claims it after a person resumed it",
    (Status.RUNNING, Status.RECOVERING): "a worker takes it over from a dead one",
    (Status.RECOVERING, Status.RECOVERING): "a worker takes it over from a dead one",
    (Status.RECOVERING, Status.RUNNING): "its worker records new progress",
    **{(s, Status.WAITING): "its worker parks it" for s in ACTIVE},
    **{(s, Status.PAUSED): "its worker pauses it at a step boundary" for s in ACTIVE},
    **{(s, Status.QUEUED): "its worker hands it back" for s in ACTIVE},
    **{(s, end): "its worker ends it" for s in ACTIVE for end in _ENDS},
    (Status.FAILED, Status.RUNNING): "a person's command claims it",
    (Status.SET_ASIDE, Status.RUNNING): "a person's command claims it",
    (Status.COMPLETED, Status.RUNNING): "a person's command claims it",
}


def may_move(old: Status, new: Status) -> bool:
    """Whether a run may go from one status to another."""
    return old == new or (old, new) in MOVES


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a workflow. `input` and `output` are JSON text; times are UTC.

    `data_key` is the key that the run's values are encrypted with, itself encrypted; empty for a run in plain text.
    """

    id: str
    workflow: str
    status: Status
    created_at: datetime
    created_by: str = ""
    version: str = "1"
    fingerprint: str = ""
    input: bytes = b"null"
    seed: str = ""
    parent: str | None = None
    parent_key: str | None = None
    origin: str | None = None
    queue: str = "default"
    priority: int = 0
    key: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    deadline_at: datetime | None = None
    traceparent: str | None = None
    data_key: str = ""
    # the head: what changes while the run goes on
    seq: int = 0
    checksum: str = ""
    epoch: int = 0
    worker: str | None = None
    due_at: datetime | None = None
    wakes: tuple[str, ...] = ()
    signals: int = 0
    recoveries: int = 0
    updated_at: datetime | None = None
    # from the newest record and the heartbeat, when asked for
    output: bytes | None = None
    error: ErrorInfo | None = None
    continued_as: str | None = None
    progress: bytes | None = None
