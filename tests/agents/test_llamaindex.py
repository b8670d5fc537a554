"""LlamaIndex agents inside a workflow."""

import asyncio
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
    from llama_index.core.agent.workflow.workflow_events import AgentStream
    from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
    from llama_index.core.llms.mock import MockFunctionCallingLLM
    from llama_index.core.tools import FunctionTool
    from llama_index.core.utils import get_tokenizer
    from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent

import keepstep as ks
from keepstep.agents.contract import AgentContract
from keepstep.agents.llamaindex import durable, finish
from tests.engine.world import steps_of, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pydantic.PydanticDeprecatedSince20")


class Scripted(MockFunctionCallingLLM):
    """The framework's own test model, which plays a conversation and reports tokens."""

    talk: object = None
    who: str = "main"

    def _turn(self, messages):
        given = {m.additional_kwargs["tool_call_id"]: m.content for m in messages if m.role == MessageRole.TOOL}
        turn = self.talk.think(self.who, given)
        blocks = [
            ToolCallBlock(tool_call_id=call.id, tool_name=call.tool, tool_kwargs=call.arguments) for call in turn.calls
        ]
        message = ChatMessage(role="assistant", blocks=blocks) if blocks else ChatMessage("", role="assistant")
        return turn, message

    async def achat(self, messages, **kwargs):
        turn, message = self._turn(messages)
        if turn.text:
            message = ChatMessage(turn.text, role="assistant")
        return ChatResponse(message=message, additional_kwargs={"prompt_tokens": turn.tokens})

    async def astream_chat(self, messages, **kwargs):
        turn, message = self._turn(messages)

        async def pieces():
            if turn.calls:
                yield ChatResponse(message=message, delta="")
                return
            text = ""
            for piece in turn.pieces:
                text += piece
                yield ChatResponse(message=ChatMessage(text, role="assistant"), delta=piece)
                await self.talk.sent()

        return pieces()


class TestContract(AgentContract):
    lacks = {"parking": "the framework waits for its own events while a tool waits"}  # noqa: RUF012

    def build(self, talk):
        get_tokenizer()("")  # loaded once, and not in every process that is killed

        def tool(name, **options):
            async def use(word: str) -> str:
                return await talk.use(name, word)

            return FunctionTool.from_defaults(async_fn=use, name=name, description=name, **options)

        def agent(name, tools):
            model = Scripted(talk=talk, who=name, is_chat_model=True)
            return FunctionAgent(name=name, description=name, tools=tools, llm=model, streaming=talk.streamed)

        helper = durable(agent("helper", [tool("look")]), **talk.options)

        async def ask(word: str) -> str:
            return str(await helper.run(user_msg=word))

        names = ("look", "meet", "flaky", "broken", "slow", "pay")
        asks = FunctionTool.from_defaults(async_fn=ask, name="ask", description="ask")
        options = {**talk.options, "tools": {**talk.options["tools"], "ask": None}}
        main = durable(agent("main", [*map(tool, names), asks]), **options, approve=["pay"])

        async def converse(question):
            handler = main.run(user_msg=question)
            async for event in handler.stream_events():
                if isinstance(event, AgentStream) and event.delta:
                    talk.saw(event.delta)
            return {"answer": str(await handler)}

        return converse


def scripted(*answers):
    """A model that gives these answers one after the other: a text, or calls of tools."""
    left = list(answers)

    def generate(messages, **kwargs):
        done = sum(m.role == MessageRole.ASSISTANT for m in messages)
        answer = left[min(done, len(left) - 1)]
        if isinstance(answer, str):
            return ChatMessage(answer, role="assistant")
        blocks = [ToolCallBlock(tool_call_id=one, tool_name=name, tool_kwargs=given) for name, given, one in answer]
        return ChatMessage(role="assistant", blocks=blocks)

    return MockFunctionCallingLLM(response_generator=generate, is_chat_model=True)


@pytest.mark.one_store
async def test_handed_over_agents_and_questions_are_durable(world, effects):
    async def refund(ctx: Context, eur: int) -> str:
        """Refund."""
        asked = InputRequiredEvent(prefix=f"pay {eur}?")
        answer = await ctx.wait_for_event(HumanResponseEvent, waiter_event=asked, waiter_id="pay")
        return f"paid {eur}" if answer.response == "yes" else "denied"

    async def look(word: str) -> str:
        """Look."""
        effects.append(word)
        return f"<{word}>"

    def team():
        first = FunctionAgent(
            name="desk",
            description="desk",
            tools=[look],
            can_handoff_to=["billing"],
            llm=scripted([("look", {"word": "a"}, "c1")], [("handoff", {"to_agent": "billing", "reason": "eur"}, "h")]),
        )
        second = FunctionAgent(
            name="billing",
            description="billing",
            tools=[refund],
            llm=scripted("", "", [("refund", {"eur": 5}, "r1")], "refunded"),
        )
        return durable(AgentWorkflow(agents=[first, second], root_agent="desk"))

    @ks.workflow
    async def desk():
        return str(await finish(team().run(user_msg="money back?")))

    async with world.engine() as engine:
        run = await engine.start(desk)

        async def asked():
            return (await run.published()).get("input:n1") == "pay 5?"

        await until(asked)
        await run.signal("input:n1", "yes")
        assert await run.result(30) == "refunded"
        agents = {one.agent for one in await run.checkpoints() if one.kind == "step completed"}
        assert agents == {"desk", "billing"}
        assert [name for name in await steps_of(run) if name.startswith("look")] == ["look#@c1"]
    assert effects == ["a"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_model_cannot_be_called_in_a_blocking_way(world):
    agent = durable(FunctionAgent(name="desk", tools=[], llm=scripted("done")))

    @ks.workflow
    async def desk():
        try:
            agent.llm.chat([ChatMessage("hi")])
        except ks.DefinitionError as error:
            return str(error)

    async with world.engine() as engine:
        assert "use achat or astream_chat" in await (await engine.start(desk)).result(30)
    assert (await asyncio.to_thread(agent.llm.chat, [ChatMessage("hi")])).message.content == "done"


def test_other_objects_are_refused():
    with pytest.raises(ks.DefinitionError, match="must be an AgentWorkflow or an agent of one, got str"):
        durable("agent")
