"""`ks.save_progress`: a long step tells its next attempt how far it has come."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime

import pytest

import keepstep as ks
from keepstep.kernel.saved import MOST_SAVED_BYTES
from keepstep.model import Status, WorkerInfo
from keepstep.ports import Advance, ClaimRequest, Verdict
from keepstep.records.progress import progress_text, report_in, saved_in
from tests.engine.world import World, until, until_status

AGAIN = ks.Retry(attempts=5, base_seconds=0)


class Body:
    """A step that saves numbers, then fails, hangs or ends as the test wants, and remembers what each attempt found."""

    def __init__(self):
        self.found = []
        self.plan = []

    def begin(self, default=0):
        self.found.append((ks.attempt(), ks.saved_progress(default)))
        return self.plan.pop(0) if self.plan else "end"


@pytest.fixture
def body():
    return Body()


def workflow_of(body, name="saving", saves=(), **options):
    """A workflow of one long step. `saves` are the values that each attempt saves, in order."""

    @ks.step(name="long", **options)
    async def long():
        act = body.begin()
        if act == "end":
            return "done"
        for value in saves[len(body.found) - 1] if len(body.found) <= len(saves) else ():
            ks.save_progress(value)
        if act == "fail":
            raise ValueError("not yet")
        await asyncio.sleep(600)
        return "hung"

    @ks.workflow(name=name)
    async def saving():
        return await long()

    return saving


async def until_beaten(engine, run_id, value):
    """Wait until a heartbeat has taken a saved value."""

    async def is_there():
        run = await engine.call(engine.store.get_run, run_id)
        saved = saved_in(run.progress or b"")
        return any(bytes(one.value) == value for one in saved.values())

    await until(is_there, f"the heartbeat with {value!r}")


# -- after a failure ---------------------------------------------------------------------------------------------------


@pytest.mark.on_postgres
async def test_next_attempt_finds_what_a_failed_one_saved(world, body):
    body.plan = ["fail", "fail"]
    workflow = workflow_of(body, saves=[[1, 2], [3]], retry=AGAIN)
    async with world.engine(workflows=[workflow]) as engine:
        assert await (await engine.start(workflow)).result() == "done"
    assert body.found == [(1, 0), (2, 2), (3, 3)]


async def test_value_is_kept_over_an_attempt_that_saves_nothing(world, body):
    body.plan = ["fail", "fail"]
    workflow = workflow_of(body, saves=[["far"]], retry=AGAIN)
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        assert await run.result() == "done"
        assert body.found == [(1, 0), (2, "far"), (3, "far")]
        assert [one.kind for one in await run.checkpoints()].count("progress saved") == 1


async def test_saved_values_keep_their_types(world, body):
    value = {"at": datetime(2026, 1, 2, tzinfo=UTC), "seen": {1, 2}, "pair": (1, b"x")}
    body.plan = ["fail"]
    workflow = workflow_of(body, saves=[[value]], retry=AGAIN)
    async with world.engine(workflows=[workflow]) as engine:
        await (await engine.start(workflow)).result()
    assert body.found[1] == (2, value)
    assert type(body.found[1][1]["pair"]) is tuple


async def test_value_is_stored_as_it_was_when_it_was_saved(world):
    found = []

    @ks.step(retry=AGAIN)
    async def long():
        found.append(ks.saved_progress([]))
        done = [1]
        ks.save_progress(done)
        done.append(2)
        if len(found) == 1:
            raise ValueError("not yet")

    @ks.workflow(name="changing")
    async def changing():
        await long()

    async with world.engine(workflows=[changing]) as engine:
        await (await engine.start(changing)).result()
    assert found == [[], [1]]


async def test_value_survives_a_long_backoff_and_a_crash_meanwhile(world, body):
    body.plan = ["fail"]
    workflow = workflow_of(body, saves=[["far"]], retry=ks.Retry(attempts=2, base_seconds=3))
    engine = await world.started(workflows=[workflow])
    run = await engine.start(workflow, run_id="parked")
    await until_status(run, Status.WAITING)
    engine = await world.crash_and_recover(engine, workflows=[workflow])
    assert await (await engine.get("parked")).result() == "done"
    assert body.found == [(1, 0), (2, "far")]


async def test_steps_do_not_see_each_others_values(world):
    found = {}

    @ks.step(retry=AGAIN)
    async def long(name):
        found.setdefault(name, []).append(ks.saved_progress())
        ks.save_progress(name)
        if len(found[name]) == 1:
            raise ValueError("not yet")

    @ks.workflow(name="two")
    async def two():
        await ks.gather(long("a"), long("b"))
        await long("c")

    async with world.engine(workflows=[two]) as engine:
        await (await engine.start(two)).result()
    assert found == {"a": [None, "a"], "b": [None, "b"], "c": [None, "c"]}


async def test_step_in_a_thread_saves_its_progress(world):
    found = []

    @ks.step(retry=AGAIN)
    def long():
        found.append((ks.saved_progress(0), threading.current_thread() is threading.main_thread()))
        ks.save_progress(7)
        if len(found) == 1:
            raise ValueError("not yet")

    @ks.workflow(name="threaded")
    async def threaded():
        await long()

    async with world.engine(workflows=[threaded]) as engine:
        await (await engine.start(threaded)).result()
    assert found == [(0, False), (7, False)]


# -- after a crash -----------------------------------------------------------------------------------------------------


@pytest.mark.on_postgres
async def test_next_worker_finds_what_a_dead_one_saved(world, body):
    body.plan = ["hang"]
    workflow = workflow_of(body, saves=[[1, "far"]])
    engine = await world.started(workflows=[workflow])
    await engine.start(workflow, run_id="r")
    await until_beaten(engine, "r", b'"far"')
    engine = await world.crash_and_recover(engine, workflows=[workflow])
    assert await (await engine.get("r")).result() == "done"
    assert body.found == [(1, 0), (1, "far")]


@pytest.mark.on_postgres
async def test_value_survives_crashes_of_workers_that_saved_nothing(world, body):
    body.plan = ["hang"] * 3
    workflow = workflow_of(body, saves=[["far"]])
    engine = await world.started(workflows=[workflow], recovery_limit=9)
    await engine.start(workflow, run_id="r")
    await until_beaten(engine, "r", b'"far"')
    for crashes in (2, 3):  # from the second one on, the run is a suspect: it is handed back and driven alone
        engine = await world.crash_and_recover(engine, workflows=[workflow], recovery_limit=9)
        await until(lambda crashes=crashes: len(body.found) == crashes)
    engine = await world.crash_and_recover(engine, workflows=[workflow], recovery_limit=9)
    assert await (await engine.get("r")).result() == "done"
    assert body.found[1:] == [(1, "far")] * 3


async def test_step_that_comes_further_between_crashes_is_not_set_aside(world, body):
    body.plan = ["hang"] * 7
    workflow = workflow_of(body, saves=[[number] for number in range(7)])
    engine = await world.started(workflows=[workflow])
    await engine.start(workflow, run_id="r")
    for number in range(7):
        await until_beaten(engine, "r", b"%d" % number)
        engine = await world.crash_and_recover(engine, workflows=[workflow])
    run = await engine.get("r")
    assert await run.result() == "done"
    assert [value for _, value in body.found] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert [one.kind for one in await run.checkpoints()].count("progress saved") == 2, "only at the limit"
    await engine.close()


async def test_step_that_saves_the_same_before_each_crash_is_set_aside(world, body):
    body.plan = ["hang"] * 9
    workflow = workflow_of(body, saves=[["far"]] * 9)
    engine = await world.started(workflows=[workflow])
    await engine.start(workflow, run_id="r")
    for crashes in range(1, 7):
        await until(lambda crashes=crashes: len(body.found) == crashes)
        await until_beaten(engine, "r", b'"far"')
        engine = await world.crash_and_recover(engine, workflows=[workflow])
    run = await engine.get("r")
    await until_status(run, Status.SET_ASIDE)
    assert len(body.found) == 6
    await engine.close()


async def test_value_survives_a_claim_that_is_handed_back_undriven(world, body):
    body.plan = ["hang"]
    workflow = workflow_of(body, saves=[["far"]])
    engine = await world.started(workflows=[workflow])
    await engine.start(workflow, run_id="r")
    await until_beaten(engine, "r", b'"far"')
    await world.crash(engine)
    store = world.store()
    store.renew_leases(WorkerInfo("other"))
    [claim] = store.claim_runs(ClaimRequest("other", frozenset({"saving"}))).claims
    back = Advance("r", "other", claim.lease.epoch, claim.run.seq, checksum=claim.run.checksum, progress=False)
    back.status, back.release, back.due_at = Status.QUEUED, True, datetime.now(UTC)
    assert store.commit([back])[0].verdict is Verdict.DONE
    store.renew_leases(WorkerInfo("other"), leaving=True)
    if world.kind != "memory":
        store.close()
    async with world.engine(workflows=[workflow]) as engine:
        assert await (await engine.get("r")).result() == "done"
    assert body.found == [(1, 0), (1, "far")]


async def test_new_owner_reports_the_value_again(world, body):
    body.plan = ["hang", "hang"]
    workflow = workflow_of(body, saves=[["far"]])
    engine = await world.started(workflows=[workflow])
    await engine.start(workflow, run_id="r")
    await until_beaten(engine, "r", b'"far"')
    engine = await world.crash_and_recover(engine, workflows=[workflow])
    await until(lambda: len(body.found) == 2)
    await until_beaten(engine, "r", b'"far"')


async def test_newest_of_several_dead_workers_counts(world, body):
    body.plan = ["hang", "hang"]
    workflow = workflow_of(body, saves=[["old"], ["new"]])
    engine = await world.started(workflows=[workflow])
    await engine.start(workflow, run_id="r")
    await until_beaten(engine, "r", b'"old"')
    engine = await world.crash_and_recover(engine, workflows=[workflow])
    await until_beaten(engine, "r", b'"new"')
    engine = await world.crash_and_recover(engine, workflows=[workflow])
    assert await (await engine.get("r")).result() == "done"
    assert body.found == [(1, 0), (1, "old"), (1, "new")]


async def test_heartbeat_does_not_count_after_its_attempt_has_failed(world, body):
    body.plan = ["fail", "hang"]
    workflow = workflow_of(body, saves=[["failed with this"]], retry=AGAIN)
    engine = await world.started(workflows=[workflow])
    await engine.start(workflow, run_id="r")
    await until(lambda: len(body.found) == 2)
    context = engine.live["r"]
    await until(lambda: "long#1" in context.progress._recorded)  # else that would come after the change below
    stale = context.progress.values["long#1"]
    stale.value = type(stale.value)(b'"stale"')  # as a heartbeat from before the last save of the failed attempt
    context.progress._recorded.clear()
    context.host.report_progress("r", context.progress)
    await until_beaten(engine, "r", b'"stale"')
    engine = await world.crash_and_recover(engine, workflows=[workflow])
    assert await (await engine.get("r")).result() == "done"
    assert body.found[1:] == [(2, "failed with this")] * 2


async def test_late_body_of_a_lost_run_saves_nothing(world):
    goes_on, saved = threading.Event(), threading.Event()
    found = []

    @ks.step
    def long():
        found.append(ks.saved_progress())
        if len(found) == 1:
            ks.save_progress("in time")
            goes_on.wait(60)
            ks.save_progress("late")
            saved.set()

    @ks.workflow(name="late")
    async def late():
        await long()

    engine = await world.started(workflows=[late], replay_always=False)
    await engine.start(late, run_id="r")
    await until_beaten(engine, "r", b'"in time"')
    context = engine.live["r"]
    context.detach("its lease was lost")
    goes_on.set()
    await until(saved.is_set)
    assert context.progress.unrecorded() == {}
    assert "r" not in engine.worker.progress
    engine = await world.crash_and_recover(engine, workflows=[late], replay_always=False)
    await (await engine.get("r")).result()
    assert found == [None, "in time"]


# -- cut short ---------------------------------------------------------------------------------------------------------


@pytest.mark.on_postgres
async def test_closing_engine_hands_the_value_on(world, body):
    body.plan = ["hang"]
    workflow = workflow_of(body, saves=[["far"]])
    async with world.engine(workflows=[workflow], stop_seconds=0) as engine:
        await engine.start(workflow, run_id="r")
        await until(lambda: body.found)
    async with world.engine(workflows=[workflow]) as engine:
        assert await (await engine.get("r")).result() == "done"
    assert body.found == [(1, 0), (1, "far")]


@pytest.mark.parametrize("steps_before", [0, 1])
async def test_interrupted_run_hands_the_value_on(world, body, steps_before):
    body.plan = ["hang"]

    @ks.step
    async def short():
        return None

    @ks.step
    async def long():
        if body.begin() == "hang":
            ks.save_progress("far")
            await asyncio.sleep(600)
        return "done"

    @ks.workflow(name="interrupted")
    async def workflow():
        for _ in range(steps_before):
            await short()
        return await long()

    async with world.engine(workflows=[workflow], worker=False) as engine:  # a run that no worker has begun
        await engine.start(workflow, run_id="r")
    async with world.engine(workflows=[workflow]) as engine:
        await until(lambda: body.found)
        engine.live["r"].interrupt()
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.get("r")
        assert await run.result() == "done"
        kinds = [one.kind for one in await run.checkpoints()]
        assert kinds[0] == "run started"
        assert kinds.count("progress saved") == 1
    assert body.found == [(1, 0), (1, "far")]


async def test_run_that_was_set_aside_keeps_the_value(world, body):
    body.plan = ["hang"]
    workflow = workflow_of(body, saves=[["far"]])
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow, run_id="r")
        await until(lambda: body.found)
        engine.set_aside(engine.live["r"], "Test", "for a look")
        await until_status(run, Status.SET_ASIDE)
        await run.retry("go on")
        assert await run.result() == "done"
    assert body.found == [(1, 0), (1, "far")]


# -- what does not count -----------------------------------------------------------------------------------------------


async def test_retry_by_a_person_begins_anew(world, body):
    body.plan = ["fail", "fail"]
    workflow = workflow_of(body, saves=[["far"]], retry=ks.Retry(attempts=2, base_seconds=0))
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        with pytest.raises(ks.RunFailed):
            await run.result()
        await run.retry("mended")
        assert await run.result() == "done"
    assert body.found == [(1, 0), (2, "far"), (1, 0)]


async def test_rewind_to_before_the_step_begins_anew(world, body):
    body.plan = ["fail"]
    workflow = workflow_of(body, saves=[["far"]], retry=AGAIN)
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        assert await run.result() == "done"
        await run.rewind(to=1, reason="once more", force=True)
        assert await run.result() == "done"
    assert body.found == [(1, 0), (2, "far"), (1, 0)]


async def test_heartbeat_from_before_a_retry_does_not_count(world, body):
    body.plan = ["hang", "fail"]
    workflow = workflow_of(body, saves=[["far"]])
    engine = await world.started(workflows=[workflow])
    await engine.start(workflow, run_id="r")
    await until_beaten(engine, "r", b'"far"')
    engine = await world.crash_and_recover(engine, workflows=[workflow])
    run = await engine.get("r")
    with pytest.raises(ks.RunFailed):
        await run.result()
    await run.retry("mended")
    assert await run.result() == "done"
    assert body.found == [(1, 0), (1, "far"), (1, 0)]


# -- costs and limits --------------------------------------------------------------------------------------------------


async def test_history_does_not_grow_with_the_number_of_saves(world, body):
    body.plan = ["fail"]
    workflow = workflow_of(body, saves=[range(3000)], retry=AGAIN)
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        await run.result()
        kinds = [one.kind for one in await run.checkpoints() if one.kind not in ("recovered", "run started")]
    assert kinds == ["progress saved", "step failed", "step completed", "run finished"]
    assert body.found == [(1, 0), (2, 2999)]


async def test_completed_step_leaves_no_row(world):
    @ks.step
    async def long():
        ks.save_progress("far")
        await asyncio.sleep(0.05)

    @ks.workflow(name="leaving nothing")
    async def workflow():
        await long()
        await ks.wait_for("go on")

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow, run_id="r")
        await until_status(run, Status.WAITING)
        await run.signal("go on")
        await run.result()
        assert "progress saved" not in [one.kind for one in await run.checkpoints()] or world.replaying


@pytest.mark.live_only
async def test_saves_are_written_at_most_twice_a_second(world, monkeypatch):
    beats = []

    @ks.step
    async def long():
        for number in range(120):
            ks.save_progress(number)
            await asyncio.sleep(0.01)

    @ks.workflow(name="busy")
    async def workflow():
        await long()

    async with world.engine(workflows=[workflow]) as engine:
        renew = engine.worker._renew
        monkeypatch.setattr(engine.worker, "_renew", lambda **options: (beats.append(1), renew(**options))[1])
        await (await engine.start(workflow)).result()
        assert 2 <= len(beats) <= 6


async def test_value_over_the_limit_is_refused(world):
    @ks.step
    async def long():
        ks.save_progress("x" * (MOST_SAVED_BYTES - 2))
        ks.save_progress("x" * MOST_SAVED_BYTES)

    @ks.workflow(name="too much")
    async def workflow():
        await long()

    async with world.engine(workflows=[workflow]) as engine:
        with pytest.raises(ks.RunFailed, match="got a value of 100,002 bytes, over the limit of 100,000"):
            await (await engine.start(workflow)).result()


@pytest.mark.plaintext
async def test_revealed_secret_is_not_saved(world, monkeypatch):
    monkeypatch.setenv("SAVED_TEST_KEY", "sk-verysecretvalue-123456")

    @ks.step
    async def long():
        ks.save_progress({"position": 1, "key": ks.Secret("SAVED_TEST_KEY").reveal()})

    @ks.workflow(name="secretive")
    async def workflow():
        await long()

    async with world.engine(workflows=[workflow]) as engine:
        with pytest.raises(ks.RunFailed, match="saved progress of step 'long#1'"):
            await (await engine.start(workflow)).result()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_saved_value_is_encrypted_and_comes_back(kind, tmp_path, body):
    world = World(kind, "live", tmp_path / "runs.db", encrypted=True)
    body.plan = ["hang", "fail"]
    workflow = workflow_of(body, name="hidden", saves=[["my far place"], ["my other place"]], retry=AGAIN)
    engine = await world.started(workflows=[workflow])
    await engine.start(workflow, run_id="r")
    await until_beaten(engine, "r", b'"my far place"')
    inner = engine.store.inner
    stored = [one.progress["r"] for one in inner.list_workers()]
    assert stored
    assert b"place" not in stored[0]
    engine = await world.crash_and_recover(engine, workflows=[workflow])
    assert await (await engine.get("r")).result() == "done"
    rows = engine.store.inner.list_checkpoints("r")
    assert [row.kind for row in rows].count("progress saved") == 1
    assert not any(b"place" in row.record for row in rows)
    assert body.found == [(1, 0), (1, "my far place"), (2, "my other place")]
    await world.end()


# -- where it is called ------------------------------------------------------------------------------------------------


def test_outside_a_run_it_does_nothing():
    ks.save_progress({"any": object()})
    assert ks.saved_progress() is None
    assert ks.saved_progress(3) == 3


@pytest.mark.parametrize("verb", ["save_progress", "saved_progress"])
async def test_in_a_workflow_it_is_refused(world, verb):
    @ks.workflow(name=f"wrong {verb}")
    async def wrong():
        getattr(ks, verb)(1)

    async with world.engine(workflows=[wrong]) as engine:
        with pytest.raises(ks.RunFailed, match=f"ks.{verb} is called in the workflow itself"):
            await (await engine.start(wrong)).result()


async def test_report_for_readers_does_not_show_saved_values(world):
    go = asyncio.Event()

    @ks.step
    async def long():
        ks.save_progress("far")
        await go.wait()
        ks.progress(0.5, "half")
        await asyncio.sleep(600)

    @ks.workflow(name="reporting")
    async def reporting():
        await long()

    async with world.engine(workflows=[reporting], stop_seconds=0) as engine:
        run = await engine.start(reporting, run_id="r")
        await until_beaten(engine, "r", b'"far"')
        assert await run.progress() is None
        go.set()
        await until(run.progress)
        assert await run.progress() == {"fraction": 0.5, "message": "half", "step": "long#1"}


def test_text_of_a_heartbeat_is_read_with_and_without_values():
    assert progress_text(None, {}) == b""
    report = progress_text({"fraction": 1.0}, {})
    assert (report_in(report), saved_in(report)) == (report, {})
    assert saved_in(b"not json") == {}
    assert report_in(b'"saved", but not an object') == b'"saved", but not an object'
    assert report_in(None) is None
