"""Pages of runs from a PostgreSQL store, newest first, read from an index in that order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model import RunQuery, Status
from ...model.keepers import KEEPER_ID
from .. import rules
from .pool import Address, Connection
from .rows import RUN_COLUMNS, plain, tag, texts

#: Columns for a page of heads, which is ordered and continued by the head's number, even if a damaged row differs.
_HEAD_FIRST = RUN_COLUMNS.replace("coalesce(r.number, h.number)", "coalesce(h.number, r.number)")
_NO_INPUT = " CASE WHEN r.input IS NOT NULL THEN ''::bytea END,"
_ONE_MOMENT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_STATUSES = frozenset(status.value for status in Status)


class Lists:
    """The list queries of one schema."""

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
        """Return the rows of a page and one more, for `run_from`.

        An index holds the runs of one status, or of one workflow and status, in order. Several statuses are read
        separately and merged, all as of one moment; otherwise a run that changes its status could be missed. An invalid
        status matches every query, so that its run is reported.
        """
        limit = max(query.limit, 0) + 1
        where, values = _conditions(query)
        start = rules.page_start(query)
        if query.ids is not None or (not query.status and query.workflow is None):
            if start is not None:
                where, values = [*where, "r.number < %s"], [*values, start]
            source = f"{self._from_runs}{_where(where)} ORDER BY r.number DESC"
            return _read(connection, source, [*values, limit], _columns(query, RUN_COLUMNS))
        if start is not None:
            where, values = [*where, "h.number < %s"], [*values, start]
        with connection.transaction():
            connection.execute(_ONE_MOMENT)
            rows = self._rows_by_status(connection, query, where, values)
        rows.sort(key=lambda row: -row[0])
        return rows[:limit]

    def _rows_by_status(
        self, connection: Connection, query: RunQuery, where: list[str], values: list[Any]
    ) -> list[Sequence[Any]]:
        limit = max(query.limit, 0) + 1
        there = [status for (status,) in connection.execute(self._statuses).fetchall()]
        asked = [status for status in there if not query.status or status in query.status or status not in _STATUSES]
        rows: list[Sequence[Any]] = []
        for status in asked:
            condition = _where([*where, "h.status = %s"])
            source = f"{self._from_heads}{condition} ORDER BY h.number DESC"
            rows += _read(connection, source, [*values, status, limit], _columns(query, _HEAD_FIRST))
        return rows


def _columns(query: RunQuery, columns: str) -> str:
    """Return the columns to read; an input is fetched from the storage of large values only on request."""
    return columns if query.with_input else columns.replace(" r.input,", _NO_INPUT)


def _read(connection: Connection, source: str, values: list[Any], columns: str) -> list[Sequence[Any]]:
    # Planned again each time, because the best index depends on the query.
    sql = f"SELECT {columns} {source} LIMIT %s"
    return connection.execute(sql.encode(), values, prepare=False, binary=True).fetchall()


def _where(conditions: list[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _by_ids(query: RunQuery) -> list[tuple[str, tuple[Any, ...]]]:
    """Return queries for named runs, which are few: filter by status after reading."""
    if query.ids is None:
        return []
    others = [status.value for status in Status if query.status and status not in query.status]
    named = texts(map(plain, sorted(query.ids)))
    return [("r.id = ANY(%s)", (named,)), ("(h.status <> ALL(%s)) IS NOT FALSE", (texts(others),))]


def _conditions(query: RunQuery) -> tuple[list[str], list[Any]]:
    """Return the conditions of a query besides the status, as SQL with bound values."""
    asked: list[tuple[str, tuple[Any, ...]]] = []
    named = {"h.workflow": query.workflow, "r.version": query.version, "r.parent": query.parent}
    named["h.worker"] = query.worker
    asked += [(f"{column} = %s", (plain(name),)) for column, name in named.items() if name is not None]
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
    if not query.system:
        asked.append(("NOT starts_with(coalesce(r.id, ''), %s)", (KEEPER_ID,)))
    asked += _by_ids(query)
    return [condition for condition, _ in asked], [value for _, values in asked for value in values]
