"""Which rule a worker applies to the finished runs of each workflow."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import keepstep as ks
from keepstep.care import retention
from keepstep.care.retention import Rules, Sweep
from keepstep.errors import InvalidGraph
from keepstep.model import Run, Status
from keepstep.ports import Create
from keepstep.stores.memory import MemoryStore


@ks.workflow(name="rules plain")
async def plain():
    return 1


@ks.workflow(name="rules brief", retain="delete_on_success")
async def brief(fail=False):
    if fail:
        raise ks.Permanent("on purpose")
    return 1


@ks.workflow(name="rules archive", retain="forever")
async def archive():
    return 1


@ks.workflow(name="rules short", retain=ks.Retain(days=1, count=0))
async def short():
    return 1


def nothing():
    return {}


KNOWN = {one.name: one for one in (plain, brief, archive, short)}
GENERAL = ks.Retain(days=30, count=0)


def finished(store, name, workflow, days=0.0, status=Status.COMPLETED):
    at = datetime.fromtimestamp(store.clock.now(), UTC) - timedelta(days=days)
    store.commit([Create(Run(name, workflow, status, at, updated_at=at, output=b"1"))])


@pytest.fixture
def store():
    store = MemoryStore()
    yield store
    store.close()


def swept(store, rules):
    one = Sweep(store, rules)
    while one.page():
        pass
    return one.done.removed


def left(store):
    from keepstep.model import RunQuery

    return {run.id for run in store.list_runs(RunQuery()).runs}


def test_a_workflows_own_rule_comes_before_the_general_one():
    rules = Rules(GENERAL, KNOWN)
    assert rules.of("rules plain") is GENERAL
    assert rules.of("rules short") == ks.Retain(days=1, count=0)
    assert set(rules.own()) == {"rules brief", "rules archive", "rules short"}


def test_a_rule_that_the_operator_names_comes_first():
    own = ks.Retain(days=7)
    assert Rules(ks.Retain(workflows={"rules short": own}), KNOWN).of("rules short") is own


def test_a_worker_removes_no_runs_of_workflows_that_it_does_not_drive(store):
    finished(store, "old", "rules plain", days=40)
    finished(store, "other", "somebody else's", days=40)
    finished(store, "archived", "rules archive", days=4000)
    finished(store, "brief failure", "rules brief", days=2, status=Status.FAILED)
    finished(store, "short", "rules short", days=2)
    assert swept(store, Rules(GENERAL, KNOWN)) == 2
    assert left(store) == {"other", "archived", "brief failure"}


def test_without_a_general_rule_only_workflows_with_their_own_lose_runs(store):
    finished(store, "old", "rules plain", days=4000)
    finished(store, "short", "rules short", days=2)
    assert swept(store, Rules(None, KNOWN)) == 1
    assert left(store) == {"old"}


@pytest.mark.parametrize("given", [5, "never", ks.Retain(workflows={"x": ks.Retain()})])
def test_a_rule_that_cannot_be_meant_is_refused(given):
    with pytest.raises(ks.DefinitionError, match=r"workflow 'fn': .*retain="):

        @ks.workflow(retain=given)
        async def fn():
            pass


def test_graphs_and_dags_take_a_rule():
    assert ks.Graph("rules graph", retain="delete_on_success").retain == ks.Retain(preserve=False)
    assert ks.Dag("rules dag", retain=ks.Retain(days=2)).retain.days == 2


async def test_successful_runs_are_deleted_after_their_result_could_be_read(monkeypatch):
    monkeypatch.setattr(retention, "READ_SECONDS", 0.2)
    async with ks.open("memory:", workflows=[plain, brief]) as engine:
        kept = await engine.start(plain, run_id="kept")
        failed = await engine.start(brief, True, run_id="failed")
        run = await engine.start(brief, run_id="gone")
        assert await run.result() == await kept.result() == 1
        with pytest.raises(ks.RunFailed):
            await failed.result()
        assert "gone" in left(engine.store)
        async with asyncio.timeout(30):
            while "gone" in left(engine.store):
                await engine.changed(0.02)
        assert left(engine.store) == {"kept", "failed"}


async def test_an_engine_with_retain_false_removes_nothing(monkeypatch):
    monkeypatch.setattr(retention, "READ_SECONDS", 0.01)
    async with ks.open("memory:", workflows=[brief], retain=False) as engine:
        await (await engine.start(brief, run_id="stays")).result()
        assert not [task for task in asyncio.all_tasks() if "keep_swept" in repr(task)]
        assert left(engine.store) == {"stays"}


@pytest.mark.parametrize(
    "given, rule",
    [
        ("delete_on_success", ks.Retain(preserve=False)),
        ("forever", ks.Retain.named("forever")),
        ("{days: 2.5, count: 7}", ks.Retain(days=2.5, count=7)),
    ],
)
@pytest.mark.parametrize("form", ["graph", "dag"])
def test_a_workflow_file_says_how_long_its_runs_stay(tmp_path, form, given, rule):
    file = tmp_path / "flow.yaml"
    head = f"keepstep: 1\nmetadata: {{name: rules-{form}}}\nspec: {{form: {form}}}\n"
    file.write_text(f"{head}policies: {{retention: {given}}}\nsteps:\n  a: {{}}\n", encoding="utf-8")
    assert ks.load(file, functions={"a": nothing}).retain == rule


def test_a_workflow_file_with_an_unknown_rule_is_refused(tmp_path):
    file = tmp_path / "flow.yaml"
    file.write_text(
        "keepstep: 1\nmetadata: {name: x}\npolicies: {retention: soon}\nsteps:\n  a: {}\n", encoding="utf-8"
    )
    with pytest.raises(InvalidGraph, match="delete_on_success, forever, or how long finished runs stay, not 'soon'"):
        ks.load(file, functions={"a": nothing})
