"""`ks.acting` and `ks.stage`: the agent and the stage in every record that a block of code causes."""

from __future__ import annotations

import asyncio

import pytest

import keepstep as ks
from keepstep.history.audit import audit


@ks.step(name="naming.work")
async def work(text):
    ks.emit(f"token {text}")
    return text


async def names(run, kinds=("step completed",)):
    """The agent and the stage of the run's records, by step."""
    return {
        one.step.rpartition("/")[2]: (one.agent, one.stage)
        for one in await run.checkpoints()
        if not kinds or one.kind in kinds
    }


async def test_every_record_of_a_block_has_its_names(world):
    @ks.workflow(name="naming.child")
    async def child():
        return 1

    @ks.workflow(name="naming.all")
    async def naming():
        await work("before")
        with ks.stage("research"), ks.acting("critic"):
            await work("within")
            ks.publish("shown", 1)
            ks.emit("said")
            await ks.sleep(0, name="rest")
            await ks.wait_for("go", timeout=0.01, default=None)
            await (await ks.start(child)).result()
        await work("after")

    async with world.engine() as engine:
        run = await engine.start(naming)
        await run.result()
        found = await run.checkpoints()
        named = {(one.agent, one.stage): set() for one in found if one.agent}
        for one in found:
            named.get((one.agent, one.stage), set()).add(one.kind.value)
        kinds = named.pop(("critic", "research"))
        assert not named
        assert kinds >= {"step completed", "emitted", "published", "timer", "child"}
        outside = [one.step for one in found if one.agent is None and one.kind == "step completed"]
        assert outside == ["naming.work#1", "naming.work#3"]


async def test_concurrent_branches_keep_their_own_names(world):
    async def member(name):
        with ks.acting(name):
            await work(f"{name} 1")
            await ks.sleep(0)
            await work(f"{name} 2")

    @ks.workflow(name="naming.branches")
    async def naming():
        with ks.stage("debate"):
            async with asyncio.TaskGroup() as group:
                group.create_task(member("pro"))
                group.create_task(member("con"))
            with ks.acting("all"):
                await ks.map(work, ["a", "b"])
            await ks.gather(member("judge"), work("free"))

    async with world.engine() as engine:
        run = await engine.start(naming)
        await run.result()
        who = {
            one.result: (one.agent, one.stage)
            for one in await run.checkpoints()
            if one.kind == "step completed"
            for one in [_Result(one)]
        }
    assert who == {
        **{f"{name} {number}": (name, "debate") for name in ("pro", "con", "judge") for number in (1, 2)},
        "a": ("all", "debate"),
        "b": ("all", "debate"),
        "free": (None, "debate"),
    }


class _Result:
    def __init__(self, one):
        self.result, self.agent, self.stage = one.value.decode().strip('"'), one.agent, one.stage


@pytest.mark.one_store
async def test_inner_names_win_and_end_with_their_block(world):
    @ks.workflow(name="naming.nested")
    async def naming():
        with ks.acting("planner"):
            with ks.stage("plan"), ks.acting("helper"):
                await work("inner")
            await work("outer")

    async with world.engine() as engine:
        run = await engine.start(naming)
        await run.result()
        assert await names(run) == {"naming.work#1": ("helper", "plan"), "naming.work#2": ("planner", None)}


@pytest.mark.one_store
async def test_plain_code_names_its_calls(world):
    @ks.workflow(name="naming.plain")
    def naming():
        with ks.acting("plain"):
            work("one").result()
            ks.map(work, ["two"]).result()
        work("three").result()

    async with world.engine() as engine:
        run = await engine.start(naming)
        await run.result()
        found = [(one.value, one.agent) for one in await run.checkpoints() if one.kind == "step completed"]
    assert found == [(b'"one"', "plain"), (b'"two"', "plain"), (b'"three"', None)]


@pytest.mark.one_store
async def test_failures_and_tokens_of_bodies_have_names(world):
    @ks.step(name="naming.fails")
    async def fails():
        ks.emit("of the call")
        with ks.acting("inner"):
            ks.emit("of the body")
        raise ks.Permanent("no")

    @ks.workflow(name="naming.failing")
    async def naming():
        with ks.acting("outer"):
            await fails()

    async with world.engine() as engine:
        run = await engine.start(naming)
        with pytest.raises(ks.RunFailed):
            await run.result()
        found = [(one.kind.value, one.agent) for one in await run.checkpoints() if one.step == "naming.fails#1"]
        assert found == [("emitted", "outer"), ("emitted", "inner"), ("step failed", "outer")]


@pytest.mark.one_store
async def test_changed_names_do_not_affect_a_replay(world):
    name = "first"

    @ks.workflow(name="naming.renamed")
    async def naming():
        with ks.acting(name):
            await work("one")
            await ks.wait_for("go")
            await work("two")

    engine = await world.started()
    run = await engine.start(naming, run_id="renamed")
    while (await run.run()).seq < 3:  # noqa: ASYNC110 - the record of the step, and the wait
        await asyncio.sleep(0.01)
    await world.crash(engine)
    name = "second"
    async with world.engine() as engine:
        run = await engine.get("renamed")
        await run.signal("go")
        await run.result()
        assert await names(run) == {"naming.work#1": ("first", None), "naming.work#2": ("second", None)}


@pytest.mark.one_store
async def test_graphs_and_dags_name_every_record_of_a_step(world):
    graph = ks.Graph("naming.graph")

    @graph.step(agent="critic", stage="review", retry=ks.Retry(attempts=2, base_seconds=0))
    async def judge(state):
        if ks.attempt() == 1:
            raise ValueError("again")
        return {"done": True}

    @graph.step(agent="asker", waits=True)
    async def ask(state):
        with ks.stage("asking"):
            await work("asked")
        return {}

    graph.entry("judge")
    graph.edge("judge", "ask")
    graph.exit("ask")
    dag = ks.Dag("naming.dag")

    @dag.step(agent="builder", stage="build")
    async def build():
        return 1

    async with world.engine() as engine:
        run = await engine.start(graph, {})
        await run.result()
        found = [(one.kind.value, one.agent, one.stage) for one in await run.checkpoints() if one.agent]
        assert found == [
            ("step failed", "critic", "review"),
            ("step completed", "critic", "review"),
            ("emitted", "asker", "asking"),
            ("step completed", "asker", "asking"),
            ("step completed", "asker", None),
        ]
        run = await engine.start(dag)
        await run.result()
        assert await names(run) == {"build#1": ("builder", "build")}


@pytest.mark.one_store
async def test_events_and_audit_have_names(world):
    seen = []

    @ks.workflow(name="naming.events")
    async def naming():
        with ks.acting("critic"), ks.stage("review"):
            await work("one")

    async with world.engine(observers=[seen.append]) as engine:
        run = await engine.start(naming)
        await run.result()
        watched = [event async for event in run.watch()]
        entries = await audit(engine, run.id)
    for events in (seen, watched):
        named = {event.name: (event.agent, event.stage) for event in events}
        assert named["step.completed"] == named["token.emitted"] == ("critic", "review")
        assert named["run.started"] == (None, None)
    assert ("step.started", "critic") in [(event.name, event.agent) for event in seen]
    assert [(one.agent, one.stage) for one in entries if one.what == "step completed"] == [("critic", "review")]


def test_names_do_nothing_outside_a_run():
    with ks.acting("critic"), ks.stage("review"):
        assert work.fn is not None
    with pytest.raises(ks.DefinitionError, match="agent name"):
        ks.acting("")
    with pytest.raises(ks.DefinitionError, match="stage name"):
        ks.stage(7)
