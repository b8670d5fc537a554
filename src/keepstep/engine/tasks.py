"""Branches are numbered where they are made: a task factory that wraps the loop's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import copy_context
from typing import Any

from ..ports import CURRENT


class BranchingFactory:
    """Makes every task that a workflow's code creates a branch of its run; other tasks are none of its business."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.users = 1

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Any:
        scope = CURRENT.get()
        if scope is None or scope.in_step:
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
