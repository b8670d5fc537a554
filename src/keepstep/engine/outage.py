"""Handling of an unresponsive store: throttled warnings, and a limit on the wait at the end."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from ..ports import OptionalStore, Store, optional

log = logging.getLogger("keepstep")

#: Seconds before the same problem is logged as a warning again.
AGAIN_SECONDS = 10.0


class Outage:
    """Logs problems of a store, from any thread; a repeated problem is logged at debug level."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._logged_at: dict[str, float] = {}

    def log(self, what: str, error: Exception) -> None:
        why, now = str(error), self._seconds()
        known = now - self._logged_at.get(why, float("-inf")) < AGAIN_SECONDS
        if not known:
            self._logged_at = {**{one: at for one, at in self._logged_at.items() if now - at < AGAIN_SECONDS}, why: now}
        log.log(logging.DEBUG if known else logging.WARNING, "%s: %s", what, why)


@contextlib.contextmanager
def cut_off_after(seconds: float, store: Store) -> Iterator[None]:
    """Interrupt everything that still waits for the store after `seconds`."""
    cut_off = optional(store, OptionalStore.cut_off)
    if cut_off is None:
        yield
        return

    def cut() -> None:
        log.warning("the store has not answered for %.0f s; giving up", seconds)
        cut_off()

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
