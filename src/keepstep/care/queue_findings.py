"""Findings of the doctor about queues with limits: places, keys, and runs that could begin and do not."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

from ..model import GateInfo, Run
from ..policies.queue import Limits
from ..policies.rate import tokens

#: Time for which a run may be ready in a queue with room before it is reported.
READY = timedelta(seconds=60)
#: Time for which runs may wait behind a key before its holders are named.
HELD = timedelta(days=1)


class Concern(NamedTuple):
    """One finding about a queue."""

    code: str
    message: str
    advice: str
    runs: tuple[str, ...]


class QueueLook:
    """One queue with limits, as the doctor sees its unfinished runs one by one."""

    def __init__(self, gate: GateInfo, known: Container[str], is_alive: Callable[[str], bool], now: datetime) -> None:
        self._gate = gate
        self._limits = Limits.of(gate.limits)
        self._known = known
        self._is_alive = is_alive
        self._now = now
        self._driven: list[str] = []
        self._holders: dict[str, list[str]] = {}
        self._ready: list[Run] = []

    def add(self, run: Run) -> None:
        """Note an unfinished run of the queue."""
        if run.worker is not None and self._is_alive(run.worker):
            self._driven.append(run.id)
        if run.key is not None and run.holds == 1:
            self._holders.setdefault(run.key, []).append(run.id)
        if run.worker is None and run.due_at is not None and run.due_at <= self._now:
            self._ready.append(run)

    def concerns(self) -> Iterator[Concern]:
        """Yield the findings."""
        yield from self._beyond_limits()
        yield from self._late()
        yield from self._held_keys()

    def _beyond_limits(self) -> Iterator[Concern]:
        name, limits = self._gate.name, self._limits
        lowered = f"a limit that was lowered holds as runs end: keepstep queues show {name} tells the last changes"
        if limits.concurrency is not None and len(self._driven) > limits.concurrency:
            text = (
                f"queue {name!r}: {len(self._driven)} runs are driven at once, and concurrency is {limits.concurrency}"
            )
            yield Concern("queue-over", text, lowered, tuple(self._driven))
        for key, runs in self._holders.items():
            if limits.per_key is not None and len(runs) > limits.per_key:
                text = f"queue {name!r}: {len(runs)} runs of key {key!r} have begun, and per_key is {limits.per_key}"
                yield Concern("key-over", text, lowered, tuple(runs))

    def _late(self) -> Iterator[Concern]:
        late = [run for run in self._ready if self._now - (run.due_at or self._now) > READY and self._may_begin(run)]
        if late:
            many = "1 run is" if len(late) == 1 else f"{len(late)} runs are"
            text = f"queue {self._gate.name!r} has room, but {many} ready for {READY.seconds} s unclaimed"
            advice = "its workers are full or stuck: start another, or check their logs"
            yield Concern("late", text, advice, tuple(run.id for run in late))

    def _may_begin(self, run: Run) -> bool:
        limits = self._limits
        if run.workflow not in self._known:  # reported for its workflow
            return False
        if limits.concurrency is not None and len(self._driven) >= limits.concurrency:
            return False
        waits_for_key = run.key is not None and not run.holds and limits.per_key is not None
        if waits_for_key and len(self._holders.get(run.key or "", ())) >= (limits.per_key or 0):
            return False
        is_fresh = run.epoch == 0 and limits.rate is not None
        if is_fresh and limits.rate is not None:
            return tokens(limits.rate, self._gate.used_until, self._now.timestamp()).left > 0
        return True

    def _held_keys(self) -> Iterator[Concern]:
        if self._limits.per_key is None:
            return
        behind: dict[str, list[Run]] = {}
        for run in self._ready:
            if run.key is not None and not run.holds and self._now - (run.due_at or self._now) > HELD:
                behind.setdefault(run.key, []).append(run)
        for key, runs in behind.items():
            holders = self._holders.get(key, [])
            if holders:
                many = "1 run has" if len(runs) == 1 else f"{len(runs)} runs have"
                text = (
                    f"queue {self._gate.name!r}: {many} waited for a day behind key {key!r}, which "
                    f"{', '.join(holders[:5])} holds"
                )
                advice = f"look at it with keepstep show {holders[0]}; end it, or raise per_key"
                yield Concern("key-held", text, advice, tuple(holders))
