"""Dry replay: checks whether the loaded code fits the history of a run, without running any body.

A copy of the run is driven in memory and in virtual time by the same runner that a worker uses, so both decide alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError, RunNotFound
from ..kernel.calls import StepCall
from ..kernel.code_place import code_frames
from ..kernel.replay import check_end
from ..kernel.stop import FINISHING
from ..model import Kind, Run, Status
from ..model.checkpoint import ENDS_RUN
from ..ports import Create, Row
from ..records.record import Record, numbers, origin, seal, unseal
from .commands import check_not_keeper
from .dry_host import WORKER, DryHost
from .prefix import rows_up_to
from .virtual_time import VirtualLoop

if TYPE_CHECKING:
    from ..workflows.definition import Workflow
    from .host import CommandHost

#: Number of turns after which an unfinished replay counts as waiting for something unrecorded.
_TURNS = 1000
#: Length of a turn in seconds. In virtual time, a turn ends when nothing else can happen.
TURN_SECONDS = 0.1
#: Error type of a run that is set aside because its code differs from its history.
MISMATCH = "ReplayMismatch"


@dataclass(frozen=True)
class Recorded:
    """The history of a run, in plain text. One that was stored `encrypted` may hold secrets."""

    run: Run
    rows: tuple[Row, ...]
    encrypted: bool = False


@dataclass(frozen=True)
class Replayed:
    """The result of a dry replay: `records` is the number of records of the run.

    `ended` means that the code has returned or raised. `asks` are the calls that a worker would begin now. `problem`
    is the reason why a worker would set the run aside, and `kind` its error type; both are empty if the code fits.
    `problems` lists everything that was found. `steps` are those of the calls that are steps.
    """

    run: str
    records: int
    ended: bool = False
    asks: tuple[str, ...] = ()
    problem: str = ""
    kind: str = ""
    problems: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the code fits the history, so that a worker could continue the run."""
        return not self.problem


async def recorded(host: CommandHost, run: Run) -> Recorded:
    """Return the history of a run in an engine's store."""
    rows = await rows_up_to(host, run, run.seq)
    if rows and rows[-1].kind != Kind.STATE:  # a stored state is dispensable, so it is not checked
        ((_, checksum),) = unseal(rows[-1:], run.id, run.seq - 1)
        check_end(run, run.seq, checksum)
    if not run.data_key:
        return Recorded(run, tuple(rows))

    def in_plain_text() -> Recorded:
        records = [record for record, _ in unseal(rows, run.id, 0, origin(run), run.kept_from)]
        create = sealed(replace(run, input=host.encryption.input(run), data_key=""), records)
        return Recorded(create.run, tuple(create.rows), encrypted=True)

    return await host.call(in_plain_text)


async def replay(host: CommandHost, run_id: str, workflow: Workflow[..., Any] | None = None) -> Replayed:
    """Replay a run of an engine's store against `workflow`; by default, the loaded workflow of its name."""
    check_not_keeper(run_id, "replay")
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    workflow = workflow or host.workflows.get(run.workflow)
    if workflow is None:
        raise DefinitionError(f"run {run_id!r} needs workflow {run.workflow!r}, which is not known here; import it")
    if workflow.name != run.workflow:
        raise DefinitionError(f"run {run_id!r} belongs to workflow {run.workflow!r}, not to {workflow.name!r}")
    return await asyncio.to_thread(replayed, workflow, await recorded(host, run))


def replayed(workflow: Workflow[..., Any], history: Recorded) -> Replayed:
    """Replay a history against a workflow, in a thread without an event loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(replayed_here(workflow, history))


async def replayed_here(
    workflow: Workflow[..., Any], history: Recorded, turn_seconds: float = TURN_SECONDS
) -> Replayed:
    """Replay a history against a workflow on the running event loop."""
    replay = _Replay(workflow, history, turn_seconds)
    try:
        return await replay.replayed()
    finally:
        await replay.host.close()


def sealed(run: Run, records: Iterable[Record]) -> Create:
    """Return the creation of a run whose chain consists of these records."""
    rows: list[Row] = []
    checksum = origin(run)
    for seq, record in zip(numbers(run), records, strict=False):
        row, checksum = seal(record, seq, checksum)
        rows.append(row)
    return Create(replace(run, seq=rows[-1].seq if rows else 0, checksum=checksum), rows)


class _Replay:
    """Drives a copy of a run in memory, without running bodies."""

    def __init__(self, workflow: Workflow[..., Any], history: Recorded, turn_seconds: float) -> None:
        self.workflow = workflow
        self.history = history
        self.turn_seconds = turn_seconds
        self.end = _end_of(history)
        self.compatible = workflow.on_change == "compatible"
        self.broken: tuple[str, str, str] | None = None
        self.problems: tuple[str, ...] = ()
        self.host = DryHost(workflow, self._copy(), self._broke, may_hold_secrets=history.encrypted)

    async def replayed(self) -> Replayed:
        await self.host.drive()
        await self._come_to_rest()
        name, records = self.history.run.id, len(self.history.rows)
        if self.broken is not None:
            kind, *words = self.broken
            text = " ".join(filter(None, words))
            return Replayed(name, records, problem=text, kind=kind, problems=self.problems or (text,))
        ended, problem = self.host.end is not None, self._other_end()
        kind, problems = (MISMATCH, (problem,)) if problem else ("", ())
        steps = tuple(key for key in self._asks() if self._is_step(key))
        return Replayed(name, records, ended, tuple(self._asks()), problem, kind, problems, steps)

    def _copy(self) -> Create:
        """Return a copy of the run as if it had just been claimed, without the record of its end."""
        old = self.history.run
        rows = self.history.rows[: -1 if _last_is_end(self.history) else None]
        run = Run(
            id=old.id,
            workflow=old.workflow,
            status=Status.RUNNING,
            created_at=old.created_at,
            version=old.version,
            fingerprint=old.fingerprint,
            input=old.input,
            seed=old.seed,
            epoch=1,
            worker=WORKER,
            kept_from=old.kept_from,
        )
        return sealed(run, [record for record, _ in unseal(rows, old.id, 0, origin(old), old.kept_from)])

    async def _come_to_rest(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(self.turn_seconds)
            if self.broken is not None or self._is_replayed():
                await asyncio.sleep(self.turn_seconds)
                return
            if self.host.asked and self.compatible:  # a new step in the middle of the history, only for a worker
                return
        if self._is_idle():
            return
        asks = ", ".join(self._asks()) or "something that is not recorded"
        problem = f"the code waits for {asks} and does not reach the end of its history"
        self.broken = (MISMATCH, problem, self._place())

    def _is_replayed(self) -> bool:
        """Whether the whole history is delivered, and the code does not wait for open branches."""
        context = self.host.run
        if context is None or context.stop.detached:
            return context is not None
        return context.history is None and context.stop.phase is not FINISHING and not self._is_idle()

    def _is_idle(self) -> bool:
        """Whether the whole history is delivered, and the code makes no call but waits for its own timer or thread."""
        context = self.host.run
        if context is None or context.stop.detached or context.history is not None or self._asks():
            return False
        loop = context.loop
        is_away = isinstance(loop, VirtualLoop) and loop.is_away
        return is_away or context in context.idle_watch.callbacks.timers()

    def _asks(self) -> list[str]:
        context = self.host.run
        if context is None or context.stop.detached:
            return self.host.asked
        return sorted({*self.host.asked, *(call.key for call in context.held)})

    def _is_step(self, key: str) -> bool:
        """Whether a call that a worker would begin is a step, which has a body."""
        context = self.host.run
        held = () if context is None else context.held
        return key in self.host.asked or any(call.key == key and isinstance(call, StepCall) for call in held)

    def _other_end(self) -> str:
        """Return how the end of the replay differs from the recorded end; empty if it does not."""
        end, now = self.end, self.host.end
        if end is None:
            return ""
        if now is None:
            if self.compatible or self._is_idle():
                return ""
            asks = ", ".join(self._asks()) or "something that is not recorded"
            return f"the run had ended, and the code now asks for {asks} {self._place()}".rstrip()
        before, (status, value, error, _) = self.history.run.status, now
        if status is not before:
            reason = f": {error.type}: {error.message}" if error is not None else ""
            return f"the run had ended as {before.value}, and now ends as {status.value}{reason}"
        values = self.workflow.values
        if status is Status.COMPLETED and not end.data:
            then = end.raw()
            if then != value and values.digest(values.decode(then)) != values.digest(values.decode(value)):
                return f"the run had ended with {_shown(then)}, and now ends with {_shown(value)}"
        elif end.error is not None and error is not None and end.error.type != error.type:
            return f"the run had failed with {end.error.type}, and now fails with {error.type}"
        return ""

    def _broke(self, kind: str, reason: str, problems: tuple[str, ...]) -> None:
        """Note why a worker would set the run aside."""
        if self.broken is None:
            self.problems = problems if len(problems) > 1 else ()
            self.broken = (kind, reason.removeprefix("replay mismatch: "), self._place())

    def _place(self) -> str:
        """Return the line of the user's code that makes the current call, or that waits for one."""
        frames = code_frames(self.host.run.main if self.host.run is not None else None)
        if frames:
            return f"({frames[-1].f_code.co_filename}:{frames[-1].f_lineno})"
        place = self.workflow.place
        return f"({place})" if place.line else ""


def _end_of(history: Recorded) -> Record | None:
    """Return the record of the run's end; None if it has not ended."""
    if not history.rows or history.rows[-1].kind != Kind.RUN_FINISHED:
        return None
    [(record, _)] = unseal(history.rows[-1:], history.run.id, history.rows[-1].seq - 1)
    return record


def _last_is_end(history: Recorded) -> bool:
    """Whether the last record is that of the run's end, or of its being set aside."""
    return bool(history.rows) and history.rows[-1].kind in ENDS_RUN


def _shown(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    return text if len(text) <= 200 else f"{text[:200]}…"
