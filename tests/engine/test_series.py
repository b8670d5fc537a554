"""A series of runs, and children: ids are nobody else's, one id reaches the newest run, and a purge breaks nothing."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keepstep as ks
from keepstep.checks import check_id
from keepstep.history.series import newest_run, next_run
from keepstep.kernel.children import is_word_of
from keepstep.model import Kind, Run, Status
from keepstep.model.ids import MAX_ID, child_id, is_child_id, is_id
from keepstep.model.series import SERIES, first_of, number_of, successor_id
from keepstep.records.record import born
from keepstep.stores.memory import MemoryStore
from keepstep.testing.store_contract.ground import Holder, queued, record
from tests.engine.world import until, until_status

pytestmark = pytest.mark.on_postgres

IDS = st.text(min_size=1, max_size=MAX_ID).filter(is_id)


@ks.workflow(name="series loop")
async def loop(left):
    if left:
        ks.continue_as(left - 1)
    return ks.run_id()


@ks.workflow(name="series listening")
async def listening(left):
    if left:
        ks.continue_as(left - 1)
    return await ks.wait_for("word")


def a_run(run_id, **facts):
    return Run(run_id, "w", Status.QUEUED, datetime(2026, 1, 1, tzinfo=UTC), **facts)


# -- ids ---------------------------------------------------------------------------------------------------------------


@given(IDS, st.text(min_size=1, max_size=MAX_ID), st.integers(0, 3))
def test_ids_of_children_are_ids_however_long_their_parts_are(parent, key, generation):
    key = key.encode("utf-8", "ignore").decode()
    child = child_id(parent, f"{key.replace('/', '')}#1", generation)
    if key.isprintable() and not key.isspace() and "\\" not in key:
        check_id(child)
    assert len(child.encode()) <= MAX_ID


def test_an_id_of_a_child_holds_at_least_128_bits_of_its_call():
    one, other = child_id("p" * MAX_ID, "step#1", 0), child_id("p" * MAX_ID, "step#2", 0)
    assert one != other
    assert len(one.rpartition("-")[2]) * 5 >= 128


def test_ids_of_children_that_earlier_versions_made_are_recognised():
    assert is_child_id("p.step-4cda6a8638", "p", "step#1", 0)
    assert not is_child_id("p.step-4cda6a8638", "p", "step#2", 0)
    assert is_child_id(child_id("p", "a/step#1", 2), "p", "a/step#1", 2)


@given(IDS, st.integers(1, 5))
def test_ids_of_a_series_are_its_own(first, length):
    run = a_run(first, seed="s")
    for number in range(2, length + 2):
        taken = successor_id(run, taken=True)
        run = a_run(successor_id(run), seed="s", tags={SERIES: first})
        assert check_id(run.id) != check_id(taken)
        assert (first_of(run), number_of(run)) == (first, number)
        assert number_of(a_run(taken, tags={SERIES: first})) == number


def test_an_id_that_looks_like_a_successors_is_a_first_one():
    run = a_run("daily~1", created_by="somebody")
    assert (first_of(run), number_of(run), successor_id(run)) == ("daily~1", 1, "daily~1~2")


def test_a_successor_of_an_earlier_version_is_known_by_its_creator():
    run = a_run("daily~3", created_by="run daily~2")
    assert (first_of(run), number_of(run), successor_id(run)) == ("daily", 3, "daily~4")


def test_result_of_a_child_is_recognised_in_old_and_new_form():
    old, new = {"status": "completed", "child": "c~3"}, {"status": "completed", "child": "c", "run": "c~3"}
    other = {"status": "completed", "child": "c~1", "run": "c~1~2"}
    assert [is_word_of(msgspec.json.encode(word), "c") for word in (old, new, other)] == [True, True, False]


async def test_long_ids_are_continued_each_by_its_own_run(world):
    async with world.engine() as engine:
        runs = [await engine.start(loop, 2, run_id=f"{'x' * (MAX_ID - 2)}-{end}") for end in "ab"]
        results = [await run.result(30) for run in runs]
        assert [(await run.latest()).id for run in runs] == results
        assert len(set(results)) == 2


async def test_children_of_children_continue_each_as_its_own_run(world):
    @ks.workflow
    async def nested(depth):
        if depth:
            return await (await ks.start(nested, depth - 1))
        children = [await ks.start(loop, 1), await ks.start(loop, 1)]
        return [await child for child in children]

    async with world.engine() as engine:
        one, other = await (await engine.start(nested, 7, run_id="t" * 60)).result(60)
        assert one != other


async def test_a_run_of_someone_else_is_not_taken_for_the_successor(world):
    async with world.engine() as engine:
        own = [await engine.start(loop, 0, run_id=name) for name in ("daily~2", "follow~2")]
        assert await (await engine.start(loop, 1, run_id="daily~1")).result(30) == "daily~1~2"
        run = await engine.start(loop, 2, run_id="follow")
        assert await run.result(30) == "follow~3"
        second = (await run.run()).continued_as
        assert second.startswith("follow~2-")
        assert [await one.result(30) for one in own] == ["daily~2", "follow~2"]


async def test_a_start_is_not_answered_with_a_run_of_a_series(world):
    @ks.workflow
    async def twice():
        if ks.run_id() == "r":
            ks.continue_as()
        return ks.run_id()

    async with world.engine() as engine:
        assert await (await engine.start(twice, run_id="r")).result(30) == "r~2"
        with pytest.raises(ks.RunConflict, match="continues the series of run 'r'"):
            await engine.start(twice, run_id="r~2")
        assert await (await engine.start(twice, run_id="r")).result(30) == "r~2"


async def test_an_id_that_another_call_gave_its_child_fails_the_start(world):
    @ks.workflow
    async def parent():
        first = await ks.start(loop, 0, run_id="kid")
        try:
            await ks.start(loop, 0, run_id="kid")
        except ks.StepFailed as error:
            return [await first, str(error)]

    async with world.engine() as engine:
        result, problem = await (await engine.start(parent, run_id="p")).result(30)
        assert result == "kid"
        assert "'kid' is taken by a run that 'series loop#2' of run 'p' did not start" in problem


# -- one id reaches the newest -----------------------------------------------------------------------------------------


async def test_signals_and_cancels_reach_a_child_that_has_continued(world):
    @ks.workflow
    async def parent(act):
        child = await ks.start(listening, 2)
        await ks.wait_for("go")
        await (child.signal("word", "hello") if act == "signal" else child.cancel())
        try:
            return await child
        except ks.StepFailed as error:
            return error.error.type if error.error else "cancelled"

    async with world.engine() as engine:
        for act, result in (("signal", "hello"), ("cancel", "cancelled")):
            run = await engine.start(parent, act, run_id=act)

            async def continued(run=run):
                children = (await engine.list(parent=run.id)).runs
                return len(children) == 3 and children[0].status in (Status.RUNNING, Status.WAITING)

            await until(continued)
            await run.signal("go")
            assert await run.result(30) == result


async def test_the_first_id_retries_the_newest_run_that_failed(world):
    broken = [True]

    @ks.step
    async def count(left):
        if broken and not left:
            raise ks.Permanent("broken")
        return left

    @ks.workflow
    async def counting(left):
        if await count(left):
            ks.continue_as(left - 1)
        return ks.run_id()

    async with world.engine() as engine:
        run = await engine.start(counting, 2, run_id="c")
        for retry in (run.retry, lambda: engine.retry("c")):
            with pytest.raises(ks.RunFailed, match="run 'c~3' failed"):
                await run.result(30)
            await retry()
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        broken.clear()
        await run.retry("mended")
        assert await run.result(30) == "c~3"
        with pytest.raises(ks.AlreadyFinished, match="run 'c~3' is completed"):
            await run.retry()


async def test_the_first_id_cancels_the_newest_run_that_is_set_aside(world):
    changed = []

    @ks.step
    async def note(text):
        return text

    @ks.workflow
    async def changing(left):
        if left:
            ks.continue_as(left - 1)
        await note("new" if changed else "old")
        return await ks.wait_for("word")

    async with world.engine() as engine:
        run = await engine.start(changing, 1, run_id="c")
        await run.reached("waiting")
    changed.append(1)
    async with world.engine() as engine:
        run = await engine.get("c")
        await run.signal("word")
        await run.reached("set aside")
        await run.cancel("no longer needed")
        assert await run.status() == "cancelled"


async def test_a_signal_to_a_run_that_has_ended_still_fails_the_step(world):
    @ks.workflow
    async def parent():
        child = await ks.start(loop, 2)
        await child
        await child.signal("word")

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="AlreadyFinished"):
            await (await engine.start(parent)).result(30)


async def test_a_task_of_a_group_may_continue_the_run(world):
    @ks.workflow
    async def grouped(left):
        async def go_on():
            await ks.sleep(0)
            ks.continue_as(left - 1)

        if left:
            async with asyncio.TaskGroup() as group:
                group.create_task(go_on())
        return left

    async with world.engine() as engine:
        assert await (await engine.start(grouped, 1)).result(30) == 0


async def first_event_of(run, wanted):
    """Watch the series until its last run is reached."""
    async for event in run.watch():
        if event.run == wanted:
            return event
    return None


def long_series(store, length):
    """A series that a signal ends, as its runs would have written it."""
    past = datetime(2026, 1, 1, tzinfo=UTC)
    facts = {"workflow": "series listening", "created_at": past, "due_at": past, "input": b"[[0],{}]"}
    run = queued("r", created_by="someone", **facts)
    for _ in range(length - 1):
        leased = replace(run, status=Status.RUNNING, worker="w1", epoch=1, due_at=None)
        create = born(leased, record(run.id, Kind.RUN_STARTED))
        store.commit([create])
        name = successor_id(run)
        end = record(run.id, Kind.RUN_FINISHED, b"null", data={"continued_as": name})
        Holder(store, create.run).write(end, status=Status.COMPLETED, release=True)
        run = queued(name, created_by=f"run {run.id}", tags={SERIES: "r"}, **facts)
    store.commit([born(run)])
    return run.id


@pytest.mark.live_only
@pytest.mark.one_store
async def test_the_first_id_of_1200_runs_reaches_the_newest(world):
    last = long_series(world.store(), 1200)
    async with world.engine(workflows=[listening]) as engine:
        run = await engine.get("r")
        assert (await run.latest()).id == last == "r~1200"
        assert await first_event_of(run, last)
        assert await run.published() == {}
        await run.signal("word", "end")
        assert await run.result(30) == "end"
        with pytest.raises(ks.AlreadyFinished):
            await run.cancel()


def test_the_newest_of_a_long_series_takes_few_reads():
    store = MemoryStore()
    last = long_series(store, 500)
    read, get_run = [], store.get_run
    store.get_run = lambda name: read.append(name) or get_run(name)
    assert newest_run(store, get_run("r")).id == last
    assert len(read) < 40


def test_the_newest_is_found_while_a_series_goes_on_and_is_purged():
    store = MemoryStore()
    last = long_series(store, 9)
    store.delete_runs(["r~2"])
    list_runs = store.list_runs

    def purged_behind(query):
        """Give each run in turn as the newest, and remove it before it can be read."""
        page = list_runs(replace(query, limit=9))
        oldest = page.runs[-1]
        if oldest.id != last:
            store.delete_runs([oldest.id])
        return replace(page, runs=(oldest,))

    store.list_runs = purged_behind
    assert next_run(store, store.get_run("r")).id == last


def test_search_for_the_newest_ends_if_it_cannot_be_read():
    store = MemoryStore()
    long_series(store, 3)
    first = store.get_run("r")
    store.get_run = lambda name: None
    with pytest.raises(ks.RunNotFound, match="which has been removed"):
        next_run(store, first)


async def test_a_series_that_goes_on_while_it_is_read_is_not_said_to_have_ended():
    store = MemoryStore()
    long_series(store, 3)
    get_run, begun = store.get_run, []

    def just_before(name):
        """The first read of the first run comes a moment before it is continued."""
        run = get_run(name)
        if name == "r" and not begun:
            begun.append(name)
            return replace(run, status=Status.RUNNING, continued_as=None)
        return run

    store.get_run = just_before
    async with ks.open(store, worker=False) as engine:
        run = await engine.get("r")
        begun.clear()
        assert await run.status() is Status.RUNNING
        assert await run.status() is Status.QUEUED


# -- purging -----------------------------------------------------------------------------------------------------------


async def test_a_purge_keeps_the_first_run_of_a_living_series(world):
    async with world.engine() as engine:
        run = await engine.start(listening, 4, run_id="r")
        await until_status(run, Status.WAITING)
        assert (await engine.care.purge()).removed == 3
        assert await run.status() is Status.WAITING
        assert (await (await engine.start(listening, 4, run_id="r")).latest()).id == "r~5"
        assert await run.published() == {}
        await run.signal("word", "still here")
        assert await run.result(30) == "still here"
        assert (await engine.care.retain(ks.Retain(days=0, count=0))).removed == 2
        assert not (await engine.list()).runs


async def test_removed_result_is_reported_as_removed(world):
    async with world.engine() as engine:
        run = await engine.start(loop, 2, run_id="r")
        assert await run.result(30) == "r~3"
        await engine.care.erase("r~2")
        assert await (await engine.get("r")).result(30) == "r~3"
        await engine.care.erase("r~3")
        with pytest.raises(ks.RunNotFound, match="continued as 'r~2', which has been removed"):
            await (await engine.get("r")).result(30)


async def test_purge_keeps_the_first_run_while_the_newest_of_its_series_stays(world):
    async with world.engine() as engine:
        run = await engine.start(listening, 3, run_id="r")
        await until_status(run, Status.WAITING)
        began = (await (await run.latest()).run()).created_at
        await run.signal("word", "the end")
        assert await run.result(30) == "the end"
        await engine.care.purge(before=began)
        assert await (await engine.get("r")).result(30) == "the end"
        assert (await (await engine.start(listening, 3, run_id="r")).latest()).id == "r~4"
        await engine.care.purge()
        assert not (await engine.list()).runs


async def test_runs_of_an_earlier_series_are_not_taken_for_those_of_a_new_one(world):
    async with world.engine() as engine:
        assert await (await engine.start(loop, 3, run_id="r")).result(30) == "r~4"
        await engine.care.erase("r")
        run = await engine.start(listening, 1, run_id="r")
        await until_status(run, Status.WAITING)
        newest = await run.latest()
        assert (await newest.run()).workflow == "series listening"
        await run.signal("word", "new")
        assert await run.result(30) == "new"
