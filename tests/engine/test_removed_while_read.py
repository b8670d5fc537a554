"""A run that another process removes while it is read is not found, and never called damaged."""

from __future__ import annotations

import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.care.verify import verify
from keepstep.errors import RunNotFound


@ks.step
async def add(number):
    return number + 1


@ks.workflow(name="removed while read")
async def adding():
    return [await add(number) for number in range(3)]


READERS = {
    "checkpoints": lambda engine, run: run.checkpoints(),
    "audit": lambda engine, run: run.audit(),
    "replay": lambda engine, run: run.replay(adding),
    "spent": lambda engine, run: run.spent(),
}


def removing(store, monkeypatch, run_id):
    """Remove the run right before its records are read."""
    read = store.list_checkpoints

    def list_checkpoints(run, *args, **options):
        if run == run_id:
            store.delete_runs([run_id])
        return read(run, *args, **options)

    monkeypatch.setattr(store, "list_checkpoints", list_checkpoints)


@pytest.mark.parametrize("reader", READERS)
async def test_a_run_removed_while_it_is_read_is_not_found(world, monkeypatch, reader):
    async with world.engine() as engine:
        run = await engine.start(adding, run_id="r")
        await run.result(30)
    async with world.engine(worker=False) as engine:
        run = await engine.get("r")
        removing(engine.store, monkeypatch, "r")
        with pytest.raises(RunNotFound, match="'r'"):
            await READERS[reader](engine, run)


async def test_a_run_removed_while_a_store_is_verified_is_no_damage(world, monkeypatch):
    async with world.engine() as engine:
        for name in ("r", "s"):
            await (await engine.start(adding, run_id=name)).result(30)
    async with world.engine(worker=False) as engine:
        removing(engine.store, monkeypatch, "r")
        found = await engine.call(verify, engine.store)
        assert found.sound
        assert found.runs.total == 1
        assert found.damaged == {}
        assert (await examine(engine, deep=True)).healthy
