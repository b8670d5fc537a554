"""Runs that may be the ones which kill their workers: they begin alone, in turn with others, and no bystander pays."""

from __future__ import annotations

import asyncio

import pytest

import keepstep as ks
from keepstep.engine import suspects
from tests.engine.world import until, until_at_last_wait, until_status

pytestmark = pytest.mark.live_only


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(suspects, "ALONE_SECONDS", 0.3)
    monkeypatch.setattr(suspects, "TURN_SECONDS", 0.02)
    monkeypatch.setattr("keepstep.engine.worker.ALONE_SECONDS", 0.3)
    monkeypatch.setattr("keepstep.engine.worker.TURN_SECONDS", 0.02)


class Gate:
    """A step that is at work until it is let go, and how many are at work."""

    def __init__(self, name="held"):
        self.open = asyncio.Event()
        self.at_work = set()
        self.most = 0

        @ks.step
        async def hold(name):
            self.at_work.add(name)
            self.most = max(self.most, len(self.at_work))
            try:
                await self.open.wait()
            finally:
                self.at_work.discard(name)
            return name

        @ks.workflow(name=name)
        async def held(name):
            return await hold(name)

        self.workflow = held


async def crashed_twice(world, gate, *names):
    """An engine that has just found runs whose workers died twice while they were at work."""
    engine = await world.started()
    for name in names:
        await engine.start(gate.workflow, name, run_id=name)
    for _ in range(2):
        await until(lambda: gate.at_work >= set(names))
        await world.crash(engine)
        gate.at_work.clear()
        engine = await world.started()
    return engine


@pytest.mark.one_store
async def test_a_long_suspect_does_not_starve_its_neighbours(world):
    gate = Gate()

    @ks.workflow
    async def quick():
        return "done"

    engine = await crashed_twice(world, gate, "suspect")
    await until(lambda: "suspect" in gate.at_work)
    run = await engine.start(quick)
    assert await run.result(60) == "done"
    assert gate.at_work == {"suspect"}
    gate.open.set()
    assert await (await engine.get("suspect")).result(60) == "suspect"
    await engine.close()


@pytest.mark.one_store
async def test_a_suspect_is_not_starved_by_fresh_runs_nor_by_a_long_one(world):
    gate, others = Gate(), Gate("other")
    engine = await crashed_twice(world, gate, "a", "b")
    await until(lambda: gate.at_work)

    @ks.workflow
    async def again(number):
        await engine.start(again, number + 1)

    await engine.start(others.workflow, "long")
    await until(lambda: "long" in others.at_work)
    await engine.start(again, 0)
    gate.open.set()
    for name in ("a", "b"):
        assert await (await engine.get(name)).result(60) == name
    assert "long" in others.at_work
    await world.crash(engine)


@pytest.mark.one_store
async def test_two_suspects_never_work_together(world):
    gate = Gate()
    engine = await crashed_twice(world, gate, "a", "b", "c")
    gate.most = 0
    await until(lambda: gate.at_work)
    (first,) = gate.at_work
    neighbour = Gate("other")
    await engine.start(neighbour.workflow, "fresh")
    await until(lambda: neighbour.at_work, "the end of the time alone")
    assert gate.at_work == {first}
    gate.open.set()
    for name in ("a", "b", "c"):
        assert await (await engine.get(name)).result(60) == name
    assert gate.most == 1
    await world.crash(engine)


async def test_waiting_run_is_not_set_aside_for_deaths_of_its_worker(world):
    """Each life makes progress in the child alone; the parent waits for it, and executes nothing."""
    allowed, done = 0, 0

    @ks.step
    async def part(number):
        await until(lambda: number < allowed)
        return number

    @ks.workflow
    async def child():
        nonlocal done
        for number in range(6):
            await part(number)
            done = max(done, number + 1)
        return "all of it"

    @ks.workflow
    async def parent():
        return await (await ks.start(child))

    @ks.workflow
    async def root():
        return await (await ks.start(parent))

    async def ancestors(engine):
        runs = (await engine.list()).runs
        return [await engine.get(run.id) for run in runs if run.workflow.endswith(("root", "parent"))]

    engine = await world.started(linger_seconds=60)
    await engine.start(root, run_id="r")
    for allowed in range(1, 6):
        await until(lambda allowed=allowed: done == allowed)
        for ancestor in await ancestors(engine) if allowed > 2 else ():  # a crash while it is taken up counts for it
            await until_status(ancestor, "waiting")
        engine = await world.crash_and_recover(engine, linger_seconds=60)
    allowed = 6
    assert await (await engine.get("r")).result(60) == "all of it"
    await engine.close()


@pytest.mark.one_store
async def test_suspect_that_only_waits_is_parked_at_once(world):
    @ks.workflow
    async def waiting():
        return await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    run = await engine.start(waiting, run_id="r")
    for _ in range(2):
        await until_at_last_wait(engine, "r")
        engine = await world.crash_and_recover(engine, linger_seconds=60)
    run = await engine.get("r")
    await until_status(run, "waiting")
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    run = await engine.get("r")
    assert ((await run.run()).recoveries, await run.status()) == (2, "waiting")
    await run.signal("go", 7)
    assert await run.result(60) == 7
    await engine.close()


# -- max_runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["started", "claimed", "both"])
async def test_a_worker_never_drives_more_runs_than_it_may(world, way):
    gate, most = Gate(), 0
    engine = await world.started(worker=False)
    runs = [f"r{number}" for number in range(24)]
    if way != "started":
        for name in runs:
            await engine.start(gate.workflow, name, run_id=name)
    await engine.close()
    engine = await world.started(max_runs=4, stop_seconds=0)
    entered = engine.entered

    def watched(context):
        nonlocal most
        entered(context)
        most = max(most, len(engine.live))

    engine.entered = watched
    if way != "claimed":
        await asyncio.gather(*(engine.start(gate.workflow, name, run_id=f"new-{name}") for name in runs))
    await until(lambda: len(gate.at_work) == 4)
    gate.open.set()
    for name in runs:
        assert await (await engine.get(f"new-{name}" if way == "started" else name)).result(60) == name
    assert (most, gate.most) == (4, 4)
    await engine.close()
