"""Walks over a graph: calls one step after the other, applies its change, and takes the chosen edge.

The change of a step and the chosen edge are in one record, so a recovery goes the same way. A step that consists of
several calls (a wait, a map, a child, a parallel part) makes them in its own branch, named by its key, and ends with
one record, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import DefinitionError, ExecutionError, InvalidGraph, KeepstepError, StepError
from ...model import Kind, State
from ...model.signal import GO, breakpoint_call
from ...policies.quorum import Verdict, coverage, degraded
from ...policies.reduce import reduced
from ...ports import CURRENT
from ...records.data import DecisionData, data_of, new_data
from ...records.record import Record
from ...workflows.graph import AnyNode, ChildNode, DelayNode, Graph, MapNode, ParallelNode, StepNode, WaitNode
from ..call_states import Detached
from ..calls import Branch, CompositeWait
from ..children import start
from ..combine import Group, Limits, mapped
from ..log import fulfil
from ..strands import spawn_in
from ..waits import SignalCall, sleep, wait_for
from .changes import CloseCall, GraphCall, Levels, given, typed
from .position import Position, keys_of

if TYPE_CHECKING:
    from ...workflows.schema import Schema


#: Number of read signals that a run with `keep="newest"` keeps, so that a signal that is sent again is recognised.
KEPT_SIGNALS = 1000


async def walk(branch: Branch, graph: Graph, initial: Mapping[str, Any]) -> dict[str, Any]:
    """Run the workflow of a graph: go from its entry, or from its newest recorded state, to an exit."""
    run = branch.run
    if run.workflow is not graph or branch.path:
        raise DefinitionError(
            f"graph {graph.name!r} cannot be called inside a workflow; start it: await ks.start({graph.name}, ...)"
        )
    graph.close()
    position = run.position
    if position is None:
        levels = {"": graph.trees.lift(initial, {}, f"graph {graph.name!r}: its first state", careful=True)}
        position = Position(levels, graph.entry_name)
        position.began_at = run.run.created_at
        run.walk_begun(position)
        position.threshold = position.size = len(run.run.input)
    else:
        branch.counts.update(position.counts)
        branch.ordinal = position.ordinal
    await Walk(branch, graph, position).go(until="")
    return dict(position.state(graph.trees, run.id))


class Walk:
    """One path through a graph: the run's own, or that of a branch of a parallel part."""

    def __init__(self, branch: Branch, graph: Graph, position: Position, inside: tuple[str, ...] = ()) -> None:
        self.branch, self.graph, self.position = branch, graph, position
        self.inside = inside  # the parallel parts around it, the outermost first
        self.run = branch.run
        self.trees = graph.trees
        self.until = ""  # the step at which the branches of a parallel part join

    async def go(self, until: str) -> None:
        """Pass one step after the other, up to the end or to the join of branches."""
        graph, position = self.graph, self.position
        self.until = until
        while True:
            self._take_edits()
            at = position.at
            if at is None:
                at = await self._decide()
            if at in ("", until):
                position.at = ""
                return
            node = graph.nodes.get(at)
            if node is None:
                problem = f"the next step is {at!r}, which graph {graph.name!r} does not have; restore it"
                cure = "or name another one (keepstep edit RUN --next STEP, handle.edit)"
                self.run.mismatch(f"{problem}, {cure}", "handler")
                raise Detached(f"run {self.run.id} is set aside")
            self._count(at)
            if at in graph.interrupt_before:
                await self._stop_at(f"{self.branch.prefix}{at}#{self.branch.counts.get(at, 0) + 1}", "before")
                self._take_edits()
                if position.at != at:
                    continue
            try:
                await self._pass(node)
            except (ExecutionError, asyncio.CancelledError):
                raise
            except Exception as error:
                raise self._failed(at, error) from error
            if at in graph.interrupt_after and position.step is not None:
                await self._stop_at(position.step, "after")
            self._take_edits()  # a state written now includes a person's edits
            self._consolidate()  # after the stop, so that a run that goes on from the state has passed it

    def state(self, level: str = "") -> State:
        return self.position.state(self.trees, self.run.id, level)

    # -- the next step -------------------------------------------------------------------------------------------------

    def choose(self, name: str, state: State) -> str | None:
        """Return the target of the first edge that holds; "" where a run or a branch may end, None if no edge holds."""
        graph = self.graph
        for edge in graph.edges.get(name, ()):
            if edge.when is None or edge.when(state):
                return edge.target
        if name in graph.exits or (self.position.tracks and name not in graph.edges):
            return ""
        return None

    def recorded(self, target: str) -> str:
        """Return the next step to record; "" at the end of a branch, because another version may join elsewhere."""
        return "" if target == self.until else target

    async def _decide(self) -> str:
        """Choose the step after one whose record has no choice, and go on when the choice is durable."""
        position, run = self.position, self.run
        key = f"{position.step}.next"
        recorded = run.take_note(key)
        target: str | None = None
        if recorded is not None:
            target = data_of(recorded, DecisionData).get("next")
        else:
            name = position.trail[-1]
            try:
                target = self.choose(name, self.state())
            except (Exception, SystemExit) as error:
                raise self._failed(name, error, f"an edge of {name!r} cannot be decided") from error
            if target is None:
                problem = (
                    f"no edge from {name!r} holds, and it is not an exit; edit the state (handle.edit), or the graph"
                )
                raise self._failed(name, None, problem)
            data = new_data(DecisionData, next=target)
            record = Record(run.id, Kind.DECISION.value, step=key, worker=run.worker, data=data)
            record.asked = run.last_delivered
            await self._write(record)
        position.at = target
        return target or ""

    async def _write(self, record: Record) -> None:
        """Record something that the next step depends on; under a weaker durability, do not wait for it."""
        run = self.run
        record.finished_at = run.time()
        if run.buffers:
            run.append(record)
            return
        waiter = CompositeWait(loop=run.loop)
        run.append(record, then=partial(fulfil, waiter))
        await waiter

    def _count(self, name: str) -> None:
        visits = self.branch.counts.get(name, 0)
        passed = self.position.before + self.position.passed
        if passed >= self.graph.max_iterations:
            problem = (
                f"the run passed {passed} steps, which is max_iterations; if that is intended, raise it, "
                "with on_change='compatible' so that this run may go on, and retry"
            )
            raise self._failed(name, None, problem)
        if name in self.inside:
            problem = f"parallel {name!r} begins again inside one of its own branches"
            raise self._failed(name, None, f"{problem}; lead the branch to where it joins, and back from there")
        events = self.run.host.events
        if visits and events.observed and self.run.history is None:
            events.observe("step.revisited", self.run, step=f"{self.branch.prefix}{name}#{visits + 1}", visits=visits)

    def _failed(self, name: str, error: BaseException | None, problem: str = "") -> ExecutionError:
        path = tuple(self.position.trail)
        here = problem and path and path[-1] == name  # the step is passed; the failure is in what follows
        way = " → ".join(path[-8:] if here else [*path[-8:], name])
        message = problem or f"step {name!r} failed"
        if not problem and isinstance(error, StepError) and error.step.rpartition("/")[2].partition("#")[0] == name:
            message = str(error)  # it names the step itself
        elif isinstance(error, KeepstepError):
            message = f"{message}: {error}"
        elif error is not None:
            message = f"{message}: {type(error).__name__}: {error}"
        failed = ExecutionError(f"{message} (path: {way})", self.run.id, step=name, path=path, state=self.state())
        failed.__cause__ = error
        return failed

    # -- edits and breakpoints -----------------------------------------------------------------------------------------

    def _take_edits(self) -> None:
        """Apply edits that a person made before the next step was recorded."""
        run, position = self.run, self.position
        if position.tracks or not run.edits:
            return
        if position.at is None:
            recorded: Any = run.notes.get(f"{position.step}.next")
        else:
            key = f"{position.at}#{self.branch.counts.get(position.at, 0) + 1}"
            recorded = None if run.history is None else run.history.entries.get(key)
        changed: dict[str, None] = {}
        while run.edits and (recorded is None or run.edits[0].seq < recorded.seq):
            edit = run.take_edit()
            position.edit(edit)
            if recorded is None:  # otherwise it was applied before
                changed |= dict.fromkeys(keys_of(edit))
        if changed and self.graph.schema is not None:
            self._check_edited([*changed], self.graph.schema)

    def _check_edited(self, keys: list[str], schema: Schema) -> None:
        """Set the run aside if an edit that was made without the graph's code does not fit its schema."""
        state, where = self.state(), "an edit of its state"
        values = {key: state[key] for key in keys if key in state}
        try:
            fitting = self.trees.lift(schema.converted(values, where), {}, where)
            if fitting == {key: self.position.levels[""][key] for key in values}:
                return
            problem = f"{where} gave values of other types than the schema has for {', '.join(map(repr, values))}"
        except DefinitionError as error:
            problem = str(error)
        cure = "edit the run again (keepstep edit RUN --workflow FILE.py:NAME, handle.edit)"
        self.run.mismatch(f"{problem}; {cure}", "handler")
        raise Detached(f"run {self.run.id} is set aside")

    async def _stop_at(self, key: str, when: str) -> None:
        """Wait at a breakpoint until a person lets the run go on."""
        self.run.host.events.observe("run.interrupted", self.run, step=key, when=when)
        place = f"{key}.{when}"
        branch, history = Branch(self.run, place), self.run.history
        branch.names = self.branch.names
        recorded = None if history is None else history.entries.get(breakpoint_call(key, when))
        # A parallel part may have a branch of this name, whose calls count from 1. Older histories count the
        # breakpoint, too.
        branch.ordinal = -1 if recorded is None else recorded.ordinal - 1
        await SignalCall(branch, f"{GO}{place}", None, None)

    # -- recording -----------------------------------------------------------------------------------------------------

    def _consolidate(self) -> None:
        run, position = self.run, self.position
        if position.tracks or run.history is not None or run.stop.detached:
            return
        if run.stop.holding or run.stop.is_ending:  # their records must not come before the state
            return
        text = position.consolidated(run.seq, run.facts)
        if text is not None:
            record = Record(run.id, Kind.STATE.value, worker=run.worker, value=msgspec.Raw(text))
            record.finished_at = run.time()
            before, position.last_state = position.last_state, record
            if before is None or not before.seq or self.graph.keep != "newest":
                run.append(record)
            else:  # this state and the one before it are kept, so that a damaged one can be derived again
                change = {"trim": before.seq}
                if position.read_signals > KEPT_SIGNALS:
                    change["trim_signals"] = position.read_signals - KEPT_SIGNALS + 1
                run.append_special(record, change, takes_along=True)
            position.read_signals = run.inbox.all_read(position.read_signals)

    # -- passing a step ------------------------------------------------------------------------------------------------

    async def _pass(self, node: AnyNode) -> None:
        if isinstance(node, StepNode) and not node.waits:
            await GraphCall(self, node)
            return
        close = CloseCall(self, node)
        inner = Branch(self.run, close.key)
        inner.names = close.names
        if isinstance(node, StepNode):
            states = tuple([given(self, node, level) for level in node.takes])
            close.returned(await _running(inner, node.step.fn(*typed(self, node, states))))
        elif isinstance(node, WaitNode):
            close.change = await self._wait(node, inner, close)
        elif isinstance(node, DelayNode):
            await _within(inner, sleep, node.seconds)
        elif isinstance(node, ChildNode):
            close.change = await self._child(node, inner)
        elif isinstance(node, MapNode):
            close.change = await self._map(node, inner)
        else:
            await self._parallel(node, close)
        await close

    async def _wait(self, node: WaitNode, inner: Branch, close: CloseCall) -> dict[str, Any]:
        more = {"default": node.default} if node.has_default else {}
        more |= {"type": self.graph.type_of(node.into), "heartbeat": node.heartbeat}
        close.wait = _called(inner, wait_for, node.signal, node.timeout, **more)
        payload = await close.wait
        return {} if node.into is None else {node.into: payload}

    async def _child(self, node: ChildNode, inner: Branch) -> Any:
        state, workflow = self.state(), node.workflow
        if getattr(workflow, "carries_state", False):
            taken = {key: state[key] for key in node.takes or state if key in state}
            child = await _within(inner, start, workflow, taken)
        else:
            names = node.takes or [name for name in workflow.signature.parameters if name in state]
            missing = [name for name in names if name not in state]
            if missing:
                raise KeyError(f"workflow {workflow.name!r} needs {missing[0]!r}, which the state does not have")
            child = await _within(inner, start, workflow, **{name: state[name] for name in names})
        result = await _within(inner, child.result)
        if node.gives is not None:
            return {node.gives: result}
        if isinstance(workflow, Graph) and workflow.result is not None:
            result = workflow.result.plain(result)
        return result if isinstance(result, Mapping) else {node.name: result}

    async def _map(self, node: MapNode, inner: Branch) -> dict[str, Any]:
        items = self.state().get(node.over)
        if not isinstance(items, list | tuple):
            there = "missing" if items is None else f"a value of type {type(items).__name__}"
            problem = f"map {node.name!r} goes over state[{node.over!r}], which is {there}; it must be a list"
            raise TypeError(problem)
        limits = Limits.of(self.run, node.step, node.concurrency, node.wait, collect=node.collect)
        results = await mapped(inner, inner.path, node.step, list(items), limits)
        return {node.into: list(results)}

    async def _parallel(self, node: ParallelNode, close: CloseCall) -> None:
        """Run all branches at once, and join the changes of the successful ones."""
        run, graph = self.run, self.graph
        inside = (*self.inside, node.name)
        walks = [
            Walk(Branch(run, f"{close.key}.{way}"), graph, self.position.fork(way, f"{close.key}.{way}"), inside)
            for way in node.branches
        ]
        for one in walks:
            one.branch.names = close.names
        parts = [lambda one=one: spawn_in(run, one.branch, one.go(node.join)) for one in walks]
        group = Group(run, parts, max(1, len(parts)), node.wait, collect=node.collect)
        if parts:
            await group.go()
        if node.wait.enough(group.total, group.succeeded, len(group.errors)) is not Verdict.DONE and not node.collect:
            raise group.first_error() or InvalidGraph(f"parallel {node.name!r} has no branch that could succeed")
        through = [one for index, one in enumerate(walks) if group.has_value(index)]
        close.levels, close.given = self._joined(node, through)
        close.target = node.join
        close.passed = sum(one.position.passed for one in through)
        if node.report is not None:
            failed = {node.branches[index]: str(error) for index, error in sorted(group.errors.items())}
            close.change = {
                node.report: {
                    "coverage": coverage(len(parts), group.succeeded),
                    "degraded": degraded(len(parts), group.succeeded),
                    "failed": failed,
                }
            }

    def _joined(self, node: ParallelNode, walks: list[Walk]) -> tuple[Levels, dict[str, list[Any]]]:
        """Return the states after all branches, in the order of their names; two writers of a key need a reducer."""
        levels = {level: dict(keys) for level, keys in self.position.levels.items()}
        owners: dict[tuple[str, str], str] = {}
        given: dict[str, list[Any]] = {}
        givers: dict[str, str] = {}
        for one in walks:
            for level, writers in one.position.writers.items():
                for key, step in writers.items():
                    other = owners.setdefault((level, key), step)
                    if other != step:
                        raise _conflict(node, level, key, other, step)
                    keys, now = levels.setdefault(level, {}), one.position.levels[level]
                    if key in now:
                        keys[key] = now[key]
                    else:
                        keys.pop(key, None)
            for key, contributions in one.position.given.items():
                given.setdefault(key, []).extend(contributions)
                givers[key] = one.position.givers[key]
        _check_given(node, owners, givers)
        for key, contributions in given.items():
            for one_given in contributions:
                state = State.of(levels[""], self.trees.read)
                value = reduced(self.graph.reducers[key], state, key, self.trees.read(one_given, key))
                values, where = {key: value}, f"join of {node.name!r}"
                if self.graph.schema is not None:
                    values = self.graph.schema.changed(state, values, where)
                levels[""] |= self.trees.lift(values, levels[""], where)
        return levels, given


def _conflict(node: ParallelNode, level: str, key: str, one: str, other: str) -> InvalidGraph:
    where = f"{level} " if level else ""
    return InvalidGraph(
        f"parallel {node.name!r}: steps {one!r} and {other!r} both write {where}{key!r}; give the key a reducer "
        "(append, add, max, min, merge or a function), or let one of them write another key"
    )


def _check_given(node: ParallelNode, owners: Mapping[tuple[str, str], str], givers: Mapping[str, str]) -> None:
    """Raise an error if a key gets a whole value and values for its reducer."""
    for key, step in givers.items():
        whole = owners.get(("", key))
        if whole is not None:
            raise InvalidGraph(
                f"parallel {node.name!r}: step {whole!r} writes {key!r} whole, while {step!r} gives to it by its "
                "reducer; let both return their values as a dictionary"
            )


def _called(branch: Branch, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a call of a workflow in another branch than the code's own."""
    token = CURRENT.set(branch)
    try:
        return function(*args, **kwargs)
    finally:
        CURRENT.reset(token)


async def _running(branch: Branch, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run code of the workflow in another branch, and wait for its end."""
    before = CURRENT.get()
    CURRENT.set(branch)
    try:
        return await coroutine
    finally:
        CURRENT.set(before)


async def _within(branch: Branch, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a call of a workflow in another branch, and wait for it."""
    return await _called(branch, function, *args, **kwargs)
