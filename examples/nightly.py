"""A dag in a file, nightly.yaml, and its functions: parameters are the results of needs, else inputs of the run."""

import asyncio
from pathlib import Path

import keepstep as ks


async def orders(day: str) -> list[int]:
    return [120, 80, 45] if day == "monday" else []


async def refunds(day: str) -> list[int]:
    return [45] if day == "monday" else [30]


def total(orders: list[int], refunds: list[int]) -> int:
    return sum(orders) - sum(refunds)


def alarm(total: int) -> str:
    return f"{-total} lost"


def report(total: int, alarm: str | None = None) -> str:
    return f"{total} sold" if alarm is None else f"alarm: {alarm}"


FUNCTIONS = {"orders": orders, "refunds": refunds, "total": total, "alarm": alarm, "report": report}
nightly = ks.load(Path(__file__).with_name("nightly.yaml"), functions=FUNCTIONS)


async def main() -> None:
    async with ks.open("nightly.db") as engine:
        monday = await (await engine.start(nightly, day="monday")).result()
        sunday = await (await engine.start(nightly, day="sunday")).result()
    assert (monday, sunday) == ({"report": "200 sold"}, {"report": "alarm: 30 lost"})
    print("monday:", monday["report"])


if __name__ == "__main__":
    asyncio.run(main())
