"""A graph: steps over a state, and edges that choose the next step."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from difflib import get_close_matches
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, cast

from ..checks import check_name, check_number, check_seconds, seconds_of
from ..errors import DefinitionError, DuplicateName
from ..model.problem import Problem
from ..model.state import State
from ..policies import All, Budget, Durability, Quorum, Retain, WaitPolicy
from ..policies import reduce as reducing
from ..policies.classify import Classify
from ..policies.when import Predicate, described
from ..ports import CURRENT
from ..values import VALUES, Values
from ..values.annotations import hints_of
from ..values.trees import Trees
from .definition import Step, Workflow, remember
from .fingerprint import policies_of
from .hooks import Hooks
from .migration import MigrationInfo
from .schema import KeyType, Schema
from .shape import Arrow, Node, Shape
from .source import place_here, place_of
from .validate import check, problems

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # a type checker has it; without a schema, steps and edges see a State

    from ..policies import Recovery, Schedule

    S = TypeVar("S", default=State)
    R = TypeVar("R", default=dict[str, Any])
else:
    from typing import TypeVar

    S = TypeVar("S")
    R = TypeVar("R")

#: Default maximum number of steps that a run may pass; ends endless loops.
MAX_ITERATIONS = 1000
#: Parameter names of a step that receive a state. Any other first parameter receives the graph's state.
LEVELS = ("state", "stage", "agent")

_NO_DEFAULT: Any = object()
_NAMED_STEP = re.compile(r"step '(.*)'")


class Goto:
    """Return value of a step that names the next step, together with its change of the state."""

    def __init__(self, target: str, change: Mapping[str, Any] | None = None, /, **values: Any) -> None:
        self.target = target
        self.change: Any = change if not values else {**(change or {}), **values}


class Changes:
    """Return value of a step that also changes the state of its stage or its agent."""

    def __init__(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        stage: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
    ) -> None:
        self.state, self.stage, self.agent = state, stage, agent


# -- parts of a graph --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepNode:
    """A function of the state. One that `waits` is code of the workflow, whose calls are recorded one by one."""

    name: str
    step: Step[..., Any]
    takes: tuple[str, ...] = ("state",)
    stage: str | None = None
    agent: str | None = None
    waits: bool = False
    kind = "step"

    def __str__(self) -> str:
        named = [f"{level}={name}" for level, name in (("stage", self.stage), ("agent", self.agent)) if name]
        waits = ["waits"] if self.waits else []
        return " ".join(["step", self.name, *named, *waits, policies_of(self.step)]).rstrip()


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
    heartbeat: float | None = None
    kind = "wait"

    @property
    def has_default(self) -> bool:
        return self.default is not _NO_DEFAULT

    def __str__(self) -> str:
        into = f" into {self.into}" if self.into is not None else ""
        timeout = f" timeout {self.timeout}" if self.timeout is not None else ""
        default = f" default {self.default!r}" if self.has_default else ""
        heartbeat = f" heartbeat {self.heartbeat}" if self.heartbeat is not None else ""
        return f"wait {self.name} for {self.signal}{into}{timeout}{default}{heartbeat}"


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
    """Branches that run concurrently up to their join."""

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
    """A way from one step to the next; the first edge whose predicate holds is taken."""

    source: str
    target: str
    when: Predicate | None = None

    def __str__(self) -> str:
        when = "" if self.when is None else f" when {described(self.when)}"
        return f"edge {self.source} -> {self.target}{when}"


def steps_in(definition: str, asked: str) -> list[str]:
    """Return the steps in a definition's text. Names end at the first space, except `asked`, which may have spaces."""
    kinds = tuple(f"{node.kind} " for node in (StepNode, MapNode, WaitNode, DelayNode, ChildNode, ParallelNode))
    lines = [line.partition(" ")[2] for line in definition.splitlines() if line.startswith(kinds)]
    whole = [asked for line in lines if line.startswith(asked) and line[len(asked) :][:1] in ("", " ", ":")]
    return whole or [line.partition(" ")[0].rstrip(":") for line in lines]


def _waiting(node: MapNode | ParallelNode) -> str:
    """Return the wait policy of concurrent work as text; empty for the default."""
    wait = "" if node.wait == All() else f" wait {node.wait}"
    return f"{wait} collect" if node.collect else wait


# -- the graph ---------------------------------------------------------------------------------------------------------


class OfState(Protocol):
    """A function of a state, whatever its schema: one of `ks.when`, or one that takes a mapping."""

    def __call__(self, state: State, /) -> Any: ...


class Graph(Workflow[..., R], Generic[S, R]):
    """A state machine over an immutable state: steps return their changes, edges choose the next step.

    `schema` is the class of the state, `S`: its types, defaults, required keys, validators and reducers hold.
    `result` is the class of the result, `R`, made of the last state; without it, the result is a dictionary.
    `reducers` combine the values that parallel writers give to a key: `append`, `add`, `max`, `min`, `merge`, or a
    function of the old and the given value. A run may pass at most `max_iterations` steps. It waits for a person before
    the steps named in `interrupt_before` and after those named in `interrupt_after`. With `keep="newest"`, a run
    removes records that are older than its newest whole states. The other options are those of
    `ks.workflow`: `name`, `version`, `on_change`, `migrate`, `durability`, `budget`, `retain`, `schedule`,
    `hooks`, `step_hooks`, `classify`, `undo`, `recovery` and `executor`.
    """

    carries_state = True

    if not TYPE_CHECKING:

        def __class_getitem__(cls, classes: Any) -> Any:
            """Allow `Graph[S]`: the result of a run is a dictionary by default."""
            return super().__class_getitem__(classes if isinstance(classes, tuple) else (classes, dict[str, Any]))

    def __init__(
        self,
        name: str,
        *,
        version: str = "1",
        schema: type[S] | None = None,
        result: type[R] | None = None,
        reducers: Mapping[str, reducing.Named | reducing.Reducer] | None = None,
        max_iterations: int = MAX_ITERATIONS,
        keep: Literal["all", "newest"] = "all",
        interrupt_before: Iterable[str] = (),
        interrupt_after: Iterable[str] = (),
        on_change: Literal["fail", "compatible", "pin"] = "fail",
        migrate: Callable[[MigrationInfo], Any] | None = None,
        durability: Durability | str | None = None,
        budget: Budget | None = None,
        retain: Retain | str | None = None,
        schedule: Schedule | None = None,
        hooks: Hooks | None = None,
        step_hooks: Hooks | None = None,
        classify: Classify | None = None,
        undo: Callable[..., Any] | None = None,
        recovery: Recovery | str | Callable[..., Any] | None = None,
        executor: Any = None,
    ) -> None:
        async def walk(state: Mapping[str, Any] | None = None, /, **values: Any) -> Any:
            scope = CURRENT.get()
            if scope is None or scope.in_step:
                raise DefinitionError(f"graph {name!r} cannot be called; start it with engine.start or ks.run")
            last = await scope.walk(self, {**(state or {}), **values})
            return last if self.result is None else self.result.result(last, f"the result of graph {self.name!r}")

        walk.__name__ = str(name)
        super().__init__(
            walk,
            name=name,
            version=version,
            on_change=on_change,
            migrate=migrate,
            durability=durability,
            budget=budget,
            retain=retain,
            schedule=schedule,
            hooks=hooks,
            step_hooks=step_hooks,
            classify=classify,
            undo=undo,
            recovery=recovery,
            executor=executor,
        )
        self.place = place_here(self.name)
        if type(max_iterations) is not int or max_iterations < 1:
            raise DefinitionError(f"graph {name!r}: max_iterations is a whole number from 1, not {max_iterations!r}")
        self.max_iterations = max_iterations
        if keep not in ("all", "newest"):
            raise DefinitionError(f"graph {name!r}: keep is 'all' or 'newest', not {keep!r}")
        self.keep = keep
        self.schema = None if schema is None else Schema(schema)
        self.result = None if result is None else Schema(result, "result=")
        self._reducers = reducing.reducers(reducers)
        self.interrupt_before = frozenset(_several(interrupt_before, f"graph {name!r}: interrupt_before"))
        self.interrupt_after = frozenset(_several(interrupt_after, f"graph {name!r}: interrupt_after"))
        self.nodes: dict[str, AnyNode] = {}
        self.edges: dict[str, list[Edge]] = {}
        self.entry_name: str | None = None
        self.exits: dict[str, None] = {}
        self._in_use = False
        remember(self)

    @functools.cached_property
    def reducers(self) -> dict[str, reducing.Reducer]:
        """The reducers by key: those of the annotations of the schema, and the given ones, which win."""
        return self._reducers if self.schema is None else {**self.schema.reducers, **self._reducers}

    @property
    def has_undo(self) -> bool:
        """Whether a step may be undone; the steps that a step with `waits` calls are not known here."""
        return any(
            node.waits or node.step.undo is not None
            if isinstance(node, StepNode)
            else isinstance(node, MapNode | ChildNode) and _undo_of(node) is not None
            for node in self.nodes.values()
        )

    @functools.cached_property
    def typed(self) -> frozenset[str]:
        """The steps that take the state as an instance of the schema, because they annotate it so."""
        schema = self.schema
        if schema is None or not schema.has_instances:
            return frozenset()
        steps = [node for node in self.nodes.values() if isinstance(node, StepNode) and "state" in node.takes]
        return frozenset(node.name for node in steps if _state_type(node) is schema.cls)

    # -- building ------------------------------------------------------------------------------------------------------

    def step(self, fn: Any = None, /, **options: Any) -> Any:
        """Make a function of the state a step of this graph; `options` are those of `add`."""
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
        waits: bool = False,
        takes: Iterable[str] | None = None,
        gives: str | None = None,
        **options: Any,
    ) -> Any:
        """Add a step: a function of the state, a step made of one, or a workflow, which becomes a child run.

        `stage` and `agent` name further states that the step may take and change. An async function that `waits` is
        code of the workflow, without options of a step: it calls steps, waits and starts children, each recorded, so
        that nothing runs again after a wait. A workflow receives the keys that it `takes` (by default those of its
        parameters), and its result is stored under the key that it `gives`.
        """
        if isinstance(what, Workflow):
            if options or stage or agent or waits:
                raise DefinitionError(f"workflow {what.name!r} takes no step's options; give it its own")
            self._put(ChildNode(check_name(name or what.name, "step"), what, _names(takes), gives))
            return what
        if takes is not None or gives is not None:
            raise DefinitionError("takes= and gives= are for workflows; a step is given the state, returns its change")
        step: Step[..., Any] = _as_step(what, name, options)
        if waits and (isinstance(what, Step) or options or not step.is_async):
            raise DefinitionError(
                f"step {name or step.name!r} has waits=True, so it must be a bare `async def` function without options "
                "of a step; give options to the steps that it calls"
            )
        for label, value in (("stage", stage), ("agent", agent)):
            if value is not None:
                check_name(value, label)
        if step.streams and step.collect is None:
            raise DefinitionError(
                f"step {step.name!r} is a generator, and a list of items is no change of the state; give it collect="
            )
        self._put(StepNode(name or step.name, step, _levels(step, stage, agent), stage, agent, waits))
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
        """Call a step for every item of the list under `over`, and store the results under `into`, in order."""
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
        timeout: float | timedelta | None = None,
        default: Any = _NO_DEFAULT,
        heartbeat: float | timedelta | None = None,
    ) -> None:
        """Wait durably for a signal and store its payload under `into`. Without a default, a timeout fails the run.

        With `heartbeat`, the time is also over when no `beat` has come for that many seconds.
        """
        longest, silence = seconds_of(timeout), seconds_of(heartbeat)  # a number as it is: it is in the fingerprint
        if longest is not None:
            check_number(longest, f"step {name!r}: a timeout in seconds", 0)
        if silence is not None:
            check_number(silence, f"step {name!r}: a heartbeat in seconds", 0.001)
        self._put(WaitNode(name, check_name(signal or name, "signal"), into, longest, default, silence))

    def delay(self, name: str, seconds: float | timedelta) -> None:
        """Sleep durably."""
        self._put(DelayNode(name, check_seconds(seconds, f"step {name!r}: a delay in seconds", 0)))

    def edge(self, source: str, target: str, when: Callable[[S], Any] | OfState | None = None) -> None:
        """Lead from `source` to `target` if `when` holds for the state. Edges are tried in order."""
        self._must_be_open()
        if when is not None and (not callable(when) or inspect.iscoroutinefunction(when)):
            what = f"{when!r}" if not callable(when) else "an async one, which would have to be waited for"
            raise DefinitionError(f"edge {source!r} -> {target!r}: when= is a plain function of the state, not {what}")
        self.edges.setdefault(source, []).append(Edge(source, target, cast("Predicate | None", when)))

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
        """Run all branches after `name` concurrently, each up to `join`, which runs when enough of them have arrived.

        `name` may be a step or just the name of this point. With `collect`, a failed branch does not end the others.
        `report` names a key of the state that receives the result: coverage, degraded, failed.
        """
        ways, own = _several(branches, f"parallel {name!r}: branches"), True
        _check_wait(f"parallel {name!r}", wait, len(ways))
        if name in self.nodes and not isinstance(self.nodes[name], ParallelNode):
            point = f"{name}.fork"
            self.edge(name, point)
            name, own = point, False
        self._put(ParallelNode(name, ways, join, wait or All(), collect, report), check=own)

    def entry(self, name: str) -> None:
        """Set the step at which a run begins."""
        self._must_be_open()
        if self.entry_name is not None and self.entry_name != name:
            raise DefinitionError(f"graph {self.name!r} begins at {self.entry_name!r} already; it has one entry")
        self.entry_name = name

    def exit(self, *names: str) -> None:
        """Let a run end after these steps, unless one of their edges holds."""
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

    # -- reading -------------------------------------------------------------------------------------------------------

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
        """The whole definition as lines of text, for comparing two versions."""
        lines = [str(node) for node in self.nodes.values()]
        lines += [str(edge) for edges in self.edges.values() for edge in edges]
        lines += [f"reducer {key} {reducing.described(one)}" for key, one in sorted(self.reducers.items())]
        lines += [f"entry {self.entry_name}", *(f"exit {name}" for name in self.exits)]
        return "\n".join([*lines, f"max_iterations {self.max_iterations}"])

    @property
    def fingerprint(self) -> str:
        """The identity of the definition: its name, its version and a digest of its text."""
        self.close()
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = sha256(self.definition().encode("utf-8", "replace")).hexdigest()[:16]
        return f"graph:{self.name}:{self.version}:{digest}"

    @functools.cached_property
    def values(self) -> Values:
        """The codec with the types of the schema and of the steps' signatures."""
        annotations: list[Any] = [one.cls for one in (self.schema, self.result) if one is not None]
        for node in self.nodes.values():
            if isinstance(node, StepNode | MapNode):
                annotations += _hints(node.step.fn)
        return Values(parent=VALUES, annotations=lambda: annotations)

    def named_steps(self) -> list[Step[..., Any]]:
        return [node.step for node in self.nodes.values() if isinstance(node, StepNode | MapNode)]

    def hints(self) -> dict[str, Any]:
        """The class of the result, if there is one; the schema has the types of the first state."""
        return {} if self.result is None else {"return": self.result.cls}

    def signal_type(self, signal: str) -> Any:
        waits = [node for node in self.nodes.values() if isinstance(node, WaitNode) and node.signal == signal]
        keys = {node.into for node in waits}
        return self.type_of(keys.pop()) if len(keys) == 1 else None

    def type_of(self, key: str | None) -> KeyType | None:
        """Return the type of a key that is overwritten, or None if there is no schema or the key has a reducer."""
        return None if key is None or self.schema is None or key in self.reducers else self.schema.type_of(key)

    @functools.cached_property
    def trees(self) -> Trees:
        """The converter between values of the state and their stored form."""
        schema = self.schema
        return Trees(self.values, None if schema is None or not schema.has_instances else schema.instance)

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an invalid graph, and an invalid first state, before anything is stored."""
        self.close()
        first = args[0] if args else None
        if self.schema is not None:
            first = self.schema.plain(first)
        if len(args) > 1 or not (first is None or isinstance(first, Mapping)):
            model = "" if self.schema is None or not self.schema.has_instances else f"a {self.schema.name}, "
            raise DefinitionError(
                f"graph {self.name!r} is started with its first state: {model}a dictionary, or its keys by name; "
                f"not {', '.join(type(one).__name__ for one in args)}"
            )
        if self.schema is not None:
            self.stored_arguments(args, kwargs)

    def stored_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the first state in stored form, validated and completed with the schema's defaults, or refuse it."""
        if self.schema is None:
            return super().stored_arguments(args, kwargs)
        first = self.schema.first(self._first(args, kwargs), f"graph {self.name!r}: its first state")
        return [[first], {}] if args else [[], first]

    def same_arguments(self, stored: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if self.schema is None:
            return super().same_arguments(stored, args, kwargs)
        digest = self.values.digest
        return self.schema.same_first(
            self._first(*stored), self._first(args, kwargs), lambda one, other: digest(one) == digest(other)
        )

    def _first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first state as it was given: a dictionary or an instance of the schema, and keys by name."""
        given = args[0] if args else None
        if self.schema is not None:
            given = self.schema.plain(given)
        return {**(given or {}), **kwargs}

    def close(self) -> None:
        """Check the whole definition before its first use, and forbid further changes."""
        if self._in_use:
            return
        check(self.shape(), self._unknown_names(), self._placed)
        self._in_use = True

    def problems(self) -> list[Problem]:
        """Return every problem: errors, which prevent its use, and warnings."""
        return [*map(self._placed, (*problems(self.shape()), *self._unknown_names()))]

    def _placed(self, problem: Problem) -> Problem:
        """Return the problem with the line of the step's function, or else that of the graph."""
        found = _NAMED_STEP.fullmatch(problem.where)
        node = self.nodes.get(found[1]) if found is not None else None
        place = place_of(node.step.fn, node.name) if isinstance(node, StepNode | MapNode) else self.place
        return replace(problem, file=place.file, line=place.line)

    def _unknown_names(self) -> list[Problem]:
        """Return the options that name unknown steps."""
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
    """Return the label of a node in a picture, beside its kind."""
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
    """Return names of steps; refuse a single text, which would be split into letters."""
    if isinstance(names, str):
        raise DefinitionError(f"{what} is a list of names, not the text {names!r}")
    return tuple(names)


def _check_wait(what: str, wait: Any, ways: int | None = None) -> None:
    """Refuse anything but a wait policy, and a quorum larger than the number of branches."""
    if wait is None:
        return
    if not isinstance(wait, WaitPolicy):
        raise DefinitionError(f"{what}: wait= is ks.All(), ks.Any(), ks.Quorum(n) or ks.Tolerate(...), not {wait!r}")
    if ways is not None and isinstance(wait, Quorum) and wait.n > ways:
        raise DefinitionError(f"{what}: it waits for {wait.n} of its branches, and has {ways}")


def _names(given: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(given)


def _undo_of(node: MapNode | ChildNode) -> Step[..., Any] | None:
    return node.step.undo if isinstance(node, MapNode) else node.workflow.undo


def _as_step(what: Any, name: str | None, options: dict[str, Any]) -> Step[..., Any]:
    if isinstance(what, Step):
        if options:
            raise DefinitionError(f"step {what.name!r} is a step already; give it its options where it is made")
        step = what
    elif callable(what):
        step = Step(what, name=name, **options)
    else:
        raise DefinitionError(f"a step is a function, a step or a workflow, not {what!r}")
    if step.cache is not None:
        raise DefinitionError(
            f"step {step.name!r} has cache=, but the input of a graph's step is the whole state; call the cached step "
            "in a function or a dag, or in the body of this step"
        )
    if step.record_input:
        raise DefinitionError(
            f"step {step.name!r} has record_input=, which a graph does not need: its input is the state, "
            "which the history holds"
        )
    return step


def _levels(step: Step[..., Any], stage: str | None, agent: str | None) -> tuple[str, ...]:
    """Return which states the parameters of a step take, in order."""
    asked = _asked(step)
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


def _asked(step: Step[..., Any]) -> list[str]:
    """Return the parameters of a step that receive a state."""
    parameters = list(inspect.signature(step.fn).parameters.values())[1 if step.transactional else 0 :]
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return needed or [one.name for one in parameters[:1]]


def _state_type(node: StepNode) -> Any:
    """Return the annotation of the parameter that takes the state."""
    return hints_of(node.step.fn).get(_asked(node.step)[node.takes.index("state")])


def _hints(fn: Callable[..., Any]) -> list[Any]:
    try:
        return list(inspect.get_annotations(fn, eval_str=True).values())
    except Exception:  # noqa: BLE001 - a name is not defined yet; the error for a value then names it
        return []
