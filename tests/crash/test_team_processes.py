"""Hosts of agents and givers of tasks, killed and stopped at random: each task is performed to its end once (F7).

A common file is the judge. Every task appends a line when an agent begins it and when that agent has done it, and every
host appends its agents' changes of health. One write each, so that a kill leaves a line whole or away.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.model import RunQuery, Status
from tests.nightly import case, cases
from tests.postgres import empty_store

ROOT = Path(__file__).parents[2]
AGENTS = ("ann", "bob", "cleo", "dan")
#: The agent that does not work for a while.
FRAGILE = "dan"
#: Seconds after a change of health in which a task may begin that its host had claimed before.
CLAIMED_BEFORE = 0.5

PROGRAM = """
import asyncio, os, random, sys, time
from pathlib import Path
import keepstep as ks

place, url, role = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def note(*words):
    line = " ".join(map(str, (f"{time.monotonic():.6f}", os.getpid(), *words))) + "\\n"
    out = os.open(place / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(out, line.encode())
    os.close(out)

def works():
    return role != "dan" or not (place / "broken").exists()

@ks.step
async def half(task):
    await asyncio.sleep(random.uniform(0.1, 0.4))
    return task

async def perform(task):
    note("begin", role, task)
    if not works():
        raise OSError("broken")
    await half(await half(task))
    mark = f"{role}-{os.getpid()}-{time.monotonic()}"
    note("end", role, task, mark)
    return mark

@ks.workflow
async def job(task):
    return await ks.perform("work", task, wait=True)

def health(event):
    if event.name == "agent.health":
        note("health", event.agent, event.data["health"])

async def main():
    options = {"lease_seconds": 3.0, "recovery_limit": 1000, "linger_seconds": 0.3}
    if role == "giver":
        options["workflows"] = [job]
    else:
        agent = ks.Agent(role, perform=perform, capabilities=["work"], max_tasks=2, probe=works, probe_every=0.3)
        options |= {"workflows": [], "agents": [agent], "observers": [health]}
    async with ks.open(url, **options) as engine:
        if sys.argv[4:]:
            for n in range(int(sys.argv[4])):
                await engine.start(job, n, run_id=f"job-{n}")
            return
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", cases(["sqlite", "postgres"], quick=["sqlite"]))
@pytest.mark.parametrize("tasks, seconds", [case(40, 90, nightly=False), case(1000, 900, nightly=True)])
def test_each_task_is_performed_once_whoever_is_killed(kind, tasks, seconds, tmp_path):
    if kind == "sqlite":
        team = _Team(f"{tmp_path}/runs.db", tasks, tmp_path)
        team.drive(seconds)
        team.judge()
    else:
        with empty_store("teams") as url:
            team = _Team(url, tasks, tmp_path)
            team.drive(seconds)
            team.judge()


class _Team:
    """Hosts and givers of tasks, and what an outside observer has seen of them."""

    def __init__(self, url, tasks, place):
        self.url, self.tasks, self.place = url, tasks, place
        self.interrupted = set()  # processes that were killed, or stopped and went on
        self.processes = {}
        self.was_unhealthy = False
        self.away = {}  # how many blows must have fallen before a killed process is started again

    def started(self, role, *words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-c", PROGRAM, str(self.place), self.url, role, *words]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def drive(self, seconds):
        """Kill a host every moment, now and then a giver of tasks, and let one agent fail for a while."""
        chance = random.Random(self.tasks)
        roles = [*AGENTS, "giver one", "giver two"]
        self.processes = {role: self.started(role.partition(" ")[0]) for role in roles}
        try:
            assert self.started("giver", str(self.tasks)).wait(60) == 0
            until, blows, least = time.monotonic() + seconds, 0, max(12, self.tasks // 25)
            while time.monotonic() < until and (blows < least or not self.was_unhealthy or self.open_jobs()):
                time.sleep(chance.uniform(0.2, 0.6))
                self._let_it_fail(blows)
                for role, process in self.processes.items():
                    if self.away.get(role, 0) <= blows or blows >= 2 * least:
                        process.send_signal(signal.SIGCONT)
                    # also one that was refused, because the host before it still seemed alive
                    if process.poll() is not None and (self.away.get(role, 0) <= blows or blows >= 2 * least):
                        self.processes[role] = self.started(role.partition(" ")[0])
                if blows < 2 * least:
                    blows += 1
                    role = chance.choice([*(AGENTS if self.was_unhealthy else AGENTS[:-1]), "giver one"])
                    self.away[role] = blows + chance.choice([0, 10])  # it comes back at once, or is missed
                    if chance.random() < 0.2:
                        self._stop(role)
                    else:
                        self._kill(role)
            assert self.open_jobs() == 0, "not every task was performed"
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()

    def _let_it_fail(self, blows):
        """Break one agent until it has become unhealthy. It is not killed meanwhile."""
        broken, log = self.place / "broken", self.place / "log"
        if blows == 1:
            broken.touch()
        elif broken.exists() and any(f" health {FRAGILE} {one}" in log.read_text() for one in ("unhealthy", "offline")):
            broken.unlink()
            self.was_unhealthy = True

    def _kill(self, role):
        victim = self.processes[role]
        self.interrupted.add(victim.pid)
        victim.send_signal(signal.SIGKILL)
        victim.wait()

    def _stop(self, role):
        """Stop a process, for longer than its lease or only for a moment. It goes on with whatever it did."""
        self.interrupted.add(self.processes[role].pid)
        self.processes[role].send_signal(signal.SIGSTOP)

    def open_jobs(self):
        return self._read(lambda runs: sum(run.status is not Status.COMPLETED for run in runs), workflow="job")

    def _read(self, question, **filters):
        async def look():
            async with ks.open(self.url, worker=False) as engine:
                found, after = [], None
                while True:
                    page = await engine.list(RunQuery(limit=1000, after=after, **filters))
                    found += page.runs
                    after = page.next
                    if after is None:
                        return question(found)

        return asyncio.run(look())

    def judge(self):
        lines = [line.split() for line in (self.place / "log").read_text().splitlines()]
        ends = defaultdict(list)
        for _, pid, what, *words in lines:
            if what == "end":
                ends[int(words[1])].append((int(pid), words[2]))
        results = self._results()
        assert sorted(results) == list(range(self.tasks))
        for task, mark in results.items():
            assert [one for _, one in ends[task]].count(mark) == 1, f"task {task} has the result of nobody"
            others = [pid for pid, one in ends[task] if one != mark]
            assert set(others) <= self.interrupted, f"task {task} was done by living hosts, too: {others}"
        runs = self._read(list)
        ended = Counter((run.parent, run.status.value) for run in runs if run.parent)
        assert [count for (_, status), count in ended.items() if status == "completed"] == [1] * self.tasks
        assert {status for _, status in ended} <= {"completed", "cancelled", "failed"}
        assert any(status == "cancelled" for _, status in ended), "no task was redistributed"
        self._judge_health(lines)

    def _results(self):
        async def look():
            async with ks.open(self.url, worker=False) as engine:
                return {n: await (await engine.get(f"job-{n}")).result(10) for n in range(self.tasks)}

        return asyncio.run(look())

    @staticmethod
    def _judge_health(lines):
        unwell = {}
        ever = False
        for at, pid, what, agent, word, *_ in lines:
            if what == "health":
                unwell[pid] = None if word in ("healthy", "degraded") else float(at)
                ever = ever or unwell[pid] is not None
            elif what == "begin" and unwell.get(pid) is not None:
                late = float(at) - unwell[pid]
                assert late < CLAIMED_BEFORE, f"{agent} began task {word} {late:.1f} s after it had become unhealthy"
        assert ever, f"{FRAGILE} has never become unhealthy"
