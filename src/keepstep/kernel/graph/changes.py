"""The records of a graph's walk: the change that a step made to the state, and the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ...errors import DefinitionError, KeepstepError, NotSerializable
from ...model import Kind, State
from ...model.tree import diff
from ...policies.reduce import reduced
from ...records.data import BarrierData, Data, StepData, new_data
from ...values.large import is_large
from ...workflows.graph import AnyNode, Changes, Goto, ParallelNode, StepNode
from ..call_states import ASKED, CANCELLED, DONE
from ..calls import DurableCall, StepCall
from ..naming import joined
from ..waits import SignalWait

if TYPE_CHECKING:
    from datetime import datetime

    from ...records.record import Record
    from ...values.trees import Trees
    from ...workflows.graph import Graph
    from ..calls import Branch
    from ..driver import RunDriver
    from .position import Position

Levels = dict[str, dict[str, Any]]

written = msgspec.json.Encoder().encode


class Walking(Protocol):
    """The walk that a change belongs to."""

    run: RunDriver
    branch: Branch
    graph: Graph
    trees: Trees
    position: Position

    def state(self, level: str = "") -> State: ...

    def choose(self, name: str, state: State) -> str | None: ...

    def recorded(self, target: str) -> str: ...


class Change:
    """The effect of a step of a graph: the stored delta, and the data beside it in the record."""

    __slots__ = ("delta", "given", "levels", "text")

    def __init__(self, walk: Walking) -> None:
        self.levels: Levels = dict(walk.position.levels)
        self.given: dict[str, list[Any]] = {}
        self.delta: dict[str, Any] = {}
        self.text = b"{}"

    def add(self, walk: Walking, key: str, level: str, change: Any, *, careful: bool = False) -> None:
        """Apply what a step returned for a level."""
        if change is None:
            return
        trees, old = walk.trees, self.levels.get(level, {})
        schema = None if level else walk.graph.schema
        plain = type(change) is dict  # the usual case
        whole = None
        if not plain and isinstance(change, State):
            whole = change.kept()
        elif not plain and schema is not None:
            given, change = change, schema.plain(change)
            whole = None if change is given else change
        if not plain and not isinstance(change, Mapping):
            model = "" if schema is None or not schema.has_instances else f"a {schema.name}, "
            raise NotSerializable(
                f"step {key!r} returned a {type(change).__name__}; a graph's step returns its change of the state as a "
                f"dictionary, {model}a whole State, ks.Goto, ks.Changes or None"
            )
        where = f"step {key!r}" if not level else f"step {key!r}: {level}"
        if whole is not None:
            values = whole
            if schema is not None:
                schema.check_removed([k for k in old if k not in values], where)
                other = {k: change[k] for k in change if k not in old or old[k] is not values[k]}
                state = State.of(old, trees.read)
                values = {**values, **schema.changed(state, other, where)}
            lifted = trees.lift(values, old, where, careful=careful)
            kept = {key: lifted[key] for key in old if key in lifted}  # in the order that a delta leaves
            self.levels[level] = kept | lifted
            return
        values = self._reduce(walk, dict(change), where) if not level else dict(change)
        if schema is not None:
            values = schema.changed(State.of(old, trees.read), values, where)
        self.levels[level] = {**old, **trees.lift(values, old, where, careful=careful)}

    def _reduce(self, walk: Walking, values: dict[str, Any], where: str) -> dict[str, Any]:
        reducers = walk.graph.reducers
        if not reducers:
            return values
        state = State.of(self.levels.get("", {}), walk.trees.read)
        for key in [key for key in values if key in reducers]:
            if walk.position.tracks:
                self.given[key] = [*self.given.get(key, ()), *walk.trees.lift({key: values[key]}, {}, where).values()]
            values[key] = reduced(reducers[key], state, key, values[key])
        return values

    def write(self, walk: Walking) -> bytes:
        """Return the delta as text."""
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

    def led_to(self, walk: Walking, name: str, target: str | None) -> tuple[BarrierData, State]:
        """Return the data beside a change, such as the next step, and the state after it."""
        data: BarrierData = {"given": self.given} if self.given and walk.position.tracks else {}
        after = walk.position.then(walk.trees, walk.run.id, self.levels)
        if target is None and name not in walk.graph.interrupt_after:
            try:
                target = walk.choose(name, after)
            except (Exception, SystemExit):  # noqa: BLE001 - raised when the walk decides: the step itself is done
                target = None
        if target is not None:
            data["next"] = walk.recorded(target)
        return data, after

    def check_size(self, walk: Walking, key: str) -> None:
        """Refuse a change after which the state is too large to be stored."""
        redaction, position = walk.run.host.redaction, walk.position
        if position.size + len(self.text) > redaction.max_value_bytes:
            position.size = size = len(written(position.levels))
            if size + len(self.text) > redaction.max_value_bytes:
                size = len(written(self.levels))
            if size > redaction.max_value_bytes:
                raise NotSerializable(
                    f"step {key!r}: with its change the state takes {size:,} bytes, over the limit of "
                    f"{redaction.max_value_bytes:,}; keep the data elsewhere and a reference in the state, or raise "
                    "max_value_bytes"
                )


def changed(walk: Walking, key: str, node: AnyNode, returned: Any) -> tuple[Change, str | None]:
    """Return the stored form of what a step returned, and the step that it wants to go to."""
    target, returned = gone_to(walk, key, returned)
    return laid(walk, key, _parts(key, node, returned)), target


def gone_to(walk: Walking, key: str, returned: Any) -> tuple[str | None, Any]:
    """Return the step that a step wants to go to, if it says so, and its change."""
    if not isinstance(returned, Goto):
        return None, returned
    if returned.target not in walk.graph.nodes:
        problem = f"step {key!r} goes to {returned.target!r}, but graph {walk.graph.name!r} has no such step"
        raise DefinitionError(problem)
    return returned.target, returned.change


def laid(
    walk: Walking, key: str, parts: Mapping[str, Any], joined: tuple[Levels, dict[str, list[Any]]] | None = None
) -> Change:
    """Return changes by level, applied to the state or to joined branches; an error names the bad key."""
    for careful in (False, True):
        change = Change(walk)
        if joined is not None:
            change.levels, change.given = dict(joined[0]), dict(joined[1])
        for level, value in parts.items():
            change.add(walk, key, level, value, careful=careful)
        try:
            change.write(walk)
        except (ValueError, TypeError):  # a lone surrogate, or an infinite number
            if careful:
                raise
            continue
        break
    return change


def _parts(key: str, node: AnyNode, returned: Any) -> dict[str, Any]:
    """Return what a step returned, by level."""
    if not isinstance(returned, Changes):
        return {"": returned}
    parts: dict[str, Any] = {"": returned.state}
    for level, value in (("stage", returned.stage), ("agent", returned.agent)):
        if value is not None:
            name = getattr(node, level, None)
            if name is None:
                raise DefinitionError(f"step {key!r} changes the state of its {level}, but has no {level}=")
            parts[f"{level}:{name}"] = value
    return parts


def given(walk: Walking, node: StepNode, level: str) -> State:
    """Return the state that a step takes for a parameter: the graph's, or that of its stage or agent."""
    return walk.state() if level == "state" else walk.state(f"{level}:{getattr(node, level)}")


def typed(walk: Walking, node: StepNode, states: tuple[State, ...]) -> tuple[Any, ...]:
    """Return the arguments of a step: its states, or instances of the schema if the step is annotated with it."""
    graph = walk.graph
    if node.name not in graph.typed or graph.schema is None:
        return states
    make = graph.schema.instance
    return tuple([make(one) if level == "state" else one for level, one in zip(node.takes, states, strict=True)])


class GraphCall(StepCall[None]):
    """The call of a graph's step: its argument is the state, and its record holds its change and the next step."""

    __slots__ = ("after", "change", "data", "given", "node", "target", "walk")

    def __init__(self, walk: Walking, node: StepNode) -> None:
        self.walk, self.node, self.step = walk, node, node.step
        DurableCall.__init__(self, walk.branch, node.name, "")
        self.names = joined(self.names, node.agent, node.stage)
        if self.entry is None:
            self.given = tuple([given(walk, node, level) for level in node.takes])
            self.kwargs = {}
        self.task, self.attempt, self.entered, self.doubtful, self.rests = None, None, False, False, False
        if self.step.undo is not None:
            self.kept = None
            walk.branch.can_undo(self.key, self.step)
        self.data: BarrierData | None = None
        self.after: State | None = None
        self.change: Change | None = None
        self.target: str | None = None

    @property
    def args(self) -> tuple[Any, ...]:  # type: ignore[override]
        """The states that the step takes. An instance of the schema is mutable, so each attempt gets its own."""
        return typed(self.walk, self.node, self.given)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, {}

    def input_data(self) -> Data | None:
        """Return the states before the step. Those of a graph's other steps are in the history."""
        if self.step.undo is None:
            return None
        levels = self.walk.position.levels
        text = self.walk.trees.encode({"state": levels.get("", {}), **{name: levels[name] for name in levels if name}})
        self.run.host.redaction.check(text, self.key, "input of step")
        return new_data(StepData, input=text.decode())

    def encode(self, value: Any) -> bytes:
        text = self.write(value)
        self.written()
        return text

    def write(self, value: Any) -> bytes:
        change, self.target = changed(self.walk, self.key, self.node, value)
        change.check_size(self.walk, self.key)
        self.change = change
        return change.text

    def written(self) -> None:
        if self.change is not None:  # the conditions of edges are the user's code, so they run on the loop's thread
            self.data, self.after = self.change.led_to(self.walk, self.node.name, self.target)

    def fitted(self, value: Any) -> Any:
        return value  # a change of the state, which is checked with the schema

    def completed(self, value: bytes, attempt: int, started_at: datetime | None, **more: Any) -> Record:
        more["data"] = {**(self.data or {}), **(more.get("data") or {})}
        if self.step.undo is not None:
            more["data"] |= self.for_undo()
        return self.record(
            Kind.STEP_COMPLETED.value,
            value,
            attempt=attempt,
            started_at=started_at,
            **more,
        )

    def decode(self, record: Record) -> None:
        change = self.change
        if change is None:
            self.walk.position.take(record)
        else:
            self.walk.position.take(record, (change.delta, change.levels))

    def read(self, record: Record) -> Any:
        return None if self.change is not None else self.walk.position.folded(record)

    def take_in(self, record: Record, value: Any) -> None:
        self.walk.position.take(record, value)


class CloseCall(DurableCall[None]):
    """The end of a graph's step that consists of more than one call."""

    __slots__ = ("change", "given", "levels", "node", "passed", "target", "wait", "walk")

    def __init__(self, walk: Walking, node: AnyNode) -> None:
        self.walk, self.node = walk, node
        self.wait: SignalWait | None = None  # the call that hears the signal, if this is a wait for one
        self.change: Any = None
        self.levels: Levels | None = None
        self.given: dict[str, list[Any]] = {}
        self.target: str | None = None
        self.passed = 0  # number of steps that the joined branches passed
        super().__init__(walk.branch, node.name, "")
        if isinstance(node, StepNode):
            self.names = joined(self.names, node.agent, node.stage)

    def returned(self, value: Any) -> None:
        """Take what the code of a step has returned."""
        self.target, self.change = gone_to(self.walk, self.key, value)

    def begin_live(self) -> None:
        if is_large((self.change, self.levels)):
            self.run.work_began()  # the run must not be parked meanwhile
            self.run.host.background(self._write_large())
            return
        try:
            change = self._laid()
        except KeepstepError as error:
            self.fail(error)
        else:
            self._close(change)

    def refuse(self) -> None:
        try:
            self._laid()
        except KeepstepError as error:
            self.run.drop_held(self)
            self.fail(error)

    async def _write_large(self) -> None:
        run = self.run
        try:
            change = await run.host.off_loop(self._laid)
        except KeepstepError as error:
            if self.state == ASKED:
                self.fail(error)
        except Exception as error:  # noqa: BLE001 - the run must not wait for it forever
            run.engine_failed(error)
        else:
            if self.state == ASKED:
                self._close(change)
        finally:
            run.work_ended()
            run.watch()

    def _laid(self) -> Change:
        """Return the joined result of the branches, applied to the state, if it can be stored."""
        joined = None if self.levels is None else (self.levels, self.given)
        change = laid(self.walk, self.key, _parts(self.key, self.node, self.change), joined)
        self.run.host.redaction.check(change.text, self.key)
        change.check_size(self.walk, self.key)
        return change

    def _close(self, change: Change) -> None:
        data, after = change.led_to(self.walk, self.node.name, self.target)
        if self.passed:
            data["passed"] = self.passed
        kind = Kind.BARRIER if isinstance(self.node, ParallelNode) else Kind.STEP_COMPLETED
        self.run.append(self.record(kind.value, change.text, attempt=1, data=data), self, state=after)

    def cancelled_by_code(self) -> None:
        asked = self.state == ASKED
        super().cancelled_by_code()
        if self.wait is None or not asked or self.state != CANCELLED:
            return
        if self.entry is None or not self.entry.cancelled:  # else the history has the signal as unread
            self.wait.leave_unread()

    def fail(self, error: BaseException) -> None:
        """Raise an error in the walk, without a record, because the result cannot be stored."""
        self.state = DONE
        self.error = error
        self.wake()

    def decode(self, record: Record) -> None:
        self.walk.position.take(record)

    def read(self, record: Record) -> Any:
        return self.walk.position.folded(record)

    def take_in(self, record: Record, value: Any) -> None:
        self.walk.position.take(record, value)
