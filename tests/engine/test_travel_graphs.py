"""Time travel of graphs and dags: their states are those of the point gone back to, and finished branches stay done."""

import asyncio

import pytest

import keepstep as ks
from keepstep import errors
from tests.engine.test_rewind import is_sound, seq_of
from tests.engine.test_versions import parked, review
from tests.engine.world import until, until_status


def writing(effects, **options):
    """A graph that goes round three times and then waits: its state grows by one word a turn."""
    graph = ks.Graph("writing", reducers={"seen": "append"}, **options)

    @graph.step
    async def draft(state):
        effects.append("draft")
        return {"text": [*state.get("text", ()), f"word {len(state.get('text', ()))}"]}

    @graph.step
    async def publish(state):
        effects.append("publish")
        return {"done": state["text"]}

    graph.wait("gate", signal="go", into="answer")
    graph.edge("draft", "draft", when=lambda state: len(state["text"]) < 3)
    graph.edge("draft", "gate")
    graph.edge("gate", "publish")
    graph.entry("draft")
    graph.exit("publish")
    return graph


async def test_a_graph_goes_back_to_an_earlier_turn(world, effects):
    graph = writing(effects)
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        await run.signal("go", "yes")
        first = await run.result(30)
        assert (await run.rewind(step="draft#3")).again[0] == "draft#3"
        assert await run.result(30) == first
        state = await run.state(await seq_of(run, "draft#2"))
        assert list(state["text"]) == ["word 0", "word 1"]
        assert (await run.rewind(step="gate")).again == ("gate#1/wait_for:go#1", "gate#1", "publish#1")
        assert await run.result(30) == first
        assert await is_sound(engine)
    assert effects == ["draft"] * 3 + ["publish", "draft", "publish", "publish"]


@pytest.mark.live_only  # a state is written after a step that was not replayed
async def test_a_long_graph_goes_back_beyond_a_consolidated_state(world, effects):
    graph = ks.Graph("long")

    @graph.step
    async def turn(state):
        effects.append("turn")
        return {"count": state.get("count", 0) + 1}

    graph.edge("turn", "turn", when=lambda state: state["count"] < 200)
    graph.entry("turn")
    graph.exit("turn")
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        assert await run.result(60) == {"count": 200}
        kinds = [one.kind.value for one in await run.checkpoints()]
        assert kinds.count("consolidated state") >= 2
        effects.clear()
        for number in (190, 70, 10):
            await run.rewind(step=f"turn#{number}")
            assert await run.result(60) == {"count": 200}
            assert len(effects) == 201 - number
            effects.clear()
        fork = await engine.fork("r", step="turn#150", run_id="f")
        assert await fork.result(60) == {"count": 200}
        assert len(effects) == 51
        assert await is_sound(engine)


async def test_finished_branches_stay_done(world, effects):
    graph = ks.Graph("sending")
    for name in ("tweet", "mail"):

        async def step(state, name=name):
            effects.append(name)
            return {name: True}

        graph.add(step, name=name)

    @graph.step
    async def done(state):
        effects.append("done")
        return {"done": True}

    graph.wait("confirmed", signal="go")
    graph.edge("mail", "confirmed")
    graph.parallel("send", ["tweet", "mail"], join="done")
    graph.entry("send")
    graph.exit("done")
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        await run.signal("go")
        first = await run.result(30)
        [at] = [one.seq for one in await run.checkpoints() if one.step.endswith("/tweet#1")]
        [other] = [one.seq for one in await run.checkpoints() if one.step.endswith("/mail#1")]
        effects.clear()
        await run.rewind(max(at, other))
        assert await run.result(30) == first
        assert effects == ["done"]
        effects.clear()
        await run.rewind(step="send")
        assert await run.result(30) == first
        assert sorted(effects) == ["done", "mail", "tweet"]


async def test_fork_takes_another_state_and_another_next_step(world, effects):
    graph = writing(effects)
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        at = await seq_of(run, "draft#2")
        fork = await engine.fork("r", at, state={"text": ["mine", "yours"]}, run_id="f", actor="ann", reason="better")
        await fork.signal("go")
        assert (await fork.result(30))["done"] == ["mine", "yours", "word 2"]
        other = await engine.fork("r", at, next="publish", run_id="g")
        assert (await other.result(30))["done"] == ["word 0", "word 1"]
        found = await run.diff(at, other=fork)
        assert found.state["text"] == (["word 0", "word 1"], ["mine", "yours", "word 2"])
        assert (await run.diff(at - 1, at)).state == {"text": (["word 0"], ["word 0", "word 1"])}
        with pytest.raises(ks.DefinitionError, match="has no step 'nowhere'"):
            await engine.fork("r", at, next="nowhere")
        [edit] = [one for one in await fork.checkpoints() if one.kind.value == "superseded"]
        assert edit.trigger.value == "manual"
        assert await is_sound(engine)


async def test_a_function_has_no_state_to_edit(world, effects):
    @ks.workflow
    async def plain():
        return 1

    async with world.engine() as engine:
        await (await engine.start(plain, run_id="r")).result(30)
        with pytest.raises(ks.DefinitionError, match="carries no state"):
            await engine.fork("r", state={"a": 1})


# -- migration ---------------------------------------------------------------------------------------------------------


async def test_the_state_of_a_graph_is_migrated_once(world, effects):
    await parked(world, review(effects, "draft", "critic", "publish"))
    seen = []

    def migrate(old):
        seen.append((old.version, dict(old.state), old.next, "step critic" in old.definition))
        return {**old.state, "judged": old.state["critic"]}, "gate"

    new = review(effects, "draft", "judge", "publish", version="2", migrate=migrate)
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.resume()
        await until(lambda: seen)
        await until_status(run, "waiting")
        await world.crash(engine)
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(30) == {"draft": True, "critic": True, "judged": True, "publish": True}
        assert await is_sound(engine)
        assert seen == [("1", {"draft": True, "critic": True}, "gate", True)]
        await run.rewind(step="publish")
        await run.result(30)
        assert len(seen) == 1
        await run.rewind(step="critic")  # before the migration: it is asked once more, from the state then
        with pytest.raises(ks.RunSetAside, match="KeyError: 'critic'"):
            await run.result(30)
    assert effects == ["draft", "critic", "publish", "publish"]


async def test_a_migration_and_its_state_are_one_point(world, effects):
    """Between the two the run would be of the new definition, with a history of the old one."""
    await parked(world, review(effects, "draft", "critic", "publish"))
    new = review(effects, "write", "judge", "publish", version="2", migrate=lambda old: ({"moved": True}, "gate"))
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(30) == {"moved": True, "publish": True}
        migrated = next(one.seq for one in await run.checkpoints() if one.kind.value == "superseded")
        fork = await engine.fork("r", at=migrated, run_id="f")
        assert await fork.result(30) == {"moved": True, "publish": True}
        assert (await run.rewind(to=migrated)).to == migrated + 1
        assert await run.result(30) == {"moved": True, "publish": True}
        assert await is_sound(engine)


async def test_a_migration_to_a_step_that_is_not_there_is_refused(world, effects):
    await parked(world, review(effects, "draft", "critic", "publish", interrupt_before=["critic"]))
    new = review(effects, "draft", "judge", "publish", version="2", migrate=lambda old: None)
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.resume()
        with pytest.raises(ks.RunSetAside, match="graph 'review' has no step 'critic'") as refused:
            await run.result(30)
        assert isinstance(refused.value.__cause__, errors.RebuildFailed)
    new = review(effects, "draft", "judge", "publish", version="2", migrate=lambda old: (None, "judge"))
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.retry()
        await run.signal("go")
        assert await run.result(30) == {"draft": True, "judge": True, "publish": True}
    assert effects == ["draft", "judge", "publish"]


async def test_what_is_done_inside_a_parallel_part_is_not_migrated_away(world, effects):
    def sending(**options):
        graph = ks.Graph("sending", **options)

        async def tweet(state):
            effects.append("tweet")

        async def done(state):
            return {"done": True}

        graph.add(tweet)
        graph.add(done)
        graph.wait("confirmed", signal="go")
        graph.parallel("send", ["tweet", "confirmed"], join="done")
        graph.entry("send")
        graph.exit("done")
        return graph

    await parked(world, sending())
    new = sending(version="2", migrate=lambda old: None)
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        with pytest.raises(ks.RunSetAside, match=r"inside 'send', and send#1\.tweet/tweet#1, which is done"):
            await run.result(30)
    async with world.engine(workflows=[sending()]) as engine:
        run = await engine.get("r")
        await run.retry()
        assert await run.result(30) == {"done": True}
    assert effects == ["tweet"]


async def test_a_breakpoint_that_was_passed_holds_again_after_a_rewind(world, effects):
    """What a person said about the first visit is past: it does not let the second one through."""
    graph = review(effects, "draft", "pay", "publish", interrupt_before=["pay"])
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        await run.signal("go")
        for turn in (1, 2):
            await until_status(run, "waiting", "completed")
            assert effects.count_of() == {"draft": turn} | ({"pay": 1, "publish": 1} if turn == 2 else {})
            await run.resume()
            await run.result(30)
            if turn == 1:
                await run.rewind(step="draft")
        assert await is_sound(engine)
    assert effects == ["draft", "pay", "publish"] * 2


async def test_another_step_is_next_while_one_is_to_be_tried_again(world, effects):
    """Its attempts no longer count: they had the place that the other one gets."""
    graph = ks.Graph("tries")

    @graph.step(retry=ks.Retry(attempts=5, base_seconds=3600, cap_seconds=3600))
    async def fetch(state):
        effects.append("fetch")
        raise ConnectionError("not there")

    @graph.step
    async def guess(state):
        return {"guessed": True}

    graph.edge("fetch", "guess")
    graph.entry("fetch")
    graph.exit("guess")
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        tried = await seq_of(run, "fetch#1", "step failed")
        with pytest.raises(
            errors.DefinitionError, match=rf"began fetch#1 at seq {tried}.*; fork it at seq {tried - 1}"
        ):
            await engine.fork("r", next="guess", run_id="f")
        fork = await engine.fork("r", at=tried - 1, next="guess", run_id="f")
        assert await fork.result(30) == {"guessed": True}
        await run.edit({"why": "it is down"}, next="guess")
        assert await run.result(30) == {"why": "it is down", "guessed": True}
        assert await is_sound(engine)
    assert effects == ["fetch"]


async def test_another_step_is_not_next_while_one_is_in_doubt(world, effects):
    graph = ks.Graph("doubts")

    @graph.step(at_most_once=True, timeout=0.05)
    async def pay(state):
        await asyncio.sleep(60)

    @graph.step
    async def thank(state):
        return {"thanked": True}

    graph.edge("pay", "thank")
    graph.entry("pay")
    graph.exit("thank")
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        with pytest.raises(errors.RunConflict, match=r"pay#1 may or may not have happened; resolve it first"):
            await run.edit({}, next="thank")
        with pytest.raises(errors.DefinitionError, match=r"began pay#1 at seq \d+"):
            await engine.fork("r", next="thank")
        await run.resolve("pay#1", "result", {"paid": 5})
        assert await run.result(30) == {"paid": 5, "thanked": True}
        assert await is_sound(engine)


@pytest.mark.parametrize("other", [{"state": {"x": 2}}, {"next": "done"}, {"state": {"x": 2}, "next": "send"}])
async def test_the_state_is_not_changed_inside_a_parallel_part(world, effects, other):
    """What is done there was done with the state as it was, in a fork as in the run itself."""
    graph = ks.Graph("sending")

    async def tweet(state):
        effects.append(f"tweet {state['x']}")

    async def done(state):
        effects.append(f"done {state['x']}")

    graph.add(tweet)
    graph.add(done)
    graph.wait("confirmed", signal="go")
    graph.parallel("send", ["tweet", "confirmed"], join="done")
    graph.entry("send")
    graph.exit("done")
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, {"x": 1}, run_id="r")
        await until_status(run, "waiting")
        with pytest.raises(ks.DefinitionError, match=r"at seq 2: step 'send' was running .* Fork at seq 1 or before"):
            await engine.fork("r", run_id="f", **other)
        with pytest.raises(ks.RunNotFound):
            await engine.get("f")
        fork = await engine.fork("r", at=1, run_id="f", **other)
        await fork.signal("go")
        x = other.get("state", {"x": 1})["x"]
        assert await fork.result(30) == {"x": x}
        assert effects[-1] == f"done {x}"
        with pytest.raises(ks.RunConflict, match=r"step 'send' of run .* is running with the old state"):
            await run.edit(other.get("state"), next=other.get("next"))
    async with world.engine(worker=False, workflows=[graph]) as engine:
        run = await engine.get("r")
        await run.rewind(1)
        await run.edit({"x": 3})  # as the message advises: what is superseded is no longer under way
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(30) == {"x": 3}


# -- dags --------------------------------------------------------------------------------------------------------------


async def test_a_dag_goes_back_and_is_forked(world, effects):
    dag = ks.Dag("build")

    @dag.step
    async def fetch():
        effects.append("fetch")
        return effects.count("fetch")

    @dag.step
    async def lint():
        effects.append("lint")
        return 5

    @dag.step(needs=["fetch", "lint"])
    async def link(fetch, lint):
        effects.append("link")
        return fetch + lint

    async with world.engine(workflows=[dag]) as engine:
        run = await engine.start(dag, run_id="r")
        assert await run.result(30) == {"link": 6}
        await run.rewind(step="link")
        assert await run.result(30) == {"link": 6}
        assert effects.count_of() == {"fetch": 1, "lint": 1, "link": 2}
        fork = await engine.fork("r", step="link", results={"lint": 50}, run_id="f")
        assert await fork.result(30) == {"link": 51}
        await run.rewind(1)
        assert await run.result(30) == {"link": 7}
        assert await is_sound(engine)


async def test_consolidation_after_another_change_keeps_that_change(world, effects, monkeypatch):
    graph = writing(effects)
    async with world.engine(workflows=[graph]) as engine, world.engine(workflows=[graph], worker=False) as other:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        late, seen = await other.get("r"), await other.read(other.store.get_run, "r")
        await run.edit({"text": ["another"]})
        await until_status(run, "waiting")
        read = other.read
        as_it_was = iter([seen])

        async def behind(function, *words, **more):
            return next(as_it_was, None) or await read(function, *words, **more)

        monkeypatch.setattr(other, "read", behind)
        await late.consolidate()
        assert list((await run.state())["text"]) == ["another"]
        assert await is_sound(engine)
