"""Walks over a graph: calls one step after the other, folds what each changed, and takes the edge that was chosen.

What a step changed and the edge that was taken stand in one record, so a recovery goes the same way. A point that is
more than one call (a wait, a map, a child, a parallel part) makes its calls in a branch of its own, named by its key,
and ends with one record, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import DefinitionError, ExecutionError, InvalidGraph, KeepstepError
from ..model import Kind, State
from ..model.signal import GO, breakpoint_call
from ..policies.quorum import Verdict, coverage, degraded
from ..policies.reduce import reduced
from ..ports import CURRENT
from ..stores.records import Record
from ..workflows.graph import AnyNode, ChildNode, DelayNode, MapNode, ParallelNode, StepNode, WaitNode
from .branch import Branch, Detached, Gate
from .changes import CloseCall, GraphCall, Levels
from .children import start
from .position import Position, keys_of
from .together import Group, Limits, mapped
from .waits import SignalCall, sleep, wait_for
from .wakeups import fulfil

if TYPE_CHECKING:
    from ..workflows.graph import Graph
    from ..workflows.schema import Schema


async def walk(branch: Branch, graph: Graph, initial: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow of a graph: go from its entry, or from where its newest state says, to an exit."""
    run = branch.run
    if run.workflow is not graph or branch.path:
        raise DefinitionError(
            f"graph {graph.name!r} is called inside another workflow; start it there: await ks.start({graph.name}, ...)"
        )
    graph.close()
    position = run.position
    if position is None:
        levels = {"": graph.trees.lift(initial, {}, f"graph {graph.name!r}: its first state", careful=True)}
        position = run.position = Position(levels, graph.entry_name)
        position.threshold = position.size = len(run.run.input)
    else:
        branch.counts.update(position.counts)
        branch.ordinal = position.ordinal
    await Walk(branch, graph, position).go(until="")
    return dict(position.state(graph.trees, run.id))


class Walk:
    """One way through a graph: the run's own, or that of a branch of a parallel part."""

    def __init__(self, branch: Branch, graph: Graph, position: Position, inside: tuple[str, ...] = ()) -> None:
        self.branch, self.graph, self.position = branch, graph, position
        self.inside = inside  # the parallel parts around it, the outermost first
        self.run = branch.run
        self.trees = graph.trees
        self.until = ""  # where the branches of a parallel part join

    async def go(self, until: str) -> None:
        """Pass one step after the other, up to the end or to where branches join."""
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
                told = f"the next step is {at!r}, which graph {graph.name!r} does not have; put it back"
                cure = "or name another one (keepstep edit RUN --next STEP, handle.edit)"
                self.run.mismatch(f"{told}, {cure}", "handler")
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
            self._take_edits()  # what a person changed meanwhile is part of a state that is written now
            self._consolidate()  # not before the stop: who goes on from there has it behind them

    def state(self, level: str = "") -> State:
        return self.position.state(self.trees, self.run.id, level)

    # -- which comes next ---------------------------------------------------------------------------------------------

    def choose(self, name: str, state: State) -> str | None:
        """The first edge that holds; empty where a run or a branch may end, None where no edge holds."""
        graph = self.graph
        for edge in graph.edges.get(name, ()):
            if edge.when is None or edge.when(state):
                return edge.target
        if name in graph.exits or (self.position.tracks and name not in graph.edges):
            return ""
        return None

    def recorded(self, target: str) -> str:
        """What a record says comes next: of a branch that it ends, for another version may join somewhere else."""
        return "" if target == self.until else target

    async def _decide(self) -> str:
        """Choose what comes after a step whose record could not say it, and go on when that is durable."""
        position, run = self.position, self.run
        key = f"{position.step}.next"
        recorded = run.notes.pop(key, None)
        target: str | None = None
        if recorded is not None:
            target = (recorded.data or {}).get("next")
        else:
            name = position.trail[-1]
            try:
                target = self.choose(name, self.state())
            except (Exception, SystemExit) as error:
                raise self._failed(name, error, f"an edge of {name!r} could not be decided") from error
            if target is None:
                told = f"no edge from {name!r} holds, and it is no exit; edit the state (handle.edit), or the graph"
                raise self._failed(name, None, told)
            record = Record(run.id, Kind.DECISION.value, step=key, worker=run.worker, data={"next": target})
            record.asked = run.told
            await self._write(record)
        position.at = target
        return target or ""

    async def _write(self, record: Record) -> None:
        """Record something that the next step depends on; under a weaker durability it is not waited for."""
        run = self.run
        record.finished_at = run.time()
        if run.gathers:
            run.append(record)
            return
        gate = Gate(loop=run.loop)
        run.append(record, then=partial(fulfil, gate))
        await gate

    def _count(self, name: str) -> None:
        visits = self.branch.counts.get(name, 0)
        passed = self.position.before + self.position.passed
        if passed >= self.graph.max_iterations:
            told = f"the run passed {passed} steps, which is max_iterations; if that is right, raise it there"
            raise self._failed(name, None, told)
        if name in self.inside:
            told = f"parallel {name!r} begins again inside one of its own branches"
            raise self._failed(name, None, f"{told}; lead the branch to where it joins, and back from there")
        teller = self.run.engine.teller
        if visits and teller.observed and self.run.history is None:
            teller.observe("step.revisited", self.run, step=f"{self.branch.prefix}{name}#{visits + 1}", visits=visits)

    def _failed(self, name: str, error: BaseException | None, told: str = "") -> ExecutionError:
        path = tuple(self.position.trail)
        here = told and path and path[-1] == name  # the step is passed; what comes after it is the trouble
        way = " → ".join(path[-8:] if here else [*path[-8:], name])
        message = told or f"step {name!r} failed"
        if isinstance(error, KeepstepError):
            message = f"{message}: {error}"
        elif error is not None:
            message = f"{message}: {type(error).__name__}: {error}"
        failed = ExecutionError(f"{message} (path: {way})", self.run.id, step=name, path=path, state=self.state())
        failed.__cause__ = error
        return failed

    # -- what a person does meanwhile ---------------------------------------------------------------------------------

    def _take_edits(self) -> None:
        """Fold in what a person changed before what comes next was recorded."""
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
            edit = run.edits.pop(0)
            position.edit(edit)
            if recorded is None:  # else it was taken up before
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
            told = f"{where} gave values of other types than the schema has for {', '.join(map(repr, values))}"
        except DefinitionError as error:
            told = str(error)
        cure = "edit the run again (keepstep edit RUN --workflow FILE.py:NAME, handle.edit)"
        self.run.mismatch(f"{told}; {cure}", "handler")
        raise Detached(f"run {self.run.id} is set aside")

    async def _stop_at(self, key: str, when: str) -> None:
        """A breakpoint: wait until a person lets the run go on."""
        self.run.engine.teller.observe("run.interrupted", self.run, step=key, when=when)
        place = f"{key}.{when}"
        branch, history = Branch(self.run, place), self.run.history
        recorded = None if history is None else history.entries.get(breakpoint_call(key, when))
        # A parallel part may have a branch of this name, whose calls count from 1. Older histories count the stop, too.
        branch.ordinal = -1 if recorded is None else recorded.ordinal - 1
        await SignalCall(branch, f"{GO}{place}", None, None)

    # -- writing it down ----------------------------------------------------------------------------------------------

    def _consolidate(self) -> None:
        run, position = self.run, self.position
        if position.tracks or run.history is not None or run.detached:
            return
        if run.holding or run.cancelling or run.timed_out:  # what is recorded of these must not lie before the state
            return
        text = position.consolidated(run.seq, run.facts)
        if text is not None:
            record = Record(run.id, Kind.STATE.value, worker=run.worker, value=msgspec.Raw(text))
            record.finished_at = run.time()
            run.append(record)

    # -- passing one --------------------------------------------------------------------------------------------------

    async def _pass(self, node: AnyNode) -> None:
        if isinstance(node, StepNode):
            await GraphCall(self, node)
            return
        close = CloseCall(self, node)
        inner = Branch(self.run, close.key)
        if isinstance(node, WaitNode):
            close.change = await self._wait(node, inner)
        elif isinstance(node, DelayNode):
            await _within(inner, sleep, node.seconds)
        elif isinstance(node, ChildNode):
            close.change = await self._child(node, inner)
        elif isinstance(node, MapNode):
            close.change = await self._map(node, inner)
        else:
            await self._parallel(node, close)
        await close

    async def _wait(self, node: WaitNode, inner: Branch) -> dict[str, Any]:
        more = {"default": node.default} if node.has_default else {}
        payload = await _within(inner, wait_for, node.signal, node.timeout, **more)
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
                raise KeyError(f"workflow {workflow.name!r} takes {missing[0]!r}, which the state does not have")
            child = await _within(inner, start, workflow, **{name: state[name] for name in names})
        result = await _within(inner, child.result)
        if node.gives is not None:
            return {node.gives: result}
        return result if isinstance(result, Mapping) else {node.name: result}

    async def _map(self, node: MapNode, inner: Branch) -> dict[str, Any]:
        items = self.state().get(node.over)
        if not isinstance(items, list | tuple):
            there = "not there" if items is None else f"a value of type {type(items).__name__}"
            told = f"map {node.name!r} goes over state[{node.over!r}], which is {there}; it must be a list"
            raise TypeError(told)
        limits = Limits.of(node.step, len(items), node.concurrency, node.wait, collect=node.collect)
        results = await mapped(inner, inner.path, node.step, list(items), limits)
        return {node.into: list(results)}

    async def _parallel(self, node: ParallelNode, close: CloseCall) -> None:
        """Go all branches at once; what those that came through have changed becomes one change."""
        run, graph = self.run, self.graph
        inside = (*self.inside, node.name)
        walks = [
            Walk(Branch(run, f"{close.key}.{way}"), graph, self.position.fork(way, f"{close.key}.{way}"), inside)
            for way in node.branches
        ]
        parts = [lambda one=one: run.spawn_in(one.branch, one.go(node.join)) for one in walks]
        group = Group(run, parts, max(1, len(parts)), node.wait, collect=node.collect)
        if parts:
            await group.go()
        if node.wait.enough(group.total, group.succeeded, len(group.errors)) is not Verdict.DONE and not node.collect:
            raise group.first_error() or InvalidGraph(f"parallel {node.name!r} has no branch that could succeed")
        through = [one for index, one in enumerate(walks) if index in group.order and index not in group.errors]
        close.levels, close.given = self._joined(node, through)
        close.target = node.join
        close.passed = sum(one.position.passed for one in through)
        if node.report is not None:
            failed = {node.branches[index]: str(error) for index, error in sorted(group.errors.items())}
            close.change = {
                node.report: {
                    "coverage": coverage(group.total, group.succeeded),
                    "degraded": degraded(group.total, group.succeeded),
                    "failed": failed,
                }
            }

    def _joined(self, node: ParallelNode, walks: list[Walk]) -> tuple[Levels, dict[str, list[Any]]]:
        """The states after all branches, in the order of their names; two writers of a key need a reducer."""
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
                    values = self.graph.schema.converted(values, where)
                levels[""] |= self.trees.lift(values, levels[""], where)
        return levels, given


def _conflict(node: ParallelNode, level: str, key: str, one: str, other: str) -> InvalidGraph:
    where = f"{level} " if level else ""
    return InvalidGraph(
        f"parallel {node.name!r}: steps {one!r} and {other!r} both write {where}{key!r}; give the key a reducer "
        "(append, add, max, min, merge or a function), or let one of them write another key"
    )


def _check_given(node: ParallelNode, owners: Mapping[tuple[str, str], str], givers: Mapping[str, str]) -> None:
    """What a reducer makes of several must not meet what somebody wrote whole."""
    for key, step in givers.items():
        whole = owners.get(("", key))
        if whole is not None:
            raise InvalidGraph(
                f"parallel {node.name!r}: step {whole!r} writes {key!r} whole, while {step!r} gives to it by its "
                "reducer; let both of them return what they give, as a dictionary"
            )


async def _within(branch: Branch, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a call of a workflow in another branch than the code's own."""
    token = CURRENT.set(branch)
    try:
        call = function(*args, **kwargs)
    finally:
        CURRENT.reset(token)
    return await call
