"""The documents of an engine: from async code, from threads, in one commit for many writers, and with keys."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import keepstep as ks
from keepstep.engine import documents as module
from keepstep.engine.documents import Documents
from keepstep.ports import Put, Verdict
from keepstep.stores.memory import MemoryStore


class Counting(MemoryStore):
    """A store whose commits can be held up and are counted."""

    def __init__(self):
        super().__init__()
        self.sizes = []
        self.begun = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()

    def write_documents(self, batches):
        self.sizes.append(len(batches))
        self.begun.set()
        assert self.may_go.wait(10)
        return super().write_documents(batches)


def held(store):
    """A first write that stands still in the store, so that others have to wait."""
    documents = Documents(store)
    store.may_go.clear()
    thread = threading.Thread(target=documents.blocking.put, args=("c", "first", b"1"))
    thread.start()
    assert store.begun.wait(10)
    return documents, thread


def waiting(documents, count):
    """Wait until so many batches stand in the queue."""
    while len(documents._group._queue) < count:
        threading.Event().wait(0.001)


def gone(documents):
    """Wait until there are no documents."""
    while documents.blocking.collections():
        threading.Event().wait(0.005)


def test_writes_of_threads_that_come_during_a_commit_share_the_next():
    store = Counting()
    documents, thread = held(store)
    with ThreadPoolExecutor(20) as pool:
        found = [pool.submit(documents.blocking.put, "c", "counter", b"1", keep=5) for _ in range(20)]
        waiting(documents, 20)
        store.may_go.set()
        assert sorted(one.result(10) for one in found) == list(range(1, 21))
    thread.join(10)
    assert store.sizes == [1, 20]


async def test_writes_of_tasks_and_threads_share_commits():
    store = Counting()
    documents, thread = held(store)
    with ThreadPoolExecutor(5) as pool:
        blocking = [pool.submit(documents.blocking.put, "c", f"b{number}", b"1") for number in range(5)]
        tasks = [asyncio.ensure_future(documents.put("c", f"a{number}", b"1")) for number in range(5)]
        await asyncio.sleep(0)
        await asyncio.to_thread(waiting, documents, 10)
        store.may_go.set()
        assert await asyncio.gather(*tasks) == [1] * 5
        assert [one.result(10) for one in blocking] == [1] * 5
    thread.join(10)
    assert store.sizes == [1, 10]
    documents.close()


async def test_patient_writes_share_the_commit_of_the_next():
    store = Counting()
    documents = Documents(store)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(documents.blocking.write, Put("c", "blocking", b"1"), patience_seconds=60)
        await asyncio.to_thread(waiting, documents, 1)
        task = asyncio.ensure_future(documents.write(Put("c", "async", b"1"), patience_seconds=60))
        await asyncio.to_thread(waiting, documents, 2)
        assert store.sizes == []
        await documents.put("c", "hasty", b"1")
        assert patient.result(10).verdict is (await task).verdict is Verdict.DONE
    assert store.sizes == [3]
    documents.close()


async def test_patient_writes_are_committed_when_no_other_comes():
    documents = Documents(MemoryStore())
    assert documents.blocking.write(Put("c", "blocking", b"1"), patience_seconds=0.001).versions == (1,)
    assert (await documents.write(Put("c", "async", b"1"), patience_seconds=0.001)).versions == (1,)
    documents.close()


async def test_many_writers_lose_nothing():
    documents = Documents(MemoryStore())

    async def count(name):
        for number in range(20):
            await documents.write(Put("c", name, b"1", keep=3), patience_seconds=number % 3 / 10_000)

    def count_in_thread(name):
        for number in range(20):
            documents.blocking.write(Put("c", name, b"1", keep=3), patience_seconds=number % 3 / 10_000)

    threads = [asyncio.to_thread(count_in_thread, "k") for _ in range(4)]
    await asyncio.gather(*(count("k") for _ in range(8)), *threads)
    assert (await documents.get("c", "k")).version == 12 * 20
    documents.close()


async def test_error_of_a_commit_reaches_every_writer_and_the_next_write_succeeds(monkeypatch):
    store = MemoryStore()
    documents = Documents(store)

    def fail(batches):
        raise ks.StoreUnavailable("gone")

    good = documents._group._write
    monkeypatch.setattr(documents._group, "_write", fail)
    results = await asyncio.gather(
        *(documents.put("c", "k", b"1") for _ in range(3)),
        asyncio.to_thread(documents.blocking.put, "c", "k", b"1"),
        return_exceptions=True,
    )
    assert [type(one) for one in results] == [ks.StoreUnavailable] * 4
    documents._group._write = good
    assert await documents.put("c", "k", b"1") == 1
    documents.close()


def test_loop_that_is_closed_before_the_answer_keeps_nobody_waiting():
    store = Counting()
    documents, thread = held(store)

    async def leave():
        writing = asyncio.ensure_future(documents.put("c", "left", b"1"))
        await asyncio.to_thread(waiting, documents, 1)
        writing.cancel()

    asyncio.run(leave())
    store.may_go.set()
    thread.join(10)
    assert documents.blocking.put("c", "after", b"1") == 1
    assert [one.key for one in documents.blocking.list("c")] == ["after", "first", "left"]
    documents.close()


async def test_conflict_names_the_version_that_is_there():
    documents = Documents(MemoryStore())
    await documents.put("c", "k", b"1", expect=0)
    with pytest.raises(ks.errors.DocumentConflict, match="has version 1, and expect= is 0") as caught:
        await documents.put("c", "k", b"2", expect=0)
    assert caught.value.version == 1
    refused = await documents.write(Put("c", "new", b"1"), Put("c", "k", b"2", expect=7))
    assert (refused.verdict, refused.about, await documents.get("c", "new")) == (Verdict.CONFLICT, 1, None)
    documents.close()


async def test_list_goes_through_all_pages(tmp_path):
    with Documents.open(tmp_path / "runs.db") as documents:
        await documents.write(*(Put("c", f"{number:05}", b"x" * 2000) for number in range(2500)))
        keys = [f"{number:05}" for number in range(2500)]
        assert [one.key for one in await documents.list("c")] == keys
        assert [one.key for one in documents.blocking.list("c", reverse=True)] == keys[::-1]
        assert [one.key for one in await documents.list("c", limit=1500, after="00999")] == keys[1000:2500]
        assert await documents.collections() == {"c": 2500}
        assert await documents.remove("c", "001") == 100


async def test_engine_has_the_documents_of_its_store(tmp_path):
    async with ks.open(tmp_path / "runs.db") as engine:
        assert await engine.documents.put("c", "k", b"1") == 1
    with ks.open(tmp_path / "runs.db") as engine:
        assert engine.documents.get("c", "k").value == b"1"
    with Documents.open(f"sqlite:///{tmp_path}/runs.db") as documents:
        assert documents.blocking.get("c", "k").value == b"1"


async def test_encrypted_documents_need_the_keys(tmp_path):
    keys = ks.Keys("k", {"k": bytes(32)})
    with Documents.open(tmp_path / "runs.db", keys=keys) as documents:
        await documents.put("c", "k", b"secret")
        assert (await documents.get("c", "k")).value == b"secret"
    with pytest.raises(ks.errors.EncryptionError, match="not set"), Documents.open(tmp_path / "runs.db") as documents:
        await documents.get("c", "k")
    with pytest.raises(ks.errors.EncryptionError), Documents.open(tmp_path / "runs.db") as documents:
        documents.blocking.list("c")


async def test_nothing_is_written_in_plain_text_beside_encrypted_documents(tmp_path):
    with Documents.open(tmp_path / "runs.db", keys=ks.Keys("k", {"k": bytes(32)})) as documents:
        await documents.put("c", "k", b"secret")
    with Documents.open(tmp_path / "runs.db") as documents:
        with pytest.raises(ks.errors.EncryptionError, match="the key 'k'"):
            await documents.put("c", "other", b"plain")
        assert await documents.collections() == {"c": 1, "keepstep.keys": 1}


async def test_erased_run_takes_its_documents_along(tmp_path):
    @ks.workflow
    async def noting() -> None:
        pass

    async with ks.open(tmp_path / "runs.db") as engine:
        handle = await engine.start(noting, run_id="mine")
        await handle.result()
        await engine.documents.put("c", "k", b"a secret of mine", owner="mine")
        await engine.documents.put("c", "other", b"1")
        await engine.care.erase("mine")
        assert [one.key for one in await engine.documents.list("c")] == ["other"]
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert b"a secret of mine" not in data


async def test_worker_sweeps_expired_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SWEEP_SECONDS", 0.01)
    async with ks.open(tmp_path / "runs.db") as engine:
        now = await engine.documents.put("c", "k", b"1", expires_at=ks.ports.instant(engine.clock.now() - 1))
        assert now == 1
        await asyncio.to_thread(gone, engine.documents)
