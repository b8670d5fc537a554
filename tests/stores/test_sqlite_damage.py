"""A SQLite store on bad days: a full disk, a file that cannot be written, a torn or damaged file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import apsw
import pytest

import keepstep
from keepstep.errors import CheckpointCorrupt, SchemaMismatch, StoreError, StoreFull, StoreUnavailable
from keepstep.model import WorkerInfo
from keepstep.ports import Create, Verdict
from keepstep.records.record import unseal
from keepstep.stores.sqlite.connection import translated
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import SteppedClock, commit, everything, get, queued, record, started


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


def opened(path):
    store = SQLiteStore(path, clock=SteppedClock())
    store.renew_leases(WorkerInfo("w1"))
    return store


# -- no room -----------------------------------------------------------------------------------------------------------


def write_until_full(writer, value):
    for _ in range(1000):
        answer = writer.write(record("r", value=value), creates=[Create(queued(f"child{writer.seq}"))])
        assert answer.verdict is Verdict.DONE


def test_full_store_keeps_what_it_has_and_goes_on_with_room(path):
    store = opened(path)
    connection = store._writer.connection
    writer = started(store, "r")
    connection.pragma("max_page_count", connection.pragma("page_count") + 20)
    big = b'"' + os.urandom(30_000).hex().encode() + b'"'
    with pytest.raises(StoreFull) as caught:
        write_until_full(writer, big)
    assert caught.value.unknown is False
    assert not connection.in_transaction
    assert get(store, "r").seq == writer.seq
    assert store.get_run(f"child{writer.seq}") is None
    connection.pragma("max_page_count", 1_000_000)
    assert writer.write(record("r", value=big)).verdict is Verdict.DONE
    assert len(list(unseal(store.list_checkpoints("r"), "r", previous=""))) == writer.seq
    store.close()


def test_full_disk_raises_store_full(tmp_path):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can make a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], check=False).returncode != 0:
        pytest.skip("no small disk can be mounted here")
    try:
        store = opened(disk / "runs.db")
        writer = started(store, "r")
        with pytest.raises(StoreFull):
            write_until_full(writer, b'"' + b"x" * 5000 + b'"')
        assert get(store, "r").seq == writer.seq
        assert len(list(unseal(store.list_checkpoints("r"), "r", previous=""))) == writer.seq
        store.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# -- no right to write -------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_reported(tmp_path):
    """By a process that is not root, because nothing is forbidden to root."""
    folder = Path(tempfile.mkdtemp(prefix="keepstep-"))
    path = folder / "runs.db"
    store = opened(path)
    started(store, "r")
    program = """
        import os, sys
        from keepstep.errors import StoreUnavailable
        from keepstep.stores.sqlite.store import SQLiteStore
        from keepstep.testing.store_contract import queued, commit
        from keepstep.ports import Create
        SQLiteStore(sys.argv[2]).close()  # so that everything it needs is loaded
        if os.geteuid() == 0:
            os.setgid(65534), os.setuid(65534)
        store = SQLiteStore(sys.argv[1])
        try:
            commit(store, Create(queued("s")))
        except StoreUnavailable as error:
            print("refused", error.unknown, store.get_run("r").status)
    """
    try:
        path.chmod(0o444)
        for name in ("runs.db-wal", "runs.db-turnstile", "runs.db-turnstile-next"):
            (folder / name).chmod(0o444)
        (folder / "runs.db-shm").chmod(0o666)
        folder.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), str(path), str(tmp_path / "other.db")],
            env={**os.environ, "PYTHONPATH": str(Path(keepstep.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == ["refused", "False", "running"], done.stderr
        assert store.get_run("s") is None
    finally:
        folder.chmod(0o755)
        store.close()
        shutil.rmtree(folder)


# -- what SQLite's errors mean -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, meaning, unknown",
    [
        (apsw.FullError("full"), StoreFull, False),
        (apsw.IOError("disk"), StoreUnavailable, True),
        (apsw.BusyError("busy"), StoreUnavailable, False),
        (apsw.ReadOnlyError("read only"), StoreUnavailable, False),
        (apsw.CantOpenError("open"), StoreUnavailable, False),
        (apsw.CorruptError("bad"), CheckpointCorrupt, None),
        (apsw.NotADBError("bad"), CheckpointCorrupt, None),
        (apsw.SQLError("what"), StoreError, None),
    ],
)
def test_every_error_of_sqlite_has_a_meaning(error, meaning, unknown):
    found = translated(error, "runs.db", committing=True)
    assert type(found) is meaning
    assert getattr(found, "unknown", None) is unknown
    assert getattr(translated(error, "runs.db"), "unknown", False) is False


def test_commit_whose_end_is_uncertain_is_reported_as_unknown(path):
    store = opened(path)
    real = store._writer.cursor

    class Failing:
        def execute(self, sql, *values):
            if sql == "COMMIT":
                raise apsw.IOError("fsync")
            return real.execute(sql, *values)

    store._writer.cursor = Failing()
    with pytest.raises(StoreUnavailable) as caught:
        commit(store, Create(queued("r")))
    assert caught.value.unknown is True
    store._writer.cursor = real
    assert not store._writer.connection.in_transaction
    assert commit(store, Create(queued("s"))).verdict is Verdict.DONE
    store.close()


# -- torn and damaged files --------------------------------------------------------------------------------------------


def copied(path, folder):
    """The files as a crash leaves them: the store is still open."""
    folder.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", folder / f"runs.db{suffix}")
    return folder / "runs.db"


def test_a_torn_write_ahead_log_loses_only_its_tail(path, tmp_path):
    store = opened(path)
    connection = store._writer.connection
    connection.pragma("wal_checkpoint(TRUNCATE)")
    connection.pragma("wal_autocheckpoint", 0)
    wal = Path(f"{path}-wal")
    writer = started(store, "r")
    ends = [wal.stat().st_size]
    for n in range(12):
        assert writer.write(record("r", value=b'"%d"' % n), creates=[Create(queued(f"child{n}"))]).verdict == "done"
        ends.append(wal.stat().st_size)
    whole = store.list_checkpoints("r")
    for number, cut in enumerate([*ends, *(end - 7 for end in ends[1:]), *(end - 5000 for end in ends[1:]), 40, 0]):
        copy = copied(path, tmp_path / f"copy{number}")
        os.truncate(f"{copy}-wal", cut)
        again = SQLiteStore(copy, clock=SteppedClock())
        expected = sum(end <= cut for end in ends)
        rows = again.list_checkpoints("r")
        assert rows == whole[:expected]
        if expected:
            head = get(again, "r")
            assert head.seq == expected
            *_, (_, checksum) = unseal(again.list_checkpoints("r"), "r", previous="")
            assert checksum == head.checksum
            assert [again.get_run(f"child{n}") is not None for n in range(12)] == [n + 1 < expected for n in range(12)]
        assert commit(again, Create(queued("new"))).verdict is Verdict.DONE
        again.close()
    store.close()


def test_damaged_page_never_gives_a_wrong_result(path, tmp_path):
    store = opened(path)
    for name in ("r", "s"):
        writer = started(store, name)
        for n in range(60):
            writer.write(record(name, value=b'"%d%s"' % (n, b"x" * 200)))
    right = {name: store.list_checkpoints(name) for name in ("r", "s")}
    heads = {name: get(store, name) for name in ("r", "s")}
    store.close()
    size = path.stat().st_size
    errors = found = 0
    for page in range(1, size // 4096):
        for fill in (bytes(4096), b"\xff" * 4096, bytes(range(256)) * 16):
            copy = tmp_path / "copy.db"
            shutil.copy(path, copy)
            with copy.open("r+b") as file:
                file.seek(page * 4096)
                file.write(fill)
            for name in ("r", "s"):
                try:
                    damaged = SQLiteStore(copy, clock=SteppedClock())
                except StoreError:
                    errors += 1
                    continue
                try:
                    head = damaged.get_run(name)
                    rows = damaged.list_checkpoints(name)
                    checked = [checksum for _, checksum in unseal(rows, name, previous="")]
                except StoreError:
                    errors += 1
                else:
                    if head is None or head.seq != len(checked) or head.checksum != checked[-1]:
                        found += 1  # the head and the chain contradict each other: the engine sets such a run aside
                    else:
                        assert rows == right[name]
                        assert (head.status, head.epoch, head.worker) == (
                            heads[name].status,
                            heads[name].epoch,
                            heads[name].worker,
                        )
                finally:
                    damaged.close()
    assert errors > 0


def test_a_flipped_byte_in_a_record_is_found(path):
    store = opened(path)
    started(store, "r").write(record("r", value=b'"the truth"'))
    store.close()
    data = path.read_bytes()
    assert data.count(b"the truth") == 1
    path.write_bytes(data.replace(b"the truth", b"the_truth"))
    store = SQLiteStore(path, clock=SteppedClock())
    rows = store.list_checkpoints("r")
    head = get(store, "r")
    assert [checksum for _, checksum in unseal(rows, "r", previous="")][-1] != head.checksum
    store.close()


@pytest.mark.parametrize("contents", [b"not a database, but long enough to have a header" * 30, b"x"])
def test_a_file_that_is_no_database_is_refused_and_left_alone(path, contents):
    path.write_bytes(contents)
    with pytest.raises(SchemaMismatch, match="not a SQLite database"):
        SQLiteStore(path)
    assert path.read_bytes() == contents


def test_a_database_of_another_application_is_refused_and_left_alone(path):
    other = apsw.Connection(str(path))
    other.execute("CREATE TABLE customer (name)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(SchemaMismatch, match=r"another application .*customer"):
        SQLiteStore(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["runs.db"]


def test_an_empty_file_becomes_a_store(path):
    path.touch()
    store = opened(path)
    started(store, "r")
    assert list(everything(store)) == ["r"]
    store.close()
