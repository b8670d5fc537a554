"""How a claim finds its runs in a SQLite store: a few steps of an index each, however many runs there are."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from typing import Any, NamedTuple

from ...model import Status
from ...ports import ClaimRequest
from .. import claims
from ..claims import FEW, LEVELS
from .connection import Cursor
from .rows import RAW, text_or_bytes

#: A time after this one is damage: it lies in the year 8941.
_LAST_INSTANT = 2.2e11

_STATUSES = frozenset(status.value for status in Status)

_FREE = f"FROM keepstep_head WHERE {claims.FREE_SQL} AND workflow = ?"
#: Text is read as bytes: a status or a name that is no UTF-8 belongs to one damaged run, and must not stop the claim of
#: others. The bytes are bound as text again, to be compared with what is stored.
_STATUS = "CAST(status AS BLOB)"
_SINCE = "CAST(updated_at AS REAL)"
_RUN = RAW.format("run")
_TEXT, _BYTES = "CAST(? AS TEXT)", "?"


class Found(NamedTuple):
    """A run that may be claimed, in the order of claiming."""

    rank: tuple[int, float]
    run: str | bytes  # bytes for an id that no text is
    status: str
    updated_at: float
    owner: str | None = None
    gate: str | None = None  # the limited queue whose place the run takes
    service: str | None = None  # the service from which the run is claimed


class Section(NamedTuple):
    """The free runs of one workflow and queue that a request serves: a condition, its values, and the first time."""

    where: str
    values: tuple[Any, ...]
    first: Any


def by_name(cursor: Cursor, request: ClaimRequest, alive: set[str], limited: Container[str]) -> list[Found]:
    """The run that a person's command names, if it may be claimed so."""
    found = cursor.execute(
        f"SELECT status, {_SINCE}, worker, queue FROM keepstep_head WHERE run = ?", (request.run,)
    ).fetchall()
    return [
        Found((0, 0.0), request.run or "", status, updated_at, owner, queue if queue in limited else None)
        for status, updated_at, owner, queue in found
        if owner not in alive and status in _STATUSES and claims.may_name(Status(status), request.statuses)
    ]


def orphans(cursor: Cursor, request: ClaimRequest, alive: set[str], limited: Collection[str] = ()) -> list[Found]:
    """Runs whose owner is dead, except those of `limited` queues. Only those to take count against the limit."""
    found: list[Found] = []
    # An owner without a name is none that lives, and has only damage to thank for its lease.
    stored, beyond, place = b"", ">=", _TEXT
    while True:
        # One step of the index per owner, however many runs each has.
        next_owner = cursor.execute(
            f"SELECT {RAW.format('worker')}, typeof(worker) = 'text' FROM keepstep_head"
            f" WHERE worker {beyond} {place} ORDER BY worker LIMIT 1",
            (stored,),
        ).fetchall()
        if not next_owner:
            return found
        (stored, is_text), beyond = next_owner[0], ">"
        place = _TEXT if is_text else _BYTES
        owner = text_or_bytes(stored) if is_text else stored
        if owner in alive:
            continue
        for which, values in _served(request, limited):
            room = request.limit - len(found)
            if room <= 0:
                return found
            runs = cursor.execute(
                f"SELECT {_RUN}, {_STATUS}, {_SINCE} FROM keepstep_head"
                f" WHERE worker = {place} AND workflow = ?{which} ORDER BY queue, run LIMIT ?",
                (stored, *values, room),
            ).fetchall()
            found += [Found((0, 0.0), text_or_bytes(run), _status(status), at, str(owner)) for run, status, at in runs]


def _served(request: ClaimRequest, limited: Collection[str] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What a request serves, in order, as conditions that follow one on the workflow, each with its values."""
    for workflow in sorted(request.workflows):
        version = request.versions.get(workflow)
        pin, values = ("", ()) if version is None else (" AND version = ?", (version,))
        if request.queues is not None:
            for queue in sorted(request.queues.difference(limited)):
                yield f" AND queue = ?{pin}", (workflow, queue, *values)
        elif limited:
            others = ", ".join("?" * len(limited))
            yield f"{pin} AND queue NOT IN ({others})", (workflow, *values, *limited)
        else:
            yield pin, (workflow, *values)


def sections(cursor: Cursor, request: ClaimRequest) -> Iterator[tuple[str, Section]]:
    """Where a request looks for free runs: the queue, and its section with the time of the first one there."""
    for which, values in _served(request):
        if request.queues is not None:
            yield values[1], _section(cursor, f"{_FREE}{which}", values)
            continue
        workflow, *version = values
        for place, queue, first in _queues(cursor, workflow):
            where = f"{_FREE} AND queue = {place}{which}"
            name = text_or_bytes(queue)
            if version:
                yield name, _section(cursor, where, (workflow, queue, *version))
            else:
                yield name, Section(where, (workflow, queue), first)


def _section(cursor: Cursor, where: str, values: tuple[Any, ...]) -> Section:
    ((first,),) = cursor.execute(f"SELECT min(due_at) {where}", values).fetchall()
    return Section(where, values, first)


def _queues(cursor: Cursor, workflow: str) -> Iterator[tuple[str, bytes, Any]]:
    """The queues in which a workflow has free runs, each with the first time there, one step of the index each."""
    queue, beyond, place = b"", ">=", _TEXT
    while True:
        found = cursor.execute(
            f"SELECT {RAW.format('queue')}, typeof(queue) = 'text', due_at {_FREE} AND queue {beyond} {place}"
            " ORDER BY queue, due_at LIMIT 1",
            (workflow, queue),
        ).fetchall()
        if not found:
            return
        (queue, is_text, first), beyond = found[0], ">"
        place = _TEXT if is_text else _BYTES
        yield place, queue, first


def has_due(cursor: Cursor, section: Section, now: float) -> bool:
    """Whether a run of a section can be claimed."""
    if not _is_due(section, now):
        return False
    one = f"SELECT 1 {section.where} AND due_at <= ? AND +priority < '' ORDER BY due_at LIMIT 1"
    return bool(cursor.execute(one, (*section.values, now)).fetchall())


def _is_due(section: Section, now: float) -> bool:
    return isinstance(section.first, float) and section.first <= now


def due_runs(cursor: Cursor, section: Section, limit: int, now: float) -> list[Found]:
    """Free runs of one section whose time has come, the highest priority first."""
    if not _is_due(section, now):
        return []
    # Numbers come before any text; a priority that is text is damage, and its run is not claimed. The plus sign makes
    # SQLite use the index by time.
    which = f"{section.where} AND due_at <= ?"
    asked = (*section.values, now)
    select = f"SELECT priority, due_at, {_RUN}, {_STATUS}, {_SINCE} {which}"
    by_time = f"{select} AND +priority < ? ORDER BY due_at LIMIT {FEW}"
    are_many = f"SELECT 1 {which} ORDER BY due_at LIMIT 1 OFFSET {FEW - 1}"
    if not cursor.execute(are_many, asked).fetchall():
        return in_order(_found(*row) for row in cursor.execute(by_time, (*asked, "")))[: max(limit, 0)]
    found: list[Found] = []
    level: Any = ""
    for _ in range(LEVELS):
        room = limit - len(found)
        level = _next_level(cursor, section, level) if room > 0 else None
        if level is None:
            return found
        rows = cursor.execute(f"{select} AND priority = ? ORDER BY due_at, run LIMIT ?", (*asked, level, room))
        found += [_found(*row) for row in rows]
    oldest = in_order(_found(*row) for row in cursor.execute(by_time, (*asked, level)))
    return found + oldest[: max(limit - len(found), 0)]


def _next_level(cursor: Cursor, section: Section, above: Any) -> Any:
    """The highest priority below another among the runs of a section, by one index step."""
    select = f"SELECT max(priority) {section.where} AND priority < ?"
    return cursor.execute(select, (*section.values, above)).fetchall()[0][0]


def in_order(found: Iterable[Found]) -> list[Found]:
    """Runs in the order of claiming; among equals by id, byte by byte."""
    return sorted(found, key=lambda one: (one.rank, one.run if isinstance(one.run, bytes) else one.run.encode()))


def _found(priority: Any, due_at: Any, run: bytes, status: bytes, since: float) -> Found:
    # A row that cannot be read comes first, and is then set aside.
    is_sound = isinstance(priority, int) and isinstance(due_at, float)
    rank = claims.due_rank(priority, due_at, "")[:2] if is_sound else (-(2**63), 0.0)
    return Found(rank, text_or_bytes(run), _status(status), since)


def next_times(cursor: Cursor, section: Section, now: float) -> list[float]:
    """When the next run of a section is due, by one index step; empty if none is."""
    at = section.first
    if _is_due(section, now):
        select = f"SELECT min(due_at) {section.where} AND due_at > ? AND due_at < ''"
        at = cursor.execute(select, (*section.values, now)).fetchall()[0][0]
    return [at] if isinstance(at, float) and at <= _LAST_INSTANT else []


def _status(said: bytes) -> str:
    return said.decode("utf-8", "replace")
