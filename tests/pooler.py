"""A proxy in front of PostgreSQL that pools as PgBouncer does, and as much of the protocol as that takes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from urllib.parse import urlsplit

import psycopg

#: What the sessions are called that it has with the server.
NAME = f"pooler {os.getpid()}"

_ENCRYPTION_ASKED = (80877103, 80877104)


class Pooler:
    """Gives each client a session of the server's, for as long as it stays or, with `transactions`, for one of them.

    Clients share what is free; with several `pools` they take turns at them, as with several processes of a proxy.
    """

    def __init__(self, dsn: str, *, transactions: bool, pools: int = 1) -> None:
        with psycopg.connect(dsn) as connection:
            known = connection.info
            self._server = known.host, known.port
            self._who = {"user": known.user, "database": known.dbname, "application_name": NAME}
        self._transactions = transactions
        self._free: list[list[_Session]] = [[] for _ in range(pools)]
        self._clients = 0
        self._going = threading.Event()
        self._going.set()
        self._ports = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._ports]
        self._path = urlsplit(dsn).path
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def dsn(self) -> str:
        host, port = self._ports.getsockname()
        return f"postgresql://{self._who['user']}@{host}:{port}{self._path}"

    def freeze(self) -> None:
        """Pass nothing on any more, and close nothing."""
        self._going.clear()

    def close(self) -> None:
        self._going.set()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._ports.accept()
                self._going.wait()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.append(client)
                self._clients += 1
                pool = self._free[self._clients % len(self._free)]
                threading.Thread(target=self._serve, args=(client, pool), daemon=True).start()

    def _session(self, pool: list[_Session]) -> _Session:
        if pool:
            return pool.pop()
        session = _Session(self._server, self._who)
        self._open.append(session.socket)
        return session

    def _kept(self, session: _Session, pool: list[_Session]) -> _Session | None:
        """The session, if its client keeps it when a transaction has ended; else it is anybody's."""
        if not self._transactions:
            return session
        pool.append(session)
        return None

    def _serve(self, client: socket.socket, pool: list[_Session]) -> None:
        session = None
        with contextlib.suppress(OSError, EOFError, ValueError):  # the last says that it is closed
            while struct.unpack("!i", _framed(client)[:4])[0] in _ENCRYPTION_ASKED:
                client.sendall(b"N")
            session, awaited = self._session(pool), 0
            # Its own number, as a client would need it to cancel something, in place of the server's.
            greeting = session.greeting + _message(b"K", struct.pack("!ii", -7, 7)) + _message(b"Z", b"I")
            session = self._kept(session, pool)
            client.sendall(greeting)
            while True:
                ready, _, _ = select.select([client, *([session.socket] if session else [])], [], [])
                self._going.wait()
                if client in ready:
                    kind, whole = _read(client)
                    if kind == b"X":
                        break
                    session = session or self._session(pool)
                    awaited += kind in b"QS"
                    session.socket.sendall(whole)
                else:
                    kind, whole = _read(session.socket)
                    awaited -= kind == b"Z"
                    if kind == b"Z" and not awaited and whole[-1:] == b"I":
                        session = self._kept(session, pool)
                    client.sendall(whole)
        client.close()
        if session is not None:
            with contextlib.suppress(OSError, EOFError):
                if not self._transactions:
                    session.clean()
                pool.append(session)


class _Session:
    """A session of the server's."""

    def __init__(self, place: tuple[str, int], who: dict[str, str]) -> None:
        self.socket = socket.create_connection(place)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.greeting = b""
        words = "".join(f"{name}\0{value}\0" for name, value in who.items()).encode() + b"\0"
        self.socket.sendall(struct.pack("!ii", len(words) + 8, 196608) + words)
        while (read := _read(self.socket))[0] != b"Z":
            self.greeting += read[1] if read[0] != b"K" else b""

    def clean(self) -> None:
        """What a proxy that pools sessions does when a client has left."""
        self.socket.sendall(_message(b"Q", b"ROLLBACK\0") + _message(b"Q", b"DISCARD ALL\0"))
        for _ in range(2):
            while _read(self.socket)[0] != b"Z":
                pass


def _message(kind: bytes, what: bytes) -> bytes:
    return kind + struct.pack("!i", len(what) + 4) + what


def _read(end: socket.socket) -> tuple[bytes, bytes]:
    kind = _exactly(end, 1)
    return kind, _message(kind, _framed(end))


def _framed(end: socket.socket) -> bytes:
    return _exactly(end, struct.unpack("!i", _exactly(end, 4))[0] - 4)


def _exactly(end: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        if not (more := end.recv(size - len(read))):
            raise EOFError
        read += more
    return read
