"""Schedules, for people and programs: what there is, its next ticks, and every change of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..checks import check_text
from ..errors import DefinitionError, RunNotFound, SchemaMismatch, StoreError
from ..kernel.schedule import Changed, ScheduleState, check_schedule_name, declaration, run_of
from ..model import FINISHED, Run, Status
from ..model.keepers import added_schedule, is_declared, schedule_id, schedule_name
from ..policies.schedule import MOST_MISSED, Schedule, tick_of, tick_text
from ..ports import instant
from ..workflows.definition import Bound, Workflow
from .declaring import all_keepers, set_up, state_of, tell

if TYPE_CHECKING:
    from .process import Process

#: Ticks that a schedule shows in advance by default.
NEXT_TICKS = 5
#: Ticks that one backfill starts at most, the newest, as `catch_up="all"` does.
MOST_BACKFILLED = MOST_MISSED


@dataclass(frozen=True, slots=True)
class PastTick:
    """A tick that is over: the run that it has started; or none, and why."""

    tick: datetime
    run: str | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """A change of a schedule: what was done, by whom, when and why."""

    at: datetime
    act: str
    actor: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A schedule as it is now.

    `declared` tells whether code declares it; others were added by hand. `attended` tells whether a living worker
    serves it: without one, it makes no ticks. `next` holds its next ticks in UTC, `waiting` the ticks whose runs wait
    for an earlier run to end, and `open` the runs that have not ended, as far as they matter for its `overlap`.
    """

    name: str
    workflow: str
    when: Schedule
    status: Status
    declared: bool
    attended: bool
    paused: bool
    last: datetime
    next: tuple[datetime, ...] = ()
    waiting: tuple[datetime, ...] = ()
    open: tuple[str, ...] = ()
    fired: int = 0
    skipped: int = 0
    recent: tuple[PastTick, ...] = field(default=())
    changes: tuple[ScheduleChange, ...] = field(default=())


class Schedules:
    """The schedules of a store."""

    def __init__(self, engine: Process) -> None:
        self._engine = engine

    async def list(self) -> list[ScheduleInfo]:
        """Return all schedules, by name. Those that cannot be read here are left out."""
        workers = await self._attended()
        found = []
        for run in await all_keepers(self._engine):
            if run.status not in FINISHED and schedule_name(run.id) is not None:
                try:
                    found.append(await self._info(run, workers, NEXT_TICKS))
                except (SchemaMismatch, StoreError):
                    continue
        return sorted(found, key=lambda one: one.name)

    async def get(self, name: str, *, ticks: int = NEXT_TICKS) -> ScheduleInfo:
        """Return one schedule, with this number of its next ticks."""
        run = await self._engine.stored_run(schedule_id(name))
        if run is None or run.status in FINISHED:
            raise await self._not_found(name)
        return await self._info(run, await self._attended(), ticks)

    async def add(
        self,
        name: str,
        workflow: Any,
        when: Schedule,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        payload: bytes = b"",
    ) -> None:
        """Add a schedule, or change one that was added before. Workers that know the workflow serve it.

        `payload` is the stored form of the arguments, for a caller that does not know the workflow.
        """
        engine = self._engine
        check_schedule_name(name)
        if not isinstance(when, Schedule):
            raise DefinitionError(f"a schedule takes a ks.Cron(...) or a ks.Every(...), not {when!r}")
        if isinstance(workflow, Bound):
            workflow, args, kwargs = workflow.workflow, workflow.args, workflow.kwargs
        known: Workflow[..., Any] | None = (
            workflow if isinstance(workflow, Workflow) else engine.workflows.get(workflow)
        )
        if known is not None and not payload:
            known.check_arguments(tuple(args), dict(kwargs or {}))
            payload = engine.redaction.input_of(known, tuple(args), dict(kwargs or {}))
        target = known.name if known is not None else str(workflow)
        given = declaration(name, target, when, payload or b"[[],{}]", instant(engine.clock.now()))
        await set_up(engine, given, added_schedule(target))

    async def pause(self, name: str, reason: str = "") -> None:
        """Let a schedule make no ticks until it is resumed. Its runs go on."""
        await self._tell(name, "pause", reason)

    async def resume(self, name: str, reason: str = "") -> None:
        """Let a paused schedule go on. Its `catch_up` decides about the ticks that it has missed."""
        await self._tell(name, "resume", reason)

    async def trigger(self, name: str, reason: str = "") -> str:
        """Start a run of the schedule now, also of a paused one. Return its id.

        Unless runs may overlap, it starts when the runs before it have ended.
        """
        tick = instant(self._engine.clock.now())
        await self._tell(name, "trigger", reason, tick=tick_text(tick))
        return run_of(name, tick)

    async def backfill(self, name: str, first: datetime, last: datetime, reason: str = "") -> int:
        """Start the runs of the past ticks from `first` to `last` that do not exist. Return the number of ticks.

        At most the newest 1,000 count. Unless runs may overlap, each starts when the one before it has ended.
        """
        for one in (first, last):
            if not isinstance(one, datetime) or one.tzinfo is None:
                raise DefinitionError(f"backfill takes datetimes with a time zone, not {one!r}")
        found = await self.get(name)
        ticks = found.when.between(first, min(last, found.last), MOST_BACKFILLED)
        await self._tell(name, "backfill", reason, first=tick_text(first), last=tick_text(last))
        return len(ticks)

    async def remove(self, name: str, reason: str = "") -> None:
        """Remove a schedule. Its runs go on. One that living workers declare is refused: remove it from their code."""
        found = await self.get(name)
        if found.attended and found.declared:
            raise DefinitionError(
                f"schedule {name!r} is declared by the code of a living worker; remove schedule= from the code and "
                f"restart the workers, or pause it: keepstep schedules pause {name}"
            )
        if found.attended:
            await self._tell(name, "remove", reason)
        else:  # nobody would read what it is told
            await self._engine.cancel_now(schedule_id(name), reason, self._engine.actor)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _tell(self, name: str, act: str, reason: str, **details: Any) -> None:
        engine = self._engine
        details["reason"] = engine.redaction.redact(check_text(reason, "reason"))
        await engine.encryption.check_sending(engine, schedule_id(name))
        if not await tell(engine, name, act, **details):
            raise await self._not_found(name)

    async def _not_found(self, name: str) -> RunNotFound:
        known = ", ".join(one.name for one in await self.list()) or "none"
        return RunNotFound(f"no schedule {name!r} in {self._engine.store.url}; there are: {known}", schedule_id(name))

    async def _attended(self) -> set[str]:
        """Return the workflows that living workers serve."""
        workers = await self._engine.call(self._engine.store.list_workers)
        return {one for worker in workers if worker.claims for one in worker.workflows}

    async def _info(self, run: Run, attended: set[str], ticks: int) -> ScheduleInfo:
        state, _ = await state_of(self._engine, run)
        is_served = run.workflow in attended or (not is_declared(run.workflow) and state.workflow in attended)
        return info_of(run, state, ticks, attended=is_served)


def info_of(run: Run, state: ScheduleState, ticks: int, *, attended: bool) -> ScheduleInfo:
    """Return a schedule as its readers see it."""
    when = state.schedule
    following: list[datetime] = []
    last: datetime | None = tick_of(state.last)
    while last is not None and len(following) < ticks:
        last = when.after(last)
        if last is not None:
            following.append(last)
    return ScheduleInfo(
        name=state.name,
        workflow=state.workflow,
        when=when,
        status=run.status,
        declared=is_declared(run.workflow),
        attended=attended,
        paused=state.paused,
        last=tick_of(state.last),
        next=tuple(following),
        waiting=tuple(tick_of(one.at) for one in state.waiting),
        open=tuple(state.open),
        fired=state.fired,
        skipped=state.skipped,
        recent=tuple(
            PastTick(tick_of(one.tick), None if one.why else f"{state.name}@{one.tick}", one.why)
            for one in state.recent
        ),
        changes=tuple(map(_shown, state.changes)),
    )


def _shown(one: Changed) -> ScheduleChange:
    return ScheduleChange(one.at, one.act, one.actor, one.reason)
