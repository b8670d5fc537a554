"""An order: reserve, charge, ship. What fails later takes back what was done earlier, last first."""

import asyncio
from dataclasses import dataclass

import keepstep as ks


@dataclass
class Order:
    id: str
    item: str
    cents: int


ledger: list[str] = []  # stands for the outside world


@ks.step
async def reserve(order: Order) -> str:
    ledger.append(f"reserve {order.item}")
    return f"reservation-{order.id}"


@ks.step(retry=ks.Retry(attempts=3, base_seconds=0.01))
async def charge(order: Order) -> str:
    # A payment service that is sent the same key twice charges once.
    ledger.append(f"charge {order.cents} with key {ks.idempotency_key()[:6]}")
    return f"payment-{order.id}"


@ks.step
async def ship(order: Order) -> str:
    if order.item == "piano":
        raise ks.Permanent("too heavy for this carrier")
    return f"parcel-{order.id}"


@ks.step
async def refund(payment: str) -> None:
    ledger.append(f"refund {payment}")


@ks.step
async def release(reservation: str) -> None:
    ledger.append(f"release {reservation}")


@ks.workflow
async def fulfil(order: Order) -> str:
    undo = []
    try:
        reservation = await reserve(order)
        undo.append((release, reservation))
        payment = await charge(order)
        undo.append((refund, payment))
        return await ship(order)
    except ks.StepFailed as failure:
        for step, done in reversed(undo):  # steps too, so a crash in here repeats none of them
            await step(done)
        return f"cancelled: {failure.error.message}"


async def main() -> None:
    async with ks.open("orders.db") as engine:
        good = await engine.start(fulfil, Order("1", "book", 1500))
        assert await good.result() == "parcel-1"
        bad = await engine.start(fulfil, Order("2", "piano", 990_000))
        assert await bad.result() == "cancelled: too heavy for this carrier"
    print(*ledger, sep="\n")
    assert ledger[-2:] == ["refund payment-2", "release reservation-2"]


if __name__ == "__main__":
    asyncio.run(main())
