"""Who may be given up for dead: a worker whose process has ended, or one that was silent for the whole of its lease."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path

from ..ports import Clock


class Watch:
    """Measures how long other workers were silent, as seen by a worker that renewed its own lease all the while.

    The silence of others proves nothing while the observer itself could not write, was stopped, or had just started:
    an outage silences everyone. So a span of observation ends when a renewal of the observer fails or comes late, and
    counts by the observer's own clock, which nobody sets. No two machines have to agree about the time.
    """

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        self._clock = clock
        self._lease_seconds = lease_seconds
        #: A heartbeat comes after a third of a lease. Renewals further apart than half a lease are no unbroken series.
        self._longest_gap_seconds = lease_seconds / 2
        self._spans: dict[str, tuple[float, float]] = {}  # observer: its first and its newest renewal of the series
        self._beats: dict[str, tuple[Hashable, float]] = {}  # worker: its newest heartbeat, and when it was first seen

    def renewed(self, observer: str) -> None:
        """Note that a worker of this process has renewed its own lease."""
        now = self._clock.boot()[1]
        first, newest = self._spans.get(observer, (now, now))
        self._spans[observer] = (first if now - newest <= self._longest_gap_seconds else now, now)

    def failed(self, observer: str) -> None:
        """Note that a worker of this process could not renew its own lease: its observation starts again."""
        self._spans.pop(observer, None)

    def observe(self, heartbeats: Mapping[str, Hashable]) -> None:
        """Note the newest heartbeat of every worker that is enrolled, and when it was first seen here."""
        now, before = self._clock.boot()[1], self._beats
        self._beats = {
            worker: before[worker] if worker in before and before[worker][0] == beat else (beat, now)
            for worker, beat in heartbeats.items()
        }

    def is_silent(self, observer: str, worker: str, lease_seconds: object) -> bool:
        """Whether a worker has not renewed for the whole of its lease, while the observer renewed its own."""
        now = self._clock.boot()[1]
        first, newest = self._spans.get(observer, (now, now))
        _, seen = self._beats.get(worker, (None, now))
        is_unbroken = now - newest <= self._longest_gap_seconds
        return is_unbroken and now - max(first, seen) > self.lease_of(lease_seconds)

    def lease_of(self, stored: object) -> float:
        """How long a worker's lease lasts, as stored with it; as long as our own where that is unknown or damaged."""
        if isinstance(stored, float) and math.isfinite(stored) and stored >= 0:
            return stored
        return self._lease_seconds


# -- processes of this machine -----------------------------------------------------------------------------------------

_IDENTITY = re.compile(r"(?P<place>.+) (?P<pid>[1-9]\d{0,9}) (?P<started>\d+)")


def process_identity() -> str:
    """Name this process, so that another in the same place can tell whether it has ended; empty where none could.

    The place is the host name, the boot of the machine and the namespace of its process numbers: containers may share
    a host name, and then one number means a different process in each of them.
    """
    pid = os.getpid()
    place = _place(pid)
    started = None if place is None else _start_time(pid)
    return "" if started is None else f"{place} {pid} {started[1]}"


def has_ended(identity: str) -> bool:
    """Whether a process provably ended: it ran in the place of this one, and is there no more."""
    found = _IDENTITY.fullmatch(identity)
    if found is None or found["place"] != _place(os.getpid()):
        return False
    pid = int(found["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OverflowError:
        return False
    except OSError:  # it belongs to another user, and lives
        pass
    now = _start_time(pid)
    return now is not None and (now[0] in "ZX" or now[1] != found["started"])


@cache
def _place(pid: int) -> str | None:
    """The host, boot and namespace of this process; None where /proc does not tell, or shows another namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        shown = str(Path("/proc/self").readlink())
    except (OSError, ValueError):
        return None
    return f"{socket.gethostname()} {boot} {namespace}" if shown == str(pid) else None


def _start_time(pid: int) -> tuple[str, str] | None:
    """The state of a process and the tick at which it started; None where /proc does not show it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else None
