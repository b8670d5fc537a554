"""After a change of keys nothing in a files store can be opened with the retired master key."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil

import pytest

import keepstep as ks
from keepstep.errors import CheckpointCorrupt, KeepstepError, StoreUnavailable
from keepstep.ports import Create, Rekey, Verdict
from keepstep.records.keys import Keys
from keepstep.stores.encrypted import EncryptedStore
from keepstep.stores.files.disk import Disk
from keepstep.stores.files.names import run_folder
from keepstep.stores.files.store import FilesStore
from keepstep.testing.store_contract import commit, get, queued, started

OLD, NEW = os.urandom(32), os.urandom(32)
RETIRED = Keys("old", {"old": OLD})
BOTH = Keys("new", {"new": NEW, "old": OLD})
CURRENT = Keys("new", {"new": NEW})


@ks.workflow(name="rekey child")
async def child(text):
    return text + "!"


@ks.workflow(name="rekey parent")
async def parent(text, again=True):
    if again:
        ks.continue_as(text, again=False)
    said = await (await ks.start(child, text))
    return [said, await ks.wait_for("go")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def opened(path):
    stores = []

    def opened(**options):
        stores.append(FilesStore(path, **{"power_loss": "may_lose_last", **options}))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def holders_of(word, path):
    """The files in which a word stands."""
    return [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and word in file.read_bytes()]


def wrapped(run, keys=RETIRED):
    return keys.new_cipher(run)[0]


def filled_with_a_family(store):
    """A driven run, and its child, which the newest entry of the run has created."""
    writer = started(store, "r", data_key=wrapped("r"))
    born = Create(queued("child", data_key=wrapped("child")))
    assert writer.write(creates=[born]).verdict is Verdict.DONE
    return writer


async def fill(url):
    """A finished series, its child, and a run that waits."""
    async with ks.open(url, keys=RETIRED, workflows=[parent, child]) as engine:
        run = await engine.start(parent, "a", run_id="done")
        await run.signal("go", 1)
        assert await (await run.latest()).result(30) == ["a!", 1]
        waits = await engine.start(parent, "b", run_id="waits")
        while (await (await waits.latest()).info()).status != "waiting":  # noqa: ASYNC110 - it parks by itself
            await asyncio.sleep(0.01)


async def outcomes(url, keys):
    async with ks.open(url, keys=keys, workflows=[parent, child]) as engine:
        waits = await (await engine.get("waits")).latest()
        with contextlib.suppress(KeepstepError):
            await waits.signal("go", 2, id="once")
        return [await (await (await engine.get(name)).latest()).result(30) for name in ("done", "waits")]


def test_no_file_holds_a_data_key_of_the_retired_master_key(path):
    async def main():
        await fill(f"files:{path}")
        assert len(holders_of(b"1:old:", path)) > 10
        left_behind = path / "trash" / "broken-off"
        shutil.copytree(path / run_folder("done"), left_behind)
        shutil.copy(left_behind / "000001.json", path / run_folder("done") / ".000009.json-dead.tmp")
        async with ks.open(f"files:{path}", keys=BOTH, worker=False) as engine:
            done = await engine.rekey()
            assert done.runs == done.changed > 4
            assert (done.left, done.damaged) == ({}, 0)
            assert await engine.call(engine.store.check) == []
            assert (await engine.care.verify()).sound
        assert holders_of(b"1:old:", path) == []
        assert await outcomes(f"files:{path}", CURRENT) == [["a!", 1], ["b!", 2]]

    asyncio.run(main())


def test_a_rekey_that_broke_off_is_finished_when_done_again(path, opened):
    class Breaking(Disk):
        left = 0

        def rename(self, old, new):
            self._count(new)
            super().rename(old, new)

        def link(self, old, new):
            self._count(new)
            super().link(old, new)

        def _count(self, new):
            if "/runs/" in new:
                self.left -= 1
                if self.left < 0:
                    raise OSError(5, "broken off")

    store = opened()
    filled_with_a_family(store)
    store.close()
    kept = path.with_name("kept")
    shutil.copytree(path, kept)
    for breaks_at in range(30):
        shutil.rmtree(path)
        shutil.copytree(kept, path)
        disk = Breaking(syncs=False)
        disk.left = breaks_at
        broken = opened(disk=disk)
        try:
            EncryptedStore(broken, BOTH).rekey()
        except StoreUnavailable:
            broken.close()
        else:
            break
        again = EncryptedStore(opened(), BOTH)
        again.rekey()
        assert holders_of(b"1:old:", path) == []
        assert {again.cipher(get(again, name)) is None for name in ("r", "child")} == {False}
    assert breaks_at > 5


def test_next_rekey_removes_a_retired_key_that_a_worker_still_used(path, opened):
    writer = filled_with_a_family(opened())
    sealed = EncryptedStore(opened(), BOTH)
    sealed.rekey()
    born = Create(queued("late", data_key=wrapped("late")))
    assert writer.write(creates=[born]).verdict is Verdict.DONE  # its store has rewritten entries in memory
    assert holders_of(b"1:old:", path) != []
    done, _ = sealed.rekey()
    assert done.changed == 1
    assert holders_of(b"1:old:", path) == []
    assert writer.write().verdict is Verdict.DONE
    assert sealed.rekey()[0].changed == 0
    assert holders_of(b"1:old:", path) == []
    assert [row.seq for row in opened().list_checkpoints("r")] == [1, 2, 3, 4]


def test_a_run_in_plain_text_keeps_no_retired_key_of_its_children(path, opened):
    writer = started(opened(), "r")
    writer.write(creates=[Create(queued("child", data_key=wrapped("child")))])
    sealed = EncryptedStore(opened(), BOTH)
    done, _ = sealed.rekey()
    assert (done.changed, done.plain) == (1, 1)
    assert holders_of(b"1:old:", path) == []
    assert get(sealed.inner, "r").data_key == ""


def test_leftovers_of_a_replaced_run_hold_no_retired_key(path, opened):
    store = opened()
    commit(store, Create(queued("r", data_key=wrapped("r"))))
    folder = path / run_folder("r")
    assert commit(store, Create(queued("r", data_key=wrapped("r", BOTH)), over=0)).verdict is Verdict.DONE
    assert commit(store, Create(queued("r", data_key=wrapped("r", BOTH)), over=0)).verdict is Verdict.DONE
    (folder / "000002.json").write_bytes((folder / "000001.json").read_bytes()[:-9])
    EncryptedStore(store, BOTH).rekey()
    assert holders_of(b"1:old:", path) == []
    assert get(opened(), "r").data_key.startswith("1:new:")


def test_damaged_run_is_reported_and_the_others_are_rekeyed(path, opened):
    store = opened()
    filled_with_a_family(store)
    entry = path / run_folder("r") / "000001.json"
    entry.write_bytes(entry.read_bytes().replace(b"running", b"rolling"))
    fresh = EncryptedStore(opened(), BOTH)
    done, _ = fresh.rekey()
    assert done.damaged == 1
    assert {name.split("/")[2] for name in holders_of(b"1:old:", path)} == {"r"}
    with pytest.raises(CheckpointCorrupt):
        fresh.inner.list_checkpoints("r")


def test_the_same_key_again_writes_nothing(path, opened):
    store = opened()
    commit(store, Create(queued("r", data_key="1:new:a")))
    assert commit(store, Rekey("r", "1:new:a", "1:new:a")).verdict is Verdict.DONE
    assert [file.name for file in (path / run_folder("r")).iterdir()] == ["000001.json"]
