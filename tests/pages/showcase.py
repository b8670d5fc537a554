"""Workflows of a small shop, for pictures of the pages."""

import asyncio

import keepstep as ks


@ks.step
async def reserve(item: str) -> dict:
    await asyncio.sleep(0.05)
    return {"item": item, "shelf": "B7"}


@ks.step(retry=ks.Retry(attempts=4, base_seconds=0.05))
async def charge(customer: str, euros: float) -> dict:
    await asyncio.sleep(0.12)
    if ks.attempt() < 3:
        raise ConnectionError("the payment service does not answer")
    return {"payment": "pay_81c2", "euros": euros}


@ks.step
async def pack(item: str) -> str:
    await asyncio.sleep(0.08)
    return f"parcel of {item}"


@ks.step
async def ship(parcel: str) -> str:
    await asyncio.sleep(0.1)
    return "track-4711"


@ks.workflow(name="order")
async def order(customer: str, items: list[str], euros: float) -> dict:
    """Sell items: reserve them, ask above 500 euros, charge, pack and ship."""
    kept = await ks.map(reserve, items)
    if euros > 500:
        ks.publish("question", f"Sell {', '.join(items)} to {customer} for {euros:.2f} euros?")
        if not await ks.wait_for("approved", timeout=86_400, default=False):
            return {"sold": False}
    paid = await charge(customer, euros)
    parcels = await ks.map(pack, items)
    return {"sold": True, "paid": paid, "kept": kept, "tracks": await ks.map(ship, parcels)}


review = ks.Graph("review", max_iterations=20)


@review.step
async def draft(state):
    await asyncio.sleep(0.05)
    return {"text": f"Draft {state.get('round', 0) + 1} of the notes for version 2", "round": state.get("round", 0) + 1}


@review.step
async def critic(state):
    await asyncio.sleep(0.05)
    return {"score": round(0.5 + 0.2 * state["round"], 2)}


@review.step
async def publish(state):
    return {"published": True}


review.edge("draft", "critic")
review.edge("critic", "draft", when=lambda state: state["score"] < 0.9)
review.edge("critic", "publish")
review.entry("draft")
review.exit("publish")


@ks.step
async def load(table: str) -> int:
    await asyncio.sleep(0.03)
    if table == "invoices":
        raise ks.Permanent("column 'vat' is missing in invoices.csv, line 3,481")
    return 1200


@ks.workflow(name="nightly-import")
async def nightly_import(tables: list[str]) -> int:
    return sum(await ks.map(load, tables))
