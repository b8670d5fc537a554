"""A fleet of four worker processes on PostgreSQL, between whom and the server everything goes wrong.

Paths stall, are slow, cut, reset and refused; sessions are ended; the server restarts, stays away for longer than a
lease, and its clock is set; workers are killed and started again, and are stopped for a moment. No run may be at work
on two workers at once, be set aside, get lost or get stuck.

python -m tests.fleet --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

import keepstep as ks
from keepstep.errors import StoreError
from keepstep.model import Run, RunQuery, Status
from tests.network import Proxy
from tests.postgres import Server

ROOT = Path(__file__).parents[1]
#: Long enough for a busy machine to send a heartbeat in each third of it, short enough to be outlasted.
LEASE_SECONDS = 10.0
#: How long one path may be away: less than a lease without the heartbeat before it and the time to connect again.
CUT_SECONDS = 1.2
#: How long the server is away when it is away for longer than a lease.
OUTAGE_SECONDS = LEASE_SECONDS + 1.5
#: How far the clock of the server is set.
STEPS_SECONDS = (-3600.0, -60.0, 60.0, 3600.0)
#: How long everything may take to end once nothing more goes wrong.
DRAIN_SECONDS = 90.0
#: What a role may have been given, none of which may matter.
ROLE = (
    "CREATE ROLE fleet LOGIN CONNECTION LIMIT 60",
    "GRANT CREATE ON DATABASE postgres TO fleet",
    "ALTER ROLE fleet SET timezone = 'Asia/Kathmandu'",
    "ALTER ROLE fleet SET client_encoding = 'LATIN1'",
    "ALTER ROLE fleet SET datestyle = 'German'",
    "ALTER ROLE fleet SET synchronous_commit = 'off'",
)


# -- the work ----------------------------------------------------------------------------------------------------------


def note(what: str) -> None:
    """Append a line to the common record; one write each, so that a kill leaves it whole or away."""
    line = f"{time.monotonic():.6f} {os.getpid()} {ks.run_id()} {what}\n"
    out = os.open(os.environ["KEEPSTEP_FLEET_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(out, line.encode())
    os.close(out)


@ks.step
async def body(number: int, seconds: float) -> int:
    note(f"begin {number}")
    try:
        await asyncio.sleep(seconds)
    finally:
        note(f"end {number}")
    return number


@ks.workflow
async def errand(*seconds: float) -> int:
    return sum([await body(number, one) for number, one in enumerate(seconds)])


@ks.workflow
async def family(seconds: float) -> int:
    children = [await ks.start(errand, seconds, seconds) for _ in range(2)]
    return sum([await child for child in children])


async def work(url: str) -> None:
    """Be a worker until told to leave."""
    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
    async with ks.open(url, lease_seconds=LEASE_SECONDS, linger_seconds=0.2, stop_seconds=0.5):
        print("up", flush=True)
        await leave.wait()


# -- the fleet ---------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What happened, and whether it may happen."""

    started: int = 0
    finished: int = 0
    bodies: int = 0
    recoveries: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    at_once: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.at_once or self.aside or self.lost or self.stuck)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} × {name}" for name, count in sorted(self.faults.items()))
        return "\n".join(
            [
                f"{'good' if self.good else 'BAD'}: {self.finished} of {self.started} runs finished",
                f"  {self.bodies} bodies, {self.recoveries} recoveries; {faults}",
                f"  at work on two workers at once {len(self.at_once)}   set aside {len(self.aside)}",
                f"  lost {len(self.lost)}   stuck {len(self.stuck)}",
                *(f"    {what}" for what in [*self.at_once, *self.aside, *self.lost, *self.stuck][:20]),
            ]
        )


class Ship:
    """One worker process, and its path to the server."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.proxy = Proxy(fleet.dsn)
        self.sail()

    def sail(self) -> None:
        """Start the process, and wait until it works."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fleet", "--worker", self.proxy.dsn],
            cwd=ROOT,
            env={**os.environ, "KEEPSTEP_FLEET_RECORD": str(self.fleet.record)},
            stdout=subprocess.PIPE,
            stderr=self.fleet.log,
            text=True,
        )
        if self.process.stdout is None or self.process.stdout.readline() != "up\n":
            raise AssertionError((self.fleet.folder / "log").read_text()[-4000:])

    def sink(self) -> None:
        """Kill the process; whatever it was doing ends at that moment."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.fleet.dead[self.process.pid] = time.monotonic()


class Fleet:
    """A server, four workers, and what befalls them."""

    def __init__(self, folder: Path, seed: int = 0, workers: int = 4) -> None:
        self.folder, self.record = folder, folder / "record"
        self.chance = random.Random(seed)
        self.report = Report()
        self.dead: dict[int, float] = {}
        self.log = (folder / "log").open("a")
        self.server = Server.make(clock=True)
        with psycopg.connect(self.server.dsn, autocommit=True) as admin:
            for statement in ROLE:
                admin.execute(statement)
        self.dsn = self.server.dsn.replace("postgres@", "fleet@")
        self.ships: list[Ship] = []
        for _ in range(workers):
            self.ships.append(Ship(self))

    def close(self) -> None:
        for ship in self.ships:
            ship.process.kill()
            ship.process.wait()
            if ship.process.stdout is not None:
                ship.process.stdout.close()
            ship.proxy.close()
        self.log.close()
        self.server.remove()

    async def start(self, number: int, *, seconds: float) -> None:
        """Start a few runs, as a program without a worker does."""
        async with ks.open(self.dsn, worker=False) as engine:
            for _ in range(number):
                how_long = [self.chance.uniform(0, seconds) for _ in range(self.chance.randint(1, 3))]
                if self.chance.random() < 0.2:
                    await engine.start(family, how_long[0] / 2, run_id=f"run-{self.report.started}")
                else:
                    await engine.start(errand, *how_long, run_id=f"run-{self.report.started}")
                self.report.started += 1

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def _path(self, name: str, begin: Callable[[Proxy], object], end: Callable[[Proxy], object]) -> None:
        self.report.faults[name] += 1
        proxy = self.chance.choice(self.ships).proxy
        begin(proxy)
        time.sleep(self.chance.uniform(0.1, CUT_SECONDS))
        end(proxy)

    def stall(self) -> None:
        """One path passes nothing on for a while."""
        self._path("stall", lambda p: setattr(p, "stalled", True), lambda p: setattr(p, "stalled", False))

    def slow(self) -> None:
        """One path takes long each way."""
        self._path("slow path", lambda p: setattr(p, "delay_seconds", 0.08), lambda p: setattr(p, "delay_seconds", 0.0))

    def cut(self) -> None:
        """One path is cut, and refused for a while."""

        def begin(proxy: Proxy) -> None:
            proxy.refusing = True
            proxy.cut()

        self._path("cut", begin, lambda p: setattr(p, "refusing", False))

    def reset(self) -> None:
        """All connections of one path are reset."""
        self._path("reset", lambda p: p.cut(), lambda p: None)

    def end_sessions(self) -> None:
        """Somebody ends all sessions at the server."""
        self.report.faults["ended sessions"] += 1
        with psycopg.connect(self.server.dsn, autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'fleet'")

    def pause(self) -> None:
        """One process is stopped for a moment."""
        self.report.faults["pause"] += 1
        process = self.chance.choice(self.ships).process
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.1, CUT_SECONDS))
        process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """The server is started again."""
        self.report.faults["server restart"] += 1
        self.server.stop("fast")
        self.server.start()

    def outage(self) -> None:
        """The server is away for longer than a lease."""
        self.report.faults["outage longer than a lease"] += 1
        self.server.stop("immediate")
        time.sleep(OUTAGE_SECONDS)
        self.server.start()

    def step_clock(self) -> None:
        """The clock of the server is set, and set right again."""
        if self.server.environment:
            self.report.faults["clock step"] += 1
            self.server.set_clock(self.chance.choice(STEPS_SECONDS))
            time.sleep(LEASE_SECONDS / 2)
            self.server.set_clock(0)

    def kill(self) -> None:
        """One worker is killed, and started again."""
        self.report.faults["kill"] += 1
        ship = self.chance.choice(self.ships)
        ship.sink()
        ship.sail()

    # -- what came of it -----------------------------------------------------------------------------------------------

    async def drain(self) -> list[Run]:
        """Wait until all has ended; the runs."""
        ends = time.monotonic() + DRAIN_SECONDS
        async with ks.open(self.dsn, worker=False) as engine:
            while True:
                runs: list[Run] = []
                with contextlib.suppress(StoreError):
                    runs = list(engine.store.list_runs(RunQuery(limit=100_000)).runs)
                over = runs and all(run.status.finished or run.status is Status.SET_ASIDE for run in runs)
                if over or time.monotonic() > ends:
                    return runs
                await asyncio.sleep(0.2)

    def given_up(self) -> list[str]:
        """The workers that others took for dead."""
        with psycopg.connect(self.server.dsn) as admin:
            rows = admin.execute("SELECT id FROM keepstep.keepstep_worker WHERE gone_at IS NOT NULL")
            return [worker for (worker,) in rows]

    def judge(self, runs: list[Run]) -> Report:
        report, found = self.report, {run.id: run for run in runs}
        report.bodies = 0
        report.finished = sum(run.status is Status.COMPLETED and run.parent is None for run in runs)
        report.recoveries = sum(run.recoveries for run in runs)
        report.lost = [name for number in range(report.started) if (name := f"run-{number}") not in found]
        report.aside = [f"{run.id}: {run.error}" for run in runs if run.status is Status.SET_ASIDE]
        report.stuck = [f"{run.id} is {run.status} of {run.worker}" for run in runs if not _over(run)]
        report.at_once = list(self._at_once())
        return report

    def _at_once(self) -> list[str]:
        """Bodies of one run that were at work in two processes at the same moment."""
        at_work: dict[str, tuple[int, float]] = {}
        found = []
        for line in sorted(self.record.read_text().splitlines(), key=lambda line: float(line.split()[0])):
            at, process, run, what, _ = line.split()
            when, pid = float(at), int(process)
            if what == "begin":
                self.report.bodies += 1
                other, since = at_work.get(run, (pid, when))
                if other != pid and self.dead.get(other, when + 1) > when:
                    found.append(f"{run} at work in {other} since {since:.2f}, begun in {pid} at {when:.2f}")
                at_work[run] = (pid, when)
            elif at_work.get(run, (0, 0.0))[0] == pid:
                del at_work[run]
        return found


def _over(run: Run) -> bool:
    return run.status.finished or run.status is Status.SET_ASIDE


def hold(seconds: float, seed: int) -> Report:
    """Let everything befall a fleet for so long."""
    with tempfile.TemporaryDirectory(prefix="keepstep-fleet-") as folder:
        fleet = Fleet(Path(folder), seed)
        try:
            often = [fleet.stall, fleet.slow, fleet.cut, fleet.reset, fleet.end_sessions, fleet.pause, fleet.kill]
            rare = [fleet.restart, fleet.outage, fleet.step_clock]
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                asyncio.run(fleet.start(6, seconds=4.0))
                for _ in range(4):
                    time.sleep(fleet.chance.uniform(0.1, 1.0))
                    fleet.chance.choice(often)()
                if fleet.chance.random() < 0.5:
                    fleet.chance.choice(rare)()
            return fleet.judge(asyncio.run(fleet.drain()))
        finally:
            fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--worker", metavar="URL", help="be one of the workers")
    options = parser.parse_args()
    if options.worker:
        asyncio.run(work(options.worker))
        return
    print(f"seed {options.seed}", flush=True)
    report = hold(options.seconds, options.seed)
    print(report, flush=True)
    sys.exit(not report.good)


if __name__ == "__main__":
    main()
