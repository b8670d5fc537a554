"""Queues with limits, as a program meets them: places, keys, deduplication, full queues, changes by a person."""

import asyncio
import logging

import pytest

import keepstep as ks
from keepstep.policies.queue import DECLARED
from tests.engine.world import until

pytestmark = pytest.mark.on_postgres


@pytest.fixture(autouse=True)
def _no_queues():
    DECLARED.clear()
    yield
    DECLARED.clear()


class Gauge:
    """How many bodies run at once, and the most there ever were."""

    def __init__(self):
        self.now, self.most, self.began = 0, 0, []

    async def hold(self, name, seconds=0.01):
        self.now += 1
        self.most = max(self.most, self.now)
        self.began.append(name)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.now -= 1


@pytest.fixture
def gauge():
    return Gauge()


@pytest.fixture
def holding(gauge):
    @ks.step
    async def hold(name):
        await gauge.hold(name)
        return name

    @ks.workflow
    async def holding(name):
        return await hold(name)

    return holding


async def test_no_more_runs_go_on_at_once_than_there_are_places(world, gauge, holding):
    mail = ks.Queue("mail", concurrency=2)
    async with world.engine() as engine:
        handles = [await engine.start(holding, n, queue=mail) for n in range(8)]
        assert [await handle.result(60) for handle in handles] == list(range(8))
    assert gauge.most == 2


async def test_a_run_of_a_limited_queue_is_not_leased_at_birth(world, holding):
    ks.Queue("mail", concurrency=0)
    async with world.engine() as engine:
        handle = await engine.start(holding, 1, queue="mail")
        run = await handle.run()
        assert (run.status, run.worker, run.epoch) == (ks.Status.QUEUED, None, 0)


async def test_a_workflow_has_a_queue_of_its_own(world):
    @ks.workflow(queue=ks.Queue("mail", concurrency=0))
    async def mailing():
        return 1

    async with world.engine() as engine:
        assert (await (await engine.start(mailing)).run()).queue == "mail"
        assert await (await engine.start(mailing, queue="other")).result(60) == 1


async def test_runs_of_a_key_go_one_after_the_other(world, gauge, holding):
    ks.Queue("mail", per_key=1)
    async with world.engine() as engine:
        handles = [await engine.start(holding, n, queue="mail", key="k") for n in range(5)]
        for handle in handles:
            await handle.result(60)
    assert (gauge.most, gauge.began) == (1, list(range(5)))


async def test_a_parked_run_holds_its_key_and_no_place(world, gauge, holding):
    ks.Queue("mail", concurrency=1, per_key=1)

    @ks.workflow
    async def waiting():
        return await ks.wait_for("go")

    async with world.engine(linger_seconds=0.01) as engine:
        first = await engine.start(waiting, queue="mail", key="k")
        await until(lambda: _is(first, ks.Status.WAITING))
        behind = await engine.start(holding, "behind", queue="mail", key="k")
        assert await (await engine.start(holding, "beside", queue="mail", key="other")).result(60) == "beside"
        assert (await behind.run()).status is ks.Status.QUEUED
        await first.signal("go", 7)
        assert await first.result(60) == 7
        assert await behind.result(60) == "behind"


async def _is(handle, status):
    return await handle.status() == status


async def test_a_child_with_its_parents_queue_and_key_shares_its_place(world, holding):
    ks.Queue("mail", per_key=1, concurrency=1)

    @ks.workflow
    async def parent():
        child = await ks.start(holding, "child", queue="mail", key="k")
        return await child.result()

    async with world.engine(linger_seconds=0.01) as engine:
        assert await (await engine.start(parent, queue="mail", key="k")).result(60) == "child"


async def test_a_second_start_with_the_same_dedupe_returns_the_first_run(world, holding):
    ks.Queue("mail", concurrency=0)
    async with world.engine() as engine:
        first = await engine.start(holding, 1, queue="mail", dedupe="d")
        second = await engine.start(holding, 2, queue="mail", dedupe="d")
        assert second.id == first.id
        await first.cancel()
        third = await engine.start(holding, 3, queue="mail", dedupe="d")
        assert third.id != first.id


async def test_a_retry_beside_a_twin_is_a_conflict(world):
    @ks.workflow
    async def failing():
        raise ValueError("broken")

    async with world.engine() as engine:
        first = await engine.start(failing, queue="mail", dedupe="d")
        with pytest.raises(ks.RunFailed):
            await first.result(60)
        await engine.queues.set("mail", concurrency=0)
        second = await engine.start(failing, queue="mail", dedupe="d")
        assert second.id != first.id
        with pytest.raises(ks.RunConflict, match="dedupe"):
            await first.retry()


async def test_a_limit_holds_for_the_next_start_of_the_engine_that_sets_it(world, holding):
    async with world.engine() as engine:
        assert await (await engine.start(holding, "before", queue="mail")).result(60) == "before"
        await engine.queues.set("mail", concurrency=0)
        held = await engine.start(holding, "held", queue="mail")
        assert (await held.run()).status is ks.Status.QUEUED
        await engine.queues.reset("mail")
        assert await held.result(60) == "held"


async def test_a_child_has_no_dedupe(world, holding):
    @ks.workflow
    async def parent():
        await ks.start(holding, 1, dedupe="d")

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="dedupe"):
            await (await engine.start(parent)).result(60)


async def test_a_full_queue_refuses_a_start(world, holding):
    ks.Queue("mail", concurrency=0, max_waiting=2)
    async with world.engine() as engine:
        for n in range(2):
            await engine.start(holding, n, queue="mail")
        with pytest.raises(ks.QueueFull, match="max_waiting is 2"):
            await engine.start(holding, 2, queue="mail")


async def test_a_start_may_wait_for_room(world, holding):
    ks.Queue("mail", concurrency=0, max_waiting=1, when_full="wait")
    async with world.engine() as engine:
        first = await engine.start(holding, 1, queue="mail")
        second = asyncio.ensure_future(engine.start(holding, 2, queue="mail"))
        await asyncio.sleep(0.05)
        assert not second.done()
        await engine.queues.set("mail", concurrency=5)
        assert await first.result(60) == 1
        assert await (await second).result(60) == 2


async def test_a_cancelled_run_that_has_not_begun_ends_at_once(world, holding):
    ks.Queue("mail", concurrency=0)
    async with world.engine() as engine:
        handle = await engine.start(holding, 1, queue="mail")
        await handle.cancel("no longer needed")
        assert await handle.status() == ks.Status.CANCELLED


async def test_a_change_by_a_person_holds_until_it_is_reset(world, holding):
    ks.Queue("mail", concurrency=0)
    async with world.engine(actor="ann") as engine:
        handle = await engine.start(holding, 1, queue="mail")
        info = await engine.queues.set("mail", concurrency=3, reason="a rush")
        assert (info.limits.concurrency, info.is_set, info.log[-1].actor, info.log[-1].reason) == (
            3,
            True,
            "ann",
            "a rush",
        )
        assert await handle.result(60) == 1
        info = await engine.queues.reset("mail", reason="over")
        assert (info.limits.concurrency, info.is_set) == (0, False)
        assert [one.name for one in await engine.queues.list()] == ["mail"]


async def test_the_last_process_to_declare_a_queue_wins_and_says_so(world, caplog):
    ks.Queue("mail", concurrency=1)
    async with world.engine():
        pass
    ks.Queue("mail", concurrency=2)
    with caplog.at_level(logging.WARNING, "keepstep"):
        async with world.engine() as engine:
            assert (await engine.queues.get("mail")).limits.concurrency == 2
    assert "concurrency 2; before: concurrency 1" in caplog.text


async def test_a_queue_is_declared_once(world):
    ks.Queue("mail", concurrency=1)
    async with world.engine() as engine:
        ks.Queue("mail", concurrency=2)
        assert (await engine.queues.get("mail")).limits.concurrency == 1


async def test_runs_begin_at_the_rate_of_their_queue(world, holding):
    ks.Queue("mail", rate=ks.Rate(1, per=3600.0, burst=2))
    async with world.engine() as engine:
        handles = [await engine.start(holding, n, queue="mail") for n in range(3)]
        assert await handles[0].result(60) == 0
        assert await handles[1].result(60) == 1
        assert await handles[2].status() == ks.Status.QUEUED


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"concurrency": -1}, "concurrency must be"),
        ({"per_key": True}, "per_key must be"),
        ({"rate": 5}, "rate must be a ks.Rate"),
        ({"when_full": "drop"}, "when_full must be"),
    ],
)
def test_an_impossible_limit_is_refused(options, problem):
    with pytest.raises(ks.DefinitionError, match=problem):
        ks.Queue("mail", **options)


@pytest.mark.parametrize("values", [(0,), (1, 0), (1, 1, 0), ("many",)])
def test_an_impossible_rate_is_refused(values):
    with pytest.raises(ks.DefinitionError, match=r"ks\.Rate"):
        ks.Rate(*values)


@pytest.mark.live_only
@pytest.mark.one_store
async def test_queue_is_declared_once_the_store_answers_again(world):
    @ks.workflow(name="late")
    async def late():
        return "done"

    async with world.engine() as engine:
        change = engine.store.change_gate

        def away(*_):
            raise ks.StoreUnavailable("the store is away")

        engine.store.change_gate = away
        mail = ks.Queue("mail", concurrency=2)
        with pytest.raises(ks.StoreUnavailable):
            await engine.start(late, queue=mail)
        engine.store.change_gate = change
        assert await (await engine.start(late, queue=mail)).result(30) == "done"
        assert (await engine.queues.get("mail")).declared == mail.limits


async def test_a_place_that_falls_free_is_taken_at_once(world, gauge, holding, monkeypatch):
    monkeypatch.setattr("keepstep.engine.worker.CLAIM_SECONDS", 3600.0)
    mail = ks.Queue("mail", concurrency=1)
    async with world.engine() as engine:
        handles = [await engine.start(holding, n, queue=mail) for n in range(4)]
        assert [await handle.result(60) for handle in handles] == list(range(4))
    assert gauge.most == 1


async def test_a_start_after_a_change_is_held_to_the_new_limits(world, holding):
    async with world.engine() as engine:
        await engine.start(holding, 0, queue="mail")
        await engine.queues.set("mail", concurrency=0)
        run = await (await engine.start(holding, 1, queue="mail")).run()
        assert (run.status, run.worker) == (ks.Status.QUEUED, None)


async def test_a_paused_run_gives_its_place_to_others(world, gauge, holding):
    mail = ks.Queue("mail", concurrency=1)

    @ks.workflow
    async def stuck():
        await ks.wait_for("never")

    async with world.engine() as engine:
        first = await engine.start(stuck, queue=mail)
        await until(lambda: _is(first, ks.Status.RUNNING))
        await first.pause()
        assert await (await engine.start(holding, 1, queue=mail)).result(60) == 1
        await first.cancel()


@pytest.mark.one_store
async def test_claims_go_on_after_the_store_was_away(world, gauge, holding):
    mail, failures = ks.Queue("mail", concurrency=1), iter(range(3))
    async with world.engine() as engine:
        claim = engine.store.claim_runs

        def away(request):
            if next(failures, None) is not None:
                raise ks.StoreUnavailable("the store is away")
            return claim(request)

        engine.store.claim_runs = away
        handles = [await engine.start(holding, n, queue=mail) for n in range(3)]
        assert [await handle.result(60) for handle in handles] == [0, 1, 2]
    assert next(failures, None) is None
    assert gauge.most == 1


async def test_runs_that_are_cancelled_while_they_are_claimed_all_end(world, gauge, holding):
    """Some have begun when the cancel comes, some are being claimed, and some have not begun."""
    mail = ks.Queue("mail", concurrency=2, per_key=1)
    async with world.engine() as engine:
        handles = [await engine.start(holding, n, queue=mail, key=f"k{n % 3}") for n in range(9)]

        async def cancelled(handle):
            try:
                await handle.cancel()
            except ks.AlreadyFinished:
                return False
            return True

        accepted = await asyncio.gather(*map(cancelled, handles))
        for handle, was_cancelled in zip(handles, accepted, strict=True):
            await until(lambda handle=handle: _has_ended(handle))
            assert await handle.status() == (ks.Status.CANCELLED if was_cancelled else ks.Status.COMPLETED)
        assert await (await engine.start(holding, "last", queue=mail, key="k0")).result(60) == "last"
    assert gauge.most <= 2


async def _has_ended(handle):
    return (await handle.status()).finished
