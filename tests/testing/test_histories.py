"""Histories: saved as files, and replayed against other code without running or writing anything."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.errors import CheckpointCorrupt, SchemaMismatch, StoreUnavailable
from keepstep.model import RunQuery, WorkerInfo
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing import History, Replayed, replay, world
from keepstep.workflows.definition import Workflow

bodies: list[str] = []


@ks.step
async def pay(amount: int) -> dict[str, object]:
    bodies.append("pay")
    return {"paid": (amount, "EUR")}


@ks.step(retry=ks.Retry(attempts=2, base_seconds=1))
async def ship(order: str) -> str:
    bodies.append("ship")
    if bodies.count("ship") == 1:
        raise ConnectionError("no lorry")
    return order


@ks.step
async def thank() -> None:
    bodies.append("thank")


async def order(amount: int) -> list[object]:
    paid = await pay(amount)
    await ks.sleep(days=30)
    shipped = await ship("o")
    answer = await ks.wait_for("answer", timeout=1e6, default=None)
    return [paid["paid"], shipped, answer, ks.random()]


def defined(fn, **options) -> Workflow:
    return Workflow(fn, name="order", **options)


ORDER = defined(order)


def recorded(*, days: int, signal: bool = False, url="memory:") -> History:
    """The history of an order after so many days."""
    bodies.clear()
    with world(url, workflows=[ORDER]) as here:
        handle = here.start(ORDER, 5, run_id="o-1")
        here.advance(days=days)
        if signal:
            handle.signal("answer", {"text": "thanks"})
            handle.result()
        history = History.of(here.store, "o-1")
    bodies.clear()
    return history


@pytest.fixture(scope="module")
def ended() -> History:
    return recorded(days=31, signal=True)


@pytest.fixture(scope="module")
def asleep() -> History:
    return recorded(days=3)


@pytest.fixture(autouse=True)
def _no_body_runs():
    bodies.clear()
    yield
    assert bodies == []


# -- what replays ------------------------------------------------------------------------------------------------------


def test_the_same_code_replays(ended, asleep):
    assert replay(ORDER, ended) == Replayed("o-1", len(ended.rows), ended=True)
    assert replay(ORDER, asleep) == Replayed("o-1", 3, ended=False, asks=("sleep#1",))


def test_a_run_that_has_recorded_nothing_replays():
    assert replay(ORDER, recorded(days=0)).ended is False


def test_a_run_that_ended_with_a_branch_that_does_not_end_replays():
    @ks.step
    async def one():
        return 1

    async def stubborn():
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.get_running_loop().create_future()

    @ks.workflow
    async def leaving():
        task = asyncio.create_task(stubborn())
        return await one() if not task.done() else None

    with world() as here:
        run = here.start(leaving, run_id="r")
        assert run.result() == 1
        assert replay(leaving, here.store, "r").ended


def test_it_works_where_a_loop_is_running(ended):
    async def inside() -> Replayed:
        return replay(ORDER, ended)

    assert asyncio.run(inside()).ended


def test_code_may_change_after_what_is_recorded(asleep):
    async def longer(amount: int) -> None:
        await pay(amount)
        await ks.sleep(days=30)
        await thank()

    assert replay(defined(longer), asleep).asks == ("sleep#1",)


def test_a_plain_def_workflow_replays(ended):
    def plain(amount: int) -> list[object]:
        paid = pay(amount).result()
        ks.sleep(days=30).result()
        shipped = ship("o").result()
        answer = ks.wait_for("answer", timeout=1e6, default=None).result()
        return [paid["paid"], shipped, answer, ks.random()]

    assert replay(defined(plain), ended).ended


def test_a_plain_def_workflow_may_take_its_time():
    @ks.workflow
    def slow() -> int:
        first = pay(5).result()
        time.sleep(0.3)
        return len(first) + len(pay(6).result())

    with world() as here:
        assert here.start(slow, run_id="o-1").result() == 2
        bodies.clear()
        assert replay(slow, here.store, "o-1").ended


def test_no_hook_is_called():
    told: list[str] = []
    hooks = ks.Hooks(before=lambda one: told.append(one.moment), after=lambda one: told.append(one.moment))

    @ks.workflow(hooks=hooks)
    async def hooked() -> None:
        await pay(5)

    with world() as here:
        run = here.start(hooked, run_id="o-1")
        begun = History.of(here.store, "o-1")
        run.result()
        bodies.clear()
        assert told == ["before", "after"]
        assert not replay(hooked, begun).ended
        assert replay(hooked, here.store, "o-1").ended
    assert told == ["before", "after"]


def test_an_encrypted_run_may_return_a_secret(tmp_path):
    @ks.workflow
    async def secretive() -> str:
        await pay(5)
        return "Bearer abcdefghijklmnopqrstuvwxyz0123456789"

    keys = ks.Keys("k-1", {"k-1": bytes(32)})
    with world(keys=keys) as here:
        run = here.start(secretive, run_id="o-1")
        run.result()
        bodies.clear()
        history = History.of(here.store, "o-1")
        assert run.replay().fits
    history.save(tmp_path / "o.json")
    assert replay(secretive, history).ended
    assert replay(secretive, tmp_path / "o.json").ended


def test_compatible_code_may_ask_for_something_new(asleep):
    async def with_thanks(amount: int) -> None:
        await thank()
        await pay(amount)
        await ks.sleep(days=30)

    found = replay(defined(with_thanks, on_change="compatible"), asleep)
    assert "thank#1" in found.asks


def test_a_cancelled_and_a_failed_run_replay():
    for act in ("cancel", "fail"):

        async def broken(amount: int) -> None:
            await pay(amount)
            await ks.sleep(days=30)
            raise ValueError("broken")

        with world(workflows=[defined(broken)]) as here:
            handle = here.start(defined_in(here), 5, run_id="o-1")
            here.advance(days=1)
            if act == "cancel":
                handle.cancel("not wanted")
            with pytest.raises((ks.RunFailed, ks.RunCancelled)):
                handle.result()
            history = History.of(here.store, "o-1")
        bodies.clear()
        assert replay(defined(broken), history).ended


def defined_in(here) -> Workflow:
    return here._target.workflows["order"]


def test_a_run_that_continued_replays():
    async def loop(number: int) -> int:
        await pay(number)
        if number < 3:
            ks.continue_as(number + 1)
        return number

    with world(workflows=[defined(loop)]) as here:
        assert here.start(defined_in(here), 1, run_id="o-1").result() == 3
        first, last = History.of(here.store, "o-1"), History.of(here.store, "o-1~3")
    bodies.clear()
    assert replay(defined(loop), first).ended
    assert replay(defined(loop), last).ended


def test_a_run_that_was_set_aside_is_replayed_against_the_mended_code(asleep):
    async def other(amount: int) -> None:
        await thank()

    with world(workflows=[ORDER]) as here:
        handle = here.start(ORDER, 5, run_id="o-1")
        here.advance(days=3)
        here._target._given["order"] = defined(other)
        with pytest.raises(ks.RunSetAside):
            handle.result()
        history = History.of(here.store, "o-1")
    bodies.clear()
    assert history.run.status == "set aside"
    assert replay(ORDER, history).asks == ("sleep#1",)
    with pytest.raises(ks.ReplayMismatch):
        replay(defined(other), history)


# -- what does not -----------------------------------------------------------------------------------------------------


async def inserted(amount: int) -> None:
    await thank()
    await pay(amount)


async def other_input(amount: int) -> None:
    await pay(amount + 1)


async def removed(amount: int) -> None:
    await ks.sleep(days=30)


async def never_asked(amount: int) -> None:
    await pay(amount)
    await asyncio.get_running_loop().create_future()


async def in_another_order(amount: int) -> None:
    await ks.gather(ks.sleep(days=30), pay(amount))


async def too_early(amount: int) -> list[object]:
    await pay(amount)
    return []


async def raises(amount: int) -> None:
    await pay(amount)
    raise ValueError("new")


async def one_more(amount: int, currency: str) -> None:
    await pay(amount)


@pytest.mark.parametrize(
    "code, message, line",
    [
        (inserted, "recorded as pay#1, and the code asks for thank#1", "await thank()"),
        (other_input, "pay#1 was recorded with another input at seq 2", "await pay(amount + 1)"),
        (removed, "sleep#1 was recorded as call 2 of its branch and is now call 1", "await ks.sleep(days=30)"),
        (never_asked, "the code waits for something that is not recorded", "create_future()"),
        (
            in_another_order,
            "sleep#1 was recorded as call 2 of its branch and is now call 1",
            "await ks.gather(ks.sleep(days=30)",
        ),
        (too_early, "sleep#1, which the code no longer calls before it ends", "async def too_early"),
        (raises, "no longer calls before it ends; it raises ValueError: new", "async def raises"),
        (one_more, "it raises TypeError: one_more() missing 1 required positional argument", "async def one_more"),
    ],
)
def test_a_mismatch_names_the_call_and_the_line(ended, code, message, line):
    with pytest.raises(ks.ReplayMismatch, match=re.escape(message)) as caught:
        replay(defined(code), ended)
    place = re.search(r"\(([^()]*):(\d+)\)$", str(caught.value))
    assert place is not None
    assert place[1] == __file__
    assert line in Path(__file__).read_text(encoding="utf-8").splitlines()[int(place[2]) - 1]


async def appended(amount: int) -> list[object]:
    result = await order(amount)
    await thank()
    return result


async def another_result(amount: int) -> list[object]:
    return (await order(amount))[:2]


async def a_failure(amount: int) -> None:
    await order(amount)
    raise ValueError("new")


@pytest.mark.parametrize(
    "code, message",
    [
        (appended, "the run had ended, and the code now asks for thank#1"),
        (another_result, "the run had ended with"),
        (a_failure, "had ended as completed, and now ends as failed: ValueError: new"),
    ],
)
def test_a_run_that_had_ended_must_end_as_it_did(ended, code, message):
    with pytest.raises(ks.ReplayMismatch, match=re.escape(message)):
        replay(defined(code), ended)


def test_another_version_is_refused_as_a_worker_would(ended):
    with pytest.raises(ks.ReplayMismatch, match="began under version '1', and this worker has"):
        replay(defined(order, version="2"), ended)


def test_the_history_of_another_workflow_is_refused(ended):
    with pytest.raises(ks.DefinitionError, match="one of workflow 'order', not of 'other'"):
        replay(Workflow(order, name="other"), ended)
    with pytest.raises(ks.DefinitionError, match="not a workflow"):
        replay(order, ended)


def test_a_store_without_a_run_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    with world(url, workflows=[ORDER], worker=False) as here:
        here.start(ORDER, 5, run_id="order-1")
    for source in (url, tmp_path / "runs.db"):
        with pytest.raises(ks.DefinitionError, match="say which of its runs"):
            replay(ORDER, source)


# -- files and stores --------------------------------------------------------------------------------------------------


def test_a_history_is_saved_and_loaded(ended, asleep, tmp_path):
    for number, history in enumerate((ended, asleep)):
        path = tmp_path / f"{number}.json"
        history.save(path)
        again = History.load(path)
        assert [json.loads(row.record)["kind"] for row in again.rows] == [row.kind for row in history.rows]
        assert again.run.input == history.run.input
        assert replay(ORDER, path) == replay(ORDER, again) == replay(ORDER, history)
        again.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_file_has_a_line_for_each_record(ended, tmp_path):
    ended.save(tmp_path / "o.json")
    lines = (tmp_path / "o.json").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(ended.rows) + 4
    assert json.loads((tmp_path / "o.json").read_text(encoding="utf-8"))["run"]["id"] == "o-1"


def test_a_large_value_is_kept_in_the_file(tmp_path):
    async def large() -> int:
        return len(await big())

    workflow = Workflow(large, name="order")
    with world(workflows=[workflow]) as here:
        here.start(workflow, run_id="o-1").result()
        History.of(here.store, "o-1").save(tmp_path / "o.json")
    assert replay(workflow, tmp_path / "o.json").ended


@ks.step
async def big() -> str:
    return "x" * 200_000


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format":1,"run":{},"records":[]}', "\0", "[" * 10_000])
def test_what_is_no_history_is_refused(tmp_path, text):
    (tmp_path / "o.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointCorrupt, match="holds no history"):
        History.load(tmp_path / "o.json")


def test_a_file_that_was_edited_wrongly_is_refused(ended, tmp_path):
    ended.save(tmp_path / "o.json")
    text = (tmp_path / "o.json").read_text(encoding="utf-8")
    for old, new, error in (
        ('"kind":"timer"', '"kind":"tea"', CheckpointCorrupt),
        ('{"format": ', '{"format": 9', SchemaMismatch),
    ):
        (tmp_path / "o.json").write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(error):
            History.load(tmp_path / "o.json")


def test_a_store_is_read_and_nothing_is_written(tmp_path):
    path = tmp_path / "runs.db"
    recorded(days=3, url=path)
    store = SQLiteStore(path)
    store.renew_leases(WorkerInfo("w-1"))
    before = everything(store)
    for source in (path, str(path), f"sqlite:///{path}", store):
        assert replay(ORDER, source, "o-1").asks == ("sleep#1",)
    assert everything(store) == before
    with pytest.raises(ks.RunNotFound):
        replay(ORDER, path, "o-2")
    store.close()


def everything(store):
    return (
        store.list_runs(RunQuery()),
        store.list_checkpoints("o-1"),
        store.list_signals("o-1"),
        [worker.id for worker in store.list_workers()],
    )


def test_a_store_that_is_not_there_is_not_made(tmp_path):
    for source in (tmp_path / "no.db", f"sqlite:///{tmp_path}/no.db"):
        with pytest.raises(StoreUnavailable, match="no store at"):
            replay(ORDER, source, "o-1")
    assert not list(tmp_path.iterdir())
