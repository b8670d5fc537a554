"""Plain data of runs, records, workers, agents and gates, for programs: the JSON of commands and of the HTTP API."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import EncryptionError, KeepstepError
from ..kernel.callback import CALL, SECRET_BYTES
from ..model import Checkpoint, ErrorInfo, Run
from ..model.wakes import sorted_wakes
from ..records.keys import is_encrypted, key_id
from ..records.progress import maps_in, report_in
from ..values import VALUES

if TYPE_CHECKING:
    from ..care.doctor import Finding, Report
    from ..engine.agents import AgentInfo
    from ..engine.channels import ChannelInfo
    from ..engine.queues import QueueInfo
    from ..engine.schedules import ScheduleInfo
    from ..engine.services import ServiceInfo
    from ..engine.topics import TopicInfo
    from ..history.audit import AuditEntry, Incarnation
    from ..history.diff import Difference
    from ..model import Event, GateChange, Signal, WorkerInfo
    from ..model.agent import AgentHost
    from ..ports import Document
    from ..records.counts import Counts
    from ..workflows.recovery import RecoveryInfo
    from .aside import AsideRun
    from .top import Sample
    from .waits import Wait


def iso(at: datetime | None) -> str | None:
    """Return an instant for a program."""
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def value_of(stored: bytes | None) -> Any:
    """Return a stored value as plain JSON: a tuple or set as a list, an object as its fields."""
    if stored is None:
        return None
    try:
        return untagged(json.loads(bytes(stored).decode()))
    except (ValueError, RecursionError):
        return bytes(stored).decode("utf-8", "replace")


def untagged(value: Any) -> Any:
    """Return a value with tagged types as plain JSON."""
    if isinstance(value, list):
        return [untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("$"), str):
        inner = value.get("v")
        if value["$"] == "dict" and isinstance(inner, list) and all(map(_is_pair, inner)):
            return {_key(key): untagged(item) for key, item in inner}
        return untagged(inner)
    return {key: untagged(item) for key, item in value.items()}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _key(key: Any) -> str:
    simple = untagged(key)
    return simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)


def arguments(run: Run) -> dict[str, Any]:
    """Return the arguments that a run was started with."""
    value = value_of(run.input)
    if isinstance(value, list) and [type(part) for part in value] == [list, dict]:
        return {"args": value[0], "kwargs": value[1]}
    return {"args": [], "kwargs": {}}


def run_data(run: Run, *, whole: bool = False) -> dict[str, Any]:
    """Return a run for a program; `whole` includes its input, output and error."""
    value: dict[str, Any] = {
        "id": run.id,
        "workflow": run.workflow,
        "version": run.version,
        "status": run.status.value,
        "created_at": iso(run.created_at),
        "created_by": run.created_by,
        "updated_at": iso(run.updated_at),
        "due_at": iso(run.due_at),
        "deadline_at": iso(run.deadline_at),
        "wakes": list(run.wakes),
        "worker": run.worker,
        "epoch": run.epoch,
        "seq": run.seq,
        "signals": run.signals,
        "recoveries": run.recoveries,
        "parent": run.parent,
        "origin": run.origin,
        "queue": run.queue,
        "priority": run.priority,
        "tags": dict(run.tags),
        "encrypted_with": encrypted_with(run),
    }
    if whole:
        value |= {
            "input": arguments(run),
            "result": value_of(run.output),
            "error": error_data(run.error),
            "continued_as": run.continued_as,
            "blocked": list(sorted_wakes(run.wakes).not_ready),
            "progress": value_of(report_in(run.progress)),
            "maps": [msgspec.to_builtins(one) for one in maps_in(run.progress)],
        }
    return value


def encrypted_with(run: Run) -> str | None:
    """Return the id of the key that a run is encrypted with, or None."""
    try:
        return key_id(run.data_key) if run.data_key else None
    except EncryptionError:
        return "?"


def error_data(error: ErrorInfo | None) -> dict[str, Any] | None:
    """Return an error for a program."""
    if error is None:
        return None
    return {
        "type": error.type,
        "message": error.message,
        "class": error.error_class,
        "code": error.code,
        "attempt": error.attempt,
        "id": error.id,
        "caused_by": list(error.caused_by),
        "frames": [frame._asdict() for frame in error.frames],
        "traceback": error.traceback,
    }


def record_data(one: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint for a program."""
    return {
        "seq": one.seq,
        "kind": one.kind.value,
        "step": one.step,
        "outcome": one.outcome.value,
        "attempt": one.attempt,
        "trigger": one.trigger.value,
        "worker": one.worker,
        "agent": one.agent,
        "stage": one.stage,
        "started_at": iso(one.started_at),
        "finished_at": iso(one.finished_at),
        "value": value_of(one.value),
        "input": step_input(one),
        "input_bytes": one.data.get("input_bytes"),
        "cached": one.data.get("cached"),
        "error": error_data(one.error),
        "retry_at": iso(one.retry_at),
    }


_SECRET = re.compile(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}")


def is_secret(step: str, value: Any) -> bool:
    """Whether the result of a call is the secret of a callback: its holder may complete the callback."""
    return CALL in step and isinstance(value, str) and _SECRET.fullmatch(value) is not None


def without_secret(one: Checkpoint) -> Checkpoint:
    """Return a record for a caller who may only read: without the secret of a callback."""
    if one.value is None or CALL not in one.step or not is_secret(one.step, value_of(one.value)):
        return one
    return replace(one, value=None)


def signal_data(one: Signal, *, values: bool = False) -> dict[str, Any]:
    """Return a signal for a program; with `values`, its payload, unless that cannot be read here."""
    data: dict[str, Any] = {"seq": one.seq, "name": one.name, "id": one.id, "by": one.sender, "at": iso(one.sent_at)}
    if values:
        hidden = is_encrypted(one.payload)
        data |= {"payload": None if hidden else value_of(one.payload), "hidden": hidden}
    return data


def memory_data(one: Document) -> dict[str, Any]:
    """Return a version of a value in a memory."""
    return {
        "key": one.key,
        "version": one.version,
        "at": iso(one.at),
        "deleted": not one.value,
        "value": value_of(one.value) if one.value else None,
    }


def step_input(one: Checkpoint) -> Any:
    """Return the recorded arguments of a step by name; None if there are none."""
    stored = one.data.get("input")
    return value_of(stored.encode()) if isinstance(stored, str) else None


def worker_data(worker: WorkerInfo) -> dict[str, Any]:
    """Return a worker as plain data, for a program."""
    return {
        "id": worker.id,
        "host": worker.host,
        "pid": worker.pid,
        "alive": worker.alive,
        "leases": worker.leases,
        "workflows": list(worker.known),
        "queues": None if worker.queues is None else list(worker.queues),
        "agents": [one.name for one in worker.agents],
        "started_at": iso(worker.started_at),
        "renewed_at": iso(worker.renewed_at),
        "drain_at": iso(worker.drain_at),
    }


def audit_data(entry: AuditEntry) -> dict[str, Any]:
    """Return one entry of a run's audit."""
    return {
        "at": iso(entry.at),
        "seq": entry.seq,
        "what": entry.what,
        "actor": entry.actor,
        "before": entry.before.value if entry.before is not None else None,
        "after": entry.after.value,
        "outcome": entry.outcome.value,
        "step": entry.step,
        "attempt": entry.attempt,
        "agent": entry.agent,
        "stage": entry.stage,
        "reason": entry.reason,
        "epoch": entry.epoch,
        "seconds": entry.seconds,
        "data": entry.data,
    }


def incarnation_data(one: Incarnation) -> dict[str, Any]:
    """Return one lease of a run."""
    return {
        "epoch": one.epoch,
        "worker": one.worker,
        "since": iso(one.since),
        "until": iso(one.until) if one.until is not None else None,
        "ended": one.ended,
    }


def queue_data(info: QueueInfo) -> dict[str, Any]:
    """Return a queue: its limits, its runs and its last changes."""
    return {
        "queue": info.name,
        "limits": info.limits.plain(),
        "declared": None if info.declared is None else info.declared.plain(),
        "set": info.is_set,
        "driven": info.counts.driven,
        "waiting": info.counts.waiting,
        "keys": dict(info.counts.keys),
        "oldest_at": iso(info.counts.oldest_at),
        "log": gate_log_data(info.log),
    }


def service_data(info: ServiceInfo) -> dict[str, Any]:
    """Return a service: its limits, the shares of workers, parked runs, its breaker and its last changes."""
    breaker = info.breaker
    return {
        "service": info.name,
        "limits": info.limits.plain(),
        "declared": None if info.declared is None else info.declared.plain(),
        "set": info.is_set,
        "shares": [{"worker": one.worker, "held": one.held, "need": one.need} for one in info.shares],
        "parked": info.parked,
        "parked_since": None if info.parked_since is None else iso(info.parked_since),
        "breaker": None
        if breaker is None
        else {
            "status": breaker.status,
            "by_hand": breaker.by_hand,
            "failures": breaker.failures,
            "probes": breaker.probes,
            "opened_at": None if breaker.opened_at is None else iso(breaker.opened_at),
            "probes_at": iso(probes_at(info)),
        },
        "log": gate_log_data(info.log),
    }


def probes_at(info: ServiceInfo) -> datetime | None:
    """Return when an open breaker lets the next probes begin; None if it is not open, or if a person holds it."""
    breaker, limits = info.breaker, info.limits.breaker
    if breaker is None or limits is None or breaker.opened_at is None or breaker.by_hand or breaker.status != "open":
        return None
    return breaker.opened_at + timedelta(seconds=limits.open_seconds)


def schedule_data(one: ScheduleInfo) -> dict[str, Any]:
    """Return a schedule: its ticks, its open runs and its last changes."""
    return {
        "schedule": one.name,
        "workflow": one.workflow,
        "when": one.when.stored(),
        "status": one.status.value,
        "declared": one.declared,
        "attended": one.attended,
        "paused": one.paused,
        "last": iso(one.last),
        "next": [iso(tick) for tick in one.next],
        "waiting": [iso(tick) for tick in one.waiting],
        "open": list(one.open),
        "fired": one.fired,
        "skipped": one.skipped,
        "recent": [{"tick": iso(past.tick), "run": past.run, "why": past.why} for past in one.recent],
        "changes": [
            {"at": iso(made.at), "act": made.act, "actor": made.actor, "reason": made.reason} for made in one.changes
        ],
    }


def gate_log_data(log: Sequence[GateChange]) -> list[dict[str, Any]]:
    """Return the last changes for a program."""
    return [
        {"at": iso(one.at), "act": one.act, "actor": one.actor, "reason": one.reason, "limits": one.limits}
        for one in log
    ]


def aside_data(one: AsideRun) -> dict[str, Any]:
    """Return a run that is set aside, with its reason."""
    return {
        "id": one.run.id,
        "workflow": one.run.workflow,
        "since": iso(one.since),
        "kind": one.kind,
        "reason": one.reason,
        "phase": one.phase or None,
        "problems": list(one.problems) or [one.reason],
        "failed": one.failed or None,
        "last_error": one.last_error or None,
        "attempts": one.attempts,
        "recoveries": one.recoveries,
    }


def recovery_data(info: RecoveryInfo) -> dict[str, Any]:
    """Return the prospects of a recovery."""
    return {
        "run": info.run,
        "workflow": info.workflow,
        "status": info.status.value,
        "recoverable": info.recoverable,
        "why": info.why,
        "problems": list(info.problems),
        "handler": info.handler or None,
        "last_success": info.last_success or None,
        "failed": info.failed or None,
        "error": info.error or None,
        "next": list(info.next),
        "again": list(info.again),
        "skips": info.skips or None,
        "value": given_value(info.value),
        "checked": info.checked,
        "recoveries": info.recoveries,
    }


def given_value(value: Any) -> Any:
    """Return the value for a skipped step as plain JSON."""
    try:
        return value_of(VALUES.encode(value, "the value"))
    except KeepstepError:  # of a class that only the worker knows
        return repr(value)


def sample_data(sample: Sample) -> dict[str, Any]:
    """Return a store at a glance."""
    return {
        "at": iso(sample.at),
        "runs_per_second": sample.rates.runs,
        "steps_per_second": sample.rates.steps,
        "failures_per_second": sample.rates.failures,
        "save_failures": sample.save_failures,
        "halted": sample.halted,
        "set_aside": sample.set_aside,
        "needs_person": sample.needs_person,
        "open_failures": sample.open_failures,
        "oldest_at": iso(sample.oldest_at),
        "queues": [
            {
                "queue": one.name,
                "driven": one.driven,
                "waiting": one.counts.waiting,
                "oldest_at": iso(one.counts.oldest_at),
                "limits": one.limits,
            }
            for one in sample.queues
        ],
        "services": [
            {
                "service": one.name,
                "running": one.running,
                "waiting": one.waiting,
                "parked": one.parked,
                "breaker": one.breaker,
                "limits": one.limits,
            }
            for one in sample.services
        ],
        "agents": [
            {
                "agent": one.name,
                "hosts": one.hosts,
                "tasks": one.tasks,
                "places": one.places,
                "completed": one.completed,
                "failed": one.failed,
            }
            for one in sample.agents
        ],
        "workers": [{**worker_data(one.worker), **counts_data(one.counts)} for one in sample.workers],
        "slow_steps": [
            {"step": name, "times": one.count, "seconds": one.seconds, "longest_seconds": one.longest_seconds}
            for name, one in sample.slow
        ],
    }


def counts_data(counts: Counts) -> dict[str, Any]:
    """Return the counters of a worker."""
    return {
        "completed": counts.completed,
        "failed": counts.failed,
        "cancelled": counts.cancelled,
        "set_aside": counts.set_aside,
        "steps": counts.steps,
        "failures": counts.failures,
        "commits": counts.commits,
        "save_failures": counts.save_failures,
        "halted": counts.halted,
        "halted_at": iso(counts.halted_at),
        "halted_by": counts.halted_by or None,
        "resources": {
            "resident_bytes": counts.resources.resident_bytes,
            "processor_seconds": counts.resources.processor_seconds,
            "processors": counts.rates.processors,
            "threads": counts.resources.threads,
            "open_runs": counts.resources.open_runs,
            "lag_seconds": counts.resources.lag_seconds,
        },
    }


def channel_data(channel: ChannelInfo) -> dict[str, object]:
    """Return a channel, with its undelivered notices."""
    return {
        "channel": channel.name,
        "status": channel.status.value,
        "attended": channel.attended,
        "gathered": channel.gathered,
        "delivered": channel.delivered,
        "deliveries": channel.deliveries,
        "open": channel.open or None,
        "undelivered": channel.undelivered,
        "failures": channel.failures,
        "failed": list(channel.failed),
    }


def topic_data(topic: TopicInfo, recent: Sequence[bytes] | None = None) -> dict[str, object]:
    """Return a topic, with its subscribers, and with its newest messages if these are given."""
    found: dict[str, object] = {
        "topic": topic.name,
        "status": topic.status.value,
        "published": topic.published,
        "unread": topic.unread,
        "unheard": topic.unheard,
        "subscribers": [
            {
                "run": one.run,
                "status": None if one.status is None else one.status.value,
                "read": one.read,
                "unread": one.unread,
                "read_at": iso(one.read_at),
            }
            for one in topic.subscribers
        ],
        "publishers": [{"run": one.run, "since": iso(one.since)} for one in topic.publishers],
    }
    if recent is not None:
        found["recent"] = [value_of(one) for one in recent]
    return found


def agent_data(info: AgentInfo) -> dict[str, Any]:
    """Return an agent with its health and its hosts."""
    return {
        "agent": info.name,
        "status": info.status,
        "health": {"score": info.health.score, "status": info.health.status, "parts": dict(info.health.parts)},
        "capabilities": list(info.capabilities),
        "tasks": info.tasks,
        "waiting": info.waiting,
        "places": info.places,
        "completed": info.completed,
        "failed": info.failed,
        "last_seen_at": iso(info.last_seen_at),
        "hosts": [_agent_host_data(one) for one in info.hosts],
    }


def _agent_host_data(host: AgentHost) -> dict[str, Any]:
    agent, record = host.agent, host.agent.record
    return {
        "worker": host.worker,
        "host": host.machine,
        "pid": host.pid,
        "alive": host.alive,
        "draining": host.is_draining,
        "refused_by": agent.refused_by or None,
        "last_seen_at": iso(host.last_seen_at),
        "version": agent.version,
        "max_tasks": agent.max_tasks,
        "replicas": agent.replicas,
        "tasks": agent.tasks,
        "results": record.results,
        "success_rate": record.success_rate,
        "mean_seconds": record.mean_seconds,
        "failures_in_a_row": record.failures_in_a_row,
        "probed_at": None if record.probed_at is None else iso(datetime.fromtimestamp(record.probed_at, UTC)),
        "probe_error": record.probe_error or None,
    }


def report_data(report: Report) -> dict[str, Any]:
    """Return the findings of the doctor."""
    return {
        "healthy": report.healthy,
        "runs": {status.value: count for status, count in report.runs.items()},
        "workers": [worker_data(one) for one in report.workers],
        "findings": [finding_data(finding) for finding in report.findings],
    }


def finding_data(finding: Finding) -> dict[str, Any]:
    """Return one finding of the doctor."""
    return {
        "severity": finding.severity.value,
        "code": finding.code,
        "message": finding.message,
        "advice": finding.advice,
        "runs": list(finding.runs),
        "worker": finding.worker or None,
    }


def difference_data(found: Difference) -> dict[str, Any]:
    """Return what changed between two records or runs."""
    return {
        "left": list(found.left),
        "right": list(found.right),
        "added": list(found.added),
        "removed": list(found.removed),
        "changed": found.changed,
        "published": found.published,
        "state": found.state,
        "statuses": found.statuses,
    }


def event_data(event: Event) -> dict[str, Any]:
    """Return one event of a run."""
    return {
        "name": event.name,
        "run": event.run,
        "seq": event.seq,
        "at": iso(event.at),
        "step": event.step,
        "attempt": event.attempt,
        "worker": event.worker,
        "agent": event.agent,
        "stage": event.stage,
        "data": event.data,
        "life": event.life,
    }


def wait_data(wait: Wait) -> dict[str, Any]:
    """Return one thing that a run waits for."""
    return {
        "kind": wait.kind.value,
        "name": wait.name,
        "until": iso(wait.until),
        "why": wait.why or None,
        "queue": wait.queue or None,
        "version": wait.version or None,
        "versions": list(wait.versions),
    }
