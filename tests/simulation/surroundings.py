"""What a history changes in this Python while it is played: where chance comes from, the pace, and who hears logs."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

from keepstep.engine import engine as engine_module
from keepstep.engine import worker as worker_module
from keepstep.kernel import replay as history_module
from keepstep.kernel.graph import position as position_module
from keepstep.model import ids

if TYPE_CHECKING:
    from .world import World

#: The engine looks at the store so often here; in a world without waiting, more looks would only cost time.
PACE = (
    (worker_module, "POLL_SECONDS", 0.1),
    (engine_module, "READ_SECONDS", 0.2),
    # Graphs are short here: their whole states are written, and looked for, sooner.
    (position_module, "ENOUGH_DELTAS", 3),
    (position_module, "MOST_RECORDS", 8),
    (history_module, "FIRST_SPAN", 4),
)


@contextmanager
def its_own_chance(world: World) -> Iterator[None]:
    """Draw every id from the seed, and look at the store less often than in the real world."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in PACE]
    kept += [(ids, "draw", ids.draw)]
    for module, name, value in PACE:
        setattr(module, name, value)
    ids.draw = Random(f"ids {world.plan['seed']}").randbytes  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Keep the collector still: what it finds, and when, depends on everything else in this Python."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def listening(world: World) -> Iterator[None]:
    """Errors that the engine logs with their traceback are its own failures; a record would ask for the real time."""
    log: Any = logging.getLogger("keepstep")

    def heard(level: int, message: str, args: Any, exc_info: Any = None, **_: Any) -> None:
        error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1] if exc_info else None
        if error is not None:
            world.note_failure(message % args if args else message, error)

    before, filters = log.level, list(log.filters)
    log.setLevel(logging.ERROR)
    log._log = heard
    try:
        yield
    finally:
        del log._log
        log.setLevel(before)
        log.filters[:] = filters  # a process that dies does not take its own away
