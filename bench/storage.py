"""The job about storage on PostgreSQL: what it costs to remove old records, and how heads grow under a long reader."""

from __future__ import annotations

import statistics
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from keepstep.stores.open import open_store

from .measure import Effort, Finding
from .postgres import fresh, run, server

#: Records that are removed, in a full and in a quick measurement, and of one run.
RECORDS, FEW, OF_A_RUN = 1_000_000, 100_000, 10
#: Runs that one call removes, as retention does.
AT_ONCE = 1000
#: Steps of the job that rewrites heads while an old transaction is open.
STEPS, FEW_STEPS = 5000, 1000
#: Bytes of dead rows and of indexes that one step may leave in the heads while an old transaction is open.
MOST_BYTES = 500.0


def findings(effort: Effort) -> list[Finding]:
    """Measure on a server that is started for it."""
    with server() as dsn:
        return [*_removals(dsn, effort), *_bloat(dsn, effort)]


def _removals(dsn: str, effort: Effort) -> list[Finding]:
    records = effort.size(RECORDS, FEW)
    rows = _removed(fresh(dsn), records, divided=False)
    parts = _removed(fresh(dsn), records, divided=True)
    detail = {"deleted": rows, "dropped": parts}
    what = f"{records:,} records removed"
    return [
        Finding("storage", f"{what}, rows deleted", rows["seconds"], "s", detail=detail),
        Finding("storage", f"{what}, a part dropped", parts["seconds"], "s", most=rows["seconds"], detail=detail),
        Finding("storage", f"{what}, log of rows deleted", rows["log_mb"], "MB"),
        Finding("storage", f"{what}, log of a part dropped", parts["log_mb"], "MB", most=rows["log_mb"] / 2),
        Finding("storage", f"{what}, history left by rows deleted", rows["left_mb"], "MB"),
        Finding("storage", f"{what}, history left by a part dropped", parts["left_mb"], "MB", most=1.0),
        Finding("storage", f"{what}, vacuum after rows deleted", rows["vacuum_seconds"], "s"),
        Finding(
            "storage",
            f"{what}, vacuum after a part dropped",
            parts["vacuum_seconds"],
            "s",
            most=rows["vacuum_seconds"] / 2,
        ),
    ]


def _removed(url: str, records: int, *, divided: bool) -> dict[str, Any]:
    """Remove all runs of a store, as retention does, and return what it cost."""
    store = open_store(url)
    address, _, schema = url.partition("?schema=")
    try:
        if divided:
            store.divide_history(7.0)
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f"SET search_path = {schema}")
            runs = records // OF_A_RUN
            _fill(connection, runs, part=int(divided))
            if divided:  # the part is closed, and so is the one after it
                connection.execute("UPDATE keepstep_part SET began_at = began_at - interval '30 days'")
                store.drop_history()
                connection.execute("UPDATE keepstep_part SET began_at = began_at - interval '2 hours'")
            names = [f"run-{number:07}" for number in range(runs)]
            log_before, began = _log(connection), time.perf_counter()
            for first in range(0, runs, AT_ONCE):
                store.delete_runs(names[first : first + AT_ONCE], finished=True)
            dropped = store.drop_history()
            seconds = time.perf_counter() - began
            log_mb = (_log(connection) - log_before) / 1e6
            began = time.perf_counter()
            connection.execute("VACUUM keepstep_checkpoint, keepstep_head, keepstep_run, keepstep_signal")
            vacuum_seconds = time.perf_counter() - began
            return {
                "seconds": seconds,
                "log_mb": log_mb,
                "left_mb": _history(connection) / 1e6,
                "vacuum_seconds": vacuum_seconds,
                "parts": dropped,
            }
    finally:
        store.close()


def _fill(connection: psycopg.Connection[Any], runs: int, *, part: int) -> None:
    """Write finished runs with records of a common size."""
    ended_at = datetime.now(UTC) - timedelta(days=40)
    values = {"runs": runs - 1, "at": ended_at, "part": part, "records": OF_A_RUN}
    connection.execute(
        "INSERT INTO keepstep_run (id, number, workflow, version, fingerprint, queue, priority, input, seed, tags,"
        " created_at, created_by, data_key) SELECT 'run-' || lpad(n::text, 7, '0'), n, 'order', '1', '', 'default', 0,"
        " '[[],{}]', '', '{}', %(at)s, 'bench', '' FROM generate_series(0, %(runs)s) n",
        values,
    )
    connection.execute(
        "INSERT INTO keepstep_head (run, number, workflow, version, priority, status, seq, checksum, epoch, wakes,"
        " signals, recoveries, updated_at, part) SELECT 'run-' || lpad(n::text, 7, '0'), n, 'order', '1', 0,"
        " 'completed', %(records)s, repeat('0', 64), 1, '', 0, 0, %(at)s, %(part)s"
        " FROM generate_series(0, %(runs)s) n",
        values,
    )
    connection.execute(
        "INSERT INTO keepstep_checkpoint (run, seq, kind, record, part) SELECT 'run-' || lpad(n::text, 7, '0'), seq,"
        " 'step completed', convert_to(rpad(n::text, 500, 'x'), 'UTF8'), %(part)s"
        " FROM generate_series(0, %(runs)s) n, generate_series(1, %(records)s) seq",
        values,
    )
    connection.execute("SELECT setval('keepstep_number', %s)", (runs,))
    connection.execute("VACUUM ANALYZE keepstep_checkpoint, keepstep_head, keepstep_run")
    connection.execute("CHECKPOINT")


def _log(connection: psycopg.Connection[Any]) -> int:
    ((place,),) = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchall()
    return int(place)


def _history(connection: psycopg.Connection[Any]) -> int:
    """Return the bytes of all tables of records, with their indexes."""
    ((size,),) = connection.execute(
        "SELECT pg_total_relation_size('keepstep_checkpoint') + coalesce((SELECT sum(pg_total_relation_size(inhrelid))"
        " FROM pg_inherits WHERE inhparent = 'keepstep_checkpoint'::regclass), 0)"
    ).fetchall()
    return int(size)


def _bloat(dsn: str, effort: Effort) -> list[Finding]:
    """Measure steps, and the growth of heads, with and without an old transaction in the same database."""
    steps, rounds = effort.size(STEPS, FEW_STEPS), effort.rounds(3)
    pairs = [(_stepped(dsn, steps, held=False), _stepped(dsn, steps, held=True)) for _ in range(rounds)]
    free, held = [one for one, _ in pairs], [one for _, one in pairs]

    def middle(of: list[dict[str, float]], name: str) -> float:
        return statistics.median(one[name] for one in of)

    detail = {"free": free, "held": held}
    return [
        Finding("storage", "steps of one run beside no transaction", middle(free, "rate"), "steps/s", detail=detail),
        Finding(
            "storage",
            "the same beside an old transaction",
            middle(held, "rate"),
            "steps/s",
            ratio=middle(held, "rate") / middle(free, "rate"),
            least_ratio=0.8,
        ),
        Finding("storage", "growth of heads for each step", middle(free, "bytes"), "bytes", most=20.0),
        Finding("storage", "the same beside an old transaction", middle(held, "bytes"), "bytes", most=MOST_BYTES),
        Finding("storage", "share of steps that touch no index of heads", 100 * middle(free, "hot"), "%"),
        Finding("storage", "the same beside an old transaction", 100 * middle(held, "hot"), "%"),
    ]


def _size(connection: psycopg.Connection[Any], table: str) -> int:
    ((size,),) = connection.execute("SELECT pg_total_relation_size(%s::regclass)", (table,)).fetchall()
    return int(size)


def _stepped(dsn: str, steps: int, *, held: bool) -> dict[str, float]:
    url = fresh(dsn)
    open_store(url).close()
    schema = url.rpartition("=")[2]
    name = f"{schema}.keepstep_head"
    with psycopg.connect(dsn) as old, psycopg.connect(dsn, autocommit=True) as connection:
        before = _size(connection, name)
        if held:
            old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            old.execute("SELECT count(*) FROM pg_class")
        rate = run("ours", "j1", url, times=1, n=steps)["per_second"]
        connection.execute("SELECT pg_stat_force_next_flush()")
        time.sleep(1.0)  # the counters of ended sessions arrive a moment later
        sql = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = %s::regclass"
        ((updates, hot),) = connection.execute(sql, (name,)).fetchall()
        grown = _size(connection, name) - before
    return {"rate": rate, "bytes": grown / steps, "hot": hot / max(updates, 1)}
