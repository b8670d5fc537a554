"""`replay_always` forgets a run after every record: its code is called again each time, and no body runs twice."""

from __future__ import annotations

import asyncio
import threading

import pytest

import keepstep as ks
from tests.engine.world import until

pytestmark = pytest.mark.live_only


async def forgetful(world, **options):
    return await world.started(replay_always=True, **options)


@ks.step
async def in_loop(number):
    return number


@ks.step
def in_thread(number):
    return number


@pytest.mark.parametrize("step", [in_loop, in_thread], ids=["async", "plain"])
async def test_code_is_replayed_after_every_outcome(world, step):
    calls = []

    @ks.workflow
    async def program():
        calls.append("called")
        return [await step(number) for number in range(6)]

    engine = await forgetful(world)
    run = await engine.start(program)
    assert await run.result(60) == [0, 1, 2, 3, 4, 5]
    assert len(calls) == 7
    await engine.close()


async def test_a_plain_workflow_is_replayed_after_every_outcome(world):
    calls = []

    @ks.workflow
    def program():
        calls.append("called")
        return [in_thread(number).result() for number in range(3)]

    engine = await forgetful(world)
    run = await engine.start(program)
    assert await run.result(60) == [0, 1, 2]
    assert len(calls) == 4
    await engine.close()


@pytest.mark.parametrize("step", [in_loop, in_thread], ids=["async", "plain"])
async def test_code_that_draws_its_own_numbers_is_set_aside(world, step):
    drawn = iter(range(100))

    @ks.workflow
    async def program():
        return await step(next(drawn)) + await step(1)

    engine = await forgetful(world)
    run = await engine.start(program)
    with pytest.raises(ks.RunSetAside, match="another input"):
        await run.result(60)
    await engine.close()


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_body_under_way_survives_the_replays_beside_it(world, effects, plain):
    go = threading.Event()

    @ks.step
    def slow_in_thread():
        effects.append("slow")
        go.wait(60)
        return "slow"

    @ks.step
    async def slow_in_loop():
        effects.append("slow")
        await until(go.is_set)
        return "slow"

    @ks.step
    async def last():
        go.set()

    calls = []

    @ks.workflow
    async def program():
        calls.append("called")

        async def beside():
            for number in range(4):
                await in_loop(number)
            await last()

        return await asyncio.gather(slow_in_thread() if plain else slow_in_loop(), beside())

    engine = await forgetful(world)
    run = await engine.start(program)
    assert await run.result(60) == ["slow", None]
    assert effects == ["slow"]
    assert len(calls) >= 6
    await engine.close()


async def test_a_body_that_a_replay_cancels_is_cancelled(world, effects):
    @ks.step
    async def slow():
        effects.append("slow")
        try:
            await asyncio.sleep(60)
        finally:
            effects.append("cancelled")

    @ks.step
    async def quick():
        await until(lambda: effects)
        return "quick"

    @ks.workflow
    async def program():
        return await ks.race(slow(), quick())

    engine = await forgetful(world)
    run = await engine.start(program)
    assert await run.result(60) == "quick"
    await until(lambda: effects == ["slow", "cancelled"])
    await engine.close()


async def test_values_a_body_emits_across_a_replay_are_kept(world):
    go = asyncio.Event()

    @ks.step
    async def talking():
        ks.spend(cost=1)
        ks.emit("before")
        await go.wait()
        ks.publish("said", "after")
        ks.spend(cost=2)
        return "talked"

    @ks.step
    async def last(number):
        go.set()
        return number

    @ks.workflow
    async def program():
        return await asyncio.gather(talking(), last(await in_loop(1)))

    engine = await forgetful(world)
    run = await engine.start(program)
    assert await run.result(60) == ["talked", 1]
    assert (await run.spent()).cost == 3
    assert await run.published() == {"said": "after"}
    assert [one.value for one in await run.checkpoints() if one.kind.value == "emitted"] == [b'["before"]']
    await engine.close()


async def test_an_attempt_that_failed_is_replayed_during_its_backoff(world, effects):
    calls = []

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0.05, jitter=0))
    async def flaky():
        effects.append("tried")
        if len(effects) < 2:
            raise ConnectionError
        return "worked"

    @ks.workflow
    async def program():
        calls.append("called")
        return await flaky()

    engine = await forgetful(world)
    run = await engine.start(program)
    assert await run.result(60) == "worked"
    assert effects == ["tried", "tried"]
    assert len(calls) == 3
    await engine.close()
