"""Puts a run away: parks it until something wakes it, pauses it, or hands it back for any worker to go on with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..model import Status
from ..model.signal import CANCEL, GO, RESUME
from ..policies import RecoverAlone
from ..ports import Answer, Verdict, instant
from ..stores.records import Record
from .journal import Draft, head_move
from .quiet import only_waits
from .steering import signal_record, stop_settling
from .wakeups import Wait, due_at, seconds_left, unrecorded_starts, wakes

if TYPE_CHECKING:
    from .context import RunContext

log = logging.getLogger("keepstep")

#: A wait shorter than this stays in memory; a longer one puts the run away as soon as nothing else happens in it.
SHORT_WAIT_SECONDS = 2.0
#: A run that waits for a signal or a child stays in memory this long, in case the answer comes at once.
LINGER_SECONDS = 1.0


def idle(run: RunContext) -> None:
    """At rest, with nothing to deliver: pause, hand back or park if that is called for."""
    if run.held and not run.holding:
        run.release_held()
        return
    if run.moving or run.finishing or run.performing or is_writing(run):
        return
    if run.main is None or run.main.done():
        return
    if run.holding:
        _idle_while_holding(run)
        return
    if not run.waits:
        return
    # A suspect that only waits is put away at once: the next crash would set it aside, and is not its doing. One whose
    # wait is over stays, or it would be claimed and put away for ever.
    is_suspect = run.alone and isinstance(run.engine.recovery_limit.decide(run.run.recoveries), RecoverAlone)
    if seconds_left(run) <= (0.0 if is_suspect else SHORT_WAIT_SECONDS):
        return
    if is_suspect or run.lingered == run.moves or not any(map(_may_be_heard, run.waits.values())):
        _park(run)
    elif run.linger_timer is None:
        run.linger_timer = run.loop.call_later(
            run.engine.linger_seconds, _lingered, run, run.moves, context=run.engine.context
        )


def _may_be_heard(wait: Wait) -> bool:
    """Whether a program may send what a wait waits for, perhaps at once: neither time nor a person does."""
    return wait.on_signal is not None and wait.name is not None and not wait.name.startswith(GO)


def _idle_while_holding(run: RunContext) -> None:
    """Look into what was under way when the last worker died, if a cancel waits for that; else put the run down."""
    settling = run.cancel_signal is not None and bool(run.marks)
    if settling:
        run.release_held()
    if not run.performing and only_waits(run):
        (stop_settling if settling else _put_down)(run)


def is_writing(run: RunContext) -> bool:
    """Whether something is on its way to the store; what only rides with the next commit is not."""
    return run.in_flight > 0 or run.journal.holds(run)


def _lingered(run: RunContext, moves: int) -> None:
    run.linger_timer = None
    if run.detached:
        return
    run.lingered = moves  # the run is put away when it is at rest, unless it has moved since
    run.watch()


def _park(run: RunContext) -> None:
    """Put the run away if nothing but its wake-ups can move it: only its row remains."""
    if run.moving or run.finishing or run.main is None or run.main.done() or not only_waits(run):
        return
    move(run, Status.WAITING, due_at(run), wakes(run), reason="parked")


def _put_down(run: RunContext) -> None:
    """Everything under way has ended and nothing new may start: pause, or hand back."""
    if run.pausing is not None:
        record = signal_record(run, run.pausing)
        move(run, Status.PAUSED, None, (*_breakpoints(run), RESUME, CANCEL), reason="paused", record=record)
    elif run.draining and run.waits and not run.held and not run.performing:
        move(run, Status.WAITING, due_at(run), wakes(run), reason="handed back")
    elif run.draining:
        hand_back(run)


def _breakpoints(run: RunContext) -> list[str]:
    """Where the run stands or is about to stand: who saw it there before it was paused lets it go on by that name."""
    names = [wait.name for wait in run.waits.values()] + [getattr(call, "name", None) for call in run.held]
    return sorted({name for name in names if name is not None and name.startswith(GO)})


def hand_back(run: RunContext) -> None:
    """Give the lease up, so that any worker can go on at once."""
    if not run.moving and not run.finishing:
        move(run, Status.QUEUED, run.engine.clock.now(), (), reason="handed back")


def move(
    run: RunContext,
    status: Status,
    due: float | None,
    wakes: tuple[str, ...],
    *,
    reason: str,
    record: Record | None = None,
) -> None:
    """Give the run up in this status, unless a signal came that was not yet seen."""
    run.moving = True

    def then(_: Answer) -> None:
        run.engine.teller.observe(f"run.{status.value}", run)
        run.detach(reason)
        if status is Status.QUEUED:
            run.engine.poke()

    def refused(answer: Answer) -> None:
        run.moving = False
        if answer.verdict is Verdict.MISSED:
            run.missed_signals = True
            run.engine.hearing.fetch(run)
        else:
            log.error("run %s could not be %s: %s", run.id, reason, answer.verdict)

    change = head_move(
        status,
        release=True,
        due_at=None if due is None else instant(due),
        wakes=wakes,
        signals_seen=run.signals_seen,
        progress=record is not None,
    )
    run.pending.extend(map(Draft, unrecorded_starts(run)))  # written in the same commit
    run.append_special(record, change, then, refused, takes_along=True)
