"""The tasks of a run's code: a task factory that wraps the loop's own makes each one a numbered branch."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from contextvars import copy_context
from functools import partial
from types import CoroutineType, FrameType
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..ports import CURRENT
from .callbacks import callbacks_of
from .failure_point import mark_interrupted, mark_raised
from .generators import _ORDERS, FollowedGenerators

if TYPE_CHECKING:
    from .callbacks import Callbacks
    from .driver import RunDriver

#: The function in asyncio that makes tasks of a set of coroutines, and the number of frames between it and a factory.
_AS_COMPLETED: Any = getattr(asyncio.tasks, "_AsCompletedIterator", None)
_GOES_THROUGH_A_SET = (asyncio.as_completed if _AS_COMPLETED is None else _AS_COMPLETED.__init__).__code__
_FRAMES_TO_FACTORY = 5
#: asyncio's factory of tasks that begin where they are made, since Python 3.12.
_EAGER = getattr(asyncio, "eager_task_factory", object())


class Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose `sys.exit` is an ordinary error and does not end the worker.

    It is not a coroutine function: cancelled before its start, that would leave the inner coroutine never awaited.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except _ORDERS as error:
            raise left(error) from error
        except KeyboardInterrupt:
            interrupted()
            raise

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except _ORDERS as order:
            raise left(order) from order
        except KeyboardInterrupt:
            interrupted()
            raise

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # frame and name, for introspection


def interrupted() -> None:
    """Hand back the run whose code or step has met a KeyboardInterrupt, which then ends the program."""
    scope = CURRENT.get()
    if scope is not None:
        scope.run.interrupt()


def left(error: BaseException) -> RuntimeError:
    """Convert `sys.exit` and similar exceptions into an error that ends the run or step, not the worker."""
    return RuntimeError(f"{type(error).__name__}: {error}")


class RunTask(asyncio.Task[Any]):
    """A task of a run's code.

    asyncio keeps tasks in sets and iterates over them: `TaskGroup` to cancel them, `asyncio.wait` to return the
    finished ones. The hash is derived from the branch, so that this order is the same on every replay; a plain task
    hashes its address.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], branch: Any, **options: Any) -> None:
        self.branch = branch  # set first, because asyncio adds the task to a set before it is complete
        #: Whether neither the run's code nor the engine has cancelled it.
        self.cancelled_from_outside = False
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        order: int = self.branch.order
        return order

    def cancel(self, msg: Any | None = None) -> bool:
        if not self.done() and self.branch.run.is_outside():
            self.cancelled_from_outside = True
        return super().cancel(msg)


def _is_from_a_set() -> bool:
    """Whether `asyncio.as_completed` is making the task, which iterates over a set of its arguments."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - inspects the callers
    for _ in range(_FRAMES_TO_FACTORY):
        if frame is None:
            return False
        if frame.f_code is _GOES_THROUGH_A_SET:
            return True
        frame = frame.f_back
    return False


class BranchingFactory:
    """Makes every task of a workflow's code a branch of its run, and leaves other tasks alone."""

    def __init__(self, inner: Any, callbacks: Callbacks) -> None:
        self.inner = inner
        self.callbacks = callbacks
        self.users = 1
        self.generators = FollowedGenerators()

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Any:
        scope = CURRENT.get()
        if scope is None:
            return self._make(loop, coroutine, options)
        plain = type(coroutine) is CoroutineType
        if plain and not scope.in_step and _is_from_a_set():
            coroutine.close()
            raise DefinitionError(
                "asyncio.as_completed starts bare coroutines in an order that differs on replay; "
                "use ks.as_completed, or make them tasks first with asyncio.create_task"
            )
        if plain:  # our own calls never raise an exception that ends the loop
            coroutine = Contained(coroutine)
        if scope.in_step:
            return self._make(loop, coroutine, options)
        given = options.get("context")
        context = copy_context() if given is None else given.copy()
        branch = scope.child()
        context.run(CURRENT.set, branch)
        options["context"] = context
        if self.inner is None:
            task = RunTask(coroutine, branch, loop=loop, **options)
        elif self.inner is _EAGER:
            if options.get("eager_start") is None:  # a loop may pass None explicitly
                options["eager_start"] = True
            task = RunTask(coroutine, branch, loop=loop, **options)
        else:  # a custom factory, which decides what kind of task it makes
            task = self.inner(loop, coroutine, **options)
        adopt(scope.run, task)
        return task

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], options: dict[str, Any]
    ) -> Any:
        if self.inner is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        return self.inner(loop, coroutine, **options)


def spawn_in(run: RunDriver, branch: Any, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Run code of the workflow in a branch that is already numbered."""
    context = copy_context()
    context.run(CURRENT.set, branch)
    task = RunTask(Contained(coroutine), branch, loop=run.loop, context=context)
    adopt(run, task)
    return task


def adopt(run: RunDriver, task: asyncio.Task[Any]) -> None:
    """Register a task as one of the run's code."""
    error = sys.exception()
    run.task_made(task, error)
    if error is not None:
        mark_raised(run, error)
    task.add_done_callback(partial(_ended, run), context=run.host.context)
    if run.stop.detached:
        task.cancel()


def _ended(run: RunDriver, task: asyncio.Task[Any]) -> None:
    handled = run.task_ended(task)
    if handled is not None and task.cancelled():
        mark_interrupted(run, handled)
    error = task._exception  # noqa: SLF001 - reading it publicly would silence a warning
    if error is not None:
        mark_raised(run, error)
    if run.waits or run.stop.holding:  # the wait of this task may have been all that kept the run here
        run.watch()


def install(loop: asyncio.AbstractEventLoop) -> Callbacks:
    """Number the branches on this loop, once for all engines on it. Return the loop's callbacks."""
    factory: Any = loop.get_task_factory()
    if isinstance(factory, BranchingFactory):
        factory.users += 1
    else:
        factory = BranchingFactory(factory, callbacks_of(loop))
        loop.set_task_factory(factory)
    return factory.callbacks  # type: ignore[no-any-return]


def uninstall(loop: asyncio.AbstractEventLoop) -> None:
    """Restore the loop's own factory when no engine needs ours."""
    factory: Any = loop.get_task_factory()
    if isinstance(factory, BranchingFactory):
        factory.users -= 1
        if factory.users == 0:
            loop.set_task_factory(factory.inner)
            factory.callbacks.close()
            factory.generators.close()
