"""The command `agents`: lists the agents of a store, shows one, drains and resumes one, and probes one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from . import errors
from .settings import REASON, Settings, command

if TYPE_CHECKING:
    from ..engine.agents import AgentInfo
    from ..engine.engine import Engine
    from ..model.agent import AgentHost


@command("agents")
@click.argument("act", default="list", type=click.Choice(["list", "show", "drain", "resume", "probe"]), metavar="[ACT]")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--worker", default="", metavar="WORKER", help="Drain the agent on this worker only.")
@click.option(
    "--timeout", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds to wait for a probe."
)
@REASON
def agents(settings: Settings, *, act: str, name: str | None, worker: str, timeout: float, reason: str) -> int:
    """List the agents of the store, or show, drain, resume or probe one.

    ACT is list, show, drain, resume or probe. A drained agent gets no more tasks until it is resumed; its current tasks
    go on. The hosts of an agent probe it. The exit code of a probe is 1 if the agent gets no tasks after it, and 8 if
    no host has answered in time.
    """
    from ..views import plain

    if act != "list" and name is None:
        raise click.UsageError(f"name the agent: keepstep agents {act} NAME")
    if worker and act != "drain":
        raise click.UsageError("--worker is for keepstep agents drain NAME")
    if act == "list":
        _list(settings, name)
        return errors.OK
    chosen = name or ""

    async def change(engine: Engine) -> tuple[AgentInfo, float]:
        known = [one.name for one in await engine.agents.list()]
        if chosen not in known:
            hint = f"known: {', '.join(known)}" if known else "start a host: keepstep worker --agents FILE.py"
            raise errors.Refused(f"no worker hosts an agent {chosen!r}", hint, errors.NOT_FOUND)
        asked_at = engine.clock.now()
        acts = {
            "drain": partial(engine.agents.drain, worker=worker, reason=reason),
            "resume": partial(engine.agents.resume, reason=reason),
            "probe": partial(engine.agents.probe, timeout=timeout),
        }
        return await acts.get(act, engine.agents.get)(chosen), asked_at

    info, asked_at = settings.talk(change)
    settings.answer(plain.agent_data(info), lambda: _shown(info))
    return errors.OK if act != "probe" else _probe_code(info, asked_at)


def _probe_code(info: AgentInfo, asked_at: float) -> int:
    """Return the exit code after a probe that was asked for at this time."""
    if not any((one.agent.record.probed_at or 0.0) >= asked_at for one in info.hosts if one.alive):
        return errors.TIMED_OUT
    return errors.OK if info.health.works else errors.FAILED


def _list(settings: Settings, name: str | None) -> None:
    from ..views import plain
    from . import formatting

    async def look(engine: Engine) -> list[AgentInfo]:
        return [one for one in await engine.agents.list() if name in (None, one.name)]

    found = settings.look(look)

    def shown() -> str:
        if not found:
            return f"no worker hosts an agent; start one with {errors.line('worker')} --agents FILE.py"
        rows = [
            (
                one.name,
                one.status,
                f"{one.health.score:g}",
                f"{one.tasks}/{'-' if one.places is None else one.places}",
                str(one.waiting),
                str(one.completed),
                str(one.failed),
                "" if one.last_seen_at is None else formatting.local(one.last_seen_at),
                formatting.one_line(", ".join(one.capabilities)),
            )
            for one in found
        ]
        columns = ("AGENT", "STATUS", "HEALTH", "TASKS", "WAITING", "DONE", "FAILED", "LAST SEEN", "CAPABILITIES")
        return formatting.table(columns, rows)

    settings.answer({"agents": [plain.agent_data(one) for one in found]}, shown)


def _shown(info: AgentInfo) -> str:
    from . import formatting

    rows = [
        ("agent", info.name),
        ("status", info.status),
        ("health", str(info.health)),
        ("capabilities", ", ".join(info.capabilities) or "none"),
        ("tasks", f"{info.tasks} now, {info.waiting} waiting, {info.completed} completed, {info.failed} failed"),
    ]
    for host in info.hosts:
        seen = "never" if host.last_seen_at is None else formatting.local(host.last_seen_at)
        rows.append(("host", f"{host.worker}, pid {host.pid} on {host.machine}, seen {seen}{_notes(host)}"))
    return "\n".join(f"{name:<13} {formatting.one_line(text)}" for name, text in rows)


def _notes(host: AgentHost) -> str:
    """Return what else is to be said about a host."""
    record, notes = host.agent.record, []
    if not host.alive:
        notes.append("dead")
    if host.is_draining:
        notes.append("drains")
    if host.agent.refused_by:
        notes.append(f"refused, because worker {host.agent.refused_by} hosts the agent")
    if record.success_rate is not None:
        notes.append(f"{record.success_rate:.0%} of its last {record.results} results succeeded")
    if record.mean_seconds is not None:
        notes.append(f"{record.mean_seconds:.3g} s a task")
    if record.probe_error:
        notes.append(f"the last probe failed: {record.probe_error}")
    return "".join(f"; {note}" for note in notes)
