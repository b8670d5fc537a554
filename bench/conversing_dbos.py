"""The same agent with the plug-in of DBOS for Pydantic AI, or without; in an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from conversing import CALLS, pydantic_agent


def main(where: str, durable: str, times: str) -> None:
    from dbos import DBOS
    from pydantic_ai import Agent
    from pydantic_ai.durable_exec.dbos import DBOSDurability

    agent = pydantic_agent()
    if durable == "yes":
        DBOS(
            config={
                "name": "bench",
                "system_database_url": f"sqlite:///{where}/dbos.sqlite",
                "log_level": "ERROR",
                "console_log_level": "ERROR",
                "application_version": "v1",
                "executor_id": "local",
            }
        )
        plain = pydantic_agent(DBOS.step())  # the plug-in records no function tools: users make them steps
        tools = [tool.function for tool in plain._function_toolset.tools.values()]
        agent = Agent(plain.model, name="bench", tools=tools, capabilities=[DBOSDurability()])

        @DBOS.workflow()
        async def converse() -> str:
            return (await agent.run("go")).output

        DBOS.launch()
    else:

        async def converse() -> str:
            return (await agent.run("go")).output

    async def measured() -> list[float]:
        taken = []
        for _ in range(int(times) + 1):
            began = time.perf_counter()
            assert await converse() == "done"
            taken.append(time.perf_counter() - began)
        return taken[1:]

    taken = sorted(asyncio.run(measured()))
    print(json.dumps({"seconds": taken[len(taken) // 2], "calls": CALLS}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
