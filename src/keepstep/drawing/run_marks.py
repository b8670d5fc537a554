"""Marks of a picture: the result of each step of a definition, from the records of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..kernel.replay import Superseded, read_records
from ..model import Kind, Outcome, Status
from ..model.checkpoint import ABOUT_CHILD, ANSWERS_CALL, LEAVES_STEP_OPEN, PASSES_STEP, is_timeout
from ..model.signal import RESERVED
from ..model.undo import is_undo
from ..records.data import Data, data_of
from ..workflows.shape import Arrow, Node, Shape
from .marks import Mark, State

if TYPE_CHECKING:
    from ..kernel.host import StoredRuns
    from ..model import Run
    from ..records.record import Record

#: Kinds of nodes at which a run waits for something outside.
_WAITS = frozenset({"wait", "delay", "child", "approval"})
_ENDED = {Status.FAILED: State.FAILED, Status.SET_ASIDE: State.FAILED, Status.CANCELLED: State.CANCELLED}
#: Kinds of nodes for the records of a function's run.
_DRAWN_AS = {Kind.TIMER: "delay", Kind.SIGNAL: "wait", Kind.CHILD: "child", Kind.AGENT_COMPLETED: "child"}


class Moment(NamedTuple):
    """The relevant parts of a record."""

    kind: Kind
    key: str
    state: State | None  # None if the record does not end a step
    next: str | None = None
    choice: int | None = None

    @property
    def name(self) -> str:
        """The step, without the branch of its call and the number of the call."""
        return self.key.rpartition("/")[2].rpartition("#")[0]


async def moments(host: StoredRuns, run: Run) -> list[Moment]:
    """Return the moments of a run, in order, without records that a rewind or a retry has superseded."""
    return moments_of([record async for record, _ in read_records(host, run)])


def moments_of(records: Iterable[Record]) -> list[Moment]:
    """Return the moments of records, in order, without those that a rewind or a retry has superseded."""
    superseded, found = Superseded(), []
    for record in records:
        if record.kind == Kind.SUPERSEDED:
            superseded.add(record)
        found.append((record.seq, _moment(record)))
    return [moment for seq, moment in found if seq not in superseded]


def _moment(record: Record) -> Moment:
    kind, data = Kind(record.kind), data_of(record, Data)
    state = None
    if kind == Kind.STEP_CANCELLED or record.outcome == Outcome.CANCELLED:
        state = State.CANCELLED
    elif kind == Kind.TIMER and (record.outcome == Outcome.FAILURE or is_timeout(record.step)):
        state = State.TIMED_OUT
    elif record.outcome == Outcome.FAILURE:
        state = None if record.retry_at is not None else State.FAILED
    elif kind in ABOUT_CHILD:
        if "child" not in data:  # the child's result, not its start
            state = State.COMPLETED if _went_well(record) else State.FAILED
    elif kind in ANSWERS_CALL:
        state = State.COMPLETED
    return Moment(kind, record.step, state, data.get("next"), data.get("choice"))


def _went_well(record: Record) -> bool:
    """Whether a child reports that it completed; false if the report cannot be read without a key."""
    try:
        word = json.loads(record.raw())
    except (ValueError, TypeError):
        return True
    return not isinstance(word, dict) or word.get("status", "completed") == "completed"


def marks_of(shape: Shape, run: Run, happened: Iterable[Moment]) -> dict[str, Mark]:
    """Return the mark of each step of a graph or dag; a step without one was not reached."""
    return (_InDag if shape.form == "dag" else _InGraph)(shape, run, happened).marks()


def unknown_steps(shape: Shape, happened: Iterable[Moment]) -> list[str]:
    """Return the steps that a run has passed but its definition lacks: the run belongs to another version."""
    known = {node.name for node in shape.nodes}
    known |= {f"{arrow.source}.fork" for arrow in shape.arrows if arrow.kind == "fork"}  # no node in a file
    passed = (one for one in happened if one.kind in PASSES_STEP and "/" not in one.key and not is_undo(one.key))
    return sorted({one.name for one in passed} - known)


class _Progress:
    """The progress of each step so far: its last state, and its calls."""

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
        """Return the state of a step that has begun and not ended, from the status of its run."""
        if self.run.status in _ENDED:
            return _ENDED[self.run.status]
        return State.RUNNING if self.run.status.active and self.kinds[name] not in _WAITS else State.WAITING


class _InGraph(_Progress):
    """Follows a run along the edges that it took, in its own branch and in those of its parallel parts.

    A parallel part after a step begins at a point named `step.fork`, which may not be drawn itself.
    """

    def __init__(self, shape: Shape, run: Run, happened: Iterable[Moment]) -> None:
        self.at: dict[str, str | None] = {"": shape.entry}
        self.passed: set[str] = set()
        self.late: set[str] = set()  # keys of waits whose time was over before their signal came
        self.branches: dict[str, list[str]] = {}
        self.joins = {arrow.source: arrow.target for arrow in shape.arrows if arrow.kind == "join"}
        for arrow in shape.arrows:
            if arrow.kind == "fork":
                self.branches.setdefault(arrow.source, []).append(arrow.target)
        super().__init__(shape, run, happened)

    def _forks(self, name: str) -> str:
        """Return the step whose branches begin at this point; empty if none do."""
        step = name if name in self.kinds else name.removesuffix(".fork")
        return step if step in self.branches else ""

    def take(self, moment: Moment) -> None:
        path, name, inside = self._place(moment.key)
        if moment.kind == Kind.SUPERSEDED:
            if moment.next is not None:  # a person chose the next step
                self.at[""] = moment.next
        elif moment.kind == Kind.DECISION and not inside:
            self.at[path] = moment.next
        elif moment.state == State.TIMED_OUT and inside:
            self.late.add(moment.key.rpartition("/")[0])
        elif moment.state is not None and not inside and (name in self.kinds or self._forks(name)):
            if name in self.kinds:
                late = moment.state == State.COMPLETED and moment.key in self.late and self.kinds[name] == "wait"
                self.put(name, moment.key, State.TIMED_OUT if late else moment.state)
            if moment.state == State.COMPLETED:
                self.passed.add(moment.key)
                self.at[path] = moment.next
                for other in [one for one in self.at if one.startswith(f"{moment.key}.")]:
                    del self.at[other]

    def _place(self, key: str) -> tuple[str, str, bool]:
        """Return the branch and the step of a key, and whether the key is a call inside the step's body."""
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
        """Mark the current position: the next step of each branch that has not reached its join."""
        waiting: list[tuple[str, str]] = [("", "")]  # the branch, and the join where it ends
        while waiting:
            path, join = waiting.pop()
            name = self.at.get(path)
            if not name or name == join:
                continue
            key = self._next_key(path, name)
            if name in self.kinds and key not in self.calls[name]:  # otherwise the step has ended, and nothing followed
                state = self.under_way(name)  # beside a failed step, it was abandoned
                self.put(name, key, State.CANCELLED if path and state == State.FAILED else state)
            forks = self._forks(name)
            if forks and (name != forks or self.kinds.get(name) == "parallel"):
                for way in self.branches[forks]:
                    self.at.setdefault(f"{key}.{way}", way)
                    waiting.append((f"{key}.{way}", self.joins.get(forks, "")))

    def _next_key(self, path: str, name: str) -> str:
        """Return the key of the call of a step that is, or was, under way."""
        prefix = f"{path}/" if path else ""
        count = 1
        while f"{prefix}{name}#{count}" in self.passed:
            count += 1
        return f"{prefix}{name}#{count}"


class _InDag(_Progress):
    """Combines the records with the needs of each step."""

    def __init__(self, shape: Shape, run: Run, happened: Iterable[Moment]) -> None:
        self.started: set[str] = set()
        super().__init__(shape, run, happened)

    def take(self, moment: Moment) -> None:
        if "/" in moment.key:
            self.started.add(moment.key.partition("#")[0])
            return
        name = moment.name.removesuffix(".result") if moment.kind in ABOUT_CHILD else moment.name
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
        """Derive states: a step is skipped if all its needs were, and is under way once all its needs are done."""
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
    from ..errors import InvalidGraph  # noqa: PLC0415 - only needed for a shape without an order
    from ..workflows.validate import order  # noqa: PLC0415 - only needed for a shape without an order

    try:
        return order(shape)
    except InvalidGraph:
        return [node.name for node in shape.nodes]


# -- a function --------------------------------------------------------------------------------------------------------


def shape_of(run: Run, happened: Iterable[Moment]) -> tuple[Shape, dict[str, Mark]]:
    """Return the steps of a function's run in the order in which they ended; repeated calls are one step."""
    return _row(run.workflow, _steps_of(run, happened))


def _steps_of(run: Run, happened: Iterable[Moment]) -> list[tuple[str, str, Mark]]:
    found: list[tuple[str, str, Mark]] = []
    tried: dict[str, None] = {}
    for moment in happened:
        name = moment.name.removesuffix(".result")
        if moment.state is None or not name:
            if moment.kind in LEAVES_STEP_OPEN or moment.kind in ABOUT_CHILD:
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
    return found


def _row(name: str, found: list[tuple[str, str, Mark]]) -> tuple[Shape, dict[str, Mark]]:
    """Return steps in sequence, each under a unique name."""
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


def folded_shape_of(run: Run, happened: Iterable[Moment]) -> tuple[Shape, dict[str, Mark]]:
    """Return the steps of a function's run by name, each once, with an arrow for each way from one to the next."""
    found = _steps_of(run, happened)
    kinds, marks = {name: kind for name, kind, _ in reversed(found)}, dict[str, Mark]()
    for name, _, mark in found:
        before = marks.get(name)
        marks[name] = mark if before is None else Mark(mark.state, before.visits + mark.visits)
    ways = dict.fromkeys((one[0], other[0]) for one, other in pairwise(found) if one[0] != other[0])
    nodes = tuple(Node(name, kinds[name]) for name in marks)
    arrows = tuple(Arrow(source, target) for source, target in ways)
    return Shape(run.workflow, "run", nodes, arrows, nodes[0].name if nodes else None), marks
