"""What a walk over a made-up graph must come to, foreseen without an engine by an interpreter of a few lines."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from .graphs import END, REDUCERS, TAKEN, Layout, Point, Values, change_by, first_state, holds, laid
from .programs import Fails, expected


@dataclass
class Foreseen:
    """What an undisturbed walk comes to: its last state, or None if it fails, and what each step sees."""

    state: Values | None = None
    seen: dict[str, Values] = field(default_factory=dict)


def foreseen(run: Values) -> Foreseen:
    """Walk over the course of a run without an engine."""
    found = Foreseen()
    try:
        found.state = _Walk(laid(run["parts"][0]), run["most"], found.seen).go(first_state(run), "", END)
    except Fails:
        found.state = None
    return found


class _Walk:
    """One way through a layout, with what it wrote and gave."""

    def __init__(self, layout: Layout, most: int, seen: dict[str, Values], path: str = "", before: int = 0) -> None:
        self.layout, self.most, self.seen, self.path = layout, most, seen, path
        self.before, self.passed = before, 0
        self.counts: dict[str, int] = {}
        self.written: dict[str, None] = {}
        self.given: dict[str, list[Any]] = {}

    def go(self, state: Values, until: str, last: str, at: str = "") -> Values:
        """Pass one point after the other."""
        at = at or self.layout.entry
        while at != until:
            visits = self.counts.get(at, 0)
            if self.before + self.passed >= self.most:
                raise Fails
            self.counts[at] = visits + 1
            point = self.layout.points[at]
            state = self._pass(point, f"{self.path}{at}#{visits + 1}", deepcopy(state))
            self.passed += 1
            if at == last and not until:
                return state
            at = point.more if point.kind == "jump" else self._next(at, state)
        return state

    def end(self, state: Values, join: str, branch: str) -> Values | None:
        """Where a branch comes out, or None if it fails; the others have begun all the same."""
        try:
            return self.go(state, join, END, branch)
        except Fails:
            return None

    def _next(self, at: str, state: Values) -> str:
        ways = self.layout.edges[at]
        return next(target for target, when in ways if when is None or (when != ["whim"] and holds(when, state)))

    def _pass(self, point: Point, key: str, state: Values) -> Values:
        number = point.number
        if point.kind == "fan":
            return self._fan(point, key, state)
        if point.kind == "delay":
            return state
        if point.kind == "map":
            return self._write(state, {f"m{number}": [10 * item + number for item in state["items"]]}, [])
        if point.kind == "wait":
            return self._write(state, {point.more[1]: number}, [])
        if point.kind == "child":
            return self._write(state, {f"g{number}": expected(state["statement"])}, [])
        if point.kind == "sub":
            inside = _Walk(laid(point.more), self.most, {})
            taken = {key: state[key] for key in TAKEN if key in state}
            return self._write(state, {f"s{number}": inside.go(taken, "", END)}, [])
        self.seen[key] = deepcopy(state)
        if point.kind == "fails":
            raise Fails
        return self._write(state, *change_by(point.ops, state))

    def _write(self, state: Values, change: Values, gone: list[str]) -> Values:
        for key, value in change.items():
            if key in REDUCERS:
                self.given.setdefault(key, []).append(value)
                state[key] = _reduced(key, state, value)
            else:
                self.written[key] = None
                state[key] = value
        for key in gone:
            self.written[key] = None
            state.pop(key, None)
        return state

    def _fan(self, point: Point, key: str, state: Values) -> Values:
        policy, branches, join = point.more
        begun = self.before + self.passed
        walks = [_Walk(self.layout, self.most, self.seen, f"{key}.{branch}/", begun) for branch in branches]
        ends = [walk.end(deepcopy(state), join, branch) for walk, branch in zip(walks, branches, strict=True)]
        if None in ends:
            raise Fails
        for walk, end in zip(walks[: 1 if policy == "any" else None], ends, strict=False):
            for name in walk.written:
                self.written[name] = None
                state.pop(name, None)
                if end is not None and name in end:
                    state[name] = end[name]
        for walk in walks[: 1 if policy == "any" else None]:
            self.passed += walk.passed
            for name, contributions in walk.given.items():
                self.given.setdefault(name, []).extend(contributions)
                for one in contributions:
                    state[name] = _reduced(name, state, one)
        return state


def _reduced(key: str, state: Values, given: Any) -> Any:
    if REDUCERS[key] == "append":
        return [*state.get(key, []), *given]
    if key not in state:
        return given
    if REDUCERS[key] == "add":
        return state[key] + given
    return max(state[key], given) if REDUCERS[key] == "max" else {**state[key], **given}
