"""Several calls at once: all of them, the first, or each one as it ends."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, overload

from ..checks import check_key
from ..errors import DefinitionError
from ..policies import All
from ..policies.quorum import Verdict as Enough
from ..ports import CURRENT
from ..records.progress import MapProgress
from ..workflows.call import Call, PlainCall
from ..workflows.definition import Step
from .batch import MapResult, Outcomes
from .call_states import ASKED, CANCELLED, DONE, NEW, Detached
from .calls import Branch, CompositeWait, DurableCall, StepCall, Task, current_branch
from .driver import RunDriver
from .plain_code import bare, begun_later, in_branch_thread, runs_in_thread
from .publish import decide, decided
from .strands import spawn_in

if TYPE_CHECKING:
    from ..policies import WaitPolicy

T = TypeVar("T")
U = TypeVar("U")

#: Default number of parallel steps in threads. Threads are expensive, tasks are cheap.
MAX_THREAD_STEPS = 16
MAX_ASYNC_STEPS = 100
#: Items from which on readers of a run see how far a map has come.
SHOWN_FROM = 100
#: Types of parts that begin nothing by themselves.
_STEPS = frozenset((StepCall,))
_NO_MORE: Any = object()


class Group(Outcomes):
    """Calls in progress together. Their outcomes arrive in sequence order; `waiter` is done when the wait is over.

    Parts are drawn when they begin and dropped when they end: only those under way are held, and the values. `place`
    returns the index of the part that makes the call with a recorded key.
    """

    def __init__(
        self,
        run: RunDriver,
        parts: list[Any] | Iterator[Any],
        limit: int,
        policy: Any,
        *,
        collect: bool,
        total: float | None = None,
        place: Callable[[str], int | None] | None = None,
    ) -> None:
        self.given: list[Any] = parts if isinstance(parts, list) else []
        super().__init__(len(self.given) if total is None else total)
        self.run = run
        self.parts = iter(parts)
        self.limit = limit
        self.policy = policy
        self.collect = collect
        self.place = place
        self.waiter = CompositeWait(loop=run.loop)
        self.begun: dict[int, Any] = {}  # parts under way, by index
        self.next = 0
        self.tasks_begun = 0
        self.filling = False
        self.over = False
        self.broken: Exception | None = None
        self.context = copy_context()  # later parts are begun during a delivery, outside the code's own context

    async def go(self, then: Callable[[], None] | None = None) -> None:
        """Begin as many parts as allowed at once, and wait until enough have ended. `then` records a decision."""
        replays = self.run.history is not None
        if replays:
            self.run.group_begun(self.reach)
        self._check()
        self._fill()
        try:
            await self.waiter
        except asyncio.CancelledError:
            self._withdraw()
            await self._left()
            raise
        finally:
            if replays:
                self.run.group_ended(self.reach)
        self._withdraw()
        if then is not None:
            then()  # before the next wait, so that one commit holds the decision and the cancels
        await self._left()
        if self.broken is not None:
            raise self.broken

    async def _left(self) -> None:
        """Wait until the code of cancelled parts has cleaned up."""
        if self.tasks_begun and self.run.nests:
            leaving = [part for part in self.begun.values() if isinstance(part, asyncio.Future) and not part.done()]
            if leaving:
                await asyncio.wait(leaving)

    def reach(self, key: str) -> bool:
        """On replay, begin the parts up to the one that has made this call: its worker may have had a higher limit."""
        index = None if self.place is None else self.place(key)
        if index is None or index < self.next or self.over:
            return False
        self._fill(index)
        return True

    def _fill(self, upto: int = -1) -> None:
        if self.filling:
            return
        self.filling = True
        while not self.over and (len(self.begun) < self.limit or self.next <= upto):
            part = self._drawn()
            if part is _NO_MORE:
                break
            index = self.next
            self.next += 1
            self.begun[index] = None
            try:
                self._begin(index, self.context.run(part) if callable(part) else part)
            except _Misuse as error:  # a mistake in the code, not the failure of an item
                self._break(DefinitionError(str(error)))
            except Exception as error:  # noqa: BLE001 - for example, an item that cannot be stored
                self._part_ended(index, None, error)
        self.filling = False

    def _drawn(self) -> Any:
        """Return the next part. After the last, the total is known."""
        if self.next == self.total:
            return _NO_MORE
        try:
            part = self.context.run(next, self.parts, _NO_MORE)
        except Exception as error:  # noqa: BLE001 - the code of an iterator of the workflow
            self._break(error)
            return _NO_MORE
        if part is _NO_MORE:
            self.total = self.next
            self._check()
        return part

    def _break(self, error: Exception) -> None:
        """End the wait with an error that is not the failure of an item."""
        self.broken = error
        self._end()

    def _begin(self, index: int, part: Any) -> None:
        if type(part) is StepCall or isinstance(part, DurableCall):  # the second check is slow
            self.begun[index] = part
            if part.state in (DONE, CANCELLED):
                self._call_ended(index, part)
            else:
                before = part.on_end  # the same call may be given twice

                def settled(call: DurableCall[Any]) -> bool:
                    woke_others = before is not None and before(call)
                    if self.over:  # the outcome no longer counts here
                        return woke_others
                    return self._call_ended(index, call) or woke_others

                part.on_end = settled
                part.begin()
            return
        self.tasks_begun += 1
        task = asyncio.ensure_future(part)
        self.begun[index] = task
        # In the context of the code, so that the run is not taken for at rest while this is still to be called.
        task.add_done_callback(lambda done: self._task_ended(index, done), context=self.context.copy())

    def _call_ended(self, index: int, call: DurableCall[Any]) -> bool:
        """Count the outcome of a call. Return whether this wakes code of the workflow."""
        tasks_begun = self.tasks_begun
        try:
            self._part_ended(index, call.outcome(), None)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is the outcome of the part
            self._part_ended(index, None, error)
        return self.over or self.tasks_begun > tasks_begun

    def _task_ended(self, index: int, task: asyncio.Future[Any]) -> None:
        if self.over:  # the outcome no longer counts
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not warn of it
        elif task.cancelled():
            self._part_ended(index, None, asyncio.CancelledError())
        else:
            self._part_ended(index, None if task.exception() else task.result(), task.exception())

    def _part_ended(self, index: int, value: Any, error: BaseException | None) -> None:
        del self.begun[index]
        self.add(index, value, error)
        if not self.over:
            self._check()
            self._fill()

    def _check(self) -> None:
        if self.verdict(self.policy, collect=self.collect) != Enough.WAIT:
            self._end()

    def _end(self) -> None:
        self.over = True
        if not self.waiter.done():
            self.waiter.set_result(None)

    def _withdraw(self) -> None:
        self.over = True
        for part in [*self.begun.values()]:
            if type(part) is StepCall or isinstance(part, DurableCall):
                if part.state == ASKED:
                    part.cancel()
            elif part is not None and not part.done():
                part.cancel()
        for part in self.given[self.next :]:  # never begun
            _give_up(part)

    def conclusion(self) -> list[Any]:
        """Return or raise the outcome of a batch."""
        return self.concluded(self.policy, self.next, collect=self.collect)


def _give_up(part: Any) -> None:
    """Withdraw a part that was never begun, without a warning that it was never awaited."""
    if isinstance(part, DurableCall):
        if part.state == NEW:
            part.cancel()
    elif isinstance(part, _Coroutine):
        part.coroutine.close()


async def _gathered(branch: Branch, path: str, parts: list[Any], limits: Limits, return_exceptions: bool) -> list[Any]:
    collect, place = limits.collect or return_exceptions, _place_of_given(path, parts) if path else None
    group = Group(branch.run, parts, limits.concurrency, limits.policy, collect=collect, place=place)
    if parts:
        await group.go()
    if return_exceptions:
        return [group.errors.get(index, value) for index, value in enumerate(group.results)]
    return group.conclusion()


@overload
def gather(
    *parts: Awaitable[Any] | Callable[[], Any],
    return_exceptions: bool = False,
    concurrency: int | None = None,
    collect: Literal[False] = False,
    wait: All | None = None,
) -> Call[list[Any]]: ...
@overload
def gather(
    *parts: Awaitable[Any] | Callable[[], Any],
    concurrency: int | None = None,
    collect: bool = False,
    wait: WaitPolicy | None = None,
) -> Call[MapResult]: ...
def gather(
    *parts: Awaitable[Any] | Callable[[], Any],
    return_exceptions: bool = False,
    concurrency: int | None = None,
    collect: bool = False,
    wait: WaitPolicy | None = None,
) -> Call[Any]:
    """Run calls and coroutines at once, with results in the order given; the first failure cancels the rest.

    With `return_exceptions`, every part is awaited, and errors take the place of results. `concurrency`, `collect` and
    `wait` are those of `ks.map`. In a plain def workflow, a part may also be a plain function without parameters, which
    runs in a thread and a branch of its own.
    """
    _check_concurrency(concurrency)
    if return_exceptions and (collect or wait is not None):
        raise DefinitionError("ks.gather takes return_exceptions=, or collect= and wait=, not both")
    limits = Limits(concurrency or max(1, len(parts)), wait or All(), collect)
    scope = CURRENT.get()
    if scope is None or scope.in_step:
        if concurrency is None and wait is None and not collect:
            return _plainly(_plain_gather(parts, return_exceptions))
        return _plainly(_plain_batch(parts, len(parts), limits, return_exceptions=return_exceptions))
    listed = [*parts] if _STEPS.issuperset({type(part) for part in parts}) else begun_later(scope.run, parts)
    path = ""
    if concurrency is not None:  # a part that begins later needs its number now
        path = scope.child().path
        listed = [_numbered(scope, path, *pair) for pair in enumerate(listed)]
    return Task(scope, _gathered(scope, path, listed, limits, return_exceptions))


def _place_of_given(path: str, parts: list[Any]) -> Callable[[str], int | None]:
    """Return a function that finds the part with a recorded key among calls and numbered coroutines."""
    keys: dict[str, int] = {}

    def place(key: str) -> int | None:
        if not keys:
            keys.update((part.key, index) for index, part in enumerate(parts) if isinstance(part, DurableCall))
        return keys.get(key, _numbered_place(path, key))

    return place


def _numbered_place(path: str, key: str) -> int | None:
    """Return the number of the part of a group, below this path, that has made a call; None if it is of no part."""
    name = _name_of_part(path, key)
    return int(name) if name.isdecimal() else None


def _name_of_part(path: str, key: str) -> str:
    return key[len(path) + 1 :].partition("/")[0] if key.startswith(f"{path}.") else ""


def _numbered(branch: Branch, group: str, index: int, part: Any) -> Any:
    """Return a coroutine as a part that runs in a branch of its own; other parts as they are."""
    if isinstance(part, DurableCall) or not asyncio.iscoroutine(part):
        return part
    return _Coroutine(branch.run, branch.item(group, index), part)


class _Coroutine:
    """A coroutine that runs in its own branch from the moment at which a group begins it."""

    __slots__ = ("branch", "coroutine", "run")

    def __init__(self, run: RunDriver, branch: Branch, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.run, self.branch, self.coroutine = run, branch, coroutine

    def __call__(self) -> asyncio.Task[Any]:
        return spawn_in(self.run, self.branch, self.coroutine)


async def _plain_gather(parts: tuple[Any, ...], return_exceptions: bool) -> list[Any]:
    begun = [part if isinstance(part, Awaitable) else asyncio.to_thread(part) for part in parts]
    return list(await asyncio.gather(*begun, return_exceptions=return_exceptions))


def _check_concurrency(concurrency: Any) -> None:
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise DefinitionError(f"concurrency must be a whole number from 1, got {concurrency!r}")


class Limits(NamedTuple):
    """The limits of a map: items at once, required successes, and whether failures are collected."""

    concurrency: int
    policy: Any
    collect: bool

    @classmethod
    def of(cls, run: RunDriver | None, function: Any, concurrency: int | None, wait: Any, *, collect: bool) -> Limits:
        """Return the limits that a user gave, with defaults for the others. `run` is None outside a run."""
        return cls(concurrency or _width(run, function), wait or All(), collect)


@overload
def map(  # noqa: A001 - the name users expect
    function: Callable[[U], Awaitable[T] | T],
    items: Iterable[U],
    *,
    concurrency: int | None = None,
    collect: Literal[False] = False,
    wait: All | None = None,
    name: str | None = None,
    key: Callable[[U], str] | None = None,
) -> Call[list[T]]: ...
@overload
def map(  # noqa: A001
    function: Callable[[U], Awaitable[T] | T],
    items: Iterable[U],
    *,
    concurrency: int | None = None,
    collect: bool = False,
    wait: WaitPolicy | None = None,
    name: str | None = None,
    key: Callable[[U], str] | None = None,
) -> Call[MapResult]: ...
def map(  # noqa: A001
    function: Callable[[U], Awaitable[T] | T],
    items: Iterable[U],
    *,
    concurrency: int | None = None,
    collect: bool = False,
    wait: WaitPolicy | None = None,
    name: str | None = None,
    key: Callable[[U], str] | None = None,
) -> Call[Any]:
    """Call a step (or a function of steps) for every item, with results in input order.

    An async workflow maps an async function; a plain def workflow may also map a plain function, which runs in threads
    of the run.

    The first failure cancels the rest and is raised. `wait` may be `Any`, a `Quorum` or `Tolerate` instead of `All`.
    With `collect`, nothing is raised. The result then has `items`, `failures`, `ended`, `coverage` and `degraded`; so
    it has with another `wait` than `All`. It works the same outside a run.

    `concurrency` is the number of items at once: by default 100, and a quarter of the threads for a plain def step. An
    iterator is drawn as items begin, so that it may be long; on replay it must yield the same items. Without a length,
    `wait` decides by the items drawn so far. A plain def workflow, or `key`, draws all items at the call.

    `name` identifies the map in its run, in place of its position in the code. `key` returns the key of an item, in
    place of its index, so that items may be added or reordered while a run is open.
    """
    _check_concurrency(concurrency)
    scope = CURRENT.get()
    if scope is None or scope.in_step:
        limits = Limits.of(None, function, concurrency, wait, collect=collect)
        return _plainly(_plain_map(function, items if isinstance(items, Iterator) else list(items), limits))
    run = scope.run
    in_threads = runs_in_thread(run, function)
    if concurrency is None and in_threads:
        concurrency = MAX_THREAD_STEPS
    limits = Limits.of(run, function, concurrency, wait, collect=collect)
    if key is not None or isinstance(items, Sized) or threading.get_ident() != run.thread_id:
        items = list(items)  # all keys, or those now in a list that may change, or in the thread of plain code
    branch = (
        scope.child() if name is None else scope.named(check_key(name, "map name"))
    )  # at the call, not at the await
    keys = None if key is None else _keys(items, key)
    return Task(scope, mapped(scope, branch.path, function, items, limits, keys=keys, name=name, in_threads=in_threads))


def _keys(items: Iterable[Any], key: Callable[[Any], str]) -> dict[str, int]:
    """Return the keys of the items of a map that `key=` returns, each with the index of its item."""
    keys: dict[str, int] = {}
    for index, item in enumerate(items):
        one = f"@{check_key(key(item), 'key= of ks.map returned a key that')}"
        if keys.setdefault(one, index) != index:
            raise DefinitionError(
                f"key= of ks.map returned {one[1:]!r} for two items; each item needs a key of its own"
            )
    return keys


def _width(run: RunDriver | None, function: Any) -> int:
    """Return how many items of a map may be under way: as many as their executor says, or a bound for tasks."""
    step = bare(function)
    if not isinstance(step, Step):
        return MAX_ASYNC_STEPS
    width = None if run is None else run.host.executors.width(step, run.workflow)
    return width or (MAX_ASYNC_STEPS if step.is_async else MAX_THREAD_STEPS)


async def mapped(
    branch: Branch,
    group_path: str,
    function: Any,
    items: Iterable[Any],
    limits: Limits,
    *,
    keys: Mapping[str, int] | None = None,
    name: str | None = None,
    by_name: bool = False,
    in_threads: bool = False,
) -> list[Any]:
    """Call a step or a function for every item, each in its own branch below the path. Readers see its `name`.

    With `by_name`, each item holds the arguments of a step by name. With `in_threads`, the function is plain code.
    """
    names = None if keys is None else iter(keys)

    def part(index: int, item: Any) -> Any:
        own = branch.item(group_path, index) if names is None else branch.scoped(f"{group_path}.{next(names)}")
        if isinstance(function, Step):
            return StepCall(own, function, (), item) if by_name else StepCall(own, function, (item,), {})
        if in_threads:
            return spawn_in(branch.run, own, in_branch_thread(branch.run, function, item))
        context = copy_context()
        context.run(CURRENT.set, own)
        return spawn_in(branch.run, own, context.run(_coroutine, function, item))

    def place(key: str) -> int | None:
        return _numbered_place(group_path, key) if keys is None else keys.get(_name_of_part(group_path, key))

    total = len(items) if isinstance(items, Sized) else math.inf
    parts = (partial(part, index, item) for index, item in enumerate(items))
    group = Group(
        branch.run, parts, limits.concurrency, limits.policy, collect=limits.collect, total=total, place=place
    )
    shown = total >= SHOWN_FROM
    if shown:
        label = str(name or getattr(bare(function), "name", None) or getattr(function, "__name__", "items"))
        branch.run.map_begun(group_path, partial(_progress, group, label, group_path))
    try:
        if total:
            await group.go()
    finally:
        if shown:
            branch.run.map_ended(group_path)
    return group.conclusion()


def _progress(group: Group, name: str, path: str) -> MapProgress:
    """Return how far a map has come, in any thread."""
    total = None if group.total == math.inf else int(group.total)
    return MapProgress(name, path, group.succeeded, len(group.errors), total)


class _Misuse(Exception):
    """The function of a map cannot be called by a map."""


def _coroutine(function: Any, item: Any) -> Coroutine[Any, Any, Any]:
    """Call an async function. An error of the call itself is a mistake: a plain function may work here."""
    name, why = getattr(function, "__qualname__", repr(function)), "is a plain function"
    try:
        made = function(item)
        if isinstance(made, Coroutine):  # such as a call
            return made
    except Exception as error:  # noqa: BLE001 - reported below
        why = f"cannot be called: {error}"
    raise _Misuse(f"ks.map takes a step or an async function; {name} {why}. Write it as `async def`, with `await`")


async def _plain_map(function: Any, items: list[Any] | Iterator[Any], limits: Limits) -> list[Any]:
    """Run a map outside a run: the same waiting and collecting, without storing anything."""
    total = len(items) if isinstance(items, list) else math.inf
    try:
        return await _plain_batch((partial(_plain_part, function, item) for item in items), total, limits)
    except _Misuse as error:
        raise DefinitionError(str(error)) from None


async def _plain_batch(
    parts: Iterable[Any], total: float, limits: Limits, *, return_exceptions: bool = False
) -> list[Any]:
    """Run awaitables, or functions that make them, outside a run."""
    outcomes, collect = Outcomes(total), limits.collect or return_exceptions
    waiting, begun, under_way = iter(parts), 0, dict[asyncio.Future[Any], int]()
    try:
        while outcomes.verdict(limits.policy, collect=collect) is Enough.WAIT:
            while begun < outcomes.total and len(under_way) < limits.concurrency:
                part = next(waiting, _NO_MORE)
                if part is _NO_MORE:
                    outcomes.total = begun
                else:
                    under_way[asyncio.ensure_future(part() if callable(part) else part)] = begun
                    begun += 1
            if not under_way:  # the iterator had no more items
                continue
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=under_way.__getitem__):
                error = asyncio.CancelledError() if task.cancelled() else task.exception()
                outcomes.add(under_way.pop(task), task.result() if error is None else None, error)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for part in () if isinstance(waiting, Generator) else waiting:
            if asyncio.iscoroutine(part):
                part.close()
    if return_exceptions:
        return [outcomes.errors.get(index, value) for index, value in enumerate(outcomes.results)]
    return outcomes.concluded(limits.policy, begun, collect=collect)


def _plain_part(function: Any, item: Any) -> Awaitable[Any]:
    if isinstance(bare(function), Step):
        return function(item)  # type: ignore[no-any-return]
    if inspect.iscoroutinefunction(bare(function)):
        return _coroutine(function, item)
    return _in_plain_thread(function, item)


async def _in_plain_thread(function: Any, item: Any) -> Any:
    """Call a function in a thread: it may wait for steps with `.result()`. A call that it returns is awaited."""
    made = await asyncio.to_thread(function, item)
    return await made if isinstance(made, Coroutine) else made


async def _raced(branch: Branch, key: str, parts: list[Any], names: tuple[str, ...]) -> Any:
    group = Group(branch.run, parts, len(parts), _First(), collect=False)
    await group.go(lambda: decide(branch, key, group.first()))
    winner = group.first()
    error = group.errors.get(winner)
    if error is not None:
        raise error
    return Winner(names[winner], group.value(winner)) if names else group.value(winner)


class Winner(NamedTuple):
    """A named call that has ended, first in a race or next in `ks.as_completed`: its name and its value."""

    name: str
    value: Any


#: Read by the codec, for the message of a refusal.
Winner.not_a_value = "is a result of ks.race or ks.as_completed; store its name and its value"  # type: ignore[attr-defined]


class _First:
    """A policy by which the first part to end decides, whether it succeeded or not."""

    def enough(self, total: int, succeeded: int, failed: int) -> Enough:
        return Enough.DONE if succeeded + failed else Enough.WAIT


@overload
def race(*parts: Awaitable[T]) -> Call[T]: ...
@overload
def race(**named: Awaitable[Any]) -> Call[Winner]: ...
def race(*parts: Awaitable[Any], **named: Awaitable[Any]) -> Call[Any]:
    """Return the outcome of the call that ends first; the others are cancelled, and the decision is recorded.

    Calls given by name say who won: `name, value = await ks.race(mail=..., phone=...)`.
    """
    if parts and named:
        raise DefinitionError("ks.race takes its calls by position, or all of them by name")
    if not parts and not named:
        raise DefinitionError("ks.race needs at least one call")
    branch = current_branch("race")
    listed = begun_later(branch.run, parts or named.values())
    return Task(branch, _raced(branch, branch.key("race"), listed, tuple(named)))


class Arrivals(Generic[T]):
    """Results of `ks.as_completed`, in the order in which they arrived."""

    def __init__(self, parts: Iterable[Awaitable[T]], names: tuple[str, ...] = ()) -> None:
        branch = current_branch("as_completed")
        self._results: AsyncGenerator[T, None] = _arriving(begun_later(branch.run, parts), names)

    def __aiter__(self) -> AsyncIterator[T]:
        return self._results

    def __iter__(self) -> Iterator[T]:
        """In a plain def workflow, wait for each result in its thread."""
        branch = current_branch("as_completed")
        try:
            while (result := Task(branch, _next(self._results)).result()) is not _NO_MORE:
                yield result
        finally:
            with suppress(Detached):  # raised again at the next call, or the code has ended
                Task(branch, self._results.aclose()).result()

    async def aclose(self) -> None:
        """Cancel the calls that have not ended."""
        await self._results.aclose()


async def _next(results: AsyncGenerator[T, None]) -> T:
    return await anext(results, _NO_MORE)


@overload
def as_completed(parts: Iterable[Awaitable[T]], /) -> Arrivals[T]: ...
@overload
def as_completed(**named: Awaitable[Any]) -> Arrivals[Winner]: ...
def as_completed(parts: Iterable[Awaitable[Any]] = (), /, **named: Awaitable[Any]) -> Arrivals[Any]:
    """Yield results in the order in which they arrived; that order is the same on every replay.

    Use `async for` in an async workflow, a plain `for` in a plain def workflow. Calls given by name come with it:
    `async for name, value in ks.as_completed(mail=..., phone=...)`. A call that fails raises its error in the loop.
    """
    if named and parts != ():
        raise DefinitionError("ks.as_completed takes its calls as a list, or all of them by name")
    return Arrivals(named.values() if named else parts, tuple(named))


async def _arriving(listed: list[Any], names: tuple[str, ...]) -> AsyncGenerator[Any, None]:
    branch = current_branch("as_completed")
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
            yield Winner(names[index], group.value(index)) if names else group.value(index)
    finally:
        group._withdraw()  # noqa: SLF001


class _Stream(Group):
    """A group that reports each part as it ends."""

    _more: CompositeWait | None = None

    def __init__(self, run: RunDriver, parts: list[Any]) -> None:
        super().__init__(run, parts, max(1, len(parts)), All(), collect=True)
        self._undelivered: list[int] = []  # parts that have ended and were not yet delivered to the code

    def begin(self) -> None:
        self._fill()

    async def next_ended(self, decided: int | None) -> int:
        """Return the next part to end, or the recorded one: a part may wait for something that is not recorded.

        It awaits a `CompositeWait`, so that the run can be parked meanwhile.
        """
        known = decided is not None and decided < self.total
        while not self._undelivered or (known and decided not in self._undelivered):
            self._more = CompositeWait(loop=self.run.loop)
            await self._more
        return self._undelivered.pop(self._undelivered.index(decided) if known and decided is not None else 0)

    def _call_ended(self, index: int, call: DurableCall[Any]) -> bool:
        super()._call_ended(index, call)
        return True

    def _part_ended(self, index: int, value: Any, error: BaseException | None) -> None:
        self._undelivered.append(index)
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

    `on_progress(done, total, value)` is called after each item; `intermediate` returns all values instead of the last.
    """
    coroutine = _chained(function, list(items), initial, on_progress, [] if intermediate else None)
    scope = CURRENT.get()
    return _plainly(coroutine) if scope is None or scope.in_step else Task(scope, coroutine)


def _plainly(coroutine: Coroutine[Any, Any, T]) -> Call[T]:
    return PlainCall(lambda: coroutine, (), {})
