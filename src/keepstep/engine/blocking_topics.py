"""The topics of a store for blocking code."""

from __future__ import annotations

from .blocking_calls import BlockingPart, blocking
from .topics import Topics


class BlockingTopics(BlockingPart[Topics]):
    """The topics of a blocking engine: the methods of `engine.topics`, without `await`."""

    get = blocking(Topics.get)
    list = blocking(Topics.list)
    publish = blocking(Topics.publish)
    recent = blocking(Topics.recent)
    recent_raw = blocking(Topics.recent_raw)
