"""Removing runs: only finished ones, only those that are meant, and for good when that is asked for."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

import apsw
import pytest

import keepstep as ks
from keepstep.care import retention
from keepstep.care.copying import copy_runs
from keepstep.care.retention import Sweep, erase, purge, sweep
from keepstep.errors import CheckpointCorrupt, DefinitionError, RunConflict, RunNotFound
from keepstep.model import FINISHED, RunQuery, Status
from keepstep.policies import Retain
from keepstep.ports import instant
from keepstep.stores.memory import MemoryStore
from tests.care.stored import TOTAL, WORKFLOWS, contents, driven, everything, filled, tampered

ENDED = {run.id for run, _, _ in contents() if run.status in FINISHED}


def left(store):
    return set(everything(store))


# -- purge -------------------------------------------------------------------------------------------------------------


def test_finished_runs_are_removed_and_no_others(store):
    before = everything(store)
    done = purge(store)
    assert done.removed == len(ENDED) == 4
    assert (done.statuses[Status.COMPLETED], done.statuses[Status.FAILED]) == (3, 1)
    assert done.workflows["care total"] == 3
    assert everything(store) == {name: whole for name, whole in before.items() if name not in ENDED}


def test_a_dry_run_removes_nothing_and_counts_the_same(store):
    before = everything(store)
    dry = purge(store, dry_run=True)
    assert everything(store) == before
    assert purge(store) == dry


@pytest.mark.parametrize(
    "filters, gone",
    [
        ({"workflow": "care breaking"}, {"failed"}),
        ({"statuses": frozenset({Status.FAILED})}, {"failed"}),
        ({"statuses": frozenset({Status.CANCELLED})}, set()),
        ({"workflow": "care total", "statuses": frozenset({Status.COMPLETED}), "limit": 0}, set()),
    ],
)
def test_only_runs_that_match_the_filter_are_removed(store, filters, gone):
    before = left(store)
    assert purge(store, **filters).removed == len(gone)
    assert before - left(store) == gone


def test_only_runs_that_ended_before_are_removed(store):
    ended = sorted((run.updated_at, run.id) for run, _, _ in contents() if run.id in ENDED)
    assert purge(store, before=ended[0][0]).removed == 0
    assert purge(store, before=ended[2][0]).removed == 2
    assert left(store) >= {ended[2][1], ended[3][1]}


def test_no_more_are_removed_than_allowed(store):
    assert purge(store, limit=3, dry_run=True).removed == 3
    assert purge(store, limit=3).removed == 3
    assert purge(store).removed == 1


def test_purge_of_unfinished_statuses_is_refused(store):
    with pytest.raises(DefinitionError, match="got set aside"):
        purge(store, statuses=frozenset({Status.SET_ASIDE, Status.FAILED}))


class RetriedMeanwhile:
    """A store in which a person lets the failed run go on between the look and the removal."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def delete_runs(self, run_ids, **options):
        driven(self._store, lambda engine: engine.retry("failed"), worker=False)
        return self._store.delete_runs(run_ids, **options)


def test_a_run_that_someone_lets_go_on_meanwhile_stays(store):
    assert purge(RetriedMeanwhile(store)).removed == 3
    assert store.get_run("failed").status is Status.QUEUED


def test_a_parent_has_the_result_of_a_child_that_was_purged(store):
    child = next(name for name in left(store) if name.startswith("parent."))
    purge(store)
    assert store.get_run(child) is None

    async def go_on(engine):
        handle = await engine.get("parent")
        await handle.signal("go")
        return await handle.result()

    assert driven(store, go_on) == 3


def test_an_id_may_be_used_again_after_a_purge(store):
    purge(store)

    async def again(engine):
        return await (await engine.start(TOTAL, 5, 5, run_id="done")).result()

    assert driven(store, again) == 10


# -- retain ------------------------------------------------------------------------------------------------------------


def many(store, count=30):
    async def run_all(engine):
        for n in range(count):
            await (await engine.start(TOTAL, n, run_id=f"r{n:03}")).result()

    driven(store, run_all)


def test_the_newest_of_each_workflow_stay(empty):
    many(empty)
    assert sweep(empty, Retain(days=0, count=10)).removed == 20
    assert left(empty) == {f"r{n:03}" for n in range(20, 30)}
    assert sweep(empty, Retain(days=0, count=10)).removed == 0


def test_each_workflow_has_its_own_newest(empty):
    async def run_all(engine):
        for n in range(3):
            await (await engine.start(TOTAL, n, run_id=f"rare{n}")).result()
        for n in range(6):
            with contextlib.suppress(ks.RunFailed):
                await (await engine.start("care breaking", run_id=f"frequent{n}")).result()

    driven(empty, run_all)
    assert sweep(empty, Retain(days=0, count=2)).removed == 5
    assert left(empty) == {"rare1", "rare2", "frequent4", "frequent5"}


def test_the_younger_ones_stay(empty):
    many(empty, 3)
    assert sweep(empty, Retain(days=1, count=0)).removed == 0
    assert sweep(empty, Retain(days=0, count=0), dry_run=True).removed == 3
    assert sweep(empty, Retain(days=0, count=0)).removed == 3


def test_newest_runs_are_found_by_creation_and_not_by_arrival(empty, monkeypatch):
    monkeypatch.setattr(retention, "PAGE", 7)
    bench = MemoryStore()
    many(bench)
    for run in bench.list_runs(
        RunQuery(limit=100, with_input=True)
    ).runs:  # the newest first, as an older version copied them
        copy_runs(bench, empty, [run.id], actor="ann")
    assert empty.list_runs(RunQuery(limit=1)).runs[0].id == "r000"
    assert sweep(empty, Retain(days=0, count=10), dry_run=True).removed == 20
    assert sweep(empty, Retain(days=0, count=10)).removed == 20
    assert left(empty) == {f"r{n:03}" for n in range(20, 30)}


def test_new_completed_runs_are_removed_without_preserve(store):
    assert sweep(store, Retain(preserve=False)).removed == len(ENDED) - 1
    assert "failed" in left(store)


def test_a_workflow_has_its_own_rule(store):
    rule = Retain(workflows={"care breaking": Retain(days=0, count=0)})
    assert sweep(store, rule).removed == 1
    assert "failed" not in left(store)


def test_a_sweep_goes_page_by_page(empty, monkeypatch):
    monkeypatch.setattr(retention, "PAGE", 7)
    many(empty)
    one = Sweep(empty, Retain(days=0, count=5))
    pages = 1
    while one.page():
        pages += 1
    assert (pages, one.done.removed) == (5, 25)


def test_a_worker_sweeps_beside_its_runs(store):
    async def look(engine):
        while ENDED & left(store):
            await engine.changed(0.02)
        return await (await engine.start(TOTAL, 1, run_id="new")).status()

    driven(store, look, retain=Retain(days=0, count=0))
    assert {"waits", "later", "parent"} <= left(store)


def test_a_worker_without_a_rule_removes_nothing(store):
    before = left(store)
    driven(store, lambda engine: asyncio.sleep(0.1))
    assert left(store) == before


def test_a_store_that_fails_does_not_stop_the_worker(store, monkeypatch, caplog):
    real, failures = store.delete_runs, [1]

    def failing(run_ids, **options):
        if failures:
            failures.pop()
            raise ks.StoreUnavailable("busy")
        return real(run_ids, **options)

    monkeypatch.setattr(store, "delete_runs", failing)
    monkeypatch.setattr(retention, "SWEEP_SECONDS", 0.01)

    async def look(engine):
        while ENDED & left(store):
            await engine.changed(0.02)

    driven(store, look, retain=Retain(days=0, count=0))
    assert "cannot remove finished runs" in caplog.text


# -- erase -------------------------------------------------------------------------------------------------------------


def erased(store, run_id, **options):
    driven(store, lambda engine: erase(engine, run_id, **options), worker=False)


def test_an_erased_run_is_gone(store):
    erased(store, "done")
    assert "done" not in left(store)
    with pytest.raises(RunNotFound):
        erased(store, "done")


def test_nothing_of_an_erased_run_is_left_in_any_file(store, tmp_path):
    async def say(engine):
        return await (await engine.start("care total", 1, run_id="told", tags={"word": "hush-hush"})).result()

    driven(store, say)
    word = b"hush-hush"
    held = [one for one in tmp_path.rglob("*") if one.is_file() and word in one.read_bytes()]
    assert held or not any(tmp_path.iterdir())  # memory and a server keep nothing here
    erased(store, "told")
    assert [one for one in tmp_path.rglob("*") if one.is_file() and word in one.read_bytes()] == []


def test_a_run_that_has_not_ended_is_erased_only_by_force(store):
    with pytest.raises(RunConflict, match="is waiting"):
        erased(store, "waits")
    assert "waits" in left(store)
    erased(store, "waits", force=True, reason="asked to be forgotten")
    assert "waits" not in left(store)


def test_a_run_that_is_driven_is_not_erased(store):
    async def try_it(engine):
        await engine.start("care patient", 10, run_id="driven")
        with pytest.raises(RunConflict, match="driven"):
            await erase(engine, "driven", force=True)

    driven(store, try_it, linger_seconds=60)
    assert "driven" in left(store)


def test_a_damaged_run_can_be_erased(store):
    tampered(store, "waits", rows=lambda rows: rows[:1], checksum="x")
    erased(store, "waits", force=True)
    assert "waits" not in left(store)


# -- strict ------------------------------------------------------------------------------------------------------------


def opened(store, **options):
    async def main():
        async with ks.open(store, workflows=WORKFLOWS, worker=False, strict=True, **options):
            return True

    return asyncio.run(main())


def test_a_sound_store_is_opened_strictly(store):
    assert opened(store)


def test_a_damaged_store_is_not_opened_and_the_runs_are_named(store):
    tampered(store, "done", seed="0")
    tampered(store, "waits", epoch=1)
    with pytest.raises(CheckpointCorrupt, match=r"strict=True.*'waits'.*'done'"):
        opened(store)
    assert everything(store)


def test_store_with_rows_of_no_run_is_not_opened_strictly(tmp_path):
    """No run is damaged, but the store itself is not as it was written."""
    path = tmp_path / "runs.db"
    filled(ks.stores.open.open_store(path)).close()
    assert opened(path)
    database = apsw.Connection(str(path))
    database.execute("INSERT INTO keepstep_checkpoint (run, seq, kind, record) VALUES ('nobody', 1, 'timer', '{}')")
    database.close()
    with pytest.raises(CheckpointCorrupt, match=r"strict=True.*nobody"):
        opened(path)


def test_the_store_of_a_refused_engine_is_closed(tmp_path):
    path = tmp_path / "runs.db"
    store = ks.stores.open.open_store(path)
    filled(store)
    tampered(store, "done", seed="0")
    store.close()
    with pytest.raises(CheckpointCorrupt):
        opened(path)
    assert not (tmp_path / "runs.db-wal").exists()


def test_age_is_measured_by_the_clock_of_the_store():
    class Later:
        def now(self):
            return contents()[0][0].created_at.timestamp() + 40 * 86_400

        def boot(self):
            return "boot", 0.0

    store = filled(MemoryStore(clock=Later()))
    assert sweep(store, Retain(count=0)).removed == len(ENDED)
    assert instant(store.clock.now()) - contents()[0][0].created_at >= timedelta(days=40)


def test_a_run_that_is_retried_meanwhile_is_not_erased(store, monkeypatch):
    async def act():
        async with ks.Engine(store, workflows=WORKFLOWS, worker=False) as engine:
            call = engine.call

            async def retry_first(function, *given):
                if function is retention._erase:
                    await engine.retry("failed")
                return await call(function, *given)

            monkeypatch.setattr(engine, "call", retry_first)
            with pytest.raises(RunConflict, match="or went on meanwhile"):
                await erase(engine, "failed")

    asyncio.run(act())
    assert store.get_run("failed").status is Status.QUEUED


def test_an_erase_that_broke_off_is_finished_by_force(store, tmp_path):
    async def say(engine):
        return await (await engine.start("care total", 1, run_id="told", tags={"word": "hush-hush"})).result()

    driven(store, say)
    store.delete_runs(["told"])  # and killed before the files were written anew
    with pytest.raises(RunNotFound):
        erased(store, "told", force=True)
    assert [one for one in tmp_path.rglob("*") if one.is_file() and b"hush-hush" in one.read_bytes()] == []
