"""The inbox of a run in memory: signals that it has received and its code has not read yet."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from heapq import merge

from ..model import Signal


class Inbox:
    """Unread signals, the oldest of a name first: taking one costs the same however many of other names there are."""

    __slots__ = ("_named",)

    def __init__(self) -> None:
        self._named: dict[str, deque[Signal]] = {}

    def add(self, signal: Signal) -> None:
        """Put a signal in its place, by its number: a new one last, one that is unread again before later ones."""
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
        """Remove the oldest signal of a name, or the oldest that is `mine`, and give it; None if there is none."""
        queue = self._named.get(name, ())
        for index, signal in enumerate(queue):
            if mine is None or mine(signal):
                del self._named[name][index]
                if not self._named[name]:
                    del self._named[name]
                return signal
        return None

    def named(self, name: str) -> tuple[Signal, ...]:
        """All unread signals of a name."""
        return tuple(self._named.get(name, ()))

    def __iter__(self) -> Iterator[Signal]:
        """All unread signals, in the order in which they were received."""
        return merge(*self._named.values(), key=_seq)


def _seq(signal: Signal) -> int:
    return signal.seq
