"""The simulated world: processes that take turns, one store, one time, and everything that happens, in one thread.

A history is played from a plan (see `plans`): its programs, its workers, and what befalls them. All chance comes from
the plan's seed, so the same plan gives the same history, byte for byte.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import heapq
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from random import Random
from typing import Any

from ...engine import engine as engine_module
from ...engine import history as history_module
from ...engine import position as position_module
from ...engine import worker as worker_module
from ...engine.engine import Engine
from ...errors import (
    AlreadyFinished,
    CheckpointCorrupt,
    DefinitionError,
    KeepstepError,
    RunConflict,
    StoreError,
    TimedOut,
)
from ...model import FINISHED, Claims, Kind, Status, WorkerInfo, ids
from ...model.signal import GO, RESOLVE
from ...ports import Advance, Answer, Change, ClaimRequest, Create, Row, Send, Verdict
from ...stores.memory import MemoryStore
from ...stores.records import Record, unseal
from ...stores.rules import ENDED
from ..virtual import EPOCH
from . import programs
from .acts import ACTS, AWAITED, FORK
from .counted import counting, generation_of
from .dags import dag_of
from .graphs import first_state, graphs_of
from .loop import ProcessLoop
from .promise import Promise
from .promises import PROMISES
from .wire import Killed, Wire

Plan = dict[str, Any]

#: How long the world goes on after the last thing that befell it: long enough for every lease, backoff and sleep.
PATIENCE_SECONDS = 240.0
#: How often it is looked whether everything has ended.
LOOK_SECONDS = 0.5
#: A process that died or was stopped comes back after this, unless the plan says otherwise.
BACK_SECONDS = 0.7

#: The engine looks at the store so often here; in a world without waiting, more looks would only cost time.
PACE = (
    (worker_module, "POLL_SECONDS", 0.1),
    (engine_module, "READ_SECONDS", 0.2),
    # Graphs are short here: their whole states are written, and looked for, sooner.
    (position_module, "ENOUGH_DELTAS", 3),
    (position_module, "MOST_RECORDS", 8),
    (history_module, "FIRST_SPAN", 4),
)


class _ProcessClock:
    """The clocks of a process: its wall clock may be wrong and may be set, the other one cannot."""

    on_loop = True

    def __init__(self, world: World, slot: int) -> None:
        self._world, self._slot = world, slot

    def now(self) -> float:
        return EPOCH + self._world.now + self._world.offsets[self._slot]

    def boot(self) -> tuple[str, float]:
        return "simulated", self._world.now


class _StoreClock:
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

    def __init__(self, process: Process) -> None:
        self._process = process

    def submit(self, context: Context, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(context.run(function))
            except BaseException as error:  # noqa: BLE001 - it belongs to the one who asked
                future.set_exception(error)

        self._process.loop.call_later(self._process.latency(), do)
        return future


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
        threads: Any = _NoThreads(self)
        self.engine.step_threads = self.engine.aside_threads = threads
        self.opened = True
        await self.stop.wait()
        await self.engine.close()
        self.world.tell(f"{self} has stopped")
        self.leave()

    def die(self, how: str) -> None:
        """End this process at once: nothing of it ever runs again."""
        if not self.dead:
            self.world.tell(f"{self} dies {how}")
            if self.world.chance.random() < 0.7:  # its locks are seen to be free; otherwise its leases must run out
                for worker in self.ids:
                    self.world.store.bury(worker)
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


CLIENT = -1
FATES = {
    "fail": "fails",
    "lose": "is made, and its answer lost",
    "vanish": "is not made, which nobody knows",
    "die before": "is never made",
    "die after": "is made, and then",
    "slow": "is slow",
}


@dataclass
class Body:
    """The body of a step, as it really ran."""

    run: str
    key: str
    attempt: int
    number: int
    process: Process
    began_at: float
    ended_at: float | None = None


@dataclass
class Outcome:
    """What a history left behind."""

    plan: Plan
    broken: list[str]
    story: list[str]
    digest: str
    seconds: float
    counts: dict[str, int]
    befell: dict[str, int] = field(default_factory=dict)


class World:
    """Plays one plan. Promises are told what happens through their hooks, and say what was broken."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chance = Random(plan["seed"])  # noqa: S311 - the point is to be able to play it again
        self.now = 0.0
        self.over = False
        self.current: Process | None = None
        self.store = MemoryStore(clock=_StoreClock(self), lease_seconds=plan["lease"])
        slots = [*range(plan["workers"]), CLIENT]
        self.offsets = dict.fromkeys(slots, 0.0)
        self.codes = dict.fromkeys(slots, 0)
        self.callbacks = dict.fromkeys(slots, 0)
        self.calls = dict.fromkeys(slots, 0)
        self.slow = dict.fromkeys(slots, 0.0)
        self.slow_calls = dict.fromkeys(slots, 0)
        self.deaf = dict.fromkeys(slots, ("", 0.0))
        self.begun = dict.fromkeys(slots, 0)
        self.given = dict.fromkeys(slots, 0)
        self.lost_claims: set[int] = set()
        self.next_fate: dict[int, str] = {}
        self.back_after: dict[int, float] = {}
        self.down_until = 0.0
        self.killed: set[str] = set()
        self.processes: dict[int, Process] = {}
        self._past: list[Process] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._pending_events = [*plan["events"]]
        self._by_moment: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
        # what is known from outside the store
        self.bodies: dict[tuple[str, str], list[Body]] = {}
        self.running: dict[int, Body] = {}
        self._unrecorded = 0
        self._looked: set[tuple[str, str, object]] = set()
        self.accepted: dict[str, dict[str, Any]] = {}
        self.results: dict[str, Any] = {}
        self.cancelled: set[str] = set()
        self.went_back: set[str] = set()
        self.forks: dict[str, int] = {}
        self.specs: dict[str, dict[str, Any]] = {run["id"]: run for run in plan["runs"]}
        self.acts_to_come = sum(event["what"] in AWAITED for event in plan["events"])
        self.befell: dict[str, int] = {}
        self.story: list[str] = []
        self.broken: list[str] = []
        self.counts = {"steps": 0, "commits": 0, "claims": 0, "lives": 0}
        self._hash = hashlib.sha256()
        self._promises = [promise(self) for promise in PROMISES]
        self._hooks = {
            name: [
                getattr(one, name) for one in self._promises if getattr(type(one), name) is not getattr(Promise, name)
            ]
            for name in ("begins", "ends", "told", "wrote", "claimed", "renewed", "saw", "sent", "went_back", "ended")
        }

    # -- playing -------------------------------------------------------------------------------------------------------

    def play(self) -> Outcome:
        """Play the plan to its end, and see whether every promise was kept."""
        with _its_own_chance(self), _listening(self), _nothing_collected():
            programs.HERE.append(self)
            try:
                self._begin()
                self._go_on()
                for check in self._hooks["ended"]:
                    check()
            finally:
                self.over = True
                for process in self._past:
                    self._abandon(process)
                programs.HERE.pop()
        for run in self._runs():
            for row in run.rows:
                self._hash.update(row.record)
            self._hash.update(repr((run.status, run.signals)).encode())
        counts = {**self.counts, "runs": len(self._runs())}
        return Outcome(self.plan, self.broken, self.story, self._hash.hexdigest(), self.now, counts, self.befell)

    def _runs(self) -> list[Any]:
        return list(self.store._runs.values())  # noqa: SLF001 - the judge may look anywhere

    def _begin(self) -> None:
        for event in self._pending_events:
            what, moment = event["at"]
            if what == "time":
                self.at(moment, partial(self._befalls_slot, event))
            else:
                self._by_moment.setdefault((what, event["slot"], moment), []).append(event)
        for slot in (*range(self.plan["workers"]), CLIENT):
            self._start_process(slot, 1)
        for run in self.plan["runs"]:
            self.at(run["at"], partial(self._start_run, run))

    def _go_on(self) -> None:
        chance, agenda = self.chance, self._agenda
        last = max(
            [run["at"] for run in self.plan["runs"]] + [_until(event) for event in self.plan["events"]], default=0.0
        )
        end = last + PATIENCE_SECONDS
        look_at = LOOK_SECONDS
        while self.now < end:
            while agenda and agenda[0][0] <= self.now:
                heapq.heappop(agenda)[2]()
            if self.now >= look_at:
                look_at = self.now + LOOK_SECONDS
                if self._all_over():
                    return
                self._look_after_runs()
            ready, soonest = self._who_can_go(agenda[0][0] if agenda else end)
            if not ready:
                self.now = min(soonest, look_at)
                continue
            process = ready[0] if len(ready) == 1 else chance.choice(ready)
            self.current = process
            process.loop.one_pass(process.may_go_on)
            self.current = None
            self.now += 0.0005 * chance.random()

    def _who_can_go(self, soonest: float) -> tuple[list[Process], float]:
        """The processes that have something to do now, and when the next will have."""
        ready = []
        for process in self.processes.values():
            at = None if process.dead else process.loop.next_at()
            if at is None:
                continue
            at = max(at, process.paused_until)
            if at <= self.now:
                ready.append(process)
            elif at < soonest:
                soonest = at
        return ready, soonest

    def _all_over(self) -> bool:
        """Everything that was to be started has been, and has ended."""
        if self.acts_to_come or len(self.accepted) < len(self.plan["runs"]):
            return False
        return all(run.status in ENDED or self.waits_for_a_person(run) for run in self._runs())

    def waits_for_a_person(self, entry: Any) -> bool:
        """Whether a run waits for a child, and that for another, and the last of them was set aside."""
        if entry.status is not Status.WAITING:
            return entry.status is Status.SET_ASIDE
        children = [
            child for child in self._runs() if child.run.parent == entry.run.id and child.status not in FINISHED
        ]
        return bool(children) and all(self.waits_for_a_person(child) for child in children)

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Have something done at a time."""
        self._order += 1
        heapq.heappush(self._agenda, (moment, self._order, action))

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start_process(self, slot: int, life: int) -> None:
        self.counts["lives"] += 1
        process = self.processes[slot] = Process(self, slot, life)
        self._past.append(process)
        self.tell(f"{process} starts")

    def comes_back(self, process: Process) -> None:
        """A process has ended: another takes its place."""
        slot = process.slot
        for number in [number for number, body in self.running.items() if body.process is process]:
            del self.running[number]
        after = self.back_after.pop(slot, BACK_SECONDS)
        self.at(self.now + after, lambda: self._start_process(slot, process.life + 1))

    @staticmethod
    def _abandon(process: Process) -> None:
        process.dead = True
        engine = process.engine
        engine.closed = True
        for context in engine.live.values():
            context.detached = context.detached or "the world has ended"
        process.loop.abandon()

    # -- what befalls them ---------------------------------------------------------------------------------------------

    def due_at(self, what: str, slot: int, moment: int) -> Sequence[dict[str, Any]]:
        return self._by_moment.pop((what, slot, moment), ())

    def befalls(self, event: dict[str, Any], process: Process | None) -> None:
        """Something of the plan happens now."""
        from .plans import FAULTS  # noqa: PLC0415 - the registry speaks of worlds

        if process is None or process.dead:
            return
        self.befell[event["what"]] = self.befell.get(event["what"], 0) + 1
        FAULTS[event["what"]].happen(self, process, event)

    def _befalls_slot(self, event: dict[str, Any]) -> None:
        self.befalls(event, self.processes.get(event["slot"]))

    # -- the client ----------------------------------------------------------------------------------------------------

    def _start_run(self, run: dict[str, Any]) -> None:
        """The client starts a run: in a worker's process, so that it is leased at birth, or from its own."""
        process = self.processes.get(run["by"], self.processes[CLIENT])
        if process.slot != CLIENT and process.opened and not process.dead:
            self._do(process, partial(self._started, process, run))
        self._do(self.processes[CLIENT], partial(self.insist, lambda client: self._started(client, run), after=0.5))
        self.client_sends(run["id"])

    def client_sends(self, run_id: str) -> None:
        """Have the client send what a run waits for, each at its time, or now if that is past."""
        run = self.specs[run_id]
        for name, number, at, twice in _signals(run["parts"]):
            for extra in (0.0, 0.4) if twice else (0.0,):
                self.client_does(at + extra, run["id"], "signal", name, number)
        for name, number, at in _questions(run["parts"]):
            self.client_does(at, run["id"], "ask", name, number)

    @property
    def client(self) -> Process:
        return self.processes[CLIENT]

    def is_forked(self, run_id: str) -> None:
        """The client has forked a run: the other one must come to the same, and is sent the same."""
        fork = f"{run_id}{FORK}"
        if fork not in self.accepted:
            self.specs[fork] = self.accepted[fork] = {**self.specs[run_id], "id": fork}
            self.client_sends(fork)

    async def _started(self, process: Process, run: dict[str, Any]) -> None:
        options = {"run_id": run["id"], "deadline": run.get("deadline"), "delay": run.get("delay", 0.0)}
        workflow = process.workflows[run["id"] if run["workflow"] in ("graph", "dag") else run["workflow"]]
        handle = await process.engine.start(workflow, *arguments_of(run), **options)
        if run["id"] not in self.accepted:
            self.accepted[run["id"]] = run
            self.tell(f"{run['id']} is accepted by {process}")
        result = await _result(handle)
        self.results.setdefault(run["id"], []).append(result)

    def client_does(self, at: float, run: str, act: str, *args: Any) -> None:
        """Have the client signal, cancel, pause or resume a run, until it is told that it is done or too late."""

        async def do(client: Process) -> None:
            handle = await client.engine.get(run)
            too_late = False
            try:
                await ACTS[act](self, handle, *args)
            except (AlreadyFinished, RunConflict, TimedOut):
                too_late = True
            self.acts_to_come -= act in AWAITED
            if not too_late:
                self.tell(f"client: {act} {' '.join(map(str, args))} to {run}")

        started = run if any(one["id"] == run for one in self.plan["runs"]) else ""
        self.at(max(self.now, at), lambda: self._do(self.processes[CLIENT], partial(self.insist, do, started)))

    def _look_after_runs(self) -> None:
        """A person says what has become of steps that are in doubt, and lets runs go on from their breakpoints."""
        for entry in self._runs():
            for wake in entry.wakes:
                if wake.startswith(GO):
                    self._looks(entry, wake, int(self.now), "resume")
                elif wake.startswith(RESOLVE):
                    step = wake.removeprefix(f"{RESOLVE}:")
                    begun = sum(row.kind == Kind.STEP_STARTED for row in entry.rows)  # again, and in doubt again
                    self._looks(entry, wake, (generation_of(entry.rows), begun), "resolve", step)

    def _looks(self, entry: Any, wake: str, turn: object, act: str, *args: Any) -> None:
        if (entry.run.id, wake, turn) not in self._looked:
            self._looked.add((entry.run.id, wake, turn))
            self.client_does(self.now, entry.run.id, act, *args)

    async def insist(self, act: Callable[[Process], Awaitable[None]], run: str = "", after: float = 0.0) -> None:
        await asyncio.sleep(after)
        while True:
            client = self.processes[CLIENT]
            try:
                if client.opened and (not run or run in self.accepted):
                    await act(client)
                    return
            except StoreError:
                pass
            await asyncio.sleep(0.3)

    def _do(self, process: Process, act: Callable[[], Awaitable[None]]) -> None:
        if not process.dead:
            process.loop.create_task(self._watched(act))

    async def _watched(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except StoreError:  # the client tries again from its own process
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, a client must not be told it
            self.note_failure("the client was told an error that is no one's", error)

    # -- what the wire does --------------------------------------------------------------------------------------------

    def commit(self, process: Process, changes: Sequence[Change]) -> list[Answer]:
        runs = self.store._runs  # noqa: SLF001
        before = [_head(runs.get(_run_of(change))) for change in changes]
        answers = self.store.commit(changes, wait=True)
        self.counts["commits"] += 1
        for change, answer, head in zip(changes, answers, before, strict=True):
            records: list[Record] = []
            if answer.verdict is Verdict.DONE and isinstance(change, (Advance, Create)):
                after = change.after if isinstance(change, Advance) else 0
                records = self._read(change.rows, _run_of(change), after)
            if records or isinstance(change, Advance):
                self.tell(f"{process}: {_told(change, answer, records)}")
            for hook in self._hooks["wrote"]:
                hook(process, change, answer, records, head)
            if any(record.kind == Kind.SUPERSEDED.value for record in records):
                self._goes_back(_run_of(change))
        return answers

    def _goes_back(self, run: str) -> None:
        """A person went back in a run: everyone who remembers it is told what still counts."""
        self.went_back.add(run)
        counted = counting(self._read(self.store._runs[run].rows, run, 0))  # noqa: SLF001
        for hook in self._hooks["went_back"]:
            hook(run, counted)

    def _read(self, rows: Sequence[Row], run: str, after: int) -> list[Record]:
        try:
            return [record for record, _ in unseal(rows, run, after)]
        except CheckpointCorrupt as error:
            self.breaks("the history of a run is whole", str(error))
            return []

    def claim(self, process: Process, request: ClaimRequest) -> Claims:
        claims = self.store.claim_runs(request)
        for claim in claims.claims:
            self.counts["claims"] += 1
            how = ", from a dead worker" if claim.taken_from else ""
            self.tell(f"{process} claims {claim.run.id} (epoch {claim.lease.epoch}{how})")
            for hook in self._hooks["claimed"]:
                hook(process, claim)
        return claims

    def renew(self, process: Process, worker: WorkerInfo, *, leaving: bool) -> bool:
        if worker.id not in process.ids:
            process.ids.append(worker.id)
        known = self.store.renew_leases(worker, leaving=leaving)
        for hook in self._hooks["renewed"]:
            hook(process, worker.id, known)
        return known

    # -- what the programs tell ----------------------------------------------------------------------------------------

    def body_begins(self, run: str, key: str, attempt: int, idempotency_key: str, number: int) -> int:
        process = self.current
        assert process is not None
        self.counts["steps"] += 1
        mark = self.counts["steps"]
        body = Body(run, key, attempt, number, process, self.now)
        self.tell(f"{process}: {run} {key} begins{f', attempt {attempt}' if attempt > 1 else ''}")
        for hook in self._hooks["begins"]:
            hook(body, idempotency_key)
        self.bodies.setdefault((run, key), []).append(body)
        self.running[mark] = body
        self.begun[process.slot] += 1
        for event in self.due_at("body", process.slot, self.begun[process.slot]):
            self.befalls(event, process)
        if process.dead:
            raise Killed
        poison = self.plan.get("poison", {}).get(str(number % programs.CODE))
        if poison and len(self.bodies[run, key]) <= poison:
            process.die(f"of {key}")
            raise Killed
        return mark

    def body_begins_unrecorded(self, run: str) -> int:
        """The code of a workflow waits for something that Keepstep does not know."""
        assert self.current is not None
        self._unrecorded -= 1
        self.running[self._unrecorded] = Body(run, "a wait of its own", 1, 0, self.current, self.now)
        return self._unrecorded

    def body_ends(self, mark: int) -> None:
        body = self.running.pop(mark, None)
        if body is not None and self.current is body.process:
            body.ended_at = self.now

    def saw(self, run: str, key: str, state: dict[str, Any]) -> None:
        for hook in self._hooks["saw"]:
            hook(run, key, state)

    def has_begun(self, run: str, key: str) -> bool:
        return bool(self.bodies.get((run, key)))

    def code_is_told(self, call: Any) -> None:
        for hook in self._hooks["told"]:
            hook(call)

    def child_is_told(self, run: str) -> None:
        if self.store.get_run(run) is None and FORK not in run:  # which makes its own in the commit after this
            self.breaks("a child that its parent knows is there", run)

    def asked(self, name: str, payload: Any) -> None:
        """A workflow was asked something."""

    def heard(self, name: str, payload: Any) -> None:
        for hook in self._hooks["sent"]:
            hook(name, payload)

    def caught(self, error: BaseException) -> None:
        """A program caught an error; only those that Keepstep names may reach it."""
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                self.caught(one)
        elif not isinstance(error, KeepstepError):
            self.note_failure("a workflow was told an error that is no one's", error)

    def code(self) -> int:
        return self.current.code if self.current is not None else 0

    def answered(self, asked: int, answer: int) -> None:
        if asked != answer:
            self.breaks("an answer belongs to its question", f"asked {asked}, told {answer}")

    def slept_until(self, due: datetime, now: datetime) -> None:
        woken = now.timestamp()
        if "set clock" not in self.befell:  # a run's own time is never behind what it slept: the world's tells more
            woken = min(woken, EPOCH + self.now)
        if due.timestamp() - woken > 0.001:
            self.breaks("a sleep lasts as long as it was asked to", f"due {due}, woken {now}")

    # -- saying --------------------------------------------------------------------------------------------------------

    def tell(self, line: str) -> None:
        text = f"{self.now:9.4f}  {line}"
        self.story.append(text)
        self._hash.update(text.encode())

    def breaks(self, promise: str, how: str) -> None:
        """A promise was broken."""
        if self.over:  # what is cleared away afterwards proves nothing
            return
        self.tell(f"BROKEN: {promise}: {how}")
        self.broken.append(f"{promise}: {how}")

    def note_failure(self, what: str, error: BaseException | None) -> None:
        if not isinstance(error, Killed):
            self.breaks("nothing fails inside the engine", f"{what}: {error!r}")


def programs_of(plan: Plan, code: int) -> dict[str, Any]:
    """What a process knows: the workflows that follow programs, and the graphs and dags of the plan, by their run."""
    found = dict(programs.WORKFLOWS)
    for run in plan["runs"]:
        if run["workflow"] == "graph":
            *inside, found[run["id"]] = graphs_of(run, code)
            found.update({one.name: one for one in inside})
        elif run["workflow"] == "dag":
            found[run["id"]] = dag_of(run, code)
    return found


def arguments_of(run: dict[str, Any]) -> list[Any]:
    """What a run is started with."""
    if run["workflow"] == "graph":
        return [first_state(run)]
    return [] if run["workflow"] == "dag" else [run["parts"], []]


# -- small things ------------------------------------------------------------------------------------------------------


def _until(event: dict[str, Any]) -> float:
    what, moment = event["at"]
    return float((moment if what == "time" else 0.0) + event.get("seconds", 0.0))


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


def _run_of(change: Change) -> str:
    if isinstance(change, Send):
        return change.signal.run
    return change.run.id if isinstance(change, Create) else change.run


@dataclass(frozen=True, slots=True)
class Head:
    """How a run stood before a change."""

    status: Status
    seq: int
    epoch: int
    worker: str | None
    signals: int


def _head(entry: Any) -> Head | None:
    if entry is None:
        return None
    return Head(entry.status, len(entry.rows), entry.epoch, entry.worker, len(entry.signals))


def _told(change: Change, answer: Answer, records: list[Record]) -> str:
    run = _run_of(change)
    what = ", ".join(f"{record.kind} {record.step}".strip() for record in records) or "head"
    status = getattr(change, "status", None)
    moved = f" → {status.value}" if status else ""
    refused = "" if answer.verdict is Verdict.DONE else f" REFUSED: {answer.verdict.value}"
    return f"{run}: {what}{moved}{refused}"


@contextmanager
def _its_own_chance(world: World) -> Iterator[None]:
    """Draw every id from the seed, and look at the store less often than in the real world."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in PACE]
    kept += [(ids, "draw", ids.draw)]
    for module, name, value in PACE:
        setattr(module, name, value)
    ids.draw = Random(f"ids {world.plan['seed']}").randbytes  # type: ignore[assignment]  # noqa: S311
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep the collector still: what it finds, and when, depends on everything else in this Python."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _listening(world: World) -> Iterator[None]:
    """Errors that the engine logs with their traceback are its own failures; a record would ask for the real time."""
    log: Any = logging.getLogger("keepstep")

    def heard(level: int, message: str, args: Any, exc_info: Any = None, **_: Any) -> None:
        error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1] if exc_info else None
        if error is not None:
            world.note_failure(message % args if args else message, error)

    before, filters = log.level, list(log.filters)
    log.setLevel(logging.ERROR)
    log._log = heard  # noqa: SLF001 - what every call of the logger comes to
    try:
        yield
    finally:
        del log._log  # noqa: SLF001
        log.setLevel(before)
        log.filters[:] = filters  # a process that dies does not take its own away
