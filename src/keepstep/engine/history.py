"""What a run has recorded, arranged for replay: loaded once per claim, dropped piece by piece as it is consumed."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointCorrupt, RunNotFound
from ..model import Kind, Status
from ..model.signal import GO, RESERVED
from ..stores.records import Record, check_origin, origin, unseal, unseal_some
from .position import EDITS, Position, facts
from .spending import Spent

if TYPE_CHECKING:
    from ..model import Run
    from ..ports import Row, Store
    from .engine import Engine

#: Values kept in memory while a history waits to be consumed; beyond this they are read again when they are reached.
KEEP_BYTES = 16_000_000

#: Kinds that answer a call of the workflow's code, in sequence order.
_OUTCOMES = frozenset(
    {
        Kind.STEP_COMPLETED.value,
        Kind.STEP_FAILED.value,
        Kind.STEP_CANCELLED.value,
        Kind.TIMER.value,
        Kind.SIGNAL.value,
        Kind.CHILD.value,
        Kind.BARRIER.value,
    }
)
#: After so many records whoever reads a history lets others have the loop: that is about 4 ms.
REST_AFTER = 100
#: How far from the end a consolidated state is looked for first.
FIRST_SPAN = 128
#: Kinds by which the code's own waits hear signals; others are of what a person said about a step, which is past.
_HEARING = frozenset({Kind.SIGNAL.value, Kind.CHILD.value})
#: In the key of a wait at a breakpoint, which a person lets the run pass.
_AT_STOP = f"/wait_for:{GO}"
_NOTES = frozenset({Kind.PUBLISHED.value, Kind.DECISION.value, Kind.REPLY.value})
#: What the key of a record of a patch begins with.
PATCH = "patch:"


async def read_records(engine: Engine, run: Run) -> AsyncIterator[tuple[Record, str]]:
    """Every record of a run with its checksum, verified from how the run was created on."""
    check_origin(run)
    after, previous = 0, origin(run)
    try:
        while rows := await engine.read(engine.store.list_checkpoints, run.id, after):
            for record, checksum in unseal(rows, run.id, after, previous):
                after, previous = record.seq, checksum
                if after == run.seq:
                    check_end(run, after, checksum)
                yield record, checksum
                if after % REST_AFTER == 0:
                    await asyncio.sleep(0)
        check_end(run, after, previous)
    except CheckpointCorrupt:
        await check_not_removed(engine, run)
        raise


async def check_not_removed(engine: Engine, run: Run) -> None:
    """Raise `RunNotFound` if a run was removed while it was read: then what is missing is no damage."""
    try:
        now = await engine.read(engine.store.get_run, run.id)
    except CheckpointCorrupt:
        return
    if now is None or now.created_at != run.created_at:
        raise RunNotFound(f"run {run.id!r} was removed from {engine.store.url} while it was read", run.id) from None


def check_end(run: Run, seq: int, checksum: str) -> None:
    """Raise if the last record that was read is not as new as a run's head says, or is another than the one it names.

    Nothing follows a run's newest record that would show that it was changed; others may have followed since.
    """
    if seq < run.seq:
        raise CheckpointCorrupt(
            f"run {run.id!r}: chain broken at seq {seq + 1}: the head names seq {run.seq}, and the records end at {seq}"
        )
    if seq == run.seq and checksum != run.checksum:
        raise CheckpointCorrupt(f"run {run.id!r}: the record at seq {seq} is not the one that its head names")


async def newest_state(engine: Engine, run: Run, upto: int | None = None) -> int | None:
    """The number of the newest consolidated state that counts, or None: what is before it need not be read.

    It is looked for from the end, in steps that grow: it is seldom further away than a thousand records.
    """
    end = high = run.seq if upto is None else upto
    while high > 0:
        found = await _newest(engine, run.id, high)
        if found is None:
            return None
        rows = await engine.read(_superseding, engine.store, run.id, found)
        limit = min(
            (_last_that_counts(record) for record, _ in unseal_some(rows, run.id) if record.seq <= end), default=found
        )
        if limit >= found:
            return found
        high = limit
    return None


async def _newest(engine: Engine, run: str, high: int) -> int | None:
    span = FIRST_SPAN
    while True:
        low = max(0, high - span)
        after, found = low, None
        while rows := await engine.read(_states, engine.store, run, after):
            found = max((row.seq for row in rows if row.seq <= high), default=found)
            after = rows[-1].seq
        if found is not None or low == 0:
            return found
        span *= 4


def _states(store: Store, run: str, after: int) -> list[Row]:
    return store.list_checkpoints(run, after, kinds=(Kind.STATE.value,))


def _superseding(store: Store, run: str, after: int) -> list[Row]:
    return store.list_checkpoints(run, after, kinds=(Kind.SUPERSEDED.value,))


def _last_that_counts(record: Record) -> int:
    """Up to where a `superseded` record leaves everything as it is."""
    data = record.data or {}
    named: list[int] = [seq - 1 for seq in data.get("seqs", ())]
    beyond: int = data.get("beyond", record.seq)
    return min([*named, beyond])


async def read_history(engine: Engine, run: Run, history: History) -> History:
    """Everything that a run has recorded from where a history begins, verified and arranged."""
    if history.seq and run.origin is not None:
        history.begin_copy(await engine.read(engine.store.list_checkpoints, run.id, 0, 1))
    while history.seq < run.seq:
        rows = await engine.read(engine.store.list_checkpoints, run.id, history.seq)
        if not rows:
            break
        for first in range(0, len(rows), REST_AFTER):
            history.add(rows[first : first + REST_AFTER])
            await asyncio.sleep(0)
    history.arrange(run)
    return history


class Superseded:
    """Which records of a run no longer count: told by its `superseded` records, given in order.

    A retry names them one by one. A rewind names the last one that counts: what counted then counts again, and nothing
    that came after it, up to the rewind itself, does; an earlier retry or rewind among them is undone with the rest.
    """

    def __init__(self) -> None:
        #: How often a person has changed what counts; it only grows, so that no key or child id comes twice.
        self.generation = 0
        #: After each of those records: its number, what was named one by one, and the ranges that were left, each as
        #: the last record that counts and the rewind; these are apart from each other, and in order.
        self._after: list[tuple[int, frozenset[int], tuple[tuple[int, int], ...]]] = [(0, frozenset(), ())]

    def add(self, record: Record) -> None:
        """Take in the next `superseded` record."""
        data = record.data or {}
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

    def rewound(self, seq: int) -> bool:
        """Whether a record was left behind by a rewind: what it had read is unread again."""
        ranges = self._after[-1][2]
        place = bisect_left(ranges, seq, key=_until)
        return place < len(ranges) and ranges[place][0] < seq < ranges[place][1]


def goes_back(record: Record) -> bool:
    """Whether a `superseded` record lets a run go on from an earlier point, with full time for what waits there."""
    data = record.data or {}
    return data.get("act") in ("retry", "rewind") or data.get("before") in (Status.FAILED, Status.SET_ASIDE)


def superseded_by(record: Record) -> int:
    """How many records a `superseded` record is about."""
    data = record.data or {}
    beyond = data.get("beyond")
    return len(data.get("seqs", ())) if beyond is None else max(record.seq - 1 - beyond, 0)


def _is_state(row: Row) -> bool:
    return row.kind == Kind.STATE.value


def _number(after: tuple[int, Any, Any]) -> int:
    return after[0]


def _until(span: tuple[int, int]) -> int:
    return span[1]


class Entry:
    """One recorded outcome that waits for the code to ask for it. `record` is None while its value is not in memory."""

    __slots__ = (
        "asked",
        "cancelled",
        "child",
        "digest",
        "given_up",
        "key",
        "kind",
        "knew",
        "ordinal",
        "record",
        "seq",
        "signal",
    )

    def __init__(self, record: Record) -> None:
        self.seq = record.seq
        self.key = record.step
        self.ordinal = record.ordinal
        self.digest = record.digest
        self.kind = record.kind
        self.cancelled = record.kind == Kind.STEP_CANCELLED
        self.signal: int = (record.data or {}).get("signal", 0)  # the message that it is the answer of, if any
        self.child: str = (record.data or {}).get("child", "")  # the run that it started, if any
        self.record: Record | None = record
        self.knew = record.asked or record.seq - 1  # the outcome that the code was given last when it asked
        self.asked = False  # whether the code has asked for it again
        self.given_up = False  # whether the code has cancelled it again

    def lies_ahead(self) -> bool:
        """Whether the code has yet to ask for it, or to cancel it as it did."""
        if self.key.startswith(RESERVED):  # no call of the code
            return False
        return not self.asked or (self.cancelled and not self.given_up)


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
        self.seq = after  # a consolidated state follows, which stands for everything up to it
        self.checksum = "" if after else origin(run)
        self._without_states = without_states
        self.position: Position | None = None
        self.edits: list[Record] = []
        self.started_at: datetime | None = None
        self.exact_time = True  # unless a version without began the run
        self.wait_starts: dict[str, datetime] = {}
        self.generation = 0
        self.retried_at: datetime | None = None
        self.signals: set[int] = set()
        self.notes: dict[str, Record] = {}
        self.patches: dict[str, bool] = {}  # by their names, whether the run takes them
        self.tried: dict[str, Tried] = {}
        self.marks: dict[str, Record] = {}
        self.entries: dict[str, Entry] = {}
        self.places: dict[tuple[str, int], str] = {}
        self.order: deque[Entry] = deque()
        self._begun: dict[str, Entry] = {}  # what has no outcome yet, and the code has not asked for again
        self._asked_early: deque[Entry] = deque()  # calls that were open when outcomes came, by what the code knew
        self.steps = 0
        self._kept = 0
        self._outcomes: list[Entry] = []
        self._attempts: list[Record] = []
        self._notes: list[Record] = []
        self._marks: list[Record] = []
        self._resumptions: list[Record] = []
        self._waits: list[Record] = []
        self._patches: list[Record] = []
        self._by_kind = {
            Kind.STEP_STARTED.value: self._marks,
            Kind.WAIT_STARTED.value: self._waits,
            Kind.PATCH.value: self._patches,
        }
        self._taken: list[tuple[int, str, int, bool]] = []
        self.superseded = Superseded()
        self._begins_here = after > 0
        self._steps_before = self._generation_before = self._copied = 0
        self.spent = Spent(run.created_at)
        self.last_at = run.created_at
        #: The newest lease under which something was recorded; None if that is told by a record before this history.
        self.last_epoch: int | None = None if after else 0

    def add(self, rows: Iterable[Row]) -> None:
        """Verify the next rows of the chain and take them in.

        Consolidated states say nothing that the other records do not: without them, they may even be damaged.
        """
        if not self._without_states:
            self._add(rows)
            return
        for is_state, some in groupby(rows, key=_is_state):
            if not is_state:
                self._add(some)
                continue
            for row in some:
                if row.seq != self.seq + 1:
                    raise CheckpointCorrupt(f"run {self.run!r}: chain broken at seq {self.seq + 1}: it is not there")
                self.seq, self.checksum = row.seq, ""

    def _add(self, rows: Iterable[Row]) -> None:
        for record, checksum in unseal(rows, self.run, self.seq, self.checksum):
            self.seq, self.checksum = record.seq, checksum
            self.spent.add(record)
            self.last_at = record.finished_at or self.last_at
            if record.claimed is not None:
                self.last_epoch = record.claimed.epoch
            elif record.seq == 1:
                self.last_epoch = 1  # leased at birth
            self._take(record)
            self._begins_here = False
            if record.data and "signal" in record.data:
                by_code = (
                    record.kind in _HEARING and not record.step.startswith(RESERVED) and _AT_STOP not in record.step
                )
                self._taken.append((record.seq, record.step, record.data["signal"], by_code))
            elif record.kind == Kind.STEP_CANCELLED:
                self._taken.append((record.seq, record.step, 0, True))

    def _take(self, record: Record) -> None:
        kind = record.kind
        if kind in _OUTCOMES:
            if kind == Kind.STEP_FAILED and record.retry_at is not None:
                self._attempts.append(record)
            else:
                self._add_outcome(record)
        elif kind in _NOTES or (kind == Kind.EMITTED and not record.attempt):  # a step's own tokens are not notes
            self._notes.append(record)
        elif (same_kind := self._by_kind.get(kind)) is not None:
            same_kind.append(record)
        elif kind == Kind.RUN_STARTED:
            self.started_at = record.finished_at
            self.exact_time = bool((record.data or {}).get("exact_time"))
        elif kind == Kind.SUPERSEDED:
            self.superseded.add(record)
            if goes_back(record):
                self._resumptions.append(record)
            if (record.data or {}).get("act") in EDITS:
                self.edits.append(record)
        elif kind == Kind.STATE and self._begins_here:
            self._begin_with(record)

    def begin_copy(self, rows: Iterable[Row]) -> None:
        """Read from the first record of a fork how many records were copied; a state among them is its origin's."""
        for record, _ in unseal(rows, self.run):
            self._copied = (record.data or {}).get("origin_seq", 0)

    def _begin_with(self, record: Record) -> None:
        """Take a consolidated state as the beginning: nothing before it is needed."""
        self.position, whole = Position.restored(record)
        self.started_at, self.exact_time = whole.started_at, whole.exact_time
        self.wait_starts.update(whole.waits)
        self.patches.update(whole.patches)
        self._generation_before, self._steps_before = whole.generation, whole.steps
        if whole.spent:
            forked_at = self.spent.began
            self.spent = Spent.from_data(whole.spent)
            if record.seq <= self._copied:
                self.spent.copied(record.seq, self._copied, forked_at)
        for first, last in whole.signals:
            self.signals.update(range(first, last + 1))

    def _add_outcome(self, record: Record) -> None:
        entry = Entry(record)
        size = len(record.value) if record.value else 0
        self._kept += size
        if self._kept > KEEP_BYTES and size > 1000:
            self._kept -= size
            entry.record = None
        self._outcomes.append(entry)

    def arrange(self, run: Run) -> None:
        """All rows are in: check them against the head, and index what counts."""
        if (self.seq, self.checksum or run.checksum) != (run.seq, run.checksum):
            raise CheckpointCorrupt(
                f"run {run.id!r}: chain broken at seq {self.seq + 1}: the head names seq {run.seq}, "
                f"and the records end at {self.seq}"
            )
        gone = self.superseded
        self.generation = self._generation_before + gone.generation
        self.edits = [record for record in self.edits if record.seq not in gone]
        self._arrange_outcomes(gone)
        self._arrange_begun(gone)
        self._arrange_waits(gone)
        self._arrange_asked(gone)
        self.notes = {note.step: note for note in self._notes if note.seq not in gone}
        for record in self._patches:
            if record.seq not in gone:
                self.patches[record.step.removeprefix(PATCH)] = (record.data or {}).get("choice") != 0
        self._read_signals(gone)
        resumptions = [record.finished_at for record in self._resumptions if record.seq not in gone]
        self.retried_at = resumptions[-1] if resumptions else None
        for told in (self._outcomes, self._attempts, self._notes, self._marks, self._waits, self._taken):
            told.clear()
        self._patches.clear()
        self._resumptions.clear()

    def _rename(self, key: str, seq: int) -> str:
        """The key under which a migration lets the code ask for what was recorded before it."""
        for migration in self.edits:
            if seq < migration.seq:
                key = (migration.data or {}).get("renames", {}).get(key, key)
        return key

    def _arrange_outcomes(self, gone: Superseded) -> None:
        for entry in self._outcomes:
            if entry.seq not in gone:
                if self.edits:
                    entry.key = self._rename(entry.key, entry.seq)
                before = self.entries.get(entry.key)
                if entry.cancelled and before is not None:  # a start that the code gave up after its child was there
                    entry.child = before.child
                self.entries[entry.key] = entry  # a later record of one call overrides an earlier one
        for entry in self.entries.values():
            if _AT_STOP not in entry.key:  # it is alone in its place, which a branch may share
                self.places[entry.key.rpartition("/")[0], entry.ordinal] = entry.key
        self.order.extend(sorted(self.entries.values(), key=_seq))
        self.steps = self._steps_before + len(self.entries)

    def _arrange_begun(self, gone: Superseded) -> None:
        """What has no outcome yet: attempts that failed, and steps that were started at most once."""
        for record in self._attempts:
            key = self._rename(record.step, record.seq)
            if record.seq not in gone and key not in self.entries:
                tried = self.tried.setdefault(key, Tried())
                tried.attempts, tried.retry_at = record.attempt, record.retry_at
                tried.first_at = tried.first_at or record.started_at
                self.places.setdefault((key.rpartition("/")[0], record.ordinal), key)
        for record in self._marks:
            key = self._rename(record.step, record.seq)
            if record.seq not in gone and key not in self.entries:
                self.marks[key] = record
                self.places.setdefault((key.rpartition("/")[0], record.ordinal), key)

    def _arrange_waits(self, gone: Superseded) -> None:
        """When waits began that have no outcome yet. Who was led to another step asks for those of that one anew."""
        led = max((edit.seq for edit in self.edits if "next" in (edit.data or {})), default=0)
        if led:
            self.wait_starts.clear()
        for record in self._waits:
            if record.seq not in gone and record.seq > led and record.started_at is not None:
                self.wait_starts[self._rename(record.step, record.seq)] = record.started_at
        for key in self.entries:
            self.wait_starts.pop(key, None)

    def _arrange_asked(self, gone: Superseded) -> None:
        """Which calls were open while outcomes of others were delivered."""
        early = [entry for entry in self.order if not entry.cancelled and entry.knew < entry.seq - 1]
        for record in (*self._attempts, *self._marks, *self._waits):
            key = self._rename(record.step, record.seq)
            if record.seq not in gone and key not in self.entries and key not in self._begun:
                self._begun[key] = entry = Entry(record)
                entry.record = None
                early.append(entry)
        self._asked_early.extend(sorted(early, key=_knew))

    def asked_again(self, key: str) -> None:
        """The code asks for a call that has no recorded outcome."""
        entry = self._begun.pop(key, None)
        if entry is not None:
            entry.asked = True

    def has_unasked_before(self, seq: int) -> bool:
        """Whether the code has yet to ask for a call that was open when outcome `seq` was delivered."""
        early = self._asked_early
        while early and early[0].knew < seq:
            entry = early[0]
            if not entry.asked and (entry.seq > seq or self._begun.get(entry.key) is entry):
                return True
            early.popleft()
        return False

    def open_waits(self) -> dict[str, datetime]:
        """When the waits began that are recorded as open, by their keys."""
        return self.wait_starts

    def _read_signals(self, gone: Superseded) -> None:
        """Which signals have been read: not those that only waits of the code have heard which no longer count."""
        heard: dict[str, int] = {}
        for seq, step, signal, by_code in self._taken:
            if by_code and seq in gone:
                continue
            if signal:
                self.signals.add(signal)
                heard[step] = signal
            elif step in heard:  # taken, but never told: unread again
                self.signals.discard(heard.pop(step))

    def facts(self) -> dict[str, Any]:
        """What a consolidated state says of its run, beside the position of the walk."""
        return facts(self, self.signals)

    def refill(self, rows: Iterable[Row], after: int) -> None:
        """Take values into memory again, for the entries that come next."""
        wanted = {entry.seq: entry for entry in self.order if entry.record is None}
        kept = 0
        for record, _ in unseal(rows, self.run, after):
            entry = wanted.get(record.seq)
            if entry is not None:
                entry.record = record
                kept += len(record.value) if record.value else 0
            if kept > KEEP_BYTES:  # a page of compressed values may hold far more than its size
                return


def _seq(entry: Entry) -> int:
    return entry.seq


def _knew(entry: Entry) -> int:
    return entry.knew
