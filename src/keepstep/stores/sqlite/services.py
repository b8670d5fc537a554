"""Services in a SQLite store: the shares of workers, and the runs that wait at a service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...model import Ask, AtService, GateInfo, Grant
from ...model.gate import SERVICE
from ...ports import ClaimRequest, instant
from .. import services
from .connection import Cursor
from .queues import QueueGround, move_gate, read_gates
from .rows import text_or_bytes

_SHARES = (
    "SELECT s.worker, s.held, s.need, s.since, w.id IS NULL FROM keepstep_share s"
    " LEFT JOIN keepstep_worker w ON w.id = s.worker AND w.gone_at IS NULL WHERE s.gate = ?"
)
_USERS = (
    "SELECT w.workflows FROM keepstep_share s JOIN keepstep_worker w ON w.id = s.worker"
    " AND w.gone_at IS NULL AND w.drain_at IS NULL WHERE s.gate = ?"
)
_ADD_SHARE = "INSERT INTO keepstep_share (gate, worker, held, need, since) VALUES (?, ?, ?, ?, ?)"
_END_SHARE = "DELETE FROM keepstep_share WHERE gate = ? AND worker = ?"
_NEXT_SERVICE = "SELECT min(gate) FROM keepstep_head WHERE worker IS NULL AND gate > ? AND gate < ?"
_PARKED = "FROM keepstep_head WHERE worker IS NULL AND gate = ? AND workflow = ?"
_DUE = f"SELECT run FROM keepstep_head WHERE {services.TIMED_SQL} AND due_at <= ? ORDER BY due_at LIMIT ?"
_NEXT_DUE = f"SELECT min(due_at) FROM keepstep_head WHERE {services.TIMED_SQL} AND due_at > ? AND due_at < ''"
_GO_ON = "UPDATE keepstep_head SET gate = NULL, since = NULL WHERE run = ?"
_GO_TO_QUEUE = (
    "UPDATE keepstep_head SET gate = NULL, due_at = min(coalesce(due_at, since), since), since = NULL WHERE run = ?"
)


class ParkedGround(QueueGround):
    """The runs that wait at one service, as a claim sees them."""

    def __init__(self, cursor: Cursor, service: str, request: ClaimRequest) -> None:
        self._cursor = cursor
        self._name = services.gate_text(service) or ""
        self._request = request
        self._due = []
        self._ready = [one for one in self._workflows() if one in request.workflows]

    def _pin(self, workflow: str) -> tuple[str, tuple[str, ...]]:
        pin, values = super()._pin(workflow)
        queues = self._request.queues
        if queues is None:
            return pin, values
        return f"{pin} AND queue IN ({', '.join('?' * len(queues))})", (*values, *sorted(queues))

    def waiting(self, service: str) -> AtService | None:
        """Return the number of runs that wait, and since when; None if none does."""
        since: list[float] = []
        for workflow in self._ready:
            pin, values = self._pin(workflow)
            most = services.MOST_COUNTED - len(since)
            rows = self._rows(f"SELECT since {_PARKED}{pin} LIMIT ?", (self._name, workflow, *values, most))
            since += [at for (at,) in rows if isinstance(at, float)]
        return AtService(service, len(since), instant(min(since))) if since else None


def parked_at(cursor: Cursor) -> list[str]:
    """Return the services at which runs wait, by one step of the index each."""
    found: list[str] = []
    gate = services.FIRST_SERVICE
    while True:
        ((gate,),) = cursor.execute(_NEXT_SERVICE, (gate, services.AFTER_SERVICES)).fetchall()
        if not isinstance(gate, str):
            return found
        found.append(services.service_in(gate) or "")


def users(cursor: Cursor, service: str) -> list[tuple[str, ...]]:
    """Return the workflows of each worker that uses a service, is not given up and does not drain."""
    return [services.workflows_in(text_or_bytes(text)) for (text,) in cursor.execute(_USERS, (service,)).fetchall()]


def service_gate(cursor: Cursor, service: str) -> GateInfo | None:
    """Return the gate of a service; None if nobody has declared it."""
    return next(iter(read_gates(cursor, SERVICE, service)), None)


def list_services(cursor: Cursor) -> list[GateInfo]:
    """Return the services with the shares of living workers, and the number of runs that wait there."""
    found: list[GateInfo] = []
    for gate in read_gates(cursor, SERVICE):
        rows = cursor.execute(_SHARES, (gate.name,)).fetchall()
        shares = tuple(services.share_of(row) for *row, is_gone in rows if not is_gone)
        waiting = "SELECT count(*), min(since) FROM keepstep_head WHERE worker IS NULL AND gate = ?"
        ((parked, since),) = cursor.execute(waiting, (services.gate_text(gate.name),)).fetchall()
        at = instant(since) if isinstance(since, float) else None
        found.append(replace(gate, shares=shares, parked=parked, parked_since=at))
    return found


# -- times of runs that wait at services -------------------------------------------------------------------------------


def timed_out(cursor: Cursor, now: float) -> list[str]:
    """Return runs that wait at a service and whose time has come."""
    return [run for (run,) in cursor.execute(_DUE, (now, services.TIMED)).fetchall()]


def next_times(cursor: Cursor, now: float) -> list[float]:
    """Return when the next run that waits at a service is due; empty if none is."""
    return [at for (at,) in cursor.execute(_NEXT_DUE, (now,)).fetchall() if isinstance(at, float)]


def go_on(cursor: Cursor, runs: Sequence[str]) -> None:
    """Let runs whose time has come wait at no service."""
    for run in runs:
        cursor.execute(_GO_ON, (run,))


def go_to_queue(cursor: Cursor, run: str) -> None:
    """Let a run wait in its queue, since the time from which it has waited at a service."""
    cursor.execute(_GO_TO_QUEUE, (run,))


# -- shares ------------------------------------------------------------------------------------------------------------


def pass_gates(cursor: Cursor, worker: str, asks: Sequence[Ask], now: float, *, writes: bool) -> list[Grant] | None:
    """Answer a worker. Without `writes`, return None if there is something to write."""
    grants: list[Grant] = []
    for ask in asks:
        gate = service_gate(cursor, ask.service)
        rows = cursor.execute(_SHARES, (ask.service,)).fetchall()
        shares = [services.share_of(row) for *row, is_gone in rows if not is_gone]
        passage = services.decide(gate or GateInfo(SERVICE, ask.service), shares, worker, ask, now)
        before = next((share for share in shares if share.worker == worker), None)
        is_moved = gate is not None and passage.gate != gate
        if is_moved or passage.share != before:
            if not writes:
                return None
            if is_moved:
                move_gate(cursor, passage.gate)
            for gone in [one for one, *_, is_gone in rows if is_gone] + [worker]:
                cursor.execute(_END_SHARE, (ask.service, gone))
            if passage.share is not None:
                values = (passage.share.held, passage.share.need, passage.share.since)
                cursor.execute(_ADD_SHARE, (ask.service, worker, *values))
        grants.append(passage.grant)
    return grants
