"""Emits events to observers: records once they are durable, and events without a record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import KeepstepError
from ..executors.thread import forget, in_own_thread
from ..kernel.replay import unsealed
from ..model import FINISHED, Event, Kind, RunPage, RunQuery
from ..model.checkpoint import ENDS_STEP, IS_MOVE, PASSES_STEP
from ..model.event import EventName, event_of_record, problem_with
from ..model.trace import trace_id
from ..observers import Observers
from ..observers.log import LogObserver
from ..ports import Traced, Tracer, instant
from ..records.facts import changes_generation, end_event, facts_of, life_of, records_again
from ..records.record import unseal_some

if TYPE_CHECKING:
    from ..kernel.driver import RunDriver
    from ..model import Run, Status
    from ..records.record import Record
    from .process import Process


log = logging.getLogger("keepstep")

#: Kinds of records that say where a graph goes on.
TAKES_EDGE = PASSES_STEP | {Kind.DECISION.value}
#: Seconds before the newest record of a dead worker within which its records are repeated to the tracer: far longer
#: than an exporter keeps spans in memory.
REPEATED_SECONDS = 120.0
#: Records of a dead worker that are repeated at most, so that taking over a fast run stays cheap.
MOST_REPEATED = 5000
#: Runs that have just ended among which those of a dead worker are looked for.
MOST_ENDED = 500
#: Seconds for which the engine waits at its close until tracers have exported what they hold.
FLUSH_SECONDS = 5.0


class Events:
    """Emits events to the observers of an engine; texts are redacted first."""

    #: Whether to refuse an event that `model.event` does not list. Tests set it; in production an event must not stop a
    #: run.
    checked: ClassVar[bool] = False

    def __init__(self, engine: Process, observers: Observers) -> None:
        self._engine = engine
        self._observers = observers
        #: The observers of every event; tracers are given records instead.
        self._plain = Observers(one for one in observers if not isinstance(one, Tracer))
        self.observed = bool(observers)
        #: The receiver of commits; None if no observer learns of them.
        self.saves = observers if observers.sees_saves else None
        #: Whether an observer logs every event, so that failed attempts need no log line of their own.
        self.logged = any(isinstance(observer, LogObserver) for observer in observers)
        self._tracers = [observer for observer in observers if isinstance(observer, Tracer)]
        #: Gives code its trace context. All tracers give the same one.
        self.tracer = self._tracers[0] if self._tracers else None
        #: Dead workers whose runs were repeated to the tracers; None stands for those before this process.
        self._repeated: set[str | None] = set()

    def observe(self, name: EventName, context: RunDriver, *, step: str = "", attempt: int = 0, **data: Any) -> None:
        """Emit an event about a run that has no record."""
        if self._plain or (self._tracers and name != "step.started"):
            at = instant(self._engine.clock.now())
            redact = self._engine.redaction.redact
            data = {key: redact(value) if isinstance(value, str) else value for key, value in data.items()}
            names = context.names_of(step) or (None, None)
            workflow, rest = context.run.workflow, (*names, context.traced.trace, context.generation)
            self.emit(Event(name, context.id, at, workflow, context.seq, step, attempt, context.worker, data, 0, *rest))

    def ended(self, context: RunDriver, status: Status, record: Record) -> None:
        """Emit the end of a run, whose record is durable."""
        if self.observed:
            place = (context.traced.trace, context.generation)
            self.emit(end_event(context.run, status, record, place, context.names_of("") or (None, None)))

    def emit_record(self, context: RunDriver, record: Record) -> None:
        """Emit the event of a durable record; the run's start and end have events of their own."""
        kind = record.kind
        if kind in IS_MOVE:
            return
        if self._tracers and kind in ENDS_STEP:
            for tracer in self._tracers:
                _guarded(tracer.recorded, context.traced, record)
        if not self._plain:
            return
        at = record.finished_at or instant(self._engine.clock.now())
        name = event_of_record(record.kind, record.data)
        workflow, step = context.run.workflow, record.step
        worker, rest = record.worker, (record.agent, record.stage, context.traced.trace, context.generation)
        data, life = facts_of(record), life_of(record)
        event = Event(name, context.id, at, workflow, record.seq, step, record.attempt, worker, data, life, *rest)
        self.emit(event, self._plain)
        if record.kind in TAKES_EDGE and record.data is not None and (target := record.data.get("next")) is not None:
            edge = {"next": target}
            step = step.removesuffix(".next")  # a choice that was made after the step
            taken = Event("edge.taken", context.id, at, workflow, record.seq, step, 0, worker, edge, 0, *rest)
            self.emit(taken, self._plain)

    def emit(self, event: Event, to: Observers | None = None) -> None:
        """Emit an event to all observers, or to some."""
        if self.checked and (problem := problem_with(event)):
            raise LookupError(f"{problem}; list it in keepstep.model.event")
        (self._observers if to is None else to).observe(event)

    # -- tracers ------------------------------------------------------------------------------------------------------

    def repeat(self, context: RunDriver) -> None:
        """Give the tracers what a dead worker may not have exported: of this run, and of those that it has ended."""
        if self._tracers:
            self._engine.background(self._repeat(context.run, context.generation))
            if context.claim.taken_from not in self._repeated:
                self.repeat_ended(context.claim.taken_from)

    def repeat_ended(self, worker: str | None = None) -> None:
        """Give the tracers the newest runs that a worker had ended before it died; without a name, those of all."""
        if self._tracers:
            self._repeated.add(worker)
            self._engine.background(self._repeat_ended(worker))

    async def _repeat_ended(self, worker: str | None) -> None:
        engine = self._engine
        try:
            if worker is None:
                known = await engine.call(partial(engine.store.list_workers, gone=True))
                dead = {one.id for one in known if not one.alive}
            else:
                dead = {worker}
            since = instant(engine.clock.now() - REPEATED_SECONDS)
            query = RunQuery(status=FINISHED, updated_after=since, limit=MOST_ENDED)
            page = await engine.call(engine.store.list_runs, query) if dead else RunPage()
            for run in page.runs:
                rows = await engine.read(
                    engine.store.list_checkpoints, run.id, 0, MOST_REPEATED, (Kind.SUPERSEDED.value,)
                )
                count = sum(changes_generation(record) for record, _ in unseal_some(rows, run.id))
                await self._repeat(run, count, dead)
        except KeepstepError as error:
            log.warning("traces may lack runs that a dead worker had just ended: %s", error)

    async def _repeat(self, run: Run, generation: int, ended_by: Collection[str] = ()) -> None:
        after = max(0, run.seq - MOST_REPEATED)
        found: list[Record] = []
        try:
            while after < run.seq and (rows := await self._engine.records(run.id, after)):
                async for record, _ in unsealed(self._engine, rows, run.id, after):
                    after = record.seq
                    if after <= run.seq:
                        found.append(record)
        except KeepstepError as error:
            log.warning("the trace of run %s lacks what its worker did before it died: %s", run.id, error)
        if not found or (ended_by and found[-1].worker not in ended_by):
            return
        generation -= sum(one.kind == Kind.SUPERSEDED and changes_generation(one) for one in found)
        newest = max(one.finished_at for one in found if one.finished_at is not None)
        traced = Traced(trace_id(run.id, run.created_at), run.id, run.workflow)
        for count, one, end in records_again(run, found, generation):
            traced.generation = count
            if one.finished_at is not None and (newest - one.finished_at).total_seconds() <= REPEATED_SECONDS:
                for tracer in self._tracers:
                    _guarded(tracer.repeat, traced, one, end)

    def read_from(self, read: Callable[[], Any]) -> None:
        """Let the tracers read counters and gauges of the engine."""
        for tracer in self._tracers:
            _guarded(tracer.read_from, read)

    async def flush(self) -> None:
        """Let the tracers export what they hold, for a bounded time."""
        flushed = [
            asyncio.wrap_future(in_own_thread(copy_context(), partial(_guarded, tracer.flush)))
            for tracer in self._tracers
        ]
        for one in flushed:
            one.add_done_callback(forget)
        if flushed:
            await asyncio.wait(flushed, timeout=FLUSH_SECONDS)


def _guarded(function: Callable[..., Any], *args: Any) -> None:
    """Call a function of a tracer, whose errors affect nothing else. Each function that fails is logged once."""
    try:
        function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException:
        name = getattr(function, "__qualname__", repr(function))
        if name not in _FAILED:
            _FAILED.add(name)
            log.exception("%s failed; later failures of it are not reported", name)


#: Functions of tracers of which the log has said that they fail.
_FAILED: set[str] = set()
