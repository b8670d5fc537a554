"""A run that only waits is put away, however its code waits."""

import asyncio

import pytest

import keepstep as ks
from tests.engine.world import until, until_status

pytestmark = pytest.mark.on_postgres


@ks.step
async def quick(number: int) -> int:
    return number


async def sleeps() -> str:
    await ks.sleep(0.05)
    return "slept"


async def hears() -> str:
    return await ks.wait_for("word")


async def in_gather():
    return await ks.gather(sleeps(), hears())


async def idles() -> str:
    await asyncio.sleep(0.6)  # by itself, and for longer than the run lingers
    return "idled"


async def beside_one_that_idles():
    return await ks.gather(idles(), hears())


async def in_task_group():
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part()) for part in (sleeps, hears)]
    return [task.result() for task in tasks]


async def as_they_come():
    return [one async for one in ks.as_completed([quick(1), hears()])]


@pytest.mark.parametrize("wait", [in_gather, in_task_group, as_they_come, beside_one_that_idles])
async def test_a_run_whose_last_open_branch_waits_is_put_away(world, wait):
    @ks.workflow(name=f"parking:{wait.__name__}")
    async def waits():
        return await wait()

    async with world.engine() as engine:
        run = await engine.start(waits, run_id="r")
        await until_status(run, "waiting")
        await run.signal("word", "come")
        assert "come" in await run.result(30)


@pytest.mark.parametrize("wait", [in_gather, as_they_come])
async def test_a_run_whose_last_open_branch_waits_can_be_paused(world, wait):
    @ks.workflow(name=f"pausing:{wait.__name__}")
    async def waits():
        return await wait()

    async with world.engine(linger_seconds=60.0) as engine:
        run = await engine.start(waits, run_id="r")
        await run.pause()
        await until_status(run, "paused")
        await run.resume()
        await run.signal("word", "come")
        assert "come" in await run.result(30)


@pytest.mark.live_only
@pytest.mark.one_store
async def test_a_suspect_whose_sleep_is_over_goes_on(world):
    begun = []

    @ks.workflow
    async def sleeper():
        begun.append(asyncio.get_running_loop().time())
        await ks.sleep(0.2)
        return "awake"

    engine = await world.started(recovery_limit=9)
    await engine.start(sleeper, run_id="r")
    for life in range(1, 4):
        await until(lambda life=life: len(begun) >= life, "the next life")
        await world.crash(engine)
        if life == 3:
            await until(lambda: asyncio.get_running_loop().time() > begun[-1] + 0.2, "the end of the sleep")
        engine = await world.started(recovery_limit=9)
    assert await (await engine.get("r")).result(5) == "awake"
    await engine.close()
