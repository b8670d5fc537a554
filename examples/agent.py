"""An agent: a model chooses tools until it has an answer. Every model call and every tool call is a step.

A crash between two turns costs nothing: turns that were paid for are not paid for again.
"""

import asyncio
from typing import Any

import keepstep as ks

MAX_TURNS = 8


@ks.step(retry=ks.Retry.by_class(), timeout=60)
async def think(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Stands for a call of a language model; its tokens reach whoever watches the run."""
    asked = [m for m in messages if m["role"] == "tool"]
    if not asked:
        return {"tool": "weather", "input": {"city": "Oslo"}}
    if len(asked) == 1:
        return {"tool": "calculate", "input": {"celsius": asked[0]["content"]}}
    answer = f"It is {asked[1]['content']:.0f} °F in Oslo."
    for word in answer.split():
        ks.emit(word)
    return {"answer": answer}


@ks.step(retry=ks.Retry(attempts=3))
async def weather(city: str) -> float:
    return {"Oslo": -5.0}[city]


@ks.step
def calculate(celsius: float) -> float:
    return celsius * 9 / 5 + 32


TOOLS = {"weather": weather, "calculate": calculate}


@ks.workflow
async def agent(question: str) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for turn in range(MAX_TURNS):
        ks.publish("turn", turn)
        reply = await think(messages)
        if "answer" in reply:
            return reply["answer"]
        result = await TOOLS[reply["tool"]](**reply["input"])
        messages.append({"role": "tool", "content": result})
    raise ks.Permanent(f"no answer after {MAX_TURNS} turns")


async def main() -> None:
    async with ks.open("agent.db") as engine:
        run = await engine.start(agent, "How warm is it in Oslo, in Fahrenheit?")
        words = [event.data["value"] async for event in run.watch() if event.name == "token.emitted"]
        answer = await run.result()
        print(answer)
        assert answer == "It is 23 °F in Oslo." == " ".join(words)
        assert await run.published() == {"turn": 2}


if __name__ == "__main__":
    asyncio.run(main())
