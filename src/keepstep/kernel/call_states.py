"""The states of a call, and the exceptions that end the code of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..model.ids import new_id
from ..records.record import Record, StoredError

if TYPE_CHECKING:
    from .naming import Names

#: Number of times that `Detached` is raised in code that swallows it, before the code is left hanging.
PATIENCE = 100


class Detached(asyncio.CancelledError):
    """The run is no longer driven here; nothing that its code does counts."""


NEW, ASKED, DONE, CANCELLED = range(4)


class Call(Protocol):
    """A call of a run's code, as the run sees it."""

    key: str
    digest: str
    ordinal: int
    state: int
    branch: Any
    entry: Any

    def begin(self) -> None: ...

    def begin_live(self) -> None: ...

    def refuse(self) -> None: ...

    def settle(self, record: Record) -> bool: ...

    def cancelled_by_code(self) -> None: ...

    def was_asked_as(self, digest: str) -> bool: ...


class Body(Call, Protocol):
    """A call of a step whose body is running."""

    step: Any
    task: asyncio.Task[None] | None
    doubtful: bool
    names: Names | None
    #: Whether an at-most-once step waits for its next attempt, so that nothing is in doubt.
    rests: bool


class NotYet(Exception):
    """The result of a step does not count yet; the step is performed again after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"not yet; again after {seconds:g} s")
        self.seconds = seconds


class ContinueAs(BaseException):
    """Ends a run and starts its successor; raised by `ks.continue_as`."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the run continues as its successor")
        self.input = payload
        self.taken = False  # whether a user's own run has the successor's usual id


def in_doubt(steps: Sequence[str]) -> StoredError:
    """Return the recorded error of a cancel during at-most-once steps, whose outcome is unknown."""
    named, what = " and ".join(map(repr, steps)), ("step", "was") if len(steps) == 1 else ("steps", "were")
    message = f"{what[0]} {named} {what[1]} under way when the run was cancelled: may or may not have happened"
    return StoredError("keepstep.StepInDoubt", message, code="ks:in-doubt", id=new_id("error"))
