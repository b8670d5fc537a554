"""A graph: steps over a state, and edges that say which comes next; its run is a workflow that the library writes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from hashlib import sha256
from typing import Any, Literal

from ..errors import DefinitionError, DuplicateName
from ..model.ids import check_name
from ..policies import All, Budget, Durability, Quorum, WaitPolicy
from ..policies import reduce as reducing
from ..policies.check import check_number
from ..policies.quorum import Any as AnyOf
from ..policies.when import Predicate, described
from ..ports import CURRENT
from ..values import VALUES, Values
from ..values.trees import Trees
from .definition import Step, Workflow, remember
from .described import policies_of
from .hooks import Hooks
from .migration import MigrationInfo
from .place import place_here, place_of
from .schema import Schema
from .shape import Arrow, Node, Problem, Shape
from .validate import check, problems

#: How often a run may pass any one step, unless the graph says otherwise.
MAX_ITERATIONS = 1000
#: What a step's parameters may ask for; any other first parameter is the state.
LEVELS = ("state", "stage", "agent")

_NO_DEFAULT: Any = object()
_NAMED_STEP = re.compile(r"step '(.*)'")


class Goto:
    """What a step returns to say itself which step comes next, along with its change of the state."""

    def __init__(self, target: str, change: Mapping[str, Any] | None = None, /, **values: Any) -> None:
        self.target = target
        self.change: Any = change if not values else {**(change or {}), **values}


class Changes:
    """What a step returns that changes the state of its stage or its agent too."""

    def __init__(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        stage: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
    ) -> None:
        self.state, self.stage, self.agent = state, stage, agent


# -- what a graph is made of -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepNode:
    """A function of the state."""

    name: str
    step: Step[..., Any]
    takes: tuple[str, ...] = ("state",)
    stage: str | None = None
    agent: str | None = None
    kind = "step"

    def __str__(self) -> str:
        named = [f"{level}={name}" for level, name in (("stage", self.stage), ("agent", self.agent)) if name]
        return " ".join(["step", self.name, *named, policies_of(self.step)]).rstrip()


@dataclass(frozen=True, slots=True)
class MapNode:
    """A step for every item of a list in the state."""

    name: str
    step: Step[..., Any]
    over: str
    into: str
    concurrency: int | None = None
    wait: WaitPolicy = field(default_factory=All)
    collect: bool = False
    kind = "map"

    def __str__(self) -> str:
        what = f"map {self.name} of {self.step.name} over {self.over} into {self.into}"
        return f"{what}{_waiting(self)} {policies_of(self.step)}".rstrip()


@dataclass(frozen=True, slots=True)
class WaitNode:
    """A wait for a signal, whose payload goes into the state."""

    name: str
    signal: str
    into: str | None = None
    timeout: float | None = None
    default: Any = _NO_DEFAULT
    kind = "wait"

    @property
    def has_default(self) -> bool:
        return self.default is not _NO_DEFAULT

    def __str__(self) -> str:
        into = f" into {self.into}" if self.into is not None else ""
        timeout = f" timeout {self.timeout}" if self.timeout is not None else ""
        default = f" default {self.default!r}" if self.has_default else ""
        return f"wait {self.name} for {self.signal}{into}{timeout}{default}"


@dataclass(frozen=True, slots=True)
class DelayNode:
    """A durable sleep."""

    name: str
    seconds: float
    kind = "delay"

    def __str__(self) -> str:
        return f"delay {self.name} {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class ChildNode:
    """Another workflow, as a child run."""

    name: str
    workflow: Workflow[..., Any]
    takes: tuple[str, ...] | None = None
    gives: str | None = None
    kind = "child"

    def __str__(self) -> str:
        takes = f" takes {', '.join(self.takes)}" if self.takes is not None else ""
        gives = f" gives {self.gives}" if self.gives is not None else ""
        return f"child {self.name} of {self.workflow.name}{takes}{gives}"


@dataclass(frozen=True, slots=True)
class ParallelNode:
    """Ways that are gone at once, up to where they join."""

    name: str
    branches: tuple[str, ...]
    join: str
    wait: WaitPolicy = field(default_factory=All)
    collect: bool = False
    report: str | None = None
    kind = "parallel"

    def __str__(self) -> str:
        ways = ", ".join(self.branches)
        report = f" report {self.report}" if self.report is not None else ""
        return f"parallel {self.name}: {ways} -> {self.join}{_waiting(self)}{report}"


AnyNode = StepNode | MapNode | WaitNode | DelayNode | ChildNode | ParallelNode


@dataclass(frozen=True, slots=True)
class Edge:
    """A way from one step to the next, taken when its predicate is the first that holds."""

    source: str
    target: str
    when: Predicate | None = None

    def __str__(self) -> str:
        when = "" if self.when is None else f" when {described(self.when)}"
        return f"edge {self.source} -> {self.target}{when}"


def steps_in(definition: str, asked: str) -> list[str]:
    """The steps that a definition's text names, as far as a name ends with its first space; `asked` is found whole."""
    kinds = tuple(f"{node.kind} " for node in (StepNode, MapNode, WaitNode, DelayNode, ChildNode, ParallelNode))
    lines = [line.partition(" ")[2] for line in definition.splitlines() if line.startswith(kinds)]
    whole = [asked for line in lines if line.startswith(asked) and line[len(asked) :][:1] in ("", " ", ":")]
    return whole or [line.partition(" ")[0].rstrip(":") for line in lines]


def _waiting(node: MapNode | ParallelNode) -> str:
    """How what is done at once is waited for, if that is not the usual way."""
    wait = "" if node.wait == All() else f" wait {node.wait}"
    return f"{wait} collect" if node.collect else wait


# -- the graph ---------------------------------------------------------------------------------------------------------


class Graph(Workflow[..., dict[str, Any]]):
    """A state machine over an immutable state: steps return what they change, edges say which comes next.

    `reducers` say, by key, how what parallel writers give becomes one value: `append`, `add`, `max`, `min`, `merge`, or
    a function of the old value and what is given. A run may pass `max_iterations` steps in all.
    """

    carries_state = True

    def __init__(
        self,
        name: str,
        *,
        version: str = "1",
        schema: Any = None,
        reducers: Mapping[str, reducing.Named | reducing.Reducer] | None = None,
        max_iterations: int = MAX_ITERATIONS,
        interrupt_before: Iterable[str] = (),
        interrupt_after: Iterable[str] = (),
        on_change: Literal["fail", "compatible", "pin"] = "fail",
        migrate: Callable[[MigrationInfo], Any] | None = None,
        durability: Durability | str | None = None,
        budget: Budget | None = None,
        hooks: Hooks | None = None,
        step_hooks: Hooks | None = None,
    ) -> None:
        async def walk(state: Mapping[str, Any] | None = None, /, **values: Any) -> dict[str, Any]:
            scope = CURRENT.get()
            if scope is None or scope.in_step:
                raise DefinitionError(f"graph {name!r} is no function: start it with engine.start or ks.run")
            return await scope.walk(self, {**(state or {}), **values})  # type: ignore[no-any-return]

        walk.__name__ = str(name)
        super().__init__(
            walk,
            name=name,
            version=version,
            on_change=on_change,
            migrate=migrate,
            durability=durability,
            budget=budget,
            hooks=hooks,
            step_hooks=step_hooks,
        )
        self.place = place_here(self.name)
        if type(max_iterations) is not int or max_iterations < 1:
            raise DefinitionError(f"graph {name!r}: max_iterations is a whole number from 1, not {max_iterations!r}")
        self.max_iterations = max_iterations
        self.schema = None if schema is None else Schema(schema)
        self.reducers = reducing.reducers(reducers)
        self.interrupt_before = frozenset(_several(interrupt_before, f"graph {name!r}: interrupt_before"))
        self.interrupt_after = frozenset(_several(interrupt_after, f"graph {name!r}: interrupt_after"))
        self.nodes: dict[str, AnyNode] = {}
        self.edges: dict[str, list[Edge]] = {}
        self.entry_name: str | None = None
        self.exits: dict[str, None] = {}
        self._in_use = False
        remember(self)

    # -- writing it ---------------------------------------------------------------------------------------------------

    def step(self, fn: Any = None, /, **options: Any) -> Any:
        """Make a function of the state a step of this graph; options are those of `add`."""
        if fn is not None:
            return self.add(fn, **options)
        return lambda function: self.add(function, **options)

    def add(
        self,
        what: Any,
        /,
        name: str | None = None,
        *,
        stage: str | None = None,
        agent: str | None = None,
        takes: Iterable[str] | None = None,
        gives: str | None = None,
        **options: Any,
    ) -> Any:
        """Add a step: a function of the state, a step that is one, or another workflow, which becomes a child run.

        `stage` and `agent` name whose state the step may take and change beside the graph's own. A workflow is given
        the keys that it `takes` (those of its parameters), and what it returns is put under the key that it `gives`.
        """
        if isinstance(what, Workflow):
            if options or stage or agent:
                raise DefinitionError(f"workflow {what.name!r} takes no step's options; give it its own")
            self._put(ChildNode(check_name(name or what.name, "step"), what, _names(takes), gives))
            return what
        if takes is not None or gives is not None:
            raise DefinitionError("takes= and gives= are for workflows; a step is given the state, returns its change")
        step: Step[..., Any] = _as_step(what, name, options)
        for label, value in (("stage", stage), ("agent", agent)):
            if value is not None:
                check_name(value, label)
        self._put(StepNode(name or step.name, step, _levels(step, stage, agent), stage, agent))
        return step

    def map(
        self,
        name: str,
        step: Any,
        *,
        over: str,
        into: str,
        concurrency: int | None = None,
        wait: WaitPolicy | None = None,
        collect: bool = False,
    ) -> None:
        """Call a step for every item of the list under `over`, and put the results under `into`, in order."""
        if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
            raise DefinitionError(f"step {name!r}: concurrency is a whole number from 1, not {concurrency!r}")
        _check_wait(f"step {name!r}", wait)
        self._put(MapNode(name, _as_step(step, None, {}), over, into, concurrency, wait or All(), collect))

    def wait(
        self,
        name: str,
        *,
        signal: str | None = None,
        into: str | None = None,
        timeout: float | None = None,
        default: Any = _NO_DEFAULT,
    ) -> None:
        """Wait for a signal, durably, and put its payload under `into`; without a default a timeout fails the run."""
        if timeout is not None:
            check_number(timeout, f"step {name!r}: a timeout in seconds", 0)
        self._put(WaitNode(name, check_name(signal or name, "signal"), into, timeout, default))

    def delay(self, name: str, seconds: float) -> None:
        """Sleep, durably."""
        check_number(seconds, f"step {name!r}: a delay in seconds", 0)
        self._put(DelayNode(name, float(seconds)))

    def edge(self, source: str, target: str, when: Predicate | None = None) -> None:
        """After `source` comes `target`, if `when` holds for the state; edges are tried in the order given."""
        self._must_be_open()
        if when is not None and (not callable(when) or inspect.iscoroutinefunction(when)):
            what = f"{when!r}" if not callable(when) else "an async one, which would have to be waited for"
            raise DefinitionError(f"edge {source!r} -> {target!r}: when= is a plain function of the state, not {what}")
        self.edges.setdefault(source, []).append(Edge(source, target, when))

    def parallel(
        self,
        name: str,
        branches: Iterable[str],
        join: str,
        *,
        wait: WaitPolicy | None = None,
        collect: bool = False,
        report: str | None = None,
    ) -> None:
        """After `name` go all branches at once, each up to `join`, which comes when enough of them are there.

        `name` may be a step or just the name of this point. With `collect` a failed branch does not end the others;
        `report` names a key of the state for how it went: coverage, degraded, failed.
        """
        ways, own = _several(branches, f"parallel {name!r}: branches"), True
        _check_wait(f"parallel {name!r}", wait, len(ways))
        if name in self.nodes and not isinstance(self.nodes[name], ParallelNode):
            point = f"{name}.fork"
            self.edge(name, point)
            name, own = point, False
        self._put(ParallelNode(name, ways, join, wait or All(), collect, report), check=own)

    def entry(self, name: str) -> None:
        """Where a run begins."""
        self._must_be_open()
        if self.entry_name is not None and self.entry_name != name:
            raise DefinitionError(f"graph {self.name!r} begins at {self.entry_name!r} already; it has one entry")
        self.entry_name = name

    def exit(self, *names: str) -> None:
        """Where a run may end: after such a step, unless one of its edges holds."""
        self._must_be_open()
        self.exits.update(dict.fromkeys(names))

    def _put(self, node: AnyNode, *, check: bool = True) -> None:
        self._must_be_open()
        check_name(node.name, "step")
        if check and any(sign in node.name for sign in "/#."):
            raise DefinitionError(f"graph {self.name!r}: a step's name has no '/', '#' or '.', as {node.name!r} has")
        if node.name in self.nodes:
            raise DuplicateName(f"graph {self.name!r} has two steps named {node.name!r}; give one another name=")
        self.nodes[node.name] = node

    def _must_be_open(self) -> None:
        if self._in_use:
            raise DefinitionError(
                f"graph {self.name!r} is in use and can no longer be changed; change it where it is made"
            )

    # -- reading it ---------------------------------------------------------------------------------------------------

    def shape(self) -> Shape:
        """The graph as plain data, for validation and pictures."""
        nodes = tuple(Node(name, node.kind, _label(node)) for name, node in self.nodes.items())
        arrows: list[Arrow] = []
        for edges in self.edges.values():
            arrows += [Arrow(e.source, e.target, "" if e.when is None else described(e.when)) for e in edges]
        for node in self.nodes.values():
            if isinstance(node, ParallelNode):
                arrows += [Arrow(node.name, branch, "", "fork") for branch in node.branches]
                arrows.append(Arrow(node.name, node.join, str(node.wait), "join"))
        return Shape(self.name, "graph", nodes, tuple(arrows), self.entry_name, tuple(self.exits), self.max_iterations)

    def definition(self) -> str:
        """The whole definition as lines of text: what two versions are compared by."""
        lines = [str(node) for node in self.nodes.values()]
        lines += [str(edge) for edges in self.edges.values() for edge in edges]
        lines += [f"reducer {key} {reducing.described(one)}" for key, one in sorted(self.reducers.items())]
        lines += [f"entry {self.entry_name}", *(f"exit {name}" for name in self.exits)]
        return "\n".join([*lines, f"max_iterations {self.max_iterations}"])

    @property
    def fingerprint(self) -> str:
        """What identifies the definition: its name and version, and a digest of all that it says."""
        self.close()
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = sha256(self.definition().encode("utf-8", "replace")).hexdigest()[:16]
        return f"graph:{self.name}:{self.version}:{digest}"

    @functools.cached_property
    def values(self) -> Values:
        """The codec that knows the types of the schema and of the steps' signatures."""
        annotations: list[Any] = [] if self.schema is None else [self.schema.cls]
        for node in self.nodes.values():
            if isinstance(node, StepNode | MapNode):
                annotations += _hints(node.step.fn)
        return Values(parent=VALUES, annotations=lambda: annotations)

    @functools.cached_property
    def trees(self) -> Trees:
        """What turns values of the state into what is stored."""
        return Trees(self.values)

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a graph that has problems, and a first state that is none, before anything is stored."""
        self.close()
        first = args[0] if args else None
        if len(args) > 1 or not (first is None or isinstance(first, Mapping)):
            raise DefinitionError(
                f"graph {self.name!r} is started with its first state: a dictionary, or its keys by name; "
                f"not {', '.join(type(one).__name__ for one in args)}"
            )
        if self.schema is not None:
            self.stored_arguments(args, kwargs)

    def stored_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The first state as it is stored: converted to the types of the schema, or refused."""
        if self.schema is None:
            return super().stored_arguments(args, kwargs)
        where = f"graph {self.name!r}: its first state"
        first = [self.schema.converted(one or {}, where) for one in args]
        return [first, self.schema.converted(kwargs, where)]

    def close(self) -> None:
        """Check the whole definition before it is used for the first time; it cannot be changed after that."""
        if self._in_use:
            return
        check(self.shape(), self._unknown_names(), self._placed)
        self._in_use = True

    def problems(self) -> list[Problem]:
        """Everything that is wrong with it, at once: errors, which keep it from being used, and warnings."""
        return [*map(self._placed, (*problems(self.shape()), *self._unknown_names()))]

    def _placed(self, problem: Problem) -> Problem:
        """With the line of the step's function, or else that of the graph."""
        found = _NAMED_STEP.fullmatch(problem.where)
        node = self.nodes.get(found[1]) if found is not None else None
        place = place_of(node.step.fn, node.name) if isinstance(node, StepNode | MapNode) else self.place
        return replace(problem, file=place.file, line=place.line)

    def _unknown_names(self) -> list[Problem]:
        """Options that name steps which are not there."""
        named = {
            "interrupt_before": sorted(self.interrupt_before),
            "interrupt_after": sorted(self.interrupt_after),
            "durability": self.durability.names,
        }
        return [
            Problem("error", option, f"there is no step {name!r}", _nearest(name, self.nodes))
            for option, names in named.items()
            for name in names
            if name not in self.nodes
        ]


def _label(node: AnyNode) -> str:
    """What a picture says of a point beside its kind."""
    if isinstance(node, MapNode):
        return f"{node.step.name} over {node.over}"
    if isinstance(node, WaitNode):
        return f"for {node.signal}"
    if isinstance(node, DelayNode):
        return f"{node.seconds:g} s"
    if isinstance(node, ChildNode):
        return node.workflow.name
    named = (
        [f"{level} {name}" for level, name in (("stage", node.stage), ("agent", node.agent)) if name]
        if isinstance(node, StepNode)
        else []
    )
    return ", ".join(named)


def _nearest(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), 1)
    return f"did you mean {close[0]!r}?" if close else "name a step of this graph"


def _several(names: Iterable[str], what: str) -> tuple[str, ...]:
    """Names of steps; one text alone would be taken for its letters."""
    if isinstance(names, str):
        raise DefinitionError(f"{what} is a list of names, not the text {names!r}")
    return tuple(names)


def _check_wait(what: str, wait: Any, ways: int | None = None) -> None:
    """Refuse what is no policy, or one that so many ways can never meet."""
    if wait is None:
        return
    if not isinstance(wait, All | AnyOf | Quorum):
        raise DefinitionError(f"{what}: wait= is ks.All(), ks.Any() or ks.Quorum(n), not {wait!r}")
    if ways is not None and isinstance(wait, Quorum) and wait.n > ways:
        raise DefinitionError(f"{what}: it waits for {wait.n} of its branches, and has {ways}")


def _names(given: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(given)


def _as_step(what: Any, name: str | None, options: dict[str, Any]) -> Step[..., Any]:
    if isinstance(what, Step):
        if options:
            raise DefinitionError(f"step {what.name!r} is a step already; give it its options where it is made")
        return what
    if not callable(what):
        raise DefinitionError(f"a step is a function, a step or a workflow, not {what!r}")
    return Step(what, name=name, **options)


def _levels(step: Step[..., Any], stage: str | None, agent: str | None) -> tuple[str, ...]:
    """Which states the parameters of a step ask for, in their order."""
    parameters = list(inspect.signature(step.fn).parameters.values())
    if step.transactional:
        parameters = parameters[1:]
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if not needed and not parameters:
        return ()
    asked = needed or [parameters[0].name]
    levels = tuple(one if one in LEVELS else "state" for one in asked)
    if len(set(levels)) < len(levels):
        raise DefinitionError(
            f"step {step.name!r} takes {', '.join(asked)}; a graph's step is given the state, and by these names the "
            "state of its stage and of its agent: def step(state, stage, agent)"
        )
    for level, name in (("stage", stage), ("agent", agent)):
        if level in levels and name is None:
            raise DefinitionError(f"step {step.name!r} takes {level!r}, but names no {level}=")
    return levels


def _hints(fn: Callable[..., Any]) -> list[Any]:
    try:
        return list(inspect.get_annotations(fn, eval_str=True).values())
    except Exception:  # noqa: BLE001 - a name that is not there (yet): the values then say what is missing
        return []
