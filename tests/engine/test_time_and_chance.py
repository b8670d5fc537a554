"""Time, randomness and ids are the same on every replay (K6)."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import pytest

import keepstep as ks
from keepstep.ports import SystemClock
from tests.engine.lives import PollInterval, live_then_many_lives
from tests.engine.world import until, until_recorded, until_status


def marker(effects, pace=None):
    @ks.step
    async def mark(what, *values):
        """The values are part of the digest: one that differs on replay is a mismatch."""
        if pace is not None:
            await pace.take(what)
        effects.append((what, *values))
        return what

    return mark


async def test_now_random_and_uuid_are_the_same_after_a_crash(world, effects):
    mark = marker(effects)

    @ks.workflow
    async def chance():
        first = [ks.now(), ks.random(), ks.uuid()]
        await mark("a", *first)
        second = [ks.now(), ks.random(), ks.uuid()]
        await mark("b", *second)

        async def branch():
            drawn = [ks.random(), ks.uuid()]
            await mark("c", *drawn)
            return drawn

        branches = await ks.gather(branch(), branch())
        await mark("d", ks.now(), ks.random())
        await ks.wait_for("go")
        return [*first, *second, *branches[0], *branches[1]]

    values = await live_then_many_lives(world, chance, PollInterval(), effects, lives=3)
    numbers = [value for value in values if isinstance(value, float)]
    assert len(set(values)) == len(values), "two draws gave the same"
    assert all(0 <= number < 1 for number in numbers)


async def test_two_runs_draw_different_numbers(world):
    @ks.workflow
    async def draw():
        return [ks.random(), str(ks.uuid())]

    async with world.engine() as engine:
        one, two = await engine.start(draw), await engine.start(draw)
        assert await one.result(30) != await two.result(30)


async def test_now_moves_with_each_step_and_only_then(world, effects):
    pace = PollInterval(a=0.01)
    mark = marker(effects, pace)

    @ks.workflow
    async def clock():
        times = [ks.now()]
        for _ in range(3):
            await mark("a")
            times += [ks.now(), ks.now()]
        return times

    before = datetime.now(UTC)
    async with world.engine() as engine:
        times = await (await engine.start(clock)).result(30)
    assert times[1] == times[2]
    assert before <= times[0] < times[1] < times[3] < times[5] <= datetime.now(UTC)


async def test_now_is_the_same_on_replay_after_a_gather(world, effects):
    pace = PollInterval(a=0.01, bb=0.0, ccc=0.005)
    mark = marker(effects, pace)

    @ks.workflow
    async def clock():
        async def branch(name):
            await mark(name)
            await mark(name, ks.now())
            return ks.now()

        times = await ks.gather(*(branch(name) for name in pace.seconds))
        await mark("after", ks.now(), *times)
        await asyncio.gather(*(branch(name) for name in pace.seconds))
        await mark("after", ks.now())
        await ks.map(branch, list(pace.seconds), concurrency=2)
        await mark("after", ks.now())
        await ks.wait_for("go")

    await live_then_many_lives(world, clock, pace, effects, lives=3)


async def test_now_is_the_same_on_replay_after_a_cancelled_step(world, effects):
    pace = PollInterval(slow=0.3, bb=0.0)
    mark = marker(effects, pace)

    @ks.workflow
    async def clock():
        loser = asyncio.create_task(mark("slow"))
        await mark("bb")
        loser.cancel()
        await asyncio.wait([loser])
        await asyncio.sleep(0.005)  # long enough for the cancel to be durable
        await mark("after the cancel", ks.now())
        await ks.race(mark("slow"), mark("bb"))
        await mark("after the race", ks.now())
        try:
            async with asyncio.timeout(0.01):
                await mark("slow")
        except TimeoutError:
            await mark("after the timeout", ks.now())
        await ks.wait_for("go")

    await live_then_many_lives(world, clock, pace, effects, lives=3)


async def test_now_is_the_same_on_replay_after_a_hand_over(world, effects):
    pace = PollInterval(a=0.01, bb=0.0)
    mark = marker(effects, pace)

    @ks.workflow
    async def clock():
        ready = asyncio.Event()

        async def first():
            await mark("a")
            ready.set()
            await mark("bb", ks.now())

        async def second():
            await mark("bb")
            await ready.wait()
            await mark("handed over", ks.now())

        await asyncio.gather(first(), second())
        await ks.wait_for("go")

    await live_then_many_lives(world, clock, pace, effects, lives=3)


async def test_now_is_the_same_on_replay_after_values_and_decisions(world, effects):
    mark = marker(effects, pace := PollInterval(a=0.002, bb=0.001))

    @ks.workflow
    async def clock():
        await mark("a", ks.now())
        ks.publish("state", "busy")
        ks.emit("token")
        await mark("bb", ks.now())
        async for name in ks.as_completed([mark("a"), mark("bb")]):
            await mark("saw", name, ks.now())
        await ks.wait_for("go")

    await live_then_many_lives(world, clock, pace, effects, lives=3)


class Backwards:
    """A wall clock that someone sets back by an hour at every look."""

    def __init__(self):
        self.at = datetime(2026, 1, 1, tzinfo=UTC)
        self.ticks = 0.0

    def now(self):
        self.at -= timedelta(seconds=5)
        return self.at.timestamp()

    def boot(self):
        self.ticks += 0.0001
        return "boot", self.ticks


@pytest.mark.one_store
async def test_time_never_runs_backwards_within_a_run(world, effects):
    mark = marker(effects)

    @ks.workflow
    async def clock():
        times = [ks.now()]
        for _ in range(3):
            await mark("a")
            times.append(ks.now())
        return times

    async with world.engine(clock=Backwards()) as engine:
        run = await engine.start(clock)
        times = await run.result(30)
        assert times == sorted(times)
        recorded = [one.finished_at for one in await run.checkpoints()]
        assert recorded == sorted(recorded)


@pytest.mark.live_only
async def test_pause_that_is_not_delivered_does_not_move_time(world):
    told = []

    @ks.workflow
    async def waiting():
        await asyncio.sleep(0.05)  # by itself: the run is paused and resumed meanwhile
        told.append(ks.now())
        return await ks.wait_for("word")

    engine = await world.started()
    run = await engine.start(waiting, run_id="r")
    await run.pause()
    await run.resume()
    await until(lambda: bool(told))
    await until_status(run, "waiting")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await run.signal("word", "go")
    assert await run.result() == "go"
    assert len(set(told)) == 1
    await engine.close()


class Ahead(SystemClock):
    """A wall clock that a test sets."""

    offset = 0.0

    def now(self):
        return super().now() + self.offset


@pytest.mark.live_only
@pytest.mark.one_store
async def test_outcome_that_is_not_delivered_does_not_move_time(world, effects):
    """The loser of the race ends in the same commit as the winner."""
    mark = marker(effects)

    @ks.workflow
    async def clock():
        await ks.race(mark("a"), mark("bb"))
        await asyncio.sleep(0.01)  # long enough for the other outcome to arrive
        await mark("after", ks.now())
        await ks.wait_for("go")

    await live_then_many_lives(world, clock, PollInterval(), effects, lives=2)
    assert len(effects) == 3


@pytest.mark.live_only
@pytest.mark.one_store
async def test_timeout_in_the_commit_that_ends_its_block_moves_no_time(world, effects):
    mark, limits = marker(effects), []

    @ks.step
    async def rings():
        asyncio.get_running_loop().call_soon(limits[-1]._call._over)  # before what the step gives is written

    @ks.workflow
    async def clock():
        async with ks.timeout(60) as limit:
            limits.append(limit)
            await rings()
        before = ks.now()
        await asyncio.sleep(0.01)
        await mark("after", ks.now())
        await ks.wait_for("go")
        return before == effects[0][1]

    assert await live_then_many_lives(world, clock, PollInterval(), effects, lives=2)


@pytest.mark.live_only
@pytest.mark.one_store
async def test_time_does_not_go_back_between_outcomes_that_arrive_together(world):
    clock, ended = Ahead(), {"x": threading.Event(), "y": threading.Event()}

    @ks.step
    async def body(name):
        return name

    @ks.workflow
    def busy():
        """Its thread works while both steps end, and the clock is set back between them."""
        first = body("x").start()
        ended["x"].wait(60)
        second = body("y").start()
        ended["y"].wait(60)
        times = [ks.now()]
        for call in (first, second):
            call.result()
            times.append(ks.now())
        return times

    async with world.engine(clock=clock) as engine:
        run = await engine.start(busy)
        await until_recorded(run, "body#1")
        clock.offset = -3600.0
        ended["x"].set()
        await until_recorded(run, "body#2")
        ended["y"].set()
        times = await run.result(30)
        assert times == sorted(times)
        recorded = [one.finished_at for one in await run.checkpoints()]
        assert recorded == sorted(recorded)
