"""Reports whether and how a run would go on, and what prevents it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointCorrupt, KeepstepError, RunNotFound
from ..kernel.replay import History, newest_state, read_history
from ..model import Kind, Outcome, Status
from ..model.checkpoint import DID_WORK, PASSES_STEP
from ..model.wakes import sorted_wakes
from .dry_replay import replay
from .prefix import read_prefix

if TYPE_CHECKING:
    from ..model import Run
    from ..records.record import Record
    from ..workflows.definition import Workflow
    from .host import CommandHost


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The position of a run and its prospects.

    `recoverable` means that a worker with its code goes on without a person's help, now or after the awaited event.
    `why` names what the run waits for, or the obstacle. `last_success` and `failed` are keys of steps, and `error` is
    the message of the failure. `next` are the calls that a worker would begin. It is empty unless `checked`, which
    means that the loaded code was used to find them. `problems` lists everything that keeps the run from going on.
    """

    run: str
    status: Status
    recoverable: bool
    why: str
    last_success: str = ""
    failed: str = ""
    error: str = ""
    next: tuple[str, ...] = ()
    checked: bool = False
    seq: int = 0
    generation: int = 0
    recoveries: int = 0
    problems: tuple[str, ...] = ()
    #: The calls among `next` that are steps, which have a body.
    steps: tuple[str, ...] = ()


async def info(host: CommandHost, run_id: str, workflow: Workflow[..., Any] | None = None) -> RunInfo:
    """Report on a run, using its workflow's code if it is loaded."""
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    recoverable, why = _prospects(run)
    try:
        then = await read_prefix(host, run)
        records = await host.call(then.counted)
    except KeepstepError as error:
        if await _can_be_loaded(host, run):
            return RunInfo(run.id, run.status, recoverable, f"{why}; part of its history is lost: {error}", seq=run.seq)
        lost = f"its history cannot be read: {error}"
        return RunInfo(run.id, run.status, recoverable=False, why=lost, seq=run.seq, problems=(lost,))
    done = next((one.step for one in reversed(records) if _is_success(one)), "")
    failed = next((one for one in reversed(records) if one.kind == Kind.STEP_FAILED.value), None)
    if failed is not None and any(one.seq > failed.seq and one.step == failed.step for one in records):
        failed = None  # a later record of the step exists
    code = workflow or host.workflows.get(run.workflow)
    asks: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    if code is None:
        why = f"{why}; its workflow {run.workflow!r} is not loaded here"
    elif code.on_change == "pin" and code.version != run.version and not run.status.active and recoverable:
        why = f"{why}; it is pinned to version {run.version!r}, and the code here has {code.version!r}"
    elif run.status is not Status.COMPLETED and run.status is not Status.CANCELLED:
        result = await replay(host, run_id, code)
        asks, steps, problems = result.asks, result.steps, result.problems
        if result.problem:
            recoverable, why = False, f"{result.kind}: {result.problem}"
    return RunInfo(
        run.id,
        run.status,
        recoverable,
        why,
        done,
        failed.step if failed is not None else "",
        _error_text(run, failed),
        asks,
        checked=code is not None,
        seq=run.seq,
        generation=then.history.generation,
        recoveries=run.recoveries,
        problems=problems,
        steps=steps,
    )


async def _can_be_loaded(host: CommandHost, run: Run) -> bool:
    """Whether a worker could load the run: only a state, or records before a consolidated state, are damaged."""
    try:
        base = await newest_state(host, run)
        await read_history(host, run, History(run, 0 if base is None else base - 1))
    except CheckpointCorrupt:
        try:
            await read_history(host, run, History(run, max(run.kept_from - 1, 0), without_states=True))
        except CheckpointCorrupt:
            return False
    return True


def _is_success(record: Record) -> bool:
    return (record.kind in PASSES_STEP or record.kind in DID_WORK) and record.outcome == Outcome.SUCCESS.value


def _error_text(run: Run, failed: Record | None) -> str:
    if failed is not None and failed.error is not None:
        return f"{failed.error.type}: {failed.error.message}"
    return f"{run.error.type}: {run.error.message}" if run.error is not None else ""


def _prospects(run: Run) -> tuple[bool, str]:
    """Return whether a run goes on without a person, and what it waits for or why it does not."""
    status = run.status
    if status in (Status.COMPLETED, Status.CANCELLED):
        return False, f"it has ended: {status.value}"
    if status in (Status.FAILED, Status.SET_ASIDE):
        return False, f"it is {status.value}; a person may retry or rewind it"
    if status is Status.PAUSED:
        return False, "it is paused; a person may resume it"
    if status.active:
        return True, f"it is driven by {run.worker}"
    if status is Status.QUEUED:
        return True, "it waits for a worker"
    wakes = sorted_wakes(run.wakes)
    if wakes.in_doubt:
        return False, f"step {wakes.in_doubt[0]} may or may not have happened; a person must resolve it"
    if wakes.breakpoints:
        return False, f"it waits at the breakpoint {wakes.breakpoints[0]}; a person may resume it"
    awaited = [f"signal {name}" for name in wakes.signals]
    awaited += [f"its child of {name}" for name in wakes.children]
    if run.due_at is not None:
        awaited.append(f"{run.due_at:%Y-%m-%d %H:%M:%S} UTC")
    return True, f"it waits for {' or '.join(awaited) or 'an unnamed event'}"
