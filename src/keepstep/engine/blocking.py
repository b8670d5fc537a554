"""The doors: `ks.open` for async and for blocking code, and `ks.run`, the one-liner for scripts."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import DefinitionError
from .engine import DEFAULT_URL, Engine

if TYPE_CHECKING:
    from types import TracebackType

    from ..model import Checkpoint, Event, Run, RunPage, RunQuery, State, Status
    from ..workflows.definition import Workflow
    from .audit import AuditEntry
    from .care import Care
    from .compare import Difference
    from .dry import Replayed
    from .handle import RunHandle
    from .info import RunInfo
    from .rewind import Rewound

R = TypeVar("R")


class Opening:
    """What `ks.open` gives: `async with` makes an engine, plain `with` a blocking one."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._blocking: BlockingEngine | None = None

    async def __aenter__(self) -> Engine:
        self._engine = self._make()
        await self._engine.open()
        return self._engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is not None:
            await self._engine.close()

    def __enter__(self) -> BlockingEngine:
        self._blocking = BlockingEngine(self._make)
        return self._blocking

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._blocking is not None:
            self._blocking.close()


def open(url: Any = DEFAULT_URL, *, worker: bool = True, **options: Any) -> Opening:  # noqa: A001
    """Open a store, and start a worker in this process that recovers what was interrupted (`worker=False` only talks).

    A path alone means SQLite; also `sqlite:///path` and `memory:`.
    """
    return Opening(lambda: Engine(url, worker=worker, **options))


def run(workflow: Workflow[..., R], *args: Any, url: Any = DEFAULT_URL, run_id: str | None = None, **kwargs: Any) -> R:
    """Run a workflow to its end and give its result: for scripts, and inside a notebook's running loop."""
    with open(url) as engine:
        return engine.start(workflow, *args, run_id=run_id, **kwargs).result()  # type: ignore[no-any-return]


class BlockingEngine:
    """An engine for code that blocks: its loop runs in a thread of its own."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="keepstep-loop", daemon=True)
        self._waiting: set[Future[Any]] = set()
        self._interrupted = False
        self._untold: BaseException | None = None
        self._closing = False
        self._closed = False
        self._thread.start()
        self._pid = os.getpid()
        try:
            self._engine = self._do(_opened(make))
        except BaseException:
            self._stop()
            raise

    def _serve(self) -> None:
        """Run the loop until it is stopped; a KeyboardInterrupt in a step or workflow goes to all who wait."""
        while True:
            try:
                self._loop.run_forever()
            except (KeyboardInterrupt, SystemExit) as error:
                waiting = [future for future in list(self._waiting) if not future.done()]
                self._untold = None if waiting else error  # then the next caller is told
                self._interrupted = True
                for future in waiting:
                    future.set_exception(error)
            else:
                return

    def _do(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if os.getpid() != self._pid:
            coroutine.close()
            raise DefinitionError("the engine was opened before this process was forked; open one here")
        if self._closed:
            coroutine.close()
            raise DefinitionError("the engine is closed; use it inside `with ks.open(...)`")
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise DefinitionError(
                "the blocking engine is called from a workflow or a step; use ks.start or ks.signal there"
            )
        done: Future[R] = Future()
        if not self._closing:
            self._waiting.add(done)  # before the look: an interrupt is either seen here or told to this one
        if self._interrupted and not self._closing:
            self._waiting.discard(done)
            coroutine.close()
            untold, self._untold = self._untold, None
            if untold is not None:
                raise untold
            raise DefinitionError(
                "the engine does no more work, because a step or workflow raised KeyboardInterrupt; leave the "
                "`with` block and open it again"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(partial(_pass_on, done))
        try:
            return done.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waiting.discard(done)

    def start(self, workflow: Any, /, *args: Any, **kwargs: Any) -> BlockingHandle[Any]:
        """Start a run, durable before its first step."""
        return BlockingHandle(self, self._do(self._engine.start(workflow, *args, **kwargs)))

    def get(self, run_id: str) -> BlockingHandle[Any]:
        """The run with this id."""
        return BlockingHandle(self, self._do(self._engine.get(run_id)))

    def list(self, query: RunQuery | None = None, **filters: Any) -> RunPage:
        """One page of runs, newest first."""
        return self._do(self._engine.list(query, **filters))

    def signal(self, run_id: str, name: str, payload: Any = True, **options: Any) -> None:
        """Send a run a durable message."""
        self._do(self._engine.signal(run_id, name, payload, **options))

    def fork(self, origin: str, at: int | None = None, **options: Any) -> BlockingHandle[Any]:
        """Start a new run with a copy of another's records."""
        return BlockingHandle(self, self._do(self._engine.fork(origin, at, **options)))

    @property
    def care(self) -> BlockingCare:
        """What looks after the store: verify, repair, purge, erase, export, load, copy."""
        return BlockingCare(self, self._engine.care)

    def close(self) -> None:
        """Hand unfinished runs back and stop."""
        if not self._closed and os.getpid() == self._pid:
            self._closing = True  # which an interrupt does not keep from being done
            self._do(self._engine.close())
            self._stop()

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingCare:
    """The care of a store, for code that blocks: each method of `engine.care`, to its end."""

    def __init__(self, engine: BlockingEngine, care: Care) -> None:
        self._engine = engine
        self._care = care

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._care, name)
        return lambda *args, **kwargs: self._engine._do(method(*args, **kwargs))  # noqa: SLF001 - its own kind


def _pass_on(done: Future[R], future: Future[R]) -> None:
    """Give the outcome of a coroutine to the one who waits, unless an interrupt has come first."""
    if done.done():
        return
    error = CancelledError() if future.cancelled() else future.exception()
    if error is None:
        done.set_result(future.result())
    else:
        done.set_exception(error)


async def _opened(make: Callable[[], Engine]) -> Engine:
    engine = make()
    await engine.open()
    return engine


class BlockingHandle(Generic[R]):
    """A handle on one run, for code that blocks."""

    def __init__(self, engine: BlockingEngine, handle: RunHandle[R]) -> None:
        self.id = handle.id
        self._engine = engine
        self._handle = handle

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    def result(self, timeout: float | None = None) -> R:
        """The one result of the run, now or when it ends."""
        return self._engine._do(self._handle.result(timeout))  # noqa: SLF001

    def run(self) -> Run:
        """The run as the store has it now."""
        return self._engine._do(self._handle.run())  # noqa: SLF001

    def status(self) -> Status:
        """Where the run stands."""
        return self._engine._do(self._handle.status())  # noqa: SLF001

    def checkpoints(self, *, failed: bool | None = None, counted: bool = False) -> list[Checkpoint]:
        """The run's history, verified."""
        return self._engine._do(self._handle.checkpoints(failed=failed, counted=counted))  # noqa: SLF001

    def replay(self, workflow: Any = None) -> Replayed:
        """What the run would do next with the code that is loaded here, dry."""
        return self._engine._do(self._handle.replay(workflow))  # noqa: SLF001

    def info(self) -> RunInfo:
        """Whether the run can go on, from where, and if not, why not."""
        return self._engine._do(self._handle.info())  # noqa: SLF001

    def diff(self, a: int | None = None, b: int | None = None, *, other: str | None = None) -> Difference:
        """What changed between two records of the run, or of two runs."""
        return self._engine._do(self._handle.diff(a, b, other=other))  # noqa: SLF001

    def audit(self) -> list[AuditEntry]:
        """Who did what to the run, when and why."""
        return self._engine._do(self._handle.audit())  # noqa: SLF001

    def published(self) -> dict[str, Any]:
        """What the run has shown to readers."""
        return self._engine._do(self._handle.published())  # noqa: SLF001

    def by(self, actor: str) -> BlockingHandle[R]:
        """The same run, steered in the name of someone."""
        return BlockingHandle(self._engine, self._handle.by(actor))

    def signal(self, name: str, payload: Any = True, *, id: str = "") -> None:  # noqa: A002
        """Send the run a durable message."""
        self._engine._do(self._handle.signal(name, payload, id=id))  # noqa: SLF001

    def ask(self, name: str, payload: Any = None, *, timeout: float | None = 30.0) -> Any:
        """Send a signal and wait for the workflow's reply."""
        return self._engine._do(self._handle.ask(name, payload, timeout=timeout))  # noqa: SLF001

    def cancel(self, reason: str = "") -> None:
        """Ask the run to stop."""
        self._engine._do(self._handle.cancel(reason))  # noqa: SLF001

    def pause(self, reason: str = "") -> None:
        """Stop the run at its next step boundary."""
        self._engine._do(self._handle.pause(reason))  # noqa: SLF001

    def resume(self, reason: str = "") -> None:
        """Let a paused run go on, or one that waits at a breakpoint."""
        self._engine._do(self._handle.resume(reason))  # noqa: SLF001

    def reached(self, *statuses: Status | str, timeout: float | None = None) -> Status:
        """Wait until the run has one of these statuses, or has ended."""
        return self._engine._do(self._handle.reached(*statuses, timeout=timeout))  # noqa: SLF001

    def state(self, at: int | None = None, **level: Any) -> State:
        """The state of a graph's run, now or after the record `at`."""
        return self._engine._do(self._handle.state(at, **level))  # noqa: SLF001

    def edit(self, values: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Change the state of a graph's run that no worker drives."""
        self._engine._do(self._handle.edit(values, **options))  # noqa: SLF001

    def consolidate(self, reason: str = "") -> None:
        """Write the whole state of a waiting graph's run down."""
        self._engine._do(self._handle.consolidate(reason))  # noqa: SLF001

    def retry(self, reason: str = "", *, force: bool = False) -> None:
        """Let a failed or set-aside run go on from where it failed."""
        self._engine._do(self._handle.retry(reason, force=force))  # noqa: SLF001

    def rewind(self, to: int | None = None, **options: Any) -> Rewound:
        """Let the run go on from an earlier checkpoint."""
        return self._engine._do(self._handle.rewind(to, **options))  # noqa: SLF001

    def watch(self, after: int = 0) -> Iterator[Event]:
        """What happens in the run, as it happens."""
        events = self._handle.watch(after)
        while True:
            event = self._engine._do(_next(events))  # noqa: SLF001
            if event is None:
                return
            yield event


async def _next(events: Any) -> Event | None:
    return await anext(events, None)
