"""Results of steps that serve equal calls of other runs."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import keepstep as ks
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere


async def test_equal_call_of_another_run_is_served_from_the_cache(world, effects):
    @ks.step(cache=ks.Cache(ttl=3600))
    async def ask(question, *, model="a"):
        effects.append(question)
        return {"answer": (question, model)}

    @ks.workflow
    async def asking(*questions):
        return [await ask(one) for one in questions]

    async with world.engine() as engine:
        first = await engine.start(asking, "x", "y", "x", run_id="first")
        assert await first.result() == [{"answer": (one, "a")} for one in ("x", "y", "x")]
        second = await engine.start(asking, "y", "z", run_id="second")
        assert await second.result() == [{"answer": (one, "a")} for one in ("y", "z")]
        assert effects == ["x", "y", "z"]
        cached = {one.step: one.data.get("cached") for one in await second.checkpoints() if one.step}
        assert cached == {"ask#1": "first", "ask#2": None}
        told = [one.data.get("cached") for one in await first.checkpoints() if one.step]
        assert told == [None, None, "first"]


async def test_key_says_which_calls_are_equal(world, effects):
    @ks.step(cache=ks.Cache(key=lambda question, temperature: question.lower()))
    async def ask(question, temperature):
        effects.append(question)
        return question

    @ks.workflow
    async def asking():
        return [await ask("Tea", 0.1), await ask("TEA", 0.9), await ask("rice", 0.1)]

    async with world.engine() as engine:
        assert await (await engine.start(asking)).result() == ["Tea", "Tea", "rice"]
    assert effects == ["Tea", "rice"]


async def test_failures_are_not_cached(world, effects):
    @ks.step(cache=ks.Cache(), retry=ks.Retry(attempts=2, backoff="immediate"))
    async def ask(question):
        effects.append(question)
        if len(effects) < 4:
            raise ValueError("not yet")
        return question

    @ks.workflow
    async def asking():
        return await ask("x")

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed):
            await (await engine.start(asking)).result()
        assert await (await engine.start(asking)).result() == "x"
        assert await (await engine.start(asking)).result() == "x"
    assert len(effects) == 4


async def test_result_is_gone_after_its_time_and_with_its_run(tmp_path, effects):
    @ks.step(cache=ks.Cache(ttl=timedelta(milliseconds=50)))
    async def short():
        effects.append("short")

    @ks.step(cache=ks.Cache())
    async def owned():
        effects.append("owned")

    @ks.workflow
    async def asking():
        await short()
        await owned()

    async with ks.open(tmp_path / "runs.db") as engine:
        await (await engine.start(asking, run_id="first")).result()
        await asyncio.sleep(0.06)
        await (await engine.start(asking, run_id="second")).result()
        assert effects == ["short", "owned", "short"]
        await engine.care.erase("first")
        await asyncio.sleep(0.06)
        await (await engine.start(asking)).result()
        assert effects == ["short", "owned", "short", "short", "owned"]


async def test_first_of_concurrent_results_is_kept(world, effects):
    @ks.step(cache=ks.Cache())
    async def ask():
        effects.append("x")
        await asyncio.sleep(0.01)
        return len(effects)

    @ks.workflow
    async def asking():
        return await ask()

    async with world.engine() as engine:
        runs = [await engine.start(asking) for _ in range(3)]
        for run in runs:
            await run.result()
        kept = await (await engine.start(asking)).result()
        assert kept == await (await engine.start(asking)).result()


async def test_cached_result_of_another_type_is_computed_again(world, effects, logged):
    def make(kind):
        @ks.step(name="ask", cache=ks.Cache())
        async def ask() -> kind:
            effects.append(kind.__name__)
            return kind()

        @ks.workflow(name=f"asking {kind.__name__}")
        async def asking() -> None:
            await ask()

        return asking

    async with world.engine() as engine:
        await (await engine.start(make(dict))).result()
        collection = await engine.documents.list("cache")
        await engine.documents.put("cache", collection[0].key, b"not a kept result")
        asking = make(list)
        for _ in range(2):  # the result that is of use replaces the other one, and serves the second run
            await (await engine.start(asking)).result()
    assert effects == ["dict", "list"]


async def test_failing_key_function_calls_the_body(world, effects):
    @ks.step(cache=ks.Cache(key=lambda: 1 / 0))
    async def ask():
        effects.append("x")
        return 1

    @ks.workflow
    async def asking():
        return await ask()

    async with world.engine() as engine:
        assert await (await engine.start(asking)).result() == 1
    assert effects == ["x"]


async def test_encrypted_store_encrypts_what_is_cached(tmp_path, effects):
    @ks.step(cache=ks.Cache())
    async def ask():
        effects.append("x")
        return "a very private answer"

    @ks.workflow
    async def asking():
        return await ask()

    async with ks.open(tmp_path / "runs.db", keys=ks.Keys("k", {"k": bytes(32)})) as engine:
        for _ in range(2):
            assert await (await engine.start(asking)).result() == "a very private answer"
    assert effects == ["x"]
    assert b"a very private answer" not in b"".join(one.read_bytes() for one in tmp_path.iterdir() if one.is_file())


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: ks.Cache(ttl=0), "ttl="),
        (lambda: ks.Cache(key=5), "key="),
        (lambda: ks.step(cache=5)(lambda: 1), "cache= takes a ks.Cache"),
        (lambda: ks.step(cache=ks.Cache(), at_most_once=True)(len), "at_most_once="),
        (lambda: ks.step(cache=ks.Cache(), undo=lambda result: None)(_nothing), "undo="),
        (lambda: ks.Graph("g").step(ks.step(cache=ks.Cache())(_nothing)), "the whole state"),
    ],
)
def test_wrong_use_is_refused(make, match):
    with pytest.raises(ks.DefinitionError, match=match):
        make()


async def _nothing():
    pass


@pytest.mark.crash
async def test_result_that_was_kept_before_a_crash_serves_the_recovered_run(effects):
    @ks.step(name="costly", cache=ks.Cache())
    async def costly(number):
        effects.append(number)
        return number

    @ks.workflow(name="spending")
    async def spending():
        return [await costly(number) for number in range(3)]

    async def play(engine):
        return await (await engine.start(spending, run_id="r")).result()

    async def judge(disk, lives):
        assert lives.result == [0, 1, 2]
        assert all(effects.count(number) <= 2 for number in range(3)), str(lives.point)
        effects.clear()

    await crash_everywhere(MemoryDisk, play, judge)
