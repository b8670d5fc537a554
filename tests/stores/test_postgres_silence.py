"""Connections to PostgreSQL that fall silent, or that a role is not allowed: runs go on with those that are left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from urllib.parse import urlsplit

import psycopg
import pytest

import keepstep as ks
from keepstep.errors import DefinitionError
from keepstep.stores.postgres.store import PostgresStore
from keepstep.workflows.definition import Step, Workflow
from tests.postgres import empty_store, session_dsn

SECONDS = 90.0


class Relay:
    """A proxy between workers and server. What it swallows is acknowledged, and never arrives."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._swallowed: set[socket.socket] = set()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> int:
        """Forward nothing more on the connections that are there now; how many there are."""
        self._swallowed |= self._sockets
        return len(self._sockets) // 2

    def close(self) -> None:
        self._listener.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets |= {client, server}
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if source not in self._swallowed:
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def chain(count: int, after: dict[int, object] | None = None) -> Workflow:
    async def link(number: int) -> int:
        act = (after or {}).get(number)
        if act is not None:
            act()
        return number

    step = Step(link, name="link")

    async def whole() -> int:
        return sum([await step(number) for number in range(count)])

    return Workflow(whole, name="silence chain")


def test_a_commit_that_is_never_answered_is_given_up_and_its_run_goes_on():
    with empty_store() as url:
        PostgresStore(url).close()
        relay = Relay(urlsplit(session_dsn()).port)
        there: list[int] = []
        whole = chain(4, {2: lambda: there.append(relay.swallow())})

        async def main() -> None:
            through = url.replace(f":{urlsplit(url).port}", f":{relay.port}")
            async with ks.open(through, workflows=[whole], answer_seconds=0.5) as engine:
                run = await engine.start(whole)
                assert await run.result(timeout=SECONDS) == 6

        try:
            asyncio.run(main())
        finally:
            relay.close()
        assert there[0] >= 2


def test_a_statement_that_takes_long_by_right_is_not_given_up():
    with empty_store() as url:
        store = PostgresStore(url, answer_seconds=0.05)
        try:
            assert store._pool.run(lambda one: one.execute("SELECT pg_sleep(0.3), 1").fetchone()[1], patience_seconds=9)
        finally:
            store.close()


def test_answer_seconds_must_be_positive():
    with pytest.raises(DefinitionError, match="answer_seconds"):
        PostgresStore(session_dsn(), answer_seconds=0)


@pytest.mark.parametrize("limit", [2, 3])
def test_a_role_with_few_connections_records_what_it_claims(limit):
    role = f"keepstep_few_{os.getpid()}"
    whole = chain(5)

    async def main(url: str) -> None:
        few = url.replace("postgres@", f"{role}@")
        async with ks.open(url, workflows=[whole], worker=False) as client, ks.open(few, workflows=[whole]):
            runs = [await client.start(whole) for _ in range(10)]
            for run in runs:
                assert await run.result(timeout=SECONDS) == 10

    with empty_store() as url, psycopg.connect(session_dsn(), autocommit=True) as server:
        PostgresStore(url).close()
        schema = url.rpartition("schema=")[2]
        server.execute(
            f"CREATE ROLE {role} LOGIN CONNECTION LIMIT {limit}; GRANT USAGE ON SCHEMA {schema} TO {role};"
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};"
            f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}"
        )
        try:
            asyncio.run(main(url))
        finally:
            server.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
