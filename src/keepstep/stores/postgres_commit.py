"""How a batch of changes is applied to a PostgreSQL store, inside one transaction.

As a rule a batch is one statement, sent and made durable in one round trip: it says which heads it expects, and fails
as a whole if one of them is another. Then, and for changes that concern other runs too, the heads are locked, in the
order of their names, and read; what becomes of each change is decided here, and written by a second round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
from psycopg.pq import TransactionStatus

from ..errors import CheckpointCorrupt
from ..model import Kind, Run, Signal, Status
from ..ports import Advance, Answer, Change, Create, Rekey, Send, Verdict
from . import rules
from .postgres_connection import Connection, execute_binary, numbered
from .postgres_rows import names, plain, run_from, texts
from .postgres_statements import DUE, LOOK, STEP_TYPES, Head, Move, Statements, Written, step_values

#: Records that someone in another process may be waiting for.
_SHOWN = frozenset({Kind.REPLY.value, Kind.PUBLISHED.value, Kind.EMITTED.value})

# -- the common batch --------------------------------------------------------------------------------------------------


#: A statement, its values in PostgreSQL's binary form, and their types.
Statement = tuple[bytes, Sequence[bytes | None], tuple[int, ...]]


def one_statement(
    statements: Statements, changes: Sequence[Change], now: datetime
) -> tuple[Written, Statement] | tuple[None, None]:
    """What writes a batch of which every change concerns one run; nothing, if there are others among them.

    It fails as a whole unless every run is as expected.
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
    """Write a batch whose every change concerns one run that is as expected; None, with nothing written, if not."""
    written, statement = one_statement(statements, changes, now)
    if statement is None:
        return None
    try:
        execute_binary(connection, *statement, prepare=not statements.address.proxy)
    except (psycopg.errors.UniqueViolation, psycopg.errors.InvalidTextRepresentation):
        return None
    return written


class _Simple:
    """Gathers changes that one statement can write: new runs, and what lease holders do to their own runs."""

    def __init__(self) -> None:
        self.written = Written()
        self.extends: list[Advance] = []
        self.moves: list[Move] = []
        self.runs: set[str] = set()

    def takes(self, change: Change, now: datetime) -> bool:
        """Take a change in, if it is one of these."""
        if type(change) is Advance:
            return self._takes_advance(change, now)
        if type(change) is not Create or change.over is not None or change.signals:
            return False
        run = rules.check_create(change)
        self.runs.add(run.id)
        self.written.runs.append(run)
        self.written.rows += [(run.id, row) for row in change.rows]
        _tell(self.written, run.status, run.worker is None and run.due_at is not None and run.due_at <= now)
        return True

    def _takes_advance(self, change: Advance, now: datetime) -> bool:
        if change.creates or change.sends or change.within is not None or not rules.extends(change.rows, change.after):
            return False
        self.runs.add(change.run)
        _add_rows(self.written, change)
        plain_step = change.rows and change.status is None and not change.release
        if plain_step and change.progress and change.signals_seen is None:
            self.extends.append(change)
            return True
        move = _move_of(change, now)
        if move is None:
            return False
        self.moves.append(move)
        _tell(self.written, move.status, None if move.due_at is None else move.due_at <= now)
        return True


def _move_of(change: Advance, now: datetime) -> Move | None:
    """What the change makes of a running run, or None if it may not."""
    status = rules.next_status(Status.RUNNING, change)
    if status is None or (change.signals_seen or 0) < 0:
        return None
    freed = rules.releases(change, status)
    at = change.at or now
    return Move(change, status, freed, at, rules.due_after(change, status, at) if freed else None)


def _add_rows(written: Written, change: Advance) -> None:
    for row in change.rows:
        written.rows.append((change.run, row))
        if row.kind in _SHOWN:
            written.tidings.add(LOOK)


def _tell(written: Written, status: Status, due: bool | None) -> None:
    if status in rules.ENDED or status is Status.PAUSED:
        written.tidings.add(LOOK)
    if due:
        written.tidings.add(DUE)


# -- any batch ---------------------------------------------------------------------------------------------------------


class Batch:
    """One transaction's worth of changes, decided in order over heads that are locked; it begins it if need be."""

    def __init__(
        self, connection: Connection, statements: Statements, changes: Sequence[Change], now: datetime
    ) -> None:
        self._connection = connection
        self._statements = statements
        self._now = now
        self._heads: dict[str, Head] = {}
        self._runs: dict[str, Run | None] = {}  # None: it is there, and damaged
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
                self._runs[row[1]] = _run_or_none(row)

    def apply(self, changes: Sequence[Change]) -> list[Answer]:
        """One answer per change; nothing is written yet."""
        return [self._apply(change) for change in changes]

    def write(self) -> None:
        """Write what was decided. The caller commits."""
        written, statements, execute = self.written, self._statements, self._connection.execute
        if written.removed:
            for sql in statements.remove:
                execute(sql, (texts(written.removed),))
        if written.keys:
            execute(
                statements.rekey, (texts([key.run for key in written.keys]), texts([key.new for key in written.keys]))
            )
        if written.heads or written.runs or written.rows or written.signals:
            sql, values = statements.together(written)
            execute(sql, values)

    def _apply(self, change: Change) -> Answer:
        if type(change) is Advance:
            return self._advance(change)
        if type(change) is Create:
            return self._create(change)
        if type(change) is Rekey:
            return self._rekey(change)
        return self._send(change.signal)  # type: ignore[union-attr]

    # -- the lease holder's changes ------------------------------------------------------------------------------------

    def _advance(self, change: Advance) -> Answer:
        head = self._heads.get(change.run)
        refusal = rules.fence(head, change)
        if head is None or refusal is not None:
            return refusal or Answer(Verdict.FENCED, about=change.run)
        status = rules.next_status(head.status, change)
        if status is None:
            return Answer(Verdict.ILLEGAL)
        refusal = rules.refuse_outbox(change, self._conflicts, self._refuse_send)
        if refusal is not None:
            return refusal
        self._move(head, change, status)
        for create in change.creates:
            self._create(create)
        for send in change.sends:
            self._send(send.signal)
        return Answer(Verdict.DONE, None, head.seq)

    def _move(self, head: Head, change: Advance, status: Status) -> None:
        at = change.at or self._now
        head.status = status
        head.updated_at = at
        if change.rows:
            _add_rows(self.written, change)
            head.seq, head.checksum = change.rows[-1].seq, change.checksum
            head.recoveries = 0 if change.progress else head.recoveries
        if rules.releases(change, status):
            head.worker = None
            head.due_at = rules.due_after(change, status, at)
            head.wakes = () if status in rules.ENDED else change.wakes
            _tell(self.written, status, head.due_at is not None and head.due_at <= self._now)
        self._put(head)

    def _put(self, head: Head) -> None:
        if any(run.id == head.run for run in self.written.runs):  # born in this batch, and not yet written
            self.written.runs = [head.of(run) if run.id == head.run else run for run in self.written.runs]
        else:
            self.written.heads[head.run] = head

    def _conflicts(self, wanted: Run) -> bool:
        if wanted.id not in self._runs:
            return False
        existing = self._runs[wanted.id]
        return existing is None or not rules.same_child(existing, wanted)

    # -- anyone's changes ----------------------------------------------------------------------------------------------

    def _create(self, create: Create) -> Answer:
        run = rules.check_create(create)
        head = self._heads.get(run.id)
        if run.id in self._runs or head is not None:
            there = self._runs.get(run.id)
            shown = head.of(there) if head and there else there
            if create.over is None:
                return Answer(Verdict.EXISTS, run=shown)
            if head is not None and not rules.may_replace(create, head.worker, head.epoch, head.signals):
                return Answer(Verdict.FENCED, run=shown, about=run.id)
            self._remove(run.id)
        self._runs[run.id] = run
        self._heads[run.id] = Head(
            run.id,
            run.status,
            run.seq,
            run.checksum,
            run.epoch,
            run.worker,
            run.due_at,
            run.wakes,
            run.signals,
            run.recoveries,
            run.updated_at,
        )
        self.written.runs.append(run)
        self.written.rows += [(run.id, row) for row in create.rows]
        self.written.signals += create.signals
        self._signal_ids |= {(run.id, plain(signal.id)): signal.seq for signal in create.signals if signal.id}
        _tell(self.written, run.status, run.worker is None and run.due_at is not None and run.due_at <= self._now)
        return Answer(Verdict.DONE, run, run.seq)

    def _remove(self, run: str) -> None:
        """Let nothing of a run stay, not even what this batch was to write of it."""
        written = self.written
        written.removed.append(run)
        written.heads.pop(run, None)
        written.runs = [one for one in written.runs if one.id != run]
        written.rows = [one for one in written.rows if one[0] != run]
        written.signals = [one for one in written.signals if one.run != run]
        self._signal_ids = {key: seq for key, seq in self._signal_ids.items() if key[0] != run}

    def _rekey(self, change: Rekey) -> Answer:
        run = self._runs.get(change.run)
        if run is None:
            return Answer(Verdict.NOT_FOUND, about=change.run)
        if run.data_key != change.old:
            return Answer(Verdict.FENCED, about=change.run)
        self._runs[change.run] = replace(run, data_key=change.new)
        self.written.runs = [
            replace(one, data_key=change.new) if one.id == run.id else one for one in self.written.runs
        ]
        self.written.keys.append(change)
        return Answer(Verdict.DONE)

    def _refuse_send(self, signal: Signal) -> Answer | None:
        target = self._heads.get(signal.run)
        if target is None:
            return Answer(Verdict.NOT_FOUND, about=signal.run)
        if signal.id and (signal.run, plain(signal.id)) in self._signal_ids:
            return Answer(Verdict.EXISTS, None, self._signal_ids[signal.run, plain(signal.id)])
        if target.status.finished:
            return Answer(Verdict.FINISHED, about=signal.run)
        return None

    def _send(self, signal: Signal) -> Answer:
        head = self._heads.get(signal.run)
        refusal = self._refuse_send(signal)
        if head is None or refusal is not None:
            return refusal or Answer(Verdict.NOT_FOUND, about=signal.run)
        head.signals += 1
        self.written.signals.append(rules.seal_signal(signal, head.signals, self._now))
        if signal.id:
            self._signal_ids[signal.run, plain(signal.id)] = head.signals
        if head.worker is not None:
            self.written.tidings.add(f"@{head.worker}")
        elif signal.name in head.wakes:
            head.due_at = min(head.due_at or self._now, self._now)
            self.written.tidings.add(DUE)
        self._put(head)
        return Answer(Verdict.DONE, None, head.signals)


def heads_of(change: Change) -> set[str]:
    """The runs whose heads a change reads or writes."""
    heads: set[str] = set()
    _concerned(change, heads, set(), set())
    return set(map(plain, heads))


def _concerned(change: Change, heads: set[str], runs: set[str], signals: set[tuple[str, str]]) -> None:
    """Gather what must be read before a change can be decided."""
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
    """The head in a row."""
    run, status, seq, checksum, epoch, worker, due_at, wakes, signals, recoveries, updated_at = row
    try:
        due_at = None if due_at is None else due_at.astimezone(UTC)
        at = updated_at.astimezone(UTC)
        return Head(run, Status(status), seq, checksum, epoch, worker, due_at, names(wakes), signals, recoveries, at)
    except (ValueError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(f"run {run!r}: its head cannot be read: {error}") from None


def _run_or_none(row: Sequence[object]) -> Run | None:
    try:
        return run_from(row)
    except CheckpointCorrupt:
        return None
