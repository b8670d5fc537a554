"""Documents against a model, from several processes at once, damaged, encrypted, and after a crash at every write."""

from __future__ import annotations

import contextlib
import io
import itertools
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.care.archive import reading, writing
from keepstep.care.copying import copy_runs
from keepstep.care.transfer import check_archive, export_runs, import_runs
from keepstep.care.verify import verify
from keepstep.errors import CheckpointCorrupt, DefinitionError, EncryptionError
from keepstep.model import Status
from keepstep.ports import Create, DocumentQuery, Put, Verdict
from keepstep.records.keys import Keys
from keepstep.stores.documents import prefix_end
from keepstep.stores.encrypted import KEYS_COLLECTION, EncryptedStore
from keepstep.stores.files.disk import Disk
from keepstep.stores.files.store import FilesStore
from keepstep.stores.memory import MemoryStore
from keepstep.stores.open import open_store
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import SteppedClock, at, queued
from tests.nightly import cases
from tests.postgres import empty_store

KEYS = ["a", "b", "a/b"]

# -- a model -----------------------------------------------------------------------------------------------------------

puts = st.builds(
    Put,
    st.sampled_from(["c", "d"]),
    st.sampled_from(KEYS),
    st.one_of(st.none(), st.binary(max_size=3)),
    expect=st.one_of(st.none(), st.integers(0, 3)),
    writer=st.sampled_from(["", "", "w1", "w2"]),
    keep=st.integers(1, 3),
    expires_at=st.one_of(st.none(), st.just(at(2))),
)
transactions = st.lists(st.lists(st.lists(puts, min_size=1, max_size=3), min_size=1, max_size=3), max_size=6)


class Model:
    """Documents as a dictionary of lists, each put by itself."""

    def __init__(self):
        self.kept = {}
        self.now = 0

    def put(self, put, kept):
        versions = kept.get((put.collection, put.key), [])
        live = [one for one in versions if one[3] is None or one[3] > self.now]
        if put.writer and put.value is not None:
            for version, _, writer, expires in reversed(versions[-put.keep :]):
                if writer == put.writer and (expires is None or expires > self.now):
                    return version
        newest = versions[-1][0] if versions else 0
        current = newest if versions and versions[-1] in live else 0
        if put.expect is not None and put.expect != current:
            return None
        if put.value is None:
            kept[put.collection, put.key] = []
            return 0
        expires = None if put.expires_at is None else 2
        written = [*versions, (newest + 1, put.value, put.writer, expires)]
        kept[put.collection, put.key] = [one for one in written if one[0] > newest + 1 - put.keep]
        return newest + 1

    def write(self, batch):
        kept = dict(self.kept)
        versions = []
        for put in batch:
            version = self.put(put, kept)
            if version is None:
                return None
            versions.append(version)
        self.kept = kept
        return tuple(versions)

    def all(self):
        return {
            (*name, version): value
            for name, versions in self.kept.items()
            for version, value, _, expires in versions
            if expires is None or expires > self.now
        }


def opened(kind, path, clock):
    if kind == "sqlite":
        return SQLiteStore(path / "runs.db", clock=clock, power_loss="may_lose_last")
    if kind == "files":
        return FilesStore(path / "files", clock=clock, power_loss="may_lose_last")
    return MemoryStore(clock=clock)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "files"])
def test_documents_follow_the_model(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    clock = SteppedClock()
    store = opened(kind, path, clock)

    @settings(max_examples=40, deadline=None)
    @given(transactions)
    def follow(written):
        for collection in store.list_collections():
            store.remove_documents(collection)
        clock.seconds = 0.0
        model = Model()
        for batches in written:
            answers = store.write_documents(batches)
            for batch, answer in zip(batches, answers, strict=True):
                expected = model.write(batch)
                assert (answer.verdict is Verdict.DONE) == (expected is not None)
                assert expected is None or answer.versions == expected
            found = {
                (one.collection, one.key, one.version): one.value
                for collection in ("c", "d")
                for one in store.list_documents(DocumentQuery(collection, all_versions=True))
            }
            assert found == model.all()
            clock.advance(1)
            model.now += 1

    follow()
    store.close()


@given(st.text(max_size=4), st.text(max_size=6))
def test_range_of_a_prefix_holds_what_begins_with_it(prefix, text):
    end = prefix_end(prefix)
    in_range = text >= prefix and (not end or text < end)
    assert in_range == text.startswith(prefix)


# -- several processes -------------------------------------------------------------------------------------------------

RACER = """
import sys
from keepstep.ports import DocumentQuery, Put, Verdict
from keepstep.stores.open import open_store
store, count = open_store(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
done = 0
while done < count:
    found = store.list_documents(DocumentQuery("race", keys=("counter",)))
    version, number = (found[0].version, int(found[0].value)) if found else (0, 0)
    put = Put("race", "counter", b"%d" % (number + 1), expect=version)
    other = Put("race", f"done-{number + 1}", b"", expect=0)
    (answer,) = store.write_documents([[put, other]])
    done += answer.verdict is Verdict.DONE
store.close()
"""


@pytest.mark.parametrize("kind", cases(["sqlite", "files", "postgres"], quick=["sqlite", "postgres"]))
def test_processes_never_lose_an_expected_version(kind, tmp_path):
    local = f"sqlite:///{tmp_path}/runs.db" if kind == "sqlite" else f"files:{tmp_path}/files"
    with empty_store("documents") if kind == "postgres" else contextlib.nullcontext(local) as url:
        store = open_store(url)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        racers = [subprocess.Popen([sys.executable, "-c", RACER, url, "20"], **pipes) for _ in range(3)]
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        for racer in racers:
            racer.communicate(timeout=60)
            assert racer.returncode == 0
        (counter,) = store.list_documents(DocumentQuery("race", keys=("counter",)))
        assert (counter.value, counter.version) == (b"60", 60)
        assert len(store.list_documents(DocumentQuery("race", prefix="done-"))) == 60
        store.close()


# -- damage ------------------------------------------------------------------------------------------------------------

COLUMNS = {"value": b"x", "at": 1.5, "writer": "x", "owner": "x", "expires_at": 9e9, "version": 7, "checksum": "x"}


@pytest.mark.parametrize("column", sorted(COLUMNS))
def test_damaged_document_is_reported_and_never_returned(column, tmp_path):
    store = SQLiteStore(tmp_path / "runs.db")
    store.write_documents([[Put("c", "good", b"1"), Put("c", "k", b"value")]])
    database = apsw.Connection(str(tmp_path / "runs.db"))
    database.execute(f"UPDATE keepstep_document SET {column} = ? WHERE key = 'k'", (COLUMNS[column],)).fetchall()
    with pytest.raises(CheckpointCorrupt, match="document 'k' of collection 'c'"):
        store.list_documents(DocumentQuery("c", keys=("k",)))
    with pytest.raises(CheckpointCorrupt, match="document 'k' of collection 'c'"):
        store.list_documents(DocumentQuery("c"))
    found = verify(store)
    assert [(flaw.kind, flaw.about) for flaw in found.flaws] == [("document", "c/k")]
    assert (found.documents.total, found.documents.valid, found.documents.invalid) == (2, 1, 1)
    assert not found.sound
    store.remove_documents("c", "k")
    assert verify(store).sound
    store.close()


def test_damaged_file_of_a_document_is_reported_and_never_returned(tmp_path):
    store = FilesStore(tmp_path / "files")
    store.write_documents([[Put("c", "good", b"1"), Put("c", "k", b"value")]])
    (file,) = (tmp_path / "files" / "documents" / "c" / "k").iterdir()
    file.write_bytes(file.read_bytes().replace(b"value", b"VALUE"))
    with pytest.raises(CheckpointCorrupt, match="document 'k' of collection 'c'"):
        store.list_documents(DocumentQuery("c"))
    assert [flaw.about for flaw in verify(store).flaws] == ["c/k"]
    file.write_bytes(b"nonsense")
    with pytest.raises(CheckpointCorrupt):
        store.list_documents(DocumentQuery("c"))
    store.close()


def test_no_document_leaves_the_folder_of_its_store(tmp_path):
    (tmp_path / "in").mkdir()
    store = FilesStore(tmp_path / "in" / "files")
    keys = ["..", "../../out", "/etc/x", "a/../../b", ".", ".plan", ".owners", "%2e%2e", "~", "a" * 500]
    store.write_documents([[Put("c", key, b"1", owner="o"), Put("a..b", key, b"1")] for key in keys])
    assert sorted(one.key for one in store.list_documents(DocumentQuery("c"))) == sorted(keys)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["files"]
    store.close()


def test_plan_of_a_process_that_ended_is_carried_out(tmp_path, monkeypatch):
    store = FilesStore(tmp_path / "files")
    store.write_documents([[Put("c", "a", b"1")]])
    documents = store._documents
    monkeypatch.setattr(documents, "_finish_plan", lambda: None)
    store.write_documents([[Put("c", "a", None), Put("c", "b", b"1"), Put("d", "c", b"1")]])
    monkeypatch.undo()
    other = FilesStore(tmp_path / "files")
    assert [one.key for one in other.list_documents(DocumentQuery("c"))] == ["b"]
    assert other.list_collections() == {"c": 1, "d": 1}
    assert not (tmp_path / "files" / "documents" / ".plan").exists()


class Killed(BaseException):
    """The process is dead: nothing that it does reaches the disk any more."""


class MortalDisk(Disk):
    """A disk whose process dies before a call of this number."""

    def __init__(self, left):
        super().__init__(syncs=False)
        self.left = left

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in ("write", "rename", "unlink", "make_folder", "remove_empty", "open_new"):
            return found
        self.left -= 1
        if self.left <= 0:
            raise Killed
        return found


BEFORE = [Put("c", "stays", b"1"), Put("c", "goes", b"1"), Put("c", "changes", b"old")]
CHANGE = [
    Put("c", "goes", None),
    Put("c", "changes", b"new"),
    Put("d", "new", b"x", owner="run"),
    Put("c", "more", b""),
]


def test_transaction_over_several_files_is_whole_after_a_crash_at_every_call(tmp_path):
    def values(store):
        return {
            (one.collection, one.key): one.value for name in "cd" for one in store.list_documents(DocumentQuery(name))
        }

    old = {("c", "stays"): b"1", ("c", "goes"): b"1", ("c", "changes"): b"old"}
    new = {("c", "stays"): b"1", ("c", "changes"): b"new", ("d", "new"): b"x", ("c", "more"): b""}
    found = []
    for number in itertools.count(1):
        path = tmp_path / str(number)
        FilesStore(path).write_documents([BEFORE])
        store = FilesStore(path, disk=MortalDisk(10**9))
        disk = store._disk
        disk.left = number
        try:
            store.write_documents([CHANGE])
        except Killed:
            disk.left = 10**9
        else:
            break
        after = values(FilesStore(path))
        assert after in (old, new), number
        found.append(after == new)
    assert found == sorted(found)
    assert {*found} == {False, True}
    assert len(found) > 10


# -- encryption --------------------------------------------------------------------------------------------------------

OLD, NEW = bytes(range(32)), bytes(range(32, 64))


def test_documents_are_encrypted_and_their_keys_rewrapped(tmp_path):
    plain = SQLiteStore(tmp_path / "runs.db")
    store = EncryptedStore(plain, Keys("old", {"old": OLD}))
    store.write_documents([[Put("c", "k", b"a secret", keep=2)], [Put("c", "empty", b"")]])
    assert [one.value for one in store.list_documents(DocumentQuery("c"))] == [b"", b"a secret"]
    assert all(b"secret" not in one.value for one in plain.list_documents(DocumentQuery("c")))
    both = EncryptedStore(plain, Keys("new", {"old": OLD, "new": NEW}))
    rekeyed, _ = both.rekey()
    assert rekeyed.changed == 1
    assert both.rekey()[0].changed == 0
    later = EncryptedStore(plain, Keys("new", {"new": NEW}))
    assert [one.value for one in later.list_documents(DocumentQuery("c"))] == [b"", b"a secret"]
    later.write_documents([[Put("c", "more", b"2")]])
    assert plain.list_collections() == {"c": 3, KEYS_COLLECTION: 1}
    with pytest.raises(EncryptionError):
        EncryptedStore(plain, Keys("old", {"old": OLD})).list_documents(DocumentQuery("c"))
    plain.close()


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"expires_at": datetime.max.replace(tzinfo=UTC)}, "end of the calendar"),
        ({"at": datetime.max.replace(tzinfo=UTC), "version": 1}, "end of the calendar"),
        ({"version": 1.5}, "whole number"),
        ({"keep": 2**70}, "keep="),
        ({"writer": None}, "writer="),
    ],
)
def test_put_that_could_not_be_read_again_is_refused(fields, match):
    """Such a version would make every list of its collection fail."""
    with pytest.raises(DefinitionError, match=match):
        MemoryStore().write_documents([[Put("c", "k", b"v", **fields)]])


def test_ciphertext_of_another_document_is_refused(tmp_path):
    plain = SQLiteStore(tmp_path / "runs.db")
    store = EncryptedStore(plain, Keys("k", {"k": OLD}))
    store.write_documents([[Put("c", "a", b"a"), Put("c", "b", b"b")]])
    first, second = plain.list_documents(DocumentQuery("c"))
    plain.write_documents([[Put("c", "a", second.value)]])
    with pytest.raises(CheckpointCorrupt):
        store.list_documents(DocumentQuery("c", keys=("a",)))
    plain.write_documents([[Put("c", "a", b"plain")]])
    with pytest.raises(EncryptionError, match="plaintext=True"):
        store.list_documents(DocumentQuery("c", keys=("a",)))
    admitting = EncryptedStore(plain, Keys("k", {"k": OLD}, plaintext=True))
    assert [one.value for one in admitting.list_documents(DocumentQuery("c"))] == [b"plain", b"b"]
    assert first.key == "a"
    plain.close()


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "files", "memory"])
def test_copy_takes_documents_along(kind, tmp_path):
    clock = SteppedClock()
    source = SQLiteStore(tmp_path / "source.db", clock=clock)
    end = at(0) + timedelta(days=1)
    for number in range(3):
        source.write_documents([[Put("c", "k", b"%d" % number, keep=2, writer=f"w{number}", expires_at=end)]])
        clock.advance(1)
    source.write_documents([[Put("d", "k", b"x")]])
    target = opened(kind, tmp_path, clock)
    done = copy_runs(source, target, actor="test")
    assert (done.documents, done.whole) == (3, True)
    query = DocumentQuery("c", all_versions=True)
    assert target.list_documents(query) == source.list_documents(query)
    assert copy_runs(source, target, actor="test").whole
    target.write_documents([[Put("c", "k", b"newer", keep=9)]])
    assert copy_runs(source, target, actor="test").whole
    clock.advance(1)
    target.write_documents([[Put("d", "k", None), Put("d", "k", b"other")]])
    done = copy_runs(source, target, actor="test")
    assert list(done.conflicts) == ["document d/k"]
    source.close()
    target.close()


def test_archive_takes_documents_along(tmp_path):
    source, target = SQLiteStore(tmp_path / "source.db"), SQLiteStore(tmp_path / "target.db")
    values = [b"", b"{}", b"\x00\xff", b"two\nlines", b"[1, 2]"]
    for number, value in enumerate(values):
        source.write_documents([[Put("c", f"k{number}", value, keep=2, writer="w", expires_at=at(9e8))]])
        source.write_documents([[Put("c", f"k{number}", value, keep=2)]])
    packed = tmp_path / "all.jsonl"
    with writing(str(packed)) as file:
        assert export_runs(source, file).documents == 10
    with reading(str(packed)) as file:
        assert check_archive(file, "all.jsonl") == 0
    for _ in range(2):
        with reading(str(packed)) as file:
            done = import_runs(target, file, "all.jsonl", actor="test")
        assert (done.documents, done.whole) == (10, True)
    query = DocumentQuery("c", all_versions=True)
    assert target.list_documents(query) == source.list_documents(query)
    changed = packed.read_bytes().replace(b'"value":{}', b'"value":[]', 1)
    with pytest.raises(CheckpointCorrupt, match="its line was changed"):
        check_archive(io.BytesIO(changed), "all.jsonl")
    cut = b"".join(line for line in packed.read_bytes().splitlines(keepends=True) if b"k3" not in line)
    with pytest.raises(CheckpointCorrupt, match="10 documents, and 8 were found"):
        check_archive(io.BytesIO(cut), "all.jsonl")
    source.close()
    target.close()


def test_archive_of_one_run_has_its_documents_only(tmp_path):
    store = SQLiteStore(tmp_path / "runs.db")
    for run in ("mine", "other"):
        store.commit([Create(queued(run, status=Status.COMPLETED, due_at=None))])
        store.write_documents([[Put("c", run, b"1", owner=run)]])
    store.write_documents([[Put("c", "free", b"1")]])
    out = io.BytesIO()
    assert export_runs(store, out, ["mine"]).documents == 1
    assert (b'"key":"mine"' in out.getvalue(), b'"key":"free"' in out.getvalue()) == (True, False)
    store.close()
