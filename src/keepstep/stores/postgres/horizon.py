"""Hindrances of vacuum, which keep dead rows: old transactions, prepared ones, replicas and replication slots."""

from __future__ import annotations

from typing import Any

from ...model import Hindrance
from .pool import Connection, quoted

#: Age in seconds from which a transaction is reported. Keepstep's own take milliseconds, and a backup minutes.
LONG_SECONDS = 300.0
#: Transactions by which a slot or a replica may be behind, as they tell no time.
MANY = 1_000_000
#: Bytes of log from which an unused slot is reported, because it fills the disk.
MUCH_LOG = 1_000_000_000

#: Sessions of this database. Vacuum itself holds nothing back.
_SESSIONS = (
    "SELECT pid, application_name, usename::text, state, extract(epoch FROM clock_timestamp() - xact_start)::float8"
    " FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND backend_type <> 'autovacuum worker' AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)"
    " AND xact_start < clock_timestamp() - %s * interval '1 second' ORDER BY xact_start"
)
_PREPARED = (
    "SELECT gid, owner::text, extract(epoch FROM clock_timestamp() - prepared)::float8 FROM pg_prepared_xacts"
    " WHERE database = current_database() AND prepared < clock_timestamp() - %s * interval '1 second' ORDER BY prepared"
)
_REPLICAS = (
    "SELECT pid, application_name, age(backend_xmin) FROM pg_stat_replication WHERE age(backend_xmin) > %s ORDER BY pid"
)
_SLOTS = (
    "SELECT slot_name::text, active, age(xmin), (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()"
    " ELSE pg_current_wal_lsn() END - restart_lsn)::float8 FROM pg_replication_slots"
    " WHERE age(xmin) > %(many)s OR NOT active AND (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()"
    " ELSE pg_current_wal_lsn() END - restart_lsn) > %(log)s ORDER BY slot_name"
)


def hindrances(connection: Connection) -> list[Hindrance]:
    """Return what holds vacuum back, or fills the disk with log, each with the statement that ends it."""
    found: list[Hindrance] = []

    def find(what: str, how: str) -> None:
        found.append(Hindrance(what, how))

    for pid, application, user, state, seconds in _rows(connection, _SESSIONS, (LONG_SECONDS,)):
        who = ", ".join(filter(None, (application or "unnamed", user and f"role {user}", state)))
        find(
            f"session {pid} ({who}) has a transaction that has been open for {_time(seconds)}",
            f"let it end, or end it: SELECT pg_terminate_backend({pid})",
        )
    for gid, owner, seconds in _rows(connection, _PREPARED, (LONG_SECONDS,)):
        name = "'" + gid.replace("'", "''") + "'"
        find(
            f"the transaction {gid!r} of role {owner} was prepared {_time(seconds)} ago and has not ended",
            f"end it: ROLLBACK PREPARED {name}, or COMMIT PREPARED {name}",
        )
    for pid, application, age in _rows(connection, _REPLICAS, (MANY,)):
        find(
            f"the replica {application or pid} has a query that needs rows from before the last {age:,} transactions",
            "end that query on the replica, or turn hot_standby_feedback off there",
        )
    for name, active, age, log in _rows(connection, _SLOTS, {"many": MANY, "log": MUCH_LOG}):
        behind = f"needs rows from before the last {age:,} transactions" if age else f"keeps {log / 1e9:.1f} GB of log"
        used = "its client is behind" if active else "nobody uses it"
        literal = "'" + name + "'"
        find(
            f"the replication slot {quoted(name)} {behind}, and {used}",
            f"let its client catch up, or drop it: SELECT pg_drop_replication_slot({literal})",
        )
    return found


def _rows(connection: Connection, sql: str, values: Any) -> list[Any]:
    return connection.execute(sql, values).fetchall()


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{rest} s"
