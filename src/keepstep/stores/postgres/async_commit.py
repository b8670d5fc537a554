"""A commit that runs while the event loop continues: sent without waiting, answered on its socket."""

from __future__ import annotations

from collections.abc import Callable
from select import POLLIN, POLLOUT, poll

import psycopg
from psycopg import pq

from ...ports import Answer, WouldBlock
from .commit import Statement
from .pool import LOCKED, Address, Connection, Connections, check_result, is_unknown, prepared_name

#: SQLSTATEs after which `commit` must write the batch: by single changes, with new plans, or again.
_ANOTHER_WAY = frozenset(("23505", "22P02", "40001", "40P01", "26000", LOCKED))


class Underway:
    """One statement on a connection that is reserved until the answer has arrived."""

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
        """Send a statement. Return None, with nothing sent, if it would have to wait.

        `done` is called when the server has made the statement durable, and returns the answers. `locked` is called
        when another client has locked a row that the statement writes.
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
        """The socket that becomes readable when `answers` should be called."""
        return self._connection.fileno()

    def answers(self) -> list[Answer] | None:
        """Return the answers, or None if there are none yet; raises the errors of a commit."""
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
        """Wait for the answers."""
        pgconn, socket = self._connection.pgconn, poll()
        try:
            while not self.sent:
                socket.register(self.fileno(), POLLIN | POLLOUT)
                socket.poll()
                pgconn.consume_input()  # otherwise client and server might wait for each other to read
                self.sent = not pgconn.flush()
        except psycopg.Error as error:
            raise self._given_up(error) from error
        socket.register(self.fileno(), POLLIN)
        while (answers := self.answers()) is None:
            socket.poll()
        return answers

    def _ended(self) -> list[Answer]:
        """Return the answers after the last result; raise the error of the server."""
        connection, result = self._connection, self._result
        if result is None:
            raise psycopg.OperationalError("the server sent no result")
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
