"""Graphs: what their records say is what they carry, and a recovery goes the way that was gone."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from dataclasses import dataclass
from typing import TypedDict

import apsw
import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.errors import DuplicateName, InvalidGraph
from keepstep.history import rewind as rewinding
from keepstep.kernel import replay
from keepstep.kernel.graph import position, walk
from keepstep.model import Kind, Signal
from keepstep.model.signal import GO
from keepstep.ports import Send
from tests.engine.world import until, until_recorded, until_status


def review(ran=None, **options):
    """A draft that is criticised until it is good enough, and then published in two ways at once."""
    graph = ks.Graph("review", reducers={"log": "append"}, **options)
    ran = [] if ran is None else ran

    def noted(name, change):
        ran.append(name)
        return {**change, "log": [name]}

    @graph.step
    async def draft(state):
        return noted("draft", {"round": state.get("round", 0) + 1})

    @graph.step
    def critic(state):
        return noted("critic", {"score": state["round"] / 3})

    @graph.step
    async def tweet(state):
        return noted("tweet", {"tweeted": state["round"]})

    @graph.step
    async def mail(state):
        return noted("mail", {"mailed": 1})

    @graph.step
    async def post(state):
        return noted("post", {"mailed": state["mailed"] + 1})

    @graph.step
    async def done(state):
        return noted("done", {})

    graph.edge("draft", "critic")
    graph.edge("critic", "draft", when=lambda state: state["score"] < 0.9)
    graph.edge("critic", "publish")
    graph.edge("mail", "post")
    graph.parallel("publish", ["tweet", "mail"], join="done")
    graph.entry("draft")
    graph.exit("done")
    return graph


class Counted(TypedDict, total=False):
    """A state that holds a number."""

    count: int


LOG = ["draft", "critic"] * 3 + ["tweet", "mail", "post", "done"]
END = {"topic": "x", "round": 3, "score": 1.0, "tweeted": 3, "mailed": 2, "log": LOG}


async def test_a_graph_goes_from_its_entry_to_an_exit(world):
    ran = []
    graph = review(ran)
    async with world.engine() as engine:
        run = await engine.start(graph, {"topic": "x"}, run_id="r")
        assert await run.result() == END
        assert sorted(ran) == sorted(LOG)
        state = await run.state()
        assert dict(state) == END
        assert (state.run_id, state.checkpoint_step) == ("r", "done#1")


async def test_a_graph_is_started_with_keywords_too(world):
    async with world.engine() as engine:
        assert await (await engine.start(review(), topic="x")).result() == END


async def test_the_record_of_a_step_is_what_it_changed_and_where_it_went(world):
    async with world.engine() as engine:
        run = await engine.start(review(), {"topic": "x"}, run_id="r")
        await run.result()
        steps = {one.step: one for one in await run.checkpoints() if one.kind is Kind.STEP_COMPLETED}
        assert json.loads(steps["draft#2"].value) == {"set": {"round": 2}, "appended": {"log": ["draft"]}}
        assert "publish#1.mail/post#1" in steps


async def test_the_state_at_any_checkpoint_is_the_fold_up_to_it(world):
    async with world.engine() as engine:
        run = await engine.start(review(), {"topic": "x"}, run_id="r")
        await run.result()
        expected = {"topic": "x"}
        for one in await run.checkpoints():
            if one.kind is Kind.STEP_COMPLETED and "/" not in one.step:
                name = one.step.partition("#")[0]
                expected = {**expected, "log": [*expected.get("log", []), name]}
                found = await run.state(one.seq)
                if name != "done":
                    assert found["log"] == expected["log"]
        assert dict(await run.state(0)) == {"topic": "x"}
        with pytest.raises(ks.DefinitionError, match="got 99"):
            await run.state(99)


@pytest.mark.live_only
async def test_a_recovery_takes_the_edge_that_was_taken(world):
    answers, reached, hold = ["left"], asyncio.Event(), asyncio.Event()

    def graph():
        made = ks.Graph("crossing")

        @made.step
        async def ask(state):
            return {}

        @made.step
        async def left(state):
            reached.set()
            await hold.wait()
            return {"went": "left"}

        @made.step
        async def right(state):
            return {"went": "right"}

        made.edge("ask", "left", when=lambda state: answers[-1] == "left")
        made.edge("ask", "right")
        made.entry("ask")
        made.exit("left", "right")
        return made

    engine = await world.started()
    await engine.start(graph(), run_id="r")
    await reached.wait()
    answers.append("right")  # the predicate would answer otherwise now
    hold.set()
    again = graph()
    engine = await world.crash_and_recover(engine, workflows=[again])
    run = await engine.get("r")
    assert await run.result() == {"went": "left"}
    await engine.close()


async def test_max_iterations_count_all_steps_of_a_run(world):
    graph = ks.Graph("rounds", max_iterations=5)

    @graph.step
    async def turn(state):
        return {"n": state.get("n", 0) + 1}

    @graph.step
    async def back(state):
        return {"n": state["n"] + 1}

    graph.edge("turn", "back")
    graph.edge("back", "turn")
    graph.entry("turn")
    graph.exit("turn")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        with pytest.raises(ks.ExecutionError, match="the run passed 5 steps, which is max_iterations"):
            await run.result()
        assert (await run.state())["n"] == 5


@pytest.mark.parametrize("consolidated", [False, True])
async def test_steps_in_branches_count_when_they_join(world, monkeypatch, consolidated):
    """A turn is the two steps in the branches, the parallel part and the step that leads back: four."""
    monkeypatch.setattr(position, "ENOUGH_DELTAS", 1 if consolidated else 64)
    monkeypatch.setattr(position, "MOST_RECORDS", 2 if consolidated else 1000)
    graph = ks.Graph("turns", max_iterations=10, reducers={"n": "add"})

    async def count(state):
        return {"n": 1}

    for name in ("left", "right", "back"):
        graph.add(count, name)
    graph.parallel("fan", ["left", "right"], join="back")
    graph.edge("back", "fan")
    graph.entry("fan")
    graph.exit("back")
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 0}, run_id="r")
        with pytest.raises(ks.ExecutionError, match="passed 11 steps") as raised:
            await run.result()
        assert raised.value.step == "back"
        assert (await run.state())["n"] == 8


async def test_an_error_names_the_step_and_the_path_and_is_retried_there(world):
    broken = [True]
    ran = []
    graph = ks.Graph("failing")

    @graph.step
    async def one(state):
        ran.append("one")
        return {"a": 1}

    @graph.step
    async def two(state):
        ran.append("two")
        if broken:
            raise ValueError("no luck")
        return {"b": state["a"] + 1}

    graph.edge("one", "two")
    graph.entry("one")
    graph.exit("two")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        with pytest.raises(ks.ExecutionError, match=r"no luck \(path: one → two\)") as caught:
            await run.result()
        assert (caught.value.step, tuple(caught.value.path)) == ("two", ("one",))
        assert dict(caught.value.state) == {"a": 1}
        assert isinstance(caught.value.__cause__, ks.StepFailed)
        broken.clear()
        await run.retry()
        assert await run.result() == {"a": 1, "b": 2}
        assert ran == ["one", "two", "two"]


async def test_the_order_of_keys_is_the_same_live_and_after_a_recovery(world):
    seen = []
    graph = ks.Graph("ordered")

    @graph.step
    async def turn(state):
        return ks.State({"b": 1, "c": 2, "a": state["a"] + 1, "in": {"y": 3, "x": 1}})  # another order than it had

    @graph.step
    async def look(state):
        seen.append((list(state), list(state["in"])))
        return {}

    graph.edge("turn", "look")
    graph.entry("turn")
    graph.exit("look")
    async with world.engine() as engine:
        run = await engine.start(graph, {"a": 0, "b": 0, "in": {"x": 1, "y": 2}})
        await run.result()
        state = await run.state()
        assert seen[-1] == (list(state), list(state["in"])) == (["a", "b", "in", "c"], ["y", "x"])


# -- parallel parts ----------------------------------------------------------------------------------------------------


def fan(graph, steps, **options):
    """Steps that are gone at once."""
    for name, body in steps.items():
        graph.add(body, name=name)
    graph.add(lambda state: None, name="end")
    graph.parallel("fan", list(steps), join="end", **options)
    graph.entry("fan")
    graph.exit("end")
    return graph


def gives(**change):
    async def body(state):
        return change

    return body


def fails(message="broken"):
    async def body(state):
        raise ks.Permanent(message)

    return body


async def test_two_parallel_writers_of_a_key_are_named(world):
    graph = fan(ks.Graph("clash"), {"a": gives(x=1), "b": gives(x=2)})
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        with pytest.raises(ks.ExecutionError) as caught:
            await run.result()
        assert "'fan#1.a/a#1' and 'fan#1.b/b#1' both write 'x'" in str(caught.value)


@pytest.mark.parametrize(
    "reducer, start, expected",
    [
        ("append", [], [1, 2]),
        ("add", 10, 13),
        ("max", 0, 2),
        ("min", 5, 1),
        (lambda old, given: f"{old}|{given}", "s", "s|1|2"),
    ],
    ids=["append", "add", "max", "min", "custom"],
)
async def test_a_reducer_makes_one_value_of_several(world, reducer, start, expected):
    graph = fan(ks.Graph("reduce", reducers={"x": reducer}), {"a": gives(x=1), "b": gives(x=2)})
    async with world.engine() as engine:
        assert (await (await engine.start(graph, {"x": start})).result())["x"] == expected


def whole(key, more):
    async def body(state):
        return state.set(key, [*state[key], more])

    return body


async def test_whole_value_replaces_what_its_branch_gave_before(world):
    graph = fan(ks.Graph("over", reducers={"log": "append"}), {"a": gives(log="a"), "other": gives(x=1)})
    graph.add(whole("log", "b"), name="b")
    graph.add(gives(log="c"), name="c")
    graph.edge("a", "b")
    graph.edge("b", "c")
    async with world.engine() as engine:
        result = await (await engine.start(graph, log=["first"])).result()
        assert result == {"log": ["first", "a", "b", "c"], "x": 1}


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids=str)
async def test_whole_value_beside_a_given_one_conflicts_in_any_order(world, order):
    steps = {"a": gives(log="a"), "b": whole("log", "b")}
    graph = fan(ks.Graph("beside", reducers={"log": "append"}), {name: steps[name] for name in order})
    async with world.engine() as engine:
        run = await engine.start(graph, log=[])
        with pytest.raises(ks.ExecutionError, match=r"'fan#1.b/b#1' writes 'log' whole, while 'fan#1.a/a#1' gives"):
            await run.result()


async def test_any_goes_on_with_the_first_and_cancels_the_rest(world):
    async def forever(state):
        await asyncio.sleep(60)

    graph = fan(ks.Graph("any"), {"a": gives(a=1), "b": forever}, wait=ks.Any(), report="how")
    async with world.engine() as engine:
        result = await (await engine.start(graph)).result()
        assert result["a"] == 1
        assert result["how"] == {"coverage": 0.5, "degraded": True, "failed": {}}


async def test_quorum_tolerates_failed_branches(world):
    graph = fan(
        ks.Graph("quorum"), {"a": gives(a=1), "b": fails("b is ill"), "c": gives(c=1)}, wait=ks.Quorum(2), report="how"
    )
    async with world.engine() as engine:
        result = await (await engine.start(graph)).result()
        assert {"a", "c"} <= set(result)
        assert not result["how"]["degraded"] or result["how"]["coverage"] < 0.7


async def test_a_branch_that_fails_does_not_repeat_its_siblings(world):
    broken, ran = [True], []

    async def good(state):
        ran.append("good")
        return {"good": 1}

    async def bad(state):
        ran.append("bad")
        if broken:
            raise ValueError("not yet")
        return {"bad": 1}

    graph = fan(ks.Graph("siblings"), {"good": good, "bad": bad}, collect=True, report="how")
    strict = fan(ks.Graph("strict"), {"good": good, "bad": bad})
    async with world.engine() as engine:
        result = await (await engine.start(graph)).result()
        assert result["good"] == 1
        assert list(result["how"]["failed"]) == ["bad"]
        ran.clear()
        run = await engine.start(strict, run_id="strict")
        with pytest.raises(ks.ExecutionError, match="not yet"):
            await run.result()
        broken.clear()
        await run.retry()
        assert await run.result() == {"good": 1, "bad": 1}
        assert ran.count("good") == 1
        assert ran.count("bad") == 2


async def test_retry_keeps_siblings_that_began_after_the_failure(world):
    """All of them begin together; the one that fails does so before the others have begun their bodies."""
    broken, ran = [True], []

    async def bad(state):
        if broken:
            raise ValueError("not yet")
        return {"bad": 1}

    async def good(state):
        ran.append("good")
        await asyncio.sleep(0)
        return {"good": 1}

    graph = fan(ks.Graph("together"), {"bad": bad, "good": good})
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        with pytest.raises(ks.ExecutionError, match="not yet"):
            await run.result()
        done = [one.step for one in await run.checkpoints() if one.kind is Kind.STEP_COMPLETED]
        broken.clear()
        await run.retry()
        assert await run.result() == {"good": 1, "bad": 1}
        assert ran.count("good") == (1 if done else 2)


# -- other points ------------------------------------------------------------------------------------------------------


@ks.step
async def double(number: int) -> int:
    return number * 2


async def test_a_map_goes_over_a_list_in_the_state(world):
    graph = ks.Graph("mapping")
    graph.map("all", double, over="numbers", into="doubled", concurrency=2)
    graph.entry("all")
    graph.exit("all")
    async with world.engine() as engine:
        result = await (await engine.start(graph, numbers=[3, 1, 2])).result()
        assert result == {"numbers": [3, 1, 2], "doubled": [6, 2, 4]}
        with pytest.raises(ks.ExecutionError, match=r"\['numbers'\], which is missing; it must be a list"):
            await (await engine.start(graph)).result()


async def test_a_wait_and_a_delay_are_durable(world):
    graph = ks.Graph("patient")
    graph.delay("cool", 0.01)
    graph.wait("approval", signal="approved", into="by")
    graph.wait("late", signal="never", into="late", timeout=0.01, default="nobody")
    graph.edge("cool", "approval")
    graph.edge("approval", "late")
    graph.entry("cool")
    graph.exit("late")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await run.signal("approved", "ann")
        assert await run.result() == {"by": "ann", "late": "nobody"}


async def test_a_workflow_and_a_graph_are_steps_as_child_runs(world):
    @ks.workflow(name="greet")
    async def greet(name: str) -> str:
        return f"hello {name}"

    inner = ks.Graph("inner")
    inner.add(gives(inside=1), name="only")
    inner.entry("only")
    inner.exit("only")
    graph = ks.Graph("outer")
    graph.add(greet, gives="greeting")
    graph.add(inner, takes=["name"])
    graph.edge("greet", "inner")
    graph.entry("greet")
    graph.exit("inner")
    async with world.engine() as engine:
        run = await engine.start(graph, name="bo", other=1)
        assert await run.result() == {"name": "bo", "other": 1, "greeting": "hello bo", "inside": 1}


async def test_a_step_says_itself_where_to_go(world):
    graph = ks.Graph("jump")

    @graph.step
    async def start(state):
        return ks.Goto("end", {"x": 1})

    @graph.step
    async def never(state):
        raise AssertionError

    graph.add(gives(y=2), name="end")
    graph.edge("start", "never")
    graph.entry("start")
    graph.exit("end", "never")
    async with world.engine() as engine:
        assert await (await engine.start(graph)).result() == {"x": 1, "y": 2}


async def test_stages_and_agents_have_states_of_their_own(world):
    graph = ks.Graph("levels")

    @graph.step(stage="research", agent="ann")
    async def look(state, stage, agent):
        return ks.Changes({"seen": 1}, stage={"notes": ["a"]}, agent={"mood": "curious"})

    @graph.step(stage="research")
    async def think(state, stage):
        return ks.Changes(stage={"notes": [*stage["notes"], "b"]})

    @graph.step(agent="ann")
    async def write(state, agent):
        return {"mood": agent["mood"]}

    graph.edge("look", "think")
    graph.edge("think", "write")
    graph.entry("look")
    graph.exit("write")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        assert await run.result() == {"seen": 1, "mood": "curious"}
        assert dict(await run.state(stage="research")) == {"notes": ["a", "b"]}
        assert dict(await run.state(agent="ann")) == {"mood": "curious"}


# -- what is wrong -----------------------------------------------------------------------------------------------------


class Page(TypedDict, total=False):
    title: str
    views: int


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    "returned, message",
    [
        ({"views": "many"}, r"step 'only#1': \['views'\] does not fit Page"),
        ({"other": 1}, "Page has no key 'other'; it has title, views"),
        ("text", "returned a str; a graph's step returns its change"),
        ({"title": object()}, "title"),
        (ks.Goto("nowhere"), "goes to 'nowhere', but graph .* has no such step"),
        (ks.Changes(agent={"a": 1}), "changes the state of its agent, but has no agent="),
    ],
)
async def test_invalid_return_value_of_a_step_is_named(world, returned, message):
    graph = ks.Graph("wrong", schema=Page)

    @graph.step
    async def only(state):
        return returned

    graph.entry("only")
    graph.exit("only")
    async with world.engine() as engine:
        with pytest.raises(ks.ExecutionError, match=message):
            await (await engine.start(graph)).result()


async def test_values_come_back_with_their_types(world):
    seen = []
    graph = ks.Graph("typed")

    @graph.step
    async def make(state) -> dict[str, Point]:
        return {"point": Point(1), "pair": (1, 2), "names": {"a"}}

    @graph.step
    async def use(state):
        seen.append((state["point"], state["pair"], state["names"]))
        state["names"].add("b")  # of a copy
        return {"kept": sorted(state["names"])}

    graph.edge("make", "use")
    graph.entry("make")
    graph.exit("use")
    async with world.engine() as engine:
        result = await (await engine.start(graph)).result()
        assert seen[-1] == (Point(1), (1, 2), {"a"})
        assert result["kept"] == ["a"]


async def test_edit_helps_a_run_where_no_edge_holds(world):
    graph = ks.Graph("stuck")
    graph.add(gives(x=1), name="a")
    graph.add(gives(y=2), name="b")
    graph.edge("a", "b", when=ks.when.equals("x", 2))
    graph.entry("a")
    graph.exit("b")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        with pytest.raises(ks.ExecutionError, match="no edge from 'a' holds, and it is not an exit"):
            await run.result()
        await run.edit({"x": 2}, reason="helped")
        assert await run.result() == {"x": 2, "y": 2}
        assert "helped" in [entry.reason for entry in await run.audit()]


def test_a_definition_is_checked_as_a_whole():
    graph = ks.Graph("bad")
    graph.add(gives(), name="a")
    graph.edge("a", "b")
    with pytest.raises(InvalidGraph) as caught:
        graph.close()
    for told in ("entry", "exit", "'b'"):
        assert told in str(caught.value)
    with pytest.raises(DuplicateName):
        graph.add(gives(), name="a")
    with pytest.raises(ks.DefinitionError, match="is refused"):
        graph.add(gives(), name="a/b")


# -- breakpoints -------------------------------------------------------------------------------------------------------


async def test_a_run_stops_at_a_breakpoint_and_goes_on_with_what_was_edited(world):
    ran = []
    graph = ks.Graph("stops", interrupt_before=["pay"], interrupt_after=["pay"])

    @graph.step
    async def order(state):
        ran.append("order")
        return {"price": 100}

    @graph.step
    async def pay(state):
        ran.append("pay")
        return {"paid": state["price"]}

    graph.add(gives(end="cheap"), name="cheap")
    graph.add(gives(end="dear"), name="dear")
    graph.edge("order", "pay")
    graph.edge("pay", "cheap", when=lambda state: state["paid"] < 10)
    graph.edge("pay", "dear")
    graph.entry("order")
    graph.exit("cheap", "dear")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        assert ran == ["order"]
        await run.edit({"price": 60}, reason="a discount")
        await until_status(run, "waiting")
        await run.resume()
        await until(lambda: "pay" in ran)
        await until_status(run, "waiting")
        assert (await run.state())["paid"] == 60
        await run.edit({"paid": 6})
        await until_status(run, "waiting")
        await run.resume()
        assert await run.result() == {"price": 60, "paid": 6, "end": "cheap"}
        assert ran == ["order", "pay"]


async def test_a_state_is_not_edited_under_a_child_that_began_with_it(world):
    @ks.workflow(name="patient kid")
    async def kid(n: int) -> int:
        await ks.wait_for("go")
        return n

    graph = ks.Graph("parenting")
    graph.add(kid, name="kid", gives="kid")
    graph.wait("word")
    graph.edge("kid", "word")
    graph.entry("kid")
    graph.exit("word")
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 1}, run_id="r")

        async def born():
            return (await engine.list(parent="r", status=frozenset({ks.Status.WAITING}))).runs

        [child] = await until(born)
        await until_status(run, "waiting")
        with pytest.raises(ks.RunConflict, match=r"step 'kid' of run .* is running with the old state"):
            await run.edit({"n": 2})
        await engine.signal(child.id, "go")
        await run.signal("word")
        assert await run.result() == {"n": 1, "kid": 1}


async def test_edit_that_leads_elsewhere_leaves_a_heard_signal_unread(world):
    """The wait has heard a signal that its state cannot take: another way through the graph does not ask for it."""

    @dataclass
    class Positive:
        count: int = 0

        def __post_init__(self):
            assert self.count >= 0, "negative"

    graph = ks.Graph("strict", schema=Positive)
    graph.wait("ask", signal="word", into="count")
    graph.add(gives(count=1), name="other")
    graph.wait("again", signal="word")
    graph.edge("ask", "other")
    graph.edge("other", "again")
    graph.entry("ask")
    graph.exit("again")
    async with world.engine() as engine:
        run = await engine.start(graph, {}, run_id="r")
        await run.signal("word", -1)
        with pytest.raises(ks.ExecutionError, match="does not fit Positive: negative"):
            await run.result(30)
        with pytest.raises(ks.DefinitionError, match="began ask#1/wait_for:word#1"):
            await engine.fork("r", at=2, next="other")
        await run.edit(next="other")
        assert await run.result(30) == {"count": 1}


@pytest.mark.live_only
async def test_breakpoint_beside_an_active_branch_resumes_from_elsewhere(world):
    """The run is not put away meanwhile, so who asks the store cannot see which breakpoint that is."""
    reached, hold = asyncio.Event(), asyncio.Event()

    async def slow(state):
        reached.set()
        await hold.wait()
        return {"slow": 1}

    graph = fan(ks.Graph("beside", interrupt_before=["quick"]), {"slow": slow, "quick": gives(quick=1)})
    async with world.engine() as engine, world.engine(worker=False, workflows=[graph]) as elsewhere:
        await engine.start(graph, run_id="r")
        await reached.wait()
        await until(lambda: engine.waits_of("r"))
        run = await elsewhere.get("r")
        await run.resume()
        await until(lambda: not engine.waits_of("r"))
        hold.set()
        assert await run.result() == {"slow": 1, "quick": 1}


def halting():
    graph = ks.Graph("halting-once", interrupt_before=["pay"])
    graph.add(gives(paid=1), name="pay")
    graph.entry("pay")
    graph.exit("pay")
    return graph


async def test_resume_ends_a_pause_that_was_not_read_yet(world):
    """At a breakpoint a resume names that; the pause before it is taken back all the same."""
    graph = halting()
    async with world.engine() as engine:
        await until_status(await engine.start(graph, run_id="r"), "waiting")
    async with world.engine(worker=False, workflows=[graph]) as client:
        run = await client.get("r")
        await run.pause()
        await run.resume()
    async with world.engine(workflows=[graph]) as engine:
        assert await (await engine.get("r")).result(30) == {"paid": 1}


async def test_resume_of_a_breakpoint_ends_a_later_pause_too(world):
    graph = halting()
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        (stop,) = [name for name in (await run.run()).wakes if name.startswith(GO)]
        await run.pause()
        await until_status(run, "paused")
        await run._command(stop, "sent by one who saw it wait")
        assert await run.result(30) == {"paid": 1}


# -- durability --------------------------------------------------------------------------------------------------------


@pytest.mark.live_only
async def test_durability_may_depend_on_the_state_after_a_step(world):
    reached, hold = asyncio.Event(), asyncio.Event()
    graph = ks.Graph("cadence", durability=ks.Durability.when(lambda state: state["n"] in (2, 4)))

    @graph.step
    async def turn(state):
        if state["n"] == 5:
            reached.set()
            await hold.wait()
        return {"n": state["n"] + 1}

    graph.delay("rest", 0)
    graph.edge("turn", "rest")
    graph.edge("rest", "turn", when=lambda state: state["n"] < 6)
    graph.entry("turn")
    graph.exit("rest")
    engine = await world.started()
    run = await engine.start(graph, {"n": 0}, run_id="r")
    await reached.wait()
    stored = [one.step for one in await run.checkpoints() if one.kind is Kind.STEP_COMPLETED]
    assert [step for step in stored if step.startswith("turn")] == ["turn#1", "turn#2", "turn#3", "turn#4"]
    hold.set()
    engine = await world.crash_and_recover(engine)
    assert await (await engine.get("r")).result() == {"n": 6}
    await engine.close()


# -- consolidated states -----------------------------------------------------------------------------------------------


def counting(to):
    graph = ks.Graph("counting", max_iterations=to + 1)

    @graph.step
    async def turn(state):
        return {"n": state["n"] + 1, "last": "x" * 200 + str(state["n"])}

    graph.edge("turn", "turn", when=lambda state: state["n"] < to)
    graph.wait("word", into="word")
    graph.edge("turn", "word")
    graph.entry("turn")
    graph.exit("word")
    return graph


@pytest.mark.live_only
async def test_a_recovery_reads_the_newest_full_state_and_what_follows(world, monkeypatch):
    monkeypatch.setattr(position, "ENOUGH_DELTAS", 4)
    monkeypatch.setattr(replay, "FIRST_SPAN", 8)
    graph = counting(50)
    engine = await world.started()
    run = await engine.start(graph, {"n": 0}, run_id="r")
    await until_status(run, "waiting")
    states = [one.seq for one in await run.checkpoints() if one.kind is Kind.STATE]
    assert len(states) >= 5
    engine = await world.crash_and_recover(engine)
    read = []
    original = engine.store.list_checkpoints

    def listed(run_id, after=0, limit=1000, kinds=()):
        rows = original(run_id, after, limit, kinds)
        if not kinds:
            read.extend(row.seq for row in rows)
        return rows

    monkeypatch.setattr(engine.store, "list_checkpoints", listed)
    run = await engine.get("r")
    await run.signal("word", "done")
    result = await run.result()
    assert (result["n"], result["word"]) == (50, "done")
    assert min(read) == max(states)
    await engine.close()


async def test_a_full_state_changes_nothing(world, monkeypatch):
    monkeypatch.setattr(position, "ENOUGH_DELTAS", 2)
    async with world.engine() as engine:
        run = await engine.start(review(), {"topic": "x"}, run_id="r")
        assert await run.result() == END
        assert dict(await run.state()) == END


async def test_a_full_state_that_was_rewound_past_does_not_count(world, monkeypatch):
    monkeypatch.setattr(position, "ENOUGH_DELTAS", 3)
    graph = counting(20)
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        fifth = next(one.seq for one in await run.checkpoints() if one.step == "turn#5")
        await run.rewind(fifth)
        await until_status(run, "waiting")
        await run.edit({"n": 100})
        await run.signal("word", "done")
        assert (await run.result())["n"] == 100
        assert (await run.state(fifth))["n"] == 5


@pytest.mark.live_only
async def test_a_full_state_that_is_damaged_is_derived_anew(world, monkeypatch, caplog):
    if world.kind != "sqlite":
        pytest.skip("only a file can be damaged from outside here")
    monkeypatch.setattr(position, "ENOUGH_DELTAS", 4)
    graph = counting(30)
    engine = await world.started()
    run = await engine.start(graph, {"n": 0}, run_id="r")
    await until_status(run, "waiting")
    await world.crash(engine)
    db = apsw.Connection(str(world.path))
    db.execute(
        "UPDATE keepstep_checkpoint SET record = replace(record, '\"n\":', '\"N\":') WHERE seq ="
        " (SELECT max(seq) FROM keepstep_checkpoint WHERE kind = 'consolidated state')"
    )
    assert db.changes() == 1
    db.close()
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("word", "done")
        assert (await run.result())["n"] == 30
    assert "a consolidated state is damaged and was derived again" in caplog.text


async def test_consolidate_records_the_whole_state(world):
    graph = counting(5)
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        await run.consolidate("before the holidays")
        await until_status(run, "waiting")
        states = [one for one in await run.checkpoints() if one.kind is Kind.STATE]
        assert [one.trigger for one in states] == ["manual"]
        assert "before the holidays" in [entry.reason for entry in await run.audit()]
        await run.signal("word", "done")
        assert (await run.result())["n"] == 5
        with pytest.raises(ks.KeepstepError, match="is completed"):
            await run.consolidate()


@pytest.mark.live_only
async def test_invalid_edit_is_refused_and_changes_nothing(world):
    graph = ks.Graph("busy", schema=Page)
    graph.wait("title")
    graph.map("all", double, over="numbers", into="views")
    graph.edge("title", "all")
    graph.entry("title")
    graph.exit("all")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        with pytest.raises(ks.DefinitionError, match="Page has no key 'colour'"):
            await run.edit({"colour": 1})
        with pytest.raises(ks.DefinitionError, match="has no step 'nowhere'"):
            await run.edit(next="nowhere")
        with pytest.raises(ks.DefinitionError, match="does not fit Page"):
            await run.edit({"title": object()})
        with pytest.raises(ks.DefinitionError, match="not both"):
            await run.edit({}, stage="a", agent="b")
        assert await run.status() == "waiting"
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result()
        with pytest.raises(ks.AlreadyFinished, match="rewind or fork it instead"):
            await run.edit({"title": "x"})


async def test_a_paused_run_stays_so_when_it_is_edited(world):
    graph = counting(3)
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        await run.pause()
        await until_status(run, "paused")
        await run.edit({"n": 33}, remove=["last"])
        assert await run.status() == "paused"
        await run.signal("word", "go")
        await run.resume()
        assert await run.result() == {"n": 33, "word": "go"}


@pytest.mark.parametrize("command", ["edit", "refused edit"])
@pytest.mark.parametrize("resumed", ["before", "after"])
@pytest.mark.live_only
async def test_a_run_that_is_resumed_during_an_edit_goes_on(world, resumed, command):
    async with world.engine() as engine:
        run = await engine.start(counting(3), {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        await run.pause()
        await until_status(run, "paused")
        store, claims = engine.store, engine.store.claim_runs

        def claim(request):
            if request.run is None:
                return claims(request)
            if resumed == "before":
                store.commit([Send(Signal("r", "ks:resume"))])
            found = claims(request)
            if resumed == "after":
                store.commit([Send(Signal("r", "ks:resume"))])
            if command == "refused edit":
                engine.journal.write = refused
            return found

        write = engine.journal.write

        async def refused(change):
            engine.journal.write = write
            raise RuntimeError("interrupted")

        store.claim_runs = claim
        with contextlib.suppress(RuntimeError):
            await run.edit({"n": 33})
        store.claim_runs = claims
        await run.signal("word", "go")
        assert (await run.result(15))["word"] == "go"


@pytest.mark.parametrize(
    "args, kwargs, told",
    [
        (["x"], {}, "started with its first state: a dictionary"),
        ([{}, {}], {}, "started with its first state"),
        ([], {"colour": 1}, "Page has no key 'colour'"),
        ([{"views": "many"}], {}, "does not fit Page"),
    ],
)
@pytest.mark.one_store
@pytest.mark.live_only
async def test_invalid_first_state_is_refused_before_anything_is_stored(world, args, kwargs, told):
    graph = fan(ks.Graph("typed", schema=Page), {"a": gives(title="a")})
    async with world.engine() as engine:
        with pytest.raises(ks.DefinitionError, match=told):
            await engine.start(graph, *args, **kwargs)
        assert not (await engine.list()).runs


async def test_a_state_that_grows_too_large_names_the_step_that_grew_it(world):
    graph = ks.Graph("growing")

    @graph.step
    async def grow(state):
        return {"text": [*state.get("text", []), "x" * 1000]}

    graph.edge("grow", "grow")
    graph.entry("grow")
    graph.exit("grow")
    async with world.engine(max_value_bytes=5000) as engine:
        run = await engine.start(graph, run_id="r")
        with pytest.raises(ks.ExecutionError, match=r"step 'grow#5': with its change the state takes 5,\d+ bytes"):
            await run.result()
        assert len((await run.state())["text"]) == 4


async def test_parallel_part_may_repeat_and_contain_another(world):
    graph = ks.Graph("rounds", reducers={"log": "append"})
    for name in ("a", "b", "c", "d"):
        graph.add(gives(log=[name]), name=name)
    graph.add(lambda state: {"n": state.get("n", 0) + 1}, name="count")
    graph.parallel("outer", ["a", "inner"], join="count")
    graph.parallel("inner", ["b", "c"], join="d")
    graph.edge("count", "outer", when=lambda state: state["n"] < 3)
    graph.entry("outer")
    graph.exit("count")
    async with world.engine() as engine:
        result = await (await engine.start(graph)).result()
        assert result == {"n": 3, "log": ["a", "b", "c", "d"] * 3}


async def test_a_breakpoint_in_a_branch_stops_that_branch(world):
    ran = []

    def noted(name):
        async def body(state):
            ran.append(name)
            return {name: 1}

        return body

    graph = fan(ks.Graph("halting", interrupt_before=["a", "b"]), {"a": noted("a"), "b": noted("b"), "c": noted("c")})
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await until(lambda: ran == ["c"])
        await until_status(run, "waiting")
        await run.resume()
        await until(lambda: len(ran) == 2)
        await until_status(run, "waiting")
        await run.resume()
        assert await run.result() == {"a": 1, "b": 1, "c": 1}


async def test_a_parallel_part_does_not_begin_again_inside_itself(world):
    """What is said is the mistake itself, not that it went on for too long."""
    visits = []

    async def again(state):
        visits.append(1)
        return ks.Goto("fan") if len(visits) < 50 else {}

    graph = fan(ks.Graph("nesting", max_iterations=5), {"again": again, "quick": gives(quick=1)})
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        with pytest.raises(ks.RunFailed, match="parallel 'fan' begins again inside one of its own branches"):
            await run.result()
    assert len(visits) == 1


@pytest.mark.parametrize("odd", ["\ud800", [float("inf"), "\ud800"]])
@pytest.mark.parametrize("kind", ["wait", "map", "child"])
async def test_whatever_a_step_may_give_other_points_may_give_too(world, kind, odd):
    @ks.workflow(name="echo")
    async def echo(given):
        return given

    @ks.step
    async def same(one):
        return one

    graph = ks.Graph("odd")
    if kind == "wait":
        graph.wait("point", signal="go", into="got")
    elif kind == "map":
        graph.map("point", same, over="given", into="got")
    else:
        graph.add(echo, name="point", gives="got")
    graph.entry("point")
    graph.exit("point")
    given = [*odd] if kind == "map" else odd
    async with world.engine(workflows=[graph, echo]) as engine:
        run = await engine.start(graph, {"given": given}, run_id="r")
        await run.signal("go", given)
        assert (await run.result(30))["got"] == given


async def test_a_key_that_cannot_be_stored_is_named(world):
    graph = ks.Graph("odd")
    graph.add(gives(**{"half \ud800": 1}), name="only")
    graph.entry("only")
    graph.exit("only")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        with pytest.raises(ks.RunFailed, match=r"step 'only#1': the key 'half \\ud800' holds half of a character"):
            await run.result(30)


@pytest.mark.parametrize("kind", ["step", "wait"])
async def test_predicate_that_exits_stops_neither_step_nor_worker(world, kind):
    def leaves(state):
        raise SystemExit(3)

    graph = ks.Graph("leaving")
    if kind == "step":
        graph.add(gives(done=1), name="first")
    else:
        graph.wait("first", signal="go", into="done")
    graph.add(gives(end=1), name="end")
    graph.edge("first", "end", when=leaves)
    graph.entry("first")
    graph.exit("end")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await run.signal("go", 1)
        with pytest.raises(ks.RunFailed, match="an edge of 'first' cannot be decided: SystemExit: 3"):
            await run.result(30)
        assert await run.state() == {"done": 1}


@pytest.mark.parametrize("how", ["cancel", "pause"])
async def test_a_graph_is_steered_inside_a_parallel_part(world, how):
    began, gate = asyncio.Event(), asyncio.Event()

    async def holds(state):
        began.set()
        await gate.wait()
        return {"held": 1}

    graph = fan(ks.Graph("steered"), {"holds": holds, "quick": gives(quick=1)})
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await began.wait()
        if how == "cancel":
            await run.cancel()
            with pytest.raises(ks.RunCancelled):
                await run.result()
            return
        await run.pause()
        gate.set()
        await until_status(run, "paused")
        await run.resume()
        assert await run.result() == {"held": 1, "quick": 1}


async def test_a_run_stays_at_a_breakpoint_whatever_is_written_down_there(world, monkeypatch):
    monkeypatch.setattr(position, "ENOUGH_DELTAS", 1)
    ran = []
    graph = ks.Graph("halts", interrupt_after=["one"], interrupt_before=["three"])

    def noted(name):
        async def body(state):
            ran.append(name)
            return {name: "x" * 500}

        return body

    for name in ("one", "two", "three", "four"):
        graph.add(noted(name), name=name)
    graph.edge("one", "two")
    graph.edge("two", "three")
    graph.edge("three", "four")
    graph.entry("one")
    graph.exit("four")
    engine = await world.started()
    run = await engine.start(graph, run_id="r")
    await until_status(run, "waiting")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    with pytest.raises(ks.RunConflict, match="no edge is chosen yet"):
        await run.consolidate()
    await run.edit({"seen": 1})
    await until_status(run, "waiting")
    assert ran == ["one"]
    await run.resume()
    await until(lambda: len(ran) == 2)
    await until_status(run, "waiting")
    await run.edit(next="four")  # it goes another way from the breakpoint
    result = await run.result()
    assert (ran, result["seen"]) == (["one", "two", "four"], 1)
    await engine.close()


@pytest.mark.parametrize(
    "write, told",
    [
        (lambda g: g.edge("a", "b", when=_never), "not an async one, which would have to be waited for"),
        (lambda g: g.parallel("p", "ab", join="b"), "branches is a list of names, not the text 'ab'"),
        (lambda g: g.parallel("p", ["a"], join="b", wait="any"), r"wait= is ks.All\(\), ks.Any\(\), ks.Quorum"),
        (lambda g: g.parallel("p", ["a"], join="b", wait=ks.Any), r"wait= is ks.All\(\), ks.Any\(\), ks.Quorum"),
        (lambda g: g.parallel("p", ["a"], join="b", wait=ks.Quorum(5)), "waits for 5 of its branches, and has 1"),
        (lambda g: g.delay("w", "5s"), "step 'w': a delay in seconds must be a number"),
        (lambda g: g.wait("w", timeout=-1), "must be finite and at least 0"),
        (lambda g: g.map("m", double, over="a", into="b", concurrency=0), "concurrency is a whole number from 1"),
        (lambda g: ks.Graph("h", interrupt_before="charge"), "interrupt_before is a list of names"),
    ],
)
def test_invalid_option_is_refused_where_it_is_written(write, told):
    with pytest.raises(ks.DefinitionError, match=told):
        write(ks.Graph("g"))


async def _never(state):
    return False


def test_problems_of_a_graph_name_their_lines():
    graph = ks.Graph("lines", interrupt_before=["nowhere"])
    here = inspect.currentframe().f_lineno - 1

    @graph.step
    async def begin(state):
        return {}

    graph.add(begin, name="lost")
    graph.entry("begin")
    graph.exit("begin")
    with pytest.raises(InvalidGraph) as caught:
        graph.close()
    assert f"{__file__}:{here}: error: interrupt_before: there is no step 'nowhere'" in str(caught.value)
    assert [(one.file, one.line, one.where) for one in graph.problems()] == [
        (__file__, here + 3, "step 'lost'"),
        (__file__, here, "interrupt_before"),
    ]


def test_option_that_names_no_step_is_refused():
    graph = ks.Graph("g", durability="steps=chrage", interrupt_after=["chargé"])
    graph.add(gives(), name="charge")
    graph.entry("charge")
    graph.exit("charge")
    with pytest.raises(InvalidGraph) as caught:
        graph.close()
    assert "durability: there is no step 'chrage'; did you mean 'charge'?" in str(caught.value)
    assert "interrupt_after: there is no step 'chargé'" in str(caught.value)


@pytest.mark.one_store
@pytest.mark.live_only
async def test_a_run_at_a_breakpoint_is_not_taken_for_a_stalled_one(world):
    graph = ks.Graph("halted", interrupt_before=["a"])
    graph.add(gives(a=1), name="a")
    graph.entry("a")
    graph.exit("a")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        assert await run.reached("waiting", "paused") == "waiting"
        with pytest.raises(ks.TimedOut, match=r"was not paused within 0\.01 s"):
            await run.reached("paused", timeout=0.01)
        findings = (await examine(engine)).findings
        assert [(one.code, one.severity) for one in findings if "r" in one.runs] == [("breakpoint", "note")]
        assert "waits at the breakpoint before a#1" in (await run.info()).why
        with pytest.raises(ks.DefinitionError, match="has no state of stage typo at this record; it has: none"):
            await run.state(stage="typo")


async def test_a_fork_gives_a_step_another_change_and_chooses_the_edge_anew(world):
    graph = ks.Graph("forked")
    graph.add(gives(x=1), name="a")
    graph.add(lambda state: {"went": "left", "saw": state["x"]}, name="left")
    graph.add(lambda state: {"went": "right", "saw": state["x"]}, name="right")
    graph.edge("a", "left", when=lambda state: state["x"] < 3)
    graph.edge("a", "right")
    graph.entry("a")
    graph.exit("left", "right")
    async with world.engine() as engine:
        await (await engine.start(graph, run_id="r")).result()
        fork = await engine.fork("r", results={"a": {"x": 5}}, run_id="f")
        assert await fork.result() == {"x": 5, "went": "right", "saw": 5}
        await engine.fork("r", results={"a": {"x": 5}}, run_id="f")  # the same again
        with pytest.raises(ks.RunConflict):
            await engine.fork("r", results={"a": {"x": 6}}, run_id="f")
        with pytest.raises(ks.DefinitionError, match="must be a mapping of the state keys"):
            await engine.fork("r", results={"a": 5})
        with pytest.raises(ks.DefinitionError, match="used its old result"):
            await engine.fork("r", at=3, results={"a": {"x": 5}})


async def test_state_recorded_after_a_breakpoint_holds_the_edit_there(world, monkeypatch):
    monkeypatch.setattr(position, "MOST_RECORDS", 1)
    graph = ks.Graph("edited-at-a-stop", interrupt_after=["one"], interrupt_before=["two"])
    graph.add(gives(one=1), name="one")
    graph.add(gives(two=2), name="two")
    graph.edge("one", "two")
    graph.entry("one")
    graph.exit("two")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        await run.edit({"by hand": 7}, reason="a correction")
        for place in ("one#1.after", "two#1.before"):
            await until(lambda place=place: waits_at(run, place), place)
            await run.resume()
        assert await run.result(timeout=60) == {"one": 1, "two": 2, "by hand": 7}


async def waits_at(run, place):
    found = await run.run()
    return found.worker is None and any(wake.endswith(place) for wake in found.wakes)


# -- commands that are given up ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["edit", "rewind", "consolidate", "retry"])
@pytest.mark.live_only
async def test_cancelled_command_does_not_keep_the_run(world, command):
    broken = [True] if command == "retry" else []
    graph = ks.Graph("given up")

    @graph.step
    async def work(state):
        if broken:
            raise ks.Permanent("not yet")
        return {"n": state.get("n", 0) + 1}

    graph.wait("word", into="word")
    graph.edge("work", "word")
    graph.entry("work")
    graph.exit("word")
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 0}, run_id="r")
        await run.reached("failed" if command == "retry" else "waiting")
        broken.clear()
        claims = engine.store.claim_runs
        claimed = asyncio.Event()

        def claim(request):
            found = claims(request)
            if request.run is not None:
                engine.loop.call_soon_threadsafe(claimed.set)
            return found

        engine.store.claim_runs = claim
        act = {
            "edit": lambda: run.edit({"n": 5}),
            "rewind": lambda: run.rewind(1),
            "consolidate": run.consolidate,
            "retry": run.retry,
        }[command]
        task = asyncio.ensure_future(act())
        await claimed.wait()
        task.cancel()  # after the claim, and before anything is written
        with contextlib.suppress(asyncio.CancelledError):
            await task
        engine.store.claim_runs = claims
        if command == "retry":
            await until_status(run, "waiting", "running", "queued")
        await run.signal("word", "go")
        assert (await run.result(60))["word"] == "go"


@pytest.mark.live_only
@pytest.mark.one_store
async def test_superseded_rewind_does_not_keep_the_run(world, monkeypatch):
    graph = counting(3)
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        claims = rewinding.claim_by_name

        async def late(engine, run, statuses):
            monkeypatch.setattr(rewinding, "claim_by_name", claims)
            await engine.rewind("r", to=2)
            await (await engine.get("r")).reached("waiting")
            monkeypatch.setattr(rewinding, "plan_rewind", _refuses)
            return await claims(engine, await engine.read(engine.store.get_run, "r"), statuses)

        monkeypatch.setattr(rewinding, "claim_by_name", late)
        with pytest.raises(ks.DefinitionError, match="is gone"):
            await run.rewind(step="turn#3")
        await run.signal("word", "go")
        assert (await run.result(60))["word"] == "go"


async def _refuses(*_):
    raise ks.DefinitionError("the step is gone")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_branches_named_like_breakpoints_are_recovered(world, when):
    """A breakpoint of `x` is kept under `x#1.before`, and so is what its branch `before` does."""
    hold = asyncio.Event()

    async def slow(state):
        await hold.wait()
        return {"slow": 1}

    graph = ks.Graph(f"named-{when}", interrupt_before=["x"], interrupt_after=["x"])
    graph.add(gives(n=1), name="begin")
    graph.add(slow, name=when)
    graph.add(gives(quick=1), name="quick")
    graph.add(gives(done=True), name="done")
    graph.edge("begin", "x")
    graph.parallel("x", [when, "quick"], join="done")
    graph.entry("begin")
    graph.exit("done")
    engine = await world.started(workflows=[graph])
    run = await engine.start(graph, run_id="r")
    await until_status(run, "waiting")
    await run.resume()
    await until_recorded(run, "x#1.quick/quick#1")
    engine = await world.crash_and_recover(engine, workflows=[graph])
    run = await engine.get("r")
    hold.set()
    await until_status(run, "waiting")
    engine = await world.crash_and_recover(engine, workflows=[graph])  # as it stands behind the part
    run = await engine.get("r")
    await run.resume()
    assert await run.result(30) == {"n": 1, "slow": 1, "quick": 1, "done": True}
    await engine.close()


@pytest.mark.live_only
@pytest.mark.one_store
async def test_history_that_counts_a_breakpoint_as_a_call_still_fits(world, monkeypatch):
    """Older versions gave the stop the first place of its branch."""
    graph = ks.Graph("counted", interrupt_before=["one"])
    graph.add(gives(one=1), name="one")
    graph.wait("hear", signal="word")
    graph.edge("one", "hear")
    graph.entry("one")
    graph.exit("hear")
    real = walk.SignalCall

    def counted(branch, *args):
        branch.ordinal = 0
        return real(branch, *args)

    with monkeypatch.context() as patch:
        patch.setattr(walk, "SignalCall", counted)
        engine = await world.started(workflows=[graph])
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        await run.resume()
        await until_recorded(run, "one#1")
        await until_status(run, "waiting")
        await world.crash(engine)
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        await run.signal("word")
        assert (await run.result(30))["one"] == 1
        assert [one.ordinal for one in await run.checkpoints() if GO in one.step] == [1]
