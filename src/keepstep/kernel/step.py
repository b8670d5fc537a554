"""A step, as one pipe over an attempt: resume → admit → mark → execute → conclude.

| stage | does | extended by |
|---|---|---|
| resume | continues the count of attempts that the history holds; takes a cached result, if there is one | `ks.Cache` |
| admit | waits until the gates admit the attempt | `gates.gates_of` |
| mark | appends the start mark of an at-most-once step, or resolves a doubt | |
| execute | runs the body and encodes its result | `Host.executors`, `Host.tracer` |
| conclude | appends the outcome; after a failure, decides on the next attempt | `policies.Retry` |
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextvars import copy_context
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import BodyLost, DefinitionError, KeepstepError, NotSerializable, StepInDoubt, StepTimedOut
from ..model import Kind, Outcome
from ..model.checkpoint import Trigger
from ..model.text import one_line
from ..policies import Again
from ..ports import CURRENT, Answer, BodyTimedOut, Verdict, instant
from ..records.data import Data, StepCompletedData, data_of, new_data
from ..values import large
from .attempt import Attempt
from .cache import keep, recall
from .call_states import ASKED, CANCELLED, NotYet
from .doubt import resolve
from .gates import body_ended, gates_of, leave_gates, pass_gates, pass_service
from .hooks import call_cancel_hooks, call_step_hooks
from .progress import record_saved
from .steering import cancel_when_settled
from .stored_errors import class_of, stored_error, stored_exception
from .strands import left
from .tracing import enter
from .wakeups import pause_until

if TYPE_CHECKING:
    from ..ports import Executor
    from ..records.record import Record
    from .calls import StepCall
    from .driver import RunDriver
    from .host import Host

log = logging.getLogger("keepstep")


async def perform(call: StepCall[Any]) -> None:  # noqa: C901 - on the hot path, where another function costs a call
    """Attempt a step until it has an outcome, in a task beside the workflow's code."""
    call.entered = True
    run, step = call.run, call.step
    guard = call.branch.guard
    gates = () if guard is None and step.ready is None and step.service is None else gates_of(guard, step)
    attempt = call.attempt = Attempt(call, run, call.key, call.branch.hooks + step.hooks, gates)
    CURRENT.set(attempt)
    try:
        if run.tried:
            await resume(attempt)
        if (run.skips or step.cache is not None) and await has_result(attempt):
            return
        is_plain = not gates and not attempt.hooks and not step.at_most_once
        while _may_begin(run) if is_plain else await admit(attempt) and await mark(attempt):
            outcome = await execute(attempt)
            if isinstance(outcome, Stored):
                if step.cache is not None:
                    await keep(attempt, step.cache, outcome.data)
                succeed(attempt, outcome)
                return
            if outcome is COMMITTED or not await fail(attempt, outcome):
                return
    except asyncio.CancelledError:
        if attempt.hooks and call.state == CANCELLED and not run.stop.detached:
            call_cancel_hooks(attempt)
        raise
    except Exception as error:  # noqa: BLE001 - a failure of the engine; the failure of a body is an outcome
        run.engine_failed(error)
    finally:
        if attempt.place is not None:  # the body has not begun
            leave_gates(attempt)
        if call.task is not None:  # None if the append of its last record has ended it
            run.body_ended(call)


# -- resume ------------------------------------------------------------------------------------------------------------


async def resume(attempt: Attempt) -> None:
    """Continue after the attempts that the history holds, and wait out the backoff of the last one."""
    tried = attempt.run.take_attempts(attempt.key)
    if tried is not None:
        attempt.number = tried.attempts + 1
        if tried.retry_at is not None:
            await _back_off(attempt, tried.retry_at.timestamp())
        attempt.first_at = tried.first_at
        attempt.begun_before()


async def has_result(attempt: Attempt) -> bool:
    """Whether the step has a result without a call of its body: that of a recovery, or a cached one."""
    if attempt.run.skips and await skip(attempt):
        return True
    return attempt.call.step.cache is not None and await serve(attempt)


async def skip(attempt: Attempt) -> bool:
    """Append the result that a recovery gives to the step instead of a call of its body. Return whether it did."""
    call, run = attempt.call, attempt.run
    given = run.take_skipped(attempt.key)
    if given is None:
        return False
    run.take_mark(attempt.key)
    attempt.started_at = datetime.fromtimestamp(run.host.clock.now(), UTC)
    try:
        value = call.fitted(call.step.values.decode(given, attempt.key))
        stored = _encoded_here(call, value) or await _encoded_off_loop(call, value)
    except KeepstepError as error:
        text = f"the value given for skipped step {attempt.key!r} cannot be its result: {error}"
        run.host.set_aside(run, type(error).__name__, text)
        return True
    record = call.completed(stored.data, attempt.number, attempt.started_at)
    record.trigger = Trigger.RECOVERY.value
    if record.data is not None and "undo" in record.data:  # a step that was skipped is not undone
        record.data = {name: value for name, value in record.data.items() if name not in ("undo", "input")}
    run.append(record, call, last=True, state=call.after, packed=stored.packed)
    return True


async def serve(attempt: Attempt) -> bool:
    """Append the cached result of an equal call in place of a call of the body. Return whether there was one."""
    call, run = attempt.call, attempt.run
    found = await recall(attempt, call.step.cache)
    if found is None:
        return False
    attempt.started_at = datetime.fromtimestamp(run.host.clock.now(), UTC)
    try:
        stored = _encoded_here(call, found.value) or await _encoded_off_loop(call, found.value)
    except KeepstepError as error:  # it may hold what has become a secret
        log.warning("the cached result of step %s cannot be used: %s", attempt.key, error)
        return False
    data = new_data(StepCompletedData, cached=found.run)
    record = call.completed(stored.data, attempt.number, attempt.started_at, data=data)
    run.append(record, call, last=True, state=call.after, packed=stored.packed)
    return True


# -- admit -------------------------------------------------------------------------------------------------------------


async def admit(attempt: Attempt) -> bool:
    """Wait until the attempt may begin, and call the `before` hooks. A step in doubt passes: it may have begun."""
    if (attempt.gates or attempt.hooks) and not attempt.marked and attempt.key not in attempt.run.marks:
        if attempt.gates and not await pass_gates(attempt):
            return False
        if attempt.hooks:
            await call_step_hooks(attempt, "before")
    return not attempt.run.stop.detached


# -- mark --------------------------------------------------------------------------------------------------------------


async def mark(attempt: Attempt) -> bool:
    """Append the start mark of an at-most-once step. Return whether the body may run, under a fresh lease."""
    run, call = attempt.run, attempt.call
    if call.step.at_most_once and not attempt.marked:
        attempt.marked = True
        if run.take_mark(attempt.key) is not None:  # a mark without an outcome: the step is in doubt
            if call.step.leaves_doubt and _may_be_adopted(call):
                attempt.only_adopts = True
            elif not await resolve(call, attempt.number):
                return False
        elif run.may_start_body():
            kept = None if call.step.undo is None else call.for_undo()
            await run.durable(call.record(Kind.STEP_STARTED, attempt=attempt.number, data=kept))
    if attempt.marked and call.step.service is not None and attempt.place is None and not await pass_service(attempt):
        return False
    return _may_begin(run)


def _may_be_adopted(call: StepCall[Any]) -> bool:
    """Whether a body that the last worker has begun may go on without it."""
    try:
        return call.run.host.executors.of(call.step, call.run.workflow).adopts
    except DefinitionError:  # this worker does not have the executor
        return False


def _may_begin(run: RunDriver) -> bool:
    """Whether a body may begin: the run is still here, and its lease is fresh."""
    return not run.stop.detached and (run.host.seconds() < run.host.fresh_until or run.may_start_body())


# -- execute -----------------------------------------------------------------------------------------------------------


class Stored(msgspec.Struct, gc=False):
    """The result of a body, encoded and, if it is large, compressed."""

    data: bytes
    packed: bytes | None = None


class Failed(msgspec.Struct):
    """The failure of an attempt."""

    error: BaseException


#: The outcome of a transactional step: the store's own transaction has appended it.
COMMITTED = None


async def execute(attempt: Attempt) -> Stored | Failed | None:  # noqa: C901 - on the hot path, as `perform`
    """Run the body and encode its result. Any exception of the body, of the codec or of a check is a failure."""
    call, run = attempt.call, attempt.run
    host, step = run.host, call.step
    attempt.started_at = started_at = datetime.fromtimestamp(host.clock.now(), UTC)
    attempt.first_at = attempt.first_at or started_at
    try:
        executor = None if step.simple else host.executors.of(step, run.workflow)
        if host.events.observed and not (executor is not None and executor.is_far):
            host.events.observe("step.started", run, step=attempt.key, attempt=attempt.number)
        if host.tracer is not None:
            enter(host.tracer, run, attempt.key, attempt.number)
        # a shortcut past the inline executor, for a body without a timeout
        if executor is None and not (step.record_input or call.branch.records_input):
            value = await step.body(*call.args, **call.kwargs)
        else:
            value = await _body(attempt, executor or host.executors.of(step, run.workflow))
        if step.transactional:
            return COMMITTED
        stored = _encoded_here(call, value) or await _encoded_off_loop(call, value)
        if attempt.hooks:
            await call_step_hooks(attempt, "after", value)
    except asyncio.CancelledError as error:
        attempt.failure = error
        if run.stop.detached or call.state != ASKED:
            raise
        return Failed(error)  # the body cancelled itself
    except KeyboardInterrupt:
        run.interrupt()
        raise
    except BaseException as error:  # noqa: BLE001 - a body may raise anything, `SystemExit` too
        attempt.failure = error
        return Failed(error)
    finally:
        if attempt.gates:
            body_ended(attempt)
    return stored


async def _body(attempt: Attempt, executor: Executor) -> Any:
    """Run the body where its step says, within the time that is left."""
    call, step = attempt.call, attempt.call.step
    if step.undo is not None:
        call.for_undo()  # now, because the body may change its arguments
    elif (step.record_input or call.branch.records_input) and "input" not in (attempt.more or ()):
        attempt.add(call.input_data())  # as above
    if step.transactional:
        return await _transact(attempt)
    elapsed = (attempt.started_at - attempt.first_at).total_seconds()  # type: ignore[operator]
    try:
        return await executor.execute(attempt, step.timeout.remaining(elapsed))
    except BodyTimedOut as late:
        attempt.late = late.body
        error = StepTimedOut(f"step {call.key!r} took longer than {late.seconds:g} s", call.key)
        error.body = late.body  # type: ignore[attr-defined]
        raise error from None


def _encoded_here(call: StepCall[Any], value: Any) -> Stored | None:
    """Encode and check a result. Return None if it is large."""
    cls = type(value)
    is_small = cls in large.SMALL_TYPES or (cls is str and len(value) <= large.LARGE_BYTES)
    if not is_small and large.is_large(value):
        return None
    data = call.encode(value)
    if len(data) > large.LARGE_BYTES:
        return None
    call.run.host.redaction.check(data, call.key)
    return Stored(data)


async def _encoded_off_loop(call: StepCall[Any], value: Any) -> Stored:
    """Encode and check a large result off the loop."""
    host = call.run.host

    def write() -> Stored:
        data = call.write(value)
        return Stored(data, _packed(host, data, call.key))

    try:
        stored = await host.off_loop(write)
    except NotSerializable as refusal:
        if not isinstance(refusal.__cause__, RuntimeError):
            raise
        return Stored(call.checked(value))  # other code changed the value meanwhile; on the loop it cannot
    call.written()
    return stored


def _packed(host: Host, data: bytes, key: str) -> bytes | None:
    host.redaction.check(data, key)
    return host.packed(data)


async def _transact(attempt: Attempt) -> Any:
    """Run the body inside the store's own transaction: its writes and its checkpoint are one commit."""
    call, run = attempt.call, attempt.run
    if not run.host.transactional:
        raise DefinitionError(
            f"step {call.step.name!r} is transactional, which store {run.host.url!r} does not support; use SQLite or "
            "PostgreSQL"
        )
    context = copy_context()
    made: list[tuple[Record, Any]] = []

    def body(tx: Any) -> Record:
        value = context.run(_within, call, tx)
        record: Record = call.completed(call.checked(value), attempt.number, attempt.started_at)
        run.spent.attach(record)
        if attempt.more is not None:
            attempt.attach(record)
        made.append((record, value))
        return record

    answered: asyncio.Future[Answer] = run.loop.create_future()

    def settle(answer: Answer) -> None:
        if answer.verdict is Verdict.DONE:
            run.spent.add(made[-1][0])
        if not answered.done():
            answered.set_result(answer)

    run.append_special(None, {"within": body}, settle, settle, call)
    answer = await answered
    if answer.verdict is Verdict.FAILED and answer.error is not None:
        raise answer.error
    if answer.verdict is not Verdict.DONE:
        run.detach(f"the store refused a transactional step: {answer.verdict}")
    elif attempt.hooks:
        await call_step_hooks(attempt, "after", made[-1][1])


def _within(call: StepCall[Any], tx: Any) -> Any:
    try:
        return call.step.body(tx, *call.args, **call.kwargs)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # the store would let `SystemExit` end the process
        raise left(error) from error


# -- conclude ----------------------------------------------------------------------------------------------------------


def succeed(attempt: Attempt, outcome: Stored) -> None:
    """Append the result of the attempt."""
    call, run = attempt.call, attempt.run
    if attempt.emitted:
        attempt.flush_emitted()
    record = call.completed(outcome.data, attempt.number, attempt.started_at)
    if run.spent.reported:
        run.spent.attach(record)
    if attempt.more is not None:
        attempt.attach(record)
    then = None if attempt.on_durable is None else _then(attempt)
    run.append(record, call, then, last=True, state=call.after, packed=outcome.packed)


async def fail(attempt: Attempt, outcome: Failed) -> bool:
    """Append a failure. Return False if it was the last attempt; else wait until the next may start."""
    call, failure = attempt.call, outcome.error
    if asyncio.current_task().cancelling():  # type: ignore[union-attr]
        await _outlive_cancel(attempt)
    if isinstance(failure, NotYet):
        await _wait_to_check(attempt, failure.seconds)
        return True
    if attempt.hooks:
        await call_step_hooks(attempt, "error", error=failure)
    late = getattr(failure, "body", None)
    if isinstance(failure, StepTimedOut | StepInDoubt | BodyLost) and call.step.leaves_doubt:
        attempt.only_adopts = False
        return await resolve(call, attempt.number, late)
    retry_at = _failed(attempt, failure)
    if retry_at is None:
        if late is not None and call.step.undo is not None:
            attempt.outlived(late)
        return False
    attempt.started_at = None
    attempt.begun_before()
    if late is not None:  # a thread cannot be stopped, so the next attempt waits until the body has returned
        await asyncio.wait([late])
    await _back_off(attempt, retry_at)
    attempt.number += 1
    return True


async def _back_off(attempt: Attempt, until: float) -> None:
    """Wait for the next attempt. That of an at-most-once step needs a mark of its own; until then there is no doubt."""
    call = attempt.call
    if call.step.at_most_once:
        attempt.marked, call.rests = False, True
        cancel_when_settled(attempt.run)
    await pause_until(attempt.run, until)
    call.rests = False


async def _wait_to_check(attempt: Attempt, seconds: float) -> None:
    """Wait until a check is made again, without a record: a recovery checks at once."""
    run = attempt.run
    if run.host.forgetting is not None:
        run.host.forgetting.drop(attempt.call)
    attempt.started_at = attempt.first_at = None  # a total timeout counts for each check
    run.host.events.observe("step.blocked", run, step=attempt.key, why="not yet", again_seconds=seconds)
    await pause_until(run, run.host.clock.now() + seconds, blocked=attempt.key)


async def _outlive_cancel(attempt: Attempt) -> None:
    """Take a cancel with which a body left its own task. It would end the step without an outcome."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        if attempt.run.stop.detached or attempt.call.state != ASKED:
            raise


def _failed(attempt: Attempt, failure: BaseException) -> float | None:
    """Append a failed attempt. Return when the next one may start; None if there is none."""
    call, run = attempt.call, attempt.run
    step, number = call.step, attempt.number
    error_class = class_of(failure, step.classify + call.branch.rules + run.host.rules)
    now = run.host.clock.now()
    chance = random.Random(f"{run.seed}|{attempt.key}|{number}").random()  # noqa: S311 - jitter, seeded
    decision = step.retry.decide(number, error_class, failure, chance, now)
    retry_at = now + decision.after_seconds if isinstance(decision, Again) else None
    if retry_at is not None and step.timeout.expired(retry_at - attempt.first_at.timestamp()):  # type: ignore[union-attr]
        retry_at = None
    record = call.record(
        Kind.STEP_FAILED,
        stored_exception(failure, step.values, run, attempt.key),
        outcome=Outcome.FAILURE.value,
        attempt=number,
        started_at=attempt.started_at,
        error=stored_error(failure, error_class, number, run),
        retry_at=None if retry_at is None else instant(retry_at),
        data=run.spent.take(attempt.key) if run.spent.reported else None,
    )
    if attempt.emitted:
        attempt.flush_emitted()
    if retry_at is not None:
        record_saved(run, (attempt.key,))
        attempt.attach_for_events(record)
    elif attempt.more is not None:
        attempt.attach(record)
    elif step.undo_unfinished:
        record.data = {**data_of(record, Data), **call.for_undo()}
    then = None if attempt.on_durable is None else _then(attempt)
    run.append(record, call if retry_at is None else None, then)
    if not run.host.events.logged:
        _log_failed(attempt, record, None if retry_at is None else retry_at - now)
    return retry_at


def _then(attempt: Attempt) -> Callable[[Answer], None]:
    """Return a callback for the durable outcome, and forget it: a later attempt has its own."""
    then, attempt.on_durable = attempt.on_durable, None
    return lambda _: then()  # type: ignore[misc]


#: The log message of a failed attempt.
FAILED_ATTEMPT = "run %s: attempt %d of step %s failed: %s; %s"


def _log_failed(attempt: Attempt, record: Record, wait_seconds: float | None) -> None:
    """Log a failed attempt: the user's line that failed, and when the next attempt begins."""
    info = record.error.info()  # type: ignore[union-attr]
    where = f" ({info.frames[-1].brief})" if info.frames else ""
    then = "no attempt is left" if wait_seconds is None else f"the next one begins in {wait_seconds:.3g} s"
    log.warning(FAILED_ATTEMPT, attempt.run.id, attempt.number, attempt.key, one_line(f"{info.summary}{where}"), then)
