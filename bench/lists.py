"""The job about lists: the first page of each filter, and its capped count, in a store of a million runs."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import keepstep as ks
from keepstep.model import RunQuery, Status
from keepstep.stores.open import open_store
from keepstep.views.counts import MOST

from .measure import Effort, Finding, folder
from .postgres import fresh, server

#: Runs of a full and of a quick measurement.
RUNS, FEW = 1_000_000, 50_000
#: Milliseconds that a first page may take on the server.
TARGET_MS = 50.0
#: The runs were created one after the other in 30 days, until now.
SPAN = timedelta(days=30)
_RUN = (
    "number", "id", "workflow", "version", "fingerprint", "queue", "priority", "input", "seed", "origin", "tags",
    "created_at", "created_by", "data_key",
)  # fmt: skip
_HEAD = (
    "run", "number", "workflow", "version", "queue", "priority", "status", "seq", "checksum", "epoch", "due_at",
    "wakes", "signals", "recoveries", "updated_at",
)  # fmt: skip


def run_at(number: int, runs: int, now: datetime) -> dict[str, Any]:
    """Return what is stored of one run. Common values are spread evenly, rare ones are among the oldest runs."""
    old, place = number <= runs // 1000, number % 1000
    created_at = now - SPAN + SPAN * (number / (runs + 1))
    workflow = "archive" if old else "order" if place < 600 else "mail" if place < 900 else "report"
    if old or place % 20:
        status = Status.COMPLETED
    else:
        status = (Status.FAILED, Status.FAILED, Status.WAITING, Status.WAITING, Status.CANCELLED)[place // 20 % 5]
        status = {100: Status.QUEUED, 300: Status.PAUSED, 500: Status.SET_ASIDE}.get(place, status)
    wakes, due_at = "", None
    if status is Status.WAITING:
        signal = "release" if number < runs // 500 else "approve"
        wakes = json.dumps([signal if place < 500 else "ks:child:pay#1", "ks:cancel"], separators=(",", ":"))
    elif status is Status.QUEUED:
        due_at = created_at
    tags = {"customer": f"c{number % 20_000}"} if place % 5 == 0 else {}
    if place % 100 == 7:
        tags = {"stage": "test"}
    if old and number % 10 == 0:
        tags = {"batch": "first"}
    return {
        "number": number,
        "id": f"{workflow}-{number:07}",
        "run": f"{workflow}-{number:07}",
        "workflow": workflow,
        "version": "1",
        "fingerprint": "",
        "queue": "archive" if old else "gpu" if place % 20 == 1 else "default",
        "priority": 0,
        "input": b'{"text":"' + b"x" * 100 + b'"}',
        "seed": f"{number:016x}",
        "origin": None,
        "tags": tags,
        "created_at": created_at,
        "created_by": "bench",
        "data_key": "",
        "status": status.value,
        "seq": 3,
        "checksum": f"{number:064x}",
        "epoch": 1,
        "due_at": due_at,
        "wakes": wakes,
        "signals": 0,
        "recoveries": 0,
        "updated_at": created_at + timedelta(minutes=1),
    }


def filters(runs: int, now: datetime) -> dict[str, RunQuery]:
    """Return every filter of the page of runs by name, many with the values that are hardest to find."""

    def of(*statuses: Status, **fields: Any) -> RunQuery:
        return RunQuery(status=frozenset(statuses), limit=50, **fields)

    unfinished = frozenset(Status) - {Status.COMPLETED, Status.FAILED, Status.CANCELLED}
    found = {
        "newest": of(),
        "deep page": of(after=str(runs // 2)),
        "status": of(Status.FAILED),
        "rare status": of(Status.SET_ASIDE),
        "in flight": of(*unfinished),
        "needs you": of(needs_person=True),
        "failed and open": of(open_failure=True),
        "awaits a common signal": of(awaits="approve"),
        "awaits a rare signal": of(awaits="release"),
        "awaits no signal": of(awaits="nothing"),
        "updated in the last hour": of(updated_after=now - timedelta(hours=1)),
        "not updated for 20 days": of(updated_before=now - timedelta(days=20)),
        "waiting for 20 days": of(Status.WAITING, updated_before=now - timedelta(days=20)),
        "queue": of(queue="gpu"),
        "old queue": of(queue="archive"),
        "absent queue": of(queue="none"),
    }
    narrow: dict[str, dict[str, Any]] = {
        "workflow": {"workflow": "mail"},
        "old workflow": {"workflow": "archive"},
        "absent workflow": {"workflow": "none"},
        "several workflows": {"workflows": frozenset({"archive", "report", "none"})},
        "all but the common workflows": {"not_workflows": frozenset({"order", "mail", "report"})},
        "common tag": {"tags": {"stage": "test"}},
        "rare tag": {"tags": {"customer": "c100"}},
        "old tag": {"tags": {"batch": "first"}},
        "absent tag": {"tags": {"customer": "none"}},
        "id": {"id_prefix": f"mail-{runs // 2:07}"[:-1]},
        "wide prefix": {"id_prefix": "order-"},
        "old prefix": {"id_prefix": "archive-"},
        "absent prefix": {"id_prefix": "none-"},
        "last hour": {"created_after": now - timedelta(hours=1)},
        "an hour of 20 days ago": {
            "created_after": now - timedelta(days=20, hours=1),
            "created_before": now - timedelta(days=20),
        },
        "a week of 20 days ago": {
            "created_after": now - timedelta(days=27),
            "created_before": now - timedelta(days=20),
        },
        "before all": {"created_before": now - timedelta(days=40)},
    }
    for name, fields in narrow.items():
        found[name] = of(**fields)
        found[f"{name}, failed"] = of(Status.FAILED, **fields)
        found[f"{name}, set aside"] = of(Status.SET_ASIDE, **fields)
    found["old prefix, completed"] = of(Status.COMPLETED, id_prefix="archive-")
    found["old tag, completed"] = of(Status.COMPLETED, tags={"batch": "first"})
    found["a week of 20 days ago, workflow"] = of(workflow="mail", **narrow["a week of 20 days ago"])
    return found


def fill(url: str, runs: int, now: datetime) -> None:
    """Write runs in the store's own format, without their records."""
    open_store(url).close()
    rows = (run_at(number, runs, now) for number in range(1, runs + 1))
    (_fill_postgres if url.startswith("postgres") else _fill_sqlite)(url, rows)


def _fill_sqlite(url: str, rows: Iterator[dict[str, Any]]) -> None:
    import apsw

    connection = apsw.Connection(url.removeprefix("sqlite:///"))
    connection.execute("PRAGMA synchronous = OFF")

    def values(row: dict[str, Any], columns: tuple[str, ...]) -> list[Any]:
        row = {**row, "input": row["input"].decode(), "tags": json.dumps(row["tags"]) if row["tags"] else ""}
        return [one.timestamp() if isinstance(one, datetime) else one for one in map(row.__getitem__, columns)]

    places = {table: ", ".join("?" * len(columns)) for table, columns in (("run", _RUN), ("head", _HEAD))}
    with connection:
        for row in rows:
            for table, columns in (("run", _RUN), ("head", _HEAD)):
                sql = f"INSERT INTO keepstep_{table} ({', '.join(columns)}) VALUES ({places[table]})"
                connection.execute(sql, values(row, columns))
    connection.close()


def _fill_postgres(url: str, rows: Iterator[dict[str, Any]]) -> None:
    import psycopg

    from keepstep.stores.postgres.rows import tag

    known = list(rows)
    for row in known:
        row["tags"] = [tag(*one) for one in row["tags"].items()]
    address, _, schema = url.partition("?schema=")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(f"SET search_path = {schema or 'public'}")
        for table, columns in (("run", _RUN), ("head", _HEAD)):
            with connection.cursor().copy(f"COPY keepstep_{table} ({', '.join(columns)}) FROM STDIN") as copy:
                for row in known:
                    copy.write_row([row[column] for column in columns])
        connection.execute("SELECT setval('keepstep_number', %s)", (len(known),))
        connection.execute("VACUUM ANALYZE keepstep_run, keepstep_head")


async def look(url: str, runs: int, now: datetime, times: int) -> dict[str, tuple[float, float, int, int]]:
    """Return for each filter the middle milliseconds of its first page and of its count, and how much was found."""
    found = {}
    async with ks.open(url, worker=False) as engine:
        for name, query in filters(runs, now).items():
            asked = RunQuery(**{**_fields(query), "limit": 0, "count_to": MOST + 1})
            page, listed = await _timed(engine, query, times)
            counted, whole = await _timed(engine, asked, times)
            found[name] = page, counted, len(listed.runs), whole.count or 0
    return found


def _fields(query: RunQuery) -> dict[str, Any]:
    return {name: getattr(query, name) for name in RunQuery.__dataclass_fields__}


async def _timed(engine: ks.Engine, query: RunQuery, times: int) -> tuple[float, Any]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        page = await engine.call(engine.store.list_runs, query)
        taken.append(1000 * (time.perf_counter() - began))
        if taken[-1] > 20 * TARGET_MS:
            break
    return statistics.median(taken), page


def findings(effort: Effort) -> list[Finding]:
    """Measure SQLite, and a PostgreSQL server that is started for it."""
    runs, times = effort.size(RUNS, FEW), effort.rounds(9)
    now = datetime.now(UTC)
    with folder() as where:
        found = _of_store("SQLite", f"sqlite:///{where / 'runs.db'}", runs, now, times)
    with server() as dsn:
        return [*found, *_of_store("PostgreSQL", fresh(dsn), runs, now, times)]


def _of_store(store: str, url: str, runs: int, now: datetime, times: int) -> list[Finding]:
    fill(url, runs, now)
    seen = asyncio.run(look(url, runs, now, times))
    pages = max((one[0], name) for name, one in seen.items())
    counts = max((one[1], name) for name, one in seen.items())
    table = {name: {"page": one[0], "count": one[1], "runs": one[2], "counted": one[3]} for name, one in seen.items()}
    return [
        Finding("lists", f"{store}: slowest {what} of {runs:,} runs ({name})", ms, "ms", most=TARGET_MS, detail=table)
        for what, (ms, name) in (("first page", pages), ("count", counts))
    ]
