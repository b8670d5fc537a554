"""A files store whose machine stops at any moment, or whose disk fails at any call: what was acknowledged is there."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from keepstep.errors import StoreError, StoreFull, StoreUnavailable
from keepstep.model import Kind, Signal, Status, WorkerInfo
from keepstep.ports import ClaimRequest, Create, Rekey, Send, Verdict
from keepstep.records.record import seal
from keepstep.stores.files.store import FilesStore
from keepstep.testing.faults.faulty_files import KEEP, LOSE, Chance, FaultyFiles, tree, write_tree
from keepstep.testing.store_contract import Holder, SteppedClock, at, commit, everything, queued, record, started

pytestmark = pytest.mark.crash

#: How often chance is asked what outlives a power cut, at each moment at which something may not.
DRAWS = int(os.environ.get("KEEPSTEP_EXAMPLES", "1"))


@pytest.fixture
def place():
    """In memory where there is such a place: that nothing is really synced makes no difference here."""
    memory = Path("/dev/shm")
    place = tempfile.mkdtemp(prefix="keepstep-", dir=memory if os.access(memory, os.W_OK) else None)
    yield Path(place)
    shutil.rmtree(place)


def child():
    first, checksum = seal(record("c", Kind.RUN_STARTED), 1, "")
    run = queued("c", parent="p", status=Status.RUNNING, worker="w1", epoch=1, seq=1, checksum=checksum, due_at=None)
    return Create(run, [first])


def acts(store):
    """One thing after the other, each a single change that must happen whole or not at all."""
    yield commit(store, Create(queued("a", tags={"x": "y"}, input=b'{"b":1,"a":[2]}')))
    parent = started(store, "p")
    yield
    yield parent.write(creates=[child()], sends=[Send(Signal("a", "hello")), Send(Signal("c", "welcome", id="i"))])
    large = b'"' + b"x" * 150_000 + b'"'
    yield parent.write(record("p"), record("p", value=large), record("p"))
    park = {"status": Status.WAITING, "release": True, "wakes": ("done",), "due_at": at(500)}
    yield parent.write(sends=[Send(Signal("p", "note", id="n"))], **park)
    ended = [record("c", Kind.RUN_FINISHED)]
    last = Holder(store, store.get_run("c"))
    yield last.write(*ended, status=Status.COMPLETED, sends=[Send(Signal("p", "done", id="k"))])
    (claim,) = store.claim_runs(ClaimRequest("w2", frozenset({"digest"}), run="p", statuses=frozenset(Status))).claims
    yield
    yield Holder(store, claim.run).write()
    yield commit(store, Send(Signal("a", "again", id="j")))
    yield store.delete_runs(["c"])
    yield commit(store, Create(queued("c")))
    yield commit(store, Create(queued("a", input=b"2"), over=0))
    yield commit(store, Rekey("p", "", "k1:x"))


def lived(place, clock):
    """Everything that was done to the disk, with what the store held after each act."""
    place.mkdir(exist_ok=True)
    disk = FaultyFiles(place)
    store = FilesStore(place / "runs", clock=clock, disk=disk)
    for worker in ("w1", "w2"):
        store.renew_leases(WorkerInfo(worker))
    disk.mark({})
    for _ in acts(store):
        disk.mark(everything(store))
    store.close()
    return disk


def images(disk):
    """What can be left at each moment, each image once: by a killed process, and by a power cut."""
    seen = set()
    for number, moment in disk.moments():
        draws = [Chance((number, draw), sector=draw % 2 * 509 + 3) for draw in range(DRAWS)] if moment.uncertain else []
        for fate in (LOSE, KEEP, *draws):
            left = tree(moment, fate)
            if repr(left) not in seen:
                seen.add(repr(left))
                yield number, fate is KEEP, left


def known(disk, number):
    """What was acknowledged before a moment, and what comes next."""
    states = [done.note for done in disk.journal if done.what == "mark"]
    before = len(disk.marks(number))
    return [states[max(before - 1, 0)], states[min(before, len(states) - 1)]]


def test_acknowledged_work_is_whole_at_every_moment(place):
    clock = SteppedClock()
    disk = lived(place / "first", clock)
    number = 0
    for at_entry, killed, left in images(disk):
        number += 1
        folder = place / f"after-{number}"
        write_tree(left, folder)
        clock.boot_id = "boot-1" if killed else f"boot-{number + 1}"
        store = FilesStore(folder / "runs", clock=clock, power_loss="may_lose_last")
        store.claim_runs(ClaimRequest(f"w{number + 9}"))  # which finishes what was begun
        assert everything(store) in known(disk, at_entry), (at_entry, disk.journal[at_entry - 3 : at_entry + 1])
        store.check(mend=True)
        assert store.check() == [], at_entry
        assert everything(store) in known(disk, at_entry), at_entry
        assert commit(store, Create(queued("after"))).verdict is Verdict.DONE
        store.close()
        shutil.rmtree(folder)
    assert number > 200


@pytest.mark.parametrize("skipped", ["files", "folders"])
def test_without_syncs_acknowledged_work_is_found_lost(place, monkeypatch, skipped):
    real = FaultyFiles.sync

    def sync(self, fd):
        if self._moment.nodes[self._open[fd]].folder is (skipped == "files"):
            real(self, fd)

    monkeypatch.setattr(FaultyFiles, "sync", sync)
    with pytest.raises((AssertionError, StoreError)):
        test_acknowledged_work_is_whole_at_every_moment(place)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_call_that_fails_once_is_reported_and_can_be_repeated(place, error):
    """At each call in turn: the store says that it failed, or does it all the same; afterwards nothing is missing."""
    clock = SteppedClock()
    calls = len(lived(place / "first", clock).calls)
    told = []
    for number in range(8, calls, 3):
        folder = place / str(number)
        folder.mkdir()
        disk = FaultyFiles(folder)
        store = FilesStore(folder / "runs", clock=clock, disk=disk)
        for worker in ("w1", "w2"):
            store.renew_leases(WorkerInfo(worker))
        disk.fail(number, error)
        held = {}
        try:
            for _ in acts(store):
                held = everything(store)
        except StoreUnavailable as failure:
            told.append(failure)
        except AssertionError:
            pass  # what the acts themselves expect of a store that does not fail
        disk.repair()
        store.claim_runs(ClaimRequest("w2"))
        now = everything(store)
        for run, (before, rows, signals) in held.items():
            if run in now and now[run][0].epoch >= before.epoch:
                assert now[run][1][: len(rows)] == rows or now[run][0].input != before.input, number
                assert now[run][2][: len(signals)] == signals or now[run][0].input != before.input, number
        store.close()
        again = FilesStore(folder / "runs", clock=clock)
        again.claim_runs(ClaimRequest("w9"))
        assert everything(again) == now, number
        again.close()
        shutil.rmtree(folder)
    assert len(told) > 20
    assert all(isinstance(one, StoreFull) is (error == errno.ENOSPC and not one.unknown) for one in told)


def test_folder_that_failed_to_sync_is_synced_before_it_is_read(place):
    disk = FaultyFiles(place)
    store = FilesStore(place / "runs", clock=SteppedClock(), disk=disk)
    store.renew_leases(WorkerInfo("w1"))
    writer = started(store, "r")
    syncs = []

    def fault(number, call):
        if call == "sync":
            syncs.append(number)
            return errno.EIO if len(syncs) in (2, 3) else None
        return None

    disk.fail_when(fault)
    with pytest.raises(StoreUnavailable) as failure:
        writer.write()
    assert failure.value.unknown
    with pytest.raises(StoreUnavailable):
        store.get_run("r")
    assert store.get_run("r").seq == 2
    last = len(disk.journal)
    (moment,) = [one for number, one in disk.moments() if number == last]
    write_tree(tree(moment, LOSE), place / "after")
    again = FilesStore(place / "after" / "runs")
    assert again.get_run("r").seq == 2
    again.close()
    store.close()
