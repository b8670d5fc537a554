"""The queues of a store for blocking code."""

from __future__ import annotations

from .blocking_calls import BlockingPart, blocking
from .queues import Queues


class BlockingQueues(BlockingPart[Queues]):
    """The queues of a blocking engine: the methods of `engine.queues`, without `await`."""

    get = blocking(Queues.get)
    list = blocking(Queues.list)
    reset = blocking(Queues.reset)
    set = blocking(Queues.set)
