"""Everything that a door shows of one run: its overview, its spending, its stages and agents, and published values."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.handle import RunHandle
from ..model.checkpoint import ENDS_STEP
from .overview import Overview, overview_of
from .plain import iso, run_data, value_of
from .undo import UndoView, undo_of

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..kernel.ledger import Spending
    from ..model import Checkpoint, Run
    from ..policies.budget import Amount

#: Records of a run up to which its spending and its names are added up, so that a door answers at once.
MANY_RECORDS = 10_000


class Facts(NamedTuple):
    """The data that a door shows of a run."""

    view: Overview
    published: dict[str, Any]
    spent: Spending | None
    #: Number of steps with an outcome, and of those with recorded arguments; None if they were not counted.
    inputs: tuple[int, int] | None
    #: The steps that are undone or can be; None if there are none.
    undo: UndoView | None = None
    #: The stages and agents that the records name, each with the number of its records; the newest is last.
    stages: dict[str, int] = {}  # noqa: RUF012 - never changed
    agents: dict[str, int] = {}  # noqa: RUF012 - as above


async def facts_of(engine: Engine, run: Run) -> Facts:
    """Collect the facts of a run that was just read."""
    handle: RunHandle[Any] = RunHandle(engine, run.id, engine.workflows.get(run.workflow))
    view = await overview_of(engine, run, datetime.now(UTC))
    published, spent, inputs, undo = {}, None, None, None
    stages: dict[str, int] = {}
    agents: dict[str, int] = {}
    if view.locked is None:
        if run.seq <= MANY_RECORDS:
            spent = await handle.spent()
            records = await handle.checkpoints()
            inputs = _count_inputs(records)
            stages, agents = (_count(getattr(one, level) for one in records) for level in ("stage", "agent"))
            undo = undo_of(await handle.checkpoints(counted=True))
        published = {key: value_of(value) for key, value in (await handle.published_raw()).items()}
    return Facts(view, published, spent, inputs, undo, stages, agents)


def facts_data(facts: Facts) -> dict[str, Any]:
    """Return the facts of a run for a program."""
    view, spent = facts.view, facts.spent
    value = run_data(view.run, whole=True)
    value |= {"published": facts.published, "hidden": view.locked is not None}
    if spent is not None:
        parts = {name: _amounts(getattr(spent, name)) for name in ("by_step", "by_agent", "by_model")}
        value["spent"] = {"steps": spent.steps, "cost": spent.cost, "tokens": spent.tokens, **parts}
    if facts.inputs is not None:
        value["step_inputs"] = facts.inputs[1]
    value |= {"stages": facts.stages, "agents": facts.agents}
    if (undo := facts.undo) is not None:
        value["undo"] = {name: getattr(undo, name) for name in ("undone", "failed", "skipped", "left", "at_end")}
    if (cancelled := view.cancellation) is not None:
        value["cancelled"] = {"by": cancelled.by, "reason": cancelled.reason, "at": iso(cancelled.at)}
    if (request := view.request) is not None:
        value["asked"] = {"for": request.act, "by": request.by, "at": iso(request.at)}
    if view.newest is not None:
        value["newest"] = {"id": view.newest.id, "status": view.newest.status.value}
    if view.refused:
        value["unread"] = [{"signal": one.name, "seq": one.seq, "by": one.sender} for one in view.refused]
    if view.children:
        value["children"] = [{"call": key, "id": one.id, "status": one.status.value} for key, one in view.children]
    return value


def _amounts(parts: dict[str, Amount]) -> dict[str, dict[str, float]]:
    return {name: {"cost": one.cost, "tokens": one.tokens} for name, one in parts.items()}


def _count(names: Iterable[str | None]) -> dict[str, int]:
    """Return the number of records with each name; the name of the newest one is last."""
    counts: dict[str, int] = {}
    for name in names:
        if name is not None:
            counts[name] = counts.pop(name, 0) + 1
    return counts


def _count_inputs(checkpoints: list[Checkpoint]) -> tuple[int, int]:
    """Return the number of steps with an outcome, and of those with recorded arguments."""
    steps = [one for one in checkpoints if one.kind in ENDS_STEP and one.retry_at is None]
    return len(steps), sum("input" in one.data or "input_bytes" in one.data for one in steps)
