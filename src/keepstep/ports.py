"""The ports: interfaces of a store, a clock, an observer, an executor, an agent, a gate and a tracer.

A store is blocking code, so each store is written once; the engine chooses the thread of every call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

import msgspec

from .model import (
    Ask,
    Claims,
    Event,
    Flaw,
    GateChange,
    GateInfo,
    Grant,
    Hindrance,
    News,
    QueueCounts,
    Run,
    RunPage,
    RunQuery,
    Signal,
    Status,
    WorkerInfo,
)

# -- changes that a store writes -------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, gc=False):
    """A sealed checkpoint as stored: the record's text and an optional compressed value.

    The checksum is SHA-256 over `record` followed by `body`. `opened` is the decrypted body, filled in for readers that
    have the key; no store writes it.
    """

    seq: int
    kind: str
    record: bytes
    body: bytes | None = None
    opened: bytes | None = None


class Create(msgspec.Struct):
    """Insert a run, with its first rows if the run is created with a lease. An existing run is never changed.

    A run copied from another store brings its `signals`, numbered and sealed. Its rows and signals begin as its
    `kept_from` and `signals_from` say. `over` lets a repair replace a damaged run: the existing run is removed if it
    has no lease and its epoch equals `over`. If `received` is given, the number of signals that the existing run has
    received must also equal it.
    """

    run: Run
    rows: Sequence[Row] = ()
    signals: Sequence[Signal] = ()
    over: int | None = None
    received: int | None = None


class Send(msgspec.Struct):
    """Append a signal to a run that has not finished. If the run is parked on that name, make it due.

    An `optional` signal of an `Advance` is left out if its run has finished or does not exist; any other one refuses
    the change. With `room`, a signal is refused if at least that number is unread.
    """

    signal: Signal
    optional: bool = False
    room: int | None = None


class Rekey(msgspec.Struct):
    """Replace a run's `data_key` if it is still `old`. The lease holder is not affected.

    For a store with the attribute `keeps_earlier_keys`, `old` and `new` may be the same key. The store then removes
    every other copy of data keys that a retired master key can open.
    """

    run: str
    old: str
    new: str


class Advance(msgspec.Struct):
    """A write by the lease holder: rows that extend the head, and their consequences, all or nothing.

    `after` is the head that the rows extend. `signals_seen`, when given, refuses the change if the run has received
    more signals than that. `status` None keeps the status. `release` gives up the lease and sets `due_at` and `wakes`.
    A released run with a `service` waits at that service: besides those two, a worker with a free place wakes it.
    `progress` resets the count of recoveries. `signals_read` is the number of signals that the run has read so far.

    `trim` removes the records before that number, except the first one, and `trim_signals` may remove the signals
    before that number; the run must have read them. No later reader may need what is removed. The rows of the change
    itself and the newest row always stay.

    `within`, when given, is called inside the transaction before any other write of this change. It may fill in `rows`
    and `checksum`. If it fails, its own writes are undone and only this change is refused.
    """

    run: str
    worker: str
    epoch: int
    after: int
    rows: Sequence[Row] = ()
    checksum: str = ""
    at: datetime | None = None
    status: Status | None = None
    release: bool = False
    due_at: datetime | None = None
    wakes: tuple[str, ...] = ()
    signals_seen: int | None = None
    progress: bool = True
    creates: Sequence[Create] = ()
    sends: Sequence[Send] = ()
    within: Callable[[Any], None] | None = None
    signals_read: int | None = None
    trim: int | None = None
    trim_signals: int | None = None
    service: str | None = None


Change = Create | Send | Advance | Rekey


class Verdict(StrEnum):
    """How a store answered one change."""

    DONE = "done"
    EXISTS = "exists"  # Create: the id or `dedupe` is taken; Send: the run already has a signal with this id
    FENCED = "fenced"  # Advance: another epoch, or another head; Create: another epoch, or leased; Rekey: another key
    MISSED = "missed signals"  # Advance: the run has more signals than `signals_seen`
    NOT_FOUND = "not found"  # Send, Rekey: no such run
    FINISHED = "finished"  # Send: the run has finished
    FULL = "full"  # Send: the run has `room` unread signals
    CONFLICT = "conflict"  # Advance: a run to create exists, created by another call or run
    ILLEGAL = "illegal move"  # Advance: no legal move leads to this status
    FAILED = "failed"  # Advance: `within` raised `error`; Send: the signal cannot be encrypted for the run
    HELD = "held up"  # another client has locked a row of the change; `error` has details; retry later


class Answer(msgspec.Struct):
    """The answer to one change. `about` names another run if that run is the reason for a refusal."""

    verdict: Verdict
    run: Run | None = None
    seq: int = 0
    about: str = ""
    error: BaseException | None = None


# -- documents ---------------------------------------------------------------------------------------------------------


class Document(msgspec.Struct, frozen=True):
    """One version of a document: bytes under a key of a collection. `writer` and `owner` are those of its `Put`."""

    collection: str
    key: str
    version: int
    value: bytes
    at: datetime
    writer: str = ""
    owner: str = ""
    expires_at: datetime | None = None


class Put(msgspec.Struct):
    """Write a new version of a document, or remove it with all its versions if `value` is None.

    With `expect`, only if that is the current version; 0 means that there must be none. If one of the newest `keep`
    versions has the same `writer`, that version is the answer and nothing is written. A document is removed together
    with the run that `owner` names. The newest `keep` versions stay. From `expires_at` on, a version counts as absent.

    A document copied from another store brings its `version`, which must be newer than the current one, and its `at`.
    """

    collection: str
    key: str
    value: bytes | None
    expect: int | None = None
    writer: str = ""
    owner: str = ""
    keep: int = 1
    expires_at: datetime | None = None
    version: int | None = None
    at: datetime | None = None


class DocumentQuery(msgspec.Struct, frozen=True):
    """The documents of a collection, by key in the order of its bytes.

    `prefix` begins their keys; `after` and `before` are beyond the first and the last; `keys` names them. The answer
    has the newest version of each, or `all_versions`, oldest first. `limit` counts keys; a page ends early, after a
    whole key, when it holds about 4 MB. Without `values`, every value is empty and unchecked.
    """

    collection: str
    prefix: str = ""
    after: str = ""
    before: str = ""
    keys: tuple[str, ...] = ()
    limit: int = 1000
    reverse: bool = False
    all_versions: bool = False
    values: bool = True


class Written(msgspec.Struct, frozen=True):
    """The answer to one batch of puts: `DONE`, or `CONFLICT` if nothing of it was written.

    `versions` has the version of each document now; 0 stands for none. After a conflict, `about` is the place of the
    refused put in its batch.
    """

    verdict: Verdict
    versions: tuple[int, ...]
    about: int = -1


def commit_all(store: Store, changes: Sequence[Change]) -> list[Answer]:
    """Commit for a caller that does not retry: raise `StoreUnavailable` if another client holds a lock."""
    answers = store.commit(changes)
    for answer in answers:
        if answer.verdict is Verdict.HELD and answer.error is not None:
            raise answer.error
    return answers


class WouldBlock(Exception):
    """A commit with `wait=False` would have to wait; nothing was written."""


class Underway(Protocol):
    """A commit without an answer yet. `sent` is false while part of it is still to be sent."""

    sent: bool

    def fileno(self) -> int:
        """The socket that becomes readable when an answer may be there."""

    def answers(self) -> list[Answer] | None:
        """Return the answers, or None if there are none yet.

        Raises the errors of `commit`, and `WouldBlock` if `commit` has to write the changes.
        """

    def wait(self) -> list[Answer]:
        """Send the rest, wait, and return the answers."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """The runs a worker can claim: of these workflows, in one version each if `versions` names it, and these queues.

    `queues` None stands for all queues. With `run`, only that run, if it is free or its owner dead, and in `statuses`.
    A worker that is going to drive that run sets `drives`: then the run needs a place in its queue.

    `rooms` names the services that the worker uses, with the number of parked runs of each that it can take now.

    `idle`: nothing tells the worker that runs are due, and its last claim found none. A store in which another worker
    looks for due runs and dead workers may answer without a look.
    """

    worker: str
    workflows: frozenset[str] = frozenset()
    limit: int = 1
    run: str | None = None
    statuses: frozenset[Status] = frozenset()
    versions: dict[str, str] = field(default_factory=dict)
    queues: frozenset[str] | None = None
    drives: bool = False
    rooms: Mapping[str, int] = field(default_factory=dict)
    idle: bool = False


@runtime_checkable
class Store(Protocol):
    """Storage of runs, leases, checkpoints and signals, written in whole transitions.

    `quick`: a commit may be made on the event loop's thread. `transactional`: `Advance.within` receives a connection
    whose writes commit together with the change. A lease lasts `lease_seconds` after a heartbeat. `clock` decides which
    runs are due.
    """

    url: str
    clock: Clock
    quick: bool
    transactional: bool
    lease_seconds: float

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        """Write many changes in one durable transaction, with one answer each. A refusal does not affect the others.

        Raises `WouldBlock` if `wait` is false and the commit would have to wait. Raises `StoreUnavailable` if nothing
        was written or, with `unknown` set, if the outcome is not known.
        """

    def claim_runs(self, request: ClaimRequest) -> Claims:
        """Lease runs that are due and free, or whose owner is dead. The epoch grows with every claim."""

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        """Write the worker's heartbeat, which renews all its leases. Return False if the store has marked it dead.

        The first call registers the worker. `leaving` removes it; the worker must hold no lease then.
        """

    def pass_gates(self, worker: str, asks: Sequence[Ask]) -> list[Grant]:
        """Tell services what a worker needs, and return what each grants. Need not survive a loss of power.

        The shares of living workers never add up to more than the concurrency of their service. A share ends when the
        worker leaves or the store gives it up. The first ask tells that the worker uses the service; a parked run that
        waits at a service which no living worker uses may be claimed by any worker.
        """

    def list_gates(self, kind: str) -> list[GateInfo]:
        """Return the gates of one kind, by name. A worker's claims follow a change within a second."""

    def change_gate(self, kind: str, name: str, change: GateChange) -> GateInfo:
        """Change the limits of a gate, which is created if necessary. Return the gate as it was before."""

    def count_queue(self, name: str) -> QueueCounts:
        """Return the runs of a queue: those that are driven, that wait to begin, and that hold keys."""

    def get_run(self, run_id: str) -> Run | None:
        """Return the run with its output, error and progress, or None. Raise `CheckpointCorrupt` if it is damaged."""

    def list_runs(self, query: RunQuery) -> RunPage:
        """Return one page of runs, newest first, without outputs, and without inputs unless the query asks for them.

        The page names damaged runs; they never end the list.
        """

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        """Return the rows of a run after `after`, in sequence order: at most `limit` rows and about 4 MB."""

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        """Return the signals of a run after `after`, in sequence order. Raise `CheckpointCorrupt` if one is damaged."""

    def news(self, worker: str, cursor: int) -> News:
        """Return what other clients wrote for this worker since `cursor`. Must be cheap: called 40 times a second."""

    def list_workers(self, *, gone: bool = False) -> list[WorkerInfo]:
        """Return every worker that is alive or owns a run, and whether it is alive.

        With `gone`, also return the dead ones that the store still remembers, for at least a day: what steps have saved
        is in their last heartbeat.
        """

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        """Remove runs without a lease: head, checkpoints and signals. Return the number removed.

        With `finished`, remove only runs that are finished at that moment. With `scrub`, also remove their text from
        every file that the store controls; a store that may not do so raises and removes nothing.

        If scrubbing would block other runs for more than a second, the store removes the runs, remembers them and
        raises `EraseUnfinished`. It then has `unfinished_erasures` and `rewrite`.
        """

    def check(self, *, mend: bool = False) -> list[Flaw]:
        """Return flaws of the store itself, beyond the chain of each run: orphaned rows, an index that disagrees.

        With `mend`, derive again whatever can be derived and put the rest aside, never destroyed. Each flaw records
        what was done.
        """

    def close(self) -> None:
        """Close files and connections. Other workers may claim this worker's runs from now on."""


class OptionalStore(Protocol):
    """Methods that a store may have beside those of `Store`. A caller asks for one with `optional`."""

    #: Whether the store keeps a data key in more places than one, so that a change of keys affects every run.
    keeps_earlier_keys: bool

    def begin_commit(self, changes: Sequence[Change]) -> Underway | None:
        """Send the changes of a commit. Send nothing and return None if that would have to wait."""

    def looking(self) -> Store | None:
        """Return the store for those who only look, such as pages; None if that is this store.

        It may be a little behind other processes, but its answers have all earlier writes of this one.
        """

    def on_news(self, alert: Callable[[], None]) -> Callable[[], None]:
        """Call `alert`, on any thread, when there is news for the store's workers. Return a function to stop."""

    def on_write(self, alert: Callable[[], None]) -> Callable[[], None]:
        """Call `alert`, on any thread, when others have written what readers follow. Return a function to stop."""

    def drain_worker(self, worker: str) -> bool:
        """Mark a registered worker as draining. Return False if there is none. The first mark stays."""

    def is_draining(self, worker: str) -> bool:
        """Whether a worker is marked as draining; it asks after each heartbeat."""

    def check_scrub(self) -> None:
        """Raise if `delete_runs` may not scrub."""

    def divide_history(self, days: float) -> bool:
        """Keep the records of runs together, by periods of `days`, so that they can be dropped as a whole.

        Return False if the history was divided before, and only the number of days may have changed.
        """

    def drop_history(self) -> int:
        """Drop what `delete_runs` has left of removed runs, as far as it can be dropped. Return the number of parts."""

    def unfinished_erasures(self) -> int:
        """Return the number of runs that were removed and not yet scrubbed."""

    def rewrite(self) -> int:
        """Scrub the runs that were removed and not yet scrubbed; other runs wait meanwhile. Return their number."""

    def hindrances(self) -> list[Hindrance]:
        """Return what keeps the server of the store from removing old rows, such as a transaction that is long open."""

    def raw_rows(self, run_id: str) -> list[dict[str, Any]]:
        """Return what there is of a run beside its checkpoints, readable or not, for a repair to keep."""

    def salvaged(self, run_id: str) -> Run | None:
        """Return a damaged run as far as it can be read, for a repair."""

    def cut_off(self) -> None:
        """Interrupt every thread that waits for the store, and close it."""

    def artifacts_folder(self) -> str:
        """Return the folder beside the store for artifacts. It need not exist."""

    def write_documents(self, batches: Sequence[Sequence[Put]]) -> list[Written]:
        """Write batches of documents in one durable transaction. Each batch is written as a whole or not at all.

        A refused batch does not affect the others. Later batches see what earlier ones have written.
        """

    def list_documents(self, query: DocumentQuery) -> list[Document]:
        """Return one page of documents. Raise `CheckpointCorrupt` if one of them is damaged."""

    def list_collections(self) -> dict[str, int]:
        """Return the names of all collections that hold documents, each with the number of its keys."""

    def remove_documents(self, collection: str, prefix: str = "", *, expired: bool = False, scrub: bool = False) -> int:
        """Remove the documents of a collection whose keys begin with `prefix`. Return the number of keys removed.

        With `expired`, remove only versions that have expired, and documents whose owner was removed an hour ago or
        earlier; an empty `collection` then stands for all. `scrub` is that of `delete_runs`.
        """


P = ParamSpec("P")
R = TypeVar("R")


def optional(store: Store, method: Callable[Concatenate[Any, P], R]) -> Callable[P, R] | None:
    """Return a store's own version of a method of `OptionalStore`, or None."""
    found: Callable[P, R] | None = getattr(store, method.__name__, None)
    return found


def keeps_earlier_keys(store: Store) -> bool:
    """Return `OptionalStore.keeps_earlier_keys` of a store; a store without it keeps a data key once."""
    return bool(getattr(store, "keeps_earlier_keys", False))


# -- other ports -------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """The source of time. `now` is wall time; `boot` is the boot id and a monotonic clock."""

    def now(self) -> float: ...
    def boot(self) -> tuple[str, float]: ...


@runtime_checkable
class JumpingClock(Clock, Protocol):
    """A clock whose time passes only when the process has nothing to do: looking at a store often would be all it does.

    `jumps` is always True; having it is what tells such a clock from others.
    """

    jumps: bool


@runtime_checkable
class Observer(Protocol):
    """A receiver of events. A failing observer is logged once and never affects a run."""

    def observe(self, event: Event) -> None: ...


@runtime_checkable
class SaveObserver(Protocol):
    """An observer that also learns of every commit. The engine asks for nothing if no observer does."""

    def observe_save(self, seconds: float, sizes: Sequence[int]) -> None:
        """Note a commit: how long the store took, and the bytes of each checkpoint in it."""


class Work(Protocol):
    """The body of one attempt, as an executor receives it."""

    def call_body(self) -> Any:
        """Call the step's function. An async function returns its coroutine.

        Call it in the context of `execute` or in a copy of it; otherwise the body is in no run.
        """

    def far(self) -> Any:
        """Return what an executor needs whose bodies run elsewhere: an `executors.task.FarWork`."""

    def holds_lease(self) -> bool:
        """Whether the body may still begin. An executor asks on the thread that is about to call the body.

        If it may not, ask `may_begin` on the loop's thread.
        """

    def outlived(self, body: asyncio.Future[Any]) -> None:
        """The step no longer waits for its body, which cannot be stopped and goes on."""

    def may_begin(self) -> bool:
        """As `holds_lease`, on the loop's thread. A run whose lease is too old is given back.

        If it returns false, raise `asyncio.CancelledError`, and otherwise try again.
        """


class Executor(Protocol):
    """A place where the bodies of steps run. A step takes `inline` for an async function, `thread` for a plain one.

    A step awaits an async body without a timeout directly: `inline` does not receive it. An executor may also have
    `width` (the number of bodies of one map at once, if the map does not say it), `at_work` (how many bodies have not
    ended) and `close()`.
    """

    @property
    def is_far(self) -> bool:
        """Whether bodies run in other processes. It then says when each begins, and the time of a body counts then."""
        return False

    @property
    def adopts(self) -> bool:
        """Whether bodies outlive their worker, so that the next one finds them by the names of their tasks."""
        return False

    async def execute(self, work: Work, seconds: float | None) -> Any:
        """Run the body and return its result, or raise what it raised.

        Raise `BodyTimedOut` after `seconds`, with what still runs: the next attempt waits for it. If the caller is
        cancelled, stop a body that can be stopped, and never begin one that waits for its turn.
        """


class BodyTimedOut(Exception):
    """A body took longer than its time. `body` is what still runs, if the executor cannot stop it."""

    def __init__(self, seconds: float, body: Any = None) -> None:
        super().__init__(f"the body took longer than {seconds:g} s")
        self.seconds = seconds
        self.body = body


class Agent(Protocol):
    """A performer of tasks: any object with these attributes can be hosted by a worker.

    It may also have `probe()`, which raises or returns False if the agent does not work, and the options of `ks.Agent`.
    """

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Collection[str]: ...

    async def perform(self, task: Any) -> Any:
        """Perform a task and return its result, as the code of a run. Raise `AgentRefused` to leave it to others."""


class Admission(Enum):
    """The answer of a gate to an attempt."""

    ADMITTED = "admitted"
    WAITED = "waited"  # the attempt had to wait here, so it asks all gates again
    REFUSED = "refused"  # the step has its outcome; there is no attempt


class Gate(Protocol):
    """A condition that each attempt of a step must meet before its body may run."""

    async def enter(self, attempt: Any) -> Admission:
        """Admit the attempt, make it wait, or append the outcome of its step and refuse it."""

    def leave(self, attempt: Any) -> None:
        """Take back the admission: the body has ended, or another gate made the attempt wait."""


class Traced(msgspec.Struct, gc=False):
    """A run as a tracer is told of it. `generation` counts the retries and rewinds by people before what is told."""

    trace: str
    run: str
    workflow: str
    generation: int = 0


@runtime_checkable
class Tracer(Protocol):
    """An observer of records that also gives code its trace context: that of the run, and of each attempt of a step.

    `observe` gets the events that report no record, and the ends of runs.
    """

    def observe(self, event: Event) -> None: ...

    def recorded(self, run: Traced, record: Any) -> None:
        """Take a durable record, which has the attributes of a `Checkpoint` that matter here. Keep no value of it."""

    def repeat(self, run: Traced, record: Any, end: Event | None) -> None:
        """Take a record of a worker that has died, which may have exported it or not; with `end` it ended the run."""

    def enter(self, run: Traced, step: str, attempt: int) -> None:
        """Make the context of the run's code, or of an attempt of a step, current in the calling task until it ends."""

    def traceparent(self, run: Traced) -> str:
        """Return the W3C `traceparent` of the span of a run."""

    def read_from(self, read: Callable[[], Any]) -> None:
        """Read counters and gauges of an engine, as `observers.metrics` has them, until this raises."""

    def flush(self) -> None:
        """Export everything that was observed. The engine calls it in a thread when it closes, and may not wait."""


class SystemClock:
    """The machine's own clocks."""

    def __init__(self) -> None:
        self._boot_id = _boot_id()

    now = staticmethod(time.time)

    def boot(self) -> tuple[str, float]:
        return self._boot_id, time.clock_gettime(_BOOT_CLOCK)


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds(clock: Clock) -> Callable[[], float]:
    """Return the monotonic clock of `boot` as a function; that of the machine costs no Python call."""
    return _BOOT_SECONDS if type(clock) is SystemClock else lambda: clock.boot()[1]


_BOOT_SECONDS = partial(time.clock_gettime, _BOOT_CLOCK)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: use the time of the boot, rounded to a minute
        return f"boot-{round((time.time() - time.clock_gettime(_BOOT_CLOCK)) / 60)}"


def instant(seconds: float) -> datetime:
    """Return the UTC instant, to the microsecond, for seconds since the epoch."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except OSError as error:  # the C library reports the overflow where Python does not check first
        raise OverflowError(f"{seconds!r} seconds are beyond the calendar") from error


#: The current run's branch, or the current step's attempt, or None outside both.
CURRENT: ContextVar[Any] = ContextVar("keepstep_current", default=None)

#: The `traceparent` of who starts runs here, for a door that receives it with a request. The current span of
#: OpenTelemetry comes first.
STARTER: ContextVar[str | None] = ContextVar("keepstep_starter", default=None)

#: Whether the current task only looks: it reads from a replica of the store, if there is one, and decides nothing.
LOOKS: ContextVar[bool] = ContextVar("keepstep_looks", default=False)


@contextmanager
def looking(looks: bool = True) -> Iterator[None]:
    """Let the current task only look inside the block; or decide, if it `looks` outside."""
    token = LOOKS.set(looks)
    try:
        yield
    finally:
        LOOKS.reset(token)
