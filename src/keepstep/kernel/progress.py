"""Writes the saved progress of steps into the history, and takes over what earlier owners of a run have left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ..errors import CheckpointCorrupt
from ..model import Kind
from ..records.data import Data, ProgressData, data_of, new_data
from ..records.progress import saved_in
from ..records.record import FORMAT_WITH_SAVED, Record
from .log import Draft

if TYPE_CHECKING:
    from ..ports import Answer
    from ..records.keys import Cipher
    from ..records.progress import SavedValue
    from .driver import RunDriver


def record_saved(run: RunDriver, keys: Iterable[str]) -> None:
    """Write what these steps have saved with the next commit of the run."""
    for key in keys:
        value = run.progress.queue(key)
        if value is not None:
            run.ride(_draft(run, key, value))


def cut_short(run: RunDriver) -> list[Draft]:
    """Return drafts of what the steps of a detached run have saved, as far as no record holds it."""
    return [_draft(run, key, value) for key, value in run.progress.unrecorded().items()]


def record_advance(run: RunDriver, then: Callable[[Answer], None]) -> None:
    """Write the saved values that differ from the recorded ones. They reset the count of recoveries."""
    drafts = [_draft(run, key, value) for key, value in run.progress.advanced().items()]
    for draft in drafts:
        if draft.record is not None:
            draft.record.data = {**data_of(draft.record, Data), "recoveries": run.run.recoveries}
        run.ride(draft)
    run.append_special(None, {}, then, takes_along=True)


def _draft(run: RunDriver, key: str, saved: SavedValue) -> Draft:
    record = Record(run.id, Kind.PROGRESS.value, step=key, attempt=saved.attempt, worker=run.worker)
    record.finished_at, record.value, record.format = run.time(), saved.value, FORMAT_WITH_SAVED
    record.data = new_data(ProgressData, epoch=saved.epoch)
    if (names := run.names_of(key)) is not None:
        names.put_on(record)
    return Draft(record, then=partial(run.progress.recorded, key, saved))


def take_over(run: RunDriver) -> None:
    """Take the values that earlier owners of the run have left in their heartbeats, where they are newer."""
    history = run.history
    for text in run.claim.left:
        for key, one in saved_in(_revealed(text, run.cipher)).items():
            is_over = one.generation != run.generation or (history is not None and key in history.entries)
            if not is_over and one.is_newer_than(run.progress.values.get(key)):
                run.progress.save(key, one)
    if run.progress.unrecorded():
        run.host.report_progress(run.id, run.progress)


def _revealed(text: bytes, cipher: Cipher | None) -> bytes:
    """Return the text of a heartbeat; an empty one if it is damaged, so that the step begins from its start."""
    try:
        return text if cipher is None else cipher.reveal_text(text, "progress")
    except CheckpointCorrupt:
        return b""
