"""What can be said of a run that is to go on: whether it can, from where, and what stands in the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointCorrupt, KeepstepError, RunNotFound
from ..model import Kind, Outcome, Status
from ..model.signal import GO, RESERVED, RESOLVE, stop_at
from .dry import replay
from .history import History, newest_state, read_history
from .past import past

if TYPE_CHECKING:
    from ..model import Run
    from ..stores.records import Record
    from ..workflows.definition import Workflow
    from .engine import Engine

_DONE = frozenset({Kind.STEP_COMPLETED.value, Kind.BARRIER.value, Kind.CHILD.value})


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Where a run stands and how it would go on.

    `recoverable` says that a worker which knows its code goes on with it, now or when what it waits for comes, without
    a person's help; `why` says what it waits for, or why not. `last_success` and `failed` are keys of steps, `error`
    is what the failure said, `next` the calls that a worker would begin. `checked` says whether that was found out
    with the code that is loaded here; else `next` is empty.
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


async def info(engine: Engine, run_id: str, workflow: Workflow[..., Any] | None = None) -> RunInfo:
    """What is recorded of a run, read against the code that is loaded here if it is."""
    run = await engine.read(engine.store.get_run, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    recoverable, why = _stands(run)
    try:
        then = await past(engine, run)
        records = await engine.call(then.counted)
    except KeepstepError as error:
        if await _can_be_loaded(engine, run):
            return RunInfo(run.id, run.status, recoverable, f"{why}; part of its history is lost: {error}", seq=run.seq)
        return RunInfo(run.id, run.status, recoverable=False, why=f"its history cannot be read: {error}", seq=run.seq)
    done = next((one.step for one in reversed(records) if _is_success(one)), "")
    failed = next((one for one in reversed(records) if one.kind == Kind.STEP_FAILED.value), None)
    if failed is not None and any(one.seq > failed.seq and one.step == failed.step for one in records):
        failed = None  # it came right in the end
    code = workflow or engine.workflows.get(run.workflow)
    asks: tuple[str, ...] = ()
    if code is None:
        why = f"{why}; its workflow {run.workflow!r} is not known here"
    elif run.status is not Status.COMPLETED and run.status is not Status.CANCELLED:
        told = await replay(engine, run_id, code)
        asks = told.asks
        if told.problem:
            recoverable, why = False, f"{told.kind}: {told.problem}"
    return RunInfo(
        run.id,
        run.status,
        recoverable,
        why,
        done,
        failed.step if failed is not None else "",
        _said(run, failed),
        asks,
        checked=code is not None,
        seq=run.seq,
        generation=then.history.generation,
        recoveries=run.recoveries,
    )


async def _can_be_loaded(engine: Engine, run: Run) -> bool:
    """Whether only what a worker does without is damaged: what came before a consolidated state, or the state."""
    try:
        base = await newest_state(engine, run)
        await read_history(engine, run, History(run, 0 if base is None else base - 1))
    except CheckpointCorrupt:
        try:
            await read_history(engine, run, History(run, without_states=True))
        except CheckpointCorrupt:
            return False
    return True


def _is_success(record: Record) -> bool:
    return record.kind in _DONE and record.outcome == Outcome.SUCCESS.value


def _said(run: Run, failed: Record | None) -> str:
    if failed is not None and failed.error is not None:
        return f"{failed.error.type}: {failed.error.message}"
    return f"{run.error.type}: {run.error.message}" if run.error is not None else ""


def _stands(run: Run) -> tuple[bool, str]:
    """Whether a run goes on without a person, and what it waits for, or why not."""
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
    doubts = [name.removeprefix(f"{RESOLVE}:") for name in run.wakes if name.startswith(f"{RESOLVE}:")]
    if doubts:
        return False, f"step {doubts[0]} may or may not have happened; a person must resolve it"
    stops = [stop_at(name) for name in run.wakes if name.startswith(GO)]
    if stops:
        return False, f"it waits at the breakpoint {stops[0]}; a person may resume it"
    waits = [name for name in run.wakes if not name.startswith(RESERVED)]
    told = [f"signal {name}" for name in waits]
    told += [f"its child of {name.removeprefix('ks:child:')}" for name in run.wakes if name.startswith("ks:child:")]
    if run.due_at is not None:
        told.append(f"{run.due_at:%Y-%m-%d %H:%M:%S} UTC")
    return True, f"it waits for {' or '.join(told) or 'nothing that is named'}"
