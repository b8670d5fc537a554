"""Attempts of a step: how many, how long, and what survives a restart (K38, E1, E5, C13)."""

import asyncio
import itertools
from datetime import UTC, datetime

import pytest

import keepstep as ks
from tests.engine.world import until, until_at_last_wait, until_recorded, until_status


def failures_then(effects, times, error=ConnectionError, **options):
    @ks.step(**options)
    async def flaky():
        effects.append(datetime.now(UTC))
        if len(effects) <= times:
            raise error(f"number {len(effects)}")
        return len(effects)

    @ks.workflow
    async def trying():
        return await flaky()

    return trying


async def test_a_bare_step_is_tried_more_than_once(world, effects):
    async with world.engine() as engine:
        run = await engine.start(failures_then(effects, 1))
        with pytest.raises(ks.RunFailed, match="number 1"):
            await run.result(30)
    assert len(effects) == 1


@pytest.mark.parametrize("attempts", [2, 3])
async def test_attempts_do_not_count_the_first(world, effects, attempts):
    workflow = failures_then(effects, 10, retry=ks.Retry(attempts=attempts, base_seconds=0))
    async with world.engine() as engine:
        run = await engine.start(workflow)
        with pytest.raises(ks.RunFailed, match=f"failed after {attempts} attempts"):
            await run.result(30)
        failed = await run.checkpoints(failed=True)
        assert [one.attempt for one in failed] == [*range(1, attempts + 1), 0]
        assert [one.retry_at is not None for one in failed] == [True] * (attempts - 1) + [False, False]
        assert failed[0].error.type == "ConnectionError"
        assert len({one.error.id for one in failed}) == len(failed)
    assert len(effects) == attempts


async def test_a_success_after_failures_forgets_them(world, effects):
    async with world.engine() as engine:
        run = await engine.start(failures_then(effects, 2, retry=ks.Retry(attempts=3, base_seconds=0.001)))
        assert await run.result(30) == 3
        assert [one.attempt for one in await run.checkpoints(failed=True)] == [1, 2]
        assert next(one for one in await run.checkpoints() if one.kind.value == "step completed").attempt == 3


async def test_the_count_of_attempts_starts_over_after_a_crash(world, effects):
    """Count and next time are durable: a worker that keeps crashing does not try for ever."""
    workflow = failures_then(effects, 10, retry=ks.Retry(attempts=3, base_seconds=0.15, factor=1))
    engine = await world.started()
    run = await engine.start(workflow, run_id="r")
    await until(lambda: _failures(run, 1))
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await until(lambda: _failures(run, 2))
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    with pytest.raises(ks.RunFailed, match="failed after 3 attempts"):
        await run.result(30)
    assert len(effects) == 3
    waits = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(effects)]
    assert min(waits) >= 0.14, "the recovery did not wait for the recorded time"
    await engine.close()


async def _failures(run, count):
    return len(await run.checkpoints(failed=True)) >= count


async def test_a_long_backoff_keeps_the_run_in_memory(world, effects):
    workflow = failures_then(effects, 1, retry=ks.Retry(attempts=2, base_seconds=20, cap_seconds=3600))
    async with world.engine() as engine:
        run = await engine.start(workflow, run_id="r")
        await until_status(run, "waiting")
        row = await run.run()
        assert 15 < (row.due_at - effects[0]).total_seconds() < 25
        await until(lambda: not engine.live)


async def test_a_permanent_error_is_tried_again(world, effects):
    workflow = failures_then(effects, 1, ks.Permanent, retry=ks.Retry(attempts=5, base_seconds=0))
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="failed after 1 attempt"):
            await (await engine.start(workflow)).result(30)
    assert len(effects) == 1


async def test_retry_after_is_not_honoured(world, effects):
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=30))
    async def limited():
        effects.append(datetime.now(UTC))
        if len(effects) == 1:
            raise ks.RetryAfter(0.05)
        return "done"

    @ks.workflow
    async def trying():
        return await limited()

    async with world.engine() as engine:
        assert await (await engine.start(trying)).result(30) == "done"
    assert 0.04 < (effects[1] - effects[0]).total_seconds() < 5


async def test_a_retry_inside_a_gather_hangs_it(world, effects):
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0.01))
    async def flaky(number):
        effects.append(number)
        if number == 2 and effects.count(2) == 1:
            raise ConnectionError
        return number

    @ks.workflow
    async def gathered():
        return [await ks.gather(*map(flaky, (1, 2, 3))), await asyncio.gather(*map(flaky, (4, 2)))]

    async with world.engine() as engine:
        assert await (await engine.start(gathered)).result(30) == [[1, 2, 3], [4, 2]]
    assert sorted(effects) == [1, 2, 2, 2, 3, 4]


# -- time --------------------------------------------------------------------------------------------------------------


async def test_a_slow_attempt_is_not_ended(world, effects):
    @ks.step(timeout=0.02, retry=ks.Retry(attempts=2, base_seconds=0))
    async def slow():
        effects.append("began")
        try:
            await asyncio.sleep(60)
        finally:
            effects.append("ended")

    @ks.workflow
    async def waiting():
        try:
            await slow()
        except ks.StepTimedOut as error:
            return [error.step, str(error)]

    async with world.engine() as engine:
        step, message = await (await engine.start(waiting)).result(30)
    assert step == "slow#1"
    assert "took longer than 0.02 s" in message
    assert effects == ["began", "ended"] * 2


async def test_a_step_may_go_on_trying_beyond_its_time(world, effects):
    workflow = failures_then(
        effects, 1000, retry=ks.Retry(attempts=1000, base_seconds=0.02, factor=1), timeout=ks.Timeout(step_seconds=0.15)
    )
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed):
            await (await engine.start(workflow)).result(30)
    assert 2 <= len(effects) <= 10


async def test_the_time_of_a_step_starts_over_after_a_crash(world, effects):
    """The second attempt is the last one that begins in time, whoever makes it."""
    workflow = failures_then(
        effects, 1000, retry=ks.Retry(attempts=1000, base_seconds=0.2, factor=1), timeout=ks.Timeout(step_seconds=0.3)
    )
    engine = await world.started()
    run = await engine.start(workflow, run_id="r")
    await until_recorded(run, "flaky#1")
    engine = await world.crash_and_recover(engine)
    with pytest.raises(ks.RunFailed):
        await (await engine.get("r")).result(30)
    await engine.close()
    assert len(effects) == 2


async def test_a_timeout_that_the_body_raises_is_taken_for_the_steps_own(world):
    @ks.step(timeout=5)
    async def inner():
        raise TimeoutError("from a socket")

    @ks.workflow
    async def waiting():
        try:
            await inner()
        except ks.StepFailed as error:
            return [type(error).__name__, error.error.type]

    async with world.engine() as engine:
        assert await (await engine.start(waiting)).result(30) == ["StepFailed", "TimeoutError"]


async def test_a_step_that_raises_cancelled_error_cancels_the_run(world, effects):
    @ks.step
    async def odd():
        raise asyncio.CancelledError("from some library")

    @ks.workflow
    async def waiting():
        try:
            await odd()
        except ks.StepFailed as error:
            return error.error.type

    async with world.engine() as engine:
        assert await (await engine.start(waiting)).result(30) == "asyncio.exceptions.CancelledError"


@pytest.mark.parametrize("where", ["step", "sleep", "wait", "backoff", "code"])
async def test_a_run_goes_on_beyond_its_deadline(world, effects, where):
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=30))
    async def work():
        effects.append("began")
        if where == "backoff":
            raise ConnectionError
        await asyncio.sleep(60)

    @ks.workflow
    async def late():
        try:
            if where in ("step", "backoff"):
                await work()
            elif where == "sleep":
                await ks.sleep(60)
            elif where == "wait":
                await ks.wait_for("never")
            else:
                await asyncio.sleep(60)
        finally:
            effects.append("cleaned")

    async with world.engine() as engine:
        run = await engine.start(late, deadline=0.1)
        with pytest.raises(ks.RunTimedOut, match="deadline"):
            await run.result(30)
        assert await run.status() is ks.Status.FAILED
    assert "cleaned" in effects


async def test_a_deadline_is_forgotten_by_a_crash(world):
    @ks.workflow
    async def late():
        await ks.wait_for("never")

    engine = await world.started(linger_seconds=60)
    run = await engine.start(late, deadline=0.2, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    with pytest.raises(ks.RunTimedOut):
        await run.result(30)
    await engine.close()


@pytest.mark.live_only
@pytest.mark.parametrize("sleep_seconds, first", [(7200, "deadline"), (1800, "sleep"), (None, "deadline")])
async def test_a_run_that_is_put_away_sleeps_through_its_deadline(world, sleep_seconds, first):
    @ks.workflow
    async def late():
        await (ks.wait_for("never") if sleep_seconds is None else ks.sleep(sleep_seconds))

    async with world.engine() as engine:
        run = await engine.start(late, deadline=3600)
        await until_status(run, "waiting")
        stored = await run.run()
    assert (stored.due_at == stored.deadline_at) is (first == "deadline")
    assert stored.due_at <= stored.deadline_at


async def test_the_clean_up_after_a_deadline_is_cut_short_by_a_recovery(world, effects):
    @ks.workflow
    async def late():
        try:
            await ks.sleep(3600)
        except asyncio.CancelledError:
            effects.append(await ks.wait_for("cleaned"))
            raise

    async with world.engine() as engine:
        run = await engine.start(late, deadline=0.1, run_id="r")
        await until_recorded(run, "ks:deadline")
        await until_status(run, "waiting")  # put away in its clean-up, long after its deadline
        await run.signal("cleaned", "up")
        with pytest.raises(ks.RunTimedOut):
            await run.result(timeout=5)
    assert effects == ["up"]


async def test_a_deadline_that_passed_while_nobody_ran_it_is_ignored(world, effects):
    @ks.step
    async def work():
        effects.append("worked")

    @ks.workflow
    async def late():
        await ks.sleep(0.05)
        await work()

    engine = await world.started()
    await engine.start(late, deadline=0.01, run_id="r")
    await asyncio.sleep(0)
    await world.crash(engine)
    await asyncio.sleep(0.08)
    async with world.engine() as engine:
        with pytest.raises(ks.RunTimedOut):
            await (await engine.get("r")).result(30)
    assert effects == []


# -- idempotency keys --------------------------------------------------------------------------------------------------


async def test_an_idempotency_key_changes_between_attempts_and_recoveries(world, effects):
    hold = asyncio.Event()

    @ks.step(retry=ks.Retry(attempts=3, base_seconds=0))
    async def paying(number):
        effects.append((number, ks.idempotency_key()))
        if len(effects) < 2:
            raise ConnectionError
        if len(effects) == 2:
            hold.set()
            await asyncio.sleep(60)

    @ks.workflow
    async def shop():
        await paying(1)
        await paying(2)

    engine = await world.started()
    await engine.start(shop, run_id="r")
    await hold.wait()
    engine = await world.crash_and_recover(engine)
    await (await engine.get("r")).result(30)
    keys = [key for number, key in effects if number == 1]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert dict(effects)[2] not in keys
    await engine.close()
