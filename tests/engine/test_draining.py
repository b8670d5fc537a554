"""A worker that is told to drain while its engine stays open."""

from __future__ import annotations

import asyncio

import pytest

import keepstep as ks
from tests.engine.world import until, until_status

pytestmark = pytest.mark.live_only


async def test_a_drained_engine_goes_on_without_claims(tmp_path):
    go = asyncio.Event()

    @ks.step
    async def wait():
        await go.wait()

    @ks.workflow
    async def slow():
        await wait()
        await wait()

    async with ks.open(f"{tmp_path}/runs.db", lease_seconds=0.9, stop_seconds=10) as engine:
        run = await engine.start(slow)
        assert await engine.drain(engine.worker.id)
        assert not await engine.drain("nobody")
        await asyncio.wait_for(engine.told_to_drain.wait(), 30)
        late = await engine.start(slow)
        assert (await late.run()).worker is None
        go.set()
        await until_status(run, "queued")
        await until(lambda: not engine.live)
        (worker,) = await engine.workers()
        assert (worker.leases, worker.alive, worker.claims) == (0, True, False)
        async with ks.open(f"{tmp_path}/runs.db") as other:
            assert await (await other.get(run.id)).result() is None
            assert await late.result() is None


def test_a_blocking_engine_lists_and_drains_workers(tmp_path):
    with ks.open(f"{tmp_path}/runs.db") as engine:
        (worker,) = engine.workers()
        assert worker.claims
        assert engine.drain(worker.id)
        assert not engine.workers()[0].claims
