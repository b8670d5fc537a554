"""How queues with limits are measured: the wait for a place, the price of a limit, and claims in a long queue."""

from __future__ import annotations

import sqlite3
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from keepstep.model import GateChange, Run, Status, WorkerInfo
from keepstep.model.gate import QUEUE
from keepstep.ports import ClaimRequest, Create, instant
from keepstep.stores.postgres.store import PostgresStore
from keepstep.stores.sqlite.store import SQLiteStore

from .measure import Effort, Finding, begin, finish, folder
from .postgres import fresh, server

#: Runs that one claim takes in a long queue.
CLAIM = 10


def findings(effort: Effort) -> list[Finding]:
    """Every job, on SQLite and on a PostgreSQL server of its own."""
    with server() as dsn:
        return [
            _first_steps("SQLite", None, 50.0, effort),
            _first_steps("PostgreSQL", dsn, 20.0, effort),
            _limited("SQLite", None, effort),
            _limited("PostgreSQL", dsn, effort),
            *_long_queues(None, effort),
            *_long_queues(dsn, effort),
        ]


def _env(dsn: str | None) -> dict[str, str]:
    return {} if dsn is None else {"BENCH_STORE": fresh(dsn)}


def _first_steps(name: str, dsn: str | None, most: float, effort: Effort) -> Finding:
    """From a start in one process to the first step in another."""
    n, env = effort.size(200, 30), _env(dsn)
    with folder() as where:
        hears = begin("queued", "start_hear", where, {"n": n}, **env)
        time.sleep(1.0)  # whoever is first makes the store
        finish(begin("queued", "start_send", where, {"n": n}, **env))
        heard = finish(hears)
    what = f"from start in a queue with a limit to the first step in another process, {name}"
    return Finding("queues", what, heard["median"] * 1000, "ms", most=most, detail=heard)


def _limited(name: str, dsn: str | None, effort: Effort) -> Finding:
    """A queue of runs under a limit beside the same runs without one, in turn."""
    runs = effort.size(10_000, 300)
    takes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for _ in range(effort.rounds(3)):
        with folder() as where, folder() as other:
            limited = finish(begin("queued", "drain", where, {"runs": runs, "limit": 100}, **_env(dsn)))
            takes.append((limited, finish(begin("queued", "drain", other, {"runs": runs}, **_env(dsn)))))
    ratios = [ours["per_second"] / free["per_second"] for ours, free in takes]
    return Finding(
        "queues",
        f"{runs:,} queued runs under a limit of 100, beside the same without a limit, {name}",
        statistics.median(ours["per_second"] for ours, _ in takes),
        "runs/s",
        floor=statistics.median(free["per_second"] for _, free in takes),
        ratio=statistics.median(ratios),
        least_ratio=0.7,
        detail={"takes": takes, "ratios": ratios},
    )


# -- a long queue ------------------------------------------------------------------------------------------------------

#: The limits of a long queue: those of the whole queue, and those of a key that is used up.
LIMITS: dict[str, dict[str, Any]] = {
    "all behind one key": {"concurrency": 1000},
    "behind a key that is used up": {"concurrency": 1000, "per_key": 1},
}


def _long_queues(dsn: str | None, effort: Effort) -> list[Finding]:
    """Claims in a long queue beside those in a short one, in turn."""
    many, few = effort.size(1_000_000, 20_000), 1000
    found = []
    for what, limits in LIMITS.items():
        with ExitStack() as stack:
            opened = [_open(stack, dsn) for _ in (few, many)]
            short, long = (LongQueue(*one, runs, limits) for one, runs in zip(opened, (few, many), strict=True))
            short.claim()
            long.claim()
            took = [(short.claim(), long.claim()) for _ in range(effort.size(30, 5))]
        ratios = [one / other for one, other in took]
        found.append(
            Finding(
                "queues",
                f"a claim of {CLAIM} with {many:,} runs {what} (the floor: with {few:,}), "
                f"{'SQLite' if dsn is None else 'PostgreSQL'}",
                statistics.median(other for _, other in took) * 1000,
                "ms",
                floor=statistics.median(one for one, _ in took) * 1000,
                ratio=statistics.median(one for one, _ in took) / statistics.median(other for _, other in took),
                least_ratio=0.5,
                detail={"took": took, "each": ratios},
            )
        )
    return found


class Tables:
    """The tables of a store, for what no store does: a million runs in a few seconds."""

    def __init__(self, store: SQLiteStore | PostgresStore, connection: Any) -> None:
        self._store, self._connection = store, connection

    def table(self, name: str) -> str:
        is_sqlite = isinstance(self._store, SQLiteStore)
        return f"keepstep_{name}" if is_sqlite else self._store._address.table(name)  # type: ignore[union-attr]

    def execute(self, sql: str) -> Any:
        cursor = self._connection.cursor()
        cursor.execute(sql)
        return cursor

    def numbers(self, count: int) -> str:
        """Return SQL of the numbers from 1 on, as `s(n)`."""
        if isinstance(self._store, PostgresStore):
            return f"generate_series(1, {count}) s(n)"
        return f"(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count}) SELECT n FROM s) s"

    def copy(self, name: str, key: str, run: str, count: int) -> None:
        """Copy the row of a run so often, each under another id and number."""
        table = self.table(name)
        columns = [column[0] for column in self.execute(f"SELECT * FROM {table} LIMIT 0").description]
        others = {key: f"'{run}-' || s.n", "number": "o.number + 1000 + s.n"}
        values = ", ".join(others.get(column, f"o.{column}") for column in columns)
        self.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table} o, {self.numbers(count)}"
            f" WHERE o.{key} = '{run}'"
        )

    def settle(self) -> None:
        """Do what the database does by itself after a while."""
        for name in ("run", "head"):
            if isinstance(self._store, PostgresStore):
                self.execute(f"VACUUM ANALYZE {self.table(name)}")


def _open(stack: ExitStack, dsn: str | None) -> tuple[SQLiteStore | PostgresStore, Tables]:
    store: SQLiteStore | PostgresStore
    if dsn is None:
        path = stack.enter_context(folder()) / Path("runs.db")
        store = SQLiteStore(path, power_loss="may_lose_last")
        connection: Any = sqlite3.connect(path, isolation_level=None)
    else:
        store, connection = PostgresStore(fresh(dsn)), psycopg.connect(dsn, autocommit=True)
    stack.callback(store.close)
    stack.callback(connection.close)
    return store, Tables(store, connection)


class LongQueue:
    """A store in which so many runs wait behind one key."""

    def __init__(self, store: SQLiteStore | PostgresStore, tables: Tables, runs: int, limits: dict[str, Any]) -> None:
        self._store, self._tables = store, tables
        store.change_gate(QUEUE, "long", GateChange(instant(time.time()), "bench", "set", limits))
        store.renew_leases(WorkerInfo("claimer"))
        self._take(1)  # so that the store knows that the queue has limits
        if "per_key" in limits:
            store.commit([Create(_waiting("held", "customer", 1))])
            assert self._take(1) == 1
            store.commit([Create(_waiting(f"other-{n}", f"customer {n}")) for n in range(900)])
        store.commit([Create(_waiting("run", "customer"))])
        tables.copy("run", "id", "run", runs)
        tables.copy("head", "run", "run", runs)
        tables.settle()

    def _take(self, limit: int) -> int:
        return len(self._store.claim_runs(ClaimRequest("claimer", frozenset({"report"}), limit)).claims)

    def claim(self) -> float:
        """Return the seconds that a claim takes. The runs that it took are put away."""
        began = time.perf_counter()
        taken = self._take(CLAIM)
        seconds = time.perf_counter() - began
        if taken != CLAIM:
            raise AssertionError(f"{taken} runs were claimed")
        self._tables.execute(
            f"UPDATE {self._tables.table('head')} SET status = 'completed', worker = NULL, gate = NULL, holds = 0"
            " WHERE worker = 'claimer' AND run <> 'held'"
        )
        return seconds


def _waiting(run: str, key: str, priority: int = 0) -> Run:
    at = instant(time.time())
    return Run(
        run, "report", Status.QUEUED, at, queue="long", key=key, priority=priority, input=b"[[],{}]", updated_at=at
    )
