"""Documents: what a batch of puts does to stored versions, as pure functions; every store carries out the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from ..checks import check_count, check_id, check_limit, check_name, shown
from ..errors import CheckpointCorrupt, DefinitionError
from ..ports import Document, DocumentQuery, Put, Verdict, Written, instant
from ..records.record import MAX_VALUE
from .rules import PAGE_BYTES

#: Bytes of a key at most. Every database can index that many.
MAX_KEY = 500
#: Largest number of a version, so that it can be counted up in 64 bits.
MOST_VERSIONS = 2**53
#: Seconds for which a document stays after its owner was removed: the owner may be on its way from another store.
OWNER_SECONDS = 3600.0

#: Start of an encrypted value; the name of its data key follows, then a colon and the ciphertext.
SEALED_WITH = b"\x00ks-encrypted:"
#: Bytes by which encryption makes a value longer at most.
SEAL_ROOM = 128

_encode = msgspec.json.Encoder().encode

#: A document's collection and key.
Name = tuple[str, str]


class Kept(NamedTuple):
    """A stored version, without its value. Times are seconds since 1970."""

    version: int
    writer: str
    at: float
    expires_at: float | None


class Stored(NamedTuple):
    """A version as stored: all columns in the order of `COLUMNS`."""

    key: str
    version: int
    at: float
    writer: str
    owner: str | None
    expires_at: float | None
    checksum: str
    value: bytes


#: Columns of a stored version beside its collection.
COLUMNS = Stored._fields


@dataclass(slots=True)
class Change:
    """The change of one document: remove it if `removes`, then add `rows`, then remove the versions up to `trim`."""

    removes: bool = False
    rows: list[Stored] = field(default_factory=list)
    trim: int = 0


def wanted(batches: Iterable[Sequence[Put]]) -> dict[Name, int]:
    """Return the documents that a decision needs, each with the number of its newest versions to look at."""
    found: dict[Name, int] = {}
    for batch in batches:
        for put in batch:
            name = put.collection, put.key
            most = 1 if not put.writer and put.version is None else max(put.keep, 1) if put.version is None else 2**31
            if found.get(name, 0) < most:
                found[name] = most
    return found


def decide(
    batches: Sequence[Sequence[Put]], kept: Mapping[Name, Sequence[Kept]], now: float
) -> tuple[list[Written], dict[Name, Change]]:
    """Return the answer to each batch, and the change of each document. `kept` has its versions, newest first."""
    states: dict[Name, Sequence[Kept]] = dict(kept)
    changes: dict[Name, Change] = {}
    answers: list[Written] = []
    for batch in batches:
        states_after: dict[Name, Sequence[Kept]] = {}
        puts: list[tuple[Name, Put, int]] = []
        versions: list[int] = []
        about = -1
        for place, put in enumerate(batch):
            name = put.collection, put.key
            state = states_after.get(name)
            if state is None:
                state = states[name]
            version = _version_after(put, state, now)
            if version is None:
                about = place
                break
            if version > 0 or put.value is None:  # a negative number was written before
                puts.append((name, put, version))
                states_after[name] = _state_after(put, state, version, now)
            versions.append(abs(version))
        if about >= 0:
            answers.append(Written(Verdict.CONFLICT, tuple(_current(put, states, now) for put in batch), about))
            continue
        states.update(states_after)
        for name, put, version in puts:
            _apply(changes, name, put, version, now)
        answers.append(Written(Verdict.DONE, tuple(versions)))
    return answers, changes


def _current(put: Put, states: Mapping[Name, Sequence[Kept]], now: float) -> int:
    state = states[put.collection, put.key]
    return state[0].version if state and not is_expired(state[0].expires_at, now) else 0


def _version_after(put: Put, state: Sequence[Kept], now: float) -> int | None:
    """Return the version to write, 0 for a removal, that of an earlier write as a negative number, or None."""
    if put.writer and put.value is not None:
        for one in state[: put.keep]:
            if one.writer == put.writer and not is_expired(one.expires_at, now):
                return -one.version
    newest = state[0].version if state else 0
    current = newest if state and not is_expired(state[0].expires_at, now) else 0
    if put.version is not None:
        if put.version > newest:
            return put.version
        at = None if put.at is None else put.at.timestamp()
        same = any(one.version == put.version and one.at == at and one.writer == put.writer for one in state)
        return -put.version if same else None
    if put.expect is not None and put.expect != current:
        return None
    return 0 if put.value is None else newest + 1


def _state_after(put: Put, state: Sequence[Kept], version: int, now: float) -> Sequence[Kept]:
    if put.value is None:
        return ()
    at = now if put.at is None else put.at.timestamp()
    return [Kept(version, put.writer, at, _seconds(put.expires_at)), *state]


def _apply(changes: dict[Name, Change], name: Name, put: Put, version: int, now: float) -> None:
    change = changes.get(name)
    if change is None:
        change = changes[name] = Change()
    if put.value is None:
        change.removes, change.rows, change.trim = True, [], 0
        return
    change.rows.append(_stored(put, version, now))
    if version > put.keep:
        change.trim = max(change.trim, version - put.keep)
        if len(change.rows) > 1:
            change.rows = [row for row in change.rows if row.version > change.trim]


def _stored(put: Put, version: int, now: float) -> Stored:
    at = now if put.at is None else put.at.timestamp()
    owner, expires_at, value = put.owner or None, _seconds(put.expires_at), put.value or b""
    checksum = checksum_of(put.collection, (put.key, version, at, put.writer, owner, expires_at), value)
    return Stored(put.key, version, at, put.writer, owner, expires_at, checksum, value)


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def is_expired(expires_at: float | None, now: float) -> bool:
    """Whether a version counts as absent."""
    return expires_at is not None and expires_at <= now


# -- checks ------------------------------------------------------------------------------------------------------------


def check_puts(batches: Iterable[Sequence[Put]]) -> None:
    """Raise `DefinitionError` for a put that no store takes."""
    for batch in batches:
        for put in batch:
            _check_put(put)


def _check_put(put: Put) -> None:
    check_collection(put.collection)
    check_document_key(put.key)
    value = put.value
    if value is not None:
        if not isinstance(value, bytes):
            raise DefinitionError(f"value= of document {put.key!r} must be bytes, not {type(value).__name__}")
        if len(value) > MAX_VALUE + (SEAL_ROOM if value.startswith(SEALED_WITH) else 0):
            raise DefinitionError(
                f"the value of document {put.key!r} has {len(value)} bytes, and at most {MAX_VALUE} are stored"
            )
    if put.expect is not None:
        check_count(put.expect, "expect=", 0)
    if put.keep != 1:
        check_limit(put.keep, "keep=", 1)
    if not isinstance(put.writer, str):
        raise DefinitionError(f"writer= must be text, got {shown(put.writer)}")
    _check_text(put.writer, "writer=")
    if put.owner:
        check_id(put.owner, "owner=")
    if put.expires_at is not None or put.version is not None or put.at is not None:
        _check_times(put)


def _check_times(put: Put) -> None:
    for name, at in (("expires_at=", put.expires_at), ("at=", put.at)):
        if at is not None and (not isinstance(at, datetime) or at.tzinfo is None):
            raise DefinitionError(f"{name} must be an instant with a time zone, got {shown(at)}")
        try:
            _ = at and instant(at.timestamp())
        except (ValueError, OverflowError):  # seconds are rounded, so that the last instant of all is not one of them
            raise DefinitionError(f"{name} {shown(at)} is refused: it is at the end of the calendar") from None
    if put.version is not None and (type(put.version) is not int or not 0 < put.version <= MOST_VERSIONS):
        raise DefinitionError(f"version= must be a whole number from 1 to 2**53, got {shown(put.version)}")


def check_collection(name: str) -> str:
    """Return the name of a collection; refuse an invalid one."""
    return check_name(name, "collection")


def check_document_key(key: str) -> str:
    """Return the key of a document; refuse one that not every store can hold and order."""
    if not isinstance(key, str) or not key:
        raise DefinitionError(f"a document key must be text that is not empty, got {shown(key)}")
    return _check_text(key, "document key")


def _check_text(text: str, what: str) -> str:
    if text.isascii() and text.isprintable() and len(text) <= MAX_KEY:  # nearly all
        return text
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise DefinitionError(f"{what} {shown(text)} is refused: it is not Unicode text") from None
    if size > MAX_KEY:
        raise DefinitionError(f"{what} {shown(text)} is refused: it is longer than {MAX_KEY} bytes")
    if any(char < " " or char == "\x7f" for char in text):
        raise DefinitionError(f"{what} {shown(text)} is refused: it holds a control character")
    return text


# -- reading -----------------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """The keys of a list: from `low` on, or `beyond` it, and before `high`, if that is given."""

    low: str
    beyond: bool
    high: str
    keys: tuple[str, ...]

    def matches(self, key: str) -> bool:
        return (
            (key > self.low if self.beyond else key >= self.low)
            and (not self.high or key < self.high)
            and (not self.keys or key in self.keys)
        )


def wanted_keys(query: DocumentQuery) -> Wanted:
    """Return the range that a list asks for."""
    end = prefix_end(query.prefix)
    high = min(end, query.before) if end and query.before else end or query.before
    if query.after and query.after >= query.prefix:
        return Wanted(query.after, beyond=True, high=high, keys=query.keys)
    return Wanted(query.prefix, beyond=False, high=high, keys=query.keys)


def is_of_one(query: DocumentQuery) -> bool:
    """Whether a query asks for the newest version of one document."""
    few = len(query.keys) == 1 and query.limit > 0 and query.values
    return few and not (query.all_versions or query.prefix or query.after or query.before)


def prefix_end(prefix: str) -> str:
    """Return the first text after all that begin with a prefix, in the order of bytes; empty if there is none."""
    for place in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[place])
        if code < 0x10FFFF:
            following = code + 1 if code + 1 != 0xD800 else 0xE000
            return prefix[:place] + chr(following)
    return ""


def page(query: DocumentQuery, rows: Iterable[Sequence[Any]]) -> list[Document]:
    """Return the documents of rows that are ordered by key: at most `limit` keys, and about 4 MB after a whole key."""
    found: list[Document] = []
    keys = size = 0
    last: Any = None
    for row in rows:
        if row[0] != last:
            if keys >= query.limit or size >= PAGE_BYTES:
                break
            keys, last = keys + 1, row[0]
        size += len(row[-1])
        found.append(_opened(query.collection, row, checked=query.values))
    return found


def _opened(collection: str, row: Sequence[Any], *, checked: bool) -> Document:
    """Return the document in a row. Raise `CheckpointCorrupt` unless it is as it was written."""
    key, version, at, writer, owner, expires_at, checksum, value = row
    try:
        if checked and checksum != checksum_of(collection, (key, version, at, writer, owner, expires_at), value):
            raise CheckpointCorrupt(
                f"document {key!r} of collection {collection!r}: its version {version} is not as it was written"
            )
        expires = None if expires_at is None else instant(expires_at)
        return Document(collection, key, version, value, instant(at), writer, owner or "", expires)
    except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(
            f"document {shown(key)} of collection {collection!r}: its row cannot be read: {error}"
        ) from None


def checksum_of(collection: str, facts: tuple[Any, ...], value: bytes) -> str:
    """Return the checksum of a version: SHA-256 over its facts and its value."""
    digest = sha256(_encode((collection, *facts)))
    digest.update(value)
    return digest.hexdigest()
