"""The jobs on PostgreSQL: a server of its own, durable as it comes, ours and the floor on it in turn."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from keepstep.model import RunQuery, Status
from keepstep.stores.postgres.store import PostgresStore
from tests.postgres import Server

from . import gauges
from .measure import Effort, Finding, begin, finish, folder

#: How long processes that begin together have to get ready.
READY_SECONDS = 4.0


def findings(effort: Effort) -> list[Finding]:
    """Every job, on one server."""
    with server() as dsn:
        return [
            _rate(dsn, "j1", "one run, one step after the other", 0.6, effort, n=effort.size(1000, 200)),
            _rate(dsn, "j2", "200 runs of 20 steps at once", 0.4, effort, runs=effort.size(200, 50)),
            *_workers(dsn, effort),
            *_wake_ups(dsn, effort),
            _recovery(dsn, effort),
            *_lists(dsn, effort),
        ]


@contextmanager
def server() -> Iterator[str]:
    """A server with nothing switched off; BENCH_DSN names another."""
    if dsn := os.environ.get("BENCH_DSN"):
        yield dsn
        return
    made = Server.make(())
    try:
        yield made.dsn
    finally:
        made.remove()


def fresh(dsn: str) -> str:
    """The URL of a store that is not there yet."""
    return f"{dsn}?schema=bench_{uuid.uuid4().hex[:8]}"


def run(side: str, job: str, url: str, **options: Any) -> dict[str, Any]:
    with folder() as where:
        return finish(begin(side, job, where, options, BENCH_STORE=url, BENCH_DSN=url.partition("?")[0]))


def _rate(dsn: str, job: str, what: str, least: float, effort: Effort, **options: Any) -> Finding:
    ours: list[dict[str, Any]] = []
    floors: list[float] = []
    for _ in range(effort.rounds(5)):
        ours.append(run("ours", job, fresh(dsn), times=2 if job == "j2" else 1, **options))
        floors.append(run("floor_postgres", job, dsn, times=5 if job == "j2" else 2, **options)["per_second"])
    rates = [one["per_second"] for one in ours]
    ratios = [rate / floor for rate, floor in zip(rates, floors, strict=True)]
    return Finding(
        "postgres",
        f"{job}: {what}",
        statistics.median(rates),
        "steps/s",
        floor=statistics.median(floors),
        ratio=statistics.median(ratios),
        least_ratio=least,
        detail={
            "ours": rates,
            "floors": floors,
            "ratios": ratios,
            "cpu_us": statistics.median(one["cpu_us"] for one in ours),
        },
    )


# -- many workers ------------------------------------------------------------------------------------------------------


def _workers(dsn: str, effort: Effort) -> list[Finding]:
    """Four worker processes against one, on the same queue; beside it what the server gives to four bare writers.

    Where the machine has nothing left to give, as the share of its processors' time that is used tells, more workers
    cannot do more.
    """
    runs = effort.size(1000, 200)
    took: dict[int, list[float]] = {1: [], 4: []}
    bare: dict[int, list[float]] = {1: [], 4: []}
    busy: dict[int, list[float]] = {1: [], 4: []}
    for _ in range(effort.rounds(3)):
        for workers in (1, 4):
            url = fresh(dsn)
            run("ours", "enqueue", url, runs=runs)
            seconds, share = _together("ours", "drain", url, workers)
            took[workers].append(seconds)
            busy[workers].append(share)
            bare[workers].append(_together("floor_postgres", "share", dsn, workers, runs=runs // workers)[0])
    ratios = [one / four for one, four in zip(took[1], took[4], strict=True)]
    limits = [one / four for one, four in zip(bare[1], bare[4], strict=True)]
    return [
        Finding(
            "postgres",
            f"{runs:,} runs of 20 steps by 4 workers (the floor: by 1)",
            runs * 20 / statistics.median(took[4]),
            "steps/s",
            floor=runs * 20 / statistics.median(took[1]),
            ratio=statistics.median(ratios),
            least_ratio=1.5,
            detail={"seconds": took, "ratios": ratios},
        ),
        Finding(
            "postgres",
            "… how much of the processors' time is used meanwhile (the floor: by 1)",
            statistics.median(busy[4]) * 100,
            "%",
            floor=statistics.median(busy[1]) * 100,
            detail={"shares": busy},
        ),
        Finding(
            "postgres",
            "… what the server gives to 4 bare writers (the floor: to 1)",
            runs * 20 / statistics.median(bare[4]),
            "steps/s",
            floor=runs * 20 / statistics.median(bare[1]),
            ratio=statistics.median(limits),
            detail={"seconds": bare, "ratios": limits},
        ),
    ]


def _together(side: str, job: str, url: str, count: int, **options: Any) -> tuple[float, float]:
    """How long the slowest of so many processes takes, from the moment at which all begin, and how busy all are."""
    at = time.time() + READY_SECONDS
    env = {"BENCH_STORE": url, "BENCH_DSN": url.partition("?")[0], "BENCH_BEGIN": str(at)}
    with folder() as where:
        started = [begin(side, job, where, options, **env) for _ in range(count)]
        time.sleep(max(0.0, at - time.time()))
        processors = gauges.Processors()
        seconds = max(float(finish(process)["seconds"]) for process in started)
        return seconds, processors.busy() or 0.0


# -- waking, recovering, listing ---------------------------------------------------------------------------------------


def _wake_ups(dsn: str, effort: Effort) -> list[Finding]:
    n = effort.size(200, 30)
    found = []
    for kind, what in (
        ("signal", "from signal to the step behind wait_for"),
        ("start", "from start to the first step"),
    ):
        env = {"BENCH_STORE": fresh(dsn)}
        with folder() as where:
            hears = begin("ours", f"{kind}_hear", where, {"n": n}, **env)
            time.sleep(1.0)  # whoever is first makes the store
            finish(begin("ours", f"{kind}_send", where, {"n": n}, **env))
            heard = finish(hears)
        found.append(
            Finding("postgres", f"{what}, in another process", heard["median"] * 1000, "ms", most=20.0, detail=heard)
        )
    return found


def _recovery(dsn: str, effort: Effort) -> Finding:
    at = effort.size(10_000, 1000)
    seconds, repeated = [], 0
    for _ in range(effort.rounds(3)):
        env = {"BENCH_STORE": fresh(dsn)}
        with folder() as where:
            killed = begin("ours", "j6_kill", where, {"n": at + 100, "at": at}, BENCH_DURABILITY="every=500", **env)
            killed.communicate(timeout=600)
            before = (where / "bodies").read_text(encoding="ascii").splitlines()
            began = time.monotonic()
            finish(begin("ours", "j6_resume", where, {}, **env))
            lines = (where / "bodies").read_text(encoding="ascii").splitlines()[len(before) :]
        seconds.append(float(lines[0].split()[1]) - began)
        done = {line.split()[0] for line in before[: -500 or None]}
        repeated += sum(line.split()[0] in done for line in lines)
    return Finding(
        "postgres",
        f"SIGKILL with {at:,} steps recorded: from process start to the first new body",
        statistics.median(seconds),
        "s",
        most=1.0,
        detail={"seconds": seconds, "repeated": repeated},
    )


def _lists(dsn: str, effort: Effort) -> list[Finding]:
    """Pages of a store with a million runs, most of them done, of a hundred workflows."""
    runs = effort.size(1_000_000, 20_000)
    store = PostgresStore(fresh(dsn))
    try:
        _fill(dsn, store, runs)
        queries = {
            "the newest": RunQuery(),
            "by status": RunQuery(status=frozenset({Status.FAILED})),
            "by workflow": RunQuery(workflow="workflow 7"),
            "by both": RunQuery(workflow="workflow 7", status=frozenset({Status.COMPLETED})),
            "a page in the middle": RunQuery(after=str(runs // 2)),
        }
        took: dict[str, float] = {}
        for name, query in queries.items():
            times = []
            for _ in range(15):
                began = time.perf_counter()
                page = store.list_runs(query)
                times.append(time.perf_counter() - began)
                if len(page.runs) != query.limit:
                    raise AssertionError(f"{name}: {len(page.runs)} runs")
            took[name] = statistics.median(times) * 1000
    finally:
        store.close()
    slowest = max(took, key=lambda name: took[name])
    return [
        Finding(
            "postgres",
            f"a page of 100 out of {runs:,} runs ({slowest}, the slowest of {len(took)} questions)",
            took[slowest],
            "ms",
            most=50.0,
            detail=took,
        )
    ]


def _fill(dsn: str, store: PostgresStore, runs: int) -> None:
    run_table, head_table = store._address.table("run"), store._address.table("head")
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(
            f"INSERT INTO {run_table} SELECT 'run-' || n, n, 'workflow ' || n % 100, '1', '', 'default', 0,"
            f" '[[],{{}}]', '', NULL, NULL, NULL, NULL, '{{}}', NULL, NULL, now(), '', ''"
            f" FROM generate_series(1, {runs}) n"
        )
        admin.execute(
            f"INSERT INTO {head_table} SELECT 'run-' || n, n, 'workflow ' || n % 100, '1', 0,"
            f" CASE WHEN n % 50 = 0 THEN 'failed' ELSE 'completed' END, 2, '', 1, NULL, NULL, '', 0, 0, now()"
            f" FROM generate_series(1, {runs}) n"
        )
        admin.execute(f"SELECT setval('{store._address.table('number')}', {runs})")
        admin.execute(f"ANALYZE {run_table}")
        admin.execute(f"ANALYZE {head_table}")
