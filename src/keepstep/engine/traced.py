"""What a run has made of each step of its definition, told by its records: the marks of a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..model import Kind, Outcome, Status
from ..model.signal import RESERVED
from ..workflows.pictures.marks import Mark, State
from ..workflows.shape import Arrow, Node, Shape
from .history import Superseded, read_records

if TYPE_CHECKING:
    from ..model import Run
    from ..stores.records import Record
    from .engine import Engine

#: Kinds that a definition gives to points at which a run waits for something outside.
_WAITS = frozenset({"wait", "delay", "child", "approval"})
_PASSED = frozenset({Kind.STEP_COMPLETED, Kind.BARRIER, Kind.TIMER, Kind.SIGNAL})
_ENDED = {Status.FAILED: State.FAILED, Status.SET_ASIDE: State.FAILED, Status.CANCELLED: State.CANCELLED}
#: How the records of a function's run are drawn.
_DRAWN_AS = {Kind.TIMER: "delay", Kind.SIGNAL: "wait", Kind.CHILD: "child"}


class Moment(NamedTuple):
    """What counts of a record."""

    kind: Kind
    key: str
    state: State | None  # None: it does not end a step
    next: str | None = None
    choice: int | None = None

    @property
    def name(self) -> str:
        """The step, without the branch in which it was called and the number of the call."""
        return self.key.rpartition("/")[2].rpartition("#")[0]


async def moments(engine: Engine, run: Run) -> list[Moment]:
    """What happened in a run, in order; what a rewind or a retry has superseded is left out."""
    superseded, found = Superseded(), []
    async for record, _ in read_records(engine, run):
        if record.kind == Kind.SUPERSEDED:
            superseded.add(record)
        found.append((record.seq, _moment(record)))
    return [moment for seq, moment in found if seq not in superseded]


def _moment(record: Record) -> Moment:
    kind, data = Kind(record.kind), record.data or {}
    state = None
    if kind == Kind.STEP_CANCELLED or record.outcome == Outcome.CANCELLED:
        state = State.CANCELLED
    elif record.outcome == Outcome.FAILURE:
        state = None if record.retry_at is not None else State.FAILED
    elif kind in _PASSED:
        state = State.COMPLETED
    elif kind == Kind.CHILD and "child" not in data:  # its result, not its start
        state = State.COMPLETED if _went_well(record) else State.FAILED
    return Moment(kind, record.step, state, data.get("next"), data.get("choice"))


def _went_well(record: Record) -> bool:
    """Whether a child's word says that it completed; one that cannot be read, for want of a key, does not say."""
    try:
        word = json.loads(record.raw())
    except (ValueError, TypeError):
        return True
    return not isinstance(word, dict) or word.get("status", "completed") == "completed"


def marks_of(shape: Shape, run: Run, happened: Iterable[Moment]) -> dict[str, Mark]:
    """What became of each step of a graph or dag; a step that is not in it was not reached."""
    return (_InDag if shape.form == "dag" else _InGraph)(shape, run, happened).marks()


def unknown_steps(shape: Shape, happened: Iterable[Moment]) -> list[str]:
    """The steps that a run has passed and its definition does not have: it was written for another version."""
    known = {node.name for node in shape.nodes}
    known |= {f"{arrow.source}.fork" for arrow in shape.arrows if arrow.kind == "fork"}  # no node in a file
    passed = (one for one in happened if one.kind in (Kind.STEP_COMPLETED, Kind.BARRIER) and "/" not in one.key)
    return sorted({one.name for one in passed} - known)


class _Told:
    """What is told of each step so far: the last state, and the calls that there were."""

    def __init__(self, shape: Shape, run: Run, happened: Iterable[Moment]) -> None:
        self.shape, self.run = shape, run
        self.kinds = {node.name: node.kind for node in shape.nodes}
        self.states: dict[str, State] = {}
        self.calls: dict[str, set[str]] = {name: set() for name in self.kinds}
        self.begun = False
        for moment in happened:
            self.begun = True
            self.take(moment)

    def take(self, moment: Moment) -> None:
        raise NotImplementedError

    def put(self, name: str, key: str, state: State) -> None:
        self.states[name] = state
        self.calls[name].add(key)

    def marks(self) -> dict[str, Mark]:
        return {name: Mark(state, len(self.calls[name])) for name, state in self.states.items()}

    def under_way(self, name: str) -> State:
        """What a step is that has begun and not ended, by where its run stands."""
        if self.run.status in _ENDED:
            return _ENDED[self.run.status]
        return State.RUNNING if self.run.status.active and self.kinds[name] not in _WAITS else State.WAITING


class _InGraph(_Told):
    """Follows a run along the edges that it took, in its own branch and in those of its parallel parts.

    After a step, a parallel part begins at a point that is named after it, `step.fork`, and may not be drawn itself.
    """

    def __init__(self, shape: Shape, run: Run, happened: Iterable[Moment]) -> None:
        self.at: dict[str, str | None] = {"": shape.entry}
        self.passed: set[str] = set()
        self.branches: dict[str, list[str]] = {}
        self.joins = {arrow.source: arrow.target for arrow in shape.arrows if arrow.kind == "join"}
        for arrow in shape.arrows:
            if arrow.kind == "fork":
                self.branches.setdefault(arrow.source, []).append(arrow.target)
        super().__init__(shape, run, happened)

    def _forks(self, name: str) -> str:
        """The step from which branches go at this point; empty if none do."""
        step = name if name in self.kinds else name.removesuffix(".fork")
        return step if step in self.branches else ""

    def take(self, moment: Moment) -> None:
        path, name, inside = self._place(moment.key)
        if moment.kind == Kind.SUPERSEDED:
            if moment.next is not None:  # a person has said where it goes on
                self.at[""] = moment.next
        elif moment.kind == Kind.DECISION and not inside:
            self.at[path] = moment.next
        elif moment.state is not None and not inside and (name in self.kinds or self._forks(name)):
            if name in self.kinds:
                self.put(name, moment.key, moment.state)
            if moment.state == State.COMPLETED:
                self.passed.add(moment.key)
                self.at[path] = moment.next
                for other in [one for one in self.at if one.startswith(f"{moment.key}.")]:
                    del self.at[other]

    def _place(self, key: str) -> tuple[str, str, bool]:
        """The branch and the step that a key belongs to, and whether it is a call inside of what the step does."""
        *above, last = key.split("/")
        for depth, part in enumerate(above):
            name = part.partition("#")[0]
            if not self._forks(name):
                return "/".join(above[:depth]), name, True
        return "/".join(above), last.rpartition("#")[0], False

    def marks(self) -> dict[str, Mark]:
        if self.begun and self.run.status != Status.COMPLETED:
            self._mark_current()
        return super().marks()

    def _mark_current(self) -> None:
        """Mark where the run is: the next step of each branch that has not come to its join."""
        waiting: list[tuple[str, str]] = [("", "")]  # the branch, and the join that it goes up to
        while waiting:
            path, join = waiting.pop()
            name = self.at.get(path)
            if not name or name == join:
                continue
            key = self._next_key(path, name)
            if name in self.kinds and key not in self.calls[name]:  # else it has ended, and nothing came after it
                state = self.under_way(name)  # beside one that failed, it was given up
                self.put(name, key, State.CANCELLED if path and state == State.FAILED else state)
            forks = self._forks(name)
            if forks and (name != forks or self.kinds.get(name) == "parallel"):
                for way in self.branches[forks]:
                    self.at.setdefault(f"{key}.{way}", way)
                    waiting.append((f"{key}.{way}", self.joins.get(forks, "")))

    def _next_key(self, path: str, name: str) -> str:
        """The key of the call of a step that is, or was, under way."""
        prefix = f"{path}/" if path else ""
        count = 1
        while f"{prefix}{name}#{count}" in self.passed:
            count += 1
        return f"{prefix}{name}#{count}"


class _InDag(_Told):
    """Puts what was recorded beside what each step needs."""

    def __init__(self, shape: Shape, run: Run, happened: Iterable[Moment]) -> None:
        self.started: set[str] = set()
        super().__init__(shape, run, happened)

    def take(self, moment: Moment) -> None:
        if "/" in moment.key:
            self.started.add(moment.key.partition("#")[0])
            return
        name = moment.name.removesuffix(".result") if moment.kind == Kind.CHILD else moment.name
        if moment.kind == Kind.DECISION and moment.choice == 0:
            name = name.removeprefix("when:")
            if name in self.kinds:
                self.states[name] = State.SKIPPED
        elif name in self.kinds and moment.state is not None:
            self.put(name, f"{name}#1", moment.state)
        else:
            self.started.add(name)

    def marks(self) -> dict[str, Mark]:
        if self.begun:
            self._derive()
        return super().marks()

    def _derive(self) -> None:
        """Steps are skipped if all that they need was, and are under way once all that they need is there."""
        needs: dict[str, list[str]] = {name: [] for name in self.kinds}
        for arrow in self.shape.arrows:
            if arrow.target in needs:
                needs[arrow.target].append(arrow.source)
        ended = self.run.status in (*_ENDED, Status.COMPLETED)
        for name in _in_order(self.shape):
            found = [self.states.get(need) for need in needs[name]]
            if name in self.states:
                continue
            if found and all(state == State.SKIPPED for state in found):
                self.states[name] = State.SKIPPED
            elif name in self.started or (not ended and all(one in (State.COMPLETED, State.SKIPPED) for one in found)):
                state = self.under_way(name)
                self.put(name, f"{name}#1", State.CANCELLED if state == State.FAILED else state)


def _in_order(shape: Shape) -> list[str]:
    from ..errors import InvalidGraph  # noqa: PLC0415 - only for what has no order
    from ..workflows.validate import order  # noqa: PLC0415 - as above

    try:
        return order(shape)
    except InvalidGraph:
        return [node.name for node in shape.nodes]


# -- a function --------------------------------------------------------------------------------------------------------


def shape_of(run: Run, happened: Iterable[Moment]) -> tuple[Shape, dict[str, Mark]]:
    """What a run of a function did: its steps in the order in which they ended; the same one several times is one."""
    found: list[tuple[str, str, Mark]] = []
    tried: dict[str, None] = {}
    for moment in happened:
        name = moment.name.removesuffix(".result")
        if moment.state is None or not name:
            if moment.kind in (Kind.STEP_FAILED, Kind.STEP_STARTED, Kind.CHILD):
                tried[moment.key.removesuffix("#1")] = None
            continue
        tried.pop(moment.key.replace(".result#", "#").removesuffix("#1"), None)
        kind = _DRAWN_AS.get(moment.kind, "step")
        if found and found[-1][:2] == (name, kind):
            last = found[-1][2]
            state = last.state if moment.state == State.COMPLETED else moment.state
            found[-1] = (name, kind, Mark(state, last.visits + 1))
        else:
            found.append((name, kind, Mark(moment.state, 1)))
    if not run.status.finished:
        state = State.RUNNING if run.status.active else State.WAITING
        open_ = [name.rpartition("/")[2].partition("#")[0] for name in tried]
        found += [(name, "step", Mark(state, 1)) for name in dict.fromkeys(open_)]
        waits = [name for name in run.wakes if not name.startswith(RESERVED)] if run.status == Status.WAITING else []
        found += [(f"wait_for:{name}", "wait", Mark(State.WAITING, 1)) for name in waits]
    return _row(run.workflow, found)


def _row(name: str, found: list[tuple[str, str, Mark]]) -> tuple[Shape, dict[str, Mark]]:
    """Steps one after the other, each under a name of its own."""
    nodes: list[Node] = []
    marks: dict[str, Mark] = {}
    counts: dict[str, int] = {}
    for step, kind, mark in found:
        counts[step] = counts.get(step, 0) + 1
        shown = step if counts[step] == 1 else f"{step} ({counts[step]})"
        while shown in marks:
            shown += "'"
        nodes.append(Node(shown, kind))
        marks[shown] = mark
    arrows = tuple(Arrow(one.name, other.name) for one, other in pairwise(nodes))
    return Shape(name, "run", tuple(nodes), arrows, nodes[0].name if nodes else None), marks
