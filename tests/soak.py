"""Holds a load on workers to which everything bad happens, and proves that nothing is lost, stuck or repeated.

Real processes on every durable store: they are killed and stopped past their lease at random, their clocks are set, the
disk is full for a while, and the power goes: everybody is killed at once and the end of the store's log torn or cut.

python -m tests.soak --seconds 600 --workers 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import keepstep as ks
from keepstep.care.doctor import Severity, examine
from keepstep.engine.engine import Engine
from keepstep.errors import StoreError
from keepstep.model import Kind, RunQuery, Status
from keepstep.ports import SystemClock
from keepstep.testing.faults.recorder import Recorder, repeated_in_store
from tests.crash import programs
from tests.soak_stores import STORES

#: Short, so that a stop outlasts it; long enough for a busy machine.
LEASE_SECONDS = 2.0
#: Unfinished runs that are kept going.
LOAD = 40
#: Seconds that all runs have to finish once nothing more goes wrong; more than an overloaded machine needs.
DRAIN_SECONDS = 240.0
#: A body that begins so close to a stop was let in, or under way, before it: no lease can prevent that.
ACROSS_SECONDS = 0.1
#: How far a clock is set: ahead no further than a parked run may sleep too long, back as far as one likes.
CLOCK_SECONDS = (-86_400.0, -60.0, -5.0, -0.5, 0.0, 0.5, 5.0)
#: How long the disk is full, and how often that and a power cut come.
FULL_SECONDS = 1.5
FULL_EVERY = 20.0
CUT_EVERY = 15.0

OPTIONS = {"lease_seconds": LEASE_SECONDS, "recovery_limit": 1_000_000, "linger_seconds": 0.05}


#: What goes wrong, and how the report calls it.
FAULTS = {
    "kill": "kills",
    "stop": "stops",
    "long stop": "of them past a lease",
    "clock": "clocks set",
    "full disk": "full disks",
    "torn log": "power cuts that tore the log",
    "cut log": "that cut it",
    "ended sessions": "times all sessions ended",
    "killed server": "servers killed under way",
    "cut server": "killed with everybody",
}


@dataclass
class Report:
    """What happened, and whether it may happen."""

    seconds: float = 0.0
    started: int = 0
    finished: int = 0
    cancelled: int = 0
    bodies: int = 0
    extra_bodies: int = 0
    recoveries: int = 0
    faults: Counter = field(default_factory=Counter)
    across: list = field(default_factory=list)
    late_lines: list = field(default_factory=list)
    most: int = 0
    wrong: list = field(default_factory=list)
    aside: list = field(default_factory=list)
    repeated: list = field(default_factory=list)
    lost: list = field(default_factory=list)
    stuck: list = field(default_factory=list)

    @property
    def good(self) -> bool:
        bad = self.wrong or self.repeated or self.lost or self.stuck or self.aside
        return not bad and self.finished == self.started

    def __str__(self) -> str:
        rate = self.finished / self.seconds if self.seconds else 0.0
        faults = [f"{self.faults[kind]:,} {words}" for kind, words in FAULTS.items() if self.faults[kind]]
        lines = [
            f"{'good' if self.good else 'BAD'} after {self.seconds:.0f} s",
            f"  load held            {self.most} unfinished runs, {rate:.1f} runs/s, {self.bodies:,} step bodies",
            f"  faults injected      {', '.join(faults)}",
            f"  recoveries           {self.recoveries:,}",
            f"  runs finished        {self.finished:,} of {self.started:,} ({self.cancelled:,} cancelled on purpose)",
            f"  repeated after their checkpoint   {len(self.repeated)}",
            f"  repeated before it (as promised)  {self.extra_bodies:,}",
            f"  begun before a stop, noted after  {len(self.late_lines)}",
            f"  let in before a stop, begun after {len(self.across)}",
            f"  lost {len(self.lost)}   stuck {len(self.stuck)}   wrong {len(self.wrong)}",
            f"  set aside {len(self.aside)}",
        ]
        for name in ("repeated", "lost", "stuck", "wrong", "late_lines", "across", "aside"):
            lines += [f"    {name}: {what}" for what in getattr(self, name)[:10]]
        return "\n".join(lines)


#: Runs that take a moment, when many of them are to be done.
SHORT = [
    (programs.working, (4, 0.001), 10, ()),
    (programs.fan, (), [2, 4, 6, 2, 4, 6, 10, 11], ()),
    (programs.retried, (), [7, "keepstep.errors.Permanent", 8], ()),
    (programs.booking, (), [1, 2, 2, 3], ()),
]


class Interrupted(Exception):
    """The client's own engine was closed: whatever it did, it does again."""


@dataclass(frozen=True)
class Job:
    """A run, what must come of it, and what else its client does: all of it may be done again."""

    run: str
    workflow: object
    args: tuple
    expected: object
    acts: tuple


class Soak:
    """One soak: the workers, the load on them, what goes wrong, and the judgement."""

    def __init__(self, folder: Path, store, workers: int, seed: int, *, runs: int = 0, wanted: Sequence = ()) -> None:
        self.folder, self.store, self.seed, self.runs = folder, store, seed, runs
        self.wanted = wanted
        self.over = False
        self.count = workers
        self.draw = random.Random(seed)
        self.report = Report()
        self.effects = Recorder(folder / "effects")
        self.payments = folder / "payments"
        self.payments.mkdir()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.crash.programs"])
        self.workers: list = []
        self.clocks = [SetClock.file(folder / f"clock-{place}") for place in range(workers)]
        self.stops: list[tuple[int, float, float]] = []
        self.stopped: dict[int, asyncio.Future] = {}
        self.jobs: dict[str, Job] = {}
        self.numbers = itertools.count(1)
        self.open: set[str] = set()
        self.in_doubt: set[str] = set()
        self.engine: Engine | None = None
        self.opened = asyncio.Event()
        self.one_at_a_time = asyncio.Lock()
        self.one_outage = asyncio.Lock()
        self.again: list[asyncio.Future] = []

    # -- the workers and what befalls them ----------------------------------------------------------------------------

    def spawn(self, place: int):
        ready = self.context.Event()
        words = (self.store.url, self.store.options, str(self.effects.path), self.clocks[place].name, ready)
        process = self.context.Process(target=work, args=words, daemon=True)
        process.start()
        process.ready = ready
        return process

    async def injure(self) -> None:
        """Kill or stop one worker after the other, for ever; a killed one is replaced at once."""
        while True:
            await asyncio.sleep(self.draw.uniform(0.0, 2.0 if self.runs else 0.3))  # many runs need some peace
            async with self.one_at_a_time:
                await self.injure_one(self.draw.randrange(self.count))

    async def injure_one(self, place: int) -> None:
        process = self.workers[place]
        if process.pid in self.stopped and self.draw.random() < 0.95:
            return  # a stopped one is seldom killed, so that most wake up as zombies
        if not process.ready.is_set() and self.draw.random() < 0.95:
            return  # one that has only just been started is seldom killed, so that some work is done
        chance = self.draw.random()
        if chance < 0.75:
            process.kill()
            await asyncio.to_thread(process.join)
            self.report.faults["kill"] += 1
            self.workers[place] = await asyncio.to_thread(self.spawn, place)
        elif chance < 0.85:
            self.clocks[place].set(self.draw.choice(CLOCK_SECONDS))
            self.report.faults["clock"] += 1
        elif process.pid not in self.stopped:
            self.stopped[process.pid] = asyncio.ensure_future(self.stop(process))

    async def stop(self, process) -> None:
        seconds = self.draw.choice([0.05, 0.3, 1.3 * LEASE_SECONDS])
        began = time.time()
        signalled(process, signal.SIGSTOP)
        self.effects.note("stop", pid=process.pid)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.stops.append((process.pid, began, time.time()))
            self.effects.note("wake", pid=process.pid)
            signalled(process, signal.SIGCONT)
            del self.stopped[process.pid]
        self.report.faults["stop"] += 1
        self.report.faults["long stop"] += seconds > LEASE_SECONDS and process.is_alive()

    async def fill_disk(self, every: float) -> None:
        """Nothing more can be written for a while, by anyone."""
        while True:
            await asyncio.sleep(every)
            async with self.one_outage:
                kind = self.store.fill() or "full disk"
                try:
                    await asyncio.sleep(FULL_SECONDS)
                finally:
                    self.store.free()
            self.report.faults[kind] += 1

    async def cut_power(self, every: float) -> None:
        """Everybody dies at once, and the end of the log is torn; every other time it is cut, which loses commits."""
        for kind in itertools.cycle(self.store.cuts):
            await asyncio.sleep(every)
            async with self.one_at_a_time, contextlib.AsyncExitStack() as alone:
                if self.store.tells_time:  # a server is not killed twice at once
                    await alone.enter_async_context(self.one_outage)
                while not any(one.ready.is_set() and one.pid not in self.stopped for one in self.workers):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                self.opened.clear()
                await self.engine.close()  # before the workers die: the last to leave would empty the log
                for process in self.workers:
                    process.kill()
                    process.join()
                if self.store.cut(kind, self.draw):
                    self.report.faults[kind] += 1
                self.engine = await self.opened_engine()
                self.workers = [self.spawn(place) for place in range(self.count)]
                self.opened.set()
                await self.do_again()

    async def opened_engine(self) -> Engine:
        engine = Engine(self.store.url, worker=False, **self.store.options)
        await self.insist(engine.open)
        return engine

    async def do_again(self) -> None:
        """Clients that had their result are asked for it again, if the store has lost how it came about."""
        there = {run.id: run.status for run in await self.every_run()}
        for job in self.jobs.values():
            ended = there.get(job.run) in (Status.COMPLETED, Status.CANCELLED, Status.FAILED)
            if job.workflow is programs.paying and not ended:
                self.in_doubt.add(job.run)  # the mark of an at-most-once step may be lost, and its payment is not
            if not ended and job.run not in self.open:
                self.again.append(asyncio.ensure_future(self.insist_on(job)))

    # -- the load -----------------------------------------------------------------------------------------------------

    def next_job(self) -> Job:
        workflow, args, expected, acts = self.draw.choice(SHORT if self.runs else self.jobs_of_all_kinds())
        return Job(f"{workflow.fn.__name__}-{next(self.numbers)}", workflow, args, expected, acts)

    def jobs_of_all_kinds(self) -> list:
        jobs = [
            (programs.working, (8, 0.005), 36, ()),
            (programs.mixed, (3, 0.005), 17, (("signal", "bonus", 5),)),
            (programs.fan, (), [2, 4, 6, 2, 4, 6, 10, 11], ()),
            (programs.parent_of_two, (), [2, 4], ()),
            (programs.retried, (), [7, "keepstep.errors.Permanent", 8], ()),
            (programs.continuing, (1, 0), 106, (("signal", "extra", 100),)),
            (programs.relaying, (4, []), [1, 2, 3, 4], tuple(("signal", f"item{n}", n) for n in range(1, 5))),
            (programs.plain, (), [2, 3, 4, 10, 6, 9], (("signal", "late", 9),)),
            (programs.booking, (), [1, 2, 2, 3], ()),
            (programs.pausing, (), [2, "gone", 4], (("pause",), ("signal", "go", "gone"), ("resume",))),
            (programs.cancelled, (), "cancelled", (("cancel",),)),
            (programs.napping, (2.5,), 2, ()),
            (programs.paying, (str(self.payments),), [2, "paid", 3], ()),
        ]
        return [job for job in jobs if self.store.transactional or job[0] is not programs.booking]

    async def client(self) -> None:
        """Have one run after the other done."""
        while self.report.started < self.runs if self.runs else not self.over:
            job = self.next_job()
            self.jobs[job.run] = job
            self.report.started += 1
            self.open.add(job.run)
            self.report.most = max(self.report.most, len(self.open))
            await self.insist_on(job)
            self.open.discard(job.run)
            self.report.finished += 1

    async def insist_on(self, job: Job) -> None:
        while True:
            await self.opened.wait()
            try:
                await self.play(job)
            except Interrupted:
                continue
            return

    async def play(self, job: Job) -> None:
        """Start a run, say what is to be said to it, and wait for its result."""
        engine = self.engine
        handle = await self.insist(lambda: engine.start(job.workflow, *job.args, run_id=job.run), engine)
        for act, *what in job.acts:
            await asyncio.sleep(self.draw.uniform(0, 0.2))
            options = {"id": what[0]} if what else {}
            with contextlib.suppress(ks.AlreadyFinished):
                await self.insist(lambda: getattr(handle, act)(*what, **options), engine)  # noqa: B023 - awaited at once
        try:
            result = await self.insist(handle.result, engine)
        except ks.RunCancelled:
            result = "cancelled"
            self.report.cancelled += 1
        except ks.RunError as error:
            result = repr(error)
        if result != job.expected and job.run not in self.in_doubt:
            self.report.wrong.append(f"{job.run} gave {result!r}, not {job.expected!r}")

    async def insist(self, act, engine: Engine | None = None):
        """A full disk, or a process that is stopped inside a transaction: whatever is asked can be asked again."""
        while True:
            try:
                return await act()
            except (StoreError, ks.DefinitionError) as error:
                if engine is not None and engine.closed:
                    raise Interrupted from None
                if isinstance(error, ks.DefinitionError):
                    raise
                await asyncio.sleep(0.05)

    # -- the whole ----------------------------------------------------------------------------------------------------

    async def run(self, seconds: float) -> Report:
        began = time.monotonic()
        self.engine = await self.opened_engine()
        self.workers = [self.spawn(place) for place in range(self.count)]
        self.opened.set()
        try:
            clients = [asyncio.ensure_future(self.client()) for _ in range(LOAD)]
            faults = [
                asyncio.ensure_future(self.injure()),
                asyncio.ensure_future(self.fill_disk(min(FULL_EVERY, seconds / 5))),
                asyncio.ensure_future(self.cut_power(min(CUT_EVERY, seconds / 5))),
            ]
            await (asyncio.wait(clients, timeout=seconds) if self.runs else asyncio.sleep(seconds))
            await self.wanted_faults(faults)
            self.over = True
            self.runs = min(self.runs, self.report.started)
            await self.end_faults(faults)
            await asyncio.wait([*clients, *self.again], timeout=DRAIN_SECONDS)
            for client in [*clients, *self.again]:
                if client.done():
                    client.result()
                client.cancel()
            self.report.seconds = time.monotonic() - began
            await self.judge(self.engine)
        finally:
            for worker in self.workers:
                worker.kill()
                worker.join()
            await self.engine.close()
        return self.report

    async def wanted_faults(self, faults) -> None:
        """Come back when a fault of each wanted group has happened; a busy machine may need longer for that."""
        while not all(any(self.report.faults[kind] for kind in kinds) for kinds in self.wanted):
            if any(fault.done() and fault.exception() is not None for fault in faults):
                return  # end_faults raises it
            await asyncio.sleep(0.05)

    async def end_faults(self, faults) -> None:
        """From now on nothing goes wrong any more."""
        async with self.one_at_a_time:
            for fault in faults:
                fault.cancel()
        await asyncio.wait([*faults, *self.stopped.values()])
        for fault in faults:
            if not fault.cancelled() and fault.exception() is not None:
                raise fault.exception()
        for clock in self.clocks:
            clock.set(0.0)
        self.workers = [one if one.is_alive() else self.spawn(place) for place, one in enumerate(self.workers)]

    async def judge(self, engine) -> None:
        report = self.report
        runs = await self.every_run()
        until = time.monotonic() + DRAIN_SECONDS
        # The child of a cancelled run ends by itself, perhaps after its parent, for which the clients have waited.
        while any(not run.status.finished and run.status is not Status.SET_ASIDE for run in runs):
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.1)
            runs = await self.every_run()
        report.lost = sorted(set(self.jobs) - {run.id for run in runs})
        report.stuck = [explained(run) for run in runs if not run.status.finished]
        await self.keep_aside(engine, [run for run in runs if run.status is Status.SET_ASIDE])
        histories = {}
        for run in runs:
            try:
                histories[run.id] = history = await (await engine.get(run.id)).checkpoints()
            except StoreError as error:
                report.wrong.append(f"{run.id}: {error}")
                continue
            done = Counter(one.step for one in history if one.kind in (Kind.STEP_COMPLETED, Kind.SIGNAL))
            report.wrong += [
                f"{run.id}: {step} was recorded {n} times"
                for step, n in done.items()
                if n > 1 and not step.startswith("ks:")
            ]
            report.recoveries += sum(one.kind is Kind.RECOVERED for one in history)
            if [one.seq for one in history] != list(range(1, run.seq + 1)):
                report.wrong.append(f"{run.id}: its sequence has gaps")
        effects = self.effects.effects()
        counts = self.effects.counts()
        report.bodies = sum(counts.values())
        report.extra_bodies = report.bodies - len(counts)
        self.sort_out(repeated_in_store(effects, histories))
        report.wrong += self.store.judge(runs)
        found = (await examine(engine)).findings
        report.wrong += [f"doctor: {one.message}" for one in found if one.severity is Severity.ERROR]

    async def keep_aside(self, engine, runs) -> None:
        """A run that was set aside is a failure whose history someone will want to read."""
        if not runs:
            return
        kept = Path(tempfile.gettempdir()) / f"keepstep-soak-{self.seed}"
        kept.mkdir(exist_ok=True)
        self.store.copy(kept)
        for run in runs:
            whole = await engine.read(engine.store.get_run, run.id)
            self.report.aside.append(f"{run.id}: {whole.error}; its store is kept in {kept}")
            for entry in await (await engine.get(run.id)).audit():
                print(f"  {run.id} {entry.seq:4} {entry.at:%H:%M:%S.%f} {entry.what} {entry.step} {entry.actor}")

    def sort_out(self, found) -> None:
        """Tell bodies that began too late from those that were already under way when their process was stopped.

        The line of a body may be written only when the process wakes, though the body began before the stop, as its
        time says. One that was let in before the stop may even begin when the process wakes: one for each stop at most.
        """
        stops = [stop for stop in self.stops if stop[2] - stop[1] > LEASE_SECONDS / 2]
        for effect in found:
            mine = [stop for stop in stops if stop[0] == effect.pid]
            before = [stop for stop in mine if abs(effect.at - stop[1]) <= ACROSS_SECONDS]
            after = [stop for stop in mine if 0 <= effect.at - stop[2] <= ACROSS_SECONDS]
            what = f"{effect.run} {effect.step} by {effect.worker} at {effect.at:.3f}"
            if before:
                self.report.late_lines.append(what)
            elif after:
                stops.remove(after[0])
                self.report.across.append(what)
            else:
                self.report.repeated.append(what)

    async def every_run(self) -> list:
        runs, after = [], None
        while True:
            page = await self.engine.list(RunQuery(limit=1000, after=after))
            runs += page.runs
            after = page.next
            if after is None:
                return runs


def signalled(process, number) -> None:
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def explained(run) -> str:
    """Where an unfinished run stands, and what it waits for."""
    return (
        f"{run.id} is {run.status} at seq {run.seq}, epoch {run.epoch}, held by {run.worker}, due {run.due_at}, "
        f"wakes {run.wakes}, {run.signals} signals, {run.recoveries} recoveries"
    )


class SetClock(SystemClock):
    """A wall clock that someone else sets: a file holds how far it is off."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.name = path
        self._fd = os.open(path, os.O_RDWR)

    @classmethod
    def file(cls, path: Path) -> SetClock:
        path.write_bytes(struct.pack("d", 0.0))
        return cls(str(path))

    def now(self) -> float:
        return time.time() + struct.unpack("d", os.pread(self._fd, 8, 0))[0]

    def set(self, seconds: float) -> None:
        os.pwrite(self._fd, struct.pack("d", seconds), 0)


def work(url: str, options: dict, effects: str, clock: str, ready) -> None:
    """A worker process: it lives until it is killed."""

    async def main() -> None:
        programs.record_to(effects)
        while True:
            with contextlib.suppress(StoreError):
                ground = STORES[url.partition(":")[0]]
                own = None if ground.tells_time else SetClock(clock)  # where the server's time counts, theirs does not
                async with ks.open(url, clock=own, **OPTIONS, **options) as engine:
                    ready.set()
                    await ground.attend(engine)
            await asyncio.sleep(0.05)

    # What workers complain of stands beside the effects, for whoever keeps the folder.
    logging.basicConfig(filename=f"{effects}.log", level=logging.ERROR, format="%(process)d %(asctime)s %(message)s")
    asyncio.run(main())


def soak(
    seconds: float,
    workers: int = 3,
    store: str = "sqlite",
    *,
    seed: int = 0,
    keep: str | None = None,
    runs: int = 0,
    wanted: Sequence[Sequence[str]] = (),
) -> Report:
    """Soak one kind of store and give the report. `keep` names a folder that is not removed afterwards.

    With `runs`, so many short runs are done, within that time. Faults go on until one of each group in `wanted` has
    happened, even if that takes longer.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        ground = stack.enter_context(contextlib.closing(STORES[store](folder)))

        async def run() -> Report:
            return await Soak(folder, ground, workers, seed, runs=runs, wanted=wanted).run(seconds)

        report = asyncio.run(run())
        if keep:
            ground.copy(folder)
        return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--store", choices=STORES, action="append", help="only these [all durable ones in turn]")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--runs", type=int, default=0, help="do so many short runs instead, within --seconds")
    parser.add_argument("--keep", help="a folder for the store and the effects, kept for a look at them")
    options = parser.parse_args()
    stores = options.store or list(STORES)
    good = True
    for store in stores:
        print(f"{store}, seed {options.seed}", flush=True)
        report = soak(
            options.seconds / len(stores),
            options.workers,
            store,
            seed=options.seed,
            keep=options.keep,
            runs=options.runs,
        )
        print(report, flush=True)
        good = good and report.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
