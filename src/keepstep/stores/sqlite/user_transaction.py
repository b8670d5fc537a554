"""Guards for transactional steps: a user's own statements inside the transaction of a SQLite store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import apsw

from ...errors import DefinitionError
from .connection import OUTAGES, translated


class StatementGuard:
    """Restricts a transactional step to its own tables, without transaction control, and to a short time."""

    def __init__(self, connection: apsw.Connection, limit_seconds: float) -> None:
        self._connection = connection
        self._limit = limit_seconds
        self._ends = 0.0
        self._denied = ""

    def call(self, function: Callable[[Any], None]) -> None:
        connection = self._connection
        self._ends = time.monotonic() + self._limit
        transaction = Transaction(self)
        # Setting an authorizer expires every prepared statement, so a cached one cannot bypass it.
        connection.authorizer = self._authorize
        connection.set_progress_handler(self._late, 2000, id=self)
        try:
            function(transaction)
            self._check_time()
        finally:
            transaction.rails = None
            connection.set_progress_handler(None, 2000, id=self)
            connection.authorizer = None

    def run(self, work: Callable[[apsw.Cursor], Iterable[Any]]) -> list[tuple[Any, ...]]:
        self._check_time()
        self._denied = ""
        cursor = self._connection.cursor()
        try:
            return list(work(cursor))
        except apsw.AuthError:
            raise DefinitionError(f"a transactional step may not {self._denied or 'do that'}") from None
        except apsw.InterruptError:
            raise self._too_long() from None
        except OUTAGES as error:
            raise translated(error, self._connection.filename) from error
        finally:
            cursor.close(True)

    def _late(self) -> bool:
        return time.monotonic() > self._ends

    def _check_time(self) -> None:
        if self._late():
            raise self._too_long()

    def _too_long(self) -> DefinitionError:
        return DefinitionError(
            f"a transactional step took more than {self._limit:g} s, while every writer of the store waits for it; "
            "move slow work to another step, or open the store with a longer within_seconds="
        )

    def _authorize(
        self, operation: int, first: str | None, second: str | None, _db: str | None, _by: str | None
    ) -> int:
        self._denied = self._denied or _why_denied(operation, first or "", second or "")
        return apsw.SQLITE_DENY if self._denied else apsw.SQLITE_OK


class Transaction:
    """The argument of a transactional step: its statements commit together with its checkpoint, or not at all."""

    def __init__(self, rails: StatementGuard) -> None:
        self.rails: StatementGuard | None = rails

    def execute(self, sql: str, params: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run SQL with bound values and return its rows."""
        return self._rails().run(lambda cursor: cursor.execute(sql, params, can_cache=False))

    def executemany(self, sql: str, params: Iterable[Sequence[Any] | dict[str, Any]]) -> list[tuple[Any, ...]]:
        """Run SQL once for each set of bound values and return the rows."""
        return self._rails().run(lambda cursor: cursor.executemany(sql, params, can_cache=False))

    def _rails(self) -> StatementGuard:
        if self.rails is None:
            raise DefinitionError("the transaction of a transactional step ends with the step")
        return self.rails


_ON_SECOND = (apsw.SQLITE_CREATE_TRIGGER, apsw.SQLITE_CREATE_INDEX, apsw.SQLITE_ALTER_TABLE, apsw.SQLITE_DROP_TRIGGER)
_CONTROL = {
    apsw.SQLITE_TRANSACTION: "begin, commit or roll back: its transaction is the store's",
    apsw.SQLITE_SAVEPOINT: "set savepoints: its transaction is the store's",
    apsw.SQLITE_ATTACH: "attach another database",
    apsw.SQLITE_DETACH: "detach a database",
    apsw.SQLITE_PRAGMA: "use PRAGMA: settings belong to the store",
}


def _why_denied(operation: int, first: str, second: str) -> str:
    if operation in _CONTROL:
        return _CONTROL[operation]
    name = second if operation in _ON_SECOND and second.casefold().startswith("keepstep_") else first
    if operation != apsw.SQLITE_FUNCTION and name.casefold().startswith("keepstep_"):
        return f"touch {name}: tables that begin with keepstep_ belong to the store"
    if operation == apsw.SQLITE_UPDATE and first == "sqlite_sequence":
        return "touch sqlite_sequence"
    return ""
