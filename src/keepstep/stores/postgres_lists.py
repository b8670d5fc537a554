"""How a page of runs is read from a PostgreSQL store: newest first, by an index that has them in that order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..model import RunQuery, Status
from . import rules
from .postgres_connection import Address, Connection
from .postgres_rows import RUN_COLUMNS, plain, tag

#: The number by which a page of heads is ordered and continued must be the head's, should a damaged row differ.
_HEAD_FIRST = RUN_COLUMNS.replace("coalesce(r.number, h.number)", "coalesce(h.number, r.number)")
_NO_INPUT = " CASE WHEN r.input IS NOT NULL THEN ''::bytea END,"
_STATUSES = frozenset(status.value for status in Status)


class Lists:
    """The lists of one schema."""

    def __init__(self, address: Address) -> None:
        run, head = map(address.table, ("run", "head"))
        self._from_runs = f"FROM {run} r LEFT JOIN {head} h ON h.run = r.id"
        self._from_heads = f"FROM {head} h LEFT JOIN {run} r ON r.id = h.run"
        self._statuses = f"""
            WITH RECURSIVE s(status) AS (
                (SELECT status FROM {head} ORDER BY status LIMIT 1)
                UNION ALL
                SELECT (SELECT h.status FROM {head} h WHERE h.status > s.status ORDER BY h.status LIMIT 1)
                FROM s WHERE s.status IS NOT NULL)
            SELECT status FROM s WHERE status IS NOT NULL"""

    def rows(self, connection: Connection, query: RunQuery) -> list[Sequence[Any]]:
        """The rows of a page and one more, for `run_from`.

        Runs of one status, and of one workflow and status, stand in order in an index; so several are read apart and
        put together. A status that no Keepstep wrote matches every query, so that it names its run.
        """
        limit = max(query.limit, 0) + 1
        where, values = _conditions(query)
        start = rules.page_start(query)
        if not query.status and query.workflow is None:
            if start is not None:
                where, values = [*where, "r.number < %s"], [*values, start]
            source = f"{self._from_runs}{_where(where)} ORDER BY r.number DESC"
            return _read(connection, source, [*values, limit], _columns(query, RUN_COLUMNS))
        if start is not None:
            where, values = [*where, "h.number < %s"], [*values, start]
        there = [status for (status,) in connection.execute(self._statuses).fetchall()]
        asked = [status for status in there if not query.status or status in query.status or status not in _STATUSES]
        rows: list[Sequence[Any]] = []
        for status in asked:
            condition = _where([*where, "h.status = %s"])
            source = f"{self._from_heads}{condition} ORDER BY h.number DESC"
            rows += _read(connection, source, [*values, status, limit], _columns(query, _HEAD_FIRST))
        rows.sort(key=lambda row: -row[0])
        return rows[:limit]


def _columns(query: RunQuery, columns: str) -> str:
    """What is read of each run: an input that nobody asks for is not fetched from where large values are kept."""
    return columns if query.with_input else columns.replace(" r.input,", _NO_INPUT)


def _read(connection: Connection, source: str, values: list[Any], columns: str) -> list[Sequence[Any]]:
    # Planned anew each time, because which index serves best depends on what is asked for.
    sql = f"SELECT {columns} {source} LIMIT %s"
    return connection.execute(sql.encode(), values, prepare=False, binary=True).fetchall()


def _where(conditions: list[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _conditions(query: RunQuery) -> tuple[list[str], list[Any]]:
    """What a query asks for beside the status, as SQL whose every value is bound."""
    asked: list[tuple[str, tuple[Any, ...]]] = []
    if query.workflow is not None:
        asked.append(("h.workflow = %s", (plain(query.workflow),)))
    if query.parent is not None:
        asked.append(("r.parent = %s", (plain(query.parent),)))
    if query.worker is not None:
        asked.append(("h.worker = %s", (plain(query.worker),)))
    if query.tags:
        asked.append(("r.tags <> '{}' AND r.tags @> %s", ([tag(name, value) for name, value in query.tags.items()],)))
    if query.created_before is not None:
        asked.append(("r.created_at < %s", (query.created_before,)))
    if query.created_after is not None:
        asked.append(("r.created_at > %s", (query.created_after,)))
    if query.updated_before is not None:
        asked.append(("h.updated_at < %s", (query.updated_before,)))
    if query.id_prefix is not None:
        prefix = plain(query.id_prefix)
        asked.append(("r.id >= %s AND starts_with(r.id, %s)", (prefix, prefix)))
    return [condition for condition, _ in asked], [value for _, values in asked for value in values]
