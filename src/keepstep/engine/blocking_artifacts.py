"""The artifacts of a store for blocking code."""

from __future__ import annotations

from .artifacts import Artifacts
from .blocking_calls import BlockingPart, blocking


class BlockingArtifacts(BlockingPart[Artifacts]):
    """The artifacts of a blocking engine: the methods of `engine.artifacts`, without `await`."""

    list = blocking(Artifacts.list)
    remove = blocking(Artifacts.remove)
    sweep = blocking(Artifacts.sweep)
    verify = blocking(Artifacts.verify)

    @property
    def artifacts(self) -> Artifacts:
        """The artifacts for async code."""
        return self._target
