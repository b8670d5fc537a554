"""Forks: a new run with a copy of another's beginning, and from there on a life of its own (K25, K33)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.records.record import unseal
from tests.engine.test_rewind import Counting, is_sound, seq_of
from tests.engine.world import KEYS, steps_of, told, until, until_status

pytestmark = pytest.mark.on_postgres


async def test_a_fork_goes_on_from_the_copy_and_leaves_the_other_alone(world, effects):
    program = Counting(effects)
    async with world.engine() as engine:
        run = await engine.start(program.workflow, run_id="r", tags={"a": "b"}, priority=3)
        assert await run.result(30) == 111
        before = await run.run(), await told(run)
        at = await seq_of(run, "two#1")
        fork = await engine.fork("r", at, run_id="f", reason="what if", actor="ann")
        assert await fork.result(30) == 112
        assert (await run.run(), await told(run)) == before
        made = await fork.run()
        assert (made.origin, made.tags, made.priority, made.seed) == ("r", {"a": "b"}, 3, before[0].seed)
        assert (await told(fork))[:at] == before[1][:at]
        rows = await engine.read(engine.store.list_checkpoints, "f", 0, 1)
        [(first, _)] = unseal(rows, "f")
        copied = (await run.checkpoints())[at - 1]
        assert (first.data["origin"], first.data["origin_seq"]) == ("r", at)
        assert first.data["origin_checksum"] == copied.checksum
        [created, begun, *_] = await fork.audit()
        assert created.what == "created as a fork of r"
        assert (begun.actor, begun.reason) == ("ann", "what if")
        assert await is_sound(engine)
    assert effects == ["one", "two", "three", "three"]


async def test_fork_draws_the_same_numbers_with_keys_of_its_own(world, effects):
    program, drawn = Counting(effects), []

    @ks.workflow
    async def chancy():
        drawn.append(ks.random())
        return await program.two(1)

    async with world.engine() as engine:
        await (await engine.start(chancy, run_id="r")).result(30)
        await (await engine.fork("r", 0, run_id="f")).result(30)
    assert len(set(drawn)) == 1
    assert len(set(program.keys)) == 2


async def test_fork_may_replace_the_result_of_a_step(world, effects):
    program = Counting(effects)
    async with world.engine() as engine:
        run = await engine.start(program.workflow, run_id="r")
        await run.result(30)
        fork = await engine.fork("r", results={"one": 7}, run_id="f")
        assert await fork.result(30) == 722
        [edited] = [one for one in await fork.checkpoints() if one.step == "one#1"]
        assert (edited.value, edited.trigger.value) == (b"7", "manual")
        with pytest.raises(ks.DefinitionError, match="no recorded result of 'four' up to seq 5; it has one#1, two#1"):
            await engine.fork("r", results={"four": 1})
        with pytest.raises(ks.DefinitionError, match="no recorded result of 'three#1' up to seq 2"):
            await engine.fork("r", 2, results={"three#1": 1})
    assert effects.count_of() == {"one": 1, "two": 2, "three": 2}


async def test_a_failed_step_is_given_a_result(world, effects):
    program = Counting(effects)

    @ks.step
    async def broken():
        effects.append("broken")
        raise ValueError("for good")

    @ks.workflow
    async def failing():
        await program.one()
        return await program.two(await broken())

    async with world.engine() as engine:
        run = await engine.start(failing, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        fork = await engine.fork("r", results={"broken": 5}, run_id="f")
        assert await fork.result(30) == 51
    assert effects.count_of() == {"one": 1, "broken": 1, "two": 1}


async def test_fork_may_replace_the_input(world, effects):
    program = Counting(effects)

    @ks.workflow
    async def asking(number, *, more=0):
        return await program.two(number + more)

    async with world.engine() as engine:
        run = await engine.start(asking, 1, run_id="r")
        assert await run.result(30) == 11
        assert await (await engine.fork("r", input=asking.bind(2, more=1), run_id="f1")).result(30) == 32
        assert await (await engine.fork("r", input={"number": 4}, run_id="f2")).result(30) == 43
        assert await (await engine.fork("r", input=[5], run_id="f3")).result(30) == 54
        assert await (await engine.get("f1")).input() == [[2], {"more": 1}]
        with pytest.raises(ks.DefinitionError, match="cannot be started with this input"):
            await engine.fork("r", input={"nobody": 4})
        with pytest.raises(ks.DefinitionError, match="one of 'counting'"):
            await engine.fork("r", input=program.workflow.bind())


async def test_fork_takes_unread_signals_along(world, effects):
    @ks.workflow
    async def approved():
        first = await ks.wait_for("first")
        second = await ks.wait_for("second", timeout=0.2, default="nobody")
        return [first, second]

    async with world.engine() as engine:
        run = await engine.start(approved, run_id="r")
        await run.pause()
        await run.signal("first", 1)
        await run.signal("second", 2)
        await run.resume()
        assert await run.result(30) == [1, 2]
        at = await seq_of(run, "wait_for:first#1", "signal received")
        assert await (await engine.fork("r", run_id="all")).result(30) == [1, 2]
        assert await (await engine.fork("r", at, run_id="half")).result(30) == [1, 2]
        assert await (await engine.fork("r", at, run_id="none", signals=False)).result(30) == [1, "nobody"]
        other = await engine.fork("r", results={"wait_for:first": "edited"}, run_id="edited")
        assert await other.result(30) == ["edited", 2]
        assert await is_sound(engine)


async def test_cancelled_running_and_parked_runs_are_forked(world, effects):
    program, goes = Counting(effects), asyncio.Event()

    @ks.step
    async def slow():
        effects.append("slow")
        await goes.wait()
        return "slow"

    @ks.workflow
    async def waiting():
        number = await program.one()
        word = await ks.wait_for("go")
        return [number, word, await slow()]

    async with world.engine() as engine:
        run = await engine.start(waiting, run_id="r")
        await until_status(run, "waiting")
        parked = await engine.fork("r", run_id="parked")
        await until_status(parked, "waiting")
        await run.signal("go", "yes")
        await until(lambda: "slow" in effects)
        running = await engine.fork("r", run_id="running")
        await until(lambda: effects.count("slow") == 2)
        await run.cancel()
        await until_status(run, "cancelled")
        cancelled = await engine.fork("r", run_id="cancelled")
        goes.set()
        assert await running.result(30) == await cancelled.result(30) == [1, "yes", "slow"]
        await parked.signal("go", "parked")
        assert await parked.result(30) == [1, "parked", "slow"]
        with pytest.raises(ks.DefinitionError, match="was cancelled at seq"):
            await engine.fork("r", (await run.run()).seq)
        assert await is_sound(engine)
    assert effects.count("one") == 1


async def test_children_of_the_other_are_not_the_forks(world, effects):
    @ks.step
    async def work(number):
        effects.append(f"work {number}")
        return number

    @ks.workflow
    async def child(number):
        await work(number)
        return [number, await ks.wait_for("go")]

    @ks.workflow
    async def parent():
        done, going = await ks.start(child, 1), await ks.start(child, 2)
        first = await done
        await ks.wait_for("more")
        return [first, await going]

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="p")
        await until(lambda: len(effects) == 2)
        ids = {one.parent_key: one.id for one in (await engine.list(parent="p")).runs}
        await engine.signal(ids["child#1"], "go", "first")
        await until(lambda: _recorded(run, "child.result#1"))
        fork = await engine.fork("p", run_id="f")
        await until(lambda: len(effects) == 3)
        [own] = (await engine.list(parent="f")).runs
        assert (own.parent_key, own.id not in ids.values()) == ("child#2", True)
        await fork.cancel()
        await until_status(fork, "cancelled")
        await until_status(await engine.get(own.id), "cancelled")
        await until_status(await engine.get(ids["child#2"]), "waiting")
        second = await engine.fork("p", run_id="g")
        await until(lambda: len(effects) == 4)
        await second.signal("more")
        [own] = (await engine.list(parent="g")).runs
        await engine.signal(own.id, "go", "own")
        assert await second.result(30) == [[1, "first"], [2, "own"]]
        await run.signal("more")
        await engine.signal(ids["child#2"], "go", "old")
        assert await run.result(30) == [[1, "first"], [2, "old"]]
        late = await engine.fork("p", step="wait_for:more", run_id="h")  # by now the child has ended
        assert await late.result(30) == [[1, "first"], [2, "old"]]
        assert await is_sound(engine)
    assert effects.count_of() == {"work 1": 1, "work 2": 3}


async def _recorded(run, step):
    return step in {one.step for one in await run.checkpoints()}


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_fork_of_a_failed_run_starts_a_child_of_its_own_when_it_is_retried(world, end):
    broken, done = [True], []

    @ks.step
    async def work():
        if broken:
            raise ks.Permanent("broken")
        return "done"

    @ks.workflow
    async def child():
        if end == "cancelled":
            await ks.wait_for("never" if broken else "soon", timeout=None if broken else 0.0, default=None)
        done.append(ks.run_id())
        return await work()

    @ks.workflow
    async def parent():
        return await (await ks.start(child))

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="p")
        if end == "cancelled":
            await until(lambda: _children(engine, "p"))
            [born] = await _children(engine, "p")
            await (await engine.get(born)).cancel()
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        [born] = await _children(engine, "p")
        fork = await engine.fork("p", run_id="f")
        with pytest.raises(ks.RunFailed):
            await fork.result(30)
        broken.clear()
        await fork.retry()
        assert await fork.result(30) == "done"
        assert await (await engine.get(born)).status() == end
        assert await run.status() == "failed"
        assert done[-1].startswith("f.")


async def _children(engine, parent):
    return [one.id for one in (await engine.list(parent=parent)).runs]


async def test_a_forks_child_that_is_gone_is_not_started_again(world, effects):
    @ks.step
    async def work():
        effects.append("work")

    @ks.workflow
    async def child():
        await ks.wait_for("go")
        await work()
        return "done"

    @ks.workflow
    async def parent():
        word = await (await ks.start(child))
        return [word, await ks.wait_for("end")]

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="p")
        await until_status(run, "waiting")
        fork = await engine.fork("p", run_id="f")
        await until(lambda: _is_there(engine, parent="f"))
        [own] = (await engine.list(parent="f")).runs
        await engine.signal(own.id, "go")
        await until(lambda: _recorded(fork, "child.result#1"))
        await until_status(fork, "waiting")
        await engine.care.erase(own.id)
        await fork.signal("end", 1)
        assert await fork.result(30) == ["done", 1]
        assert not (await engine.list(parent="f")).runs
    assert effects == ["work"]


async def _is_there(engine, **query):
    return (await engine.list(**query)).runs


async def test_child_that_a_rewind_has_cancelled_is_started_anew_for_a_fork(world):
    @ks.workflow
    async def child():
        return await ks.wait_for("go")

    @ks.workflow
    async def parent():
        return await (await ks.start(child))

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="p")
        await until_status(run, "waiting")
        at = (await run.run()).seq
        [old] = (await engine.list(parent="p")).runs
        await run.rewind(to=1)
        await until_status(await engine.get(old.id), "cancelled")
        fork = await engine.fork("p", at, run_id="f")
        await until(lambda: _is_there(engine, parent="f"))
        [own] = (await engine.list(parent="f")).runs
        await engine.signal(own.id, "go", 1)
        assert await fork.result(30) == 1
        await run.cancel()


async def test_fork_is_refused_where_a_child_was_signalled(world, effects):
    @ks.workflow
    async def child():
        return [await ks.wait_for("go"), await ks.wait_for("end")]

    @ks.workflow
    async def parent():
        born = await ks.start(child)
        await born.signal("go", 1)
        return await born

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="p")
        await until_status(run, "waiting")
        with pytest.raises(ks.DefinitionError, match="signalled its child"):
            await engine.fork("p")
        fork = await engine.fork("p", step="signal:go", run_id="f")
        await until(lambda: _is_there(engine, parent="f"))
        [own] = (await engine.list(parent="f")).runs
        await engine.signal(own.id, "end", 2)
        assert await fork.result(30) == [1, 2]


async def test_an_at_most_once_step_that_was_begun_is_in_doubt(world, effects):
    @ks.step(at_most_once=True)
    async def charge():
        effects.append("charge")
        return "paid"

    @ks.workflow
    async def shop():
        return await charge()

    async with world.engine() as engine:
        run = await engine.start(shop, run_id="r")
        await run.result(30)
        fork = await engine.fork("r", await seq_of(run, "charge#1", "step started"), run_id="f")
        await until_status(fork, "waiting")
        assert effects == ["charge"]
        await fork.resolve("charge#1", "again")
        assert await fork.result(30) == "paid"
    assert effects == ["charge", "charge"]


async def test_the_same_fork_twice_is_one(world, effects):
    program = Counting(effects)
    async with world.engine() as engine:
        run = await engine.start(program.workflow, run_id="r")
        await run.result(30)
        first = await engine.fork("r", 3, run_id="f")
        again = await engine.fork("r", 3, run_id="f")
        assert await first.result(30) == await again.result(30) == 112
        with pytest.raises(ks.RunConflict, match="taken by a run other than this fork"):
            await engine.fork("r", 2, run_id="f")
        with pytest.raises(ks.RunConflict, match="taken by a run other than this fork"):
            await engine.fork("r", 2, run_id="r")
        with pytest.raises(ks.RunNotFound):
            await engine.fork("nobody")
        with pytest.raises(ks.DefinitionError, match="from 0 to 5"):
            await engine.fork("r", 6)


async def test_forks_and_rewound_runs_can_be_forked(world, effects):
    program = Counting(effects)
    async with world.engine() as engine:
        run = await engine.start(program.workflow, run_id="r")
        await run.result(30)
        await run.rewind(step="two")
        assert await run.result(30) == 122
        fork = await engine.fork("r", step="three", run_id="f")
        assert await fork.result(30) == 123
        await fork.rewind(step="two")
        assert await fork.result(30) == 134
        other = await engine.fork("f", run_id="g")
        assert await other.result(30) == 134
        assert (await other.run()).origin == "f"
        assert len(await steps_of(other)) == len(await steps_of(fork))
        assert await is_sound(engine)


async def test_fork_at_the_end_of_an_earlier_try_goes_on(world, effects):
    broken = [True]

    @ks.step
    async def work(name):
        effects.append(name)
        return name

    @ks.workflow
    async def program():
        first = await work("a")
        if broken[0]:
            raise ValueError("broken")
        return [first, await work("b")]

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        ended_at = (await run.run()).seq
        broken[0] = False
        await run.retry()
        assert await run.result(30) == ["a", "b"]
        fork = await engine.fork("r", ended_at, run_id="f")
        assert await fork.result(30) == ["a", "b"]
    assert effects == ["a", "b", "b"]


async def test_a_fork_has_its_budget_for_itself(world, effects):
    program = Counting(effects)

    @ks.workflow(budget=ks.Budget(steps=3))
    async def frugal():
        number = await program.one()
        for _ in range(2):
            number = await program.two(number)
        return number

    async with world.engine() as engine:
        run = await engine.start(frugal, run_id="r")
        await run.result(30)
        fork = await engine.fork("r", step="two#2", run_id="f")
        await fork.result(30)
        await fork.rewind(step="one")
        await fork.result(30)
        other = await engine.fork("f", step="two#1", run_id="g")
        await other.result(30)
    assert effects.count_of() == {"one": 2, "two": 7}


@pytest.mark.live_only
async def test_a_fork_of_an_encrypted_run_has_a_key_of_its_own(world, effects):
    program = Counting(effects)

    @ks.workflow
    async def secretive(word):
        said = await ks.wait_for("say")
        return [word, said, await program.one()]

    async with world.engine(keys=KEYS) as engine:
        run = await engine.start(secretive, "private", run_id="r")
        await run.signal("say", "whispered")
        await run.result(30)
        fork = await engine.fork("r", 0, run_id="f")
        assert await fork.result(30) == ["private", "whispered", 2]
        kept = await (await engine.fork("r", run_id="g")).result(30)
        assert kept == ["private", "whispered", 1]
        below = engine.encryption.store.inner
        keys = {name: (await engine.read(below.get_run, name)).data_key for name in "rfg"}
        assert len(set(keys.values())) == 3
        for signal in await engine.read(below.list_signals, "f"):
            assert b"whispered" not in signal.payload
        assert await is_sound(engine)


def test_blocking_code_goes_back_and_forks(tmp_path):
    calls = []

    @ks.step
    def one():
        calls.append("one")
        return len(calls)

    @ks.workflow
    def counted():
        return one().result()

    with ks.open(tmp_path / "runs.db") as engine:
        run = engine.start(counted, run_id="r")
        assert run.result() == 1
        assert run.rewind(step="one").again == ("one#1",)
        assert run.result() == 2
        assert engine.fork("r", results={"one": 9}).result() == 9
