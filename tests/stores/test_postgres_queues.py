"""Queues with limits on PostgreSQL: many claimers at once, and a session that holds the row of a gate."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import psycopg
import pytest

from keepstep.model import GateChange, WorkerInfo
from keepstep.model.gate import QUEUE
from keepstep.ports import ClaimRequest, Create
from keepstep.stores.postgres.store import PostgresStore
from keepstep.testing.store_contract import START, SteppedClock, queued
from tests.postgres import empty_store, session_dsn

CLAIMERS = 6


@pytest.fixture
def url():
    with empty_store() as url:
        yield url


def declare(store, name, **limits):
    store.change_gate(QUEUE, name, GateChange(START, "test", "declare", limits))


def fill(store, name, count, **fields):
    store.commit([Create(queued(f"{name}-{n:03}", queue=name, **fields)) for n in range(count)])


def claimed_at_once(url, rounds=4, limit=3):
    """Let several processes' worth of stores claim at the same moments; return the runs that each claim gave."""
    found, barrier, lock = Counter(), threading.Barrier(CLAIMERS), threading.Lock()

    def work(number):
        store = PostgresStore(url)
        try:
            store.renew_leases(WorkerInfo(f"w{number}"))
            for _ in range(rounds):
                barrier.wait(60)
                taken = store.claim_runs(ClaimRequest(f"w{number}", frozenset({"digest"}), limit)).claims
                with lock:
                    found.update(claim.run.queue for claim in taken)
            barrier.wait(60)  # a store that closes leaves its runs to those that still claim
        finally:
            store.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLAIMERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def test_claimers_at_once_share_one_budget(url):
    """Neither places nor tokens are spent twice, whoever skips a locked row."""
    store = PostgresStore(url)
    declare(store, "places", concurrency=5)
    declare(store, "tokens", rate={"count": 1, "per": 3600.0, "burst": 4})
    declare(store, "keys", per_key=1)
    fill(store, "places", 40)
    fill(store, "tokens", 40)
    fill(store, "keys", 40, key="one")
    found = claimed_at_once(url)
    store.close()
    assert found == {"places": 5, "tokens": 4, "keys": 1}


def test_a_session_that_holds_a_gate_stops_no_other_queue(url):
    store = PostgresStore(url, clock=SteppedClock())
    declare(store, "held", concurrency=5)
    declare(store, "other", concurrency=5)
    for name in ("held", "other", "default"):
        fill(store, name, 2)
    store.renew_leases(WorkerInfo("w1"))

    def taken():
        claims = store.claim_runs(ClaimRequest("w1", frozenset({"digest"}), 10)).claims
        return Counter(claim.run.queue for claim in claims)

    with contextlib.closing(psycopg.connect(session_dsn())) as other:
        gate = store._address.table("gate")
        other.execute(f"SELECT 1 FROM {gate} WHERE name = 'held' FOR UPDATE")
        assert taken() == {"other": 2, "default": 2}
        other.rollback()
    assert taken() == {"held": 2}
    store.close()
