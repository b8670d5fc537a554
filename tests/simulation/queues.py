"""A queue with limits in the simulated world: how it is drawn, what people do to its jobs, and what is promised of it.

A plan with a queue has jobs beside its runs: short runs with keys, priorities, delays and a `dedupe`. A job fails until
somebody mends it, sleeps without its place, or starts a child behind its own key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import keepstep as ks
from keepstep.errors import AlreadyFinished, RunConflict
from keepstep.model import FINISHED, Status
from keepstep.model.gate import QUEUE, GateInfo
from keepstep.policies.queue import DECLARED, Limits
from keepstep.policies.rate import Rate
from keepstep.ports import Advance, Answer, Change, Create, Verdict
from keepstep.records.record import Record
from keepstep.stores.rules import ENDED

from .bodies import CLIENT, Body, here, pass_time
from .promise import Promise

if TYPE_CHECKING:
    from keepstep.model import Claim, Claims
    from keepstep.ports import ClaimRequest

    from .process import Process
    from .world import Head, World

NAME = "sim:queue"
#: How often a history has a queue.
SHARE = 0.15
#: The numbers of the jobs' bodies begin here, beyond those of programs.
FIRST_NUMBER = 500
#: How often the client looks whether a job that it mends has failed, and after how long.
TRIES, PAUSE_SECONDS = 60, 0.4
#: Rounding of a rate's tokens, which are counted from seconds since 1970.
ROUNDING = 1e-3


# -- what is drawn -----------------------------------------------------------------------------------------------------


def draw_limits(random: Random) -> dict[str, Any]:
    """Some limits, of which one at least is set."""
    limits: dict[str, Any] = {}
    if random.random() < 0.6:
        limits["concurrency"] = random.choice((1, 1, 2, 3))
    if random.random() < 0.5:
        limits["per_key"] = random.choice((1, 1, 2))
    if random.random() < 0.25:
        limits["per_worker"] = random.choice((1, 2))
    if random.random() < 0.3 or not limits:
        rate = {"count": random.choice((1, 2)), "per": random.choice((1.0, 2.0)), "burst": random.choice((1, 1, 2))}
        limits["rate"] = rate
    return limits


def draw_queue(random: Random, workers: int) -> dict[str, Any] | None:
    """The queue of a plan, if it has one."""
    if random.random() >= SHARE:
        return None
    jobs = [_draw_job(random, number, workers) for number in range(random.choice((3, 4, 6, 8)))]
    return {"limits": draw_limits(random), "jobs": jobs}


def _draw_job(random: Random, number: int, workers: int) -> dict[str, Any]:
    job: dict[str, Any] = {
        "id": f"job-{number}",
        "kind": random.choice(("work", "work", "work", "sleep", "fails", "child")),
        "seconds": random.choice((0.0, 0.05, 0.6, 1.5)),
        "key": random.choice((None, "a", "a", "b")),
        "by": random.choice((CLIENT, *range(workers))),
        "at": round(random.choice((0.2, 0.2, 3.0)) * random.random(), 3),
    }
    if random.random() < 0.2:
        job["priority"] = 1
    if random.random() < 0.2:
        job["delay"] = random.choice((0.3, 2.0))
    if random.random() < 0.4:
        job["dedupe"] = random.choice(("d", "d", "e"))
    return job


def draw_act(random: Random) -> dict[str, Any]:
    """Which job a person means: the n-th, counted round."""
    return {"job": random.randrange(8)}


def draw_change(random: Random) -> dict[str, Any]:
    """Other limits, which hold for so long; a queue may be shut for a while."""
    limits = draw_limits(random) if random.random() < 0.7 else {"concurrency": 0}
    return {"limits": limits, "seconds": round(random.choice((1.0, 4.0)) * (0.5 + random.random()), 3)}


# -- what runs ---------------------------------------------------------------------------------------------------------


@ks.step
async def job_step(number: int, seconds: float, fails: bool) -> int:
    """Takes a while, and fails until somebody has mended its job."""
    with Body(number):
        await pass_time(seconds)
        if fails and (ks.run_id() or "") not in here().mended:
            raise ks.Permanent("this job is to be mended")
    return number


@ks.workflow(name="sim:queued")
async def queued(job: dict[str, Any]) -> int:
    """A job of the queue."""
    if job["kind"] == "sleep":
        await ks.sleep(job["seconds"])
    number = FIRST_NUMBER + int(job["id"].rpartition("-")[2])
    done: int = await job_step(number, job["seconds"], job["kind"] == "fails")
    if job["kind"] == "child":
        inside = {**job, "kind": "work"}
        await (await ks.start(queued, inside, queue=NAME, key=job["key"])).result()
    return done


@contextmanager
def declaring(plan: dict[str, Any]) -> Iterator[None]:
    """Have the processes of a history declare its queue, and no other."""
    before = dict(DECLARED)
    DECLARED.clear()
    if "queue" in plan:
        limits = Limits.of(plan["queue"]["limits"])
        names = ("concurrency", "per_worker", "per_key", "rate")
        ks.Queue(NAME, **{name: getattr(limits, name) for name in names})
    try:
        yield
    finally:
        DECLARED.clear()
        DECLARED.update(before)


# -- what the client does ----------------------------------------------------------------------------------------------


class Jobs:
    """The jobs of a history, as its client knows them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.specs: list[dict[str, Any]] = world.plan.get("queue", {}).get("jobs", [])
        self.runs: dict[str, str] = {}  # the run that each start answered with
        self.to_come = 0

    def begin(self) -> None:
        """Have every job started at its time."""
        for job in self.specs:
            self.world.at(job["at"], partial(self._starts, job))

    def last_at(self) -> float:
        """When the last job is started."""
        return max((job["at"] for job in self.specs), default=0.0)

    def all_started(self) -> bool:
        """Whether every job was accepted, and everything done that was to be done to them."""
        return len(self.runs) == len(self.specs) and not self.to_come

    def _starts(self, job: dict[str, Any]) -> None:
        client, process = self.world.client, self.world.processes.get(job["by"])
        if process is not None and process.slot != CLIENT and process.opened and not process.dead:
            client.do(process, partial(self._start, job, process))
        client.do(client.process, partial(client.insist, partial(self._start, job), after=0.5))

    async def _start(self, job: dict[str, Any], process: Process) -> None:
        if job["id"] in self.runs:
            return
        options = {name: job[name] for name in ("priority", "delay", "dedupe") if name in job}
        handle = await process.engine.start(queued, job, run_id=job["id"], queue=NAME, key=job["key"], **options)
        found = self.world.store.get_run(handle.id)
        if handle.id != job["id"] and (found is None or found.dedupe != job.get("dedupe")):
            self.world.breaks("a start that is a duplicate answers with the first run", f"{job['id']}: {handle.id}")
        if job["id"] not in self.runs:
            self.runs[job["id"]] = handle.id
            self.world.tell(f"{job['id']} is accepted as {handle.id}")

    def does(self, act: Any, event: dict[str, Any]) -> None:
        """Have the client do something to a job, until the store has answered."""
        to_mend = act is Jobs.mend
        jobs = [job["id"] for job in self.specs if job["kind"] == "fails" or not to_mend]
        if not jobs:
            return
        job = jobs[event.get("job", 0) % len(jobs)]
        self.to_come += 1

        async def do(client: Process) -> None:
            await act(self, client, job, event)
            self.to_come -= 1

        self.world.client.do(self.world.client.process, partial(self.world.client.insist, do))

    async def _accepted(self, job: str) -> str:
        while job not in self.runs:  # noqa: ASYNC110 - an event belongs to the loop of one process
            await asyncio.sleep(0.1)
        return self.runs[job]

    async def cancel(self, client: Process, job: str, event: dict[str, Any]) -> None:
        """Cancel a job. One that no worker has ever had is cancelled when the command returns."""
        world, run = self.world, await self._accepted(job)
        try:
            await (await client.engine.get(run)).cancel()
        except (AlreadyFinished, RunConflict):
            return
        world.tell(f"client: cancel {run}")
        entry = world.store._runs[run]
        if entry.head.status is not Status.CANCELLED and run not in world.had_by_workers:
            world.breaks("a cancelled run that has not begun ends at once", f"{run} is {entry.head.status.value}")

    async def mend(self, client: Process, job: str, event: dict[str, Any]) -> None:
        """Wait until a job has failed, mend it, and retry it; a twin that has not ended may stand in its way."""
        world, run = self.world, await self._accepted(job)
        handle = await client.engine.get(run)
        for _ in range(TRIES):
            status = (await handle.run()).status
            if status is Status.FAILED:
                world.mended.add(run)
                try:
                    await handle.retry("mended")
                    world.tell(f"client: retry {run}")
                    return
                except RunConflict:
                    pass
            elif status in ENDED:
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def limit(self, client: Process, job: str, event: dict[str, Any]) -> None:
        """Change the limits of the queue for a while."""
        world = self.world
        changes: dict[str, Any] = dict.fromkeys(("concurrency", "per_worker", "per_key", "rate"))
        limits = Limits.of(event["limits"])
        await client.engine.queues.set(NAME, **{name: getattr(limits, name) for name in changes})
        world.tell(f"client: the queue has {limits}")
        await asyncio.sleep(event["seconds"])
        await world.client.insist(lambda now: now.engine.queues.reset(NAME))
        world.tell("client: the queue has its own limits again")


# -- what is promised --------------------------------------------------------------------------------------------------


class _OfQueue(Promise):
    """Remembers, from what is claimed and written alone, who holds which run of the queue, and which have begun."""

    def prepare(self) -> None:
        self.holder: dict[str, str] = {}
        self.begun: set[str] = set()
        self.known: set[str] = set()

    @property
    def gate(self) -> GateInfo | None:
        return self.world.store._gates.get((QUEUE, NAME))

    @property
    def limits(self) -> Limits:
        return Limits() if self.gate is None else Limits.of(self.gate.limits)

    def lives(self, worker: str) -> bool:
        return worker not in self.world.killed and worker not in self.world.store._gone

    def held(self) -> list[str]:
        """The runs of the queue that living workers hold."""
        return [run for run, worker in self.holder.items() if self.lives(worker)]

    def shares(self, run: str) -> bool:
        """Whether a child holds its parent's place behind their key."""
        entry = self.entries()[run].run
        parent = self.entries().get(entry.parent or "")
        return parent is not None and (parent.run.queue, parent.run.key) == (entry.queue, entry.key)

    def claimed(self, process: Process, claim: Claim) -> None:
        if claim.run.queue != NAME or self.gate is None:
            return
        run = claim.run.id
        self.holder[run] = claim.lease.worker
        if process.slot != CLIENT:  # a person's command lets nothing begin
            begins = run not in self.begun
            self.begun.add(run)
            self.taken(process, claim, begins=begins)

    def taken(self, process: Process, claim: Claim, *, begins: bool) -> None:
        """A worker has claimed a run of the queue, which begins with it or has begun before."""

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if answer.verdict is not Verdict.DONE or not isinstance(change, Advance):
            return
        if change.release or change.status in ENDED:
            self.holder.pop(change.run, None)
        if change.status in ENDED:
            self.begun.discard(change.run)


class PlacesAreCounted(_OfQueue):
    """No claim leads to more runs than the concurrency among living workers, or than `per_worker` at one of them."""

    name = "no more runs of a queue are driven than it has places"

    def taken(self, process: Process, claim: Claim, *, begins: bool) -> None:
        limits, held = self.limits, self.held()
        if limits.concurrency is not None and len(held) > limits.concurrency:
            self.broken(f"{process} takes {claim.run.id}: {', '.join(held)} are held, and {limits} is allowed")
        here = [run for run in held if self.holder[run] == claim.lease.worker]
        if limits.per_worker is not None and len(here) > limits.per_worker:
            self.broken(f"{process} takes {claim.run.id} and holds {', '.join(here)}, and {limits} is allowed")


class NoRunIsDrivenUnclaimed(_OfQueue):
    """A run of a queue with limits is leased by a claim, never at its birth."""

    name = "a run of a queue with limits begins by a claim"

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        creates = [change] if isinstance(change, Create) else getattr(change, "creates", ())
        for create in creates if answer.verdict is Verdict.DONE else ():
            if create.run.queue == NAME and create.run.worker is not None and self.gate is not None:
                self.broken(f"{create.run.id} is leased to {process} at birth")


class KeysAreCounted(_OfQueue):
    """No run of a key begins while as many have begun and not ended as the key may have, parked and paused ones too."""

    name = "no more runs of a key have begun than it may have"

    def taken(self, process: Process, claim: Claim, *, begins: bool) -> None:
        key, most = claim.run.key, self.limits.per_key
        if key is None or most is None or not begins or self.shares(claim.run.id):
            return
        others = [run for run in self.begun if self.entries()[run].run.key == key and not self.shares(run)]
        if len(others) > most:
            self.broken(f"{process} lets {claim.run.id} begin: {', '.join(sorted(others))} have begun, of {most}")


class RatesHold(_OfQueue):
    """In any time, no more runs begin than the rate and its burst allow, whichever workers take them."""

    name = "runs of a queue begin no faster than its rate"

    def prepare(self) -> None:
        super().prepare()
        self._rate: Rate | None = None
        self._began: list[float] = []

    def taken(self, process: Process, claim: Claim, *, begins: bool) -> None:
        rate = self.limits.rate
        if rate != self._rate:
            self._rate, self._began = rate, []
        if rate is None or claim.lease.epoch != 1 or "set clock" in self.world.befell:
            return
        self._began.append(self.world.now)
        for place, first in enumerate(self._began):
            many, most = len(self._began) - place, rate.burst + (self.world.now - first) / rate.interval
            if many > most + ROUNDING:
                self.broken(f"{many} runs begin within {self.world.now - first:.3f} s, and the rate is {rate}")
                return


class DedupeIsUnique(Promise):
    """Of the runs of a queue with one `dedupe`, at most one has not finished."""

    name = "one unfinished run has a dedupe"

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if answer.verdict is Verdict.DONE and "queue" in self.world.plan:
            self._look()

    def claimed(self, process: Process, claim: Claim) -> None:
        if claim.run.dedupe is not None:
            self._look()

    def _look(self) -> None:
        found: dict[str, str] = {}
        for run, entry in self.entries().items():
            dedupe = entry.run.dedupe
            if dedupe is None or entry.head.status in FINISHED:
                continue
            if dedupe in found:
                self.broken(f"{found[dedupe]} and {run} have the dedupe {dedupe!r}")
            found[dedupe] = run


class NothingWaitsForAFreePlace(_OfQueue):
    """A claim that takes fewer runs than it may leaves none that could begin: no place, key or token is lost."""

    name = "no run of a queue waits while there is room for it"

    def asked(self, process: Process, request: ClaimRequest, claims: Claims) -> None:
        if request.run is not None or self.gate is None or len(claims.claims) >= request.limit:
            return
        if queued.name not in request.workflows or request.worker in self.world.store._gone | self.world.store._killed:
            return
        limits, now = self.limits, process.clock.now()
        # A dead worker whose lease has not run out still counts for the store.
        held = [run for run, worker in self.holder.items() if worker not in self._given_up()]
        if limits.concurrency is not None and len(held) >= limits.concurrency:
            return
        here = sum(self.holder[run] == request.worker for run in held)
        if limits.per_worker is not None and here >= limits.per_worker:
            return
        for run in self._ready(now):
            if self._could_begin(run, limits):
                self.broken(f"{process} takes {len(claims.claims)} of {request.limit} runs, and {run} could begin")

    def _given_up(self) -> set[str]:
        store = self.world.store
        return store._gone | store._killed | {one for one in self.holder.values() if one not in store._workers}

    def _ready(self, now: float) -> Sequence[str]:
        return [
            run
            for run, entry in self.entries().items()
            if entry.run.queue == NAME
            and entry.head.worker is None
            and entry.head.status not in ENDED
            and entry.head.due_at is not None
            and entry.head.due_at.timestamp() <= now
        ]

    def _could_begin(self, run: str, limits: Limits) -> bool:
        entry = self.entries()[run]
        key = entry.run.key
        if limits.rate is not None and (entry.head.epoch == 0 or (key is not None and run not in self.begun)):
            return False  # it may lack a token
        if key is None or limits.per_key is None or run in self.begun or self.shares(run):
            return True
        begun = [one for one in self.begun if self.entries()[one].run.key == key and not self.shares(one)]
        return len(begun) < limits.per_key


QUEUE_PROMISES: list[type[Promise]] = [
    PlacesAreCounted,
    NoRunIsDrivenUnclaimed,
    KeysAreCounted,
    RatesHold,
    DedupeIsUnique,
    NothingWaitsForAFreePlace,
]
