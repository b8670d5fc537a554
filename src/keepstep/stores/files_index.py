"""The index of a files store: which runs there are, how they stand and when they are due, as the logs tell it, too.

Every process that writes keeps a file of its own, to which it appends a line whenever a run changes in a way that
others must see; every process reads the files of all. Lines about one run are ordered by the number of the entry that
they tell of, so nobody waits for anybody. Before a run is changed a line says that it will be: when its writer dies in
between, whoever comes next knows where to look. Files of a boot that did not end well are not believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from ..errors import StoreUnavailable
from ..model import Status
from ..ports import ClaimRequest, Clock
from . import rules
from .authors import Authors
from .files_disk import Disk, finish, translating
from .files_entry import Facts
from .files_log import State

#: Files of dead processes are merged into one when there are more than this.
_MOST_SETTLED = 16
#: A process begins a new file when its own is larger than this and holds several lines for each run.
_LARGEST_LOG = 16_000_000
#: How long an erasure waits for other processes to write their files anew, and how often it looks.
_SCRUB_SECONDS = 10.0
_SCRUB_LOOK_SECONDS = 0.02
#: Signals whose arrival is remembered; who has not asked for longer is told of every run that ever got one.
_ARRIVALS = 10_000


class Line(msgspec.Struct, omit_defaults=True, gc=False):
    """What one line tells: of a run, how it stands since its n-th entry; or something about the file itself."""

    run: str = ""
    born: str = ""
    entry: int = 0
    number: int = 0
    workflow: str = ""
    version: str = ""
    priority: int = 0
    status: str = ""
    worker: str | None = None
    due: float | None = None
    parent: str | None = None
    tags: dict[str, str] | None = None
    signals: int = 0
    gone: bool = False
    author: str | None = None
    will: tuple[str, ...] = ()
    batch: int = 0
    did: int = 0
    boot: str = ""
    closed: bool = False
    erased: tuple[str, ...] = ()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode

_ENDED = frozenset(status.value for status in rules.ENDED)


def _mark(run: str) -> str:
    """The name of the file that says that a run is being erased."""
    return rules.erasing(run).replace(" ", "-")


def _life(line: Line) -> str:
    """What names one life of a run that was erased, and tells nothing of it."""
    return rules.erasing(f"{line.run}\0{line.born}")


class _File:
    """A file of the index that is read, and how far."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.offset = 0
        self.boot = ""
        self.closed = False
        self.torn = False
        self.pending: dict[int, tuple[str, ...]] = {}

    def read(self) -> Iterator[Line]:
        """Lines that were added."""
        if os.fstat(self.fd).st_size <= self.offset:
            return
        data = os.pread(self.fd, os.fstat(self.fd).st_size - self.offset, self.offset)
        end = data.rfind(b"\n") + 1
        self.offset += end
        for text in data[:end].splitlines():
            if not text:
                yield Line()
                continue
            try:
                line = _decode(text)
            except (msgspec.MsgspecError, ValueError):
                self.torn = True
                continue
            self.boot = line.boot or self.boot
            self.closed = self.closed or line.closed
            if line.will:
                self.pending[line.batch] = line.will
            self.pending.pop(line.did, None)
            yield line

    def is_dead(self) -> bool:
        """Whether the process that wrote it lives no more: it held a lock on it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        os.close(self.fd)


class _Queue:
    """The free runs of one workflow that have a time: those whose time has come, and those that wait for it."""

    def __init__(self) -> None:
        self.later: list[tuple[float, str, str, int]] = []
        self.ready: list[tuple[int, float, str, str, int]] = []


class Index:
    """What all files together say, held in memory once it is asked for."""

    def __init__(self, root: str, disk: Disk, clock: Clock, tag: str, scan: Callable[[], Iterable[Line]]) -> None:
        self._folder = f"{root}/index"
        self._disk = disk
        self._clock = clock
        self._tag = tag
        self._scan = scan
        self._lock = threading.RLock()
        self._files: dict[str, _File] = {}
        self._own: int | None = None
        self._own_name = ""
        self._batches = 0
        self._pending: dict[int, tuple[str, ...]] = {}
        self._owed: dict[int, tuple[str, ...]] = {}
        self._rotations = 0
        self._loaded = False
        self._scrubs = False
        self._erased: set[str] = set()
        self._lines: dict[str, Line] = {}
        self._numbers: list[tuple[int, str]] = []
        self._owned: dict[str, set[str]] = {}
        self._queues: dict[str, _Queue] = {}
        self._doubtful: set[str] = set()
        self._position = 0
        self._arrivals: deque[tuple[int, str]] = deque(maxlen=_ARRIVALS)
        self._authors = Authors()
        self._seen: dict[str, int] = {}

    # -- writing -----------------------------------------------------------------------------------------------------

    def will(self, runs: Iterable[str]) -> int:
        """These runs are about to be changed; if this process dies, someone must look at them."""
        runs = tuple(runs)
        if not runs:
            return 0
        with self._lock:
            self._batches += 1
            self._append(_encode(Line(will=runs, batch=self._batches)) + b"\n")
            self._pending[self._batches] = runs
            return self._batches

    def did(self, batch: int, authors: set[str | None]) -> None:
        """A batch of changes is done: others who look at the file see that something was."""
        with self._lock:
            self._append(_encode(Line(did=batch)) + b"\n" if batch else b"\n")
            self._pending.pop(batch, None)
            self._owed.pop(batch, None)
            self._authors.wrote(authors)

    def failed(self, batch: int) -> None:
        """Nobody knows what became of a batch: its runs must be looked at."""
        with self._lock:
            if batch in self._pending:
                self._owed[batch] = self._pending[batch]

    def owed(self) -> dict[int, tuple[str, ...]]:
        """Batches of which that is so."""
        with self._lock:
            return dict(self._owed)

    def note(self, run: str, facts: Facts | None, state: State, author: str | None) -> None:
        """How a run stands now; without facts it is gone."""
        self.tell(line_of(run, facts, state, author))

    def tell(self, line: Line) -> None:
        """The same, as a line."""
        with self._lock:
            self._append(_encode(line) + b"\n")
            if self._loaded:
                self._apply(line, settled=True)

    def _append(self, data: bytes) -> None:
        with translating(self._folder):
            if self._own is None:
                self._begin()
            self._disk.write(self._own, data)  # type: ignore[arg-type]

    def _begin(self) -> None:
        """Make a file of one's own: it is locked before others can see it."""
        self._disk.make_folder(self._folder)
        self._rotations += 1
        name = f"{self._tag}-{self._rotations}.jsonl"
        fd = self._disk.open_log(f"{self._folder}/.{name}.tmp")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._disk.write(fd, _encode(Line(boot=self._clock.boot()[0])) + b"\n")
            self._disk.rename(f"{self._folder}/.{name}.tmp", f"{self._folder}/{name}")
        except BaseException:
            os.close(fd)
            raise
        self._own, self._own_name = fd, name

    def mark(self, runs: Iterable[str]) -> None:
        """Note durably that runs are being erased, without their names."""
        with translating(self._folder):
            self._disk.make_folder(self._folder)
            for run in runs:
                with contextlib.suppress(FileExistsError):
                    finish(self._disk, self._disk.create(self._path(_mark(run)), b""))
            finish(self._disk, self._disk.sync_folder(self._folder))

    def is_marked(self, run: str) -> bool:
        """Whether an erasure of this run was begun and not ended."""
        with translating(self._folder):
            return self._disk.identity(self._path(_mark(run))) is not None

    def unmark(self, runs: Iterable[str]) -> None:
        """Nothing is left of these runs, or they were not erased."""
        with translating(self._folder):
            for run in runs:
                with contextlib.suppress(FileNotFoundError):
                    self._disk.unlink(self._path(_mark(run)))

    def scrub(self) -> None:
        """Begin anew, and have other living processes do so, so that nothing is left of what was removed.

        `StoreUnavailable` names the files of those that have not done so: they do not look at the store just now.
        """
        self.refresh()
        with self._lock, translating(self._folder):
            others = {name for name in self._files if not name.startswith("settled-")}
            self._erased |= {_life(line) for line in self._lines.values() if line.gone}
            self._forget_erased()
            if self._own is None:
                self._snapshot()
            self.tend(anew=True)
            for name in [name for name in self._disk.names(self._folder) if name.startswith("settled-")]:
                with contextlib.suppress(FileNotFoundError):
                    self._disk.unlink(self._path(name))
        deadline = time.monotonic() + _SCRUB_SECONDS
        while left := sorted(others.intersection(self._disk.names(self._folder))):
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"{self._folder}: it is removed, but other processes have not written their part of the index anew,"
                    f" so that its name may be left in {', '.join(left)}; end them, and do it again"
                )
            time.sleep(_SCRUB_LOOK_SECONDS)
            self.refresh()

    def _forget_erased(self) -> None:
        """Keep no names of runs that were erased."""
        for line in [line for line in self._lines.values() if _life(line) in self._erased]:
            self._owned.get(line.worker or "", set()).discard(line.run)
            del self._lines[line.run]

    def tend(self, *, anew: bool = False) -> None:
        """Now and then: begin anew if the file was taken away or has grown too long."""
        with self._lock:
            if self._own is None:
                return
            with translating(self._folder):
                found = os.fstat(self._own)
                there = self._disk.identity(self._path(self._own_name))
                lost = there is None or there.inode != found.st_ino
                if not lost and not anew and found.st_size < max(_LARGEST_LOG, 1000 * len(self._lines)):
                    return
                if lost:  # others may have been lost with it
                    self._loaded = False
                    self.refresh(rebuild=True)
                old, path = self._own, self._path(self._own_name)
                self._own = None
                try:
                    self._snapshot()
                    if not lost:
                        with contextlib.suppress(FileNotFoundError):
                            self._disk.unlink(path)
                finally:  # a file that is left counts as a dead writer's, which others see to
                    os.close(old)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _snapshot(self) -> None:
        """Say all that is known in one's own file."""
        lines = b"".join(_encode(line) + b"\n" for line in self._lines.values())
        will = b"".join(_encode(Line(will=runs, batch=n)) + b"\n" for n, runs in self._pending.items())
        erased = _encode(Line(erased=tuple(sorted(self._erased)))) + b"\n" if self._erased else b""
        self._append(erased + lines + will)

    # -- reading -----------------------------------------------------------------------------------------------------

    def refresh(self, *, rebuild: bool = False) -> None:
        """Read what others have added; the first time, all of it."""
        with self._lock, translating(self._folder):
            names = self._disk.names(self._folder)
            mine = self._own_name
            for name in names:
                if name.endswith(".jsonl") and not name.startswith(".") and name != mine and name not in self._files:
                    with contextlib.suppress(FileNotFoundError):
                        self._files[name] = _File(f"{self._folder}/{name}")
            if not self._loaded:
                self._load(rebuild=rebuild)
            for file in self._files.values():
                for line in file.read():
                    self._heed(line)
            for name in [name for name in self._files if name not in names]:
                self._files.pop(name).close()
            if self._scrubs:  # another process has erased a run, and asks that its name be left nowhere
                self._scrubs = False
                self._forget_erased()
                self.tend(anew=True)

    def _load(self, *, rebuild: bool) -> None:
        self._lines, self._numbers, self._owned, self._queues = {}, [], {}, {}
        boot = self._clock.boot()[0]
        self._loaded = True
        for file in self._files.values():
            file.offset = 0
            for line in file.read():
                self._heed(line)
        if self._own is not None and not rebuild:
            own = _File(self._path(self._own_name))
            for line in own.read():
                self._heed(line)
            own.close()
        believed = [file for file in self._files.values() if not file.torn and (file.closed or file.boot == boot)]
        if rebuild or len(believed) < len(self._files) or (not self._files and self._own is None):
            self._rebuild(boot)

    def _rebuild(self, boot: str) -> None:
        """Read every log, and say what they tell in one's own file; files that are not believed go."""
        self._lines, self._numbers, self._owned, self._queues = {}, [], {}, {}
        for line in self._scan():
            self._apply(line, settled=True)
        if not self._lines and not self._files:
            return
        try:
            self._snapshot()
        except Exception:  # noqa: BLE001 - a store that cannot be written can be read all the same
            return
        for name, file in list(self._files.items()):
            if file.boot != boot or file.torn:
                with contextlib.suppress(OSError):
                    self._disk.unlink(file.path)
                self._files.pop(name).close()

    def _heed(self, line: Line) -> None:
        """Take in a line that another process wrote."""
        if line.erased:
            self._scrubs = self._scrubs or not self._erased.issuperset(line.erased)
            self._erased.update(line.erased)
        elif line.run:
            self._apply(line, settled=False)
        elif not (line.will or line.boot or line.closed):
            self._authors.wrote((None,))

    def _apply(self, line: Line, *, settled: bool) -> None:
        if self._erased and _life(line) in self._erased:
            return
        old = self._lines.get(line.run)
        if old is not None and (line.entry < old.entry if old.born == line.born else line.gone):
            return
        if old is not None and not settled and (old.born != line.born or _is_back(old, line)):
            self._doubtful.add(line.run)  # which of two lives is the later one, its folder tells
        if not settled:
            self._authors.wrote((line.author,))
        self._put(old, line)

    def _put(self, old: Line | None, line: Line) -> None:
        self._lines[line.run] = line
        before = old.signals if old is not None and old.born == line.born else 0
        if line.signals > before:
            self._position += 1
            self._arrivals.append((self._position, line.run))
        if old is not None and old.worker is not None and old.worker != line.worker:
            self._owned.get(old.worker, set()).discard(line.run)
        if line.gone:
            return
        if old is None or old.number != line.number:
            self._number(line.number, line.run)
        if line.worker is not None:
            self._owned.setdefault(line.worker, set()).add(line.run)
        elif line.due is not None and line.status not in _ENDED:
            queue = self._queues.setdefault(line.workflow, _Queue())
            heapq.heappush(queue.later, (line.due, line.run, line.born, line.entry))

    def _number(self, number: int, run: str) -> None:
        """Give a run its place in the list, once: lines about two lives of a run may come in turns."""
        place = bisect_left(self._numbers, (number, run))
        if self._numbers[place : place + 1] != [(number, run)]:
            self._numbers.insert(place, (number, run))

    def doubtful(self) -> list[str]:
        """Runs that must be looked at before the index can tell of them."""
        with self._lock:
            found = list(self._doubtful)
            self._doubtful.clear()
            return found

    # -- the dead ----------------------------------------------------------------------------------------------------

    def left_by_the_dead(self) -> list[tuple[str, list[str]]]:
        """Files whose writers live no more, each with the runs that were to be changed."""
        with self._lock, translating(self._folder):
            dead = [
                (name, file) for name, file in self._files.items() if not name.startswith("settled-") and file.is_dead()
            ]
            for _, file in dead:
                for line in file.read():
                    self._heed(line)
            return [(name, [run for runs in file.pending.values() for run in runs]) for name, file in dead]

    def retire(self, name: str) -> None:
        """A dead writer's file has been seen to: nobody needs to do so again."""
        with self._lock, translating(self._folder):
            file = self._files.pop(name, None)
            if file is None:
                return
            file.close()
            self._settle(file.path, name)
            settled = [one for one in self._disk.names(self._folder) if one.startswith("settled-")]
            if len(settled) > _MOST_SETTLED:
                self._snapshot()
                for one in settled:
                    with contextlib.suppress(FileNotFoundError):
                        self._disk.unlink(f"{self._folder}/{one}")

    def _settle(self, path: str, name: str) -> None:
        try:
            fd = self._disk.open_log(path)
            try:
                self._disk.write(fd, _encode(Line(closed=True)) + b"\n")
                if self._disk.syncs:
                    self._disk.sync(fd)
            finally:
                os.close(fd)
            self._disk.rename(path, f"{self._folder}/settled-{name}")
            finish(self._disk, self._disk.sync_folder(self._folder))
        except FileNotFoundError:  # someone else did it
            pass

    def close(self) -> None:
        """Say that nothing was left undone, if so, and let go."""
        with self._lock:
            if self._own is not None:
                if not self._pending:
                    with contextlib.suppress(OSError):
                        self._settle(self._path(self._own_name), self._own_name)
                os.close(self._own)
                self._own = None
            self.let_go()

    def let_go(self) -> None:
        """Close every file that is read."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def abandon(self) -> None:
        """Let go in a forked child, whose copy would keep the parent's lock alive."""
        if self._own is not None:
            os.close(self._own)
            self._own = None
        self.let_go()

    # -- asking ------------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """The place of a new run in the list: by the clock, and after every run that is known."""
        with self._lock:
            if not self._loaded:
                self.refresh()
            newest = self._numbers[-1][0] if self._numbers else 0
            self._next = max(newest + 1, getattr(self, "_next", 0) + 1, int(self._clock.now() * 1_000_000) * 10)
            return self._next

    def orphans(self, request: ClaimRequest, alive: set[str]) -> list[Line]:
        """Runs whose owner is not alive, owner by owner."""
        with self._lock:
            found = [
                line
                for owner in sorted(self._owned)
                if owner not in alive
                for run in self._owned[owner]
                if _knows(request, line := self._lines[run])
            ]
            return sorted(found, key=lambda line: (line.worker or "", line.workflow, line.run))

    def due(self, request: ClaimRequest, now: float) -> list[Line]:
        """Free runs whose time has come, the highest priority first; at most as many as are asked for."""
        found: list[Line] = []
        with self._lock:
            for workflow in request.workflows:
                queue = self._queues.get(workflow)
                if queue is None:
                    continue
                while queue.later and queue.later[0][0] <= now:
                    due, run, born, entry = heapq.heappop(queue.later)
                    if self._is_current(run, born, entry):
                        heapq.heappush(queue.ready, (-self._lines[run].priority, due, run, born, entry))
                found += self._take_ready(queue, request, now)
        found.sort(key=lambda line: (-line.priority, line.due or 0.0, line.run))
        return found

    def _take_ready(self, queue: _Queue, request: ClaimRequest, now: float) -> list[Line]:
        found: list[Line] = []
        seen = []
        while queue.ready and len(found) < request.limit:
            item = heapq.heappop(queue.ready)
            if not self._is_current(*item[2:]):
                continue
            seen.append(item)
            line = self._lines[item[2]]
            if item[1] <= now and _knows(request, line):
                found.append(line)
        for item in seen:  # they stay until their runs have another entry
            heapq.heappush(queue.ready, item)
        return found

    def next_due(self, request: ClaimRequest, now: float) -> float | None:
        """When the next run that a worker could take is due."""
        times: list[float] = []
        with self._lock:
            for workflow in request.workflows:
                queue = self._queues.get(workflow)
                if queue is None:
                    continue
                while queue.later and not self._is_current(*queue.later[0][1:]):
                    heapq.heappop(queue.later)
                if workflow not in request.versions:
                    times += [item[0] for item in queue.later[:1]]
                else:
                    times += [
                        item[0]
                        for item in queue.later
                        if self._is_current(*item[1:]) and _knows(request, self._lines[item[1]])
                    ]
                times += [item[1] for item in queue.ready if item[1] > now and self._is_current(*item[2:])]
        return min((at for at in times if at > now), default=None)

    def _is_current(self, run: str, born: str, entry: int) -> bool:
        line = self._lines.get(run)
        return line is not None and line.born == born and line.entry == entry and not line.gone

    def newest_first(self, before: int | None) -> Iterator[Line]:
        """Every run that was created before the one with this number."""
        with self._lock:
            end = len(self._numbers) if before is None else bisect_left(self._numbers, (before, ""))
            numbers = self._numbers[:end] if before is not None else list(self._numbers)
        for number, run in reversed(numbers):
            line = self._lines.get(run)
            if line is not None and not line.gone and line.number == number:
                yield line

    def loaded(self) -> Index:
        """Itself, once it has been read."""
        if not self._loaded:
            self.refresh()
        return self

    def line(self, run: str) -> Line | None:
        """What the index says of one run."""
        return self._lines.get(run)

    def lines(self) -> list[Line]:
        """Every run that the index knows of."""
        with self._lock:
            return [line for line in self._lines.values() if not line.gone]

    def leases(self) -> dict[str, int]:
        """How many runs each worker has."""
        with self._lock:
            return {worker: len(runs) for worker, runs in self._owned.items() if runs}

    def news(self, worker: str, cursor: int) -> tuple[int, tuple[str, ...], bool]:
        """The newest position, the worker's runs that received signals after `cursor`, and whether others wrote."""
        with self._lock:
            foreign = self._authors.others(worker)
            changed = self._seen.get(worker) != foreign
            self._seen[worker] = foreign
            if cursor >= self._position:
                return max(self._position, cursor), (), changed
            oldest = self._arrivals[0][0] if self._arrivals else self._position + 1
            if cursor <= 0 or cursor + 1 < oldest:
                fresh = {run for run in self._owned.get(worker, ()) if self._lines[run].signals}
            else:
                fresh = {run for position, run in self._arrivals if position > cursor}
            mine = tuple(sorted(run for run in fresh if self._lines[run].worker == worker))
            return self._position, mine, changed


def line_of(run: str, facts: Facts | None, state: State, author: str | None = None) -> Line:
    """What the index says of a run."""
    head = state.head
    if facts is None:
        return Line(run=run, born=head.born, entry=state.number, gone=True)
    return Line(
        run=run,
        born=head.born,
        entry=state.number,
        number=facts.number,
        workflow=facts.workflow,
        version=facts.version,
        priority=facts.priority,
        status=head.status.value,
        worker=head.worker,
        due=None if head.due_at is None else head.due_at.timestamp(),
        parent=facts.parent,
        tags=facts.tags or None,
        signals=head.signals,
        author=author,
    )


def _is_back(old: Line, line: Line) -> bool:
    """Whether a folder was taken away and brought back, or the other way round: lines of two files have no order."""
    return old.entry == line.entry and old.gone is not line.gone


def _knows(request: ClaimRequest, line: Line) -> bool:
    if line.workflow not in request.workflows:
        return False
    return request.versions.get(line.workflow, line.version) == line.version


def may_match(query: Any, line: Line) -> bool:
    """Whether a run can be one that a query asks for, as far as the index tells."""
    return (
        (query.workflow is None or line.workflow == query.workflow)
        and (not query.status or line.status in {Status(one).value for one in query.status})
        and (query.parent is None or line.parent == query.parent)
        and (query.worker is None or line.worker == query.worker)
        and all((line.tags or {}).get(name) == value for name, value in query.tags.items())
        and (query.id_prefix is None or line.run.startswith(query.id_prefix))
    )
