"""The memory store: the contract, and what only it does."""

from __future__ import annotations

import threading

import pytest

from keepstep.model import Status, WorkerInfo
from keepstep.ports import ClaimRequest, Create, Verdict
from keepstep.stores.memory import MemoryStore
from keepstep.testing.store_contract import SteppedClock, StoreContract, ids, queued, started


class TestContract(StoreContract):
    @pytest.fixture(autouse=True)
    def _nothing_yet(self):
        self.made = None

    def make_store(self, clock):
        if self.made is None:  # the contents live as long as the object
            self.made = MemoryStore(clock=clock)
        return self.made


def claim(store, worker):
    return store.claim_runs(ClaimRequest(worker, frozenset({"digest"}), 10))


def test_worker_that_is_marked_dead_loses_its_runs_at_once():
    store = MemoryStore(clock=SteppedClock())
    store.renew_leases(WorkerInfo("w1"))
    writer = started(store, "r")
    assert ids(claim(store, "w2")) == []
    store.mark_dead("w1")
    assert [(worker.id, worker.alive) for worker in store.list_workers()] == [("w1", False), ("w2", True)]
    (taken,) = claim(store, "w2").claims
    assert (taken.taken_from, taken.run.status) == ("w1", Status.RECOVERING)
    assert writer.write().verdict is Verdict.FENCED
    assert store.renew_leases(WorkerInfo("w1")) is False


def test_threads_that_claim_get_each_run_once():
    store = MemoryStore(clock=SteppedClock())
    store.commit([Create(queued(f"r{n}")) for n in range(300)])
    taken = [[] for _ in range(4)]
    ready = threading.Barrier(4)

    def work(n):
        ready.wait()
        while found := store.claim_runs(ClaimRequest(f"w{n}", frozenset({"digest"}), 3)).claims:
            taken[n].extend(one.run.id for one in found)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run for some in taken for run in some) == sorted(f"r{n}" for n in range(300))
