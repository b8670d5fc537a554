"""A step that may happen at most once is never repeated on a guess (K30)."""

import asyncio
import threading
import time

import pytest

import keepstep as ks
from keepstep.history.audit import audit
from keepstep.history.commands import cancel_now
from keepstep.kernel import doubt, steering
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


async def test_undisturbed_step_runs_once(world, effects):
    launch = Launch(effects)
    launch.hold = False
    async with world.engine() as engine:
        run = await engine.start(launch.workflow)
        assert await run.result(30) == "rocket is up"
        kinds = [one.kind.value for one in await run.checkpoints() if one.step == "launch#1"]
        assert kinds == ["step started", "step completed"]
    assert effects == ["rocket"]


async def test_mark_is_durable_before_the_body_begins(world, effects):
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


async def test_crash_between_mark_and_outcome_repeats_nothing(world, effects):
    engine, run = await Launch(effects).crash_while_under_way(world, linger_seconds=60)
    await in_doubt(engine)
    assert effects == ["rocket"]
    assert not (await run.status()).finished
    await run.resolve("launch#1", "result", "seen in orbit", reason="telescope")
    assert await run.result(30) == "seen in orbit"
    assert effects == ["rocket"]
    await engine.close()


async def test_doubt_that_a_person_has_resolved_is_not_reported_again(world, effects):
    seen = []
    engine, run = await Launch(effects).crash_while_under_way(world, linger_seconds=60)
    await in_doubt(engine)
    await run.resolve("launch#1", "result", "seen in orbit")
    engine = await world.crash_and_recover(engine, observers=lambda event: seen.append(event.name))
    assert await (await engine.get("r")).result(30) == "seen in orbit"
    assert "step.in_doubt" not in seen
    await engine.close()


async def test_doubt_resolved_as_failed_raises_step_in_doubt(world, effects):
    engine, run = await Launch(effects).crash_while_under_way(world)
    await run.resolve("launch#1", "failed")
    assert await run.result(30) == "in doubt: launch#1"
    assert effects == ["rocket"]
    await engine.close()


async def test_doubt_resolved_as_again_repeats_the_step(world, effects):
    engine, run = await Launch(effects).crash_while_under_way(world)
    await run.resolve("launch#1", "again")
    assert await run.result(30) == "rocket is up"
    assert effects == ["rocket", "rocket"]
    await engine.close()


async def test_crash_after_again_leaves_the_step_in_doubt(world, effects):
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


async def test_doubt_is_kept_while_the_run_is_parked(world, effects):
    engine, run = await Launch(effects).crash_while_under_way(world)

    async def parked():
        return await run.status() is ks.Status.WAITING

    await until(parked)
    await run.resolve("launch#1", "result", "seen")
    assert await run.result(30) == "seen"
    assert effects == ["rocket"]
    await engine.close()


async def test_unknown_verdict_is_refused(world, effects):
    async with world.engine(stop_seconds=0) as engine:
        run = await engine.start(Launch(effects).workflow)
        with pytest.raises(ks.DefinitionError, match="'result', 'failed' or 'again'"):
            await run.resolve("launch#1", "maybe")
        await run.cancel()


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_verify_done_gives_the_result_without_a_repeat(world, effects, kind):
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
async def test_verify_not_done_repeats_the_step(world, effects, answer):
    engine, run = await Launch(effects, verify=lambda name: answer).crash_while_under_way(world)
    assert await run.result(30) == "rocket is up"
    assert effects == ["rocket", "rocket"]
    await engine.close()


async def _cancels_itself(name):
    raise asyncio.CancelledError


def _cancels_itself_plainly(name):
    raise asyncio.CancelledError


UNKNOWING = [lambda name: None, lambda name: 1 / 0, _cancels_itself, _cancels_itself_plainly]


@pytest.mark.parametrize("verify", UNKNOWING, ids=["does not know", "fails", "cancels itself", "plainly"])
async def test_verify_without_an_answer_leaves_the_doubt(world, effects, verify):
    engine, run = await Launch(effects, verify=verify).crash_while_under_way(world, linger_seconds=60)
    await in_doubt(engine)
    await run.resolve("launch#1", "result", "asked")
    assert await run.result(30) == "asked"
    assert effects == ["rocket"]
    await engine.close()


@pytest.mark.live_only
@pytest.mark.one_store
async def test_slow_verify_does_not_stop_other_runs(world, effects):
    """A plain function that asks the other side: it waits in a thread, as a plain step does."""
    asked, answered = threading.Event(), threading.Event()

    def verify(name):
        asked.set()
        return ks.Done("seen late") if answered.wait(60) else None

    @ks.workflow
    async def other():
        return "meanwhile"

    engine, run = await Launch(effects, verify=verify).crash_while_under_way(world)
    await until(asked.is_set)
    assert await (await engine.start(other)).result(60) == "meanwhile"
    answered.set()
    assert await run.result(30) == "seen late"
    await engine.close()


@pytest.mark.live_only
@pytest.mark.one_store
async def test_verify_that_times_out_leaves_the_doubt(world, effects, monkeypatch):
    monkeypatch.setattr(doubt, "VERIFY_SECONDS", 0.01)
    answered = threading.Event()
    engine, run = await Launch(effects, verify=lambda name: answered.wait(60)).crash_while_under_way(
        world, linger_seconds=60
    )
    await in_doubt(engine)
    answered.set()
    await run.resolve("launch#1", "result", "asked")
    assert await run.result(30) == "asked"
    await engine.close()


async def test_invalid_verify_answer_sets_the_run_aside(world, effects):
    engine, run = await Launch(effects, verify=lambda name: "yes").crash_while_under_way(world)
    with pytest.raises(ks.RunSetAside, match=r"ks\.Done"):
        await run.result(30)
    assert effects == ["rocket"]
    await engine.close()


async def test_timed_out_step_is_left_in_doubt(world, effects):
    """A timeout leaves the same doubt as a crash."""
    launch = Launch(effects, timeout=0.03)
    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(launch.workflow, run_id="r")
        await in_doubt(engine)
        launch.hold = False
        await run.resolve("launch#1", "again")
        assert await run.result(30) == "rocket is up"
    assert effects == ["rocket", "rocket"]


@pytest.mark.live_only
@pytest.mark.parametrize("ends", [True, False], ids=["it happens", "it fails"])
async def test_verify_is_asked_again_when_the_thread_that_timed_out_has_returned(world, effects, ends):
    """While the body is in its thread, `verify=` may say that it has not happened, and yet it happens."""
    released, asked = threading.Event(), []

    def verify():
        asked.append(list(effects))
        released.set()
        return ks.Done("verified") if "happened" in effects else ks.NotDone()

    @ks.step(at_most_once=True, timeout=0.03, verify=verify)
    def launch():
        effects.append("began")
        if len(effects) > 1:
            return "second"
        released.wait(60)
        time.sleep(0.05)
        if ends:
            effects.append("happened")
        return "too late"

    @ks.workflow
    async def mission():
        return await launch()

    async with world.engine() as engine:
        assert await (await engine.start(mission)).result(30) == ("verified" if ends else "second")
    assert effects == ["began", "happened" if ends else "began"]
    assert asked == [["began"], effects[: 1 + ends]]


@pytest.mark.live_only
async def test_again_waits_for_the_thread_that_timed_out(world, effects):
    released = threading.Event()

    @ks.step(at_most_once=True, timeout=0.03)
    def launch():
        effects.append("began")
        if not released.is_set():
            released.wait(60)
            effects.append("ended")
        return "up"

    @ks.workflow
    async def mission():
        return await launch()

    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(mission, run_id="r")
        await in_doubt(engine)
        await run.resolve("launch#1", "again")
        await until(lambda: _was_started_twice(run))
        assert effects == ["began"], "the second body began while the first was still in its thread"
        released.set()
        assert await run.result(30) == "up"
    assert effects == ["began", "ended", "began"]


async def _was_started_twice(run):
    return len(await steps_of(run, "step started")) == 2


async def test_error_of_the_body_leaves_no_doubt(world, effects):
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


async def test_cancel_after_a_crash_asks_verify(world, effects):
    asked = []

    def verify(name):
        asked.append(name)
        return ks.Done("seen")

    _, told, error, _ = await cancelled_after_a_crash(Launch(effects, verify=verify), world)
    assert (asked[:1], effects) == (["rocket"], ["rocket"])
    assert told == [("step started", None), ("step completed", None)]
    assert error is None


async def test_cancel_after_a_crash_does_not_perform_an_undone_step(world, effects):
    _, told, error, _ = await cancelled_after_a_crash(Launch(effects, verify=lambda name: ks.NotDone), world)
    assert effects == ["rocket"]
    assert told == [("step started", None), ("step cancelled", None)]
    assert error is None


@pytest.mark.parametrize("options", [{}, {"verify": lambda name: None}], ids=["no verify", "does not know"])
async def test_cancel_after_a_crash_reports_the_doubt(world, effects, options):
    message, told, error, entry = await cancelled_after_a_crash(Launch(effects, **options), world)
    assert effects == ["rocket"]
    assert told == [("step started", None), ("step cancelled", "ks:in-doubt")]
    said = "step 'launch#1' was under way when the run was cancelled: may or may not have happened"
    assert said in message
    assert error.message == said
    assert said in entry.reason


async def test_cancel_ends_a_run_that_does_not_reach_its_step(world, effects, monkeypatch):
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


async def test_forced_cancel_reports_the_doubt(world, effects):
    launch = Launch(effects)
    engine = await world.started()
    await engine.start(launch.workflow, run_id="r")
    await launch.began.wait()
    await world.crash(engine)
    async with world.engine(worker=False) as other:
        await cancel_now(other, "r", "nobody left", "ann")
        assert "'launch#1' was under way" in (await (await other.get("r")).run()).error.message


def test_options_for_doubt_need_an_at_most_once_step():
    with pytest.raises(ks.DefinitionError, match="in_doubt=, which only an at_most_once step needs"):
        ks.step(in_doubt="fail")(lambda: None)
    with pytest.raises(ks.DefinitionError, match="'ask', 'fail' or 'repeat', not 'never'"):
        ks.step(at_most_once=True, in_doubt="never")(lambda: None)
    with pytest.raises(ks.DefinitionError, match="verify"):
        ks.step(verify=lambda: None)(lambda: None)


async def test_failed_attempt_is_repeated_with_a_mark_of_its_own(world, effects):
    @ks.step(at_most_once=True, retry=ks.Retry(attempts=3, base_seconds=0.0))
    async def launch():
        effects.append(ks.attempt())
        if len(effects) < 3:
            raise ConnectionError("the pad is not free")
        return "up"

    @ks.workflow
    async def mission():
        return await launch()

    async with world.engine() as engine:
        run = await engine.start(mission)
        assert await run.result(30) == "up"
        found = [(one.kind.value, one.attempt) for one in await run.checkpoints() if one.step == "launch#1"]
    assert effects == [1, 2, 3]
    assert found == [
        ("step started", 1),
        ("step failed", 1),
        ("step started", 2),
        ("step failed", 2),
        ("step started", 3),
        ("step completed", 3),
    ]


async def test_crash_during_a_second_attempt_leaves_doubt(world, effects):
    began = asyncio.Event()

    @ks.step(at_most_once=True, retry=ks.Retry(attempts=3, base_seconds=0.0))
    async def launch():
        effects.append(ks.attempt())
        if len(effects) == 1:
            raise ConnectionError("the pad is not free")
        began.set()
        await asyncio.sleep(60)

    @ks.workflow
    async def mission():
        return await launch()

    engine = await world.started()
    await engine.start(mission, run_id="r")
    await began.wait()
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await in_doubt(engine)
    await (await engine.get("r")).resolve("launch#1", "result", "seen")
    assert await (await engine.get("r")).result(30) == "seen"
    assert effects == [1, 2]
    await engine.close()


async def test_crash_during_the_backoff_leaves_no_doubt(world, effects):
    @ks.step(at_most_once=True, retry=ks.Retry(attempts=2, base_seconds=0.3, jitter=0.0))
    async def launch():
        effects.append(ks.attempt())
        if ks.attempt() == 1:
            raise ConnectionError("the pad is not free")
        return "up"

    @ks.workflow
    async def mission():
        return await launch()

    engine = await world.started()
    await engine.start(mission, run_id="r")
    await until(lambda: effects == [1])
    run = await engine.get("r")

    async def has_failed():  # the start mark is a record of the step, too
        return await steps_of(run, "step failed")

    await until(has_failed)
    engine = await world.crash_and_recover(engine)
    assert await (await engine.get("r")).result(30) == "up"
    assert effects == [1, 2]
    await engine.close()


async def test_cancel_during_the_backoff_does_not_wait_for_the_next_attempt(world, effects):
    @ks.step(at_most_once=True, retry=ks.Retry(attempts=2, base_seconds=3600.0, cap_seconds=3600.0, jitter=0.0))
    async def launch():
        effects.append("try")
        raise ConnectionError("the pad is not free")

    @ks.workflow
    async def mission():
        return await launch()

    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(mission, run_id="r")
        await until(lambda: effects == ["try"])
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(30)
    assert effects == ["try"]


async def test_doubt_fails_the_step_if_its_policy_says_so(world, effects):
    engine, run = await Launch(effects, in_doubt="fail").crash_while_under_way(world)
    assert await run.result(30) == "in doubt: launch#1"
    assert effects == ["rocket"]
    await engine.close()


async def test_doubt_repeats_the_step_if_its_policy_says_so(world, effects):
    engine, run = await Launch(effects, in_doubt="repeat").crash_while_under_way(world)
    assert await run.result(30) == "rocket is up"
    assert effects == ["rocket", "rocket"]
    await engine.close()


async def test_verify_answers_before_the_policy_for_doubt(world, effects):
    launch = Launch(effects, in_doubt="repeat", verify=lambda name: ks.Done("verified"))
    engine, run = await launch.crash_while_under_way(world)
    assert await run.result(30) == "verified"
    assert effects == ["rocket"]
    await engine.close()


async def test_repeated_timeouts_are_limited_by_the_retry_policy(world, effects):
    retry = ks.Retry(attempts=3, backoff="immediate")

    @ks.step(at_most_once=True, in_doubt="repeat", timeout=0.02, retry=retry)
    async def late():
        effects.append("late")
        await asyncio.sleep(60)

    @ks.workflow
    async def flow():
        try:
            await late()
        except ks.StepTimedOut:
            return "too late"

    async with world.engine() as engine:
        assert await (await engine.start(flow)).result(30) == "too late"
    assert effects == ["late"] * 3


@pytest.mark.parametrize("once, expected", [(True, "StepInDoubt"), (False, "StepFailed")])
async def test_body_that_does_not_know_leaves_doubt(world, effects, once, expected):
    @ks.step(at_most_once=once, in_doubt="fail" if once else None, retry=ks.Retry(attempts=2, base_seconds=0))
    async def pay():
        effects.append("paid")
        raise ks.StepInDoubt("no answer came")

    @ks.workflow
    async def order():
        try:
            await pay()
        except ks.StepError as error:
            return type(error).__name__

    async with world.engine() as engine:
        assert await (await engine.start(order)).result(30) == expected
    assert len(effects) == (1 if once else 2)
