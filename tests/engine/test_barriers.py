"""Barriers: all parties go on together, or all are told why not (F4, L38)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.model import RunQuery
from tests.engine.world import until, until_recorded, until_status

pytestmark = pytest.mark.on_postgres


@ks.workflow(name="party")
async def party(rounds, parties, group=None, seconds=60.0):
    return [await ks.barrier("start", parties=parties, group=group, timeout=seconds) for _ in range(rounds)]


@ks.workflow(name="plain party")
def plain_party(parties, group):
    return ks.barrier("start", parties=parties, group=group, timeout=60).result()


@ks.workflow(name="siblings at a barrier")
async def siblings(count, rounds):
    children = [await ks.start(party, rounds, count) for _ in range(count)]
    met = [await child for child in children]
    return [child.id for child in children], met


async def test_siblings_meet_in_every_generation(world):
    async with world.engine() as engine:
        ids, met = await (await engine.start(siblings, 3, 3)).result(60)
        assert met == [[sorted(ids)] * 3] * 3


async def test_families_do_not_meet(world):
    async with world.engine() as engine:
        families = [await engine.start(siblings, 2, 1) for _ in range(2)]
        for family in families:
            ids, met = await family.result(60)
            assert met == [[sorted(ids)]] * 2


async def test_group_joins_runs_without_a_parent(world):
    async with world.engine() as engine:
        one = await engine.start(party, 1, 2, "g")
        other = await engine.start(plain_party, 2, "g")
        assert await one.result(60) == [sorted([one.id, other.id])]
        assert await other.result(60) == sorted([one.id, other.id])


async def test_timeout_wakes_all_and_late_ones_get_it_too(world):
    async with world.engine() as engine:
        early = [await engine.start(party, 1, 3, "g", 0.2) for _ in range(2)]
        for run in early:
            with pytest.raises(ks.RunFailed, match="2 of 3 parties came in time"):
                await run.result(60)
        late = await engine.start(party, 1, 3, "g", 0.2)
        with pytest.raises(ks.RunFailed, match="2 of 3 parties came in time"):
            await late.result(60)


async def test_cancelled_party_wakes_the_others(world):
    async with world.engine(linger_seconds=0.01) as engine:
        waits, leaves = [await engine.start(party, 1, 3, "g", None) for _ in range(2)]
        await until_status(waits, "waiting")
        await until_status(leaves, "waiting")
        await leaves.cancel("enough")
        with pytest.raises(ks.RunFailed, match=f"run {leaves.id} has left; 2 of 3"):
            await waits.result(60)
        assert (await leaves.run()).status in {"running", "waiting", "recovering", "cancelled"}


async def test_wait_that_is_given_up_breaks_the_barrier(world):
    @ks.workflow(name="impatient party")
    async def impatient():
        try:
            async with ks.timeout(0.05):
                await ks.barrier("start", parties=2, group="g", timeout=None)
        except ks.TimedOut:
            return "gone"

    async with world.engine() as engine:
        assert await (await engine.start(impatient)).result(60) == "gone"
        with pytest.raises(ks.RunFailed, match="has left"):
            await (await engine.start(party, 1, 2, "g", None)).result(60)


async def test_party_that_is_retried_gets_the_same_outcome(world):
    async with world.engine() as engine:
        run = await engine.start(party, 1, 2, "g", 0.05)
        for _ in range(2):
            with pytest.raises(ks.RunFailed, match="1 of 2 parties came in time"):
                await run.result(60)
            await run.retry()
        with pytest.raises(ks.RunFailed, match="1 of 2 parties"):
            await run.result(60)


async def test_fork_is_the_party_of_its_origin(world):
    async with world.engine() as engine:
        one = await engine.start(party, 1, 2, "g", None)
        await until_recorded(one, "barrier:g:start#1")
        fork = await engine.fork(one.id)
        await until(lambda: _receives(engine, 2))
        other = await engine.start(party, 1, 2, "g", None)
        met = [sorted([one.id, other.id])]
        for run in (one, fork, other):
            assert await run.result(60) == met


async def _receives(engine, count):
    page = await engine.list(RunQuery(id_prefix="ks:barrier:", system=True))
    return bool(page.runs) and page.runs[0].signals >= count


async def test_successor_counts_on(world):
    @ks.workflow(name="party in a series")
    async def series(rounds):
        await ks.barrier("start", parties=2, group="g", timeout=60)
        if rounds > 1:
            ks.continue_as(rounds - 1)
        return "done"

    async with world.engine() as engine:
        one, other = await engine.start(series, 3), await engine.start(party, 3, 2, "g")
        assert await one.result(60) == "done"
        assert await other.result(60) == [sorted([one.id, other.id])] * 3


async def test_parties_must_agree(world):
    async with world.engine() as engine:
        first = await engine.start(party, 1, 2, "g", None)
        await until(lambda: _receives(engine, 1))
        with pytest.raises(ks.RunFailed, match="has 2 parties, and this run names 3"):
            await (await engine.start(party, 1, 3, "g", None)).result(60)
        await engine.start(party, 1, 2, "g", None)
        await first.result(60)


async def test_cancelled_barrier_wakes_its_parties(world):
    async with world.engine() as engine:
        run = await engine.start(party, 1, 2, "g", None)
        await until(lambda: _receives(engine, 1))
        (keeper,) = (await engine.list(RunQuery(id_prefix="ks:barrier:", system=True))).runs
        await (await engine.get(keeper.id)).cancel("not needed")
        with pytest.raises(ks.RunFailed, match="broken, because it was cancelled"):
            await run.result(60)


async def test_barrier_survives_a_crash(world):
    engine = await world.started()
    first = await engine.start(party, 1, 2, "g", None)
    await until(lambda: _receives(engine, 1))
    engine = await world.crash_and_recover(engine)
    second = await engine.start(party, 1, 2, "g", None)
    assert await (await engine.get(first.id)).result(60) == [sorted([first.id, second.id])]
    await engine.close()


@pytest.mark.parametrize(
    "options, words",
    [({"parties": 2}, "give the barrier a group="), ({"parties": 0}, "parties"), ({"parties": 1001}, "at most 1,000")],
)
def test_impossible_barrier_is_refused(options, words):
    @ks.workflow(name="impossible barrier")
    async def impossible():
        await ks.barrier("start", **{"group": None if "group" in words else "g", **options})

    with pytest.raises(ks.RunFailed, match=words):
        ks.run(impossible, url="memory:")


async def test_many_parties_meet_once(world):
    async with world.engine() as engine:
        runs = [await engine.start(party, 2, 40, "g") for _ in range(40)]
        ids = sorted(run.id for run in runs)
        assert await asyncio.gather(*(run.result(60) for run in runs)) == [[ids, ids]] * 40
