"""The job about a fleet on one PostgreSQL server: what idle workers cost, and how it wakes many runs at one instant."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from keepstep.stores.postgres.pool import Address
from tests.postgres import Server

from .measure import Effort, Finding, begin, finish, folder
from .postgres import fresh, run

#: A fleet that starts at one instant opens more sessions than it keeps.
SETTINGS = ("max_connections=600",)
#: Engines with a worker in each process of the fleet.
ENGINES = 5
#: Statements per second that an idle worker may send.
STATEMENTS = 2.0
#: How much more server time a hundred idle workers may take than ten.
GROWTH = 2.0
#: The part of the rate of starting and finishing runs at which a fleet finishes those that wake together.
WAKING = 0.7
#: How long a fleet is left alone before it is measured, so that it has nothing left to do.
REST_SECONDS = 25.0


def findings(effort: Effort) -> list[Finding]:
    """Measure on a server of its own, because every process of the server counts."""
    server = Server.make(SETTINGS)
    try:
        return [*_idle(server, effort), *_waking(server, effort)]
    finally:
        server.remove()


@contextmanager
def fleet(url: str, workers: int, engines: int = ENGINES) -> Iterator[None]:
    """So many workers in processes of their own, which have all registered."""
    store = Address(url)
    processes: list[subprocess.Popen[str]] = []
    with folder() as where:
        try:
            for number in range(0, workers, engines):
                options = {"engines": min(engines, workers - number), "agent": not number}
                processes.append(begin("crew", "wait_idle", where, options, BENCH_STORE=url))
                if not number:
                    _await_workers(url, store, min(engines, workers))  # the first makes the store
            _await_workers(url, store, workers)
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.communicate()


def _await_workers(url: str, store: Address, workers: int) -> None:
    ends = time.monotonic() + 120
    with psycopg.connect(url.partition("?")[0], autocommit=True) as admin:
        while time.monotonic() < ends:
            try:
                found = admin.execute(f"SELECT count(*) FROM {store.table('worker')} WHERE gone_at IS NULL").fetchone()
            except psycopg.errors.UndefinedTable:
                found = (0,)
            if found is not None and found[0] >= workers:
                return
            time.sleep(0.1)
    raise RuntimeError(f"{workers} workers have not registered")


# -- idle --------------------------------------------------------------------------------------------------------------


def _idle(server: Server, effort: Effort) -> list[Finding]:
    few, many = effort.size(10, 5), effort.size(100, 20)
    seconds = effort.size(60, 20)
    takes = {workers: _idle_fleet(server, workers, seconds) for workers in (few, many)}
    growth = takes[many]["server"] / takes[few]["server"]
    detail = {str(workers): take for workers, take in takes.items()}
    return [
        Finding(
            "fleet",
            f"server time of {many} idle workers (the floor: of {few}; the ratio may be {GROWTH:g})",
            takes[many]["server"] * 1000,
            "ms/s",
            floor=takes[few]["server"] * 1000,
            ratio=growth,
            detail=detail,
        ),
        Finding("fleet", f"… how many times the server time of {few}", growth, "×", most=GROWTH),
        Finding(
            "fleet",
            f"statements of an idle worker of {few}",
            takes[few]["statements"],
            "1/s",
            most=STATEMENTS,
        ),
        Finding("fleet", f"… of {many}", takes[many]["statements"], "1/s", most=STATEMENTS),
        Finding("fleet", f"connections of an idle worker of {many}", takes[many]["connections"], "", most=1.0),
    ]


def _idle_fleet(server: Server, workers: int, seconds: float) -> dict[str, float]:
    """Server time and statements per second, and connections for each worker, while a fleet has nothing to do."""
    url = fresh(server.dsn)
    with fleet(url, workers), psycopg.connect(server.dsn, autocommit=True) as admin:
        time.sleep(REST_SECONDS)
        before, used, began = _transactions(admin), _server_seconds(server), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        used = _server_seconds(server) - used
        statements = _transactions(admin) - before
        sessions = admin.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'keepstep%'")
        found = sessions.fetchone()
    return {
        "server": used / took,
        "statements": statements / took / workers,
        "connections": (found[0] if found else 0) / workers,
    }


def _transactions(admin: psycopg.Connection[Any]) -> int:
    """Transactions until now. An idle worker sends every statement alone, so that each is one."""
    found = admin.execute("SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database").fetchone()
    return int(found[0]) if found else 0


def _server_seconds(server: Server) -> float:
    """Processor time of the server's processes, with those that have ended."""
    first = int((server.data / "postmaster.pid").read_text(encoding="ascii").split()[0])
    tick = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for folder_of in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder_of / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(folder_of.name) != first and int(fields[1]) != first:
                continue
            total += int((folder_of / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
            if int(folder_of.name) == first:
                total += (int(fields[13]) + int(fields[14])) / tick
        except (OSError, ValueError):  # it has just ended
            continue
    return total


# -- waking ------------------------------------------------------------------------------------------------------------


def _waking(server: Server, effort: Effort) -> list[Finding]:
    """Runs that sleep until one instant, beside as many that are started and finished one after the other."""
    workers, runs = effort.size(100, 10), effort.size(10_000, 1000)
    j3 = run("ours", "j3", fresh(server.dsn), runs=effort.size(2000, 300))["per_second"]
    url = fresh(server.dsn)
    with fleet(url, workers), folder() as where:
        options = {"runs": runs, "seconds": effort.size(60, 20)}
        woken = finish(begin("crew", "send", where, options, BENCH_STORE=url))
    return [
        Finding(
            "fleet",
            f"{runs:,} runs that wake at one instant, by {workers} workers (the floor: J3 by one)",
            woken["per_second"],
            "runs/s",
            floor=j3,
            ratio=woken["per_second"] / j3,
            least_ratio=WAKING,
            detail=woken,
        )
    ]
