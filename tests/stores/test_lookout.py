"""Many workers on one PostgreSQL server: one looks for the others, which cost a heartbeat, and few answer a call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time

import psycopg
import pytest

import keepstep as ks
from keepstep.model import Status, WorkerInfo
from keepstep.ports import ClaimRequest, Create, instant
from keepstep.stores.postgres import lookout
from keepstep.stores.postgres import store as store_module
from keepstep.stores.postgres.lookout import ANSWERING, LATE_SECONDS, Lookouts, Roll
from keepstep.stores.postgres.store import PostgresStore
from keepstep.stores.watch import _place, _start_time
from keepstep.testing.store_contract import queued
from keepstep.workflows.definition import Workflow
from tests.postgres import empty_store, session_dsn

DIGEST = frozenset({"digest"})


@pytest.fixture
def url():
    with empty_store() as url:
        yield url


@pytest.fixture
def stores(url, monkeypatch):
    """Make stores, each with a registered worker that is named like it."""
    monkeypatch.setattr(lookout, "POST_SECONDS", 600.0)  # a busy machine may stand still for longer than usual
    with contextlib.ExitStack() as stack:

        def made(*names, **options):
            found = []
            for name in names:
                store = PostgresStore(url, lease_seconds=600.0, **options)
                stack.callback(store.close)
                assert store.renew_leases(WorkerInfo(name, pid=os.getpid(), workflows=("digest",)))
                found.append(store)
            return found

        yield made


class Statements:
    """Counts the statements of this process, and the rows that they return."""

    def __init__(self, monkeypatch) -> None:
        self.sent: list[str] = []
        self.rows = 0
        whole = psycopg.Connection.execute

        def execute(connection, query, *args, **more):
            self.sent.append(query if isinstance(query, str) else bytes(query).decode())
            found = whole(connection, query, *args, **more)
            self.rows += max(0, found.rowcount)
            return found

        monkeypatch.setattr(psycopg.Connection, "execute", execute)

    def take(self):
        sent, self.sent = self.sent, []
        return sent

    def take_rows(self):
        rows, self.rows = self.rows, 0
        return rows


@pytest.fixture
def statements(monkeypatch):
    return Statements(monkeypatch)


def idle(store, worker, limit=100):
    return store.claim_runs(ClaimRequest(worker, DIGEST, limit, idle=True))


def make_due(store, worker):
    """Let the interval until the next look or check of a worker pass."""
    post = store._lookouts.post_of(worker)
    post._looked_at = post._seen_at = float("-inf")


def due(*names, seconds=-60.0):
    return [Create(queued(name, due_at=instant(time.time() + seconds))) for name in names]


def listen(store, worker):
    """Open the session of a store, which counts as news."""
    store.news(worker, 0)
    store._presence.ask(lambda connection: None)
    store.news(worker, 0)


def rolls(store):
    table = store._address.table("meta")
    with psycopg.connect(session_dsn(), autocommit=True) as admin:
        return admin.execute(f"SELECT value FROM {table} WHERE name LIKE 'lookout %'").fetchall()


# -- statements --------------------------------------------------------------------------------------------------------


def test_an_idle_worker_asks_nothing_between_its_looks(stores, statements):
    (store,) = stores("w1")
    assert not idle(store, "w1").elsewhere
    store.news("w1", 0)
    statements.take()
    for _ in range(100):
        idle(store, "w1")
        store.news("w1", 0)
    assert statements.take() == []


def test_a_look_that_finds_nothing_is_one_statement_with_queues_and_services(url, stores, statements):
    async def declare() -> None:
        async with ks.open(url, worker=False) as engine:
            for number in range(3):
                await engine.declare_queue(ks.Queue(f"queue {number}", concurrency=1))
                await engine.services.declare(ks.Service(f"service {number}", concurrency=1))

    asyncio.run(declare())
    (store,) = stores("w1")
    idle(store, "w1")
    make_due(store, "w1")
    statements.take()
    idle(store, "w1")
    assert len(statements.take()) == 1


def test_a_heartbeat_is_one_statement_that_tells_of_the_lookout_and_of_a_drain(stores, statements):
    one, two = stores("w1", "w2")
    idle(one, "w1")
    assert idle(two, "w2").elsewhere
    statements.take()
    for _ in range(3):
        assert two.renew_leases(WorkerInfo("w2", workflows=("digest",)))
        assert not two.is_draining("w2")
        assert idle(two, "w2").elsewhere
    assert len(statements.take()) == 3
    one.drain_worker("w2")
    assert two.renew_leases(WorkerInfo("w2", workflows=("digest",)))
    assert two.is_draining("w2")


def test_an_engine_that_is_idle_sends_few_statements_over_one_session(url, monkeypatch, statements):
    """All that it sends is one of a few kinds, each bounded by its interval."""
    monkeypatch.setattr(store_module, "UNUSED_SECONDS", 0.1)
    monkeypatch.setattr("keepstep.stores.postgres.pool.UNUSED_SECONDS", 0.1)
    mail = ks.Queue("mail", concurrency=5)
    model = ks.Service("model", concurrency=5)

    @ks.step(service=model)
    async def ask() -> None: ...

    async def body() -> None:
        await ask()

    letter = Workflow(body, name="letter", queue=mail, schedule=ks.Cron("0 7 1 1 *"))

    async def main() -> None:
        async with ks.open(url, workflows=[letter], answer_seconds=1.0) as engine:
            await asyncio.sleep(3.5)  # what its opening asks for
            statements.take()
            began = time.monotonic()
            await asyncio.sleep(3.0)
            seconds = time.monotonic() - began
            sent = statements.take()
            looks = seconds / lookout.LOOK_SECONDS + 1
            beats = seconds / 5.0 + 1
            assert len(sent) <= looks + beats, sent
            with psycopg.connect(session_dsn(), autocommit=True) as admin:
                name = f"keepstep {os.getpid()}"
                asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND query LIKE %s"
                found = admin.execute(asked, (name, f"%{engine.store._address.schema}%")).fetchone()
            assert found == (1,)

    asyncio.run(main())


# -- the roll ----------------------------------------------------------------------------------------------------------


def test_what_a_worker_reads_does_not_grow_with_the_fleet(stores, statements):
    (one,) = stores("lookout")
    idle(one, "lookout")
    (store,) = stores("me")

    def read():
        store.renew_leases(WorkerInfo("me", workflows=("digest",)))
        make_due(store, "me")
        assert idle(store, "me").elsewhere
        store.claim_runs(ClaimRequest("me", DIGEST, 10))
        return statements.take_rows()

    read()
    before = read()
    for number in range(40):
        one.renew_leases(WorkerInfo(f"other-{number}", workflows=("digest",)))
    statements.take_rows()
    assert read() == before
    make_due(one, "lookout")
    idle(one, "lookout")
    assert statements.take_rows() > 40
    assert one._lookouts.post_of("lookout").workers == 42


def test_the_next_worker_looks_when_the_lookout_has_left_or_is_late(stores, monkeypatch):
    one, two = stores("w1", "w2")
    idle(one, "w1")
    assert idle(two, "w2").elsewhere
    assert one.renew_leases(WorkerInfo("w1"), leaving=True)
    make_due(two, "w2")
    assert not idle(two, "w2").elsewhere
    (three,) = stores("w3")
    assert idle(three, "w3").elsewhere
    monkeypatch.setattr(three._lookouts.post_of("w3"), "_clock", Later(three.clock, lookout.POST_SECONDS))
    make_due(three, "w3")
    assert not idle(three, "w3").elsewhere
    make_due(two, "w2")
    assert idle(two, "w2").elsewhere
    assert len(rolls(three)) == 1


class Later:
    """A clock that is ahead."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def now(self):
        return self.clock.now() + self.seconds


def test_the_end_of_the_lookouts_process_is_seen_at_once(stores):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (store,) = stores("me")
    idle(store, "me")
    post = store._lookouts.post_of("me")
    identity = f"{_place(os.getpid())} {child.pid} {_start_time(child.pid)[1]}"
    theirs = lookout._encode(Roll("other", store.clock.now() + 600, 2, (), identity)).decode()
    with psycopg.connect(session_dsn(), autocommit=True) as admin:
        admin.execute(f"UPDATE {store._address.table('meta')} SET value = %s WHERE name = %s", (theirs, post.name))
    store.renew_leases(WorkerInfo("me", workflows=("digest",)))
    assert idle(store, "me").elsewhere
    child.kill()
    child.wait()
    assert not idle(store, "me").elsewhere


@pytest.mark.parametrize("text", ["", "{", '{"worker": 1}', "null"])
def test_a_damaged_roll_is_replaced(stores, text):
    one, two = stores("w1", "w2")
    idle(one, "w1")
    with psycopg.connect(session_dsn(), autocommit=True) as admin:
        admin.execute(f"UPDATE {one._address.table('meta')} SET value = %s WHERE name LIKE 'lookout %%'", (text,))
    assert not idle(two, "w2").elsewhere


def test_workers_of_other_programs_have_a_lookout_of_their_own(stores):
    one, two = stores("w1", "w2")
    idle(one, "w1")
    assert not two.claim_runs(ClaimRequest("w2", frozenset({"other"}), 1, idle=True)).elsewhere
    added = DIGEST | {"keepstep.added:digest"}
    assert two.claim_runs(ClaimRequest("w2", added, 1, idle=True)).elsewhere


def test_runs_of_a_dead_worker_are_taken_by_the_lookout_and_by_others(stores):
    dead, one, two = stores("dead", "w1", "w2")
    dead.commit(due("a", "b", "c", "d"))
    assert len(dead.claim_runs(ClaimRequest("dead", DIGEST, 4)).claims) == 4
    assert idle(one, "w1").claims == ()
    assert idle(two, "w2").elsewhere
    dead.close()
    for _ in range(2):  # the second look writes what the first has found
        make_due(one, "w1")
        assert idle(one, "w1", limit=0).claims == ()
    (first,) = two.claim_runs(ClaimRequest("w2", DIGEST, 1)).claims
    assert two._lookouts.post_of("w2").is_elsewhere
    assert (first.taken_from, first.run.status) == ("dead", Status.RECOVERING)
    make_due(one, "w1")
    assert {claim.taken_from for claim in idle(one, "w1").claims} == {"dead"}


# -- calls -------------------------------------------------------------------------------------------------------------


def test_few_of_a_fleet_answer_a_call_and_the_lookout_always(url):
    store = PostgresStore(url)
    draw = random.Random(7)
    fleet = []
    for number in range(100):
        lookouts = Lookouts(store._address, store.clock)
        post = lookouts.post_of(f"w{number}")
        post.seen(lookout._encode(Roll("w0", store.clock.now() + 600, 100)).decode())
        fleet.append(lookouts)
    calls = [[one.answers_after(draw.random) for one in fleet] for _ in range(200)]
    at_once = [call.count(0.0) for call in calls]
    assert 0.8 * ANSWERING < sum(at_once) / len(at_once) < 1.2 * ANSWERING
    assert max(at_once) < 12
    assert all(call[0] in (0.0, LATE_SECONDS) and LATE_SECONDS not in call[1:] for call in calls)
    store.close()


def test_a_due_run_calls_the_lookout_and_not_the_others(stores, monkeypatch):
    monkeypatch.setattr(Lookouts.answers_after, "__defaults__", (lambda: 1.0,))  # nobody is drawn
    names = [f"w{number}" for number in range(8)]
    fleet = stores(*names)
    client = stores("client")[0]
    for store, name in zip(fleet, names, strict=True):
        idle(store, name)
    make_due(fleet[0], "w0")
    idle(fleet[0], "w0")
    for store, name in zip(fleet, names, strict=True):
        make_due(store, name)
        idle(store, name)
        listen(store, name)
    before = [store._presence.called for store in fleet]
    told = threading.Event()
    fleet[0].on_news(told.set)
    client.commit(due("r"))
    assert told.wait(10)
    assert fleet[0].news("w0", 0).due
    for store in fleet[1:]:
        store._presence.ask(lambda connection: connection.execute("SELECT 1"))
    called = [store._presence.called - number for store, number in zip(fleet, before, strict=True)]
    assert called == [1] + [0] * 7
    assert not fleet[1].news("w1", 0).due


def test_a_worker_that_takes_all_it_can_calls_others_and_no_longer_looks(stores):
    one, two = stores("w1", "w2")
    idle(one, "w1")
    assert idle(two, "w2").elsewhere
    told = threading.Event()
    two.on_news(told.set)
    listen(two, "w2")
    one.commit(due("a", "b", "c"))
    assert len(one.claim_runs(ClaimRequest("w1", DIGEST, 2)).claims) == 2
    assert rolls(one) == []
    assert told.wait(10)
    make_due(two, "w2")
    assert [claim.run.id for claim in idle(two, "w2").claims] == ["c"]


def test_a_run_that_is_due_soon_is_announced_and_noted_by_the_worker_that_makes_it(url, stores):
    one, two = stores("w1", "w2")
    idle(one, "w1")
    idle(two, "w2")
    listen(one, "w1")
    told = threading.Event()
    one.on_news(told.set)
    with contextlib.closing(PostgresStore(url)) as client:
        client.commit(due("soon", seconds=0.3))
        assert told.wait(10)
        assert one.news("w1", 0).due
        assert [claim.run.id for claim in one.claim_runs(ClaimRequest("w1", DIGEST, 9)).claims] == ["soon"]
    listen(two, "w2")
    two.commit(due("own", seconds=0.3))
    ends, claimed, tries = time.monotonic() + 10, [], 0
    while not claimed:
        assert time.monotonic() < ends
        if two.news("w2", 0).due:
            tries += 1
            claimed = two.claim_runs(ClaimRequest("w2", DIGEST, 9)).claims
        time.sleep(0.01)
    assert tries <= 2  # when it is made, and when it is due
