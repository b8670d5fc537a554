"""A service with limits in the simulated world: how it is drawn, what calls it, and what is promised of it.

A plan with a service has calls beside its runs: short runs whose steps call one service, alone, several at once, or
with failures that open its breaker. A person may change its limits for a while.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import keepstep as ks
from keepstep.model.gate import SERVICE, Ask, GateInfo, Grant
from keepstep.policies.service import DECLARED, ServiceLimits
from keepstep.stores.rules import ENDED
from keepstep.stores.services import TOKEN_SECONDS
from keepstep.testing.virtual import EPOCH
from keepstep.workflows.definition import SERVICES

from .bodies import CLIENT, Body, here, pass_time
from .promise import Promise

if TYPE_CHECKING:
    from .process import Process
    from .world import Body as Ran
    from .world import World

NAME = "sim:service"
#: How often a history has a service.
SHARE = 0.12
#: The numbers of the calls' bodies begin here, beyond those of programs and jobs.
FIRST_NUMBER = 600
#: Bodies of one call, at most.
MOST_BODIES = 10
#: Rounding of a rate's tokens, which are counted from seconds since 1970.
ROUNDING = 1e-3
#: Time for which a body may begin after its worker was allowed to: the process may be stopped in between.
SLACK_SECONDS = 0.05
#: Seconds in which a lower limit reaches every worker, however slow the store: its lease ends before.
REACHED_SECONDS = 8.0


# -- what is drawn -----------------------------------------------------------------------------------------------------


def draw_limits(random: Random) -> dict[str, Any]:
    """Some limits, of which one at least is set."""
    limits: dict[str, Any] = {}
    if random.random() < 0.6:
        limits["concurrency"] = random.choice((1, 1, 2, 3))
    if random.random() < 0.4:
        limits["rate"] = {"count": random.choice((1, 2, 4)), "per": 1.0, "burst": random.choice((1, 2))}
    if random.random() < 0.4 or not limits:
        limits["breaker"] = {"failures": 2, "within": 20.0, "open_seconds": 3.0, "probes": 1, "successes": 1}
    return limits


def draw_service(random: Random, workers: int) -> dict[str, Any] | None:
    """The service of a plan, if it has one."""
    if random.random() >= SHARE:
        return None
    calls = [_draw_call(random, number, workers) for number in range(random.choice((2, 4, 6)))]
    return {"limits": draw_limits(random), "calls": calls}


def draw_spend(random: Random) -> dict[str, Any] | None:
    """How much calls may spend, if that has a limit; each of them spends 1."""
    if random.random() >= 0.25:
        return None
    return {"count": random.choice((1, 3)), "per": 1.0, "burst": random.choice((1, 2))}


def draw_change(random: Random) -> dict[str, Any]:
    """Other limits of the service, which hold for so long; it may be shut for a while."""
    limits: dict[str, Any] = {"concurrency": random.choice((0, 0, 1, 2, 4))}
    if random.random() < 0.4:
        limits["rate"] = {"count": random.choice((1, 2, 4)), "per": 1.0, "burst": 1}
    return {"limits": limits, "seconds": round(random.choice((2.0, 12.0)) * (0.5 + random.random()), 3)}


def _draw_call(random: Random, number: int, workers: int) -> dict[str, Any]:
    return {
        "id": f"call-{number}",
        "kind": random.choice(("one", "one", "many", "series", "fails")),
        "seconds": random.choice((0.0, 0.1, 0.6, 1.5, 4.0)),
        "key": random.choice((None, None, "a", "b")),
        "by": random.choice((CLIENT, *range(workers))),
        "at": round(random.choice((0.2, 0.2, 3.0)) * random.random(), 3),
    }


# -- what runs ---------------------------------------------------------------------------------------------------------


@ks.step(service=NAME, cost=1.0, retry=ks.Retry(attempts=6, base_seconds=0.3, jitter=0.2))
async def call_step(number: int, seconds: float, failures: int) -> int:
    """Calls the service, which fails so many times."""
    with Body(number) as attempt:
        await pass_time(seconds)
        if attempt <= failures:
            raise ConnectionError("the service is unwell")
    return number


SERVICES.discard(NAME)  # only a plan with a service has workers that use it


@ks.workflow(name="sim:served")
async def served(call: dict[str, Any]) -> int:
    """A run that calls the service."""
    number = FIRST_NUMBER + MOST_BODIES * int(call["id"].rpartition("-")[2])
    seconds = call["seconds"]
    if call["kind"] == "many":
        return sum(await ks.gather(*[call_step(number + one, seconds, 0) for one in range(3)]))
    if call["kind"] == "series":
        return sum([await call_step(number + one, seconds, 0) for one in range(4)])
    done: int = await call_step(number, seconds, 2 if call["kind"] == "fails" else 0)
    return done


@contextmanager
def using(plan: dict[str, Any]) -> Iterator[None]:
    """Have the processes of a history declare and use its service, and no other."""
    before, named = dict(DECLARED), set(SERVICES)
    DECLARED.clear()
    SERVICES.clear()
    if "service" in plan:
        SERVICES.add(NAME)
        limits = ServiceLimits.of(plan["service"]["limits"])
        names = ("concurrency", "rate", "spend", "breaker")
        ks.Service(NAME, **{name: getattr(limits, name) for name in names})
    try:
        yield
    finally:
        DECLARED.clear()
        DECLARED.update(before)
        SERVICES.clear()
        SERVICES.update(named)


class Calls:
    """The calls of a history, as its client knows them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.specs: list[dict[str, Any]] = world.plan.get("service", {}).get("calls", [])
        self.started: set[str] = set()
        #: The limits that the service had from a time on. They hold until the next ones surely do.
        self.held: list[tuple[float, ServiceLimits]] = []
        if self.specs:
            self.held.append((0.0, ServiceLimits.of(world.plan["service"]["limits"])))
        self.to_come = 0

    def begin(self) -> None:
        """Have every call started at its time."""
        for call in self.specs:
            self.world.at(call["at"], partial(self._starts, call))

    def last_at(self) -> float:
        """When the last call is started."""
        return max((call["at"] for call in self.specs), default=0.0)

    def all_started(self) -> bool:
        """Whether every call was accepted."""
        return len(self.started) == len(self.specs) and not self.to_come

    def limit(self, event: dict[str, Any]) -> None:
        """Have the client change the limits of the service for a while."""
        if not self.specs:
            return
        self.to_come += 1

        async def do(client: Process) -> None:
            await self._limit(client, event)
            self.to_come -= 1

        self.world.client.do(self.world.client.process, partial(self.world.client.insist, do))

    async def _limit(self, client: Process, event: dict[str, Any]) -> None:
        world, (_, own), given = self.world, self.held[0], ServiceLimits.of(event["limits"])
        changes = {name: getattr(given, name) for name in event["limits"]}
        other = replace(own, **changes)
        self._holds(other)
        await client.engine.services.set(NAME, **changes)
        self._holds(own, other)
        world.tell(f"client: the service has {other}")
        await asyncio.sleep(event["seconds"])
        self._holds(own)
        await world.client.insist(lambda now: now.engine.services.reset(NAME))
        self._holds(other, own)
        world.tell("client: the service has its own limits again")

    def _holds(self, *limits: ServiceLimits) -> None:
        self.held += [(self.world.now, one) for one in limits]

    def _starts(self, call: dict[str, Any]) -> None:
        client, process = self.world.client, self.world.processes.get(call["by"])
        if process is not None and process.slot != CLIENT and process.opened and not process.dead:
            client.do(process, partial(self._start, call, process))
        client.do(client.process, partial(client.insist, partial(self._start, call), after=0.5))

    async def _start(self, call: dict[str, Any], process: Process) -> None:
        if call["id"] not in self.started:
            await process.engine.start(served, call, run_id=call["id"], key=call["key"])
            self.started.add(call["id"])
            self.world.tell(f"{call['id']} is accepted")


# -- what is promised --------------------------------------------------------------------------------------------------


class _OfService(Promise):
    """Knows the limits of the service, and which bodies call it."""

    @property
    def gate(self) -> GateInfo | None:
        return self.world.store._gates.get((SERVICE, NAME))

    @property
    def limits(self) -> ServiceLimits:
        return ServiceLimits() if self.gate is None else ServiceLimits.of(self.gate.limits)

    def values(self, name: str, seconds: float = math.inf) -> list[Any]:
        """What a limit was at any time within the last seconds; empty if it was lifted in that time."""
        held, since = here().calls_of_service.held, self.world.now - seconds
        before = [limits for at, limits in held if at <= since][-1:]
        found = [getattr(limits, name) for limits in [*before, *(limits for at, limits in held if at > since)]]
        return [] if None in found else found

    def lives(self, process: Process) -> bool:
        """Whether a process and its worker are alive, so that its bodies count."""
        gone = self.world.store._gone | self.world.killed
        return not process.dead and not any(worker in gone for worker in process.ids)

    @staticmethod
    def calls(body: Ran) -> bool:
        return FIRST_NUMBER <= body.number < FIRST_NUMBER + 100

    def running(self) -> list[Ran]:
        """The bodies of living workers that call the service now."""
        return [body for body in self.world.running.values() if self.calls(body) and self.lives(body.process)]


class PlacesOfAServiceHold(_OfService):
    """No body begins at a service while as many run as its concurrency."""

    name = "no more attempts call a service than it has places"

    def begins(self, body: Ran, idempotency_key: str) -> None:
        values = self.values("concurrency", REACHED_SECONDS)
        if not values or not self.calls(body) or not self.lives(body.process):
            return
        others, most = self.running(), max(values)
        if len(others) >= most:
            names = ", ".join(f"{one.run} {one.key} at {one.process}" for one in others)
            self.broken(f"{body.run} {body.key} begins at {body.process} while {names} run, and {most} may")


class RateOfAServiceHolds(_OfService):
    """In any w seconds at most burst + rate * (w + 1) attempts begin, whichever workers begin them."""

    name = "attempts at a service begin no faster than its rate"

    def prepare(self) -> None:
        self._begun_at: list[float] = []

    def begins(self, body: Ran, idempotency_key: str) -> None:
        rates = self.values("rate")
        if not rates or not self.calls(body) or "set clock" in self.world.befell:
            return  # a clock that jumps ahead brings tokens
        self._begun_at.append(self.world.now)
        burst, interval = max(rate.burst for rate in rates), min(rate.interval for rate in rates)
        for place, first in enumerate(self._begun_at):
            count, seconds = len(self._begun_at) - place, self.world.now - first + 1 + SLACK_SECONDS
            if count > burst + seconds / interval + ROUNDING:
                self.broken(f"{body.run} {body.key}: {count} begin in {seconds - 1:g} s, of {rates}")
                return


class DebtHoldsAService(_OfService):
    """What attempts are expected to spend, and what they have told beyond that, is owed; in debt none is granted."""

    name = "a service in debt lets no attempt begin"

    def prepare(self) -> None:
        self._owed_until = -math.inf

    def passed(self, process: Process, ask: Ask, grant: Grant) -> None:
        spend, now = self.limits.spend, EPOCH + self.world.now
        if spend is None or ask.service != NAME or grant.why == "lease" or "set clock" in self.world.befell:
            return
        least, most = now - spend.burst * spend.interval - TOKEN_SECONDS, now + spend.per
        owed = max(min(max(self._owed_until, least) + ask.spent * spend.interval, most), least)
        if grant.tokens and owed > now + ROUNDING:
            self.broken(f"{process} is granted {grant.tokens} attempts, and {(owed - now) / spend.interval:g} are owed")
        self._owed_until = min(owed + (grant.tokens or 0) * max(ask.estimate, 0.0) * spend.interval, most)


class SharesAddUp(_OfService):
    """The shares of living workers never add up to more than the concurrency, and cover what runs."""

    name = "the shares of a service add up to no more than its places"

    def passed(self, process: Process, ask: Ask, grant: Grant) -> None:
        values, shares = self.values("concurrency"), self.world.store._living(NAME)
        if ask.service == NAME and values and sum(share.held for share in shares) > max(values):
            self.broken(f"{process} is granted {grant.share}: {shares}, of {max(values)}")


class ProbesAreFew(_OfService):
    """While a breaker is half-open, no more probes run than it allows; while it is open, no more are granted."""

    name = "a breaker lets few probes begin"

    def passed(self, process: Process, ask: Ask, grant: Grant) -> None:
        breaker = self.limits.breaker
        if ask.service != NAME or breaker is None or grant.probes is None:
            return
        if grant.probes > (breaker.probes if grant.breaker == "half-open" else 0):
            self.broken(f"{process} is granted {grant.probes} probes while the breaker is {grant.breaker}")


class CallsEnd(_OfService):
    """Every run that calls the service ends: no place, token or probe is lost for good."""

    name = "every run that calls a service ends"

    def ended(self) -> None:
        for name in sorted(here().calls_of_service.started):
            head = self.entries()[name].head
            if head.status not in ENDED:
                self.broken(f"{name} is {head.status.value}, waits for {head.service!r}; the service is {self.gate}")


SERVICE_PROMISES: list[type[Promise]] = [
    PlacesOfAServiceHold,
    RateOfAServiceHolds,
    DebtHoldsAService,
    SharesAddUp,
    ProbesAreFew,
    CallsEnd,
]
