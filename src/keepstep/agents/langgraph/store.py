"""Long-term memory of LangGraph on any store: items in namespaces, with filters, lifetimes and search by meaning."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, NamedTuple, Self
from urllib.parse import quote, unquote

import msgspec
from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    ensure_embeddings,
    get_text_at_path,
)

from ...errors import DefinitionError, NotSerializable
from ...ports import Document, Put
from ...records.keys import Keys
from .saver import await_plan, documents_of, run_plan
from .threads import Ask, Find, Plan, Write, found_at

#: The collection of all items. A key is each part of the namespace with a slash after it, then `=` and the item's key.
COLLECTION = "langgraph:items"
#: Characters of a part of a key at most; a longer one is stored as its digest.
_LONGEST_PART = 100
#: A part of a key that is a digest.
_DIGEST = re.compile(r"%[0-9a-f]{64}\Z")
#: Share of its time to live that an item must have used up before a read renews it, so that few reads write.
_RENEWED_AFTER = 0.1


class SavedItem(msgspec.Struct, array_like=True):
    """An item as stored. `vectors` are the embeddings of its texts; `ttl` is in minutes."""

    namespace: tuple[str, ...]
    key: str
    value: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    ttl: float | None = None
    vectors: list[list[float]] = []


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(SavedItem).decode


class Found(NamedTuple):
    """A stored item with its document."""

    document: Document
    saved: SavedItem


class KeepstepStore(BaseStore):
    """A store for LangGraph's long-term memory: the `url` of a store of Keepstep, an engine, or the documents of one.

    `index` is LangGraph's configuration for search by meaning; a search compares the query with every item of the
    namespace. `ttl` has a default time to live, and whether reading renews it. `keys` and `options` are those of the
    store, for a `url`.
    """

    supports_ttl = True

    def __init__(
        self,
        store: Any,
        *,
        index: IndexConfig | None = None,
        ttl: TTLConfig | None = None,
        keys: Keys | None = None,
        **options: Any,
    ) -> None:
        self._documents, self._owned = documents_of(store, keys, options)
        self.ttl_config = ttl
        self._fields: Sequence[str] = () if index is None else tuple(index.get("fields") or ("$",))
        self._embeddings: Any = None if index is None else ensure_embeddings(index.get("embed"))

    def close(self) -> None:
        """Close a store that this object has opened."""
        if self._owned:
            self._documents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Carry out operations; reads see the items as they were before the writes of the batch."""
        return run_plan(self._documents, self._batch(list(ops)), COLLECTION)

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Carry out operations; reads see the items as they were before the writes of the batch."""
        return await await_plan(self._documents, self._batch(list(ops)), COLLECTION)

    # -- plans -------------------------------------------------------------------------------------------------------

    def _batch(self, ops: Sequence[Op]) -> Plan[list[Result]]:
        results: list[Result] = []
        puts: dict[str, PutOp] = {}
        for op in ops:
            result: Result = None
            if isinstance(op, PutOp):
                puts[_key_of(op.namespace, op.key)] = op
            elif isinstance(op, GetOp):
                result = yield from self._get(op)
            elif isinstance(op, SearchOp):
                result = yield from self._search(op)
            elif isinstance(op, ListNamespacesOp):
                result = yield from self._list_namespaces(op)
            else:
                raise DefinitionError(f"batch takes operations of langgraph.store.base, got {type(op).__name__}")
            results.append(result)
        if puts:
            yield from self._put(puts)
        return results

    def _get(self, op: GetOp) -> Plan[Item | None]:
        found = yield Find({"keys": (_key_of(op.namespace, op.key),)})
        items = _opened(found)
        yield from self._renew(items, is_wanted=op.refresh_ttl)
        return Item(**_facts(items[0].saved)) if items else None

    def _search(self, op: SearchOp) -> Plan[list[SearchItem]]:
        found = yield Find({"prefix": _prefix_of(op.namespace_prefix)})
        items = [one for one in _opened(found) if _matches(one.saved.value, op.filter or {})]
        items.sort(key=lambda one: one.saved.updated_at, reverse=True)
        scores: dict[str, float] = {}
        if op.query and self._embeddings is not None:
            query = yield self._embedding([op.query], is_query=True)
            for one in items:
                if one.saved.vectors:
                    scores[one.document.key] = max(_likeness(query[0], vector) for vector in one.saved.vectors)
            items.sort(key=lambda one: scores.get(one.document.key, -math.inf), reverse=True)
        items = items[op.offset : op.offset + op.limit]
        yield from self._renew(items, is_wanted=op.refresh_ttl)
        return [SearchItem(**_facts(one.saved), score=scores.get(one.document.key)) for one in items]

    def _list_namespaces(self, op: ListNamespacesOp) -> Plan[list[tuple[str, ...]]]:
        conditions = op.match_conditions or ()
        prefix = next((_plain(one.path) for one in conditions if one.match_type == "prefix"), ())
        found = yield Find({"prefix": _prefix_of(prefix), "values": False})
        folders = {one.key.rpartition("=")[0]: one.key for one in found}
        names: set[tuple[str, ...]] = set()
        for folder, key in folders.items():
            parts = folder.split("/")[:-1]
            if any(_DIGEST.match(part) for part in parts):
                one = yield Find({"keys": (key,)})
                names |= {item.saved.namespace for item in _opened(one)}
            else:
                names.add(tuple(map(unquote, parts)))
        kept = {name for name in names if all(_fits(one, name) for one in conditions)}
        return sorted({name[: op.max_depth] for name in kept})[op.offset : op.offset + op.limit]

    def _put(self, ops: Mapping[str, PutOp]) -> Plan[None]:
        found = yield Find({"keys": tuple(ops)})
        created = {one.document.key: one.saved.created_at for one in _opened(found)}
        now = datetime.now(UTC)
        vectors = yield from self._vectors(ops)
        puts = []
        for key, op in ops.items():
            if op.value is None:
                puts.append(Put(COLLECTION, key, None))
                continue
            begun = created.get(key, now)
            saved = SavedItem(op.namespace, op.key, dict(op.value), begun, now, op.ttl, vectors.get(key, []))
            puts.append(_stored(key, saved, now))
        yield Write(puts)

    def _vectors(self, ops: Mapping[str, PutOp]) -> Plan[dict[str, list[list[float]]]]:
        if self._embeddings is None:
            return {}
        texts = [
            (key, text)
            for key, op in ops.items()
            if op.value is not None and op.index is not False
            for field in (self._fields if op.index is None else op.index)
            for text in get_text_at_path(op.value, field)
        ]
        made: dict[str, list[list[float]]] = {}
        if texts:
            vectors = yield self._embedding([text for _, text in texts], is_query=False)
            for (key, _), vector in zip(texts, vectors, strict=True):
                made.setdefault(key, []).append([float(number) for number in vector])
        return made

    def _embedding(self, texts: list[str], *, is_query: bool) -> Ask:
        model = self._embeddings

        def ask() -> list[list[float]]:
            return [model.embed_query(texts[0])] if is_query else model.embed_documents(texts)

        async def ask_async() -> list[list[float]]:
            return [await model.aembed_query(texts[0])] if is_query else await model.aembed_documents(texts)

        return Ask(ask, ask_async)

    def _renew(self, items: Sequence[Found], *, is_wanted: bool) -> Plan[None]:
        """Let items live on because they were read. One that has changed meanwhile is left as it is."""
        if not is_wanted or (self.ttl_config and not self.ttl_config.get("refresh_on_read", True)):
            return
        now = datetime.now(UTC)
        for document, saved in items:
            if saved.ttl is None or document.expires_at is None:
                continue
            whole = timedelta(minutes=saved.ttl)
            if document.expires_at - now < whole * (1 - _RENEWED_AFTER):
                yield Write([_stored(document.key, saved, now, document.version)])


# -- keys --------------------------------------------------------------------------------------------------------------


def _part(text: str) -> str:
    plain = quote(text, safe="!$&'()*+,:;@|~ ")
    return plain if len(plain) <= _LONGEST_PART else f"%{sha256(text.encode()).hexdigest()}"


def _prefix_of(namespace: Sequence[str]) -> str:
    return "".join(f"{_part(part)}/" for part in namespace)


def _key_of(namespace: Sequence[str], key: str) -> str:
    return f"{_prefix_of(namespace)}={_part(key)}"


def _plain(path: Sequence[str]) -> tuple[str, ...]:
    """Return the parts of a path before its first wildcard."""
    end = path.index("*") if "*" in path else len(path)
    return tuple(path[:end])


def _fits(condition: MatchCondition, name: tuple[str, ...]) -> bool:
    path = tuple(condition.path)
    if len(path) > len(name):
        return False
    parts = name[: len(path)] if condition.match_type == "prefix" else name[len(name) - len(path) :]
    return all(wanted in ("*", part) for wanted, part in zip(path, parts, strict=True))


# -- items -------------------------------------------------------------------------------------------------------------


def _stored(key: str, saved: SavedItem, now: datetime, expect: int | None = None) -> Put:
    try:
        value = _encode(saved)
    except (TypeError, ValueError) as error:
        raise NotSerializable(f"item {saved.key!r} of {saved.namespace!r} is not plain JSON data: {error}") from None
    expires_at = None if saved.ttl is None else now + timedelta(minutes=saved.ttl)
    return Put(COLLECTION, key, value, expect=expect, expires_at=expires_at)


def _opened(documents: Iterable[Document]) -> list[Found]:
    return [Found(one, _decode(one.value)) for one in documents]


def _facts(saved: SavedItem) -> dict[str, Any]:
    return {
        "namespace": saved.namespace,
        "key": saved.key,
        "value": saved.value,
        "created_at": saved.created_at,
        "updated_at": saved.updated_at,
    }


_COMPARES: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


def _matches(value: Any, wanted: Mapping[str, Any]) -> bool:
    return isinstance(value, Mapping) and all(_agrees(found_at(value, key), of) for key, of in wanted.items())


def _agrees(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Mapping):
        return bool(value == wanted)
    if not any(str(key).startswith("$") for key in wanted):
        return _matches(value, wanted)
    unknown = set(wanted) - set(_COMPARES)
    if unknown:
        raise DefinitionError(f"filter= has the operators {sorted(unknown)}; there are {', '.join(_COMPARES)}")
    try:
        return all(_COMPARES[name](value, of) for name, of in wanted.items())
    except TypeError:  # values of different kinds have no order
        return False


def _likeness(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(operator.mul, one, other)) / lengths if lengths else 0.0
