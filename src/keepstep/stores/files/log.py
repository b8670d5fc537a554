"""The logs of a files store: one folder per run, one file per entry; the next file is both commit and fence.

An entry is written under a unique name, synced, and then linked to the next number. The link fails if that number is
taken, so of two writers one commits and the other reads the new state of the run.
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

from ...errors import CheckpointCorrupt
from ...model import Signal
from ...ports import Answer, Row
from .. import rules
from .disk import Disk, Identity, Steps, finish, translated, translating
from .entry import (
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
from .names import attachment_name, entry_name, entry_number, run_folder

#: Number of entries after which the newest number is noted again, so that finding the newest entry takes a few reads.
HINT_EVERY = 16
#: Name of the file that holds the noted number.
HINT = "latest"
#: Age in seconds from which an entry counts as durable: its writer has synced it, or died, and the system has synced
#: it.
_RECENT_SECONDS = 60.0
#: Content of a placeholder for a lost entry, written after a person has accepted the loss.
LOST = b'{"act": "lost"}\n'
#: Content of the mark in place of an entry whose records were removed. Its number must stay taken.
TRIMMED = b'{"act": "trimmed"}\n'
#: Maximum number of missing entries. A larger gap means that a number is wrong.
MOST_LOST = 10_000
#: Maximum digits of a number in a file.
_DIGITS = 20
#: Maximum time in seconds to wait for a writer that has the turn, and the polling interval.
_TURN_SECONDS = 0.25
_POLL_SECONDS = 0.001
#: Number of runs whose newest entry is cached.
_REMEMBERED = 20_000


T = TypeVar("T")


class State(msgspec.Struct):
    """The state of a run at its newest known entry; the outbox holds effects on other runs that may be unfinished.

    `durable` is false while the name of an entry that another process has just linked may be lost. `whole` is true if
    no earlier entry is missing.
    """

    number: int
    head: Head
    identity: Identity
    outbox: Outbox
    durable: bool = False
    whole: bool = False


class Known(msgspec.Struct):
    """The ids and tokens of the first `upto` signals of a run, each with the signal's number."""

    born: str
    upto: int = 0
    ids: dict[str, int] = msgspec.field(default_factory=dict)
    tokens: dict[str, int] = msgspec.field(default_factory=dict)


class Removal:
    """Distinguishes damage of a run's log from its removal, or that of its older records, during a read.

    A removal moves the folder away before it touches the content. A file that is missing in an unmoved folder was
    therefore missing before; otherwise the log must be read again. So must it if the run keeps less than it did.
    """

    def __init__(self, logs: Logs, run: str) -> None:
        self._logs = logs
        self._run = run
        self._seen: tuple[Identity | None, ...] | None = None

    def may_explain(self) -> bool:
        """Whether to read again: the folder has not been seen twice since the damage was first found."""
        logs, folder = self._logs, self._logs.folder(self._run)
        with translating(folder):
            inode = getattr(logs.disk.identity(folder), "inode", 0)
            seen = Identity(inode, logs.kept_entry(self._run)), logs.disk.identity(f"{folder}/{entry_name(1)}")
        if seen == self._seen:
            return False
        self._seen = seen
        logs.forget(self._run)
        return True


class _Named(msgspec.Struct):
    """The part of an entry that names its run."""

    run: str


_run_in = msgspec.json.Decoder(_Named).decode


class Logs:
    """The runs under one root. Threads may share it; only a few dictionaries are locked."""

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
        """Return the result of `read`; call it again if it met damage that may be the removal of the run."""
        removal = Removal(self, run)
        while True:
            try:
                return read()
            except CheckpointCorrupt:
                if not removal.may_explain():
                    raise

    def steps_unless_removed(self, run: str, work: Callable[[], Steps[T]]) -> Steps[T]:
        """Do the same as `unless_removed` for work that syncs."""
        removal = Removal(self, run)
        while True:
            try:
                return (yield from work())
            except CheckpointCorrupt:
                if not removal.may_explain():
                    raise

    def kept_entry(self, run: str) -> int:
        """Return the oldest entry with records that a run keeps beside the first, as far as it is known here."""
        state = self._states.get(run)
        return state.head.kept_entry if state is not None else 0

    def folder(self, run: str) -> str:
        return f"{self.root}/{run_folder(run)}"

    def unique(self) -> str:
        """Return a word that no other writer of this store ever uses."""
        return f"{self.tag}{next(self._serial):x}"

    # -- the state of a run ------------------------------------------------------------------------------------------

    def state(self, run: str, *, trusting: bool = False, whole: bool = False) -> State | None:
        """Return the state of a run, or None. `trusting` accepts the cached state; `whole` finds missing entries."""
        state = self.last_state(run, trusting=trusting, whole=whole)
        return None if state is None or state.head.deleted else state

    def last_state(self, run: str, *, trusting: bool = False, whole: bool = False) -> State | None:
        """Return the state of a run, including one that is being removed."""
        cached = self._states.get(run)
        if trusting and cached is not None:
            return cached
        if whole and cached is not None and not cached.whole:
            cached = None
        folder = self.folder(run)
        with translating(folder):
            if run in self._unsynced:  # a visible state must be durable before others act on it
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
        if identity is None:  # removed during the read
            return self.last_state(run)
        entry = self.entry(run, number)
        durable = abs(time.time() - identity.written_ns / 1e9) > _RECENT_SECONDS
        state = State(number, entry.head, identity, entry.outbox, durable, whole)
        self._remember(run, state)
        return state

    def make_durable(self, run: str) -> None:
        """Make the newest visible state of a run durable, whichever process wrote it."""
        folder = self.folder(run)
        with translating(folder):
            finish(self.disk, self.disk.sync_folder(folder))
        self._unsynced.discard(run)
        state = self._states.get(run)
        if state is not None:
            state.durable = True

    def _newest(self, run: str, folder: str, start: int) -> int:
        """Return the number of the newest entry, 0 if there is none: search from a known one in doubling steps."""
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
        """Return the noted number of a recent entry; 0 if it is invalid."""
        try:
            text = self.disk.read(f"{folder}/{HINT}").strip()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdigit() and len(text) < _DIGITS else 0

    def noted(self, folder: str, newest: int) -> int:
        """Return the number of an entry that certainly existed, though only `newest` do now; 0 if unknown."""
        number = self.hint(folder) if self.disk.syncs else 0
        return number if newest < number <= newest + MOST_LOST and not number % HINT_EVERY else 0

    def _newest_listed(self, run: str, folder: str) -> int:
        """Return the newest number by listing every name; a gap in the numbers is damage."""
        numbers = sorted(number for name in self.disk.names(folder) if (number := entry_number(name)) is not None)
        newest = numbers[-1] if numbers else 0
        if not newest or (len(numbers) == newest and not self.noted(folder, newest)):
            return newest
        missing = next((n for n, number in enumerate(numbers, 1) if n != number), newest + 1)
        if self.disk.identity(f"{folder}/{entry_name(missing)}") is not None:  # written during the check
            return self._newest_listed(run, folder)
        raise CheckpointCorrupt(f"run {run!r}: its log is broken: {entry_name(missing)} is missing")

    def entry(self, run: str, number: int) -> Entry:
        """Return one entry, which must exist."""
        name = entry_name(number)
        folder = self.folder(run)
        with translating(folder):
            try:
                data = self.disk.read(f"{folder}/{name}")
            except FileNotFoundError:
                raise CheckpointCorrupt(f"run {run!r}: its log is broken: {name} is missing") from None
        return read_entry(data, run, number, name)

    def facts(self, run: str, head: Head) -> Facts:
        """Return the fixed facts of a run."""
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
        """Return the state of a run with a broken log at its newest readable entry; None if no entry is readable.

        `at_least` is a lower bound of the entries that existed. Each one after the newest readable entry may have been
        a claim or a checkpoint, so it counts for one in the epoch and in the sequence.
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
        """Write an entry after a broken log, which stays; entries before the one that creates a run are never read.

        A placeholder file fills the number of each missing entry, so that none can be written there. The state is None
        if another process was faster.
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
        """Drop the cached state of a run, so that the next read uses the disk."""
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
        """Write the entry that `decide` returns for the run's state, retrying as needed; or return its refusal.

        `trusting` starts with the cached state; if that is old, the link fails. A writer that lost the race takes the
        turn, and others wait briefly for it. Otherwise a slow write, such as a large value, would lose against many
        short ones forever.
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
        """Wait briefly while another writer has the turn. This is only a courtesy; the link decides."""
        end = time.monotonic() + _TURN_SECONDS
        while self.disk.is_someones_turn(folder) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def _take_turn(self, folder: str) -> int | None:
        end = time.monotonic() + _TURN_SECONDS
        with contextlib.suppress(OSError):  # for example, the folder is gone
            while (turn := self.disk.take_turn(folder)) is None and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            return turn
        return None

    def _link(self, run: str, state: State | None, draft: Draft) -> Steps[State | None]:
        """Commit an entry after the one that was read; return None if that is no longer the newest."""
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
                # The names that this entry builds on must be durable before its own.
                yield from self.disk.sync_folder(folder)
            if seen:
                self.disk.link(temporary, f"{folder}/{entry_name(number)}")
                linked = True
        except (FileExistsError, FileNotFoundError):  # the number is taken, or the run is gone
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
            with contextlib.suppress(OSError):  # the hint only saves time
                self.disk.put(f"{folder}/{HINT}", b"%d\n" % number, f"{folder}/.{HINT}-{word}.tmp")
        return new

    # -- folders -----------------------------------------------------------------------------------------------------

    def make_folder(self, run: str) -> None:
        """Make the folder of a run that is about to be created."""
        folder = self.folder(run)
        shard = folder.rpartition("/")[0]
        with translating(folder):
            if shard not in self._shards:
                self.disk.make_folder(shard)
                finish(self.disk, self.disk.sync_folder(f"{self.root}/runs"))
                self._shards.add(shard)
            try:
                self.disk.make_folder(folder)
            except FileNotFoundError:  # another process removed the shard
                self._shards.discard(shard)
                self.disk.make_folder(shard)
                self.disk.make_folder(folder)

    def sync_folder_of(self, run: str) -> Steps[None]:
        """Make the name of the folder itself durable."""
        shard = self.folder(run).rpartition("/")[0]
        with translating(shard, unknown=True):
            yield from self.disk.sync_folder(shard)

    def remove(self, run: str, deleted: State | None = None) -> Steps[None]:
        """Move the folder of a deleted run away, then remove its content; spare another run created since."""
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
        """Remove the remains of deleted runs; their remover may be doing the same."""
        trash = f"{self.root}/trash"
        with translating(trash):
            for name in self.disk.names(trash):
                self.disk.remove_folder(f"{trash}/{name}")

    def sweep(self, run: str) -> list[str]:
        """Remove files that dead writers left half written in a run's folder; a living writer writes them again."""
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
        """Return the checkpoints after `after`, in order; at most `limit`, and about 4 MB.

        In a broken log, the checkpoints before the damage can be read with a small enough `limit`.
        """
        state, broken = self.state_to_read(run)
        if state is None or limit <= 0 or after >= state.head.seq:
            if broken is not None:
                raise broken
            return []
        after, wanted = max(after, 0), frozenset(kinds)
        kept_from = state.head.kept_from
        if 0 < after < kept_from:
            after = kept_from - 1
        page: list[Row] = []
        size, seq = 0, None
        for number in _with_records(self._first(run, state, after), state):
            entry = self.entry(run, number)
            for row in self._kept_rows(run, entry, kept_from):
                expected = _following(after if seq is None else seq, kept_from)
                if row.seq > expected or (seq is not None and row.seq != expected):
                    raise CheckpointCorrupt(f"run {run!r}: chain broken at seq {expected}: found seq {row.seq}")
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

    def _kept_rows(self, run: str, entry: Entry, kept_from: int) -> list[Row]:
        """Return the checkpoints that an entry added, without those that were removed."""
        folder = self.folder(run)
        rows = entry_rows(entry, run, lambda name: self._beside(run, folder, name))
        return [row for row in rows if row.seq == 1 or row.seq >= kept_from] if kept_from else rows

    def state_to_read(self, run: str) -> tuple[State | None, CheckpointCorrupt | None]:
        """Return the state of a run; for a broken log, its remains and the error."""
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
        """Return the checkpoints that one entry added."""
        folder = self.folder(run)
        return entry_rows(self.entry(run, number), run, lambda name: self._beside(run, folder, name))

    def unreadable(self, run: str) -> list[dict[str, Any]]:
        """Return the unreadable entries of a run, as text where possible."""
        found: list[dict[str, Any]] = []
        folder = self.folder(run)
        for name in sorted(self.disk.names(folder)):
            number = entry_number(name)
            if number is None or self._readable(run, number) is not None:
                continue
            with translating(folder):
                data = self.disk.read(f"{folder}/{name}")
            if data == TRIMMED:
                continue
            try:
                found.append({"file": name, "text": data.decode()})
            except UnicodeDecodeError:
                found.append({"file": name, "base64": b64encode(data).decode()})
        return found

    def run_in(self, folder: str) -> str | None:
        """Return the id of the run whose log is in a folder, from its newest readable entry."""
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
        """Return the number of the entry that holds the checkpoint after this one."""
        if after <= 0:
            return state.head.base
        born, seq, number = self._places.get(run, ("", 0, 0))
        if born == state.head.born and seq == after and max(number, state.head.kept_entry - 1) < state.number:
            return max(number + 1, state.head.kept_entry)
        oldest = max(state.head.base, state.head.kept_entry)
        return self._find(run, state, oldest, lambda head: head.seq > after)

    def _find(self, run: str, state: State, low: int, holds: Callable[[Head], bool]) -> int:
        """Return the first readable entry from `low` on for which `holds` is true, as it is for the newest."""
        high = state.number
        first, last = low, high
        try:
            while low < high:
                middle = (low + high) // 2
                beyond = self._next_entry(run, state, middle)
                if beyond is not None and holds(beyond.head):
                    high = middle
                else:
                    low = (middle if beyond is None else beyond.number) + 1
        except CheckpointCorrupt:
            for number in range(first, last):
                with contextlib.suppress(CheckpointCorrupt):
                    if holds(self.entry(run, number).head):
                        return number
            return last
        return low

    def _next_entry(self, run: str, state: State, number: int) -> Entry | None:
        """Return an entry; if it was removed, the next one that is there; None if none is up to the oldest kept one.

        An entry between the first record and the kept ones that cannot be read counts as removed: if it held a signal,
        the numbers of the signals show the gap.
        """
        head = state.head
        while head.first_entry < number < head.kept_entry:
            found = self._readable(run, number)
            if found is not None:
                return found
            number += 1
        return self.entry(run, number)

    def kept_entries(self, run: str, state: State, kept_from: int) -> tuple[int, int]:
        """Return the entries that hold the first record and the record `kept_from`; the next entry if it is new."""
        first = state.head.first_entry or self._find(run, state, state.head.base, lambda head: head.seq >= 1)
        if kept_from > state.head.seq:
            return first, state.number + 1
        oldest = max(state.head.base, state.head.kept_entry)
        return first, self._find(run, state, oldest, lambda head: head.seq >= kept_from)

    def remove_entries(self, run: str, before: Head, state: State) -> None:
        """Replace the entries that hold only removed records by marks. After a crash on the way some are left.

        A number is never freed: the link to it is the fence, and a process that slept would take it.
        """
        head, folder = state.head, self.folder(run)
        for number in range(max(head.first_entry + 1, before.kept_entry), head.kept_entry):
            entry = self._readable(run, number)
            if entry is None or entry.signals:
                continue
            path = f"{folder}/{entry_name(number)}"
            with contextlib.suppress(OSError):
                names = self._attached(folder, entry)
                self.disk.put(path, TRIMMED, f"{folder}/.{entry_name(number)}-{self.unique()}.tmp")
                for name in names:
                    self.disk.unlink(f"{folder}/{name}")

    def _attached(self, folder: str, entry: Entry) -> list[str]:
        """Return the files beside an entry."""
        names = [*entry.fields.get("parts", ()), entry.fields.get("body")]
        for name in entry.fields.get("parts", ()):
            part: dict[str, Any] = msgspec.json.decode(self.disk.read(f"{folder}/{name}"))
            names.append(part.get("body"))
        return [name for name in names if isinstance(name, str) and "/" not in name and not name.startswith(".")]

    def signals(self, run: str, state: State, after: int = 0) -> Iterator[tuple[Signal, str]]:
        """Yield the signals after `after`, in order, each with its token."""
        seen, number = max(after, 0, state.head.signals_from - 1), state.head.base
        while seen < state.head.signals:
            entry = self._next_entry(run, state, number)
            if entry is not None and entry.head.signals <= seen:
                have = seen
                number = self._find(run, state, entry.number + 1, lambda head: head.signals > have)  # noqa: B023
                entry = self._next_entry(run, state, number)
            if entry is None:
                raise CheckpointCorrupt(f"run {run!r}: its signal {seen + 1} is missing")
            number = entry.number
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
        """Return the ids and tokens of every signal that a run has received."""
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
        """Add one signal."""
        if signal.id:
            known.ids.setdefault(signal.id, signal.seq)
        if token:
            known.tokens.setdefault(token, signal.seq)
        known.upto = max(known.upto, signal.seq)


def _following(seq: int, kept_from: int) -> int:
    """Return the number of the record after a record."""
    return kept_from if seq == 1 and kept_from else seq + 1


def _with_records(number: int, state: State) -> Iterator[int]:
    """Yield the entries from a number on, without those whose records were removed."""
    head = state.head
    for one in range(number, state.number + 1):
        if not head.first_entry < one < head.kept_entry:
            yield one
