"""A checkpoint: the sealed, append-only record that something about a run happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from .error import ErrorInfo


class Kind(StrEnum):
    """What a checkpoint records."""

    RUN_STARTED = "run started"
    STEP_STARTED = "step started"
    STEP_COMPLETED = "step completed"
    STEP_FAILED = "step failed"
    STEP_CANCELLED = "step cancelled"
    AGENT_STARTED = "agent started"
    AGENT_COMPLETED = "agent completed"
    BARRIER = "barrier"
    WAIT_STARTED = "wait started"
    TIMER = "timer"
    SIGNAL = "signal received"
    CHILD = "child"
    DECISION = "decision"
    PATCH = "patch"
    PUBLISHED = "published"
    EMITTED = "emitted"
    REPLY = "reply"
    RECOVERED = "recovered"
    SUPERSEDED = "superseded"
    ERROR = "error"
    STATE = "consolidated state"
    RUN_FINISHED = "run finished"


class Outcome(StrEnum):
    """How what a checkpoint records turned out."""

    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"


class Trigger(StrEnum):
    """Who caused a checkpoint."""

    AUTOMATIC = "automatic"
    MANUAL = "manual"
    RECOVERY = "recovery"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One record of a run's history, as a reader sees it.

    `value` is JSON text; `data` says what else belongs to it, such as the step that a graph took `next`.
    """

    run: str
    seq: int
    kind: Kind
    step: str
    outcome: Outcome
    ordinal: int
    attempt: int
    trigger: Trigger
    worker: str
    agent: str | None
    stage: str | None
    started_at: datetime | None
    finished_at: datetime
    digest: str
    value: bytes | None
    error: ErrorInfo | None
    retry_at: datetime | None
    format: int
    previous: str
    checksum: str
    data: Mapping[str, Any] = field(default_factory=dict)
