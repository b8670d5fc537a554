"""Builds a graph or a dag from an examined file and the caller's functions; the file itself imports nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from ...errors import DefinitionError, KeepstepError
from ...model.problem import Problem
from ...policies import Budget, Recovery, Retain, Schedule, Service
from ...policies.queue import DECLARED as QUEUES
from ...policies.service import DECLARED as SERVICES
from ..agent import Agent, TaskPlan
from ..dag import Dag
from ..definition import KNOWN, Step, Workflow
from ..graph import Graph
from ..recovery import how_to_name, is_known
from ..source import Place
from ..streaming import streaming_body
from .check import Examined, exits_of, has_known_kind, inside, items, kind_of, steps_of
from .conditions import VARIABLES, Condition
from .http import DEFAULT_SECONDS, MAX_BYTES, Request
from .parts import (
    adapted,
    adapted_undo,
    asked_with,
    asking,
    awaiting,
    body_of,
    data,
    joining,
    minds,
    nothing,
    own_options,
    parts,
    performing,
    queued,
    refining,
    retried,
    scheduled,
    seconds,
    sending,
    sending_of,
    service_options,
    task_options,
    waits,
    with_description,
)
from .read import Value
from .schema import SUGGESTIONS, nearest, problem, shown


@dataclass(frozen=True)
class Names:
    """Functions, agents and workflows that a file may name, given by name or as members of a module."""

    modules: tuple[ModuleType, ...] = ()
    functions: Mapping[str, Any] = field(default_factory=dict)
    agents: Mapping[str, Any] = field(default_factory=dict)
    workflows: Mapping[str, Workflow[..., Any]] = field(default_factory=dict)

    def all_functions(self) -> dict[str, Any]:
        """Return functions and steps by name, without the private members of modules."""
        return {**self._held(lambda one: isinstance(one, Step) or inspect.isfunction(one)), **self.functions}

    def all_agents(self) -> dict[str, Any]:
        """Return all callables except classes."""
        held = self._held(lambda one: callable(one) and not isinstance(one, type | Workflow))
        return {**held, **self.functions, **self.agents}

    def all_workflows(self) -> dict[str, Workflow[..., Any]]:
        """Return workflows by their own names."""
        held = self._held(lambda one: isinstance(one, Workflow)).values()
        return {**{one.name: one for one in held}, **self.workflows}

    def _held(self, fits: Callable[[Any], bool]) -> dict[str, Any]:
        return {
            name: one
            for module in reversed(self.modules)
            for name, one in vars(module).items()
            if not name.startswith("_") and fits(one)
        }


def unknown_handler(root: Value | None, severity: Literal["error", "warning"]) -> list[Problem]:
    """Return the problem of a file whose recovery handler has an unknown name."""
    given = inside(root, "policies", "resilience", "recovery")
    named = inside(given, "handler") if given is not None and isinstance(given.data, dict) else given
    if named is None or not isinstance(named.data, str) or is_known(named.data):
        return []
    at = named.at
    what, how = f"no recovery handler is named {named.data!r}", how_to_name(named.data)
    return [Problem(severity, "policies.resilience.recovery", what, how, line=at.line, column=at.column)]


def checked_names(
    modules: Iterable[Any], functions: Mapping[str, Any] | None, agents: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Return the caller's names; refuse invalid ones."""
    given = (modules,) if isinstance(modules, ModuleType) else tuple(modules)
    for module in given:
        if not isinstance(module, ModuleType):
            raise DefinitionError(f"modules= takes imported modules, not {module!r}")
    for what, table in (("functions", functions), ("agents", agents)):
        for name, one in (table or {}).items():
            if not callable(one):
                raise DefinitionError(f"{what}= takes callables by name; {name!r} is {one!r:.60}")
    return given, dict(functions or {}), dict(agents or {})


class Builder:
    """Builds one workflow from a file; `problems` collects the errors in the names that the file uses."""

    def __init__(self, examined: Examined, names: Names, file: str) -> None:
        assert examined.value is not None  # noqa: S101 - an unreadable file is not built
        self.root, self.form, self.file = examined.value, examined.form, file
        self.functions, self.agents, self.workflows = names.all_functions(), names.all_agents(), names.all_workflows()
        self.steps = steps_of(self.root)
        self.variable = VARIABLES[self.form]
        self.name = self._text("metadata", "name") or ""
        self.place = Place(str(Path(file).resolve()), 1, "", self.name)
        self.problems: list[Problem] = []

    def check_names(self) -> list[Problem]:
        """Return the names in the file that the caller did not give. The file may have errors."""
        look = {"function": self._function, "map": self._function, "agent": self._agent, "subworkflow": self._workflow}
        for name, step in self.steps.items():
            if has_known_kind(step) and kind_of(step) in look and "need" not in step.data:
                look[kind_of(step)](name, step)
            if "undo" in step.data:
                self._given(name, step, "function", self.functions, under="undo")
        return self.problems

    def check(self) -> list[Problem]:
        """Return everything that prevents the build, without registering the workflow."""
        before, declared = KNOWN.get(self.name), [(one, dict(one)) for one in (QUEUES, SERVICES)]
        self.build()
        self.problems += unknown_handler(self.root, "error")
        _forget(self.name, before)
        for registry, earlier in declared:
            registry.clear()
            registry.update(earlier)  # type: ignore[arg-type]
        return self.problems

    def build(self) -> Workflow[..., Any] | None:
        """Return the workflow, registered in the process by its name; None if there are problems."""
        if self.check_names() or self._is_taken():
            return None
        before = KNOWN.get(self.name)
        workflow: Workflow[..., Any] | None = None
        try:
            workflow = self._graph() if self.form == "graph" else self._dag()
        except KeepstepError as error:  # refused by the file's policies
            self.problems.append(problem("file", str(error), "", self.root.at))
        if self.problems or workflow is None:
            _forget(self.name, before)
            return None
        services = inside(self.root, "spec", "services")
        for name, one in () if services is None else services.data.items():
            Service(name, **service_options(one))
        workflow.place = self.place
        workflow.starting = self._starting()
        workflow.redacting = tuple(one.data for one in items(inside(self.root, "policies", "security", "redact")))
        workflow.__doc__ = self._text("metadata", "description") or f"The workflow of {self.file}."
        return workflow

    def _is_taken(self) -> bool:
        """Whether another place defines a workflow of this name. The same file may be loaded again."""
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
            retain=self._retain(),
            schedule=self._schedule(),
            on_change=self._text("policies", "resilience", "on_change") or "fail",  # type: ignore[arg-type]
            recovery=self._recovery(),
            executor=self._text("spec", "executor"),
            keep=self._text("policies", "resilience", "keep") or "all",  # type: ignore[arg-type]
            interrupt_before=self._plain("policies", "observability", "interrupt_before") or (),
            interrupt_after=self._plain("policies", "observability", "interrupt_after") or (),
        )
        for name, step in self.steps.items():
            self._attempt(step, name, self._put, graph, name, step)
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
            more: dict[str, Any] = {} if default is None else {"default": default}
            for option in ("timeout", "heartbeat"):
                if option in step.data:
                    more[option] = seconds(step.data[option])
            graph.wait(name, signal=data(step, "signal") or name, into=into, **more)
        elif kind == "map":
            concurrency = data(step, "concurrency") or self._whole("spec", "resources", "concurrency")
            found = self._function(name, step)
            made: Step[..., Any] = Step(body_of(found), name=f"{name}-item", **self._options(name, step, found))
            collect, wait = bool(data(step, "collect")), waits(step.data.get("wait"))
            limit = int(concurrency) if concurrency is not None else None
            with_description(made, name, step)
            graph.map(name, made, over=data(step, "over"), into=into, concurrency=limit, wait=wait, collect=collect)
        elif kind == "subworkflow":
            child = self._workflow(name, step)
            takes = [one.data for one in items(step.data.get("takes"))] or None
            graph.add(child, name, takes=takes, gives=data(step, "into"))
        elif kind in ("branch", "barrier"):
            graph.add(nothing, name)
        elif kind == "agent":
            self._put_agent(graph, name, step, options)
        elif kind == "http":
            request = self._request(name, step)
            graph.add(
                with_description(Step(sending(request, into), name=name, **self._options(name, step)), name, step),
                name,
                **options,
            )
        else:
            graph.add(self._step(name, step, self._function(name, step)), name, **options)

    def _put_agent(self, graph: Graph, name: str, step: Value, options: dict[str, Any]) -> None:
        """Add a step that asks an agent: one that a worker hosts, or one that the caller names."""
        if "need" in step.data:
            body = performing(self._plan(step), step, self._into(name, step))
            with_description(graph.add(body, name, waits=True, **options), name, step)
            return
        agent, durable = self._agent(name, step), data(step, "durable") is True
        options = {**options, "agent": data(step, "agent") or name}
        if isinstance(agent, Agent):
            durable = durable or inspect.iscoroutinefunction(agent.perform)
            agent = agent.perform
        if not durable:
            graph.add(self._step(name, step, agent), name, **options)
            return
        keys = {one: key.data for one, key in parts(step, "with").items()} if "with" in step.data else None
        body = adapted(awaiting(body_of(agent)), keys, data(step, "into"), name)
        with_description(graph.add(body, name, waits=True, **options), name, step)

    def _plan(self, step: Value) -> TaskPlan:
        """Return the task of a step, with the options of its team where the step has none."""
        team = inside(self.root, "spec", "teams", data(step, "team")) if "team" in step.data else None
        given: dict[str, Any] = {}
        for one in (team, step):
            if one is not None:
                given |= task_options(one)
        members = None if team is None else tuple(one.data for one in items(team.data["agents"]))
        refine = step.data.get("refine")
        return TaskPlan(minds(step.data["need"]), members, **given, **({} if refine is None else refining(refine)))

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
            retain=self._retain(),
            schedule=self._schedule(),
            on_change=self._text("policies", "resilience", "on_change") or "fail",  # type: ignore[arg-type]
            recovery=self._recovery(),
            executor=self._text("spec", "executor"),
            concurrency=self._whole("spec", "resources", "concurrency"),
            place=self.place,
        )
        for name, step in self.steps.items():
            self._attempt(step, name, self._need, dag, name, step)
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
            thing = with_description(
                Step(asking(self._request(name, step)), name=name, **self._options(name, step)), name, step
            )
        else:
            found = self._agent(name, step) if kind == "agent" else self._function(name, step)
            thing = with_description(Step(body_of(found), name=name, **self._options(name, step, found)), name, step)
        when = self._condition(step.data.get("when"), f"steps.{name}.when")
        wait, place = waits(step.data.get("wait")), Place(self.file, step.key.line, "", name)
        limit = data(step, "concurrency")
        concurrency = None if limit is None else int(limit)
        dag.add(
            thing, name, needs=needs, when=when, wait=wait, map=data(step, "map"), concurrency=concurrency, place=place
        )

    # -- shared by graph and dag -----------------------------------------------------------------------------------

    def _function(self, name: str, step: Value) -> Any:
        return self._given(name, step, "function", self.functions)

    def _agent(self, name: str, step: Value) -> Any:
        return self._given(name, step, "agent", self.agents)

    def _workflow(self, name: str, step: Value) -> Any:
        return self._given(name, step, "workflow", self.workflows)

    def _given(self, name: str, step: Value, what: str, known: Mapping[str, Any], *, under: str = "") -> Any:
        """Return what a step refers to with the key `under`, by default that of its kind or the step's own id."""
        under = under or what
        named = step.data.get(under)
        wanted = named.data if named is not None else name
        if not isinstance(wanted, str):  # an error of the file
            return None
        if wanted not in known:
            how = (
                nearest(wanted, known) if len(self.problems) < SUGGESTIONS else ""
            ) or f"give it with {what}s= or modules="
            path, at = (f"steps.{name}.{under}", named.at) if named is not None else (f"steps.{name}", step.key)
            self.problems.append(problem(path, f"there is no {what} {shown(wanted)}", how, at))
            return None
        return known[wanted]

    def _step(self, name: str, step: Value, found: Any) -> Step[..., Any]:
        """Return a step of a graph: the function itself, or an adapter that takes keys of the state and gives a key."""
        keys = {parameter: one.data for parameter, one in parts(step, "with").items()} if "with" in step.data else None
        into = data(step, "into")
        options = self._options(name, step, found)
        body, sends = body_of(found), None
        if keys is not None or into is not None:
            if options.get("transactional"):
                raise DefinitionError("with: and into: cannot be used with a transactional step; let it take the state")
            options.pop("ignore", None)  # `ignore` names parameters of the function, but the adapter has only the state
            sends = sending_of(body, keys, into, name)
            body = adapted(streaming_body(body, options.pop("collect", None)), keys, into, name)
            for option, missing in (("ready", True), ("verify", None), ("cost", 0.0)):
                if callable(options.get(option)) and keys is not None:
                    options[option] = asked_with(options[option], keys, missing)
            if options.get("undo") is not None:
                options["undo"] = adapted_undo(options["undo"], keys, into, name)
        made: Step[..., Any] = Step(body, name=name, **options)
        made.sends = sends
        return with_description(made, name, step)

    def _options(self, name: str, step: Value, found: Any = None) -> dict[str, Any]:
        """Return the options of a step: its own, else those of the function if it is a step, else those of the file."""
        once = data(step, "at_most_once") is True
        own = own_options(found) if isinstance(found, Step) else {}
        retry = step.data.get("retry") or (None if "retry" in own else inside(self.root, "spec", "retry"))
        limit = step.data.get("timeout") or (None if "timeout" in own else self._usual_timeout())
        options = {**own, **({"at_most_once": True} if once else {})}
        if "in_doubt" in step.data:
            options["in_doubt"] = data(step, "in_doubt")
        if options.get("at_most_once"):
            retry = step.data.get("retry")  # a body that may run only once is repeated only if its own step says so
        if retry is not None:
            options["retry"] = retried(retry)
        if limit is not None:
            options["timeout"] = seconds(limit)
        options |= {name: data(step, name) for name in ("service", "cost", "executor") if name in step.data}
        if "undo" in step.data:
            options["undo"] = self._given(name, step, "function", self.functions, under="undo")
        if "undo_unfinished" in step.data:
            options["undo_unfinished"] = data(step, "undo_unfinished")
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

    def _recovery(self) -> Recovery | None:
        given = inside(self.root, "policies", "resilience", "recovery")
        if given is None:
            return None
        options = {} if isinstance(given.data, str) else {name: one.plain() for name, one in given.data.items()}
        if "timeout" in options:
            options["timeout"] = seconds(given.data["timeout"])
        try:
            return Recovery(given.data) if isinstance(given.data, str) else Recovery(options.pop("handler"), **options)
        except DefinitionError as error:
            self.problems.append(problem("policies.resilience.recovery", str(error), "", given.at))
            return None

    def _retain(self) -> Retain | str | None:
        given: Any = self._plain("policies", "retention")
        return Retain(**given) if isinstance(given, dict) else given

    def _schedule(self) -> Schedule | None:
        given = inside(self.root, "spec", "schedule")
        if given is None:
            return None
        try:
            return scheduled(given)
        except DefinitionError as error:
            self.problems.append(problem("spec.schedule", str(error), "", given.at))
            return None

    def _starting(self) -> dict[str, Any]:
        """Return the defaults for options of `start`."""
        found: dict[str, Any] = {}
        tags, limit = self._plain("metadata", "tags"), inside(self.root, "spec", "timeout")
        queue, priority = inside(self.root, "spec", "resources", "queue"), self._plain("spec", "resources", "priority")
        if tags:
            found["tags"] = tags if isinstance(tags, dict) else dict.fromkeys(tags, "true")
        if limit is not None:
            found["deadline"] = seconds(limit)
        if queue is not None:
            found["queue"] = queued(queue)
        if priority is not None:
            found["priority"] = int(priority)
        return found

    def _attempt(self, step: Value, name: str, make: Callable[..., None], *args: Any) -> None:
        """Make a part of the workflow; record a refusal as a problem of the step."""
        try:
            make(*args)
        except KeepstepError as error:
            field = "executor" if "executor" in step.data and "executor=" in str(error) else ""
            path, at = (f"steps.{name}.{field}", step.data[field].at) if field else (f"steps.{name}", step.key)
            self.problems.append(problem(path, str(error), "", at))

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
    """Restore the registered workflow of a name after a failed build."""
    if before is None:
        KNOWN.pop(name, None)
    else:
        KNOWN[name] = before
