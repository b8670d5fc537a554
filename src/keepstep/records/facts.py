"""The facts that the events of a record and of a run's end tell, the same for observers, watchers and exporters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from ..model import Checkpoint, ErrorInfo, Event, Kind, Run, Status
from ..model.checkpoint import ENDS_STEP
from ..model.event import STATUS_EVENTS
from ..model.series import SERIES
from ..model.trace import trace_id
from .record import Record, StoredError

#: Keys of a record's data that its event tells.
IN_EVENTS = ("spent", "call", "first_at")


def facts_of(record: Record | Checkpoint) -> dict[str, Any]:
    """Return the data of the event that reports a record, without the value."""
    facts: dict[str, Any] = {"outcome": str(record.outcome)}
    error = record.error
    if error is not None:
        _tell_error(facts, error)
    if record.retry_at is not None:
        facts["retry_at"] = record.retry_at.isoformat()
    if record.started_at is not None and record.finished_at is not None and record.kind in ENDS_STEP:
        facts["seconds"] = (record.finished_at - record.started_at).total_seconds()
    if record.data:
        data = _data(record)
        for key in IN_EVENTS:
            if key in data:
                facts[key] = data[key]
    return facts


def facts_of_end(run: Run, record: Record | Checkpoint) -> dict[str, Any]:
    """Return the data of the event that reports the end of a run."""
    found = {
        "created_by": run.created_by,
        "version": run.version,
        "parent": run.parent,
        "origin": run.origin,
        "series": run.tags.get(SERIES),
        "traceparent": run.traceparent,
        "continued_as": _data(record).get("continued_as"),
    }
    facts: dict[str, Any] = {name: value for name, value in found.items() if value}
    if record.finished_at is not None:
        facts["seconds"] = (record.finished_at - run.created_at).total_seconds()
    if record.error is not None:
        _tell_error(facts, record.error)
    return facts


def _tell_error(facts: dict[str, Any], error: StoredError | ErrorInfo) -> None:
    facts["error"] = f"{error.type}: {error.message}"
    facts["error_class"] = error.error_class
    if error.traceback:
        facts["traceback"] = error.traceback


def end_event(
    run: Run,
    status: Status,
    record: Record | Checkpoint,
    place: tuple[str, int],
    names: tuple[str | None, str | None] = (None, None),
) -> Event:
    """Return the event of the end of a run, whose record this is. `place` is its trace and generation."""
    at, who = record.finished_at or run.created_at, (run.workflow, record.seq, "", 0, record.worker)
    return Event(STATUS_EVENTS[status], run.id, at, *who, facts_of_end(run, record), 0, *names, *place)


def records_again(
    run: Run, records: Iterable[Record | Checkpoint], generation: int = 0
) -> Iterator[tuple[int, Record | Checkpoint, Event | None]]:
    """Yield consecutive records of a run with their generation and, for the one that ended it, the event of the end.

    `generation` is the number of retries and rewinds before the first of them.
    """
    trace = trace_id(run.id, run.created_at)
    for one in records:
        if one.kind == Kind.SUPERSEDED:
            generation += changes_generation(one)
        ended = one.kind == Kind.RUN_FINISHED and one.seq == run.seq
        yield generation, one, end_event(run, run.status, one, (trace, generation)) if ended else None


def changes_generation(record: Record | Checkpoint) -> bool:
    """Whether a `superseded` record begins another generation; a migration changes no outcome."""
    return _data(record).get("act") != "migrate"


def life_of(record: Record | Checkpoint) -> int:
    """Return the life of the body whose tokens a record holds; 0 for other records."""
    return _data(record).get("epoch", 0) if record.kind == Kind.EMITTED else 0


def _data(record: Record | Checkpoint) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", record.data or {})
