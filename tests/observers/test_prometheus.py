"""Metrics in the text format of Prometheus, read by its own parser, with a bounded number of series."""

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import keepstep as ks
from keepstep.engine.health_port import open_port
from keepstep.model import Event
from keepstep.observers.metrics import MOST_SERIES, Histogram, Metric, text_of
from keepstep.observers.prometheus import PrometheusObserver, step_of
from keepstep.views.metrics import store_metrics


def parsed(text):
    """Every sample by its name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def run(coroutine):
    return asyncio.run(coroutine)


def counted(metrics, url="memory:", tries=2):
    @ks.step(retry=ks.Retry(attempts=tries, base_seconds=0))
    async def work():
        if ks.attempt() < tries:
            raise OSError("down")

    @ks.workflow(name="counted")
    async def program():
        await asyncio.gather(work(), work())

    async def main():
        async with ks.open(url, observers=metrics) as engine:
            await (await engine.start(program)).result(30)
            return store_metrics(engine.store)

    return run(main())


def test_attempts_retries_and_runs_are_counted_by_name():
    metrics = PrometheusObserver()
    counted(metrics)
    found = parsed(metrics.text())
    labels = (("step", "work"), ("workflow", "counted"))
    assert found["keepstep_attempts_total", (("outcome", "failure"), *labels)] == 2
    assert found["keepstep_attempts_total", (("outcome", "success"), *labels)] == 2
    assert found["keepstep_retries_total", labels] == 2
    assert found["keepstep_attempt_seconds_count", labels] == 4
    assert found["keepstep_runs_total", (("status", "completed"), ("workflow", "counted"))] == 1


def test_store_is_told_as_gauges():
    found = parsed(counted(PrometheusObserver()))
    assert found["keepstep_workers", ()] == 1
    assert found["keepstep_queue_waiting", (("queue", "default"),)] == 0
    assert found["keepstep_set_aside_runs", ()] == 0


def test_buckets_are_cumulative():
    histogram = Histogram("h", "about", ("a",), bounds=(1.0, 2.0))
    for seconds in (0.5, 1.5, 1.5, 9.0):
        histogram.observe("x", seconds=seconds)
    found = parsed(text_of([histogram]))
    counts = [found["h_bucket", (("a", "x"), ("le", le))] for le in ("1", "2", "+Inf")]
    assert (counts, found["h_count", (("a", "x"),)], found["h_sum", (("a", "x"),)]) == ([1, 3, 4], 4, 12.5)


def test_series_are_bounded():
    metric = Metric("m_total", "about", ("a", "b"))
    for number in range(MOST_SERIES + 50):
        metric.add(str(number), "b")
    found = parsed(text_of([metric]))
    assert len(found) == MOST_SERIES + 1
    assert found["m_total", (("a", "other"), ("b", "other"))] == 50


def test_names_with_quotes_and_lines_are_escaped():
    metric = Metric("m_total", "about", ("a",))
    metric.add('say "hi"\\\nthere')
    assert list(parsed(text_of([metric]))) == [("m_total", (("a", 'say "hi"\\\nthere'),))]


@pytest.mark.parametrize("key, name", [("work#1", "work"), ("100.475/fetch#1", "fetch"), ("@a/tool#@call 7", "tool")])
def test_step_is_counted_by_its_name(key, name):
    assert step_of(key) == name


def test_waits_and_refusals_are_no_attempts():
    metrics = PrometheusObserver()
    at = ks.now() if ks.in_workflow() else None
    metrics.observe(Event("step.failed", "r", at, "w", step="work#1", data={"outcome": "failure"}))
    assert parsed(metrics.text()) == {}


def test_port_tells_health_and_metrics_and_bears_nonsense():
    metrics = PrometheusObserver()

    async def main():
        async with ks.open("memory:", observers=metrics) as engine:
            server = await open_port(engine, "127.0.0.1", 0, metrics.text)
            port = server.sockets[0].getsockname()[1]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                statuses = [(await client.get(path)).status_code for path in ("/healthz", "/readyz", "/metrics", "/x")]
                statuses.append((await client.post("/metrics")).status_code)
                found = parsed((await client.get("/metrics")).text)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"x" * 20_000 + b"\r\n\r\n")
                await reader.read()
                writer.close()
                engine.worker.stop_claiming()
                statuses.append((await client.get("/readyz")).status_code)
            server.close()
            return statuses, found

    statuses, found = run(main())
    assert statuses == [200, 200, 200, 404, 405, 503]
    assert found["keepstep_process_resident_bytes", ()] > 1_000_000
    assert found["keepstep_open_runs", ()] == 0
