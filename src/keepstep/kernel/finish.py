"""Ends a run: evaluates what its code returned or raised, and commits it with all consequences."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import (
    CheckpointCorrupt,
    DefinitionError,
    ExecutionError,
    KeepstepError,
    NotSerializable,
    RunTimedOut,
    StoreError,
)
from ..model import Kind, Outcome, Signal, Status
from ..model.checkpoint import ONLY_FOR_REPLAY
from ..model.ids import module_in, seed_in
from ..model.keepers import TELLS, notice_of
from ..model.series import SERIES, first_of, names_in_word, successor_id
from ..model.signal import CHILD, MESSAGES, RESERVED
from ..model.undo import AT_END, UNDO, UNDONE, is_command
from ..ports import CURRENT, Answer, Create, Send, Verdict
from ..records.data import RunFinishedData, data_of, new_data
from ..records.record import Record, StoredError
from ..values.large import is_large
from ..workflows.call import Call
from .attempt import idempotency_key
from .call_states import CANCELLED, ContinueAs, in_doubt
from .calls import DurableCall
from .failure_point import failed_by
from .generators import UNWIND_SECONDS
from .hooks import tell_of_end
from .log import Draft, head_move
from .steering import cancel_children, control, overtaken, signal_record
from .stored_errors import class_of, root_of, stored_error, stored_exception
from .strands import RunTask
from .tracing import traceparent_from
from .wakeups import receive

if TYPE_CHECKING:
    from .driver import RunDriver
    from .host import Host
    from .replay import History

log = logging.getLogger("keepstep")

#: Steps of the path to a failure that are kept at most with the end of a graph or dag; the newest ones.
MAX_PATH = 100
#: Characters of an error's message in the report of a mismatch.
_MAX_RAISED = 200


def _continues(error: BaseException | None) -> ContinueAs | None:
    """Return the `ks.continue_as` that ended the code or a task of a group; None if anything else failed too."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, ContinueAs) else None


def _may_undo(context: RunDriver) -> bool:
    """Whether a step of the run may have to be undone. A graph that went on from a state has not read all records."""
    return context.undo is not None or context.workflow.has_undo


def _is_large(future: asyncio.Future[Any]) -> bool:
    """Whether the code has returned a large value."""
    return not future.cancelled() and future.exception() is None and is_large(future.result())


class Ending:
    """Ends the runs of one engine."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def code_ended(self, context: RunDriver, future: asyncio.Future[Any]) -> None:
        if context.stop.detached:
            if not future.cancelled():
                future.exception()  # the outcome of a detached run's code is discarded
            return
        if isinstance(future, RunTask) and future.cancelled() and future.cancelled_from_outside:
            context.detach("its task was cancelled from outside")  # a shutdown, not an end of the run
            self.host.give_back_later(context)
            return
        context.code_ended()
        if (context.tasks or context.bodies or context.waits or context.history is not None) or (
            context.workflow.hooks or context.asides or _may_undo(context) or _is_large(future)
        ):
            self.host.background(self._conclude(context, future))
        else:
            self._write_end(context, future)

    async def _conclude(self, context: RunDriver, future: asyncio.Future[Any]) -> None:
        await self._close_branches(context)
        if context.stop.detached:
            return
        if context.history is not None and not self._replayed_to_end(context, context.history, future):
            return
        if context.asides:
            await asyncio.wait(context.asides)
        if _is_large(future):
            await self._encode(context, future.result())
        if self._is_to_undo(context, future):
            self._begin_undo(context, future)
            return
        if context.history is not None:
            context.mismatch("the run began to undo its steps, and its code now ends as completed")
            return
        if context.workflow.hooks:
            scratch = Record(context.id, Kind.RUN_FINISHED.value)
            await tell_of_end(context, self._judge(context, future, scratch, [], []), future)
        self._write_end(context, future)

    def _replayed_to_end(self, context: RunDriver, history: History, future: asyncio.Future[Any]) -> bool:
        """Deliver the commands that came after the code had ended, up to the undo. Return False after a mismatch."""
        undo = history.entries.get(AT_END)
        end = math.inf if undo is None else undo.seq  # from here on, the records are those of the undo
        left = [
            entry
            for entry in history.order
            if entry.seq < end and not is_command(entry.key) and not self._is_gone(context, entry)
        ]
        if left:
            context.mismatch(
                f"seq {left[0].seq} recorded {left[0].key}, which the code no longer calls before it ends"
                f"{self._raised(context, future)}"
            )
            return False
        while history.order and history.order[0].seq < end:
            entry = history.order.popleft()
            if entry.record is not None and is_command(entry.key):
                control(context, entry.record)
        if undo is None:
            context.replayed()
        return True

    async def _encode(self, context: RunDriver, value: Any) -> None:
        """Encode a large result off the loop, before the end is written."""
        try:
            context.result_encoded(await self.host.off_loop(self._result, context, value))
        except (NotSerializable, DefinitionError) as refusal:
            context.result_encoded(refusal)
        except Exception:  # noqa: BLE001 - raised again when the end is written
            context.result_encoded(None)

    # -- undoing what the code has done --------------------------------------------------------------------------------

    def _is_to_undo(self, context: RunDriver, future: asyncio.Future[Any]) -> bool:
        """Whether the run ends failed or cancelled, with steps that may have to be undone first."""
        if context.is_undone or not _may_undo(context):
            return False
        if context.stop.is_dry and context.history is None:  # no decision is made that is not recorded
            return False
        return self._judge(context, future, Record(context.id, Kind.RUN_FINISHED.value), [], []) is not Status.COMPLETED

    def _begin_undo(self, context: RunDriver, future: asyncio.Future[Any]) -> None:
        """Drive the run on, to undo what its code has done; it then ends as it would have."""
        from .undo import UndoBranch, undo_all  # noqa: PLC0415 - only needed by runs with something to undo

        branch = UndoBranch(context, UNDO)
        task_context = self.host.context.copy()
        task_context.run(CURRENT.set, branch)
        main = RunTask(
            undo_all(context), branch, loop=self.host.loop, context=task_context, name=f"undo of run {context.id}"
        )
        context.undo_begun(main)
        main.add_done_callback(partial(self._undone, context, future), context=self.host.context)
        context.watch()

    def _undone(self, context: RunDriver, future: asyncio.Future[Any], main: asyncio.Future[None]) -> None:
        if context.stop.detached:
            if not main.cancelled():
                main.exception()  # the outcome of a detached run is discarded
            return
        if main.cancelled():
            context.detach("its task was cancelled from outside")
            self.host.give_back_later(context)
            return
        error = main.exception()
        if isinstance(error, Exception):
            context.engine_failed(error)
            return
        context.undo_ended()
        self.host.background(self._conclude(context, future))

    @staticmethod
    def _raised(context: RunDriver, future: asyncio.Future[Any]) -> str:
        """Return the end of a sentence with the error that the code has raised, or ""."""
        error = None if future.cancelled() else future.exception()
        if error is None or _continues(error) is not None:
            return ""
        kept = stored_error(error, "", 0, context)
        return f"; it raises {kept.type}: {kept.message[:_MAX_RAISED]}"

    @staticmethod
    def _is_gone(context: RunDriver, entry: Any) -> bool:
        call = context.asked.get(entry.key)
        return call is not None and call.state == CANCELLED

    async def _close_branches(self, context: RunDriver) -> None:
        """Cancel and report branches that the workflow left open when it returned."""
        open_tasks = [task for task in context.tasks if not task.done()]
        for task in open_tasks:
            task.cancel()
        if open_tasks:
            log.warning("run %s ended with %d open branches; they were cancelled", context.id, len(open_tasks))
            await asyncio.wait(open_tasks, timeout=UNWIND_SECONDS)
        for call in [*context.bodies.values(), *context.waits, *context.asked.values(), *context.held]:
            if isinstance(call, DurableCall):
                call.cancel()

    def _write_end(self, context: RunDriver, future: asyncio.Future[Any]) -> None:
        """Commit the end of the run, unless there is an unseen signal."""
        try:
            self._try_to_end(context, future)
        except Exception as error:  # noqa: BLE001 - a run must never be left without an end
            context.engine_failed(error)

    def _try_to_end(self, context: RunDriver, future: asyncio.Future[Any]) -> None:
        if context.stop.detached:
            return
        if self._is_to_undo(context, future):  # a cancel came after the code had ended
            self._begin_undo(context, future)
            return
        overtaken(context)
        for signal in context.inbox.arrived():
            context.append(signal_record(context, signal))
        record = Record(context.id, Kind.RUN_FINISHED.value, worker=context.worker)
        record.agent = context.workflow.agent
        record.started_at = context.run.created_at
        record.finished_at = context.time()
        creates: list[Create] = []
        sends: list[Send] = []
        status = self._judge(context, future, record, creates, sends)
        if status is Status.CANCELLED:
            cancel_children(context)  # unless they were cancelled together with the code
        if context.run.parent is not None and not creates:
            root = None if future.cancelled() else root_of(future.exception(), context)
            sends.append(self._word_to_parent(context, status, record, root))
        if context.run.tags and not creates:
            notice = notice_of(context.run, context.generation, record.finished_at)
            sends += [] if notice is None else [Send(notice, optional=True)]
        if status is Status.FAILED and record.error is not None:
            text = f"{record.error.type}: {record.error.message}"
            key = str(context.generation)
            sends += self.host.notices("failed", context.run, text=text, key=key, at=record.finished_at)
        if status is Status.COMPLETED and context.workflow.durability.choice == "off":
            _drop_steps(context)
        change = head_move(status, release=True, signals_seen=context.inbox.seen, creates=creates, sends=sends)
        again = partial(self._write_end, context, future)
        context.append_special(
            record,
            change,
            partial(self._ended, context, status, record),
            partial(self._end_refused, context, again, future),
            packed=context.result[1] if status is Status.COMPLETED and isinstance(context.result, tuple) else None,
        )

    def _judge(
        self,
        context: RunDriver,
        future: asyncio.Future[Any],
        record: Record,
        creates: list[Create],
        sends: list[Send],
    ) -> Status:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if context.stop.is_cancelled:
            record.outcome = Outcome.CANCELLED.value
            record.error = self._error_of_cancelled(context, error)
            return Status.CANCELLED
        if context.stop.is_timed_out:
            late = RunTimedOut(f"run {context.id!r} was not finished by its deadline", context.id)
            late.__context__, late.__suppress_context__ = error, True  # the code may have failed before the deadline
            error = late
        goes_on = _continues(error)
        if goes_on is not None:
            self._succeed(context, goes_on, record, creates, sends)
            return Status.COMPLETED
        if error is None and isinstance(future.result(), Call):
            name, word = context.workflow.name, "`await`" if context.workflow.is_async else "`.result()`"
            error = NotSerializable(f"workflow {name!r} returned a call that has not run; did you forget {word}?")
        if error is None:
            try:
                value, _ = self._result(context, future.result())
            except (NotSerializable, DefinitionError) as refusal:
                error = refusal
            else:
                record.value = msgspec.Raw(value)
                return Status.COMPLETED
        self._fail(context, error, record)
        return Status.FAILED

    @staticmethod
    def _fail(context: RunDriver, error: BaseException, record: Record) -> None:
        """Put the error that failed the run into the record of its end."""
        record.outcome = Outcome.FAILURE.value
        record.error = stored_error(error, _class_of(error, context), 0, context)
        data = stored_exception(error, context.workflow.values, context, f"workflow {context.workflow.name!r}")
        if data is not None:
            record.value = msgspec.Raw(data)
        if context.stop.is_timed_out:
            record.error.code = "ks:run-timed-out"
        elif context.undo is not None and context.undo.begun:
            record.error.code = record.error.code or UNDONE
        point, record.error.caused_by = failed_by(context, error)
        record.data = new_data(RunFinishedData, failed_at=point)
        if isinstance(error, ExecutionError):
            record.data["at"], record.data["path"] = error.step, list(error.path[-MAX_PATH:])

    def _result(self, context: RunDriver, value: Any) -> tuple[bytes, bytes | None]:
        """Return the stored form of the code's return value, and its compressed form if there is one."""
        if isinstance(context.result, KeepstepError):
            raise context.result
        if context.result is not None:
            return context.result
        workflow = context.workflow
        if context.typed:
            value = workflow.types.result(value)
        data = workflow.values.encode(value, f"workflow {workflow.name!r}: result")
        self.host.redaction.check(data, workflow.name, "result of workflow")
        return data, self.host.packed(data)

    @staticmethod
    def _error_of_cancelled(context: RunDriver, error: BaseException | None) -> StoredError | None:
        """Return the error of the clean-up, or the doubt that a cancel left."""
        if error is not None and not isinstance(error, asyncio.CancelledError):
            return stored_error(error, _class_of(error, context), 0, context)
        return in_doubt(context.doubts) if context.doubts else None

    def _succeed(
        self, context: RunDriver, error: ContinueAs, record: Record, creates: list[Create], sends: list[Send]
    ) -> None:
        """Create the successor of a run; unread signals move to it."""
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
            # as for a child: derived, not random
            seed=seed_in(idempotency_key(run.seed, name, 0)[:16], module_in(run.seed)),
            tags={**run.tags, SERIES: first},
            traceparent=traceparent_from(context.host.tracer, run),
            seq=0,
            checksum="",
            epoch=0,
            worker=None,
            due_at=context.time(),
            wakes=(),
            signals=0,
            recoveries=0,
            updated_at=None,
            deadline_at=context.deadline_at,  # a retry may have removed the deadline
        )
        creates.append(context.host.encryption.born(successor))
        record.data = new_data(RunFinishedData, continued_as=successor.id)
        record.value = msgspec.Raw(b"null")
        # with the messages of topics, and without outcomes of children
        unread = [one for one in context.inbox if not one.name.startswith(RESERVED) or one.name.startswith(MESSAGES)]
        sends.extend(Send(replace(signal, run=successor.id, seq=0)) for signal in unread)

    @staticmethod
    def _word_to_parent(context: RunDriver, status: Status, record: Record, root: StoredError | None) -> Send:
        word: dict[str, Any] = {"status": status.value, **names_in_word(context.run)}
        if record.value is not msgspec.UNSET:
            word["value"] = record.value
        if record.error is not None:
            word["error"] = record.error
            if root is not None and record.error.info().is_wrapper:
                word["root"] = root
        run, spent = context.run, context.spent
        if spent.cost or spent.tokens:
            word["spent"] = {"cost": spent.cost, "tokens": spent.tokens}
            if models := spent.models():
                word["models"] = models
        signal = Signal(
            run.parent or "",
            f"{CHILD}{run.parent_key}",
            msgspec.json.encode(word),
            id=f"child:{context.id}:{context.generation}" if context.generation else f"child:{context.id}",
            sender=f"run {context.id}",
            sent_at=record.finished_at,
        )
        return Send(signal)

    def _ended(self, context: RunDriver, status: Status, record: Record, _: Answer) -> None:
        value = record.raw()
        error = record.error.info() if record.error is not None else None
        continued = data_of(record, RunFinishedData).get("continued_as")
        self.host.events.ended(context, status, record)
        context.ended((status, value, error, continued))
        if context.run.parent is not None:
            self.host.signalled(context.run.parent)
        if TELLS in context.run.tags:
            self.host.signalled(context.run.tags[TELLS])
        if continued:
            self.host.claim_soon()

    def _end_refused(self, context: RunDriver, again: Any, future: asyncio.Future[Any], answer: Answer) -> None:
        goes_on = None if future.cancelled() else _continues(future.exception())
        if answer.verdict is Verdict.MISSED:
            self.host.background(self._look_and(context, again))
        elif answer.verdict in (Verdict.NOT_FOUND, Verdict.FINISHED) and context.run.parent is not None:
            context.orphaned()
            again()
        elif answer.verdict is Verdict.CONFLICT and goes_on is not None and not goes_on.taken:
            goes_on.taken = True
            again()
        else:
            self.host.set_aside(
                context, "StoreRefused", f"the end of the run was refused: {answer.verdict} {answer.about}"
            )

    async def _look_and(self, context: RunDriver, again: Any) -> None:
        try:
            signals = await self.host.signals(context.id, context.inbox.seen)
            if not signals:
                await self.host.signal_reader.check_missed(context)
            receive(context, signals)
        except CheckpointCorrupt as error:
            self.host.set_aside(context, "CheckpointCorrupt", str(error))
            return
        except StoreError as error:
            context.halt(error)
            return
        again()


def _drop_steps(context: RunDriver) -> None:
    """Drop unwritten steps of a successful run with durability `off`; nobody will read them."""
    if not context.journal.holds(context):  # drafts already with the journal were requested
        context.drop(_is_only_for_replay)


def _is_only_for_replay(draft: Draft) -> bool:
    record = draft.record
    if record is None or draft.change is not None:
        return False
    return record.kind in ONLY_FOR_REPLAY and not is_command(record.step)


def _class_of(error: BaseException, context: RunDriver) -> str:
    return class_of(error, context.workflow.rules + context.host.rules)
