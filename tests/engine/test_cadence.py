"""How much of the finished work a crash repeats, by the durability that was chosen (C10, K28)."""

import asyncio
import contextlib

import pytest

import keepstep as ks
from keepstep.kernel.graph import position
from keepstep.policies import recovery
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere
from tests.engine.world import steps_of, until, until_at_last_wait, until_status

NAMES = ["fetch", "pay", "parse", "mail", "sum"]


def work_of(effects):
    def body(name):
        @ks.step(name=name)
        async def one():
            effects.append(name)
            return name

        return one

    return [body(name) for name in NAMES]


def in_a_row(effects, durability):
    steps = work_of(effects)

    @ks.workflow(name="cadence", durability=durability)
    async def program():
        for step in steps:
            await step()
            if step.name == "parse" and str(durability) == "manual":
                await ks.checkpoint()
        return await ks.wait_for("go")

    return program


#: What is durable when all five have finished and the run waits in memory.
KEPT = [
    (ks.Durability.steps("pay", "mail"), 4),
    ("steps=pay", 2),
    ("steps=nothing of this name", 0),
    (ks.Durability.when(lambda name: name.startswith("pa")), 3),
    (ks.Durability.manual(), 3),
    (ks.Durability.off(), 0),
    ("every=0", 0),
    ("every=2", 4),
]


@pytest.mark.live_only
@pytest.mark.parametrize("durability, kept", KEPT, ids=[f"{one}" for one, _ in KEPT])
async def test_crash_repeats_only_unflushed_steps(world, effects, durability, kept):
    program = in_a_row(effects, durability)
    engine = await world.started(linger_seconds=60)
    await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    assert [key for key in await steps_of(await engine.get("r")) if "checkpoint" not in key] == [
        f"{name}#1" for name in NAMES[:kept]
    ]
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    run = await engine.get("r")
    await until_at_last_wait(engine, "r")
    assert effects == NAMES + NAMES[kept:]
    await run.signal("go")
    assert await run.result(30)
    await engine.close()
    assert effects == NAMES + NAMES[kept:]


@pytest.mark.live_only
@pytest.mark.one_store
@pytest.mark.parametrize("steps, kept", [(7, 6), (8, 6), (9, 9)])
async def test_recovery_keeps_the_places_where_every_n_flushes(world, effects, steps, kept, monkeypatch):
    """The counter is as it would have been: a run that is crashed between two flushes flushes at the same steps."""
    monkeypatch.setattr(recovery, "ALONE_FROM", 10)  # so that it stays in memory, and nothing is flushed for a park

    @ks.step
    async def work(number):
        effects.append(number)

    @ks.workflow(name="counting", durability="every=3")
    async def program(first):
        for number in range(first):
            await work(number)
        await ks.wait_for("more")
        for number in range(first, 20):
            await work(number)

    engine = await world.started(linger_seconds=60)
    await engine.start(program, steps, run_id="r")
    for life in range(3):
        await until_at_last_wait(engine, "r")
        assert len(await steps_of(await engine.get("r"))) == kept, life
        engine = await world.crash_and_recover(engine, linger_seconds=60)
    await world.crash(engine)


@pytest.mark.live_only
@pytest.mark.parametrize("durability", ["manual", "off", "steps=mail"])
@pytest.mark.parametrize("before", ["mark", "child", "signal", "park", "pause", "failure"])
async def test_steps_are_durable_before_anything_leaves_the_run(world, effects, before, durability):
    there = asyncio.Event()

    @ks.step
    async def work(number):
        effects.append(number)

    @ks.step(at_most_once=True)
    async def launch():
        there.set()
        await asyncio.sleep(60)

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=60))
    async def fail():
        there.set()
        raise ConnectionError

    @ks.workflow
    async def child():
        return 1

    @ks.workflow(durability=durability)
    async def program():
        await work(1)
        await work(2)
        leaves = {
            "mark": launch,
            "child": lambda: ks.start(child),
            "signal": lambda: ks.signal("other", "word"),
            "failure": fail,
        }
        if before in leaves:
            await leaves[before]()
        there.set()
        await ks.wait_for("go")

    engine = await world.started(linger_seconds=0.01 if before == "park" else 60)
    await engine.start(in_a_row([], "every_step"), run_id="other")
    run = await engine.start(program, run_id="r")
    await there.wait()
    if before == "pause":
        await run.pause()
    if before in ("park", "pause", "failure"):
        await until_status(run, "paused" if before == "pause" else "waiting")
    assert (await steps_of(run))[:2] == ["work#1", "work#2"]
    await world.crash(engine)


# -- off ---------------------------------------------------------------------------------------------------------------


@pytest.mark.live_only
async def test_run_without_durability_stores_no_steps(world, effects):
    steps = work_of(effects)

    @ks.workflow(durability="off")
    async def program():
        ks.publish("seen", 1)
        for step in steps:
            await step()
        await ks.sleep(0.001)
        return "done"

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        assert await run.result(30) == "done"
        kinds = [one.kind for one in await run.checkpoints()]
        assert kinds == ["run started", "published", "run finished"]
        assert await run.published() == {"seen": 1}
    assert effects == NAMES


@pytest.mark.live_only
async def test_graph_without_durability_stores_no_barriers_and_states(world, monkeypatch):
    monkeypatch.setattr(position, "ENOUGH_DELTAS", 1)
    monkeypatch.setattr(position, "MOST_RECORDS", 1)
    graph = ks.Graph("unstored", durability="off")

    def giving(name):
        async def body(state):
            return {name: 1}

        graph.add(body, name=name)

    for name in ("left", "right", "joined"):
        giving(name)
    graph.parallel("both", ["left", "right"], join="joined")
    graph.delay("delay", 0.001)
    graph.edge("joined", "delay")
    graph.entry("both")
    graph.exit("delay")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        assert await run.result(30) == {"left": 1, "right": 1, "joined": 1}
        assert [one.kind for one in await run.checkpoints()] == ["run started", "run finished"]


@pytest.mark.live_only
async def test_failed_run_without_durability_keeps_its_steps(world, effects):
    @ks.step
    async def work():
        effects.append("work")

    @ks.workflow(durability="off")
    async def program():
        await work()
        if effects.count("broken") == 0:
            effects.append("broken")
            raise ValueError("broken")
        return "mended"

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        assert await steps_of(run) == ["work#1"]
        await run.retry()
        assert await run.result(30) == "mended"
    assert effects == ["work", "broken"]


@pytest.mark.live_only
@pytest.mark.one_store
async def test_durability_predicate_that_raises_flushes_every_step(world, effects, logged):
    program = in_a_row(effects, ks.Durability.when(lambda name: name["state"]))
    engine = await world.started(linger_seconds=60)
    run = await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    assert len(await steps_of(run)) == 5  # in doubt it is flushed
    assert any("the durability policy failed at fetch#1" in line for line in logged())
    await world.crash(engine)


# -- a crash at every write --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "durability, most",
    [("every=2", 2), ("steps=pay,mail", 2), ("manual", 3), ("off", 5)],
)
async def test_crash_at_any_write_repeats_only_steps_at_risk(durability, most):
    """`most` steps are at risk at a time: those that wait for a flush, and the one whose flush was under way."""
    effects = []
    program = in_a_row(effects, durability)

    async def play(engine):
        run = await engine.start(program, run_id="main")
        await until(lambda: len(set(effects)) == len(NAMES))
        with contextlib.suppress(ks.AlreadyFinished):
            await run.signal("go", id="go")
        return await run.result(30)

    async def judge(disk, lives):
        assert lives.result is True
        assert len(effects) - len(NAMES) <= most * lives.crashes, (str(lives.point), effects)
        assert list(dict.fromkeys(effects)) == NAMES
        effects.clear()

    effects.clear()
    assert await crash_everywhere(MemoryDisk, play, judge, workflows=[program]) >= 2
