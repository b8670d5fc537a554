"""Validation of the shape of a graph or dag: all problems at once, in a stable order."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from ..errors import InvalidGraph
from ..model.problem import Problem
from .reachability import (
    Net,
    back_arrows,
    circles,
    depths,
    flowing,
    ordered,
    reached,
    shortest_cycle,
    ways_back,
    without,
)
from .shape import Arrow, Shape

log = logging.getLogger("keepstep.workflows")

#: Maximum number of steps on a path through a definition. A longer one is easier to read, run and fix in parts.
DEPTH_LIMIT = 1000

#: Maximum number of names in a list of a message. `problems` still holds every problem.
_NAMED = 12
#: Number of names to print from each end of a long path.
_ENDS = 15
#: Maximum number of unknown names to find suggestions for, and of known names to compare each with.
_SUGGESTIONS = 50
_COMPARED = 2000
#: Maximum number of warnings of one definition to log one by one.
_LOGGED = 20

_ALWAYS = frozenset({"", "always"})


def problems(shape: Shape, *, depth_limit: int = DEPTH_LIMIT) -> list[Problem]:
    """Return every problem of a shape: errors first, each kind in the order of the steps."""
    found = list(_Look(shape, depth_limit).problems())
    return [one for one in found if one.severity == "error"] + [one for one in found if one.severity == "warning"]


def check(shape: Shape, more: Iterable[Problem] = (), placed: Callable[[Problem], Problem] = lambda one: one) -> None:
    """Refuse a shape with errors, listing all of them; log its warnings, once per content.

    `more` are problems of the definition that its shape does not show; `placed` adds the place of a step's definition.
    """
    found = _SHARED.validate(shape)
    Validated(shape, found.name, tuple(map(placed, (*found.problems, *more)))).check()


def order(shape: Shape) -> list[str]:
    """Return the steps, each after its needs or predecessors, else in the order of definition. The order is stable.

    In a graph, arrows that lead back are ignored; in a dag, a cycle raises `InvalidGraph`.
    """
    net = Net.of(shape)
    if shape.form == "dag":
        found = ordered(net.after)
        if len(found) < len(net):
            raise InvalidGraph("\n".join([f"dag {shape.name!r} has no order:", *map(str, _Look(shape).cycles())]))
        return net.named(found)
    entry = net.index.get(shape.entry) if shape.entry is not None else None
    return net.named(ordered(without(net, back_arrows(net, entry))))


# -- one shape ---------------------------------------------------------------------------------------------------------


class _Look:
    """One inspection of a shape. Each method yields the problems of one kind."""

    def __init__(self, shape: Shape, depth_limit: int = DEPTH_LIMIT) -> None:
        self.shape = shape
        self.depth_limit = depth_limit
        self.is_dag = shape.form == "dag"
        self.net = Net(_names(shape), _taken(shape, flowing(shape)))
        self.known = self.net.index
        self.entry = self.known.get(shape.entry) if shape.entry is not None else None
        self.suggested = 0

    def problems(self) -> Iterator[Problem]:
        yield from self.numbers()
        yield from self.names()
        yield from self.ends()
        yield from self.arrows()
        yield from self.parallels()
        if self.is_dag:
            yield from self.cycles()
        else:
            yield from self.unreachable()
            yield from self.stuck()
            yield from self.shadowed()
        yield from self.depth()

    @cached_property
    def back(self) -> set[tuple[int, int]]:
        return back_arrows(self.net, self.entry)

    @cached_property
    def circles(self) -> list[list[int]]:
        return circles(self.net) if self.back else []

    @property
    def whole(self) -> str:
        return f"{self.shape.form} {self.shape.name!r}"

    # -- names and numbers -----------------------------------------------------------------------------------------

    def numbers(self) -> Iterator[Problem]:
        most = self.shape.max_iterations
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            yield _error(self.whole, f"max_iterations is {most!r}", "give a whole number from 1 on")

    def names(self) -> Iterator[Problem]:
        counts = Counter(node.name for node in self.shape.nodes)
        for name, count in counts.items():
            if not name:
                yield _error(self.whole, "a step has no name", "give it one")
            elif count > 1:
                yield _error(_step(name), f"{count} steps have this name", "rename all but one")
        if not counts:
            yield _error(self.whole, "it has no steps", "add one")

    def ends(self) -> Iterator[Problem]:
        entry, exits = self.shape.entry, self.shape.exits
        if entry is not None and entry not in self.known:
            yield _error("entry", f"there is no step {entry!r}", self._meant(entry))
        elif entry is None and not self.is_dag:
            yield _error(self.whole, "it has no entry", "name its first step as the entry")
        for name in dict.fromkeys(exits):
            if name not in self.known:
                yield _error("exit", f"there is no step {name!r}", self._meant(name))
        if not exits and not self.is_dag:
            yield _error(self.whole, "it has no exit", "name at least one step as an exit")

    def arrows(self) -> Iterator[Problem]:
        needed: set[tuple[str, str]] = set()
        for arrow in self.shape.arrows:
            for end in dict.fromkeys((arrow.source, arrow.target)):
                if end not in self.known:
                    yield self._unknown(arrow, end)
            pair = (arrow.source, arrow.target)
            if arrow.kind == "needs" and pair in needed:
                yield _warning(_step(arrow.target), f"it needs {arrow.source!r} twice", "name it once")
            if arrow.kind == "needs":
                needed.add(pair)

    def _unknown(self, arrow: Arrow, end: str) -> Problem:
        how = self._meant(end)
        if arrow.kind == "needs" and end == arrow.source:
            return _error(_step(arrow.target), f"it needs {end!r}, and there is no such step", how)
        if arrow.kind == "fork" and end == arrow.target:
            return _error(_step(arrow.source), f"its branch {end!r} is not a step", how)
        if arrow.kind == "join" and end == arrow.target:
            return _error(_step(arrow.source), f"it joins at {end!r}, and there is no such step", how)
        return _error(_edge(arrow), f"there is no step {end!r}", how)

    def _meant(self, name: str) -> str:
        """Suggest a known name for an unknown one."""
        self.suggested += 1
        if self.suggested > _SUGGESTIONS:
            return ""
        near = [one for one in self.known if abs(len(one) - len(name)) <= 3][:_COMPARED]
        found = difflib.get_close_matches(name, near, n=1, cutoff=0.6)
        if found:
            return f"did you mean {found[0]!r}?"
        return f"there are: {_listed(list(self.known))}" if self.known else ""

    # -- parallel parts --------------------------------------------------------------------------------------------

    def parallels(self) -> Iterator[Problem]:
        branches: dict[str, list[str]] = {node.name: [] for node in self.shape.nodes if node.kind == "parallel"}
        joins: dict[str, list[str]] = {}
        for arrow in self.shape.arrows:
            if arrow.kind == "fork":
                branches.setdefault(arrow.source, []).append(arrow.target)
            elif arrow.kind == "join":
                joins.setdefault(arrow.source, []).append(arrow.target)
        for name, targets in branches.items():
            if not targets:
                yield _error(_step(name), "it runs in parallel, and has no branches", "name at least one")
            yield from self._branches_of(name, targets, joins)
        for way in ways_back(self.shape, _taken(self.shape, self.shape.arrows)):
            what = f"it begins again inside one of its own branches: {path_text(way)}"
            yield _error(_step(way[0]), what, "lead the branch to where it joins, and back from there")

    def _branches_of(self, name: str, branches: list[str], joins: dict[str, list[str]]) -> Iterator[Problem]:
        for branch, count in Counter(branches).items():
            if count > 1:
                yield _error(_step(name), f"its branch {branch!r} is named {count} times", "name it once")
        inside = {name, *branches}
        ends = dict.fromkeys(end for source in (name, *branches) for end in joins.get(source, ()))
        for end in ends:
            if end == name:
                yield _error(_step(name), "it joins at itself", "join at a step that comes after it")
            elif end in inside:
                yield _error(_step(name), f"it joins at {end!r}, which is one of its branches", "join at another step")

    # -- paths -----------------------------------------------------------------------------------------------------

    def cycles(self) -> Iterator[Problem]:
        """Yield the cycles of a dag: for each cyclic part, one of the shortest."""
        for part in self.circles:
            path = self.net.named(shortest_cycle(self.net, part))
            what = f"the steps need each other in a circle: {path_text(path)}"
            if len(path) == 2:
                what = f"it needs itself: {path_text(path)}"
            yield _error(_step(path[0]), what, "remove one of these needs")

    def unreachable(self) -> Iterator[Problem]:
        if self.entry is None:
            return
        found = reached(self.net.after, [self.entry])
        lost = [number for number in range(len(self.net)) if number not in found]
        for first, others in self._led_by(lost):
            what = f"no way leads to it from the entry {self.shape.entry!r}"
            if others:
                what += f", and so not to {_listed(self.net.named(others))}"
            how = "add an edge to it, or remove it, unless a step goes there with Goto"
            yield _warning(_step(self.net.names[first]), what, how)

    def _led_by(self, lost: list[int]) -> list[tuple[int, list[int]]]:
        """Group unreachable steps: those without predecessors first, each with the steps that only it leads to."""
        inside = set(lost)
        firsts = [number for number in lost if not inside.intersection(self.net.before[number]) - {number}]
        grouped: set[int] = set()
        parts = []
        for first in (*firsts, *lost):  # a cycle has no step without predecessors
            if first not in grouped:
                part = {first}
                waiting = [first]
                while waiting:
                    for target in self.net.after[waiting.pop()]:
                        if target in inside and target not in grouped and target not in part:
                            part.add(target)
                            waiting.append(target)
                grouped |= part
                parts.append((first, sorted(part - {first})))
        return parts

    def stuck(self) -> Iterator[Problem]:
        """Yield steps and loops without a path to an exit."""
        reachable = reached(self.net.after, range(len(self.net)) if self.entry is None else [self.entry])
        arrows = [arrow for arrow in self.shape.arrows if arrow.target in self.known]
        lost = {arrow.source for arrow in self.shape.arrows if arrow.target not in self.known}  # reported already
        left = {arrow.source: arrow for arrow in arrows if arrow.kind != "next" or arrow.label in _ALWAYS}
        for name in self.shape.exits:
            if name in left and name in self.known:
                what = f"a run never ends here: it always goes on to {left[name].target!r}"
                yield _warning(f"exit {name!r}", what, "give that edge a condition, or name another exit")
        exits = {self.known[name] for name in self.shape.exits if name in self.known and name not in left}
        branches = {arrow.target for arrow in self.shape.arrows if arrow.kind == "fork"}
        for number in sorted(reachable - exits):
            name = self.net.names[number]
            if not self.net.after[number] and name not in branches and name not in lost:
                how = "make it an exit, or lead an edge on from it, unless it goes on with Goto"
                yield _warning(_step(name), "it is a dead end: no way leads on, and it is not an exit", how)
        for part in self.circles:
            inside = set(part)
            leaves = any(target not in inside for number in part for target in self.net.after[number])
            if not leaves and not inside & exits and inside <= reachable:
                path = self.net.named(shortest_cycle(self.net, part))
                most = self.shape.max_iterations
                yield _warning(
                    _step(path[0]),
                    f"the loop {path_text(path)} never ends: no edge that can be taken leaves it",
                    f"lead an edge out of it, or max_iterations ({most}) ends the run",
                )

    def shadowed(self) -> Iterator[Problem]:
        """Yield edges behind one that always holds."""
        first: dict[str, Arrow] = {}
        for arrow in self.shape.arrows:
            if arrow.kind != "next":
                continue
            if arrow.source in first:
                what = (
                    f"it is never taken: the edge to {first[arrow.source].target!r} stands before it and always holds"
                )
                yield _warning(_edge(arrow), what, "put the edge without a condition last")
            elif arrow.label in _ALWAYS:
                first[arrow.source] = arrow

    def depth(self) -> Iterator[Problem]:
        if self.is_dag and self.circles:
            return
        ahead = without(self.net, self.back)
        deepest = max(depths(ahead, ordered(ahead)), default=-1) + 1
        if deepest > self.depth_limit:
            what = f"the longest way through it is {deepest} steps, and {self.depth_limit} is the limit"
            yield _error(self.whole, what, "split it: a workflow can be a step of another")


def _names(shape: Shape) -> list[str]:
    return [node.name for node in shape.nodes]


def _taken(shape: Shape, arrows: Iterable[Arrow]) -> Iterator[Arrow]:
    """Yield the arrows that can be taken: a step's edges up to the first that always holds."""
    closed: set[str] = set()
    for arrow in arrows:
        if arrow.kind != "next" or shape.form == "dag":
            yield arrow
        elif arrow.source not in closed:
            if arrow.label in _ALWAYS:
                closed.add(arrow.source)
            yield arrow


def _error(where: str, what: str, how: str = "") -> Problem:
    return Problem("error", where, what, how)


def _warning(where: str, what: str, how: str = "") -> Problem:
    return Problem("warning", where, what, how)


def _step(name: str) -> str:
    return f"step {name!r}"


def _edge(arrow: Arrow) -> str:
    return f"edge {arrow.source!r} → {arrow.target!r}"


def path_text(names: Sequence[str]) -> str:
    """Return a path as text: a → b → a. A very long path is shown without its middle."""
    if len(names) > 2 * _ENDS:
        names = [*names[:_ENDS], f"({len(names) - 2 * _ENDS:,} more)", *names[-_ENDS:]]
    return " → ".join(names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


# -- validation of many definitions ------------------------------------------------------------------------------------


class HasShape(Protocol):
    """Anything besides a shape that can be validated: a graph, a dag, a file."""

    def shape(self) -> Shape: ...


S = TypeVar("S", bound="Shape | HasShape")


@dataclass(frozen=True, slots=True)
class Validated(Generic[S]):
    """The result of one validation. `subject` is the caller's own object, never an equal one from the cache."""

    subject: S
    name: str
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether it can run. It may have warnings, but no errors."""
        return not self.errors

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(one for one in self.problems if one.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return tuple(one for one in self.problems if one.severity == "warning")

    def check(self) -> S:
        """Return the subject, or raise `InvalidGraph` with all its problems."""
        if self.errors:
            lines = [f"{self.name} cannot run; {_count(len(self.errors))}:", *map(str, self.errors)]
            raise InvalidGraph("\n  ".join(lines), self.problems)
        return self.subject


class Validator:
    """Validates definitions, and caches the results by full content for the newest `size` of them.

    `hits` and `misses` count cached and new results. Threads may share a validator.
    """

    def __init__(self, size: int = 1000, *, depth_limit: int = DEPTH_LIMIT) -> None:
        self.size = size
        self.depth_limit = depth_limit
        self.hits = 0
        self.misses = 0
        self._found: OrderedDict[str, tuple[Problem, ...]] = OrderedDict()
        self._lock = Lock()

    def validate(self, subject: S) -> Validated[S]:
        """Return the problems of a definition. Warnings are logged only when they are found, not from the cache."""
        shape = subject if isinstance(subject, Shape) else subject.shape()
        key = digest(shape)
        with self._lock:
            known = self._found.get(key)
            if known is not None:
                self.hits += 1
                self._found.move_to_end(key)
                return Validated(subject, _title(shape), known)
            self.misses += 1
        found = tuple(problems(shape, depth_limit=self.depth_limit))
        _log_warnings(shape, found)
        with self._lock:
            self._found[key] = found
            while len(self._found) > self.size:
                self._found.popitem(last=False)
        return Validated(subject, _title(shape), found)

    def validate_all(self, subjects: Iterable[S]) -> list[Validated[S]]:
        """Return the result of each subject, in order. A subject that cannot be read is reported as an error."""
        return [self._one(subject, number) for number, subject in enumerate(subjects, 1)]

    def _one(self, subject: S, number: int) -> Validated[S]:
        try:
            return self.validate(subject)
        except Exception as error:  # noqa: BLE001 - one broken subject must not hide the problems of the others
            problem = Problem("error", f"item {number}", f"it has no shape: {type(error).__name__}: {error}")
            return Validated(subject, f"item {number}", (problem,))


def digest(shape: Shape) -> str:
    """Return the identity of a shape: the SHA-256 of its whole content."""
    content: list[Any] = [
        [shape.name, shape.form, shape.entry, list(shape.exits), shape.max_iterations],
        [[node.name, node.kind, node.label] for node in shape.nodes],
        [[arrow.source, arrow.target, arrow.label, arrow.kind] for arrow in shape.arrows],
    ]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _log_warnings(shape: Shape, found: Sequence[Problem]) -> None:
    warnings = [one for one in found if one.severity == "warning"]
    for one in warnings[:_LOGGED]:
        log.warning("%s: %s", _title(shape), one)
    if len(warnings) > _LOGGED:
        log.warning("%s: %d more warnings", _title(shape), len(warnings) - _LOGGED)


def _title(shape: Shape) -> str:
    return f"{shape.form} {shape.name!r}"


def _count(number: int) -> str:
    return "1 error" if number == 1 else f"{number} errors"


#: The cache of `check`, so that a definition is validated once, however often it is started.
_SHARED = Validator()
