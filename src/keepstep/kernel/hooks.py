"""Calls hooks and `ready=` functions with a timeout; their failures never affect the run."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import RunTimedOut
from ..executors.thread import forget, plainly
from ..model import Status
from ..ports import CURRENT
from ..workflows.hooks import Hooks, Moment, Occasion
from .strands import Contained, left

if TYPE_CHECKING:
    from .attempt import Attempt
    from .driver import RunDriver
    from .host import Host

log = logging.getLogger("keepstep")

#: Threads for plain hooks and `ready=` functions, separate from those of steps, so that a stuck one blocks no step.
ASIDE_THREADS = 16


async def within(host: Host, seconds: float | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of an async or plain function; after `seconds`, cancel it and raise TimeoutError.

    Whatever else it raises is an ordinary error. Only a KeyboardInterrupt, which ends the program, passes through.
    """
    if inspect.iscoroutinefunction(function):
        body: asyncio.Future[Any] = _task(host, function(*args, **kwargs))
    else:
        call = partial(plainly, function, *args, **kwargs)
        body = asyncio.wrap_future(host.hook_threads.submit(copy_context(), call), loop=host.loop)
    value = await _ended(body, seconds)
    if inspect.isawaitable(value):  # a plain function may return a coroutine
        value = await _ended(_task(host, _awaited(value)), seconds)
    return value


def _task(host: Host, coroutine: Any) -> asyncio.Task[Any]:
    """Return a task that is not a branch of the run, and whose `sys.exit` does not end the worker."""
    return asyncio.Task(Contained(coroutine), loop=host.loop)


async def _awaited(value: Any) -> Any:
    return await value


async def _ended(body: asyncio.Future[Any], seconds: float | None) -> Any:
    try:
        done, _ = await asyncio.wait([body], timeout=seconds)
    except asyncio.CancelledError:
        body.cancel()
        raise
    if not done:
        body.cancel()
        body.add_done_callback(forget)
        raise TimeoutError(f"it took longer than {seconds:g} s")
    if body.cancelled():
        raise RuntimeError("it cancelled itself")
    try:
        return body.result()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # such as `SystemExit`, or a `CancelledError` that a plain function raises
        raise left(error) from error


# -- hooks -------------------------------------------------------------------------------------------------------------


async def call_step_hooks(
    attempt: Attempt, moment: Moment, result: Any = None, error: BaseException | None = None
) -> None:
    """Call the hooks of a step for one moment."""
    run, call = attempt.run, attempt.call
    args, kwargs = call.arguments() if moment == "before" else ((), {})
    occasion = Occasion(
        moment, run.id, run.workflow.name, call.key, attempt.number, args, kwargs, result=result, error=error
    )
    await _call_hooks(run, attempt.hooks, occasion)


def call_cancel_hooks(attempt: Attempt) -> None:
    """Call the `cancel` hooks of a step in a task of their own. The end of the run waits for them."""
    if any(one.cancel is not None for one in attempt.hooks):
        run = attempt.run
        run.end_waits_for(_task(run.host, call_step_hooks(attempt, "cancel")))


async def _call_hooks(run: RunDriver, hooks: tuple[Hooks, ...], occasion: Occasion) -> None:
    """Call the hooks for a moment; nothing that they do affects the run."""
    for one in hooks:
        hook = getattr(one, occasion.moment)
        if hook is None:
            continue
        try:
            await within(run.host, one.seconds, hook, occasion)
        except Exception as error:  # noqa: BLE001 - the run goes on after any failure
            _report(run, hook, occasion, error)


def _report(run: RunDriver, hook: Any, occasion: Occasion, error: BaseException) -> None:
    name, where = getattr(hook, "__qualname__", repr(hook)), occasion.step or "the run"
    log.warning("run %s: %s=%s of %s failed and is ignored", run.id, occasion.moment, name, where, exc_info=error)
    text = f"{type(error).__name__}: {error}"
    moment, step, attempt = occasion.moment, occasion.step, occasion.attempt
    run.host.events.observe("hook.failed", run, step=step, attempt=attempt, moment=moment, hook=name, error=text)


# -- hooks of the run itself -------------------------------------------------------------------------------------------


async def tell_of_beginning(run: RunDriver) -> None:
    """Call the hooks before a run's code."""
    stored = run.host.encryption.input(run.run)
    args, kwargs = run.workflow.values.decode(stored, f"workflow {run.workflow.name!r}: input")
    occasion = Occasion("before", run.id, run.workflow.name, args=tuple(args), kwargs=kwargs)
    await call_workflow_hooks(run, run.workflow.hooks, occasion)


async def tell_of_end(run: RunDriver, status: Status, future: asyncio.Future[Any]) -> None:
    """Call the hooks at the end of a run, before it is recorded."""
    moment: Moment = "after" if status is Status.COMPLETED else "error" if status is Status.FAILED else "cancel"
    raised = asyncio.CancelledError() if future.cancelled() else future.exception()
    if run.stop.is_timed_out:
        raised = RunTimedOut(f"run {run.id!r} was not finished by its deadline", run.id)
    result = future.result() if moment == "after" and raised is None else None
    error = raised if moment == "error" else None
    occasion = Occasion(moment, run.id, run.workflow.name, result=result, error=error)
    await call_workflow_hooks(run, run.workflow.hooks, occasion)


async def call_workflow_hooks(run: RunDriver, hooks: tuple[Hooks, ...], occasion: Occasion) -> None:
    """Call the hooks of a workflow outside the branches of the run. A dry replay calls none."""
    if run.stop.is_dry:
        return
    context = copy_context()
    context.run(CURRENT.set, None)
    await asyncio.Task(_call_hooks(run, hooks, occasion), loop=run.loop, context=context)
