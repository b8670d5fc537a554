"""Events: the names and data that observers and watchers receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from .checkpoint import Kind
from .run import Status


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a run.

    `name` is like `step.completed`. `seq` is the number of the checkpoint that records the event, or else of the run's
    newest checkpoint. `life` marks the tokens of one execution of a step's body: a body that begins again after a crash
    has a higher one. It is 0 for other events, and for tokens that an older version has recorded. `agent` and
    `stage` are the names that the workflow gave with `ks.acting` and `ks.stage`, or in its graph. `trace` is the id of
    the run's trace, and `generation` counts the retries and rewinds by people before the event.
    """

    name: str
    run: str
    at: datetime
    workflow: str = ""
    seq: int = 0
    step: str = ""
    attempt: int = 0
    worker: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    life: int = 0
    agent: str | None = None
    stage: str | None = None
    trace: str = ""
    generation: int = 0


#: Every event name: a subject, a dot, and what happened to it, in lower case with underscores.
EventName = Literal[
    "agent.completed",
    "agent.health",
    "agent.started",
    "barrier.passed",
    "breaker.closed",
    "breaker.half_open",
    "breaker.opened",
    "budget.nearly_spent",
    "child.ended",
    "child.started",
    "decision.recorded",
    "edge.taken",
    "history.superseded",
    "hook.failed",
    "lease.lost",
    "patch.recorded",
    "progress.saved",
    "reply.sent",
    "run.cancelled",
    "run.completed",
    "run.created",
    "run.failed",
    "run.finished",
    "run.halted",
    "run.interrupted",
    "run.loaded",
    "run.paused",
    "run.queued",
    "run.recovered",
    "run.recovering",
    "run.resumed",
    "run.set_aside",
    "run.started",
    "run.waiting",
    "schedule.fired",
    "schedule.skipped",
    "signal.received",
    "state.rebuilt",
    "state.saved",
    "step.blocked",
    "step.cancelled",
    "step.completed",
    "step.failed",
    "step.in_doubt",
    "step.revisited",
    "step.started",
    "timer.fired",
    "token.emitted",
    "undo.decided",
    "value.published",
    "wait.started",
]

Level = Literal["INFO", "WARNING", "ERROR"]

#: Content of the fields of an event's `data`. An event omits a field that has no value.
FIELDS: Mapping[str, str] = {
    "again_seconds": "After how many seconds the step is asked again.",
    "call": "What the framework of an agent has called: `operation` (`chat` or `execute_tool`), `tool` and its `id`.",
    "continued_as": "The run that goes on for this one.",
    "created_by": "Who created the run.",
    "error": "The type and the message of an error.",
    "error_class": "The [class](policies.md#classes-of-errors) of the error, such as `timeout`.",
    "first_at": "When the first attempt began, in ISO 8601; absent in the first attempt.",
    "health": "The health of the agent: `healthy`, `degraded`, `unhealthy` or `offline`.",
    "hook": "The qualified name of the hook.",
    "kind": "The kind of budget: `seconds`, `steps`, `cost` or `tokens`.",
    "limit": "What the budget allows of it.",
    "moment": "When the hook was called: `before`, `after`, `error` or `cancel`.",
    "next": "The step that the edge leads to; empty at an end.",
    "origin": "The run that the run was forked from.",
    "outcome": "`success`, `failure` or `cancelled`.",
    "parent": "The run that has started it as a child.",
    "reason": "Why the run was set aside.",
    "retry_at": "When the step is attempted again, in ISO 8601.",
    "score": "The score of the agent's health, from 0 to 100.",
    "seconds": "How long the attempt took, absent if no body ran; of a run's end, its age.",
    "series": "The first run of the series that the run continues.",
    "service": "The name of the service.",
    "share": "The part of the budget that is used, from 0 to 1.",
    "spent": "What was reported with `ks.spend`: `cost`, `tokens`, `models`, `input_tokens`, `output_tokens`.",
    "started": "The id of the run that was started.",
    "taken_from": "The worker that held the run before.",
    "tick": "The tick of the schedule, in ISO 8601 and UTC.",
    "traceback": "Where the error was raised, as it is stored.",
    "traceparent": "The trace context of the run's starter.",
    "used": "How much of it the run has used.",
    "value": "The value that the record holds, as plain JSON; only `run.watch()` gives it.",
    "version": "The version of the workflow.",
    "visits": "How often the run had passed the step before.",
    "when": "`before` or `after` the step.",
    "why": "Why the step is not ready or which service it waits for, or why the tick starts no run.",
}


@dataclass(frozen=True, slots=True)
class EventSpec:
    """The meaning of an event, the fields of its data, and its log level."""

    about: str
    data: tuple[str, ...] = ()
    level: Level = "INFO"


#: Fields of every event that reports a record.
_RECORD = ("outcome", "error", "error_class", "traceback", "retry_at", "value")
#: Fields of every event that reports the end of a step.
_STEP = (*_RECORD, "seconds", "first_at", "spent", "call")
#: Fields of every event that reports the end of a run.
_END = (
    *("seconds", "error", "error_class", "traceback", "created_by", "version", "parent", "origin", "series"),
    *("traceparent", "continued_as"),
)

#: Every event that is emitted. A new one needs its name above, its row here, and the code that emits it.
EVENTS: Mapping[EventName, EventSpec] = {
    "run.created": EventSpec("The run was created."),
    "run.started": EventSpec("A worker drives the run, for the first time or after it was put away.", _RECORD),
    "run.recovering": EventSpec("A worker takes the run over from one that is gone.", ("taken_from",)),
    "run.recovered": EventSpec("The record of that takeover is durable.", _RECORD),
    "run.loaded": EventSpec("The records of the run were read; the step is the one with the newest outcome."),
    "run.resumed": EventSpec("Everything recorded has been replayed; the code goes on after this step."),
    "run.waiting": EventSpec("The run was put away until something that it waits for comes."),
    "run.paused": EventSpec("The run was put away because a person paused it."),
    "run.queued": EventSpec("The worker handed the run back to the queue."),
    "run.interrupted": EventSpec("A graph stops at a breakpoint.", ("when",)),
    "run.completed": EventSpec("The run has its result.", _END),
    "run.failed": EventSpec("The run ended with an error.", _END, "ERROR"),
    "run.cancelled": EventSpec("The run was cancelled, and its code has ended.", _END),
    "run.finished": EventSpec("The record of the run's end; only `run.watch()` gives it.", _RECORD),
    "run.set_aside": EventSpec("The engine cannot drive the run; a person has to look.", ("reason", *_RECORD), "ERROR"),
    "run.halted": EventSpec("The store could not save; the run goes on from its last record.", ("error",), "ERROR"),
    "lease.lost": EventSpec("Another worker holds the run now; this one has let it go.", level="WARNING"),
    "step.started": EventSpec("An attempt of a step begins, or the mark before an at-most-once step is set.", _RECORD),
    "step.completed": EventSpec("A step has its result.", _STEP),
    "step.failed": EventSpec("An attempt of a step failed; with `retry_at`, another follows.", _STEP, "WARNING"),
    "step.cancelled": EventSpec("The code no longer wants a step, sleep or wait.", _STEP),
    "step.in_doubt": EventSpec("An at-most-once step may have happened; a person decides.", ("error",), "WARNING"),
    "step.blocked": EventSpec(
        "A step is not ready, waits for a place at its service, or a check of `ks.wait_until` does not hold yet.",
        ("why", "again_seconds"),
    ),
    "step.revisited": EventSpec("A graph passes a step once more.", ("visits",)),
    "wait.started": EventSpec("The record of when a wait began.", _RECORD),
    "timer.fired": EventSpec("A sleep, a timeout or the deadline is over.", _RECORD),
    "signal.received": EventSpec("A wait got its signal, or the run was cancelled, paused or resumed.", _RECORD),
    "child.started": EventSpec("The run started a child.", _RECORD),
    "child.ended": EventSpec("The run got the result of a child.", _RECORD),
    "agent.started": EventSpec("The run has chosen an agent for a task; the record holds all scores.", _RECORD),
    "agent.completed": EventSpec("The task of an agent has ended, in whatever way.", _RECORD),
    "agent.health": EventSpec(
        "The health of an agent on this host has changed. No run and no record has it.", ("health", "score"), "WARNING"
    ),
    "barrier.passed": EventSpec("A checkpoint or the branches of a graph's step are durable.", _RECORD),
    "decision.recorded": EventSpec("It is recorded which part of a race won, or which step is next.", _RECORD),
    "edge.taken": EventSpec("A graph goes on from this step; the record of the choice is durable.", ("next",)),
    "patch.recorded": EventSpec("It is recorded which path of a `ks.patched` the run takes.", _RECORD),
    "value.published": EventSpec("A value was published.", _RECORD),
    "token.emitted": EventSpec("Tokens were emitted; `run.watch()` gives one event for each of them.", _RECORD),
    "progress.saved": EventSpec("The progress that a step saved for its next attempt is durable.", _RECORD),
    "reply.sent": EventSpec("A question was answered.", _RECORD),
    "undo.decided": EventSpec("It is recorded which steps are undone, or what a person decided about them.", _RECORD),
    "state.saved": EventSpec("The whole state of a graph or a schedule was recorded.", _RECORD),
    "state.rebuilt": EventSpec("A saved state was damaged, and was made anew from the records.", ("error",)),
    "history.superseded": EventSpec("Earlier records no longer count, or a person edited the state.", _RECORD),
    "budget.nearly_spent": EventSpec(
        "90 % of a kind of budget is used: that of the run, or that of the called workflow `step`.",
        ("kind", "used", "limit", "share"),
        level="WARNING",
    ),
    "breaker.opened": EventSpec(
        "The breaker of a service opens: calls have failed too often, or a probe has. No run and no record has it.",
        ("service",),
        level="WARNING",
    ),
    "breaker.half_open": EventSpec("The breaker of a service lets the first probe begin.", ("service",)),
    "breaker.closed": EventSpec("The breaker of a service closes: enough probes have succeeded.", ("service",)),
    "schedule.fired": EventSpec("A schedule has started the run of a tick.", ("tick", "started")),
    "schedule.skipped": EventSpec("A schedule starts no run for a tick.", ("tick", "why"), level="WARNING"),
    "hook.failed": EventSpec("A hook raised; the run goes on.", ("moment", "hook", "error"), "WARNING"),
}

#: The event for each kind of record, except that the start of a child has its own event.
_OF_KIND: Mapping[Kind, EventName] = {
    Kind.RUN_STARTED: "run.started",
    Kind.STEP_STARTED: "step.started",
    Kind.STEP_COMPLETED: "step.completed",
    Kind.STEP_FAILED: "step.failed",
    Kind.STEP_CANCELLED: "step.cancelled",
    Kind.BARRIER: "barrier.passed",
    Kind.WAIT_STARTED: "wait.started",
    Kind.TIMER: "timer.fired",
    Kind.SIGNAL: "signal.received",
    Kind.CHILD: "child.ended",
    Kind.AGENT_STARTED: "agent.started",
    Kind.AGENT_COMPLETED: "agent.completed",
    Kind.DECISION: "decision.recorded",
    Kind.PATCH: "patch.recorded",
    Kind.PUBLISHED: "value.published",
    Kind.EMITTED: "token.emitted",
    Kind.PROGRESS: "progress.saved",
    Kind.REPLY: "reply.sent",
    Kind.UNDO: "undo.decided",
    Kind.RECOVERED: "run.recovered",
    Kind.SUPERSEDED: "history.superseded",
    Kind.ERROR: "run.set_aside",
    Kind.STATE: "state.saved",
    Kind.KEPT: "state.saved",
    Kind.RUN_FINISHED: "run.finished",
}

#: The event for a run's move into each status.
STATUS_EVENTS: Mapping[Status, EventName] = {
    Status.QUEUED: "run.queued",
    Status.RUNNING: "run.started",
    Status.WAITING: "run.waiting",
    Status.PAUSED: "run.paused",
    Status.RECOVERING: "run.recovering",
    Status.COMPLETED: "run.completed",
    Status.FAILED: "run.failed",
    Status.CANCELLED: "run.cancelled",
    Status.SET_ASIDE: "run.set_aside",
}


def event_of_record(kind: str, data: Mapping[str, Any] | None) -> EventName:
    """Return the name of the event that reports a record."""
    if kind == Kind.CHILD and data and "child" in data:
        return "child.started"
    return _OF_KIND[Kind(kind)]


def problem_with(event: Event) -> str:
    """Return why an event is invalid: its name or a field of its data is not listed here. Empty if it is valid."""
    spec = next((spec for name, spec in EVENTS.items() if name == event.name), None)
    if spec is None:
        return f"no event is named {event.name!r}"
    unknown = sorted(event.data.keys() - set(spec.data))
    return f"{event.name} has no data named {', '.join(unknown)}" if unknown else ""
