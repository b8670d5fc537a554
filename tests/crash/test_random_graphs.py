"""Any graph, killed at any write, ends as the unkilled one; and what it has recorded is what it gave."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from keepstep.engine.engine import Engine
from keepstep.kernel import replay
from keepstep.kernel.graph import position
from keepstep.model import Kind, Status
from keepstep.testing.faults.crash import CrashPoint, MemoryDisk, SQLiteDisk, crash_at, live

from .programs import FastClock
from .random_graphs import PROGRAMS, build

pytestmark = pytest.mark.crash

EXAMPLES = int(os.environ.get("KEEPSTEP_EXAMPLES", "25"))
#: The usual run draws the same graphs each time; one that is asked for a number of examples draws new ones.
SAME = "KEEPSTEP_EXAMPLES" not in os.environ
PHASES = [phase for phase in Phase if phase is not Phase.shrink or "KEEPSTEP_EXAMPLES" in os.environ]
#: The weaker ones may go another way the second time, where several things race.
DURABILITIES = ["every_step", "every_step", "every=3", "at_exit"]
OPTIONS = {"recovery_limit": 99}

kills = st.lists(st.tuples(st.integers(2, 60), st.sampled_from(["before", "after"])), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def many_states(monkeypatch):
    """Full states are written all the time, and looked for in small steps."""
    monkeypatch.setattr(position, "MOST_RECORDS", 5)
    monkeypatch.setattr(position, "ENOUGH_DELTAS", 2)
    monkeypatch.setattr(replay, "FIRST_SPAN", 2)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_graph_that_is_killed_at_any_write_ends_as_the_unkilled_one(store):
    @settings(max_examples=EXAMPLES, phases=PHASES, derandomize=SAME, suppress_health_check=list(HealthCheck))
    @given(program=PROGRAMS, points=kills, durability=st.sampled_from(DURABILITIES))
    def check(program, points, durability):
        asyncio.run(killed(program, points, store, durability))

    check()


async def killed(program, points, store, durability):
    made = build(program, durability=durability)
    undisturbed = MemoryDisk(FastClock())
    ended, expected, writes = await live(undisturbed, made.play, clock=undisturbed.store.clock, **OPTIONS)
    assert ended
    await judge(undisturbed, expected)
    again = build(program, durability=durability)
    clock = FastClock()
    with tempfile.TemporaryDirectory() as folder:
        disk = MemoryDisk(clock)
        if store == "sqlite":
            disk = SQLiteDisk(Path(folder) / "runs.db", clock, power_loss="may_lose_last")
        crashes = [CrashPoint(2 + number % len(writes), when) for number, when in points]

        async def same(disk, lives):
            assert lives.result == expected
            await judge(disk, expected)

        await crash_at(disk, again.play, same, crashes, clock=clock, **OPTIONS)
    assert durability != "every_step" or not again.strange, (
        f"a body was given another state when it ran again: {again.strange[0]}"
    )


async def judge(disk, expected):
    """The records say what the run gave, and nothing was done twice."""
    store = disk.open()
    try:
        async with Engine(store, worker=False) as engine:
            run = await engine.get("main")
            assert (await run.run()).status is Status.COMPLETED
            records = await run.checkpoints()
            assert dict(await run.state()) == expected
            done = [one.step for one in records if one.kind is Kind.STEP_COMPLETED]
            assert len(done) == len(set(done))
    finally:
        store.close()
