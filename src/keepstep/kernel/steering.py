"""Commands on a whole run: a cancel, a pause, a resume, the deadline."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..model import Kind, Signal
from ..model.signal import CANCEL, PAUSE
from ..ports import Answer, Send
from ..records.data import SignalData, new_data
from ..records.record import Record
from .call_states import ASKED
from .stop import FINISHING, SETTLING

if TYPE_CHECKING:
    from .driver import RunDriver

DEADLINE = "ks:deadline"
#: Commands that are delivered to the code as a whole.
STEERING = frozenset((CANCEL, DEADLINE))

#: Seconds that the code may take to reach a step that was in progress when its last worker died, before a cancel is
#: delivered.
SETTLE_SECONDS = 5.0


class Control:
    """A call's stand-in: commands on the whole run are delivered in order, too."""

    __slots__ = ("run",)

    state = ASKED

    def __init__(self, run: RunDriver) -> None:
        self.run = run

    def settle(self, record: Record) -> bool:
        control(self.run, record)
        return True


def steer(run: RunDriver, signal: Signal) -> None:
    """Process a signal for the run itself, not for its code."""
    if signal.name == CANCEL:
        recorded = run.history is not None and CANCEL in run.history.entries
        if not run.stop.is_cancelled and not recorded:  # a second cancel would cut the clean-up short
            run.stop.cancel_requested(signal)
            cancel_when_settled(run)
            if run.stop.cancel is SETTLING and run.marks:
                run.loop.call_later(SETTLE_SECONDS, stop_settling, run, context=run.host.context)
                run.watch()
    elif signal.name == PAUSE:
        overtaken(run)  # an unrecorded pause would pause the run again later
        if run.stop.is_cancelled or run.stop.phase is FINISHING:
            run.append(signal_record(run, signal))
        else:
            run.stop.pause_requested(signal)
            run.watch()
    else:
        run.append(signal_record(run, signal))
        end_pause(run)


def overtaken(run: RunDriver) -> None:
    """Record a pause superseded by another pause or by the run's end as read, so that no later rewind applies it."""
    signal = run.stop.pause_read()
    if signal is not None:
        run.append(signal_record(run, signal))


def cancel_when_settled(run: RunDriver) -> None:
    """Record the cancel after at-most-once steps in progress have ended, so that none is left in doubt.

    A step that was in progress when another worker died is first checked by its `verify=`.
    """
    if run.stop.cancel is not SETTLING or run.marks:
        return
    if not any(call.step.at_most_once and not (call.doubtful or call.rests) for call in run.bodies.values()):
        signal = run.stop.cancel_settled()
        if signal is not None:
            run.append(signal_record(run, signal), Control(run))


def stop_settling(run: RunDriver) -> None:
    """Cancel code that does not reach the steps in doubt; they stay unresolved."""
    if run.stop.cancel is SETTLING and not run.stop.detached:
        run.marks_given_up()
        cancel_when_settled(run)


def end_pause(run: RunDriver) -> None:
    """End a pause. Calls held back for another reason, such as a pending cancel, stay held."""
    if run.stop.pause is None:
        return
    overtaken(run)
    run.stop.pause_ended()
    if not run.stop.holding:
        run.release_held()


def signal_record(run: RunDriver, signal: Signal) -> Record:
    """Return the record of a consumed signal: its name, sender and payload."""
    data = new_data(SignalData, signal=signal.seq, sender=signal.sender)
    record = Record(run.id, Kind.SIGNAL.value, step=signal.name, worker=run.worker, trigger="manual", data=data)
    record.finished_at = run.time()
    record.value = msgspec.Raw(signal.payload)
    return record


def control(run: RunDriver, record: Record) -> None:
    """Deliver a command on the whole run: a cancel, or the deadline."""
    if record.step == CANCEL:
        run.stop.cancel_delivered()
        cancel_children(run)
        _cancel_code(run)
        run.watch()
    elif record.step == DEADLINE:
        run.stop.deadline_delivered()
        _cancel_code(run)
        run.watch()


def _cancel_code(run: RunDriver) -> None:
    run.moved()
    if run.main is not None and not run.is_undoing:  # an undo is not cut short
        run.main.cancel()


def cancel_children(run: RunDriver) -> None:
    """Pass the cancel of a run on to its children, once; children that the clean-up starts later are spared."""
    if run.children.cancelled:
        return
    run.children.cancel_passed_on()
    for child in run.children.open.values():
        cancel_child(run, child)


def cancel_child(run: RunDriver, child: str) -> None:
    """Pass the cancel of a run on to a child."""
    signal = Signal(child, CANCEL, id=f"cancel:{run.id}", sender=f"run {run.id}", sent_at=run.time())
    run.append_special(None, {"sends": [Send(signal)], "progress": False}, refused=partial(_too_late, run, child))


def _too_late(run: RunDriver, child: str, _: Answer) -> None:
    """Cancel the successor of a child that has ended, if there is one."""
    run.host.background(run.host.cancel_successor(child))
