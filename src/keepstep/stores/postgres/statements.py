"""Statements that write to a PostgreSQL store: each writes many rows, given as one array per column."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from ...model import Run, Signal, Status
from ...ports import Advance, Row
from .. import gates, rules, services
from ..transition import Head, Writes
from .parts import newest, part_to_write
from .pool import DURABLE, Address
from .rows import (
    RUN_COLUMNS,
    Array,
    blobs,
    eight_bytes,
    microseconds,
    names_text,
    numbers,
    plain,
    plain_or_none,
    tags_text,
    texts,
    times,
)

_HEAD_COLUMNS = (
    "run, status, seq, checksum, epoch, worker, due_at, wakes, signals, recoveries, updated_at, signals_read,"
    " kept_from, signals_from, holds, gate"
)


class Written(Writes):
    """The writes of a batch, collected to be executed together, and the receivers of notifications."""

    #: Receivers of notifications: `@` and the worker whose run was signalled, or `DUE` and `LOOK` for anyone.
    notifications: set[str] = msgspec.field(default_factory=set)


#: Notifications that are not for one worker alone. `DUE` may be followed by the time at which a run is due.
DUE, LOOK = "+", "-"


class Move(msgspec.Struct, frozen=True, gc=False):
    """A change that does more to its head than extend it, with the resulting head of a running run."""

    change: Advance
    status: Status
    freed: bool
    at: datetime
    due_at: datetime | None


class Statements:
    """The statements of one schema."""

    def __init__(self, address: Address) -> None:
        run, head, checkpoint, signal = map(address.table, ("run", "head", "checkpoint", "signal"))
        self.address = address
        #: The queues with limits, as of the last look.
        self.limited: frozenset[str] = frozenset()
        self.twin = (
            f"SELECT run FROM {head} WHERE queue = %s AND dedupe = %s"
            " AND status NOT IN ('completed', 'failed', 'cancelled')"
        )
        self.lock = f"SELECT {_HEAD_COLUMNS} FROM {head} WHERE run = ANY(%s) ORDER BY run FOR UPDATE"
        self.look = f"SELECT {_HEAD_COLUMNS} FROM {head} WHERE run = %s"
        self.signal_ids = (
            f"SELECT s.run, s.id, s.seq FROM unnest(%s, %s) i(run, id)"
            f" JOIN {signal} s ON s.run = i.run AND s.id = i.id AND s.id <> ''"
        )
        self.runs = f"SELECT {RUN_COLUMNS} FROM {run} r LEFT JOIN {head} h ON h.run = r.id WHERE r.id = ANY(%s)"
        self.remove = tuple(
            f"DELETE FROM {table} WHERE {column} = ANY(%s)"
            for table, column in ((head, "run"), (run, "id"), (checkpoint, "run"), (signal, "run"))
        )
        self.rekey = f"UPDATE {run} r SET data_key = i.new FROM unnest(%s, %s) i(run, new) WHERE r.id = i.run"
        # A head is found by its key only, one by one in the given order, whatever the planner decides for tables that
        # were empty when it planned: ON CONFLICT guarantees that, a join does not. The expected values travel in
        # columns that the change does not set: the seq in `number`, the count of signals in `signals`. A missing head
        # would be inserted, without a workflow; it is not counted, so the whole statement is undone.
        columns = (
            "run, number, workflow, version, priority, status, seq, checksum, epoch, worker, due_at, wakes, signals,"
            " recoveries, updated_at"
        )
        as_expected = (
            "h.seq = excluded.number AND h.epoch = excluded.epoch AND h.worker = excluded.worker"
            " AND h.status = 'running'"
        )
        extends = (
            "ON CONFLICT (run) DO UPDATE SET seq = excluded.seq, checksum = excluded.checksum,"
            f" updated_at = excluded.updated_at, recoveries = 0 WHERE {as_expected} RETURNING h.workflow, h.part"
        )
        self.extend = (
            f"INSERT INTO {head} AS h ({columns}) SELECT run, after, '', '', 0, '', seq, checksum, epoch, worker,"
            f" NULL, '', 0, 0, at FROM unnest(%s, %s, %s, %s, %s, %s, %s)"
            f" i(run, after, epoch, worker, seq, checksum, at) {extends}"
        )
        #: Behind a proxy no session setting lasts, so each transaction requests the wait for the disk.
        self.durably = f"SELECT {DURABLE.format(transaction='true')}" if address.proxy else ""
        one = self._checked("(SELECT count(*) FROM extended WHERE workflow <> '')", "1")
        # One step of one run, the most common commit, needs no arrays.
        self.step = (
            f"WITH extended AS (INSERT INTO {head} AS h ({columns}) VALUES ($1, $2, '', '', 0, '', $3, $4, $5, $6,"
            f" NULL, '', 0, 0, $7) {extends}), added AS (INSERT INTO {checkpoint} (run, seq, kind, record, body, part)"
            f" SELECT $1, $3, $8, $9, $10, part FROM extended) {one}"
        ).encode()
        ended = ", ".join(f"'{status}'" for status in sorted(rules.ENDED))
        ended_holds = f"holds = CASE WHEN excluded.status IN ({ended}) THEN 0 ELSE h.holds END"
        self.move = (
            f"INSERT INTO {head} AS h ({columns}, signals_read, gate) SELECT run, after, '', '', freed, status, seq,"
            f" checksum, epoch, worker, due_at, wakes, seen, fresh, at, signals_read, gate"
            f" FROM unnest({', '.join(['%s'] * 15)})"
            f" i(run, after, epoch, worker, seq, checksum, at, status, freed, due_at, wakes, fresh, seen, signals_read,"
            f" gate)"
            f" ON CONFLICT (run) DO UPDATE SET seq = excluded.seq, updated_at = excluded.updated_at,"
            f" checksum = CASE excluded.checksum WHEN '' THEN h.checksum ELSE excluded.checksum END,"
            f" status = excluded.status,"
            f" worker = CASE excluded.priority WHEN 1 THEN NULL ELSE h.worker END,"
            f" due_at = CASE excluded.priority WHEN 1 THEN excluded.due_at ELSE h.due_at END,"
            f" wakes = CASE excluded.priority WHEN 1 THEN excluded.wakes ELSE h.wakes END,"
            f" gate = CASE excluded.priority WHEN 1 THEN excluded.gate ELSE h.gate END,"
            f" since = CASE WHEN excluded.priority = 1 AND excluded.gate IS NOT NULL THEN excluded.updated_at END,"
            f" {ended_holds},"
            f" recoveries = CASE excluded.recoveries WHEN 1 THEN 0 ELSE h.recoveries END,"
            f" signals_read = CASE WHEN excluded.signals_read < 0 THEN h.signals_read ELSE excluded.signals_read END"
            f" WHERE {as_expected} AND (excluded.signals < 0 OR h.signals <= excluded.signals) RETURNING h.workflow"
        )
        # A run that is released, or woken at a service. One that waits in its queue stays there.
        parks = (
            f"excluded.worker IS NULL AND (h.worker IS NOT NULL OR"
            f" (h.gate >= '{services.FIRST_SERVICE}' AND h.gate < '{services.AFTER_SERVICES}'))"
        )
        self.put = (
            f"INSERT INTO {head} AS h ({columns}, signals_read, kept_from, signals_from, gate) SELECT run, 0, '', '',"
            f" 0, status, seq, checksum, 0, worker, due_at, wakes, signals, recoveries, at, signals_read, kept_from,"
            f" signals_from, gate FROM unnest({', '.join(['%s'] * 14)}) i(run, status, seq, checksum, worker, due_at,"
            f" wakes, signals, recoveries, at, signals_read, kept_from, signals_from, gate)"
            f" ON CONFLICT (run) DO UPDATE SET status = excluded.status, seq = excluded.seq,"
            f" checksum = excluded.checksum, worker = excluded.worker, due_at = excluded.due_at,"
            f" wakes = excluded.wakes, signals = excluded.signals, recoveries = excluded.recoveries,"
            f" gate = CASE WHEN {parks} THEN excluded.gate ELSE h.gate END,"
            f" since = CASE WHEN {parks} THEN CASE WHEN excluded.gate IS NULL THEN NULL ELSE excluded.updated_at END"
            f" ELSE h.since END, {ended_holds},"
            f" updated_at = excluded.updated_at, signals_read = excluded.signals_read, kept_from = excluded.kept_from,"
            f" signals_from = excluded.signals_from RETURNING h.workflow"
        )
        self.trim = tuple(
            f"DELETE FROM {table} t USING {head} h WHERE h.run = ANY(%s) AND t.run = h.run AND {removed}"
            for table, removed in (
                (checkpoint, "t.part = h.part AND t.seq > 1 AND t.seq < h.kept_from"),
                (signal, "t.seq < h.signals_from"),
            )
        )
        self.born = (
            f"SELECT nextval('{address.table('number')}') AS number, {newest(address)} AS part, i.*"
            f" FROM unnest({', '.join(['%s'] * 35)})"
            f" i(id, workflow, version, fingerprint, queue, priority, input, seed, parent, parent_key, origin, key,"
            f" tags, deadline_at, traceparent, created_at, created_by, data_key, status, seq, checksum, epoch, worker,"
            f" due_at, wakes, signals, recoveries, updated_at, signals_read, kept_from, signals_from,"
            f" dedupe, holds, gate, since)"
        )
        self.add_runs = (
            f"INSERT INTO {run} (id, number, workflow, version, fingerprint, queue, priority, input, seed, parent,"
            f" parent_key, origin, key, tags, deadline_at, traceparent, created_at, created_by, data_key, dedupe)"
            f" SELECT id, number, workflow, version, fingerprint, queue, priority, input, seed, parent, parent_key,"
            f" origin, key, tags::text[], deadline_at, traceparent, created_at, created_by, data_key, dedupe FROM born"
        )
        self.add_heads = (
            f"INSERT INTO {head} ({columns}, queue, key, signals_read, kept_from, signals_from, dedupe, holds, gate,"
            f" since, part) SELECT {columns.replace('run', 'id', 1)}, queue, key, signals_read, kept_from,"
            f" signals_from, dedupe, holds, gate, since, part FROM born"
        )
        self.add_rows = (
            f"INSERT INTO {checkpoint} (run, seq, kind, record, body, part) SELECT i.*,"
            f" {part_to_write(address, 'i.run')} FROM unnest(%s, %s, %s, %s, %s) i(run, seq, kind, record, body)"
        )
        self.add_signals = (
            f"INSERT INTO {signal} (run, seq, name, payload, id, sender, sent_at, checksum)"
            f" SELECT * FROM unnest(%s, %s, %s, %s, %s, %s, %s, %s)"
        )

    def together(
        self,
        written: Written,
        extends: Sequence[Advance] = (),
        moves: Sequence[Move] = (),
        now: datetime | None = None,
    ) -> tuple[str, list[Array]]:
        """Return one statement that writes everything, and fails if the head of one change is not as expected."""
        parts: list[str] = []
        values: list[Array] = []
        counted: list[str] = []

        def add(name: str, sql: str, columns: Iterable[Array] = ()) -> None:
            parts.append(f"{name} AS ({sql})")
            values.extend(columns)

        if extends and now is not None:
            add("extended", self.extend, _extension(extends, now))
            counted.append("(SELECT count(*) FROM extended WHERE workflow <> '')")
        if moves:
            add("moved", self.move, _movement(moves))
            counted.append("(SELECT count(*) FROM moved WHERE workflow <> '')")
        if written.heads:
            add("put", self.put, _heads(written.heads))
            counted.append("(SELECT count(*) FROM put WHERE workflow <> '')")
        if written.runs:
            add("born", self.born, _births(list(written.runs.values()), self.limited))
            add("added_runs", self.add_runs)
            add("added_heads", self.add_heads)
        if written.rows:
            add("added_rows", self.add_rows, _rows(written.rows))
        if written.signals:
            add("added_signals", self.add_signals, _signals(written.signals))
        expected = len(extends) + len(moves) + len(written.heads)
        if not counted:
            return f"WITH {', '.join(parts)} {self.durably or 'SELECT 0'}", values
        check = self._checked(" + ".join(counted), "(%s::bigint[])[1]")
        return f"WITH {', '.join(parts)} {check}", [*values, numbers([expected])]

    def _checked(self, count: str, expected: str) -> str:
        """Return SQL that fails the whole statement unless all heads match; its message appears in the server's log."""
        durably = f", ({self.durably})" if self.durably else ""
        return (
            f"SELECT CASE WHEN n = {expected} THEN 0 ELSE (n || ' heads matched; Keepstep falls back to locks')"
            f"::int END{durably} FROM (SELECT {count} AS n) held"
        )


#: Types of the values of a single step: text, bigint, timestamptz, bytea.
STEP_TYPES = (25, 20, 20, 25, 20, 25, 1184, 25, 17, 17)


def step_values(change: Advance, now: datetime) -> list[bytes | None]:
    """Return the values of one step of one run, for the statement without arrays."""
    row = change.rows[0]
    return [
        change.run.encode(),
        eight_bytes(change.after),
        eight_bytes(row.seq),
        change.checksum.encode(),
        eight_bytes(change.epoch),
        change.worker.encode(),
        eight_bytes(microseconds(change.at or now)),
        row.kind.encode(),
        row.record,
        row.body,
    ]


# -- columns ---------------------------------------------------------------------------------------------------------


def _extension(changes: Sequence[Advance], now: datetime) -> tuple[Array, ...]:
    return (
        texts([change.run for change in changes]),
        numbers([change.after for change in changes]),
        numbers([change.epoch for change in changes]),
        texts([change.worker for change in changes]),
        numbers([change.rows[-1].seq for change in changes]),
        texts([change.checksum for change in changes]),
        times([change.at or now for change in changes]),
    )


def _movement(moves: Sequence[Move]) -> tuple[Array, ...]:
    changes = [move.change for move in moves]
    return (
        texts([change.run for change in changes]),
        numbers([change.after for change in changes]),
        numbers([change.epoch for change in changes]),
        texts([change.worker for change in changes]),
        numbers([change.after + len(change.rows) for change in changes]),
        texts([change.checksum if change.rows else "" for change in changes]),
        times([move.at for move in moves]),
        texts([move.status for move in moves]),
        numbers([int(move.freed) for move in moves]),
        times([move.due_at for move in moves]),
        texts(["" if move.status in rules.ENDED else names_text(move.change.wakes) for move in moves]),
        numbers([int(bool(change.rows) and change.progress) for change in changes]),
        numbers([-1 if change.signals_seen is None else change.signals_seen for change in changes]),
        numbers([-1 if change.signals_read is None else change.signals_read for change in changes]),
        texts([_gate(move) for move in moves]),
    )


def _gate(move: Move) -> str | None:
    """Return the stored form of the service at which a released run waits."""
    is_parked = move.freed and move.status not in rules.ENDED
    return plain_or_none(services.gate_text(move.change.service)) if is_parked else None


def _heads(by_run: Mapping[str, Head]) -> tuple[Array, ...]:
    runs = sorted(by_run)
    heads = [by_run[run] for run in runs]
    return (
        texts(runs),
        texts([head.status for head in heads]),
        numbers([head.seq for head in heads]),
        texts([head.checksum for head in heads]),
        texts([head.worker for head in heads]),
        times([head.due_at for head in heads]),
        texts([names_text(head.wakes) for head in heads]),
        numbers([head.signals for head in heads]),
        numbers([head.recoveries for head in heads]),
        times([head.updated_at for head in heads]),
        numbers([head.signals_read for head in heads]),
        numbers([head.kept_from for head in heads]),
        numbers([head.signals_from for head in heads]),
        texts([plain_or_none(services.gate_text(head.service)) for head in heads]),
    )


def _births(runs: Sequence[Run], limited: Collection[str]) -> tuple[Array, ...]:
    waits = [gates.waits_at(run, limited) if limited or run.service is not None else None for run in runs]
    since = [run.due_at if run.service is None else run.updated_at for run in runs]
    return (
        texts([run.id for run in runs]),
        texts([run.workflow for run in runs]),
        texts([run.version for run in runs]),
        texts([plain(run.fingerprint) for run in runs]),
        texts([plain(run.queue) for run in runs]),
        numbers([run.priority for run in runs]),
        blobs([run.input for run in runs]),
        texts([run.seed for run in runs]),
        texts([plain_or_none(run.parent) for run in runs]),
        texts([plain_or_none(run.parent_key) for run in runs]),
        texts([plain_or_none(run.origin) for run in runs]),
        texts([plain_or_none(run.key) for run in runs]),
        texts([tags_text(run.tags) for run in runs]),
        times([run.deadline_at for run in runs]),
        texts([plain_or_none(run.traceparent) for run in runs]),
        times([run.created_at for run in runs]),
        texts([plain(run.created_by) for run in runs]),
        texts([run.data_key for run in runs]),
        texts([run.status for run in runs]),
        numbers([run.seq for run in runs]),
        texts([run.checksum for run in runs]),
        numbers([run.epoch for run in runs]),
        texts([run.worker for run in runs]),
        times([run.due_at for run in runs]),
        texts([names_text(run.wakes) for run in runs]),
        numbers([run.signals for run in runs]),
        numbers([run.recoveries for run in runs]),
        times([run.updated_at for run in runs]),
        numbers([run.signals if run.signals_read is None else run.signals_read for run in runs]),
        numbers([run.kept_from for run in runs]),
        numbers([run.signals_from for run in runs]),
        texts([plain_or_none(run.dedupe) for run in runs]),
        numbers([run.holds for run in runs]),
        texts([plain_or_none(gate) for gate in waits]),
        times([None if gate is None else at for at, gate in zip(since, waits, strict=True)]),
    )


def _rows(rows: Sequence[tuple[str, Row]]) -> tuple[Array, ...]:
    return (
        texts([run for run, _ in rows]),
        numbers([row.seq for _, row in rows]),
        texts([row.kind for _, row in rows]),
        blobs([row.record for _, row in rows]),
        blobs([row.body for _, row in rows]),
    )


def _signals(signals: Sequence[Signal]) -> tuple[Array, ...]:
    return (
        texts([signal.run for signal in signals]),
        numbers([signal.seq for signal in signals]),
        texts([plain(signal.name) for signal in signals]),
        blobs([signal.payload for signal in signals]),
        texts([plain(signal.id) for signal in signals]),
        texts([plain(signal.sender) for signal in signals]),
        times([signal.sent_at for signal in signals]),
        texts([signal.checksum for signal in signals]),
    )
