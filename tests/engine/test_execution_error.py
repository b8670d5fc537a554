"""Where a graph or dag failed: what the code raises and what `result()` raises later name the same step (C15)."""

import pytest

import keepstep as ks


@ks.step
async def draft():
    return "text"


@ks.step
async def publish():
    raise ValueError("no such page")


@ks.workflow
async def walking(length):
    await draft()
    try:
        await publish()
    except ks.StepFailed as failure:
        path = ["draft"] * length
        raise ks.ExecutionError(
            "the graph 'walking' failed at publish#1", step=failure.step, path=path, state={"text": "text"}
        ) from failure


def test_fields_are_empty_by_default():
    error = ks.ExecutionError("it failed")
    assert (error.step, error.path, dict(error.state), error.run_id, error.error) == ("", (), {}, "", None)
    assert isinstance(error, ks.RunFailed)


async def test_failed_graph_says_where(world):
    async with world.engine() as engine:
        run = await engine.start(walking, 3, run_id="r")
        with pytest.raises(ks.RunFailed) as live:
            await run.result(30)
    async with world.engine() as engine:
        with pytest.raises(ks.ExecutionError) as later:
            await (await engine.get("r")).result(30)
    for caught in (live.value, later.value):
        assert (caught.step, caught.path, caught.run_id) == ("publish#1", ("draft",) * 3, "r")
        assert "the graph 'walking' failed at publish#1" in str(caught)
        assert "no such page" in caught.error.traceback
        assert caught.error.caused_by  # so that a retry takes the failure back


async def test_retry_goes_on_from_the_step_that_failed(world, effects):
    @ks.step(name="publish")
    async def published():
        effects.append("publish")
        if len(effects) == 1:
            raise ValueError("once")
        return "there"

    @ks.workflow(name="walking")
    async def mended(length):
        await draft()
        try:
            return await published()
        except ks.StepFailed as failure:
            raise ks.ExecutionError("it failed", step=failure.step) from failure

    async with world.engine(workflows=[mended]) as engine:
        run = await engine.start(mended, 1, run_id="r")
        with pytest.raises(ks.ExecutionError):
            await run.result(30)
        await run.retry()
        assert await run.result(30) == "there"
    assert effects == ["publish", "publish"]


async def test_long_path_is_cut_to_100_steps(world):
    async with world.engine() as engine:
        run = await engine.start(walking, 5000)
        with pytest.raises(ks.ExecutionError) as caught:
            await run.result(30)
        assert len(caught.value.path) == 100
