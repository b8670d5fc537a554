"""The doctor: every unfinished run is driven, due, paused, set aside or holds a wake-up; what breaks that is found."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import apsw
import pytest
from msgspec import structs

import keepstep as ks
from keepstep.care.doctor import Severity, examine
from keepstep.model import Run, Status
from keepstep.model.signal import CANCEL, CHILD, PAUSE, RESUME
from keepstep.ports import Create, instant
from keepstep.stores.sqlite.writer import Turnstile
from keepstep.views.finding import lacks_worker
from keepstep.views.overview import overview_of
from keepstep.views.waits import Wait, WaitKind
from tests.engine.lives import set_aside
from tests.engine.world import until, until_recorded, until_status

pytestmark = pytest.mark.live_only


def codes(report):
    return sorted((finding.severity.value, finding.code) for finding in report.findings)


def finding(report, code):
    [found] = [one for one in report.findings if one.code == code]
    return found


def plant(engine, status, **head):
    """Put a run into the store in a state that the engine itself would never leave it in."""
    run = Run("planted", "somewhere", Status(status), instant(engine.clock.now()), **head)
    engine.store.commit([Create(run)])
    return run


# -- all is well -------------------------------------------------------------------------------------------------------


async def test_an_empty_store_and_finished_runs_are_healthy(world):
    @ks.workflow
    async def quick():
        return 1

    async with world.engine() as engine:
        assert (await examine(engine)).findings == []
        await (await engine.start(quick)).result()
        report = await examine(engine, deep=True)
        assert report.healthy
        assert (report.findings, report.runs) == ([], {})
        assert [worker.id for worker in report.workers] == [engine.worker.id]


async def test_runs_that_wait_for_something_are_healthy(world):
    @ks.workflow
    async def child():
        await ks.wait_for("never")

    @ks.workflow
    async def waiting(what):
        if what == "signal":
            await ks.wait_for("go")
        elif what == "time":
            await ks.sleep(hours=1)
        else:
            await (await ks.start(child)).result()

    async with world.engine() as engine:
        runs = [await engine.start(waiting, what) for what in ("signal", "time", "child")]
        for run in runs:
            await until_status(run, "waiting")
        await runs[0].pause()
        await until_status(runs[0], "paused")
        report = await examine(engine, deep=True)
        assert report.findings == []
        assert report.runs[Status.PAUSED] == 1


# -- promises that are broken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wakes", [(), (CANCEL, PAUSE)])
async def test_a_run_that_nothing_will_ever_wake_is_an_error(world, wakes):
    async with world.engine(worker=False) as engine:
        plant(engine, "waiting", wakes=wakes)
        report = await examine(engine)
        assert not report.healthy
        stalled = finding(report, "stalled")
        assert (stalled.severity, stalled.runs) == (Severity.ERROR, ("planted",))
        assert "planted" in stalled.message


@pytest.mark.parametrize(
    "head, code",
    [("status = 'running', worker = NULL", "not-leased"), ("status = 'waiting', worker = 'someone'", "lease")],
)
async def test_a_status_and_a_lease_that_contradict_each_other_are_an_error(world, head, code):
    """No worker would ever claim the one, nor let the other go: only damage makes such a head."""
    if world.kind != "sqlite":
        pytest.skip("it is done with SQL")
    async with world.engine(worker=False) as engine:
        plant(engine, "waiting", wakes=("go",))
        database = apsw.Connection(str(world.path))
        database.execute(f"UPDATE keepstep_head SET {head}")
        database.close()
        report = await examine(engine)
    found = finding(report, code)
    assert (found.severity, found.runs) == (Severity.ERROR, ("planted",))
    assert not report.healthy


async def test_a_paused_run_that_cannot_be_resumed_is_an_error(world):
    async with world.engine(worker=False) as engine:
        plant(engine, "paused", wakes=(CANCEL,))
        assert finding(await examine(engine), "stalled").severity is Severity.ERROR


async def test_paused_run_that_can_be_resumed_is_healthy(world):
    async with world.engine(worker=False) as engine:
        plant(engine, "paused", wakes=(RESUME, CANCEL))
        assert (await examine(engine)).findings == []


async def test_missing_child_is_an_error(world):
    async with world.engine(worker=False) as engine:
        plant(engine, "waiting", wakes=(f"{CHILD}start:child#1", CANCEL))
        assert "child" in finding(await examine(engine), "stalled").message


async def test_a_wake_up_that_was_lost_is_an_error(world):
    @ks.workflow
    async def waiting():
        await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(waiting, run_id="r")
        await until_status(run, "waiting")
    async with world.engine(worker=False) as engine:
        await (await engine.get("r")).signal("go")
        report = await examined_with_heads(engine, due_at=None)
        assert "not woken" in finding(report, "stalled").message


async def examined_with_heads(engine, **fields):
    """What the doctor says of a store whose heads say something else."""
    store = engine.store
    list_runs, get_run = store.list_runs, store.get_run

    def other_runs(query):
        page = list_runs(query)
        return replace(page, runs=tuple(replace(run, **fields) for run in page.runs))

    store.list_runs, store.get_run = other_runs, lambda run_id: replace(get_run(run_id), **fields)
    try:
        return await examine(engine)
    finally:
        store.list_runs, store.get_run = list_runs, get_run


async def test_a_wake_up_that_was_lost_after_a_rewind_is_an_error(world):
    """The signal was read by a wait that the rewind has left behind, so it is unread."""

    @ks.workflow
    async def waiting():
        await ks.wait_for("go")
        await ks.wait_for("never")

    async with world.engine() as engine:
        run = await engine.start(waiting, run_id="r")
        await run.signal("go")
        await until_recorded(run, "wait_for:go#1")
        await until_status(run, "waiting")
    async with world.engine(worker=False) as engine:
        await (await engine.get("r")).rewind(to=1)
        report = await examined_with_heads(engine, status=Status.WAITING, wakes=("go", CANCEL), due_at=None)
        assert "not woken" in finding(report, "stalled").message


async def test_a_signal_that_was_read_is_no_lost_wake_up(world):
    @ks.workflow
    async def waiting():
        await ks.wait_for("go")
        await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(waiting)
        await run.signal("go")
        await until_status(run, "waiting")
        await until(lambda: not engine.live)
        assert (await examine(engine)).findings == []


@pytest.mark.plaintext
async def test_a_damaged_record_is_found_when_asked_for(world):
    @ks.step
    async def one():
        return "abcdef"

    @ks.workflow
    async def sound():
        return await one()

    async with world.engine() as engine:
        run = await engine.start(sound)
        await run.result()
        if world.kind == "sqlite":
            with apsw.Connection(str(world.path)) as database:
                database.execute("UPDATE keepstep_checkpoint SET record = replace(record, 'abcdef', 'abcdeg')")
        else:
            rows = engine.store._runs[run.id].rows
            rows[:] = [structs.replace(row, record=bytes(row.record).replace(b"abcdef", b"abcdeg")) for row in rows]
        assert (await examine(engine)).healthy
        report = await examine(engine, deep=True)
        assert finding(report, "corrupt").runs == (run.id,)
        assert not report.healthy


async def test_blocked_store_is_reported_with_the_blocking_process(world):
    if world.kind == "memory":
        pytest.skip("memory has no turnstile")
    async with world.engine(worker=False, busy_seconds=0.2) as engine:
        turn = Turnstile(f"{world.path}-turnstile")
        assert turn.enter(1.0)
        try:
            report = await examine(engine)
        finally:
            turn.leave()
            turn.close()
        assert str(os.getpid()) in finding(report, "store").message
        assert not report.healthy


# -- what needs someone ------------------------------------------------------------------------------------------------


async def test_run_that_no_living_worker_knows_is_reported(world):
    @ks.workflow
    async def stranger():
        return 1

    async with world.engine(worker=False) as engine:
        for number in range(7):
            await engine.start(stranger, run_id=f"r{number}")
        report = await examine(engine)
        assert codes(report) == [("warning", "no-worker")]
        told = finding(report, "no-worker")
        assert "stranger" in told.message
        assert "and 2 more" in told.message
        assert len(told.runs) == 7
        assert report.healthy
    async with world.engine(workflows=[]) as blind, world.engine(worker=False) as engine:
        assert blind.worker is not None
        assert codes(await examine(engine)) == [("warning", "no-worker")]
    async with world.engine() as engine:
        await (await engine.get("r0")).result()
        await until(lambda: not engine.live)
        assert (await examine(engine)).findings == []


async def test_run_of_a_version_that_no_living_worker_has_is_reported(world):
    def of(version):
        @ks.workflow(name="pinned", version=version, on_change="pin")
        async def code():
            return version

        return code

    async with world.engine(worker=False) as engine:
        await engine.start(of("1"), run_id="r")
    new = of("2")
    async with world.engine(workflows=[new]) as engine:
        report = await examine(engine)
        told = finding(report, "no-version")
        assert "has version '1' of workflow 'pinned', only '2'" in told.message
        assert "the code of that version" in told.advice
        assert codes(report) == [("warning", "no-version")]
        assert [worker.known for worker in report.workers if worker.alive] == [("pinned",)]
        seen = await overview_of(engine, await (await engine.get("r")).run(), instant(engine.clock.now()))
        assert seen.waits == (Wait(WaitKind.WORKER, "pinned", version="1", versions=("2",)),)
        assert await lacks_worker(engine, "r")
        assert "pinned to version '1', and the code here has '2'" in (await (await engine.get("r")).info()).why
    async with world.engine(workflows=[of("1")]) as engine:
        assert await (await engine.get("r")).result() == "1"


async def test_dead_worker_and_its_runs_are_reported(world):
    began = asyncio.Event()

    @ks.step
    async def busy():
        began.set()
        await asyncio.Event().wait()

    @ks.workflow
    async def left_behind():
        await busy()

    dead = await world.started()
    await dead.start(left_behind, run_id="r")
    await began.wait()
    worker = dead.worker.id
    await world.crash(dead)
    async with world.engine(worker=False) as engine:
        report = await examine(engine)
        told = finding(report, "dead-worker")
        assert (told.worker, told.runs, told.severity) == (worker, ("r",), Severity.WARNING)


async def test_a_run_that_records_nothing_for_long_is_stale(world):
    began = asyncio.Event()

    @ks.step
    async def hangs():
        began.set()
        await asyncio.Event().wait()

    @ks.workflow
    async def slow():
        await hangs()

    async with world.engine() as engine:
        run = await engine.start(slow)
        await began.wait()
        assert (await examine(engine)).findings == []
        report = await examine(engine, stale_seconds=0)
        assert finding(report, "stale").runs == (run.id,)
        assert report.healthy


async def test_set_aside_run_is_reported_with_its_reason(world):
    async with set_aside(world) as engine:
        told = finding(await examine(engine), "set-aside")
        assert "DefinitionChanged" in told.message
        assert "keepstep retry r" in told.advice


async def test_damaged_signal_sets_its_run_aside_and_is_reported(world):
    @ks.workflow
    async def patient():
        return await ks.wait_for("go")

    async with world.engine(linger_seconds=60) as engine:
        if engine.store.url.startswith("memory"):
            pytest.skip("nothing in memory is damaged")
        handle = await engine.start(patient, run_id="r")
        await until(lambda: "r" in engine.live)
        database = apsw.Connection(engine.store.url.removeprefix("sqlite:///"))
        database.execute(
            "CREATE TRIGGER spoil AFTER INSERT ON keepstep_signal BEGIN"
            " UPDATE keepstep_signal SET payload = '{' WHERE position = new.position; END"
        )
        await handle.signal("go", {"a": 1})
        await until_status(handle, "set aside")
        database.close()
        told = finding(await examine(engine, deep=True), "corrupt")
        assert "its signal 1 cannot be read" in told.message
        assert "its signal 1" in (await handle.run()).error.message


async def test_step_in_doubt_is_reported(world):
    began = asyncio.Event()

    @ks.step(at_most_once=True)
    async def pay():
        began.set()
        await asyncio.Event().wait()

    @ks.workflow
    async def order():
        await pay()

    dead = await world.started()
    await dead.start(order, run_id="r")
    await began.wait()
    fresh = await world.crash_and_recover(dead)
    await until_status(await fresh.get("r"), "waiting")
    told = finding(await examine(fresh), "in-doubt")
    assert "keepstep resolve r pay --result" in told.advice
    await fresh.close()


async def test_a_run_that_is_due_and_not_taken_is_late(world):
    @ks.workflow(name="somewhere")
    async def code():
        return 1

    async with world.engine(workflows=[]) as engine:
        engine._given["somewhere"] = code  # it says that it knows the workflow, but never claims
        engine.worker.stop_claiming()
        await engine.call(engine.worker._renew)
        now = instant(engine.clock.now())
        plant(engine, "queued", due_at=instant(now.timestamp() - 3600))
        try:
            assert codes(await examine(engine)) == [("warning", "late")]
        finally:
            engine._given.clear()


async def test_subscriber_of_a_silent_topic_can_go_on(world):
    @ks.workflow(name="listening")
    async def listening():
        async with ks.Topic("news").subscribe() as messages:
            return await anext(messages)

    async with world.engine(workflows=[listening]) as engine:
        run = await engine.start(listening)
        await until_status(run, "waiting")
        assert [one.code for one in (await examine(engine)).findings] == []
        await engine.topics.publish("news", "hello")
        assert await run.result(30) == "hello"
