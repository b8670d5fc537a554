"""Documents beside the runs: reading and writing from async code and from any thread, with one commit for many writers.

A writer that comes while another one commits waits for the next commit, which takes everything that has come meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

from ..errors import DefinitionError, DocumentConflict, EncryptionError, StoreError
from ..ports import Document, DocumentQuery, OptionalStore, Put, Store, Verdict, Written, optional
from ..records.keys import Keys
from ..stores.documents import check_collection, check_document_key, check_puts
from ..stores.encrypted import EncryptedStore, documents_locked_with, is_sealed_document
from ..stores.open import open_store

log = logging.getLogger("keepstep")

P = ParamSpec("P")
T = TypeVar("T")

#: Puts that one transaction takes at most, unless a single batch has more. It bounds the time that other writers wait.
AT_ONCE = 500
#: Seconds between two removals of expired documents by a worker.
SWEEP_SECONDS = 300.0
#: Threads for reading a store that may not be read on the event loop's thread.
READERS = 4


class _Waiting:
    """A batch that waits for a commit, and how its caller is told."""

    __slots__ = ("answer", "batch", "deliver", "error", "leads", "turn")

    def __init__(self, batch: Sequence[Put], deliver: Callable[[_Waiting], None] | None = None) -> None:
        self.batch = batch
        self.deliver = deliver
        self.answer: Written | None = None
        self.error: BaseException | None = None
        self.leads = False
        self.turn: threading.Lock | None = None

    def outcome(self) -> Written:
        if self.error is not None:
            raise self.error
        if self.answer is None:
            raise RuntimeError("a batch of documents has no answer")
        return self.answer


class GroupCommit:
    """Writes batches of many callers in few transactions. One caller at a time leads: it commits what has come.

    A blocking caller leads on its own thread, so that a single writer costs no change of threads. Batches of async
    callers are committed by a thread of this object.
    """

    def __init__(self, write: Callable[[Sequence[Sequence[Put]]], list[Written]]) -> None:
        self._write = write
        self._mutex = threading.Lock()
        self._queue: deque[_Waiting] = deque()
        self._led = False
        #: Set when a batch comes that has no patience.
        self._hurry = threading.Event()
        self._pool: ThreadPoolExecutor | None = None

    def write(self, batch: Sequence[Put], patience_seconds: float = 0.0) -> Written:
        """Write a batch and wait for its answer. A patient one waits that long for another to commit it, too."""
        one = _Waiting(batch)
        with self._mutex:
            self._queue.append(one)
            leads = not self._led and not patience_seconds
            self._led = self._led or leads
            if not leads:
                one.turn = threading.Lock()
                one.turn.acquire()
        if one.turn is not None:
            leads = self._is_impatient(one, patience_seconds)
        if leads:
            while one.answer is None and one.error is None:
                self._commit_some()
            self._hand_over()
        return one.outcome()

    def _is_impatient(self, one: _Waiting, patience_seconds: float) -> bool:
        """Wait until a batch has its answer, or should be committed by its caller; return which of them."""
        turn = one.turn or threading.Lock()
        if patience_seconds and not turn.acquire(timeout=patience_seconds):
            with self._mutex:
                if not self._led:
                    one.leads = self._led = True
                    return True
            turn.acquire()
        elif not patience_seconds:
            turn.acquire()
        return one.leads

    def begin(self, batch: Sequence[Put], deliver: Callable[[_Waiting], None], patience_seconds: float = 0.0) -> None:
        """Write a batch soon, and call `deliver` on another thread when it has its answer."""
        with self._mutex:
            self._queue.append(_Waiting(batch, deliver))
            is_led = self._led
            self._led = is_led or not patience_seconds
        if is_led:
            return
        if patience_seconds:
            self._in_thread(self._lead_late, patience_seconds)
        else:
            self._hurry.set()
            self._in_thread(self._lead)

    def _in_thread(self, act: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepstep-documents")
        self._pool.submit(act, *args, **kwargs)

    def _lead_late(self, patience_seconds: float) -> None:
        """Lead after a while, unless somebody else has led meanwhile."""
        with self._mutex:
            if self._led or not self._queue:
                return
            self._hurry.clear()
        self._hurry.wait(patience_seconds)
        with self._mutex:
            if self._led or not self._queue:
                return
            self._led = True
        self._lead()

    def _lead(self) -> None:
        self._commit_some()
        self._hand_over()

    def _hand_over(self) -> None:
        """Let the first that waits lead, or nobody."""
        with self._mutex:
            first = self._queue[0] if self._queue else None
            self._led = first is not None
        if first is None:
            return
        if first.turn is not None:
            first.leads = True
            first.turn.release()
        else:
            self._in_thread(self._lead)

    def _commit_some(self) -> None:
        with self._mutex:
            some: list[_Waiting] = []
            count = 0
            while self._queue and (not some or count + len(self._queue[0].batch) <= AT_ONCE):
                one = self._queue.popleft()
                count += len(one.batch)
                some.append(one)
        try:
            answers = self._write([one.batch for one in some])
            for one, answer in zip(some, answers, strict=True):
                one.answer = answer
        except BaseException as error:  # noqa: BLE001 - each of them raises it
            for one in some:
                one.error = error
        for one in some:
            if one.deliver is not None:
                one.deliver(one)
            elif one.turn is not None and not one.leads:
                one.turn.release()

    def close(self) -> None:
        """End the thread after what waits is written."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)


class Documents:
    """The documents of a store: versioned bytes under keys of collections. Given by `engine.documents`.

    `blocking` has the same methods without `await`, for any thread.
    """

    def __init__(self, store: Store, *, locked_with: Callable[[], str] = str) -> None:
        write = optional(store, OptionalStore.write_documents)
        if write is None:
            raise DefinitionError(f"the store {store.url} keeps no documents: it has no write_documents")
        self.store: Any = store
        self._group = GroupCommit(write)
        self._locked_with = locked_with
        self._owned = False
        self._readers: ThreadPoolExecutor | None = None
        self.blocking = BlockingDocuments(self)

    @classmethod
    def open(cls, url: Any, *, keys: Keys | None = None, **options: Any) -> Self:
        """Open a store only for its documents, without an engine and without a worker; `close` closes it."""
        store = open_store(url, **options)
        name = documents_locked_with(store) if keys is None and not isinstance(store, EncryptedStore) else ""
        documents = cls(store if keys is None else EncryptedStore(store, keys), locked_with=lambda: name)
        documents._owned = store is not url
        return documents

    def close(self) -> None:
        """Write what waits, and close a store that `open` has opened."""
        self._group.close()
        if self._readers is not None:
            self._readers.shutdown()
        if self._owned:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing -----------------------------------------------------------------------------------------------------

    async def write(self, *puts: Put, patience_seconds: float = 0.0) -> Written:
        """Write several documents, all or nothing. A conflict is an answer, not an error.

        With patience, they wait that long for another write to share its commit.
        """
        self.check(puts)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Written] = loop.create_future()

        def deliver(one: _Waiting) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits; the others must not be kept waiting
                loop.call_soon_threadsafe(_settle, future, one)

        self._group.begin(puts, deliver, patience_seconds)
        return await asyncio.shield(future)

    async def put(self, collection: str, key: str, value: bytes | None, **options: Any) -> int:
        """Write one document and return its version. The `options` are those of `ks.Put`.

        Raise `DocumentConflict` if the current version is not the one that `expect` names.
        """
        put = Put(collection, key, value, **options)
        return _version(put, await self.write(put))

    async def remove(self, collection: str, prefix: str = "", *, scrub: bool = False) -> int:
        """Remove the documents whose keys begin with `prefix`. Return the number of keys."""
        return await self._call(self.store.remove_documents, check_collection(collection), prefix, scrub=scrub)

    def check(self, puts: Sequence[Put]) -> None:
        """Refuse puts that no store takes, and plain text in an encrypted store."""
        check_puts((puts,))
        if name := self._locked_with():
            raise EncryptionError(
                f"the values of this store are encrypted with the key {name!r}, but keys= is not set; open it with "
                "keys=ks.Keys(...)",
                name,
            )

    # -- reading -----------------------------------------------------------------------------------------------------

    async def get(self, collection: str, key: str) -> Document | None:
        """Return the newest version of a document, or None."""
        return await self._call(self.blocking.get, collection, key)

    async def list(self, collection: str, *, limit: int | None = None, **options: Any) -> list[Document]:
        """Return documents by key, all of them or the first `limit`; the other options are those of `DocumentQuery`."""
        return await self._call(partial(self.blocking.list, collection, limit=limit, **options))

    async def collections(self) -> dict[str, int]:
        """Return the collections, each with the number of its keys."""
        found: dict[str, int] = await self._call(self.store.list_collections)
        return found

    async def _call(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self.store.quick:
            return read(*args, **kwargs)
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="keepstep-documents-reader")
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(read, *args, **kwargs))


class BlockingDocuments:
    """The documents of a store for blocking code, on any thread."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self._store: Any = documents.store

    def write(self, *puts: Put, patience_seconds: float = 0.0) -> Written:
        """Write several documents, as `Documents.write`."""
        self.documents.check(puts)
        return self.documents._group.write(puts, patience_seconds)  # noqa: SLF001 - its own kind

    def put(self, collection: str, key: str, value: bytes | None, **options: Any) -> int:
        """Write one document and return its version, as `Documents.put`."""
        put = Put(collection, key, value, **options)
        return _version(put, self.write(put))

    def get(self, collection: str, key: str) -> Document | None:
        """Return the newest version of a document, or None."""
        query = DocumentQuery(check_collection(collection), keys=(check_document_key(key),))
        for one in self._store.list_documents(query):
            return self._readable(one)
        return None

    def list(self, collection: str, *, limit: int | None = None, **options: Any) -> list[Document]:
        """Return documents by key, all of them or the first `limit`."""
        found: list[Document] = []
        query = DocumentQuery(check_collection(collection), **options)
        keys = 0
        while limit is None or keys < limit:
            fields = {"limit": 1000 if limit is None else min(limit - keys, 1000)}
            if found:
                fields["before" if query.reverse else "after"] = found[-1].key  # type: ignore[assignment]
            page = self._store.list_documents(DocumentQuery(check_collection(collection), **{**options, **fields}))
            if not page:
                break
            found += map(self._readable, page)
            keys += len({one.key for one in page})
        return found

    def remove(self, collection: str, prefix: str = "", *, scrub: bool = False) -> int:
        """Remove the documents whose keys begin with `prefix`. Return the number of keys."""
        removed: int = self._store.remove_documents(check_collection(collection), prefix, scrub=scrub)
        return removed

    def collections(self) -> dict[str, int]:
        """Return the collections, each with the number of its keys."""
        found: dict[str, int] = self._store.list_collections()
        return found

    def _readable(self, one: Document) -> Document:
        if not isinstance(self._store, EncryptedStore) and is_sealed_document(one.value):
            raise EncryptionError(
                f"document {one.key!r} of collection {one.collection!r} is encrypted, but keys= is not set"
            )
        return one


async def keep_swept(host: Any) -> None:
    """Remove documents that have expired or whose run is gone, beside the runs of a worker, while it is open."""
    remove = optional(host.store, OptionalStore.remove_documents)
    while remove is not None and not host.closed:
        await asyncio.sleep(SWEEP_SECONDS)
        try:
            await host.call(partial(remove, "", expired=True))
            await host.artifacts.sweep()
        except StoreError as error:
            log.warning("cannot remove expired documents: %s", error)


def _settle(future: asyncio.Future[Written], one: _Waiting) -> None:
    if future.done():  # the caller was cancelled
        return
    if one.error is not None:
        future.set_exception(one.error)
    else:
        future.set_result(one.outcome())


def _version(put: Put, written: Written) -> int:
    if written.verdict is not Verdict.DONE:
        raise DocumentConflict(
            f"document {put.key!r} of collection {put.collection!r} has version {written.versions[0]}, and expect= is "
            f"{put.expect}: another writer was first; read it again",
            written.versions[0],
        )
    return written.versions[0]
