"""Keepstep: durable orchestration for Python, in which a finished step leaves a checkpoint and never runs again."""

from __future__ import annotations

from .engine.attempt import Done, NotDone
from .engine.blocking import open, run  # noqa: A004 - the words users know: ks.open, ks.run
from .engine.children import continue_as, signal, start
from .engine.engine import Engine
from .engine.facts import idempotency_key, now, random, run_id, uuid
from .engine.handle import RunHandle
from .engine.notes import checkpoint, emit, patched, progress, publish
from .engine.together import as_completed, chain, gather, map, race  # noqa: A004
from .engine.waits import sleep, timeout, wait_for
from .errors import (
    AlreadyFinished,
    DefinitionError,
    KeepstepError,
    NotSerializable,
    Permanent,
    ReplayMismatch,
    RetryAfter,
    RunCancelled,
    RunConflict,
    RunError,
    RunFailed,
    RunNotFound,
    RunSetAside,
    RunTimedOut,
    StepError,
    StepFailed,
    StepInDoubt,
    StepTimedOut,
    StoreError,
    StoreUnavailable,
    TimedOut,
)
from .model import Checkpoint, Event, Run, RunQuery, Status
from .policies import All, Any, Durability, Quorum, Retry, Timeout
from .values import Redactor, Secret, register
from .workflows.definition import Call, step, workflow

__version__ = "0.1.0"

__all__ = [
    "All",
    "AlreadyFinished",
    "Any",
    "Call",
    "Checkpoint",
    "DefinitionError",
    "Done",
    "Durability",
    "Engine",
    "Event",
    "KeepstepError",
    "NotDone",
    "NotSerializable",
    "Permanent",
    "Quorum",
    "Redactor",
    "ReplayMismatch",
    "Retry",
    "RetryAfter",
    "Run",
    "RunCancelled",
    "RunConflict",
    "RunError",
    "RunFailed",
    "RunHandle",
    "RunNotFound",
    "RunQuery",
    "RunSetAside",
    "RunTimedOut",
    "Secret",
    "Status",
    "StepError",
    "StepFailed",
    "StepInDoubt",
    "StepTimedOut",
    "StoreError",
    "StoreUnavailable",
    "TimedOut",
    "Timeout",
    "__version__",
    "as_completed",
    "chain",
    "checkpoint",
    "continue_as",
    "emit",
    "gather",
    "idempotency_key",
    "map",
    "now",
    "open",
    "patched",
    "progress",
    "publish",
    "race",
    "random",
    "register",
    "run",
    "run_id",
    "signal",
    "sleep",
    "start",
    "step",
    "timeout",
    "uuid",
    "wait_for",
    "workflow",
]
