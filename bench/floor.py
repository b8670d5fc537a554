"""The floor: the least that any engine must do for the same jobs. A row per step, told only when it is on disk.

Nothing is checked, fenced or chained here. It is built on both `sqlite3` of the standard library and apsw, since the
faster of the two is the honest floor.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import msgspec

from . import gauges

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode

_INSERT = "INSERT INTO step VALUES (?, ?, ?)"
Row = tuple[str, int, bytes]


class Journal:
    """One table: run, number, value."""

    def __init__(self, where: Path, library: str, synchronous: str = "FULL") -> None:
        path = str(where / "floor.db")
        if library == "apsw":
            self._execute: Any = apsw.Connection(path).execute
            self._many: Any = self._execute.__self__.executemany
        else:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._execute, self._many = connection.execute, connection.executemany
        self._execute("PRAGMA journal_mode = WAL")
        self._execute(f"PRAGMA synchronous = {synchronous}")
        self._execute(
            "CREATE TABLE IF NOT EXISTS step (run TEXT, number INT, value BLOB, PRIMARY KEY (run, number))"
            " WITHOUT ROWID"
        )

    def write(self, rows: Sequence[Row]) -> None:
        """Make rows durable together."""
        if len(rows) == 1:
            self._execute(_INSERT, rows[0])
            return
        self._execute("BEGIN IMMEDIATE")
        self._many(_INSERT, rows)
        self._execute("COMMIT")

    def read(self, run: str) -> dict[int, bytes]:
        """Everything that a run has recorded, in one range scan."""
        return dict(self._execute("SELECT number, value FROM step WHERE run = ?", (run,)))


class Inline:
    """Commits on the loop's thread, one row at a time."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def record(self, row: Row) -> None:
        self._journal.write([row])


class Group:
    """Commits on a writer thread: what gathers while one commit is made goes into the next."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._waiting: queue.SimpleQueue[tuple[Row, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    async def record(self, row: Row) -> None:
        durable = self._loop.create_future()
        self._waiting.put((row, durable))
        await durable

    def _write(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            self._journal.write([row for row, _ in batch])
            self._loop.call_soon_threadsafe(_tell, [durable for _, durable in batch])


def _tell(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        future.set_result(None)


async def _trivial(i: int) -> dict[str, Any]:
    return {"i": i, "ok": True}


class _Run:
    """Numbers its steps and records what they give."""

    __slots__ = ("_number", "_record", "_recorded", "id")

    def __init__(self, record: Callable[[Row], Awaitable[None]], recorded: dict[int, bytes] | None = None) -> None:
        self.id = uuid.uuid4().hex
        self._record = record
        self._recorded = recorded or {}
        self._number = 0

    async def step(self, body: Callable[[int], Awaitable[Any]], i: int) -> Any:
        number = self._number
        self._number = number + 1
        known = self._recorded.get(number)
        if known is not None:
            return _unpack(known)
        value = await body(i)
        await self._record((self.id, number, _pack(value)))
        return value

    async def sequence(self, steps: int) -> None:
        await self._record((self.id, -1, _pack({"status": "running", "steps": steps})))
        for i in range(steps):
            await self.step(_trivial, i)
        await self._record((self.id, -2, _pack({"status": "completed"})))


# -- the jobs ----------------------------------------------------------------------------------------------------------


async def j1(where: Path, n: int = 1000, times: int = 1, library: str = "sqlite3") -> dict[str, Any]:
    writer = Inline(Journal(where, library))
    await _Run(writer.record).sequence(20)
    with gauges.Stopwatch() as watch:
        for _ in range(times):
            await _Run(writer.record).sequence(n)
    return watch.rate(n * times)


async def j2(where: Path, runs: int = 200, steps: int = 20, times: int = 1, library: str = "sqlite3") -> dict[str, Any]:
    writer = Group(Journal(where, library))
    await _Run(writer.record).sequence(20)
    with gauges.Stopwatch() as watch:
        for _ in range(times):
            await asyncio.gather(*[_Run(writer.record).sequence(steps) for _ in range(runs)])
    return watch.rate(runs * steps * times)


async def j3(
    where: Path, runs: int = 2000, at_once: int = 100, times: int = 1, library: str = "sqlite3"
) -> dict[str, Any]:
    writer = Group(Journal(where, library))
    limit = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with limit:
            await _Run(writer.record).sequence(1)

    await _Run(writer.record).sequence(20)
    with gauges.Stopwatch() as watch:
        for _ in range(times):
            await asyncio.gather(*[one() for _ in range(runs)])
    return watch.rate(runs * times)


async def j4(where: Path, n: int = 500, times: int = 1, library: str = "sqlite3") -> dict[str, Any]:
    """Only the steps: the run's own start and end, which an engine also writes, are left out."""
    writer = Group(Journal(where, library))
    await _Run(writer.record).sequence(20)
    with gauges.Stopwatch() as watch:
        for _ in range(times):
            run = _Run(writer.record)
            await asyncio.gather(*[run.step(_trivial, i) for i in range(n)])
    return watch.rate(n * times)


# -- files -------------------------------------------------------------------------------------------------------------

#: Threads whose syncs overlap.
_THREADS = 16


class Folders:
    """A folder per run, a file per step: written, synced, given its name, and the folder synced."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._pool = ThreadPoolExecutor(_THREADS)

    def made(self, run: int) -> str:
        folder = f"{self._where}/{run:04}"
        os.makedirs(folder)  # noqa: PTH103 - as the calls below
        return folder

    def write(self, folders: list[str], step: int) -> None:
        """One step of every run, all of them durable when this returns."""
        data = _pack({"i": step, "ok": True})
        fds = []
        for folder in folders:
            fd = os.open(f"{folder}/.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(fd, data)
            fds.append(fd)
        self._sync(fds)
        for folder in folders:
            os.rename(f"{folder}/.tmp", f"{folder}/{step:06}.json")  # noqa: PTH104
        self._sync([os.open(folder, os.O_RDONLY) for folder in folders])

    def _sync(self, fds: list[int]) -> None:
        def some(first: int) -> None:
            for fd in fds[first::_THREADS]:
                os.fsync(fd)
                os.close(fd)

        if len(fds) == 1:
            some(0)
        else:
            list(self._pool.map(some, range(_THREADS)))


async def files_j1(where: Path, n: int = 500) -> dict[str, Any]:
    disk = Folders(where)
    folders = [disk.made(0)]
    with gauges.Stopwatch() as watch:
        for step in range(n):
            disk.write(folders, step)
    return watch.rate(n)


async def files_j2(where: Path, runs: int = 200, steps: int = 20) -> dict[str, Any]:
    disk = Folders(where)
    with gauges.Stopwatch() as watch:
        folders = [disk.made(run) for run in range(runs)]
        for step in range(steps):
            disk.write(folders, step)
    return watch.rate(runs * steps)


async def j5(where: Path, n: int = 100, size: int = 1_000_000, library: str = "sqlite3") -> dict[str, Any]:
    """Every element of a large state is encoded, and those are written whose bytes are others than before."""
    journal = Journal(where, library)
    state = {"cursor": 0, **gauges.large_state(size)}
    known: dict[tuple[str, int], int] = {}

    def changed() -> bytes:
        found = []
        for key, value in state.items():
            for number, item in enumerate(value) if isinstance(value, list) else ((-1, value),):
                text = _pack(item)
                if known.get((key, number)) != hash(text):
                    known[key, number] = hash(text)
                    found.append((key, number, text))
        return _pack(found)

    with gauges.Stopwatch() as watch:
        for i in range(n):
            state["cursor"] = i
            state["items"][i]["text"] = f"changed{i}"
            journal.write([("large", i, changed())])
    return watch.rate(n)


async def j6_kill(where: Path, at: int = 500, library: str = "sqlite3", **_: Any) -> dict[str, Any]:
    """The history that a killed run would have left."""
    journal = Journal(where, library, "OFF")
    journal.write([("victim", i, _pack({"i": i, "ok": True})) for i in range(at)])
    return {}


async def j6_resume(where: Path, n: int = 1000, library: str = "sqlite3", **_: Any) -> dict[str, Any]:
    ready = time.monotonic()
    journal = Journal(where, library)
    writer = Inline(journal)
    run = _Run(writer.record, journal.read("victim"))
    run.id = "victim"
    first: list[float] = []

    async def body(i: int) -> dict[str, Any]:
        first.append(time.monotonic())
        return {"i": i, "ok": True}

    for i in range(n):
        await run.step(body, i)
        if first:
            break
    return {"moments": {"ready": ready, "first body": first[0]}}


JOBS = {job.__name__: job for job in (j1, j2, j3, j4, files_j1, files_j2, j5, j6_kill, j6_resume)}
