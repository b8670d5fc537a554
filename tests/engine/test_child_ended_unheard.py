"""A child that ends while its parent has ended too tells nobody; a parent that goes on later still learns of it."""

import asyncio

import pytest

import keepstep as ks
from tests.engine.world import until_status

pytestmark = pytest.mark.on_postgres


class Family:
    """A parent that misses its deadline while it waits for its child."""

    def __init__(self):
        self.gate = asyncio.Event()

        @ks.step
        async def passes_the_gate(fails):
            await self.gate.wait()
            if fails:
                raise ks.Permanent("it is closed for good")
            return "through"

        @ks.workflow
        async def child_of_the_late(fails):
            return await passes_the_gate(fails)

        @ks.workflow
        async def late(fails):
            try:
                return await (await ks.start(child_of_the_late, fails))
            except ks.StepFailed as error:
                return f"told: {error.error.message}".rpartition(": ")[2]

        self.workflow = late

    async def parted(self, engine, *, fails=False):
        """The parent has failed by its deadline, and then its child has ended."""
        run = await engine.start(self.workflow, fails, run_id="parent", deadline=0.3)
        with pytest.raises(ks.RunTimedOut):
            await run.result(timeout=60)
        (child,) = (await engine.list(parent="parent")).runs
        self.gate.set()
        await until_status(await engine.get(child.id), "failed" if fails else "completed")
        return run


@pytest.mark.parametrize("fails, result", [(False, "through"), (True, "it is closed for good")])
async def test_a_parent_that_is_retried_learns_how_its_child_ended(world, fails, result):
    async with world.engine() as engine:
        run = await Family().parted(engine, fails=fails)
        await run.retry("more time")
        assert await run.result(timeout=60) == result


async def test_parent_rewound_past_the_start_learns_how_its_child_ended(world):
    async with world.engine() as engine:
        run = await Family().parted(engine)
        start = next(one.seq for one in await run.checkpoints() if one.kind.value == "child")
        await run.rewind(to=start)
        assert await run.result(timeout=60) == "through"
        assert len((await engine.list(parent="parent")).runs) == 1


async def test_removed_child_is_delivered_as_a_failure(world):
    async with world.engine() as engine:
        run = await Family().parted(engine)
        (child,) = (await engine.list(parent="parent")).runs
        await engine.call(engine.store.delete_runs, [child.id])
        await run.retry("more time")
        assert "was removed" in await run.result(timeout=60)
