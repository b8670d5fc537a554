"""Performing a step: its attempts, their timeouts and waits, and the record that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import random
import traceback
from contextvars import copy_context
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import DefinitionError, ExecutionError, StepTimedOut
from ..model import Kind, Outcome
from ..model.ids import new_id
from ..model.signal import RESOLVE
from ..policies import Again, classify
from ..ports import CURRENT, Answer, Verdict, instant
from ..stores.records import Record, StoredError
from ..values import VALUES
from ..workflows.definition import PlainCall
from .asides import may_begin, plainly, tell, tell_of_cancel, within
from .branch import ASKED, CANCELLED
from .failure_point import caused_by
from .steering import cancel_when_settled
from .tasks import left
from .wakeups import pause_until, signal_named

if TYPE_CHECKING:
    from ..workflows.definition import Step
    from .branch import StepCall
    from .context import RunContext

#: The part of a traceback that is kept.
MAX_TRACEBACK = 20_000
MAX_MESSAGE = 10_000
#: A plain `verify=` that takes longer leaves the doubt to a person.
VERIFY_SECONDS = 300.0
#: A result of more bytes is searched for secrets and compressed beside the loop: that takes some 20 ms a megabyte.
LARGE_BYTES = 250_000
#: A number beyond this is no status and no errno.
MAX_CODE = 1_000_000


class Done:
    """What a `verify=` function returns when the step has happened, with its result."""

    def __init__(self, result: Any = None) -> None:
        self.result = result


class NotDone:
    """What a `verify=` function returns when the step has not happened, so that it may be performed."""


class Attempt:
    """Where the body of a step is: a step called here just runs its body."""

    __slots__ = ("emitted", "guarded", "hooks", "key", "number", "run")

    in_step = True

    def __init__(self, call: StepCall[Any]) -> None:
        run, step = call.run, call.step
        self.run: RunContext = run
        self.key = call.key
        self.number = 1
        self.emitted: list[Any] = []
        self.hooks = hooks = run.step_hooks + step.hooks
        #: Whether there is anything to ask or to tell before an attempt.
        self.guarded = bool(hooks) or run.guard is not None or step.ready is not None

    def call_step(self, step: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlainCall[Any]:
        return PlainCall(step.fn, args, kwargs)

    def idempotency_key(self) -> str:
        """The key of this step for outside services."""
        return idempotency_key(self.run.id, self.key, self.run.generation)


def idempotency_key(run: str, key: str, generation: int) -> str:
    """The same for every attempt and recovery of one step; another after a person has retried the run."""
    return hashlib.sha256(f"{run}\0{key}\0{generation}".encode()).hexdigest()[:40]


async def perform(call: StepCall[Any]) -> None:
    """Perform a step, in a task of its own beside the workflow's code: attempt it until it succeeds or is given up."""
    call.entered = True
    run, step = call.run, call.step
    engine = run.engine
    scope = Attempt(call)
    CURRENT.set(scope)
    try:
        first_at = await _resume_attempts(call, scope) if run.tried else None
        if scope.guarded and call.key not in run.marks and not await may_begin(call, scope):
            return
        if step.at_most_once and not await _may_happen(call):
            return
        while run.may_start_body():
            started_at = instant(engine.clock.now())
            first_at = first_at or started_at
            if engine.teller.observed:
                engine.teller.observe("step.started", run, step=call.key, attempt=scope.number)
            failure = await _attempt(call, scope, started_at, first_at)
            if failure is None or not await _may_try_again(call, scope, failure, started_at, first_at):
                return
    except asyncio.CancelledError:
        if scope.hooks and call.state == CANCELLED and not run.detached:
            tell_of_cancel(call, scope)
        raise
    except Exception as error:  # noqa: BLE001 - not the step's failure, which is recorded, but the engine's
        run.engine_failed(error)
    finally:
        run.body_ended(call)


async def _attempt(
    call: StepCall[Any], scope: Attempt, started_at: datetime, first_at: datetime
) -> BaseException | None:
    """One attempt: its success is put into the journal, its failure returned."""
    step, run = call.step, call.run
    try:
        if step.simple:
            value = await step.fn(*call.args, **call.kwargs)
        elif step.transactional:
            await _transact(call, scope, started_at)
            return None
        else:
            value = await _limited(call, (started_at - first_at).total_seconds())
        data, packed = call.encode(value), None
        if len(data) > LARGE_BYTES:
            packed = await run.engine.admit(data, call.key)
        else:
            run.engine.censor.check(data, call.key)
        if scope.hooks:
            await tell(call, scope, "after", value)
    except asyncio.CancelledError as error:
        if run.detached or call.state != ASKED:
            raise
        return error
    except KeyboardInterrupt:
        run.interrupt()
        raise
    except BaseException as error:  # noqa: BLE001 - the body may raise what it likes, sys.exit() too
        return error
    _succeeded(call, scope, started_at, data, packed)
    return None


def _succeeded(call: StepCall[Any], scope: Attempt, started_at: datetime, data: bytes, packed: bytes | None) -> None:
    """Put the result of a body into the journal."""
    run = call.run
    if scope.emitted:
        flush_emitted(scope)
    record = call.completed(data, scope.number, started_at)
    if run.spent.told:
        run.spent.attach(record)
    run.append(record, call, last=True, state=call.after, packed=packed)


async def _may_try_again(
    call: StepCall[Any], scope: Attempt, failure: BaseException, started_at: datetime, first_at: datetime
) -> bool:
    """Record a failed attempt, and wait until the next one may start; False if there is none."""
    if scope.hooks:
        await tell(call, scope, "error", error=failure)
    if call.step.at_most_once and isinstance(failure, StepTimedOut):
        return await _resolve(call)
    retry_at = _failed(call, scope, failure, started_at, first_at)
    if retry_at is None:
        return False
    late = getattr(failure, "body", None)
    if late is not None:  # a thread cannot be stopped, so the next attempt waits until it has returned
        await _outlive(late)
    await pause_until(call.run, retry_at)
    scope.number += 1
    return not scope.guarded or await may_begin(call, scope)


async def _resume_attempts(call: StepCall[Any], scope: Attempt) -> datetime | None:
    """Go on counting where the history ends: the attempts of a step survive restarts."""
    tried = call.run.tried.pop(call.key, None)
    if tried is None:
        return None
    scope.number = tried.attempts + 1
    if tried.retry_at is not None:
        await pause_until(call.run, tried.retry_at.timestamp())
    return tried.first_at  # type: ignore[no-any-return]


async def _limited(call: StepCall[Any], elapsed: float) -> Any:
    """Run the body, in a thread if it is a plain def, within what is left of its time."""
    step = call.step
    seconds = step.timeout.remaining(elapsed)
    if step.is_async:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await step.fn(*call.args, **call.kwargs)
        except TimeoutError:
            if limit.expired():
                raise _timed_out(call, seconds) from None
            raise
    future = call.run.engine.step_threads.submit(copy_context(), partial(_in_its_turn, call))
    body = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait([body], timeout=seconds)
    except asyncio.CancelledError:
        future.cancel()  # if no thread has taken it up yet, none shall
        raise
    if done:
        return await _again_if_late(call, elapsed, body)
    late = _timed_out(call, seconds)
    late.body = body  # type: ignore[attr-defined]
    raise late


class LeaseTooOld(Exception):
    """A thread took a step up so late that its run may be somebody else's by now."""


def _in_its_turn(call: StepCall[Any]) -> Any:
    """Run a plain body in its thread; it may have waited long for one, so the lease is looked at once more."""
    if call.run.detached or not call.run.engine.lease_is_fresh():
        raise LeaseTooOld
    return plainly(call.step.fn, *call.args, **call.kwargs)


async def _again_if_late(call: StepCall[Any], elapsed: float, body: asyncio.Future[Any]) -> Any:
    """What the thread gave; if it did not begin, another does when the lease is fresh again, or the run is let go."""
    try:
        return body.result()
    except LeaseTooOld:
        if not call.run.may_start_body():
            raise asyncio.CancelledError from None
        return await _limited(call, elapsed)


async def _outlive(body: asyncio.Future[Any]) -> None:
    await asyncio.wait([body])
    if not body.cancelled():
        body.exception()


def _timed_out(call: StepCall[Any], seconds: float | None) -> StepTimedOut:
    return StepTimedOut(f"step {call.key!r} took longer than {seconds:g} s", call.key)


def _failed(
    call: StepCall[Any], scope: Attempt, failure: BaseException, started_at: datetime, first_at: datetime
) -> float | None:
    """Record a failed attempt; when the next one may start, or None if it was the last."""
    run, step = call.run, call.step
    error_class = classify(failure)
    now = run.engine.clock.now()
    decision = step.retry.decide(scope.number, error_class, failure, _draw(call, scope), now)
    retry_at = now + decision.after_seconds if isinstance(decision, Again) else None
    if retry_at is not None and step.timeout.expired(retry_at - first_at.timestamp()):
        retry_at = None
    error = stored_error(failure, str(error_class), scope.number, run)
    record = call.record(
        Kind.STEP_FAILED,
        outcome=Outcome.FAILURE.value,
        attempt=scope.number,
        started_at=started_at,
        error=error,
        retry_at=None if retry_at is None else instant(retry_at),
        data=run.spent.take(call.key) if run.spent.told else None,
    )
    if scope.emitted:
        flush_emitted(scope)
    run.append(record, call if retry_at is None else None)
    return retry_at


def _draw(call: StepCall[Any], scope: Attempt) -> float:
    return random.Random(f"{call.run.seed}|{call.key}|{scope.number}").random()  # noqa: S311 - jitter, seeded


def stored_error(error: BaseException, error_class: str, attempt: int, run: RunContext) -> StoredError:
    """What is kept of an exception, with secrets taken out."""
    redact = run.engine.censor.redact
    lines = traceback.format_exception(error)
    text = "".join(lines)
    if len(text) > MAX_TRACEBACK:
        text = text[: MAX_TRACEBACK // 2] + "\n  …\n" + text[-MAX_TRACEBACK // 2 :]
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001 - an exception whose text cannot be made is still a failure
        message = f"<its message cannot be shown: {type(broken).__name__}>"
    return StoredError(
        type=clean(name),
        message=clean(redact(message[: 2 * MAX_MESSAGE]))[:MAX_MESSAGE],  # cut late: half a secret is not recognised
        error_class=error_class,
        code=_CODES.get(kind) or _outside_code(error),
        traceback=clean(redact(text)),
        attempt=attempt,
        id=new_id("error"),
        caused_by=caused_by(error),
    )


def _outside_code(error: BaseException) -> str | None:
    """The number that the outside world gave the error: an HTTP status or an errno."""
    for name in ("status_code", "status", "errno"):
        code = None
        with contextlib.suppress(Exception):  # whatever the attribute does, the error is recorded
            code = getattr(error, name, None)
        if isinstance(code, int) and abs(code) < MAX_CODE:
            return str(code)
    return None


def clean(text: str) -> str:
    """The text without what no file can hold."""
    return text.encode("utf-8", "replace").decode()


_CODES: dict[type, str] = {StepTimedOut: "ks:step-timed-out", ExecutionError: "ks:execution"}


# -- at most once ------------------------------------------------------------------------------------------------------


async def _may_happen(call: StepCall[Any]) -> bool:
    """Write the start mark first; if an earlier one is there without an outcome, the step is in doubt."""
    run = call.run
    mark = run.marks.pop(call.key, None)
    if mark is not None:
        return await _resolve(call)
    if not run.may_start_body():
        return False
    await run.durable(call.record(Kind.STEP_STARTED, attempt=1))
    return not run.detached


async def _resolve(call: StepCall[Any]) -> bool:
    """The step may or may not have happened: its `verify=` says, or a person does. Whether to perform it."""
    run, step = call.run, call.step
    if step.verify is not None:
        try:
            if inspect.iscoroutinefunction(step.verify):
                answer = await step.verify(*call.args, **call.kwargs)
            else:  # it may ask the other side and wait, which must not stop the loop
                answer = await within(run.engine, VERIFY_SECONDS, step.verify, *call.args, **call.kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a verify that fails leaves the doubt to a person
            run.engine.teller.observe("step.in_doubt", run, step=call.key, error=repr(error))
            answer = None
        if isinstance(answer, Done):
            data = _checked(call, answer.result)
            run.append(call.completed(data, 1, None, trigger="recovery"), call)
            return False
        if isinstance(answer, NotDone) or answer is NotDone:
            return run.cancel_signal is None  # nothing starts between a cancel and its delivery
        if answer is not None:
            raise DefinitionError(f"verify= of step {step.name!r} must return ks.Done, ks.NotDone or None")
    run.engine.teller.observe("step.in_doubt", run, step=call.key)
    call.doubtful = True
    cancel_when_settled(run)  # it does not wait for a person
    signal = await signal_named(run, f"{RESOLVE}:{call.key}")
    verdict = msgspec.json.decode(signal.payload)
    data_ = {"signal": signal.seq, "sender": signal.sender, "reason": verdict.get("reason", "")}
    if verdict["verdict"] == "again":
        await run.durable(call.record(Kind.STEP_STARTED, attempt=1, trigger="manual", data=data_))
        return not run.detached
    if verdict["verdict"] == "result":
        given = step.values.decode(msgspec.json.encode(verdict.get("value")), call.key)
        value = _checked(call, call.fitted(given))
        record = call.completed(value, 1, None, trigger="manual", data=data_)
    else:
        failed = StoredError(
            "keepstep.StepInDoubt", f"step {call.key!r} was resolved as failed", code="ks:in-doubt", id=new_id("error")
        )
        record = call.record(
            Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, trigger="manual", error=failed, data=data_
        )
    run.append(record, call)
    return False


def _checked(call: StepCall[Any], value: Any) -> bytes:
    data = call.encode(value)
    call.run.engine.censor.check(data, call.key)
    return data


# -- transactional -----------------------------------------------------------------------------------------------------


def _within(call: StepCall[Any], tx: Any) -> Any:
    try:
        return call.step.fn(tx, *call.args, **call.kwargs)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # to the store it would be no refusal, but the end
        raise left(error) from error


async def _transact(call: StepCall[Any], scope: Attempt, started_at: datetime) -> None:
    """Run the body inside the store's own transaction: its writes and its checkpoint are one commit."""
    run, step = call.run, call.step
    if not run.engine.store.transactional:
        raise DefinitionError(
            f"step {step.name!r} is transactional, which {run.engine.store.url!r} cannot offer; use SQLite or "
            "PostgreSQL"
        )
    context = copy_context()

    def body(tx: Any) -> Record:
        value = context.run(_within, call, tx)
        record = call.completed(_checked(call, value), scope.number, started_at)
        run.spent.attach(record)
        made.append((record, value))
        return record

    made: list[tuple[Record, Any]] = []
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
    elif scope.hooks:
        await tell(call, scope, "after", made[-1][1])


# -- streams -----------------------------------------------------------------------------------------------------------


def emit(scope: Attempt, value: Any) -> None:
    """Keep a token for readers; it is written with the next flush."""
    censor = scope.run.engine.censor
    data = VALUES.encode(censor.redact(value) if isinstance(value, str) else value, f"step {scope.key!r}: emitted")
    censor.check(data, scope.key, "token of step")
    token = msgspec.Raw(data)
    if not scope.emitted:
        scope.run.loop.call_soon_threadsafe(_flush_soon, scope)
    scope.emitted.append(token)


def _flush_soon(scope: Attempt) -> None:
    scope.run.loop.call_later(EMIT_SECONDS, flush_emitted, scope, context=scope.run.engine.context)


def flush_emitted(scope: Attempt) -> None:
    """Write what a body has emitted since it was last written."""
    run = scope.run
    if not scope.emitted or run.detached:
        return
    values, scope.emitted = scope.emitted, []
    record = Record(run.id, Kind.EMITTED.value, step=scope.key, attempt=scope.number, worker=run.worker)
    record.finished_at = run.time()
    record.value = msgspec.Raw(msgspec.json.encode(values))
    run.append(record)


#: Tokens of a step are gathered for this long and written together.
EMIT_SECONDS = 0.05
