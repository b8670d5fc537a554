"""Performs a dag: each step begins as soon as its needs are done, in the order of their outcomes.

Its behaviour depends only on the definition, the inputs and the order of the outcomes. A recovery receives the recorded
outcomes in the same order, so it does the same again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from heapq import heappop, heappush
from os import cpu_count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import ExecutionError, KeepstepError
from ..model import Kind, Outcome
from ..policies import All, Quorum, classify
from ..policies.quorum import Verdict as Enough
from ..records.data import DecisionData, new_data
from ..records.record import Record
from .call_states import ASKED, Detached
from .calls import Branch, CompositeWait, DurableCall, StepCall
from .children import ChildResult, StartCall
from .combine import MAX_ASYNC_STEPS, MAX_THREAD_STEPS, Limits, mapped
from .naming import joined
from .publish import decided
from .steering import cancel_child
from .stored_errors import stored_error
from .strands import spawn_in

if TYPE_CHECKING:
    from ..ports import Answer
    from ..workflows.dag import Dag
    from ..workflows.plan import Vertex

#: Names, and errors, in a message at most.
_NAMED = 8

#: The states of a step. The needs of a step that has begun are no longer examined.
WAITING, BEGUN, SUCCEEDED, FAILED, SKIPPED = range(5)


async def walk_dag(branch: Branch, dag: Dag, inputs: dict[str, Any]) -> dict[str, Any]:
    """Perform the steps of a dag; its result holds the results of its last steps by name, None for a skipped one."""
    walk = Walk(branch, dag, inputs)
    await walk.go()
    return {walk.order[index].name: walk.results[index] for index in walk.last}


class Unfit(DurableCall[Any]):
    """A step cannot begin, because its predicate or its arguments fail; this counts as the step's failure."""

    __slots__ = ("reason",)

    def __init__(self, branch: Branch, name: str, reason: BaseException) -> None:
        self.reason = reason
        super().__init__(branch, name, "unfit")

    def begin_live(self) -> None:
        error = stored_error(self.reason, str(classify(self.reason)), 1, self.run)
        record = self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=error)
        self.run.append(record, self)


class Walk:
    """A dag in progress. Outcomes move it, not tasks of its own; `waiter` is done when the last steps are.

    A need is *met* when it succeeded. The arguments of a step are fixed when enough of its needs are met, whenever it
    begins. A skipped need is not counted at all; a failed one counts against the step's policy.
    """

    def __init__(self, branch: Branch, dag: Dag, inputs: dict[str, Any]) -> None:
        plan = dag.plan
        self.branch = branch
        self.run = branch.run
        self.place = Branch(branch.run, branch.path)
        self.inputs = inputs
        self.order = plan.order
        self.last = plan.last
        size = len(self.order)
        self.states = [WAITING] * size
        self.results: list[Any] = [None] * size
        self.calls: list[DurableCall[Any] | None] = [None] * size
        self.tasks: dict[int, asyncio.Task[list[Any]]] = {}  # steps in progress for each element of a list
        self.given: list[dict[str, Any] | None] = [None] * size
        self.succeeded = [0] * size
        self.failed = [0] * size
        self.skipped = [0] * size
        self.counts = {SUCCEEDED: self.succeeded, FAILED: self.failed, SKIPPED: self.skipped}
        self.unfit: dict[int, BaseException] = {}  # why a step cannot begin
        self.errors: dict[int, BaseException] = {}  # the errors of failed steps
        self.causes: dict[int, list[int]] = {}  # the steps that made one fail: itself, or needs of needs
        self.changed: deque[int] = deque()  # ended steps whose dependents are not yet updated
        self.open = len(self.last)
        self.error: BaseException | None = None
        self.over = False
        self.waiter = CompositeWait(loop=self.run.loop)
        self.context = copy_context()  # of the code: steps are begun during a delivery, in another one
        # maximum number of steps in progress
        self.limit = dag.concurrency or MAX_ASYNC_STEPS
        self.thread_limit = dag.concurrency or max(1, min(2 * (cpu_count() or 1), MAX_THREAD_STEPS))
        self.under_way = 0
        self.in_threads = 0
        self.threaded = [vertex.step is not None and not vertex.step.is_async for vertex in self.order]
        self.ready: list[int] = []
        self.ready_threads: list[int] = []

    async def go(self) -> None:
        """Begin the steps without needs, and wait until the last steps are done or one has failed for good."""
        for index, vertex in enumerate(self.order):
            if not vertex.needs:
                self._enough(index)
        self._move()
        done = False
        try:
            await self.waiter
            done = self.error is None
        finally:
            self._withdraw(done)
        if self.error is not None:
            raise self.error

    # -- moving --------------------------------------------------------------------------------------------------------

    def _move(self) -> bool:
        """Update the dependents of ended steps, and begin steps that may begin. Return whether the walk is over."""
        while self.changed and not self.over:
            index = self.changed.popleft()
            dependents = self.order[index].dependents
            if not dependents:
                self._last_ended(index)
            counts = self.counts[self.states[index]]
            for dependent in dependents:
                counts[dependent] += 1
                if self.states[dependent] == WAITING:
                    self._look(dependent)
        self._fill()
        return self.over

    def _last_ended(self, index: int) -> None:
        self.open -= 1
        if self.states[index] == FAILED:
            self.error = self._execution_error(index)
        if self.open == 0 or self.error is not None:
            self.over = True
            if not self.waiter.done():
                self.waiter.set_result(None)

    def _look(self, index: int) -> None:
        """Update a step after one of its needs has ended."""
        vertex = self.order[index]
        total = len(vertex.needs) - self.skipped[index]
        if total == 0:
            self._end(index, SKIPPED)
            return
        if self.succeeded[index] == total:  # enough for every policy that does not wait for all
            self._enough(index)
            return
        verdict = _policy(vertex, total).enough(total, self.succeeded[index], self.failed[index])
        if verdict is Enough.DONE:
            self._enough(index)
        elif verdict is Enough.IMPOSSIBLE:
            causes = [cause for need in vertex.needs for cause in self.causes.get(need, ())]
            self.causes[index] = [*dict.fromkeys(causes)]
            self._end(index, FAILED)

    def _enough(self, index: int) -> None:
        """Fix the arguments of a step with enough met needs, and decide whether to perform it."""
        vertex = self.order[index]
        self.states[index] = BEGUN
        given = {name: self.inputs[name] for name, needed in vertex.inputs if name in self.inputs}
        for name, need, needed in vertex.results:
            if self.states[need] == SUCCEEDED:
                given[name] = self.results[need]
            elif needed:
                given[name] = None
        self.given[index] = given
        if vertex.when is None and _question(vertex) not in self.run.notes:
            self._queue(index)
        else:  # there is no predicate, or it returned true
            self._decide(index, vertex)

    def _end(self, index: int, state: int) -> None:
        self.states[index] = state
        self.changed.append(index)

    def _execution_error(self, index: int) -> BaseException:
        """Return the error of the run: the failed step, or the one that cannot begin because too many needs failed."""
        causes = self.causes[index]
        errors = [self.errors[cause] for cause in causes]
        at = causes[0] if len(causes) == 1 else index
        name, path = self.order[at].name, self._path(at)
        way = f" (after {', '.join(path[-_NAMED:])})" if path else ""
        if len(causes) == 1:
            message, cause = _named(name, errors[0]), errors[0]
        else:
            named = zip(causes[:_NAMED], errors, strict=False)
            failures = "; ".join(_named(self.order[cause].name, error) for cause, error in named)
            message = f"step {name!r} cannot begin, because too many of its needs have failed: {failures}"
            cause = ExceptionGroup("the steps that failed", [one for one in errors if isinstance(one, Exception)])
        done = {self.order[one].name: self.results[one] for one, how in enumerate(self.states) if how == SUCCEEDED}
        failed = ExecutionError(f"{message}{way}", self.run.id, step=name, path=path, state=done)
        failed.__cause__ = cause
        return failed

    def _path(self, index: int) -> list[str]:
        """Return the successful steps that led to one, in their order."""
        found: set[int] = set()
        waiting = [index]
        while waiting:
            for need in self.order[waiting.pop()].needs:
                if need not in found and self.states[need] == SUCCEEDED:
                    found.add(need)
                    waiting.append(need)
        return [self.order[one].name for one in sorted(found)]

    # -- predicates ----------------------------------------------------------------------------------------------------

    def _decide(self, index: int, vertex: Vertex) -> None:
        """Ask the step's predicate once, and continue when the answer is durable; a recovery uses the recorded one."""
        run, key = self.run, _question(vertex)
        choice = decided(self.branch, key)
        if choice is not None:
            run.take_note(key)
            self._decided(index, choice)
            return
        if self._is_recorded(vertex):  # recorded without a decision: the predicate failed
            self.unfit[index] = RuntimeError("the predicate failed")
            self._queue(index)
            return
        assert vertex.when is not None  # noqa: S101 - only steps with a predicate come here
        seen = {name: self.results[need] for name, need in vertex.seen if self.states[need] == SUCCEEDED}
        try:
            given = MappingProxyType({**vertex.defaults, **self.inputs, **seen})
            choice = int(bool(Context().run(vertex.when, given)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a predicate is the failure of its step
            self.unfit[index] = error
            self._queue(index)
            return
        record = Record(
            run.id, Kind.DECISION.value, step=key, worker=run.worker, data=new_data(DecisionData, choice=choice)
        )
        record.finished_at, record.asked = run.time(), run.last_delivered
        if run.buffers:  # the workflow has chosen a weaker durability
            run.append(record)
            self._decided(index, choice)
        else:
            run.append(record, then=partial(self._durable, index, choice))

    def _durable(self, index: int, choice: int, _: Answer) -> None:
        if not self.over and not self.run.stop.detached:
            self._decided(index, choice)
            with suppress(Detached):
                self._move()
            self.run.watch()

    def _decided(self, index: int, choice: int) -> None:
        if choice:
            self._queue(index)
        else:
            self._end(index, SKIPPED)

    # -- performing ----------------------------------------------------------------------------------------------------

    def _queue(self, index: int) -> None:
        vertex = self.order[index]
        if self._is_recorded(vertex):
            self._begin(index, vertex)  # it has begun before, whatever else was in progress
        else:
            heappush(self.ready_threads if self.threaded[index] else self.ready, index)

    def _is_recorded(self, vertex: Vertex) -> bool:
        history, key = self.run.history, f"{vertex.name}#1"
        if history is None:
            return False
        return key in history.entries or (
            vertex.each is not None and any(one.startswith(f"{key}.") for one in history.entries)
        )

    def _fill(self) -> None:
        """Begin as many steps as allowed at once, in the order of the dag."""
        ready, threads = self.ready, self.ready_threads
        while not self.over and self.under_way < self.limit:
            if threads and self.in_threads < self.thread_limit and not (ready and ready[0] < threads[0]):
                index = heappop(threads)
            elif ready:
                index = heappop(ready)
            else:
                return
            self._begin(index, self.order[index])

    def _begin(self, index: int, vertex: Vertex) -> None:
        self.under_way += 1
        if self.threaded[index]:
            self.in_threads += 1
        given = self.given[index] or {}
        self.given[index] = None
        if vertex.each is None or index in self.unfit or (items := _items(vertex, given)) is None:
            self._ask(index, self._call(index, vertex, given))
        else:
            self._map(index, vertex, given, items)

    def _call(self, index: int, vertex: Vertex, given: dict[str, Any]) -> DurableCall[Any]:
        try:
            if index in self.unfit:
                return Unfit(self._at(index), vertex.name, self.unfit.pop(index))
            if vertex.each is not None:
                raise _no_list(vertex, given)
            if vertex.step is not None:
                return StepCall(self._at(index), vertex.step, (), given)
            assert vertex.child is not None  # noqa: S101 - a vertex has a step or a child
            return StartCall(self._at(index), vertex.child, ((), given), {}, vertex.name)
        except Exception as error:  # noqa: BLE001 - for example, an argument that cannot be stored
            return Unfit(self._at(index), vertex.name, error)

    def _map(self, index: int, vertex: Vertex, given: dict[str, Any], items: list[Any]) -> None:
        """Perform a step for each element of a list, each in a branch of its own below the step's key."""
        each, path = vertex.each, f"{vertex.name}#1"
        assert each is not None  # noqa: S101 - only such a vertex comes here
        limits = Limits.of(self.run, vertex.step, each.concurrency, each.wait, collect=False)
        rest = {name: value for name, value in given.items() if name != each.parameter}
        elements = [{each.parameter: item, **rest} for item in items]
        branch = Branch(self.run, path)
        branch.names = joined(self.branch.names, vertex.agent, vertex.stage)
        coroutine = mapped(branch, path, vertex.step, elements, limits, by_name=True)
        self.tasks[index] = task = self.context.run(spawn_in, self.run, branch, coroutine)
        task.add_done_callback(partial(self._mapped, index), context=self.context)

    def _mapped(self, index: int, task: asyncio.Task[list[Any]]) -> None:
        """Take the outcome of a step that was performed for each element of a list."""
        del self.tasks[index]
        if self.over or task.cancelled() or self.run.stop.detached:
            return
        error = task.exception()
        with suppress(Detached):
            if error is None:
                self._succeed(index, [*task.result()])
            else:
                self._fail(index, error)
        self.run.watch()

    def _at(self, ordinal: int) -> Branch:
        """Return the branch of a step's call: the root, as if all were called one after the other in their order."""
        vertex = self.order[ordinal % len(self.order)]
        self.place.ordinal, self.place.counts = ordinal, {}
        self.place.names = joined(self.branch.names, vertex.agent, vertex.stage)
        return self.place

    def _ask(self, index: int, call: DurableCall[Any]) -> None:
        self.calls[index] = call
        call.on_end = partial(self._settled, index)
        call.begin()

    def _settled(self, index: int, call: DurableCall[Any]) -> bool:
        """Take the outcome of a step. Return whether this wakes code of the workflow."""
        if self.over:
            return False
        try:
            return self._take(index, call)
        except Detached:  # a consequence did not fit the history: the run is no longer driven here
            return False

    def _take(self, index: int, call: DurableCall[Any]) -> bool:
        try:
            value = call.outcome()
        except Exception as error:  # noqa: BLE001 - it is the step's outcome
            return self._fail(index, error)
        if type(call) is StartCall:
            self._ask(index, ChildResult(self._at(len(self.order) + index), value))  # numbered after all steps
            return False
        return self._succeed(index, value)

    def _succeed(self, index: int, value: Any) -> bool:
        self._ended(index)
        self.results[index] = value
        self._end(index, SUCCEEDED)
        return self._move()

    def _fail(self, index: int, error: BaseException) -> bool:
        self._ended(index)
        self.errors[index], self.causes[index] = error, [index]
        self._end(index, FAILED)
        return self._move()

    def _ended(self, index: int) -> None:
        self.calls[index] = None
        self.under_way -= 1
        if self.threaded[index]:
            self.in_threads -= 1

    def _withdraw(self, done: bool) -> None:
        """Cancel calls in progress; if the dag failed, child runs go on, so that a retry finds their results."""
        self.over = True
        for task in self.tasks.values():
            task.cancel()
        for call in self.calls:
            if call is not None and call.state == ASKED:
                call.cancel()
                child = self.run.children.open.get(call.child._key) if isinstance(call, ChildResult) else None  # noqa: SLF001
                if done and child is not None:
                    cancel_child(self.run, child)


def _named(step: str, error: BaseException) -> str:
    """Return the message of a failed step; an error of a registered class does not name its step."""
    return str(error) if isinstance(error, KeepstepError) else f"step {step!r} failed: {type(error).__name__}: {error}"


def _items(vertex: Vertex, given: Mapping[str, Any]) -> list[Any] | None:
    """Return the elements for which a step is performed; None if it was given no list."""
    items = given.get(vertex.each.parameter) if vertex.each is not None else None
    return list(items) if isinstance(items, list | tuple) else None


def _no_list(vertex: Vertex, given: Mapping[str, Any]) -> TypeError:
    parameter = vertex.each.parameter if vertex.each is not None else ""
    what = f"a value of type {type(given[parameter]).__name__}" if parameter in given else "nothing"
    return TypeError(f"step {vertex.name!r} runs for each element of {parameter!r}, which must be a list, not {what}")


def _question(vertex: Vertex) -> str:
    """Return the key of the recorded answer of a step's predicate."""
    return f"when:{vertex.name}#1"


def _policy(vertex: Vertex, total: int) -> Any:
    """Return the policy of a step for its needs that were not skipped; a quorum is limited to their number."""
    wait = vertex.wait
    return All() if isinstance(wait, Quorum) and wait.n > total else wait
