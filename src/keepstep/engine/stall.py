"""Finds a replay that stands still: its code waits for something that Keepstep does not record and that never comes."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from .parking import is_writing

if TYPE_CHECKING:
    from .context import RunContext

log = logging.getLogger("keepstep")

#: Seconds after which a replay that does not move is set aside. Code may do slow work of its own between two calls,
#: such as a query of minutes, so this is long; a wait with a timer or a thread of its own never counts.
STALL_SECONDS = 300.0
#: Looks within that time. Each must find every task at the same wait; the first one that does is logged.
LOOKS = 10

#: What each task of a run waits for.
Waits = list[tuple[Any, Any]]


def watch_for_stall(run: RunContext) -> None:
    """The next recorded outcome cannot be delivered yet: see whether the code moves."""
    if run.stall_timer is None and not run.detached:
        _arm(run, _waits(run), 0)


def _arm(run: RunContext, waits: Waits, looks: int) -> None:
    pause = run.engine.stall_seconds / LOOKS
    run.stall_timer = run.loop.call_later(pause, _look, run, waits, looks, context=run.engine.context)


def _look(run: RunContext, before: Waits, looks: int) -> None:
    run.stall_timer = None
    history = run.history
    if run.detached or history is None or not history.order:
        return
    now = _waits(run)
    looks = looks + 1 if now == before and not _may_move(run, now) else 0
    entry = history.order[0]
    asks = ", ".join(sorted([*run.asked, *(call.key for call in run.held)])) or "nothing"
    expected = f"seq {entry.seq} recorded {entry.key}, and the code asks for {asks}"
    if looks == 1:
        log.warning("run %s: its replay does not move: %s", run.id, expected)
    if looks >= LOOKS:
        run.mismatch(
            f"{expected}, while it has waited {run.engine.stall_seconds:g} s for something that is not recorded; "
            "wait for it in a step, or raise stall_seconds"
        )
    else:
        _arm(run, now, looks)
        run.watch()  # the code may have ended a wait of its own and asked for nothing


def _waits(run: RunContext) -> Waits:
    """What each task waits for, by identity: a task that has moved waits for another future."""
    tasks = [task for task in (run.main, *run.tasks) if isinstance(task, asyncio.Task) and not task.done()]
    return [(task, getattr(task, "_fut_waiter", None)) for task in tasks]


def _may_move(run: RunContext, waits: Waits) -> bool:
    """Whether something that is known to be at work will move the run."""
    if run.thread_busy or run.performing or run.finishing or is_writing(run) or run in run.rest.callbacks.timers():
        return True
    return any(_is_of_thread(one) for _, future in waits for one in (future, *(getattr(future, "_children", ()))))


def _is_of_thread(future: Any) -> bool:
    """Whether a thread is to end a future, as that of `asyncio.to_thread`."""
    callbacks = getattr(future, "_callbacks", None) or ()
    return any(getattr(one, "__qualname__", "").startswith("_chain_future.") for one, _ in callbacks)
