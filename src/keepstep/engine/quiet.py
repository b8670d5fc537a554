"""Tells whether every task of a run is inside a wait that Keepstep knows.

Only then can the run be put away, or judged stuck.

A task that waits for anything else (a socket, a plain sleep, a future of someone's) keeps its run in memory.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any

from .branch import Gate, Pending

if TYPE_CHECKING:
    from .context import RunContext


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


#: What code that is suspended can be.
_SUSPENDED = (CoroutineType, GeneratorType, AsyncGeneratorType)


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
    return _is_plumbing(task, run)


def _is_ours(future: Any, run: RunContext) -> bool:
    if isinstance(future, Pending | Gate):
        return True
    if future in run.tasks:
        return True
    shielded = _shielded(future)
    if shielded is not None:
        return _are_ours([shielded], run)
    children = getattr(future, "_children", None)  # of asyncio.gather
    return children is not None and _are_ours(children, run)


def _are_ours(futures: Iterable[Any], run: RunContext) -> bool:
    """Whether something is still waited for, and all of it is ours; after the last of them the waiter moves."""
    pending = [future for future in futures if not future.done()]
    return bool(pending) and all(_is_ours(future, run) for future in pending)


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
        if _part(inner, "code") is not None:
            frame = inner
        inner = _awaited_by(inner)
    if frame is None:
        return False
    code = _part(frame, "code")
    if "asyncio" not in code.co_filename:
        return False
    if code.co_qualname in _PLUMBING:
        return True
    if code.co_qualname in _WAITERS:
        local = _part(frame, "frame").f_locals
        waited = local.get("fs") or ([local["fut"]] if "fut" in local else list(local.get("todo", ())))
        return _are_ours(waited, run)
    return False


def _part(coroutine: Any, name: str) -> Any:
    """The code or the frame of a coroutine, a generator or an async generator; None of anything else."""
    return (
        getattr(coroutine, f"cr_{name}", None)
        or getattr(coroutine, f"gi_{name}", None)
        or getattr(coroutine, f"ag_{name}", None)
    )


def _awaited_by(awaiting: Any) -> Any:
    """What something that is suspended waits for in turn; None at the innermost."""
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(awaiting, name):
            return getattr(awaiting, name)
    # The step of an async generator, and what `__await__` of a coroutine gives, keep what they drive to themselves.
    return next((one for one in gc.get_referents(awaiting) if isinstance(one, _SUSPENDED)), None)


def _has_timers(run: RunContext) -> bool:
    """A plain timer of the code (`asyncio.timeout` round a long sleep) would be lost if the run were put away."""
    return run in run.rest.callbacks.timers()
