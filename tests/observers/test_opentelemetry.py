"""Traces and metrics of OpenTelemetry: made from records, through a real collector and across crashes."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased

import keepstep as ks
from keepstep.errors import DefinitionError
from keepstep.model.trace import parsed_traceparent, span_id, trace_id
from keepstep.observers import resolve
from keepstep.observers.opentelemetry import OpenTelemetryObserver, export
from keepstep.ports import STARTER
from tests.observers import telemetry_program
from tests.observers.collector import attributes, by_id, collecting

PROGRAM = Path(telemetry_program.__file__)
STARTED_BY = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def nanoseconds(at):
    return round((at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1e6) * 1000


# -- across crashes ----------------------------------------------------------------------------------------------------


def live(folder, url, delay):
    """Have one life of the program, and return how it ended."""
    env = {**os.environ, "LIVES": str(folder / "lives"), "OTEL_EXPORTER_OTLP_ENDPOINT": url}
    env["OTEL_BSP_SCHEDULE_DELAY"] = delay
    return subprocess.run([sys.executable, PROGRAM, folder / "runs.db"], env=env, timeout=120, check=False).returncode


async def started(store):
    """Start the run as another program does, inside a span of its own."""
    token = STARTER.set(STARTED_BY)
    async with ks.open(store, worker=False) as engine:
        await engine.start(telemetry_program.outer, True, run_id="order")
    STARTER.reset(token)


async def recorded(store):
    async with ks.open(store, worker=False) as engine:
        runs = {one.id: one for one in (await engine.list()).runs}
        return runs, {one: await (await engine.get(one)).checkpoints() for one in runs}


@pytest.mark.parametrize("delay", ["20", "60000"], ids=["exported at once", "lost at each kill"])
def test_killed_run_gives_one_trace(tmp_path, delay):
    store = tmp_path / "runs.db"
    asyncio.run(started(store))
    with collecting() as collector:
        ends = [live(tmp_path, collector.url, delay) for _ in range(3)]
        assert ends == [-signal.SIGKILL, -signal.SIGKILL, 0]
        runs, records = asyncio.run(recorded(store))
        judge(by_id(collector.spans).values(), runs, records)
    assert {"keepstep.attempts", "keepstep.attempt.duration", "keepstep.open.runs"} <= collector.metrics
    assert {"keepstep.commit.duration", "keepstep.save.failures", "keepstep.process.resident"} <= collector.metrics


def judge(spans, runs, records):
    own = [one for one in spans if one.name != "GET"]
    of_run = {name: [one for one in own if one.trace_id.hex() == trace_of(run)] for name, run in runs.items()}
    assert sum(map(len, of_run.values())) == len(own), "a span is in no run's trace"
    assert sorted(one.name for one in of_run["order"]) == sorted(
        ["workflow outer", *["step fetch", "attempt fetch"] * 3, "step flaky", *["attempt flaky"] * 2]
    )
    assert sorted(one.name for one in of_run["child"]) == ["attempt fetch", "step fetch", "workflow inner"]
    known = {(one.trace_id, one.span_id): one for one in spans}
    for one in spans:
        if not one.name.startswith("workflow"):
            above = known[one.trace_id, one.parent_span_id]  # a parent that never arrives is a hole in the trace
            level = {"attempt": "step", "step": "workflow", "GET": "attempt"}[one.name.split()[0]]
            assert above.name.split()[0] == level
    for name, run in runs.items():
        root = next(one for one in of_run[name] if one.name.startswith("workflow"))
        assert root.parent_span_id == b""
        assert (root.start_time_unix_nano, root.end_time_unix_nano) == (
            nanoseconds(run.created_at),
            nanoseconds(records[name][-1].finished_at),
        )
        assert_times(of_run[name], records[name])
    assert links(of_run, "order") == [(STARTED_BY[3:35], "starter")]
    assert links(of_run, "child") == [(trace_of(runs["order"]), "parent")]
    assert links(of_run, "order~2") == [(trace_of(runs["order"]), "continuation")]


def assert_times(spans, records):
    attempts = {attributes(one)["keepstep.seq"]: one for one in spans if one.name.startswith("attempt")}
    bodies = {one.seq: one for one in records if one.started_at is not None and one.kind.startswith("step")}
    assert set(attempts) == set(bodies)
    for seq, one in bodies.items():
        found = attempts[seq]
        times = nanoseconds(one.started_at), nanoseconds(one.finished_at)
        assert (found.start_time_unix_nano, found.end_time_unix_nano) == times
    for step in (one for one in spans if one.name.startswith("step")):
        below = [one for one in attempts.values() if one.parent_span_id == step.span_id]
        assert step.start_time_unix_nano == min(one.start_time_unix_nano for one in below)
        assert step.end_time_unix_nano == max(one.end_time_unix_nano for one in below)


def trace_of(run):
    return trace_id(run.id, run.created_at)


def links(of_run, name):
    root = next(one for one in of_run[name] if one.name.startswith("workflow"))
    return [(one.trace_id.hex(), attributes(one)["keepstep.link"]) for one in root.links]


# -- one process -------------------------------------------------------------------------------------------------------


class Telemetry:
    """An SDK whose spans and metrics stay in memory."""

    def __init__(self, sampler=None):
        self.memory, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.tracer = self.provider.get_tracer("client")
        self.observer = OpenTelemetryObserver(self.provider, MeterProvider([self.reader], shutdown_on_exit=False))

    @property
    def spans(self):
        return self.memory.get_finished_spans()

    def named(self, name):
        return [one for one in self.spans if one.name == name]

    def points(self):
        """The points of every metric by its name."""
        found = {}
        for resource in self.reader.get_metrics_data().resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    found[metric.name] = [
                        (dict(one.attributes), getattr(one, "value", getattr(one, "count", None)))
                        for one in metric.data.data_points
                    ]
        return found


@pytest.fixture
def telemetry():
    return Telemetry()


def plain(span):
    return (span.name, span.context, span.parent, span.start_time, span.end_time, dict(span.attributes), span.links)


@ks.step
async def double(number: int) -> int:
    return 2 * number


@ks.workflow
async def doubled(number: int) -> int:
    return await double(number)


async def test_second_exporter_gives_the_same_spans(telemetry):
    tries = []

    @ks.step(retry=ks.Retry(attempts=3, base_seconds=0.0))
    async def flaky():
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("no")

    @ks.step
    async def slow():
        await asyncio.sleep(60)

    @ks.workflow(name="again")
    async def program():
        await flaky()
        await ks.race(slow(), double(1))

    async with ks.open("memory:", observers=telemetry.observer) as engine:
        run = await engine.start(program)
        await run.result(30)
        other = Telemetry()
        await export(run, other.observer)
    assert len(telemetry.spans) == 9
    assert sorted(map(plain, telemetry.spans), key=str) == sorted(map(plain, other.spans), key=str)
    assert telemetry.named("step slow")[0].attributes["keepstep.outcome"] == "cancelled"
    assert telemetry.named("step flaky")[0].attributes["keepstep.attempts"] == 3


@pytest.mark.parametrize("kind", ["async", "timed", "thread", "sync workflow"])
async def test_spans_of_a_body_nest_below_its_attempt(telemetry, kind):
    def body():
        with telemetry.tracer.start_as_current_span("GET"):
            return ks.attempt()

    @ks.step(timeout=30 if kind == "timed" else None)
    async def call():
        return body()

    @ks.step
    def call_in_thread():
        return body()

    step = call_in_thread if kind in ("thread", "sync workflow") else call

    @ks.workflow(name=f"nesting {kind}")
    async def program():
        return await step()

    @ks.workflow(name="nesting in a def")
    def in_def():
        with telemetry.tracer.start_as_current_span("code"):
            return step().result()

    async with ks.open("memory:", observers=telemetry.observer) as engine:
        await (await engine.start(in_def if kind == "sync workflow" else program)).result(30)
    (attempt,) = [one for one in telemetry.spans if one.name.startswith("attempt")]
    (inside,) = telemetry.named("GET")
    assert inside.parent.span_id == attempt.context.span_id
    assert inside.context.trace_id == attempt.context.trace_id
    for code in telemetry.named("code"):
        (root,) = [one for one in telemetry.spans if one.name.startswith("workflow")]
        assert code.parent.span_id == root.context.span_id


async def test_failed_attempt_has_status_and_exception(telemetry):
    @ks.step(retry=ks.Retry(attempts=1))
    async def broken():
        raise ValueError("password=hunter2-and-more")

    @ks.workflow(name="broken")
    async def program():
        await broken()

    async with ks.open("memory:", observers=telemetry.observer) as engine:
        with pytest.raises(ks.RunFailed):
            await (await engine.start(program)).result(30)
    for one in telemetry.spans:
        assert one.status.status_code.name == "ERROR"
        (event,) = one.events
        assert event.name == "exception"
        assert "hunter2" not in str((one.status.description, dict(event.attributes)))
    (attempt,) = telemetry.named("attempt broken")
    assert attempt.events[0].attributes["exception.type"] == "ValueError"
    assert "in broken" in attempt.events[0].attributes["exception.stacktrace"]


async def test_no_value_is_exported(telemetry):
    @ks.step
    async def echo(text):
        return text

    @ks.workflow(name="silent")
    async def program(text):
        return await echo(text)

    async with ks.open("memory:", observers=telemetry.observer) as engine:
        await (await engine.start(program, "a-private-text")).result(30)
    assert len(telemetry.spans) == 3
    assert "a-private-text" not in "".join(one.to_json() for one in telemetry.spans)


async def test_unsampled_run_gives_no_spans_below_either():
    telemetry = Telemetry(ParentBased(ALWAYS_OFF))

    @ks.step
    async def call():
        with telemetry.tracer.start_as_current_span("GET"):
            return api.get_current_span().get_span_context()

    flags = []

    @ks.workflow(name="unsampled")
    async def program():
        flags.append(await plain_call())

    @ks.step
    async def plain_call():
        return format(api.get_current_span().get_span_context().trace_flags, "02x")

    async with ks.open("memory:", observers=telemetry.observer) as engine:
        run = await engine.start(program)
        await run.result(30)
        child = await engine.fork(run.id)
        assert (await child.run()).traceparent.endswith("-00")
    assert telemetry.spans == ()
    assert flags[0] == "00"


async def test_sampler_is_asked_by_trace_id():
    telemetry = Telemetry(ParentBased(TraceIdRatioBased(0.5)))
    async with ks.open("memory:", observers=telemetry.observer) as engine:
        runs = [await engine.start(doubled, number) for number in range(40)]
        for run in runs:
            await run.result(30)
        facts = [await run.run() for run in runs]
    bound = TraceIdRatioBased.get_bound_for_rate(0.5)
    wanted = {int(trace_of(one), 16) for one in facts if int(trace_of(one), 16) & (2**64 - 1) < bound}
    assert 0 < len(wanted) < 40
    assert {one.context.trace_id for one in telemetry.spans} == wanted
    assert len(telemetry.spans) == 3 * len(wanted)


async def test_starter_is_the_span_around_the_start(telemetry):
    async with ks.open("memory:", observers=telemetry.observer) as engine:
        with telemetry.tracer.start_as_current_span("POST"):
            run = await engine.start(doubled, 1)
        await run.result(30)
        (starter,) = telemetry.named("POST")
        assert parsed_traceparent((await run.run()).traceparent) == (
            f"{starter.context.trace_id:032x}",
            f"{starter.context.span_id:016x}",
            True,
        )
    (root,) = telemetry.named("workflow doubled")
    (link,) = root.links
    assert (link.context.span_id, dict(link.attributes)) == (starter.context.span_id, {"keepstep.link": "starter"})
    assert root.parent is None


def test_blocking_start_has_its_starter(telemetry):
    with ks.open("memory:") as engine:
        with telemetry.tracer.start_as_current_span("POST") as starter:
            run = engine.start(doubled, 1)
        assert f"{starter.get_span_context().span_id:016x}" in run.run().traceparent
        assert engine.start(doubled, 2).run().traceparent is None


async def test_malformed_starter_is_left_out():
    async with ks.open("memory:") as engine:
        token = STARTER.set("00-zz-zz-01")
        run = await engine.start(doubled, 1)
        STARTER.reset(token)
        assert (await run.run()).traceparent is None


async def test_fork_links_to_its_origin(telemetry):
    async with ks.open("memory:", observers=telemetry.observer) as engine:
        run = await engine.start(doubled, 1)
        await run.result(30)
        fork = await engine.fork(run.id)
        await fork.result(30)
        origin, facts = await run.run(), await fork.run()
    root = next(one for one in telemetry.named("workflow doubled") if one.attributes["workflow.id"] == fork.id)
    assert f"{root.context.trace_id:032x}" == trace_of(facts) != trace_of(origin)
    (link,) = root.links
    assert f"{link.context.trace_id:032x}" == trace_of(origin)
    assert f"{link.context.span_id:016x}" == span_id(trace_of(origin))
    assert dict(link.attributes) == {"keepstep.link": "fork"}


async def test_step_done_again_by_a_person_has_another_span(telemetry):
    fails = [True]

    @ks.step(retry=ks.Retry(attempts=1))
    async def charge():
        if fails:
            fails.clear()
            raise ValueError("no")

    @ks.workflow(name="done again")
    async def program():
        await charge()

    async with ks.open("memory:", observers=telemetry.observer) as engine:
        run = await engine.start(program)
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        await run.retry()
        await run.result(30)
    ids = [one.context.span_id for one in telemetry.named("attempt charge")]
    assert len(set(ids)) == 2
    assert len({one.context.trace_id for one in telemetry.spans}) == 1


async def test_metrics_count_what_happens(telemetry):
    tries = []

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0.0))
    async def flaky():
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("no")

    @ks.workflow(name="counted")
    async def program():
        await flaky()

    async with ks.open("memory:", observers=telemetry.observer) as engine:
        await (await engine.start(program)).result(30)
        points = telemetry.points()
    assert points["keepstep.runs"] == [({"workflow": "counted", "status": "completed"}, 1)]
    assert points["keepstep.retries"] == [({"workflow": "counted", "step": "flaky"}, 1)]
    assert points["keepstep.attempt.duration"] == [({"workflow": "counted", "step": "flaky"}, 2)]
    assert points["keepstep.run.duration"] == [({"workflow": "counted", "status": "completed"}, 1)]
    assert points["keepstep.checkpoint.size"][0][1] >= 3
    assert points["keepstep.commits"][0][1] > 0
    assert points["keepstep.save.failures"] == [({}, 0)]
    assert points["keepstep.process.resident"][0][1] > 1_000_000
    after = telemetry.points()
    assert "keepstep.runs" in after
    assert "keepstep.open.runs" not in after, "the engine is closed"


# -- exporters that fail -----------------------------------------------------------------------------------------------


class Stuck(SpanExporter):
    """An exporter that fails, or does not return until it is let go."""

    def __init__(self, fails):
        self.fails, self.go = fails, threading.Event()

    def export(self, spans):
        if self.fails:
            raise RuntimeError("no collector")
        self.go.wait(60)
        return SpanExportResult.SUCCESS


@pytest.mark.parametrize("fails", [True, False], ids=["failing", "stuck"])
async def test_exporter_in_trouble_does_not_affect_a_run(monkeypatch, fails):
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    monkeypatch.setattr("keepstep.engine.events.FLUSH_SECONDS", 0.2)
    logging.getLogger("opentelemetry").addFilter(quiet := lambda _: False)
    exporter = Stuck(fails)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=10))
    began = time.monotonic()
    async with ks.open("memory:", observers=OpenTelemetryObserver(provider, MeterProvider())) as engine:
        assert await (await engine.start(doubled, 1)).result(30) == 2
    assert time.monotonic() - began < 10
    exporter.go.set()
    logging.getLogger("opentelemetry").removeFilter(quiet)


# -- without the packages ----------------------------------------------------------------------------------------------


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "keepstep.observers.opentelemetry.observer", None)
    with pytest.raises(DefinitionError, match=r"pip install 'keepstep\[otel\]'"):
        resolve("opentelemetry")


def test_nothing_is_imported_without_being_asked_for(tmp_path):
    code = "import sys, keepstep as ks\nwith ks.open('memory:'): pass\nprint([m for m in sys.modules if 'telem' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert found.stdout.strip() == "[]"


# -- doors and logs ----------------------------------------------------------------------------------------------------


async def test_http_start_keeps_the_callers_trace():
    from httpx import ASGITransport, AsyncClient

    from keepstep import web

    async with ks.open("memory:") as engine:
        transport = ASGITransport(web.app(engine, hosts=["localhost"]))
        async with AsyncClient(transport=transport, base_url="http://localhost") as client:
            body, headers = {"workflow": "doubled", "args": [1]}, {"traceparent": STARTED_BY}
            answer = await client.post("/api/v1/runs", json=body, headers=headers)
        assert (await (await engine.get(answer.json()["id"])).run()).traceparent == STARTED_BY


def test_command_line_keeps_the_callers_trace(tmp_path):
    store, env = f"{tmp_path}/runs.db", {**os.environ, "TRACEPARENT": STARTED_BY}
    command = ["-m", "keepstep", "start", "tests.observers.test_opentelemetry:doubled", "1", "--store", store]
    subprocess.run([sys.executable, *command, "--id", "one"], env=env, check=True, capture_output=True)
    with ks.open(store, worker=False) as engine:
        assert engine.get("one").run().traceparent == STARTED_BY


async def test_filter_gives_log_records_run_and_step():
    from keepstep.observers.log import RunFilter

    seen, log = [], logging.getLogger("a-shop")

    class Handler(logging.Handler):
        def emit(self, record):
            seen.append((record.run_id, record.step, record.attempt))

    @ks.step
    def pack():
        log.warning("packing")

    @ks.workflow(name="logged")
    async def program():
        log.warning("in the code")
        await pack()

    handler = Handler()
    handler.addFilter(RunFilter())
    log.addHandler(handler)
    async with ks.open("memory:") as engine:
        await (await engine.start(program, run_id="parcel")).result(30)
    log.warning("outside")
    log.removeHandler(handler)
    assert seen == [("parcel", "", 0), ("parcel", "pack#1", 1), ("", "", 0)]
