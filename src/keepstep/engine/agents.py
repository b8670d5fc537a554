"""The agents of a store: who hosts them, how healthy they are, and which of them gets a task."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..checks import check_name, check_number, check_text
from ..errors import AlreadyFinished, RunConflict, RunNotFound
from ..kernel.host import Assignment
from ..model import FINISHED, GateChange, GateInfo, Status
from ..model.agent import AGENT_GATE, AgentHost, agent_workflow
from ..policies.assignment import Candidate, Score, rank
from ..policies.health import GONE, Health, health_of
from ..ports import instant
from .handle import RunHandle
from .hosting import drains_everywhere, drains_on

if TYPE_CHECKING:
    from datetime import datetime

    from .process import Process

#: Seconds for which what the heartbeats tell is believed. Tasks that are given meanwhile are counted here.
LOOK_SECONDS = 0.5
#: Seconds between two looks for the answer to a probe.
PROBE_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """An agent: what it can do, how healthy it is, its tasks, and its hosts.

    `status` is that of its health, or `"draining"`, or `"refused"` if an older host has the name. `tasks` are performed
    now, and `waiting` ones wait for it. `completed` and `failed` count tasks since its hosts were started.
    """

    name: str
    capabilities: tuple[str, ...]
    status: str
    health: Health
    tasks: int
    waiting: int
    places: int | None
    last_seen_at: datetime | None
    hosts: tuple[AgentHost, ...] = ()

    @property
    def completed(self) -> int:
        """Tasks that it has completed since its hosts were started."""
        return sum(one.agent.record.completed for one in self.hosts)

    @property
    def failed(self) -> int:
        """Tasks that it has failed since its hosts were started."""
        return sum(one.agent.record.failed for one in self.hosts)


@dataclass(slots=True)
class _Look:
    """The agents of a store at one time, and the tasks that were counted or given since."""

    at: float
    hosts: dict[str, list[AgentHost]] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    tasks: dict[str, int] = field(default_factory=dict)


class Agents:
    """The agents of a store: list and get them, drain and resume one, probe one."""

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        self._newest: _Look | None = None
        self._lock = asyncio.Lock()

    # -- for runs ------------------------------------------------------------------------------------------------------

    @property
    def look_seconds(self) -> float:
        """Seconds between two heartbeats of a host."""
        return self._engine.look_seconds

    async def assign(
        self, needs: Sequence[str], team: Sequence[str] | None, tried: Collection[str], least: float
    ) -> Assignment:
        """Choose an agent for a task, and count the task for it."""
        async with self._lock:  # one at a time, so that each choice counts for the next one
            look = await self._look()
            candidates, scores = await self._ranked(look, needs, team, tried, least)
            best = next((one.agent for one in scores if not one.why_not), None)
            if best is None:  # agents whose hosts are gone may come back, so they are named, too
                _, scores = await self._ranked(await self._read(gone=True), needs, team, tried, least)
                return Assignment(None, "", scores)
            look.tasks[best] = look.tasks.get(best, 0) + 1
            return Assignment(best, candidates[best].version, scores)

    async def _ranked(
        self, look: _Look, needs: Sequence[str], team: Sequence[str] | None, tried: Collection[str], least: float
    ) -> tuple[dict[str, Candidate], builtins.list[Score]]:
        names = [name for name in look.hosts if team is None or name in team]
        candidates = {name: await self._candidate(look, name) for name in names}
        return candidates, rank(needs, candidates.values(), tried, least)

    async def look_after(self, task: str, agent: str, late: str, *, asked: bool) -> bool:
        """Cancel a task that is late, or whose agent can no longer perform it. Return whether the agent was asked to.

        While a living host drives the task, only the host can end it.
        """
        engine = self._engine
        run = await engine.stored_run(task)
        if run is None or run.status in FINISHED:
            return asked
        async with self._lock:
            reason = late or self._reason(await self._look(), agent)
        if run.status is Status.SET_ASIDE:
            reason = reason or "it was set aside"
        if not reason:
            return False
        with contextlib.suppress(AlreadyFinished, RunNotFound):  # the task may end at any moment
            try:
                await engine.cancel_now(task, f"agent {agent}: {reason}")
            except RunConflict:
                if not asked:
                    await RunHandle[Any](engine, task).cancel(f"agent {agent}: {reason}")
                return True
        return asked

    def _reason(self, look: _Look, agent: str) -> str:
        """Return why an agent can no longer perform the tasks that it has; empty if it can."""
        living = [one for one in look.hosts.get(agent, ()) if one.alive and not one.agent.refused_by]
        if not living:
            return "it has no living host"
        health = max((self._health(one) for one in living), key=lambda one: one.score)
        return "" if health.works else f"it is {health}"

    async def _look(self) -> _Look:
        """Return what the heartbeats tell, at most half a second old."""
        engine = self._engine
        newest = self._newest
        if newest is None or not 0 <= engine.seconds() - newest.at < LOOK_SECONDS:
            self._newest = newest = await self._read(gone=False)
        return newest

    async def _read(self, *, gone: bool) -> _Look:
        engine = self._engine
        workers = await engine.call(partial(engine.store.list_workers, gone=gone))
        gates = {one.name: one for one in await engine.call(engine.store.list_gates, AGENT_GATE)}
        look = _Look(engine.seconds())
        look.draining = frozenset(name for name, gate in gates.items() if drains_everywhere(gate))
        for worker in workers:
            for agent in worker.agents:
                drains = worker.drain_at is not None or drains_on(gates.get(agent.name), worker.id)
                drains = drains or agent.name in look.draining
                seen = worker.renewed_at
                host = AgentHost(worker.id, worker.host, worker.pid, worker.alive, seen, agent, drains)
                look.hosts.setdefault(agent.name, []).append(host)
        return look

    def _health(self, host: AgentHost) -> Health:
        if not host.alive:
            return GONE
        now = self._engine.clock.now()
        unseen = 0.0 if host.last_seen_at is None else max(0.0, now - host.last_seen_at.timestamp())
        return health_of(host.agent.record, unseen, slow_seconds=host.agent.slow_seconds)

    async def _candidate(self, look: _Look, name: str) -> Candidate:
        hosts = look.hosts[name]
        living = [one for one in hosts if one.alive and not one.agent.refused_by]
        working = [one for one in living if not one.is_draining and self._health(one).works]
        withheld = "" if living else "has no living host"
        if living and all(one.is_draining for one in living):
            withheld = "is draining"
        shown = max(working or living or hosts, key=lambda one: self._health(one).score)
        rates = [rate for one in working if (rate := one.agent.record.success_rate) is not None]
        if working and name not in look.tasks:
            counts = await self._engine.call(self._engine.store.count_queue, agent_workflow(name))
            look.tasks[name] = counts.driven + counts.waiting
        return Candidate(
            name,
            shown.agent.capabilities,
            shown.agent.version,
            look.tasks.get(name, 0),
            _places(working),
            sum(rates) / len(rates) if rates else None,
            self._health(shown),
            withheld,
        )

    # -- for people ----------------------------------------------------------------------------------------------------

    async def list(self) -> list[AgentInfo]:
        """Return all agents that have a living host or had one lately, by name."""
        look = await self._read(gone=True)
        return [await self._info(look, name) for name in sorted(look.hosts)]

    async def get(self, name: str) -> AgentInfo:
        """Return the agent with the name `name`; raise `RunNotFound` if no host has told of it."""
        check_name(name, "agent")
        look = await self._read(gone=True)
        if name not in look.hosts:
            raise RunNotFound(f"no worker of {self._engine.url} hosts an agent {name!r}")
        return await self._info(look, name)

    async def _info(self, look: _Look, name: str) -> AgentInfo:
        hosts = look.hosts[name]
        living = [one for one in hosts if one.alive]
        shown = living or [max(hosts, key=lambda one: one.last_seen_at.timestamp() if one.last_seen_at else 0.0)]
        best = max(shown, key=lambda one: (not one.agent.refused_by, self._health(one).score))
        health = self._health(best)
        status: str = health.status
        if best.alive and best.agent.refused_by:
            status = "refused"
        elif living and all(one.is_draining for one in living):
            status = "draining"
        counts = await self._engine.call(self._engine.store.count_queue, agent_workflow(name))
        seen = [one.last_seen_at for one in shown if one.last_seen_at is not None]
        return AgentInfo(
            name,
            best.agent.capabilities,
            status,
            health,
            counts.driven,
            counts.waiting,
            _places(living),
            max(seen, default=None),
            tuple(shown),
        )

    async def drain(self, name: str, *, worker: str = "", reason: str = "") -> AgentInfo:
        """Give the agent `name` no more tasks: on one `worker`, by its id, or on all. Its current tasks go on.

        `reason` is kept with the change.
        """
        info = await self.get(name)
        gate = await self._gate(name)
        earlier = gate.limits.get("drain", [])
        if worker and worker not in {one.worker for one in info.hosts}:
            raise RunNotFound(f"worker {worker!r} does not host agent {name!r}")
        drain = True if not worker or earlier is True else sorted({*earlier, worker})
        await self._tell(name, {**gate.limits, "drain": drain}, reason)
        return await self.get(name)

    async def resume(self, name: str, *, reason: str = "") -> AgentInfo:
        """Give a drained agent `name` tasks again, on all its hosts. `reason` is kept with the change."""
        await self.get(name)
        limits = {one: value for one, value in (await self._gate(name)).limits.items() if one != "drain"}
        await self._tell(name, limits, reason)
        return await self.get(name)

    async def probe(self, name: str, *, timeout: float = 30.0) -> AgentInfo:  # noqa: ASYNC109 - the name users expect
        """Let the hosts of the agent `name` probe it now. Return the agent after that, or after `timeout` seconds.

        A host looks for such wishes with each heartbeat, every 5 seconds.
        """
        engine = self._engine
        check_number(timeout, "timeout", 0.0)
        await self.get(name)
        asked_at = engine.clock.now()
        await self._tell(name, {**(await self._gate(name)).limits, "probe": asked_at}, "probe")
        until = engine.seconds() + timeout
        while True:
            info = await self.get(name)
            waiting = [one for one in info.hosts if one.alive and (one.agent.record.probed_at or 0.0) < asked_at]
            if not waiting or engine.seconds() >= until:
                return info
            await asyncio.sleep(PROBE_LOOK_SECONDS)

    async def _gate(self, name: str) -> GateInfo:
        gates = await self._engine.call(self._engine.store.list_gates, AGENT_GATE)
        return next((gate for gate in gates if gate.name == name), GateInfo(AGENT_GATE, name))

    async def _tell(self, name: str, limits: dict[str, Any], reason: str) -> None:
        engine = self._engine
        why = engine.redaction.redact(check_text(reason, "reason"))
        change = GateChange(instant(engine.clock.now()), engine.actor, "set", limits, why)
        await engine.call(engine.store.change_gate, AGENT_GATE, name, change)
        self._newest = None


def _places(hosts: Sequence[AgentHost]) -> int | None:
    """Return how many tasks these hosts perform at once; None without a limit."""
    found = [one.agent.max_tasks for one in hosts]
    return None if None in found else sum(one for one in found if one is not None)
