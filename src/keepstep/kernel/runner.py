"""Drives one run: `recovery` takes it up and calls its code, and `finish` records its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..errors import EncryptionError
from ..model import Kind
from ..records.data import RunStartedData, new_data
from ..records.record import Record
from .budget import Guard
from .calls import Branch
from .delivery import is_being_read, replay_next
from .driver import RunDriver
from .finish import Ending
from .parking import idle
from .recovery import begin, read_large_input, recover
from .steering import cancel_when_settled
from .versions import definition_of

if TYPE_CHECKING:
    from ..model import Claim
    from ..workflows.agent import TaskPlan
    from ..workflows.dag import Dag
    from ..workflows.definition import Workflow
    from ..workflows.graph import Graph
    from .host import Host


def take_up(host: Host, workflow: Workflow[..., Any], claim: Claim) -> RunDriver:
    """Return the driver of a claimed run, with its budget."""
    run = RunDriver(host, workflow, claim)
    if workflow.budget is not None:
        run.held_to(Guard(run, workflow.budget))
    return run


class Runner:
    """Drives the runs of one engine."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._ending = Ending(host)

    # -- calls from parts of a run -------------------------------------------------------------------------------------

    replay_next = staticmethod(replay_next)
    is_being_read = staticmethod(is_being_read)
    idle = staticmethod(idle)

    def settle(self, run: RunDriver) -> None:
        """Cancel the code if the cancel waited for a step that has now ended."""
        cancel_when_settled(run)

    def call_workflow(
        self, branch: Branch, workflow: Workflow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a workflow inside the code of another."""
        from .composing import call_workflow  # noqa: PLC0415 - only needed by workflows that call others

        return call_workflow(branch, workflow, args, kwargs)

    def walk(self, branch: Branch, graph: Graph, initial: Mapping[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]:
        """Go through a graph."""
        from .graph.walk import walk  # noqa: PLC0415 - only needed for graphs

        return walk(branch, graph, initial)

    def walk_dag(self, branch: Branch, dag: Dag, inputs: dict[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]:
        """Perform the steps of a dag."""
        from .dag import walk_dag  # noqa: PLC0415 - only needed for dags

        return walk_dag(branch, dag, inputs)

    def perform(self, plan: TaskPlan, task: Any) -> Coroutine[Any, Any, Any]:
        """Give a task to an agent."""
        from .refine import planned  # noqa: PLC0415 - only needed for agents of a workflow's file

        return planned(plan, task)

    # -- beginning -----------------------------------------------------------------------------------------------------

    async def drive(self, claim: Claim) -> None:
        """Drive a claimed run: take it up in the five phases of `recovery`, which call its code at the end."""
        host = self.host
        try:
            known = host.workflows.get(claim.run.workflow) or next(iter(host.workflows.values()))  # a damaged row
            run = take_up(host, known, claim)
            host.redaction.add_rules_of(known)
        except EncryptionError as error:
            host.encryption.cannot_read(error)
            await host.put_back(claim, error)
            return
        host.entered(run)
        await recover(run)

    begin = staticmethod(begin)

    async def begin_with_large_input(self, run: RunDriver) -> None:
        """Call the code after its large input is decoded."""
        await read_large_input(run)
        try:
            begin(run)
        except Exception as error:  # noqa: BLE001 - nobody else would report it
            run.engine_failed(error)

    def code_ended(self, run: RunDriver, future: asyncio.Future[Any]) -> None:
        """End the run, whose code has returned or raised."""
        self._ending.code_ended(run, future)

    @staticmethod
    def started(run: str, workflow: Workflow[..., Any], worker: str, at: datetime) -> Record:
        """The first record of a run."""
        data = new_data(RunStartedData, workflow=workflow.name, version=workflow.version, **definition_of(workflow))
        data["exact_time"] = data["nests"] = data["typed"] = True
        first = Record(run, Kind.RUN_STARTED.value, worker=worker, finished_at=at, data=data)
        first.agent = workflow.agent
        return first
