"""How places and tokens are divided, and that no interleaving of workers exceeds a limit."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model import Ask, GateChange, Share, WorkerInfo
from keepstep.model.gate import SERVICE
from keepstep.stores.files.store import FilesStore
from keepstep.stores.postgres.store import PostgresStore
from keepstep.stores.services import parts
from keepstep.stores.sqlite import services
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import START
from tests.postgres import empty_store

WANTS = st.lists(st.tuples(st.integers(0, 20), st.one_of(st.none(), st.floats(0, 100))), max_size=6).map(
    lambda wants: [Share(f"w{n}", 0, need, since) for n, (need, since) in enumerate(wants)]
)


@given(st.integers(-2, 40), WANTS)
def test_parts_are_equal_and_leave_nothing_that_is_waited_for(places, wants):
    found = parts(places, wants)
    assert found.keys() == {want.worker for want in wants}
    assert all(0 <= found[want.worker] <= want.need for want in wants)
    assert sum(found.values()) <= max(places, 0)
    lacking = [want for want in wants if found[want.worker] < want.need]
    if lacking:
        least = min(found[want.worker] for want in lacking)
        assert max(found.values()) <= least + 1
    if any(want.since is not None for want in lacking):
        spare = max(places, 0) - sum(found.values())
        assert spare == 0 or all(found[want.worker] > max(places, 0) // len(wants) for want in lacking if want.since)


def test_the_longest_waiting_get_the_rest():
    wants = [Share("a", 0, 9, 5.0), Share("b", 0, 9, 1.0), Share("c", 0, 9, 3.0), Share("d", 0, 1, 0.0)]
    assert parts(6, wants) == {"a": 1, "b": 2, "c": 2, "d": 1}


class Bodies:
    """Counts the attempts that run at once, in all workers."""

    def __init__(self):
        self._lock = threading.Lock()
        self.running = self.most = self.ended = 0

    def enter(self):
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)

    def leave(self):
        with self._lock:
            self.running -= 1
            self.ended += 1


def work(store, worker, bodies, attempts, errors):
    """A worker that asks, begins what it may, and ends it one by one."""
    try:
        mine, share, waiting, since = 0, 0, attempts, time.monotonic()
        while waiting or mine:
            ask = Ask("bank", running=mine, waiting=waiting, waited_seconds=time.monotonic() - since)
            (grant,) = store.pass_gates(worker, [ask])
            share = grant.share
            while waiting and mine < share:
                mine, waiting, since = mine + 1, waiting - 1, time.monotonic()
                bodies.enter()
            if mine:
                bodies.leave()
                mine -= 1
        store.pass_gates(worker, [Ask("bank", leaving=True)])
    except BaseException as error:
        errors.append(error)
        raise


@pytest.fixture(params=["sqlite", "files", "postgres"])
def open_store(request, tmp_path):
    if request.param == "sqlite":
        yield lambda: SQLiteStore(tmp_path / "runs.db", power_loss="may_lose_last")
    elif request.param == "files":
        yield lambda: FilesStore(tmp_path / "runs", power_loss="may_lose_last")
    else:
        with empty_store() as url:
            yield lambda: PostgresStore(url)


def test_workers_of_several_stores_never_run_more_than_the_concurrency(open_store):
    """Each thread has a store of its own, as each process has."""
    bodies, errors, threads = Bodies(), [], []
    with ExitStack() as stack:
        stores = [open_store() for _ in range(4)]
        for store in stores:
            stack.callback(store.close)
        stores[0].change_gate(SERVICE, "bank", GateChange(START, "test", "declare", {"concurrency": 3}))
        for n, store in enumerate(stores):
            assert store.renew_leases(WorkerInfo(f"w{n}"))
            threads.append(threading.Thread(target=work, args=(store, f"w{n}", bodies, 20, errors)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (gate,) = stores[0].list_gates(SERVICE)
    assert errors == []
    assert (bodies.ended, gate.shares) == (80, ())
    assert 1 < bodies.most <= 3


def test_an_ask_reads_only_the_gates_that_it_names(tmp_path, monkeypatch):
    read, inner = [], services.read_gates

    def reading(*words):
        read.extend(found := inner(*words))
        return found

    monkeypatch.setattr(services, "read_gates", reading)
    store = SQLiteStore(tmp_path / "runs.db")
    try:
        assert store.renew_leases(WorkerInfo("w1"))
        for n in range(20):
            store.change_gate(SERVICE, f"s{n}", GateChange(START, "test", "declare", {"concurrency": 1}))
        read.clear()
        grants = store.pass_gates("w1", [Ask(f"s{n}", waiting=1) for n in range(3)])
        assert [grant.share for grant in grants] == [1, 1, 1]
        assert {gate.name for gate in read} == {"s0", "s1", "s2"}
    finally:
        store.close()
