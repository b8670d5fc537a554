"""Gives up connections to PostgreSQL that have not answered for too long, so that their work goes on with others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger("keepstep")

#: Connections are looked at so many times within the longest silence that is allowed.
_LOOKS = 5


class Watched(Protocol):
    """Who has connections that may fall silent."""

    def give_up_silent(self, seconds: float) -> int:
        """End the connections that have been asked something and have not answered for so long; how many there were."""


class Watchdog:
    """A thread that looks for silent connections.

    The system notices a peer that acknowledges nothing. It does not notice a proxy or a firewall that acknowledges
    everything and forwards nothing: whoever waits for such an answer would wait for ever.
    """

    def __init__(self, watched: Sequence[Watched], seconds: float, name: str) -> None:
        self._watched = watched
        self._seconds = seconds
        self._name = name
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="keepstep-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds / _LOOKS):
            for one in self._watched:
                if given_up := one.give_up_silent(self._seconds):
                    log.warning(
                        "%s has not answered on %d connections for %g s: they are given up, and others are made",
                        *(self._name, given_up, self._seconds),
                    )
