"""A wall clock that is set back or ahead: what waits in memory waits as long as it should, by the clock no one sets."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import keepstep as ks
from keepstep.ports import SystemClock
from tests.engine.world import until


class SetClock(SystemClock):
    """The clock of a world, and how far someone has set it off."""

    def __init__(self, world):
        super().__init__()
        self.offset = 0.0
        world._memory.clock = self

    def now(self):
        return super().now() + self.offset


HOURS = [-7200.0, 7200.0]


@pytest.mark.live_only
@pytest.mark.parametrize("offset", HOURS)
async def test_wait_in_memory_ends_in_time_though_the_clock_is_set(world, offset):
    clock = SetClock(world)

    @ks.workflow
    async def naps():
        await ks.sleep(0.3)
        with pytest.raises(ks.TimedOut):
            await ks.wait_for("nothing", timeout=0.3)
        with pytest.raises(ks.TimedOut):
            async with ks.timeout(0.3):
                await ks.wait_for("nothing")
        return "awake"

    async with world.engine(clock=clock) as engine:
        run = await engine.start(naps)
        for number in range(3):
            await until(lambda: engine.live[run.id].waits)
            clock.offset += offset
            if number < 2:
                await until(lambda number=number: engine.live[run.id].steps > number)
        assert await run.result(timeout=60) == "awake"


@pytest.mark.parametrize("offset", HOURS)
async def test_wait_that_begins_after_the_clock_was_set_takes_its_time(world, offset):
    clock = SetClock(world)

    @ks.step
    async def jump():
        clock.offset += offset

    @ks.workflow
    async def naps():
        await jump()
        before = ks.now()
        await ks.sleep(0.2)
        return ks.now() - before

    async with world.engine(clock=clock) as engine:
        run = await engine.start(naps)
        assert await run.result(timeout=60) >= timedelta(seconds=0.2)


@pytest.mark.live_only
async def test_a_backoff_ends_in_time_though_the_clock_is_set_back(world):
    clock, tries, failed = SetClock(world), [], asyncio.Event()

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0.3, jitter=0.0))
    async def shaky():
        tries.append(1)
        if len(tries) == 1:
            failed.set()
            raise ConnectionError("once")
        return len(tries)

    @ks.workflow
    async def tried():
        return await shaky()

    async with world.engine(clock=clock) as engine:
        run = await engine.start(tried)
        await failed.wait()
        await until(lambda: engine.live[run.id].waits)
        clock.offset -= 7200.0
        assert await run.result(timeout=60) == 2


@pytest.mark.live_only
async def test_a_clock_set_back_for_a_moment_leaves_no_run_behind(world):
    """Else the wait is set anew for as long as the clock is off, and goes on when the clock is right again."""
    clock = SetClock(world)

    @ks.workflow
    async def naps():
        await ks.sleep(1.0)
        return "awake"

    async with world.engine(clock=clock) as engine:
        run = await engine.start(naps)
        await until(lambda: engine.live[run.id].waits)
        clock.offset = -7200.0
        await asyncio.sleep(1.2)
        clock.offset = 0.0
        assert await run.result(timeout=60) == "awake"
