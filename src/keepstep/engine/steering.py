"""What steers a whole run from outside: a cancel, a pause, a resume, the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..model import Kind, Signal
from ..model.ids import new_id
from ..model.signal import CANCEL, PAUSE
from ..ports import Answer, Send
from ..stores.records import Record, StoredError

if TYPE_CHECKING:
    from .context import RunContext

DEADLINE = "ks:deadline"
#: What is told to the code as a whole.
STEERING = frozenset((CANCEL, DEADLINE))

#: So long may the code take to come to a step that was under way when its last worker died, before a cancel is told.
SETTLE_SECONDS = 5.0


class Control:
    """Stands in for a call: what steers the whole run is delivered in order too."""

    __slots__ = ("run",)

    def __init__(self, run: RunContext) -> None:
        self.run = run

    def settle(self, record: Record) -> bool:
        control(self.run, record)
        return True


def steer(run: RunContext, signal: Signal) -> None:
    """Take a signal that is meant for the run, not for its code."""
    if signal.name == CANCEL:
        recorded = run.history is not None and CANCEL in run.history.entries
        if not run.cancelling and not recorded:  # a second one would cut the cleanup short
            run.cancelling = True
            run.pausing = None
            run.holding = True  # nothing new starts between the cancel and its delivery
            run.cancel_signal = signal
            cancel_when_settled(run)
            if run.cancel_signal is not None and run.marks:
                run.loop.call_later(SETTLE_SECONDS, stop_settling, run, context=run.engine.context)
                run.watch()
    elif signal.name == PAUSE:
        overtaken(run)  # what is not recorded as read would pause the run again later
        run.pausing = signal
        if run.cancelling or run.finishing:
            overtaken(run)
        else:
            run.holding = True
            run.watch()
    else:
        run.append(signal_record(run, signal))
        end_pause(run)


def overtaken(run: RunContext) -> None:
    """A pause that another one or the end of the run has overtaken is read, lest it hold up a later rewind."""
    if run.pausing is not None:
        run.append(signal_record(run, run.pausing))
        run.pausing = None


def cancel_when_settled(run: RunContext) -> None:
    """Record the cancel, but not while an at-most-once step is under way: its outcome must not be left in doubt.

    One that was under way when another worker died is asked about first, by its `verify=`.
    """
    signal = run.cancel_signal
    if signal is None or run.marks or any(call.step.at_most_once and not call.doubtful for call in run.bodies):
        return
    run.cancel_signal = None
    run.append(signal_record(run, signal), Control(run))


def stop_settling(run: RunContext) -> None:
    """The code does not come to the steps that were under way: cancel it all the same; what became of them is open."""
    if run.cancel_signal is not None and not run.detached:
        run.doubts.extend(run.marks)
        run.marks = {}
        cancel_when_settled(run)


def in_doubt(steps: Sequence[str]) -> StoredError:
    """What is kept of a cancel that came while steps were under way which must not be repeated on a guess."""
    named, what = " and ".join(map(repr, steps)), ("step", "was") if len(steps) == 1 else ("steps", "were")
    message = f"{what[0]} {named} {what[1]} under way when the run was cancelled: may or may not have happened"
    return StoredError("keepstep.StepInDoubt", message, code="ks:in-doubt", id=new_id("error"))


def end_pause(run: RunContext) -> None:
    """Take back a pause; what is held back for another reason, such as a cancel that is yet to be told, stays so."""
    if run.pausing is None:
        return
    overtaken(run)
    if run.holding and not run.draining:
        run.holding = False
        run.release_held()


def signal_record(run: RunContext, signal: Signal) -> Record:
    """What is kept of a signal that was taken: which, from whom, and what it said."""
    data = {"signal": signal.seq, "sender": signal.sender}
    record = Record(run.id, Kind.SIGNAL.value, step=signal.name, worker=run.worker, trigger="manual", data=data)
    record.finished_at = run.time()
    record.value = msgspec.Raw(signal.payload)
    return record


def control(run: RunContext, record: Record) -> None:
    """Deliver what steers the whole run: a cancel, or the deadline."""
    if record.step == CANCEL:
        run.cancelling = True
        cancel_children(run)
        _cancel_code(run)
        run.holding = run.draining
        run.watch()
    elif record.step == DEADLINE:
        run.timed_out = True
        _cancel_code(run)
        run.holding = run.draining
        run.watch()


def _cancel_code(run: RunContext) -> None:
    run.moves += 1
    if isinstance(run.main, asyncio.Task):
        run.main.cancel()
    elif run.blocked is not None:
        run.thread_cancel = True
        run.thread_busy = True
        run.blocked.set()
        run.blocked = None
    else:
        run.thread_cancel = True


def cancel_children(run: RunContext) -> None:
    """Pass the cancel of a run on, once: what its clean-up starts later is not meant."""
    if run.children_told:
        return
    run.children_told = True
    for child in run.children.values():
        cancel_child(run, child)


def cancel_child(run: RunContext, child: str) -> None:
    """Pass the cancel of a run on to a child."""
    signal = Signal(child, CANCEL, id=f"cancel:{run.id}", sender=f"run {run.id}", sent_at=run.time())
    run.append_special(None, {"sends": [Send(signal)], "progress": False}, refused=partial(_too_late, run, child))


def _too_late(run: RunContext, child: str, _: Answer) -> None:
    """The child has ended; if another run goes on for it, that one is cancelled."""
    run.engine.background(run.engine.cancel_successor(child))
