"""The object that the parts of an engine share; it serves runs and commands as their host."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import ChainMap
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import DefinitionError, EncryptionError, RunNotFound, SchemaMismatch
from ..history.series import newest_run
from ..kernel.namesakes import is_namesake
from ..model import Claim, Run, Signal
from ..observers.resources import of_process
from ..ports import LOOKS
from ..records.record import pack
from ..stores.reading import is_newer
from ..values import VALUES, Values
from ..values.large import is_large, is_large_text
from ..workflows.definition import KNOWN, Workflow
from .heartbeat import HEARTBEAT_SHARE

if TYPE_CHECKING:
    from datetime import datetime

    from ..executors.thread import Threads
    from ..history.recovery import Wish
    from ..history.rewind import Rewound
    from ..kernel import host
    from ..kernel.driver import RunDriver
    from ..kernel.forgetting import Forgetting
    from ..kernel.idle_watch import IdleWatch
    from ..kernel.log import RecoveryPlan
    from ..kernel.redaction import Redaction
    from ..kernel.runner import Runner
    from ..kernel.saved import StepsProgress
    from ..model.notices import Topic
    from ..policies.classify import Rule
    from ..policies.recovery import Recovery, RecoveryLimit
    from ..ports import Clock, Row, Send, Store, Tracer
    from ..records.counts import Resources
    from ..workflows.recovery import RecoveryInfo
    from .artifacts import Artifacts
    from .encryption import Encryption
    from .executors import Executors
    from .heartbeat import Heart
    from .journal import Journal
    from .outage import Outage
    from .parts import Parts
    from .poll_interval import PollInterval

R = TypeVar("R")

log = logging.getLogger("keepstep")


class ClaimingWorker(Protocol):
    """The worker of a process, as its other parts see it."""

    id: str
    progress: dict[str, StepsProgress]
    births: int

    def has_room(self) -> bool: ...

    heart: Heart

    def serves(self, queue: str) -> bool: ...

    def host_queues(self, queues: frozenset[str]) -> None: ...

    def beat_once(self) -> bool: ...

    def lag_seconds(self) -> float: ...

    def is_pinned_elsewhere(self, run: Run) -> bool: ...

    def is_full(self) -> bool: ...

    def claim_soon(self) -> None: ...

    def look_soon(self) -> None: ...

    def look_for_keepers(self) -> None: ...

    @property
    def is_stopping(self) -> bool: ...

    def stop_claiming(self) -> None: ...

    def doubt(self) -> None: ...

    def progressed(self, context: RunDriver) -> None: ...

    def report_progress(self, run: str, progress: StepsProgress) -> None: ...

    def give_back_later(self, context: RunDriver, pause_seconds: float = 0.0) -> None: ...

    def release_later(self, run_id: str, epoch: int) -> None: ...

    async def put_back(self, claim: Claim, error: EncryptionError | SchemaMismatch) -> None: ...

    async def leave(self) -> None: ...


class Hosting(Protocol):
    """The agents that a process hosts, as its other parts see them."""

    #: The workflows of their tasks, and those among them of which no runs are claimed now.
    workflows: Any
    withheld: frozenset[str]
    #: The agents as the heartbeat shows them.
    text: bytes

    def entered(self, context: RunDriver) -> None:
        """A task is performed here."""

    def left(self, context: RunDriver) -> None:
        """A task has ended, or was put away."""


class NoAgents:
    """The hosting of a process without agents."""

    workflows: Any = MappingProxyType({})
    withheld: frozenset[str] = frozenset()
    text = b""

    def entered(self, context: RunDriver) -> None:
        """A task has no host here: the agent was removed."""

    left = entered


#: The name of somebody else for whom the current task acts, such as the caller of an API; "" for the process itself.
ACTOR: ContextVar[str] = ContextVar("keepstep_actor", default="")


class Process:
    """The shared state of an engine's parts, the host of its runs, and the host of commands on stored runs."""

    clock: Clock
    #: The monotonic clock of leases, and the time on it until which the worker's leases are fresh.
    seconds: Callable[[], float]
    fresh_until: float
    loop: asyncio.AbstractEventLoop
    context: Context
    #: The name under which this process acts, unless a task acts for somebody else.
    own_actor: str
    closed: bool
    live: dict[str, RunDriver]
    worker: ClaimingWorker | None
    journal: Journal
    runner: Runner
    idle_watch: IdleWatch
    forgetting: Forgetting | None
    parts: Parts
    perform: Callable[[Any], Coroutine[Any, Any, None]]
    step_threads: Threads
    run_threads: Threads
    hook_threads: Threads
    executors: Executors
    tracer: Tracer | None
    recovery_limit: RecoveryLimit
    rules: tuple[Rule, ...]
    linger_seconds: float
    stall_seconds: float
    encryption: Encryption
    redaction: Redaction
    outage: Outage
    events: host.Events
    signal_reader: Any
    waiting: Any
    shares: Any
    hosting: Hosting
    _given: dict[str, Workflow[..., Any]] | None
    _pid: int
    _pool: ThreadPoolExecutor
    _value_pool: ThreadPoolExecutor
    _background: dict[asyncio.Task[Any], None]
    _begin_polling: Callable[[], None] | None
    _pace: PollInterval
    _store: Store
    #: The store for tasks that only look, if that is another one.
    _looked_at: Store | None = None

    @property
    def store(self) -> Store:
        """The store, as the current task uses it."""
        looked_at = self._looked_at
        return looked_at if looked_at is not None and LOOKS.get() else self._store

    @store.setter
    def store(self, store: Store) -> None:
        self._store = store

    @property
    def artifacts(self) -> Artifacts:
        """The artifacts of the store."""
        raise NotImplementedError

    @property
    def actor(self) -> str:
        """The name in the audit for what the current task does."""
        return ACTOR.get() or self.own_actor

    @property
    def workflows(self) -> Mapping[str, Workflow[..., Any]]:
        """The workflows of this engine: those given to it, or all decorated ones, and those of agents it hosts."""
        known = KNOWN if self._given is None else self._given
        return ChainMap(self.hosting.workflows, known) if self.hosting.workflows else known

    def _must_be_open(self) -> None:
        if os.getpid() != self._pid:
            raise DefinitionError(
                "the engine was opened before this process was forked; open a new one in this process"
            )
        if self.closed:
            raise DefinitionError("the engine is closed; use it inside `async with ks.open(...)`")

    # -- the store ----------------------------------------------------------------------------------------------------

    async def read(self, function: Callable[..., R], *args: Any) -> R:
        """Call a reading function of the store: directly if the store is quick, else in a thread."""
        return function(*args) if self.store.quick else await self.call(function, *args)

    async def ask(self, question: Callable[..., R], *args: Any) -> R:
        """Read from the store with a function whose first argument is the store."""
        return await self.read(question, self.store, *args)

    async def stored_run(self, run_id: str) -> Run | None:
        """Return the stored run."""
        return await self.read(self.store.get_run, run_id)

    async def newest_of_series(self, run_id: str) -> Run | None:
        """Return a run, or the newest run that continues it; None if that is gone."""
        run = await self.stored_run(run_id)
        try:
            return run if run is None or run.continued_as is None else await self.ask(newest_run, run)
        except RunNotFound:
            return None

    async def is_newer(self, run: Run) -> bool:
        """Whether a newer version of Keepstep has written part of a run."""
        return await self.ask(is_newer, run)

    async def records(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> Sequence[Row]:
        """Return stored records of a run with a seq above `after`."""
        return await self.read(self.store.list_checkpoints, run_id, after, limit, kinds)

    async def signals(self, run_id: str, after: int = 0, limit: int = 1000) -> Sequence[Signal]:
        """Return stored signals of a run with a seq above `after`."""
        return await self.read(self.store.list_signals, run_id, after, limit)

    @property
    def url(self) -> str:
        """The address of the store."""
        return self.store.url

    @property
    def transactional(self) -> bool:
        """Whether the store supports transactional steps."""
        return self.store.transactional

    def report_progress(self, run_id: str, progress: StepsProgress) -> None:
        """Store the progress of a run with the next heartbeat."""
        if self.worker is not None:
            self.worker.report_progress(run_id, progress)

    @property
    def look_seconds(self) -> float:
        """Seconds between two heartbeats, and between two looks at those of others."""
        return self.store.lease_seconds * HEARTBEAT_SHARE

    def resources(self) -> Resources:
        """Return what this process uses now, and how late its loop was. Any thread may call this."""
        lag = 0.0 if self.worker is None else self.worker.lag_seconds()
        return of_process(open_runs=len(self.live), lag_seconds=lag)

    async def tell_heartbeat(self) -> None:
        """Write the heartbeat of the worker now, with the agents that it hosts."""
        if self.worker is not None:
            await self.call(self.worker.beat_once)

    async def declare_queue(self, queue: Any) -> None:
        """Write a queue with its limits, which this process declares."""
        raise NotImplementedError

    def is_limited(self, queue: str) -> bool:
        """Whether a queue has limits, so that its runs are not driven before a claim."""
        raise NotImplementedError

    async def call(self, function: Callable[..., R], *args: Any) -> R:
        """Call the store in a thread, because it may have to wait."""
        if LOOKS.get():  # the function itself may ask for the store
            args, function = (function, *args), copy_context().run
        try:
            answer = self.loop.run_in_executor(self._pool, function, *args)
        except RuntimeError:  # the pool was shut down, because the engine was closed
            self._must_be_open()
            raise
        return await answer

    async def off_loop(self, function: Callable[..., R], *args: Any) -> R:
        """Process a large value in a thread, so that the loop stays responsive.

        The thread is separate from that of claims and reads, which must not wait for values. It is a single one: two
        would compete for the interpreter lock and delay the loop more.
        """
        if self.closed:  # a result may still be read after the close
            return function(*args)
        return await self.loop.run_in_executor(self._value_pool, function, *args)

    async def decode(self, values: Values, data: bytes, where: str) -> Any:
        """Restore a stored value, off the loop if it is large."""
        return await self.off_loop(values.decode, data, where) if is_large_text(data) else values.decode(data, where)

    async def encode(self, value: Any, where: str, name: str, what: str) -> bytes:
        """Encode a value and check it for secrets and size, off the loop if it is large."""

        def encode() -> bytes:
            data = VALUES.encode_shown(value, where)
            self.redaction.check(data, name, what)
            return data

        return await self.off_loop(encode) if is_large(value) else encode()

    def packed(self, data: bytes) -> bytes | None:
        """Return the stored, compressed form of a large value; None if it is small or will be encrypted."""
        return None if self.encryption.of_everything or not is_large_text(data) else pack(data)

    async def shielded(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine to its end even if the caller is cancelled, such as a claim that must be given back."""
        self._must_be_open()
        task: asyncio.Task[R] = asyncio.Task(coroutine, loop=self.loop, context=Context())
        self._background[task] = None
        task.add_done_callback(self._background.pop, context=self.context)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_mark_retrieved, context=self.context)
            raise

    def background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine of the engine in the background, outside any run's context. Log its failure."""
        if self.closed:
            coroutine.close()
            return
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self.loop, context=Context())
        self._background[task] = None
        task.add_done_callback(self._background_ended, context=self.context)

    def beside(self, coroutine: Coroutine[Any, Any, R], context: Context) -> asyncio.Task[R]:
        """Return a task that ends with the engine at the latest. The caller handles its failure."""
        task: asyncio.Task[R] = asyncio.Task(coroutine, loop=self.loop, context=context)
        self._background[task] = None
        task.add_done_callback(self._background.pop, context=self.context)
        return task

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.pop(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task of the engine failed", exc_info=task.exception())

    def is_own(self, run: Run) -> bool:
        """Whether a run belongs to the workflow of its name here, or that name is unknown here."""
        known = self.workflows.get(run.workflow)
        return known is None or not is_namesake(known, run)

    def entered(self, context: RunDriver) -> None:
        self.live[context.id] = context
        if context.workflow.agent is not None:
            self.hosting.entered(context)
        self.waiting.notify(context.id)

    def left(self, context: RunDriver) -> None:
        worker = self.worker
        full = worker is not None and not worker.has_room()
        if self.live.get(context.id) is context:
            del self.live[context.id]
        if context.workflow.agent is not None:
            self.hosting.left(context)
        self.signal_reader.left(context.id)
        self.shares.left(context)
        if self.forgetting is not None:
            self.forgetting.left(context)
        if worker is not None:
            worker.progress.pop(context.id, None)
            worker.progressed(context)
            if full or self.is_limited(context.run.queue):  # its place may be what another run waits for
                worker.claim_soon()
        self.notify_waiters()

    def progressed(self, context: RunDriver) -> None:
        """Note that a recovered run has made progress."""
        if self.worker is not None:
            self.worker.progressed(context)

    def lease_is_fresh(self) -> bool:
        return self.seconds() < self.fresh_until

    def is_full(self) -> bool:
        """Whether the worker drives as many runs as it may."""
        return self.worker is not None and self.worker.is_full()

    def interrupted(self, context: RunDriver) -> None:
        """Give a run back and stop claiming, because a KeyboardInterrupt is about to end the program."""
        if self.worker is not None:
            self.worker.stop_claiming()
            self.worker.give_back_later(context)

    def give_back_later(self, context: RunDriver, pause_seconds: float = 0.0) -> None:
        if self.worker is not None:
            self.worker.give_back_later(context, pause_seconds)

    async def put_back(self, claim: Claim, error: EncryptionError | SchemaMismatch) -> None:
        """Release a claimed run that cannot be read here, for workers that can read it."""
        if self.worker is not None:
            await self.worker.put_back(claim, error)

    @property
    def worker_id(self) -> str | None:
        """The id of the worker; None without a worker."""
        return None if self.worker is None else self.worker.id

    def release_later(self, run_id: str, epoch: int) -> None:
        """Let the worker release a lease as soon as the store is available again."""
        if self.worker is not None:
            self.worker.release_later(run_id, epoch)

    def drain_requested(self) -> None:
        """Hand the runs of the worker back, because a person told it to drain."""
        raise NotImplementedError

    def notices(
        self, topic: Topic, run: Run, *, text: str = "", key: str = "", at: datetime | None = None
    ) -> Sequence[Send]:
        """Return the signals with which a commit also tells channels about a run."""
        raise NotImplementedError

    def breaker_opened(self, service: str) -> None:
        """Tell channels about a breaker that this process has opened."""
        raise NotImplementedError

    def keepers_changed(self) -> None:
        """Let the worker look for new keepers, because one was created here."""
        if self.worker is not None:
            self.worker.look_for_keepers()

    def claim_soon(self) -> None:
        """Let the worker claim soon, because a run may be due."""
        if self.worker is not None:
            self.worker.claim_soon()

    def signalled(self, run_id: str) -> None:
        """Read a signal that was sent from here at once if the run is in memory; otherwise claim soon."""
        context = self.live.get(run_id)
        if context is not None:
            self.signal_reader.fetch(context)
        else:
            self.claim_soon()

    def waits_of(self, run_id: str) -> tuple[str, ...]:
        """Return the names of the signals that a run in memory waits for."""
        context = self.live.get(run_id)
        waits = () if context is None else context.waits.values()
        return tuple(wait.name for wait in waits if wait.name is not None)

    def notify_waiters(self) -> None:
        """Wake everything that waits for a change of the store, because something was written."""
        self.waiting.changed()
        if self._pace.jumps:
            self._pace.moved()
            if self.worker is not None:
                self.worker.look_soon()

    def watch_others(self) -> None:
        """Begin to listen for writes of other processes."""
        begin, self._begin_polling = self._begin_polling, None
        if begin is not None:
            begin()

    async def changed(self, seconds: float) -> bool:
        """Wait up to `seconds` for a write, here or in another process. Return whether there was one."""
        self._must_be_open()
        with self.waiting.reader() as reader:
            return bool(await reader.changed(seconds))

    def pause(self, seconds: float) -> float:
        """Return the time before the next poll of the store: `seconds`, or longer on a virtual clock."""
        return max(seconds, self._pace.pause())

    # -- commands -----------------------------------------------------------------------------------------------------

    async def cancel_now(self, run_id: str, reason: str = "", actor: str = "") -> list[str]:
        """Cancel a run that no worker drives, without running its code. Return the steps that are not undone."""
        from ..history.commands import cancel_now  # noqa: PLC0415 - rarely needed

        return await self.shielded(cancel_now(self, run_id, reason, actor or self.actor))

    async def retry(self, run_id: str, reason: str = "", actor: str = "", *, force: bool = False) -> None:
        """Continue a failed or set-aside run from where it failed; with `force`, also one that was handed over."""
        from ..history.retry import retry  # noqa: PLC0415 - rarely needed

        await self.shielded(retry(self, run_id, reason, actor or self.actor, force=force))
        self.claim_soon()

    async def skip(self, run_id: str, *steps: str, reason: str = "", actor: str = "") -> list[str]:
        """Accept failed undo steps of a set-aside run as they are, all or those named; the run then ends."""
        from ..history.undone import answer_undo  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        skipped = await self.shielded(
            answer_undo(self, run_id, "skip", steps, reason=reason, actor=actor or self.actor)
        )
        self.claim_soon()
        return skipped

    async def recover(self, run_id: str, wish: Wish, actor: str = "") -> str:
        """Ask for the recovery of a run, which the next worker carries out. Return the id of the run."""
        from ..history.recovery import request_recovery  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        run = await self.shielded(request_recovery(self, run_id, wish, actor or self.actor))
        self.claim_soon()
        return run

    async def recovery_info(self, run: RunDriver, handler: str) -> RecoveryInfo:
        """Return what a recovery handler is told about a run that was taken up here."""
        from ..history.recovery import told_to_handler  # noqa: PLC0415 - only with a handler

        return await told_to_handler(self, run, handler)

    async def plan_recovery(self, run: RunDriver, answer: Recovery) -> RecoveryPlan:
        """Return what the answer of a recovery handler takes."""
        from ..history.recovery import plan_for  # noqa: PLC0415 - only with a handler

        return await plan_for(self, run, answer)

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
        """Continue a run that no worker drives from an earlier record. Later records stay, but no longer count."""
        from ..history.rewind import rewind  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        who = actor or self.actor
        rewound = await self.shielded(
            rewind(self, run_id, to=to, step=step, reason=reason, actor=who, dry_run=dry_run, force=force)
        )
        self.claim_soon()
        return rewound


def _mark_retrieved(task: asyncio.Future[Any]) -> None:
    """Mark the exception of a task as retrieved, because its caller is gone: asyncio would log it."""
    if not task.cancelled():
        task.exception()
