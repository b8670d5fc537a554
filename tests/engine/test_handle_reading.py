"""What a handle reads of a run: replies that come with its end, and published values beyond one page."""

from __future__ import annotations

import asyncio
import os

import pytest

import keepstep as ks
from keepstep.errors import CheckpointCorrupt, StoreError, StoreUnavailable
from keepstep.stores.memory import MemoryStore

pytestmark = pytest.mark.live_only


async def test_a_reply_that_comes_with_the_end_of_the_run_is_not_missed(world):
    @ks.workflow
    async def last_words():
        question = await ks.wait_for("question")
        question.reply("forty-two")

    async with world.engine() as engine:
        run = await engine.start(last_words)
        read = engine.read

        async def slow(function, *args):
            found = await read(function, *args)
            if function == engine.store.list_checkpoints and len(args) == 4 and not found:
                await run.result()  # between two looks the run replies and ends
            return found

        engine.read = slow
        assert await run.ask("question") == "forty-two"


async def test_published_values_beyond_one_page_are_read(world):
    large = os.urandom(1_500_000).hex()

    @ks.workflow
    async def shows():
        for number in range(4):
            ks.publish("bulk", large + str(number))
        ks.publish("last", 1)

    async with world.engine() as engine:
        run = await engine.start(shows)
        await run.result()
        shown = await run.published()
        assert (shown["bulk"][-1], shown["last"]) == ("3", 1)


async def test_what_a_reader_has_no_type_for_is_read_as_it_is_stored(world):
    @ks.workflow
    async def shows():
        ks.publish("pair", (1, 2))
        question = await ks.wait_for("question")
        question.reply((3, 4))

    async with world.engine() as engine:
        run = await engine.start(shows)
        assert await run.ask_raw("question") == b'{"$":"tuple","v":[3,4]}'
        assert await run.published_raw() == {"pair": b'{"$":"tuple","v":[1,2]}'}


async def test_closed_engine_ends_a_wait_for_a_result_with_an_error():
    """On a store that is read beside the loop, the threads that read are gone when the engine is closed."""

    @ks.workflow
    async def waiting():
        return await ks.wait_for("go")

    store = MemoryStore()
    store.quick = False
    engine = ks.Engine(store, worker=False, workflows=[waiting])
    await engine.open()
    handle = await engine.start(waiting, run_id="r")
    result = asyncio.ensure_future(handle.result())
    await asyncio.sleep(0)
    await engine.close()
    for asked in (result, handle.status()):
        with pytest.raises(ks.DefinitionError, match="the engine is closed"):
            await asked


# -- a store that does not answer --------------------------------------------------------------------------------------


class Away(MemoryStore):
    """A store that cannot be asked for a run, and says why."""

    error = None

    def get_run(self, run_id):
        if self.error is not None:
            raise self.error
        return super().get_run(run_id)


def _answered():
    @ks.workflow
    async def answered():
        return await ks.wait_for("answer")

    return answered


async def test_wait_for_a_result_outlasts_a_store_that_does_not_answer(caplog):
    store = Away()
    async with ks.open(store) as engine, ks.open(store, worker=False) as other:
        run = await engine.start(_answered())
        waiting = asyncio.ensure_future((await other.get(run.id)).result(timeout=60))
        await asyncio.sleep(0)
        store.error = StoreUnavailable("no server at all")
        await run.signal("answer", 42)
        for _ in range(20):
            other.notify_waiters()
            await asyncio.sleep(0.01)
        assert not waiting.done()
        store.error = None
        assert await waiting == 42
    assert [record.levelname for record in caplog.records if "no server at all" in record.getMessage()] == ["WARNING"]


async def test_a_timeout_is_kept_while_the_store_does_not_answer():
    store = Away()
    async with ks.open(store) as engine, ks.open(store, worker=False) as other:
        run = await other.get((await engine.start(_answered())).id)
        store.error = StoreUnavailable("no server at all")
        with pytest.raises(ks.TimedOut, match=r"within 0\.2 s"):
            await run.result(timeout=0.2)


@pytest.mark.parametrize("error", [StoreError("the store is closed"), CheckpointCorrupt("broken")])
async def test_a_store_that_is_closed_or_damaged_is_not_waited_for(error):
    store = Away()
    async with ks.open(store) as engine, ks.open(store, worker=False) as other:
        run = await other.get((await engine.start(_answered())).id)
        store.error = error
        with pytest.raises(type(error), match=str(error)):
            await run.result(timeout=60)


async def test_closed_engine_ends_a_wait_without_a_store():
    store = Away()
    async with ks.open(store) as engine:
        run = await engine.start(_answered())
        async with ks.open(store, worker=False) as other:
            waiting = asyncio.ensure_future((await other.get(run.id)).result())
            store.error = StoreUnavailable("no server at all")
            await asyncio.sleep(0.05)
        store.error = None
        with pytest.raises(ks.DefinitionError, match="closed"):
            await waiting
