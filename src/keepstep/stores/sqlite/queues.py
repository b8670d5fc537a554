"""A queue with limits in a SQLite store: a few steps of an index for each question, however many runs wait."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ...model import GateInfo, QueueCounts
from ...model.gate import QUEUE
from ...ports import ClaimRequest, instant
from .. import gates
from ..claims import FREE_SQL
from ..queues import PRIORITIES, RIPENED, SHOWN_KEYS, Waiting
from .claims import Found, orphans
from .connection import Cursor
from .rows import RAW, text_or_bytes

_GATES = f"SELECT {', '.join(map(RAW.format, gates.GATE_COLUMNS))} FROM keepstep_gate WHERE kind = ?"
_PUT_GATE = (
    "INSERT INTO keepstep_gate (kind, name, declared, changed, log) VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, name)"
    " DO UPDATE SET declared = excluded.declared, changed = excluded.changed, log = excluded.log"
)
_MOVE_GATE = "UPDATE keepstep_gate SET tat = ?, turn = ?, parity = ?, breaker = ? WHERE kind = ? AND name = ?"
#: Runs that workers hold when their queue gets its first limits hold a place from then on.
_HOLD_PLACES = "UPDATE keepstep_head SET gate = queue WHERE worker IS NOT NULL AND queue = ? AND gate IS NULL"
_READY = "FROM keepstep_head WHERE worker IS NULL AND gate = ? AND workflow = ?"
_DUE = f"FROM keepstep_head WHERE {FREE_SQL} AND workflow = ? AND queue = ?"
_BEGUN = "(holds <> 0 OR (key IS NULL AND epoch > 0))"
_BEGUN_OF_KEY = "SELECT 1 FROM keepstep_head WHERE queue = ? AND key = ? AND holds = 1"
_RIPE = (
    f"SELECT run FROM (SELECT run, holds, key, epoch {_DUE}{{pin}} AND due_at <= ? ORDER BY due_at LIMIT {RIPENED})"
    f" WHERE NOT {_BEGUN}"
)
_RIPEN = "UPDATE keepstep_head SET gate = queue, since = due_at WHERE run = ?"


def read_gates(cursor: Cursor, kind: str, name: str | None = None) -> list[GateInfo]:
    """Return the gates of one kind, by name, or only the one with this name."""
    sql, values = (_GATES, (kind,)) if name is None else (f"{_GATES} AND name = ?", (kind, name))
    return [gates.gate_of([*map(text_or_bytes, row)]) for row in cursor.execute(sql, values).fetchall()]


def put_gate(cursor: Cursor, gate: GateInfo, *, is_new: bool) -> None:
    """Write the limits of a gate."""
    cursor.execute(_PUT_GATE, (gate.kind, gate.name, *gates.texts_of(gate)))
    if is_new and gate.kind == QUEUE:
        cursor.execute(_HOLD_PLACES, (gate.name,))
    elif gate.kind != QUEUE:
        move_gate(cursor, gate)


def move_gate(cursor: Cursor, gate: GateInfo) -> None:
    """Write where the rate, the turns, the spend and the breaker of a gate stand."""
    state = (gate.used_until, gate.turn, int(gate.line_next), gates.state_text(gate))
    cursor.execute(_MOVE_GATE, (*state, gate.kind, gate.name))


class QueueGround:
    """One queue as a claim sees it."""

    def __init__(self, cursor: Cursor, name: str, request: ClaimRequest, alive: Collection[str], now: float) -> None:
        self._cursor = cursor
        self._name = name
        self._request = request
        self._alive = alive
        self._now = now
        self._ready: list[str] = [one for one in self._workflows() if one in request.workflows]
        self._due: list[str] = [one for one in sorted(request.workflows) if self._has_due(one)]

    def _rows(self, sql: str, values: Sequence[Any]) -> list[Any]:
        found: list[Any] = self._cursor.execute(sql, values).fetchall()
        return found

    def _pin(self, workflow: str) -> tuple[str, tuple[str, ...]]:
        version = self._request.versions.get(workflow)
        return ("", ()) if version is None else (" AND version = ?", (version,))

    def _workflows(self) -> list[str]:
        """Return the workflows of runs that wait at the gate, by one step of the index each."""
        found: list[str] = []
        sql = "SELECT workflow FROM keepstep_head WHERE worker IS NULL AND gate = ? AND workflow > ?"
        while rows := self._rows(f"{sql} ORDER BY workflow LIMIT 1", (self._name, found[-1] if found else "")):
            found.append(rows[0][0])
        return found

    def _has_due(self, workflow: str) -> bool:
        return bool(self._rows(f"SELECT 1 {_DUE} AND due_at <= ? LIMIT 1", (workflow, self._name, self._now)))

    # -- runs whose time has come --------------------------------------------------------------------------------------

    def unripe(self) -> list[str]:
        """Return runs that have not begun, whose time has come, and that do not wait at the gate yet."""
        found: list[str] = []
        for workflow in self._due:
            pin, version = self._pin(workflow)
            found += [run for (run,) in self._rows(_RIPE.format(pin=pin), (workflow, self._name, *version, self._now))]
        return found

    def ripen(self) -> None:
        """Let runs whose time has come wait at the gate."""
        ripe = self.unripe()
        for run in ripe:
            self._cursor.execute(_RIPEN, (run,))
        if ripe:
            self._ready = [one for one in self._workflows() if one in self._request.workflows]

    # -- the ground of a decision --------------------------------------------------------------------------------------

    def driven(self) -> int:
        count, owner = 0, ""
        sql = "SELECT worker FROM keepstep_head WHERE gate = ? AND worker > ? ORDER BY worker LIMIT 1"
        while rows := self._rows(sql, (self._name, owner)):
            owner = rows[0][0]
            count += self._held_by(owner) if owner in self._alive else 0
        return count

    def driven_here(self) -> int:
        return self._held_by(self._request.worker)

    def _held_by(self, worker: str) -> int:
        sql = "SELECT count(*) FROM keepstep_head WHERE gate = ? AND worker = ?"
        return int(self._rows(sql, (self._name, worker))[0][0])

    def orphans(self, limit: int) -> Sequence[str]:
        return [str(one.run) for one in self.orphans_found(limit)]

    def orphans_found(self, limit: int) -> list[Found]:
        """Return the runs of dead owners."""
        request = self._request
        here = ClaimRequest(
            request.worker, request.workflows, limit, versions=request.versions, queues=frozenset({self._name})
        )
        return orphans(self._cursor, here, set(self._alive))

    def found(self, run: str) -> Found:
        """Return a run that was decided on."""
        sql = "SELECT status, CAST(updated_at AS REAL) FROM keepstep_head WHERE run = ?"
        ((status, updated_at),) = self._rows(sql, (run,))
        return Found((0, 0.0), run, status, updated_at)

    def queue_of(self, run: str) -> str:
        """Return the queue of a run."""
        return str(self._rows("SELECT queue FROM keepstep_head WHERE run = ?", (run,))[0][0])

    def holds_key(self, run: str) -> bool:
        """Whether a run need not wait for its key."""
        return bool(self._rows("SELECT key IS NULL OR holds <> 0 FROM keepstep_head WHERE run = ?", (run,))[0][0])

    def priorities(self) -> Sequence[int]:
        found: set[int] = set()
        for workflow in self._ready:
            found |= self._levels(f"{_READY}{self._pin(workflow)[0]}", (self._name, workflow, *self._pin(workflow)[1]))
        for workflow in self._due:
            pin, version = self._pin(workflow)
            where, values = f"{_DUE}{pin}", (workflow, self._name, *version)
            found |= self._levels(where, values)
            by_time = f"SELECT priority {where} AND due_at <= ? ORDER BY due_at LIMIT 100"
            found |= {level for (level,) in self._rows(by_time, (*values, self._now))}
        return sorted((one for one in found if isinstance(one, int)), reverse=True)[: 2 * PRIORITIES]

    def _levels(self, where: str, values: tuple[Any, ...]) -> set[int]:
        found: set[int] = set()
        below: Any = ""
        while len(found) < PRIORITIES:
            ((below,),) = self._rows(f"SELECT max(priority) {where} AND priority < ?", (*values, below))
            if not isinstance(below, int):
                break
            found.add(below)
        return found

    def line(self, priority: int, limit: int, *, fresh: bool) -> Sequence[Waiting]:
        found: list[tuple[float, str, bool]] = []
        for workflow in self._due:
            pin, version = self._pin(workflow)
            first = f"SELECT due_at, run, holds, key, epoch {_DUE}{pin} AND priority = ? AND due_at <= ?"
            sql = (
                f"SELECT due_at, run, epoch = 0 FROM ({first} ORDER BY due_at, run LIMIT {2 * RIPENED}) WHERE {_BEGUN}"
            )
            found += self._rows(f"{sql} LIMIT ?", (workflow, self._name, *version, priority, self._now, limit))
        for workflow in self._ready if fresh else ():
            pin, version = self._pin(workflow)
            sql = f"SELECT since, run, epoch = 0 {_READY}{pin} AND priority = ? AND key IS NULL ORDER BY since, number"
            found += self._rows(f"{sql} LIMIT ?", (self._name, workflow, *version, priority, limit))
        return [Waiting(run, bool(is_fresh)) for _, run, is_fresh in sorted(found)[:limit]]

    def keys(self, priority: int, after: str, limit: int, most: int) -> Sequence[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        ahead: dict[str, str | None] = dict.fromkeys(self._ready, after)
        known: dict[str, str] = {}
        while len(found) < limit:
            for workflow, last in list(ahead.items()):
                if last is not None and workflow not in known:
                    pin, version = self._pin(workflow)
                    sql = f"SELECT key {_READY}{pin} AND priority = ? AND key > ? ORDER BY key LIMIT 1"
                    rows = self._rows(sql, (self._name, workflow, *version, priority, last))
                    if rows:
                        known[workflow] = rows[0][0]
                    else:
                        ahead[workflow] = None
            if not known:
                break
            key = min(known.values())
            for workflow in [one for one, its_key in known.items() if its_key == key]:
                del known[workflow]
                ahead[workflow] = key
            found.append((key, self._begun(key, most)))
        return found

    def _begun(self, key: str, most: int) -> int:
        sql = f"SELECT count(*) FROM ({_BEGUN_OF_KEY} LIMIT ?)"
        return int(self._rows(sql, (self._name, key, most))[0][0]) if most else 0

    def behind(self, priority: int, keys: Sequence[str], each: int) -> dict[str, Sequence[Waiting]]:
        found: dict[str, Sequence[Waiting]] = {}
        for key in keys:
            rows: list[tuple[float, int, str, bool]] = []
            for workflow in self._ready:
                pin, version = self._pin(workflow)
                sql = f"SELECT since, number, run, epoch = 0 {_READY}{pin} AND priority = ? AND key = ?"
                values = (self._name, workflow, *version, priority, key, each)
                rows += self._rows(f"{sql} ORDER BY since, number LIMIT ?", values)
            found[key] = [Waiting(run, bool(is_fresh)) for _, _, run, is_fresh in sorted(rows)[:each]]
        return found

    # -- for people ----------------------------------------------------------------------------------------------------

    def counts(self) -> QueueCounts:
        """Return the numbers of runs that people see."""
        waiting = "SELECT count(*), min(due_at) FROM keepstep_head WHERE queue = ? AND worker IS NULL AND epoch = 0"
        ((count, oldest),) = self._rows(f"{waiting} AND status = 'queued'", (self._name,))
        keys = self._rows(
            "SELECT key, count(*) AS n FROM keepstep_head WHERE queue = ? AND holds = 1 AND key IS NOT NULL"
            " GROUP BY key ORDER BY n DESC, key LIMIT ?",
            (self._name, SHOWN_KEYS),
        )
        return QueueCounts(self.driven(), count, tuple(keys), None if oldest is None else instant(oldest))
