"""The check that a run has not moved on since a person or a program decided about it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..errors import KeepstepError

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.handle import RunHandle


class Moved(KeepstepError):
    """The run has new records or signals since the caller decided."""


#: The lock of each run that is acted on now, by the engine of the process.
_TURNS: WeakKeyDictionary[Engine, WeakValueDictionary[str, asyncio.Lock]] = WeakKeyDictionary()


def turn(engine: Engine, run_id: str) -> asyncio.Lock:
    """Return the lock to hold from the check of a run to the end of the act, so that no other act comes between."""
    return _TURNS.setdefault(engine, WeakValueDictionary()).setdefault(run_id, asyncio.Lock())


async def check_seen(handle: RunHandle[Any], seq: int | None, signals: int | None = None) -> None:
    """Raise `Moved` if the run has other numbers of records or signals than the caller has seen; None is not asked."""
    if seq is None and signals is None:
        return
    run = await handle.run()
    for seen, there, what in ((seq, run.seq, "records"), (signals, run.signals, "signals")):
        if seen is not None and there != seen:
            raise Moved(f"run {run.id!r} has moved on: it has {there} {what}, and you have seen {seen}; look again")
