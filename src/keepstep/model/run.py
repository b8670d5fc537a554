"""A run: one execution of a workflow, its status, and the moves between statuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from .error import ErrorInfo


class Status(StrEnum):
    """The status of a run."""

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
        """Whether the run has a result, an error or a cancellation, so that no worker claims it by itself."""
        return self in FINISHED

    @property
    def active(self) -> bool:
        """Whether a worker holds the run."""
        return self in ACTIVE


FINISHED = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})
ACTIVE = frozenset({Status.RUNNING, Status.RECOVERING})

_ENDS = (Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.SET_ASIDE)

#: Every legal move, and its actor. Every store refuses any other move. Printed in docs/data.md.
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
    """Whether a run may move from one status to another."""
    return old == new or (old, new) in MOVES


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a workflow. `input` and `output` are JSON text; times are UTC.

    `data_key` encrypts the run's values and is itself encrypted; it is empty for a run in plain text.

    `signals_read` is the number of signals that the run has read, as its worker last stored it; None if it never did.
    Records between the first and `kept_from` were removed, as were signals before `signals_from`; 0 if none was.
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
    dedupe: str | None = None
    # the head: fields that change while the run progresses
    seq: int = 0
    checksum: str = ""
    epoch: int = 0
    worker: str | None = None
    due_at: datetime | None = None
    wakes: tuple[str, ...] = ()
    signals: int = 0
    recoveries: int = 0
    updated_at: datetime | None = None
    signals_read: int | None = 0
    kept_from: int = 0
    signals_from: int = 0
    #: 1 for a run that has begun and not ended, and so holds its key; 2 for one that shares its parent's place.
    holds: int = 0
    #: The service at which a parked run waits for a place.
    service: str | None = None
    # from the newest record and the heartbeat, filled in on request
    output: bytes | None = None
    error: ErrorInfo | None = None
    continued_as: str | None = None
    progress: bytes | None = None


#: The `act` of the record that sets a run aside in the store that it was moved from.
HANDED_OVER = "copy"


def handed_over(run: Run) -> str:
    """Return, in words, the store that a run was handed over to; empty if the run was not handed over."""
    if run.status is Status.SET_ASIDE and run.error is not None and run.error.type == HANDED_OVER.capitalize():
        return run.error.message
    return ""


def removed_records(run: Run) -> str:
    """Return, in words, which records of a run were removed."""
    return f"records before {run.kept_from} were removed by keep='newest'"
