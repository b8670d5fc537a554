"""A damaged file of a run: it is named, nothing is cut by itself, and what a person accepts is no more than is lost."""

from __future__ import annotations

import json
import shutil

import pytest

import keepstep as ks
from keepstep.care.repair import accept_loss, assess
from keepstep.care.retention import erase
from keepstep.care.verify import verify
from keepstep.errors import CheckpointCorrupt
from keepstep.model import Status
from keepstep.stores.files.names import run_folder
from keepstep.stores.files.store import FilesStore
from tests.care.stored import PATIENT, TOTAL, driven, parked


async def fill(engine):
    await (await engine.start(TOTAL, 1, 2, 3, run_id="done")).result()
    await (await engine.start(TOTAL, 4, run_id="neighbour")).result()
    await engine.start(PATIENT, 10, run_id="waits")
    await parked(engine, "waits")


@pytest.fixture
def path(tmp_path):
    store = FilesStore(tmp_path / "runs")
    driven(store, fill)
    store.close()
    return tmp_path / "runs"


@pytest.fixture
def opened(path):
    stores = []

    def open_():
        stores.append(FilesStore(path))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def edit(file):
    file.write_text(file.read_text().replace('"value": ', '"value": 1'))


def empty(file):
    file.write_text("")


def remove(file):
    file.unlink()


def entry(path, run, number):
    return path / run_folder(run) / f"{number:06}.json"


@pytest.mark.parametrize("damage", [edit, empty, remove])
@pytest.mark.parametrize("number", [3, 4, 5])
def test_a_loss_is_accepted_from_the_damage_on(path, opened, damage, number):
    kept, repeats = number - 1, ["add#3"] if number == 3 else []
    damage(entry(path, "done", number))
    left = {one: one.read_bytes() for one in (path / run_folder("done")).glob("0*")}
    store = opened()
    store.check(mend=True)
    found = verify(store)
    assert (found.runs.invalid, list(found.damaged)) == (1, ["done"])
    counted = verify(store, ["done"]).records
    assert (counted.total, counted.valid) == (5, kept)
    assert all("'done'" in flaw.what for flaw in found.flaws)
    store = opened()
    loss = assess(store, "done")
    assert (loss.kept, loss.repeats) == (kept, repeats)
    assert loss.unreadable >= 1
    assert {one: one.read_bytes() for one in (path / run_folder("done")).glob("0*")} == left
    store = opened()
    accept_loss(store, "done", str(path.parent / "aside.jsonl"), actor="ann", reason="disk trouble")
    assert {one: one.read_bytes() for one in left} == left
    assert store.get_run("done").status is Status.SET_ASIDE
    store = opened()
    assert verify(store).sound

    async def go_on(engine):
        handle = await engine.get("done")
        await handle.retry("it is mended")
        return await handle.result(), await handle.audit()

    result, audit = driven(store, go_on)
    assert result == 6
    [told] = [one for one in audit if one.what == "set aside by repair"]
    assert told.actor == "ann"
    assert verify(opened()).sound
    shutil.rmtree(path / "index")
    assert verify(opened()).sound


@pytest.mark.parametrize("damage", [b"{ half", b"\xff"])
def test_unreadable_entry_is_kept_in_the_file_as_it_is(path, opened, tmp_path, damage):
    entry(path, "done", 3).write_bytes(damage)
    accept_loss(opened(), "done", str(tmp_path / "aside.jsonl"), actor="ann")
    lines = [json.loads(line) for line in (tmp_path / "aside.jsonl").read_text().splitlines()]
    [raw] = [line["raw"] for line in lines if "raw" in line]
    assert raw in ({"file": "000003.json", "text": "{ half"}, {"file": "000003.json", "base64": "/w=="})


def test_signals_before_the_damage_stay(path, opened, tmp_path):
    store = opened()

    async def send(engine):
        await engine.signal("waits", "early", 7)

    driven(store, send, worker=False)
    newest = max((path / run_folder("waits")).glob("0*.json"))
    driven(store, lambda engine: engine.signal("waits", "other", 8), worker=False)
    empty(max((path / run_folder("waits")).glob("0*.json")))
    assert newest.stat().st_size
    store = opened()
    accept_loss(store, "waits", str(tmp_path / "aside.jsonl"), actor="ann")
    assert [one.name for one in store.list_signals("waits")] == ["early"]
    assert verify(store).sound


@pytest.mark.parametrize("damage", [empty, remove])
def test_a_run_without_its_beginning_is_left_until_it_is_erased(path, opened, tmp_path, damage):
    damage(entry(path, "done", 1))
    store = opened()
    assert not any(flaw.mended for flaw in store.check(mend=True))
    assert list(verify(store).damaged) == ["done"]
    with pytest.raises(CheckpointCorrupt, match="erase it"):
        accept_loss(store, "done", str(tmp_path / "aside.jsonl"), actor="ann")

    async def again(engine):
        await erase(engine, "done", force=True, reason="", actor="ann")
        return await (await engine.start(TOTAL, 1, 2, 3, run_id="done")).result()

    assert driven(store, again) == 6
    assert verify(opened()).sound


def test_run_whose_end_was_lost_is_reported_as_damaged(path, opened):
    remove(entry(path, "done", 5))

    async def ask(engine):
        with pytest.raises(CheckpointCorrupt, match=r"000005\.json is missing"):
            await (await engine.start(TOTAL, 1, 2, 3, run_id="done")).result(30)
        return await (await engine.start(TOTAL, 1)).result()

    assert driven(opened(), ask) == 1
    assert ks.Status.COMPLETED.value in next(flaw.what for flaw in opened().check())
