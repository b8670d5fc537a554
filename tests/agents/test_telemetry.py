"""Spans of agents follow the conventions for generative AI, with a real framework and its model for tests."""

import pytest
from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel

import keepstep as ks
from keepstep.agents.pydantic_ai import durable
from tests.observers.test_opentelemetry import Telemetry


def gen_ai(span):
    return {key.removeprefix("gen_ai."): value for key, value in span.attributes.items() if key.startswith("gen_ai.")}


@pytest.mark.live_only
async def test_calls_of_an_agent_have_gen_ai_attributes(world):
    telemetry = Telemetry()
    agent = Agent(TestModel(), name="clerk")

    @agent.tool_plain
    def look(word: str) -> str:
        return word

    clerk = durable(agent)

    @ks.workflow(name="asking")
    async def program():
        return (await clerk.run("what is it?")).output

    async with world.engine(observers=telemetry.observer) as engine:
        await (await engine.start(program, run_id="talk")).result(30)
    acts = {"agent.name": "clerk", "conversation.id": "talk"}
    first, second = map(gen_ai, telemetry.named("chat test"))
    assert first["usage.input_tokens"] > 0 < second["usage.output_tokens"]
    assert first.items() >= {"operation.name": "chat", "request.model": "test", **acts}.items()
    (tool,) = map(gen_ai, telemetry.named("execute_tool look"))
    assert tool.pop("tool.call.id").startswith("pyd_ai")
    assert tool == {"operation.name": "execute_tool", "tool.name": "look", **acts}
    (root,) = map(gen_ai, telemetry.named("workflow asking"))
    assert root == {"operation.name": "invoke_workflow", "workflow.name": "asking", "conversation.id": "talk"}


@pytest.mark.live_only
async def test_tasks_of_a_hosted_agent_are_invocations(world):
    telemetry = Telemetry()

    @ks.agent("adder", capabilities=["add"])
    async def adder(number):
        return number + 1

    @ks.workflow(name="giving")
    async def program():
        return await ks.perform("add", 1)

    async with world.engine(observers=telemetry.observer, agents=adder) as engine:
        assert await (await engine.start(program)).result(30) == 2
    (task,) = map(gen_ai, telemetry.named("invoke_agent adder"))
    assert (task["operation.name"], task["agent.name"]) == ("invoke_agent", "adder")
