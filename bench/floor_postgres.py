"""The floor on PostgreSQL: a row per step over one connection, told only when the server has made it durable."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from . import gauges
from .floor import Group, Inline, Row, _Run

_ONE = "INSERT INTO {} VALUES (%s, %s, %s)"
_MANY = "INSERT INTO {} SELECT * FROM unnest(%s::text[], %s::int[], %s::bytea[])"


class Journal:
    """One table: run, number, value."""

    def __init__(self) -> None:
        self._connection = psycopg.connect(os.environ["BENCH_DSN"], autocommit=True, prepare_threshold=0)
        table = f"floor_{uuid.uuid4().hex[:8]}"
        self._connection.execute(f"CREATE TABLE {table} (run text, number int, value bytea, PRIMARY KEY (run, number))")
        self._cursor = self._connection.cursor(binary=True)
        self._one, self._many = _ONE.format(table), _MANY.format(table)

    def write(self, rows: Sequence[Row]) -> None:
        """Make rows durable together."""
        if len(rows) == 1:
            self._cursor.execute(self._one, rows[0], prepare=True)
        else:
            self._cursor.execute(self._many, [list(column) for column in zip(*rows, strict=True)], prepare=True)


async def j1(where: Path, n: int = 1000, times: int = 1) -> dict[str, Any]:
    writer = Inline(Journal())
    await _Run(writer.record).sequence(20)
    with gauges.Stopwatch() as watch:
        for _ in range(times):
            await _Run(writer.record).sequence(n)
    return watch.rate(n * times)


async def j2(where: Path, runs: int = 200, steps: int = 20, times: int = 1) -> dict[str, Any]:
    writer = Group(Journal())
    await _Run(writer.record).sequence(20)
    with gauges.Stopwatch() as watch:
        for _ in range(times):
            await asyncio.gather(*[_Run(writer.record).sequence(steps) for _ in range(runs)])
    return watch.rate(runs * steps * times)


async def share(where: Path, runs: int = 500, steps: int = 20) -> dict[str, Any]:
    """What one of several processes writes that begin together."""
    writer = Group(Journal())
    await _Run(writer.record).sequence(20)
    begin_at = float(os.environ["BENCH_BEGIN"])
    await asyncio.sleep(max(0.0, begin_at - time.time()))
    await asyncio.gather(*[_Run(writer.record).sequence(steps) for _ in range(runs)])
    return {"seconds": time.time() - begin_at}


JOBS = {job.__name__: job for job in (j1, j2, share)}
