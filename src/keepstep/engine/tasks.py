"""The tasks of a run's code: a task factory that wraps the loop's own makes each of them a numbered branch."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from contextvars import copy_context
from types import CoroutineType, FrameType
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..ports import CURRENT
from .callbacks import callbacks_of

if TYPE_CHECKING:
    from .branch import Branch
    from .callbacks import Callbacks

#: To the loop the first is the order to end, and to the coroutine that awaits the task the second is one.
_ORDERS = (SystemExit, GeneratorExit)
#: The code in asyncio that makes tasks of a set of coroutines, and how many frames lie between it and a factory.
_AS_COMPLETED: Any = getattr(asyncio.tasks, "_AsCompletedIterator", None)
_GOES_THROUGH_A_SET = (asyncio.as_completed if _AS_COMPLETED is None else _AS_COMPLETED.__init__).__code__
_FRAMES_TO_FACTORY = 5
#: asyncio's factory of tasks that begin where they are made, since Python 3.12.
_EAGER = getattr(asyncio, "eager_task_factory", object())


class Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose `sys.exit` is an error like others, and does not end the worker.

    No coroutine of its own: one that is cancelled before it starts would leave the other behind, never awaited.
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
        return getattr(self._inner, name)  # its frame and its name, for those who look inside


def interrupted() -> None:
    """Hand the run back whose code or step has met a KeyboardInterrupt, which goes on to end the program."""
    scope = CURRENT.get()
    if scope is not None:
        scope.run.interrupt()


def left(error: BaseException) -> RuntimeError:
    """What code meant by leaving with `sys.exit` and its like: an error that ends the run or step, not the worker."""
    return RuntimeError(f"{type(error).__name__}: {error}")


class RunTask(asyncio.Task[Any]):
    """A task of a run's code.

    asyncio keeps tasks in sets and goes through them: `TaskGroup` to cancel, `asyncio.wait` to give what is done. The
    hash follows from the branch, so that this order is the same on every replay; a plain task hashes its address.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], branch: Branch, **options: Any) -> None:
        self.branch = branch  # first, since asyncio adds the task to a set before it is fully made
        #: Whether neither the run's code nor the engine has cancelled it.
        self.cancelled_from_outside = False
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.branch.order

    def cancel(self, msg: Any | None = None) -> bool:
        if not self.done() and self.branch.run.is_outside():
            self.cancelled_from_outside = True
        return super().cancel(msg)


def _is_from_a_set() -> bool:
    """Whether a task is being made by `asyncio.as_completed`, which goes through a set of what it was given."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - the way to look at one's callers
    for _ in range(_FRAMES_TO_FACTORY):
        if frame is None:
            return False
        if frame.f_code is _GOES_THROUGH_A_SET:
            return True
        frame = frame.f_back
    return False


class BranchingFactory:
    """Makes every task that a workflow's code creates a branch of its run; other tasks are none of its business."""

    def __init__(self, inner: Any, callbacks: Callbacks) -> None:
        self.inner = inner
        self.callbacks = callbacks
        self.users = 1

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Any:
        scope = CURRENT.get()
        if scope is None:
            return self._make(loop, coroutine, options)
        plain = type(coroutine) is CoroutineType
        if plain and not scope.in_step and _is_from_a_set():
            coroutine.close()
            raise DefinitionError(
                "asyncio.as_completed begins bare coroutines in the order of their addresses, which differs on replay; "
                "use ks.as_completed, or make them tasks first with asyncio.create_task"
            )
        if plain:  # a call of ours raises nothing that would end the loop
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
            if options.get("eager_start") is None:  # a loop may pass on that nobody has said
                options["eager_start"] = True
            task = RunTask(coroutine, branch, loop=loop, **options)
        else:  # somebody's own, which decides what kind of task it makes
            task = self.inner(loop, coroutine, **options)
        scope.run.adopt(task)
        return task

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], options: dict[str, Any]
    ) -> Any:
        if self.inner is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        return self.inner(loop, coroutine, **options)


def install(loop: asyncio.AbstractEventLoop) -> Callbacks:
    """Number the branches on this loop, once for all engines on it; gives the loop's callbacks."""
    factory: Any = loop.get_task_factory()
    if isinstance(factory, BranchingFactory):
        factory.users += 1
    else:
        factory = BranchingFactory(factory, callbacks_of(loop))
        loop.set_task_factory(factory)
    return factory.callbacks  # type: ignore[no-any-return]


def uninstall(loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop its own factory back when no engine needs ours."""
    factory: Any = loop.get_task_factory()
    if isinstance(factory, BranchingFactory):
        factory.users -= 1
        if factory.users == 0:
            loop.set_task_factory(factory.inner)
            factory.callbacks.close()
