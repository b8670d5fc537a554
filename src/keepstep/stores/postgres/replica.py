"""Reads from a streaming replica: how far it must have come, and what happens when it is behind or away."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from ...errors import DefinitionError, StoreError, StoreUnavailable
from ...model import Run, RunPage, RunQuery, Signal
from ...ports import Clock, Row, Store
from .pool import Address, Connection, Connections
from .reads import Reads

T = TypeVar("T")

log = logging.getLogger("keepstep")

#: Seconds by which the answers of a replica may be behind the writes of other processes. Own writes are always in them.
LAG_SECONDS = 10.0
#: Seconds that a read waits until the replica has replayed what it must show.
CATCH_UP_SECONDS = 0.5
#: Seconds for which reads go to the primary before a replica that was behind or away is tried again.
AGAIN_SECONDS = 2.0
#: Seconds between two questions to the primary how far it has come.
MARK_SECONDS = 1.0
#: Seconds between two warnings for the same reason.
WARN_SECONDS = 60.0
_POLL_SECONDS = 0.01

#: Bytes of the log that a server has made durable, or replayed.
_WRITTEN = (
    "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END"
    " - '0/0')::bigint"
)
#: Bytes of the log that a replica has replayed, and when the last of the replayed transactions was committed.
_REPLAYED = (
    "SELECT (pg_last_wal_replay_lsn() - '0/0')::bigint, extract(epoch FROM pg_last_xact_replay_timestamp())::float8"
)
#: The facts that a server shares with its replicas alone: the cluster, the database and the table.
_IDENTITY = (
    "SELECT system_identifier, (SELECT oid FROM pg_database WHERE datname = current_database()),"
    " to_regclass(%s)::oid, pg_is_in_recovery() FROM pg_control_system()"
)


class _Behind(Exception):
    """The replica has not replayed what its answer must include."""


class _NoReplica(_Behind):
    """The URL leads to something else than a replica of this store."""


class _Identity(NamedTuple):
    cluster: int
    database: int
    table: int | None
    is_replica: bool


class Replica:
    """The connections to a replica, with the primary for when it cannot answer.

    An answer includes every earlier write of this process, and the writes of others up to `lag_seconds` ago. A replica
    that cannot promise that in time is left alone for a moment, and the primary answers.
    """

    def __init__(
        self,
        address: Address,
        connections: Connections,
        primary_address: Address,
        primary: Connections,
        *,
        clock: Clock,
        lag_seconds: float,
    ) -> None:
        if not lag_seconds > 0:
            raise DefinitionError(f"replica_lag_seconds must be greater than 0, got {lag_seconds}")
        if address.schema != primary_address.schema:
            raise DefinitionError(
                f"the replica must have the schema of the primary, {primary_address.schema!r}, got {address.schema!r}"
            )
        self.address, self.connections = address, connections
        self._primary_address, self._primary = primary_address, primary
        self._clock, self._lag_seconds = clock, lag_seconds
        self._mutex = threading.Lock()
        self._identity: _Identity | None = None
        self._checked: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._replayed: weakref.WeakKeyDictionary[Connection, int] = weakref.WeakKeyDictionary()
        self._has_written = False
        self._own = self._newest = 0  # what the replica must have replayed: own writes, and the primary's newest
        self._mark_at = 0.0
        self._left_until = 0.0
        self._warned = ("", 0.0)
        self._received, self._told, self._caught_up = 0, 0, 0
        self._look_at = 0.0

    def check(self) -> None:
        """Raise if the URL leads to something else than a replica of this store. One that is away is left for later."""
        try:
            self.connections.run(self._check, again=True)
        except _NoReplica as error:
            raise DefinitionError(str(error)) from None
        except (StoreUnavailable, _Behind) as error:
            self._leave(str(error))

    def wrote(self) -> None:
        """Note a write of this process, which every later answer must include."""
        self._has_written = True

    def give_up_silent(self, seconds: float) -> int:
        """End connections that have been silent for longer."""
        return self.connections.give_up_silent(seconds)

    def run(self, work: Callable[[Connection], T], *, again: bool = True, patience_seconds: float = 0.0) -> T:
        """Run read-only `work` with a connection to the replica, or to the primary if the replica cannot answer."""
        if self._may_be_tried():
            own, newest = self._marks()
            try:
                answer = self.connections.run(
                    lambda connection: self._read(connection, work, own, newest),
                    again=True,
                    patience_seconds=patience_seconds,
                )
            except (StoreUnavailable, _Behind) as error:
                self._leave(str(error))
            else:
                self._is_read_again()
                return answer
        return self._primary.run(work, again=again, patience_seconds=patience_seconds)

    def times_caught_up(self, received: int) -> int:
        """Return how often the replica has caught up with what the primary has told; readers then look again.

        `received` counts the notifications of the primary. They arrive before the replica has what they are about.
        """
        now = time.monotonic()
        with self._mutex:
            if now < self._look_at:
                return self._caught_up
            self._look_at = now + CATCH_UP_SECONDS
        try:
            if received != self._received:
                self._received, self._told = received, self._primary.run(_written, again=True)
            if self._told and (now < self._left_until or self.connections.run(_replayed, again=True)[0] >= self._told):
                self._told = 0
                self._caught_up += 1
        except StoreError:  # reads notice it, too
            pass
        return self._caught_up

    # -- how far it must have come -------------------------------------------------------------------------------------

    def _marks(self) -> tuple[int, int]:
        """Return how far the replica must have come for own writes, and for the newest writes of all."""
        with self._mutex:
            now, has_written = time.monotonic(), self._has_written
            if now >= self._mark_at or (has_written and self._newest):
                self._has_written, self._mark_at = False, now + MARK_SECONDS
                try:
                    self._newest = self._primary.run(_written, again=True)
                except StoreUnavailable:  # a primary that is away does not end what the replica can answer
                    self._has_written, self._mark_at = has_written, time.monotonic() + AGAIN_SECONDS
                    self._newest = 0
                else:
                    self._own = self._newest if has_written else self._own
            return self._own, self._newest

    def _read(self, connection: Connection, work: Callable[[Connection], T], own: int, newest: int) -> T:
        if connection not in self._checked:
            self._check(connection)
        if self._replayed.get(connection, 0) < max(own, newest):
            until = time.monotonic() + CATCH_UP_SECONDS
            while not self._has_come(connection, own, newest):
                if time.monotonic() > until:
                    raise _Behind(f"the replica {self.address.text} is behind by more than it may be{_ago(connection)}")
                time.sleep(_POLL_SECONDS)
        return work(connection)

    def _has_come(self, connection: Connection, own: int, newest: int) -> bool:
        replayed, committed_at = _replayed(connection)
        self._replayed[connection] = replayed
        is_recent = committed_at is not None and committed_at >= self._clock.now() - self._lag_seconds
        return replayed >= own and (replayed >= newest or is_recent)

    def _check(self, connection: Connection) -> None:
        """Raise unless a connection leads to a replica of this store that has its tables as they are now."""
        if self._identity is None:
            self._identity = self._primary.run(lambda one: _identity(one, self._primary_address), again=True)
        wanted, found = self._identity, _identity(connection, self.address)
        where, primary = self.address.text, self._primary_address.text
        if wanted != found._replace(table=found.table or wanted.table, is_replica=wanted.is_replica):
            raise _NoReplica(
                f"{where} is no replica of {primary}: it belongs to another store. A replica is a streaming copy of "
                "the whole server, with the same database and schema"
            )
        if not found.is_replica:
            raise _NoReplica(f"{where} is no replica: that server takes writes. Give the URL of a streaming replica")
        if found.table is None:
            raise _Behind(f"the replica {where} does not have the tables yet")
        there, here = (
            _schema(connection, self.address),
            self._primary.run(lambda one: _schema(one, self._primary_address), again=True),
        )
        if there != here:
            raise _Behind(f"the replica {where} has schema {there}, and the primary {here}: it has not replayed that")
        self._checked.add(connection)

    # -- whether it is read --------------------------------------------------------------------------------------------

    def _may_be_tried(self) -> bool:
        with self._mutex:
            now = time.monotonic()
            if now < self._left_until:
                return False
            if self._left_until:  # one reader tries it again; the others do not wait for that
                self._left_until = now + AGAIN_SECONDS
            return True

    def _leave(self, why: str) -> None:
        with self._mutex:
            now = time.monotonic()
            self._left_until = now + AGAIN_SECONDS
            before, at = self._warned
            is_new = before.partition(";")[0] != why.partition(";")[0] or now - at >= WARN_SECONDS
            self._warned = (why, now) if is_new else self._warned
        if is_new:
            log.warning("lists and pages are read from the primary: %s", why)

    def _is_read_again(self) -> None:
        if self._left_until:
            with self._mutex:
                self._left_until, self._warned = 0.0, ("", 0.0)
            log.info("lists and pages are read from the replica %s again", self.address.text)


class Looking:
    """A store for those who only look: its runs and their records come from a replica, all else from the primary."""

    def __init__(self, store: Store, replica: Replica) -> None:
        self._store = store
        self._reads = Reads(replica.address, replica, store.clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __repr__(self) -> str:
        return f"<replica of {self._store!r}>"

    def get_run(self, run_id: str) -> Run | None:
        """Return a run. One that the replica does not know may be new, so the primary is asked, too."""
        return self._reads.get_run(run_id) or self._store.get_run(run_id)

    def list_runs(self, query: RunQuery) -> RunPage:
        """Return one page of runs. For runs that are named and not in the replica, the primary is asked, as above."""
        page = self._reads.list_runs(query)
        if query.ids is not None and not query.status and len(page.runs) + len(page.unreadable) < len(query.ids):
            return self._store.list_runs(query)
        return page

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        return self._reads.list_checkpoints(run_id, after, limit, kinds)

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        return self._reads.list_signals(run_id, after, limit)


def _written(connection: Connection) -> int:
    ((written,),) = connection.execute(_WRITTEN).fetchall()
    return int(written)


def _replayed(connection: Connection) -> tuple[int, float | None]:
    ((replayed, committed_at),) = connection.execute(_REPLAYED).fetchall()
    return int(replayed or 0), committed_at


def _ago(connection: Connection) -> str:
    at = _replayed(connection)[1]
    if at is None:
        return ""
    return f"; the last commit that it has replayed was made at {time.strftime('%H:%M:%S UTC', time.gmtime(at))}"


def _identity(connection: Connection, address: Address) -> _Identity:
    ((cluster, database, table, is_replica),) = connection.execute(_IDENTITY, (address.table("meta"),)).fetchall()
    return _Identity(cluster, database, table, is_replica)


def _schema(connection: Connection, address: Address) -> str:
    rows = connection.execute(f"SELECT value FROM {address.table('meta')} WHERE name = 'schema'").fetchall()
    return rows[0][0] if rows else "0"
