"""Long-term memory: values under keys of a namespace, with their history, in the store of the runs.

In a workflow, every read and write is a step: its record holds what was read and at which version, and a write that is
repeated after a crash makes no second version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

import msgspec

from ..checks import check_count, check_name, check_seconds
from ..errors import DefinitionError, DocumentConflict, StoreUnavailable
from ..kernel.context import idempotency_key, in_workflow
from ..kernel.redaction import Redaction
from ..policies import Retry
from ..ports import CURRENT, Document, Put, instant
from ..records.record import MAX_VALUE
from ..stores.documents import check_document_key
from ..values import VALUES, Redactor
from ..workflows.call import Call, PlainCall
from ..workflows.definition import Step
from ..workflows.schema import as_annotated, type_for
from .documents import Documents

T = TypeVar("T")

#: Prefix of the collections of memories.
MEMORY = "memory:"
#: Versions of a value to keep. A repeated write is recognized as long as its version is kept.
KEEP = 100
#: Times that `update` tries again after another writer was first.
UPDATES = 100
#: How the steps of a memory wait while the store does not answer: about five minutes.
_RETRY = Retry(attempts=15, base_seconds=0.2, cap_seconds=30.0, on=StoreUnavailable)


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """One version of a value. That of a deletion has no value."""

    key: str
    value: Any
    version: int
    at: datetime
    deleted: bool = False


class Memory:
    """Values under keys of a namespace, shared by all runs of a store, with their history.

    Await the result of a method, or call its `.result()` in plain def code. In a workflow, each call is a step. In the
    body of a step and outside a run, it works directly; outside a run it needs `engine`: an open engine, or its
    documents. `type` is the type of all values: a class or an annotation. The newest `keep` versions of a value stay.
    """

    def __init__(self, namespace: str, *, type: Any = None, keep: int = KEEP, engine: Any = None) -> None:  # noqa: A002
        self.namespace = check_name(namespace, "memory")
        self.collection = check_name(f"{MEMORY}{namespace}", "memory")
        self.keep = check_count(keep, "keep=")
        self._values = VALUES if type is None else VALUES.for_annotation(type)
        self._type = None if type is None else type_for(type)
        self._engine = engine

    def __repr__(self) -> str:
        return f"Memory({self.namespace!r})"

    # -- reading -----------------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Call[Any]:
        """Return the newest value under a key, or `default`."""

        def value(found: Any) -> Any:
            return default if found is None else self._decoded(found["value"], key)

        return self._call(_get, (check_document_key(key),), value)

    def list(self, prefix: str = "", *, limit: int = 1000) -> Call[Sequence[MemoryEntry]]:
        """Return the newest version of every value whose key begins with `prefix`, by key; at most `limit`."""
        return self._call(_list, (prefix, check_count(limit, "limit=")), self._entries)

    def history(self, key: str) -> Call[Sequence[MemoryEntry]]:
        """Return the versions of a value that are kept, oldest first, deletions among them."""
        return self._call(_history, (check_document_key(key),), self._entries)

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(
        self, key: str, value: Any, *, expect: int | None = None, ttl: float | timedelta | None = None
    ) -> Call[int]:
        """Write a value and return its version, which is 1 for the first.

        With `expect`, only if that is the current version, 0 for none; raise `DocumentConflict` otherwise. After `ttl`
        seconds the value is gone.
        """
        seconds = None if ttl is None else check_seconds(ttl, "ttl=", 0.001)
        return self._call(_put, (check_document_key(key), self._plain(value, key), expect, seconds), _same)

    def delete(self, key: str) -> Call[bool]:
        """Delete a value; its history stays. Return whether there was one."""
        return self._call(_delete, (check_document_key(key),), _same)

    def update(self, key: str, change: Callable[[Any], Any], default: Any = None) -> Call[Any]:
        """Replace a value by what `change` makes of it, or of `default`, and return that.

        If another writer is first, `change` is called again with the newer value. It must do nothing else.
        """
        if not callable(change):
            raise DefinitionError(f"change must be a function of the value, got {change!r}")

        def step(value: Any) -> Any:
            return self._plain(change(default if value is None else self._decoded(value[0], key)), key)

        return self._call(_update, (check_document_key(key),), lambda made: self._decoded(made, key), step)

    def erase(self, prefix: str) -> Call[int]:
        """Remove all values whose keys begin with `prefix`, with their history, from the store's files.

        Return the number of keys. Call it outside a workflow: it makes no record.
        """
        if in_workflow():
            raise DefinitionError("memory.erase is called in a workflow; call it in a step, or use memory.delete")

        async def erase() -> int:
            return await self.documents.remove(self.collection, prefix, scrub=True)

        return PlainCall(erase, (), {})

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def documents(self) -> Documents:
        """The documents of the store: those of `engine`, or of the run that the caller is part of."""
        engine = self._engine
        if engine is None:
            scope = CURRENT.get()
            if scope is None:
                raise DefinitionError(
                    f"ks.Memory({self.namespace!r}) is used outside a run, so it does not know its store; write "
                    "ks.Memory(..., engine=engine)"
                )
            engine = scope.run.host
        found = getattr(engine, "documents", engine)
        if isinstance(found, Documents):
            return found
        found = getattr(found, "documents", found)  # of a blocking engine
        if not isinstance(found, Documents):
            raise DefinitionError(f"engine= must be an open engine, or its documents, got {engine!r}")
        return found

    def check(self, data: bytes, key: str) -> bytes:
        """Refuse a value that is too large or holds a secret."""
        scope = CURRENT.get()
        engine = self._engine if self._engine is not None or scope is None else scope.run.host
        redaction = getattr(engine, "redaction", None) or _REDACTION
        redaction.check(data, f"{self.namespace}/{key}", "memory")
        return data

    def _call(self, step: Step[..., Any], args: tuple[Any, ...], then: Callable[[Any], T], *more: Any) -> Call[T]:
        inner: Call[Any] = step(self, *args, *more) if in_workflow() else PlainCall(step.body, (self, *args, *more), {})
        return _Call(inner, then)

    def _plain(self, value: Any, key: str) -> Any:
        """Return the stored form of a value as plain data."""
        where = f"memory {self.namespace!r}: {key!r}"
        if self._type is not None:
            value = as_annotated(value, self._type, where)
        return msgspec.json.decode(self._values.encode(value, where))

    def _decoded(self, plain: Any, key: str) -> Any:
        where = f"memory {self.namespace!r}: {key!r}"
        value = self._values.decode(msgspec.json.encode(plain), where)
        return value if self._type is None else as_annotated(value, self._type, where)

    def _entries(self, found: Sequence[dict[str, Any]]) -> Sequence[MemoryEntry]:
        return [
            MemoryEntry(
                one["key"],
                None if one["deleted"] else self._decoded(one["value"], one["key"]),
                one["version"],
                datetime.fromisoformat(one["at"]),
                one["deleted"],
            )
            for one in found
        ]


class _Call(Call[T], Generic[T]):
    """A call whose outcome is converted for the caller."""

    __slots__ = ("_inner", "_then")

    def __init__(self, inner: Call[Any], then: Callable[[Any], T]) -> None:
        self._inner, self._then = inner, then

    def __await__(self) -> Generator[Any, Any, T]:
        found = yield from self._inner.__await__()
        return self._then(found)

    def result(self) -> T:
        return self._then(self._inner.result())

    def start(self) -> Call[T]:
        self._inner.start()
        return self


def _same(value: T) -> T:
    return value


class _PlainText:
    """Where nothing says otherwise, values are stored in plain text."""

    of_everything = False


_REDACTION: Any = Redaction(Redactor(), MAX_VALUE, _PlainText())  # type: ignore[arg-type]


# -- the steps ---------------------------------------------------------------------------------------------------------


def _step(name: str, *ignored: str) -> Callable[[Callable[..., Awaitable[Any]]], Step[..., Any]]:
    return lambda body: Step(body, name=name, ignore=("memory", *ignored), retry=_RETRY)


@_step("memory get")
async def _get(memory: Memory, key: str) -> dict[str, Any] | None:
    found = await memory.documents.get(memory.collection, key)
    return None if found is None or not found.value else {"version": found.version, "value": _tree(found)}


@_step("memory list")
async def _list(memory: Memory, prefix: str, limit: int) -> list[dict[str, Any]]:
    found: list[Document] = []
    after = ""
    while len(found) < limit:
        page = await memory.documents.list(memory.collection, prefix=prefix, after=after, limit=limit)
        found += [one for one in page if one.value]
        if len(page) < limit:
            break
        after = page[-1].key
    return [_plain_entry(one) for one in found[:limit]]


@_step("memory history")
async def _history(memory: Memory, key: str) -> list[dict[str, Any]]:
    found = await memory.documents.list(memory.collection, keys=(key,), limit=1, all_versions=True)
    return [_plain_entry(one) for one in found]


@_step("memory put")
async def _put(memory: Memory, key: str, value: Any, expect: int | None, ttl: float | None) -> int:
    data = memory.check(msgspec.json.encode(value), key)
    if expect == 0:  # a deleted value counts as none
        found = await memory.documents.get(memory.collection, key)
        expect = 0 if found is None or found.value else found.version
    return await _write(memory, Put(memory.collection, key, data, expect=expect, keep=memory.keep), ttl)


@_step("memory delete")
async def _delete(memory: Memory, key: str) -> bool:
    if await _own_write(memory, key) is not None:
        return True
    for _ in range(UPDATES):
        newest = await memory.documents.get(memory.collection, key)
        if newest is None or not newest.value:
            return False
        put = Put(memory.collection, key, b"", expect=newest.version, keep=memory.keep)
        with suppress(DocumentConflict):
            await _write(memory, put)
            return True
    raise _contended(memory, key)


@_step("memory update", "change")
async def _update(memory: Memory, key: str, change: Callable[[Any], Any]) -> Any:
    own = await _own_write(memory, key)
    if own is not None:
        return _tree(own)
    for _ in range(UPDATES):
        newest = await memory.documents.get(memory.collection, key)
        made = change(None if newest is None or not newest.value else (_tree(newest),))
        data = memory.check(msgspec.json.encode(made), key)
        put = Put(memory.collection, key, data, expect=newest.version if newest else 0, keep=memory.keep)
        with suppress(DocumentConflict):
            await _write(memory, put)
            return made
    raise _contended(memory, key)


async def _own_write(memory: Memory, key: str) -> Document | None:
    """Return the version that this step wrote before a crash. Values are only read if there is one."""
    writer = _writer()
    query: dict[str, Any] = {"keys": (key,), "limit": 1, "all_versions": True}
    facts = await memory.documents.list(memory.collection, values=False, **query) if writer else ()
    if not any(one.writer == writer for one in facts):
        return None
    found = await memory.documents.list(memory.collection, **query)
    return next((one for one in found if one.writer == writer), None)


async def _write(memory: Memory, put: Put, ttl: float | None = None) -> int:
    documents = memory.documents
    if ttl is not None:
        try:
            put.expires_at = instant(documents.store.clock.now() + ttl)
        except (ValueError, OverflowError):
            raise DefinitionError(f"ttl= of {ttl} seconds ends after the year 9999; leave it out") from None
    return await documents.put(
        put.collection,
        put.key,
        put.value,
        expect=put.expect,
        keep=put.keep,
        writer=_writer(),
        expires_at=put.expires_at,
    )


def _writer() -> str:
    """Return the idempotency key of the step of a memory; empty elsewhere, where each write is meant as a new one."""
    scope = CURRENT.get()
    return idempotency_key() if scope is not None and scope.in_step and scope.call.step in _STEPS else ""


def _contended(memory: Memory, key: str) -> StoreUnavailable:
    return StoreUnavailable(f"memory {memory.namespace!r}: {key!r} was changed by others {UPDATES} times; try again")


def _tree(found: Document) -> Any:
    return msgspec.json.decode(found.value)


def _plain_entry(found: Document) -> dict[str, Any]:
    return {
        "key": found.key,
        "value": _tree(found) if found.value else None,
        "version": found.version,
        "at": found.at.isoformat(),
        "deleted": not found.value,
    }


_STEPS = (_get, _list, _history, _put, _delete, _update)
