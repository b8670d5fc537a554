"""A chain begins with how its run was created: an input or a seed that was edited is found before anything runs."""

from __future__ import annotations

from dataclasses import replace

import apsw
import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.errors import CheckpointCorrupt
from keepstep.history.audit import audit
from keepstep.model import Status
from keepstep.ports import Row
from keepstep.records.record import born, check_origin, origin, unseal
from keepstep.testing.store_contract import at, queued, record
from tests.engine.world import until_status

pytestmark = pytest.mark.live_only


def edit(world, engine, run_id, column, value):
    """Change a fact of a run behind the store's back."""
    if world.kind == "sqlite":
        with apsw.Connection(str(world.path)) as database:
            database.execute(f"UPDATE keepstep_run SET {column} = ? WHERE id = ?", (value, run_id))
    else:
        entry = engine.store._runs[run_id]
        entry.run = replace(entry.run, **{column: value.encode() if column == "input" else value})


@pytest.mark.parametrize("column, value, named", [("input", "[[2],{}]", "its input"), ("seed", "x", "its seed")])
@pytest.mark.parametrize("begun", [True, False])
async def test_an_edited_creation_is_found_before_anything_runs(world, column, value, named, begun):
    ran = []

    @ks.step
    async def charge(amount):
        ran.append(amount)

    @ks.workflow
    async def order(amount):
        await ks.wait_for("go")
        await charge(amount)

    async with world.engine(worker=begun) as engine:
        run = await engine.start(order, 1, run_id="r")
        if begun:
            await until_status(run, "waiting")
    async with world.engine(worker=False) as engine:
        edit(world, engine, "r", column, value)
        run = await engine.get("r")
        await run.signal("go")
        for read in (run.audit(), run.checkpoints() if begun else run.audit()):
            with pytest.raises(CheckpointCorrupt, match=named):
                await read
        report = await examine(engine, deep=True)
        [corrupt] = [one for one in report.findings if one.code == "corrupt"]
        assert named in corrupt.message
        assert corrupt.runs == ("r",)
    async with world.engine() as engine:
        run = await engine.get("r")
        with pytest.raises(ks.RunSetAside, match=named):
            await run.result()
        report = await examine(engine)
        assert any(one.code == "set-aside" and named in one.message for one in report.findings)
        with pytest.raises(CheckpointCorrupt):
            await run.retry()
        assert await run.status() is Status.SET_ASIDE
    assert ran == []


async def test_children_and_successors_begin_with_their_creation_too(world):
    @ks.workflow
    async def child(n):
        if n:
            ks.continue_as(n - 1)
        return "done"

    @ks.workflow
    async def parent():
        return await (await ks.start(child, 1)).result()

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="p")
        assert await run.result() == "done"
        runs = (await engine.list()).runs
        assert len(runs) == 3
        for listed in runs:
            one = await (await engine.get(listed.id)).run()  # a list leaves inputs out
            rows = await engine.read(engine.store.list_checkpoints, one.id)
            first, _ = next(unseal(rows, one.id, 0, origin(one)))
            assert first.previous == origin(one) != ""
            assert await audit(engine, one.id)
        authors = {one.id: one.created_by for one in runs}
    [first_child] = [one for one in authors if one.startswith("p") and "~" not in one and one != "p"]
    assert authors[first_child] == "run p"
    assert authors[f"{first_child}~2"] == f"run {first_child}"


FACTS = {
    "workflow": "other",
    "version": "2",
    "fingerprint": "f",
    "queue": "q",
    "priority": 1,
    "seed": "s",
    "parent": "p",
    "parent_key": "k",
    "origin": "o",
    "key": "key",
    "tags": {"a": "b"},
    "deadline_at": at(5),
    "traceparent": "00",
    "created_at": at(1),
    "created_by": "ann",
    "input": b"2",
    "id": "other",
}


@pytest.mark.parametrize("name", FACTS)
def test_each_fact_of_a_creation_counts(name):
    run = queued("r")
    create = born(run)
    assert create.run.checksum == origin(run)
    check_origin(run)
    with pytest.raises(CheckpointCorrupt, match="its input" if name == "input" else "its seed, tags"):
        check_origin(replace(run, **{name: FACTS[name]}))


def test_what_changes_while_a_run_goes_on_does_not_count():
    run = queued("r", tags={"a": "1", "b": "2"})
    changed = replace(run, status=Status.WAITING, epoch=7, worker="w", signals=3, tags={"b": "2", "a": "1"})
    assert origin(run) == origin(changed)


def test_a_record_of_the_first_format_begins_with_nothing():
    run = queued("r")
    create = born(run, record("r"))
    [row] = create.rows
    with pytest.raises(CheckpointCorrupt, match="its input"):
        list(unseal([row], "r", 0, origin(replace(run, input=b"2"))))
    old = row.record.replace(b'"format":2', b'"format":1').replace(origin(run).encode(), b"")
    assert list(unseal([Row(row.seq, row.kind, old)], "r", 0, origin(run)))
