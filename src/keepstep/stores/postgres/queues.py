"""A queue with limits in a PostgreSQL store: one statement for each question, each a few index steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ...model import GateInfo, QueueCounts
from ...ports import ClaimRequest
from .. import gates
from ..queues import PRIORITIES, RIPENED, SHOWN_KEYS, Waiting
from .pool import Address, Connection
from .rows import original, plain, texts

_GATE_COLUMNS = ", ".join(gates.GATE_COLUMNS)
_BEGUN = "(x.holds <> 0 OR (x.key IS NULL AND x.epoch > 0))"


class GateStatements:
    """The statements of one schema about gates and the runs that wait at them."""

    def __init__(self, address: Address) -> None:
        head, gate, worker = map(address.table, ("head", "gate", "worker"))
        self.list = f"SELECT {_GATE_COLUMNS} FROM {gate} WHERE kind = %s ORDER BY name"
        self.wait_for = f"SELECT {_GATE_COLUMNS} FROM {gate} WHERE kind = %s AND name = %s FOR UPDATE"
        # A gate that another client is at is not waited for: its claim serves the queue now.
        self.lock = f"{self.wait_for} SKIP LOCKED"
        self.put = (
            f"INSERT INTO {gate} AS g (kind, name, declared, changed, log) VALUES (%s, %s, %s, %s, %s)"
            " ON CONFLICT (kind, name) DO UPDATE SET declared = excluded.declared, changed = excluded.changed,"
            " log = excluded.log"
        )
        self.add = f"INSERT INTO {gate} (kind, name) VALUES (%s, %s) ON CONFLICT (kind, name) DO NOTHING"
        #: Runs that workers hold when their queue gets its first limits hold a place from then on.
        self.hold_places = (
            f"UPDATE {head} SET gate = queue WHERE worker IS NOT NULL AND queue = %s AND gate IS DISTINCT FROM queue"
        )
        self.move = f"UPDATE {gate} SET tat = %s, turn = %s, parity = %s, breaker = %s WHERE kind = %s AND name = %s"
        self.take_turn = f"UPDATE {gate} SET turn = %s, parity = %s WHERE kind = %s AND name = %s"
        asked = "asked AS MATERIALIZED (SELECT a.* FROM unnest(%(workflows)s, %(versions)s) a(workflow, version))"
        pinned = "(a.version IS NULL OR h.version = a.version)"
        ready = (
            f"h.worker IS NULL AND h.gate = %(queue)s AND h.workflow = a.workflow AND {pinned}"
            " AND (%(only)s::text[] IS NULL OR h.queue = ANY(%(only)s))"
        )
        here = (
            f"h.due_at IS NOT NULL AND h.gate IS NULL AND h.workflow = a.workflow AND h.queue = %(queue)s AND {pinned}"
        )
        # The casts choose the index, as in `claims.py`.
        due = f"h.worker IS NULL AND {here}"
        timed = f"(h.worker IS NULL)::int = 1 AND {here} AND h.due_at <= %(now)s"
        self.ripen = f"""
            WITH {asked},
            ripe AS MATERIALIZED (SELECT x.run FROM asked a CROSS JOIN LATERAL (
                SELECT h.run, h.holds, h.key, h.epoch FROM {head} h WHERE {timed} ORDER BY h.due_at LIMIT {RIPENED}) x
                WHERE NOT {_BEGUN}),
            locked AS MATERIALIZED (SELECT f.run FROM ripe r CROSS JOIN LATERAL (
                SELECT h.run FROM {head} h WHERE h.run = r.run AND (h.worker IS NULL)::int > 0
                FOR UPDATE SKIP LOCKED) f)
            UPDATE {head} h SET gate = h.queue, since = h.due_at FROM locked l WHERE h.run = l.run"""
        self.driven = (
            f"SELECT count(*) FROM {head} WHERE worker IS NOT NULL AND gate = %(queue)s AND worker <> ALL(%(dead)s)"
        )
        self.driven_here = f"SELECT count(*) FROM {head} WHERE gate = %(queue)s AND worker = %(worker)s"
        self.orphans = f"""
            WITH {asked} SELECT h.run FROM {head} h JOIN asked a ON a.workflow = h.workflow AND {pinned}
            WHERE h.worker = ANY(%(dead)s) AND h.queue = %(queue)s
            ORDER BY h.worker, h.workflow, h.run LIMIT %(limit)s"""

        def levels(free: str, name: str) -> str:
            return f"""
            (SELECT a.workflow, a.version, (SELECT h.priority FROM {head} h WHERE {free}
                ORDER BY h.priority DESC LIMIT 1) AS priority, 1 AS n FROM asked a
            UNION ALL
            SELECT a.workflow, a.version, (SELECT h.priority FROM {head} h WHERE {free} AND h.priority < a.priority
                ORDER BY h.priority DESC LIMIT 1), a.n + 1
            FROM {name} a WHERE a.priority IS NOT NULL AND a.n < {PRIORITIES})"""

        self.priorities = f"""
            WITH RECURSIVE {asked},
            waiting(workflow, version, priority, n) AS {levels(ready, "waiting")},
            line(workflow, version, priority, n) AS {levels(due, "line")}
            SELECT DISTINCT x.priority FROM (
                SELECT priority FROM waiting UNION ALL SELECT priority FROM line
                UNION ALL SELECT t.priority FROM asked a CROSS JOIN LATERAL (
                    SELECT h.priority FROM {head} h WHERE {timed} ORDER BY h.due_at LIMIT 100) t) x
            WHERE x.priority IS NOT NULL ORDER BY x.priority DESC LIMIT {2 * PRIORITIES}"""
        begun = f"""
            SELECT x.due_at AS at, x.run, x.epoch FROM asked a CROSS JOIN LATERAL (
                SELECT x.* FROM (
                    SELECT h.due_at, h.run, h.epoch, h.holds, h.key FROM {head} h
                    WHERE {due} AND h.priority = %(priority)s AND h.due_at <= %(now)s
                    ORDER BY h.due_at, h.run LIMIT {2 * RIPENED}) x WHERE {_BEGUN} LIMIT %(limit)s) x"""
        # The order names the key, which is NULL, because the planner reads the index in its own order only then.
        without_key = f"""
            SELECT x.since AS at, x.run, x.epoch FROM asked a CROSS JOIN LATERAL (
                SELECT h.since, h.run, h.epoch FROM {head} h WHERE {ready} AND h.priority = %(priority)s
                AND h.key IS NULL ORDER BY h.key, h.since, h.number LIMIT %(limit)s) x"""
        in_order = "ORDER BY l.at, l.run LIMIT %(limit)s"
        self.line_of_begun = f"WITH {asked} SELECT l.run, l.epoch = 0 FROM ({begun}) l {in_order}"
        self.line = f"WITH {asked} SELECT l.run, l.epoch = 0 FROM ({begun} UNION ALL {without_key}) l {in_order}"

        def next_key(after: str) -> str:
            return f"""(SELECT min(k.key) FROM asked a CROSS JOIN LATERAL (
                SELECT h.key FROM {head} h WHERE {ready} AND h.priority = %(priority)s AND h.key > {after}
                ORDER BY h.key LIMIT 1) k)"""

        self.keys = f"""
            WITH RECURSIVE {asked},
            walk(key, n) AS (
                SELECT {next_key("%(after)s")}, 1
                UNION ALL
                SELECT {next_key("w.key")}, w.n + 1
                FROM walk w WHERE w.key IS NOT NULL AND w.n < %(limit)s)
            SELECT w.key, (SELECT count(*) FROM (SELECT 1 FROM {head} h WHERE h.queue = %(queue)s AND h.key = w.key
                AND h.holds = 1 LIMIT %(most)s) x)
            FROM walk w WHERE w.key IS NOT NULL ORDER BY w.n"""
        self.behind = f"""
            WITH {asked} SELECT f.key, f.run, f.epoch = 0
            FROM unnest(%(keys)s) WITH ORDINALITY k(key, n) CROSS JOIN LATERAL (
                SELECT x.* FROM asked a CROSS JOIN LATERAL (
                    SELECT h.key, h.run, h.epoch, h.since, h.number FROM {head} h WHERE {ready}
                    AND h.priority = %(priority)s AND h.key = k.key ORDER BY h.since, h.number LIMIT %(each)s) x
                ORDER BY x.since, x.number LIMIT %(each)s) f
            ORDER BY k.n, f.since, f.number"""
        self.holds_key = f"SELECT key IS NULL OR holds <> 0, queue FROM {head} WHERE run = %s"
        self.twin = f"""
            SELECT t.run FROM {head} h JOIN {head} t ON t.queue = h.queue AND t.dedupe = h.dedupe AND t.run <> h.run
            AND t.status NOT IN ('completed', 'failed', 'cancelled')
            WHERE h.run = %s AND h.dedupe IS NOT NULL AND h.status IN ('completed', 'failed', 'cancelled')"""
        self.waiting = (
            f"SELECT count(*), min(due_at) FROM {head} WHERE queue = %(queue)s AND worker IS NULL AND epoch = 0"
            " AND status = 'queued'"
        )
        self.held_keys = (
            f"SELECT key, count(*) FROM {head} WHERE queue = %(queue)s AND holds = 1 AND key IS NOT NULL"
            f" GROUP BY key ORDER BY 2 DESC, 1 LIMIT {SHOWN_KEYS}"
        )
        self.workers = f"SELECT id FROM {worker} WHERE gone_at IS NULL"

    @staticmethod
    def may_have_runs(head: str) -> str:
        """Return an SQL condition: whether a run of the workflows in `asked` waits in the queue of gate `g`."""
        pinned = "(a.version IS NULL OR h.version = a.version)"
        due = "(h.worker IS NULL)::int = 1 AND h.due_at IS NOT NULL AND h.gate IS NULL AND h.due_at <= %(now)s"
        return (
            f"(EXISTS (SELECT 1 FROM asked a CROSS JOIN LATERAL (SELECT 1 FROM {head} h WHERE h.worker IS NULL"
            f" AND h.gate = g.name AND h.workflow = a.workflow AND {pinned} LIMIT 1) x)"
            f" OR EXISTS (SELECT 1 FROM asked a CROSS JOIN LATERAL (SELECT 1 FROM {head} h WHERE {due}"
            f" AND h.workflow = a.workflow AND h.queue = g.name AND {pinned} LIMIT 1) x))"
        )


def gate_from(row: Sequence[Any]) -> GateInfo:
    """Return the gate in a row."""
    return gates.gate_of([original(value) if isinstance(value, str) else value for value in row])


def moved(gate: GateInfo) -> tuple[Any, ...]:
    """Return the values of `move`: where the rate, the turns, the spend and the breaker of a gate stand."""
    state = plain(gates.state_text(gate))
    return gate.used_until, plain(gate.turn), int(gate.line_next), state, gate.kind, plain(gate.name)


class Moment(NamedTuple):
    """The state of a store in which one claim is made; the names in `limited` are as stored."""

    connection: Connection
    dead: list[str]
    limited: tuple[str, ...]
    now: datetime
    #: Those of `limited` in which runs of the request wait, as of the beginning of the claim.
    waiting: frozenset[str] = frozenset()


class QueueGround:
    """One queue as a claim sees it, after it has locked the queue's gate."""

    def __init__(self, moment: Moment, sql: GateStatements, name: str, request: ClaimRequest) -> None:
        self._connection = moment.connection
        self._sql = sql
        workflows = sorted(request.workflows)
        self._values = {
            "workflows": texts(workflows),
            "versions": texts([request.versions.get(workflow) for workflow in workflows]),
            "queue": plain(name),
            "worker": request.worker,
            "dead": texts(moment.dead),
            "now": moment.now,
            "only": None,
        }
        self._has_dead = bool(moment.dead)
        self._asked: dict[str, Any] = {}

    def _rows(self, sql: str, **values: Any) -> list[Any]:
        asked = self._asked.pop(sql, None) or self._connection.execute(sql, {**self._values, **values}, binary=True)
        found: list[Any] = asked.fetchall()
        return found

    def look(self) -> None:
        """Let runs whose time has come wait at the gate, and ask what every decision asks, in a pipeline."""
        self._connection.execute(self._sql.ripen, self._values)
        for sql in (self._sql.driven, self._sql.priorities):
            self._asked[sql] = self._connection.execute(sql, self._values, binary=True)

    def driven(self) -> int:
        return int(self._rows(self._sql.driven)[0][0])

    def driven_here(self) -> int:
        return int(self._rows(self._sql.driven_here)[0][0])

    def orphans(self, limit: int) -> Sequence[str]:
        return [run for (run,) in self._rows(self._sql.orphans, limit=limit)] if self._has_dead else []

    def priorities(self) -> Sequence[int]:
        return [priority for (priority,) in self._rows(self._sql.priorities)]

    def line(self, priority: int, limit: int, *, fresh: bool) -> Sequence[Waiting]:
        sql = self._sql.line if fresh else self._sql.line_of_begun
        return [Waiting(run, is_fresh) for run, is_fresh in self._rows(sql, priority=priority, limit=limit)]

    def keys(self, priority: int, after: str, limit: int, most: int) -> Sequence[tuple[str, int]]:
        found = self._rows(self._sql.keys, priority=priority, after=plain(after), limit=limit, most=most)
        return [(original(key), begun) for key, begun in found]

    def behind(self, priority: int, keys: Sequence[str], each: int) -> dict[str, Sequence[Waiting]]:
        found: dict[str, list[Waiting]] = {key: [] for key in keys}
        asked = texts([plain(key) for key in keys])
        for key, run, is_fresh in self._rows(self._sql.behind, priority=priority, keys=asked, each=each):
            found[original(key)].append(Waiting(run, is_fresh))
        return dict(found)

    def counts(self) -> QueueCounts:
        """Return the numbers of runs that people see."""
        ((count, oldest),) = self._rows(self._sql.waiting)
        keys = tuple((original(key), number) for key, number in self._rows(self._sql.held_keys))
        return QueueCounts(self.driven(), count, keys, None if oldest is None else oldest.astimezone(UTC))
