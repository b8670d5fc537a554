"""Large maps: what they hold in memory, iterators drawn item by item, other limits after a recovery, and their line."""

import asyncio
import contextlib
import itertools
from collections import Counter

import pytest

import keepstep as ks
from bench import maps
from keepstep.kernel import replay
from keepstep.kernel.replay import values_of
from keepstep.model.checkpoint import map_of
from keepstep.records.progress import MapProgress, maps_in, progress_text, report_in
from tests.engine.world import steps_of, until, until_at_last_wait
from tests.nightly import case
from tests.postgres import empty_store


@ks.step
async def double(number):
    return number * 2


# -- memory ------------------------------------------------------------------------------------------------------------

#: Megabytes that the items between a small and a large map may take, live and in a replay, for 100,000 items.
LIVE_MB, REPLAYED_MB = 30.0, 90.0


@pytest.mark.parametrize(
    "kind, items, postgres",
    [
        case("async", 20_000, False, id="async", nightly=False),
        case("iterator", 20_000, False, id="iterator", nightly=True),
        case("def", 20_000, False, id="def", nightly=True),
        case("async", 100_000, False, id="large-async", nightly=True),
        case("def", 100_000, False, id="large-def", nightly=True),
        case("async", 100_000, True, id="large-async-postgres", nightly=True),
        case("def", 100_000, True, id="large-def-postgres", nightly=True),
    ],
)
def test_memory_of_a_map_stays_flat_live_and_after_a_kill(tmp_path, kind, items, postgres):
    few, share = 2_000, items / 100_000
    with contextlib.ExitStack() as stores:
        if postgres:
            urls = [stores.enter_context(empty_store(f"_maps{number}")) for number in range(3)]
        else:
            urls = [f"sqlite:///{tmp_path / f'{number}.db'}" for number in range(3)]
        small = maps.ran(urls[0], kind, few)["grown_mb"]
        assert maps.ran(urls[1], kind, items)["grown_mb"] < small + LIVE_MB * share

        file = str(tmp_path / "bodies")
        maps.ran(urls[2], kind, items, items * 9 // 10, file)
        recovered = maps.ran(urls[2], kind, items, file=file)
    assert recovered["grown_mb"] < small + REPLAYED_MB * share + 10  # what is kept of records, whatever their number
    assert recovered["result"] == sum(number % 7 for number in range(items))
    bodies = Counter(int(line) for line in (tmp_path / "bodies").read_text().split())
    assert sorted(bodies) == list(range(items))
    assert bodies.total() - items <= maps.AT_ONCE  # those under way in the kill


@pytest.mark.live_only
async def test_records_far_ahead_of_a_replay_are_read_when_they_are_reached(world, monkeypatch):
    pages = []

    def counted(*args):
        pages.append(values_of(*args))
        return pages[-1]

    monkeypatch.setattr(replay, "KEEP_BYTES", 10 * replay.RECORD_BYTES)
    monkeypatch.setattr("keepstep.kernel.delivery.values_of", counted)

    @ks.workflow
    async def program():
        found = await ks.map(double, range(60), concurrency=5)
        await ks.wait_for("go")
        return found

    engine = await world.started(linger_seconds=60)
    await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    assert len(pages) >= 4
    assert max(map(len, pages)) <= 12
    run = await engine.get("r")
    await run.signal("go")
    assert await run.result(30) == [2 * number for number in range(60)]
    await world.crash(engine)


# -- iterators ---------------------------------------------------------------------------------------------------------


@pytest.mark.live_only
async def test_iterator_is_drawn_as_items_begin(world):
    drawn, ended = [], []

    @ks.step
    async def work(number):
        ended.append(len(drawn))
        return number

    def numbers():
        for number in range(50):
            drawn.append(number)
            yield number

    @ks.workflow
    async def program():
        return await ks.map(work, numbers(), concurrency=3)

    async with world.engine() as engine:
        assert await (await engine.start(program)).result(30) == list(range(50))
    assert ended[0] <= 3
    assert all(seen <= place + 3 for place, seen in enumerate(ended))


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_iterator_of_a_map_gives_the_same_items_on_replay(world, concurrency):
    @ks.workflow
    async def program():
        found = await ks.map(double, (int(ks.random() * 1000) for _ in range(9)), concurrency=concurrency)
        return [found, ks.random()]

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        found, _ = await run.result(30)
        assert len(found) == 9
        assert sorted(found) == sorted(await _values(run))


async def _values(run):
    return [int(one.value) for one in await run.checkpoints() if one.kind == "step completed"]


async def test_quorum_ends_a_map_of_an_endless_iterator(world):
    @ks.workflow
    async def program():
        found = await ks.map(double, itertools.count(), wait=ks.Quorum(5), concurrency=2)
        return [found.ended, [one.outcome for one in found.items].count("value"), len(found) < 20]

    async with world.engine() as engine:
        assert await (await engine.start(program)).result(30) == ["enough", 5, True]


async def test_error_of_an_iterator_ends_its_map(world):
    def numbers():
        yield from range(5)
        raise LookupError("no more pages")

    @ks.workflow
    async def program():
        try:
            await ks.map(double, numbers(), concurrency=2, collect=True)
        except LookupError as error:
            return str(error)

    async with world.engine() as engine:
        assert await (await engine.start(program)).result(30) == "no more pages"


@pytest.mark.parametrize("wait", [None, ks.Tolerate(1), ks.Tolerate(share=0.5)])
async def test_failures_among_the_items_of_an_iterator_count_as_in_a_list(world, wait):
    @ks.step
    async def work(number):
        if number % 4 == 3:
            raise ks.Permanent(f"no {number}")
        return number

    @ks.workflow
    async def program(drawn: bool):
        numbers = iter(range(8)) if drawn else list(range(8))
        try:
            found = await ks.map(work, numbers, wait=wait, concurrency=1)
        except (ks.StepFailed, ks.BatchFailed) as error:
            return str(error)
        return [[*found], found.ended, found.coverage]

    async with world.engine() as engine:
        found = [await (await engine.start(program, drawn)).result(30) for drawn in (False, True)]
    assert found[0] == found[1] or wait == ks.Tolerate(1)  # whose text names the items that were drawn


def test_iterator_outside_a_run_is_drawn_too():
    async def main():
        found = await ks.map(double, itertools.count(), wait=ks.Quorum(3), concurrency=2)
        return [found.ended, await ks.map(double, iter(range(4)), concurrency=3), await ks.map(double, iter(()))]

    assert asyncio.run(main()) == ["enough", [0, 2, 4, 6], []]


# -- another limit after a recovery ------------------------------------------------------------------------------------


@pytest.mark.live_only
@pytest.mark.parametrize("before, after", [(6, 1), (6, 2), (2, 6)])
@pytest.mark.parametrize("form", ["step", "function", "key", "name", "gather", "coroutines"])
async def test_map_is_recovered_with_another_limit(world, form, before, after):
    """A worker of another machine may have another limit; items that had begun begin again at the same outcome."""
    limit = [before]

    @ks.step
    async def work(number, at=None):
        if number in (7, 11):
            await asyncio.sleep(3600 if limit[0] == before else 0)
        return number

    async def one(number):
        value = await work(number, ks.now().isoformat() if before > after else None)
        return await work(value)

    @ks.workflow
    async def program():
        names = {"key": {"key": str}, "name": {"name": "rows"}}.get(form, {})
        if form == "gather":
            return await ks.gather(*map(work, range(20)), concurrency=limit[0])
        if form == "coroutines":
            return await ks.gather(*map(one, range(20)), concurrency=limit[0])
        return await ks.map(one if form == "function" else work, range(20), concurrency=limit[0], **names)

    engine = await world.started()
    run = await engine.start(program, run_id="r")
    await until(lambda: _has_items(run, 8 if before == 2 and form in ("function", "coroutines") else 9))
    limit[0] = after
    engine = await world.crash_and_recover(engine)
    assert await (await engine.get("r")).result(30) == list(range(20))
    steps = await steps_of(await engine.get("r"))
    assert len(steps) == len(set(steps)) == (40 if form in ("function", "coroutines") else 20)
    await world.crash(engine)


async def _has_items(run, number):
    return len(await steps_of(run)) >= number


@pytest.mark.live_only
async def test_replay_waits_for_items_that_end_without_a_record(world):
    """A place that plain code frees is not taken before, although the history shows what took it."""

    @ks.step
    async def pause(number, seconds):
        await asyncio.sleep(seconds)

    @ks.workflow
    async def program():
        ended = []

        async def one(number):
            if number == 0:
                await asyncio.sleep(0.05)
            elif number == 1:
                for _ in range(10):
                    await pause(number, 0.02)
                await ks.wait_for("go")
            else:
                await pause(len(ended), 0.3)
            ended.append(number)

        await ks.map(one, range(3), concurrency=2)
        return ended

    engine = await world.started(linger_seconds=60)
    run = await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    await until(lambda: _has_items(run, 11))
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    run = await engine.get("r")
    await run.signal("go")
    assert await run.result(30) == [0, 2, 1]
    await world.crash(engine)


@pytest.mark.live_only
async def test_missing_call_is_still_a_mismatch_beside_a_map(world):
    changed = []

    @ks.step
    async def other(number):
        return number

    @ks.workflow
    async def program():
        found = await ks.map(double, range(5), concurrency=1)
        await (double if not changed else other)(7)
        await ks.wait_for("go")
        return found

    engine = await world.started()
    await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    changed.append(1)
    engine = await world.crash_and_recover(engine)
    with pytest.raises(ks.RunSetAside, match="was recorded as double#1"):
        await (await engine.get("r")).result(30)
    await world.crash(engine)


# -- its line ----------------------------------------------------------------------------------------------------------


@pytest.mark.one_store
@pytest.mark.live_only
async def test_items_of_a_map_do_not_count_for_the_advice_on_long_runs(world, logged, monkeypatch):
    monkeypatch.setattr("keepstep.kernel.driver.MANY_STEPS", 20)

    @ks.workflow
    async def large():
        await ks.map(double, range(60), concurrency=5)
        for number in range(18):
            await double(number)

    async with world.engine() as engine:
        await (await engine.start(large, run_id="r")).result(30)
    assert not [line for line in logged() if "ks.continue_as" in line]


@pytest.mark.live_only
async def test_run_shows_how_far_its_map_has_come(world):
    go = asyncio.Event()

    @ks.step
    async def fetch(number):
        if number == 3:
            raise ks.Permanent("gone")
        if number == 150:
            await go.wait()
        return number

    @ks.workflow
    async def program(drawn: bool):
        found = await ks.map(fetch, iter(range(200)) if drawn else range(200), concurrency=1, collect=True)
        await ks.wait_for("go")
        return len(found.failures)

    async with world.engine(linger_seconds=60) as engine:
        for drawn in (False, True):
            go.clear()
            run = await engine.start(program, drawn)
            await until(lambda run=run: _shows(engine, run))
            shown = maps_in((await run.run()).progress)
            assert shown == [MapProgress("fetch", "1", 149, 1, None if drawn else 200)]
            assert await run.progress() is None
            go.set()
            await until_at_last_wait(engine, run.id)
            await engine.tell_heartbeat()
            assert maps_in((await run.run()).progress) == []
            await run.signal("go")
            assert await run.result(30) == 1


async def _shows(engine, run):
    await engine.tell_heartbeat()
    return any(one.done == 149 for one in maps_in((await run.run()).progress))


def test_line_of_a_map_tells_counts_and_total():
    assert MapProgress("fetch", "1", 41_200, 3, 100_000).text == "map fetch: 41,200 of 100,000 done, 3 failed"
    assert MapProgress("fetch", "1", 7).text == "map fetch: 7 done"
    text = progress_text({"fraction": 0.5}, {}, [MapProgress("fetch", "1", 7)])
    assert (report_in(text), maps_in(text)) == (b'{"fraction":0.5}', [MapProgress("fetch", "1", 7)])
    assert maps_in(b"not json") == maps_in(None) == []


@pytest.mark.parametrize(
    "key, path",
    [
        ("1.57/fetch#1", "1"),
        ("@rows.57/fetch#2", "@rows"),
        ("1.@k.2/fetch#1", "1"),
        ("2/1.3/4.5/fetch#1", "2/1"),
        ("fetch#1", None),
        ("1/v1.2#1", None),
        ("module.step#3", None),
    ],
)
def test_path_of_a_map_is_read_from_the_key_of_a_call(key, path):
    assert map_of(key) == path
