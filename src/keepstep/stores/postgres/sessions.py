"""Detection of shared sessions: whether a proxy gives each transaction another session of PostgreSQL.

A worker proves its life by a lock of its session. A proxy that pools transactions shares that session: it may close it
while the worker lives, and others would take the worker for dead. PgBouncer does not report its pool mode, and a single
client gets the same session every time. Therefore the behaviour of a lock is tested.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

import psycopg

from ...errors import StoreError

#: Time in seconds that a proxy may take to reset a session whose client has left.
_CLEAN_SECONDS = 2.0

#: Query for the holder of a lock, and whether this session is the holder; then the lock is released.
_HOLDER = (
    "SELECT pid = pg_backend_pid(), CASE WHEN pid = pg_backend_pid() THEN pg_advisory_unlock(%(key)s) END FROM pg_locks"
    " WHERE locktype = 'advisory' AND granted AND objsubid = 1"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND (classid::int8 << 32) + objid::int8 = %(key)s"
)


def check_own_session(
    connection: psycopg.Connection[Any], connect: Callable[[], psycopg.Connection[Any]], name: str
) -> None:
    """Raise if sessions are shared; `connect` opens another connection to the same address."""
    ((pid,),) = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchall()
    if pid == connection.info.backend_pid:  # the usual case; a proxy reports a pid of its own
        return
    key = secrets.randbits(62)
    with contextlib.closing(connect()) as other:
        other.execute("SELECT pg_advisory_lock(%s)", (key,), prepare=False)
        held = _held_by_me(connection, key)
    if held is not False:  # the lock is gone already, or this session has it without asking for it
        raise _shared(name)
    ends = time.monotonic() + _CLEAN_SECONDS
    while (held := _held_by_me(connection, key)) is not None:  # its client has left, so it should disappear
        if held or time.monotonic() > ends:
            raise _shared(name)
        time.sleep(0.005)


def _held_by_me(connection: psycopg.Connection[Any], key: int) -> bool | None:
    """Whether this session holds the lock; None if no session does."""
    rows = connection.execute(_HOLDER, {"key": key}, prepare=False).fetchall()
    return rows[0][0] if rows else None


def _shared(name: str) -> StoreError:
    return StoreError(
        f"{name} is behind a proxy that shares its sessions between clients, such as PgBouncer with"
        " pool_mode = transaction: a living worker could be marked dead."
        " Connect to the server itself, have the proxy pool sessions (pool_mode = session), or add proxy=true to the"
        " URL: then no session is held, and a dead worker is detected when its lease expires"
    )
