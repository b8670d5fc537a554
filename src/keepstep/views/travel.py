"""A run as it was at one of its records: what had an outcome, its state, and what has changed since another record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..history.diff import Pair, changed
from ..kernel.graph.stored import position_at
from ..kernel.replay import Superseded, check_kept, kept_state, unsealed
from ..model import Checkpoint, Kind, Run
from ..model.checkpoint import ANSWERS_CALL
from ..model.signal import RESERVED
from ..model.tree import thaw
from ..records.data import PublishedData, data_of
from ..records.record import checkpoint
from .overview import Locked, readable
from .plain import untagged, value_of
from .run_records import records_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..history.host import CommandHost
    from ..ports import Row, Store
    from ..records.record import Record

#: Records that are read for the calls of one view, and their bytes: a view of a long run is as quick as another.
MOST_RECORDS, MOST_BYTES = 100, 20_000_000
#: Records that are shown before and after the chosen one.
BESIDE = 4


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences between two records of a run.

    `state` and `published` map keys to both values, None for a missing one. `calls` have their outcome between the two,
    the newest first; `more` says that there are others before them.
    """

    base: int
    state: dict[str, Pair] = field(default_factory=dict)
    published: dict[str, Pair] = field(default_factory=dict)
    calls: tuple[Checkpoint, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """A run at the record `at`. `run` is the run now, and `counts` tells whether the record still counts.

    `calls` had an outcome that counted then, the newest first; `more` says that there are others before them. `state`
    is None for a run that carries none. `gone` are the records that do not count now.
    """

    run: Run
    at: int
    locked: Locked | None
    record: Checkpoint | None = None
    counts: bool = True
    beside: tuple[Checkpoint, ...] = ()
    calls: tuple[Checkpoint, ...] = ()
    more: bool = False
    state: dict[str, Any] | None = None
    published: dict[str, Any] = field(default_factory=dict)
    changes: Changes | None = None
    gone: Superseded = field(default_factory=Superseded)


async def past(host: CommandHost, run: Run, at: int | None, base: int | None = None) -> Past:
    """Return a run as it was at record `at`, and what has changed since record `base`, by default the one before."""
    at = _checked(run, run.seq if at is None else at, "at")
    readable_run, locked = readable(host.encryption, run)
    if locked is not None:
        return Past(readable_run, at, locked)
    notes = await notes_of(host, run)
    then, now = notes.gone(at), notes.gone(run.seq)
    window = await _window(host, run, at + BESIDE, MOST_RECORDS + BESIDE)
    record = next((one for one in window if one.seq == at), None)
    state = await state_of(host, run, at)
    base = _base(run, at, base)
    changes = None if base is None else await _changes(host, run, at, base, notes)
    first = window[0].seq if window else 0
    return Past(
        readable_run,
        at,
        None,
        record,
        record is None or record.seq not in now,
        tuple(one for one in window if abs(one.seq - at) <= BESIDE),
        _calls(one for one in window if one.seq <= at and one.seq not in then),
        first > max(run.kept_from, 1),
        state,
        notes.published(at),
        changes,
        now,
    )


def _checked(run: Run, seq: int, name: str) -> int:
    if not 0 <= seq <= run.seq:
        raise DefinitionError(f"{name} must be a record of run {run.id!r}, from 0 to {run.seq}, got {seq}")
    check_kept(run, seq)
    return seq


def _base(run: Run, at: int, base: int | None) -> int | None:
    """Return the record to compare with; None if there is none before."""
    if base is not None:
        return _checked(run, base, "from")
    before = at - 1
    return None if before < 0 or 1 < before < run.kept_from else before


async def _changes(host: CommandHost, run: Run, at: int, base: int, notes: Notes) -> Changes:
    old, state = await state_of(host, run, base), await state_of(host, run, at)
    low, high = sorted((at, base))
    window = await _window(host, run, high, min(high - low, MOST_RECORDS))
    gone = notes.gone(high)
    published = changed(notes.published(base), notes.published(at))
    calls = _calls(one for one in window if one.seq > low and one.seq not in gone)
    more = bool(window) and window[0].seq > low + 1
    return Changes(base, changed(old or {}, state or {}), published, calls, more)


class Notes:
    """The records of a run that tell at any of them what no longer counted, and what was published."""

    def __init__(self, marks: list[Record], published: list[tuple[int, str, bytes]], kept: Mapping[str, bytes]) -> None:
        self._marks, self._published, self._kept = marks, published, kept

    def gone(self, at: int) -> Superseded:
        """Return which records no longer counted at a record."""
        found = Superseded()
        for mark in self._marks:
            if mark.seq <= at:
                found.add(mark)
        return found

    def published(self, at: int) -> dict[str, Any]:
        """Return the values that the run had published at a record."""
        gone = self.gone(at)
        newest = {key: raw for seq, key, raw in self._published if seq <= at and seq not in gone}
        return {key: value_of(raw) for key, raw in {**self._kept, **newest}.items()}


async def notes_of(host: CommandHost, run: Run) -> Notes:
    """Read the notes of a run, off the loop, because a store looks through all records for them."""
    kept = await kept_state(host, run)
    values = {} if kept is None else {key: bytes(value) for key, value in kept.published.items()}
    return await host.call(_notes, host.store, run.id, values)


def _notes(store: Store, run_id: str, kept: dict[str, bytes]) -> Notes:
    marks = list(records_of(store, run_id, 0, (Kind.SUPERSEDED.value,)))
    shown = records_of(store, run_id, 0, (Kind.PUBLISHED.value,))
    return Notes(
        marks, [(one.seq, data_of(one, PublishedData).get("key", ""), bytes(one.raw())) for one in shown], kept
    )


async def state_of(host: CommandHost, run: Run, at: int) -> dict[str, Any] | None:
    """Return the state of a graph's run at a record, that of stages and agents under their names; None without one."""
    workflow = host.workflows.get(run.workflow)
    if not (workflow.carries_state if workflow is not None else run.fingerprint.startswith("graph:")):
        return None
    levels = (await position_at(host, run, at)).levels
    return {
        f"{level}:{key}" if level else key: untagged(thaw(tree))
        for level, keys in levels.items()
        for key, tree in keys.items()
    }


async def _window(host: CommandHost, run: Run, last: int, count: int) -> list[Checkpoint]:
    """Return the records up to `last`, at most `count`, and no more of them than `MOST_BYTES`."""
    first = max(last - count, 0)
    rows = [row for row in await host.call(host.store.list_checkpoints, run.id, first, count) if row.seq <= last]
    size = 0
    kept: list[Row] = []
    for row in reversed(rows):
        size += len(row.record) + len(row.body or b"")
        if kept and size > MOST_BYTES:
            break
        kept.insert(0, row)
    before = kept[0].seq - 1 if kept else 0
    return [checkpoint(record, checksum) async for record, checksum in unsealed(host, kept, run.id, before)]


def _calls(found: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the newest outcome of each call, the newest first."""
    by_key = dict[str, Checkpoint]()
    for one in found:
        if one.kind.value in ANSWERS_CALL and one.retry_at is None and not one.step.startswith(RESERVED):
            by_key.pop(one.step, None)
            by_key[one.step] = one
    return tuple(reversed(by_key.values()))
