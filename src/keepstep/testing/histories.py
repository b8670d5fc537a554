"""Histories: what a run has recorded, kept as a file, and replayed against the code of today.

A file holds the run in its first lines and then one record per line, so that a change of it reads well.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from ..engine.context import RunContext
from ..engine.encryption import Encryption
from ..engine.engine import Engine
from ..errors import CheckpointCorrupt, DefinitionError, ReplayMismatch, RunNotFound, SchemaMismatch, StoreUnavailable
from ..model import Kind, Run, Status
from ..ports import Create, Row, Store
from ..stores.keys import Keys
from ..stores.memory import MemoryStore
from ..stores.open import is_store, open_store
from ..stores.records import FORMAT, Instant, Record, origin, seal, unseal
from ..stores.sealed import SealedStore
from ..workflows.definition import Workflow
from .virtual import VirtualClock, VirtualLoop

#: Code in which no workflow is written: this package and asyncio.
_NOT_THEIRS = (str(Path(__file__).parents[1]), str(Path(asyncio.__file__).parent), "<frozen")
#: A replay that has not come to its end after so many turns waits for something that was not recorded.
_TURNS = 1000


class _Head(msgspec.Struct, omit_defaults=True):
    """What a file tells of the run itself."""

    id: str
    workflow: str
    version: str
    fingerprint: str
    status: Status
    created_at: Instant
    seed: str
    input: msgspec.Raw


class _File(msgspec.Struct):
    format: int
    run: _Head
    records: list[Record]


@dataclass(frozen=True)
class History:
    """A run as it was recorded. `save` writes it to a file, `load` reads it from one, `of` takes it from a store."""

    run: Run
    rows: tuple[Row, ...]

    @staticmethod
    def of(source: Any, run_id: str, *, keys: Keys | None = None) -> History:
        """The history of a run in a store, or in what a URL or a path names. Nothing is written there.

        One that is encrypted is decrypted with the `keys`: what `save` writes is plain text.
        """
        if is_store(source):
            return _read(source, run_id, keys)
        _must_exist(source)
        store = open_store(source)
        try:
            return _read(store, run_id, keys)
        finally:
            store.close()

    @staticmethod
    def load(path: str | os.PathLike[str]) -> History:
        """Read a file that `save` wrote."""
        text = Path(path).read_bytes()
        try:
            found = msgspec.json.decode(text, type=_File)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointCorrupt(f"{path} holds no history: {error}") from None
        if found.format > FORMAT:
            raise SchemaMismatch(f"{path} has format {found.format}, newer than {FORMAT}; upgrade Keepstep")
        run = Run(**{**msgspec.structs.asdict(found.run), "input": bytes(found.run.input)})
        sealed = _sealed(run, found.records)
        list(unseal(sealed.rows, run.id))  # each is one of ours
        return History(replace(sealed.run, status=found.run.status), tuple(sealed.rows))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, one record per line, for the repository of the code that it belongs to."""
        Path(path).write_bytes(b"\n".join(self._lines()) + b"\n")

    def _lines(self) -> Iterator[bytes]:
        run = self.run
        raw = msgspec.Raw(run.input)
        head = _Head(run.id, run.workflow, run.version, run.fingerprint, run.status, run.created_at, run.seed, raw)
        yield b'{"format": %d,' % FORMAT
        yield b' "run": %s,' % msgspec.json.encode(head)
        yield b' "records": ['
        last = len(self.rows)
        for record, _ in unseal(self.rows, run.id):
            record.previous, record.packed, record.format = "", "", 0
            yield b"  %s%s" % (msgspec.json.encode(record), b"," if record.seq < last else b"")
        yield b"]}"


def _read(store: Store, run_id: str, keys: Keys | None) -> History:
    store = store if keys is None else SealedStore(store, keys)
    run = store.get_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
    rows: list[Row] = []
    while page := store.list_checkpoints(run_id, len(rows)):
        rows += page
    records = [record for record, _ in unseal(rows, run_id, previous=origin(run))]
    if not run.data_key:
        return History(run, tuple(rows))
    cipher = Encryption(keys).cipher(run) if not isinstance(store, SealedStore) else store.cipher(run)
    data = run.input if cipher is None else cipher.reveal_text(run.input, "input")
    plain = _sealed(replace(run, input=data, data_key=""), records)
    return History(plain.run, tuple(plain.rows))


def _sealed(run: Run, records: Iterable[Record]) -> Create:
    """A run whose chain is made of these records."""
    rows: list[Row] = []
    checksum = origin(run)
    for record in records:
        row, checksum = seal(record, len(rows) + 1, checksum)
        rows.append(row)
    return Create(replace(run, seq=len(rows), checksum=checksum), rows)


def _must_exist(source: Any) -> None:
    """A store that is not there is not made."""
    text = os.fspath(source)
    scheme, colon, rest = text.partition(":")
    path = rest.removeprefix("///") if scheme.lower() == "sqlite" else text if not colon or os.sep in scheme else ""
    if path and not os.path.lexists(path):
        raise StoreUnavailable(f"there is no store at {text}")


# -- replay ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """What a replay that broke nothing came to: how much was told, and what the code asked for when it was at its end.

    `ended` says that the code came to its own end, as the run did. `asks` are the calls that a worker would begin now.
    """

    run: str
    records: int
    ended: bool
    asks: tuple[str, ...] = ()


def replay(workflow: Workflow[..., Any], source: Any, run_id: str | None = None) -> Replayed:
    """Call a workflow's code with what a run of it has recorded, and raise `ReplayMismatch` where the two part.

    `source` is a `History`, the path of a saved one, or with `run_id` a store, its URL or its path. No step's body
    runs, and nothing is written. The error names the call and, where it can be told, the line of the code.
    """
    history = _history(source, run_id)
    if not isinstance(workflow, Workflow):
        raise DefinitionError(f"{workflow!r} is not a workflow; decorate it with @ks.workflow")
    if history.run.workflow != workflow.name:
        raise DefinitionError(f"the history is one of workflow {history.run.workflow!r}, not of {workflow.name!r}")
    if asyncio._get_running_loop() is None:  # noqa: SLF001 - the one that raises would stand in every traceback
        return _replayed(workflow, history)
    with ThreadPoolExecutor(1) as beside:  # a loop is running here, and another cannot
        return beside.submit(_replayed, workflow, history).result()


def _replayed(workflow: Workflow[..., Any], history: History) -> Replayed:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_Replay(workflow, history).replayed())


def _history(source: Any, run_id: str | None) -> History:
    if isinstance(source, History):
        return source
    if run_id is not None:
        return History.of(source, run_id)
    if isinstance(source, Store) or _is_store(os.fspath(source)):
        raise DefinitionError(f"{source} is a store: say which of its runs, replay(workflow, source, run_id)")
    return History.load(source)


def _is_store(name: str) -> bool:
    """Whether this names a store and not a saved history."""
    if name.startswith(("sqlite:", "memory:")):
        return True
    with Path(name).open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


class _Replay:
    """Drives a copy of a run in memory that begins nothing of its own."""

    def __init__(self, workflow: Workflow[..., Any], history: History) -> None:
        self.workflow = workflow
        self.history = history
        self.end = _end_of(history)
        self.compatible = workflow.on_change == "compatible"
        self.context: RunContext | None = None
        self.broken: tuple[str, str] | None = None
        self.asked: list[str] = []

    async def replayed(self) -> Replayed:
        store = MemoryStore()
        store.commit([self._copy()])
        engine = _Engine(store, workflows=[self.workflow], clock=VirtualClock(), replay=self)
        async with engine:
            await self._come_to_rest()
            run = store.get_run(self.history.run.id)
            if self.broken is not None:
                raise ReplayMismatch(" ".join(filter(None, self.broken)))
            assert run is not None
            self._check_end(run)
            return Replayed(run.id, len(self.history.rows), run.status.finished, tuple(self._asks()))

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
        return _sealed(run, [record for record, _ in unseal(rows, old.id)])

    async def _come_to_rest(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0.1)  # which is over when nothing else can happen
            context = self.context
            if self.broken is not None or (context is not None and (context.detached or context.history is None)):
                await asyncio.sleep(0.1)
                return
            if self.asked and self.compatible:  # something new amid what is recorded, which only a worker can perform
                return
        asks = ", ".join(self._asks()) or "something that is not recorded"
        self.broken = (f"the code waits for {asks} and does not come to the end of its history", self._place())

    def _asks(self) -> list[str]:
        context = self.context
        if context is None or context.detached:
            return self.asked
        return sorted({*self.asked, *(call.key for call in context.held)})

    def _check_end(self, run: Run) -> None:
        """A run that had ended must end again, and as it did."""
        end = self.end
        if end is None:
            return
        if not run.status.finished:
            if self.compatible:
                return
            asks = ", ".join(self._asks()) or "something that is not recorded"
            raise ReplayMismatch(f"the run had ended, and the code now asks for {asks} {self._place()}".rstrip())
        old = self.history.run
        if run.status is not old.status:
            error = f": {run.error.type}: {run.error.message}" if run.error is not None else ""
            raise ReplayMismatch(f"the run had ended as {old.status.value}, and now ends as {run.status.value}{error}")
        values = self.workflow.values
        if old.status is Status.COMPLETED and not end.data:
            then, now = end.raw(), run.output or b"null"
            if then != now and values.digest(values.decode(then)) != values.digest(values.decode(now)):
                raise ReplayMismatch(f"the run had ended with {_shown(then)}, and now ends with {_shown(now)}")
        elif end.error is not None and run.error is not None and end.error.type != run.error.type:
            raise ReplayMismatch(f"the run had failed with {end.error.type}, and now fails with {run.error.type}")

    # -- what the engine tells

    def broke(self, context: RunContext, reason: str) -> None:
        if self.broken is None:
            self.broken = (reason.removeprefix("replay mismatch: "), self._place())
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

    def entered(self, context: RunContext) -> None:
        super().entered(context)
        if context.id != self._replay.history.run.id:  # the successor of a run that continued
            context.detach("it is no part of the replay")
            return
        self._replay.context = context
        context.holding = True

    def _set_aside(self, context: RunContext, kind: str, reason: str) -> None:
        self._replay.broke(context, reason)

    async def _never(self, call: Any) -> None:
        """In place of a step's body."""
        self._replay.asked.append(call.key)
        await asyncio.get_running_loop().create_future()


def _end_of(history: History) -> Record | None:
    """The record of the run's end, if it has ended."""
    if not history.rows or history.rows[-1].kind != Kind.RUN_FINISHED:
        return None
    [(record, _)] = unseal(history.rows[-1:], history.run.id, history.rows[-1].seq - 1)
    return record


def _last_is_end(history: History) -> bool:
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
