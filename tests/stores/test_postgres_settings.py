"""A PostgreSQL store keeps its promises whatever a role, a database or the environment has set."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from urllib.parse import quote

import psycopg
import pytest

import keepstep as ks
from keepstep.errors import DefinitionError
from keepstep.stores.postgres.store import PostgresStore
from keepstep.workflows.definition import Step, Workflow
from tests.postgres import session_dsn

SECONDS = 60.0
PLANNING = ("enable_hashjoin", "enable_mergejoin", "enable_seqscan", "jit", "plan_cache_mode")


@pytest.fixture
def server():
    with psycopg.connect(session_dsn(), autocommit=True) as connection:
        yield connection


@contextlib.contextmanager
def role(server, *settings: str):
    """A role with settings of its own; the URL of a store in a schema that only it uses."""
    name = f"keepstep_role_{os.getpid()}_{time.monotonic_ns()}"
    server.execute(f"CREATE ROLE {name} LOGIN SUPERUSER")
    for setting in settings:
        server.execute(f"ALTER ROLE {name} SET {setting}")
    try:
        yield f"{session_dsn().replace('postgres@', f'{name}@')}?schema={name}"
    finally:
        server.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
        server.execute(f"DROP ROLE {name}")


async def waits(name: str) -> object:
    return await ks.wait_for(name)


WAITS = Workflow(waits, name="settings waits")


def planned(tx) -> list[str]:
    return [tx.execute(f"SHOW {name}")[0][0] for name in PLANNING]


PLANNED = Step(planned, name="planned", transactional=True)


async def plans() -> list[str]:
    return await PLANNED()


PLANS = Workflow(plans, name="settings plans")


async def said(url: str, name: str) -> object:
    async with ks.open(url, workflows=[WAITS]) as engine:
        run = await engine.start(WAITS, name)
        await run.signal(name, "yes")
        return await run.result(timeout=SECONDS)


# -- durability --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxy", ["false", "true"])
@pytest.mark.parametrize("setting, kept", [("off", "on"), ("remote_apply", "remote_apply"), ("local", "local")])
def test_commits_wait_for_the_disk_whatever_the_role_has_set(server, proxy, setting, kept):
    with role(server, f"synchronous_commit = '{setting}'") as url:
        schema = url.rpartition("=")[2]
        PostgresStore(url).close()
        server.execute(
            f"CREATE TABLE {schema}.seen (setting text);"
            f"CREATE FUNCTION {schema}.see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" INSERT INTO {schema}.seen SELECT current_setting('synchronous_commit'); RETURN NULL; END $$;"
            f"CREATE CONSTRAINT TRIGGER see AFTER INSERT ON {schema}.keepstep_checkpoint DEFERRABLE INITIALLY DEFERRED"
            f" FOR EACH ROW EXECUTE FUNCTION {schema}.see()"
        )
        assert asyncio.run(said(f"{url}&proxy={proxy}", "go")) == "yes"
        assert server.execute(f"SELECT DISTINCT setting FROM {schema}.seen").fetchall() == [(kept,)]


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_text_survives_a_client_encoding_that_the_role_has_set(server, encoding):
    with role(server, f"client_encoding = '{encoding}'") as url:
        assert asyncio.run(said(url, "größe")) == "yes"


def test_text_survives_a_client_encoding_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with role(server) as url:
        assert asyncio.run(said(url, "größe")) == "yes"


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_with_another_encoding_keeps_text(server, encoding):
    name = f"keepstep_{encoding.lower()}_{os.getpid()}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
    try:
        assert asyncio.run(said(f"{session_dsn().rpartition('/')[0]}/{name}", "größe")) == "yes"
    finally:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


# -- the user's own statements -----------------------------------------------------------------------------------------


def test_the_statements_of_a_transactional_step_are_planned_as_the_role_has_set(server):
    async def main(url: str) -> list[str]:
        async with ks.open(url, workflows=[PLANS]) as engine:
            return await (await engine.start(PLANS)).result(timeout=SECONDS)

    with role(server, "enable_mergejoin = off") as url:
        assert asyncio.run(main(url)) == ["on", "off", "on", server.execute("SHOW jit").fetchone()[0], "auto"]


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["%s", "100%", "o'k", "pg_own", "x" * 64])
def test_a_schema_name_that_cannot_be_used_is_refused(name):
    with pytest.raises(DefinitionError, match="schema must"):
        PostgresStore(f"{session_dsn()}?schema={quote(name, safe='')}")


@pytest.mark.parametrize("name", ['say "x"', "a.b", "$1", " ", "ü-ß", "x" * 63, "{x}", "back\\slash"])
def test_an_odd_schema_name_works(server, name):
    url = f"{session_dsn()}?schema={quote(name, safe='')}"
    try:
        assert asyncio.run(said(url, "go")) == "yes"
        store = PostgresStore(url)
        server.execute(f'DROP INDEX "{name.replace(chr(34), chr(34) * 2)}".keepstep_run_number'.encode())
        assert [flaw.mended for flaw in store.check(mend=True)] == ["it was rebuilt"]
        store.close()
    finally:
        server.execute(f'DROP SCHEMA IF EXISTS "{name.replace(chr(34), chr(34) * 2)}" CASCADE'.encode())
