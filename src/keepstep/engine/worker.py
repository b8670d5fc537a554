"""The loop that claims runs and has them driven, and the heartbeat that keeps their leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import EncryptionError, SchemaMismatch, StoreError, StoreUnavailable
from ..model import HEARTBEAT_SECONDS, LEASE_SECONDS, Run, RunQuery, Status, WorkerInfo
from ..model.ids import new_id
from ..ports import Advance, ClaimRequest, Verdict, instant
from .namesakes import Namesakes
from .pace import Pace
from .suspects import ALONE_SECONDS, TURN_SECONDS, Suspects

if TYPE_CHECKING:
    from datetime import datetime

    from ..model import Claim
    from .context import RunContext
    from .engine import Engine

log = logging.getLogger("keepstep")

#: A heartbeat comes after this share of a lease, so that two may be lost.
HEARTBEAT_SHARE = HEARTBEAT_SECONDS / LEASE_SECONDS
#: A heartbeat that failed is tried again after this share of a lease: whoever comes back late may be given up.
RETRY_SHARE = HEARTBEAT_SHARE / 5
#: How often the store is asked whether others wrote to it.
POLL_SECONDS = 0.02
#: A store that tells of news by itself is polled at once, but not more often than this.
ALERT_SECONDS = 0.005
#: How often the worker claims when nothing told it to: the backstop for every signal, and how soon a death is seen.
CLAIM_SECONDS = 0.25
#: A loop that has not moved for this long is taken for stuck, and its leases are no longer renewed.
STUCK_SECONDS = 60.0
#: Runs asked for in one claim.
CLAIM_LIMIT = 100
#: A run whose key this worker lacks is looked at again after this.
KEY_SECONDS = 60.0
#: A run that a newer Keepstep has written to is left to newer workers for this long, then for twice as long.
NEWER_SECONDS = 2.0
#: So many such runs are remembered.
MOST_NEWER = 10_000
_NEWER = "newer"
#: How long a worker looks, with each heartbeat, for leases that it does not know of, after an answer was lost.
DOUBT_SECONDS = 60.0
#: Progress reaches the store with the heartbeat, which comes early for it, but not more often than this.
PROGRESS_SECONDS = 0.5


class Worker:
    """Claims runs of the workflows that its engine knows, and hands them to the runner."""

    def __init__(self, engine: Engine, max_runs: int) -> None:
        self.engine = engine
        self.id = new_id("worker")
        self.max_runs = max_runs
        self.progress: dict[str, bytes] = {}
        self.suspects = Suspects(engine)
        #: Runs that are being created and leased to this worker: they take room before they are driven.
        self.births = 0
        self._asked = 0
        self._started_at = instant(engine.clock.now())
        self._renewed = 0.0
        self._tick = engine.clock.boot()[1]
        self._cursor = 0
        self._next_due: float | None = None
        self._last_claim = 0.0
        self._claiming = False
        self._claim_again = False
        self._stopping = False
        self._pace = Pace(engine.clock, POLL_SECONDS)
        self._poll_timer: asyncio.TimerHandle | None = None
        self._polling = False
        self._polled_at = 0.0
        self._alerted = False
        self._silence: Callable[[], Any] = lambda: None
        self._beat = threading.Event()
        self._ended = threading.Event()
        self._on_loop = getattr(engine.clock, "on_loop", False)  # a clock that stands still unless the loop moves
        self._thread = threading.Thread(target=self._heart, name="keepstep-heartbeat", daemon=True)
        self._to_give_back: dict[str, int] = {}
        self._not_before: dict[str, float] = {}  # when a run that is given back is due
        self._doubt_until = 0.0
        self._lost: dict[str, int] = {}
        self._wanted: set[str] = set()  # keys that are not here, by which runs are left to others
        self._newer: dict[str, int] = {}  # how often a run was met that only a newer Keepstep can read
        self._namesakes = Namesakes()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Enrol in the store, then look for work at once: what was interrupted comes first."""
        await self.engine.call(self._renew)
        if self._on_loop:
            self._beat_on_loop()
        else:
            self._thread.start()
        self._cursor = (await self.engine.call(self.engine.store.news, self.id, 0)).cursor
        on_news = getattr(self.engine.store, "on_news", None)  # some stores tell, and need not be asked
        if on_news is not None:
            self._silence = on_news(self._alert)
        self.claim_soon()
        self._poll()

    def stop_claiming(self) -> None:
        self._stopping = True

    async def leave(self) -> None:
        """Nothing is leased any more: say good-bye."""
        self._stopping = True
        self._silence()
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        while self._claiming:  # noqa: ASYNC110 - at most one claim, a few milliseconds
            await asyncio.sleep(0.005)
        if self._to_give_back:
            await self._give_back()
        self._ended.set()
        self._beat.set()
        if not self._on_loop:
            await asyncio.to_thread(self._thread.join, 10.0)
        try:
            await self.engine.call(partial(self._renew, leaving=True))
        except StoreError as error:
            log.warning("the worker could not sign off: %s", error)

    def has_room(self) -> bool:
        """Whether a new run may be leased at birth."""
        return not self._stopping and self._room() > self._asked and self.suspects.may_begin_others()

    def _room(self) -> int:
        """How many more runs this worker may drive."""
        return self.max_runs - len(self.engine.live) - self.births

    # -- heartbeat ----------------------------------------------------------------------------------------------------

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            id=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            renewed_at=instant(self.engine.clock.now()),
            workflows=tuple(sorted(self.engine.workflows)),
            progress=dict(self.progress),
        )

    def _renew(self, *, leaving: bool = False) -> bool:
        boot = self.engine.clock.boot()[1]
        known = self.engine.store.renew_leases(self.info(), leaving=leaving)
        if known:
            self._renewed = boot
        return known

    def _heart(self) -> None:
        """The heartbeat's own thread: a busy loop does not lose its leases, a stuck one does."""
        failed = False
        while not self._ended.is_set():
            share = RETRY_SHARE if failed else HEARTBEAT_SHARE
            early = self._beat.wait(self.engine.store.lease_seconds * share)
            if self._ended.is_set():
                return
            if self.engine.loop.is_closed():  # nothing is driven here any more, and nobody closed the engine
                self._silence()
                return
            if early:
                self._beat.clear()
            if self.engine.clock.boot()[1] - self._tick > STUCK_SECONDS:
                log.error("the event loop has not moved for %d s; its leases are not renewed", STUCK_SECONDS)
                continue
            failed = not self._beat_once()
            if early:
                self._ended.wait(PROGRESS_SECONDS)

    def _beat_on_loop(self, *, first: bool = True) -> None:
        """The heartbeat where a thread would be in no one's time."""
        if self._ended.is_set() or self.engine.closed:
            return
        seconds = self.engine.store.lease_seconds * HEARTBEAT_SHARE
        again = partial(self._beat_on_loop, first=False)
        self.engine.loop.call_later(seconds, again, context=self.engine.context)
        if not first:
            self.engine.background(self.engine.call(self._beat_once))

    def _beat_once(self) -> bool:
        """Renew the leases; False if the store could not be told."""
        self.engine.journal.tell_if_unanswered()
        try:
            known = self._renew()
        except StoreError as error:
            self.engine.outage.tell("the heartbeat failed", error)
            return False
        except Exception:
            log.exception("the heartbeat failed")
            return False
        told = self._given_up if not known else self._give_back_soon if self._owes() else None
        if told is not None:
            with contextlib.suppress(RuntimeError):  # the loop may have closed
                self.engine.loop.call_soon_threadsafe(told)
        return True

    def lease_is_fresh(self) -> bool:
        """Whether the last heartbeat is recent enough to start something under its leases."""
        return self.engine.clock.boot()[1] - self._renewed < self.engine.store.lease_seconds

    def report_progress(self, run: str, progress: bytes) -> None:
        self.progress[run] = progress
        self._beat.set()

    def _given_up(self) -> None:
        """The store took this worker for dead and gave its runs away: let all of them go."""
        log.error("the store has given this worker up; its runs are driven by others now")
        for context in list(self.engine.live.values()):
            context.detach("its lease was lost")
        self.id = new_id("worker")
        self._renewed = 0.0
        self.engine.journal.worker = self.id
        self._beat.set()
        self.claim_soon()

    # -- claiming -----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """See what others wrote: signals for our runs, and runs that became due."""
        self._alerted = False
        self._polled_at = self.engine.loop.time()
        self._tick = self.engine.clock.boot()[1]
        if self.engine.closed:
            return
        until = None if self._next_due is None else self._next_due - self.engine.clock.now()
        self._poll_again(self._pace.pause(until))
        if not self.engine.store.quick:
            if not self._polling:  # a store that does not answer is not asked again meanwhile
                self._polling = True
                self.engine.background(self._poll_slowly())
            return
        try:
            news = self.engine.store.news(self.id, self._cursor)
        except StoreError as error:
            self.engine.outage.tell("the store cannot be polled", error)
            return
        self._heard(news)

    def _alert(self) -> None:
        """The store has news; it says so in a thread of its own."""
        with contextlib.suppress(RuntimeError):  # the loop may have closed
            self.engine.loop.call_soon_threadsafe(self._poll_now)

    def _poll_now(self) -> None:
        """Poll before it is time, but not so often that nothing else is done."""
        if self._alerted or self._stopping or self.engine.closed:
            return
        self._alerted = True
        wait = self._polled_at + ALERT_SECONDS - self.engine.loop.time()
        self.engine.loop.call_later(max(0.0, wait), self._poll, context=self.engine.context)

    def look_soon(self) -> None:
        """Something has happened here: on a clock that jumps, there may be something to see sooner than thought."""
        self._pace.moved()
        if self._poll_timer is not None and not self._stopping:
            self._poll_again(POLL_SECONDS)

    def _poll_again(self, seconds: float) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._poll_timer = self.engine.loop.call_later(seconds, self._poll, context=self.engine.context)

    async def _poll_slowly(self) -> None:
        try:
            self._heard(await self.engine.call(self.engine.store.news, self.id, self._cursor))
        except StoreError as error:
            self.engine.outage.tell("the store cannot be polled", error)
        finally:
            self._polling = False

    def _heard(self, news: Any) -> None:
        self._cursor = news.cursor
        for run in news.runs:
            self.engine.hearing.of(run)
        if news.changed:
            self.engine.pulse()
        now = self.engine.clock.now()
        due = self._next_due is not None and self._next_due <= now
        if news.changed or due or self.engine.loop.time() - self._last_claim > CLAIM_SECONDS:
            self.claim_soon()

    def claim_soon(self) -> None:
        """Look for runs that are due; calls while one look is under way make one more after it."""
        if self._stopping or self.engine.closed:
            return
        if self._claiming:
            self._claim_again = True
            return
        self._claiming = True
        self.engine.background(self._claim())

    async def _claim(self) -> None:
        try:
            while not self._stopping:
                self._claim_again = False
                self._last_claim = self.engine.loop.time()
                full = await self._claim_once()
                if not full and not self._claim_again:
                    break
        except StoreError as error:
            self.engine.outage.tell("the store cannot be asked for runs", error)
            self.doubt()
        finally:
            self._claiming = False

    async def _claim_once(self) -> bool:
        """One claim; whether there may be more at once."""
        room = self._room()
        if room <= 0 or not self.lease_is_fresh():
            return False
        if self.suspects.current is not None:
            await self._claim_children()
        elif (suspect := self.suspects.next()) is not None:
            await self._claim_suspect(suspect)
        room = self._room()
        if room <= 0 or not self.suspects.may_begin_others():
            return False
        request = ClaimRequest(
            self.id,
            frozenset(self.engine.workflows),
            limit=min(room, CLAIM_LIMIT),
            versions={w.name: w.version for w in self.engine.workflows.values() if w.on_change == "pin"},
        )
        self._asked = request.limit
        try:
            claims = await self.engine.call(self.engine.store.claim_runs, request)
        finally:
            self._asked = 0
        if request.worker != self.id:  # the store has given up the worker that asked, and all that it was leased
            return True
        before, self._next_due = self._next_due, claims.next_due_at.timestamp() if claims.next_due_at else None
        if self._pace.jumps and before != self._next_due:
            self.look_soon()
        if self._stopping:  # the engine closes: what was still claimed goes back when the worker leaves
            self._to_give_back |= {claim.run.id: claim.lease.epoch for claim in claims.claims}
            return False
        for claim in await self._sort_out(await self._without_namesakes(claims.claims)):
            self.engine.background(self.engine.runner.drive(claim))
        await asyncio.sleep(0)  # what is driven from now on takes room before more is claimed
        return bool(claims.claims)

    async def _claim_suspect(self, run: str) -> None:
        """Drive the suspect whose turn has come; if it is not to be had, another worker has it, or it has ended."""
        self.suspects.gone(run)
        request = ClaimRequest(self.id, run=run, statuses=frozenset({Status.QUEUED}))
        for claim in (await self.engine.call(self.engine.store.claim_runs, request)).claims:
            if self._stopping:
                self._to_give_back[run] = claim.lease.epoch
            elif request.worker == self.id:  # else the store has given up the worker that asked
                self._drive_suspect(claim)

    def _drive_suspect(self, claim: Claim) -> None:
        self.suspects.begins(claim.run.id)
        self.engine.background(self.engine.runner.drive(claim))
        self.engine.loop.call_later(ALONE_SECONDS, self.claim_soon, context=self.engine.context)

    async def _claim_children(self) -> None:
        """Drive what a suspect waits for: its children, and theirs; or it might wait for ever."""
        engine = self.engine
        for child in [child for context in engine.live.values() for child in context.children.values()]:
            run = None if child in engine.live else await engine.call(engine.store.get_run, child)
            if run is None or run.status.finished or run.workflow not in engine.workflows:
                continue
            if run.worker is None and (run.due_at is None or run.due_at.timestamp() > engine.clock.now()):
                continue
            request = ClaimRequest(self.id, run=child, statuses=frozenset({run.status}))
            for claim in (await engine.call(engine.store.claim_runs, request)).claims:
                if self._stopping:
                    self._to_give_back[child] = claim.lease.epoch
                elif request.worker == self.id:  # else the store has given up the worker that asked
                    engine.background(engine.runner.drive(claim))

    async def _without_namesakes(self, claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
        """The claims without runs that another program's workflow of the same name has started: these go back."""
        own = []
        for claim in claims:
            run = claim.run
            if self.engine.is_own(run):
                own.append(claim)
                continue
            seconds = self._namesakes.wait_seconds(self.engine.workflows[run.workflow], run)
            due = instant(self.engine.clock.now() + seconds)
            try:
                await self._release(run, claim.lease.epoch, due)
            except StoreError:
                self._to_give_back[run.id] = claim.lease.epoch
        return tuple(own)

    async def _sort_out(self, claims: tuple[Claim, ...]) -> list[Claim]:
        """What to drive of what was claimed: a run that may be the one that kills its workers waits for its turn.

        Suspects are put back before anything is driven, so that no crash counts for them; others may take them.
        """
        suspects = [claim for claim in claims if self.suspects.is_suspect(claim.run)]
        if not suspects:
            return list(claims)
        chosen = [claim for claim in claims if claim not in suspects]
        first = suspects.pop(0) if not chosen and self.suspects.may_begin() else None
        if first is not None:
            self._drive_suspect(first)
        for claim in suspects:
            self.suspects.waits(claim.run.id)
        if suspects:
            self.engine.loop.call_later(TURN_SECONDS, self.claim_soon, context=self.engine.context)
        wait = 0.0 if first is not None else TURN_SECONDS if self.suspects.current is None else ALONE_SECONDS
        due = instant(self.engine.clock.now() + wait)  # another worker can take them
        put_back = [self._release(claim.run, claim.lease.epoch, due) for claim in suspects]
        for claim, failure in zip(suspects, await asyncio.gather(*put_back, return_exceptions=True), strict=True):
            if failure is not None:
                self._to_give_back[claim.run.id] = claim.lease.epoch
        return chosen

    def progressed(self, context: RunContext) -> None:
        """Let others come again when a suspect has made progress, or has left."""
        if self.suspects.current == context.id:
            self.suspects.ended()
            self.claim_soon()

    # -- giving back --------------------------------------------------------------------------------------------------

    def give_back_later(self, context: RunContext, pause_seconds: float = 0.0) -> None:
        """Give back a run that is no longer driven here when the store listens again; it is due after the pause."""
        self.owe(context.id, context.epoch, pause_seconds)

    def owe(self, run_id: str, epoch: int, pause_seconds: float = 0.0) -> None:
        """Give a run back that this worker holds and does not drive, as soon as the store can be told."""
        self._to_give_back[run_id] = epoch
        self._not_before[run_id] = self.engine.clock.now() + pause_seconds
        self._beat.set()

    async def put_back(self, claim: Claim, error: EncryptionError | SchemaMismatch) -> None:
        """A run that cannot be read here may be read by another worker: it is left to that one, and tried again."""
        seconds = self._pause_of_newer(claim.run.id) if isinstance(error, SchemaMismatch) else KEY_SECONDS
        wanted = error.key_id if isinstance(error, EncryptionError) else _NEWER
        if wanted not in self._wanted:
            self._wanted.add(wanted)
            log.error("%s; such runs are left to other workers, and looked at again in %d s", error, seconds)
        try:
            await self._release(claim.run, claim.lease.epoch, instant(self.engine.clock.now() + seconds))
        except StoreError:
            self._to_give_back[claim.run.id] = claim.lease.epoch

    def _pause_of_newer(self, run_id: str) -> float:
        """How long a run is left to newer workers: short at first, for one of them may be idle, then longer."""
        tries = self._newer.get(run_id, 0)
        if len(self._newer) >= MOST_NEWER:
            self._newer.clear()
        self._newer[run_id] = tries + 1
        return min(KEY_SECONDS, NEWER_SECONDS * 2.0**tries)

    def doubt(self) -> None:
        """The answer to a claim or a start was lost: something may be leased to this worker without its knowing."""
        self._doubt_until = self.engine.loop.time() + DOUBT_SECONDS

    def _owes(self) -> bool:
        return bool(self._to_give_back) or self.engine.loop.time() < self._doubt_until

    def _give_back_soon(self) -> None:
        if not self.engine.closed:
            self.engine.background(self._give_back())

    async def _find_lost(self) -> None:
        """Give back what is leased to this worker but not driven by it, if that was so at the last heartbeat too."""
        page = await self.engine.call(self.engine.store.list_runs, RunQuery(worker=self.id, limit=2 * self.max_runs))
        lost = {run.id: run.epoch for run in page.runs if run.id not in self.engine.live}
        self._to_give_back |= {run: epoch for run, epoch in lost.items() if self._lost.get(run) == epoch}
        self._lost = lost

    async def _give_back(self) -> None:
        if self.engine.loop.time() < self._doubt_until:
            try:
                await self._find_lost()
            except StoreError as error:
                self.engine.outage.tell("the runs of this worker cannot be listed yet", error)
                return
        for run_id, epoch in list(self._to_give_back.items()):
            try:
                run = await self.engine.read(self.engine.store.get_run, run_id)
                if run is not None and run.worker == self.id and run.epoch == epoch:
                    # It is looked at again with the next heartbeat: a write that was still on its way may come first.
                    now = self.engine.clock.now()
                    await self._release(run, epoch, instant(max(now, self._not_before.get(run_id, now))))
                else:
                    self._to_give_back.pop(run_id, None)
                    self._not_before.pop(run_id, None)
            except StoreError as error:
                self.engine.outage.tell(f"run {run_id} could not be given back yet", error)
                if not (isinstance(error, StoreUnavailable) and error.held):
                    return
        self.claim_soon()

    async def _release(self, run: Run, epoch: int, due_at: datetime) -> None:
        """Put a run that this worker holds but does not drive back into the queue."""
        change = Advance(run.id, self.id, epoch, run.seq, checksum=run.checksum, status=Status.QUEUED, release=True)
        change.due_at, change.progress = due_at, False
        answer = await self.engine.journal.write(change)
        if answer.verdict not in (Verdict.DONE, Verdict.FENCED):
            log.error("run %s could not be given back: %s", run.id, answer.verdict)
