"""The PostgreSQL store while another session of the server, a person's for example, has locked a run or a table."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import psycopg
import pytest

from keepstep.errors import StoreUnavailable
from keepstep.model import RunQuery, Signal, Status, WorkerInfo
from keepstep.ports import ClaimRequest, Create, Send, Verdict, WouldBlock
from keepstep.records.keys import Keys
from keepstep.stores.encrypted import EncryptedStore
from keepstep.stores.postgres import erase as postgres_erase
from keepstep.stores.postgres import pool as postgres_connection
from keepstep.stores.postgres import user_transaction
from keepstep.stores.postgres.store import PostgresStore
from keepstep.testing.store_contract import SteppedClock, commit, get, parked, queued, started
from tests.postgres import empty_store, session_dsn, store_url


@pytest.fixture
def store(monkeypatch):
    for module in (postgres_connection, user_transaction):
        monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    with empty_store() as url:
        store = PostgresStore(url, clock=SteppedClock())
        store.renew_leases(WorkerInfo("w1"))
        yield store
        store.close()


READING = "SELECT count(*) FROM {head}"


def head(store):
    return store._address.table("head")


@contextlib.contextmanager
def locked(store, what="SELECT 1 FROM {head} WHERE run = 'r' FOR UPDATE"):
    """A session of somebody's who has locked something, and has gone to lunch."""
    with contextlib.closing(psycopg.connect(session_dsn(), application_name="lunch")) as other:
        other.execute(what.format(head=head(store)))
        yield other
        other.rollback()


def verdicts(answers):
    return [answer.verdict for answer in answers]


def test_a_locked_run_is_left_out_and_its_neighbours_are_written(store):
    held, free = started(store, "r"), started(store, "a")
    held.write()  # and so it is prepared
    with locked(store) as other:
        answers = store.commit([free.change(), held.change(), Create(queued("new")), Send(Signal("r", "x"))])
        assert verdicts(answers) == [Verdict.DONE, Verdict.HELD, Verdict.DONE, Verdict.HELD]
        assert answers[1].about == "r"
        assert f"session {other.info.backend_pid} (lunch) has locked the head of run 'r'" in str(answers[1].error)
        assert answers[1].error.held
        assert [row.seq for row in store.list_checkpoints("r")] == [1, 2]
        assert get(store, "a").seq == 2
        assert store.begin_commit([held.change()]) is None  # it would have to wait
        assert verdicts(store.commit([held.change()])) == [Verdict.HELD]
    assert verdicts(store.commit([held.change(), Send(Signal("r", "x"))])) == [Verdict.DONE] * 2
    assert not store._locks.suspects([held.change()])


def test_change_that_signals_a_locked_run_waits_as_a_whole(store):
    started(store, "r")
    child, other = started(store, "child"), started(store, "other")
    with locked(store):
        told = child.change(status=Status.COMPLETED, release=True, sends=[Send(Signal("r", "child"))])
        assert verdicts(store.commit([told, other.change()])) == [Verdict.HELD, Verdict.DONE]
        assert get(store, "child").status is Status.RUNNING
    assert commit(store, told).verdict is Verdict.DONE


def test_a_begun_commit_does_not_wait_for_a_lock_either(store):
    held, free = started(store, "r"), started(store, "a")
    for one in (held, free):
        one.write()
    store.commit([Create(queued("b")), Create(queued("c"))])
    changes = [held.change(), free.change()]
    store.commit([started(store, "d").change(), started(store, "e").change()])  # prepares a batch of two
    with locked(store):
        underway = store.begin_commit(changes)
        with pytest.raises(WouldBlock):
            underway.wait()
        assert store._locks.suspects(changes)  # so that the next look need not wait
        assert verdicts(store.commit(changes)) == [Verdict.HELD, Verdict.DONE]


def test_a_lock_of_a_moment_is_waited_for(store, monkeypatch):
    """What every commit takes for a moment is no reason to tell anybody anything."""
    held = started(store, "r")
    with locked(store) as other:
        store._locks.suspect([held.change()])
        monkeypatch.setattr("keepstep.stores.postgres.locks.time.sleep", lambda seconds: other.rollback())
        assert commit(store, held.change()).verdict is Verdict.DONE


def test_a_lock_of_the_whole_table_holds_up_all_and_loses_nothing(store):
    held, free = started(store, "r"), started(store, "a")
    changes = [held.change(), free.change()]
    with locked(store, "LOCK TABLE {head} IN ACCESS EXCLUSIVE MODE"):
        answers = store.commit(changes)
        assert verdicts(answers) == [Verdict.HELD] * 2
        assert "lock timeout" in str(answers[0].error)
    assert verdicts(store.commit(changes)) == [Verdict.DONE] * 2


def test_step_of_a_locked_run_is_undone_and_called_again_once_free(store):
    held, calls = started(store, "r"), []
    change = held.change(within=lambda tx: calls.append(tx.execute("SELECT current_setting('lock_timeout')")))
    with locked(store):
        for _ in range(3):
            assert commit(store, change).verdict is Verdict.HELD
        assert calls == [[("0",)]]  # a step waits for locks of its own tables as long as it may take
    assert commit(store, change).verdict is Verdict.DONE
    assert len(calls) == 2


def test_erasure_lets_others_write_while_it_waits_for_a_reader(store, monkeypatch):
    """And goes on when the reader has ended; afterwards its connection waits for locks as long as before."""
    commit(store, Create(queued("r")))
    with contextlib.closing(psycopg.connect(session_dsn(), autocommit=True)) as other:
        other.execute("BEGIN")
        monkeypatch.setattr(store._eraser, "_outlast", lambda _: other.execute(READING.format(head=head(store))))
        passed = []

        def pause(seconds):
            passed.append(commit(store, Create(queued(f"new-{len(passed)}"))).verdict)
            if len(passed) == 2:
                other.rollback()

        monkeypatch.setattr(postgres_erase, "time", Mock(sleep=pause, monotonic=time.monotonic))
        assert store.delete_runs(["r"], scrub=True) == 1
        assert passed == [Verdict.DONE, Verdict.DONE]
    settings = store._pool.run(lambda connection: connection.execute("SHOW lock_timeout").fetchone())
    assert settings == ("50ms",)


def test_erasure_names_the_session_that_keeps_reading(store, monkeypatch):
    monkeypatch.setattr(postgres_erase, "_OUTLAST_SECONDS", 0.1)
    commit(store, Create(queued("r")))
    reader = psycopg.connect(session_dsn(), application_name="a long report", autocommit=True)
    with contextlib.closing(reader) as other, monkeypatch.context() as patch:
        other.execute("BEGIN")
        patch.setattr(store._eraser, "_outlast", lambda _: other.execute(READING.format(head=head(store))))
        with pytest.raises(StoreUnavailable, match=r"not yet erased.*\(a long report\).*erase again"):
            store.delete_runs(["r"], scrub=True)
    assert store.delete_runs(["r"], finished=True, scrub=True) == 1


def test_opening_waits_while_another_process_makes_the_tables(monkeypatch):
    monkeypatch.setattr(postgres_connection, "LOCK_SECONDS", 0.05)
    url = store_url("keepstep_test_made_later")
    key = postgres_connection.Address(url).key("migrate")
    with psycopg.connect(session_dsn(), autocommit=True) as other, ThreadPoolExecutor(1) as pool:
        other.execute("SELECT pg_advisory_lock(%s)", (key,))
        opened = pool.submit(PostgresStore, url)
        while not other.execute("SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchall():
            time.sleep(0.005)
        time.sleep(2 * postgres_connection.LOCK_SECONDS)
        other.execute("SELECT pg_advisory_unlock(%s)", (key,))
        opened.result(60).close()
        other.execute("DROP SCHEMA keepstep_test_made_later CASCADE")


def test_nothing_else_waits_for_a_locked_run(store):
    parked(store, "r")
    started(store, "mine")
    store.commit([Create(queued("due"))])
    with locked(store):
        assert store.renew_leases(WorkerInfo("w1"))
        assert [one.run.id for one in store.claim_runs(ClaimRequest("w1", frozenset({"digest"}), 10)).claims] == ["due"]
        assert get(store, "r").status is Status.WAITING
        assert len(store.list_runs(RunQuery()).runs) == 3
        assert store.check() == []
        assert store.news("w1", 0) is not None
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            store.claim_runs(ClaimRequest("w1", run="r", statuses=frozenset({Status.WAITING})))
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            store.delete_runs(["r"])
    assert store.delete_runs(["r"]) == 1


def test_rekey_that_meets_a_locked_run_is_refused_and_done_later(store):
    old = Keys("old", {"old": b"o" * 32})
    for run in ("a", "r"):
        commit(store, Create(queued(run, data_key=old.new_cipher(run)[0])))
    sealed = EncryptedStore(store, Keys("new", {"new": b"n" * 32, "old": b"o" * 32}))
    with locked(store), pytest.raises(StoreUnavailable, match="has locked the head of run 'r'"):
        sealed.rekey()
    done, _ = sealed.rekey()
    assert (done.runs, done.changed) == (2, 1)  # the other was not held up
