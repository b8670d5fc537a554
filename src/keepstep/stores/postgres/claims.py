"""Claims in a PostgreSQL store: each takes a few index steps, however many runs there are."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from ...errors import CheckpointCorrupt
from ...model import FINISHED, AtService, Claim, Claims, GateInfo, Status
from ...model.gate import QUEUE, SERVICE
from ...model.keepers import KEEPER_WORKFLOW
from ...ports import ClaimRequest, Clock, instant
from .. import claims, queues, rules, services
from ..claims import FEW, LEVELS
from ..watch import Watch, has_ended
from .lookout import Lookouts, Post
from .pool import NOT_FLUSHED, Address, Connection
from .queues import GateStatements, Moment, QueueGround, gate_from, moved
from .rows import RUN_COLUMNS, RUN_WIDTH, original, plain, run_from, texts
from .services import ParkedGround, ServiceStatements

log = logging.getLogger("keepstep")

#: Time to remember the id of a dead worker after its last run was taken over.
_REMEMBER_DEAD = timedelta(days=7)
#: A request for no run, to ask for the liveness of workers alone.
_NOTHING = ClaimRequest("")
#: Largest count that the database can increment. A damaged count must not fail the claim of other runs.
_MOST = 2**63 - 2


class WorkerLiveness(NamedTuple):
    """The liveness of one worker. `dead`: it may be marked dead; `leased`: its lease has not expired."""

    id: str
    dead: bool
    gone: bool
    leased: bool
    renewed: float
    process: str = ""
    #: Whether it knows the same workflows as the worker that asks.
    alike: bool = False


class Liveness(NamedTuple):
    """The liveness of all workers, and the owners of runs."""

    workers: dict[str, WorkerLiveness]
    owners: frozenset[str]
    #: The queues with limits.
    limited: tuple[str, ...] = ()
    #: The services at which runs wait.
    parked_at: tuple[str, ...] = ()
    #: The queues with limits in which runs of the request wait.
    waiting: frozenset[str] = frozenset()
    #: When the first free run of the request in a queue without limits is due, which may have passed.
    next_due_at: datetime | None = None

    def may_have_runs(self, now: datetime) -> bool:
        """Whether there may be runs to claim beside those of dead workers."""
        return bool(self.parked_at or self.waiting) or (self.next_due_at is not None and self.next_due_at <= now)

    def dead_owners(self, me: str) -> list[str]:
        """Return owners of runs that are dead or unknown."""
        alive = {one.id for one in self.workers.values() if not one.dead} | {me}
        return sorted(self.owners - alive)

    def to_mark_dead(self, me: str) -> list[WorkerLiveness]:
        """Return the workers to be marked dead."""
        return [one for one in self.workers.values() if one.dead and not one.gone and one.id != me]


class Claimer:
    """Finds and leases runs for the workers of one store."""

    def __init__(self, address: Address, clock: Clock, watch: Watch, lookouts: Lookouts) -> None:
        self._clock = clock
        self._lookouts = lookouts
        self._watch = watch
        self._finding = {by_queue: _Finding(address, by_queue=by_queue) for by_queue in (False, True)}
        self._sql = _Statements(address, self._finding)
        self._gates = GateStatements(address)
        self._services = ServiceStatements(address)
        self._claims_made = 0
        #: The queues with limits whose last claim gave runs, so that more are expected there.
        self._busy: set[str] = set()
        #: The queues with limits, as of the last claim.
        self.limited: frozenset[str] = frozenset()

    # -- liveness ------------------------------------------------------------------------------------------------------

    def liveness_of_workers(
        self, connection: Connection, me: str = "", request: ClaimRequest = _NOTHING, post: Post | None = None
    ) -> Liveness:
        """Return the dead workers and the owners of runs, all as of one moment. This is the roll call.

        A lost session proves nothing: usually only the network path to the server was cut.
        """
        renewed = "" if post is None else post.next_text()
        values = {
            **self._asked(me, request),
            "post": "" if post is None else post.name,
            "before": "" if post is None else post.text,
            "after": renewed,
        }
        rows = connection.execute(self._sql.roll_call[request.queues is not None], values, binary=True).fetchall()
        facts = next(row for row in rows if row[0] is None)
        rows.remove(facts)
        workers = self.judged(me, rows)
        owners, limited, parked, waiting, stored, due_at, _ = facts[7:]
        if post is not None:
            post.seen(renewed if stored == post.text else stored)
        due_at = due_at.astimezone(UTC) if isinstance(due_at, datetime) else None  # it may be infinity
        return Liveness(workers, frozenset(owners), tuple(limited), _services(parked), frozenset(waiting), due_at)

    def judged(self, me: str, rows: Sequence[Sequence[Any]]) -> dict[str, WorkerLiveness]:
        """Judge which workers are alive; a row begins with id, boot, heartbeat, whether gone, lease, process, alike."""
        self._watch.observe({row[0]: _mark(*row[1:3]) for row in rows})
        boot_id, now = self._clock.boot()[0], self._clock.now()
        workers: dict[str, WorkerLiveness] = {}
        for worker, boot, renewed, gone, lease, process, alike, *_ in rows:
            dead = gone or boot != boot_id or self._watch.is_silent(me, worker, lease) or has_ended(process)
            leased = not dead and now - renewed <= self._watch.lease_of(lease)
            workers[worker] = WorkerLiveness(worker, dead, gone, leased, renewed, process, bool(alike))
        return workers

    def observe(self, connection: Connection) -> None:
        """Record the heartbeats of all workers, for a worker that has asked no lookout to do so."""
        rows = connection.execute(self._sql.beats, binary=True)
        self._watch.observe({worker: _mark(boot, renewed) for worker, boot, renewed in rows})

    def _own_liveness(self, connection: Connection, request: ClaimRequest, post: Post) -> Liveness | None:
        """Return what a claim needs beside the roll of the lookout; None if the worker has been given up."""
        values = {**self._asked(request.worker, request), "post": post.name}
        ((known, limited, parked, waiting, text),) = connection.execute(
            self._sql.standing, values, binary=True
        ).fetchall()
        post.found(text)
        return Liveness({}, frozenset(), tuple(limited), _services(parked), frozenset(waiting)) if known else None

    def _asked(self, me: str, request: ClaimRequest) -> dict[str, Any]:
        workflows = sorted(request.workflows)
        return {
            "me": me,
            "workflows": texts(workflows),
            "versions": texts([request.versions.get(workflow) for workflow in workflows]),
            "queues": texts(sorted(map(plain, request.queues or ()))),
            "now": instant(self._clock.now()),
        }

    # -- claiming ------------------------------------------------------------------------------------------------------

    def claim(self, connection: Connection, request: ClaimRequest, now: datetime, post: Post | None = None) -> Claims:
        """Lease runs whose owner is dead, then those that are due.

        With a `post`, dead workers are those on the roll of the lookout, if another worker is the lookout. A request
        of an idle worker that hears of due runs is then left to it.
        """
        if post is not None and request.idle and not post.is_mine:
            is_lookout = self._lookouts.take(connection, post)
            if not (is_lookout or post.polls):
                return Claims(next_due_at=post.next_due_at, elsewhere=post.is_elsewhere)
        if post is not None:
            post.looked()
        liveness, dead = self._liveness_for(connection, request, now, post)
        if liveness is None:
            return Claims()
        self.limited = frozenset(map(original, liveness.limited))
        if request.idle and post is not None and not (dead or liveness.may_have_runs(now)):
            post.claimed(liveness.next_due_at)
            return Claims(next_due_at=post.next_due_at, elsewhere=post.is_elsewhere)
        moment = Moment(connection, dead, liveness.limited, now, liveness.waiting)
        if request.run is not None:
            return Claims(self._by_name(moment, request))
        found = self._claim_all(moment, request, liveness.parked_at)
        if post is not None:
            post.claimed(found.next_due_at)
            found = replace(found, next_due_at=post.next_due_at, elsewhere=post.is_elsewhere)
        return found

    def _liveness_for(
        self, connection: Connection, request: ClaimRequest, now: datetime, post: Post | None
    ) -> tuple[Liveness | None, list[str]]:
        """Return what a claim needs, and the dead owners of runs; None if the asking worker has been given up."""
        if post is not None and not post.is_mine and post.is_taken():
            liveness = self._own_liveness(connection, request, post)
            if liveness is None or post.roll is not None:
                return liveness, [] if post.roll is None else list(post.roll.dead)
        return self._roll_call(connection, request, now, post if post is not None and post.is_mine else None)

    def _roll_call(
        self, connection: Connection, request: ClaimRequest, now: datetime, post: Post | None
    ) -> tuple[Liveness | None, list[str]]:
        """Find the dead workers, and mark them. Return None if the asking worker is dead itself."""
        liveness = self.liveness_of_workers(connection, request.worker, request, post)
        me = liveness.workers.get(request.worker)
        if me is None or me.gone:
            return None, []
        dead, mark_dead = liveness.dead_owners(request.worker), liveness.to_mark_dead(request.worker)
        if mark_dead:
            marked_dead = self._mark_dead(connection, mark_dead, now)
            living = {one.id for one in mark_dead} - marked_dead
            dead = [owner for owner in dead if owner not in living]
        if post is not None:
            alive = [one for one in liveness.workers.values() if not one.dead]
            known = liveness.workers.keys() & dead  # others are told of workers that are marked dead in the store
            post.called(sum(one.alike for one in alive), sorted(known), {one.process for one in alive})
        return liveness, dead

    def _claim_all(self, moment: Moment, request: ClaimRequest, parked_at: Sequence[str]) -> Claims:
        connection, now = moment.connection, moment.now
        taken: tuple[Claim, ...] = ()
        later: datetime | None = None
        served = self.limited if request.queues is None else self.limited & request.queues
        rooms: dict[str, services.Room] = {}
        if parked_at:
            later = self._services.let_timed_go_on(connection, now)
            users = self._services.users(connection)
            rooms = services.rooms_of(request, parked_at, lambda service: users.get(service, ()))
        turns = {*served, *(f"{services.gate_text(name)}" for name in rooms if name in parked_at)}
        for name in queues.in_turn(turns, self._claims_made) if request.workflows else ():
            rest = replace(request, limit=max(request.limit - len(taken), 0))
            service = services.service_in(name)
            if service is not None:
                places, workflows = rooms[service]
                rest = replace(rest, workflows=workflows)
                claims, at = self._parked(moment, service, min(places, rest.limit), rest), None
            else:
                claims, at = self._others(moment, rest) if name is None else self._queue(moment, name, rest)
            taken += claims
            later = min(filter(None, (later, at)), default=None)
        self._claims_made += 1
        return Claims(taken, later, self._at_services(moment, request, parked_at))

    def _at_services(self, moment: Moment, request: ClaimRequest, parked_at: Sequence[str]) -> tuple[AtService, ...]:
        mine = [service for service in parked_at if service in request.rooms]
        found = [ParkedGround(moment, self._gates, service, request).waiting(self._services) for service in mine]
        return tuple(one for one in found if one is not None)

    def _parked(self, moment: Moment, service: str, room: int, request: ClaimRequest) -> tuple[Claim, ...]:
        """Claim runs that wait at a service. One whose queue has no place waits in its queue from now on.

        The gate is not locked: workers wait for its row, and a claim waits for the disk. Two claims may choose the same
        runs, and then one takes them.
        """
        connection = moment.connection
        rows = connection.execute(self._services.gate, (SERVICE, plain(service)), binary=True).fetchall()
        gate = gate_from(rows[0]) if rows else GateInfo(SERVICE, service)
        ground = ParkedGround(moment, self._gates, service, request)
        decision = queues.decide_parked(gate, ground, room)
        if not decision.runs:
            return ()
        if rows and decision.gate != gate:
            after = decision.gate
            connection.execute(self._gates.take_turn, (plain(after.turn), int(after.line_next), SERVICE, rows[0][1]))
        queue_of = dict(connection.execute(self._services.queues_of, (texts(decision.runs),), binary=True).fetchall())
        taken: tuple[Claim, ...] = ()
        for run in decision.runs:
            queue = queue_of.get(run)
            if queue in moment.limited:
                taken += self._take_parked_in_queue(moment, service, run, queue, request)
            else:
                taken += self._take_parked(moment, service, run, request)
        return taken

    def _take_parked_in_queue(
        self, moment: Moment, service: str, run: str, queue: str, request: ClaimRequest
    ) -> tuple[Claim, ...]:
        connection = moment.connection
        connection.execute("BEGIN")
        rows = connection.execute(self._gates.lock, (QUEUE, queue), binary=True).fetchall()
        taken: tuple[Claim, ...] = ()
        if rows:  # otherwise another worker is claiming there
            ground = QueueGround(moment, self._gates, original(queue), request)
            if queues.may_drive(gate_from(rows[0]), ground, holds_key=True):
                taken = self._take_parked(moment, service, run, request)
            else:
                connection.execute(self._services.go_to_queue, (run, plain(services.gate_text(service) or "")))
        connection.execute("COMMIT")
        return taken

    def _take_parked(self, moment: Moment, service: str, run: str, request: ClaimRequest) -> tuple[Claim, ...]:
        values = {
            **_values(moment, request, 1),
            "runs": texts([run]),
            "gate": plain(services.gate_text(service) or ""),
        }
        rows = moment.connection.execute(self._sql.take_parked, values, binary=True)
        taken = self._taken(moment.connection, rows)
        return tuple(replace(claim, service=service if service in request.rooms else None) for claim in taken)

    def _others(self, moment: Moment, request: ClaimRequest) -> tuple[tuple[Claim, ...], datetime | None]:
        """Claim runs of queues without limits."""
        taken = self._orphans(moment, request) if moment.dead else ()
        due, later = self._due(moment, request, request.limit - len(taken))
        return (*taken, *due), later

    def _queue(self, moment: Moment, name: str, request: ClaimRequest) -> tuple[tuple[Claim, ...], datetime | None]:
        """Claim runs of a queue with limits.

        The gate's row is locked in a statement before those that count: a statement that both locks and counts may
        count what was there before another claim.
        """
        connection, dead, now = moment.connection, moment.dead, moment.now
        ground = QueueGround(moment, self._gates, name, request)
        if request.limit <= 0 or not (name in self._busy or plain(name) in moment.waiting or dead):
            return (), None
        with connection.pipeline():  # one round trip; each statement still sees what was committed before it
            connection.execute("BEGIN")
            locked = connection.execute(self._gates.lock, (QUEUE, plain(name)), binary=True)
            ground.look()
        rows = locked.fetchall()
        if not rows:  # another worker is claiming there
            connection.execute("ROLLBACK")
            return (), None
        gate = gate_from(rows[0])
        decision = queues.decide(gate, ground, request.limit, now.timestamp())
        runs = [*decision.orphans, *decision.runs]
        values = {**_values(moment, request, request.limit), "runs": texts(runs), "dead": texts(dead)}
        with connection.pipeline():
            took = connection.execute(self._sql.take, values, binary=True) if runs else None
            if decision.gate is not gate:
                connection.execute(self._gates.move, moved(decision.gate))
            connection.execute("COMMIT")
        (self._busy.add if runs else self._busy.discard)(name)
        taken = () if took is None else self._taken(connection, took)
        return taken, None if decision.next_at is None else instant(decision.next_at)

    def _mark_dead(self, connection: Connection, dead: list[WorkerLiveness], now: datetime) -> set[str]:
        """Mark workers dead that have not renewed their lease since they were found dead."""
        ids, seen = [one.id for one in dead], [one.renewed for one in dead]
        rows = connection.execute(self._sql.mark_dead, (now, texts(ids), seen)).fetchall()
        connection.execute(self._sql.forget, (now - _REMEMBER_DEAD,))
        return {worker for (worker,) in rows}

    def _orphans(self, moment: Moment, request: ClaimRequest) -> tuple[Claim, ...]:
        sql = self._finding[request.queues is not None].orphans
        values = {**_values(moment, request, request.limit), "dead": texts(moment.dead)}
        return self._taken(moment.connection, moment.connection.execute(sql, values, binary=True))

    def _due(self, moment: Moment, request: ClaimRequest, limit: int) -> tuple[tuple[Claim, ...], datetime | None]:
        connection = moment.connection
        sql, values = self._finding[request.queues is not None].due, _values(moment, request, limit)
        rows = connection.execute(sql, values, binary=True).fetchall()
        later = rows[0][-1]
        found = self._taken(connection, [row[:-1] for row in rows if row[1] is not None])
        return found, later.astimezone(UTC) if isinstance(later, datetime) else None  # `later` may be infinity

    def _by_name(self, moment: Moment, request: ClaimRequest) -> tuple[Claim, ...]:
        connection, limited = moment.connection, moment.limited
        run = plain(request.run or "")
        if not request.statuses.isdisjoint(FINISHED):
            for (twin,) in connection.execute(self._gates.twin, (run,), binary=True).fetchall():
                rules.check_twin(request.run or "", twin)
        if request.drives and limited:
            return self._driven_by_name(moment, request)
        return self._take_named(moment, request)

    def _driven_by_name(self, moment: Moment, request: ClaimRequest) -> tuple[Claim, ...]:
        """Claim a run that the worker is going to drive, if its queue has a place for it."""
        connection, limited = moment.connection, moment.limited
        found = connection.execute(self._gates.holds_key, (plain(request.run or ""),), binary=True).fetchall()
        if not found or found[0][1] not in limited:
            return self._take_named(moment, request)
        holds_key, queue = found[0]
        connection.execute("BEGIN")
        rows = connection.execute(self._gates.lock, (QUEUE, queue), binary=True).fetchall()
        ground = QueueGround(moment, self._gates, original(queue), request)
        taken: tuple[Claim, ...] = ()
        if rows and queues.may_drive(gate_from(rows[0]), ground, holds_key=holds_key):
            taken = self._take_named(moment, request)
        connection.execute("COMMIT")
        return taken

    def _take_named(self, moment: Moment, request: ClaimRequest) -> tuple[Claim, ...]:
        connection, dead, limited, now, _ = moment
        statuses = [status.value for status in Status if claims.may_name(status, request.statuses)]
        values = {
            "run": plain(request.run or ""),
            "statuses": texts(statuses),
            "dead": texts(dead),
            "worker": request.worker,
            "now": now,
            "limited": texts(limited),
            "begins": int(request.drives),
        }
        return self._taken(connection, connection.execute(self._sql.by_name, values, binary=True))

    def _taken(self, connection: Connection, rows: Any) -> tuple[Claim, ...]:
        """Return the claims in rows; a run with unreadable rows is set aside, so that it does not block the others."""
        taken: list[Claim] = []
        for row in list(rows):
            try:
                taken.append(_claim(row))
            except (ValueError, CheckpointCorrupt) as error:
                log.error("run %s is set aside: %s", row[1], error)  # noqa: TRY400 - one line is enough
                connection.execute(self._sql.put_aside, (row[1],))
        return tuple(taken)


def _services(gates: Sequence[str]) -> tuple[str, ...]:
    return tuple(services.service_in(original(gate)) or "" for gate in gates)


def _mark(boot: str, renewed: float) -> tuple[str, str]:
    """Return a value that changes with every heartbeat, as text, because a damaged number may not equal itself."""
    return boot, str(renewed)


def _claim(row: Sequence[Any]) -> Claim:
    owner, before, since = row[RUN_WIDTH : RUN_WIDTH + 3]
    old = Status(before)
    run = run_from(row[:RUN_WIDTH])
    if run.epoch > _MOST:
        raise CheckpointCorrupt(f"run {run.id!r}: its epoch {run.epoch} cannot grow")
    return claims.claim_of(run, owner, old, since.astimezone(UTC))


def _values(moment: Moment, request: ClaimRequest, limit: int) -> dict[str, Any]:
    workflows = sorted(request.workflows)
    return {
        "workflows": texts(workflows),
        "versions": texts([request.versions.get(workflow) for workflow in workflows]),
        "queues": texts(sorted(map(plain, request.queues or ()))),
        "worker": request.worker,
        "limit": limit,
        "now": moment.now,
        "limited": texts(moment.limited),
        "begins": 1,
    }


def _taking(address: Address) -> tuple[str, str]:
    """Return SQL that leases the runs in `found`, and SQL that selects them with their facts."""
    recovered = f"f.worker IS NOT NULL AND f.status IN ({claims.RECOVERING_SQL})"
    columns = claims.leased_sql(
        status=f"CASE WHEN {recovered} THEN '{Status.RECOVERING}' ELSE '{Status.RUNNING}' END",
        worker="%(worker)s",
        now="%(now)s",
        epoch=f"least(h.epoch, {_MOST})",
        recoveries=f"least(h.recoveries, {_MOST})",
        recovered=f"CASE WHEN {recovered} THEN 1 ELSE 0 END",
        gate="CASE WHEN h.queue = ANY(%(limited)s) THEN h.queue END",
        begins="%(begins)s",
        head="h.",
    )
    take = (
        f"UPDATE {address.table('head')} h SET {columns} FROM found f WHERE h.run = f.run"
        f" RETURNING h.*, f.worker AS owner, f.status AS before, f.updated_at AS left_at, f.due_at AS was_due"
    )
    show = (
        f"SELECT {RUN_COLUMNS}, h.owner, h.before, h.left_at FROM taken h"
        f" LEFT JOIN {address.table('run')} r ON r.id = h.run"
    )
    return take, show


class _Statements:
    """The statements of one schema that claim runs."""

    def __init__(self, address: Address, finding: Mapping[bool, _Finding]) -> None:
        head, worker, gate, meta = map(address.table, ("head", "worker", "gate", "meta"))
        next_parked = (
            f"SELECT h.gate FROM {head} h WHERE h.worker IS NULL AND h.gate < '{services.AFTER_SERVICES}'"
            f" AND h.gate > '{services.FIRST_SERVICE}'"
        )
        limited = f"ARRAY(SELECT name FROM {gate} WHERE kind = '{QUEUE}')"
        parked_at = "ARRAY(SELECT gate FROM parked WHERE gate IS NOT NULL)"
        waiting = f"ARRAY(SELECT name FROM {gate} g WHERE g.kind = '{QUEUE}' AND {GateStatements.may_have_runs(head)})"
        roll = f"(SELECT value FROM {meta} WHERE name = %(post)s)"
        # Workers of one program name the same workflows, and then the keepers that each knows.
        program = f"rtrim(split_part(w.workflows, '\"{KEEPER_WORKFLOW}', 1), ',]')"
        asked = "asked AS MATERIALIZED (SELECT a.* FROM unnest(%(workflows)s, %(versions)s) a(workflow, version))"
        parked = f"""
            parked(gate) AS (
                SELECT ({next_parked} ORDER BY h.gate LIMIT 1)
                UNION ALL
                SELECT ({next_parked} AND h.gate > p.gate ORDER BY h.gate LIMIT 1)
                FROM parked p WHERE p.gate IS NOT NULL)"""
        # One row with facts, and one for each worker. The lookout's roll is renewed in the same statement.
        self.roll_call = {
            by_queue: f"""
            WITH RECURSIVE {asked}, owner(id) AS (
                (SELECT worker FROM {head} WHERE worker IS NOT NULL ORDER BY worker LIMIT 1)
                UNION ALL
                SELECT (SELECT h.worker FROM {head} h WHERE h.worker > o.id ORDER BY h.worker LIMIT 1)
                FROM owner o WHERE o.id IS NOT NULL),
            {parked},
            renewed AS (UPDATE {meta} SET value = %(after)s WHERE name = %(post)s AND value = %(before)s)
            SELECT NULL::text, NULL::text, NULL::float8, NULL::boolean, NULL::float8, NULL::text, NULL::boolean,
                ARRAY(SELECT id FROM owner WHERE id IS NOT NULL), {limited}, {parked_at}, {waiting}, {roll},
                {one.next_due}, {NOT_FLUSHED}
            UNION ALL
            SELECT w.id, w.boot, w.boot_seconds, w.gone_at IS NOT NULL, w.lease_seconds, w.process,
                {program} = (SELECT {program} FROM {worker} w WHERE id = %(me)s), NULL, NULL, NULL, NULL,
                NULL, NULL, NULL
            FROM {worker} w WHERE w.gone_at IS NULL OR w.id = %(me)s"""
            for by_queue, one in finding.items()
        }
        #: The same for one worker, which takes the dead workers from the roll.
        self.standing = f"""
            WITH RECURSIVE {asked}, {parked}
            SELECT EXISTS (SELECT FROM {worker} WHERE id = %(me)s AND gone_at IS NULL),
                {limited}, {parked_at}, {waiting}, {roll}"""
        self.beats = f"SELECT id, boot, boot_seconds FROM {worker} WHERE gone_at IS NULL"
        self.mark_dead = (
            f"UPDATE {worker} w SET gone_at = %s FROM unnest(%s, %s::float8[]) i(id, seen)"
            f" WHERE w.id = i.id AND w.gone_at IS NULL AND w.boot_seconds = i.seen RETURNING w.id"
        )
        self.forget = (
            f"DELETE FROM {worker} w WHERE w.gone_at < %s AND NOT EXISTS (SELECT 1 FROM {head} h WHERE h.worker = w.id)"
        )
        self.put_aside = f"UPDATE {head} SET {claims.PUT_ASIDE_SQL} WHERE run = %s"
        take, show = _taking(address)
        self.take = f"""
            WITH found AS (
                SELECT h.run, h.status, h.worker, h.updated_at, h.due_at
                FROM unnest(%(runs)s) WITH ORDINALITY i(run, n) CROSS JOIN LATERAL (
                    SELECT * FROM {head} h WHERE h.run = i.run
                    AND ((h.worker IS NULL)::int > 0 OR h.worker = ANY(%(dead)s)) FOR UPDATE SKIP LOCKED) h),
            taken AS ({take})
            {show} JOIN unnest(%(runs)s) WITH ORDINALITY i(run, n) ON i.run = h.run ORDER BY i.n"""
        self.take_parked = self.take.replace(
            "((h.worker IS NULL)::int > 0 OR h.worker = ANY(%(dead)s))",
            "(h.worker IS NULL)::int > 0 AND h.gate = %(gate)s",
        )
        self.by_name = f"""
            WITH found AS (
                SELECT h.run, h.status, h.worker, h.updated_at, h.due_at FROM {head} h WHERE h.run = %(run)s
                AND h.status = ANY(%(statuses)s) AND (h.worker IS NULL OR h.worker = ANY(%(dead)s)) FOR UPDATE),
            taken AS ({take})
            {show}"""


class _Finding:
    """The statements of one schema that find runs and lease them, in all queues or `by_queue` in those named.

    A section is one workflow and queue. Each is read by time or by priority, as `claims.FEW` says.
    """

    def __init__(self, address: Address, *, by_queue: bool) -> None:
        head, run = address.table("head"), address.table("run")
        take, show = _taking(address)
        asked, same_queue = "SELECT a.* FROM unnest(%(workflows)s, %(versions)s) a(workflow, version)", ""
        if by_queue:
            asked = (
                "SELECT a.*, q.queue FROM unnest(%(workflows)s, %(versions)s) a(workflow, version)"
                " CROSS JOIN unnest(%(queues)s) q(queue)"
            )
            same_queue = " AND a.queue = h.queue"
        self.orphans = f"""
            WITH asked AS ({asked}),
            found AS (
                SELECT h.run, h.status, h.worker, h.updated_at, h.due_at FROM {head} h
                JOIN asked a ON a.workflow = h.workflow{same_queue}
                WHERE h.worker = ANY(%(dead)s) AND h.queue <> ALL(%(limited)s)
                AND (a.version IS NULL OR a.version = h.version)
                ORDER BY {claims.takeover_sql("h")} LIMIT %(limit)s FOR UPDATE OF h SKIP LOCKED),
            taken AS ({take})
            {show} ORDER BY {claims.takeover_sql("h", "owner")}"""
        here = "h.workflow = l.workflow AND h.queue = l.queue"
        free = f"h.worker IS NULL AND h.due_at IS NOT NULL AND h.gate IS NULL AND {here}"
        # The casts choose the index, independent of the planner's statistics: the first matches only the index by time,
        # the second matches none, so that a run is found by its key.
        with_time = "(h.worker IS NULL)::int = 1 AND h.due_at IS NOT NULL AND h.gate IS NULL"
        timed = f"{with_time} AND {here}"
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
        next_queue = f"SELECT h.queue FROM {head} h WHERE {with_time} AND h.workflow = l.workflow"
        everywhere = f"""
                SELECT l.workflow, l.version, ({next_queue} ORDER BY h.queue LIMIT 1) AS queue FROM asked l
                UNION ALL
                SELECT l.workflow, l.version, ({next_queue} AND h.queue > l.queue ORDER BY h.queue LIMIT 1)
                FROM place l WHERE l.queue IS NOT NULL"""
        place = "SELECT * FROM asked" if by_queue else everywhere
        places = f"asked AS ({asked}), place(workflow, version, queue) AS ({place})"
        #: SQL of the time at which the first free run is due, which may have passed.
        self.next_due = f"""(
            WITH RECURSIVE {places}
            SELECT min(f.due_at) FROM place l CROSS JOIN LATERAL (
                SELECT h.due_at FROM {head} h WHERE {timed} AND {pinned} ORDER BY h.due_at LIMIT 1) f
            WHERE l.queue IS NOT NULL)"""
        self.due = f"""
            WITH RECURSIVE {places},
            section AS MATERIALIZED (
                SELECT l.workflow, l.version, l.queue, (
                    SELECT count(*) FROM (SELECT 1 FROM {head} h WHERE {timed} AND {due}
                    ORDER BY h.due_at LIMIT {FEW}) h) < {FEW} AS short
                FROM place l WHERE l.queue IS NOT NULL AND l.queue <> ALL(%(limited)s)),
            level AS (
                SELECT l.workflow, l.version, l.queue, 1 AS n, n.priority, {seen} AS seen
                FROM section l CROSS JOIN LATERAL ({highest} ORDER BY h.priority DESC LIMIT 1) n WHERE NOT l.short
                UNION ALL
                SELECT l.workflow, l.version, l.queue, l.n + 1, n.priority, l.seen + {seen}
                FROM level l CROSS JOIN LATERAL (
                    {highest} AND h.priority < l.priority ORDER BY h.priority DESC LIMIT 1) n
                WHERE l.seen < {enough} AND l.n < {LEVELS}),
            rest AS (
                SELECT l.workflow, l.version, l.queue, NULL::bigint AS below FROM section l WHERE l.short
                UNION ALL
                SELECT l.workflow, l.version, l.queue, l.priority FROM level l
                WHERE l.n = {LEVELS} AND l.seen < {enough}),
            oldest AS MATERIALIZED (
                SELECT o.* FROM rest l CROSS JOIN LATERAL (
                    SELECT h.run, h.priority, h.due_at FROM {head} h
                    WHERE {timed} AND {due} AND (l.below IS NULL OR h.priority < l.below)
                    ORDER BY h.due_at LIMIT {FEW}) o
                ORDER BY {claims.due_sql("o")}),
            ready AS (
                SELECT f.* FROM level l CROSS JOIN LATERAL (
                    SELECT {found} FROM {head} h WHERE {free} AND {due} AND h.priority = l.priority
                    ORDER BY h.due_at, h.run LIMIT %(limit)s FOR UPDATE SKIP LOCKED) f
                UNION ALL
                SELECT g.* FROM (
                    SELECT f.* FROM oldest o CROSS JOIN LATERAL (
                        SELECT {found} FROM {head} h WHERE h.run = o.run AND {still_free} FOR UPDATE SKIP LOCKED) f
                    LIMIT %(limit)s) g),
            found AS (SELECT * FROM ready f ORDER BY {claims.due_sql("f")} LIMIT %(limit)s),
            taken AS ({take}),
            later AS (
                SELECT f.due_at FROM place l CROSS JOIN LATERAL (
                    SELECT h.due_at FROM {head} h WHERE {timed} AND {pinned} AND h.due_at > %(now)s
                    ORDER BY h.due_at LIMIT 1) f)
            SELECT {RUN_COLUMNS}, h.owner, h.before, h.left_at, (SELECT min(due_at) FROM later)
            FROM (SELECT 1) one LEFT JOIN taken h ON true LEFT JOIN {run} r ON r.id = h.run
            ORDER BY {claims.due_sql("h", "was_due")}"""
