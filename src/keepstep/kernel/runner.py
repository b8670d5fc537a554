"""Drives one run: loads its checkpoints and calls its code; `finish` records its end.

Starting and recovering are the same act.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Coroutine, Mapping
from contextvars import copy_context
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import (
    CheckpointCorrupt,
    DefinitionError,
    EncryptionError,
    KeepstepError,
    NotSerializable,
    SchemaMismatch,
    StoreError,
)
from ..model import Kind, Signal, Status
from ..model.undo import AT_END
from ..policies import SetAside
from ..ports import CURRENT, Advance, Answer, Verdict
from ..records.data import Data, RecoveredData, RunStartedData, new_data
from ..records.record import Record, check_origin
from ..stores.rules import ENDED
from ..values.large import is_large_text
from .budget import Guard
from .calls import Branch, contained
from .delivery import is_being_read, replay_next
from .driver import RunDriver
from .finish import Ending
from .hooks import tell_of_beginning
from .log import Draft
from .parking import idle
from .progress import record_advance, take_over
from .replay import History, as_ended, newest_state, read_history
from .steering import DEADLINE, Control, cancel_when_settled
from .stop import DETACHED, FINISHING, Order
from .strands import RunTask
from .versions import Objection, before, definition_of, judge, write_migration
from .wakeups import receive

if TYPE_CHECKING:
    from ..model import Claim, Run
    from ..workflows.dag import Dag
    from ..workflows.definition import Workflow
    from ..workflows.graph import Graph
    from .host import Host

log = logging.getLogger("keepstep")


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

    # -- beginning -----------------------------------------------------------------------------------------------------

    async def drive(self, claim: Claim) -> None:
        """Drive a claimed run: load its records, then call its code."""
        host, run = self.host, claim.run
        try:
            known = host.workflows.get(run.workflow) or next(iter(host.workflows.values()))  # if its row is damaged
            context = take_up(host, known, claim)
            host.redaction.add_rules_of(known)
        except EncryptionError as error:
            host.encryption.cannot_read(error)
            await host.put_back(claim, error)
            return
        host.entered(context)
        try:
            if not await self._restore(context):
                return
        except (CheckpointCorrupt, SchemaMismatch) as error:
            if not await self._is_mine(context):  # it did not match the claim, because another owner has written since
                context.detach("its lease was lost")
            elif isinstance(error, SchemaMismatch) and await self._is_newer(run):
                context.detach("it is left to workers of a newer version")
                await host.put_back(claim, error)
            else:
                self.host.set_aside(context, type(error).__name__, str(error), phase="load")
        except StoreError as error:
            context.halt(error)
        except Exception as error:
            log.exception("run %s cannot be loaded", run.id)
            self.host.set_aside(context, type(error).__name__, f"the run cannot be taken up: {error}", phase="rebuild")
        else:
            self._begin_or_record(context)

    async def _restore(self, context: RunDriver) -> bool:
        """Load the run's records. Return False if it has ended, or is set aside instead."""
        run = context.run
        problem = self._objection(context)
        if problem and not (self._is_past_limit(context) and context.claim.left):
            if not await self._goes_back(context, (await as_ended(self.host, run)).status):
                self.host.set_aside(context, *problem, phase="validate")
            return False
        if run.seq:
            await self._load(context)
            ended_as = None if context.history is None else context.history.ended_as
            if await self._goes_back(context, ended_as) or not await self._is_current(context):
                return False
        else:
            check_origin(run)
        if context.claim.left:
            take_over(context)
        if problem and not context.progress.advanced():
            self.host.set_aside(context, *problem, phase="validate")
            return False
        if run.signals:
            await self._load_signals(context)
        if is_large_text(run.input):
            await self._read_input(context)
        return True

    def _begin_or_record(self, context: RunDriver) -> None:
        """Call the code; after refused records or too many crashes, only when a record of this run has been written.

        A lease that recorded nothing and was handed back leaves a gap in the recorded leases. Its bodies may have been
        performed, and leases that can record nothing would perform them again and again.
        """
        last = 0 if context.history is None else context.history.last_epoch
        if last is not None and context.claim.before is Status.QUEUED and context.claim.taken_from is None:
            context.count_unrecorded(last)
        is_past_limit = self._is_past_limit(context)
        if not context.unrecorded and not self.host.journal.refused and not is_past_limit:
            self.begin(context)
            return

        def begin_soon(_: Answer) -> None:
            self.host.loop.call_soon(self.begin, context, context=self.host.context)

        if is_past_limit:
            if not context.seq:
                context.ride(Draft(self._first_record(context)))
            record_advance(context, begin_soon)
            return
        if context.seq:
            data = new_data(RecoveredData, epoch=context.epoch, unrecorded=context.unrecorded)
            record = Record(context.id, Kind.RECOVERED.value, worker=context.worker, trigger="recovery", data=data)
            record.finished_at = context.time()
        else:
            record = self._first_record(context)
        context.append(record, then=begin_soon)

    def _first_record(self, context: RunDriver) -> Record:
        """Return the first record of a run, whose time is `ks.now()` from then on."""
        record = self.started(context.id, context.workflow, context.worker, context.time())
        context.set_now(record.finished_at)
        return record

    async def _is_mine(self, context: RunDriver) -> bool:
        """Whether the store still knows this incarnation as the owner; if unknown, the next write decides."""
        try:
            run = await self.host.stored_run(context.id)
        except StoreError:
            return True
        return run is None or run.epoch == context.epoch

    async def _is_newer(self, run: Run) -> bool:
        """Whether a newer Keepstep has gone on with the run, so that its workers can drive it again."""
        try:
            return await self.host.is_newer(run)
        except CheckpointCorrupt as error:
            return isinstance(error, SchemaMismatch)

    def _objection(self, context: RunDriver) -> tuple[str, str] | None:
        run, workflow = context.run, context.workflow
        if run.workflow != workflow.name:
            return "CheckpointCorrupt", f"its row names workflow {run.workflow!r}, but it was claimed for another"
        decision = self.host.recovery_limit.decide(run.recoveries)
        if isinstance(decision, SetAside):
            return "RecoveryLimit", decision.reason
        return None

    def _is_past_limit(self, context: RunDriver) -> bool:
        """Whether only a newly saved value of a step keeps the run from being set aside."""
        return isinstance(self.host.recovery_limit.decide(context.run.recoveries), SetAside)

    async def _goes_back(self, context: RunDriver, ended_as: Status | None) -> bool:
        """Return a run to its end if a command took its lease and then failed without a record.

        Driven again, it could end differently, or repeat unrecorded steps of a completed run.
        """
        if ended_as not in ENDED:
            return False
        change = Advance(context.id, context.worker, context.epoch, context.seq, status=ended_as, release=True)
        change.progress = False
        context.detach("it had ended")
        with contextlib.suppress(StoreError):
            if (await self.host.journal.write(change)).verdict is Verdict.DONE:
                self.host.notify_waiters()
                return True
        self.host.give_back_later(context)
        return True

    async def _is_current(self, context: RunDriver) -> bool:
        """Whether the run fits the loaded definition, perhaps after a migration; otherwise it is set aside or lost."""
        if context.run.fingerprint == context.workflow.fingerprint or context.run.seq <= 1:
            return True
        verdict = await judge(context)
        if isinstance(verdict, Objection):
            self.host.set_aside(context, verdict.kind, verdict.reason, phase=verdict.phase)
        elif verdict is not None:
            if not await write_migration(context, verdict):
                context.detach("its lease was lost")
                return False
            await self._load(context)
        if not context.stop.detached and getattr(context.workflow, "keep", "all") == "newest":
            context.made_to_fit(msgspec.structs.asdict(await before(self.host, context.run)))
        return not context.stop.detached

    async def _load(self, context: RunDriver) -> None:
        run = context.run
        try:
            base = await newest_state(self.host, run) if context.carries_state else None
            history = await read_history(self.host, run, History(run, 0 if base is None else base - 1))
        except CheckpointCorrupt as error:
            if not context.carries_state:
                raise
            first = max(run.kept_from - 1, 0)
            history = await read_history(self.host, run, History(run, first, without_states=True))
            log.warning("run %s: a consolidated state is damaged and was derived again: %s", run.id, error)
            self.host.events.observe("state.rebuilt", context, error=str(error))
        context.loaded(history, base or 1)
        self.host.events.observe("run.loaded", context, step=history.newest_step)

    async def _load_signals(self, context: RunDriver) -> None:
        signals: list[Signal] = []
        context.inbox.begin_after(max(context.run.signals_from - 1, 0))
        while True:
            page = await self.host.signals(context.id, signals[-1].seq if signals else 0)
            if not page:
                break
            signals.extend(page)
        receive(context, signals)

    async def begin_with_large_input(self, context: RunDriver) -> None:
        """Call the code after its large input is decoded."""
        await self._read_input(context)
        try:
            self.begin(context)
        except Exception as error:  # noqa: BLE001 - nobody else would report it
            context.engine_failed(error)

    async def _read_input(self, context: RunDriver) -> None:
        """Decode and convert a large input off the loop, before the code is called with it."""
        with contextlib.suppress(Exception):  # raised again when the code is called
            context.input_read(await self.host.off_loop(self._arguments_of, context))

    def _arguments_of(self, context: RunDriver) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the code: the stored ones, which may be older than the annotations."""
        run, workflow = context.run, context.workflow
        stored = workflow.values.decode(self.host.encryption.input(run), f"workflow {run.workflow!r}: input")
        if not (isinstance(stored, list) and [type(part) for part in stored] == [list, dict]):
            raise NotSerializable("the stored input does not hold the arguments of a call")
        if not context.typed:
            return stored[0], stored[1]
        try:
            return workflow.types.arguments(*stored)
        except DefinitionError as error:
            raise DefinitionError(
                f"{error}. Let the annotation accept the stored value and retry the run, or fork the run with an "
                "input that fits"
            ) from None

    def begin(self, context: RunDriver) -> None:
        """Call the code; all that it needs is in memory."""
        if context.stop.detached:
            return
        host, run = self.host, context.run
        if host.forgetting is not None:
            host.forgetting.begins(context)
        if context.seq == 0:
            record = self._first_record(context)
            context.spent.add(record)
            context.ride(Draft(record))
        if context.claim.taken_from is not None:
            data: Data = {"from": context.claim.taken_from, "epoch": context.epoch, "recoveries": run.recoveries}
            record = Record(run.id, Kind.RECOVERED.value, worker=context.worker, trigger="recovery", data=data)
            record.finished_at = context.time()
            context.ride(Draft(record))
            host.events.observe("run.recovering", context, taken_from=context.claim.taken_from)
        else:
            host.events.observe("run.started", context)
        # The clean-up after the deadline is not limited by it, nor is an undo.
        passed = context.history is not None and not context.history.entries.keys().isdisjoint((DEADLINE, AT_END))
        if context.deadline_at is not None and not passed:
            self._arm_deadline(context)
        try:
            args, kwargs = self._arguments_of(context) if context.arguments is None else context.arguments
        except KeepstepError as error:
            told = f"the run's input cannot be restored: {error}"
            self.host.set_aside(context, type(error).__name__, told, phase="rebuild")
            return
        if context.stop.is_cancelled and context.history is None:
            self._end_unbegun(context)
            return
        first = partial(tell_of_beginning, context) if context.workflow.hooks and _is_new(context) else None
        task_context = copy_context()
        branch = Branch(context, "")
        task_context.run(CURRENT.set, branch)
        code = contained(context, args, kwargs, first)
        main = RunTask(code, branch, loop=host.loop, context=task_context, name=f"run {run.id}")
        context.begun(main)
        main.add_done_callback(partial(self._ending.code_ended, context), context=host.context)
        context.watch()
        host.signal_reader.begun(context)

    def _end_unbegun(self, context: RunDriver) -> None:
        """End a run that was cancelled before it began, without calling its code."""
        main = self.host.loop.create_future()
        context.begun(main)
        main.add_done_callback(partial(self._ending.code_ended, context), context=self.host.context)
        main.cancel()

    @staticmethod
    def started(run: str, workflow: Workflow[..., Any], worker: str, at: datetime) -> Record:
        """The first record of a run."""
        data = new_data(RunStartedData, workflow=workflow.name, version=workflow.version, **definition_of(workflow))
        data["exact_time"] = data["nests"] = data["typed"] = True
        return Record(run, Kind.RUN_STARTED.value, worker=worker, finished_at=at, data=data)

    def _arm_deadline(self, context: RunDriver) -> None:
        deadline = context.deadline_at
        if deadline is None:
            return
        delay = deadline.timestamp() - self.host.clock.now()
        if delay <= 0:
            self._deadline(context)
            return
        context.set_timer(min(delay, 86_400.0), self._deadline, context)

    def _deadline(self, context: RunDriver) -> None:
        stop = context.stop
        if stop.deadline is not Order.NONE or stop.phase in (FINISHING, DETACHED) or context.deadline_at is None:
            return
        if self.host.clock.now() < context.deadline_at.timestamp():
            self._arm_deadline(context)
            return
        stop.deadline_passed()
        record = Record(context.id, Kind.TIMER.value, step=DEADLINE, worker=context.worker)
        record.finished_at = context.time()
        context.append(record, Control(context))


def _is_new(context: RunDriver) -> bool:
    """Whether nothing of the run's code is recorded yet."""
    history = context.history
    return history is None or not (history.entries or history.tried or history.marks or history.position)
