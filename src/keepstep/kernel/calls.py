"""Branches of a run's code, and their durable calls, each with a key that is fixed when the call is made."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import sys
import threading
import uuid
import zlib
from collections.abc import Callable, Generator
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from ..errors import DefinitionError, KeepstepError, NotSerializable
from ..model import Kind, Outcome
from ..ports import CURRENT
from ..records.data import Data, StepData, new_data
from ..records.record import Record, StoredError
from ..values import VALUES
from ..values.annotations import hints_of
from ..workflows.call import Call
from ..workflows.schema import as_written
from .call_states import ASKED, CANCELLED, DONE, NEW, PATIENCE, Detached, in_doubt
from .failure_point import mark_interrupted, mark_outcome, mark_raised
from .naming import names_of_workflow
from .plain_code import in_thread
from .recorded_errors import recorded_error
from .strands import interrupted, left, spawn_in
from .tracing import enter
from .undoable import Saga

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from ..workflows.agent import TaskPlan
    from ..workflows.dag import Dag
    from ..workflows.definition import Step, Workflow
    from ..workflows.graph import Graph
    from .code_thread import Code
    from .driver import RunDriver
    from .naming import Names
    from .replay import Entry

T = TypeVar("T")

log = logging.getLogger("keepstep")

#: Largest recorded input of a step in bytes. Of a larger one, only the size is stored: records are read as a whole.
MOST_INPUT_BYTES = 100_000


def _stable_hash(path: str, start: int) -> int:
    """Return a hash that is the same on every replay and in every process. Numbered siblings have consecutive ones."""
    stem = path.rstrip("0123456789")
    return zlib.crc32(stem.encode(), start) + int(path[len(stem) :] or 0)


class Branch:
    """A strand of a workflow's code: the root, a task, an item of a map, or a named part. It numbers its calls.

    Keys that the caller gives count from `scope`: the prefix of the nearest named branch, or nothing.
    """

    __slots__ = (
        *("children", "composites", "counts", "draws", "guard", "hooks", "names", "order", "ordinal", "path"),
        *("prefix", "records_input", "rules", "run", "saga", "scope"),
    )

    in_step = False

    def __init__(self, run: RunDriver, path: str, around: Branch | None = None) -> None:
        self.run = run
        self.path = path
        if around is None:
            self.scope, self.hooks, self.records_input = "", run.step_hooks, run.workflow.record_input
            self.guard, self.rules = run.guard, run.workflow.rules
            self.saga: Saga | None = None
            self.names: Names | None = names_of_workflow(run.workflow)
        else:
            self.scope, self.hooks, self.records_input = around.scope, around.hooks, around.records_input
            self.guard, self.rules, self.saga, self.names = around.guard, around.rules, around.saga, around.names
        self.order = _stable_hash(path, run.order)
        self.prefix = f"{path}/" if path else ""
        self.counts: dict[str, int] = {}
        self.ordinal = 0
        self.children = 0
        self.composites = 0
        self.draws = 0

    def child(self) -> Branch:
        """Return the branch of a new task, numbered among all tasks of this branch."""
        self.children += 1
        return Branch(self.run, f"{self.prefix}{self.children}", self)

    def item(self, group: str, index: int) -> Branch:
        """Return the branch of one item of a map, numbered by the item, whatever the concurrency."""
        return Branch(self.run, f"{group}.{index}", self)

    def named(self, name: str) -> Branch:
        """Return a branch that its name identifies, wherever in the code it is made."""
        branch = self.scoped(self.run.take_key(f"{self.scope}@{name}"))
        branch.hooks = self.hooks
        return branch

    def scoped(self, path: str) -> Branch:
        """Return a branch at this path, from which the keys that callers give count."""
        branch = Branch(self.run, path, self)
        branch.scope = branch.prefix
        return branch

    def key(self, name: str, given: str = "") -> str:
        """Return the key of the next call of this name, or the key that the caller gave."""
        if given:
            return self.run.take_key(f"{self.scope}{name}#@{given}")
        count = self.counts.get(name, 0) + 1
        self.counts[name] = count
        return f"{self.prefix}{name}#{count}"

    def call_step(self, step: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCall[Any]:
        return StepCall(self, step, args, kwargs)

    def can_undo(self, key: str, owner: Step[..., Any] | Workflow[..., Any]) -> None:
        """Note that a call of this branch can be undone."""
        self.run.can_undo().called(key, owner, self.saga)

    def call_workflow(self, workflow: Workflow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a workflow in this branch of the run."""
        if not self.run.nests:
            return workflow.fn(*args, **kwargs)
        return self.run.host.runner.call_workflow(self, workflow, args, kwargs)

    def walk(self, graph: Graph, initial: Mapping[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]:
        """Walk the graph that is this run's workflow."""
        return self.run.host.runner.walk(self, graph, initial)

    def walk_dag(self, dag: Dag, inputs: dict[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]:
        """Perform the steps of the dag that is this run's workflow."""
        return self.run.host.runner.walk_dag(self, dag, inputs)

    def perform(self, plan: TaskPlan, task: Any) -> Coroutine[Any, Any, Any]:
        """Give a task to an agent, as a workflow's file describes it."""
        return self.run.host.runner.perform(plan, task)

    def generator(self) -> random.Random:
        """Return a random generator that draws the same values on every replay."""
        self.draws += 1
        seed = f"{self.run.seed}|{self.path}|{self.draws}"
        return random.Random(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16], "big"))  # noqa: S311

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self.generator().getrandbits(128), version=4)

    def now(self) -> datetime:
        return self.run.now_at


def current_branch(verb: str) -> Branch:
    """Return the branch of the caller. Raise `DefinitionError` outside a workflow's own code."""
    scope = CURRENT.get()
    if scope is None:
        raise DefinitionError(f"ks.{verb} is called outside a run; call it in a workflow")
    if scope.in_step:
        advice = _IN_GRAPHS.get(verb) if scope.run.workflow.carries_state else None
        raise DefinitionError(
            f"ks.{verb} is called inside step {scope.key!r}, which cannot use it; "
            f"{advice or 'call it in the workflow itself'}"
        )
    return scope  # type: ignore[no-any-return]


#: The part of a graph that does what a call would do in a workflow's code.
_IN_GRAPHS = {
    "wait_for": "let the step wait with waits=True, or give the graph a part that waits: graph.wait(name, signal=...)",
    "sleep": "give the graph a part that sleeps: graph.delay(name, seconds)",
    "start": "give the graph a part that runs the other workflow: graph.add(name, workflow)",
}


class CompositeWait(asyncio.Future[None]):
    """The future of a composite call, which waits for several calls at once."""


class Pending(asyncio.Future[None]):
    """The future of a call under way. It tells a cancel by the code from one from outside."""

    __slots__ = ("call",)

    call: DurableCall[Any]

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        if not self.call.run.cancelled_from_outside():
            if self.call.outlives_cancel:
                return True
            self.call.cancelled_by_code()
        return super().cancel(msg)


#: Values of enumeration members, looked up once because every lookup costs more than a comparison.
SUCCESS = Outcome.SUCCESS.value
COMPLETED = Kind.STEP_COMPLETED.value


class DurableCall(Call[T]):
    """A call whose outcome is recorded. Outcomes are delivered in sequence order, live as on replay.

    `knew` is the seq of the outcome that was delivered last when the call was begun. `told` is a callback for the end
    of the call; it returns whether it woke code.
    """

    __slots__ = (
        "branch",
        "digest",
        "entry",
        "error",
        "handles",
        "key",
        "knew",
        "names",
        "on_end",
        "ordinal",
        "run",
        "state",
        "value",
        "waiter",
    )

    def __init__(self, branch: Branch, name: str, digest: str, given: str = "") -> None:
        run = branch.run
        run.moves += 1
        self.branch = branch
        self.run = run
        if given:
            self.ordinal = 0
            self.key = key = branch.key(name, given)
        else:
            branch.ordinal = ordinal = branch.ordinal + 1
            self.ordinal = ordinal
            counts = branch.counts
            counts[name] = count = counts.get(name, 0) + 1
            self.key = key = f"{branch.prefix}{name}#{count}"
        self.digest = digest
        self.names = branch.names
        self.knew = run.last_delivered
        self.handles = error = sys.exception()  # the exception that the code handles while it makes the call
        if error is not None:
            mark_raised(run, error)
        self.state = NEW
        self.waiter: Pending | None = None
        self.on_end: Callable[[DurableCall[Any]], bool] | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.entry: Entry | None = None
        if run.history is not None:
            self.entry = run.recorded(self, key)

    @property
    def outlives_cancel(self) -> bool:
        """Whether a cancel by the code ends inside the call, which has its result nevertheless."""
        return False

    def __hash__(self) -> int:
        """Return a stable hash, as for a task: code may keep calls in a set, as `asyncio.as_completed` does."""
        return self.branch.order + self.ordinal if self.ordinal else _stable_hash(self.key, self.run.order)

    # -- beginning ----------------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, T]:
        run = self.run
        if run.stop.detached and self.state in (NEW, ASKED) and run.end_notices >= PATIENCE:
            yield from run.leave_hanging()
        if self.state == NEW and not (self.entry is not None and run.answer_now(self)):
            self.begin()
        if self.state == ASKED:
            waiter = self.waiter
            if waiter is None:
                self.waiter = waiter = Pending(loop=run.loop)
                waiter.call = self
            yield from waiter
        return self.outcome()

    def outcome(self) -> T:
        """Return the value of the outcome, or raise its error."""
        if self.error is not None:
            raise self.error
        if self.state == CANCELLED:
            raise asyncio.CancelledError
        if self.state != DONE:
            self.run.insist_on_end()
        return self.value  # type: ignore[no-any-return]

    def begin(self) -> None:
        """Begin the call: replay its recorded outcome, or begin it live once the whole history has been delivered."""
        if self.state != NEW:
            return
        run = self.run
        if threading.get_ident() != run.thread_id:
            raise DefinitionError(
                f"{self.key} is awaited in another event loop than that of its run; await it in the workflow itself"
            )
        if run.stop.detached:
            run.insist_on_end()
        self.state = ASKED
        self.knew = run.last_delivered
        if run.history is not None:
            if self.entry is not None:
                self.entry.asked = True
                run.outcome_awaited(self)
            else:
                run.history.asked_again(self.key)
                run.hold(self)
            run.watch()
        elif run.stop.holding or run.unrecorded_cancels:
            run.hold(self)
            run.watch()
        else:
            self.begin_live()

    def begin_live(self) -> None:
        """Begin the work of the call, which ends with the append of a `record`."""
        raise NotImplementedError

    def refuse(self) -> None:
        """In a dry replay: raise the error that the call would raise without a record, if there is one."""

    def start(self) -> DurableCall[T]:
        self.run.code_here("start")
        if self.entry is not None:
            self.entry.asked = True
        self.run.loop.call_soon_threadsafe(_begin_quietly, self)
        return self

    def result(self) -> T:
        code = self.run.code_here("result")
        if code is not None and self.state not in (DONE, CANCELLED):
            return code.ask(self._begin_for_thread, self._cancel_for_thread)  # type: ignore[no-any-return]
        return self.outcome()

    def _begin_for_thread(self) -> Self:
        self.begin()
        return self

    def _cancel_for_thread(self) -> None:
        """Record the cancel of code that was about to begin or await this call."""
        if self.state == NEW:
            self.state = ASKED
            if self.entry is not None:
                self.entry.asked = True
                self.run.outcome_awaited(self)
        self.cancelled_by_code()

    def was_asked_as(self, digest: str) -> bool:
        """Whether an older version of Keepstep gave this same call the digest `digest`."""
        return False

    # -- outcome ------------------------------------------------------------------------------------------------------

    def record(self, kind: str, value: bytes | None = None, **fields: Any) -> Record:
        """Return a new record of this call, not yet appended."""
        run = self.run
        record = Record(
            run.id,
            kind,
            step=self.key,
            ordinal=self.ordinal,
            digest=self.digest,
            worker=run.worker,
            finished_at=run.time(),
            value=msgspec.UNSET if value is None else msgspec.Raw(value),
            asked=self.knew,
            **fields,
        )
        if self.names is not None:
            self.names.put_on(record)
        return record

    def settle(self, record: Record) -> bool:
        """Take the recorded outcome, live as on replay. Return whether code was woken."""
        if self.state != ASKED:
            return False
        self.state = DONE
        try:
            if record.outcome == SUCCESS:
                reading = self.run.reading
                read = None if reading is None or reading.call is not self else reading.value
                self.value = self.decode(record) if read is None else self.take_in(record, read)
            else:
                self.error = self.failure(record)
                mark_outcome(self.error, record.seq)
        except Exception as error:  # noqa: BLE001 - a record that cannot be restored must only affect its own run
            self.state = ASKED
            reason = error if isinstance(error, KeepstepError) else repr(error)
            self.run.mismatch(f"the recorded value of {self.key} cannot be restored: {reason}")
            return False
        if self.on_end is not None:
            return self.wake()
        waiter, self.waiter, self.handles = self.waiter, None, None  # inlined from `wake`, to save a call per step
        if waiter is None or waiter.done():
            return False
        waiter.set_result(None)
        return True

    def wake(self) -> bool:
        """Wake everything that waits for the call. Return whether code was woken."""
        waiter = self.waiter
        woken = False
        self.handles = None
        self.waiter = None  # breaks the reference cycle, so that a settled call needs no garbage collection
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
            woken = True
        return self._wake_others() or woken

    def _wake_others(self) -> bool:
        """Wake a group that waits for the call. Return whether code was woken."""
        on_end, self.on_end = self.on_end, None
        return on_end is not None and on_end(self)

    def __del__(self) -> None:
        if getattr(self, "state", DONE) == NEW and not self.run.stop.detached:
            log.warning(
                "run %s: %s was called but never awaited%s, so it did nothing",
                *(self.run.id, self.key, "" if self.run.workflow.is_async else " or asked for its .result()"),
            )

    def decode(self, record: Record) -> Any:
        return VALUES.decode(record.raw(), self.key)

    def read(self, record: Record) -> Any:
        """Decode a large value in any thread, without changing the run or the call."""
        return self.decode(record)

    def take_in(self, record: Record, value: Any) -> Any:
        """Return a value that `read` has decoded, with the side effects of `decode`."""
        return value

    def failure(self, record: Record) -> BaseException:
        return recorded_error(record)

    # -- cancel -------------------------------------------------------------------------------------------------------

    def cancelled_by_code(self) -> None:
        """Record a cancel by the workflow's own code as the outcome of the call."""
        run = self.run
        if self.state != ASKED or run.stop.detached:
            return
        self.state = CANCELLED
        if self.handles is not None:
            mark_interrupted(run, self.handles)
            self.handles = None
        run.moved()
        if self.entry is not None and self.entry.cancelled:
            self.entry.given_up = True
            if self.entry.record is not None and self.entry.record.error is not None:
                run.doubted(self.key)
            self._wake_others()
            run.watch()
            return
        doubt = self.doubt()
        data = run.spent.take(self.key) if run.spent.reported else None
        if self.entry is None and (kept := self.unfinished()):
            data = {**(data or {}), **kept}
        if self.knew != run.last_delivered:  # the call was made before the outcome that made the code cancel it
            data = {**(data or {}), "opened": self.knew}
        if self.entry is None:
            self.stop()
        run.cancel_begun()
        record = self.record(Kind.STEP_CANCELLED, outcome=Outcome.CANCELLED.value, error=doubt, data=data)
        record.asked = run.last_delivered  # the outcome that made the code cancel the call
        self.attach_body(record)
        run.append(record, then=run.cancel_recorded)
        self._wake_others()
        run.watch()

    def doubt(self) -> StoredError | None:
        """Return the error to record if the cancelled call is in doubt; else None."""
        return None

    def unfinished(self) -> Data | None:
        """Return what the record of an unfinished call keeps, so that it can be undone; None if it needs nothing."""
        return None

    def attach_body(self, record: Record) -> None:
        """Put into the record of a cancelled call which body it has cut off."""

    def cancel(self) -> None:
        """Cancel the call, for a group that no longer needs it."""
        if self.state == NEW:
            self.state = CANCELLED
        elif self.waiter is not None:
            self.waiter.cancel()
        else:
            self.cancelled_by_code()

    def stop(self) -> None:
        """Stop the work that `begin_live` has begun."""
        self.run.drop_held(self)


def _begin_quietly(call: DurableCall[Any]) -> None:
    with contextlib.suppress(Detached):
        call.begin()


class StepCall(DurableCall[T]):
    """A call of a step."""

    __slots__ = ("args", "attempt", "doubtful", "entered", "kept", "kwargs", "rests", "step", "task")

    after: Any = None  # the state after the step, in a graph
    effect: str = ""  # the key that the idempotency key is made of, if it is not the call's own

    def __init__(self, branch: Branch, step: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.step = step
        values, name = step.values, step.name
        ignored: dict[str, Any] = {}
        if step.ignore:
            args, kwargs, ignored = step.without_ignored(args, kwargs)
        if branch.run.history is None:
            digest, self.args, self.kwargs = values.take_call(args, kwargs, name, step.parameters)
            DurableCall.__init__(self, branch, name, digest, step.call_key)
        else:
            digest = values.digest_call(args, kwargs, name, step.parameters)
            DurableCall.__init__(self, branch, name, digest, step.call_key)
            if self.entry is None:  # the body gets copies, which are equal to what the store would return
                self.args, self.kwargs = values.copy_call(args, kwargs, name, step.parameters)
        if ignored and self.entry is None:
            self.kwargs.update(ignored)
        self.task: asyncio.Task[None] | None = None
        self.entered = False
        self.attempt: Any = None
        self.doubtful = False
        self.rests = False
        if step.undo is not None:
            self.kept: Data | None = None
            branch.can_undo(self.key, step)

    def begin_live(self) -> None:
        self.run.spawn(self.run.host.perform(self), self)

    def for_undo(self) -> Data:
        """Return what the record of a step with `undo=` keeps. The arguments are those from before the body."""
        if self.kept is None:
            self.kept = {"undo": True, **(self.input_data() or {})}
        return self.kept

    def attach_body(self, record: Record) -> None:
        attempt = self.attempt
        if attempt is None or attempt.first_at is None:
            return
        record.attempt, record.started_at = attempt.number, attempt.started_at
        attempt.attach_for_events(record)

    def unfinished(self) -> Data | None:
        return self.for_undo() if self.step.undo_unfinished else None

    def doubt(self) -> StoredError | None:
        if not self.doubtful and self.key not in self.run.marks:
            return None
        self.run.doubted(self.key)
        return in_doubt([self.key])

    def stop(self) -> None:
        super().stop()
        if self.task is not None:
            self.task.cancel()
            if not self.entered:  # a task that is cancelled before it runs never calls `perform`
                self.run.body_ended(self)
        elif self.run.host.forgetting is not None:
            self.run.host.forgetting.cancel(self)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the body's arguments for a hook. Ignored arguments are not stored, so they are shared."""
        step = self.step
        kept = {name: value for name, value in self.kwargs.items() if name not in step.ignore}
        args, kwargs = step.values.copy_call(self.args, kept, step.name, step.parameters)
        return tuple(args), {**self.kwargs, **kwargs}

    def input_data(self) -> Data | None:
        """Return the arguments by name for the record of the outcome, or None. Raise if they must not be stored."""
        step = self.step
        if step.record_input is False and step.undo is None:
            return None
        args = (None, *self.args) if step.transactional else self.args  # the store passes the transaction
        try:
            given = step.signature.bind(*args, **self.kwargs).arguments
        except TypeError:
            return None  # the call of the body raises the same
        if step.transactional:
            given.pop(next(iter(step.signature.parameters)), None)
        kept = {name: value for name, value in given.items() if name not in step.ignore}
        data = step.values.encode(kept, f"step {self.key!r}: input")
        self.run.host.redaction.check(data, self.key, "input of step")
        if len(data) > MOST_INPUT_BYTES and step.undo is None:
            return new_data(StepData, input_bytes=len(data))
        return new_data(StepData, input=data.decode())

    def encode(self, value: Any) -> bytes:
        """Return the stored form of a result, not yet checked for secrets."""
        try:
            data = self.step.values.encode(value, self.key)
        except NotSerializable:
            if isinstance(value, Call):
                word = "`await`" if self.step.is_async else "`.result()`"
                message = f"step {self.key!r} returned a call that has not run; did you forget {word}?"
                raise NotSerializable(message) from None
            raise
        return data

    def checked(self, value: Any) -> bytes:
        """Return the stored form of a result. Raise if it must not be stored."""
        data = self.encode(value)
        self.run.host.redaction.check(data, self.key)
        return data

    def write(self, value: Any) -> bytes:
        """Encode a large value as `encode` does, in any thread. `written` then has its side effects on the loop."""
        return self.encode(value)

    def written(self) -> None:
        """Apply the side effects of a value that `write` has encoded."""

    def completed(self, value: bytes, attempt: int, started_at: datetime | None, **more: Any) -> Record:
        """Return the record of a completed body."""
        run = self.run
        if self.step.undo is not None:
            more["data"] = {**(more.get("data") or {}), **self.for_undo()}
        record = Record(
            run.id,
            COMPLETED,
            step=self.key,
            ordinal=self.ordinal,
            attempt=attempt,
            digest=self.digest,
            worker=run.worker,
            started_at=started_at,
            finished_at=run.time(),
            value=msgspec.Raw(value),
            asked=self.knew,
            **more,
        )
        if self.names is not None:
            self.names.put_on(record)
        return record

    def decode(self, record: Record) -> Any:
        stored = record.value
        value = self.step.values.decode(record.raw() if stored is msgspec.UNSET else bytes(stored), self.key)
        return self.fitted(value) if record.data is not None and record.data.get("act") == "edit" else value

    def failure(self, record: Record) -> BaseException:
        return recorded_error(record, self.step.values)

    def fitted(self, value: Any) -> Any:
        """Convert a result that a person gave to the step's return annotation."""
        return as_written(value, hints_of(self.step.fn).get("return"), f"the given result of {self.key!r}")


class Task(Call[T]):
    """A composite call (gather, map, race …). Only the calls that its code makes are recorded.

    If awaited, it runs in the branch of the awaiting code. If started, it runs beside that code, in its own branch.
    """

    __slots__ = ("_branch", "_coroutine", "_error", "_hash", "_made", "_others", "_over", "_value")

    def __init__(self, branch: Branch, coroutine: Coroutine[Any, Any, T]) -> None:
        self._branch = branch
        branch.composites += 1
        self._hash = branch.order - branch.composites
        self._coroutine = coroutine
        self._made: asyncio.Task[T] | None = None
        self._others: list[CompositeWait] | None = None  # waiters beside the one that drives it; None before the first
        self._over = False
        self._value: Any = None
        self._error: BaseException | None = None

    def __hash__(self) -> int:
        return self._hash

    def __await__(self) -> Generator[Any, Any, T]:
        if self._made is not None:
            return (yield from self._made)
        if self._others is None:
            self._others = []
            yield from self._drive()
        elif not self._over:
            waiter = CompositeWait(loop=self._branch.run.loop)
            self._others.append(waiter)
            yield from waiter
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def _drive(self) -> Generator[Any, Any, None]:
        """Run the code in the task of the first waiter, and wake the others at its end."""
        try:
            self._value = yield from self._coroutine.__await__()
        except SystemExit as error:  # such as that of a called workflow; it would end the worker's event loop
            self._error = left(error)
            raise self._error from error
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._over = True
            for waiter in self._others or ():
                if not waiter.done():
                    waiter.set_result(None)

    def close(self) -> None:
        if self._made is None and self._others is None:
            self._coroutine.close()  # avoids Python's warning of a coroutine that was never awaited
        super().close()

    def start(self) -> Task[T]:
        run = self._branch.run
        self._code_here("start")
        if self._made is None and self._others is None:
            self._others = []
            branch = self._branch.child()  # numbered in the order of the code, not of the loop
            if threading.get_ident() == run.thread_id:
                self._make(branch)
            else:
                run.loop.call_soon_threadsafe(self._make, branch)
        return self

    def _make(self, branch: Branch) -> asyncio.Task[T]:
        if self._made is None:
            self._made = spawn_in(self._branch.run, branch, self._coroutine)
        return self._made

    def _code_here(self, verb: str) -> Code | None:
        try:
            return self._branch.run.code_here(verb)
        except DefinitionError:
            self._discard()
            raise

    def _discard(self) -> None:
        if self._made is None and self._others is None:
            self._coroutine.close()  # avoids Python's warning of a coroutine that was never awaited

    def result(self) -> T:
        code = self._code_here("result")
        if code is None:
            raise NotImplementedError
        try:
            return code.ask(partial(self._make, self._branch), self._discard)  # type: ignore[no-any-return]
        except Detached:
            self._discard()
            raise


async def contained(
    run: RunDriver,
    args: list[Any],
    kwargs: dict[str, Any],
    first: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Any:
    """Run the workflow's code. A `sys.exit` in it ends only the run, not the worker's event loop."""
    try:
        if first is not None:
            await first()
        if run.host.tracer is not None:
            enter(run.host.tracer, run)
        code = partial(run.workflow.fn, *args, **kwargs)
        return await (code() if run.workflow.is_async else in_thread(run, code, run.host.run_threads.submit))
    except SystemExit as error:
        raise left(error) from error
    except KeyboardInterrupt:
        interrupted()
        raise
