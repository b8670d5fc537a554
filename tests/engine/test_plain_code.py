"""Plain def workflows can do what async ones can: time limits, arrivals, and several threads that take turns."""

import asyncio
import contextlib
import functools
import threading
import time
from random import Random

import pytest

import keepstep as ks
from keepstep.engine import engine as engine_module
from keepstep.kernel.call_states import Detached
from tests.engine.world import replay_from_every_prefix, until, until_at_last_wait, until_status


@ks.step
def double(number):
    return 2 * number


@ks.step
async def add(number, other):
    return number + other


# -- ks.timeout --------------------------------------------------------------------------------------------------------


async def test_a_plain_with_ends_its_block_when_the_time_is_over(world):
    @ks.workflow
    def limited():
        got = []
        with ks.timeout(60) as roomy:
            got.append(double(1).result())
        try:
            with ks.timeout(0.01) as tight:
                ks.wait_for("never").result()
        except ks.TimedOut:
            got.append("over")
        got += [roomy.expired, tight.expired, double(2).result()]
        return got

    async with world.engine() as engine:
        assert await (await engine.start(limited)).result(60) == [2, "over", False, True, 4]


async def test_the_inner_of_two_plain_time_limits_leaves_the_outer_alone(world):
    @ks.workflow
    def nested():
        with ks.timeout(60):
            try:
                with ks.timeout(0.01):
                    ks.gather(ks.wait_for("never"), ks.sleep(hours=1)).result()
            except ks.TimedOut:
                return double(21).result()
        return None

    async with world.engine() as engine:
        assert await (await engine.start(nested)).result(60) == 42


async def test_a_time_limit_of_a_thread_ends_that_thread_alone(world):
    @ks.workflow
    def both():
        def one(seconds):
            try:
                with ks.timeout(seconds):
                    return ks.wait_for("go").result()
            except ks.TimedOut:
                ks.publish("late", value=True)
                return "late"

        return ks.map(one, [0.01, 3600]).result()

    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(both)
        async for event in run.watch():
            if event.name == "value.published":
                break
        await run.signal("go", "here")
        assert await run.result(60) == ["late", "here"]


async def test_each_kind_of_with_says_where_it_belongs(world):
    @ks.workflow
    async def wrong():
        with ks.timeout(1):
            pass

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="use `async with ks"):
            await (await engine.start(wrong)).result(60)


# -- ks.as_completed ---------------------------------------------------------------------------------------------------


async def test_a_plain_for_gets_results_as_they_arrive(world):
    @ks.workflow
    def first_come():
        return list(ks.as_completed([ks.wait_for("b"), ks.wait_for("a"), double(1)]))

    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(first_come, run_id="r")
        await until_at_last_wait(engine, "r")
        await run.signal("a", "a")
        await run.signal("b", "b")
        assert sorted(map(str, await run.result(60))) == ["2", "a", "b"]


async def test_leaving_a_plain_for_cancels_the_rest(world):
    @ks.workflow
    def first():
        for result in ks.as_completed([ks.wait_for("never"), double(1)]):
            return [result, double(2).result()]
        return None

    async with world.engine() as engine:
        run = await engine.start(first)
        assert await run.result(60) == [2, 4]
        assert "cancelled" in {one.outcome for one in await run.checkpoints() if one.step.startswith("wait_for")}


async def test_plain_functions_arrive_as_calls_do(world):
    @ks.workflow
    def mixed():
        return sorted(ks.as_completed([lambda: double(1).result() + 1, functools.partial(double, 5)]))

    async with world.engine() as engine:
        assert await (await engine.start(mixed)).result(60) == [3, 10]


# -- threads -----------------------------------------------------------------------------------------------------------


async def test_map_takes_plain_functions_partials_and_lambdas(world):
    @ks.workflow
    def mapped():
        def twice(number):
            return double(double(number).result()).result()

        return [
            ks.map(twice, [1, 2, 3]).result(),
            ks.map(functools.partial(add, 10), [1, 2]).result(),
            ks.map(lambda number: add(number, 1), [1, 2]).result(),
            ks.map(functools.partial(twice), [5], concurrency=1).result(),
            ks.map(twice, []).result(),
        ]

    async with world.engine() as engine:
        run = await engine.start(mapped)
        assert await run.result(60) == [[4, 8, 12], [11, 12], [2, 3], [20], []]
        assert {"1.0/double#1", "1.0/double#2", "1.2/double#2"} <= {one.step for one in await run.checkpoints()}


async def test_async_workflow_maps_partials_and_functions_that_return_calls(world):
    @ks.workflow
    async def mapped():
        return [
            await ks.map(functools.partial(add, 10), [1, 2]),
            await ks.map(lambda number: add(number, 1), [1, 2]),
        ]

    async with world.engine() as engine:
        assert await (await engine.start(mapped)).result(60) == [[11, 12], [2, 3]]


async def test_gather_and_race_take_plain_functions(world):
    @ks.workflow
    def gathered():
        def slow():
            ks.wait_for("never").result()

        return [
            ks.gather(lambda: double(1).result(), double(2), lambda: double(double(3).result()).result()).result(),
            ks.race(slow, lambda: double(4).result()).result(),
        ]

    async with world.engine() as engine:
        assert await (await engine.start(gathered)).result(60) == [[2, 4, 12], 8]


async def test_a_plain_function_is_refused_where_code_is_async(world):
    @ks.workflow
    async def wrong():
        return await ks.gather(lambda: 1)

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="is not awaitable; pass a call"):
            await (await engine.start(wrong)).result(60)


async def test_threads_of_a_run_take_turns(world):
    running, most = 0, 0

    @ks.workflow
    def many():
        def one(number):
            nonlocal running, most
            for _ in range(3):
                running += 1
                most = max(most, running)
                sum(range(2000))
                running -= 1
                number = double(number).result()
            return number

        return ks.map(one, range(8)).result()

    async with world.engine() as engine:
        assert await (await engine.start(many)).result(60) == [8 * number for number in range(8)]
    assert most == 1


async def test_maps_of_plain_functions_nest_and_need_no_pool(world, monkeypatch):
    monkeypatch.setattr(engine_module, "RUN_THREADS", 1)

    @ks.workflow
    def nested(size):
        def inner(number):
            return double(number).result()

        def outer(number):
            return sum(ks.map(inner, range(number)).result())

        return ks.map(outer, range(size)).result()

    async with world.engine() as engine:
        runs = [await engine.start(nested, 4) for _ in range(3)]
        assert [await run.result(60) for run in runs] == [[0, 0, 2, 6]] * 3


async def test_the_failure_of_one_thread_cancels_the_others(world, effects):
    @ks.step
    def undo(number):
        effects.append(number)

    @ks.step
    def fail():
        raise ks.Permanent("broken")

    @ks.workflow
    def failing():
        def one(number):
            try:
                return fail().result() if number == 1 else ks.wait_for("never").result()
            except asyncio.CancelledError:
                undo(number).result()
                raise

        try:
            ks.map(one, range(3)).result()
        except ks.StepFailed:
            return ks.wait_for("undone").result()

    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(failing)
        await until(lambda: len(effects) == 2)
        await run.signal("undone", "failed")
        assert await run.result(60) == "failed"
    assert sorted(effects) == [0, 2]


@pytest.mark.one_store
async def test_threads_go_on_from_every_record(world):
    @ks.workflow
    def busy():
        def one(number):
            time.sleep(Random().random() / 500)  # however long it takes between its calls
            if number == 3:
                raise ValueError("at once")
            first = double(number).start()
            with ks.timeout(60):
                pair = ks.gather(lambda: add(number, 1).result(), double(number)).result()
            ks.sleep(0.001).result()
            return [first.result(), *pair, *ks.as_completed([double(7)])]

        batch = ks.map(one, range(4), collect=True, concurrency=3).result()
        with contextlib.suppress(ValueError):
            ks.map(one, [3, 0, 1]).result()
        return [*batch, ks.race(ks.wait_for("never"), lambda: double(9).result()).result()]

    wanted = [[2 * number, number + 1, 2 * number, 14] for number in range(3)] + [None, 18]

    async def same(run, length):
        assert await run.result(60) == wanted, length

    async with world.engine() as engine:
        run = await engine.start(busy)
        await same(run, 0)
        await replay_from_every_prefix(run, same)


async def test_failures_of_threads_are_collected(world):
    @ks.workflow
    def collecting():
        def one(number):
            if number == 1:
                raise ValueError("one")
            return double(number).result()

        batch = ks.map(one, range(3), collect=True).result()
        return [list(batch), [str(error) for error in batch.failures.values()]]

    async with world.engine() as engine:
        assert await (await engine.start(collecting)).result(60) == [[0, None, 4], ["one"]]


async def test_cancel_reaches_every_thread(world):
    cancelled = set()

    @ks.workflow
    def waiting():
        def one(number):
            try:
                ks.wait_for("never").result()
            except asyncio.CancelledError as error:
                if not isinstance(error, Detached):  # under replay, the run is left and taken up again
                    cancelled.add(number)
                raise

        ks.map(one, range(3)).result()

    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(waiting, run_id="r")
        await until_at_last_wait(engine, "r")
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(60)
    assert cancelled == {0, 1, 2}


async def test_threads_repeat_no_step_after_a_crash(world, effects):
    @ks.step
    def work(name):
        effects.append(name)
        return name

    @ks.workflow
    def mapped():
        def one(name):
            first = work(f"{name}1").result()
            word = ks.wait_for(f"go {name}").result()
            return [first, word, work(f"{name}2").result()]

        return ks.map(one, ["a", "b"]).result()

    engine = await world.started(linger_seconds=60)
    await engine.start(mapped, run_id="r")
    await until_at_last_wait(engine, "r")
    for name in ("b", "a"):
        engine = await world.crash_and_recover(engine, linger_seconds=60)
        await until_at_last_wait(engine, "r")
        run = await engine.get("r")
        await run.signal(f"go {name}", name)
        async for event in run.watch():
            if event.name == "step.completed" and event.step.endswith("work#2"):
                break
    assert await run.result(60) == [["a1", "a", "a2"], ["b1", "b", "b2"]]
    assert sorted(effects) == ["a1", "a2", "b1", "b2"]
    await engine.close()


async def test_a_run_is_parked_while_all_its_threads_wait(world):
    @ks.workflow
    def waiting():
        return ks.map(lambda name: ks.wait_for(name).result(), ["a", "b"]).result()

    async with world.engine() as engine:
        run = await engine.start(waiting)
        await until_status(run, "waiting")
        await run.signal("b", 2)
        await until_status(run, "waiting")
        await run.signal("a", 1)
        assert await run.result(60) == [1, 2]


async def test_a_thread_of_the_users_own_is_sent_to_map(world):
    @ks.workflow
    def own():
        from contextvars import copy_context

        told = []

        def body():
            try:
                double(1).result()
            except ks.DefinitionError as error:
                told.append(str(error))

        thread = threading.Thread(target=copy_context().run, args=(body,))
        thread.start()
        thread.join()
        return told

    async with world.engine() as engine:
        [told] = await (await engine.start(own)).result(60)
    assert "ks.map or ks.gather" in told


async def test_context_variables_of_a_thread_reach_its_steps(world):
    import contextvars

    name = contextvars.ContextVar("name", default="nobody")

    @ks.step
    async def who():
        return name.get()

    @ks.workflow
    def asking():
        def one(text):
            name.set(text)
            return who().result()

        return [ks.map(one, ["a", "b"]).result(), who().result()]

    async with world.engine() as engine:
        assert await (await engine.start(asking)).result(60) == [["a", "b"], "nobody"]


async def test_the_result_of_a_child_is_one_call_away(world):
    @ks.workflow
    def child_of(number):
        return double(number).result()

    @ks.workflow
    def parent():
        one = ks.start(child_of, 1)
        two = ks.start(child_of, 2).start()
        three = ks.start(child_of, 3)
        return [one.result(), two.result(), one.result(), three.child().id == three.child().id, three.result()]

    async with world.engine() as engine:
        run = await engine.start(parent)
        assert await run.result(60) == [2, 4, 2, True, 6]
        ends = [one.step for one in await run.checkpoints() if ".result#" in one.step]
        assert len(ends) == 3, "a second `.result()` asks for nothing"


async def test_a_child_in_plain_code_needs_one_result(world):
    @ks.workflow
    def child_of(number):
        return double(number).result()

    @ks.workflow
    def parent():
        children = ks.gather(*(ks.start(child_of, number) for number in (1, 2, 3))).result()
        first = children[0].result()
        both = ks.gather(*children[1:]).result()
        more = ks.gather(ks.start(child_of, 4), ks.start(child_of, 5)).result()
        return [first, both, ks.start(child_of, 6).child().result(), sorted(ks.as_completed(more))]

    async with world.engine() as engine:
        run = await engine.start(parent)
        assert await run.result(60) == [2, [4, 6], 12, [8, 10]]


async def test_a_child_in_async_code_is_awaited(world):
    @ks.workflow
    def child_of(number):
        return double(number).result()

    @ks.workflow
    async def parent():
        one, two = await ks.gather(ks.start(child_of, 1), ks.start(child_of, 2))
        return [await one, await one.result(), *await ks.gather(one, two.result())]

    async with world.engine() as engine:
        run = await engine.start(parent)
        assert await run.result(60) == [2, 2, 2, 4]


def test_plain_functions_are_mapped_outside_a_run():
    def twice(number):
        return double(add(number, number).result()).result()

    assert ks.map(twice, [1, 2]).result() == [4, 8]
    assert ks.map(functools.partial(add, 1), [1, 2]).result() == [2, 3]
    assert ks.gather(lambda: double(1).result(), double(2)).result() == [2, 4]
