"""Keepstep: durable orchestration for Python, in which a finished step leaves a checkpoint and never runs again."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from .engine.attempt import Done, NotDone
    from .engine.blocking import open, run  # noqa: A004 - the words users know: ks.open, ks.run
    from .engine.children import continue_as, signal, start
    from .engine.engine import Engine
    from .engine.facts import idempotency_key, now, random, run_id, uuid
    from .engine.handle import RunHandle
    from .engine.notes import checkpoint, emit, patched, progress, publish
    from .engine.spending import spend
    from .engine.together import as_completed, chain, gather, map, race  # noqa: A004
    from .engine.waits import sleep, timeout, wait_for
    from .errors import (
        AlreadyFinished,
        BudgetExceeded,
        DefinitionError,
        ExecutionError,
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
    from .model import Checkpoint, Event, Run, RunQuery, State, Status
    from .policies import All, Any, Budget, Durability, Quorum, Retain, Retry, Timeout, when
    from .stores.keys import Keys
    from .values import Redactor, Secret, register
    from .workflows.dag import Dag
    from .workflows.declarative import load
    from .workflows.definition import Call, step, workflow
    from .workflows.graph import Changes, Goto, Graph
    from .workflows.hooks import Hooks, Occasion
    from .workflows.migration import MigrationInfo

__version__ = "0.1.0"

#: Where each public name lives. A module is loaded when a name of it is first asked for, so that a program pays for
#: what it uses; type checkers and editors read the imports above, which say the same.
_HOMES = {
    "engine.attempt": "Done NotDone",
    "engine.blocking": "open run",
    "engine.children": "continue_as signal start",
    "engine.engine": "Engine",
    "engine.facts": "idempotency_key now random run_id uuid",
    "engine.handle": "RunHandle",
    "engine.notes": "checkpoint emit patched progress publish",
    "engine.spending": "spend",
    "engine.together": "as_completed chain gather map race",
    "engine.waits": "sleep timeout wait_for",
    "errors": (
        "AlreadyFinished BudgetExceeded DefinitionError ExecutionError KeepstepError NotSerializable Permanent "
        "ReplayMismatch RetryAfter RunCancelled RunConflict RunError RunFailed RunNotFound RunSetAside RunTimedOut "
        "StepError StepFailed StepInDoubt StepTimedOut StoreError StoreUnavailable TimedOut"
    ),
    "model": "Checkpoint Event Run RunQuery State Status",
    "policies": "All Any Budget Durability Quorum Retain Retry Timeout when",
    "stores.keys": "Keys",
    "values": "Redactor Secret register",
    "workflows.dag": "Dag",
    "workflows.declarative": "load",
    "workflows.definition": "Call step workflow",
    "workflows.graph": "Changes Goto Graph",
    "workflows.hooks": "Hooks Occasion",
    "workflows.migration": "MigrationInfo",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
#: The parts of the package, which need no import of their own: `keepstep.errors.LeaseLost`.
_PARTS = {
    "cli",
    "engine",
    "errors",
    "executors",
    "model",
    "observers",
    "policies",
    "ports",
    "stores",
    "testing",
    "values",
    "workflows",
}

__all__ = [
    "All",
    "AlreadyFinished",
    "Any",
    "Budget",
    "BudgetExceeded",
    "Call",
    "Changes",
    "Checkpoint",
    "Dag",
    "DefinitionError",
    "Done",
    "Durability",
    "Engine",
    "Event",
    "ExecutionError",
    "Goto",
    "Graph",
    "Hooks",
    "KeepstepError",
    "Keys",
    "MigrationInfo",
    "NotDone",
    "NotSerializable",
    "Occasion",
    "Permanent",
    "Quorum",
    "Redactor",
    "ReplayMismatch",
    "Retain",
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
    "State",
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
    "load",
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
    "spend",
    "start",
    "step",
    "timeout",
    "uuid",
    "wait_for",
    "when",
    "workflow",
]

if not _TYPE_CHECKING:  # or a type checker would believe in any name

    def __getattr__(name: str) -> object:
        if name in _HOME:
            value = getattr(_import_module(f"{__name__}.{_HOME[name]}"), name)
            globals()[name] = value  # found at once from now on
            return value
        if name in _PARTS:
            return _import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_PARTS})
