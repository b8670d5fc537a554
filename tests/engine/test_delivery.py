"""Every holder of a call is told of its end, in the recorded order, and in the one thread where calls have an order."""

import asyncio
import contextvars
import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import keepstep as ks
from tests.engine.lives import PollInterval, live_then_many_lives
from tests.engine.world import until_status


@ks.step
async def quick(value="quick"):
    return value


@ks.step
async def never_ends():
    await asyncio.Event().wait()


@ks.step
def add(a, b):
    return (a or 0) + b


# -- weaker durability -------------------------------------------------------------------------------------------------


@pytest.mark.live_only
@pytest.mark.parametrize("durability", ["every_step", "at_exit", "off", "every=3"])
async def test_outcomes_of_one_commit_are_delivered_before_what_they_cause(world, durability):
    """The signal is taken when the cancel is durable; the step that ended beside the cancel was recorded before it."""
    at_cancel = asyncio.Event()

    @ks.step
    async def ends_with_the_cancel():
        await at_cancel.wait()

    @ks.workflow(durability=durability)
    async def ordered():
        order = []

        async def left():
            await quick()
            at_cancel.set()
            loser.cancel()
            await ks.wait_for("early")
            order.append("signal")

        async def right():
            await ends_with_the_cancel()
            order.append("step")

        loser = asyncio.create_task(never_ends())
        await ks.gather(left(), right())
        await quick(list(order))
        await ks.wait_for("go")
        return order

    async with world.engine() as engine:
        run = await engine.start(ordered, run_id="r")
        await run.signal("early")
        await until_status(run, "waiting")
        recorded = [one.step.rpartition("/")[2] for one in await run.checkpoints()]
        in_order = sorted(["ends_with_the_cancel#1", "wait_for:early#1"], key=recorded.index)
        await run.signal("go")
        names = {"ends_with_the_cancel#1": "step", "wait_for:early#1": "signal"}
        assert await run.result(30) == [names[step] for step in in_order]


# -- one call, several holders -----------------------------------------------------------------------------------------


async def test_call_that_loses_a_race_is_cancelled_for_a_gather_too(world, effects):
    @ks.workflow
    async def shared():
        call = never_ends()

        async def racing():
            return await ks.race(call, ks.sleep(0.01))

        async def gathering():
            return await ks.gather(call, quick())

        ended = await ks.gather(racing(), gathering(), return_exceptions=True)
        await quick([type(one).__name__ for one in ended])
        await ks.wait_for("go")
        return [type(one).__name__ for one in ended]

    assert await live_then_many_lives(world, shared, PollInterval(), effects, lives=2) == ["NoneType", "CancelledError"]


async def test_call_that_loses_a_race_is_cancelled_for_a_waiting_thread_too(world):
    @ks.workflow
    def shared():
        call = never_ends()
        race = ks.race(call, ks.sleep(0.01)).start()
        try:
            call.result()
        except asyncio.CancelledError:
            return ["cancelled", race.result()]

    async with world.engine() as engine:
        assert await (await engine.start(shared)).result(30) == ["cancelled", None]


async def test_withdrawn_parts_are_no_failures_of_a_map(world):
    @ks.step
    async def maybe(name):
        await (asyncio.sleep(0) if name == "a" else asyncio.Event().wait())
        return name

    @ks.workflow
    async def first():
        got = await ks.map(maybe, ["a", "b", "c"], wait=ks.Any(), collect=True)
        return list(got), list(got.failures)

    async with world.engine() as engine:
        assert await (await engine.start(first)).result(30) == (["a", None, None], [])


@pytest.mark.parametrize("together", [True, False])
async def test_composite_awaited_twice_gives_the_same_outcome(world, effects, together):
    @ks.workflow
    async def twice():
        both = ks.gather(quick(1), quick(2))

        async def awaiting():
            return await both

        got = await asyncio.gather(awaiting(), awaiting()) if together else [await both, await both]
        await quick(got)
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, twice, PollInterval(), effects, lives=2) == [[1, 2], [1, 2]]


# -- threads -----------------------------------------------------------------------------------------------------------


async def test_started_composite_numbers_its_calls_separately(world, effects):
    @ks.workflow
    def beside():
        async def doubled(number):
            return await add(number, number)

        chain = ks.chain(add, [1, 2, 3]).start()
        gather = ks.gather(doubled(1), doubled(2)).start()
        mapped = ks.map(doubled, [5, 6]).start()
        own = [add(10, 20).result(), add(11, 20).result()]
        got = [chain.result(), own, gather.result(), mapped.result()]
        add(0, got[0]).result()
        ks.wait_for("go").result()
        return got

    async with world.engine() as engine:
        run = await engine.start(beside, run_id="r")
        await until_status(run, "waiting") if not world.replaying else None
        await run.signal("go")
        assert await run.result(30) == [6, [30, 31], [2, 4], [10, 12]]
        steps = {one.step for one in await run.checkpoints() if one.step.partition("#")[0].endswith("add")}
    own = {"add#1", "add#2", "add#3"}
    assert own < steps
    assert {"1/add#1", "1/add#2", "1/add#3", "2/1/add#1", "2/2/add#1"} < steps
    assert len(steps) == 3 + 3 + 2 + 2


async def test_started_composite_can_be_awaited(world):
    @ks.workflow
    async def starting():
        both = ks.gather(quick(1), quick(2)).start()
        own = await quick(3)
        return [await both, own]

    async with world.engine() as engine:
        assert await (await engine.start(starting)).result(30) == [[1, 2], 3]


async def test_result_in_a_thread_of_an_async_workflow_is_refused(world):
    @ks.workflow
    async def threaded():
        return await asyncio.to_thread(lambda: quick().result())

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="a thread that is not the workflow's own"):
            await (await engine.start(threaded)).result(30)


@pytest.mark.parametrize("verb", ["result", "start"])
async def test_thread_pool_of_a_def_workflow_cannot_ask(world, verb):
    @ks.workflow
    def pooled(composite):
        def ask():
            return getattr(ks.gather(quick()) if composite else quick(), verb)()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(contextvars.copy_context().run, ask).result()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with world.engine() as engine:
            for composite in (False, True):
                with pytest.raises(ks.RunFailed, match="a thread that is not the workflow's own"):
                    await (await engine.start(pooled, composite)).result(30)
        gc.collect()
    assert [str(one.message) for one in warned if "never awaited" in str(one.message)] == []


async def test_call_awaited_in_another_loop_is_refused(world):
    @ks.workflow
    async def elsewhere():
        async def ask():
            return await quick()

        return await asyncio.to_thread(lambda: asyncio.run(ask()))

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="another event loop"):
            await (await engine.start(elsewhere)).result(30)


@pytest.mark.live_only
async def test_callback_from_a_thread_amid_a_commit_comes_before_the_outcome(world, effects):
    """The code is not at rest while a callback of its own is ready."""
    scheduled = []

    @ks.step
    async def slow():
        await asyncio.sleep(0.02)  # so that nothing else is ready when it ends

    @ks.workflow
    async def called_back():
        loop, began = asyncio.get_running_loop(), ks.now()
        scheduled.append(lambda: loop.call_soon_threadsafe(lambda: effects.append(ks.now() == began), context=context))
        context = contextvars.copy_context()
        await slow()
        return ks.now() > began

    async with world.engine() as engine:
        commit = engine.store.commit
        run = await engine.start(called_back)

        def amid_commit(*args, **options):
            answers = commit(*args, **options)
            if scheduled:
                thread = threading.Thread(target=scheduled.pop())
                thread.start()
                thread.join()
            return answers

        engine.store.commit = amid_commit
        assert await run.result(30)
    assert effects == [True]
