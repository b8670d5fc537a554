"""Branches are numbered where they are made, among all tasks of their parent, eager ones too (K1)."""

import asyncio
import contextlib
import contextvars
import random
import sys
import threading

import pytest

import keepstep as ks
from tests.engine.lives import PollInterval, live_then_many_lives
from tests.engine.world import steps_of, until


def worker_for(effects, pace=None):
    @ks.step
    async def work(name):
        if pace is not None:
            await pace.take(name)
        effects.append(name)
        return name

    return work


async def test_branch_numbers_do_not_depend_on_who_calls_first(world, effects):
    """Unrecorded waiting before the first step of a branch: the numbers must not follow it."""
    work = worker_for(effects)

    @ks.workflow
    async def scattered():
        async def one(number):
            await asyncio.sleep(random.random() * 0.01)
            return await work(f"b{number}")

        got = await asyncio.gather(*(one(number) for number in range(8)))
        await ks.wait_for("go")
        return got

    result = await live_then_many_lives(world, scattered, PollInterval(), effects, lives=3)
    assert result == [f"b{number}" for number in range(8)]
    assert len(effects) == 8


async def test_task_without_steps_takes_a_branch_number(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def mixed():
        async def idle():
            await asyncio.sleep(0)

        async def busy(name):
            return await work(name)

        await asyncio.gather(idle(), busy("a"), idle(), busy("b"))
        async with asyncio.TaskGroup() as group:
            group.create_task(idle())
            group.create_task(busy("c"))

    async with world.engine() as engine:
        run = await engine.start(mixed)
        await run.result(30)
        assert set(await steps_of(run)) == {"2/work#1", "4/work#1", "6/work#1"}


async def test_call_is_numbered_where_it_is_made(world, effects):
    """The key is fixed when the step is called: handing the call to another task does not change it."""
    work = worker_for(effects)

    @ks.workflow
    async def handing():
        first, second = work("a"), work("b")

        async def take(call):
            return await call

        return await asyncio.gather(take(second), take(first))

    async with world.engine() as engine:
        run = await engine.start(handing)
        assert await run.result(30) == ["b", "a"]
        recorded = {one.step: one.value for one in await run.checkpoints() if one.kind.value == "step completed"}
        assert recorded == {"work#1": b'"a"', "work#2": b'"b"'}


async def test_task_made_inside_a_step_is_not_a_branch(world, effects):
    work = worker_for(effects)

    @ks.step
    async def spawning():
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(3)))

    @ks.workflow
    async def nested():
        await spawning()
        return await asyncio.create_task(inner())

    async def inner():
        return await work("a")

    async with world.engine() as engine:
        run = await engine.start(nested)
        await run.result(30)
        assert await steps_of(run) == ["spawning#1", "1/work#1"]


async def test_concurrent_runs_number_their_branches_separately(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def branching(name):
        async def branch(number):
            await work(f"{name}{number}")
            return await work(f"{name}{number}")

        return await asyncio.gather(*(branch(number) for number in range(3)))

    async with world.engine() as engine:
        runs = [await engine.start(branching, name, run_id=name) for name in "abcd"]
        for run in runs:
            await run.result(30)
            expected = {f"{branch}/work#{call}" for branch in (1, 2, 3) for call in (1, 2)}
            assert set(await steps_of(run)) == expected


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_eager_tasks_keep_their_numbers_on_replay(world, effects):
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
    pace = PollInterval(a=0.01, bb=0.0)
    work = worker_for(effects, pace)

    @ks.workflow
    async def eager():
        async def branch(name):
            first = await work(name)
            return [first, *(await asyncio.gather(work(name), inner(name)))]

        async def inner(name):
            return await work(name)

        async def instant():
            return 1

        await asyncio.create_task(instant())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(branch(name)) for name in ("a", "bb")]
        winner = await ks.race(branch("a"), branch("bb"))
        done, pending = await asyncio.wait(
            [asyncio.create_task(work("a")), asyncio.create_task(work("bb"))], return_when=asyncio.FIRST_COMPLETED
        )
        first = sorted(task.result() for task in done)
        await work("".join(first))
        for task in pending:
            task.cancel()
        await ks.wait_for("go")
        return [[task.result() for task in tasks], winner, first]

    got, winner, first = await live_then_many_lives(world, eager, pace, effects, lives=4)
    assert got == [["a"] * 3, ["bb"] * 3]
    assert winner == ["bb"] * 3
    assert first == ["bb"]


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 2, 10])
async def test_unstorable_item_fails_its_map_and_no_other_run(world, effects, concurrency):
    work = worker_for(effects)

    @ks.workflow
    async def mapped():
        await ks.map(work, ["a", "b", object(), "c"], concurrency=concurrency)

    @ks.workflow
    async def neighbour():
        return await ks.map(work, ["x", "y"], concurrency=1)

    async with world.engine() as engine:
        run, other = await engine.start(mapped), await engine.start(neighbour)
        with pytest.raises(ks.RunFailed, match="NotSerializable"):
            await run.result(30)
        assert await other.result(30) == ["x", "y"]


async def test_collecting_map_goes_on_after_unstorable_items(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def mapped():
        items = [object()] * 1500 + ["a"]
        got = await ks.map(work, items, concurrency=2, collect=True)
        return [len(got.failures), got[-1]]

    async with world.engine() as engine:
        assert await (await engine.start(mapped)).result(60) == [1500, "a"]


async def test_every_map_item_has_the_codes_context_variables(world):
    user = contextvars.ContextVar("user", default="nobody")
    seen = []

    @ks.step
    async def work(number):
        seen.append(user.get())
        return number

    @ks.workflow
    async def mapped():
        user.set("someone")

        async def item(number):
            seen.append(user.get())
            return await work(number)

        return await ks.map(item, [1, 2, 3], concurrency=1)

    async with world.engine() as engine:
        assert await (await engine.start(mapped)).result(30) == [1, 2, 3]
    assert set(seen) == {"someone"}


async def test_empty_group_ends_at_once(world):
    work = worker_for([])

    @ks.workflow
    async def empty():
        async def streamed():
            return [one async for one in ks.as_completed([])]

        return [await ks.gather(), await ks.map(work, []), await streamed(), await ks.chain(work, [], 7)]

    async with world.engine() as engine:
        assert await (await engine.start(empty)).result(30) == [[], [], [], 7]


async def test_race_and_map_refuse_invalid_arguments(world):
    work = worker_for([])

    @ks.workflow
    async def wrong(what):
        if what == "race":
            await ks.race()
        elif what == "concurrency":
            await ks.map(work, [1], concurrency=0)
        else:
            await ks.map(lambda item: item, [1])

    async with world.engine() as engine:
        for what in ("race", "concurrency", "function"):
            with pytest.raises(ks.RunFailed, match="DefinitionError"):
                await (await engine.start(wrong, what)).result(30)


async def test_first_failure_ends_a_race(world, effects):
    @ks.step
    async def bad():
        raise ValueError("first")

    @ks.step
    async def slow():
        await asyncio.sleep(60)

    @ks.workflow
    async def raced():
        await ks.race(bad(), slow())

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="ValueError: first"):
            await (await engine.start(raced)).result(30)


async def test_named_calls_say_which_has_come(world):
    @ks.step
    async def work(number):
        if number == 3:
            raise ValueError("no third")
        return number

    @ks.workflow
    async def named():
        seen = []
        with contextlib.suppress(ks.StepFailed):
            async for name, value in ks.as_completed(one=work(1), two=work(2)):
                seen.append([name, value])
            async for name, _ in ks.as_completed(three=work(3)):
                seen.append([name, "never"])
        with contextlib.suppress(ks.DefinitionError):
            ks.as_completed([work(4)], five=work(5))
            seen.append("not refused")
        return sorted(seen)

    async with world.engine() as engine:
        assert await (await engine.start(named)).result(30) == [["one", 1], ["two", 2]]


async def test_leaving_as_completed_early_cancels_the_rest(world, effects):
    @ks.step
    async def work(number):
        try:
            await asyncio.sleep(0 if number == 1 else 60)
        except asyncio.CancelledError:
            effects.append(f"cancelled {number}")
            raise
        return number

    @ks.workflow
    async def first():
        stream = ks.as_completed([work(1), work(2)])
        async for number in stream:
            await stream.aclose()
            return number
        return None

    async with world.engine() as engine:
        run = await engine.start(first)
        assert await run.result(30) == 1
        assert await steps_of(run, "step cancelled") == ["work#2"]
    assert effects == ["cancelled 2"]


class Peak:
    """How many bodies are under way at once; they wait for each other until as many are there as may be."""

    def __init__(self, expected):
        self.expected, self.now, self.most = expected, 0, 0
        self.lock, self.full = threading.Lock(), threading.Event()

    def __enter__(self):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now >= self.expected:
                threading.Timer(0.03, self.full.set).start()  # time enough for one too many

    def __exit__(self, *_):
        with self.lock:
            self.now -= 1


@pytest.mark.live_only
@pytest.mark.one_store
@pytest.mark.parametrize("items, expected", [(130, 100), (20, 20)])
async def test_map_runs_as_many_async_steps_as_its_limit(world, items, expected):
    peak = Peak(expected)

    @ks.step
    async def meet(number):
        with peak:
            await until(peak.full.is_set, "as many as may be")
        return number

    @ks.workflow
    async def mapping():
        return await ks.map(meet, range(items))

    async with world.engine() as engine:
        assert await (await engine.start(mapping)).result(60) == list(range(items))
    assert peak.most == expected


@pytest.mark.live_only
@pytest.mark.one_store
@pytest.mark.parametrize("threads, items, expected", [(16, 10, 4), (64, 24, 16), (64, 3, 3), (2, 3, 1)])
async def test_map_runs_as_many_threads_as_a_quarter_of_the_pool(world, monkeypatch, threads, items, expected):
    monkeypatch.setattr("keepstep.engine.engine.STEP_THREADS", threads)
    peak = Peak(expected)

    @ks.step
    def meet(number):
        with peak:
            peak.full.wait(60)
        return number

    @ks.workflow
    async def mapping():
        return await ks.map(meet, range(items))

    async with world.engine() as engine:
        assert await (await engine.start(mapping)).result(60) == list(range(items))
    assert peak.most == expected


@pytest.mark.every_loop
@pytest.mark.parametrize("pauses", [0, 1, 2])
async def test_part_that_ends_at_once_keeps_the_order_of_a_replay(world, effects, pauses):
    """The end of a part that began during a delivery is still to be handled, so the run is not at rest."""

    @ks.step
    async def work(number):
        effects.append(number)
        return number

    async def helper(number):
        for _ in range(pauses):
            await asyncio.sleep(0)
        return number

    @ks.workflow
    async def program():
        batch = (work(1), helper(2), work(3), helper(4), helper(5), work(6))
        others = ks.map(work, range(10, 16), concurrency=1)
        return await ks.gather(ks.gather(*batch, concurrency=1), others)

    async with world.engine() as engine:
        run = await engine.start(program)
        assert await run.result(30) == [[1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15]]
    assert len(effects) == len(set(effects))
