"""Replays what a run has recorded against the code that is loaded here, and begins nothing: no body runs.

A copy of the run is driven in memory, in virtual time, by the ordinary engine, so that what fits and what does not is
decided exactly as a worker would.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError, RunNotFound
from ..model import Kind, Run, Status
from ..ports import Create, Row, Store
from ..stores.memory import MemoryStore
from ..stores.records import Record, origin, seal, unseal
from .engine import Engine
from .history import check_end
from .past import rows_up_to
from .virtual import VirtualClock, VirtualLoop

if TYPE_CHECKING:
    from ..workflows.definition import Workflow
    from .context import RunContext

#: Code in which no workflow is written: this package and asyncio.
_NOT_THEIRS = (str(Path(__file__).parents[1]), str(Path(asyncio.__file__).parent), "<frozen")
#: A replay that has not come to its end after so many turns waits for something that was not recorded.
_TURNS = 1000
#: How long a turn takes; in virtual time it is over when nothing else can happen.
_TURN_SECONDS = 0.1
#: What a set-aside run is called whose code asks another question than the recorded one.
MISMATCH = "ReplayMismatch"


@dataclass(frozen=True)
class Recorded:
    """A run as it was recorded, in plain text."""

    run: Run
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Replayed:
    """What a replay came to: how much was told, and what the code asked for when it was at its end.

    `ended` says that the code came to its own end, as the run did. `asks` are the calls that a worker would begin now.
    `problem` says why a worker would set the run aside instead, and `kind` under which name; both are empty if it fits.
    """

    run: str
    records: int
    ended: bool = False
    asks: tuple[str, ...] = ()
    problem: str = ""
    kind: str = ""

    @property
    def fits(self) -> bool:
        """The code goes on where the history ends."""
        return not self.problem


async def recorded(engine: Engine, run: Run) -> Recorded:
    """The history of a run in an engine's store."""
    rows = await rows_up_to(engine, run, run.seq)
    if rows and rows[-1].kind != Kind.STATE:  # which can be done without
        ((_, checksum),) = unseal(rows[-1:], run.id, run.seq - 1)
        check_end(run, run.seq, checksum)
    if not run.data_key:
        return Recorded(run, tuple(rows))

    def in_plain_text() -> Recorded:
        records = [record for record, _ in unseal(rows, run.id, previous=origin(run))]
        return sealed_plain(replace(run, input=engine.encryption.input(run), data_key=""), records)

    return await engine.call(in_plain_text)


async def replay(engine: Engine, run_id: str, workflow: Workflow[..., Any] | None = None) -> Replayed:
    """Replay a run of an engine's store against a workflow, or the one of its name that is loaded here."""
    run = await engine.read(engine.store.get_run, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    workflow = workflow or engine.workflows.get(run.workflow)
    if workflow is None:
        raise DefinitionError(f"run {run_id!r} is one of workflow {run.workflow!r}, which is not known here; import it")
    if workflow.name != run.workflow:
        raise DefinitionError(f"run {run_id!r} is one of workflow {run.workflow!r}, not of {workflow.name!r}")
    return await asyncio.to_thread(replayed, workflow, await recorded(engine, run))


def replayed(workflow: Workflow[..., Any], history: Recorded) -> Replayed:
    """Call a workflow's code with what a run of it has recorded; in a thread that has no loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_Replay(workflow, history).replayed())


def sealed_plain(run: Run, records: Iterable[Record]) -> Recorded:
    """A run whose chain is made of these records."""
    create = sealed(run, records)
    return Recorded(create.run, tuple(create.rows))


def sealed(run: Run, records: Iterable[Record]) -> Create:
    """The creation of a run whose chain is made of these records."""
    rows: list[Row] = []
    checksum = origin(run)
    for record in records:
        row, checksum = seal(record, len(rows) + 1, checksum)
        rows.append(row)
    return Create(replace(run, seq=len(rows), checksum=checksum), rows)


class _Replay:
    """Drives a copy of a run in memory that begins nothing of its own."""

    def __init__(self, workflow: Workflow[..., Any], history: Recorded) -> None:
        self.workflow = workflow
        self.history = history
        self.end = _end_of(history)
        self.compatible = workflow.on_change == "compatible"
        self.context: RunContext | None = None
        self.broken: tuple[str, str, str] | None = None
        self.asked: list[str] = []

    async def replayed(self) -> Replayed:
        store = MemoryStore()
        store.commit([self._copy()])
        engine = _Engine(store, workflows=[self.workflow], clock=VirtualClock(), replay=self)
        async with engine:
            await self._come_to_rest()
            name, told = self.history.run.id, len(self.history.rows)
            if self.broken is not None:
                kind, *words = self.broken
                return Replayed(name, told, problem=" ".join(filter(None, words)), kind=kind)
            run = store.get_run(name)
            problem = "" if run is None else self._other_end(run)
            ended = run is not None and run.status.finished
            return Replayed(name, told, ended, tuple(self._asks()), problem, MISMATCH if problem else "")

    def _copy(self) -> Create:
        """The run as if it had just been handed back, before its end."""
        old = self.history.run
        rows = self.history.rows[: -1 if _last_is_end(self.history) else None]
        run = Run(
            id=old.id,
            workflow=old.workflow,
            status=Status.QUEUED,
            created_at=old.created_at,
            version=old.version,
            fingerprint=old.fingerprint,
            input=old.input,
            seed=old.seed,
        )
        return sealed(run, [record for record, _ in unseal(rows, old.id, previous=origin(old))])

    async def _come_to_rest(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(_TURN_SECONDS)
            if self.broken is not None or self._is_told():
                await asyncio.sleep(_TURN_SECONDS)
                return
            if self.asked and self.compatible:  # something new amid what is recorded, which only a worker can perform
                return
        asks = ", ".join(self._asks()) or "something that is not recorded"
        said = f"the code waits for {asks} and does not come to the end of its history"
        self.broken = (MISMATCH, said, self._place())

    def _is_told(self) -> bool:
        """Whether the code has heard all that is recorded, and does not wait for branches that it has left open."""
        context = self.context
        return context is not None and (bool(context.detached) or (context.history is None and not context.finishing))

    def _asks(self) -> list[str]:
        context = self.context
        if context is None or context.detached:
            return self.asked
        return sorted({*self.asked, *(call.key for call in context.held)})

    def _other_end(self, run: Run) -> str:
        """A run that had ended must end again, and as it did: what is other than it was, or nothing."""
        end = self.end
        if end is None:
            return ""
        if not run.status.finished:
            if self.compatible:
                return ""
            asks = ", ".join(self._asks()) or "something that is not recorded"
            return f"the run had ended, and the code now asks for {asks} {self._place()}".rstrip()
        old = self.history.run
        if run.status is not old.status:
            error = f": {run.error.type}: {run.error.message}" if run.error is not None else ""
            return f"the run had ended as {old.status.value}, and now ends as {run.status.value}{error}"
        values = self.workflow.values
        if old.status is Status.COMPLETED and not end.data:
            then, now = end.raw(), run.output or b"null"
            if then != now and values.digest(values.decode(then)) != values.digest(values.decode(now)):
                return f"the run had ended with {_shown(then)}, and now ends with {_shown(now)}"
        elif end.error is not None and run.error is not None and end.error.type != run.error.type:
            return f"the run had failed with {end.error.type}, and now fails with {run.error.type}"
        return ""

    # -- what the engine tells

    def broke(self, context: RunContext, kind: str, reason: str) -> None:
        if self.broken is None:
            self.broken = (kind, reason.removeprefix("replay mismatch: "), self._place())
        context.detach(reason)

    def _place(self) -> str:
        """Where in the user's code it is: the call that is being made, or the one that is waited for."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the way to look at one's callers
        while frame is not None and frame.f_code.co_name != "run_forever":  # whoever asked for the replay is no part
            if _is_theirs(frame):
                return _line(frame)
            frame = frame.f_back
        main = self.context.main if self.context is not None else None
        waiting = _waiting_in(main.get_coro()) if isinstance(main, asyncio.Task) else None
        if waiting is not None:
            return _line(waiting)
        place = self.workflow.place
        return f"({place})" if place.line else ""


class _Engine(Engine):
    """An engine that only replays: what is not recorded is held back, and nothing that breaks is written down."""

    def __init__(self, store: Store, *, replay: _Replay, **options: Any) -> None:
        super().__init__(store, linger_seconds=1e9, **options)
        self._replay = replay
        self.perform = self._never

    async def open(self) -> None:
        await super().open()
        self.runner.set_aside = self._set_aside  # type: ignore[method-assign]

    def is_own(self, run: Run) -> bool:
        return True  # whoever replays a run says with which workflow

    def entered(self, context: RunContext) -> None:
        super().entered(context)
        if context.id != self._replay.history.run.id:  # the successor of a run that continued
            context.detach("it is no part of the replay")
            return
        self._replay.context = context
        context.holding = True

    def _set_aside(self, context: RunContext, kind: str, reason: str, *, phase: str = "resume") -> None:
        self._replay.broke(context, kind, reason)

    async def _never(self, call: Any) -> None:
        """In place of a step's body."""
        self._replay.asked.append(call.key)
        await asyncio.get_running_loop().create_future()


def _end_of(history: Recorded) -> Record | None:
    """The record of the run's end, if it has ended."""
    if not history.rows or history.rows[-1].kind != Kind.RUN_FINISHED:
        return None
    [(record, _)] = unseal(history.rows[-1:], history.run.id, history.rows[-1].seq - 1)
    return record


def _last_is_end(history: Recorded) -> bool:
    """Whether the last record only says that the run ended, or why it was set aside."""
    return bool(history.rows) and history.rows[-1].kind in (Kind.RUN_FINISHED, Kind.ERROR)


def _is_theirs(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_NOT_THEIRS)


def _waiting_in(coroutine: Any) -> FrameType | None:
    """The innermost place in the user's code that a coroutine waits in."""
    place: FrameType | None = None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None and _is_theirs(frame):
            place = frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return place


def _line(frame: FrameType) -> str:
    return f"({frame.f_code.co_filename}:{frame.f_lineno})"


def _shown(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    return text if len(text) <= 200 else f"{text[:200]}…"
