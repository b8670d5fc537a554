"""Validation of declarative files: all problems of text, structure, names and conditions at once."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock
from typing import Any, Literal
from urllib.parse import urlsplit

from ...model.problem import Problem
from ..shape import Arrow, Node, Shape
from ..validate import problems as shape_problems
from .conditions import VARIABLES, BadCondition, compiled
from .http import RESERVED_HEADERS
from .read import Spot, Unreadable, Value, read
from .schema import SUGGESTIONS, kinds, misfits, nearest, problem, shown

#: Number of files whose examination is cached, by their whole content.
REMEMBERED = 128

Form = Literal["graph", "dag"]

#: Keys of a step that belong to a graph only.
_OF_GRAPH = ("next", "join", "branches", "exit", "stage", "into", "takes", "collect", "need", "durable")
_OF_DAG = ("needs", "when", "map")
#: Keys of an agent that a worker hosts, and those of one that the caller names.
_HOSTED = ("team", "task", "when_nobody", "on_failure", "least", "refine")
_CALLED = ("agent", "durable", "with", "at_most_once", "undo", "undo_unfinished", "service", "cost", "retry")
#: Keys that are for a single attempt of a step, and not for code whose calls are recorded one by one.
_OF_ATTEMPTS = ("at_most_once", "undo", "undo_unfinished", "service", "cost", "retry", "timeout")
#: Kinds of steps that a dag cannot have, each with the advice of the message.
NOT_IN_DAG = {
    "delay": "a dag's steps start when their needs are done; use a graph, or sleep in the function",
    "branch": "a dag has no ways to choose from; give the steps that depend on it a when:",
    "map": "a dag carries no state to take a list from; give a function step map:, the parameter that takes an element",
    "approval": "a dag carries no state to put the answer into; use a graph, or a graph as a subworkflow",
}
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHERE_STEP = re.compile(r"step '(.*)'\Z")
_WHERE_EDGE = re.compile(r"edge '(.*)' → '(.*)'\Z")


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of examining a file: its value if it could be read, its form, and all problems, errors first."""

    value: Value | None
    form: Form
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not any(one.severity == "error" for one in self.problems)

    def named(self, file: str) -> tuple[Problem, ...]:
        """Return the problems with the name of the file."""
        return tuple(replace(one, file=file) for one in self.problems)


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The number of examinations from the cache, and of new ones."""

    hits: int
    misses: int
    size: int


class _Memory:
    """A cache of examinations by the whole content of their files; the oldest is dropped first."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[bytes, bool], Examined] = OrderedDict()
        self._lock = Lock()
        self._hits = self._misses = 0

    def examine(self, content: bytes, *, is_json: bool) -> Examined:
        key = (content, is_json)
        with self._lock:
            if key in self._known:
                self._hits += 1
                self._known.move_to_end(key)
                return self._known[key]
            self._misses += 1
        found = _examined(content, is_json=is_json)
        with self._lock:
            self._known[key] = found
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return found

    def info(self) -> CacheInfo:
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._known))


_MEMORY = _Memory()
examine = _MEMORY.examine
cache_info = _MEMORY.info


def _examined(content: bytes, *, is_json: bool) -> Examined:
    try:
        value, wrong_keys = read(content, is_json=is_json)
    except Unreadable as error:
        return Examined(None, "graph", (problem("file", error.what, error.how, error.at),))
    found = [problem("file", one.what, one.how, one.at) for one in wrong_keys]
    found += misfits(value)
    look = _Look(value)
    found += look.problems()
    ordered = sorted(found, key=lambda one: (one.severity != "error", one.line, one.column))
    return Examined(value, look.form, tuple(dict.fromkeys(ordered)))


# -- one file ----------------------------------------------------------------------------------------------------------


class _Look:
    """One inspection of a file, as far as its structure allows. Each method yields the problems of one kind."""

    def __init__(self, value: Value) -> None:
        self.root = value
        self.steps_value = inside(value, "steps")
        self.steps = steps_of(value)
        self.form = self._form()
        self.variable = VARIABLES[self.form]
        self.lost = 0  # number of unknown references

    def _form(self) -> Form:
        given = inside(self.root, "spec", "form")
        if given is not None and given.data in ("graph", "dag"):
            return given.data  # type: ignore[no-any-return]
        leads = any(key in step.data for step in self.steps.values() for key in ("next", "branches", "join", "exit"))
        return "graph" if leads or inside(self.root, "spec", "entrypoint") is not None else "dag"

    def problems(self) -> Iterator[Problem]:
        yield from self.policies()
        for name, step in self.steps.items():
            yield from self.form_of(name, step)
            yield from self.ways(name, step)
            yield from self.conditions(name, step)
            yield from self.options(name, step)
            yield from self.parameters(name, step)
            yield from self.waits(name, step)
            if kind_of(step) == "http":
                yield from self.request(name, step)
        if self.steps:
            for one in self.shape_of_it():
                if not self.lost or (one.severity == "error" and one.where != "steps"):
                    yield one  # unknown references, which are reported already, make many steps unreachable

    # -- names -----------------------------------------------------------------------------------------------------

    def known(self, path: str, value: Value) -> Iterator[Problem]:
        """Yield a problem if a reference is unknown. A reference that is not a name is reported as a misfit instead."""
        if not isinstance(value.data, str):
            self.lost += 1
        elif self.steps_value is not None and isinstance(self.steps_value.data, dict):
            names = self.steps_value.data
            if value.data not in names:
                self.lost += 1
                how = (
                    nearest(value.data, names) if self.lost <= SUGGESTIONS else ""
                ) or f"there are: {', '.join(islice(names, 12))}"
                yield problem(path, f"there is no step {shown(value.data)}", how, value.at)

    def all_known(self, path: str, value: Value | None) -> Iterator[Problem]:
        if value is not None and not isinstance(value.data, tuple):
            self.lost += 1
        for number, one in enumerate(items(value)):
            yield from self.known(f"{path}[{number}]", one)

    def only_for_graphs(self, group: str, *names: str) -> Iterator[Problem]:
        for name in names if self.form == "dag" else ():
            found = inside(self.root, "policies", group, name)
            if found is not None:
                what = "it belongs to a graph, and this is a dag"
                yield problem(f"policies.{group}.{name}", what, "remove it", found.key)

    def policies(self) -> Iterator[Problem]:
        for name in ("entrypoint", "reducers"):
            found = inside(self.root, "spec", name)
            if found is not None and self.form == "dag":
                yield problem(f"spec.{name}", "it belongs to a graph, and this is a dag", "remove it", found.key)
            elif found is not None and name == "entrypoint":
                yield from self.known("spec.entrypoint", found)
        yield from self.only_for_graphs("resilience", "max_iterations", "keep")
        for name in ("interrupt_before", "interrupt_after"):
            path = f"policies.observability.{name}"
            found = inside(self.root, "policies", "observability", name)
            if found is not None and self.form == "dag":
                yield problem(path, "it belongs to a graph, and this is a dag", "remove it", found.key)
            else:
                yield from self.all_known(path, found)
        durability = inside(self.root, "policies", "resilience", "durability")
        if durability is not None and isinstance(durability.data, str) and durability.data.startswith("steps="):
            for name in durability.data.removeprefix("steps=").split(","):
                yield from self.known("policies.resilience.durability", Value(name, durability.at, durability.key))
        for number, one in enumerate(items(inside(self.root, "policies", "security", "redact"))):
            yield from _pattern(f"policies.security.redact[{number}]", one)
        yield from _retry("spec.retry", inside(self.root, "spec", "retry"))

    # -- one step --------------------------------------------------------------------------------------------------

    def form_of(self, name: str, step: Value) -> Iterator[Problem]:
        path, kind = f"steps.{name}", kind_of(step)
        if self.form == "dag" and kind in NOT_IN_DAG:
            yield problem(f"{path}.kind", f"a dag has no steps of kind {kind}", NOT_IN_DAG[kind], step.data["kind"].at)
            return
        wrong, other = (_OF_GRAPH, "graph") if self.form == "dag" else (_OF_DAG, "dag")
        for key in wrong:
            if key in step.data:
                how = f"remove it, or write spec: {{form: {other}}}" if key in ("next", "branches", "needs") else ""
                what = f"{key!r} belongs to a {other}, and this is a {self.form}"
                yield problem(f"{path}.{key}", what, how or "remove it", step.data[key].key)
        if kind == "function" and "concurrency" in step.data and "map" not in step.data:
            what = "'concurrency' of a function needs map:, the parameter that takes an element of a list"
            yield problem(f"{path}.concurrency", what, "add map:, or remove it", step.data["concurrency"].key)
        if self.form == "graph" and "wait" in step.data and kind not in ("barrier", "map"):
            what = "'wait' belongs to a dag, or to the barrier where steps come together"
            yield problem(f"{path}.wait", what, "move it there", step.data["wait"].key)

    def ways(self, name: str, step: Value) -> Iterator[Problem]:
        path = f"steps.{name}"
        following, join, branches = (step.data.get(key) for key in ("next", "join", "branches"))
        if following is not None and branches is not None:
            what = "it has next and branches"
            yield problem(path, what, "make next the last of the branches, without a when:", branches.key)
        if following is not None and isinstance(following.data, tuple):
            yield from self.all_known(f"{path}.next", following)
            if join is None:
                how = "add join: with the id of a step of kind barrier"
                yield problem(f"{path}.next", "it is not said where these steps come together", how, following.key)
        elif following is not None:
            yield from self.known(f"{path}.next", following)
        if join is not None:
            yield from self.joins(f"{path}.join", following, join)
        if branches is not None and not isinstance(branches.data, tuple):
            self.lost += 1
        for number, one in enumerate(items(branches)):
            target = inside(one, "next")
            if target is None:
                self.lost += 1
            else:
                yield from self.known(f"{path}.branches[{number}].next", target)
        yield from self.all_known(f"{path}.needs", step.data.get("needs"))

    def joins(self, path: str, following: Value | None, join: Value) -> Iterator[Problem]:
        yield from self.known(path, join)
        if following is None or not isinstance(following.data, tuple):
            how = "write next: as a list, or remove join"
            yield problem(path, "only steps that run at the same time come together", how, join.key)
        target = self.steps.get(join.data) if isinstance(join.data, str) else None
        if target is not None and kind_of(target) != "barrier":
            what = f"{join.data!r} is of kind {kind_of(target)}, and steps come together at a barrier"
            yield problem(path, what, f"join at a step of kind barrier, whose next: is {join.data}", join.at)

    def conditions(self, name: str, step: Value) -> Iterator[Problem]:
        if "when" in step.data:
            yield from self.condition(f"steps.{name}.when", step.data["when"])
        for number, one in enumerate(items(step.data.get("branches"))):
            if isinstance(one.data, dict) and "when" in one.data:
                yield from self.condition(f"steps.{name}.branches[{number}].when", one.data["when"])

    def condition(self, path: str, value: Value) -> Iterator[Problem]:
        if not isinstance(value.data, str) or not 0 < len(value.data) <= 4000:
            return
        try:
            compiled(value.data, self.variable)
        except BadCondition as error:
            yield problem(path, f"the condition cannot be read: {error.what}", error.how, value.at)

    def options(self, name: str, step: Value) -> Iterator[Problem]:
        path, kind = f"steps.{name}", kind_of(step)
        yield from _retry(f"{path}.retry", step.data.get("retry"))
        once = step.data.get("at_most_once")
        if "in_doubt" in step.data and once is not None and once.data is False:
            at = step.data["in_doubt"].key
            yield problem(f"{path}.in_doubt", "only an at_most_once step is ever in doubt", "remove in_doubt", at)
        yield from self.service(f"{path}.service", step.data.get("service"))
        if kind == "agent":
            yield from self.agent(path, step)
        if kind == "approval" and "on_timeout" in step.data and not {"timeout", "heartbeat"} & step.data.keys():
            at = step.data["on_timeout"].key
            what = "it never happens: there is no timeout"
            yield Problem("warning", f"{path}.on_timeout", what, "add timeout:", line=at.line, column=at.column)

    def agent(self, path: str, step: Value) -> Iterator[Problem]:
        """Yield the keys of a step that do not belong to its way of asking an agent."""
        wrong: tuple[str, ...]
        if "need" in step.data:
            wrong, what, how = _CALLED, "belongs to an agent that the caller names, and need: asks a hosted one", ""
        else:
            wrong, what, how = _HOSTED, "belongs to an agent that a worker hosts", "add need:, or remove it"
        for key in wrong:
            if key in step.data:
                yield problem(f"{path}.{key}", f"{key!r} {what}", how or "remove one of them", step.data[key].key)
        durable = step.data.get("durable")
        for key in _OF_ATTEMPTS if durable is not None and durable.data is True else ():
            if key in step.data:
                what = f"{key!r} is for one attempt, and the calls of a durable agent are recorded one by one"
                yield problem(f"{path}.{key}", what, "give it to those calls", step.data[key].key)
        team, teams = step.data.get("team"), inside(self.root, "spec", "teams")
        known = teams.data if teams is not None and isinstance(teams.data, dict) else {}
        if team is not None and isinstance(team.data, str) and team.data not in known:
            how = nearest(team.data, known) or "write it under spec.teams"
            yield problem(f"{path}.team", f"there is no team {shown(team.data)}", how, team.at)

    def service(self, path: str, named: Value | None) -> Iterator[Problem]:
        """Yield a warning if a step names a service that the file does not declare beside others."""
        declared = inside(self.root, "spec", "services")
        if named is None or declared is None or not isinstance(named.data, str) or not isinstance(declared.data, dict):
            return
        if named.data not in declared.data:
            what = f"the file declares no service {shown(named.data)}, so it has no limits unless code declares it"
            how = nearest(named.data, declared.data) or f"there are: {', '.join(islice(declared.data, 12))}"
            yield Problem("warning", path, what, how, line=named.at.line, column=named.at.column)

    def parameters(self, name: str, step: Value) -> Iterator[Problem]:
        given = step.data.get("with")
        needs = [one.data for one in items(step.data.get("needs"))]
        for parameter, one in given.data.items() if given is not None and isinstance(given.data, dict) else ():
            path = f"steps.{name}.with.{parameter}"
            if self.form == "dag" and one.data not in needs:
                how = "add it to needs:, or call the parameter by the name of the input"
                yield problem(path, f"{shown(one.data)} is not one of the step's needs", how, one.at)
            elif self.form == "dag" and one.data != parameter and str(one.data) in self._looked_at(step):
                what = f"its when: looks at inputs.{one.data}, which is called {parameter!r} here"
                yield problem(f"steps.{name}.when", what, f"write inputs.{parameter}", step.data["when"].at)
            elif self.form == "graph" and isinstance(one.data, str) and "-" in one.data:
                yield problem(path, f"{shown(one.data)} is not a key of the state", "a key has no -", one.at)

    def waits(self, name: str, step: Value) -> Iterator[Problem]:
        """Yield waits of a dag's step, or of a graph's barrier, that can never be satisfied."""
        if self.form == "dag":
            needed = [one.data for one in items(step.data.get("needs"))]
            wait, needs = step.data.get("wait"), {one for one in needed if isinstance(one, str)}
            least = 1 if wait is not None and wait.data == "any" else _least(wait)
            if wait is not None and least > len(needs):
                what = f"it waits for {least} of its needs, and has {len(needs) or 'none'}"
                yield problem(f"steps.{name}.wait", what, "wait for fewer, or add needs", wait.at)
            return
        join, ways = inside(step, "join"), items(step.data.get("next"))
        barrier = self.steps.get(join.data) if join is not None and isinstance(join.data, str) else None
        wait = inside(barrier, "wait")
        if wait is not None and ways and join is not None and _least(wait) > len(ways):
            what = f"it waits for {_least(wait)} steps, and {name!r} leads to {len(ways)}"
            yield problem(f"steps.{join.data}.wait", what, "wait for fewer, or add to that next:", wait.at)

    def _looked_at(self, step: Value) -> frozenset[str]:
        """Return the inputs that a step's condition names."""
        when = step.data.get("when")
        try:
            found = compiled(when.data, self.variable).keys if when is not None and isinstance(when.data, str) else None
        except BadCondition:
            return frozenset()  # reported by `condition`
        return found or frozenset()

    def request(self, name: str, step: Value) -> Iterator[Problem]:
        path, url = f"steps.{name}", step.data.get("url")
        method = step.data.get("method")
        if "body" in step.data and method is not None and method.data in ("GET", "HEAD"):
            what = f"a {method.data} request has no body"
            yield problem(f"{path}.body", what, "use another method, or put the keys into the url", method.at)
        headers = inside(step, "headers")
        for header, one in headers.data.items() if headers is not None and isinstance(headers.data, dict) else ():
            if header.lower() in RESERVED_HEADERS:
                yield problem(f"{path}.headers.{header}", "the request itself decides this", "remove it", one.key)
        if url is None or not isinstance(url.data, str):
            return
        for key in _PLACEHOLDER.findall(url.data):
            if not _KEY.fullmatch(key):
                yield problem(f"{path}.url", f"{{{key[:40]}}} is not a key of the state", "write {key}", url.at)
        if re.search(r"[{}]", _PLACEHOLDER.sub("", url.data)):
            yield problem(f"{path}.url", "a brace is not closed", "write {key}, or %7B and %7D", url.at)
        try:
            parts = urlsplit(url.data)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            yield problem(f"{path}.url", f"it is not a URL: {error}", "", url.at)
            return
        hosts = inside(self.root, "policies", "security", "hosts")
        allowed = [one.data for one in items(hosts)]
        if hosts is not None and host is not None and not host_allowed(host, parts.netloc, allowed):
            what = f"the host {host!r} is not in policies.security.hosts"
            yield problem(f"{path}.url", what, "add it there, or ask another", url.at)

    # -- the whole file --------------------------------------------------------------------------------------------

    def shape_of_it(self) -> Iterator[Problem]:
        for one in shape_problems(shape_of(self.root, self.form)):
            at, where = self._spot(one.where)
            yield replace(one, where=where, line=at.line, column=at.column)

    def _spot(self, where: str) -> tuple[Spot, str]:
        """Return the place in the file of something that a problem of the shape names in words."""
        step = _WHERE_STEP.match(where)
        if step is not None and step[1] in self.steps:
            name = step[1]
            return self.steps[name].key, f"steps.{name}"
        edge = _WHERE_EDGE.match(where)
        if edge is not None and edge[1] in self.steps:
            name = edge[1]
            for number, one in enumerate(items(self.steps[name].data.get("branches"))):
                target = inside(one, "next")
                if target is not None and target.data == edge[2]:
                    return target.at, f"steps.{name}.branches[{number}]"
            return self.steps[name].key, f"steps.{name}"
        return (self.steps_value or self.root).key, "steps"


def shape_of(root: Value, form: Form) -> Shape:
    """Return the shape of a file, as far as its names are known; unknown references are left out."""
    steps = {name: one for name, one in root.data["steps"].data.items() if isinstance(one.data, dict)}
    nodes = tuple(Node(name, kind_of(step)) for name, step in steps.items())
    arrows = [arrow for name, step in steps.items() for arrow in _arrows(name, step)]
    known = [arrow for arrow in arrows if arrow.source in steps and arrow.target in steps]
    title, most = inside(root, "metadata", "name"), inside(root, "policies", "resilience", "max_iterations")
    entry = inside(root, "spec", "entrypoint")
    named = entry is not None and isinstance(entry.data, str) and entry.data in steps
    start = entry.data if entry is not None and named else next(iter(steps))
    return Shape(
        str(title.data) if title is not None else "",
        form,
        nodes,
        tuple(known),
        start if form == "graph" else None,
        exits_of(steps) if form == "graph" else (),
        most.data if most is not None and type(most.data) is int and most.data > 0 else 1000,
    )


def exits_of(steps: dict[str, Value]) -> tuple[str, ...]:
    """Return the steps of a graph after which a run may end; empty if every step leads on."""
    found = []
    for name, step in steps.items():
        says = step.data.get("exit")
        if (says is not None and says.data is True) or not ("next" in step.data or "branches" in step.data):
            found.append(name)
    return tuple(found)


def _arrows(name: str, step: Value) -> Iterator[Arrow]:
    following, join = step.data.get("next"), step.data.get("join")
    if following is not None and isinstance(following.data, tuple):
        yield from (Arrow(name, one.data, "", "fork") for one in following.data if isinstance(one.data, str))
        if join is not None and isinstance(join.data, str):
            yield Arrow(name, join.data, "", "join")
    elif following is not None and isinstance(following.data, str):
        yield Arrow(name, following.data)
    for one in items(step.data.get("branches")):
        target, when = inside(one, "next"), inside(one, "when")
        if target is not None and isinstance(target.data, str):
            yield Arrow(name, target.data, str(when.data) if when is not None else "")
    for one in items(step.data.get("needs")):
        if isinstance(one.data, str):
            yield Arrow(one.data, name, "", "needs")


# -- parts -------------------------------------------------------------------------------------------------------------


def inside(value: Value | None, *path: str) -> Value | None:
    """Return the value under a path of keys, or None."""
    for key in path:
        if value is None or not isinstance(value.data, dict):
            return None
        value = value.data.get(key)
    return value


def items(value: Value | None) -> tuple[Value, ...]:
    """Return the items of a list; empty for None."""
    return value.data if value is not None and isinstance(value.data, tuple) else ()


def steps_of(root: Value) -> dict[str, Value]:
    """Return those steps of a file that are mappings, by name."""
    steps = inside(root, "steps")
    if steps is None or not isinstance(steps.data, dict):
        return {}
    return {name: one for name, one in steps.data.items() if isinstance(one.data, dict)}


def kind_of(step: Value) -> str:
    """Return the kind of a step; by default a function."""
    kind = step.data.get("kind")
    return kind.data if kind is not None and has_known_kind(step) else "function"


def has_known_kind(step: Value) -> bool:
    """Whether a step has no kind, or one that exists."""
    kind = step.data.get("kind")
    return kind is None or (isinstance(kind.data, str) and kind.data in kinds())


def _least(wait: Value | None) -> int:
    """Return how many steps must succeed at least, as far as a number says so."""
    wanted = inside(wait, "tolerate", "minimum") if wait is not None and isinstance(wait.data, dict) else wait
    return int(wanted.data) if wanted is not None and isinstance(wanted.data, int) else 0


def host_allowed(host: str, netloc: str, allowed: list[Any]) -> bool:
    """Whether a host, alone or with its port, is in a list."""
    names = {str(one).lower() for one in allowed}
    return host.lower() in names or netloc.lower() in names


def _retry(path: str, value: Value | None) -> Iterator[Problem]:
    by_class = inside(value, "by_class")
    if value is None or by_class is None or by_class.data is not True:
        return
    for key in ("attempts", "backoff", "base", "factor"):
        if key in value.data:
            what = f"{key!r} does not go with by_class, which takes it from the table"
            yield problem(f"{path}.{key}", what, "remove one of them", value.data[key].key)


def _pattern(path: str, value: Value) -> Iterator[Problem]:
    if isinstance(value.data, str):
        try:
            re.compile(value.data)
        except (re.error, RecursionError, OverflowError) as error:
            yield problem(path, f"it is not a regular expression: {error}", "", value.at)
