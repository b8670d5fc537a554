"""The budget of a called workflow holds for its branch, and its spending counts for the caller, too (C14)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere
from tests.engine.test_events_and_durability import Recording
from tests.engine.world import steps_of, until, until_at_last_wait


@ks.step
async def ask(number, cost=0.0, tokens=0):
    ks.spend(cost=cost, tokens=tokens)
    return number


def calling(budget, *, outer=None, plain=False, **spends):
    """Return a workflow that calls another twice, which asks until its budget is used up."""
    if plain:

        @ks.workflow(name="inner", budget=budget)
        def inner(count):
            for number in range(count):
                ask(number, **spends).result()
            return count

    else:

        @ks.workflow(name="inner", budget=budget)
        async def inner(count):
            for number in range(count):
                await ask(number, **spends)
            return count

    @ks.workflow(name="outer", budget=outer)
    async def program(*counts):
        ends = []
        await ask(0, **spends)
        for count in counts:
            try:
                ends.append(await inner(count))
            except ks.BudgetExceeded as exceeded:
                ends.append(exceeded.step)
        await ask(1, **spends)
        return ends

    return program


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize(
    "budget, spends",
    [
        (ks.Budget(steps=3), {}),
        (ks.Budget(cost=0.9), {"cost": 0.3}),
        (ks.Budget(tokens=100), {"tokens": 40}),
    ],
    ids=["steps", "cost", "tokens"],
)
async def test_no_step_of_a_called_workflow_starts_beyond_its_budget(world, budget, spends, plain):
    async with world.engine() as engine:
        run = await engine.start(calling(budget, plain=plain, **spends), 3, 9, 2)
        assert await run.result(30) == [3, "inner#2/ask#4", 2]
        assert (await run.spent()).steps == 10


async def test_budget_failure_of_a_called_workflow_names_it(world):
    @ks.workflow(budget=ks.Budget(steps=1))
    async def inner():
        await ask(1)
        await ask(2)

    @ks.workflow
    async def outer():
        await inner.options(key="eu")()

    async with world.engine() as engine:
        run = await engine.start(outer)
        with pytest.raises(ks.RunFailed, match=r"the budget of called workflow 'inner#@eu' is used up, 1 of 1 steps"):
            await run.result(30)


async def test_retry_by_a_person_grants_the_budget_of_the_called_workflow_again(world):
    @ks.workflow(budget=ks.Budget(cost=1.0))
    async def inner():
        return [await ask(number, cost=0.5) for number in range(5)]

    @ks.workflow
    async def outer():
        return await inner()

    async with world.engine() as engine:
        run = await engine.start(outer)
        for done in (2, 4):
            with pytest.raises(ks.RunFailed, match=r"1 of 1 cost"):
                await run.result(30)
            assert len(await steps_of(run)) == done
            await run.retry("granted once more")
        assert await run.result(30) == [0, 1, 2, 3, 4]


async def test_spending_of_a_called_workflow_counts_for_its_caller(world):
    async with world.engine() as engine:
        program = calling(ks.Budget(cost=10.0), outer=ks.Budget(cost=1.0), cost=0.3)
        run = await engine.start(program, 9)
        with pytest.raises(ks.RunFailed, match=r"'ask#2' was not started: the budget of run"):
            await run.result(30)
        assert (await run.spent()).steps == 4


async def test_budgets_of_nested_calls_hold_together(world):
    @ks.workflow(budget=ks.Budget(steps=3))
    async def innermost(count):
        for number in range(count):
            await ask(number)

    @ks.workflow(budget=ks.Budget(steps=4))
    async def inner():
        seen = []
        for _ in range(3):
            try:
                await innermost(9)
            except ks.BudgetExceeded as exceeded:
                seen.append(str(exceeded).partition("was not started: ")[2])
        return seen

    @ks.workflow
    async def outer():
        return await inner()

    async with world.engine() as engine:
        assert await (await engine.start(outer)).result(30) == [
            "the budget of called workflow 'inner#1/innermost#1' is used up, 3 of 3 steps",
            "the budget of called workflow 'inner#1' is used up, 4 of 4 steps",
            "the budget of called workflow 'inner#1' is used up, 4 of 4 steps",
        ]


async def test_concurrent_steps_of_a_called_workflow_stay_within_its_budget(world, effects):
    gate = asyncio.Event()

    @ks.step
    async def slow(number):
        effects.append(number)
        await gate.wait()

    @ks.workflow(budget=ks.Budget(steps=4))
    async def inner():
        return len((await ks.map(slow, range(10), collect=True)).failures)

    @ks.workflow
    async def outer():
        return await ks.gather(inner(), inner())

    async with world.engine() as engine:
        run = await engine.start(outer, run_id="r")
        await until(lambda: len(effects) == 8)
        gate.set()
        assert await run.result(30) == [6, 6]


async def test_concurrent_steps_of_called_workflows_stay_within_the_budget_of_the_caller(world, effects):
    gate = asyncio.Event()

    @ks.step
    async def slow(number):
        effects.append(number)
        await gate.wait()

    @ks.workflow(budget=ks.Budget(steps=4))
    async def inner():
        return len((await ks.map(slow, range(10), collect=True)).failures)

    @ks.workflow(budget=ks.Budget(steps=5))
    async def outer():
        return sum(await ks.gather(inner(), inner()))

    async with world.engine() as engine:
        run = await engine.start(outer, run_id="r")
        await until(lambda: len(effects) >= 5)
        gate.set()
        assert await run.result(30) == 15
    assert len(effects) == 5


async def test_children_of_a_called_workflow_count_for_its_budget(world):
    @ks.workflow
    async def child():
        await ask(1, cost=0.4)

    @ks.workflow(budget=ks.Budget(cost=1.0))
    async def inner():
        for _ in range(5):
            await (await ks.start(child))

    @ks.workflow
    async def outer():
        try:
            await inner()
        except ks.BudgetExceeded as exceeded:
            return exceeded.step

    async with world.engine() as engine:
        assert await (await engine.start(outer)).result(30) == "inner#1/child#4"


async def test_time_budget_counts_from_the_call(world):
    @ks.workflow(budget=ks.Budget(seconds=0.3))
    async def inner(seconds):
        await ks.sleep(seconds)
        return await ask(1)

    @ks.workflow
    async def outer():
        await ks.sleep(0.4)
        ends = [await inner(0.0)]
        try:
            await inner(0.4)
        except ks.BudgetExceeded as exceeded:
            ends.append(exceeded.step)
        return ends

    async with world.engine() as engine:
        assert await (await engine.start(outer)).result(30) == [1, "inner#2/ask#1"]


@pytest.mark.live_only
async def test_recovery_neither_grants_nor_warns_again(world):
    observer = Recording()

    @ks.workflow(budget=ks.Budget(steps=10))
    async def inner():
        for number in range(9):
            await ask(number)
        await ks.wait_for("go")
        await ask(9)
        await ask(10)

    @ks.workflow
    async def outer():
        await inner()

    engine = await world.started(linger_seconds=60, observers=[observer])
    await engine.start(outer, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, observers=[observer])
    run = await engine.get("r")
    await run.signal("go")
    with pytest.raises(ks.RunFailed, match=r"'inner#1/ask#11' was not started.*10 of 10 steps"):
        await run.result(30)
    await engine.close()
    warned = [event for event in observer.events if event.name == "budget.nearly_spent"]
    assert [(event.step, event.data["kind"], event.data["used"]) for event in warned] == [("inner#1", "steps", 9)]


async def test_fork_has_the_budget_of_its_called_workflow_anew(world):
    @ks.workflow(budget=ks.Budget(steps=2))
    async def inner():
        return [await ask(number) for number in range(4)]

    @ks.workflow
    async def outer():
        return await inner()

    async with world.engine() as engine:
        run = await engine.start(outer, run_id="r")
        with pytest.raises(ks.RunFailed, match="2 of 2 steps"):
            await run.result(30)
        second = [one.seq for one in await run.checkpoints() if one.step == "inner#1/ask#2"]
        fork = await engine.fork("r", second[0])
        assert await fork.result(30) == [0, 1, 2, 3]


async def test_crash_at_any_write_leaves_the_budget_of_a_called_workflow_unchanged():
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0))
    async def pay(number):
        ks.spend(cost=1)
        if number == 1 and ks.attempt() == 1:
            raise ConnectionError

    @ks.workflow(budget=ks.Budget(cost=3))
    async def inner():
        for number in range(9):
            await pay(number)

    @ks.workflow(name="paying")
    async def program():
        await pay(20)
        try:
            await inner()
        except ks.BudgetExceeded as exceeded:
            return exceeded.step

    async def play(engine):
        return await (await engine.start(program, run_id="main")).result(30)

    async def judge(disk, lives):
        assert lives.result == "inner#1/pay#3", str(lives.point)
        async with ks.Engine(disk.open(), worker=False) as engine:
            assert (await (await engine.get("main")).spent()).cost == 4, str(lives.point)

    assert await crash_everywhere(MemoryDisk, play, judge, workflows=[program]) > 4
