"""The loop that claims runs and has them driven."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import EncryptionError, SchemaMismatch, StoreError, StoreUnavailable
from ..kernel.log import Draft
from ..kernel.namesakes import Namesakes
from ..kernel.progress import cut_short
from ..model import Run, RunQuery, Status, WorkerInfo
from ..model.agent import AGENTS
from ..model.ids import new_id
from ..model.keepers import KEEPER_QUEUE, is_keeper
from ..model.lease import QUEUES
from ..ports import Advance, ClaimRequest, OptionalStore, Verdict, instant, optional
from ..records.counts import COUNTS
from .blockage import blocking_code
from .journal import sealed
from .keepers import FOR_ALL, Keepers
from .poll_interval import PollInterval
from .suspects import ALONE_SECONDS, TURN_SECONDS, Suspects

if TYPE_CHECKING:
    from datetime import datetime

    from ..kernel.driver import RunDriver
    from ..kernel.saved import StepsProgress
    from ..model import Claim, Claims
    from ..ports import Row
    from .process import Process

log = logging.getLogger("keepstep")

#: Seconds between two polls for writes of others.
POLL_SECONDS = 0.02
#: Shortest time in seconds between two polls of a store that reports news by itself.
ALERT_SECONDS = 0.005
#: Seconds between two claims without a notification. This bounds the delay of lost signals and of takeovers.
CLAIM_SECONDS = 0.25
#: Runs in one claim at most.
CLAIM_LIMIT = 100
#: Seconds before a run whose key is missing here is claimed again.
KEY_SECONDS = 60.0
#: Seconds for which a run written by a newer Keepstep is left to newer workers. The time doubles with each attempt.
NEWER_SECONDS = 2.0
#: Such runs that are remembered at most.
MOST_NEWER = 10_000
_NEWER = "newer"
#: Seconds for which each heartbeat searches for unknown leases of this worker after an answer was lost.
DOUBT_SECONDS = 60.0


def _may_be_cut_short(claim: Claim) -> bool:
    """Whether an earlier owner may have left a step of the run under way; a parked or paused run has none."""
    return claim.lease.epoch > 1 and claim.before not in (Status.WAITING, Status.PAUSED)


def _with_progress(claim: Claim, workers: list[WorkerInfo]) -> Claim:
    left = tuple(one.progress[claim.run.id] for one in workers if claim.run.id in one.progress)
    return replace(claim, left=left) if left else claim


class Worker:
    """Claims runs of the workflows that its engine knows, and passes them to the runner."""

    def __init__(self, engine: Process, max_runs: int, queues: frozenset[str] | None = None) -> None:
        self.engine = engine
        self.id = new_id("worker")
        self.max_runs = max_runs
        #: The queues whose runs it drives; None is all.
        self.queues = queues
        self.progress: dict[str, StepsProgress] = {}
        self.suspects = Suspects(engine)
        self.keepers = Keepers(engine)
        #: Runs that are being created with a lease for this worker. They take room before they are driven.
        self.births = 0
        self._asked = 0
        self._started_at = instant(engine.clock.now())
        self._tick = engine.clock.boot()[1]
        self._lag = 0.0  # the longest time by which the loop was late since the last heartbeat
        self._thread_id: int | None = None  # of the event loop
        self._cursor = 0
        self._next_due: float | None = None
        self._last_claim = 0.0
        self._claiming = False
        self._claim_again = False
        self._found_none = False  # the last claim had room and found no run
        self._stopping = False
        self._pace = PollInterval(engine.clock, POLL_SECONDS)
        self._poll_timer: asyncio.TimerHandle | None = None
        self._polling = False
        self._polled_at = 0.0
        self._alerted = False
        self._silence: Callable[[], Any] = lambda: None
        self.heart = engine.parts.heart(self)
        self._to_give_back: dict[str, int] = {}
        self._not_before: dict[str, float] = {}  # when a handed-back run is due
        self._parting: dict[str, tuple[RunDriver, list[Draft]]] = {}  # what its steps have saved
        self._doubt_until = 0.0
        self._lost: dict[str, int] = {}
        self._wanted: set[str] = set()  # ids of missing keys, whose runs are left to others
        self._newer: dict[str, int] = {}  # how often a run was met that only a newer Keepstep can read
        self._namesakes = Namesakes()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Register in the store, then claim at once; interrupted runs come first."""
        await self.engine.call(self._renew)
        self._thread_id = threading.get_ident()
        self.heart.start()
        self._cursor = (await self.engine.call(self.engine.store.news, self.id, 0)).cursor
        self.engine.shares.begin()
        on_news = optional(self.engine.store, OptionalStore.on_news)
        if on_news is not None:
            self._silence = on_news(self._alert)
        self.keepers.begin()
        self.claim_soon()
        self._poll()

    @property
    def is_stopping(self) -> bool:
        """Whether it claims no more runs."""
        return self._stopping

    def stop_claiming(self) -> None:
        self._stopping = True

    async def leave(self) -> None:
        """Sign off after all leases are released."""
        self._stopping = True
        self._silence()
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        # at most one claim, and the answers of a few keepers: milliseconds
        while self._claiming or (self.keepers.driven and not self.engine.closed):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if self._to_give_back:
            await self._give_back()
        await self.engine.shares.leave()
        self.heart.stop()
        await self.heart.stopped()
        try:
            await self.engine.call(partial(self._renew, leaving=True))
        except StoreError as error:
            log.warning("the worker cannot sign off: %s", error)

    def has_room(self) -> bool:
        """Whether a new run may be created with a lease."""
        return not self._stopping and self._room() > self._asked and self.suspects.may_begin_others()

    def host_queues(self, queues: frozenset[str]) -> None:
        """Serve the queues of hosted agents, too."""
        if self.queues is not None:
            self.queues |= queues

    def serves(self, queue: str) -> bool:
        """Whether this worker drives runs of a queue."""
        return self.queues is None or queue in self.queues

    def _pins(self) -> dict[str, str]:
        """Return the version of each workflow of which this worker claims only runs of its own version."""
        return {w.name: w.version for w in list(self.engine.workflows.values()) if w.on_change == "pin"}

    def is_pinned_elsewhere(self, run: Run) -> bool:
        """Whether this worker leaves a run to workers that have its version."""
        return self._pins().get(run.workflow, run.version) != run.version

    def is_full(self) -> bool:
        """Whether this worker drives as many runs as it may."""
        return self._room() <= 0

    def _room(self) -> int:
        """Return how many more runs this worker may drive."""
        return self.max_runs - len(self.engine.live) - self.births

    # -- heartbeat ----------------------------------------------------------------------------------------------------

    def info(self) -> WorkerInfo:
        counter = self.engine.journal.counter
        counter.counts.resources = self.engine.resources()
        return WorkerInfo(
            id=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            renewed_at=instant(self.engine.clock.now()),
            workflows=(
                *sorted(self.engine.workflows),
                *(f"{name}@{one}" for name, one in sorted(self._pins().items())),
                *sorted(self.keepers.names - FOR_ALL),  # last, because equal programs may know different ones
            ),
            progress={
                **({} if self.queues is None else {QUEUES: msgspec.json.encode(sorted(self.queues))}),
                **({AGENTS: self.engine.hosting.text} if self.engine.hosting.text else {}),
                COUNTS: counter.text(self.engine.clock.boot()[1]),
                **{run: text for run, one in dict(self.progress).items() if (text := one.text())},
            },
        )

    def _renew(self, *, leaving: bool = False) -> bool:
        boot = self.engine.clock.boot()[1]
        info, self._lag = self.info(), 0.0
        known = self.engine.store.renew_leases(info, leaving=leaving)
        if known:
            self.engine.fresh_until = boot + self.engine.store.lease_seconds
        return known

    @property
    def lease_seconds(self) -> float:
        """How long a lease lasts after a heartbeat."""
        return self.engine.store.lease_seconds

    def is_abandoned(self) -> bool:
        """Whether the loop is closed: nothing is driven here any more, and nobody closed the engine."""
        abandoned = self.engine.loop.is_closed()
        if abandoned:
            self._silence()
        return abandoned

    def still_seconds(self) -> float:
        """Return the time for which the loop has not moved."""
        return self.engine.clock.boot()[1] - self._tick

    def lag_seconds(self) -> float:
        """Return the longest time by which the loop was late since the last heartbeat, and up to now."""
        timer = self._poll_timer
        if timer is None or timer.cancelled():
            return self._lag
        return max(self._lag, self.engine.loop.time() - timer.when())

    def blocking_code(self) -> tuple[str, str]:
        """Return the step or workflow that the loop's thread executes, and the line; "" twice if it executes none."""
        if self._thread_id is None or self._pace.jumps:  # a clock that jumps makes every loop look late
            return "", ""
        return blocking_code(self._thread_id)

    def beat_once(self) -> bool:
        """Renew the leases. Return False if the store could not be reached."""
        self.engine.journal.log_if_unanswered()
        worker = self.id
        try:
            known = self._renew()
        except StoreError as error:
            self.engine.outage.log("the heartbeat failed", error)
            return False
        except Exception:
            log.exception("the heartbeat failed")
            return False
        with contextlib.suppress(RuntimeError):  # the loop may have closed
            if not known:
                self.engine.loop.call_soon_threadsafe(self._given_up, worker)
            elif self._owes():
                self.engine.loop.call_soon_threadsafe(self._give_back_soon)
            if known and not self._stopping and self._is_draining():
                self.engine.loop.call_soon_threadsafe(self._told_to_drain)
        return True

    def _is_draining(self) -> bool:
        """Whether a person has told this worker to drain."""
        ask = optional(self.engine.store, OptionalStore.is_draining)
        try:
            return ask is not None and ask(self.id)
        except StoreError as error:
            self.engine.outage.log("cannot read the worker's own row", error)
            return False

    def _told_to_drain(self) -> None:
        if not self._stopping:
            log.warning("worker %s was told to drain: it claims no more runs", self.id)
            self.stop_claiming()
            self.engine.drain_requested()

    def report_progress(self, run: str, progress: StepsProgress) -> None:
        self.progress[run] = progress
        self.heart.hurry()

    def _given_up(self, worker: str) -> None:
        """The store took this worker for dead and gave its runs away: let all of them go."""
        if worker != self.id:  # a second heartbeat has told it before the loop moved: a stopped process wakes so
            return
        log.error("the store has given this worker up; its runs are driven by others now")
        for context in list(self.engine.live.values()):
            context.detach("its lease was lost")
        self.id = new_id("worker")
        self.engine.fresh_until = 0.0
        self.engine.journal.worker = self.id
        self.engine.shares.given_up()
        self.heart.hurry()
        self.claim_soon()

    # -- claiming -----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Check for writes of others: signals for our runs, and runs that became due."""
        self._alerted = False
        self._lag = self.lag_seconds()
        self._polled_at = self.engine.loop.time()
        self._tick = self.engine.clock.boot()[1]
        if self.engine.closed:
            return
        until = None if self._next_due is None else self._next_due - self.engine.clock.now()
        self._poll_again(self._pace.pause(until))
        if not self.engine.store.quick:
            if not self._polling:  # an unresponsive store is not polled again meanwhile
                self._polling = True
                self.engine.background(self._poll_slowly())
            return
        try:
            news = self.engine.store.news(self.id, self._cursor)
        except StoreError as error:
            self.engine.outage.log("cannot poll the store", error)
            return
        self._received(news)

    def _alert(self) -> None:
        """React to news that the store reports from its own thread."""
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self.engine.loop.call_soon_threadsafe(self._poll_now)

    def _poll_now(self) -> None:
        """Poll early, but not so often that nothing else is done."""
        if self._alerted or self._stopping or self.engine.closed:
            return
        self._alerted = True
        wait = self._polled_at + ALERT_SECONDS - self.engine.loop.time()
        self.engine.loop.call_later(max(0.0, wait), self._poll, context=self.engine.context)

    def look_soon(self) -> None:
        """Poll soon after a local event; on a virtual clock, others may react sooner than planned."""
        self._pace.moved()
        if self._poll_timer is not None and not self._stopping:
            self._poll_again(POLL_SECONDS)

    def _poll_again(self, seconds: float) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._poll_timer = self.engine.loop.call_later(seconds, self._poll, context=self.engine.context)

    async def _poll_slowly(self) -> None:
        try:
            self._received(await self.engine.call(self.engine.store.news, self.id, self._cursor))
        except StoreError as error:
            self.engine.outage.log("cannot poll the store", error)
        finally:
            self._polling = False

    def _received(self, news: Any) -> None:
        self._cursor = news.cursor
        for run in news.runs:
            self.engine.signal_reader.of(run)
        if news.changed:
            self.engine.notify_waiters()
        self.keepers.look_if_due()
        now = self.engine.clock.now()
        due = self._next_due is not None and self._next_due <= now
        if due or (news.changed if news.due is None else news.due):
            self.claim_soon()
        elif self.engine.loop.time() - self._last_claim > CLAIM_SECONDS:
            self._claim_soon(idle=self._found_none and not self.engine.shares.in_use)

    def look_for_keepers(self) -> None:
        """Claim a new keeper soon, and those of schedules that were added by hand."""
        self.claim_soon()
        self.engine.background(self.keepers.look())

    def claim_soon(self) -> None:
        """Claim due runs; calls during a claim cause one more after it."""
        self._claim_soon(idle=False)

    def _claim_soon(self, *, idle: bool) -> None:
        if self._stopping or self.engine.closed:
            return
        if self._claiming:
            self._claim_again |= not idle
            return
        self._claiming = True
        self.engine.background(self._claim(idle=idle))

    async def _claim(self, *, idle: bool) -> None:
        try:
            while not self._stopping:
                self._claim_again = False
                self._last_claim = self.engine.loop.time()
                full = await self._claim_once(idle=idle)
                idle = False
                if not full and not self._claim_again:
                    break
        except StoreError as error:
            self.engine.outage.log("cannot claim runs", error)
            self.doubt()
        finally:
            self._claiming = False

    async def _claim_once(self, *, idle: bool) -> bool:
        """Claim once. Return whether there may be more at once. `idle` is as in `ClaimRequest`."""
        self._found_none = False
        room = self._room()
        if room <= 0 or not self.engine.lease_is_fresh():
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
            self.keepers.names.union(self.engine.workflows) - self.engine.hosting.withheld,
            limit=min(room, CLAIM_LIMIT),
            versions=self._pins(),
            queues=None if self.queues is None else self.queues | {KEEPER_QUEUE},
            rooms=self.engine.shares.rooms(),
            idle=idle,
        )
        self._asked = request.limit
        try:
            claims = await self._claimed(request)
        finally:
            self._asked = 0
        if request.worker != self.id:  # the store has marked the asking worker dead, and given its leases away
            return True
        self.engine.shares.claimed(request.rooms, claims)
        self.keepers.are_found_elsewhere = claims.elsewhere
        before, self._next_due = self._next_due, claims.next_due_at.timestamp() if claims.next_due_at else None
        if self._pace.jumps and before != self._next_due:
            self.look_soon()
        if self._stopping:  # the engine is closing: these claims are handed back when the worker leaves
            self._to_give_back |= {claim.run.id: claim.lease.epoch for claim in claims.claims}
            return False
        runs = tuple(claim for claim in claims.claims if not self._is_kept(claim))
        for claim in await self._sort_out(await self._without_namesakes(runs)):
            self.engine.background(self.engine.runner.drive(claim))
        self._found_none = not claims.claims
        await asyncio.sleep(0)  # runs driven from now on take room before more are claimed
        return bool(claims.claims)

    def _is_kept(self, claim: Claim) -> bool:
        """Let a keeper answer, if the claimed run is one. Return whether it is."""
        if not is_keeper(claim.run.id):
            return False
        self.engine.background(self.keepers.drive(claim))
        return True

    async def _claimed(self, request: ClaimRequest) -> Claims:
        """Claim runs. Those whose steps an earlier owner may have left under way get what it has saved of them."""
        claims = await self.engine.call(self.engine.store.claim_runs, request)
        if not any(map(_may_be_cut_short, claims.claims)):
            return claims
        workers = await self.engine.call(partial(self.engine.store.list_workers, gone=True))
        return replace(claims, claims=tuple(_with_progress(claim, workers) for claim in claims.claims))

    async def _claim_suspect(self, run: str) -> None:
        """Drive the suspect whose turn has come. If it cannot be claimed, another worker has it, or it has ended."""
        self.suspects.stops_waiting(run)
        request = ClaimRequest(self.id, run=run, statuses=frozenset({Status.QUEUED}), drives=True)
        for claim in (await self._claimed(request)).claims:
            if self._stopping:
                self._to_give_back[run] = claim.lease.epoch
            elif request.worker == self.id:  # otherwise the store has marked the asking worker dead
                self._drive_suspect(claim)

    def _drive_suspect(self, claim: Claim) -> None:
        self.suspects.begins(claim.run.id)
        self.engine.background(self.engine.runner.drive(claim))
        self.engine.loop.call_later(ALONE_SECONDS, self.claim_soon, context=self.engine.context)

    async def _claim_children(self) -> None:
        """Drive the descendants of a suspect, because it might wait for them forever."""
        engine = self.engine
        for child in [child for context in engine.live.values() for child in context.children.open.values()]:
            run = None if child in engine.live else await engine.call(engine.store.get_run, child)
            if run is None or run.status.finished or run.workflow not in engine.workflows:
                continue
            if not self.serves(run.queue) or run.workflow in engine.hosting.withheld:
                continue
            if run.worker is None and (run.due_at is None or run.due_at.timestamp() > engine.clock.now()):
                continue
            request = ClaimRequest(self.id, run=child, statuses=frozenset({run.status}), drives=True)
            for claim in (await self._claimed(request)).claims:
                if self._stopping:
                    self._to_give_back[child] = claim.lease.epoch
                elif request.worker == self.id:  # otherwise the store has marked the asking worker dead
                    engine.background(engine.runner.drive(claim))

    async def _without_namesakes(self, claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
        """Return the claims without runs of another program's workflow of the same name; these are handed back."""
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
        """Return the claims to drive; a suspect waits for its turn.

        Suspects are handed back before anything is driven, so that no crash counts for them; other workers may claim
        them.
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
        due = instant(self.engine.clock.now() + wait)  # another worker can claim them
        put_back = [self._release(claim.run, claim.lease.epoch, due) for claim in suspects]
        for claim, failure in zip(suspects, await asyncio.gather(*put_back, return_exceptions=True), strict=True):
            if failure is not None:
                self._to_give_back[claim.run.id] = claim.lease.epoch
        return chosen

    def progressed(self, context: RunDriver) -> None:
        """Let other runs start again when a suspect has made progress or has left."""
        if self.suspects.current == context.id:
            self.suspects.ended()
            self.claim_soon()

    # -- handing back --------------------------------------------------------------------------------------------------

    def give_back_later(self, context: RunDriver, pause_seconds: float = 0.0) -> None:
        """Hand back a run that is no longer driven here when the store answers again; it is due after the pause."""
        self.release_later(context.id, context.epoch, pause_seconds)
        self._parting[context.id] = context, cut_short(context)

    def release_later(self, run_id: str, epoch: int, pause_seconds: float = 0.0) -> None:
        """Hand back a run that this worker holds and does not drive, as soon as the store answers."""
        self._to_give_back[run_id] = epoch
        self._not_before[run_id] = self.engine.clock.now() + pause_seconds
        self.heart.hurry()

    async def put_back(self, claim: Claim, error: EncryptionError | SchemaMismatch) -> None:
        """Leave a run that cannot be read here to other workers, and try it again later."""
        seconds = self._pause_of_newer(claim.run.id) if isinstance(error, SchemaMismatch) else KEY_SECONDS
        wanted = error.key_id if isinstance(error, EncryptionError) else _NEWER
        if wanted not in self._wanted:
            self._wanted.add(wanted)
            log.error("%s; such runs are left to other workers, and tried again in %d s", error, seconds)
        try:
            await self._release(claim.run, claim.lease.epoch, instant(self.engine.clock.now() + seconds))
        except StoreError:
            self._to_give_back[claim.run.id] = claim.lease.epoch

    def _pause_of_newer(self, run_id: str) -> float:
        """Return how long a run is left to newer workers: briefly at first, because one may be idle, then longer."""
        tries = self._newer.get(run_id, 0)
        if len(self._newer) >= MOST_NEWER:
            self._newer.clear()
        self._newer[run_id] = tries + 1
        return min(KEY_SECONDS, NEWER_SECONDS * 2.0**tries)

    def doubt(self) -> None:
        """Note that the answer to a claim or a start was lost, so this worker may have unknown leases."""
        self._doubt_until = self.engine.loop.time() + DOUBT_SECONDS

    def _owes(self) -> bool:
        return bool(self._to_give_back) or self.engine.loop.time() < self._doubt_until

    def _give_back_soon(self) -> None:
        if not self.engine.closed:
            self.engine.background(self._give_back())

    async def _find_lost(self) -> None:
        """Hand back runs that this worker has leased but does not drive, now and at the last heartbeat."""
        page = await self.engine.call(
            self.engine.store.list_runs, RunQuery(worker=self.id, limit=2 * self.max_runs, system=True)
        )
        held = {*self.engine.live, *self.keepers.driven}
        lost = {run.id: run.epoch for run in page.runs if run.id not in held}
        self._to_give_back |= {run: epoch for run, epoch in lost.items() if self._lost.get(run) == epoch}
        self._lost = lost

    async def _give_back(self) -> None:
        if self.engine.loop.time() < self._doubt_until:
            try:
                await self._find_lost()
            except StoreError as error:
                self.engine.outage.log("cannot list the runs of this worker yet", error)
                return
        for run_id, epoch in list(self._to_give_back.items()):
            try:
                run = await self.engine.read(self.engine.store.get_run, run_id)
                if run is not None and run.worker == self.id and run.epoch == epoch:
                    # The next heartbeat checks this again: a write that is still in progress may come first.
                    now = self.engine.clock.now()
                    parting = self._parting_rows(run)
                    await self._release(run, epoch, instant(max(now, self._not_before.get(run_id, now))), *parting)
                else:
                    self._to_give_back.pop(run_id, None)
                    self._not_before.pop(run_id, None)
                    self._parting.pop(run_id, None)
            except StoreError as error:
                self.engine.outage.log(f"cannot hand back run {run_id} yet", error)
                if not (isinstance(error, StoreUnavailable) and error.held):
                    return
        self.claim_soon()

    def _parting_rows(self, run: Run) -> tuple[Sequence[Row], str]:
        """Return the rows of what the steps of a run had saved when they were cut short, and the checksum after them.

        There are none if a write of the run was still under way.
        """
        context, drafts = self._parting.get(run.id, (None, []))
        if context is None or not drafts or (context.epoch, context.seq) != (run.epoch, run.seq):
            return (), run.checksum
        if not run.seq:
            at = instant(self.engine.clock.now())
            drafts = [Draft(self.engine.runner.started(run.id, context.workflow, self.id, at)), *drafts]
        return sealed(context, drafts)

    async def _release(
        self, run: Run, epoch: int, due_at: datetime, rows: Sequence[Row] = (), checksum: str | None = None
    ) -> None:
        """Put a run that this worker holds but does not drive back into the queue."""
        self.engine.shares.gone(run.id)
        end = run.checksum if checksum is None else checksum
        change = Advance(run.id, self.id, epoch, run.seq, rows, end, status=Status.QUEUED, release=True)
        change.due_at, change.progress = due_at, False
        answer = await self.engine.journal.write(change)
        if answer.verdict not in (Verdict.DONE, Verdict.FENCED):
            log.error("run %s cannot be handed back: %s", run.id, answer.verdict)
