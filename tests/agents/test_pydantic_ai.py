"""Pydantic AI inside a workflow."""

import json

from pydantic_ai import Agent, DeferredToolRequests, ModelRetry
from pydantic_ai.messages import ModelResponse, RetryPromptPart, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage

from keepstep.agents.contract import AgentContract, Trouble
from keepstep.agents.pydantic_ai import approved, durable


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
