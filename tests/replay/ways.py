"""Runs a random program in many ways (live, replayed after every record, parked, killed) and judges what it saw.

python -m tests.replay.ways --seconds 600 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from random import Random
from unittest import mock

import keepstep as ks
from keepstep.engine.engine import Engine
from keepstep.history.dry_replay import TURN_SECONDS, Recorded, replayed_here
from keepstep.history.virtual_time import VirtualClock, VirtualLoop
from keepstep.kernel import parking
from keepstep.model import Kind, RunQuery
from keepstep.ports import SystemClock
from keepstep.records.record import origin, unseal
from keepstep.stores.memory import MemoryStore
from keepstep.testing.faults import crash
from keepstep.testing.virtual import at_work
from tests.replay import random_programs
from tests.replay.random_programs import SEEN, WORDS, Maker, Seen, signals_of, smaller

#: A run that has not ended by then, in the time of its loop, never will.
PATIENCE_SECONDS = 300.0
#: A smaller form of a failing program is looked for in so many runs of it.
TRIES = 300

WORKFLOWS = {
    "every_step": random_programs.program,
    "every=3": random_programs.buffered,
    "at_exit": random_programs.late,
}


class Broken(Exception):
    """A promise that a program has shown to be broken."""


def loops():
    """The kinds of loops that there are here."""
    kinds = ["plain"]
    if sys.version_info >= (3, 12):
        kinds.append("eager")
    if find_spec("uvloop") is not None:
        kinds.append("uvloop")
    return kinds


class TickingClock(VirtualClock):
    """Virtual time that no two readings share, so that a time taken from another record is seen."""

    ticks = 0

    def now(self):
        self.ticks += 1
        return super().now() + self.ticks * 1e-6


class Loop:
    """An event loop of one kind for each way: plain, eager or uvloop. All but uvloop are in virtual time."""

    def __init__(self, kind="plain"):
        self.kind = kind
        self.virtual = kind != "uvloop"

    def run(self, coroutine):
        with asyncio.Runner(loop_factory=self._make) as runner:
            return runner.run(coroutine)

    def _make(self):
        if self.kind == "uvloop":
            import uvloop

            return uvloop.new_event_loop()
        loop = VirtualLoop()
        if self.kind == "eager":
            loop.set_task_factory(asyncio.eager_task_factory)
        return loop

    def clock(self):
        return TickingClock() if self.virtual else SystemClock()

    def watch(self, engine):
        if self.virtual:
            asyncio.get_running_loop().wait_while(lambda: not engine.closed and at_work(engine))


class Trial:
    """One program, run in many ways on loops of one kind."""

    def __init__(self, program, seed, loop, durability="every_step"):
        self.program, self.seed, self.loop = program, seed, loop
        self.workflow = WORKFLOWS[durability]
        self.loses = durability != "every_step"  # what the code was told last may be lost in a crash
        self.counts = Counter()
        self.draw = Random(f"{seed} ways")

    def run(self):
        """Run it in every way; raises `Broken`."""
        for way in (self.live, self.replayed_after_every_record, self.parked, self.killed):
            self.judged(way)
        self.counts["programs"] += 1

    def judged(self, way):
        seen = SEEN[0] = Seen()
        try:
            store, kills = self.loop.run(way())
        except Broken as broken:
            raise Broken(f"{way.__name__}: {broken}") from None
        try:
            if not kills:
                twice = [place for place, count in seen.begun.items() if count > 1]
                check(not twice, f"bodies ran twice: {twice}")
            check(not seen.wrong, "; ".join(seen.wrong))
            self.judge(store, seen, kills)
        except Broken as broken:
            raise Broken(f"{way.__name__}: {broken}") from None

    def judge(self, store, seen, kills):
        for listed in store.list_runs(RunQuery(limit=100)).runs:
            run = store.get_run(listed.id)  # a list has no inputs
            final = seen.logs[run.id][-1] if seen.logs[run.id] else []
            for log in seen.logs[run.id] if not (kills and self.loses) else ():
                check(log == final[: len(log)], f"{run.id} saw {difference(log, final)}")
            self.counts["incarnations"] += len(seen.logs[run.id])
            rows = store.list_checkpoints(run.id)
            records = [record for record, _ in unseal(rows, run.id, previous=origin(run))]
            done = Counter(one.step for one in records if one.kind == Kind.STEP_COMPLETED)
            check(not done or max(done.values()) == 1, f"{run.id}: a step was completed twice")
            if run.status.finished:  # a child that nobody waits for may outlive its parent
                self.replay(run, rows, seen, final)

    def replay(self, run, rows, seen, final):
        """Replay the whole history, and some of its beginnings."""
        lengths = {len(rows)}
        if self.loop.virtual:
            lengths |= {self.draw.randint(1, len(rows)) for _ in range(4)}
        for length in sorted(lengths):
            self.counts["replays"] += 1
            workflow = self.workflow if run.workflow == self.workflow.name else random_programs.child
            history = Recorded(replace(run, seq=length), tuple(rows[:length]))
            turn_seconds = TURN_SECONDS if self.loop.virtual else 0.02
            told = self.loop.run(replayed_here(workflow, history, turn_seconds))
            check(told.fits, f"a replay of {length} of {len(rows)} records of {run.id}: {told.problem}")
            log = seen.logs[run.id][-1]
            wanted = final if length == len(rows) else final[: len(log)]
            check(log == wanted, f"a replay of {length} of {len(rows)} records saw {difference(log, final)}")

    # -- the ways

    async def live(self):
        return await self.undisturbed(linger_seconds=PATIENCE_SECONDS), 0

    async def replayed_after_every_record(self):
        return await self.undisturbed(linger_seconds=PATIENCE_SECONDS, replay_always=True), 0

    async def parked(self):
        with mock.patch.object(parking, "SHORT_WAIT_SECONDS", -1.0):
            return await self.undisturbed(linger_seconds=0.0), 0

    async def killed(self):
        """Let it die before or after a few of its writes."""
        disk = crash.MemoryDisk(self.loop.clock())
        points = [
            crash.CrashPoint(self.draw.randint(2, 12), self.draw.choice(("before", "after")))
            for _ in range(self.draw.randint(1, 4))
        ]
        options = {"clock": disk.store.clock, "recovery_limit": 1000, "linger_seconds": self.draw.choice((0.0, 60.0))}
        options["life_seconds"] = PATIENCE_SECONDS

        async def judge(_, lives):
            self.counts["kills"] += lives.crashes

        try:
            await crash.crash_at(disk, self.play, judge, points, recorder=SEEN[0], **options)
        except AssertionError as error:
            raise Broken(str(error)) from None
        return disk.store, len(points)

    async def undisturbed(self, **options):
        store = MemoryStore(clock=self.loop.clock())
        async with Engine(store, clock=store.clock, **options) as engine:
            await self.play(engine)
        return store

    async def play(self, engine):
        """Start the program, send it what it waits for, and await its end."""
        self.loop.watch(engine)
        handle = await engine.start(self.workflow, self.program, run_id="r")
        sending = asyncio.ensure_future(self.send(handle))
        try:
            return await handle.result(PATIENCE_SECONDS)
        except (ks.RunError, ks.TimedOut) as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        finally:
            sending.cancel()

    async def send(self, handle):
        began = 0.0
        for name, payload, moment in sorted(signals_of(self.program), key=lambda one: one[2]):
            await asyncio.sleep(moment - began)
            began = moment
            with contextlib.suppress(ks.AlreadyFinished):
                await handle.signal(name, payload, id=name)


def check(holds, problem):
    if not holds:
        raise Broken(problem)


def difference(log, final):
    """Where two orders part."""
    for index, (one, other) in enumerate(zip(log, final, strict=False)):
        if one != other:
            return f"{one!r} where another incarnation saw {other!r}, after {log[:index][-3:]}"
    return f"{len(log)} things where the last incarnation saw {len(final)}: {log[len(final) :] or final[len(log) :]}"


# -- trying many -------------------------------------------------------------------------------------------------------


@contextmanager
def quietly():
    """Do not log what is expected: runs set aside, and failures that a program does not look at."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def problem_of(program, seed, loop, durability, counts=None):
    """What is wrong with a program, or nothing."""
    trial = Trial(program, seed, loop, durability)
    try:
        with quietly():
            trial.run()
    except Broken as broken:
        return str(broken)
    finally:
        if counts is not None:
            counts.update(trial.counts)
    return ""


def shrunk(program, seed, loop, durability, problem):
    """The smallest program found that fails in the same way."""
    way = problem.partition(":")[0]
    tries, improved = TRIES, True
    while improved and tries > 0:
        improved = False
        for candidate in smaller(program):
            tries -= 1
            found = problem_of(candidate, seed, loop, durability)
            if found.partition(":")[0] == way:
                program, problem, improved = candidate, found, True
                break
            if tries <= 0:
                break
    return program, problem


def try_seed(seed, loop, without=(), durability="every_step", counts=None, *, shrink=True):
    """A report of the program of this seed if it breaks a promise, else nothing."""
    program = Maker(seed, without).program()
    problem = problem_of(program, seed, loop, durability, counts)
    if not problem:
        return ""
    if shrink:
        program, problem = shrunk(program, seed, loop, durability, problem)
    how = f"--only {seed} --loop {loop.kind} --durability {durability}"
    return f"python -m tests.replay.ways {how} --program '{json.dumps(program)}'\n  {problem}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first program [the time]")
    parser.add_argument("--only", type=int, help="only the program of this seed")
    parser.add_argument("--program", help="this program instead, as a report prints it")
    parser.add_argument("--loop", choices=loops(), action="append", help="only on these loops [all that are here]")
    parser.add_argument("--durability", choices=WORKFLOWS, action="append", help="only with these [all in turn]")
    parser.add_argument("--without", choices=WORDS, action="append", default=[], help="switch a word off")
    parser.add_argument("--most", type=int, default=5, help="stop after so many failures")
    options = parser.parse_args()
    counts, failures = Counter(), 0
    began, seed = time.monotonic(), options.seed if options.only is None else options.only
    kinds, durabilities = options.loop or loops(), options.durability or list(WORKFLOWS)
    while failures < options.most:
        loop, durability = Loop(kinds[seed % len(kinds)]), durabilities[seed // len(kinds) % len(durabilities)]
        if options.program:
            report = problem_of(json.loads(options.program), seed, loop, durability, counts)
        else:
            report = try_seed(seed, loop, options.without, durability, counts)
        if report:
            failures += 1
            print(report, flush=True)
        seed += 1
        if options.only is not None or time.monotonic() - began > options.seconds:
            break
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    verdict = "BAD" if failures else "good"
    print(f"{verdict} after {time.monotonic() - began:.0f} s, first seed {options.seed}: {failures} failures; {told}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
