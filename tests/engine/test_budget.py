"""A run is held to its budget, and what was spent is known after every crash (C14)."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import keepstep as ks
from keepstep.kernel.ledger import Spent
from keepstep.records.record import Record
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere
from tests.engine.test_events_and_durability import Recording
from tests.engine.world import steps_of, until, until_at_last_wait, until_status


@ks.step
async def ask(number, cost=0.0, tokens=0):
    ks.spend(cost=cost, tokens=tokens)
    return number


def asking(count, budget=None, **spends):
    @ks.workflow(name="asking", budget=budget)
    async def program():
        for number in range(count):
            await ask(number, **spends)
        return count

    return program


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget, spends, done, said",
    [
        (ks.Budget(steps=3), {}, 3, "3 of 3 steps"),
        (ks.Budget(cost=1.0), {"cost": 0.3}, 4, "1.2 of 1 cost"),
        (ks.Budget(tokens=100), {"tokens": 50}, 2, "100 of 100 tokens"),
        (ks.Budget(cost=1.0, tokens=100), {"cost": 0.01, "tokens": 99}, 2, "198 of 100 tokens"),
    ],
)
async def test_no_step_starts_beyond_the_budget(world, budget, spends, done, said):
    async with world.engine() as engine:
        run = await engine.start(asking(10, budget, **spends), run_id="r")
        with pytest.raises(ks.RunFailed, match=f"step 'ask#{done + 1}' was not started.*{said}") as caught:
            await run.result(30)
        assert "BudgetExceeded" in caught.value.error.type
        assert len(await steps_of(run)) == done
        assert (await run.spent()).steps == done


async def test_whole_budget_can_be_used(world):
    async with world.engine() as engine:
        run = await engine.start(asking(10, ks.Budget(steps=10, cost=1.0), cost=0.1))
        assert await run.result(30) == 10


async def test_caught_budget_failure_is_the_same_after_a_recovery(world, effects):
    @ks.workflow(budget=ks.Budget(cost=1.0))
    async def program():
        try:
            for number in range(10):
                await ask(number, cost=0.4)
        except ks.BudgetExceeded as exceeded:
            effects.append(str(exceeded))
            return [await ks.wait_for("go"), exceeded.step, exceeded.error.code]
        return None

    engine = await world.started(linger_seconds=60)
    await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    run = await engine.get("r")
    await until_at_last_wait(engine, "r")
    await run.signal("go")
    assert await run.result(30) == [True, "ask#4", "ks:budget"]
    await engine.close()
    assert len(set(effects)) == 1


async def test_concurrent_steps_stay_within_the_budget(world, effects):
    gate = asyncio.Event()

    @ks.step
    async def slow(number):
        effects.append(number)
        await gate.wait()
        return number

    @ks.workflow(budget=ks.Budget(steps=4))
    async def program():
        return len((await ks.map(slow, range(10), collect=True)).failures)

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        await until(lambda: len(effects) == 4)
        gate.set()
        assert await run.result(30) == 6
    assert len(set(effects)) == 4


async def test_child_costs_count_and_no_child_starts_beyond_the_budget(world):
    child = asking(2, cost=0.4)

    @ks.workflow(budget=ks.Budget(cost=1.0))
    async def parent():
        spent = []
        try:
            for number in range(5):
                run = await ks.start(child)
                await run.result()
                await run.result()  # asked for twice, spent once
                spent.append(number)
        except ks.BudgetExceeded as exceeded:
            return [len(spent), exceeded.step]

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="p")
        assert await run.result(30) == [2, "asking#3"]
        assert (await run.spent()).cost == pytest.approx(1.6)


@pytest.mark.live_only
async def test_cancelled_run_cleans_up_beyond_its_budget(world, effects):
    @ks.step
    async def clean_up():
        effects.append("clean")

    @ks.workflow(budget=ks.Budget(steps=1))
    async def program():
        await ask(1)
        try:
            await ks.wait_for("never")
        finally:
            await clean_up()

    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(program, run_id="r")
        await until_at_last_wait(engine, "r")
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(30)
    assert effects == ["clean"]


async def test_retry_by_a_person_grants_the_budget_again(world):
    async with world.engine() as engine:
        run = await engine.start(asking(5, ks.Budget(cost=1.0), cost=0.5), run_id="r")
        for done in (2, 4):
            with pytest.raises(ks.RunFailed, match="budget"):
                await run.result(30)
            assert len(await steps_of(run)) == done
            await run.retry("granted once more")
        assert await run.result(30) == 5
        spent = await run.spent()
        assert (spent.steps, spent.cost) == (5, 2.5)


# -- the clock ---------------------------------------------------------------------------------------------------------


async def test_time_asleep_counts_against_the_budget(world):
    @ks.workflow(budget=ks.Budget(seconds=0.05))
    async def program():
        await ask(1)
        await ks.sleep(0.1)
        await ask(2)

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        with pytest.raises(ks.RunFailed, match=r"'ask#2' was not started.* of 0\.05 seconds"):
            await run.result(30)


# -- what counts -------------------------------------------------------------------------------------------------------


async def test_costs_of_failed_attempts_and_cancelled_steps_count(world, effects):
    @ks.step(retry=ks.Retry(attempts=3, base_seconds=0))
    async def flaky():
        ks.spend(cost=1, tokens=10)
        effects.append("flaky")
        if len(effects) < 3:
            raise ConnectionError
        return 1

    @ks.step
    async def loser():
        ks.spend(tokens=7)
        await asyncio.sleep(60)

    @ks.step
    def in_a_thread():
        ks.spend(0.25)
        ks.spend(tokens=1)

    @ks.workflow
    async def program():
        await flaky()
        await ks.race(loser(), in_a_thread())

    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        await run.result(30)
        spent = await run.spent()
        assert (spent.cost, spent.tokens) == (3.25, 38)
        assert spent.steps == 2


@pytest.mark.live_only
async def test_cost_of_a_failed_attempt_survives_a_crash(world, effects):
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=60))
    async def flaky():
        ks.spend(cost=1)
        effects.append("flaky")
        raise ConnectionError

    @ks.workflow
    async def program():
        await flaky()

    engine = await world.started()
    run = await engine.start(program, run_id="r")
    await until_status(run, "waiting")
    engine = await world.crash_and_recover(engine)
    assert (await (await engine.get("r")).spent()).cost == 1
    await world.crash(engine)


async def test_cost_of_a_transactional_step_counts(world):
    @ks.step(transactional=True)
    def book(tx):
        ks.spend(cost=0.6)

    @ks.workflow(budget=ks.Budget(cost=1.0))
    async def program():
        for _ in range(3):
            await book()

    if world.kind == "memory":
        pytest.skip("memory has no transactions")
    async with world.engine() as engine:
        run = await engine.start(program, run_id="r")
        with pytest.raises(ks.RunFailed, match=r"'book#3' was not started.*1\.2 of 1 cost"):
            await run.result(30)


@pytest.mark.one_store
@pytest.mark.parametrize(
    "spends",
    [{"cost": -1}, {"tokens": -1}, {"tokens": 1.5}, {"cost": float("inf")}, {"cost": 1e300}, {"tokens": 10**400}],
)
async def test_invalid_amount_is_refused(world, spends):
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="DefinitionError"):
            await (await engine.start(asking(1, **spends))).result(30)


@pytest.mark.one_store
async def test_workflow_code_cannot_spend(world):
    @ks.workflow
    async def program():
        ks.spend(1)

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="call it in a step"):
            await (await engine.start(program)).result(30)
    ks.spend(1)  # outside a run it says nothing


def test_budget_exceeded_is_not_caught_as_step_failed():
    assert issubclass(ks.BudgetExceeded, ks.StepError)
    assert not issubclass(ks.BudgetExceeded, ks.StepFailed)


def test_workflow_refuses_a_budget_of_another_type():
    with pytest.raises(ks.DefinitionError, match=r"ks\.Budget"):
        ks.workflow(budget=5)(lambda: None)


# -- warning -----------------------------------------------------------------------------------------------------------


async def test_budget_warning_comes_once_per_limit(world):
    observer = Recording()
    async with world.engine(observers=[observer]) as engine:
        run = await engine.start(asking(10, ks.Budget(steps=10, tokens=1000), tokens=95), run_id="r")
        await run.result(30)
    told = [
        (event.data["kind"], event.data["used"], event.data["limit"])
        for event in observer.events
        if event.name == "budget.nearly_spent"
    ]
    assert told == [("steps", 9, 10), ("tokens", 950, 1000)]


@pytest.mark.live_only
async def test_recovery_does_not_repeat_the_budget_warning(world):
    observer = Recording()

    @ks.workflow(budget=ks.Budget(steps=10))
    async def program():
        for number in range(9):
            await ask(number)
        await ks.wait_for("go")

    engine = await world.started(linger_seconds=60, observers=[observer])
    await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, observers=[observer])
    run = await engine.get("r")
    await run.signal("go")
    await run.result(30)
    await engine.close()
    assert observer.names().count("budget.nearly_spent") == 1


# -- crashes -----------------------------------------------------------------------------------------------------------


async def test_crash_at_any_write_leaves_the_budget_unchanged():
    """However often it crashes, as many steps are recorded as the budget has, and their cost is known."""
    effects = []

    @ks.step
    async def pay(number):
        effects.append(number)
        ks.spend(cost=1)

    @ks.workflow(name="paying", budget=ks.Budget(cost=3))
    async def program():
        for number in range(9):
            try:
                await pay(number)
            except ks.BudgetExceeded as exceeded:
                return exceeded.step
        return None

    async def play(engine):
        return await (await engine.start(program, run_id="main")).result(30)

    async def judge(disk, lives):
        assert lives.result == "pay#4", str(lives.point)
        assert len(effects) <= 3 + lives.crashes
        async with ks.Engine(disk.open(), worker=False) as engine:
            spent = await (await engine.get("main")).spent()
            assert (spent.cost, spent.steps) == (3, 3), str(lives.point)
        effects.clear()

    assert await crash_everywhere(MemoryDisk, play, judge, workflows=[program]) > 4


@pytest.mark.live_only
async def test_graph_resumed_from_its_state_knows_what_it_spent(world, effects):
    graph = ks.Graph("spending", budget=ks.Budget(tokens=200))

    @graph.step
    async def ask_on(state):
        ks.spend(tokens=1)
        effects.append(state["count"])
        return {"count": state["count"] + 1}

    graph.wait("rest", signal="go")
    graph.edge("ask_on", "rest", when=ks.when.equals("count", 150))
    graph.edge("ask_on", "ask_on")
    graph.edge("rest", "ask_on")
    graph.entry("ask_on")
    graph.exit("rest")

    engine = await world.started(linger_seconds=60)
    run = await engine.start(graph, {"count": 0}, run_id="r")
    await until_at_last_wait(engine, "r")
    assert any(one.kind == "consolidated state" for one in await run.checkpoints())
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    run = await engine.get("r")
    await run.signal("go")
    with pytest.raises(ks.ExecutionError, match=r"'ask_on#201' was not started.*200 of 200 tokens"):
        await run.result(30)
    assert (await run.spent()).tokens == 200
    await engine.close()
    assert effects == list(range(200))


@pytest.mark.live_only
@pytest.mark.parametrize("after_state", [0, 1, 40])
async def test_fork_from_a_consolidated_state_has_a_budget_of_its_own(world, after_state):
    graph = ks.Graph("forked budget", budget=ks.Budget(steps=200, cost=200.0), max_iterations=5000)

    @graph.step
    async def spend_on(state):
        ks.spend(cost=1.0)
        return {"count": state["count"] + 1}

    @graph.step
    async def done(_):
        return {}

    graph.edge("spend_on", "spend_on", when=lambda state: state["count"] < state["limit"])
    graph.edge("spend_on", "done")
    graph.entry("spend_on")
    graph.exit("done")

    async with world.engine() as engine:
        run = await engine.start(graph, {"count": 0, "limit": 190}, run_id="r")
        await run.result(30)
        states = [one.seq for one in await run.checkpoints() if one.kind == "consolidated state"]
        fork = await engine.fork("r", states[-1] + after_state, state={"limit": 300}, run_id="f")
        assert (await fork.result(30))["count"] == 300
        with pytest.raises(ks.ExecutionError, match="200 of 200 steps"):
            await (await engine.fork("r", states[-1] + after_state, state={"limit": 500})).result(30)


def test_consolidated_state_keeps_what_was_spent():
    began = datetime(2026, 1, 1, tzinfo=UTC)
    spent = Spent(began)
    at = began
    for number in range(6):
        at += timedelta(seconds=1)
        kind = "superseded" if number == 3 else "step completed"
        data = {"spent": {"cost": 0.5, "tokens": 2}} if number != 3 else None
        spent.add(Record("r", kind, started_at=at, finished_at=at, data=data))
    copy = Spent.from_data(spent.as_data())
    for one in (spent, copy):
        assert one.used(at) == {"seconds": 2.0, "steps": 2, "cost": 1.0, "tokens": 4}
        assert one.all(at).seconds == 6.0
        assert (one.steps, one.cost, one.tokens) == (5, 2.5, 10)


# -- expected amounts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget, expected, done, said",
    [
        (ks.Budget(tokens=1000), ks.Amount(tokens=400), 2, "800, and 400 expected, of 1,000 tokens"),
        (ks.Budget(cost=1.0), lambda _: ks.Amount(cost=0.5), 2, "1 of 1 cost"),
        (ks.Budget(tokens=1000), ks.Amount(cost=9.0), 3, "1,200 of 1,000 tokens"),
    ],
)
async def test_call_that_would_exceed_the_budget_is_refused(world, budget, expected, done, said):
    @ks.step(cost=expected)
    async def pay(number):
        ks.spend(cost=0.5, tokens=400)
        return number

    @ks.workflow(budget=budget)
    async def paying():
        for number in range(10):
            await pay(number)

    async with world.engine() as engine:
        run = await engine.start(paying)
        with pytest.raises(ks.RunFailed, match=f"step 'pay#{done + 1}' was not started.*{said}"):
            await run.result(30)
        assert (await run.spent()).steps == done


async def test_amounts_of_steps_in_progress_count(world, effects):
    @ks.step(cost=ks.Amount(tokens=400))
    async def pay(number):
        effects.append(number)
        await asyncio.sleep(0.01)
        ks.spend(tokens=300)
        return number

    @ks.workflow(budget=ks.Budget(tokens=1000))
    async def paying():
        got = await asyncio.gather(*(pay(number) for number in range(4)), return_exceptions=True)
        return [one if isinstance(one, int) else type(one).__name__ for one in got]

    async with world.engine() as engine:
        assert await (await engine.start(paying)).result(30) == [0, 1, "BudgetExceeded", "BudgetExceeded"]
    assert sorted(effects) == [0, 1]


async def test_expected_amounts_count_for_the_budgets_around(world):
    @ks.step(cost=ks.Amount(tokens=600))
    async def pay():
        ks.spend(tokens=600)

    @ks.workflow(budget=ks.Budget(steps=5))
    async def inner():
        await pay()
        await pay()

    @ks.workflow(budget=ks.Budget(tokens=1000))
    async def outer():
        await inner()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="600, and 600 expected, of 1,000 tokens"):
            await (await engine.start(outer)).result(30)


async def test_estimate_that_fails_refuses_no_call(world, logged):
    def estimate(number):
        raise KeyError(number)

    @ks.step(cost=estimate)
    async def pay(number):
        return number

    @ks.workflow(budget=ks.Budget(tokens=10))
    async def paying():
        return await pay(1)

    async with world.engine() as engine:
        assert await (await engine.start(paying)).result(30) == 1
    assert any("cost= of step pay#1 failed" in line for line in logged())


def test_number_as_cost_needs_a_service():
    with pytest.raises(ks.DefinitionError, match=r"give a ks\.Amount"):
        ks.step(cost=3)(worker)


async def worker():
    """A body for steps that are never called."""


# -- what was spent on what --------------------------------------------------------------------------------------------


async def test_spending_is_known_by_step_agent_and_model(world):
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0))
    async def think(fails):
        ks.spend(cost=0.25, tokens=10, model="large")
        ks.spend(tokens=5, model="small")
        ks.spend(cost=0.5)
        if fails and ks.attempt() == 1:
            raise OSError("down")

    @ks.workflow
    async def child():
        await think(fails=False)

    @ks.workflow
    async def thinking():
        await think(fails=True)
        with ks.acting("critic"):
            await think(fails=False)
            await (await ks.start(child))

    async with world.engine() as engine:
        run = await engine.start(thinking)
        await run.result(30)
        spent = await run.spent()
    one = ks.Amount(cost=0.75, tokens=15)
    assert (spent.cost, spent.tokens) == (3.0, 60)
    assert spent.by_step == {"think": one + one + one, "child": one}
    assert spent.by_agent == {"critic": one + one}
    assert spent.by_model == {"large": ks.Amount(1.0, 40), "small": ks.Amount(0.0, 20)}


@pytest.mark.live_only
async def test_parts_of_the_spending_survive_removed_records(world):
    graph = ks.Graph("spending", keep="newest", max_iterations=500)

    @graph.step
    async def turn(state):
        ks.spend(tokens=1, model="small")
        return {"n": state["n"] + 1}

    @graph.step
    async def end(state):
        return {}

    graph.edge("turn", "turn", when=lambda state: state["n"] < 200)
    graph.edge("turn", "end")
    graph.entry("turn")
    graph.exit("end")
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 0})
        await run.result(60)
        assert (await run.run()).kept_from > 1
        assert (await run.spent()).by_model == {"small": ks.Amount(tokens=200)}


@pytest.mark.parametrize("model", ["", 7, "a\nb"])
async def test_model_must_be_a_name(world, model):
    @ks.step
    async def pay():
        ks.spend(model=model)

    @ks.workflow
    async def paying():
        await pay()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match=r"model .* is refused"):
            await (await engine.start(paying)).result(30)
