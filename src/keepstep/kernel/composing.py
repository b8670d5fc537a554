"""Named branches of a run: blocks of code with a name, and workflows that the code calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..checks import check_key
from ..model import Kind
from ..ports import CURRENT
from ..records.data import StepCompletedData, new_data
from ..workflows.call import Call
from ..workflows.hooks import Moment, Occasion
from .budget import Guard
from .call_states import CANCELLED, NEW
from .calls import Branch, DurableCall, Task, current_branch
from .hooks import call_workflow_hooks
from .plain_code import in_branch_thread

if TYPE_CHECKING:
    from ..records.record import Record
    from ..workflows.definition import Workflow

T = TypeVar("T")

log = logging.getLogger("keepstep")


@contextmanager
def branch(name: str) -> Iterator[None]:
    """Give the calls of a block keys that begin with a name, in place of their position in the code.

    The name must be unique in its run, or within the named branch around it. Code whose tasks another library makes can
    be replayed even if a newer version of that library makes other tasks. Outside a run, the block runs as it is.
    """
    key = check_key(name, "branch name")
    scope = CURRENT.get()
    if scope is None or scope.in_step:
        yield
        return
    token = CURRENT.set(current_branch("branch").named(key))
    try:
        yield
    finally:
        CURRENT.reset(token)


class WorkflowCall(DurableCall[T]):
    """The result of a workflow that the code calls: one record, which spares a replay the calls that led to it.

    A failure is not recorded here: a replay meets the failure that caused it, and a retry goes back to that one.
    """

    __slots__ = ("args", "inner", "kwargs", "result_value", "workflow")

    def __init__(
        self, branch: Branch, workflow: Workflow[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        workflow.check_arguments(args, kwargs)
        self.workflow = workflow
        self.result_value = b""
        parameters = tuple(workflow.signature.parameters)
        digest, args, kwargs = workflow.values.take_call(args, kwargs, workflow.name, parameters)
        self.args: Sequence[Any] = args
        self.kwargs = kwargs
        if branch.run.typed:
            self.args, self.kwargs = workflow.types.arguments(args, kwargs)
        super().__init__(branch, workflow.name, digest, workflow.call_key)
        self.inner = branch.scoped(self.key)
        self.inner.hooks = branch.hooks + workflow.step_hooks
        self.inner.rules = workflow.rules + branch.rules
        if branch.run.undo is not None:
            branch.run.undo.workflows.append(workflow)
        if branch.saga is not None:
            branch.saga.add(self.key)
        self.inner.records_input = branch.records_input or workflow.record_input

    @property
    def is_covered(self) -> bool:
        """Whether the history holds the result, so that the workflow's code is not called."""
        return self.entry is not None and self.entry.covers

    @property
    def outlives_cancel(self) -> bool:
        """Whether a cancel is one that the workflow's code has caught: it gave its result after that.

        A cancel that came after the result is the outcome of the call, and is made again.
        """
        return self.entry is not None and self.entry.covers and not self.entry.cancelled

    def begin_live(self) -> None:
        data = new_data(StepCompletedData, covers=True)
        self.run.append(self.record(Kind.STEP_COMPLETED, self.result_value, attempt=1, data=data), self)

    def take_result(self, value: Any) -> None:
        """Encode the result of the code. Raise if it must not be stored."""
        if self.run.typed:
            value = self.workflow.types.result(value)
        self.result_value = self.workflow.values.encode(value, f"result of {self.key}")
        self.run.host.redaction.check(self.result_value, self.key)

    def decode(self, record: Record) -> Any:
        return self.workflow.values.decode(record.raw(), self.key)

    def give_up(self) -> None:
        """Drop a call whose code has failed or was cancelled."""
        if self.state == NEW:
            self.state = CANCELLED

    def occasion(self, moment: Moment, result: Any = None, error: BaseException | None = None) -> Occasion:
        """Return the occasion for the workflow's own hooks."""
        args, kwargs = (tuple(self.args), dict(self.kwargs)) if moment == "before" else ((), {})
        name = self.workflow.name
        return Occasion(moment, self.run.id, name, self.key, args=args, kwargs=kwargs, result=result, error=error)


def call_workflow(branch: Branch, workflow: Workflow[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[T]:
    """Call a workflow inside the code of another, as a branch of the same run."""
    call = WorkflowCall(branch, workflow, args, kwargs)
    return _CalledWorkflow(branch, _performed(call), call)


class _CalledWorkflow(Task[T]):
    """The code of a called workflow."""

    __slots__ = ("_call",)

    def __init__(self, branch: Branch, coroutine: Coroutine[Any, Any, T], call: WorkflowCall[T]) -> None:
        super().__init__(branch, coroutine)
        self._call = call

    def close(self) -> None:
        super().close()
        self._call.give_up()


async def _performed(call: WorkflowCall[T]) -> T:
    """Run the code of a called workflow in its own branch, and record its result."""
    if call.is_covered:
        return await call
    guard = _hold_to_budget(call)
    token = CURRENT.set(call.inner)
    try:
        await _call_own_hooks(call, "before")
        value = await _value(call)
        await _close_tasks(call)
        call.take_result(value)
        await _call_own_hooks(call, "after", value)
    except asyncio.CancelledError:
        call.give_up()
        await _call_own_hooks(call, "cancel")
        raise
    except BaseException as error:
        call.give_up()
        await _call_own_hooks(call, "error", error=error)
        raise
    finally:
        CURRENT.reset(token)
        if guard is not None:
            call.run.released_from(guard)
    return await call


def _hold_to_budget(call: WorkflowCall[Any]) -> Guard | None:
    """Enforce the budget of a called workflow, if it has one. Its time counts from `ks.now()`, live as on replay."""
    run, budget = call.run, call.workflow.budget
    if budget is None:
        return None
    guard = Guard(run, budget, call.key, run.now_at, around=call.branch.guard)
    run.enforces(guard)
    call.inner.guard = guard
    return guard


async def _close_tasks(call: WorkflowCall[Any]) -> None:
    """Cancel the tasks that the code has left open: a replay that takes the recorded result would not have them."""
    inner = call.inner.prefix
    left = [task for task in call.run.tasks if not task.done() and _path(task).startswith(inner)]
    for task in left:
        task.cancel()
    if left:
        log.warning("run %s: %s ended with %d open branches; they are cancelled", call.run.id, call.key, len(left))
        await asyncio.wait(left)


def _path(task: asyncio.Task[Any]) -> str:
    branch = getattr(task, "branch", None)
    return "" if branch is None else f"{branch.path}/"


async def _value(call: WorkflowCall[Any]) -> Any:
    """Run the code: a plain def in a thread of the run."""
    if call.workflow.is_async:
        return await call.workflow.fn(*call.args, **call.kwargs)
    return await in_branch_thread(call.run, partial(call.workflow.fn, *call.args, **call.kwargs))


async def _call_own_hooks(
    call: WorkflowCall[Any], moment: Moment, result: Any = None, error: BaseException | None = None
) -> None:
    """Call the workflow's own hooks, unless the run only repeats what is recorded."""
    run, hooks = call.run, call.workflow.hooks
    if hooks and not run.is_replaying and not run.stop.detached:
        await call_workflow_hooks(run, hooks, call.occasion(moment, result, error))
