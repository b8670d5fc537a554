"""The shares of services that this process holds: which attempts may begin here, and what the store is asked for.

An attempt that finds a free place in its process asks nobody. The store is asked one to four times a second while
attempts run or wait, in calls of their own.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import StoreError
from ..kernel.host import Turn
from ..model import Event
from ..model.gate import Ask, Grant
from ..policies.breaker import OPEN
from ..policies.service import DECLARED
from ..ports import instant
from ..workflows.definition import SERVICES

if TYPE_CHECKING:
    from ..kernel.driver import RunDriver
    from ..model import Claims
    from ..model.event import EventName
    from .process import Process

log = logging.getLogger("keepstep")

#: Shortest and longest time in seconds between two asks of a service while attempts run or wait here.
SOON_SECONDS = 0.25
LOOK_SECONDS = 1.0
#: Asks at once, after a while without any, so that the first attempts need not wait for each other.
ASKS_AT_ONCE = 3
#: Seconds for which a service without a limit is believed to have none.
BELIEVED_SECONDS = 2.0
#: Seconds for which a claimed run has its place before its attempt has come back to it.
EXPECTED_SECONDS = 10.0
#: Shortest time in seconds between two places that parked runs get before attempts that wait here.
OFFER_SECONDS = 0.5
#: Places for parked runs that a worker offers at once, if a service has no limit.
MOST_ROOMS = 100
#: Part of the attempts of the last `RETRY_WINDOW` seconds that may be retries, at least one a second.
RETRY_PART = 0.2
RETRY_WINDOW = 10
#: Longest time in seconds for which a retry is put off before it looks again.
RETRY_LATER_SECONDS = 60.0
#: Weight of the newest attempt in the mean spend.
NEWEST = 0.2


#: The events of a breaker that has moved.
_EVENTS: Mapping[str, EventName] = {
    "opened": "breaker.opened",
    "half-open": "breaker.half_open",
    "closed": "breaker.closed",
}


class Place:
    """A place at a service that one attempt holds until its body has really ended."""

    __slots__ = ("_cost", "_is_left", "_is_told", "_share", "has_begun", "is_probe", "reserved")

    def __init__(self, share: ServiceShare, cost: float | None, reserved: float, *, is_probe: bool) -> None:
        self._share = share
        self._cost = cost
        #: The spend that the store has taken for it in advance.
        self.reserved = reserved
        self.is_probe = is_probe
        self.has_begun = False
        self._is_told = False
        self._is_left = False

    def ended(self, failed: bool | None, spent: float | None) -> None:
        """Note how the body has ended: whether that counts for the breaker (None: cancelled), and its spend."""
        if not self._is_told:
            self._is_told = True
            self._share.ended(self, failed, self._cost if spent is None else spent, is_known=spent is not None)

    def leave(self) -> None:
        """Give the place back; the body has really ended, or does not begin."""
        if not self._is_left:
            self._is_left = True
            if not self._is_told:
                self._is_told = True
                self._share.unused(self)
            self._share.left()

    def succeed(self) -> None:
        """Give the place back after an attempt that has succeeded, and has reported no spend."""
        if self.is_probe or self._cost is not None or self._is_told:
            self.ended(failed=False, spent=None)
            self.leave()
        else:
            self._is_told = self._is_left = True
            self._share.left()

    def leave_to(self, run: str) -> None:
        """Keep the place for the next attempt of a run."""
        self._share.expect(run)
        self.leave()


class Retries:
    """Counts the attempts and retries of the last seconds."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque([[0, 0, 0]])  # second, attempts, retries; the newest last
        self._next = float("-inf")  # end of the newest second
        self._last_retry_at = float("-inf")
        self._put_off = 0

    def begun(self, now: float) -> None:
        """Count an attempt; a retry counts as one, too."""
        if now >= self._next:
            self._turn(now)
        self._seconds[-1][1] += 1

    def _turn(self, now: float) -> None:
        second = int(now)
        self._next = second + 1.0
        self._seconds.append([second, 0, 0])
        while self._seconds[0][0] <= second - RETRY_WINDOW:
            self._seconds.popleft()

    def wait_seconds(self, now: float) -> float:
        """Return for how long a retry has to wait. Count it if that is 0."""
        if now >= self._next:
            self._turn(now)
        attempts = sum(one for _, one, _ in self._seconds)
        retries = sum(one for _, _, one in self._seconds)
        if now - self._last_retry_at >= 1.0 or retries + 1 <= RETRY_PART * attempts:
            self._last_retry_at, self._put_off = now, max(0, self._put_off - 1)
            self._seconds[-1][2] += 1
            return 0.0
        self._put_off += 1
        return max(self._last_retry_at + 1.0 - now, min(float(self._put_off), RETRY_LATER_SECONDS))


class ServiceShare:
    """The places of one service that attempts of this process may use, and the attempts that wait for one."""

    def __init__(self, shares: Shares, name: str) -> None:
        self.name = name
        self.why = ""
        #: Attempts that hold a place.
        self.running = 0
        #: Attempts that have begun, and failures that count for the breaker, since the process opened the store.
        self.attempts = self.failures = 0
        #: When the store is to be asked, on the loop's clock; None if there is nothing to ask.
        self.ask_at: float | None = None
        self._shares = shares
        self._places: int | None = 0
        self._most: int | None = None  # bodies that may run while an ask is under way
        self._peak = 0  # bodies that have run at once since the last ask
        self._tokens: deque[tuple[float, int, float]] | None = deque()  # until, how many, spend taken for each
        self._probes: int | None = None
        self._fails = False  # whether attempts fail while the breaker is open
        self._believed_until = float("-inf")
        self._asked_at = float("-inf")
        self._pace = float("-inf")  # the time up to which the asks are used up, a quarter of a second for each
        self._line: list[tuple[int, float, int, Turn]] = []
        self._numbers = itertools.count()
        self._expected: dict[str, list[float]] = {}  # until when a claimed run has its places
        self._parked = 0
        self._parked_since: float | None = None  # of the wall clock
        self._offered_until = float("-inf")
        self._offer_at = float("-inf")
        self._retries = Retries()
        self._mean = 0.0
        # news for the store
        self._begun = 0
        self._spent = 0.0
        self._failures = 0
        self._probes_passed = self._probes_failed = self._probes_unused = 0

    # -- for attempts --------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> str:
        """The service and why attempts wait for it."""
        return f"{self.name} ({self.why})" if self.why else self.name

    def take(self, cost: float | None) -> Place | None:
        """Return a place if there is one for every attempt; None if an attempt must take its turn."""
        if self._line or self._expected or self._tokens is not None or self._probes is not None:
            return None
        now, running = self._shares.time(), self.running
        if now < self._offered_until or (self._most is not None and running >= self._most):
            return None
        if now >= self._believed_until if self._places is None else running >= self._places:
            return None
        return self._place(cost, now)

    def turn(self, run: str, priority: int, since: float | None, cost: float | None, probe_seconds: float) -> Turn:
        """Return the turn of an attempt; it is done if there is a place for it."""
        now = self._shares.time()
        turn = Turn(run, now if since is None else since, cost, probe_seconds, self._shares.loop)
        until = self._expected.get(run)
        if until is not None:
            until.pop()
            if not until:
                del self._expected[run]
            turn.since = min(turn.since, now - OFFER_SECONDS)  # a claimed run has waited longest
        if (until is not None or not self._line) and self._may_begin(now):
            turn.set_result(self._place(turn.cost, now))
            return turn
        heapq.heappush(self._line, (-priority, turn.since, next(self._numbers), turn))
        if self._fails and self._probes == 0 and now < self._believed_until:
            self._refuse_all()
        else:
            self._ask_soon()
        return turn

    def withdraw(self, turn: Turn) -> None:
        """Drop a turn whose attempt no longer waits; a place that it has got already is given back."""
        if turn.done() and not turn.cancelled():
            place = turn.result()
            if place is not None:
                place.leave()
            return
        self._line = [one for one in self._line if one[-1] is not turn]
        heapq.heapify(self._line)

    def retry_seconds(self, run: str) -> float:
        """Return for how long a retry has to wait, so that retries are a small part of the attempts.

        A run that was claimed for its place waits no longer: its retry was counted before it was parked.
        """
        return 0.0 if run in self._expected else self._retries.wait_seconds(self._shares.time())

    # -- places --------------------------------------------------------------------------------------------------------

    def _reserved(self, now: float) -> int:
        """Return the places that are kept for claimed runs, and for runs that are about to be claimed."""
        if self._expected:
            for run, until in list(self._expected.items()):
                if until[-1] <= now:
                    del self._expected[run]
        return sum(map(len, self._expected.values())) + (now < self._offered_until)

    def _room(self, now: float) -> int | None:
        """Return how many attempts may begin now; None for any number."""
        if now >= self._believed_until and (self._places is None or self._probes is not None):
            return 0
        kept = self._reserved(now)
        rooms: list[int] = []
        if self._places is not None:
            rooms.append(self._places - self.running - kept)
        if self._most is not None:
            rooms.append(self._most - self.running - kept)
        if self._tokens is not None:
            while self._tokens and self._tokens[0][0] <= now:
                _, count, estimate = self._tokens.popleft()
                self._spent -= count * estimate
            rooms.append(sum(count for _, count, _ in self._tokens) - kept)
        if self._probes is not None:
            rooms.append(self._probes - kept)
        return max(0, min(rooms)) if rooms else None

    def _may_begin(self, now: float) -> bool:
        room = self._room(now)
        return room is None or room > 0

    def _place(self, cost: float | None, now: float) -> Place:
        self.running += 1
        if self.running > self._peak:  # noqa: PLR1730 - on the hot path, where `max` costs a call
            self._peak = self.running
        self.attempts += 1
        self._begun += 1
        self._retries.begun(now)
        if cost is not None and not self._mean:  # until a body has told what it spent
            self._mean = cost
        estimate = 0.0
        if self._tokens is not None:
            until, count, estimate = self._tokens.popleft()
            if count > 1:
                self._tokens.appendleft((until, count - 1, estimate))
        if self._probes is not None:
            self._probes -= 1
        if self.ask_at is None:
            self._ask_at(self._asked_at + LOOK_SECONDS)
        return Place(self, cost, estimate, is_probe=self._probes is not None)

    def ended(self, place: Place, failed: bool | None, spent: float | None, *, is_known: bool) -> None:
        """Note how a body has ended."""
        if spent is not None:
            self._spent += spent - place.reserved
            if is_known:
                self._mean = spent if not self._mean else (1 - NEWEST) * self._mean + NEWEST * spent
        self.failures += bool(failed)
        if place.is_probe:
            self._probes_passed += failed is False
            self._probes_failed += failed is True
            self._probes_unused += failed is None
        elif failed:
            self._failures += 1
        if failed or place.is_probe:
            self._ask_soon()

    def unused(self, place: Place) -> None:
        """Note that no body has begun in a place."""
        self._spent -= place.reserved
        self._probes_unused += place.is_probe
        self.attempts -= 1
        self._begun -= self._begun > 0

    def left(self) -> None:
        """A place has fallen free."""
        self.running -= 1
        if self._line:
            self.serve()
        elif self._places is not None and (self.ask_at is None or self.ask_at > self._pace):
            self._ask_soon()

    def serve(self) -> None:
        """Let attempts begin that wait here, as far as there is room."""
        now = self._shares.time()
        self._offer(now)
        while self._line and self._may_begin(now):
            turn = heapq.heappop(self._line)[-1]
            if not turn.done():
                turn.set_result(self._place(turn.cost, now))

    def _refuse_all(self) -> None:
        line, self._line = self._line, []
        for *_, turn in line:
            if not turn.done():
                turn.set_result(None)

    # -- parked runs ---------------------------------------------------------------------------------------------------

    def _offer(self, now: float) -> None:
        """Keep a place for a parked run from time to time, so that attempts that come later do not always pass it."""
        if self._parked and self._line and now >= self._offer_at and now >= self._offered_until:
            waited = self._shares.wall() - (self._parked_since or 0.0)
            if waited > now - self._line[0][1] and self._may_begin(now) and self._shares.may_claim():
                self._offered_until, self._offer_at = now + OFFER_SECONDS, now + 2 * OFFER_SECONDS
                self._shares.claim_soon()

    def rooms(self) -> int:
        """Return how many parked runs this process can let begin now."""
        now = self._shares.time()
        room = self._room(now)
        free = MOST_ROOMS if room is None else 0 if self._line else room
        return min(MOST_ROOMS, free + (now < self._offered_until))

    def parked(self, count: int, since: float | None, claimed: Sequence[str]) -> None:
        """Note the runs that wait at the service in the store, after a claim that has taken some of them."""
        self._offered_until = float("-inf")
        for run in claimed:
            self.expect(run)
        before, self._parked, self._parked_since = self._parked, count, since
        if count and (not before or not self.rooms()):
            self._ask_soon(repeat=bool(before))
        elif count and claimed:
            self._shares.claim_soon()
        self.serve()

    def expect(self, run: str) -> None:
        """Keep a place for a run until its attempt comes."""
        self._expected.setdefault(run, []).append(self._shares.time() + EXPECTED_SECONDS)

    def gone(self, run: str) -> None:
        """Keep no place for a run that has left this process."""
        if self._expected.pop(run, None) is not None:
            self.serve()

    # -- asking --------------------------------------------------------------------------------------------------------

    def _ask_soon(self, *, repeat: bool = False) -> None:
        self._ask_at(max(self._shares.time(), self._asked_at + LOOK_SECONDS if repeat else self._pace))

    def _ask_at(self, at: float) -> None:
        if self.ask_at is None or at < self.ask_at:
            self.ask_at = at
            self._shares.wake()

    def ask(self) -> Ask:
        """Return what the store is told, and wait for its answer."""
        now = self._shares.time()
        self._asked_at, self.ask_at = now, None
        self._pace = max(self._pace, now - (ASKS_AT_ONCE - 1) * SOON_SECONDS) + SOON_SECONDS
        # As many as before may run until the answer comes, so that an ask delays no attempt.
        self._most = max(self.running, self._peak if self._places is None else min(self._peak, self._places))
        self._peak = self.running
        self._room(now)  # takes back the spend of tokens that have lapsed
        if self._probes and not (self._line or self._parked or self._expected):
            self._probes_unused += self._probes
            self._probes = 0
        waiting = [turn for *_, turn in self._line]
        waited = [now - turn.since for turn in waiting]
        parked = self._parked if self._shares.may_claim() else 0
        if parked and self._parked_since is not None:
            waited.append(self._shares.wall() - self._parked_since)
        costs = [self._mean if turn.cost is None else turn.cost for turn in waiting] or [self._mean]
        ask = Ask(
            self.name,
            running=self._most,
            waiting=len(waiting) + parked + sum(map(len, self._expected.values())),
            waited_seconds=max(0.0, *waited) if waited else 0.0,
            begun=self._begun,
            estimate=sum(costs) / len(costs),
            spent=self._spent,
            failures=self._failures,
            passed=self._probes_passed,
            failed=self._probes_failed,
            unused=self._probes_unused,
            probe_seconds=max((turn.probe_seconds for turn in waiting), default=60.0),
        )
        self._begun = self._failures = 0
        self._spent = 0.0
        self._probes_passed = self._probes_failed = self._probes_unused = 0
        return ask

    def unanswered(self, ask: Ask) -> None:
        """Tell the store again what an ask has told that the store has not answered."""
        self._most = None
        # The store may have answered, and given the other places away.
        self._places = ask.running if self._places is None else min(self._places, ask.running)
        self._begun += ask.begun
        self._spent += ask.spent
        self._failures += ask.failures
        self._probes_passed += ask.passed
        self._probes_failed += ask.failed
        self._probes_unused += ask.unused
        self._ask_at(self._shares.time() + LOOK_SECONDS)

    def granted(self, ask: Ask, grant: Grant) -> None:
        """Use the answer of the store."""
        self._shares.time()
        self._most = None
        self._places, self.why = grant.share, grant.why
        if grant.tokens is None:
            self._tokens = None
        else:
            self._tokens = self._tokens or deque()
            if grant.tokens:
                self._tokens.append((self._asked_at + grant.tokens_seconds, grant.tokens, ask.estimate))
        left = 0 if self._probes is None or grant.breaker == OPEN else self._probes  # open again: earlier ones are void
        self._probes = None if grant.probes is None else left + grant.probes
        self._fails = grant.when_open == "fail"
        self._believed_until = self._asked_at + BELIEVED_SECONDS
        self.serve()
        if self._fails and self._probes == 0:
            self._refuse_all()
        if self._is_in_use():
            self._ask_at(self._asked_at + min(max(grant.again_seconds, SOON_SECONDS), LOOK_SECONDS))
        if self._parked and self.rooms():
            self._shares.claim_soon()

    def _is_in_use(self) -> bool:
        news = self._begun or self._failures or self._probes_passed or self._probes_failed or self._probes_unused
        waits = self._line or self._parked or self._expected
        return bool(self.running or waits or self._places or self._probes or news)

    def given_up(self) -> None:
        """Begin again: the store has given the worker up, and its places to others."""
        self._places, self._tokens, self._probes, self._most = 0, deque(), None, None
        self._believed_until = float("-inf")
        self._expected.clear()
        self._probes_passed = self._probes_failed = self._probes_unused = 0
        self._ask_soon()


class Shares:
    """The shares of all services that attempts of this process call."""

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        self._shares: dict[str, ServiceShare] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_asking = False
        self._has_begun = False

    # -- for shares ----------------------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the process."""
        return self._engine.loop

    def time(self) -> float:
        """Return the time of the loop's clock."""
        return self._engine.loop.time()

    def wall(self) -> float:
        """Return the time in seconds since 1970."""
        return self._engine.clock.now()

    def may_claim(self) -> bool:
        """Whether the worker could drive another run."""
        return self._engine.worker is not None and self._engine.worker.has_room()

    def claim_soon(self) -> None:
        """Let the worker claim parked runs."""
        self._engine.claim_soon()

    # -- for the kernel and the worker ---------------------------------------------------------------------------------

    def of(self, service: str) -> ServiceShare:
        """Return the share of one service."""
        share = self._shares.get(service)
        if share is None:
            share = self._shares[service] = ServiceShare(self, service)
        return share

    def begin(self) -> None:
        """Tell the store which services the worker uses, before it claims."""
        self._has_begun = True
        for name in self._named():
            self.of(name)._ask_soon()  # noqa: SLF001 - its own share

    def _named(self) -> set[str]:
        return SERVICES.union(DECLARED)

    @property
    def in_use(self) -> bool:
        """Whether attempts hold or await a place, or have just done so."""
        return any(share.ask_at is not None for share in self._shares.values())

    def rooms(self) -> Mapping[str, int]:
        """Return the services that this process uses, each with the parked runs that it can let begin."""
        if not SERVICES and not DECLARED:
            return {}
        return {name: self.of(name).rooms() for name in sorted(self._named())}

    def claimed(self, rooms: Mapping[str, int], claims: Claims) -> None:
        """Note the answer to a claim with these rooms."""
        if not rooms:
            return
        parked = {one.service: one for one in claims.at_services}
        taken: dict[str, list[str]] = {}
        for claim in claims.claims:
            if claim.service is not None:
                taken.setdefault(claim.service, []).append(claim.run.id)
        for name in rooms:
            one = parked.get(name)
            count, since = (0, None) if one is None else (one.runs, one.since.timestamp())
            self.of(name).parked(count, since, taken.get(name, ()))

    def left(self, context: RunDriver) -> None:
        """Keep no place for a run that has left this process; a run that is replayed comes back."""
        forgetting = self._engine.forgetting
        if self._shares and not (forgetting is not None and forgetting.keeps(context)):
            self.gone(context.id)

    def gone(self, run: str) -> None:
        """Keep no place for a run that is not driven here."""
        for share in self._shares.values():
            share.gone(run)

    def given_up(self) -> None:
        """Ask for places again under the new name of the worker."""
        for share in self._shares.values():
            share.given_up()

    async def leave(self) -> None:
        """Give all places back: the worker signs off."""
        self._has_begun = False
        if self._timer is not None:
            self._timer.cancel()
        asks = [Ask(name, leaving=True) for name in self._shares]
        if asks and self._engine.worker is not None:
            try:
                await self._engine.call(self._engine.store.pass_gates, self._engine.worker.id, asks)
            except StoreError as error:  # the shares end with the worker
                self._engine.outage.log("cannot give back the places of services", error)

    # -- asking --------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Ask the store when the first share has something to ask."""
        times = [share.ask_at for share in self._shares.values() if share.ask_at is not None]
        if not times or self._is_asking or not self._has_begun or self._engine.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(min(times), self._ask, context=self._engine.context)

    def _ask(self) -> None:
        self._timer = None
        if not self._is_asking and not self._engine.closed:
            self._is_asking = True
            self._engine.background(self._ask_all())

    async def _ask_all(self) -> None:
        """Ask for all shares that have something to ask, in one call."""
        engine, worker = self._engine, self._engine.worker_id
        now = self.time()
        due = [share for share in self._shares.values() if share.ask_at is not None and share.ask_at <= now]
        try:
            if worker is None or not due:
                return
            asks = [share.ask() for share in due]
            try:
                grants = await engine.call(engine.store.pass_gates, worker, asks)
            except BaseException as error:
                for share, ask in zip(due, asks, strict=True):
                    share.unanswered(ask)
                if not isinstance(error, StoreError):
                    raise
                engine.outage.log("cannot ask services for places", error)
                return
            if worker != engine.worker_id:  # given up meanwhile
                return
            for share, ask, grant in zip(due, asks, grants, strict=True):
                share.granted(ask, grant)
                self._emit(grant)
        finally:
            self._is_asking = False
            self.wake()

    def _emit(self, grant: Grant) -> None:
        """Emit the event of a breaker that this process has moved."""
        name = _EVENTS.get(grant.moved)
        if name is None:
            return
        if grant.moved == "opened":
            self._engine.breaker_opened(grant.service)
        if grant.moved == "opened" and not self._engine.events.logged:
            log.warning("service %s: the breaker opens, because calls have failed too often", grant.service)
        if self._engine.events.observed:
            at, worker = instant(self._engine.clock.now()), self._engine.worker_id or ""
            self._engine.events.emit(Event(name, "", at, worker=worker, data={"service": grant.service}))
