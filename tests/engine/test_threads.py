"""Plain def workflows and steps run in threads of two separate pools (K9)."""

import asyncio
import gc
import queue
import sys
import threading
import time
from contextvars import Context

import pytest

import keepstep as ks
from keepstep.engine import engine as engine_module
from keepstep.executors.thread import ThreadPool
from tests.engine.world import replay_from_every_prefix, steps_of, until, until_at_last_wait, until_status


@ks.step
def double(number):
    return 2 * number


@ks.step
async def add_one(number):
    return number + 1


async def test_def_workflow_can_use_what_an_async_one_can(world, effects):
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
        child = ks.start(child_of, 21)
        got.append(child.result())
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
        assert await run.result(60) == [2, 11, 2, [4, 3], [2, 4, 6], 5, 10, 42, "none", "timed out", "run"]
        assert await run.published() == {"state": "busy"}


async def test_def_workflow_repeats_no_step_after_a_crash(world, effects):
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
async def test_more_def_workflows_than_threads_all_finish(world, monkeypatch):
    monkeypatch.setattr(engine_module, "RUN_THREADS", 3)
    monkeypatch.setattr(engine_module, "STEP_THREADS", 2)

    @ks.workflow
    def plain(number):
        return [double(number).result(), *ks.map(double, [1, 2, 3]).result()]

    async with world.engine() as engine:
        runs = [await engine.start(plain, number) for number in range(12)]
        assert [await run.result(60) for run in runs] == [[2 * number, 2, 4, 6] for number in range(12)]


async def test_parked_def_workflows_release_their_threads(world, monkeypatch):
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
        assert [await run.result(60) for run in runs] == list(range(6))


async def test_cancel_unblocks_the_thread_of_a_def_workflow(world, effects):
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
async def test_cancel_reaches_a_def_workflow_that_computes(world, effects):
    computing, cancelled = threading.Event(), threading.Event()

    @ks.workflow
    def busy():
        computing.set()
        cancelled.wait(60)
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
async def test_retry_waits_for_the_thread_that_timed_out(world, effects):
    released = threading.Event()
    running = 0

    @ks.step(timeout=0.03, retry=ks.Retry(attempts=2, base_seconds=0))
    def slow():
        nonlocal running
        running += 1
        effects.append(running)
        if not released.is_set():
            released.wait(60)
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
async def test_thread_that_never_returns_does_not_block_the_engine(world):
    stuck = threading.Event()

    @ks.step(timeout=0.02)
    def hanging():
        stuck.wait(120)

    @ks.workflow
    async def waiting():
        await hanging()

    began = time.monotonic()
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="took longer than"):
            await (await engine.start(waiting)).result(30)
    assert time.monotonic() - began < 60
    stuck.set()


@pytest.mark.parametrize("kind", ["step", "workflow"])
async def test_body_that_raises_stop_iteration_fails_its_run(world, kind):
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


async def test_context_variables_of_a_def_workflow_reach_its_steps(world):
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


async def test_branches_of_a_def_workflow_have_fixed_keys(world):
    @ks.workflow
    def plain():
        ks.gather(double(1), double(2)).result()
        ks.map(double, [1, 2], concurrency=1).result()
        double(3).result()

    async with world.engine() as engine:
        run = await engine.start(plain)
        await run.result(30)
        assert set(await steps_of(run)) == {"double#1", "double#2", "1.0/double#1", "1.1/double#1", "double#3"}


async def test_def_workflow_writes_its_notes_on_the_loop_thread(world):
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
async def test_thread_begins_no_step_after_the_lease_is_over(world, effects):
    @ks.step
    def work():
        effects.append("began")

    @ks.workflow
    async def waits_for_a_thread():
        await work()

    async with world.engine() as engine:
        queued, submit = [], engine.step_threads.submit

        def later(context, function):
            engine.fresh_until = 0.0  # no heartbeat has come for long when a thread is free
            queued.append(function)
            return submit(context, function)

        engine.step_threads.submit = later
        await engine.start(waits_for_a_thread, run_id="r")
        await until(lambda: queued and "r" not in engine.live, "the run was never let go")
        assert effects == []


@pytest.mark.live_only
async def test_body_that_gets_no_thread_in_time_never_begins(world, effects, monkeypatch):
    monkeypatch.setattr(engine_module, "STEP_THREADS", 1)
    released = threading.Event()

    @ks.step
    def occupying():
        released.wait(60)

    @ks.step(timeout=0.02)
    def late():
        effects.append("late")

    @ks.workflow
    async def crowded():
        first = asyncio.create_task(occupying())
        await add_one(0)
        with pytest.raises(ks.StepTimedOut):
            await late()
        released.set()
        await first
        return await double(1)  # in the same thread, so after all that waited for it

    async with world.engine() as engine:
        assert await (await engine.start(crowded)).result(30) == 2
    assert effects == []


def test_idle_thread_that_is_about_to_end_takes_the_work_that_was_left_to_it():
    """Another thread of the pool is busy for ever."""
    pool, stuck, submitted = ThreadPool(2, "pool"), threading.Event(), []
    queued = pool._work

    class Late:
        """A queue to which work comes just after a thread has waited in vain."""

        put = queued.put

        def get(self, timeout):
            if not stuck.is_set() and busy.running() and not submitted:
                submitted.append(pool.submit(Context(), lambda: "done"))
                raise queue.Empty
            return queued.get(timeout=timeout)

    busy = pool.submit(Context(), lambda: stuck.wait(60))
    while not busy.running():
        time.sleep(0.001)
    pool._work = Late()
    pool.submit(Context(), lambda: None).result(30)
    try:
        while not submitted:
            time.sleep(0.001)
        assert submitted[0].result(5) == "done"
    finally:
        stuck.set()


@pytest.mark.live_only
async def test_error_of_a_body_that_nobody_waits_for_is_not_logged(world, caplog):
    released, ended = threading.Event(), threading.Event()

    @ks.step(timeout=0.02)
    def late():
        released.wait(60)
        ended.set()
        raise ConnectionError("too late")

    @ks.workflow
    async def waiting():
        with pytest.raises(ks.StepTimedOut):
            await late()

    async with world.engine() as engine:
        await (await engine.start(waiting)).result(30)
        released.set()
        await asyncio.to_thread(ended.wait)
        await asyncio.sleep(0.05)
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_failure_in_one_thread_cancels_threads_that_wait_for_their_turn(world, effects):
    @ks.step
    async def work(item):
        effects.append(item)
        return item

    @ks.workflow
    def flow():
        def one(item):
            if item == 2:
                raise KeyError("two")
            return work(item).result()

        try:
            ks.map(one, [1, 2, 3]).result()
        except KeyError:
            return work("caught").result()

    async with world.engine() as engine:
        run = await engine.start(flow, run_id="r")
        assert await run.result(30) == "caught"
        assert 3 not in effects
        assert (await run.replay()).problem == ""
        if not world.encrypted:

            async def check(again, length):
                assert await again.result(30) == "caught", length

            await replay_from_every_prefix(run, check)


@pytest.mark.one_store
async def test_exit_in_a_thread_of_a_map_ends_only_its_part(world):
    @ks.step
    async def work(item):
        return item

    @ks.workflow
    def flow():
        def leave(item):
            work(item).result()
            sys.exit(3)

        try:
            ks.map(leave, [1, 2]).result()
        except RuntimeError as error:
            return [str(error), work("end").result()]

    async with world.engine() as engine:
        assert await (await engine.start(flow)).result(30) == ["SystemExit: 3", "end"]
