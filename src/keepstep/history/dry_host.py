"""A host that replays one recorded run in memory, without running bodies and without storing anything."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar

from ..executors.thread import ThreadPool
from ..kernel.idle_watch import IdleWatch
from ..kernel.parking import LINGER_SECONDS
from ..kernel.redaction import Redaction
from ..kernel.runner import Runner
from ..kernel.stall import STALL_SECONDS
from ..kernel.strands import install, uninstall
from ..model import Claim, Lease, Status
from ..policies import RecoveryLimit
from ..ports import Advance, Answer, Change, Verdict, boot_seconds
from ..records.record import MAX_VALUE, born, seal
from ..values import Redactor
from .virtual_time import VirtualClock, VirtualLoop

if TYPE_CHECKING:
    from ..kernel.driver import End, RunDriver
    from ..kernel.log import RecoveryPlan
    from ..model import Run, Signal
    from ..policies.classify import Rule
    from ..policies.recovery import Recovery
    from ..ports import Clock, Create, Row, Send
    from ..records.keys import Cipher
    from ..records.record import Record
    from ..workflows.definition import Step, Workflow
    from ..workflows.recovery import RecoveryInfo

T = TypeVar("T")

#: Name of the worker in the lease of the replayed run.
WORKER = "dry replay"
#: Maximum time in seconds for the code to close its open generators after the replay.
CLOSE_SECONDS = 1.0
_DONE = Answer(Verdict.DONE)


def _ignored(_host: Any, *_: Any, **__: Any) -> None:
    """Ignore a notice: a dry replay has no worker, no other run and no observer."""


async def _ignored_later(_host: Any, *_: Any) -> None:
    """Ignore a notice that is awaited."""


class NoExecutors:
    """The executors of a dry replay, in which no body runs."""

    def of(self, step: Step[..., Any], workflow: Workflow[..., Any]) -> Any:
        """Return nothing that performs a body."""

    def width(self, step: Step[..., Any], workflow: Workflow[..., Any]) -> int | None:
        """Return no limit for the items of a map: none begins."""
        return None


class DryHost:
    """The host of one run that is only replayed. Steps without a recorded outcome are held.

    `run` is the run in memory, once it has been entered. `asked` holds the keys of steps that the code has begun in
    the middle of its history. `broken` is called instead of setting the run aside, with the kind, the
    reason and all problems.
    """

    url = "a dry replay"
    transactional = False
    forgetting = None
    tracer = None
    shares: Any = None  # no attempt is made
    agents: Any = None  # no task is given to an agent
    documents: Any = None  # no body runs that would use them
    executors = NoExecutors()
    fresh_until = math.inf
    linger_seconds = LINGER_SECONDS
    stall_seconds = STALL_SECONDS

    def __init__(
        self,
        workflow: Workflow[..., Any],
        create: Create,
        broken: Callable[[str, str, tuple[str, ...]], None],
        *,
        may_hold_secrets: bool = False,
    ) -> None:
        self._create = create
        self._broken = broken
        self._tasks: set[asyncio.Task[Any]] = set()
        self.run: RunDriver | None = None
        self.asked: list[str] = []
        self.workflows = {create.run.workflow: workflow}
        self.loop = asyncio.get_running_loop()
        self.clock: Clock = VirtualClock(self.loop)
        self.seconds = boot_seconds(self.clock)
        self.context = Context()
        self.recovery_limit = RecoveryLimit()
        self.rules: tuple[Rule, ...] = ()
        self.encryption = _PlainText(may_hold_secrets=may_hold_secrets)
        self.redaction = Redaction(Redactor(), MAX_VALUE, self.encryption)
        self.events = _NoEvents()
        self.signal_reader = _NoSignals()
        self.idle_watch = IdleWatch(self.loop, install(self.loop))
        self.journal = _DryJournal(self, list(create.rows))
        self.runner = Runner(self)
        self.run_threads = ThreadPool(1, "keepstep-replay")
        self.step_threads = self.hook_threads = ThreadPool(1, "keepstep-migrate")
        if isinstance(self.loop, VirtualLoop):
            self.loop.wait_while(self._is_in_thread)

    async def drive(self) -> None:
        """Drive the run as a worker that has claimed it."""
        run = self._create.run
        await self.runner.drive(Claim(run, Lease(run.id, WORKER, run.epoch), before=Status.QUEUED))

    @property
    def end(self) -> End | None:
        """The end of the replayed run; None if it has not ended."""
        return self.journal.end if self.run is None or self.run.end is None else self.run.end

    async def close(self) -> None:
        """Detach the run, and restore the loop."""
        if self.run is not None:
            self.run.detach("the replay is over")
        if self._tasks:  # they close open generators of the code
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        uninstall(self.loop)

    def _is_in_thread(self) -> bool:
        """Whether a plain def workflow or `migrate=` function runs in a thread, which takes real time."""
        busy = self.run is not None and self.run.thread.busy and not self.run.stop.detached
        return busy or self.hook_threads.at_work > 0

    # -- the recorded run

    def notices(self, *_: Any, **__: Any) -> Sequence[Send]:
        return ()

    async def stored_run(self, run_id: str) -> Run | None:
        return self._create.run if run_id == self._create.run.id else None

    newest_of_series = stored_run

    async def records(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> Sequence[Row]:
        rows = [row for row in self.journal.rows if row.seq > after]
        if kinds:
            wanted = frozenset(kinds)
            rows = [row for row in rows if row.kind in wanted]
        return rows[:limit]

    async def signals(self, run_id: str, after: int = 0, limit: int = 1000) -> Sequence[Signal]:
        return ()

    async def is_newer(self, run: Run) -> bool:
        return False

    async def off_loop(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    def packed(self, data: bytes) -> bytes | None:
        return None

    # -- actions of the run

    left = progressed = interrupted = give_back_later = report_progress = _ignored
    claim_soon = signalled = notify_waiters = _ignored
    put_back = cancel_successor = _ignored_later

    def entered(self, run: RunDriver) -> None:
        self.run = run
        run.stop.replay_only()

    def lease_is_fresh(self) -> bool:
        return True

    def is_full(self) -> bool:
        return False

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
        if not run.stop.detached:
            self._broken(kind, reason, tuple(problems) or (reason,))
            run.detach(reason)

    async def recovery_info(self, run: RunDriver, handler: str) -> RecoveryInfo:
        raise NotImplementedError("a dry replay asks no recovery handler")

    async def plan_recovery(self, run: RunDriver, answer: Recovery) -> RecoveryPlan:
        raise NotImplementedError("a dry replay asks no recovery handler")

    async def perform(self, call: Any) -> None:
        """Hold a step that begins in the middle of the history, because only a worker can perform it."""
        self.asked.append(call.key)
        await self.loop.create_future()

    def background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.beside(coroutine, Context())

    def beside(self, coroutine: Coroutine[Any, Any, T], context: Context) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(coroutine, loop=self.loop, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard, context=self.context)
        return task


class _DryJournal:
    """Confirms every draft of the run without storing it. Records of a migration are kept here and read back."""

    refused = False

    def __init__(self, host: DryHost, rows: list[Row]) -> None:
        self._host = host
        self._scheduled = False
        self.rows = rows
        #: The end that is written again for a run whose records say that it had ended.
        self.end: End | None = None

    def add(self, run: RunDriver, *, now: bool = False) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._host.loop.call_soon(self._flush, run, context=self._host.context)

    write_pending = add

    def holds(self, run: RunDriver) -> bool:
        return self._scheduled

    async def write(self, change: Change | Callable[[], Change]) -> Answer:
        made = change() if callable(change) else change
        if isinstance(made, Advance):
            self.rows += made.rows
            if made.status is not None and made.status.finished:
                self.end = (made.status, b"null", None, None)
        return _DONE

    async def drained(self) -> None:
        while self._scheduled:  # noqa: ASYNC110 - it lasts until the next pass of the loop
            await asyncio.sleep(0)

    def _flush(self, run: RunDriver) -> None:
        self._scheduled = False
        if run.stop.detached or not run.pending:
            return
        drafts = run.take_drafts()
        change = Advance(run.id, run.worker, run.epoch, run.seq)
        rows: list[Row] = []
        checksum = run.checksum
        try:
            for record in [draft.record for draft in drafts if draft.record is not None]:
                row, checksum = seal(record, run.seq + len(rows) + 1, checksum)
                rows.append(row)
        except Exception as error:  # noqa: BLE001 - an error ends the replay, which reports it
            run.engine_failed(error)
            return
        change.rows, change.checksum = rows, checksum
        run.committed(drafts, change, _DONE, run not in self._host.idle_watch.busy())


class _PlainText:
    """The encryption of a run in plain text, as every replayed run is, even if it was stored encrypted."""

    def __init__(self, *, may_hold_secrets: bool) -> None:
        self.of_everything = may_hold_secrets

    def cipher(self, run: Run) -> Cipher | None:
        return None

    def input(self, run: Run) -> bytes:
        return run.input

    def born(self, run: Run, first: Record | None = None) -> Create:
        return born(run, first)

    def cannot_read(self, error: Exception) -> None:
        """Do nothing: plain text can always be read."""


class _NoEvents:
    """The events of a dry replay, which has no observers."""

    observed = False
    logged = True
    observe = emit_record = ended = repeat = emit = _ignored


class _NoSignals:
    """The signal reader of a dry replay, whose only signals are those recorded as received."""

    begun = fetch = _ignored
    check_missed = _ignored_later
