"""Tells whether every task of a run is inside a wait that Keepstep knows.

Only then can the run be put away, or judged stuck.

A task that waits for anything else (a socket, a plain sleep, a future of someone's) keeps its run in memory.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..ports import CURRENT
from .branch import Pending

if TYPE_CHECKING:
    from .context import RunContext


class Gate(asyncio.Future[None]):
    """What a composite call waits on: several calls, none of them alone."""


#: asyncio's own ways to wait for other tasks of the same program.
_PLUMBING = frozenset(
    {
        "TaskGroup.__aexit__",
        "Event.wait",
        "Condition.wait",
        "Lock.acquire",
        "Semaphore.acquire",
        "Queue.get",
        "Queue.put",
        "Queue.join",
        "Barrier.wait",
        "Barrier._block",
        "Barrier._wait",
    }
)
_WAITERS = frozenset(
    {"wait", "_wait", "wait_for", "_AsCompletedIterator._wait_for_one", "as_completed.<locals>._wait_for_one"}
)


def only_waits(run: RunContext) -> bool:
    """Whether nothing but an outcome that Keepstep delivers can move the run."""
    if run.thread_busy or run.main is None or run.main.done():
        return False
    tasks = [task for task in (run.main, *run.tasks) if isinstance(task, asyncio.Task) and not task.done()]
    return all(_waits(task, run) for task in tasks) and not _has_timers(run)


def _waits(task: asyncio.Task[Any], run: RunContext) -> bool:
    future = getattr(task, "_fut_waiter", None)
    if future is None or future.done():
        return False  # about to move
    if _is_ours(future, run):
        return True
    children = getattr(future, "_children", None)
    if children is not None:  # asyncio.gather
        return all(child.done() or _is_ours(child, run) for child in children)
    return _is_plumbing(task, run)


def _is_ours(future: Any, run: RunContext) -> bool:
    if isinstance(future, Pending | Gate):
        return True
    if future in run.tasks:
        return True
    shielded = _shielded(future)
    if shielded is not None:
        return _is_ours(shielded, run)
    children = getattr(future, "_children", None)
    return children is not None and all(child.done() or _is_ours(child, run) for child in children)


def _shielded(future: Any) -> Any:
    """What a future of `asyncio.shield` stands before, or None if it is no such future."""
    for callback, _ in getattr(future, "_callbacks", None) or ():
        if getattr(callback, "__qualname__", "") == "shield.<locals>._outer_done_callback":
            names = callback.__code__.co_freevars
            return callback.__closure__[names.index("inner")].cell_contents
    return None


def _is_plumbing(task: asyncio.Task[Any], run: RunContext) -> bool:
    """The innermost coroutine is asyncio's, waiting for tasks of this run."""
    frame: Any = None
    inner: Any = task.get_coro()
    while inner is not None:
        code = getattr(inner, "cr_code", None) or getattr(inner, "gi_code", None)
        if code is not None:
            frame = inner
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    if frame is None:
        return False
    code = getattr(frame, "cr_code", None) or frame.gi_code
    if "asyncio" not in code.co_filename:
        return False
    if code.co_qualname in _PLUMBING:
        return True
    if code.co_qualname in _WAITERS:
        local = (getattr(frame, "cr_frame", None) or frame.gi_frame).f_locals
        waited = local.get("fs") or ([local["fut"]] if "fut" in local else list(local.get("todo", ())))
        return all(future.done() or _is_ours(future, run) for future in waited)
    return False


def _has_timers(run: RunContext) -> bool:
    """A plain timer of the code (`asyncio.timeout` round a long sleep) would be lost if the run were put away."""
    for handle in getattr(run.loop, "_scheduled", None) or ():
        if handle._cancelled or handle._context is None:  # noqa: SLF001
            continue
        scope = handle._context.get(CURRENT)  # noqa: SLF001
        if scope is not None and not scope.in_step and scope.run is run:
            return True
    return False
