"""A store that outlives its engines, engines that crash, and ways to look at what a run has recorded."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import msgspec

import keepstep as ks
from keepstep.kernel.idle import only_waits
from keepstep.kernel.strands import uninstall
from keepstep.model import RunQuery, Status
from keepstep.policies.recovery import ALONE_FROM
from keepstep.ports import Create, Send, instant
from keepstep.records.data import unlisted
from keepstep.records.keys import Keys
from keepstep.records.record import Record, unseal
from keepstep.stores.memory import MemoryStore
from keepstep.stores.open import open_store
from keepstep.stores.reading import all_runs, rows_of

KEYS = Keys("first", {"first": b"k" * 32})
#: Set to see that encryption changes nothing else: every test of the engine then runs with it.
ALL_ENCRYPTED = bool(os.environ.get("KEEPSTEP_TEST_ENCRYPTED"))


class World:
    """One store and the engines that come and go on it."""

    def __init__(self, kind, mode, path, *, encrypted=False):
        """`path` is the file of SQLite, or the URL of a store in PostgreSQL."""
        self.kind, self.mode, self.path = kind, mode, path
        self.replaying = mode == "replay"
        self.encrypted = encrypted
        self.loop_kind = ""
        self._memory = MemoryStore()
        self._open = []

    @property
    def url(self):
        if self.kind == "memory":
            return self._memory
        if self.kind == "postgres":
            return self.path
        return f"{'files:' if self.kind == 'files' else 'sqlite:///'}{self.path}"

    @asynccontextmanager
    async def engine(self, **options):
        """An engine on the store; it is closed properly unless it has crashed."""
        engine = await self.started(**options)
        try:
            yield engine
        finally:
            await engine.close()

    async def started(self, **options):
        options.setdefault("replay_always", self.replaying)
        options.setdefault("linger_seconds", 0.05)
        options.setdefault("stop_seconds", 1.0)
        if self.encrypted:
            options.setdefault("keys", KEYS)
        if self.kind in ("sqlite", "files"):
            options.setdefault("power_loss", "may_lose_last")
        engine = ks.Engine(self.url, **options)
        await engine.open()
        self._open.append(engine)
        return engine

    async def crash(self, engine):
        """End an engine as a killed process ends: nothing is written, told or handed back any more."""
        if engine.closed:
            return
        engine.closed = True
        engine.journal._flush = lambda: None
        worker = engine.worker
        if worker is not None:
            worker._stopping = True
            worker.heart.stop()
            if worker._poll_timer is not None:
                worker._poll_timer.cancel()
        for context in list(engine.live.values()):
            context.detach("its process died")
        for task in list(engine._background):
            task.cancel()
        uninstall(engine.loop)
        await asyncio.sleep(0)
        engine.journal.close()
        engine._pool.shutdown(wait=True)
        if self.kind == "memory":
            if worker is not None:
                self._memory.mark_dead(worker.id)
        else:
            engine.store.close()

    async def crash_and_recover(self, engine, **options):
        await self.crash(engine)
        return await self.started(**options)

    async def end(self):
        """A test that failed leaves engines open: they must not outlive its loop."""
        for engine in self._open:
            await self.crash(engine)

    def store(self):
        """The store itself, to look into; close it if it is not memory."""
        return open_store(self.url)

    def unlisted_data(self):
        """Keys in the data of records in memory that the table of keys does not have; planted rubbish has none."""
        if self.kind != "memory" or self.encrypted:
            return []
        found = []
        for run in all_runs(self._memory, RunQuery()):
            for row in rows_of(self._memory, run if isinstance(run, str) else run.id):
                with suppress(msgspec.MsgspecError):
                    record = msgspec.json.decode(row.record, type=Record)
                    found += [f"{row.kind}: {one}" for one in unlisted(row.kind, record.data or {})]
        return sorted(set(found))


# -- looking at a run --------------------------------------------------------------------------------------------------


#: Seconds that a test waits for a moment before it says that it never came; on a busy machine moments take long.
PATIENCE = 60.0


async def until(condition, what="the moment"):
    """Come back when a condition holds; for moments that no event names."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(0.002)
    raise AssertionError(f"{what} never came")


async def until_status(handle, *statuses):
    wanted = {Status(status) for status in statuses}

    async def reached():
        return await handle.status() in wanted

    await until(reached, f"{handle} never became {' or '.join(statuses)}")


async def until_at_last_wait(engine, run_id):
    """Come back when a run is in memory, has replayed its history, and does nothing but wait.

    A run whose worker has died twice does not stay in memory for that: it is parked at once.
    """

    def waits():
        context = engine.live.get(run_id)
        if context is None:
            run = engine.store.get_run(run_id)
            return run is not None and run.status is Status.WAITING and run.recoveries >= ALONE_FROM
        if context.history is not None or context.arrived or context.in_flight or context.performing:
            return False
        return bool(context.waits) and all(draft.call is None for draft in context.pending) and only_waits(context)

    await until(waits, f"{run_id} never came to its last wait")


async def until_recorded(handle, step):
    """Come back when a call has an outcome in the store."""

    async def there():
        return any(one.step == step for one in await handle.checkpoints())

    await until(there, f"{handle} never recorded {step}")


#: Records that say who drove a run, not what it did.
_ABOUT_DRIVING = {"recovered"}


async def told(handle):
    """What a run's history says, without what differs from one telling to the next: times, workers, checksums."""
    return [
        (one.kind.value, one.step, one.ordinal, one.outcome.value, one.attempt, one.value, one.digest)
        for one in await handle.checkpoints()
        if one.kind.value not in _ABOUT_DRIVING
    ]


async def steps_of(handle, kind="step completed"):
    return [one.step for one in await handle.checkpoints() if one.kind.value == kind]


async def replay_from_every_prefix(handle, check, *, engine_options=None):
    """Recover a finished run from each beginning of its history, in a store of its own, and hand the end to `check`.

    A crash may fall after any record; whatever was recorded by then must be taken up without a mismatch.
    """
    engine = handle._engine
    below = engine.store if engine.encryption.store is None else engine.encryption.store.inner
    run = await engine.read(below.get_run, handle.id)
    rows = await engine.read(below.list_checkpoints, run.id)
    signals = await engine.read(below.list_signals, run.id)
    engine_options = {"linger_seconds": 0.05, "keys": engine.encryption._keys, **(engine_options or {})}
    sums = [checksum for _, checksum in unseal(rows, run.id, 0, "")]
    for length in range(1, len(rows)):
        store = MemoryStore()
        born = replace(
            run,
            status=Status.QUEUED,
            seq=length,
            checksum=sums[length - 1],
            epoch=0,
            worker=None,
            due_at=instant(0),
            wakes=(),
            signals=0,
            recoveries=0,
            output=None,
            error=None,
        )
        store.commit([Create(born, rows[:length])])
        store.commit([Send(replace(signal, seq=0)) for signal in signals])
        async with ks.Engine(store, **engine_options) as fresh:
            await check(await fresh.get(run.id), length)
