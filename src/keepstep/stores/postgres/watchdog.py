"""A watchdog that closes connections to PostgreSQL: silent ones, so that work continues on others, and unused ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger("keepstep")

#: Number of checks within the longest allowed silence.
_LOOKS = 5


class Watched(Protocol):
    """An owner of connections that may become silent."""

    def give_up_silent(self, seconds: float) -> int:
        """Close connections that have not answered for `seconds`; return their number."""

    def close_unused(self) -> None:
        """Close connections that nobody has used for a while."""


class Watchdog:
    """A thread that looks for silent connections.

    The system detects a peer that acknowledges nothing. It does not detect a proxy or a firewall that acknowledges
    everything and forwards nothing; a client would wait for its answer forever.
    """

    def __init__(self, watched: Sequence[Watched], seconds: float, name: str) -> None:
        self._watched = watched
        self._seconds = seconds
        self._name = name
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="keepstep-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop the watchdog."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds / _LOOKS):
            for one in self._watched:
                one.close_unused()
                if given_up := one.give_up_silent(self._seconds):
                    log.warning(
                        "%s has not answered on %d connections for %g s: they are closed, and others are opened",
                        *(self._name, given_up, self._seconds),
                    )
