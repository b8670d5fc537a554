"""Metrics in the text format of Prometheus, read by its own parser, with a bounded number of series."""

import asyncio
import threading
import time
from contextlib import nullcontext

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import keepstep as ks
from keepstep.engine import health_port
from keepstep.engine.health_port import HALTED, open_port, why_unready
from keepstep.model import Event
from keepstep.observers.metrics import MOST_SERIES, Histogram, Metric, text_of
from keepstep.observers.prometheus import PrometheusObserver, step_of
from keepstep.ports import instant
from keepstep.records.counts import counts_in
from keepstep.views import metrics as views_metrics
from keepstep.views.metrics import store_metrics
from tests.postgres import empty_store


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
            raise ConnectionResetError("down")

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
    assert found["keepstep_failures_total", (("class", "network"), *labels)] == 2
    ended = (("status", "completed"), ("workflow", "counted"))
    assert (found["keepstep_runs_total", ended], found["keepstep_run_seconds_count", ended]) == (1, 1)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
def test_commits_are_timed_and_checkpoints_weighed(kind, tmp_path):
    metrics = PrometheusObserver()
    where = empty_store("metrics") if kind == "postgres" else nullcontext(tmp_path / "runs.db")
    with where as url:
        counted(metrics, "memory:" if kind == "memory" else url)
    found = parsed(metrics.text())
    assert found["keepstep_commit_seconds_count", ()] >= 3
    assert 0 < found["keepstep_commit_seconds_sum", ()] < 60
    assert found["keepstep_checkpoint_bytes_count", ()] == 6  # of the run two, and of each step two
    assert 6 * 50 < found["keepstep_checkpoint_bytes_sum", ()] < 6 * 2000


def test_store_is_told_as_gauges():
    found = parsed(counted(PrometheusObserver()))
    assert found["keepstep_workers", (("state", "claims"),)] == 1
    assert found["keepstep_queue_waiting", (("queue", "default"),)] == 0
    assert found["keepstep_unfinished_runs", (("status", "set aside"), ("workflow", "other"))] == 0


def test_simultaneous_scrapes_count_the_store_once(monkeypatch, tmp_path):
    counted_stores = []

    def slow(store):
        time.sleep(0.05)
        counted_stores.append(store)
        return "text\n"

    monkeypatch.setattr(views_metrics, "store_metrics", slow)

    async def main():
        async with ks.open(tmp_path / "runs.db", worker=False) as engine:
            metrics = views_metrics.StoreMetrics(engine)
            texts = await asyncio.gather(*(metrics.text() for _ in range(5)))
            monkeypatch.setattr(metrics, "_until", 0.0)  # as if the time had passed
            return [*texts, await metrics.text()]

    assert run(main()) == ["text\n"] * 6
    assert len(counted_stores) == 2


def test_buckets_are_cumulative():
    histogram = Histogram("h", "about", ("a",), bounds=(1.0, 2.0))
    for seconds in (0.5, 1.5, 1.5, 9.0):
        histogram.observe("x", value=seconds)
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
    assert not any("attempt" in name or "failures" in name for name, _ in parsed(metrics.text()))


def test_workers_tell_what_they_use(tmp_path):
    """The heartbeat carries it, so that any process sees it; the loop that was blocked is seen as late."""

    async def main():
        async with ks.open(tmp_path / "runs.db", lease_seconds=2) as engine:
            time.sleep(0.3)  # noqa: ASYNC251 - blocks the loop
            await asyncio.sleep(0.05)
            own = engine.resources()
            await engine.call(engine.worker.beat_once)
            (worker,) = await engine.call(engine.store.list_workers)
            return own, counts_in(worker.progress).resources, engine.resources()

    own, told, later = run(main())
    assert own.lag_seconds >= 0.2
    assert later.lag_seconds < own.lag_seconds
    assert own.resident_bytes > 10_000_000
    assert told.resident_bytes > 10_000_000
    assert told.threads >= 2
    assert own.processor_seconds > 0


def test_failing_receiver_of_commits_breaks_nothing(caplog):
    class Broken:
        def observe(self, event):
            pass

        def observe_save(self, seconds, sizes):
            raise RuntimeError("no")

    counted(Broken())
    (logged,) = [one for one in caplog.messages if "failed on a commit" in one]
    assert logged.endswith("Broken failed on a commit; later failures of it are not reported")


def test_process_is_not_ready_while_it_cannot_save(tmp_path):
    async def main():
        async with ks.open(tmp_path / "runs.db") as engine:
            before = await why_unready(engine)
            engine.journal.refused = True
            engine.counts.halted_at = instant(engine.clock.now())
            refused = await why_unready(engine)
            engine.counts.halted_at -= HALTED
            after = await why_unready(engine)
            engine.fresh_until = 0.0
            return before, refused, after, await why_unready(engine)

    before, refused, after, late = run(main())
    assert (before, after) == ("", "")
    assert refused == "the store could not save the newest records"
    assert late == "the worker could not renew its leases"


def test_store_that_does_not_answer_is_told_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(health_port, "STORE_SECONDS", 0.05)
    silent = threading.Event()

    async def main():
        async with ks.open(tmp_path / "runs.db", worker=False) as engine:
            engine.store.list_workers = silent.wait
            try:
                return await why_unready(engine)
            finally:
                silent.set()

    assert run(main()) == "the store does not answer"


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
                headed = await client.head("/healthz")
                assert (headed.status_code, headed.content, headed.headers["content-length"]) == (200, b"", "3")
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
