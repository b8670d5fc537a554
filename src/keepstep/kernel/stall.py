"""Moves a replay whose code asks in another order than before, and detects one that has stalled.

A stalled replay waits for something that Keepstep does not record and that never comes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from .call_states import CANCELLED
from .parking import idle, is_writing
from .stop import FINISHING

if TYPE_CHECKING:
    from .driver import RunDriver
    from .replay import Entry, History

log = logging.getLogger("keepstep")

#: Seconds after which a stalled replay is set aside. Code may do slow work of its own between two calls, such as a
#: query of minutes, so this is long. A wait with a timer or a thread of its own never counts.
STALL_SECONDS = 300.0
#: Checks within that time. Each must find every task at the same wait; the first one that does is logged.
LOOKS = 10

#: The wait of each task of a run.
Waits = list[tuple[Any, Any]]


def begins_part(run: RunDriver, entry: Entry) -> bool:
    """Whether a group begins the part of a call that its limit has kept back: it was begun when the limit was higher.

    The part begins at the same outcome as before, so that it sees the same time.
    """
    if not any(reach(entry.key) for reach in run.groups):
        return False
    run.watch()
    return True


def deliver_out_of_order(run: RunDriver, history: History) -> bool:
    """Move the code on by any outcome that it waits for, past calls that are not bound to a place. Return if it moves.

    Under `compatible`, no call is bound: such code may make new calls in the middle of the recorded ones. Otherwise
    only calls with keys of their own are free, and code may ask for them in another order than before.
    """
    bound = run.workflow.on_change != "compatible"
    for entry in history.order:
        call = run.asked.get(entry.key)
        if call is not None and (not entry.cancelled or call.state == CANCELLED):
            history.order.remove(entry)
            history.order.appendleft(entry)
            run.watch()
            return True
        if bound and not entry.keyed:
            return False
    if run.arrived:
        draft = run.take_arrived()
        if draft.call is not None and draft.record is not None:
            run.deliver(draft.call, draft.record)
        run.watch()
        return True
    held = run.take_held()
    for new, context in held.items():
        context.run(new.begin_live)
    if held or run.performing or is_writing(run):
        return True
    if run.waits:  # a new wait among recorded calls; it may take so long that the run is parked
        idle(run)
        return True
    return False


def watch_for_stall(run: RunDriver) -> None:
    """Start checking whether the code moves while the next recorded outcome cannot be delivered."""
    if _look not in run.timers and not run.stop.detached:
        _arm(run, _waits(run), 0)


def _arm(run: RunDriver, waits: Waits, looks: int) -> None:
    pause = run.host.stall_seconds / LOOKS
    run.set_timer(pause, _look, run, waits, looks)


def _look(run: RunDriver, before: Waits, looks: int) -> None:
    history = run.history
    if history is None or not history.order:
        return
    now = _waits(run)
    looks = looks + 1 if now == before and not _may_move(run, now) else 0
    entry = history.order[0]
    asks = ", ".join(sorted([*run.asked, *(call.key for call in run.held)])) or "nothing"
    expected = f"seq {entry.seq} recorded {entry.key}, and the code asks for {asks}"
    if looks == 1:
        log.warning("run %s: its replay has stalled: %s", run.id, expected)
    if looks and (begins_part(run, entry) or (entry.keyed and deliver_out_of_order(run, history))):
        _arm(run, now, 0)
    elif looks >= LOOKS:
        run.mismatch(
            f"{expected}, while it has waited {run.host.stall_seconds:g} s for something that is not recorded; "
            "wait for it in a step, or raise stall_seconds"
        )
    else:
        _arm(run, now, looks)
        run.watch()  # the code may have ended a wait of its own without making a call


def _waits(run: RunDriver) -> Waits:
    """Return the wait of each task, by identity: a task that has moved waits for another future."""
    tasks = [task for task in (run.main, *run.tasks) if isinstance(task, asyncio.Task) and not task.done()]
    return [(task, getattr(task, "_fut_waiter", None)) for task in tasks]


def _may_move(run: RunDriver, waits: Waits) -> bool:
    """Whether something that is known to be working will move the run."""
    if (
        run.thread.busy
        or run.performing
        or run.stop.phase is FINISHING
        or is_writing(run)
        or run in run.idle_watch.callbacks.timers()
    ):
        return True
    return any(_is_of_thread(one) for _, future in waits for one in (future, *(getattr(future, "_children", ()))))


def _is_of_thread(future: Any) -> bool:
    """Whether a thread will end a future, as with `asyncio.to_thread`."""
    callbacks = getattr(future, "_callbacks", None) or ()
    return any(getattr(one, "__qualname__", "").startswith("_chain_future.") for one, _ in callbacks)
