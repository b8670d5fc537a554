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
async def test_run_whose_last_open_branch_waits_is_parked(world, wait):
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
    assert await (await engine.get("r")).result(60) == "awake"
    await engine.close()


async def test_waiting_run_gives_its_place_in_a_full_worker_to_its_child(world):
    @ks.workflow(name="child in turn")
    async def child():
        return "done"

    @ks.workflow
    async def parent():
        return await (await ks.start(child)).result()

    async with world.engine(max_runs=1, linger_seconds=60) as engine:
        assert await (await engine.start(parent)).result(60) == "done"


async def test_plain_timer_is_seen_after_asyncio_has_tidied_its_timers(world):
    """asyncio replaces its list of timers when most of them are cancelled."""

    @ks.workflow
    async def limited():
        loop = asyncio.get_running_loop()
        before = loop._scheduled
        for _ in range(300):
            loop.call_later(60, print).cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert loop._scheduled is not before
        try:
            async with asyncio.timeout(0.3):
                await ks.wait_for("never")
        except TimeoutError:
            return "in time"

    async with world.engine(linger_seconds=0.01) as engine:
        if not hasattr(asyncio.get_running_loop(), "_scheduled"):
            pytest.skip("this loop does not show its timers")
        assert await (await engine.start(limited)).result(10) == "in time"
