"""Functions of the user's that are called beside a step or a run: within a time, and without harm to it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import RunTimedOut
from ..model import Status
from ..ports import CURRENT
from ..workflows.hooks import Hooks, Moment, Occasion
from .tasks import Contained
from .wakeups import pause_until

if TYPE_CHECKING:
    from .attempt import Attempt
    from .branch import StepCall
    from .context import RunContext
    from .engine import Engine

log = logging.getLogger("keepstep")

#: Threads for plain hooks and `ready=` functions, apart from those of steps: one that hangs must not hold up a step.
ASIDE_THREADS = 16
#: A `ready=` that takes longer counts as not ready.
READY_SECONDS = 30.0


async def within(engine: Engine, seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an async or plain function gives; TimeoutError if it takes too long: it is told to stop, and left behind."""
    if inspect.iscoroutinefunction(function):
        body: asyncio.Future[Any] = _task(engine, function(*args, **kwargs))
    else:
        call = partial(plainly, function, *args, **kwargs)
        body = asyncio.wrap_future(engine.aside_threads.submit(copy_context(), call), loop=engine.loop)
    value = await _ended(body, seconds)
    if inspect.isawaitable(value):  # a plain function that made a coroutine
        value = await _ended(_task(engine, _awaited(value)), seconds)
    return value


def _task(engine: Engine, coroutine: Any) -> asyncio.Task[Any]:
    """A task that is no branch of the run's, and whose `sys.exit` does not end the worker."""
    return asyncio.Task(Contained(coroutine), loop=engine.loop)


async def _awaited(value: Any) -> Any:
    return await value


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a plain function whose outcome goes into a future, which cannot hold a StopIteration."""
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"it raised StopIteration: {error}") from error


async def _ended(body: asyncio.Future[Any], seconds: float) -> Any:
    try:
        done, _ = await asyncio.wait([body], timeout=seconds)
    except asyncio.CancelledError:
        body.cancel()
        raise
    if not done:
        body.cancel()
        body.add_done_callback(_forget)
        raise TimeoutError(f"it took longer than {seconds:g} s")
    if body.cancelled():
        raise RuntimeError("it cancelled itself")
    return body.result()


def _forget(body: asyncio.Future[Any]) -> None:
    if not body.cancelled():
        body.exception()


# -- before an attempt -------------------------------------------------------------------------------------------------


async def may_begin(call: StepCall[Any], scope: Attempt) -> bool:
    """Whether an attempt may begin: the budget allows it, and the step is ready; then the hook before it is called."""
    run, ready = call.run, call.step.ready
    if ready is not None and not await _becomes_ready(call, scope, ready):
        return False
    if not _is_admitted(call, scope):
        return False
    if scope.hooks:
        await tell(call, scope, "before")
    return not run.detached


async def _becomes_ready(call: StepCall[Any], scope: Attempt, ready: Callable[..., Any]) -> bool:
    """Wait until a step is ready; False if the budget is used up before that."""
    run = call.run
    while _is_admitted(call, scope):
        if run.guard is not None:
            run.guard.ended(call.key)  # what is asked or blocked is not under way
        objection = await _objection(call, ready)
        if objection is None:
            return True
        await _block(call, objection)
    return False


def _is_admitted(call: StepCall[Any], scope: Attempt) -> bool:
    guard = call.run.guard
    return guard is None or guard.admits(call, scope.number)


async def _objection(call: StepCall[Any], ready: Callable[..., Any]) -> str | None:
    """Why a step is not ready; None if it is."""
    try:
        answer = await within(call.run.engine, READY_SECONDS, ready, *call.args, **call.kwargs)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a precondition that cannot be told does not hold
        told = f"{type(error).__name__}: {error}"
        log.warning("run %s: whether step %s is ready cannot be told: %s", call.run.id, call.key, told)
        return told
    return None if answer else "not ready"


async def _block(call: StepCall[Any], why: str) -> None:
    """Wait until the step is to be asked again, with the run put away if nothing else happens in it."""
    run, seconds = call.run, call.step.ready_every
    run.engine.teller.observe("step.blocked", run, step=call.key, why=why, again_seconds=seconds)
    await pause_until(run, run.engine.clock.now() + seconds, blocked=call.key)


# -- hooks -------------------------------------------------------------------------------------------------------------


async def tell(
    call: StepCall[Any], scope: Attempt, moment: Moment, result: Any = None, error: BaseException | None = None
) -> None:
    """Call the hooks of a step."""
    args, kwargs = call.arguments() if moment == "before" else ((), {})
    run = call.run
    occasion = Occasion(
        moment, run.id, run.workflow.name, call.key, scope.number, args, kwargs, result=result, error=error
    )
    await _call_hooks(run, scope.hooks, occasion)


def tell_of_cancel(call: StepCall[Any], scope: Attempt) -> None:
    """Call the hooks of a step that was cancelled, beside everything else; the end of its run waits for them."""
    run = call.run
    if any(one.cancel is not None for one in scope.hooks):
        task = _task(run.engine, tell(call, scope, "cancel"))
        run.asides.add(task)
        task.add_done_callback(run.asides.discard)


async def _call_hooks(run: RunContext, hooks: tuple[Hooks, ...], occasion: Occasion) -> None:
    """Call what there is for a moment; nothing that comes of it concerns the run."""
    for one in hooks:
        hook = getattr(one, occasion.moment)
        if hook is None:
            continue
        try:
            await within(run.engine, one.seconds, hook, occasion)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it was, the run goes on
            _report(run, hook, occasion, error)


def _report(run: RunContext, hook: Any, occasion: Occasion, error: BaseException) -> None:
    name, where = getattr(hook, "__qualname__", repr(hook)), occasion.step or "the run"
    log.warning("run %s: %s=%s of %s is ignored", run.id, occasion.moment, name, where, exc_info=error)
    told = f"{type(error).__name__}: {error}"
    moment, step, attempt = occasion.moment, occasion.step, occasion.attempt
    run.engine.teller.observe("hook.failed", run, step=step, attempt=attempt, moment=moment, hook=name, error=told)


# -- hooks of the run itself -------------------------------------------------------------------------------------------


async def tell_of_beginning(run: RunContext) -> None:
    """Call the hooks before a run's code."""
    stored = run.engine.encryption.input(run.run)
    args, kwargs = run.workflow.values.decode(stored, f"workflow {run.workflow.name!r}: input")
    await _of_run(run, Occasion("before", run.id, run.workflow.name, args=tuple(args), kwargs=kwargs))


async def tell_of_end(run: RunContext, status: Status, future: asyncio.Future[Any]) -> None:
    """Call the hooks at the end of a run, before that is recorded."""
    moment: Moment = "after" if status is Status.COMPLETED else "error" if status is Status.FAILED else "cancel"
    raised = asyncio.CancelledError() if future.cancelled() else future.exception()
    if run.timed_out:
        raised = RunTimedOut(f"run {run.id!r} was not finished by its deadline", run.id)
    result = future.result() if moment == "after" and raised is None else None
    error = raised if moment == "error" else None
    await _of_run(run, Occasion(moment, run.id, run.workflow.name, result=result, error=error))


async def _of_run(run: RunContext, occasion: Occasion) -> None:
    """What is called is no code of the workflow, so it is in no branch of it."""
    context = copy_context()
    context.run(CURRENT.set, None)
    await asyncio.Task(_call_hooks(run, run.workflow.hooks, occasion), loop=run.loop, context=context)


def in_thread_after(
    first: Callable[[], Coroutine[Any, Any, None]] | None, run: RunContext, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a plain def workflow in its thread, after its hooks if it has some."""
    if first is not None:
        told = threading.Event()

        async def tell_first() -> None:
            try:
                await first()
            finally:
                told.set()

        run.loop.call_soon_threadsafe(lambda: run.engine.background(tell_first()), context=run.engine.context)
        told.wait(sum(one.seconds for one in run.workflow.hooks) + 1.0)
    run.code_thread = threading.get_ident()
    return plainly(run.workflow.fn, *args, **kwargs)
