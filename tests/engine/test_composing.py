"""A workflow called inside a workflow is a branch of the same run, and its result is one record."""

import asyncio
import inspect
import re
import sys
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.workflows.definition import Workflow
from tests.engine.lives import PollInterval, live_then_many_lives
from tests.engine.world import steps_of, until, until_status


class Program:
    """An outer workflow that calls an inner one, whose steps leave effects."""

    def __init__(self, effects, **options):
        self.calls = 0

        @ks.step
        async def work(name):
            effects.append(name)
            return name

        @ks.workflow(**options)
        async def inner(*names):
            self.calls += 1
            return [await work(name) for name in names]

        @ks.workflow
        async def outer():
            first = await inner("a", "b")
            both = await ks.gather(inner("c"), inner("d"))
            mapped = await ks.map(inner, ["e", "f"])
            keyed = await inner.options(key="eu")("g")
            await ks.wait_for("go")
            return [first, both, mapped, keyed, await work("end")]

        self.work, self.inner, self.outer = work, inner, outer


EXPECTED = [["a", "b"], [["c"], ["d"]], [["e"], ["f"]], ["g"], "end"]


async def test_called_workflow_survives_many_lives(world, effects):
    program = Program(effects)
    assert await live_then_many_lives(world, program.outer, PollInterval(), effects, lives=3) == EXPECTED


async def test_called_workflow_is_a_branch_with_one_result(world, effects):
    program = Program(effects)
    async with world.engine() as engine:
        run = await engine.start(program.outer)
        await run.signal("go")
        assert await run.result(30) == EXPECTED
        steps = await steps_of(run)
        assert len((await engine.list(parent=run.id)).runs) == 0
    assert steps[:3] == ["inner#1/work#1", "inner#1/work#2", "inner#1"]
    assert {"inner#2", "inner#3", "3.0/inner#1", "3.1/inner#1", "inner#@eu", "inner#@eu/work#1", "work#1"} <= set(steps)


@pytest.mark.live_only
async def test_recorded_result_spares_the_code_of_the_called_workflow(world, effects):
    program = Program(effects)
    engine = await world.started(linger_seconds=60)
    run = await engine.start(program.outer, run_id="r")
    await until(lambda: effects[-1:] == ["g"])
    await until_parked(engine)
    calls = program.calls
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await run.signal("go")
    assert await run.result(30) == EXPECTED
    assert program.calls == calls
    await engine.close()


async def until_parked(engine):
    await until(lambda: "r" not in engine.live or any(w.name == "go" for w in engine.live["r"].waits.values()))


async def test_failure_of_a_called_workflow_is_the_failure_of_its_step(world, effects):
    broken = [True]

    @ks.step
    async def fragile():
        effects.append("try")
        if broken[0]:
            raise ValueError("not yet")
        return "mended"

    @ks.workflow
    async def inner():
        return await fragile()

    @ks.workflow
    async def outer():
        return await inner()

    async with world.engine() as engine:
        run = await engine.start(outer, run_id="r")
        with pytest.raises(ks.RunFailed, match="not yet"):
            await run.result(30)
        broken[0] = False
        await run.retry()
        assert await run.result(30) == "mended"
    assert effects == ["try", "try"]


async def test_caller_may_catch_the_failure_of_a_called_workflow(world, effects):
    @ks.step
    async def fails():
        effects.append("failed")
        raise ValueError("no")

    @ks.workflow
    async def inner():
        await fails()

    @ks.workflow
    async def outer():
        try:
            await inner()
        except ks.StepFailed as error:
            await ks.wait_for("go")
            return error.step

    assert await live_then_many_lives(world, outer, PollInterval(), effects, lives=2) == "inner#1/fails#1"
    assert effects == ["failed"]


async def test_cancelled_call_of_a_workflow_replays_as_cancelled(world, effects):
    @ks.step
    async def quick():
        effects.append("quick")

    @ks.step
    async def slow():
        await asyncio.sleep(60)

    @ks.workflow
    async def inner():
        await quick()
        await slow()

    @ks.workflow
    async def outer():
        try:
            async with ks.timeout(0.2):
                await inner()
        except ks.TimedOut:
            await ks.wait_for("go")
            return "late"

    assert await live_then_many_lives(world, outer, PollInterval(), effects, lives=2) == "late"
    assert effects == ["quick"]


async def test_hooks_of_a_called_workflow_are_called(world, effects):
    told = []
    hooks = ks.Hooks(before=lambda o: told.append(("before", o.step)), after=lambda o: told.append(("after", o.result)))
    step_hooks = ks.Hooks(before=lambda o: told.append(("step", o.step)))
    program = Program(effects, hooks=hooks, step_hooks=step_hooks)

    @ks.workflow
    async def outer():
        await program.work("outside")
        return await program.inner("a")

    async with world.engine() as engine:
        assert await (await engine.start(outer)).result(30) == ["a"]
    assert told == [("before", "inner#1"), ("step", "inner#1/work#1"), ("after", ["a"])]


async def test_dry_replay_calls_no_hook_of_a_called_workflow(world, effects):
    told = []
    program = Program(effects, hooks=ks.Hooks(before=lambda o: told.append(o.moment)))

    @ks.workflow
    async def outer():
        await ks.wait_for("go")
        return await program.inner("a")

    async with world.engine() as engine:
        run = await engine.start(outer, run_id="r")
        await until_status(run, "waiting")
        await run.signal("go")
        await run.result(30)
        calls = len(told)
        assert await run.replay() is not None
        await run.rewind(to=1)
        await run.result(30)
        assert len(told) > calls  # a rewound run is performed again
        told.clear()
        await run.replay()
    assert told == []


async def test_called_workflow_that_returns_a_call_is_refused(world):
    @ks.step
    async def work():
        return 1

    @ks.workflow
    async def inner():
        return work()

    @ks.workflow
    async def outer():
        return await inner()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="result of inner#1 is a call that has not run"):
            await (await engine.start(outer)).result(30)


async def test_wrong_arguments_of_a_called_workflow_are_refused(world):
    @ks.workflow
    async def inner(number):
        return number

    @ks.workflow
    async def outer():
        return await inner()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="missing a required argument: 'number'"):
            await (await engine.start(outer)).result(30)


async def test_plain_workflow_calls_plain_and_async_ones(world, effects):
    program = Program(effects)

    @ks.step
    def plain_work(name):
        effects.append(name)
        return name

    @ks.workflow
    def plain_inner(name):
        return [plain_work(name).result()]

    @ks.workflow
    def plain_outer():
        got = [plain_inner("p").result(), plain_inner("q").result(), program.inner("r").result()]
        ks.wait_for("go").result()
        return got

    async with world.engine() as engine:
        run = await engine.start(plain_outer, run_id="r")
        await until_status(run, "waiting")
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(30) == [["p"], ["q"], ["r"]]
        assert {"plain_inner#1/plain_work#1", "plain_inner#1", "inner#1"} <= set(await steps_of(run))
    assert effects == ["p", "q", "r"]


async def test_async_workflow_calls_a_plain_one(world, effects):
    @ks.step
    def plain_work(name):
        effects.append(name)
        return name

    @ks.workflow
    def plain_inner(*names):
        return ks.map(plain_work, names).result()

    @ks.workflow
    async def outer():
        got = [await plain_inner("a", "b"), *await ks.gather(plain_inner("c"), plain_inner("d"))]
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, outer, PollInterval(), effects, lives=2) == [["a", "b"], ["c"], ["d"]]
    assert sorted(effects) == ["a", "b", "c", "d"]


async def test_rewind_to_a_step_inside_a_called_workflow_repeats_from_there(world, effects):
    program = Program(effects)

    @ks.workflow
    async def outer():
        return await program.inner("a", "b")

    async with world.engine() as engine:
        run = await engine.start(outer, run_id="r")
        await run.result(30)
        await run.rewind(to=2)
        assert await run.result(30) == ["a", "b"]
    assert effects == ["a", "b", "b"]


async def test_called_workflow_in_a_step_or_outside_is_a_function(effects):
    program = Program(effects)
    assert await program.inner("a") == ["a"]


async def test_run_of_an_older_version_calls_workflows_inline(world, effects, monkeypatch):
    """A history without branches of called workflows is replayed as it was recorded."""
    from keepstep.kernel.runner import Runner

    program = Program(effects)

    @ks.workflow
    async def outer():
        got = await program.inner("a")
        await ks.wait_for("go")
        return got + await program.inner("b")

    started = Runner.started

    def as_before(*args):
        record = started(*args)
        del record.data["nests"]
        return record

    monkeypatch.setattr(Runner, "started", staticmethod(as_before))
    async with world.engine() as engine:
        run = await engine.start(outer, run_id="r")
        engine.live["r"].nests = False
        await until_status(run, "waiting")
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(30) == ["a", "b"]
        assert await steps_of(run) == ["work#1", "work#2"]
    assert effects == ["a", "b"]


async def test_asyncio_tasks_may_drive_called_workflows(world, effects):
    program = Program(effects)

    @ks.workflow
    async def outer():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(program.inner(name)) for name in "xy"]
        await ks.wait_for("go")
        return [task.result() for task in tasks]

    assert await live_then_many_lives(world, outer, PollInterval(), effects, lives=2) == [["x"], ["y"]]


async def test_called_plain_workflow_takes_plain_functions_in_an_async_run(world):
    @ks.step
    async def work(item):
        return item

    @ks.workflow
    def inner():
        def one(item):
            return work(item).result()

        mapped = ks.map(one, [1, 2]).result()
        gathered = ks.gather(lambda: one(3), work(4)).result()
        first = ks.race(lambda: one(5), ks.sleep(60)).result()
        return [*mapped, *gathered, first, *ks.as_completed([lambda: one(6)])]

    @ks.workflow
    async def outer():
        return await ks.gather(inner(), inner())

    async with world.engine() as engine:
        assert await (await engine.start(outer)).result(30) == [[1, 2, 3, 4, 5, 6]] * 2


async def test_one_call_given_to_several_tasks_has_one_outcome(world, effects):
    program = Program(effects)

    @ks.workflow
    async def outer():
        called, mapped = program.inner("a"), ks.map(program.work, ["b"])
        both = await ks.gather(called, called, mapped, mapped)
        tasks = [asyncio.create_task(mapped) for _ in range(2)]
        return [*both, *[await task for task in tasks], await asyncio.create_task(called)]

    async with world.engine() as engine:
        expected = [["a"], ["a"], ["b"], ["b"], ["b"], ["b"], ["a"]]
        assert await (await engine.start(outer)).result(30) == expected
    assert sorted(effects) == ["a", "b"]


@pytest.mark.one_store
async def test_exit_in_a_called_workflow_does_not_end_the_worker(world):
    @ks.workflow
    async def inner(item):
        await ks.sleep(0)
        sys.exit(item)

    @ks.workflow
    async def outer():
        found = []
        for make in (lambda: ks.gather(inner(1)), lambda: ks.map(inner, [2]), lambda: asyncio.create_task(inner(3))):
            try:
                await make()
            except RuntimeError as error:
                found.append(str(error))
        return found

    async with world.engine() as engine:
        assert await (await engine.start(outer)).result(30) == ["SystemExit: 1", "SystemExit: 2", "SystemExit: 3"]


@pytest.mark.live_only
async def test_called_workflow_that_a_batch_never_began_is_no_forgotten_call(world, effects, caplog):
    program = Program(effects)

    @ks.step
    async def fails():
        raise ks.Permanent("no")

    @ks.workflow
    async def outer():
        try:
            await ks.gather(fails(), program.inner("a"), concurrency=1)
        except ks.StepFailed:
            return "failed"

    async with world.engine() as engine:
        assert await (await engine.start(outer)).result(30) == "failed"
    assert "never awaited" not in caplog.text


async def test_tasks_left_open_by_a_called_workflow_are_cancelled(world, effects):
    """A replay takes the recorded result and does not call the code, so it would not have these tasks."""
    ended = []

    @ks.step
    async def late():
        await asyncio.sleep(60)

    async def forgotten():
        try:
            await late()
        finally:
            ended.append("cleaned up")

    @ks.workflow
    async def inner():
        asyncio.get_running_loop().own = asyncio.create_task(forgotten())
        await asyncio.sleep(0.01)
        return 1

    @ks.workflow
    async def outer():
        got = await inner()
        assert ended
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, outer, PollInterval(), effects, lives=2) == 1


async def in_task_group(*parts):
    async with asyncio.TaskGroup() as group:
        for one in parts:
            group.create_task(one)


GROUPS = {
    "gather": ks.gather,
    "race": ks.race,
    "group": in_task_group,
    "map": lambda *parts: ks.map(lambda part: part, parts),
}


@pytest.mark.parametrize("form", GROUPS)
@pytest.mark.parametrize("called", [False, True], ids=["coroutines", "workflows"])
@pytest.mark.parametrize("fails", [False, True], ids=["cancelled", "failed"])
async def test_parts_of_a_group_clean_up_before_their_run_ends(world, effects, form, called, fails):
    began = asyncio.Event()

    @ks.step
    async def slow(name):
        began.set()
        await asyncio.sleep(60)

    @ks.step
    async def undo(name):
        effects.append(name)

    @ks.step
    async def failing():
        await began.wait()
        raise ks.Permanent("on purpose")

    async def part(name):
        try:
            await slow(name)
        except BaseException:
            await undo(name)
            raise

    part = ks.workflow(name="part")(part) if called else part

    @ks.workflow
    async def outer():
        await GROUPS[form](part("a"), part("b"), *([failing()] if fails else []))

    async with world.engine() as engine:
        run = await engine.start(outer)
        await began.wait()
        if not fails:
            await run.cancel()
        with pytest.raises(ks.RunFailed if fails else ks.RunCancelled):
            await run.result(30)
    assert sorted(effects) == ["a", "b"]


def test_page_on_composing_says_what_each_option_does_for_a_called_workflow():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "compose.md").read_text(encoding="utf-8")
    table = page.partition("### Options of a called workflow")[2].partition("\n\nThe options of `start`")[0]
    first_columns = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    named = {name for column in first_columns for name in re.findall(r"`(\w+)`", column)}
    assert named == set(inspect.signature(Workflow).parameters) - {"fn"}


@pytest.mark.parametrize("cause", ["timeout", "deadline", "cancel"])
async def test_called_workflow_that_catches_a_cancel_gives_its_result_on_replay_too(world, effects, cause):
    @ks.step
    async def tidy():
        effects.append("tidy")

    @ks.workflow
    async def inner():
        try:
            await ks.wait_for("never")
        except (asyncio.CancelledError, ks.TimedOut):
            await tidy()
        return "caught"

    @ks.workflow
    async def outer():
        if cause == "timeout":
            try:
                async with ks.timeout(0.01):
                    found = await inner()
            except ks.TimedOut:
                found = "timed out"
        else:
            found = await inner()
        await ks.wait_for("go")
        return found

    async with world.engine() as engine:
        run = await engine.start(outer, run_id="r", deadline=0.05 if cause == "deadline" else None)
        if cause == "cancel":
            await until_status(run, "waiting", "running")
            await run.cancel()
        await until(lambda: effects == ["tidy"])
        await until_status(run, "waiting")
        before = await steps_of(run)
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        await until_status(run, "completed", "failed", "cancelled", "set aside")
        assert await run.status() in {"timeout": ("completed",)}.get(cause, ("completed", "failed", "cancelled"))
        assert (await steps_of(run))[: len(before)] == before
    assert effects == ["tidy"]


async def test_called_workflow_that_lost_a_race_after_its_result_is_cancelled_on_replay_too(world, effects):
    """Both steps end at once, so the result of the called workflow is recorded before the race is decided."""

    @ks.step
    async def work(name):
        effects.append(name)
        return name

    @ks.workflow
    async def inner():
        return await work("inner")

    async def quick():
        return await work("quick")

    @ks.workflow
    async def outer():
        winner = await ks.race(inner(), quick())
        await ks.wait_for("go")
        return winner

    async with world.engine(linger_seconds=0.01) as engine:
        run = await engine.start(outer)
        await until_status(run, ks.Status.WAITING)
    async with world.engine() as engine:
        run = await engine.get(run.id)
        await run.signal("go")
        assert await run.result(30) == "quick"
    assert sorted(effects) == ["inner", "quick"]


@pytest.mark.parametrize("fails", [False, True])
async def test_undo_inside_a_called_workflow_is_replayed_with_its_result(world, effects, fails):
    @ks.step
    async def give_back(result, name):
        effects.append(f"-{name}")

    @ks.step(undo=give_back)
    async def book(name):
        effects.append(name)
        return name

    @ks.workflow
    async def inner():
        async with ks.saga():
            await book("flight")
            await ks.undo()
        return await book("train")

    @ks.workflow
    async def outer():
        found = await inner()
        await ks.wait_for("go")
        if fails:
            raise ks.Permanent("full")
        return found

    async with world.engine(linger_seconds=0.01) as engine:
        run = await engine.start(outer)
        await until_status(run, ks.Status.WAITING)
    async with world.engine() as engine:
        run = await engine.get(run.id)
        await run.signal("go")
        if fails:
            with pytest.raises(ks.RunFailed):
                await run.result(30)
        else:
            assert await run.result(30) == "train"
    assert effects == ["flight", "-flight", "train", *(["-train"] if fails else [])], "each is undone once"
