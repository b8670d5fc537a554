"""A resume after an edit at a breakpoint lets the run pass it, whenever a worker takes the run there again."""

import pytest

import keepstep as ks
from keepstep.model.signal import RESUME
from tests.engine.world import until_status

pytestmark = pytest.mark.on_postgres


def paying(*more):
    """A graph that stops before `charge` and `refund`, and the steps that ran."""
    ran = []
    graph = ks.Graph("paying", interrupt_before=["charge", "refund", *more])

    def noted(name):
        async def body(state):
            ran.append(name)
            return {"by": [*state.get("by", []), [name, state.get("price", 0)]]}

        return body

    for name in ("order", "charge", "refund", "end"):
        graph.add(noted(name), name=name)
    graph.edge("order", "charge")
    graph.edge("charge", "end")
    graph.edge("refund", "end")
    graph.entry("order")
    graph.exit("end")
    return graph, ran


async def at_the_stop(world, graph):
    async with world.engine(workflows=[graph]) as engine:
        await until_status(await engine.start(graph, run_id="r"), "waiting")


async def resumes(run):
    """The resumes that changed nothing."""
    return [one.step for one in await run.checkpoints() if one.step == RESUME]


async def test_edit_and_resume_beside_a_worker_pass_the_breakpoint(world):
    graph, ran = paying()
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        await run.edit({"price": 60})
        await run.resume()
        assert (await run.result(30))["by"] == [["order", 0], ["charge", 60], ["end", 60]]
    assert ran == ["order", "charge", "end"]


@pytest.mark.parametrize("order", ["edit resume", "resume edit", "edit edit resume", "edit resume edit"])
async def test_edit_and_resume_without_a_worker_pass_the_breakpoint(world, order):
    graph, ran = paying()
    await at_the_stop(world, graph)
    async with world.engine(worker=False, workflows=[graph]) as client:
        run = await client.get("r")
        for act in order.split():
            await (run.edit({"price": 60}) if act == "edit" else run.resume())
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        assert (await run.result(30))["by"] == [["order", 0], ["charge", 60], ["end", 60]]
        assert not await resumes(run)
    assert ran == ["order", "charge", "end"]


async def test_resume_after_an_edit_passes_the_breakpoint_to_which_it_leads(world):
    graph, ran = paying()
    await at_the_stop(world, graph)
    async with world.engine(worker=False, workflows=[graph]) as client:
        run = await client.get("r")
        await run.edit(next="refund")
        await run.resume()
    async with world.engine(workflows=[graph]) as engine:
        await (await engine.get("r")).result(30)
    assert ran == ["order", "refund", "end"]


async def test_resume_after_an_edit_passes_no_later_breakpoint(world):
    """The edit leads to a step without a breakpoint: the one after it was not what the person resumed."""
    graph, ran = paying("end")
    graph.add(ran_again(ran), name="check")
    graph.edge("check", "end")
    await at_the_stop(world, graph)
    async with world.engine(worker=False, workflows=[graph]) as client:
        run = await client.get("r")
        await run.edit(next="check")
        await run.resume()
        await run.resume()
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        await until_status(run, "waiting")
        assert (ran, await resumes(run)) == (["order", "check"], [RESUME, RESUME])
        await run.resume()
        await run.result(30)
    assert ran == ["order", "check", "end"]


def ran_again(ran):
    async def body(state):
        ran.append("check")
        return {}

    return body


async def test_one_resume_passes_one_breakpoint(world):
    graph, ran = paying("end")
    await at_the_stop(world, graph)
    async with world.engine(worker=False, workflows=[graph]) as client:
        run = await client.get("r")
        await run.edit({"price": 1})
        await run.resume()
        await run.resume()
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        await until_status(run, "waiting")
        assert (ran, await resumes(run)) == (["order", "charge"], [RESUME])


@pytest.mark.parametrize("edited", ["before the pause", "after the pause", "never"])
async def test_resume_that_ends_a_pause_leaves_the_run_at_its_breakpoint(world, edited):
    graph, ran = paying()
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        if edited == "before the pause":
            await run.edit({"price": 60})
        await run.pause()
        await until_status(run, "paused")
        if edited == "after the pause":
            await run.edit({"price": 60})
    async with world.engine(worker=False, workflows=[graph]) as client:
        await (await client.get("r")).resume()
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        await until_status(run, "waiting")
        assert ran == ["order"]
        await run.resume()
        await run.result(30)
    assert ran == ["order", "charge", "end"]


async def test_pause_after_a_resume_does_not_void_it(world):
    graph, ran = paying()
    await at_the_stop(world, graph)
    async with world.engine(worker=False, workflows=[graph]) as client:
        run = await client.get("r")
        await run.edit({"price": 60})
        await run.resume()
        await run.pause()
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        await until_status(run, "paused")
        await run.resume()
        assert (await run.result(30))["by"] == [["order", 0], ["charge", 60], ["end", 60]]
    assert ran == ["order", "charge", "end"]


async def test_resume_of_a_run_that_has_not_begun_passes_only_its_first_breakpoint(world):
    graph, ran = paying("order")
    async with world.engine(worker=False, workflows=[graph]) as client:
        run = await client.start(graph, run_id="r")
        await run.resume()
    async with world.engine(workflows=[graph]) as engine:
        await until_status(await engine.get("r"), "waiting")
    assert ran == ["order"]


async def test_early_resume_does_not_hold_again_after_a_rewind(world):
    graph, ran = paying()
    await at_the_stop(world, graph)
    async with world.engine(worker=False, workflows=[graph]) as client:
        run = await client.get("r")
        await run.edit({"price": 60})
        await run.resume()
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        await run.result(30)
        await run.rewind(step="charge")
        await until_status(run, "waiting")
    assert ran == ["order", "charge", "end"]
