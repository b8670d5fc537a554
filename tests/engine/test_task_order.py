"""Tasks of a run have an order of their own: sets of them are gone through alike, live as on replay (K1, K4)."""

import asyncio

import pytest

import keepstep as ks
from tests.engine.lives import PollInterval, live_then_many_lives
from tests.engine.world import until, until_at_last_wait, until_status

pytestmark = pytest.mark.every_loop

#: Enough names that no two orders of their addresses agree by chance.
NAMES = ["flight", "hotel", "car", "train", "ferry", "taxi", "tram", "bus"]


@ks.step
async def reserve(name):
    return name


@ks.step
async def never_ends(name):
    await asyncio.Event().wait()


@ks.step
async def refuse():
    raise ks.Permanent("no seat")


@ks.step
async def note(what):
    return what


async def test_task_group_cancels_its_tasks_in_the_same_order_on_replay(world, effects):
    @ks.workflow
    async def saga():
        undone = []

        async def part(name):
            await reserve(name)
            try:
                await never_ends(name)
            except asyncio.CancelledError:
                undone.append(name)
                raise

        async def last():
            await ks.sleep(0.01)
            await refuse()

        try:
            async with asyncio.TaskGroup() as group:
                for name in NAMES:
                    group.create_task(part(name))
                group.create_task(last())
        except* ks.StepFailed:
            pass
        for name in undone:
            await note(name)
        await ks.wait_for("go")
        return undone

    undone = await live_then_many_lives(world, saga, PollInterval(), effects)
    assert sorted(undone) == sorted(NAMES)


async def test_done_tasks_of_a_wait_have_the_same_order_on_replay(world, effects):
    @ks.workflow
    async def waiting():
        done, _ = await asyncio.wait([asyncio.create_task(reserve(name)) for name in NAMES])
        got = [task.result() for task in done]
        await note(got)
        await ks.wait_for("go")
        return got

    got = await live_then_many_lives(world, waiting, PollInterval(), effects)
    assert sorted(got) == sorted(NAMES)


async def test_sets_of_calls_have_the_same_order_on_replay(world, effects):
    @ks.workflow
    async def calling():
        calls = [reserve(name) for name in NAMES]
        got = [await call for call in set(calls)]
        await note(got)
        parts = [ks.gather(reserve(name)) for name in NAMES]
        got += [(await future)[0] for future in asyncio.as_completed(parts)]
        await note(got)
        await ks.wait_for("go")
        return got

    got = await live_then_many_lives(world, calling, PollInterval(), effects)
    assert sorted(got) == sorted(2 * NAMES)


@pytest.mark.one_store
@pytest.mark.parametrize("depth", [3, 12])
async def test_deeply_nested_tasks_come_to_rest_before_the_next_outcome(world, effects, depth):
    async def gathered(level):
        return await reserve("a") if level == 0 else (await asyncio.gather(gathered(level - 1)))[0]

    async def grouped(level):
        if level == 0:
            return await reserve("b")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(grouped(level - 1))
        return task.result()

    def chained(level):
        return asyncio.ensure_future(reserve("c")) if level == 0 else asyncio.gather(chained(level - 1))

    @ks.workflow
    async def deep():
        got = [await gathered(depth), await grouped(depth), await asyncio.shield(chained(depth))]
        await note(got[:2])
        await ks.wait_for("go")
        return got[:2]

    assert await live_then_many_lives(world, deep, PollInterval(), effects, lives=2) == ["a", "b"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_plain_timer_keeps_a_run_in_memory(world):
    """Parked, the run would begin the timeout anew each time it is woken."""

    @ks.workflow
    async def limited():
        async with asyncio.timeout(3600):
            await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(limited, run_id="r")
        await until(lambda: engine.live["r"].lingered >= 0)
        await until_at_rest(engine, "r")
        assert await run.status() is ks.Status.RUNNING
        await run.signal("go")
        await run.result(30)


async def until_at_rest(engine, run_id):
    """Come back when the engine has seen the run at rest since it was asked."""
    context = engine.live[run_id]
    context.watch()
    await until(lambda: context not in engine.idle_watch._waiting)


async def test_run_that_waits_through_an_async_generator_is_parked(world):
    @ks.workflow
    async def streaming():
        items = asyncio.Queue()

        async def stream():
            while (item := await items.get()) is not None:
                yield item

        async def produce():
            await items.put(await ks.wait_for("item"))
            await items.put(None)

        async def consume():
            return [item async for item in stream()]

        return (await ks.gather(produce(), consume()))[1]

    async with world.engine() as engine:
        run = await engine.start(streaming, run_id="r")
        await until_status(run, "waiting")
        await run.signal("item", 7)
        assert await run.result(30) == [7]


async def test_branch_that_cancels_the_main_task_ends_the_run(world, effects):
    @ks.step
    async def clean():
        effects.append("clean")

    @ks.workflow
    async def watched():
        main = asyncio.current_task()

        async def watchdog():
            await ks.wait_for("stop")
            main.cancel()

        guard = asyncio.create_task(watchdog())
        try:
            await ks.sleep(hours=1)
        except asyncio.CancelledError:
            await clean()
            raise
        return guard

    async with world.engine() as engine:
        run = await engine.start(watched, run_id="r")
        await until_at_last_wait(engine, "r") if not world.replaying else None
        await run.signal("stop")
        with pytest.raises(ks.RunFailed, match="CancelledError"):
            await run.result(30)
    assert effects == ["clean"]


@pytest.mark.live_only
async def test_cancel_from_outside_does_not_end_a_run(world):
    @ks.workflow
    async def waiting():
        await asyncio.Event().wait()

    engine = await world.started()
    run = await engine.start(waiting, run_id="r")
    await until(lambda: engine.live["r"].main is not None)
    context = engine.live["r"]
    context.main.cancel()
    await until(lambda: context.stop.detached)
    assert not (await run.status()).finished
    await world.crash(engine)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_as_completed_refuses_bare_coroutines(world):
    """asyncio puts them into a set, and no one can give a coroutine a hash."""

    async def one(name):
        return await reserve(name)

    @ks.workflow
    async def bare():
        return [await future for future in asyncio.as_completed([one("a"), one("b")])]

    @ks.workflow
    async def tasks():
        made = [asyncio.create_task(one(name)) for name in "ab"]
        return sorted([await future for future in asyncio.as_completed(made)])

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match=r"use ks\.as_completed"):
            await (await engine.start(bare)).result(30)
        assert await (await engine.start(tasks)).result(30) == ["a", "b"]
