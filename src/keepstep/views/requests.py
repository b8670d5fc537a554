"""Requests of people to a run: pending ones, the cancellation, and the prospects of a signal."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from ..history.audit import newest_entries, transitions
from ..kernel.replay import kept_state
from ..model import Kind, Run, Signal, Status
from ..model.run import handed_over
from ..model.signal import CANCEL, PAUSE, RESUME
from ..model.wakes import sorted_wakes
from ..records.data import SignalData, data_of
from ..records.record import unseal_some
from .finding import lacks_worker
from .waits import Wait, WaitKind, waits_of

if TYPE_CHECKING:
    from ..history.host import CommandHost


@dataclass(frozen=True, slots=True)
class Request:
    """A pending request to a run: `act` is `cancel` or `pause`."""

    act: str
    by: str
    at: datetime | None


async def pending_request(host: CommandHost, run: Run) -> Request | None:
    """Return the pending cancel or pause of an unfinished run, or None; a cancel comes first."""
    if run.status.finished:
        return None
    last: Signal | None = None
    after = 0
    while page := await host.signals(run.id, after):
        after = page[-1].seq
        for signal in page:
            if signal.name == CANCEL:
                return Request("cancel", signal.sender, signal.sent_at)
            if signal.name in (PAUSE, RESUME):
                last = signal
    if last is None or last.name == RESUME or run.status is Status.PAUSED:
        return None
    return Request("pause", last.sender, last.sent_at)


async def refused_signals(host: CommandHost, run: Run, waits: tuple[Wait, ...]) -> tuple[Signal, ...]:
    """Return signals that a parked run has left unread although it waits for their names: they do not fit its wait."""
    names = {wait.name for wait in waits if wait.kind is WaitKind.SIGNAL}
    if run.status is not Status.WAITING or not names or not run.signals:
        return ()
    found, after = list[Signal](), 0
    while page := await host.signals(run.id, after):
        after = page[-1].seq
        found += [signal for signal in page if signal.name in names]
    read, after = set[int](), 0
    kept = await kept_state(host, run)
    for first, last in kept.signals if kept is not None else ():
        read.update(range(first, last + 1))
    while found and (rows := await host.records(run.id, after, kinds=(Kind.SIGNAL.value,))):
        after = rows[-1].seq
        read.update(data_of(record, SignalData).get("signal", 0) for record, _ in unseal_some(rows, run.id))
    return tuple(signal for signal in found if signal.seq not in read)


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The actor, time and reason of a cancellation; `reason` is empty if none was given."""

    by: str
    at: datetime
    reason: str


async def cancellation_of(host: CommandHost, run: Run) -> Cancellation | None:
    """Return the cancellation that ended a run; None if it was not cancelled."""
    if run.status is not Status.CANCELLED:
        return None
    ends = [entry for entry in transitions(await newest_entries(host, run)) if entry.after is Status.CANCELLED]
    return Cancellation(ends[-1].actor, ends[-1].at, ends[-1].reason) if ends else None


class Obstacle(StrEnum):
    """The reason why a run cannot act on a signal at once."""

    NO_WORKER = "no worker"
    PAUSED = "paused"
    SET_ASIDE = "set aside"
    HANDED_OVER = "handed over"
    NOT_AWAITED = "not awaited"


@dataclass(frozen=True, slots=True)
class Prospect:
    """The prospects of a signal.

    `awaited` says whether the run waited for it; it is None for a run that was driven, because only its code knows.
    `waits` is what the run waits for instead, and `elsewhere` where it was handed over to, in words.
    """

    awaited: bool | None
    obstacle: Obstacle | None = None
    waits: tuple[Wait, ...] = ()
    elsewhere: str = ""


async def prospect_of(host: CommandHost, before: Run, signal: str, now: datetime) -> Prospect:
    """Return the prospects of a signal that was sent to a run; `before` is the run as it was then."""
    if before.status.active:
        return Prospect(None)
    if signal in sorted_wakes(before.wakes).signals:
        return Prospect(awaited=True, obstacle=Obstacle.NO_WORKER if await lacks_worker(host, before.id) else None)
    waits, elsewhere = waits_of(before, now), handed_over(before)
    obstacle = Obstacle.NOT_AWAITED
    if before.status is Status.PAUSED:
        obstacle = Obstacle.PAUSED
    elif before.status is Status.SET_ASIDE:
        obstacle = Obstacle.HANDED_OVER if elsewhere else Obstacle.SET_ASIDE
    return Prospect(awaited=False, obstacle=obstacle, waits=waits, elsewhere=elsewhere)
