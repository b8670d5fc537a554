"""Makes a graph or a dag of an examined file, with functions that the caller names; the file itself imports nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import DefinitionError, KeepstepError
from ..policies import Budget
from .dag import Dag
from .declarative_cel import VARIABLES, Condition
from .declarative_check import Examined, exits_of, inside, items, kind_of
from .declarative_http import DEFAULT_SECONDS, MAX_BYTES, Request
from .declarative_parts import (
    adapted,
    asking,
    body_of,
    data,
    joining,
    nothing,
    own_options,
    parts,
    retried,
    said,
    seconds,
    sending,
    waits,
)
from .declarative_read import Value
from .declarative_schema import SUGGESTIONS, nearest, problem, shown
from .definition import KNOWN, Step, Workflow
from .graph import Graph
from .place import Place
from .shape import Problem


@dataclass(frozen=True)
class Names:
    """What a file may name, given by the caller: by name, or as something that a module of theirs holds."""

    modules: tuple[ModuleType, ...] = ()
    functions: Mapping[str, Any] = field(default_factory=dict)
    agents: Mapping[str, Any] = field(default_factory=dict)
    workflows: Mapping[str, Workflow[..., Any]] = field(default_factory=dict)

    def all_functions(self) -> dict[str, Any]:
        """Functions and steps by their names; what a module keeps to itself is not among them."""
        return {**self._held(lambda one: isinstance(one, Step) or inspect.isfunction(one)), **self.functions}

    def all_agents(self) -> dict[str, Any]:
        """What can be called, but for classes."""
        held = self._held(lambda one: callable(one) and not isinstance(one, type | Workflow))
        return {**held, **self.functions, **self.agents}

    def all_workflows(self) -> dict[str, Workflow[..., Any]]:
        """Workflows, by their own names."""
        held = self._held(lambda one: isinstance(one, Workflow)).values()
        return {**{one.name: one for one in held}, **self.workflows}

    def _held(self, fits: Callable[[Any], bool]) -> dict[str, Any]:
        return {
            name: one
            for module in reversed(self.modules)
            for name, one in vars(module).items()
            if not name.startswith("_") and fits(one)
        }


def checked_names(
    modules: Iterable[Any], functions: Mapping[str, Any] | None, agents: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """What the caller gave, or a clear error."""
    given = (modules,) if isinstance(modules, ModuleType) else tuple(modules)
    for module in given:
        if not isinstance(module, ModuleType):
            raise DefinitionError(f"modules= takes modules that are imported already, not {module!r}")
    for what, table in (("functions", functions), ("agents", agents)):
        for name, one in (table or {}).items():
            if not callable(one):
                raise DefinitionError(f"{what}= takes callables by name; {name!r} is {one!r:.60}")
    return given, dict(functions or {}), dict(agents or {})


class Builder:
    """One file on its way to a workflow; `problems` gathers what is wrong with what the file names."""

    def __init__(self, examined: Examined, names: Names, file: str) -> None:
        assert examined.value is not None  # noqa: S101 - a file with errors is not built
        self.root, self.form, self.file = examined.value, examined.form, file
        self.functions, self.agents, self.workflows = names.all_functions(), names.all_agents(), names.all_workflows()
        self.steps: dict[str, Value] = self.root.data["steps"].data
        self.variable = VARIABLES[self.form]
        self.name: str = self.root.data["metadata"].data["name"].data
        self.place = Place(str(Path(file).resolve()), 1, "", self.name)
        self.problems: list[Problem] = []

    def check_names(self) -> list[Problem]:
        """What the file names and the caller did not give."""
        look = {"function": self._function, "map": self._function, "agent": self._agent, "subworkflow": self._workflow}
        for name, step in self.steps.items():
            if kind_of(step) in look:
                look[kind_of(step)](name, step)
        return self.problems

    def check(self) -> list[Problem]:
        """Everything that would keep the workflow from being built; the process does not know it by this."""
        before = KNOWN.get(self.name)
        self.build()
        _forget(self.name, before)
        return self.problems

    def build(self) -> Workflow[..., Any] | None:
        """The workflow, which the process then knows by its name; None if there are problems."""
        if self.check_names() or self._is_taken():
            return None
        before = KNOWN.get(self.name)
        workflow: Workflow[..., Any] | None = None
        try:
            workflow = self._graph() if self.form == "graph" else self._dag()
        except KeepstepError as error:  # what the policies of the whole do not allow
            self.problems.append(problem("file", str(error), "", self.root.at))
        if self.problems or workflow is None:
            _forget(self.name, before)
            return None
        workflow.place = self.place
        workflow.starting = self._starting()
        workflow.redacting = tuple(one.data for one in items(inside(self.root, "policies", "security", "redact")))
        workflow.__doc__ = self._text("metadata", "description") or f"The workflow of {self.file}."
        return workflow

    def _is_taken(self) -> bool:
        """Whether another place defines a workflow of this name; the same file may be loaded again."""
        other = KNOWN.get(self.name)
        if other is None or other.place.is_local or other.source == (self.place.file, self.place.name):
            return False
        what = f"another workflow is named {self.name!r}, at {other.place}"
        at = self.root.data["metadata"].data["name"].at
        self.problems.append(problem("metadata.name", what, "give one of them another name", at))
        return True

    # -- a graph ---------------------------------------------------------------------------------------------------

    def _graph(self) -> Graph:
        graph = Graph(
            self.name,
            version=self._text("metadata", "version") or "1",
            reducers=self._plain("spec", "reducers"),
            max_iterations=int(self._plain("policies", "resilience", "max_iterations") or 1000),
            durability=self._text("policies", "resilience", "durability"),
            budget=self._budget(),
            on_change=self._text("policies", "resilience", "on_change") or "fail",  # type: ignore[arg-type]
            interrupt_before=self._plain("policies", "observability", "interrupt_before") or (),
            interrupt_after=self._plain("policies", "observability", "interrupt_after") or (),
        )
        for name, step in self.steps.items():
            self._told(step, name, self._put, graph, name, step)
        for name, step in self.steps.items():
            self._lead(graph, name, step)
        graph.entry(self._text("spec", "entrypoint") or next(iter(self.steps)))
        graph.exit(*exits_of(self.steps))
        return graph

    def _put(self, graph: Graph, name: str, step: Value) -> None:
        kind, into = kind_of(step), self._into(name, step)
        options: dict[str, Any] = {"stage": data(step, "stage")} if "stage" in step.data else {}
        if kind == "delay":
            graph.delay(name, seconds(step.data["for"]))
        elif kind == "approval":
            default = {"approve": True, "deny": False}.get(data(step, "on_timeout"))
            more = {} if default is None else {"default": default}
            limit = seconds(step.data["timeout"]) if "timeout" in step.data else None
            graph.wait(name, signal=data(step, "signal") or name, into=into, timeout=limit, **more)
        elif kind == "map":
            concurrency = data(step, "concurrency") or self._whole("spec", "resources", "concurrency")
            found = self._function(name, step)
            made: Step[..., Any] = Step(body_of(found), name=f"{name}-item", **self._options(step, found))
            collect, wait = bool(data(step, "collect")), waits(step.data.get("wait"))
            limit = int(concurrency) if concurrency is not None else None
            said(made, name, step)
            graph.map(name, made, over=data(step, "over"), into=into, concurrency=limit, wait=wait, collect=collect)
        elif kind == "subworkflow":
            child = self._workflow(name, step)
            takes = [one.data for one in items(step.data.get("takes"))] or None
            graph.add(child, name, takes=takes, gives=data(step, "into"))
        elif kind in ("branch", "barrier"):
            graph.add(nothing, name)
        elif kind == "agent":
            agent = self._agent(name, step)
            graph.add(self._step(name, step, agent), name, agent=data(step, "agent") or name, **options)
        elif kind == "http":
            request = self._request(name, step)
            graph.add(said(Step(sending(request, into), name=name, **self._options(step)), name, step), name, **options)
        else:
            graph.add(self._step(name, step, self._function(name, step)), name, **options)

    def _lead(self, graph: Graph, name: str, step: Value) -> None:
        following = step.data.get("next")
        if following is not None and isinstance(following.data, tuple):
            barrier = self.steps[data(step, "join")]
            wait, collect = waits(barrier.data.get("wait")), bool(data(barrier, "collect"))
            graph.parallel(name, [one.data for one in following.data], data(step, "join"), wait=wait, collect=collect)
        elif following is not None:
            graph.edge(name, following.data)
        for number, one in enumerate(items(step.data.get("branches"))):
            when = one.data.get("when")
            path = f"steps.{name}.branches[{number}].when"
            graph.edge(name, data(one, "next"), self._condition(when, path))

    # -- a dag -----------------------------------------------------------------------------------------------------

    def _dag(self) -> Dag:
        dag = Dag(
            self.name,
            version=self._text("metadata", "version") or "1",
            durability=self._text("policies", "resilience", "durability"),
            budget=self._budget(),
            on_change=self._text("policies", "resilience", "on_change") or "fail",  # type: ignore[arg-type]
            concurrency=self._whole("spec", "resources", "concurrency"),
            place=self.place,
        )
        for name, step in self.steps.items():
            self._told(step, name, self._need, dag, name, step)
        for one in [] if self.problems else dag.problems():
            found = next((name for name in self.steps if one.where in (name, f"step {name!r}")), "")
            at = self.steps[found].key if found else self.root.key
            self.problems.append(problem(f"steps.{found}" if found else "steps", one.what, one.how, at))
        return dag

    def _need(self, dag: Dag, name: str, step: Value) -> None:
        kind = kind_of(step)
        needed = [one.data for one in items(step.data.get("needs"))]
        renamed = {one.data: parameter for parameter, one in parts(step, "with").items()}
        needs = {renamed.get(one, one.replace("-", "_")): one for one in needed}
        if kind == "subworkflow":
            thing = self._workflow(name, step)
        elif kind == "barrier":
            thing = Step(joining, name=name)
        elif kind == "http":
            thing = said(Step(asking(self._request(name, step)), name=name, **self._options(step)), name, step)
        else:
            found = self._agent(name, step) if kind == "agent" else self._function(name, step)
            thing = said(Step(body_of(found), name=name, **self._options(step, found)), name, step)
        when = self._condition(step.data.get("when"), f"steps.{name}.when")
        wait, place = waits(step.data.get("wait")), Place(self.file, step.key.line, "", name)
        dag.add(thing, name, needs=needs, when=when, wait=wait, place=place)

    # -- what both have --------------------------------------------------------------------------------------------

    def _function(self, name: str, step: Value) -> Any:
        return self._given(name, step, "function", self.functions)

    def _agent(self, name: str, step: Value) -> Any:
        return self._given(name, step, "agent", self.agents)

    def _workflow(self, name: str, step: Value) -> Any:
        return self._given(name, step, "workflow", self.workflows)

    def _given(self, name: str, step: Value, what: str, known: Mapping[str, Any]) -> Any:
        """What a step names, by the step's id if it names nothing else."""
        named = step.data.get(what)
        wanted = named.data if named is not None else name
        if wanted not in known:
            how = (
                nearest(wanted, known) if len(self.problems) < SUGGESTIONS else ""
            ) or f"give it with {what}s= or modules="
            path, at = (f"steps.{name}.{what}", named.at) if named is not None else (f"steps.{name}", step.key)
            self.problems.append(problem(path, f"there is no {what} {shown(wanted)}", how, at))
            return None
        return known[wanted]

    def _step(self, name: str, step: Value, found: Any) -> Step[..., Any]:
        """A step of a graph: the function itself, or one that takes keys of the state and gives a key."""
        keys = {parameter: one.data for parameter, one in parts(step, "with").items()} if "with" in step.data else None
        into = data(step, "into")
        options = self._options(step, found)
        body = body_of(found)
        if keys is not None or into is not None:
            if options.get("transactional"):
                raise DefinitionError("with: and into: do not go with a transactional step; let it take the state")
            options.pop("ignore", None)  # it names parameters, and here there is only the state
            body = adapted(body, keys, into, name)
        return said(Step(body, name=name, **options), name, step)

    def _options(self, step: Value, found: Any = None) -> dict[str, Any]:
        """The options of a step: its own; else those of the function, if it is a step; else those of the file."""
        once = data(step, "at_most_once") is True
        own = own_options(found) if isinstance(found, Step) else {}
        retry = step.data.get("retry") or (None if "retry" in own else inside(self.root, "spec", "retry"))
        limit = step.data.get("timeout") or (None if "timeout" in own else self._usual_timeout())
        options = {**own, **({"at_most_once": True} if once else {})}
        if options.get("at_most_once"):
            options.pop("retry", None)
        elif retry is not None:
            options["retry"] = retried(retry)
        if limit is not None:
            options["timeout"] = seconds(limit)
        return options

    def _usual_timeout(self) -> Value | None:
        return inside(self.root, "policies", "resilience", "timeout")

    def _request(self, name: str, step: Value) -> Request:
        headers: list[tuple[str, str | tuple[str, str]]] = []
        for header, one in parts(step, "headers").items():
            secret = (data(one, "prefix") or "", data(one, "secret")) if isinstance(one.data, dict) else one.data
            headers.append((header, secret))
        body = step.data.get("body")
        sent = None
        if body is not None:
            pairs = body.data.items() if isinstance(body.data, dict) else ((one.data, one) for one in body.data)
            sent = tuple((title, key.data) for title, key in pairs)
        limit = step.data.get("timeout") or self._usual_timeout()
        return Request(
            url=data(step, "url"),
            method=data(step, "method") or ("GET" if body is None else "POST"),
            headers=tuple(headers),
            body=sent,
            expect=frozenset(int(one.data) for one in step.data["expect"].data) if "expect" in step.data else None,
            redirects=data(step, "redirects") != "none",
            max_bytes=int(data(step, "max_bytes") or MAX_BYTES),
            seconds=seconds(limit) if limit is not None else DEFAULT_SECONDS,
            where=f"{self.file}:{step.key.line}: step {name!r}",
        )

    def _condition(self, value: Value | None, path: str) -> Condition | None:
        if value is None:
            return None
        return Condition(value.data, self.variable, f"{self.file}:{value.at.line}: {path}")

    def _into(self, name: str, step: Value) -> str:
        return data(step, "into") or name.replace("-", "_")

    def _budget(self) -> Budget | None:
        given = inside(self.root, "spec", "resources", "budget")
        if given is None:
            return None
        limits = {name: one.data for name, one in given.data.items() if name != "seconds"}
        limits |= {name: int(limits[name]) for name in ("steps", "tokens") if name in limits}
        return Budget(seconds=seconds(given.data["seconds"]) if "seconds" in given.data else None, **limits)

    def _starting(self) -> dict[str, Any]:
        """What runs are started with unless the start says otherwise."""
        found: dict[str, Any] = {}
        tags, limit = self._plain("metadata", "tags"), inside(self.root, "spec", "timeout")
        queue, priority = self._text("spec", "resources", "queue"), self._plain("spec", "resources", "priority")
        if tags:
            found["tags"] = tags
        if limit is not None:
            found["deadline"] = seconds(limit)
        if queue is not None:
            found["queue"] = queue
        if priority is not None:
            found["priority"] = int(priority)
        return found

    def _told(self, step: Value, name: str, make: Callable[..., None], *args: Any) -> None:
        """Make something; what is refused is a problem of the step."""
        try:
            make(*args)
        except KeepstepError as error:
            self.problems.append(problem(f"steps.{name}", str(error), "", step.key))

    def _text(self, *path: str) -> str | None:
        found = inside(self.root, *path)
        return None if found is None else str(found.data)

    def _whole(self, *path: str) -> int | None:
        found = inside(self.root, *path)
        return None if found is None else int(found.data)

    def _plain(self, *path: str) -> Any:
        found = inside(self.root, *path)
        return None if found is None else found.plain()


def _forget(name: str, before: Workflow[..., Any] | None) -> None:
    """Put back what was known by a name before something was built that is not right."""
    if before is None:
        KNOWN.pop(name, None)
    else:
        KNOWN[name] = before
