"""A branch of a run's code, and the calls that it makes: each has a key that is fixed when the call is made."""

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
from contextvars import copy_context
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import (
    BudgetExceeded,
    DefinitionError,
    KeepstepError,
    NotSerializable,
    StepError,
    StepFailed,
    StepInDoubt,
    StepTimedOut,
    TimedOut,
)
from ..model import Kind, Outcome
from ..ports import CURRENT
from ..stores.records import Record, StoredError
from ..values import VALUES
from ..values.annotations import hints_of
from ..workflows.definition import Call
from ..workflows.schema import as_annotated
from .failure_point import mark_interrupted, mark_outcome, mark_raised
from .spending import BUDGET
from .steering import in_doubt

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from ..workflows.dag import Dag
    from ..workflows.definition import Step
    from ..workflows.graph import Graph
    from .context import RunContext
    from .history import Entry

T = TypeVar("T")

log = logging.getLogger("keepstep")

#: How often code that swallows the end of its run is told again before it is left hanging for good.
PATIENCE = 100


class Detached(asyncio.CancelledError):
    """The run is no longer driven here: nothing its code does counts any more."""


def _stable_hash(path: str, start: int) -> int:
    """A hash that is the same on every replay and in every process; numbered siblings follow each other."""
    stem = path.rstrip("0123456789")
    return zlib.crc32(stem.encode(), start) + int(path[len(stem) :] or 0)


class Branch:
    """Where a piece of a workflow's code is: the root, a task, or an item of a map. It numbers what it calls."""

    __slots__ = ("children", "composites", "counts", "draws", "order", "ordinal", "path", "prefix", "run")

    in_step = False

    def __init__(self, run: RunContext, path: str) -> None:
        self.run = run
        self.path = path
        self.order = _stable_hash(path, run.order)
        self.prefix = f"{path}/" if path else ""
        self.counts: dict[str, int] = {}
        self.ordinal = 0
        self.children = 0
        self.composites = 0
        self.draws = 0

    def child(self) -> Branch:
        """The branch of a task made here, numbered among all tasks made here."""
        self.children += 1
        return Branch(self.run, f"{self.prefix}{self.children}")

    def item(self, group: str, index: int) -> Branch:
        """The branch of one item of a map: its number is the item's, whatever the concurrency."""
        return Branch(self.run, f"{group}.{index}")

    def key(self, name: str) -> str:
        """The key of the next call of this name here."""
        count = self.counts.get(name, 0) + 1
        self.counts[name] = count
        return f"{self.prefix}{name}#{count}"

    def call_step(self, step: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCall[Any]:
        return StepCall(self, step, args, kwargs)

    def walk(self, graph: Graph, initial: Mapping[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]:
        """Go through a graph, as its workflow."""
        from .walk import walk  # noqa: PLC0415 - only who has a graph pays for it

        return walk(self, graph, initial)

    def walk_dag(self, dag: Dag, inputs: dict[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]:
        """Perform the steps of a dag, which is this run's workflow."""
        from .layers import walk_dag  # noqa: PLC0415 - most runs are of no dag

        return walk_dag(self, dag, inputs)

    def generator(self) -> random.Random:
        """A source of randomness that is the same on every replay."""
        self.draws += 1
        seed = f"{self.run.seed}|{self.path}|{self.draws}"
        return random.Random(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16], "big"))  # noqa: S311

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self.generator().getrandbits(128), version=4)

    def now(self) -> datetime:
        return self.run.now_at


def in_workflow(verb: str) -> Branch:
    """The branch that the caller is in; anything else than a workflow's own code is an error."""
    scope = CURRENT.get()
    if scope is None:
        raise DefinitionError(f"ks.{verb} is called outside a run; it only means something in a workflow")
    if scope.in_step:
        raise DefinitionError(
            f"ks.{verb} is called inside step {scope.key!r}; only the workflow itself may do that, so call it there"
        )
    return scope  # type: ignore[no-any-return]


class Gate(asyncio.Future[None]):
    """What a composite call waits on: several calls, none of them alone."""


class Pending(asyncio.Future[None]):
    """What a task waits on while its call is under way; it notices when the code cancels the wait."""

    __slots__ = ("call",)

    call: DurableCall[Any]

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        if not self.call.run.cancelled_from_outside():
            self.call.cancelled_by_code()
        return super().cancel(msg)


NEW, ASKED, DONE, CANCELLED = range(4)

#: Looked up once: reading a member of an enumeration costs more than comparing it.
SUCCESS = Outcome.SUCCESS.value
COMPLETED = Kind.STEP_COMPLETED.value


class DurableCall(Call[T]):
    """A question of the code whose answer is recorded: asked once, answered in sequence order, live as on replay."""

    __slots__ = (
        "branch",
        "digest",
        "entry",
        "error",
        "event",
        "handles",
        "key",
        "knew",
        "ordinal",
        "run",
        "state",
        "told",
        "value",
        "waiter",
    )

    def __init__(self, branch: Branch, name: str, digest: str) -> None:
        run = branch.run
        run.moves += 1
        self.branch = branch
        self.run = run
        branch.ordinal = ordinal = branch.ordinal + 1
        self.ordinal = ordinal
        counts = branch.counts
        counts[name] = count = counts.get(name, 0) + 1
        self.key = key = f"{branch.prefix}{name}#{count}"
        self.digest = digest
        self.knew = run.told
        self.handles = error = sys.exception()  # asked for while the code handles it
        if error is not None:
            mark_raised(run, error)
        self.state = NEW
        self.waiter: Pending | None = None
        self.event: threading.Event | None = None
        self.told: Callable[[DurableCall[Any]], bool] | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.entry: Entry | None = None
        if run.history is not None:
            self.entry = run.recorded(self, key)

    def __hash__(self) -> int:
        """As that of a task: code may keep calls in a set, as `asyncio.as_completed` does."""
        return self.branch.order + self.ordinal

    # -- asking -------------------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, T]:
        run = self.run
        if run.detached and self.state in (NEW, ASKED) and run.told_end >= PATIENCE:
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
        """What came of it; raises if that is an error."""
        if self.error is not None:
            raise self.error
        if self.state == CANCELLED:
            raise asyncio.CancelledError
        if self.state != DONE:
            self.run.insist_on_end()
        return self.value  # type: ignore[no-any-return]

    def begin(self) -> None:
        """Ask: from the history if it is there, else live, once the whole history has been told."""
        if self.state != NEW:
            return
        run = self.run
        if threading.get_ident() != run.thread_id:
            raise DefinitionError(
                f"{self.key} is awaited in another event loop than that of its run; await it in the workflow itself"
            )
        if run.detached:
            run.insist_on_end()
        self.state = ASKED
        self.knew = run.told
        if run.history is not None:
            if self.entry is not None:
                self.entry.asked = True
                run.asked[self.key] = self
            else:
                run.history.asked_again(self.key)
                run.held[self] = copy_context()
            run.watch()
        elif run.holding or run.unrecorded_cancels:
            run.held[self] = copy_context()
            run.watch()
        else:
            self.begin_live()

    def begin_live(self) -> None:
        """Do what the call stands for. It ends with `record`."""
        raise NotImplementedError

    def start(self) -> DurableCall[T]:
        self.run.check_thread("start")
        if self.entry is not None:
            self.entry.asked = True
        self.run.loop.call_soon_threadsafe(_begin_quietly, self)
        return self

    def result(self) -> T:
        run = self.run
        run.check_thread("result")
        if self.state not in (DONE, CANCELLED) or self.event is not None:
            if run.detached:
                run.insist_on_end()
            event = threading.Event()
            run.loop.call_soon_threadsafe(run.block, self, event)
            event.wait()
            if run.detached and self.state != DONE:
                run.insist_on_end()
            if run.thread_cancel and self.state == ASKED:
                run.thread_cancel = False
                run.loop.call_soon_threadsafe(self.cancelled_by_code)
                raise asyncio.CancelledError
        return self.outcome()

    def was_asked_as(self, digest: str) -> bool:
        """Whether a run that an older version began has recorded this very question with another digest."""
        return False

    # -- being answered -----------------------------------------------------------------------------------------------

    def record(self, kind: str, value: bytes | None = None, **fields: Any) -> Record:
        """A record of this call, not yet in the journal."""
        run = self.run
        return Record(
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

    def settle(self, record: Record) -> bool:
        """Take the recorded outcome, live as on replay; whether code was woken."""
        if self.state != ASKED:
            return False
        self.state = DONE
        try:
            if record.outcome == SUCCESS:
                self.value = self.decode(record)
            else:
                self.error = self.failure(record)
                mark_outcome(self.error, record.seq)
        except Exception as error:  # noqa: BLE001 - whatever a record holds, only its own run suffers from it
            self.state = ASKED
            told = error if isinstance(error, KeepstepError) else repr(error)
            self.run.mismatch(f"the recorded value of {self.key} cannot be restored: {told}")
            return False
        return self.wake()

    def wake(self) -> bool:
        waiter = self.waiter
        woken = False
        self.handles = None
        self.waiter = None  # nothing may hold a settled call but the code that asked: no work for the collector
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
            woken = True
        return self._tell_others() or woken

    def _tell_others(self) -> bool:
        """Tell a thread and groups that wait for the call that it has ended; whether code was woken."""
        woken = False
        if self.event is not None:
            self.run.thread_busy = True
            self.run.blocked = None
            self.event.set()
            self.event = None
            woken = True
        told, self.told = self.told, None
        if told is not None and told(self):
            woken = True
        return woken

    def __del__(self) -> None:
        if getattr(self, "state", DONE) == NEW and not self.run.detached:
            log.warning("run %s: %s was called but never awaited, so it did nothing", self.run.id, self.key)

    def decode(self, record: Record) -> Any:
        return VALUES.decode(record.raw(), self.key)

    def failure(self, record: Record) -> BaseException:
        return recorded_error(record)

    # -- being cancelled ----------------------------------------------------------------------------------------------

    def cancelled_by_code(self) -> None:
        """The workflow's own code no longer wants the answer: that is the recorded outcome."""
        run = self.run
        if self.state != ASKED or run.detached:
            return
        self.state = CANCELLED
        if self.handles is not None:
            mark_interrupted(run, self.handles)
            self.handles = None
        run.moves += 1
        if self.entry is not None and self.entry.cancelled:
            self.entry.given_up = True
            if self.entry.record is not None and self.entry.record.error is not None:
                run.doubts.append(self.key)
            self._tell_others()
            run.watch()
            return
        doubt = self.doubt()
        spent = run.spent.take(self.key) if run.spent.told else None
        if self.entry is None:
            self.stop()
        run.unrecorded_cancels += 1  # what the code does instead starts only when the cancel is durable
        record = self.record(Kind.STEP_CANCELLED, outcome=Outcome.CANCELLED.value, error=doubt, data=spent)
        record.asked = run.told  # what made the code cancel it
        run.append(record, then=run.cancel_recorded)
        self._tell_others()
        run.watch()

    def doubt(self) -> StoredError | None:
        """What is to be said of a call that is cancelled though nobody knows whether it has happened."""
        return None

    def cancel(self) -> None:
        """Withdraw a call that was asked, as a group does with what it no longer needs."""
        if self.state == NEW:
            self.state = CANCELLED
        elif self.waiter is not None:
            self.waiter.cancel()
        else:
            self.cancelled_by_code()

    def stop(self) -> None:
        """Stop what `begin_live` began."""
        self.run.held.pop(self, None)


def _begin_quietly(call: DurableCall[Any]) -> None:
    with contextlib.suppress(Detached):
        call.begin()


class StepCall(DurableCall[T]):
    """A call of a step."""

    __slots__ = ("args", "doubtful", "entered", "kwargs", "step", "task")

    after: Any = None  # the state after the step, where there is one

    def __init__(self, branch: Branch, step: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.step = step
        values, name = step.values, step.name
        ignored: dict[str, Any] = {}
        if step.ignore:
            args, kwargs, ignored = step.without_ignored(args, kwargs)
        DurableCall.__init__(self, branch, name, values.digest_call(args, kwargs, name, step.parameters))
        if self.entry is None:  # the body sees what the store would give back, the first time too
            self.args, self.kwargs = values.copy_call(args, kwargs, name, step.parameters)
            if ignored:
                self.kwargs.update(ignored)
        self.task: asyncio.Task[None] | None = None
        self.entered = False
        self.doubtful = False

    def begin_live(self) -> None:
        self.task = self.run.spawn(self.run.engine.perform(self), self)

    def doubt(self) -> StoredError | None:
        if not self.doubtful and self.key not in self.run.marks:
            return None
        self.run.doubts.append(self.key)
        return in_doubt([self.key])

    def stop(self) -> None:
        super().stop()
        if self.task is not None:
            self.task.cancel()
            if not self.entered:  # cancelled before its first move, it will not make another
                self.run.body_ended(self)
        elif self.run.engine.forgetting is not None:
            self.run.engine.forgetting.cancel(self)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the body is given, copied for someone else; what is not stored cannot be copied."""
        step = self.step
        kept = {name: value for name, value in self.kwargs.items() if name not in step.ignore}
        args, kwargs = step.values.copy_call(self.args, kept, step.name, step.parameters)
        return tuple(args), {**self.kwargs, **kwargs}

    def encode(self, value: Any) -> bytes:
        """What the body returned, as it is stored if the censor lets it pass."""
        try:
            data = self.step.values.encode(value, self.key)
        except NotSerializable:
            if isinstance(value, Call):
                told = f"step {self.key!r} returned a call that was not awaited; did you forget `await`?"
                raise NotSerializable(told) from None
            raise
        return data

    def completed(self, value: bytes, attempt: int, started_at: datetime | None, **more: Any) -> Record:
        """The record of a body that came to its end."""
        run = self.run
        return Record(
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

    def decode(self, record: Record) -> Any:
        value = self.step.values.decode(record.raw(), self.key)
        return self.fitted(value) if record.data is not None and record.data.get("act") == "edit" else value

    def fitted(self, value: Any) -> Any:
        """What a person gave as the result, made into what the step's annotation says it returns."""
        return as_annotated(value, hints_of(self.step.fn).get("return"))


class Task(Call[T]):
    """A composite call (gather, map, race …): its code is recorded through the calls that it makes.

    Awaited, it belongs to the branch of the code that waits. Started, it runs beside that code, in a branch of its own.
    """

    __slots__ = ("_branch", "_coroutine", "_error", "_hash", "_made", "_others", "_over", "_value")

    def __init__(self, branch: Branch, coroutine: Coroutine[Any, Any, T]) -> None:
        self._branch = branch
        branch.composites += 1
        self._hash = branch.order - branch.composites
        self._coroutine = coroutine
        self._made: asyncio.Task[T] | None = None
        self._others: list[Gate] | None = None  # who waits while another drives it; None before anyone does
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
            gate = Gate(loop=self._branch.run.loop)
            self._others.append(gate)
            yield from gate
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def _drive(self) -> Generator[Any, Any, None]:
        """Run the code where the first who waits is, and tell those who wait beside it."""
        try:
            self._value = yield from self._coroutine.__await__()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._over = True
            for gate in self._others or ():
                if not gate.done():
                    gate.set_result(None)

    def start(self) -> Task[T]:
        run = self._branch.run
        run.check_thread("start")
        if self._made is None and self._others is None:
            self._others = []
            branch = self._branch.child()  # numbered here, where the code is, not where the loop takes it up
            if threading.get_ident() == run.thread_id:
                self._make(branch)
            else:
                run.loop.call_soon_threadsafe(self._make, branch)
        return self

    def _make(self, branch: Branch) -> asyncio.Task[T]:
        if self._made is None:
            self._made = self._branch.run.spawn_in(branch, self._coroutine)
        return self._made

    def result(self) -> T:
        run = self._branch.run
        run.check_thread("result")
        return run.block_on(partial(self._make, self._branch))  # type: ignore[no-any-return]


def recorded_error(record: Record) -> BaseException:
    """The exception that a recorded failure raises in the code, the same live as on replay."""
    error = record.error
    info = error.info() if error is not None else None
    message = f"step {record.step!r} failed after {record.attempt} attempt{'s' * (record.attempt != 1)}"
    if info is not None:
        message = f"{message}: {info.type}: {info.message}"
        if info.code == TIMED_OUT:
            return TimedOut(info.message, record.run)
        kind = _ERRORS.get(info.code or "")
        if kind is not None:
            return kind(info.message, record.step, info, record.seq)
    return StepFailed(message, record.step, info, record.seq)


#: Codes of the engine's own errors, which come back as the classes that the code may catch.
TIMED_OUT = "ks:timed-out"
_ERRORS: dict[str, type[StepError]] = {
    "ks:step-timed-out": StepTimedOut,
    "ks:in-doubt": StepInDoubt,
    BUDGET: BudgetExceeded,
}
