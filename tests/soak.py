"""Holds a load on workers that are killed and stopped at random, and proves that nothing is lost, stuck or repeated.

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
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import apsw

import keepstep as ks
from keepstep.engine.engine import Engine
from keepstep.errors import StoreError
from keepstep.model import Kind, RunQuery, Status
from keepstep.testing.recorder import Recorder, repeated_in_store
from tests.crash import programs

#: Short, so that a stop outlasts it; long enough for a busy machine.
LEASE_SECONDS = 2.0
#: Unfinished runs that are kept going.
LOAD = 40
#: How long everything may take to finish once nothing more goes wrong.
DRAIN_SECONDS = 90.0
#: A body that begins so close to a stop was let in, or under way, before it: no lease can prevent that.
ACROSS_SECONDS = 0.1

OPTIONS = {"lease_seconds": LEASE_SECONDS, "recovery_limit": 1_000_000, "linger_seconds": 0.05}


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
    repeated: list = field(default_factory=list)
    lost: list = field(default_factory=list)
    stuck: list = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.wrong or self.repeated or self.lost or self.stuck) and self.finished == self.started

    def __str__(self) -> str:
        rate = self.finished / self.seconds if self.seconds else 0.0
        faults = self.faults
        lines = [
            f"{'good' if self.good else 'BAD'} after {self.seconds:.0f} s",
            f"  load held            {self.most} unfinished runs, {rate:.1f} runs/s, {self.bodies:,} step bodies",
            f"  faults injected      {faults['kill']:,} kills, {faults['stop']:,} stops",
            f"  of which past a lease {faults['long stop']:,}; recoveries {self.recoveries:,}",
            f"  runs finished        {self.finished:,} of {self.started:,} ({self.cancelled:,} cancelled on purpose)",
            f"  repeated after their checkpoint   {len(self.repeated)}",
            f"  repeated before it (as promised)  {self.extra_bodies:,}",
            f"  begun before a stop, noted after  {len(self.late_lines)}",
            f"  let in before a stop, begun after {len(self.across)}",
            f"  lost {len(self.lost)}   stuck {len(self.stuck)}   wrong {len(self.wrong)}",
        ]
        for name in ("repeated", "lost", "stuck", "wrong", "late_lines", "across"):
            lines += [f"    {name}: {what}" for what in getattr(self, name)[:10]]
        return "\n".join(lines)


class Soak:
    """One soak: the workers, the load on them, what goes wrong, and the judgement."""

    def __init__(self, folder: Path, path: Path, workers: int, seed: int) -> None:
        self.folder, self.path = folder, path
        self.count = workers
        self.draw = random.Random(seed)
        self.report = Report()
        self.effects = Recorder(folder / "effects")
        self.payments = folder / "payments"
        self.payments.mkdir()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.crash.programs"])
        self.workers: list = []
        self.stops: list[tuple[int, float, float]] = []
        self.stopped: dict[int, asyncio.Future] = {}
        self.expected: dict[str, object] = {}
        self.numbers = itertools.count(1)
        self.open: set[str] = set()

    # -- the workers and what befalls them ----------------------------------------------------------------------------

    def spawn(self):
        process = self.context.Process(target=work, args=(str(self.path), str(self.effects.path)), daemon=True)
        process.start()
        return process

    async def injure(self) -> None:
        """Kill or stop one worker after the other, for ever; a killed one is replaced at once."""
        while True:
            await asyncio.sleep(self.draw.uniform(0.0, 0.3))
            place = self.draw.randrange(self.count)
            process = self.workers[place]
            if process.pid in self.stopped and self.draw.random() < 0.95:
                continue  # a stopped one is seldom killed, so that most wake up as zombies
            if self.draw.random() < 0.85:
                process.kill()
                await asyncio.to_thread(process.join)
                self.report.faults["kill"] += 1
                self.workers[place] = await asyncio.to_thread(self.spawn)
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

    # -- the load -----------------------------------------------------------------------------------------------------

    def next_job(self):
        """A workflow, its arguments, what must come of it, and what else a client does."""
        return self.draw.choice(
            [
                (programs.working, (8, 0.005), 36, ()),
                (programs.mixed, (3, 0.005), 17, (("signal", "bonus", 5),)),
                (programs.fan, (), [2, 4, 6, 2, 4, 6, 10, 11], ()),
                (programs.parent_of_two, (), [2, 4], ()),
                (programs.retried, (), [7, "keepstep.errors.Permanent", 8], ()),
                (programs.continuing, (1, 0), 106, (("signal", "extra", 100),)),
                (programs.plain, (), [2, 3, 4, 10, 6, 9], (("signal", "late", 9),)),
                (programs.booking, (), [1, 2, 2, 3], ()),
                (programs.pausing, (), [2, "gone", 4], (("pause",), ("signal", "go", "gone"), ("resume",))),
                (programs.cancelled, (), "cancelled", (("cancel",),)),
                (programs.napping, (2.5,), 2, ()),
                (programs.paying, (str(self.payments),), [2, "paid", 3], ()),
            ]
        )

    async def client(self, engine, until: float) -> None:
        """Start a run, say what is to be said to it, wait for its result, and start the next."""
        while time.monotonic() < until:
            workflow, args, expected, acts = self.next_job()
            run_id = f"{workflow.fn.__name__}-{next(self.numbers)}"
            await self.insist(lambda: engine.start(workflow, *args, run_id=run_id))  # noqa: B023 - awaited at once
            self.report.started += 1
            self.expected[run_id] = expected
            self.open.add(run_id)
            self.report.most = max(self.report.most, len(self.open))
            handle = await engine.get(run_id)
            for act, *what in acts:
                await asyncio.sleep(self.draw.uniform(0, 0.2))
                options = {"id": what[0]} if what else {}
                with contextlib.suppress(ks.AlreadyFinished):
                    await self.insist(lambda: getattr(handle, act)(*what, **options))  # noqa: B023
            try:
                result = await self.insist(handle.result)
            except ks.RunCancelled:
                result = "cancelled"
                self.report.cancelled += 1
            except ks.RunError as error:
                result = repr(error)
            self.open.discard(run_id)
            self.report.finished += 1
            if result != expected:
                self.report.wrong.append(f"{run_id} gave {result!r}, not {expected!r}")

    @staticmethod
    async def insist(act):
        """A process that is stopped inside a transaction blocks every writer; whatever is asked can be asked again."""
        while True:
            try:
                return await act()
            except StoreError:
                await asyncio.sleep(0.05)

    # -- the whole ----------------------------------------------------------------------------------------------------

    async def run(self, seconds: float) -> Report:
        began = time.monotonic()
        async with Engine(self.path, worker=False) as engine:
            self.workers = [self.spawn() for _ in range(self.count)]
            until = began + seconds
            clients = [asyncio.ensure_future(self.client(engine, until)) for _ in range(LOAD)]
            faults = asyncio.ensure_future(self.injure())
            try:
                await asyncio.sleep(seconds)
                faults.cancel()
                await asyncio.wait([faults, *self.stopped.values()])
                self.workers = [one if one.is_alive() else self.spawn() for one in self.workers]
                await asyncio.wait(clients, timeout=DRAIN_SECONDS)
                for client in clients:
                    if client.done():
                        client.result()
                    client.cancel()
                self.report.seconds = time.monotonic() - began
                await self.judge(engine)
            finally:
                for worker in self.workers:
                    worker.kill()
                    worker.join()
        return self.report

    async def judge(self, engine) -> None:
        report = self.report
        runs = await self.every_run(engine)
        report.lost = sorted(set(self.expected) - {run.id for run in runs})
        report.stuck = [explained(run) for run in runs if not run.status.finished]
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
        self.judge_ledger(runs)

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

    def judge_ledger(self, runs) -> None:
        """What transactional steps wrote is there exactly once."""
        db = apsw.Connection(str(self.path))
        if list(db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'ledger'")):
            booked = Counter(run for (run,) in db.execute("SELECT run FROM ledger"))
            for run in runs:
                if run.workflow == programs.booking.name and run.status is Status.COMPLETED and booked[run.id] != 3:
                    self.report.wrong.append(f"{run.id} booked {booked[run.id]} times, not 3")
        db.close()

    @staticmethod
    async def every_run(engine) -> list:
        runs, after = [], None
        while True:
            page = await engine.list(RunQuery(limit=1000, after=after))
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


def work(path: str, effects: str) -> None:
    """A worker process: it lives until it is killed."""

    async def main() -> None:
        programs.record_to(effects)
        while True:
            with contextlib.suppress(StoreError):
                async with ks.open(path, **OPTIONS):
                    await asyncio.Event().wait()
            await asyncio.sleep(0.05)

    # What workers complain of stands beside the effects, for whoever keeps the folder.
    logging.basicConfig(filename=f"{effects}.log", level=logging.ERROR, format="%(process)d %(asctime)s %(message)s")
    asyncio.run(main())


def soak(seconds: float, workers: int = 3, store: str | None = None, seed: int = 0, keep: str | None = None) -> Report:
    """Run a soak and give its report. `keep` names a folder that is not removed afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(store.removeprefix("sqlite:///")) if store else folder / "runs.db"
        return asyncio.run(Soak(folder, path, workers, seed).run(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--store", help="sqlite:///path; a temporary file if it is not given")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", help="a folder for the store and the effects, kept for a look at them")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    report = soak(options.seconds, options.workers, options.store, options.seed, options.keep)
    print(report)
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
