"""Plain def workflows and steps run in threads of two separate pools (K9)."""

import asyncio
import threading
import time

import pytest

import keepstep as ks
from keepstep.engine import engine as engine_module
from tests.engine.world import steps_of, until, until_at_last_wait, until_status


@ks.step
def double(number):
    return 2 * number


@ks.step
async def add_one(number):
    return number + 1


async def test_a_def_workflow_cannot_use_what_an_async_one_can(world, effects):
    @ks.workflow
    def child_of(number):
        return double(number).result()

    @ks.workflow
    def everything():
        first = double(1).start()
        second = add_one(10).start()
        got = [first.result(), second.result(), first.result()]
        got.append(ks.gather(double(2), add_one(2)).result())
        got.append(ks.map(double, [1, 2, 3]).result())
        got.append(ks.chain(lambda total, n: add_one(total + n), [1, 2], 0).result())
        got.append(ks.race(ks.wait_for("never"), double(5)).result())
        ks.sleep(0.001).result()
        ks.publish("state", "busy")
        child = ks.start(child_of, 21).result()
        got.append(child.result().result())
        got.append(ks.wait_for("never", timeout=0.001, default="none").result())
        try:
            ks.wait_for("never", timeout=0.001).result()
        except ks.TimedOut:
            got.append("timed out")
        assert 0 <= ks.random() < 1
        assert ks.now() <= ks.now()
        return [*got, threading.current_thread().name.split("-")[1]]

    async with world.engine() as engine:
        run = await engine.start(everything, run_id="r")
        assert await run.result(10) == [2, 11, 2, [4, 3], [2, 4, 6], 5, 10, 42, "none", "timed out", "run"]
        assert await run.published() == {"state": "busy"}


async def test_a_def_workflow_repeats_its_steps_after_a_crash(world, effects):
    @ks.step
    def work(name):
        effects.append(name)
        return name

    @ks.workflow
    def plain():
        first = work("a").result()
        pair = [work("b").start(), work("c").start()]
        try:
            got = [first, *(call.result() for call in pair), ks.wait_for("go").result()]
        finally:
            ks.publish("ended", value=True)
        return [*got, work("d").result()]

    engine = await world.started(linger_seconds=60)
    await engine.start(plain, run_id="r")
    await until_at_last_wait(engine, "r")
    for _ in range(2):
        engine = await world.crash_and_recover(engine, linger_seconds=60)
        await until_at_last_wait(engine, "r")
    run = await engine.get("r")
    await run.signal("go")
    assert await run.result(30) == ["a", "b", "c", True, "d"]
    assert sorted(effects) == ["a", "b", "c", "d"]
    await engine.close()


@pytest.mark.live_only
async def test_more_def_workflows_than_threads_deadlock_with_their_steps(world, monkeypatch):
    monkeypatch.setattr(engine_module, "RUN_THREADS", 3)
    monkeypatch.setattr(engine_module, "STEP_THREADS", 2)

    @ks.workflow
    def plain(number):
        return [double(number).result(), *ks.map(double, [1, 2, 3]).result()]

    async with world.engine() as engine:
        runs = [await engine.start(plain, number) for number in range(12)]
        assert [await run.result(10) for run in runs] == [[2 * number, 2, 4, 6] for number in range(12)]


async def test_parked_def_workflows_keep_their_threads(world, monkeypatch):
    monkeypatch.setattr(engine_module, "RUN_THREADS", 2)

    @ks.workflow
    def waiting():
        return ks.wait_for("go").result()

    async with world.engine() as engine:
        runs = [await engine.start(waiting) for _ in range(6)]
        for run in runs:
            await until_status(run, "waiting")
        for number, run in enumerate(runs):
            await run.signal("go", number)
        assert [await run.result(10) for run in runs] == list(range(6))


async def test_cancelling_a_def_workflow_leaves_its_thread_blocked(world, effects):
    @ks.step
    def cleanup():
        effects.append("cleanup")

    @ks.workflow
    def waiting(what):
        try:
            ks.sleep(hours=1).result() if what == "sleep" else ks.gather(ks.wait_for("a"), ks.wait_for("b")).result()
        except asyncio.CancelledError:
            cleanup().result()
            raise

    async with world.engine(linger_seconds=60) as engine:
        for what in ("sleep", "gather"):
            run = await engine.start(waiting, what)
            await until(lambda: any(context.waits for context in engine.live.values()) or True)
            await run.cancel()
            with pytest.raises(ks.RunCancelled):
                await run.result(30)
    assert effects == ["cleanup", "cleanup"]


@pytest.mark.quick_store
async def test_cancelling_a_def_workflow_that_computes_is_lost(world, effects):
    computing, cancelled = threading.Event(), threading.Event()

    @ks.workflow
    def busy():
        computing.set()
        cancelled.wait(5)
        double(1).result()
        effects.append("not cancelled")

    async with world.engine() as engine:
        run = await engine.start(busy)
        await asyncio.to_thread(computing.wait)
        await run.cancel()
        cancelled.set()
        with pytest.raises(ks.RunCancelled):
            await run.result(30)
    assert effects == []


@pytest.mark.live_only
async def test_a_timed_out_thread_runs_beside_its_own_retry(world, effects):
    released = threading.Event()
    running = 0

    @ks.step(timeout=0.03, retry=ks.Retry(attempts=2, base_seconds=0))
    def slow():
        nonlocal running
        running += 1
        effects.append(running)
        if not released.is_set():
            released.wait(5)
        running -= 1
        return "second"

    @ks.workflow
    async def waiting():
        return await slow()

    async with world.engine() as engine:
        run = await engine.start(waiting)
        await until(lambda: _failed_once(engine, run))
        await asyncio.sleep(0.05)
        assert effects == [1], "the second attempt began while the first was still in its thread"
        released.set()
        assert await run.result(30) == "second"
    assert effects == [1, 1]


async def _failed_once(engine, run):
    return len(await run.checkpoints(failed=True)) == 1


@pytest.mark.live_only
async def test_a_thread_that_never_returns_blocks_the_engine_for_ever(world):
    stuck = threading.Event()

    @ks.step(timeout=0.02)
    def hanging():
        stuck.wait(30)

    @ks.workflow
    async def waiting():
        await hanging()

    began = time.monotonic()
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="took longer than"):
            await (await engine.start(waiting)).result(30)
    assert time.monotonic() - began < 10
    stuck.set()


@pytest.mark.parametrize("kind", ["step", "workflow"])
async def test_a_body_that_raises_stop_iteration_hangs_its_run(world, kind):
    @ks.step
    def stopping():
        raise StopIteration("no more")

    @ks.workflow
    async def calling():
        await stopping()

    @ks.workflow
    def stopped():
        raise StopIteration("no more")

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="no more"):
            await (await engine.start(calling if kind == "step" else stopped)).result(30)


async def test_context_variables_of_a_def_workflow_do_not_reach_its_steps(world):
    @ks.step
    def name():
        return threading.current_thread().name

    @ks.step
    async def id_of_run():
        return ks.run_id()

    @ks.workflow
    def asking():
        return [name().result(), id_of_run().result()]

    async with world.engine() as engine:
        thread, run_id = await (await engine.start(asking, run_id="r")).result(30)
    assert thread.startswith("keepstep-step")
    assert run_id == "r"


async def test_a_branch_of_a_def_workflow_gets_other_keys_each_time(world):
    @ks.workflow
    def plain():
        ks.gather(double(1), double(2)).result()
        ks.map(double, [1, 2], concurrency=1).result()
        double(3).result()

    async with world.engine() as engine:
        run = await engine.start(plain)
        await run.result(30)
        assert set(await steps_of(run)) == {"double#1", "double#2", "1.0/double#1", "1.1/double#1", "double#3"}


async def test_a_def_workflow_writes_its_notes_from_its_own_thread(world):
    """The loop may only be touched from its own thread; in debug mode asyncio finds whoever does otherwise."""

    @ks.workflow
    def showing():
        for number in range(20):
            ks.publish("count", number)
            ks.emit(number)
        assert ks.patched("change")
        return double(1).result()

    asyncio.get_running_loop().set_debug(True)
    async with world.engine() as engine:
        run = await engine.start(showing)
        assert await run.result(30) == 2
        assert await run.published() == {"count": 19}


@pytest.mark.live_only
@pytest.mark.one_store
async def test_a_thread_that_takes_a_step_up_after_its_lease_does_not_begin_it(world, effects):
    @ks.step
    def work():
        effects.append("began")

    @ks.workflow
    async def waits_for_a_thread():
        await work()

    async with world.engine() as engine:
        queued, submit = [], engine.step_threads.submit

        def later(context, function):
            engine.worker._renewed = -1e9  # no heartbeat has come for long when a thread is free
            queued.append(function)
            return submit(context, function)

        engine.step_threads.submit = later
        await engine.start(waits_for_a_thread, run_id="r")
        await until(lambda: queued and "r" not in engine.live, "the run was never let go")
        assert effects == []
