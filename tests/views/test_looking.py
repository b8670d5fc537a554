"""What a door asks about runs of a store: near ids, workers, requests, cancellations, and a run at a glance."""

import asyncio
from datetime import UTC, datetime

import pytest

import keepstep as ks
from keepstep.errors import EncryptionError
from keepstep.model import ErrorInfo, Run, Status, WorkerInfo
from keepstep.stores.memory import MemoryStore
from keepstep.testing import in_virtual_time, world
from keepstep.views.finding import is_attended, lacks_worker, near_ids, successor_of
from keepstep.views.overview import Locked, overview_of, readable
from keepstep.views.requests import Obstacle, Prospect, Request, cancellation_of, pending_request, prospect_of
from keepstep.views.waits import Act, Action, Wait, WaitKind

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@ks.workflow
async def order(number: int = 1) -> str:
    return "approved" if await ks.wait_for("approve") else "denied"


@ks.workflow
async def series(number: int = 1) -> int:
    if number < 3:
        ks.continue_as(number + 1)
    await ks.wait_for("last")
    return number


def opened(store, **options):
    return world(store, workflows=[order, series], **options)


@pytest.fixture
def store():
    store = MemoryStore()
    yield store
    store.close()


async def parked(engine, workflow=order, run_id="order-1"):
    handle = await engine.start(workflow, run_id=run_id)
    await handle.reached(Status.WAITING)
    return await (await handle.latest()).run()


# -- finding -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_near_ids_share_the_longest_prefix(store):
    async with opened(store, worker=False) as engine:
        for name in ("order-1", "order-2", "refund-1"):
            await engine.start(order, run_id=name)
        assert set(near_ids(store, "order-3")) == {"order-1", "order-2"}
        assert near_ids(store, "refund") == ("refund-1",)


@in_virtual_time
async def test_an_id_that_begins_otherwise_is_near_if_it_looks_alike(store):
    async with opened(store, worker=False) as engine:
        await engine.start(order, run_id="refund-1")
        assert near_ids(store, "xefund-1") == ("refund-1",)
        assert near_ids(store, "nothing") == ()
        assert near_ids(store, "x" * 1000) == ()


@in_virtual_time
async def test_of_many_near_ids_three_are_told(store):
    async with opened(store, worker=False) as engine:
        for number in range(10, 20):
            await engine.start(order, run_id=f"order-{number}")
        assert len(near_ids(store, "order-1")) == 3


@in_virtual_time
async def test_the_newest_run_of_a_series_is_found_from_any(store):
    async with opened(store) as engine:
        newest = await parked(engine, series, "series")
        first, second = await engine.stored_run("series"), await engine.stored_run("series~2")
        assert (await successor_of(engine, first)).id == (await successor_of(engine, second)).id == newest.id
        assert await successor_of(engine, newest) is None


@in_virtual_time
async def test_a_series_whose_newest_run_was_removed_has_no_successor(store):
    async with opened(store) as engine:
        newest = await parked(engine, series, "series")
        first = await engine.stored_run("series")
        await engine.signal(newest.id, "last")
        await (await engine.get(newest.id)).result()
        for name in ("series~2", "series~3"):
            await engine.care.erase(name)
        assert await successor_of(engine, first) is None


# -- workers -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_workflow_is_attended_while_a_living_worker_knows_it(store):
    async with opened(store, worker=False) as engine:
        assert not await is_attended(engine, "order")
    async with opened(store) as engine:
        assert await is_attended(engine, "order")
        assert not await is_attended(engine, "another")


class Stored:
    """A store in which one run is driven, or was, by a worker."""

    url = "memory:"

    def __init__(self, *, worker, alive):
        self.run = Run("order-1", "order", Status.RUNNING if worker else Status.QUEUED, NOW, worker=worker)
        self.workers = [WorkerInfo("w1", workflows=("order",), alive=alive)]

    async def stored_run(self, run_id):
        return self.run

    async def ask(self, question):
        return question(self)

    def list_workers(self, *, gone=False):
        return self.workers


@pytest.mark.parametrize("worker, alive, lacks", [(None, True, False), (None, False, True), ("w1", False, False)])
def test_a_dead_worker_attends_to_nothing_but_leaves_its_runs_to_recovery(worker, alive, lacks):
    stored = Stored(worker=worker, alive=alive)
    assert asyncio.run(is_attended(stored, "order")) is alive
    assert asyncio.run(lacks_worker(stored, "order-1")) is lacks


@in_virtual_time
async def test_a_run_lacks_a_worker_only_while_it_should_go_on(store):
    async with opened(store, worker=False) as engine:
        run = await engine.start(order, run_id="order-1")
        assert await lacks_worker(engine, "order-1")
        await run.cancel()
        assert not await lacks_worker(engine, "order-1")
        with pytest.raises(ks.RunNotFound):
            await lacks_worker(engine, "order-2")


# -- requests ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_request_is_pending_until_it_is_done(store):
    async with opened(store) as engine:
        await parked(engine)
    async with opened(store, worker=False) as engine:
        run = await engine.get("order-1")
        assert await pending_request(engine, await run.run()) is None
        await run.by("ann").pause()
        asked = await pending_request(engine, await run.run())
        assert (asked.act, asked.by) == ("pause", "ann")
        await run.by("bob").resume()
        assert await pending_request(engine, await run.run()) is None
        await run.by("cem").cancel()
        await run.by("dan").pause()
        asked = await pending_request(engine, await run.run())
        assert (asked.act, asked.by) == ("cancel", "cem"), "a cancel is final, so it comes first"
        assert isinstance(asked, Request)
        assert asked.at is not None


@in_virtual_time
async def test_a_pause_that_was_done_is_not_pending(store):
    async with opened(store) as engine:
        run = await engine.get((await parked(engine)).id)
        await run.pause()
        await run.reached(Status.PAUSED)
        assert await pending_request(engine, await run.run()) is None


@in_virtual_time
async def test_a_cancellation_tells_who_when_and_why(store):
    async with opened(store) as engine:
        run = await engine.get((await parked(engine)).id)
        assert await cancellation_of(engine, await run.run()) is None
        await run.by("ann").cancel("out of stock")
        await run.reached(Status.CANCELLED)
        ended = await run.run()
        found = await cancellation_of(engine, ended)
        assert (found.by, found.reason) == ("ann", "out of stock")
        assert found.at == (await run.checkpoints())[-1].finished_at
        assert await pending_request(engine, ended) is None


# -- signals -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_an_awaited_signal_is_acted_on_if_a_worker_is_there(store):
    async with opened(store) as engine:
        run = await parked(engine)
        assert await prospect_of(engine, run, "approve", NOW) == Prospect(awaited=True)
    async with opened(store, worker=False) as engine:
        assert await prospect_of(engine, run, "approve", NOW) == Prospect(awaited=True, obstacle=Obstacle.NO_WORKER)


@in_virtual_time
async def test_another_signal_is_kept_while_the_run_waits(store):
    async with opened(store) as engine:
        run = await parked(engine)
        found = await prospect_of(engine, run, "another", NOW)
        assert (found.awaited, found.obstacle) == (False, Obstacle.NOT_AWAITED)
        assert found.waits == (Wait(WaitKind.SIGNAL, "approve"),)


@pytest.mark.parametrize("status, obstacle", [(Status.PAUSED, Obstacle.PAUSED), (Status.SET_ASIDE, Obstacle.SET_ASIDE)])
def test_a_stopped_run_does_not_act_on_a_signal(status, obstacle):
    @in_virtual_time
    async def ask():
        async with world() as engine:
            return await prospect_of(engine, Run("order-1", "order", status, NOW), "approve", NOW)

    found = ask()
    assert (found.awaited, found.obstacle) == (False, obstacle)


@in_virtual_time
async def test_a_run_that_was_handed_over_says_where_it_goes_on():
    error = ErrorInfo("Copy", "it goes on in other.db")
    async with world() as engine:
        run = Run("order-1", "order", Status.SET_ASIDE, NOW, error=error)
        found = await prospect_of(engine, run, "approve", NOW)
        assert (await overview_of(engine, run, NOW)).waits == ()
    assert (found.obstacle, found.elsewhere) == (Obstacle.HANDED_OVER, "it goes on in other.db")


@in_virtual_time
async def test_nobody_knows_whether_a_driven_run_waits_for_a_signal():
    async with world() as engine:
        run = Run("order-1", "order", Status.RUNNING, NOW)
        assert await prospect_of(engine, run, "approve", NOW) == Prospect(awaited=None)


# -- a run at a glance -------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_an_overview_gathers_what_a_door_shows(store):
    async with opened(store) as engine:
        run = await parked(engine)
        view = await overview_of(engine, run, NOW)
        assert (view.run, view.locked, view.worker, view.request, view.newest) == (run, None, None, None, None)
        assert view.waits == (Wait(WaitKind.SIGNAL, "approve"),)
        assert view.actions == (Action(Act.APPROVE, "order-1", "approve"),)


@in_virtual_time
async def test_an_overview_of_a_series_offers_actions_on_its_newest_run(store):
    async with opened(store) as engine:
        newest = await parked(engine, series, "series")
        view = await overview_of(engine, await engine.stored_run("series"), NOW)
        assert view.newest.id == newest.id
        assert view.actions == (Action(Act.APPROVE, newest.id, "last"),)
        assert view.waits == ()


@in_virtual_time
async def test_an_overview_names_the_worker(store):
    @ks.workflow
    async def busy():
        await hold()

    @ks.step
    async def hold():
        await asyncio.sleep(3600)

    async with world(store, workflows=[busy]) as engine:
        run = await engine.start(busy)
        view = await overview_of(engine, await run.run(), NOW)
        assert view.worker.id == view.run.worker == engine.worker_id
        assert view.worker.alive


class NoKeys:
    def __init__(self, *, wrong):
        self.wrong = wrong

    def input(self, run):
        error = EncryptionError("it is encrypted")
        error.wrong = self.wrong
        raise error


@pytest.mark.parametrize("wrong, reason", [(False, Locked.NO_KEY), (True, Locked.OTHER_KEY)])
def test_a_run_without_its_key_is_shown_without_values(wrong, reason):
    run = Run("order-1", "order", Status.RUNNING, NOW, input=b"secret", progress=b"secret", data_key="k1.abc")
    shown, locked = readable(NoKeys(wrong=wrong), run)
    assert locked is reason
    assert b"secret" not in (shown.input, shown.progress)


def test_a_run_in_plain_text_needs_no_key():
    run = Run("order-1", "order", Status.RUNNING, NOW, input=b"[[],{}]")
    assert readable(NoKeys(wrong=True), run) == (run, None)
