"""Why a run stands where it does: its failure, its waits, what holds it up, and what a retry or a recovery would do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ..errors import KeepstepError, StoreError
from ..history.commands import RETRIABLE
from ..history.recovery import RECOVERABLE, recovery_info
from ..history.retry import plan_retry
from ..history.rewind import rewind
from ..kernel.replay import Superseded, read_records
from ..model import ErrorInfo, Kind, Outcome, Run, Status, WorkerInfo
from ..model.checkpoint import ABOUT_CHILD, DID_WORK, DONE_AGAIN, ENDS_STEP, PASSES_STEP
from ..model.run import handed_over
from ..model.undo import UNDONE, is_command, waits_for_answer
from ..policies.classify import ErrorClass
from ..records.progress import maps_in
from ..records.record import checkpoint, unseal_some
from . import plain
from .commands import Command, commands_about, commands_for, explain_command
from .overview import Overview, overview_of
from .waits import Wait, WaitKind, is_due
from .wording import ago, duration, one_line, step_name, waits_in_words

if TYPE_CHECKING:
    from ..history.host import CommandHost
    from ..records.record import Record
    from ..workflows.recovery import RecoveryInfo

#: Newest records of a run that are looked through for failed attempts.
WINDOW = 1_000
#: Records of a run up to which a retry and a recovery are planned, because a plan reads all of them.
MANY_RECORDS = 10_000
#: Failed attempts of a step that are told, and names in a sentence or a list. The number of all is always told.
MOST_ATTEMPTS = 10
MOST_NAMES = 50
_IN_SENTENCE = 5
#: Time after which a due run that a living worker could take counts as held up.
OVERDUE = timedelta(minutes=1)
#: Characters of a name in a sentence.
_NAME = 100


class Turn(StrEnum):
    """The party that moves a waiting run on."""

    PERSON = "a person"
    SENDER = "whoever sends the signal"
    WORKER = "a worker"
    RUN = "another run"
    CODE = "the workflow's own condition"
    SERVICE = "a service"
    TIME = "time"


_TURNS = {
    WaitKind.RETRY: Turn.PERSON,
    WaitKind.RESUME: Turn.PERSON,
    WaitKind.VERDICT: Turn.PERSON,
    WaitKind.BREAKPOINT: Turn.PERSON,
    WaitKind.SIGNAL: Turn.SENDER,
    WaitKind.WORKER: Turn.WORKER,
    WaitKind.CHILD: Turn.RUN,
    WaitKind.REPLY: Turn.RUN,
    WaitKind.MESSAGE: Turn.RUN,
    WaitKind.ROOM: Turn.RUN,
    WaitKind.BARRIER: Turn.RUN,
    WaitKind.READINESS: Turn.CODE,
    WaitKind.SERVICE: Turn.SERVICE,
    WaitKind.TIME: Turn.TIME,
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed attempt of a step."""

    seq: int
    attempt: int
    at: datetime | None
    error: ErrorInfo | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run failed, or why a step of it is tried again.

    `step` is the key of the failed call, empty if the workflow's own code raised the error. `failures` is the number of
    its failed attempts, of which `attempts` are the newest. `retried` tells whether errors of this class are tried
    again by default, and `retry_at` when the next attempt begins. `child` is the run that failed in this call.
    """

    step: str
    error: ErrorInfo | None
    error_class: str
    retried: bool
    failures: int
    attempts: tuple[Attempt, ...]
    retry_at: datetime | None
    child: str
    text: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """One thing that a run waits for: whose turn it is, since when, and until when at most."""

    wait: Wait
    turn: Turn
    since: datetime | None
    until: datetime | None
    text: str


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason why a run does not go on by itself. `code` is for programs."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Prospect:
    """The effects that a retry or a rewind would have; nothing is written to learn them.

    `again` are calls that would be made again although they were made before, and `kept` are finished steps that would
    not run again. `cancels` are unfinished children that would be cancelled, and `retries` are failed ones that would
    be retried, too. `to` is the last record that would count after a rewind.
    """

    act: str
    possible: bool
    text: str
    command: Command
    again: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    cancels: tuple[str, ...] = ()
    retries: tuple[str, ...] = ()
    to: int | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """The effects of a recovery. `info` is None if it was not planned, because the run is too long."""

    info: RecoveryInfo | None
    text: str
    command: Command


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a run stands where it does, and what a person can do.

    `summary` is one sentence. Texts hold names of the run and no values; messages of errors are only in `failure`.
    A retry, a recovery and a rewind are None where the status does not allow them, or where nobody asked.
    """

    view: Overview
    summary: str
    failure: Failure | None
    waits: tuple[Waiting, ...]
    obstacles: tuple[Obstacle, ...]
    commands: tuple[Command, ...]
    retry: Prospect | None = None
    recovery: Recovery | None = None
    rewind: Prospect | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether something holds the run up that does not end by itself."""
        return bool(self.obstacles)


async def explain(
    host: CommandHost,
    run: Run,
    now: datetime | None = None,
    *,
    plans: bool = True,
    to: int | None = None,
    step: str | None = None,
) -> Explanation:
    """Explain a run that was just read; nothing is written.

    Without `plans`, a retry and a recovery are not planned. With `to` or `step`, also tell what a rewind would do.
    """
    now = now or datetime.now(UTC)
    view = await overview_of(host, run, now)
    workers = await host.ask(lambda store: store.list_workers())
    failure = await _failure(host, view, now)
    waits = tuple(_waiting(wait, run, now) for wait in view.waits)
    commands = _commands(view, failure)
    found = Explanation(view, "", failure, waits, tuple(_obstacles(view, workers, now)), commands)
    plans = plans and view.locked is None and view.newest is None
    return Explanation(
        view,
        _summary(found, now),
        failure,
        waits,
        found.obstacles,
        commands,
        await retrying(host, run) if plans else None,
        await _recovery(host, run, view) if plans else None,
        None if to is None and step is None else await rewinding(host, run, to=to, step=step),
    )


# -- why it failed -----------------------------------------------------------------------------------------------------

_ATTEMPTS = (*sorted(ENDS_STEP), Kind.SUPERSEDED.value)


async def _failure(host: CommandHost, view: Overview, now: datetime) -> Failure | None:
    """Return why a run failed or was set aside, or the failed attempts of a step that is tried again."""
    run = view.run
    has_ended = run.status in (Status.FAILED, Status.SET_ASIDE)
    if handed_over(run) or not (has_ended or not run.status.finished):
        return None
    try:
        failed = await _failed_attempts(host, run) if view.locked is None else []
    except StoreError:  # its history may be damaged, which may be why the run is set aside
        failed = []
    last = failed[-1] if failed else None
    if not has_ended and (last is None or last.retry_at is None):
        return None
    child = last.digest if last is not None and last.kind in ABOUT_CHILD else ""
    error = run.error
    if last is not None and last.error is not None and run.status is not Status.SET_ASIDE:
        error = checkpoint(last, "").error or error
    attempts = tuple(_attempt(one) for one in failed if one.kind == Kind.STEP_FAILED)
    step = "" if last is None else last.step
    kind = ErrorClass.of(error.error_class if error is not None else "unknown")
    retry_at = None if has_ended or last is None else last.retry_at
    text = _why_failed(run, step, kind, len(attempts), retry_at, child, now)
    shown = attempts[-MOST_ATTEMPTS:]
    return Failure(step, error, kind.value, kind.retryable, len(attempts), shown, retry_at, child, text)


async def _failed_attempts(host: CommandHost, run: Run) -> list[Record]:
    """Return the failed attempts of the call that failed last, oldest first; or the end of a child that failed it."""
    caused = max(run.error.caused_by, default=0) if run.error is not None else 0
    last = caused or run.seq
    kinds = (*_ATTEMPTS, *sorted(ABOUT_CHILD)) if caused else _ATTEMPTS
    rows = await host.records(run.id, max(last - WINDOW, 0), WINDOW, kinds)
    open_steps: dict[str, list[Record]] = {}
    for record, _ in unseal_some([row for row in rows if row.seq <= last], run.id):
        if record.seq == caused and record.kind in ABOUT_CHILD:
            return [record]
        if record.kind == Kind.SUPERSEDED:
            open_steps.clear()  # attempts before a retry or a rewind no longer count
        elif record.kind == Kind.STEP_FAILED:
            open_steps[record.step] = [*open_steps.pop(record.step, ()), record]  # the newest is last
        else:
            open_steps.pop(record.step, None)
    if not open_steps or (caused == 0 and run.status is Status.FAILED):
        return []  # the workflow's own code raised the error
    named = [records for records in open_steps.values() if caused and records[-1].seq == caused]
    return named[0] if named else list(open_steps.values())[-1]


def _attempt(record: Record) -> Attempt:
    return Attempt(record.seq, record.attempt, record.finished_at, checkpoint(record, "").error)


def _why_failed(  # noqa: PLR0917 - each is needed once
    run: Run, step: str, kind: ErrorClass, failures: int, retry_at: datetime | None, child: str, now: datetime
) -> str:
    name, times = _name(step), f"{failures} time{'' if failures == 1 else 's'}"
    if retry_at is not None:
        when = ago(retry_at, now) if retry_at > now else "now"
        return f"Step {name} has failed {times}. Its next attempt begins {when}."
    if run.status is Status.SET_ASIDE:
        about = f" The step that failed last is {name}." if step else ""
        return f"The run is set aside, because no worker can go on with it by itself.{about}"
    if child:
        return f"Its child {_name(child)}, started by {name}, did not succeed."
    if run.error is not None and run.error.code == "ks:run-timed-out":
        return "The run did not end before its deadline."
    if not step:
        return "The workflow's own code raised an error, which Keepstep does not try again."
    if not kind.retryable:
        return f"Step {name} failed {times}. Errors of the class {kind.value!r} are not tried again by default."
    return f"Step {name} failed {times} and had no attempt left. Its error is of the class {kind.value!r}."


# -- why it waits ------------------------------------------------------------------------------------------------------


def _waiting(wait: Wait, run: Run, now: datetime) -> Waiting:
    words = one_line(waits_in_words((wait,), now), 4 * _NAME)
    turn = _TURNS[wait.kind]
    until = wait.until or (run.deadline_at if wait.kind is not WaitKind.TIME else None)
    text = f"It has waited {_age(run, now)} for {words}. It is the turn of {turn.value}."
    if wait.kind is WaitKind.TIME:
        text = f"It has waited {_age(run, now)}, and goes on in {words.removesuffix(' to pass')} at the latest."
    return Waiting(wait, turn, run.updated_at or run.created_at, until, text)


def _obstacles(view: Overview, workers: Sequence[WorkerInfo], now: datetime) -> Iterable[Obstacle]:
    """Yield everything that keeps a run from going on by itself."""
    run = view.run
    if run.status.finished:
        return
    attended = [one for one in workers if one.claims and run.workflow in one.workflows]
    knows = f"workflow {_name(run.workflow)}"
    if run.status is Status.PAUSED:
        yield Obstacle("paused", "It is paused until a person resumes it.")
    elif elsewhere := handed_over(run):
        yield Obstacle("handed-over", f"It was handed over to another store: {one_line(elsewhere, 2 * _NAME)}.")
    elif run.status is Status.SET_ASIDE:
        yield Obstacle("set-aside", "It is set aside until a person retries or cancels it.")
    elif run.status.active and (view.worker is None or not view.worker.alive):
        then = "A living worker takes the run over." if attended else f"No living worker knows {knows}."
        yield Obstacle("worker-dead", f"Its worker {_name(run.worker or '')} is dead. {then}")
    for wait in view.waits:
        yield from _obstacles_of(wait, run, attended, now)
    for signal in view.refused:
        yield Obstacle("unread", f"Signal {_name(signal.name)} came, but does not fit the type of the wait.")
    for key, child in view.children:
        if child.status in (Status.SET_ASIDE, Status.PAUSED, Status.CANCELLED, Status.FAILED):
            where = f"Its child {_name(child.id)}, started by {_name(key)}, is {child.status.value}."
            yield Obstacle("child", where)


def _obstacles_of(wait: Wait, run: Run, attended: Sequence[WorkerInfo], now: datetime) -> Iterable[Obstacle]:
    if wait.kind is WaitKind.VERDICT:
        yield Obstacle("in-doubt", f"Step {_name(wait.name)} may or may not have happened. A person must tell.")
    elif wait.kind is WaitKind.BREAKPOINT:
        yield Obstacle("breakpoint", f"It stands at the breakpoint {_name(wait.name)} until a person resumes it.")
    elif wait.kind is WaitKind.SERVICE and wait.why == "breaker":
        yield Obstacle("breaker", f"The breaker of service {_name(wait.name)} is open.")
    elif wait.kind is not WaitKind.WORKER or wait.until is not None:
        return
    elif wait.versions:
        there = ", ".join(wait.versions)
        text = f"Living workers have version {there} of {_name(run.workflow)}; the run needs {_name(run.version)}."
        yield Obstacle("version", text)
    elif wait.why:
        yield Obstacle(f"queue-{wait.why.replace('_', '-')}", f"It waits for {waits_in_words((wait,), now)}.")
    elif not attended:
        yield Obstacle("no-worker", f"No living worker knows workflow {_name(run.workflow)}.")
    elif (due := run.due_at or run.updated_at or run.created_at) + OVERDUE < now:
        yield Obstacle("overdue", f"It was due {ago(due, now)}, and a living worker knows it. Ask the doctor.")


def _commands(view: Overview, failure: Failure | None) -> tuple[Command, ...]:
    """Return what a person can do, most specific first."""
    is_undone = view.run.error is not None and view.run.error.code == UNDONE
    held = [one for wait in view.waits for one in commands_about(wait)]
    queued = any(wait.kind is WaitKind.WORKER and wait.why for wait in view.waits)
    acts = [one for action in view.actions if not (queued and action.act == "worker") for one in commands_for(action)]
    children = [explain_command(child) for _, child in view.children]
    if failure is not None and failure.child:
        children.append(Command(("explain", failure.child), f"Explain {failure.child}."))
    if view.newest is not None:
        children.append(explain_command(view.newest))
    if view.run.status is Status.CANCELLED or is_undone:
        children.append(Command(("fork", view.run.id), "Start a new run with a copy of its records."))
    return tuple(dict.fromkeys([*held, *acts, *children]))


# -- in one sentence ---------------------------------------------------------------------------------------------------


def _summary(found: Explanation, now: datetime) -> str:
    view, run, failure = found.view, found.view.run, found.failure
    took = duration(((run.updated_at or run.created_at) - run.created_at).total_seconds())
    match run.status:
        case Status.COMPLETED if view.newest is not None:
            return f"The run was continued as {_name(view.newest.id)}, which is {view.newest.status.value}."
        case Status.COMPLETED:
            return f"The run completed after {took}."
        case Status.CANCELLED:
            by = f" by {_name(view.cancellation.by)}" if view.cancellation is not None else ""
            return f"The run was cancelled{by} after {took}."
        case Status.FAILED:
            return f"The run failed after {took}. {failure.text if failure is not None else ''}".strip()
        case Status.SET_ASIDE if failure is not None:
            return failure.text
        case Status.RUNNING | Status.RECOVERING if not found.obstacles:
            verb = "drives the run" if run.status is Status.RUNNING else "recovers the run"
            more = f" {failure.text}" if failure is not None else ""
            more += "".join(f" {one_line(one.text, 4 * _NAME)}." for one in maps_in(run.progress))
            return f"Worker {_name(run.worker or '')} {verb}; its newest record is {_age(run, now)} old.{more}"
        case _ if found.obstacles:
            return " ".join(dict.fromkeys(one.text for one in found.obstacles))
        case _ if failure is not None and failure.retry_at is not None:
            return failure.text
        case _:
            words = waits_in_words(view.waits, now) or "an event that it does not name"
            return f"The run has waited {_age(run, now)} for {one_line(words, 4 * _NAME)}."


def _age(run: Run, now: datetime) -> str:
    return duration((now - (run.updated_at or run.created_at)).total_seconds())


def _name(name: str) -> str:
    return one_line(step_name(name), _NAME)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(_name(one) for one in names[:_IN_SENTENCE])
    left = len(names) - _IN_SENTENCE
    return f"{shown} and {left} more" if left > 0 else shown


# -- what would happen -------------------------------------------------------------------------------------------------

_TOO_LONG = f"The run has more than {MANY_RECORDS:,} records, so this was not planned."


async def retrying(host: CommandHost, run: Run) -> Prospect | None:
    """Return what a retry would do; None for a run that cannot be retried in its status."""
    if run.status not in RETRIABLE or handed_over(run):
        return None
    command = Command(("retry", run.id), "Let it go on from just before it failed.")
    if waits_for_answer(run):
        return Prospect("retry", True, "Its failed undo steps are tried again.", command)
    if run.seq > MANY_RECORDS:
        return Prospect("retry", True, _TOO_LONG, command)
    try:
        plan = await plan_retry(host, run)
        again, kept = await _split(host, run, seqs=frozenset(plan.seqs))
    except KeepstepError as error:
        return Prospect("retry", possible=False, text=f"It cannot be retried: {error}", command=command)
    return Prospect(
        "retry",
        True,
        _effects(again, kept, plan.left),
        command,
        again,
        kept,
        tuple(plan.left),
        tuple(plan.failed),
    )


async def rewinding(host: CommandHost, run: Run, *, to: int | None = None, step: str | None = None) -> Prospect:
    """Return what a rewind of a run to a record, or to before a step, would do."""
    where = ("--to", str(to)) if to is not None else ("--step", step or "")
    command = Command(("rewind", run.id, *where), "Let it go on from there.")
    try:
        plan = await rewind(host, run.id, to=to, step=step, reason="", actor=host.actor, dry_run=True)
        _, kept = await _split(host, run, beyond=plan.to)
    except KeepstepError as error:
        return Prospect("rewind", possible=False, text=f"It cannot be rewound: {error}", command=command, to=to)
    text = f"Records after {plan.to} no longer count. {_effects(plan.again, kept, plan.children)}"
    return Prospect("rewind", True, text, command, plan.again, kept, plan.children, to=plan.to)


async def _split(
    host: CommandHost, run: Run, *, seqs: frozenset[int] = frozenset(), beyond: int | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the calls whose records would no longer count, and the finished steps whose records still would."""
    gone, records = Superseded(), list[tuple[int, str, str, bool]]()
    async for record, _ in read_records(host, run):
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
        is_done = (record.kind in PASSES_STEP or record.kind in DID_WORK) and record.outcome == Outcome.SUCCESS.value
        records.append((record.seq, record.kind, record.step, is_done))
    counting = [one for one in records if one[0] not in gone]
    left = {one[0] for one in counting if one[0] in seqs or (beyond is not None and one[0] > beyond)}
    again = dict.fromkeys(step for seq, kind, step, _ in counting if seq in left and kind in DONE_AGAIN and step)
    kept = dict.fromkeys(step for seq, _, step, done in counting if seq not in left and done and step)
    return tuple(key for key in again if not is_command(key)), tuple(key for key in kept if not is_command(key))


def _effects(again: Sequence[str], kept: Sequence[str], cancelled: Sequence[str]) -> str:
    first = f"Called again: {_names(again)}." if again else "No finished step is called again."
    number = len(kept)
    then = f"{number} finished step{'' if number == 1 else 's'} would not run again." if number else ""
    last = f"Cancelled: {_names(cancelled)}." if cancelled else ""
    return " ".join(filter(None, (first, then, last)))


async def _recovery(host: CommandHost, run: Run, view: Overview) -> Recovery | None:
    """Return what a recovery would do; None if the run has no need of one."""
    is_driven = run.status.active and view.worker is not None and view.worker.alive
    is_interrupted = run.status in RETRIABLE or (run.status.active and not is_driven)
    if run.status not in RECOVERABLE or not is_interrupted or not run.seq or handed_over(run):
        return None
    command = Command(("recover", run.id), "Let the next worker recover it.")
    if run.seq > MANY_RECORDS:
        return Recovery(None, _TOO_LONG, command)
    info = await recovery_info(host, run.id)
    if not info.recoverable:
        return Recovery(info, f"A recovery is refused: {info.why}.", command)
    words = [f"A recovery is possible: {info.why}."]
    words += [f"Next: {_names(info.next)}."] if info.next else []
    words += [f"Called again: {_names(info.again)}."] if info.again else []
    return Recovery(info, " ".join(words), command)


# -- as plain data -----------------------------------------------------------------------------------------------------


def explanation_data(found: Explanation) -> dict[str, Any]:
    """Return an explanation for a program."""
    run = found.view.run
    return {
        "run": run.id,
        "workflow": run.workflow,
        "version": run.version,
        "status": run.status.value,
        "seq": run.seq,
        "summary": found.summary,
        "stuck": found.is_stuck,
        "due": is_due(found.view.waits),
        "hidden": found.view.locked is not None,
        "failure": None if found.failure is None else failure_data(found.failure),
        "waits": [waiting_data(one) for one in found.waits],
        "obstacles": [{"code": one.code, "text": one.text} for one in found.obstacles],
        "commands": [command_data(one) for one in found.commands],
        "retry": None if found.retry is None else prospect_data(found.retry),
        "recovery": None if found.recovery is None else recovery_prospect_data(found.recovery),
        "rewind": None if found.rewind is None else prospect_data(found.rewind),
    }


def failure_data(one: Failure) -> dict[str, Any]:
    """Return a failure for a program."""
    return {
        "step": one.step or None,
        "text": one.text,
        "error": plain.error_data(one.error),
        "class": one.error_class,
        "retried": one.retried,
        "failures": one.failures,
        "attempts": [
            {
                "seq": attempt.seq,
                "attempt": attempt.attempt,
                "at": plain.iso(attempt.at),
                "error": None if attempt.error is None else attempt.error.summary,
            }
            for attempt in one.attempts
        ],
        "retry_at": plain.iso(one.retry_at),
        "child": one.child or None,
    }


def waiting_data(one: Waiting) -> dict[str, Any]:
    """Return a wait with its explanation, for a program."""
    return {
        **plain.wait_data(one.wait),
        "turn": one.turn.value,
        "since": plain.iso(one.since),
        "until": plain.iso(one.until),
        "text": one.text,
    }


def command_data(one: Command) -> dict[str, str | None]:
    """Return a command for a program."""
    return {"command": one.line(), "does": one.does, "note": one.note or None}


def prospect_data(one: Prospect) -> dict[str, Any]:
    """Return the effects of an act for a program; of many names the first ones, with their number."""
    return {
        "possible": one.possible,
        "text": one.text,
        "again": list(one.again[:MOST_NAMES]),
        "again_count": len(one.again),
        "kept": list(one.kept[-MOST_NAMES:]),
        "kept_count": len(one.kept),
        "cancels": list(one.cancels[:MOST_NAMES]),
        "retries": list(one.retries[:MOST_NAMES]),
        "to": one.to,
        "command": one.command.line(),
    }


def recovery_prospect_data(one: Recovery) -> dict[str, Any]:
    """Return what a recovery would do, for a program."""
    found = {} if one.info is None else plain.recovery_data(one.info)
    return {
        **found,
        "possible": one.info is None or one.info.recoverable,
        "text": one.text,
        "command": one.command.line(),
    }
