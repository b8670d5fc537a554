"""The progress of a run's steps: the newest report for readers, its maps, and values saved for next attempts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..errors import NotSerializable
from ..ports import Answer
from ..records.data import ProgressData, data_of
from ..records.progress import MapProgress, SavedValue, progress_text
from ..records.record import Record

#: Largest saved value in bytes. Every heartbeat of the worker writes the saved values of all steps under way.
MOST_SAVED_BYTES = 100_000
#: Maps of a run that a heartbeat shows.
MOST_MAPS = 10


def check_size(value: bytes, key: str) -> None:
    """Refuse a value that is too large to travel with every heartbeat."""
    if len(value) > MOST_SAVED_BYTES:
        raise NotSerializable(
            f"step {key!r}: ks.save_progress got a value of {len(value):,} bytes, over the limit of "
            f"{MOST_SAVED_BYTES:,}; store the data elsewhere and save a position or a reference"
        )


class StepsProgress:
    """The progress of one run in memory. Bodies in threads write it, and the thread of the heartbeat reads it."""

    __slots__ = ("_queued", "_recorded", "maps", "report", "values")

    def __init__(self) -> None:
        self.report: Mapping[str, Any] | None = None
        #: Tells how far each large map under way has come, by its path.
        self.maps: dict[str, Callable[[], MapProgress]] = {}
        #: Newest saved values, by the keys of their steps.
        self.values: dict[str, SavedValue] = {}
        self._queued: dict[str, SavedValue] = {}  # those in drafts or records
        self._recorded: dict[str, SavedValue] = {}  # those in records

    def loaded(self, recorded: Mapping[str, SavedValue]) -> None:
        """Take the values that the history holds, instead of those of an earlier history of the run."""
        for values in (self.values, self._queued, self._recorded):
            values.clear()
            values.update(recorded)

    def save(self, key: str, value: SavedValue) -> None:
        self.values[key] = value

    def recorded(self, key: str, value: SavedValue, _: Answer) -> None:
        """Note that the history holds a value, so that the heartbeat need not."""
        self._recorded[key] = value

    def ended(self, key: str) -> None:
        """Forget the value of a step that has ended."""
        for values in (self.values, self._queued, self._recorded):
            values.pop(key, None)

    def queue(self, key: str) -> SavedValue | None:
        """Return the value of a step that must be recorded now; None if it is on its way into the history."""
        value = self.values.get(key)
        if value is None or self._queued.get(key) is value:
            return None
        self._queued[key] = value
        return value

    def unrecorded(self) -> dict[str, SavedValue]:
        """Return the values that no record holds, in any thread."""
        return {key: one for key, one in dict(self.values).items() if self._recorded.get(key) is not one}

    def advanced(self) -> dict[str, SavedValue]:
        """Return the values that no record holds and that differ from the recorded ones."""
        recorded = self._recorded
        return {
            key: one
            for key, one in self.unrecorded().items()
            if key not in recorded or bytes(recorded[key].value) != bytes(one.value)
        }

    def text(self) -> bytes:
        """Return the text for the heartbeat, in any thread."""
        maps = [look() for look in list(self.maps.values())[:MOST_MAPS]]
        return progress_text(self.report, self.unrecorded(), maps)


def saved_value(record: Record) -> SavedValue:
    """Return the value that a record holds. The history decides whether it counts."""
    value = msgspec.Raw(record.raw())
    return SavedValue(value, record.attempt, data_of(record, ProgressData).get("epoch", 0), 0)
