"""Branches are numbered where they are made: a task factory that wraps the loop's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import copy_context
from types import CoroutineType
from typing import Any

from ..ports import CURRENT

#: To the loop the first is the order to end, and to the coroutine that awaits the task the second is one.
_ORDERS = (SystemExit, GeneratorExit)


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

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except _ORDERS as order:
            raise left(order) from order

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # its frame and its name, for those who look inside


def left(error: BaseException) -> RuntimeError:
    """What code meant by leaving with `sys.exit` and its like: an error that ends the run or step, not the worker."""
    return RuntimeError(f"{type(error).__name__}: {error}")


class BranchingFactory:
    """Makes every task that a workflow's code creates a branch of its run; other tasks are none of its business."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.users = 1

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Any:
        scope = CURRENT.get()
        if scope is None:
            return self._make(loop, coroutine, options)
        if type(coroutine) is CoroutineType:  # a call of ours raises nothing that would end the loop
            coroutine = Contained(coroutine)
        if scope.in_step:
            return self._make(loop, coroutine, options)
        given = options.get("context")
        context = copy_context() if given is None else given.copy()
        context.run(CURRENT.set, scope.child())
        options["context"] = context
        task = self._make(loop, coroutine, options)
        scope.run.adopt(task)
        return task

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], options: dict[str, Any]
    ) -> Any:
        if self.inner is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        return self.inner(loop, coroutine, **options)


def install(loop: asyncio.AbstractEventLoop) -> None:
    """Number the branches on this loop, once for all engines on it."""
    factory: Any = loop.get_task_factory()
    if isinstance(factory, BranchingFactory):
        factory.users += 1
    else:
        made: Any = BranchingFactory(factory)
        loop.set_task_factory(made)


def uninstall(loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop its own factory back when no engine needs ours."""
    factory: Any = loop.get_task_factory()
    if isinstance(factory, BranchingFactory):
        factory.users -= 1
        if factory.users == 0:
            loop.set_task_factory(factory.inner)
