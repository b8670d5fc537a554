"""The keys of calls that undo steps: calls of a run, although they begin like its commands."""

from __future__ import annotations

from .run import Run, Status
from .signal import RESERVED

#: First characters of the key of every call that undoes, and the path of their branch.
UNDO = "ks:undo"
#: Key of the decision which steps are undone at the end of a run.
AT_END = f"{UNDO}.end"
#: First characters of the key of a person's decision about undo steps that have failed.
ANSWER = f"{UNDO}.answer#"

#: Type of the error of a run that is set aside because undo steps have failed.
UNDO_FAILED = "UndoFailed"
#: Code of the error of a failed run that has undone its steps, unless the error has a code of its own.
UNDONE = "ks:undone"


def waits_for_answer(run: Run) -> bool:
    """Whether a run is set aside until a person decides about its failed undo steps."""
    return run.status is Status.SET_ASIDE and run.error is not None and run.error.type == UNDO_FAILED


def undo_key(key: str, number: int) -> str:
    """Return the key of the step that undoes the call `key`; `number` counts the times that it was called."""
    return f"{UNDO}{number if number > 1 else ''}:{key}"


def undone_key(key: str) -> str:
    """Return the key of the call that the step `key` undoes; empty if `key` is no such step."""
    start, colon, undone = key.removeprefix(UNDO).partition(":")
    return undone if key.startswith(UNDO) and colon and (not start or start.isdecimal()) else ""


def is_undo(key: str) -> bool:
    """Whether a call undoes, or decides what is undone."""
    return key.startswith(UNDO) or f"/{UNDO}#" in key


def is_command(key: str) -> bool:
    """Whether a record is about a command on the run as a whole, and not about a call."""
    return key.startswith(RESERVED) and not key.startswith(UNDO)
