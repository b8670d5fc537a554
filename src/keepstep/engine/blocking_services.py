"""The services of a store for blocking code."""

from __future__ import annotations

from .blocking_calls import BlockingPart, blocking
from .services import Services


class BlockingServices(BlockingPart[Services]):
    """The services of a blocking engine: the methods of `engine.services`, without `await`."""

    close_breaker = blocking(Services.close_breaker)
    get = blocking(Services.get)
    list = blocking(Services.list)
    open_breaker = blocking(Services.open_breaker)
    reset = blocking(Services.reset)
    set = blocking(Services.set)
