"""One process of the simulated world: its loop, its clock, its engine, and what befalls it between two callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context
from typing import TYPE_CHECKING, Any

from keepstep.engine.engine import Engine
from keepstep.engine.heartbeat import HEARTBEAT_SHARE
from keepstep.engine.parts import Parts
from keepstep.errors import StoreError
from keepstep.testing.virtual import EPOCH

from . import programs, queues, services, ticks
from .bodies import CLIENT
from .dags import dag_of
from .graphs import graphs_of
from .loop import ProcessLoop
from .plans import Plan
from .wire import Wire

if TYPE_CHECKING:
    from keepstep.engine.worker import Worker

    from .world import World

#: How the story tells what becomes of a call.
FATES = {
    "fail": "fails",
    "lose": "is made, and its answer lost",
    "vanish": "is not made, which nobody knows",
    "die before": "is never made",
    "die after": "is made, and then",
    "slow": "is slow",
}


class _ProcessClock:
    """The clocks of a process: its wall clock may be wrong and may be set, the other one cannot."""

    def __init__(self, world: World, slot: int) -> None:
        self._world, self._slot = world, slot

    def now(self) -> float:
        return EPOCH + self._world.now + self._world.offsets[self._slot]

    def boot(self) -> tuple[str, float]:
        return "simulated", self._world.now


class StoreClock:
    """The store is a file on the same machine: it has the clock of the process that asks."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        process = self._world.current
        return process.clock.now() if process is not None else EPOCH + self._world.now

    def boot(self) -> tuple[str, float]:
        return "simulated", self._world.now


class _NoThreads:
    """Runs plain def steps on the loop, a moment later."""

    at_work = 0
    limit = 64

    def __init__(self, process: Process) -> None:
        self._process = process

    def submit(self, context: Context, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(context.run(function))
            except BaseException as error:
                future.set_exception(error)

        self._process.loop.call_later(self._process.latency(), do)
        return future


class _HeartOnLoop:
    """The heart of a worker where a thread would be in no one's time."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._engine = worker, worker.engine
        self._stopped = False

    def start(self) -> None:
        seconds = self._worker.lease_seconds * HEARTBEAT_SHARE
        self._engine.loop.call_later(seconds, self._beat, context=self._engine.context)

    def _beat(self) -> None:
        if not self._stopped and not self._engine.closed:
            self.start()
            self._engine.background(self._engine.call(self._worker.beat_once))

    def hurry(self) -> None:
        """Nothing is told early: the next beat is soon enough."""

    def stop(self) -> None:
        self._stopped = True

    async def stopped(self) -> None:
        """No beat is under way once the loop goes on."""


class Process:
    """One life of a process: a loop, an engine on it, and its wire to the store."""

    def __init__(self, world: World, slot: int, life: int) -> None:
        self.world, self.slot, self.life = world, slot, life
        self.name = f"{'client' if slot == CLIENT else f'worker {slot}'}.{life}"
        self.clock = _ProcessClock(world, slot)
        self.loop = ProcessLoop(self)
        self.dead = False
        self.paused_until = 0.0
        self.ids: list[str] = []  # under which the store knows it
        self.stop = asyncio.Event()
        self.code = world.codes[slot]
        self.workflows = programs_of(world.plan, self.code)
        self.engine = Engine(
            Wire(self),
            worker=slot != CLIENT,
            clock=self.clock,
            workflows=self.workflows.values(),
            linger_seconds=0.3,
            stop_seconds=0.5,
            recovery_limit=world.plan["limit"],
            actor="the client",
            parts=Parts(threads=lambda _limit, _name: _NoThreads(self), heart=_HeartOnLoop),
        )
        self.opened = False
        self.loop.create_task(self._live())

    def __str__(self) -> str:
        return self.name

    async def _live(self) -> None:
        try:
            await self.engine.open()
        except StoreError as error:
            self.die(f"it could not open the store: {error}")
            return
        self.opened = True
        await self.stop.wait()
        await self.engine.close()
        self.world.tell(f"{self} has stopped")
        self.leave()

    def die(self, how: str) -> None:
        """End this process at once: nothing of it ever runs again."""
        if not self.dead:
            self.world.tell(f"{self} dies {how}")
            self.world.counts["deaths"] += 1
            if self.world.chance.random() < 0.7:  # its locks are seen to be free; otherwise its leases must run out
                for worker in self.ids:
                    self.world.store.mark_dead(worker)
            self.leave()

    def leave(self) -> None:
        self.dead = True
        self.world.killed.update(self.ids)
        self.world.comes_back(self)

    # -- taking turns --------------------------------------------------------------------------------------------------

    def may_go_on(self) -> bool:
        """Asked between any two callbacks, and where the plan may have the process killed or paused."""
        world, slot = self.world, self.slot
        world.callbacks[slot] += 1
        for event in world.due_at("callback", slot, world.callbacks[slot]):
            world.befalls(event, self)
        return not self.dead and self.paused_until <= world.now

    def latency(self) -> float:
        world = self.world
        usual: float = world.chance.random() * world.plan["latency"]
        return usual + (world.slow[self.slot] if world.slow_calls[self.slot] > 0 else 0.0)

    def fate_of_call(self, kind: str) -> str:
        world, slot = self.world, self.slot
        if slot == CLIENT and not self.opened:  # what it was asked to do would be lost with it
            return ""
        world.calls[slot] += 1
        for event in world.due_at("call", slot, world.calls[slot]):
            world.befalls(event, self)
        fate: str = world.next_fate.pop(slot, "")
        if fate:
            world.tell(f"{self}: {kind} {FATES[fate]}")
            return fate
        if world.now < world.down_until:
            return "fail"
        if world.slow_calls[slot] > 0:
            world.slow_calls[slot] -= 1
            return "slow"
        return ""

    def loses_claim(self) -> bool:
        """Whether the answer to a claim that gave something is lost."""
        world, slot = self.world, self.slot
        world.given[slot] += 1
        for event in world.due_at("claim", slot, world.given[slot]):
            world.befalls(event, self)
        if slot not in world.lost_claims:
            return False
        world.lost_claims.discard(slot)
        world.tell(f"{self}: the answer to its claim is lost")
        return True

    def fate_of_news(self) -> str:
        world = self.world
        if world.now < world.down_until:
            return "fail"
        return world.deaf[self.slot][0] if world.now < world.deaf[self.slot][1] else ""


def programs_of(plan: Plan, code: int) -> dict[str, Any]:
    """What a process knows: the workflows that follow programs, and the graphs and dags of the plan, by their run."""
    found = dict(programs.WORKFLOWS)
    for run in plan["runs"]:
        if run["workflow"] == "graph":
            *inside, found[run["id"]] = graphs_of(run, code)
            found.update({one.name: one for one in inside})
        elif run["workflow"] == "dag":
            found[run["id"]] = dag_of(run, code)
    if "queue" in plan:
        found[queues.queued.name] = queues.queued
    if "service" in plan:
        found[services.served.name] = services.served
    if "schedule" in plan:
        found[ticks.NAME] = ticks.scheduled(plan["schedule"], code)
    return found
