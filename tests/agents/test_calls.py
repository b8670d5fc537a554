"""Model and tool calls are steps that a replay finds, whatever tasks the framework makes around them."""

import asyncio
from contextlib import aclosing

import pytest

import keepstep as ks
from keepstep.agents.calls import CallSteps, Recorded, approval, call_branch, step_name, used
from tests.engine.world import steps_of, until, until_status


async def converse(calls, effects, question):
    """A framework in small: the model asks for two tools at once, then answers."""

    async def first():
        effects.append("model 1")
        used("small", tokens=3)
        return {"tools": ["a", "b"]}

    async def tool(name):
        effects.append(f"tool {name}")
        return name.upper()

    async def last():
        effects.append("model 2")
        return "done"

    asked = await calls.model([question], first)
    results = await asyncio.gather(
        *(calls.tool("look/up", f"call {name}", lambda name=name: tool(name)) for name in asked["tools"])
    )
    return await calls.model([question, *results], last)


async def test_calls_are_recorded_by_call_and_agent(world, effects):
    calls = CallSteps("critic")

    @ks.workflow
    async def agent():
        return await converse(calls, effects, "why")

    async with world.engine() as engine:
        run = await engine.start(agent)
        assert await run.result(30) == "done"
        steps = await steps_of(run)
        assert sorted(steps[1:3]) == ["look_up#@call a", "look_up#@call b"]
        assert [step.partition("@")[0] for step in (steps[0], steps[3])] == ["model#", "model#"]
        assert {one.agent for one in await run.checkpoints() if one.kind == "step completed"} == {"critic"}
        assert (await run.spent()).tokens == 3
    assert sorted(effects) == ["model 1", "model 2", "tool a", "tool b"]


async def test_calls_outside_a_run_only_run(effects):
    assert await converse(CallSteps("critic"), effects, "why") == "done"
    assert len(effects) == 4


async def test_calls_in_a_step_are_part_of_it(world, effects):
    calls = CallSteps()

    @ks.step
    async def whole():
        return await converse(calls, effects, "why")

    @ks.workflow
    async def agent():
        return await whole()

    async with world.engine() as engine:
        run = await engine.start(agent)
        assert await run.result(30) == "done"
        assert await steps_of(run) == ["whole#1"]


async def test_equal_calls_are_counted(world, effects):
    calls = CallSteps()

    async def body():
        effects.append("called")
        return len(effects)

    @ks.workflow
    async def agent():
        same = [await calls.model(["hi"], body) for _ in range(3)]
        ids = [await calls.tool("look", "c1", body) for _ in range(2)]
        with ks.branch("apart"):
            return [*same, *ids, await calls.tool("look", "c1", body)]

    async with world.engine() as engine:
        run = await engine.start(agent)
        assert await run.result(30) == [1, 2, 3, 4, 5, 6]
        assert (await steps_of(run))[3:] == ["look#@c1", "look#@c1~2", "@apart/look#@c1"]


async def test_stream_gives_items_live_and_the_result_always(world, effects):
    calls = CallSteps()
    seen = []

    async def speak(send):
        effects.append("spoke")
        for word in ("one", "two"):
            ks.emit(word)
            send(word)
            await asyncio.sleep(0)
        return "one two"

    @ks.workflow
    async def agent():
        items = [item async for item in calls.stream(["hi"], speak)]
        await ks.wait_for("go")
        seen.append(items[:-1])
        return [item.value for item in items if isinstance(item, Recorded)]

    async with world.engine() as engine:
        run = await engine.start(agent)
        await until_status(run, "waiting")
        await run.signal("go")
        assert await run.result(30) == ["one two"]
    assert effects == ["spoke"]
    assert seen[-1] in ([], ["one", "two"])


async def test_stream_with_a_retry_gives_only_the_result(world, effects):
    calls = CallSteps(model={"retry": ks.Retry(attempts=2, base_seconds=0)})

    async def speak(send):
        send("half")
        effects.append("spoke")
        if len(effects) == 1:
            raise OSError("down")
        return "whole"

    @ks.workflow
    async def agent():
        return [item.value async for item in calls.stream(["hi"], speak)]

    async with world.engine() as engine:
        assert await (await engine.start(agent)).result(30) == ["whole"]
    assert len(effects) == 2


async def test_agents_called_as_tools_have_keys_of_their_own(world):
    calls = CallSteps()

    async def body():
        return 1

    async def called(call_id):
        with call_branch("poet", call_id):
            return await calls.tool("look", "c1", body)

    @ks.workflow
    async def agent():
        return await asyncio.gather(called("a"), called("b"), called("b"))

    async with world.engine() as engine:
        run = await engine.start(agent)
        assert await run.result(30) == [1, 1, 1]
        assert sorted(await steps_of(run)) == ["@poet:a/look#@c1", "@poet:b/look#@c1", "@poet:b~2/look#@c1"]


async def test_tool_streams_as_a_model_does(world, effects):
    calls = CallSteps(tools={"look": None})

    async def speak(send):
        effects.append("spoke")
        send("half")
        return "whole"

    @ks.workflow
    async def agent():
        first = [item async for item in calls.stream_tool("read", "c1", speak)]
        await ks.wait_for("go")
        return first[-1].value, [item async for item in calls.stream_tool("look", "c2", speak)][-1].value

    async with world.engine() as engine:
        run = await engine.start(agent)
        await run.signal("go")
        assert await run.result(30) == ("whole", "whole")
        assert await steps_of(run) == ["read#@c1"]


async def test_call_from_another_loop_is_refused(world):
    calls = CallSteps()

    async def body():
        return 1

    @ks.workflow
    async def agent():
        await asyncio.to_thread(asyncio.run, calls.model("hi", body))

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="outside the event loop of its workflow"):
            await (await engine.start(agent)).result(30)


async def test_stream_outside_a_run_gives_items_and_the_result():
    async def speak(send):
        send("one")
        return "one"

    assert [item async for item in CallSteps().stream([], speak)] == ["one", Recorded("one")]


async def test_left_stream_ends_its_body_first(world, effects):
    calls = CallSteps()

    async def speak(send):
        try:
            send("one")
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            effects.append("body ended")

    @ks.workflow
    async def agent():
        async with aclosing(calls.stream(["hi"], speak)) as items:
            async for _ in items:
                break
        effects.append("left")
        return "left"

    async with world.engine() as engine:
        assert await (await engine.start(agent)).result(30) == "left"
    assert effects[:2] == ["body ended", "left"]


async def test_failed_stream_raises_after_its_items(world):
    calls = CallSteps()

    async def speak(send):
        send("one")
        raise ValueError("no more")

    @ks.workflow
    async def agent():
        try:
            async for _ in calls.stream(["hi"], speak):
                pass
        except ks.StepFailed as error:
            return error.error.is_a(ValueError)
        return None

    async with world.engine() as engine:
        assert await (await engine.start(agent)).result(30) is True


async def test_tool_that_is_no_step_may_call_steps(world, effects):
    calls = CallSteps(tools={"clock": None, "pay": {"retry": ks.Retry(attempts=2, base_seconds=0)}})

    async def pay():
        effects.append("pay")
        if len(effects) == 1:
            raise OSError("down")
        return "paid"

    async def clock():
        return await noon()

    @ks.step
    async def noon():
        return "noon"

    @ks.workflow
    async def agent():
        return [await calls.tool("clock", "c1", clock), await calls.tool("pay", "c2", pay)]

    async with world.engine() as engine:
        run = await engine.start(agent)
        assert await run.result(30) == ["noon", "paid"]
        assert await steps_of(run) == ["@clock:c1/noon#1", "pay#@c2"]
    assert not calls.records_tool("clock")
    assert calls.records_tool("other")


async def test_approval_waits_for_its_signal(world):
    @ks.workflow
    async def agent():
        first = await approval("call/1", {"tool": "pay", "eur": 5})
        return [first, await approval("call/1", {"tool": "pay", "eur": 6})]

    async with world.engine() as engine:
        run = await engine.start(agent)
        await until_status(run, "waiting")
        assert (await run.published())["approve:call_1"] == {"tool": "pay", "eur": 5}
        await run.signal("approve:call_1", True)

        async def asked_again():
            return (await run.published())["approve:call_1"]["eur"] == 6

        await until(asked_again)
        await run.signal("approve:call_1", {"eur": 4})
        assert await run.result(30) == [True, {"eur": 4}]


def test_unknown_option_is_refused():
    with pytest.raises(ks.DefinitionError, match=r"tools\['pay'\] has unknown options \['retries'\]"):
        CallSteps(tools={"pay": {"retries": 3}})


@pytest.mark.parametrize("name, expected", [("a/b", "a_b"), ("7up", "n7up"), ("ok.name", "ok.name"), ("é", "n_")])
def test_names_of_tools_become_names_of_steps(name, expected):
    assert step_name(name) == expected


async def test_odd_call_ids_are_told_apart(world):
    """A model may use any id, one that looks like the second use of another included."""
    calls = CallSteps()
    ids = ["x", "x", "x~2", "x", "x~2", "x~3", "\ud800", "\ud800", "y" * 1000]

    @ks.workflow
    async def agent():
        return [await calls.tool("look", one, lambda number=number: answer(number)) for number, one in enumerate(ids)]

    async def answer(number):
        return number

    async with world.engine() as engine:
        run = await engine.start(agent)
        assert await run.result(30) == [*range(len(ids))]


async def test_approvals_of_long_call_ids_are_told_apart(world):
    @ks.workflow
    async def agent():
        asked = (approval(f"{'c' * 120}{number}", number) for number in range(2))
        return await asyncio.gather(*asked)

    async with world.engine() as engine:
        run = await engine.start(agent)

        async def both_asked():
            return len(await run.published()) == 2

        await until(both_asked)
        for name, number in (await run.published()).items():
            await run.signal(name, number)
        assert await run.result(30) == [0, 1]


def test_verify_of_a_model_is_refused():
    with pytest.raises(ks.errors.DefinitionError, match="which only tools have"):
        CallSteps(model={"at_most_once": True, "verify": bool})
