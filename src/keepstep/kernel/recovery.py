"""The five phases in which a worker takes up a run: load, validate, rebuild, resolve handler, resume.

A first start, the wake-up of a parked run and a recovery pass the same phases. Each phase raises its own
`RecoveryError`, which lists all problems and sets the run aside. Nothing is written before the code is called, except a
migration and the answer of a handler, each in one commit. A crash in any phase therefore leaves the run as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import (
    RECOVERY_PHASES,
    CheckpointCorrupt,
    DefinitionError,
    HandlerFailed,
    KeepstepError,
    LoadFailed,
    NotSerializable,
    RebuildFailed,
    RecoveryError,
    SchemaMismatch,
    StoreError,
)
from ..model import Kind, Signal, Status
from ..model.text import one_line
from ..model.undo import AT_END
from ..policies import Recovery, SetAside
from ..policies.recovery import HANDLERS
from ..ports import CURRENT, Advance, Answer, Verdict
from ..records.data import Data, RecoveredData, data_of, new_data
from ..records.record import FORMAT_WITH_UNDO, Record, check_origin
from ..stores.rules import ENDED
from ..values.large import is_large_text
from ..workflows.recovery import handler_named
from .calls import Branch, contained
from .hooks import tell_of_beginning, within
from .log import Draft, RecoveryPlan
from .progress import record_advance, take_over
from .replay import History, as_ended, newest_state, read_history
from .steering import DEADLINE, Control
from .stop import DETACHED, FINISHING, Order
from .strands import RunTask
from .versions import Objection, accepted, before, judge, write_first
from .wakeups import receive

if TYPE_CHECKING:
    from .driver import RunDriver

log = logging.getLogger("keepstep")

#: The policy of a workflow without `recovery=`, whose answer needs no record.
_CONTINUE = Recovery()


async def recover(run: RunDriver) -> None:
    """Take up a claimed run: pass the five phases, or set the run aside with the problems of the phase that failed."""
    phase = "load"
    try:
        async with _time_limit(run):
            if not await load(run):
                return
        phase = "validate"
        async with _time_limit(run):
            migration = await validate(run)
        phase = "rebuild"
        if not await rebuild(run, migration):
            return
        phase = "handler"
        async with _time_limit(run):
            answer, plan = await resolve_handler(run)
        if answer is not None and not await _carry_out(run, answer, plan):
            return
        phase = "resume"
        await resume(run, is_answered=answer is not None)
    except RecoveryError as error:
        _leave_to_person(run, error)
    except (CheckpointCorrupt, SchemaMismatch) as error:
        await _cannot_be_read(run, error)
    except StoreError as error:
        run.halt(error)
    except TimeoutError:
        seconds = _policy(run).timeout_seconds
        late = f"the recovery took longer than {seconds:g} s in its phase {phase!r} (timeout of recovery=)"
        _leave_to_person(run, RECOVERY_PHASES[phase](late, kind="RecoveryTimedOut"))
    except Exception as error:
        log.exception("run %s cannot be taken up", run.id)
        failed = RebuildFailed(f"the run cannot be taken up: {error}", kind=type(error).__name__)
        _leave_to_person(run, failed)


def _leave_to_person(run: RunDriver, error: RecoveryError) -> None:
    run.host.set_aside(run, error.kind, str(error), phase=error.phase, problems=error.problems)


async def _cannot_be_read(run: RunDriver, error: CheckpointCorrupt | SchemaMismatch) -> None:
    """Set aside a run whose records cannot be read, unless another owner or a newer Keepstep has written them."""
    if not await _is_mine(run):  # it did not match the claim, because another owner has written since
        run.detach("its lease was lost")
    elif isinstance(error, SchemaMismatch) and await _is_newer(run):
        run.detach("it is left to workers of a newer version")
        await run.host.put_back(run.claim, error)
    else:
        _leave_to_person(run, LoadFailed(str(error), kind=type(error).__name__))


async def _is_mine(run: RunDriver) -> bool:
    """Whether the store still knows this incarnation as the owner; if unknown, the next write decides."""
    try:
        stored = await run.host.stored_run(run.id)
    except StoreError:
        return True
    return stored is None or stored.epoch == run.epoch


async def _is_newer(run: RunDriver) -> bool:
    """Whether a newer Keepstep has gone on with the run, so that its workers can drive it again."""
    try:
        return await run.host.is_newer(run.run)
    except CheckpointCorrupt as error:
        return isinstance(error, SchemaMismatch)


def _time_limit(run: RunDriver) -> asyncio.Timeout:
    """Return the limit on a phase of a recovery. A first start and a wake-up have none."""
    is_recovery = run.claim.taken_from is not None or run.run.recoveries or request_of(run) is not None
    return asyncio.timeout_at(run.entered_at + _policy(run).timeout_seconds if is_recovery else None)


def _policy(run: RunDriver) -> Recovery:
    return run.workflow.recovery or _CONTINUE


def request_of(run: RunDriver) -> Record | None:
    """Return the record with which a person asks for a recovery that no handler has answered yet."""
    return None if run.history is None else run.history.recoveries.request


# -- load --------------------------------------------------------------------------------------------------------------


async def load(run: RunDriver) -> bool:
    """Read and verify the records of the run, and what its steps had saved. Return False if the run has ended.

    A run that has killed its workers too often is not read: reading it may be the cause.
    """
    problem = _problem_of_head(run)
    if problem and not (_is_past_limit(run) and run.claim.left):
        if await _goes_back(run, (await as_ended(run.host, run.run)).status):
            return False
        raise _failure([problem, *await _changes(run)])
    if run.run.seq:
        await load_history(run)
        if await _goes_back(run, None if run.history is None else run.history.ended_as):
            return False
    else:
        check_origin(run.run)
        take_over(run)
    return True


async def load_history(run: RunDriver) -> None:
    """Read the history of the run, from its newest whole state on if it has one, and what its steps had saved."""
    stored, host = run.run, run.host
    try:
        base = await newest_state(host, stored) if run.carries_state else None
        history = await read_history(host, stored, History(stored, 0 if base is None else base - 1))
    except CheckpointCorrupt as error:
        if not run.carries_state:
            raise
        first = max(stored.kept_from - 1, 0)
        history = await read_history(host, stored, History(stored, first, without_states=True))
        log.warning("run %s: a consolidated state is damaged and was derived again: %s", run.id, error)
        host.events.observe("state.rebuilt", run, error=str(error))
    run.loaded(history, base or 1)
    take_over(run)
    host.events.observe("run.loaded", run, step=history.newest_step)


async def _goes_back(run: RunDriver, ended_as: Status | None) -> bool:
    """Return a run to its end if a command took its lease and then failed without a record.

    Driven again, it could end differently, or repeat unrecorded steps of a completed run.
    """
    if ended_as not in ENDED:
        return False
    change = Advance(run.id, run.worker, run.epoch, run.seq, status=ended_as, release=True)
    change.progress = False
    run.detach("it had ended")
    with contextlib.suppress(StoreError):
        if (await run.host.journal.write(change)).verdict is Verdict.DONE:
            run.host.notify_waiters()
            return True
    run.host.give_back_later(run)
    return True


# -- validate ----------------------------------------------------------------------------------------------------------


async def validate(run: RunDriver) -> list[Record] | None:
    """Check that the run may go on with the loaded code. Return the records that make it fit, if it needs any.

    All problems are found before one is reported. A person may let the run go on in spite of them.
    """
    problem = _problem_of_head(run)
    problems = [problem] if problem and not run.progress.advanced() else []
    verdict: Objection | list[Record] | None = None
    if run.run.fingerprint != run.workflow.fingerprint and run.run.seq > 1:
        verdict = await judge(run)
        if isinstance(verdict, Objection):
            problems.append(verdict)
    if not problems:
        return verdict if isinstance(verdict, list) else None
    request = request_of(run)
    if request is None or not data_of(request, RecoveredData).get("skip_validation"):
        raise _failure(problems)
    found = "; ".join(one.reason for one in problems)
    log.warning("run %s goes on unvalidated, as a person has asked: %s", run.id, one_line(found))
    return accepted(run) if isinstance(verdict, Objection) else verdict


def _problem_of_head(run: RunDriver) -> Objection | None:
    """Return the problem that the row of the run shows by itself, or None."""
    if run.run.workflow != run.workflow.name:
        named = f"its row names workflow {run.run.workflow!r}, but it was claimed for another"
        return Objection("CheckpointCorrupt", named)
    decision = run.host.recovery_limit.decide(run.run.recoveries)
    return Objection("RecoveryLimit", decision.reason) if isinstance(decision, SetAside) else None


async def _changes(run: RunDriver) -> list[Objection]:
    """Return the objection to a changed definition that needs no history, for a run that is not read."""
    policy = run.workflow
    if (
        run.run.fingerprint == policy.fingerprint
        or run.run.seq <= 1
        or policy.migrate
        or policy.on_change == "compatible"
    ):
        return []
    with contextlib.suppress(StoreError):
        verdict = await judge(run)
        return [verdict] if isinstance(verdict, Objection) else []
    return []


def _is_past_limit(run: RunDriver) -> bool:
    """Whether only a newly saved value of a step keeps the run from being set aside."""
    return isinstance(run.host.recovery_limit.decide(run.run.recoveries), SetAside)


def _failure(problems: Sequence[Objection]) -> RecoveryError:
    """Return the error of the phase that the first problem belongs to, with all of them."""
    first, reasons = problems[0], [one.reason for one in problems]
    text = first.reason
    if len(problems) > 1:
        text = "\n".join([f"{len(problems)} problems:", *(f"- {one}" for one in reasons)])
    return RECOVERY_PHASES[first.phase](text, reasons, first.kind)


# -- rebuild -----------------------------------------------------------------------------------------------------------


async def rebuild(run: RunDriver, migration: list[Record] | None) -> bool:
    """Make the state of the run fit the loaded code, and restore its input. Return False if the lease is lost."""
    if migration is not None:
        if not await write_first(run, migration):
            run.detach("its lease was lost")
            return False
        await load_history(run)
    is_changed = run.run.fingerprint != run.workflow.fingerprint and run.run.seq > 1
    if is_changed and getattr(run.workflow, "keep", "all") == "newest":
        run.made_to_fit(msgspec.structs.asdict(await before(run.host, run.run)))
    await read_large_input(run)
    return True


async def read_large_input(run: RunDriver) -> None:
    """Decode and convert a large input off the loop, before the code is called with it."""
    if is_large_text(run.run.input):
        with contextlib.suppress(Exception):  # raised again when the code is called
            run.input_read(await run.host.off_loop(_arguments_of, run))


def _arguments_of(run: RunDriver) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the code: the stored ones, which may be older than the annotations."""
    stored_run, workflow = run.run, run.workflow
    where = f"workflow {stored_run.workflow!r}: input"
    stored = workflow.values.decode(run.host.encryption.input(stored_run), where)
    if not (isinstance(stored, list) and [type(part) for part in stored] == [list, dict]):
        raise NotSerializable("the stored input does not hold the arguments of a call")
    if not run.typed:
        return stored[0], stored[1]
    try:
        return workflow.types.arguments(*stored)
    except DefinitionError as error:
        raise DefinitionError(
            f"{error}. Let the annotation accept the stored value and retry the run, or fork the run with an "
            "input that fits"
        ) from None


# -- resolve handler ---------------------------------------------------------------------------------------------------


async def resolve_handler(run: RunDriver) -> tuple[Recovery | None, RecoveryPlan]:
    """Ask the recovery handler of the run how it goes on. Return its answer, and the records of the answer.

    A handler is asked once after each take-over from a dead owner, or if a person asks for a recovery.
    """
    chosen = _chosen(run)
    if chosen is None:
        return None, RecoveryPlan()
    answer = await _answer_of(run, chosen)
    if answer.handler == "set aside":
        return answer, RecoveryPlan()
    try:
        plan = await run.host.plan_recovery(run, answer)
        plan.records.insert(0, _answered(run, answer, plan))
        return answer, plan
    except (StoreError, RecoveryError):
        raise
    except KeepstepError as error:
        raise HandlerFailed(f"the recovery handler answered {answer.name!r}, which is refused: {error}") from None


def _chosen(run: RunDriver) -> Recovery | None:
    """Return the policy whose handler is to be asked; None if the run goes on without a question."""
    request = request_of(run)
    if run.stop.is_dry:
        return None
    if request is None:
        answered = None if run.history is None else run.history.recoveries.answered
        if not run.run.recoveries or answered == run.run.recoveries:
            return None
        return run.workflow.recovery
    data = data_of(request, RecoveredData)
    if "handler" not in data:
        return _policy(run)
    value = None
    if request.value is not msgspec.UNSET:
        value = run.workflow.reach.decode(request.raw(), f"run {run.id!r}: the value for a skipped step")
    return Recovery(data["handler"], step=data.get("skips", ""), value=value, reason=data.get("reason", ""))


async def _answer_of(run: RunDriver, chosen: Recovery) -> Recovery:
    """Return a policy with a built-in handler: the chosen one, or the answer of a function."""
    handler = chosen.handler
    if isinstance(handler, str):
        if handler in HANDLERS:
            return chosen
        handler = handler_named(handler)
    info = await run.host.recovery_info(run, chosen.name)
    try:
        answer = await within(run.host, None, handler, info)
    except StoreError:
        raise
    except Exception as error:
        raise HandlerFailed(f"recovery handler {chosen.name!r} failed: {type(error).__name__}: {error}") from error
    given = Recovery(answer) if isinstance(answer, str) and answer in HANDLERS else answer
    if isinstance(given, Recovery) and given.handler in HANDLERS:
        return given
    raise HandlerFailed(
        f"recovery handler {chosen.name!r} answered {answer!r}; it must answer with one of {', '.join(HANDLERS)}, or a "
        "ks.Recovery(...) with one"
    )


async def _carry_out(run: RunDriver, answer: Recovery, plan: RecoveryPlan) -> bool:
    """Record the answer and its effect in one commit, as no progress. Return False if the run does not go on here."""
    if answer.handler == "set aside":
        reason = answer.reason or "its recovery handler set it aside"
        run.host.set_aside(run, "SetAside", reason, phase="handler", handler=answer.name)
        return False
    records = plan.records if run.seq else [_first_record(run), *plan.records]
    if not await write_first(run, records, plan.sends):
        run.detach("its lease was lost")
        return False
    for record in records:
        run.host.events.emit_record(run, record)
    await load_history(run)
    return True


def _answered(run: RunDriver, answer: Recovery, plan: RecoveryPlan) -> Record:
    """Return the record of an answer. A skipped step gets the value of the record as its result."""
    data = new_data(RecoveredData, epoch=run.epoch, recoveries=run.run.recoveries, handler=answer.name)
    if run.claim.taken_from is not None:
        data["from"] = run.claim.taken_from
    if answer.reason:
        data["reason"] = run.host.redaction.redact(answer.reason)
    record = Record(run.id, Kind.RECOVERED.value, worker=run.worker, trigger="recovery", data=data)
    record.format = FORMAT_WITH_UNDO
    if plan.skips:
        data["skips"] = plan.skips
        record.value = msgspec.Raw(run.workflow.reach.encode(answer.value, f"the value for step {plan.skips!r}"))
        run.host.redaction.check(bytes(record.value), plan.skips)
    return record


# -- resume ------------------------------------------------------------------------------------------------------------


async def resume(run: RunDriver, *, is_answered: bool = False) -> None:
    """Read the signals of the run, and call its code, which the history answers up to where it was.

    After refused records or too many crashes, the code is called only when a record of this run has been written.
    A lease that recorded nothing and was handed back leaves a gap in the recorded leases. Its bodies may have been
    performed, and leases that can record nothing would perform them again and again.
    """
    if run.run.signals or is_answered:
        await _take_signals(run)
    last = 0 if run.history is None else run.history.last_epoch
    if last is not None and run.claim.before is Status.QUEUED and run.claim.taken_from is None:
        run.count_unrecorded(last)
    is_past_limit = _is_past_limit(run)
    if not run.unrecorded and not run.host.journal.refused and not is_past_limit:
        begin(run, is_answered=is_answered)
        return

    def begin_soon(_: Answer) -> None:
        run.host.loop.call_soon(partial(begin, run, is_answered=is_answered), context=run.host.context)

    if is_past_limit:
        if not run.seq:
            run.ride(Draft(_first_record(run)))
        record_advance(run, begin_soon)
        return
    if run.seq:
        data = new_data(RecoveredData, epoch=run.epoch, unrecorded=run.unrecorded)
        record = Record(run.id, Kind.RECOVERED.value, worker=run.worker, trigger="recovery", data=data)
        record.finished_at = run.time()
    else:
        record = _first_record(run)
    run.append(record, then=begin_soon)


async def _take_signals(run: RunDriver) -> None:
    signals: list[Signal] = []
    run.inbox.begin_after(max(run.run.signals_from - 1, 0))
    while True:
        page = await run.host.signals(run.id, signals[-1].seq if signals else 0)
        if not page:
            break
        signals.extend(page)
    receive(run, signals)


def _first_record(run: RunDriver) -> Record:
    """Return the first record of a run, whose time is `ks.now()` from then on."""
    record = run.host.runner.started(run.id, run.workflow, run.worker, run.time())
    run.set_now(record.finished_at)
    return record


def begin(run: RunDriver, *, is_answered: bool = False) -> None:
    """Call the code; all that it needs is in memory. A run that was created with its lease begins here."""
    if run.stop.detached:
        return
    host, stored = run.host, run.run
    if host.forgetting is not None:
        host.forgetting.begins(run)
    if run.seq == 0:
        record = _first_record(run)
        run.spent.add(record)
        run.ride(Draft(record))
    if run.claim.taken_from is not None:
        if not is_answered:  # otherwise the record of the answer tells about the take-over
            data: Data = {"from": run.claim.taken_from, "epoch": run.epoch, "recoveries": stored.recoveries}
            record = Record(run.id, Kind.RECOVERED.value, worker=run.worker, trigger="recovery", data=data)
            record.finished_at = run.time()
            run.ride(Draft(record))
        host.events.observe("run.recovering", run, taken_from=run.claim.taken_from)
        host.events.repeat(run)
    else:
        host.events.observe("run.started", run)
    # The clean-up after the deadline is not limited by it, nor is an undo.
    passed = run.history is not None and not run.history.entries.keys().isdisjoint((DEADLINE, AT_END))
    if run.deadline_at is not None and not passed:
        _arm_deadline(run)
    try:
        args, kwargs = _arguments_of(run) if run.arguments is None else run.arguments
    except KeepstepError as error:
        text = f"the run's input cannot be restored: {error}"
        _leave_to_person(run, RebuildFailed(text, kind=type(error).__name__))
        return
    if run.stop.is_cancelled and run.history is None:
        _end_unbegun(run)
        return
    first = partial(tell_of_beginning, run) if run.workflow.hooks and _is_new(run) else None
    task_context = copy_context()
    branch = Branch(run, "")
    task_context.run(CURRENT.set, branch)
    code = contained(run, args, kwargs, first)
    main = RunTask(code, branch, loop=host.loop, context=task_context, name=f"run {run.id}")
    run.begun(main)
    main.add_done_callback(partial(host.runner.code_ended, run), context=host.context)
    run.watch()
    host.signal_reader.begun(run)


def _end_unbegun(run: RunDriver) -> None:
    """End a run that was cancelled before it began, without calling its code."""
    main = run.host.loop.create_future()
    run.begun(main)
    main.add_done_callback(partial(run.host.runner.code_ended, run), context=run.host.context)
    main.cancel()


def _is_new(run: RunDriver) -> bool:
    """Whether nothing of the run's code is recorded yet."""
    history = run.history
    return history is None or not (history.entries or history.tried or history.marks or history.position)


def _arm_deadline(run: RunDriver) -> None:
    deadline = run.deadline_at
    if deadline is None:
        return
    delay = deadline.timestamp() - run.host.clock.now()
    if delay <= 0:
        _deadline(run)
        return
    run.set_timer(min(delay, 86_400.0), _deadline, run)


def _deadline(run: RunDriver) -> None:
    stop = run.stop
    if stop.deadline is not Order.NONE or stop.phase in (FINISHING, DETACHED) or run.deadline_at is None:
        return
    if run.host.clock.now() < run.deadline_at.timestamp():
        _arm_deadline(run)
        return
    stop.deadline_passed()
    record = Record(run.id, Kind.TIMER.value, step=DEADLINE, worker=run.worker)
    record.finished_at = run.time()
    run.append(record, Control(run))
