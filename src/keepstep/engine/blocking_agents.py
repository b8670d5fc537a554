"""The agents of a store for blocking code."""

from __future__ import annotations

from .agents import Agents
from .blocking_calls import BlockingPart, blocking


class BlockingAgents(BlockingPart[Agents]):
    """The agents of a blocking engine: the methods of `engine.agents`, without `await`."""

    drain = blocking(Agents.drain)
    get = blocking(Agents.get)
    list = blocking(Agents.list)
    probe = blocking(Agents.probe)
    resume = blocking(Agents.resume)
