"""Spans made from records: the same ids, parents and times, whichever process makes them, and however often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from ...model import Event
from ...model.agent import agent_of
from ...model.trace import parsed_traceparent, span_id
from ...ports import Traced
from ...records.facts import IN_EVENTS
from ..prometheus import step_of

#: Runs of which the trace is kept in memory at most, so that parked runs cannot fill it. The others are derived again.
MOST_TRACES = 10_000

#: Status by the event of the end of a run.
RUN_ENDS = {"run.completed": "completed", "run.failed": "failed", "run.cancelled": "cancelled"}

_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_UNSET = Status(StatusCode.UNSET)


class Trace(msgspec.Struct):
    """The trace of one run: the context of its root, and the first start of each step that is tried again."""

    number: int
    flags: TraceFlags
    root: SpanContext
    sampled: bool
    open: dict[tuple[int, str], int] = {}

    def span(self, span: str) -> SpanContext:
        """Return the context of a span of this trace."""
        return SpanContext(self.number, int(span, 16), False, self.flags)


class CurrentSpan(NonRecordingSpan):
    """The span that is current in code. Its id is derived when somebody asks for it, which few bodies do."""

    def __init__(self, trace: Trace, run: Traced, step: str, attempt: int) -> None:
        self._derived: SpanContext | None = None
        self._of = (trace, run.trace, run.generation, step, attempt)

    def get_span_context(self) -> SpanContext:
        if self._derived is None:
            trace, name, generation, step, attempt = self._of
            self._derived = trace.span(span_id(name, generation, step, attempt)) if step else trace.root
        return self._derived


class RecordSpan(ReadableSpan):
    """A span of a record, whose parts are made when an exporter reads them, on the exporter's thread."""

    def __init__(self, context: SpanContext, facts: _Facts, make: Callable[[_Facts], dict[str, Any]]) -> None:
        self._context, self._facts, self._make = context, facts, make

    def __getattr__(self, name: str) -> Any:  # asked for what the class sets in its own __init__
        if name not in _MADE:
            raise AttributeError(name)
        super().__init__(context=self._context, **self._make(self._facts))
        return getattr(self, name)


#: Attributes that a span sets in its own `__init__`.
_MADE = frozenset(vars(ReadableSpan("")))


class _Facts(msgspec.Struct, gc=False):
    """The part of the record of a step that spans need, without its value. Many may wait for an exporter."""

    run: str
    workflow: str
    seq: int
    step: str
    attempt: int
    outcome: str
    worker: str
    agent: str | None
    stage: str | None
    error: Any
    data: dict[str, Any]
    #: The contexts of the run and the step, the start of the attempt and of the first one, and the end.
    root: SpanContext
    above: SpanContext
    start: int
    began: int
    end: int


class Spans:
    """Makes spans of records, unless the sampler leaves the trace of the run out."""

    def __init__(self, sampler: Sampler, resource: Resource, scope: InstrumentationScope) -> None:
        self._sampler = sampler
        self._always = {"resource": resource, "instrumentation_scope": scope}
        self._traces: dict[str, Trace] = {}
        self._make_step, self._make_attempt = self._step, self._attempt  # bound once, not for each span

    def trace(self, run: Traced) -> Trace:
        """Return the trace of a run. The sampler is asked with the same arguments in every process."""
        found = self._traces.get(run.trace)
        if found is None:
            if len(self._traces) >= MOST_TRACES:
                self._traces.pop(next(iter(self._traces)), None)
            number, name = int(run.trace, 16), f"workflow {run.workflow}"
            facts = {"workflow.id": run.run, "workflow.name": run.workflow}
            decision = self._sampler.should_sample(Context(), number, name, SpanKind.INTERNAL, facts).decision
            sampled = decision is Decision.RECORD_AND_SAMPLE
            flags = _SAMPLED if sampled else _NOT_SAMPLED
            root = SpanContext(number, int(span_id(run.trace), 16), False, flags)
            found = self._traces[run.trace] = Trace(number, flags, root, sampled)
        return found

    # -- steps --------------------------------------------------------------------------------------------------------

    def of_record(self, run: Traced, record: Any) -> list[ReadableSpan]:
        """Return the spans that the record of a step's end completes."""
        trace = self.trace(run)
        if not trace.sampled:
            return []
        started_at, data = record.started_at, _NOTHING
        if record.data:
            data = {key: record.data[key] for key in IN_EVENTS if key in record.data}
        generation, step = run.generation, record.step
        if started_at is None and "first_at" not in data and (generation, step) not in trace.open:
            return []  # no body has run: a sleep, a wait, or a refusal
        end = nanoseconds(record.finished_at)
        start = began = None if started_at is None else nanoseconds(started_at)
        if "first_at" in data:
            began = nanoseconds(datetime.fromisoformat(data["first_at"]))
        elif trace.open:
            began = trace.open.get((generation, step), began)
        above = trace.span(span_id(run.trace, generation, step))
        facts = _Facts(
            run.run,
            run.workflow,
            record.seq,
            step,
            record.attempt,
            record.outcome,
            record.worker,
            record.agent,
            record.stage,
            record.error,
            data,
            trace.root,
            above,
            start or end,
            began or end,
            end,
        )
        spans: list[ReadableSpan] = []
        if start is not None:
            context = trace.span(span_id(run.trace, generation, step, record.attempt))
            spans.append(RecordSpan(context, facts, self._make_attempt))
        if record.retry_at is not None:
            trace.open.setdefault((generation, step), began or end)
        else:
            if trace.open:
                trace.open.pop((generation, step), None)
            spans.append(RecordSpan(above, facts, self._make_step))
        return spans

    def _step(self, facts: _Facts) -> dict[str, Any]:
        attributes = _about_step(facts)
        attributes |= {"keepstep.attempts": facts.attempt, "keepstep.outcome": str(facts.outcome)}
        name, error = f"step {attributes['keepstep.step.name']}", _error_of(facts.error, facts.end)
        return self._parts(name, facts.root, (facts.began, facts.end), attributes, error)

    def _attempt(self, facts: _Facts) -> dict[str, Any]:
        attributes = _about_step(facts)
        attributes["attempt"] = facts.attempt
        name, kind = f"attempt {attributes['keepstep.step.name']}", SpanKind.INTERNAL
        if "call" in facts.data or "spent" in facts.data:
            attributes |= gen_ai(facts)
            operation = attributes["gen_ai.operation.name"]
            if operation == "chat":
                name, kind = f"chat {attributes['gen_ai.request.model'] or ''}".rstrip(), SpanKind.CLIENT
            elif operation is not None:
                name = f"{operation} {attributes['gen_ai.tool.name'] or ''}".rstrip()
        times, error = (facts.start, facts.end), _error_of(facts.error, facts.end)
        return self._parts(name, facts.above, times, attributes, error, kind=kind)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def of_end(self, event: Event) -> list[ReadableSpan]:
        """Return the spans that the end of a run completes."""
        if event.name not in RUN_ENDS or "seconds" not in event.data:
            return []
        trace = self.trace(Traced(event.trace, event.run, event.workflow))
        self._traces.pop(event.trace, None)
        if not trace.sampled:
            return []
        spans: list[ReadableSpan] = []
        end = nanoseconds(event.at)
        for (generation, key), began in trace.open.items():  # the run has ended during their backoff
            context = trace.span(span_id(event.trace, generation, key))
            about = {"workflow.id": event.run, "workflow.name": event.workflow, "step.id": key}
            parts = self._parts(f"step {step_of(key)}", trace.root, (began, end), about, _NO_ERROR)
            spans.append(ReadableSpan(context=context, **parts))
        spans.append(ReadableSpan(context=trace.root, **self._root(event, end)))
        return spans

    def _root(self, event: Event, end: int) -> dict[str, Any]:
        data, agent = event.data, agent_of(event.workflow)
        attributes: dict[str, Any] = {
            "workflow.id": event.run,
            "workflow.name": event.workflow,
            "workflow.version": data.get("version", ""),
            "keepstep.status": RUN_ENDS[event.name],
            "keepstep.created_by": data.get("created_by", ""),
            "keepstep.parent": data.get("parent"),
            "keepstep.origin": data.get("origin"),
            "keepstep.series": data.get("series"),
            "keepstep.continued_as": data.get("continued_as"),
            "agent.id": agent,
            "gen_ai.operation.name": "invoke_workflow" if agent is None else "invoke_agent",
            "gen_ai.workflow.name": event.workflow if agent is None else None,
            "gen_ai.agent.name": agent,
            "gen_ai.conversation.id": event.run,
        }
        name = f"workflow {event.workflow}" if agent is None else f"invoke_agent {agent}"
        kind, _, message = data.get("error", "").partition(": ")
        error = _error(kind, message, data.get("traceback", ""), end) if kind else _NO_ERROR
        times = (end - round(data["seconds"] * 1e6) * 1000, end)
        return self._parts(name, None, times, attributes, error, links=_links(data))

    def _parts(
        self,
        name: str,
        parent: SpanContext | None,
        times: tuple[int, int],
        attributes: Mapping[str, Any],
        error: _Error,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: tuple[Link, ...] = (),
    ) -> dict[str, Any]:
        """Return the arguments of a span besides its context."""
        return {
            "name": name,
            "parent": parent,
            "attributes": {key: value for key, value in attributes.items() if value is not None},
            "events": error.events,
            "links": links,
            "kind": kind,
            "status": error.status,
            "start_time": times[0],
            "end_time": times[1],
            **self._always,
        }


class _Error(NamedTuple):
    """An error as OpenTelemetry tells it: a status, and an event that describes the exception."""

    status: Status = _UNSET
    events: tuple[SpanEvent, ...] = ()


_NO_ERROR = _Error()
_NOTHING: dict[str, Any] = {}


def _error_of(error: Any, at: int) -> _Error:
    return _NO_ERROR if error is None else _error(error.type, error.message, error.traceback, at)


def _error(kind: str, message: str, traceback: str, at: int) -> _Error:
    attributes = {"exception.type": kind, "exception.message": message}
    if traceback:
        attributes["exception.stacktrace"] = traceback
    return _Error(Status(StatusCode.ERROR, f"{kind}: {message}"), (SpanEvent("exception", attributes, at),))


def nanoseconds(at: datetime) -> int:
    """Return an instant as OpenTelemetry counts it; records have microseconds, which a float holds exactly."""
    return round(at.timestamp() * 1e6) * 1000


def _about_step(facts: _Facts) -> dict[str, Any]:
    operation = facts.data["call"]["operation"] if "call" in facts.data else ""
    return {
        "workflow.id": facts.run,
        "workflow.name": facts.workflow,
        "step.id": facts.step,
        "step.kind": {"chat": "model", "execute_tool": "tool"}.get(operation, "step"),
        "keepstep.step.name": step_of(facts.step),
        "keepstep.worker": facts.worker,
        "keepstep.seq": facts.seq,
        "keepstep.stage": facts.stage,
        "agent.id": facts.agent,
    }


def gen_ai(facts: _Facts) -> dict[str, Any]:
    """Return the attributes of a model's or a tool's call. The conventions for these names are still in development."""
    call, spent = facts.data.get("call", {}), facts.data.get("spent", {})
    models = list(spent.get("models", ()))
    return {
        "gen_ai.operation.name": call.get("operation"),
        "gen_ai.agent.name": facts.agent,
        "gen_ai.conversation.id": facts.run,
        "gen_ai.request.model": models[0] if models else None,
        "gen_ai.tool.name": call.get("tool"),
        "gen_ai.tool.call.id": call.get("id"),
        "gen_ai.usage.input_tokens": spent.get("input_tokens"),
        "gen_ai.usage.output_tokens": spent.get("output_tokens"),
        "keepstep.tokens": spent.get("tokens"),
        "keepstep.cost": spent.get("cost") or None,
    }


def _links(data: Mapping[str, Any]) -> tuple[Link, ...]:
    """Return a link to who has started the run: its parent, its origin, the run before it, or a caller."""
    found = parsed_traceparent(data.get("traceparent"))
    if found is None:
        return ()
    trace, span, sampled = found
    flags = _SAMPLED if sampled else _NOT_SAMPLED
    context = SpanContext(int(trace, 16), int(span, 16), True, flags)
    kinds = ("fork", "origin"), ("continuation", "series"), ("parent", "parent")
    kind = next((kind for kind, field in kinds if data.get(field)), "starter")
    return (Link(context, {"keepstep.link": kind}),)
