"""Builds the SQL of queries; every value is bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...model import RunQuery, Status
from ...model.keepers import KEEPER_ID
from .. import rules
from .connection import Cursor
from .rows import RAW, names_text, text_or_bytes

#: Unreadable tags match every query, so that their run is reported.
_HAS_TAG = (
    "r.tags <> '' AND CASE WHEN json_valid(r.tags) THEN"
    " EXISTS (SELECT 1 FROM json_each(r.tags) t WHERE t.key = ? AND t.value = ?) ELSE 1 END"
)
#: A free run whose time has not come.
_NOT_DUE = "(h.due_at IS NULL OR h.due_at > ?)"
_WAKES = "json_each(iif(json_valid(h.wakes), h.wakes, '[]')) w"
_AWAITS = f"EXISTS (SELECT 1 FROM {_WAKES} WHERE w.value = ?)"
_ASKS_PERSON = (
    f"(h.status <> 'waiting' OR EXISTS (SELECT 1 FROM {_WAKES} WHERE w.value NOT GLOB 'ks:*'"
    " OR w.value GLOB 'ks:resolve:*' OR w.value GLOB 'ks:go:*'))"
)
_NOT_HANDED_OVER = (
    "NOT (h.status = 'set aside' AND EXISTS (SELECT 1 FROM keepstep_checkpoint c WHERE c.run = h.run AND c.seq = h.seq"
    " AND c.kind = 'error' AND instr(CAST(c.record AS BLOB), ?) > 0))"
)
_NOT_MENDED = (
    "NOT EXISTS (SELECT 1 FROM keepstep_run f CROSS JOIN keepstep_head g ON g.run = f.id WHERE f.origin = r.id"
    " AND g.status = 'completed')"
)
_STATUSES = {status.value.encode() for status in Status}
#: In SQLite, text is less than any blob. A status stored as a blob is damage too, and is queried separately.
_NEXT_STATUS = (
    "SELECT CAST(status AS BLOB) FROM keepstep_head WHERE status > CAST(? AS TEXT) AND status < x'' ORDER BY status"
    " LIMIT 1"
)


def _by_ids(query: RunQuery) -> list[tuple[str, tuple[Any, ...]]]:
    """Return conditions for runs named by id. They are few, so their status is compared and not searched for."""
    if query.ids is None:
        return []
    others = [status.value for status in Status if query.status and status not in query.status]
    import json  # noqa: PLC0415 - only for runs that are named

    named, excluded = json.dumps(sorted(query.ids)), json.dumps(others)
    return [
        ("r.id IN (SELECT value FROM json_each(?))", (named,)),
        ("coalesce(CAST(h.status AS TEXT) NOT IN (SELECT value FROM json_each(?)), 1)", (excluded,)),
    ]


def _by_waits(query: RunQuery, now: float) -> list[tuple[str, tuple[Any, ...]]]:
    """Return conditions about what a run waits for, and about failures; each holds for certain statuses only."""
    asked: list[tuple[str, tuple[Any, ...]]] = []
    if query.awaits is not None:
        asked.append((f"{_NOT_DUE} AND {_AWAITS}", (now, query.awaits)))
    if query.needs_person:
        asked.append((f"{_NOT_DUE} AND {_ASKS_PERSON}", (now,)))
    if rules.asks_for_open(query):
        asked.append((_NOT_HANDED_OVER, (rules.HANDED_OVER_MARK,)))
    if query.open_failure:
        asked.append((_NOT_MENDED, ()))
    return asked


def conditions(query: RunQuery, now: float) -> tuple[str, list[Any]]:
    """Return a query's conditions as SQL whose every value is bound.

    "+" keeps SQLite from choosing an index by them: `Search` chooses.
    """
    asked: list[tuple[str, tuple[Any, ...]]] = [("1", ())]
    named = {"+h.workflow": query.workflow, "+r.version": query.version, "+r.parent": query.parent}
    named |= {"+h.worker": query.worker, "+h.queue": query.queue}
    asked += [(f"{column} = ?", (name,)) for column, name in named.items() if name is not None]
    for negation, workflows in (("", query.workflows), ("NOT ", query.not_workflows)):
        if workflows:
            asked.append(
                (f"+h.workflow {negation}IN (SELECT value FROM json_each(?))", (names_text(sorted(workflows)),))
            )
    for name, value in query.tags.items():
        asked.append((_HAS_TAG, (name, value)))
    if query.created_before is not None:
        asked.append(("+r.created_at < ?", (query.created_before.timestamp(),)))
    if query.created_after is not None:
        asked.append(("+r.created_at > ?", (query.created_after.timestamp(),)))
    if query.updated_before is not None:
        asked.append(("+h.updated_at < ?", (query.updated_before.timestamp(),)))
    if query.updated_after is not None:
        asked.append(("+h.updated_at > ?", (query.updated_after.timestamp(),)))
    if query.id_prefix is not None:
        prefix = query.id_prefix
        asked.append(("substr(r.id, 1, ?) = ?", (len(prefix), prefix)))
    if not query.system:
        asked.append(("substr(coalesce(r.id, ''), 1, ?) <> ?", (len(KEEPER_ID), KEEPER_ID)))
    asked += [*_by_ids(query), *_by_waits(query, now)]
    return " AND ".join(condition for condition, _ in asked), [value for _, values in asked for value in values]


def having(cursor: Cursor, wanted: Iterable[str]) -> list[tuple[str, tuple[str | bytes, ...]]]:
    """Return conditions, each by itself, for runs with one of these statuses or an unknown one."""
    statuses: list[str | bytes] = [*wanted, *_unknown_statuses(cursor)]
    return [*(("h.status = CAST(? AS TEXT)", (status,)) for status in statuses), ("h.status >= x''", ())]


def _unknown_statuses(cursor: Cursor) -> list[bytes]:
    """Return statuses that Keepstep never writes; their runs match every query by status, as unreadable ones."""
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
    """Return the newest position, and the worker's runs that received signals after `cursor`."""
    newest = sql.execute("SELECT seq FROM sqlite_sequence WHERE name = 'keepstep_signal'").fetchall()
    position = newest[0][0] if newest else 0
    if position == cursor:
        return position, ()
    if position < cursor:  # positions restarted after a damaged one
        cursor = 0
    if cursor <= 0:  # at the beginning, read the few leased runs instead of every signal ever sent
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
