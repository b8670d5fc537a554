"""The logs of a files store: one folder per run, one file per entry, and the next file is the commit and the fence.

An entry is written under a name of its own, synced, and then linked to the next number. The link fails if that number
is taken, so of two writers one commits and the other looks again at how the run stands now.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from ..errors import CheckpointCorrupt
from ..model import Signal
from ..ports import Answer, Row
from . import rules
from .files_disk import Disk, Identity, Steps, finish, translated, translating
from .files_entry import (
    MALFORMED,
    Draft,
    Entry,
    Facts,
    Head,
    Outbox,
    entry_facts,
    entry_rows,
    entry_signals,
    entry_text,
    read_entry,
)
from .files_names import attachment_name, entry_name, entry_number, run_folder

#: After so many entries the number of the newest is noted: finding it takes a few looks, however many there are.
HINT_EVERY = 16
#: The file in which it is noted.
HINT = "latest"
#: What was written longer ago is durable: its writer has synced it, or died, and the system has by itself.
_RECENT_SECONDS = 60.0
#: Stands where an entry was lost, once a person has accepted that.
LOST = b'{"act": "lost"}\n'
#: More missing entries than this are a number that is wrong, not entries that are lost.
MOST_LOST = 10_000
#: A number in a file is not longer than this.
_DIGITS = 20
#: So long a writer lets another one pass that has the turn, and so often it looks.
_TURN_SECONDS = 0.25
_LOOK_SECONDS = 0.001
#: Runs whose newest entry is remembered.
_REMEMBERED = 20_000


T = TypeVar("T")


class State(msgspec.Struct):
    """How a run stood when its newest entry was seen; the outbox is what may still have to be done elsewhere.

    The name of an entry that another process has just linked may not be `durable` yet. `whole` says that no entry
    before it was missing.
    """

    number: int
    head: Head
    identity: Identity
    outbox: Outbox
    durable: bool = False
    whole: bool = False


class Known(msgspec.Struct):
    """The ids and tokens of the first so many signals of a run, each with the signal's number."""

    born: str
    upto: int = 0
    ids: dict[str, int] = msgspec.field(default_factory=dict)
    tokens: dict[str, int] = msgspec.field(default_factory=dict)


class Removal:
    """Tells damage of a run's log from its removal by another process while it was read.

    A removal takes the folder away before anything in it. So what is missing in a folder that stays where it is was
    missing before; otherwise the log has to be read once more.
    """

    def __init__(self, logs: Logs, run: str) -> None:
        self._logs = logs
        self._run = run
        self._seen: tuple[Identity | None, ...] | None = None

    def may_explain(self) -> bool:
        """Whether to read again: the folder has not been seen twice since the damage was met first."""
        logs, folder = self._logs, self._logs.folder(self._run)
        with translating(folder):
            inode = getattr(logs.disk.identity(folder), "inode", 0)
            seen = Identity(inode, 0), logs.disk.identity(f"{folder}/{entry_name(1)}")
        if seen == self._seen:
            return False
        self._seen = seen
        logs.forget(self._run)
        return True


class _Named(msgspec.Struct):
    """As much of an entry as tells whose it is."""

    run: str


_run_in = msgspec.json.Decoder(_Named).decode


class Logs:
    """The runs under one root. Any thread may ask; nothing here is locked but a few dictionaries."""

    def __init__(self, root: str, disk: Disk, tag: str) -> None:
        self.root = root
        self.disk = disk
        self.tag = tag
        self._serial = itertools.count(1)
        self._states: dict[str, State] = {}
        self._facts: dict[str, tuple[str, Facts]] = {}
        self._known: dict[str, Known] = {}
        self._places: dict[str, tuple[str, int, int]] = {}
        self._remains: dict[str, tuple[Identity | None, State | None]] = {}
        self._unsynced: set[str] = set()
        self._shards: set[str] = set()
        self._lock = threading.Lock()

    def unless_removed(self, run: str, read: Callable[[], T]) -> T:
        """What `read` gives; again if it met damage that may be the removal of the run."""
        removal = Removal(self, run)
        while True:
            try:
                return read()
            except CheckpointCorrupt:
                if not removal.may_explain():
                    raise

    def steps_unless_removed(self, run: str, work: Callable[[], Steps[T]]) -> Steps[T]:
        """The same for work that syncs."""
        removal = Removal(self, run)
        while True:
            try:
                return (yield from work())
            except CheckpointCorrupt:
                if not removal.may_explain():
                    raise

    def folder(self, run: str) -> str:
        return f"{self.root}/{run_folder(run)}"

    def unique(self) -> str:
        """A word that no other writer of this store uses, now or ever."""
        return f"{self.tag}{next(self._serial):x}"

    # -- how a run stands --------------------------------------------------------------------------------------------

    def state(self, run: str, *, trusting: bool = False, whole: bool = False) -> State | None:
        """How a run stands, or None. `trusting` takes the word of memory, `whole` finds missing entries."""
        state = self.last_state(run, trusting=trusting, whole=whole)
        return None if state is None or state.head.deleted else state

    def last_state(self, run: str, *, trusting: bool = False, whole: bool = False) -> State | None:
        """The same, also of a run that is being removed."""
        cached = self._states.get(run)
        if trusting and cached is not None:
            return cached
        if whole and cached is not None and not cached.whole:
            cached = None
        folder = self.folder(run)
        with translating(folder):
            if run in self._unsynced:  # what is seen is told to others, so it must be durable
                self.make_durable(run)
            start = 0
            if cached is not None and self.disk.identity(f"{folder}/{entry_name(cached.number)}") == cached.identity:
                if self.disk.identity(f"{folder}/{entry_name(cached.number + 1)}") is None:
                    return cached
                start, whole = cached.number, cached.whole
            number = self._newest_listed(run, folder) if whole and not start else self._newest(run, folder, start)
            if not number:
                self.forget(run)
                return None
            path = f"{folder}/{entry_name(number)}"
            identity = self.disk.identity(path)
        if identity is None:  # removed under our eyes
            return self.last_state(run)
        entry = self.entry(run, number)
        durable = abs(time.time() - identity.written_ns / 1e9) > _RECENT_SECONDS
        state = State(number, entry.head, identity, entry.outbox, durable, whole)
        self._remember(run, state)
        return state

    def make_durable(self, run: str) -> None:
        """What is told of a run must outlive a power cut, whoever wrote it."""
        folder = self.folder(run)
        with translating(folder):
            finish(self.disk, self.disk.sync_folder(folder))
        self._unsynced.discard(run)
        state = self._states.get(run)
        if state is not None:
            state.durable = True

    def _newest(self, run: str, folder: str, start: int) -> int:
        """The number of the newest entry, 0 if there is none: from one that is known, by doubling steps."""
        there = self.disk.identity
        low = start or self._hinted(run, folder)
        if not low:
            if there(f"{folder}/{entry_name(1)}") is None:
                return self._newest_listed(run, folder)
            low = 1
        step = 1
        while there(f"{folder}/{entry_name(low + step)}") is not None:
            low += step
            step *= 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if there(f"{folder}/{entry_name(middle)}") is None:
                high = middle
            else:
                low = middle
        return low

    def _hinted(self, run: str, folder: str) -> int:
        number = self.hint(folder)
        if number and self.disk.identity(f"{folder}/{entry_name(number)}") is None:
            return self._newest_listed(run, folder)
        return number

    def hint(self, folder: str) -> int:
        """The number of a recent entry, as it was noted; 0 if that is no number."""
        try:
            text = self.disk.read(f"{folder}/{HINT}").strip()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdigit() and len(text) < _DIGITS else 0

    def noted(self, folder: str, newest: int) -> int:
        """The number of an entry that was certainly there once, though only `newest` are; 0 if none is known of."""
        number = self.hint(folder) if self.disk.syncs else 0
        return number if newest < number <= newest + MOST_LOST and not number % HINT_EVERY else 0

    def _newest_listed(self, run: str, folder: str) -> int:
        """The same by looking at every name: a hole in the numbers is damage."""
        numbers = sorted(number for name in self.disk.names(folder) if (number := entry_number(name)) is not None)
        newest = numbers[-1] if numbers else 0
        if not newest or (len(numbers) == newest and not self.noted(folder, newest)):
            return newest
        missing = next((n for n, number in enumerate(numbers, 1) if n != number), newest + 1)
        if self.disk.identity(f"{folder}/{entry_name(missing)}") is not None:  # written while we looked
            return self._newest_listed(run, folder)
        raise CheckpointCorrupt(f"run {run!r}: its log is broken: {entry_name(missing)} is missing")

    def entry(self, run: str, number: int) -> Entry:
        """One entry, which must be there."""
        name = entry_name(number)
        folder = self.folder(run)
        with translating(folder):
            try:
                data = self.disk.read(f"{folder}/{name}")
            except FileNotFoundError:
                raise CheckpointCorrupt(f"run {run!r}: its log is broken: {name} is missing") from None
        return read_entry(data, run, number, name)

    def facts(self, run: str, head: Head) -> Facts:
        """What is fixed about a run."""
        known = self._facts.get(run)
        if known is not None and known[0] == head.born:
            return known[1]
        entry = self.entry(run, head.base)
        try:
            facts = entry_facts(entry)
        except MALFORMED as error:
            raise CheckpointCorrupt(f"run {run!r}: {entry_name(head.base)} does not create it: {error!r}") from None
        self._limit(self._facts)
        self._facts[run] = head.born, facts
        return facts

    def remains(self, run: str, at_least: int = 0) -> State | None:
        """How a run with a broken log stood when its newest readable entry was written; None if none can be read.

        `at_least` so many entries are known to have been there. Each after the newest readable one may have been a
        claim or a checkpoint, so it counts for one in the epoch and in the sequence.
        """
        folder = self.folder(run)
        with translating(folder):
            names = self.disk.names(folder)
        numbers = sorted((number for name in names if (number := entry_number(name)) is not None), reverse=True)
        newest = numbers[0] if numbers else 0
        newest = max(newest, at_least if at_least - newest <= MOST_LOST else 0, self.noted(folder, newest))
        if newest - len(numbers) > MOST_LOST:
            return None
        last = next((entry for number in numbers if (entry := self._readable(run, number))), None)
        if last is None or last.head.deleted:
            return None
        gone = newest - last.number
        head = msgspec.structs.replace(last.head, epoch=last.head.epoch + gone, seq=last.head.seq + gone)
        return State(newest, head, Identity(0, 0), Outbox())

    def _readable(self, run: str, number: int) -> Entry | None:
        try:
            return self.entry(run, number)
        except CheckpointCorrupt:
            return None

    def append_over(
        self, run: str, at_least: int, decide: Callable[[State | None], Draft | Answer]
    ) -> Steps[tuple[Draft | Answer, State | None]]:
        """Write an entry after a log that is broken, which stays: nothing before the entry that creates a run is read.

        Where an entry is missing, a file says so, that none may ever be written there. None as the state: someone else
        was faster.
        """
        remains = self.remains(run, at_least)
        draft = decide(remains)
        if isinstance(draft, Answer) or remains is None:
            return draft, remains
        folder = self.folder(run)
        with translating(folder):
            for number in range(1, remains.number + 1):
                path = f"{folder}/{entry_name(number)}"
                if self.disk.identity(path) is None:
                    with contextlib.suppress(FileExistsError):
                        yield from self.disk.create(path, LOST)
            remains.identity = self.disk.identity(f"{folder}/{entry_name(remains.number)}") or remains.identity
        self.forget(run)
        return draft, (yield from self._link(run, remains, draft))

    def forget(self, run: str) -> None:
        """Look at the disk when this run is next asked for."""
        for memory in (self._states, self._facts, self._known, self._places, self._remains):
            memory.pop(run, None)

    def _remember(self, run: str, state: State) -> None:
        self._limit(self._states)
        self._states[run] = state

    def _limit(self, memory: dict[str, Any]) -> None:
        if len(memory) >= _REMEMBERED:
            with self._lock:
                for run in list(itertools.islice(memory, _REMEMBERED // 2)):
                    memory.pop(run, None)

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(
        self, run: str, decide: Callable[[State | None], Draft | Answer], *, trusting: bool = False
    ) -> Steps[tuple[Draft | Answer, State | None]]:
        """Write the entry that `decide` makes of how the run stands, as often as it takes; or its refusal.

        `trusting` begins with how the run stood when it was last seen: if that is old, the link fails. Who was not
        the first has the turn from then on, and the others wait a little: what takes long to write, as a large value
        does, would never be first among many short ones.
        """
        folder, turn = self.folder(run), None
        self._let_pass(folder)
        try:
            while True:
                state = self.state(run, trusting=trusting, whole=True)
                draft = decide(state)
                if isinstance(draft, Draft):
                    new = yield from self._link(run, state, draft)
                    if new is not None:
                        return draft, new
                    turn = self._take_turn(folder) if turn is None else turn
                elif not trusting:
                    return draft, state
                trusting = False
        finally:
            if turn is not None:
                self.disk.end_turn(turn)

    def _let_pass(self, folder: str) -> None:
        """Wait while somebody else has the turn, but not for long: it is a courtesy, the link alone decides."""
        end = time.monotonic() + _TURN_SECONDS
        while self.disk.is_someones_turn(folder) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)

    def _take_turn(self, folder: str) -> int | None:
        end = time.monotonic() + _TURN_SECONDS
        with contextlib.suppress(OSError):  # for one, the folder is gone
            while (turn := self.disk.take_turn(folder)) is None and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
            return turn
        return None

    def _link(self, run: str, state: State | None, draft: Draft) -> Steps[State | None]:
        """Commit an entry after the one that was seen; None if that is not the newest any more."""
        folder = self.folder(run)
        number = (state.number if state else 0) + 1
        word = self.unique()
        text, attachments = entry_text(
            run, number, draft, lambda place, kind: attachment_name(number, place, word, kind)
        )
        temporary = f"{folder}/.{entry_name(number)}-{word}.tmp"
        written: list[str] = []
        linked = False
        try:
            for attachment in attachments:
                yield from self.disk.create(f"{folder}/{attachment.name}", attachment.data)
                written.append(f"{folder}/{attachment.name}")
            identity = yield from self.disk.create(temporary, text)
            seen = state is None or self.disk.identity(f"{folder}/{entry_name(state.number)}") == state.identity
            if seen and (attachments or (state is not None and not state.durable)):
                # The names that this entry builds on must not be lost where its own is kept.
                yield from self.disk.sync_folder(folder)
            if seen:
                self.disk.link(temporary, f"{folder}/{entry_name(number)}")
                linked = True
        except (FileExistsError, FileNotFoundError):  # taken, or the run is gone
            pass
        except OSError as error:
            raise translated(error, folder) from error
        finally:
            for path in (temporary,) if linked else (temporary, *written):
                with contextlib.suppress(OSError):
                    self.disk.unlink(path)
        if not linked:
            self.forget(run)
            return None
        new = State(number, draft.head, identity, draft.outbox, whole=True)
        self._unsynced.add(run)
        self._remember(run, new)
        with translating(folder, unknown=True):
            yield from self.disk.sync_folder(folder)
        self._unsynced.discard(run)
        new.durable = True
        if number % HINT_EVERY == 0:
            with contextlib.suppress(OSError):  # it only saves time
                self.disk.put(f"{folder}/{HINT}", b"%d\n" % number, f"{folder}/.{HINT}-{word}.tmp")
        return new

    # -- folders -----------------------------------------------------------------------------------------------------

    def make_folder(self, run: str) -> None:
        """The folder of a run that is about to be created."""
        folder = self.folder(run)
        shard = folder.rpartition("/")[0]
        with translating(folder):
            if shard not in self._shards:
                self.disk.make_folder(shard)
                finish(self.disk, self.disk.sync_folder(f"{self.root}/runs"))
                self._shards.add(shard)
            try:
                self.disk.make_folder(folder)
            except FileNotFoundError:  # someone removed the shard
                self._shards.discard(shard)
                self.disk.make_folder(shard)
                self.disk.make_folder(folder)

    def sync_folder_of(self, run: str) -> Steps[None]:
        """Make the folder's own name durable, too."""
        shard = self.folder(run).rpartition("/")[0]
        with translating(shard, unknown=True):
            yield from self.disk.sync_folder(shard)

    def remove(self, run: str, deleted: State | None = None) -> Steps[None]:
        """Take the folder of a deleted run away, then what is in it; not that of another run created since."""
        folder = self.folder(run)
        trash = f"{self.root}/trash/{self.unique()}"
        self.forget(run)
        with translating(folder, unknown=True):
            if deleted and self.disk.identity(f"{folder}/{entry_name(deleted.number)}") != deleted.identity:
                return
            try:
                self.disk.rename(folder, trash)
            except FileNotFoundError:
                return
            yield from self.disk.sync_folder(folder.rpartition("/")[0])
            self.disk.remove_folder(trash)

    def empty_trash(self) -> None:
        """Remove what is left of deleted runs; their remover may be doing the same."""
        trash = f"{self.root}/trash"
        with translating(trash):
            for name in self.disk.names(trash):
                self.disk.remove_folder(f"{trash}/{name}")

    def sweep(self, run: str) -> list[str]:
        """Remove what dead writers left half written in a run's folder; who of them lives yet writes it again."""
        folder = self.folder(run)
        swept = []
        for name in self.disk.names(folder):
            if name.startswith(".") and name.endswith(".tmp") and self.tag not in name:
                with contextlib.suppress(OSError):
                    self.disk.unlink(f"{folder}/{name}")
                    swept.append(name)
        return swept

    # -- reading -----------------------------------------------------------------------------------------------------

    def rows(self, run: str, after: int, limit: int, kinds: Iterable[str]) -> list[Row]:
        """Checkpoints in order, those after `after`; at most `limit`, and about 4 MB.

        Of a broken log those before the damage can be had, by asking for no more.
        """
        state, broken = self.state_to_read(run)
        if state is None or limit <= 0 or after >= state.head.seq:
            if broken is not None:
                raise broken
            return []
        after, wanted = max(after, 0), frozenset(kinds)
        folder = self.folder(run)
        page: list[Row] = []
        size, seq = 0, None
        for number in range(self._first(run, state, after), state.number + 1):
            entry = self.entry(run, number)
            for row in entry_rows(entry, run, lambda name: self._beside(run, folder, name)):
                if row.seq > after + 1 if seq is None else row.seq != seq + 1:
                    place = after + 1 if seq is None else seq + 1
                    raise CheckpointCorrupt(f"run {run!r}: chain broken at seq {place}: found seq {row.seq}")
                seq = row.seq
                if row.seq > after and (not wanted or row.kind in wanted):
                    if len(page) >= limit or size >= rules.PAGE_BYTES:
                        return page
                    page.append(row)
                    size += len(row.record) + len(row.body or b"")
            self._places[run] = (state.head.born, entry.head.seq, number)
            if len(page) >= limit or size >= rules.PAGE_BYTES:
                return page
        return page

    def state_to_read(self, run: str) -> tuple[State | None, CheckpointCorrupt | None]:
        """How a run stands; what remains of it if its log is broken, and how it is."""
        try:
            return self.state(run), None
        except CheckpointCorrupt as error:
            folder = self.disk.identity(self.folder(run))
            known = self._remains.get(run)
            if known is None or known[0] != folder:
                self._limit(self._remains)
                known = self._remains[run] = folder, self.remains(run)
            if known[1] is None:
                raise
            return known[1], error

    def rows_of(self, run: str, number: int) -> list[Row]:
        """The checkpoints that one entry brought."""
        folder = self.folder(run)
        return entry_rows(self.entry(run, number), run, lambda name: self._beside(run, folder, name))

    def unreadable(self, run: str) -> list[dict[str, Any]]:
        """The entries of a run that cannot be read, whatever they hold: as text if it is text."""
        found: list[dict[str, Any]] = []
        folder = self.folder(run)
        for name in sorted(self.disk.names(folder)):
            number = entry_number(name)
            if number is None or self._readable(run, number) is not None:
                continue
            with translating(folder):
                data = self.disk.read(f"{folder}/{name}")
            try:
                found.append({"file": name, "text": data.decode()})
            except UnicodeDecodeError:
                found.append({"file": name, "base64": b64encode(data).decode()})
        return found

    def run_in(self, folder: str) -> str | None:
        """The id of the run whose log lies in a folder, as its newest readable entry tells it."""
        for name in sorted(self.disk.names(f"{self.root}/{folder}")):
            if entry_number(name) is not None:
                with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
                    run = _run_in(self.disk.read(f"{self.root}/{folder}/{name}")).run
                    if run_folder(run) == folder:
                        return run
        return None

    def _beside(self, run: str, folder: str, name: str) -> bytes:
        if not isinstance(name, str) or "/" in name or name.startswith("."):
            raise CheckpointCorrupt(f"run {run!r}: an entry names {name!r} as a file beside it")
        try:
            with translating(folder):
                try:
                    return self.disk.read(f"{folder}/{name}")
                except FileNotFoundError:
                    raise CheckpointCorrupt(f"run {run!r}: its log is broken: {name} is missing") from None
        except ValueError as error:
            raise CheckpointCorrupt(f"run {run!r}: an entry names {name!r}: {error}") from None

    def _first(self, run: str, state: State, after: int) -> int:
        """The entry that holds the checkpoint after this one."""
        if after <= 0:
            return state.head.base
        born, seq, number = self._places.get(run, ("", 0, 0))
        if born == state.head.born and seq == after and number < state.number:
            return number + 1
        return self._find(run, state.head.base, state.number, lambda head: head.seq > after)

    def _find(self, run: str, low: int, high: int, holds: Callable[[Head], bool]) -> int:
        """The first of these entries for which it holds; it holds for the last. Those that cannot be read count not."""
        first, last = low, high
        try:
            while low < high:
                middle = (low + high) // 2
                if holds(self.entry(run, middle).head):
                    high = middle
                else:
                    low = middle + 1
        except CheckpointCorrupt:
            for number in range(first, last):
                with contextlib.suppress(CheckpointCorrupt):
                    if holds(self.entry(run, number).head):
                        return number
            return last
        return low

    def signals(self, run: str, state: State, after: int = 0) -> Iterator[tuple[Signal, str]]:
        """Signals in order, those after `after`, each with its token."""
        seen, number = max(after, 0), state.head.base
        while seen < state.head.signals:
            entry = self.entry(run, number)
            if entry.head.signals <= seen:
                have = seen
                number = self._find(run, number + 1, state.number, lambda head: head.signals > have)  # noqa: B023
                entry = self.entry(run, number)
            for signal, token in entry_signals(entry, run):
                if signal.seq > seen:
                    if signal.seq != seen + 1:
                        raise CheckpointCorrupt(f"run {run!r}: its signal {seen + 1} is missing")
                    seen = signal.seq
                    yield signal, token
            if entry.head.signals > seen:
                raise CheckpointCorrupt(f"run {run!r}: its signal {seen + 1} is missing")
            number += 1

    def known_signals(self, run: str, state: State) -> Known:
        """The ids and tokens of every signal that a run has received."""
        known = self._known.get(run)
        if known is None or known.born != state.head.born or known.upto > state.head.signals:
            known = Known(state.head.born)
            self._limit(self._known)
            self._known[run] = known
        if known.upto < state.head.signals:
            for signal, token in self.signals(run, state, known.upto):
                self.learn(known, signal, token)
        return known

    @staticmethod
    def learn(known: Known, signal: Signal, token: str) -> None:
        """One more signal is there."""
        if signal.id:
            known.ids.setdefault(signal.id, signal.seq)
        if token:
            known.tokens.setdefault(token, signal.seq)
        known.upto = max(known.upto, signal.seq)
