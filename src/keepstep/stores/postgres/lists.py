"""Pages of runs from a PostgreSQL store, newest first, read from an index in that order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from ...model import RunQuery, Status
from ...model.keepers import KEEPER_ID
from ...model.signal import RESERVED
from .. import rules
from .pool import Address, Connection
from .rows import RUN_COLUMNS, plain, tag, texts

#: Columns for a page of heads, which is ordered and continued by the head's number, even if a damaged row differs.
_HEAD_FIRST = RUN_COLUMNS.replace("coalesce(r.number, h.number)", "coalesce(h.number, r.number)")
_NO_INPUT = " CASE WHEN r.input IS NOT NULL THEN ''::bytea END,"
_ONE_MOMENT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
#: Settings by which every list is read from indexes, row by row, until a page is full. The planner takes rare values to
#: be spread evenly, and would read and sort whole tables.
_BY_INDEXES = "SELECT " + ", ".join(
    f"set_config('{name}', '{value}', true)"
    for name, value in (
        ("enable_seqscan", "off"),
        ("enable_sort", "off"),
        ("enable_hashjoin", "off"),
        ("enable_mergejoin", "off"),
        ("max_parallel_workers_per_gather", "0"),
        ("jit", "off"),
    )
)
#: Runs up to which those that an index names are looked up at once.
FEW = 2000
#: Newest runs that are searched for a page before the oldest and the newest run of a time are looked up.
NEAR = 10_000
#: Workflows up to which a list of all but some names the others, and reads the runs of each.
MOST_WORKFLOWS = 100
#: Time by which two clocks may differ, so that a run seems to be changed before it was created.
_SKEW = timedelta(days=1)
#: The queue of runs that name none, which has no entry in the index of queues.
_UNNAMED = "default"
_HAS_TAGS = "r.tags <> '{}' AND r.tags @> %s"
#: As in the index `keepstep_head_person`, whose condition a query must repeat.
_PERSON = (
    "h.worker IS NULL AND (h.status IN ('paused', 'set aside')"
    " OR h.status = 'waiting' AND h.wakes ~ '[[,]\"(?!ks:)|\"ks:(resolve|go):')"
)
#: A free run whose time has not come.
_NOT_DUE = "(h.due_at IS NULL OR h.due_at > %s)"
_WAKES = "CASE WHEN h.wakes <> '' THEN h.wakes::jsonb ELSE '[]' END"
_ASKS_PERSON = (
    f"(h.status <> 'waiting' OR EXISTS (SELECT 1 FROM jsonb_array_elements_text({_WAKES}) w"
    " WHERE NOT starts_with(w, 'ks:') OR starts_with(w, 'ks:resolve:') OR starts_with(w, 'ks:go:')))"
)
_STATUSES = frozenset(status.value for status in Status)


class Lists:
    """The list queries of one schema."""

    def __init__(self, address: Address) -> None:
        run, head = map(address.table, ("run", "head"))
        self.address, self.run, self.head = address, run, head
        self.from_runs = f"FROM {run} r LEFT JOIN {head} h ON h.run = r.id"
        self.from_heads = f"FROM {head} h LEFT JOIN {run} r ON r.id = h.run"
        self.statuses = f"""
            WITH RECURSIVE s(status) AS (
                (SELECT status FROM {head} ORDER BY status LIMIT 1)
                UNION ALL
                SELECT (SELECT h.status FROM {head} h WHERE h.status > s.status ORDER BY h.status LIMIT 1)
                FROM s WHERE s.status IS NOT NULL)
            SELECT status FROM s WHERE status IS NOT NULL"""
        self.workflows = f"""
            WITH RECURSIVE w(workflow) AS (
                (SELECT workflow FROM {head} ORDER BY workflow LIMIT 1)
                UNION ALL
                SELECT (SELECT h.workflow FROM {head} h WHERE h.workflow > w.workflow ORDER BY h.workflow LIMIT 1)
                FROM w WHERE w.workflow IS NOT NULL)
            SELECT workflow FROM w WHERE workflow IS NOT NULL LIMIT {MOST_WORKFLOWS + 1}"""

    def page(self, connection: Connection, query: RunQuery, now: datetime) -> tuple[list[Sequence[Any]], int | None]:
        """Return the rows of a page and one more, for `run_from`, and the count if the query asks for it.

        Everything is read as of one moment; otherwise a run that changes its status could be missed.
        """
        start, limit = rules.page_start(query), max(query.limit, 0)
        with connection.transaction():
            connection.execute(_ONE_MOMENT)
            connection.execute(_BY_INDEXES)
            search = _Search(self, connection, query, now)
            rows = search.rows(start, limit + 1)
            return rows, search.count(query.count_to) if query.count_to else None


class _Walk(NamedTuple):
    """Runs that an index holds in the order of their numbers."""

    source: str
    number: str
    where: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()


class _Search:
    """One query, answered in one view of the store.

    An index may name few runs that hold all matching ones: these are looked up. Otherwise, an index holds the runs of
    one status, or of one workflow and status, in order; several are read separately and merged. An invalid status
    matches every query, so that its run is reported.
    """

    def __init__(self, lists: Lists, connection: Connection, query: RunQuery, now: datetime) -> None:
        self._lists, self._connection, self._query = lists, connection, query
        self._where, self._values = _conditions(query, now, lists.address)
        self._is_of_few = query.ids is not None
        self._walks = [_Walk(lists.from_runs, "r.number")] if self._is_of_few else self._plan()

    def rows(self, start: int | None, limit: int) -> list[Sequence[Any]]:
        found: list[Sequence[Any]] = []
        for low, high in self._stretches(start):
            for walk in self._walks:
                where, values = self._within(walk, low, high)
                columns = _columns(self._query, _HEAD_FIRST if walk.number == "h.number" else RUN_COLUMNS)
                sql = f"SELECT {columns} {walk.source}{where} ORDER BY {walk.number} DESC LIMIT %s"
                found += self._ask(sql, [*values, limit])
            if len(found) >= limit:
                break
        found.sort(key=lambda row: -row[0])
        return found[:limit]

    def count(self, most: int) -> int:
        found = 0
        for low, high in self._stretches(None):
            for walk in self._walks:
                where, values = self._within(walk, low, high)
                # Without the order, the planner may read the whole table from its beginning.
                sql = f"SELECT 1 {walk.source}{where} ORDER BY {walk.number} DESC LIMIT %s"
                found += self._ask(f"SELECT count(*) FROM ({sql}) x", [*values, most - found])[0][0]
        return found

    def _ask(self, sql: str, values: Sequence[Any]) -> list[Sequence[Any]]:
        # Planned again each time, because the best index depends on the query.
        return self._connection.execute(sql.encode(), values, prepare=False, binary=True).fetchall()

    def _within(self, walk: _Walk, low: int | None, high: int | None) -> tuple[str, list[Any]]:
        where, values = [*walk.where, *self._where], [*walk.values, *self._values]
        for bound, relation in ((low, ">="), (high, "<")):
            if bound is not None:
                where.append(f"{walk.number} {relation} %s")
                values.append(bound)
        return _where(where), values

    def _stretches(self, start: int | None) -> Iterator[tuple[int | None, int | None]]:
        """Yield stretches of numbers that together hold every matching run, from the newest to the oldest.

        A time that holds many runs is bounded by its oldest and its newest run. To find these takes a while, so the
        newest runs are searched first.
        """
        query = self._query
        where, values = _between("created_at", query.created_after, query.created_before)
        if query.updated_before is not None and query.created_before is None:  # a run is created before it is changed
            where, values = [*where, "created_at < %s"], [*values, query.updated_before + _SKEW]
        if self._is_of_few or not where:
            yield None, start
            return
        run = self._lists.run
        newest = self._ask(f"SELECT max(number) FROM {run}", [])[0][0] or 0
        high = (newest + 1 if start is None else min(start, newest + 1)) - NEAR
        yield high, start
        first, last = self._ask(f"SELECT min(number + 0), max(number + 0) FROM {run}{_where(where)}", values)[0]
        if first is not None and first < high:
            yield first, min(high, last + 1)

    def _plan(self) -> list[_Walk]:
        query, lists = self._query, self._lists
        known = [numbers for one in self._ranges() if (numbers := self._few(*one)) is not None]
        if known:
            self._is_of_few = True
            named = sorted(set.intersection(*known))
            return self._filtered(_Walk(lists.from_runs, "r.number", ("r.number = ANY(%s::bigint[])",), (named,)))
        workflows = self._workflows()
        if query.parent is not None:
            return self._filtered(_Walk(lists.from_runs, "r.number", ("r.parent = %s",), (plain(query.parent),)))
        if _asks_by_person(query):
            return self._filtered(_Walk(lists.from_heads, "h.number", (_PERSON,)))
        if query.queue is not None and query.queue != _UNNAMED:
            where = ("r.queue = %s", f"r.queue <> '{_UNNAMED}'")
            return self._filtered(_Walk(lists.from_runs, "r.number", where, (plain(query.queue),)))
        if workflows is None and not query.status:
            return [_Walk(lists.from_runs, "r.number")]
        there = [status for (status,) in self._ask(lists.statuses, [])]
        asked = [status for status in there if not query.status or status in query.status or status not in _STATUSES]
        by_status = [_Walk(lists.from_heads, "h.number", ("h.status = %s",), (status,)) for status in asked]
        if workflows is None:
            return by_status
        return [
            walk._replace(where=(*walk.where, "h.workflow = %s"), values=(*walk.values, workflow))
            for workflow in sorted(workflows)
            for walk in by_status
        ]

    def _filtered(self, walk: _Walk) -> list[_Walk]:
        """Return a walk over an index without statuses, with those of the query as a condition."""
        if not self._query.status:
            return [walk]
        others = texts([status.value for status in Status if status not in self._query.status])
        condition = "(h.status <> ALL(%s)) IS NOT FALSE"
        return [walk._replace(where=(*walk.where, condition), values=(*walk.values, others))]

    def _ranges(self) -> Iterator[tuple[str, list[str], list[Any]]]:
        """Yield conditions on one table that an index serves and that all matching runs fulfil."""
        query, run, head = self._query, f"{self._lists.run} r", f"{self._lists.head} h"
        if query.id_prefix:
            prefix = plain(query.id_prefix)
            end = rules.end_of_prefix(prefix)
            where = ["r.id >= %s"] if end is None else ["r.id >= %s", "r.id < %s"]
            yield run, where, [prefix] if end is None else [prefix, end]
        where, values = _between("r.created_at", query.created_after, query.created_before)
        if values:
            yield run, where, values
        if query.tags:
            yield run, [_HAS_TAGS], [[tag(*one) for one in query.tags.items()]]
        if query.parent is not None:
            yield run, ["r.parent = %s"], [plain(query.parent)]
        if query.worker is not None:
            yield head, ["h.worker = %s"], [plain(query.worker)]
        if query.queue is not None and query.queue != _UNNAMED:
            yield run, ["r.queue = %s", f"r.queue <> '{_UNNAMED}'"], [plain(query.queue)]
        if _asks_by_person(query):
            yield head, [_PERSON], []

    def _few(self, source: str, where: list[str], values: list[Any]) -> set[int] | None:
        """Return the numbers of the runs that fulfil conditions; None if they are more than a few."""
        sql = f"SELECT {source[-1]}.number FROM {source}{_where(where)} LIMIT %s"
        rows = self._ask(sql, [*values, FEW + 1])
        return None if len(rows) > FEW else {number for (number,) in rows}

    def _workflows(self) -> set[str] | None:
        """Return the workflows that a run may have; None for all, or if they are too many to read each."""
        query = self._query
        named = None if query.workflow is None else {plain(query.workflow)}
        if query.workflows:
            several = set(map(plain, query.workflows))
            named = several if named is None else named & several
        if named is None and query.not_workflows:
            named = {workflow for (workflow,) in self._ask(self._lists.workflows, [])}
            if len(named) > MOST_WORKFLOWS:
                return None
        return None if named is None else named - set(map(plain, query.not_workflows))


def _asks_by_person(query: RunQuery) -> bool:
    return query.needs_person or (query.awaits is not None and not query.awaits.startswith(RESERVED))


def _between(column: str, after: datetime | None, before: datetime | None) -> tuple[list[str], list[Any]]:
    asked = [(f"{column} {relation} %s", at) for relation, at in ((">", after), ("<", before)) if at is not None]
    return [where for where, _ in asked], [at for _, at in asked]


def _columns(query: RunQuery, columns: str) -> str:
    """Return the columns to read; an input is fetched from the storage of large values only on request."""
    return columns if query.with_input else columns.replace(" r.input,", _NO_INPUT)


def _where(conditions: list[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _by_ids(query: RunQuery) -> list[tuple[str, tuple[Any, ...]]]:
    """Return queries for named runs, which are few: filter by status after reading."""
    if query.ids is None:
        return []
    others = [status.value for status in Status if query.status and status not in query.status]
    named = texts(map(plain, sorted(query.ids)))
    return [("r.id = ANY(%s)", (named,)), ("(h.status <> ALL(%s)) IS NOT FALSE", (texts(others),))]


def _by_waits(query: RunQuery, now: datetime, address: Address) -> list[tuple[str, tuple[Any, ...]]]:
    """Return conditions about what a run waits for, and about failures; each holds for certain statuses only."""
    run, head, checkpoint = map(address.table, ("run", "head", "checkpoint"))
    asked: list[tuple[str, tuple[Any, ...]]] = []
    if query.awaits is not None:
        asked.append((f"{_NOT_DUE} AND jsonb_exists({_WAKES}, %s)", (now, plain(query.awaits))))
    if query.needs_person:
        asked.append((f"{_NOT_DUE} AND {_ASKS_PERSON}", (now,)))
    if rules.asks_for_open(query):
        newest = (
            f"SELECT 1 FROM {checkpoint} c WHERE c.run = h.run AND c.part = h.part AND c.seq = h.seq"
            " AND c.kind = 'error'"
        )
        handed = f"EXISTS ({newest} AND position(%s::bytea in c.record) > 0)"
        asked.append((f"NOT (h.status = 'set aside' AND {handed})", (rules.HANDED_OVER_MARK,)))
    if query.open_failure:
        forks = f"SELECT 1 FROM {run} f JOIN {head} g ON g.run = f.id WHERE f.origin = r.id AND g.status = 'completed'"
        asked.append((f"NOT EXISTS ({forks})", ()))
    return asked


def _conditions(query: RunQuery, now: datetime, address: Address) -> tuple[list[str], list[Any]]:
    """Return the conditions of a query besides the status, as SQL with bound values.

    The planner must not choose an index by them: it knows nothing of their order. `_Search` chooses.
    """
    asked: list[tuple[str, tuple[Any, ...]]] = []
    named = {"h.workflow": query.workflow, "r.version": query.version, "r.parent": query.parent}
    named |= {"h.worker": query.worker, "h.queue": query.queue}
    asked += [(f"{column} = %s", (plain(name),)) for column, name in named.items() if name is not None]
    for relation, workflows in (("= ANY", query.workflows), ("<> ALL", query.not_workflows)):
        if workflows:
            asked.append((f"h.workflow || '' {relation}(%s)", (texts(map(plain, sorted(workflows))),)))
    if query.tags:
        asked.append((_HAS_TAGS, ([tag(name, value) for name, value in query.tags.items()],)))
    if query.created_before is not None:
        asked.append(("r.created_at + interval '0' < %s", (query.created_before,)))
    if query.created_after is not None:
        asked.append(("r.created_at + interval '0' > %s", (query.created_after,)))
    if query.updated_before is not None:
        asked.append(("h.updated_at < %s", (query.updated_before,)))
    if query.updated_after is not None:
        asked.append(("h.updated_at > %s", (query.updated_after,)))
    if query.id_prefix is not None:
        prefix = plain(query.id_prefix)
        asked.append(("starts_with(r.id, %s)", (prefix,)))
    if not query.system:
        asked.append(("NOT starts_with(coalesce(r.id, ''), %s)", (KEEPER_ID,)))
    asked += [*_by_ids(query), *_by_waits(query, now, address)]
    return [condition for condition, _ in asked], [value for _, values in asked for value in values]
