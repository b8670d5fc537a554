"""Recorded failures as exceptions, raised in the code live as on replay."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import BodyLost, BreakerOpen, BudgetExceeded, StepError, StepFailed, StepInDoubt, StepTimedOut, TimedOut
from ..model import ErrorInfo
from ..model.frames import add_frames, add_note
from .ledger import BUDGET

if TYPE_CHECKING:
    from ..records.record import Record
    from ..values import Values

#: Codes of the engine's own errors, by the classes that workflow code may catch.
TIMED_OUT = "ks:timed-out"
BREAKER_OPEN = "ks:breaker-open"
_ERRORS: dict[str, type[StepError]] = {
    "ks:step-timed-out": StepTimedOut,
    "ks:body-lost": BodyLost,
    "ks:in-doubt": StepInDoubt,
    BUDGET: BudgetExceeded,
    BREAKER_OPEN: BreakerOpen,
}


def recorded_error(record: Record, values: Values | None = None) -> BaseException:
    """Return the exception that a recorded failure raises in the code, with the frames of the user's code as a note.

    A class that was registered when the step failed comes back as itself, if `values` are given to read it with.
    """
    error = record.error
    if error is None:
        return StepFailed(_after(record), record.step, None, record.seq)
    info = error.info()
    if info.code == TIMED_OUT:
        return TimedOut(info.message, record.run)
    kind = _ERRORS.get(info.code or "")
    raised: BaseException
    if kind is not None:
        raised = kind(info.message, record.step, info, record.seq)
    elif values is not None and record.value is not msgspec.UNSET:
        raised = own_error(record.raw(), values, record.step)
        add_note(raised, _after(record))
    else:
        raised = StepFailed(f"{_after(record)}: {info.summary}", record.step, info, record.seq)
    add_frames(raised, info.frames)
    return raised


def _after(record: Record) -> str:
    return f"step {record.step!r} failed after {record.attempt} attempt{'s' * (record.attempt != 1)}"


def own_error(data: bytes, values: Values, where: str) -> BaseException:
    """Return an exception of a registered class, with its causes, from the value of a failure's record."""
    chain: list[BaseException] = [
        part if isinstance(part, BaseException) else _cause(part, where) for part in values.decode(data, where)
    ]
    for error, cause in pairwise(chain):
        error.__cause__ = cause
    return chain[0]


def _cause(part: dict[str, Any], where: str) -> StepFailed:
    """Return a cause whose class is not registered: its type and its message."""
    info = ErrorInfo(str(part["type"]), str(part["message"]))
    return StepFailed(info.summary, where, info)
