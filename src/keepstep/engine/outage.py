"""What is logged while a store does not answer: why, once and then every so often, however many ask it."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("keepstep")

#: The same trouble is told again after this.
AGAIN_SECONDS = 10.0


class Outage:
    """Tells of a store's trouble, from any thread; what was told a moment ago is only worth a debug line."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._told: dict[str, float] = {}

    def tell(self, what: str, error: Exception) -> None:
        why, now = str(error), self._seconds()
        known = now - self._told.get(why, float("-inf")) < AGAIN_SECONDS
        if not known:
            self._told = {**{one: at for one, at in self._told.items() if now - at < AGAIN_SECONDS}, why: now}
        log.log(logging.DEBUG if known else logging.WARNING, "%s: %s", what, why)
