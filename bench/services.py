"""How services with limits are measured: the price of a place for each attempt."""

from __future__ import annotations

import statistics
from typing import Any

from .measure import Effort, Finding, begin, finish, folder
from .postgres import fresh, server


def findings(effort: Effort) -> list[Finding]:
    """The job on SQLite and on a PostgreSQL server of its own."""
    with server() as dsn:
        return [_placed("SQLite", None, effort), _placed("PostgreSQL", dsn, effort)]


def _placed(name: str, dsn: str | None, effort: Effort) -> Finding:
    """Many runs at once whose attempts need places, beside the same without, in turn."""
    options = {"runs": effort.size(200, 50), "steps": 20, "times": effort.size(3, 1)}
    takes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for _ in range(effort.rounds(5)):
        pair = []
        for service in (True, False):
            env = {} if dsn is None else {"BENCH_STORE": fresh(dsn)}
            with folder() as where:
                pair.append(finish(begin("called", "j2", where, {**options, "service": service}, **env)))
        takes.append((pair[0], pair[1]))
    ratios = [ours["per_second"] / free["per_second"] for ours, free in takes]
    return Finding(
        "services",
        f"{options['runs']} runs at once, with a place at a service for each attempt, beside the same without, {name}",
        statistics.median(ours["per_second"] for ours, _ in takes),
        "steps/s",
        floor=statistics.median(free["per_second"] for _, free in takes),
        ratio=statistics.median(ratios),
        least_ratio=0.75,
        detail={"takes": takes, "ratios": ratios},
    )
