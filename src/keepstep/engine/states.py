"""The state of a run that carries one: as it was at any checkpoint, and what a person makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import AlreadyFinished, CheckpointCorrupt, DefinitionError, RunConflict, RunNotFound
from ..model import Kind, State, Status
from ..model.ids import check_text
from ..model.signal import CANCEL, RESUME
from ..model.tree import diff, frozen
from ..stores.records import Record, origin, unseal
from ..values import VALUES
from ..values.trees import Trees
from ..workflows.graph import Graph, MapNode, ParallelNode
from .control import RETRIABLE, append_and_release, claim_by_name, failures
from .history import Superseded, newest_state
from .position import Position

if TYPE_CHECKING:
    from ..model import Run
    from .engine import Engine

#: What can be edited: everything that no worker drives, but for what was cancelled.
_EDITABLE = frozenset({Status.WAITING, Status.QUEUED, Status.PAUSED, Status.FAILED, Status.SET_ASIDE})


async def position_at(engine: Engine, run: Run, at: int | None = None) -> Position:
    """Where the walk of a run was when its record `at` had been written: folded from the state before it."""
    upto = run.seq if at is None else at
    if not 0 <= upto <= run.seq:
        raise DefinitionError(f"run {run.id!r} has records 1 to {run.seq}, and none with the number {upto}")
    base = await newest_state(engine, run, upto)
    records = await _records(engine, run, 0 if base is None else base - 1, upto)
    gone = Superseded()
    for record in records:
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
    if base is None:
        position = _beginning(engine, run)
    else:
        position, _ = Position.restored(records.pop(0))
    for record in records:
        if record.seq not in gone:
            position.follow(record)
    return position


async def _records(engine: Engine, run: Run, after: int, upto: int) -> list[Record]:
    found: list[Record] = []
    previous = origin(run) if not after else ""
    while after < upto:
        rows = await engine.read(engine.store.list_checkpoints, run.id, after)
        if not rows:
            raise CheckpointCorrupt(f"run {run.id!r}: chain broken at seq {after + 1}: it is not there")
        for record, checksum in unseal(rows, run.id, after, previous):
            after, previous = record.seq, checksum
            if record.seq <= upto:
                found.append(record)
    return found


def _beginning(engine: Engine, run: Run) -> Position:
    stored = msgspec.json.decode(engine.encryption.input(run))
    try:
        (args, kwargs) = stored
        first = {**(args[0] or {} if args else {}), **kwargs}
    except (TypeError, ValueError):
        raise CheckpointCorrupt(f"run {run.id!r}: its input is no state") from None
    workflow = engine.workflows.get(run.workflow)
    entry = workflow.entry_name if isinstance(workflow, Graph) else None
    return Position({"": {key: frozen(value) for key, value in first.items()}}, entry)


def trees_of(engine: Engine, run: Run) -> Trees:
    """What reads the state of a run: with the types of its graph, if that is known here."""
    workflow = engine.workflows.get(run.workflow)
    return workflow.trees if isinstance(workflow, Graph) else Trees(VALUES)


async def state_at(engine: Engine, run_id: str, at: int | None, level: str = "") -> State:
    """The state of a run after one of its records, or now."""
    run = await _run(engine, run_id)
    position = await position_at(engine, run, at)
    return position.state(trees_of(engine, run), run.id, level)


async def _run(engine: Engine, run_id: str) -> Run:
    run = await engine.read(engine.store.get_run, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    workflow = engine.workflows.get(run.workflow)
    carries = workflow.carries_state if workflow is not None else run.fingerprint.startswith("graph:")
    if not carries:
        raise DefinitionError(f"run {run_id!r} is one of workflow {run.workflow!r}, which carries no state")
    return run


class Edit:
    """What a person makes of a state: other values, keys that go, and perhaps another step that is next."""

    def __init__(
        self, values: Mapping[str, Any], remove: Iterable[str] = (), level: str = "", next_step: str | None = None
    ) -> None:
        self.values, self.remove, self.level, self.next_step = values, tuple(remove), level, next_step

    def delta(self, engine: Engine, run: Run, position: Position) -> bytes:
        """The edit as it is stored: a change of the state as any other."""
        workflow, trees = engine.workflows.get(run.workflow), trees_of(engine, run)
        where = f"the edit of run {run.id!r}"
        if isinstance(workflow, Graph):
            if self.next_step is not None and self.next_step not in workflow.nodes:
                raise DefinitionError(f"{where}: graph {workflow.name!r} has no step {self.next_step!r}")
            if workflow.schema is not None and not self.level:
                workflow.schema.check(self.values, where)
        old = position.levels.get(self.level, {})
        new = {**old, **trees.lift(self.values, old, where, careful=True)}
        for key in self.remove:
            new.pop(key, None)
        delta = diff(old, new)
        text = msgspec.json.encode({"levels": {self.level: delta}} if self.level else delta)
        engine.check_value(text, run.id, "edit of run")
        return text


async def edit(engine: Engine, run_id: str, change: Edit, reason: str, actor: str) -> None:
    """Change the state of a run that no worker drives, and let it go on; the record says who did it and why."""
    check_text(reason, "reason")
    run = await _run(engine, run_id)
    if run.status is Status.CANCELLED or run.status is Status.COMPLETED:
        raise AlreadyFinished(f"run {run_id!r} is {run.status.value}; rewind or fork it instead", run_id)
    if run.status not in _EDITABLE:
        raise RunConflict(f"run {run_id!r} is {run.status.value}, driven by {run.worker}; pause it first", run_id)
    engine.encryption.cipher(run)  # without its key nothing can be written
    await _prepared(engine, run, change)  # before the claim: what cannot be done leaves the run as it is
    claim = await claim_by_name(engine, run, _EDITABLE)
    text = await _prepared(engine, claim.run, change)
    before = claim.before or run.status
    data: dict[str, Any] = {"act": "edit", "actor": actor, "reason": engine.redact(reason), "before": before.value}
    if change.next_step is not None:
        data["next"] = change.next_step
    record = Record(run_id, Kind.SUPERSEDED.value, worker=claim.lease.worker, trigger="manual", data=data)
    record.value = msgspec.Raw(text)
    if before in RETRIABLE:  # as a retry does: what ended it no longer counts
        data["seqs"] = await failures(engine, claim.run)
    after = Status.PAUSED if before is Status.PAUSED else Status.QUEUED
    await append_and_release(engine, claim, record, after, wakes=(RESUME, CANCEL) if after is Status.PAUSED else ())


async def _prepared(engine: Engine, run: Run, change: Edit) -> bytes:
    position = await position_at(engine, run)
    workflow = engine.workflows.get(run.workflow)
    node = workflow.nodes.get(position.at or "") if isinstance(workflow, Graph) else None
    if isinstance(node, ParallelNode | MapNode):
        inside = f"{node.name}#{position.counts.get(node.name, 0) + 1}"
        for record in await _records(engine, run, position.seq, run.seq):
            if record.step.startswith(inside):
                raise RunConflict(
                    f"run {run.id!r} is inside {node.name!r}, which began with the state before; edit it when that is "
                    "done, or rewind it to before it first",
                    run.id,
                )
    return change.delta(engine, run, position)
