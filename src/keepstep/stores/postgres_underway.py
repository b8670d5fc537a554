"""A commit that PostgreSQL works on while the event loop goes on: sent without waiting, answered on its socket."""

from __future__ import annotations

from collections.abc import Callable
from select import POLLIN, POLLOUT, poll

import psycopg
from psycopg import pq

from ..ports import Answer, WouldBlock
from .postgres_commit import Statement
from .postgres_connection import LOCKED, Address, Connection, Connections, check_result, is_unknown, prepared_name

#: What the server says of a batch that must be looked at change by change, prepared or made again: `commit` does that.
_ANOTHER_WAY = frozenset(("23505", "22P02", "40001", "40P01", "26000", LOCKED))


class Underway:
    """One statement on a connection that nobody else uses until it has been answered."""

    def __init__(
        self,
        address: Address,
        connections: Connections,
        connection: Connection,
        done: Callable[[], list[Answer]],
        locked: Callable[[], None],
    ) -> None:
        self._address = address
        self._connections = connections
        self._connection = connection
        self._done = done
        self._locked = locked
        self._result: pq.abc.PGresult | None = None
        self.sent = False

    @classmethod
    def begin(
        cls,
        address: Address,
        connections: Connections,
        statement: Statement,
        done: Callable[[], list[Answer]],
        locked: Callable[[], None],
    ) -> Underway | None:
        """Send a statement; None, with nothing sent, if that would have to wait for anything.

        `done` is called when the server has made it durable, and gives the answers; `locked` when someone else has
        locked what it was to write.
        """
        sql, values, _ = statement
        connection = connections.take_idle()
        if connection is None:
            return None
        name = prepared_name(connection, sql)
        if name is None:
            connections.give(connection)
            return None
        underway = cls(address, connections, connection, done, locked)
        try:
            pgconn = connection.pgconn
            pgconn.send_query_prepared(name, values, [pq.Format.BINARY] * len(values))
            underway.sent = not pgconn.flush()
        except psycopg.Error as error:
            raise underway._given_up(error) from error
        return underway

    def fileno(self) -> int:
        """What becomes readable when there is something to ask `answers` for."""
        return self._connection.fileno()

    def answers(self) -> list[Answer] | None:
        """What came of it, or None if that is not known yet; raises as a commit does."""
        pgconn = self._connection.pgconn
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    return self._ended()
                self._result = result
        except psycopg.Error as error:
            raise self._given_up(error) from error
        return None

    def wait(self) -> list[Answer]:
        """What came of it, however long that takes."""
        pgconn, socket = self._connection.pgconn, poll()
        try:
            while not self.sent:
                socket.register(self.fileno(), POLLIN | POLLOUT)
                socket.poll()
                pgconn.consume_input()  # or each might wait for the other to read
                self.sent = not pgconn.flush()
        except psycopg.Error as error:
            raise self._given_up(error) from error
        socket.register(self.fileno(), POLLIN)
        while (answers := self.answers()) is None:
            socket.poll()
        return answers

    def _ended(self) -> list[Answer]:
        """All has been said; a refusal of the server raises."""
        connection, result = self._connection, self._result
        if result is None:
            raise psycopg.OperationalError("the server has said nothing")
        code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        if code in _ANOTHER_WAY:
            if code == LOCKED:
                self._locked()
            self._connections.give(connection)
            raise WouldBlock
        check_result(connection, result)
        self._connections.give(connection)
        return self._done()

    def _given_up(self, error: psycopg.Error) -> Exception:
        unknown = is_unknown(self._connection, error)
        self._connections.give(self._connection)
        return self._address.translated(error, unknown=unknown)
