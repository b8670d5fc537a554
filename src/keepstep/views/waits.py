"""The waits of a run, and the possible actions of a person."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from ..model import Run, Status, WorkerInfo
from ..model.lease import versions_instead
from ..model.run import handed_over
from ..model.signal import callback_of
from ..model.undo import UNDONE, waits_for_answer
from ..model.wakes import Wakes, sorted_wakes


class WaitKind(StrEnum):
    """The kind of event that moves a waiting run on."""

    RETRY = "retry"  # a person retries or cancels the run, which is set aside
    RESUME = "resume"  # a person resumes the run, which is paused
    WORKER = "worker"
    SIGNAL = "signal"
    CHILD = "child"
    VERDICT = "verdict"  # a person resolves a step in doubt
    READINESS = "readiness"  # a step's `ready=` function
    SERVICE = "service"  # a place at a service
    BREAKPOINT = "breakpoint"
    REPLY = "reply"  # another run replies to a question
    MESSAGE = "message"  # the next message of a topic
    ROOM = "room"  # subscribers of a topic read
    BARRIER = "barrier"  # the other parties of a barrier arrive
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that moves a run on.

    `name` is the signal, the key of the child's call or of the step, the breakpoint, the question, the topic or the
    barrier. `until` is the instant of a `TIME`; of a `WORKER`, it is when the run may be taken again, because a
    worker has given it back. `version` is the version that a `WORKER` must have of the workflow `name`, if the
    living ones have only the `versions` instead. `why` is the limit of a `SERVICE` that had no room: `concurrency`,
    `rate`, `spend` or `breaker`. Of a `WORKER`, it tells why nobody claims the run from its `queue`: `unserved`,
    `stopped`, `concurrency`, `per_key` or `rate`.
    """

    kind: WaitKind
    name: str = ""
    until: datetime | None = None
    version: str = ""
    versions: tuple[str, ...] = ()
    why: str = ""
    queue: str = ""


def with_version(wait: Wait, run: Run, workers: Iterable[WorkerInfo]) -> Wait:
    """Return a wait for a worker with the version that it must have, if the living workers have others."""
    instead = versions_instead(workers, run.workflow, run.version) if wait.kind is WaitKind.WORKER else ()
    return replace(wait, name=run.workflow, version=run.version, versions=instead) if instead else wait


def waits_of(run: Run, now: datetime) -> tuple[Wait, ...]:
    """Return everything that a run waits for, each of which moves it on; nothing for a driven or finished run."""
    until = run.due_at if run.due_at is not None and run.due_at > now else None
    match run.status:
        case Status.SET_ASIDE:
            return (Wait(WaitKind.RETRY),)
        case Status.PAUSED:
            return (Wait(WaitKind.RESUME),)
        case Status.QUEUED if until is not None and not run.epoch:  # started with a delay
            return (Wait(WaitKind.TIME, until=until),)
        case Status.QUEUED:
            return (Wait(WaitKind.WORKER, until=until),)
        case Status.WAITING if run.due_at is not None and until is None:
            return (Wait(WaitKind.WORKER),)
        case Status.WAITING:
            time = (Wait(WaitKind.TIME, until=until),) if until is not None else ()
            return (*_named(sorted_wakes(run.wakes)), *time)
        case _:
            return ()


def _named(wakes: Wakes) -> Iterable[Wait]:
    for kind, names in (
        (WaitKind.SIGNAL, wakes.signals),
        (WaitKind.CHILD, wakes.children),
        (WaitKind.VERDICT, wakes.in_doubt),
        (WaitKind.READINESS, wakes.not_ready),
        (WaitKind.BREAKPOINT, wakes.breakpoints),
        (WaitKind.REPLY, wakes.replies),
        (WaitKind.MESSAGE, wakes.messages),
        (WaitKind.ROOM, wakes.rooms),
        (WaitKind.BARRIER, wakes.barriers),
    ):
        yield from (Wait(kind, name) for name in names)
    yield from (Wait(WaitKind.SERVICE, name, why=why) for name, why in wakes.services)


def is_due(waits: Iterable[Wait]) -> bool:
    """Whether a worker could claim the run now."""
    return any(wait.kind is WaitKind.WORKER and wait.until is None for wait in waits)


def doubts_called(run: Run, step: str) -> tuple[str, ...]:
    """Return the keys of the steps in doubt that a person may mean: by key, by key without `#1`, or by name."""

    def names(key: str) -> tuple[str, ...]:
        return key, key.removesuffix("#1"), key.rpartition("/")[2].partition("#")[0]

    return tuple(key for key in sorted_wakes(run.wakes).in_doubt if step in names(key))


# -- what can be done --------------------------------------------------------------------------------------------------


class Act(StrEnum):
    """An action of a person on a run, named after its command."""

    APPROVE = "approve"
    SIGNAL = "signal"  # answer a callback without its token
    RESOLVE = "resolve"
    RESUME = "resume"
    RETRY = "retry"
    SKIP = "skip"
    EDIT = "edit"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Action:
    """A possible action on a run. `name` is the signal to send, or the key of the step to resolve."""

    act: Act
    run: str
    name: str = ""


def _answering(signal: str) -> Act:
    return Act.APPROVE if callback_of(signal) is None else Act.SIGNAL


def actions_for(run: Run, now: datetime) -> tuple[Action, ...]:
    """Return the possible actions on a run, most specific first."""
    wakes, due = sorted_wakes(run.wakes), is_due(waits_of(run, now))
    found = []
    if not due:  # else somebody has answered
        found = [Action(_answering(name), run.id, name) for name in wakes.signals]
        found += [Action(Act.RESOLVE, run.id, step) for step in wakes.in_doubt]
    if run.status is Status.PAUSED or (wakes.breakpoints and not due):
        found.append(Action(Act.RESUME, run.id))
    is_undone = run.error is not None and run.error.code == UNDONE
    if run.status in (Status.FAILED, Status.SET_ASIDE) and not handed_over(run) and not is_undone:
        found.append(Action(Act.RETRY, run.id))
        if waits_for_answer(run):
            found.append(Action(Act.SKIP, run.id))
        if run.status is Status.FAILED and run.fingerprint.startswith("graph:"):
            found.append(Action(Act.EDIT, run.id))
    if due:
        found.append(Action(Act.WORKER, run.id))
    return tuple(found)
