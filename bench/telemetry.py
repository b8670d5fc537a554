"""What telemetry costs many runs at once: nothing, an observer that ignores events, spans, and spans as OTLP."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keepstep as ks

from . import gauges, measure, ours

#: How the same runs are observed: not at all (twice, to see chance), by an observer that does nothing, with a batch
#: processor whose exporter keeps the spans, the same with metrics, and one that encodes spans for a collector.
WAYS = ("off", "off again", "events", "spans", "spans and metrics", "encoded spans")


class _Nothing:
    def observe(self, event: ks.Event) -> None:
        """Ignore it."""


def observer(way: str) -> Any:
    """Return the observer of a way, with an SDK of its own; None for none."""
    if way.startswith("off"):
        return None
    if way == "events":
        return _Nothing()
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.metrics import NoOpMeterProvider
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from keepstep.observers.opentelemetry import OpenTelemetryObserver

    class Encoding(InMemorySpanExporter):
        """Encodes spans as a collector gets them, and drops the text."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            encode_spans(spans).SerializeToString()
            return SpanExportResult.SUCCESS

    provider = TracerProvider(shutdown_on_exit=False)
    exporter = Encoding() if way == "encoded spans" else InMemorySpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=100_000))
    meters = MeterProvider([InMemoryMetricReader()]) if way == "spans and metrics" else NoOpMeterProvider()
    return OpenTelemetryObserver(provider, meters)


async def j2(where: Path, way: str, runs: int = 200, steps: int = 20, times: int = 3) -> dict[str, Any]:
    """Many runs at once, as in the job `j2`, observed in one of the ways."""
    async with ours.open_store(where, observers=observer(way)) as engine:

        async def one() -> None:
            await (await engine.start(ours.sequence, steps)).result()

        await one()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await asyncio.gather(*[one() for _ in range(runs)])
    return watch.rate(runs * steps * times)


JOBS = {"j2": j2}


def findings(effort: measure.Effort) -> list[measure.Finding]:
    """Measure the ways in turn, each in a fresh process; each is compared with `off` of the same round."""
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(effort.rounds(7)):
        rounds.append({way: measure.run("telemetry", "j2", way=way, runs=effort.size(200, 50)) for way in WAYS})
        time.sleep(0.1)  # lets the disk rest between rounds
    found = []
    for way in WAYS[1:]:
        ratios = [one[way]["per_second"] / one["off"]["per_second"] for one in rounds]
        cpu = [one[way]["cpu_us"] - one["off"]["cpu_us"] for one in rounds]
        found.append(
            measure.Finding(
                "telemetry",
                f"J2 with telemetry: {way}; beside it off",
                statistics.median(one[way]["per_second"] for one in rounds),
                "steps/s",
                floor=statistics.median(one["off"]["per_second"] for one in rounds),
                ratio=statistics.median(ratios),
                least_ratio=0.85 if way == "spans" else None,
                detail={"ratios": ratios, "cpu_us_more": statistics.median(cpu)},
            )
        )
    return found
