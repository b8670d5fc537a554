"""Who wrote through a store object: what tells each of its workers that others wrote, and not what it wrote itself."""

from __future__ import annotations

from collections.abc import Collection


class Authors:
    """Counts what was written, and how much of it each worker is known to have written alone."""

    __slots__ = ("_all", "_own")

    def __init__(self) -> None:
        self._all = 0
        self._own: dict[str, int] = {}

    def wrote(self, authors: Collection[str | None]) -> None:
        """Something was written by these; None stands for anyone."""
        self._all += 1
        if len(authors) == 1:
            (author,) = authors
            if author is not None:
                self._own[author] = self._own.get(author, 0) + 1

    def others(self, worker: str) -> int:
        """How often others than this worker may have written."""
        return self._all - self._own.get(worker, 0)
