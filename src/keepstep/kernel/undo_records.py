"""The records of a run that can be undone, and those of its undos: what is left to undo, and how far one has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ..model import Kind, Outcome
from ..model.checkpoint import ABOUT_UNDO, ENDS_STEP, Trigger
from ..model.undo import ANSWER, AT_END, is_undo, undone_key
from ..records.data import Data, RunStartedData, data_of
from ..records.record import Record, unseal_some
from .replay import Superseded

if TYPE_CHECKING:
    from .host import StoredRuns

_IN_DOUBT = "ks:in-doubt"


class Item(msgspec.Struct, array_like=True, frozen=True):
    """A call to undo: the number of the record that tells about it, and its key."""

    seq: int
    key: str


class Decided(msgspec.Struct, omit_defaults=True):
    """The value of the record that decides what is undone: calls, the newest first, and children to cancel before.

    The children are given as the key of the call that started them, and their id.
    """

    steps: list[Item] = []
    children: list[tuple[str, str]] = []


class Answered(msgspec.Struct):
    """A person's decision about undo steps that have failed: `retry` or `skip`, and the calls that it is about."""

    act: str
    keys: list[str]


class Outline(msgspec.Struct, frozen=True):
    """The parts of a record that matter for an undo."""

    seq: int
    kind: str
    step: str
    success: bool
    is_last: bool
    undo: bool
    doubtful: bool
    value: bytes
    copied: int

    @classmethod
    def of(cls, record: Record) -> Outline:
        error = record.error
        doubtful = error is not None and error.code == _IN_DOUBT and record.trigger != Trigger.MANUAL.value
        return cls(
            record.seq,
            record.kind,
            record.step,
            record.outcome == Outcome.SUCCESS.value,
            record.retry_at is None,
            bool(data_of(record, Data).get("undo")),
            doubtful,
            record.raw() if record.kind == Kind.UNDO else b"",
            data_of(record, RunStartedData).get("origin_seq", 0),
        )


@dataclass(slots=True)
class Batch:
    """The calls that one decision undoes, and the number of the newest record of their undo."""

    seq: int
    at_end: bool
    items: tuple[Item, ...]
    last: int
    #: Keys of calls whose undo has not succeeded, and was not accepted by a person.
    open: set[str]


class UndoRecords:
    """The counting records of a run, as far as they matter for an undo."""

    def __init__(self, records: Iterable[Outline]) -> None:
        #: Calls that are done, unfinished or in doubt, by key: the record that tells about each.
        self._found: dict[str, Outline] = {}
        #: Calls whose undo has succeeded, and those that a person has accepted as they are, in order.
        self.undone: dict[str, None] = {}
        self.skipped: dict[str, None] = {}
        self.batches: list[Batch] = []
        #: Calls whose undo has failed and was not tried again.
        self.failed: dict[str, int] = {}
        #: Number of decisions of people.
        self.answers = 0
        copied = 0
        for record in records:
            copied = max(copied, record.copied)
            if record.seq > copied:  # what a fork has copied belongs to its original
                self._add(record)

    def _add(self, record: Outline) -> None:
        undone = undone_key(record.step)
        if undone:
            self._add_undo(undone, record)
        elif record.kind == Kind.UNDO:
            self._add_decision(record)
        elif record.undo:
            before = self._found.get(record.step)
            if before is None or not before.success or before.kind == Kind.STEP_STARTED:
                self._found[record.step] = record
        elif record.kind in ENDS_STEP and not record.success and not record.doubtful:
            before = self._found.get(record.step)
            if before is not None and before.kind == Kind.STEP_STARTED:  # it has not happened
                del self._found[record.step]

    def _add_undo(self, key: str, record: Outline) -> None:
        for batch in self.batches:
            if any(item.key == key for item in batch.items):
                batch.last = record.seq
        if record.kind == Kind.STEP_COMPLETED:
            self.undone[key] = None
            self.failed.pop(key, None)
            self._close(key)
        elif record.kind == Kind.STEP_FAILED and record.is_last:
            self.failed[key] = record.seq

    def _add_decision(self, record: Outline) -> None:
        if record.step.startswith(ANSWER):
            self.answers += 1
            answer = msgspec.json.decode(record.value, type=Answered)
            for key in answer.keys:
                self.failed.pop(key, None)
                if answer.act == "skip":
                    self.skipped[key] = None
                    self._close(key)
            for batch in self.batches:
                batch.last = record.seq if batch.open else batch.last
            return
        decided = msgspec.json.decode(record.value, type=Decided)
        items = tuple(decided.steps)
        if items or decided.children:
            at_end = record.step == AT_END
            self.batches.append(Batch(record.seq, at_end, items, record.seq, {item.key for item in items}))

    def _close(self, key: str) -> None:
        for batch in self.batches:
            batch.open.discard(key)

    def left(self) -> list[Item]:
        """Return the calls that are not undone, the newest first."""
        found = [
            Item(one.seq, key) for key, one in self._found.items() if key not in self.undone and key not in self.skipped
        ]
        return sorted(found, key=lambda item: -item.seq)

    def splits(self, last: int) -> Batch | None:
        """Return an undo that would be torn from the calls that it undoes if only records up to `last` counted."""
        for batch in self.batches:
            first = min((item.seq for item in batch.items), default=batch.seq)
            if last >= first and (batch.at_end or batch.open or last < batch.last):
                return batch
        return None


def counting(records: Sequence[Record]) -> list[Outline]:
    """Return the outlines of the records that count, in order."""
    gone = Superseded()
    for record in records:
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
    return [Outline.of(record) for record in records if record.seq not in gone and record.kind in ABOUT_UNDO]


async def read_undo_records(host: StoredRuns, run_id: str) -> UndoRecords:
    """Read from the store what can be undone in a run, and what was."""
    gone, found, after = Superseded(), [], 0
    while rows := await host.records(run_id, after, kinds=ABOUT_UNDO):
        for record, _ in unseal_some(rows, run_id):
            if record.kind == Kind.SUPERSEDED:
                gone.add(record)
            elif _matters(record):
                found.append(Outline.of(record))
        after = rows[-1].seq
    return UndoRecords(one for one in found if one.seq not in gone)


def _matters(record: Record) -> bool:
    """Whether a record can be undone, undoes, ends an at-most-once step, or tells what a fork has copied."""
    data = data_of(record, Data)
    has_failed = record.kind in ENDS_STEP and record.outcome != Outcome.SUCCESS.value
    return has_failed or "undo" in data or "origin_seq" in data or is_undo(record.step)
