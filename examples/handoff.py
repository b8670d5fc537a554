"""A hand-off: each agent does its part, says who goes on, and leaves what it knows in a shared memory."""

import asyncio

import keepstep as ks

cases = ks.Memory("cases")


async def remember(case: str, **facts: object) -> None:
    known = await cases.get(case, {})
    await cases.put(case, {**known, **facts})


@ks.agent
async def reception(case: str) -> dict:
    await remember(case, wants="a refund", order=7)
    return {"next": "accounting"}


@ks.agent
async def accounting(case: str) -> dict:
    known = await cases.get(case)
    await remember(case, paid=19.99, refund=known["wants"] == "a refund")
    return {"next": "letters"}


@ks.agent
async def letters(case: str) -> dict:
    known = await cases.get(case)
    return {"answer": f"order {known['order']}: we return {known['paid']}"}


@ks.workflow
async def serve(case: str, first: str = "reception", at_most: int = 10) -> str:
    agent = first
    for _ in range(at_most):
        done = await ks.perform(agent, case)
        if "answer" in done:
            return done["answer"]
        agent = done["next"]
    raise ks.Permanent(f"case {case} was handed on {at_most} times without an answer")


async def main() -> None:
    async with ks.open("handoff.db", agents=[reception, accounting, letters]) as engine:
        run = await engine.start(serve, "case-7", run_id="case-7")
        answer = await run.result()
        print(answer)
        assert answer == "order 7: we return 19.99"
        hands = [one.agent for one in await run.checkpoints() if one.kind == "agent started"]
        assert hands == ["reception", "accounting", "letters"]


if __name__ == "__main__":
    asyncio.run(main())
