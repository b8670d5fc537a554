"""The state of a run that carries one: as it was at any checkpoint, and what a person makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import AlreadyFinished, CheckpointCorrupt, DefinitionError, RunConflict, RunNotFound
from ..model import Kind, State, Status
from ..model.ids import check_text
from ..model.signal import CANCEL, RESUME, breakpoint_call
from ..model.tree import diff, frozen
from ..stores.records import Record, origin, unseal
from ..values import VALUES
from ..values.trees import Trees
from ..workflows.graph import Graph, steps_in
from .control import RETRIABLE, append_and_release, claim_by_name, let_go_unless_done
from .history import REST_AFTER, History, Superseded, check_end, check_not_removed, newest_state, read_history
from .position import Position
from .retry import retry_children, taken_back
from .versions import before

if TYPE_CHECKING:
    from ..model import Claim, Run
    from .engine import Engine

#: What can be edited: everything that no worker drives, but for what was cancelled.
_EDITABLE = frozenset({Status.WAITING, Status.QUEUED, Status.PAUSED, Status.FAILED, Status.SET_ASIDE})
#: What a step leaves that has begun and is not done.
_BEGUN = frozenset({Kind.STEP_STARTED.value, Kind.STEP_FAILED.value})
_WAITING = frozenset({Status.WAITING, Status.QUEUED, Status.PAUSED})


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
    """Some records of a run, of which the last is the one that the next, or the head, names."""
    found: list[Record] = []
    previous = origin(run) if not after else ""
    while after < upto or after == upto < run.seq:
        rows = await engine.read(engine.store.list_checkpoints, run.id, after)
        if not rows:
            await check_not_removed(engine, run)
            raise CheckpointCorrupt(f"run {run.id!r}: chain broken at seq {after + 1}: it is not there")
        for record, checksum in unseal(rows, run.id, after, previous):
            after, previous = record.seq, checksum
            if after == run.seq:
                check_end(run, after, checksum)
            if record.seq <= upto:
                found.append(record)
            if after % REST_AFTER == 0:
                await asyncio.sleep(0)
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
    run = await run_with_state(engine, run_id)
    position = await position_at(engine, run, at)
    if level and level not in position.levels:
        there = ", ".join(name.replace(":", " ") for name in position.levels if name) or "none"
        told = level.replace(":", " ")
        raise DefinitionError(f"run {run_id!r} has no state of {told} there; it has those of: {there}")
    return position.state(trees_of(engine, run), run.id, level)


async def run_with_state(engine: Engine, run_id: str) -> Run:
    """The run, if it is one that carries a state."""
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

    async def check_next(self, engine: Engine, run: Run) -> None:
        """Refuse a next step that the graph does not have: the one that is here, else the one kept with the run."""
        if self.next_step is None:
            return
        graph, kept = engine.workflows.get(run.workflow), ""
        if isinstance(graph, Graph):
            known = list(graph.nodes)
        else:
            old = await before(engine, run)
            known = steps_in(old.definition, self.next_step)
            kept = f" in version {old.version!r}, as it is kept with the run; if the new one has it, use handle.edit"
        if known and self.next_step not in known:
            told = f"the edit of run {run.id!r}: graph {run.workflow!r} has no step {self.next_step!r}{kept}"
            raise DefinitionError(f"{told}; it has {', '.join(known)}")

    async def delta(self, engine: Engine, run: Run, position: Position) -> bytes:
        """The edit as it is stored: a change of the state as any other."""
        trees, where = trees_of(engine, run), f"the edit of run {run.id!r}"
        values = self.values if self.level else await fitting(engine, run, self.values, where)
        old = position.levels.get(self.level, {})
        new = {**old, **trees.lift(values, old, where, careful=True)}
        for key in self.remove:
            new.pop(key, None)
        delta = diff(old, new)
        text = msgspec.json.encode({"levels": {self.level: delta}} if self.level else delta)
        engine.censor.check(text, run.id, "edit of run")
        return text


async def edit(engine: Engine, run_id: str, change: Edit, reason: str, actor: str) -> None:
    """Change the state of a run that no worker drives, and let it go on; the record says who did it and why."""
    check_text(reason, "reason")
    run = await run_with_state(engine, run_id)
    if run.status is Status.CANCELLED or run.status is Status.COMPLETED:
        raise AlreadyFinished(f"run {run_id!r} is {run.status.value}; rewind or fork it instead", run_id)
    _check_driven(run, _EDITABLE)
    engine.encryption.cipher(run)  # without its key nothing can be written
    await _prepared(engine, run, change)  # before the claim: what cannot be done leaves the run as it is
    claim = await claim_by_name(engine, run, _EDITABLE)
    data = _said(claim, run, "edit", engine.censor.redact(reason), actor)
    if change.next_step is not None:
        data["next"] = change.next_step
    record = Record(run_id, Kind.SUPERSEDED.value, worker=claim.lease.worker, trigger="manual", data=data)
    async with let_go_unless_done(engine, claim):
        record.value = msgspec.Raw(await _prepared(engine, claim.run, change))
        if data["before"] in RETRIABLE:  # as a retry does: what ended it no longer counts
            plan = await taken_back(engine, claim.run)
            await retry_children(engine, plan, reason, actor)
            data["seqs"] = plan.seqs
        if overtaken := await _overtaken(engine, claim.run, change):
            data["seqs"] = sorted({*data.get("seqs", ()), *overtaken})
        await _write(engine, claim, record)


def _check_driven(run: Run, statuses: frozenset[Status]) -> None:
    if run.status not in statuses:
        driven = f", driven by {run.worker}; pause it first" if run.worker is not None else ""
        raise RunConflict(f"run {run.id!r} is {run.status.value}{driven}", run.id)


def _said(claim: Claim, run: Run, act: str, reason: str, actor: str) -> dict[str, Any]:
    return {"act": act, "actor": actor, "reason": reason, "before": (claim.before or run.status).value}


async def _write(engine: Engine, claim: Claim, record: Record) -> None:
    """Write what a person did, and let the run go: on, or on being paused."""
    if claim.before is Status.PAUSED:
        await append_and_release(engine, claim, record, Status.PAUSED, wakes=(RESUME, CANCEL))
    else:
        await append_and_release(engine, claim, record, Status.QUEUED)


async def _prepared(engine: Engine, run: Run, change: Edit) -> bytes:
    await change.check_next(engine, run)
    position = await position_at(engine, run)
    if await under_way(engine, run, position) is not None:
        raise RunConflict(
            f"run {run.id!r} is inside {position.at!r}, which began with the state before; edit it when that is done, "
            "or rewind it to before it first",
            run.id,
        )
    await _overtaken(engine, run, change)
    return await change.delta(engine, run, position)


async def fitting(engine: Engine, run: Run, values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Values for the state of a run as its schema has them; without the code of its graph, a schema refuses all."""
    workflow = engine.workflows.get(run.workflow)
    if isinstance(workflow, Graph):
        return values if workflow.schema is None else workflow.schema.converted(values, where)
    schema = (await before(engine, run)).schema if values else ""
    if schema:
        raise DefinitionError(
            f"{where}: its state is held to {schema}, which only the code of workflow {run.workflow!r} has; name it "
            "with --workflow FILE.py:NAME, or do this in a process that has the workflow"
        )
    return values


async def _overtaken(engine: Engine, run: Run, change: Edit) -> list[int]:
    """The attempts of the step that was to be next, which no longer count if another one is; a doubt is refused."""
    records = await begun(engine, run, await position_at(engine, run), change)
    if records and records[-1].kind == Kind.STEP_STARTED:
        key = records[-1].step
        raise RunConflict(
            f"run {run.id!r}: {key} began and may or may not have happened; resolve it first (handle.resolve, or "
            "keepstep resolve), or rewind the run to before it",
            run.id,
        )
    return [record.seq for record in records]


async def begun(engine: Engine, run: Run, position: Position, change: Edit, upto: int | None = None) -> list[Record]:
    """What the step that was to be next has recorded so far, if an edit puts another one in its place."""
    key = _next_key(position)
    if not key or change.next_step in (None, position.at):
        return []
    records = await _counting(engine, run, position, upto)
    return [record for record in records if record.step == key and record.kind in _BEGUN]


async def under_way(engine: Engine, run: Run, position: Position, upto: int | None = None) -> Record | None:
    """The first record of what the step that is next has begun with the state as it is: branches, or a child."""
    key = _next_key(position)
    records = await _counting(engine, run, position, upto) if key else []
    return next((record for record in records if _began_with_the_state(record, key)), None)


async def _counting(engine: Engine, run: Run, position: Position, upto: int | None) -> list[Record]:
    """The records since the last step was passed, without what is superseded."""
    records = await _records(engine, run, position.seq, run.seq if upto is None else upto)
    gone = Superseded()
    for record in records:
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
    return [record for record in records if record.seq not in gone]


def _began_with_the_state(record: Record, key: str) -> bool:
    """Whether a record says that something under this key is under way with the state as it was: branches, a child."""
    if record.step.startswith(f"{key}/"):
        return "child" in (record.data or {})
    stops = (breakpoint_call(key, "before"), breakpoint_call(key, "after"))
    return record.step.startswith(f"{key}.") and record.step not in stops


def _next_key(position: Position) -> str:
    """The key that the step has which comes next, if it is known."""
    return f"{position.at}#{position.counts.get(position.at, 0) + 1}" if position.at else ""


async def consolidate(engine: Engine, run_id: str, reason: str, actor: str) -> None:
    """Write the whole state of a run down, so that nothing before it need be read again."""
    check_text(reason, "reason")
    run = await run_with_state(engine, run_id)
    _check_driven(run, _WAITING)
    engine.encryption.cipher(run)
    await _between_steps(engine, run)  # before the claim, as above
    claim = await claim_by_name(engine, run, _WAITING)
    data = _said(claim, run, "consolidate", engine.censor.redact(reason), actor)
    record = Record(run_id, Kind.STATE.value, worker=claim.lease.worker, trigger="manual", data=data)
    async with let_go_unless_done(engine, claim):
        record.value = msgspec.Raw(await _whole(engine, claim.run))
        await _write(engine, claim, record)


async def _whole(engine: Engine, run: Run) -> bytes:
    position = await _between_steps(engine, run)
    base = await newest_state(engine, run)
    history = await read_history(engine, run, History(run, 0 if base is None else base - 1))
    return position.text(history.facts())


async def _between_steps(engine: Engine, run: Run) -> Position:
    """Where a run stands, if that can be written down."""
    position = await position_at(engine, run)
    key = _next_key(position)
    records = await _counting(engine, run, position, None)
    if position.at is None:
        raise RunConflict(f"run {run.id!r} stands after {position.step!r}, where no edge is chosen yet", run.id)
    needed = (record for record in records if record.kind != Kind.WAIT_STARTED)  # a state says which waits are open
    if any(key and record.step.startswith(key) for record in needed):  # which is needed until it is done
        raise RunConflict(
            f"run {run.id!r} is inside {position.at!r}; its state can be written when that is done", run.id
        )
    return position
