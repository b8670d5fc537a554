"""Write counts of a store object, which tell each worker whether others have written."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..ports import Advance, Change, Create


class Authors:
    """Counts all writes, and the writes that each worker is known to have made alone."""

    __slots__ = ("_all", "_own")

    def __init__(self) -> None:
        self._all = 0
        self._own: dict[str, int] = {}

    def wrote(self, authors: Collection[str | None]) -> None:
        """Record a write by these workers; None stands for anyone."""
        self._all += 1
        if len(authors) == 1:
            (author,) = authors
            if author is not None:
                self._own[author] = self._own.get(author, 0) + 1

    def committed(self, changes: Sequence[Change]) -> None:
        """Record a commit of these changes."""
        self.wrote({author(change) for change in changes})

    def others(self, worker: str) -> int:
        """Return how often others than this worker may have written."""
        return self._all - self._own.get(worker, 0)


def author(change: Change) -> str | None:
    """Return the worker that is known to have made a change, or None if anyone may have made it."""
    if type(change) is Advance:
        return change.worker
    return change.run.worker if type(change) is Create else None
