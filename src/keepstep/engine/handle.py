"""A handle on one run: ask for its result, look at it, steer it, wherever the run is driven."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from ..errors import (
    RECOVERY_PHASES,
    AlreadyFinished,
    CheckpointCorrupt,
    DefinitionError,
    ExecutionError,
    RecoveryError,
    RunCancelled,
    RunConflict,
    RunFailed,
    RunNotFound,
    RunSetAside,
    RunTimedOut,
    StoreError,
    StoreUnavailable,
    TimedOut,
)
from ..model import FINISHED, Checkpoint, ErrorInfo, Event, Kind, Run, Signal, State, Status
from ..model.ids import check_name, check_text, new_id
from ..model.signal import CANCEL, GO, PAUSE, RESERVED, RESOLVE, RESUME
from ..ports import Send, Verdict, instant
from ..stores.keys import is_encrypted
from ..stores.records import Record, checkpoint, unseal
from ..values import VALUES
from .branch import recorded_error
from .history import REST_AFTER, Superseded, check_not_removed, read_records
from .position import level_of
from .series import newest_run, next_run

if TYPE_CHECKING:
    from .audit import AuditEntry
    from .compare import Difference
    from .context import RunContext
    from .dry import Replayed
    from .engine import Engine
    from .info import RunInfo
    from .rewind import Rewound
    from .spending import Spending

R = TypeVar("R")

#: How long a wait for another process goes without looking, should every notification be lost.
LOOK_SECONDS = 0.5
#: While nothing happens, whoever awaits a result looks less and less often: a thousand cost a few reads a second.
LONGEST_LOOK_SECONDS = 30.0


def this_process() -> str:
    """Who acts from this process, for the audit, unless the engine was told a name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()} (pid {os.getpid()})"


class RunHandle(Generic[R]):
    """One run of a workflow."""

    def __init__(
        self,
        engine: Engine,
        run_id: str,
        workflow: Any = None,
        context: RunContext | None = None,
        actor: str = "",
    ) -> None:
        self.id = run_id
        self._engine = engine
        self._workflow = workflow
        self._context = context
        self._actor = actor or engine.actor

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    # -- looking ------------------------------------------------------------------------------------------------------

    async def latest(self) -> RunHandle[R]:
        """The newest run of the series that this one began with `ks.continue_as`; itself if it is the only one."""
        run = await self.run()
        if run.continued_as is None:
            return self
        newest = await self._engine.call(newest_run, self._engine.store, run)
        return RunHandle(self._engine, newest.id, self._workflow, actor=self._actor)

    async def _next(self, run: Run) -> RunHandle[R] | None:
        """The run that continues this one, which has ended; None if no other does."""
        if run.continued_as is None:
            return None
        found = await self._engine.read(next_run, self._engine.store, run)
        return None if found is None else RunHandle(self._engine, found.id, self._workflow, actor=self._actor)

    async def run(self) -> Run:
        """The run of this id as the store has it now; `latest` finds the one that goes on for it."""
        run = await self._engine.read(self._engine.store.get_run, self.id)
        if run is None:
            raise RunNotFound(f"no run {self.id!r} in {self._engine.store.url}", self.id)
        return run

    async def status(self) -> Status:
        """Where the run stands, or the newest of its series."""
        return (await (await self.latest()).run()).status

    async def reached(self, *statuses: Status | str, timeout: float | None = None) -> Status:  # noqa: ASYNC109 - as result
        """Wait until the run has one of these statuses, or has ended, and give the status it has then."""
        wanted = {Status(status) for status in statuses}
        try:
            async with asyncio.timeout(timeout):
                while (status := await self.status()) not in wanted and status not in FINISHED:
                    await self._engine.changed(LOOK_SECONDS)
        except TimeoutError:
            told = " or ".join(sorted(wanted))
            raise TimedOut(f"run {self.id!r} was not {told} within {timeout:g} s", self.id) from None
        return status

    async def input(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the run was started with."""
        run = await self.run()
        return self._values(run.workflow).decode(self._engine.encryption.input(run), "input")  # type: ignore[no-any-return]

    async def checkpoints(self, *, failed: bool | None = None, counted: bool = False) -> list[Checkpoint]:
        """The run's history, verified; with `failed` only its failures, or only its successes.

        With `counted` only what counts: nothing that a retry or a rewind has superseded.
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
            for record, checksum in unseal(rows, self.id, after, previous):
                after, previous = record.seq, checksum
                yield checkpoint(record, checksum)
                if after % REST_AFTER == 0:
                    await asyncio.sleep(0)

    async def audit(self) -> list[AuditEntry]:
        """Who did what to the run, when and why: its creation, each lease, step, signal and command, and its end."""
        from .audit import audit  # noqa: PLC0415 - asked for rarely

        return await audit(self._engine, self.id)

    async def published(self) -> dict[str, Any]:
        """What the run has shown to readers with `ks.publish`: the newest value of each key."""
        return {key: VALUES.decode(value, "published") for key, value in (await self.published_raw()).items()}

    async def published_raw(self) -> dict[str, bytes]:
        """As `published`, with the values as they are stored: for a reader that does not have the workflow's types."""
        shown: dict[str, bytes] = {}
        handle: RunHandle[R] | None = self
        while handle is not None:
            run, after, kinds = handle.id, 0, (Kind.PUBLISHED.value, Kind.SUPERSEDED.value)
            told: list[Record] = []
            gone = Superseded()
            while rows := await self._engine.read(self._engine.store.list_checkpoints, run, after, 1000, kinds):
                for row in rows:
                    after = row.seq
                    record, _ = next(unseal([row], run, row.seq - 1))
                    if record.kind == Kind.SUPERSEDED:
                        gone.add(record)
                    else:
                        told.append(record)
                    if len(told) % REST_AFTER == 0:
                        await asyncio.sleep(0)
            shown.update(((one.data or {}).get("key", ""), one.raw()) for one in told if one.seq not in gone)
            handle = await handle._next(await handle.run())  # noqa: SLF001 - its own kind
        return shown

    async def replay(self, workflow: Any = None) -> Replayed:
        """Replay the run against the code that is loaded here, dry: what would be begun next, or what does not fit.

        No body of a step runs, and nothing is written.
        """
        from .dry import replay  # noqa: PLC0415 - asked for rarely

        return await replay(self._engine, self.id, workflow or self._workflow)

    async def info(self) -> RunInfo:
        """Whether the run can go on, from where, with which calls, and if not, why not; nothing is written."""
        from .info import info  # noqa: PLC0415 - asked for rarely

        return await info(self._engine, self.id, self._workflow)

    async def diff(
        self, a: int | None = None, b: int | None = None, *, other: str | RunHandle[Any] | None = None
    ) -> Difference:
        """What changed from record `a` of the run to record `b`, or to record `b` of another run.

        Without a number: from the beginning to now, or from how this run is now to how the other one is.
        """
        from .compare import compare  # noqa: PLC0415 - asked for rarely

        if other is None:
            return await compare(self._engine, (self.id, a or 0), (self.id, b))
        name = other if isinstance(other, str) else other.id
        return await compare(self._engine, (self.id, a), (name, b))

    async def spent(self) -> Spending:
        """What the run has spent so far: seconds since it began, steps, and what they told with `ks.spend`."""
        from .spending import Spent  # noqa: PLC0415 - asked for rarely

        run = await self.run()
        told = Spent(run.created_at)
        async for record, _ in read_records(self._engine, run):
            told.add(record)
        ended = run.updated_at if run.status in FINISHED else None
        return told.all(ended or instant(self._engine.clock.now()))

    async def progress(self) -> Any:
        """What the running step last reported with `ks.progress`, or None."""
        run = await (await self.latest()).run()
        return None if run.progress is None or is_encrypted(run.progress) else _shown(run.progress)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def result(self, timeout: float | None = None) -> R:  # noqa: ASYNC109 - part of the promise
        """The one result of the run, now or when it ends; raises if it ended without one.

        While the store does not answer, it waits on.
        """
        if timeout is None:
            return await self._result()
        try:
            async with asyncio.timeout(timeout):
                return await self._result()
        except TimeoutError:
            raise TimedOut(f"run {self.id!r} was not finished within {timeout} s", self.id) from None

    async def _result(self) -> R:
        handle: RunHandle[R] = self
        look_seconds = LOOK_SECONDS
        while True:
            try:
                end = await handle._local_end() or await handle._stored_end()
                if end is not None and end[3] is not None:
                    handle = await handle.latest()
                    continue
            except StoreUnavailable as away:  # it may answer again, as it may to the worker
                self._engine.outage.tell(f"the result of run {handle.id} cannot be asked for yet", away)
                end = None
            except RunNotFound:
                if handle is self:
                    raise
                handle = self  # a purge has removed a run of the series that had been continued
                continue
            if end is None:
                changed = await self._engine.changed(look_seconds)
                look_seconds = LOOK_SECONDS if changed else min(2 * look_seconds, LONGEST_LOOK_SECONDS)
                continue
            status, value, error, _, workflow = end
            if error is not None and error.code == "ks:execution" and status is Status.FAILED:
                raise await handle._execution_error(error)
            return handle._conclude(status, value, error, workflow)

    async def _local_end(self) -> tuple[Status, bytes, ErrorInfo | None, str | None, str] | None:
        """Wait for the run if it is driven in this process; None when it is not, or no longer."""
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
                self._engine.encryption.cipher(run)  # without its key there is no saying what the result is
            if run.status in FINISHED and run.output is None and run.error is None:
                await self._check_end(run)
            return run.status, run.output or b"null", run.error, run.continued_as, run.workflow
        return None

    async def _check_end(self, run: Run) -> None:
        """A run that is said to have ended, without a word how, must have a record of it: no result is made up."""
        rows = await self._engine.read(self._engine.store.list_checkpoints, run.id, max(run.seq - 1, 0), 1)
        if run.status is not Status.CANCELLED or [row.kind for row in rows] != [Kind.RUN_FINISHED.value]:
            await check_not_removed(self._engine, run)
            raise CheckpointCorrupt(f"run {run.id!r}: it is {run.status.value}, but there is no record of its end")

    def _conclude(self, status: Status, value: bytes, error: ErrorInfo | None, workflow: str) -> R:
        if status is Status.COMPLETED:
            return self._values(workflow).decode(value, f"run {self.id!r}: result")  # type: ignore[no-any-return]
        if status is Status.CANCELLED:
            doubt = f"; {error.message}" if error is not None and error.code == "ks:in-doubt" else ""
            raise RunCancelled(f"run {self.id!r} was cancelled{doubt}", self.id)
        told = f"{error.type}: {error.message}" if error is not None else "no reason is recorded"
        if status is Status.SET_ASIDE:
            raise RunSetAside(f"run {self.id!r} is set aside: {told}", self.id, error) from _recovery_error(error)
        if error is not None and error.code == "ks:run-timed-out":
            raise RunTimedOut(error.message, self.id, error)
        raise RunFailed(f"run {self.id!r} failed: {told}", self.id, error)

    async def _execution_error(self, error: ErrorInfo) -> ExecutionError:
        """Where a graph or dag failed is told by the last record of its run."""
        run = await self.run()
        rows = await self._engine.read(self._engine.store.list_checkpoints, run.id, max(run.seq - 1, 0), 1)
        last = next((record for record, _ in unseal(rows, run.id, run.seq - 1)), None) if rows else None
        where = (last.data if last is not None else None) or {}
        message = f"run {self.id!r} failed: {error.message}"
        step, path, state = where.get("at", ""), where.get("path", ()), State()
        with contextlib.suppress(StoreError, DefinitionError):  # of a dag there is none
            state = await self.state()
        failed = ExecutionError(message, self.id, error, step=step, path=path, state=state)
        if error.caused_by:
            seq = error.caused_by[0]
            rows = await self._engine.read(self._engine.store.list_checkpoints, run.id, seq - 1, 1)
            failed.__cause__ = next((recorded_error(record) for record, _ in unseal(rows, run.id, seq - 1)), None)
        return failed

    def _values(self, workflow: str) -> Any:
        definition = self._workflow or self._engine.workflows.get(workflow)
        return VALUES if definition is None else definition.values

    # -- steering -----------------------------------------------------------------------------------------------------

    def by(self, actor: str) -> RunHandle[R]:
        """The same run, steered in the name of someone: the audit says that they sent the signals and commands."""
        return RunHandle(self._engine, self.id, self._workflow, self._context, actor)

    async def signal(self, name: str, payload: Any = True, *, id: str = "") -> None:  # noqa: A002 - the word users know
        """Send the run a durable message; with an `id`, sending it again changes nothing."""
        check_name(name, "signal")
        if name.startswith(RESERVED):
            raise DefinitionError(
                f"signal name {name!r} is refused: names that begin with {RESERVED!r} are Keepstep's own"
            )
        data = VALUES.encode(payload, f"signal {name!r}")
        self._engine.censor.check(data, name, "signal")
        await self._send(name, data, id)

    async def cancel(self, reason: str = "") -> None:
        """Ask the run to stop: it reaches running steps, waits and children, and is final."""
        if await self._cancel_unbegun(reason):
            return
        await self._command(CANCEL, reason)
        if (await self.run()).status is Status.SET_ASIDE:  # no worker takes it, so nobody would hear
            await self._engine.cancel_now(self.id, reason, self._actor)

    async def _cancel_unbegun(self, reason: str) -> bool:
        """End the run at once if its code has not begun: there is nothing to clean up. Whether that was so."""
        run = await self.run()
        if run.status is not Status.QUEUED or run.seq:
            return False
        try:
            await self._engine.cancel_now(self.id, reason, self._actor)
        except (RunConflict, AlreadyFinished):  # a worker has taken it meanwhile
            return False
        return True

    async def pause(self, reason: str = "") -> None:
        """Stop the run at its next step boundary; it keeps its state."""
        await self._command(PAUSE, reason)

    async def resume(self, reason: str = "") -> None:
        """Let a paused run go on, or one that waits at a breakpoint."""
        run = await self.run()
        waiting = run.wakes if run.worker is None else self._engine.waits_of(self.id)
        stop = next((name for name in waiting if name.startswith(GO)), None)
        await self._command(RESUME if stop is None or run.status is Status.PAUSED else stop, reason)

    async def resolve(self, step: str, verdict: str, value: Any = None, reason: str = "") -> None:
        """Say what became of an at-most-once step that is in doubt: `result` (with its value), `failed` or `again`."""
        if verdict not in ("result", "failed", "again"):
            raise DefinitionError(f"a doubt is resolved with 'result', 'failed' or 'again', not {verdict!r}")
        check_text(step, "step")
        data = VALUES.encode(value, "resolved result")
        self._engine.censor.check(data, step)
        reason = self._engine.censor.redact(check_text(reason, "reason"))
        payload = {"verdict": verdict, "value": msgspec.Raw(data), "reason": reason}
        await self._send(f"{RESOLVE}:{step}", msgspec.json.encode(payload))

    async def retry(self, reason: str = "", *, force: bool = False) -> None:
        """Let a failed or set-aside run go on from where it failed; its history is kept.

        One that was handed over to another store is refused, unless that is forced.
        """
        self._context = None  # how it ended before is past, also for one who does not wait for the retry
        await self._engine.retry(self.id, reason, self._actor, force=force)

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
        """Let the run go on from an earlier checkpoint: what came after it stays stored, but no longer counts.

        `to` is the number of the last record that counts; `step` names a step to go back before, so that it is
        performed again. Allowed while no worker drives the run; with `dry_run` nothing is changed.
        """
        rewound = await self._engine.rewind(
            self.id, to=to, step=step, reason=reason, actor=actor or self._actor, dry_run=dry_run, force=force
        )
        self._context = self._context if dry_run else None  # how it ended before is past
        return rewound

    async def state(self, at: int | None = None, *, stage: str | None = None, agent: str | None = None) -> State:
        """The state of a graph's run: now, or after the record `at`; of a stage or an agent, if one is named."""
        from .states import state_at  # noqa: PLC0415 - asked for rarely

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
        """Change the state of a graph's run that no worker drives; one that failed or was set aside goes on with it.

        `next` names the step that is to come next. What was there before stays in the history.
        """
        from .states import Edit, edit  # noqa: PLC0415 - asked for rarely

        change = Edit(values or {}, remove, level_of(stage, agent), next)
        await self._engine.to_its_end(edit(self._engine, self.id, change, reason, self._actor))
        self._context = None
        self._engine.poke()

    async def consolidate(self, reason: str = "") -> None:
        """Write the whole state of a graph's run down now, so that a recovery reads nothing before it."""
        from .states import consolidate  # noqa: PLC0415 - asked for rarely

        await self._engine.to_its_end(consolidate(self._engine, self.id, reason, self._actor))
        self._engine.poke()

    async def _command(self, name: str, reason: str) -> None:
        reason = self._engine.censor.redact(check_text(reason, "reason"))
        await self._send(name, msgspec.json.encode({"reason": reason}))

    async def _send(self, name: str, payload: bytes, id: str = "") -> None:  # noqa: A002
        check_text(id, "signal id")  # here, because a commit that cannot be made would take its neighbours along
        handle: RunHandle[R] = self
        while await handle._has_ended(Signal(handle.id, name, payload, id, self._actor)):
            run = await handle.run()
            if run.continued_as is None or name.startswith(RESOLVE):  # a step of the same name there is another one
                raise AlreadyFinished(f"run {handle.id!r} is already {run.status.value}", handle.id)
            handle = await handle.latest()
        self._engine.signalled(handle.id)

    async def _has_ended(self, signal: Signal) -> bool:
        """Send the signal, unless the run has ended: whether it has."""
        await self._engine.encryption.check_sending(self._engine, self.id)
        sent = replace(signal, sent_at=instant(self._engine.clock.now()))
        answer = await self._engine.journal.write(Send(sent))
        if answer.error is not None:
            raise answer.error
        if answer.verdict is Verdict.NOT_FOUND:
            raise RunNotFound(f"no run {self.id!r} in {self._engine.store.url}", self.id)
        return answer.verdict is Verdict.FINISHED

    # -- conversing ---------------------------------------------------------------------------------------------------

    async def ask(self, name: str, payload: Any = None, *, timeout: float | None = 30.0) -> Any:  # noqa: ASYNC109
        """Send a signal and wait for the reply that the workflow gives with `request.reply(...)`."""
        return VALUES.decode(await self.ask_raw(name, payload, timeout=timeout), "reply")

    async def ask_raw(self, name: str, payload: Any = None, *, timeout: float | None = 30.0) -> bytes:  # noqa: ASYNC109
        """As `ask`, with the reply as it is stored: for a reader that does not have the workflow's types."""
        question = new_id("ask")
        asked = await self.latest()
        after = (await asked.run()).seq
        data = VALUES.encode(payload, "question")
        self._engine.censor.check(data, name, "question")
        message = msgspec.json.encode({"$": "ask", "v": [question, msgspec.Raw(data)]})
        await asked._send(check_name(name, "signal"), message, question)  # noqa: SLF001 - its own kind
        try:
            async with asyncio.timeout(timeout):
                while True:
                    run = await asked.run()  # before the reading: a last reply must not be missed
                    reply = await asked._reply_to(question, after)  # noqa: SLF001 - its own kind
                    if reply is not None:
                        return reply
                    if run.continued_as:  # a question that was not read has moved over
                        asked, after = await asked._next(run) or asked, 0  # noqa: SLF001
                    elif run.status in FINISHED:
                        raise AlreadyFinished(f"run {asked.id!r} ended without a reply to {name!r}", asked.id)
                    else:
                        await self._engine.changed(LOOK_SECONDS)
        except TimeoutError:
            raise TimedOut(f"run {asked.id!r} did not reply to {name!r} within {timeout:g} s", asked.id) from None

    async def _reply_to(self, question: str, after: int) -> bytes | None:
        kinds = (Kind.REPLY.value,)
        while rows := await self._engine.read(self._engine.store.list_checkpoints, self.id, after, 1000, kinds):
            for row in rows:
                after = row.seq
                record, _ = next(unseal([row], self.id, row.seq - 1))
                if (record.data or {}).get("ask") == question:
                    return record.raw()
        return None

    async def watch(self, after: int = 0) -> AsyncIterator[Event]:
        """What happens in the run, as it happens, from any sequence number on, until the run or its series ends."""
        workflow = (await self.run()).workflow
        handle: RunHandle[R] | None = self
        while handle is not None:
            run = await handle.run()
            ended = run.status in FINISHED or run.status is Status.SET_ASIDE
            async for one in handle._history(after):  # noqa: SLF001 - its own kind
                after = one.seq
                for event in _events(one, workflow):
                    yield event
            if after < run.seq:
                continue
            if ended:
                handle, after = await handle._next(run), 0  # noqa: SLF001
            else:
                await self._engine.changed(LOOK_SECONDS)


def _recovery_error(error: ErrorInfo | None) -> RecoveryError | None:
    """Why the run could not be taken up, as the error of its phase."""
    phase = (error.code or "").rpartition("-")[2] if error is not None else ""
    kind = RECOVERY_PHASES.get(phase)
    return None if kind is None or error is None else kind(f"{error.type}: {error.message}", (error.message,))


def _events(one: Checkpoint, workflow: str) -> list[Event]:
    def event(name: str, data: dict[str, Any]) -> Event:
        return Event(name, one.run, one.finished_at, workflow, one.seq, one.step, one.attempt, one.worker, data)

    value = None if one.value is None else _shown(one.value)
    if one.kind is Kind.EMITTED and isinstance(value, list):
        return [event("token", {"value": token}) for token in value]
    data: dict[str, Any] = {"outcome": one.outcome.value}
    if value is not None:
        data["value"] = value
    if one.error is not None:
        data["error"] = f"{one.error.type}: {one.error.message}"
    if one.retry_at is not None:
        data["retry_at"] = one.retry_at.isoformat()
    return [event(event_name(one.kind.value), data)]


def event_name(kind: str) -> str:
    """The name of the event that tells of a record: `step completed` is told as `step.completed`."""
    return kind.replace(" ", ".", 1)


def _shown(value: bytes) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"a recorded value is not JSON: {error}") from None
