"""Drives one run: load its checkpoints, call its code; `ending` records how it ended.

Starting and recovering are this same act.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import (
    CheckpointCorrupt,
    EncryptionError,
    KeepstepError,
    NotSerializable,
    SchemaMismatch,
    StoreError,
)
from ..model import Kind, Outcome, Signal, Status
from ..model.ids import new_id
from ..policies import SetAside
from ..ports import CURRENT, Advance, Answer, Verdict, instant
from ..stores.records import Record, StoredError, check_origin, seal
from ..stores.sealed import below
from .asides import in_thread_after, tell_of_beginning
from .attempt import clean
from .branch import Branch
from .context import RunContext
from .ending import Ending
from .history import History, newest_state, read_history
from .journal import Draft
from .steering import DEADLINE, Control
from .tasks import RunTask, interrupted, left
from .verify import is_newer
from .versions import Objection, definition_of, judge, write_migration
from .wakeups import receive

if TYPE_CHECKING:
    from ..model import Claim, Run
    from ..workflows.definition import Workflow
    from .engine import Engine

log = logging.getLogger("keepstep")

#: What the code of a set-aside run's error begins with; the phase follows in which it could not be taken up.
RECOVERY = "ks:recovery-"


class Runner:
    """Drives the runs of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ending = Ending(engine)

    # -- the beginning ------------------------------------------------------------------------------------------------

    async def drive(self, claim: Claim) -> None:
        """Take up a claimed run: load what it recorded, then call its code."""
        engine, run = self.engine, claim.run
        try:
            known = engine.workflows.get(run.workflow) or next(iter(engine.workflows.values()))  # if its row is damaged
            context = RunContext(engine, known, claim)
            engine.censor.heed(known)
        except EncryptionError as error:
            engine.encryption.cannot_read(error)
            await engine.put_back(claim, error)
            return
        engine.entered(context)
        try:
            if not await self._restore(context):
                return
        except (CheckpointCorrupt, SchemaMismatch) as error:
            if not await self._is_mine(context):  # it did not fit the claim because another owner has written since
                context.detach("its lease was lost")
            elif isinstance(error, SchemaMismatch) and await self._is_newer(run):
                context.detach("it is left to workers of a newer version")
                await engine.put_back(claim, error)
            else:
                self.set_aside(context, type(error).__name__, str(error), phase="load")
        except StoreError as error:
            context.halt(error)
        except Exception as error:
            log.exception("run %s cannot be taken up", run.id)
            self.set_aside(context, type(error).__name__, f"the run cannot be taken up: {error}", phase="rebuild")
        else:
            self._begin_or_record(context)

    async def _restore(self, context: RunContext) -> bool:
        """Load what the run recorded; False if it is left to a person instead."""
        run = context.run
        problem = self._objection(context)
        if problem:
            self.set_aside(context, *problem, phase="validate")
            return False
        if run.seq:
            await self._load(context)
            if not await self._is_current(context):
                return False
        else:
            check_origin(run)
        if run.signals:
            await self._load_signals(context)
        return True

    def _begin_or_record(self, context: RunContext) -> None:
        """Call the code; but if the records before were refused, only when one of this run has been written.

        A lease that recorded nothing and was given back is a number that is missing among the recorded leases. Its
        bodies may have been performed, and would be performed again and again by leases that can record nothing.
        """
        last = 0 if context.history is None else context.history.last_epoch
        if last is not None and context.claim.before is Status.QUEUED and context.claim.taken_from is None:
            context.unrecorded = max(0, context.epoch - last - 1)
        if not context.unrecorded and not self.engine.journal.refused:
            self.begin(context)
            return
        if context.seq:
            data = {"epoch": context.epoch, "unrecorded": context.unrecorded}
            record = Record(context.id, Kind.RECOVERED.value, worker=context.worker, trigger="recovery", data=data)
            record.finished_at = context.time()
        else:
            record = self.started(context.id, context.workflow, context.worker, context.time())
            context.now_at = record.finished_at or context.now_at

        def begin_soon(_: Answer) -> None:
            self.engine.loop.call_soon(self.begin, context, context=self.engine.context)

        context.append(record, then=begin_soon)

    async def _is_mine(self, context: RunContext) -> bool:
        """Whether the store still knows this incarnation as the owner; in doubt it decides when it is written to."""
        try:
            run = await self.engine.read(self.engine.store.get_run, context.id)
        except StoreError:
            return True
        return run is None or run.epoch == context.epoch

    async def _is_newer(self, run: Run) -> bool:
        """Whether a newer Keepstep has gone on with the run, so that its workers can again."""
        try:
            return await self.engine.call(is_newer, below(self.engine.store), run)
        except CheckpointCorrupt as error:
            return isinstance(error, SchemaMismatch)

    def _objection(self, context: RunContext) -> tuple[str, str] | None:
        run, workflow = context.run, context.workflow
        if run.workflow != workflow.name:
            return "CheckpointCorrupt", f"it is said to be a run of {run.workflow!r}, which it was not claimed as"
        decision = self.engine.recovery_limit.decide(run.recoveries)
        if isinstance(decision, SetAside):
            return "RecoveryLimit", decision.reason
        return None

    async def _is_current(self, context: RunContext) -> bool:
        """Whether the run fits the definition that is here, or was made to; else it is set aside, or lost."""
        if context.run.fingerprint == context.workflow.fingerprint or context.run.seq <= 1:
            return True
        verdict = await judge(context)
        if isinstance(verdict, Objection):
            self.set_aside(context, verdict.kind, verdict.reason, phase=verdict.phase)
        elif verdict is not None:
            if not await write_migration(context, verdict):
                context.detach("its lease was lost")
                return False
            await self._load(context)
        return not context.detached

    async def _load(self, context: RunContext) -> None:
        run = context.run
        try:
            base = await newest_state(self.engine, run) if context.carries_state else None
            history = await read_history(self.engine, run, History(run, 0 if base is None else base - 1))
        except CheckpointCorrupt as error:
            if not context.carries_state:
                raise
            history = await read_history(self.engine, run, History(run, without_states=True))
            log.warning("run %s: a consolidated state is damaged and was derived anew: %s", run.id, error)
            self.engine.teller.observe("run.state_rebuilt", context, error=str(error))
        context.history = history
        context.generation = history.generation
        context.retried_at = history.retried_at
        context.tried, context.marks, context.notes = history.tried, history.marks, history.notes
        context.consumed = history.signals
        context.steps = history.steps
        context.exact_time = history.exact_time
        context.wait_starts, context.patches = history.wait_starts, history.patches
        context.edits = history.edits
        context.spent = history.spent
        if context.guard is not None:
            context.guard.loaded(history.last_at)
        if history.started_at is not None:
            context.started_at = history.started_at
            context.set_now(history.started_at)
        if history.position is not None:
            context.position = history.position
            context.told = base or 1  # the state stands for every outcome before it
            context.set_now(history.position.moment)

    async def _load_signals(self, context: RunContext) -> None:
        signals: list[Signal] = []
        while True:
            page = await self.engine.read(self.engine.store.list_signals, context.id, signals[-1].seq if signals else 0)
            if not page:
                break
            signals.extend(page)
        receive(context, signals)

    def begin(self, context: RunContext) -> None:
        """Call the code; everything it needs to know is in memory."""
        if context.detached:
            return
        engine, run = self.engine, context.run
        if engine.forgetting is not None:
            engine.forgetting.begins(context)
        if context.seq == 0:
            record = self.started(run.id, context.workflow, context.worker, context.time())
            context.set_now(record.finished_at)
            context.spent.add(record)
            context.pending.append(Draft(record))  # rides with the first commit
        if context.claim.taken_from is not None:
            data = {"from": context.claim.taken_from, "epoch": context.epoch, "recoveries": run.recoveries}
            record = Record(run.id, Kind.RECOVERED.value, worker=context.worker, trigger="recovery", data=data)
            record.finished_at = context.time()
            context.pending.append(Draft(record))
            engine.teller.observe("run.recovering", context, taken_from=context.claim.taken_from)
        else:
            engine.teller.observe("run.started", context)
        passed = context.history is not None and DEADLINE in context.history.entries  # its clean-up is not cut short
        if context.deadline_at is not None and not passed:
            self._arm_deadline(context)
        try:
            stored = engine.encryption.input(run)
            args, kwargs = _arguments(context.workflow.values.decode(stored, f"workflow {run.workflow!r}: input"))
        except KeepstepError as error:
            told = f"the run's input cannot be restored: {error}"
            self.set_aside(context, type(error).__name__, told, phase="rebuild")
            return
        if context.cancelling and context.history is None:
            self._end_unbegun(context)
            return
        first = partial(tell_of_beginning, context) if context.workflow.hooks and _is_new(context) else None
        if context.workflow.is_async:
            task_context = copy_context()
            branch = Branch(context, "")
            task_context.run(CURRENT.set, branch)
            code = _contained(context.workflow.fn, args, kwargs, first)
            context.main = RunTask(code, branch, loop=engine.loop, context=task_context, name=f"run {run.id}")
        else:
            thread_context = copy_context()
            thread_context.run(CURRENT.set, Branch(context, ""))
            context.thread_busy = True
            future = engine.run_threads.submit(thread_context, partial(in_thread_after, first, context, args, kwargs))
            context.main = asyncio.wrap_future(future, loop=engine.loop)
        context.main.add_done_callback(partial(self._ending.code_ended, context), context=engine.context)
        context.watch()
        engine.hearing.begun(context)

    def _end_unbegun(self, context: RunContext) -> None:
        """A cancel came before the run began: it ends without its code, which has nothing to clean up."""
        context.main = self.engine.loop.create_future()
        context.main.add_done_callback(partial(self._ending.code_ended, context), context=self.engine.context)
        context.main.cancel()

    @staticmethod
    def started(run: str, workflow: Workflow[..., Any], worker: str, at: datetime) -> Record:
        """The first record of a run."""
        data = {"workflow": workflow.name, "version": workflow.version, **definition_of(workflow), "exact_time": True}
        return Record(run, Kind.RUN_STARTED.value, worker=worker, finished_at=at, data=data)

    def _arm_deadline(self, context: RunContext) -> None:
        deadline = context.deadline_at
        if deadline is None:
            return
        delay = deadline.timestamp() - self.engine.clock.now()
        if delay <= 0:
            self._deadline(context)
            return
        context.deadline_timer = self.engine.loop.call_later(
            min(delay, 86_400.0), self._deadline, context, context=self.engine.context
        )

    def _deadline(self, context: RunContext) -> None:
        if context.detached or context.timed_out or context.finishing or context.deadline_at is None:
            return
        if self.engine.clock.now() < context.deadline_at.timestamp():
            self._arm_deadline(context)
            return
        context.holding = True  # nothing new starts after the deadline
        record = Record(context.id, Kind.TIMER.value, step=DEADLINE, worker=context.worker)
        record.finished_at = context.time()
        context.append(record, Control(context))

    # -- setting aside ------------------------------------------------------------------------------------------------

    def set_aside(self, context: RunContext, kind: str, reason: str, *, phase: str = "resume") -> None:
        """Leave the run to a person, with the reason; whatever its code does no longer counts.

        `phase` says how far taking it up had come: load, validate, rebuild, handler, resume.
        """
        if context.detached:
            return
        context.detach(f"set aside: {reason}")
        reason = self.engine.censor.redact(reason)
        log.error("run %s is set aside: %s", context.id, reason)
        code = f"{RECOVERY}{phase}"
        error = StoredError(clean(kind), clean(reason), error_class="permanent", code=code, id=new_id("error"))
        self.engine.background(self._write_aside(context, error))

    async def _write_aside(self, context: RunContext, error: StoredError) -> None:
        def change(*, told: bool = True) -> Advance:
            record = Record(
                context.id, Kind.ERROR.value, outcome=Outcome.FAILURE.value, worker=context.worker, error=error
            )
            record.finished_at = instant(self.engine.clock.now())
            record.claimed = context.claimed
            row, checksum = seal(record, context.seq + 1, context.checksum, context.cipher)
            return Advance(
                context.id,
                context.worker,
                context.epoch,
                context.seq,
                rows=[row] if told else [],
                checksum=checksum if told else "",
                status=Status.SET_ASIDE,
                release=True,
                progress=False,
            )

        try:
            try:
                answer = await self.engine.journal.write(change)
            except CheckpointCorrupt:  # its head is so damaged that no record can follow it
                answer = await self.engine.journal.write(partial(change, told=False))
        except StoreError:
            self.engine.give_back_later(context)
            return
        if answer.verdict is Verdict.DONE:
            self.engine.teller.observe("run.set aside", context, reason=error.message)
            self.engine.pulse()


def _arguments(stored: Any) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(stored, list) and [type(part) for part in stored] == [list, dict]:
        return stored[0], stored[1]
    raise NotSerializable("what is stored are not the arguments of a call")


def _is_new(context: RunContext) -> bool:
    """Whether nothing of the run's code is recorded yet."""
    history = context.history
    return history is None or not (history.entries or history.tried or history.marks or history.position)


async def _contained(
    fn: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    first: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Any:
    """A workflow that leaves with `sys.exit` ends its run; to the loop it would be the order to end the worker."""
    try:
        if first is not None:
            await first()
        return await fn(*args, **kwargs)
    except SystemExit as error:
        raise left(error) from error
    except KeyboardInterrupt:
        interrupted()
        raise
