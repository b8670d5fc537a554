"""Completes the exceptions that `result()` raises: causes, frames of the user's code, and the command that goes on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..errors import KeepstepError, RunFailed, RunSetAside
from ..history.go_on import retry_command
from ..kernel.children import root_in
from ..kernel.recorded_errors import own_error, recorded_error
from ..model import ErrorInfo, Kind
from ..model.checkpoint import ABOUT_CHILD
from ..model.frames import add_frames, add_note
from ..model.undo import AT_END, UNDONE, is_command, is_undo
from ..records.record import unseal

if TYPE_CHECKING:
    from ..records.record import Record
    from ..values import Values
    from .process import Process

E = TypeVar("E", bound=RunFailed | RunSetAside)

#: Newest records of a failed run that are read to find out whether it has undone its steps.
_NEWEST = 50


async def explained(engine: Process, failed: E, values: Values) -> E:
    """Return the error of a run with its cause and its notes."""
    error = failed.error
    if error is None or error.type == "Copy":  # the run was handed over, and goes on elsewhere
        return failed
    if isinstance(failed, RunFailed) and failed.__cause__ is None:
        failed.__cause__ = await _raised(engine, failed.run_id, values)
    if isinstance(failed, RunFailed) and error.is_wrapper and error.caused_by:
        failed.root = await _root(engine, failed.run_id, error.caused_by[0]) or error
    add_frames(failed, error.frames)
    command = retry_command(failed.run_id, engine.url)
    if isinstance(failed, RunFailed):
        failed.undone = error.code == UNDONE or await _has_undone(engine, failed.run_id)
    if command and not getattr(failed, "undone", False):
        add_note(failed, f"when the cause is mended, let the run go on: {command}")
    return failed


async def _has_undone(engine: Process, run_id: str) -> bool:
    """Whether a failed run has undone its steps at its end; the newest records tell, because nothing else follows."""
    with contextlib.suppress(KeepstepError):  # the failure of the run is reported in any case
        run = await engine.stored_run(run_id)
        first = 0 if run is None else max(run.seq - _NEWEST, 0)
        rows = await engine.read(engine.store.list_checkpoints, run_id, first, _NEWEST)
        records = [record for record, _ in unseal(rows, run_id, first)]
        changed = max((number for number, one in enumerate(records, 1) if one.kind == Kind.SUPERSEDED), default=0)
        keys = [one.step for one in records[changed:-1] if not is_command(one.step)]
        return AT_END in keys or (first > 0 and bool(keys) and all(map(is_undo, keys)))
    return False


async def record_at(engine: Process, run_id: str, seq: int) -> Record | None:
    """Return one record of a run; None if there is none."""
    rows = await engine.read(engine.store.list_checkpoints, run_id, max(seq - 1, 0), 1)
    return next((record for record, _ in unseal(rows, run_id, seq - 1)), None) if rows else None


async def step_failure(engine: Process, run_id: str, seq: int, values: Values) -> BaseException | None:
    """Return the failure of the step that a record holds; of its own class, if that is registered here."""
    record = await record_at(engine, run_id, seq)
    if record is None:
        return None
    try:
        return recorded_error(record, values)
    except KeepstepError:  # its class is not registered in this process
        return recorded_error(record)


async def _root(engine: Process, run_id: str, seq: int) -> ErrorInfo | None:
    """Return the error behind the failure that a record holds: of a step, or of a child."""
    record = await record_at(engine, run_id, seq)
    if record is None or record.error is not None:
        return None if record is None or record.error is None else record.error.info()
    return root_in(record.raw()) if record.kind in ABOUT_CHILD else None


async def _raised(engine: Process, run_id: str, values: Values) -> BaseException | None:
    """Return the exception of a registered class that the run's code raised; None for other classes."""
    run = await engine.stored_run(run_id)
    record = None if run is None else await record_at(engine, run_id, run.seq)
    if record is None or record.value is msgspec.UNSET or record.error is None:
        return None
    try:
        return own_error(record.raw(), values, f"run {run_id!r}")
    except KeepstepError:  # its class is not registered in this process
        return None
