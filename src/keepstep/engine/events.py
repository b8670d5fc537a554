"""Emits events to observers: records once they are durable, and events without a record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..model import Event, Kind
from ..model.checkpoint import ENDS_STEP, IS_MOVE, PASSES_STEP
from ..model.event import EventName, event_of_record, problem_with
from ..observers.log import LogObserver
from ..ports import instant
from ..records.data import EmittedData, data_of

if TYPE_CHECKING:
    from ..kernel.driver import RunDriver
    from ..observers import Observers
    from ..records.record import Record
    from .process import Process


#: Kinds of records that say where a graph goes on.
TAKES_EDGE = PASSES_STEP | {Kind.DECISION.value}


class Events:
    """Emits events to the observers of an engine; texts are redacted first."""

    #: Whether to refuse an event that `model.event` does not list. Tests set it; in production an event must not stop a
    #: run.
    checked: ClassVar[bool] = False

    def __init__(self, engine: Process, observers: Observers) -> None:
        self._engine = engine
        self._observers = observers
        self.observed = bool(observers)
        #: Whether an observer logs every event, so that failed attempts need no log line of their own.
        self.logged = any(isinstance(observer, LogObserver) for observer in observers)

    def observe(self, name: EventName, context: RunDriver, *, step: str = "", attempt: int = 0, **data: Any) -> None:
        """Emit an event about a run that has no record."""
        if self.observed:
            at = instant(self._engine.clock.now())
            redact = self._engine.redaction.redact
            data = {key: redact(value) if isinstance(value, str) else value for key, value in data.items()}
            names = context.names_of(step) or (None, None)
            workflow = context.run.workflow
            self.emit(
                Event(name, context.id, at, workflow, context.seq, step, attempt, context.worker, data, 0, *names)
            )

    def emit_record(self, context: RunDriver, record: Record) -> None:
        """Emit the event of a durable record; the run's start and end have events of their own."""
        if record.kind in IS_MOVE:
            return
        data: dict[str, Any] = {"outcome": record.outcome}
        if record.error is not None:
            data["error"] = f"{record.error.type}: {record.error.message}"
        if record.retry_at is not None:
            data["retry_at"] = record.retry_at.isoformat()
        if record.started_at is not None and record.finished_at is not None and record.kind in ENDS_STEP:
            data["seconds"] = (record.finished_at - record.started_at).total_seconds()
        at = record.finished_at or instant(self._engine.clock.now())
        name = event_of_record(record.kind, record.data)
        workflow, step = context.run.workflow, record.step
        life = data_of(record, EmittedData).get("epoch", 0) if record.kind == Kind.EMITTED else 0
        worker, names = record.worker, (record.agent, record.stage)
        self.emit(Event(name, context.id, at, workflow, record.seq, step, record.attempt, worker, data, life, *names))
        if record.kind in TAKES_EDGE and record.data is not None and (target := record.data.get("next")) is not None:
            edge = {"next": target}
            step = step.removesuffix(".next")  # a choice that was made after the step
            self.emit(Event("edge.taken", context.id, at, workflow, record.seq, step, 0, worker, edge, 0, *names))

    def emit(self, event: Event) -> None:
        """Emit an event to all observers."""
        if self.checked and (problem := problem_with(event)):
            raise LookupError(f"{problem}; list it in keepstep.model.event")
        self._observers.observe(event)
