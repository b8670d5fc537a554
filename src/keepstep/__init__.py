"""Keepstep: durable orchestration for Python, in which a finished step leaves a checkpoint and never runs again."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from .engine.artifacts import Artifact
    from .engine.blocking import open, run  # noqa: A004 - the words users know: ks.open, ks.run
    from .engine.engine import Engine
    from .engine.handle import RunHandle
    from .engine.memory import Memory, MemoryEntry
    from .errors import (
        AgentRefused,
        AgentUnavailable,
        AlreadyFinished,
        BatchFailed,
        BodyLost,
        BreakerOpen,
        BudgetExceeded,
        DefinitionError,
        ExecutionError,
        KeepstepError,
        NotSerializable,
        Permanent,
        QueueFull,
        ReplayMismatch,
        RetryAfter,
        RunCancelled,
        RunConflict,
        RunError,
        RunFailed,
        RunNotFound,
        RunSetAside,
        RunTimedOut,
        SignalsFull,
        StepError,
        StepFailed,
        StepInDoubt,
        StepTimedOut,
        StoreError,
        StoreUnavailable,
        TimedOut,
        UnknownToken,
        WaitFailed,
    )
    from .kernel.asking import ask, broadcast
    from .kernel.barriers import barrier
    from .kernel.budget import spend
    from .kernel.callback import Callback, callback
    from .kernel.children import continue_as, signal, start
    from .kernel.combine import as_completed, chain, gather, map, race  # noqa: A004
    from .kernel.composing import branch
    from .kernel.context import attempt, idempotency_key, in_step, in_workflow, log, replaying, run_id
    from .kernel.deterministic import now, random, uuid
    from .kernel.doubt import Done, NotDone
    from .kernel.messages import Topic
    from .kernel.naming import acting, stage
    from .kernel.perform import Team, perform
    from .kernel.publish import checkpoint, emit, patched, progress, publish, save_progress, saved_progress
    from .kernel.refine import Refined, refine
    from .kernel.undo import saga, undo
    from .kernel.until import wait_until
    from .kernel.waits import Request, sleep, timeout, wait_for
    from .model import Checkpoint, Event, Run, RunQuery, State, Status
    from .policies import (
        All,
        Amount,
        Any,
        Breaker,
        Budget,
        Cache,
        Cron,
        Durability,
        Every,
        Queue,
        Quorum,
        Rate,
        Recovery,
        Retain,
        Retry,
        Service,
        Timeout,
        Tolerate,
        when,
    )
    from .records.keys import Keys
    from .stores.open import register_store
    from .values import Redactor, Secret, register
    from .workflows.agent import Agent, agent
    from .workflows.call import Call
    from .workflows.channel import Channel
    from .workflows.dag import Dag
    from .workflows.decorators import step, workflow
    from .workflows.files.load import load
    from .workflows.graph import Changes, Goto, Graph
    from .workflows.hooks import Hooks, Occasion
    from .workflows.migration import MigrationInfo
    from .workflows.recovery import RecoveryInfo, recovery_handler

__version__ = "0.1.0"

#: Where each public name lives. A module is loaded when a name of it is first asked for, so that a program pays for
#: what it uses; type checkers and editors read the imports above, which say the same.
_HOMES = {
    "kernel.doubt": "Done NotDone",
    "engine.artifacts": "Artifact",
    "engine.blocking": "open run",
    "kernel.children": "continue_as signal start",
    "engine.engine": "Engine",
    "kernel.composing": "branch",
    "kernel.context": "attempt idempotency_key in_step in_workflow log replaying run_id",
    "kernel.messages": "Topic",
    "kernel.naming": "acting stage",
    "kernel.deterministic": "now random uuid",
    "engine.handle": "RunHandle",
    "kernel.perform": "Team perform",
    "engine.memory": "Memory MemoryEntry",
    "kernel.refine": "Refined refine",
    "kernel.publish": "checkpoint emit patched progress publish save_progress saved_progress",
    "kernel.asking": "ask broadcast",
    "kernel.barriers": "barrier",
    "kernel.budget": "spend",
    "kernel.combine": "as_completed chain gather map race",
    "kernel.callback": "Callback callback",
    "kernel.until": "wait_until",
    "kernel.undo": "saga undo",
    "kernel.waits": "Request sleep timeout wait_for",
    "errors": (
        "AgentRefused AgentUnavailable "
        "AlreadyFinished BatchFailed BodyLost BreakerOpen BudgetExceeded DefinitionError ExecutionError KeepstepError "
        "NotSerializable Permanent QueueFull ReplayMismatch RetryAfter RunCancelled RunConflict RunError RunFailed "
        "RunNotFound RunSetAside RunTimedOut SignalsFull StepError StepFailed StepInDoubt StepTimedOut StoreError "
        "StoreUnavailable TimedOut UnknownToken WaitFailed"
    ),
    "model": "Checkpoint Event Run RunQuery State Status",
    "policies": (
        "All Amount Any Breaker Budget Cache Cron Durability Every Queue Quorum Rate Recovery Retain Retry Service "
        "Timeout Tolerate when"
    ),
    "records.keys": "Keys",
    "stores.open": "register_store",
    "values": "Redactor Secret register",
    "workflows.agent": "Agent agent",
    "workflows.channel": "Channel",
    "workflows.dag": "Dag",
    "workflows.files.load": "load",
    "workflows.call": "Call",
    "workflows.decorators": "step workflow",
    "workflows.graph": "Changes Goto Graph",
    "workflows.hooks": "Hooks Occasion",
    "workflows.migration": "MigrationInfo",
    "workflows.recovery": "RecoveryInfo recovery_handler",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
#: The parts of the package, which need no import of their own: `keepstep.errors.StoreFull`.
_PARTS = {
    "agents",
    "bodies",
    "care",
    "checks",
    "cli",
    "drawing",
    "engine",
    "errors",
    "executors",
    "history",
    "kernel",
    "mcp",
    "model",
    "observers",
    "policies",
    "ports",
    "records",
    "stores",
    "testing",
    "values",
    "views",
    "web",
    "workflows",
}

__all__ = [
    "Agent",
    "AgentRefused",
    "AgentUnavailable",
    "All",
    "AlreadyFinished",
    "Amount",
    "Any",
    "Artifact",
    "BatchFailed",
    "BodyLost",
    "Breaker",
    "BreakerOpen",
    "Budget",
    "BudgetExceeded",
    "Cache",
    "Call",
    "Callback",
    "Changes",
    "Channel",
    "Checkpoint",
    "Cron",
    "Dag",
    "DefinitionError",
    "Done",
    "Durability",
    "Engine",
    "Event",
    "Every",
    "ExecutionError",
    "Goto",
    "Graph",
    "Hooks",
    "KeepstepError",
    "Keys",
    "Memory",
    "MemoryEntry",
    "MigrationInfo",
    "NotDone",
    "NotSerializable",
    "Occasion",
    "Permanent",
    "Queue",
    "QueueFull",
    "Quorum",
    "Rate",
    "Recovery",
    "RecoveryInfo",
    "Redactor",
    "Refined",
    "ReplayMismatch",
    "Request",
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
    "Service",
    "SignalsFull",
    "State",
    "Status",
    "StepError",
    "StepFailed",
    "StepInDoubt",
    "StepTimedOut",
    "StoreError",
    "StoreUnavailable",
    "Team",
    "TimedOut",
    "Timeout",
    "Tolerate",
    "Topic",
    "UnknownToken",
    "WaitFailed",
    "__version__",
    "acting",
    "agent",
    "as_completed",
    "ask",
    "attempt",
    "barrier",
    "branch",
    "broadcast",
    "callback",
    "chain",
    "checkpoint",
    "continue_as",
    "emit",
    "gather",
    "idempotency_key",
    "in_step",
    "in_workflow",
    "load",
    "log",
    "map",
    "now",
    "open",
    "patched",
    "perform",
    "progress",
    "publish",
    "race",
    "random",
    "recovery_handler",
    "refine",
    "register",
    "register_store",
    "replaying",
    "run",
    "run_id",
    "saga",
    "save_progress",
    "saved_progress",
    "signal",
    "sleep",
    "spend",
    "stage",
    "start",
    "step",
    "timeout",
    "undo",
    "uuid",
    "wait_for",
    "wait_until",
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
        return [*__all__]
