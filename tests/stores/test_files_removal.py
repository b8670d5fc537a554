"""A run that another process removes at any moment is gone for those who read it, and never damaged."""

from __future__ import annotations

import itertools
import os
from contextlib import closing
from datetime import timedelta

import pytest

from keepstep.errors import StoreUnavailable
from keepstep.model import Flaw, RunPage, RunQuery, Signal, Status, WorkerInfo
from keepstep.ports import ClaimRequest, Create, Rekey, Send, Verdict
from keepstep.stores.files.disk import Disk
from keepstep.stores.files.names import run_folder
from keepstep.stores.files.store import FilesStore
from keepstep.testing.store_contract import commit, get, parked, queued, started
from keepstep.testing.store_contract.ground import START

LATER = START + timedelta(hours=1)


class Watched(Disk):
    """Calls `act` right before the n-th look into the folder of a run, or after half of a listing was read."""

    def __init__(self, act, moment, *, halfway=False):
        super().__init__(syncs=False)
        self.act, self.moment, self.halfway = act, moment, halfway
        self.looks = itertools.count()
        self.has_acted = False

    def _look(self, path):
        if run_folder("r") in path and next(self.looks) == self.moment:
            self.has_acted = True
            self.act()
            return True
        return False

    def read(self, path):
        self._look(path)
        return super().read(path)

    def identity(self, path):
        self._look(path)
        return super().identity(path)

    def names(self, path):
        names = sorted(super().names(path))
        if self._look(path):
            return names[::2] if self.halfway else super().names(path)
        return names


OPERATIONS = {
    "get": lambda store: store.get_run("r"),
    "records": lambda store: store.list_checkpoints("r"),
    "later records": lambda store: store.list_checkpoints("r", 2),
    "signals": lambda store: store.list_signals("r"),
    "list": lambda store: store.list_runs(RunQuery()),
    "check": lambda store: store.check(),
    "claim": lambda store: store.claim_runs(ClaimRequest("w2", workflows=("digest",))),
    "claim by name": lambda store: store.claim_runs(ClaimRequest("w2", run="r", statuses=(Status.WAITING,))),
    "send": lambda store: store.commit([Send(Signal("r", "go", id="2"))]),
    "create": lambda store: store.commit([Create(queued("r"))]),
    "rekey": lambda store: store.commit([Rekey("r", "", "1:new:b")]),
    "delete": lambda store: store.delete_runs(["r"]),
    "salvage": lambda store: store.salvaged("r"),
}


def fill(store):
    writer = started(store, "r")
    commit(store, Send(Signal("r", "go", id="1")))
    for _ in range(3):
        writer.write()
    writer.write(status=Status.WAITING, release=True, due_at=START)
    parked(store, "s")


def sound(found):
    """Whether an answer calls nothing damaged."""
    if isinstance(found, RunPage):
        return found.unreadable == ()
    return found is None or not (isinstance(found, list) and any(isinstance(one, Flaw) for one in found))


def removed_at(path, operation, moment, *, again=False, halfway=False):
    """What an operation gives if another process removes the run at its n-th look; None after the last look."""
    other = FilesStore(path, power_loss="may_lose_last")
    fill(other)

    def act():
        assert other.delete_runs(["r"]) in (0, 1)  # 0: the operation itself has leased or removed it
        if again:
            commit(other, Create(queued("r", created_at=LATER)))

    disk = Watched(act, moment, halfway=halfway)
    store = FilesStore(path, disk=disk)
    store.renew_leases(WorkerInfo("w2", pid=os.getpid()))
    found = OPERATIONS[operation](store)
    answer = sound(found), found, store.list_runs(RunQuery()).unreadable
    store.close()
    other.close()
    return disk.has_acted, answer


VARIANTS = [
    *((operation, "removed") for operation in OPERATIONS),
    *((operation, "replaced") for operation in ("get", "records", "signals", "send")),
    *((operation, "listed halfway") for operation in ("get", "records", "list", "check", "claim")),
]


@pytest.mark.parametrize("operation, variant", VARIANTS)
def test_a_run_removed_at_any_look_is_not_damaged(tmp_path, caplog, operation, variant):
    for moment in itertools.count():
        has_acted, (is_sound, found, unreadable) = removed_at(
            tmp_path / str(moment),
            operation,
            moment,
            again=variant == "replaced",
            halfway=variant == "listed halfway",
        )
        assert is_sound, (moment, found)
        assert unreadable == (), moment
        assert "cannot be" not in caplog.text, moment
        if not has_acted:
            break
    assert moment > 1


class Breaking(Disk):
    """Fails from the n-th change of a name on, as if the process had died there."""

    def __init__(self, changes):
        super().__init__(syncs=False)
        self.left = changes

    def _count(self):
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "broken off")

    def link(self, old, new):
        self._count()
        super().link(old, new)

    def rename(self, old, new):
        self._count()
        super().rename(old, new)

    def unlink(self, path):
        self._count()
        super().unlink(path)

    def remove_empty(self, path):
        self._count()
        super().remove_empty(path)


def test_erase_that_broke_off_anywhere_is_finished_by_the_next(tmp_path):
    name = "patient-ann"
    for changes in itertools.count():
        path = tmp_path / str(changes)
        with closing(FilesStore(path, power_loss="may_lose_last")) as store:
            commit(store, Create(queued(name, status=Status.CANCELLED, due_at=None, tags={"ward": "seven"})))
            parked(store, "s")
        broken = FilesStore(path, disk=Breaking(changes))
        try:
            assert broken.delete_runs([name], finished=True, scrub=True) == 1
        except (StoreUnavailable, OSError):
            is_whole = False
        else:
            is_whole = True
        broken.abandon()
        with closing(FilesStore(path, power_loss="may_lose_last")) as store:
            if not is_whole:
                assert store.delete_runs([name], finished=True, scrub=True) == 1, changes
            assert store.delete_runs([name], finished=True, scrub=True) == 0
            assert store.check() == []
            assert [run.id for run in store.list_runs(RunQuery()).runs] == ["s"]
        files = [file for file in path.rglob("*") if file.name != "keepstep.json"]
        assert [file for file in files if name in str(file.relative_to(path)) or "erasing" in file.name] == []
        assert [file for file in files if file.is_file() and b"seven" in file.read_bytes()] == []
        if is_whole:
            break
    assert changes > 5


def test_a_refused_erase_leaves_no_mark(tmp_path):
    with closing(FilesStore(tmp_path / "runs", power_loss="may_lose_last")) as store:
        started(store, "r")
        assert store.delete_runs(["r"], finished=True, scrub=True) == 0
        assert list((tmp_path / "runs" / "index").glob("erasing-*")) == []
        assert store.get_run("r") is not None


def test_a_run_created_while_its_predecessor_is_removed_stays(tmp_path):
    class Slow(Disk):
        is_removing = False

        def unlink(self, path):  # of the temporary name, right after the entry that deletes the run was linked
            super().unlink(path)
            if self.is_removing:
                self.is_removing = False
                assert commit(other, Create(queued("r", created_at=LATER))).verdict is Verdict.DONE

    disk = Slow(syncs=False)
    with (
        closing(FilesStore(tmp_path / "runs", power_loss="may_lose_last")) as other,
        closing(FilesStore(tmp_path / "runs", disk=disk)) as store,
    ):
        parked(store, "r")
        disk.is_removing = True
        assert store.delete_runs(["r"]) == 1
        for one in (other, store):
            assert get(one, "r").created_at == LATER
            assert [run.created_at for run in one.list_runs(RunQuery()).runs] == [LATER]
