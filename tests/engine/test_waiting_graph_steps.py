"""A step of a graph that waits inside its body: nothing before the wait runs again."""

from dataclasses import dataclass

import pytest

import keepstep as ks
from keepstep import testing
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere
from tests.engine.world import steps_of, told, until_status


def reviewed(effects, **options):
    """A graph whose middle step drafts, asks a person, and polishes."""
    graph = ks.Graph("reviewed", **options)

    @ks.step
    async def draft(topic):
        effects.append(f"draft {topic}")
        return f"about {topic}"

    @ks.step
    async def polish(text, note):
        effects.append(f"polish {note}")
        return f"{text}, {note}"

    @graph.step
    async def begin(state):
        effects.append("begin")
        return {"seen": 1}

    @graph.step(waits=True)
    async def review(state):
        text = await draft(state["topic"])
        ks.publish("draft", text)
        note = await ks.wait_for("note")
        if note == "again":
            return ks.Goto("begin", text=text)
        return {"text": await polish(text, note)}

    @graph.step
    async def end(state):
        effects.append("end")
        return {"end": state["text"].upper()}

    graph.edge("begin", "review")
    graph.edge("review", "end")
    graph.entry("begin")
    graph.exit("end")
    return graph


async def test_step_waits_and_nothing_before_the_wait_runs_again(world, effects):
    engine = await world.started()
    run = await engine.start(reviewed(effects), topic="cats")
    await until_status(run, "waiting")
    assert (await run.published())["draft"] == "about cats"
    engine = await world.crash_and_recover(engine)
    run = await engine.get(run.id)
    await run.signal("note", "short")
    result = await run.result(30)
    assert result == {"topic": "cats", "seen": 1, "text": "about cats, short", "end": "ABOUT CATS, SHORT"}
    assert effects == ["begin", "draft cats", "polish short", "end"]
    assert await steps_of(run) == [
        *("begin#1", "review#1/draft#1", "review#1/polish#1", "review#1", "end#1"),
    ]
    before = await told(run)
    await engine.close()
    async with world.engine() as engine:
        assert await told(await engine.get(run.id)) == before


async def test_step_that_waits_may_go_elsewhere_and_is_visited_again(world, effects):
    async with world.engine() as engine:
        run = await engine.start(reviewed(effects), topic="cats")
        await run.signal("note", "again")
        await run.signal("note", "short")
        assert (await run.result(30))["end"] == "ABOUT CATS, SHORT"
    assert effects == ["begin", "draft cats", "begin", "draft cats", "polish short", "end"]


async def test_steps_that_wait_in_parallel_branches_park_together(world, effects):
    graph = ks.Graph("both", reducers={"notes": "append"})

    def asking(name):
        @graph.step(name=name, waits=True)
        async def ask(state):
            effects.append(name)
            return {"notes": [await ks.wait_for(name)]}

    asking("left")
    asking("right")

    @graph.step
    async def join(state):
        return {"all": sorted(state["notes"])}

    graph.parallel("fork", ["left", "right"], "join")
    graph.entry("fork")
    graph.exit("join")
    async with world.engine() as engine:
        run = await engine.start(graph, notes=[])
        await until_status(run, "waiting")
        await run.signal("right", 2)
        await run.signal("left", 1)
        assert (await run.result(30))["all"] == [1, 2]


async def test_step_that_waits_changes_its_stage(world):
    graph = ks.Graph("staged")

    @graph.step(waits=True, stage="inner")
    async def ask(state, stage):
        await ks.sleep(0.001)
        return ks.Changes({"a": 1}, stage={"count": stage.get("count", 0) + 1})

    graph.entry("ask")
    graph.exit("ask")
    async with world.engine() as engine:
        run = await engine.start(graph)
        assert await run.result(30) == {"a": 1}
        assert dict(await run.state(stage="inner")) == {"count": 1}


async def test_error_of_a_step_that_waits_names_the_step_and_can_be_retried(world, effects):
    graph = ks.Graph("failing")

    @ks.step
    async def work():
        effects.append("work")
        if len(effects) == 1:
            raise OSError("away")
        return len(effects)

    @graph.step(waits=True)
    async def ask(state):
        return {"answer": await ks.wait_for("answer"), "work": await work()}

    graph.entry("ask")
    graph.exit("ask")
    async with world.engine() as engine:
        run = await engine.start(graph)
        await run.signal("answer", 1)
        with pytest.raises(ks.ExecutionError, match=r"step 'ask' failed.*away"):
            await run.result(30)
        await run.retry()
        assert await run.result(30) == {"answer": 1, "work": 2}


def test_wait_of_days_inside_a_step_of_a_graph_is_durable():
    with testing.world() as world:
        run = world.start(reviewed([]), topic="cats")
        world.advance(days=30)
        assert run.status() == ks.Status.WAITING
        run.signal("note", "short")
        assert run.result()["end"] == "ABOUT CATS, SHORT"


async def test_crash_at_every_write_repeats_no_recorded_step():
    effects = []

    async def play(engine):
        run = await engine.start(reviewed(effects), run_id="r", topic="cats")
        await run.signal("note", "short", id="one")
        return await run.result(30)

    async def judge(disk, lives):
        assert lives.result["end"] == "ABOUT CATS, SHORT"
        assert max(effects.count(one) for one in effects) <= 1 + lives.crashes
        effects.clear()

    assert await crash_everywhere(MemoryDisk, play, judge) >= 8


async def test_state_is_not_recorded_inside_a_step_that_waits(world, effects):
    async with world.engine() as engine:
        run = await engine.start(reviewed(effects), topic="cats")
        await until_status(run, "waiting")
        with pytest.raises(ks.RunConflict, match="inside 'review'"):
            await run.consolidate()
        await run.signal("note", "short")
        assert (await run.result(30))["end"] == "ABOUT CATS, SHORT"
    assert effects.count("draft cats") == 1


async def bare(state):
    return {}


@pytest.mark.parametrize("what, options", [(lambda state: {}, {}), (ks.step(bare), {}), (bare, {"timeout": 3})])
def test_step_that_waits_is_a_bare_async_function(what, options):
    with pytest.raises(ks.DefinitionError, match="waits=True"):
        ks.Graph("wrong").add(what, "wrong", waits=True, **options)


def test_definition_says_that_a_step_waits():
    assert "step review waits" in reviewed([]).definition()


async def test_child_of_a_step_that_waits_is_awaited(world, effects):
    @ks.workflow
    async def child(number):
        await ks.sleep(0.01)
        return number + 1

    graph = ks.Graph("parent")

    @graph.step(waits=True)
    async def ask(state):
        started = await ks.start(child, 1)
        return {"answer": await started.result()}

    graph.entry("ask")
    graph.exit("ask")
    async with world.engine() as engine:
        assert await (await engine.start(graph)).result(30) == {"answer": 2}


async def test_silent_wait_of_a_graph_is_over(world):
    graph = ks.Graph("silent")
    graph.wait("model", signal="model", into="model", default="silent", heartbeat=0.05)
    graph.entry("model")
    graph.exit("model")

    async with world.engine() as engine:
        assert await (await engine.start(graph, {})).result(30) == {"model": "silent"}


def test_beats_prolong_the_wait_of_a_graph():
    graph = ks.Graph("beating")
    graph.wait("model", into="model", heartbeat=60)
    graph.entry("model")
    graph.exit("model")

    with testing.world() as world:
        run = world.start(graph, {})
        for _ in range(3):
            world.advance(50)
            run.beat("model")
        world.advance(50)
        run.signal("model", "done")
        assert run.result() == {"model": "done"}


@dataclass
class Small:
    n: int = 0

    def __post_init__(self):
        assert self.n <= 10, "too large"


@pytest.mark.parametrize("form", ["waits", "wait", "child", "goto"])
async def test_dry_replay_of_a_result_that_its_schema_refuses_fits(world, form):
    graph = ks.Graph(f"small-{form}", schema=Small)

    @ks.workflow(name="large child")
    async def child() -> int:
        return 99

    async def ask(state):
        return {"n": await ks.wait_for("word")}

    if form == "waits":
        graph.add(ask, name="ask", waits=True)
    elif form == "wait":
        graph.wait("ask", signal="word", into="n")
    elif form == "child":
        graph.add(child, name="ask", gives="n")
    else:
        graph.add(lambda state: ks.Goto("ask", n=1), name="begin")
        graph.add(ask, name="ask", waits=True)
        graph.edge("begin", "ask")
    graph.entry("begin" if form == "goto" else "ask")
    graph.exit("ask")
    async with world.engine() as engine:
        run = await engine.start(graph, {}, run_id="r")
        if form != "child":
            await run.signal("word", 99)
        with pytest.raises(ks.RunFailed, match="too large"):
            await run.result(30)
        replayed = await run.replay()
        assert (replayed.fits, replayed.ended, replayed.problem) == (True, True, "")
        assert "a person may retry" in (await run.info()).why
