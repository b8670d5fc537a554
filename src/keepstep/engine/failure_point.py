"""Find the outcome that failed a run: the earliest one that its error goes back to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import StepError

if TYPE_CHECKING:
    from .context import RunContext

#: Attribute of an exception: the run, its epoch, and the outcome that the code was given last when it was raised.
_RAISED = "__keepstep_raised__"
#: Attribute of an exception that an outcome raised in the code: the number of that outcome.
_SEQ = "__keepstep_seq__"


def mark_outcome(error: BaseException, seq: int) -> None:
    """Remember which outcome an exception stands for."""
    setattr(error, _SEQ, seq)


def mark_raised(run: RunContext, error: BaseException) -> None:
    """Remember what the code knew when an exception was first seen; later sightings change nothing."""
    known = getattr(error, _RAISED, None)
    if known is None or known[:2] != (run.id, run.epoch):
        setattr(error, _RAISED, (run.id, run.epoch, run.told))


def mark_interrupted(run: RunContext, error: BaseException) -> None:
    """Remember that the code has cancelled what it was doing about a failure, which is then not dealt with."""
    if outcomes := caused_by(error):
        run.interrupted.append((run.told, outcomes))


def caused_by(error: BaseException | None) -> tuple[int, ...]:
    """The outcomes that an error goes back to, in order: what it was raised from or while handling, and its parts."""
    return tuple(sorted({seq for one in _tree(error) if (seq := _outcome(one))}))


def failed_by(run: RunContext, error: BaseException) -> tuple[int, tuple[int, ...]]:
    """The outcome that failed a run, and all that are to be tried again.

    These are the ones that the error goes back to, and those which the code was still dealing with when the run failed.
    """
    outcomes = caused_by(error)
    point = _failed_at(run, error, outcomes)
    if not has_own_code(run.workflow.fingerprint):
        return point, outcomes
    others = [seq for told, seqs in run.interrupted if told >= point for seq in seqs]
    return min([point, *others]), tuple(sorted({*outcomes, *others}))


def _failed_at(run: RunContext, error: BaseException, outcomes: tuple[int, ...]) -> int:
    """The outcome that failed a run, as its error tells.

    Without a failed outcome the code has failed by itself: then it is the outcome that the code was given last before
    it raised. A graph or dag has no code that reacts to a failure: what was delivered last has failed it.
    """
    if not has_own_code(run.workflow.fingerprint):
        return run.told_at_end
    if outcomes:
        return outcomes[0]
    marks: list[tuple[str, int, int]] = [getattr(one, _RAISED) for one in _tree(error) if hasattr(one, _RAISED)]
    known = [told for run_id, epoch, told in marks if (run_id, epoch) == (run.id, run.epoch)]
    return min(known, default=run.told_at_end)


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
