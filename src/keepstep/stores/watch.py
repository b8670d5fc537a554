"""Detection of dead workers: a worker is dead if its process has ended, or if it was silent for its whole lease."""

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
    """Measures the silence of other workers, as seen by a worker that kept renewing its own lease.

    Silence proves nothing while the observer itself could not write, was stopped, or had just started, because an
    outage silences every worker. A span of observation therefore ends when a renewal of the observer fails or is late.
    It is measured by the observer's own monotonic clock, so machines need not agree about the time.
    """

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        self._clock = clock
        self._lease_seconds = lease_seconds
        #: Longest gap in seconds between renewals of one span. A heartbeat is due after a third of a lease.
        self._longest_gap_seconds = lease_seconds / 2
        self._spans: dict[str, tuple[float, float]] = {}  # observer: first and newest renewal of its span
        self._beats: dict[str, tuple[Hashable, float]] = {}  # worker: newest heartbeat, and when it was first seen

    def renewed(self, observer: str) -> None:
        """Record that a worker of this process has renewed its own lease."""
        now = self._clock.boot()[1]
        first, newest = self._spans.get(observer, (now, now))
        self._spans[observer] = (first if now - newest <= self._longest_gap_seconds else now, now)

    def failed(self, observer: str) -> None:
        """Record that a worker of this process could not renew its own lease; its observation starts again."""
        self._spans.pop(observer, None)

    def observe(self, heartbeats: Mapping[str, Hashable]) -> None:
        """Record the newest heartbeat of every registered worker, and when it was first seen here."""
        now, before = self._clock.boot()[1], self._beats
        self._beats = {
            worker: before[worker] if worker in before and before[worker][0] == beat else (beat, now)
            for worker, beat in heartbeats.items()
        }

    def is_silent(self, observer: str, worker: str, lease_seconds: object) -> bool:
        """Whether a worker has not renewed for its whole lease, while the observer renewed its own."""
        now = self._clock.boot()[1]
        first, newest = self._spans.get(observer, (now, now))
        _, seen = self._beats.get(worker, (None, now))
        is_unbroken = now - newest <= self._longest_gap_seconds
        return is_unbroken and now - max(first, seen) > self.lease_of(lease_seconds)

    def lease_of(self, stored: object) -> float:
        """Return the length of a worker's lease as stored; our own where it is unknown or damaged."""
        if isinstance(stored, float) and math.isfinite(stored) and stored >= 0:
            return stored
        return self._lease_seconds


# -- processes of this machine -----------------------------------------------------------------------------------------

_IDENTITY = re.compile(r"(?P<place>.+) (?P<pid>[1-9]\d{0,9}) (?P<started>\d+)")


def process_identity() -> str:
    """Return an identity of this process by which others in the same place can detect its end; empty if unsupported.

    The place is the host name, the boot of the machine and the namespace of its process ids. Containers may share a
    host name, and then one id means a different process in each of them.
    """
    pid = os.getpid()
    place = _place(pid)
    started = None if place is None else _start_time(pid)
    return "" if started is None else f"{place} {pid} {started[1]}"


def has_ended(identity: str) -> bool:
    """Whether a process provably ended: it ran in the place of this one, and no longer exists there."""
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
    except OSError:  # the process belongs to another user, and is alive
        pass
    now = _start_time(pid)
    return now is not None and (now[0] in "ZX" or now[1] != found["started"])


@cache
def _place(pid: int) -> str | None:
    """Return host, boot and namespace of this process; None if /proc is missing or shows another namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        shown = str(Path("/proc/self").readlink())
    except (OSError, ValueError):
        return None
    return f"{socket.gethostname()} {boot} {namespace}" if shown == str(pid) else None


def _start_time(pid: int) -> tuple[str, str] | None:
    """Return the state of a process and the tick of its start; None if /proc does not show it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else None
