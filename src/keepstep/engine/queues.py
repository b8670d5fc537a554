"""The queues of an engine: what its code declares, the limits that hold now, and changes by a person."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checks import check_name, check_text
from ..errors import QueueFull, StoreUnavailable
from ..model import GateChange, GateInfo, QueueCounts
from ..model.gate import QUEUE
from ..policies.queue import DECLARED, Limits
from .gates import Gates

if TYPE_CHECKING:
    from .process import Process

#: Seconds for which limits and counts are believed.
LOOK_SECONDS = 1.0
#: Seconds between two looks of a start that waits for room in a full queue.
FULL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue: the limits that hold now, where they come from, its last changes, and its runs."""

    name: str
    limits: Limits
    declared: Limits | None
    is_set: bool
    log: tuple[GateChange, ...]
    counts: QueueCounts


class Queues(Gates[Limits]):
    """The queues of a store that have limits.

    `set` takes the options of `ks.Queue`; what it does not name stays as it is. It wins over the code until `reset`.
    """

    kind = QUEUE
    limits = Limits

    def __init__(self, engine: Process) -> None:
        super().__init__(engine)
        self._known: dict[str, Limits] = {}
        self._looked_at = float("-inf")
        self._waiting: dict[str, tuple[float, int]] = {}

    # -- for the engine ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Write the queues that this process has declared, once, and read the limits of all."""
        await self.declare_all(DECLARED.values())
        await self._look()

    async def _look(self) -> None:
        """Read the limits of all queues. If the store does not answer, those known before are believed for longer."""
        engine = self._engine
        self._looked_at = engine.seconds()
        try:
            gates = await engine.call(engine.store.list_gates, QUEUE)
        except StoreUnavailable as error:
            engine.outage.log("cannot read the limits of queues", error)
            return
        self._known = {gate.name: Limits.of(gate.limits) for gate in gates}

    async def admit(self, queue: str) -> None:
        """Refuse a start from outside, or let it wait, if too many runs wait in its queue already."""
        if self._engine.seconds() - self._looked_at > LOOK_SECONDS:
            await self._look()
        while True:
            limits = self._known.get(queue)
            if limits is None or limits.max_waiting is None:
                return
            waiting = await self._count(queue)
            if waiting < limits.max_waiting:
                return
            if limits.when_full == "fail":
                raise QueueFull(
                    f"queue {queue!r} is full: {waiting} runs wait in it, and max_waiting is {limits.max_waiting}; try "
                    "again later, or declare the queue with when_full='wait'"
                )
            await asyncio.sleep(FULL_SECONDS)
            await self._look()

    async def _count(self, queue: str) -> int:
        now = self._engine.seconds()
        counted_at, waiting = self._waiting.get(queue, (float("-inf"), 0))
        if not 0 <= now - counted_at < LOOK_SECONDS:
            try:
                waiting = (await self._engine.call(self._engine.store.count_queue, queue)).waiting
            except StoreUnavailable as error:  # the start itself waits until the store answers
                self._engine.outage.log("cannot count the runs of a queue", error)
            self._waiting[queue] = now, waiting
        return waiting

    def started(self, queue: str) -> None:
        """Count a run that was started here until the next count."""
        if queue in self._waiting:
            counted_at, waiting = self._waiting[queue]
            self._waiting[queue] = counted_at, waiting + 1

    def is_limited(self, queue: str) -> bool:
        """Whether a queue has limits, so that its runs are not driven before a claim."""
        return queue in self._known

    # -- for people ----------------------------------------------------------------------------------------------------

    async def list(self) -> list[QueueInfo]:
        """Return all queues with limits, by name."""
        return [await self._info(gate) for gate in await self._gates()]

    async def get(self, name: str) -> QueueInfo:
        """Return the queue with the name `name`; one that nobody has declared has no limits."""
        return await self._info(await self._gate(name))

    async def _info(self, gate: GateInfo) -> QueueInfo:
        counts = await self._engine.call(self._engine.store.count_queue, gate.name)
        limits, declared = self._limits_of(gate)
        return QueueInfo(gate.name, limits, declared, gate.changed is not None, gate.log, counts)

    async def set(self, /, name: str, *, reason: str = "", **limits: Any) -> QueueInfo:
        """Change limits of the queue `name`, by a person, with a `reason`; the `limits` are those of `ks.Queue`."""
        await self._set(name, limits, reason)
        await self._look()  # the next start here must not lease a run that the new limit holds back
        return await self.get(name)

    async def reset(self, name: str, *, reason: str = "") -> QueueInfo:
        """Let the limits that code declares for the queue `name` hold again, with a `reason`."""
        await self._change(check_name(name, "queue"), "reset", reason=check_text(reason, "reason"))
        await self._look()
        return await self.get(name)

    async def _change(self, name: str, act: str, limits: dict[str, Any] | None = None, reason: str = "") -> GateInfo:
        before = await super()._change(name, act, limits, reason)
        self._looked_at = float("-inf")  # the next start here is held to the new limits
        return before
