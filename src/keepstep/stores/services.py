"""The answer of a service to a worker, written once for every store.

A store reads the gate and the shares of workers that it has not given up, under the lock of the gate, and writes the
gate and the share of the `Passage`. A crash may lose the newest of them, together with all workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from ..checks import MOST
from ..model.gate import Ask, GateInfo, Grant, Share
from ..policies.breaker import CLOSED, BreakerState
from ..policies.rate import next_token_at, spend_left, tokens
from ..policies.service import ServiceLimits
from ..ports import ClaimRequest

#: Seconds after which a worker that uses a service asks again, so that a change of limits or needs reaches it.
LOOK_SECONDS = 1.0
#: Shortest time between two asks of a worker that waits. A hundred workers must not ask more than a few times a second.
SOON_SECONDS = 0.25
#: Seconds for which tokens are valid, and for which a rate saves tokens that nobody has asked for. Both together are
#: one second: in any w seconds at most burst + rate * (w + 1) attempts begin.
TOKEN_SECONDS = 0.5

#: Prefix of `gate` in the head of a run that waits at a service. No queue has such a name.
_AT_SERVICE = "service/"
#: Names between which the gates of services lie. The character after the last one of the prefix ends the range.
FIRST_SERVICE, AFTER_SERVICES = _AT_SERVICE, "service0"
#: SQL condition of a run that waits at a service and for a time.
TIMED_SQL = "worker IS NULL AND due_at IS NOT NULL AND gate >= 'service/' AND gate < 'service0'"
#: Runs at services whose time has come that one claim lets go on.
TIMED = 500
#: Number up to which a claim counts the parked runs that it had no room for.
MOST_COUNTED = 100


def gate_text(service: str | None) -> str | None:
    """Return the stored form of the gate at which a parked run waits."""
    return None if service is None else f"{_AT_SERVICE}{service}"


def service_in(gate: str | None) -> str | None:
    """Return the service in the stored form of a gate; None for a queue."""
    return gate.removeprefix(_AT_SERVICE) if gate is not None and gate.startswith(_AT_SERVICE) else None


def share_of(row: Sequence[Any]) -> Share:
    """Return the share in a stored row; damaged numbers count as none."""
    worker, held, need, since = row
    held, need = (value if isinstance(value, int) else 0 for value in (held, need))
    return Share(str(worker), held, need, since if isinstance(since, float) else None)


class Passage(NamedTuple):
    """The gate and the share after an ask, and the answer. A share of None is removed."""

    gate: GateInfo
    share: Share | None
    grant: Grant


def refused(ask: Ask) -> Grant:
    """Return the answer to a worker that the store has given up."""
    return Grant(ask.service, 0, 0, 0.0, 0, LOOK_SECONDS, "lease")


def limits_of(gate: GateInfo) -> ServiceLimits:
    """Return the limits of a service that hold now. Damage lifts them, so that it does not stop steps."""
    return ServiceLimits.of(gate.limits)


def breaker_of(gate: GateInfo) -> BreakerState:
    """Return where the breaker of a service stands."""
    try:
        return msgspec.convert(gate.breaker or {}, BreakerState)
    except msgspec.ValidationError:
        return BreakerState()


def with_breaker(gate: GateInfo, state: BreakerState) -> GateInfo:
    """Return the gate with another state of its breaker."""
    plain: dict[str, Any] = msgspec.to_builtins(state)
    kept = {name: value for name, value in plain.items() if value}
    return gate if kept == (gate.breaker or {}) else replace(gate, breaker=kept or None)


# -- the decision ------------------------------------------------------------------------------------------------------


def decide(gate: GateInfo, shares: Sequence[Share], worker: str, ask: Ask, now: float) -> Passage:
    """Decide one ask of a worker, from the gate and the shares of living workers.

    Damage that cannot be counted with limits nothing, so that it stops neither this service nor the others.
    """
    try:
        return _Decision(gate, shares, worker, ask, now).passage()
    except (ArithmeticError, TypeError, ValueError):
        lifted = _Decision(GateInfo(gate.kind, gate.name), shares, worker, ask, now).passage()
        return lifted._replace(gate=gate)


def parts(places: int, wants: Sequence[Share]) -> dict[str, int]:
    """Divide places among workers: equal parts, none more than it needs; the rest goes to the longest waiting."""
    places = max(places, 0)
    found: dict[str, int] = {}
    lacking = list(wants)
    while lacking:
        equal = places // len(lacking)
        content = [want for want in lacking if want.need <= equal]
        for want in content or lacking:
            found[want.worker] = min(want.need, equal)
            places -= found[want.worker]
        if not content:
            break
        lacking = [want for want in lacking if want.need > equal]
    waiting = [want for want in wants if want.since is not None and found[want.worker] < want.need]
    for want in sorted(waiting, key=lambda want: (want.since, want.worker))[:places]:
        found[want.worker] += 1
    return found


class _Decision:
    """One ask under decision: the gate as far as it is decided, and the shares of the others."""

    def __init__(self, gate: GateInfo, shares: Sequence[Share], worker: str, ask: Ask, now: float) -> None:
        self._gate, self._ask, self._now = gate, ask, now
        self._limits = limits_of(gate)
        self._others = [share for share in shares if share.worker != worker]
        self._before = next((share for share in shares if share.worker == worker), Share(worker))
        since = now - max(ask.waited_seconds, 0.0) if ask.waiting else None
        known = self._before.since
        if since is not None and known is not None and abs(since - known) < SOON_SECONDS:
            since = known  # an ask that tells nothing new is not written
        self._want = Share(worker, ask.running, ask.running + ask.waiting, since)
        self._why, self._again_seconds, self._moved = "", LOOK_SECONDS, ""

    def passage(self) -> Passage:
        ask = self._ask
        self._note_spend()
        self._note_failures()
        if ask.leaving:
            return Passage(self._gate, None, replace(refused(ask), why="", moved=self._moved))
        places = self._places()
        probes = self._probes_left(places)
        left = self._tokens(places, probes)
        if probes is not None:
            probes = self._begin_probes(probes if left is None else min(probes, left))
        share = self._want if places is None else replace(self._want, held=max(places, ask.running))
        seconds = 0.0 if left is None else TOKEN_SECONDS
        breaker = self._limits.breaker
        status = CLOSED if breaker is None else breaker.status(breaker_of(self._gate), self._now)
        return Passage(
            self._gate,
            share,
            Grant(
                ask.service,
                share=places,
                tokens=left,
                tokens_seconds=seconds,
                probes=probes,
                again_seconds=self._again_seconds,
                why=self._why,
                when_open=self._limits.when_open,
                breaker=status,
                moved=self._moved,
            ),
        )

    def _lacks(self, why: str, seconds: float) -> None:
        """Note the first reason why less is granted than was asked for, and when to ask again."""
        if not self._why:
            self._why, self._again_seconds = why, min(max(seconds, SOON_SECONDS), LOOK_SECONDS)

    # -- places --------------------------------------------------------------------------------------------------------

    def _places(self) -> int | None:
        """Return how many attempts may run here.

        The stored share covers those that run already, so that shares never add up to more than the concurrency while
        a worker gives up places one by one.
        """
        concurrency, want, others = self._limits.concurrency, self._want, self._others
        if concurrency is None:
            return None
        target = parts(concurrency, [*others, want])[want.worker]
        if not any(other.need > other.held for other in others):
            # Nobody lacks a place: a worker keeps an equal part for attempts to come, until it asks twice for none.
            equal = concurrency // (sum(other.need > 0 for other in others) + 1)
            before = self._before
            target = max(target, equal if want.need else min(before.held, equal) if before.need else 0)
        granted = min(target, max(concurrency - sum(other.held for other in others), 0))
        if granted < want.need:
            self._lacks("concurrency", SOON_SECONDS)
        return granted

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _tokens(self, places: int | None, probes: int | None) -> int | None:
        """Return how many attempts may begin by the rate and the spend, and take so much of both."""
        rate, spend, gate, ask, now = self._limits.rate, self._limits.spend, self._gate, self._ask, self._now
        if rate is None and spend is None:
            return None
        wanted = ask.waiting + ask.begun if probes is None else probes
        if places is not None and places < max(ask.running, 1):
            wanted = 0  # none of them could begin
        count = wanted
        # After the clock was set back, the time is brought back once and written. Otherwise each ask would wait again.
        used_until, spent_until = gate.used_until, gate.spent_until
        if rate is not None:
            there = tokens(rate, used_until, now, saved_seconds=TOKEN_SECONDS)
            used_until = min(used_until, there.used_until)
            count = min(count, self._part(there.left, wanted))
            if count < min(ask.waiting, wanted):
                self._lacks("rate", next_token_at(rate, there.used_until) - now)
        if spend is not None:
            room, spent_from = spend_left(spend, spent_until, now, saved_seconds=TOKEN_SECONDS)
            spent_until = min(spent_until, spent_from)
            attempts = wanted if ask.estimate <= 0 else math.ceil(min(room / ask.estimate, MOST))
            affordable = attempts if room > 0 else 0
            count = min(count, self._part(affordable, wanted))
            if count < min(ask.waiting, wanted):
                self._lacks("spend", spent_from - now)
            if count:
                taken = count * max(ask.estimate, 0.0) * spend.interval
                spent_until = min(spent_from + taken, now + spend.per)
        if count and rate is not None:
            used_until = there.spend(rate, count)
        self._gate = replace(gate, used_until=used_until, spent_until=spent_until)
        return count

    def _part(self, there: int, wanted: int) -> int:
        """Return the part of tokens that this worker may take, while others wait for some, too."""
        waiting = [replace(one, need=max(one.need - one.held, 1)) for one in self._others if one.since is not None]
        return parts(there, [*waiting, replace(self._want, need=wanted)])[self._want.worker]

    def _note_spend(self) -> None:
        spend, gate = self._limits.spend, self._gate
        if spend is not None and self._ask.spent:
            _, spent_until = spend_left(spend, gate.spent_until, self._now, saved_seconds=TOKEN_SECONDS)
            spent_until += self._ask.spent * spend.interval
            self._gate = replace(gate, spent_until=min(max(spent_until, 0.0), self._now + spend.per))

    # -- the breaker ---------------------------------------------------------------------------------------------------

    def _note_failures(self) -> None:
        breaker, ask = self._limits.breaker, self._ask
        if breaker is None:
            return
        before = breaker_of(self._gate)
        after = breaker.after_news(
            before, self._now, failures=ask.failures, passed=ask.passed, failed=ask.failed, unused=ask.unused
        )
        self._gate = with_breaker(self._gate, after)
        if after.opened_at is not None and (before.opened_at is None or (before.probes and not after.probes)):
            self._moved = "opened"
        elif before.opened_at is not None and after.opened_at is None:
            self._moved = "closed"

    def _probes_left(self, places: int | None) -> int | None:
        """Return how many attempts could begin as probes; None if the breaker is closed."""
        breaker, ask, now = self._limits.breaker, self._ask, self._now
        state = breaker_of(self._gate)
        left = None if breaker is None else breaker.probes_left(state, now)
        if breaker is None or left is None:
            return None
        count = min(left, ask.waiting if places is None else min(ask.waiting, max(places - ask.running, 0)))
        if count < ask.waiting:
            opened_at = now if state.opened_at is None else state.opened_at
            self._why = ""  # the breaker explains more than a place that is missing, too
            self._lacks("breaker", opened_at + breaker.open_seconds - now)
        return count

    def _begin_probes(self, count: int) -> int:
        """Note the deadlines of the probes that are granted."""
        breaker, state = self._limits.breaker, breaker_of(self._gate)
        if breaker is not None and count:
            begun = breaker.begun(state, self._now, count, max(self._ask.probe_seconds, 0.0))
            self._gate = with_breaker(self._gate, begun)
            if not state.probes and not state.passed:
                self._moved = "half-open"
        return count


# -- claims of parked runs ---------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """How many runs that wait at a service a claim may take, and of which workflows."""

    places: int
    workflows: frozenset[str]


def workflows_in(text: object) -> tuple[str, ...]:
    """Return the workflows in the stored heartbeat of a worker; none if they cannot be read."""
    try:
        return msgspec.json.decode(text, type=tuple[str, ...]) if isinstance(text, str) and text else ()
    except (msgspec.MsgspecError, ValueError):
        return ()


def rooms_of(
    request: ClaimRequest, parked_at: Iterable[str], users: Callable[[str], Iterable[Sequence[str]]]
) -> dict[str, Room]:
    """Return the services whose parked runs a claim may take, and how many of each.

    `users` gives the workflows that each living worker knows which uses a service and does not drain. A service limits
    nothing for workflows that none of them knows: nobody else would take their runs.
    """
    rooms = {service: Room(room, request.workflows) for service, room in request.rooms.items() if room > 0}
    for service in parked_at:
        if service not in request.rooms:
            known = [*users(service)]
            passing = frozenset(
                one for one in request.workflows if not any(_drives(one_knows, one, request) for one_knows in known)
            )
            if passing:
                rooms[service] = Room(request.limit, passing)
    return rooms


def _drives(known: Sequence[str], workflow: str, request: ClaimRequest) -> bool:
    """Whether a worker drives the runs of a workflow that a request serves. One that tells nothing may drive any."""
    if not known or workflow not in known:
        return not known
    pins = [name for name in known if name.startswith(f"{workflow}@")]
    return not pins or f"{workflow}@{request.versions.get(workflow)}" in pins
