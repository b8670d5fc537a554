"""Agents as the heartbeats of their hosts show them: capabilities, tasks, and results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

#: Prefix of the workflow and of the queue of an agent's tasks. Only hosts of the agent know that workflow.
AGENT = "agent:"
#: Key of a worker's agents among the progress of its runs. No run has such an id.
AGENTS = "ks:agents"
#: Kind of the gate that keeps what people have told an agent: to drain, to be probed.
AGENT_GATE = "agent"


def agent_workflow(name: str) -> str:
    """Return the workflow of an agent's tasks, which is also the name of their queue."""
    return f"{AGENT}{name}"


def agent_of(workflow: str) -> str | None:
    """Return the agent whose tasks have this workflow; None for any other workflow."""
    return workflow.removeprefix(AGENT) if workflow.startswith(AGENT) else None


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """The latest results of an agent on one host.

    `results` counts tasks and probes among its last 100, and `success_rate` is the share of them that succeeded; it is
    None while there are too few. `mean_seconds` is the time of a task. `probe_error` tells why the last probe failed.
    """

    results: int = 0
    success_rate: float | None = None
    mean_seconds: float | None = None
    failures_in_a_row: int = 0
    completed: int = 0
    failed: int = 0
    probed_at: float | None = None
    probe_error: str = ""


@dataclass(frozen=True, slots=True)
class HostedAgent:
    """An agent on one host. `since` is when it was hosted there, and `tasks` counts the tasks that it performs now.

    `refused_by` names the older host of an agent that may have only one.
    """

    name: str
    capabilities: tuple[str, ...] = ()
    version: str = "1"
    max_tasks: int | None = None
    slow_seconds: float = 10.0
    replicas: bool = False
    since: float = 0.0
    tasks: int = 0
    refused_by: str = ""
    record: AgentRecord = AgentRecord()


def agents_text(agents: Iterable[HostedAgent]) -> bytes:
    """Return the agents of a host as its heartbeat stores them."""
    from json import dumps  # noqa: PLC0415 - only hosts need it

    return dumps([asdict(one) for one in agents]).encode()


def agents_in(text: bytes | None) -> tuple[HostedAgent, ...]:
    """Return the agents in a heartbeat; what cannot be read, as from a newer version, is left out."""
    if not text:
        return ()
    from json import loads  # noqa: PLC0415 - driving a run does not need it

    try:
        found = loads(text)
    except ValueError:
        return ()
    return tuple(one for plain in found if (one := _read(plain)) is not None) if isinstance(found, list) else ()


def _read(plain: Any) -> HostedAgent | None:
    try:
        known = {name: plain[name] for name in HostedAgent.__slots__ if name in plain}
        record = known.get("record") or {}
        known["record"] = AgentRecord(**{name: record[name] for name in AgentRecord.__slots__ if name in record})
        known["capabilities"] = tuple(map(str, known.get("capabilities") or ()))
        return HostedAgent(**known)
    except (TypeError, AttributeError, KeyError):
        return None


@dataclass(frozen=True, slots=True)
class AgentHost:
    """A host of an agent: its worker, when that was last seen, and the agent as it is there."""

    worker: str
    machine: str
    pid: int
    alive: bool
    last_seen_at: datetime | None
    agent: HostedAgent
    is_draining: bool = False
