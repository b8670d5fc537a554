"""An expense waits for a person: for days if need be, as one row of a table, through any number of restarts."""

import asyncio

import keepstep as ks

paid: list[str] = []


@ks.step
async def pay(who: str, amount: int) -> str:
    paid.append(who)
    return f"paid {amount} to {who}"


@ks.workflow
async def expense(who: str, amount: int) -> str:
    if amount > 100:
        decision = await ks.wait_for("approve", timeout=7 * 86_400, default={"ok": False, "by": "nobody in a week"})
        if not decision["ok"]:
            return f"refused by {decision['by']}"
    return await pay(who, amount)


async def main() -> None:
    async with ks.open("expenses.db") as engine:
        small = await engine.start(expense, "Ada", 20)
        large = await engine.start(expense, "Bob", 5000)
        other = await engine.start(expense, "Cyd", 9000)
        assert await small.result() == "paid 20 to Ada"

    # Another program, another day: whoever knows the id may decide, and whoever has a worker goes on.
    async with ks.open("expenses.db", worker=False) as office:
        unpaid = await office.list(workflow="expense", status=frozenset({ks.Status.WAITING, ks.Status.QUEUED}))
        assert {run.id for run in unpaid.runs} >= {large.id, other.id}
        await office.signal(large.id, "approve", {"ok": True, "by": "Dora"})
        await office.signal(other.id, "approve", {"ok": False, "by": "Dora"})
    async with ks.open("expenses.db") as engine:
        assert await (await engine.get(large.id)).result() == "paid 5000 to Bob"
        assert await (await engine.get(other.id)).result() == "refused by Dora"
    assert paid == ["Ada", "Bob"]
    print("paid:", ", ".join(paid))


if __name__ == "__main__":
    asyncio.run(main())
