"""While a store does not answer: what is logged, once and then every so often, and how long an end waits for it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..ports import Store

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


@contextlib.contextmanager
def cut_off_after(seconds: float, store: Store) -> Iterator[None]:
    """Whatever still waits for an answer of the store after so long is told that there will be none."""
    cut_off: Callable[[], None] | None = getattr(store, "cut_off", None)  # only one across a socket has it
    if cut_off is None:
        yield
        return

    def cut() -> None:
        log.warning("the store has not answered for %.0f s, and is waited for no longer", seconds)
        cut_off()

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
