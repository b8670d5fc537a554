"""Transactional steps: the user's own statements and the checkpoint in one PostgreSQL transaction."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from ...errors import DefinitionError, StoreError
from ...model.ids import new_id
from ...ports import Advance, Answer, Verdict
from .. import rules
from ..transition import fence
from .commit import Batch, head_from
from .pool import DURABLE, LOCK_SECONDS, PLAN_THEIRS, PLANNING, Connection, milliseconds
from .rows import load_strictly
from .statements import Statements, Written

_CONTROL = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(begin|start|commit|end|rollback|abort|savepoint|release|prepare\s+transaction|set)\b",
    re.IGNORECASE | re.DOTALL,
)
_OURS = re.compile(r"\bkeepstep_\w+", re.IGNORECASE)
_PLACE = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/|\$(\w*)\$.*?\$\1\$|\?|%", re.DOTALL)
#: Setting that marks the transaction, to detect a step that ended it in some other way.
_MARK = "keepstep.transaction"
#: SQL that restores our planning and makes the commit wait for the disk, whatever the step has set.
_PLAN_OURS = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in PLANNING.items())
_COMMIT_DURABLY = DURABLE.format(transaction="true")


def commit_within(
    connection: Connection, statements: Statements, change: Advance, now: Callable[[], datetime], limit_seconds: float
) -> tuple[Answer, Written | None]:
    """Call the change's function in a transaction and write the change as its last statements, or undo everything."""
    if change.within is None:
        raise ValueError(f"run {change.run!r}: the change has no function")
    rows = connection.execute(statements.look, (change.run,), binary=True).fetchall()
    refusal = fence(head_from(rows[0]) if rows else None, change)
    if refusal is not None:
        return refusal, None
    mark = new_id("transaction")
    _begin(connection, mark, limit_seconds)
    error = _call(connection, change.within, mark, limit_seconds)
    if error is not None:
        connection.rollback()
        return Answer(Verdict.FAILED, error=error), None
    if not rules.extends(change.rows, change.after):
        connection.rollback()
        return Answer(Verdict.FENCED, about=change.run), None
    batch = Batch(connection, statements, [change], now())
    (answer,) = batch.apply([change])
    if answer.verdict is not Verdict.DONE:
        connection.rollback()
        return answer, None
    with connection.pipeline():
        batch.write()
        connection.execute("COMMIT")
    return answer, batch.written


def _begin(connection: Connection, mark: str, limit_seconds: float) -> None:
    limit = milliseconds(limit_seconds)
    with connection.pipeline():
        connection.execute("BEGIN")
        connection.execute(
            "SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', '0', true),"
            " set_config('idle_in_transaction_session_timeout', %s, true), set_config(%s, %s, true)",
            (limit, limit, _MARK, mark),
        )
        for setting in PLAN_THEIRS:
            connection.execute(setting)


def _call(connection: Connection, function: Callable[[Any], None], mark: str, limit_seconds: float) -> Exception | None:
    """Return the error of the user's function, or None."""
    transaction = Transaction(connection, limit_seconds)
    try:
        function(transaction)
        transaction.check_time()
        _check_mark(connection, mark)
    except StoreError:  # a problem of the store, not of the function
        raise
    except Exception as error:  # any failure of a user's function refuses only that change
        if connection.closed:
            raise
        return error
    finally:
        transaction.end()
    return None


def _check_mark(connection: Connection, mark: str) -> None:
    status = connection.info.transaction_status
    if status == TransactionStatus.INERROR:
        raise DefinitionError(
            "a statement of a transactional step failed, so PostgreSQL accepts no other in its transaction; let the "
            "error leave the step"
        )
    found = connection.execute(
        "SELECT current_setting(%s, true), set_config('statement_timeout', '0', true),"
        f" set_config('lock_timeout', %s, true), {_PLAN_OURS}, {_COMMIT_DURABLY}",
        (_MARK, milliseconds(LOCK_SECONDS)),
    ).fetchone()
    if status != TransactionStatus.INTRANS or found is None or found[0] != mark:
        raise DefinitionError(_refusal("begin, commit or roll back: its transaction is the store's"))


class Transaction:
    """The connection of a transactional step: its statements commit together with its checkpoint, or not at all."""

    def __init__(self, connection: Connection, limit_seconds: float) -> None:
        self._connection: Connection | None = connection
        self._limit = limit_seconds
        self._ends = time.monotonic() + limit_seconds

    def execute(self, sql: str, params: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run SQL with bound values and return its rows. Placeholders are ?, as in every store, or psycopg's %s."""
        text = _with_places(sql) if params and not isinstance(params, dict) else sql
        return self._run(sql, lambda cursor: cursor.execute(text.encode(), params or None, prepare=True))

    def executemany(self, sql: str, params: Iterable[Sequence[Any] | dict[str, Any]]) -> list[tuple[Any, ...]]:
        """Run SQL once for each set of bound values and return the rows."""
        rows: list[tuple[Any, ...]] = []
        for some in params:
            rows += self.execute(sql, some)
        return rows

    def end(self) -> None:
        """Disable the transaction after the step, even for code that kept a reference."""
        self._connection = None

    def check_time(self) -> None:
        if time.monotonic() > self._ends:
            raise self._too_long()

    def _run(self, sql: str, work: Callable[[psycopg.Cursor[Any]], Any]) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise DefinitionError("the transaction of a transactional step ends with the step")
        self.check_time()
        _check_statement(sql)
        with self._connection.cursor() as cursor:
            load_strictly(cursor)
            try:
                work(cursor)
            except psycopg.errors.QueryCanceled:
                raise self._too_long() from None
            return cursor.fetchall() if cursor.description else []

    def _too_long(self) -> DefinitionError:
        return DefinitionError(
            f"a transactional step took more than {self._limit:g} s, while the rows that it changed were locked; move "
            "slow work to another step, or open the store with a longer within_seconds="
        )


def _with_places(sql: str) -> str:
    """Return the statement with psycopg's placeholders in place of ?, except in strings and comments."""
    if "%s" in sql or "?" not in sql:
        return sql
    return _PLACE.sub(lambda found: "%s" if found[0] == "?" else found[0].replace("%", "%%"), sql)


def _check_statement(sql: str) -> None:
    if control := _CONTROL.match(sql):
        what = control[1].lower()
        raise DefinitionError(_refusal(f"use {what.upper()}: its transaction is the store's"))
    if ours := _OURS.search(sql):
        raise DefinitionError(_refusal(f"touch {ours[0]}: tables that begin with keepstep_ belong to the store"))


def _refusal(what: str) -> str:
    return f"a transactional step may not {what}"
