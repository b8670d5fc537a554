"""A wait until a check holds: durable between checks, with one record."""

import asyncio

import pytest

import keepstep as ks
from keepstep import testing
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere
from tests.engine.world import steps_of, told, until, until_status

HOUR = 3600.0


def polling(effects, *, after=3, form="async", **options):
    """A workflow that waits for a check which holds when it was made so often, and returns its result."""

    def look(job):
        effects.append(job)
        return {"job": job, "looks": len(effects)} if len(effects) > after else None

    async def look_async(job):
        return look(job)

    forms = {
        "step": (ks.step(look_async), ("j",)),
        "async": (look_async, ("j",)),
        "plain": (look, ("j",)),
        "awaited": (lambda: look_async("j"), ()),
        "step in a function": (lambda: ks.step(look_async)("j"), ()),
    }
    check, args = forms[form]

    @ks.workflow(name="polling")
    async def program():
        return await ks.wait_until(check, *args, **{"every": 0.005, **options})

    return program


@pytest.mark.parametrize("form", ["step", "async", "plain", "awaited", "step in a function"])
async def test_true_result_ends_the_wait_and_is_the_only_record(world, effects, form):
    async with world.engine() as engine:
        run = await engine.start(polling(effects, form=form))
        assert await run.result(30) == {"job": "j", "looks": 4}
        assert len(effects) == 4
        assert len(await steps_of(run)) == 1
        before = await told(run)
    async with world.engine() as engine:
        assert await (await engine.get(run.id)).result(30) == {"job": "j", "looks": 4}
        assert await told(await engine.get(run.id)) == before
    assert len(effects) == 4


async def test_long_time_between_checks_parks_the_run(world, effects):
    async with world.engine() as engine:
        run = await engine.start(polling(effects, every=HOUR))
        await until_status(run, "waiting")
        assert effects == ["j"]
        assert (await run.run()).due_at.timestamp() > engine.clock.now() + HOUR - 60


def test_checks_are_made_in_time_over_days():
    times = []

    @ks.workflow
    async def waits():
        async def look():
            times.append(world.now.timestamp())
            return len(times) == 30

        return await ks.wait_until(look, every=HOUR)

    with testing.world() as world:
        begun = world.now.timestamp()
        assert world.start(waits).result() is True
        assert [round((at - begun) / HOUR, 1) for at in times] == [float(number) for number in range(30)]


@pytest.mark.parametrize("default", [{}, {"default": "late"}])
async def test_timeout_raises_timed_out_or_gives_the_default(world, effects, default):
    async with world.engine() as engine:
        run = await engine.start(polling(effects, after=10**6, timeout=0.05, **default))
        if default:
            assert await run.result(30) == "late"
        else:
            with pytest.raises(ks.RunFailed, match=r"look_async was not true within 0\.05 s"):
                await run.result(30)


def test_timeout_counts_from_the_call_across_parking():
    @ks.workflow
    async def waits():
        try:
            await ks.wait_until(lambda: False, every=HOUR, timeout=5.5 * HOUR)
        except ks.TimedOut as late:
            return str(late)

    with testing.world() as world:
        begun = world.now
        assert world.start(waits).result() == "lambda was not true within 19800 s"
        assert (world.now - begun).total_seconds() == pytest.approx(5.5 * HOUR, abs=5)


async def test_check_that_raises_is_tried_again_as_its_step_says(world, effects):
    @ks.step(retry=ks.Retry(attempts=3, base_seconds=0.001))
    async def look():
        effects.append("look")
        if len(effects) in (2, 3):
            raise OSError("away")
        return len(effects) > 4

    @ks.workflow
    async def waits():
        return await ks.wait_until(look, every=0.005)

    async with world.engine() as engine:
        assert await (await engine.start(waits)).result(30) is True
    assert len(effects) == 5


async def test_check_whose_attempts_are_used_up_fails_the_wait(world, effects):
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0.001))
    async def look():
        effects.append("look")
        raise OSError("away")

    @ks.workflow
    async def waits():
        return await ks.wait_until(look, every=0.005)

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="away"):
            await (await engine.start(waits)).result(30)
    assert len(effects) == 2


async def test_wait_beside_other_steps_goes_on_after_each_of_their_records(world, effects):
    @ks.step
    async def work(number):
        await asyncio.sleep(0.002)
        return number

    async def works():
        return [await work(number) for number in range(5)]

    async def look():
        effects.append("look")
        return len(effects) > 3

    @ks.workflow
    async def both():
        return await ks.gather(ks.wait_until(look, every=0.005), works())

    async with world.engine() as engine:
        assert await (await engine.start(both)).result(30) == [True, list(range(5))]


async def test_crash_between_checks_loses_nothing(world, effects):
    engine = await world.started()
    run = await engine.start(polling(effects, after=5, every=0.05))
    await until(lambda: len(effects) > 2)
    engine = await world.crash_and_recover(engine)
    assert (await (await engine.get(run.id)).result(30))["job"] == "j"
    await engine.close()


async def test_crash_at_every_write_ends_with_one_result():
    looks = []

    @ks.workflow(name="waits at every write")
    async def waits():
        async def look():
            looks.append("look")
            return len(looks) % 3 == 0

        first = await ks.wait_until(look, every=0.001, timeout=60)
        return [first, await ks.wait_until(look, every=0.001)]

    async def play(engine):
        return await (await engine.start(waits, run_id="r")).result(30)

    async def judge(disk, lives):
        assert lives.result == [True, True]

    assert await crash_everywhere(MemoryDisk, play, judge) >= 4


async def test_plain_workflow_waits_too(world, effects):
    @ks.workflow
    def waits():
        return ks.wait_until(lambda: effects.append("look") or len(effects) > 2, every=0.005).result()

    async with world.engine() as engine:
        assert await (await engine.start(waits)).result(30) is True
    assert len(effects) == 3


@pytest.mark.parametrize(
    "check, options, problem",
    [
        ("text", {}, "a step or a function"),
        (len, {"every": 0}, "every must be longer"),
        (ks.step(at_most_once=True)(lambda: None), {}, "at_most_once"),
    ],
)
@pytest.mark.one_store
async def test_misuse_is_refused(world, check, options, problem):
    @ks.workflow
    async def waits():
        await ks.wait_until(check, **options)

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match=problem):
            await (await engine.start(waits)).result(30)
