"""A graph's state says what it is based on, and events say which step was loaded, resumed after and left."""

from __future__ import annotations

import keepstep as ks


def relay(name, seen):
    graph = ks.Graph(name, reducers={"total": lambda old, new: seen.append(("reducer", ks.run_id())) or old + new})

    @graph.step
    async def first(state):
        seen.append(("first", state.provenance))
        return {"total": 1}

    graph.wait("gate", signal="go", into="went")

    @graph.step
    async def last(state):
        seen.append(("last", state.provenance))
        return {"total": 2}

    graph.edge("first", "gate")
    graph.edge("gate", "last")
    graph.entry("first")
    graph.exit("last")
    return graph


async def test_the_first_state_knows_its_run_and_its_time(world):
    seen = []
    async with world.engine() as engine:
        run = await engine.start(relay("identity first", seen), run_id="r")
        await run.reached("waiting")
        created = (await run.run()).created_at
        assert seen == [("first", ("r", None, created))]
        assert (await run.state(1)).provenance == ("r", None, created)
        await run.signal("go")
        await run.result()
        assert ("reducer", "r") in seen
        assert [state[:2] for name, state in seen if name == "last"] == [("r", "gate#1")]


async def test_an_edge_is_told_with_both_its_steps(world):
    told = []
    async with world.engine(observers=[told.append]) as engine:
        run = await engine.start(relay("identity edges", []), run_id="r")
        await run.signal("go")
        await run.result()
        edges = [(event.step, event.data["next"]) for event in told if event.name == "edge.taken"]
        assert edges == [("first#1", "gate"), ("gate#1", "last"), ("last#1", "")]
        durable = {one.step: one.seq for one in await run.checkpoints() if one.step in ("first#1", "gate#1", "last#1")}
        assert {event.step: event.seq for event in told if event.name == "edge.taken"} == durable


async def test_a_run_that_is_loaded_names_its_newest_step(world):
    graph, told = relay("identity loaded", []), []

    @ks.step
    async def one():
        return 1

    @ks.workflow(name="identity function")
    async def function():
        await one()
        await ks.wait_for("go")

    async with world.engine() as engine:
        for workflow, name in ((graph, "g"), (function, "f")):
            await (await engine.start(workflow, run_id=name)).reached("waiting")
    async with world.engine(observers=[told.append]) as engine:
        for name in ("g", "f"):
            run = await engine.get(name)
            await run.signal("go")
            await run.result()
    for event in ("run.loaded", "run.resumed"):
        steps = {one.run: one.step for one in reversed(told) if one.name == event}  # the first of each
        assert steps == {"g": "first#1", "f": "one#1"}, event
