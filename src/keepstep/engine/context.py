"""One incarnation of a run in this process: it stands between the code of the workflow and the journal.

Outcomes reach the code one at a time, in sequence order, and the next only when the run's tasks have come to rest: live
exactly as on replay.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..model import ErrorInfo, Kind, Signal, Status
from ..ports import CURRENT, Answer, Verdict, instant
from ..stores.records import Record, chain_end, claimed
from .branch import ASKED, CANCELLED, DONE, NEW, PATIENCE, Branch, Detached, DurableCall, StepCall
from .delivery import tell_next
from .failure_point import mark_interrupted, mark_raised
from .history import History
from .inbox import Inbox
from .journal import Draft
from .position import Position, facts
from .spending import Guard, Spent
from .steering import cancel_when_settled
from .tasks import RunTask
from .wakeups import Wait, end_wait, fulfil

if TYPE_CHECKING:
    from ..model import Claim
    from ..workflows.definition import Workflow
    from .engine import Engine

log = logging.getLogger("keepstep")

#: A run whose records were refused is due again after this pause. It doubles with each lease that recorded nothing.
REFUSED_SECONDS = 0.5
LONGEST_REFUSED_SECONDS = 60.0
#: A replay lets the loop turn after so many outcomes, so that other runs go on beside it.
BREATHE_EVERY = 32

#: Tasks of put-away runs whose code swallows every end; they are kept, so that they are never collected.
_HANGING: list[asyncio.Task[Any]] = []


#: How a run ended: its status, its result, its error, and the run that goes on for it.
End = tuple[Status, bytes, ErrorInfo | None, str | None]


STATE = Kind.STATE.value
#: Records that are not counted where durability goes by the number of steps.
_NO_STEPS = frozenset({STATE, Kind.WAIT_STARTED.value})


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
        self.order = zlib.crc32(run.seed.encode())  # keeps the hashes of its tasks apart from those of other runs
        self.epoch = claim.lease.epoch
        self.worker = claim.lease.worker
        self.seq = run.seq
        self.checksum = chain_end(run)
        self.claimed = claimed(claim)
        #: How many leases before this one, in a row, recorded nothing.
        self.unrecorded = 0
        self.cipher = engine.encryption.cipher(run)
        self.loop = engine.loop
        self.thread_id = engine.thread_id
        # the journal's side
        self.journal = engine.journal
        self.rest = engine.rest
        self.gathers = workflow.durability.choice != "every_step"
        self.pending: list[Draft] = []
        self.in_flight = 0
        self.unflushed = 0
        # the code's side
        self.main: asyncio.Future[Any] | None = None
        self.tasks: dict[asyncio.Task[Any], BaseException | None] = {}  # as made, each with what the code handled then
        self.bodies: dict[StepCall[Any], asyncio.Task[None]] = {}
        self.performing = 0
        self.code_thread: int | None = None  # that of a plain def workflow
        self.thread_busy = False
        self.blocked: threading.Event | None = None
        self.thread_cancel = False
        self.moves = 0
        # replay and delivery
        self.history: History | None = None
        self.asked: dict[str, DurableCall[Any]] = {}
        self.held: dict[DurableCall[Any], Context] = {}  # each with the context variables of its code
        self.unrecorded_cancels = 0
        self.telling = False
        self.arrived: deque[Draft] = deque()
        self.now_at: datetime = run.created_at
        self.latest_at: datetime = run.created_at  # no record that is made from now on has an earlier time
        self.told = 1  # the record that the code was told last: that the run began, and then outcomes
        self.told_at_end = 1  # the same, when the code ended
        self.interrupted: list[tuple[int, tuple[int, ...]]] = []  # failures whose handling the code has cancelled
        self.exact_time = True  # unless its first record says that it was begun by a version without
        self.generation = 0
        self.retried_at: datetime | None = None  # from then on, waits that are still open have their full time again
        self.tried: dict[str, Any] = {}
        self.marks: dict[str, Record] = {}
        self.doubts: list[str] = []  # at-most-once steps that a cancel has left so
        self.notes: dict[str, Record] = {}
        self.patches: dict[str, bool] = {}
        self.steps = 0
        self.spent = Spent(run.created_at)
        self.step_hooks = workflow.step_hooks
        self.asides: set[asyncio.Task[None]] = set()  # hooks of cancelled steps, which the end waits for
        self.guard = Guard(self, workflow.budget) if workflow.budget is not None else None
        self.answered_now = 0
        # what a graph carries
        self.carries_state = workflow.carries_state
        self.position: Position | None = None
        self.edits: list[Record] = []
        self.started_at: datetime = run.created_at
        self.heard: dict[str, int] = {}
        # waits and signals
        self.waits: dict[Any, Wait] = {}
        self.wait_starts: dict[str, datetime] = {}  # when waits began that the code has not asked for again yet
        self.inbox = Inbox()
        self.consumed: set[int] = set()
        self.signals_seen = 0
        self.missed_signals = False
        self.children: dict[str, str] = {}
        self.children_told = False
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
        self.stall_timer: asyncio.TimerHandle | None = None
        self.lingered = -1
        self.finishing = False
        self.alone = run.recoveries > 0
        self.entered_at = engine.loop.time()
        self.end: End | None = None
        self._leaving: list[asyncio.Future[None]] = []

    # -- time and writing ---------------------------------------------------------------------------------------------

    def time(self, at_least: datetime | None = None) -> datetime:
        """Now, for a record: never earlier than any record before it, even if the clock was set back."""
        now = instant(self.engine.clock.now())
        if at_least is not None and now < at_least:
            now = at_least
        if now > self.latest_at:  # noqa: PLR1730 - asked for twice a step, and max takes its time
            self.latest_at = now
        return self.latest_at

    def set_now(self, at: datetime | None) -> None:
        """Set what `ks.now()` gives to the time of an outcome that the code is about to be given."""
        if at is not None:
            self.now_at = at
            if at > self.latest_at:  # noqa: PLR1730 - as above
                self.latest_at = at

    @property
    def parked_by_older(self) -> bool:
        """Whether a version that records no starts of waits may have put the run away, amid a wait that is open."""
        return not self.exact_time or self.claim.before is Status.WAITING

    def open_waits(self) -> dict[str, datetime]:
        """When the waits began that are recorded as open, by their keys."""
        began = {wait.call.key: instant(wait.call.began_at) for wait in self.waits.values() if wait.is_recorded}
        return {**self.wait_starts, **began}

    @property
    def deadline_at(self) -> datetime | None:
        """When the run must have ended; a person who retries it takes the deadline off."""
        return None if self.generation else self.run.deadline_at

    def append(
        self,
        record: Record,
        call: Any = None,
        then: Callable[[Answer], None] | None = None,
        *,
        last: bool = False,
        state: Any = None,
        packed: bytes | None = None,
    ) -> None:
        """Put a record into the journal; `call` is settled in order, and `then` told at once, when it is durable.

        `last` says that the caller, who is no code of the workflow, does nothing more: the record may be written now.
        `state` is what a graph has after the step, if durability depends on that. `packed` is its value, compressed.
        """
        if self.detached:
            return
        self.spent.add(record)
        draft = Draft(record, call, then, packed=packed)
        if self.gathers and then is None and record.error is None:
            # A failure is flushed at once: the error that the code sees names its record, for a later retry.
            self.unflushed += record.kind not in _NO_STEPS
            writing = self.in_flight > 0 or self.journal.holds(self)  # what is on its way must not be overtaken
            if not writing and not self._flushes(record, state):
                self.pending.append(draft)
                record.seq = self.seq + len(self.pending)  # nothing is on its way, so that is what it will be
                if call is not None:
                    if self.carries_state:
                        self._read_by(record)  # the code is told of it now, and a state may be written after that
                    self.arrived.append(Draft(record, call))
                    draft.call = None
                    self.watch()
                return
        self.unflushed = 0
        self.journal.add(self, draft, now=last and self.rest.nothing_ready())

    def _flushes(self, record: Record, state: Any) -> bool:
        """Whether the chosen durability wants what has gathered to be written; in doubt it is."""
        name = record.step.rpartition("/")[2].rpartition("#")[0]
        try:
            durability = self.workflow.durability
            if state is None and self.position is not None and durability.choice == "when":  # a timer, an item of a map
                state = self.position.state(self.workflow.trees, self.id)  # type: ignore[attr-defined]
            return durability.flushes(self.unflushed, name, state)
        except Exception:  # a predicate is the user's
            log.exception("run %s: the durability of %s cannot be told, so it is flushed", self.id, record.step)
            return True

    def append_special(
        self,
        record: Record | None,
        change: dict[str, Any],
        then: Callable[[Answer], None] | None = None,
        refused: Callable[[Answer], None] | None = None,
        call: Any = None,
        *,
        takes_along: bool = False,
    ) -> None:
        """Put a record into the journal that carries more than itself: a message, a child, a move of the head."""
        if self.detached:
            return
        self.unflushed = 0
        self.journal.add(self, Draft(record, call, then, refused, change, takes_along=takes_along))

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

    def committed(self, drafts: list[Draft], answer: Answer, progress: bool, at_rest: bool) -> None:
        """The store has them: tell whoever waits, at once if the code is at rest."""
        if self.detached:
            return
        if self.alone and progress:
            self.alone = False
            self.engine.progressed(self)
        for draft in drafts:
            if self.carries_state and draft.record is not None:
                self._read_by(draft.record)
            if draft.call is not None:
                self.arrived.append(draft)
        for draft in drafts:  # only now: what these append under a weaker durability arrives at once, after the others
            if draft.then is not None:
                draft.then(answer)
        if self.engine.teller.observed:
            self._tell(drafts)
        if at_rest and self.arrived and not self.thread_busy:
            self._tell_now()
        else:
            self.watch()

    def _tell_now(self) -> None:
        try:
            tell_next(self)
        except Exception as error:  # noqa: BLE001 - one run's trouble must not keep the others waiting
            self.engine_failed(error)

    def _tell(self, drafts: list[Draft]) -> None:
        for draft in drafts:
            if draft.record is not None:
                self.engine.teller.tell_record(self, draft.record)
        if self.guard is not None:
            self.guard.look()

    def _read_by(self, record: Record) -> None:
        """Keep count of the signals that the run has read: a consolidated state says so."""
        signal = (record.data or {}).get("signal")
        if signal is not None:
            self.consumed.add(signal)
            self.heard[record.step] = signal
        elif record.step in self.heard and record.kind == Kind.STEP_CANCELLED:  # taken, but never told: unread again
            self.consumed.discard(self.heard.pop(record.step))

    def facts(self) -> dict[str, Any]:
        """What a consolidated state says of its run, beside the position of the walk."""
        return facts(self, self.consumed)

    def refused(self, drafts: list[Draft], answer: Answer) -> None:
        """The store refused them: either the lease is gone, or the one who asked has a way out."""
        handler = drafts[-1].refused
        if answer.verdict is Verdict.FENCED or handler is None:
            if answer.verdict is not Verdict.FENCED:
                log.error("run %s: the store refused a change: %s %s", self.id, answer.verdict, answer.about)
            self.detach("its lease was lost")
            self.engine.give_back_later(self)  # should the store have it as this worker's all the same
            self.engine.teller.observe("lease.lost", self)
        else:
            handler(answer)

    def halt(self, error: BaseException) -> None:
        """The store could not save: the run is put down where it stands, to be recovered."""
        log.error("run %s is halted, recoverable: %s", self.id, error)
        self.engine.teller.observe("run.halted", self, error=str(error))
        self.detach("the store could not save")
        in_vain = self.unrecorded + 1 if self.claimed is not None else 0
        self.engine.give_back_later(self, min(REFUSED_SECONDS * 2.0 ** min(in_vain, 20), LONGEST_REFUSED_SECONDS))

    def interrupt(self) -> None:
        """Hand the run back: a KeyboardInterrupt in its code or in a step ends the program, and no run or step."""
        if not self.detached:
            log.error("run %s met a KeyboardInterrupt: it is handed back, and this worker takes no more runs", self.id)
            self.detach("interrupted by a KeyboardInterrupt")
            self.engine.interrupted(self)

    def watch(self) -> None:
        if not self.detached:
            self.rest.watch(self)

    # -- what its calls ask of it -------------------------------------------------------------------------------------

    def is_outside(self) -> bool:
        """Whether the caller is neither the run's code nor the engine on its behalf, but for one a shutdown."""
        scope = CURRENT.get()
        own = scope is not None and not scope.in_step and scope.run is self
        return not (own or self.telling or self.cancelling or self.timed_out or self.finishing or self.detached)

    def cancelled_from_outside(self) -> bool:
        """Whether a cancel comes from outside, which is not an end of the run: it is handed back."""
        if not self.is_outside():
            return False
        self.detach("its tasks were cancelled from outside")
        self.engine.give_back_later(self)
        return True

    def answer_now(self, call: DurableCall[Any]) -> bool:
        """Replay without a pass of the loop: what the only task awaits is the next outcome, so the run is at rest."""
        history, entry = self.history, call.entry
        if history is None or entry is None or self.tasks or self.detached or asyncio.current_task() is not self.main:
            return False
        order = history.order
        if not order or order[0] is not entry or entry.cancelled or entry.record is None:
            return False
        self.answered_now += 1
        if self.answered_now % BREATHE_EVERY == 0 or self.rest.has_ready(self):
            return False
        order.popleft()
        del history.entries[entry.key]
        self.set_now(entry.record.finished_at)
        self.told = entry.seq
        call.state = ASKED
        call.settle(entry.record)
        return True

    def cancel_recorded(self, _: Answer) -> None:
        self.unrecorded_cancels -= 1
        self.release_held()

    def release_held(self) -> None:
        if self.unrecorded_cancels or self.history is not None or (self.holding and self.cancel_signal is None):
            return
        held, self.held = self.held, {}
        for call, context in held.items():
            if self.holding and call.key not in self.marks:  # before a cancel only what is in doubt is looked into
                self.held[call] = context
            elif call.state == ASKED:
                context.run(call.begin_live)

    def recorded(self, call: DurableCall[Any], key: str) -> Any:
        """The recorded outcome of a call, checked: another question than the recorded one is found here."""
        history = self.history
        if history is None or self.detached:
            return None
        entry = history.entries.get(key)
        if entry is not None:
            if entry.digest != call.digest and not call.was_asked_as(entry.digest):
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

    def mismatch(self, message: str, phase: str = "resume") -> None:
        """The code no longer fits its history: the run is set aside, nothing new has run."""
        if threading.get_ident() != self.thread_id:  # a plain def workflow asks from its own thread
            self.loop.call_soon_threadsafe(self.mismatch, message, phase)
            return
        self.engine.runner.set_aside(self, "ReplayMismatch", f"replay mismatch: {message}", phase=phase)

    # -- the end of this incarnation ----------------------------------------------------------------------------------

    def detach(self, reason: str) -> None:
        """From now on nothing the code does counts; its tasks are cancelled and their outcome is discarded."""
        if self.detached:
            return
        self.detached = reason
        self.pending = []
        self.arrived.clear()
        self.rest.forget(self)
        for wait in list(self.waits.values()):
            end_wait(self, wait.call)
        for timer in (self.deadline_timer, self.linger_timer, self.stall_timer):
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
        self.bodies[call] = task = asyncio.Task(coroutine, loop=self.loop, name=call.key)
        return task

    def body_ended(self, call: StepCall[Any]) -> None:
        if self.bodies.pop(call, None) is not None:
            call.task = None
            self.performing -= 1
            if self.guard is not None:
                self.guard.ended(call.key)
            if self.cancel_signal is not None:
                cancel_when_settled(self)
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
        task = RunTask(coroutine, branch, loop=self.loop, context=context)
        self.adopt(task)
        return task

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self.tasks[task] = error = sys.exception()
        if error is not None:
            mark_raised(self, error)
        task.add_done_callback(self._branch_ended, context=self.engine.context)
        if self.detached:
            task.cancel()

    def _branch_ended(self, task: asyncio.Task[Any]) -> None:
        handled = self.tasks.pop(task)
        if handled is not None and task.cancelled():
            mark_interrupted(self, handled)
        error = task._exception  # noqa: SLF001 - asking for it would silence a warning
        if error is not None:
            mark_raised(self, error)
        if self.waits or self.holding:  # what it waited for by itself may have been all that kept the run here
            self.watch()

    # -- plain def workflows: their code is in a thread ---------------------------------------------------------------

    def check_thread(self, verb: str) -> None:
        """Refuse `.result()` and `.start()` where calls have no order that a replay could repeat."""
        here = threading.get_ident()
        if here == self.code_thread or (verb == "start" and here == self.thread_id):
            return
        if here == self.thread_id:
            raise DefinitionError(f"use `await` in an async workflow; `.{verb}()` is for a plain def workflow")
        raise DefinitionError(
            f"`.{verb}()` is called in a thread that is not the workflow's own, where calls have no order that a "
            "replay could repeat; call the step in the workflow and give the thread its result"
        )

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
