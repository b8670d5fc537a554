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


async def test_step_without_retry_is_tried_once(world, effects):
    async with world.engine() as engine:
        run = await engine.start(failures_then(effects, 1))
        with pytest.raises(ks.RunFailed, match="number 1"):
            await run.result(30)
    assert len(effects) == 1


@pytest.mark.parametrize("attempts", [2, 3])
async def test_attempts_include_the_first(world, effects, attempts):
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


async def test_success_keeps_the_failed_attempts(world, effects):
    async with world.engine() as engine:
        run = await engine.start(failures_then(effects, 2, retry=ks.Retry(attempts=3, base_seconds=0.001)))
        assert await run.result(30) == 3
        assert [one.attempt for one in await run.checkpoints(failed=True)] == [1, 2]
        assert next(one for one in await run.checkpoints() if one.kind.value == "step completed").attempt == 3


async def test_attempt_count_survives_a_crash(world, effects):
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


async def test_long_backoff_parks_the_run(world, effects):
    workflow = failures_then(effects, 1, retry=ks.Retry(attempts=2, base_seconds=20, cap_seconds=3600))
    async with world.engine() as engine:
        run = await engine.start(workflow, run_id="r")
        await until_status(run, "waiting")
        row = await run.run()
        assert 15 < (row.due_at - effects[0]).total_seconds() < 25
        await until(lambda: not engine.live)


async def test_permanent_error_is_not_retried(world, effects):
    workflow = failures_then(effects, 1, ks.Permanent, retry=ks.Retry(attempts=5, base_seconds=0))
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="failed after 1 attempt"):
            await (await engine.start(workflow)).result(30)
    assert len(effects) == 1


async def test_retry_after_is_honoured(world, effects):
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=300, cap_seconds=300))
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
    assert 0.04 < (effects[1] - effects[0]).total_seconds() < 250


async def test_gather_waits_for_a_retried_step(world, effects):
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


async def test_slow_attempt_times_out(world, effects):
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


async def test_step_timeout_ends_its_attempts(world, effects):
    workflow = failures_then(
        effects, 1000, retry=ks.Retry(attempts=1000, base_seconds=0.02, factor=1), timeout=ks.Timeout(step_seconds=0.15)
    )
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed):
            await (await engine.start(workflow)).result(30)
    assert 2 <= len(effects) <= 10


async def test_step_timeout_survives_a_crash(world, effects):
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


async def test_timeout_error_of_the_body_is_a_plain_failure(world):
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


async def test_cancelled_error_of_a_body_fails_only_the_step(world, effects):
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


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize("attempts", [1, 2])
async def test_body_that_fails_after_it_cancelled_its_task_is_a_plain_failure(world, effects, attempts):
    hooks = ks.Hooks(error=lambda occasion: effects.append(type(occasion.error).__name__))

    @ks.step(retry=ks.Retry(attempts=attempts, base_seconds=0.01), hooks=hooks)
    async def straying():
        if not effects:
            asyncio.current_task().cancel()
            raise ConnectionError("gone")
        return "second"

    @ks.workflow
    async def trying():
        try:
            return await straying()
        except ks.StepFailed as failure:
            return failure.error.message

    async with world.engine() as engine:
        assert await (await engine.start(trying)).result(10) == ["gone", "second"][attempts - 1]
    assert effects == ["ConnectionError"]


@pytest.mark.parametrize("where", ["step", "sleep", "wait", "backoff", "code"])
async def test_deadline_ends_the_run_and_lets_it_clean_up(world, effects, where):
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


async def test_deadline_survives_a_crash(world):
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
async def test_parked_run_is_due_by_its_deadline(world, sleep_seconds, first):
    @ks.workflow
    async def late():
        await (ks.wait_for("never") if sleep_seconds is None else ks.sleep(sleep_seconds))

    async with world.engine() as engine:
        run = await engine.start(late, deadline=3600)
        await until_status(run, "waiting")
        stored = await run.run()
    assert (stored.due_at == stored.deadline_at) is (first == "deadline")
    assert stored.due_at <= stored.deadline_at


async def test_cleanup_after_a_deadline_survives_a_recovery(world, effects):
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
            await run.result(timeout=60)
    assert effects == ["up"]


async def test_deadline_passed_without_a_worker_ends_the_run(world, effects):
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


async def test_idempotency_key_is_stable_over_attempts_and_crashes(world, effects):
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


@pytest.mark.one_store
async def test_rules_of_step_workflow_and_engine_class_an_error_in_this_order(world, effects):
    """The class decides about the retry: the table never repeats what is permanent."""

    def says(found, *kinds):
        return lambda error: found if isinstance(error, kinds) else None

    policy = ks.Retry.by_class(ks.policies.ClassRetry("transient", attempts=2, base_seconds=0))

    @ks.step(retry=policy, classify=says("transient", KeyError))
    async def work(kind):
        effects.append(kind)
        raise {"key": KeyError, "index": IndexError, "value": ValueError, "type": TypeError}[kind]("x")

    @ks.workflow(name="classed", classify=[says("transient", IndexError), says("permanent", KeyError)])
    async def classed(kind):
        await work(kind)

    rules = says("transient", ValueError, IndexError)
    async with world.engine(classify=rules) as engine:
        found = {}
        for kind in ("key", "index", "value", "type"):
            with pytest.raises(ks.RunFailed) as info:
                await (await engine.start(classed, kind)).result()
            found[kind] = info.value.error.error_class
    assert {kind: effects.count(kind) for kind in found} == {"key": 2, "index": 2, "value": 2, "type": 1}
    assert found == {"key": "transient", "index": "transient", "value": "transient", "type": "validation"}
