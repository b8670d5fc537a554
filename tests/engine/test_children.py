"""Child runs and successors: exactly one of each, whatever crashes (K26, K10)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.kernel.attempt import idempotency_key
from keepstep.ports import STARTER
from tests.engine.world import steps_of, until, until_at_last_wait, until_recorded, until_status

pytestmark = pytest.mark.on_postgres


@ks.workflow
async def double(number):
    await ks.sleep(0)
    return 2 * number


@ks.workflow
async def failing():
    raise ValueError("child failed")


@ks.workflow
async def waiting_child():
    return await ks.wait_for("go")


async def test_child_is_started_once(world):
    @ks.workflow
    async def parent():
        child = await ks.start(double, 21)
        ids = [child.id]
        await ks.wait_for("go")
        results = [await child, await child.result()]
        return [*results, *ids]

    engine = await world.started(linger_seconds=60)
    await engine.start(parent, run_id="r")
    await until_recorded(await engine.get("r"), "double#1")
    for _ in range(2):
        await until_at_last_wait(engine, "r")
        engine = await world.crash_and_recover(engine, linger_seconds=60)
    run = await engine.get("r")
    await run.signal("go")
    first, second, child_id = await run.result(30)
    assert first == second == 42
    children = (await engine.list(parent="r")).runs
    assert [child.id for child in children] == [child_id]
    await engine.close()


async def test_trace_reaches_children_successors_and_forks(world):
    @ks.workflow
    async def parent(again):
        await (await ks.start(double, 21))
        if again:
            ks.continue_as(False)

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with world.engine() as engine:
        token = STARTER.set(trace)
        run = await engine.start(parent, True, run_id="r")
        STARTER.reset(token)
        await run.result(30)
        await (await engine.fork("r", run_id="fork")).result(30)
        found = {one.id: one.traceparent for one in (await engine.list()).runs}
    assert len(found) > 4
    assert set(found.values()) == {trace}


async def test_children_of_one_workflow_are_separate_runs(world):
    @ks.workflow
    async def parent():
        children = await ks.gather(*(ks.start(double, number) for number in range(5)))
        return await ks.gather(*(child.result() for child in children))

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        assert await run.result(60) == [0, 2, 4, 6, 8]
        assert len((await engine.list(parent="r")).runs) == 5


async def test_parent_that_waits_for_its_child_is_parked(world):
    @ks.workflow
    async def parent():
        return await (await ks.start(waiting_child))

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        await until_status(run, "waiting")
        child = await engine.get((await engine.list(parent="r")).runs[0].id)
        await until_status(child, "waiting")
        await until(lambda: not engine.live)
        await child.signal("go", "word")
        assert await run.result(30) == "word"


async def test_child_of_a_cancelled_start_is_cancelled_with_its_parent(world):
    @ks.workflow
    async def parent():
        start = asyncio.ensure_future(ks.start(waiting_child))
        await asyncio.sleep(0)
        start.cancel()  # the child is being made already
        await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    await engine.start(parent, run_id="r")
    await until_recorded(await engine.get("r"), "waiting_child#1")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    [child] = (await engine.list(parent="r")).runs
    await (await engine.get("r")).cancel()
    await until_status(await engine.get("r"), "cancelled")
    await until_status(await engine.get(child.id), "cancelled")


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_child_that_does_not_complete_raises_in_its_parent(world, how):
    @ks.workflow
    async def parent():
        child = await ks.start(failing if how == "fails" else waiting_child)
        if how == "is cancelled":
            await child.cancel()
        try:
            await child
        except ks.StepFailed as error:
            await ks.sleep(0)
            return str(error)

    async with world.engine() as engine:
        message = await (await engine.start(parent)).result(30)
    assert ("failed: ValueError: child failed" if how == "fails" else "cancelled") in message


async def test_childs_result_outlives_the_child(world):
    @ks.workflow
    async def parent():
        child = await ks.start(double, 4)
        await ks.wait_for("go")
        return await child

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        await until_recorded(run, "double#1")
        child = (await engine.list(parent="r")).runs[0].id
        assert await (await engine.get(child)).result(30) == 8
        engine.store.delete_runs([child])
        await run.signal("go")
        assert await run.result(30) == 8


async def test_child_with_a_taken_id_is_refused(world):
    @ks.workflow
    async def parent(number):
        try:
            child = await ks.start(double, number, run_id="taken")
        except ks.StepFailed as error:
            return str(error)
        return await child

    async with world.engine() as engine:
        other = await engine.start(double, 1, run_id="taken")
        await other.result(30)
        run = await engine.start(parent, 2)
        assert "taken" in await run.result(30)


async def test_parent_signals_its_child(world):
    @ks.workflow
    async def parent():
        child = await ks.start(waiting_child)
        await child.signal("go", "from the parent")
        return await child

    async with world.engine() as engine:
        assert await (await engine.start(parent)).result(30) == "from the parent"


async def test_child_outlives_its_finished_parent(world):
    """Nobody waits for the word; the child ends all the same."""

    @ks.workflow
    async def parent():
        return (await ks.start(waiting_child)).id

    async with world.engine() as engine:
        child = await engine.get(await (await engine.start(parent)).result(30))
        await child.signal("go", 1)
        assert await child.result(30) == 1


async def test_parent_sees_the_end_of_a_quick_child(world):
    @ks.workflow
    async def parent(count):
        total = 0
        for number in range(count):
            total += await (await ks.start(double, number))
        return total

    async with world.engine() as engine:
        runs = [await engine.start(parent, 5) for _ in range(4)]
        assert [await run.result(60) for run in runs] == [20] * 4


async def test_wrong_arguments_start_no_child(world):
    @ks.workflow
    async def parent():
        await ks.start(double)

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        with pytest.raises(ks.RunFailed, match="cannot be started with this input"):
            await run.result(30)
        assert (await engine.list(parent="r")).runs == ()


# -- successors --------------------------------------------------------------------------------------------------------


@ks.workflow
async def counting(number, heard=()):
    word = await ks.wait_for("word", timeout=0, default=None) if number % 2 else await ks.wait_for("word")
    heard = [*heard, word]
    if number < 4:
        ks.continue_as(number + 1, heard=heard)
    return [number, heard]


async def test_unread_signals_pass_to_the_successor(world):
    async with world.engine(worker=False) as client:
        run = await client.start(counting, 1, run_id="r")
        for word in ("a", "b", "c", "d"):
            await run.signal("word", word)
        async with world.engine():
            assert await run.result(60) == [4, ["a", "b", "c", "d"]]
            first = await run.run()
            assert first.status is ks.Status.COMPLETED
            assert first.continued_as == "r~2"
            assert (await (await client.get("r~4")).run()).continued_as is None


async def test_seed_of_a_successor_follows_from_its_predecessor(world):
    """It follows from its predecessor's, so a series replays as a whole; but it is not the same."""

    @ks.workflow
    async def drawing(number, drawn=()):
        drawn = [*drawn, str(ks.uuid())]
        return drawn if number == 3 else ks.continue_as(number + 1, drawn)

    async with world.engine() as engine:
        run = await engine.start(drawing, 1, run_id="r")
        assert len(set(await run.result(60))) == 3
        seeds = [(await (await engine.get(name)).run()).seed for name in ("r", "r~2", "r~3")]
        chances = [seed.partition("@")[0] for seed in seeds]
        assert chances[1:] == [idempotency_key(seeds[0], "r~2", 0)[:16], idempotency_key(seeds[1], "r~3", 0)[:16]]


async def test_signal_to_the_first_of_a_series_reaches_the_newest(world):
    @ks.workflow
    async def chained(number):
        if number < 3:
            ks.continue_as(number + 1)
        return await ks.wait_for("word")

    async with world.engine() as engine:
        run = await engine.start(chained, 1, run_id="r")

        async def continued():
            return (await run.run()).continued_as

        await until(continued)
        await run.signal("word", "found you")
        assert await run.result(30) == "found you"


async def test_crash_makes_no_second_successor(world, effects):
    @ks.step
    async def work(number):
        effects.append(number)

    @ks.workflow
    async def chained(number):
        await work(number)
        await ks.wait_for("go")
        if number == 1:
            ks.continue_as(2)

    engine = await world.started(linger_seconds=60)
    run = await engine.start(chained, 1, run_id="r")
    await until_at_last_wait(engine, "r")
    await run.signal("go")
    await until(lambda: effects == [1, 2])
    await until_at_last_wait(engine, "r~2")
    engine = await world.crash_and_recover(engine)
    await (await engine.get("r~2")).signal("go")
    await (await engine.get("r")).result(30)
    assert effects == [1, 2]
    assert {run.id for run in (await engine.list()).runs} == {"r", "r~2"}
    await engine.close()


async def test_except_exception_does_not_catch_continue_as(world):
    @ks.workflow
    async def chained(number):
        if number == 1:
            try:
                ks.continue_as(2)
            except Exception:
                return "swallowed"
        return "second"

    async with world.engine() as engine:
        assert await (await engine.start(chained, 1)).result(30) == "second"


async def test_parent_gets_the_result_of_a_continued_child(world):
    @ks.workflow
    async def chained(number):
        if number < 3:
            ks.continue_as(number + 1)
        return number

    @ks.workflow
    async def parent():
        return await (await ks.start(chained, 1))

    async with world.engine() as engine:
        assert await (await engine.start(parent)).result(30) == 3


async def test_successor_runs_its_own_steps(world, effects):
    @ks.step
    async def work(number):
        effects.append(number)
        return number

    @ks.workflow
    async def chained(number):
        got = await work(number)
        await asyncio.sleep(0)
        if number == 1:
            ks.continue_as(2)
        return got

    async with world.engine() as engine:
        run = await engine.start(chained, 1, run_id="r")
        assert await run.result(30) == 2
        assert await steps_of(await engine.get("r~2")) == ["work#1"]
    assert effects == [1, 2]


async def test_end_of_a_child_does_not_reach_a_successors_child(world):
    @ks.workflow
    async def chained(number):
        child = await ks.start(double, number)
        if number == 1:
            await ks.wait_for("child has ended")
            ks.continue_as(50)
        return await child

    async with world.engine() as engine:
        run = await engine.start(chained, 1, run_id="r")
        await until_recorded(run, "double#1")
        child = (await engine.list(parent="r")).runs[0]
        await until_status(await engine.get(child.id), "completed")
        await run.signal("child has ended")
        assert await run.result(30) == 100


@pytest.mark.live_only
async def test_run_that_is_driven_alone_gets_the_result_of_its_child(world):
    """Its worker has died twice while executing it, so nothing else is taken beside it: but what it waits for is."""
    gate = asyncio.Event()

    @ks.step
    async def never():
        await asyncio.Event().wait()

    @ks.step
    async def hold():
        await gate.wait()
        return "held"

    @ks.workflow
    async def b_child():
        return await hold()

    @ks.workflow
    async def a_parent():
        child = await ks.start(b_child)
        return await ks.race(never(), child.result())

    engine = await world.started(recovery_limit=100)
    await engine.start(a_parent, run_id="r")
    for _ in range(2):

        def both_under_way(live=engine.live):
            return len(live) == 2 and all(context.bodies for context in live.values())

        await until(both_under_way)
        engine = await world.crash_and_recover(engine, recovery_limit=100)
    run = await engine.get("r")
    await until(lambda: engine.worker.suspects.current == "r")
    gate.set()
    assert await run.result(60) == "held"
    await engine.close()
