"""Verifying what is stored: every record, signal and head, and the order of the store itself; nothing is changed.

Plain blocking code over a store, a page at a time: it needs no engine, and no more memory for more runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256

import msgspec

from ..errors import CheckpointCorrupt, RunNotFound, SchemaMismatch, StoreError
from ..model import FINISHED, Flaw, Kind, Outcome, Run, RunPage, RunQuery, Signal, Status
from ..ports import Row, Store
from ..stores.records import FORMAT, NEWEST_FORMAT, Record, check_origin, origin, unseal
from ..stores.rules import check_signal
from ..stores.sealed import below

#: Runs asked for at once.
PAGE = 200
#: Runs asked for at once whose inputs come with them.
FEW = 10
#: How many damaged runs a verification keeps by name; every one is told of on the way, and the rest is counted.
KEPT = 1000

#: A damaged signal that comes back under so many numbers has lost its own.
TRIES = 100
#: What a damaged head says is missing is counted up to this.
MOST_MISSING = 1_000_000

_BROKEN = (CheckpointCorrupt, SchemaMismatch)
_ENDS = {
    (Kind.RUN_FINISHED.value, Outcome.SUCCESS.value): Status.COMPLETED,
    (Kind.RUN_FINISHED.value, Outcome.FAILURE.value): Status.FAILED,
    (Kind.RUN_FINISHED.value, Outcome.CANCELLED.value): Status.CANCELLED,
}


@dataclass(slots=True)
class Count:
    """How many there are, and how many of them are as they were written. `legacy` counts valid ones of old formats."""

    total: int = 0
    valid: int = 0
    invalid: int = 0
    legacy: int = 0

    def add(self, other: Count) -> None:
        self.total += other.total
        self.valid += other.valid
        self.invalid += other.invalid
        self.legacy += other.legacy


@dataclass(slots=True)
class RunCheck:
    """What one run's records and signals are worth: `problems` is empty if everything is as it was written.

    The first `sound` records are certainly as they were written, and `checksum` is that of the last of them. Of two
    neighbours that contradict each other, neither is certain. With `newer` the one after them is in a format that only
    a newer Keepstep reads.
    """

    id: str
    problems: list[str] = field(default_factory=list)
    records: Count = field(default_factory=Count)
    signals: Count = field(default_factory=Count)
    sound: int = 0
    checksum: str = ""
    newer: bool = False

    @property
    def legacy(self) -> bool:
        """Nothing is wrong, but part of it was written in an older format, which is held to less."""
        return not self.problems and bool(self.records.legacy or self.signals.legacy)


@dataclass(slots=True)
class Verification:
    """What a look at everything found. `damaged` names runs with what is wrong, the first thousand of them."""

    runs: Count = field(default_factory=Count)
    records: Count = field(default_factory=Count)
    signals: Count = field(default_factory=Count)
    damaged: dict[str, list[str]] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Everything is as it was written."""
        return not (self.runs.invalid or self.flaws)


def verify(
    store: Store, run_ids: Iterable[str] = (), *, tell: Callable[[str, list[str]], None] | None = None
) -> Verification:
    """Read everything, or only some runs, and say what is not as it was written; `tell` hears of each damaged run."""
    found = Verification()
    wanted = tuple(dict.fromkeys(run_ids))
    for check in map(_by_name(store), wanted) if wanted else _every(store, found):
        if check is None:
            continue
        found.records.add(check.records)
        found.signals.add(check.signals)
        bad = bool(check.problems)
        found.runs.add(Count(1, int(not bad), int(bad), int(check.legacy)))
        if bad:
            if len(found.damaged) < KEPT:
                found.damaged[check.id] = check.problems
            if tell is not None:
                tell(check.id, check.problems)
    return found


def _every(store: Store, found: Verification) -> Iterator[RunCheck | None]:
    """Every run, one after the other; what is wrong with the store itself goes into `found`."""
    try:
        found.flaws += store.check()
        damaged = [one for one in store.list_workers() if one.damage]
        found.flaws += [Flaw("worker", one.id, f"worker {one.id}: {one.damage}") for one in damaged]
        for run in all_runs(store, RunQuery(limit=PAGE)):
            yield check_named(store, run if isinstance(run, str) else run.id)
    except StoreError as error:
        found.flaws.append(Flaw("integrity", store.url, f"the store cannot be read: {error}"))


def all_runs(store: Store, query: RunQuery) -> Iterator[Run | str]:
    """Every run that a query asks for, page by page; of one that cannot be read, its name."""
    while True:
        page = store.list_runs(query)
        yield from page.unreadable
        yield from page.runs
        if page.next is None:
            return
        query = replace(query, after=page.next)


def oldest_first(store: Store, query: RunQuery) -> Iterator[Run | str]:
    """As `all_runs`, from its end: a store that is given them in this order lists them as this one does.

    Only the place where each page begins is remembered, and the newest page, since others may come before it meanwhile.
    """
    newest = page = store.list_runs(query)
    places: list[str] = []
    while page.next is not None:
        places.append(page.next)
        page = store.list_runs(replace(query, after=page.next))
    told: set[str] = set()
    for place in reversed(places):
        page = store.list_runs(replace(query, after=place))
        yield from _backwards(page, told)
        told = {*page.unreadable, *(run.id for run in page.runs)}
    yield from _backwards(newest, told)


def _backwards(page: RunPage, told: set[str]) -> Iterator[Run | str]:
    """A page from its end, without what it shares with the one before: it reaches further when runs are removed."""
    yield from (name for name in reversed(page.unreadable) if name not in told)
    yield from (run for run in reversed(page.runs) if run.id not in told)


def _by_name(store: Store) -> Callable[[str], RunCheck]:
    def look(run_id: str) -> RunCheck:
        check = check_named(store, run_id)
        if check is None:
            raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
        return check

    return look


def check_named(store: Store, run_id: str) -> RunCheck | None:
    """Verify one run by its name; None if there is none."""
    try:
        run = head_of(store, run_id)
    except _BROKEN as error:
        return RunCheck(run_id, [str(error)])
    return None if run is None else check_run(store, run)


def head_of(store: Store, run_id: str) -> Run | None:
    """The run, without its outcome if the record of that is damaged."""
    try:
        return store.get_run(run_id)
    except CheckpointCorrupt:
        for run in all_runs(store, RunQuery(id_prefix=run_id, limit=FEW, with_input=True)):
            if isinstance(run, Run) and run.id == run_id:
                return run
        found = salvaged(store, run_id)
        if found is None:
            raise
        return found


def salvaged(store: Store, run_id: str) -> Run | None:
    """What only the store itself can tell of a run that is damaged, if it can."""
    ask = getattr(below(store), "salvaged", None)
    found: Run | None = None if ask is None else ask(run_id)
    return found


# -- one run -----------------------------------------------------------------------------------------------------------


def check_run(store: Store, run: Run) -> RunCheck | None:
    """Hold the records and signals of a run against each other and against its head; None if it is gone meanwhile."""
    check = RunCheck(run.id)
    said = ""
    try:
        fresh = store.get_run(run.id)  # the page that it was listed on may be old
        if fresh is None:
            return None
        run = fresh
    except _BROKEN as error:
        said = str(error)
    chain = _Chain(store, run, check)
    chain.read()
    _check_signals(store, run, check)
    chain.hold_against_head()
    if said and not check.problems:
        check.problems.append(said)
    return None if check.problems and _is_removed(store, run) else check


def _is_removed(store: Store, run: Run) -> bool:
    """Whether a run was removed while it was read, so that what is missing is no damage."""
    fresh = _again(store, run)
    return fresh is None or fresh.created_at != run.created_at


class _Chain:
    """The records of one run, read in order, and what they say about its head."""

    def __init__(self, store: Store, run: Run, check: RunCheck) -> None:
        self.store, self.run, self.check = store, run, check
        self.last = 0
        self.broken = False
        self.at_head = ""
        self.newest: tuple[str, str] = ("", "")
        self.epoch = 0
        self.heard = 0
        self.before = ""  # the checksum of the record before the newest sound one

    def read(self) -> None:
        run, check = self.run, self.check
        check.checksum = origin(run)
        if not run.seq:
            self.at_head = run.checksum
            try:
                check_origin(run)
            except CheckpointCorrupt as error:
                self._break(str(error))
        for row in rows_of(self.store, run.id, self._break):
            check.records.total += 1
            if not self.broken:
                self._add(row)
            self.last = max(self.last, row.seq)
        missing = max(min(run.seq, MOST_MISSING) - check.records.total, 0)
        check.records.total += missing
        check.records.invalid = check.records.total - check.records.valid

    def _add(self, row: Row) -> None:
        check = self.check
        try:
            record, checksum = next(unseal([row], self.run.id, check.sound, check.checksum))
        except _BROKEN as error:
            self._break(str(error))
            check.newer = isinstance(error, SchemaMismatch)
            if check.sound and _is_readable(row, self.run.id, check.sound):
                self._drop_newest()  # it is whole, and names another than the one before it
            return
        self.before = check.checksum
        check.sound, check.checksum = record.seq, checksum
        check.records.valid += 1
        check.records.legacy += record.format < FORMAT
        if record.seq == self.run.seq:
            self.at_head = checksum
        if record.seq <= self.run.seq:
            self._note(record)

    def _note(self, record: Record) -> None:
        self.newest = record.kind, record.outcome
        if record.claimed is not None:
            self.epoch = max(self.epoch, record.claimed.epoch)
        if record.data:
            self.heard = max(self.heard, record.data.get("signal", 0))

    def _drop_newest(self) -> None:
        check = self.check
        check.sound, check.checksum = check.sound - 1, self.before
        check.records.valid -= 1
        check.records.invalid += 1

    def _break(self, said: str) -> None:
        self.broken = True
        self.check.problems.append(said)

    def hold_against_head(self) -> None:
        run, say = self.run, self.check.problems.append
        if self.broken:
            return
        if self.last < run.seq:
            say(
                f"run {run.id!r}: chain broken at seq {self.last + 1}: its head names seq {run.seq}, and its records "
                f"end at {self.last}"
            )
            return
        if self.at_head != run.checksum:
            say(f"run {run.id!r}: the record at seq {run.seq} is not the one that its head names")
            if self.last == run.seq and run.seq:
                self._drop_newest()
        if self.last > run.seq and not self._has_moved_on():
            say(f"run {run.id!r}: its records end at {self.last}, beyond seq {run.seq}, which its head names")
        if self.epoch > run.epoch:
            say(f"run {run.id!r}: its records tell of lease {self.epoch}, its head only of lease {run.epoch}")
        if self.heard > run.signals:
            say(f"run {run.id!r}: it has read signal {self.heard}, and only {run.signals} were ever accepted")
        self._check_status()

    def _has_moved_on(self) -> bool:
        """Whether the run went on while its records were read."""
        fresh = _again(self.store, self.run)
        return fresh is None or fresh.seq >= self.last

    def _check_status(self) -> None:
        """The newest record says whether the run has ended, and how; so does its status."""
        run, say = self.run, self.check.problems.append
        if (run.worker is None) == run.status.active:
            say(f"run {run.id!r}: it is {run.status.value}, and its lease is with {run.worker or 'nobody'}")
        if run.status.active:  # whoever has the lease may be about to go on after an end, as a retry does
            return
        ended = _ENDS.get(self.newest)
        if self.newest[0] == Kind.ERROR.value:
            ended = Status.SET_ASIDE
        if ended is not run.status and (ended is not None or run.status in FINISHED):
            told = "says that it has not ended" if ended is None else f"says that it is {ended.value}"
            say(f"run {run.id!r}: it is {run.status.value}, but its newest record {told}")


def _is_readable(row: Row, run_id: str, after: int) -> bool:
    """Whether a row is a whole record of its place, whichever one it names before it."""
    try:
        next(unseal([row], run_id, after))
    except _BROKEN:
        return False
    return True


def rows_of(store: Store, run_id: str, broken: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """Every row that the store can give, in order; `broken` hears of the first that it cannot give, in its place."""
    after, limit, told, lost, again = 0, 1000, "", "", 0
    while again < TRIES:
        try:
            rows = store.list_checkpoints(run_id, after, limit)
        except _BROKEN as error:
            told = told or str(error)
            if limit > 1:  # one of many: ask for them one by one
                limit = 1
                continue
            if not lost:
                broken(str(error))
            again = again + 1 if str(error) == lost else 0
            lost = str(error)
            after += 1
        else:
            if not rows:
                break
            yield from rows
            after = rows[-1].seq
    if told and not lost:
        broken(told)


def signals_of(store: Store, run_id: str) -> Iterator[Signal | CheckpointCorrupt]:
    """Every signal of a run in order; in the place of one that is damaged, the error that says so."""
    after, limit, told, again = 0, 1000, "", 0
    while again < TRIES:
        try:
            page = store.list_signals(run_id, after, limit)
        except CheckpointCorrupt as error:
            if limit > 1:  # one of many: ask for them one by one
                limit = 1
                continue
            again = again + 1 if str(error) == told else 0
            if not again:
                yield error
            told = str(error)
            after += 1
        else:
            if not page:
                return
            yield from page
            after = page[-1].seq


def _check_signals(store: Store, run: Run, check: RunCheck) -> None:
    count, last, say = check.signals, 0, check.problems.append
    for signal in signals_of(store, run.id):
        count.total += 1
        try:
            if isinstance(signal, CheckpointCorrupt):
                raise signal
            check_signal(signal)
        except CheckpointCorrupt as error:
            say(str(error))
            last += 1
            continue
        if signal.seq != last + 1:
            say(f"run {run.id!r}: its signal {last + 1} is gone")
        last = signal.seq
        count.valid += 1
        count.legacy += not signal.checksum
    if last < run.signals and not count.total - count.valid:
        say(f"run {run.id!r}: {run.signals} signals were accepted, and {last} are there")
    fresh = _again(store, run) if last > run.signals else None
    if fresh is not None and last > fresh.signals:
        say(f"run {run.id!r}: {run.signals} signals were accepted, and there are {last}")
    count.total += max(min(run.signals, MOST_MISSING) - count.total, 0)
    count.invalid = count.total - count.valid


def _again(store: Store, run: Run) -> Run | None:
    """The run as it is now; as it was, if that cannot be read."""
    try:
        return store.get_run(run.id)
    except _BROKEN:
        return run


# -- what a newer Keepstep wrote ---------------------------------------------------------------------------------------


class _Glimpse(msgspec.Struct):
    """As much of a record as tells which step it is of, and which record comes before it."""

    kind: str
    step: str = ""
    format: int = 0
    previous: str = ""


_glimpse = msgspec.json.Decoder(_Glimpse).decode


def glimpsed(row: Row) -> _Glimpse | None:
    """What can be told of a row, however strange the rest of it is."""
    try:
        return _glimpse(bytes(row.record))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def is_newer(store: Store, run: Run) -> bool:
    """Whether part of a run was written by a newer Keepstep: that is no damage. A damaged number is no such word."""
    newer = ""  # the checksum of the record before, if that is in a newer format
    for row in rows_of(store, run.id):
        seen = glimpsed(row)
        if newer and seen is not None and seen.previous == newer:
            return True
        checksum = sha256(bytes(row.record) + bytes(row.body or b"")).hexdigest()
        newer = checksum if seen is not None and seen.format > NEWEST_FORMAT else ""
        if newer and row.seq == run.seq and newer == run.checksum:
            return True
    return False
