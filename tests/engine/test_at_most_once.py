"""A step that may happen at most once is never repeated on a guess (K30)."""

import asyncio
import threading

import pytest

import keepstep as ks
from keepstep.engine import attempt, steering
from keepstep.engine.audit import audit
from keepstep.engine.control import cancel_now
from tests.engine.world import steps_of, until


class Launch:
    """A rocket that must not be launched twice, and the two moments at which a crash leaves doubt."""

    def __init__(self, effects, **options):
        self.began, self.hold = asyncio.Event(), True
        self.effects = effects

        @ks.step(at_most_once=True, **options)
        async def launch(name):
            effects.append(name)
            self.began.set()
            if self.hold:
                await asyncio.sleep(60)
            return f"{name} is up"

        @ks.workflow
        async def mission():
            try:
                return await launch("rocket")
            except ks.StepInDoubt as error:
                return f"in doubt: {error.step}"
            except ks.StepFailed as error:
                return f"failed: {error.error.message}"

        self.workflow = mission

    async def crash_while_under_way(self, world, **options):
        engine = await world.started()
        await engine.start(self.workflow, run_id="r")
        await self.began.wait()
        self.hold = False
        self.began.clear()
        engine = await world.crash_and_recover(engine, **options)
        return engine, await engine.get("r")


async def in_doubt(engine, run_id="r"):
    """Wait until the run waits for a person's word."""

    def waits():
        context = engine.live.get(run_id)
        return context is not None and any(wait.name and "resolve" in wait.name for wait in context.waits.values())

    await until(waits, "the doubt")


async def test_without_a_crash_it_leaves_doubt(world, effects):
    launch = Launch(effects)
    launch.hold = False
    async with world.engine() as engine:
        run = await engine.start(launch.workflow)
        assert await run.result(30) == "rocket is up"
        kinds = [one.kind.value for one in await run.checkpoints() if one.step == "launch#1"]
        assert kinds == ["step started", "step completed"]
    assert effects == ["rocket"]


async def test_the_body_begins_before_its_mark_is_durable(world, effects):
    @ks.step(at_most_once=True)
    async def launch():
        rows = await engine.read(engine.store.list_checkpoints, "r")
        effects.append([row.kind for row in rows])

    @ks.workflow
    async def mission():
        await launch()

    async with world.engine() as engine:
        await (await engine.start(mission, run_id="r")).result(30)
    assert [kinds[-1] for kinds in effects] == ["step started"]


async def test_a_crash_between_mark_and_outcome_repeats_the_step(world, effects):
    engine, run = await Launch(effects).crash_while_under_way(world, linger_seconds=60)
    await in_doubt(engine)
    assert effects == ["rocket"]
    assert not (await run.status()).finished
    await run.resolve("launch#1", "result", "seen in orbit", reason="telescope")
    assert await run.result(30) == "seen in orbit"
    assert effects == ["rocket"]
    await engine.close()


async def test_a_doubt_resolved_as_failed_is_repeated(world, effects):
    engine, run = await Launch(effects).crash_while_under_way(world)
    await run.resolve("launch#1", "failed")
    assert await run.result(30) == "in doubt: launch#1"
    assert effects == ["rocket"]
    await engine.close()


async def test_a_doubt_resolved_as_again_is_not_repeated(world, effects):
    engine, run = await Launch(effects).crash_while_under_way(world)
    await run.resolve("launch#1", "again")
    assert await run.result(30) == "rocket is up"
    assert effects == ["rocket", "rocket"]
    await engine.close()


async def test_again_and_another_crash_repeats_it_a_third_time(world, effects):
    launch = Launch(effects)
    engine, run = await launch.crash_while_under_way(world)
    launch.hold = True
    await run.resolve("launch#1", "again")
    await launch.began.wait()
    launch.hold = False
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await in_doubt(engine)
    assert effects == ["rocket", "rocket"]
    run = await engine.get("r")
    await run.resolve("launch#1", "result", 1)
    assert await run.result(30) == 1
    await engine.close()


async def test_a_doubt_is_forgotten_when_the_run_parks(world, effects):
    engine, run = await Launch(effects).crash_while_under_way(world)

    async def parked():
        return await run.status() is ks.Status.WAITING

    await until(parked)
    await run.resolve("launch#1", "result", "seen")
    assert await run.result(30) == "seen"
    assert effects == ["rocket"]
    await engine.close()


async def test_a_wrong_verdict_is_taken(world, effects):
    async with world.engine() as engine:
        run = await engine.start(Launch(effects).workflow)
        with pytest.raises(ks.DefinitionError, match="'result', 'failed' or 'again'"):
            await run.resolve("launch#1", "maybe")
        await run.cancel()


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_verify_that_says_done_repeats_the_step(world, effects, kind):
    def verify(name):
        return ks.Done(f"{name} was seen")

    async def verify_async(name):
        return verify(name)

    launch = Launch(effects, verify=verify if kind == "plain" else verify_async)
    engine, run = await launch.crash_while_under_way(world)
    assert await run.result(30) == "rocket was seen"
    assert effects == ["rocket"]
    await engine.close()


@pytest.mark.parametrize("answer", [ks.NotDone, ks.NotDone()], ids=["class", "instance"])
async def test_verify_that_says_not_done_leaves_the_run_waiting(world, effects, answer):
    engine, run = await Launch(effects, verify=lambda name: answer).crash_while_under_way(world)
    assert await run.result(30) == "rocket is up"
    assert effects == ["rocket", "rocket"]
    await engine.close()


@pytest.mark.parametrize("verify", [lambda name: None, lambda name: 1 / 0], ids=["does not know", "fails"])
async def test_verify_that_does_not_know_decides_anyway(world, effects, verify):
    engine, run = await Launch(effects, verify=verify).crash_while_under_way(world, linger_seconds=60)
    await in_doubt(engine)
    await run.resolve("launch#1", "result", "asked")
    assert await run.result(30) == "asked"
    assert effects == ["rocket"]
    await engine.close()


@pytest.mark.live_only
@pytest.mark.one_store
async def test_verify_that_waits_stops_the_other_runs(world, effects):
    """A plain function that asks the other side: it waits in a thread, as a plain step does."""
    asked, answered = threading.Event(), threading.Event()

    def verify(name):
        asked.set()
        return ks.Done("seen late") if answered.wait(20) else None

    @ks.workflow
    async def other():
        return "meanwhile"

    engine, run = await Launch(effects, verify=verify).crash_while_under_way(world)
    await until(asked.is_set)
    assert await (await engine.start(other)).result(10) == "meanwhile"
    answered.set()
    assert await run.result(30) == "seen late"
    await engine.close()


@pytest.mark.live_only
@pytest.mark.one_store
async def test_verify_that_never_answers_hangs_the_run(world, effects, monkeypatch):
    monkeypatch.setattr(attempt, "VERIFY_SECONDS", 0.01)
    answered = threading.Event()
    engine, run = await Launch(effects, verify=lambda name: answered.wait(20)).crash_while_under_way(
        world, linger_seconds=60
    )
    await in_doubt(engine)
    answered.set()
    await run.resolve("launch#1", "result", "asked")
    assert await run.result(30) == "asked"
    await engine.close()


async def test_verify_that_answers_nonsense_hangs_the_run(world, effects):
    engine, run = await Launch(effects, verify=lambda name: "yes").crash_while_under_way(world)
    with pytest.raises(ks.RunSetAside, match=r"ks\.Done"):
        await run.result(30)
    assert effects == ["rocket"]
    await engine.close()


async def test_a_timed_out_step_is_repeated_or_hangs(world, effects):
    """A timeout leaves the same doubt as a crash."""
    launch = Launch(effects, timeout=0.03)
    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(launch.workflow, run_id="r")
        await in_doubt(engine)
        launch.hold = False
        await run.resolve("launch#1", "again")
        assert await run.result(30) == "rocket is up"
    assert effects == ["rocket", "rocket"]


async def test_an_error_of_its_own_leaves_doubt(world, effects):
    """The body said that it failed: that is an outcome, and it is not tried again."""

    @ks.step(at_most_once=True)
    async def launch():
        effects.append("tried")
        raise ConnectionError("no fuel")

    @ks.workflow
    async def mission():
        await launch()

    async with world.engine() as engine:
        run = await engine.start(mission)
        with pytest.raises(ks.RunFailed, match="no fuel"):
            await run.result(30)
        assert await steps_of(run, "step started") == ["launch#1"]
    assert effects == ["tried"]


# -- a cancel ----------------------------------------------------------------------------------------------------------


async def cancelled_after_a_crash(launch, world):
    """A run whose worker dies while the step is under way; it is cancelled before another takes it over."""
    engine = await world.started()
    await engine.start(launch.workflow, run_id="r")
    await launch.began.wait()
    launch.hold = False
    await world.crash(engine)
    async with world.engine(worker=False) as other:
        await (await other.get("r")).cancel("enough")
    engine = await world.started()
    run = await engine.get("r")
    with pytest.raises(ks.RunCancelled) as caught:
        await run.result(30)
    told = [(one.kind.value, one.error and one.error.code) for one in await run.checkpoints() if one.step == "launch#1"]
    error = (await run.run()).error
    entries = [entry for entry in await audit(engine, "r") if entry.step == "launch#1"]
    await engine.close()
    return str(caught.value), told, error, entries[-1]


async def test_a_cancel_after_a_crash_does_not_ask_verify(world, effects):
    asked = []

    def verify(name):
        asked.append(name)
        return ks.Done("seen")

    _, told, error, _ = await cancelled_after_a_crash(Launch(effects, verify=verify), world)
    assert (asked[:1], effects) == (["rocket"], ["rocket"])
    assert told == [("step started", None), ("step completed", None)]
    assert error is None


async def test_a_cancel_after_a_crash_performs_what_verify_says_was_not_done(world, effects):
    _, told, error, _ = await cancelled_after_a_crash(Launch(effects, verify=lambda name: ks.NotDone), world)
    assert effects == ["rocket"]
    assert told == [("step started", None), ("step cancelled", None)]
    assert error is None


@pytest.mark.parametrize("options", [{}, {"verify": lambda name: None}], ids=["no verify", "does not know"])
async def test_a_cancel_after_a_crash_hides_the_doubt(world, effects, options):
    message, told, error, entry = await cancelled_after_a_crash(Launch(effects, **options), world)
    assert effects == ["rocket"]
    assert told == [("step started", None), ("step cancelled", "ks:in-doubt")]
    said = "step 'launch#1' was under way when the run was cancelled: may or may not have happened"
    assert said in message
    assert error.message == said
    assert said in entry.reason


async def test_a_cancel_waits_for_ever_for_a_step_that_the_code_does_not_come_to(world, effects, monkeypatch):
    monkeypatch.setattr(steering, "SETTLE_SECONDS", 0.05)
    hang = False

    @ks.step(at_most_once=True)
    async def launch():
        effects.append("rocket")
        began.set()
        await asyncio.sleep(60)

    @ks.workflow
    async def mission():
        if hang:
            await asyncio.sleep(60)  # neither recorded nor a wait of ours
        await launch()

    began = asyncio.Event()
    engine = await world.started()
    await engine.start(mission, run_id="r")
    await began.wait()
    hang = True
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await run.cancel()
    with pytest.raises(ks.RunCancelled, match="may or may not have happened"):
        await run.result(30)
    assert effects == ["rocket"]
    await engine.close()


async def test_a_forced_cancel_hides_the_doubt(world, effects):
    launch = Launch(effects)
    engine = await world.started()
    await engine.start(launch.workflow, run_id="r")
    await launch.began.wait()
    await world.crash(engine)
    async with world.engine(worker=False) as other:
        await cancel_now(other, "r", "nobody left", "ann")
        assert "'launch#1' was under way" in (await (await other.get("r")).run()).error.message


def test_at_most_once_takes_several_attempts():
    with pytest.raises(ks.DefinitionError, match="at_most_once"):
        ks.step(at_most_once=True, retry=ks.Retry(attempts=2))(lambda: None)
    with pytest.raises(ks.DefinitionError, match="verify"):
        ks.step(verify=lambda: None)(lambda: None)
