"""The OpenAI Agents SDK inside a workflow."""

import pytest
from agents import (
    Agent,
    LocalShellTool,
    ModelProvider,
    RunConfig,
    Runner,
    SQLiteSession,
    ToolOutputImage,
    ToolOutputText,
    Usage,
    function_tool,
    handoff,
)
from agents.models.interface import Model
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call

import keepstep as ks
from keepstep.agents.contract import AgentContract
from keepstep.agents.openai_agents import approved, durable, recorded
from tests.engine.world import steps_of

QUIET = RunConfig(tracing_disabled=True)


class TestModel(Model):
    """The framework's scripted model, with the next line of the conversation as its script."""

    __test__ = False

    def __init__(self, talk, agent):
        self.talk, self.agent = talk, agent

    def scripted(self, items):
        results = {one["call_id"]: one["output"] for one in items if one.get("type") == "function_call_output"}
        turn = self.talk.think(self.agent, results)
        calls = [function_call(call.tool, call.arguments, call_id=call.id) for call in turn.calls]
        usage = Usage(requests=1, input_tokens=turn.tokens, total_tokens=turn.tokens)
        return ScriptedModel([ModelStep(calls or [assistant_message(turn.text)], usage=usage)])

    async def get_response(self, instructions, given, *args, **options):
        items = [] if isinstance(given, str) else given
        return await self.scripted(items).get_response(instructions, given, *args, **options)

    async def stream_response(self, instructions, given, *args, **options):
        items = [] if isinstance(given, str) else given
        async for event in self.scripted(items).stream_response(instructions, given, *args, **options):
            yield event
            if event.type == "response.output_text.delta":
                await self.talk.sent()


class TestContract(AgentContract):
    def build(self, talk):
        def tool(name, **options):
            async def use(word: str) -> str:
                return await talk.use(name, word)

            return function_tool(use, name_override=name, **options)

        look = tool("look")
        helper = durable(Agent("helper", model=TestModel(talk, "helper"), tools=[look]), **talk.options)

        @function_tool
        async def ask(word: str) -> str:
            return (await Runner.run(helper, word, run_config=QUIET)).final_output

        others = [tool(name) for name in ("meet", "flaky", "broken", "slow")]
        tools = [look, tool("pay", needs_approval=True), ask, *others]
        options = {**talk.options, "tools": {**talk.options["tools"], "ask": None}}
        agent = durable(Agent("main", model=TestModel(talk, "main"), tools=tools), **options)

        async def turn(given):
            if not talk.streamed:
                return await Runner.run(agent, given, run_config=QUIET)
            result = Runner.run_streamed(agent, given, run_config=QUIET)
            async for event in result.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    talk.saw(event)
            return result

        async def converse(question):
            result = await turn(question)
            while result.interruptions:
                result = await turn(await approved(result))
            items = [one.get("call_id", one.get("role")) for one in result.to_input_list()]
            return {"answer": result.final_output, "transcript": items}

        return converse


# -- what only this framework has --------------------------------------------------------------------------------------


def agent_of(*outputs, name="main", **options):
    """An agent whose model gives these outputs, one for each call."""
    return Agent(name, model=ScriptedModel(list(outputs)), **options)


async def finished(world, code, *args):
    """Run the code as a workflow; give its result and the steps that it completed."""
    async with world.engine() as engine:
        run = await engine.start(ks.workflow(code, name="case"), *args)
        return await run.result(30), await steps_of(run)


async def test_hand_off_goes_on_with_steps_of_the_other_agent(world, effects):
    @function_tool
    async def refund(eur: int) -> str:
        effects.append(eur)
        return f"{eur} paid"

    billing = agent_of([function_call("refund", {"eur": 5}, call_id="r1")], [assistant_message("done")], name="billing")
    billing.tools = [refund]
    moves = [function_call("transfer_to_billing", {}, call_id="h1")]
    triage = durable(agent_of(moves, handoffs=[billing]))
    wrapped = durable(agent_of(moves, handoffs=[handoff(billing)]))

    async def support():
        first = await Runner.run(triage, "money back", run_config=QUIET)
        return [first.final_output, first.last_agent.name]

    result, steps = await finished(world, support)
    assert result == ["done", "billing"]
    assert "refund#@r1" in steps
    assert len(steps) == 4
    assert effects == [5]
    assert wrapped.handoffs[0].agent_name == "billing"


async def test_agent_as_a_tool_has_steps_in_a_branch_of_its_own(world, effects):
    @function_tool
    async def look(word: str) -> str:
        effects.append(word)
        return word.upper()

    poet = durable(
        agent_of(
            [function_call("look", {"word": "a"}, call_id="c1")], [assistant_message("moon")], name="poet", tools=[look]
        )
    )
    asks = [function_call("ask_poet", {"input": "rhyme"}, call_id="c1")]
    main = durable(agent_of(asks, [assistant_message("thanks")], tools=[poet.as_tool("ask_poet", "a poet")]))

    async def support():
        return (await Runner.run(main, "write", run_config=QUIET)).final_output

    result, steps = await finished(world, support)
    assert result == "thanks"
    assert [one for one in steps if "look" in one] == ["@ask_poet:c1/look#@c1"]
    assert effects == ["a"]


async def test_error_of_a_tool_is_told_with_its_own_class(world, effects):
    def tell(context, error):
        effects.append("told")
        return f"sorry: {type(error).__name__}"

    @function_tool(failure_error_function=tell)
    async def pay(eur: int) -> str:
        raise LookupError(eur)

    @function_tool(failure_error_function=None)
    async def burn(eur: int) -> str:
        raise LookupError(eur)

    seen = []

    class Model(ScriptedModel):
        async def get_response(self, instructions, given, *args, **options):
            seen.append(
                [one["output"] for one in given if isinstance(one, dict) and one.get("type") == "function_call_output"]
            )
            return await super().get_response(instructions, given, *args, **options)

    model = Model([[function_call("pay", {"eur": 5}, call_id="p1")], [function_call("burn", {"eur": 6}, call_id="b1")]])
    agent = durable(Agent("main", model=model, tools=[pay, burn]))

    async def support():
        try:
            await Runner.run(agent, "pay", run_config=QUIET)
        except Exception as error:
            return str(error)

    result, _ = await finished(world, support)
    assert "LookupError" in result
    known = "StepFailed" if world.replaying else "LookupError"  # forgotten before it was told, it is what was recorded
    assert seen == [[], [f"sorry: {known}"]]
    assert effects == ["told"]


async def test_structured_output_of_a_tool_is_kept(world):
    kinds = []

    @function_tool
    async def draw(word: str) -> ToolOutputImage:
        return ToolOutputImage(image_url=f"https://example.org/{word}.png")

    @function_tool
    async def read(word: str) -> list[ToolOutputText]:
        return [ToolOutputText(text=word), ToolOutputText(text="end")]

    asks = [function_call("draw", {"word": "a"}, call_id="c1"), function_call("read", {"word": "b"}, call_id="c2")]
    agent = durable(agent_of(asks, [assistant_message("done")], tools=[draw, read]))

    async def support():
        result = await Runner.run(agent, "draw", run_config=QUIET)
        items = [one for one in result.to_input_list() if one.get("type") == "function_call_output"]
        kinds.append([[part["type"] for part in one["output"]] for one in items])
        return result.final_output

    assert (await finished(world, support))[0] == "done"
    assert kinds[-1] == [["input_image"], ["input_text", "input_text"]]


async def test_models_are_found_by_name_in_the_body(world):
    asked = []

    class Provider(ModelProvider):
        def get_model(self, name):
            asked.append(name)
            return ScriptedModel([[assistant_message("done")]])

    agent = durable(Agent("main", model="small"), provider=Provider())

    async def support():
        return (await Runner.run(agent, "hi", run_config=QUIET)).final_output

    assert (await finished(world, support))[0] == "done"
    assert asked == ["small"]


async def test_model_of_a_run_config_can_be_recorded(world):
    model = recorded(ScriptedModel([[assistant_message("done")]]), agent="main")

    async def support():
        config = RunConfig(model=model, tracing_disabled=True)
        return (await Runner.run(durable(Agent("main")), "hi", run_config=config)).final_output

    result, steps = await finished(world, support)
    assert result == "done"
    assert len(steps) == 1


async def test_session_in_memory_is_filled_again_by_a_replay(world):
    agent = durable(agent_of([assistant_message("one")], [assistant_message("two")]))

    async def support():
        session = SQLiteSession("talk")  # without a file it is in memory
        for question in ("first", "second"):
            await Runner.run(agent, question, session=session, run_config=QUIET)
        return [one.get("role") for one in await session.get_items()]

    assert (await finished(world, support))[0] == ["user", "assistant"] * 2


def test_tools_that_no_step_can_record_are_refused():
    shell = LocalShellTool(executor=lambda request: "")
    with pytest.raises(ks.DefinitionError, match="'main' has a LocalShellTool"):
        durable(Agent("main", tools=[shell]))


def test_agent_as_a_tool_that_is_not_durable_is_refused():
    poet = Agent("poet")
    with pytest.raises(ks.DefinitionError, match=r"make it with durable\(poet\).as_tool"):
        durable(Agent("main", tools=[poet.as_tool("ask_poet", "a poet")]))


def test_agents_that_hand_off_to_each_other_are_cloned_once():
    first, second = Agent("first"), Agent("second")
    first.handoffs, second.handoffs = [second], [first]
    clone = durable(first)
    assert clone.handoffs[0].handoffs[0] is clone
    assert durable(clone) is clone
    assert first.model is None
