"""The waits of a run in memory: for times, and for signals that its code has not read yet."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import CheckpointCorrupt, StoreError
from ..model import Signal, Status
from ..model.signal import BEAT, BLOCKED, CANCEL, GO, PAUSE, RESUME, at_service
from .inbox import Wait
from .log import Draft, fulfil
from .steering import end_pause, signal_record, steer

if TYPE_CHECKING:
    from ..records.record import Record
    from .driver import RunDriver

T = TypeVar("T")

#: Seconds after which the start of a wait is written with the next commit of its run. A wait that ends earlier, such as
#: the limit of a quick step, leaves no start.
RIDE_AFTER_SECONDS = 0.1
#: Seconds after which the start is written by itself, beside a long step, so that repeated crashes do not restart the
#: wait. Longer than a run lingers before the commit that parks it.
RECORD_AFTER_SECONDS = 2.0


def receive(run: RunDriver, signals: Sequence[Signal]) -> None:  # noqa: C901 - one case after the other
    """Add stored signals to the run's inbox; a gap among them is damage."""
    if run.stop.detached:
        return
    for signal in signals:
        if signal.seq <= run.inbox.seen:
            continue
        if signal.seq != run.inbox.seen + 1:
            raise CheckpointCorrupt(f"run {run.id!r}: its signal {run.inbox.seen + 1} is missing: {signal.seq} follows")
        run.inbox.received(signal)
        if signal.seq in run.inbox.read:
            run.inbox.recall(signal)
        elif signal.name == RESUME and run.stop.pause is None and _is_for_breakpoint(run, signal):
            pass
        elif signal.name in (CANCEL, PAUSE, RESUME):
            steer(run, signal)
        elif signal.name.startswith(BEAT):
            run.inbox.beat(signal)
        else:
            if signal.name.startswith(GO):  # the sender did not know that the run was to pause
                end_pause(run)
            run.inbox.add(signal)
            _match(run, signal.name)
    if run.inbox.is_count_due():
        _store_count(run)


def _store_count(run: RunDriver) -> None:
    """Store how many signals a run has read, unless its code has not begun yet."""
    if run.seq and run.history is None:
        run.append_special(None, {"signals_read": run.inbox.counted(), "progress": False})


def _is_for_breakpoint(run: RunDriver, signal: Signal) -> bool:
    """Let a resume pass the current breakpoint, or keep it until the code has come to rest where it was.

    Return whether it did; a resume of a run that was put away as paused ends the pause instead.
    """
    paused = run.inbox.ends_pause() and (run.claim.before is Status.PAUSED or run.claim.taken_from is not None)
    if not paused and not run.inbox.has_arrived:
        run.inbox.came_early(signal)
        return True
    return _pass_breakpoint(run, signal)


def _pass_breakpoint(run: RunDriver, signal: Signal) -> bool:
    """Treat a plain resume as the signal for the current breakpoint; a sender elsewhere cannot know its name."""
    for wait in run.waits.values():
        if wait.name is not None and wait.name.startswith(GO) and wait.on_signal is not None:
            end_wait(run, wait.call)
            wait.on_signal(signal)
            return True
    return False


def arrive(run: RunDriver) -> None:
    """Apply resumes that came before the code was at rest where it was: each passes one breakpoint there.

    Without a breakpoint there, they change nothing: a later breakpoint is not passed unseen.
    """
    is_there = run.last_delivered <= max(run.run.seq, 1)  # the code has been given nothing new
    for signal in run.inbox.arrived():
        if not (is_there and _pass_breakpoint(run, signal)):
            run.append(signal_record(run, signal))


def _match(run: RunDriver, name: str) -> None:
    """Give unread signals of a name to the calls that wait for it, in the order of the calls."""
    for wait in [wait for wait in run.waits.values() if wait.name == name]:
        if wait.on_signal is not None and run.waits.get(wait.call) is wait:
            signal = run.inbox.take(name, wait.mine)
            if signal is not None:
                end_wait(run, wait.call)
                wait.on_signal(signal)


def put_back(run: RunDriver, signal: Signal) -> None:
    """Return a signal to the inbox after its wait was cancelled."""
    run.inbox.add(signal)
    _match(run, signal.name)


async def read_again(run: RunDriver, seq: int) -> None:
    """Return a signal to the inbox whose payload is only in the store."""
    run.work_began()  # the run must not be parked before the signal is read
    try:
        page = await run.host.signals(run.id, seq - 1, 1)
    except StoreError as error:
        run.halt(error)
        return
    finally:
        run.work_ended()
    if not run.stop.detached:
        for signal in page:
            put_back(run, signal)
        run.watch()


def add_wait(run: RunDriver, wait: Wait) -> None:
    """Wait in memory; if nothing else happens for long, the run is parked with its wake-ups."""
    run.wait_begun(wait)
    if wait.due is not None:
        wait.ends = run.loop.time() + min(wait.due - run.host.clock.now(), wait.longest)
        _arm(run, wait)
    run.watch()


def _arm(run: RunDriver, wait: Wait) -> None:
    delay = max(0.0, wait.ends - run.loop.time())
    after, then = min(delay, 86_400.0), _due
    if wait.start is not None and delay > RIDE_AFTER_SECONDS:
        after, then = RIDE_AFTER_SECONDS, _ride
    elif wait.riding is not None and delay > RECORD_AFTER_SECONDS:
        after, then = RECORD_AFTER_SECONDS, _write_start
    wait.timer = run.loop.call_later(after, then, run, wait, context=run.host.context)


def _ride(run: RunDriver, wait: Wait) -> None:
    """Write the start of a wait with the next commit of the run."""
    if run.stop.detached or run.waits.get(wait.call) is not wait or wait.start is None:
        return
    wait.riding, wait.start = Draft(wait.start()), None
    run.ride(wait.riding)
    _arm(run, wait)


def _write_start(run: RunDriver, wait: Wait) -> None:
    """Write the start of a wait by itself, if nothing of the run was written meanwhile."""
    if run.stop.detached or run.waits.get(wait.call) is not wait:
        return
    riding, wait.riding = wait.riding, None
    if not run.buffers and any(draft is riding for draft in run.pending):
        run.journal.write_pending(run)
    _arm(run, wait)


def unrecorded_starts(run: RunDriver) -> list[Record]:
    """Return the missing start records of open waits, for the commit that parks the run."""
    found: list[Record] = []
    for wait in run.waits.values():
        start, wait.start = wait.start, None
        if start is not None:
            found.append(start())
    return found


def _due(run: RunDriver, wait: Wait) -> None:
    if run.stop.detached or run.waits.get(wait.call) is not wait or wait.due is None:
        return
    if run.loop.time() < wait.ends and run.host.clock.now() < wait.due:
        _arm(run, wait)
        return
    end_wait(run, wait.call)
    if wait.on_due is not None:
        wait.on_due()


def end_wait(run: RunDriver, call: Any) -> None:
    """End whatever a call waits for."""
    wait = run.wait_ended(call)
    if wait is None:
        return
    if wait.timer is not None:
        wait.timer.cancel()
    if wait.riding is not None:
        run.take_back(wait.riding)


async def pause_until(run: RunDriver, due: float, blocked: str = "") -> None:
    """Wait on behalf of a step, such as for a backoff; the run may be parked meanwhile.

    `blocked` names the step if it waits to be ready, for readers of the run.
    """
    if due <= run.host.clock.now():
        return
    future: asyncio.Future[None] = run.loop.create_future()
    token = object()
    run.work_ended()
    try:
        add_wait(run, Wait(token, due, partial(fulfil, future, None), f"{BLOCKED}{blocked}" if blocked else None))
        await future
    finally:
        end_wait(run, token)
        run.work_began()
    await run.stop.release_decided()  # if the run is put away, its attempts are cancelled


async def signal_named(run: RunDriver, name: str) -> Signal:
    """Wait for an internal signal on behalf of a step."""
    signal = run.inbox.take(name)
    if signal is not None:
        return signal
    future: asyncio.Future[Signal] = run.loop.create_future()
    token = object()
    run.work_ended()
    try:
        add_wait(run, Wait(token, None, None, name, partial(fulfil, future)))
        return await future
    finally:
        end_wait(run, token)
        run.work_began()


def seconds_left(run: RunDriver) -> float:
    """Return the seconds until the run has something to do by itself."""
    now = run.loop.time()
    left = min((wait.ends - now for wait in run.waits.values()), default=math.inf)
    if run.deadline_at is not None and not run.stop.is_timed_out:
        left = min(left, run.deadline_at.timestamp() - run.host.clock.now())
    return left


def due_at(run: RunDriver) -> float | None:
    """Return the next time at which the run has something to do by itself, or None."""
    dues = [wait.due for wait in run.waits.values() if wait.due is not None]
    if run.deadline_at is not None and not run.stop.is_timed_out:
        dues.append(run.deadline_at.timestamp())
    return min(dues, default=None)


def wakes(run: RunDriver) -> tuple[str, ...]:
    """Return the signals that wake the run when it is parked."""
    names = {wait.name for wait in run.waits.values() if wait.name is not None}
    names |= {at_service(wait.at.name, wait.at.why) for wait in run.waits.values() if wait.at is not None}
    return (*sorted(names), CANCEL, PAUSE, RESUME)


def services_waited_for(run: RunDriver) -> list[str]:
    """Return the services for whose places the run waits, in the order in which it began to wait."""
    return list(dict.fromkeys(wait.at.name for wait in run.waits.values() if wait.at is not None))
