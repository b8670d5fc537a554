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
from .steering import end_pause, steer

if TYPE_CHECKING:
    from .context import RunContext

T = TypeVar("T")


class Wait:
    """A call that waits for a time, a signal, or whichever comes first.

    `due` is wall time, which is what a parked run goes by; in memory the wait ends by the clock that no one sets, and
    takes no longer than `longest`, so that a wall clock that is set back does not stretch it.
    """

    __slots__ = ("call", "due", "ends", "longest", "mine", "name", "on_due", "on_signal", "timer")

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
    ) -> None:
        self.call = call
        self.due = due
        self.on_due = on_due
        self.name = name
        self.on_signal = on_signal
        self.longest = longest
        self.mine = mine  # which of the signals of that name it waits for; all, if nothing is said
        self.ends = math.inf
        self.timer: asyncio.TimerHandle | None = None


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
        clock = run.engine.clock
        wait.ends = clock.boot()[1] + min(wait.due - clock.now(), wait.longest)
        _arm(run, wait)
    run.watch()


def _arm(run: RunContext, wait: Wait) -> None:
    delay = max(0.0, wait.ends - run.engine.clock.boot()[1])
    wait.timer = run.loop.call_later(min(delay, 86_400.0), _due, run, wait, context=run.engine.context)


def _due(run: RunContext, wait: Wait) -> None:
    if run.detached or run.waits.get(wait.call) is not wait or wait.due is None:
        return
    clock = run.engine.clock
    if clock.boot()[1] < wait.ends and clock.now() < wait.due:
        _arm(run, wait)
        return
    end_wait(run, wait.call)
    if wait.on_due is not None:
        wait.on_due()


def end_wait(run: RunContext, call: Any) -> None:
    """Whatever a call waited for, it waits no more."""
    wait = run.waits.pop(call, None)
    if wait is not None and wait.timer is not None:
        wait.timer.cancel()


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
    boot = run.engine.clock.boot()[1]
    left = min((wait.ends - boot for wait in run.waits.values()), default=math.inf)
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
