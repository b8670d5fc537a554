"""The state of one run while a worker drives it, between the workflow's code and the journal.

Outcomes are delivered to the code one at a time, in sequence order. The next is delivered only when all tasks of the
run are at rest, live exactly as on replay.
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
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from msgspec import UNSET, Raw

from ..errors import DefinitionError, KeepstepError
from ..model import ErrorInfo, Kind, Status
from ..model.checkpoint import NO_STEP, map_of
from ..model.trace import trace_id
from ..ports import CURRENT, Advance, Answer, Traced, Verdict, instant
from ..records.progress import MapProgress, SavedValue
from ..records.record import Record, chain_end, claimed
from ..values import large
from .call_states import ASKED, PATIENCE, Body, Call, Detached
from .child_runs import ChildRuns
from .code_place import code_traceback
from .code_thread import NO_THREADS, Code, CodeThreads
from .generators import close_generator
from .graph.position import Position, facts
from .inbox import Inbox, Wait
from .ledger import Spent
from .log import Draft, fulfil
from .naming import names_of_workflow
from .replay import History
from .saved import StepsProgress
from .stop import DETACHED, FINISHING, SETTLING, Stop
from .undoable import Undoable

if TYPE_CHECKING:
    from ..model import Claim
    from ..workflows.definition import Workflow
    from .host import Host
    from .naming import Names

log = logging.getLogger("keepstep")

#: Time in seconds after which a run is due again if the store could not save its records. Doubles with each lease that
#: recorded nothing, up to the maximum, so that a broken store is not asked all the time.
REFUSED_SECONDS = 0.5
LONGEST_REFUSED_SECONDS = 60.0
#: Number of outcomes after which a replay yields to the event loop, so that other runs make progress.
BREATHE_EVERY = 32
#: Number of steps outside of maps from which on a warning advises to continue as a new run.
MANY_STEPS = 10_000

#: Tasks of detached runs whose code ignores every cancel. The references keep them from being garbage-collected.
_HANGING: list[asyncio.Task[Any]] = []


#: The end of a run: its status, its result, its error, and the id of the run that continues it.
End = tuple[Status, bytes, ErrorInfo | None, str | None]


STATE = Kind.STATE.value


class RunDriver:
    """A claimed run: its position in the journal, the open calls of its code, and its waits."""

    def __init__(self, host: Host, workflow: Workflow[..., Any], claim: Claim) -> None:  # noqa: PLR0915 - one list
        run = claim.run
        self.host = host
        self.workflow = workflow
        self.claim = claim
        self.run = run
        self.id = run.id
        #: The run as observers and tracers are told of it; nobody needs its trace if there are none.
        self.traced = Traced(trace_id(run.id, run.created_at) if host.events.observed else "", run.id, run.workflow)
        self.seed = run.seed
        self.order = zlib.crc32(run.seed.encode())  # start of the hashes of its tasks, different for each run
        self.epoch = claim.lease.epoch
        self.worker = claim.lease.worker
        self.seq = run.seq
        self.checksum = chain_end(run)
        self.claimed = claimed(claim)
        #: Number of consecutive leases before this one that recorded nothing.
        self.unrecorded = 0
        self.cipher = host.encryption.cipher(run)
        self.loop = host.loop
        self.thread_id = threading.get_ident()
        # writing
        self.journal = host.journal
        self.idle_watch = host.idle_watch
        self.buffers = workflow.durability.choice != "every_step"
        self.pending: list[Draft] = []
        self.in_flight = 0
        self.unflushed = 0
        # the workflow's code
        self.main: asyncio.Future[Any] | None = None
        #: Tasks in order of creation, each with the exception that the code was handling when it made the task.
        self.tasks: dict[asyncio.Task[Any], BaseException | None] = {}
        self.bodies: dict[str, Body] = {}  # steps under way, by key
        self.performing = 0
        self.generators: WeakKeyDictionary[AsyncGeneratorType[Any, Any], Context] | None = None  # made for the first
        self.thread = NO_THREADS
        self.moves = 0
        # replay and delivery
        self.history: History | None = None
        self.groups: list[Callable[[str], bool]] = []  # that began during the replay: each begins the part of a key
        self.asked: dict[str, Call] = {}
        self.held: dict[Call, Context] = {}  # calls that may not begin yet, with the context variables of their code
        self.unrecorded_cancels = 0
        self.delivering = False
        self.reading: Any = None  # the large outcome being decoded off the loop for delivery, if any
        self.arrived: deque[Draft] = deque()
        self.now_at: datetime = run.created_at
        self.latest_at: datetime = run.created_at  # lower bound of the time of new records
        self.last_delivered = 1  # seq of the outcome delivered last; 1, the start of the run, before the first
        self.last_delivered_at_end = 1  # value of `last_delivered` when the code ended
        self.interrupted: list[tuple[int, tuple[int, ...]]] = []  # failures whose handling the code has cancelled
        self.nests = (
            True  # False for a run begun by a version without branches of called workflows; see `RunStartedData`
        )
        self.exact_time = True  # False for a run that was begun by a version that recorded no starts of waits
        self.typed = True  # False for a run that was begun by a version that did not apply annotations
        self.generation = 0
        self.retried_at: datetime | None = None  # open waits count their full time again from the last retry
        self.tried: dict[str, Any] = {}
        self.skips: dict[str, bytes] = {}  # values that a recovery gives to steps as their results, by key
        self.marks: dict[str, Record] = {}
        self.doubts: list[str] = []  # at-most-once steps that a cancel has left in doubt
        self.notes: dict[str, Record] = {}
        self.patches: dict[str, bool] = {}
        self.given_keys: set[str] = set()  # keys that the code has given to calls and branches
        self.steps = 0
        self.rounds = 0  # steps outside of maps
        self.spent = Spent(run.created_at)
        self.progress = StepsProgress()
        #: Whether the run's spending must be counted: for a budget, for a parent's budget, or for the stored state.
        self.accounts = workflow.carries_state or run.parent is not None
        self.step_hooks = workflow.step_hooks
        self.asides: set[asyncio.Task[None]] = set()  # hooks of cancelled steps; the end of the run waits for them
        self.guard: Any = None  # enforces the budget, if the run has one
        self.guards: list[Any] = []  # that guard, and those of the called workflows whose code is running
        # undo
        self.undo: Undoable | None = None  # None if nothing can be undone, as far as this process knows
        self.is_undoing = False  # whether the code has ended, and the run is undone
        self.is_undone = False
        self.answered_now = 0
        # the state of a graph
        self.carries_state = workflow.carries_state
        self.position: Position | None = None
        self.published: dict[str, bytes] = {}  # kept for a graph that removes its older records
        self.fits: dict[str, str] = {}  # the definition that its records fit, if it has changed since the run began
        self.edits: list[Record] = []
        self.started_at: datetime = run.created_at
        # waits and signals
        self.waits: dict[Any, Wait] = {}
        self.wait_starts: dict[str, datetime] = {}  # recorded starts of waits that the replayed code has not reached
        self.inbox = Inbox()
        self.children = ChildRuns()
        # ends
        self.stop = Stop()
        self.end_notices = 0
        self.timers: dict[Any, asyncio.TimerHandle] = {}  # by the function that they call
        self.lingered = -1
        self.isolated = run.recoveries > 0
        self.entered_at = host.loop.time()
        self.end: End | None = None
        #: A large result, encoded and compressed before the end is written, or the error of its encoding.
        self.result: tuple[bytes, bytes | None] | KeepstepError | None = None
        #: Large arguments, decoded before the code is called.
        self.arguments: Any = None
        self._leaving: list[asyncio.Future[None]] = []

    def loaded(self, history: History, base: int) -> None:
        """Take over the recorded history. `base` is the seq of the last outcome that a stored state includes.

        Before the code is called, a migration or the answer of a recovery handler may lead to another history.
        """
        self.history = history
        self.generation = self.traced.generation = history.generation
        self.retried_at = history.retried_at
        self.tried, self.marks, self.notes = history.tried, history.marks, history.notes
        self.skips = history.recoveries.skips(history.superseded.__contains__)
        self.inbox.loaded(history.signals)
        self.steps = history.steps
        self.rounds = sum(map_of(key) is None for key in history.entries)
        self.exact_time, self.nests, self.typed = history.exact_time, history.nests, history.typed
        self.wait_starts, self.patches = history.wait_starts, history.patches
        self.edits = history.edits
        self.spent = history.spent
        self.published = history.published
        self.progress.loaded(history.saved)
        if history.has_undo:
            self.can_undo()
        for guard in self.guards:
            guard.loaded(history.last_at)
        if history.started_at is not None:
            self.started_at = history.started_at
            self.set_now(history.started_at)
        self.position, self.last_delivered = history.position, 1
        if history.position is not None:
            self.delivered(history.position.moment, base)

    def held_to(self, guard: Any) -> None:
        """Enforce the budget of the run."""
        self.guard = guard
        self.enforces(guard)

    def enforces(self, guard: Any) -> None:
        """Count the spending, and enforce a budget of the run or of a workflow that it calls."""
        self.guards.append(guard)
        self.accounts = True
        if self.history is not None:
            guard.loaded(self.history.last_at)

    def released_from(self, guard: Any) -> None:
        """Enforce the budget of a called workflow no longer: its code has ended."""
        self.guards.remove(guard)

    def walk_begun(self, position: Position) -> None:
        """Begin the walk of a graph that has no recorded state."""
        self.position = position

    def count_unrecorded(self, last: int) -> None:
        """Count the leases that recorded nothing since `last`, the epoch of the newest record."""
        self.unrecorded = max(0, self.epoch - last - 1)

    def input_read(self, arguments: Any) -> None:
        """Keep large arguments, decoded off the loop, until the code is called."""
        self.arguments = arguments

    def begun(self, main: asyncio.Future[Any]) -> None:
        """Note that the code has been called."""
        self.main = main
        self.arguments = None

    # -- time and writing ---------------------------------------------------------------------------------------------

    def time(self, at_least: datetime | None = None) -> datetime:
        """Return the time for a new record: never earlier than a former record, even if the clock was set back."""
        now = datetime.fromtimestamp(self.host.clock.now(), UTC)
        if at_least is not None and now < at_least:
            now = at_least
        if now > self.latest_at:  # noqa: PLR1730 - on the hot path, where `max` costs a call
            self.latest_at = now
        return self.latest_at

    def set_now(self, at: datetime | None) -> None:
        """Set `ks.now()` to the time of an outcome that is about to be delivered."""
        if at is not None:
            self.now_at = at
            if at > self.latest_at:  # noqa: PLR1730 - on the hot path, where `max` costs a call
                self.latest_at = at

    def delivered(self, at: datetime | None, seq: int) -> None:
        """Note that the outcome with this number is delivered, and set `ks.now()` to its time."""
        if at is not None:
            self.now_at = at
            if at > self.latest_at:  # noqa: PLR1730 - on the hot path, where `max` costs a call
                self.latest_at = at
        self.last_delivered = max(self.last_delivered, seq)

    def set_timer(self, seconds: float, then: Callable[..., None], *args: Any) -> None:
        """Call a function after some seconds, outside the context of the run's code. Each function has one timer."""
        self.timers[then] = self.loop.call_later(seconds, self._timer_fired, then, args, context=self.host.context)

    def _timer_fired(self, then: Callable[..., None], args: tuple[Any, ...]) -> None:
        del self.timers[then]
        then(*args)

    @property
    def parked_by_older(self) -> bool:
        """Whether a version that recorded no starts of waits may have parked the run during an open wait."""
        return not self.exact_time or self.claim.before is Status.WAITING

    def open_waits(self) -> dict[str, datetime]:
        """Return the start times of all waits that are recorded as open, by key."""
        began = {wait.call.key: instant(wait.call.began_at) for wait in self.waits.values() if wait.is_recorded}
        return {**self.wait_starts, **began}

    @property
    def is_replaying(self) -> bool:
        """Whether recorded outcomes are still to be delivered. After the last one, the code is on its own."""
        return self.history is not None and bool(self.history.order)

    @property
    def deadline_at(self) -> datetime | None:
        """The time by which the run must have ended. A retry by a person removes it; an undo is not limited."""
        return None if self.generation or self.is_undoing else self.run.deadline_at

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
        """Append a record. When it is durable, `then` is called at once and `call` is settled in sequence order.

        `last` means that the body of `call` has ended with this record, so it may be written now. `state` is the state
        of a graph after the step, if the durability depends on it. `packed` is the compressed value of the record.
        """
        if self.stop.detached:
            return
        if self.accounts:
            self.spent.add(record)
        draft = Draft(record, call, then, packed=packed)
        if self.buffers and then is None and record.error is None:
            # A failure is never buffered: the error that the code sees names its record, for a later retry.
            self.unflushed += record.kind not in NO_STEP
            writing = self.in_flight > 0 or self.journal.holds(self)  # a commit under way must not be overtaken
            if not writing and not self._flushes(record, state):
                self.pending.append(draft)
                record.seq = self.seq + len(self.pending)  # final, because no commit is under way
                if call is not None:
                    if self.carries_state:
                        self.inbox.recorded(record)  # delivered before it is durable; a state may be written in between
                    self.arrived.append(Draft(record, call))
                    draft.call = None
                    self.watch()
                if last:
                    self.body_ended(call)
                return
        self.unflushed = 0
        self.pending.append(draft)
        if last:
            self.body_ended(call)
        self.journal.add(self, now=last and self.idle_watch.nothing_ready())

    def _flushes(self, record: Record, state: Any) -> bool:
        """Whether the durability policy requires a flush of the buffered records now. Yes if the policy raises."""
        name = record.step.rpartition("/")[2].rpartition("#")[0]
        try:
            durability = self.workflow.durability
            if state is None and self.position is not None and durability.choice == "when":  # a timer, an item of a map
                state = self.position.state(self.workflow.trees, self.id)  # type: ignore[attr-defined]
            return durability.flushes(self.unflushed, name, state)
        except Exception:  # the predicate of the policy is user code
            log.exception("run %s: the durability policy failed at %s, so its record is flushed", self.id, record.step)
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
        packed: bytes | None = None,
    ) -> None:
        """Append a record with further changes: a signal to send, a child run to create, a new status of the run."""
        if self.stop.detached:
            return
        self.unflushed = 0
        self.pending.append(Draft(record, call, then, refused, change, packed, takes_along))
        self.journal.add(self)

    def take_drafts(self) -> list[Draft]:
        """Return the drafts to write. They are in flight until the store has answered."""
        drafts, self.pending = self.pending, []
        self.in_flight += 1
        return drafts

    def put_back(self, drafts: list[Draft]) -> None:
        """Return drafts to the front of the queue, to be written later."""
        self.pending[:0] = drafts

    def not_written(self, drafts: list[Draft]) -> None:
        """Queue the drafts again: another session has locked the run in the store, so nothing was written."""
        self.in_flight -= 1
        if not self.stop.detached:
            self.put_back(drafts)

    def drop(self, is_needless: Callable[[Draft], bool]) -> None:
        """Remove drafts that are no longer needed from the queue."""
        self.pending = [draft for draft in self.pending if not is_needless(draft)]

    def ride(self, draft: Draft) -> None:
        """Write a draft with the next commit of the run."""
        self.pending.append(draft)

    def take_back(self, draft: Draft) -> None:
        """Remove a draft that `ride` has queued, unless it is written already."""
        for index in range(len(self.pending) - 1, -1, -1):
            if self.pending[index] is draft:
                del self.pending[index]
                return

    def migrated(self, seq: int, checksum: str) -> None:
        """Continue after the records of a migration, which are written before the code is called."""
        self.seq, self.checksum, self.claimed = seq, checksum, None
        self.run = replace(self.run, seq=seq, checksum=checksum)

    def may_start_body(self) -> bool:
        """Whether the lease is fresh enough to start a body. If it is too old, the run is given back."""
        if self.stop.detached:
            return False
        if self.host.seconds() < self.host.fresh_until:
            return True
        self.detach("its lease is too old")
        self.host.give_back_later(self)
        return False

    async def durable(self, record: Record) -> None:
        """Append a record, and wait until it is durable."""
        future: asyncio.Future[Answer] = self.loop.create_future()
        self.append(record, then=partial(fulfil, future))
        await future

    def committed(  # noqa: C901 - on the hot path, where another function costs a call
        self, drafts: list[Draft], change: Advance, answer: Answer, at_rest: bool
    ) -> None:
        """Take the drafts as durable. Deliver the next outcome at once if the code is at rest."""
        self.in_flight -= 1
        if change.rows:
            self.claimed = None
            self.seq = change.rows[-1].seq
            self.checksum = change.checksum
        if self.stop.detached:
            return
        if self.isolated and change.progress:
            self.isolated = False
            self.host.progressed(self)
        for draft in drafts:
            if draft.call is not None:
                self.arrived.append(draft)
        if self.carries_state:
            self.inbox.all_recorded(draft.record for draft in drafts)
        for draft in drafts:  # after the loop above: a callback may append a buffered record, which must arrive last
            if draft.then is not None:
                draft.then(answer)
        if self.host.events.observed:
            self._emit(drafts)
        if at_rest and self.arrived and not self.thread.busy:
            try:
                self.deliver_next()
            except Exception as error:  # noqa: BLE001 - an error of one run must not delay the others
                self.engine_failed(error)
        else:
            self.watch()

    # -- progress of steps, from any thread ---------------------------------------------------------------------------

    def report_progress(self, report: dict[str, Any]) -> None:
        """Show a report to readers with the next heartbeat."""
        self.progress.report = report
        self.host.report_progress(self.id, self.progress)

    def group_begun(self, reach: Callable[[str], bool]) -> None:
        """Let the replay ask a group for the part that has made a recorded call."""
        self.groups.append(reach)

    def group_ended(self, reach: Callable[[str], bool]) -> None:
        """Ask a group no longer."""
        self.groups.remove(reach)

    def map_begun(self, path: str, look: Callable[[], MapProgress]) -> None:
        """Show readers how far a map has come, with each heartbeat."""
        self.progress.maps[path] = look
        self.host.report_progress(self.id, self.progress)

    def map_ended(self, path: str) -> None:
        """Show a map no longer."""
        self.progress.maps.pop(path, None)

    def save_progress(self, key: str, attempt: int, value: bytes) -> None:
        """Keep a value for the next attempt of a step, which may be made by another worker."""
        if not self.stop.detached:
            self.progress.save(key, SavedValue(Raw(value), attempt, self.epoch, self.generation))
            self.host.report_progress(self.id, self.progress)

    def saved_progress(self, key: str) -> bytes | None:
        """Return the newest value that a step has saved, or None."""
        saved = self.progress.values.get(key)
        return None if saved is None else bytes(saved.value)

    # -- delivering ---------------------------------------------------------------------------------------------------

    def deliver_next(self) -> None:
        """Deliver the next outcome to the code, which is at rest. Without an outcome, the run is idle."""
        if self.main is None:  # a cancel may be recorded before the code is called, and is delivered later
            return
        if self.thread.ready:
            self.thread.give_turn()
            return
        conductor, forgetting = self.host.runner, self.host.forgetting
        self.delivering = True
        try:
            while not self.stop.detached:
                if self.history is not None:
                    if conductor.replay_next(self):
                        return
                elif forgetting is not None and forgetting.forget(self):
                    return
                elif not self.arrived:
                    conductor.idle(self)
                    return
                elif self._deliver_arrived():
                    return
        finally:
            self.delivering = False

    def _deliver_arrived(self) -> bool:
        """Deliver the oldest recorded outcome. Return whether the code must come to rest before the next."""
        draft = self.arrived[0]
        record, call = draft.record, draft.call
        if record is None or call is None:
            self.arrived.popleft()
            return False
        value = record.value
        if value is not UNSET and len(value) > large.LARGE_BYTES and self.host.runner.is_being_read(self, call, record):
            return True
        self.arrived.popleft()
        self.moves += 1
        self.steps += 1
        if "." not in record.step or map_of(record.step) is None:  # a map cannot be continued as a new run, and it ends
            self.rounds += 1
            if self.rounds == MANY_STEPS and not self.carries_state:
                advice = "continue it as a new run with ks.continue_as"
                log.warning("run %s has made %d steps; %s", self.id, self.rounds, advice)
        if not self.deliver(call, record):
            return False
        # The code may end a branch and ask for nothing more.
        if self.arrived or self.waits or self.held or self.stop.holding:
            self.watch()
        return True

    def deliver(self, call: Call, record: Record) -> bool:
        """Deliver the outcome of a call, live as on replay. Return whether code was woken.

        A call that the code no longer waits for changes nothing, not even the time.
        """
        if call.state != ASKED:
            return False
        at, seq = record.finished_at, record.seq
        if at is not None:
            self.now_at = at
            if at > self.latest_at:  # noqa: PLR1730 - on the hot path, where `max` costs a call
                self.latest_at = at
        if seq > self.last_delivered:  # noqa: PLR1730 - on the hot path, where `max` costs a call
            self.last_delivered = seq
        woken = call.settle(record)
        self.reading = None
        return woken

    def _emit(self, drafts: list[Draft]) -> None:
        for draft in drafts:
            if draft.record is not None:
                self.host.events.emit_record(self, draft.record)
        for guard in self.guards:
            guard.look()

    def facts(self) -> dict[str, Any]:
        """Return the facts about the run that a stored state holds besides the position of the walk."""
        found = facts(self, self.inbox.read)
        if getattr(self.workflow, "keep", "all") == "newest":  # the records that say so are removed
            published = {key: Raw(value) for key, value in self.published.items()}
            found |= {"published": published, "fits": self.fits}
        return found

    def was_published(self, key: str, value: bytes) -> None:
        """Keep the newest value of a published key, if the record of it is removed later."""
        if getattr(self.workflow, "keep", "all") == "newest":
            self.published[key] = value

    def made_to_fit(self, definition: dict[str, str]) -> None:
        """Keep the definition that the run's records fit, which is not the one that it began with."""
        self.fits = definition

    def refused(self, drafts: list[Draft], answer: Answer) -> None:
        """Handle a refusal by the store: call the handler of the last draft, or detach because the lease is lost."""
        self.in_flight -= 1
        handler = drafts[-1].refused
        if answer.verdict is Verdict.FENCED or handler is None:
            if answer.verdict is not Verdict.FENCED:
                log.error("run %s: the store refused a change: %s %s", self.id, answer.verdict, answer.about)
            self.detach("its lease was lost")
            self.host.give_back_later(self)  # the store may still name this worker as the owner
            self.host.events.observe("lease.lost", self)
        else:
            handler(answer)

    def halt(self, error: BaseException) -> None:
        """Detach the run because the store could not save its records. A worker recovers it later."""
        log.error("run %s is halted, recoverable: %s", self.id, error)
        self.host.events.observe("run.halted", self, error=str(error))
        self.detach("the store could not save")
        empty = self.unrecorded + 1 if self.claimed is not None else 0
        self.host.give_back_later(self, min(REFUSED_SECONDS * 2.0 ** min(empty, 20), LONGEST_REFUSED_SECONDS))

    def interrupt(self) -> None:
        """Hand the run back after a KeyboardInterrupt, which ends the program but neither a step nor the run."""
        if not self.stop.detached:
            log.error("run %s: KeyboardInterrupt; the run is handed back, and this worker claims no more runs", self.id)
            self.detach("interrupted by a KeyboardInterrupt")
            self.host.interrupted(self)

    def watch(self) -> None:
        if not self.stop.detached:
            self.idle_watch.watch(self)

    # -- for calls ----------------------------------------------------------------------------------------------------

    def is_outside(self) -> bool:
        """Whether the caller is neither the run's code nor the engine acting for it, such as a shutdown."""
        scope = CURRENT.get()
        own = scope is not None and not scope.in_step and scope.run is self
        return not (own or self.delivering or self.stop.is_ending or self.stop.phase in (FINISHING, DETACHED))

    def cancelled_from_outside(self) -> bool:
        """Whether a cancel comes from outside. Such a cancel does not end the run, so the run is handed back."""
        if not self.is_outside():
            return False
        self.detach("its tasks were cancelled from outside")
        self.host.give_back_later(self)
        return True

    def answer_now(self, call: Call) -> bool:
        """Deliver a recorded outcome at once if the run's only task awaits it. Return whether it was delivered."""
        history, entry = self.history, call.entry
        if (
            history is None
            or entry is None
            or self.tasks
            or self.stop.detached
            or asyncio.current_task() is not self.main
        ):
            return False
        order = history.order
        if not order or order[0] is not entry or entry.cancelled or entry.record is None:
            return False
        value = entry.record.value
        if value is not UNSET and len(value) > large.LARGE_BYTES:  # a large value is decoded off the loop
            return False
        self.answered_now += 1
        if self.answered_now % BREATHE_EVERY == 0 or self.idle_watch.has_ready(self):
            return False
        history.taken(entry)
        call.state = ASKED
        self.deliver(call, entry.record)
        return True

    def moved(self) -> None:
        """Note activity of the code, which may no longer be waiting."""
        self.moves += 1

    def cancel_begun(self) -> None:
        """Note that the code has cancelled a call. New calls begin only when that is durable."""
        self.unrecorded_cancels += 1

    def cancel_recorded(self, _: Answer) -> None:
        """Let held calls begin when the code has come to rest: a cancel may still be on its way to them."""
        self.unrecorded_cancels -= 1
        self.watch()

    def hold(self, call: Call) -> None:
        """Hold a call that may not begin yet."""
        self.held[call] = copy_context()

    def take_held(self) -> dict[Call, Context]:
        """Return the held calls, which the caller now has to begin."""
        held, self.held = self.held, {}
        return held

    def drop_held(self, call: Call) -> None:
        """Drop a held call that the code has cancelled."""
        self.held.pop(call, None)

    def drop_asked(self, key: str) -> None:
        """Drop a call that waits for its recorded outcome."""
        self.asked.pop(key, None)

    def take_key(self, key: str) -> str:
        """Return a key that the code gives to a call or a branch. Refuse one that the code has given before."""
        if key in self.given_keys:
            raise DefinitionError(
                f"run {self.id!r}: the key {key!r} is used twice; a key must be unique in its run or named branch"
            )
        self.given_keys.add(key)
        return key

    def take_note(self, key: str) -> Record | None:
        """Return and remove the note recorded under this key, which the code has reached."""
        return self.notes.pop(key, None)

    def take_attempts(self, key: str) -> Any:
        """Return and remove the recorded failed attempts of a step, which goes on after them."""
        return self.tried.pop(key, None)

    def take_skipped(self, key: str) -> bytes | None:
        """Return and remove the value that a recovery gives to a step as its result."""
        return self.skips.pop(key, None)

    def take_mark(self, key: str) -> Record | None:
        """Return and remove the start mark of a step, whose doubt is resolved now."""
        return self.marks.pop(key, None)

    def take_wait_start(self, key: str) -> datetime | None:
        """Return and remove the recorded start of a wait, which the code has reached."""
        return self.wait_starts.pop(key, None)

    def take_arrived(self) -> Draft:
        """Return and remove the oldest outcome that is to be delivered."""
        return self.arrived.popleft()

    def reading_begun(self, reading: Any) -> None:
        """A large outcome is being decoded off the loop, before its delivery."""
        self.reading = reading

    def outcome_awaited(self, call: Call) -> None:
        """The code waits for the recorded outcome of a call."""
        self.asked[call.key] = call

    def task_made(self, task: asyncio.Task[Any], handled: BaseException | None) -> None:
        """The code has made a task while it handled this exception, if any."""
        self.tasks[task] = handled

    def task_ended(self, task: asyncio.Task[Any]) -> BaseException | None:
        """A task of the code has ended. Return the exception that was handled when it was made."""
        return self.tasks.pop(task)

    def wait_begun(self, wait: Wait) -> None:
        """A call waits in memory."""
        self.waits[wait.call] = wait

    def wait_ended(self, call: Any) -> Wait | None:
        """A call no longer waits. Return its wait, or None if it had none."""
        return self.waits.pop(call, None)

    def take_edit(self) -> Record:
        """Return and remove the oldest edit of the state that the walk has not applied."""
        return self.edits.pop(0)

    def patch_decided(self, name: str, *, taken: bool) -> None:
        """Keep the decision whether the run takes the new path of a patch."""
        self.patches[name] = taken

    def replayed(self) -> None:
        """End the replay: the whole history has been delivered."""
        self.history = None

    def release_held(self) -> None:
        if (
            self.unrecorded_cancels
            or self.history is not None
            or (self.stop.holding and self.stop.cancel is not SETTLING)
        ):
            return
        for call, context in self.take_held().items():
            if self.stop.holding and call.key not in self.marks:  # before a cancel, only steps in doubt are resolved
                self.held[call] = context
            elif call.state == ASKED:
                context.run(call.begin_live)

    def recorded(self, call: Call, key: str) -> Any:
        """Return the recorded entry of a call. Set the run aside if the call differs from the recorded one."""
        history = self.history
        if history is None or self.stop.detached:
            return None
        entry = history.entries.get(key)
        if entry is not None:
            if entry.digest != call.digest and not call.was_asked_as(entry.digest):
                self.mismatch(
                    f"{key} was recorded with another input at seq {entry.seq}; the code or its data changed. Take "
                    "times, random numbers and new ids from ks.now(), ks.random() and ks.uuid(), which a replay repeats"
                )
            elif entry.ordinal != call.ordinal and self.workflow.on_change != "compatible":
                self.mismatch(
                    f"{key} was recorded as call {entry.ordinal} of its branch and is now call {call.ordinal}"
                )
            return entry
        place = history.key_at(call.branch.path, call.ordinal)
        if place is not None and place != key and self.workflow.on_change != "compatible":
            self.mismatch(
                f"call {call.ordinal} of branch {call.branch.path or 'root'} was recorded as {place}, "
                f"and the code asks for {key}"
            )
        return None

    def mismatch(self, message: str, phase: str = "resume") -> None:
        """Set the run aside because its code no longer fits its history."""
        leave = partial(self.host.set_aside, self, "ReplayMismatch", f"replay mismatch: {message}", phase=phase)
        lines = code_traceback(self.main, self.workflow.place)
        if threading.get_ident() != self.thread_id:  # a plain def workflow makes calls from its own thread
            self.loop.call_soon_threadsafe(partial(leave, traceback=lines))
        else:
            leave(traceback=lines)

    # -- the end of the run -------------------------------------------------------------------------------------------

    def code_ended(self) -> None:
        """Note that the code has returned or raised."""
        self.stop.code_ended()
        self.last_delivered_at_end = self.last_delivered

    def can_undo(self) -> Undoable:
        """Return what the run knows about its steps with an undo, from the first of them on."""
        if self.undo is None:
            self.undo = Undoable()
        return self.undo

    def undo_begun(self, main: asyncio.Future[Any]) -> None:
        """Undo what the code has done: from now on `main` makes the calls of the run."""
        self.is_undoing = True
        self.stop.undo_begun()
        self.main = main

    def undo_ended(self) -> None:
        """Note that everything is undone, or accepted as it is."""
        self.is_undone = True
        self.stop.code_ended()

    def result_encoded(self, result: tuple[bytes, bytes | None] | KeepstepError | None) -> None:
        """Keep the encoded form of a large result, or the error of its encoding."""
        self.result = result

    def orphaned(self) -> None:
        """Forget the parent, which no longer exists and gets no signal when this run ends."""
        self.run = replace(self.run, parent=None)

    def ended(self, end: End) -> None:
        """Detach the run, whose end is durable."""
        self.end = end
        self.detach("it ended")

    # -- leaving this process -----------------------------------------------------------------------------------------

    def detach(self, reason: str) -> None:
        """End the run in this process: cancel its tasks, and ignore everything its code still does."""
        if self.stop.detached:
            return
        self.stop.left(reason)
        self.pending = []
        self.arrived.clear()
        self.idle_watch.forget(self)
        if self.timers or self.waits or self.bodies or self.tasks:
            self._cancel_all()
        if isinstance(self.main, asyncio.Task):
            self.main.cancel()
        if self.generators is not None:
            self._close_generators(self.generators)
        self.main = None
        if self.thread is not NO_THREADS:
            self.thread.left()
        self.held.clear()
        self.asked.clear()
        self.history = None
        self.host.left(self)
        for future in self._leaving:
            if not future.done():
                future.set_result(None)

    def _cancel_all(self) -> None:
        """Cancel the timers, the steps under way and the tasks of the code."""
        for timer in (*self.timers.values(), *(wait.timer for wait in self.waits.values())):
            if timer is not None:
                timer.cancel()
        self.waits.clear()
        for task in (*(call.task for call in self.bodies.values()), *self.tasks):
            if task is not None:
                task.cancel()

    def _close_generators(self, generators: WeakKeyDictionary[AsyncGeneratorType[Any, Any], Context]) -> None:
        """Close open async generators in the context of the run. Garbage collection would run them without one."""
        code = [task for task in (self.main, *self.tasks) if task is not None and not task.done()]
        for generator, context in list(generators.items()):
            if generator.ag_frame is not None:
                self.host.beside(close_generator(generator, code), context)

    async def left(self) -> None:
        """Wait until the run is detached."""
        if not self.stop.detached:
            future: asyncio.Future[None] = self.loop.create_future()
            self._leaving.append(future)
            await future

    def insist_on_end(self) -> None:
        """Raise `Detached` in code that continues after its run was detached."""
        self.end_notices += 1
        if threading.get_ident() != self.thread_id:
            if self.end_notices > PATIENCE:
                threading.Event().wait()  # a thread that ignores every notice is blocked here for good
            if isinstance(sys.exception(), GeneratorExit):  # clean-up of a generator that plain code has left open
                raise GeneratorExit  # Python would print any other exception as ignored
        raise Detached(f"run {self.id} is no longer driven here: {self.stop.detached or 'it ended'}")

    def leave_hanging(self) -> asyncio.Future[None]:
        """Suspend code that ignores every notice. Garbage collection would continue it in a foreign context."""
        task = asyncio.current_task()
        if task is not None:
            _HANGING.append(task)
            asyncio._unregister_task(task)  # noqa: SLF001 - a shutdown must not wait for a task that never ends
        return self.loop.create_future()

    # -- tasks --------------------------------------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, None], call: Body) -> None:
        """Run the body of a step in a task beside the workflow's code."""
        self.performing += 1
        self.bodies[call.key] = call
        call.task = asyncio.Task(coroutine, loop=self.loop, name=call.key)

    def body_ended(self, call: Body) -> None:
        if self.bodies.pop(call.key, None) is not None:
            call.task = None
            self.performing -= 1
            if self.progress.values:
                self.progress.ended(call.key)
            if call.branch.guard is not None:
                call.branch.guard.ended(call.key)
            if self.stop.cancel is SETTLING:
                self.host.runner.settle(self)
            if self.stop.holding:
                self.watch()

    def names_of(self, key: str) -> Names | None:
        """Return the agent and the stage that the code has named for a step under way."""
        body = self.bodies.get(key)
        return names_of_workflow(self.workflow) if body is None else body.names

    def doubted(self, *keys: str) -> None:
        """Note that a cancel has left these at-most-once steps in doubt."""
        self.doubts.extend(keys)

    def marks_given_up(self) -> None:
        """Leave the marked steps of a dead worker in doubt, without resolving them."""
        self.doubted(*self.marks)
        self.marks = {}

    def handling_interrupted(self, outcomes: tuple[int, ...]) -> None:
        """Note that the code has cancelled its handling of the failures with these numbers."""
        self.interrupted.append((self.last_delivered, outcomes))

    def follow_generator(self, generator: AsyncGeneratorType[Any, Any]) -> None:
        """Keep track of an async generator of the code, to close it when the run is detached."""
        if self.generators is None:
            self.generators = WeakKeyDictionary()
        self.generators[generator] = copy_context()

    def end_waits_for(self, hook: asyncio.Task[None]) -> None:
        """Let the end of the run wait for a hook of a cancelled step."""
        self.asides.add(hook)
        hook.add_done_callback(self.asides.discard)

    def has_lingered(self, moves: int) -> None:
        """Note that the run has lingered before parking. `moves` is its count of moves: a later move voids the note."""
        self.lingered = moves

    def work_began(self) -> None:
        """Keep the run in memory until `work_ended` is called."""
        self.performing += 1

    def work_ended(self) -> None:
        """Let the run be parked again: the work begun with `work_began` is done, or only waits."""
        self.performing -= 1

    def engine_failed(self, error: Exception) -> None:
        """Set the run aside after an internal engine error."""
        if not self.stop.detached:
            log.error("run %s: the engine failed", self.id, exc_info=error)
            self.host.set_aside(self, "InternalError", f"the engine failed: {error!r}")

    # -- plain def workflows, whose code runs in a thread -------------------------------------------------------------

    def code_ready(self, code: Code) -> None:
        """Let plain code go on in its turn, as soon as the run's tasks have come to rest."""
        if not self.stop.detached:
            if self.thread is NO_THREADS:
                self.thread = CodeThreads()
            self.thread.wants_turn(code)
            self.watch()

    def code_here(self, verb: str) -> Code | None:
        """Return the plain code in the calling thread; None in the loop's thread, where only `.start()` is allowed."""
        code = self.thread.here()
        if code is not None or (verb == "start" and threading.get_ident() == self.thread_id):
            return code
        if threading.get_ident() == self.thread_id:
            raise DefinitionError(f"use `await` in an async workflow; `.{verb}()` is for a plain def workflow")
        raise DefinitionError(
            f"`.{verb}()` is called in a thread that is not the workflow's own, where calls have no order that a "
            "replay could repeat; start the thread's function with ks.map or ks.gather, which give it a branch of "
            "its own"
        )
