"""What calling a step gives, inside a run and outside it (K2, K8, K9)."""

import asyncio
import threading

import pytest

import keepstep as ks
from tests.engine.world import steps_of


@ks.step
async def double(number):
    return 2 * number


@ks.step
def triple(number):
    return 3 * number


async def test_call_awaited_twice_runs_once(world, effects):
    @ks.step
    async def once(number):
        effects.append(number)
        return [number]

    @ks.step
    async def bad():
        effects.append("bad")
        raise ValueError("no")

    @ks.workflow
    async def twice():
        call = once(1)
        first, second = await call, await call
        failing, errors = bad(), []
        for _ in range(2):
            try:
                await failing
            except ks.StepFailed as error:
                errors.append(str(error))
        return [first, second, errors[0] == errors[1], len(errors)]

    async with world.engine() as engine:
        run = await engine.start(twice)
        assert await run.result(30) == [[1], [1], True, 2]
    assert effects == [1, "bad"]


async def test_call_awaited_by_two_tasks_runs_once(world, effects):
    @ks.step
    async def once(number):
        effects.append(number)
        return number

    @ks.workflow
    async def both():
        call = once(1)

        async def wait():
            return await call

        shared = once(2)
        return [await asyncio.gather(wait(), wait()), await ks.gather(shared, shared)]

    async with world.engine() as engine:
        assert await (await engine.start(both)).result(30) == [[1, 1], [2, 2]]
    assert effects == [1, 2]


async def test_asyncio_takes_a_call_as_a_coroutine(world):
    @ks.workflow
    async def every_way():
        got = [await asyncio.create_task(double(1))]
        async with asyncio.TaskGroup() as group:
            task = group.create_task(double(2))
        got.append(task.result())
        got += await asyncio.gather(double(3), triple(4))
        got.append(await asyncio.wait_for(double(5), 5))
        got.append(await asyncio.ensure_future(double(6)))
        got.append(await asyncio.shield(double(7)))
        got += await ks.gather(double(8), asyncio.create_task(double(9)), ks.gather(double(10)))
        return got

    async with world.engine() as engine:
        run = await engine.start(every_way)
        assert await run.result(30) == [2, 4, 6, 12, 10, 12, 14, 16, 18, [20]]


async def test_call_that_is_never_awaited_does_not_run(world, effects):
    @ks.step
    async def work():
        effects.append("work")

    @ks.workflow
    async def careless():
        work()
        return await double(1)

    async with world.engine() as engine:
        run = await engine.start(careless)
        assert await run.result(30) == 2
        assert await steps_of(run) == ["double#1"]
    assert effects == []


async def test_step_outside_a_run_needs_no_engine():
    assert await double(4) == 8
    assert await triple(4) == 12
    assert triple(4).result() == 12
    assert await double.fn(4) == 8
    assert triple.fn(4) == 12
    call = triple(1)
    assert await call == await call == 3
    assert await ks.gather(double(1), triple(1)) == [2, 3]
    assert await ks.map(double, [1, 2]) == [2, 4]
    assert await ks.chain(add, [1, 2], 0) == 3


@ks.step
async def fussy(item):
    if item == "bad":
        raise ValueError("a bad item")
    return item


@ks.workflow
async def sorts_out(items):
    batch = await ks.map(fussy, items, collect=True)
    return [list(batch), [*batch.failures], batch.coverage, batch.degraded]


@ks.workflow
def sorts_out_plainly(items):
    batch = ks.map(fussy, items, collect=True).result()
    return [list(batch), [*batch.failures], batch.coverage, batch.degraded]


@pytest.mark.parametrize("workflow", [sorts_out, sorts_out_plainly], ids=["async", "def"])
async def test_a_map_collects_in_a_run_and_outside(world, workflow):
    expected = [["a", None, "b"], [1], 2 / 3, True]
    async with world.engine() as engine:
        assert await (await engine.start(workflow, ["a", "bad", "b"])).result() == expected
    outside = await asyncio.to_thread(workflow.fn, ["a", "bad", "b"])
    assert (await outside if workflow is sorts_out else outside) == expected


async def test_map_outside_a_run_follows_its_wait_policy():
    begun, ended = [], []

    async def meet(item):
        begun.append(item)
        try:
            if item == "never":
                await asyncio.Event().wait()
            return await fussy(item)
        finally:
            ended.append(item)

    first = await ks.map(meet, ["never", "bad", "a"], wait=ks.Any())
    assert (list(first), [*first.failures]) == ([None, None, "a"], [1])
    assert sorted(ended) == ["a", "bad", "never"]
    begun.clear()
    with pytest.raises(ValueError, match="a bad item"):
        await ks.map(meet, ["bad", "a", "b"], concurrency=1)
    assert begun == ["bad"]
    assert await ks.map(meet, [], collect=True) == []


@pytest.mark.parametrize("collect", [False, True])
async def test_a_plain_function_in_a_map_of_async_code_is_a_mistake_not_a_failed_item(world, collect):
    def branch(item):
        return item

    @ks.workflow
    async def mapped():
        return list(await ks.map(branch, ["a", "b"], collect=collect))

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match=r"branch is a plain function\. Write it as `async def`"):
            await (await engine.start(mapped)).result()


@ks.step
async def add(total, number):
    return total + number


def test_async_step_outside_a_run_gives_its_result():
    assert double(4).result() == 8


async def test_step_inside_a_step_is_not_recorded(world, effects):
    @ks.step
    async def inner(number):
        effects.append(number)
        return number + 1

    @ks.step
    async def outer():
        return [await inner(1), await asyncio.create_task(inner(2)), *(await ks.gather(inner(3), inner(4)))]

    @ks.step
    def in_thread():
        return [triple(1).result(), triple(2).result()]

    @ks.workflow
    async def nested():
        return [await outer(), await in_thread()]

    async with world.engine() as engine:
        run = await engine.start(nested)
        assert await run.result(30) == [[2, 3, 4, 5], [3, 6]]
        assert await steps_of(run) == ["outer#1", "in_thread#1"]
    assert effects == [1, 2, 3, 4]


WORKFLOW_ONLY = {
    "sleep": lambda: ks.sleep(1),
    "wait_for": lambda: ks.wait_for("x"),
    "start": lambda: ks.start(other),
    "signal": lambda: ks.signal("r", "x"),
    "race": lambda: ks.race(double(1)),
    "patched": lambda: ks.patched("x"),
    "continue_as": ks.continue_as,
    "uuid": ks.uuid,
    "random": ks.random,
    "checkpoint": ks.checkpoint,
}


@ks.workflow
async def other():
    return 1


@pytest.mark.one_store
@pytest.mark.parametrize("verb", WORKFLOW_ONLY)
async def test_workflow_verb_in_a_step_body_is_refused(world, verb):
    @ks.step
    async def body():
        WORKFLOW_ONLY[verb]()

    @ks.workflow
    async def misused():
        try:
            await body()
        except ks.StepFailed as error:
            return [error.error.type, error.error.message]

    async with world.engine() as engine:
        kind, message = await (await engine.start(misused)).result(30)
    assert kind == "keepstep.errors.DefinitionError"
    assert f"ks.{verb} is called inside step 'body#1'" in message


@pytest.mark.parametrize("verb", WORKFLOW_ONLY)
async def test_workflow_verb_outside_a_run_is_refused(verb):
    with pytest.raises(ks.DefinitionError, match=f"ks.{verb} is called outside a run"):
        WORKFLOW_ONLY[verb]()


def test_idempotency_key_outside_a_run_is_new_each_time():
    assert ks.idempotency_key() != ks.idempotency_key()
    assert ks.run_id() is None


async def test_idempotency_key_in_workflow_code_is_refused(world):
    @ks.workflow
    async def misused():
        return ks.idempotency_key()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="call it in the step that uses it"):
            await (await engine.start(misused)).result(30)


async def test_run_id_is_known_in_workflow_and_steps(world):
    @ks.step
    async def who():
        return ks.run_id()

    @ks.step
    def who_in_a_thread():
        return ks.run_id()

    @ks.workflow
    async def asking():
        return [ks.run_id(), await who(), await who_in_a_thread()]

    async with world.engine() as engine:
        assert await (await engine.start(asking, run_id="r")).result(30) == ["r", "r", "r"]


async def test_result_in_an_async_workflow_is_refused(world):
    @ks.workflow
    async def blocking():
        return double(1).result()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="use `await` in an async workflow"):
            await (await engine.start(blocking)).result(30)


@pytest.mark.live_only
async def test_unrecorded_step_in_a_users_thread_is_logged(world, logged, monkeypatch):
    monkeypatch.setattr("keepstep.engine.engine._warned", False)

    @ks.workflow
    async def lost():
        got = []
        thread = threading.Thread(target=lambda: got.extend([triple(1).result(), triple(2).result()]))
        thread.start()
        await asyncio.to_thread(thread.join)
        return got

    async with world.engine() as engine:
        run = await engine.start(lost)
        assert await run.result(30) == [3, 6]
        assert await steps_of(run) == []
    assert len([line for line in logged() if "'triple'" in line and "not recorded" in line]) == 1


async def test_workflow_called_directly_runs_as_plain_code():
    @ks.workflow
    async def plain(number):
        return await double(number)

    assert await plain(2) == 4


async def test_failed_call_awaited_twice_outside_a_run_runs_once(effects):
    @ks.step
    async def bad():
        effects.append("ran")
        raise ValueError("no")

    call = bad()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await call
    assert effects == ["ran"]
