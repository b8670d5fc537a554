"""A debate: two agents argue in turns, each sees what the other has said, and a judge decides."""

import asyncio

import keepstep as ks


@ks.step
async def ask_model(side: str, question: str, said: list[dict]) -> str:
    """Your model's client is called here."""
    await asyncio.sleep(0)
    answers = f", against {said[-1]['argument']!r}" if said else ""
    return f"{side} argument {len(said) // 2 + 1}{answers}"


def debater(side: str) -> ks.Agent:
    async def argue(task: dict) -> str:
        return await ask_model(side, task["question"], task["said"])

    return ks.Agent(f"{side}-side", perform=argue, capabilities=["argue", side])


@ks.agent(capabilities=["judge"])
async def judge(task: dict) -> dict:
    longest = max(task["said"], key=lambda one: len(one["argument"]))
    return {"winner": longest["side"], "because": longest["argument"]}


@ks.workflow
async def debate(question: str, rounds: int = 2) -> dict:
    said: list[dict] = []
    for _ in range(rounds):
        for side in ("pro", "contra"):
            argument = await ks.perform(["argue", side], {"question": question, "said": said})
            said = [*said, {"side": side, "argument": argument}]
    return await ks.perform("judge", {"question": question, "said": said})


async def main() -> None:
    async with ks.open("debate.db", agents=[debater("pro"), debater("contra"), judge]) as engine:
        run = await engine.start(debate, "Are graphs better than code?", run_id="debate-1")
        verdict = await run.result()
        print(verdict["winner"], "wins:", verdict["because"])
        assert verdict["winner"] == "contra"
        spoke = [one.agent for one in await run.checkpoints() if one.kind == "agent started"]
        assert spoke == ["pro-side", "contra-side", "pro-side", "contra-side", "judge"]


if __name__ == "__main__":
    asyncio.run(main())
