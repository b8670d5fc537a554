"""Reads every document of a store, to verify or to transfer it; damaged ones are reported and left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..errors import CheckpointCorrupt
from ..ports import Document, DocumentQuery, OptionalStore, Store, optional
from ..stores.encrypted import KEYS_COLLECTION, below

#: Keys read in one query.
_PAGE = 200


def all_documents(store: Store, damaged: Callable[[str, str, str], None]) -> Iterator[Document]:
    """Yield every version of every document, as stored. `damaged` gets the collection, key and damage of the others.

    The data keys come first, because the others need them.
    """
    plain: Any = below(store)
    if optional(plain, OptionalStore.list_collections) is None:
        return
    names = sorted(plain.list_collections(), key=lambda name: (name != KEYS_COLLECTION, name))
    for name in names:
        query = DocumentQuery(name, limit=_PAGE, all_versions=True)
        while True:
            try:
                page = plain.list_documents(query)
            except CheckpointCorrupt:
                page = [*_one_by_one(plain, query, damaged)]
                facts = plain.list_documents(msgspec.structs.replace(query, values=False, limit=1))
                last = facts[-1].key if facts else ""
            else:
                last = page[-1].key if page else ""
            yield from page
            if not last:
                break
            query = msgspec.structs.replace(query, after=last)


def _one_by_one(store: Any, query: DocumentQuery, damaged: Callable[[str, str, str], None]) -> Iterator[Document]:
    """Yield the readable versions of the first key of a page."""
    for fact in store.list_documents(msgspec.structs.replace(query, values=False, limit=1))[-1:]:
        try:
            yield from store.list_documents(DocumentQuery(query.collection, keys=(fact.key,), all_versions=True))
        except CheckpointCorrupt as error:
            damaged(query.collection, fact.key, str(error))


def documents_named(store: Store, collection: str) -> bool:
    """Whether a store has documents in a collection."""
    collections = optional(below(store), OptionalStore.list_collections)
    return collections is not None and collection in collections()
