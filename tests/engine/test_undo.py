"""Undo: a run that fails or is cancelled undoes its finished steps, the newest first, each once."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

import keepstep as ks
from tests.engine.world import replay_from_every_prefix, until, until_at_last_wait, until_status


class Shop:
    """Effects outside the store, in their order."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.keys: dict[str, set[str]] = {}

    def do(self, what: str) -> str:
        self.did.append(what)
        self.keys.setdefault(what, set()).add(ks.idempotency_key())
        return f"{what} done"


@pytest.fixture
def shop():
    return Shop()


def steps_of(shop):
    """Steps `a`, `b` and `c` with an undo, and `fail`."""

    def undo_of(name):
        async def undo(result, number):
            assert result == f"{name}{number} done"
            shop.do(f"-{name}{number}")

        undo.__name__ = f"undo_{name}"
        return undo

    def made(name):
        @ks.step(name=name, undo=undo_of(name))
        async def step(number=1):
            return shop.do(f"{name}{number}")

        return step

    return [made(name) for name in "abc"]


@ks.step
async def fail():
    raise ks.Permanent("no")


async def ended(engine, workflow, *args, **options):
    run = await engine.start(workflow, *args, **options)
    with pytest.raises(ks.RunError):
        await run.result()
    return run


async def test_failed_run_is_undone_newest_first(world, shop):
    a, b, c = steps_of(shop)

    @ks.workflow(name="w")
    async def workflow():
        await a()
        await ks.gather(b(1), b(2))
        await c(3)
        await fail()

    async with world.engine(workflows=[workflow]) as engine:
        run = await ended(engine, workflow)
        assert (await run.status()) == "failed"
        done = [one.step for one in await run.checkpoints() if one.kind == "step completed"]
    assert shop.did[4:] == ["-c3", "-b2", "-b1", "-a1"] or shop.did[4:] == ["-c3", "-b1", "-b2", "-a1"]
    assert done[4:] == [f"ks:undo:{key}" for key in reversed(done[:4])]
    assert all(len(keys) == 1 for keys in shop.keys.values())


async def test_completed_run_is_not_undone(world, shop):
    a, _, _ = steps_of(shop)

    @ks.workflow(name="w")
    async def workflow():
        return await a()

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        assert await run.result() == "a1 done"
    assert shop.did == ["a1"]


async def test_cancelled_run_is_undone_after_its_own_clean_up(world, shop):
    a, b, _ = steps_of(shop)

    @ks.workflow(name="w")
    async def workflow():
        await a()
        try:
            await ks.wait_for("never")
        finally:
            await b()

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        await until_at_last_wait(engine, run.id)
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result()
    assert shop.did == ["a1", "b1", "-b1", "-a1"]


async def test_saga_undoes_only_its_own_steps_and_goes_on(world, shop):
    a, b, c = steps_of(shop)

    @ks.workflow(name="w")
    async def workflow():
        await a()
        async with ks.saga():
            await b()
            async with ks.saga():
                await c()
                inner = await ks.undo()
            outer = await ks.undo()
        again = await ks.undo()
        return [inner, outer, again, await ks.undo()]

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        assert await run.result() == [["c#1"], ["b#1"], ["a#1"], []]
    assert shop.did == ["a1", "b1", "c1", "-c1", "-b1", "-a1"]


async def test_sagas_of_parallel_branches_do_not_touch_each_other(world, shop):
    a, b, _ = steps_of(shop)

    async def order(number):
        async with ks.saga():
            await a(number)
            await b(number)
            if number == 2:
                return await ks.undo()
            return []

    @ks.workflow(name="w")
    async def workflow():
        return await ks.gather(order(1), order(2), order(3))

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        await run.result()
    assert sorted(one for one in shop.did if one.startswith("-")) == ["-a2", "-b2"]
    assert shop.did.index("-b2") < shop.did.index("-a2")


async def test_plain_code_has_sagas_and_undo(world, shop):
    a, b, _ = steps_of(shop)

    @ks.workflow(name="w")
    def workflow():
        a().result()
        with ks.saga():
            b().result()
            return ks.undo().result()

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        assert await run.result() == ["b#1"]
    assert shop.did == ["a1", "b1", "-b1"]


async def test_undo_goes_on_from_every_record(world, shop):
    a, b, c = steps_of(shop)

    async def order(number):
        async with ks.saga():
            await b(number)
            if number == 2:
                await ks.undo()

    @ks.workflow(name="inner")
    async def inner():
        await c(7)

    @ks.workflow(name="w")
    async def workflow():
        await a()
        await inner()
        await ks.gather(order(1), order(2))
        await ks.sleep(0)
        await fail()

    async with world.engine(workflows=[workflow]) as engine:
        run = await ended(engine, workflow)
        assert [one for one in shop.did if one.startswith("-")] == ["-b2", "-b1", "-c7", "-a1"]

        async def check(again, length):
            with pytest.raises(ks.RunFailed):
                await again.result()
            undone = [one.step for one in await again.checkpoints() if one.step.startswith("ks:undo")]
            assert len(undone) == len(set(undone))
            assert {one for one in undone if ":" in one[3:]} >= {"ks:undo:a#1", "ks:undo:inner#1/c#1"}

        await replay_from_every_prefix(run, check, engine_options={"workflows": [workflow]})
    assert all(len(keys) == 1 for keys in shop.keys.values())


async def test_deadline_and_budget_do_not_limit_an_undo(world, shop):
    async def slow(result):
        shop.do("-a")

    @ks.step(undo=slow)
    async def a():
        shop.do("a")

    @ks.workflow(name="w", budget=ks.Budget(steps=1))
    async def workflow():
        await a()
        await ks.sleep(days=1)

    async with world.engine(workflows=[workflow]) as engine:
        await ended(engine, workflow, deadline=0.2)
        run = await ended(engine, workflow, deadline=0.2)
        assert (await run.run()).error.code == "ks:run-timed-out"
    assert shop.did == ["a", "-a"] * 2


async def test_run_whose_result_cannot_be_stored_is_undone(world, shop):
    a, _, _ = steps_of(shop)

    @ks.workflow(name="w")
    async def workflow():
        await a()
        return object()

    async with world.engine(workflows=[workflow]) as engine:
        await ended(engine, workflow)
    assert shop.did == ["a1", "-a1"]


async def test_continued_run_is_not_undone(world, shop):
    a, _, _ = steps_of(shop)

    @ks.workflow(name="w")
    async def workflow(number):
        await a(number)
        if number == 1:
            ks.continue_as(2)
        await fail()

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow, 1)
        with pytest.raises(ks.RunFailed):
            await run.result()
    assert shop.did == ["a1", "a2", "-a2"]


async def test_unfinished_step_is_undone_only_if_it_says_so(world, shop):
    async def undo(result, number):
        shop.do(f"-{number} {result}")

    @ks.step(undo=undo)
    async def one(number):
        raise ks.Permanent("no")

    @ks.step(undo=undo, undo_unfinished=True)
    async def two(number):
        raise ks.Permanent("no")

    @ks.step(undo=undo, undo_unfinished=True)
    async def three(number):
        await asyncio.Event().wait()

    @ks.workflow(name="w")
    async def workflow():
        three(3).start()
        for step in (one, two):
            with suppress(ks.StepFailed):
                await step(1 if step is one else 2)
        await fail()

    async with world.engine(workflows=[workflow]) as engine:
        await ended(engine, workflow)
    assert shop.did == ["-3 None", "-2 None"]


async def test_children_are_ended_first_and_finished_ones_are_undone_by_their_parent(world, shop):
    a, b, _ = steps_of(shop)

    async def undo_child(result, number):
        shop.do(f"-child{number} {result}")

    @ks.workflow(name="child", undo=undo_child)
    async def child(number):
        await a(number)
        if number == 2:
            await ks.wait_for("never")
        return number * 10

    @ks.workflow(name="w")
    async def workflow():
        await b()
        first = await ks.start(child, 1)
        await first
        await ks.start(child, 2)
        await ks.wait_for("go")
        await fail()

    async with world.engine(workflows=[workflow, child]) as engine:
        run = await engine.start(workflow)
        await until(lambda: "a2" in shop.did)
        await run.signal("go")
        with pytest.raises(ks.RunFailed):
            await run.result()
    assert shop.did[3:] == ["-a2", "-child1 10", "-b1"]


# -- an undo that fails -----------------------------------------------------------------------------------------------


def with_failing_undo(shop, failing):
    """A workflow of three steps, of which those named in `failing` cannot be undone."""

    async def undo(result, name):
        shop.do(f"-{name}")
        if name in failing:
            raise ks.Permanent(f"cannot undo {name}")

    @ks.step(undo=undo)
    async def do(name):
        shop.do(name)

    @ks.workflow(name="w")
    async def workflow():
        for name in "abc":
            await do(name)
        await fail()

    return workflow


async def aside(engine, workflow):
    run = await engine.start(workflow)
    with pytest.raises(ks.RunSetAside, match="cannot undo"):
        await run.result()
    return run


async def test_failed_undo_lets_others_go_on_and_is_tried_again_by_a_person(world, shop):
    failing = {"c", "b"}
    workflow = with_failing_undo(shop, failing)
    async with world.engine(workflows=[workflow]) as engine:
        run = await aside(engine, workflow)
        assert shop.did[3:] == ["-c", "-b", "-a"]
        failing.remove("b")
        await run.retry("the bank is back")
        with pytest.raises(ks.RunSetAside, match=r"1 undo step failed: .*cannot undo c"):
            await run.result()
        failing.clear()
        await run.retry()
        with pytest.raises(ks.RunFailed, match="no"):
            await run.result()
        assert shop.did[3:] == ["-c", "-b", "-a", "-c", "-b", "-c"]
        assert len(shop.keys["-c"]) == 3  # a person's retry is a new effect


async def test_skipped_undo_is_accepted_and_the_run_ends_as_it_would_have(world, shop):
    workflow = with_failing_undo(shop, {"c", "b"})
    async with world.engine(workflows=[workflow]) as engine:
        run = await aside(engine, workflow)
        with pytest.raises(ks.DefinitionError, match="no failed undo of 'do#1'"):
            await run.skip("do#1")
        assert await run.skip("do#3", reason="paid by hand") == ["do#3"]
        with pytest.raises(ks.RunSetAside, match=r"1 undo step failed: .*cannot undo b"):
            await run.result()
        assert await run.skip() == ["do#2"]
        with pytest.raises(ks.RunFailed, match="no"):
            await run.result()
        assert shop.did[3:] == ["-c", "-b", "-a"]

        async def check(again, length):
            with pytest.raises((ks.RunFailed, ks.RunSetAside)):
                await again.result()

        await replay_from_every_prefix(run, check, engine_options={"workflows": [workflow]})


async def test_code_of_an_undone_run_is_not_retried_and_goes_back_only_to_before_it(world, shop):
    workflow = with_failing_undo(shop, set())
    async with world.engine(workflows=[workflow]) as engine:
        run = await ended(engine, workflow)
        with pytest.raises(ks.RunConflict, match="undone its steps"):
            await run.retry()
        for last in (2, 3, 4, 6, 7, 8):
            with pytest.raises(ks.RunConflict, match="go back to seq 1 or before"):
                await run.rewind(last)
            with pytest.raises(ks.RunConflict, match="go back to seq 1 or before"):
                await engine.fork(run.id, at=last)
        with pytest.raises(ks.RunConflict, match="go back to seq 1 or before"):
            await engine.fork(run.id)
        await run.rewind(1)
        with pytest.raises(ks.RunFailed):
            await run.result()
        assert shop.did == ["a", "b", "c", "-c", "-b", "-a"] * 2
        assert all(len(keys) == 2 for keys in shop.keys.values())
        for last in (2, 6, 8):  # what the first life has undone stays undone, though the rewind has superseded it
            with pytest.raises(ks.RunConflict, match="go back to seq 1 or before"):
                await run.rewind(last)
            with pytest.raises(ks.RunConflict, match="go back to seq 1 or before"):
                await engine.fork(run.id, at=last)


async def test_fork_does_not_undo_the_steps_of_its_origin(world, shop):
    a, b, _ = steps_of(shop)

    @ks.workflow(name="w")
    async def workflow():
        await a()
        if await ks.wait_for("go"):
            return
        await b()
        await fail()

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        await until_at_last_wait(engine, run.id)
        fork = await engine.fork(run.id)
        await fork.signal("go", False)
        with pytest.raises(ks.RunFailed):
            await fork.result()
        await run.signal("go")
        await run.result()
    assert shop.did == ["a1", "b1", "-b1"]


async def test_retry_after_a_saga_that_the_code_has_undone(world, shop):
    a, b, _ = steps_of(shop)
    broken = {"first", "second"}

    @ks.step
    async def flaky(name):
        if name in broken:
            raise ks.Permanent(name)

    @ks.workflow(name="w")
    async def workflow():
        async with ks.saga():
            await a()
            try:
                await flaky("first")
            except ks.StepFailed:
                await ks.undo()
        await flaky("second")

    async with world.engine(workflows=[workflow]) as engine:
        run = await ended(engine, workflow)
        broken.clear()
        await run.retry()  # the undo was complete, and stays so
        await run.result()
    assert shop.did == ["a1", "-a1"]

    @ks.workflow(name="x")
    async def raising():
        await b()
        try:
            await flaky("first")
        except ks.StepFailed:
            await ks.undo()
            raise

    broken.add("first")
    async with world.engine(workflows=[raising]) as engine:
        run = await ended(engine, raising)
        with pytest.raises(ks.RunConflict, match="undone its steps"):
            await run.retry()
    assert shop.did[2:] == ["b1", "-b1"]


async def test_forced_cancel_names_what_it_leaves(world, shop):
    workflow = with_failing_undo(shop, {"c", "b"})
    async with world.engine(workflows=[workflow]) as engine:
        run = await aside(engine, workflow)
        assert await engine.cancel_now(run.id) == ["do#3", "do#2"]
        assert (await run.checkpoints())[-1].data["not_undone"] == ["do#3", "do#2"]


# -- graphs, dags, steps in doubt --------------------------------------------------------------------------------------


def a_graph(shop, loops=1, **options):
    graph = ks.Graph("g", max_iterations=1000, reducers={"log": "append"}, **options)

    async def refund(after, state):
        shop.do(f"-{after['n']} from {state['n']}")

    @graph.step(undo=refund)
    async def charge(state):
        shop.do(f"{state['n'] + 1}")
        return {"n": state["n"] + 1}

    @graph.step
    async def left(state):
        return {"log": "left"}

    async def unmark(after, state):
        shop.do(f"-right of {after['n']} {list(after['log'])}")

    @graph.step(undo=unmark)
    async def right(state):
        return {"log": "right"}

    @graph.step
    async def end(state):
        raise ks.Permanent("no")

    graph.edge("charge", "charge", when=lambda state: state["n"] < loops)
    graph.edge("charge", "both")
    graph.parallel("both", ["left", "right"], join="end")
    graph.entry("charge")
    graph.exit("end")
    return graph


async def test_steps_of_a_graph_are_undone_with_their_states(world, shop):
    graph = a_graph(shop, 2)
    async with world.engine(workflows=[graph]) as engine:
        run = await ended(engine, graph, {"n": 0, "log": []})
        assert shop.did == ["1", "2", "-right of 2 ['right']", "-2 from 1", "-1 from 0"]
        assert (await run.state())["n"] == 2  # an undo changes no state

        async def check(again, length):
            with pytest.raises(ks.RunFailed):
                await again.result()

        await replay_from_every_prefix(run, check, engine_options={"workflows": [graph]})
    assert all(len(keys) == 1 for keys in shop.keys.values())


@pytest.mark.live_only
async def test_steps_before_a_stored_state_of_a_graph_are_undone_by_another_process(world, shop):
    graph = a_graph(shop, 150, interrupt_before=["end"])
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, {"n": 0, "log": []})
        await until_status(run, "waiting")
        assert any(one.kind == "consolidated state" for one in await run.checkpoints())
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get(run.id)
        await run.resume()
        with pytest.raises(ks.RunFailed):
            await run.result()
    assert shop.did[151:] == [f"-{n} from {n - 1}" for n in range(150, 0, -1)]


async def test_steps_of_a_dag_are_undone(world, shop):
    dag = ks.Dag("d")

    async def unbook(result, day):
        shop.do(f"-{result} {day}")

    @dag.step(undo=unbook)
    async def hotel(day):
        return shop.do("hotel")

    @dag.step(undo=lambda result, hotel, day: shop.do(f"-{result} {hotel}"), needs=["hotel"])
    def car(hotel, day):
        return shop.do("car")

    @dag.step(needs=["car"])
    async def pay(car):
        raise ks.Permanent("no")

    async with world.engine(workflows=[dag]) as engine:
        await ended(engine, dag, day="monday")
    assert shop.did == ["hotel", "car", "-car done hotel done", "-hotel done monday"]


@pytest.mark.parametrize("answer", ["done", "not done", "unknown"])
@pytest.mark.live_only
async def test_step_in_doubt_is_undone_if_it_has_happened(world, shop, answer):
    known = {"answer": answer}

    async def verify(number):
        return {"done": ks.Done("by verify"), "not done": ks.NotDone, "unknown": None}[known["answer"]]

    async def undo(result, number):
        shop.do(f"-{number} {result}")

    begun = asyncio.Event()

    @ks.step(at_most_once=True, undo=undo, verify=verify, timeout=0.05)
    async def charge(number):
        begun.set()
        await asyncio.sleep(60)

    @ks.workflow(name="w")
    async def workflow():
        known["answer"] = "unknown"
        await charge(7)

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        await begun.wait()
        await until_at_last_wait_of_step(engine, run)
        known["answer"] = answer
        await run.cancel()
        if answer == "unknown":
            with pytest.raises(ks.RunSetAside, match="may or may not have happened"):
                await run.result()
            await run.skip()
        with pytest.raises(ks.RunCancelled):
            await run.result()
    assert shop.did == (["-7 by verify"] if answer == "done" else [])


async def until_at_last_wait_of_step(engine, run):
    """Come back when a step in doubt waits for a person."""

    def waits():
        context = engine.live.get(run.id)
        return context is None or any(call.doubtful for call in context.bodies.values())

    await until(waits)


async def test_cancel_that_comes_after_the_code_has_ended_undoes_it(world, shop):
    a, _, _ = steps_of(shop)

    @ks.workflow(name="w")
    async def workflow():
        await a()
        await run.cancel()

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.get((await engine.start(workflow, run_id="late")).id)
        with suppress(ks.RunCancelled):
            await run.result()
        expected = ["a1", "-a1"] if await run.status() == "cancelled" else ["a1"]
    assert shop.did == expected


@pytest.mark.live_only  # in replay mode, bodies outlive the run in memory that begins its undo
async def test_undo_waits_for_a_body_in_a_thread(world, shop):
    may_end = threading.Event()

    def undo(result):
        shop.do("-a")

    @ks.step(undo=undo, undo_unfinished=True)
    def a():
        may_end.wait(10)
        shop.do("a")

    @ks.workflow(name="w")
    async def workflow():
        a().start()
        await ks.sleep(0.05)
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        await fail()

    async with world.engine(workflows=[workflow]) as engine:
        await ended(engine, workflow)
    assert shop.did == ["a", "-a"]


async def test_weaker_durability_undoes_what_was_only_in_memory(world, shop):
    a, b, _ = steps_of(shop)

    @ks.workflow(name="w", durability="at_exit")
    async def workflow():
        await a()
        await b()
        await fail()

    async with world.engine(workflows=[workflow]) as engine:
        await ended(engine, workflow)
    assert shop.did == ["a1", "b1", "-b1", "-a1"]


@pytest.mark.one_store
async def test_undo_of_an_encrypted_run_keeps_no_argument_readable(world, shop):
    world.encrypted = True
    a, _, _ = steps_of(shop)

    @ks.workflow(name="w")
    async def workflow():
        await a(424242)
        await fail()

    async with world.engine(workflows=[workflow]) as engine:
        run = await ended(engine, workflow)
        below = engine.encryption.store.inner
        assert not [row for row in below.list_checkpoints(run.id) if b"424242" in row.record]
    assert shop.did == ["a424242", "-a424242"]


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: ks.step(undo=3)(fail.fn), "undo= is a function or a step"),
        (lambda: ks.step(undo_unfinished=True)(fail.fn), "only a step with undo="),
        (lambda: ks.step(undo=lambda: None)(fail.fn), r"is called with \(result\)"),
        (lambda: ks.workflow(name="w", undo="x")(fail.fn), "undo= is a function or a step"),
    ],
)
def test_wrong_undo_is_refused_where_it_is_written(make, match):
    with pytest.raises(ks.DefinitionError, match=match):
        make()


async def test_removed_undo_sets_the_run_aside(world, shop, monkeypatch):
    a, _, _ = steps_of(shop)
    bare = ks.step(name="a")(lambda number=1: None)
    steps = [a]

    @ks.workflow(name="w")
    async def workflow():
        await steps[0]()
        await ks.wait_for("go")
        await fail()

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        await until_at_last_wait(engine, run.id)
    steps[0] = bare
    monkeypatch.setattr("keepstep.workflows.definition._UNDOABLE", {})  # as in a process that does not have the step
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.get(run.id)
        await run.signal("go")
        with pytest.raises(ks.RunSetAside, match="no undo= of 'a#1' is known"):
            await run.result()
        steps[0] = a
        await run.retry()
        with pytest.raises(ks.RunFailed):
            await run.result()
    assert shop.did == ["a1", "-a1"]


@pytest.mark.one_store
async def test_steps_of_a_file_are_undone(world, shop, tmp_path):
    path = tmp_path / "trip.yaml"
    path.write_text(
        """
keepstep: 1
metadata: {name: trip}
steps:
  flight: {with: {city: town}, into: ticket, undo: give_back, next: seats}
  seats: {kind: map, over: people, function: seat, undo: stand_up, into: seats, next: mark}
  mark: {undo: unmark, next: hotel}
  hotel: {function: full}
""",
        encoding="utf-8",
    )

    async def flight(city):
        return shop.do(f"flight to {city}")

    async def give_back(ticket, city):
        shop.do(f"-{ticket} {city}")

    def seat(person):
        return shop.do(f"seat of {person}")

    def stand_up(result, person):
        shop.do(f"-{person}")

    def mark(state):
        return {"marked": True}

    def unmark(after, state):
        shop.do(f"-{after['marked']} {state.get('marked')}")

    def full(state):
        raise ks.Permanent("no room")

    functions = {one.__name__: one for one in (flight, give_back, seat, stand_up, mark, unmark, full)}
    workflow = ks.load(path, functions=functions)
    async with world.engine(workflows=[workflow]) as engine:
        await ended(engine, workflow, {"town": "Rome", "people": ["Ann"]})
    assert shop.did[2:] == ["-True None", "-Ann", "-flight to Rome done Rome"]


def test_unknown_undo_of_a_file_is_reported_with_its_place(tmp_path):
    path = tmp_path / "trip.yaml"
    path.write_text("keepstep: 1\nmetadata: {name: trip}\nsteps:\n  a: {function: f, undo: g}\n", encoding="utf-8")
    with pytest.raises(ks.DefinitionError, match=r"steps\.a\.undo.*no function 'g'"):
        ks.load(path, functions={"f": lambda state: None})


@pytest.mark.one_store
async def test_undone_run_is_replayed_verified_and_reported(world, shop):
    a, b, _ = steps_of(shop)
    graph = a_graph(shop, 2)

    @ks.workflow(name="w")
    async def workflow():
        await a()
        async with ks.saga():
            await b()
            await ks.undo()
        await fail()

    async with world.engine(workflows=[workflow, graph]) as engine:
        for run in (await ended(engine, workflow), await ended(engine, graph, {"n": 0, "log": []})):
            replayed = await run.replay()
            assert replayed.ended
            assert not replayed.problem
            assert (await run.info()).why
            assert not (await engine.care.verify()).damaged
            assert (await run.run()).error.code in ("ks:undone", "ks:execution")
        shape = [one.step for one in await run.checkpoints() if one.step.startswith("ks:undo:")]
        assert len(shape) == 3
