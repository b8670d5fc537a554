"""The walk through a dag: each step begins the moment its needs are done, told by the outcomes in their order.

What it does follows from the definition, the inputs and the order of the outcomes alone, so a recovery, which is told
the recorded outcomes in the same order, does the same again.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from contextvars import Context
from functools import partial
from heapq import heappop, heappush
from os import cpu_count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import ExecutionError
from ..model import Kind, Outcome
from ..policies import All, Quorum, classify
from ..policies.quorum import Verdict as Enough
from ..stores.records import Record
from .attempt import stored_error
from .branch import ASKED, Branch, Detached, DurableCall, Gate, StepCall
from .children import ChildResult, StartCall
from .notes import decided
from .steering import cancel_child
from .together import MAX_ASYNC_STEPS, MAX_THREAD_STEPS

if TYPE_CHECKING:
    from ..ports import Answer
    from ..workflows.dag import Dag
    from ..workflows.plan import Vertex

#: So many names, and so many errors, are told in a message.
_NAMED = 8

#: Where a step is. What has begun is no longer asked about its needs.
WAITING, BEGUN, SUCCEEDED, FAILED, SKIPPED = range(5)


async def walk_dag(branch: Branch, dag: Dag, inputs: dict[str, Any]) -> dict[str, Any]:
    """Perform the steps of a dag; its result holds the results of its last steps by name, None for a skipped one."""
    walk = Walk(branch, dag, inputs)
    await walk.go()
    return {walk.order[index].name: walk.results[index] for index in walk.last}


class Unfit(DurableCall[Any]):
    """A step that cannot begin, because its predicate or its arguments do not work: that is its failure."""

    __slots__ = ("reason",)

    def __init__(self, branch: Branch, name: str, reason: BaseException) -> None:
        self.reason = reason
        super().__init__(branch, name, "unfit")

    def begin_live(self) -> None:
        error = stored_error(self.reason, str(classify(self.reason)), 1, self.run)
        record = self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=error)
        self.run.append(record, self)


class Walk:
    """A dag under way. It is moved by outcomes, not by tasks of its own; its gate opens when the last steps are done.

    A need is *met* when it succeeded. What a step is given is fixed when enough of its needs are met, whenever it
    begins. A need that was skipped is not counted at all; one that failed counts against the step's policy.
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
        self.given: list[dict[str, Any] | None] = [None] * size
        self.succeeded = [0] * size
        self.failed = [0] * size
        self.skipped = [0] * size
        self.counts = {SUCCEEDED: self.succeeded, FAILED: self.failed, SKIPPED: self.skipped}
        self.unfit: dict[int, BaseException] = {}  # why a step cannot begin
        self.errors: dict[int, BaseException] = {}  # what steps have failed with
        self.causes: dict[int, list[int]] = {}  # the steps because of which one has failed: itself, or needs of needs
        self.changed: deque[int] = deque()  # steps that have come to an end, of which their dependents do not know yet
        self.open = len(self.last)
        self.error: BaseException | None = None
        self.over = False
        self.gate = Gate(loop=self.run.loop)
        # what may be under way at once
        self.limit = dag.concurrency or MAX_ASYNC_STEPS
        self.thread_limit = dag.concurrency or max(1, min(2 * (cpu_count() or 1), MAX_THREAD_STEPS))
        self.under_way = 0
        self.in_threads = 0
        self.threaded = [vertex.step is not None and not vertex.step.is_async for vertex in self.order]
        self.ready: list[int] = []
        self.ready_threads: list[int] = []

    async def go(self) -> None:
        """Begin what needs nothing, and wait until the last steps are done, or one has failed for good."""
        for index, vertex in enumerate(self.order):
            if not vertex.needs:
                self._enough(index)
        self._move()
        done = False
        try:
            await self.gate
            done = self.error is None
        finally:
            self._withdraw(done)
        if self.error is not None:
            raise self.error

    # -- how it moves -------------------------------------------------------------------------------------------------

    def _move(self) -> bool:
        """Tell dependents what has come to an end, and begin what may; whether the walk is over by that."""
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
            if not self.gate.done():
                self.gate.set_result(None)

    def _look(self, index: int) -> None:
        """A need of a step has come to an end: see what that means for it."""
        vertex = self.order[index]
        total = len(vertex.needs) - self.skipped[index]
        if total == 0:
            self._end(index, SKIPPED)
            return
        if self.succeeded[index] == total:  # more than enough for whoever does not wait for all
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
        """Enough of its needs are met: fix what the step is given, and see whether it is to be performed."""
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
        else:  # or there was a predicate, and what it said holds
            self._decide(index, vertex)

    def _end(self, index: int, state: int) -> None:
        self.states[index] = state
        self.changed.append(index)

    def _execution_error(self, index: int) -> BaseException:
        """What the run ends with: the step that failed, or the one that cannot begin, since too many did."""
        causes = self.causes[index]
        errors = [self.errors[cause] for cause in causes]
        at = causes[0] if len(causes) == 1 else index
        name, path = self.order[at].name, self._path(at)
        way = f" (after {', '.join(path[-_NAMED:])})" if path else ""
        if len(causes) == 1:
            told, cause = str(errors[0]), errors[0]
        else:
            failures = "; ".join(map(str, errors[:_NAMED]))
            told = f"step {name!r} cannot begin, too many of its needs have failed: {failures}"
            cause = ExceptionGroup("the steps that failed", [one for one in errors if isinstance(one, Exception)])
        done = {self.order[one].name: self.results[one] for one, how in enumerate(self.states) if how == SUCCEEDED}
        failed = ExecutionError(f"{told}{way}", self.run.id, step=name, path=path, state=done)
        failed.__cause__ = cause
        return failed

    def _path(self, index: int) -> list[str]:
        """The steps that led to one and succeeded, in their order."""
        found: set[int] = set()
        waiting = [index]
        while waiting:
            for need in self.order[waiting.pop()].needs:
                if need not in found and self.states[need] == SUCCEEDED:
                    found.add(need)
                    waiting.append(need)
        return [self.order[one].name for one in sorted(found)]

    # -- whether a step is to be performed ----------------------------------------------------------------------------

    def _decide(self, index: int, vertex: Vertex) -> None:
        """Ask the step's predicate once, and go on when the answer is durable; a recovery takes the recorded one."""
        run, key = self.run, _question(vertex)
        choice = decided(self.branch, key)
        if choice is not None:
            del run.notes[key]
            self._decided(index, choice)
            return
        if self._is_recorded(vertex):  # without a decision: the predicate has failed
            self.unfit[index] = RuntimeError("the predicate failed")
            self._queue(index)
            return
        assert vertex.when is not None  # noqa: S101 - or there would be nothing to decide
        seen = {name: self.results[need] for name, need in vertex.seen if self.states[need] == SUCCEEDED}
        try:
            given = MappingProxyType({**vertex.defaults, **self.inputs, **seen})
            choice = int(bool(Context().run(vertex.when, given)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises is the failure of its step
            self.unfit[index] = error
            self._queue(index)
            return
        record = Record(run.id, Kind.DECISION.value, step=key, worker=run.worker, data={"choice": choice})
        record.finished_at, record.asked = run.time(), run.told
        if run.gathers:  # its durability is weaker by choice
            run.append(record)
            self._decided(index, choice)
        else:
            run.append(record, then=partial(self._durable, index, choice))

    def _durable(self, index: int, choice: int, _: Answer) -> None:
        if not self.over and not self.run.detached:
            self._decided(index, choice)
            with suppress(Detached):
                self._move()
            self.run.watch()

    def _decided(self, index: int, choice: int) -> None:
        if choice:
            self._queue(index)
        else:
            self._end(index, SKIPPED)

    # -- performing it ------------------------------------------------------------------------------------------------

    def _queue(self, index: int) -> None:
        vertex = self.order[index]
        if self._is_recorded(vertex):
            self._begin(index, vertex)  # it did begin, whatever else was under way
        else:
            heappush(self.ready_threads if self.threaded[index] else self.ready, index)

    def _is_recorded(self, vertex: Vertex) -> bool:
        history = self.run.history
        return history is not None and f"{vertex.name}#1" in history.entries

    def _fill(self) -> None:
        """Begin as many as may be under way at once, those that come first in the order before the others."""
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
        self._ask(index, self._call(index, vertex))

    def _call(self, index: int, vertex: Vertex) -> DurableCall[Any]:
        given = self.given[index] or {}
        self.given[index] = None
        try:
            if index in self.unfit:
                return Unfit(self._at(index), vertex.name, self.unfit.pop(index))
            if vertex.step is not None:
                return StepCall(self._at(index), vertex.step, (), given)
            assert vertex.child is not None  # noqa: S101 - it is one or the other
            vertex.child.check_arguments((), given)
            payload = self.run.engine.censor.input_of(vertex.child, (), given)
            return StartCall(self._at(index), vertex.child, payload, {}, vertex.name)
        except Exception as error:  # noqa: BLE001 - for one, an argument that cannot be stored
            return Unfit(self._at(index), vertex.name, error)

    def _at(self, ordinal: int) -> Branch:
        """Where a step is called: at the root, as if all had been called one after the other in their order."""
        self.place.ordinal, self.place.counts = ordinal, {}
        return self.place

    def _ask(self, index: int, call: DurableCall[Any]) -> None:
        self.calls[index] = call
        call.told = partial(self._told, index)
        call.begin()

    def _told(self, index: int, call: DurableCall[Any]) -> bool:
        """The outcome of a step; whether that sets code of the workflow going."""
        if self.over:
            return False
        try:
            return self._take(index, call)
        except Detached:  # what it led to did not fit what is recorded: nobody drives the run here any more
            return False

    def _take(self, index: int, call: DurableCall[Any]) -> bool:
        try:
            value = call.outcome()
        except Exception as error:  # noqa: BLE001 - it is the step's outcome
            self._ended(index)
            self.errors[index], self.causes[index] = error, [index]
            self._end(index, FAILED)
            return self._move()
        if type(call) is StartCall:
            self._ask(index, ChildResult(self._at(len(self.order) + index), value))  # beyond all steps
            return False
        self._ended(index)
        self.results[index] = value
        self._end(index, SUCCEEDED)
        return self._move()

    def _ended(self, index: int) -> None:
        self.calls[index] = None
        self.under_way -= 1
        if self.threaded[index]:
            self.in_threads -= 1

    def _withdraw(self, done: bool) -> None:
        """Cancel what is still under way; a child run goes on if the dag failed, so that a retry finds its result."""
        self.over = True
        for call in self.calls:
            if call is not None and call.state == ASKED:
                call.cancel()
                child = self.run.children.get(call.child._key) if isinstance(call, ChildResult) else None  # noqa: SLF001
                if done and child is not None:
                    cancel_child(self.run, child)


def _question(vertex: Vertex) -> str:
    """The key of what a step's predicate said."""
    return f"when:{vertex.name}#1"


def _policy(vertex: Vertex, total: int) -> Any:
    """The policy of a step for the needs that were not skipped: a quorum asks for no more than there are."""
    wait = vertex.wait
    return All() if isinstance(wait, Quorum) and wait.n > total else wait
