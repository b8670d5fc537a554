"""What a person does to a run: retry it, pause it, resume it (K29, C19)."""

import asyncio

import pytest

import keepstep as ks
from tests.engine.world import steps_of, told, until, until_at_last_wait, until_status

pytestmark = pytest.mark.on_postgres


class Broken:
    """A program whose middle step fails until it is mended."""

    def __init__(self, effects, **options):
        self.mended = False
        self.keys = []

        @ks.step
        async def before():
            effects.append("before")
            return 1

        @ks.step(**options)
        async def middle():
            effects.append("middle")
            self.keys.append(ks.idempotency_key())
            if not self.mended:
                raise ValueError("broken")
            return 2

        @ks.step
        async def after():
            effects.append("after")
            return 3

        self.before, self.middle, self.after = before, middle, after

        @ks.workflow
        async def program():
            return [await before(), await middle(), await after()]

        self.workflow = program


async def test_retry_repeats_no_step_that_succeeded(world, effects):
    broken = Broken(effects)
    async with world.engine() as engine:
        run = await engine.start(broken.workflow, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        old = await told(run)
        broken.mended = True
        await run.retry("mended")
        assert await run.result(30) == [1, 2, 3]
        assert (await told(run))[: len(old)] == old, "a retry must keep the old history"
    assert effects == ["before", "middle", "middle", "after"]
    assert broken.keys[0] != broken.keys[1], "after a retry by a person the key is another"


async def test_retry_gets_all_its_attempts_again(world, effects):
    broken = Broken(effects, retry=ks.Retry(attempts=2, base_seconds=0))
    async with world.engine() as engine:
        run = await engine.start(broken.workflow, run_id="r")
        for times in (2, 4):
            with pytest.raises(ks.RunFailed, match="after 2 attempts"):
                await run.result(30)
            assert effects.count("middle") == times
            broken.mended = times == 4
            await run.retry()
            await until(lambda times=times: effects.count("middle") > times)
        assert await run.result(30) == [1, 2, 3]
    assert effects.count("middle") == 5


async def test_retry_repeats_no_failure_that_the_code_caught(world, effects):
    broken = Broken(effects)
    caught = []

    @ks.step
    async def optional():
        effects.append("optional")
        raise ValueError("never mind")

    @ks.workflow
    async def program():
        try:
            await optional()
        except ks.StepFailed as error:
            caught.append(str(error))
        return await broken.middle()

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        broken.mended = True
        await run.retry()
        assert await run.result(30) == 2
    assert effects.count("optional") == 1


async def test_retry_repeats_only_failed_and_cancelled_branches(world, effects):
    """What had finished stays; what the failure cancelled runs again; what failed runs again."""
    broken = Broken(effects)
    slow_goes = asyncio.Event()

    @ks.step
    async def quick(number):
        effects.append(f"quick {number}")
        return number

    @ks.step
    async def slow():
        effects.append("slow")
        await slow_goes.wait()
        return "slow"

    async def branch():
        await quick(2)
        await asyncio.sleep(0.02)
        return await broken.middle()

    @ks.workflow
    async def program():
        return await ks.gather(quick(1), slow(), branch())

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        assert await steps_of(run, "step cancelled") == ["slow#1"]
        broken.mended = True
        slow_goes.set()
        await run.retry()
        assert await run.result(30) == [1, "slow", 2]
    assert sorted(effects) == ["middle", "middle", "quick 1", "quick 2", "slow", "slow"]


def working(effects, broken):
    """A step that fails for number 1, and says whenever it runs."""

    @ks.step(name="work")
    async def work(number):
        effects.append(number)
        await asyncio.sleep(0)
        if number == 1 and broken:
            raise ValueError("not yet")
        return number

    return work


async def all_of(work, numbers):
    """Everything is waited for, and then the first error raised."""
    done = await ks.gather(*[work(number) for number in numbers], return_exceptions=True)
    raise_first(done)
    return done


async def all_of_asyncio(work, numbers):
    done = await asyncio.gather(*[work(number) for number in numbers], return_exceptions=True)
    raise_first(done)
    return done


async def all_of_rows(work, numbers):
    async def row(number):
        winner = await ks.race(work(number), ks.sleep(60))
        return [winner, await work(number + 10)]

    done = await ks.gather(*[row(number) for number in numbers], return_exceptions=True)
    raise_first(done)
    return [number for part in done for number in part]


async def all_of_a_map(work, numbers):
    done = await ks.map(work, numbers, concurrency=2, collect=True)
    raise_first(done.failures.values())
    return list(done)


def raise_first(done):
    for one in done:
        if isinstance(one, BaseException):
            raise one


@pytest.mark.parametrize("together", [all_of, all_of_asyncio, all_of_rows, all_of_a_map])
async def test_retry_repeats_nothing_asked_before_the_failure_came(world, effects, together):
    broken = [True]
    work = working(effects, broken)

    @ks.workflow(name="together")
    async def program():
        return await together(work, [1, 2, 3, 4, 5, 6])

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        with pytest.raises(ks.RunFailed, match="not yet"):
            await run.result(30)
        failed = next(one.seq for one in await run.checkpoints() if one.kind == "step failed")
        before = {one.step for one in await run.checkpoints() if one.seq < failed and one.kind == "step completed"}
        steps = [one.step for one in await run.checkpoints() if one.kind == "step completed"]
        broken.clear()
        await run.retry()
        assert sorted(set(await run.result(30))) == sorted(set(effects))
        again = [one.step for one in await run.checkpoints() if one.kind == "step completed"][len(steps) :]
    assert effects.count(1) == 2
    assert not before & set(again)
    if together in (all_of, all_of_asyncio):  # where all are asked for at once
        assert [number for number in set(effects) if effects.count(number) > 1] == [1]


async def test_retry_drops_the_cleanup_of_a_cancelled_sibling(world, effects):
    """Its clean-up stands where other steps come when it is not cancelled, and comes again when it is."""
    broken, goes = [True, True], asyncio.Event()
    work = working(effects, broken)

    @ks.step
    async def slow():
        effects.append("slow")
        await goes.wait()
        return "slow"

    @ks.step
    async def tidy():
        effects.append("tidy")

    async def sibling():
        try:
            return [await slow(), await work(7)]
        except asyncio.CancelledError:
            await tidy()
            raise

    async def failing():
        await until(lambda: "slow" in effects)
        return await work(1)

    @ks.workflow(name="siblings")
    async def program():
        async with asyncio.TaskGroup() as group:  # which waits for those that it cancels
            parts = [group.create_task(sibling()), group.create_task(failing())]
        return [part.result() for part in parts]

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        for tidied in (1, 2):
            with pytest.raises(ks.RunFailed):
                await run.result(30)
            assert effects.count("tidy") == tidied
            broken.pop()
            if not broken:
                goes.set()
            await run.retry()
        assert await run.result(30) == [["slow", 7], 1]
    assert effects.count("tidy") == 2


async def test_retry_runs_mended_workflow_code(world, effects):
    broken = Broken(effects)
    wrong = [True]

    @ks.workflow
    async def program():
        await broken.before()
        if wrong[0]:
            raise KeyError("in the workflow itself")
        return "done"

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        with pytest.raises(ks.RunFailed, match="in the workflow itself"):
            await run.result(30)
        wrong.clear()
        wrong.append(False)
        await run.retry()
        assert await run.result(30) == "done"
    assert effects == ["before"]


async def test_failed_child_is_retried_in_place(world, effects):
    mended = []

    @ks.workflow
    async def child():
        if not mended:
            raise ValueError("broken child")
        return "child"

    @ks.workflow
    async def parent():
        return await (await ks.start(child))

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        with pytest.raises(ks.RunFailed, match="broken child"):
            await run.result(30)
        mended.append(1)
        first = await engine.get((await engine.list(parent="r")).runs[0].id)
        await first.retry()
        assert await first.result(30) == "child"


async def test_retry_of_a_parent_retries_its_failed_child_in_place(world, effects):
    mended = []

    @ks.step
    async def paid(name):
        effects.append(f"paid {name}")

    @ks.workflow
    async def child(name):
        await paid(name)
        effects.append(name)
        if name == "bad" and not mended:
            raise ValueError("broken child")
        return name

    @ks.workflow
    async def parent():
        good = await (await ks.start(child, "good"))
        return [good, await (await ks.start(child, "bad"))]

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        with pytest.raises(ks.RunFailed, match="broken child"):
            await run.result(30)
        mended.append(1)
        await run.retry()
        assert await run.result(30) == ["good", "bad"]
        assert len((await engine.list(parent="r")).runs) == 2
    assert [one for one in effects if one in ("good", "bad")].count("bad") >= 2
    assert effects.count("paid bad") == effects.count("paid good") == 1


async def test_retry_of_a_completed_run_is_refused(world):
    @ks.workflow
    async def fine():
        return 1

    async with world.engine() as engine:
        run = await engine.start(fine, run_id="r")
        await run.result(30)
        with pytest.raises(ks.AlreadyFinished, match="completed"):
            await run.retry()
        with pytest.raises(ks.RunNotFound):
            await engine.retry("nobody")
        assert await run.result(30) == 1


async def test_set_aside_run_can_be_retried(world, effects):
    broken = Broken(effects)

    async def old():
        await broken.before()
        await ks.wait_for("go")

    async def wrong():
        await broken.after()

    async def right():
        await broken.before()
        return await ks.wait_for("go")

    ks.workflow(name="program")(old)
    engine = await world.started(linger_seconds=60)
    await engine.start("program", run_id="r")
    await until_at_last_wait(engine, "r")
    await world.crash(engine)
    ks.workflow(name="program")(wrong)
    async with world.engine() as engine:
        with pytest.raises(ks.RunSetAside):
            await (await engine.get("r")).result(30)
    ks.workflow(name="program")(right)
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.retry("the right code is back")
        await run.signal("go")
        assert await run.result(30) is True
    assert effects == ["before"]


# -- pause and resume --------------------------------------------------------------------------------------------------


async def test_pause_waits_for_the_end_of_a_step(world, effects):
    began, go_on = asyncio.Event(), asyncio.Event()

    @ks.step
    async def work(name):
        effects.append(name)
        began.set()
        await go_on.wait()
        return name

    @ks.workflow
    async def program():
        return [await work("a"), await work("b")]

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        await began.wait()
        await run.pause("lunch")
        await asyncio.sleep(0.03)
        assert await run.status() is ks.Status.RUNNING
        go_on.set()
        await until_status(run, "paused")
        assert await steps_of(run) == ["work#1"]
        assert effects == ["a"]
        await until(lambda: not engine.live)
        await asyncio.sleep(0.03)
        assert await run.status() is ks.Status.PAUSED
        await run.resume()
        assert await run.result(30) == ["a", "b"]
    assert effects == ["a", "b"]


async def test_paused_run_is_not_claimed_by_the_next_worker(world, effects):
    @ks.step
    async def work(name):
        effects.append(name)
        return name

    @ks.workflow
    async def program():
        await work("a")
        await ks.sleep(0.05)
        return await work("b")

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        await until(lambda: effects == ["a"])
        await run.pause()
        await until_status(run, "paused")
    async with world.engine() as engine:
        run = await engine.get("r")
        await asyncio.sleep(0.1)
        assert await run.status() is ks.Status.PAUSED
        assert effects == ["a"]
        await run.resume()
        assert await run.result(30) == "b"
        assert (await run.run()).recoveries == 0


async def test_sleeping_run_can_be_paused(world):
    @ks.workflow
    async def sleeping():
        await ks.sleep(hours=1)

    async with world.engine() as engine:
        run = await engine.start(sleeping, run_id="r")
        await until_status(run, "waiting")
        await run.pause()
        await until_status(run, "paused")
        await run.resume()
        await until_status(run, "waiting")
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(30)


async def test_resume_ends_a_pause_that_was_sent_twice(world):
    """Else the first of two pauses is never recorded as read, and the next worker reads it again."""

    @ks.workflow
    async def twice():
        await ks.wait_for("go")
        return "gone"

    async with world.engine(worker=False) as engine:
        run = await engine.start(twice, run_id="r")
        for act in (run.pause, run.pause, run.resume):
            await act()
    async with world.engine() as engine:
        await until_status(await engine.get("r"), "waiting")
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(timeout=60) == "gone"


async def test_paused_run_can_be_cancelled(world):
    @ks.workflow
    async def waiting():
        await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(waiting, run_id="r")
        await run.pause()
        await until_status(run, "paused")
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(30)


async def test_signal_to_a_paused_run_is_kept_until_it_resumes(world):
    @ks.workflow
    async def waiting():
        return await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(waiting, run_id="r")
        await run.pause()
        await until_status(run, "paused")
        await run.signal("go", "meanwhile")
        await asyncio.sleep(0.05)
        assert await run.status() is ks.Status.PAUSED
        await run.resume()
        assert await run.result(30) == "meanwhile"


async def test_pause_survives_a_crash(world, effects):
    began = asyncio.Event()
    second_life = []

    @ks.step
    async def work(name):
        effects.append(name)
        began.set()
        if not second_life:
            await asyncio.sleep(60)
        return name

    @ks.workflow
    async def program():
        return [await work("a"), await work("b")]

    engine = await world.started()
    run = await engine.start(program, run_id="r")
    await began.wait()
    await run.pause()
    second_life.append(1)
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await until_status(run, "paused")
    assert "b" not in effects
    await run.resume()
    assert await run.result(30) == ["a", "b"]
    await engine.close()


async def test_def_workflow_can_be_paused(world, effects):
    @ks.step
    def work(name):
        effects.append(name)
        return name

    @ks.workflow
    def program():
        work("a").result()
        ks.sleep(hours=1).result()

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        await until(lambda: effects == ["a"])
        await run.pause()
        await until_status(run, "paused")
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(30)


async def test_resume_right_after_a_pause_ends_it(world):
    @ks.workflow
    async def waiting():
        return await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(waiting, run_id="r")
        for _ in range(3):
            await run.pause()
            await run.resume()
        await run.signal("go")
        assert await run.result(30) is True
