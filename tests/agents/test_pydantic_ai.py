"""Pydantic AI inside a workflow."""

import json
import time

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, AgentRunResultEvent, DeferredToolRequests, ModelRetry
from pydantic_ai.messages import ModelResponse, RetryPromptPart, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage

import keepstep as ks
from keepstep.agents.contract import AgentContract, Trouble
from keepstep.agents.pydantic_ai import KeepstepDurability, approved, durable
from tests.engine.world import steps_of, until_status


def results_in(messages):
    """The results of tools that a model is told, by call id."""
    return {
        part.tool_call_id: part.content
        for message in messages
        for part in message.parts
        if isinstance(part, ToolReturnPart | RetryPromptPart)
    }


def scripted(talk, agent):
    def answer(messages, info):
        turn = talk.think(agent, results_in(messages))
        calls = [ToolCallPart(call.tool, call.arguments, tool_call_id=call.id) for call in turn.calls]
        return ModelResponse(parts=calls or [TextPart(turn.text)], usage=RequestUsage(input_tokens=turn.tokens))

    async def stream(messages, info):
        turn = talk.think(agent, results_in(messages))
        for place, call in enumerate(turn.calls):
            yield {place: DeltaToolCall(call.tool, json.dumps(call.arguments), tool_call_id=call.id)}
        for piece in turn.pieces if turn.text else ():
            yield piece
            await talk.sent()

    return FunctionModel(answer, stream_function=stream)


class TestContract(AgentContract):
    def build(self, talk):  # noqa: C901 - one small function for each tool
        helper = durable(Agent(scripted(talk, "helper"), name="helper"), **talk.options)
        main = Agent(scripted(talk, "main"), name="main", output_type=[str, DeferredToolRequests])
        for agent in (helper.wrapped, main):

            @agent.tool_plain
            async def look(word: str) -> str:
                return await talk.use("look", word)

        @main.tool_plain
        async def meet(word: str) -> str:
            return await talk.use("meet", word)

        @main.tool_plain
        def flaky(word: str) -> str:
            return talk.use_in_thread("flaky", word)

        @main.tool_plain
        async def broken(word: str) -> str:
            try:
                return await talk.use("broken", word)
            except Trouble as trouble:
                raise ModelRetry(str(trouble)) from trouble

        @main.tool_plain
        async def slow(word: str) -> str:
            return await talk.use("slow", word)

        @main.tool_plain(requires_approval=True)
        async def pay(word: str) -> str:
            return await talk.use("pay", word)

        @main.tool_plain
        async def ask(word: str) -> str:
            return (await helper.run(word)).output

        options = {**talk.options, "tools": {**talk.options["tools"], "ask": None}}
        agent = durable(main, **options)

        async def converse(question):
            if talk.streamed:
                async with agent.run_stream(question) as result:
                    async for item in result.stream_text(delta=True, debounce_by=None):
                        talk.saw(item)
                    return {"answer": await result.get_output()}
            result = await agent.run(question)
            while isinstance(result.output, DeferredToolRequests):
                answers = await approved(result.output)
                result = await agent.run(message_history=result.all_messages(), deferred_tool_results=answers)
            return {"answer": result.output, "transcript": [len(message.parts) for message in result.all_messages()]}

        return converse


# -- what only this framework has --------------------------------------------------------------------------------------


def saying(*turns):
    """A model that gives these parts, one list for each request, and streams texts word by word."""

    def turn(messages):
        return turns[sum(isinstance(message, ModelResponse) for message in messages)]

    async def stream(messages, info):
        for place, part in enumerate(turn(messages)):
            if isinstance(part, ToolCallPart):
                yield {place: DeltaToolCall(part.tool_name, part.args_as_json_str(), tool_call_id=part.tool_call_id)}
            else:
                for word in part.content.split(" "):
                    yield word

    return FunctionModel(lambda messages, info: ModelResponse(parts=turn(messages)), stream_function=stream)


async def finished(world, code, *args):
    """Run the code as a workflow; give its result and the steps that it completed."""
    async with world.engine() as engine:
        run = await engine.start(ks.workflow(code, name="case"), *args)
        return await run.result(30), await steps_of(run)


CALL = [ToolCallPart("look", {"word": "a"}, tool_call_id="c1")]


async def test_every_way_to_run_has_the_same_steps(world, effects):
    agent = Agent(saying(CALL, [TextPart("all is well")]), name="main")

    @agent.tool_plain
    async def look(word: str) -> str:
        effects.append(word)
        return word.upper()

    desk = durable(agent)

    async def support():
        plain = (await desk.run("one")).output
        async with desk.run_stream("two") as result:
            streamed = await result.get_output()
        async with desk.run_stream_events("three") as events:
            ends = [event.result.output async for event in events if isinstance(event, AgentRunResultEvent)]
        async with desk.iter("four") as run:
            nodes = [type(node).__name__ async for node in run]
        return [plain, streamed.replace(" ", ""), *ends, run.result.output, len(nodes)]

    result, steps = await finished(world, support)
    assert [one.replace(" ", "") for one in result[:-1]] == ["alliswell"] * 4
    assert len(steps) == 12
    assert [one for one in steps if "look" in one] == ["look#@c1", "look#@c1~2", "look#@c1~3", "look#@c1~4"]
    assert effects == ["a"] * 4


async def test_structured_output_and_its_types_are_kept(world):
    class Verdict(BaseModel):
        text: str
        score: int

    answer = [ToolCallPart("final_result", {"text": "good", "score": 3}, tool_call_id="f1")]
    desk = durable(Agent(saying(answer), name="main", output_type=Verdict))

    async def judge():
        result = await desk.run("judge")
        return [type(result.output).__name__, result.output.score, len(result.new_messages())]

    assert (await finished(world, judge))[0] == ["Verdict", 3, 3]


async def test_capability_may_be_given_to_the_agent(world, effects):
    agent = Agent(
        saying(CALL, [TextPart("done")]), name="main", capabilities=[KeepstepDurability(tools={"look": None})]
    )

    @agent.tool_plain
    async def look(word: str) -> str:
        effects.append(word)
        return word

    async def support():
        return (await agent.run("go")).output

    result, steps = await finished(world, support)
    assert result == "done"
    assert [one.partition("@")[0] for one in steps] == ["model#", "model#"]


async def test_tools_of_an_mcp_toolset_are_steps(world, effects):
    fastmcp = pytest.importorskip("fastmcp", reason="fastmcp is not installed here; `make agents-oldest` has it")
    from pydantic_ai.mcp import MCPToolset

    server = fastmcp.FastMCP("desk")

    @server.tool
    def look(word: str) -> str:
        effects.append(word)
        return word.upper()

    toolset = MCPToolset(server, id="desk")
    desk = durable(Agent(saying(CALL, [TextPart("done")]), name="main", toolsets=[toolset]))

    async def support():
        result = await desk.run("go")
        returned = [
            part for message in result.all_messages() for part in message.parts if part.part_kind == "tool-return"
        ]
        return [result.output, returned[0].content]

    result, steps = await finished(world, support)
    assert result == ["done", "A"]
    assert "look#@c1" in steps
    assert any("get_tools" in one for one in steps)
    assert effects == ["a"]


@pytest.mark.parametrize("answer, expected", [("not today", "not today"), ({"eur": 3}, "paid 3"), (True, "paid 5")])
async def test_approval_may_deny_with_words_or_change_arguments(world, answer, expected):
    asks = [ToolCallPart("refund", {"eur": 5}, tool_call_id="c1")]
    agent = Agent(saying(asks, [TextPart("done")]), name="main", output_type=[str, DeferredToolRequests])

    @agent.tool_plain(requires_approval=True)
    async def refund(eur: int) -> str:
        return f"paid {eur}"

    desk = durable(agent)

    async def support():
        result = await desk.run("money back")
        answers = await approved(result.output)
        result = await desk.run(message_history=result.all_messages(), deferred_tool_results=answers)
        return [
            part.content
            for message in result.all_messages()
            for part in message.parts
            if part.part_kind == "tool-return"
        ]

    async with world.engine() as engine:
        run = await engine.start(ks.workflow(support, name="case"))
        await run.signal("approve:c1", answer)
        assert await run.result(30) == [expected]


async def test_blocking_run_is_refused_in_a_workflow(world):
    desk = durable(Agent(saying([TextPart("done")]), name="main"))

    async def support():
        with pytest.raises(ks.DefinitionError, match="run_sync cannot run inside a workflow"):
            desk.run_sync("go")
        return "refused"

    assert (await finished(world, support))[0] == "refused"


def test_agent_without_a_name_is_refused():
    with pytest.raises(ks.DefinitionError, match="the agent has no name"):
        durable(Agent(saying()))


async def test_request_after_a_rejected_answer_is_found_again(world, effects):
    def think(messages, info):
        effects.append(len(messages))
        return ModelResponse(parts=[TextPart("no" if len(messages) == 1 else "yes")])

    agent = Agent(FunctionModel(think), name="main", retries=3)

    @agent.output_validator
    def must_agree(answer: str) -> str:
        if answer == "no":
            raise ModelRetry("say yes")
        return answer

    desk = durable(agent)

    async def support():
        first = (await desk.run("go")).output
        await ks.wait_for("more")
        return first

    async with world.engine() as engine:
        run = await engine.start(ks.workflow(support, name="case"))
        await until_status(run, "waiting")
        await run.signal("more")
        assert await run.result(30) == "yes"
    assert effects == [1, 3]


async def test_instructions_that_change_repeat_no_request(world, effects):
    def think(messages, info):
        effects.append(len(messages))
        return ModelResponse(parts=[TextPart("done")])

    agent = Agent(FunctionModel(think), name="main")

    @agent.instructions
    def now() -> str:
        return f"it is {time.monotonic()}"

    desk = durable(agent)

    async def support():
        return [(await desk.run("one")).output, (await desk.run("two")).output]

    assert (await finished(world, support))[0] == ["done", "done"]
    assert effects == [1, 1]
