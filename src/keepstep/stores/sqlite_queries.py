"""What a query asks of a SQLite store, as SQL whose every value is bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..model import RunQuery, Status
from .sqlite_connection import Cursor
from .sqlite_rows import RAW, text_or_bytes

#: Tags that cannot be read match any query, so that it names their run.
_HAS_TAG = (
    "r.tags <> '' AND CASE WHEN json_valid(r.tags) THEN"
    " EXISTS (SELECT 1 FROM json_each(r.tags) t WHERE t.key = ? AND t.value = ?) ELSE 1 END"
)
_STATUSES = {status.value.encode() for status in Status}
#: Every text is less than any bytes; a status of bytes is damage too, and is asked for apart.
_NEXT_STATUS = (
    "SELECT CAST(status AS BLOB) FROM keepstep_head WHERE status > CAST(? AS TEXT) AND status < x'' ORDER BY status"
    " LIMIT 1"
)


def conditions(query: RunQuery) -> tuple[str, list[Any]]:
    """What a query asks for, as SQL whose every value is bound."""
    asked: list[tuple[str, tuple[Any, ...]]] = [("1", ())]
    if query.workflow is not None:
        asked.append(("h.workflow = ?", (query.workflow,)))
    if query.parent is not None:
        asked.append(("r.parent = ?", (query.parent,)))
    if query.worker is not None:
        asked.append(("h.worker = ?", (query.worker,)))
    for name, value in query.tags.items():
        asked.append((_HAS_TAG, (name, value)))
    if query.created_before is not None:
        asked.append(("r.created_at < ?", (query.created_before.timestamp(),)))
    if query.created_after is not None:
        asked.append(("r.created_at > ?", (query.created_after.timestamp(),)))
    if query.updated_before is not None:
        asked.append(("h.updated_at < ?", (query.updated_before.timestamp(),)))
    if query.id_prefix is not None:
        prefix = query.id_prefix
        asked.append(("r.id >= ? AND substr(r.id, 1, ?) = ?", (prefix, len(prefix), prefix)))
    return " AND ".join(condition for condition, _ in asked), [value for _, values in asked for value in values]


def having(cursor: Cursor, wanted: Iterable[str]) -> list[tuple[str, tuple[str | bytes, ...]]]:
    """The conditions, one after the other, under which a run has one of these statuses, or one that nobody knows."""
    statuses: list[str | bytes] = [*wanted, *_unknown_statuses(cursor)]
    return [*(("h.status = CAST(? AS TEXT)", (status,)) for status in statuses), ("h.status >= x''", ())]


def _unknown_statuses(cursor: Cursor) -> list[bytes]:
    """Statuses that no Keepstep wrote: runs that have one match every query by status, as unreadable ones."""
    found: list[bytes] = []
    last = b""
    while rows := cursor.execute(_NEXT_STATUS, (last,)).fetchall():
        if rows[0][0] == last:
            break
        last = rows[0][0]
        if last not in _STATUSES:
            found.append(last)
    return found


def arrivals(sql: Cursor, worker: str, cursor: int) -> tuple[int, tuple[str, ...]]:
    """The newest position, and the worker's runs that received signals after `cursor`."""
    newest = sql.execute("SELECT seq FROM sqlite_sequence WHERE name = 'keepstep_signal'").fetchall()
    position = newest[0][0] if newest else 0
    if position == cursor:
        return position, ()
    if position < cursor:  # positions began anew, after a damaged one
        cursor = 0
    if cursor <= 0:  # from the beginning: start from the few runs that are leased, not from every signal ever sent
        rows = sql.execute(
            f"SELECT {RAW.format('run')} FROM keepstep_head WHERE worker = ? AND signals > 0", (worker,)
        ).fetchall()
    else:
        rows = sql.execute(
            f"SELECT {RAW.format('s.run')} FROM keepstep_signal s CROSS JOIN keepstep_head h ON h.run = s.run"
            " WHERE s.position > ? AND h.worker = ?",
            (cursor, worker),
        ).fetchall()
    runs = {text_or_bytes(run) for (run,) in rows}
    return position, tuple(sorted(run for run in runs if isinstance(run, str)))
