"""A worker that exports by OTLP and kills itself twice: inside a body, and inside the second attempt of a step."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import keepstep as ks


def lives(what):
    """Count the lives that have come so far."""
    with Path(os.environ["LIVES"]).open("a+", encoding="ascii") as file:
        file.write(f"{what}\n")
        file.seek(0)
        return file.read().splitlines().count(what)


def call_out():
    with trace.get_tracer("client").start_as_current_span("GET"):
        pass


@ks.step
async def fetch(number: int) -> int:
    call_out()
    if number == 2 and lives("fetch") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@ks.step(retry=ks.Retry(attempts=3, base_seconds=0.01))
def flaky() -> int:
    call_out()
    if ks.attempt() == 1:
        raise ConnectionError("the line is dead")
    if lives("flaky") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 3


@ks.workflow
async def inner() -> int:
    return await fetch(0)


@ks.workflow
async def outer(again: bool) -> int:
    if not again:
        return 0
    for number in range(3):
        await fetch(number)
    await (await ks.start(inner, run_id="child"))
    await flaky()
    return ks.continue_as(False)


async def main(store):
    async with ks.open(store, observers="opentelemetry") as engine:
        await (await engine.get("order")).result(60)


if __name__ == "__main__":
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
    asyncio.run(main(sys.argv[1]))
