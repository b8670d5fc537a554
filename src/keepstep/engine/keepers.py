"""The keepers of a worker: which ones it claims, and the schedules and channels that its code declares."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError, StoreError
from ..model import FINISHED
from ..model.keepers import (
    BARRIER_WORKFLOW,
    TOPIC_WORKFLOW,
    channel_name,
    channel_workflow,
    declared_schedule,
    is_barrier,
    served,
    topic_name,
)
from ..ports import instant
from ..workflows.channel import CHANNELS
from ..workflows.definition import check_scheduled

if TYPE_CHECKING:
    from ..kernel.keeper import Kept
    from ..model import Claim
    from ..workflows.definition import Workflow
    from .process import Process

log = logging.getLogger("keepstep")

#: Seconds between two looks for schedules that were added by hand, and for keepers to remove.
LOOK_SECONDS = 15.0
#: Seconds before the first look of a worker whose code declares no schedule, so that short programs do not pay for it.
FIRST_LOOK_SECONDS = 2.0
#: Seconds for which the keeper of a removed schedule stays readable.
KEPT_SECONDS = 86_400.0
#: Workflows of the keepers that every worker claims, because no code declares them. A worker does not list them.
FOR_ALL = frozenset({TOPIC_WORKFLOW, BARRIER_WORKFLOW})


class Keepers:
    """The keepers that a worker drives, beside its runs."""

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        self._declared: dict[str, Workflow[..., Any]] = {}
        self._added: frozenset[str] = frozenset()
        self._look_at = 0.0
        self._looking = False
        #: Whether another worker with the same workflows looks for keepers that were added by hand, and claims them.
        self.are_found_elsewhere = False
        #: Keepers that are driven here at the moment.
        self.driven: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """The workflows of the keepers to claim: topics, barriers, and the schedules and channels that it serves."""
        declared = (declared_schedule(one.name) for one in self._scheduled())
        return self._added.union(FOR_ALL, declared, map(channel_workflow, CHANNELS))

    def _scheduled(self) -> list[Workflow[..., Any]]:
        return [one for one in tuple(self._engine.workflows.values()) if getattr(one, "schedule", None) is not None]

    async def drive(self, claim: Claim) -> None:
        """Let a claimed keeper answer."""
        from ..kernel.keeper import keep  # noqa: PLC0415 - only with a keeper

        run = claim.run.id
        self.driven.add(run)
        try:
            await keep(self._engine, _kept(run), claim)
        finally:
            self.driven.discard(run)

    # -- looking ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Declare the schedules of the code, or look for others soon."""
        if self._scheduled():
            self._engine.background(self.look())
        else:
            self._look_at = self._engine.loop.time() + FIRST_LOOK_SECONDS

    def look_if_due(self) -> None:
        """Look for new keepers in the background, if the last look is long ago."""
        if not self._looking and self._engine.loop.time() >= self._look_at:
            self._engine.background(self.look())

    async def look(self) -> None:
        """Declare the schedules of new workflows, find those added by hand, and remove keepers that ended long ago."""
        if self._looking:
            return
        self._looking, self._look_at = True, self._engine.loop.time() + LOOK_SECONDS
        try:
            for workflow in self._scheduled():
                if self._declared.get(workflow.name) is not workflow:
                    await self._declare(workflow)
            if not self.are_found_elsewhere:
                await self._find_added()
        except StoreError as error:
            self._engine.outage.log("cannot look for schedules yet", error)
        finally:
            self._looking = False

    async def _find_added(self) -> None:
        from .declaring import all_keepers  # noqa: PLC0415 - not needed by short programs

        engine = self._engine
        long_ago = instant(engine.clock.now() - KEPT_SECONDS)
        found: set[str] = set()
        old: list[str] = []
        for run in await all_keepers(engine):
            if run.status not in FINISHED:
                if served(run.workflow) in engine.workflows:
                    found.add(run.workflow)
            elif (run.updated_at or run.created_at) < long_ago:
                old.append(run.id)
        if old:
            await engine.call(lambda: engine.store.delete_runs(old, finished=True))
        new = frozenset(found) - self._added
        self._added = frozenset(found)
        if new:
            engine.claim_soon()

    # -- declaring ----------------------------------------------------------------------------------------------------

    async def _declare(self, workflow: Workflow[..., Any]) -> None:
        """Create the keeper of a workflow's schedule, or tell it that the declaration has changed."""
        from ..kernel.schedule import declaration  # noqa: PLC0415 - only with a schedule
        from .declaring import set_up  # noqa: PLC0415 - only with a schedule

        engine, schedule = self._engine, workflow.schedule
        if schedule is None:
            return
        self._declared[workflow.name] = workflow
        try:
            check_scheduled(workflow)
        except DefinitionError:
            log.exception("schedule %s is not declared", workflow.name)
            return
        payload = engine.redaction.input_of(workflow, (), {})
        given = declaration(workflow.name, workflow.name, schedule, payload, instant(engine.clock.now()))
        try:
            await set_up(engine, given, declared_schedule(workflow.name))
        except DefinitionError as error:
            log.warning("%s; the declaration in the code has no effect", error)
        except BaseException:  # the next look tries again
            del self._declared[workflow.name]
            raise


def _kept(run_id: str) -> Kept:
    """Return the kind of a keeper that this process declares or serves."""
    name = channel_name(run_id)
    if name is not None:
        from ..kernel.channel import ChannelKeeper  # noqa: PLC0415 - only with a channel

        return ChannelKeeper(CHANNELS[name].gather_seconds)
    if topic_name(run_id) is not None:
        from ..kernel.topic import TopicKeeper  # noqa: PLC0415 - only with a topic

        return TopicKeeper()
    if is_barrier(run_id):
        from ..kernel.barrier import BarrierKeeper  # noqa: PLC0415 - only with a barrier

        return BarrierKeeper()
    from ..kernel.schedule import ScheduleKeeper  # noqa: PLC0415 - only with a schedule

    return ScheduleKeeper()
