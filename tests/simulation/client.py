"""The client of the simulated world: it starts the runs of a plan, sends what they wait for, and looks after them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from keepstep.errors import (
    AlreadyFinished,
    DefinitionError,
    KeepstepError,
    RunConflict,
    RunNotFound,
    StoreError,
    TimedOut,
)
from keepstep.model import Kind
from keepstep.model.signal import GO, RESOLVE

from .acts import ACTS, AWAITED, FORK
from .bodies import CLIENT
from .counted import generation_of
from .graphs import first_state
from .ticks import NAME

if TYPE_CHECKING:
    from .process import Process
    from .world import World


class Client:
    """Whoever uses the engines of a world, from a process of its own that may die as any other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._looked: set[tuple[str, str, object]] = set()

    @property
    def process(self) -> Process:
        return self.world.processes[CLIENT]

    def starts(self, run: dict[str, Any]) -> None:
        """The client starts a run: in a worker's process, so that it is leased at birth, or from its own."""
        process = self.world.processes.get(run["by"], self.process)
        if process.slot != CLIENT and process.opened and not process.dead:
            self.do(process, partial(self._started, process, run))
        self.do(self.process, partial(self.insist, lambda client: self._started(client, run), after=0.5))
        self.sends(run["id"])

    def sends(self, run_id: str) -> None:
        """Have the client send what a run waits for, each at its time, or now if that is past."""
        run = self.world.specs[run_id]
        for name, number, at, twice in _signals(run["parts"]):
            for extra in (0.0, 0.4) if twice else (0.0,):
                self.does(at + extra, run["id"], "signal", name, number)
        for name, number, at in _questions(run["parts"]):
            self.does(at, run["id"], "ask", name, number)

    def has_forked(self, run_id: str) -> None:
        """The client has forked a run: the other one must come to the same, and is sent the same."""
        world = self.world
        fork = f"{run_id}{FORK}"
        if fork not in world.accepted:
            world.specs[fork] = world.accepted[fork] = {**world.specs[run_id], "id": fork}
            self.sends(fork)

    async def _started(self, process: Process, run: dict[str, Any]) -> None:
        world = self.world
        options = {"run_id": run["id"], "deadline": run.get("deadline"), "delay": run.get("delay", 0.0)}
        workflow = process.workflows[run["id"] if run["workflow"] in ("graph", "dag") else run["workflow"]]
        handle = await process.engine.start(workflow, *arguments_of(run), **options)
        if run["id"] not in world.accepted:
            world.accepted[run["id"]] = run
            world.tell(f"{run['id']} is accepted by {process}")
        result = await _result(handle)
        world.results.setdefault(run["id"], []).append(result)

    def does(self, at: float, run: str, act: str, *args: Any) -> None:
        """Have the client signal, cancel, pause or resume a run, until it is told that it is done or too late."""
        world = self.world

        async def do(client: Process) -> None:
            handle = await client.engine.get(run)
            too_late = False
            try:
                await ACTS[act](world, handle, *args)
            except (AlreadyFinished, RunConflict, TimedOut):
                too_late = True
            world.acts_to_come -= act in AWAITED
            if not too_late:
                world.tell(f"client: {act} {' '.join(map(str, args))} to {run}")

        started = run if any(one["id"] == run for one in world.plan["runs"]) else ""
        world.at(max(world.now, at), lambda: self.do(self.process, partial(self.insist, do, started)))

    def pauses_the_schedule(self) -> None:
        """The client pauses the schedule, so that the history can end; no worker may have declared it yet."""
        world = self.world

        async def pause(client: Process) -> None:
            while not world.schedule_paused:
                try:
                    await client.engine.schedules.pause(NAME)
                    paused = (await client.engine.schedules.get(NAME)).paused
                except RunNotFound:
                    paused = False
                if not paused:
                    await asyncio.sleep(0.5)
                world.schedule_paused = paused

        self.do(self.process, partial(self.insist, pause))

    def looks_after_runs(self) -> None:
        """A person says what has become of steps that are in doubt, and lets runs go on from their breakpoints."""
        for entry in self.world.runs():
            for wake in entry.head.wakes:
                if wake.startswith(GO):
                    self._looks(entry, wake, int(self.world.now), "resume")
                elif wake.startswith(RESOLVE):
                    step = wake.removeprefix(f"{RESOLVE}:")
                    begun = sum(row.kind == Kind.STEP_STARTED for row in entry.rows)  # again, and in doubt again
                    self._looks(entry, wake, (generation_of(entry.rows), begun), "resolve", step)

    def _looks(self, entry: Any, wake: str, turn: object, act: str, *args: Any) -> None:
        if (entry.run.id, wake, turn) not in self._looked:
            self._looked.add((entry.run.id, wake, turn))
            self.does(self.world.now, entry.run.id, act, *args)

    async def insist(self, act: Callable[[Process], Awaitable[None]], run: str = "", after: float = 0.0) -> None:
        """Do something from the client's process, whichever that is by then, until the store has answered."""
        await asyncio.sleep(after)
        while True:
            client = self.process
            try:
                if client.opened and (not run or run in self.world.accepted):
                    await act(client)
                    return
            except StoreError:
                pass
            await asyncio.sleep(0.3)

    def do(self, process: Process, act: Callable[[], Awaitable[None]]) -> None:
        """Have a process do something, if it lives."""
        if not process.dead:
            process.loop.create_task(self._watched(act))

    async def _watched(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except StoreError:  # the client tries again from its own process
            pass
        except Exception as error:
            self.world.note_failure("the client was told an error that is no one's", error)


def arguments_of(run: dict[str, Any]) -> list[Any]:
    """What a run is started with."""
    if run["workflow"] == "graph":
        return [first_state(run)]
    return [] if run["workflow"] == "dag" else [run["parts"], []]


async def _result(handle: Any) -> Any:
    try:
        return ["completed", await handle.result()]
    except (StoreError, DefinitionError):  # the store was down, or the engine closed: no word about the run
        return None
    except KeepstepError as error:
        return [type(error).__name__]


def _signals(parts: Any) -> Iterator[tuple[str, int, float, bool]]:
    """What the client has to send: every statement that waits for it says what and when."""
    if isinstance(parts, list):
        if parts and parts[0] == "wait":
            yield parts[1], parts[2], parts[3], parts[4]
        elif parts and parts[0] == "maybe":
            yield parts[1], parts[2], parts[3], False
        elif parts and parts[0] == "pair":
            yield parts[1], parts[2], parts[4], False
            yield parts[1], parts[3], parts[4] + 0.5, False
        else:
            for part in parts:
                yield from _signals(part)


def _questions(parts: Any) -> Iterator[tuple[str, int, float]]:
    """What the client has to ask."""
    if isinstance(parts, list):
        if parts and parts[0] == "reply":
            yield parts[1], parts[2], parts[3]
        else:
            for part in parts:
                yield from _questions(part)
