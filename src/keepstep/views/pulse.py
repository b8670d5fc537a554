"""The health of the whole at a glance: what goes on, what needs a person, what is wrong, and the last hour."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..model import FINISHED, RunQuery, Status
from ..policies.breaker import CLOSED
from .counts import Count, counts
from .top import Sample, sample
from .wording import duration

if TYPE_CHECKING:
    from ..history.host import CommandHost

#: Statuses of runs that are on their way.
IN_FLIGHT = frozenset(Status) - FINISHED - {Status.SET_ASIDE}
#: Seconds of one bar of the chart, and the number of bars: an hour.
BAR_SECONDS = 120
BARS = 30
#: Runs of one bar that are counted at most, so that a chart of a busy store is drawn at once.
MOST_IN_BAR = 10_000
#: Seconds for which the chart is used again, and those for which the rest is.
CHART_SECONDS = 10.0
FRESH_SECONDS = 1.0
#: Seconds for which a run may be ready before its queue counts as late.
LATE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Bar:
    """Runs that were created in one span of time, by what has become of them."""

    at: datetime
    completed: int
    failed: int
    open: int

    @property
    def all(self) -> int:
        """The number of these runs."""
        return self.completed + self.failed + self.open


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that is wrong with the whole. `page` shows more, and `command` does."""

    text: str
    page: str
    command: str


@dataclass(frozen=True, slots=True)
class Pulse:
    """The state of a store at one time."""

    sample: Sample
    in_flight: Count
    running: Count
    needs_person: Count
    open_failures: Count
    #: When the oldest run became ready that waits to begin; None if none waits.
    oldest_at: datetime | None
    bars: tuple[Bar, ...]
    alarms: tuple[Alarm, ...]


async def pulse_of(host: CommandHost) -> Pulse:
    """Return the health of a store. Many callers share one look at it."""
    known = _KNOWN.setdefault(host, _Known())
    return await asyncio.shield(known.pulse(host))


class _Known:
    """The last look at a store: its task, and when it was begun."""

    def __init__(self) -> None:
        self._pulse: tuple[float, asyncio.Task[Pulse]] | None = None
        self._bars: tuple[float, tuple[Bar, ...]] | None = None

    def pulse(self, host: CommandHost) -> asyncio.Task[Pulse]:
        loop = asyncio.get_running_loop()
        if self._pulse is not None:
            begun, task = self._pulse
            if not task.done() or (
                loop.time() - begun < FRESH_SECONDS and not task.cancelled() and not task.exception()
            ):
                return task
        task = loop.create_task(self._look(host))
        self._pulse = loop.time(), task
        return task

    async def _look(self, host: CommandHost) -> Pulse:
        seen = await host.call(sample, host.store)
        flying, running, needed, failures = await counts(
            host,
            [
                RunQuery(status=IN_FLIGHT),
                RunQuery(status=frozenset({Status.RUNNING, Status.RECOVERING})),
                RunQuery(needs_person=True),
                RunQuery(open_failure=True),
            ],
        )
        oldest = min((one.counts.oldest_at for one in seen.queues if one.counts.oldest_at is not None), default=None)
        alarms = tuple(_alarms(seen, flying, oldest))
        return Pulse(seen, flying, running, needed, failures, oldest, await self._chart(host), alarms)

    async def _chart(self, host: CommandHost) -> tuple[Bar, ...]:
        now = asyncio.get_running_loop().time()
        if self._bars is None or now - self._bars[0] >= CHART_SECONDS:
            self._bars = now, await _bars(host, datetime.now(UTC))
        return self._bars[1]


#: By engine, so that the pulse of a closed engine is forgotten.
_KNOWN: WeakKeyDictionary[CommandHost, _Known] = WeakKeyDictionary()

_FAILED = frozenset({Status.FAILED, Status.SET_ASIDE, Status.CANCELLED})


async def _bars(host: CommandHost, now: datetime) -> tuple[Bar, ...]:
    last = now.timestamp() // BAR_SECONDS * BAR_SECONDS
    begins = [datetime.fromtimestamp(last - BAR_SECONDS * back, UTC) for back in reversed(range(BARS))]
    asked = [
        RunQuery(status=statuses, created_after=at, created_before=at + timedelta(seconds=BAR_SECONDS))
        for at in begins
        for statuses in (frozenset({Status.COMPLETED}), _FAILED, IN_FLIGHT)
    ]
    found = [one.number for one in await counts(host, asked, MOST_IN_BAR)]
    return tuple(Bar(at, *found[3 * number : 3 * number + 3]) for number, at in enumerate(begins))


def _alarms(seen: Sample, flying: Count, oldest: datetime | None) -> Iterable[Alarm]:
    if flying.number and not any(one.worker.alive and one.worker.claims for one in seen.workers):
        yield Alarm("No living worker claims runs.", "/workers", "keepstep worker FILE.py")
    if seen.halted:
        yield Alarm(
            f"{seen.halted:,} runs are halted, because the store could not save.", "/workers", "keepstep doctor"
        )
    elif seen.save_failures:
        yield Alarm(f"{seen.save_failures:,} saves failed and were tried again.", "/workers", "keepstep doctor")
    for one in seen.services:
        if one.breaker != CLOSED:
            yield Alarm(
                f"The breaker of {one.name} is {one.breaker}.", "/services", f"keepstep services show {one.name}"
            )
    late = 0.0 if oldest is None else (seen.at - oldest).total_seconds()
    if late > LATE_SECONDS:
        yield Alarm(f"A run has been ready for {duration(late)} and has not begun.", "/queues", "keepstep top")
