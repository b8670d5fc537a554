"""The records of a run, arranged for replay: loaded once per claim, and dropped as they are consumed."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, RunNotFound
from ..model import Kind, Status
from ..model.checkpoint import ANSWERS_CALL, ENDS_RUN, NOTE
from ..model.run import removed_records
from ..model.undo import is_command, undone_key
from ..records.data import Data, PatchData, PublishedData, RunStartedData, SupersededData, data_of
from ..records.record import Record, chain_end, check_origin, origin, unseal, unseal_some
from ..stores.rules import ENDED, ends_as, with_outcome
from ..values import large
from .graph.position import EDITS, Position, Whole, facts
from .inbox import AT_STOP, Reads
from .ledger import Spent
from .recoveries import Recoveries
from .saved import saved_value

if TYPE_CHECKING:
    from ..model import Run
    from ..ports import Row
    from ..records.progress import SavedValue
    from .host import StoredRuns

#: Bytes of outcomes kept in memory while a history is consumed. Those beyond it are read again when they are reached.
KEEP_BYTES = 16_000_000
#: Bytes of memory of an outcome, beside its value.
RECORD_BYTES = 1000

#: Records after which a reader of a history yields to the loop, about 4 ms.
REST_AFTER = 100
#: Records from the end in which a consolidated state is searched first.
FIRST_SPAN = 128
#: Prefix of the key of a patch's record.
PATCH = "patch:"


async def read_records(host: StoredRuns, run: Run) -> AsyncIterator[tuple[Record, str]]:
    """Yield every record of a run with its checksum, verified from its creation on."""
    check_origin(run)
    after, previous = 0, origin(run)
    try:
        while rows := await host.records(run.id, after):
            async for record, checksum in unsealed(host, rows, run.id, after, previous):
                after, previous = record.seq, checksum
                if after == run.seq:
                    check_end(run, after, checksum)
                yield record, checksum
        check_end(run, after, previous)
    except CheckpointCorrupt:
        await check_not_removed(host, run)
        raise


async def unsealed(
    host: StoredRuns, rows: Iterable[Row], run: str, after: int, previous: str = ""
) -> AsyncIterator[tuple[Record, str]]:
    """Verify rows as `unseal` does, large values off the loop, and yield to the loop regularly.

    Records that were removed on purpose are passed over, also while the run goes on and removes more.
    """
    for row in rows:
        if row.seq > after + 1 and after and await _were_removed(host, run, row.seq):
            after, previous = row.seq - 1, ""
        one = unseal((row,), run, after, previous)
        record, previous = await host.off_loop(next, one) if _has_large_value(row) else next(one)
        after = record.seq
        yield record, previous
        if after % REST_AFTER == 0:
            await asyncio.sleep(0)


async def _were_removed(host: StoredRuns, run: str, seq: int) -> bool:
    """Whether all records between the first one and record `seq` were removed on purpose."""
    now = await host.stored_run(run)
    return now is not None and seq <= now.kept_from


def _has_large_value(row: Row) -> bool:
    return len(row.record) > large.LARGE_BYTES or (row.body is not None and len(row.body) > large.LARGE_BODY_BYTES)


async def check_not_removed(host: StoredRuns, run: Run) -> None:
    """Raise `RunNotFound` if a run was removed while it was read; missing rows are then no damage."""
    try:
        now = await host.stored_run(run.id)
    except CheckpointCorrupt:
        return
    if now is None or now.created_at != run.created_at:
        raise RunNotFound(f"run {run.id!r} was removed from {host.url} while it was read", run.id) from None


def check_kept(run: Run, seq: int) -> None:
    """Raise `DefinitionError` if record `seq` of a run was removed."""
    if 1 < seq < run.kept_from:
        raise DefinitionError(
            f"run {run.id!r} has no record {seq} any more: {removed_records(run)}; name record {run.kept_from} or a "
            "later one"
        )


async def kept_state(host: StoredRuns, run: Run) -> Whole | None:
    """Return the whole state that stands in for the removed records of a run, or None if none were removed."""
    rows = await host.records(run.id, run.kept_from - 1, 1, (Kind.STATE.value,)) if run.kept_from else []
    found = [record for record, _ in unseal_some(rows, run.id)]
    return Position.restored(found[0])[1] if found else None


def check_end(run: Run, seq: int, checksum: str) -> None:
    """Raise `CheckpointCorrupt` unless the last record is the one that the run's head names.

    No record follows the newest one to prove that it is unchanged; others may have been added since.
    """
    if seq < run.seq:
        raise CheckpointCorrupt(
            f"run {run.id!r}: chain broken at seq {seq + 1}: the head names seq {run.seq}, but the records end at {seq}"
        )
    if seq == run.seq and checksum != chain_end(run):
        raise CheckpointCorrupt(f"run {run.id!r}: the record at seq {seq} differs from the one that its head names")


async def newest_state(host: StoredRuns, run: Run, upto: int | None = None) -> int | None:
    """Return the number of the newest consolidated state that counts, or None; earlier records need not be read.

    The search starts at the end, in growing steps: it is rarely further away than a thousand records.
    """
    end = high = run.seq if upto is None else upto
    while high > 0:
        found = await _newest(host, run.id, high)
        if found is None:
            return None
        rows = await host.records(run.id, found, kinds=(Kind.SUPERSEDED.value,))
        limit = min(
            (_last_that_counts(record) for record, _ in unseal_some(rows, run.id) if record.seq <= end), default=found
        )
        if limit >= found:
            return found
        high = limit
    return None


async def _newest(host: StoredRuns, run: str, high: int) -> int | None:
    span = FIRST_SPAN
    while True:
        low = max(0, high - span)
        after, found = low, None
        while rows := await host.records(run, after, kinds=(Kind.STATE.value,)):
            found = max((row.seq for row in rows if row.seq <= high), default=found)
            after = rows[-1].seq
        if found is not None or low == 0:
            return found
        span *= 4


def _last_that_counts(record: Record) -> int:
    """Up to where a `superseded` record leaves everything as it is."""
    data = data_of(record, SupersededData)
    return min([*(seq - 1 for seq in data.get("seqs", ())), data.get("beyond", record.seq)])


async def as_ended(host: StoredRuns, run: Run) -> Run:
    """Return a run that a command has claimed as it had ended; return any other run unchanged.

    A command takes effect with its record. Before that, the run's newest record is still its end.
    """
    if not run.seq or run.status in ENDED:
        return run
    rows = await host.records(run.id, run.seq - 1, 1, ENDS_RUN)
    if not rows or rows[0].seq != run.seq:
        return run
    record, _ = next(unseal(rows, run.id, run.seq - 1))
    status = ends_as(record.kind, record.outcome)
    return run if status is None else with_outcome(replace(run, status=status), rows[0])


async def read_history(host: StoredRuns, run: Run, history: History) -> History:
    """Load, verify and arrange the records of a run from the start of a history on."""
    if history.seq and run.origin is not None:
        history.begin_copy(await host.records(run.id, 0, 1))
    while history.seq < run.seq:
        rows = await host.records(run.id, history.seq)
        if not rows:
            break
        for first in range(0, len(rows), REST_AFTER):
            some = rows[first : first + REST_AFTER]
            if any(map(_has_large_value, some)):
                await host.off_loop(history.add, some)
            else:
                history.add(some)
                await asyncio.sleep(0)
    history.arrange(run)
    return history


class Superseded:
    """The records of a run that no longer count, according to its `superseded` records, added in order.

    A retry names single records. A rewind names the last record that counts: records that counted then count again, and
    later ones up to the rewind do not. An earlier retry or rewind among them is undone with the rest.
    """

    def __init__(self, generation: int = 0) -> None:
        #: Number of times that a person has changed which records count. It only grows, so that keys and child ids are
        #: unique.
        self.generation = generation
        #: The effect after each of those records: its number, the single superseded records, and the rewound ranges. A
        #: range is the last record that counts and the rewind; ranges are disjoint and in order.
        self._after: list[tuple[int, frozenset[int], tuple[tuple[int, int], ...]]] = [(0, frozenset(), ())]

    def add(self, record: Record) -> None:
        """Take in the next `superseded` record."""
        data = data_of(record, SupersededData)
        if data.get("act") != "migrate":  # which changes no outcome, so that nothing is performed twice
            self.generation += 1
        beyond = data.get("beyond")
        _, named, ranges = self._after[-1]
        if beyond is not None:
            _, named, ranges = self._after[max(bisect_right(self._after, beyond, key=_number) - 1, 0)]
            ranges = (*ranges, (beyond, record.seq))
        if data.get("seqs"):
            named = named.union(data["seqs"])
        self._after.append((record.seq, named, ranges))

    def __contains__(self, seq: int) -> bool:
        return seq in self._after[-1][1] or self.rewound(seq)

    def __bool__(self) -> bool:
        return any(self._after[-1][1:])

    def ranges(self) -> list[tuple[int, int]]:
        """Return the numbers of the records that no longer count: the first and the last of each range, in order."""
        _, named, rewound = self._after[-1]
        spans = sorted([(seq, seq) for seq in named] + [(beyond + 1, by - 1) for beyond, by in rewound])
        joined: list[tuple[int, int]] = []
        for first, last in spans:
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
            elif first <= last:
                joined.append((first, last))
        return joined

    def rewound(self, seq: int) -> bool:
        """Whether a rewind superseded a record; signals that it read are then unread again."""
        ranges = self._after[-1][2]
        place = bisect_left(ranges, seq, key=_until)
        return place < len(ranges) and ranges[place][0] < seq < ranges[place][1]


def goes_back(record: Record) -> bool:
    """Whether a `superseded` record lets a run go on from an earlier point, with full time for what waits there."""
    data = data_of(record, SupersededData)
    return data.get("act") in ("retry", "rewind") or data.get("before") in (Status.FAILED, Status.SET_ASIDE)


def superseded_by(record: Record) -> int:
    """How many records a `superseded` record is about."""
    data = data_of(record, SupersededData)
    beyond = data.get("beyond")
    return len(data.get("seqs", ())) if beyond is None else max(record.seq - 1 - beyond, 0)


def _number(after: tuple[int, Any, Any]) -> int:
    return after[0]


def _until(span: tuple[int, int]) -> int:
    return span[1]


def is_keyed(key: str) -> bool:
    """Whether the code gave the key of a call, or the name of a branch around it: its place in the code is free."""
    return "@" in key


class Entry(msgspec.Struct, gc=False, eq=False):
    """One recorded outcome that waits for its call. `record` is None while it is not in memory.

    There may be a million: a struct takes half the memory of an object, and the garbage collector does not visit it.
    """

    seq: int
    key: str
    ordinal: int
    digest: str
    kind: str
    #: The outcome that the code was given last when it asked; of a cancel from an older version, when it cancelled.
    knew: int
    record: Record | None
    keyed: bool
    cancelled: bool
    signal: int = 0  # the message that it is the answer of, if any
    child: str = ""  # the run that it started, if any
    covers: bool = False  # whether a replay needs no record below its key
    asked: bool = False  # whether the code has asked for it again
    given_up: bool = False  # whether the code has cancelled it again

    @classmethod
    def of(cls, record: Record) -> Entry:
        data, key, kind = data_of(record, Data), record.step, _KINDS.get(record.kind, record.kind)
        return cls(
            record.seq,
            key,
            record.ordinal,
            record.digest,
            kind,
            data.get("opened", record.asked or record.seq - 1),
            record,
            is_keyed(key),
            kind == Kind.STEP_CANCELLED,
            data.get("signal", 0),
            data.get("child", ""),
            data.get("covers", False),
        )

    def lies_ahead(self) -> bool:
        """Whether the code has yet to make the call, or to cancel it as before."""
        if is_command(self.key):  # not a call of the code
            return False
        return not self.asked or (self.cancelled and not self.given_up)


#: Each kind as one string, for all entries.
_KINDS = {kind.value: kind.value for kind in Kind}


class Tried:
    """The failed attempts of a step that has no outcome yet."""

    __slots__ = ("attempts", "first_at", "retry_at")

    def __init__(self) -> None:
        self.attempts = 0
        self.retry_at: datetime | None = None
        self.first_at: datetime | None = None


class History:
    """The records of a run that still count, by key and in order."""

    def __init__(self, run: Run, after: int = 0, *, without_states: bool = False) -> None:
        self.run = run.id
        self.has_undo = False  # whether a step can be undone, or an undo has begun
        self.seq = after  # the next record is a consolidated state, which replaces all earlier ones
        self.checksum = "" if after else origin(run)
        self._without_states = without_states
        self._kept_from = run.kept_from
        self.position: Position | None = None
        self.edits: list[Record] = []
        self.started_at: datetime | None = None
        self.exact_time = True  # unless an older version began the run
        self.nests = True  # unless an older version began the run
        self.typed = True  # unless an older version began the run
        self.wait_starts: dict[str, datetime] = {}
        self.generation = 0
        self.retried_at: datetime | None = None
        self.signals: set[int] = set()
        self.notes: dict[str, Record] = {}
        self.published: dict[str, bytes] = {}
        self.patches: dict[str, bool] = {}  # name of a patch → whether the run applies it
        self.tried: dict[str, Tried] = {}
        self.marks: dict[str, Record] = {}
        self.saved: dict[str, SavedValue] = {}
        self.entries: dict[str, Entry] = {}
        self._places: dict[int, str] = {}  # keys by the hash of branch and ordinal, which takes little memory
        self.order: deque[Entry] = deque()
        # keys of recorded results, below which a replay needs no record, each with its seq
        self._covering: dict[str, int] = {}
        self.newest_step = ""  # the call that has the newest outcome
        self._begun: dict[str, Entry] = {}  # calls without an outcome that the code has not made again
        # calls that were open when outcomes arrived, by the last delivery before the call
        self._asked_early: deque[Entry] = deque()
        self.steps = 0
        self._kept = 0
        self._outcomes: list[Entry] = []
        self._attempts: list[Record] = []
        self._notes: list[Record] = []
        self._marks: list[Record] = []
        self._resumptions: list[Record] = []
        self._waits: list[Record] = []
        self._patches: list[Record] = []
        self._saved: list[Record] = []
        self._by_kind = {
            Kind.PROGRESS.value: self._saved,
            Kind.STEP_STARTED.value: self._marks,
            Kind.WAIT_STARTED.value: self._waits,
            Kind.PATCH.value: self._patches,
        }
        self._reads = Reads()
        self.superseded = Superseded()
        self._begins_here = after > 0
        self._steps_before = self._generation_before = self._copied = 0
        self.spent = Spent(run.created_at)
        self.last_at = run.created_at
        self.recoveries = Recoveries()
        #: The newest lease in the records; None if only records before this history contain it.
        self.last_epoch: int | None = None if after else 0
        self._newest = ("", "")  # kind and outcome of the newest record

    def add(self, rows: Iterable[Row]) -> None:
        """Verify the next rows of the chain and add them.

        Consolidated states add no information, so a history without them may be loaded even if one is damaged.
        """
        if not self._without_states:
            self._add(rows)
            return
        for is_state, some in groupby(rows, key=self._is_spare_state):
            if not is_state:
                self._add(some)
                continue
            for row in some:
                if row.seq != self.seq + 1:
                    raise CheckpointCorrupt(
                        f"run {self.run!r}: chain broken at seq {self.seq + 1}: the record is missing"
                    )
                self.seq, self.checksum = row.seq, ""

    def _is_spare_state(self, row: Row) -> bool:
        """Whether a row is a consolidated state that earlier records can replace."""
        return row.kind == Kind.STATE.value and row.seq != self._kept_from

    def _add(self, rows: Iterable[Row]) -> None:
        for record, checksum in unseal(rows, self.run, self.seq, self.checksum, self._kept_from):
            self.seq, self.checksum = record.seq, checksum
            self.spent.add(record)
            self.last_at = record.finished_at or self.last_at
            if record.claimed is not None:
                self.last_epoch = record.claimed.epoch
            elif record.seq == 1:
                self.last_epoch = 1  # created with a lease
            if record.data is not None and "undo" in record.data:
                self.has_undo = True
            self.recoveries.add(record)
            self._take(record)
            self._newest = record.kind, record.outcome
            self._begins_here = False
            self._reads.add(record)

    def _take(self, record: Record) -> None:
        kind = record.kind
        if kind in ANSWERS_CALL:
            if kind == Kind.STEP_FAILED and record.retry_at is not None:
                self._attempts.append(record)
            else:
                self._add_outcome(record)
        elif kind in NOTE and not (record.attempt and kind == Kind.EMITTED):  # a step's own tokens are not notes
            self._notes.append(record)
        elif (same_kind := self._by_kind.get(kind)) is not None:
            same_kind.append(record)
        elif kind == Kind.RUN_STARTED:
            self.started_at = record.finished_at
            data = data_of(record, RunStartedData)
            self.exact_time, self.nests = bool(data.get("exact_time")), bool(data.get("nests"))
            self.typed = bool(data.get("typed"))
        elif kind == Kind.SUPERSEDED:
            self.superseded.add(record)
            if goes_back(record):
                self._resumptions.append(record)
            if data_of(record, SupersededData).get("act") in EDITS:
                self.edits.append(record)
        elif kind == Kind.STATE and (self._begins_here or record.seq == self._kept_from):
            self._begin_with(record)

    @property
    def ended_as(self) -> Status | None:
        """Return how the run has ended or was set aside, if nobody has let it go on since."""
        return ends_as(*self._newest)

    def begin_copy(self, rows: Iterable[Row]) -> None:
        """Read the number of copied records from the first record of a fork; a state among them is its original's."""
        for record, _ in unseal(rows, self.run):
            self._copied = data_of(record, RunStartedData).get("origin_seq", 0)

    def _begin_with(self, record: Record) -> None:
        """Begin with a consolidated state: nothing before it is needed."""
        self.position, whole = Position.restored(record)
        self.started_at, self.exact_time = whole.started_at, whole.exact_time
        self.wait_starts.update(whole.waits)
        self.patches.update(whole.patches)
        self.published.update((key, bytes(value)) for key, value in whole.published.items())
        self._generation_before, self._steps_before = whole.generation, whole.steps
        if whole.spent:
            forked_at = self.spent.began
            self.spent = Spent.from_data(whole.spent)
            if record.seq <= self._copied:
                self.spent.copied(record.seq, self._copied, forked_at)
        for first, last in whole.signals:
            self.signals.update(range(first, last + 1))

    def _add_outcome(self, record: Record) -> None:
        entry = Entry.of(record)
        size = RECORD_BYTES + (len(record.value) if record.value else 0)
        self._kept += size
        if self._kept > KEEP_BYTES and (record.kind == Kind.STEP_COMPLETED or size > 2 * RECORD_BYTES):
            self._kept -= size
            entry.record = None
        self._outcomes.append(entry)

    def arrange(self, run: Run) -> None:
        """Check the complete rows against the head, and index what counts."""
        if (self.seq, self.checksum or run.checksum) != (run.seq, run.checksum):
            raise CheckpointCorrupt(
                f"run {run.id!r}: chain broken at seq {self.seq + 1}: the head names seq {run.seq}, "
                f"but the records end at {self.seq}"
            )
        gone = self.superseded
        self.generation = self._generation_before + gone.generation
        self.edits = [record for record in self.edits if record.seq not in gone]
        self._arrange_outcomes(gone)
        self._arrange_begun(gone)
        self._arrange_waits(gone)
        self._arrange_asked(gone)
        self.notes = {
            note.step: note
            for note in self._notes
            if note.seq not in gone and not self._is_covered(note.step, note.seq)
        }
        for record in self._patches:
            if record.seq not in gone:
                self.patches[record.step.removeprefix(PATCH)] = data_of(record, PatchData).get("choice") != 0
        for note in self._notes:
            if note.kind == Kind.PUBLISHED and note.seq not in gone:
                self.published[data_of(note, PublishedData).get("key", "")] = note.raw()
        self.signals |= self._reads.numbers(gone.__contains__)
        self._reads = Reads()
        resumptions = [record.finished_at for record in self._resumptions if record.seq not in gone]
        self.retried_at = resumptions[-1] if resumptions else None
        for told in (self._outcomes, self._attempts, self._notes, self._marks, self._waits):
            told.clear()
        for record in self._saved:
            key = self._rename(record.step, record.seq)
            if record.seq not in gone and key not in self.entries and not self._is_covered(key, record.seq):
                self.saved[key] = saved_value(record)
        self._saved.clear()
        self._patches.clear()
        self._resumptions.clear()

    def _rename(self, key: str, seq: int) -> str:
        """Return the key under which a migration lets the code find an earlier record."""
        for migration in self.edits:
            if seq < migration.seq:
                key = data_of(migration, SupersededData).get("renames", {}).get(key, key)
        return key

    def _arrange_outcomes(self, gone: Superseded) -> None:
        for entry in self._outcomes:
            if entry.seq not in gone:
                if self.edits:
                    entry.key = self._rename(entry.key, entry.seq)
                before = self.entries.get(entry.key)
                if entry.cancelled and before is not None:  # an abandoned start whose child exists, or a result
                    entry.child, entry.covers = before.child, before.covers
                self.entries[entry.key] = entry  # a later record of a call replaces an earlier one
        self._covering = {entry.key: entry.seq for entry in self.entries.values() if entry.covers}
        if self._covering:
            self.entries = {key: entry for key, entry in self.entries.items() if not self._is_covered(key, entry.seq)}
        for entry in self.entries.values():
            # A stop is alone in its place, which a branch may share. A call with its own key has no place.
            if entry.ordinal and AT_STOP not in entry.key:
                self._places[hash((entry.key.rpartition("/")[0], entry.ordinal))] = entry.key
        self.order.extend(sorted(self.entries.values(), key=_seq))
        if self.order:
            self.newest_step = self.order[-1].key
        elif self.position is not None:
            self.newest_step = self.position.step or ""
        self.steps = self._steps_before + len(self.entries)

    def _arrange_begun(self, gone: Superseded) -> None:
        """Collect calls without an outcome: failed attempts, and at-most-once steps that were started."""
        for record in self._attempts:
            key = self._rename(record.step, record.seq)
            if record.seq not in gone and key not in self.entries and not self._is_covered(key, record.seq):
                tried = self.tried.setdefault(key, Tried())
                tried.attempts, tried.retry_at = record.attempt, record.retry_at
                tried.first_at = tried.first_at or record.started_at
                self._place(key, record.ordinal)
        ended = {record.step: record.seq for record in self._attempts if record.seq not in gone}
        for record in self._marks:
            key = self._rename(record.step, record.seq)
            if record.seq in gone or key in self.entries or self._is_covered(key, record.seq):
                continue
            if record.seq > ended.get(record.step, 0):  # otherwise the attempt of this mark has failed
                self.marks[key] = record
                self._place(key, record.ordinal)

    def _is_covered(self, key: str, seq: int) -> bool:
        """Whether a recorded result above a call spares a replay the call.

        It also spares an undo of that call, unless the call was undone after the result.
        """
        if not self._covering:
            return False
        undone = undone_key(key)
        key = undone or key
        while key := key.rpartition("/")[0]:
            if key in self._covering and (not undone or seq < self._covering[key]):
                return True
        return False

    def _place(self, key: str, ordinal: int) -> None:
        """Keep the place of a call without an outcome. A call with its own key has none."""
        if ordinal:
            self._places.setdefault(hash((key.rpartition("/")[0], ordinal)), key)

    def key_at(self, path: str, ordinal: int) -> str | None:
        """Return the recorded key of the call with this ordinal in a branch."""
        key = self._places.get(hash((path, ordinal)))
        return key if key is not None and key.rpartition("/")[0] == path else None

    def _arrange_waits(self, gone: Superseded) -> None:
        """Collect the starts of open waits. If an edit chose another next step, its waits start again."""
        led = max((edit.seq for edit in self.edits if "next" in data_of(edit, SupersededData)), default=0)
        if led:
            self.wait_starts.clear()
        for record in self._waits:
            key = self._rename(record.step, record.seq)
            if record.seq in gone or record.seq <= led or record.started_at is None:
                continue
            if self._is_covered(key, record.seq):
                continue
            self.wait_starts[key] = record.started_at
        for key in self.entries:
            self.wait_starts.pop(key, None)

    def _arrange_asked(self, gone: Superseded) -> None:
        """Collect the calls that were open while outcomes of others were delivered."""
        early = [entry for entry in self.order if entry.knew < entry.seq - 1 and not entry.keyed]
        for record in (*self._attempts, *self._marks, *self._waits):
            key = self._rename(record.step, record.seq)
            known = key in self.entries or key in self._begun or self._is_covered(key, record.seq)
            if record.seq not in gone and not known:
                self._begun[key] = entry = Entry.of(record)
                entry.record = None
                if not entry.keyed:
                    early.append(entry)
        self._asked_early.extend(sorted(early, key=_knew))

    def asked_again(self, key: str) -> None:
        """Note that the code makes a call without a recorded outcome again."""
        entry = self._begun.pop(key, None)
        if entry is not None:
            entry.asked = True

    def unasked_before(self, seq: int) -> Entry | None:
        """Return a call that was open when outcome `seq` was delivered, and that the code has yet to make."""
        early = self._asked_early
        while early and early[0].knew < seq:
            entry = early[0]
            if not entry.asked and (entry.seq > seq or self._begun.get(entry.key) is entry):
                return entry
            early.popleft()
        return None

    def open_waits(self) -> dict[str, datetime]:
        """Return the start times of open waits, by their keys."""
        return self.wait_starts

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run for a consolidated state, beside the position in the graph."""
        return facts(self, self.signals)

    def taken(self, entry: Entry) -> None:
        """Remove the next outcome, which the code is given now."""
        self.order.popleft()
        del self.entries[entry.key]

    def refill(self, records: Iterable[Record]) -> None:
        """Load values into memory again, for the entries that come next."""
        found = {record.seq: record for record in records}
        last = max(found, default=0)
        for place, entry in enumerate(self.order):
            if entry.record is None:
                entry.record = found.get(entry.seq)
            if entry.seq >= last and place:  # the first may be out of order
                break


def values_of(rows: Iterable[Row], run: str, after: int) -> list[Record]:
    """Read records again for their values, as many as may be kept in memory."""
    found: list[Record] = []
    kept = 0
    for record, _ in unseal(rows, run, after):
        found.append(record)
        kept += RECORD_BYTES + (len(record.value) if record.value else 0)
        if kept > KEEP_BYTES:  # a page of compressed values may expand to far more than its size
            break
    return found


def _seq(entry: Entry) -> int:
    return entry.seq


def _knew(entry: Entry) -> int:
    return entry.knew
