"""How a claim finds its runs in a PostgreSQL store: a few steps of an index each, however many runs there are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from ..errors import CheckpointCorrupt
from ..model import Claim, Claims, Lease, Status
from ..ports import ClaimRequest, Clock
from . import rules
from .postgres_connection import Address, Connection
from .postgres_rows import RUN_COLUMNS, RUN_WIDTH, plain, run_from, texts
from .watch import Watch, has_ended

log = logging.getLogger("keepstep")

#: Number of due runs below which a claim reads all of a workflow by time and sorts them by priority. It reads a longer
#: queue by priority. A claim also looks at so many more than it takes, since other workers may be taking the first.
FEW = 100
#: Maximum number of priorities of a longer queue that a claim looks up, one index step each. Bounds its cost where the
#: highest priorities belong to runs that are not due.
LEVELS = 64
#: How long the id of a dead worker is remembered once it owns nothing.
_REMEMBER_DEAD = timedelta(days=7)
_ACTIVE = "('running', 'recovering')"
#: The largest count to which the database can add one: a damaged count must not fail the claim of others.
_MOST = 2**63 - 2


class Called(NamedTuple):
    """A worker at the roll call. `dead` says that it may be given up, `leased` that its lease has not run out."""

    id: str
    dead: bool
    gone: bool
    leased: bool
    renewed: float


class RollCall(NamedTuple):
    """Who is there, and who owns runs."""

    workers: dict[str, Called]
    owners: frozenset[str]

    def dead_owners(self, me: str) -> list[str]:
        """Owners of runs who are dead, or whom nobody knows."""
        alive = {one.id for one in self.workers.values() if not one.dead} | {me}
        return sorted(self.owners - alive)

    def to_bury(self, me: str) -> list[Called]:
        """Workers that must be given up for dead."""
        return [one for one in self.workers.values() if one.dead and not one.gone and one.id != me]


class Claimer:
    """Finds and leases runs for the workers of one store."""

    def __init__(self, address: Address, clock: Clock, watch: Watch) -> None:
        self._clock = clock
        self._watch = watch
        self._sql = _Statements(address)

    # -- who lives -----------------------------------------------------------------------------------------------------

    def roll_call(self, connection: Connection, me: str = "") -> RollCall:
        """Who may be given up for dead, and who owns runs; all at one moment.

        A lost session proves nothing: it is the path to the server that was cut, more often than not.
        """
        rows = connection.execute(self._sql.roll_call, (me,), binary=True).fetchall()
        self._watch.observe({row[0]: _mark(*row[1:3]) for row in rows if row[0] is not None})
        boot_id, now = self._clock.boot()[0], self._clock.now()
        workers: dict[str, Called] = {}
        for worker, boot, renewed, gone, lease, process, _ in rows:
            if worker is not None:
                dead = gone or boot != boot_id or self._watch.is_silent(me, worker, lease) or has_ended(process)
                leased = not dead and now - renewed <= self._watch.lease_of(lease)
                workers[worker] = Called(worker, dead, gone, leased, renewed)
        return RollCall(workers, frozenset(rows[0][6]))

    def observe(self, connection: Connection) -> None:
        """Note the heartbeats of all workers."""
        rows = connection.execute(self._sql.beats, binary=True)
        self._watch.observe({worker: _mark(boot, renewed) for worker, boot, renewed in rows})

    # -- claiming ------------------------------------------------------------------------------------------------------

    def claim(self, connection: Connection, request: ClaimRequest, now: datetime) -> Claims:
        """Lease runs whose owner is dead, and then those that are due."""
        called = self.roll_call(connection, request.worker)
        me = called.workers.get(request.worker)
        if me is None or me.gone:
            return Claims()
        dead, bury = called.dead_owners(request.worker), called.to_bury(request.worker)
        if bury:
            buried = self._bury(connection, bury, now)
            living = {one.id for one in bury} - buried
            dead = [owner for owner in dead if owner not in living]
        if request.run is not None:
            return Claims(self._by_name(connection, request, dead, now))
        claims: tuple[Claim, ...] = ()
        limit = max(request.limit, 0)
        if dead and request.workflows:
            claims = self._orphans(connection, request, dead, limit, now)
        due, later = self._due(connection, request, limit - len(claims), now)
        return Claims((*claims, *due), later)

    def _bury(self, connection: Connection, dead: list[Called], now: datetime) -> set[str]:
        """Give up for dead who has not renewed its lease since it was found so."""
        ids, seen = [one.id for one in dead], [one.renewed for one in dead]
        rows = connection.execute(self._sql.bury, (now, texts(ids), seen)).fetchall()
        connection.execute(self._sql.forget, (now - _REMEMBER_DEAD,))
        return {worker for (worker,) in rows}

    def _orphans(
        self, connection: Connection, request: ClaimRequest, dead: list[str], limit: int, now: datetime
    ) -> tuple[Claim, ...]:
        values = (*_asked(request), texts(dead), limit, request.worker, now)
        return self._taken(connection, request.worker, connection.execute(self._sql.orphans, values, binary=True))

    def _due(
        self, connection: Connection, request: ClaimRequest, limit: int, now: datetime
    ) -> tuple[tuple[Claim, ...], datetime | None]:
        if not request.workflows:
            return (), None
        values = {"now": now, "limit": limit, "worker": request.worker}
        values["workflows"], values["versions"] = _asked(request)
        rows = connection.execute(self._sql.due, values, binary=True).fetchall()
        later = rows[0][-1]
        claims = self._taken(connection, request.worker, [row[:-1] for row in rows if row[1] is not None])
        return claims, later.astimezone(UTC) if isinstance(later, datetime) else None  # which may be infinity

    def _by_name(
        self, connection: Connection, request: ClaimRequest, dead: list[str], now: datetime
    ) -> tuple[Claim, ...]:
        statuses = [status.value for status in Status if rules.claimable_by_name(status, request.statuses)]
        values = (plain(request.run or ""), texts(statuses), texts(dead), request.worker, now)
        return self._taken(connection, request.worker, connection.execute(self._sql.by_name, values, binary=True))

    def _taken(self, connection: Connection, worker: str, rows: Any) -> tuple[Claim, ...]:
        """The claims in rows; a run whose rows cannot be read is set aside, so that it does not stop the others."""
        claims: list[Claim] = []
        for row in list(rows):
            try:
                claims.append(_claim(row, worker))
            except (ValueError, CheckpointCorrupt) as error:
                log.error("run %s is set aside: %s", row[1], error)  # noqa: TRY400 - said briefly
                connection.execute(self._sql.put_aside, (row[1],))
        return tuple(claims)


def _mark(boot: str, renewed: float) -> tuple[str, str]:
    """What changes with every heartbeat; as text, since a damaged number may not even equal itself."""
    return boot, str(renewed)


def _claim(row: Sequence[Any], worker: str) -> Claim:
    owner, before, since = row[RUN_WIDTH : RUN_WIDTH + 3]
    old = Status(before)
    run = run_from(row[:RUN_WIDTH])
    if run.epoch > _MOST:
        raise CheckpointCorrupt(f"run {run.id!r}: its epoch {run.epoch} cannot grow")
    return Claim(run, Lease(run.id, worker, run.epoch), owner, old, since.astimezone(UTC))


def _asked(request: ClaimRequest) -> tuple[Any, Any]:
    workflows = sorted(request.workflows)
    return texts(workflows), texts([request.versions.get(workflow) for workflow in workflows])


class _Statements:
    """The statements of one schema by which runs are claimed."""

    def __init__(self, address: Address) -> None:
        head, run, worker = map(address.table, ("head", "run", "worker"))
        self.roll_call = f"""
            WITH RECURSIVE owner(id) AS (
                (SELECT worker FROM {head} WHERE worker IS NOT NULL ORDER BY worker LIMIT 1)
                UNION ALL
                SELECT (SELECT h.worker FROM {head} h WHERE h.worker > o.id ORDER BY h.worker LIMIT 1)
                FROM owner o WHERE o.id IS NOT NULL)
            SELECT w.id, w.boot, w.boot_seconds, w.gone_at IS NOT NULL, w.lease_seconds, w.process,
                ARRAY(SELECT id FROM owner WHERE id IS NOT NULL)
            FROM (SELECT 1) one LEFT JOIN {worker} w ON w.gone_at IS NULL OR w.id = %s"""
        self.beats = f"SELECT id, boot, boot_seconds FROM {worker} WHERE gone_at IS NULL"
        self.bury = (
            f"UPDATE {worker} w SET gone_at = %s FROM unnest(%s, %s::float8[]) i(id, seen)"
            f" WHERE w.id = i.id AND w.gone_at IS NULL AND w.boot_seconds = i.seen RETURNING w.id"
        )
        self.forget = (
            f"DELETE FROM {worker} w WHERE w.gone_at < %s AND NOT EXISTS (SELECT 1 FROM {head} h WHERE h.worker = w.id)"
        )
        self.put_aside = (
            f"UPDATE {head} SET status = 'set aside', worker = NULL, due_at = NULL, wakes = '' WHERE run = %s"
        )
        take = (
            f"UPDATE {head} h SET epoch = least(h.epoch, {_MOST}) + 1, worker = %(worker)s, due_at = NULL, wakes = '',"
            f" updated_at = %(now)s,"
        )
        over = (
            f" status = CASE WHEN f.worker IS NOT NULL AND f.status IN {_ACTIVE} THEN 'recovering' ELSE 'running' END,"
            f" recoveries = least(h.recoveries, {_MOST})"
            f" + CASE WHEN f.worker IS NOT NULL AND f.status IN {_ACTIVE} THEN 1 ELSE 0 END"
            f" FROM found f WHERE h.run = f.run"
            f" RETURNING h.*, f.worker AS owner, f.status AS before, f.updated_at AS since"
        )
        take_over = take.replace("%(worker)s", "%s").replace("%(now)s", "%s") + over
        shown = f"SELECT {RUN_COLUMNS}, h.owner, h.before, h.since FROM taken h LEFT JOIN {run} r ON r.id = h.run"
        self.orphans = f"""
            WITH asked AS (SELECT * FROM unnest(%s, %s) a(workflow, version)),
            found AS (
                SELECT h.run, h.status, h.worker, h.updated_at FROM {head} h JOIN asked a ON a.workflow = h.workflow
                WHERE h.worker = ANY(%s) AND (a.version IS NULL OR a.version = h.version)
                ORDER BY h.worker, h.workflow, h.run LIMIT %s FOR UPDATE OF h SKIP LOCKED),
            taken AS ({take_over})
            {shown} ORDER BY h.owner, h.workflow, h.run"""
        self.by_name = f"""
            WITH found AS (
                SELECT h.run, h.status, h.worker, h.updated_at FROM {head} h WHERE h.run = %s
                AND h.status = ANY(%s) AND (h.worker IS NULL OR h.worker = ANY(%s)) FOR UPDATE),
            taken AS ({take_over})
            {shown}"""
        free = "h.worker IS NULL AND h.due_at IS NOT NULL AND h.workflow = l.workflow"
        # The casts choose the index, whatever the planner knows of the table: the first fits only the one by time, and
        # the second fits none, so that a run is found by its key.
        timed = "(h.worker IS NULL)::int = 1 AND h.due_at IS NOT NULL AND h.workflow = l.workflow"
        still_free = "(h.worker IS NULL)::int > 0 AND h.due_at <= %(now)s"
        pinned = "(l.version IS NULL OR h.version = l.version)"
        found = "h.run, h.status, h.worker, h.updated_at, h.priority, h.due_at"
        due = f"h.due_at <= %(now)s AND {pinned}"
        highest = f"SELECT h.priority FROM {head} h WHERE {free}"
        enough = f"%(limit)s + {FEW}"
        seen = (
            f"(SELECT count(*) FROM (SELECT 1 FROM {head} h WHERE {free} AND {due} AND h.priority = n.priority"
            f" ORDER BY h.due_at, h.run LIMIT {enough}) h)"
        )
        self.due = f"""
            WITH RECURSIVE queue AS MATERIALIZED (
                SELECT l.workflow, l.version, (
                    SELECT count(*) FROM (SELECT 1 FROM {head} h WHERE {timed} AND {due}
                    ORDER BY h.due_at LIMIT {FEW}) h) < {FEW} AS short
                FROM unnest(%(workflows)s, %(versions)s) l(workflow, version)),
            level AS (
                SELECT l.workflow, l.version, 1 AS n, n.priority, {seen} AS seen
                FROM queue l CROSS JOIN LATERAL ({highest} ORDER BY h.priority DESC LIMIT 1) n WHERE NOT l.short
                UNION ALL
                SELECT l.workflow, l.version, l.n + 1, n.priority, l.seen + {seen}
                FROM level l CROSS JOIN LATERAL (
                    {highest} AND h.priority < l.priority ORDER BY h.priority DESC LIMIT 1) n
                WHERE l.seen < {enough} AND l.n < {LEVELS}),
            rest AS (
                SELECT l.workflow, l.version, NULL::bigint AS below FROM queue l WHERE l.short
                UNION ALL
                SELECT l.workflow, l.version, l.priority FROM level l WHERE l.n = {LEVELS} AND l.seen < {enough}),
            oldest AS MATERIALIZED (
                SELECT o.* FROM rest l CROSS JOIN LATERAL (
                    SELECT h.run, h.priority, h.due_at FROM {head} h
                    WHERE {timed} AND {due} AND (l.below IS NULL OR h.priority < l.below)
                    ORDER BY h.due_at LIMIT {FEW}) o
                ORDER BY o.priority DESC, o.due_at, o.run),
            ready AS (
                SELECT f.* FROM level l CROSS JOIN LATERAL (
                    SELECT {found} FROM {head} h WHERE {free} AND {due} AND h.priority = l.priority
                    ORDER BY h.due_at, h.run LIMIT %(limit)s FOR UPDATE SKIP LOCKED) f
                UNION ALL
                SELECT g.* FROM (
                    SELECT f.* FROM oldest o CROSS JOIN LATERAL (
                        SELECT {found} FROM {head} h WHERE h.run = o.run AND {still_free} FOR UPDATE SKIP LOCKED) f
                    LIMIT %(limit)s) g),
            found AS (SELECT * FROM ready ORDER BY priority DESC, due_at, run LIMIT %(limit)s),
            taken AS ({take} status = 'running' FROM found f WHERE h.run = f.run
                RETURNING h.*, f.worker AS owner, f.status AS before, f.updated_at AS since, f.due_at AS was_due),
            later AS (
                SELECT f.due_at FROM queue l CROSS JOIN LATERAL (
                    SELECT h.due_at FROM {head} h WHERE {timed} AND {pinned} AND h.due_at > %(now)s
                    ORDER BY h.due_at LIMIT 1) f)
            SELECT {RUN_COLUMNS}, h.owner, h.before, h.since, (SELECT min(due_at) FROM later)
            FROM (SELECT 1) one LEFT JOIN taken h ON true LEFT JOIN {run} r ON r.id = h.run
            ORDER BY h.priority DESC, h.was_due, h.run"""
