"""Starting a run: the options of the caller become a new run, or identify an existing one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checks import check_run_id, seconds_of
from ..errors import DefinitionError, DuplicateName, KeepstepError, RunConflict
from ..kernel.namesakes import is_namesake, problem
from ..kernel.runner import Runner
from ..model import Run, Status
from ..model.ids import new_run_id, new_seed
from ..model.series import SERIES
from ..model.signal import WAKES_DELAYED
from ..model.trace import parsed_traceparent, traceparent
from ..ports import STARTER, Create, instant
from ..workflows.definition import Workflow
from ..workflows.options import check_options, deadline_at

if TYPE_CHECKING:
    from .process import Process


class Options(NamedTuple):
    """Options of `start`."""

    run_id: str | None
    queue: str
    priority: int
    delay: float | timedelta
    key: str | None
    deadline: float | timedelta | datetime | None
    tags: dict[str, str] | None
    dedupe: str | None = None

    def checked(self, workflow: Workflow[..., Any]) -> Options:
        """Return these options over the workflow's own; refuse those that cannot be stored."""
        check_options(self.queue, self.priority, self.delay, self.key, self.dedupe)
        if not workflow.starting:
            return self
        options = self.over(workflow.starting)
        check_options(options.queue, options.priority, options.delay, options.key, options.dedupe)
        return options

    def over(self, defaults: Mapping[str, Any]) -> Options:
        """Return these options, with missing ones taken from the workflow."""
        return self._replace(
            queue=defaults.get("queue", self.queue) if self.queue == "default" else self.queue,
            priority=defaults.get("priority", self.priority) if self.priority == 0 else self.priority,
            deadline=defaults.get("deadline") if self.deadline is None else self.deadline,
            tags={**defaults.get("tags", {}), **(self.tags or {})},
        )


def new_run(
    engine: Process,
    workflow: Workflow[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    *,
    payload: bytes | None = None,
) -> Create:
    """Return the run to create; it is leased to the engine's worker if that can drive it now.

    `payload` is its stored input, if it was encoded before. A run of a queue with limits waits for a claim.
    """
    workflow.check_arguments(args, kwargs)
    run_id, queue, priority, _, key, deadline, tags, dedupe = options
    delay = seconds_of(options.delay)
    engine.encryption.check_writing()
    now = engine.clock.now()
    at = instant(now)
    name = new_run_id(now) if run_id is None else check_run_id(run_id)
    worker = engine.worker
    may_lease = worker is not None and worker.has_room() and worker.serves(queue) and not engine.is_limited(queue)
    leased = delay <= 0 and may_lease and engine.workflows.get(workflow.name) is workflow
    run = Run(
        id=name,
        workflow=workflow.name,
        status=Status.RUNNING if leased else Status.QUEUED,
        created_at=at,
        created_by=engine.actor,
        updated_at=at,
        version=workflow.version,
        fingerprint=workflow.fingerprint,
        input=engine.redaction.input_of(workflow, args, kwargs) if payload is None else payload,
        seed=new_seed(workflow.module),
        queue=queue,
        priority=priority,
        key=key,
        tags=engine.redaction.tags(tags) if tags else {},
        traceparent=_traceparent(),
        deadline_at=deadline_at(deadline, now),
        due_at=None if leased else instant(now + max(0.0, delay)),
        wakes=WAKES_DELAYED if delay > 0 else (),
        worker=worker.id if leased and worker is not None else None,
        epoch=1 if leased else 0,
        dedupe=dedupe,
        holds=int(leased and key is not None),
    )
    first = None
    if leased and worker is not None:  # created with a lease: the run belongs to this worker and has its first record
        first = Runner.started(name, workflow, worker.id, at)
    return engine.encryption.born(run, first)


def _traceparent() -> str | None:
    """Return the trace context of the caller: that of OpenTelemetry, if it is loaded, or that of its request."""
    telemetry = sys.modules.get("opentelemetry.trace")
    if telemetry is not None:
        with suppress(Exception):  # a broken library must not keep a run from being started
            current = telemetry.get_current_span().get_span_context()
            if current.is_valid:
                names = f"{current.trace_id:032x}", f"{current.span_id:016x}"
                return traceparent(*names, sampled=current.trace_flags.sampled)
    given = STARTER.get()
    return None if parsed_traceparent(given) is None else given


def definition_of(known: Mapping[str, Workflow[..., Any]], workflow: Any) -> Workflow[..., Any]:
    """Return the workflow that the caller names or passes."""
    if isinstance(workflow, Workflow):
        newest = known.get(workflow.name)
        if newest is not None and newest is not workflow:
            raise DuplicateName(f"a second workflow named {workflow.name!r} has been defined; give each its own name=")
        return workflow
    if isinstance(workflow, str):
        found = known.get(workflow)
        if found is None:
            raise DefinitionError(f"no workflow {workflow!r}; known workflows: {sorted(known) or 'none'}")
        return found
    raise DefinitionError(f"workflow must be a workflow or its name, got {workflow!r}; decorate it with @ks.workflow")


def check_same(engine: Process, workflow: Workflow[..., Any], run: Run, existing: Run, arguments: list[Any]) -> None:
    """Raise `RunConflict` unless an existing run is the same as the one to start."""
    if existing.workflow != run.workflow:
        raise RunConflict(
            f"run id {run.id!r} is taken by a run of workflow {existing.workflow!r}, not of {run.workflow!r}",
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
        same = workflow.same_arguments(values.decode(stored), *arguments)
    except KeepstepError:
        same = False
    if not same:
        raise RunConflict(
            f"run id {run.id!r} is taken by a run of {run.workflow!r} with another input; "
            "use another id, or get that run with engine.get",
            run.id,
            existing,
        )
