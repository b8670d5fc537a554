"""What a run waits for while it is in memory: times, and signals that its code has not read yet."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import CheckpointCorrupt, StoreError
from ..model import Signal
from ..model.signal import BLOCKED, CANCEL, GO, PAUSE, RESUME
from .journal import Draft
from .steering import end_pause, steer

if TYPE_CHECKING:
    from ..stores.records import Record
    from .context import RunContext

T = TypeVar("T")

#: Seconds after which the start of a wait is written with the next commit of its run. A wait that ends earlier, such as
#: the limit of a quick step, leaves no start.
RIDE_AFTER_SECONDS = 0.1
#: Seconds after which it is written by itself, beside a step that takes long: a worker that dies again and again must
#: not let the wait begin anew each time. Longer than a run lingers before the commit that puts it away.
RECORD_AFTER_SECONDS = 2.0


class Wait:
    """A call that waits for a time, a signal, or whichever comes first.

    `due` is wall time, which is what a parked run goes by. In memory the wait ends by the loop's own clock, which no
    one sets and which is virtual where time is. It takes no longer than `longest`: a wall clock that is set back does
    not stretch it.
    """

    __slots__ = ("call", "due", "ends", "longest", "mine", "name", "on_due", "on_signal", "riding", "start", "timer")

    def __init__(
        self,
        call: Any,
        due: float | None,
        on_due: Callable[[], None] | None,
        name: str | None = None,
        on_signal: Callable[[Signal], None] | None = None,
        *,
        longest: float = math.inf,
        mine: Callable[[Signal], bool] | None = None,
        start: Callable[[], Record] | None = None,
    ) -> None:
        self.call = call
        self.due = due
        self.on_due = on_due
        self.name = name
        self.on_signal = on_signal
        self.longest = longest
        self.mine = mine  # which of the signals of that name it waits for; all, if nothing is said
        self.start = start  # makes the record of when it began, if there is none yet
        self.riding: Draft | None = None  # that record, while it waits for the next commit of the run
        self.ends = math.inf
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether its beginning is in the journal."""
        return self.start is None and getattr(self.call, "is_recorded", False)


def fulfil(future: asyncio.Future[T], value: T) -> None:
    """Give a future its value, unless whoever waited has left."""
    if not future.done():
        future.set_result(value)


def receive(run: RunContext, signals: list[Signal]) -> None:
    """Take in signals that the store has for the run; one that is missing among them is damage."""
    if run.detached:
        return
    for signal in signals:
        if signal.seq <= run.signals_seen:
            continue
        if signal.seq != run.signals_seen + 1:
            raise CheckpointCorrupt(f"run {run.id!r}: its signal {run.signals_seen + 1} is gone: {signal.seq} follows")
        run.signals_seen = signal.seq
        if signal.seq in run.consumed:
            continue
        if signal.name == RESUME and _pass_breakpoint(run, signal):
            continue
        if signal.name in (CANCEL, PAUSE, RESUME):
            steer(run, signal)
        else:
            if signal.name.startswith(GO):  # who lets it pass a breakpoint did not see that it was to pause
                end_pause(run)
            run.inbox.add(signal)
            _match(run, signal.name)


def _pass_breakpoint(run: RunContext, signal: Signal) -> bool:
    """Take a resume for the breakpoint at which a run in memory stands: who sent it elsewhere could not name that."""
    if run.pausing is not None:
        return False
    for wait in run.waits.values():
        if wait.name is not None and wait.name.startswith(GO) and wait.on_signal is not None:
            end_wait(run, wait.call)
            wait.on_signal(signal)
            return True
    return False


def _match(run: RunContext, name: str) -> None:
    """Give unread signals of a name to the calls that wait for it, in the order in which these were asked for."""
    for wait in [wait for wait in run.waits.values() if wait.name == name]:
        if wait.on_signal is not None and run.waits.get(wait.call) is wait:
            signal = run.inbox.take(name, wait.mine)
            if signal is not None:
                end_wait(run, wait.call)
                wait.on_signal(signal)


def put_back(run: RunContext, signal: Signal) -> None:
    """A signal that was taken for a wait which no longer wants it: the next wait for it hears it."""
    run.inbox.add(signal)
    _match(run, signal.name)


async def read_again(run: RunContext, seq: int) -> None:
    """As `put_back`, for a signal whose payload is only in the store."""
    run.performing += 1  # it must not be put away before the signal is heard
    try:
        page = await run.engine.read(run.engine.store.list_signals, run.id, seq - 1, 1)
    except StoreError as error:
        run.halt(error)
        return
    finally:
        run.performing -= 1
    if not run.detached:
        for signal in page:
            put_back(run, signal)
        run.watch()


def add_wait(run: RunContext, wait: Wait) -> None:
    """Wait in memory; if nothing else happens for long, the run is put away with what makes it due."""
    run.waits[wait.call] = wait
    if wait.due is not None:
        wait.ends = run.loop.time() + min(wait.due - run.engine.clock.now(), wait.longest)
        _arm(run, wait)
    run.watch()


def _arm(run: RunContext, wait: Wait) -> None:
    delay = max(0.0, wait.ends - run.loop.time())
    after, then = min(delay, 86_400.0), _due
    if wait.start is not None and delay > RIDE_AFTER_SECONDS:
        after, then = RIDE_AFTER_SECONDS, _ride
    elif wait.riding is not None and delay > RECORD_AFTER_SECONDS:
        after, then = RECORD_AFTER_SECONDS, _write_start
    wait.timer = run.loop.call_later(after, then, run, wait, context=run.engine.context)


def _ride(run: RunContext, wait: Wait) -> None:
    """Let the record of when a wait began go with the next commit of the run."""
    if run.detached or run.waits.get(wait.call) is not wait or wait.start is None:
        return
    wait.riding, wait.start = Draft(wait.start()), None
    run.pending.append(wait.riding)
    _arm(run, wait)


def _write_start(run: RunContext, wait: Wait) -> None:
    """Write the record of when a wait began, if nothing of the run was written meanwhile."""
    if run.detached or run.waits.get(wait.call) is not wait:
        return
    riding, wait.riding = wait.riding, None
    if not run.gathers and any(draft is riding for draft in run.pending):
        run.journal.write_pending(run)
    _arm(run, wait)


def _take_back_start(run: RunContext, wait: Wait) -> None:
    """Leave out the record of when a wait began that has ended before anything was written."""
    for index in range(len(run.pending) - 1, -1, -1):
        if run.pending[index] is wait.riding:
            del run.pending[index]
            return


def unrecorded_starts(run: RunContext) -> list[Record]:
    """The records of when open waits began, for the commit that puts the run away; those that have none yet."""
    found: list[Record] = []
    for wait in run.waits.values():
        start, wait.start = wait.start, None
        if start is not None:
            found.append(start())
    return found


def _due(run: RunContext, wait: Wait) -> None:
    if run.detached or run.waits.get(wait.call) is not wait or wait.due is None:
        return
    if run.loop.time() < wait.ends and run.engine.clock.now() < wait.due:
        _arm(run, wait)
        return
    end_wait(run, wait.call)
    if wait.on_due is not None:
        wait.on_due()


def end_wait(run: RunContext, call: Any) -> None:
    """Whatever a call waited for, it waits no more."""
    wait = run.waits.pop(call, None)
    if wait is None:
        return
    if wait.timer is not None:
        wait.timer.cancel()
    if wait.riding is not None:
        _take_back_start(run, wait)


async def pause_until(run: RunContext, due: float, blocked: str = "") -> None:
    """A wait of the engine's own on behalf of a step, such as a backoff: it may end with the run put away.

    `blocked` names the step if it waits to be ready, for those who look at the run meanwhile.
    """
    if due <= run.engine.clock.now():
        return
    future: asyncio.Future[None] = run.loop.create_future()
    token = object()
    run.performing -= 1
    try:
        add_wait(run, Wait(token, due, partial(fulfil, future, None), f"{BLOCKED}{blocked}" if blocked else None))
        await future
    finally:
        end_wait(run, token)
        run.performing += 1


async def signal_named(run: RunContext, name: str) -> Signal:
    """Wait, on behalf of a step, for a signal of the engine's own."""
    signal = run.inbox.take(name)
    if signal is not None:
        return signal
    future: asyncio.Future[Signal] = run.loop.create_future()
    token = object()
    run.performing -= 1
    try:
        add_wait(run, Wait(token, None, None, name, partial(fulfil, future)))
        return await future
    finally:
        end_wait(run, token)
        run.performing += 1


def seconds_left(run: RunContext) -> float:
    """How long the run has nothing to do by itself."""
    now = run.loop.time()
    left = min((wait.ends - now for wait in run.waits.values()), default=math.inf)
    if run.deadline_at is not None and not run.timed_out:
        left = min(left, run.deadline_at.timestamp() - run.engine.clock.now())
    return left


def due_at(run: RunContext) -> float | None:
    """The next time at which the run has something to do by itself."""
    dues = [wait.due for wait in run.waits.values() if wait.due is not None]
    if run.deadline_at is not None and not run.timed_out:
        dues.append(run.deadline_at.timestamp())
    return min(dues, default=None)


def wakes(run: RunContext) -> tuple[str, ...]:
    """The signals that wake the run when it is put away."""
    names = sorted({wait.name for wait in run.waits.values() if wait.name is not None})
    return (*names, CANCEL, PAUSE, RESUME)
