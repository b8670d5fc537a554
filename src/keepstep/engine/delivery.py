"""Tells a run's code what came of its calls: one outcome at a time, in sequence order, live exactly as on replay."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointCorrupt, StoreError
from ..model.signal import RESERVED
from .branch import ASKED, CANCELLED
from .parking import idle, is_writing
from .quiet import only_waits
from .stall import watch_for_stall
from .steering import STEERING, Control, control

if TYPE_CHECKING:
    from ..stores.records import Record
    from .branch import DurableCall
    from .context import RunContext
    from .history import History
    from .journal import Draft

log = logging.getLogger("keepstep")

#: A workflow of more steps than this should continue as a new run.
MANY_STEPS = 10_000


def tell_next(run: RunContext) -> None:
    """The code has come to rest: deliver the next outcome, or see what else there is to do."""
    if run.main is None:  # a cancel may be recorded before the code is called, which could not be told of it yet
        return
    run.telling = True
    try:
        while not run.detached:
            if run.history is not None:
                if _replay_next(run, run.history):
                    return
            elif run.arrived:
                if run.engine.forgetting is not None and run.engine.forgetting.forget(run):
                    return
                if _deliver(run, run.arrived.popleft()):
                    return
            else:
                if run.engine.forgetting is None or not run.engine.forgetting.forget(run):
                    idle(run)
                return
    finally:
        run.telling = False


def _deliver(run: RunContext, draft: Draft) -> bool:
    """Deliver what has just been recorded; whether to wait until the code has come to rest again."""
    record = draft.record
    if record is None or draft.call is None:
        return False
    run.moves += 1
    run.steps += 1
    if run.steps == MANY_STEPS and not run.carries_state:
        log.warning("run %s has made %d steps; let it go on as a new run with ks.continue_as", run.id, run.steps)
    if not _settle(run, draft.call, record):
        return False
    if run.arrived or run.waits or run.holding:  # the code may end a branch with this and ask for nothing more
        run.watch()
    return True


def _settle(run: RunContext, call: DurableCall[Any] | Control, record: Record) -> bool:
    """Give a call its outcome; whether code was woken. What the code no longer waits for tells it nothing: no time."""
    if not isinstance(call, Control) and call.state != ASKED:
        return False
    run.set_now(record.finished_at)
    run.told = max(run.told, record.seq)
    return call.settle(record)


def _replay_next(run: RunContext, history: History) -> bool:
    """Deliver the next recorded outcome; whether to wait until the code has come to rest again."""
    if not history.order:
        _replayed(run)
        return False
    entry = history.order[0]
    record = entry.record
    if record is None:
        _refill(run, history, entry.seq)
        return True
    if history.has_unasked_before(entry.seq) and _moves_by_itself(run):
        watch_for_stall(run)
        return True
    if entry.key.startswith(RESERVED):
        history.order.popleft()
        if entry.key in STEERING:  # of a pause or a resume the code was told nothing, not even the time
            run.set_now(record.finished_at)
            run.told = max(run.told, entry.seq)
        control(run, record)
        run.watch()
        return True
    call = run.asked.get(entry.key)
    if call is None or (entry.cancelled and call.state != CANCELLED):
        if not _can_still_ask(run, history):
            asked = ", ".join(sorted([*run.asked, *(c.key for c in run.held)])) or "nothing"
            what = "to be cancelled again" if call is not None else "to be asked for"
            run.mismatch(f"seq {entry.seq} recorded {entry.key}, which waits {what}, but the code waits for {asked}")
        else:
            watch_for_stall(run)
        return True
    history.order.popleft()
    del run.asked[entry.key]
    del history.entries[entry.key]
    if _settle(run, call, record):
        run.watch()
        return True
    return False


def _moves_by_itself(run: RunContext) -> bool:
    """Whether code waits for something that Keepstep does not record, such as a plain sleep, and may ask after that."""
    if run.finishing or run.main is None or run.main.done() or run.workflow.on_change == "compatible":
        return False
    return not only_waits(run)


def _can_still_ask(run: RunContext, history: History) -> bool:
    """Whether the code may yet ask for the next recorded outcome, or need not any more."""
    if run.finishing or run.main is None or run.main.done() or not only_waits(run):
        return True
    return run.workflow.on_change == "compatible" and _go_round(run, history)


def _go_round(run: RunContext, history: History) -> bool:
    """Under `compatible`, code may ask for something new amid what is recorded: answer what it does ask for."""
    for entry in history.order:
        call = run.asked.get(entry.key)
        if call is not None and (not entry.cancelled or call.state == CANCELLED):
            history.order.remove(entry)
            history.order.appendleft(entry)
            run.watch()
            return True
    if run.arrived:
        draft = run.arrived.popleft()
        if draft.call is not None and draft.record is not None:
            _settle(run, draft.call, draft.record)
        run.watch()
        return True
    held, run.held = run.held, {}
    for new, context in held.items():
        context.run(new.begin_live)
    return bool(held or run.performing or is_writing(run))


def _replayed(run: RunContext) -> None:
    """Everything recorded has been told; what was held back may start now."""
    run.history = None
    run.engine.teller.observe("run.resumed", run)
    run.release_held()


def _refill(run: RunContext, history: History, seq: int) -> None:
    async def refill() -> None:
        try:
            rows = await run.engine.read(run.engine.store.list_checkpoints, run.id, seq - 1)
            history.refill(rows, seq - 1)
        except CheckpointCorrupt as error:
            run.engine.runner.set_aside(run, "CheckpointCorrupt", str(error))
        except StoreError as error:
            run.halt(error)
        run.watch()

    run.engine.background(refill())
