"""Services in a PostgreSQL store: the shares of workers, and the runs that wait at a service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ...model import Ask, AtService, GateInfo, Grant, Share
from ...model.gate import SERVICE
from ...ports import ClaimRequest, instant
from .. import services
from .pool import NOT_FLUSHED, Address, Connection
from .queues import GateStatements, Moment, QueueGround, gate_from, moved
from .rows import plain, texts


class ServiceStatements:
    """The statements of one schema about services."""

    def __init__(self, address: Address) -> None:
        head, share, worker = map(address.table, ("head", "share", "worker"))
        gates = GateStatements(address)
        self.gate = gates.wait_for.removesuffix(" FOR UPDATE")
        self._lock, self._move = gates.wait_for, gates.move
        self._list = gates.list
        self._is_alive = f"SELECT count(*) FROM {worker} WHERE id = %s AND gone_at IS NULL"
        self._shares = (
            f"SELECT s.worker, s.held, s.need, s.since, w.id IS NULL FROM {share} s"
            f" LEFT JOIN {worker} w ON w.id = s.worker AND w.gone_at IS NULL WHERE s.gate = %s ORDER BY s.worker"
        )
        self._put_share = (
            f"INSERT INTO {share} (gate, worker, held, need, since) VALUES (%s, %s, %s, %s, %s)"
            " ON CONFLICT (gate, worker) DO UPDATE SET held = excluded.held, need = excluded.need,"
            " since = excluded.since"
        )
        self._end_shares = f"DELETE FROM {share} WHERE gate = %s AND worker = ANY(%s)"
        self._users = (
            f"SELECT s.gate, w.workflows FROM {share} s JOIN {worker} w ON w.id = s.worker"
            " AND w.gone_at IS NULL AND w.drain_at IS NULL"
        )
        self._waiting_for_people = f"SELECT count(*), min(since) FROM {head} WHERE worker IS NULL AND gate = %s"
        self._go_on = (
            f"UPDATE {head} SET gate = NULL, since = NULL WHERE run = ANY(ARRAY(SELECT run FROM {head}"
            f" WHERE {services.TIMED_SQL} AND due_at <= %s ORDER BY due_at LIMIT {services.TIMED}"
            " FOR UPDATE SKIP LOCKED))"
        )
        self._next_due = f"SELECT due_at FROM {head} WHERE {services.TIMED_SQL} AND due_at > %s ORDER BY due_at LIMIT 1"
        self.go_to_queue = (
            f"UPDATE {head} SET gate = NULL, since = NULL, due_at = least(coalesce(due_at, since), since)"
            " WHERE run = %s AND worker IS NULL AND gate = %s"
        )
        self.queues_of = f"SELECT run, queue FROM {head} WHERE run = ANY(%s)"
        self.parked = (
            f"SELECT x.since FROM unnest(%(workflows)s, %(versions)s) a(workflow, version) CROSS JOIN LATERAL ("
            f"SELECT h.since FROM {head} h WHERE h.worker IS NULL AND h.gate = %(queue)s AND h.workflow = a.workflow"
            " AND (a.version IS NULL OR h.version = a.version)"
            " AND (%(only)s::text[] IS NULL OR h.queue = ANY(%(only)s)) AND h.since IS NOT NULL"
            f" ORDER BY h.priority, h.key, h.since, h.number LIMIT {services.MOST_COUNTED}) x"
            f" LIMIT {services.MOST_COUNTED}"
        )

    # -- runs that wait ------------------------------------------------------------------------------------------------

    def let_timed_go_on(self, connection: Connection, now: datetime) -> datetime | None:
        """Let runs whose time has come wait at no service. Return when the next one is due."""
        next_due = connection.execute(self._next_due, (now,), binary=True).fetchall()
        connection.execute(self._go_on, (now,))
        at = next_due[0][0] if next_due else None
        return at.astimezone(UTC) if isinstance(at, datetime) else None  # a damaged time may be infinity

    def users(self, connection: Connection) -> dict[str, list[tuple[str, ...]]]:
        """Return by service the workflows of each worker that uses it, is not given up and does not drain."""
        found: dict[str, list[tuple[str, ...]]] = {}
        for gate, text in connection.execute(self._users, binary=True).fetchall():
            found.setdefault(gate, []).append(services.workflows_in(text))
        return found

    # -- people --------------------------------------------------------------------------------------------------------

    def list_all(self, connection: Connection) -> list[GateInfo]:
        """Return the services with the shares of living workers, and the number of runs that wait there."""
        found: list[GateInfo] = []
        for gate in [gate_from(row) for row in connection.execute(self._list, (SERVICE,), binary=True).fetchall()]:
            rows = connection.execute(self._shares, (plain(gate.name),), binary=True).fetchall()
            shares = tuple(_share(row) for row in rows if not row[-1])
            asked = (plain(services.gate_text(gate.name) or ""),)
            ((parked, since),) = connection.execute(self._waiting_for_people, asked, binary=True).fetchall()
            at = since.astimezone(UTC) if isinstance(since, datetime) else None
            found.append(replace(gate, shares=shares, parked=parked, parked_since=at))
        return found

    # -- shares --------------------------------------------------------------------------------------------------------

    def pass_gates(self, connection: Connection, worker: str, asks: Sequence[Ask], now: datetime) -> list[Grant]:
        """Answer a worker, each ask in a transaction of its own that need not be flushed."""
        if not connection.execute(self._is_alive, (worker,), binary=True).fetchall()[0][0]:
            return [services.refused(ask) for ask in asks]
        return [self._pass_gate(connection, worker, ask, now) for ask in asks]

    def _pass_gate(self, connection: Connection, worker: str, ask: Ask, now: datetime) -> Grant:
        # Most asks tell nothing new. Its own share is only written by its worker, so that it is read without a lock.
        grant = self._answer(connection, worker, ask, now, self.gate, writes=False)
        if grant is not None:
            return grant
        # The gate is locked by a statement before the one that reads the shares, which then sees those of others.
        connection.execute("BEGIN")
        connection.execute(f"SELECT {NOT_FLUSHED}")
        grant = self._answer(connection, worker, ask, now, self._lock, writes=True)
        connection.execute("COMMIT")
        return grant or services.refused(ask)

    def _answer(
        self, connection: Connection, worker: str, ask: Ask, now: datetime, gate_sql: str, *, writes: bool
    ) -> Grant | None:
        name = plain(ask.service)
        with connection.pipeline():
            found = connection.execute(gate_sql, (SERVICE, name), binary=True)
            stored = connection.execute(self._shares, (name,), binary=True)
            gates, rows = found.fetchall(), stored.fetchall()
        gate = gate_from(gates[0]) if gates else GateInfo(SERVICE, ask.service)
        shares = [_share(row) for row in rows if not row[-1]]
        before = next((share for share in shares if share.worker == worker), None)
        passage = services.decide(gate, shares, worker, ask, now.timestamp())
        is_moved = bool(gates) and passage.gate != gate
        if not is_moved and passage.share == before:
            return passage.grant
        if not writes:
            return None
        with connection.pipeline():
            if is_moved:
                connection.execute(self._move, moved(passage.gate))
            gone = [row[0] for row in rows if row[-1]] + ([] if passage.share is not None else [worker])
            if gone:
                connection.execute(self._end_shares, (name, texts(gone)))
            if passage.share is not None and passage.share != before:
                connection.execute(self._put_share, (name, *_share_values(passage.share)))
        return passage.grant


def _share(row: Sequence[Any]) -> Share:
    worker, held, need, since, _ = row
    at = since.timestamp() if isinstance(since, datetime) else None
    return services.share_of((worker, held, need, at))


def _share_values(share: Share) -> tuple[Any, ...]:
    since = None if share.since is None else instant(share.since)
    return share.worker, share.held, share.need, since


class ParkedGround(QueueGround):
    """The runs that wait at one service, as a claim sees them."""

    def __init__(self, moment: Moment, sql: GateStatements, service: str, request: ClaimRequest) -> None:
        super().__init__(moment, sql, services.gate_text(service) or "", request)
        self._service = service
        if request.queues is not None:
            self._values["only"] = texts(sorted(map(plain, request.queues)))

    def waiting(self, sql: ServiceStatements) -> AtService | None:
        """Return the number of runs that wait, and since when; None if none does."""
        since = [at for (at,) in self._rows(sql.parked) if isinstance(at, datetime)]
        return AtService(self._service, len(since), min(since).astimezone(UTC)) if since else None
