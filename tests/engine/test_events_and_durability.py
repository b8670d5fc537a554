"""Observers hear of what is durable and can break nothing (G1); weaker durability is chosen by name (K28)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.model import Kind
from tests.engine.world import steps_of, until, until_at_last_wait, until_status


@ks.step
async def double(number):
    return 2 * number


@ks.workflow
async def quadrupling(number):
    return await double(await double(number))


class Recording:
    def __init__(self, engine=None):
        self.events = []

    def observe(self, event):
        self.events.append(event)

    def names(self):
        return [event.name for event in self.events]


async def test_event_is_emitted_after_its_record_is_durable(world):
    told_too_early = []

    class Looking(Recording):
        def observe(self, event):
            super().observe(event)
            if event.seq and event.name == "step.completed":
                rows = engine.store.list_checkpoints(event.run)
                if event.seq > len(rows):
                    told_too_early.append(event)

    observer = Looking()
    async with world.engine(observers=[observer]) as engine:
        run = await engine.start(quadrupling, 1, run_id="r")
        assert await run.result(30) == 4
    assert told_too_early == []
    completed = [event for event in observer.events if event.name == "step.completed"]
    assert [event.step for event in completed] == ["double#1", "double#2"]
    assert [event.seq for event in completed] == [2, 3]
    assert observer.names().count("run.completed") == 1
    assert observer.names()[0] == "run.created"


async def test_failing_observer_does_not_break_the_run(world):
    class Failing(Recording):
        def observe(self, event):
            super().observe(event)
            raise RuntimeError("broken observer")

    failing, recording = Failing(), Recording()
    async with world.engine(observers=[failing, recording]) as engine:
        assert await (await engine.start(quadrupling, 1)).result(30) == 4
    assert failing.names() == recording.names()
    assert "run.completed" in recording.names()


async def test_replay_does_not_emit_steps_again(world):
    observer = Recording()

    @ks.workflow
    async def program():
        await double(1)
        await double(2)
        return await ks.wait_for("go")

    engine = await world.started(linger_seconds=60, observers=[observer])
    await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, observers=[observer])
    run = await engine.get("r")
    await run.signal("go")
    await run.result(30)
    await engine.close()
    assert observer.names().count("step.completed") == 2
    assert "run.recovering" in observer.names()


async def test_failed_attempt_is_emitted(world, effects):
    observer = Recording()

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0))
    async def flaky():
        effects.append(1)
        if len(effects) == 1:
            raise ConnectionError("once")

    @ks.workflow
    async def program():
        await flaky()

    async with world.engine(observers=[observer]) as engine:
        await (await engine.start(program)).result(30)
    failed = next(event for event in observer.events if event.name == "step.failed")
    assert failed.attempt == 1
    assert "once" in failed.data["error"]
    assert "retry_at" in failed.data


# -- durability --------------------------------------------------------------------------------------------------------


def steps_and_wait(effects, durability, count=5):
    @ks.step
    async def work(number):
        effects.append(number)
        return number

    @ks.workflow(name="buffered", durability=durability)
    async def program():
        for number in range(count):
            await work(number)
        got = await ks.wait_for("go")
        return [got, count]

    return program


@pytest.mark.live_only
@pytest.mark.parametrize("durability, kept", [("every_step", 5), ("every=2", 4), ("every=5", 5), ("at_exit", 0)])
async def test_crash_loses_only_what_the_durability_allows(world, effects, durability, kept):
    engine = await world.started(linger_seconds=60)
    run = await engine.start(steps_and_wait(effects, durability), run_id="r")
    await until_at_last_wait(engine, "r")
    assert len(await steps_of(run)) == kept
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    run = await engine.get("r")
    await until_at_last_wait(engine, "r")
    await run.signal("go")
    assert await run.result(30) == [True, 5]
    assert sorted(await steps_of(run)) == sorted(f"work#{number + 1}" for number in range(5))
    assert effects == [*range(5), *range(kept, 5)]
    await engine.close()


@pytest.mark.parametrize("durability", ["every=3", "at_exit"])
async def test_buffered_checkpoints_are_written_when_the_run_parks(world, effects, durability):
    async with world.engine() as engine:
        run = await engine.start(steps_and_wait(effects, durability), run_id="r")
        await until_status(run, "waiting")
        assert len(await steps_of(run)) == 5
        await run.signal("go")
        assert await run.result(30) == [True, 5]
    assert effects == list(range(5))


@pytest.mark.parametrize("act", ["pause", "close", "finish"])
async def test_buffered_checkpoints_are_written_at(world, effects, act):
    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(steps_and_wait(effects, "at_exit"), run_id="r")
        await until(lambda: len(effects) == 5)
        if act == "pause":
            await run.pause()
            await until_status(run, "paused")
            await run.resume()
        if act == "finish":
            await run.signal("go")
            await run.result(30)
    async with world.engine() as engine:
        run = await engine.get("r")
        assert len(await steps_of(run)) == 5
        if act != "finish":
            await run.signal("go")
        assert await run.result(30) == [True, 5]
    assert effects == list(range(5))


@pytest.mark.live_only
@pytest.mark.parametrize("before", ["mark", "child", "signal", "checkpoint"])
async def test_steps_are_durable_before_anything_leaves_the_run(world, effects, before):
    """A crash after it must not undo the steps that came before it."""
    hold = asyncio.Event()

    @ks.step
    async def work(number):
        effects.append(number)

    @ks.step(at_most_once=True)
    async def launch():
        hold.set()
        await asyncio.sleep(60)

    @ks.workflow
    async def child():
        return 1

    @ks.workflow(durability="at_exit")
    async def program():
        await work(1)
        await work(2)
        if before == "mark":
            await launch()
        elif before == "child":
            await ks.start(child)
        elif before == "signal":
            await ks.signal("other", "word")
        else:
            await ks.checkpoint()
        hold.set()
        await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    await engine.start(steps_and_wait([], "every_step", 0), run_id="other")
    run = await engine.start(program, run_id="r")
    await hold.wait()
    assert await steps_of(run) == ["work#1", "work#2"] + (["signal:word#1"] if before == "signal" else [])
    await world.crash(engine)


@pytest.mark.live_only
async def test_retry_after_a_buffered_failure_runs_the_step_again(world, effects):
    mended = []

    @ks.step
    async def work():
        effects.append("work")
        if not mended:
            raise ValueError("broken")
        return "mended"

    @ks.workflow(durability="at_exit")
    async def program():
        return await work()

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        mended.append(1)
        await run.retry()
        assert await run.result(30) == "mended"
    assert effects == ["work", "work"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_very_long_run_is_logged(world, logged, monkeypatch):
    monkeypatch.setattr("keepstep.kernel.driver.MANY_STEPS", 20)

    @ks.workflow
    async def long():
        for number in range(25):
            await double(number)
        await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    await engine.start(long, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    await world.crash(engine)
    assert len([line for line in logged() if "ks.continue_as" in line]) >= 1


@pytest.mark.live_only
async def test_tokens_of_a_body_that_begins_again_after_a_crash_have_another_life(world):
    """The attempt is the same, so without that mark a reader would show the text twice."""
    emitted, hold, observer = asyncio.Event(), asyncio.Event(), Recording()

    @ks.step
    async def write():
        ks.emit("The")
        await asyncio.sleep(0.02)
        ks.emit("sum")
        emitted.set()
        await hold.wait()
        return "The sum"

    @ks.workflow
    async def author():
        return await write()

    engine = await world.started()
    run = await engine.start(author, run_id="r")
    await emitted.wait()

    async def recorded():
        return [one.kind for one in await run.checkpoints()].count(Kind.EMITTED) == 2

    await until(recorded)
    engine = await world.crash_and_recover(engine, observers=[observer])
    hold.set()
    run = await engine.get("r")
    await run.result(30)
    tokens = [event async for event in run.watch() if event.name == "token.emitted"]
    assert [(one.attempt, one.data["value"]) for one in tokens] == [(1, "The"), (1, "sum")] * 2
    first, again = {one.life for one in tokens[:2]}, {one.life for one in tokens[2:]}
    assert len(first) == len(again) == 1
    assert 0 < min(first) < min(again)
    assert {one.life for one in observer.events if one.name == "token.emitted"} == again
    await engine.close()
