"""Puts a run away: parks it until something wakes it, pauses it, or hands it back to any worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..model import Status
from ..model.event import STATUS_EVENTS
from ..model.signal import CANCEL, GO, RESERVED, RESOLVE, RESUME, stop_at
from ..policies import RecoverAlone
from ..ports import Answer, Send, Verdict, instant
from ..records.record import Record
from .idle import only_waits
from .inbox import Wait
from .log import Draft, head_move
from .progress import record_saved
from .steering import signal_record, stop_settling
from .stop import DRIVING, SETTLING
from .wakeups import arrive, due_at, seconds_left, services_waited_for, unrecorded_starts, wakes

if TYPE_CHECKING:
    from .driver import RunDriver

log = logging.getLogger("keepstep")

#: Seconds up to which a wait stays in memory. A longer one parks the run as soon as nothing else happens in it.
SHORT_WAIT_SECONDS = 2.0
#: Seconds for which a run that waits for a signal or a child stays in memory, in case the answer comes at once.
LINGER_SECONDS = 1.0
#: How much longer than that a run stays in memory that waits for a place at a service: twice as long.
LINGER_AT_SERVICE = 2.0
#: Seconds after which a run looks again that waits at several services: it is parked at one of them only.
MANY_SERVICES_SECONDS = 10.0


def idle(run: RunDriver) -> None:
    """Pause, hand back or park a run at rest with nothing to deliver, if that is due."""
    if run.held and not run.stop.holding:
        run.release_held()
        return
    if not run.inbox.has_arrived and not run.held and not is_writing(run):
        arrive(run)
    if run.stop.phase is not DRIVING or run.performing or is_writing(run):
        return
    if run.main is None or run.main.done():
        return
    if run.stop.holding:
        _idle_while_holding(run)
        return
    if not run.waits:
        return
    # A waiting suspect is parked at once, because the next crash would set it aside without being its fault. A suspect
    # whose wait is over stays; otherwise it would be claimed and parked forever.
    is_suspect = run.isolated and isinstance(run.host.recovery_limit.decide(run.run.recoveries), RecoverAlone)
    if seconds_left(run) <= (0.0 if is_suspect else SHORT_WAIT_SECONDS):
        return
    # A run that waits for a place is not parked before its service has answered, unless another run needs its memory.
    is_answered = all(wait.at is None or wait.at.why for wait in run.waits.values())
    has_lingered = (run.lingered == run.moves and is_answered) or run.host.is_full()
    if is_suspect or has_lingered or not any(map(_may_be_heard, run.waits.values())):
        _park(run)
    elif _lingered not in run.timers:
        longer = LINGER_AT_SERVICE if any(wait.at is not None for wait in run.waits.values()) else 1.0
        run.set_timer(longer * run.host.linger_seconds, _lingered, run, run.moves)


def _may_be_heard(wait: Wait) -> bool:
    """Whether a wait may end at once: a program may send a signal, or a place may fall free."""
    return wait.at is not None or (
        wait.on_signal is not None and wait.name is not None and not wait.name.startswith(GO)
    )


def _idle_while_holding(run: RunDriver) -> None:
    """Resolve steps in doubt if a cancel waits for them; otherwise pause or hand back the run."""
    if run.stop.is_dry:
        for call in tuple(run.held):
            call.refuse()
        return
    settling = run.stop.cancel is SETTLING and bool(run.marks)
    if settling:
        run.release_held()
    if not run.performing and only_waits(run):
        (stop_settling if settling else _put_down)(run)


def is_writing(run: RunDriver) -> bool:
    """Whether something is on its way to the store, other than drafts for the next commit."""
    return run.in_flight > 0 or run.journal.holds(run)


def _lingered(run: RunDriver, moves: int) -> None:
    run.has_lingered(moves)  # the run is parked when it is at rest, unless it has moved since
    run.watch()


def _park(run: RunDriver) -> None:
    """Park the run if only its wake-ups can move it: only its row remains."""
    if run.stop.phase is not DRIVING or run.main is None or run.main.done() or not only_waits(run):
        return
    move(run, Status.WAITING, due_at(run), wakes(run), reason="parked")


def _put_down(run: RunDriver) -> None:
    """Pause or hand back a run after everything in progress has ended."""
    if run.stop.pause is not None and run.stop.is_to_pause:
        record = signal_record(run, run.stop.pause)
        move(run, Status.PAUSED, None, (*_breakpoints(run), RESUME, CANCEL), reason="paused", record=record)
    elif run.stop.is_to_drain and run.waits and not run.held and not run.performing:
        move(run, Status.WAITING, due_at(run), wakes(run), reason="handed back")
    elif run.stop.is_to_drain:
        hand_back(run)


def _breakpoints(run: RunDriver) -> list[str]:
    """Return the breakpoints at or just ahead of the run, so that a resume for one of them also ends a pause."""
    names = [wait.name for wait in run.waits.values()] + [getattr(call, "name", None) for call in run.held]
    return sorted({name for name in names if name is not None and name.startswith(GO)})


def hand_back(run: RunDriver) -> None:
    """Release the lease, so that any worker can go on at once."""
    if run.stop.phase is DRIVING:
        move(run, Status.QUEUED, run.host.clock.now(), (), reason="handed back")


def _notices(run: RunDriver) -> list[Send]:
    """Return the notices about steps in doubt and about waits for a signal, each once."""
    found: list[Send] = []
    at = instant(run.host.clock.now())
    for wait in run.waits.values():
        name = wait.name or RESERVED
        if name.startswith(f"{RESOLVE}:"):
            step = name.removeprefix(f"{RESOLVE}:")
            text = f"step {step} may or may not have happened"
            found += run.host.notices("in_doubt", run.run, text=text, key=f"{run.generation}:{step}", at=at)
        elif not name.startswith(RESERVED) or name.startswith(GO):
            key = getattr(wait.call, "key", name)
            text = f"waits {stop_at(name)}" if name.startswith(GO) else f"waits for signal {name!r}"
            found += run.host.notices("waiting", run.run, text=text, key=f"{run.generation}:{key}", at=at)
    return found


def move(
    run: RunDriver,
    status: Status,
    due: float | None,
    wakes: tuple[str, ...],
    *,
    reason: str,
    record: Record | None = None,
) -> None:
    """Release the run with this status, unless there is an unseen signal."""
    services = services_waited_for(run) if status is Status.WAITING else ()
    if len(services) > 1:
        again = run.host.clock.now() + MANY_SERVICES_SECONDS
        due = again if due is None else min(due, again)
    run.stop.release_begun()

    def then(_: Answer) -> None:
        run.host.events.observe(STATUS_EVENTS[status], run)
        run.detach(reason)
        if status is Status.QUEUED:
            run.host.claim_soon()

    def refused(answer: Answer) -> None:
        run.stop.release_refused()
        if answer.verdict is Verdict.MISSED:
            run.inbox.refused()
            run.host.signal_reader.fetch(run)
        else:
            log.error("run %s cannot be %s: %s", run.id, reason, answer.verdict)

    change = head_move(
        status,
        release=True,
        due_at=None if due is None else instant(due),
        wakes=wakes,
        signals_seen=run.inbox.seen,
        progress=record is not None,
        service=next(iter(services), None),
    )
    if run.inbox.seen:
        change["signals_read"] = run.inbox.counted()
    if status is Status.WAITING:
        change["sends"] = _notices(run)
    for start in unrecorded_starts(run):  # written in the same commit
        run.ride(Draft(start))
    record_saved(run, list(run.progress.values))
    run.append_special(record, change, then, refused, takes_along=True)
