"""A wait takes its time from the moment at which the code asks for it, whatever happens meanwhile."""

import asyncio
import time
from datetime import timedelta

import pytest

import keepstep as ks
from keepstep.kernel import wakeups
from keepstep.ports import SystemClock
from tests.engine.world import until, until_status

HOUR = 3600.0


class Shifted(SystemClock):
    """A wall clock that tests set; the engine and a store in memory go by it."""

    def __init__(self, world):
        super().__init__()
        self.offset = 0.0
        world._memory.clock = self

    def now(self):
        return super().now() + self.offset


@ks.step
async def quick(value=None):
    return value


def starts(checkpoints):
    return {one.step: one.started_at for one in checkpoints if one.kind == "wait started"}


# -- live --------------------------------------------------------------------------------------------------------------


async def sleeps():
    await ks.sleep(0.2)


async def waits():
    with pytest.raises(ks.TimedOut):
        await ks.wait_for("nothing", timeout=0.2)


async def has_a_limit():
    with pytest.raises(ks.TimedOut):
        async with ks.timeout(0.2):
            await ks.wait_for("nothing")


async def races():
    async def nap():
        await ks.sleep(0.2)

    await ks.race(nap(), ks.wait_for("nothing", timeout=60))


async def maps():
    async def nap(_):
        await ks.sleep(0.2)

    await ks.map(nap, [1, 2])


@pytest.mark.live_only
@pytest.mark.one_store
@pytest.mark.parametrize("wait", [sleeps, waits, has_a_limit, races, maps])
async def test_wait_after_plain_work_takes_its_whole_time(world, wait):
    @ks.workflow
    async def works_then_waits():
        await quick()
        await asyncio.sleep(0.3)  # plain work: no outcome tells the run what time it is
        began = time.monotonic()
        await wait()
        return time.monotonic() - began

    async with world.engine() as engine:
        assert 0.19 <= await (await engine.start(works_then_waits)).result(30) < 5.0


@pytest.mark.live_only
@pytest.mark.one_store
async def test_wait_of_a_plain_def_workflow_takes_its_whole_time(world):
    @ks.workflow
    def works_then_waits():
        quick().result()
        time.sleep(0.3)
        began = time.monotonic()
        ks.sleep(0.2).result()
        return time.monotonic() - began

    async with world.engine() as engine:
        assert await (await engine.start(works_then_waits)).result(30) >= 0.19


@pytest.mark.live_only
@pytest.mark.one_store
async def test_delay_of_a_graph_takes_its_whole_time_after_a_slow_edge(world):
    graph = ks.Graph("delayed")

    async def begin(state):
        return {"n": 1}

    async def done(state):
        return {"done": True}

    def slow_edge(state):
        time.sleep(0.3)
        return True

    graph.add(begin, name="begin")
    graph.add(done, name="done")
    graph.delay("nap", 0.2)
    graph.edge("begin", "nap", when=slow_edge)
    graph.edge("nap", "done")
    graph.entry("begin")
    graph.exit("done")
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph)
        await run.result(30)
        timer, passed = [one for one in await run.checkpoints() if one.step.startswith("nap#1")][:2]
        (begun,) = [one for one in await run.checkpoints() if one.step == "begin#1"]
        assert timer.finished_at - begun.finished_at >= timedelta(seconds=0.19)
        assert passed.finished_at >= timer.finished_at


# -- across restarts ---------------------------------------------------------------------------------------------------


@pytest.mark.live_only
@pytest.mark.one_store
async def test_parked_wait_ends_at_its_time_after_a_restart(world):
    clock = Shifted(world)

    @ks.workflow
    async def parked():
        await quick()
        return await ks.wait_for("word", timeout=HOUR, default="late")

    engine = await world.started(clock=clock)
    run = await engine.start(parked, run_id="r")
    await until_status(run, "waiting")
    due = (await run.run()).due_at
    assert len(starts(await run.checkpoints())) == 1
    clock.offset = HOUR / 2
    engine = await world.crash_and_recover(engine, clock=clock)
    assert (await (await engine.get("r")).run()).due_at == due
    clock.offset = HOUR + 1
    engine = await world.crash_and_recover(engine, clock=clock)
    assert await (await engine.get("r")).result(30) == "late"
    await engine.close()


@pytest.mark.live_only
@pytest.mark.one_store
async def test_parking_records_the_starts_of_all_waits_in_its_own_commit(world):
    @ks.workflow
    async def several():
        async def nap(hours):
            await ks.sleep(hours=hours)

        async with ks.timeout(4 * HOUR):
            await ks.gather(nap(1), nap(2), ks.wait_for("word", timeout=3 * HOUR))

    async with world.engine() as engine:
        before = engine.journal.commits
        run = await engine.start(several, run_id="r")
        await until_status(run, "waiting")
        recorded = starts(await run.checkpoints())
        assert {key.rpartition("/")[2] for key in recorded} == {"sleep#1", "wait_for:word#1", "timeout#1"}
        assert len(recorded) == 4
        row = await run.run()
        assert row.due_at - min(recorded.values()) == pytest.approx(timedelta(hours=1), abs=timedelta(seconds=1))
        assert engine.journal.commits - before <= 2  # the run is made, and put away


@pytest.mark.one_store
@pytest.mark.live_only
async def test_short_wait_in_memory_leaves_only_its_outcome(world):
    @ks.workflow
    async def short():
        async with ks.timeout(60):
            await quick()
        await ks.sleep(0.01)

    async with world.engine() as engine:
        run = await engine.start(short)
        await run.result(30)
        assert starts(await run.checkpoints()) == {}


@pytest.mark.live_only
@pytest.mark.one_store
@pytest.mark.parametrize("durability", ["every_step", "at_exit"])
async def test_start_of_a_wait_goes_with_the_next_commit_of_its_run(world, monkeypatch, durability):
    monkeypatch.setattr(wakeups, "RIDE_AFTER_SECONDS", 0.0)
    rides, go_on = asyncio.Event(), asyncio.Event()
    real = wakeups._ride

    def ride(run, wait):
        real(run, wait)
        rides.set()

    monkeypatch.setattr(wakeups, "_ride", ride)

    @ks.step
    async def slow():
        await go_on.wait()

    @ks.workflow(durability=durability)
    async def limited():
        async with ks.timeout(HOUR):
            await slow()
            await ks.checkpoint()
        rides.clear()
        async with ks.timeout(HOUR):
            await asyncio.wait_for(rides.wait(), 30)  # and the block ends before anything is written
        await quick()

    async with world.engine() as engine:
        run = await engine.start(limited)
        await rides.wait()
        assert starts(await run.checkpoints()) == {}
        before = engine.journal.commits
        go_on.set()
        await run.result(30)
        steps = [(one.kind, one.step) for one in await run.checkpoints() if one.step]
        assert steps[:2] == [("wait started", "timeout#1"), ("step completed", "slow#1")]
        assert list(starts(await run.checkpoints())) == ["timeout#1"]
        assert engine.journal.commits - before <= 4  # two steps, the checkpoint and the end


@pytest.mark.live_only
@pytest.mark.one_store
async def test_wait_beside_a_long_step_keeps_its_end_over_a_crash(world, monkeypatch):
    """A worker that dies again and again must not push the end of a wait ahead of it."""
    monkeypatch.setattr(wakeups, "RIDE_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(wakeups, "RECORD_AFTER_SECONDS", 0.05)
    clock, hold = Shifted(world), asyncio.Event()

    @ks.step
    async def endless():
        await hold.wait()

    @ks.workflow
    async def limited():
        try:
            async with ks.timeout(HOUR):
                await endless()
        except ks.TimedOut:
            return "timed out"

    engine = await world.started(clock=clock)
    run = await engine.start(limited, run_id="r")

    async def recorded():
        return starts(await run.checkpoints())

    first = await until(recorded)
    clock.offset = HOUR / 2
    engine = await world.crash_and_recover(engine, clock=clock)
    run = await engine.get("r")
    await until(lambda: "r" in engine.live and engine.live["r"].waits)
    assert starts(await run.checkpoints()) == first
    clock.offset = HOUR + 1
    engine = await world.crash_and_recover(engine, clock=clock)
    assert await (await engine.get("r")).result(30) == "timed out"
    await engine.close()


@pytest.mark.live_only
@pytest.mark.one_store
async def test_wait_without_a_recorded_start_begins_anew(world):
    clock, hold = Shifted(world), asyncio.Event()

    @ks.step
    async def slow():
        await hold.wait()
        return "done"

    @ks.workflow
    async def limited():
        await quick()
        async with ks.timeout(HOUR):
            return await slow()

    engine = await world.started(clock=clock)
    run = await engine.start(limited, run_id="r")
    await until(lambda: "r" in engine.live and engine.live["r"].waits)
    clock.offset = 2 * HOUR
    engine = await world.crash_and_recover(engine, clock=clock)
    await until(lambda: "r" in engine.live and engine.live["r"].waits)
    hold.set()
    assert await (await engine.get("r")).result(30) == "done"
    assert run.id == "r"
    await engine.close()


@pytest.mark.live_only
@pytest.mark.one_store
async def test_pause_does_not_stop_the_clock_of_a_wait(world):
    clock = Shifted(world)

    @ks.workflow
    async def napping():
        await ks.sleep(HOUR)
        return "awake"

    async with world.engine(clock=clock) as engine:
        run = await engine.start(napping, run_id="r")
        await until_status(run, "waiting")
        await run.pause()
        await until_status(run, "paused")
        clock.offset = HOUR + 1
        await run.resume()
        assert await run.result(30) == "awake"


@pytest.mark.live_only
@pytest.mark.one_store
@pytest.mark.parametrize("durability", ["at_exit", "every_step"])
async def test_handed_back_run_takes_the_starts_of_its_waits_along(world, durability):
    clock = Shifted(world)

    @ks.workflow(durability=durability)
    async def napping():
        await quick()
        await ks.sleep(HOUR)
        return "awake"

    async with world.engine(clock=clock, linger_seconds=60) as engine:
        run = await engine.start(napping, run_id="r")
        await until_status(run, "waiting")
    clock.offset = HOUR + 1
    async with world.engine(clock=clock) as engine:
        assert await (await engine.get("r")).result(30) == "awake"


@pytest.mark.live_only
@pytest.mark.one_store
async def test_fork_of_a_parked_run_keeps_the_end_of_its_wait(world):
    @ks.workflow
    async def napping():
        await quick()
        await ks.sleep(HOUR)

    async with world.engine() as engine:
        run = await engine.start(napping, run_id="r")
        await until_status(run, "waiting")
        fork = await engine.fork("r", run_id="f")
        await until_status(fork, "waiting")
        assert (await fork.run()).due_at == (await run.run()).due_at


@pytest.mark.live_only
@pytest.mark.one_store
async def test_rewind_gives_a_wait_that_timed_out_its_whole_time_again(world):
    clock = Shifted(world)

    @ks.workflow
    async def approval():
        await quick()
        return await ks.wait_for("word", timeout=HOUR, default="late")

    async with world.engine(clock=clock) as engine:
        run = await engine.start(approval, run_id="r")
        await until_status(run, "waiting")
        clock.offset = 2 * HOUR
        await run.resume()
        assert await run.result(30) == "late"
        (late,) = [one.seq for one in await run.checkpoints() if one.kind == "timer"]
        await run.rewind(to=late - 1)
        await until_status(run, "waiting")
        await run.signal("word", "in time")
        assert await run.result(30) == "in time"


@pytest.mark.live_only
@pytest.mark.one_store
async def test_retry_gives_limits_their_whole_time_again_and_sleeps_keep_their_end(world):
    clock = Shifted(world)

    @ks.workflow
    async def approval():
        async def nap():
            await ks.sleep(3 * HOUR)

        await ks.gather(nap(), ks.wait_for("word", timeout=HOUR))
        return "approved"

    async with world.engine(clock=clock) as engine:
        run = await engine.start(approval, run_id="r")
        await until_status(run, "waiting")
        clock.offset = 2 * HOUR
        await run.resume()
        with pytest.raises(ks.RunFailed, match="no signal 'word' came"):
            await run.result(30)
        await run.retry()
        await until_status(run, "waiting")
        assert len(starts(await run.checkpoints())) == 2
        left = (await run.run()).due_at.timestamp() - clock.now()
        assert left == pytest.approx(HOUR, abs=30.0)  # both of them: the sleep began three hours before its end
        await run.signal("word")
        clock.offset = 3 * HOUR + 60
        await run.resume()
        assert await run.result(30) == "approved"


@pytest.mark.live_only
@pytest.mark.one_store
async def test_open_wait_is_part_of_a_consolidated_state(world):
    clock = Shifted(world)
    graph = ks.Graph("waiting graph")

    async def begin(state):
        return {"n": 1}

    graph.add(begin, name="begin")
    graph.delay("nap", HOUR)
    graph.edge("begin", "nap")
    graph.entry("begin")
    graph.exit("nap")
    async with world.engine(clock=clock, workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        await until_status(run, "waiting")
        due = (await run.run()).due_at
        clock.offset = HOUR / 2
        await run.consolidate("tidy")
        await run.resume()
        await until_status(run, "waiting")
        assert (await run.run()).due_at == due


# -- histories of older versions ---------------------------------------------------------------------------------------


async def test_wait_of_a_run_parked_by_an_older_version_counts_from_its_last_outcome(world, monkeypatch):
    """Such a version records no starts, and its runs must not sleep for another month when they wake."""
    from keepstep.kernel import parking
    from keepstep.kernel.runner import Runner

    new = Runner.started

    def old(run, workflow, worker, at):
        record = new(run, workflow, worker, at)
        del record.data["exact_time"]
        return record

    clock = Shifted(world)

    @ks.workflow
    async def napping():
        await quick()
        await ks.sleep(HOUR)
        return "awake"

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "started", staticmethod(old))
        patch.setattr(parking, "unrecorded_starts", lambda run: [])
        engine = await world.started(clock=clock)
        run = await engine.start(napping, run_id="r")
        await until_status(run, "waiting")
    clock.offset = HOUR + 1
    engine = await world.crash_and_recover(engine, clock=clock)
    assert await (await engine.get("r")).result(30) == "awake"
    await engine.close()


# -- digests -----------------------------------------------------------------------------------------------------------


@pytest.mark.live_only
@pytest.mark.one_store
@pytest.mark.parametrize("older", [False, True])
async def test_changed_duration_is_found_to_the_last_digit(world, older, monkeypatch):
    """Older versions keep six digits, and what they recorded is told as before."""
    from keepstep.kernel.runner import Runner

    clock, length = Shifted(world), [1_000_000.25]

    @ks.workflow
    async def napping():
        await ks.sleep(length[0])
        await ks.wait_for("go")
        return "awake"

    new = Runner.started

    def old(run, workflow, worker, at):
        record = new(run, workflow, worker, at)
        del record.data["exact_time"]
        return record

    with monkeypatch.context() as patch:
        if older:
            patch.setattr(Runner, "started", staticmethod(old))
            patch.setattr("keepstep.kernel.waits.digest_of", lambda seconds: f"{seconds:g}" if seconds else "")
        engine = await world.started(clock=clock)
        run = await engine.start(napping, run_id="r")
        await until_status(run, "waiting")
        clock.offset = 1_000_001.0
        await run.resume()
        await until(lambda: _slept(run))
        await world.crash(engine)
    length[0] = 1_000_001.75
    engine = await world.started(clock=clock)
    run = await engine.get("r")
    await run.signal("go")
    if older:
        assert await run.result(30) == "awake"
    else:
        with pytest.raises(ks.RunSetAside, match="sleep#1 was recorded with another input"):
            await run.result(30)
    await engine.close()


async def _slept(run):
    return any(one.kind == "timer" for one in await run.checkpoints())
