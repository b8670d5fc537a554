"""Recipes for other frameworks keep the contract. `make agents-extra` runs each in an environment of its own."""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import pytest

from keepstep.agents.calls import AskedIds, CallSteps
from keepstep.agents.contract import AgentContract
from keepstep.agents.threads import BlockingCalls, in_thread
from tests import page

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "agents-other-frameworks.md"


class _Absent:
    """Stands for the contract in an environment without the framework."""

    framework = ""

    def test_framework_is_installed(self):
        pytest.skip(f"{self.framework} is not installed; run make agents-extra")


def contract_of(framework):
    """The contract, if there is the framework to keep it."""
    there = importlib.util.find_spec(framework) is not None
    return AgentContract if there else type("Absent", (_Absent,), {"framework": framework})


def recipe(name):
    """The file that the page shows, as a module."""
    [block] = [one for one in page.blocks(PAGE.read_text(encoding="utf-8")) if f"file={name}.py" in one.marks]
    module = sys.modules[name] = types.ModuleType(name)
    exec(page.compiled(block, str(PAGE)), vars(module))
    return module


def test_recipes_are_written_for_python():
    for block in page.blocks(PAGE.read_text(encoding="utf-8")):
        page.compiled(block, str(PAGE))


class TestCrewAI(contract_of("crewai")):
    lacks = {  # noqa: RUF012
        "approval": "the recipe has none; a tool that is not a step may ask",
        "cancel": "a thread cannot be ended; it stops at its next call",
        "streaming": "the framework streams to its own event bus",
        "timeouts": "a thread cannot be ended; it stops at its next call",
    }

    def build(self, talk):
        os.environ.update(OTEL_SDK_DISABLED="true", CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false")
        from crewai import Agent, BaseLLM, Crew, Task
        from crewai.tools import BaseTool
        from pydantic import BaseModel

        made = recipe("durable_crewai")

        class Scripted(BaseLLM):
            def call(self, messages, *args, **kwargs):
                given = {one["tool_call_id"]: one["content"] for one in messages if one["role"] == "tool"}
                turn = talk.think(self.model, given)
                self._track_token_usage_internal({"prompt_tokens": turn.tokens, "total_tokens": turn.tokens})
                asked = [(one.id, {"name": one.tool, "arguments": json.dumps(one.arguments)}) for one in turn.calls]
                return [{"id": one, "type": "function", "function": call} for one, call in asked] or turn.text

            def supports_function_calling(self):
                return True

        class Word(BaseModel):
            word: str

        class Use(BaseTool):
            name: str
            description: str = "Use it"
            args_schema: type[BaseModel] = Word

            def _run(self, word):
                return talk.use_in_thread(self.name, word)

        class Ask(Use):
            def _run(self, word):
                return crew("helper", [Use(name="look")], word).kickoff().raw

        def crew(who, tools, question):
            options = {**talk.options, "tools": {**talk.options["tools"], "ask": None}}
            calls, ids = BlockingCalls(CallSteps(who, **options)), AskedIds()
            agent = Agent(
                role=who,
                goal="answer",
                backstory="a clerk",
                llm=made.DurableLLM(Scripted(model=who), calls, ids),
                tools=[made.DurableTool(one, calls, ids) for one in tools],
                verbose=False,
            )
            task = Task(description=question, expected_output="the answer", agent=agent)
            return Crew(agents=[agent], tasks=[task], memory=False, verbose=False)

        async def converse(question):
            tools = [Use(name=one) for one in ("look", "meet", "flaky", "broken", "slow")]
            result = await in_thread(lambda: crew("main", [*tools, Ask(name="ask")], question).kickoff())
            return {"answer": result.raw}

        return converse


class TestAutoGen(contract_of("autogen_agentchat")):
    lacks = {  # noqa: RUF012
        "approval": "the recipe has none; a tool that is not a step may ask",
        "streaming": "the recipe gives whole answers",
    }

    def build(self, talk):  # noqa: C901 - a client has many methods
        from autogen_agentchat.agents import AssistantAgent
        from autogen_core import FunctionCall
        from autogen_core.models import ChatCompletionClient, CreateResult, FunctionExecutionResultMessage, RequestUsage
        from autogen_core.tools import FunctionTool

        made = recipe("durable_autogen")
        info = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown"}

        class Scripted(ChatCompletionClient):
            component_type, component_config_schema = "model", None

            def __init__(self, who):
                self.who = who

            async def create(self, messages, **options):
                given = {
                    one.call_id: one.content
                    for message in messages
                    if isinstance(message, FunctionExecutionResultMessage)
                    for one in message.content
                }
                turn = talk.think(self.who, given)
                calls = [FunctionCall(one.id, json.dumps(one.arguments), one.tool) for one in turn.calls]
                return CreateResult(
                    finish_reason="function_calls" if calls else "stop",
                    content=calls or turn.text,
                    usage=RequestUsage(prompt_tokens=turn.tokens, completion_tokens=0),
                    cached=False,
                )

            async def create_stream(self, *args, **options):
                raise NotImplementedError
                yield

            async def close(self):
                pass

            def actual_usage(self):
                return RequestUsage(prompt_tokens=0, completion_tokens=0)

            total_usage = actual_usage

            def count_tokens(self, *args, **options):
                return 0

            def remaining_tokens(self, *args, **options):
                return 1000

            @property
            def capabilities(self):
                return info

            @property
            def model_info(self):
                return {**info, "structured_output": False, "multiple_system_messages": False}

        def tool(name):
            async def use(word: str) -> str:
                return await talk.use(name, word)

            return FunctionTool(use, name, name=name)

        def agent(who, tools):
            calls = CallSteps(who, **{**talk.options, "tools": {**talk.options["tools"], "ask": None}})
            bench = made.DurableWorkbench(tools, calls)
            client = made.DurableClient(Scripted(who), calls)
            return AssistantAgent(who, client, workbench=bench, max_tool_iterations=9)

        async def ask(word: str) -> str:
            return (await agent("helper", [tool("look")]).run(task=word)).messages[-1].content

        async def converse(question):
            tools = [tool(one) for one in ("look", "meet", "flaky", "broken", "slow")]
            main = agent("main", [*tools, FunctionTool(ask, "ask", name="ask")])
            return {"answer": (await main.run(task=question)).messages[-1].content}

        return converse
