"""An attempt whose body runs elsewhere: the task that crosses, and the effect of the messages of its body."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..executors.functions import function_of, why_not_found
from ..executors.task import (
    Called,
    Done,
    Emitted,
    Function,
    Logged,
    Published,
    Report,
    Reported,
    Saved,
    Spent,
    Task,
)
from ..model import State
from ..model.trace import traceparent
from ..model.tree import thaw
from ..values.large import LARGE_BYTES
from ..workflows.graph import Changes, Goto
from .naming import Names

if TYPE_CHECKING:
    from ..workflows.definition import Step

log = logging.getLogger("keepstep")


def why_not_sent(step: Step[..., Any]) -> str | None:
    """Return why a step's body cannot run in another process; None if it can."""
    if step.transactional:
        return "its body writes in the store's own transaction"
    if step.ignore:
        return f"its arguments {', '.join(sorted(step.ignore))} are ignored, so they are not encoded"
    return why_not_found(_function(step))


def _function(step: Step[..., Any]) -> Callable[..., Any]:
    """Return the function that crosses."""
    return step.fn if step.sends is None else step.sends.fn


def task_of(attempt: Any, *, pickled: bool = False) -> Task:
    """Return an attempt as it crosses."""
    call, run = attempt.call, attempt.run
    step, names = call.step, call.names
    if step.transactional or step.ignore:
        raise DefinitionError(f"step {step.name!r} cannot run in another process, because {why_not_sent(step)}")
    given, kwargs = (call.args, call.kwargs) if step.sends is None else step.sends.arguments(*call.args)
    states: list[int] = []
    args = [_crossing(one, place, states) for place, one in enumerate(given)]
    return Task(
        f"ks-{_name(attempt)}-{attempt.number}",
        _pickled(step) if pickled else function_of(_function(step), step.name),
        step.values.encode((args, kwargs), f"step {attempt.key!r}: input"),
        run.id,
        run.workflow.name,
        attempt.key,
        attempt.number,
        attempt.idempotency_key(),
        _time_left(attempt),
        run.saved_progress(attempt.key),
        None if names is None else names.agent,
        None if names is None else names.stage,
        _traceparent(attempt),
        tuple(states),
        run.workflow.carries_state,
        not attempt.only_adopts,
    )


def _name(attempt: Any) -> str:
    """Return a name of the step that no other store's run of the same id has."""
    return hashlib.sha256(f"{attempt.run.seed}\0{attempt.idempotency_key()}".encode()).hexdigest()[:40]


def _crossing(value: Any, place: int, states: list[int]) -> Any:
    if not isinstance(value, State):
        return value
    states.append(place)
    return {key: thaw(one) for key, one in value.items()}, *value.provenance


def _pickled(step: Step[..., Any]) -> Function:
    """Return the step's function as the cluster's own pickling writes it."""
    import cloudpickle  # noqa: PLC0415 - comes with the cluster's library

    fn = _function(step)
    return Function(fn.__module__, fn.__qualname__, "", cloudpickle.dumps(fn))


def _traceparent(attempt: Any) -> str | None:
    """Return the trace context that is current in the attempt's task, if a tracer has set one."""
    telemetry = sys.modules.get("opentelemetry.trace")
    if telemetry is None or attempt.run.host.tracer is None:
        return None
    current = telemetry.get_current_span().get_span_context()
    if not current.is_valid:
        return None
    return traceparent(f"{current.trace_id:032x}", f"{current.span_id:016x}", sampled=current.trace_flags.sampled)


class SentAttempt:
    """The attempt, for an executor whose bodies run elsewhere."""

    def __init__(self, attempt: Any) -> None:
        self._attempt = attempt
        self._host = attempt.run.host
        self.holds_lease = attempt.holds_lease
        self.may_begin = attempt.may_begin

    @property
    def is_marked(self) -> bool:
        """Whether the step happens at most once, so that a body which may have begun must not begin again."""
        return self._attempt.marked and self._attempt.call.step.leaves_doubt  # type: ignore[no-any-return]

    @property
    def is_left(self) -> bool:
        """Whether the run has left this worker, so that another one continues it."""
        return self._attempt.run.stop.detached  # type: ignore[no-any-return]

    def task(self, *, pickled: bool = False) -> Task:
        return task_of(self._attempt, pickled=pickled)

    def when_durable(self, then: Callable[[], None]) -> None:
        self._attempt.on_durable = then

    # -- time ----------------------------------------------------------------------------------------------------------

    def time_to_begin(self) -> float | None:
        """Return the seconds that are left of the step's whole time. The time of an attempt counts later."""
        limit: float | None = self._attempt.call.step.timeout.step_seconds
        return limit if limit is None else max(0.0, limit - _since_first(self._attempt))

    def begun(self, seconds_ago: float = 0.0) -> float | None:
        """Note that the body has begun, and return the seconds that it may still take."""
        attempt, host = self._attempt, self._host
        attempt.started_at = datetime.fromtimestamp(host.clock.now(), UTC) - timedelta(seconds=seconds_ago)
        if host.events.observed:
            host.events.observe("step.started", attempt.run, step=attempt.key, attempt=attempt.number)
        left = _time_left(attempt)
        return None if left is None else max(0.0, left - seconds_ago)

    # -- messages ------------------------------------------------------------------------------------------------------

    def take_report(self, message: Report) -> None:
        """Do what the body asks of its run. A message that cannot be obeyed is logged, and does not end the body."""
        try:
            self._obey(message)
        except Exception as error:  # noqa: BLE001 - such as a token with a secret
            text = "run %s: a message of the body of step %s is left out: %s"
            log.error(text, self._attempt.run.id, self._attempt.key, error)  # noqa: TRY400 - the traceback is ours

    def _obey(self, message: Report) -> None:
        attempt, redaction = self._attempt, self._host.redaction
        match message:
            case Emitted():
                attempt.emit_encoded(redaction.shown(message.data, attempt.key), self._names(message))
            case Saved():
                attempt.save_encoded(message.data)
            case Reported():
                attempt.report_progress(message.fraction, redaction.redact(message.text))
            case Spent():
                parts = message.input_tokens, message.output_tokens
                attempt.spend(message.cost, message.tokens, message.model, parts)
            case Published():
                attempt.publish(message.key, message.data, self._names(message))
            case Called():
                attempt.call_is(message.operation, **message.about)
            case Logged():
                self._log(message)

    def _names(self, message: Emitted | Published) -> Names | None:
        unnamed = message.agent is None and message.stage is None
        return self._attempt.call.names if unnamed else Names(message.agent, message.stage)

    def _log(self, message: Logged) -> None:
        """Log a message of the body as if it had been logged here."""
        logger, attempt = logging.getLogger(message.logger), self._attempt
        if not logger.isEnabledFor(message.level):
            return
        place = {"run_id": attempt.run.id, "step": attempt.key, "attempt": attempt.number}
        text = self._host.redaction.redact(message.text)
        record = logger.makeRecord(
            message.logger, message.level, message.file, message.line, text, (), None, message.function, place
        )
        logger.handle(record)

    async def read(self, done: Done) -> Any:
        """Return the result of the body."""
        attempt = self._attempt
        values, where = attempt.call.step.values, f"step {attempt.key!r}: result"
        is_large = len(done.data) > LARGE_BYTES
        value = (
            await self._host.off_loop(values.decode, done.data, where) if is_large else values.decode(done.data, where)
        )
        found, sends = self._formed(done.form, value), attempt.call.step.sends
        return found if sends is None else sends.result(found)

    def _formed(self, form: str, value: Any) -> Any:
        """Return a result as the body has returned it."""
        match form:
            case "":
                return value
            case "state":
                return State(value)
            case "goto":
                return Goto(*value)
            case "changes":
                state, stage, agent = value
                return Changes(state, stage=stage, agent=agent)
        raise DefinitionError(
            f"step {self._attempt.key!r}: its body has a newer Keepstep, whose result cannot be read here"
        )


def _since_first(attempt: Any) -> float:
    """Return the seconds since the first attempt of the step began."""
    first = attempt.first_at
    return 0.0 if first is None else attempt.run.host.clock.now() - first.timestamp()


def _time_left(attempt: Any) -> float | None:
    """Return the seconds that the body may take if it begins now."""
    left: float | None = attempt.call.step.timeout.remaining(_since_first(attempt))
    return left
