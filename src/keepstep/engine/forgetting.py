"""For tests: forget a run after every record and go on by replay, while the step bodies that it has under way go on.

The run is handed back through the store and claimed again, so a replay here is what it is after a crash. Only bodies
survive: the next incarnation asks for the same steps and is given what their bodies return, so no body runs twice.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from ..executors.thread import ThreadExecutor
from ..model import Status
from ..ports import CURRENT
from .asides import tell_of_cancel
from .attempt import Attempt, LeaseTooOld, flush_emitted, perform
from .parking import is_writing, move
from .steering import Control

if TYPE_CHECKING:
    from ..stores.records import Record
    from .branch import StepCall
    from .context import RunContext
    from .engine import Engine

#: Why a run that will be replayed leaves; the bodies of a run that leaves for any other reason are cancelled.
FORGOTTEN = "forgotten"

#: The call whose body runs in a context, if that body is kept.
_CALL: ContextVar[StepCall[Any] | None] = ContextVar("keepstep_kept_call", default=None)


class Forgetting:
    """Forgets the runs of one engine, and keeps the bodies of their steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lines: dict[str, _Line] = {}

    def forget(self, run: RunContext) -> bool:
        """Hand the run back if it has recorded anything since it was claimed; whether delivery must wait."""
        if run.finishing or run.draining or run.main is None or run.main.done() or not _may(run):
            return False
        if not run.moving and not is_writing(run):  # else the commit under way looks again
            move(run, Status.QUEUED, self._engine.clock.now(), (), reason=FORGOTTEN)
        return True

    def begins(self, run: RunContext) -> None:
        """What the bodies of a run tell belongs to its new incarnation."""
        line = self._lines.get(run.id)
        if line is None:
            self._lines[run.id] = _Line(run)
        else:
            line.run = run
            line.flush()
            for (key, number), body in line.bodies.items():
                if key not in run.tried or number > run.tried[key].attempts:  # else it is recorded
                    body.share_spending()

    def left(self, run: RunContext) -> None:
        """Drop the bodies of a run that is not to be replayed here."""
        if run.detached != FORGOTTEN and run.id in self._lines:
            for body in self._lines.pop(run.id).bodies.values():
                body.future.cancel()

    async def perform(self, call: StepCall[Any]) -> None:
        """Perform a step with a body that outlives this incarnation of the run."""
        if not call.step.at_most_once:  # which is never forgotten while it is under way
            _CALL.set(call)
            if call.step.is_async:
                step = copy.copy(call.step)
                step.fn = self._keeping(call, call.step.fn)
                call.step = step
        await perform(call)

    def cancel(self, call: StepCall[Any]) -> None:
        """The code no longer wants the outcome of a step, perhaps before this incarnation has asked for its body."""
        line = self._lines.get(call.run.id)
        for (key, _), body in line.bodies.items() if line is not None else ():
            if key == call.key and not body.future.done():
                body.future.cancel()
                tell_of_cancel(call, body.scope)

    def threads(self, limit: int, name: str) -> ThreadExecutor:
        """The executor of plain bodies."""
        return _KeepingThreads(self, limit, name)

    def _keeping(self, call: StepCall[Any], function: Callable[..., Any]) -> Callable[..., Any]:
        async def body(*args: Any, **kwargs: Any) -> Any:
            kept = self.body(call, CURRENT.get())
            if kept.future is None:
                context = copy_context()
                context.run(CURRENT.set, kept.scope)
                kept.future = self._engine.beside(_outcome(function, args, kwargs), context)
            try:
                value, error = await asyncio.shield(kept.future)
            except asyncio.CancelledError:
                if call.run.detached == FORGOTTEN or kept.future.done():
                    raise
                kept.future.cancel()
                value, error = await kept.future
            flush_emitted(kept.scope)
            kept.share_spending()
            if error is not None:
                raise error
            return value

        return body

    def body(self, call: StepCall[Any], scope: Attempt) -> _Body:
        """The body of an attempt: a new one, or the one that an earlier incarnation of the run has begun."""
        line = self._lines[call.run.id]
        place = (scope.key, scope.number)
        if place not in line.bodies:
            line.bodies[place] = _Body(line, call, scope.number)
        return line.bodies[place]


def _may(run: RunContext) -> bool:
    """Whether there is something new, and nothing is under way that only this incarnation can end."""
    if not run.arrived:  # the new records tell the code nothing
        return run.seq > run.claim.run.seq and not run.performing
    told = {draft.call for draft in run.arrived}
    if any(isinstance(call, Control) for call in told):  # a cancel ends what is under way, and is replayed later
        return False
    return not any(call.step.at_most_once for call in run.bodies if call not in told)  # it would be in doubt


class _Line:
    """All incarnations of one run: to the bodies of its steps they are one."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self.bodies: dict[tuple[str, int], _Body] = {}
        self.unwritten: list[Record] = []

    def append(self, record: Record) -> None:
        """Write a record of a body, in the next incarnation if this one is being forgotten."""
        self.unwritten.append(record)
        self.flush()

    def flush(self) -> None:
        run = self.run
        if not run.moving and not run.detached:
            records, self.unwritten = self.unwritten, []
            for record in records:
                record.worker = run.worker
                run.append(record)


class _Body:
    """The body of one attempt, the scope that it runs in, and what it has spent."""

    def __init__(self, line: _Line, call: StepCall[Any], number: int) -> None:
        self.line = line
        self.scope = _Scope(self, call, number)
        self.future: Any = None
        self.told: dict[str, list[Any]] = {}

    def share_spending(self) -> None:
        """Let the present incarnation see what was spent: it takes that into the record of the attempt."""
        self.line.run.spent.told.update(self.told)


class _Scope(Attempt):
    """Where a kept body is: in the line of its run, not in one incarnation."""

    __slots__ = ("_body",)

    def __init__(self, body: _Body, call: StepCall[Any], number: int) -> None:
        self._body = body
        super().__init__(call)
        self.number = number

    @property
    def run(self) -> Any:
        return _Face(self._body)

    @run.setter
    def run(self, run: RunContext) -> None:
        pass


class _Face:
    """What a kept body sees as its run."""

    def __init__(self, body: _Body) -> None:
        self._body = body
        self.detached = ""
        self.append = body.line.append
        self.spent = self
        self.told = self

    def setdefault(self, key: str, nothing: list[Any]) -> list[Any]:
        """The running sum of what the body has spent."""
        told = self._body.told.setdefault(key, nothing)
        self._body.share_spending()
        return told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body.line.run, name)


async def _outcome(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, BaseException | None]:
    """What a body returns or raises; a task that raised `SystemExit` would end the loop."""
    try:
        return await function(*args, **kwargs), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the step raises it
        return None, error


class _KeepingThreads(ThreadExecutor):
    """Gives a body that an earlier incarnation has begun to the next, instead of running it again."""

    def __init__(self, forgetting: Forgetting, limit: int, name: str) -> None:
        super().__init__(limit, name)
        self._forgetting = forgetting

    def submit(self, context: Context, function: Callable[[], Any]) -> Future[Any]:
        call = context.get(_CALL)
        if call is None:
            return super().submit(context, function)
        kept = self._forgetting.body(call, context[CURRENT])
        if kept.future is None or _did_not_begin(kept.future):
            context.run(CURRENT.set, kept.scope)
            kept.future = super().submit(context, function)
        return _follower(kept, call.run)


def _did_not_begin(future: Future[Any]) -> bool:
    return future.cancelled() or (future.done() and isinstance(future.exception(), LeaseTooOld))


def _follower(kept: _Body, run: RunContext) -> Future[Any]:
    """A future that one incarnation may cancel when it is forgotten, without cancelling the body."""
    future: Future[Any] = kept.future
    follower: Future[Any] = Future()

    def tell(done: Future[Any]) -> None:
        if done.cancelled():
            follower.cancel()
        elif follower.set_running_or_notify_cancel():
            run.loop.call_soon_threadsafe(flush_emitted, kept.scope)
            kept.share_spending()
            error = done.exception()
            if error is not None:
                follower.set_exception(error)
            else:
                follower.set_result(done.result())

    def cancelled(one: Future[Any]) -> None:
        if one.cancelled() and run.detached != FORGOTTEN:
            future.cancel()

    follower.add_done_callback(cancelled)
    future.add_done_callback(tell)
    return follower
