"""The parts of an engine that a test may replace: the performer of steps, executors, thread pools, the heartbeat."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..executors.thread import ThreadPool, Threads
from ..kernel.step import perform
from .heartbeat import HeartThread

if TYPE_CHECKING:
    from ..ports import Executor
    from .heartbeat import Heart


@dataclass(frozen=True, slots=True)
class Parts:
    """Functions by which an engine performs a step, makes a thread pool, and makes the heart of its worker.

    `threads` takes the maximum number of threads and their name prefix. `heart` takes the worker. `executors` replaces
    executors of the engine by name: `inline`, `thread`.
    """

    perform: Callable[[Any], Coroutine[Any, Any, None]] = perform
    threads: Callable[[int, str], Threads] = ThreadPool
    heart: Callable[[Any], Heart] = HeartThread
    executors: Mapping[str, Executor] = field(default_factory=dict)
