"""The steps of a run that can be undone, as far as this process knows them, and the sagas that they belong to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..workflows.definition import Step, Workflow


class Saga:
    """The calls with an undo that a block of code has made, also inside of the sagas within it."""

    __slots__ = ("keys", "outer")

    def __init__(self, outer: Saga | None) -> None:
        self.outer = outer
        self.keys: set[str] = set()

    def add(self, key: str) -> None:
        saga: Saga | None = self
        while saga is not None:
            saga.keys.add(key)
            saga = saga.outer


class Undoable:
    """The calls of one run that can be undone, and the state of its undos."""

    __slots__ = ("answers", "begun", "outlived", "owners", "rounds", "starts", "taken", "workflows")

    def __init__(self) -> None:
        #: The definitions of calls with an undo: a step, or the workflow of a child.
        self.owners: dict[str, Step[..., Any] | Workflow[..., Any]] = {}
        #: Called workflows, whose steps a replay may not call again.
        self.workflows: list[Workflow[..., Any]] = []
        #: The starts of children, by the keys of the waits for their results.
        self.starts: dict[str, str] = {}
        #: Calls that an undo in progress undoes; a second one leaves them out.
        self.taken: set[str] = set()
        #: How often the undo of a call was called.
        self.rounds: dict[str, int] = {}
        #: Whether the undo at the end of the run has begun.
        self.begun = False
        #: Number of decisions that people were asked for.
        self.answers = 0
        #: Bodies in threads that go on after their steps were cancelled or timed out.
        self.outlived: list[asyncio.Future[Any]] = []

    def called(self, key: str, owner: Step[..., Any] | Workflow[..., Any], saga: Saga | None) -> None:
        """Note that the code has made a call that can be undone."""
        self.owners[key] = owner
        if saga is not None:
            saga.add(key)

    def belongs(self, key: str, saga: Saga | None) -> bool:
        """Whether a call was made inside a saga. Without one, every call counts."""
        if saga is None:
            return True
        place = self.starts.get(key, key)
        while place and place not in saga.keys:  # a replay does not call the steps of a called workflow again
            place = place.rpartition("/")[0]
        return bool(place)

    def next_round(self, key: str) -> int:
        """Return the number of the next call that undoes the call `key`."""
        self.rounds[key] = number = self.rounds.get(key, 0) + 1
        return number
