"""A cancel reaches everything, cleans up once, and is final (E7)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.engine.handle import RunHandle
from tests.engine.world import steps_of, told, until, until_at_last_wait, until_recorded, until_status

pytestmark = pytest.mark.on_postgres


async def cancelled(run):
    with pytest.raises(ks.RunCancelled):
        await run.result(30)
    assert await run.status() is ks.Status.CANCELLED


@ks.workflow
async def sleeping_child():
    await ks.sleep(hours=1)


def program(effects, where):  # noqa: C901 - one program with every place at which a cancel may find it
    began = asyncio.Event()

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=30))
    async def work():
        began.set()
        if where == "backoff":
            raise ConnectionError
        try:
            await asyncio.sleep(60)
        finally:
            effects.append("body ended")

    @ks.step
    async def cleanup():
        effects.append("cleanup")

    @ks.workflow
    async def working():
        try:
            if where in ("step", "backoff"):
                await work()
            elif where == "sleep":
                began.set()
                await ks.sleep(hours=1)
            elif where == "wait":
                began.set()
                await ks.wait_for("never")
            elif where == "gather":
                await ks.gather(work(), ks.sleep(hours=1), ks.wait_for("never"))
            elif where == "map":
                await ks.map(work_item, [1, 2])
            elif where == "timeout":
                async with ks.timeout(3600):
                    began.set()
                    await ks.sleep(hours=1)
            elif where == "child":
                began.set()
                await (await ks.start(sleeping_child))
            else:
                began.set()
                await asyncio.sleep(60)
        finally:
            await cleanup()

    @ks.step
    async def work_item(item):
        began.set()
        await asyncio.sleep(60)

    return working, began


PLACES = ["step", "backoff", "sleep", "wait", "gather", "map", "timeout", "child", "code"]


@pytest.mark.parametrize("where", PLACES)
async def test_cancel_reaches_a_run_in_memory(world, effects, where):
    working, began = program(effects, where)
    async with world.engine() as engine:
        run = await engine.start(working, run_id="r")
        await began.wait()
        await run.cancel("enough")
        await cancelled(run)
        assert effects.count("cleanup") == 1
        assert not engine.live or set(engine.live) <= {child.id for child in (await engine.list(parent="r")).runs}
    if where in ("step", "gather"):
        assert "body ended" in effects


@pytest.mark.parametrize("where", ["sleep", "wait", "backoff", "child"])
async def test_cancel_reaches_a_parked_run(world, effects, where):
    working, began = program(effects, where)
    async with world.engine() as engine:
        run = await engine.start(working, run_id="r")
        await began.wait()
        await until_status(run, "waiting")
        await run.cancel()
        await cancelled(run)
    assert effects.count("cleanup") == 1


async def test_cancelling_a_parent_cancels_its_children(world):
    @ks.workflow
    async def parent():
        first, second = await ks.start(sleeping_child), await ks.start(sleeping_child)
        await ks.gather(first.result(), second.result())

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        await until_recorded(run, "sleeping_child#2")
        await run.cancel()
        await cancelled(run)
        children = [await engine.get(child.id) for child in (await engine.list(parent="r")).runs]
        assert len(children) == 2
        for child in children:
            await cancelled(child)


async def test_children_end_while_their_cancelled_parent_cleans_up(world):
    @ks.workflow
    async def parent():
        child = await ks.start(sleeping_child)
        try:
            await child.result()
        except asyncio.CancelledError:
            await ks.wait_for("cleaned")
            raise

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        await until_recorded(run, "sleeping_child#1")
        await run.cancel()
        [child] = (await engine.list(parent="r")).runs
        await cancelled(await engine.get(child.id))
        assert not (await run.status()).finished
        await run.signal("cleaned")
        await cancelled(run)


async def test_cancel_survives_a_crash_in_its_cleanup(world, effects):
    """The cancel is in the history, so the second life is cancelled at the same place and cleans up the rest."""
    hold, second_life = asyncio.Event(), asyncio.Event()

    @ks.step
    async def cleanup(name):
        effects.append(name)
        if name == "b" and not second_life.is_set():
            hold.set()
            await asyncio.sleep(60)

    @ks.step
    async def work():
        return 1

    @ks.workflow
    async def working():
        await work()
        try:
            await ks.wait_for("never")
        except asyncio.CancelledError:
            await cleanup("a")
            await cleanup("b")
            raise

    engine = await world.started(linger_seconds=60)
    run = await engine.start(working, run_id="r")
    await until_at_last_wait(engine, "r")
    await run.cancel()
    await hold.wait()
    second_life.set()
    engine = await world.crash_and_recover(engine)
    await cancelled(await engine.get("r"))
    assert effects == ["a", "b", "b"]
    await engine.close()


async def test_run_that_swallows_its_cancel_is_cancelled(world, effects):
    @ks.workflow
    async def deaf():
        try:
            await ks.wait_for("never")
        except asyncio.CancelledError:
            effects.append("swallowed")
        return "completed"

    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(deaf, run_id="r")
        await until_at_last_wait(engine, "r")
        await run.cancel()
        await cancelled(run)


async def test_accepted_cancel_wins_over_the_end(world):
    """Whoever was told that the cancel arrived finds the run cancelled, or was told that it had finished."""

    accepted = asyncio.Event()

    @ks.step
    async def work(waits):
        if waits:
            await accepted.wait()

    @ks.workflow
    async def quick(waits):
        for _ in range(9):
            await work(waits=False)
        await work(waits)
        return "completed"

    async with world.engine() as engine:
        for number in range(40):
            run = await engine.start(quick, number == 0)  # the first one ends after its cancel, whatever takes long
            for _ in range(number % 20):
                await asyncio.sleep(0)
            try:
                await run.cancel()
            except ks.AlreadyFinished:
                assert number > 0
                assert await run.result(30) == "completed"
            else:
                accepted.set()
                await cancelled(run)


async def test_cancelled_run_refuses_every_command(world):
    async with world.engine() as engine:
        run = await engine.start(sleeping_child, run_id="r")
        await run.cancel()
        await cancelled(run)
        history = await told(run)
        for act in (run.cancel, run.pause, run.resume, lambda: run.signal("x")):
            with pytest.raises(ks.AlreadyFinished, match="already cancelled"):
                await act()
        with pytest.raises(ks.AlreadyFinished):
            await run.retry()
        again = await engine.start(sleeping_child, run_id="r")
        await cancelled(again)
        assert await told(run) == history


async def test_second_cancel_does_not_interrupt_the_cleanup(world, effects):
    cleaning, go_on = asyncio.Event(), asyncio.Event()

    @ks.step
    async def cleanup():
        cleaning.set()
        await go_on.wait()
        effects.append("cleaned")

    @ks.workflow
    async def working():
        try:
            await ks.wait_for("never")
        finally:
            await cleanup()

    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(working, run_id="r")
        await until_at_last_wait(engine, "r")
        await run.cancel()
        await cleaning.wait()
        await run.cancel()
        go_on.set()
        await cancelled(run)
    assert effects == ["cleaned"]


async def test_run_cancelled_before_its_first_step_starts_none(world, effects):
    @ks.step
    async def work():
        effects.append("worked")

    @ks.workflow
    async def late():
        await work()

    async with world.engine(worker=False) as client:
        run = await client.start(late, run_id="r")
        await run.cancel()
        async with world.engine():
            await cancelled(run)
    assert effects == []


async def test_reason_of_a_cancel_is_kept(world):
    async with world.engine() as engine:
        run = await engine.start(sleeping_child, run_id="r")
        await run.cancel("too expensive")
        await cancelled(run)
        signal = next(one for one in await run.checkpoints() if one.step == "ks:cancel")
        assert b"too expensive" in signal.value
        assert signal.trigger.value == "manual"


async def test_step_cancelled_by_code_replays_as_cancelled(world, effects):
    """A cancellation that the code caused is an outcome like any other; it poisons nothing."""

    @ks.step
    async def slow():
        effects.append("slow began")
        await asyncio.sleep(60)

    @ks.step
    async def quick():
        effects.append("quick")
        return "quick"

    @ks.workflow
    async def choosing():
        task = asyncio.create_task(slow())
        got = await quick()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await ks.wait_for("go")
        return got

    engine = await world.started(linger_seconds=60)
    await engine.start(choosing, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    run = await engine.get("r")
    await until_at_last_wait(engine, "r")
    await run.signal("go")
    assert await run.result(30) == "quick"
    assert await steps_of(run, "step cancelled") == ["slow#1"]
    assert effects.count("slow began") <= 1
    await engine.close()


async def test_cancel_that_meets_a_replay_is_kept(world, effects):
    @ks.step
    async def work(number):
        effects.append(number)

    @ks.workflow
    async def many():
        for number in range(30):
            await work(number)
        await ks.wait_for("never")

    engine = await world.started(linger_seconds=60)
    await engine.start(many, run_id="r")
    await until_at_last_wait(engine, "r")
    await world.crash(engine)
    async with world.engine(worker=False) as client:
        await (await client.get("r")).cancel()
    async with world.engine() as engine:
        await cancelled(await engine.get("r"))
    assert effects == list(range(30))


async def test_cancelling_a_waiting_task_does_not_cancel_the_run(world):
    """What the test itself waits for has nothing to do with the run."""
    async with world.engine() as engine:
        run = await engine.start(sleeping_child)
        waiter = asyncio.create_task(run.result(30))
        await until(lambda: True)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert await run.status() in (ks.Status.RUNNING, ks.Status.WAITING, ks.Status.QUEUED)


async def test_a_resume_that_comes_after_a_cancel_lets_nothing_new_begin(world, effects):
    @ks.step
    async def work():
        effects.append("work")

    @ks.workflow
    async def child():
        await ks.wait_for("nothing")

    @ks.workflow
    async def parent():
        await ks.wait_for("go")
        await ks.start(child)
        await work()

    engine = await world.started(linger_seconds=60)
    await engine.start(parent, run_id="r")
    await until_at_last_wait(engine, "r")
    await world.crash(engine)
    async with world.engine(worker=False) as engine:
        run = await engine.get("r")
        await run.signal("go")
        await run.cancel()
        await run.pause()
        await run.resume()
    async with world.engine() as engine:
        with pytest.raises(ks.RunCancelled):
            await (await engine.get("r")).result(30)
        assert effects == []
        assert [one.id for one in (await engine.list()).runs] == ["r"]


# -- before the run has begun ------------------------------------------------------------------------------------------


@ks.workflow
async def delayed():
    return "ran"


async def test_a_delayed_run_is_cancelled_at_once_without_a_worker(world):
    async with world.engine(worker=False) as client:
        run = await client.start(delayed, run_id="r", delay=1000)
        await run.cancel("not needed")
        with pytest.raises(ks.RunCancelled):
            await run.result(60)
        assert [(one.kind, one.data["reason"]) for one in await run.checkpoints()] == [("run finished", "not needed")]
        with pytest.raises(ks.AlreadyFinished):
            await run.cancel()


async def test_a_delayed_child_is_cancelled_at_once_without_its_code(world, effects):
    @ks.workflow
    async def child():
        effects.append("ran")

    @ks.workflow
    async def parent():
        late = await ks.start(child, run_id="c", delay=1000)
        await late.cancel()
        with pytest.raises(ks.StepFailed, match="cancelled"):
            await late

    async with world.engine() as engine:
        await (await engine.start(parent)).result(30)
        assert (await (await engine.get("c")).run()).status is ks.Status.CANCELLED
    assert effects == []


async def test_cancelling_a_parent_cancels_its_delayed_child_at_once(world):
    @ks.workflow
    async def parent():
        await (await ks.start(delayed, run_id="c", delay=1000))

    async with world.engine() as engine:
        run = await engine.start(parent)
        child = RunHandle(engine, "c")
        await until_run(engine, "c")
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await child.result(30)


async def until_run(engine, run_id):
    async def is_there():
        return bool((await engine.list(id_prefix=run_id)).runs)

    await until(is_there, f"run {run_id} never came")
