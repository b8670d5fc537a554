"""The least that keeps the same promises: what an engine in Python must do for a step, and nothing else.

A body runs in a task and a context of its own; its arguments are digested; its result is stored as JSON and told as it
comes back; each record names the checksum of the one before; the head of a run is moved only by who holds its lease;
and the code is told when all that is durable. There is no replay, no retry, no signal, no limit and no secret here.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import msgspec

from . import gauges

WORKER = "worker-0123456789abcdef"
SCOPE: ContextVar[Any] = ContextVar("SCOPE", default=None)

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder().decode

_SCHEMA = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    (
        "CREATE TABLE head (run TEXT PRIMARY KEY, status TEXT, seq INT, checksum TEXT, epoch INT, worker TEXT,"
        " at REAL) WITHOUT ROWID"
    ),
    "CREATE TABLE checkpoint (run TEXT, seq INT, kind TEXT, record TEXT)",
    "CREATE UNIQUE INDEX place ON checkpoint (run, seq)",
)
_ADD_HEAD = "INSERT INTO head VALUES (?, 'running', 0, ?, 1, ?, ?)"
_MOVE = (
    "UPDATE head SET seq = ?, checksum = ?, at = ?, status = ?"
    " WHERE run = ? AND seq = ? AND epoch = ? AND worker = ? AND status = 'running'"
)
_ADD = "INSERT INTO checkpoint VALUES (?, ?, ?, CAST(? AS TEXT))"


class Record(msgspec.Struct, omit_defaults=True, gc=False):
    """A checkpoint."""

    run: str
    kind: str
    step: str = ""
    ordinal: int = 0
    attempt: int = 0
    digest: str = ""
    worker: str = WORKER
    started_at: datetime | None = None
    finished_at: datetime | None = None
    value: msgspec.Raw = msgspec.Raw(b"null")
    seq: int = 0
    previous: str = ""


class Journal:
    """Commits what gathers during a pass of the loop, in one transaction on the loop's thread."""

    def __init__(self, where: Path) -> None:
        self._connection = apsw.Connection(str(where / "least.db"))
        self.execute = self._connection.execute
        for statement in _SCHEMA:
            self.execute(statement)
        self.loop = asyncio.get_running_loop()
        self._waiting: list[tuple[Run, Record, asyncio.Future[Record]]] = []

    def add(self, run: Run, record: Record, told: asyncio.Future[Record]) -> None:
        if not self._waiting:
            self.loop.call_soon(self._flush)
        self._waiting.append((run, record, told))

    def _flush(self) -> None:
        batch, self._waiting = self._waiting, []
        heads, rows, now = [], [], time.time()
        for run, record, _ in batch:
            record.seq, record.previous = run.seq + 1, run.checksum
            text = _encode(record)
            checksum = sha256(text).hexdigest()
            status = "completed" if record.kind == "run finished" else "running"
            heads.append((record.seq, checksum, now, status, run.id, run.seq, 1, WORKER))
            rows.append((run.id, record.seq, record.kind, text))
            run.seq, run.checksum = record.seq, checksum
        self.execute("BEGIN IMMEDIATE")
        before = self._connection.total_changes()
        self._connection.executemany(_MOVE, heads)
        if self._connection.total_changes() - before != len(heads):
            raise RuntimeError("a lease was lost")
        self._connection.executemany(_ADD, rows)
        self.execute("COMMIT")
        for _, record, told in batch:
            told.set_result(record)


async def _trivial(i: int) -> dict[str, Any]:
    return {"i": i, "ok": True}


class Run:
    """Numbers its steps and performs each of them beside its code."""

    def __init__(self, journal: Journal) -> None:
        self.id = f"run-{time.time_ns():x}-{uuid.uuid4().hex[:8]}"
        self.seq = 0
        self.checksum = "0" * 64
        self._journal = journal
        self._counts: dict[str, int] = {}
        self._ordinal = 0
        self._bodies: set[asyncio.Task[None]] = set()
        journal.execute(_ADD_HEAD, (self.id, self.checksum, WORKER, time.time()))

    async def step(self, name: str, body: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        self._counts[name] = count = self._counts.get(name, 0) + 1
        self._ordinal += 1
        digest = sha256(_encode_sorted((args, {}))).hexdigest()[:32]
        record = Record(self.id, "step completed", f"{name}#{count}", self._ordinal, 1, digest)
        told: asyncio.Future[Record] = self._journal.loop.create_future()
        task = self._journal.loop.create_task(self._perform(body, args, record, told))
        self._bodies.add(task)
        stored = await told
        self._bodies.discard(task)
        return _decode(stored.value)

    async def _perform(
        self, body: Callable[..., Awaitable[Any]], args: tuple[Any, ...], record: Record, told: asyncio.Future[Record]
    ) -> None:
        SCOPE.set(record.step)
        record.started_at = datetime.fromtimestamp(time.time(), UTC)
        record.value = msgspec.Raw(_encode(await body(*args)))
        record.finished_at = datetime.fromtimestamp(time.time(), UTC)
        self._journal.add(self, record, told)

    async def _mark(self, kind: str) -> None:
        told: asyncio.Future[Record] = self._journal.loop.create_future()
        self._journal.add(self, Record(self.id, kind, finished_at=datetime.now(UTC)), told)
        await told

    async def sequence(self, steps: int) -> None:
        await self._mark("run started")
        for i in range(steps):
            await self.step("trivial", _trivial, i)
        await self._mark("run finished")


async def j2(where: Path, runs: int = 200, steps: int = 20, times: int = 1) -> dict[str, Any]:
    journal = Journal(where)
    await Run(journal).sequence(20)
    with gauges.Stopwatch() as watch:
        for _ in range(times):
            await asyncio.gather(*[Run(journal).sequence(steps) for _ in range(runs)])
    return watch.rate(runs * steps * times)


JOBS = {"j2": j2}
