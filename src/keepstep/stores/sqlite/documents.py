"""Documents in a SQLite store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ports import Document, DocumentQuery, Put, Written
from .. import documents
from ..documents import Kept, Name, Wanted
from .connection import Cursor
from .rows import text_or_bytes

_TABLE = "keepstep_document"
_KEPT = (
    f"SELECT version, writer, at, expires_at FROM {_TABLE} WHERE collection = ? AND key = ?"
    " ORDER BY version DESC LIMIT ?"
)
_ADD = (
    f"INSERT INTO {_TABLE} (collection, {', '.join(documents.COLUMNS)})"
    f" VALUES ({', '.join('?' * (len(documents.COLUMNS) + 1))})"
)
_GET = (
    f"SELECT {', '.join(documents.COLUMNS)} FROM {_TABLE} WHERE collection = ? AND key = ?"
    " ORDER BY version DESC LIMIT 1"
)
_REMOVE = f"DELETE FROM {_TABLE} WHERE collection = ? AND key = ?"
_TRIM = f"{_REMOVE} AND version <= ?"
#: Text is read as bytes where it may be damaged, so that one row does not hide the others.
_FACTS = "CAST(key AS BLOB), version, at, CAST(writer AS BLOB), CAST(owner AS BLOB), expires_at, CAST(checksum AS BLOB)"
_NEWEST = (
    f" AND version = (SELECT max(version) FROM {_TABLE} one WHERE one.collection = d.collection AND one.key = d.key)"
)
_LIVE = " AND (expires_at IS NULL OR expires_at > ?)"
_EXPIRED = (
    "(expires_at IS NOT NULL AND expires_at <= ?) OR (owner IS NOT NULL AND at < ? AND NOT EXISTS"
    " (SELECT 1 FROM keepstep_run WHERE id = owner))"
)


def write(cursor: Cursor, batches: Sequence[Sequence[Put]], now: float) -> list[Written]:
    """Write batches, inside a transaction."""
    execute = cursor.execute
    kept: dict[Name, Sequence[Kept]] = {
        name: [Kept._make(row) for row in execute(_KEPT, (*name, most)).fetchall()]
        for name, most in documents.wanted(batches).items()
    }
    answers, changes = documents.decide(batches, kept, now)
    for name, change in changes.items():
        if change.removes:
            execute(_REMOVE, name)
        elif change.trim and kept[name]:
            execute(_TRIM, (*name, change.trim))
        for row in change.rows:
            execute(_ADD, (name[0], *row))
    return answers


def read(cursor: Cursor, query: DocumentQuery, now: float) -> list[Document]:
    """Return one page of documents."""
    where, bound = _conditions(query.collection, documents.wanted_keys(query))
    value = "CAST(value AS BLOB)" if query.values else "x''"
    newest = "" if query.all_versions else _NEWEST
    order = f"ORDER BY key{' DESC' if query.reverse else ''}, version"
    sql = f"SELECT {_FACTS}, {value} FROM {_TABLE} d WHERE {where}{newest}{_LIVE} {order}"
    bound.append(now)
    if not query.all_versions:
        sql += " LIMIT ?"
        bound.append(query.limit)
    rows = (
        (_text(key), version, at, _text(writer), _text(owner), expires_at, _text(checksum), found)
        for key, version, at, writer, owner, expires_at, checksum, found in cursor.execute(sql, bound)
    )
    return documents.page(query, rows)


def get(cursor: Cursor, query: DocumentQuery, now: float) -> list[Document]:
    """Return the newest version of one document, without the work that a page needs."""
    rows = cursor.execute(_GET, (query.collection, query.keys[0])).fetchall()
    found = documents.page(query, rows)
    return found if not rows or not documents.is_expired(rows[0][5], now) else []


def collections(cursor: Cursor) -> dict[str, int]:
    """Return the collections, by one step of the index each, and the number of keys of each."""
    found: dict[str, int] = {}
    name = ""
    while True:
        sql = f"SELECT min(collection) FROM {_TABLE} WHERE collection > ?"
        ((name,),) = cursor.execute(sql, (name,)).fetchall()
        if not isinstance(name, str):
            return found
        sql = f"SELECT count(DISTINCT key) FROM {_TABLE} WHERE collection = ?"
        ((found[name],),) = cursor.execute(sql, (name,)).fetchall()


def remove(cursor: Cursor, collection: str, wanted: Wanted) -> int:
    """Remove documents. Return the number of keys."""
    where, bound = _conditions(collection, wanted)
    ((count,),) = cursor.execute(f"SELECT count(DISTINCT key) FROM {_TABLE} WHERE {where}", bound).fetchall()
    cursor.execute(f"DELETE FROM {_TABLE} WHERE {where}", bound)
    return int(count)


def remove_expired(cursor: Cursor, collection: str, wanted: Wanted, now: float) -> int:
    """Remove versions that have expired, and documents whose owner is gone. Return the number of keys."""
    where, bound = _conditions(collection, wanted) if collection else ("1", [])
    gone = f"{where} AND ({_EXPIRED})"
    bound = [*bound, now, now - documents.OWNER_SECONDS]
    names = cursor.execute(f"SELECT DISTINCT collection, key FROM {_TABLE} WHERE {gone}", bound).fetchall()
    if names:
        cursor.execute(f"DELETE FROM {_TABLE} WHERE {gone}", bound)
    return len(names)


def forget_owner(cursor: Cursor, run: str) -> None:
    """Remove the documents of a run."""
    cursor.execute(f"DELETE FROM {_TABLE} WHERE owner = ?", (run,))


def _conditions(collection: str, wanted: Wanted) -> tuple[str, list[Any]]:
    where, bound = "collection = ?", [collection]
    if wanted.low:
        where += f" AND key {'>' if wanted.beyond else '>='} ?"
        bound.append(wanted.low)
    if wanted.high:
        where += " AND key < ?"
        bound.append(wanted.high)
    if wanted.keys:
        where += f" AND key IN ({', '.join('?' * len(wanted.keys))})"
        bound += wanted.keys
    return where, bound


def _text(value: Any) -> Any:
    return None if value is None else text_or_bytes(value)
