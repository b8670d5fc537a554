"""How a claim finds its runs in a SQLite store: a few steps of an index each, however many runs there are."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..model import Status
from ..ports import ClaimRequest
from . import rules
from .sqlite_connection import Cursor
from .sqlite_rows import RAW, text_or_bytes

#: How many priorities of one workflow are looked up one by one before the rest is read in order.
_LEVELS = 8

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
    found: list[Found] = []
    pin, values = _pinned(request, workflow)
    which = f"{_FREE} AND workflow = ?{pin} AND due_at <= ?"
    select = f"SELECT priority, due_at, {_RUN}, {_STATUS}, {_SINCE} FROM keepstep_head WHERE {which}"
    levels = _levels(cursor, workflow)
    for level in levels:
        room = request.limit - len(found)
        if room <= 0:
            break
        rows = cursor.execute(
            f"{select} AND priority = ? ORDER BY due_at, run LIMIT ?", (workflow, *values, now, level, room)
        )
        found += [_found(*row) for row in rows]
    room = request.limit - len(found)
    if len(levels) == _LEVELS and room > 0:
        rows = cursor.execute(
            f"{select} AND priority < ? ORDER BY priority DESC, due_at, run LIMIT ?",
            (workflow, *values, now, levels[-1], room),
        )
        found += [_found(*row) for row in rows]
    return found


def _found(priority: Any, due_at: Any, run: bytes, status: bytes, since: float) -> Found:
    return Found(_rank(priority, due_at), text_or_bytes(run), _status(status), since)


def _rank(priority: Any, due_at: Any) -> tuple[int, float]:
    """The place in the order of claiming; a row that cannot be read comes first, and is then set aside."""
    return (-priority, due_at) if isinstance(priority, int) and isinstance(due_at, float) else (-(2**63), 0.0)


def later_times(cursor: Cursor, request: ClaimRequest, workflow: str, now: float) -> list[float]:
    """When the next runs of one workflow are due."""
    pin, values = _pinned(request, workflow)
    select = f"SELECT min(due_at) FROM keepstep_head WHERE {_FREE} AND workflow = ?{pin} AND due_at > ? AND due_at < ''"
    levels = _levels(cursor, workflow)
    found = [
        cursor.execute(f"{select} AND priority = ?", (workflow, *values, now, level)).fetchall()[0][0]
        for level in levels
    ]
    if len(levels) == _LEVELS:
        rows = cursor.execute(f"{select} AND priority < ?", (workflow, *values, now, levels[-1])).fetchall()
        found.append(rows[0][0])
    return [at for at in found if isinstance(at, float) and at <= _LAST_INSTANT]


def _status(said: bytes) -> str:
    return said.decode("utf-8", "replace")


def _levels(cursor: Cursor, workflow: str) -> list[int]:
    """The highest priorities among the free runs of a workflow, one index step each."""
    levels: list[int] = []
    select = f"SELECT max(priority) FROM keepstep_head WHERE {_FREE} AND workflow = ? AND priority < ?"
    while len(levels) < _LEVELS:
        # Numbers come before any text; a priority that is text is damage, and its run is not claimed.
        rows = cursor.execute(select, (workflow, levels[-1] if levels else ""))
        level = rows.fetchall()[0][0]
        if level is None:
            break
        levels.append(level)
    return levels


def _pinned(request: ClaimRequest, workflow: str) -> tuple[str, tuple[str, ...]]:
    version = request.versions.get(workflow)
    return ("", ()) if version is None else (" AND version = ?", (version,))
