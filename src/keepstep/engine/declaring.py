"""Schedules in the store: how they are created, changed and read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import DefinitionError
from ..kernel.keeper import birth, newest_state
from ..kernel.schedule import ScheduleKeeper, ScheduleState
from ..model import FINISHED, Run, RunQuery, Signal
from ..model.ids import new_id
from ..model.keepers import KEEPER_ID, TELL, is_declared, schedule_id, served
from ..policies.schedule import restored, tick_of
from ..ports import Send, Verdict, instant

if TYPE_CHECKING:
    from .process import Process

log = logging.getLogger("keepstep")

#: Keepers in one page of a list.
PAGE = 500

KEPT = ScheduleKeeper()


async def all_keepers(engine: Process) -> list[Run]:
    """Return every keeper of the store; those that cannot be read are left out."""
    found: list[Run] = []
    after: str | None = None
    while True:
        query = RunQuery(id_prefix=KEEPER_ID, limit=PAGE, after=after, system=True, with_input=True)
        page = await engine.call(engine.store.list_runs, query)
        found += page.runs
        after = page.next
        if after is None:
            return found


async def state_of(engine: Process, run: Run) -> tuple[ScheduleState, int]:
    """Return the state of a schedule, and the number of the last signal that it includes."""
    state, read = await newest_state(engine, run, KEPT)
    return state, read


async def set_up(engine: Process, given: dict[str, Any], keeper_workflow: str) -> None:
    """Create the keeper of a schedule, or let the existing one follow this declaration.

    Raise `DefinitionError` if the name belongs to a schedule of another kind: declared, or added by hand.
    """
    name = given["name"]
    run_id = schedule_id(name)
    while True:
        run = await engine.stored_run(run_id)
        if run is not None and run.status not in FINISHED:
            _check_kind(name, run, keeper_workflow)
            await _redeclare(engine, run, given)
            return
        over = None
        if run is not None:  # removed before: its last tick still counts
            state, _ = await state_of(engine, run)
            given = {**given, "last": max(given["last"], state.last, key=tick_of)}
            over = run.epoch
        engine.encryption.check_writing()
        at = instant(engine.clock.now())
        create = birth(engine, run_id, keeper_workflow, given, actor=engine.actor, at=at, over=over)
        answer = await engine.journal.write(create)
        if answer.verdict is Verdict.DONE:
            engine.keepers_changed()
            return
        # another process has created it meanwhile


def _check_kind(name: str, run: Run, keeper_workflow: str) -> None:
    if run.workflow != keeper_workflow:
        how = (
            "declared in code" if is_declared(run.workflow) else f"added by hand for workflow {served(run.workflow)!r}"
        )
        raise DefinitionError(
            f"schedule {name!r} exists already, {how}; remove it first: keepstep schedules remove {name}"
        )


async def _redeclare(engine: Process, run: Run, given: dict[str, Any]) -> None:
    state, read = await state_of(engine, run)
    current: dict[str, Any] = {"workflow": state.workflow, "when": state.when, "input": state.input}
    while signals := await engine.signals(run.id, read):
        read = signals[-1].seq
        for signal in signals:  # a declaration that the keeper has not read yet
            payload = msgspec.json.decode(signal.payload) if signal.name == TELL else None
            if isinstance(payload, dict) and payload.get("act") == "declare":
                current = {key: payload[key] for key in current}
    wanted = {key: given[key] for key in current}
    if wanted == current:
        return
    log.warning("schedule %s changes from %s to %s", state.name, restored(current["when"]), restored(wanted["when"]))
    await tell(engine, state.name, "declare", **wanted)


async def tell(engine: Process, name: str, act: str, *, actor: str = "", **details: Any) -> bool:
    """Send a schedule what to do. Return whether there is such a schedule."""
    payload = msgspec.json.encode({"act": act, **details})
    at = instant(engine.clock.now())
    signal = Signal(schedule_id(name), TELL, payload, new_id("signal"), actor or engine.actor, at)
    answer = await engine.journal.write(Send(signal))
    if answer.error is not None:
        raise answer.error
    engine.signalled(signal.run)
    return answer.verdict is Verdict.DONE
