"""Drives one run: load its checkpoints, call its code, record how it ended.

Starting and recovering are this same act.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import (
    CheckpointCorrupt,
    EncryptionError,
    ExecutionError,
    KeepstepError,
    NotSerializable,
    RunTimedOut,
    SchemaMismatch,
    StoreError,
)
from ..model import Kind, Outcome, Signal, Status
from ..model.ids import MAX_ID, new_id
from ..model.signal import CHILD, RESERVED
from ..policies import SetAside, classify
from ..ports import CURRENT, Advance, Answer, Create, Send, Verdict, instant
from ..stores.records import Record, StoredError, check_origin, seal
from ..workflows.definition import Call
from .asides import in_thread_after, tell_of_beginning, tell_of_end
from .attempt import clean, idempotency_key, stored_error
from .branch import CANCELLED, Branch, DurableCall
from .context import RunContext
from .history import History, newest_state, read_history
from .journal import Draft, head_move
from .steering import DEADLINE, Control, cancel_children, control, in_doubt, overtaken
from .tasks import left
from .versions import Objection, definition_of, judge, write_migration
from .wakeups import receive

if TYPE_CHECKING:
    from ..model import Claim
    from ..workflows.definition import Workflow
    from .engine import Engine

log = logging.getLogger("keepstep")

#: How long branches that are still open when their workflow returns are given to clean up.
UNWIND_SECONDS = 30.0
#: So many steps of the way to the one that failed are kept with the end of a graph or dag: the newest.
MAX_PATH = 100
#: What only a replay asks for: all of it or nothing, or a replay would find a gap. The rest is there for readers.
_FOR_REPLAY = frozenset(
    {Kind.STEP_COMPLETED, Kind.STEP_CANCELLED, Kind.TIMER, Kind.SIGNAL, Kind.CHILD, Kind.DECISION, Kind.PATCH}
)
#: What the code of a set-aside run's error begins with; the phase follows in which it could not be taken up.
RECOVERY = "ks:recovery-"
#: How much of an error's message is told along with a mismatch.
_MAX_RAISED = 200


class ContinueAs(BaseException):
    """Ends a run and starts its successor; raised by `ks.continue_as`."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the run continues as its successor")
        self.input = payload


class Runner:
    """Drives the runs of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

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
            if await self._is_mine(context):
                self.set_aside(context, type(error).__name__, str(error), phase="load")
            else:  # the history did not fit the claim because another owner has written since
                context.detach("its lease was lost")
        except StoreError as error:
            context.halt(error)
        except Exception as error:
            log.exception("run %s cannot be taken up", run.id)
            self.set_aside(context, type(error).__name__, f"the run cannot be taken up: {error}", phase="rebuild")
        else:
            self.begin(context)

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

    async def _is_mine(self, context: RunContext) -> bool:
        """Whether the store still knows this incarnation as the owner; in doubt it decides when it is written to."""
        try:
            run = await self.engine.read(self.engine.store.get_run, context.id)
        except StoreError:
            return True
        return run is None or run.epoch == context.epoch

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
        context.tried, context.marks, context.notes = history.tried, history.marks, history.notes
        context.consumed = history.signals
        context.steps = history.steps
        context.edits = history.edits
        context.spent = history.spent
        if context.guard is not None:
            context.guard.loaded(history.last_at)
        if history.started_at is not None:
            context.now_at = context.started_at = history.started_at
        if history.position is not None:
            context.position = history.position
            context.now_at = history.position.moment or context.now_at

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
        if context.seq == 0:
            record = self.started(run.id, context.workflow, context.worker, context.time())
            context.now_at = record.finished_at or context.now_at
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
        first = partial(tell_of_beginning, context) if context.workflow.hooks and _is_new(context) else None
        if context.workflow.is_async:
            task_context = copy_context()
            task_context.run(CURRENT.set, Branch(context, ""))
            code = _contained(context.workflow.fn, args, kwargs, first)
            context.main = asyncio.Task(code, loop=engine.loop, context=task_context, name=f"run {run.id}")
        else:
            thread_context = copy_context()
            thread_context.run(CURRENT.set, Branch(context, ""))
            context.thread_busy = True
            future = engine.run_threads.submit(thread_context, partial(in_thread_after, first, context, args, kwargs))
            context.main = asyncio.wrap_future(future, loop=engine.loop)
        context.main.add_done_callback(partial(self._code_ended, context), context=engine.context)
        context.watch()
        engine.hearing.begun(context)

    @staticmethod
    def started(run: str, workflow: Workflow[..., Any], worker: str, at: datetime) -> Record:
        """The first record of a run."""
        data = {"workflow": workflow.name, "version": workflow.version, **definition_of(workflow)}
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

    # -- the end ------------------------------------------------------------------------------------------------------

    def _code_ended(self, context: RunContext, future: asyncio.Future[Any]) -> None:
        if context.detached:
            if not future.cancelled():
                future.exception()  # what a detached run's code does is discarded
            return
        context.thread_busy = False
        outside = isinstance(future, asyncio.Task) and future.cancelled() and future.cancelling() > 0
        if outside and not (context.cancelling or context.timed_out):
            context.detach("its task was cancelled from outside")  # a shutdown, not an end of the run
            self.engine.give_back_later(context)
            return
        context.finishing = True
        if (context.tasks or context.bodies or context.waits or context.history is not None) or (
            context.workflow.hooks or context.asides
        ):
            self.engine.background(self._conclude(context, future))
        else:
            self._write_end(context, future)

    async def _conclude(self, context: RunContext, future: asyncio.Future[Any]) -> None:
        await self._close_branches(context)
        if context.detached:
            return
        history = context.history
        if history is not None:
            left = [
                entry
                for entry in history.order
                if not entry.key.startswith("ks:") and not self._is_gone(context, entry)
            ]
            if left:
                context.mismatch(
                    f"seq {left[0].seq} recorded {left[0].key}, which the code no longer asks for before it ends"
                    f"{self._raised(context, future)}"
                )
                return
            for entry in history.order:
                if entry.record is not None and entry.key.startswith("ks:"):
                    control(context, entry.record)  # a cancel that came after the code had ended
            context.history = None
        if context.asides:
            await asyncio.wait(context.asides)
        if context.workflow.hooks:
            scratch = Record(context.id, Kind.RUN_FINISHED.value)
            await tell_of_end(context, self._judge(context, future, scratch, [], []), future)
        self._write_end(context, future)

    @staticmethod
    def _raised(context: RunContext, future: asyncio.Future[Any]) -> str:
        """The end of a sentence: what the code has raised, if it has."""
        error = None if future.cancelled() else future.exception()
        if error is None or isinstance(error, ContinueAs):
            return ""
        kept = stored_error(error, "", 0, context)
        return f"; it raises {kept.type}: {kept.message[:_MAX_RAISED]}"

    @staticmethod
    def _is_gone(context: RunContext, entry: Any) -> bool:
        call = context.asked.get(entry.key)
        return call is not None and call.state == CANCELLED

    async def _close_branches(self, context: RunContext) -> None:
        """When the workflow returns, what it left open is cancelled and reported."""
        open_tasks = [task for task in context.tasks if not task.done()]
        for task in open_tasks:
            task.cancel()
        if open_tasks:
            log.warning("run %s ended with %d open branches, which were cancelled", context.id, len(open_tasks))
            await asyncio.wait(open_tasks, timeout=UNWIND_SECONDS)
        for call in [*context.bodies, *context.waits, *context.asked.values(), *context.held]:
            if isinstance(call, DurableCall):
                call.cancel()

    def _write_end(self, context: RunContext, future: asyncio.Future[Any]) -> None:
        """Commit the end of the run, unless a signal came that was not yet seen."""
        try:
            self._try_to_end(context, future)
        except Exception as error:  # noqa: BLE001 - a run must never be left without an end
            context.engine_failed(error)

    def _try_to_end(self, context: RunContext, future: asyncio.Future[Any]) -> None:
        if context.detached:
            return
        overtaken(context)
        record = Record(context.id, Kind.RUN_FINISHED.value, worker=context.worker)
        record.started_at = context.run.created_at
        record.finished_at = context.time()
        creates: list[Create] = []
        sends: list[Send] = []
        status = self._judge(context, future, record, creates, sends)
        if status is Status.CANCELLED:
            cancel_children(context)  # unless they were told with the code
        if context.run.parent is not None and not creates:
            sends.append(self._word_to_parent(context, status, record))
        if status is Status.COMPLETED and context.workflow.durability.choice == "off":
            _drop_steps(context)
        change = head_move(status, release=True, signals_seen=context.signals_seen, creates=creates, sends=sends)
        again = partial(self._write_end, context, future)
        context.append_special(
            record,
            change,
            partial(self._ended, context, status, record),
            partial(self._end_refused, context, again, sends),
        )

    def _judge(
        self,
        context: RunContext,
        future: asyncio.Future[Any],
        record: Record,
        creates: list[Create],
        sends: list[Send],
    ) -> Status:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if context.cancelling:
            record.outcome = Outcome.CANCELLED.value
            record.error = self._error_of_cancelled(context, error)
            return Status.CANCELLED
        if context.timed_out:
            error = RunTimedOut(f"run {context.id!r} was not finished by its deadline", context.id)
        if isinstance(error, ContinueAs):
            self._succeed(context, error, record, creates, sends)
            return Status.COMPLETED
        if error is None and isinstance(future.result(), Call):
            name = context.workflow.name
            error = NotSerializable(f"workflow {name!r} returned a call that was not awaited; did you forget `await`?")
        if error is None:
            try:
                value = context.workflow.values.encode(future.result(), f"workflow {context.workflow.name!r}: result")
                self.engine.censor.check(value, context.workflow.name, "result of workflow")
            except NotSerializable as refusal:
                error = refusal
            else:
                record.value = msgspec.Raw(value)
                return Status.COMPLETED
        record.outcome = Outcome.FAILURE.value
        record.error = stored_error(error, str(classify(error)), 0, context)
        if context.timed_out:
            record.error.code = "ks:run-timed-out"
        if isinstance(error, ExecutionError):
            record.data = {"at": error.step, "path": list(error.path[-MAX_PATH:])}
        return Status.FAILED

    @staticmethod
    def _error_of_cancelled(context: RunContext, error: BaseException | None) -> StoredError | None:
        """What went wrong in its clean-up, or what a cancel has left in doubt."""
        if error is not None and not isinstance(error, asyncio.CancelledError):
            return stored_error(error, str(classify(error)), 0, context)
        return in_doubt(context.doubts) if context.doubts else None

    def _succeed(
        self, context: RunContext, error: ContinueAs, record: Record, creates: list[Create], sends: list[Send]
    ) -> None:
        """Make the successor of a run; signals that were not read move over to it."""
        run = context.run
        base, _, number = run.id.rpartition("~")
        count = int(number) + 1 if base and number.isdecimal() else 2
        base = base if base and number.isdecimal() else run.id
        successor = replace(
            run,
            id=f"{base[: MAX_ID - 12]}~{count}",
            status=Status.QUEUED,
            input=error.input,
            created_at=context.time(),
            created_by=f"run {run.id}",
            version=context.workflow.version,
            fingerprint=context.workflow.fingerprint,
            seed=idempotency_key(run.seed, f"{base}~{count}", 0)[:16],  # as a child's: another, but no new chance
            seq=0,
            checksum="",
            epoch=0,
            worker=None,
            due_at=context.time(),
            wakes=(),
            signals=0,
            recoveries=0,
            updated_at=None,
        )
        creates.append(context.engine.encryption.born(successor))
        record.data = {"continued_as": successor.id}
        record.value = msgspec.Raw(b"null")
        unread = [signal for signal in context.inbox if not signal.name.startswith(RESERVED)]  # not a child's last word
        sends.extend(Send(replace(signal, run=successor.id, seq=0)) for signal in unread)

    @staticmethod
    def _word_to_parent(context: RunContext, status: Status, record: Record) -> Send:
        word: dict[str, Any] = {"status": status.value, "child": context.id}
        if record.value is not msgspec.UNSET:
            word["value"] = record.value
        if record.error is not None:
            word["error"] = record.error
        run, spent = context.run, context.spent
        if spent.cost or spent.tokens:
            word["spent"] = {"cost": spent.cost, "tokens": spent.tokens}
        signal = Signal(
            run.parent or "",
            f"{CHILD}{run.parent_key}",
            msgspec.json.encode(word),
            id=f"child:{context.id}",
            sender=f"run {context.id}",
            sent_at=record.finished_at,
        )
        return Send(signal)

    def _ended(self, context: RunContext, status: Status, record: Record, _: Answer) -> None:
        value = record.raw()
        error = record.error.info() if record.error is not None else None
        continued = (record.data or {}).get("continued_as")
        context.end = (status, value, error, continued)
        self.engine.teller.observe(f"run.{status.value}", context)
        context.detach("it ended")
        if context.run.parent is not None:
            self.engine.signalled(context.run.parent)
        if continued:
            self.engine.poke()

    def _end_refused(self, context: RunContext, again: Any, sends: list[Send], answer: Answer) -> None:
        if answer.verdict is Verdict.MISSED:
            self.engine.background(self._look_and(context, again))
        elif answer.verdict in (Verdict.NOT_FOUND, Verdict.FINISHED) and context.run.parent is not None:
            # The parent is gone, so nobody waits for the word.
            context.run = replace(context.run, parent=None)
            again()
        else:
            self.set_aside(context, "StoreRefused", f"the end of the run was refused: {answer.verdict} {answer.about}")

    async def _look_and(self, context: RunContext, again: Any) -> None:
        try:
            signals = await self.engine.read(self.engine.store.list_signals, context.id, context.signals_seen)
            if not signals:
                await self.engine.hearing.check_missed(context)
            receive(context, signals)
        except CheckpointCorrupt as error:
            self.set_aside(context, "CheckpointCorrupt", str(error))
            return
        except StoreError as error:
            context.halt(error)
            return
        again()

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


def _drop_steps(context: RunContext) -> None:
    """Under durability `off` nobody asks any more for steps that were not written by the time of a good end."""
    if not context.journal.holds(context):  # what is about to be written was called for
        context.pending = [
            draft
            for draft in context.pending
            if draft.record is None
            or draft.change is not None
            or draft.record.kind not in _FOR_REPLAY
            or draft.record.step.startswith(RESERVED)
        ]


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
