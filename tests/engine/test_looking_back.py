"""Looking without touching: what would run next, whether a run can go on, and what changed (D15)."""

import asyncio
import time

import pytest

import keepstep as ks
from keepstep.history.dry_replay import TURN_SECONDS
from tests.engine.test_rewind import Counting, seq_of
from tests.engine.world import until, until_status

pytestmark = pytest.mark.live_only


class Approval:
    """A program with a step, a wait and two steps at once."""

    def __init__(self, effects, **options):
        self.program = program = Counting(effects)

        @ks.workflow(name="approval", **options)
        async def approval(word="x"):
            number = await program.one()
            ks.publish("stage", "asked")
            answer = await ks.wait_for("go")
            ks.publish("stage", answer)
            return await ks.gather(program.two(number), program.three(number))

        self.workflow = approval


async def test_a_dry_replay_says_what_would_run_and_runs_nothing(world, effects):
    approval = Approval(effects)
    async with world.engine() as engine:
        run = await engine.start(approval.workflow, run_id="r")
        await until_status(run, "waiting")
        before = await run.run()
        told = await run.replay()
        assert (told.fits, told.asks, told.ended) == (True, ("wait_for:go#1",), False)
        assert await run.run() == before
        await run.signal("go", "yes")
        await run.result(30)
        told = await run.replay()
        assert (told.fits, told.asks, told.ended) == (True, (), True)
        await run.rewind(await seq_of(run, "wait_for:go#1", "signal received"), dry_run=True)
    assert effects.count_of() == {"one": 1, "two": 1, "three": 1}


async def test_dry_replay_waits_with_the_code_for_what_is_not_recorded(world, effects):
    seconds = [0.0]  # a dry replay is in virtual time, so only there the wait is long

    @ks.step
    async def work(name):
        effects.append(name)

    @ks.workflow
    async def resting(then):
        await work("first")
        await asyncio.sleep(seconds[0])
        if then:
            async with asyncio.timeout(50):  # no replay may let it run out
                await ks.wait_for(then)

    async with world.engine() as engine:
        ended = await engine.start(resting, "")
        await ended.result(30)
        waits = await engine.start(resting, "go")
        await until(lambda: waits.id in engine.live and engine.live[waits.id].waits)
    async with world.engine(worker=False) as engine:
        for seconds[0] in (20.0, 5000.0):
            told = await (await engine.get(ended.id)).replay()
            assert (told.fits, told.ended) == (True, seconds[0] < 100)
        seconds[0] = 20.0
        told = await (await engine.get(waits.id)).replay()
        assert (told.fits, told.asks) == (True, ("wait_for:go#1",))


async def test_dry_replay_waits_for_threads_of_the_code(world, effects):
    """A thread takes real time, in virtual time too."""

    @ks.step
    async def work(name):
        effects.append(name)

    @ks.workflow
    async def reading():
        await work("first")
        await asyncio.to_thread(time.sleep, 3 * TURN_SECONDS)
        return "read"

    async with world.engine() as engine:
        run = await engine.start(reading)
        await run.result(30)
        told = await run.replay()
        assert (told.problem, told.ended) == ("", True)


async def test_a_dry_replay_after_a_rewind_asks_for_what_no_longer_counts(world, effects):
    approval = Approval(effects)
    async with world.engine() as engine:
        run = await engine.start(approval.workflow, run_id="r")
        await run.signal("go", "yes")
        await run.result(30)
    async with world.engine(worker=False) as engine:  # so that nobody takes it up
        run = await engine.get("r")
        await run.rewind(await seq_of(run, "wait_for:go#1", "signal received"))
        told = await run.replay()
        assert set(told.asks) == {"two#1", "three#1"}
    assert len(effects) == 3


async def test_a_dry_replay_names_a_mismatch(world, effects):
    approval = Approval(effects)
    async with world.engine() as engine:
        run = await engine.start(approval.workflow, run_id="r")
        await until_status(run, "waiting")

        async def other(word="x"):
            await approval.program.two(1)

        told = await run.replay(ks.workflow(name="approval")(other))
        assert not told.fits
        assert (told.kind, told.asks) == ("ReplayMismatch", ())
        assert "recorded as one#1, and the code asks for two#1" in told.problem
        with pytest.raises(ks.DefinitionError, match="belongs to workflow 'approval', not to 'counting'"):
            await run.replay(approval.program.workflow)
    async with world.engine(worker=False, workflows=[]) as engine:
        with pytest.raises(ks.DefinitionError, match="not known here"):
            await (await engine.get("r")).replay()
    assert effects == ["one"]


async def test_info_of_a_run_that_waits_fails_and_has_ended(world, effects):
    approval = Approval(effects)
    program = approval.program

    @ks.step
    async def broken():
        raise ValueError("no luck")

    @ks.workflow
    async def failing():
        await program.one()
        await broken()

    async with world.engine() as engine:
        run = await engine.start(approval.workflow, run_id="r")
        await until_status(run, "waiting")
        told = await run.info()
        assert (told.recoverable, told.last_success, told.next) == (True, "one#1", ("wait_for:go#1",))
        assert told.why == "it waits for signal go"
        await run.signal("go")
        await run.result(30)
        told = await run.info()
        assert (told.recoverable, told.why, told.next) == (False, "it has ended: completed", ())
        run = await engine.start(failing, run_id="f")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        told = await run.info()
        assert (told.recoverable, told.failed, told.last_success) == (False, "broken#1", "one#1")
        assert told.error == "ValueError: no luck"
        assert "a person may retry or rewind it" in told.why
    async with world.engine(worker=False, workflows=[]) as engine:
        told = await (await engine.get("f")).info()
        assert (told.checked, told.next) == (False, ())
        assert "'failing' is not loaded here" in told.why


async def test_info_says_that_the_code_no_longer_fits(world, effects):
    approval = Approval(effects)
    async with world.engine() as engine:
        await until_status(await engine.start(approval.workflow, run_id="r"), "waiting")

    @ks.workflow(name="approval")
    async def changed(word="x"):
        await approval.program.two(1)

    async with world.engine(worker=False, workflows=[changed]) as engine:
        told = await (await engine.get("r")).info()
        assert not told.recoverable
        assert "ReplayMismatch" in told.why


async def test_step_that_succeeds_on_retry_has_not_failed(world, effects):
    goes = asyncio.Event()

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0))
    async def shaky():
        effects.append("shaky")
        if len(effects) == 1:
            raise ValueError("once")

    @ks.workflow
    async def trying():
        await shaky()
        await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(trying, run_id="r")
        await until(lambda: len(effects) == 2)
        await until_status(run, "waiting")
        told = await run.info()
        assert (told.failed, told.error, told.last_success) == ("", "", "shaky#1")
        goes.set()


async def test_diff_shows_what_changed_between_two_records(world, effects):
    approval = Approval(effects)
    async with world.engine() as engine:
        run = await engine.start(approval.workflow, run_id="r")
        await run.signal("go", "yes")
        await run.result(30)
        one, last = await seq_of(run, "one#1"), (await run.run()).seq
        found = await run.diff(one, last)
        assert set(found.added) == {"wait_for:go#1", "two#1", "three#1"}
        assert (found.removed, found.changed) == ((), {})
        assert found.published == {"stage": (None, "yes")}
        assert (found.left, found.right) == (("r", one), ("r", last))
        assert not await run.diff(last, last)
        back = await run.diff(last, one)
        assert set(back.removed) == {"wait_for:go#1", "two#1", "three#1"}
        assert back.published == {"stage": ("yes", None)}
        with pytest.raises(ks.DefinitionError, match=f"records 1 to {last}, got 99"):
            await run.diff(99)


async def test_diff_shows_what_changed_between_two_runs(world, effects):
    program = Counting(effects)
    async with world.engine() as engine:
        run = await engine.start(program.workflow, run_id="r")
        await run.result(30)
        fork = await engine.fork("r", results={"one": 7}, run_id="f")
        await fork.result(30)
        found = await run.diff(other=fork)
        assert found.changed == {"one#1": (1, 7), "two#1": (11, 72), "three#1": (111, 722)}
        assert (found.added, found.removed, found.statuses) == ((), (), ("completed", "completed"))
        await run.rewind(step="three")
        await run.result(30)
        assert (await run.diff(5)).changed == {"three#1": (111, 113)}
        with pytest.raises(ks.RunNotFound):
            await run.diff(other="nobody")
