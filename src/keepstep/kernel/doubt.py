"""Resolves the doubt about an at-most-once step, whose body may or may not have run before a crash or a timeout."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import DefinitionError
from ..model import Kind, Outcome
from ..model.ids import new_id
from ..model.signal import RESOLVE
from ..model.text import one_line
from ..records.data import StepData, new_data
from ..records.record import StoredError
from .hooks import within
from .steering import cancel_when_settled
from .stop import SETTLING
from .wakeups import signal_named

if TYPE_CHECKING:
    from ..records.record import Record
    from .calls import StepCall

log = logging.getLogger("keepstep")

#: Maximum time in seconds for a plain `verify=` function. After that a person decides.
VERIFY_SECONDS = 300.0


class Done:
    """The answer of a `verify=` function if the step has happened, with its result."""

    def __init__(self, result: Any = None) -> None:
        self.result = result


class NotDone:
    """The answer of a `verify=` function if the step has not happened, so that its body may run."""


async def resolve(call: StepCall[Any], number: int, late: asyncio.Future[Any] | None = None) -> bool:
    """Find out whether an attempt of the step has happened: by `verify=`, by `in_doubt=` or from a person.

    Return whether its body may run. `late` is a body that may still run in its thread. It may yet happen, so no other
    body runs before it has returned.
    """
    run = call.run
    verify = call.step.verify
    was_running = late is not None and not late.done()
    answer = None if verify is None else await _verified(call, verify)
    if answer is None and call.step.in_doubt == "repeat":
        answer = NotDone
    if late is not None and was_running and _is_not_done(answer):
        await asyncio.wait([late])
        return await resolve(call, number)
    if isinstance(answer, Done):
        run.append(call.completed(call.checked(answer.result), number, None, trigger="recovery"), call)
        return False
    if _is_not_done(answer):
        return run.stop.cancel is not SETTLING  # no body starts between a cancel and its delivery
    if answer is not None:
        raise DefinitionError(
            f"verify= of step {call.step.name!r} must return ks.Done, ks.NotDone or None, got {type(answer).__name__}"
        )
    if not run.inbox.named(f"{RESOLVE}:{call.key}"):  # else a person has decided already
        run.host.events.observe("step.in_doubt", run, step=call.key)
    if call.step.in_doubt == "fail":
        message = f"step {call.key!r} may or may not have happened, and in_doubt='fail' makes it fail"
        run.append(_failure(call, number, message, trigger="recovery"), call)
        return False
    call.doubtful = True
    cancel_when_settled(run)  # a cancel does not wait for a person
    return await _decided_by_person(call, number, late)


def _failure(call: StepCall[Any], number: int, message: str, **fields: Any) -> Record:
    error = StoredError("keepstep.StepInDoubt", message, code="ks:in-doubt", id=new_id("error"))
    return call.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=number, error=error, **fields)


def _is_not_done(answer: Any) -> bool:
    return isinstance(answer, NotDone) or answer is NotDone


async def _verified(call: StepCall[Any], verify: Callable[..., Any]) -> Any:
    """Return the answer of the step's `verify=` function; None if it fails."""
    run = call.run
    seconds = None if inspect.iscoroutinefunction(verify) else VERIFY_SECONDS
    try:
        return await within(run.host, seconds, verify, *call.args, **call.kwargs)
    except Exception as error:  # noqa: BLE001 - if verify= fails, a person resolves the doubt
        run.host.events.observe("step.in_doubt", run, step=call.key, error=repr(error))
        return None


async def _decided_by_person(call: StepCall[Any], number: int, late: asyncio.Future[Any] | None) -> bool:
    """Wait for `keepstep resolve` and append its outcome. Return whether the body may run again."""
    run = call.run
    while True:
        signal = await signal_named(run, f"{RESOLVE}:{call.key}")
        verdict = msgspec.json.decode(signal.payload)
        if verdict["verdict"] != "result":
            break
        try:
            given = call.step.values.decode(msgspec.json.encode(verdict.get("value")), call.key)
            value = call.checked(call.fitted(given))
            break
        except DefinitionError as error:  # the step stays in doubt, until a result comes that fits
            why = one_line(f"the result that {signal.sender} gave to {call.key} is refused: {error}")
            log.warning("run %s: %s", run.id, why)
    data = new_data(StepData, signal=signal.seq, sender=signal.sender, reason=verdict.get("reason", ""))
    if verdict["verdict"] == "again":
        await run.durable(call.record(Kind.STEP_STARTED, attempt=number, trigger="manual", data=data))
        if late is not None:
            await asyncio.wait([late])
        return not run.stop.detached
    if verdict["verdict"] == "result":
        record = call.completed(value, number, None, trigger="manual", data=data)
    else:
        record = _failure(call, number, f"step {call.key!r} was resolved as failed", trigger="manual", data=data)
    run.append(record, call)
    return False
