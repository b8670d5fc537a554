"""One attempt of a step: the value that passes through the pipe of `step.py`, and the scope in which its body runs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from ..executors.thread import plainly
from ..model import Kind
from ..ports import Gate
from ..records.data import Data, EmittedData, PublishedData, StepData, data_of, new_data
from ..records.facts import IN_EVENTS
from ..records.record import Record
from ..values import VALUES
from ..workflows.call import PlainCall
from ..workflows.hooks import Hooks
from .naming import Names, names_in_body
from .saved import check_size

if TYPE_CHECKING:
    from ..executors.task import FarWork
    from ..workflows.definition import Step

#: Shortest time in seconds between two records of a body's tokens. Tokens in between share the next record.
EMIT_SECONDS = 0.01


log = logging.getLogger("keepstep")

#: Pairs of steps of which the log has said that one calls the other.
_NESTED: set[tuple[str, str]] = set()


def _warn_of_nested(outer: str, inner: Step[..., Any]) -> None:
    """Log once that a step calls another one, which then leaves no record and passes no gate."""
    if (outer, inner.name) not in _NESTED:
        _NESTED.add((outer, inner.name))
        limited = "" if inner.service is None else f", and the limits of service {inner.service!r} do not hold for it"
        log.warning(
            "step %r calls step %r in its body, where that runs as a plain function: nothing of it is recorded or "
            "retried%s. Call it in the workflow, or call %s.fn, if that is meant",
            *(outer, inner.name, limited, inner.name),
        )


class Attempt(msgspec.Struct, eq=False):
    """One attempt of a step. A step that is called inside its body runs as a plain function."""

    in_step: ClassVar[bool] = True

    #: The call of the step, and the run that made it (`StepCall`, `RunDriver`).
    call: Any
    run: Any
    key: str
    hooks: tuple[Hooks, ...] = ()
    gates: tuple[Gate, ...] = ()
    number: int = 1
    #: Whether the start mark of an at-most-once step is recorded.
    marked: bool = False
    #: Start of the body, unless it has ended and another attempt may follow, and of the first attempt's body.
    started_at: datetime | None = None
    first_at: datetime | None = None
    #: Further data for the record of the outcome: recorded arguments, `call`, and `first_at` of a later attempt.
    more: Data | None = None
    #: Tokens that are not in a record yet, each with the agent and the stage that are named for it.
    emitted: list[tuple[Names | None, msgspec.Raw]] = []  # msgspec makes a new list for each attempt
    #: Time of the loop from which on tokens are appended at once.
    emits_at: float = 0.0
    #: The epoch of the lease under which the body emitted its first tokens.
    life: int = 0
    #: The place at the step's service that the attempt holds.
    place: Any = None
    #: Time of the loop since which the attempt has waited for a place.
    queued_at: float | None = None
    #: How the body failed, and what of it still runs in a thread; read by gates when they are left.
    failure: BaseException | None = None
    late: asyncio.Future[Any] | None = None
    #: Whether a body that has begun before may only be awaited, because it may not begin again.
    only_adopts: bool = False
    #: Called when the outcome is durable, for an executor that keeps it until then.
    on_durable: Callable[[], None] | None = None

    def call_step(self, step: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlainCall[Any]:
        _warn_of_nested(self.call.step.name, step)
        return PlainCall(step.body, args, kwargs)

    def idempotency_key(self) -> str:
        """Return the key of this step for outside services."""
        return idempotency_key(self.run.id, self.call.effect or self.key, self.run.generation)

    def add(self, data: Data | None) -> None:
        """Put further data into the record of the outcome."""
        if data is not None:
            self.more = {**(self.more or {}), **data}

    def attach(self, record: Record) -> None:
        """Put the further data into the record of the outcome."""
        if self.more is not None:
            record.data = {**data_of(record, Data), **self.more}

    def attach_for_events(self, record: Record) -> None:
        """Put the data that events have into a record that is not the outcome of the step."""
        found = {key: value for key, value in (self.more or {}).items() if key in IN_EVENTS}
        if found:
            record.data = {**data_of(record, Data), **cast("Data", found)}

    def publish(self, key: str, data: bytes, given: Names | None = None) -> None:
        """Append a value of the run that is shown to readers. Any thread may call this."""
        run = self.run
        run.host.redaction.check(data, key, "published")
        run.was_published(key, data)
        record = Record(
            run.id, Kind.PUBLISHED.value, step=self.key, worker=run.worker, data=new_data(PublishedData, key=key)
        )
        record.value = msgspec.Raw(data)
        if (names := given or names_in_body(self.call)) is not None:
            names.put_on(record)

        def append() -> None:
            record.finished_at = run.time()
            run.append(record)

        run.loop.call_soon_threadsafe(append)

    def report_progress(self, fraction: float, message: str) -> None:
        """Show readers how far the body is."""
        self.run.report_progress({"fraction": fraction, "message": message, "step": self.key})

    def spend(self, cost: float, tokens: int, model: str | None, parts: tuple[int, int]) -> None:
        """Note what the body has used, for the record of the attempt."""
        self.run.spent.report(self.key, cost, tokens, model, parts)

    def call_is(self, operation: str, **more: str) -> None:
        """Note what an agent's framework calls in the body, for the record of the outcome."""
        self.add(new_data(StepData, call={"operation": operation, **more}))

    def begun_before(self) -> None:
        """Note in the records of later attempts when the first one began, so that each tells how long all took."""
        if self.first_at is not None:
            self.add(new_data(StepData, first_at=self.first_at.isoformat()))

    # -- for executors ------------------------------------------------------------------------------------------------

    def call_body(self) -> Any:
        """Call the step's function; `StopIteration` becomes a RuntimeError, because no future can hold it."""
        call = self.call
        return plainly(call.step.body, *call.args, **call.kwargs)

    def far(self) -> FarWork:
        """Return what an executor needs whose bodies run elsewhere."""
        from .sent import SentAttempt  # noqa: PLC0415 - only for such an executor

        return SentAttempt(self)

    def holds_lease(self) -> bool:
        """Whether the run is driven here under a fresh lease. Any thread may call this."""
        return not self.run.stop.detached and self.run.host.lease_is_fresh()

    def outlived(self, body: asyncio.Future[Any]) -> None:
        """Note that the body goes on in its thread after the step has ended. An undo waits for it."""
        self.late = body
        if self.call.step.undo is not None:
            self.run.can_undo().outlived.append(body)

    def may_begin(self) -> bool:
        """Whether the body may begin. A run whose lease is too old is given back."""
        return self.run.may_start_body()  # type: ignore[no-any-return]

    # -- progress -----------------------------------------------------------------------------------------------------

    def save_progress(self, value: Any) -> None:
        """Keep a value for the next attempt of this step."""
        self.save_encoded(self.call.step.values.encode(value, f"step {self.key!r}: saved progress"))

    def save_encoded(self, data: bytes) -> None:
        """Keep a value in its stored form for the next attempt of this step."""
        check_size(data, self.key)
        self.run.host.redaction.check(data, self.key, "saved progress of step")
        self.run.save_progress(self.key, self.number, data)

    def saved_progress(self, default: Any) -> Any:
        """Return the newest value that this step has saved."""
        data = self.run.saved_progress(self.key)
        if data is None:
            return default
        return self.call.step.values.decode(data, f"step {self.key!r}: saved progress")

    # -- tokens -------------------------------------------------------------------------------------------------------

    def emit(self, value: Any) -> None:
        """Add a token for readers. The first is appended at once, the others together after `EMIT_SECONDS`."""
        data = self.run.host.redaction.token(value, VALUES, f"step {self.key!r}: emitted", self.key)
        self.emit_encoded(data, names_in_body(self.call))

    def emit_encoded(self, data: bytes, names: Names | None) -> None:
        """Add a token in its stored form."""
        if not self.emitted:
            self.run.loop.call_soon_threadsafe(self._flush_soon, context=self.run.host.context)
        self.emitted.append((names, msgspec.Raw(data)))

    def _flush_soon(self) -> None:
        loop = self.run.loop
        wait = self.emits_at - loop.time()
        if wait > 0:
            loop.call_later(wait, self.flush_emitted, context=self.run.host.context)
        else:
            self.flush_emitted()

    def flush_emitted(self) -> None:
        """Append the tokens that the body has emitted since the last flush."""
        run = self.run
        if not self.emitted or run.stop.detached:
            return
        values, self.emitted = self.emitted, []
        self.emits_at = run.loop.time() + EMIT_SECONDS
        self.life = self.life or run.epoch
        for names, tokens in groupby(values, itemgetter(0)):
            data = new_data(EmittedData, epoch=self.life)
            record = Record(
                run.id, Kind.EMITTED.value, step=self.key, attempt=self.number, worker=run.worker, data=data
            )
            record.finished_at = run.time()
            record.value = msgspec.Raw(msgspec.json.encode([token for _, token in tokens]))
            if names is not None:
                names.put_on(record)
            run.append(record)


def idempotency_key(run: str, key: str, generation: int) -> str:
    """Return the key that all attempts and recoveries of one step share. A retry by a person changes it."""
    return hashlib.sha256(f"{run}\0{key}\0{generation}".encode()).hexdigest()[:40]
