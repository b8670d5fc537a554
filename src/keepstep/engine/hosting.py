"""The agents that a worker hosts: their results and probes, and when they take no tasks."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import DuplicateName, StoreError
from ..model import Event, Status, WorkerInfo
from ..model.agent import AGENT_GATE, AgentRecord, HostedAgent, agents_text
from ..policies.health import WELL, health_of
from ..ports import instant

if TYPE_CHECKING:
    from ..kernel.driver import RunDriver
    from ..model import GateInfo
    from ..workflows.agent import Agent, AgentWorkflow
    from .process import Process

log = logging.getLogger("keepstep")

#: Results of tasks and probes that are remembered.
MOST_RESULTS = 100
#: Results from which on a success rate means something: one failed task must not take an agent out of work.
FEWEST_RESULTS = 5
#: Successful probes in a row after which the failures of an unhealthy agent are forgotten, so that it gets tasks again.
READMITTING_PROBES = 3
#: Seconds that a probe may take.
PROBE_SECONDS = 10.0
#: Heartbeats for which a new host waits for an older one to leave, before it is refused: a killed host may seem alive.
PATIENCE = 1.5
#: Seconds between two looks at that older host.
AGAIN_SECONDS = 0.1


class Hosted:
    """An agent on this host."""

    def __init__(self, hosting: Hosting, agent: Agent[Any], since: float) -> None:
        self.hosting, self.agent, self.since = hosting, agent, since
        self.probe_at = 0.0  # at once
        self.health = WELL
        self.is_admitted = False  # until the store has told that no other worker hosts it
        self.is_draining = False
        self.refused_by = ""
        self.begun: dict[str, float] = {}  # the tasks that it performs, with the time of each start
        self.is_probed = False  # now
        self.probed_for = 0.0  # the newest request for a probe that was answered
        self._results: deque[bool] = deque(maxlen=MOST_RESULTS)
        self._seconds: deque[float] = deque(maxlen=MOST_RESULTS)
        self._in_a_row = 0
        self._probes_in_a_row = 0
        self._completed = self._failed = 0
        self._probed_at: float | None = None
        self._probe_error = ""

    @property
    def takes_tasks(self) -> bool:
        """Whether this host claims tasks of the agent."""
        return self.is_admitted and not self.refused_by and not self.is_draining and self.health.works

    def record(self) -> AgentRecord:
        count = len(self._results)
        return AgentRecord(
            results=count,
            success_rate=round(sum(self._results) / count, 4) if count >= FEWEST_RESULTS else None,
            mean_seconds=round(sum(self._seconds) / len(self._seconds), 4) if self._seconds else None,
            failures_in_a_row=self._in_a_row,
            completed=self._completed,
            failed=self._failed,
            probed_at=self._probed_at,
            probe_error=self._probe_error,
        )

    def shown(self) -> HostedAgent:
        """Return the agent as the heartbeat shows it."""
        agent = self.agent
        return HostedAgent(
            *(agent.name, agent.capabilities, agent.workflow.version, agent.max_tasks, agent.slow_seconds),
            *(agent.replicas, self.since, len(self.begun), self.refused_by, self.record()),
        )

    def task_ended(self, seconds: float, *, succeeded: bool) -> None:
        """Count the end of a task."""
        self._seconds.append(seconds)
        self._completed += succeeded
        self._failed += not succeeded
        self._probes_in_a_row = 0
        self._count(succeeded=succeeded)

    def probed(self, at: float, error: str) -> None:
        """Count a probe. Some that succeed in a row readmit an unhealthy agent."""
        self._probed_at, self._probe_error = at, error
        self._probes_in_a_row = 0 if error else self._probes_in_a_row + 1
        if self._probes_in_a_row >= READMITTING_PROBES and not self.health.works:
            self._results.clear()
        self._count(succeeded=not error)

    def _count(self, *, succeeded: bool) -> None:
        self._results.append(succeeded)
        self._in_a_row = 0 if succeeded else self._in_a_row + 1


class Hosting:
    """The agents of one worker."""

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        self._hosted: dict[str, Hosted] = {}
        self._is_looking = False
        #: The workflows of the agents' tasks, which this process knows and others do not.
        self.workflows: dict[str, AgentWorkflow] = {}
        #: The workflows among them of which this worker claims no runs now.
        self.withheld: frozenset[str] = frozenset()
        #: The agents as the heartbeat shows them; replaced as a whole, because another thread reads it.
        self.text = b""

    @property
    def queues(self) -> frozenset[str]:
        """The queues of the agents' tasks."""
        return frozenset(self.workflows)

    def add(self, agents: Iterable[Agent[Any]]) -> list[Hosted]:
        """Host agents. They get no tasks before they are admitted."""
        added = []
        for agent in agents:
            if agent.name in self._hosted:
                raise DuplicateName(f"two agents are named {agent.name!r}; give each its own name")
            one = Hosted(self, agent, self._engine.clock.now())
            self._hosted[agent.name] = one
            self.workflows[agent.workflow.name] = agent.workflow
            added.append(one)
        self._changed()
        return added

    def remove(self, hosted: Iterable[Hosted]) -> None:
        """Host these agents no longer."""
        for one in hosted:
            self._hosted.pop(one.agent.name, None)
            self.workflows.pop(one.agent.workflow.name, None)
        self._changed()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def entered(self, context: RunDriver) -> None:
        """Note that a task is performed here."""
        one = self._hosted.get(context.workflow.agent or "")
        if one is not None:
            one.begun[context.id] = self._engine.seconds()
            self._changed()

    def left(self, context: RunDriver) -> None:
        """Note that a task has ended, or was put away. A refusal, or a bad task, tells nothing about the agent."""
        one = self._hosted.get(context.workflow.agent or "")
        began = None if one is None else one.begun.pop(context.id, None)
        if one is None or began is None:
            return
        seconds = self._engine.seconds() - began
        status, _, error, _ = context.end or (None, b"", None, None)
        if status is Status.COMPLETED:
            one.task_ended(seconds, succeeded=True)
        elif status is Status.FAILED and error is not None and not _is_about_task(error.type, error.error_class):
            one.task_ended(seconds, succeeded=False)
        self._judge(one)

    # -- health --------------------------------------------------------------------------------------------------------

    def _judge(self, one: Hosted) -> None:
        """Compute the health of an agent, and tell of a change."""
        before = one.health
        one.health = health_of(one.record(), slow_seconds=one.agent.slow_seconds)
        self._changed()
        if one.health.status == before.status:
            return
        engine, name = self._engine, one.agent.name
        log.log(logging.INFO if one.health.works else logging.WARNING, "agent %s is %s", name, one.health)
        if engine.events.observed:
            at, data = instant(engine.clock.now()), {"health": one.health.status, "score": one.health.score}
            engine.events.emit(Event("agent.health", "", at, worker=engine.worker_id or "", data=data, agent=name))
        if engine.worker is not None:
            engine.worker.heart.hurry()

    def _changed(self) -> None:
        before = self.withheld
        self.withheld = frozenset(one.agent.workflow.name for one in self._hosted.values() if not one.takes_tasks)
        self.text = agents_text(one.shown() for one in self._hosted.values()) if self._hosted else b""
        if before - self.withheld and self._engine.worker is not None:
            self._engine.worker.claim_soon()

    async def probe(self, one: Hosted) -> None:
        """Ask an agent whether it works. One without a probe works if its host does."""
        engine, one.is_probed = self._engine, True
        try:
            error = await _error_of_probe(one.agent)
        finally:
            one.is_probed, one.probe_at = False, engine.seconds() + one.agent.probe_every
        one.probed(engine.clock.now(), engine.redaction.redact(error))
        self._judge(one)

    # -- the store -----------------------------------------------------------------------------------------------------

    async def admit(self, hosted: list[Hosted]) -> None:
        """Let new agents take tasks, unless an older living host has them; that one may just be leaving."""
        engine = self._engine
        for one in hosted:
            await engine.declare_queue(_TaskQueue(one.agent))
        await engine.tell_heartbeat()
        until = engine.seconds() + engine.look_seconds * PATIENCE
        while duplicates := await self._duplicates(hosted):
            if engine.seconds() >= until:
                one, other = duplicates[0]
                self.remove(hosted)
                raise DuplicateName(
                    f"agent {one.agent.name!r} is hosted by worker {other.id} (pid {other.pid} on {other.host}); stop "
                    "that one, give this one another name, or set replicas=True in both"
                )
            await asyncio.sleep(AGAIN_SECONDS)
        for one in hosted:
            one.is_admitted = True
        self._changed()
        if hosted and not self._is_looking:
            self._is_looking = True
            engine.background(self._look_on())

    async def _duplicates(self, hosted: Iterable[Hosted]) -> list[tuple[Hosted, WorkerInfo]]:
        """Return the agents of which another living worker is the older host, each with that worker."""
        engine = self._engine
        workers = [
            one for one in await engine.call(engine.store.list_workers) if one.alive and one.id != engine.worker_id
        ]
        return [
            (one, worker)
            for one in hosted
            for worker in workers
            for other in worker.agents
            if other.name == one.agent.name
            and not (other.replicas and one.agent.replicas)
            and not other.refused_by
            and (other.since, worker.id) < (one.since, engine.worker_id or "")
        ]

    async def _look_on(self) -> None:
        """Probe the agents, and look for older hosts and for what people have told them, once a heartbeat."""
        engine = self._engine
        while not engine.closed:
            try:
                await self._look()
            except StoreError as error:
                engine.outage.log("cannot look after the agents of this host", error)
            await asyncio.sleep(min(engine.look_seconds, self._until_probe()))

    def _until_probe(self) -> float:
        probes = (one.probe_at for one in self._hosted.values() if not one.is_probed)
        return max(0.01, min(probes, default=float("inf")) - self._engine.seconds())

    async def _look(self) -> None:
        engine = self._engine
        refused = {one.agent.name: other for one, other in await self._duplicates(self._hosted.values())}
        gates = {gate.name: gate for gate in await engine.call(engine.store.list_gates, AGENT_GATE)}
        for name, one in list(self._hosted.items()):
            other = refused.get(name)
            if other is not None and not one.refused_by:
                log.error("agent %s takes no tasks here: worker %s hosts it, too, and did so before", name, other.id)
            one.refused_by = "" if other is None else other.id
            one.is_draining = drains_on(gates.get(name), engine.worker_id or "")
            asked_at = probe_asked_at(gates.get(name))
            if not one.is_probed and (asked_at > one.probed_for or engine.seconds() >= one.probe_at):
                one.probed_for = asked_at
                engine.background(self.probe(one))
        self._changed()


def _is_about_task(error_type: str, error_class: str) -> bool:
    """Whether a failure tells about the task rather than about the agent."""
    return error_type.rpartition(".")[2] == "AgentRefused" or error_class == "permanent"


async def _error_of_probe(agent: Agent[Any]) -> str:
    """Return why an agent does not work; empty if it does."""
    if agent.probe is None:
        return ""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            if inspect.iscoroutinefunction(agent.probe):
                answer = await agent.probe()
            else:
                answer = await asyncio.to_thread(agent.probe)
                answer = await answer if inspect.isawaitable(answer) else answer
    except TimeoutError:
        return f"the probe took longer than {PROBE_SECONDS:g} s"
    except Exception as error:  # noqa: BLE001 - whatever it raises tells that the agent does not work
        return f"{type(error).__name__}: {error}"
    return "the probe returned False" if answer is False else ""


class _TaskQueue:
    """The queue of an agent's tasks, as the store declares it."""

    def __init__(self, agent: Agent[Any]) -> None:
        self.name, self.limits = agent.workflow.name, agent.limits


def drains_on(gate: GateInfo | None, worker: str) -> bool:
    """Whether a person has told an agent to take no more tasks on a worker."""
    workers = [] if gate is None else gate.limits.get("drain", [])
    return isinstance(workers, list) and worker in workers


def drains_everywhere(gate: GateInfo | None) -> bool:
    """Whether a person has told an agent to take no more tasks on any worker."""
    return gate is not None and gate.limits.get("drain") is True


def probe_asked_at(gate: GateInfo | None) -> float:
    """Return when a person has last asked for a probe; 0 if nobody has."""
    asked = 0.0 if gate is None else gate.limits.get("probe", 0.0)
    return float(asked) if isinstance(asked, int | float) else 0.0
