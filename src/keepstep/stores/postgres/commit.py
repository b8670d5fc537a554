"""Applies a batch of changes to a PostgreSQL store inside one transaction.

Usually a batch is one statement, sent and made durable in one round trip. It states the expected heads, and fails as a
whole if one of them differs. In that case, and for changes that concern other runs too, the heads are locked in the
order of their names and read. Each change is then decided here, and written by a second round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
from psycopg.pq import TransactionStatus

from ...errors import CheckpointCorrupt
from ...model import Run, Status
from ...model.checkpoint import FOLLOWED
from ...ports import Advance, Answer, Change, Create, Rekey, Send
from .. import rules
from ..services import service_in
from ..transition import Head, Transition, due_after, next_status, releases
from .pool import Connection, execute_binary, numbered
from .rows import names, original_or_none, plain, run_from, texts
from .statements import DUE, LOOK, STEP_TYPES, Move, Statements, Written, step_values

# -- the usual batch ---------------------------------------------------------------------------------------------------


#: A statement, its values in PostgreSQL's binary form, and their types.
Statement = tuple[bytes, Sequence[bytes | None], tuple[int, ...]]


def one_statement(
    statements: Statements, changes: Sequence[Change], now: datetime
) -> tuple[Written, Statement] | tuple[None, None]:
    """Return the statement for a batch whose every change concerns one run, or None if there are others.

    The statement fails as a whole unless every run is as expected.
    """
    simple = _Simple()
    if not all(simple.takes(change, now) for change in changes) or len(simple.runs) < len(changes):
        return None, None
    written, extends = simple.written, sorted(simple.extends, key=lambda change: change.run)
    if len(changes) == len(extends) == len(written.rows) == 1:
        return written, (statements.step, step_values(extends[0], now), STEP_TYPES)
    moves = sorted(simple.moves, key=lambda move: move.change.run)
    sql, arrays = statements.together(written, extends, moves, now)
    return written, (numbered(sql), arrays, tuple(array.oid for array in arrays))


def in_one_go(
    connection: Connection, statements: Statements, changes: Sequence[Change], now: datetime
) -> Written | None:
    """Write a batch of changes to single runs. Return None, with nothing written, if a run is not as expected."""
    written, statement = one_statement(statements, changes, now)
    if statement is None:
        return None
    try:
        execute_binary(connection, *statement, prepare=not statements.address.proxy)
    except (psycopg.errors.UniqueViolation, psycopg.errors.InvalidTextRepresentation):
        return None
    return written


class _Simple:
    """Collects changes that one statement can write: new runs, and changes of lease holders to their own runs."""

    def __init__(self) -> None:
        self.written = Written()
        self.extends: list[Advance] = []
        self.moves: list[Move] = []
        self.runs: set[str] = set()

    def takes(self, change: Change, now: datetime) -> bool:
        """Add a change if it is of this kind. Return whether it was added."""
        if type(change) is Advance:
            return self._takes_advance(change, now)
        if type(change) is not Create or change.over is not None or change.signals or change.run.dedupe is not None:
            return False
        run = rules.check_create(change)
        self.runs.add(run.id)
        self.written.runs[run.id] = run
        self.written.rows += [(run.id, row) for row in change.rows]
        _tell(self.written, run.status, _may_be_claimed(run, now))
        return True

    def _takes_advance(self, change: Advance, now: datetime) -> bool:
        if change.creates or change.sends or change.within is not None or not rules.extends(change.rows, change.after):
            return False
        if change.trim is not None or change.trim_signals is not None:
            return False
        self.runs.add(change.run)
        _add_rows(self.written, change)
        plain_step = change.rows and change.status is None and not change.release
        if plain_step and change.progress and change.signals_seen is None and change.signals_read is None:
            self.extends.append(change)
            return True
        move = _move_of(change, now)
        if move is None:
            return False
        self.moves.append(move)
        is_due = move.due_at is not None and move.due_at <= now
        _tell(self.written, move.status, is_due or (move.freed and change.service is not None))
        return True


def _move_of(change: Advance, now: datetime) -> Move | None:
    """Return the effect of a change on a running run, or None if it is not allowed."""
    status = next_status(Status.RUNNING, change)
    if status is None or (change.signals_seen or 0) < 0:
        return None
    freed = releases(change, status)
    at = change.at or now
    return Move(change, status, freed, at, due_after(change, status, at) if freed else None)


def _add_rows(written: Written, change: Advance) -> None:
    for row in change.rows:
        written.rows.append((change.run, row))
        if row.kind in FOLLOWED:
            written.notifications.add(LOOK)


def _may_be_claimed(head: Head | Run, now: datetime) -> bool:
    """Whether a run is due, or waits at a service at which a worker may have a place."""
    is_due = head.due_at is not None and head.due_at <= now
    return head.worker is None and (is_due or head.service is not None)


def _tell(written: Written, status: Status, may_be_claimed: bool) -> None:
    if status in rules.ENDED or status is Status.PAUSED:
        written.notifications.add(LOOK)
    if may_be_claimed:
        written.notifications.add(DUE)


# -- any batch ---------------------------------------------------------------------------------------------------------


class Batch:
    """The changes of one transaction, and the locked heads that they are decided on.

    It begins the transaction if necessary.
    """

    def __init__(
        self, connection: Connection, statements: Statements, changes: Sequence[Change], now: datetime
    ) -> None:
        self._connection = connection
        self._statements = statements
        self._now = now
        self._heads: dict[str, Head] = {}
        self._runs: dict[str, Run | CheckpointCorrupt] = {}
        self._signal_ids: dict[tuple[str, str], int] = {}
        self.written = Written()
        self._read(changes)

    def _read(self, changes: Sequence[Change]) -> None:
        heads: set[str] = set()
        runs: set[str] = set()
        signals: set[tuple[str, str]] = set()
        for change in changes:
            _concerned(change, heads, runs, signals)
        with self._connection.pipeline():
            if self._connection.info.transaction_status == TransactionStatus.IDLE:
                self._connection.execute("BEGIN")
            locked = self._connection.execute(self._statements.lock, (texts(sorted(map(plain, heads))),), binary=True)
            sent = there = None
            if signals:
                asked = sorted(signals)
                values = (texts([plain(run) for run, _ in asked]), texts([plain(name) for _, name in asked]))
                sent = self._connection.execute(self._statements.signal_ids, values, binary=True)
            if runs:
                there = self._connection.execute(self._statements.runs, (texts(sorted(runs)),), binary=True)
            for row in locked.fetchall():
                self._heads[row[0]] = head_from(row)
            self._signal_ids = {(run, name): seq for run, name, seq in sent.fetchall()} if sent else {}
            for row in there.fetchall() if there else ():
                self._runs[row[1]] = _run_or_error(row)

    def apply(self, changes: Sequence[Change]) -> list[Answer]:
        """Return one answer per change; nothing is written yet."""
        transition = Transition(self, self._now, self.written)
        answers = [transition.apply(change) for change in changes]
        _notify(self.written, self._now)
        return answers

    def write(self) -> None:
        """Write the decided changes. The caller commits."""
        written, statements, execute = self.written, self._statements, self._connection.execute
        if written.removed:
            for sql in statements.remove:
                execute(sql, (texts(written.removed),))
        if written.keys:
            execute(statements.rekey, (texts(list(written.keys)), texts(list(written.keys.values()))))
        if written.heads or written.runs or written.rows or written.signals:
            sql, values = statements.together(written)
            execute(sql, values)
        if written.trims:
            for sql in statements.trim:
                execute(sql, (texts(list(map(plain, written.trims))),))

    # -- reading -------------------------------------------------------------------------------------------------------

    def head(self, run: str) -> Head | None:
        return self._heads.get(run)

    def run(self, run: str) -> Run | None:
        found = self._runs.get(run)
        if isinstance(found, CheckpointCorrupt):
            raise found
        return found

    def data_key(self, run: str) -> str | None:
        found = self._runs.get(run)
        return found.data_key if isinstance(found, Run) else None

    def signal_seq(self, run: str, signal_id: str) -> int | None:
        return self._signal_ids.get((run, plain(signal_id)))

    def twin(self, queue: str, dedupe: str) -> str | None:
        values = (plain(queue), plain(dedupe))
        found = self._connection.execute(self._statements.twin, values, binary=True).fetchall()
        for (run,) in found:
            there = self._connection.execute(self._statements.runs, (texts([run]),), binary=True).fetchall()
            self._runs |= {row[1]: _run_or_error(row) for row in there}
        return found[0][0] if found else None

    def call(self, change: Advance) -> None:
        """Do nothing: the function was called before the heads were locked."""


def _notify(written: Written, now: datetime) -> None:
    """Collect the receivers of notifications about a batch's heads, rows and signals."""
    heads: dict[str, Head | Run] = {**written.heads, **written.runs}
    for head in heads.values():
        _tell(written, head.status, _may_be_claimed(head, now))
    if any(row.kind in FOLLOWED for _, row in written.rows):
        written.notifications.add(LOOK)
    for signal in written.signals:
        worker = heads[signal.run].worker
        if worker is not None:
            written.notifications.add(f"@{worker}")


def heads_of(change: Change) -> set[str]:
    """Return the runs whose heads a change reads or writes."""
    heads: set[str] = set()
    _concerned(change, heads, set(), set())
    return set(map(plain, heads))


def _concerned(change: Change, heads: set[str], runs: set[str], signals: set[tuple[str, str]]) -> None:
    """Collect the data that must be read before a change can be decided."""
    if type(change) is Advance:
        heads.add(change.run)
        parts: list[Create | Send] = [*change.creates, *change.sends]
        for part in parts:
            _concerned(part, heads, runs, signals)
    elif type(change) is Create:
        heads.add(change.run.id)
        runs.add(change.run.id)
    elif type(change) is Rekey:
        heads.add(change.run)
        runs.add(change.run)
    else:
        signal = change.signal  # type: ignore[union-attr]
        heads.add(signal.run)
        if signal.id:
            signals.add((signal.run, signal.id))


def head_from(row: Sequence[Any]) -> Head:
    """Return the head in a row."""
    run, status, seq, checksum, epoch, worker, due_at, wakes, signals, recoveries, updated_at, *kept = row
    try:
        due_at = None if due_at is None else due_at.astimezone(UTC)
        at = updated_at.astimezone(UTC)
        kept[-1] = None if worker is not None else service_in(original_or_none(kept[-1]))  # its gate
        return Head(Status(status), seq, checksum, epoch, worker, due_at, names(wakes), signals, recoveries, at, *kept)
    except (ValueError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(f"run {run!r}: its head cannot be read: {error}") from None


def _run_or_error(row: Sequence[object]) -> Run | CheckpointCorrupt:
    try:
        return run_from(row)
    except CheckpointCorrupt as error:
        return error
