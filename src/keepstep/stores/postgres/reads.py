"""Reads of runs, records and signals from a PostgreSQL server: the primary, or a replica of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ...errors import CheckpointCorrupt
from ...model import Kind, Run, RunPage, RunQuery, Signal, Status
from ...ports import Clock, Row, instant
from .. import rules
from .lists import Lists
from .parts import part_to_read
from .pool import Address, Connection
from .rows import RUN_COLUMNS, RUN_WIDTH, plain, run_from, signal_from, texts

T = TypeVar("T")


class Source(Protocol):
    """Lends connections to a server."""

    def run(self, work: Callable[[Connection], T], *, again: bool = False, patience_seconds: float = 0.0) -> T: ...


class Reads:
    """The reading methods of a store, on the connections of one source."""

    def __init__(self, address: Address, source: Source, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self._lists = Lists(address)
        run, head, checkpoint, signal, worker = map(address.table, ("run", "head", "checkpoint", "signal", "worker"))
        part = part_to_read(address, "%s")
        ended = ", ".join(f"'{status}'" for status in rules.ENDED)
        self._get = (
            f"SELECT {RUN_COLUMNS}, c.seq, c.kind, c.record, c.body, w.progress FROM {run} r"
            f" LEFT JOIN {head} h ON h.run = r.id LEFT JOIN {worker} w ON w.id = h.worker"
            f" LEFT JOIN LATERAL (SELECT c.seq, c.kind, c.record, c.body FROM {checkpoint} c"
            f" WHERE c.run = r.id AND c.part = h.part AND h.status IN ({ended}) AND c.kind ="
            f" CASE WHEN h.status = '{Status.SET_ASIDE}' THEN '{Kind.ERROR}' ELSE '{Kind.RUN_FINISHED}' END"
            f" ORDER BY c.seq DESC LIMIT 1) c ON true WHERE r.id = %s"
        )
        self._checkpoints = (
            f"SELECT seq, kind, record, body FROM (SELECT seq, kind, record, body,"
            f" sum(octet_length(record) + coalesce(octet_length(body), 0)) OVER (ORDER BY seq)"
            f" - octet_length(record) - coalesce(octet_length(body), 0) AS before FROM ("
            f" SELECT seq, kind, record, body FROM {checkpoint} WHERE run = %s AND seq > %s AND part = {part}"
            f" AND (%s OR kind = ANY(%s)) ORDER BY seq LIMIT %s) page) paged WHERE before < %s ORDER BY seq"
        )
        self._signals = (
            f"SELECT run, seq, name, payload, id, sender, sent_at, checksum FROM {signal}"
            f" WHERE run = %s AND seq > %s ORDER BY seq LIMIT %s"
        )

    def get_run(self, run_id: str) -> Run | None:
        """Return a run with its outcome and its progress."""
        rows = self._rows(self._get, (plain(run_id),))
        if not rows:
            return None
        (row,) = rows
        run = run_from(row)
        seq, kind, record, body, progress = row[RUN_WIDTH:]
        if seq is not None:
            run = rules.with_outcome(run, Row(seq, kind, record, body))
        newest = rules.progress_in(progress).get(run_id)
        return run if newest is None else replace(run, progress=bytes(newest))

    def list_runs(self, query: RunQuery) -> RunPage:
        """Return one page of runs."""
        narrow, now = rules.with_statuses(query), instant(self._clock.now())
        rules.page_start(query)
        if narrow is None:
            return RunPage(count=0 if query.count_to else None)
        rows, count = self._source.run(lambda connection: self._lists.page(connection, narrow, now), again=True)
        limit = max(query.limit, 0)
        page = rows[:limit]
        runs: list[Run] = []
        unreadable: list[str] = []
        for row in page:
            try:
                runs.append(run_from(row))
            except CheckpointCorrupt:
                unreadable.append(row[1])
        more = str(page[-1][0]) if page and len(rows) > len(page) else None
        return RunPage(tuple(runs), more, tuple(unreadable), count)

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        """Return one page of the rows of a run."""
        wanted = list(kinds)
        name = plain(run_id)
        values = (name, after, name, name, not wanted, texts(map(plain, wanted)), max(limit, 0), rules.PAGE_BYTES)
        return [Row(*row) for row in self._rows(self._checkpoints, values)]

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        """Return one page of the signals of a run."""
        rows = self._rows(self._signals, (plain(run_id), after, max(limit, 0)))
        return [signal_from(row) for row in rows]

    def _rows(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return self._source.run(lambda one: one.execute(sql, values, binary=True).fetchall(), again=True)
