"""A call or a branch with a key of its own is found by that key, wherever the code makes it."""

import asyncio

import pytest

import keepstep as ks
from tests.engine.lives import PollInterval, live_then_many_lives
from tests.engine.world import steps_of, until_status


def worker_for(effects):
    @ks.step
    async def work(name):
        effects.append(name)
        return name

    return work


async def test_given_key_stands_in_the_record(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def keyed():
        return [await work.options(key="https://a/b#c")("a"), await work("b"), await work.options(key="42")("c")]

    async with world.engine() as engine:
        run = await engine.start(keyed)
        assert await run.result(30) == ["a", "b", "c"]
        assert await steps_of(run) == ["work#@https:%2F%2Fa%2Fb%23c", "work#1", "work#@42"]


async def test_same_key_twice_in_a_run_is_refused(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def keyed():
        await work.options(key="one")("a")
        await work.options(key="one")("a")

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="the key 'work#@one' is used twice"):
            await (await engine.start(keyed)).result(30)
    assert effects == ["a"]


@pytest.mark.parametrize("key", ["", " ", "a\nb", 7, "x" * 300])
def test_key_that_cannot_be_stored_is_refused(effects, key):
    with pytest.raises(ks.DefinitionError, match="printable text of 1 to"):
        worker_for(effects).options(key=key)


async def upgraded(world, effects, old, new, wakes=1):
    """Run `old` until it waits, then go on with `new`, as after an upgrade of a library that makes the tasks."""
    async with world.engine(workflows=[ks.workflow(name="agent")(old)]) as engine:
        await until_status(await engine.start("agent", run_id="r"), "waiting")
    done = list(effects)
    async with world.engine(workflows=[ks.workflow(name="agent")(new)]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        return await run.result(30), effects[len(done) :]


async def test_keyed_calls_are_found_whatever_tasks_make_them(world, effects):
    work = worker_for(effects)

    async def tool(name):
        return await work.options(key=name)(name)

    async def old():
        got = await asyncio.gather(tool("a"), tool("b"))
        with ks.branch("approval"):
            await ks.wait_for("go")
        return [*got, await tool("c")]

    async def new():
        async def deeper(name):
            return await asyncio.create_task(tool(name))

        await asyncio.gather(*(asyncio.sleep(0) for _ in range(3)))
        got = await asyncio.gather(deeper("a"), deeper("b"))
        with ks.branch("approval"):
            await ks.wait_for("go")
        return [*got, await deeper("c")]

    result, later = await upgraded(world, effects, old, new)
    assert result == ["a", "b", "c"]
    assert later == ["c"]


async def test_keyed_calls_may_be_asked_in_another_order(world, effects):
    work = worker_for(effects)

    async def old():
        got = await asyncio.gather(*(work.options(key=name)(name) for name in "abc"))
        with ks.branch("approval"):
            await ks.wait_for("go")
        return sorted(got)

    async def new():
        got = [await work.options(key=name)(name) for name in "cba"]
        with ks.branch("approval"):
            await ks.wait_for("go")
        return sorted(got)

    result, later = await upgraded(world, effects, old, new)
    assert result == ["a", "b", "c"]
    assert later == []


async def test_new_keyed_call_may_come_before_recorded_ones(world, effects):
    work = worker_for(effects)

    async def old():
        got = [await work.options(key=name)(name) for name in "ab"]
        with ks.branch("approval"):
            await ks.wait_for("go")
        return got

    async def new():
        got = [await work.options(key=name)(name) for name in "xab"]
        with ks.branch("approval"):
            await ks.wait_for("go")
        return got

    result, later = await upgraded(world, effects, old, new)
    assert result == ["x", "a", "b"]
    assert later == ["x"]


async def test_new_named_wait_may_come_before_recorded_calls(world, effects):
    work = worker_for(effects)

    async def old():
        got = await work.options(key="a")("a")
        with ks.branch("approval"):
            await ks.wait_for("go")
        return got

    async def new():
        with ks.branch("first"):
            await ks.wait_for("checked")
        got = await work.options(key="a")("a")
        with ks.branch("approval"):
            await ks.wait_for("go")
        return got

    async with world.engine(workflows=[ks.workflow(name="agent")(old)]) as engine:
        await until_status(await engine.start("agent", run_id="r"), "waiting")
    async with world.engine(workflows=[ks.workflow(name="agent")(new)]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        await until_status(run, "waiting")
        await run.signal("checked")
        assert await run.result(30) == "a"
    assert effects == ["a"]


async def test_other_input_under_a_given_key_sets_the_run_aside(world, effects):
    work = worker_for(effects)

    async def old():
        await work.options(key="k")("before")
        await ks.wait_for("go")

    async def new():
        await work.options(key="k")("after")
        await ks.wait_for("go")

    with pytest.raises(ks.RunSetAside, match="recorded with another input"):
        await upgraded(world, effects, old, new)


async def test_positional_call_out_of_order_still_sets_the_run_aside(world, effects):
    work = worker_for(effects)

    async def old():
        await work.options(key="k")("a")
        await work("b")
        await ks.wait_for("go")

    async def new():
        await work.options(key="k")("a")
        await ks.wait_for("go")
        await work("b")

    with pytest.raises(ks.RunSetAside, match="replay mismatch"):
        await upgraded(world, effects, old, new)


async def test_random_values_in_a_named_branch_do_not_depend_on_the_path(world, effects):
    async def values():
        with ks.branch("ids"):
            return [str(ks.uuid()), ks.random()]

    async def old():
        found = await values()
        ks.publish("found", found)
        await ks.wait_for("go")
        return found

    async def new():
        found = await asyncio.create_task(values())
        await ks.wait_for("go")
        return found

    async with world.engine(workflows=[ks.workflow(name="agent")(old)]) as engine:
        run = await engine.start("agent", run_id="r")
        await until_status(run, "waiting")
        before = (await run.published())["found"]
    async with world.engine(workflows=[ks.workflow(name="agent")(new)]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(30) == before


async def test_keys_count_within_the_nearest_named_branch(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def scoped():
        async def one(name):
            with ks.branch(name):
                await work.options(key="k")(name)
                async with asyncio.TaskGroup() as group:
                    group.create_task(work.options(key="inner")(name))
                return await work(name)

        got = await asyncio.gather(one("a"), one("b"))
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, scoped, PollInterval(), effects, lives=2) == ["a", "b"]
    async with world.engine() as engine:
        steps = set(await steps_of(await engine.get("r")))
    assert {"@a/work#@k", "@a/work#@inner", "@a/work#1", "@b/work#@k", "@b/work#1"} <= steps


async def test_branch_name_used_twice_is_refused(world):
    @ks.workflow
    async def twice():
        for _ in range(2):
            with ks.branch("one"):
                pass

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="the key '@one' is used twice"):
            await (await engine.start(twice)).result(30)


async def test_items_of_a_map_are_found_by_their_keys(world, effects):
    work = worker_for(effects)

    async def old():
        got = await ks.map(work, ["a", "b"], name="pages", key=str)
        await ks.wait_for("go")
        return got

    async def new():
        got = await ks.map(work, ["new", "b", "a"], name="pages", key=str)
        await ks.wait_for("go")
        return got

    result, later = await upgraded(world, effects, old, new)
    assert result == ["new", "b", "a"]
    assert later == ["new"]


async def test_two_items_of_a_map_with_one_key_are_refused(world, effects):
    work = worker_for(effects)

    @ks.workflow
    async def same():
        return await ks.map(work, ["a", "a"], key=str)

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="returned 'a' for two items"):
            await (await engine.start(same)).result(30)
    assert effects == []


async def test_sleep_has_the_name_that_it_is_given(world):
    @ks.workflow
    async def sleepy():
        await ks.sleep(0.001, name="cool down")
        await ks.sleep(0.001)

    async with world.engine() as engine:
        run = await engine.start(sleepy)
        await run.result(30)
        assert await steps_of(run, "timer") == ["cool down#1", "sleep#1"]


async def test_named_branch_outside_a_run_is_an_ordinary_block(effects):
    with ks.branch("plain"):
        assert await worker_for(effects)("a") == "a"
