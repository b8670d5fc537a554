"""The program that `keepstep demo` starts, kills and starts again: an order of eight steps."""

# ruff: noqa: D103 - shown to newcomers; the names are enough

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import keepstep as ks

RUN = "order-42"
STORE = "runs.db"
#: Every body that runs appends a line here. Keepstep does not know this file, so it serves as independent evidence.
EFFECTS = "effects.txt"


async def work(name: str, item: str) -> str:
    """The body of each step: a quarter of a second of work, and a line in the effects file at its begin and end."""
    note(f"begin {name}")
    await asyncio.sleep(0.25)
    note(f"end {name}")
    return f"{name} {item}: done"


def note(text: str) -> None:
    with Path(sys.argv[1], EFFECTS).open("a", encoding="utf-8") as file:
        file.write(f"{time.time():.6f} {os.getpid()} {text}\n")


# [shown
@ks.step
async def check_stock(item: str) -> str:
    return await work("check_stock", item)


@ks.step
async def charge_card(item: str) -> str:
    return await work("charge_card", item)  # must not happen twice


# shown]
@ks.step
async def reserve(item: str) -> str:
    return await work("reserve", item)


@ks.step
async def print_invoice(item: str) -> str:
    return await work("print_invoice", item)


@ks.step
async def pack(item: str) -> str:
    return await work("pack", item)


@ks.step
async def book_courier(item: str) -> str:
    return await work("book_courier", item)


@ks.step
async def send_receipt(item: str) -> str:
    return await work("send_receipt", item)


@ks.step
async def close_books(item: str) -> str:
    return await work("close_books", item)


STEPS = (check_stock, reserve, charge_card, print_invoice, pack, book_courier, send_receipt, close_books)


# [shown
@ks.workflow
async def order(item: str) -> list[str]:
    return [await step(item) for step in STEPS]  # eight of them


async def main(folder: Path) -> None:
    async with ks.open(folder / STORE) as engine:
        run = await engine.start(order, "a lamp", run_id=RUN)
        await run.result()


# shown]
if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
