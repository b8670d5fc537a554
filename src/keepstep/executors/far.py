"""The part that all executors share whose bodies run elsewhere: a body, its time, and the wait for its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

from ..errors import BodyLost
from ..ports import BodyTimedOut, Work
from .failures import made_again
from .task import Done, Ended, Failed, FarWork, Lost


class Body:
    """One body on its way. `place` is the process that has it, for executors with several."""

    __slots__ = ("began_at", "is_late", "number", "outcome", "place", "task", "timer", "work")

    def __init__(self, number: int, work: FarWork, outcome: asyncio.Future[Ended], *, pickled: bool) -> None:
        self.number = number
        self.work = work
        self.task = work.task(pickled=pickled)
        #: How the body has ended; cancelled if it may not begin here.
        self.outcome = outcome
        self.place: Any = None
        self.began_at: float | None = None
        self.is_late = False
        self.timer: asyncio.TimerHandle | None = None

    def settle(self, outcome: Ended) -> None:
        """Set how the body has ended, unless that is known or nobody asks."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def may_begin(self) -> bool:
        """Whether the body may be given away now; if not, its attempt ends."""
        if self.outcome.done():
            return False
        if self.work.holds_lease() or self.work.may_begin():
            return True
        self.outcome.cancel()
        return False


class FarExecutor:
    """Runs bodies in other processes. Subclasses give them away, and stop them."""

    is_far = True
    adopts = False
    #: Whether functions cross as the cluster's own pickling writes them, instead of by their names.
    pickled = False
    #: Numbers of bodies. Executors that share a bridge need different ones.
    _numbers = itertools.count(1)

    def __init__(self, host: Any) -> None:
        self.loop: asyncio.AbstractEventLoop = host.loop
        self.context = host.context

    def submit(self, body: Body) -> None:
        """Give a body away, now or later."""
        raise NotImplementedError

    def stop(self, body: Body) -> None:
        """End a body that has no outcome. Its outcome is set when nothing of it goes on."""
        raise NotImplementedError

    def leave(self, body: Body) -> None:
        """Leave a body to the next worker, if bodies outlive their workers."""
        raise NotImplementedError

    async def execute(self, here: Work, seconds: float | None) -> Any:
        """Run a body, and return its result."""
        work = here.far()
        body = Body(next(self._numbers), work, self.loop.create_future(), pickled=self.pickled)
        wait = work.time_to_begin()
        if wait is not None:
            body.timer = self.loop.call_later(wait, self._too_late, body, context=self.context)
        self.context.run(self.submit, body)
        try:
            await asyncio.wait([body.outcome])
        except asyncio.CancelledError:
            if self.adopts and work.is_left:
                self.leave(body)
                raise
            self.stop(body)
            while not body.outcome.done():  # the place of the body is free only when it has ended
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([body.outcome])
            raise
        finally:
            if body.timer is not None:
                body.timer.cancel()
        outcome = body.outcome.result()
        match outcome:
            case Done():
                return await work.read(outcome)
            case _ if body.is_late:
                raise BodyTimedOut(seconds or 0.0)
            case Failed():
                raise _error_of(body, outcome)
            case Lost():
                raise _lost(body, outcome.why)
        raise AssertionError(outcome)

    def note_begun(self, body: Body, seconds_ago: float = 0.0) -> None:
        """Let the time of a body count from now on."""
        if body.outcome.done():
            return
        body.began_at = self.loop.time() - seconds_ago
        seconds = body.work.begun(seconds_ago)
        if body.timer is not None:
            body.timer.cancel()
        body.timer = None if seconds is None else self.loop.call_later(seconds, self._too_late, body)

    def _too_late(self, body: Body) -> None:
        body.is_late = True
        self.stop(body)


def _error_of(body: Body, outcome: Failed) -> BaseException:
    error = made_again(outcome.error)
    # Raised here, it would interrupt the worker.
    return _lost(body, "was interrupted") if isinstance(error, KeyboardInterrupt) else error


def _lost(body: Body, why: str) -> BodyLost:
    return BodyLost(f"the process that ran step {body.task.step!r} {why}", body.task.step)
