"""A run that was put away can do nothing more, whatever its code catches (K7); it is put away when it may be (K24)."""

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import keepstep as ks
from keepstep.engine import heartbeat
from keepstep.model import Signal, WorkerInfo
from keepstep.model.signal import CANCEL
from keepstep.ports import ClaimRequest, Send
from tests.engine.world import steps_of, told, until, until_at_last_wait, until_status


def worker_for(effects):
    @ks.step
    async def work(name):
        effects.append(name)
        return name

    return work


async def parked_then_woken(world, workflow, *, status="waiting"):
    """Park a run, let its left-over code do what it likes, then wake it: its result and its history."""
    async with world.engine() as engine:
        run = await engine.start(workflow, run_id="r")
        await until_status(run, status)
        before = await told(run)
        for _ in range(20):
            await asyncio.sleep(0)
        assert await told(run) == before
        await run.signal("go")
        return await run.result(30)


async def test_gather_with_return_exceptions_does_not_catch_a_park(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def swallowing():
        got = await asyncio.gather(ks.wait_for("go"), return_exceptions=True)
        await work("after")
        return [str(one) for one in got]

    assert await parked_then_woken(world, swallowing) == ["True"]
    assert effects == ["after"]


async def test_except_baseexception_runs_no_step_on_a_park(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def swallowing():
        got = None
        for _ in range(3):
            try:
                got = await ks.wait_for("go")
                break
            except BaseException:
                await work("swallowed")
        await work("after")
        return got

    assert await parked_then_woken(world, swallowing) is True
    assert effects == ["after"]


async def test_step_in_finally_does_not_run_on_a_park(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def cleaning():
        try:
            await work("a")
            await ks.wait_for("go")
        finally:
            await work("cleanup")
            await ks.sleep(0)
            ks.publish("cleaned", value=True)
            ks.emit("cleaned")
        return "done"

    assert await parked_then_woken(world, cleaning) == "done"
    assert effects == ["a", "cleanup"]


async def test_code_that_refuses_its_park_stops_spinning(world):
    """It is left hanging, for good: collected, it would go on in the context of whoever made room for it."""
    spins = []

    @ks.workflow
    async def stubborn():
        while True:
            try:
                return await ks.wait_for("go")
            except BaseException as end:
                spins.append(type(end).__name__)

    assert await parked_then_woken(world, stubborn) is True
    count = len(spins)
    gc.collect()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(spins) == count < 1000
    assert set(spins) <= {"Detached", "CancelledError"}


async def test_thread_that_refuses_its_park_stops_spinning(world):
    spins = []

    @ks.workflow
    def stubborn():
        while True:
            try:
                return ks.wait_for("go").result()
            except BaseException as end:
                spins.append(type(end).__name__)

    assert await parked_then_woken(world, stubborn) is True
    assert len(spins) < 1000
    assert set(spins) <= {"Detached", "CancelledError"}


async def test_child_task_of_a_parked_run_does_nothing_more(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def branching():
        async def branch():
            try:
                await ks.wait_for("never")
            except asyncio.CancelledError:
                await work("branch after its end")
                raise

        task = asyncio.create_task(branch())
        got = await ks.wait_for("go")
        task.cancel()
        await asyncio.wait([task])
        return got

    assert await parked_then_woken(world, branching) is True
    assert effects == ["branch after its end"]


async def test_def_workflow_runs_no_step_on_a_park(world, effects):
    work = worker_for(effects)

    @ks.workflow
    def swallowing():
        try:
            got = ks.wait_for("go").result()
        except BaseException:
            work("swallowed").result()
            raise
        work("after").result()
        return got

    assert await parked_then_woken(world, swallowing) is True
    assert effects == ["after"]


@pytest.mark.live_only
async def test_lost_lease_stops_the_code(world, effects):
    """Another worker has the run; what this one still does must not be written, nor a further step begun."""
    started, released = asyncio.Event(), asyncio.Event()

    @ks.step
    async def work(name):
        effects.append(name)
        if name == "slow":
            started.set()
            await released.wait()
        return name

    @ks.workflow
    async def fenced():
        await work("slow")
        await work("next")
        return "done"

    engine = await world.started()
    run = await engine.start(fenced, run_id="r")
    await started.wait()
    context = engine.live["r"]
    context.epoch -= 1  # as if the store had given the run to someone else
    released.set()
    await until(lambda: context.stop.detached)
    assert context.stop.detached == "its lease was lost"
    assert effects == ["slow"]
    assert await steps_of(run) == []
    await world.crash(engine)


@pytest.mark.live_only
async def test_lost_lease_ends_the_retries_of_a_stubborn_body(world, effects):
    """It makes an error of its cancellation, for which its policy has another attempt."""
    began, ended = asyncio.Event(), asyncio.Event()

    @ks.step(retry=ks.Retry(attempts=5, base_seconds=0))
    async def stubborn():
        effects.append("tried")
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()
            raise ConnectionError("interrupted") from None

    @ks.workflow
    async def trying():
        await stubborn()

    engine = await world.started()
    run = await engine.start(trying, run_id="r")
    await began.wait()
    context = engine.live["r"]
    context.detach("its lease was lost")
    await ended.wait()
    await until(lambda: not context.bodies, "the end of the body")
    assert effects == ["tried"]
    assert await steps_of(run, "step failed") == []
    await world.crash(engine)


@pytest.mark.live_only
@pytest.mark.one_store
async def test_worker_gives_itself_up_once(world, monkeypatch, logged):
    """Two heartbeats may come before the loop moves, as after a stop of the whole process."""
    async with world.engine() as engine:
        first, renew = engine.worker.id, engine.store.renew_leases

        def forgetful(info, *, leaving=False):
            return info.id != first and renew(info, leaving=leaving)

        monkeypatch.setattr(engine.store, "renew_leases", forgetful)
        engine.worker.beat_once()
        engine.worker.beat_once()
        second = await until(lambda: engine.worker.id != first and engine.worker.id)
        await until(engine.lease_is_fresh)
        await asyncio.sleep(0)
        assert engine.worker.id == second
    assert sum("given this worker up" in line for line in logged()) == 1


@pytest.mark.live_only
async def test_stuck_loop_loses_its_runs_to_another_worker(world, monkeypatch, effects):
    """The heartbeat has a thread of its own, so it could go on for ever though nothing moves any more (K19)."""
    monkeypatch.setattr(heartbeat, "STUCK_SECONDS", 0.3)
    patience = time.monotonic() + 60

    @ks.step
    async def stuck():
        with ThreadPoolExecutor(1) as other:
            effects.append(other.submit(taken_over).result())  # the loop does not turn meanwhile
        return "too late"

    @ks.workflow
    async def stopping():
        return await stuck()

    def taken_over():
        request = ClaimRequest("another", frozenset({"stopping"}))
        while time.monotonic() < patience:
            engine.store.renew_leases(WorkerInfo("another"))
            if claims := engine.store.claim_runs(request).claims:
                return claims[0].run.id
        return "nobody could take it"

    world._memory.lease_seconds = 0.9
    engine = await world.started(**{} if world.kind == "memory" else {"lease_seconds": 0.9})
    run = await engine.start(stopping, run_id="r")
    await until(lambda: effects)
    assert effects == ["r"]
    await until(lambda: "r" not in engine.live, "that it let go")
    assert await steps_of(run) == []
    await world.crash(engine)


# -- parking -----------------------------------------------------------------------------------------------------------


async def test_sleeping_run_is_parked(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def sleeping():
        await work("a")
        await ks.sleep(hours=1)

    async with world.engine() as engine:
        run = await engine.start(sleeping, run_id="r")
        await until_status(run, "waiting")
        await until(lambda: not engine.live)
        row = await run.run()
        assert row.worker is None
        assert 3590 < (row.due_at - row.created_at).total_seconds() < 3610


async def test_run_whose_first_act_is_a_wait_is_parked(world):
    """It was claimed, not born here: its first record must not keep it in memory."""

    @ks.workflow
    async def sleeping():
        await ks.sleep(hours=1)

    async with world.engine(worker=False) as client:
        run = await client.start(sleeping, run_id="r")
        async with world.engine() as engine:
            await until_status(run, "waiting")
            await until(lambda: not engine.live)


async def test_recovered_run_is_parked_again(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def waiting():
        await work("a")
        return await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    await engine.start(waiting, run_id="r")
    await until_at_last_wait(engine, "r")
    await world.crash(engine)
    async with world.engine() as engine:
        run = await engine.get("r")
        await until_status(run, "waiting")
        await until(lambda: not engine.live)
        await run.signal("go", 7)
        assert await run.result(30) == 7
    assert effects == ["a"]


@pytest.mark.live_only
async def test_run_that_waits_for_a_plain_future_is_not_parked(world):
    """A plain future, a socket, a plain sleep: such a wait cannot be put away."""
    future = None

    @ks.workflow
    async def waiting():
        nonlocal future
        future = asyncio.get_running_loop().create_future()
        both = await asyncio.gather(ks.sleep(hours=1), future, return_exceptions=True)
        return both[1]

    async with world.engine() as engine:
        run = await engine.start(waiting, run_id="r")
        await until(lambda: engine.live["r"].waits)
        await asyncio.sleep(0.15)  # longer than it would linger
        assert await run.status() is ks.Status.RUNNING
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(30)


def just_before(engine, status, send):
    """Have a signal reach the store just before the commit that gives a run this status, once."""
    commit, sent = engine.store.commit, []

    def slipping_in(changes, **options):
        if not sent and any(getattr(change, "status", None) is status for change in changes):
            sent.append(send)
            commit([Send(send)])
        return commit(changes, **options)

    engine.store.commit = slipping_in
    return sent


async def test_signal_sent_while_the_run_is_being_parked_is_kept(world):
    @ks.workflow
    async def waiting():
        return await ks.wait_for("word")

    async with world.engine() as engine:
        sent = just_before(engine, ks.Status.WAITING, Signal("r", "word", b'"heard"', "only one"))
        run = await engine.start(waiting, run_id="r")
        assert await run.result(30) == "heard"
        assert sent


async def test_cancel_sent_while_the_run_is_finishing_is_kept(world):
    @ks.workflow
    async def finishing():
        await ks.sleep(0)
        return "completed"

    async with world.engine() as engine:
        sent = just_before(engine, ks.Status.COMPLETED, Signal("r", CANCEL, b"true", "only one"))
        run = await engine.start(finishing, run_id="r")
        with pytest.raises(ks.RunCancelled):
            await run.result(30)
        assert sent


async def test_signals_sent_while_the_run_keeps_parking_are_kept(world):
    @ks.workflow
    async def waiting(count):
        return [await ks.wait_for("word") for _ in range(count)]

    async with world.engine(linger_seconds=0.0) as engine:
        run = await engine.start(waiting, 20, run_id="r")
        for number in range(20):
            await run.signal("word", number)
            await asyncio.sleep(0.001 * (number % 3))
        assert await run.result(30) == list(range(20))


async def test_other_signal_does_not_wake_a_parked_run(world):
    @ks.workflow
    async def waiting():
        return await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(waiting, run_id="r")
        await until_status(run, "waiting")
        epoch = (await run.run()).epoch
        await run.signal("other")
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert (await run.run()).epoch == epoch
        await run.signal("go")
        assert await run.result(30) is True


async def test_open_branches_are_cancelled_and_logged_at_the_end(world, effects, logged):
    work = worker_for(effects)

    @ks.workflow
    async def careless():
        async def branch():
            try:
                await ks.wait_for("never")
            finally:
                effects.append("branch ended")

        task = asyncio.create_task(branch())
        effects.append(task)
        await work("a")
        return "done"

    async with world.engine() as engine:
        run = await engine.start(careless, run_id="r")
        assert await run.result(30) == "done"
        assert "wait_for:never#1" in " ".join(await steps_of(run, "step cancelled"))
    assert "branch ended" in effects
    assert any("open branch" in line for line in logged())


async def test_unfinished_runs_are_handed_back_when_the_engine_closes(world, effects):
    """Leaving `async with` hands unfinished runs back (K36): the next engine goes on at once."""
    started, first_life = asyncio.Event(), asyncio.Event()

    @ks.step
    async def slow(name):
        effects.append(name)
        started.set()
        if not first_life.is_set():
            await asyncio.sleep(60)
        return name

    @ks.workflow
    async def working():
        return [await slow("a"), await slow("b")]

    async with world.engine(stop_seconds=0.01) as engine:
        await engine.start(working, run_id="r")
        await started.wait()
    first_life.set()
    async with world.engine() as engine:
        run = await engine.get("r")
        assert await run.result(30) == ["a", "b"]
        assert (await run.run()).recoveries == 0
    assert effects == ["a", "a", "b"]


async def test_step_under_way_is_finished_when_the_engine_closes(world, effects):
    started, released = asyncio.Event(), asyncio.Event()

    @ks.step
    async def slow(name):
        started.set()
        await released.wait()
        effects.append(name)
        return name

    @ks.workflow
    async def working():
        return [await slow("a"), await slow("b")]

    async with world.engine(stop_seconds=10) as engine:
        await engine.start(working, run_id="r")
        await started.wait()
        asyncio.get_running_loop().call_later(0.02, released.set)
    assert effects == ["a"]
    async with world.engine() as engine:
        assert await (await engine.get("r")).result(30) == ["a", "b"]
    assert effects == ["a", "b"]


async def test_run_is_parked_after_one_of_its_branches_ends(world):
    async def in_a_branch(call):
        return await call

    @ks.workflow
    async def two_waits():
        late = ks.wait_for("never sent", timeout=0.02, default="nothing")
        return await ks.gather(in_a_branch(ks.wait_for("go")), in_a_branch(late))

    assert await parked_then_woken(world, two_waits) == [True, "nothing"]
