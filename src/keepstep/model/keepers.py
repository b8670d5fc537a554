"""Keepers: the ids and names of built-in runs that hold a state and answer signals."""

from __future__ import annotations

from datetime import datetime

from .ids import digest_of, with_tail
from .run import Run
from .signal import Signal

#: Prefix of the ids of keepers. No other run may use it.
KEEPER_ID = "ks:"
#: Prefix of the names of their workflows, of which a worker claims those that its own code declares.
KEEPER_WORKFLOW = "keepstep."
#: The queue of keepers, which every worker serves, whatever its own queues are.
KEEPER_QUEUE = "ks:keepers"
#: Name of the signals to a keeper.
TELL = "ks:tell"
#: Tag of a run whose end is told to the keeper that it names.
TELLS = "ks:tells"
#: Tag of a run that a schedule has started: the name of the schedule.
SCHEDULED_BY = "ks:schedule"

_SCHEDULE = f"{KEEPER_ID}schedule:"
_CHANNEL = f"{KEEPER_ID}channel:"
_TOPIC = f"{KEEPER_ID}topic:"
#: The workflow of the keepers of all topics, which every worker claims.
TOPIC_WORKFLOW = f"{KEEPER_WORKFLOW}topic"
_BARRIER = f"{KEEPER_ID}barrier:"
#: The workflow of the keepers of all barriers, which every worker claims.
BARRIER_WORKFLOW = f"{KEEPER_WORKFLOW}barrier"
_DECLARED = f"{KEEPER_WORKFLOW}schedule:"
_ADDED = f"{KEEPER_WORKFLOW}added:"


def notice_of(run: Run, generation: int, at: datetime | None) -> Signal | None:
    """Return the signal that tells a keeper of the end of a run; None for a run whose end no keeper waits for."""
    keeper = run.tags.get(TELLS)
    if keeper is None:
        return None
    return Signal(keeper, TELL, b'{"act":"ended"}', f"ended:{run.id}:{generation}", f"run {run.id}", at)


def is_keeper(run_id: str) -> bool:
    """Whether a run is a keeper."""
    return run_id.startswith(KEEPER_ID)


def is_reserved(name: str) -> bool:
    """Whether a run id or a name of a workflow belongs to Keepstep itself."""
    return name.startswith((KEEPER_ID, KEEPER_WORKFLOW))


def schedule_id(name: str) -> str:
    """Return the id of the keeper of a schedule."""
    return f"{_SCHEDULE}{name}"


def schedule_name(run_id: str) -> str | None:
    """Return the name of the schedule that a keeper keeps; None for another run."""
    return run_id.removeprefix(_SCHEDULE) if run_id.startswith(_SCHEDULE) else None


def channel_id(name: str) -> str:
    """Return the id of the keeper of a channel."""
    return f"{_CHANNEL}{name}"


def channel_name(run_id: str) -> str | None:
    """Return the name of the channel that a keeper keeps; None for another run."""
    return run_id.removeprefix(_CHANNEL) if run_id.startswith(_CHANNEL) else None


def channel_workflow(name: str) -> str:
    """Return the workflow of a channel's keeper. The workers of the code that declares the channel claim it."""
    return f"{KEEPER_WORKFLOW}channel:{name}"


def delivery_workflow(name: str) -> str:
    """Return the workflow of the runs that deliver the notices of a channel."""
    return f"{KEEPER_WORKFLOW}deliver:{name}"


def topic_id(name: str) -> str:
    """Return the id of the keeper of a topic."""
    return f"{_TOPIC}{name}"


def topic_name(run_id: str) -> str | None:
    """Return the name of the topic that a keeper keeps; None for another run."""
    return run_id.removeprefix(_TOPIC) if run_id.startswith(_TOPIC) else None


def barrier_id(scope: str, name: str) -> str:
    """Return the id of the keeper of a barrier, which belongs to the children of a run or to a group."""
    return with_tail(f"{_BARRIER}{name}", f":{digest_of(scope, name)}")


def is_barrier(run_id: str) -> bool:
    """Whether a run is the keeper of a barrier."""
    return run_id.startswith(_BARRIER)


def declared_schedule(name: str) -> str:
    """Return the workflow of a schedule that code declares. The workers of that code claim it."""
    return f"{_DECLARED}{name}"


def added_schedule(workflow: str) -> str:
    """Return the workflow of all schedules that were added by hand for a workflow. Workers that know it claim them."""
    return f"{_ADDED}{workflow}"


def is_declared(keeper_workflow: str) -> bool:
    """Whether code declares the schedule of a keeper with this workflow."""
    return keeper_workflow.startswith(_DECLARED)


def served(keeper_workflow: str) -> str | None:
    """Return the workflow that added schedules start, by the workflow of their keepers; None for another workflow."""
    return keeper_workflow.removeprefix(_ADDED) if keeper_workflow.startswith(_ADDED) else None
