"""Queues: limits on how many runs are driven at once, for each key, and how often runs begin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..checks import check_limit, check_name
from ..errors import DefinitionError
from .rate import UNREADABLE, Rate

#: The limits that are whole numbers.
COUNTS = ("concurrency", "per_worker", "per_key", "max_waiting")
_WHEN_FULL = ("fail", "wait")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a queue. None lifts a limit."""

    concurrency: int | None = None
    per_worker: int | None = None
    per_key: int | None = None
    rate: Rate | None = None
    max_waiting: int | None = None
    when_full: str = "fail"

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None:
                check_limit(value, name)
        if self.rate is not None and not isinstance(self.rate, Rate):
            raise DefinitionError(f"rate must be a ks.Rate, got {self.rate!r}")
        if self.when_full not in _WHEN_FULL:
            raise DefinitionError(f"when_full must be 'fail' or 'wait', got {self.when_full!r}")

    def plain(self) -> dict[str, Any]:
        """Return the limits that are set, as plain data."""
        found: dict[str, Any] = {name: value for name in COUNTS if (value := getattr(self, name)) is not None}
        if self.rate is not None:
            found["rate"] = self.rate.plain()
        if self.when_full != "fail":
            found["when_full"] = self.when_full
        return found

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Limits:
        """Return the limits in stored plain data; unknown names, which a newer version may write, are left out.

        Data that this version cannot read lifts all limits, so that it stops nothing.
        """
        try:
            known = {name: plain[name] for name in (*COUNTS, "when_full") if name in plain}
            rate = plain.get("rate")
            return cls(**known, rate=None if rate is None else Rate.of(rate))
        except UNREADABLE:
            return cls()

    def changed(self, changes: dict[str, Any]) -> Limits:
        """Return these limits with some of them changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        words = [f"{name} {value}" for name in COUNTS if (value := getattr(self, name)) is not None]
        if self.rate is not None:
            words.append(f"rate {self.rate}")
        if self.when_full != "fail":
            words.append(f"when full {self.when_full}")
        return ", ".join(words) or "no limit"


class Queue:
    """A queue of runs with limits that hold across all workers of a store.

    | option | means |
    |---|---|
    | `concurrency` | runs that workers drive at once; a parked run holds no place |
    | `per_worker` | runs that one worker drives at once |
    | `per_key` | runs of one key that have begun and not ended |
    | `rate` | how often runs begin: `ks.Rate(count, per=seconds, burst=n)` |
    | `max_waiting` | runs that may wait to begin; counted once a second |
    | `when_full` | what a start does then: `"fail"` with `QueueFull`, or `"wait"` |

    The limits are written to the store when a process opens it. Every limit may be left out.
    """

    __slots__ = ("limits", "name")

    def __init__(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        per_worker: int | None = None,
        per_key: int | None = None,
        rate: Rate | None = None,
        max_waiting: int | None = None,
        when_full: str = "fail",
    ) -> None:
        self.name = check_name(name, "queue")
        try:
            self.limits = Limits(concurrency, per_worker, per_key, rate, max_waiting, when_full)
        except DefinitionError as error:
            raise DefinitionError(f"ks.Queue({name!r}): {error}") from None
        DECLARED[name] = self

    def __repr__(self) -> str:
        return f"ks.Queue({self.name!r}: {self.limits})"


#: The queues that this process has declared, the newest of each name.
DECLARED: dict[str, Queue] = {}


def queue_name(queue: Any) -> Any:
    """Return the name of a queue that is given as `ks.Queue`; anything else is returned as it is."""
    return queue.name if isinstance(queue, Queue) else queue
