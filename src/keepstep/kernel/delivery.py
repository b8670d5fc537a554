"""Chooses the next outcome to deliver on replay, and decodes large values off the loop before their delivery.

`RunDriver.deliver` is the only place that delivers an outcome to code, live as on replay.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from ..errors import CheckpointCorrupt, StoreError
from ..model.undo import is_command
from ..values import large
from .call_states import ASKED, CANCELLED, Call
from .calls import SUCCESS, DurableCall
from .idle import only_waits
from .replay import values_of
from .stall import begins_part, deliver_out_of_order, watch_for_stall
from .steering import STEERING, Control, control
from .stop import FINISHING

if TYPE_CHECKING:
    from ..records.record import Record
    from .driver import RunDriver
    from .replay import History

log = logging.getLogger("keepstep")


class Reading:
    """The value of the next outcome, decoded off the loop. It stays None if it cannot be decoded."""

    __slots__ = ("call", "done", "value")

    def __init__(self, call: DurableCall[Any]) -> None:
        self.call = call
        self.done = False
        self.value: Any = None


def is_being_read(run: RunDriver, call: Call | Control | None, record: Record) -> bool:
    """Decode a large value off the loop before its delivery. Return whether that is under way."""
    value = record.value
    if value is UNSET or len(value) <= large.LARGE_BYTES or not isinstance(call, DurableCall):
        return False
    if call.state != ASKED or record.outcome != SUCCESS:
        return False
    reading = run.reading
    if reading is not None and reading.call is call:
        return not reading.done
    reading = Reading(call)
    run.reading_begun(reading)
    run.host.background(_read(run, reading, record))
    return True


async def _read(run: RunDriver, reading: Reading, record: Record) -> None:
    try:
        reading.value = await run.host.off_loop(reading.call.read, record)
    except Exception:  # noqa: BLE001 - the delivery decodes it again, and sets the run aside
        log.debug("run %s: the value at seq %d cannot be decoded", run.id, record.seq)
    finally:
        reading.done = True
        run.watch()


def replay_next(run: RunDriver) -> bool:
    """Deliver the next recorded outcome. Return whether the code must come to rest before the one after it."""
    history = run.history
    if history is None or not history.order:
        _replayed(run)
        return False
    entry = history.order[0]
    record = entry.record
    if record is None:
        _refill(run, history, entry.seq)
        return True
    if _must_ask_first(run, history, entry.seq):
        return True
    if is_command(entry.key):
        history.order.popleft()
        if entry.key in STEERING:  # unlike a cancel or a deadline, a pause or a resume never reaches the code
            run.delivered(record.finished_at, entry.seq)
        control(run, record)
        run.watch()
        return True
    call = run.asked.get(entry.key)
    if call is None or (entry.cancelled and call.state != CANCELLED):
        if not _can_still_ask(run, history):
            asked = ", ".join(sorted([*run.asked, *(c.key for c in run.held)])) or "nothing"
            what = "that the code cancelled" if call is not None else "a call of"
            run.mismatch(f"seq {entry.seq} recorded {what} {entry.key}, but the code now waits for {asked}")
        else:
            watch_for_stall(run)
        return True
    if is_being_read(run, call, record):
        return True
    run.drop_asked(entry.key)
    history.taken(entry)
    if run.deliver(call, record):
        run.watch()
        return True
    return False


def _must_ask_first(run: RunDriver, history: History, seq: int) -> bool:
    """Whether the code has yet to make a call that was open when outcome `seq` was delivered, and will make it."""
    entry = history.unasked_before(seq)
    if entry is None:
        return False
    if _moves_by_itself(run):
        watch_for_stall(run)
        return True
    return begins_part(run, entry)


def _moves_by_itself(run: RunDriver) -> bool:
    """Whether the code waits for something unrecorded, such as a plain sleep, and may make calls afterwards."""
    if run.stop.phase is FINISHING or run.main is None or run.main.done() or run.workflow.on_change == "compatible":
        return False
    return not only_waits(run)


def _can_still_ask(run: RunDriver, history: History) -> bool:
    """Whether the code may still make the next recorded call, or no longer needs to."""
    if run.stop.phase is FINISHING or run.main is None or run.main.done() or not only_waits(run):
        return True
    return begins_part(run, history.order[0]) or deliver_out_of_order(run, history)


def _replayed(run: RunDriver) -> None:
    """End the replay, whose outcomes are all delivered, and begin the held calls."""
    step = "" if run.history is None else run.history.newest_step
    run.replayed()
    run.host.events.observe("run.resumed", run, step=step)
    run.release_held()


def _refill(run: RunDriver, history: History, seq: int) -> None:
    async def refill() -> None:
        try:
            rows = await run.host.records(run.id, seq - 1)
            history.refill(await run.host.off_loop(values_of, rows, run.id, seq - 1))
        except CheckpointCorrupt as error:
            run.host.set_aside(run, "CheckpointCorrupt", str(error))
        except StoreError as error:
            run.halt(error)
        run.watch()

    run.host.background(refill())
