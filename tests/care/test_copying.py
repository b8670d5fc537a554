"""Copying from any store to any other: whole, verified, resumable, and no run is ever driven in two places."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from keepstep.care import copying, transfer
from keepstep.care.copying import copy_runs, shown
from keepstep.care.verify import oldest_first, verify
from keepstep.errors import StoreUnavailable
from keepstep.model import FINISHED, RunQuery, Status
from keepstep.ports import Advance, ClaimRequest, Create, Verdict
from keepstep.records.record import origin
from keepstep.stores.memory import MemoryStore
from keepstep.stores.sqlite.store import SQLiteStore
from tests.care.stored import STORES, contents, driven, everything, filled, tampered
from tests.care.test_verify import edited
from tests.nightly import case

ALL = frozenset({"care total", "care patient", "care breaking", "care parent"})


#: Each store once as the source and once as the target; `make nightly` copies between all pairs.
QUICK = {("memory", "files"), ("files", "sqlite"), ("sqlite", "postgres"), ("postgres", "memory")}


def pytest_generate_tests(metafunc):
    if "target" in metafunc.fixturenames:
        pairs = [
            case(source, target, id=f"{source}-{target}", nightly=(source, target) not in QUICK)
            for source in STORES
            for target in STORES
        ]
        metafunc.parametrize("empty, target", pairs, indirect=True)
    elif "empty" in metafunc.fixturenames:
        metafunc.parametrize("empty", STORES, indirect=True)


@pytest.fixture
def empty(request, tmp_path):
    """The store that is copied from, before it is filled."""
    store = STORES[request.param](tmp_path)
    yield store
    store.close()


@pytest.fixture
def target(request, tmp_path):
    (tmp_path / "target").mkdir()
    store = STORES[request.param](tmp_path / "target")
    yield store
    store.close()


def copied(source, target, *run_ids, query=None, **options):
    return copy_runs(source, target, run_ids, query, actor="ann", **options)


def test_finished_runs_are_copied_word_for_word(store, target):
    before = everything(store)
    done = copied(store, target, query=RunQuery(status=FINISHED))
    assert (done.written, done.whole) == (4, True)
    assert everything(target) == {name: whole for name, whole in before.items() if whole[0].status in FINISHED}
    assert everything(store) == before
    assert verify(target).sound


@pytest.mark.parametrize("page", [200, 3])
def test_a_copy_lists_its_runs_in_the_same_order(store, target, monkeypatch, page):
    monkeypatch.setattr(transfer, "PAGE", page)
    assert copied(store, target, unfinished=True).whole
    assert listed(target) == listed(store)


def listed(store):
    return [run.id for run in store.list_runs(RunQuery(limit=100)).runs]


def test_runs_that_come_and_go_meanwhile_hide_no_others(empty):
    for number in range(30):
        begun(empty, f"r{number:02}")
    told = []
    for run in oldest_first(empty, RunQuery(limit=7)):
        told.append(run.id)
        if run.id == "r05":
            empty.delete_runs(["r06", "r07", "r08", "r20"])
            for number in range(30, 40):
                begun(empty, f"r{number:02}")
    assert told == sorted(set(told))
    assert {f"r{number:02}" for number in range(30)} - {"r06", "r07", "r08", "r20"} <= set(told)


def begun(store, name):
    run = replace(contents_of("later"), id=name)
    (answer,) = store.commit([Create(replace(run, checksum=origin(run)))])
    assert answer.verdict is Verdict.DONE


def test_unfinished_runs_are_left_and_named(store, target):
    before = everything(store)
    done = copied(store, target)
    assert set(done.left) == {"waits", "large", "later", "parent", "graph"}
    assert everything(store) == before


def test_run_that_is_handed_over_is_driven_in_the_target_only(store, target):
    done = copied(store, target, "waits", "later", unfinished=True)
    assert (done.written, done.whole) == (2, True)
    assert {name: one[0].status for name, one in everything(store).items() if name in ("waits", "later")} == {
        "waits": Status.SET_ASIDE,
        "later": Status.SET_ASIDE,
    }
    assert "it goes on in" in store.get_run("waits").error.message
    assert not {"waits", "later"} & {run.id for run in store.list_runs(RunQuery(needs_person=True)).runs}
    assert target.get_run("later").due_at == contents_of("later").due_at
    assert verify(store).sound
    assert verify(target).sound

    async def go_on(engine):
        handle = await engine.get("waits")
        await handle.signal("last", "end")
        return await handle.result()

    assert driven(target, go_on) == [10, {"yes": True}, "end"]

    async def nothing_to_do(engine):
        return [claim.run.id for claim in store.claim_runs(ClaimRequest(engine.worker.id, ALL, 10)).claims]

    assert driven(store, nothing_to_do) == []


def contents_of(name):
    return next(run for run, _, _ in contents() if run.id == name)


def test_a_family_that_goes_on_stays_together(store, target):
    child = next(name for name in everything(store) if name.startswith("parent."))
    assert copied(store, target, "parent", unfinished=True).whole  # its child has ended
    assert copied(store, target, child, unfinished=True).whole
    other = filled(MemoryStore())
    tampered(other, child, rows=lambda rows: rows[:1], status=Status.QUEUED, checksum="x", due_at=None)
    done = copied(other, MemoryStore(), "parent", child, unfinished=True)
    assert done.left == {"parent": f"its child {child} has not ended", child: "its parent parent has not ended"}


def test_run_that_is_being_driven_is_left(store, target):
    async def while_driven(engine):
        await engine.start("care patient", 10, run_id="driven")
        return copied(store, target, "driven", unfinished=True)

    done = driven(store, while_driven, linger_seconds=60)
    assert "it is driven by" in done.left["driven"]
    assert target.get_run("driven") is None


class Failing:
    """A store whose writes fail from the n-th on, as one whose disk is full."""

    def __init__(self, store, writes):
        self._store, self._left = store, writes

    def __getattr__(self, name):
        return getattr(self._store, name)

    def commit(self, changes, **options):
        if self._left <= 0:
            raise StoreUnavailable("full")
        self._left -= 1
        return self._store.commit(changes, **options)


@pytest.mark.parametrize("side", ["source", "target"])
def test_no_run_is_driven_in_both_wherever_a_copy_breaks_off(side):
    """Each write fails in turn; after every one of them, and at the end, no run can be driven in both stores."""
    for writes in range(20):
        source, target = filled(MemoryStore()), MemoryStore()
        failing = {"source": Failing(source, writes), "target": Failing(target, writes)}[side]
        stores = (failing, target) if side == "source" else (source, failing)
        with contextlib.suppress(StoreUnavailable):
            copied(*stores, unfinished=True)
        both = [name for name, one in everything(target).items() if is_open(one[0]) and is_open(source.get_run(name))]
        assert both == []
        bury_the_dead(source)
        copied(source, target, unfinished=True)
        done = copied(source, target, unfinished=True)
        assert (done.same, done.whole) == (len(contents()), True)
        assert not [name for name, one in everything(source).items() if is_open(one[0])]


def is_open(run):
    return run.status not in FINISHED and run.status is not Status.SET_ASIDE


def bury_the_dead(store):
    """Let go of what a copy that failed in the middle still held: its process is gone."""
    for worker in store.list_workers():
        store.mark_dead(worker.id)


def test_a_copy_that_broke_off_is_taken_up_again(store, target):
    with pytest.raises(StoreUnavailable):
        copied(store, Failing(target, 0), unfinished=True)
    assert everything(target) == {}
    assert store.get_run("waits").status is Status.SET_ASIDE
    done = copied(store, target, unfinished=True)
    assert (done.written, done.whole) == (len(contents()), True)
    assert target.get_run("waits").status is Status.QUEUED
    again = copied(store, target, unfinished=True)
    assert (again.same, again.written, again.whole) == (len(contents()), 0, True)
    assert verify(target).sound


def test_unfinished_run_of_the_same_id_is_a_conflict(store, target):
    filled(target)
    tampered(target, "waits", seed="other")
    tampered(target, "waits", rows=lambda rows: rows[:1], checksum="x")
    done = copied(store, target, "waits", unfinished=True)
    assert list(done.conflicts) == ["waits"]
    assert store.get_run("waits").status is Status.WAITING


def test_a_damaged_run_is_named_and_not_copied(store, target):
    tampered(store, "done", seed="0")
    tampered(store, "waits", signals=lambda all_: [all_[0], replace(all_[1], payload=b"0")])
    done = copied(store, target, unfinished=True)
    assert set(done.damaged) == {"done", "waits"}
    assert {"done", "waits"} & set(everything(target)) == set()
    assert store.list_runs(RunQuery(id_prefix="waits")).runs[0].status is Status.WAITING


class Forgetful:
    """A store that keeps something else than it was given, and says that all is well."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def commit(self, changes, **options):
        for create in changes:
            if create.run.id == "done":
                create.rows = edited(2, b'"value":3', b'"value":4')(list(create.rows))
        return self._store.commit(changes, **options)


def test_run_that_the_target_changed_is_named(store):
    done = copied(store, Forgetful(MemoryStore()), query=RunQuery(status=FINISHED))
    assert list(done.damaged) == ["done"]
    assert done.damaged["done"].startswith("in the target store: ")
    assert not done.whole


def test_a_paused_run_stays_paused(store, target):
    tampered(store, "waits", status=Status.PAUSED, wakes=("ks:resume",), due_at=None)
    assert copied(store, target, "waits", unfinished=True).whole
    run = target.get_run("waits")
    assert (run.status, run.wakes, run.due_at) == (Status.PAUSED, ("ks:resume",), None)


def test_an_address_is_shown_without_its_password():
    assert shown("postgresql://ann:secret@host/db") == "postgresql://host/db"
    assert shown("postgresql://ann:sec@ret@host/db") == "postgresql://host/db"
    assert shown("sqlite:///a@b/runs.db") == "sqlite:///a@b/runs.db"


def test_run_that_was_handed_over_is_not_copied_to_a_third_store(store, target, tmp_path):
    assert copied(store, target, "waits", unfinished=True).whole
    third = SQLiteStore(tmp_path / "third.db", power_loss="may_lose_last")
    for unfinished in (True, False):
        done = copied(store, third, "waits", unfinished=unfinished)
        assert done.left == {"waits": f"it was handed over to {shown(target.url)}, and may go on there"}
    assert third.get_run("waits") is None
    third.close()


def test_run_removed_from_the_target_is_not_copied_again(store, target):
    assert copied(store, target, "waits", unfinished=True).whole
    target.delete_runs(["waits"])
    assert copied(store, target, "waits").left == {"waits": "it was handed over, and is missing in the target"}
    assert target.get_run("waits") is None


@pytest.mark.parametrize("at", ["before the look", "after it"])
def test_a_run_that_someone_pauses_meanwhile_stays_paused(store, target, monkeypatch, at):
    """It was listed a while ago: what was done to it since is not undone by the claim."""

    def pause():
        (claim,) = store.claim_runs(ClaimRequest("ann", run="waits", statuses=frozenset(Status))).claims
        change = Advance("waits", "ann", claim.lease.epoch, claim.run.seq, status=Status.PAUSED, release=True)
        (answer,) = store.commit([change])
        assert answer.verdict is Verdict.DONE

    if at == "after it":
        claim_runs = store.claim_runs

        def pause_first(request):
            monkeypatch.undo()
            pause()
            return claim_runs(request)

        monkeypatch.setattr(store, "claim_runs", pause_first)
    else:
        set_aside = copying._set_aside_here
        monkeypatch.setattr(copying, "_set_aside_here", lambda *given: (pause(), set_aside(*given))[1])
    assert copied(store, target, "waits", unfinished=True).left == {"waits": "another process claimed it meanwhile"}
    assert store.get_run("waits").status is Status.PAUSED
    assert target.get_run("waits") is None
