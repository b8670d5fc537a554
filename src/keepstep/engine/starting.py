"""Starting a run: what its starter says becomes a run to create, or is found to be one that exists."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DefinitionError, DuplicateName, KeepstepError, RunConflict
from ..model import Run, Status
from ..model.ids import check_id, new_run_id, new_seed
from ..model.series import SERIES
from ..model.signal import WAKES_DELAYED
from ..ports import Create, instant
from ..workflows.definition import Workflow
from ..workflows.options import LONGEST_SECONDS, check_options
from .namesakes import is_namesake, problem
from .runner import Runner

if TYPE_CHECKING:
    from .engine import Engine


class Options(NamedTuple):
    """What a starter says of a run, beside its workflow and its arguments."""

    run_id: str | None
    queue: str
    priority: int
    delay: float
    key: str | None
    deadline: float | timedelta | datetime | None
    tags: dict[str, str] | None

    def over(self, defaults: Mapping[str, Any]) -> Options:
        """These, where they say anything; otherwise what the workflow says of its runs."""
        return self._replace(
            queue=defaults.get("queue", self.queue) if self.queue == "default" else self.queue,
            priority=defaults.get("priority", self.priority) if self.priority == 0 else self.priority,
            deadline=defaults.get("deadline") if self.deadline is None else self.deadline,
            tags={**defaults.get("tags", {}), **(self.tags or {})},
        )


def new_run(
    engine: Engine, workflow: Workflow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Create:
    """The run to create: leased at birth to the engine's worker, if that can drive it now."""
    workflow.check_arguments(args, kwargs)
    if workflow.starting:
        options = options.over(workflow.starting)
    run_id, queue, priority, delay, key, deadline, tags = options
    check_options(queue, priority, delay, key)
    engine.encryption.check_writing()
    now = engine.clock.now()
    at = instant(now)
    name = new_run_id(now) if run_id is None else check_id(run_id)
    worker = engine.worker
    leased = delay <= 0 and worker is not None and worker.has_room() and engine.workflows.get(workflow.name) is workflow
    run = Run(
        id=name,
        workflow=workflow.name,
        status=Status.RUNNING if leased else Status.QUEUED,
        created_at=at,
        created_by=engine.actor,
        updated_at=at,
        version=workflow.version,
        fingerprint=workflow.fingerprint,
        input=engine.censor.input_of(workflow, args, kwargs),
        seed=new_seed(workflow.module),
        queue=queue,
        priority=priority,
        key=key,
        tags=engine.censor.tags(tags) if tags else {},
        deadline_at=_deadline(deadline, now),
        due_at=None if leased else instant(now + max(0.0, delay)),
        wakes=WAKES_DELAYED if delay > 0 else (),
        worker=worker.id if leased and worker is not None else None,
        epoch=1 if leased else 0,
    )
    first = None
    if leased and worker is not None:  # leased at birth: the run is this worker's, and has its first record
        first = Runner.started(name, workflow, worker.id, at)
    return engine.encryption.born(run, first)


def _deadline(deadline: float | timedelta | datetime | None, now: float) -> datetime | None:
    if deadline is None:
        return None
    if isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise DefinitionError("a deadline needs a time zone; use datetime.now(UTC) + ..., or a number of seconds")
        return deadline
    if not isinstance(deadline, timedelta | int | float):
        raise DefinitionError(f"a deadline is a number of seconds, a timedelta or a datetime, not {deadline!r}")
    seconds = deadline.total_seconds() if isinstance(deadline, timedelta) else float(deadline)
    if not 0 < seconds < LONGEST_SECONDS:
        raise DefinitionError(f"a deadline must lie ahead, within {LONGEST_SECONDS:,.0f} s, not {seconds:g} s away")
    return instant(now + seconds)


def definition_of(known: Mapping[str, Workflow[..., Any]], workflow: Any) -> Workflow[..., Any]:
    """The workflow that a starter names, or gives."""
    if isinstance(workflow, Workflow):
        newest = known.get(workflow.name)
        if newest is not None and newest is not workflow:
            raise DuplicateName(
                f"another workflow named {workflow.name!r} has been defined since this one; give each its own name="
            )
        return workflow
    if isinstance(workflow, str):
        found = known.get(workflow)
        if found is None:
            raise DefinitionError(f"no workflow is named {workflow!r}; known are {sorted(known) or 'none'}")
        return found
    raise DefinitionError(f"{workflow!r} is not a workflow; decorate it with @ks.workflow")


def check_same(engine: Engine, workflow: Workflow[..., Any], run: Run, existing: Run, arguments: list[Any]) -> None:
    """Refuse to take a run that exists for the one that was to be started, if they are not the same."""
    if existing.workflow != run.workflow:
        raise RunConflict(
            f"run id {run.id!r} is taken by a run of workflow {existing.workflow!r}, not {run.workflow!r}",
            run.id,
            existing,
        )
    if is_namesake(workflow, existing):
        raise RunConflict(f"run id {run.id!r} is taken: {problem(workflow, existing)}", run.id, existing)
    if SERIES in existing.tags:
        raise RunConflict(
            f"run id {run.id!r} is taken: that run continues the series of run {existing.tags[SERIES]!r}; "
            "use another id, or get that run with engine.get",
            run.id,
            existing,
        )
    if existing.input == run.input:
        return
    values, stored = workflow.values, engine.encryption.input(existing)
    try:
        same = values.digest(values.decode(stored)) == values.digest(workflow.stored_arguments(*arguments))
    except KeepstepError:
        same = False
    if not same:
        raise RunConflict(
            f"run id {run.id!r} is taken by a run of {run.workflow!r} with another input; "
            "use another id, or get that run with engine.get",
            run.id,
            existing,
        )
