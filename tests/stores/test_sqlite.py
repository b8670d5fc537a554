"""The SQLite store: the contract, and what only it does."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import apsw
import pytest

from keepstep.errors import DefinitionError, StoreError, StoreUnavailable
from keepstep.model import Ask, Kind, RunQuery, Signal, Status, WorkerInfo
from keepstep.ports import ClaimRequest, Create, Send, Verdict, WouldBlock
from keepstep.stores.os_locks import network_file_system
from keepstep.stores.sqlite.connection import refuse_old_sqlite
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import (
    SteppedClock,
    StoreContract,
    at,
    commit,
    everything,
    get,
    ids,
    parked,
    queued,
    record,
    started,
)


class TestContract(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "runs.db"

    def make_store(self, clock):
        return SQLiteStore(self.path, clock=clock)

    def make_store_with_lease(self, clock, lease_seconds):
        return SQLiteStore(self.path, clock=clock, lease_seconds=lease_seconds)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


@pytest.fixture
def store(path):
    store = SQLiteStore(path, clock=SteppedClock())
    store.renew_leases(WorkerInfo("w1"))
    yield store
    store.close()


# -- opening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power_loss, synchronous", [("loses_nothing", 2), ("may_lose_last", 1)])
def test_power_loss_is_chosen_by_name(path, power_loss, synchronous):
    store = SQLiteStore(path, power_loss=power_loss)
    connection = store._writer.connection
    assert connection.pragma("synchronous") == synchronous
    assert connection.pragma("journal_mode") == "wal"
    assert connection.pragma("mmap_size") == 0
    store.close()


def test_store_survives_power_loss_by_default(store):
    assert store._writer.connection.pragma("synchronous") == 2


def test_another_power_loss_is_refused(path):
    with pytest.raises(DefinitionError, match="may_lose_last"):
        SQLiteStore(path, power_loss="whatever")
    assert not path.exists()


@pytest.mark.parametrize("version", ["3.7.0", "3.40.1", "3.51.2"])
def test_a_sqlite_that_corrupts_shared_files_is_refused(version, path, monkeypatch):
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: version)
    with pytest.raises(StoreError, match=version):
        SQLiteStore(path)
    assert not path.exists()


@pytest.mark.parametrize("version", ["3.51.3", "3.52.0", "4.0.0"])
def test_a_safe_sqlite_is_accepted(version):
    refuse_old_sqlite(version)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(StoreUnavailable, match="nowhere does not exist"):
        SQLiteStore(tmp_path / "nowhere" / "runs.db")
    with pytest.raises(StoreUnavailable, match="is a folder"):
        SQLiteStore(tmp_path)


def test_a_link_leads_to_the_same_store(path, tmp_path):
    one = SQLiteStore(path)
    (tmp_path / "link.db").symlink_to(path)
    two = SQLiteStore(tmp_path / "link.db")
    assert one.url == two.url
    one.renew_leases(WorkerInfo("w"))
    assert [worker.alive for worker in two.list_workers()] == [True]
    assert not list(tmp_path.glob("link.db-*"))
    one.close()
    two.close()


MOUNTS = r"""
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /tmp rw,nosuid - tmpfs tmpfs rw
41 22 0:40 / /mnt/nfs rw shared:9 - nfs4 server:/export rw,vers=4.2
42 22 0:41 / /mnt/nfs/local rw - xfs /dev/sdb rw
43 22 0:42 / /mnt/with\040space rw - cifs //server/share rw
44 22 0:43 / /mnt/ssh rw - fuse.sshfs me@host: rw
45 22 0:44 / /mnt/host rw - virtiofs host rw
46 22 0:45 / /mnt/overlay rw - overlay overlay rw,lowerdir=/a
47 22 0:46 / /mnt/sandbox rw - 9p none rw,trans=fd,rfdno=4
48 22 0:47 / /mnt/vm rw - 9p share rw,trans=virtio,version=9p2000.L
49 22 0:48 / /mnt/ntfs rw - fuseblk /dev/sdc rw
50 22 0:49 / /mnt/twice rw - ext4 /dev/sdd rw
51 22 0:50 / /mnt/twice rw - ceph mon:/ rw
"""


@pytest.mark.parametrize(
    "place, kind",
    [
        ("/home/me", None),
        ("/tmp/x", None),
        ("/mnt/nfs/deep/down", "nfs4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfsx", None),
        ("/mnt/nfs/local/x", None),
        ("/mnt/with space/x", "cifs"),
        ("/mnt/ssh/x", "fuse.sshfs"),
        ("/mnt/host/x", None),
        ("/mnt/overlay/x", None),
        ("/mnt/sandbox/x", None),
        ("/mnt/vm/x", "9p"),
        ("/mnt/ntfs/x", None),
        ("/mnt/twice/x", "ceph"),
    ],
)
def test_network_file_systems_are_distinguished_from_local_ones(place, kind):
    assert network_file_system(place, MOUNTS) == kind


def test_a_network_file_system_is_refused_unless_allowed(path, monkeypatch):
    monkeypatch.setattr("keepstep.stores.os_locks.network_file_system", lambda _: "nfs4")
    with pytest.raises(StoreUnavailable, match="nfs4"):
        SQLiteStore(path)
    SQLiteStore(path, allow_network=True).close()


def test_this_machine_has_a_local_disk(tmp_path):
    assert network_file_system(str(tmp_path)) is None


# -- closing, threads and waiting --------------------------------------------------------------------------------------


def test_closed_store_refuses_calls(store):
    store.close()
    for use in (
        lambda: store.commit([]),
        lambda: store.get_run("r"),
        lambda: store.renew_leases(WorkerInfo("w1")),
        lambda: store.delete_runs(["r"]),
    ):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_store_whose_file_was_moved_away_is_unavailable(store, path, tmp_path):
    path.rename(tmp_path / "moved.db")
    with pytest.raises(StoreUnavailable, match="moved or removed"):
        store.renew_leases(WorkerInfo("w1"))
    path.touch()
    with pytest.raises(StoreUnavailable, match="moved or removed"):
        store.renew_leases(WorkerInfo("w1"))
    path.unlink()
    (tmp_path / "moved.db").rename(path)
    assert store.renew_leases(WorkerInfo("w1"))


def test_a_worker_id_that_is_no_file_name_is_refused(store, tmp_path):
    with pytest.raises(DefinitionError, match="worker id"):
        store.renew_leases(WorkerInfo("../../w"))
    assert not list(tmp_path.glob("**/w.lock"))


def test_threads_share_a_store(store):
    failures = []

    def work(n):
        try:
            writer = started(store, f"r{n}")
            for _ in range(20):
                assert writer.write().verdict is Verdict.DONE
                assert get(store, f"r{n}").seq == writer.seq
                store.news("w1", 0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [run.seq for run in store.list_runs(RunQuery()).runs] == [21] * 4


def test_a_commit_that_may_not_wait_does_not_wait_for_another_thread(path):
    store = SQLiteStore(path, busy_seconds=60)
    inside, done = threading.Event(), threading.Event()

    def hold():
        inside.set()
        done.wait(120)

    thread = threading.Thread(target=lambda: store._writer.run(hold))
    thread.start()
    inside.wait(60)
    begin = time.monotonic()
    with pytest.raises(WouldBlock):
        store.commit([Create(queued("r"))], wait=False)
    assert time.monotonic() - begin < 30, "it waited"
    assert store.get_run("r") is None
    assert store.news("w1", 0).cursor == 0, "news waits for nobody either"
    done.set()
    thread.join()
    assert store.commit([Create(queued("r"))], wait=False)[0].verdict is Verdict.DONE
    store.close()


def test_a_database_locked_by_a_stranger_is_reported_and_then_used(path):
    store, patient = SQLiteStore(path, busy_seconds=0.1), SQLiteStore(path, busy_seconds=60)
    stranger = apsw.Connection(str(path))
    stranger.execute("BEGIN IMMEDIATE")
    begin = time.monotonic()
    with pytest.raises(WouldBlock):
        patient.commit([Create(queued("r"))], wait=False)
    assert time.monotonic() - begin < 30, "it waited"
    patient.close()
    with pytest.raises(StoreUnavailable, match="locked by") as caught:
        store.commit([Create(queued("r"))])
    assert caught.value.unknown is False
    stranger.execute("ROLLBACK")
    assert store.commit([Create(queued("r"))])[0].verdict is Verdict.DONE
    store.close()


def test_an_error_leaves_no_transaction_open(store, path):
    other = SQLiteStore(path)
    with pytest.raises(ValueError, match="'bad'"):
        store.commit([Create(queued("good")), Create(queued("bad", seq=5))])
    with pytest.raises(KeyboardInterrupt):
        store.commit([Create(queued("good")), started(store, "x").change(within=interrupted)])
    assert other.get_run("good") is None
    assert other.commit([Create(queued("good"))], wait=False)[0].verdict is Verdict.DONE
    assert commit(store, Create(queued("other"))).verdict is Verdict.DONE
    other.close()


def interrupted(tx):
    raise KeyboardInterrupt


# -- speed that does not depend on size --------------------------------------------------------------------------------


class Watch:
    """Counts the steps of SQLite's machine, and remembers the statements, of everything a store does."""

    def __init__(self, store):
        self.connections = [store._writer.connection, store._reader._connection]
        self.steps = 0
        self.statements = set()

    def __enter__(self):
        for connection in self.connections:
            connection.set_progress_handler(self.count, 50, id=self)
            connection.trace_v2(apsw.SQLITE_TRACE_STMT, self.remember, id=self)
        return self

    def __exit__(self, *_):
        for connection in self.connections:
            connection.set_progress_handler(None, 50, id=self)
            connection.trace_v2(0, None, id=self)

    def count(self):
        self.steps += 50
        return False

    def remember(self, event):
        self.statements.add(event["sql"])

    def plans(self):
        connection = self.connections[0]
        for sql in sorted(self.statements):
            if sql.split()[0] in ("SELECT", "UPDATE", "DELETE", "INSERT"):
                values = (None,) * len(re.findall(r"\?(?!\d)", sql))  # a `?4` is one of the others
                for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values):
                    yield sql, row[3]


def filled(store, table_rows):
    """Many runs, made by SQLite itself: (prefix, workflow, priority, due_at, how many)."""
    connection = store._writer.connection
    with connection:
        for prefix, workflow, priority, due_at, count in table_rows:
            connection.execute(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
                " INSERT INTO keepstep_head (run, number, workflow, version, queue, priority, status, seq, checksum,"
                " epoch, due_at, wakes, signals, recoveries, updated_at)"
                " SELECT ? || i, i, ?, '1', 'default', ?, 'waiting', 0, '', 0, ?, '', 0, 0, 0 FROM n",
                (count, prefix, workflow, priority, due_at),
            )
            connection.execute(
                "INSERT INTO keepstep_run (id, workflow, version, fingerprint, queue, priority, input, seed, tags,"
                " created_at) SELECT run, workflow, '1', '', 'default', priority, '1', '', '', 0 FROM keepstep_head"
                " WHERE run GLOB ?",
                (f"{prefix}*",),
            )


def test_a_claim_costs_the_same_among_a_hundred_thousand_runs(store):
    now = at(0).timestamp()
    request = ClaimRequest("w1", frozenset({"mine", "also mine"}), 5)
    filled(
        store,
        [
            ("parked-", "mine", 0, now + 1000, 60_000),
            ("urgent-parked-", "mine", 7, now + 2000, 10_000),
            ("foreign-", "foreign", 9, now - 1000, 30_000),
        ],
    )
    with Watch(store) as idle:
        claims = store.claim_runs(request)
    assert (claims.claims, claims.next_due_at) == ((), at(1000))
    assert idle.steps < 2000, f"an idle claim took {idle.steps} steps"
    for n in range(5):
        commit(store, Create(queued(f"due{n}", workflow="mine", priority=n % 2)))
    with Watch(store) as busy:
        assert len(store.claim_runs(request).claims) == 5
    assert busy.steps < 8000, f"a claim took {busy.steps} steps"


def test_a_claim_costs_the_same_before_a_long_queue(store):
    filled(store, [("due-", "mine", 0, at(-50).timestamp(), 30_000), ("low-", "mine", -5, at(-90).timestamp(), 10_000)])
    with Watch(store) as watch:
        assert len(store.claim_runs(ClaimRequest("w1", frozenset({"mine"}), 5)).claims) == 5
    assert watch.steps < 8000, f"a claim took {watch.steps} steps"


def test_a_claim_costs_the_same_before_a_long_queue_of_others(store):
    """The others are in another queue, due before and of a higher priority."""
    filled(store, [("foreign-", "mine", 9, at(-50).timestamp(), 30_000), ("dead-", "mine", 9, None, 10_000)])
    connection = store._writer.connection
    connection.execute("UPDATE keepstep_head SET worker = 'dead', status = 'running' WHERE due_at IS NULL")
    request = ClaimRequest("w1", frozenset({"mine"}), 5, queues=frozenset({"mail", "none"}))
    commit(store, Create(queued("later", workflow="mine", queue="mail", due_at=at(3))))
    with Watch(store) as idle:
        claims = store.claim_runs(request)
    assert (claims.claims, claims.next_due_at) == ((), at(3))
    assert idle.steps < 1000, f"an idle claim took {idle.steps} steps"
    commit(store, Create(queued("due", workflow="mine", queue="mail")))
    with Watch(store) as busy:
        assert ids(store.claim_runs(request)) == ["due"]
    assert busy.steps < 3000, f"a claim took {busy.steps} steps"
    assert {line for sql, line in busy.plans() if "keepstep_head WHERE" in sql} <= {
        f"SEARCH keepstep_head USING {index}"
        for index in (
            "INDEX keepstep_head_time (workflow=? AND queue=? AND due_at>?)",
            "INDEX keepstep_head_time (workflow=? AND queue=? AND due_at<?)",
            "INDEX keepstep_head_time (workflow=? AND queue=? AND due_at>? AND due_at<?)",
            "COVERING INDEX keepstep_head_owner (worker>?)",
            "INDEX keepstep_head_owner (worker=? AND workflow=? AND queue=?)",
            "INDEX keepstep_head_ready (gate>? AND gate<?)",
        )
    }


@pytest.mark.parametrize("keys", [0, 1, 1000])
def test_a_claim_costs_the_same_before_many_runs_at_services(store, keys):
    filled(store, [("parked-", "mine", 0, None, 30_000), ("other-", "mine", 0, None, 10_000)])
    key = f"'key ' || (number % {keys})" if keys else "NULL"
    store._writer.connection.execute(
        f"UPDATE keepstep_head SET status = 'waiting', epoch = 1, key = {key}, since = 1000.0 + number, "
        "gate = iif(run < 'parked', 'service/post', 'service/bank'), due_at = iif(number % 2, 4e9, NULL)"
    )
    store.pass_gates("w1", [Ask("bank"), Ask("post")])
    workflows = frozenset({"mine"})
    with Watch(store) as idle:
        claims = store.claim_runs(ClaimRequest("w1", workflows, 10, rooms={"bank": 0, "post": 0}))
    assert [one.runs for one in claims.at_services] == [100, 100]
    assert idle.steps < 10_000, f"an idle claim took {idle.steps} steps"
    with Watch(store) as busy:
        claims = store.claim_runs(ClaimRequest("w1", workflows, 10, rooms={"bank": 6, "post": 0}))
    assert [claim.service for claim in claims.claims] == ["bank"] * 6
    assert busy.steps < 30_000, f"a claim took {busy.steps} steps"


def test_a_claim_takes_one_step_for_each_queue(store):
    filled(store, [("parked-", "mine", 0, at(1000).timestamp(), 30_000)])
    store._writer.connection.execute("UPDATE keepstep_head SET queue = 'queue ' || (number % 20)")
    with Watch(store) as watch:
        claims = store.claim_runs(ClaimRequest("w1", frozenset({"mine"}), 5))
    assert (claims.claims, claims.next_due_at) == ((), at(1000))
    assert watch.steps < 2000, f"an idle claim took {watch.steps} steps"


def with_priorities(store, table_rows):
    """Fill a store with runs whose priority is their number."""
    filled(store, table_rows)
    connection = store._writer.connection
    connection.execute("UPDATE keepstep_head SET priority = number + priority")
    connection.execute(
        "UPDATE keepstep_run SET priority = (SELECT priority FROM keepstep_head h WHERE h.run = keepstep_run.id)"
    )


def test_a_claim_costs_the_same_among_any_number_of_priorities(store):
    request = ClaimRequest("w1", frozenset({"mine"}), 5)
    with_priorities(store, [("parked-", "mine", 0, at(1000).timestamp(), 30_000)])
    with Watch(store) as idle:
        claims = store.claim_runs(request)
    assert (claims.claims, claims.next_due_at) == ((), at(1000))
    assert idle.steps < 1000, f"an idle claim took {idle.steps} steps"
    store.commit([Create(queued(f"due{n}", workflow="mine", priority=n * 1000)) for n in range(9)])
    with Watch(store) as busy:
        assert ids(store.claim_runs(request)) == ["due8", "due7", "due6", "due5", "due4"]
    assert busy.steps < 8000, f"a claim took {busy.steps} steps"


def test_a_claim_costs_the_same_before_a_long_queue_of_many_priorities(store):
    request = ClaimRequest("w1", frozenset({"mine"}), 5)
    with_priorities(store, [("due-", "mine", 0, at(-1).timestamp(), 30_000)])
    with Watch(store) as watch:
        assert ids(store.claim_runs(request)) == [f"due-{30_000 - n}" for n in range(5)]
    assert watch.steps < 8000, f"a claim took {watch.steps} steps"


def test_a_long_queue_is_served_below_any_number_of_parked_priorities(store):
    now = at(0).timestamp()
    with_priorities(store, [("due-", "mine", 0, now - 1, 1000), ("parked-", "mine", 5000, now + 1000, 30_000)])
    with Watch(store) as watch:
        assert len(store.claim_runs(ClaimRequest("w1", frozenset({"mine"}), 5)).claims) == 5
    assert watch.steps < 16_000, f"a claim took {watch.steps} steps"


def test_nothing_that_is_done_often_reads_a_whole_table(store):
    with Watch(store) as watch:
        writer = started(store, "r")
        writer.write()
        commit(store, Send(Signal("r", "x", id="i")))
        writer.write(record("r", Kind.RUN_FINISHED), status=Status.COMPLETED, release=True)
        parked(store, "p", due_at=at(0), wakes=("x",))
        started(store, "dead", "nobody")
        started(store, "mine")
        store.claim_runs(ClaimRequest("w1", frozenset({"digest", "other"}), 9, versions={"other": "1"}))
        store.claim_runs(ClaimRequest("w1", run="r", statuses=frozenset({Status.COMPLETED})))
        store.renew_leases(WorkerInfo("w1"))
        for cursor in (0, 1):
            commit(store, Send(Signal("mine", "x")))
            assert "mine" in store.news("w1", cursor).runs
        get(store, "r")
        store.list_checkpoints("r", after=1)
        store.list_signals("r")
        store.list_runs(RunQuery(status=frozenset({Status.FAILED})))
        store.list_runs(RunQuery(parent="p"))
        commit(store, Create(queued("gone")))
        store.delete_runs(["gone"])
    plans = list(watch.plans())
    assert len(plans) > 20, "or nothing was watched"
    for sql, plan in plans:
        # Workers are few, and SQLite keeps one number per table.
        allowed = "keepstep_worker" in sql or "sqlite_sequence" in sql or plan.startswith("SCAN json_each")
        assert allowed or not plan.startswith("SCAN"), f"{plan}\n{sql}"
        assert "TEMP B-TREE" not in plan or "parent" in sql, f"{plan}\n{sql}"


def test_look_for_news_reads_no_table_if_nothing_changed(store):
    cursor = store.news("w1", 0).cursor
    with Watch(store) as watch:
        for _ in range(10):
            assert store.news("w1", cursor).changed is False
    assert watch.statements == {"PRAGMA data_version"}


def test_a_record_can_be_read_with_any_tool(store):
    started(store, "r", input=b'{"n":1}')
    commit(store, Send(Signal("r", "x", b'{"n":2}')))
    sql = (
        "SELECT json_extract(input, '$.n'), json_extract(payload, '$.n'), json_extract(record, '$.run'), typeof(record)"
        " FROM keepstep_run r JOIN keepstep_signal s ON s.run = r.id JOIN keepstep_checkpoint c ON c.run = r.id"
    )
    assert rows_of(store, sql) == [(1, 2, "r", "text")]


def test_a_step_writes_no_more_because_its_run_has_a_large_input(store, path):
    small, large = started(store, "small"), started(store, "large", input=b'"' + b"x" * 1_000_000 + b'"')
    wal = Path(f"{path}-wal")
    store._writer.connection.pragma("wal_autocheckpoint", 0)
    growth = []
    for writer in (small, large):
        before = wal.stat().st_size
        for _ in range(10):
            writer.write()
        growth.append(wal.stat().st_size - before)
    assert growth[1] <= growth[0] * 1.5


# -- transactional steps -----------------------------------------------------------------------------------------------


def rows_of(store, sql):
    return store._reader.read(lambda cursor: cursor.execute(sql).fetchall())


@pytest.fixture
def accounts(store):
    """A table of the user's, in the store's file."""
    writer = started(store, "setup")
    assert (
        writer.write(within=lambda tx: tx.execute("CREATE TABLE account (name TEXT UNIQUE, n INT)")).verdict == "done"
    )
    return "SELECT name, n FROM account ORDER BY name"


def test_a_transactional_step_commits_with_its_checkpoint(store, accounts):
    def within(tx):
        tx.executemany("INSERT INTO account VALUES (?, ?)", [("a", 1), ("b", 2)])
        assert tx.execute("SELECT sum(n) FROM account WHERE n > :least", {"least": 0}) == [(3,)]

    writer = started(store, "r")
    assert writer.write(within=within).verdict is Verdict.DONE
    assert rows_of(store, accounts) == [("a", 1), ("b", 2)]
    assert get(store, "r").seq == 2


def test_a_transactional_step_that_fails_leaves_nothing(store, accounts):
    def within(tx):
        tx.execute("INSERT INTO account VALUES ('a', 1)")
        tx.execute("INSERT INTO account VALUES ('a', 2)")

    before = everything(store)
    answer = started(store, "r").write(within=within, creates=[Create(queued("child"))])
    assert answer.verdict is Verdict.FAILED
    assert isinstance(answer.error, apsw.ConstraintError)
    assert rows_of(store, accounts) == []
    store_after = everything(store)
    assert store_after.pop("r")[0].seq == 1
    assert store_after == before


def test_a_refused_change_takes_its_transactional_step_back(store, accounts):
    def within(tx):
        tx.execute("INSERT INTO account VALUES ('a', 1)")

    writer = started(store, "r")
    assert writer.write(within=within, sends=[Send(Signal("nobody", "x"))]).verdict is Verdict.NOT_FOUND
    assert writer.write(within=within, release=True).verdict is Verdict.ILLEGAL
    assert rows_of(store, accounts) == []


@pytest.mark.parametrize(
    "sql, why",
    [
        ("SELECT * FROM keepstep_run", "keepstep_run"),
        ("SELECT * FROM KEEPSTEP_HEAD", "keepstep_head"),
        ("UPDATE keepstep_head SET epoch = 9", "keepstep_head"),
        ("DELETE FROM keepstep_checkpoint", "keepstep_checkpoint"),
        ("DROP TABLE keepstep_signal", "keepstep_signal"),
        ("CREATE TABLE keepstep_mine (x)", "keepstep_mine"),
        ("CREATE INDEX mine ON keepstep_head (epoch)", "keepstep_head"),
        ("ALTER TABLE keepstep_run ADD COLUMN mine", "keepstep_run"),
        ("CREATE TRIGGER t AFTER INSERT ON keepstep_run BEGIN SELECT 1; END", "keepstep_run"),
        ("INSERT INTO account SELECT id, 1 FROM keepstep_run", "keepstep_run"),
        ("UPDATE sqlite_sequence SET seq = 0", "sqlite_sequence"),
        ("ATTACH ':memory:' AS other", "attach"),
        ("PRAGMA synchronous = OFF", "PRAGMA"),
        ("PRAGMA user_version", "PRAGMA"),
        ("BEGIN", "roll back"),
        ("COMMIT", "roll back"),
        ("ROLLBACK", "roll back"),
        ("SAVEPOINT mine", "savepoints"),
        ("RELEASE keepstep_change", "savepoints"),
        ("INSERT INTO account VALUES ('a', 1); COMMIT", "roll back"),
    ],
)
def test_a_transactional_step_keeps_to_its_own_tables(store, accounts, sql, why):
    writer = started(store, "r")
    answer = writer.write(within=lambda tx: tx.execute(sql))
    assert answer.verdict is Verdict.FAILED
    assert isinstance(answer.error, DefinitionError), repr(answer.error)
    assert why.casefold() in str(answer.error).casefold()
    assert rows_of(store, accounts) == []
    assert writer.write().verdict is Verdict.DONE


def test_a_trigger_of_the_user_cannot_reach_the_store(store, accounts):
    writer = started(store, "r")

    def trap(tx):
        tx.execute("CREATE TRIGGER t AFTER INSERT ON account BEGIN DELETE FROM keepstep_signal; END")
        tx.execute("INSERT INTO account VALUES ('a', 1)")

    answer = writer.write(within=trap)
    assert (answer.verdict, type(answer.error)) == (Verdict.FAILED, DefinitionError)


def test_a_statement_that_the_store_itself_uses_is_refused_too(store, accounts):
    """It is in the cache, prepared while nobody watched."""
    sql = "SELECT seq FROM keepstep_signal WHERE run = ? AND id = ? AND id <> ''"
    writer = started(store, "r")
    commit(store, Send(Signal("r", "x", id="i")))
    answer = writer.write(within=lambda tx: tx.execute(sql, ("r", "i")))
    assert isinstance(answer.error, DefinitionError)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.mark.parametrize("sql", [ENDLESS + "SELECT max(i) FROM n", ENDLESS + "INSERT INTO account SELECT i, i FROM n"])
def test_transactional_step_that_takes_too_long_is_stopped_alone(path, sql):
    store = SQLiteStore(path, clock=SteppedClock(), within_seconds=0.2)
    store.renew_leases(WorkerInfo("w1"))
    stranger = apsw.Connection(str(path))
    stranger.execute("CREATE TABLE account (name TEXT UNIQUE, n INT)")
    stranger.close()
    a, b, c = (started(store, name) for name in "abc")
    begin = time.monotonic()
    answers = store.commit([a.change(), b.change(within=lambda tx: tx.execute(sql)), c.change()])
    assert time.monotonic() - begin < 60
    assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.FAILED, Verdict.DONE]
    assert isinstance(answers[1].error, DefinitionError)
    assert "0.2 s" in str(answers[1].error)
    assert [len(store.list_checkpoints(name)) for name in "abc"] == [2, 1, 2]
    assert rows_of(store, "SELECT count(*) FROM account") == [(0,)]
    store.close()


def test_a_transactional_step_that_rolls_everything_back_is_refused_alone(store, accounts):
    def within(tx):
        tx.execute("INSERT INTO account VALUES ('a', 1)")
        tx.execute("INSERT OR ROLLBACK INTO account VALUES ('a', 2)")

    a, b = started(store, "a"), started(store, "b")
    answers = store.commit([a.change(), b.change(within=within), Create(queued("c"))])
    assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.FAILED, Verdict.DONE]
    assert rows_of(store, accounts) == []


def test_transactional_step_that_takes_too_long_in_python_is_refused(path):
    store = SQLiteStore(path, clock=SteppedClock(), within_seconds=0.01)
    answer = started(store, "r").write(within=lambda _: time.sleep(0.05))
    assert isinstance(answer.error, DefinitionError)
    store.close()


def test_the_transaction_ends_with_the_step(store):
    kept = []
    assert started(store, "r").write(within=kept.append).verdict is Verdict.DONE
    with pytest.raises(DefinitionError, match="ends with the step"):
        kept[0].execute("SELECT 1")


def test_statements_return_the_rows_they_give(store, accounts):
    seen = []

    def within(tx):
        seen.append(tx.execute("INSERT INTO account VALUES ('a', 1)"))
        seen.append(tx.execute("INSERT INTO account VALUES ('b', 2) RETURNING n"))
        seen.append(tx.execute("SELECT 1 WHERE 0"))

    started(store, "r").write(within=within)
    assert seen == [[], [(2,)], []]


def test_a_forked_child_is_refused_in_process(store):
    """The whole story is told with real processes; this one shows that nothing blocks on a lock held at the fork."""
    told, tell = os.pipe()
    with store._writer._lock, store._reader._lock:
        child = os.fork()
        if child == 0:
            try:
                store.commit([])
            except StoreError:
                os.write(tell, b"refused")
            finally:
                os._exit(0)  # without closing anything
    assert os.read(told, 10) == b"refused"
    os.waitpid(child, 0)
    os.close(told)
    os.close(tell)
    assert ids(store.claim_runs(ClaimRequest("w1"))) == []


def test_an_erase_that_broke_off_is_finished_when_it_is_done_again(tmp_path, monkeypatch):
    store = SQLiteStore(tmp_path / "runs.db")
    commit(store, Create(queued("told", input=b'"a private word"', status=Status.CANCELLED, due_at=None)))
    with monkeypatch.context() as patch:
        patch.setattr(store._writer, "rewrite", Mock(side_effect=StoreUnavailable("somebody reads")))
        with pytest.raises(StoreUnavailable):
            store.delete_runs(["told"], finished=True, scrub=True)
    assert store.get_run("told") is None
    assert store.delete_runs(["told"], finished=True, scrub=True) == 1
    assert store.delete_runs(["told"], finished=True, scrub=True) == 0
    store.close()
    assert b"private" not in b"".join(file.read_bytes() for file in tmp_path.glob("runs.db*") if file.is_file())
