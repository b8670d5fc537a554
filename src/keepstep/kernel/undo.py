"""Undoes steps of a run: all of them when it ends failed or cancelled, those of a saga when its code asks for it.

The steps to undo are decided once and recorded. Each is then undone by a step of its own, the newest first, so that a
recovery goes on where the undo was interrupted. If an undo fails for good, the others go on; then the run is set aside
until a person lets it be tried again, or accepts it as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, StepInDoubt, StoreError
from ..model import Kind, Outcome
from ..model.tree import frozen
from ..model.undo import ANSWER, AT_END, UNDO, UNDO_FAILED, undo_key
from ..ports import CURRENT
from ..records.data import Data, data_of
from ..records.record import FORMAT_WITH_UNDO, Record, unseal_some
from ..workflows.call import Call
from ..workflows.definition import Step, Workflow, undoable_step
from ..workflows.graph import ChildNode, Graph, MapNode, StepNode
from .call_states import ASKED, DONE
from .calls import Branch, DurableCall, StepCall, Task, current_branch
from .children import ChildResult
from .doubt import VERIFY_SECONDS, Done, NotDone
from .graph.position import Position
from .hooks import within
from .steering import cancel_child
from .stored_errors import stored_error
from .undo_records import Answered, Decided, Item, read_undo_records
from .undoable import Saga

if TYPE_CHECKING:
    from .driver import RunDriver

#: Errors listed at most in the reason of a run that is set aside, so that the message stays readable.
_SHOWN = 5

Owner = Step[..., Any] | Workflow[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class UndoBranch(Branch):
    """The branch of the calls that undo, whose keys follow from the calls that they undo."""

    __slots__ = ()

    def key(self, name: str, given: str = "") -> str:
        return given or super().key(name)


# -- what to undo ------------------------------------------------------------------------------------------------------


class Decision(DurableCall[Decided | None]):
    """The decision which steps are undone. At the end of a run with nothing to undo, it leaves no record."""

    __slots__ = ("at_end", "saga")

    def __init__(self, branch: Branch, saga: Saga | None, *, at_end: bool) -> None:
        self.saga, self.at_end = saga, at_end
        super().__init__(branch, UNDO, "", AT_END if at_end else "")

    def begin_live(self) -> None:
        self.run.work_began()  # the run must not be parked before the decision
        self.run.host.background(self._decide())

    async def _decide(self) -> None:
        run = self.run
        try:
            run.journal.write_pending(run)
            await run.journal.drained()
            past = await read_undo_records(run.host, run.id)
            if self.state == ASKED and not run.stop.detached:
                self._decided(self._chosen(past.left()))
        except CheckpointCorrupt as error:
            run.host.set_aside(run, "CheckpointCorrupt", str(error))
        except StoreError as error:
            run.halt(error)
        except Exception as error:  # noqa: BLE001 - the run must not wait for it forever
            run.engine_failed(error)
        finally:
            run.work_ended()
            run.watch()

    def _chosen(self, items: list[Item]) -> Decided:
        run, undo = self.run, self.run.can_undo()
        if self.at_end:
            children = [(key, child) for key, child in run.children.open.items() if key in run.children.starts]
            if not items and not any(key in undo.owners for key, _ in children):
                return Decided()
            return Decided(items, children)
        taken = undo.taken | run.bodies.keys()
        return Decided([item for item in items if item.key not in taken and undo.belongs(item.key, self.saga)])

    def _decided(self, decided: Decided) -> None:
        if self.at_end and not decided.steps and not decided.children:
            self.state, self.value = DONE, None
            self.wake()
            return
        self.run.can_undo().taken.update(item.key for item in decided.steps)
        record = self.record(Kind.UNDO, msgspec.json.encode(decided), format=FORMAT_WITH_UNDO)
        self.run.append(record, self)

    def decode(self, record: Record) -> Decided:
        decided = msgspec.json.decode(record.raw(), type=Decided)
        self.run.can_undo().taken.update(item.key for item in decided.steps)
        return decided


class Answer(DurableCall[Answered]):
    """A person's decision about undo steps that have failed. Until there is one, the run is set aside."""

    __slots__ = ("reason",)

    def __init__(self, branch: Branch, reason: str) -> None:
        self.reason = reason
        undo = branch.run.can_undo()
        undo.answers += 1
        super().__init__(branch, "", "", f"{ANSWER}{undo.answers}")

    def begin_live(self) -> None:
        self.run.host.set_aside(self.run, UNDO_FAILED, self.reason, phase="undo")

    def decode(self, record: Record) -> Answered:
        return msgspec.json.decode(record.raw(), type=Answered)


class ChildEnd(ChildResult):
    """The end of a child that was open when its run began to undo."""

    __slots__ = ("seq",)

    def settle(self, record: Record) -> bool:
        self.seq = record.seq
        return super().settle(record)


# -- undoing -----------------------------------------------------------------------------------------------------------


async def undo_all(run: RunDriver) -> None:
    """Undo everything that the code of a run has done: open children are cancelled and awaited first."""
    branch = UndoBranch(run, UNDO)
    await _bodies_ended(run)
    decided = await Decision(branch, None, at_end=True)
    if decided is None:
        return
    run.can_undo().begun = True
    children = await _children_ended(run, branch, decided.children)
    await _undo(run, branch, [*children, *decided.steps])


async def _bodies_ended(run: RunDriver) -> None:
    """Wait for bodies of steps with an undo that still run: an undo must not overtake them."""
    waits = [call.task for call in run.bodies.values() if call.step.undo is not None and call.task is not None]
    bodies = [*waits, *(body for body in run.can_undo().outlived if not body.done())]
    if bodies:
        await asyncio.wait(bodies)


async def _children_ended(run: RunDriver, branch: Branch, children: list[tuple[str, str]]) -> list[Item]:
    """Cancel open children and wait for their ends. Return those that have completed and can be undone."""
    ends: list[ChildEnd] = []
    for key, child in children:
        start = run.children.starts.get(key)
        if start is None:
            run.mismatch(f"the run began to undo its steps while child {child} was open, which the code did not start")
            continue
        end = ChildEnd(branch, start.handle(branch, child))
        if end.entry is None:
            cancel_child(run, child)
        end.begin()
        ends.append(end)
    completed: list[Item] = []
    for end in ends:
        with contextlib.suppress(Exception):  # it was cancelled, or has failed, and has undone its own steps
            await end
            if end.child._workflow.undo is not None:  # noqa: SLF001
                completed.append(Item(end.seq, end.key))
    return sorted(completed, key=lambda item: -item.seq)


async def _undo(run: RunDriver, branch: Branch, items: list[Item]) -> None:
    """Undo calls in this order, one at a time. Return when each is undone, or accepted as it is by a person."""
    tries = dict.fromkeys((item.key for item in items), 1)
    failed = await _pass(branch, items, tries)
    while failed:
        answer = await Answer(branch, _reason(run, failed))
        chosen = [item for item in failed if item.key in answer.keys]
        for item in chosen:
            del failed[item]
        if answer.act == "retry":
            for item in chosen:
                tries[item.key] += 1
            failed |= await _pass(branch, chosen, tries)
            failed = dict(sorted(failed.items(), key=lambda one: -one[0].seq))


async def _pass(branch: Branch, items: list[Item], tries: dict[str, int]) -> dict[Item, str]:
    """Undo calls one after the other. Return those whose undo failed, with their errors."""
    failed: dict[Item, str] = {}
    for item in items:
        try:
            await UndoCall(branch, item, tries[item.key])
        except Exception as error:  # noqa: BLE001 - the failure of one undo lets the others go on
            failed[item] = str(error)
    return failed


def _reason(run: RunDriver, failed: dict[Item, str]) -> str:
    named = "; ".join(list(failed.values())[:_SHOWN])
    more = f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return (
        f"{len(failed)} undo step{'s' if len(failed) > 1 else ''} failed: {named}{more}. "
        f"`keepstep retry {run.id}` tries again, `keepstep skip {run.id}` accepts what is not undone"
    )


class UndoCall(StepCall[None]):
    """The step that undoes a call: `undo(result, *args)`, with what the record of the call holds."""

    __slots__ = ("effect", "item", "owner")

    def __init__(self, branch: Branch, item: Item, tries: int) -> None:
        run = branch.run
        self.item = item
        self.owner = owner_of(run, item.key)
        found = None if self.owner is None else self.owner.undo
        self.step = _UNKNOWN if found is None else found
        #: The same for each call that an interrupted one is repeated with; another one if a person tries it again.
        self.effect = undo_key(item.key, tries)
        number = run.can_undo().next_round(item.key)
        DurableCall.__init__(self, branch, "", "", undo_key(item.key, number))
        self.args, self.kwargs = (), {}
        self.task, self.attempt, self.entered, self.doubtful, self.rests = None, None, False, False, False

    def begin_live(self) -> None:
        self.run.spawn(self._perform(), self)

    async def _perform(self) -> None:
        run = self.run
        self.entered = True
        try:
            is_needed = await self._prepare()
        except CheckpointCorrupt as error:
            run.host.set_aside(run, "CheckpointCorrupt", str(error))
        except StoreError as error:
            run.halt(error)
        except Exception as error:  # noqa: BLE001 - without its arguments, the undo has failed
            kept = stored_error(error, "permanent", 1, run)
            record = self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=kept)
            run.append(record, self, last=True)
        else:
            if is_needed:
                await run.host.perform(self)
            else:  # the step in doubt has not happened
                run.append(self.completed(b"null", 1, None), self, last=True)

    async def _prepare(self) -> bool:
        """Read the result and the arguments of the call. Return False if it has not happened."""
        run, item, owner = self.run, self.item, self.owner
        if owner is None or owner.undo is None:
            raise DefinitionError(
                f"no undo= of {item.key!r} is known in this process; give the step its undo= again, and retry the run"
            )
        rows = await run.host.records(run.id, item.seq - 1, 1)
        record = next((one for one, _ in unseal_some(rows, run.id) if one.seq == item.seq), None)
        if record is None:
            raise CheckpointCorrupt(f"run {run.id!r}: the record at seq {item.seq} of {item.key!r} is missing")
        if isinstance(owner, Workflow):
            result, (args, kwargs) = _of_child(owner, record)
        elif (node := _node(run, item.key, owner)) is not None:
            result, (args, kwargs) = _of_graph(run, node, record)
        else:
            result, (args, kwargs) = _of_step(owner, record)
        if record.kind == Kind.STEP_STARTED and isinstance(owner, Step):
            answer = await self._verified(owner, args, kwargs)
            if answer is NotDone or isinstance(answer, NotDone):
                return False
            result = answer.result
        self.args, self.kwargs = (result, *args), kwargs
        return True

    async def _verified(self, owner: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return whether a step in doubt has happened. Raise if its `verify=` cannot tell."""
        answer = None
        if owner.verify is not None:
            seconds = None if inspect.iscoroutinefunction(owner.verify) else VERIFY_SECONDS
            answer = await within(self.run.host, seconds, owner.verify, *args, **kwargs)
        if not isinstance(answer, Done) and answer is not NotDone and not isinstance(answer, NotDone):
            raise StepInDoubt(
                f"step {self.item.key!r} may or may not have happened, so it is not undone", self.item.key
            )
        return answer

    def encode(self, value: Any) -> bytes:
        return b"null"  # nobody reads the result of an undo, so anything may be one


def _unknown(*_: Any) -> None:
    """Stand for the undo of a call that this process does not know."""


_UNKNOWN: Step[..., Any] = Step(_unknown)


# -- the definition, the result and the arguments of a call -----------------------------------------------------------


def owner_of(run: RunDriver, key: str) -> Owner | None:
    """Return the step, or the workflow of a child, that has the undo of a call; None if it is not known here.

    A replay does not make all calls again, so that those before a state are found by their names.
    """
    undo = run.can_undo()
    if key in undo.owners:
        return undo.owners[key]
    name = key.rpartition("/")[2].rpartition("#")[0]
    steps = [step for one in (run.workflow, *undo.workflows) for step in one.named_steps()]
    if isinstance(run.workflow, Graph):
        for node in run.workflow.nodes.values():
            if isinstance(node, StepNode) and node.name == name:
                return node.step
            if isinstance(node, ChildNode) and f"{node.workflow.name}.result" == name:
                return node.workflow
            if isinstance(node, MapNode):
                steps.append(node.step)
    found = next((step for step in steps if step.name == name and step.undo is not None), None) or undoable_step(name)
    return found or run.host.workflows.get(name.removesuffix(".result"))


def _node(run: RunDriver, key: str, owner: Owner) -> StepNode | None:
    """Return the part of the graph that a call belongs to; None for a call with arguments of its own."""
    if not isinstance(run.workflow, Graph):
        return None
    node = run.workflow.nodes.get(key.rpartition("/")[2].rpartition("#")[0])
    return node if isinstance(node, StepNode) and not node.waits and node.step is owner else None


def _of_step(step: Step[..., Any], record: Record) -> tuple[Any, Arguments]:
    where = f"the recorded input of {record.step!r}"
    given = step.values.decode(data_of(record, Data)["input"].encode(), where)
    signature = step.signature
    if step.transactional:  # the store passes the transaction
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    unknown = [name for name in given if name not in signature.parameters]
    if unknown:
        raise DefinitionError(f"{where} has {unknown[0]!r}, which is no parameter of the step; restore it, and retry")
    bound = inspect.BoundArguments(signature, given)
    bound.apply_defaults()
    for name in step.ignore:
        bound.arguments.pop(name, None)
    result = step.values.decode(record.raw(), record.step) if _is_done(record) else None
    return result, (bound.args, bound.kwargs)


def _of_child(workflow: Workflow[..., Any], record: Record) -> tuple[Any, Arguments]:
    args, kwargs = workflow.values.decode(data_of(record, Data)["input"].encode(), f"the input of {record.step!r}")
    word = msgspec.json.decode(record.raw(), type=_Word)
    value = b"null" if word.value is msgspec.UNSET else bytes(word.value)
    return workflow.values.decode(value, record.step), (tuple(args), kwargs)


class _Word(msgspec.Struct):
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _of_graph(run: RunDriver, node: StepNode, record: Record) -> tuple[Any, Arguments]:
    """Return the state after a graph's step, and the states that it took."""
    graph = run.workflow
    assert isinstance(graph, Graph)  # noqa: S101 - only a graph has nodes
    stored = msgspec.json.decode(data_of(record, Data)["input"].encode(), type=dict[str, dict[str, Any]])
    levels = {
        "" if level == "state" else level: {key: frozen(tree) for key, tree in keys.items()}
        for level, keys in stored.items()
    }
    position = Position(levels, None, record.step.rpartition("/")[0])
    position.began_at = record.started_at or record.finished_at
    args: list[Any] = []
    for level in node.takes:
        is_own = level == "state"
        state = position.state(graph.trees, run.id, "" if is_own else f"{level}:{getattr(node, level)}")
        typed = is_own and node.name in graph.typed and graph.schema is not None
        args.append(graph.schema.instance(state) if typed and graph.schema is not None else state)
    if not _is_done(record):
        return None, (tuple(args), {})
    position.take(record)
    return position.state(graph.trees, run.id), (tuple(args), {})


def _is_done(record: Record) -> bool:
    return record.kind == Kind.STEP_COMPLETED


# -- for the workflow's code -------------------------------------------------------------------------------------------


class saga:  # noqa: N801 - used like a function: `async with ks.saga():`
    """A block of code whose steps `ks.undo()` undoes, without those from before it.

    Use it with `async with` or, in plain code, with `with`. Outside a run, the block runs as it is.
    """

    def __init__(self) -> None:
        self._branch: Branch | None = None
        self._saga: Saga | None = None

    def __enter__(self) -> Self:
        scope = CURRENT.get()
        if scope is not None and not scope.in_step:
            self._branch = scope
            self._saga = scope.saga = Saga(scope.saga)
        return self

    def __exit__(self, *_: object) -> None:
        if self._branch is not None and self._saga is not None:
            self._branch.saga = self._saga.outer

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def undo() -> Call[list[str]]:
    """Undo the finished steps of the innermost `ks.saga()`, or of the whole run, and go on; return their keys."""
    branch = current_branch("undo")
    return Task(branch, _undo_here(branch, branch.saga))


async def _undo_here(branch: Branch, around: Saga | None) -> list[str]:
    run = branch.run
    decided = await Decision(branch, around, at_end=False)
    steps = [] if decided is None else decided.steps
    try:
        await _undo(run, UndoBranch(run, UNDO), steps)
    finally:
        run.can_undo().taken.difference_update(item.key for item in steps)
    return [item.key for item in steps]
