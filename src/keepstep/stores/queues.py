"""The decision of a claim in a queue with limits, written once for every store.

A store shows a queue as a `Ground`, under the lock of the queue's gate, and executes the `Decision`. Runs that have
begun before or have no key stand in a line, by due time. The others wait behind their keys, and keys take turns. Places
alternate between the line and the keys, priority by priority.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from ..model.gate import GateInfo, QueueCounts
from ..policies.queue import Limits
from ..policies.rate import Tokens, next_token_at, tokens
from ..ports import instant
from .gates import limits_of

#: Keys that one claim looks at. Bounds its cost if most keys are full; the next claim goes on from there.
KEYS = 200
#: Priorities of one queue that one claim looks at.
PRIORITIES = 16
#: Runs whose time has come that one claim moves behind their keys.
RIPENED = 500
_ANY_NUMBER = 1 << 30
#: Keys that the counts of a queue show.
SHOWN_KEYS = 10


class Waiting(NamedTuple):
    """A run that a claim may take. `fresh`: it has never been claimed, so that the rate counts it."""

    run: str
    fresh: bool = True


class Ground(Protocol):
    """One queue as a store shows it to a claim: only runs that the claiming worker serves, except for counts."""

    def driven(self) -> int:
        """Return the number of its runs that living workers hold."""

    def driven_here(self) -> int:
        """Return the number of its runs that the claiming worker holds."""

    def orphans(self, limit: int) -> Sequence[str]:
        """Return runs whose owner is dead."""

    def priorities(self) -> Sequence[int]:
        """Return the priorities of runs that can be taken, highest first; at most `PRIORITIES`."""

    def line(self, priority: int, limit: int, *, fresh: bool) -> Sequence[Waiting]:
        """Return the first runs that have begun before or have no key, by due time; without `fresh` only the former."""

    def keys(self, priority: int, after: str, limit: int, most: int) -> Sequence[tuple[str, int]]:
        """Return the next keys with runs that wait, in order, each with its runs that have begun, counted to `most`."""

    def behind(self, priority: int, keys: Sequence[str], each: int) -> dict[str, Sequence[Waiting]]:
        """Return the first `each` runs that wait behind each key, by due time and number."""


class Decision(NamedTuple):
    """The runs that a claim takes, in order; the gate afterwards; and when the rate lets the next run begin."""

    orphans: tuple[str, ...]
    runs: tuple[str, ...]
    gate: GateInfo
    next_at: float | None = None


def in_turn(names: Iterable[str], claims: int) -> list[str | None]:
    """Return the limited queues, and None for all others, in the order in which the n-th claim of a store asks them.

    Each comes first in turn, so that none takes all the room of a worker each time.
    """
    all_of_them = [None, *sorted(names)]
    start = claims % len(all_of_them)
    return all_of_them[start:] + all_of_them[:start]


def room_of(limits: Limits, ground: Ground, limit: int) -> int:
    """Return how many more runs the claiming worker may take."""
    room = limit
    if limits.concurrency is not None:
        room = min(room, limits.concurrency - ground.driven())
    if limits.per_worker is not None and room > 0:
        room = min(room, limits.per_worker - ground.driven_here())
    return max(room, 0)


def decide(gate: GateInfo, ground: Ground, limit: int, now: float) -> Decision:
    """Decide a claim of at most `limit` runs."""
    limits = limits_of(gate)
    room = room_of(limits, ground, limit)
    if room <= 0:
        return Decision((), (), gate)
    orphans = tuple(ground.orphans(room))[:room]
    claim = _Claim(limits, ground, gate, room - len(orphans), now)
    for priority in ground.priorities() if claim.room > 0 else ():
        claim.take(priority)
        if claim.room <= 0:
            break
    return Decision(orphans, tuple(claim.taken), claim.gate_after(), claim.next_at())


def decide_parked(gate: GateInfo, ground: Ground, room: int) -> Decision:
    """Decide a claim of runs that are parked at a service, in the order of a queue: the line, and keys in turn."""
    claim = _Claim(Limits(), ground, gate, room, 0.0)
    for priority in ground.priorities() if room > 0 else ():
        claim.take(priority)
        if claim.room <= 0:
            break
    return Decision((), tuple(claim.taken), claim.gate_after())


class _Claim:
    """A claim under way: what it has taken, and what is left for it."""

    def __init__(self, limits: Limits, ground: Ground, gate: GateInfo, room: int, now: float) -> None:
        self.room = room
        self.taken: list[str] = []
        self._limits, self._ground, self._gate = limits, ground, gate
        self._turn, self._line_next = gate.turn, gate.line_next
        self._looked = 0
        self._begun: dict[str, int] = {}  # by key, those that this claim lets begin
        rate = limits.rate
        self._tokens = Tokens(_ANY_NUMBER, 0.0) if rate is None else tokens(rate, gate.used_until, now)
        self._fresh = 0
        self._lacks_tokens = False

    def _has_token(self) -> bool:
        return self._fresh < self._tokens.left

    def take(self, priority: int) -> None:
        """Take runs of one priority, in turn from the line and from the keys, until both are empty."""
        line = self._in_line(priority)
        keys = self._by_turns(priority)
        exhausted = 0
        while self.room > 0 and exhausted < 2:
            run = next(line if self._line_next else keys, None)
            self._line_next = not self._line_next
            exhausted = 0 if run is not None else exhausted + 1
            if run is not None:
                self.taken.append(run.run)
                self._fresh += run.fresh
                self.room -= 1

    def _in_line(self, priority: int) -> Iterator[Waiting]:
        found = self._ground.line(priority, self.room, fresh=self._has_token())
        for run in found:
            if run.fresh and not self._has_token():
                break
            yield run
        # Without a token, only the runs that have begun before go on.
        if not self._has_token():
            self._lacks_tokens = True
            seen = set(self.taken)
            yield from (run for run in self._ground.line(priority, self.room, fresh=False) if run.run not in seen)

    def _by_turns(self, priority: int) -> Iterator[Waiting]:
        # A retried run that waits for its key again uses no token, but is looked for only when there is one: otherwise
        # every claim without a token would walk past the runs that have never begun.
        if not self._has_token():
            self._lacks_tokens = True
            return
        open_keys = self._open_keys(priority)
        if not open_keys:
            return
        each = -(-self.room // len(open_keys))
        behind = self._ground.behind(priority, [key for key, _ in open_keys], each)
        for place in range(each):
            for key, room in open_keys:
                runs = behind.get(key, ())
                if place >= min(room, len(runs)):
                    continue
                if not self._has_token():
                    self._lacks_tokens = True
                    return
                self._turn = key
                self._begun[key] = self._begun.get(key, 0) + 1
                yield runs[place]

    def _open_keys(self, priority: int) -> list[tuple[str, int]]:
        """Return the next keys with room, and the room of each: from where the last claim stopped, once round."""
        found: list[tuple[str, int]] = []
        start = self._turn
        after, is_round = start, not start
        step = self.room
        while len(found) < self.room and self._looked < KEYS:
            wanted, step = min(KEYS - self._looked, step), 4 * step
            keys = self._ground.keys(priority, after, wanted, self._limits.per_key or 0)
            for key, begun in keys:
                if is_round and start and key > start:
                    return found
                self._looked += 1
                after = key
                room = self._room_of_key(key, begun)
                if room > 0 and len(found) < self.room:
                    found.append((key, room))
            if len(keys) < wanted:
                if is_round:
                    return found
                after, is_round = "", True
        if not found:
            self._turn = after
        return found

    def _room_of_key(self, key: str, begun: int) -> int:
        if self._limits.per_key is None:
            return self.room
        return self._limits.per_key - begun - self._begun.get(key, 0)

    def gate_after(self) -> GateInfo:
        rate = self._limits.rate
        used_until = self._gate.used_until
        if rate is not None and self._fresh:
            used_until = self._tokens.spend(rate, self._fresh)
        elif rate is not None:  # written once after the clock was set back, because each claim would wait again
            used_until = min(used_until, self._tokens.used_until)
        if (used_until, self._turn, self._line_next) == (
            self._gate.used_until,
            self._gate.turn,
            self._gate.line_next,
        ):
            return self._gate
        return replace(self._gate, used_until=used_until, turn=self._turn, line_next=self._line_next)

    def next_at(self) -> float | None:
        """Return when a run that only lacks a token can begin."""
        rate = self._limits.rate
        if rate is None or not self._lacks_tokens:
            return None
        return next_token_at(rate, self._tokens.spend(rate, self._fresh))


def may_drive(gate: GateInfo, ground: Ground, *, holds_key: bool) -> bool:
    """Whether a worker may drive a run that it names: there is a place, and the run need not wait for its key."""
    limits = limits_of(gate)
    return room_of(limits, ground, 1) > 0 and (limits.per_key is None or holds_key)


# -- stores that hold all runs in memory -------------------------------------------------------------------------------


class Place(NamedTuple):
    """A run of a queue that has not ended. `served`: the claiming worker serves it."""

    run: str
    number: int
    priority: int
    key: str | None
    due: float | None
    worker: str | None
    fresh: bool
    holds: int
    served: bool = True
    owner_rank: tuple[str, ...] = ()


def waiting_place(place: Place, since: float) -> Place:
    """Return the place of a run among those that wait at a service, all of which have begun before."""
    return place._replace(due=since, fresh=False, holds=0)


class Listed:
    """A queue as a list of its runs that have not ended."""

    def __init__(self, places: Iterable[Place], worker: str, is_dead: Callable[[str], bool], now: float) -> None:
        self._places = list(places)
        self._worker = worker
        self._is_dead = is_dead
        ready = [one for one in self._places if one.worker is None and one.served]
        self._ready = [one for one in ready if one.due is not None and one.due <= now]

    def driven(self) -> int:
        return sum(one.worker is not None and not self._is_dead(one.worker) for one in self._places)

    def driven_here(self) -> int:
        return sum(one.worker == self._worker for one in self._places)

    def orphans(self, limit: int) -> Sequence[str]:
        dead = [one for one in self._places if one.worker is not None and one.served and self._is_dead(one.worker)]
        return [one.run for one in sorted(dead, key=lambda one: (one.owner_rank, one.run))][:limit]

    def priorities(self) -> Sequence[int]:
        return sorted({one.priority for one in self._ready}, reverse=True)[:PRIORITIES]

    def line(self, priority: int, limit: int, *, fresh: bool) -> Sequence[Waiting]:
        found = [
            one
            for one in self._ready
            if one.priority == priority and (one.key is None or one.holds) and (fresh or not one.fresh)
        ]
        found.sort(key=lambda one: (one.due, one.run))
        return [Waiting(one.run, one.fresh) for one in found[:limit]]

    def keys(self, priority: int, after: str, limit: int, most: int) -> Sequence[tuple[str, int]]:
        begun: dict[str, int] = {}
        for one in self._places:
            if one.key is not None and one.holds == 1:
                begun[one.key] = begun.get(one.key, 0) + 1
        found = {one.key for one in self._behind(priority) if one.key is not None and one.key > after}
        return [(key, min(begun.get(key, 0), most)) for key in sorted(found)[:limit]]

    def _behind(self, priority: int) -> list[Place]:
        return [one for one in self._ready if one.priority == priority and one.key is not None and not one.holds]

    def behind(self, priority: int, keys: Sequence[str], each: int) -> dict[str, Sequence[Waiting]]:
        found: dict[str, Sequence[Waiting]] = {}
        waiting = sorted(self._behind(priority), key=lambda one: (one.due, one.number))
        for key in keys:
            found[key] = [Waiting(one.run, one.fresh) for one in waiting if one.key == key][:each]
        return found

    def counts(self) -> QueueCounts:
        """Return the numbers of runs that people see."""
        begun: dict[str, int] = {}
        for one in self._places:
            if one.key is not None and one.holds == 1:
                begun[one.key] = begun.get(one.key, 0) + 1
        most = sorted(begun.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_KEYS]
        oldest = min((one.due for one in self._ready if one.due is not None), default=None)
        waiting = sum(one.worker is None and one.fresh for one in self._places)
        return QueueCounts(self.driven(), waiting, tuple(most), None if oldest is None else instant(oldest))
