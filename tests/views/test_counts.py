"""Counts of runs by filter: capped, shared by concurrent callers, and used again for a moment."""

import asyncio

import pytest

import keepstep as ks
from keepstep.errors import StoreUnavailable
from keepstep.model import RunQuery, Status
from keepstep.ports import Create
from keepstep.stores.memory import MemoryStore
from keepstep.testing import in_virtual_time, world
from keepstep.testing.store_contract import queued
from keepstep.views.counts import FRESH_SECONDS, Count, count, counts, counts_by_status


class Counting(MemoryStore):
    """A store that counts lists, and fails while it is told to."""

    def __init__(self):
        super().__init__()
        self.asked = 0
        self.fails = False

    def list_runs(self, query):
        self.asked += bool(query.count_to)
        if self.fails:
            raise StoreUnavailable("away")
        return super().list_runs(query)


@pytest.fixture
def store():
    store = Counting()
    store.commit([Create(queued(f"r{n}", workflow="odd" if n % 2 else "even")) for n in range(7)])
    yield store
    store.close()


@in_virtual_time
async def test_counts_are_exact_up_to_their_cap(store):
    async with world(store) as engine:
        queries = [RunQuery(), RunQuery(workflow="odd"), RunQuery(workflow="none")]
        assert await counts(engine, queries) == (Count(7), Count(3), Count(0))
        assert await counts(engine, queries, most=3) == (Count(3, more=True), Count(3), Count(0))
        assert [str(one) for one in (Count(1000, more=True), Count(12))] == ["1,000+", "12"]


@in_virtual_time
async def test_a_page_of_the_same_filter_has_the_same_count(store):
    async with world(store) as engine:
        assert await count(engine, RunQuery(limit=2)) == await count(engine, RunQuery(limit=5, after="3")) == Count(7)
        assert store.asked == 1


@in_virtual_time
async def test_concurrent_callers_share_one_computation(store):
    async with world(store) as engine:
        query = RunQuery(workflow="even", tags={})
        found = await asyncio.gather(*(count(engine, query) for _ in range(20)))
        assert (set(found), store.asked) == ({Count(4)}, 1)


@in_virtual_time
async def test_a_count_is_used_again_for_a_moment_only(store):
    async with world(store) as engine:
        assert await count(engine, RunQuery()) == Count(7)
        store.commit([Create(queued("new"))])
        assert await count(engine, RunQuery()) == Count(7)
        await asyncio.sleep(FRESH_SECONDS)
        assert await count(engine, RunQuery()) == Count(8)


@in_virtual_time
async def test_a_caller_that_gives_up_stops_no_other(store):
    async with world(store) as engine:
        first = asyncio.create_task(count(engine, RunQuery()))
        second = asyncio.create_task(count(engine, RunQuery()))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == Count(7)


@in_virtual_time
async def test_a_failed_count_is_not_kept(store):
    async with world(store) as engine:
        store.fails = True
        with pytest.raises(StoreUnavailable):
            await count(engine, RunQuery())
        store.fails = False
        assert await count(engine, RunQuery()) == Count(7)


@in_virtual_time
async def test_engines_do_not_share_counts(store):
    other = MemoryStore()
    async with world(store) as engine, ks.Engine(other) as second:
        assert (await count(engine, RunQuery()), await count(second, RunQuery())) == (Count(7), Count(0))


@in_virtual_time
async def test_a_filter_is_counted_by_status(store):
    async with world(store) as engine:
        found = await counts_by_status(engine, RunQuery(workflow="odd", status=frozenset({Status.FAILED})))
        assert found == {status: Count(3 if status is Status.QUEUED else 0) for status in Status}
