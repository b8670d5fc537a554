"""Pages and counts of runs from a SQLite file, each read from the indexes that leave the fewest runs to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from ...model import RunQuery, Status
from ...model.signal import RESERVED
from .. import rules
from .connection import Cursor
from .queries import conditions, having
from .rows import NUMBER, names_text, run_rows

#: Runs up to which those that an index names are read at once, and sorted.
FEW = 2000
#: Runs of each of two indexes up to which those in both are looked up.
MANY = 30_000
#: Newest runs that are searched for a page before the oldest and the newest run of a time or of a prefix are looked up.
NEAR = 10_000
#: Workflows up to which a list of all but some names the others, and reads the runs of each.
MOST_WORKFLOWS = 100
#: Seconds by which the clocks of two processes may differ, so that a run seems to be changed before it was created.
_SKEW = 86_400.0

_RUNS = "keepstep_run r LEFT JOIN keepstep_head h ON h.run = r.id"
_HEADS = "keepstep_head h LEFT JOIN keepstep_run r ON r.id = h.run"
#: Heads by one index. SQLite knows no frequencies here, and might read another one and sort.
_HEAD_BY = "keepstep_head h INDEXED BY keepstep_head_{}"
_HEADS_BY = f"{_HEAD_BY} LEFT JOIN keepstep_run r ON r.id = h.run"
_TAGS = "keepstep_tag t CROSS JOIN keepstep_run r ON r.number = t.number LEFT JOIN keepstep_head h ON h.run = r.id"
_TAGGED = "t.name = ? AND t.value = ?"
#: As in the index `keepstep_run_unreadable`.
_UNREADABLE = "r.tags <> '' AND NOT json_valid(r.tags)"
#: As in the index `keepstep_head_person`, whose condition a query must repeat.
_PERSON = (
    "h.worker IS NULL AND (h.status IN ('paused', 'set aside') OR h.status = 'waiting' AND (h.wakes GLOB '*[[,]\"[^k]*'"
    " OR h.wakes GLOB '*[[,]\"k[^s]*' OR h.wakes GLOB '*[[,]\"ks[^:]*' OR h.wakes GLOB '*\"ks:resolve:*'"
    " OR h.wakes GLOB '*\"ks:go:*'))"
)
_IN_STATUS = "coalesce(CAST(h.status AS TEXT) NOT IN (SELECT value FROM json_each(?)), 1)"
_NEXT_WORKFLOW = "SELECT workflow FROM keepstep_head WHERE worker IS NULL AND workflow > ? ORDER BY workflow LIMIT 1"
#: The queue of runs that name none, which has no entry in the index of queues.
_UNNAMED = "default"
_LEASED = "h.worker IS NOT NULL"
_numbers = msgspec.json.Encoder().encode


class _Walk(NamedTuple):
    """Runs that an index holds in the order of their numbers."""

    source: str
    number: str
    where: str = "1"
    values: tuple[Any, ...] = ()


class _Range(NamedTuple):
    """Runs that an index holds together, in whatever order; `number` is their number."""

    number: str
    source: str
    where: str
    values: tuple[Any, ...]


class Search:
    """One query, answered in one view of the store."""

    def __init__(self, cursor: Cursor, query: RunQuery, now: float) -> None:
        self._cursor, self._query = cursor, query
        self._where, self._values = conditions(query, now)
        self._others = names_text([status.value for status in Status if query.status and status not in query.status])
        self._others = self._others or "[]"
        self._walks = self._plan()

    def rows(self, start: int | None, limit: int) -> list[Sequence[Any]]:
        """Return the rows of the newest matching runs before the number `start`, newest first."""
        found: list[Sequence[Any]] = []
        for low, high in self._stretches(start):
            for walk in self._walks:
                where, values = self._within(walk, low, high)
                number = NUMBER.format(walk.number.strip("+")[0])
                sql = f"FROM {walk.source} WHERE {where} ORDER BY {walk.number} DESC LIMIT ?"
                found += run_rows(self._cursor, sql, (*values, limit), number, whole=self._query.with_input)
            if len(found) >= limit:
                break
        found.sort(key=place, reverse=True)
        return found[:limit]

    def count(self, most: int) -> int:
        """Return the number of matching runs, counted up to `most`."""
        found = 0
        for low, high in self._stretches(None):
            for walk in self._walks:
                where, values = self._within(walk, low, high)
                sql = f"SELECT count(*) FROM (SELECT 1 FROM {walk.source} WHERE {where} LIMIT ?)"
                found += self._cursor.execute(sql, (*values, most - found)).fetchall()[0][0]
        return found

    def _within(self, walk: _Walk, low: int | None, high: int | None) -> tuple[str, list[Any]]:
        where, values = [walk.where, self._where], [*walk.values, *self._values]
        for bound, relation in ((low, ">="), (high, "<")):
            if bound is not None:
                where.append(f"{walk.number} {relation} ?")
                values.append(bound)
        return " AND ".join(where), values

    # -- stretches of numbers ------------------------------------------------------------------------------------------

    def _stretches(self, start: int | None) -> Iterator[tuple[int | None, int | None]]:
        """Yield stretches of numbers that together hold every matching run, from the newest to the oldest.

        A time or a prefix that holds many runs is bounded by its oldest and its newest run. To find these takes a
        while, so the newest runs are searched first.
        """
        windows = [] if self._is_of_few else self._windows()
        if not windows:
            yield None, start
            return
        newest = self._cursor.execute("SELECT max(number) FROM keepstep_run").fetchall()[0][0] or 0
        high = (newest + 1 if start is None else min(start, newest + 1)) - NEAR
        yield high, start
        low = 0
        for window in windows:
            sql = f"SELECT min(r.number), max(r.number) FROM {window.source} WHERE {window.where}"
            first, last = self._cursor.execute(sql, window.values).fetchall()[0]
            if first is None:
                return
            low, high = max(low, first), min(high, last + 1)
        if low < high:
            yield low, high

    def _windows(self) -> list[_Range]:
        query = self._query
        found = [*self._by_prefix(), *self._by_creation()]
        if query.updated_before is not None and query.created_before is None:  # a run is created before it is changed
            before = query.updated_before.timestamp() + _SKEW
            found.append(_Range("r.number", "keepstep_run r", "r.created_at < ?", (before,)))
        return found

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _plan(self) -> list[_Walk]:
        """Return disjoint walks that together hold every matching run, and few others."""
        query = self._query
        self._is_of_few = query.ids is not None
        if query.ids is not None:
            return [_Walk(_RUNS, "+r.number")]  # "+" finds the few runs by id, and sorts them
        walks, ranges = self._ways()
        known = self._named(self._by_time(), ranges)
        if known is None:
            return walks
        self._is_of_few = True
        named = _numbers(sorted(known)).decode()
        return self._filtered(_Walk(_RUNS, "+r.number", "r.number IN (SELECT value FROM json_each(?))", (named,)))

    def _ways(self) -> tuple[list[_Walk], list[list[_Range]]]:
        """Return the best walks, and every list of ranges that holds all matching runs."""
        query = self._query
        walks: list[list[_Walk]] = []
        ranges: list[list[_Range]] = []
        if query.worker is not None:
            ranges.append([_Range("h.number", "keepstep_head h", "h.worker = ?", (query.worker,))])
        if query.parent is not None:
            ranges.append([_Range("r.number", "keepstep_run r", "r.parent = ?", (query.parent,))])
            walks.append(self._filtered(_Walk(_RUNS, "r.number", "r.parent = ?", (query.parent,))))
        unreadable = _Range("r.number", "keepstep_run r", _UNREADABLE, ())
        for tag in query.tags.items():
            ranges.append([_Range("t.number", "keepstep_tag t", _TAGGED, tag), unreadable])
            tagged, damaged = _Walk(_TAGS, "t.number", _TAGGED, tag), _Walk(_RUNS, "+r.number", _UNREADABLE)
            walks.append([*self._filtered(tagged), *self._filtered(damaged)])
        if query.needs_person or (query.awaits is not None and not query.awaits.startswith(RESERVED)):
            awaited: tuple[str, ...] = () if query.awaits is None else (names_text([query.awaits])[1:-1],)
            where = f"{_PERSON} AND instr(h.wakes, ?) > 0" if awaited else _PERSON
            ranges.append([_Range("h.number", _HEAD_BY.format("person"), where, awaited)])
            walks.append(self._filtered(_Walk(_HEADS_BY.format("person"), "h.number", _PERSON)))
        if query.queue is not None and query.queue != _UNNAMED:
            where = f"r.queue = ? AND r.queue <> '{_UNNAMED}'"
            ranges.append([_Range("r.number", "keepstep_run r", where, (query.queue,))])
            walks.append(self._filtered(_Walk(_RUNS, "r.number", where, (query.queue,))))
        exact = self._by_workflow() or self._by_status()
        if exact and (ranges or self._by_time()):
            ranges.append([_Range("h.number", one.source, one.where, one.values) for one in exact])
        return [*walks, exact or [_Walk(_RUNS, "r.number")]][0], ranges

    def _by_time(self) -> list[list[_Range]]:
        """Return ranges by time and prefix. Those of many runs are bounded by their oldest and newest run."""
        query = self._query
        found = [[one] for one in (*self._by_prefix(), *self._by_creation())]
        changed = query.updated_after is not None or query.updated_before is not None
        return [*found, self._by_change()] if changed else found

    def _filtered(self, walk: _Walk) -> list[_Walk]:
        """Return a walk over an index without statuses, with those of the query as a condition."""
        if not self._query.status:
            return [walk]
        return [walk._replace(where=f"{walk.where} AND {_IN_STATUS}", values=(*walk.values, self._others))]

    def _by_prefix(self) -> list[_Range]:
        prefix = self._query.id_prefix
        if not prefix:
            return []
        end = rules.end_of_prefix(prefix)
        where, values = ("r.id >= ?", (prefix,)) if end is None else ("r.id >= ? AND r.id < ?", (prefix, end))
        return [_Range("r.number", "keepstep_run r", where, values)]

    def _by_creation(self) -> list[_Range]:
        where, values = _between("r.created_at", self._query.created_after, self._query.created_before)
        return [_Range("r.number", "keepstep_run r", where, values)] if values else []

    def _by_change(self) -> list[_Range]:
        query = self._query
        where, values = _between("h.updated_at", query.updated_after, query.updated_before)
        free = [
            _Range(
                "h.number", _HEAD_BY.format("updated"), f"h.worker IS NULL AND {which} AND {where}", (*status, *values)
            )
            for which, status in having(self._cursor, query.status or [status.value for status in Status])
        ]
        return [*free, _Range("h.number", _HEAD_BY.format("owner"), f"{_LEASED} AND {where}", values)]

    def _by_status(self) -> list[_Walk]:
        if not self._query.status:
            return []
        return [_Walk(_HEADS, "h.number", *one) for one in having(self._cursor, self._query.status)]

    def _by_workflow(self) -> list[_Walk]:
        """Return walks over the free runs of each workflow and status, and over the leased runs."""
        workflows = self._workflows()
        if workflows is None:
            return []
        statuses = having(self._cursor, self._query.status or [status.value for status in Status])
        free = [
            _Walk(
                _HEADS_BY.format("workflow"),
                "h.number",
                f"h.worker IS NULL AND h.workflow = ? AND {which}",
                (name, *values),
            )
            for name in sorted(workflows)
            for which, values in statuses
        ]
        return [*free, *self._filtered(_Walk(_HEADS_BY.format("owner"), "+h.number", _LEASED))]

    def _workflows(self) -> set[str] | None:
        """Return the workflows that a free run may have; None for all, or if they are too many to read each."""
        query = self._query
        named = None if query.workflow is None else {query.workflow}
        if query.workflows:
            named = set(query.workflows) if named is None else named & query.workflows
        if named is None and query.not_workflows:
            named, last = set(), ""
            while rows := self._cursor.execute(_NEXT_WORKFLOW, (last,)).fetchall():
                last = rows[0][0]
                if not isinstance(last, str) or len(named) >= MOST_WORKFLOWS:
                    return None
                named.add(last)
        return None if named is None else named - query.not_workflows

    def _named(self, timed: list[list[_Range]], ranges: list[list[_Range]]) -> set[int] | None:
        """Return the numbers of few runs that hold every matching one; None if the indexes name no few."""
        known = [numbers for one in (*timed, *ranges) if (numbers := self._first(one, FEW)) is not None]
        if not known and len(ranges) > 1:
            known = [numbers for one in ranges if (numbers := self._first(one, MANY)) is not None]
        named = set.intersection(*known) if known else None
        return None if named is None or len(named) > FEW else named

    def _first(self, ranges: list[_Range], most: int) -> set[int] | None:
        """Return the numbers of the runs in some ranges; None if they are more than `most`."""
        found: set[int] = set()
        for one in ranges:
            sql = f"SELECT {one.number} FROM {one.source} WHERE {one.where} LIMIT ?"
            rows = self._cursor.execute(sql, (*one.values, most + 1 - len(found))).fetchall()
            found.update(number for (number,) in rows if isinstance(number, int))
            if len(found) > most:
                return None
        return found


def _between(column: str, after: datetime | None, before: datetime | None) -> tuple[str, tuple[float, ...]]:
    asked = [(f"{column} {relation} ?", at.timestamp()) for relation, at in ((">", after), ("<", before)) if at]
    return " AND ".join(where for where, _ in asked), tuple(at for _, at in asked)


def place(row: Sequence[Any]) -> int:
    """Return the sort key of a run in a list: its number, or the maximum if the number is damaged."""
    return row[0] if isinstance(row[0], int) else 2**63 - 1
