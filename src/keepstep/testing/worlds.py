"""Virtual time for tests: a workflow with sleeps, timeouts and retries of months runs in milliseconds."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from ..engine.blocking import BlockingEngine, BlockingHandle
from ..engine.engine import Engine
from ..errors import DefinitionError, TimedOut
from ..kernel.idle import only_waits
from ..model import FINISHED, Event, RunQuery, Status
from ..ports import Store
from .events import Events
from .virtual import EPOCH, VirtualClock, VirtualLoop, at_work, attend

if TYPE_CHECKING:
    from types import TracebackType

    from ..engine.handle import RunHandle
    from ..model import Run
    from ..workflows.definition import Workflow

P = ParamSpec("P")
R = TypeVar("R")

#: How much time passes at once while nothing moves, between two looks at whether anything ever will.
_LOOK_SECONDS = 86_400.0
#: Code that has not moved for ten years, though its run is driven, will not.
_FOR_EVER_SECONDS = 3.2e8
#: What is under way when time has passed is given its turn in so many steps of this.
_TICK_SECONDS, _TICKS = 0.0001, 1000


class World(BlockingEngine):
    """A blocking engine in virtual time: time passes when the test says so, or when there is nothing else to do.

    `events` holds what happened, `now` is the time there. Made by `world()`.
    """

    def __init__(self, make: Callable[[], Engine], events: Events) -> None:
        self.events = events
        self._closed = False
        self._runner = asyncio.Runner(loop_factory=VirtualLoop)
        try:
            self._target = self._do(_opened(make))
        except BaseException:
            self._runner.close()
            raise

    def _do(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if self._closed:
            coroutine.close()
            raise DefinitionError("the world has ended; use it inside `with world()`")
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the one that raises would stand in every traceback
            coroutine.close()
            raise DefinitionError("a loop is running here: write `async with world()` in a test `@in_virtual_time`")
        return self._runner.run(coroutine)

    @property
    def now(self) -> datetime:
        """What the clock of this world shows."""
        return datetime.fromtimestamp(self._target.clock.now(), UTC)

    @property
    def store(self) -> Store:
        """Where the runs of this world are kept."""
        return self._target.store

    def _handle_on(self, handle: RunHandle[R]) -> WorldHandle[R]:
        return WorldHandle(self, handle)

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> None:
        """Let time pass, and everything that falls due in it happen; without a time, what can happen now."""
        span = timedelta(seconds=seconds, minutes=minutes, hours=hours, days=days).total_seconds()
        if span < 0:
            raise DefinitionError("time does not run backwards")
        self._do(_advance(self._target, span))

    def until(self, name: str, *, step: str = "", run: str = "", times: int = 1) -> Event:
        """Let time pass until an event of this name has come so often; gives the last of them."""
        coming = self.events.until(name, step=step, run=run, times=times)
        what = " ".join(filter(None, (name, step, run)))
        return self._do(_outwait(self._target, coming, f"the event {what} does not come"))

    def close(self, stop_seconds: float | None = None) -> None:
        """Hand unfinished runs back and end."""
        if not self._closed:
            self._do(self._target.close(stop_seconds))
            self._closed = True
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WorldHandle(BlockingHandle[R]):
    """A handle on one run of a world."""

    def result(self, timeout: float | timedelta | None = None) -> R:
        """The one result of the run; time passes until there is one. A run that cannot end by itself is an error."""
        engine, coming = self._engine._target, self._target.result(timeout)  # noqa: SLF001 - its own kind
        return self._do(_outwait(engine, coming, f"run {self.id!r} does not end", self._target))


class Opening:
    """What `world` gives: `with` makes a blocking world, `async with` an engine in virtual time."""

    def __init__(self, url: Any, at: datetime | None, options: dict[str, Any]) -> None:
        self._url, self._options = url, options
        self._epoch = EPOCH if at is None else at.timestamp()
        self._engine: Engine | None = None
        self._world: World | None = None

    def _make(self, events: Events | None = None) -> Engine:
        clock = VirtualClock(epoch=self._epoch)
        observers = [one for one in (events, self._options.get("observers")) if one is not None]
        return Engine(self._url, clock=clock, **{**self._options, "observers": observers})

    def __enter__(self) -> World:
        events = Events()
        self._world = World(lambda: self._make(events), events)
        return self._world

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._world is not None:
            self._world.close()

    async def __aenter__(self) -> Engine:
        if not isinstance(asyncio.get_running_loop(), VirtualLoop):
            raise DefinitionError("this loop runs in real time: put @in_virtual_time above the test")
        self._engine = await _opened(self._make)
        return self._engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is not None:
            await self._engine.close()


def world(url: Any = "memory:", *, at: datetime | None = None, **options: Any) -> Opening:
    """An engine in virtual time, for `with` in a plain test, or for `async with` in one `@in_virtual_time`.

    `at` is when its clock begins, by default 2026-01-01 in UTC. Options are those of `ks.open`.
    """
    if at is not None and at.tzinfo is None:
        raise DefinitionError("the time at which a world begins needs a time zone")
    return Opening(url, at, options)


def run(workflow: Workflow[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Run a workflow to its end in a world of its own, however long it sleeps, and give its result."""
    with world() as here:
        return here.start(workflow, *args, **kwargs).result()


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    """Make a plain test of an async one, whose loop jumps over every wait: `asyncio.sleep` lets time pass."""

    @functools.wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> R:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(test(*args, **kwargs))

    return run_test


# -- how time passes ---------------------------------------------------------------------------------------------------


async def _opened(make: Callable[[], Engine]) -> Engine:
    engine = make()
    await engine.open()
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):
        attend(loop, engine)
    return engine


async def _advance(engine: Engine, seconds: float) -> None:
    await asyncio.sleep(seconds)
    for _ in range(_TICKS):  # code that waits for a clock of its own is not waited for
        await asyncio.sleep(_TICK_SECONDS)  # which is over when nothing else can happen
        while at_work(engine):  # noqa: ASYNC110 - of threads, which tell nobody
            await asyncio.sleep(_TICK_SECONDS)
        if await _is_quiet(engine):
            return


async def _is_quiet(engine: Engine) -> bool:
    """Whether everything that could happen by now has happened."""
    if any(not _rests(context) for context in engine.live.values()):
        return False
    now = engine.clock.now()
    put_away = [one for one in await _unfinished(engine) if one.id not in engine.live]
    return not any(one.status.active or (one.due_at is not None and one.due_at.timestamp() <= now) for one in put_away)


async def _unfinished(engine: Engine) -> list[Run]:
    """The runs that this engine could drive."""
    wanted = frozenset(Status) - FINISHED - {Status.SET_ASIDE}
    page = await engine.call(engine.store.list_runs, RunQuery(status=wanted, limit=10_000))
    return [one for one in page.runs if one.workflow in engine.workflows]


def _rests(context: Any) -> bool:
    writing = context.in_flight > 0 or bool(context.arrived) or context.history is not None
    return not writing and (context.performing > 0 or only_waits(context))


async def _outwait(
    engine: Engine, coming: Coroutine[Any, Any, R], complaint: str, handle: RunHandle[Any] | None = None
) -> R:
    """Let time pass until it comes; an error when nothing is left that could bring it."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(coming)
    moves, moved_at = _moves(engine), loop.time()
    try:
        while True:
            await asyncio.wait([task], timeout=_LOOK_SECONDS)
            if task.done():
                return task.result()
            if not engine.live or moves != _moves(engine):
                moves, moved_at = _moves(engine), loop.time()
            if await _is_stuck(engine) or loop.time() - moved_at > _FOR_EVER_SECONDS:
                if handle is None:
                    raise TimedOut(f"{complaint}: nothing is left that could happen")
                run = await handle.run()
                if run.status in FINISHED or run.status is Status.SET_ASIDE:
                    return await task  # it has ended, and is about to be told so
                raise TimedOut(f"{complaint}: {_why(run)}", handle.id)
    finally:
        task.cancel()


def _moves(engine: Engine) -> dict[str, tuple[int, int]]:
    return {context.id: (context.seq, context.moves) for context in engine.live.values()}


async def _is_stuck(engine: Engine) -> bool:
    """Whether no run is driven, and none will ever be due."""
    if engine.live:
        return False
    runs = await _unfinished(engine)
    return not any(one.due_at is not None or one.status.active for one in runs)


def _why(run: Run) -> str:
    waits = [name for name in run.wakes if not name.startswith("ks:")]
    if run.status is Status.PAUSED:
        return "it is paused"
    if waits:
        return f"it waits for the signal {' or '.join(waits)}, which nobody sends"
    return f"it is {run.status.value}, and nothing is left that could happen"
