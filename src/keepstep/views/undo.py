"""The undo of a run, from its records: the steps that are undone, those whose undo failed, and those left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..kernel.undo_records import Outline, UndoRecords
from ..model import Checkpoint, Outcome
from ..model.checkpoint import ABOUT_UNDO, Trigger


@dataclass(frozen=True, slots=True)
class UndoView:
    """The steps of a run by the state of their undo, by key. `at_end` says whether the undo at its end has begun."""

    undone: tuple[str, ...]
    failed: tuple[str, ...]
    skipped: tuple[str, ...]
    left: tuple[str, ...]
    at_end: bool


def undo_of(checkpoints: Iterable[Checkpoint]) -> UndoView | None:
    """Return the undo of a run from its counting records; None if none has begun and no step can be undone."""
    past = UndoRecords(_outline(one) for one in checkpoints if one.kind in ABOUT_UNDO)
    left = tuple(item.key for item in past.left() if item.key not in past.failed)
    if not past.batches and not left:
        return None
    at_end = any(batch.at_end for batch in past.batches)
    return UndoView(tuple(past.undone), tuple(past.failed), tuple(past.skipped), left, at_end)


def _outline(one: Checkpoint) -> Outline:
    return Outline(
        one.seq,
        one.kind.value,
        one.step,
        success=one.outcome is Outcome.SUCCESS,
        is_last=one.retry_at is None,
        undo=bool(one.data.get("undo")),
        doubtful=one.error is not None and one.error.code == "ks:in-doubt" and one.trigger is not Trigger.MANUAL,
        value=one.value or b"",
        copied=one.data.get("origin_seq", 0),
    )
