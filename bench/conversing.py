"""One agent with 20 model calls and 40 tool calls, by itself and in a workflow, each in a process of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

#: Tool calls that the model asks for at once, turn by turn; then it answers.
ASKED = (3, 3, *[2] * 17)
CALLS = len(ASKED) + 1 + sum(ASKED)


def pydantic_agent(step: Any = None) -> Any:
    """The agent of Pydantic AI with its own test model; `step` makes a step of its tool."""
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    def think(messages: Any, info: Any) -> ModelResponse:
        turn = sum(isinstance(message, ModelResponse) for message in messages)
        if turn == len(ASKED):
            return ModelResponse(parts=[TextPart("done")])
        calls = range(ASKED[turn])
        return ModelResponse(parts=[ToolCallPart("look", {"n": n}, tool_call_id=f"c{turn}-{n}") for n in calls])

    async def look(n: int) -> str:
        return f"found {n}"

    return Agent(FunctionModel(think), name="bench", tools=[look if step is None else step(look)])


def openai_agent() -> Any:
    """The agent of the OpenAI Agents SDK with its own test model."""
    from agents import Agent, function_tool
    from agents.models.interface import Model
    from agents.testing import ScriptedModel, assistant_message, function_call

    class Scripted(Model):
        def _next(self, given: Any) -> ScriptedModel:
            done = sum(1 for one in given if isinstance(one, dict) and one.get("type") == "function_call_output")
            turn = 0
            while turn < len(ASKED) and done >= ASKED[turn]:
                done -= ASKED[turn]
                turn += 1
            if turn == len(ASKED):
                return ScriptedModel([[assistant_message("done")]])
            calls = range(ASKED[turn])
            return ScriptedModel([[function_call("look", {"n": n}, call_id=f"c{turn}-{n}") for n in calls]])

        async def get_response(self, *args: Any, **options: Any) -> Any:
            given = options["input"] if "input" in options else args[1]
            return await self._next(given).get_response(*args, **options)

        def stream_response(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

    @function_tool
    async def look(n: int) -> str:
        """Look something up."""
        return f"found {n}"

    return Agent("bench", model=Scripted(), tools=[look])


async def pydantic_ai(where: Path, *, durable: bool, times: int) -> dict[str, Any]:
    from keepstep.agents import pydantic_ai as adapter

    agent = pydantic_agent()
    if durable:
        agent = adapter.durable(agent)

    async def converse() -> str:
        return (await agent.run("go")).output

    return await _timed(converse, where, durable=durable, times=times)


async def openai_agents(where: Path, *, durable: bool, times: int) -> dict[str, Any]:
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
    from agents import Runner

    from keepstep.agents import openai_agents as adapter

    agent = openai_agent()
    if durable:
        agent = adapter.durable(agent)

    async def converse() -> str:
        return (await Runner.run(agent, "go", max_turns=CALLS)).final_output

    return await _timed(converse, where, durable=durable, times=times)


async def _timed(converse: Any, where: Path, *, durable: bool, times: int) -> dict[str, Any]:
    """The shortest of several conversations, after one that does not count: it loads what is loaded once."""
    import keepstep as ks

    taken = []
    if not durable:
        for _ in range(times + 1):
            began = time.perf_counter()
            assert await converse() == "done"
            taken.append(time.perf_counter() - began)
    else:
        workflow = ks.workflow(converse, name="bench")
        async with ks.open(f"sqlite:///{where}/runs.db") as engine:
            for _ in range(times + 1):
                began = time.perf_counter()
                run = await engine.start(workflow)
                assert await run.result() == "done"
                taken.append(time.perf_counter() - began)
    return {"seconds": sorted(taken[1:])[times // 2], "calls": CALLS}


JOBS = {"pydantic_ai": pydantic_ai, "openai_agents": openai_agents}
