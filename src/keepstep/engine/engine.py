"""The engine: a process's access to a store, with or without a worker of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, overload

from ..errors import AlreadyFinished, DefinitionError, RunError, RunNotFound
from ..executors.inline import InlineExecutor
from ..executors.thread import ThreadExecutor
from ..kernel.driver import RunDriver
from ..kernel.forgetting import Forgetting
from ..kernel.hooks import ASIDE_THREADS
from ..kernel.idle_watch import IdleWatch
from ..kernel.parking import LINGER_SECONDS, hand_back
from ..kernel.redaction import OnSuspect, Redaction
from ..kernel.runner import Runner, take_up
from ..kernel.stall import STALL_SECONDS
from ..kernel.strands import install, uninstall
from ..model import Claim, Event, Lease, Run, RunPage, RunQuery, Status, WorkerInfo
from ..model.ids import new_id
from ..observers import resolve
from ..observers.log import RedactedLog
from ..policies.classify import checked_rules
from ..policies.queue import DECLARED, Queue, queue_name
from ..policies.recovery import RecoveryLimit
from ..ports import (
    Answer,
    Clock,
    Create,
    JumpingClock,
    OptionalStore,
    Send,
    Store,
    SystemClock,
    Verdict,
    boot_seconds,
    looking,
    optional,
)
from ..records.keys import Keys
from ..records.record import MAX_VALUE
from ..stores.open import is_store, open_store
from ..values import Redactor
from ..values.large import is_large, is_large_text
from ..workflows import definition
from ..workflows.channel import CHANNELS
from ..workflows.definition import Bound, Workflow
from ..workflows.recovery import unknown_handlers
from .artifacts import Artifacts
from .documents import Documents, keep_swept
from .encryption import Encryption
from .events import Events
from .executors import Executors
from .handle import RunHandle, this_process
from .journal import Journal
from .options import check_engine_options, given_queues, given_workflows
from .outage import Outage, cut_off_after
from .parts import Parts
from .poll_interval import PollInterval
from .process import NoAgents, Process
from .process_metrics import process_metrics
from .queues import Queues
from .reader import Reader
from .services import Services
from .set_aside import Reason, set_aside
from .shares import Shares
from .signal_reader import SignalReader
from .start import Options, check_same, definition_of, new_run
from .waiting import Waiting
from .worker import Worker

if TYPE_CHECKING:
    from types import TracebackType

    from ..care.facade import Care
    from ..care.retention import Rules
    from ..model.notices import Topic
    from ..observers.metrics import Metric
    from ..policies import Schedule
    from ..policies.classify import Classify
    from ..policies.retention import Retain
    from ..ports import Executor
    from ..records.counts import Counts
    from ..stores.encrypted import Rekeyed
    from .agents import Agents
    from .channels import Channels
    from .hosting import Hosted
    from .process import ClaimingWorker
    from .schedules import Schedules
    from .topics import Topics

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("keepstep")

#: Default store, unless the environment variable names another.
DEFAULT_URL = ".keepstep/runs.db"
STORE_VARIABLE = "KEEPSTEP_STORE"
REPLICA_VARIABLE = "KEEPSTEP_REPLICA"
#: Runs that a worker drives at once. More wait in the store.
MAX_RUNS = 1000
#: Threads for plain def workflows, and separately for plain def steps, because one pool for both could deadlock.
RUN_THREADS = 64
STEP_THREADS = 64
#: Seconds that current steps may take when the engine closes, before their runs are handed back.
STOP_SECONDS = 5.0
#: Seconds between two polls of an engine without a worker.
READ_SECONDS = 0.02
#: Seconds that runs may take to be handed back when the engine closes.
LAST_WRITE_SECONDS = 5.0
#: Seconds that the store may then take for all pending writes, and for signing the worker off.
DRAIN_SECONDS = 10.0
LEAVE_SECONDS = 10.0
#: Names that the reference promises. Completion shows only these; the kernel and the commands use others.
DOCUMENTED = (
    *(
        "agents",
        "artifacts",
        "beat",
        "broadcast",
        "care",
        "channels",
        "close",
        "complete",
        "counts",
        "documents",
        "drain",
        "fail",
        "fork",
        "get",
        "host",
        "list",
        "publish",
        "queues",
        "rekey",
        "retry",
        "rewind",
        "schedule",
        "schedules",
        "services",
        "signal",
        "skip",
        "start",
        "topics",
        "workers",
    ),
)


class Engine(Process):
    """Starts runs and controls them; with a worker it also drives and recovers them. Made by `ks.open`."""

    events: Events

    def __init__(
        self,
        url: Any = None,
        *,
        worker: bool = True,
        workflows: Iterable[Workflow[..., Any]] | None = None,
        queues: Iterable[str] | None = None,
        agents: Any = None,
        observers: Any = None,
        clock: Clock | None = None,
        max_runs: int = MAX_RUNS,
        max_value_bytes: int = MAX_VALUE,
        recovery_limit: int = 3,
        classify: Classify | None = None,
        stop_seconds: float = STOP_SECONDS,
        linger_seconds: float = LINGER_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        replay_always: bool = False,
        redact: Redactor | None = None,
        on_suspect: OnSuspect = "store",
        actor: str | None = None,
        keys: Keys | None = None,
        retain: Retain | Literal[False] | None = None,
        strict: bool = False,
        artifacts: str | os.PathLike[str] | None = None,
        executor: Any = None,
        executors: Mapping[str, Any] | None = None,
        parts: Parts | None = None,
        **store_options: Any,
    ) -> None:
        times = {"stop_seconds": stop_seconds, "linger_seconds": linger_seconds, "stall_seconds": stall_seconds}
        times |= {name: value for name, value in store_options.items() if name.endswith("_seconds")}
        check_engine_options(max_runs, retain, times, on_suspect, worker=worker, queues=queues, agents=agents)
        self._url = os.environ.get(STORE_VARIABLE) or DEFAULT_URL if url is None else url
        self._store_options = store_options if url is not None else {**_replica_in_environment(), **store_options}
        self._with_worker = worker
        self._given = given_workflows(workflows)
        self._queues = given_queues(queues)
        self._queue_limits = Queues(self)
        self._hosts = agents
        self.hosting = NoAgents()
        self._agents: Agents | None = None
        self._channels: Channels | None = None
        self._documents: Documents | None = None
        self._artifacts_folder = artifacts
        self._artifacts: Artifacts | None = None
        self._services = Services(self)
        self._clock = clock
        self.clock = clock or SystemClock()
        self.max_runs = max_runs
        self.recovery_limit = RecoveryLimit(recovery_limit)
        self.rules = checked_rules(classify, "classify=")
        self.stop_seconds = stop_seconds
        self.linger_seconds = linger_seconds
        #: Seconds that a replay may stand still before its run is set aside.
        self.stall_seconds = stall_seconds
        self.parts, self.executors = parts or Parts(), Executors(executors, executor)
        self.forgetting = Forgetting(self) if replay_always else None
        self.encryption = Encryption(keys)
        self.redaction = Redaction(redact or Redactor(), max_value_bytes, self.encryption, on_suspect)
        self.events = Events(self, resolve(observers))
        self._filter = RedactedLog(self.redaction.redact)
        self._actor = actor
        self.own_actor = actor or ""
        self._retain = retain
        self._strict = strict
        self.tracer = self.events.tracer
        self.perform = self.parts.perform
        if self.forgetting is not None:
            self.perform = self.forgetting.perform
        self.live = {}
        self.closed = True
        self._pid = os.getpid()
        self.worker = None
        self.context = Context()
        self._background = {}
        self._begin_polling = None
        self.outage = Outage(lambda: self.clock.boot()[1])
        self.signal_reader = SignalReader(self)
        self.waiting = Waiting(self)
        self.shares = Shares(self)

    def __dir__(self) -> Iterable[str]:
        """Names for completion: the documented ones, and those with an underscore."""
        return [*DOCUMENTED, *(name for name in super().__dir__() if name.startswith("_"))]

    # -- opening and closing ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Open the store and start the worker, if there is one; it recovers interrupted runs."""
        if not self.closed:
            raise DefinitionError("the engine is already open")
        if self._given is not None:  # a worker of some workflows delivers the notices about them, too
            self._given |= {channel.delivery.name: channel.delivery for channel in CHANNELS.values()}
        self._pid = os.getpid()
        self.own_actor = self._actor or this_process()
        self.loop = asyncio.get_running_loop()
        self._owns_store = not is_store(self._url)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="keepstep-reader")
        self._value_pool = ThreadPoolExecutor(1, thread_name_prefix="keepstep-values")
        self.store = await self.loop.run_in_executor(self._pool, self._open_store)
        self.clock = self._clock or self.store.clock
        self.seconds = boot_seconds(self.clock)
        self.fresh_until = math.inf  # a worker sets it with each heartbeat
        self._pace = PollInterval(self.clock, READ_SECONDS)
        self.closed = False
        #: Set when a person has told the worker to drain.
        self.told_to_drain = asyncio.Event()
        log.addFilter(self._filter)
        callbacks = install(self.loop)
        definition.on_plain_call = _warn_of_lost_context
        self.idle_watch = IdleWatch(self.loop, callbacks)
        self.runner = Runner(self)
        self._make_threads()
        worker = Worker(self, self.max_runs, self._queues)
        hosted = self._host(self._hosts, worker) if self._hosts else []
        self.journal = Journal(
            self.store,
            worker.id,
            self.idle_watch,
            self.clock,
            self.outage,
            readers=self.waiting,
            saves=self.events.saves,
        )
        if self.tracer is not None:
            self.events.read_from(self._metrics)
        self._others = Reader(self, self._pace)
        self._begin_polling = self._others.begin
        try:
            await self.queues.open()
            if CHANNELS and self._with_worker:
                await self.channels.open()
            await self.services.open()
            if self._with_worker:
                for unknown in unknown_handlers(tuple(self.workflows.values())):
                    log.warning("%s", unknown)
                self.worker = worker
                await worker.start()
                self.events.repeat_ended()
                if self._retain is not False and not isinstance(self.clock, JumpingClock):
                    self.background(keep_swept(self))
                if (rules := self._rules()) is not None:
                    from ..care.retention import keep_swept as keep_runs_swept  # noqa: PLC0415 - only with a rule

                    self.background(keep_runs_swept(self, rules))
        except BaseException:
            await self._shut()
            raise
        await self._admit(hosted)

    def _make_threads(self) -> None:
        """Make the pools of threads, and the executors that use them."""
        self.run_threads = self.parts.threads(RUN_THREADS, "keepstep-run")
        step_threads = self.parts.threads if self.forgetting is None else self.forgetting.threads
        self.step_threads = step_threads(STEP_THREADS, "keepstep-step")
        self.hook_threads = self.parts.threads(ASIDE_THREADS, "keepstep-aside")
        local: dict[str, Executor] = {"inline": InlineExecutor(), "thread": ThreadExecutor(self.step_threads)}
        self.executors.use(self, local | dict(self.parts.executors))

    async def _admit(self, hosted: list[Hosted]) -> None:
        """Let the agents of a new engine take tasks, or close the engine again."""
        try:
            for one in hosted[:1]:
                await one.hosting.admit(hosted)
        except BaseException:
            await self.close(0.0)
            raise

    def _host(self, agents: Any, worker: ClaimingWorker) -> list[Hosted]:
        """Host agents that take no tasks yet."""
        from ..kernel.perform import given_agents  # noqa: PLC0415 - only with agents
        from .hosting import Hosting  # noqa: PLC0415 - only with agents

        if not isinstance(self.hosting, Hosting):
            self.hosting = Hosting(self)
        hosted = self.hosting.add(given_agents(agents))
        worker.host_queues(self.hosting.queues)
        return hosted

    async def host(self, agents: Any) -> None:
        """Let the worker host `agents` from now on: an agent, a team, or a list of these."""
        self._must_be_open()
        if self.worker is None:
            raise DefinitionError("an engine with worker=False cannot host agents; open one with a worker")
        hosted = self._host(agents, self.worker)
        if hosted:
            await hosted[0].hosting.admit(hosted)

    def _rules(self) -> Rules | None:
        """Return the rules by which its worker removes finished runs; None if it removes nothing."""
        own = any(workflow.retain is not None for workflow in self.workflows.values())
        if self._retain is False or not (self._with_worker and (self._retain or own)):
            return None
        if isinstance(self.clock, JumpingClock):  # the days of a test pass in no time, and all of it would be sweeping
            return None
        from ..care.retention import Rules  # noqa: PLC0415 - only with a retention rule

        return Rules(self._retain, self.workflows)

    def _open_store(self) -> Store:
        if self._url == DEFAULT_URL:  # the default folder is created on demand
            Path(DEFAULT_URL).parent.mkdir(exist_ok=True)
        store = open_store(self._url, clock=self._clock, **self._store_options)
        try:
            if self._strict:
                from ..care.retention import refuse_damaged  # noqa: PLC0415 - only on request

                refuse_damaged(store)
            opened = self.encryption.open(store, look=self._owns_store, worker=self._with_worker)
            self._looked_at = self.encryption.looking(opened)
            return opened
        except BaseException:
            if self._owns_store:
                store.close()
            raise

    async def close(self, stop_seconds: float | None = None) -> None:
        """Claim no more runs, let current steps finish for `stop_seconds`, and hand the rest back."""
        if self.closed:
            return
        grace = self.stop_seconds if stop_seconds is None else stop_seconds
        if self.worker is not None:
            self.worker.stop_claiming()
            await self._hand_everything_back(grace)
        try:
            if self._channels is not None:
                await asyncio.wait_for(self._channels.close(), DRAIN_SECONDS)
            await asyncio.wait_for(self.journal.drained(), DRAIN_SECONDS)
        except TimeoutError:
            log.warning("the store did not accept the last writes; recovery repeats them")
        await self.events.flush()
        with cut_off_after(LEAVE_SECONDS, self.store) if self._owns_store else contextlib.nullcontext():
            if self.worker is not None:
                await self.worker.leave()
            await self._shut()

    async def _hand_everything_back(self, grace: float) -> None:
        contexts = list(self.live.values())
        for context in contexts:
            context.stop.drain_requested()
            context.watch()
        await _all_left(contexts, grace)
        for context in contexts:
            if not context.stop.detached:
                hand_back(context)
        await _all_left(contexts, LAST_WRITE_SECONDS)
        for context in contexts:
            if not context.stop.detached:
                context.detach("the engine closed")
                if self.worker is not None:
                    self.worker.give_back_later(context)

    def drain_requested(self) -> None:
        self.background(self._hand_everything_back(self.stop_seconds))
        self.told_to_drain.set()

    def _metrics(self) -> list[Metric]:
        self._must_be_open()
        return process_metrics(self)

    @property
    def counts(self) -> Counts:
        """Counters of this process since it was opened: its writes, and those that the store could not save."""
        self._must_be_open()
        return self.journal.counter.counts

    @property
    def documents(self) -> Documents:
        """The documents of the store: versioned bytes under keys of collections, beside the runs."""
        self._must_be_open()
        if self._documents is None:
            self._documents = Documents(self._store, locked_with=lambda: self.encryption.locked_with)
        return self._documents

    @property
    def artifacts(self) -> Artifacts:
        """The artifacts of the store: large results as files beside it."""
        if self._artifacts is None:
            self._artifacts = Artifacts(self._store, self.documents, self._artifacts_folder)
        return self._artifacts

    async def workers(self) -> list[WorkerInfo]:
        """Return the workers of the store that are alive or hold a run."""
        self._must_be_open()
        return await self.call(self.store.list_workers)

    async def drain(self, worker: str) -> bool:
        """Tell a `worker`, by its id, to claim no more runs. Return whether such a worker is alive.

        The worker sees it with its next heartbeat, within 5 seconds. Its steps may finish for its `stop_seconds`; then
        other workers go on with its runs. A process of `keepstep worker` then ends.
        """
        mark = optional(self.store, OptionalStore.drain_worker)
        if mark is None:
            raise DefinitionError(f"{self.url} cannot mark its workers; stop worker {worker!r} with SIGTERM")
        is_alive = any(one.id == worker and one.alive for one in await self.workers())
        return is_alive and await self.call(mark, worker)

    async def _shut(self) -> None:
        self.closed = True
        await self.executors.close()
        log.removeFilter(self._filter)
        uninstall(self.loop)
        self.notify_waiters()
        for task in list(self._background):
            task.cancel()
        if self._background:
            await asyncio.wait(list(self._background), timeout=5.0)
        self.waiting.close()
        self._others.stop()
        self.journal.close()
        if self._documents is not None:
            await self.loop.run_in_executor(self._pool, self._documents.close)
            self._documents = self._artifacts = None
        if self._owns_store:
            await self.loop.run_in_executor(self._pool, self.store.close)
        self._value_pool.shutdown(wait=True)
        self._pool.shutdown(wait=True)

    # -- starting and finding runs ------------------------------------------------------------------------------------

    def known(self, name: str) -> Workflow[..., Any]:
        return self.workflows[name]

    @overload
    async def start(
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
        queue: Queue | str = "default",
        priority: int = 0,
        delay: float | timedelta = 0.0,
        key: str | None = None,
        deadline: float | timedelta | datetime | None = None,
        tags: dict[str, str] | None = None,
        dedupe: str | None = None,
        **kwargs: Any,
    ) -> RunHandle[Any]:
        """Start a run, durable before its first step; an existing `run_id` returns that run, never a second one.

        | option | means |
        |---|---|
        | `run_id` | the id of the run; a new one by default |
        | `queue` | the queue of the run, a `ks.Queue(...)` or a name; workers may serve some queues only |
        | `priority` | runs of a higher priority are claimed first in their queue; 0 by default |
        | `delay` | seconds to wait before the run starts |
        | `deadline` | seconds, a timedelta or an instant after which the run fails |
        | `tags` | texts by name, to search runs by |
        | `key` | whom the run is for: the keys of a queue take turns, and can be limited |
        | `dedupe` | unique among the queue's unfinished runs: a second start returns the first run |

        All other arguments are those of the `workflow`.
        """
        self._must_be_open()
        if isinstance(workflow, Bound):
            workflow, args, kwargs = workflow.workflow, workflow.args, workflow.kwargs
        workflow = definition_of(self.workflows, workflow)
        options = Options(run_id, queue_name(queue), priority, delay, key, deadline, tags, dedupe).checked(workflow)
        declared = queue if isinstance(queue, Queue) else DECLARED.get(options.queue)
        if declared is not None:  # it may be newer than this engine
            await self.queues.declare(declared)
        await self.queues.admit(options.queue)
        payload = None
        if (args and is_large(args)) or (kwargs and is_large(kwargs)):
            workflow.check_arguments(args, kwargs)
            payload = await self.off_loop(self.redaction.input_of, workflow, args, kwargs)
        create = new_run(self, workflow, args, kwargs, options, payload=payload)
        return await self._create(workflow, create, [[*args], kwargs])

    async def _create(self, workflow: Workflow[..., Any], create: Create, arguments: list[Any]) -> RunHandle[Any]:
        run, worker = create.run, self.worker if create.run.worker is not None else None
        if worker is not None:
            worker.births += 1
        try:
            answer = await self.journal.write(create)
        except BaseException:
            if self.worker is not None:
                self.worker.doubt()  # the run may exist anyway, leased to this worker
            raise
        finally:
            if worker is not None:
                worker.births -= 1
        if answer.verdict is Verdict.EXISTS:
            return self._existing(workflow, run, answer, arguments)
        self.queues.started(run.queue)
        if self.events.observed:
            self.events.emit(Event("run.created", run.id, run.created_at, run.workflow))
        if run.worker is None or self.worker is None or run.worker != self.worker.id:  # or the lease was lost meanwhile
            self.claim_soon()
            return RunHandle(self, run.id, workflow)
        context = take_up(self, workflow, Claim(run, Lease(run.id, run.worker, 1)))
        self.entered(context)
        if is_large_text(run.input):
            self.background(self.runner.begin_with_large_input(context))  # continues even if the caller is cancelled
        else:
            self.runner.begin(context)
        return RunHandle(self, run.id, workflow, context)

    def _existing(self, workflow: Workflow[..., Any], run: Run, answer: Answer, arguments: list[Any]) -> RunHandle[Any]:
        """Return a handle on the run that is there already: with the same id, or with the same `dedupe`."""
        if answer.about and answer.about != run.id:
            return RunHandle(self, answer.about, self.workflows.get(answer.run.workflow) if answer.run else None)
        if answer.run is not None:
            check_same(self, workflow, run, answer.run, arguments)
        return RunHandle(self, run.id, workflow)

    async def get(self, run_id: str) -> RunHandle[Any]:
        """Return a handle on the run with the id `run_id`, or raise `RunNotFound`."""
        self._must_be_open()
        run = await self.read(self.store.get_run, run_id)
        if run is None:
            raise RunNotFound(f"no run {run_id!r} in {self.store.url}", run_id)
        return RunHandle(self, run_id, self.workflows.get(run.workflow))

    async def list(self, /, query: RunQuery | None = None, **filters: Any) -> RunPage:
        """Return one page of runs, newest first. Runs with damaged rows are listed in its `unreadable`.

        `query` is a `ks.RunQuery`; `filters` are its fields.
        """
        self._must_be_open()
        if query is None:
            query = RunQuery(**{**filters, "status": _statuses(filters.get("status"))})
        with looking():
            return await self.call(self.store.list_runs, query)

    async def fork(
        self,
        origin: str,
        at: int | None = None,
        *,
        step: str | None = None,
        run_id: str | None = None,
        input: Any = None,  # noqa: A002 - the name users expect
        results: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        next: str | None = None,  # noqa: A002 - as in `RunHandle.edit`
        signals: bool = True,
        reason: str = "",
        actor: str = "",
    ) -> RunHandle[Any]:
        """Start a new run with a copy of the records of `origin` up to `at`, or up to before a `step`.

        The original run is only read. `run_id` is the id of the new run; `reason` and `actor` are for its audit.
        `input` replaces the input, `results` results of recorded steps, `state` values in a graph's state, and `next`
        the next step. Signals that the copied records have not read are copied, unless `signals` is False.
        """
        from ..history.fork import Edits, fork  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        edits = Edits(input, results, state, next, signals)
        who = actor or self.actor
        name, workflow = await fork(
            self, origin, at=at, step=step, run_id=run_id, edits=edits, reason=reason, actor=who
        )
        return RunHandle(self, name, self.workflows.get(workflow))

    def set_aside(
        self,
        run: RunDriver,
        kind: str,
        reason: str,
        *,
        phase: str = "resume",
        traceback: str = "",
        problems: Sequence[str] = (),
        handler: str = "",
    ) -> None:
        """Leave a run to a person, with the reason; whatever its code does no longer counts."""
        error = Reason(kind, reason, phase, traceback, tuple(problems), handler)
        set_aside(self, run, error)

    async def cancel_successor(self, run_id: str) -> None:
        """Cancel the successor of an ended run, if there is one."""
        with contextlib.suppress(RunError):
            newest = await RunHandle[Any](self, run_id).latest()
            if newest.id != run_id:
                await newest.cancel("its parent was cancelled")

    async def rekey(self) -> Rekeyed:
        """Encrypt the data keys of all runs with the current key, so that older keys can be dropped."""
        self._must_be_open()
        return await self.encryption.rekey(self)

    @property
    def care(self) -> Care:
        """Maintenance of the store: verify, repair, purge, erase, export, load, copy."""
        from ..care.facade import Care  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        return Care(self)

    async def schedule(self, name: str, workflow: Any, when: Schedule, /, *args: Any, **kwargs: Any) -> None:
        """Let workers start the `workflow` at the ticks of `when`, a `ks.Cron` or `ks.Every`, with these arguments.

        `name` identifies the schedule: the same name changes it.
        """
        await self.schedules.add(name, workflow, when, args, kwargs)

    def notices(
        self, topic: Topic, run: Run, *, text: str = "", key: str = "", at: datetime | None = None
    ) -> Sequence[Send]:
        return self.channels.notices(topic, run, text=text, key=key, at=at) if CHANNELS else []

    def breaker_opened(self, service: str) -> None:
        if CHANNELS:
            self.channels.breaker_opened(service)

    @property
    def channels(self) -> Channels:
        """The channels that tell people about runs: list them, and test one."""
        from .channels import Channels  # noqa: PLC0415 - only with a channel

        if self._channels is None:
            self._channels = Channels(self)
        return self._channels

    @property
    def schedules(self) -> Schedules:
        """The schedules of the store: list, get, add, pause, resume, trigger, backfill, remove."""
        from .schedules import Schedules  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        return Schedules(self)

    @property
    def agents(self) -> Agents:
        """The agents of the store: list and get them, drain and resume one, probe one."""
        from .agents import Agents  # noqa: PLC0415 - only with agents

        if self._agents is None:
            self._agents = Agents(self)
        return self._agents

    async def declare_queue(self, queue: Any) -> None:
        await self.queues.declare(queue)

    @property
    def topics(self) -> Topics:
        """The topics of the store: publish, list, get, and the newest messages."""
        from .topics import Topics  # noqa: PLC0415 - only with a topic

        self._must_be_open()
        return Topics(self)

    def is_limited(self, queue: str) -> bool:
        return self._queue_limits.is_limited(queue)

    @property
    def queues(self) -> Queues:
        """The queues with limits: list and get them, set and reset their limits."""
        return self._queue_limits

    @property
    def services(self) -> Services:
        """The services: list and get them, set and reset their limits, open and close their breakers."""
        return self._services

    async def signal(self, run_id: str, name: str, payload: Any = True, *, id: str = "") -> None:  # noqa: A002
        """Send the run `run_id` a durable message: a `name` and a `payload`. With an `id` it is stored once."""
        await RunHandle[Any](self, run_id).signal(name, payload, id=id)

    async def broadcast(self, runs: Iterable[Any], name: str, payload: Any = True) -> Sequence[str]:
        """Send several runs the same signal in one commit. Return the ids of those that it was sent to.

        `runs` are ids or handles. Runs that have ended or do not exist are left out.
        """
        from ..kernel.asking import targets_of  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        targets, signal_id = targets_of(runs), new_id("signal")
        sent = await asyncio.gather(
            *(RunHandle[Any](self, one).signal(name, payload, id=signal_id) for one in targets), return_exceptions=True
        )
        for outcome in sent:
            if isinstance(outcome, BaseException) and not isinstance(outcome, AlreadyFinished | RunNotFound):
                raise outcome
        return [one for one, outcome in zip(targets, sent, strict=True) if outcome is None]

    async def publish(self, topic: str, *values: Any, timeout: float | timedelta | None = None) -> None:  # noqa: ASYNC109
        """Publish messages to a `topic`, by name; at most 200. While it is full, wait, or raise `TimedOut`."""
        await self.topics.publish(topic, *values, timeout=timeout)

    async def complete(self, token: str, value: Any = True) -> None:
        """End the wait of a `ks.callback` with a value.

        An unknown token is `UnknownToken`. The same value may be sent again; another one is `AlreadyFinished`.
        """
        from .tokens import complete  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        await complete(self, token, value)

    async def fail(self, token: str, error: BaseException | str, *, type: str = "") -> None:  # noqa: A002
        """End the wait of a `ks.callback` with an error, which is raised in the workflow as `WaitFailed`.

        `type` names the class of an error that is given as text.
        """
        from .tokens import fail  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        await fail(self, token, error, type)

    async def beat(self, token: str) -> None:
        """Tell the wait of a `ks.callback` with a heartbeat that its answer is still to come."""
        from .tokens import beat  # noqa: PLC0415 - rarely needed

        self._must_be_open()
        await beat(self, token)


async def _all_left(contexts: Sequence[RunDriver], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for context in contexts:
                await context.left()


def _replica_in_environment() -> dict[str, str]:
    """Return the option for the replica of a store that the environment names, too."""
    replica = os.environ.get(REPLICA_VARIABLE)
    return {"replica": replica} if replica and os.environ.get(STORE_VARIABLE) else {}


def _statuses(wanted: Any) -> frozenset[Status]:
    """Return one or several statuses, given by name or as values."""
    if wanted is None:
        return frozenset()
    try:
        return frozenset(Status(one) for one in ([wanted] if isinstance(wanted, str) else wanted))
    except ValueError as error:
        raise DefinitionError(f"{error}; choose from {', '.join(Status)}") from None


_warned = False


def _warn_of_lost_context(name: str) -> None:
    """Warn once that a step called in a thread of the user's own is not recorded."""
    global _warned  # noqa: PLW0603 - once per process
    if not _warned and threading.current_thread() is not threading.main_thread():
        _warned = True
        log.warning("step %r was called in a thread that Keepstep did not start, so it is not recorded", name)
