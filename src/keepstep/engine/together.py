"""Several calls at once: all of them, the first, or one after the other as they come."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import copy_context
from os import cpu_count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from ..errors import DefinitionError
from ..policies import All
from ..policies.quorum import Verdict as Enough
from ..policies.quorum import coverage, degraded
from ..ports import CURRENT
from ..workflows.definition import Call, PlainCall, Step
from .branch import ASKED, CANCELLED, DONE, Branch, DurableCall, Gate, StepCall, Task, in_workflow
from .context import RunContext
from .notes import decide, decided

if TYPE_CHECKING:
    from ..policies import WaitPolicy

T = TypeVar("T")
U = TypeVar("U")

#: Parallel steps at once by default: threads are few, tasks are cheap.
MAX_THREAD_STEPS = 16
MAX_ASYNC_STEPS = 100


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
        self.next = 0
        self.under_way = 0
        self.tasks_begun = 0
        self.filling = False
        self.over = False
        self.misuse: DefinitionError | None = None
        self.context = copy_context()  # later parts are made when an outcome is delivered, far from the code's own

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
        if self.misuse is not None:
            raise self.misuse

    def _fill(self) -> None:
        if self.filling:
            return
        self.filling = True
        while not self.over and self.under_way < self.limit and self.next < self.total:
            index = self.next
            self.next += 1
            self.under_way += 1
            part = self.parts[index]
            try:
                self._begin(index, self.context.run(part) if callable(part) else part)
            except _Misuse as error:  # a mistake in the code, not the failure of an item
                self.misuse = DefinitionError(str(error))
                self._end()
            except Exception as error:  # noqa: BLE001 - for one, an item that cannot be stored
                self._part_ended(index, None, error)
        self.filling = False

    def _begin(self, index: int, part: Any) -> None:
        if isinstance(part, DurableCall):
            self.begun[index] = part
            if part.state in (DONE, CANCELLED):
                self._call_ended(index, part)
            else:
                before = part.told  # one call may be given twice

                def told(call: DurableCall[Any]) -> bool:
                    woke_others = before is not None and before(call)
                    if self.over:  # it no longer counts here
                        return woke_others
                    return self._call_ended(index, call) or woke_others

                part.told = told
                part.begin()
            return
        self.tasks_begun += 1
        task = asyncio.ensure_future(part)
        self.begun[index] = task
        task.add_done_callback(lambda done: self._task_ended(index, done))

    def _call_ended(self, index: int, call: DurableCall[Any]) -> bool:
        """Count the outcome of a call; whether that sets code of the workflow going."""
        tasks_begun = self.tasks_begun
        try:
            self._part_ended(index, call.outcome(), None)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is the part's outcome
            self._part_ended(index, None, error)
        return self.over or self.tasks_begun > tasks_begun

    def _task_ended(self, index: int, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            self._part_ended(index, None, asyncio.CancelledError())
        else:
            self._part_ended(index, None if task.exception() else task.result(), task.exception())

    def _part_ended(self, index: int, value: Any, error: BaseException | None) -> None:
        self.under_way -= 1
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
        if _verdict(self.policy, self.total, self.succeeded, len(self.errors), collect=self.collect) != Enough.WAIT:
            self._end()

    def _end(self) -> None:
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


def _verdict(policy: Any, total: int, succeeded: int, failed: int, *, collect: bool) -> Enough:
    """Whether enough parts have ended; whoever collects waits for all of them, whatever their outcomes."""
    if collect and isinstance(policy, All):
        return Enough.DONE if succeeded + failed == total else Enough.WAIT
    return policy.enough(total, succeeded, failed)  # type: ignore[no-any-return]


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


class Limits(NamedTuple):
    """How many items of a map are under way at once, how many must succeed, and whether failures are collected."""

    concurrency: int
    policy: Any
    collect: bool

    @classmethod
    def of(cls, function: Any, items: int, concurrency: int | None, wait: Any, *, collect: bool) -> Limits:
        """The limits that a user gave, or the usual ones."""
        return cls(concurrency or _limit(function, items), wait or All(), collect)


class MapResult(list[Any]):
    """The results of a map that collects, in input order; None where an item failed or was not waited for."""

    def __init__(self, results: Iterable[Any], failures: Mapping[int, BaseException], succeeded: int) -> None:
        super().__init__(results)
        self.failures = dict(failures)
        self.coverage = coverage(len(self), succeeded)
        self.degraded = degraded(len(self), succeeded)


@overload
def map(  # noqa: A001 - the word users know
    function: Callable[[U], Awaitable[T]],
    items: Iterable[U],
    *,
    concurrency: int | None = None,
    collect: Literal[False] = False,
    wait: All | None = None,
) -> Call[list[T]]: ...
@overload
def map(  # noqa: A001
    function: Callable[[U], Awaitable[T]],
    items: Iterable[U],
    *,
    concurrency: int | None = None,
    collect: bool = False,
    wait: WaitPolicy | None = None,
) -> Call[MapResult]: ...
def map(  # noqa: A001
    function: Callable[[U], Awaitable[T]],
    items: Iterable[U],
    *,
    concurrency: int | None = None,
    collect: bool = False,
    wait: WaitPolicy | None = None,
) -> Call[Any]:
    """Call a step (or an async function of steps) for every item, results in input order.

    The first failure cancels the rest and is raised; with `collect` the rest goes on, and the result tells `failures`,
    `coverage` and `degraded`. `wait` may ask for `Any` or a `Quorum` instead of `All`. It is the same outside a run.
    """
    items = list(items)
    if concurrency is not None and concurrency < 1:
        raise DefinitionError(f"a map needs a concurrency of at least 1, not {concurrency}")
    scope = CURRENT.get()
    limits = Limits.of(function, len(items), concurrency, wait, collect=collect)
    if scope is None or scope.in_step:
        return _plainly(_plain_map(function, items, limits))
    group = scope.child().path  # numbered where it is called, not where it is awaited
    return Task(scope, mapped(scope, group, function, items, limits))


def _limit(function: Any, items: int) -> int:
    if isinstance(function, Step) and not function.is_async:
        return max(1, min(2 * (cpu_count() or 1), MAX_THREAD_STEPS, items))
    return MAX_ASYNC_STEPS


async def mapped(branch: Branch, group_path: str, function: Any, items: list[Any], limits: Limits) -> list[Any]:
    """Call a step or an async function for every item, each in a branch of its own below the path."""

    def part(index: int, item: Any) -> Any:
        own = branch.item(group_path, index)
        if isinstance(function, Step):
            return StepCall(own, function, (item,), {})
        context = copy_context()
        context.run(CURRENT.set, own)
        return branch.run.spawn_in(own, context.run(_coroutine, function, item))

    parts = [lambda index=index, item=item: part(index, item) for index, item in enumerate(items)]
    group = Group(branch.run, parts, limits.concurrency, limits.policy, collect=limits.collect)
    if parts:
        await group.go()
    return _map_result(group.results, group.errors, group.first_error(), group.succeeded, limits)


def _map_result(
    results: list[Any],
    errors: dict[int, BaseException],
    first_error: BaseException | None,
    succeeded: int,
    limits: Limits,
) -> list[Any]:
    """What a map gives, or raises, when enough of its items have ended."""
    policy = limits.policy
    if not limits.collect:
        if policy.enough(len(results), succeeded, len(errors)) is not Enough.DONE and first_error is not None:
            raise first_error
        if isinstance(policy, All):
            return results
    return MapResult(results, errors, succeeded)


class _Misuse(Exception):
    """The function of a map is none that a map can call."""


def _coroutine(function: Any, item: Any) -> Coroutine[Any, Any, Any]:
    """Call an async function; a plain one may do all its work here, so also what it raises is a mistake."""
    name, why = getattr(function, "__qualname__", repr(function)), "is a plain function"
    try:
        made = function(item)
        if inspect.iscoroutine(made):
            return made
    except Exception as error:  # noqa: BLE001 - told with the rest
        why = f"could not be called: {error}"
    raise _Misuse(f"ks.map takes a step or an async function; {name} {why}. Write it as `async def`, with `await`")


async def _plain_map(function: Any, items: list[Any], limits: Limits) -> list[Any]:
    """A map outside a run: it waits and collects as in a run, and stores nothing."""
    total, results, errors = len(items), [None] * len(items), dict[int, BaseException]()
    waiting, under_way = list(enumerate(items))[::-1], dict[asyncio.Future[Any], int]()
    succeeded, first_error = 0, None
    try:
        while _verdict(limits.policy, total, succeeded, len(errors), collect=limits.collect) is Enough.WAIT:
            while waiting and len(under_way) < limits.concurrency:
                index, item = waiting.pop()
                made = function(item) if isinstance(function, Step) else _coroutine(function, item)
                under_way[asyncio.ensure_future(made)] = index
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=under_way.__getitem__):
                index = under_way.pop(task)
                error = asyncio.CancelledError() if task.cancelled() else task.exception()
                if error is None:
                    results[index], succeeded = task.result(), succeeded + 1
                else:
                    errors[index], first_error = error, first_error or error
    except _Misuse as error:
        raise DefinitionError(str(error)) from None
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    return _map_result(results, errors, first_error, succeeded, limits)


async def _raced(branch: Branch, key: str, parts: tuple[Any, ...]) -> Any:
    group = Group(branch.run, list(parts), len(parts), _First(), collect=False)
    await group.go()
    winner = group.order[0]
    decide(branch, key, winner)
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
    branch = in_workflow("race")
    return Task(branch, _raced(branch, branch.key("race"), parts))


async def as_completed(parts: Iterable[Awaitable[T]]) -> AsyncIterator[T]:
    """Results one by one, in the order in which they came; that order is the same on every replay."""
    branch = in_workflow("as_completed")
    listed = list(parts)
    key = branch.key("as_completed")
    group = _Stream(branch.run, listed)
    group.begin()
    try:
        for count in range(len(listed)):
            index = await group.next_ended(decided(branch, f"{key}.{count}"))
            decide(branch, f"{key}.{count}", index)
            error = group.errors.get(index)
            if error is not None:
                raise error
            yield group.results[index]
    finally:
        group._withdraw()  # noqa: SLF001


class _Stream(Group):
    """A group that tells of each part as it ends."""

    _more: Gate | None = None

    def __init__(self, run: RunContext, parts: list[Any]) -> None:
        super().__init__(run, parts, max(1, len(parts)), All(), collect=True)
        self._untold: list[int] = []  # parts that have ended, and of which the code has not been told

    def begin(self) -> None:
        self._fill()

    async def next_ended(self, decided: int | None) -> int:
        """The next part that ends, or the one that was recorded as the next: a part may wait for what no one records.

        It waits at a gate, so that the run can be put away meanwhile.
        """
        known = decided is not None and decided < self.total
        while not self._untold or (known and decided not in self._untold):
            self._more = Gate(loop=self.run.loop)
            await self._more
        return self._untold.pop(self._untold.index(decided) if known and decided is not None else 0)

    def _call_ended(self, index: int, call: DurableCall[Any]) -> bool:
        super()._call_ended(index, call)
        return True

    def _part_ended(self, index: int, value: Any, error: BaseException | None) -> None:
        self._untold.append(index)
        super()._part_ended(index, value, error)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


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
    return PlainCall(lambda: coroutine, (), {})
