"""For tests: forgets a run after every record and continues it by replay, while its step bodies keep running.

The run is handed back through the store and claimed again, so a replay here is the same as after a crash. Only bodies
survive: the next incarnation calls the same steps and receives the results of their bodies, so no body runs twice.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from ..executors.thread import NotBegun, ThreadPool
from ..model import Status
from ..ports import CURRENT
from .attempt import Attempt
from .hooks import call_cancel_hooks
from .ledger import add_report
from .parking import is_writing, move
from .steering import Control
from .step import perform
from .stop import DRIVING, FINISHING, Stop

if TYPE_CHECKING:
    from ..ports import Executor
    from ..records.record import Record
    from .calls import StepCall
    from .driver import RunDriver
    from .host import Host

#: Reason for leaving of a run that will be replayed. For any other reason, its bodies are cancelled.
FORGOTTEN = "forgotten"

#: The call whose body runs in a context, if that body is kept.
_CALL: ContextVar[StepCall[Any] | None] = ContextVar("keepstep_kept_call", default=None)


class Forgetting:
    """Forgets the runs of one engine, and keeps the bodies of their steps."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lines: dict[str, _Line] = {}

    def forget(self, run: RunDriver) -> bool:
        """Hand the run back if it has recorded anything since its claim. Return whether delivery must wait."""
        if run.stop.phase is FINISHING or run.stop.is_to_drain or run.main is None or run.main.done() or not _may(run):
            return False
        if run.stop.phase is DRIVING and not is_writing(run):  # otherwise the pending commit checks again
            move(run, Status.QUEUED, self._host.clock.now(), (), reason=FORGOTTEN)
        return True

    def begins(self, run: RunDriver) -> None:
        """Attach the kept bodies of a run to its new incarnation."""
        line = self._lines.get(run.id)
        if line is None:
            self._lines[run.id] = _Line(run)
        else:
            line.run = run
            line.flush()
            for (key, number), body in line.bodies.items():
                if key not in run.tried or number > run.tried[key].attempts:  # otherwise it is recorded
                    body.share_spending()
                    if run.history is not None and key not in run.history.entries:
                        body.share_saved()

    def keeps(self, run: RunDriver) -> bool:
        """Whether the bodies of a run go on, although it is no longer driven: it will be replayed."""
        return run.stop.detached == FORGOTTEN

    def left(self, run: RunDriver) -> None:
        """Drop the bodies of a run that will not be replayed here."""
        if run.stop.detached != FORGOTTEN and run.id in self._lines:
            for body in self._lines.pop(run.id).bodies.values():
                body.future.cancel()

    async def perform(self, call: StepCall[Any]) -> None:
        """Perform a step with a body that outlives this incarnation of the run."""
        if not call.step.at_most_once:  # an at-most-once step is never forgotten in progress
            _CALL.set(call)
            if call.step.is_async:
                step = copy.copy(call.step)
                step.body = self._keeping(call, call.step.body)
                call.step = step
        await perform(call)

    def cancel(self, call: StepCall[Any]) -> None:
        """Cancel a step's body, perhaps before this incarnation has asked for it."""
        line = self._lines.get(call.run.id)
        for (key, _), body in line.bodies.items() if line is not None else ():
            if key == call.key and not body.future.done():
                body.future.cancel()
                call_cancel_hooks(body.scope)

    def drop(self, call: StepCall[Any]) -> None:
        """Forget the ended bodies of a step, which is performed again without a record."""
        line = self._lines[call.run.id]
        for place in [one for one in line.bodies if one[0] == call.key]:
            del line.bodies[place]

    def threads(self, limit: int, name: str) -> ThreadPool:
        """The executor of plain bodies."""
        return _KeepingThreads(self, limit, name)

    def executor(self, inner: Executor) -> Executor:
        """The executor of bodies in other processes."""
        return _KeepingExecutor(self, inner)

    def _keeping(self, call: StepCall[Any], function: Callable[..., Any]) -> Callable[..., Any]:
        async def body(*args: Any, **kwargs: Any) -> Any:
            return await self.outcome(call, self.body(call, CURRENT.get()), lambda: function(*args, **kwargs))

        return body

    async def outcome(self, call: StepCall[Any], kept: _Body, begin: Callable[[], Awaitable[Any]]) -> Any:
        """Return what a body returns. `begin` is called unless an earlier incarnation has begun the body."""
        if kept.future is None:
            context = copy_context()
            context.run(CURRENT.set, kept.scope)
            kept.future = self._host.beside(_outcome(begin), context)
        try:
            value, error = await asyncio.shield(kept.future)
        except asyncio.CancelledError:
            if call.run.stop.detached == FORGOTTEN or kept.future.done():
                raise
            kept.future.cancel()
            value, error = await kept.future
        kept.scope.flush_emitted()
        kept.share_spending()
        if error is not None:
            raise error
        return value

    def body(self, call: StepCall[Any], scope: Attempt) -> _Body:
        """Return the body of an attempt: a new one, or one that an earlier incarnation has begun."""
        line = self._lines[call.run.id]
        place = (scope.key, scope.number)
        if place not in line.bodies:
            line.bodies[place] = _Body(line, call, scope.number)
        return line.bodies[place]


def _may(run: RunDriver) -> bool:
    """Whether there is a new record, and nothing is in progress that only this incarnation can end."""
    if not run.arrived:  # the new records deliver nothing to the code
        return run.seq > run.claim.run.seq and not run.performing
    calls = {draft.call for draft in run.arrived}
    if any(isinstance(call, Control) for call in calls):  # a cancel ends what is in progress, and is replayed later
        return False
    return not any(call.step.at_most_once for call in run.bodies.values() if call not in calls)  # it would be in doubt


class _Line:
    """All incarnations of one run, which the bodies of its steps see as one."""

    def __init__(self, run: RunDriver) -> None:
        self.run = run
        self.bodies: dict[tuple[str, int], _Body] = {}
        self.unwritten: list[Record] = []

    def append(self, record: Record) -> None:
        """Write a record of a body, in the next incarnation if this one is being forgotten."""
        self.unwritten.append(record)
        self.flush()

    def flush(self) -> None:
        run = self.run
        if run.stop.phase is DRIVING or run.stop.phase is FINISHING:
            records, self.unwritten = self.unwritten, []
            for record in records:
                record.worker = run.worker
                run.append(record)


class _Body:
    """The body of one attempt, its scope, and its spending."""

    def __init__(self, line: _Line, call: StepCall[Any], number: int) -> None:
        self.line = line
        hooks = call.branch.hooks + call.step.hooks
        self.scope = Attempt(call, _Face(self), call.key, hooks, number=number)
        self.future: Any = None
        self.reported: dict[str, list[Any]] = {}
        self.saved: tuple[str, int, bytes] | None = None

    def share_saved(self) -> None:
        """Share the saved progress with the current incarnation, for the next attempt."""
        if self.saved is not None:
            self.line.run.save_progress(*self.saved)

    def share_spending(self) -> None:
        """Share the spending with the current incarnation, which puts it into the attempt's record."""
        self.line.run.spent.report_again(self.reported)


class _Face:
    """The run as a kept body sees it."""

    def __init__(self, body: _Body) -> None:
        self._body = body
        self.stop = Stop()  # for the body the run is always present
        self.append = body.line.append
        self.spent = self

    def report(
        self, key: str, cost: float, tokens: int, model: str | None = None, parts: tuple[int, int] = (0, 0)
    ) -> None:
        """Add to the spending of the body."""
        add_report(self._body.reported, key, cost, tokens, model, *parts)
        self._body.share_spending()

    def save_progress(self, key: str, attempt: int, value: bytes) -> None:
        """Keep a value for the next attempt, also while the run is being forgotten."""
        self._body.saved = (key, attempt, value)
        self._body.share_saved()

    def saved_progress(self, key: str) -> bytes | None:
        """Return the newest value that the step has saved, or None."""
        saved = self._body.saved
        return self._body.line.run.saved_progress(key) if saved is None else saved[2]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body.line.run, name)


async def _outcome(begin: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Return what a body returns or raises; `SystemExit` in a task would end the loop."""
    try:
        return await begin(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the step raises it
        return None, error


class _KeepingThreads(ThreadPool):
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


class _KeepingExecutor:
    """As `_KeepingThreads`, for bodies in other processes."""

    def __init__(self, forgetting: Forgetting, inner: Any) -> None:
        self._forgetting, self._inner = forgetting, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def execute(self, here: Any, seconds: float | None) -> Any:
        if here.call.step.at_most_once:
            return await self._inner.execute(here, seconds)
        kept = self._forgetting.body(here.call, here)
        if kept.future is None:
            kept.scope.first_at = here.first_at
        try:
            return await self._forgetting.outcome(here.call, kept, lambda: self._inner.execute(kept.scope, seconds))
        finally:
            here.started_at, here.on_durable = kept.scope.started_at or here.started_at, kept.scope.on_durable
            here.add(kept.scope.more)


def _did_not_begin(future: Future[Any]) -> bool:
    return future.cancelled() or (future.done() and isinstance(future.exception(), NotBegun))


def _follower(kept: _Body, run: RunDriver) -> Future[Any]:
    """Return a future that one incarnation may cancel without cancelling the body."""
    future: Future[Any] = kept.future
    follower: Future[Any] = Future()

    def tell(done: Future[Any]) -> None:
        if done.cancelled():
            follower.cancel()
        elif follower.set_running_or_notify_cancel():
            run.loop.call_soon_threadsafe(kept.scope.flush_emitted)
            kept.share_spending()
            error = done.exception()
            if error is not None:
                follower.set_exception(error)
            else:
                follower.set_result(done.result())

    def cancelled(one: Future[Any]) -> None:
        if one.cancelled() and run.stop.detached != FORGOTTEN:
            future.cancel()

    follower.add_done_callback(cancelled)
    future.add_done_callback(tell)
    return follower
