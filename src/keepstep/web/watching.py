"""Watches the runs that readers follow: one task for all of them reads each change of the store once."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CheckpointCorrupt, StoreError
from ..model import FINISHED, Kind, Run, RunQuery, Status
from ..model.event import event_of_record
from ..ports import LOOKS
from ..records.keys import is_encrypted
from ..records.progress import report_in
from ..records.record import checkpoint, unseal_some
from ..views import plain
from ..views.cut import clean, cut

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.waiting import RunReader
    from ..ports import Row, Store

log = logging.getLogger("keepstep")

#: Seconds between two looks at runs and workers, in case nothing is notified: a killed worker writes nothing.
LOOK_SECONDS = 0.4
#: Shortest pause in seconds between two looks, so that many writes are read together.
GAP_SECONDS = 0.02
#: A look is followed by a pause of this many times its length, so that a busy store leaves the processor to workers.
REST = 3.0
#: Seconds of that pause for each reader: each is sent its messages apart, which costs more than to read them once.
READER_SECONDS = 0.002
#: Messages and their bytes that a watch keeps for its readers. A reader that is further behind reads the store itself.
MOST_KEPT, MOST_KEPT_BYTES = 2000, 1_000_000
#: Seconds between two looks at the progress that a running step reports, which no list of runs has.
PROGRESS_SECONDS = 1.0
#: Characters of an error in a message; the record has all of it.
MOST_ERROR = 500
#: Records that are read at once.
PAGE = 500
#: Bytes of messages that a reader is given at once.
CHUNK_BYTES = 64_000
#: Runs of one query at most.
MOST_AT_ONCE = 500
#: Seconds between two messages about changes of the store, at the least.
CHANGE_SECONDS = 0.5
#: Seconds between two looks at the workers while nothing is written: a killed one writes nothing.
WORKERS_SECONDS = 1.0


class Watch:
    """One run that at least one reader follows: its newest messages, and its head.

    A reader has no queue. It asks for the messages after the last one that it was given, so that a slow reader costs no
    memory.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.readers = 0
        #: The number of the record after which `_kept` has every record, or -1 before the first look.
        self.begin = -1
        self.end = -1
        #: The facts of the head as a message, and the status.
        self.head = b""
        self.status: Status | None = None
        #: The last message, if there is nothing to follow any more: the run is gone or damaged, or the engine closed.
        self.over: bytes | None = None
        #: The last report of the running step, and when it was read, by the monotonic clock.
        self.progress: Any = None
        self.progress_read = 0.0
        self._born: Any = None
        self._facts: Any = None
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._joined: tuple[int, bytes, int] = (-1, b"", -1)
        self.changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended or is set aside."""
        return self.status is not None and (self.status in FINISHED or self.status is Status.SET_ASIDE)

    def begins_with(self, run: Run) -> None:
        """Begin with the records after those that the run has, at the first look or for another run of the same id."""
        if self._born != run.created_at:
            self._born = run.created_at
            self.skip_to(run.seq)

    def saw(self, run: Run, alive: bool | None) -> None:
        """Take in the head of the run, after its records."""
        facts = {
            "run": run.id,
            "status": run.status.value,
            "worker": run.worker,
            "alive": alive,
            "epoch": run.epoch,
            "recoveries": run.recoveries,
            "due_at": plain.iso(run.due_at),
            "wakes": list(run.wakes),
            "signals": run.signals,
            "progress": self.progress if run.status.active else None,
        }
        if facts != self._facts:
            self._facts = facts
            data = {**facts, "seq": run.seq, "updated_at": plain.iso(run.updated_at)}
            self.head = message("head", msgspec.json.encode(data))
        self.status = run.status

    def keep(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Keep the newest messages for the readers."""
        for seq, data in messages:
            if seq <= self.end:
                continue
            self._kept.append((seq, data))
            self._kept_bytes += len(data)
            self.end = seq
        while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES:
            self.begin, data = self._kept.popleft()
            self._kept_bytes -= len(data)

    def skip_to(self, seq: int) -> None:
        """Leave records up to a number to the readers, because there are too many."""
        self._kept.clear()
        self._kept_bytes = 0
        self.begin = self.end = seq

    def messages_after(self, seq: int) -> tuple[bytes, int]:
        """Return kept messages after a record, and the number of the last of them."""
        if self._joined[0] == seq and self._joined[2] == self.end:  # most readers are at the same place
            return self._joined[1], self.end
        first = bisect_right(self._kept, seq, key=_number)
        size, parts, last = 0, [], seq
        for place in range(first, len(self._kept)):
            last, data = self._kept[place]
            parts.append(data)
            size += len(data)
            if size >= CHUNK_BYTES:
                break
        else:
            last = max(last, self.end)
        chunk = b"".join(parts)
        if last == self.end:
            self._joined = (seq, chunk, last)
        return chunk, last

    def tell(self) -> None:
        """Wake the readers."""
        self.changed.set()
        self.changed = asyncio.Event()


def _number(kept: tuple[int, bytes]) -> int:
    return kept[0]


class Watching:
    """Follows every watched run of one engine, with one task and one query for all of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watches: dict[str, Watch] = {}
        self._reader: RunReader | None = None
        self._is_running = False
        self._alive: dict[str, bool] = {}

    @asynccontextmanager
    async def watch(self, run_id: str) -> AsyncIterator[Watch]:
        """Follow a run inside the block. Its head was read when the block begins."""
        watch = self._watches.get(run_id)
        if watch is None:
            watch = self._watches[run_id] = Watch(run_id)
        watch.readers += 1
        try:
            self._begin()
            if self._reader is not None:
                self._reader.follow(run_id)
                self._reader.wake()
            while not watch.head and watch.over is None:
                await watch.changed.wait()
            yield watch
        finally:
            watch.readers -= 1
            if not watch.readers:
                if self._watches.get(run_id) is watch:
                    del self._watches[run_id]
                if self._reader is not None:
                    self._reader.leave(run_id)
                    if not self._watches:
                        self._reader.wake()

    def _begin(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._engine.background(self._follow())

    async def _follow(self) -> None:
        """Look at all watched runs each time one of them may have changed, until none is left."""
        LOOKS.set(True)
        engine = self._engine
        try:
            with engine.waiting.reader(*self._watches) as reader:
                self._reader = reader
                while self._watches:
                    began = engine.loop.time()
                    try:
                        await self._look()
                    except StoreError as error:  # the store may answer again later
                        engine.outage.log("cannot read the runs that pages show", error)
                    took = engine.loop.time() - began
                    readers = sum(watch.readers for watch in self._watches.values())
                    await asyncio.sleep(min(max(GAP_SECONDS, REST * took, READER_SECONDS * readers), LOOK_SECONDS))
                    if self._watches:
                        await reader.changed(LOOK_SECONDS)
        finally:
            self._reader = None
            self._is_running = False
            for watch in list(self._watches.values()):  # the engine was closed
                self._end(watch, b"")

    async def _look(self) -> None:
        engine = self._engine
        ids = list(self._watches)
        for first in range(0, len(ids), MOST_AT_ONCE):
            some = ids[first : first + MOST_AT_ONCE]
            runs, damaged = await engine.call(self._heads, some)
            for run_id in some:
                watch, run = self._watches.get(run_id), runs.get(run_id)
                if watch is None:
                    continue
                if run is None:
                    kind = "damaged" if run_id in damaged else "gone"
                    self._end(watch, message(kind, msgspec.json.encode({"run": run_id})))
                    continue
                try:
                    await self._update(watch, run)
                except CheckpointCorrupt:
                    self._end(watch, message("damaged", msgspec.json.encode({"run": run_id})))

    def _end(self, watch: Watch, last: bytes) -> None:
        """End the streams of a run."""
        if self._watches.get(watch.run_id) is watch:
            del self._watches[watch.run_id]
        watch.over = last
        watch.tell()

    def _heads(self, ids: list[str]) -> tuple[dict[str, Run], tuple[str, ...]]:
        """Read the heads of runs, and whether the workers that hold them are alive."""
        store = self._engine.store
        page = store.list_runs(RunQuery(ids=frozenset(ids), limit=len(ids), system=True))
        if any(run.worker is not None for run in page.runs):
            self._alive = {worker.id: worker.alive for worker in store.list_workers()}
        for run in page.runs:
            if run.status.active and (watch := self._watches.get(run.id)) is not None:
                self._read_progress(watch)
        return {run.id: run for run in page.runs}, page.unreadable

    def _read_progress(self, watch: Watch) -> None:
        now = time.monotonic()
        if now - watch.progress_read < PROGRESS_SECONDS:
            return
        watch.progress_read = now
        try:
            run = self._engine.store.get_run(watch.run_id)
        except CheckpointCorrupt:  # its records tell so
            return
        text = None if run is None else report_in(run.progress)
        report = None if text is None or is_encrypted(text) else plain.value_of(text)
        watch.progress = clean(report, self._engine.redaction.redact)

    async def _update(self, watch: Watch, run: Run) -> None:
        before = watch.head, watch.end
        watch.begins_with(run)
        if run.seq - watch.end > MOST_KEPT:
            watch.skip_to(run.seq)
        while watch.end < run.seq:
            found = await self._engine.call(messages_of, self._engine, run.id, watch.end, PAGE)
            if not found:
                break
            watch.keep(found)
        watch.saw(run, None if run.worker is None else self._alive.get(run.worker, False))
        if before != (watch.head, watch.end):
            watch.tell()


def messages_of(engine: Engine, run_id: str, after: int, limit: int) -> list[tuple[int, bytes]]:
    """Read records of a run, and return the message of each with its number."""
    rows = engine.store.list_checkpoints(run_id, after, limit)
    return [_message_of(engine, run_id, row) for row in rows]


def _message_of(engine: Engine, run_id: str, row: Row) -> tuple[int, bytes]:
    one = checkpoint(*next(unseal_some((row,), run_id)))
    data: dict[str, Any] = {
        "seq": one.seq,
        "kind": one.kind.value,
        "name": event_of_record(one.kind.value, one.data),
        "step": one.step,
        "outcome": one.outcome.value,
        "attempt": one.attempt,
        "trigger": one.trigger.value,
        "worker": one.worker,
        "agent": one.agent,
        "stage": one.stage,
        "started_at": plain.iso(one.started_at),
        "finished_at": plain.iso(one.finished_at),
        "retry_at": plain.iso(one.retry_at),
        "error": None if one.error is None else {"type": one.error.type, "message": one.error.message},
    }
    kind = "record"
    if one.kind is Kind.EMITTED:
        kind = "tokens"
        tokens, missing = cut(plain.value_of(one.value))
        data |= {"life": one.data.get("epoch", 0), "tokens": tokens, "missing": missing}
    shown = clean(data, engine.redaction.redact)
    if shown["error"] is not None:  # cut last: half a secret is not recognised
        shown["error"]["message"] = shown["error"]["message"][:MOST_ERROR]
    return one.seq, message(kind, msgspec.json.encode(shown), one.seq)


def message(kind: str, data: bytes, number: int | None = None) -> bytes:
    """Return one server-sent event; the data is JSON, which has no line breaks."""
    name = b"" if number is None else b"id: %d\r\n" % number
    return name + b"event: " + kind.encode() + b"\r\ndata: " + data + b"\r\n\r\n"


class Changes:
    """Tells its readers that something in the store has changed, at most twice a second, with one task for all."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._readers = 0
        self._is_running = False
        self.number = 0
        self.closed = False
        self.changed = asyncio.Event()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Changes]:
        """Follow the changes inside the block."""
        self._readers += 1
        if not self._is_running:
            self._is_running = True
            self._engine.background(self._follow())
        try:
            yield self
        finally:
            self._readers -= 1

    async def _follow(self) -> None:
        LOOKS.set(True)
        engine = self._engine
        try:
            living = await self._living(frozenset())
            with engine.waiting.reader() as reader:
                while self._readers:
                    is_written = await reader.changed(WORKERS_SECONDS)
                    before, living = living, await self._living(living)
                    if is_written or before != living:
                        self._tell()
                        await asyncio.sleep(CHANGE_SECONDS)
        finally:
            self._is_running = False
            self.closed = engine.closed
            if self.closed:
                self._tell()

    async def _living(self, before: frozenset[str]) -> frozenset[str]:
        """Return the workers that are alive; those of the look before if the store does not answer now."""
        try:
            return await self._engine.call(_living, self._engine.store)
        except StoreError as error:  # the store may answer again later
            self._engine.outage.log("cannot read the workers that pages show", error)
            return before

    def _tell(self) -> None:
        self.number += 1
        self.changed.set()
        self.changed = asyncio.Event()


def _living(store: Store) -> frozenset[str]:
    return frozenset(worker.id for worker in store.list_workers() if worker.alive)
