"""The progress of a run as the heartbeat of its worker holds it: a report, its maps, and saved values of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..model import Kind
from .record import Record


class SavedValue(msgspec.Struct, gc=False):
    """A value that a step has saved for its next attempt: its encoded form, and which attempt under which lease did so.

    A later attempt is newer, and within one attempt a later lease. A retry or a rewind begins another generation, for
    which the value does not count.
    """

    value: msgspec.Raw
    attempt: int
    epoch: int
    generation: int

    def is_newer_than(self, other: SavedValue | None) -> bool:
        return other is None or (self.attempt, self.epoch) > (other.attempt, other.epoch)


class MapProgress(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How far a `ks.map` has come. `total` is None as long as an iterator may have more items."""

    name: str
    path: str
    done: int
    failed: int = 0
    total: int | None = None

    @property
    def text(self) -> str:
        """One line for people."""
        of = "" if self.total is None else f" of {self.total:,}"
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"map {self.name}: {self.done:,}{of} done{failed}"


class _Saved(msgspec.Struct):
    saved: dict[str, SavedValue] = {}


class _Maps(msgspec.Struct):
    maps: list[MapProgress] = []


#: Keys beside those of a report.
_SAVED, _MAPS = "saved", "maps"
_decode_saved = msgspec.json.Decoder(_Saved).decode
_decode_maps = msgspec.json.Decoder(_Maps).decode


def progress_text(
    report: Mapping[str, Any] | None, saved: Mapping[str, SavedValue], maps: Sequence[MapProgress] = ()
) -> bytes:
    """Return the stored text, or an empty one if there is nothing to store."""
    if not saved and not maps:
        return b"" if report is None else msgspec.json.encode(report)
    more = {name: value for name, value in ((_SAVED, saved), (_MAPS, maps)) if value}
    return msgspec.json.encode({**(report or {}), **more})


def maps_in(text: bytes | None) -> list[MapProgress]:
    """Return the maps under way in a stored text; none if it cannot be read."""
    try:
        return _decode_maps(text).maps if text else []
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []


def saved_in(text: bytes) -> dict[str, SavedValue]:
    """Return the saved values in a stored text, by the keys of their steps; none if it cannot be read."""
    try:
        return _decode_saved(text).saved
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def proves_progress(record: Record) -> bool:
    """Whether a record of a kind that proves no progress does so: the saved value changed between crashes."""
    return record.data is not None and record.kind == Kind.PROGRESS.value and "recoveries" in record.data


def report_in(text: bytes | None) -> bytes | None:
    """Return the report for readers in a stored text, without what is beside it; None if there is none."""
    if text is None or not (b'"saved"' in text or b'"maps"' in text):
        return text
    try:
        report = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return text
    for name in (_SAVED, _MAPS):
        report.pop(name, None)
    return msgspec.json.encode(report) if report else None
