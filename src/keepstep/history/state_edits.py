"""The state of a graph's run: reading it at any checkpoint, and editing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ..checks import check_text
from ..errors import AlreadyFinished, DefinitionError, RunConflict, RunNotFound
from ..kernel.graph.position import Position
from ..kernel.graph.stored import _records, position_at
from ..kernel.replay import History, Superseded, newest_state, read_history
from ..kernel.versions import before
from ..model import Kind, State, Status
from ..model.checkpoint import ANSWERS_CALL, LEAVES_STEP_OPEN
from ..model.signal import CANCEL, RESUME, breakpoint_call
from ..model.tree import diff
from ..records.data import CommandData, Data, data_of, new_data
from ..records.record import Record
from ..values import VALUES
from ..values.trees import Trees
from ..workflows.graph import Graph, steps_in
from .commands import RETRIABLE, append_and_release, check_not_keeper, claim_by_name, hand_back_on_error
from .retry import plan_retry, retry_children

if TYPE_CHECKING:
    from ..model import Claim, Run
    from .host import CommandHost

#: Statuses that allow an edit: no worker drives the run, and it was not cancelled.
_EDITABLE = frozenset({Status.WAITING, Status.QUEUED, Status.PAUSED, Status.FAILED, Status.SET_ASIDE})
_WAITING = frozenset({Status.WAITING, Status.QUEUED, Status.PAUSED})


def trees_of(host: CommandHost, run: Run) -> Trees:
    """Return the reader of a run's state, with the types of its graph if that is loaded."""
    workflow = host.workflows.get(run.workflow)
    return workflow.trees if isinstance(workflow, Graph) else Trees(VALUES)


async def state_at(host: CommandHost, run_id: str, at: int | None, level: str = "") -> State:
    """Return the state of a run after record `at`, or now."""
    run = await run_with_state(host, run_id)
    position = await position_at(host, run, at)
    if level and level not in position.levels:
        there = ", ".join(name.replace(":", " ") for name in position.levels if name) or "none"
        wanted = level.replace(":", " ")
        raise DefinitionError(f"run {run_id!r} has no state of {wanted} at this record; it has: {there}")
    return position.state(trees_of(host, run), run.id, level)


async def run_with_state(host: CommandHost, run_id: str) -> Run:
    """Return the run. Raise an error if it does not exist or carries no state."""
    check_not_keeper(run_id, "edit")
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    workflow = host.workflows.get(run.workflow)
    carries = workflow.carries_state if workflow is not None else run.fingerprint.startswith("graph:")
    if not carries:
        raise DefinitionError(f"run {run_id!r} belongs to workflow {run.workflow!r}, which carries no state")
    return run


class Edit:
    """A person's change of a state: new values, removed keys, and optionally another next step."""

    def __init__(
        self, values: Mapping[str, Any], remove: Iterable[str] = (), level: str = "", next_step: str | None = None
    ) -> None:
        self.values, self.remove, self.level, self.next_step = values, tuple(remove), level, next_step

    async def check_next(self, host: CommandHost, run: Run) -> None:
        """Refuse a next step that the graph does not have; use the stored definition if the graph is not loaded."""
        if self.next_step is None:
            return
        graph, kept = host.workflows.get(run.workflow), ""
        if isinstance(graph, Graph):
            known = list(graph.nodes)
        else:
            old = await before(host, run)
            known = steps_in(old.definition, self.next_step)
            kept = (
                f" in version {old.version!r}, which is stored with the run; if the new version has it, use handle.edit"
            )
        if known and self.next_step not in known:
            problem = f"run {run.id!r}: graph {run.workflow!r} has no step {self.next_step!r}{kept}"
            raise DefinitionError(f"{problem}; it has {', '.join(known)}")

    async def delta(self, host: CommandHost, run: Run, position: Position) -> bytes:
        """Return the stored form of the edit, which is that of any change of the state."""
        trees, where = trees_of(host, run), f"the new state of run {run.id!r}"
        old = position.levels.get(self.level, {})
        values = self.values
        if not self.level:
            _check_removed(host, run, self.remove, where)
            values = await fitting(host, run, values, where, State.of(old, trees.read))
        new = {**old, **trees.lift(values, old, where, careful=True)}
        for key in self.remove:
            new.pop(key, None)
        delta = diff(old, new)
        text = msgspec.json.encode({"levels": {self.level: delta}} if self.level else delta)
        host.redaction.check(text, run.id, "edit of run")
        return text


async def edit(host: CommandHost, run_id: str, change: Edit, reason: str, actor: str) -> None:
    """Change the state of a run that no worker drives, and let it go on; the record names the actor and the reason."""
    check_text(reason, "reason")
    run = await run_with_state(host, run_id)
    if run.status is Status.CANCELLED or run.status is Status.COMPLETED:
        raise AlreadyFinished(f"run {run_id!r} is {run.status.value}; rewind or fork it instead", run_id)
    _check_driven(run, _EDITABLE)
    change.values = plain(host, run, change.values)
    host.encryption.cipher(run)  # nothing can be written without the run's key
    # Check before the claim, so that a refused edit leaves the run untouched.
    await _prepared(host, run, change)
    if run.status in RETRIABLE:
        await plan_retry(host, run)
    claim = await claim_by_name(host, run, _EDITABLE)
    data = _command_data(claim, run, "edit", host.redaction.redact(reason), actor)
    if change.next_step is not None:
        data["next"] = change.next_step
    record = Record(run_id, Kind.SUPERSEDED.value, worker=claim.lease.worker, trigger="manual", data=data)
    async with hand_back_on_error(host, claim):
        record.value = msgspec.Raw(await _prepared(host, claim.run, change))
        if data["before"] in RETRIABLE:  # as for a retry, the end of the run no longer counts
            plan = await plan_retry(host, claim.run)
            await retry_children(host, plan, reason, actor)
            data["seqs"] = plan.seqs
        if overtaken := await _overtaken(host, claim.run, change):
            data["seqs"] = sorted({*data.get("seqs", ()), *overtaken})
        await _write(host, claim, record)


def _check_driven(run: Run, statuses: frozenset[Status]) -> None:
    if run.status not in statuses:
        driven = f", driven by {run.worker}; pause it first" if run.worker is not None else ""
        raise RunConflict(f"run {run.id!r} is {run.status.value}{driven}", run.id)


def _command_data(claim: Claim, run: Run, act: str, reason: str, actor: str) -> Data:
    return new_data(CommandData, act=act, actor=actor, reason=reason, before=(claim.before or run.status).value)


async def _write(host: CommandHost, claim: Claim, record: Record) -> None:
    """Append a command's record and release the run: queued, or paused again."""
    if claim.before is Status.PAUSED:
        await append_and_release(host, claim, record, Status.PAUSED, wakes=(RESUME, CANCEL))
    else:
        await append_and_release(host, claim, record, Status.QUEUED)


async def _prepared(host: CommandHost, run: Run, change: Edit) -> bytes:
    await change.check_next(host, run)
    position = await position_at(host, run)
    if await under_way(host, run, position) is not None:
        raise RunConflict(
            f"step {position.at!r} of run {run.id!r} is running with the old state; edit the state after it completes, "
            "or rewind the run to before the step first",
            run.id,
        )
    await _overtaken(host, run, change)
    return await change.delta(host, run, position)


def plain(host: CommandHost, run: Run, given: Any) -> Any:
    """Return an instance of the schema of a run's graph as a dictionary; anything else is returned unchanged."""
    workflow = host.workflows.get(run.workflow)
    return workflow.schema.plain(given) if isinstance(workflow, Graph) and workflow.schema is not None else given


def _check_removed(host: CommandHost, run: Run, keys: Iterable[str], where: str) -> None:
    """Refuse the removal of keys that the schema of the run's graph requires, if the graph is loaded."""
    workflow = host.workflows.get(run.workflow)
    if isinstance(workflow, Graph) and workflow.schema is not None:
        workflow.schema.check_removed(keys, where)


async def fitting(
    host: CommandHost, run: Run, values: Mapping[str, Any], where: str, state: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Convert values to the schema of a run's state; refuse them if there is a schema but its graph is not loaded."""
    workflow = host.workflows.get(run.workflow)
    if isinstance(workflow, Graph):
        return values if workflow.schema is None else workflow.schema.changed(state, values, where)
    schema = (await before(host, run)).schema if values else ""
    if schema:
        raise DefinitionError(
            f"{where}: the values must be checked with {schema}, and workflow {run.workflow!r} is not loaded. Name it "
            "with --workflow FILE.py:NAME, or use a process that has the workflow"
        )
    return values


async def _overtaken(host: CommandHost, run: Run, change: Edit) -> list[int]:
    """Return the records of the next step if the edit replaces it. Refuse the edit if that step is in doubt."""
    records = await begun(host, run, await position_at(host, run), change)
    if records and records[-1].kind == Kind.STEP_STARTED:
        key = records[-1].step
        raise RunConflict(
            f"run {run.id!r}: step {key} may or may not have happened; resolve it first (handle.resolve, or "
            "keepstep resolve), or rewind the run to before it",
            run.id,
        )
    return [record.seq for record in records]


async def begun(host: CommandHost, run: Run, position: Position, change: Edit, upto: int | None = None) -> list[Record]:
    """Return the records of the step that was next, if the edit replaces it."""
    key = _next_key(position)
    if not key or change.next_step in (None, position.at):
        return []
    return [
        record
        for record in await _counting(host, run, position, upto)
        if (record.step == key and record.kind in LEAVES_STEP_OPEN)
        or (record.step.startswith(f"{key}/") and record.kind in ANSWERS_CALL)
    ]


async def under_way(host: CommandHost, run: Run, position: Position, upto: int | None = None) -> Record | None:
    """Return the first record of branches or a child that the next step has begun with the current state, or None."""
    key = _next_key(position)
    records = await _counting(host, run, position, upto) if key else []
    return next((record for record in records if _began_with_the_state(record, key)), None)


async def _counting(host: CommandHost, run: Run, position: Position, upto: int | None) -> list[Record]:
    """Return the records since the last passed step, without superseded ones."""
    records = await _records(host, run, position.seq, run.seq if upto is None else upto)
    gone = Superseded()
    for record in records:
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
    return [record for record in records if record.seq not in gone]


def _began_with_the_state(record: Record, key: str) -> bool:
    """Whether a record belongs to a branch or child of this key, which use the state as it was."""
    if record.step.startswith(f"{key}/"):
        return "child" in data_of(record, Data)
    stops = (breakpoint_call(key, "before"), breakpoint_call(key, "after"))
    return record.step.startswith(f"{key}.") and record.step not in stops


def _next_key(position: Position) -> str:
    """Return the key of the next step, or "" if it is not known."""
    return f"{position.at}#{position.counts.get(position.at, 0) + 1}" if position.at else ""


async def consolidate(host: CommandHost, run_id: str, reason: str, actor: str) -> None:
    """Record the whole state of a run, so that earlier records need not be read again."""
    check_text(reason, "reason")
    run = await run_with_state(host, run_id)
    _check_driven(run, _WAITING)
    host.encryption.cipher(run)
    # Check before the claim, so that a refused command leaves the run untouched.
    await _between_steps(host, run)
    claim = await claim_by_name(host, run, _WAITING)
    data = _command_data(claim, run, "consolidate", host.redaction.redact(reason), actor)
    record = Record(run_id, Kind.STATE.value, worker=claim.lease.worker, trigger="manual", data=data)
    async with hand_back_on_error(host, claim):
        record.value = msgspec.Raw(await _whole(host, claim.run))
        await _write(host, claim, record)


async def _whole(host: CommandHost, run: Run) -> bytes:
    position = await _between_steps(host, run)
    base = await newest_state(host, run)
    history = await read_history(host, run, History(run, 0 if base is None else base - 1))
    return position.text(history.facts())


async def _between_steps(host: CommandHost, run: Run) -> Position:
    """Return the position of a run. Raise an error if it is inside a step, where no state can be recorded."""
    position = await position_at(host, run)
    key = _next_key(position)
    records = await _counting(host, run, position, None)
    if position.at is None:
        raise RunConflict(f"run {run.id!r} is after {position.step!r}, where no edge is chosen yet", run.id)
    needed = (record for record in records if record.kind != Kind.WAIT_STARTED)  # a state holds its open waits
    if any(key and record.step.startswith(key) for record in needed):  # the step still needs its records
        raise RunConflict(
            f"run {run.id!r} is inside {position.at!r}; its state can be recorded after that step completes", run.id
        )
    return position
