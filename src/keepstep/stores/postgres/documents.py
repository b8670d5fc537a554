"""Documents in a PostgreSQL store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any

from ...ports import Document, DocumentQuery, Put, Written, instant
from .. import documents
from ..documents import Kept, Name, Wanted
from ..rules import PAGE_BYTES
from .pool import Address, Connection
from .rows import blobs, numbers, texts, times

#: Number of locks among which the documents of a store are divided; a batch of any size takes no more.
LOCKS = 512


_FACTS = ", ".join(documents.COLUMNS[:-1])
_LIVE = "(expires_at IS NULL OR expires_at > %s)"


class Documents:
    """The documents of one schema."""

    def __init__(self, address: Address) -> None:
        table, run = address.table("document"), address.table("run")
        self._table = table
        self._first_lock = address.key("documents")
        self._lock = "SELECT count(pg_advisory_xact_lock(one)) FROM unnest(%s::bigint[]) one"
        self._kept = (
            "SELECT w.place, d.version, d.writer, d.at, d.expires_at FROM"
            " unnest(%s::bigint[], %s::text[], %s::text[], %s::bigint[]) w (place, collection, key, most),"
            f" LATERAL (SELECT version, writer, at, expires_at FROM {table} d WHERE d.collection = w.collection"
            " AND d.key = w.key ORDER BY version DESC LIMIT w.most) d"
        )
        self._trim = (
            f"DELETE FROM {table} d USING unnest(%s::text[], %s::text[], %s::bigint[]) w (collection, key, trim)"
            " WHERE d.collection = w.collection AND d.key = w.key AND d.version <= w.trim"
        )
        self._add = (
            f"INSERT INTO {table} (collection, {', '.join(documents.COLUMNS)}) SELECT * FROM unnest(%s::text[],"
            " %s::text[], %s::bigint[], %s::timestamptz[], %s::text[], %s::text[], %s::timestamptz[], %s::text[],"
            " %s::bytea[])"
        )
        self._newest = (
            f" AND version = (SELECT max(version) FROM {table} one WHERE one.collection = d.collection"
            " AND one.key = d.key)"
        )
        self._expired = (
            f"DELETE FROM {table} d WHERE %s AND (expires_at <= %s OR (owner IS NOT NULL AND at < %s"
            f" AND NOT EXISTS (SELECT 1 FROM {run} r WHERE r.id = owner))) RETURNING collection, key"
        )
        self._get = (
            f"SELECT {', '.join(documents.COLUMNS)} FROM {table} WHERE collection = %s AND key = %s"
            " ORDER BY version DESC LIMIT 1"
        )
        self._collections = (
            f"SELECT collection, count(DISTINCT key) FROM {table} GROUP BY collection ORDER BY collection"
        )

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, connection: Connection, batches: Sequence[Sequence[Put]], now: float) -> list[Written]:
        """Write batches in one transaction, in two round trips.

        Writers of the same documents take turns by advisory locks: a lock on rows would not stop a first version.
        """
        wanted = documents.wanted(batches)
        names = list(wanted)
        places = {self._place(*name) for name in names}
        which = (numbers(range(len(names))), *self._named(names), numbers(wanted.values()))
        with connection.pipeline():
            connection.execute("BEGIN")
            connection.execute(self._lock, (numbers(sorted(places)),), binary=True)
            cursor = connection.execute(self._kept, which, binary=True)
        kept: dict[Name, list[Kept]] = {name: [] for name in names}
        for place, version, writer, at, expires_at in cursor.fetchall():
            kept[names[place]].append(Kept(version, writer, at.timestamp(), _seconds(expires_at)))
        for rows in kept.values():
            rows.sort(reverse=True)
        answers, changes = documents.decide(batches, kept, now)
        with connection.pipeline():
            trims = {name: 2**62 if change.removes else change.trim for name, change in changes.items() if kept[name]}
            trims = {name: trim for name, trim in trims.items() if trim}
            if trims:
                connection.execute(self._trim, (*self._named(trims), numbers(trims.values())), binary=True)
            fresh = [(name[0], row) for name, change in changes.items() for row in change.rows]
            if fresh:
                connection.execute(self._add, _columns(fresh), binary=True)
            connection.execute("COMMIT")
        return answers

    @staticmethod
    def _named(names: Any) -> tuple[Any, Any]:
        return texts(collection for collection, _ in names), texts(key for _, key in names)

    def _place(self, collection: str, key: str) -> int:
        digest = sha256(f"{collection}\0{key}".encode()).digest()
        return self._first_lock ^ (int.from_bytes(digest[:4], "big") % LOCKS)

    def remove(self, connection: Connection, collection: str, wanted: Wanted) -> int:
        """Remove documents. Return the number of keys."""
        where, bound = _conditions(collection, wanted)
        rows = connection.execute(f"DELETE FROM {self._table} WHERE {where} RETURNING key", bound).fetchall()
        return len(set(rows))

    def remove_expired(self, connection: Connection, collection: str, wanted: Wanted, now: datetime) -> int:
        """Remove versions that have expired, and documents whose owner is gone. Return the number of keys."""
        where, bound = _conditions(collection, wanted) if collection else ("true", [])
        sql = self._expired.replace("%s", where, 1)
        late = instant(now.timestamp() - documents.OWNER_SECONDS)
        return len(set(connection.execute(sql, [*bound, now, late]).fetchall()))

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, connection: Connection, query: DocumentQuery, now: datetime) -> list[Document]:
        """Return one page of documents."""
        where, bound = _conditions(query.collection, documents.wanted_keys(query))
        order = f"ORDER BY key{' DESC' if query.reverse else ''}"
        value = "value" if query.values else "''::bytea AS value"
        newest = "" if query.all_versions else self._newest
        inner = f"SELECT {_FACTS}, {value} FROM {self._table} d WHERE {where}{newest} AND {_LIVE}"
        bound.append(now)
        if not query.all_versions:
            inner += f" {order} LIMIT %s"
            bound.append(query.limit)
        paged = (  # the sums cover whole keys, because rows with equal keys are peers
            f"SELECT *, dense_rank() OVER ({order}) AS place, sum(octet_length(value)) OVER ({order})"
            f" - sum(octet_length(value)) OVER (PARTITION BY key) AS before FROM ({inner}) d"
        )
        sql = f"SELECT {_FACTS}, value FROM ({paged}) p WHERE place <= %s AND before < %s {order}, version"
        rows = connection.execute(sql, [*bound, query.limit, PAGE_BYTES], binary=True).fetchall()
        return documents.page(query, map(_plain, rows))

    def get(self, connection: Connection, query: DocumentQuery, now: datetime) -> list[Document]:
        """Return the newest version of one document, without the work that a page needs."""
        rows = connection.execute(self._get, (query.collection, query.keys[0]), binary=True).fetchall()
        found = documents.page(query, map(_plain, rows))
        return [one for one in found if one.expires_at is None or one.expires_at > now]

    def collections(self, connection: Connection) -> dict[str, int]:
        """Return the collections, each with the number of its keys."""
        return dict(connection.execute(self._collections).fetchall())


def _plain(row: Sequence[Any]) -> tuple[Any, ...]:
    """Return a row with its times as seconds."""
    key, version, at, writer, owner, expires_at, *rest = row
    return (key, version, _seconds(at), writer, owner, _seconds(expires_at), *rest)


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _columns(rows: Sequence[tuple[str, documents.Stored]]) -> tuple[Any, ...]:
    """Return rows as one array for each column."""
    return (
        texts(collection for collection, _ in rows),
        texts(row.key for _, row in rows),
        numbers(row.version for _, row in rows),
        times(instant(row.at) for _, row in rows),
        texts(row.writer for _, row in rows),
        texts(row.owner for _, row in rows),
        times(None if row.expires_at is None else instant(row.expires_at) for _, row in rows),
        texts(row.checksum for _, row in rows),
        blobs(row.value for _, row in rows),
    )


def _conditions(collection: str, wanted: Wanted) -> tuple[str, list[Any]]:
    where = "collection = %s"
    bound: list[Any] = [collection]
    if wanted.low:
        where += f" AND key {'>' if wanted.beyond else '>='} %s"
        bound.append(wanted.low)
    if wanted.high:
        where += " AND key < %s"
        bound.append(wanted.high)
    if wanted.keys:
        where += " AND key = ANY(%s)"
        bound.append(texts(wanted.keys))
    return where, bound
