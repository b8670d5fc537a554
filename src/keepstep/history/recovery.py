"""Recovering a run: a person's request for it, what it would do, and the records of a handler's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ..checks import check_text
from ..errors import (
    AlreadyFinished,
    DefinitionError,
    HandlerFailed,
    KeepstepError,
    RecoveryError,
    RunConflict,
    RunNotFound,
    StoreError,
)
from ..kernel.log import RecoveryPlan
from ..kernel.recovery import request_of
from ..kernel.replay import Superseded, as_ended, read_records
from ..model import Kind, Signal, Status
from ..model.checkpoint import DONE_AGAIN, PASSES_STEP
from ..model.run import handed_over
from ..model.signal import CANCEL
from ..model.undo import is_command, undo_key, waits_for_answer
from ..policies.recovery import HANDLERS, RECOVERY_SECONDS, Recovery
from ..ports import Send, instant
from ..records.data import RecoveredData, SupersededData, data_of, new_data
from ..records.record import FORMAT_WITH_UNDO, Record, unseal
from ..workflows.recovery import RecoveryInfo, handler_named, is_known
from .commands import append_and_release, check_not_keeper, claim_by_name, hand_back_on_error
from .names import named
from .retry import of_unfinished, plan_retry, retry_children
from .rewind import cancels, plan_rewind
from .run_info import info
from .series import newest_run
from .undone import read_undo

if TYPE_CHECKING:
    from ..kernel.driver import RunDriver
    from ..model import Run
    from ..workflows.definition import Workflow
    from .host import CommandHost

#: Statuses from which a person may recover a run, unless a living worker drives it.
RECOVERABLE = frozenset(
    {Status.QUEUED, Status.RUNNING, Status.RECOVERING, Status.WAITING, Status.FAILED, Status.SET_ASIDE}
)
#: The actor of a verb that a recovery handler has chosen.
_ACTOR = "recovery handler"


@dataclass(frozen=True, slots=True)
class Wish:
    """The recovery that a person asks for. Without a `handler`, that of the workflow decides.

    `value` is the stored text of the value for a skipped step; it is empty if none was given.
    """

    handler: str = ""
    step: str = ""
    value: bytes = b""
    skip_validation: bool = False
    reason: str = ""


# -- a person's request ------------------------------------------------------------------------------------------------


async def request_recovery(host: CommandHost, run_id: str, wish: Wish, actor: str) -> str:
    """Ask for the recovery of a run, which the next worker carries out. Return the id of the run that is meant."""
    check_text(wish.reason, "reason")
    asked = Recovery(wish.handler or HANDLERS[0], step=wish.step)
    run = await _newest(host, run_id)
    refusal = await _refusal(host, run)
    if refusal is not None:
        raise refusal
    if run.workflow in host.workflows and not is_known(asked.handler):
        handler_named(wish.handler)
    host.encryption.cipher(run)  # nothing can be written without the run's key
    if run.status is Status.FAILED or wish.handler == "restart":
        # Plan before the claim, so that a refusal leaves the run untouched.
        await plan_answer(host, run, asked, run.status)
    claim = await claim_by_name(host, run, RECOVERABLE)
    reason = host.redaction.redact(wish.reason)
    data = new_data(RecoveredData, act="recover", actor=actor, reason=reason, before=run.status.value)
    if wish.handler:
        data["handler"] = wish.handler
    if wish.step:
        data["skips"] = wish.step
    if wish.skip_validation:
        data["skip_validation"] = True
    record = Record(run.id, Kind.RECOVERED.value, worker=claim.lease.worker, trigger="manual", data=data)
    record.format = FORMAT_WITH_UNDO
    if wish.value:
        record.value = msgspec.Raw(wish.value)
    async with hand_back_on_error(host, claim):
        await append_and_release(host, claim, record, Status.QUEUED)
    return run.id


async def _newest(host: CommandHost, run_id: str) -> Run:
    check_not_keeper(run_id, "recover")
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    if run.continued_as is not None:
        run = await host.call(newest_run, host.store, run)
    return await as_ended(host, run)


async def _refusal(host: CommandHost, run: Run) -> KeepstepError | None:
    """Return the error with which a recovery of the run is refused, or None."""
    elsewhere = handed_over(run)
    if run.status in (Status.COMPLETED, Status.CANCELLED):
        return AlreadyFinished(f"run {run.id!r} is already complete: it is {run.status.value}", run.id)
    if run.worker is not None and await _is_alive(host, run.worker):
        return RunConflict(f"run {run.id!r} is driven by {run.worker}, which is alive", run.id)
    if run.status is Status.PAUSED:
        return RunConflict(f"run {run.id!r} is paused; resume it instead", run.id)
    if not run.seq:
        return RunConflict(f"run {run.id!r} has recorded nothing yet, so a worker just starts it", run.id)
    if waits_for_answer(run):
        return RunConflict(f"undo steps of run {run.id!r} have failed; retry the run, or skip them", run.id)
    if elsewhere:
        return RunConflict(f"run {run.id!r} was handed over: {elsewhere}; recover it there", run.id)
    return await _other_request(host, run)


async def _is_alive(host: CommandHost, worker: str) -> bool:
    return any(one.id == worker and one.alive for one in await host.call(host.store.list_workers))


async def _other_request(host: CommandHost, run: Run) -> KeepstepError | None:
    """Return the refusal of a second recovery, while another one waits for a worker and is not too old."""
    rows = await host.records(run.id, run.seq - 1, 1)
    for record, _ in unseal(rows, run.id, run.seq - 1):
        data = data_of(record, RecoveredData)
        is_request = record.kind == Kind.RECOVERED and "act" in data and record.finished_at is not None
        if is_request and host.clock.now() - record.finished_at.timestamp() < RECOVERY_SECONDS:  # type: ignore[union-attr]
            who = data.get("actor", "someone")
            return RunConflict(f"run {run.id!r} is being recovered already: {who} has asked a worker to do it", run.id)
    return None


# -- what it would do --------------------------------------------------------------------------------------------------


async def recovery_info(
    host: CommandHost,
    run_id: str,
    handler: str = "",
    step: str = "",
    *,
    value: Any = None,
    workflow: Workflow[..., Any] | None = None,
) -> RecoveryInfo:
    """Report whether a person can recover a run, and what that would do."""
    run = await _newest(host, run_id)
    code = workflow or host.workflows.get(run.workflow)
    policy = None if code is None else code.recovery
    chosen = Recovery(handler, step=step, value=value) if handler else policy or Recovery()
    found = await _look(host, run, chosen, run.status, code)
    if code is None and not handler:
        found = replace(found, handler="", again=())
    refusal = await _refusal(host, run)
    if refusal is not None:
        why = str(refusal)
        about = f"run {run.id!r} "
        why = f"it {why.removeprefix(about)}" if why.startswith(about) else why
        return replace(found, recoverable=False, why=why, problems=(), next=(), again=(), skips="", value=None)
    if chosen.handler == "set aside":
        left = f"its handler 'set aside' leaves it to a person{f': {chosen.reason}' if chosen.reason else ''}"
        found = replace(found, problems=(*found.problems, left), next=())
    if found.problems:
        return replace(found, recoverable=False, why=found.problems[0])
    why = "its worker is dead" if run.status.active else f"it is {run.status.value}"
    return replace(found, recoverable=True, why=why if code is not None else f"{why}; {_UNCHECKED}")


#: The end of a sentence about a run whose workflow is not loaded.
_UNCHECKED = "its code is not loaded here, so it was not checked"


async def told_to_handler(host: CommandHost, run: RunDriver, handler: str) -> RecoveryInfo:
    """Return what a recovery handler is told about the run that its worker has taken up."""
    found = await _look(host, run.run, Recovery(handler), _before(run), run.workflow)
    taken_from = run.claim.taken_from
    why = "a person has asked for it" if request_of(run) is not None else f"its worker {taken_from or ''} is dead"
    return replace(found, recoverable=True, why=why.replace("  ", " "), taken_from=taken_from)


def _before(run: RunDriver) -> Status:
    """Return the status of a run before its recovery: a person may have asked for it after the run had failed."""
    request = request_of(run)
    return Status.RUNNING if request is None else Status(data_of(request, RecoveredData).get("before", "running"))


async def _look(
    host: CommandHost, run: Run, chosen: Recovery, before: Status, workflow: Workflow[..., Any] | None
) -> RecoveryInfo:
    """Return the position of a run, and what would run again if the handler answered with its own name."""
    found = await info(host, run.id, workflow)
    problems = [*found.problems]
    plan = RecoveryPlan()
    try:
        if workflow is not None and not is_known(chosen.handler):
            handler_named(chosen.name)
        if chosen.handler in HANDLERS and run.seq and run.status not in (Status.COMPLETED, Status.CANCELLED):
            plan = await plan_answer(host, run, chosen, before, found.steps if found.checked else None)
    except (StoreError, RecoveryError, RunConflict, DefinitionError) as error:
        problems.append(str(error))
    return RecoveryInfo(
        run.id,
        run.workflow,
        run.status,
        found.recoverable,
        found.why,
        chosen.name,
        tuple(dict.fromkeys(problems)),
        found.last_success,
        found.failed,
        found.error,
        found.next,
        plan.again,
        found.checked,
        seq=found.seq,
        generation=found.generation,
        recoveries=found.recoveries,
        skips=plan.skips,
        value=chosen.value,
    )


# -- the answer of a handler -------------------------------------------------------------------------------------------


async def plan_for(host: CommandHost, run: RunDriver, answer: Recovery) -> RecoveryPlan:
    """Return what the answer of a handler takes, for the worker that has taken the run up and now writes it."""
    stored, before = run.run, _before(run)
    if not stored.seq and answer.handler not in ("skip step", "undo"):
        return RecoveryPlan()  # nothing is recorded, so every way on begins with the first line
    if request_of(run) is None and stored.seq:
        await _check_limit(host, run, answer)
    steps = (await info(host, run.id, run.workflow)).steps if answer.handler == "skip step" else None
    plan = await plan_answer(host, stored, answer, before, steps)
    if before is Status.FAILED and answer.handler in (*_GO_ON, "skip step"):
        await retry_children(host, await plan_retry(host, stored, has_failed=True), "its parent is recovered", _ACTOR)
    return plan


async def _check_limit(host: CommandHost, run: RunDriver, answer: Recovery) -> None:
    """Refuse an answer that has taken the run back too often: it would repeat the same steps without an end.

    A restart counts until a person acts on the run, and a retry of steps until one of them succeeds.
    """
    if answer.handler not in ("restart", "retry step"):
        return
    times = 0
    async for record, _ in read_records(host, run.run):
        data = data_of(record, RecoveredData)
        is_person = record.trigger == "manual" and "act" in data
        is_success = answer.handler == "retry step" and record.kind in PASSES_STEP
        if is_person or is_success:
            times = 0
        elif record.kind == Kind.RECOVERED and data.get("handler") == answer.handler:
            times += 1
    limit = run.host.recovery_limit.limit
    if times >= limit:
        text = f"its recovery handler has answered {answer.name!r} {times} times in a row (recovery_limit={limit})"
        raise HandlerFailed(text, kind="HandlerLimit")


#: Handlers that let a run go on from where it is; a failed run goes back to before its failure.
_GO_ON = ("continue", "retry step")


async def plan_answer(
    host: CommandHost, run: Run, answer: Recovery, before: Status, steps: Sequence[str] | None = None
) -> RecoveryPlan:
    """Return the effect of a handler's answer; nothing is written. `steps` are under way, None if that is unknown."""
    match answer.handler:
        case "restart":
            return await _restart(host, run, before)
        case "undo":
            return await _undo(host, run, answer)
        case "skip step":
            return await _skip(host, run, answer, before, steps)
        case "continue" if before is not Status.FAILED:
            return RecoveryPlan(again=tuple(steps or ()))
        case "continue" | "retry step":
            return await _retry(host, run, before, steps)
        case _:
            return RecoveryPlan()


async def _restart(host: CommandHost, run: Run, before: Status) -> RecoveryPlan:
    rewound = await plan_rewind(host, run, 0)
    data = new_data(SupersededData, act="rewind", actor=_ACTOR, before=before.value, beyond=0)
    sends = [Send(signal, optional=True) for signal in cancels(host, run, rewound.children)]
    return RecoveryPlan([_verb(run, data)], sends, again=rewound.again)


async def _retry(host: CommandHost, run: Run, before: Status, steps: Sequence[str] | None) -> RecoveryPlan:
    """Go back to before the failure of a failed run; otherwise begin the steps under way with all their attempts."""
    records = [record async for record, _ in read_records(host, run)]
    sends: list[Send] = []
    if before is Status.FAILED:
        plan = await plan_retry(host, run, has_failed=True)
        seqs = plan.seqs
        sends = [Send(signal, optional=True) for signal in cancels(host, run, plan.left)]
        begun = {one.step: None for one in records if one.seq in seqs and one.kind in DONE_AGAIN}
    else:
        gone = Superseded()
        for record in records:
            if record.kind == Kind.SUPERSEDED:
                gone.add(record)
        seqs = sorted(of_unfinished([one for one in records if one.seq not in gone], set()))
        begun = dict.fromkeys([*(one.step for one in records if one.seq in seqs), *(steps or ())])
    data = new_data(SupersededData, act="retry", actor=_ACTOR, before=before.value, seqs=seqs)
    again = tuple(key for key in begun if not is_command(key))
    return RecoveryPlan([_verb(run, data)], sends, again=again)


async def _skip(
    host: CommandHost, run: Run, answer: Recovery, before: Status, steps: Sequence[str] | None
) -> RecoveryPlan:
    """Give the answer's value to a step that was under way, or that has failed, as its result."""
    plan = RecoveryPlan(again=tuple(steps or ()))
    if before is Status.FAILED:
        plan = await _retry(host, run, before, steps)
        steps = plan.again
    if steps is None:
        return plan
    if not steps and not answer.step:
        return plan  # the worker died between two steps, so there is nothing to skip
    found = named(steps, answer.step) if answer.step else list(steps)
    if len(found) != 1:
        under_way = ", ".join(steps) or "none"
        problem = f"names {len(found)} of them" if answer.step else "needs step=, the step to skip"
        raise DefinitionError(f"the handler 'skip step' {problem}; steps under way in run {run.id!r}: {under_way}")
    plan.skips = found[0]
    plan.again = tuple(key for key in plan.again if key != plan.skips)
    return plan


async def _undo(host: CommandHost, run: Run, answer: Recovery) -> RecoveryPlan:
    """Cancel the run, whose finished steps are then undone."""
    reason = host.redaction.redact(answer.reason or "its recovery handler answered 'undo'")
    payload = msgspec.json.encode({"reason": reason})
    signal = Signal(run.id, CANCEL, payload, f"undo:{run.id}:{run.epoch}", _ACTOR, instant(host.clock.now()))
    left = (await read_undo(host, run)).left() if run.seq else []
    return RecoveryPlan(sends=[Send(signal)], again=tuple(undo_key(item.key, 1) for item in left))


def _verb(run: Run, data: Any) -> Record:
    """Return the record of a verb that a handler has chosen; a person's command has the same, with its actor."""
    return Record(run.id, Kind.SUPERSEDED.value, worker=run.worker or "", trigger="recovery", data=data)
