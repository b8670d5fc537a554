"""A timedelta is taken wherever a number of seconds is; a child may have a deadline; a nested step is named."""

from datetime import UTC, datetime, timedelta

import pytest

import keepstep as ks
from tests.engine.world import until_status

MOMENT = timedelta(milliseconds=10)
MINUTE = timedelta(minutes=1)


async def test_calls_in_a_workflow_take_timedeltas(world):
    @ks.step(timeout=MINUTE, ready=lambda: True, ready_every=MOMENT)
    async def one():
        return 1

    @ks.workflow(budget=ks.Budget(seconds=MINUTE))
    async def program():
        await ks.sleep(MOMENT)
        async with ks.timeout(MINUTE):
            await one.options(timeout=MINUTE)()
        return await ks.wait_for("word", MOMENT, 2)

    async with world.engine() as engine:
        run = await engine.start(program, delay=MOMENT, deadline=MINUTE)
        assert await run.result(timeout=MINUTE) == 2


async def test_handles_take_timedeltas(world):
    @ks.workflow
    async def patient():
        await ks.wait_for("word")

    async with world.engine() as engine:
        run = await engine.start(patient)
        await until_status(run, "waiting")
        with pytest.raises(ks.TimedOut, match=r"within 0.01 s"):
            await run.result(MOMENT)
        with pytest.raises(ks.TimedOut, match=r"not completed within 0.01 s"):
            await run.reached("completed", timeout=MOMENT)
        with pytest.raises(ks.TimedOut, match=r"within 0.01 s"):
            await run.ask("question", timeout=MOMENT)


def test_policies_and_graphs_take_timedeltas():
    assert ks.Retry(base_seconds=MINUTE, cap_seconds=2 * MINUTE) == ks.Retry(base_seconds=60, cap_seconds=120)
    assert ks.Timeout(MINUTE, 2 * MINUTE) == ks.Timeout(60, 120)
    assert ks.Budget(seconds=MINUTE) == ks.Budget(seconds=60)
    assert ks.Hooks(seconds=MINUTE) == ks.Hooks(seconds=60)
    with pytest.raises(ks.DefinitionError, match="the budget of cost must be a number"):
        ks.Budget(cost=MINUTE)
    spans, numbers = ks.Graph("spans"), ks.Graph("spans")
    for graph, seconds in ((spans, MINUTE), (numbers, 60.0)):
        graph.wait("word", timeout=seconds, heartbeat=seconds)
        graph.delay("rest", seconds)
        graph.edge("word", "rest")
        graph.entry("word")
        graph.exit("rest")
    assert spans.fingerprint == numbers.fingerprint
    with pytest.raises(ks.DefinitionError, match="a delay in seconds must be finite and at least 0"):
        spans.delay("back", -MINUTE)


async def test_number_in_a_graph_stays_as_written(world):
    """It is part of the fingerprint, which open runs were started with."""
    graph = ks.Graph("written")
    graph.wait("word", timeout=60)
    graph.entry("word")
    graph.exit("word")
    assert "timeout 60" in graph.definition()
    assert "timeout 60.0" not in graph.definition()


@pytest.mark.parametrize("late", [0.05, MOMENT])
async def test_child_with_a_deadline_is_ended_by_it(world, late):
    @ks.workflow(name="slow child")
    async def kid():
        await ks.sleep(3600)

    @ks.workflow
    async def parent():
        child = await ks.start(kid, deadline=late)
        try:
            await child
        except ks.StepFailed as failure:
            return failure.error.is_a(ks.RunTimedOut)

    async with world.engine() as engine:
        assert await (await engine.start(parent)).result(30) is True


async def test_deadline_of_a_child_is_counted_from_its_start_and_not_moved_by_a_replay(world):
    @ks.workflow(name="waiting child")
    async def kid():
        await ks.wait_for("word")

    @ks.workflow
    async def parent():
        await ks.start(kid, run_id="kid", deadline=3600)
        await ks.start(kid, run_id="other", deadline=datetime(2300, 1, 1, tzinfo=UTC))
        await ks.wait_for("word")

    engine = await world.started()
    run = await engine.start(parent, run_id="r")
    await until_status(run, "waiting")
    first = await (await engine.get("kid")).run()
    assert timedelta(minutes=59) < first.deadline_at - first.created_at <= timedelta(hours=1)
    engine = await world.crash_and_recover(engine)
    await (await engine.get("r")).signal("word")
    await (await engine.get("r")).result(30)
    assert (await (await engine.get("kid")).run()).deadline_at == first.deadline_at
    assert (await (await engine.get("other")).run()).deadline_at == datetime(2300, 1, 1, tzinfo=UTC)
    await engine.close()


@pytest.mark.parametrize("wrong", [0, -1, "soon", datetime(2300, 1, 1)])  # noqa: DTZ001 - that is the mistake
async def test_deadline_of_a_child_that_cannot_be_kept_is_refused(world, wrong):
    @ks.workflow(name="limited child")
    async def kid():
        return 1

    @ks.workflow
    async def parent():
        try:
            await ks.start(kid, deadline=wrong)
        except ks.DefinitionError as error:
            return str(error)

    async with world.engine() as engine:
        assert "deadline must" in await (await engine.start(parent)).result(30)


async def test_step_called_in_the_body_of_a_step_is_named_once_in_the_log(world, caplog):
    @ks.step
    async def inner():
        return 1

    @ks.step(name=f"outer {world.kind} {world.mode}")
    async def outer():
        return await inner() + await inner() + await inner.fn()

    @ks.workflow
    async def program():
        return await outer()

    async with world.engine() as engine:
        for _ in range(2):
            assert await (await engine.start(program)).result(30) == 3
    told = [one.getMessage() for one in caplog.records if "in its body" in one.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"step '{outer.name}' calls step 'inner' in its body")
