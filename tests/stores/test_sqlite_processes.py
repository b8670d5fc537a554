"""Several processes on one SQLite file: who wins, who waits, who is dead."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from keepstep.errors import StoreUnavailable
from keepstep.model import LEASE_SECONDS, RunQuery, Status, WorkerInfo
from keepstep.ports import Advance, ClaimRequest, Create, Row, SystemClock, Verdict, WouldBlock
from keepstep.stores.sqlite.store import SQLiteStore
from tests.stores.peer import Peer, queued


class LaterClock(SystemClock):
    """The machine's clock, a while from now."""

    def __init__(self):
        super().__init__()
        self.later = 0.0

    def boot(self):
        boot_id, seconds = super().boot()
        return boot_id, seconds + self.later


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


@pytest.fixture
def clock():
    return LaterClock()


@pytest.fixture
def store(path, clock):
    store = SQLiteStore(path, clock=clock)
    yield store
    store.close()


def claim(store, worker="me", limit=10):
    return store.claim_runs(ClaimRequest(worker, frozenset({"digest"}), limit)).claims


def peers(path, count, **options):
    stack = ExitStack()
    return stack, [stack.enter_context(Peer(path, **options)) for _ in range(count)]


# -- one winner ------------------------------------------------------------------------------------------------------


def test_processes_that_open_a_new_store_together_share_it(path):
    stack, others = peers(path, 4)
    with stack:
        for peer in others:
            peer.tell("open")
        for peer in others:
            peer.answer()
        for n, peer in enumerate(others):
            assert peer.ask("create", runs=[f"r{n}"]) == [f"r{n}"]
        assert others[0].ask("create", runs=["r3"]) == []


def test_one_process_wins_each_run_that_all_create(store, path):
    names = [f"r{n}" for n in range(60)]
    stack, others = peers(path, 3)
    with stack:
        for peer in others:
            peer.opened()
        for peer in others:
            peer.tell("create", runs=names)
        won = [peer.answer() for peer in others]
    assert sorted(run for some in won for run in some) == sorted(names)
    assert len(store.list_runs(RunQuery(limit=1000)).runs) == len(names)


def test_one_process_wins_each_run_that_all_claim(store, path):
    names = [f"r{n}" for n in range(120)]
    store.commit([Create(queued(name)) for name in names])
    stack, others = peers(path, 3)
    with stack:
        for n, peer in enumerate(others):
            peer.opened().ask("enrol", worker=f"w{n}")
        for n, peer in enumerate(others):
            peer.tell("claim_all", worker=f"w{n}", limit=2)
        taken = [peer.answer() for peer in others]
        assert sorted(run for some in taken for run in some) == sorted(names)
        for n, mine in enumerate(taken):
            for run in mine:
                assert store.get_run(run).worker == f"w{n}"


# -- who is dead -----------------------------------------------------------------------------------------------------


def test_a_killed_owner_is_known_to_be_dead_at_once_and_a_living_one_to_live(store, path):
    store.commit([Create(queued("a")), Create(queued("b"))])
    with Peer(path) as doomed, Peer(path) as living:
        assert doomed.opened().ask("claim", worker="doomed") == ["a"]
        assert living.opened().ask("claim", worker="living") == ["b"]
        assert claim(store) == ()
        assert [worker.alive for worker in store.list_workers()] == [True, True, True]
        doomed.kill()
        assert {worker.id: worker.alive for worker in store.list_workers()}["doomed"] is False
        (taken,) = claim(store)
        assert (taken.run.id, taken.taken_from, taken.run.status) == ("a", "doomed", Status.RECOVERING)
        assert (taken.run.recoveries, taken.lease.epoch) == (1, 2)
        assert claim(store) == ()
    assert not Path(f"{path}-workers", "doomed.lock").exists()


def test_a_stopped_owner_keeps_its_runs_until_its_lease_ends_and_is_fenced_after(store, path, clock):
    store.commit([Create(queued("r"))])
    with Peer(path) as peer:
        assert peer.opened().ask("claim", worker="sleeper") == ["r"]
        assert peer.ask("write", run="r", worker="sleeper", epoch=1, after=0) == "done"
        os.kill(peer.pid, signal.SIGSTOP)
        for clock.later in range(0, int(LEASE_SECONDS), 5):
            assert store.renew_leases(WorkerInfo("me"))
            assert claim(store) == ()
        clock.later = LEASE_SECONDS + 1
        (taken,) = claim(store)
        assert (taken.run.id, taken.taken_from, taken.lease.epoch) == ("r", "sleeper", 2)
        os.kill(peer.pid, signal.SIGCONT)
        assert peer.ask("write", run="r", worker="sleeper", epoch=1, after=1) == "fenced"
        assert peer.ask("enrol", worker="sleeper") is False
        store.commit([Create(queued("new"))])
        assert peer.ask("claim", worker="sleeper") == []
    row = Row(2, "step completed", b"{}")
    assert store.commit([Advance("r", "me", 2, 1, [row], "x")])[0].verdict is Verdict.DONE


def test_a_missing_lock_file_is_not_death(store, path, clock):
    store.commit([Create(queued("r"))])
    with Peer(path) as peer:
        assert peer.opened().ask("claim", worker="w") == ["r"]
        Path(f"{path}-workers", "w.lock").unlink()
        assert claim(store) == ()
        peer.kill()
        assert claim(store) == ()
        for clock.later in range(0, 2 * int(LEASE_SECONDS), 5):
            assert store.renew_leases(WorkerInfo("me"))
        assert [taken.taken_from for taken in claim(store)] == ["w"]


def test_a_forked_child_neither_uses_the_store_nor_keeps_its_parent_alive(store, path):
    store.commit([Create(queued("r"))])
    child = 0
    with Peer(path) as peer:
        assert peer.opened().ask("claim", worker="parent") == ["r"]
        try:
            child, said = peer.ask("fork")
            assert [what.partition(":")[0] for what in said] == ["StoreError", "StoreError"]
            assert "forked" in said[0]
            assert peer.ask("write", run="r", worker="parent", epoch=1, after=0) == "done"
            assert claim(store) == ()
            peer.kill()
            os.kill(child, 0)  # it lives
            assert [taken.taken_from for taken in claim(store)] == ["parent"]
            assert store.commit([Create(queued("s"))])[0].verdict is Verdict.DONE
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


def test_a_child_forked_inside_a_transaction_does_not_block_writers(store, path):
    child = 0
    with Peer(path) as peer:
        try:
            child, _ = peer.opened().ask("fork_and_hold")
            peer.kill()
            os.kill(child, 0)  # it lives
            assert store.commit([Create(queued("r"))])[0].verdict is Verdict.DONE
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


def test_closing_a_store_frees_what_it_leased(store, path):
    other = SQLiteStore(path)
    store.commit([Create(queued("r"))])
    assert [one.run.id for one in claim(other, "w")] == ["r"]
    assert claim(store) == ()
    other.close()
    assert [one.taken_from for one in claim(store)] == ["w"]


def test_worker_that_leaves_removes_its_lock(store, path):
    store.renew_leases(WorkerInfo("w"))
    lock = Path(f"{path}-workers", "w.lock")
    assert lock.exists()
    assert store.renew_leases(WorkerInfo("w"), leaving=True)
    assert not lock.exists()


def test_an_id_in_use_is_refused_to_a_second_process(store, path):
    store.renew_leases(WorkerInfo("w"))
    store.commit([Create(queued("r"))])
    with Peer(path) as peer:
        assert peer.opened().ask("enrol", worker="w") is False
        assert peer.ask("claim", worker="w") == []
    assert store.renew_leases(WorkerInfo("w"))


# -- who waits -------------------------------------------------------------------------------------------------------


@pytest.fixture
def path_on_disk():
    """A path outside the files that a session keeps in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder) / "runs.db"


def test_a_writer_among_busy_ones_gets_its_turn(path_on_disk):
    """A commit in memory takes less time than a waiter needs to see that the lock is free, so this is for a disk."""
    store = SQLiteStore(path_on_disk)
    stack, hogs = peers(path_on_disk, 2)
    with stack, contextlib.closing(store):
        for n, peer in enumerate(hogs):
            peer.opened().ask("start_hog", worker=f"hog{n}", run=f"hog{n}")
        passed = []
        for n in range(40):
            before = sum(store.get_run(f"hog{n}").seq for n in range(2))
            store.commit([Create(queued(f"r{n}"))])
            passed.append(sum(store.get_run(f"hog{n}").seq for n in range(2)) - before)
            time.sleep(0.01)  # or it would be a hog itself
        commits = [peer.ask("stop_hog") for peer in hogs]
    assert min(commits) > 20, "the busy ones were kept from writing"
    assert statistics.median(passed) < 10, f"the busy ones wrote {passed} times before it"


def test_a_process_stopped_inside_a_transaction_is_named(path):
    store = SQLiteStore(path, busy_seconds=0.2)
    store.commit([Create(queued("r"))])
    with Peer(path) as peer:
        peer.opened()
        assert peer.ask("hold") == "holding"
        with pytest.raises(WouldBlock):
            store.commit([Create(queued("s"))], wait=False)
        with pytest.raises(StoreUnavailable) as caught:
            store.commit([Create(queued("s"))])
        assert caught.value.unknown is False
        if Path("/proc/locks").exists():
            assert f"process {peer.pid}" in str(caught.value)
        os.kill(peer.pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="stopped" if Path("/proc/locks").exists() else ""):
            store.renew_leases(WorkerInfo("w"))
        assert store.get_run("r") is not None, "reading waits for no writer"
        assert store.get_run("s") is None
        os.kill(peer.pid, signal.SIGCONT)
        peer.tell("any line lets it go")
        assert peer.answer() is None
        assert peer.ask("create", runs=["t"]) == ["t"], "the one that gave up waiting let its turn pass"
        assert store.commit([Create(queued("s"))])[0].verdict is Verdict.DONE
    store.close()


def test_the_death_of_a_process_inside_a_transaction_undoes_it(store, path):
    with Peer(path) as peer:
        peer.opened()
        assert peer.ask("hold") == "holding"
        peer.kill()
        assert store.commit([Create(queued("r"))])[0].verdict is Verdict.DONE
