"""How a claim finds its runs in a SQLite store: a few steps of an index each, however many runs there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..model import Status
from ..ports import ClaimRequest
from . import rules
from .sqlite_connection import Cursor
from .sqlite_rows import RAW, text_or_bytes

#: Number of due runs below which a claim reads all of a workflow by time and sorts them by priority. It reads a longer
#: queue by priority.
FEW = 100
#: Maximum number of priorities of a longer queue that a claim looks up, one index step each. Bounds its cost where the
#: highest priorities belong to runs that are not due.
LEVELS = 64

#: A time after this one is damage: it lies in the year 8941.
_LAST_INSTANT = 2.2e11

_STATUSES = frozenset(status.value for status in Status)

_FREE = "worker IS NULL AND due_at IS NOT NULL"
#: Read as bytes: a status that is no UTF-8 belongs to one damaged run, and must not stop the claim of others.
_STATUS = "CAST(status AS BLOB)"
_SINCE = "CAST(updated_at AS REAL)"
_RUN = RAW.format("run")


class Found(NamedTuple):
    """A run that may be claimed, in the order of claiming."""

    rank: tuple[int, float]
    run: str | bytes  # bytes for an id that no text is
    status: str
    updated_at: float
    owner: str | None = None


def by_name(cursor: Cursor, request: ClaimRequest, alive: set[str]) -> list[Found]:
    """The run that a person's command names, if it may be claimed so."""
    found = cursor.execute(
        f"SELECT status, {_SINCE}, worker FROM keepstep_head WHERE run = ?", (request.run,)
    ).fetchall()
    return [
        Found((0, 0.0), request.run or "", status, updated_at, owner)
        for status, updated_at, owner in found
        if owner not in alive and status in _STATUSES and rules.claimable_by_name(Status(status), request.statuses)
    ]


def orphans(cursor: Cursor, request: ClaimRequest, alive: set[str]) -> list[Found]:
    """Runs whose owner is dead. Only those that the request can take count against its limit."""
    found: list[Found] = []
    # An owner without a name is none that lives, and has only damage to thank for its lease.
    stored, beyond, place = b"", ">=", "CAST(? AS TEXT)"
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
        place = "CAST(? AS TEXT)" if is_text else "?"
        owner = text_or_bytes(stored) if is_text else stored
        if owner in alive:
            continue
        for workflow in sorted(request.workflows):
            room = request.limit - len(found)
            if room <= 0:
                return found
            pin, values = _pinned(request, workflow)
            runs = cursor.execute(
                f"SELECT {_RUN}, {_STATUS}, {_SINCE} FROM keepstep_head"
                f" WHERE worker = {place} AND workflow = ?{pin} ORDER BY run LIMIT ?",
                (stored, workflow, *values, room),
            ).fetchall()
            found += [Found((0, 0.0), text_or_bytes(run), _status(status), at, str(owner)) for run, status, at in runs]


def due_runs(cursor: Cursor, request: ClaimRequest, workflow: str, now: float) -> list[Found]:
    """Free runs of one workflow whose time has come, the highest priority first."""
    pin, values = _pinned(request, workflow)
    # Numbers come before any text; a priority that is text is damage, and its run is not claimed. The plus sign makes
    # SQLite use the index by time.
    which = f"FROM keepstep_head WHERE {_FREE} AND workflow = ?{pin} AND due_at <= ?"
    select = f"SELECT priority, due_at, {_RUN}, {_STATUS}, {_SINCE} {which}"
    by_time = f"{select} AND +priority < ? ORDER BY due_at LIMIT {FEW}"
    asked = (workflow, *values, now)
    if not _are_due(cursor, which, asked, 1):
        return []
    if not _are_due(cursor, which, asked, FEW):
        return in_order(_found(*row) for row in cursor.execute(by_time, (*asked, "")))[: max(request.limit, 0)]
    found: list[Found] = []
    level: Any = ""
    for _ in range(LEVELS):
        room = request.limit - len(found)
        level = _next_level(cursor, workflow, level) if room > 0 else None
        if level is None:
            return found
        rows = cursor.execute(f"{select} AND priority = ? ORDER BY due_at, run LIMIT ?", (*asked, level, room))
        found += [_found(*row) for row in rows]
    oldest = in_order(_found(*row) for row in cursor.execute(by_time, (*asked, level)))
    return found + oldest[: max(request.limit - len(found), 0)]


def _are_due(cursor: Cursor, which: str, asked: tuple[Any, ...], count: int) -> bool:
    """Whether so many runs are due, or more."""
    return bool(cursor.execute(f"SELECT 1 {which} ORDER BY due_at LIMIT 1 OFFSET {count - 1}", asked).fetchall())


def _next_level(cursor: Cursor, workflow: str, above: Any) -> Any:
    """The highest priority below another among the free runs of a workflow, by one index step."""
    select = f"SELECT max(priority) FROM keepstep_head WHERE {_FREE} AND workflow = ? AND priority < ?"
    return cursor.execute(select, (workflow, above)).fetchall()[0][0]


def in_order(found: Iterable[Found]) -> list[Found]:
    """Runs in the order of claiming; among equals by id, byte by byte."""
    return sorted(found, key=lambda one: (one.rank, one.run if isinstance(one.run, bytes) else one.run.encode()))


def _found(priority: Any, due_at: Any, run: bytes, status: bytes, since: float) -> Found:
    return Found(_rank(priority, due_at), text_or_bytes(run), _status(status), since)


def _rank(priority: Any, due_at: Any) -> tuple[int, float]:
    """The place in the order of claiming; a row that cannot be read comes first, and is then set aside."""
    return (-priority, due_at) if isinstance(priority, int) and isinstance(due_at, float) else (-(2**63), 0.0)


def later_times(cursor: Cursor, request: ClaimRequest, workflow: str, now: float) -> list[float]:
    """When the next run of one workflow is due, by one index step; empty if none is."""
    pin, values = _pinned(request, workflow)
    select = f"SELECT min(due_at) FROM keepstep_head WHERE {_FREE} AND workflow = ?{pin} AND due_at > ? AND due_at < ''"
    at = cursor.execute(select, (workflow, *values, now)).fetchall()[0][0]
    return [at] if isinstance(at, float) and at <= _LAST_INSTANT else []


def _status(said: bytes) -> str:
    return said.decode("utf-8", "replace")


def _pinned(request: ClaimRequest, workflow: str) -> tuple[str, tuple[str, ...]]:
    version = request.versions.get(workflow)
    return ("", ()) if version is None else (" AND version = ?", (version,))
