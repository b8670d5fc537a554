"""Applies a batch of changes to a SQLite store, inside one transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import NamedTuple

import apsw
import msgspec

from ...errors import CheckpointCorrupt, StoreError
from ...model import FINISHED, Run, Signal, Status
from ...ports import Advance, Answer, Change, Clock, Create, Row, Verdict, instant
from .. import gates, rules, services
from ..transition import Head, Transition, Writes, may_replace
from .connection import Cursor
from .rows import names, names_text, read_run, seconds
from .user_transaction import StatementGuard
from .writer import Writer

_json = msgspec.json.Encoder().encode

# The common change, the next rows of a running run. Its condition is the fence, and it touches no index.
_EXTEND = (
    "UPDATE keepstep_head SET seq = ?, checksum = ?, updated_at = ?, recoveries = 0"
    " WHERE run = ? AND seq = ? AND epoch = ? AND worker = ? AND status = 'running'"
)
# The end of a running run, guarded in the same way.
_END = (
    "UPDATE keepstep_head SET status = ?, seq = ?, checksum = ?, worker = NULL, due_at = NULL, wakes = '',"
    " recoveries = 0, updated_at = ?, holds = 0, gate = NULL, since = NULL"
    " WHERE run = ? AND seq = ? AND epoch = ? AND worker = ? AND status = 'running' AND signals <= ?"
)
_ADD_ROW = "INSERT INTO keepstep_checkpoint (run, seq, kind, record, body) VALUES (?, ?, ?, CAST(? AS TEXT), ?)"
_HEAD = (
    "SELECT status, seq, checksum, epoch, worker, due_at, wakes, signals, recoveries, signals_read, kept_from,"
    " signals_from, holds, gate FROM keepstep_head WHERE run = ?"
)
_MOVE = (
    "UPDATE keepstep_head SET status = ?, seq = ?, checksum = ?, worker = ?, due_at = ?, wakes = ?, signals = ?,"
    " recoveries = ?, updated_at = ?, signals_read = ?, holds = ?, gate = iif(?4 IS NULL, ?, gate),"
    " since = iif(?12 IS NULL, NULL, ?9) WHERE run = ?"
)
_KEEP = "UPDATE keepstep_head SET signals_read = ?, kept_from = ?, signals_from = ? WHERE run = ?"
_TRIM = "DELETE FROM keepstep_checkpoint WHERE run = ? AND seq > 1 AND seq < ?"
_TRIM_SIGNALS = "DELETE FROM keepstep_signal WHERE run = ? AND seq < ?"
# A signal touches no index unless it wakes the run.
_RECEIVE = "UPDATE keepstep_head SET signals = ? WHERE run = ?"
_WAKE = (
    "UPDATE keepstep_head SET signals = ?, due_at = ?, gate = iif(gate LIKE 'service/%', ?, gate),"
    " since = iif(gate LIKE 'service/%' AND ?3 IS NULL, NULL, since) WHERE run = ?"
)
_LEASE = "SELECT worker, epoch, signals FROM keepstep_head WHERE run = ?"
_SIGNAL_SEQ = "SELECT seq FROM keepstep_signal WHERE run = ? AND id = ? AND id <> ''"
_ADD_RUN = (
    "INSERT INTO keepstep_run (id, workflow, version, fingerprint, queue, priority, input, seed, parent, parent_key,"
    " origin, key, tags, deadline_at, traceparent, created_at, created_by, data_key, dedupe)"
    " VALUES (?, ?, ?, ?, ?, ?, CAST(? AS TEXT), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
)
_ADD_HEAD = (
    "INSERT INTO keepstep_head (run, number, workflow, version, queue, key, priority, status, seq, checksum, epoch,"
    " worker, due_at, wakes, signals, recoveries, updated_at, dedupe, holds, gate, since)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_TWIN = (
    "SELECT run FROM keepstep_head WHERE queue = ? AND dedupe = ?"
    " AND status NOT IN ('completed', 'failed', 'cancelled')"
)
_ADD_SIGNAL = (
    "INSERT INTO keepstep_signal (run, seq, name, payload, id, sender, sent_at, checksum)"
    " VALUES (?, ?, ?, CAST(? AS TEXT), ?, ?, ?, ?)"
)
#: Moves a signal at the maximum position, which a damaged row may have, after the others: no signal could follow it.
_LOWER_POSITION = (
    "UPDATE keepstep_signal SET position ="
    " (SELECT coalesce(max(position), 0) + 1 FROM keepstep_signal WHERE position < 1 << 62)"
    " WHERE position = 9223372036854775807 RETURNING position"
)
_LOWER_SEQUENCE = (
    "UPDATE sqlite_sequence SET seq = (SELECT max(position) FROM keepstep_signal) WHERE name = 'keepstep_signal'"
)


def lower_position(cursor: Cursor) -> bool:
    """Make room for signals after a damaged row at the maximum position. Return False if there is no such row."""
    if not cursor.execute(_LOWER_POSITION).fetchall():
        return False
    cursor.execute(_LOWER_SEQUENCE)
    return True


class _Stored(NamedTuple):
    """A head as stored, without `updated_at`."""

    status: Status
    seq: int
    checksum: str
    epoch: int
    worker: str | None
    due_at: float | None
    wakes: str
    signals: int
    recoveries: int
    signals_read: int
    kept_from: int
    signals_from: int
    holds: int
    gate: str | None


#: The fields that only an uncommon change sets, and their values in a common one. One comparison is faster than ten.
_uncommon = attrgetter(
    *("status", "release", "progress", "signals_seen", "creates", "sends", "within", "signals_read"),
    *("trim", "trim_signals"),
)
_COMMON = (None, False, True, None, (), (), None, None, None, None)
_unusual = attrgetter("within", "signals_read", "trim", "trim_signals")
_USUAL = (None, None, None, None)
#: More signals than a run can have received.
_ANY = 2**63 - 1


def _is_common(change: Advance) -> bool:
    """Whether a change only appends rows to a running run."""
    rows = change.rows
    return (
        bool(rows)
        and _uncommon(change) == _COMMON
        and rows[0].seq == change.after + 1
        and (len(rows) == 1 or rules.extends(rows, change.after))
    )


def _is_plain_end(change: Advance) -> bool:
    """Whether a change only ends its run, with one record that is written to nobody else."""
    rows = change.rows
    return (
        change.status in FINISHED
        and len(rows) == 1
        and rows[0].seq == change.after + 1
        and change.progress
        and not change.creates
        and not change.sends
        and _unusual(change) == _USUAL
    )


class Undone(Exception):
    """A change's `within` made SQLite roll back the whole batch, which must be repeated without that change."""

    def __init__(self, change: Advance, error: Exception) -> None:
        super().__init__(change.run)
        self.change = change
        self.error = error


def apply_changes(
    writer: Writer,
    clock: Clock,
    within_seconds: float,
    undone: dict[int, Exception],
    changes: Sequence[Change],
    *,
    limited: Collection[str] = (),
) -> tuple[list[Answer], int]:
    """Apply changes inside a transaction. Return one answer for each, and the number of signals written.

    New runs of the `limited` queues wait at their gates.
    `undone` holds, by the identity of the change, the errors of changes that made SQLite roll the batch back.
    """
    # A datetime rounds to whole microseconds, as stored times are.
    now = datetime.fromtimestamp(clock.now(), UTC).timestamp()
    batch = Batch(writer.connection, writer.cursor, now, within_seconds, undone, limited=limited)
    return batch.apply(changes), batch.signals


class Batch:
    """The changes of one transaction, applied in order, and the view on which they are decided.

    Common changes are written by one guarded statement, without a read. Every other change is decided by its own
    transition and written at once. Only rows are collected, and inserted together at the end.
    """

    def __init__(
        self,
        connection: apsw.Connection,
        cursor: Cursor,
        now: float,
        within_seconds: float,
        undone: dict[int, Exception],
        *,
        limited: Collection[str] = (),
    ) -> None:
        self._limited = limited
        self._connection = connection
        self._cursor = cursor
        self._now = now
        self._within_seconds = within_seconds
        self._undone = undone
        self._rows: list[tuple[str, int, str, bytes, bytes | None]] = []
        self.signals = 0

    def apply(self, changes: Sequence[Change]) -> list[Answer]:
        """Apply the changes, and return one answer for each."""
        together: set[int] = set()
        if len(changes) > 1:
            common = [change for change in changes if type(change) is Advance and _is_common(change)]
            together = set(map(id, common)) if self._extend_together(changes, common) else together
        answers: list[Answer] = []
        for change in changes:
            if id(change) in together:
                answers.append(self._extended(change))  # type: ignore[arg-type]
            else:
                answers.append(self._apply(change))
        if self._rows:
            self._cursor.executemany(_ADD_ROW, self._rows)
        return answers

    def _apply(self, change: Change) -> Answer:
        if type(change) is Advance and (
            self._end(change) if change.status is not None else _is_common(change) and self._extend(change)
        ):
            return self._extended(change)
        if type(change) is Create and change.over is None and change.run.dedupe is None:
            run = rules.check_create(change)
            if self._insert(run):
                self._add(run.id, change.rows)
                self._add_signals(change.signals)
                return Answer(Verdict.DONE, run, run.seq)
        if type(change) is Create and change.over is not None:
            self._remove_damaged(change)
        if id(change) in self._undone:
            return Answer(Verdict.FAILED, error=self._undone[id(change)])
        if type(change) is Advance and change.within is not None:
            return self._decide_within(change)
        return self._decide(change)

    def _remove_damaged(self, create: Create) -> None:
        """Remove the run that a repair replaces, if its head is unreadable and its lease and signals allow it."""
        run = create.run.id
        try:
            self.head(run)
        except CheckpointCorrupt:
            if may_replace(create, *self._cursor.execute(_LEASE, (run,)).fetchall()[0]):
                self._remove(run)

    def _decide(self, change: Change) -> Answer:
        transition = Transition(self, instant(self._now))
        answer = transition.apply(change)
        if answer.verdict is Verdict.DONE:
            self._write(transition.writes)
        return answer

    def _decide_within(self, change: Advance) -> Answer:
        """Decide a transactional change. A refusal undoes the writes of its function."""
        self._cursor.execute("SAVEPOINT keepstep_change")
        answer = self._decide(change)
        if answer.verdict is not Verdict.DONE:
            self._cursor.execute("ROLLBACK TO keepstep_change")
        self._cursor.execute("RELEASE keepstep_change")
        return answer

    # -- common changes ------------------------------------------------------------------------------------------------

    def _extend(self, change: Advance) -> bool:
        """Update the head for a common change. Return False if its fence does not hold."""
        self._cursor.execute(_EXTEND, self._extension(change))
        return bool(self._connection.changes())

    def _end(self, change: Advance) -> bool:
        """Update the head for the plain end of a run. Return False for another change, or if the fence fails."""
        if not _is_plain_end(change):
            return False
        at = self._now if change.at is None else change.at.timestamp()
        end = (change.status, change.after + 1, change.checksum, at, change.run, change.after, change.epoch)
        self._cursor.execute(_END, (*end, change.worker, _ANY if change.signals_seen is None else change.signals_seen))
        return bool(self._connection.changes())

    def _extended(self, change: Advance) -> Answer:
        """Write the rows of a change whose head is updated."""
        self._add(change.run, change.rows)
        return Answer(Verdict.DONE, None, change.rows[-1].seq)

    def _extend_together(self, changes: Sequence[Change], common: list[Advance]) -> bool:
        """Update the heads for all common changes with one call. Unless every fence holds, undo it and return False."""
        runs = [change.run for change in changes if type(change) is Advance]
        heads = [self._extension(change) for change in common]
        if not heads or len(set(runs)) < len(runs):
            return False
        cursor, connection = self._cursor, self._connection
        cursor.execute("SAVEPOINT keepstep_heads")
        before = connection.total_changes()
        cursor.executemany(_EXTEND, heads)
        held = connection.total_changes() - before == len(heads)
        if not held:
            cursor.execute("ROLLBACK TO keepstep_heads")
        cursor.execute("RELEASE keepstep_heads")
        return held

    def _extension(self, change: Advance) -> tuple[int, str, float, str, int, int, str]:
        at = self._now if change.at is None else change.at.timestamp()
        return change.rows[-1].seq, change.checksum, at, change.run, change.after, change.epoch, change.worker

    def _add(self, run: str, rows: Iterable[Row]) -> None:
        for row in rows:
            self._rows.append((run, row.seq, row.kind, row.record, row.body))

    # -- the view ------------------------------------------------------------------------------------------------------

    def head(self, run: str) -> Head | None:
        try:
            found = self._cursor.execute(_HEAD, (run,)).fetchall()
            if not found:
                return None
            stored = msgspec.convert(found[0], _Stored)
            due_at = None if stored.due_at is None else instant(stored.due_at)
            return Head(
                stored.status,
                stored.seq,
                stored.checksum,
                stored.epoch,
                stored.worker,
                due_at,
                names(stored.wakes),
                stored.signals,
                stored.recoveries,
                None,
                stored.signals_read,
                stored.kept_from,
                stored.signals_from,
                stored.holds,
                None if stored.worker is not None else services.service_in(stored.gate),
            )
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise CheckpointCorrupt(f"run {run!r}: its head cannot be read: {error}") from None

    def run(self, run: str) -> Run | None:
        return read_run(self._cursor, run)

    def data_key(self, run: str) -> str | None:
        found = self._cursor.execute("SELECT data_key FROM keepstep_run WHERE id = ?", (run,)).fetchall()
        return found[0][0] if found else None

    def signal_seq(self, run: str, signal_id: str) -> int | None:
        found = self._cursor.execute(_SIGNAL_SEQ, (run, signal_id)).fetchall()
        return found[0][0] if found else None

    def twin(self, queue: str, dedupe: str) -> str | None:
        found = self._cursor.execute(_TWIN, (queue, dedupe)).fetchall()
        return found[0][0] if found else None

    # -- writes --------------------------------------------------------------------------------------------------------

    def _write(self, writes: Writes) -> None:
        for run_id in writes.removed:
            self._remove(run_id)
        for run in writes.runs.values():
            self._insert(run)
        for run_id, head in writes.heads.items():
            self._move(run_id, head)
        for run_id, key in writes.keys.items():
            self._cursor.execute("UPDATE keepstep_run SET data_key = ? WHERE id = ?", (key, run_id))
        for run_id, row in writes.rows:
            self._add(run_id, (row,))
        self._add_signals(writes.signals)
        self.signals += len(writes.signals)
        for run_id in writes.trims:
            self._trim(run_id, writes.heads[run_id])

    def _trim(self, run: str, head: Head) -> None:
        self._cursor.execute(_KEEP, (head.signals_read, head.kept_from, head.signals_from, run))
        self._cursor.execute(_TRIM, (run, head.kept_from))
        self._cursor.execute(_TRIM_SIGNALS, (run, head.signals_from))
        self._rows = [row for row in self._rows if row[0] != run or row[1] == 1 or row[1] >= head.kept_from]

    def _remove(self, run: str) -> None:
        self._cursor.execute("DELETE FROM keepstep_head WHERE run = ?", (run,))
        forget(self._cursor, run)
        self._rows = [row for row in self._rows if row[0] != run]

    def _move(self, run: str, head: Head) -> None:
        if head.updated_at is None:  # the run has only received signals
            if head.worker is None and head.due_at is not None:
                gate = services.gate_text(head.service)
                self._cursor.execute(_WAKE, (head.signals, seconds(head.due_at), gate, run))
            else:
                self._cursor.execute(_RECEIVE, (head.signals, run))
            return
        values = (
            head.status,
            head.seq,
            head.checksum,
            head.worker,
            seconds(head.due_at),
            names_text(head.wakes),
            head.signals,
            head.recoveries,
            seconds(head.updated_at),
            head.signals_read,
            head.holds,
            services.gate_text(head.service),
            run,
        )
        self._cursor.execute(_MOVE, values)

    def _insert(self, run: Run) -> bool:
        """Insert a run with its head. Return False if a run with this id exists."""
        cursor = self._cursor
        cursor.execute(
            _ADD_RUN,
            (
                run.id,
                run.workflow,
                run.version,
                run.fingerprint,
                run.queue,
                run.priority,
                run.input,
                run.seed,
                run.parent,
                run.parent_key,
                run.origin,
                run.key,
                _json(run.tags).decode() if run.tags else "",
                seconds(run.deadline_at),
                run.traceparent,
                run.created_at.timestamp(),
                run.created_by,
                run.data_key,
                run.dedupe,
            ),
        )
        if not self._connection.changes():
            return False
        gate = gates.waits_at(run, self._limited) if self._limited or run.service is not None else None
        cursor.execute(
            _ADD_HEAD,
            (
                run.id,
                self._connection.last_insert_rowid(),
                run.workflow,
                run.version,
                run.queue,
                run.key,
                run.priority,
                run.status,
                run.seq,
                run.checksum,
                run.epoch,
                run.worker,
                seconds(run.due_at),
                names_text(run.wakes),
                run.signals,
                run.recoveries,
                seconds(run.updated_at),
                run.dedupe,
                run.holds,
                gate,
                None if gate is None else seconds(run.due_at if run.service is None else run.updated_at),
            ),
        )
        if run.signals_read != 0 or run.kept_from or run.signals_from:  # copied from elsewhere
            signals_read = run.signals if run.signals_read is None else run.signals_read
            cursor.execute(_KEEP, (signals_read, run.kept_from, run.signals_from, run.id))
        return True

    def _add_signals(self, signals: Iterable[Signal]) -> None:
        for signal in signals:
            self._cursor.execute(
                _ADD_SIGNAL,
                (
                    signal.run,
                    signal.seq,
                    signal.name,
                    signal.payload,
                    signal.id,
                    signal.sender,
                    seconds(signal.sent_at),
                    signal.checksum,
                ),
            )

    # -- statements of the user inside the transaction -----------------------------------------------------------------

    def call(self, change: Advance) -> Exception | None:
        """Call the change's function under guard. Return its error, or None."""
        if change.within is None:
            return None
        guard = StatementGuard(self._connection, self._within_seconds)
        try:
            guard.call(change.within)
        except StoreError:  # a failure of the store concerns the whole batch
            raise
        except Exception as error:  # a failure of the user's function refuses only its change
            if not self._connection.in_transaction:
                raise Undone(change, error) from error
            return error
        return None


def forget(cursor: Cursor, run: str) -> None:
    """Remove all rows of a run except its head."""
    cursor.execute("DELETE FROM keepstep_run WHERE id = ?", (run,))
    cursor.execute("DELETE FROM keepstep_checkpoint WHERE run = ?", (run,))
    cursor.execute("DELETE FROM keepstep_signal WHERE run = ?", (run,))
