"""The store in files: the contract, and what is its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepstep.errors import CheckpointCorrupt, DefinitionError, SchemaMismatch, StoreError, StoreUnavailable
from keepstep.model import Kind, RunQuery, Signal, Status, WorkerInfo
from keepstep.ports import ClaimRequest, Create, Send, Verdict, WouldBlock
from keepstep.stores.files import check as files_check
from keepstep.stores.files import commit as files_commit
from keepstep.stores.files import index as files_index
from keepstep.stores.files import log as files_log
from keepstep.stores.files.disk import Disk
from keepstep.stores.files.log import HINT_EVERY
from keepstep.stores.files.names import run_folder
from keepstep.stores.files.store import FilesStore, open_url
from keepstep.stores.files.text import sealed
from keepstep.stores.open import open_store
from keepstep.testing.store_contract import (
    Holder,
    SteppedClock,
    StoreContract,
    commit,
    everything,
    get,
    parked,
    queued,
    record,
    started,
    watch,
)

ROOT = Path(__file__).parents[2]


class TestFiles(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "runs"

    def make_store(self, clock):
        return FilesStore(self.path, clock=clock, power_loss="may_lose_last")

    def make_store_with_lease(self, clock, lease_seconds):
        return FilesStore(self.path, clock=clock, lease_seconds=lease_seconds, power_loss="may_lose_last")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def clock():
    return SteppedClock()


@pytest.fixture
def opened(path, clock):
    """Stores on the same folder, each as another process would have it."""
    stores = []

    def opened(**options):
        stores.append(FilesStore(path, clock=clock, **{"power_loss": "may_lose_last", **options}))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def store(opened):
    store = opened()
    store.renew_leases(WorkerInfo("w1"))
    return store


def claim(store, worker, limit=10):
    return [one.run.id for one in store.claim_runs(ClaimRequest(worker, frozenset({"digest"}), limit)).claims]


def entries(path, run_id):
    return sorted((path / run_folder(run_id)).glob("[0-9]*.json"))


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_url_names_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url, folder in (
        ("files:here", tmp_path / "here"),
        ("files:///there", tmp_path / "there"),
        (f"files:{tmp_path}/far", tmp_path / "far"),
        (f"files:///{tmp_path}/away", tmp_path / "away"),
    ):
        store = open_store(url)
        assert store.url == f"files:{folder}"
        assert (folder / "keepstep.json").is_file()
        store.close()
    for url in ("files:", "files://host/x"):
        with pytest.raises(DefinitionError, match="must name a folder"):
            open_url(url)


def test_folder_that_is_no_store_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    with pytest.raises(StoreUnavailable, match="it is a file"):
        FilesStore(tmp_path / "file")
    with pytest.raises(StoreUnavailable, match="does not exist"):
        FilesStore(tmp_path / "no" / "such")
    with pytest.raises(SchemaMismatch, match=r"holds other files \(cat\.jpg"):
        FilesStore(tmp_path / "photos")
    assert [one.name for one in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    with pytest.raises(DefinitionError, match="not the name"):
        FilesStore("a\0b")
    with pytest.raises(DefinitionError, match="power_loss"):
        FilesStore(tmp_path / "x", power_loss="often")


def test_a_newer_layout_and_a_damaged_marker_are_refused(path, opened):
    opened().close()
    for text, what in (('{"layout": 99}', "upgrade"), ("", "cannot be read"), ('{"layout": "x"}', "layout x")):
        (path / "keepstep.json").write_text(text)
        with pytest.raises(SchemaMismatch, match=what):
            opened()


def test_a_folder_under_version_control_may_become_a_store(path, opened):
    path.mkdir()
    (path / ".git").mkdir()
    opened()
    assert "/index/" in (path / ".gitignore").read_text()


def test_a_network_file_system_is_refused(path, monkeypatch):
    monkeypatch.setattr("keepstep.stores.os_locks.network_file_system", lambda _: "nfs4")
    with pytest.raises(StoreUnavailable, match="network file system"):
        FilesStore(path)
    FilesStore(path, allow_network=True).close()


def test_file_system_without_links_is_refused(path, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Disk, "link", link)
    with pytest.raises(StoreUnavailable, match="no hard links"):
        FilesStore(path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_only_be_read_can_be_read(path, store, opened):
    commit(store, Create(queued("r")))
    path.chmod(0o500)
    assert get(opened(), "r").id == "r"
    path.chmod(0o700)


def test_closed_store_refuses_calls(store):
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.get_run("r")


def test_a_store_that_was_moved_away_is_not_written(path, store):
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(StoreUnavailable, match="moved or removed"):
        store.renew_leases(WorkerInfo("w1"))


def test_a_large_batch_is_not_made_on_the_thread_of_a_loop(store):
    with pytest.raises(WouldBlock):
        store.commit([Create(queued(f"r{n}")) for n in range(20)], wait=False)
    assert store.list_runs(RunQuery()).runs == ()


# -- what lies there ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_one_readable_file(path, store):
    writer = started(store, "digest-42")
    writer.write(record("digest-42", value=b'{"z":1,"a":[true]}', step="fetch#1"))
    first, second = entries(path, "digest-42")
    text = second.read_text()
    assert json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n" == text
    said = json.loads(text)
    assert said["checkpoint"]["value"] == {"a": [True], "z": 1}
    assert said["checkpoint_order"] == [["z", "a"]]
    assert said["head"]["status"] == "running"
    assert json.loads(first.read_text())["created"]["workflow"] == "digest"
    assert first.parent.name == "digest-42"


def test_large_commit_has_a_file_per_checkpoint_and_packed_value(path, store):
    large = b'"' + b"x" * 200_000 + b'"'
    writer = started(store, "r")
    writer.write(record("r"), record("r", value=large), record("r", value=large))
    beside = sorted(one.name for one in (path / run_folder("r")).glob("000002*"))
    assert [name.rpartition(".")[2] for name in beside] == ["json", "json", "packed", "packed", "json"]
    assert [row.seq for row in store.list_checkpoints("r")] == [1, 2, 3, 4]
    assert store.check() == []


def test_no_id_leaves_the_root(path, store, tmp_path):
    ids = [
        "../../out",
        "/etc/x",
        "CON",
        "nul.txt",
        "Run",
        "run",
        "RUN",
        "x" * 1000,
        "a\0b",
        "\n",
        ".",
        "..",
        "Ä",
        "A\u0308",
        "",
    ]
    for run_id in ids:
        assert commit(store, Create(queued(run_id))).verdict is Verdict.DONE
        assert get(store, run_id).id == run_id
    assert sorted(run.id for run in store.list_runs(RunQuery()).runs) == sorted(ids)
    assert [one.name for one in tmp_path.iterdir()] == ["runs"]
    assert store.delete_runs(ids) == len(ids)


def test_an_id_that_is_no_text_is_refused(store):
    with pytest.raises(DefinitionError, match="cannot store this value"):
        commit(store, Create(queued("\ud800")))


def test_the_newest_entry_is_found_in_a_few_looks_however_many_there_are(store, opened, monkeypatch):
    writer = started(store, "r")
    for _ in range(HINT_EVERY * 12 + 5):
        writer.write()
    looks = []
    real = Disk.identity
    monkeypatch.setattr(Disk, "identity", lambda self, path: looks.append(path) or real(self, path))
    monkeypatch.setattr(Disk, "names", lambda *_: pytest.fail("a folder was listed"))
    other = opened()
    looks.clear()
    assert other.list_checkpoints("r", HINT_EVERY * 12 + 5)[0].seq == HINT_EVERY * 12 + 6
    assert len(looks) < 16


def test_a_hint_that_is_lost_or_wrong_costs_time_only(path, store, opened):
    writer = started(store, "r")
    for _ in range(HINT_EVERY * 2 + 5):
        writer.write()
    hint = path / run_folder("r") / "latest"
    for text in (None, "", "junk", "1", "-5", "9" * 40):
        hint.unlink(missing_ok=True)
        if text is not None:
            hint.write_text(text)
        assert get(opened(), "r").seq == HINT_EVERY * 2 + 6


# -- several processes -------------------------------------------------------------------------------------------------


def test_a_stale_writer_finds_its_place_taken(store, opened, clock):
    """It was stopped with all it needs in memory; meanwhile the run was taken over, ended, removed and made again."""
    writer = started(store, "r")
    late = writer.change()
    other = opened()
    watch(other, clock, store.lease_seconds * 2, "w2")
    assert claim(other, "w2") == ["r"]
    Holder(other, get(other, "r")).write(status=Status.COMPLETED, release=True)
    assert commit(store, late).verdict is Verdict.FENCED
    other.delete_runs(["r"])
    again = started(other, "r", "w2")
    for _ in range(4):
        again.write()
    before = everything(other)
    assert commit(store, late).verdict is Verdict.FENCED
    assert everything(other) == before


def test_unfinished_work_of_a_dead_writer_is_done_by_the_next(store, opened, clock, monkeypatch):
    def died(self, state, places=None):
        raise KeyboardInterrupt
        yield

    parent = started(store, "p")
    commit(store, Create(queued("a", due_at=None, status=Status.WAITING, wakes=("hello",))))
    with monkeypatch.context() as patch:
        patch.setattr(files_commit.Commits, "carry_on", died)
        with pytest.raises(KeyboardInterrupt):
            parent.write(creates=[Create(queued("c", parent="p"))], sends=[Send(Signal("a", "hello"))])
    store.abandon()
    other = opened()
    assert other.get_run("c") is None
    assert sorted(claim(other, "w2")) == ["a", "c", "p"]
    assert [one.name for one in other.list_signals("a")] == ["hello"]


def test_unfinished_work_is_kept_while_others_write_to_the_run(store, opened, monkeypatch):
    parent = started(store, "p")
    commit(store, Create(queued("a")))
    with monkeypatch.context() as patch:
        patch.setattr(files_commit.Commits, "carry_on", lambda self, state, places=None: iter(()))
        change = {"creates": [Create(queued("c", parent="p"))], "sends": [Send(Signal("a", "hello"))]}
        parent.write(**change)
        other = opened()
        commit(other, Send(Signal("p", "x")))  # and dies, too
    third = opened()
    for _ in range(2):
        commit(third, Send(Signal("p", "y")))
    assert get(third, "c").parent == "p"
    assert [one.name for one in third.list_signals("a")] == ["hello"]


def test_reader_of_a_commit_finds_what_it_began(store, opened, monkeypatch):
    parent = started(store, "p")
    with monkeypatch.context() as patch:
        patch.setattr(files_commit.Commits, "carry_on", lambda self, state, places=None: iter(()))
        parent.write(creates=[Create(queued("next"))], status=Status.COMPLETED, release=True)
    other = opened()
    assert other.get_run("next") is None
    assert get(other, "p").status is Status.COMPLETED
    assert get(other, "next").status is Status.QUEUED


def test_message_is_delivered_once_however_often_it_is_resumed(store, opened):
    parent = started(store, "p")
    commit(store, Create(queued("a")))
    parent.write(sends=[Send(Signal("a", "hello"))])
    other = opened()
    for run in ("p", "a", "p"):
        commit(other, Send(Signal(run, "x")))
    assert [one.name for one in other.list_signals("a")] == ["hello", "x"]


def test_many_threads_of_many_stores_lose_nothing(opened):
    stores = [opened() for _ in range(3)]
    commit(stores[0], Create(queued("r")))

    def send(number):
        store = stores[number % 3]
        assert commit(store, Send(Signal("r", f"n{number}", id=f"i{number // 2}"))).verdict in ("done", "exists")
        return commit(store, Create(queued(f"new{number // 2}"))).verdict

    with ThreadPoolExecutor(6) as pool:
        verdicts = list(pool.map(send, range(60)))
    assert verdicts.count(Verdict.DONE) == 30
    signals = stores[1].list_signals("r")
    assert [one.seq for one in signals] == list(range(1, 31))
    assert len({one.id for one in signals}) == 30
    for store in stores:
        assert len(store.list_runs(RunQuery(limit=100)).runs) == 31
        assert store.check() == []


def test_every_run_is_claimed_by_one(opened):
    stores = [opened() for _ in range(4)]
    stores[0].commit([Create(queued(f"r{n}")) for n in range(40)])
    taken: list[str] = []
    lock = threading.Lock()

    def take(number):
        while some := claim(stores[number], f"w{number}", 3):
            with lock:
                taken.extend(some)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take, range(4)))
    assert sorted(taken) == sorted(f"r{n}" for n in range(40))


def test_a_second_store_never_disturbs_a_living_run(store, opened, clock):
    writer = started(store, "r")
    other = opened()
    for _ in range(5):
        clock.advance(store.lease_seconds - 1)
        assert store.renew_leases(WorkerInfo("w1"))
        assert claim(other, "w2") == []
        assert other.check(mend=True) == []
        assert writer.write().verdict is Verdict.DONE
    assert get(other, "r").seq == 6


CHILD = """
import sys, os
from keepstep.stores.files.store import FilesStore
from keepstep.testing.store_contract import started
from keepstep.model import WorkerInfo
store = FilesStore(sys.argv[1])
store.renew_leases(WorkerInfo("theirs", pid=os.getpid()))
writer = started(store, "r", "theirs", created_at=__import__("datetime").datetime.now(__import__("datetime").UTC))
writer.write()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_is_seen_at_once_and_a_stopped_one_is_left_alone(path):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            store = FilesStore(path)
            assert claim(store, "mine") == []
            process.send_signal(signal.SIGSTOP)
            assert claim(store, "mine") == []
            assert [(one.id, one.alive) for one in store.list_workers()] == [("mine", True), ("theirs", True)]
        finally:
            process.kill()
            process.wait()
    assert claim(store, "mine") == ["r"]
    assert get(store, "r").recoveries == 1
    store.close()


@pytest.mark.parametrize("text", ["", "{", "\x00" * 40])
def test_a_heartbeat_that_cannot_be_read_is_no_sign_of_life(path, store, opened, text):
    started(store, "r")
    beat, lock = path / "workers" / "w1.json", path / "workers" / "w1.lock"
    beat.write_text(text)
    other = opened()
    assert claim(other, "w2") == []  # its lock is
    assert "cannot be read" in next(one.damage for one in other.list_workers() if one.id == "w1")
    store.abandon()
    lock.unlink()
    assert claim(other, "w2") == ["r"]


def test_forked_child_is_refused(store):
    started(store, "r")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store.get_run("r")
        except StoreError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert b"open it again" in os.read(read, 1000)
    os.close(read)
    assert get(store, "r").seq == 1


# -- the index ---------------------------------------------------------------------------------------------------------


def some_runs(store):
    started(store, "run")
    parked(store, "parked", wakes=("go",))
    commit(store, Create(queued("due")))
    commit(store, Send(Signal("run", "x")))


def test_the_index_is_made_again_from_the_logs(path, store, opened):
    some_runs(store)
    before = everything(store)
    store.close()
    shutil.rmtree(path / "index")
    other = opened()
    assert everything(other) == before
    assert other.check() == []
    assert sorted(claim(other, "w2")) == ["due", "run"]


def test_an_index_that_goes_while_it_is_used_comes_back(path, store, opened):
    some_runs(store)
    other = opened()
    assert len(other.list_runs(RunQuery()).runs) == 3
    shutil.rmtree(path / "index")
    store.renew_leases(WorkerInfo("w1"))
    commit(store, Create(queued("new")))
    assert len(opened().list_runs(RunQuery()).runs) == 4


@pytest.mark.parametrize("damage", [b"\xff junk\n", b'{"run":7}\n', b"{"])
def test_damaged_index_is_not_used(path, store, opened, damage):
    some_runs(store)
    store.close()
    (file,) = (path / "index").iterdir()
    file.write_bytes(file.read_bytes()[:60] + damage)
    other = opened()
    assert len(other.list_runs(RunQuery()).runs) in (0, 3)
    other.check(mend=True)
    assert len(other.list_runs(RunQuery()).runs) == 3
    assert sorted(claim(other, "w2")) == ["due", "run"]


def test_files_of_many_dead_processes_are_merged(path, opened):
    for number in range(files_index._MOST_SETTLED + 5):
        one = opened()
        commit(one, Create(queued(f"r{number}")))
        one.close()
    last = opened()
    claim(last, "w")
    more = opened()
    assert len(more.list_runs(RunQuery()).runs) == files_index._MOST_SETTLED + 5
    assert len(list((path / "index").iterdir())) <= files_index._MOST_SETTLED + 6


def test_a_long_index_is_begun_anew(path, store, opened, monkeypatch):
    monkeypatch.setattr(files_index, "_LARGEST_LOG", 1000)
    commit(store, Create(queued("r")))
    for _ in range(20):
        commit(store, Send(Signal("r", "x")))
    (before,) = (path / "index").iterdir()
    store.renew_leases(WorkerInfo("w1"))
    (after,) = (path / "index").iterdir()
    assert after.name != before.name
    assert after.stat().st_size < 1000
    assert [run.signals for run in opened().list_runs(RunQuery()).runs] == [20]


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_damaged_run_is_named_and_stops_no_other(path, store, opened):
    some_runs(store)
    entries(path, "run")[-1].write_text("{")
    other = opened()
    page = other.list_runs(RunQuery())
    assert page.unreadable == ("run",)
    assert [run.id for run in page.runs] == ["due", "parked"]
    with pytest.raises(CheckpointCorrupt, match=r"'run': 000002\.json"):
        other.get_run("run")
    assert claim(other, "w2") == ["due"]
    assert commit(other, Create(queued("run"))).verdict is Verdict.EXISTS


@pytest.mark.parametrize("gone", [1, 3])
def test_a_missing_entry_is_found_before_anything_goes_on(path, store, opened, gone):
    writer = started(store, "r", "dead")
    for _ in range(4):
        writer.write()
    entries(path, "r")[gone - 1].unlink()
    other = opened()
    assert claim(other, "w2") == []
    with pytest.raises(CheckpointCorrupt, match=f"00000{gone}"):
        other.list_checkpoints("r")
    assert [(flaw.kind, flaw.mended) for flaw in other.check()] == [("dangling", "")]


def test_an_edited_value_is_found(path, store, opened):
    writer = started(store, "r")
    writer.write(record("r", value=b'"paid 10"'))
    writer.write()
    file = entries(path, "r")[1]
    file.write_text(file.read_text().replace("paid 10", "paid 99"))
    with pytest.raises(CheckpointCorrupt, match="was changed after it was written"):
        opened().list_checkpoints("r")


def test_an_entry_of_another_run_is_not_taken_for_ones_own(path, store, opened):
    for run in ("a", "b"):
        started(store, run)
    shutil.copy(entries(path, "b")[0], entries(path, "a")[0])
    with pytest.raises(CheckpointCorrupt, match="of run 'b'"):
        opened().get_run("a")


def test_an_entry_may_not_name_files_elsewhere(path, store, opened):
    writer = started(store, "r")
    writer.write(record("r", value=b'"' + b"x" * 200_000 + b'"'))
    file = entries(path, "r")[1]
    fields = json.loads(file.read_text())
    del fields["seal"]
    fields["body"] = "../../../keepstep.json"
    file.write_bytes(sealed(fields))
    with pytest.raises(CheckpointCorrupt, match="as a file beside it"):
        opened().list_checkpoints("r")


# -- check -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch):
    """Leftovers count as such at once, not after a minute."""
    monkeypatch.setattr(files_check, "SETTLED_SECONDS", -1.0)


def flaws(store, **options):
    return sorted((flaw.kind, flaw.about.rpartition("/")[2], flaw.mended) for flaw in store.check(**options))


@pytest.mark.usefixtures("at_once")
def test_leftovers_of_a_crash_are_named_and_swept(path, store):
    started(store, "r")
    folder = path / run_folder("r")
    (folder / ".000002.json-dead1.tmp").write_text('{"half')
    (folder / "000002-001-dead2.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    (path / "trash" / "dead3").mkdir()
    (path / "runs" / "00").mkdir(exist_ok=True)
    (path / "runs" / "00" / "never").mkdir()
    named = [
        ("leftover", ".000002.json-dead1.tmp"),
        ("leftover", "dead3"),
        ("leftover", "never"),
        ("orphan", "000002-001-dead2.json"),
        ("orphan", "notes.txt"),
    ]
    assert [flaw[:2] for flaw in flaws(store)] == named
    assert all(flaw[2] for flaw in flaws(store, mend=True))
    assert flaws(store) == []
    assert [one.read_text() for one in sorted((path / "aside").iterdir())] == ["{}", "mine"]
    assert get(store, "r").seq == 1


def test_work_of_this_moment_is_no_flaw(path, store):
    started(store, "r")
    (path / run_folder("r") / ".000002.json-busy1.tmp").write_text('{"half')
    assert store.check(mend=True) == []
    assert (path / run_folder("r") / ".000002.json-busy1.tmp").exists()


def test_leftovers_go_when_a_run_is_taken_over(path, store, opened, clock):
    started(store, "r")
    left = path / run_folder("r") / ".000002.json-dead1.tmp"
    left.write_text('{"half')
    other = opened()
    watch(other, clock, store.lease_seconds * 2, "w2")
    assert claim(other, "w2") == ["r"]
    assert not left.exists()


def test_broken_log_is_reported_and_never_cut_by_itself(path, store, opened):
    writer = started(store, "r")
    for _ in range(3):
        writer.write()
    entries(path, "r")[-1].write_text("{")
    before = {one: one.read_text() for one in entries(path, "r")}
    other = opened()
    assert flaws(other) == flaws(other, mend=True) == [("dangling", "r", "")]
    assert {one: one.read_text() for one in entries(path, "r")} == before
    assert not (path / "aside").exists()
    assert claim(other, "w2") == []
    with pytest.raises(CheckpointCorrupt):
        other.get_run("r")
    assert [row.seq for n in range(3) for row in other.list_checkpoints("r", n, 1)] == [1, 2, 3]
    with pytest.raises(CheckpointCorrupt):
        other.list_checkpoints("r", 3, 1)


def test_a_damaged_beginning_is_a_flaw_of_its_run_alone(path, store, opened):
    some_runs(store)
    file = entries(path, "run")[0]
    file.write_text(file.read_text().replace('"created', '"kreated', 1))
    assert flaws(opened()) == [("dangling", "run", "")]


def test_a_lost_newest_entry_is_noticed(path, store, opened):
    writer = started(store, "r", "dead")
    writer.write()
    writer.write(status=Status.PAUSED)
    entries(path, "r")[-1].unlink()
    for other in (store, opened()):
        assert flaws(other) == flaws(other, mend=True) == [("dangling", "r", "")]
        assert other.list_runs(RunQuery()).unreadable == ("r",)
        assert claim(other, "w2") == []
    with pytest.raises(CheckpointCorrupt, match=r"000003\.json is missing, where it was paused"):
        opened().get_run("r")


def test_entries_that_were_noted_and_are_lost_are_damage(path, store, opened):
    writer = started(store, "r", "dead")
    for _ in range(HINT_EVERY + 1):
        writer.write()
    for one in entries(path, "r")[-4:]:
        one.unlink()
    other = opened(power_loss="loses_nothing")
    assert flaws(other) == flaws(other, mend=True) == [("dangling", "r", "")]
    assert claim(other, "w2") == []
    with pytest.raises(CheckpointCorrupt, match="its log is broken"):
        other.get_run("r")
    epoch = other.salvaged("r").epoch
    assert commit(other, Create(queued("r"), over=epoch - 1)).verdict is Verdict.FENCED
    assert commit(other, Create(queued("r"), over=epoch)).verdict is Verdict.DONE
    assert flaws(opened(power_loss="loses_nothing")) == []
    assert claim(other, "w2") == ["r"]


@pytest.mark.parametrize("name", ["latest", "999999999.json"])
def test_absurdly_large_number_keeps_nobody_waiting(path, store, opened, name):
    writer = started(store, "r")
    writer.write()
    (path / run_folder("r") / name).write_text("160000000\n")
    other = opened(power_loss="loses_nothing")
    with contextlib.nullcontext() if name == "latest" else pytest.raises(CheckpointCorrupt):
        assert get(other, "r").seq == 2
    assert [flaw[0] for flaw in flaws(other)] == ["index" if name == "latest" else "dangling"]
    other.check(mend=True)
    assert len(flaws(other)) == (name != "latest")


def test_gap_in_a_log_is_found_by_a_store_that_saw_the_run(path, store, opened):
    writer = started(store, "r", "dead")
    for _ in range(4):
        writer.write()
    entries(path, "r")[3].unlink()  # a search by doubling steps ends before it
    other = opened()
    other.list_runs(RunQuery())
    with pytest.raises(CheckpointCorrupt, match="000004"):
        other.get_run("r")
    assert claim(other, "w2") == []
    assert len(entries(path, "r")) == 4


def test_folder_of_no_run_is_put_aside(path, store):
    folder = path / "runs" / "00" / "strange"
    folder.mkdir(parents=True)
    (folder / "000001.json").write_text("{")
    assert [flaw[0] for flaw in flaws(store, mend=True)] == ["orphan"]
    assert not folder.exists()
    assert flaws(store) == []


def test_index_that_disagrees_is_reported_and_mended(path, store, opened):
    some_runs(store)
    store.close()
    (file,) = (path / "index").iterdir()
    kept = [line for line in file.read_text().splitlines() if '"run":"due"' not in line]
    ghost = '{"run":"ghost","born":"x","entry":1,"number":1,"queue":"default","status":"queued"}'
    file.write_text("\n".join([*kept, ghost]) + "\n")
    other = opened()
    assert flaws(other) == [("index", "due", ""), ("index", "ghost", "")]
    assert len(flaws(other, mend=True)) == 2
    assert flaws(other) == []
    assert sorted(claim(other, "w2")) == ["due", "run"]


def test_queue_missing_in_an_older_index_is_read_from_the_folder(path, store, opened):
    """Lines of an older version have no queue; a line may come while the store is open."""
    for name in ("there", "comes"):
        commit(store, Create(queued(name, queue="mail", key="k")))
    started(store, "held", "dead", queue="mail")
    store.close()
    (file,) = (path / "index").iterdir()
    old = [line.replace('"queue":"mail","key":"k",', "").replace('"queue":"mail",', "") for line in lines_of(file)]
    assert '"queue"' not in "".join(old)
    late = [line for line in old if '"comes"' in line]
    file.write_text("".join(line for line in old if line not in late))
    other = opened()
    only_mail = ClaimRequest("w2", frozenset({"digest"}), 9, queues=frozenset({"mail"}))
    assert [one.run.id for one in other.claim_runs(only_mail).claims] == ["held", "there"]
    (path / "index" / "late.jsonl").write_text("".join(late))
    assert [one.run.id for one in other.claim_runs(only_mail).claims] == ["comes"]


def lines_of(file):
    return file.read_text().splitlines(keepends=True)


def test_a_run_that_is_half_deleted_is_gone(path, store, opened, monkeypatch):
    commit(store, Create(queued("r")))
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "rename", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StoreUnavailable):
            store.delete_runs(["r"])
    other = opened()
    assert other.get_run("r") is None
    assert claim(other, "w2") == []
    assert commit(other, Send(Signal("r", "x"))).verdict is Verdict.NOT_FOUND
    assert commit(other, Create(queued("r", input=b"2"))).verdict is Verdict.DONE
    assert (get(other, "r").input, get(other, "r").seq) == (b"2", 0)


def test_an_outcome_is_found_at_once(store, monkeypatch):
    writer = started(store, "r")
    for _ in range(50):
        writer.write()
    writer.write(record("r", Kind.RUN_FINISHED, b"7"), status=Status.COMPLETED, release=True)
    reads = []
    real = Disk.read
    monkeypatch.setattr(Disk, "read", lambda self, path: reads.append(path) or real(self, path))
    assert get(store, "r").output == b"7"
    assert len(reads) <= 2


@pytest.mark.parametrize("seed", range(12))
def test_two_processes_list_the_same_runs_once_after_any_change(tmp_path, seed):
    """Runs that are created, replaced, removed and created again, by two stores that are opened and closed."""
    draw, clock = random.Random(seed), SteppedClock()

    def opened():
        return FilesStore(tmp_path / "runs", clock=clock, power_loss="may_lose_last")

    stores = [opened(), opened()]

    def replaced(store, run):
        there = store.get_run(run)
        if there is not None and there.worker is None:
            commit(store, Create(queued(run, epoch=there.epoch), over=there.epoch))

    def driven(store, _):
        claims = store.claim_runs(ClaimRequest(f"w{stores.index(store)}", frozenset({"digest"})))
        for claim in claims.claims:
            status = draw.choice([Status.QUEUED, Status.COMPLETED, Status.SET_ASIDE])
            Holder(store, claim.run).write(status=status, release=True)

    def reopened(store, _):
        place = stores.index(store)
        store.close()
        stores[place] = opened()

    acts = [
        lambda store, run: commit(store, Create(queued(run))),
        lambda store, run: commit(store, Send(Signal(run, "x"))),
        lambda store, run: store.delete_runs([run]),
        replaced,
        driven,
        reopened,
    ]
    for _ in range(40):
        draw.choice(acts)(draw.choice(stores), draw.choice(["r", "r~2", "a", "b"]))
        first, second = ([run.id for run in store.list_runs(RunQuery()).runs] for store in stores)
        assert first == second
        assert len(set(first)) == len(first)
    for store in stores:
        store.close()


KILLED = """
import sys, os, signal
from keepstep.ports import Create
from keepstep.stores.files.store import FilesStore
from keepstep.testing.store_contract import commit, queued
store = FilesStore(sys.argv[1])
store._index.note = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "removes":
    store.delete_runs(["here"])
else:
    commit(store, Create(queued("new")))
"""


@pytest.mark.parametrize("does, left", [("removes", ["other"]), ("creates", ["new", "other", "here"])])
def test_work_of_a_killed_process_is_seen_by_every_next_reader(path, does, left):
    """And by all after them, in whatever order they read the files of the index."""
    store = FilesStore(path)
    for run in ("here", "other"):
        commit(store, Create(queued(run)))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), does], env=env, check=False, timeout=90)
    assert done.returncode == -signal.SIGKILL
    for _ in range(4):
        other = FilesStore(path)
        assert [run.id for run in other.list_runs(RunQuery()).runs] == left
        assert other.check() == []
        other.close()
    assert [run.id for run in store.list_runs(RunQuery()).runs] == left
    store.close()


def test_a_writer_that_was_not_the_first_gets_its_turn(opened, monkeypatch):
    """What takes long to write would be too late each time, if others did not let it pass then."""
    monkeypatch.setattr(files_log, "_TURN_SECONDS", 10.0)
    settled = threading.Event()  # the rival has written, or it waits
    tries, rivals = [], []

    class Polite(Disk):
        def is_someones_turn(self, path):
            taken = super().is_someones_turn(path)
            if taken:
                settled.set()
            return taken

    class Crowded(Disk):
        def link(self, old, new):
            if run_folder("r") in new and len(rivals) < 20:
                tries.append(new)
                settled.clear()
                rivals.append(threading.Thread(target=send, args=(len(rivals),)))
                rivals[-1].start()
                assert settled.wait(60)
            super().link(old, new)

    def send(number):
        commit(other, Send(Signal("r", "go", id=str(number))))
        settled.set()

    other = opened(disk=Polite(syncs=False))
    commit(other, Create(queued("r")))
    store = opened(disk=Crowded(syncs=False))
    assert commit(store, Send(Signal("r", "long"))).verdict is Verdict.DONE
    for rival in rivals:
        rival.join(60)
    assert len(tries) == 2
    assert [signal.name for signal in store.list_signals("r")] == ["go", "long", "go"]


def test_writer_that_keeps_the_turn_too_long_is_not_waited_for(opened, path):
    store = opened()
    commit(store, Create(queued("r")))
    disk = Disk()
    stopped = disk.take_turn(str(path / run_folder("r")))
    assert disk.take_turn(str(path / run_folder("r"))) is None
    assert commit(store, Send(Signal("r", "go"))).verdict is Verdict.DONE
    disk.end_turn(stopped)
    assert not disk.is_someones_turn(str(path / run_folder("r")))


# -- erasing beside others ---------------------------------------------------------------------------------------------


def everywhere(folder) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_an_erased_run_is_in_no_index_of_another_process_that_looks(tmp_path):
    folder = tmp_path / "runs"
    other, eraser = FilesStore(folder), FilesStore(folder)
    commit(other, Create(queued("visit-ann", tags={"patient": "AnnSmith"}, status=Status.CANCELLED, due_at=None)))
    commit(other, Create(queued("stays")))
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            other.news("", 0)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert eraser.delete_runs(["visit-ann"], finished=True, scrub=True) == 1
    finally:
        ended.set()
        thread.join()
    assert b"AnnSmith" not in everywhere(folder)
    assert b"visit-ann" not in everywhere(folder)
    for store in (other, eraser):
        assert [run.id for run in store.list_runs(RunQuery()).runs] == ["stays"]
        store.close()


def test_an_erase_names_the_index_of_a_process_that_does_not_look(tmp_path, monkeypatch):
    monkeypatch.setattr(files_index, "_SCRUB_SECONDS", 0.05)
    folder = tmp_path / "runs"
    other, eraser = FilesStore(folder), FilesStore(folder)
    commit(other, Create(queued("visit-ann", tags={"patient": "AnnSmith"}, status=Status.CANCELLED, due_at=None)))
    with pytest.raises(StoreUnavailable, match=r"may be left in .*\.jsonl\. End them and erase again"):
        eraser.delete_runs(["visit-ann"], finished=True, scrub=True)
    other.close()
    eraser.delete_runs(["visit-ann"], finished=True, scrub=True)
    eraser.close()
    assert b"AnnSmith" not in everywhere(folder)
    assert b"visit-ann" not in everywhere(folder)
