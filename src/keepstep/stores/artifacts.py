"""The artifacts of a store: their files, the documents that refer to them, and how both are kept in step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import CheckpointCorrupt, EncryptionError, StoreError
from ..model.ids import draw
from ..ports import Document, DocumentQuery, OptionalStore, Put, Store, optional
from .artifact_files import SEALED, ArtifactFiles, Crypt, Sealing
from .encrypted import EncryptedStore, below

#: Collection of the references, one for each artifact and run.
COLLECTION = "artifacts"
#: Environment variable that names the folder of artifacts.
VARIABLE = "KEEPSTEP_ARTIFACTS"
#: Writer of a reference whose file has no name yet. It is readable in an encrypted store, too.
PENDING = "pending"
#: Seconds after which a reference that was never completed is removed.
UNFINISHED_SECONDS = 86_400.0


def files_of(store: Store, folder: str | os.PathLike[str] | None = None) -> ArtifactFiles | None:
    """Return the files of a store: in a folder that is given, that the environment names, or beside the store."""
    beside = optional(below(store), OptionalStore.artifacts_folder)
    named = folder or os.environ.get(VARIABLE) or (None if beside is None else beside())
    return None if named is None else ArtifactFiles(named, _unsealing(store))


def _unsealing(store: Store) -> Callable[[bytes], Crypt]:
    def unseal(header: bytes) -> Crypt:
        if not isinstance(store, EncryptedStore):
            raise EncryptionError("an artifact is encrypted, but keys= is not set")
        try:
            _, name, file = header.decode("ascii").split()
        except ValueError:
            raise CheckpointCorrupt("an artifact is damaged: its first line cannot be read") from None
        return _crypt(store.cipher_named(name).reveal, file)

    return unseal


def _crypt(how: Callable[..., bytes], file: str) -> Crypt:
    def crypt(number: int, is_last: bool, data: bytes) -> bytes:
        return how(data, "artifact", file, str(number), "last" if is_last else "more")

    return crypt


def sealing_of(store: Store) -> Sealing | None:
    """Return how a new file of a store is encrypted; None if it is not."""
    if not isinstance(store, EncryptedStore):
        return None
    name, cipher = store.document_cipher()
    file = draw(8).hex()
    return Sealing(SEALED + name + b" " + file.encode() + b"\n", _crypt(cipher.hide, file))


def sweep_files(store: Any, files: ArtifactFiles) -> int:
    """Remove files that no document refers to, and references that were never completed."""
    store = below(store)
    late = store.clock.now() - UNFINISHED_SECONDS
    for one in _references(store):
        is_late = one.writer == PENDING and one.at.timestamp() < late
        if is_late and not files.path(one.key.partition("/")[0]).exists():
            store.write_documents([[Put(COLLECTION, one.key, None, expect=one.version)]])

    def is_referenced(digest: str) -> bool:
        return bool(store.list_documents(DocumentQuery(COLLECTION, prefix=f"{digest}/", limit=1, values=False)))

    return files.sweep(is_referenced)


def flaws_of(store: Store, files: ArtifactFiles | None) -> Iterator[tuple[str, str]]:
    """Yield the digest and the flaw of every artifact that is missing or damaged.

    Without keys, an encrypted artifact is only looked for.
    """
    if files is None:
        return
    seen: set[str] = set()
    for one in _references(below(store)):
        digest = one.key.partition("/")[0]
        if digest in seen or one.writer == PENDING:
            continue
        seen.add(digest)
        try:
            if isinstance(store, EncryptedStore) or not files.is_sealed(digest):
                for _ in files.chunks(digest):
                    pass
        except StoreError as error:
            yield digest, str(error)


def copy_files(source: Store, target: Store) -> None:
    """Copy the files of artifacts that the target refers to and does not have, as they are."""
    here, there = files_of(source), files_of(target)
    if here is None or there is None or here.folder == there.folder or not here.folder.is_dir():
        return
    for digest in {one.key.partition("/")[0] for one in _references(below(target))}:
        if here.path(digest).exists() and not there.path(digest).exists():
            there.adopt(here.path(digest), digest)


def _references(store: Any) -> Iterator[Document]:
    """Yield the references without their values, which may be encrypted."""
    after = ""
    while page := store.list_documents(DocumentQuery(COLLECTION, after=after, values=False)):
        yield from page
        after = page[-1].key
