"""A team: a planner cuts a question into parts, researchers work on them at once, and a critic judges the writer."""

import asyncio

import keepstep as ks

FACTS = {"bees": "bees dance", "wasps": "wasps build with paper", "ants": "ants farm fungi"}


@ks.step
async def ask_model(prompt: str) -> str:
    """Your model's client is called here; each answer is a checkpoint."""
    await asyncio.sleep(0)
    return FACTS.get(prompt, prompt)


@ks.agent(capabilities=["plan"])
async def planner(question: str) -> list[str]:
    return (await ask_model(question)).split(" and ")


@ks.agent("ann", capabilities=["research"], max_tasks=2)
async def ann(topic: str) -> str:
    return await ask_model(topic)


@ks.agent("bob", capabilities=["research"], max_tasks=2)
async def bob(topic: str) -> str:
    return await ask_model(topic)


@ks.agent(capabilities=["write"])
async def writer(ask: dict) -> str:
    text = "; ".join(ask["task"])
    return text if ask["feedback"] is None else f"{text}. {ask['feedback']}"


@ks.agent(capabilities=["criticise"])
async def critic(ask: dict) -> dict:
    good = ask["draft"].endswith("source: the insects")
    return {"score": 0.95 if good else 0.4, "feedback": "source: the insects"}


desk = ks.Team("desk", agents=[planner, ann, bob, writer, critic], timeout=3600)


@ks.workflow
async def report(question: str) -> str:
    with ks.stage("plan"):
        topics = await desk.perform("plan", question)
    with ks.stage("research"):
        findings = await ks.gather(*[desk.perform("research", topic) for topic in topics])
    with ks.stage("write"):
        refined = await ks.refine(findings, generator="write", critic="criticise", threshold=0.9)
    return refined.result


async def main() -> None:
    async with ks.open("newsdesk.db", agents=desk) as engine:
        run = await engine.start(report, "bees and wasps and ants", run_id="insects")
        text = await run.result()
        print(text)
        assert text == "bees dance; wasps build with paper; ants farm fungi. source: the insects"
        chosen = [one.agent for one in await run.checkpoints() if one.kind == "agent started"]
        assert chosen[0] == "planner"
        assert sorted(chosen[4:]) == ["critic", "critic", "writer", "writer"]
        assert set(chosen[1:4]) <= {"ann", "bob"}


if __name__ == "__main__":
    asyncio.run(main())
