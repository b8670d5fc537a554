"""Hooks are called around steps and runs, and can break neither (C18)."""

import asyncio
import contextlib
import sys
import threading

import pytest

import keepstep as ks
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere
from tests.engine.test_events_and_durability import Recording
from tests.engine.world import steps_of, until, until_at_last_wait, until_status

MOMENTS = ("before", "after", "error", "cancel")


def noting(notes, *, plain=False, **more):
    """Hooks that write down everything they are told."""

    def note(occasion):
        outcome = occasion.result if occasion.error is None else f"{type(occasion.error).__name__}: {occasion.error}"
        given = [*occasion.args, *occasion.kwargs.items()]
        notes.append((occasion.moment, occasion.step, occasion.attempt, given, outcome))

    async def note_later(occasion):
        await asyncio.sleep(0)
        note(occasion)

    return ks.Hooks(**dict.fromkeys(MOMENTS, note if plain else note_later), **more)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
async def test_step_hooks_get_each_attempt_and_its_outcome(world, effects, plain):
    @ks.step(hooks=noting(effects, plain=plain), retry=ks.Retry(attempts=2, base_seconds=0))
    async def flaky(number, by=2):
        effects.append("body")
        if effects.count("body") == 1:
            raise ConnectionError("once")
        return number * by

    @ks.workflow
    async def program():
        return await flaky(3, by=5)

    async with world.engine() as engine:
        assert await (await engine.start(program, run_id="r")).result(30) == 15
    assert effects == [
        ("before", "flaky#1", 1, [3, ("by", 5)], None),
        "body",
        ("error", "flaky#1", 1, [], "ConnectionError: once"),
        ("before", "flaky#1", 2, [3, ("by", 5)], None),
        "body",
        ("after", "flaky#1", 2, [], 15),
    ]


async def test_hooks_come_before_the_record_and_not_on_replay(world, effects):
    """They come before the record, so a crash may have them called again; never for a step that has its checkpoint."""
    durable = []

    async def after(occasion):
        durable.append(len(await steps_of(await engine.get("r"))))
        effects.append(occasion.step)

    @ks.step(hooks=ks.Hooks(after=after))
    async def work():
        return 1

    @ks.workflow
    async def program():
        await work()
        await work()
        return await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await run.signal("go")
    await run.result(30)
    await engine.close()
    assert durable == [0, 1]
    assert effects == ["work#1", "work#2"]


async def test_cancelled_step_calls_its_cancel_hook(world, effects):
    @ks.step(hooks=noting(effects))
    async def slow():
        effects.append("begun")
        await asyncio.sleep(60)

    @ks.step
    async def quick():
        await until(lambda: "begun" in effects)
        return "quick"

    @ks.workflow
    async def program():
        return await ks.race(slow(), quick())

    async with world.engine() as engine:
        assert await (await engine.start(program)).result(30) == "quick"
    assert ("cancel", "slow#1", 1, [], None) in effects
    assert not any(one[0] in ("error", "after") for one in effects if one != "begun")


async def test_run_ends_after_the_hooks_of_its_cancelled_steps(world, effects):
    async def slowly(occasion):
        await asyncio.sleep(0.05)
        effects.append("told")

    @ks.step(hooks=ks.Hooks(cancel=slowly))
    async def slow():
        effects.append("begun")
        await asyncio.sleep(60)

    @ks.workflow
    async def program():
        await slow()

    async with world.engine() as engine:
        run = await engine.start(program)
        await until(lambda: effects)
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(30)
        assert effects == ["begun", "told"]


async def test_parked_run_calls_no_cancel_hook(world, effects):
    @ks.step(hooks=noting(effects), retry=ks.Retry(attempts=2, base_seconds=60))
    async def flaky():
        raise ConnectionError

    @ks.workflow(hooks=noting(effects))
    async def program():
        await flaky()

    async with world.engine() as engine:
        await until_status(await engine.start(program, run_id="r"), "waiting")
    assert [one[0] for one in effects] == ["before", "before", "error"]


# -- of the run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
@pytest.mark.parametrize("end", ["after", "error", "cancel"])
async def test_run_hooks_get_the_beginning_and_the_end(world, effects, end, plain):
    @ks.step
    async def work():
        effects.append("body")
        if end == "error":
            raise ValueError("broken")
        return 1

    async def asynchronous(name):
        await work()
        if end == "cancel":
            await ks.wait_for("never")
        return f"hello {name}"

    def blocking(name):
        work().result()
        if end == "cancel":
            ks.wait_for("never").result()
        return f"hello {name}"

    program = ks.workflow(name="hooked", hooks=noting(effects))(blocking if plain else asynchronous)
    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(program, "ann", run_id="r")
        if end == "cancel":
            await until(lambda: "body" in effects)
            await run.cancel()
        try:
            await run.result(30)
        except ks.RunError:
            assert end != "after"
    told = {
        "after": "hello ann",
        "error": "StepFailed: step 'work#1' failed after 1 attempt: ValueError: broken",
        "cancel": None,
    }[end]
    assert effects == [("before", "", 0, ["ann"], None), "body", (end, "", 0, [], told)]


async def test_hook_of_the_end_comes_before_its_record(world, effects):
    async def after(occasion):
        effects.append((await (await engine.get(occasion.run)).run()).status.value)

    @ks.workflow(hooks=ks.Hooks(after=after))
    async def program():
        return 1

    async with world.engine() as engine:
        await (await engine.start(program)).result(30)
    assert effects == ["running"]


async def test_deadline_calls_the_error_hook(world, effects):
    @ks.workflow(hooks=noting(effects))
    async def program():
        await ks.sleep(60)

    async with world.engine() as engine:
        run = await engine.start(program, deadline=0.05)
        with pytest.raises(ks.RunTimedOut):
            await run.result(30)
    assert [one[0] for one in effects] in (["before", "error"], ["before", "before", "error"])
    assert "RunTimedOut" in effects[-1][4]


async def test_unstorable_result_calls_the_error_hook(world, effects):
    @ks.workflow(hooks=noting(effects))
    async def program():
        return object()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed):
            await (await engine.start(program)).result(30)
    assert [one[0] for one in effects] == ["before", "error"]


@pytest.mark.live_only
async def test_recovered_run_does_not_repeat_the_before_hook(world, effects):
    @ks.step
    async def work():
        return 1

    @ks.workflow(hooks=noting(effects))
    async def program():
        await work()
        return await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    await engine.start(program, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await run.signal("go")
    await run.result(30)
    await engine.close()
    assert [one[0] for one in effects] == ["before", "after"]


async def test_step_hooks_of_a_workflow_apply_to_every_step(world, effects):
    """`step_hooks=` of the workflow are called for each of its steps, before those of the step itself."""

    @ks.step(hooks=ks.Hooks(before=lambda occasion: effects.append(f"own {occasion.step}")))
    async def one():
        return 1

    @ks.step
    async def two():
        return 2

    @ks.workflow(step_hooks=ks.Hooks(before=lambda occasion: effects.append(f"all {occasion.step}")))
    async def program():
        await one()
        await two()

    async with world.engine() as engine:
        await (await engine.start(program)).result(30)
    assert effects == ["all one#1", "own one#1", "all two#1"]


# -- harm --------------------------------------------------------------------------------------------------------------


async def _raises(occasion):
    raise RuntimeError(f"broken at {occasion.moment}")


async def _exits(occasion):
    sys.exit(3)


def _exits_plainly(occasion):
    sys.exit(3)


async def _cancels_itself(occasion):
    raise asyncio.CancelledError


def _cancels_itself_plainly(occasion):
    raise asyncio.CancelledError


class _Order(BaseException):
    """An exception that `except Exception` does not catch, as test runners and greenlets have them."""


async def _orders(occasion):
    raise _Order


def _orders_plainly(occasion):
    raise _Order


async def _hangs(occasion):
    await asyncio.sleep(60)


async def _will_not_hear(occasion):
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    await asyncio.sleep(0.2)


def _hangs_plainly(occasion):
    threading.Event().wait(0.3)


async def _calls_ks(occasion):
    await ks.sleep(1)


HARMFUL = [
    _raises,
    _exits,
    _exits_plainly,
    _cancels_itself,
    _cancels_itself_plainly,
    _orders,
    _orders_plainly,
    _hangs,
    _will_not_hear,
    _hangs_plainly,
    _calls_ks,
]


@pytest.mark.one_store
@pytest.mark.parametrize("hook", HARMFUL, ids=[hook.__name__ for hook in HARMFUL])
async def test_harmful_hook_does_not_break_the_run(world, logged, hook):
    hooks = ks.Hooks(**dict.fromkeys(MOMENTS, hook), seconds=0.02)

    @ks.step(hooks=hooks)
    async def work(number):
        return number

    @ks.step(hooks=hooks)
    async def broken():
        raise ValueError("really")

    @ks.workflow(hooks=hooks)
    async def program():
        total = await work(1)
        try:
            await broken()
        except ks.StepFailed as failure:
            assert failure.error.type == "ValueError"  # noqa: PT017 - in the workflow's own code
        return total

    observer = Recording()
    async with world.engine(observers=[observer]) as engine:
        run = await engine.start(program, run_id="r")
        assert await run.result(60) == 1
    failed = {(event.step, event.data["moment"]) for event in observer.events if event.name == "hook.failed"}
    wanted = {("work#1", "before"), ("work#1", "after"), ("broken#1", "before"), ("broken#1", "error"), ("", "after")}
    assert failed - {("", "before")} == wanted
    assert any(f"before={hook.__name__} of work#1 failed and is ignored" in line for line in logged())


@pytest.mark.one_store
async def test_hook_cannot_change_arguments_or_results(world):
    def spoil(occasion):
        for value in (*occasion.args, occasion.result):
            if value is not None:
                value.append("spoilt")

    @ks.step(hooks=ks.Hooks(before=spoil, after=spoil))
    async def work(items):
        return [*items, "done"]

    @ks.workflow
    async def program():
        return await work(["one"])

    async with world.engine() as engine:
        assert await (await engine.start(program)).result(30) == ["one", "done"]


@pytest.mark.one_store
async def test_ignored_argument_is_given_to_hooks(world, effects):
    @ks.step(ignore=("client",), hooks=noting(effects))
    async def call(number, client):
        return number

    @ks.workflow
    async def program():
        return await call(1, sys)

    async with world.engine() as engine:
        assert await (await engine.start(program)).result(30) == 1
    assert effects[0][3] == [("number", 1), ("client", sys)]


@pytest.mark.live_only
async def test_transactional_step_calls_its_hooks(world, effects):
    if world.kind == "memory":
        pytest.skip("memory has no transactions")

    @ks.step(transactional=True, hooks=noting(effects))
    def book(tx, number):
        return number + 1

    @ks.workflow
    async def program():
        return await book(1)

    async with world.engine() as engine:
        assert await (await engine.start(program)).result(30) == 2
        await until(lambda: len(effects) == 2)
    assert effects == [("before", "book#1", 1, [1], None), ("after", "book#1", 1, [], 2)]


@pytest.mark.live_only
async def test_crash_in_a_before_hook_leaves_no_doubt(world, effects):
    there = asyncio.Event()

    async def before(occasion):
        there.set()
        await asyncio.sleep(60)

    @ks.step(at_most_once=True, hooks=ks.Hooks(before=before, seconds=60))
    async def launch():
        effects.append("launched")

    @ks.workflow
    async def program():
        await launch()

    engine = await world.started()
    run = await engine.start(program, run_id="r")
    await there.wait()
    assert await steps_of(run, "step started") == []
    await world.crash(engine)


async def test_crash_at_any_write_loses_no_hook():
    """Whatever is recorded, its hooks were called: once, and once more for each crash at most."""
    effects = []

    @ks.step(hooks=ks.Hooks(after=lambda occasion: effects.append(occasion.step)))
    async def work():
        return 1

    @ks.workflow(name="hooked", hooks=ks.Hooks(after=lambda occasion: effects.append("end")))
    async def program():
        return [await work(), await work()]

    async def play(engine):
        return await (await engine.start(program, run_id="main")).result(30)

    async def judge(disk, lives):
        assert lives.result == [1, 1]
        for told in ("work#1", "work#2", "end"):
            assert 1 <= effects.count(told) <= 1 + lives.crashes, (told, str(lives.point))
        effects.clear()

    assert await crash_everywhere(MemoryDisk, play, judge, workflows=[program]) >= 4


# -- graphs and dags, and what may be written --------------------------------------------------------------------------


@pytest.mark.one_store
async def test_graphs_and_dags_call_hooks(world, effects):
    hooks = ks.Hooks(before=lambda occasion: effects.append((occasion.workflow, occasion.step)))
    graph = ks.Graph("a graph", hooks=hooks, step_hooks=hooks)
    dag = ks.Dag("a dag", hooks=hooks, step_hooks=hooks)

    @graph.step
    async def draft(state):
        return {"text": "x"}

    @dag.step
    async def fetch():
        return "y"

    graph.entry("draft")
    graph.exit("draft")
    async with world.engine() as engine:
        await (await engine.start(graph, {})).result(30)
        await (await engine.start(dag)).result(30)
    assert list(dict.fromkeys(effects)) == [
        ("a graph", ""),
        ("a graph", "draft#1"),
        ("a dag", ""),
        ("a dag", "fetch#1"),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ks.Hooks(before=5),
        lambda: ks.Hooks(seconds=0),
        lambda: ks.step(hooks=print)(lambda: None),
        lambda: ks.workflow(hooks=print)(lambda: None),
        lambda: ks.workflow(step_hooks={"before": print})(lambda: None),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(ks.DefinitionError, match="hook"):
        make()
