"""Detects whether every task of a run is inside a wait that Keepstep knows.

Only then can the run be parked, or judged stuck. A task that waits for anything else (a socket, a plain sleep, a
foreign future) keeps its run in memory.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any

from .calls import CompositeWait, Pending

if TYPE_CHECKING:
    from .driver import RunDriver


#: asyncio's own functions that wait for other tasks of the same program.
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


#: The types of suspended code.
_SUSPENDED = (CoroutineType, GeneratorType, AsyncGeneratorType)


def only_waits(run: RunDriver) -> bool:
    """Whether only an outcome that Keepstep delivers can move the run."""
    if run.thread.busy or run.main is None or run.main.done():
        return False
    tasks = [task for task in (run.main, *run.tasks) if isinstance(task, asyncio.Task) and not task.done()]
    return all(_waits(task, run) for task in tasks) and not _has_timers(run)


def _waits(task: asyncio.Task[Any], run: RunDriver) -> bool:
    future = getattr(task, "_fut_waiter", None)
    if future is None or future.done():
        return False  # about to move
    if _is_ours(future, run):
        return True
    return _is_plumbing(task, run)


def _is_ours(future: Any, run: RunDriver) -> bool:
    if isinstance(future, Pending | CompositeWait):
        return True
    if future in run.tasks:
        return True
    shielded = _shielded(future)
    if shielded is not None:
        return _are_ours([shielded], run)
    children = getattr(future, "_children", None)  # of asyncio.gather
    return children is not None and _are_ours(children, run)


def _are_ours(futures: Iterable[Any], run: RunDriver) -> bool:
    """Whether something is still awaited and all of it is ours; after the last of them the waiter moves."""
    pending = [future for future in futures if not future.done()]
    return bool(pending) and all(_is_ours(future, run) for future in pending)


def _shielded(future: Any) -> Any:
    """Return the future behind one of `asyncio.shield`, or None if it is another kind."""
    for callback, _ in getattr(future, "_callbacks", None) or ():
        if getattr(callback, "__qualname__", "") == "shield.<locals>._outer_done_callback":
            names = callback.__code__.co_freevars
            return callback.__closure__[names.index("inner")].cell_contents
    return None


def _is_plumbing(task: asyncio.Task[Any], run: RunDriver) -> bool:
    """Whether the innermost coroutine is asyncio's and waits for tasks of this run."""
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
    """Return the code or the frame of a coroutine, a generator or an async generator; None for anything else."""
    return (
        getattr(coroutine, f"cr_{name}", None)
        or getattr(coroutine, f"gi_{name}", None)
        or getattr(coroutine, f"ag_{name}", None)
    )


def _awaited_by(awaiting: Any) -> Any:
    """Return what a suspended object waits for, or None at the innermost."""
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(awaiting, name):
            return getattr(awaiting, name)
    # An async generator's step, and the result of a coroutine's `__await__`, hide the object that they drive.
    return next((one for one in gc.get_referents(awaiting) if isinstance(one, _SUSPENDED)), None)


def _has_timers(run: RunDriver) -> bool:
    """Whether the code has a plain timer, such as `asyncio.timeout`, which would be lost if the run were parked."""
    return run in run.idle_watch.callbacks.timers()
