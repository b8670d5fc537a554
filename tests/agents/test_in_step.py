"""A durable agent that is called in the body of a step, where its calls are not steps."""

import logging
from importlib import import_module

import pytest

import keepstep as ks
from keepstep.agents.contract import Talk, ToolCall, Turn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pydantic.PydanticDeprecatedSince20")

MODULES = ["adk", "agent_framework", "llamaindex", "openai_agents", "pydantic_ai", "smolagents", "strands"]


@pytest.mark.parametrize("framework", MODULES)
async def test_log_warns_once_of_an_agent_in_a_step(framework, tmp_path, caplog):
    contract = import_module(f"tests.agents.test_{framework}").TestContract()
    script = {"main": (Turn((ToolCall("look", "all-1", "a"),)), Turn(text="all is well"))}
    talk = Talk(script, path=tmp_path / "effects")
    name = f"ask {framework}"
    ask = ks.step(name=name)(contract.build(talk))

    @ks.workflow(name=f"in-step-{framework}")
    async def desk():
        return (await ask("why"))["answer"]

    with caplog.at_level(logging.WARNING, logger="keepstep"):
        async with ks.open("memory:", workflows=[desk]) as engine:
            assert await (await engine.start(desk)).result(30) == "all is well"
    told = [one.getMessage() for one in caplog.records if "durable agent" in one.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"step '{name}' calls a durable agent in its body")
    assert f"tools={{'{name}': None}}" in told[0]
