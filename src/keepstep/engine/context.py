"""One incarnation of a run in this process: it stands between the code of the workflow and the journal.

Outcomes reach the code one at a time, in sequence order, and the next only when the run's tasks have come to rest: live
exactly as on replay.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import CheckpointCorrupt, StoreError
from ..model import ErrorInfo, Kind, Signal, Status
from ..model.signal import CANCEL, PAUSE, RESERVED, RESUME
from ..ports import CURRENT, Answer, Send, Verdict, instant
from ..stores.records import Record
from .branch import ASKED, CANCELLED, DONE, NEW, PATIENCE, Branch, Detached, DurableCall, StepCall
from .history import History
from .journal import Draft, head_move
from .quiet import only_waits

if TYPE_CHECKING:
    from ..model import Claim
    from ..workflows.definition import Workflow
    from .engine import Engine

T = TypeVar("T")

log = logging.getLogger("keepstep")

#: A wait shorter than this stays in memory; a longer one puts the run away as soon as nothing else happens in it.
SHORT_WAIT_SECONDS = 2.0
#: A run that waits for a signal or a child stays in memory this long, in case the answer comes at once.
LINGER_SECONDS = 1.0
#: A workflow of more steps than this should continue as a new run.
MANY_STEPS = 10_000

#: A replay lets the loop turn after so many outcomes, so that other runs go on beside it.
BREATHE_EVERY = 32

DEADLINE = "ks:deadline"

#: Tasks of put-away runs whose code swallows every end; they are kept, so that they are never collected.
_HANGING: list[asyncio.Task[Any]] = []


def fulfil(future: asyncio.Future[T], value: T) -> None:
    """Give a future its value, unless whoever waited has left."""
    if not future.done():
        future.set_result(value)


class Wait:
    """A call that waits for a time, a signal, or whichever comes first."""

    __slots__ = ("call", "due", "name", "on_due", "on_signal", "timer")

    def __init__(
        self,
        call: Any,
        due: float | None,
        on_due: Callable[[], None] | None,
        name: str | None = None,
        on_signal: Callable[[Signal], None] | None = None,
    ) -> None:
        self.call = call
        self.due = due
        self.on_due = on_due
        self.name = name
        self.on_signal = on_signal
        self.timer: asyncio.TimerHandle | None = None


#: How a run ended: its status, its result, its error, and the run that goes on for it.
End = tuple[Status, bytes, ErrorInfo | None, str | None]


class RunContext:
    """A claimed run: its place in the journal, what its code has asked, and what it waits for."""

    def __init__(self, engine: Engine, workflow: Workflow[..., Any], claim: Claim) -> None:  # noqa: PLR0915 - one list
        run = claim.run
        self.engine = engine
        self.workflow = workflow
        self.claim = claim
        self.run = run
        self.id = run.id
        self.seed = run.seed
        self.epoch = claim.lease.epoch
        self.worker = claim.lease.worker
        self.seq = run.seq
        self.checksum = run.checksum
        self.loop = engine.loop
        self.thread_id = engine.thread_id
        # the journal's side
        self.pending: list[Draft] = []
        self.in_flight = 0
        self.unflushed = 0
        # the code's side
        self.main: asyncio.Future[Any] | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.bodies: dict[StepCall[Any], asyncio.Task[None]] = {}
        self.performing = 0
        self.thread_busy = False
        self.blocked: threading.Event | None = None
        self.thread_cancel = False
        self.moves = 0
        self.moves_seen = -1
        # replay and delivery
        self.history: History | None = None
        self.asked: dict[str, DurableCall[Any]] = {}
        self.held: dict[DurableCall[Any], Context] = {}  # each with the context variables of its code
        self.unrecorded_cancels = 0
        self.telling = False
        self.arrived: deque[Draft] = deque()
        self.now_at: datetime = run.created_at
        self.generation = 0
        self.tried: dict[str, Any] = {}
        self.marks: dict[str, Record] = {}
        self.notes: dict[str, Record] = {}
        self.patches: dict[str, bool] = {}
        self.steps = 0
        self.answered_now = 0
        # waits and signals
        self.waits: dict[Any, Wait] = {}
        self.inbox: list[Signal] = []
        self.consumed: set[int] = set()
        self.signals_seen = 0
        self.children: dict[str, str] = {}
        self.child_results: dict[str, bytes] = {}
        # ends
        self.detached = ""
        self.told_end = 0
        self.holding = False
        self.pausing: Signal | None = None
        self.draining = False
        self.cancelling = False
        self.cancel_signal: Signal | None = None
        self.timed_out = False
        self.moving = False
        self.deadline_timer: asyncio.TimerHandle | None = None
        self.linger_timer: asyncio.TimerHandle | None = None
        self.lingered = -1
        self.finishing = False
        self.alone = run.recoveries > 0
        self.end: End | None = None
        self._leaving: list[asyncio.Future[None]] = []

    # -- time and writing ---------------------------------------------------------------------------------------------

    def time(self) -> datetime:
        """Now, for a record; a clock that was set back never makes time run backwards within a run."""
        now = instant(self.engine.clock.now())
        return max(self.now_at, now)

    @property
    def deadline_at(self) -> datetime | None:
        """When the run must have ended; a person who retries it takes the deadline off."""
        return None if self.generation else self.run.deadline_at

    def append(
        self, record: Record, call: Any = None, then: Callable[[Answer], None] | None = None, *, last: bool = False
    ) -> None:
        """Put a record into the journal; `call` is settled in order, and `then` told at once, when it is durable.

        `last` says that the caller, who is no code of the workflow, does nothing more: the record may be written now.
        """
        if self.detached:
            return
        draft = Draft(record, call, then)
        durability = self.workflow.durability
        if durability.choice != "every_step" and then is None and record.error is None:
            # A failure is flushed at once: the error that the code sees names its record, for a later retry.
            self.unflushed += 1
            if not durability.flushes(self.unflushed):
                self.pending.append(draft)
                if call is not None:
                    self.arrived.append(Draft(record, call))
                    draft.call = None
                    self.watch()
                return
        self.unflushed = 0
        self.engine.journal.add(self, draft, now=last and self.engine.rest.nothing_ready())

    def append_special(
        self,
        record: Record | None,
        change: dict[str, Any],
        then: Callable[[Answer], None] | None = None,
        refused: Callable[[Answer], None] | None = None,
        call: Any = None,
    ) -> None:
        """Put a record into the journal that carries more than itself: a message, a child, a move of the head."""
        if self.detached:
            return
        self.unflushed = 0
        self.engine.journal.add(self, Draft(record, call, then, refused, change))

    def may_start_body(self) -> bool:
        """Whether the lease is fresh enough to start something with it."""
        if self.detached:
            return False
        if self.engine.lease_is_fresh():
            return True
        self.detach("its lease is too old")
        self.engine.give_back_later(self)
        return False

    async def durable(self, record: Record) -> None:
        """Append a record and come back when it is durable."""
        future: asyncio.Future[Answer] = self.loop.create_future()
        self.append(record, then=partial(fulfil, future))
        await future

    def committed(self, drafts: list[Draft], answer: Answer, *, progress: bool = True) -> None:
        """The store has them: tell whoever waits."""
        if self.detached:
            return
        observed = self.engine.observed
        if self.alone and progress:
            self.alone = False
            self.engine.progressed(self)
        for draft in drafts:
            if draft.call is not None:
                self.arrived.append(draft)
            if draft.then is not None:
                draft.then(answer)
            if observed and draft.record is not None:
                self.engine.tell_record(self, draft.record)
        if self.arrived and not self.engine.rest.has_ready(self) and not self.thread_busy:
            self.at_rest()
        else:
            self.watch()

    def refused(self, drafts: list[Draft], answer: Answer) -> None:
        """The store refused them: either the lease is gone, or the one who asked has a way out."""
        handler = drafts[0].refused
        if answer.verdict is Verdict.FENCED or handler is None:
            if answer.verdict is not Verdict.FENCED:
                log.error("run %s: the store refused a change: %s %s", self.id, answer.verdict, answer.about)
            self.detach("its lease was lost")
            self.engine.observe("lease.lost", self)
        else:
            handler(answer)

    def halt(self, error: BaseException) -> None:
        """The store could not save: the run is put down where it stands, to be recovered."""
        log.error("run %s is halted, recoverable: %s", self.id, error)
        self.engine.observe("run.halted", self, error=str(error))
        self.detach("the store could not save")
        self.engine.give_back_later(self)

    # -- delivering ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        if not self.detached:
            self.engine.rest.watch(self)

    def at_rest(self) -> None:
        """The code has come to rest: deliver the next outcome, or see what else there is to do."""
        self.telling = True
        try:
            self._tell_next()
        finally:
            self.telling = False

    def cancelled_from_outside(self) -> bool:
        """Whether a cancel comes from neither the code nor the engine: a shutdown, which is not an end of the run."""
        scope = CURRENT.get()
        own = scope is not None and not scope.in_step and scope.run is self
        if own or self.telling or self.cancelling or self.timed_out or self.finishing or self.detached:
            return False
        self.detach("its tasks were cancelled from outside")
        self.engine.give_back_later(self)
        return True

    def _tell_next(self) -> None:
        while not self.detached:
            if self.history is not None:
                if self._replay_next(self.history):
                    return
            elif self.arrived:
                if self.engine.replay_always and self._forget():
                    return
                if self._deliver(self.arrived.popleft()):
                    return
            else:
                self._idle()
                return

    def _deliver(self, draft: Draft) -> bool:
        """Deliver what has just been recorded; whether to wait until the code has come to rest again."""
        record = draft.record
        if record is None or draft.call is None:
            return False
        if record.finished_at is not None:
            self.now_at = record.finished_at
        self.moves += 1
        self.steps += 1
        if self.steps == MANY_STEPS:
            log.warning("run %s has made %d steps; let it go on as a new run with ks.continue_as", self.id, self.steps)
        if not draft.call.settle(record):
            return False
        if self.arrived:
            self.watch()
        return True

    def _forget(self) -> bool:
        """Instead of delivering, hand the run back, so that what has arrived is told by replay."""
        if self.performing or self._is_writing() or self.holding or self.finishing:
            return self.moving
        if self.main is None or self.main.done():
            return False
        if not self.moving:
            self._move(Status.QUEUED, self.engine.clock.now(), (), "forgotten")
        return True

    def _replay_next(self, history: History) -> bool:
        """Deliver the next recorded outcome; whether to wait until the code has come to rest again."""
        if not history.order:
            self._replayed()
            return False
        entry = history.order[0]
        record = entry.record
        if record is None:
            self._refill(history, entry.seq)
            return True
        if entry.key.startswith(RESERVED):
            history.order.popleft()
            self.now_at = record.finished_at or self.now_at
            self.control(record)
            self.watch()
            return True
        call = self.asked.get(entry.key)
        if call is None or (entry.cancelled and call.state != CANCELLED):
            if not self._can_still_ask(history):
                asked = ", ".join(sorted([*self.asked, *(c.key for c in self.held)])) or "nothing"
                what = "to be cancelled again" if call is not None else "to be asked for"
                self.mismatch(
                    f"seq {entry.seq} recorded {entry.key}, which waits {what}, but the code waits for {asked}"
                )
            return True
        history.order.popleft()
        del self.asked[entry.key]
        del history.entries[entry.key]
        if not entry.cancelled:  # the code made it cancelled itself, and learnt nothing from it
            self.now_at = record.finished_at or self.now_at
        if call.settle(record):
            self.watch()
            return True
        return False

    def _can_still_ask(self, history: History) -> bool:
        """Whether the code may yet ask for the next recorded outcome, or need not any more."""
        if self.finishing or self.main is None or self.main.done() or not only_waits(self):
            return True
        return self.workflow.on_change == "compatible" and self._go_round(history)

    def _go_round(self, history: History) -> bool:
        """Under `compatible`, code may ask for something new amid what is recorded: answer what it does ask for."""
        for entry in history.order:
            call = self.asked.get(entry.key)
            if call is not None and (not entry.cancelled or call.state == CANCELLED):
                history.order.remove(entry)
                history.order.appendleft(entry)
                self.watch()
                return True
        if self.arrived:
            draft = self.arrived.popleft()
            if draft.call is not None and draft.record is not None:
                self.now_at = draft.record.finished_at or self.now_at
                draft.call.settle(draft.record)
            self.watch()
            return True
        held, self.held = self.held, {}
        for new, context in held.items():
            context.run(new.begin_live)
        return bool(held or self.performing or self._is_writing())

    def answer_now(self, call: DurableCall[Any]) -> bool:
        """Replay without a pass of the loop: what the only task awaits is the next outcome, so the run is at rest."""
        history, entry = self.history, call.entry
        if history is None or entry is None or self.tasks or self.detached or asyncio.current_task() is not self.main:
            return False
        order = history.order
        if not order or order[0] is not entry or entry.cancelled or entry.record is None:
            return False
        self.answered_now += 1
        if self.answered_now % BREATHE_EVERY == 0 or self.engine.rest.has_ready(self):
            return False
        order.popleft()
        del history.entries[entry.key]
        self.now_at = entry.record.finished_at or self.now_at
        call.state = ASKED
        call.settle(entry.record)
        return True

    def _replayed(self) -> None:
        """Everything recorded has been told; what was held back may start now."""
        self.history = None
        self.engine.observe("run.resumed", self)
        self._release_held()

    def cancel_recorded(self, _: Answer) -> None:
        self.unrecorded_cancels -= 1
        self._release_held()

    def _release_held(self) -> None:
        if self.holding or self.unrecorded_cancels or self.history is not None:
            return
        held, self.held = self.held, {}
        for call, context in held.items():
            if call.state == ASKED:
                context.run(call.begin_live)

    def _refill(self, history: History, seq: int) -> None:
        async def refill() -> None:
            try:
                rows = await self.engine.read(self.engine.store.list_checkpoints, self.id, seq - 1)
                history.refill(rows, seq - 1)
            except CheckpointCorrupt as error:
                self.engine.runner.set_aside(self, "CheckpointCorrupt", str(error))
            except StoreError as error:
                self.halt(error)
            self.watch()

        self.engine.background(refill())

    def recorded(self, call: DurableCall[Any], key: str) -> Any:
        """The recorded outcome of a call, checked: another question than the recorded one is found here."""
        history = self.history
        if history is None or self.detached:
            return None
        entry = history.entries.get(key)
        if entry is not None:
            if entry.digest != call.digest:
                self.mismatch(f"{key} was recorded with another input at seq {entry.seq}; the code or its data changed")
            elif entry.ordinal != call.ordinal and self.workflow.on_change != "compatible":
                self.mismatch(
                    f"{key} was recorded as call {entry.ordinal} of its branch and is now call {call.ordinal}"
                )
            return entry
        place = history.places.get((call.branch.path, call.ordinal))
        if place is not None and place != key and self.workflow.on_change != "compatible":
            self.mismatch(
                f"call {call.ordinal} of branch {call.branch.path or 'root'} was recorded as {place}, "
                f"and the code asks for {key}"
            )
        return None

    def mismatch(self, message: str) -> None:
        """The code no longer fits its history: the run is set aside, nothing new has run."""
        if threading.get_ident() != self.thread_id:  # a plain def workflow asks from its own thread
            self.loop.call_soon_threadsafe(self.mismatch, message)
            return
        self.engine.runner.set_aside(self, "ReplayMismatch", f"replay mismatch: {message}")

    # -- signals ------------------------------------------------------------------------------------------------------

    def receive(self, signals: list[Signal]) -> None:
        """Take in signals that the store has for the run."""
        if self.detached:
            return
        for signal in signals:
            if signal.seq <= self.signals_seen:
                continue
            self.signals_seen = signal.seq
            if signal.seq in self.consumed:
                continue
            if signal.name in (CANCEL, PAUSE, RESUME):
                self._steer(signal)
            else:
                self.inbox.append(signal)
                self._match()

    def _match(self) -> None:
        for wait in list(self.waits.values()):
            if wait.name is not None and wait.on_signal is not None:
                signal = self.take_signal(wait.name)
                if signal is not None:
                    self.end_wait(wait.call)
                    wait.on_signal(signal)

    def take_signal(self, name: str) -> Signal | None:
        """The oldest unread signal of a name, read with this."""
        for index, signal in enumerate(self.inbox):
            if signal.name == name:
                return self.inbox.pop(index)
        return None

    def put_back(self, signal: Signal) -> None:
        """A signal that was taken for a wait which no longer wants it: the next wait for it hears it."""
        self.inbox.append(signal)
        self.inbox.sort(key=lambda one: one.seq)
        self._match()

    def _steer(self, signal: Signal) -> None:
        if signal.name == CANCEL:
            recorded = self.history is not None and CANCEL in self.history.entries
            if not self.cancelling and not recorded:  # a second one would cut the cleanup short
                self.cancelling = True
                self.pausing = None
                self.holding = True  # nothing new starts between the cancel and its delivery
                self.cancel_signal = signal
                self.cancel_when_settled()
        elif signal.name == PAUSE:
            if not self.cancelling and not self.finishing:
                self.pausing = signal
                self.holding = True
                self.watch()
        else:
            self.append(self._signal_record(signal))
            if self.pausing is not None:
                self.append(self._signal_record(self.pausing))
            self.unhold()

    def cancel_when_settled(self) -> None:
        """Record the cancel, but not while an at-most-once step is under way: its outcome must not be left in doubt."""
        signal = self.cancel_signal
        if signal is None or any(call.step.at_most_once and not call.doubtful for call in self.bodies):
            return
        self.cancel_signal = None
        self.append(self._signal_record(signal), Control(self))

    def unhold(self) -> None:
        self.pausing = None
        if self.holding and not self.draining:
            self.holding = False
            self._release_held()

    def _signal_record(self, signal: Signal) -> Record:
        data = {"signal": signal.seq, "sender": signal.sender}
        record = Record(self.id, Kind.SIGNAL.value, step=signal.name, worker=self.worker, trigger="manual", data=data)
        record.finished_at = self.time()
        record.value = msgspec.Raw(signal.payload)
        return record

    def control(self, record: Record) -> None:
        """Deliver what steers the whole run: a cancel, or the deadline."""
        if record.step == CANCEL:
            self.cancelling = True
            self._cancel_children()
            self._cancel_code()
            self.holding = self.draining
            self.watch()
        elif record.step == DEADLINE:
            self.timed_out = True
            self._cancel_code()
            self.holding = self.draining
            self.watch()

    def _cancel_code(self) -> None:
        self.moves += 1
        if isinstance(self.main, asyncio.Task):
            self.main.cancel()
        elif self.blocked is not None:
            self.thread_cancel = True
            self.thread_busy = True
            self.blocked.set()
            self.blocked = None
        else:
            self.thread_cancel = True

    def _cancel_children(self) -> None:
        for child in self.children.values():
            signal = Signal(child, CANCEL, id=f"cancel:{self.id}", sender=f"run {self.id}", sent_at=self.time())
            self.append_special(
                None, {"sends": [Send(signal)], "progress": False}, refused=partial(self._too_late, child)
            )

    def _too_late(self, child: str, _: Answer) -> None:
        """The child has ended; if another run goes on for it, that one is cancelled."""
        self.engine.background(self.engine.cancel_successor(child))

    # -- waiting ------------------------------------------------------------------------------------------------------

    def add_wait(self, wait: Wait) -> None:
        """Wait in memory; if nothing else happens for long, the run is put away with what makes it due."""
        self.waits[wait.call] = wait
        if wait.due is not None:
            self._arm(wait)
        self.watch()

    def _arm(self, wait: Wait) -> None:
        assert wait.due is not None  # noqa: S101
        delay = max(0.0, wait.due - self.engine.clock.now())
        wait.timer = self.loop.call_later(min(delay, 86_400.0), self._due, wait, context=self.engine.context)

    def _due(self, wait: Wait) -> None:
        if self.detached or self.waits.get(wait.call) is not wait or wait.due is None:
            return
        if self.engine.clock.now() < wait.due:
            self._arm(wait)
            return
        self.end_wait(wait.call)
        if wait.on_due is not None:
            wait.on_due()

    def end_wait(self, call: Any) -> None:
        wait = self.waits.pop(call, None)
        if wait is not None and wait.timer is not None:
            wait.timer.cancel()

    async def pause_until(self, due: float) -> None:
        """A wait of the engine's own on behalf of a step, such as a backoff: it may end with the run put away."""
        if due <= self.engine.clock.now():
            return
        future: asyncio.Future[None] = self.loop.create_future()
        token = object()
        self.performing -= 1
        try:
            self.add_wait(Wait(token, due, partial(fulfil, future, None)))
            await future
        finally:
            self.end_wait(token)
            self.performing += 1

    async def signal_named(self, name: str) -> Signal:
        """Wait, on behalf of a step, for a signal of the engine's own."""
        signal = self.take_signal(name)
        if signal is not None:
            return signal
        future: asyncio.Future[Signal] = self.loop.create_future()
        token = object()
        self.performing -= 1
        try:
            self.add_wait(Wait(token, None, None, name, partial(fulfil, future)))
            return await future
        finally:
            self.end_wait(token)
            self.performing += 1

    # -- putting the run away -----------------------------------------------------------------------------------------

    def _idle(self) -> None:
        """At rest, with nothing to deliver: pause, hand back or park if that is called for."""
        if self.held and not self.holding:
            self._release_held()
            return
        if self.moving or self.finishing or self.performing or self._is_writing():
            return
        if self.main is None or self.main.done():
            return
        if self.holding:
            if only_waits(self):
                self._put_down()
            return
        if not self.waits:
            return
        due = self._due_at()
        far = due is None or due - self.engine.clock.now() > SHORT_WAIT_SECONDS
        if not far:
            return
        if self.lingered == self.moves or all(wait.name is None for wait in self.waits.values()):
            self.park()
        elif self.linger_timer is None:
            self.linger_timer = self.loop.call_later(
                self.engine.linger_seconds, self._lingered, self.moves, context=self.engine.context
            )

    def _is_writing(self) -> bool:
        """Whether something is on its way to the store; what only rides with the next commit is not."""
        return self.in_flight > 0 or self.engine.journal.holds(self)

    def _lingered(self, moves: int) -> None:
        self.linger_timer = None
        if self.detached:
            return
        self.lingered = moves  # the run is put away when it is at rest, unless it has moved since
        self.watch()

    def _due_at(self) -> float | None:
        dues = [wait.due for wait in self.waits.values() if wait.due is not None]
        if self.deadline_at is not None and not self.timed_out:
            dues.append(self.deadline_at.timestamp())
        return min(dues, default=None)

    def park(self) -> None:
        """Put the run away if nothing but its wake-ups can move it: only its row remains."""
        if self.moving or self.finishing or self.main is None or self.main.done() or not only_waits(self):
            return
        self._move(Status.WAITING, self._due_at(), self._wakes(), "parked")

    def _put_down(self) -> None:
        """Everything under way has ended and nothing new may start: pause, or hand back."""
        if self.pausing is not None:
            record = self._signal_record(self.pausing)
            self._move(Status.PAUSED, None, (RESUME, CANCEL), "paused", record)
        elif self.draining and self.waits and not self.held and not self.performing:
            self._move(Status.WAITING, self._due_at(), self._wakes(), "handed back")
        elif self.draining:
            self.hand_back()

    def hand_back(self) -> None:
        """Give the lease up, so that any worker can go on at once."""
        if not self.moving and not self.finishing:
            self._move(Status.QUEUED, self.engine.clock.now(), (), "handed back")

    def _wakes(self) -> tuple[str, ...]:
        """The signals that wake the run when it is put away."""
        names = sorted({wait.name for wait in self.waits.values() if wait.name is not None})
        return (*names, CANCEL, PAUSE, RESUME)

    def _move(
        self, status: Status, due: float | None, wakes: tuple[str, ...], reason: str, record: Record | None = None
    ) -> None:
        self.moving = True

        def then(_: Answer) -> None:
            self.engine.observe(f"run.{status.value}", self)
            self.detach(reason)
            if status is Status.QUEUED:
                self.engine.poke()

        def refused(answer: Answer) -> None:
            self.moving = False
            if answer.verdict is Verdict.MISSED:
                self.engine.fetch_signals(self)
            else:
                log.error("run %s could not be %s: %s", self.id, reason, answer.verdict)

        change = head_move(
            status,
            release=True,
            due_at=None if due is None else instant(due),
            wakes=wakes,
            signals_seen=self.signals_seen,
            progress=record is not None,
        )
        self.append_special(record, change, then, refused)

    # -- the end of this incarnation ----------------------------------------------------------------------------------

    def detach(self, reason: str) -> None:
        """From now on nothing the code does counts; its tasks are cancelled and their outcome is discarded."""
        if self.detached:
            return
        self.detached = reason
        self.pending = []
        self.arrived.clear()
        self.engine.rest.forget(self)
        for wait in list(self.waits.values()):
            self.end_wait(wait.call)
        for timer in (self.deadline_timer, self.linger_timer):
            if timer is not None:
                timer.cancel()
        for task in (*self.bodies.values(), *self.tasks):
            task.cancel()
        if isinstance(self.main, asyncio.Task):
            self.main.cancel()
        self.main = None
        if self.blocked is not None:
            self.blocked.set()
            self.blocked = None
        self.held.clear()
        self.asked.clear()
        self.history = None
        self.engine.left(self)
        for future in self._leaving:
            if not future.done():
                future.set_result(None)

    async def left(self) -> None:
        """Wait until the run is no longer here: it ended, or was put away."""
        if not self.detached:
            future: asyncio.Future[None] = self.loop.create_future()
            self._leaving.append(future)
            await future

    def insist_on_end(self) -> None:
        """Tell code that goes on after its run was detached that there is nothing more for it here."""
        self.told_end += 1
        if self.told_end > PATIENCE and threading.get_ident() != self.thread_id:
            threading.Event().wait()  # a thread that will not hear is left here
        raise Detached(f"run {self.id} is no longer driven here: {self.detached or 'it ended'}")

    def leave_hanging(self) -> asyncio.Future[None]:
        """Leave code that will not hear where it is: collected, it would go on in the context of somebody else."""
        task = asyncio.current_task()
        if task is not None:
            _HANGING.append(task)
            asyncio._unregister_task(task)  # noqa: SLF001 - nobody can end it, so nobody shall wait for it either
        return self.loop.create_future()

    # -- tasks --------------------------------------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, None], call: StepCall[Any]) -> asyncio.Task[None]:
        """Run the body of a step, beside the code."""
        self.performing += 1
        self.bodies[call] = task = asyncio.Task(coroutine, loop=self.loop)
        return task

    def body_ended(self, call: StepCall[Any]) -> None:
        if self.bodies.pop(call, None) is not None:
            call.task = None
            self.cancel_when_settled()
            self.performing -= 1
            if self.holding:
                self.watch()

    def engine_failed(self, error: Exception) -> None:
        """Something that is no one's failure but the engine's: the run is left to a person."""
        if not self.detached:
            log.error("run %s: the engine failed", self.id, exc_info=error)
            self.engine.runner.set_aside(self, "InternalError", f"the engine failed: {error!r}")

    def spawn_in(self, branch: Branch, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run code of the workflow in a branch that is already numbered."""
        context = copy_context()
        context.run(CURRENT.set, branch)
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self.loop, context=context)
        self.adopt(task)
        return task

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if self.detached:
            task.cancel()

    # -- plain def workflows: their code is in a thread ---------------------------------------------------------------

    def block(self, call: DurableCall[Any], event: threading.Event) -> None:
        """The workflow's thread waits for a call."""
        self.moves += 1
        if self.detached or call.state in (DONE, CANCELLED):
            event.set()
            return
        if self.thread_cancel:
            self.thread_cancel = False
            if call.state == NEW:
                call.state = ASKED
            call.cancelled_by_code()
            event.set()
            return
        call.event = event
        try:
            call.begin()
        except Detached:
            event.set()
            return
        if call.event is not None:
            self.thread_busy = False
            self.blocked = event
            self.watch()

    def block_on(self, make: Callable[[], asyncio.Task[Any]]) -> Any:
        """The workflow's thread waits for a composite call, which runs as a task."""
        if self.detached:
            self.insist_on_end()
        event = threading.Event()
        box: list[asyncio.Task[Any]] = []

        def begin() -> None:
            if self.detached:
                event.set()
                return
            task = make()
            box.append(task)
            task.add_done_callback(lambda _: self._unblock(event))
            self.thread_busy = False
            self.blocked = event
            self.watch()

        self.loop.call_soon_threadsafe(begin)
        event.wait()
        if self.detached or not box:
            self.insist_on_end()
        if self.thread_cancel:
            self.thread_cancel = False
            self.loop.call_soon_threadsafe(box[0].cancel)
            raise asyncio.CancelledError
        return box[0].result()

    def _unblock(self, event: threading.Event) -> None:
        if self.blocked is event:  # else the thread was cancelled meanwhile, and may wait for something else by now
            self.thread_busy = True
            self.blocked = None
        event.set()


class Control:
    """Stands in for a call: what steers the whole run is delivered in order too."""

    __slots__ = ("run",)

    def __init__(self, run: RunContext) -> None:
        self.run = run

    def settle(self, record: Record) -> bool:
        self.run.control(record)
        return True
