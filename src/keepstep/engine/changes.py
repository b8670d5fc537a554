"""What a walk over a graph writes down: the change that a step made of the state, and where the walk goes then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import DefinitionError, KeepstepError, NotSerializable
from ..model import Kind, State
from ..model.tree import diff
from ..policies.reduce import reduced
from ..workflows.graph import AnyNode, Changes, Goto, ParallelNode, StepNode
from .branch import DONE, DurableCall, StepCall

if TYPE_CHECKING:
    from datetime import datetime

    from ..stores.records import Record
    from .walk import Walk

Levels = dict[str, dict[str, Any]]

written = msgspec.json.Encoder().encode


class Change:
    """What a step of a graph did: the delta as it is stored, and what stands beside it in the record."""

    __slots__ = ("delta", "given", "levels", "text")

    def __init__(self, walk: Walk) -> None:
        self.levels: Levels = dict(walk.position.levels)
        self.given: dict[str, list[Any]] = {}
        self.delta: dict[str, Any] = {}
        self.text = b"{}"

    def add(self, walk: Walk, key: str, level: str, change: Any, *, careful: bool = False) -> None:
        """Lay what a step returned for a level over it."""
        if change is None:
            return
        trees, old = walk.trees, self.levels.get(level, {})
        plain = type(change) is dict  # as a rule
        if not plain and not isinstance(change, Mapping):
            raise NotSerializable(
                f"step {key!r} returned a {type(change).__name__}; a graph's step returns its change of the state as a "
                "dictionary, a whole State, ks.Goto, ks.Changes or None"
            )
        where = f"step {key!r}" if not level else f"step {key!r}: {level}"
        if not plain and isinstance(change, State):
            values = change.kept()
            if walk.graph.schema is not None and not level:
                other = {k: change[k] for k in change if k not in old or old[k] is not values[k]}
                values = {**values, **walk.graph.schema.converted(other, where)}
            lifted = trees.lift(values, old, where, careful=careful)
            kept = {key: lifted[key] for key in old if key in lifted}  # in the order that a delta leaves
            self.levels[level] = kept | lifted
            return
        values = self._reduce(walk, dict(change), where) if not level else dict(change)
        if walk.graph.schema is not None and not level:
            values = walk.graph.schema.converted(values, where)
        self.levels[level] = {**old, **trees.lift(values, old, where, careful=careful)}

    def _reduce(self, walk: Walk, values: dict[str, Any], where: str) -> dict[str, Any]:
        reducers = walk.graph.reducers
        if not reducers:
            return values
        state = State.of(self.levels.get("", {}), walk.trees.read)
        for key in [key for key in values if key in reducers]:
            if walk.position.tracks:
                self.given[key] = [*self.given.get(key, ()), *walk.trees.lift({key: values[key]}, {}, where).values()]
            values[key] = reduced(reducers[key], state, key, values[key])
        return values

    def write(self, walk: Walk) -> bytes:
        """The delta as text."""
        whole: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for level, keys in self.levels.items():
            old = walk.position.levels.get(level)
            delta = {} if keys is old else diff(old or {}, keys)
            if not level:
                whole = delta
            elif delta:
                others[level] = delta
        if others:
            whole["levels"] = others
        self.delta, self.text = whole, walk.trees.encode(whole)
        return self.text

    def checked(self, walk: Walk, key: str, name: str, target: str | None) -> tuple[dict[str, Any], State]:
        """What stands beside a change that is not too large, such as the next step, and the state after it."""
        self._check_size(walk, key)
        data: dict[str, Any] = {"given": self.given} if self.given and walk.position.tracks else {}
        after = walk.position.then(walk.trees, walk.run.id, self.levels)
        if target is None and name not in walk.graph.interrupt_after:
            try:
                target = walk.choose(name, after)
            except (Exception, SystemExit):  # noqa: BLE001 - told when the walk decides, since the step itself is done
                target = None
        if target is not None:
            data["next"] = walk.recorded(target)
        return data, after

    def _check_size(self, walk: Walk, key: str) -> None:
        """Refuse a change after which the state is too large to be stored."""
        censor, position = walk.run.engine.censor, walk.position
        if position.size + len(self.text) > censor.max_value_bytes:
            position.size = size = len(written(position.levels))
            if size + len(self.text) > censor.max_value_bytes:
                size = len(written(self.levels))
            if size > censor.max_value_bytes:
                raise NotSerializable(
                    f"step {key!r}: with its change the state takes {size:,} bytes, over the limit of "
                    f"{censor.max_value_bytes:,}; keep the data elsewhere and a reference in the state, or raise "
                    "max_value_bytes"
                )


def changed(walk: Walk, key: str, node: AnyNode, returned: Any) -> tuple[Change, str | None]:
    """What a step returned as what is stored, and where it wants to go itself."""
    target = None
    if isinstance(returned, Goto):
        target, returned = returned.target, returned.change
        if target not in walk.graph.nodes:
            raise DefinitionError(f"step {key!r} goes to {target!r}, which is no step of graph {walk.graph.name!r}")
    return laid(walk, key, _parts(key, node, returned)), target


def laid(
    walk: Walk, key: str, parts: Mapping[str, Any], joined: tuple[Levels, dict[str, list[Any]]] | None = None
) -> Change:
    """Changes by level, laid over the state or over what came of branches; what cannot be stored is told by its key."""
    for careful in (False, True):
        change = Change(walk)
        if joined is not None:
            change.levels, change.given = dict(joined[0]), dict(joined[1])
        for level, value in parts.items():
            change.add(walk, key, level, value, careful=careful)
        try:
            change.write(walk)
        except (ValueError, TypeError):  # a lone surrogate, a number without end
            if careful:
                raise
            continue
        break
    return change


def _parts(key: str, node: AnyNode, returned: Any) -> dict[str, Any]:
    """What a step returned, by level."""
    if not isinstance(returned, Changes):
        return {"": returned}
    parts: dict[str, Any] = {"": returned.state}
    for level, value in (("stage", returned.stage), ("agent", returned.agent)):
        if value is not None:
            name = getattr(node, level, None)
            if name is None:
                raise DefinitionError(f"step {key!r} changes the state of its {level}, but names no {level}=")
            parts[f"{level}:{name}"] = value
    return parts


class GraphCall(StepCall[None]):
    """The call of a graph's step: it is given the state, and its record is what it changed and where it went."""

    __slots__ = ("after", "change", "data", "node", "walk")

    def __init__(self, walk: Walk, node: StepNode) -> None:
        self.walk, self.node, self.step = walk, node, node.step
        DurableCall.__init__(self, walk.branch, node.name, "")
        if self.entry is None:
            self.args = tuple([self._given(level) for level in node.takes])
            self.kwargs = {}
        self.task, self.entered, self.doubtful = None, False, False
        self.data: dict[str, Any] | None = None
        self.after: State | None = None
        self.change: Change | None = None

    def _given(self, level: str) -> State:
        if level == "state":
            return self.walk.state()
        return self.walk.state(f"{level}:{getattr(self.node, level)}")

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, {}  # a state cannot be changed by whoever sees it

    def encode(self, value: Any) -> bytes:
        walk = self.walk
        change, target = changed(walk, self.key, self.node, value)
        self.data, self.after = change.checked(walk, self.key, self.node.name, target)
        self.change = change
        return change.text

    def fitted(self, value: Any) -> Any:
        return value  # a change of the state, which is held to the schema

    def completed(self, value: bytes, attempt: int, started_at: datetime | None, **more: Any) -> Record:
        node = self.node
        more["data"] = {**(self.data or {}), **(more.get("data") or {})}
        return self.record(
            Kind.STEP_COMPLETED.value,
            value,
            attempt=attempt,
            started_at=started_at,
            stage=node.stage,
            agent=node.agent,
            **more,
        )

    def decode(self, record: Record) -> None:
        change = self.change
        if change is None:
            self.walk.position.take(record)
        else:
            self.walk.position.take(record, (change.delta, change.levels))


class CloseCall(DurableCall[None]):
    """The end of a point of a graph that is more than one call."""

    __slots__ = ("change", "given", "levels", "node", "passed", "target", "walk")

    def __init__(self, walk: Walk, node: AnyNode) -> None:
        self.walk, self.node = walk, node
        self.change: Any = None
        self.levels: Levels | None = None
        self.given: dict[str, list[Any]] = {}
        self.target: str | None = None
        self.passed = 0  # how many steps the branches passed that are joined here
        super().__init__(walk.branch, node.name, "")

    def begin_live(self) -> None:
        joined = None if self.levels is None else (self.levels, self.given)
        try:
            change = laid(self.walk, self.key, {"": self.change}, joined)
            self.run.engine.censor.check(change.text, self.key)
            data, after = change.checked(self.walk, self.key, self.node.name, self.target)
        except KeepstepError as error:
            self.fail(error)
            return
        if self.passed:
            data["passed"] = self.passed
        kind = Kind.BARRIER if isinstance(self.node, ParallelNode) else Kind.STEP_COMPLETED
        self.run.append(self.record(kind.value, change.text, attempt=1, data=data), self, state=after)

    def fail(self, error: BaseException) -> None:
        """What came of it cannot be stored: the walk raises that, and nothing is recorded."""
        self.state = DONE
        self.error = error
        self.wake()

    def decode(self, record: Record) -> None:
        self.walk.position.take(record)
