"""What a checkpoint keeps of a step, of a failed attempt and of its error (A1, A7, A8, A10)."""

import errno
import itertools
from datetime import UTC

import msgspec
import pytest

import keepstep as ks


class Busy(Exception):
    """What an HTTP library raises."""

    status_code = 503


@pytest.mark.on_postgres
async def test_error_keeps_type_message_class_code_and_traceback(world, effects):
    errors = [OSError(errno.ECONNREFUSED, "nobody listens"), Busy("too many"), ValueError("no number")]

    @ks.step(retry=ks.Retry(attempts=3, base_seconds=0, on=(Exception,)))
    async def unlucky():
        raise errors[min(len(effects), 2)]

    def count():
        effects.append("tried")

    @ks.step(retry=ks.Retry(attempts=3, base_seconds=0, on=(Exception,)))
    async def counted():
        try:
            await unlucky.fn()
        finally:
            count()

    @ks.workflow
    async def failing():
        await counted()

    async with world.engine() as engine:
        run = await engine.start(failing)
        with pytest.raises(ks.RunFailed) as caught:
            await run.result(30)
        failed = [one for one in await run.checkpoints() if one.kind == "step failed"]
        assert [one.outcome for one in failed] == ["failure"] * 3
    told = [one.error for one in failed]
    assert [one.attempt for one in failed] == [one.attempt for one in told] == [1, 2, 3]
    assert [one.type.rpartition(".")[2] for one in told] == ["ConnectionRefusedError", "Busy", "ValueError"]
    assert [one.message for one in told] == ["[Errno 111] nobody listens", "too many", "no number"]
    assert [one.error_class for one in told] == ["network", "transient", "validation"]
    assert [one.code for one in told] == ["111", "503", None]
    assert all("in unlucky\n" in one.traceback and one.message in one.traceback for one in told), "not the whole way"
    ids = [*(one.id for one in told), caught.value.error.id]
    assert len(set(ids)) == 4
    assert all(ids)


@pytest.mark.live_only
@pytest.mark.parametrize("output", [None, 0, False, "", []])
async def test_falsy_output_is_recorded_as_it_is(world, effects, output):
    @ks.step
    async def gives():
        effects.append("gave")
        return output

    @ks.workflow
    async def giving(asked: dict):
        got = await gives()
        await ks.wait_for("go")
        return got

    asked = {"who": "ann", "times": [1, 2]}
    async with world.engine() as engine:
        run = await engine.start(giving, asked, run_id="r")
        asked["times"].append(3)
        await run.signal("go")
        got = await run.result(30)
        worker = engine.worker.id
        records, stored = await run.checkpoints(), await run.run()
    assert (got, type(got)) == (output, type(output))
    assert effects == ["gave"]
    assert [one.seq for one in records] == list(range(1, len(records) + 1))
    assert all(after.previous == before.checksum for before, after in itertools.pairwise(records))
    [done] = [one for one in records if one.kind == "step completed"]
    assert (done.run, done.step, done.outcome, done.attempt, done.error) == ("r", "gives#1", "success", 1, None)
    assert (done.worker, done.trigger) == (worker, "automatic")
    assert done.started_at.tzinfo is done.finished_at.tzinfo is UTC
    assert done.started_at <= done.finished_at
    if not world.encrypted:
        assert msgspec.json.decode(done.value) == output
        assert msgspec.json.decode(stored.input) == [[{"who": "ann", "times": [1, 2]}], {}]
