"""A replay that stands still is set aside with what was expected; slow work of the code's own is not (K4)."""

import asyncio
import threading

import pytest

import keepstep as ks
from keepstep.kernel import stall
from tests.engine.world import until, until_at_last_wait, until_status

pytestmark = [pytest.mark.live_only, pytest.mark.one_store]


@ks.step
async def note(what):
    return what


async def recovered(world, workflow):
    """A run of the workflow, crashed at its last wait and taken up by an engine that finds a stall soon."""
    engine = await world.started(linger_seconds=60.0)
    await engine.start(workflow, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, stall_seconds=0.1)
    return await engine.get("r")


async def test_replay_that_waits_for_something_unknown_is_set_aside(world):
    gates = [asyncio.get_running_loop().create_future() for _ in range(2)]
    gates[1].set_result(None)

    @ks.workflow
    async def gated():
        await note("before")
        await gates.pop()
        await note("after")
        await ks.wait_for("go")

    run = await recovered(world, gated)
    await until_status(run, "set aside")
    told = (await run.run()).error.message
    assert "note#2" in told
    assert "stall_seconds" in told


@pytest.mark.parametrize("kind", ["timer", "thread"])
async def test_slow_work_of_the_codes_own_is_no_stall(world, kind, monkeypatch):
    looks, released = [], threading.Event()
    waited = stall._waits

    def counted(run):
        looks.append(run)
        if len(looks) > 3 * stall.LOOKS:
            released.set()
        return waited(run)

    monkeypatch.setattr(stall, "_waits", counted)
    slow = False

    @ks.workflow
    async def working():
        await note("before")
        if slow and kind == "thread":
            await asyncio.to_thread(released.wait)
        elif slow:
            while not released.is_set():  # noqa: ASYNC110 - it is a plain timer that is tried
                await asyncio.sleep(0.3)
        await note("after")
        return await ks.wait_for("go")

    engine = await world.started(linger_seconds=60.0)
    await engine.start(working, run_id="r")
    await until_at_last_wait(engine, "r")
    slow = True
    engine = await world.crash_and_recover(engine, stall_seconds=0.1)
    run = await engine.get("r")
    await until(released.is_set)
    await run.signal("go", 7)
    assert await run.result(30) == 7
