"""The progress of a run as the heartbeat of its worker holds it: a report for readers, and saved values of steps."""

from __future__ import annotations

from collections.abc import Mapping
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


class _Saved(msgspec.Struct):
    saved: dict[str, SavedValue] = {}


#: Key of the saved values beside those of a report.
_SAVED = "saved"
_decode_saved = msgspec.json.Decoder(_Saved).decode


def progress_text(report: Mapping[str, Any] | None, saved: Mapping[str, SavedValue]) -> bytes:
    """Return the stored text, or an empty one if there is nothing to store."""
    if not saved:
        return b"" if report is None else msgspec.json.encode(report)
    return msgspec.json.encode({**(report or {}), _SAVED: saved})


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
    """Return the report for readers in a stored text, without the saved values; None if there is none."""
    if text is None or b'"saved"' not in text:
        return text
    try:
        report = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return text
    report.pop(_SAVED, None)
    return msgspec.json.encode(report) if report else None
