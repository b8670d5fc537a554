"""Finds the outcome that failed a run: the earliest one that its error goes back to."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import StepError

if TYPE_CHECKING:
    from .driver import RunDriver

#: Attribute of an exception: the run, its epoch, and the outcome last delivered to the code when it was raised.
_RAISED = "__keepstep_raised__"
#: Attribute of an exception that an outcome raised in the code: the number of that outcome.
_SEQ = "__keepstep_seq__"


def mark_outcome(error: BaseException, seq: int) -> None:
    """Note which outcome an exception stands for."""
    error.__dict__[_SEQ] = seq  # an exception may be a frozen dataclass


def mark_raised(run: RunDriver, error: BaseException) -> None:
    """Note the last delivered outcome when an exception is first seen; later sightings change nothing."""
    known = getattr(error, _RAISED, None)
    if known is None or known[:2] != (run.id, run.epoch):
        setattr(error, _RAISED, (run.id, run.epoch, run.last_delivered))


def mark_interrupted(run: RunDriver, error: BaseException) -> None:
    """Note that the code has cancelled its handling of a failure, so the failure is not handled."""
    if outcomes := caused_by(error):
        run.handling_interrupted(outcomes)


def caused_by(error: BaseException | None) -> tuple[int, ...]:
    """Return the outcomes that an error goes back to, in order: through its causes, contexts and parts."""
    return tuple(sorted({seq for one in _tree(error) if (seq := _outcome(one))}))


def failed_by(run: RunDriver, error: BaseException) -> tuple[int, tuple[int, ...]]:
    """Return the outcome that failed a run, and all outcomes to try again.

    These are the outcomes that the error goes back to, and those that the code was still handling when the run failed.
    """
    outcomes = caused_by(error)
    point = _failed_at(run, error, outcomes)
    if not has_own_code(run.workflow.fingerprint):
        return point, outcomes
    others = [seq for delivered, seqs in run.interrupted if delivered >= point for seq in seqs]
    return min([point, *others]), tuple(sorted({*outcomes, *others}))


def _failed_at(run: RunDriver, error: BaseException, outcomes: tuple[int, ...]) -> int:
    """Return the outcome that failed a run, according to its error.

    Without a failed outcome the code failed by itself, so it is the last one delivered before the code raised. A graph
    or dag has no code that reacts to a failure, so the last delivered outcome has failed it.
    """
    if not has_own_code(run.workflow.fingerprint):
        return run.last_delivered_at_end
    if outcomes:
        return outcomes[0]
    marks: list[tuple[str, int, int]] = [getattr(one, _RAISED) for one in _tree(error) if hasattr(one, _RAISED)]
    known = [delivered for run_id, epoch, delivered in marks if (run_id, epoch) == (run.id, run.epoch)]
    return min(known, default=run.last_delivered_at_end)


def clear_frames(error: BaseException) -> None:
    """Clear the variables in the frames of an error; its traceback can still be printed."""
    for one in _tree(error):
        traceback.clear_frames(one.__traceback__)


def has_own_code(fingerprint: str) -> bool:
    """Whether a run is of a function, whose code may react to a failure before it fails the run."""
    return not fingerprint.startswith(("dag:", "graph:"))


def _outcome(error: BaseException) -> int:
    seq: int = getattr(error, _SEQ, 0) or (error.seq if isinstance(error, StepError) else 0)
    return seq


def _tree(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            todo.extend(one.exceptions)
