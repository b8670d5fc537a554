"""Whoever awaits results asks the store seldom while nothing happens, and at once when something does."""

from __future__ import annotations

import asyncio

import pytest

import keepstep as ks
from keepstep.engine import handle
from keepstep.stores.memory import MemoryStore
from keepstep.stores.postgres import PostgresStore
from keepstep.workflows.definition import Workflow
from tests.postgres import empty_store

SECONDS = 20.0
WAITERS = 50


async def approval() -> object:
    return await ks.wait_for("approved")


APPROVAL = Workflow(approval, name="waiting approval")


class Counting:
    def __init__(self, inner) -> None:
        self.inner = inner
        self.reads = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def get_run(self, run_id):
        self.reads += 1
        return self.inner.get_run(run_id)


@pytest.mark.parametrize("kind", ["memory", "postgres"])
def test_awaited_results_are_read_less_and_less_often(kind, monkeypatch):
    monkeypatch.setattr(handle, "LOOK_SECONDS", 0.05)

    async def main(store) -> None:
        async with ks.open(store, workflows=[APPROVAL], worker=False) as client:
            runs = [await client.start(APPROVAL) for _ in range(WAITERS)]
            waiting = [asyncio.create_task(run.result(timeout=SECONDS)) for run in runs]
            await asyncio.sleep(0.05 * (1 + 2 + 4))  # three looks, each after twice the pause of the one before
            before = store.reads
            await asyncio.sleep(1.5)  # at first these would have been thirty
            assert store.reads - before <= 4 * WAITERS
            async with ks.open(store, workflows=[APPROVAL]):
                for run in runs:
                    await run.signal("approved", 1)
                assert await asyncio.gather(*waiting) == [1] * WAITERS

    if kind == "memory":
        asyncio.run(main(Counting(MemoryStore())))
    else:
        with empty_store() as url:
            store = PostgresStore(url)
            try:
                asyncio.run(main(Counting(store)))
            finally:
                store.close()
