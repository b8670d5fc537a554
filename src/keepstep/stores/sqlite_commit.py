"""How a batch of changes is applied to a SQLite store, inside one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import apsw
import msgspec

from ..errors import CheckpointCorrupt, StoreError
from ..model import Run, Signal, Status
from ..ports import Advance, Answer, Change, Create, Rekey, Row, Verdict, instant
from . import rules
from .sqlite_connection import Cursor
from .sqlite_rails import Rails
from .sqlite_rows import names, names_text, read_run, seconds

_json = msgspec.json.Encoder().encode

# The common change, a running run's next rows, is one statement that is its own fence and touches no index.
_EXTEND = (
    "UPDATE keepstep_head SET seq = ?, checksum = ?, updated_at = ?, recoveries = 0"
    " WHERE run = ? AND seq = ? AND epoch = ? AND worker = ? AND status = 'running'"
)
_ADD_ROW = "INSERT INTO keepstep_checkpoint (run, seq, kind, record, body) VALUES (?, ?, ?, CAST(? AS TEXT), ?)"
_HEAD = (
    "SELECT status, seq, checksum, epoch, worker, due_at, wakes, signals, recoveries FROM keepstep_head WHERE run = ?"
)
_MOVE = (
    "UPDATE keepstep_head SET status = ?, seq = ?, checksum = ?, worker = ?, due_at = ?, wakes = ?, recoveries = ?,"
    " updated_at = ? WHERE run = ?"
)
_ADD_RUN = (
    "INSERT INTO keepstep_run (id, workflow, version, fingerprint, queue, priority, input, seed, parent, parent_key,"
    " origin, key, tags, deadline_at, traceparent, created_at, created_by, data_key)"
    " VALUES (?, ?, ?, ?, ?, ?, CAST(? AS TEXT), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
)
_ADD_HEAD = (
    "INSERT INTO keepstep_head (run, number, workflow, version, queue, priority, status, seq, checksum, epoch, worker,"
    " due_at, wakes, signals, recoveries, updated_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_ADD_SIGNAL = (
    "INSERT INTO keepstep_signal (run, seq, name, payload, id, sender, sent_at, checksum)"
    " VALUES (?, ?, ?, CAST(? AS TEXT), ?, ?, ?, ?)"
)
#: A signal at the last position that there is would let none follow it: it is put after the others instead.
_LOWER_POSITION = (
    "UPDATE keepstep_signal SET position ="
    " (SELECT coalesce(max(position), 0) + 1 FROM keepstep_signal WHERE position < 1 << 62)"
    " WHERE position = 9223372036854775807 RETURNING position"
)
_LOWER_SEQUENCE = (
    "UPDATE sqlite_sequence SET seq = (SELECT max(position) FROM keepstep_signal) WHERE name = 'keepstep_signal'"
)


def lower_position(cursor: Cursor) -> bool:
    """Make room for signals after one that a damaged row puts at the last position; False if that is not so."""
    if not cursor.execute(_LOWER_POSITION).fetchall():
        return False
    cursor.execute(_LOWER_SEQUENCE)
    return True


class _Head(NamedTuple):
    """What changes about a run, as stored."""

    status: Status
    seq: int
    checksum: str
    epoch: int
    worker: str | None
    due_at: float | None
    wakes: str
    signals: int
    recoveries: int


def _is_common(change: Advance) -> bool:
    """Whether a change is a running run's next rows and nothing else."""
    rows = change.rows
    return (
        bool(rows)
        and change.status is None
        and not change.release
        and change.progress
        and change.signals_seen is None
        and not change.creates
        and not change.sends
        and change.within is None
        and rows[0].seq == change.after + 1
        and (len(rows) == 1 or rules.extends(rows, change.after))
    )


class Undone(Exception):
    """A change's `within` made SQLite roll the whole batch back; the batch must be made again without it."""

    def __init__(self, change: Advance, error: Exception) -> None:
        super().__init__(change.run)
        self.change = change
        self.error = error


class Batch:
    """One transaction's worth of changes, applied in order. Rows are gathered and inserted together at the end."""

    def __init__(self, connection: apsw.Connection, cursor: Cursor, now: float, within_seconds: float) -> None:
        self._connection = connection
        self._cursor = cursor
        self._now = now
        self._within_seconds = within_seconds
        self._rows: list[tuple[str, int, str, bytes, bytes | None]] = []
        self.signals = 0

    def apply(self, changes: Sequence[Change], undone: dict[int, Exception]) -> list[Answer]:
        """One answer per change. `undone` holds, by identity, the changes that already failed, and how."""
        together: set[int] = set()
        if len(changes) > 1:
            common = [change for change in changes if type(change) is Advance and _is_common(change)]
            together = set(map(id, common)) if self._extend_together(changes, common) else together
        answers: list[Answer] = []
        for change in changes:
            if id(change) in together:
                answers.append(self._extended(change))  # type: ignore[arg-type]
            else:
                answers.append(self._apply(change, undone))
        if self._rows:
            self._cursor.executemany(_ADD_ROW, self._rows)
        return answers

    def _apply(self, change: Change, undone: dict[int, Exception]) -> Answer:
        if type(change) is Advance:
            if _is_common(change) and self._extend(change):
                return self._extended(change)
            return self._advance(change, undone.get(id(change)))
        if type(change) is Create:
            return self._create(change)
        if type(change) is Rekey:
            return self._rekey(change)
        return self._send(change.signal)  # type: ignore[union-attr]

    # -- the lease holder's changes ------------------------------------------------------------------------------------

    def _extend(self, change: Advance) -> bool:
        """Move the head of a common change; False if its fence does not hold."""
        self._cursor.execute(_EXTEND, self._extension(change))
        return bool(self._connection.changes())

    def _extended(self, change: Advance) -> Answer:
        """Write the rows of a change whose head is moved."""
        self._add(change.run, change.rows)
        return Answer(Verdict.DONE, None, change.rows[-1].seq)

    def _extend_together(self, changes: Sequence[Change], common: list[Advance]) -> bool:
        """Move the heads of all common changes with one call; False, with nothing moved, unless every fence holds."""
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

    def _advance(self, change: Advance, failed: Exception | None) -> Answer:
        """Any change of a lease holder: refused whole, or written whole."""
        if failed is not None:
            return Answer(Verdict.FAILED, error=failed)
        if not (change.creates or change.sends or change.within):
            return self._settle(change)
        self._cursor.execute("SAVEPOINT keepstep_change")
        mark, signals = len(self._rows), self.signals
        answer = self._settle(change)
        if answer.verdict is not Verdict.DONE:
            del self._rows[mark:]
            self.signals = signals
            self._cursor.execute("ROLLBACK TO keepstep_change")
        self._cursor.execute("RELEASE keepstep_change")
        return answer

    def _settle(self, change: Advance) -> Answer:
        head = self._head(change.run)
        refusal = rules.fence(head, change)
        if head is None or refusal is not None:
            return refusal or Answer(Verdict.FENCED, about=change.run)
        if change.within is not None:
            error = self._within(change, change.within)
            if error is not None:
                return Answer(Verdict.FAILED, error=error)
            if not rules.extends(change.rows, change.after):
                return Answer(Verdict.FENCED, about=change.run)
        status = rules.next_status(head.status, change)
        if status is None:
            return Answer(Verdict.ILLEGAL)
        return self._create_children(change) or self._send_all(change) or self._move(head, change, status)

    def _head(self, run: str) -> _Head | None:
        found = self._cursor.execute(_HEAD, (run,)).fetchall()
        if not found:
            return None
        try:
            return msgspec.convert(found[0], _Head)
        except msgspec.MsgspecError as error:
            raise CheckpointCorrupt(f"run {run!r}: its head cannot be read: {error}") from None

    def _move(self, head: _Head, change: Advance, status: Status) -> Answer:
        seq, checksum, worker, recoveries = head.seq, head.checksum, head.worker, head.recoveries
        due_at, wakes = head.due_at, head.wakes
        at = change.at or instant(self._now)
        if change.rows:
            seq, checksum = change.rows[-1].seq, change.checksum
            recoveries = 0 if change.progress else recoveries
            self._add(change.run, change.rows)
        if rules.releases(change, status):
            worker = None
            due_at, wakes = self._wake_ups(change, status, at)
        values = (status, seq, checksum, worker, due_at, wakes, recoveries, at.timestamp(), change.run)
        self._cursor.execute(_MOVE, values)
        return Answer(Verdict.DONE, None, seq)

    def _wake_ups(self, change: Advance, status: Status, at: datetime) -> tuple[float | None, str]:
        """When and on which signals a released run wakes; a signal that it sent itself just now counts."""
        if status in rules.ENDED:
            return None, ""
        due_at = seconds(rules.due_after(change, status, at))
        if any(send.signal.run == change.run and send.signal.name in change.wakes for send in change.sends):
            due_at = min(due_at or self._now, self._now)
        return due_at, names_text(change.wakes)

    def _create_children(self, change: Advance) -> Answer | None:
        for create in change.creates:
            answer = self._create(create)
            if answer.run is None or not rules.same_child(answer.run, create.run):
                return Answer(Verdict.CONFLICT, about=create.run.id)
        return None

    def _send_all(self, change: Advance) -> Answer | None:
        for send in change.sends:
            answer = self._send(send.signal)
            if answer.verdict not in (Verdict.DONE, Verdict.EXISTS):
                return answer
        return None

    # -- anyone's changes ----------------------------------------------------------------------------------------------

    def _create(self, create: Create) -> Answer:
        run = rules.check_create(create)
        cursor = self._cursor
        if create.over is not None and not self._make_room(create):
            return Answer(Verdict.FENCED, run=self._existing(run.id), about=run.id)
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
            ),
        )
        if not self._connection.changes():
            return Answer(Verdict.EXISTS, run=self._existing(run.id))
        cursor.execute(
            _ADD_HEAD,
            (
                run.id,
                self._connection.last_insert_rowid(),
                run.workflow,
                run.version,
                run.queue,
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
            ),
        )
        self._add(run.id, create.rows)
        for signal in create.signals:
            self._add_signal(signal)
        return Answer(Verdict.DONE, run, run.seq)

    def _make_room(self, create: Create) -> bool:
        """Remove a run that another is to stand for; False if it is leased, or was since."""
        run = create.run.id
        asked = "SELECT worker, epoch, signals FROM keepstep_head WHERE run = ?"
        for worker, epoch, signals in self._cursor.execute(asked, (run,)).fetchall():
            if not rules.may_replace(create, worker, epoch, signals):
                return False
        self._cursor.execute("DELETE FROM keepstep_head WHERE run = ?", (run,))
        forget(self._cursor, run)
        return True

    def _rekey(self, change: Rekey) -> Answer:
        found = self._cursor.execute("SELECT data_key FROM keepstep_run WHERE id = ?", (change.run,)).fetchall()
        if not found:
            return Answer(Verdict.NOT_FOUND, about=change.run)
        if found != [(change.old,)]:
            return Answer(Verdict.FENCED, about=change.run)
        self._cursor.execute("UPDATE keepstep_run SET data_key = ? WHERE id = ?", (change.new, change.run))
        return Answer(Verdict.DONE)

    def _existing(self, run_id: str) -> Run | None:
        """The run that is there already; None if its row is damaged, which must not stop the rest of the batch."""
        try:
            return read_run(self._cursor, run_id)
        except CheckpointCorrupt:
            return None

    def _send(self, signal: Signal) -> Answer:
        cursor = self._cursor
        head = self._head(signal.run)
        if head is None:
            return Answer(Verdict.NOT_FOUND, about=signal.run)
        if signal.id:
            same = cursor.execute(
                "SELECT seq FROM keepstep_signal WHERE run = ? AND id = ? AND id <> ''", (signal.run, signal.id)
            ).fetchall()
            if same:
                return Answer(Verdict.EXISTS, None, same[0][0])
        if head.status.finished:
            return Answer(Verdict.FINISHED, about=signal.run)
        seq = head.signals + 1
        self._add_signal(rules.seal_signal(signal, seq, instant(self._now)))
        if head.worker is None and head.wakes and signal.name in _wakes(signal.run, head):
            due_at = self._now if head.due_at is None else min(head.due_at, self._now)
            cursor.execute("UPDATE keepstep_head SET signals = ?, due_at = ? WHERE run = ?", (seq, due_at, signal.run))
        else:
            cursor.execute("UPDATE keepstep_head SET signals = ? WHERE run = ?", (seq, signal.run))
        self.signals += 1
        return Answer(Verdict.DONE, None, seq)

    def _add_signal(self, signal: Signal) -> None:
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

    # -- a user's own statements inside the transaction --------------------------------------------------------------

    def _within(self, change: Advance, function: Callable[[Any], None]) -> Exception | None:
        """Call the change's function between the guard rails; its error, or None."""
        rails = Rails(self._connection, self._within_seconds)
        try:
            rails.call(function)
        except StoreError:  # the store's trouble, not the function's
            raise
        except Exception as error:  # any failure of a user's function refuses that change only
            if not self._connection.in_transaction:
                raise Undone(change, error) from error
            return error
        return None


def forget(cursor: Cursor, run: str) -> None:
    """Remove what a run consists of beside its head."""
    cursor.execute("DELETE FROM keepstep_run WHERE id = ?", (run,))
    cursor.execute("DELETE FROM keepstep_checkpoint WHERE run = ?", (run,))
    cursor.execute("DELETE FROM keepstep_signal WHERE run = ?", (run,))


def _wakes(run: str, head: _Head) -> tuple[str, ...]:
    try:
        return names(head.wakes)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointCorrupt(f"run {run!r}: its head cannot be read: {error}") from None
