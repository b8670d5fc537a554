"""What the code of a workflow may say besides calling steps: wait, signal, start, choose, and look at the time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import copy_context
from datetime import datetime, timedelta
from os import cpu_count
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from uuid import UUID

import msgspec

from ..errors import AlreadyFinished, DefinitionError, RunNotFound, StepFailed, TimedOut
from ..model import Kind, Outcome, Run, Signal, Status
from ..model.ids import check_id, check_name, child_id, new_id
from ..model.signal import CANCEL, CHILD, RESERVED
from ..policies import All
from ..policies.quorum import Verdict as Enough
from ..policies.quorum import coverage, degraded
from ..ports import CURRENT, Answer, Create, Send, Verdict, instant
from ..stores.records import Record, StoredError, check_size
from ..values import VALUES
from ..workflows.definition import Bound, Call, Step, Workflow
from . import attempt as attempts
from .branch import ASKED, CANCELLED, DONE, NEW, Branch, DurableCall, StepCall, Task
from .context import RunContext, Wait
from .handle import RunHandle
from .journal import Draft
from .quiet import Gate
from .runner import ContinueAs

if TYPE_CHECKING:
    from ..policies import WaitPolicy
    from .attempt import Attempt

T = TypeVar("T")
U = TypeVar("U")

#: Parallel steps at once by default: threads are few, tasks are cheap.
MAX_THREAD_STEPS = 16
MAX_ASYNC_STEPS = 100

_MISSING: Any = object()


def _branch(verb: str) -> Branch:
    scope = CURRENT.get()
    if scope is None:
        raise DefinitionError(f"ks.{verb} is called outside a run; it only means something in a workflow")
    if scope.in_step:
        raise DefinitionError(
            f"ks.{verb} is called inside step {scope.key!r}; only the workflow itself may wait or start, so call it there"
        )
    return scope  # type: ignore[no-any-return]


# -- time, randomness, ids ---------------------------------------------------------------------------------------------


def now() -> datetime:
    """The time of the newest outcome that the run has seen: the same on every replay."""
    scope = CURRENT.get()
    if scope is None or scope.in_step:
        return datetime.now().astimezone()
    return scope.now()  # type: ignore[no-any-return]


def random() -> float:
    """A random number from 0 up to 1, the same on every replay."""
    return _branch("random").generator().random()


def uuid() -> UUID:
    """A random UUID, the same on every replay."""
    return _branch("uuid").uuid()


def idempotency_key() -> str:
    """A key for outside services, the same for every attempt and recovery of this step."""
    scope = CURRENT.get()
    if scope is None or not scope.in_step:
        raise DefinitionError("ks.idempotency_key is called outside a step; it belongs to the step that uses it")
    return attempts.idempotency_key(scope.run.id, scope.key, scope.run.generation)


def run_id() -> str | None:
    """The id of the current run, in a workflow or a step; None outside."""
    scope = CURRENT.get()
    return None if scope is None else scope.run.id


# -- waiting -----------------------------------------------------------------------------------------------------------


class SleepCall(DurableCall[None]):
    """A durable sleep."""

    __slots__ = ("seconds",)

    def __init__(self, branch: Branch, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(branch, "sleep", f"{seconds:g}")

    def begin_live(self) -> None:
        due = self.run.now_at.timestamp() + self.seconds
        self.run.add_wait(Wait(self, due, self._over))

    def _over(self) -> None:
        self.run.append(self.record(Kind.TIMER), self)

    def stop(self) -> None:
        super().stop()
        self.run.end_wait(self)


def sleep(seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> Call[None]:
    """Sleep durably: a run that sleeps long costs a row, not memory, and wakes in time after any crash."""
    total = seconds + 60 * minutes + 3600 * hours + 86_400 * days
    if not 0 <= total < 1e10:
        raise DefinitionError(f"a sleep must take between 0 and 10,000,000,000 s, not {total!r}")
    return SleepCall(_branch("sleep"), float(total))


class Request:
    """What `ks.wait_for` gives when someone asked with `handle.ask`: the payload, and the way to reply."""

    def __init__(self, run: RunContext, branch: Branch, question: str, payload: Any) -> None:
        self._run, self._branch, self._question = run, branch, question
        self.payload = payload

    def reply(self, value: Any = None) -> None:
        """Answer the one who asked, durably and once."""
        data = VALUES.encode(value, f"reply to {self._question}")
        _note(self._branch, Kind.REPLY, f"reply:{self._question}", data, {"ask": self._question})

    def __repr__(self) -> str:
        return f"<request {self._question} {self.payload!r}>"


class SignalCall(DurableCall[Any]):
    """A wait for a signal, for a while or for ever."""

    __slots__ = ("default", "name", "seconds")

    def __init__(self, branch: Branch, name: str, seconds: float | None, default: Any) -> None:
        self.name, self.seconds, self.default = name, seconds, default
        super().__init__(branch, f"wait_for:{name}", "" if seconds is None else f"{seconds:g}")

    def begin_live(self) -> None:
        signal = self.run.take_signal(self.name)
        if signal is not None:
            self._come(signal)
            return
        due = None if self.seconds is None else self.run.now_at.timestamp() + self.seconds
        self.run.add_wait(Wait(self, due, self._late, self.name, self._come))

    def _come(self, signal: Signal) -> None:
        data = {"signal": signal.seq, "sender": signal.sender}
        self.run.append(self.record(Kind.SIGNAL, signal.payload, data=data), self)

    def _late(self) -> None:
        text = f"no signal {self.name!r} came within {self.seconds:g} s"
        error = StoredError("keepstep.TimedOut", text, "timeout", "ks:timed-out", id=new_id("error"))
        self.run.append(self.record(Kind.TIMER, outcome=Outcome.FAILURE.value, error=error), self)

    def stop(self) -> None:
        super().stop()
        self.run.end_wait(self)

    def failure(self, record: Record) -> BaseException:
        error = super().failure(record)
        return _Default(self.default) if self.default is not _MISSING and isinstance(error, TimedOut) else error

    def outcome(self) -> Any:
        if isinstance(self.error, _Default):
            return self.error.value
        return super().outcome()

    def decode(self, record: Record) -> Any:
        raw = bytes(record.value)  # type: ignore[arg-type]
        if raw.startswith(b'{"$":"ask"'):
            question, payload = msgspec.json.decode(raw, type=_Ask).v
            return Request(self.run, self.branch, question, VALUES.decode(bytes(payload), "question"))
        return VALUES.decode(raw, f"signal {self.name!r}")


class _Ask(msgspec.Struct):
    v: tuple[str, msgspec.Raw]


class _Default(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def wait_for(name: str, timeout: float | timedelta | None = None, default: Any = _MISSING) -> Call[Any]:
    """Wait for a signal and give its payload; one that was sent before is not lost.

    When the time is over it raises `TimedOut`, or gives `default` if there is one.
    """
    check_name(name, "signal")
    if name.startswith(RESERVED):
        raise DefinitionError(f"signal name {name!r} is refused: names that begin with {RESERVED!r} are Keepstep's own")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is not None and seconds < 0:
        raise DefinitionError(f"a wait cannot end {-seconds:g} s ago")
    return SignalCall(_branch("wait_for"), name, seconds, default)


# -- other runs --------------------------------------------------------------------------------------------------------


class SendCall(DurableCall[None]):
    """A signal that a workflow sends to another run, in its own commit."""

    __slots__ = ("name", "payload", "target")

    def __init__(self, branch: Branch, target: str, name: str, payload: bytes) -> None:
        self.target, self.name, self.payload = target, name, payload
        super().__init__(branch, f"signal:{name}", VALUES.digest((target, name, payload), "signal"))

    def begin_live(self) -> None:
        run = self.run
        signal_id = f"{run.id}:{self.key}:{run.generation}"
        signal = Signal(self.target, self.name, self.payload, signal_id, f"run {run.id}", run.time())
        record = self.record(Kind.STEP_COMPLETED, attempt=1, data={"to": self.target, "signal_name": self.name})
        run.append_special(record, {"sends": [Send(signal)]}, self._sent, self._refused, self)

    def _sent(self, _: Answer) -> None:
        self.run.engine.signalled(self.target)

    def _refused(self, answer: Answer) -> None:
        missing = answer.verdict is Verdict.NOT_FOUND
        text = f"no run {self.target!r} is here" if missing else f"run {self.target!r} has already finished"
        error = StoredError(
            "keepstep.RunNotFound" if missing else "keepstep.AlreadyFinished", text, "permanent", id=new_id("error")
        )
        self.run.append(self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=error), self)

    def failure(self, record: Record) -> BaseException:
        error = record.error
        if error is not None and error.type == "keepstep.RunNotFound":
            return RunNotFound(error.message, self.target)
        return AlreadyFinished(error.message if error is not None else "", self.target)


def signal(run_id: str, name: str, payload: Any = True) -> Call[None]:
    """Send a signal to another run, exactly once, from a workflow."""
    check_id(run_id)
    check_name(name, "signal")
    return SendCall(_branch("signal"), run_id, name, VALUES.encode(payload, f"signal {name!r}"))


class ChildRun:
    """A run that a workflow started: await its result, signal it or cancel it."""

    def __init__(self, branch: Branch, run_id: str, key: str, workflow: Workflow[..., Any]) -> None:
        self.id = run_id
        self._branch, self._key, self._workflow = branch, key, workflow

    def result(self) -> Call[Any]:
        """The child's result, once it has one."""
        return ChildResult(_branch("start"), self)

    def __await__(self) -> Any:
        return self.result().__await__()

    def signal(self, name: str, payload: Any = True) -> Call[None]:
        """Send the child a signal."""
        return signal(self.id, name, payload)

    def cancel(self) -> Call[None]:
        """Ask the child to stop."""
        return SendCall(_branch("cancel"), self.id, CANCEL, b'{"reason":"cancelled by its parent"}')

    def __repr__(self) -> str:
        return f"<child run {self.id}>"


class StartCall(DurableCall[ChildRun]):
    """The start of a child, in its parent's commit: exactly one child per call across crashes."""

    __slots__ = ("input", "options", "workflow")

    def __init__(self, branch: Branch, workflow: Workflow[..., Any], payload: bytes, options: dict[str, Any]) -> None:
        self.workflow, self.input, self.options = workflow, payload, options
        super().__init__(branch, workflow.name, VALUES.digest((payload, options.get("run_id")), "child"))

    def begin_live(self) -> None:
        run, workflow = self.run, self.workflow
        given = self.options.get("run_id")
        child = given or child_id(run.id, self.key, run.generation)
        at = run.time()
        delay = float(self.options.get("delay") or 0.0)
        created = Run(
            id=child,
            workflow=workflow.name,
            status=Status.QUEUED,
            created_at=at,
            version=workflow.version,
            fingerprint=workflow.fingerprint,
            input=self.input,
            seed=attempts.idempotency_key(run.seed, self.key, run.generation)[:16],
            parent=run.id,
            parent_key=self.key,
            queue=self.options.get("queue") or "default",
            priority=self.options.get("priority") or 0,
            tags=self.options.get("tags") or {},
            due_at=instant(at.timestamp() + delay),
        )
        record = self.record(Kind.CHILD, attempt=1, data={"child": child})
        run.append_special(record, {"creates": [Create(created)]}, self._made, self._refused, self)

    def _made(self, _: Answer) -> None:
        self.run.engine.poke()

    def _refused(self, answer: Answer) -> None:
        text = f"run id {answer.about!r} is taken by another run"
        error = StoredError("keepstep.RunConflict", text, "permanent", id=new_id("error"))
        self.run.append(self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=error), self)

    def decode(self, record: Record) -> ChildRun:
        child = (record.data or {})["child"]
        self.run.children[self.key] = child
        return ChildRun(self.branch, child, self.key, self.workflow)


class ChildResult(DurableCall[Any]):
    """The wait for a child's end."""

    __slots__ = ("child",)

    def __init__(self, branch: Branch, child: ChildRun) -> None:
        self.child = child
        super().__init__(branch, f"{child._workflow.name}.result", child.id)  # noqa: SLF001

    def begin_live(self) -> None:
        key = self.child._key  # noqa: SLF001
        word = self.run.child_results.get(key)
        if word is not None:
            self._write(word, {})
            return
        name = f"{CHILD}{key}"
        signal = self.run.take_signal(name)
        if signal is not None:
            self._come(signal)
        else:
            self.run.add_wait(Wait(self, None, None, name, self._come))

    def _come(self, signal: Signal) -> None:
        self._write(signal.payload, {"signal": signal.seq})

    def _write(self, word: bytes, data: dict[str, Any]) -> None:
        self.run.append(self.record(Kind.CHILD, word, data=data or None), self)

    def stop(self) -> None:
        super().stop()
        self.run.end_wait(self)

    def decode(self, record: Record) -> Any:
        key = self.child._key  # noqa: SLF001
        raw = bytes(record.value)  # type: ignore[arg-type]
        self.run.child_results[key] = raw
        self.run.children.pop(key, None)
        word = msgspec.json.decode(raw, type=_Word)
        if word.status == Status.COMPLETED:
            value = b"null" if word.value is msgspec.UNSET else bytes(word.value)  # type: ignore[arg-type]
            return self.child._workflow.values.decode(value, f"child {self.child.id!r}: result")  # noqa: SLF001
        info = word.error.info() if word.error is not None else None
        told = f": {info.type}: {info.message}" if info is not None else ""
        self.error = StepFailed(f"child run {self.child.id!r} {word.status}{told}", self.key, info, record.seq)
        return None


class _Word(msgspec.Struct):
    status: str
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: StoredError | None = None


_CHILD_OPTIONS: tuple[str, ...] = ("run_id", "queue", "priority", "delay", "tags")


def start(workflow: Any, *args: Any, **kwargs: Any) -> Call[ChildRun]:
    """Start a child run from a workflow: exactly one per call, whatever crashes. Cancelling the parent cancels it."""
    branch = _branch("start")
    options = {name: kwargs.pop(name) for name in _CHILD_OPTIONS if name in kwargs}
    if isinstance(workflow, Bound):
        workflow, args, kwargs = workflow.workflow, workflow.args, workflow.kwargs
    if not isinstance(workflow, Workflow):
        raise DefinitionError(f"{workflow!r} is not a workflow; decorate it with @ks.workflow")
    if options.get("run_id") is not None:
        check_id(options["run_id"])
    workflow.check_arguments(args, kwargs)
    payload = workflow.values.encode([[*args], kwargs], f"workflow {workflow.name!r}: input")
    return StartCall(branch, workflow, payload, options)


def continue_as(*args: Any, **kwargs: Any) -> NoReturn:
    """End this run and start its successor with these arguments, in one commit; unread signals move over."""
    branch = _branch("continue_as")
    branch.run.workflow.check_arguments(args, kwargs)
    raise ContinueAs(args, kwargs)


# -- several at once ---------------------------------------------------------------------------------------------------


class Group:
    """Calls under way together. Its parts are told in sequence order; it opens its gate when the wait is over."""

    def __init__(self, run: RunContext, parts: list[Any], limit: int, policy: Any, *, collect: bool) -> None:
        self.run = run
        self.parts = parts
        self.limit = limit
        self.policy = policy
        self.collect = collect
        self.gate = Gate(loop=run.loop)
        self.total = len(parts)
        self.begun: list[Any] = [None] * self.total
        self.results: list[Any] = [None] * self.total
        self.errors: dict[int, BaseException] = {}
        self.order: list[int] = []
        self.succeeded = 0
        self.ended = 0
        self.next = 0
        self.under_way = 0
        self.over = False

    async def go(self) -> None:
        """Begin as many as may be at once, and wait until enough have ended."""
        self._check()
        self._fill()
        try:
            await self.gate
        except asyncio.CancelledError:
            self._withdraw()
            raise
        self._withdraw()

    def _fill(self) -> None:
        while not self.over and self.under_way < self.limit and self.next < self.total:
            index = self.next
            self.next += 1
            self.under_way += 1
            part = self.parts[index]
            if callable(part):
                part = part()
            self._begin(index, part)

    def _begin(self, index: int, part: Any) -> None:
        if isinstance(part, DurableCall):
            self.begun[index] = part
            if part.state in (DONE, CANCELLED):
                self._call_ended(index, part)
            else:
                part.told = lambda call: self._call_ended(index, call)
                part.begin()
            return
        task = asyncio.ensure_future(part)
        self.begun[index] = task
        task.add_done_callback(lambda done: self._task_ended(index, done))

    def _call_ended(self, index: int, call: DurableCall[Any]) -> None:
        try:
            self._part_ended(index, call.outcome(), None)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is the part's outcome
            self._part_ended(index, None, error)

    def _task_ended(self, index: int, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            self._part_ended(index, None, asyncio.CancelledError())
        else:
            self._part_ended(index, None if task.exception() else task.result(), task.exception())

    def _part_ended(self, index: int, value: Any, error: BaseException | None) -> None:
        self.under_way -= 1
        self.ended += 1
        self.order.append(index)
        if error is None:
            self.results[index] = value
            self.succeeded += 1
        else:
            self.errors[index] = error
        if not self.over:
            self._check()
            self._fill()

    def _check(self) -> None:
        verdict = self.policy.enough(self.total, self.succeeded, len(self.errors))
        if self.collect and isinstance(self.policy, All):
            verdict = Enough.DONE if self.ended == self.total else Enough.WAIT
        if verdict is not Enough.WAIT:
            self.over = True
            if not self.gate.done():
                self.gate.set_result(None)

    def _withdraw(self) -> None:
        self.over = True
        for part in self.begun:
            if isinstance(part, DurableCall):
                if part.state == ASKED:
                    part.cancel()
            elif part is not None and not part.done():
                part.cancel()

    def first_error(self) -> BaseException | None:
        return next((self.errors[index] for index in self.order if index in self.errors), None)


async def _gathered(branch: Branch, parts: tuple[Any, ...], return_exceptions: bool) -> list[Any]:
    group = Group(branch.run, list(parts), max(1, len(parts)), All(), collect=return_exceptions)
    if parts:
        await group.go()
    if return_exceptions:
        return [group.errors.get(index, value) for index, value in enumerate(group.results)]
    error = group.first_error()
    if error is not None:
        raise error
    return group.results


def gather(*parts: Awaitable[Any], return_exceptions: bool = False) -> Call[list[Any]]:
    """Run calls and coroutines at once, results in the order given; the first failure cancels the rest.

    With `return_exceptions` every part is waited for, and errors stand in their places.
    """
    scope = CURRENT.get()
    if scope is None or scope.in_step:
        return _plainly(_plain_gather(parts, return_exceptions))
    return Task(scope, _gathered(scope, parts, return_exceptions))


async def _plain_gather(parts: tuple[Any, ...], return_exceptions: bool) -> list[Any]:
    return list(await asyncio.gather(*parts, return_exceptions=return_exceptions))


class MapResult(list[Any]):
    """The results of a map that collects, in input order; None where an item failed or was not waited for."""

    def __init__(self, results: Iterable[Any], failures: Mapping[int, BaseException], succeeded: int) -> None:
        super().__init__(results)
        self.failures = dict(failures)
        self.coverage = coverage(len(self), succeeded)
        self.degraded = degraded(len(self), succeeded)


def map(  # noqa: A001 - the word users know
    function: Step[Any, T] | Callable[[U], Awaitable[T]],
    items: Iterable[U],
    *,
    concurrency: int | None = None,
    collect: bool = False,
    wait: WaitPolicy | None = None,
) -> Call[list[T]]:
    """Call a step (or an async function of steps) for every item, results in input order.

    The first failure cancels the rest and is raised; with `collect` the rest goes on, and the result tells `failures`,
    `coverage` and `degraded`. `wait` may ask for `Any` or a `Quorum` instead of `All`.
    """
    items = list(items)
    if concurrency is not None and concurrency < 1:
        raise DefinitionError(f"a map needs a concurrency of at least 1, not {concurrency}")
    scope = CURRENT.get()
    if scope is None or scope.in_step:
        return _plainly(_plain_gather(tuple(function(item) for item in items), False))
    limit = concurrency or _limit(function, len(items))
    return Task(scope, _mapped(scope, function, items, limit, wait or All(), collect))


def _limit(function: Any, items: int) -> int:
    if isinstance(function, Step) and not function.is_async:
        return max(1, min(2 * (cpu_count() or 1), MAX_THREAD_STEPS, items))
    return MAX_ASYNC_STEPS


async def _mapped(
    branch: Branch, function: Any, items: list[Any], limit: int, policy: WaitPolicy, collect: bool
) -> list[Any]:
    group_path = branch.child().path

    def part(index: int, item: Any) -> Any:
        own = branch.item(group_path, index)
        if isinstance(function, Step):
            return StepCall(own, function, (item,), {})
        context = copy_context()
        context.run(CURRENT.set, own)
        coroutine = context.run(function, item)
        if not inspect.iscoroutine(coroutine):
            raise DefinitionError("ks.map takes a step or an async function")
        return branch.run.spawn_in(own, coroutine)

    parts = [lambda index=index, item=item: part(index, item) for index, item in enumerate(items)]
    group = Group(branch.run, parts, limit, policy, collect=collect)
    if parts:
        await group.go()
    if collect:
        return MapResult(group.results, group.errors, group.succeeded)
    verdict = policy.enough(group.total, group.succeeded, len(group.errors))
    error = group.first_error()
    if verdict is not Enough.DONE and error is not None:
        raise error
    if isinstance(policy, All):
        return group.results
    return MapResult(group.results, group.errors, group.succeeded)


async def _raced(branch: Branch, parts: tuple[Any, ...]) -> Any:
    key = branch.key("race")
    group = Group(branch.run, list(parts), len(parts), _First(), collect=False)
    await group.go()
    winner = group.order[0]
    _decide(branch, key, winner)
    error = group.errors.get(winner)
    if error is not None:
        raise error
    return group.results[winner]


class _First:
    """The first to end decides, whether it succeeded or not."""

    def enough(self, total: int, succeeded: int, failed: int) -> Enough:
        return Enough.DONE if succeeded + failed else Enough.WAIT


def race(*parts: Awaitable[T]) -> Call[T]:
    """The outcome of whichever ends first; the others are cancelled, and the decision is recorded."""
    if not parts:
        raise DefinitionError("ks.race needs at least one call")
    branch = _branch("race")
    return Task(branch, _raced(branch, parts))


async def as_completed(parts: Iterable[Awaitable[T]]) -> AsyncIterator[T]:
    """Results one by one, in the order in which they came; that order is the same on every replay."""
    branch = _branch("as_completed")
    listed = list(parts)
    key = branch.key("as_completed")
    queue: asyncio.Queue[int] = asyncio.Queue()
    group = _Stream(branch.run, listed, queue)
    group.begin()
    try:
        for count in range(len(listed)):
            index = await queue.get()
            _decide(branch, f"{key}.{count}", index)
            error = group.errors.get(index)
            if error is not None:
                raise error
            yield group.results[index]
    finally:
        group._withdraw()  # noqa: SLF001


class _Stream(Group):
    """A group that tells of each part as it ends."""

    def __init__(self, run: RunContext, parts: list[Any], queue: asyncio.Queue[int]) -> None:
        super().__init__(run, parts, max(1, len(parts)), All(), collect=True)
        self._queue = queue

    def begin(self) -> None:
        self._fill()

    def _part_ended(self, index: int, value: Any, error: BaseException | None) -> None:
        super()._part_ended(index, value, error)
        self._queue.put_nowait(index)


async def _chained(
    function: Any,
    items: list[Any],
    value: Any,
    on_progress: Callable[[int, int, Any], None] | None,
    states: list[Any] | None,
) -> Any:
    for index, item in enumerate(items):
        value = await function(value, item)
        if states is not None:
            states.append(value)
        if on_progress is not None:
            on_progress(index + 1, len(items), value)
    return value if states is None else states


def chain(
    function: Callable[[Any, U], Awaitable[Any]],
    items: Iterable[U],
    initial: Any = None,
    *,
    on_progress: Callable[[int, int, Any], None] | None = None,
    intermediate: bool = False,
) -> Call[Any]:
    """Fold items one after the other through a step: `value = await function(value, item)`.

    `on_progress(done, total, value)` is told after each; `intermediate` gives all states instead of the last.
    """
    coroutine = _chained(function, list(items), initial, on_progress, [] if intermediate else None)
    scope = CURRENT.get()
    return _plainly(coroutine) if scope is None or scope.in_step else Task(scope, coroutine)


def _plainly(coroutine: Coroutine[Any, Any, T]) -> Call[T]:
    from ..workflows.definition import PlainCall  # noqa: PLC0415

    return PlainCall(lambda: coroutine, (), {})


# -- timeouts ----------------------------------------------------------------------------------------------------------


class TimeoutCall(DurableCall[None]):
    """The clock of a `ks.timeout` block."""

    __slots__ = ("on_over", "seconds")

    def __init__(self, branch: Branch, seconds: float, on_over: Callable[[], None]) -> None:
        self.seconds, self.on_over = seconds, on_over
        super().__init__(branch, "timeout", f"{seconds:g}")

    def begin_live(self) -> None:
        self.run.add_wait(Wait(self, self.run.now_at.timestamp() + self.seconds, self._over))

    def _over(self) -> None:
        self.run.append(self.record(Kind.TIMER), self)

    def settle(self, record: Record) -> bool:
        if self.state != ASKED:
            return False
        self.state = DONE
        self.on_over()
        return True

    def stop(self) -> None:
        super().stop()
        self.run.end_wait(self)

    def withdraw(self) -> None:
        """The block ended in time; nothing is recorded of a clock that did not ring."""
        if self.state == ASKED:
            self.state = CANCELLED
            self.stop()
            self.run.asked.pop(self.key, None)
            self.run.watch()


class timeout:  # noqa: N801 - used like asyncio.timeout
    """`async with ks.timeout(seconds):` ends the block with `TimedOut` when its time is over, durably."""

    def __init__(self, seconds: float | timedelta) -> None:
        self._seconds = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
        self._expired = False

    async def __aenter__(self) -> timeout:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._call = TimeoutCall(_branch("timeout"), self._seconds, self._ring)
        self._call.begin()
        return self

    def _ring(self) -> None:
        self._expired = True
        if self._task is not None:
            self._task.cancel()

    @property
    def expired(self) -> bool:
        """Whether the block was ended by the clock."""
        return self._expired

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._call.withdraw()
        if self._expired and self._task is not None:
            if (
                self._task.uncancel() <= self._cancelling
                and kind is not None
                and issubclass(kind, asyncio.CancelledError)
            ):
                raise TimedOut(f"the block took longer than {self._seconds:g} s", self._call.run.id) from None


# -- notes that write, but do not wait ---------------------------------------------------------------------------------


def _note(branch: Branch, kind: Kind, key: str, value: bytes | None, data: dict[str, Any] | None = None) -> None:
    """Record something that the code does not wait for; on replay it is there already."""
    run = branch.run
    if run.detached:
        return
    recorded = run.notes.pop(key, None)
    if recorded is not None:
        return
    record = Record(run.id, kind.value, step=key, worker=run.worker, data=data)
    record.finished_at = run.time()
    if value is not None:
        record.value = msgspec.Raw(value)
    run.append(record)


def _decide(branch: Branch, key: str, choice: int) -> None:
    recorded = branch.run.notes.get(key)
    if recorded is not None and (recorded.data or {}).get("choice") != choice:
        branch.run.mismatch(f"{key} was decided as {(recorded.data or {}).get('choice')} and now as {choice}")
    _note(branch, Kind.DECISION, key, None, {"choice": choice})


def patched(name: str) -> bool:
    """Whether this run takes the new path of a change: True from the change on, False where its history is older."""
    branch = _branch("patched")
    check_name(name, "patch")
    run = branch.run
    if name not in run.patches:
        key = f"patch:{name}"
        history = run.history
        old = key not in run.notes and history is not None and history.recorded_after(branch.path, branch.ordinal)
        run.patches[name] = not old
        if not old:
            _note(branch, Kind.PATCH, key, None)
    return run.patches[name]


def publish(key: str, value: Any) -> None:
    """Show a value of the run to readers: `handle.published()`, the command line, the web."""
    scope = CURRENT.get()
    if scope is None:
        return
    check_name(key, "published")
    data = VALUES.encode(value, f"published {key!r}")
    check_size(f"publish {key}", data, scope.run.engine.max_value_bytes)
    if scope.in_step:
        record = Record(scope.run.id, Kind.PUBLISHED.value, step=scope.key, worker=scope.run.worker, data={"key": key})
        record.value = msgspec.Raw(data)
        _from_step(scope, record)
    else:
        _note(scope, Kind.PUBLISHED, scope.key(f"publish:{key}"), data, {"key": key})


def _from_step(scope: Attempt, record: Record) -> None:
    def append() -> None:
        record.finished_at = scope.run.time()
        scope.run.append(record)

    scope.run.loop.call_soon_threadsafe(append)


def emit(value: Any) -> None:
    """Stream a token to whoever watches the run; tokens of an attempt that is repeated come again, with its number."""
    scope = CURRENT.get()
    if scope is None:
        return
    if not scope.in_step:
        key = scope.key("emit")
        _note(scope, Kind.EMITTED, key, msgspec.json.encode([value]))
        return
    attempts.emit(scope, value)


def progress(fraction: float, message: str = "") -> None:
    """Report how far the running step is; readers see the latest report."""
    scope = CURRENT.get()
    if scope is None or scope.run.engine.worker is None:
        return
    step = scope.key if scope.in_step else ""
    told = {"fraction": max(0.0, min(1.0, float(fraction))), "message": message, "step": step}
    scope.run.engine.worker.report_progress(scope.run.id, msgspec.json.encode(told))


class CheckpointCall(DurableCall[None]):
    """A point at which everything before it is durable."""

    __slots__ = ()

    def begin_live(self) -> None:
        self.run.append_special(self.record(Kind.BARRIER, trigger="manual"), {}, call=self)


def checkpoint() -> Call[None]:
    """Make everything so far durable now, whatever the workflow's durability."""
    return CheckpointCall(_branch("checkpoint"), "checkpoint", "")


__all__ = ["NEW", "Draft", "RunHandle"]
