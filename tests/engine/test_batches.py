"""Batches: tolerated failures, what became of each item, why a batch ended, and maps in a dag."""

import asyncio

import pytest

import keepstep as ks
from keepstep import testing
from keepstep.policies.quorum import Verdict
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere
from tests.engine.world import steps_of, told, until, until_status


@ks.step
async def work(number):
    await asyncio.sleep(0.001 * (number % 3))
    if number % 4 == 3:
        raise ValueError(f"no {number}")
    return number * 10


def as_told(batch):
    """The outcome of each item of a batch, and why the batch ended."""
    return [[one.outcome for one in batch.items], batch.ended]


# -- the policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, total, succeeded, failed, verdict",
    [
        (ks.Tolerate(2), 10, 8, 2, Verdict.DONE),
        (ks.Tolerate(2), 10, 0, 3, Verdict.IMPOSSIBLE),
        (ks.Tolerate(2), 10, 7, 2, Verdict.WAIT),
        (ks.Tolerate(share=0.29), 100, 71, 29, Verdict.DONE),
        (ks.Tolerate(share=0.29), 100, 0, 30, Verdict.IMPOSSIBLE),
        (ks.Tolerate(share=0), 3, 2, 1, Verdict.IMPOSSIBLE),
        (ks.Tolerate(5, share=0.1), 20, 0, 3, Verdict.IMPOSSIBLE),
        (ks.Tolerate(minimum=3), 5, 0, 2, Verdict.WAIT),
        (ks.Tolerate(minimum=3), 5, 0, 3, Verdict.IMPOSSIBLE),
        (ks.Tolerate(minimum=3), 5, 3, 2, Verdict.DONE),
        (ks.Tolerate(minimum=1), 0, 0, 0, Verdict.IMPOSSIBLE),
        (ks.Tolerate(0), 0, 0, 0, Verdict.DONE),
    ],
)
def test_tolerance_is_decided_by_count_share_and_minimum(policy, total, succeeded, failed, verdict):
    assert policy.enough(total, succeeded, failed) is verdict


@pytest.mark.parametrize("wrong", [{"count": -1}, {"share": 1.1}, {"share": "x"}, {"minimum": -1}, {"count": 0.1}])
def test_impossible_tolerance_is_refused(wrong):
    with pytest.raises(ks.DefinitionError):
        ks.Tolerate(**wrong)


def test_tolerance_names_only_its_limits():
    assert str(ks.Tolerate(3)) == "Tolerate(count=3)"
    assert str(ks.Tolerate(share=0.1, minimum=2)) == "Tolerate(share=0.1, minimum=2)"


# -- map and gather ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["map", "gather"])
async def test_tolerated_failures_leave_none_and_are_told(world, kind):
    @ks.workflow
    async def batch():
        if kind == "map":
            found = await ks.map(work, range(8), wait=ks.Tolerate(2))
        else:
            found = await ks.gather(*map(work, range(8)), wait=ks.Tolerate(2))
        return [[*found], *as_told(found), sorted(found.failures), found.coverage]

    async with world.engine() as engine:
        result = await (await engine.start(batch)).result(30)
    outcomes = ["value", "value", "value", "error"] * 2
    assert result == [[0, 10, 20, None, 40, 50, 60, None], outcomes, "complete", [3, 7], 0.75]


@pytest.mark.parametrize("kind", ["map", "gather"])
async def test_too_many_failures_end_the_batch_with_each_items_outcome(world, effects, kind):
    @ks.workflow
    async def batch():
        options = {"wait": ks.Tolerate(1), "concurrency": 1}
        try:
            await (ks.map(work, range(10), **options) if kind == "map" else ks.gather(*map(work, range(10)), **options))
        except ks.BatchFailed as error:
            return [str(error), *as_told(error.batch)]

    async with world.engine() as engine:
        run = await engine.start(batch)
        message, outcomes, ended = await run.result(30)
        assert len(await steps_of(run)) == 6
    assert ended == "too many failures"
    assert outcomes == [*["value"] * 3, "error", *["value"] * 3, "error", *["not begun"] * 2]
    assert message.startswith("2 of 10 items failed, which Tolerate(count=1) does not allow: item 3: step ")


async def test_items_under_way_at_the_end_are_cancelled(world):
    @ks.step
    async def slow(number):
        if number == 1:
            await asyncio.sleep(60)
        return number

    @ks.workflow
    async def batch():
        found = await ks.map(slow, range(4), wait=ks.Quorum(2), concurrency=2)
        return [[*found], *as_told(found)]

    async with world.engine() as engine:
        result = await (await engine.start(batch)).result(30)
    assert result == [[0, None, 2, None], ["value", "cancelled", "value", "not begun"], "enough"]


async def test_collect_raises_nothing_and_says_why_the_batch_ended(world):
    @ks.workflow
    async def batch():
        every = await ks.map(work, range(5), collect=True)
        some = await ks.map(work, range(10), collect=True, wait=ks.Tolerate(0), concurrency=1)
        gathered = await ks.gather(*map(work, range(5)), collect=True)
        return [as_told(every), as_told(some), as_told(gathered)]

    async with world.engine() as engine:
        every, some, gathered = await (await engine.start(batch)).result(30)
    assert every == gathered == [["value", "value", "value", "error", "value"], "complete"]
    assert some == [[*["value"] * 3, "error", *["not begun"] * 6], "too many failures"]


async def test_minimum_that_no_item_can_reach_fails_an_empty_batch(world):
    @ks.workflow
    async def batch():
        await ks.map(work, [], wait=ks.Tolerate(minimum=1))

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="0 of 0 items failed"):
            await (await engine.start(batch)).result(30)


async def test_retry_of_the_run_tries_every_failed_item_again(world, effects):
    @ks.step
    async def flaky(number):
        effects.append(number)
        if number % 2 and effects.count(number) == 1:
            raise OSError(f"away {number}")
        return number

    @ks.workflow
    async def batch():
        return [*await ks.map(flaky, range(6), wait=ks.Tolerate(2, minimum=4))]

    async with world.engine() as engine:
        run = await engine.start(batch)
        with pytest.raises(ks.RunFailed, match="3 of 6 items failed"):
            await run.result(30)
        await run.retry()
        assert await run.result(30) == list(range(6))
    assert sorted(effects) == [0, 1, 1, 2, 3, 3, 4, 5, 5]


async def test_gather_begins_no_more_parts_than_allowed(world, effects):
    running = []

    @ks.step
    async def count(number):
        running.append(number)
        effects.append(len(running))
        await asyncio.sleep(0.005)
        running.remove(number)
        return number

    async def twice(number):
        return [await count(number), await count(-number)]

    @ks.workflow
    async def batch():
        parts = [twice(1), count(2), twice(3), ks.map(count, [4, 5], concurrency=1), count(6)]
        return await ks.gather(*parts, concurrency=2)

    engine = await world.started()
    run = await engine.start(batch)
    await until(lambda: len(effects) > 2)
    engine = await world.crash_and_recover(engine)
    running.clear()
    run = await engine.get(run.id)
    assert await run.result(30) == [[1, -1], 2, [3, -3], [4, 5], 6]
    await engine.close()
    if not world.replaying:
        assert max(effects) == 2


async def test_gather_that_fails_early_begins_the_rest_never(world, effects, recwarn):
    async def part(number):
        effects.append(number)
        return await work(number)

    @ks.workflow
    async def batch():
        try:
            await ks.gather(part(3), work(1), part(2), concurrency=1)
        except ks.StepFailed:
            return "failed"

    async with world.engine() as engine:
        run = await engine.start(batch)
        assert await run.result(30) == "failed"
        assert await steps_of(run) == []
    assert set(effects) == {3}
    assert not [one for one in recwarn if "never awaited" in str(one.message)]


async def test_batches_work_the_same_outside_a_run(effects):
    found = await ks.map(work, range(10), wait=ks.Tolerate(2), concurrency=1)
    assert as_told(found) == [[*["value"] * 3, "error"] * 2 + ["value"] * 2, "complete"]
    found = await ks.gather(*map(work, range(10)), collect=True, wait=ks.Tolerate(0), concurrency=1)
    assert as_told(found) == [[*["value"] * 3, "error", *["not begun"] * 6], "too many failures"]
    with pytest.raises(ks.BatchFailed, match="item 3: no 3"):
        await ks.map(work, range(10), wait=ks.Tolerate(share=0.1), concurrency=1)
    found = await ks.gather(work(3), work(4), concurrency=1, return_exceptions=True)
    assert [str(found[0]), found[1]] == ["no 3", 40]


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"return_exceptions": True, "collect": True}])
async def test_impossible_options_of_gather_are_refused(wrong):
    with pytest.raises(ks.DefinitionError):
        await ks.gather(**wrong)


async def test_crash_at_every_write_of_a_batch_gives_one_outcome():
    @ks.workflow(name="batch at every write")
    async def batch():
        found = await ks.map(work, range(8), wait=ks.Tolerate(2), concurrency=3)
        part = await ks.gather(*map(work, range(3)), concurrency=2)
        return [[*found], as_told(found), part]

    async def play(engine):
        return await (await engine.start(batch, run_id="r")).result(30)

    async def judge(disk, lives):
        assert lives.result[0] == [0, 10, 20, None, 40, 50, 60, None]
        assert lives.result[2] == [0, 10, 20]

    assert await crash_everywhere(MemoryDisk, play, judge) >= 8


# -- a race by name ----------------------------------------------------------------------------------------------------


async def test_race_of_named_calls_says_who_won(world):
    @ks.workflow
    async def program():
        name, value = await ks.race(mail=ks.wait_for("mail"), phone=ks.wait_for("phone"), time=ks.sleep(60))
        return [name, value, await ks.race(ks.wait_for("mail"), ks.sleep(60))]

    async with world.engine() as engine:
        run = await engine.start(program)
        await run.signal("phone", "ring")
        await until(lambda: _decided(run))
        await run.signal("mail", "letter")
        assert await run.result(30) == ["phone", "ring", "letter"]


async def _decided(run):
    return any(one.kind.value == "decision" for one in await run.checkpoints())


@pytest.mark.one_store
async def test_race_takes_names_for_all_calls_or_for_none(world):
    @ks.workflow
    async def program():
        await ks.race(ks.sleep(1), named=ks.sleep(2))

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="by name"):
            await (await engine.start(program)).result(30)


# -- maps in a dag -----------------------------------------------------------------------------------------------------


def pages(effects, **options):
    """A dag whose middle step runs for each element of the first one's result."""
    dag = ks.Dag("pages")

    @dag.step
    async def listed(count: int) -> list:
        return list(range(count))

    @dag.step(needs={"page": "listed"}, map="page", **options)
    async def read(page: int, prefix: str):
        effects.append(page)
        if page % 4 == 3:
            raise ValueError(f"no {page}")
        return f"{prefix}{page}"

    @dag.step(needs=["read"])
    async def joined(read):
        return " ".join(map(str, read))

    return dag


@pytest.mark.parametrize("count", [0, 1, 3, 150])
async def test_step_of_a_dag_runs_for_each_element(world, effects, count):
    options = {"tolerate": ks.Tolerate(share=0.5)} if count > 3 else {}
    async with world.engine() as engine:
        run = await engine.start(pages(effects, **options), count=count, prefix="p")
        expected = " ".join("None" if one % 4 == 3 else f"p{one}" for one in range(count))
        assert await run.result(60) == {"joined": expected}
        if count == 1:
            assert await steps_of(run) == ["listed#1", "read#1.0/read#1", "joined#1"]
    assert sorted(effects) == list(range(count))


async def test_crash_in_the_middle_repeats_no_element(world, effects):
    engine = await world.started()
    run = await engine.start(pages(effects, concurrency=1), count=3, prefix="p")
    await until(lambda: len(effects) > 1)
    engine = await world.crash_and_recover(engine)
    run = await engine.get(run.id)
    assert await run.result(30) == {"joined": "p0 p1 p2"}
    await engine.close()
    assert effects.count(0) == 1
    before = await _told_elsewhere(world, run.id)
    assert [step for _, step, *_ in before if step.startswith("read#1.")]


async def _told_elsewhere(world, run_id):
    async with world.engine(worker=False) as engine:
        return await told(await engine.get(run_id))


async def test_elements_that_have_begun_are_asked_for_whatever_else_is_allowed(world, effects):
    gate = asyncio.Event()

    def made(concurrency):
        dag = ks.Dag("narrowed", concurrency=concurrency)

        @dag.step
        async def slow():
            await gate.wait()
            return "slow"

        @dag.step(map="item", concurrency=1)
        async def read(item: int):
            effects.append(item)
            if item == 2:
                await gate.wait()
            return item

        return dag

    engine = await world.started(workflows=[made(2)])
    run = await engine.start(engine.workflows["narrowed"], item=[0, 1, 2])
    await until(lambda: 2 in effects)
    engine = await world.crash_and_recover(engine, workflows=[made(1)])
    gate.set()
    assert await (await engine.get(run.id)).result(30) == {"slow": "slow", "read": [0, 1, 2]}
    await engine.close()
    assert effects.count(1) == 1


async def test_failed_element_fails_the_step_and_a_retry_repeats_only_it(world, effects):
    dag = ks.Dag("retried")

    @dag.step(map="item")
    async def read(item: int):
        effects.append(item)
        if item == 1 and effects.count(1) == 1:
            raise OSError("away")
        return item

    async with world.engine() as engine:
        run = await engine.start(dag, item=[0, 1, 2])
        with pytest.raises(ks.ExecutionError, match="away"):
            await run.result(30)
        await run.retry()
        assert await run.result(30) == {"read": [0, 1, 2]}
    assert effects.count(1) == 2
    assert effects.count(0) == 1


async def test_value_that_is_no_list_fails_the_step(world):
    dag = ks.Dag("no list")

    @dag.step
    async def listed():
        return 7

    @dag.step(needs=["listed"], map="listed")
    async def read(listed):
        return listed

    async with world.engine() as engine:
        with pytest.raises(ks.ExecutionError, match="each element of 'listed', which must be a list, not a value of"):
            await (await engine.start(dag)).result(30)


async def test_elements_that_wait_for_a_retry_park_the_run(world, effects):
    dag = ks.Dag("parking")

    @dag.step(map="item", retry=ks.Retry(attempts=2, base_seconds=3600, cap_seconds=3600, jitter=0))
    async def read(item: int):
        effects.append(item)
        raise OSError("away")

    async with world.engine() as engine:
        run = await engine.start(dag, item=[0, 1])
        await until_status(run, "waiting")
    assert sorted(effects) == [0, 1]


def test_steps_of_a_dag_beside_a_map_go_on():
    dag = ks.Dag("beside")

    @dag.step(map="item", retry=ks.Retry(attempts=3, base_seconds=60))
    async def read(item: int):
        if ks.now() and item == 1 and len(seen) == 0:
            seen.append(item)
            raise OSError("away")
        return item

    @dag.step
    async def other():
        return "other"

    @dag.step(needs=["read", "other"])
    async def both(read, other):
        return [*read, other]

    seen = []
    with testing.world() as world:
        assert world.start(dag, item=[0, 1, 2]).result() == {"both": [0, 1, 2, "other"]}


async def test_crash_at_every_write_of_a_mapping_dag_gives_one_result():
    effects = []

    async def play(engine):
        run = await engine.start(pages(effects, concurrency=2), run_id="r", count=3, prefix="p")
        return await run.result(30)

    async def judge(disk, lives):
        assert lives.result == {"joined": "p0 p1 p2"}
        assert max(map(effects.count, effects)) <= 1 + lives.crashes
        effects.clear()

    assert await crash_everywhere(MemoryDisk, play, judge) >= 8


async def read_one(item):
    return item


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"map": "other"}, "names 'other', which is not one of its parameters"),
        ({"map": 3}, "name of a parameter"),
        ({"concurrency": 3}, "need map="),
        ({"tolerate": ks.Tolerate(1)}, "need map="),
        ({"map": "item", "concurrency": 0}, "whole number from 1"),
        ({"map": "item", "tolerate": ks.All()}, r"ks.Tolerate\("),
    ],
)
def test_impossible_map_of_a_dag_is_refused(options, problem):
    dag = ks.Dag("refused")
    with pytest.raises(ks.DefinitionError, match=problem):
        _ = dag.add(read_one, **options) and dag.plan


def test_workflow_is_not_mapped_by_a_dag():
    with pytest.raises(ks.DefinitionError, match="is a workflow"):
        ks.Dag("refused").add(ks.workflow(read_one), map="item")


def test_definition_of_a_dag_names_the_map():
    dag = pages([], tolerate=ks.Tolerate(1))
    assert "read needs=page:listed map=page wait Tolerate(count=1)" in dag.definition()
    assert [node.kind for node in dag.shape().nodes] == ["step", "map", "step"]


async def test_graph_tolerates_failures_of_a_map(world):
    graph = ks.Graph("tolerant")
    graph.map("read", work, over="numbers", into="found", wait=ks.Tolerate(1))
    graph.entry("read")
    graph.exit("read")
    async with world.engine() as engine:
        run = await engine.start(graph, numbers=[1, 2, 3, 4])
        assert (await run.result(30))["found"] == [10, 20, None, 40]
