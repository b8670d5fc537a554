"""A handle on one run: its result, its data and its control, wherever the run is driven."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from ..checks import check_name, check_text, seconds_of
from ..errors import (
    RECOVERY_PHASES,
    AlreadyFinished,
    CheckpointCorrupt,
    DefinitionError,
    ExecutionError,
    HandlerFailed,
    HandlerMissing,
    NotSerializable,
    RecoveryError,
    ReplayMismatch,
    RunCancelled,
    RunConflict,
    RunFailed,
    RunNotFound,
    RunSetAside,
    RunTimedOut,
    SignalsFull,
    StoreError,
    StoreUnavailable,
    TimedOut,
)
from ..history.series import newest_run, next_run
from ..kernel.graph.position import Position, level_of
from ..kernel.replay import REST_AFTER, Superseded, check_not_removed, kept_state, read_records, unsealed
from ..kernel.stored_errors import reported_error
from ..kernel.waits import SignalCall, heartbeat, question, report, signal_name
from ..model import FINISHED, Checkpoint, ErrorInfo, Event, Kind, Run, Signal, State, Status
from ..model.checkpoint import TELLS_PUBLISHED
from ..model.event import EventName, event_of_record
from ..model.ids import new_id
from ..model.signal import CANCEL, GO, MAX_UNREAD, PAUSE, RESERVED, RESOLVE, RESUME
from ..ports import Send, Verdict, instant
from ..records.data import ChildData, ErrorData, PublishedData, ReplyData, RunFinishedData, data_of
from ..records.facts import facts_of, life_of
from ..records.keys import is_encrypted
from ..records.progress import report_in
from ..records.record import Record, checkpoint, unseal
from ..values import VALUES, Values
from ..workflows.schema import as_written

if TYPE_CHECKING:
    from ..history.audit import AuditEntry
    from ..history.diff import Difference
    from ..history.dry_replay import Replayed
    from ..history.rewind import Rewound
    from ..history.run_info import RunInfo
    from ..kernel.driver import RunDriver
    from ..kernel.ledger import Spending
    from ..workflows.recovery import RecoveryInfo
    from .process import Process
    from .waiting import RunReader

R = TypeVar("R")

#: Seconds between two reads of a result while the store does not answer.
AWAY_SECONDS = 0.5


def this_process() -> str:
    """Return the default actor of this process for the audit."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()} (pid {os.getpid()})"


class HasId(Protocol):
    """A handle on a run, for async or blocking code."""

    @property
    def id(self) -> str: ...


class RunHandle(Generic[R]):
    """One run of a workflow."""

    def __init__(
        self,
        engine: Process,
        run_id: str,
        workflow: Any = None,
        context: RunDriver | None = None,
        actor: str = "",
    ) -> None:
        self.id = run_id
        self._engine = engine
        self._workflow = workflow
        self._context = context
        self._actor = actor or engine.actor

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    # -- inspecting ----------------------------------------------------------------------------------------------------

    async def latest(self) -> RunHandle[R]:
        """Return the newest run of the series that this one began with `ks.continue_as`, or itself."""
        newest = await self._newest_run()
        return self if newest.id == self.id else RunHandle(self._engine, newest.id, self._workflow, actor=self._actor)

    async def _newest_run(self) -> Run:
        """Return the newest run of the series as it was read; another read might find it continued."""
        run = await self.run()
        return run if run.continued_as is None else await self._engine.call(newest_run, self._engine.store, run)

    async def _next(self, run: Run) -> RunHandle[R] | None:
        """Return the successor of this ended run, or None."""
        if run.continued_as is None:
            return None
        found = await self._engine.read(next_run, self._engine.store, run)
        return None if found is None else RunHandle(self._engine, found.id, self._workflow, actor=self._actor)

    async def run(self) -> Run:
        """Return the run of this id as stored now; `latest` finds its newest successor."""
        run = await self._engine.read(self._engine.store.get_run, self.id)
        if run is None:
            raise RunNotFound(f"no run {self.id!r} in {self._engine.store.url}", self.id)
        return run

    async def status(self) -> Status:
        """Return the status of the run, or of the newest in its series."""
        return (await self._newest_run()).status

    async def reached(self, *statuses: Status | str, timeout: float | timedelta | None = None) -> Status:  # noqa: ASYNC109 - as result
        """Wait until the run has one of these statuses or has ended, and return its status."""
        seconds = seconds_of(timeout)
        try:
            wanted = {Status(status) for status in statuses}
        except ValueError as error:
            raise DefinitionError(f"{error}; choose from {', '.join(Status)}") from None
        try:
            # of every run, because a successor may be the one that changes
            async with asyncio.timeout(seconds):
                with self._engine.waiting.reader() as reader:
                    while (status := await self.status()) not in wanted and status not in FINISHED:
                        await reader.changed()
        except TimeoutError:
            names = " or ".join(sorted(wanted))
            raise TimedOut(f"run {self.id!r} was not {names} within {seconds:g} s", self.id) from None
        return status

    async def input(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the run was started with."""
        run = await self.run()
        stored = self._engine.encryption.input(run)
        return await self._engine.decode(self._values(run.workflow), stored, "input")  # type: ignore[no-any-return]

    async def checkpoints(self, *, failed: bool | None = None, counted: bool = False) -> list[Checkpoint]:
        """Return the run's history, verified; with `failed`, only its failures or only its successes.

        With `counted`, leave out records that a retry or a rewind has superseded.
        """
        found = [entry async for entry in self._history()]
        if counted:
            gone = await self._superseded()
            found = [one for one in found if one.seq not in gone]
        if failed is None:
            return found
        return [one for one in found if (one.outcome == "failure") is failed]

    async def _superseded(self) -> Superseded:
        gone, after, kinds = Superseded(), 0, (Kind.SUPERSEDED.value,)
        while rows := await self._engine.read(self._engine.store.list_checkpoints, self.id, after, 1000, kinds):
            for row in rows:
                after = row.seq
                gone.add(next(unseal([row], self.id, row.seq - 1))[0])
                if after % REST_AFTER == 0:
                    await asyncio.sleep(0)
        return gone

    async def _history(self, after: int = 0) -> AsyncIterator[Checkpoint]:
        if not after:
            async for record, checksum in read_records(self._engine, await self.run()):
                yield checkpoint(record, checksum)
            return
        previous = ""
        while rows := await self._engine.read(self._engine.store.list_checkpoints, self.id, after):
            async for record, checksum in unsealed(self._engine, rows, self.id, after, previous):
                after, previous = record.seq, checksum
                yield checkpoint(record, checksum)

    async def audit(self) -> list[AuditEntry]:
        """Return who did what to the run, when and why: its creation, leases, steps, signals, commands and end."""
        from ..history.audit import audit  # noqa: PLC0415 - rarely needed

        return await audit(self._engine, self.id)

    async def published(self) -> dict[str, Any]:
        """Return the newest value of each key that the run has shown with `ks.publish`."""
        shown = await self.published_raw()
        values = self._reach((await self.run()).workflow)
        return {key: await self._engine.decode(values, value, f"published {key!r}") for key, value in shown.items()}

    async def published_raw(self) -> dict[str, bytes]:
        """Return the published values as stored, for a reader without the workflow's types."""
        shown: dict[str, bytes] = {}
        handle: RunHandle[R] | None = self
        while handle is not None:
            run, after, kinds = handle.id, 0, TELLS_PUBLISHED
            published: list[Record] = []
            gone = Superseded()
            while rows := await self._engine.read(self._engine.store.list_checkpoints, run, after, 1000, kinds):
                for row in rows:
                    after = row.seq
                    async for record, _ in unsealed(self._engine, [row], run, row.seq - 1):
                        if record.kind == Kind.SUPERSEDED:
                            gone.add(record)
                        else:
                            published.append(record)
                    if len(published) % REST_AFTER == 0:
                        await asyncio.sleep(0)
            # Read after the records, which may be removed meanwhile.
            kept = await kept_state(self._engine, await handle.run())
            if kept is not None:
                shown.update((key, bytes(value)) for key, value in kept.published.items())
            shown.update(
                (data_of(one, PublishedData).get("key", ""), one.raw()) for one in published if one.seq not in gone
            )
            handle = await handle._next(await handle.run())  # noqa: SLF001 - its own kind
        return shown

    async def replay(self, workflow: Any = None) -> Replayed:
        """Replay the run with the loaded code, without effects. Return the next calls, or the mismatch.

        No body of a step runs, and nothing is written.
        """
        from ..history.dry_replay import replay  # noqa: PLC0415 - rarely needed

        return await replay(self._engine, self.id, workflow or self._workflow)

    async def info(self) -> RunInfo:
        """Return whether the run can go on, from where and with which calls, or why not; nothing is written."""
        from ..history.run_info import info  # noqa: PLC0415 - rarely needed

        return await info(self._engine, self.id, self._workflow)

    async def diff(self, a: int | None = None, b: int | None = None, *, other: str | HasId | None = None) -> Difference:
        """Return what changed from record `a` of the run to record `b`, or to record `b` of another run.

        Without numbers: from the beginning to now, or from this run to the other as they are now.
        """
        from ..history.diff import compare  # noqa: PLC0415 - rarely needed

        if other is None:
            return await compare(self._engine, (self.id, a or 0), (self.id, b))
        name = other if isinstance(other, str) else other.id
        return await compare(self._engine, (self.id, a), (name, b))

    async def spent(self) -> Spending:
        """Return what the run has spent: seconds since it began, steps, and amounts reported with `ks.spend`."""
        from ..kernel.ledger import Spent  # noqa: PLC0415 - rarely needed

        run = await self.run()
        spent = Spent(run.created_at)
        async for record, _ in read_records(self._engine, run):
            spent.add(record)
            if record.seq == run.kept_from and record.kind == Kind.STATE:  # it tells what the removed records spent
                spent = Spent.from_data(Position.restored(record)[1].spent)
        ended = run.updated_at if run.status in FINISHED else None
        return spent.all(ended or instant(self._engine.clock.now()))

    async def progress(self) -> Any:
        """Return the last value that the running step reported with `ks.progress`, or None."""
        run = await self._newest_run()
        report = report_in(run.progress)
        return None if report is None or is_encrypted(report) else _shown(report)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def result(self, timeout: float | timedelta | None = None) -> R:  # noqa: ASYNC109 - part of the promise
        """Return the result of the run when it ends; raise an error if it ended without one.

        While the store does not answer, it keeps waiting.
        """
        seconds = seconds_of(timeout)
        if seconds is None:
            return await self._result()
        try:
            async with asyncio.timeout(seconds):
                return await self._result()
        except TimeoutError:
            raise TimedOut(f"run {self.id!r} was not finished within {seconds} s", self.id) from None

    async def _result(self) -> R:
        handle: RunHandle[R] = self
        waiting = self._engine.waiting
        while True:
            seen = waiting.changes
            try:
                end = await handle._local_end() or await handle._stored_end()
                if end is not None and end[3] is not None:
                    handle = await handle.latest()
                    continue
            except StoreUnavailable as away:  # the store may answer again later
                self._engine.outage.log(f"cannot read the result of run {handle.id} yet", away)
                await self._engine.changed(AWAY_SECONDS)
                continue
            except RunNotFound:
                if handle is self:
                    raise
                handle = self  # a purge has removed a continued run of the series
                continue
            if end is None:
                await waiting.ended(handle.id, seen)
                continue
            status, value, error, _, workflow = end
            if error is not None and error.code == "ks:execution" and status is Status.FAILED:
                raise await handle._execution_error(error, workflow)
            return await handle._conclude(status, value, error, workflow)

    async def _local_end(self) -> tuple[Status, bytes, ErrorInfo | None, str | None, str] | None:
        """Wait for the run if this process drives it; return None if it does not, or no longer does."""
        context = self._context or self._engine.live.get(self.id)
        self._context = None
        if context is None:
            return None
        await context.left()
        return None if context.end is None else (*context.end, context.run.workflow)

    async def _stored_end(self) -> tuple[Status, bytes, ErrorInfo | None, str | None, str] | None:
        run = await self.run()
        if run.status in FINISHED or run.status is Status.SET_ASIDE:
            if run.data_key and run.status is Status.COMPLETED:
                self._engine.encryption.cipher(run)  # the result cannot be read without the run's key
            if run.status in FINISHED and run.output is None and run.error is None:
                await self._check_end(run)
            return run.status, run.output or b"null", run.error, run.continued_as, run.workflow
        return None

    async def _check_end(self, run: Run) -> None:
        """Raise `CheckpointCorrupt` if a finished run has no record of its end; a result is never invented."""
        rows = await self._engine.read(self._engine.store.list_checkpoints, run.id, max(run.seq - 1, 0), 1)
        if run.status is not Status.CANCELLED or [row.kind for row in rows] != [Kind.RUN_FINISHED.value]:
            await check_not_removed(self._engine, run)
            raise CheckpointCorrupt(f"run {run.id!r}: it is {run.status.value}, but has no record of its end")

    async def _conclude(self, status: Status, value: bytes, error: ErrorInfo | None, workflow: str) -> R:
        if status is Status.COMPLETED:
            return await self._engine.decode(self._values(workflow), value, f"run {self.id!r}: result")  # type: ignore[no-any-return]
        if status is Status.CANCELLED:
            doubt = f"; {error.message}" if error is not None and error.code == "ks:in-doubt" else ""
            raise RunCancelled(f"run {self.id!r} was cancelled{doubt}", self.id)
        from .failures import explained  # noqa: PLC0415 - only needed for a run that failed

        reason = error.summary if error is not None else "no reason is recorded"
        values = self._values(workflow)
        if status is Status.SET_ASIDE:
            aside = RunSetAside(f"run {self.id!r} is set aside: {reason}", self.id, error)
            raise await explained(self._engine, aside, values) from _recovery_error(error, await self._problems())
        if error is not None and error.code == "ks:run-timed-out":
            raise await explained(self._engine, RunTimedOut(error.message, self.id, error), values)
        raise await explained(self._engine, RunFailed(f"run {self.id!r} failed: {reason}", self.id, error), values)

    async def _problems(self) -> Sequence[str]:
        """Return everything that a recovery found, if the run is set aside and there were several problems."""
        from .failures import record_at  # noqa: PLC0415 - only needed for a run that was set aside

        with contextlib.suppress(StoreError):
            last = await record_at(self._engine, self.id, (await self.run()).seq)
            return () if last is None else data_of(last, ErrorData).get("problems", ())
        return ()

    async def _execution_error(self, error: ErrorInfo, workflow: str) -> ExecutionError:
        """Build the error of a failed graph or dag from the last record of its run."""
        from .failures import explained, record_at, step_failure  # noqa: PLC0415 - only needed for a run that failed

        run = await self.run()
        last = await record_at(self._engine, run.id, run.seq)
        where = RunFinishedData() if last is None else data_of(last, RunFinishedData)
        message = f"run {self.id!r} failed: {error.message}"
        step, path, state = where.get("at", ""), where.get("path", ()), State()
        with contextlib.suppress(StoreError, DefinitionError):  # a dag has no state
            state = await self.state()
        failed = ExecutionError(message, self.id, error, step=step, path=path, state=state)
        if error.caused_by:
            seq, values = error.caused_by[0], self._values(workflow)
            failed.__cause__ = await step_failure(self._engine, run.id, seq, values)
        return await explained(self._engine, failed, self._values(workflow))

    def _values(self, workflow: str) -> Any:
        definition = self._workflow or self._engine.workflows.get(workflow)
        return VALUES if definition is None else definition.values

    def _reach(self, workflow: str) -> Values:
        """Return the codec with the types of the workflow and of its steps, if its code is here."""
        definition = self._workflow or self._engine.workflows.get(workflow)
        return VALUES if definition is None else definition.reach

    def _check_type(self, name: str, payload: Any) -> None:
        """Refuse a payload that does not fit the type for which the run waits, if this process knows it."""
        live = self._engine.live.get(self.id)
        waits = [] if live is None else [wait.call for wait in tuple(live.waits.values()) if wait.name == name]
        types = [call.type for call in waits if isinstance(call, SignalCall)]
        if not types and self._workflow is not None:
            types = [self._workflow.signal_type(name)]
        if len(types) == 1:
            as_written(payload, types[0], f"signal {name!r} to run {self.id!r}")

    # -- controlling ---------------------------------------------------------------------------------------------------

    def by(self, actor: str) -> RunHandle[R]:
        """Return a handle on the same run that acts in someone's name: the audit records them as the sender."""
        return RunHandle(self._engine, self.id, self._workflow, self._context, actor)

    async def signal(self, name: str, payload: Any = True, *, id: str = "") -> None:  # noqa: A002 - the word users know
        """Send the run a durable message; with an `id`, sending it again changes nothing."""
        signal_name(name)
        self._check_type(name, payload)
        await self._send(name, await self._engine.encode(payload, f"signal {name!r}", name, "signal"), id)

    async def fail(self, name: str, error: BaseException | str, *, type: str = "", id: str = "") -> None:  # noqa: A002
        """Fail the run's wait for a signal: `ks.wait_for` raises `WaitFailed` with the class and the message.

        `type` names the class of an error that is given as text; with an `id`, sending it again changes nothing.
        """
        await self._send(signal_name(name), report(reported_error(error, type, self._engine.redaction.redact)), id)

    async def beat(self, name: str) -> None:
        """Tell a wait for a signal with a heartbeat that the signal is still to come."""
        await self._send(*heartbeat(signal_name(name), self._engine.clock.now()))

    async def cancel(self, reason: str = "") -> None:
        """Ask the run to stop, including its steps, waits and children. This is final."""
        newest = await self.latest()
        if await newest._cancel_unbegun(reason):  # noqa: SLF001 - its own kind
            return
        await newest._command(CANCEL, reason)  # noqa: SLF001 - its own kind
        # no worker claims a set-aside run, so nobody would read the signal
        if (await newest.run()).status is Status.SET_ASIDE:
            await self._engine.cancel_now(newest.id, reason, self._actor)

    async def _cancel_unbegun(self, reason: str) -> bool:
        """End the run at once if its code has not begun: there is nothing to clean up. Return whether it did."""
        run = await self.run()
        if run.status is not Status.QUEUED or run.seq:
            return False
        try:
            await self._engine.cancel_now(self.id, reason, self._actor)
        except (RunConflict, AlreadyFinished):  # a worker has claimed it meanwhile
            return False
        return True

    async def pause(self, reason: str = "") -> None:
        """Stop the run at its next step boundary; it keeps its state."""
        await self._command(PAUSE, reason)

    async def resume(self, reason: str = "") -> None:
        """Let a paused run, or one at a breakpoint, go on."""
        run = await self._newest_run()
        waiting = run.wakes if run.worker is None else self._engine.waits_of(run.id)
        stop = next((name for name in waiting if name.startswith(GO)), None)
        await self._command(RESUME if stop is None or run.status is Status.PAUSED else stop, reason)

    async def resolve(self, step: str, verdict: str, value: Any = None, reason: str = "") -> None:
        """Settle an at-most-once step in doubt: `result` (with its value), `failed` or `again`."""
        if verdict not in ("result", "failed", "again"):
            raise DefinitionError(f"verdict must be 'result', 'failed' or 'again', got {verdict!r}")
        check_text(step, "step")
        if verdict == "result":
            workflow = self._workflow or self._engine.workflows.get((await self.run()).workflow)
            if workflow is not None:
                workflow.check_result(step, value, f"the result of {step!r}")
        data = await self._engine.encode(value, "resolved result", step, "step")
        reason = self._engine.redaction.redact(check_text(reason, "reason"))
        payload = {"verdict": verdict, "value": msgspec.Raw(data), "reason": reason}
        await self._send(f"{RESOLVE}:{step}", msgspec.json.encode(payload))

    async def retry(self, reason: str = "", *, force: bool = False) -> None:
        """Let a failed or set-aside run go on from where it failed; its history is kept.

        A run that was handed over to another store is refused without `force`.
        """
        self._context = None  # the earlier end no longer counts, even for callers that do not wait for the retry
        await self._engine.retry(self.id, reason, self._actor, force=force)

    async def skip(self, *steps: str, reason: str = "") -> list[str]:
        """Accept failed undo steps of a set-aside run as they are, all or those named, and return them.

        When none is left, the run ends as it would have ended.
        """
        self._context = None  # it is no longer set aside
        return await self._engine.skip(self.id, *steps, reason=reason, actor=self._actor)

    async def recover(
        self,
        handler: str = "",
        *,
        step: str = "",
        value: Any = None,
        skip_validation: bool = False,
        reason: str = "",
        dry_run: bool = False,
    ) -> RecoveryInfo:
        """Let the next worker recover the run, with a handler by name or the one of its workflow.

        For "skip step", `step` names the step and `value` is its result. With `skip_validation`, the run goes on
        although its definition has changed. The answer tells what the recovery does; with `dry_run` nothing is changed.
        """
        from ..history.recovery import Wish, recovery_info  # noqa: PLC0415 - rarely needed

        info = await recovery_info(self._engine, self.id, handler, step, value=value, workflow=self._workflow)
        if dry_run:
            return info
        data = b""
        if handler == "skip step":
            if step and self._workflow is not None:
                self._workflow.check_result(step, value, f"the value for step {step!r}")
            data = await self._engine.encode(value, "value for a skipped step", step or "step", "step")
        wish = Wish(handler, step, data, skip_validation, reason)
        await self._engine.recover(self.id, wish, self._actor)
        self._context = None  # the earlier end no longer counts
        return info

    async def rewind(
        self,
        to: int | None = None,
        *,
        step: str | None = None,
        reason: str = "",
        actor: str = "",
        dry_run: bool = False,
        force: bool = False,
    ) -> Rewound:
        """Let the run go on from an earlier checkpoint; later records stay stored, but no longer count.

        `to` is the number of the last record that counts; `step` names a step to go back before, so that it runs again.
        Allowed while no worker drives the run; with `dry_run` nothing is changed.
        """
        rewound = await self._engine.rewind(
            self.id, to=to, step=step, reason=reason, actor=actor or self._actor, dry_run=dry_run, force=force
        )
        self._context = self._context if dry_run else None  # the earlier end no longer counts
        return rewound

    async def state(self, at: int | None = None, *, stage: str | None = None, agent: str | None = None) -> State:
        """Return the state of a graph's run, now or after the record `at`; or that of a stage or an agent."""
        from ..history.state_edits import state_at  # noqa: PLC0415 - rarely needed

        return await state_at(self._engine, self.id, at, level_of(stage, agent))

    async def edit(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        remove: Iterable[str] = (),
        stage: str | None = None,
        agent: str | None = None,
        next: str | None = None,  # noqa: A002 - the word users know
        reason: str = "",
    ) -> None:
        """Change the state of a graph's run that no worker drives; a failed or set-aside run goes on with it.

        `next` names the next step. The history keeps the old state.
        """
        from ..history.state_edits import Edit, edit  # noqa: PLC0415 - rarely needed

        change = Edit(values or {}, remove, level_of(stage, agent), next)
        await self._engine.shielded(edit(self._engine, self.id, change, reason, self._actor))
        self._context = None
        self._engine.claim_soon()

    async def consolidate(self, reason: str = "") -> None:
        """Record the whole state of a graph's run now, so that a recovery need not read earlier records."""
        from ..history.state_edits import consolidate  # noqa: PLC0415 - rarely needed

        await self._engine.shielded(consolidate(self._engine, self.id, reason, self._actor))
        self._engine.claim_soon()

    async def _command(self, name: str, reason: str) -> None:
        reason = self._engine.redaction.redact(check_text(reason, "reason"))
        await self._send(name, msgspec.json.encode({"reason": reason}))

    async def _send(self, name: str, payload: bytes, id: str = "") -> None:  # noqa: A002
        check_text(id, "signal id")  # checked here, because an impossible commit would affect others in its batch
        handle: RunHandle[R] = self
        while await handle._has_ended(Signal(handle.id, name, payload, id, self._actor)):
            run = await handle.run()
            # a successor's step of the same name is another step
            if run.continued_as is None or name.startswith(RESOLVE):
                raise AlreadyFinished(f"run {handle.id!r} is already {run.status.value}", handle.id)
            handle = await handle.latest()
        self._engine.signalled(handle.id)

    async def _has_ended(self, signal: Signal) -> bool:
        """Send the signal unless the run has ended. Return whether it has."""
        await self._engine.encryption.check_sending(self._engine, self.id)
        sent = replace(signal, sent_at=instant(self._engine.clock.now()))
        room = None if signal.name.startswith(RESERVED) else MAX_UNREAD
        answer = await self._engine.journal.write(Send(sent, room=room))
        if answer.error is not None:
            raise answer.error
        if answer.verdict is Verdict.FULL:
            raise SignalsFull(
                f"run {self.id!r} has {MAX_UNREAD:,} unread signals; nothing was sent. Let it read them, or cancel it",
                self.id,
            )
        if answer.verdict is Verdict.NOT_FOUND:
            raise RunNotFound(f"no run {self.id!r} in {self._engine.store.url}", self.id)
        return answer.verdict is Verdict.FINISHED

    # -- asking --------------------------------------------------------------------------------------------------------

    async def ask(self, name: str, payload: Any = None, *, timeout: float | timedelta | None = 30.0) -> Any:  # noqa: ASYNC109
        """Send a signal and wait for the reply that the workflow gives with `request.reply(...)`."""
        values = self._reach((await self.run()).workflow)
        return await self._engine.decode(values, await self.ask_raw(name, payload, timeout=timeout), "reply")

    async def ask_raw(self, name: str, payload: Any = None, *, timeout: float | timedelta | None = 30.0) -> bytes:  # noqa: ASYNC109
        """Send a signal and return the reply as stored, for a reader without the workflow's types."""
        asked_as, seconds = new_id("ask"), seconds_of(timeout)
        self._check_type(name, payload)
        asked = await self.latest()
        after = (await asked.run()).seq
        data = await self._engine.encode(payload, "question", name, "question")
        message = question(asked_as, data)
        await asked._send(check_name(name, "signal"), message, asked_as)  # noqa: SLF001 - its own kind
        try:
            async with asyncio.timeout(seconds):
                with self._engine.waiting.reader(asked.id) as reader:
                    while True:
                        run = await asked.run()  # read the run first, so that a last reply is not missed
                        reply = await asked._reply_to(asked_as, after)  # noqa: SLF001 - its own kind
                        if reply is not None:
                            return reply
                        if run.continued_as:  # an unread question has moved to the successor
                            asked, after = await asked._next(run) or asked, 0  # noqa: SLF001
                            reader.follow(asked.id)
                        elif run.status in FINISHED:
                            raise AlreadyFinished(f"run {asked.id!r} ended without a reply to {name!r}", asked.id)
                        else:
                            await reader.changed()
        except TimeoutError:
            raise TimedOut(f"run {asked.id!r} did not reply to {name!r} within {seconds:g} s", asked.id) from None

    async def _reply_to(self, question: str, after: int) -> bytes | None:
        kinds = (Kind.REPLY.value,)
        while rows := await self._engine.read(self._engine.store.list_checkpoints, self.id, after, 1000, kinds):
            for row in rows:
                after = row.seq
                record, _ = next(unseal([row], self.id, row.seq - 1))
                if data_of(record, ReplyData).get("ask") == question:
                    return record.raw()
        return None

    async def watch(self, after: int | Mapping[str, int] = 0, *, children: bool = False) -> AsyncIterator[Event]:
        """Yield the events of the run as they happen, from any sequence number on, until the run or its series ends.

        With `children`, also yield the events of its child runs and of their children; `event.run` tells them apart. To
        go on later, give `after` the last `event.seq` of each `event.run`.
        """
        async with contextlib.aclosing(self.watch_records(after, children=children)) as records:
            async for record in records:
                for event in record:
                    yield event

    async def watch_records(
        self, after: int | Mapping[str, int] = 0, *, children: bool = False
    ) -> AsyncGenerator[list[Event], None]:
        """Yield what `watch` yields, all events of a record together: a reader that goes on after it loses nothing."""
        seen = dict(after) if isinstance(after, Mapping) else {self.id: after}
        others: dict[str, RunHandle[Any]] = {}
        handle: RunHandle[R] | None = self
        with self._engine.waiting.reader(self.id) as reader:
            while handle is not None:
                run = await handle.run()  # read before the children, so that nothing of theirs comes after their result
                ended = run.status in FINISHED or run.status is Status.SET_ASIDE
                if children:
                    for child in await handle._children():  # noqa: SLF001 - its own kind
                        others.setdefault(child, RunHandle(self._engine, child))
                    async for events in _of_children(others, seen, reader):
                        yield events
                async for events in handle._events(run, seen):  # noqa: SLF001
                    yield events
                if seen.get(handle.id, 0) < run.seq:
                    continue
                if ended:
                    handle = await handle._next(run)  # noqa: SLF001
                    if handle is not None:
                        reader.follow(handle.id)
                else:
                    await reader.changed()

    async def _events(self, run: Run, seen: dict[str, int]) -> AsyncIterator[list[Event]]:
        """Yield the events of each record after those seen, up to the records that the run had when it was read."""
        async for one in self._history(seen.get(self.id, 0)):
            if one.seq > run.seq:
                break
            seen[self.id] = one.seq
            if events := _events(one, run.workflow, self._reach(run.workflow)):
                yield events

    async def _children(self) -> list[str]:
        """Return the child runs that this run has started."""
        found, after, kinds = [], 0, (Kind.CHILD.value,)
        while rows := await self._engine.read(self._engine.store.list_checkpoints, self.id, after, 1000, kinds):
            for row in rows:
                after = row.seq
                record, _ = next(unseal([row], self.id, row.seq - 1))
                found.append(data_of(record, ChildData).get("child", ""))
        return [child for child in found if child]


async def _of_children(
    handles: dict[str, RunHandle[Any]], seen: dict[str, int], reader: RunReader
) -> AsyncIterator[list[Event]]:
    """Yield the new events of child runs, and of those that they start; a removed run has none."""
    todo = list(handles)
    while todo:
        handle = handles[todo.pop()]
        reader.follow(handle.id)
        with contextlib.suppress(RunNotFound):
            run = await handle.run()
            for found in await handle._children():  # noqa: SLF001 - its own kind
                if found not in handles:
                    handles[found] = RunHandle(handle._engine, found)  # noqa: SLF001
                    todo.append(found)
            async for events in handle._events(run, seen):  # noqa: SLF001
                yield events
            successor = await handle._next(run)  # noqa: SLF001
            if successor is not None and successor.id not in handles:
                handles[successor.id] = successor
                todo.append(successor.id)


def _recovery_error(error: ErrorInfo | None, problems: Sequence[str]) -> RecoveryError | None:
    """Return the error that prevented the recovery of the run, or None."""
    phase = (error.code or "").rpartition("-")[2] if error is not None else ""
    cls = RECOVERY_PHASES.get(phase)
    if cls is None or error is None:
        return None
    if cls is HandlerFailed and error.type in (HandlerMissing.__name__, ReplayMismatch.__name__):
        cls = HandlerMissing
    return cls(f"{error.type}: {error.message}", problems or (error.message,), error.type)


def _events(one: Checkpoint, workflow: str, values: Values) -> list[Event]:
    def event(name: EventName, data: dict[str, Any]) -> Event:
        key, names = (one.seq, one.step, one.attempt, one.worker), (one.agent, one.stage)
        return Event(name, one.run, one.finished_at, workflow, *key, data, life, *names)

    life = life_of(one)
    value = None if one.value is None else _shown(one.value)
    if one.kind is Kind.EMITTED and isinstance(value, list):
        return [event("token.emitted", {"value": token}) for token in _tokens(one, value, values)]
    data = facts_of(one)
    if value is not None:
        data["value"] = value
    return [event(event_of_record(one.kind.value, one.data), data)]


def _tokens(one: Checkpoint, raw: list[Any], values: Values) -> list[Any]:
    """Return tokens with their types if the code of the workflow is here and knows them."""
    if values is VALUES or one.value is None or b'"$"' not in one.value:
        return raw
    try:
        return values.decode(one.value, "token")  # type: ignore[no-any-return]
    except NotSerializable:
        return raw


def _shown(value: bytes) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"a recorded value is not JSON: {error}") from None
