"""The observer that exports spans and metrics, and gives code its trace context, through an OpenTelemetry SDK."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol

from opentelemetry import context, metrics, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from ...errors import DefinitionError
from ...model import Checkpoint, Event, Run
from ...model.checkpoint import ENDS_STEP
from ...model.trace import span_id, trace_id, traceparent
from ...ports import Traced
from ...records.facts import records_again
from .metrics import Instruments, Read
from .spans import CurrentSpan, Spans

#: The exporter for a program that has configured no SDK: its module and its class.
_EXPORTER = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "OTLPSpanExporter")


class OpenTelemetryObserver:
    """Export one trace for each run, and metrics, to the SDK of the program.

    `provider` and `meter_provider` are those that the program has set globally, by default. Without any, spans go to
    the OTLP endpoint that the variables `OTEL_EXPORTER_OTLP_…` name.
    """

    def __init__(self, provider: TracerProvider | None = None, meter_provider: Any = None) -> None:
        self._provider = _provider() if provider is None else provider
        #: The SDK has no public way to hand over a finished span.
        self._processor: SpanProcessor = self._provider._active_span_processor  # noqa: SLF001 - as above
        scope = InstrumentationScope("keepstep")
        self._spans = Spans(self._provider.sampler, self._provider.resource, scope)
        meters = metrics.get_meter_provider() if meter_provider is None else meter_provider
        self._instruments = (
            Instruments(meters) if hasattr(meters, "force_flush") else None
        )  # without an SDK, nobody reads

    # -- records and events -------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        if self._instruments is not None:
            self._instruments.observe(event)
        for span in self._spans.of_end(event):
            self._processor.on_end(span)

    def recorded(self, run: Traced, record: Any) -> None:
        if self._instruments is not None:
            self._instruments.recorded(run.workflow, record)
        for span in self._spans.of_record(run, record):
            self._processor.on_end(span)

    def repeat(self, run: Traced, record: Any, end: Event | None) -> None:
        """Export the spans of a record once more, without counting it."""
        if record.kind in ENDS_STEP:
            for span in self._spans.of_record(run, record):
                self._processor.on_end(span)
        elif end is not None:
            for span in self._spans.of_end(end):
                self._processor.on_end(span)

    def observe_save(self, seconds: float, sizes: Sequence[int]) -> None:
        if self._instruments is not None:
            self._instruments.observe_save(seconds, sizes)

    def read_from(self, read: Read) -> None:
        """Export counters and gauges of an engine, too."""
        if self._instruments is not None:
            self._instruments.read_from(read)

    def flush(self) -> None:
        """Export everything that waits."""
        self._provider.force_flush()
        if self._instruments is not None:
            self._instruments.flush()

    # -- context ------------------------------------------------------------------------------------------------------

    def enter(self, run: Traced, step: str, attempt: int) -> None:
        """Make the derived context of a run or an attempt current in this task."""
        span = CurrentSpan(self._spans.trace(run), run, step, attempt)
        context.attach(trace.set_span_in_context(span))

    def traceparent(self, run: Traced) -> str:
        """Return the context of a run for what it starts."""
        return traceparent(run.trace, span_id(run.trace), sampled=self._spans.trace(run).sampled)


@cache
def _shared(provider: TracerProvider, meter_provider: Any) -> OpenTelemetryObserver:
    return OpenTelemetryObserver(provider, meter_provider)


def shared() -> OpenTelemetryObserver:
    """Return the observer of the program's providers: one for all engines, so that each instrument exists once."""
    return _shared(_provider(), metrics.get_meter_provider())


class _Handle(Protocol):
    """A handle on a run."""

    async def run(self) -> Run: ...

    async def checkpoints(self) -> Iterable[Checkpoint]: ...


async def export(run: _Handle, observer: OpenTelemetryObserver | None = None) -> None:
    """Export the trace of a run once more, from its records alone; the spans are those that were exported before.

    Use it for a run whose process died before its last spans had left it, or for another collector.
    """
    exporting = observer or OpenTelemetryObserver()
    facts = await run.run()
    traced = Traced(trace_id(facts.id, facts.created_at), facts.id, facts.workflow)
    for generation, record, end in records_again(facts, await run.checkpoints()):
        traced.generation = generation
        exporting.repeat(traced, record, end)
    exporting.flush()


def _provider() -> TracerProvider:
    """Return the program's provider; if it has set none, one that exports by OTLP."""
    found = trace.get_tracer_provider()
    return found if isinstance(found, TracerProvider) else _own_provider()


@cache
def _own_provider() -> TracerProvider:
    try:
        exporter = getattr(importlib.import_module(_EXPORTER[0]), _EXPORTER[1])()
    except ImportError:
        raise DefinitionError(
            "observers='opentelemetry' has nowhere to export to, because the program has set no tracer provider; call "
            "opentelemetry.trace.set_tracer_provider first, or install opentelemetry-exporter-otlp-proto-http"
        ) from None
    made = TracerProvider(resource=Resource.create())
    made.add_span_processor(BatchSpanProcessor(exporter))
    return made
