"""`ks.patched`: runs that had passed the place of a change keep to the old path, whatever the shape of their code."""

import asyncio

import pytest

import keepstep as ks
from keepstep.kernel.graph import position
from tests.engine.world import replay_from_every_prefix, until, until_recorded, until_status


@ks.step
async def first():
    return 1


@ks.step
async def item(number):
    return number * 2


@ks.step
async def check(*args):
    return "checked"


@ks.step
async def never():
    await asyncio.Event().wait()


async def waits(number):
    value = await item(number)
    await ks.wait_for("go")
    return value


# -- shapes: what follows the change is recorded elsewhere than in its branch ------------------------------------------


async def before_a_map(new):
    await first()
    if new and ks.patched("p"):
        await check()
    return await ks.map(item, [1, 2])


async def before_a_map_of_helpers(new):
    await first()
    if new and ks.patched("p"):
        await check()
    return await ks.map(waits, [1, 2])


async def before_a_task_group(new):
    await first()
    if new and ks.patched("p"):
        await check()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(waits(number)) for number in (1, 2)]
    return [task.result() for task in tasks]


async def in_an_item(new):
    async def part(number):
        await item(number)
        if new and ks.patched("p"):
            await check(number)
        return number

    result = await ks.map(part, [1, 2])
    await first()
    return result


async def in_a_task(new):
    async def part():
        await item(1)
        if new and ks.patched("p"):
            await check()

    await asyncio.create_task(part())
    await first()
    return 1


async def in_the_winner_of_a_race(new):
    """The record that follows is that of the loser, which was asked for before."""

    async def winner():
        await item(1)
        if new and ks.patched("p"):
            await check()
        return 1

    return await ks.race(winner(), never())


async def in_a_task_that_cancels_another(new):
    loser = asyncio.create_task(ks.wait_for("nothing"))

    async def part():
        await item(1)
        if new and ks.patched("p"):
            await check()
        loser.cancel()

    await asyncio.gather(part(), loser, return_exceptions=True)
    return 1


async def before_a_parked_sleep(new):
    """Only the start of the sleep is recorded behind the change."""
    await first()
    if new and ks.patched("p"):
        await check()
    await ks.gather(ks.sleep(0.2), ks.wait_for("go"))
    return 1


async def before_what_is_published(new):
    await first()
    if new and ks.patched("p"):
        await check()
    ks.publish("state", "waiting")
    return 1


async def before_a_call_that_was_made_and_not_awaited(new):
    await first()
    call = item(1)
    if new and ks.patched("p"):
        await check()
    return await call


SHAPES = [
    *(before_a_map, before_a_map_of_helpers, before_a_task_group, in_an_item, in_a_task, in_the_winner_of_a_race),
    *(in_a_task_that_cancels_another, before_a_parked_sleep, before_what_is_published),
    before_a_call_that_was_made_and_not_awaited,
]


def version(shape, new):
    @ks.workflow(name="changing")
    async def changing():
        result = await shape(new)
        await ks.wait_for("go")
        await ks.wait_for("then")
        return [result, ks.patched("p") if new else None]

    return changing


async def checks(run):
    return [one for one in await run.checkpoints() if "check" in one.step]


@pytest.mark.one_store
@pytest.mark.parametrize("shape", SHAPES)
async def test_old_run_keeps_to_the_old_path(world, shape):
    old, new = version(shape, False), version(shape, True)
    async with world.engine(workflows=[old]) as engine:
        await until_status(await engine.start(old, run_id="r"), "waiting")
    for word in ("go", "then"):  # it is replayed twice, and the second time from a longer history
        async with world.engine(workflows=[new]) as engine:
            run = await engine.get("r")
            for number in range(3):
                await run.signal(word, id=f"{word}{number}")
            if word == "go":
                await until_status(run, "waiting", "completed")
                await until(lambda run=run: _waits_for_then(run))
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        assert (await run.result(30))[1] is False
        assert await checks(run) == []
        assert [(one.step, one.data.get("choice")) for one in await run.checkpoints() if one.kind == "patch"] == [
            ("patch:p", 0)
        ]


async def _waits_for_then(run):
    return "then" in (await run.run()).wakes


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize("shape", SHAPES)
async def test_new_run_takes_the_new_path_wherever_it_is_interrupted(world, shape):
    new = version(shape, True)
    async with world.engine(workflows=[new]) as engine:
        run = await engine.start(new, run_id="r")
        for word in ("go", "then"):
            for number in range(3):
                await run.signal(word, id=f"{word}{number}")
        assert (await run.result(30))[1] is True
        assert await checks(run)

        async def takes_it(handle, length):
            assert (await handle.result(30))[1] is True, f"after {length} records"

        await replay_from_every_prefix(run, takes_it, engine_options={"workflows": [new]})


@pytest.mark.one_store
async def test_run_that_has_not_come_to_the_change_takes_the_new_path(world):
    """What is recorded in branches beside it was asked for before the change, too."""
    hold = asyncio.Event()

    @ks.step
    async def slow():
        await hold.wait()

    def version(new):
        async def part():
            await slow()
            if new and ks.patched("p"):
                await check()

        @ks.workflow(name="changing")
        async def changing():
            await ks.gather(part(), ks.map(item, [1, 2]))
            return ks.patched("p") if new else None

        return changing

    old, new = version(False), version(True)
    engine = await world.started(workflows=[old])
    run = await engine.start(old, run_id="r")
    await until(lambda: _both_items(run))
    engine = await world.crash_and_recover(engine, workflows=[new])
    hold.set()
    run = await engine.get("r")
    assert await run.result(30) is True
    assert await checks(run)
    await engine.close()


async def _both_items(run):
    return sum("/item#1" in one.step for one in await run.checkpoints()) == 2


@pytest.mark.one_store
@pytest.mark.live_only
async def test_plain_def_workflow_keeps_to_the_old_path(world):
    def version(new):
        @ks.workflow(name="changing")
        def changing():
            first().result()
            if new and ks.patched("p"):
                check().result()
            calls = [item(number).start() for number in (1, 2)]
            result = [call.result() for call in calls]
            ks.wait_for("go").result()
            return [result, ks.patched("p") if new else None]

        return changing

    old, new = version(False), version(True)
    async with world.engine(workflows=[old]) as engine:
        await until_status(await engine.start(old, run_id="r"), "waiting")
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(30) == [[2, 4], False]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_decision_is_part_of_a_consolidated_state(world, monkeypatch):
    """A graph that goes on from its state reads no record of what was decided before."""
    monkeypatch.setattr(position, "MOST_RECORDS", 1)
    asked = []

    def edge(state):
        asked.append(ks.patched("p"))
        return True

    async def passes(state):
        return {"n": state.get("n", 0) + 1}

    graph = ks.Graph("changing")
    for name in ("one", "two", "three"):
        graph.add(passes, name=name)
    graph.wait("hear", signal="word")
    graph.edge("one", "two", when=edge)
    graph.edge("two", "hear")
    graph.edge("hear", "three", when=edge)
    graph.entry("one")
    graph.exit("three")
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        await until_recorded(run, "two#1")
        await until_status(run, "waiting")
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        await run.signal("word")
        await run.result(30)
        kinds = [one.kind for one in await run.checkpoints()]
    assert asked == [True, True]
    assert kinds.count("patch") == 1
    assert kinds.index("consolidated state", kinds.index("patch")) < kinds.index("signal received")
