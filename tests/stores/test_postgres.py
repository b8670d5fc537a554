"""The PostgreSQL store: the contract, and what only it does."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import msgspec
import psycopg
import pytest

import keepstep as ks
from keepstep.errors import (
    CheckpointCorrupt,
    DefinitionError,
    EraseUnfinished,
    SchemaMismatch,
    StoreError,
    StoreUnavailable,
)
from keepstep.model import Ask, GateChange, Kind, RunQuery, Signal, Status, WorkerInfo
from keepstep.model.gate import QUEUE
from keepstep.ports import ClaimRequest, Create, Send, Verdict, WouldBlock, instant
from keepstep.records.record import seal, unseal
from keepstep.stores import rules
from keepstep.stores.postgres import check as postgres_check
from keepstep.stores.postgres import commit as postgres_commit
from keepstep.stores.postgres import erase as postgres_erase
from keepstep.stores.postgres import pool as postgres_connection
from keepstep.stores.postgres.pool import Address, ServerClock
from keepstep.stores.postgres.queues import Moment
from keepstep.stores.postgres.store import PostgresStore
from keepstep.testing.store_contract import (
    SteppedClock,
    StoreContract,
    at,
    commit,
    get,
    ids,
    queued,
    record,
    started,
)
from keepstep.testing.store_contract.trimming import Trimming
from keepstep.testing.store_contract.waking import Waking
from keepstep.testing.store_contract.writing import Writing
from tests.network import Proxy
from tests.postgres import empty_store, session_dsn


class Attentive(PostgresStore):
    """A store that has told what it wrote before it answers, and has heard what others told before it gives news."""

    def commit(self, changes, *, wait=True):
        answers = super().commit(changes, wait=wait)
        self._presence.ask(lambda connection: None)
        return answers

    def news(self, worker, cursor):
        self._presence.ask(lambda connection: connection.execute("SELECT 1"))
        return super().news(worker, cursor)


@pytest.fixture
def url():
    with empty_store() as url:
        yield url


class TestContract(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, url):
        self.url = url

    def make_store(self, clock):
        return Attentive(self.url, clock=clock)

    def make_store_with_lease(self, clock, lease_seconds):
        return Attentive(self.url, clock=clock, lease_seconds=lease_seconds)


class TestDividedHistory(Writing, Trimming):
    """The groups of the contract that are about records, with a history that is divided into parts."""

    @pytest.fixture(autouse=True)
    def _place(self):
        with empty_store("_divided") as url:
            self.url = url
            yield

    def make_store(self, clock):
        store = Attentive(self.url, clock=clock)
        store.divide_history(7.0)
        return store

    def make_store_with_lease(self, clock, lease_seconds):
        return Attentive(self.url, clock=clock, lease_seconds=lease_seconds)


class Beginning(Attentive):
    """A store whose commits are begun, as the engine does it, wherever they can be."""

    begun = 0

    def commit(self, changes, *, wait=True):
        underway = self.begin_commit(changes)
        if underway is None:
            return super().commit(changes, wait=wait)
        try:
            answers = underway.wait()
        except WouldBlock:
            return super().commit(changes, wait=wait)
        Beginning.begun += 1
        self._presence.ask(lambda connection: None)
        return answers


class TestBegunCommits(Writing, Waking, Trimming):
    """The groups of the contract that are about commits, with commits that are begun on the event loop."""

    @pytest.fixture(autouse=True)
    def _place(self, url):
        self.url = url

    def make_store(self, clock):
        return Beginning(self.url, clock=clock)

    def make_store_with_lease(self, clock, lease_seconds):
        return Beginning(self.url, clock=clock, lease_seconds=lease_seconds)

    def test_commits_are_begun_once_they_are_prepared(self, store):
        holder, before = started(store, "r"), Beginning.begun
        for _ in range(3):
            assert holder.write().verdict is Verdict.DONE
        assert Beginning.begun >= before + 2


@pytest.fixture
def store(url):
    store = PostgresStore(url, clock=SteppedClock())
    store.renew_leases(WorkerInfo("w1"))
    yield store
    store.close()


@pytest.fixture
def admin():
    with psycopg.connect(session_dsn(), autocommit=True) as connection:
        yield connection


def until(condition, what):
    for _ in range(6000):
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} never came")


def claim(store, worker="w2"):
    return store.claim_runs(ClaimRequest(worker, frozenset({"digest"}), 10))


# -- the address -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, shown",
    [
        ("postgresql://ann:s3cret@db:5433/app", "postgresql://ann@db:5433/app?schema=keepstep"),
        ("postgres://db/app?schema=jobs&password=s3cret", "postgresql://db/app?schema=jobs"),
        ("postgresql://ann:s3cret@a,b:5432/x?proxy=true", "postgresql://ann@a,b:5432/x?schema=keepstep"),
        ("postgresql:///x?host=/run/pg&user=ann", "postgresql://ann@/x?schema=keepstep&host=/run/pg"),
    ],
)
def test_a_password_is_in_nothing_that_is_shown(url, shown):
    address = Address(url)
    assert address.text == shown
    assert "s3cret" not in repr(address)
    assert address._words["password"] if "s3cret" in url else True


def test_message_of_the_server_is_shown_without_the_password(monkeypatch):
    address = Address("postgresql://ann:s3cret@127.0.0.1:1/x?connect_timeout=1")
    with pytest.raises(StoreUnavailable, match=r"ann@127\.0\.0\.1:1/x.* cannot be reached") as told:
        address.connect()
    assert "s3cret" not in str(told.value)
    said = address.translated(psycopg.OperationalError("no: host=h password=s3cret"))
    assert "s3cret" not in str(said)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:s3c%ret@h:5432x/y",
        "postgresql://a/b?s3cret=1",
        "postgresql://[s3cret",
        "postgresql://ann:x@s3cret@127.0.0.1/y",
        "postgresql://ann:x/s3cret@h/y",
        "postgresql://ann:x@y/s3cret@h/y",
        "postgresql://ann:x#s3cret@h/y",
        "postgresql://ann:x?s3cret@h/y",
        "postgresql://h/y?password=x&s3cret",
        "postgresql://ann:s3cret#x@h/y",
    ],
)
def test_a_url_that_cannot_be_read_is_not_repeated(url):
    with pytest.raises(DefinitionError, match="not a valid PostgreSQL URL") as told:
        PostgresStore(url)
    assert "s3c" not in str(told.value)
    assert told.value.__suppress_context__


def test_options_of_a_url_are_ours_or_the_servers():
    address = Address("postgresql://h/x?schema=my%20jobs&proxy=yes&sslmode=require")
    assert (address.schema, address.proxy, address._words["sslmode"]) == ("my jobs", True, "require")
    assert address.table("run") == '"my jobs".keepstep_run'
    with pytest.raises(DefinitionError, match="at most 63 bytes"):
        Address("postgresql://h/x", schema="é" * 40)
    with pytest.raises(DefinitionError, match="connections must be at least 1"):
        PostgresStore("postgresql://h/x", connections=0)


@pytest.mark.parametrize(
    "url, said",
    [
        (
            "postgresql://h/x?schemma=jobs",
            "not a valid PostgreSQL URL: it has no parameter 'schemma'; did you mean schema?",
        ),
        ("postgresql://h/x?sslmoed=require", "it has no parameter 'sslmoed'; did you mean sslmode?"),
        ("postgresql://h/x?zzz=1", "it has no parameter 'zzz'$"),
        ("postgresql://h/x?proxy=maybe", "proxy must be true or false, got 'maybe'"),
        ("postgresql://h/x?proxy=", "proxy must be true or false, got ''"),
    ],
)
def test_wrong_part_of_a_url_is_named(url, said):
    with pytest.raises(DefinitionError, match=said.replace("?", r"\?")):
        PostgresStore(url)


def test_a_url_may_say_that_there_is_no_proxy():
    assert not Address("postgresql://h/x?proxy=off").proxy
    assert Address("postgresql://h/x?proxy=off", proxy=True).proxy


def test_sessions_carry_the_process_id_in_their_name(store, admin):
    names = {name for (name,) in admin.execute("SELECT application_name FROM pg_stat_activity").fetchall()}
    assert f"keepstep {os.getpid()}" in names


def test_missing_psycopg_is_reported_with_its_install_command():
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "import keepstep\n"
        "from keepstep.stores.open import open_store\n"
        "try: open_store('postgresql://h/x')\n"
        "except keepstep.DefinitionError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90).stdout
    assert 'pip install "keepstep[postgres]"' in said


def test_psycopg_that_cannot_be_imported_is_reported_with_the_reason(tmp_path):
    (tmp_path / "psycopg").mkdir()
    (tmp_path / "psycopg" / "__init__.py").write_text("raise ImportError('no pq wrapper available: libpq is missing')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import keepstep\n"
        "from keepstep.stores.open import open_store\n"
        "try: open_store('postgresql://h/x')\n"
        "except keepstep.DefinitionError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, timeout=90
    ).stdout
    assert "libpq is missing" in said
    assert 'pip install "keepstep[postgres]"' in said


# -- the schema --------------------------------------------------------------------------------------------------------


def test_two_schemas_of_a_database_are_separate(store, url, admin):
    started(store, "r")
    other = PostgresStore(url, schema='a "quoted" schema')
    try:
        assert other.get_run("r") is None
        assert commit(other, Create(queued("r", input=b"2"))).verdict is Verdict.DONE
        assert get(store, "r").input == b"null"
        assert [worker.id for worker in other.list_workers()] == []
    finally:
        other.close()
        admin.execute('DROP SCHEMA "a ""quoted"" schema" CASCADE')


def test_a_newer_schema_is_refused_and_left_alone(store, url, admin):
    meta = store._address.table("meta")
    ((before,),) = admin.execute(f"SELECT value FROM {meta}").fetchall()
    admin.execute(f"UPDATE {meta} SET value = '999'")
    try:
        with pytest.raises(SchemaMismatch, match="has schema 999"):
            PostgresStore(url)
    finally:
        admin.execute(f"UPDATE {meta} SET value = %s", (before,))


def test_role_that_may_not_make_tables_is_referred_to_the_owner(url, admin):
    admin.execute("CREATE ROLE guest LOGIN")
    try:
        asked = url.replace("postgres@", "guest@", 1) + "_of_nobody"
        with pytest.raises(
            StoreError, match=r"may not create or change the tables.*open the store once as their owner"
        ):
            PostgresStore(asked)
    finally:
        admin.execute("DROP ROLE guest")


@pytest.fixture
def owned(admin):
    """The URLs of a store as the manual sets one up: of its owner, and of a role that only works with it."""
    schema = f"keepstep_roled_{os.getpid()}"
    owner, worker = f"{schema}_owner", f"{schema}_worker"
    admin.execute(f"CREATE ROLE {owner} LOGIN; CREATE ROLE {worker} LOGIN")
    admin.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {owner}")
    urls = [f"{session_dsn().replace('postgres@', f'{role}@', 1)}?schema={schema}" for role in (owner, worker)]
    try:
        PostgresStore(urls[0]).close()
        admin.execute(
            f"GRANT USAGE ON SCHEMA {schema} TO {worker};"
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {worker};"
            f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {worker}"
        )
        yield urls
    finally:
        admin.execute(f"DROP SCHEMA {schema} CASCADE; DROP ROLE {owner}; DROP ROLE {worker}")


def _kept(store, admin, text):
    """Whether a text is in the file of a table, of its large values or of its indexes."""
    admin.execute("CHECKPOINT")
    files = admin.execute(
        "WITH tables AS (SELECT unnest(ARRAY[oid, reltoastrelid]) AS one FROM pg_class WHERE oid = ANY(%s::regclass[]))"
        " SELECT pg_read_binary_file(pg_relation_filepath(file)) FROM (SELECT one AS file FROM tables UNION"
        " SELECT indexrelid FROM pg_index JOIN tables ON indrelid = one) files WHERE file <> 0",
        (list(store._eraser._tables),),
    ).fetchall()
    assert len(files) > 20
    return any(text in held for (held,) in files)


def test_erasure_waits_for_a_transaction_that_still_sees_the_run(store, admin, monkeypatch):
    monkeypatch.setattr(postgres_erase, "_OUTLAST_SECONDS", 0.2)
    commit(store, Create(queued("told", input=b'"a private word"')))
    with contextlib.closing(psycopg.connect(session_dsn(), application_name="a long report")) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT 1")
        with pytest.raises(StoreUnavailable, match=r"\(a long report\).*still sees the run.*erase again"):
            store.delete_runs(["told"], scrub=True)
        assert store.get_run("told") is None
    monkeypatch.setattr(postgres_erase, "_OUTLAST_SECONDS", 30.0)
    assert store.delete_runs(["told"], finished=True, scrub=True) == 1  # it is remembered, though it is gone
    assert not _kept(store, admin, b"a private word")
    assert store.delete_runs(["told"], finished=True, scrub=True) == 0


def test_a_large_store_removes_a_run_and_one_rewrite_finishes_every_erasure(store, admin, monkeypatch):
    for name in ("told", "other", "kept"):
        large = b"".join(
            b"a private word of %s %s" % (name.encode(), os.urandom(50).hex().encode()) for _ in range(200)
        )
        commit(store, Create(queued(name, input=b'"%s"' % large, tags={"who": name})))
    with monkeypatch.context() as patch:
        patch.setattr(rules, "REWRITTEN_AT_ONCE", 0)
        patch.setattr(store._eraser, "rewrite", Mock(side_effect=AssertionError("every run would be held up")))
        for name in ("told", "told", "other"):  # asked again, it does not claim more
            with pytest.raises(EraseUnfinished, match=r"not yet erased.*keepstep erase --rewrite"):
                store.delete_runs([name], scrub=True)
            assert store.get_run(name) is None
        assert store.delete_runs(["nobody"], scrub=True) == 0
    assert _kept(store, admin, b"a private word of told")
    assert store.unfinished_erasures() == 2
    assert store.rewrite() == 2
    assert store.unfinished_erasures() == 0
    assert not _kept(store, admin, b"a private word of told")
    assert not _kept(store, admin, b"a private word of other")
    assert _kept(store, admin, b"a private word of kept")
    assert store.rewrite() == 0


def test_the_statistics_of_the_planner_hold_no_value_of_an_erased_run(store, admin):
    for name in ("a", "m", "told"):  # the least and the greatest value are always among them
        commit(store, Create(queued(name)))
    table = store._address.table("run")
    admin.execute(f"ANALYZE {table}")
    statistics = "SELECT stavalues1::text FROM pg_statistic WHERE starelid = %s::regclass AND stavalues1 IS NOT NULL"
    assert "told" in str(admin.execute(statistics, (table,)).fetchall())
    assert store.delete_runs(["told"], scrub=True) == 1
    assert "told" not in str(admin.execute(statistics, (table,)).fetchall())


def test_run_removed_during_a_rewrite_is_not_counted_as_erased(store, monkeypatch):
    monkeypatch.setattr(rules, "REWRITTEN_AT_ONCE", 0)

    def removed(name):
        commit(store, Create(queued(name)))
        with pytest.raises(EraseUnfinished):
            store.delete_runs([name], scrub=True)

    removed("told")
    with monkeypatch.context() as patch:
        patch.setattr(store._eraser, "_rewrite", lambda *_: removed("told"))
        assert store.rewrite() == 1
    assert store.rewrite() == 1


def test_only_the_owner_erases_and_another_is_refused_first(owned, admin):
    owner, worker = map(PostgresStore, owned)
    try:
        commit(worker, Create(queued("told", input=b'"a private word"')))
        assert _kept(worker, admin, b"a private word")
        with pytest.raises(StoreError, match=r"nothing was erased.*does not own the tables.*erase as \S+_owner"):
            worker.delete_runs(["told"], scrub=True)
        assert get(worker, "told").input == b'"a private word"'
        assert owner.delete_runs(["told"], scrub=True) == 1
        assert not _kept(owner, admin, b"a private word")
    finally:
        owner.close()
        worker.close()


def test_a_role_that_may_maintain_the_tables_erases_as_their_owner_does(owned, admin):
    if admin.info.server_version < 170_000:
        pytest.skip("from PostgreSQL 17 on")
    worker = PostgresStore(owned[1])
    try:
        commit(worker, Create(queued("told", input=b'"a private word"')))
        for table in worker._eraser._tables:
            admin.execute(f"GRANT MAINTAIN ON {table} TO {worker.url.partition('@')[0].rpartition('/')[2]}")
        assert worker.delete_runs(["told"], scrub=True) == 1
        assert not _kept(worker, admin, b"a private word")
    finally:
        worker.close()


def test_a_run_that_cannot_be_erased_is_not_cancelled_for_it(owned):
    with contextlib.closing(PostgresStore(owned[1])) as store:
        commit(store, Create(queued("told")))
        with ks.open(store, worker=False) as engine, pytest.raises(StoreError, match="nothing was erased"):
            engine.care.erase("told", force=True)
        assert get(store, "told").status is Status.QUEUED


def test_the_owner_of_an_empty_schema_makes_the_store_in_it(owned, admin):
    with contextlib.closing(PostgresStore(owned[0])) as store:  # the role may make no schema itself
        assert store.get_run("r") is None


# -- what is kept ------------------------------------------------------------------------------------------------------

NASTY = "a\0b \x1a \x1a0 é🙂 '\"\\ %s {x}"


def test_any_text_comes_back_as_it_was_even_with_nul_in_it(store):
    given = queued(
        "r", key=NASTY, queue=NASTY, origin=NASTY, parent_key=NASTY, traceparent=NASTY, created_by=NASTY,
        tags={NASTY: NASTY, "b": ""}, input=b"\0\xff",
    )  # fmt: skip
    commit(store, Create(given))
    commit(store, Send(Signal("r", NASTY, b'"\\u0000"', id=NASTY, sender=NASTY)))
    assert commit(store, Send(Signal("r", "x", id=NASTY))).verdict is Verdict.EXISTS
    found = get(store, "r")
    assert (found.key, found.queue, found.origin, found.created_by, found.tags) == (
        NASTY, NASTY, NASTY, NASTY, {NASTY: NASTY, "b": ""},
    )  # fmt: skip
    assert (found.input, found.parent_key, found.traceparent) == (b"\0\xff", NASTY, NASTY)
    (signal,) = store.list_signals("r")
    assert (signal.name, signal.id, signal.sender) == (NASTY, NASTY, NASTY)
    assert [run.id for run in store.list_runs(RunQuery(tags={NASTY: NASTY})).runs] == ["r"]
    assert store.get_run("r\0") is None
    assert store.list_runs(RunQuery(id_prefix="\0")).runs == ()


def test_value_that_no_store_can_hold_is_refused(store):
    for wrong in (queued("\ud800"), queued("r", priority=2**70)):
        with pytest.raises(DefinitionError, match="cannot store or find this value"):
            commit(store, Create(wrong))
    with pytest.raises(DefinitionError, match="cannot store or find this value"):
        store.get_run("\ud800")
    assert commit(store, Create(queued("r"))).verdict is Verdict.DONE


def test_a_common_batch_is_one_statement_and_reads_nothing_first(store, monkeypatch):
    holders = [started(store, name) for name in ("b", "a", "c")]
    asked = []
    execute = postgres_connection.execute_binary
    monkeypatch.setattr(
        postgres_commit, "execute_binary", lambda *words, **more: asked.append(1) or execute(*words, **more)
    )
    monkeypatch.setattr(postgres_commit.Batch, "_read", lambda *_: pytest.fail("it was read first"))
    end = holders[2].change(record("c", Kind.RUN_FINISHED), status=Status.COMPLETED, release=True, signals_seen=0)
    answers = store.commit([holders[0].change(), holders[1].change(), end, Create(queued("new"))])
    assert [answer.verdict for answer in answers] == [Verdict.DONE] * 4
    assert asked == [1]


def begun(store, *changes):
    """A commit that is under way; the first of its kind is prepared by the server before."""
    underway = store.begin_commit(changes)
    assert underway is not None
    return underway


def test_begun_commit_that_the_head_refuses_writes_nothing(store):
    holder = started(store, "r")
    holder.write()
    with pytest.raises(WouldBlock):
        begun(store, holder.change(epoch=9)).wait()
    assert [row.seq for row in store.list_checkpoints("r")] == [1, 2]
    assert begun(store, holder.change()).wait()[0].verdict is Verdict.DONE


def test_begun_commit_is_unknown_after_a_lost_connection(store, admin):
    holder = started(store, "r")
    holder.write()
    with contextlib.closing(psycopg.connect(session_dsn())) as other:
        other.execute(f"SELECT 1 FROM {store._address.table('head')} WHERE run = 'r' FOR UPDATE")
        underway = begun(store, holder.change())
        assert underway.answers() is None
        assert store.begin_commit([holder.change()]) is None  # the one connection that writes is busy
        admin.execute("SELECT pg_terminate_backend(%s, 10000)", (underway._connection.info.backend_pid,))
        with pytest.raises(StoreUnavailable) as caught:
            underway.wait()
        assert caught.value.unknown
    assert store.begin_commit([holder.change()]) is None  # to connect anew would be to wait
    assert holder.write().verdict is Verdict.DONE
    assert begun(store, holder.change()).wait()[0].verdict is Verdict.DONE


def test_a_connection_that_is_lost_under_a_whole_commit_leaves_it_unknown(store, admin):
    holder = started(store, "r")
    holder.write()
    (writer,) = store._writer._all
    with contextlib.closing(psycopg.connect(session_dsn())) as other, ThreadPoolExecutor(1) as pool:
        other.execute(f"SELECT 1 FROM {store._address.table('head')} WHERE run = 'r' FOR UPDATE")
        written = pool.submit(holder.write)
        waits = "SELECT FROM pg_locks WHERE pid = %s AND NOT granted"
        while not admin.execute(waits, (writer.info.backend_pid,)).fetchall():
            time.sleep(0.005)
        with socket.socket(fileno=os.dup(writer.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        with pytest.raises(StoreUnavailable) as caught:
            written.result(60)
        assert caught.value.unknown


@pytest.mark.parametrize("way", ["whole", "begun"])
def test_a_connection_that_rolled_something_back_writes_on(store, way):
    holder = started(store, "r")
    holder.write()
    store._writer.run(lambda connection: connection.execute("BEGIN"))  # and it is rolled back, as after a deadlock
    if way == "begun":
        with pytest.raises(WouldBlock):
            begun(store, holder.change()).wait()
    assert holder.write().verdict is Verdict.DONE
    assert begun(store, holder.change()).wait()[0].verdict is Verdict.DONE


@pytest.fixture
def network(url):
    proxy = Proxy(url)
    yield proxy
    proxy.close()


def test_a_begun_commit_that_no_socket_takes_at_once_is_sent_to_its_end(network):
    store = PostgresStore(network.dsn, clock=SteppedClock())
    holder = started(store, "r")
    holder.write()
    large = record("r", value=msgspec.Raw(b'"' + os.urandom(6_000_000).hex().encode() + b'"'))
    row, checksum = seal(large, 3, holder.checksum)
    big = holder.change(rows=[msgspec.structs.replace(row, body=None, record=large_text(large))], checksum=checksum)
    network.stalled = True  # at the latest when the buffers of the sockets are full, no more is taken
    underway = begun(store, big)
    assert not underway.sent
    network.stalled = False
    assert underway.wait()[0].verdict is Verdict.DONE
    assert store.get_run("r").seq == 3
    store.close()


def large_text(record):
    """A record that was not compressed, as large as its value."""
    return msgspec.json.encode(record)


def test_change_that_cannot_be_written_directly_is_not_begun(store):
    holder = started(store, "r")
    holder.write()
    for change in (Send(Signal("r", "x")), holder.change(within=lambda tx: None), Create(queued("\ud800"))):
        assert store.begin_commit([change]) is None
    assert begun(store, holder.change()).wait()[0].verdict is Verdict.DONE


def test_a_head_that_counts_too_few_signals_is_damage_and_no_outage(store, admin):
    store.commit([Create(queued("r"))])
    store.commit([Send(Signal("r", "x"))])
    admin.execute(f"UPDATE {store._address.table('head')} SET signals = 0")
    with pytest.raises(CheckpointCorrupt, match=r"exist already, in keepstep_signal: .*\(r, 1\)"):
        store.commit([Send(Signal("r", "y"))])


def test_a_head_that_is_gone_is_not_made_by_a_change_to_it(store, admin):
    writer = started(store, "r")
    store.commit([Create(queued("other"))])
    admin.execute(f"DELETE FROM {store._address.table('head')} WHERE run = 'r'")
    assert [one.verdict for one in store.commit([writer.change()])] == [Verdict.FENCED]
    assert admin.execute(f"SELECT count(*) FROM {store._address.table('head')}").fetchone() == (1,)
    assert [row.seq for row in store.list_checkpoints("r")] == [1]


def test_a_damaged_run_is_set_aside_by_a_claim_and_named_by_a_list(store, admin):
    store.commit([Create(queued(name)) for name in ("a", "b", "c")])
    admin.execute(f"UPDATE {store._address.table('run')} SET tags = '{{no pair}}' WHERE id = 'a'")
    admin.execute(f"UPDATE {store._address.table('head')} SET status = 'odd' WHERE run = 'b'")
    assert ids(claim(store)) == ["c"]
    with pytest.raises(CheckpointCorrupt, match="'a': its row cannot be read"):
        store.get_run("a")
    for query in (RunQuery(), RunQuery(status=frozenset({Status.SET_ASIDE})), RunQuery(workflow="digest")):
        assert "a" in store.list_runs(query).unreadable
    assert ids(claim(store)) == []


def rows_read(store, request):
    """How many rows a claim of due runs reads, planned as it is on a table of which the planner knows nothing."""
    found = []

    class Explaining:
        def __init__(self, connection):
            self.connection = connection

        def execute(self, sql, values=None, **_):
            rows = self.connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", values).fetchall()
            found.append(rows[0][0][0]["Plan"])
            return self.connection.execute("SELECT NULL::text, NULL::text, NULL::timestamptz")

    store._pool.run(
        lambda connection: store._claimer._due(Moment(Explaining(connection), [], (), at(0)), request, request.limit)
    )

    def count(node):
        read = (
            node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        )
        scans = node["Actual Loops"] * read if "Index" in node["Node Type"] or node["Node Type"] == "Seq Scan" else 0
        return scans + sum(count(inner) for inner in node.get("Plans", ()))

    (plan,) = found
    return count(plan)


class ReadRows:
    """A connection that counts the rows that each statement reads which changes nothing."""

    def __init__(self, connection):
        self.connection = connection
        self.count = 0

    def execute(self, sql, values=None, **options):
        if sql.lstrip().startswith(("SELECT", "WITH")) and "UPDATE" not in sql:
            explained = self.connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", values).fetchall()
            self.count += _read_by(explained[0][0][0]["Plan"])
        return self.connection.execute(sql, values, **options)

    def pipeline(self):
        return contextlib.nullcontext()  # an explained statement is read before the next one is sent


def _read_by(node):
    read = sum(node.get(name, 0) for name in ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck"))
    scans = node["Actual Loops"] * read if "Index" in node["Node Type"] or node["Node Type"] == "Seq Scan" else 0
    return scans + sum(_read_by(inner) for inner in node.get("Plans", ()))


def claim_counting(store, request):
    def claim(connection):
        counting = ReadRows(connection)
        return store._claimer.claim(counting, request, at(0)), counting.count

    return store._pool.run(claim)


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("keys", [0, 1, 1000])
def test_a_claim_reads_as_many_rows_before_any_number_of_runs_in_a_queue(store, admin, keys, analyzed):
    many_priorities(store, admin, "waits", range(6000), at(-9))
    head, run = store._address.table("head"), store._address.table("run")
    key = f"'key ' || (number %% {keys})" if keys else "NULL"
    admin.execute(
        f"UPDATE {head} SET status = 'queued', priority = 0, key = {key}, since = %s, gate = queue", (at(-9),)
    )
    admin.execute(f"UPDATE {run} SET priority = 0")
    if analyzed:
        admin.execute(f"ANALYZE {head}")
    store.change_gate(QUEUE, "default", GateChange(at(0), "test", "declare", {"concurrency": 50}))
    claims, read = claim_counting(store, ClaimRequest("w1", frozenset({"mine"}), 10))
    assert len(claims.claims) == 10
    assert 0 < read < 2000, f"a claim read {read} rows"


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("keys", [0, 1, 1000])
def test_a_claim_reads_as_many_rows_before_any_number_of_runs_at_services(store, admin, keys, analyzed):
    many_priorities(store, admin, "parked", range(6000), at(99))
    head, run = store._address.table("head"), store._address.table("run")
    key = f"'key ' || (number %% {keys})" if keys else "NULL"
    admin.execute(
        f"UPDATE {head} SET priority = 0, epoch = 1, key = {key}, since = %s, "
        "gate = CASE WHEN number < 2000 THEN 'service/post' ELSE 'service/bank' END, "
        "due_at = CASE WHEN number %% 2 = 0 THEN due_at END",
        (at(-9),),
    )
    admin.execute(f"UPDATE {run} SET priority = 0")
    if analyzed:
        admin.execute(f"ANALYZE {head}")
    store.pass_gates("w1", [Ask("bank"), Ask("post")])
    claims, read = claim_counting(store, ClaimRequest("w1", frozenset({"mine"}), 10, rooms={"bank": 6, "post": 0}))
    assert [one.service for one in claims.claims] == ["bank"] * 6
    assert [one.runs for one in claims.at_services] == [100, 100]
    assert 0 < read < 2000, f"a claim read {read} rows"


def many_priorities(store, admin, prefix, priorities, due):
    """Make free runs, one of each priority."""
    head, run = store._address.table("head"), store._address.table("run")
    columns = "workflow, version, fingerprint, queue, input, seed, tags, created_at, created_by, data_key"
    admin.execute(
        f"INSERT INTO {run} (id, number, priority, {columns}) SELECT '{prefix}' || n, n, n, 'mine', '1', '', 'default',"
        f" '1', '', '{{}}', %s, '', '' FROM generate_series({priorities[0]}, {priorities[-1]}) n",
        (at(0),),
    )
    admin.execute(
        f"INSERT INTO {head} SELECT id, number, workflow, version, priority, 'waiting', 0, '', 0, NULL, %s, '', 0, 0,"
        f" %s, queue, key FROM {run} WHERE id LIKE '{prefix}%%'",
        (due, at(0)),
    )


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize(
    "due, parked",
    [
        (range(0), range(20_000)),
        (range(20_000), range(0)),
        (range(1000), range(1000, 20_000)),
        (range(20_000, 20_050), range(20_000)),
    ],
)
def test_a_claim_reads_as_many_rows_among_any_number_of_priorities(store, admin, due, parked, analyzed):
    for prefix, priorities, seconds in (("due", due, -9), ("parked", parked, 99)):
        if priorities:
            many_priorities(store, admin, prefix, priorities, at(seconds))
    if analyzed:
        admin.execute(f"ANALYZE {store._address.table('head')}")
    read = rows_read(store, ClaimRequest("w1", frozenset({"mine"}), 5))
    assert 0 < read < (1000 if due else 20)


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_claim_reads_as_many_rows_before_a_long_queue_of_others(store, admin, analyzed):
    many_priorities(store, admin, "foreign", range(20_000), at(-9))
    commit(store, Create(queued("mine", workflow="mine", queue="mail")))
    if analyzed:
        admin.execute(f"ANALYZE {store._address.table('head')}")
    named, all_queues = frozenset({"mail", "none"}), None
    for queues, most in ((named, 20), (all_queues, 1000)):
        assert 0 < rows_read(store, ClaimRequest("w1", frozenset({"mine"}), 5, queues=queues)) < most


def test_a_look_at_whole_tables_is_planned_as_the_server_plans(store, admin):
    shown = "SELECT " + ", ".join(f"current_setting('{name}')" for name in postgres_connection.PLANNING)
    settings = {}

    class Watched:
        def __init__(self, connection):
            self.connection = connection
            self.transaction = connection.transaction

        def execute(self, sql, values=None, **options):
            if b"keepstep_" in (sql if isinstance(sql, bytes) else sql.encode()):
                settings[sql] = self.connection.execute(shown).fetchone()
            return self.connection.execute(sql, values, **options)

    def look(connection):
        before = connection.execute(shown).fetchone()
        found = postgres_check.Inspector(Watched(connection), store._address, at(0)).look()
        return found, before, connection.execute(shown).fetchone()

    found, before, after = store._pool.run(look)
    assert found == []
    assert len(settings) > 5
    assert set(settings.values()) == {admin.execute(shown).fetchone()}
    assert before == after != admin.execute(shown).fetchone()


def test_a_page_is_found_by_an_index_whatever_is_asked(store):
    store.commit([Create(queued(f"r{n}", workflow=f"w{n % 3}", created_at=at(n))) for n in range(30)])
    for query in (
        RunQuery(limit=5),
        RunQuery(status=frozenset({Status.QUEUED}), limit=5),
        RunQuery(workflow="w1", limit=5),
    ):
        plan = []

        def explain(connection, query=query, plan=plan):
            rows = connection.execute
            rows("SET enable_seqscan = off")  # for thirty rows it may be the quickest; here the point is that it can
            rows("SET enable_sort = off")

            class Explaining:
                transaction = connection.transaction

                def execute(self, sql, values=(), **_):
                    if b"keepstep_run r" in (sql if isinstance(sql, bytes) else sql.encode()):
                        plan.append(" ".join(line for (line,) in rows(b"EXPLAIN " + sql, values).fetchall()))
                    return rows(sql, values)

            return store._reads._lists.page(Explaining(), query, instant(store.clock.now()))

        store._pool.run(explain)
        assert plan
        assert all("Sort" not in one and "Seq Scan" not in one for one in plan), plan


# -- news --------------------------------------------------------------------------------------------------------------


def test_news_arrive_by_notification_and_by_polling(store, url):
    started(store, "r")
    other = PostgresStore(url)
    cursor = store.news("w1", 0).cursor
    for tell in (True, False):
        if not tell:
            other._presence.notify = lambda notifications: None  # every notification is lost
        commit(other, Send(Signal("r", "x")))
        news = until(lambda since=cursor: (found := store.news("w1", since)).runs and found, "the news")
        assert (news.runs, news.changed) == (("r",), True)
        cursor = news.cursor
    other.close()


def test_alert_comes_at_once_and_only_for_what_concerns_the_worker(store, url):
    started(store, "mine")
    started(store, "theirs", "w2")
    other = Attentive(url, clock=SteppedClock())
    told = []
    end = store.on_news(lambda: told.append(1))
    store.news("w1", 0)
    store._presence.ask(lambda connection: None)

    def heard(*changes):
        before = len(told)
        other.commit(changes)
        store._presence.ask(lambda connection: connection.execute("SELECT 1"))
        return len(told) - before

    assert heard(Create(queued("new", due_at=at(-9)))) == 1
    assert heard(Send(Signal("mine", "x"))) == 1
    assert heard(Send(Signal("theirs", "x"))) == 0
    end()
    assert heard(Send(Signal("mine", "x"))) == 0
    other.close()


def test_behind_a_proxy_no_session_is_held_and_all_goes_on(url, admin):
    one, two = (PostgresStore(url, proxy=True, clock=SteppedClock()) for _ in range(2))
    writer = started(one, "r", "w1")
    one.renew_leases(WorkerInfo("w1"))
    assert ids(claim(two)) == []
    assert writer.write().verdict is Verdict.DONE
    commit(two, Send(Signal("r", "x")))
    assert until(lambda: one.news("w1", 0).runs, "the news") == ("r",)
    assert admin.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
    assert one._presence._thread is None
    for store in (one, two):
        store.close()


# -- flaws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage, flaw, mended",
    [
        ("DELETE FROM {run} WHERE id = 'r'", ("orphan", "r"), "rows were put aside in keepstep_aside_"),
        ("DELETE FROM {head} WHERE run = 'r'", ("dangling", "r"), "its head was rebuilt from its records"),
        ("UPDATE {head} SET workflow = 'x' WHERE run = 'r'", ("index", "r"), "its head was corrected"),
        ("UPDATE {head} SET signals = 0 WHERE run = 'r'", ("index", "r"), "its head counts 1 now"),
        (
            "UPDATE {head} SET status = 'odd', worker = NULL WHERE run = 'r'",
            ("dangling", "r"),
            "the old one was put aside",
        ),
        ("DROP INDEX {schema}.keepstep_head_status", ("index", "keepstep_head_status"), "it was rebuilt"),
    ],
)
def test_flaw_is_reported_and_mended_and_nothing_is_destroyed(store, admin, damage, flaw, mended):
    kind, about = flaw
    started(store, "r").write()
    commit(store, Send(Signal("r", "x")))
    names = {name: store._address.table(name) for name in ("run", "head")}
    admin.execute(damage.format(**names, schema=store._address.schema))
    found = store.check()
    assert (kind, about, "") in [(flaw.kind, flaw.about, flaw.mended) for flaw in found]
    done = store.check(mend=True)
    assert any(flaw.kind == kind and mended in flaw.mended for flaw in done), done
    assert store.check() == []
    run = store.get_run("r")
    if run is not None and "rebuilt from its records" in mended + "".join(flaw.mended for flaw in done):
        assert run.status is Status.SET_ASIDE
        assert list(unseal(store.list_checkpoints("r"), "r", previous=""))
    if kind == "orphan":
        kept = admin.execute(f"SELECT count(*) FROM {store._address.table('aside_checkpoint')} WHERE run = 'r'")
        assert kept.fetchone()[0] >= 2
    for table in ("aside_checkpoint", "aside_signal", "aside_head"):
        admin.execute(f"DROP TABLE IF EXISTS {store._address.table(table)}")


def test_repair_is_given_every_row_of_a_run(store):
    started(store, "r")
    commit(store, Send(Signal("r", "x")))
    assert [row["table"] for row in store.raw_rows("r")] == ["keepstep_run", "keepstep_head", "keepstep_signal"]


# -- transactional steps -----------------------------------------------------------------------------------------------


@pytest.fixture
def account(url, admin):
    """A table of someone's own, where the session of a URL with this search path finds it."""
    schema = url.rpartition("=")[2]
    PostgresStore(url).close()
    admin.execute(f"SET search_path TO {schema}")
    admin.execute("CREATE TABLE account (name text PRIMARY KEY, balance int)")
    admin.execute("INSERT INTO account VALUES ('a', 100), ('b', 0)")
    yield lambda: dict(admin.execute("SELECT name, balance FROM account").fetchall())
    admin.execute("DROP TABLE account")


@pytest.fixture
def shop(request, url, account):
    schema = url.rpartition("=")[2]
    store = PostgresStore(f"{url}&options=-c%20search_path={schema}", within_seconds=getattr(request, "param", 60.0))
    store.renew_leases(WorkerInfo("w1"))
    yield store
    store.close()


def within(store, function, run="r"):
    """Commit a change with this function inside; its answer."""
    writer = started(store, run)
    rows, checksum = writer.sealed([record(run)])
    change = writer.change(rows=[], checksum="")

    def call(tx):
        function(tx)
        change.rows, change.checksum = rows, checksum

    change.within = call
    return commit(store, change)


def test_its_statements_commit_with_the_checkpoint(shop, account):
    def move(tx):
        assert tx.execute("UPDATE account SET balance = balance - ? WHERE name = 'a' RETURNING balance", (10,)) == [
            (90,)
        ]
        assert tx.execute("UPDATE account SET balance = balance + %s WHERE name = %s", (10, "b")) == []
        assert tx.execute("SELECT '?%' || ?", ("!",)) == [("?%!",)]
        assert account() == {"a": 100, "b": 0}

    assert within(shop, move).verdict is Verdict.DONE
    assert account() == {"a": 90, "b": 10}
    assert get(shop, "r").seq == 2


@pytest.mark.parametrize(
    "sql, why",
    [
        ("COMMIT", "may not use COMMIT"),
        (" -- x\n/* y */ rollback", "may not use ROLLBACK"),
        ("SAVEPOINT x", "may not use SAVEPOINT"),
        ("SET statement_timeout = 0", "may not use SET"),
        ("SELECT * FROM keepstep.KEEPSTEP_HEAD", "touch KEEPSTEP_HEAD"),
        ("DO $$ BEGIN COMMIT; END $$", "invalid transaction termination"),
        ("SELECT 1; COMMIT", "multiple commands"),
    ],
)
def test_a_step_that_oversteps_is_refused_and_undone(shop, account, sql, why):
    oversteps(shop, account, sql, why)


@pytest.mark.parametrize("shop", [0.3], indirect=True)
def test_a_step_that_takes_too_long_is_refused_and_undone(shop, account):
    oversteps(shop, account, "SELECT pg_sleep(90)", "took more than 0.3 s")


def oversteps(shop, account, sql, why):
    def overstep(tx):
        tx.execute("UPDATE account SET balance = 0")
        tx.execute(sql)

    answer = within(shop, overstep)
    assert answer.verdict is Verdict.FAILED
    assert why in str(answer.error)
    assert account() == {"a": 100, "b": 0}
    assert get(shop, "r").seq == 1


def test_error_that_the_step_swallows_fails_the_change(shop, account):
    def swallow(tx):
        with contextlib.suppress(psycopg.Error):
            tx.execute("INSERT INTO account VALUES ('a', 1)")

    answer = within(shop, swallow)
    assert answer.verdict is Verdict.FAILED
    assert "let the error leave the step" in str(answer.error)


def test_a_transaction_ends_with_its_step(shop, account):
    kept = []
    assert within(shop, kept.append).verdict is Verdict.DONE
    with pytest.raises(DefinitionError, match="ends with the step"):
        kept[0].execute("SELECT 1")


def test_a_lease_that_is_lost_meanwhile_undoes_everything(shop, admin, account):
    def move(tx):
        tx.execute("UPDATE account SET balance = 0")
        admin.execute(f"UPDATE {shop._address.table('head')} SET epoch = epoch + 1 WHERE run = 'r'")

    assert within(shop, move).verdict is Verdict.FENCED
    assert account() == {"a": 100, "b": 0}


# -- the server's time -------------------------------------------------------------------------------------------------


class Elsewhere:
    """A server whose clock shows another time, and which takes a while to answer."""

    def __init__(self, ahead, late=0.0):
        self.ahead, self.late = ahead, late

    def execute(self, _):
        time.sleep(self.late / 2)
        self.said = time.time() + self.ahead
        time.sleep(self.late / 2)
        return self

    def fetchall(self):
        return [(self.said,)]


def test_time_is_the_servers_and_durations_are_this_machines():
    clock = ServerClock()
    for ahead in (3600.0, -86_400.0, 0.0):
        before = clock.boot()[1]
        clock.measure(Elsewhere(ahead))
        assert clock.now() - time.time() == pytest.approx(ahead, abs=0.1)
        assert clock.boot() == ("server", pytest.approx(before, abs=1.0))


def test_clock_ignores_a_difference_within_the_round_trip():
    clock = ServerClock()
    clock.measure(Elsewhere(100.0))
    before = clock._apart
    clock.measure(Elsewhere(100.02, late=0.2))
    assert clock._apart == before


def test_store_judges_by_the_clock_of_the_server_by_default(url):
    store = PostgresStore(url)
    assert isinstance(store.clock, ServerClock)
    store.close()


def test_a_signal_that_comes_while_its_run_is_removed_goes_with_it(store, url, monkeypatch):
    """Else the next run of that id would hear it, and nobody could send to that one."""
    commit(store, Create(queued("r")))
    other, write = PostgresStore(url), postgres_commit.Batch.write
    removing = threading.Thread(target=other.delete_runs, args=(["r"],))

    def remove_before_the_commit(batch):
        write(batch)
        removing.start()
        time.sleep(0.3)

    monkeypatch.setattr(postgres_commit.Batch, "write", remove_before_the_commit)
    commit(store, Send(Signal("r", "x")))
    monkeypatch.undo()
    removing.join()
    other.close()
    assert store.list_signals("r") == []
    commit(store, Create(queued("r")))
    assert commit(store, Send(Signal("r", "x"))).seq == 1
