"""Several processes on one PostgreSQL store: who wins, who is dead, and what they do without a server."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from contextlib import ExitStack

import psycopg
import pytest

from keepstep.errors import StoreError, StoreUnavailable
from keepstep.model import RunQuery, Signal, Status, WorkerInfo
from keepstep.ports import Advance, ClaimRequest, Create, Row, Send, Verdict
from keepstep.stores.postgres.store import PostgresStore
from tests.postgres import Server, empty_store, session_dsn
from tests.stores.peer import Peer, queued

#: So long that no test waits for it: whoever is found dead is so by the end of its process.
LONG_LEASE = 600.0


@pytest.fixture
def url():
    with empty_store() as url:
        yield url


@pytest.fixture
def store(url):
    store = PostgresStore(url, lease_seconds=LONG_LEASE)
    yield store
    store.close()


def claim(store, worker="me", limit=10):
    return store.claim_runs(ClaimRequest(worker, frozenset({"digest"}), limit)).claims


def until(condition, what="the moment"):
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        with contextlib.suppress(StoreUnavailable):
            if found := condition():
                return found
        time.sleep(0.02)
    raise AssertionError(f"{what} never came")


def sessions(store, which="", dsn=None):
    """The server's processes that serve a store's process, by what they did last."""
    with psycopg.connect(dsn or session_dsn(), autocommit=True) as admin:
        rows = admin.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND query LIKE %s",
            (f"keepstep {os.getpid()}", f"%{which}%"),
        )
        return [pid for (pid,) in rows.fetchall()]


def terminate(pids):
    with psycopg.connect(session_dsn(), autocommit=True) as admin:
        for pid in pids:
            admin.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))  # and wait until it is gone


# -- one winner --------------------------------------------------------------------------------------------------------


def test_processes_that_open_a_new_store_together_share_it(url):
    with ExitStack() as stack:
        fresh = url.replace("schema=", "schema=fresh_")
        others = [stack.enter_context(Peer(fresh)) for _ in range(3)]
        for peer in others:
            peer.tell("open")
        for peer in others:
            peer.answer()
        for n, peer in enumerate(others):
            assert peer.ask("create", runs=[f"r{n}"]) == [f"r{n}"]
        assert others[0].ask("create", runs=["r2"]) == []
    with psycopg.connect(session_dsn(), autocommit=True) as admin:
        admin.execute(f"DROP SCHEMA {fresh.rpartition('=')[2]} CASCADE")


def test_one_process_wins_each_run_that_all_create_and_claim(store, url):
    names = [f"r{n}" for n in range(60)]
    with ExitStack() as stack:
        others = [stack.enter_context(Peer(url)).opened() for _ in range(3)]
        for peer in others:
            peer.tell("create", runs=names)
        won = [peer.answer() for peer in others]
        assert sorted(run for some in won for run in some) == sorted(names)
        for n, peer in enumerate(others):
            peer.tell("claim_all", worker=f"w{n}", limit=2)
        taken = [peer.answer() for peer in others]
        assert sorted(run for some in taken for run in some) == sorted(names)
        for n, mine in enumerate(taken):
            for run in mine:
                assert store.get_run(run).worker == f"w{n}"


def test_two_processes_that_write_crosswise_never_deadlock(store, url):
    """Rows are locked in the order of their names, whoever asks and in whatever order."""
    runs = [f"r{n}" for n in range(6)]
    store.commit([Create(queued(run, status=Status.RUNNING, worker="me", epoch=1)) for run in runs])
    other = PostgresStore(url, lease_seconds=LONG_LEASE)
    sent = []

    def send():
        for n in range(60):
            order = runs if n % 2 else runs[::-1]
            sent.extend(other.commit([Send(Signal(run, "x")) for run in order]))

    thread = threading.Thread(target=send)
    thread.start()
    after = 0
    while thread.is_alive():
        row = Row(after + 1, "step completed", b"{}")
        changes = [Advance(run, "me", 1, after, [row], "x") for run in (runs if after % 2 else runs[::-1])]
        assert {answer.verdict for answer in store.commit(changes)} == {Verdict.DONE}
        after += 1
    thread.join()
    other.close()
    assert {answer.verdict for answer in sent} == {Verdict.DONE}
    with psycopg.connect(session_dsn(), autocommit=True) as admin:
        found = admin.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert found == (0,)


# -- who is dead -------------------------------------------------------------------------------------------------------


def test_a_killed_owner_is_soon_known_to_be_dead_and_a_living_one_to_live(store, url):
    store.commit([Create(queued("a")), Create(queued("b"))])
    with Peer(url, lease_seconds=LONG_LEASE) as doomed, Peer(url, lease_seconds=LONG_LEASE) as living:
        assert doomed.opened().ask("claim", worker="doomed") == ["a"]
        assert living.opened().ask("claim", worker="living") == ["b"]
        assert claim(store) == ()
        doomed.kill()
        (taken,) = until(lambda: claim(store), "the death")
        assert (taken.run.id, taken.taken_from, taken.run.status) == ("a", "doomed", Status.RECOVERING)
        assert (taken.run.recoveries, taken.lease.epoch) == (1, 2)
        assert {worker.id: worker.alive for worker in store.list_workers()} == {"living": True, "me": True}
        assert claim(store) == ()


def test_forked_child_neither_uses_the_store_nor_keeps_its_parent_alive(store, url):
    store.commit([Create(queued("r"))])
    with Peer(url, lease_seconds=LONG_LEASE) as parent:
        assert parent.opened().ask("claim", worker="parent") == ["r"]
        child, said = parent.ask("fork")
        try:
            assert len(said) == 2
            assert all("opened by the process that forked this one" in line for line in said)
            assert parent.ask("write", run="r", worker="parent", epoch=1, after=0) == "done"
            parent.kill()
            (taken,) = until(lambda: claim(store), "the death")
            assert taken.taken_from == "parent"
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_owner_is_dead_when_its_lease_is_over(url):
    store = PostgresStore(url, lease_seconds=0.5)
    store.commit([Create(queued("r"))])
    with Peer(url, lease_seconds=0.5) as peer:
        assert peer.opened().ask("claim", worker="stopped") == ["r"]
        os.kill(peer.pid, signal.SIGSTOP)

        def taken():
            store.renew_leases(WorkerInfo("me"))
            return claim(store)

        (found,) = until(taken, "the end of the lease")
        assert found.taken_from == "stopped"
        os.kill(peer.pid, signal.SIGCONT)
        assert peer.ask("write", run="r", worker="stopped", epoch=1, after=0) == "fenced"
        assert peer.ask("enrol", worker="stopped") is False
    store.close()


def test_a_worker_whose_sessions_were_ended_is_not_taken_for_dead(store, url):
    other = PostgresStore(url, lease_seconds=LONG_LEASE)
    other.commit([Create(queued("r"))])
    (held,) = claim(other, "worker")
    other._presence.ask(lambda connection: None)  # its session is there
    assert claim(store) == ()
    terminate(sessions(other))
    assert until(lambda: store.renew_leases(WorkerInfo("me")), "a connection")
    assert claim(store) == ()
    row = Row(1, "step completed", b"{}")
    (answer,) = other.commit([Advance("r", "worker", held.lease.epoch, 0, [row], "x")])
    assert answer.verdict is Verdict.DONE
    other.close()


def test_a_store_that_is_closed_leaves_its_runs_to_others_at_once(store, url):
    other = PostgresStore(url, lease_seconds=LONG_LEASE)
    other.commit([Create(queued("r"))])
    assert claim(other, "worker")
    other.close()
    (taken,) = claim(store)
    assert taken.taken_from == "worker"
    with pytest.raises(StoreError, match="is closed"):
        other.get_run("r")


def test_worker_that_has_just_renewed_its_lease_is_not_marked_dead(url, monkeypatch):
    """Its lease was over when the roll was called, and is not when its runs are to be taken."""
    store, other = PostgresStore(url, lease_seconds=1.5, proxy=True), PostgresStore(url, lease_seconds=1.5, proxy=True)
    other.commit([Create(queued("r"))])
    assert claim(other, "worker")
    call = store._claimer.liveness_of_workers

    def called(connection, me="", *asked):
        def is_over():
            assert store.renew_leases(WorkerInfo("me"))
            found = call(connection, me, *asked)
            return found if found.workers["worker"].dead else None

        found = until(is_over, "the end of the lease")
        assert other.renew_leases(WorkerInfo("worker"))
        return found

    assert store.renew_leases(WorkerInfo("me"))
    monkeypatch.setattr(store._claimer, "liveness_of_workers", called)
    assert claim(store) == ()
    store.close()
    other.close()


def test_a_run_that_someone_is_taking_does_not_hold_up_the_claim_of_others(store):
    store.commit([Create(queued("a")), Create(queued("b"))])
    with psycopg.connect(session_dsn()) as someone:
        someone.execute("SET idle_in_transaction_session_timeout = '30s'")  # or a claim that waits would do so for ever
        someone.execute(f"SELECT 1 FROM {store._address.table('head')} WHERE run = 'a' FOR UPDATE")
        assert [one.run.id for one in claim(store)] == ["b"]
        someone.rollback()
    assert [one.run.id for one in claim(store)] == ["a"]


def test_stopped_process_in_a_transaction_blocks_others_for_a_lease(store, url):
    verdicts = []
    store.commit([Create(queued("r"))])
    stopped = PostgresStore(url, lease_seconds=1.0)

    def stop_within(connection):
        connection.execute("BEGIN")
        connection.execute(f"SELECT 1 FROM {store._address.table('head')} WHERE run = 'r' FOR UPDATE")
        (answer,) = store.commit([Send(Signal("r", "go"))])
        return answer.verdict

    with pytest.raises(StoreUnavailable, match="idle-in-transaction"):
        # What it did in its transaction is undone, and its connection is no longer one.
        stopped._pool.run(lambda connection: (verdicts.append(stop_within(connection)), connection.execute("SELECT 1")))
    assert verdicts == [Verdict.DONE]
    stopped.close()


# -- without a server --------------------------------------------------------------------------------------------------


def test_connections_that_are_ended_are_made_again(store):
    store.commit([Create(queued("r"))])
    store.renew_leases(WorkerInfo("me"))
    terminate(sessions(store))
    assert store.get_run("r").status is Status.QUEUED
    assert len(claim(store)) == 1
    (answer,) = store.commit([Advance("r", "me", 1, 0, [Row(1, "step completed", b"{}")], "x")])
    assert answer.verdict is Verdict.DONE


def test_commit_whose_answer_is_lost_is_reported_as_unknown(store):
    store.commit([Create(queued("r"))])
    (pid,) = sessions(store, "nextval")  # the server keeps the beginning of a statement
    with psycopg.connect(session_dsn()) as admin:
        admin.execute(f"LOCK TABLE {store._address.table('head')} IN EXCLUSIVE MODE")  # until its end
        killer = threading.Timer(0.2, terminate, ([pid],))
        killer.start()
        with pytest.raises(StoreUnavailable) as told:
            store.commit([Send(Signal("r", "x"))])
        killer.join()
    assert told.value.unknown
    assert store.get_run("r").signals == 0


def test_a_server_that_has_become_a_copy_is_asked_again_in_another_place(store, url):
    """After a failover the old connections lead to a server that writes nothing: each is given up when it says so."""
    store.commit([Create(queued("r"))])
    words = store._address._words
    kept = words.get("options", "")
    words["options"] = "-c default_transaction_read_only=on"
    terminate(sessions(store))
    with pytest.raises(StoreUnavailable, match="read-only") as told:
        store.commit([Send(Signal("r", "x"))])
    words["options"] = kept
    assert not told.value.unknown
    (answer,) = store.commit([Send(Signal("r", "x"))])
    assert (answer.verdict, answer.seq) == (Verdict.DONE, 1)


def test_connections_are_limited_and_a_long_wait_is_refused(url):
    store = PostgresStore(url, connections=1, wait_seconds=0.1)
    entered, leave = threading.Event(), threading.Event()

    def hold(connection):
        entered.set()
        leave.wait(60)

    thread = threading.Thread(target=store._pool.run, args=(hold,))
    thread.start()
    entered.wait(60)
    with pytest.raises(StoreUnavailable, match="all 1 connections of this process"):
        store.get_run("r")
    leave.set()
    thread.join()
    assert store.get_run("r") is None
    store.close()


@pytest.mark.crash
def test_restarted_server_loses_nothing_and_marks_nobody_dead():
    server = Server.make()
    try:
        store = PostgresStore(server.dsn, lease_seconds=LONG_LEASE)
        other = PostgresStore(server.dsn, lease_seconds=LONG_LEASE)
        store.commit([Create(queued(f"r{n}")) for n in range(3)])
        assert len(claim(store, "me", 2)) == 2
        assert len(claim(other, "you", 2)) == 1
        server.kill()
        with pytest.raises(StoreUnavailable):
            store.commit([Create(queued("new"))])
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            store.get_run("r0")
        server.start_again()
        until(lambda: store.renew_leases(WorkerInfo("me")), "a connection")
        fresh = PostgresStore(server.dsn, lease_seconds=LONG_LEASE)  # which has seen no session end
        assert claim(store) == ()
        assert claim(fresh, "newcomer") == ()
        fresh.close()
        assert {run.worker for run in store.list_runs(RunQuery()).runs} == {"me", "you"}
        assert store.commit([Create(queued("new"))])[0].verdict is Verdict.DONE
        store.close()
        other.close()
    finally:
        server.remove()
