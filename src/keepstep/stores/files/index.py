"""The index of a files store: the runs, their status and when they are due, derived from the logs.

Every process that writes has its own index file and appends a line whenever a run changes in a way that others must
see. Every process reads all files. Lines about one run are ordered by the number of their entry, so no process waits
for another. Before a run is changed, a line announces the change: if its writer dies in between, the next process knows
which run to check. Files from a boot that did not end cleanly are not trusted.
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
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import msgspec

from ...errors import StoreUnavailable
from ...model import FINISHED, Status
from ...model.keepers import is_keeper
from ...ports import ClaimRequest, Clock
from .. import claims, queues, rules
from ..write_counts import Authors
from .disk import Disk, finish, translating
from .entry import Facts
from .log import State

#: Number of files of dead processes above which they are merged into one.
_MOST_SETTLED = 16
#: Size in bytes above which a process starts a new file, if its own holds several lines per run.
_LARGEST_LOG = 16_000_000
#: Time in seconds that an erasure waits for other processes to rewrite their files, and its polling interval.
_SCRUB_SECONDS = 10.0
_SCRUB_LOOK_SECONDS = 0.02
#: Number of signal arrivals to remember. A worker that asks later receives every run that ever got a signal.
_ARRIVALS = 10_000


class Line(msgspec.Struct, omit_defaults=True, gc=False):
    """One line: the head of a run since its n-th entry, or a statement about the file itself.

    Lines of an older Keepstep lack `queue` and `origin`. The `origin` of a run that was not forked is empty.
    """

    run: str = ""
    born: str = ""
    entry: int = 0
    number: int = 0
    workflow: str = ""
    version: str = ""
    queue: str | None = None
    key: str | None = None
    dedupe: str | None = None
    epoch: int = 0
    holds: int = 0
    priority: int = 0
    status: str = ""
    worker: str | None = None
    due: float | None = None
    service: str | None = None
    since: float | None = None
    parent: str | None = None
    origin: str | None = None
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
_FINISHED = frozenset(status.value for status in FINISHED)


def _mark(run: str) -> str:
    """Return the name of the file that marks a run as being erased."""
    return rules.erasing(run).replace(" ", "-")


def _life(line: Line) -> str:
    """Return an anonymous identifier of one life of an erased run."""
    return rules.erasing(f"{line.run}\0{line.born}")


class _File:
    """An index file and the position up to which it has been read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.offset = 0
        self.boot = ""
        self.closed = False
        self.torn = False
        self.pending: dict[int, tuple[str, ...]] = {}

    def read(self) -> Iterator[Line]:
        """Yield the lines added since the last call."""
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
        """Whether the process that wrote the file has ended, and thus released its lock."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        os.close(self.fd)


class _Section:
    """The free runs of one workflow and queue with a due time: those that are due, and those that are not yet."""

    def __init__(self) -> None:
        self.later: list[tuple[float, str, str, int]] = []
        self.ready: list[tuple[int, float, str, str, int]] = []


class Index:
    """The content of all index files, held in memory after the first use."""

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
        self._sections: dict[str, dict[str, _Section]] = {}  # by workflow and queue
        self._queues: dict[str, dict[str, None]] = {}  # the runs of each queue that have not ended
        self._dedupes: dict[tuple[str, str], dict[str, None]] = {}  # the unfinished runs of each queue and dedupe
        self._parked: dict[str, dict[str, None]] = {}  # the runs that wait at each service
        self._doubtful: set[str] = set()
        self._position = 0
        self._arrivals: deque[tuple[int, str]] = deque(maxlen=_ARRIVALS)
        self._authors = Authors()
        self._seen: dict[str, int] = {}

    # -- writing -----------------------------------------------------------------------------------------------------

    def will(self, runs: Iterable[str]) -> int:
        """Announce changes of these runs, so that others check them if this process dies."""
        runs = tuple(runs)
        if not runs:
            return 0
        with self._lock:
            self._batches += 1
            self._append(_encode(Line(will=runs, batch=self._batches)) + b"\n")
            self._pending[self._batches] = runs
            return self._batches

    def did(self, batch: int, authors: set[str | None]) -> None:
        """Record that a batch of changes is done, visible to other processes."""
        with self._lock:
            self._append(_encode(Line(did=batch)) + b"\n" if batch else b"\n")
            self._pending.pop(batch, None)
            self._owed.pop(batch, None)
            self._authors.wrote(authors)

    def failed(self, batch: int) -> None:
        """Record that the outcome of a batch is unknown, so that its runs are checked."""
        with self._lock:
            if batch in self._pending:
                self._owed[batch] = self._pending[batch]

    def owed(self) -> dict[int, tuple[str, ...]]:
        """The batches whose outcome is unknown."""
        with self._lock:
            return dict(self._owed)

    def note(self, run: str, facts: Facts | None, state: State, author: str | None) -> None:
        """Record the state of a run; without facts, the run is gone."""
        self.tell(line_of(run, facts, state, author))

    def tell(self, line: Line) -> None:
        """Append a line about a run."""
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
        """Create this process's own file, locked before others can see it."""
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
        """Record durably, without their names, that runs are being erased."""
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
        """Remove the marks of runs that are fully erased, or were not erased."""
        with translating(self._folder):
            for run in runs:
                with contextlib.suppress(FileNotFoundError):
                    self._disk.unlink(self._path(_mark(run)))

    def scrub(self) -> None:
        """Start a new file, and let other living processes do so, so that no trace of removed runs is left.

        `StoreUnavailable` names the files of processes that have not done so, because they are not using the store now.
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
                    f"{self._folder}: removed, but not yet erased: other processes have not rewritten their indexes,"
                    f" so its name may be left in {', '.join(left)}. End them and erase again"
                )
            time.sleep(_SCRUB_LOOK_SECONDS)
            self.refresh()

    def _forget_erased(self) -> None:
        """Drop the names of erased runs."""
        for line in [line for line in self._lines.values() if _life(line) in self._erased]:
            self._owned.get(line.worker or "", set()).discard(line.run)
            self._file(line, Line(run=line.run, queue=line.queue, dedupe=line.dedupe, gone=True))
            del self._lines[line.run]

    def tend(self, *, anew: bool = False) -> None:
        """Do periodic upkeep: start a new file if the current one was removed or has grown too long."""
        with self._lock:
            if self._own is None:
                return
            with translating(self._folder):
                found = os.fstat(self._own)
                there = self._disk.identity(self._path(self._own_name))
                lost = there is None or there.inode != found.st_ino
                if not lost and not anew and found.st_size < max(_LARGEST_LOG, 1000 * len(self._lines)):
                    return
                if lost:  # other files may have been lost with it
                    self._loaded = False
                    self.refresh(rebuild=True)
                old, path = self._own, self._path(self._own_name)
                self._own = None
                try:
                    self._snapshot()
                    if not lost:
                        with contextlib.suppress(FileNotFoundError):
                            self._disk.unlink(path)
                finally:  # a remaining file counts as a dead writer's, which others process
                    os.close(old)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _snapshot(self) -> None:
        """Write everything known into this process's own file."""
        lines = b"".join(_encode(line) + b"\n" for line in self._lines.values())
        will = b"".join(_encode(Line(will=runs, batch=n)) + b"\n" for n, runs in self._pending.items())
        erased = _encode(Line(erased=tuple(sorted(self._erased)))) + b"\n" if self._erased else b""
        self._append(erased + lines + will)

    # -- reading -----------------------------------------------------------------------------------------------------

    def refresh(self, *, rebuild: bool = False) -> None:
        """Read the lines that others have added; the first time, all lines."""
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
                    self._take_in(line)
            for name in [name for name in self._files if name not in names]:
                self._files.pop(name).close()
            if self._scrubs:  # another process has erased a run, and asks all to drop its name
                self._scrubs = False
                self._forget_erased()
                self.tend(anew=True)

    def _load(self, *, rebuild: bool) -> None:
        self._lines, self._numbers, self._owned, self._sections = {}, [], {}, {}
        self._queues, self._dedupes, self._parked = {}, {}, {}
        boot = self._clock.boot()[0]
        self._loaded = True
        for file in self._files.values():
            file.offset = 0
            for line in file.read():
                self._take_in(line)
        if self._own is not None and not rebuild:
            own = _File(self._path(self._own_name))
            for line in own.read():
                self._take_in(line)
            own.close()
        believed = [file for file in self._files.values() if not file.torn and (file.closed or file.boot == boot)]
        if rebuild or len(believed) < len(self._files) or (not self._files and self._own is None):
            self._rebuild(boot)

    def _rebuild(self, boot: str) -> None:
        """Read every log and write the result into this process's own file; remove untrusted files."""
        self._lines, self._numbers, self._owned, self._sections = {}, [], {}, {}
        self._queues, self._dedupes, self._parked = {}, {}, {}
        for line in self._scan():
            self._apply(line, settled=True)
        if not self._lines and not self._files:
            return
        try:
            self._snapshot()
        except Exception:  # noqa: BLE001 - a read-only store can still be read
            return
        for name, file in list(self._files.items()):
            if file.boot != boot or file.torn:
                with contextlib.suppress(OSError):
                    self._disk.unlink(file.path)
                self._files.pop(name).close()

    def _take_in(self, line: Line) -> None:
        """Apply a line that another process wrote."""
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
            self._doubtful.add(line.run)  # the run's folder tells which of two lives is the later one
        if line.queue is None and not line.gone and line.status not in _ENDED:
            self._doubtful.add(line.run)  # an older Keepstep wrote the line: the run's folder tells its queue
        if not settled:
            self._authors.wrote((line.author,))
        self._put(old, line)

    def _put(self, old: Line | None, line: Line) -> None:
        self._lines[line.run] = line
        self._file(old, line)
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
            section = self._sections.setdefault(line.workflow, {}).setdefault(line.queue or "", _Section())
            heapq.heappush(section.later, (line.due, line.run, line.born, line.entry))

    def _file(self, old: Line | None, line: Line) -> None:
        """Note the run under its queue and its dedupe, as long as it has not ended."""
        if old is not None and (old.queue, old.dedupe) != (line.queue, line.dedupe):  # another life of the same id
            self._queues.get(old.queue or "", {}).pop(line.run, None)
            self._dedupes.get((old.queue or "", old.dedupe or ""), {}).pop(line.run, None)
        if old is not None and old.service is not None:
            self._parked.get(old.service, {}).pop(line.run, None)
        if line.service is not None and line.worker is None and not line.gone and line.status not in _ENDED:
            self._parked.setdefault(line.service, {})[line.run] = None
        if line.gone or line.status in _ENDED:
            self._queues.get(line.queue or "", {}).pop(line.run, None)
        else:
            self._queues.setdefault(line.queue or "", {})[line.run] = None
        if line.dedupe is not None:
            twins = self._dedupes.setdefault((line.queue or "", line.dedupe), {})
            if line.gone or line.status in _FINISHED:
                twins.pop(line.run, None)
            else:
                twins[line.run] = None

    def _number(self, number: int, run: str) -> None:
        """Give a run its place in the list, once; lines about two lives of a run may alternate."""
        place = bisect_left(self._numbers, (number, run))
        if self._numbers[place : place + 1] != [(number, run)]:
            self._numbers.insert(place, (number, run))

    def doubtful(self) -> list[str]:
        """Return the runs whose logs must be read before the index can describe them."""
        with self._lock:
            found = list(self._doubtful)
            self._doubtful.clear()
            return found

    # -- dead writers ------------------------------------------------------------------------------------------------

    def left_by_dead_writers(self) -> list[tuple[str, list[str]]]:
        """Return the files of dead writers, each with its announced but unfinished runs."""
        with self._lock, translating(self._folder):
            dead = [
                (name, file) for name, file in self._files.items() if not name.startswith("settled-") and file.is_dead()
            ]
            for _, file in dead:
                for line in file.read():
                    self._take_in(line)
            return [(name, [run for runs in file.pending.values() for run in runs]) for name, file in dead]

    def retire(self, name: str) -> None:
        """Mark a dead writer's file as processed, so that no other process repeats the work."""
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
        except FileNotFoundError:  # another process did it
            pass

    def close(self) -> None:
        """Record that nothing is unfinished, if so, and close the files."""
        with self._lock:
            if self._own is not None:
                if not self._pending:
                    with contextlib.suppress(OSError):
                        self._settle(self._path(self._own_name), self._own_name)
                os.close(self._own)
                self._own = None
            self.close_readers()

    def close_readers(self) -> None:
        """Close every file that is open for reading."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def abandon(self) -> None:
        """Close files in a forked child, whose copy would keep the parent's lock alive."""
        if self._own is not None:
            os.close(self._own)
            self._own = None
        self.close_readers()

    # -- queries -----------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return the place of a new run in the list: by the clock, and after every known run."""
        with self._lock:
            if not self._loaded:
                self.refresh()
            newest = self._numbers[-1][0] if self._numbers else 0
            self._next = max(newest + 1, getattr(self, "_next", 0) + 1, int(self._clock.now() * 1_000_000) * 10)
            return self._next

    def twin(self, queue: str, dedupe: str) -> str | None:
        """Return a run of a queue with this `dedupe` that has not finished."""
        with self._lock:
            return next(iter(self._dedupes.get((queue, dedupe), ())), None)

    def places(self, queue: str, request: ClaimRequest) -> list[queues.Place]:
        """Return the runs of a queue that have not ended."""
        with self._lock:
            lines = [self._lines[run] for run in self._queues.get(queue, ())]
            return [_place(line, _serves(request, line)) for line in lines]

    def parked_at(self) -> list[str]:
        """Return the services at which runs wait."""
        with self._lock:
            return sorted(service for service, runs in self._parked.items() if runs)

    def parked(self, service: str, request: ClaimRequest | None = None) -> list[Line]:
        """Return the runs that wait at a service, only those that a request serves if one is given."""
        with self._lock:
            lines = [self._lines[run] for run in self._parked.get(service, ())]
            return [line for line in lines if request is None or _serves(request, line)]

    def orphans(self, request: ClaimRequest, alive: set[str], limited: Container[str] = ()) -> list[Line]:
        """Return the runs whose owner is not alive, owner by owner, except those of `limited` queues."""
        with self._lock:
            found = [
                line
                for owner in sorted(self._owned)
                if owner not in alive
                for run in self._owned[owner]
                if _serves(request, line := self._lines[run]) and (line.queue or "") not in limited
            ]
            return sorted(found, key=_takeover_rank)

    def _asked(self, request: ClaimRequest) -> Iterator[tuple[str, _Section]]:
        """Yield the free runs of the workflows and queues that a worker serves."""
        for workflow in request.workflows:
            sections = self._sections.get(workflow, {})
            for queue in sections if request.queues is None else request.queues.intersection(sections):
                yield queue, sections[queue]

    def due(self, request: ClaimRequest, now: float, limited: Container[str] = ()) -> list[Line]:
        """Return free runs that are due, highest priority first, at most the requested number of each section.

        Runs of `limited` queues are left out.
        """
        found: list[Line] = []
        with self._lock:
            for queue, section in self._asked(request):
                if queue in limited:
                    continue
                while section.later and section.later[0][0] <= now:
                    due, run, born, entry = heapq.heappop(section.later)
                    if self._is_current(run, born, entry):
                        rank = claims.due_rank(self._lines[run].priority, due, run)
                        heapq.heappush(section.ready, (*rank, born, entry))
                found += self._take_ready(section, request, now)
        found.sort(key=lambda line: claims.due_rank(line.priority, line.due or 0.0, line.run))
        return found

    def _take_ready(self, section: _Section, request: ClaimRequest, now: float) -> list[Line]:
        found: list[Line] = []
        seen = []
        while section.ready and len(found) < request.limit:
            item = heapq.heappop(section.ready)
            if not self._is_current(*item[2:]):
                continue
            seen.append(item)
            line = self._lines[item[2]]
            if item[1] <= now and _serves(request, line):
                found.append(line)
        for item in seen:  # they stay queued until their runs have another entry
            heapq.heappush(section.ready, item)
        return found

    def next_due(self, request: ClaimRequest, now: float) -> float | None:
        """Return when the next run that a worker could claim is due."""
        times: list[float] = []
        with self._lock:
            for _, section in self._asked(request):
                while section.later and not self._is_current(*section.later[0][1:]):
                    heapq.heappop(section.later)
                first = section.later[0] if section.later else None
                if first is not None and first[0] > now and _serves(request, self._lines[first[1]]):
                    times.append(section.later[0][0])
                else:
                    times += [
                        item[0]
                        for item in section.later
                        if self._is_current(*item[1:]) and _serves(request, self._lines[item[1]])
                    ]
                times += [item[1] for item in section.ready if item[1] > now and self._is_current(*item[2:])]
        return min((at for at in times if at > now), default=None)

    def _is_current(self, run: str, born: str, entry: int) -> bool:
        line = self._lines.get(run)
        return line is not None and line.born == born and line.entry == entry and not line.gone

    def newest_first(self, before: int | None, ids: Iterable[str] | None = None) -> Iterator[Line]:
        """Yield every run created before the one with this number; only those of `ids`, if given."""
        if ids is not None:
            found = [line for line in map(self._lines.get, ids) if line is not None and not line.gone]
            older = [line for line in found if before is None or line.number < before]
            yield from sorted(older, key=lambda line: -line.number)
            return
        with self._lock:
            end = len(self._numbers) if before is None else bisect_left(self._numbers, (before, ""))
            numbers = self._numbers[:end] if before is not None else list(self._numbers)
        for number, run in reversed(numbers):
            line = self._lines.get(run)
            if line is not None and not line.gone and line.number == number:
                yield line

    def loaded(self) -> Index:
        """Return this index after reading it."""
        if not self._loaded:
            self.refresh()
        return self

    def line(self, run: str) -> Line | None:
        """Return the line of one run."""
        return self._lines.get(run)

    def lines(self) -> list[Line]:
        """Return the lines of all known runs."""
        with self._lock:
            return [line for line in self._lines.values() if not line.gone]

    def leases(self) -> dict[str, int]:
        """Return the number of runs of each worker."""
        with self._lock:
            return {worker: len(runs) for worker, runs in self._owned.items() if runs}

    def news(self, worker: str, cursor: int) -> tuple[int, tuple[str, ...], bool]:
        """Return the newest position, the worker's runs with signals after `cursor`, and whether others wrote."""
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
    """Return the line for a run."""
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
        queue=facts.queue,
        key=facts.key,
        dedupe=facts.dedupe,
        epoch=head.epoch,
        holds=head.holds,
        priority=facts.priority,
        status=head.status.value,
        worker=head.worker,
        due=None if head.due_at is None else head.due_at.timestamp(),
        service=head.service,
        since=None if head.service is None or head.updated_at is None else head.updated_at.timestamp(),
        parent=facts.parent,
        origin=facts.origin or "",
        tags=facts.tags or None,
        signals=head.signals,
        author=author,
    )


def _is_back(old: Line, line: Line) -> bool:
    """Whether a folder was removed and restored, or the other way round; lines of two files have no order."""
    return old.entry == line.entry and old.gone is not line.gone


def _place(line: Line, served: bool) -> queues.Place:
    return queues.Place(
        line.run,
        line.number,
        line.priority,
        line.key,
        line.due,
        line.worker,
        line.epoch == 0,
        line.holds,
        served,
        (line.worker or "", line.workflow),
    )


def parked_place(line: Line) -> queues.Place:
    """Return the place of a run among those that wait at a service."""
    return queues.waiting_place(_place(line, served=True), line.since or 0.0)


def _serves(request: ClaimRequest, line: Line) -> bool:
    return claims.serves(request, line.workflow, line.version, line.queue or "")


def _takeover_rank(line: Line) -> tuple[str, ...]:
    return claims.takeover_rank(line.worker or "", line.workflow, line.queue or "", line.run)


def may_match(query: Any, line: Line) -> bool:
    """Whether a run may match a query, as far as the index can tell."""
    return (
        (query.workflow is None or line.workflow == query.workflow)
        and (not query.workflows or line.workflow in query.workflows)
        and line.workflow not in query.not_workflows
        and (query.queue is None or line.queue is None or line.queue == query.queue)
        and (query.version is None or line.version == query.version)
        and (not query.status or line.status in {Status(one).value for one in query.status})
        and (query.parent is None or line.parent == query.parent)
        and (query.worker is None or line.worker == query.worker)
        and all((line.tags or {}).get(name) == value for name, value in query.tags.items())
        and (query.id_prefix is None or line.run.startswith(query.id_prefix))
        and (query.system or not is_keeper(line.run))
    )
