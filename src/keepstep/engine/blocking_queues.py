"""The queues and channels of a store for blocking code."""

from __future__ import annotations

from .blocking_calls import BlockingPart, blocking
from .channels import Channels
from .queues import Queues


class BlockingQueues(BlockingPart[Queues]):
    """The queues of a blocking engine: the methods of `engine.queues`, without `await`."""

    get = blocking(Queues.get)
    list = blocking(Queues.list)
    reset = blocking(Queues.reset)
    set = blocking(Queues.set)


class BlockingChannels(BlockingPart[Channels]):
    """The channels of a blocking engine: the methods of `engine.channels`, without `await`."""

    list = blocking(Channels.list)
    test = blocking(Channels.test)
