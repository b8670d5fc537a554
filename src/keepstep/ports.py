"""The seams: what the engine asks of a store, a clock, an observer, a codec and an executor.

A store is blocking code, so that it is written once: the engine decides on which thread a call is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from .model import Claims, Event, Flaw, News, Run, RunPage, RunQuery, Signal, Status, WorkerInfo

# -- what a store is asked to write ----------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, gc=False):
    """A sealed checkpoint as a store keeps it: the record's text, and a compressed value beside it if there is one.

    The checksum is SHA-256 over `record` followed by `body`. `opened` is what a body that is encrypted says, for those
    who have the key; no store keeps it.
    """

    seq: int
    kind: str
    record: bytes
    body: bytes | None = None
    opened: bytes | None = None


class Create(msgspec.Struct):
    """Insert a run, with its first rows if it is leased at birth. An existing id is answered, never changed.

    A run that comes from elsewhere brings its `signals`, numbered and sealed. `over` is how a repair puts a run in
    place of the damaged one: the existing run goes if nobody has leased it and its epoch is this one; and if `heard`
    is given, only if it has received so many signals and no more.
    """

    run: Run
    rows: Sequence[Row] = ()
    signals: Sequence[Signal] = ()
    over: int | None = None
    heard: int | None = None


class Send(msgspec.Struct):
    """Append a signal to a run that has not finished; if the run is parked on its name, make the run due."""

    signal: Signal


class Rekey(msgspec.Struct):
    """Put another `data_key` in place of a run's, if it is still the old one. Whoever has the lease need not know.

    A store with the attribute `keeps_earlier_keys` is also sent the same key twice: it then removes every other copy of
    the data keys that a retired master key opens.
    """

    run: str
    old: str
    new: str


class Advance(msgspec.Struct):
    """What the lease holder writes: rows that extend the head, and what follows from them, all or nothing.

    `after` is the head that the rows extend. `signals_seen`, when given, refuses the change if the run has received
    more signals than that. `status` None leaves the status alone; `release` gives the lease up and sets `due_at` and
    `wakes`. `progress` resets the count of recoveries. `within`, when given, is called inside the transaction before
    anything else of this change is written; it may fill in `rows` and `checksum`, and its failure undoes its own
    writes and refuses only this change.
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


Change = Create | Send | Advance | Rekey


class Verdict(StrEnum):
    """How a store answered one change."""

    DONE = "done"
    EXISTS = "exists"  # Create: the id is taken; Send: a signal with this id is there already
    FENCED = "fenced"  # Advance: another epoch, or another head; Create: another epoch, or leased; Rekey: another key
    MISSED = "missed signals"  # Advance: more signals than were seen
    NOT_FOUND = "not found"  # Send, Rekey: no such run
    FINISHED = "finished"  # Send: the run has ended
    CONFLICT = "conflict"  # Advance: a run to create is there, and another call or run created it
    ILLEGAL = "illegal move"  # Advance: the status may not change so
    FAILED = "failed"  # Advance: `within` raised `error`; Send: it cannot be encrypted for that run
    HELD = "held up"  # someone else has locked what it concerns, as `error` says: try it again later


class Answer(msgspec.Struct):
    """The answer to one change. `about` names the other run when it is the reason for a refusal."""

    verdict: Verdict
    run: Run | None = None
    seq: int = 0
    about: str = ""
    error: BaseException | None = None


def commit_all(store: Store, changes: Sequence[Change]) -> list[Answer]:
    """Commit for someone who does not come again: `StoreUnavailable` if someone else has locked what one concerns."""
    answers = store.commit(changes)
    for answer in answers:
        if answer.verdict is Verdict.HELD and answer.error is not None:
            raise answer.error
    return answers


class WouldBlock(Exception):
    """A commit that must not wait would have to; nothing was written."""


class Underway(Protocol):
    """A commit that has been sent, or of which a rest is still to be `sent`, and that is not yet answered."""

    sent: bool

    def fileno(self) -> int:
        """The socket that is readable when there may be an answer."""

    def answers(self) -> list[Answer] | None:
        """The answers, or None while there are none; raises as `commit` does, `WouldBlock` if that has to do it."""

    def wait(self) -> list[Answer]:
        """Send the rest, wait, and give the answers."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Which runs a worker can take. With `run`, that one, if it is free (or its owner dead) and in `statuses`."""

    worker: str
    workflows: frozenset[str] = frozenset()
    limit: int = 1
    run: str | None = None
    statuses: frozenset[Status] = frozenset()
    versions: dict[str, str] = field(default_factory=dict)


@runtime_checkable
class Store(Protocol):
    """Where runs, leases, checkpoints and signals live: whole transitions, nothing per feature.

    `quick` says that a commit may be made on the event loop's thread; `transactional` that `Advance.within` is
    given a connection whose writes commit together with the change; a lease lasts `lease_seconds` after a heartbeat.
    `clock` is the one by whose time the store judges what is due.
    """

    url: str
    clock: Clock
    quick: bool
    transactional: bool
    lease_seconds: float

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        """Write many changes in one durable transaction, one answer each; a refused one leaves the others be.

        Raises `WouldBlock` when it may not `wait` and would have to, `StoreUnavailable` when nothing was written or,
        with `unknown` set, when that cannot be told.

        A store on the far side of a socket may have `begin_commit(changes)`, too, which sends them and gives what is
        `Underway`, or None, with nothing sent, if it would have to wait.
        """

    def claim_runs(self, request: ClaimRequest) -> Claims:
        """Lease runs that are due and free, or whose owner is dead. The epoch grows with every claim."""

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        """Write the worker's heartbeat, which renews all its leases; False if the store has given it up for dead.

        The first call enrols the worker. `leaving` removes it; it must hold no lease then.
        """

    def get_run(self, run_id: str) -> Run | None:
        """The run with its output, error and progress, or None; `CheckpointCorrupt` if what is stored is damaged."""

    def list_runs(self, query: RunQuery) -> RunPage:
        """One page of runs, newest first, without outputs, and without inputs unless the query asks for them.

        Damaged runs are named on it and never stop the list.
        """

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        """Rows of a run in sequence order, those after `after`; at most `limit`, and about 4 MB."""

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        """Signals of a run in sequence order, those after `after`; `CheckpointCorrupt` if one is damaged."""

    def news(self, worker: str, cursor: int) -> News:
        """What others wrote since `cursor` that concerns this worker; cheap enough to ask 40 times a second.

        A store that hears of it by itself may have `on_news(alert)`, too: it calls `alert`, in any thread, when there
        is something for its workers, and gives a function that ends that.
        """

    def list_workers(self) -> list[WorkerInfo]:
        """Every worker that the store knows of, and whether it is alive."""

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        """Remove runs that are not leased, whole: head, checkpoints and signals. The number removed.

        With `finished`, only those that have ended by then, whatever they were when they were listed. With `scrub`,
        nothing of them can be read from any file of the store afterwards, as far as the store can see to that; if it
        may not do that, it raises and removes nothing. (A store may have a `check_scrub()` that raises as well.)
        """

    def check(self, *, mend: bool = False) -> list[Flaw]:
        """What is wrong with the store itself, beyond the chain of each run: rows of no run, an index that disagrees.

        With `mend`, what can be derived is mended and what cannot is put aside, never destroyed; each flaw says so.
        """

    def close(self) -> None:
        """Let go of files and connections. What this worker has leased is free for others from now on."""


# -- the others --------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Where time comes from: `now` is wall time, `boot` a clock that no one sets, with the id of its boot."""

    def now(self) -> float: ...
    def boot(self) -> tuple[str, float]: ...


@runtime_checkable
class Observer(Protocol):
    """Who listens. An observer that raises is reported once and never affects a run."""

    def observe(self, event: Event) -> None: ...


class Codec(Protocol):
    """How values become JSON text and come back, exactly, or not at all."""

    def encode(self, value: Any, where: str) -> bytes: ...
    def decode(self, data: bytes, where: str) -> Any: ...
    def digest(self, value: Any, where: str) -> str: ...


class Executor(Protocol):
    """Where the body of a step runs."""

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class SystemClock:
    """The machine's own clocks."""

    def __init__(self) -> None:
        self._boot_id = _boot_id()

    def now(self) -> float:
        return time.time()

    def boot(self) -> tuple[str, float]:
        return self._boot_id, time.clock_gettime(_BOOT_CLOCK)


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: the instant of the boot serves, to the nearest minute
        return f"boot-{round((time.time() - time.clock_gettime(_BOOT_CLOCK)) / 60)}"


def instant(seconds: float) -> datetime:
    """An instant in UTC, to the microsecond, from seconds since the epoch."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except OSError as error:  # how the C library says it, where Python does not see it first
        raise OverflowError(f"{seconds!r} seconds are beyond the calendar") from error


#: The current run's branch, or the current step's attempt, or None outside both.
CURRENT: ContextVar[Any] = ContextVar("keepstep_current", default=None)
