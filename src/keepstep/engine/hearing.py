"""How runs in memory hear of signals: those that the store has for a run are read when there is news of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CheckpointCorrupt, StoreError
from .wakeups import receive

if TYPE_CHECKING:
    from .context import RunContext
    from .engine import Engine

#: Signals that could not be read are asked for again after this.
FETCH_AGAIN_SECONDS = 0.5


class Hearing:
    """Reads the signals of the runs that an engine drives."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fetching: set[RunContext] = set()
        #: Runs that have signals which were told before their code began: they are read when it does.
        self._unheard: set[str] = set()

    def of(self, run_id: str) -> None:
        """There are signals for a run that is driven here."""
        context = self._engine.live.get(run_id)
        if context is not None:
            self.fetch(context)
        else:  # claimed a moment ago, and not yet taken up
            self._unheard.add(run_id)

    def begun(self, context: RunContext) -> None:
        """The code of a run has begun: now it can be told."""
        if context.id in self._unheard:
            self._unheard.discard(context.id)
            self.fetch(context)

    def left(self, run_id: str) -> None:
        """A run is driven here no more."""
        self._unheard.discard(run_id)

    def fetch(self, context: RunContext) -> None:
        """Read the signals of a run that it has not seen; not before its history says which of them it has taken."""
        if context.main is None:
            self._unheard.add(context.id)
        elif context not in self._fetching and not context.detached:
            self._fetching.add(context)
            self._engine.background(self._fetch(context))

    async def _fetch(self, context: RunContext) -> None:
        engine = self._engine
        try:
            while not context.detached:
                page = await engine.read(engine.store.list_signals, context.id, context.signals_seen)
                self._fetching.discard(context)
                if not page:
                    if context.missed_signals:
                        await self.check_missed(context)
                    context.watch()
                    return
                receive(context, page)
        except CheckpointCorrupt as error:
            engine.runner.set_aside(context, "CheckpointCorrupt", str(error))
        except StoreError as error:
            engine.outage.tell(f"signals of run {context.id} cannot be read yet", error)
            engine.loop.call_later(FETCH_AGAIN_SECONDS, self.fetch, context, context=engine.context)
        finally:
            self._fetching.discard(context)

    async def check_missed(self, context: RunContext) -> None:
        """A write was refused because of signals that were not seen: raise if they are not there to be read."""
        engine = self._engine
        context.missed_signals = False
        seen = context.signals_seen
        run = await engine.read(engine.store.get_run, context.id)
        if run is None or run.signals <= seen or context.signals_seen > seen:
            return
        if not await engine.read(engine.store.list_signals, context.id, seen):
            raise CheckpointCorrupt(
                f"run {context.id!r}: {run.signals} signals were accepted, and only {seen} are there"
            )
