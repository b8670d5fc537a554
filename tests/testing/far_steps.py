"""Steps whose bodies run in other processes, for tests of what a test can do with them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import keepstep as ks
from keepstep.testing import effect

RETRY = ks.Retry(attempts=3, base_seconds=0.1)


@ks.step(executor="process", retry=RETRY)
def charge(order: str) -> str:
    effect("charge", order)  # doubled
    return f"receipt for {order}"


@ks.step(executor="ray", retry=RETRY)
async def charge_with_key(order: str) -> str:
    effect("charge", order, key=ks.idempotency_key())
    return f"receipt for {order}"


@ks.step(executor="process", at_most_once=True)
def charge_once(order: str) -> str:
    effect("charge", order)
    return f"receipt for {order}"


@ks.step(executor="process")
def only_once_tried(order: str) -> str:
    return order


@ks.workflow(name="far:doubles")
async def doubles() -> str:
    return await charge("order-1")


@ks.workflow(name="far:keyed")
async def keyed() -> str:
    return await charge_with_key("order-1")


@ks.workflow(name="far:at-most-once")
async def at_most_once() -> str:
    return await charge_once("order-1")


@ks.workflow(name="far:unretried")
async def unretried() -> str:
    return await only_once_tried("order-1")


@ks.step(executor="process")
def begun(path: str, release: str) -> int:
    """Note that a body has begun; return its process when a file is there."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write("begun\n")
    while not Path(release).exists():
        time.sleep(0.005)
    return os.getpid()


@ks.step(executor="process")
def released(path: str) -> int:
    Path(path).touch()
    return os.getpid()


@ks.step
async def noted(path: str) -> None:
    """Return when another body has begun."""
    while not Path(path).exists():  # noqa: ASYNC110, ASYNC240 - written by another process
        await asyncio.sleep(0.005)


@ks.step
async def release_now(release: str) -> None:
    Path(release).touch()  # noqa: ASYNC240


@ks.step(executor="process")
def sleeping(seconds: float) -> None:
    time.sleep(seconds)
