"""The cache policy of a step: how long its result serves equal calls of other runs, and which calls are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..checks import check_seconds
from ..errors import DefinitionError

#: Shortest accepted time to live in seconds. A smaller one is probably a mistake in the unit.
SHORTEST_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Cache:
    """Let a result serve equal calls of the step in all runs of the store, for `ttl` seconds.

    Calls with equal input are equal. `key`, a function of the step's arguments, returns what must be equal instead.
    Without `ttl`, the result serves until the run that made it is removed.
    """

    ttl: float | timedelta | None = None
    key: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.ttl is not None:
            object.__setattr__(self, "ttl", check_seconds(self.ttl, "ttl=", SHORTEST_SECONDS))
        if self.key is not None and not callable(self.key):
            raise DefinitionError(f"key= must be a function of the step's arguments, got {self.key!r}")

    def identity(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what equal calls have in common, or None if that is their whole input."""
        return None if self.key is None else (self.key(*args, **kwargs),)

    def expires_at(self, now: float) -> float | None:
        """Return the time from which a result that is made now serves no longer."""
        return None if self.ttl is None else now + float(self.ttl)  # type: ignore[arg-type]
