"""Whether a session of PostgreSQL belongs to whoever opened it, or a proxy gives each transaction another one.

A worker shows that it lives by a lock of its session. Behind a proxy that pools transactions that session is anybody's:
the proxy may close it while the worker lives, and others would take the worker for dead. PgBouncer says nothing of how
it pools, and with one client the same session comes every time; so what happens to a lock is tried.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

import psycopg

from ..errors import StoreError

#: How long a proxy may take to clean up a session whose client has left.
_CLEAN_SECONDS = 2.0

#: Who holds a lock, and whether that is whoever asks: then it is freed.
_HOLDER = (
    "SELECT pid = pg_backend_pid(), CASE WHEN pid = pg_backend_pid() THEN pg_advisory_unlock(%(key)s) END FROM pg_locks"
    " WHERE locktype = 'advisory' AND granted AND objsubid = 1"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND (classid::int8 << 32) + objid::int8 = %(key)s"
)


def check_own_session(
    connection: psycopg.Connection[Any], connect: Callable[[], psycopg.Connection[Any]], name: str
) -> None:
    """Raise if sessions are shared; `connect` makes another connection to the same place."""
    ((pid,),) = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchall()
    if pid == connection.info.backend_pid:  # as a rule; a proxy gives a number of its own
        return
    key = secrets.randbits(62)
    with contextlib.closing(connect()) as other:
        other.execute("SELECT pg_advisory_lock(%s)", (key,), prepare=False)
        held = _held_by_me(connection, key)
    if held is not False:  # it is gone already, or we have it, who never asked for it
        raise _shared(name)
    ends = time.monotonic() + _CLEAN_SECONDS
    while (held := _held_by_me(connection, key)) is not None:  # its client has left, and so should it
        if held or time.monotonic() > ends:
            raise _shared(name)
        time.sleep(0.005)


def _held_by_me(connection: psycopg.Connection[Any], key: int) -> bool | None:
    """Whether this session holds the lock; None if nobody does."""
    rows = connection.execute(_HOLDER, {"key": key}, prepare=False).fetchall()
    return rows[0][0] if rows else None


def _shared(name: str) -> StoreError:
    return StoreError(
        f"{name} is reached through a proxy that gives its sessions to several clients, such as PgBouncer with"
        " pool_mode = transaction: a worker that holds a lock in one of them would be taken for dead while it lives."
        " Connect to the server itself, have the proxy pool sessions (pool_mode = session), or add proxy=true to the"
        " URL: then no session is held, and a death is seen when a lease ends"
    )
