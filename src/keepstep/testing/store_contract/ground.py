"""What the tests of a store start from: a clock, runs, holders of leases, and the store itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from ...model import Claim, Claims, Kind, Run, RunQuery, Signal, Status, WorkerInfo
from ...ports import Advance, Answer, Change, ClaimRequest, Clock, Create, Row, Store, Verdict
from ...records.record import Record, seal

#: When the clock of a test starts.
START = datetime(2030, 1, 1, tzinfo=UTC)

#: How a claimed run is led to each status in which it can be claimed by name.
ENDINGS = [Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.SET_ASIDE]
RELEASED = [Status.QUEUED, Status.WAITING, Status.PAUSED, *ENDINGS]


class SteppedClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.boot_id = "boot-1"

    def now(self) -> float:
        return START.timestamp() + self.seconds

    def boot(self) -> tuple[str, float]:
        return self.boot_id, 1000.0 + self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


def at(seconds: float) -> datetime:
    """The instant so many seconds after the start."""
    return START + timedelta(seconds=seconds)


def queued(run_id: str, **fields: Any) -> Run:
    """A run that is free and due."""
    defaults: dict[str, Any] = {"workflow": "digest", "status": Status.QUEUED, "created_at": START, "due_at": START}
    return Run(id=run_id, **{**defaults, **fields})


def record(run_id: str, kind: Kind = Kind.STEP_COMPLETED, value: bytes | None = b"1", **fields: Any) -> Record:
    """An unsealed record."""
    raw = msgspec.UNSET if value is None else msgspec.Raw(value)
    return Record(run=run_id, kind=kind, value=raw, finished_at=START, **fields)


class Holder:
    """A lease holder that seals what it writes, as the engine does."""

    def __init__(self, store: Store, run: Run) -> None:
        self.store = store
        self.run = run.id
        self.worker = run.worker or ""
        self.epoch = run.epoch
        self.seq = run.seq
        self.checksum = run.checksum

    def sealed(self, records: Sequence[Record]) -> tuple[list[Row], str]:
        rows, checksum = [], self.checksum
        for number, unsealed in enumerate(records, self.seq + 1):
            row, checksum = seal(unsealed, number, checksum)
            rows.append(row)
        return rows, checksum

    def change(self, *records: Record, **fields: Any) -> Advance:
        """The change that writes these records after the head, or one plain step if none are given."""
        rows, checksum = self.sealed(records or [record(self.run)])
        head = {"worker": self.worker, "epoch": self.epoch, "after": self.seq}
        return Advance(self.run, **{**head, "rows": rows, "checksum": checksum, **fields})

    def write(self, *records: Record, **fields: Any) -> Answer:
        """Commit such a change; a written one becomes the head."""
        change = self.change(*records, **fields)
        answer = commit(self.store, change)
        if answer.verdict is Verdict.DONE and change.rows:
            self.seq, self.checksum = change.rows[-1].seq, change.checksum
        return answer


def commit(store: Store, change: Change) -> Answer:
    """The answer to one change."""
    (answer,) = store.commit([change])
    return answer


def started(store: Store, run_id: str, worker: str = "w1", **fields: Any) -> Holder:
    """A run that is leased at birth, with its first record."""
    first, checksum = seal(record(run_id, Kind.RUN_STARTED), 1, "")
    run = queued(
        run_id,
        **{
            "status": Status.RUNNING,
            "worker": worker,
            "epoch": 1,
            "seq": 1,
            "due_at": None,
            "checksum": checksum,
            **fields,
        },
    )
    assert commit(store, Create(run, [first])).verdict is Verdict.DONE
    return Holder(store, run)


def parked(store: Store, run_id: str, **fields: Any) -> Holder:
    """A run that waits, for nothing unless told."""
    writer = started(
        store, run_id, **{key: fields.pop(key) for key in ("workflow", "version", "worker") if key in fields}
    )
    assert writer.write(status=Status.WAITING, release=True, **fields).verdict is Verdict.DONE
    return writer


def get(store: Store, run_id: str) -> Run:
    """The run, which must be there."""
    run = store.get_run(run_id)
    assert run is not None
    return run


def everything(store: Store) -> dict[str, tuple[Run, list[Row], list[Signal]]]:
    """All that a store holds about its runs."""
    runs = store.list_runs(RunQuery(limit=1000)).runs
    return {run.id: (get(store, run.id), store.list_checkpoints(run.id), store.list_signals(run.id)) for run in runs}


def ids(claims: Claims) -> list[str]:
    """Which runs were claimed, in order."""
    return [claim.run.id for claim in claims.claims]


def watch(store: Store, clock: SteppedClock, seconds: float, *observers: str) -> None:
    """Let time pass while workers renew their leases, as heartbeats do: they may give up others afterwards."""
    steps = math.ceil(seconds / (store.lease_seconds / 3))
    for _ in range(steps):
        clock.advance(seconds / steps)
        for observer in observers:
            assert store.renew_leases(WorkerInfo(observer))


class Ground:
    """What each group of tests stands on: the store under test, and what workers do with it."""

    def make_store(self, clock: Clock) -> Store:
        """Open the store that is to be tested, with this clock; within one test always the same storage."""
        raise NotImplementedError

    def make_store_with_lease(self, clock: Clock, lease_seconds: float) -> Store | None:
        """Open the same storage for workers with another lease; None if they all have the same."""
        return None

    @pytest.fixture
    def clock(self) -> SteppedClock:
        return SteppedClock()

    @pytest.fixture
    def store(self, clock: SteppedClock) -> Iterator[Store]:
        """The store under test, with the workers w1 and w2 enrolled."""
        store = self.make_store(clock)
        for worker in ("w1", "w2"):
            assert store.renew_leases(WorkerInfo(worker, host="here", pid=1))
        yield store
        store.close()

    @staticmethod
    def claim(
        store: Store, worker: str = "w1", limit: int = 10, workflows: Sequence[str] = ("digest",), **more: Any
    ) -> Claims:
        """Claim as a worker does."""
        return store.claim_runs(ClaimRequest(worker, frozenset(workflows), limit, **more))

    def claim_one(self, store: Store, run_id: str, worker: str = "w1", *statuses: Status) -> Claim | None:
        """Claim one run by its name."""
        request = ClaimRequest(worker, run=run_id, statuses=frozenset(statuses or Status))
        claims = store.claim_runs(request).claims
        return claims[0] if claims else None

    @staticmethod
    def kill(store: Store, clock: SteppedClock, worker: str, survivor: str = "w2") -> None:
        """Let a worker's lease run out while the other renews its own."""
        assert worker != survivor
        watch(store, clock, store.lease_seconds * 2, survivor)
