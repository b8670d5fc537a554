"""Telling observers: what was written, once it is durable, and what happens that no record holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..model import Event, Kind
from ..ports import instant
from .handle import event_name

if TYPE_CHECKING:
    from ..observers import Observers
    from ..stores.records import Record
    from .context import RunContext
    from .engine import Engine


class Teller:
    """Tells the observers of an engine, if it has any; texts lose their secrets on the way."""

    def __init__(self, engine: Engine, observers: Observers) -> None:
        self._engine = engine
        self._observers = observers
        self.observed = bool(observers)

    def observe(self, name: str, context: RunContext, *, step: str = "", attempt: int = 0, **data: Any) -> None:
        """Tell observers of something about a run that no record holds."""
        if self.observed:
            at = instant(self._engine.clock.now())
            redact = self._engine.censor.redact
            data = {key: redact(value) if isinstance(value, str) else value for key, value in data.items()}
            self.tell(
                Event(name, context.id, at, context.run.workflow, context.seq, step, attempt, context.worker, data)
            )

    def tell_record(self, context: RunContext, record: Record) -> None:
        """Tell observers of a record, now that it is durable; the run's start and end are told by their statuses."""
        if record.kind in (Kind.RUN_STARTED, Kind.RUN_FINISHED):
            return
        data: dict[str, Any] = {"outcome": record.outcome}
        if record.error is not None:
            data["error"] = f"{record.error.type}: {record.error.message}"
        if record.retry_at is not None:
            data["retry_at"] = record.retry_at.isoformat()
        at = record.finished_at or instant(self._engine.clock.now())
        name = event_name(record.kind)
        self.tell(
            Event(
                name, context.id, at, context.run.workflow, record.seq, record.step, record.attempt, record.worker, data
            )
        )

    def tell(self, event: Event) -> None:
        self._observers.observe(event)
