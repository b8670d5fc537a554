"""The end of a run: what its code returned or raised is judged, and committed with all that follows from it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CheckpointCorrupt, ExecutionError, NotSerializable, RunTimedOut, StoreError
from ..model import Kind, Outcome, Signal, Status
from ..model.ids import module_in, seed_in
from ..model.series import SERIES, first_of, names_in_word, successor_id
from ..model.signal import CHILD, RESERVED
from ..policies import classify
from ..ports import Answer, Create, Send, Verdict
from ..stores.records import Record, StoredError
from ..workflows.definition import Call
from .asides import tell_of_end
from .attempt import idempotency_key, stored_error
from .branch import CANCELLED, DurableCall
from .failure_point import failed_by
from .journal import head_move
from .steering import cancel_children, control, in_doubt, overtaken
from .tasks import RunTask
from .wakeups import receive

if TYPE_CHECKING:
    from .context import RunContext
    from .engine import Engine

log = logging.getLogger("keepstep")

#: How long branches that are still open when their workflow returns are given to clean up.
UNWIND_SECONDS = 30.0
#: So many steps of the way to the one that failed are kept with the end of a graph or dag: the newest.
MAX_PATH = 100
#: What only a replay asks for: all of it or nothing, or a replay would find a gap. The rest is there for readers.
_FOR_REPLAY = frozenset(
    (
        *(Kind.STEP_COMPLETED, Kind.STEP_CANCELLED, Kind.WAIT_STARTED, Kind.TIMER),
        *(Kind.SIGNAL, Kind.CHILD, Kind.DECISION, Kind.PATCH),
    )
)
#: How much of an error's message is told along with a mismatch.
_MAX_RAISED = 200


class ContinueAs(BaseException):
    """Ends a run and starts its successor; raised by `ks.continue_as`."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the run continues as its successor")
        self.input = payload
        self.taken = False  # whether the successor's usual id is that of somebody's own run


def _continues(error: BaseException | None) -> ContinueAs | None:
    """The `ks.continue_as` that ended the code, also from a task of a group; None if anything else failed there too."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, ContinueAs) else None


class Ending:
    """Ends the runs of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def code_ended(self, context: RunContext, future: asyncio.Future[Any]) -> None:
        if context.detached:
            if not future.cancelled():
                future.exception()  # what a detached run's code does is discarded
            return
        context.thread_busy = False
        if not future.cancelled() and isinstance(future.exception(), KeyboardInterrupt):  # in a thread
            context.interrupt()
            raise KeyboardInterrupt
        if isinstance(future, RunTask) and future.cancelled() and future.cancelled_from_outside:
            context.detach("its task was cancelled from outside")  # a shutdown, not an end of the run
            self.engine.give_back_later(context)
            return
        context.finishing, context.told_at_end = True, context.told
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
        if error is None or _continues(error) is not None:
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
            partial(self._end_refused, context, again, future),
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
            late = RunTimedOut(f"run {context.id!r} was not finished by its deadline", context.id)
            late.__context__, late.__suppress_context__ = error, True  # the code may have failed before that
            error = late
        goes_on = _continues(error)
        if goes_on is not None:
            self._succeed(context, goes_on, record, creates, sends)
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
        point, record.error.caused_by = failed_by(context, error)
        record.data = {"failed_at": point}
        if isinstance(error, ExecutionError):
            record.data |= {"at": error.step, "path": list(error.path[-MAX_PATH:])}
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
        first, name = first_of(run), successor_id(run)
        successor = replace(
            run,
            id=successor_id(run, taken=error.taken),
            status=Status.QUEUED,
            input=error.input,
            created_at=context.time(),
            created_by=f"run {run.id}",
            version=context.workflow.version,
            fingerprint=context.workflow.fingerprint,
            seed=seed_in(idempotency_key(run.seed, name, 0)[:16], module_in(run.seed)),  # as a child's: no new chance
            tags={**run.tags, SERIES: first},
            seq=0,
            checksum="",
            epoch=0,
            worker=None,
            due_at=context.time(),
            wakes=(),
            signals=0,
            recoveries=0,
            updated_at=None,
            deadline_at=context.deadline_at,  # not the one that a retry has taken off
        )
        creates.append(context.engine.encryption.born(successor))
        record.data = {"continued_as": successor.id}
        record.value = msgspec.Raw(b"null")
        unread = [signal for signal in context.inbox if not signal.name.startswith(RESERVED)]  # not a child's last word
        sends.extend(Send(replace(signal, run=successor.id, seq=0)) for signal in unread)

    @staticmethod
    def _word_to_parent(context: RunContext, status: Status, record: Record) -> Send:
        word: dict[str, Any] = {"status": status.value, **names_in_word(context.run)}
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
            id=f"child:{context.id}:{context.generation}" if context.generation else f"child:{context.id}",
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

    def _end_refused(self, context: RunContext, again: Any, future: asyncio.Future[Any], answer: Answer) -> None:
        goes_on = None if future.cancelled() else _continues(future.exception())
        if answer.verdict is Verdict.MISSED:
            self.engine.background(self._look_and(context, again))
        elif answer.verdict in (Verdict.NOT_FOUND, Verdict.FINISHED) and context.run.parent is not None:
            # The parent is gone, so nobody waits for the word.
            context.run = replace(context.run, parent=None)
            again()
        elif answer.verdict is Verdict.CONFLICT and goes_on is not None and not goes_on.taken:
            goes_on.taken = True
            again()
        else:
            self.engine.runner.set_aside(
                context, "StoreRefused", f"the end of the run was refused: {answer.verdict} {answer.about}"
            )

    async def _look_and(self, context: RunContext, again: Any) -> None:
        try:
            signals = await self.engine.read(self.engine.store.list_signals, context.id, context.signals_seen)
            if not signals:
                await self.engine.hearing.check_missed(context)
            receive(context, signals)
        except CheckpointCorrupt as error:
            self.engine.runner.set_aside(context, "CheckpointCorrupt", str(error))
            return
        except StoreError as error:
            context.halt(error)
            return
        again()


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
