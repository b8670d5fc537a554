"""The keeper of a barrier: it counts the parties of each generation, and tells all of them the same outcome."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from ..model import Status
from ..model.keepers import TELL
from ..model.signal import CANCEL
from ..records.record import StoredError
from .keeper import Message, Moment, Reaction
from .recorded_errors import TIMED_OUT
from .waits import report

#: Generations whose outcome is kept for parties that come late.
MOST_GENERATIONS = 100
#: Seconds after which the keeper looks for parties that have ended without a word, while others wait for them.
LOOK_SECONDS = 15.0
#: Time after which a barrier at which nobody waits ends.
IDLE_SPAN = timedelta(days=1)


class Waiter(msgspec.Struct, array_like=True):
    """A call that waits: its run, and the signal with which it is told the outcome."""

    run: str
    signal: str


class Generation(msgspec.Struct, omit_defaults=True):
    """One meeting of the parties: how many there are, who waits, until when, and the outcome."""

    number: int
    parties: int
    until: datetime | None = None
    arrived: dict[str, list[Waiter]] = {}
    #: The error that all parties get; None if all have arrived, or while it is open.
    error: StoredError | None = None
    is_over: bool = False


class Life(msgspec.Struct, array_like=True):
    """A run of a party: the last generation at which the party has arrived, and the generations of earlier runs."""

    run: str
    last: int
    before: int


class BarrierState(msgspec.Struct, omit_defaults=True):
    """All that a barrier knows: its newest generations, and how often each party has arrived."""

    name: str
    generations: list[Generation] = []
    lives: dict[str, Life] = {}
    active_at: datetime | None = None

    def open(self) -> list[Generation]:
        """Return the generations that somebody waits for."""
        return [one for one in self.generations if not one.is_over]


class Arrival(msgspec.Struct, omit_defaults=True):
    """The payload of a signal to a barrier: the `number`-th call of a run of a party, which arrives or leaves.

    A fork arrives as its origin: that is its `life`. `signal` is the name of the signal that tells `run` the outcome.
    """

    do: str = ""
    party: str = ""
    life: str = ""
    number: int = 0
    run: str = ""
    signal: str = ""
    parties: int = 0
    seconds: float | None = None


_encode = msgspec.json.Encoder().encode
_decode_state = msgspec.json.Decoder(BarrierState).decode


def arrival(do: str, **details: Any) -> bytes:
    """Return the payload of a signal to a barrier."""
    return _encode(Arrival(do, **details))


class BarrierKeeper:
    """Answers for one barrier."""

    version = 1
    payload = Arrival
    follows = False

    def begin(self, given: Any, at: datetime) -> BarrierState:
        """Return the first state."""
        return msgspec.convert(given, BarrierState)

    def read(self, version: int, data: bytes) -> BarrierState:
        """Return a stored state."""
        return _decode_state(data)

    def watched(self, state: BarrierState) -> list[str]:
        """Return the runs that wait: each may end without a word."""
        return [waiter.run for one in state.open() for waiters in one.arrived.values() for waiter in waiters]

    def react(self, state: BarrierState, moment: Moment) -> Reaction:
        """Count arrivals, and tell the parties of each generation that is over."""
        return _Answer(state, moment).reaction()


class _Answer:
    def __init__(self, state: BarrierState, moment: Moment) -> None:
        self._state, self._moment = state, moment
        self._result = Reaction(state)

    def reaction(self) -> Reaction:
        state, result, now = self._state, self._result, self._moment.now
        for message in self._moment.messages:
            self._take(message)
        for one in state.open():
            gone = [run for run in _runs(one) if run in self._moment.ended]
            if gone:
                self._break(one, f"run {gone[0]} has ended")
            elif one.until is not None and now >= one.until:
                self._time_out(one)
        state.generations = state.generations[-MOST_GENERATIONS:]
        if self._moment.messages or state.active_at is None:
            state.active_at = now
        if result.end is None:
            self._sleep()
        return result

    def _sleep(self) -> None:
        """Wake up for the next timeout, to look for ended parties, or to end a barrier that nobody needs."""
        state, now = self._state, self._moment.now
        waiting = state.open()
        if waiting:
            times = [one.until for one in waiting if one.until is not None]
            self._result.wake_at = min([*times, now + timedelta(seconds=LOOK_SECONDS)])
        elif state.active_at is not None:
            end = min(state.active_at, now) + IDLE_SPAN
            self._result.wake_at = end
            if now >= end:
                self._result.end = Status.COMPLETED

    def _take(self, message: Message) -> None:
        given = message.payload
        if message.name == CANCEL:
            for one in self._state.open():
                self._break(one, "it was cancelled")
            self._result.end = Status.CANCELLED
        elif message.name == TELL and isinstance(given, Arrival) and given.party:
            number = self._number(given)
            found = next((one for one in self._state.generations if one.number == number), None)
            if given.do == "arrive":
                self._arrive(given, number, found)
            elif given.do == "leave" and found is not None and not found.is_over and given.party in found.arrived:
                self._break(found, f"run {given.run} has left")

    def _number(self, given: Arrival) -> int:
        """Return the generation of a call. A run that continues another one counts on from there."""
        life = self._state.lives.get(given.party)
        if life is None:
            life = Life(given.life, 0, 0)
        elif life.run != given.life:
            life = Life(given.life, life.last, life.last)
        number = life.before + given.number
        self._state.lives[given.party] = Life(life.run, max(life.last, number), life.before)
        return number

    def _arrive(self, given: Arrival, number: int, found: Generation | None) -> None:
        state, waiter = self._state, Waiter(given.run, given.signal)
        if found is None:
            until = None if given.seconds is None else self._moment.now + timedelta(seconds=given.seconds)
            found = Generation(number, given.parties, until)
            state.generations.append(found)
        if found.is_over:
            self._tell(found, waiter)
        elif found.parties != given.parties:
            text = f"barrier {state.name!r} has {found.parties} parties, and this run names {given.parties}"
            self._send(waiter, report(_broken(text)))
        else:
            waiters = found.arrived.setdefault(given.party, [])
            if waiter not in waiters:
                waiters.append(waiter)
            if len(found.arrived) >= found.parties:
                self._end(found, None)

    def _time_out(self, one: Generation) -> None:
        came = ", ".join(sorted(one.arrived))
        text = f"barrier {self._state.name!r}: {len(one.arrived)} of {one.parties} parties came in time: {came}"
        self._end(one, StoredError("keepstep.TimedOut", text, "timeout", TIMED_OUT))

    def _break(self, one: Generation, why: str) -> None:
        came = f"{len(one.arrived)} of {one.parties} parties had arrived"
        self._end(one, _broken(f"barrier {self._state.name!r} is broken, because {why}; {came}"))

    def _end(self, one: Generation, error: StoredError | None) -> None:
        one.error, one.is_over = error, True
        for waiters in one.arrived.values():
            for waiter in waiters:
                self._tell(one, waiter)

    def _tell(self, one: Generation, waiter: Waiter) -> None:
        """Send the outcome of a generation to one call that waits."""
        outcome = {"number": one.number, "parties": sorted(one.arrived)}
        self._send(waiter, _encode(outcome) if one.error is None else report(one.error))

    def _send(self, waiter: Waiter, payload: bytes) -> None:
        self._result.sends.append((waiter.run, waiter.signal, msgspec.Raw(payload)))


def _runs(one: Generation) -> list[str]:
    return [waiter.run for waiters in one.arrived.values() for waiter in waiters]


def _broken(text: str) -> StoredError:
    return StoredError("BarrierBroken", text, "permanent")
