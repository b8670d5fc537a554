"""Reads stored signals for runs in memory when there is news of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CheckpointCorrupt, StoreError
from ..kernel.wakeups import receive

if TYPE_CHECKING:
    from ..kernel.driver import RunDriver
    from .process import Process

#: Seconds before a failed read of signals is repeated.
FETCH_AGAIN_SECONDS = 0.5


class SignalReader:
    """Reads the signals of the runs that an engine drives."""

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        self._fetching: dict[RunDriver, bool] = {}  # each with whether there is news since the store was asked
        #: Runs that have signals which were told before their code began: they are read when it does.
        self._unread: set[str] = set()

    def of(self, run_id: str) -> None:
        """Note that there are signals for a run that is driven here."""
        context = self._engine.live.get(run_id)
        if context is not None:
            self.fetch(context)
        else:  # claimed a moment ago, and not yet loaded
            self._unread.add(run_id)

    def begun(self, context: RunDriver) -> None:
        """Read pending signals after the code of a run has begun."""
        if context.id in self._unread:
            self._unread.discard(context.id)
            self.fetch(context)

    def left(self, run_id: str) -> None:
        """Forget a run that is no longer driven here."""
        self._unread.discard(run_id)

    def fetch(self, context: RunDriver) -> None:
        """Read new signals of a run; wait until its history shows which ones it has consumed."""
        if context.main is None:
            self._unread.add(context.id)
        elif context in self._fetching:
            self._fetching[context] = True
        elif not context.stop.detached:
            self._fetching[context] = False
            self._engine.background(self._fetch(context))

    async def _fetch(self, context: RunDriver) -> None:
        engine = self._engine
        try:
            while not context.stop.detached:
                self._fetching[context] = False
                page = await engine.read(engine.store.list_signals, context.id, context.inbox.seen)
                if page:
                    receive(context, page)
                    continue
                if context.inbox.missed:
                    await self.check_missed(context)
                if not self._fetching[context]:  # else there is news that came too late for this answer
                    context.watch()
                    return
        except CheckpointCorrupt as error:
            context.host.set_aside(context, "CheckpointCorrupt", str(error))
        except StoreError as error:
            engine.outage.log(f"cannot read the signals of run {context.id} yet", error)
            engine.loop.call_later(FETCH_AGAIN_SECONDS, self.fetch, context, context=engine.context)
        finally:
            del self._fetching[context]

    async def check_missed(self, context: RunDriver) -> None:
        """Raise `CheckpointCorrupt` if the unseen signals that caused a refused write cannot be read."""
        engine = self._engine
        context.inbox.looked()
        seen = context.inbox.seen
        run = await engine.read(engine.store.get_run, context.id)
        if run is None or run.signals <= seen or context.inbox.seen > seen:
            return
        if not await engine.read(engine.store.list_signals, context.id, seen):
            raise CheckpointCorrupt(f"run {context.id!r}: {run.signals} signals were accepted, but only {seen} exist")
