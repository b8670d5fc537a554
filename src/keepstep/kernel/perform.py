"""Tasks that a run gives to agents: the choice of an agent, its task as a child run, and the next agent if it fails."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..checks import check_name, check_number
from ..errors import AgentUnavailable, DefinitionError, StepFailed, StoreError, TimedOut
from ..model import Kind, Outcome, Status
from ..model.agent import agent_workflow
from ..model.ids import new_id
from ..model.signal import BLOCKED
from ..policies.health import CHECK_SECONDS
from ..records.record import Record, StoredError
from ..values import VALUES, Values
from ..workflows.agent import AgentWorkflow, OnFailure, as_agent
from ..workflows.call import Call
from .call_states import ASKED, CANCELLED
from .calls import Branch, DurableCall, Task, current_branch
from .children import ChildResult, ChildRun, StartCall
from .inbox import Wait
from .naming import acting
from .steering import cancel_child
from .waits import timeout_seconds
from .wakeups import add_wait, end_wait

if TYPE_CHECKING:
    from ..workflows.agent import Agent, TaskPlan
    from ..workflows.definition import Workflow
    from .host import Assignment

log = logging.getLogger("keepstep")

#: How often one agent may be lost with a task that it has begun: from then on, the task may be the cause.
MOST_LOSSES = 3
_REFUSED = "AgentRefused"
_PERMANENT = "permanent"


class TaskLost(StepFailed):
    """The task of an agent was cancelled: its host died, it became unhealthy, it was late, or a person ended it.

    `begun` says whether the agent had begun it, so that the task itself may be the cause.
    """

    begun = True


@dataclass(slots=True)
class Search:
    """The search for an agent that performs one task, as far as it has come."""

    needs: tuple[str, ...]
    team: tuple[str, ...] | None
    least: float
    waits: bool
    on_failure: OnFailure
    seconds: float | None
    until: float | None  # in seconds since 1970
    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def tried(self) -> list[str]:
        """The agents that do not get the task again. One that was lost may come back to a task that waits."""
        gone = [one for one in self.lost if not self.waits or self.lost.count(one) >= MOST_LOSSES]
        return [*self.refused, *self.failed, *dict.fromkeys(gone)]

    def is_hopeless(self, found: Assignment) -> bool:
        """Whether every agent there is has failed at the task or was lost with it, so that waiting does not help."""
        tried = set(self.tried) - set(self.refused)
        return bool(found.scores) and all(one.agent in tried for one in found.scores)

    @property
    def text(self) -> str:
        """The task's needs, for messages."""
        return " and ".join(map(repr, self.needs)) or "a task"

    def take(self, agent: str, error: StepFailed) -> bool:
        """Note how an agent failed. Return whether another agent may perform the task."""
        if isinstance(error, TaskLost):
            if error.begun or not self.waits:
                self.lost.append(agent)
            return True
        found = error.root or error.error
        if found is not None and found.type.rpartition(".")[2] == _REFUSED:
            self.refused.append(agent)
            return True
        self.failed.append(agent)
        return self.on_failure == "next" and (found is None or found.error_class != _PERMANENT)


class AssignCall(DurableCall[dict[str, Any]]):
    """The choice of an agent for a task. Its record holds the scores of all candidates."""

    __slots__ = ("search", "tried")

    def __init__(self, branch: Branch, search: Search) -> None:
        self.search, self.tried = search, tuple(search.tried)
        digest = VALUES.digest((search.needs, search.team, search.least, self.tried), "assign")
        super().__init__(branch, f"assign:{'+'.join(search.needs)}", digest)

    def begin_live(self) -> None:
        self._look()

    def _look(self) -> None:
        self.run.work_began()  # the run must not be parked before the answer
        self.run.host.background(self._choose())

    async def _choose(self) -> None:
        run, search = self.run, self.search
        try:
            found = await run.host.agents.assign(search.needs, search.team, self.tried, search.least)
        except StoreError as error:
            run.halt(error)
            return
        except Exception as error:  # noqa: BLE001 - a run must never be left without an answer
            run.engine_failed(error)
            return
        finally:
            run.work_ended()
        if not run.stop.detached and self.state == ASKED:
            self._decide(found)
        run.watch()

    def _decide(self, found: Assignment) -> None:
        run, search, now = self.run, self.search, self.run.host.clock.now()
        late = search.until is not None and now >= search.until
        if found.agent is not None and not late:
            scores = [one.plain() for one in found.scores]
            value = {"agent": found.agent, "version": found.version, "needs": [*search.needs], "scores": scores}
            record = self.record(Kind.AGENT_STARTED, VALUES.encode(value))
            record.agent = found.agent
            run.append(record, self)
        elif search.waits and not late and not search.is_hopeless(found):
            pause = run.host.agents.look_seconds
            due = min(now + pause, math.inf if search.until is None else search.until)
            add_wait(run, Wait(self, due, self._look, f"{BLOCKED}{self.key}", longest=max(0.0, due - now)))
        else:
            self._fail(found)

    def _fail(self, found: Assignment) -> None:
        looked_at = "; ".join(f"{one.agent} {one.why_not or 'came too late'}" for one in found.scores)
        team = "" if self.search.team is None else f" of the team ({', '.join(self.search.team)})"
        text = f"no agent{team} performs {self.search.text}: {looked_at or 'no worker hosts an agent for it'}"
        error = StoredError("keepstep.AgentUnavailable", text, "transient", id=new_id("error"))
        self.run.append(self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=error), self)

    def failure(self, record: Record) -> BaseException:
        error = record.error
        if error is None or not error.type.endswith("AgentUnavailable"):
            return super().failure(record)
        return AgentUnavailable(error.message, self.key, error.info(), record.seq)

    def stop(self) -> None:
        super().stop()
        end_wait(self.run, self)


class TaskResult(ChildResult):
    """The wait for the end of a task. It looks after the task meanwhile: a task of a lost agent is cancelled."""

    __slots__ = ("agent", "looks", "search", "stopping")

    kind = Kind.AGENT_COMPLETED

    def __init__(self, branch: Branch, child: ChildRun[Any], agent: str, search: Search) -> None:
        self.agent, self.search = agent, search
        self.looks, self.stopping = 0, False
        super().__init__(branch, child)

    def _listen(self) -> None:
        signal = self.run.inbox.take(self.name, self._is_mine)
        if signal is not None:
            self._come(signal)
            return
        run, now = self.run, self.run.host.clock.now()
        due = min(
            now + self._pause(), math.inf if self._is_late(now) or self.search.until is None else self.search.until
        )
        wait = Wait(self, due, self._look, self.name, self._come, longest=max(0.0, due - now), mine=self._is_mine)
        add_wait(run, wait)

    def _pause(self) -> float:
        """Return the time until the next look: short at first, and at once in a run that was parked meanwhile."""
        if (
            self.looks == 0
            and self.run.claim.before is Status.WAITING
            and self.run.last_delivered <= self.run.claim.run.seq
        ):
            self.looks = 3
            return 0.0
        return min(CHECK_SECONDS, self.run.host.agents.look_seconds * 2.0**self.looks)

    def _is_late(self, now: float) -> bool:
        return self.search.until is not None and now >= self.search.until

    def _look(self) -> None:
        self.run.work_began()  # the run must not be parked before the answer
        self.run.host.background(self._look_after())

    async def _look_after(self) -> None:
        run, agents = self.run, self.run.host.agents
        late = f"it was not done within {self.search.seconds:g} s" if self._is_late(run.host.clock.now()) else ""
        try:
            self.stopping = await agents.look_after(self.child.id, self.agent, late, asked=self.stopping)
        except Exception as error:  # noqa: BLE001 - the wait for the task must go on, whatever a look meets
            log.warning("run %s cannot look after its task %s yet: %s", run.id, self.child.id, error)
        finally:
            run.work_ended()
        if not run.stop.detached and self.state == ASKED and self not in run.waits:
            self.looks = 0 if self.stopping else self.looks + 1
            self._listen()
        run.watch()

    def cancelled_by_code(self) -> None:
        asked = self.state == ASKED
        super().cancelled_by_code()
        if asked and self.state == CANCELLED and not self.run.stop.detached:
            cancel_child(self.run, self.child.id)

    def take_in(self, record: Record, value: Any) -> Any:
        result = super().take_in(record, value)
        word, error = value[0], self.error
        if word.status == Status.CANCELLED and isinstance(error, StepFailed):
            text = f"the task {self.child.id!r} of agent {self.agent!r} was cancelled"
            self.error = lost = TaskLost(text, self.key, error.error, record.seq)
            lost.begun = word.begun
        return result


def _workflow_of(run: Any, agent: str, version: str, task: Any) -> Workflow[..., Any]:
    """Return the workflow of an agent's tasks, as any run knows it, whether or not this process hosts the agent.

    Its codec knows the types of the run's own code, those of the task, and those of an agent that is hosted here.
    """
    workflow = AgentWorkflow(agent, _elsewhere, version)
    hosted: Workflow[..., Any] | None = run.host.workflows.get(workflow.name)
    hints = [] if hosted is None else list(hosted.hints().values())
    vars(workflow)["values"] = Values(parent=run.workflow.reach.for_values(task), annotations=lambda: hints)
    return workflow


async def _elsewhere(task: Any) -> Any:
    raise DefinitionError(f"this process does not host the agent; {task!r} cannot be performed here")


async def _performed(search: Search, task: Any, priority: int) -> Any:
    failure: StepFailed | None = None
    while True:
        branch = current_branch("perform")
        try:
            chosen = await AssignCall(branch, search)
        except AgentUnavailable as nobody:
            _raise_if_late(branch, search)
            if failure is not None:
                raise failure from nobody
            raise
        agent = chosen["agent"]
        with acting(agent):
            workflow = _workflow_of(branch.run, agent, chosen["version"], task)
            options = {"queue": agent_workflow(agent), "priority": priority, "tags": {}}
            child: ChildRun[Any] = await StartCall(branch, workflow, ((task,), {}), options)
            try:
                return await TaskResult(branch, child, agent, search)
            except StepFailed as error:
                may_go_on = search.take(agent, error)
                _raise_if_late(branch, search)
                if not may_go_on:
                    raise
                if not isinstance(error, TaskLost):
                    failure = error


def _raise_if_late(branch: Branch, search: Search) -> None:
    if search.until is not None and branch.now().timestamp() >= search.until:
        raise TimedOut(f"no agent has performed {search.text} within {search.seconds:g} s", branch.run.id)


def _asked(needs: Any, team: Sequence[str] | None) -> tuple[str, ...]:
    found = (needs,) if isinstance(needs, str) else needs
    if not isinstance(found, Iterable):
        raise DefinitionError(f"the need of a task is a capability, an agent's name, or a list of these, got {needs!r}")
    checked = tuple(check_name(one, "capability or agent") for one in found)
    if not checked and team is None:
        raise DefinitionError("a task must name a capability or an agent; only a team may be given any task")
    return checked


def perform(
    need: str | Iterable[str],
    task: Any,
    *,
    timeout: float | timedelta | None = None,
    wait: bool = False,
    on_failure: OnFailure = "next",
    least: float = 1.0,
    priority: int = 0,
) -> Call[Any]:
    """Let an agent perform a task, and return its result. The task is a child run of this one.

    `need` is a capability, the name of an agent, or a list of capabilities. Of the healthy agents that have them, the
    one with the best score gets the task: 0.6 for the match, 0.2 for a low load, 0.2 for its record. If its host dies,
    or it refuses, fails or becomes unhealthy, its task is cancelled and the next agent is tried, each once.

    | option | means |
    |---|---|
    | `timeout` | seconds for the whole task, after which it is cancelled and `TimedOut` is raised |
    | `wait` | wait until there is an agent, instead of `AgentUnavailable` |
    | `on_failure` | `"next"` tries another agent after a failure, `"raise"` does not; `Permanent` is always raised |
    | `least` | the share of the needed capabilities that an agent must have; 1 by default |
    | `priority` | tasks of a higher priority are begun first by their agent |
    """
    options = _Options(timeout, wait, on_failure, least, priority)
    return _begin("perform", need, None, task, options)


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of a task."""

    timeout: float | timedelta | None = None
    wait: bool = False
    on_failure: OnFailure = "next"
    least: float = 1.0
    priority: int = 0


def _begin(verb: str, need: Any, team: tuple[str, ...] | None, task: Any, options: _Options) -> Call[Any]:
    branch = current_branch(verb)
    seconds = timeout_seconds(options.timeout)
    if options.on_failure not in ("next", "raise"):
        raise DefinitionError(f"on_failure must be 'next' or 'raise', got {options.on_failure!r}")
    least = check_number(options.least, "least", 0.0, 1.0)
    until = None if seconds is None else branch.now().timestamp() + seconds
    needs = _asked(need, team)
    search = Search(needs, team, least, bool(options.wait), options.on_failure, seconds, until)
    return Task(branch, _performed(search, task, options.priority))


def give(plan: TaskPlan, needs: tuple[str, ...], task: Any) -> Call[Any]:
    """Let an agent perform a task under the options of a plan."""
    options = _Options(plan.seconds, plan.wait, plan.on_failure, plan.least)
    return _begin("perform", needs, plan.team, task, options)


class Team:
    """Several agents that share tasks: `perform` gives a task to the one of them that suits it best.

    | option | means |
    |---|---|
    | `agents` | the members: agents, or names of agents that workers host elsewhere |
    | `timeout`, `wait`, `on_failure`, `least` | the defaults for its tasks, as in `ks.perform` |

    `ks.open(agents=team)` hosts those members that are given as agents.
    """

    def __init__(
        self,
        name: str,
        *,
        agents: Iterable[Agent[Any] | str | Any],
        timeout: float | timedelta | None = None,
        wait: bool = False,
        on_failure: OnFailure = "next",
        least: float = 1.0,
    ) -> None:
        self.name = check_name(name, "team")
        if isinstance(agents, str) or not isinstance(agents, Iterable):
            raise DefinitionError(f"ks.Team({name!r}): agents= must be a list of agents, got {agents!r}")
        given = [one if isinstance(one, str) else as_agent(one) for one in agents]
        self.agents = tuple(one for one in given if not isinstance(one, str))
        self.members = tuple(check_name(one if isinstance(one, str) else one.name, "agent") for one in given)
        if not self.members or len(set(self.members)) < len(self.members):
            raise DefinitionError(f"ks.Team({name!r}): agents= must name at least one agent, and each of them once")
        self._options = _Options(timeout, wait, on_failure, least)

    def perform(
        self,
        need: str | Iterable[str] | None,
        task: Any,
        *,
        timeout: float | timedelta | None = None,
        wait: bool | None = None,
        on_failure: OnFailure | None = None,
        least: float | None = None,
        priority: int = 0,
    ) -> Call[Any]:
        """Let a member of the team perform a task, as `ks.perform` does; None as `need` suits every member."""
        own = self._options
        options = _Options(
            own.timeout if timeout is None else timeout,
            own.wait if wait is None else wait,
            own.on_failure if on_failure is None else on_failure,
            own.least if least is None else least,
            priority,
        )
        return _begin("perform", () if need is None else need, self.members, task, options)

    def __contains__(self, agent: str) -> bool:
        return agent in self.members

    def __repr__(self) -> str:
        return f"ks.Team({self.name!r}, agents={list(self.members)})"


def given_agents(agents: Any) -> list[Agent[Any]]:
    """Return the agents that a worker is to host: an agent, a team, or a list of these."""
    if agents is None:
        return []
    if isinstance(agents, Team):
        return list(agents.agents)
    if isinstance(agents, Collection) and not isinstance(agents, str | bytes):
        return [one for given in agents for one in (given.agents if isinstance(given, Team) else (as_agent(given),))]
    return [as_agent(agents)]
