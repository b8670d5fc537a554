"""An async generator that is open when its run is put away does nothing outside the run, whatever its clean-up asks."""

import asyncio
import gc
import sys

import pytest

import keepstep as ks
from tests.engine.world import until_at_last_wait, until_status

pytestmark = pytest.mark.every_loop


@pytest.fixture
def undo(effects):
    @ks.step
    async def undo(name):
        effects.append(name)

    return undo


def numbers_for(undo, cleaned):
    async def numbers(name):
        try:
            for number in range(5):
                yield number
        finally:
            cleaned.append(name)
            await undo(name)

    return numbers


async def put_away(run):
    """Wait until the run is parked, and nothing of its code is left in memory."""
    await until_status(run, "waiting")
    gc.collect()
    for _ in range(20):
        await asyncio.sleep(0)


async def test_step_in_the_clean_up_of_a_generator_is_performed_once(world, effects, undo):
    cleaned = []
    numbers = numbers_for(undo, cleaned)

    @ks.workflow
    async def reading():
        found = numbers("a")
        first = await anext(found)
        await ks.wait_for("go")
        second = await anext(found)
        await found.aclose()
        return first, second

    async with world.engine() as engine:
        run = await engine.start(reading, run_id="r")
        await put_away(run)
        assert effects == []
        assert cleaned  # plain code in `finally` runs on every park
        await run.signal("go")
        assert await run.result(30) == (0, 1)
    assert effects == ["a"]


async def test_generators_of_branches_and_in_cycles_do_nothing_at_a_park(world, effects, undo):
    cleaned = []
    numbers = numbers_for(undo, cleaned)

    @ks.workflow
    async def reading():
        async def branch(name):
            found = numbers(name)
            holder = [found]
            holder.append(holder)  # only a collection frees it
            await anext(found)
            await ks.wait_for(name)
            await found.aclose()
            return name

        return await ks.gather(branch("a"), branch("b"))

    async with world.engine() as engine:
        run = await engine.start(reading, run_id="r")
        await put_away(run)
        assert effects == []
        await run.signal("a")
        await run.signal("b")
        assert await run.result(30) == ["a", "b"]
    assert sorted(effects) == ["a", "b"]


async def test_open_generator_of_a_failed_run_does_nothing_outside_it(world, effects, undo):
    cleaned = []
    numbers = numbers_for(undo, cleaned)

    @ks.workflow
    async def failing():
        found = numbers("a")
        await anext(found)
        raise ValueError("own")

    async with world.engine() as engine:
        run = await engine.start(failing, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        gc.collect()
        for _ in range(20):
            await asyncio.sleep(0)
    assert cleaned
    assert effects == []


async def test_generator_that_is_open_when_the_engine_closes_does_nothing(world, effects, undo):
    cleaned = []
    numbers = numbers_for(undo, cleaned)

    @ks.workflow
    async def reading():
        found = numbers("a")
        await anext(found)
        await ks.wait_for("go")
        await found.aclose()

    async with world.engine(linger_seconds=60) as engine:
        await engine.start(reading, run_id="r")
        await until_at_last_wait(engine, "r")
    gc.collect()
    await asyncio.get_running_loop().shutdown_asyncgens()
    assert cleaned
    assert effects == []


@pytest.fixture
def ignored(monkeypatch):
    """Exceptions that Python would print as ignored."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: found.append(repr(event.exc_value)))
    return found


def plain_numbers_for(effects):
    @ks.step
    def undo(name):
        effects.append(name)

    def numbers():
        try:
            yield from range(5)
        finally:
            undo("plain").result()

    return numbers


async def test_generator_of_a_plain_workflow_does_nothing_at_a_park(world, effects, ignored):
    numbers = plain_numbers_for(effects)

    @ks.workflow
    def reading():
        found = numbers()
        first = next(found)
        ks.wait_for("go").result()
        found.close()
        return first

    async with world.engine() as engine:
        run = await engine.start(reading, run_id="r")
        await put_away(run)
        await run.signal("go")
        assert await run.result(30) == 0
    assert effects == ["plain"]
    assert ignored == []


async def test_open_generator_of_a_failed_plain_run_is_closed_within_it(world, effects, ignored):
    numbers = plain_numbers_for(effects)

    @ks.workflow
    def failing():
        found = numbers()
        next(found)
        raise ValueError("own")

    async with world.engine() as engine:
        run = await engine.start(failing, run_id="r")
        with pytest.raises(ks.RunFailed, match="own"):
            await run.result(30)
        assert [one.step for one in await run.checkpoints() if one.step] == ["undo#1"]
    assert effects == ["plain"]
    assert ignored == []
