"""The inbox of a run in memory: received signals, and which of them its code has read."""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from typing import TYPE_CHECKING, Any

from ..model import Kind, Outcome, Signal
from ..model.checkpoint import CODE_READ_SIGNAL
from ..model.signal import BEAT, GO, PAUSE, RESUME
from ..model.undo import is_command
from ..records.data import Data, data_of
from .log import Draft

if TYPE_CHECKING:
    from ..records.record import Record
    from .host import ServiceShare

#: In the key of a wait at a breakpoint, which a person lets the run pass.
AT_STOP = f"/wait_for:{GO}"
#: Signals after which a run that is not parked stores how many it has read, so that its inbox does not count as full.
COUNT_EVERY = 1000


def _readers(step: str, kind: str) -> tuple[str, ...]:
    """The calls whose cancel makes a signal unread again: the one that read it, and the wait of a graph around that.

    The wait of a graph ends with a record of its own. Given up before that is delivered, it has told nobody.
    """
    around = step.rpartition("/")[0]
    return (step, around) if around and kind == Kind.SIGNAL else (step,)


class Reads:
    """Which signals a run has read, from its records in order."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, str, str, int, bool]] = []

    def add(self, record: Record) -> None:
        """Take in the next record."""
        if record.data and "signal" in record.data:
            by_code = (
                record.kind in CODE_READ_SIGNAL
                and record.outcome != Outcome.FAILURE.value  # a reported error counts once, so that a retry can succeed
                and not is_command(record.step)
                and AT_STOP not in record.step
            )
            self._taken.append((record.seq, record.step, record.kind, record.data["signal"], by_code))
        elif record.kind == Kind.STEP_CANCELLED:
            self._taken.append((record.seq, record.step, record.kind, 0, True))

    def numbers(self, is_gone: Callable[[int], bool]) -> set[int]:
        """Return the signals that were read, without those read only by waits that no longer count."""
        read: set[int] = set()
        taken: dict[str, int] = {}
        for seq, step, kind, signal, by_code in self._taken:
            if by_code and is_gone(seq):
                continue
            if signal:
                read.add(signal)
                taken.update(dict.fromkeys(_readers(step, kind), signal))
            elif step in taken:  # taken, but never delivered: unread again
                read.discard(taken.pop(step))
        return read


class Inbox:
    """Unread signals, the oldest of a name first. The cost of taking one does not depend on signals of other names."""

    __slots__ = (
        *("_calls", "_counted_at", "_named", "beats", "early", "has_arrived", "is_paused", "missed", "read", "seen"),
    )

    def __init__(self) -> None:
        self._named: dict[str, deque[Signal]] = {}
        self._calls: dict[str, int] = {}  # the signals that calls have read, and waits of a graph around them
        #: The number of the last signal that was received.
        self.seen = 0
        self._counted_at = 0
        #: Numbers of the signals that are recorded as read.
        self.read: set[int] = set()
        #: Whether a write was refused because of signals that were not received.
        self.missed = False
        #: When the newest heartbeat for a name was sent.
        self.beats: dict[str, float] = {}
        #: Whether the code has come to rest where it was when the run was claimed.
        self.has_arrived = False
        #: Resumes that were received before that. They are for the breakpoint at which the run then rests.
        self.early: list[Signal] = []
        #: Whether a recorded pause holds until the next resume, as far as the signals have been received.
        self.is_paused = False

    def loaded(self, read: set[int]) -> None:
        """Set the signals that the history records as read."""
        self.read = read

    def all_read(self, last: int) -> int:
        """Return the number of the last signal up to which all were read; `last` is one of those."""
        while last + 1 in self.read:
            last += 1
        return last

    def is_count_due(self) -> bool:
        """Whether many signals have come since the number of read ones was stored."""
        return self.seen - self._counted_at >= COUNT_EVERY

    def counted(self) -> int:
        """Return the number of signals that no longer wait to be read. The caller stores it."""
        self._counted_at = self.seen
        return self.seen - sum(map(len, self._named.values()))

    def begin_after(self, seq: int) -> None:
        """Set the last signal that was removed from the store after it was read."""
        self.seen = seq

    def received(self, signal: Signal) -> None:
        """Add the next signal."""
        self.seen = signal.seq

    def recall(self, signal: Signal) -> None:
        """Note a signal that was read before: a pause holds until a resume, or until its breakpoint is passed."""
        if signal.name == PAUSE:
            self.is_paused = True
        elif signal.name == RESUME or signal.name.startswith(GO):
            self.is_paused = False

    def ends_pause(self) -> bool:
        """Return whether a recorded pause holds. If so, a resume ends it."""
        paused, self.is_paused = self.is_paused, False
        return paused

    def came_early(self, signal: Signal) -> None:
        """Keep a resume until the run has arrived."""
        self.early.append(signal)

    def arrived(self) -> list[Signal]:
        """Note that the code has come to rest where it was. Return the resumes that came earlier."""
        self.has_arrived = True
        early, self.early = self.early, []
        return early

    def beat(self, signal: Signal) -> None:
        """Note a heartbeat. It is not read by a call, so it stays in the store and is found again after a crash."""
        if signal.sent_at is not None:
            name = signal.name.removeprefix(BEAT)
            self.beats[name] = max(signal.sent_at.timestamp(), self.beats.get(name, 0.0))

    def refused(self) -> None:
        """Note that a write was refused because of signals that were not received."""
        self.missed = True

    def looked(self) -> None:
        """Note that the store is being asked for the missing signals."""
        self.missed = False

    def recorded(self, record: Record) -> None:
        """Keep count of the signals that the run has read: a consolidated state says so."""
        signal = data_of(record, Data).get("signal")
        if signal is not None:
            self.read.add(signal)
            self._calls.update(dict.fromkeys(_readers(record.step, record.kind), signal))
        elif (
            record.step in self._calls and record.kind == Kind.STEP_CANCELLED
        ):  # taken, but never delivered: unread again
            self.read.discard(self._calls.pop(record.step))

    def all_recorded(self, records: Iterable[Record | None]) -> None:
        """Keep count as `recorded` does, for each record."""
        for record in records:
            if record is not None:
                self.recorded(record)

    def add(self, signal: Signal) -> None:
        """Insert a signal by its number: a new one last, an unread one before later ones."""
        queue = self._named.setdefault(signal.name, deque())
        if not queue or queue[-1].seq < signal.seq:
            queue.append(signal)
        elif signal.seq < queue[0].seq:
            queue.appendleft(signal)
        else:
            ordered = list(queue)
            insort(ordered, signal, key=_seq)
            self._named[signal.name] = deque(ordered)

    def take(self, name: str, mine: Callable[[Signal], bool] | None = None) -> Signal | None:
        """Remove and return the oldest signal of a name, or the oldest that is `mine`; None if there is none."""
        queue = self._named.get(name, ())
        for index, signal in enumerate(queue):
            if mine is None or mine(signal):
                del self._named[name][index]
                if not self._named[name]:
                    del self._named[name]
                return signal
        return None

    def named(self, name: str) -> tuple[Signal, ...]:
        """Return all unread signals of a name."""
        return tuple(self._named.get(name, ()))

    def __iter__(self) -> Iterator[Signal]:
        """Iterate over all unread signals in the order of their arrival."""
        return merge(*self._named.values(), key=_seq)


def _seq(signal: Signal) -> int:
    return signal.seq


class Wait:
    """A call that waits for a time, a signal, or whichever comes first.

    `due` is wall time, which a parked run uses. In memory the wait uses the loop's own clock, which nobody sets and
    which may be virtual. It takes no longer than `longest`, so a wall clock that is set back does not extend it.
    `at` is the share of the service whose place it waits for.
    """

    __slots__ = (
        *("at", "call", "due", "ends", "longest", "mine", "name", "on_due", "on_signal", "riding", "start", "timer"),
    )

    def __init__(
        self,
        call: Any,
        due: float | None,
        on_due: Callable[[], None] | None,
        name: str | None = None,
        on_signal: Callable[[Signal], None] | None = None,
        *,
        longest: float = math.inf,
        mine: Callable[[Signal], bool] | None = None,
        start: Callable[[], Record] | None = None,
        at: ServiceShare | None = None,
    ) -> None:
        self.call = call
        self.at = at
        self.due = due
        self.on_due = on_due
        self.name = name
        self.on_signal = on_signal
        self.longest = longest
        self.mine = mine  # selects signals of that name; None means all
        self.start = start  # makes the record of its start, if there is none yet
        self.riding: Draft | None = None  # that record, while it waits for the next commit of the run
        self.ends = math.inf
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether its start is in the journal."""
        return self.start is None and getattr(self.call, "is_recorded", False)
