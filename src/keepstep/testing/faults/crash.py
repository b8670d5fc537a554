"""Simulated crashes: a store that dies before or after any write, and a driver that tries every write in turn."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ...engine.engine import Engine, log
from ...errors import StoreError, StoreUnavailable
from ...kernel.strands import uninstall
from ...model import (
    Ask,
    Claims,
    Flaw,
    GateChange,
    GateInfo,
    Grant,
    Kind,
    News,
    QueueCounts,
    Run,
    RunPage,
    RunQuery,
    Signal,
    WorkerInfo,
)
from ...ports import (
    Advance,
    Answer,
    Change,
    ClaimRequest,
    Clock,
    Document,
    DocumentQuery,
    Put,
    Row,
    Store,
    Verdict,
    Written,
)
from ...records.record import unseal
from ...stores.files.store import FilesStore
from ...stores.memory import MemoryStore
from ...stores.sqlite.store import SQLiteStore
from .recorder import Recorder

#: A crash before or after the write; or, without a crash, a write that fails, or one whose answer is lost.
When = Literal["before", "after", "failed", "lost"]

#: Seconds after which a life that neither ends nor crashes hangs; most last a tenth of a second on an idle machine.
LIFE_SECONDS = 60.0
#: Seconds that the bodies of a dead engine have to notice.
UNWIND_SECONDS = 5.0


class Crash(Exception):
    """The process is dead for its store: no request is answered any more."""


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """The fault of the write of this number, counted from 1; `kind` is its kind in the undisturbed life."""

    number: int
    when: When
    kind: str = "commit"

    def __str__(self) -> str:
        if self.when in ("failed", "lost"):
            return f"never, but write {self.number} ({self.kind}) was {self.when}"
        return f"{self.when} write {self.number} ({self.kind})"


class CrashingStore:
    """A store that works until its crash point, and from then on neither writes nor answers.

    A write is a commit, a heartbeat, or a claim that returned a run. `writes` lists the kind of each.
    """

    def __init__(self, inner: Store, point: CrashPoint | None = None, recorder: Recorder | None = None) -> None:
        self.inner = inner
        self.url, self.quick, self.transactional = inner.url, inner.quick, inner.transactional
        self.clock = inner.clock
        self.lease_seconds = inner.lease_seconds
        self.writes: list[str] = []
        self.workers: set[str] = set()
        self.dead = False
        self._point = point
        self._recorder = recorder
        self._lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        self.crashed = asyncio.Event()

    def die(self) -> None:
        """Be dead from now on."""
        self.dead = True
        self._loop.call_soon_threadsafe(self.crashed.set)

    def stand_still(self) -> None:
        """Stop writes of all other threads, because an acknowledged write would be lost with this process."""
        self._lock.acquire()

    def _check(self) -> None:
        if self.dead:
            raise Crash("the process has crashed")

    def _before(self, kind: str, changes: Sequence[Change] = ()) -> None:
        point = self._point
        if point is None or point.when not in ("before", "failed") or len(self.writes) != point.number - 1:
            return
        # A claim may find nothing and write nothing, so it is only crashed where a claim is known to return a run.
        if kind == "claim" and point.kind != "claim":
            return
        if point.when == "failed":
            self._point = None
            raise StoreUnavailable("the store failed once")
        self.die()
        self._check()

    def _after(self, kind: str, changes: Sequence[Change] = ()) -> None:
        self.writes.append(kind)
        point = self._point
        if point is None or point.when not in ("after", "lost") or len(self.writes) != point.number:
            return
        if point.when == "lost":
            self._point = None
            raise StoreUnavailable("the answer of the store was lost", unknown=True)
        self.die()
        self._check()

    # -- writes ------------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        with self._lock:
            self._check()
            if not changes:
                return []
            self._before("commit", changes)
            answers = self.inner.commit(changes, wait=wait)
            self._note(changes, answers)
            self._after("commit", changes)
            return answers

    def claim_runs(self, request: ClaimRequest) -> Claims:
        with self._lock:
            self._check()
            self._before("claim")
            self.workers.add(request.worker)
            claims = self.inner.claim_runs(request)
            if claims.claims:
                self._after("claim")
            return claims

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        with self._lock:
            self._check()
            self._before("heartbeat")
            self.workers.add(worker.id)
            known = self.inner.renew_leases(worker, leaving=leaving)
            self._after("leave" if leaving else "heartbeat")
            return known

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        with self._lock:
            self._check()
            self._before("delete")
            removed = self.inner.delete_runs(run_ids, finished=finished, scrub=scrub)
            self._after("delete")
            return removed

    def _note(self, changes: Sequence[Change], answers: Sequence[Answer]) -> None:
        if self._recorder is None:
            return
        for change, answer in zip(changes, answers, strict=True):
            if isinstance(change, Advance) and answer.verdict is Verdict.DONE:
                for row in change.rows:
                    if row.kind == Kind.STEP_COMPLETED:
                        record, _ = next(unseal([row], change.run, row.seq - 1))
                        self._recorder.durable(change.run, record.step)

    def change_gate(self, kind: str, name: str, change: GateChange) -> GateInfo:
        with self._lock:
            self._check()
            self._before("gate")
            gate = self.inner.change_gate(kind, name, change)
            self._after("gate")
            return gate

    def write_documents(self, batches: Sequence[Sequence[Put]]) -> list[Written]:
        with self._lock:
            self._check()
            self._before("documents")
            written: list[Written] = self._documents.write_documents(batches)
            self._after("documents")
            return written

    def remove_documents(self, collection: str, prefix: str = "", *, expired: bool = False, scrub: bool = False) -> int:
        with self._lock:
            self._check()
            self._before("documents")
            removed: int = self._documents.remove_documents(collection, prefix, expired=expired, scrub=scrub)
            self._after("documents")
            return removed

    @property
    def _documents(self) -> Any:
        return self.inner

    def pass_gates(self, worker: str, asks: Sequence[Ask]) -> list[Grant]:
        with self._lock:
            self._check()
            return self.inner.pass_gates(worker, asks)

    # -- reads -------------------------------------------------------------------------------------------------------

    def list_documents(self, query: DocumentQuery) -> list[Document]:
        self._check()
        found: list[Document] = self._documents.list_documents(query)
        return found

    def artifacts_folder(self) -> str:
        folder: str = self._documents.artifacts_folder()
        return folder

    def list_collections(self) -> dict[str, int]:
        self._check()
        found: dict[str, int] = self._documents.list_collections()
        return found

    def list_gates(self, kind: str) -> list[GateInfo]:
        self._check()
        return self.inner.list_gates(kind)

    def count_queue(self, name: str) -> QueueCounts:
        self._check()
        return self.inner.count_queue(name)

    def get_run(self, run_id: str) -> Run | None:
        self._check()
        return self.inner.get_run(run_id)

    def list_runs(self, query: RunQuery) -> RunPage:
        self._check()
        return self.inner.list_runs(query)

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        self._check()
        return self.inner.list_checkpoints(run_id, after, limit, kinds)

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        self._check()
        return self.inner.list_signals(run_id, after, limit)

    def news(self, worker: str, cursor: int) -> News:
        self._check()
        return self.inner.news(worker, cursor)

    def list_workers(self, *, gone: bool = False) -> list[WorkerInfo]:
        self._check()
        return self.inner.list_workers(gone=gone)

    def check(self, *, mend: bool = False) -> list[Flaw]:
        self._check()
        return self.inner.check(mend=mend)

    def close(self) -> None:
        """Leave the inner store open; its creator closes it."""


# -- disks -------------------------------------------------------------------------------------------------------------


class Disk(Protocol):
    """Storage that outlives the process; each life opens a store on it."""

    def open(self) -> Store: ...

    def mark_dead(self, store: Store, workers: Iterable[str]) -> None:
        """Release the locks of a store whose process has died."""


class MemoryDisk:
    """A memory store that is passed from life to life."""

    def __init__(self, clock: Clock | None = None, **options: Any) -> None:
        self.store = MemoryStore(clock=clock, **options)

    def open(self) -> MemoryStore:
        return self.store

    def mark_dead(self, store: Store, workers: Iterable[str]) -> None:
        for worker in workers:
            self.store.mark_dead(worker)

    def image(self) -> bytes:
        """Return the content of the disk, for another process of the same program."""
        with self.store._lock:  # noqa: SLF001 - the disk is the store
            return pickle.dumps({name: value for name, value in vars(self.store).items() if name not in _NOT_ON_DISK})

    def restore(self, image: bytes) -> None:
        """Replace the content of the disk by an image."""
        vars(self.store).update(pickle.loads(image))  # noqa: S301 - written by the same program, moments ago


#: Attributes of a memory store that belong to its process.
_NOT_ON_DISK = frozenset({"_watch", "_lock", "clock"})


class SQLiteDisk:
    """A file that every life opens for itself. Its lock files are released when the store of a dead life is closed."""

    def __init__(self, path: str | Path, clock: Clock | None = None, **options: Any) -> None:
        self.path = path
        self._clock = clock
        self._options = options

    def open(self) -> SQLiteStore:
        return SQLiteStore(self.path, clock=self._clock, **self._options)

    def mark_dead(self, store: Store, workers: Iterable[str]) -> None:
        store.close()


class FilesDisk:
    """A folder that every life opens for itself. Unfinished work of a dead life stays as it is."""

    def __init__(self, path: str | Path, clock: Clock | None = None, **options: Any) -> None:
        self.path = path
        self._clock = clock
        self._options = options

    def open(self) -> FilesStore:
        return FilesStore(self.path, clock=self._clock, **self._options)

    def mark_dead(self, store: Store, workers: Iterable[str]) -> None:
        if isinstance(store, FilesStore):
            store.abandon()


# -- lives -------------------------------------------------------------------------------------------------------------


async def abandon(engine: Engine) -> None:
    """Stop an engine at once, as if its process had died: nothing is written, handed back or waited for.

    Its code is cancelled, because a task cannot be killed; further effects of that code are discarded.
    """
    if engine.closed:
        return
    engine.closed = True
    log.removeFilter(engine._filter)  # noqa: SLF001 - it would outlive the engine, and keep it alive
    uninstall(engine.loop)
    worker: Any = engine.worker
    if worker is not None:
        worker.stop_claiming()
        worker.heart.stop()  # nobody asks a dead worker to leave
    tasks: set[asyncio.Task[Any]] = set(engine._background)  # noqa: SLF001
    for context in list(engine.live.values()):
        tasks |= {*(call.task for call in context.bodies.values() if call.task is not None), *context.tasks}
        context.detach("its process has died")
    for task in tasks:
        task.cancel()
    engine.notify_waiters()
    if tasks:
        await asyncio.wait(tasks, timeout=UNWIND_SECONDS)
    engine.journal._pool.shutdown(wait=False)  # noqa: SLF001
    engine._pool.shutdown(wait=False)  # noqa: SLF001


@asynccontextmanager
async def life(
    disk: Disk, point: CrashPoint | None = None, recorder: Recorder | None = None, **options: Any
) -> AsyncIterator[tuple[Engine, CrashingStore]]:
    """One life of a process: an engine on the disk, which dies at its crash point, or when the block ends."""
    inner = disk.open()
    store = CrashingStore(inner, point, recorder)
    engine = Engine(store, **{"linger_seconds": 0.01, **options})
    try:
        yield engine, store
    finally:
        store.die()
        await abandon(engine)
        disk.mark_dead(inner, store.workers)


Scenario = Callable[[Engine], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Lives:
    """The result of one crash: the result of the life that reached the end, and how many died before it."""

    point: CrashPoint | None
    result: Any
    crashes: int
    writes: list[str] = field(default_factory=list)


async def live(
    disk: Disk,
    scenario: Scenario,
    point: CrashPoint | None = None,
    recorder: Recorder | None = None,
    *,
    life_seconds: float = LIFE_SECONDS,
    **options: Any,
) -> tuple[bool, Any, list[str]]:
    """Open an engine, play the scenario and close the engine, until the crash; return whether it ended, and how."""
    async with life(disk, point, recorder, **options) as (engine, store):

        async def play() -> Any:
            await engine.open()
            result = await scenario(engine)
            await engine.close(stop_seconds=1.0)
            return result

        playing = asyncio.ensure_future(play())
        crashed = asyncio.ensure_future(store.crashed.wait())
        try:
            async with asyncio.timeout(life_seconds):
                await asyncio.wait([playing, crashed], return_when=asyncio.FIRST_COMPLETED)
            if not store.dead:
                return True, playing.result(), store.writes
            return False, None, store.writes
        except TimeoutError:
            raise AssertionError(f"a life hangs that should crash {point or 'never'}: {_stand(disk)}") from None
        finally:
            store.die()
            crashed.cancel()
            playing.cancel()
            await asyncio.wait([playing], timeout=UNWIND_SECONDS)
            if playing.done() and not playing.cancelled():
                playing.exception()


def _stand(disk: Disk) -> str:
    """Return the status of every unfinished run, for debugging."""
    store = disk.open()
    try:
        runs = [run for run in store.list_runs(RunQuery(limit=50)).runs if not run.status.finished]
        return "; ".join(f"{run.id} {run.status} seq {run.seq} due {run.due_at} wakes {run.wakes}" for run in runs)
    except StoreError as error:
        return str(error)


async def crash_everywhere(
    make_disk: Callable[[], Disk],
    scenario: Scenario,
    judge: Callable[[Disk, Lives], Awaitable[None]],
    *,
    recorder: Callable[[], Recorder | None] = lambda: None,
    again: Callable[[CrashPoint], Iterable[CrashPoint]] = lambda _: (),
    faults: Sequence[When] = ("before", "after"),
    **options: Any,
) -> int:
    """Play a scenario undisturbed to count its writes, then once for every write with a crash before and after it.

    Each time, the scenario is played again on the same disk until it reaches its end, and `judge` inspects the result.
    `again` names further crash points for the recovering lives; `faults` are the kinds of faults. Return the number of
    crashes.
    """
    disk = make_disk()
    ended, result, writes = await live(disk, scenario, None, recorder(), **options)
    assert ended, "the undisturbed scenario must come to its end"
    await judge(disk, Lives(None, result, 0, writes))
    crashes = 0
    for number, kind in enumerate(writes, 1):
        for when in faults:
            if number == 1 and when in ("failed", "lost"):
                continue  # a failure while a store is opened is raised to its opener
            point = CrashPoint(number, when, kind)
            points = [point, *again(point)]
            crashes += await crash_at(make_disk(), scenario, judge, points, recorder=recorder(), **options)
    return crashes


async def crash_at(
    disk: Disk,
    scenario: Scenario,
    judge: Callable[[Disk, Lives], Awaitable[None]],
    points: Sequence[CrashPoint],
    *,
    recorder: Recorder | None = None,
    **options: Any,
) -> int:
    """Play a scenario in successive lives, each crashing at its point, until it ends; return the number of crashes."""
    for crashes, point in enumerate((*points, None)):
        ended, result, writes = await live(disk, scenario, point, recorder, **options)
        if ended:
            await judge(disk, Lives(points[0] if points else None, result, crashes, writes))
            return crashes
    raise AssertionError(f"the scenario did not come to its end after a crash {points[0]}")
