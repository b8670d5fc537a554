"""The entry points: `ks.open` for async and for blocking code, and `ks.run` for scripts."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload

from ..errors import DefinitionError
from ..workflows.definition import Workflow
from .blocking_calls import Blocking, BlockingPart, blocking, iterating
from .engine import Engine
from .handle import RunHandle

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from types import TracebackType

    from ..policies.queue import Queue
    from ..records.counts import Counts
    from ..workflows.definition import Bound
    from .blocking_agents import BlockingAgents
    from .blocking_artifacts import BlockingArtifacts
    from .blocking_care import BlockingCare, BlockingSchedules
    from .blocking_queues import BlockingChannels, BlockingQueues
    from .blocking_services import BlockingServices
    from .blocking_topics import BlockingTopics
    from .documents import BlockingDocuments

P = ParamSpec("P")
R = TypeVar("R")


class Opening:
    """The result of `ks.open`: `async with` makes an engine, plain `with` or `blocking()` a blocking one."""

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
        self._blocking = self.blocking()
        return self._blocking

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._blocking is not None:
            self._blocking.close()

    def blocking(self) -> BlockingEngine:
        """Open a blocking engine without a `with` block; it stays open until `engine.close()` or the process ends."""
        return BlockingEngine(self._make)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"ks.open(...) is not open yet, so it has no {name!r}: write `async with ks.open(...) as engine:`, or "
            "`with` in blocking code; without a block, use `engine = ks.open(...).blocking()`",
            name=name,
            obj=self,
        )


def open(url: Any = None, *, worker: bool = True, **options: Any) -> Opening:  # noqa: A001
    """Open a store and start a worker that recovers interrupted runs; `worker=False` opens it without a worker.

    `async with` gives a `ks.Engine`, plain `with` a blocking one; `ks.open(...).blocking()` gives it without a block. A
    plain path as `url` means SQLite; other forms are `sqlite:///path`, `files:path`, `postgresql://...` and `memory:`.
    Without `url`, the environment variable KEEPSTEP_STORE names the store, or else it is `.keepstep/runs.db`.

    | option | means |
    |---|---|
    | `workflows`, `queues` | the workflows and the queues that the worker drives; all by default |
    | `agents` | the agents that the worker hosts: an agent, a team, or a list of these |
    | `max_runs` | runs driven at once; 1000 by default |
    | `max_value_bytes` | size of an input, a result or a published value at most |
    | `recovery_limit` | crashes without progress after which a run is set aside; 3 by default |
    | `classify` | rules for the classes of errors, tried after those of steps and workflows |
    | `stop_seconds` | seconds for which running steps may finish when the engine closes |
    | `linger_seconds` | seconds for which a run that waits for a signal or a child stays in memory |
    | `stall_seconds` | seconds for which a replay may stand still before its run is set aside |
    | `observers` | `"log"`, a function of an event, an object with `observe(event)`, or a list of these |
    | `actor` | the name under which the audit records the commands of this engine |
    | `keys` | a `ks.Keys(...)`, with which stored values are encrypted |
    | `redact` | a `ks.Redactor(...)` that finds secrets |
    | `on_suspect` | for values that only look like a secret: `"store"` them with a warning (default), or `"refuse"` |
    | `retain` | a `ks.Retain(...)`: which finished runs the worker keeps; all by default |
    | `replica` | the URL of a streaming replica of a PostgreSQL store, which answers lists and pages |
    | `strict` | refuse to open a damaged store |
    | `artifacts` | the folder of artifacts; by default beside a local store, or that of KEEPSTEP_ARTIFACTS |
    | `executor` | where plain functions run that name no executor: a name, or an executor object; threads by default |
    | `executors` | the executors that steps may name, beside those of Keepstep: a dictionary by name |
    | `clock`, `replay_always`, `parts` | for tests: the source of time, a replay after each record, replaced parts |

    Other options go to the store.
    """
    return Opening(lambda: Engine(url, worker=worker, **options))


def run(
    workflow: Workflow[..., R] | Bound[R],
    *args: Any,
    url: Any = None,
    run_id: str | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> R:
    """Run a workflow to its end and return its result; for scripts, and for notebooks with a running loop.

    `url` names the store, as for `ks.open`. With a `run_id`, a restarted program continues its run. After `timeout`
    seconds it raises `ks.TimedOut`; the run is handed back unfinished. All other arguments are those of the `workflow`.
    Its own parameter `timeout`, if it has one, is bound first: `ks.run(workflow.bind(timeout=5))`.
    """
    if timeout is not None and isinstance(workflow, Workflow) and "timeout" in workflow.signature.parameters:
        raise DefinitionError(
            f"timeout= is ambiguous: it is an option of ks.run and a parameter of workflow {workflow.name!r}; bind the "
            "arguments of the workflow: ks.run(workflow.bind(timeout=...), timeout=...)"
        )
    with open(url) as engine:
        return engine.start(workflow, *args, run_id=run_id, **kwargs).result(timeout)


class BlockingHandle(BlockingPart[RunHandle[R]], Generic[R]):
    """A handle on one run for blocking code: the methods of `ks.RunHandle`, without `await`."""

    _engine: BlockingEngine

    def __init__(self, engine: BlockingEngine, handle: RunHandle[R]) -> None:
        super().__init__(engine, handle)
        self.id = handle.id

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    def latest(self) -> BlockingHandle[R]:
        """Return the newest run of the series that this one began with `ks.continue_as`, or itself."""
        return self._engine._handle_on(self._do(self._target.latest()))  # noqa: SLF001 - its own kind

    def by(self, actor: str) -> BlockingHandle[R]:
        """Return a handle on the same run that acts in someone's name: the audit records them as the sender."""
        return self._engine._handle_on(self._target.by(actor))  # noqa: SLF001 - its own kind

    # -- inspecting ----------------------------------------------------------------------------------------------------

    audit = blocking(RunHandle.audit)
    checkpoints = blocking(RunHandle.checkpoints)
    diff = blocking(RunHandle.diff)
    info = blocking(RunHandle.info)
    input = blocking(RunHandle.input)
    progress = blocking(RunHandle.progress)
    published = blocking(RunHandle.published)
    published_raw = blocking(RunHandle.published_raw)
    replay = blocking(RunHandle.replay)
    run = blocking(RunHandle.run)
    spent = blocking(RunHandle.spent)
    state = blocking(RunHandle.state)
    status = blocking(RunHandle.status)

    # -- waiting ------------------------------------------------------------------------------------------------------

    reached = blocking(RunHandle.reached)
    result = blocking(RunHandle.result)
    watch = iterating(RunHandle.watch)
    watch_records = iterating(RunHandle.watch_records)

    # -- controlling ---------------------------------------------------------------------------------------------------

    ask = blocking(RunHandle.ask)
    ask_raw = blocking(RunHandle.ask_raw)
    beat = blocking(RunHandle.beat)
    cancel = blocking(RunHandle.cancel)
    consolidate = blocking(RunHandle.consolidate)
    edit = blocking(RunHandle.edit)
    fail = blocking(RunHandle.fail)
    pause = blocking(RunHandle.pause)
    resolve = blocking(RunHandle.resolve)
    resume = blocking(RunHandle.resume)
    retry = blocking(RunHandle.retry)
    recover = blocking(RunHandle.recover)
    rewind = blocking(RunHandle.rewind)
    signal = blocking(RunHandle.signal)
    skip = blocking(RunHandle.skip)


def _giving_handle(
    method: Callable[Concatenate[Engine, P], Coroutine[Any, Any, RunHandle[R]]],
) -> Callable[Concatenate[BlockingEngine, P], BlockingHandle[R]]:
    """Make a blocking method, like `blocking`, of an engine's method that returns a handle."""

    @wraps(method)
    def call(self: BlockingEngine, /, *args: P.args, **kwargs: P.kwargs) -> BlockingHandle[R]:
        return self._handle_on(self._do(method(self._target, *args, **kwargs)))

    shown = signature(method).replace(return_annotation=BlockingHandle)
    vars(call)["__signature__"] = shown  # for `help`, which would show the signature of `method`
    return call


class BlockingEngine(Blocking[Engine]):
    """An engine for blocking code: the methods of `ks.Engine`, without `await`. Its loop runs in its own thread."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="keepstep-loop", daemon=True)
        self._waiting: set[Future[Any]] = set()
        self._interrupted = False
        self._undelivered: BaseException | None = None
        self._closing = False
        self._closed = False
        self._thread.start()
        self._pid = os.getpid()
        try:
            self._target = self._do(_opened(make))
        except BaseException:
            self._stop()
            raise

    def _serve(self) -> None:
        """Run the loop until it is stopped; raise a KeyboardInterrupt of a step or workflow in all waiting callers."""
        while True:
            try:
                self._loop.run_forever()
            except (KeyboardInterrupt, SystemExit) as error:
                waiting = [future for future in list(self._waiting) if not future.done()]
                self._undelivered = None if waiting else error  # without a waiting caller, the next one gets the error
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
                "the blocking engine must not be called from a workflow or a step; use ks.start or ks.signal there"
            )
        done: Future[R] = Future()
        if not self._closing:
            self._waiting.add(done)  # added before the check, so that no interrupt is missed
        if self._interrupted and not self._closing:
            self._waiting.discard(done)
            coroutine.close()
            undelivered, self._undelivered = self._undelivered, None
            if undelivered is not None:
                raise undelivered
            raise DefinitionError(
                "the engine has stopped, because a step or workflow raised KeyboardInterrupt; leave the "
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

    def _handle_on(self, handle: RunHandle[R]) -> BlockingHandle[R]:
        return BlockingHandle(self, handle)

    if TYPE_CHECKING:

        @overload
        def start(
            self,
            workflow: Bound[R],
            /,
            *,
            run_id: str | None = None,
            queue: Queue | str = "default",
            priority: int = 0,
            delay: float | timedelta = 0.0,
            key: str | None = None,
            deadline: float | timedelta | datetime | None = None,
            tags: dict[str, str] | None = None,
            dedupe: str | None = None,
        ) -> BlockingHandle[R]: ...
        @overload
        def start(
            self, workflow: Workflow[..., R], /, *args: Any, run_id: str | None = None, **kwargs: Any
        ) -> BlockingHandle[R]: ...
        def start(self, workflow: Any, /, *args: Any, **kwargs: Any) -> BlockingHandle[Any]: ...
    else:
        start = _giving_handle(Engine.start)

    get = _giving_handle(Engine.get)
    fork = _giving_handle(Engine.fork)
    list = blocking(Engine.list)
    complete = blocking(Engine.complete)
    fail = blocking(Engine.fail)
    beat = blocking(Engine.beat)
    signal = blocking(Engine.signal)
    broadcast = blocking(Engine.broadcast)
    publish = blocking(Engine.publish)
    retry = blocking(Engine.retry)
    skip = blocking(Engine.skip)
    rewind = blocking(Engine.rewind)
    rekey = blocking(Engine.rekey)
    workers = blocking(Engine.workers)
    drain = blocking(Engine.drain)
    host = blocking(Engine.host)
    schedule = blocking(Engine.schedule)

    @property
    def schedules(self) -> BlockingSchedules:
        """The schedules of the store: list, get, add, pause, resume, trigger, backfill, remove."""
        from .blocking_care import BlockingSchedules  # noqa: PLC0415 - rarely needed

        return BlockingSchedules(self, self._target.schedules)

    @property
    def agents(self) -> BlockingAgents:
        """The agents of the store: list and get them, drain and resume one, probe one."""
        from .blocking_agents import BlockingAgents  # noqa: PLC0415 - only with agents

        return BlockingAgents(self, self._target.agents)

    @property
    def queues(self) -> BlockingQueues:
        """The queues with limits: list and get them, set and reset their limits."""
        from .blocking_queues import BlockingQueues  # noqa: PLC0415 - rarely needed

        return BlockingQueues(self, self._target.queues)

    @property
    def counts(self) -> Counts:
        """Counters of this process since it was opened: its writes, and those that the store could not save."""
        return self._target.counts

    @property
    def channels(self) -> BlockingChannels:
        """The channels that tell people about runs: list them, and test one."""
        from .blocking_queues import BlockingChannels  # noqa: PLC0415 - rarely needed

        return BlockingChannels(self, self._target.channels)

    @property
    def artifacts(self) -> BlockingArtifacts:
        """The artifacts of the store: large results as files beside it."""
        from .blocking_artifacts import BlockingArtifacts  # noqa: PLC0415 - rarely needed

        return BlockingArtifacts(self, self._target.artifacts)

    @property
    def documents(self) -> BlockingDocuments:
        """The documents of the store: versioned bytes under keys of collections, beside the runs."""
        return self._target.documents.blocking

    @property
    def topics(self) -> BlockingTopics:
        """The topics of the store: publish, list, get, and the newest messages."""
        from .blocking_topics import BlockingTopics  # noqa: PLC0415 - rarely needed

        return BlockingTopics(self, self._target.topics)

    @property
    def services(self) -> BlockingServices:
        """The services: list and get them, set and reset their limits, open and close their breakers."""
        from .blocking_services import BlockingServices  # noqa: PLC0415 - rarely needed

        return BlockingServices(self, self._target.services)

    @property
    def care(self) -> BlockingCare:
        """Maintenance of the store: verify, repair, purge, erase, export, load, copy."""
        from .blocking_care import BlockingCare  # noqa: PLC0415 - rarely needed

        return BlockingCare(self, self._target.care)

    def close(self, stop_seconds: float | None = None) -> None:
        """Claim no more runs, let current steps finish for a while, hand the rest back, and stop."""
        if not self._closed and os.getpid() == self._pid:
            self._closing = True  # an interrupt does not prevent closing
            self._do(self._target.close(stop_seconds))
            self._stop()

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _pass_on(done: Future[R], future: Future[R]) -> None:
    """Pass the outcome of a coroutine to the waiting caller, unless an interrupt came first."""
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
