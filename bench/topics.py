"""How topics are measured: messages to ten subscribers, from the first publish until all of them have read the last."""

from __future__ import annotations

import statistics

from .measure import Effort, Finding, begin, finish, folder
from .postgres import fresh, server

#: Messages a second that a topic must pass to ten subscribers.
LEAST = 300.0
#: How messages are published: by how many runs, and how many in one commit.
WAYS = {
    "one run publishes them one after the other": (1, 1),
    "ten runs publish them one after the other": (10, 1),
    "one run publishes a hundred at a time": (1, 100),
}


def findings(effort: Effort) -> list[Finding]:
    """Every way on SQLite, and the first on a PostgreSQL server of its own."""
    found = [_passed(what, "SQLite", None, effort) for what in WAYS]
    with server() as dsn:
        return [*found, _passed(next(iter(WAYS)), "PostgreSQL", dsn, effort)]


def _passed(what: str, name: str, dsn: str | None, effort: Effort) -> Finding:
    publishers, size = WAYS[what]
    options = {"n": effort.size(2000, 300), "publishers": publishers, "size": size}
    takes = []
    for _ in range(effort.rounds(5)):
        env = {} if dsn is None else {"BENCH_STORE": fresh(dsn)}
        with folder() as where:
            takes.append(finish(begin("published", "pass_on", where, options, **env)))
    rates = [take["per_second"] for take in takes]
    return Finding(
        "topics",
        f"messages to 10 subscribers until all have read, {what} (the floor: the target), {name}",
        statistics.median(rates),
        "messages/s",
        floor=LEAST,
        ratio=statistics.median(rates) / LEAST,
        least_ratio=1.0 if dsn is None else None,
        detail={"takes": takes, "ratios": [rate / LEAST for rate in rates]},
    )
