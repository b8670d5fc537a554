"""Wakes the readers of runs: at each commit made here, when another process has written, and at intervals."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from ..errors import DefinitionError, StoreError
from ..model import FINISHED, RunQuery, Status
from ..ports import Advance, Create, Send

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .process import Process

#: First interval in seconds between two checks, in case a notification is lost. It doubles while nothing happens.
LOOK_SECONDS = 0.5
LONGEST_LOOK_SECONDS = 5.0
#: Shortest time in seconds between two checks, however often the store changes.
GAP_SECONDS = 0.02
#: Runs in one query at most.
MOST_AT_ONCE = 1000
#: Runs up to which a query runs on the loop's thread, if the store is quick.
FEW = 20

_CLOSED = "the engine is closed; use it inside `async with ks.open(...)`"
_ENDED = FINISHED | {Status.SET_ASIDE}


#: The key of readers that follow every run.
_ANY_RUN = ""


class RunReader:
    """A caller that reads some runs again each time one of them may have changed.

    It is registered before its first read, so that it misses no write between a read and a wait.
    """

    def __init__(self, waiting: Waiting, engine: Process, runs: Iterable[str]) -> None:
        self._waiting = waiting
        self._engine = engine
        self._runs = dict.fromkeys(runs)  # keeps their order
        self._woken = False
        self._sleeper: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        for run_id in self._runs:
            self._waiting.readers.setdefault(run_id, {})[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        self.leave(*self._runs)

    def follow(self, run_id: str) -> None:
        """Read one more run."""
        self._runs[run_id] = None
        self._waiting.readers.setdefault(run_id, {})[self] = None

    def leave(self, *runs: str) -> None:
        """Stop reading some of the runs."""
        for run_id in runs:
            self._runs.pop(run_id, None)
            readers = self._waiting.readers.get(run_id, {})
            readers.pop(self, None)
            if not readers:
                self._waiting.readers.pop(run_id, None)

    def wake(self) -> None:
        """Let the caller read again."""
        self._woken = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait until a run may have changed since the last call. Return False if the time has passed instead.

        The time only matters if a notification was lost; its default is `LOOK_SECONDS`.
        """
        engine = self._engine
        if engine.closed:
            raise DefinitionError(_CLOSED)
        engine.watch_others()
        if not self._woken:
            self._sleeper = engine.loop.create_future()
            await asyncio.wait([self._sleeper], timeout=engine.pause(LOOK_SECONDS if seconds is None else seconds))
            self._sleeper = None
        woken, self._woken = self._woken, False
        return woken


class Waiting:
    """Wakes the readers of runs, and those who await the end of runs.

    The journal reports each commit of this process, the poll for news the writes of others. Those who await an end
    share one query for all their runs.
    """

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        #: The readers of each run, woken in the order in which they came: a set would order them by their addresses.
        #: The journal reports commits only while there are any.
        self.readers: dict[str, dict[RunReader, None]] = {}
        self._awaited: dict[str, dict[asyncio.Future[None], None]] = {}
        self._is_watching = False
        self._sleeper: asyncio.Future[None] | None = None
        #: Number of changes seen in the store. A caller that read it at another number may have missed an end.
        self.changes = 0
        self._looked_at_change = 0
        self._all_looked_at = 0.0

    def reader(self, *runs: str) -> RunReader:
        """Return a reader of some runs, or of every run, for a `with` block."""
        return RunReader(self, self._engine, runs or (_ANY_RUN,))

    def committed(self, changes: Iterable[Any]) -> None:
        """Wake the readers of runs for which this process has made changes durable."""
        readers = self.readers
        for change in changes:
            for run_id in (_ANY_RUN, *_runs_of(change)):
                for reader in readers.get(run_id, ()):
                    reader.wake()

    def changed(self) -> None:
        """Note that another process has written, or that a run has left: wake everyone."""
        self.changes += 1
        for readers in self.readers.values():
            for reader in readers:
                reader.wake()
        self._wake()

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    async def ended(self, run_id: str, seen: int) -> None:
        """Wait until a run seems to have ended, is missing or damaged, or is driven here.

        `seen` is the number of changes before the caller read the run.
        """
        if self._engine.closed:
            raise DefinitionError(_CLOSED)
        self._engine.watch_others()
        future = self._engine.loop.create_future()
        self._awaited.setdefault(run_id, {})[future] = None
        if not self._is_watching:
            self._is_watching = True
            self._looked_at_change = seen
            self._engine.background(self._watch())
        elif seen < self._looked_at_change:  # the last check may have missed this run after the caller had read it
            self._looked_at_change = seen
            self._wake()
        try:
            await future
        finally:
            waiters = self._awaited.get(run_id, {})
            waiters.pop(future, None)
            if not waiters:
                self._awaited.pop(run_id, None)

    def notify(self, run_id: str) -> None:
        """Wake the callers that read or await a run, so that they read it."""
        for reader in self.readers.get(run_id, ()):
            reader.wake()
        for future in self._awaited.get(run_id, ()):
            if not future.done():
                future.set_result(None)

    async def _watch(self) -> None:
        loop, pause = self._engine.loop, LOOK_SECONDS
        self._all_looked_at = loop.time()
        try:
            while self._awaited:
                if self.changes == self._looked_at_change:
                    self._sleeper = loop.create_future()
                    await asyncio.wait([self._sleeper], timeout=self._engine.pause(pause))
                    self._sleeper = None
                changed = self.changes != self._looked_at_change
                pause = LOOK_SECONDS if changed else min(2 * pause, LONGEST_LOOK_SECONDS)
                self._looked_at_change = self.changes
                await self._look()
                if changed:
                    await asyncio.sleep(GAP_SECONDS)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._is_watching = False

    def close(self) -> None:
        """Raise an error in all waiting callers; the watcher may have been cancelled before it began."""
        self._is_watching = False
        self._fail(DefinitionError(_CLOSED))

    def _fail(self, error: Exception) -> None:
        for future in [one for waiters in self._awaited.values() for one in waiters]:
            if not future.done():
                future.set_exception(error)

    async def _look(self) -> None:
        """Wake the callers whose runs have ended. At intervals, also find runs that are missing."""
        engine, now = self._engine, self._engine.loop.time()
        is_whole = now - self._all_looked_at >= LONGEST_LOOK_SECONDS
        if is_whole:
            self._all_looked_at = now
        ids = list(self._awaited)
        try:
            for first in range(0, len(ids), MOST_AT_ONCE):
                some = ids[first : first + MOST_AT_ONCE]
                for run_id in await self._over(some, is_whole=is_whole):
                    self.notify(run_id)
        except StoreError as error:  # the store may answer again later
            engine.outage.log(f"cannot read the results of {len(ids)} runs yet", error)

    async def _over(self, ids: Sequence[str], *, is_whole: bool) -> list[str]:
        engine = self._engine
        read = engine.read if len(ids) <= FEW else engine.call
        wanted = frozenset() if is_whole else _ENDED
        going: set[str] = set()
        over: set[str] = set()
        after: str | None = None
        while True:
            query = RunQuery(ids=frozenset(ids), status=wanted, limit=len(ids), after=after, system=True)
            page = await read(engine.store.list_runs, query)
            over.update(page.unreadable)
            for run in page.runs:
                (over if run.status in _ENDED else going).add(run.id)
            after = page.next
            if after is None:
                break
        return [run_id for run_id in ids if (run_id not in going if is_whole else run_id in over)]


def _runs_of(change: Any) -> tuple[str, ...]:
    """Return the runs that a change affects: its own, those that it creates, and those that it sends a signal."""
    if isinstance(change, Advance):
        return (change.run, *(run_id for part in (*change.creates, *change.sends) for run_id in _runs_of(part)))
    if isinstance(change, Create):
        return (change.run.id,)
    return (change.signal.run,) if isinstance(change, Send) else ()
