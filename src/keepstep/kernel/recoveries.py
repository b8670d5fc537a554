"""The recoveries that a history tells about: a person's open request, the newest answer of a handler, skipped steps."""

from __future__ import annotations

from collections.abc import Callable

from ..model import Kind
from ..model.checkpoint import NO_PROGRESS, Trigger
from ..records.data import RecoveredData, data_of
from ..records.record import Record

_RECOVERY = Trigger.RECOVERY.value


class Recoveries:
    """The recoveries of one run, from its records, added in order."""

    __slots__ = ("_skipping", "answered", "request")

    def __init__(self) -> None:
        #: The record with which a person asks for a recovery, while no handler has answered and no command follows.
        self.request: Record | None = None
        #: The count of recoveries that a handler has answered, while the run has made no progress since.
        self.answered: int | None = None
        self._skipping: list[Record] = []

    def add(self, record: Record) -> None:
        """Take in the next record of the run."""
        kind = record.kind
        if kind != Kind.RECOVERED and self.answered is None and self.request is None and not self._skipping:
            return  # the common case
        if kind not in NO_PROGRESS and record.trigger != _RECOVERY:
            self.request = self.answered = None
            if kind == Kind.SUPERSEDED:  # after a person's command, each step that begins again runs its body
                self._skipping.clear()
        data = data_of(record, RecoveredData) if kind == Kind.RECOVERED else {}
        if "act" in data:
            self.request = record
        elif "handler" in data:
            self.request, self.answered = None, data.get("recoveries", 0)
            if "skips" in data:
                self._skipping.append(record)

    def skips(self, is_gone: Callable[[int], bool]) -> dict[str, bytes]:
        """Return the values that become the results of skipped steps, by key, of the records that count."""
        counting = [record for record in self._skipping if not is_gone(record.seq)]
        return {data_of(record, RecoveredData).get("skips", ""): record.raw() for record in counting}
