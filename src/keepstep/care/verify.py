"""Verifies every stored record, signal and head, and the structure of the store, without changing anything.

Plain blocking code over a store, one page at a time. It needs no engine, and its memory does not grow with the number
of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ..errors import CheckpointCorrupt, RunNotFound, SchemaMismatch, StoreError
from ..model import FINISHED, Flaw, Run, RunPage, RunQuery, Signal
from ..ports import Row, Store
from ..records.data import Data, data_of
from ..records.keys import is_wrapped
from ..records.record import FORMAT, Record, check_origin, origin, unseal
from ..stores.artifacts import COLLECTION, files_of, flaws_of
from ..stores.reading import BROKEN, TRIES, all_runs, head_of, rows_of
from ..stores.rules import check_signal, ends_as
from .documents import all_documents, documents_named

#: Runs read in one query.
PAGE = 200
#: Damaged runs that a verification keeps by name. All of them are reported on the way, and the rest is counted.
KEPT = 1000

#: Missing records counted at most for one run, because a damaged head may name any number.
MOST_MISSING = 1_000_000


@dataclass(slots=True)
class Count:
    """The number of items, and how many are valid. `legacy` counts valid items of old formats."""

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
    """The check of one run's records and signals; `problems` is empty if it is intact.

    The first `sound` records are certainly intact, and `checksum` is that of the last of them. If two neighbours
    contradict each other, neither is certain. `newer` means that the next record has a format that only a newer
    Keepstep reads.
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
        """Whether the run is intact, but partly written in an older format, which has fewer checks."""
        return not self.problems and bool(self.records.legacy or self.signals.legacy)


@dataclass(slots=True)
class Verification:
    """The result of a verification. `damaged` names the first thousand damaged runs with their problems."""

    runs: Count = field(default_factory=Count)
    records: Count = field(default_factory=Count)
    signals: Count = field(default_factory=Count)
    documents: Count = field(default_factory=Count)
    damaged: dict[str, list[str]] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not (self.runs.invalid or self.flaws)


def verify(
    store: Store, run_ids: Iterable[str] = (), *, report: Callable[[str, list[str]], None] | None = None
) -> Verification:
    """Read all runs, or only some, and find damage; `report` is called for each damaged run."""
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
            if report is not None:
                report(check.id, check.problems)
    if not wanted:
        found.documents, flaws = verify_documents(store)
        found.flaws += flaws
    return found


def verify_documents(store: Store) -> tuple[Count, list[Flaw]]:
    """Read every document and every artifact, and compare each with its checksum."""
    flaws: list[Flaw] = []

    def damaged(collection: str, key: str, what: str) -> None:
        flaws.append(Flaw("document", f"{collection}/{key}", what))

    valid = 0
    try:
        valid = sum(1 for _ in all_documents(store, damaged))
        invalid = len(flaws)
        if documents_named(store, COLLECTION):
            flaws += [Flaw("artifact", *one) for one in flaws_of(store, files_of(store))]
    except StoreError as error:
        invalid = len(flaws)
        flaws.append(Flaw("integrity", store.url, f"the documents cannot be read: {error}"))
    return Count(valid + invalid, valid, invalid), flaws


def _every(store: Store, found: Verification) -> Iterator[RunCheck | None]:
    """Check every run; problems of the store itself are added to `found`."""
    try:
        found.flaws += store.check()
        damaged = [one for one in store.list_workers() if one.damage]
        found.flaws += [Flaw("worker", one.id, f"worker {one.id}: {one.damage}") for one in damaged]
        for run in all_runs(store, RunQuery(limit=PAGE, system=True)):
            yield check_named(store, run if isinstance(run, str) else run.id)
    except StoreError as error:
        found.flaws.append(Flaw("integrity", store.url, f"the store cannot be read: {error}"))


def oldest_first(store: Store, query: RunQuery) -> Iterator[Run | str]:
    """Yield the same as `all_runs` in reverse, so that a store that receives them in this order lists them alike.

    Only the start of each page is kept in memory, and the newest page, because new runs may precede it.
    """
    newest = page = store.list_runs(query)
    places: list[str] = []
    while page.next is not None:
        places.append(page.next)
        page = store.list_runs(replace(query, after=page.next))
    yielded: set[str] = set()
    for place in reversed(places):
        page = store.list_runs(replace(query, after=place))
        yield from _backwards(page, yielded)
        yielded = {*page.unreadable, *(run.id for run in page.runs)}
    yield from _backwards(newest, yielded)


def _backwards(page: RunPage, yielded: set[str]) -> Iterator[Run | str]:
    """Yield a page in reverse, without runs already yielded; pages overlap after runs are removed."""
    yield from (name for name in reversed(page.unreadable) if name not in yielded)
    yield from (run for run in reversed(page.runs) if run.id not in yielded)


def _by_name(store: Store) -> Callable[[str], RunCheck]:
    def look(run_id: str) -> RunCheck:
        check = check_named(store, run_id)
        if check is None:
            raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
        return check

    return look


def check_named(store: Store, run_id: str) -> RunCheck | None:
    """Verify one run by its id. Return None if it does not exist."""
    try:
        run = store.get_run(run_id)
    except BROKEN:
        pass  # its head may still show where the damage is
    else:
        return None if run is None else _compared(store, run)
    try:
        run = head_of(store, run_id)
    except BROKEN as error:
        return RunCheck(run_id, [str(error)])
    return None if run is None else check_run(store, run)


# -- one run -----------------------------------------------------------------------------------------------------------


def check_run(store: Store, run: Run) -> RunCheck | None:
    """Compare the records and signals of a run with each other and with its head. Return None if it was removed."""
    try:
        fresh = store.get_run(run.id)  # the listed run may be outdated
    except BROKEN as error:
        return _compared(store, run, str(error))
    return None if fresh is None else _compared(store, fresh)


def _compared(store: Store, run: Run, error: str = "") -> RunCheck | None:
    """Check a run as it was just read; `error` is the error of reading its row."""
    check = RunCheck(run.id)
    chain = _Chain(store, run, check)
    chain.read()
    _check_signals(store, run, check)
    chain.hold_against_head()
    if not has_readable_key(run):
        check.problems.append(
            f"run {run.id!r}: its data key cannot be read: it was changed, or written by a newer Keepstep"
        )
    if error and not check.problems:
        check.problems.append(error)
    if check.problems and not error and (fresh := _again(store, run)) is not None and _keeps_less(fresh, run):
        return _compared(store, fresh)
    return None if check.problems and _is_removed(store, run) else check


def _keeps_less(fresh: Run, run: Run) -> bool:
    """Whether a run has removed older records or signals while it was read."""
    return (fresh.kept_from, fresh.signals_from) != (run.kept_from, run.signals_from)


def has_readable_key(run: Run) -> bool:
    """Whether a run's data key, if present, is well-formed; this needs no master key."""
    return not run.data_key or is_wrapped(run.data_key)


def _is_removed(store: Store, run: Run) -> bool:
    """Whether a run was removed while it was read; missing parts are then no damage."""
    fresh = _again(store, run)
    return fresh is None or fresh.created_at != run.created_at


class _Chain:
    """The records of one run, read in order and compared with its head."""

    def __init__(self, store: Store, run: Run, check: RunCheck) -> None:
        self.store, self.run, self.check = store, run, check
        self.last = 0
        self.broken = False
        self.at_head = ""
        self.newest: tuple[str, str] = ("", "")
        self.epoch = 0
        self.last_signal = 0
        self.before = ""  # checksum of the record before the newest sound one

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
        removed = max(run.kept_from - 2, 0)
        missing = max(min(run.seq - removed, MOST_MISSING) - check.records.total, 0)
        check.records.total += missing
        check.records.invalid = check.records.total - check.records.valid

    def _add(self, row: Row) -> None:
        check = self.check
        try:
            kept_from = self.run.kept_from
            record, checksum = next(unseal([row], self.run.id, check.sound, check.checksum, kept_from))
        except BROKEN as error:
            self._break(str(error))
            check.newer = isinstance(error, SchemaMismatch)
            if check.sound and _is_readable(row, self.run.id, row.seq - 1) and row.seq == check.sound + 1:
                self._drop_newest()  # the record is intact, but names a different predecessor
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
        self.last_signal = max(self.last_signal, data_of(record, Data).get("signal", 0))

    def _drop_newest(self) -> None:
        check = self.check
        check.sound, check.checksum = check.sound - 1, self.before
        check.records.valid -= 1
        check.records.invalid += 1

    def _break(self, problem: str) -> None:
        self.broken = True
        self.check.problems.append(problem)

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
            say(f"run {run.id!r}: the record at seq {run.seq} differs from the one that its head names")
            if self.last == run.seq and run.seq:
                self._drop_newest()
        if self.last > run.seq and not self._has_moved_on():
            say(f"run {run.id!r}: its records end at {self.last}, but its head names seq {run.seq}")
        if self.epoch > run.epoch:
            say(f"run {run.id!r}: its records name lease {self.epoch}, but its head names lease {run.epoch}")
        if self.last_signal > run.signals:
            say(f"run {run.id!r}: it has read signal {self.last_signal}, but only {run.signals} were accepted")
        self._check_status()

    def _has_moved_on(self) -> bool:
        """Whether the run went on while its records were read."""
        fresh = _again(self.store, self.run)
        return fresh is None or fresh.seq >= self.last

    def _check_status(self) -> None:
        """Compare the run's status with its newest record."""
        run, say = self.run, self.check.problems.append
        if (run.worker is None) == run.status.active:
            say(f"run {run.id!r}: it is {run.status.value}, and its lease is with {run.worker or 'nobody'}")
        if run.status.active:  # the owner of the lease may be about to go on after an end, as a retry does
            return
        ended = ends_as(*self.newest)
        if ended is not run.status and (ended is not None or run.status in FINISHED):
            newest = "is not that of an end" if ended is None else f"says {ended.value}"
            say(f"run {run.id!r}: it is {run.status.value}, but its newest record {newest}")


def _is_readable(row: Row, run_id: str, after: int) -> bool:
    """Whether a row is an intact record at its place, whatever predecessor it names."""
    try:
        next(unseal([row], run_id, after))
    except BROKEN:
        return False
    return True


def signals_of(store: Store, run_id: str) -> Iterator[Signal | CheckpointCorrupt]:
    """Yield every signal of a run in order; an error in place of a signal means that it is damaged."""
    after, limit, last_error, again = 0, 1000, "", 0
    while again < TRIES:
        try:
            page = store.list_signals(run_id, after, limit)
        except CheckpointCorrupt as error:
            if limit > 1:  # one of many is damaged: read them one by one
                limit = 1
                continue
            again = again + 1 if str(error) == last_error else 0
            if not again:
                yield error
            last_error = str(error)
            after += 1
        else:
            if not page:
                return
            yield from page
            after = page[-1].seq


def _check_signals(store: Store, run: Run, check: RunCheck) -> None:
    removed = max(run.signals_from - 1, 0)
    count, last, say = check.signals, removed, check.problems.append
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
            say(f"run {run.id!r}: its signal {last + 1} is missing")
        last = signal.seq
        count.valid += 1
        count.legacy += not signal.checksum
    if last < run.signals and not count.total - count.valid:
        say(f"run {run.id!r}: {run.signals} signals were accepted, but {last} exist")
    fresh = _again(store, run) if last > run.signals else None
    if fresh is not None and last > fresh.signals:
        say(f"run {run.id!r}: {run.signals} signals were accepted, but {last} exist")
    count.total += max(min(run.signals - removed, MOST_MISSING) - count.total, 0)
    count.invalid = count.total - count.valid


def _again(store: Store, run: Run) -> Run | None:
    """Return the run as it is now, or the given one if it cannot be read."""
    try:
        return store.get_run(run.id)
    except BROKEN:
        return run


# -- what a newer Keepstep wrote ---------------------------------------------------------------------------------------
