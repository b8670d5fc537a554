"""The engine: the door of a process to a store, with or without a worker of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from ..errors import DefinitionError, EncryptionError, RunError, RunNotFound, SchemaMismatch
from ..executors.thread import ThreadExecutor
from ..model import Claim, Event, Lease, Run, RunPage, RunQuery, Status
from ..observers import resolve
from ..observers.log import RedactedLog
from ..policies import RecoveryLimit, Retain
from ..ports import Clock, Create, Store, SystemClock, Verdict
from ..stores.keys import Keys
from ..stores.open import is_store, open_store
from ..stores.records import MAX_VALUE, pack
from ..stores.sealed import Rekeyed
from ..values import Redactor
from ..workflows import definition
from ..workflows.definition import KNOWN, Bound, Workflow
from . import control
from . import retry as retrying
from .asides import ASIDE_THREADS
from .attempt import perform
from .censor import Censor
from .context import RunContext
from .encryption import Encryption
from .forgetting import Forgetting
from .handle import RunHandle, this_process
from .hearing import Hearing
from .journal import Journal
from .namesakes import is_namesake
from .outage import Outage, cut_off_after
from .pace import Pace
from .parking import LINGER_SECONDS, hand_back
from .reader import Reader
from .rest import RestWatch
from .runner import Runner
from .stall import STALL_SECONDS
from .starting import Options, check_same, definition_of, new_run
from .tasks import install, uninstall
from .telling import Teller
from .upkeep import keep_swept, refuse_damaged
from .worker import Worker

if TYPE_CHECKING:
    from types import TracebackType

    from .care import Care
    from .rewind import Rewound

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("keepstep")

#: Where runs are kept when nobody says where.
DEFAULT_URL = ".keepstep/runs.db"
#: Runs that a worker drives at once; more wait in the store.
MAX_RUNS = 1000
#: Threads for plain def workflows, and apart from them for plain def steps: one pool for both could deadlock.
RUN_THREADS = 64
STEP_THREADS = 64
#: How long steps that are under way when the engine closes may take to finish before they are handed back.
STOP_SECONDS = 5.0
#: How often an engine without a worker looks whether others wrote.
READ_SECONDS = 0.02
#: How long the store may take over the last writes of an engine that closes.
LAST_WRITE_SECONDS = 5.0
#: How long it is waited for after that, and how long for what a worker that leaves has to say.
DRAIN_SECONDS = 10.0
LEAVE_SECONDS = 10.0


class Engine:
    """Starts runs and talks to them; with a worker it also drives and recovers them. Made by `ks.open`."""

    def __init__(
        self,
        url: Any = DEFAULT_URL,
        *,
        worker: bool = True,
        workflows: Iterable[Workflow[..., Any]] | None = None,
        observers: Any = None,
        clock: Clock | None = None,
        max_runs: int = MAX_RUNS,
        max_value_bytes: int = MAX_VALUE,
        recovery_limit: int = 3,
        stop_seconds: float = STOP_SECONDS,
        linger_seconds: float = LINGER_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        replay_always: bool = False,
        redact: Redactor | None = None,
        actor: str | None = None,
        keys: Keys | None = None,
        retain: Retain | None = None,
        strict: bool = False,
        **store_options: Any,
    ) -> None:
        self._url = url
        self._store_options = store_options
        self._with_worker = worker
        self._given = None if workflows is None else {workflow.name: workflow for workflow in workflows}
        self._clock = clock
        self.clock: Clock = clock or SystemClock()
        self.max_runs = max_runs
        self.recovery_limit = RecoveryLimit(recovery_limit)
        self.stop_seconds = stop_seconds
        self.linger_seconds = linger_seconds
        #: How long a replay may stand still before it is set aside.
        self.stall_seconds = stall_seconds
        self.forgetting = Forgetting(self) if replay_always else None
        self.encryption = Encryption(keys)
        self.censor = Censor(redact or Redactor(), max_value_bytes, self.encryption)
        self.teller = Teller(self, resolve(observers))
        self._filter = RedactedLog(self.censor.redact)
        self._actor = actor
        self.actor = actor or ""
        self._retain = retain
        self._strict = strict
        self.perform = perform if self.forgetting is None else self.forgetting.perform
        self.live: dict[str, RunContext] = {}
        self.closed = True
        self._pid = os.getpid()
        self.worker: Worker | None = None
        self.context = Context()
        self._background: set[asyncio.Task[Any]] = set()
        self._pulse: asyncio.Future[None] | None = None
        self.outage = Outage(lambda: self.clock.boot()[1])
        self.hearing = Hearing(self)

    # -- opening and closing ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Open the store, and start the worker if there is one: it recovers what was interrupted."""
        if not self.closed:
            raise DefinitionError("the engine is open already")
        self._pid = os.getpid()
        self.actor = self._actor or this_process()
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self._owns_store = not is_store(self._url)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="keepstep-reader")
        self._value_pool = ThreadPoolExecutor(2, thread_name_prefix="keepstep-values")
        self.store: Store = await self.loop.run_in_executor(self._pool, self._open_store)
        self.clock = self._clock or self.store.clock
        self._pace = Pace(self.clock, READ_SECONDS)
        self.closed = False
        log.addFilter(self._filter)
        callbacks = install(self.loop)
        definition.on_plain_call = _warn_of_lost_context
        self.rest = RestWatch(self.loop, callbacks)
        self.runner = Runner(self)
        self.run_threads = ThreadExecutor(RUN_THREADS, "keepstep-run")
        step_threads = ThreadExecutor if self.forgetting is None else self.forgetting.threads
        self.step_threads = step_threads(STEP_THREADS, "keepstep-step")
        self.aside_threads = ThreadExecutor(ASIDE_THREADS, "keepstep-aside")
        worker = Worker(self, self.max_runs)
        self.journal = Journal(self.store, worker.id, self.rest, self.clock, self.outage)
        try:
            if self._with_worker:
                self.worker = worker
                await worker.start()
                if self._retain is not None:
                    self.background(keep_swept(self, self._retain))
            else:
                Reader(self, self._pace).poll()
        except BaseException:
            await self._shut()
            raise

    def _open_store(self) -> Store:
        if self._url == DEFAULT_URL:  # our own choice, so the folder is ours to make
            Path(DEFAULT_URL).parent.mkdir(exist_ok=True)
        store = open_store(self._url, clock=self._clock, **self._store_options)
        try:
            if self._strict:
                refuse_damaged(store)
            return self.encryption.open(store, look=self._owns_store, worker=self._with_worker)
        except BaseException:
            if self._owns_store:
                store.close()
            raise

    async def close(self, stop_seconds: float | None = None) -> None:
        """Take no more work, let steps that are under way finish for a while, hand the rest back."""
        if self.closed:
            return
        grace = self.stop_seconds if stop_seconds is None else stop_seconds
        if self.worker is not None:
            self.worker.stop_claiming()
            await self._hand_everything_back(grace)
        try:
            await asyncio.wait_for(self.journal.drained(), DRAIN_SECONDS)
        except TimeoutError:
            log.warning("the store did not take the last writes; they are found again by recovery")
        with cut_off_after(LEAVE_SECONDS, self.store) if self._owns_store else contextlib.nullcontext():
            if self.worker is not None:
                await self.worker.leave()
            await self._shut()

    async def _hand_everything_back(self, grace: float) -> None:
        contexts = list(self.live.values())
        for context in contexts:
            context.draining = context.holding = True
            context.watch()
        await _all_left(contexts, grace)
        for context in contexts:
            if not context.detached:
                hand_back(context)
        await _all_left(contexts, LAST_WRITE_SECONDS)
        for context in contexts:
            if not context.detached:
                context.detach("the engine closed")
                if self.worker is not None:
                    self.worker.give_back_later(context)

    async def _shut(self) -> None:
        self.closed = True
        log.removeFilter(self._filter)
        uninstall(self.loop)
        self.pulse()
        for task in list(self._background):
            task.cancel()
        if self._background:
            await asyncio.wait(list(self._background), timeout=5.0)
        self.journal.close()
        if self._owns_store:
            await self.loop.run_in_executor(self._pool, self.store.close)
        self._value_pool.shutdown(wait=True)
        self._pool.shutdown(wait=True)

    # -- starting and finding runs ------------------------------------------------------------------------------------

    @property
    def workflows(self) -> dict[str, Workflow[..., Any]]:
        """The workflows that this engine knows: those it was given, or all that are decorated in the process."""
        return KNOWN if self._given is None else self._given

    def known(self, name: str) -> Workflow[..., Any]:
        return self.workflows[name]

    @overload
    async def start(
        self,
        workflow: Bound[R],
        /,
        *,
        run_id: str | None = None,
        queue: str = "default",
        priority: int = 0,
        delay: float = 0.0,
        key: str | None = None,
        deadline: float | timedelta | datetime | None = None,
        tags: dict[str, str] | None = None,
    ) -> RunHandle[R]: ...
    @overload
    async def start(
        self, workflow: Workflow[P, R], /, *args: Any, run_id: str | None = None, **kwargs: Any
    ) -> RunHandle[R]: ...
    async def start(
        self,
        workflow: Any,
        /,
        *args: Any,
        run_id: str | None = None,
        queue: str = "default",
        priority: int = 0,
        delay: float = 0.0,
        key: str | None = None,
        deadline: float | timedelta | datetime | None = None,
        tags: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> RunHandle[Any]:
        """Start a run, durable before its first step; a known `run_id` gives the existing run, never a second one."""
        self._must_be_open()
        if isinstance(workflow, Bound):
            workflow, args, kwargs = workflow.workflow, workflow.args, workflow.kwargs
        workflow = definition_of(self.workflows, workflow)
        options = Options(run_id, queue, priority, delay, key, deadline, tags)
        return await self._create(workflow, new_run(self, workflow, args, kwargs, options), [[*args], kwargs])

    async def _create(self, workflow: Workflow[..., Any], create: Create, arguments: list[Any]) -> RunHandle[Any]:
        run, worker = create.run, self.worker if create.run.worker is not None else None
        if worker is not None:
            worker.births += 1
        try:
            answer = await self.journal.write(create)
        except BaseException:
            if self.worker is not None:
                self.worker.doubt()  # it may be there all the same, leased to this worker
            raise
        finally:
            if worker is not None:
                worker.births -= 1
        if answer.verdict is Verdict.EXISTS:
            if answer.run is not None:
                check_same(self, workflow, run, answer.run, arguments)
            return RunHandle(self, run.id, workflow)
        if self.teller.observed:
            self.teller.tell(Event("run.created", run.id, run.created_at, run.workflow))
        if run.worker is None or self.worker is None or run.worker != self.worker.id:  # or given up meanwhile
            self.poke()
            return RunHandle(self, run.id, workflow)
        context = RunContext(self, workflow, Claim(run, Lease(run.id, run.worker, 1)))
        self.entered(context)
        self.runner.begin(context)
        return RunHandle(self, run.id, workflow, context)

    async def get(self, run_id: str) -> RunHandle[Any]:
        """The run with this id."""
        self._must_be_open()
        run = await self.read(self.store.get_run, run_id)
        if run is None:
            raise RunNotFound(f"no run {run_id!r} in {self.store.url}", run_id)
        return RunHandle(self, run_id, self.workflows.get(run.workflow))

    async def list(self, query: RunQuery | None = None, **filters: Any) -> RunPage:
        """One page of runs, newest first. Runs whose rows are damaged are named in its `unreadable`."""
        self._must_be_open()
        if query is None:
            query = RunQuery(**{**filters, "status": _statuses(filters.get("status"))})
        return await self.call(self.store.list_runs, query)

    async def retry(self, run_id: str, reason: str = "", actor: str = "", *, force: bool = False) -> None:
        """Let a failed or set-aside run go on from where it failed; with `force` one that was handed over, too."""
        await self.to_its_end(retrying.retry(self, run_id, reason, actor or self.actor, force=force))
        self.poke()

    async def rewind(
        self,
        run_id: str,
        *,
        to: int | None = None,
        step: str | None = None,
        reason: str = "",
        actor: str = "",
        dry_run: bool = False,
        force: bool = False,
    ) -> Rewound:
        """Let a run that nobody drives go on from an earlier record: what came after it stays, but no longer counts."""
        from .rewind import rewind  # noqa: PLC0415 - asked for rarely

        self._must_be_open()
        who = actor or self.actor
        rewound = await self.to_its_end(
            rewind(self, run_id, to=to, step=step, reason=reason, actor=who, dry_run=dry_run, force=force)
        )
        self.poke()
        return rewound

    async def fork(
        self,
        origin: str,
        at: int | None = None,
        *,
        step: str | None = None,
        run_id: str | None = None,
        input: Any = None,  # noqa: A002 - the word users know
        results: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        next: str | None = None,  # noqa: A002 - as in `RunHandle.edit`
        signals: bool = True,
        reason: str = "",
        actor: str = "",
    ) -> RunHandle[Any]:
        """Start a new run with a copy of another's records up to `at`, or up to before a `step`.

        The other run is only read. `input` gives the fork another input, `results` other results of recorded steps,
        `state` other values in a graph's state, `next` the step that is to come next. Signals that the copied records
        have not read come along, unless `signals` is False.
        """
        from .fork import Edits, fork  # noqa: PLC0415 - asked for rarely

        self._must_be_open()
        edits = Edits(input, results, state, next, signals)
        who = actor or self.actor
        return await fork(self, origin, at=at, step=step, run_id=run_id, edits=edits, reason=reason, actor=who)

    async def cancel_successor(self, run_id: str) -> None:
        """Cancel the run that goes on for an ended one, if there is one."""
        with contextlib.suppress(RunError):
            newest = await RunHandle[Any](self, run_id).latest()
            if newest.id != run_id:
                await newest.cancel("its parent was cancelled")

    async def cancel_now(self, run_id: str, reason: str = "", actor: str = "") -> None:
        """End a run that nobody drives, without its code."""
        await self.to_its_end(control.cancel_now(self, run_id, reason, actor or self.actor))

    async def rekey(self) -> Rekeyed:
        """Wrap the data keys of all runs with the current key, so that older keys can be dropped."""
        self._must_be_open()
        return await self.encryption.rekey(self)

    @property
    def care(self) -> Care:
        """What looks after the store: verify, repair, purge, erase, export, load, copy."""
        from .care import Care  # noqa: PLC0415 - asked for rarely

        self._must_be_open()
        return Care(self)

    async def signal(self, run_id: str, name: str, payload: Any = True, *, id: str = "") -> None:  # noqa: A002
        """Send a run a durable message."""
        await RunHandle[Any](self, run_id).signal(name, payload, id=id)

    def _must_be_open(self) -> None:
        if os.getpid() != self._pid:
            raise DefinitionError("the engine was opened before this process was forked; open one here")
        if self.closed:
            raise DefinitionError("the engine is closed; use it inside `async with ks.open(...)`")

    # -- what its parts ask of it -------------------------------------------------------------------------------------

    async def read(self, function: Callable[..., R], *args: Any) -> R:
        """Read from the store: at once when it is quick, else beside the loop."""
        return function(*args) if self.store.quick else await self.call(function, *args)

    async def call(self, function: Callable[..., R], *args: Any) -> R:
        """Call the store beside the loop, since it may have to wait for others."""
        try:
            answer = self.loop.run_in_executor(self._pool, function, *args)
        except RuntimeError:  # the threads are gone: whoever asks has waited beyond the end of the engine
            self._must_be_open()
            raise
        return await answer

    async def admit(self, data: bytes, key: str) -> bytes | None:
        """Let a large result of a step pass the censor beside the loop; the value as it is kept, if it is compressed.

        The threads are its own, so that claims and reads wait for no value.
        """
        return await self.loop.run_in_executor(self._value_pool, self._admit, data, key)

    def _admit(self, data: bytes, key: str) -> bytes | None:
        self.censor.check(data, key)
        return None if self.encryption.of_everything else pack(data)

    async def to_its_end(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Do what must not be left half-way, such as a claim that is to be given back: also if nobody waits for it."""
        self._must_be_open()
        task: asyncio.Task[R] = asyncio.Task(coroutine, loop=self.loop, context=Context())
        self._background.add(task)
        task.add_done_callback(self._background.discard, context=self.context)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_heard, context=self.context)
            raise

    def background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Do something of the engine's own, with no run's context."""
        if self.closed:
            coroutine.close()
            return
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self.loop, context=Context())
        self._background.add(task)
        task.add_done_callback(self._background_ended, context=self.context)

    def beside(self, coroutine: Coroutine[Any, Any, R], context: Context) -> asyncio.Task[R]:
        """Do something that ends with the engine at the latest; the caller hears of its failure."""
        task: asyncio.Task[R] = asyncio.Task(coroutine, loop=self.loop, context=context)
        self._background.add(task)
        task.add_done_callback(self._background.discard, context=self.context)
        return task

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("something failed in the background", exc_info=task.exception())

    def is_own(self, run: Run) -> bool:
        """Whether the workflow of a run's name that is known here is the one that the run belongs to."""
        known = self.workflows.get(run.workflow)
        return known is None or not is_namesake(known, run)

    def entered(self, context: RunContext) -> None:
        self.live[context.id] = context

    def left(self, context: RunContext) -> None:
        worker = self.worker
        full = worker is not None and not worker.has_room()
        if self.live.get(context.id) is context:
            del self.live[context.id]
        self.hearing.left(context.id)
        if self.forgetting is not None:
            self.forgetting.left(context)
        if worker is not None:
            worker.progress.pop(context.id, None)
            worker.progressed(context)
            if full:
                worker.claim_soon()
        self.pulse()

    def progressed(self, context: RunContext) -> None:
        """A recovered run has written something new."""
        if self.worker is not None:
            self.worker.progressed(context)

    def lease_is_fresh(self) -> bool:
        return self.worker is None or self.worker.lease_is_fresh()

    def interrupted(self, context: RunContext) -> None:
        """The program is about to end: give a run back, and take none up again."""
        if self.worker is not None:
            self.worker.stop_claiming()
            self.worker.give_back_later(context)

    def give_back_later(self, context: RunContext, pause_seconds: float = 0.0) -> None:
        if self.worker is not None:
            self.worker.give_back_later(context, pause_seconds)

    async def put_back(self, claim: Claim, error: EncryptionError | SchemaMismatch) -> None:
        """Leave a run that cannot be read here to workers that can."""
        if self.worker is not None:
            await self.worker.put_back(claim, error)

    def poke(self) -> None:
        """Something may be due."""
        if self.worker is not None:
            self.worker.claim_soon()

    def signalled(self, run_id: str) -> None:
        """A signal was sent from here: whoever drives the run here is told at once."""
        context = self.live.get(run_id)
        if context is not None:
            self.hearing.fetch(context)
        else:
            self.poke()

    def waits_of(self, run_id: str) -> tuple[str, ...]:
        """The signals that a run in memory waits for."""
        context = self.live.get(run_id)
        waits = () if context is None else context.waits.values()
        return tuple(wait.name for wait in waits if wait.name is not None)

    def pulse(self) -> None:
        """Something was written: whoever waits for a change looks again."""
        if self._pulse is not None and not self._pulse.done():
            self._pulse.set_result(None)
        self._pulse = None
        if self._pace.jumps:
            self._pace.moved()
            if self.worker is not None:
                self.worker.look_soon()

    async def changed(self, seconds: float) -> bool:
        """Wait until something was written, here or elsewhere, or so long; whether something was."""
        self._must_be_open()
        if self._pulse is None:
            self._pulse = self.loop.create_future()
        done, _ = await asyncio.wait([self._pulse], timeout=max(seconds, self._pace.pause()))
        return bool(done)


def _heard(task: asyncio.Future[Any]) -> None:
    """Whoever asked has left: what came of it need not be told."""
    if not task.cancelled():
        task.exception()


async def _all_left(contexts: Sequence[RunContext], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for context in contexts:
                await context.left()


def _statuses(wanted: Any) -> frozenset[Status]:
    """One status or several, by name or as they are."""
    if wanted is None:
        return frozenset()
    try:
        return frozenset(Status(one) for one in ([wanted] if isinstance(wanted, str) else wanted))
    except ValueError as error:
        raise DefinitionError(f"{error}; there are {', '.join(Status)}") from None


_warned = False


def _warn_of_lost_context(name: str) -> None:
    """A step called in a thread of the user's own is not recorded; say so, once."""
    global _warned  # noqa: PLW0603 - once per process
    if not _warned and threading.current_thread() is not threading.main_thread():
        _warned = True
        log.warning(
            "step %r was called in a thread that Keepstep does not know: it runs plainly and is not recorded", name
        )
