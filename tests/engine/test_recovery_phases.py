"""The phases of a recovery on damaged, missing and foreign input: each has its error, and no body runs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import apsw
import pytest

import keepstep as ks
from keepstep import errors
from keepstep.errors import StoreUnavailable
from keepstep.model import Kind
from tests.engine.world import until, until_status

BODIES = []


@ks.step
async def first(number):
    BODIES.append("first")
    return number


@ks.step
async def second(number):
    BODIES.append("second")
    return number


@dataclass
class Parcel:
    weight: int


@ks.workflow(name="phases")
async def phases(parcel: Parcel):
    number = await first(parcel.weight)
    await ks.wait_for("go")
    return await second(number)


async def parked(path, workflow=phases, *args):
    """Leave a parked run of two steps, the first of which is done, and a signal that wakes it."""
    BODIES.clear()
    async with ks.open(path, workflows=[workflow], linger_seconds=0.01) as engine:
        run = await engine.start(workflow, *(args or (Parcel(7),)), run_id="r")
        await until_status(run, "waiting")
        await run.signal("go")


def damaged(path, *statements):
    database = apsw.Connection(str(path))
    for statement in statements:
        database.execute(statement)
    database.close()


async def refusal(path, workflow=phases, **options):
    """Let a worker take the run up; return the error that sets it aside. No body may run."""
    async with ks.open(path, workflows=[workflow], **options) as engine:
        run = await engine.get("r")
        with pytest.raises(ks.RunSetAside) as refused:
            await run.result(30)
        assert BODIES == ["first"]
        assert isinstance(refused.value.__cause__, errors.RecoveryError)
        return refused.value.__cause__


RECORD = "UPDATE keepstep_checkpoint SET record = replace(record, {!r}, {!r}) WHERE seq = {}"


@pytest.mark.parametrize(
    "damage",
    [
        RECORD.format('"step":"first#1"', '"step":"other#1"', 2),
        "DELETE FROM keepstep_checkpoint WHERE seq = 2",
        "DELETE FROM keepstep_checkpoint",
        "UPDATE keepstep_checkpoint SET record = 'nonsense' WHERE seq = 1",
        "UPDATE keepstep_checkpoint SET record = (SELECT record FROM keepstep_checkpoint WHERE seq = 1) WHERE seq = 2",
        "UPDATE keepstep_signal SET payload = 'false' WHERE name = 'go'",
    ],
)
async def test_damaged_or_missing_records_fail_the_load(tmp_path, damage):
    await parked(tmp_path / "runs.db")
    damaged(tmp_path / "runs.db", damage)
    error = await refusal(tmp_path / "runs.db")
    assert (type(error), error.kind) == (errors.LoadFailed, "CheckpointCorrupt")


async def test_records_of_another_run_fail_the_load(tmp_path):
    path = tmp_path / "runs.db"
    async with ks.open(path, workflows=[phases], linger_seconds=0.01) as engine:
        other = await engine.start(phases, Parcel(8), run_id="other")
        await until_status(other, "waiting")
    await parked(path)
    foreign = "SELECT record FROM keepstep_checkpoint WHERE run = 'other' AND seq = 2"
    damaged(path, f"UPDATE keepstep_checkpoint SET record = ({foreign}) WHERE run = 'r' AND seq = 2")
    assert type(await refusal(path)) is errors.LoadFailed


async def test_changed_definition_fails_the_validation(tmp_path):
    await parked(tmp_path / "runs.db")
    changed = ks.workflow(name="phases", version="2")(phases.fn)
    error = await refusal(tmp_path / "runs.db", changed)
    assert (type(error), error.kind, error.phase) == (errors.ValidationFailed, "DefinitionChanged", "validate")


async def test_input_that_no_longer_fits_fails_the_rebuild(tmp_path):
    await parked(tmp_path / "runs.db")

    @ks.workflow(name="phases")
    async def narrower(parcel: int):
        return await second(await first(parcel))

    error = await refusal(tmp_path / "runs.db", narrower)
    assert type(error) is errors.RebuildFailed
    assert "input cannot be restored" in str(error)


async def test_migration_that_fails_fails_the_rebuild(tmp_path):
    await parked(tmp_path / "runs.db")

    def migrate(info):
        raise LookupError("no way")

    changed = ks.workflow(name="phases", version="2", migrate=migrate)(phases.fn)
    error = await refusal(tmp_path / "runs.db", changed)
    assert (type(error), error.kind) == (errors.RebuildFailed, "MigrationFailed")


async def test_code_that_asks_otherwise_fails_the_resumption(tmp_path):
    await parked(tmp_path / "runs.db")

    @ks.workflow(name="phases")
    async def other(parcel: Parcel):
        return await second(parcel.weight)

    error = await refusal(tmp_path / "runs.db", other)
    assert (type(error), error.kind) == (errors.ResumeFailed, "ReplayMismatch")


async def test_request_that_was_tampered_with_fails_the_load(tmp_path):
    """A handler is asked only if the chain says that a person has asked for it."""
    path = tmp_path / "runs.db"
    await parked(path)
    async with ks.open(path, worker=False) as engine:
        await (await engine.get("r")).recover("continue")
    damaged(path, "UPDATE keepstep_checkpoint SET record = replace(record, 'continue', 'restart')")
    assert type(await refusal(path)) is errors.LoadFailed


async def test_request_with_a_foreign_value_is_refused_before_a_body_runs(tmp_path):
    path = tmp_path / "runs.db"
    BODIES.clear()

    @ks.step
    async def count() -> int:
        BODIES.append("first")
        raise ks.Permanent("broken")

    @ks.workflow(name="counting")
    async def counting():
        return await count() + 1

    async with ks.open(path, workflows=[counting]) as engine:
        run = await engine.start(counting, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        await run.recover("skip step", value={"no": "number"})
        with pytest.raises(ks.RunSetAside, match="cannot be its result"):
            await run.result(30)
        assert BODIES == ["first"]
        await run.recover("skip step", value=4)
        assert await run.result(30) == 5


# -- the surroundings of a recovery ------------------------------------------------------------------------------------


@pytest.mark.one_store
@pytest.mark.live_only
async def test_store_that_fails_during_a_recovery_delays_it_and_loses_nothing(world, monkeypatch):
    """An error of the store in the loop of recoveries is neither swallowed nor taken for a failure of the run."""
    begun = asyncio.Event()

    @ks.step
    async def slow():
        begun.set()
        await asyncio.sleep(0.05)
        return 1

    def decide(info):
        return "continue"

    @ks.workflow(recovery=decide)
    async def working():
        return await slow()

    engine = await world.started()
    await engine.start(working, run_id="r")
    await begun.wait()
    await world.crash(engine)
    store, failures = world._memory, []
    listed = store.list_checkpoints

    def failing(*args, **kwargs):
        if len(failures) < 2:
            failures.append(1)
            raise StoreUnavailable("the database restarts")
        return listed(*args, **kwargs)

    monkeypatch.setattr(store, "list_checkpoints", failing)
    engine = await world.started()
    assert await (await engine.get("r")).result(60) == 1
    assert await (await engine.get("r")).status() == "completed"
    await engine.close()


@pytest.mark.one_store
@pytest.mark.live_only
async def test_recovery_of_many_runs_reaches_the_last(world):
    """Runs behind a full page of others are taken over, too."""
    begun = []

    @ks.step
    async def slow(number):
        begun.append(number)
        if len(begun) <= 250:
            await asyncio.Event().wait()
        return number

    @ks.workflow(recovery="retry step")
    async def one_of_many(number):
        return await slow(number)

    engine = await world.started()
    for number in range(250):
        await engine.start(one_of_many, number, run_id=f"r{number}")
    await until(lambda: len(begun) == 250)
    engine = await world.crash_and_recover(engine)
    for number in range(250):
        assert await (await engine.get(f"r{number}")).result(60) == number
    assert len(begun) == 500
    await engine.close()


@pytest.mark.parametrize("wrong", ["", " ", "a/b", "x" * 1000, "ks:schedule:x"])
async def test_recovery_of_an_impossible_id_creates_no_run(tmp_path, wrong):
    async with ks.open(tmp_path / "runs.db", worker=False) as engine:
        with pytest.raises(ks.KeepstepError):
            await ks.RunHandle(engine, wrong).recover("restart")
        assert (await engine.list(system=True)).runs == ()


@pytest.mark.live_only
async def test_cancel_that_races_a_recovery_is_kept(world):
    """A cancel between the request and its answer wins; the handler's verb does not undo it."""
    done = []

    @ks.step
    async def fails():
        done.append("fails")
        raise ks.Permanent("broken")

    @ks.workflow
    async def failing():
        return await fails()

    async with world.engine() as engine:
        run = await engine.start(failing, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
    async with world.engine(worker=False) as engine:
        run = await engine.get("r")
        await run.recover("restart")
        await run.cancel("no longer wanted")
    async with world.engine() as engine:
        with pytest.raises(ks.RunCancelled):
            await (await engine.get("r")).result(30)
    assert done == ["fails"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_late_owner_cannot_overwrite_the_answer_of_a_recovery(world):
    """The worker that was taken for dead is fenced: its late result is not written over the restart."""
    held = asyncio.Event()
    results = []

    @ks.step
    async def slow():
        results.append(len(results))
        if len(results) == 1:
            held.set()
            await asyncio.sleep(0.2)
            return "late"
        return "new"

    @ks.workflow(recovery="restart")
    async def working():
        return await slow()

    first_engine = await world.started()
    await first_engine.start(working, run_id="r")
    await held.wait()
    world._memory.mark_dead(first_engine.worker.id)
    async with world.engine() as engine:
        run = await engine.get("r")
        assert await run.result(30) == "new"
        ends = [one for one in await run.checkpoints() if one.kind is Kind.STEP_COMPLETED]
        assert [json.loads(one.value) for one in ends] == ["new"]
    await world.crash(first_engine)
