"""Agents: who performs tasks, and the workflow in which each of them does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

from ..checks import check_limit, check_name, check_number
from ..errors import DefinitionError
from ..model.agent import agent_workflow
from ..policies.health import CHECK_SECONDS, SLOW_SECONDS
from ..policies.queue import Limits
from ..policies.rate import Rate
from ..ports import CURRENT
from .definition import Step, Workflow

R = TypeVar("R")

OnFailure = Literal["next", "raise"]

#: Tasks that one host lets an agent perform at once by default.
MAX_TASKS = 10
#: Drafts of a quality loop at most, and the score from which on one is accepted, unless the caller says otherwise.
ROUNDS = 3
THRESHOLD = 0.8


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """A task for an agent, as a workflow's file describes it; with a `critic`, a quality loop of such tasks."""

    needs: tuple[str, ...]
    team: tuple[str, ...] | None = None
    seconds: float | None = None
    wait: bool = False
    on_failure: OnFailure = "next"
    least: float = 1.0
    critic: tuple[str, ...] = ()
    threshold: float = THRESHOLD
    rounds: int = ROUNDS
    escalate: str | None = None
    escalate_seconds: float | None = None

    def __call__(self, task: Any) -> Any:
        """Return the call that performs the task, in the code of a workflow."""
        return CURRENT.get().perform(self, task)


class AgentWorkflow(Workflow[..., Any]):
    """The workflow of an agent's tasks. Only the hosts of the agent know it."""

    is_built_in = True

    def __init__(self, name: str, perform: Callable[..., Any], version: str) -> None:
        super().__init__(perform, name=agent_workflow(name), version=version, queue=agent_workflow(name))
        self.agent = name


class Agent(Generic[R]):
    """An agent: a name, its capabilities, and the function that performs a task.

    | option | means |
    |---|---|
    | `perform` | a function of one task, async or plain, a step or a workflow; its steps are durable |
    | `capabilities` | names of what it can do, by which tasks find it |
    | `probe` | a function without arguments that tells whether the agent works: it raises or returns False if not |
    | `probe_every` | seconds between two probes; 30 by default |
    | `max_tasks` | tasks that one host lets it perform at once; 10 by default |
    | `rate` | how often it begins a task: `ks.Rate(count, per=seconds)` |
    | `replicas` | whether several workers may host it at once |
    | `version` | the version of its code, stored with each task; "1" by default |
    | `slow_seconds` | mean time of a task from which on the agent counts as slow; 10 by default |

    A worker hosts it: `ks.open(agents=[...])`. Called like a function, it performs the task right here.
    """

    def __init__(
        self,
        name: str,
        *,
        perform: Callable[..., Any],
        capabilities: Iterable[str] = (),
        probe: Callable[[], Any] | None = None,
        probe_every: float = CHECK_SECONDS,
        max_tasks: int = MAX_TASKS,
        rate: Rate | None = None,
        replicas: bool = False,
        version: str = "1",
        slow_seconds: float = SLOW_SECONDS,
    ) -> None:
        self.name = check_name(name, "agent")
        where = f"ks.Agent({name!r})"
        if not callable(perform):
            raise DefinitionError(f"{where}: perform= must be a function of one task, got {perform!r}")
        if probe is not None and not callable(probe):
            raise DefinitionError(f"{where}: probe= must be a function without arguments, got {probe!r}")
        if isinstance(capabilities, str) or not isinstance(capabilities, Iterable):
            raise DefinitionError(f"{where}: capabilities= must be a list of names, got {capabilities!r}")
        self.capabilities = tuple(dict.fromkeys(check_name(one, "capability") for one in capabilities))
        self.max_tasks = check_limit(max_tasks, f"{where}: max_tasks", 1)
        self.probe_every = check_number(probe_every, f"{where}: probe_every", 0.01)
        if rate is not None and not isinstance(rate, Rate):
            raise DefinitionError(f"{where}: rate must be a ks.Rate, got {rate!r}")
        self.rate = rate
        self.replicas = bool(replicas)
        self.slow_seconds = check_number(slow_seconds, f"{where}: slow_seconds", 0.001)
        self.perform, self.probe = perform, probe
        self.workflow = AgentWorkflow(self.name, _task_function(perform), str(version))
        try:
            self.workflow.check_arguments(("task",), {})
        except DefinitionError as error:
            raise DefinitionError(f"{where}: perform= must take one task: {error}") from None

    @property
    def limits(self) -> Limits:
        """The limits of the queue of its tasks."""
        return Limits(per_worker=self.max_tasks, rate=self.rate)

    def __call__(self, task: Any) -> R:
        """Perform a task right here: in a workflow as part of its code, elsewhere as an ordinary function."""
        return self.perform(task)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"ks.Agent({self.name!r}, capabilities={list(self.capabilities)})"


def _task_function(perform: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a task's run calls; what a step or a workflow returns is awaited there."""
    if inspect.isfunction(perform) or inspect.ismethod(perform):
        return perform

    async def awaited(task: Any) -> Any:
        result = perform(task)
        return await result if inspect.isawaitable(result) else result

    awaited.__name__ = getattr(perform, "__name__", None) or type(perform).__name__
    if isinstance(perform, Step | Workflow):
        awaited.__annotations__ = dict(getattr(perform.fn, "__annotations__", {}))
    return awaited


def as_agent(given: Any) -> Agent[Any]:
    """Return an agent, or any object with its attributes, as an `Agent`."""
    if isinstance(given, Agent):
        return given
    name, perform = getattr(given, "name", None), getattr(given, "perform", None)
    if not isinstance(name, str) or not callable(perform):
        raise DefinitionError(
            f"{given!r} is not an agent; use ks.Agent(name, perform=...), @ks.agent, or an object with `name`, "
            "`capabilities` and `async perform(task)`"
        )
    options = ("probe", "probe_every", "max_tasks", "rate", "replicas", "version", "slow_seconds")
    found = {one: value for one in options if (value := getattr(given, one, None)) is not None}
    return Agent(name, perform=perform, capabilities=getattr(given, "capabilities", ()), **found)


@overload
def agent(name: Callable[..., R], /) -> Agent[R]: ...
@overload
def agent(
    name: str | None = None,
    /,
    *,
    capabilities: Iterable[str] = (),
    probe: Callable[[], Any] | None = None,
    probe_every: float = CHECK_SECONDS,
    max_tasks: int = MAX_TASKS,
    rate: Rate | None = None,
    replicas: bool = False,
    version: str = "1",
    slow_seconds: float = SLOW_SECONDS,
) -> Callable[[Callable[..., R]], Agent[R]]: ...
def agent(name: Any = None, /, **options: Any) -> Any:
    """Make a function of one task an agent, named after the function unless `name` is given.

    The options are those of `ks.Agent`.
    """
    if callable(name):
        return Agent(name.__name__, perform=name, **options)
    return lambda perform: Agent(perform.__name__ if name is None else name, perform=perform, **options)
