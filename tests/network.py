"""A network that misbehaves: a proxy between a worker and its server that stalls, delays, refuses, cuts and resets."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from urllib.parse import urlsplit, urlunsplit

#: Closing a socket with this option sends a reset instead of an orderly end.
_RESET = struct.pack("ii", 1, 0)
_CHUNK = 65_536


class Proxy:
    """Passes bytes on between clients and one server, in a thread of its own, and does to them what it is told."""

    def __init__(self, dsn: str) -> None:
        self._parts = urlsplit(dsn)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._late: list[tuple[float, socket.socket, bytes]] = []  # what is on its way, and when it arrives
        self._mutex = threading.RLock()
        self._ended = threading.Event()
        #: While it is set nothing is passed on, and nothing is closed.
        self.stalled = False
        #: While it is set a new connection is reset at once.
        self.refusing = False
        #: How many seconds everything takes, each way.
        self.delay_seconds = 0.0
        self._thread = threading.Thread(target=self._serve, name="network", daemon=True)
        self._thread.start()

    @property
    def dsn(self) -> str:
        """The address of the server, through this proxy."""
        host, port = self._listener.getsockname()
        user, at, _ = self._parts.netloc.rpartition("@")
        return urlunsplit(self._parts._replace(netloc=f"{user}{at}{host}:{port}"))

    def cut(self) -> None:
        """Reset every connection."""
        with self._mutex:
            for one in list(self._peers):
                self._close(one, reset=True)

    def close(self) -> None:
        """End the proxy and all its connections."""
        self._ended.set()
        self._thread.join()
        self.cut()
        self._listener.close()
        self._selector.close()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._ended.is_set():
            if self.stalled:
                time.sleep(0.005)
                continue
            ready = self._selector.select(0.005 if self._late else 0.02)
            with self._mutex:
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._peers:
                        self._read(key.fileobj)
                self._deliver()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            try:
                if self.refusing:
                    raise ConnectionRefusedError
                server = socket.create_connection((self._parts.hostname, self._parts.port), 5)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                return
            self._peers[client], self._peers[server] = server, client
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(one, selectors.EVENT_READ)

    def _read(self, one: socket.socket) -> None:
        try:
            data = one.recv(_CHUNK)
        except OSError:
            data = b""
        self._late.append((time.monotonic() + self.delay_seconds, one, data))

    def _deliver(self) -> None:
        now, waiting = time.monotonic(), []
        for due, one, data in self._late:
            if due > now:
                waiting.append((due, one, data))
            elif one in self._peers:
                try:
                    if not data:
                        raise ConnectionResetError
                    self._peers[one].sendall(data)
                except OSError:
                    self._close(one)
        self._late = waiting

    def _close(self, one: socket.socket, *, reset: bool = False) -> None:
        for end in (one, self._peers.pop(one, None)):
            if end is not None:
                self._peers.pop(end, None)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(end)
                if reset:
                    with contextlib.suppress(OSError):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()
