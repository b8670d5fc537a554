"""What a handle reads of a run: replies that come with its end, and published values beyond one page."""

from __future__ import annotations

import asyncio
import os

import pytest

import keepstep as ks
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


async def test_a_wait_for_a_result_outlives_its_engine_with_an_error_of_asyncios():
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
