"""Counters of a worker: its writes, those that the store could not save, its slow steps, and the resources it uses.

They travel with its heartbeat, so that any process can read them without reading a run.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from ..model import Status

#: Key of the counters among the progress of a worker's runs. No run has such an id.
COUNTS = "ks:counts"
#: Seconds from which on a step counts as slow, and its name is remembered.
SLOW_SECONDS = 0.1
#: Names of slow steps that a worker remembers; those with the least time are forgotten first.
MOST_SLOW = 20
#: Seconds over which rates are measured at least.
RATE_SECONDS = 4.0


class SlowStep(msgspec.Struct, array_like=True):
    """Attempts of one step that took long: their number, their time in all, and the longest."""

    count: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0


class Rates(msgspec.Struct, array_like=True):
    """Runs that ended, steps that completed, attempts that failed, and processor seconds used, for each second."""

    runs: float = 0.0
    steps: float = 0.0
    failures: float = 0.0
    processors: float = 0.0


class Resources(msgspec.Struct, omit_defaults=True, frozen=True):
    """The use of resources by a process: memory, processor time since its start, threads, and runs in its memory.

    `lag_seconds` is the longest time by which its event loop was late since the heartbeat before.
    """

    resident_bytes: int = 0
    processor_seconds: float = 0.0
    threads: int = 0
    open_runs: int = 0
    lag_seconds: float = 0.0


class Counts(msgspec.Struct, omit_defaults=True):
    """Counters of a worker since it started.

    `save_failures` counts commits that the store did not take, each try by itself. `halted` counts runs that were
    halted because the last try failed, too; `halted_at` is the last time, and `halted_by` its error.
    """

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    set_aside: int = 0
    steps: int = 0
    failures: int = 0
    commits: int = 0
    save_failures: int = 0
    halted: int = 0
    halted_at: datetime | None = None
    halted_by: str = ""
    rates: Rates = msgspec.field(default_factory=Rates)
    resources: Resources = Resources()
    slow: dict[str, SlowStep] = msgspec.field(default_factory=dict)

    @property
    def ended(self) -> int:
        """Runs that have ended, in whatever way."""
        return self.completed + self.failed + self.cancelled


_ENDS = {
    Status.COMPLETED: "completed",
    Status.FAILED: "failed",
    Status.CANCELLED: "cancelled",
    Status.SET_ASIDE: "set_aside",
}
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Counts).decode


class Counter:
    """Counts for one worker. Its loop counts, and its heartbeat reads."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._measured: tuple[float, Rates] | None = None

    def slow_step(self, key: str, seconds: float) -> None:
        """Remember an attempt that took long."""
        name = key.rpartition("/")[2].partition("#")[0]
        slow = dict(self.counts.slow)  # replaced, never changed: the heartbeat reads it in another thread
        known = slow.get(name, SlowStep())
        longest = max(known.longest_seconds, seconds)
        slow[name] = SlowStep(known.count + 1, known.seconds + seconds, longest)
        if len(slow) > MOST_SLOW:
            del slow[min(slow, key=lambda one: slow[one].seconds)]
        self.counts.slow = slow

    def ended(self, status: Status) -> None:
        """Count the end of a run, if the status is one."""
        name = _ENDS.get(status)
        if name is not None:
            setattr(self.counts, name, getattr(self.counts, name) + 1)

    def halted(self, error: str, at: datetime) -> None:
        """Count a run whose records could not be saved."""
        counts = self.counts
        counts.halted, counts.halted_at, counts.halted_by = counts.halted + 1, at, error

    def text(self, now: float) -> bytes:
        """Return the counters as JSON, with rates since the last measurement; `now` is a monotonic time."""
        counts = self.counts
        totals = Rates(counts.ended, counts.steps, counts.failures, counts.resources.processor_seconds)
        then, before = self._measured or (now, totals)
        seconds = now - then
        if self._measured is None:
            self._measured = (now, totals)
        elif seconds >= RATE_SECONDS:
            self._measured = (now, totals)
            counts.rates = Rates(
                (totals.runs - before.runs) / seconds,
                (totals.steps - before.steps) / seconds,
                (totals.failures - before.failures) / seconds,
                (totals.processors - before.processors) / seconds,
            )
        return _encode(counts)


def counts_in(progress: dict[str, bytes]) -> Counts:
    """Return the counters in a worker's progress; zeros if there are none, as for an older version."""
    try:
        return _decode(progress[COUNTS]) if COUNTS in progress else Counts()
    except msgspec.MsgspecError:
        return Counts()
