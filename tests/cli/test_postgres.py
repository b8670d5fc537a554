"""The command line on a PostgreSQL store, and what it says when there is none."""

from __future__ import annotations

import time

import psycopg
import pytest

from keepstep.cli import errors
from tests.cli.test_runs import wait_for
from tests.postgres import Server, empty_store, session_dsn


@pytest.fixture
def url():
    with empty_store() as url:
        yield url


def test_a_run_is_started_shown_steered_and_found_healthy(keepstep, url):
    done = keepstep("run", "program.py:total", "1", "--store", url, "--id", "r1")
    assert (done.code, done.out.strip()) == (0, "11"), done.err
    shown = keepstep("show", "r1", "--store", url, "--json")
    assert shown.json["status"] == "completed"
    assert "r1" in keepstep("list", "--store", url).out
    assert keepstep("doctor", "--store", url, "--deep").code == 0
    assert keepstep("show", "nobody", "--store", url).code == errors.NOT_FOUND


def test_read_only_role_gets_a_warning_and_no_error(keepstep, url):
    assert keepstep("run", "program.py:total", "1", "--store", url, "--id", "r1").code == 0
    with psycopg.connect(session_dsn(), autocommit=True) as admin:
        admin.execute("CREATE ROLE looker LOGIN")
        try:
            schema = url.rpartition("schema=")[2]
            admin.execute(f"GRANT USAGE ON SCHEMA {schema} TO looker")
            admin.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO looker")
            as_looker = url.replace("postgres@", "looker@", 1)
            assert keepstep("show", "r1", "--store", as_looker).code == 0
            done = keepstep("doctor", "--store", as_looker, "--json")
            assert done.code == 0, done.out
            (finding,) = done.json["findings"]
            assert (finding["severity"], finding["code"]) == ("warning", "store")
            assert "permission denied" in finding["message"]
            assert "need write access" in finding["advice"]
        finally:
            admin.execute("DROP OWNED BY looker")
            admin.execute("DROP ROLE looker")


@pytest.mark.parametrize(
    "store, said",
    [
        ("postgresql://ann:s3cret@127.0.0.1:1/x", "Connection refused"),
        ("NO DATABASE", 'database "nothing_there" does not exist'),
        ("NO SCHEMA", "no store at postgresql://"),
        ("postgresql://ann:s3cret@127.0.0.1:99999/x", 'invalid port number: "99999"'),
        ("postgresql://ann:s3cret@h/x?nonsense=1", "not a valid PostgreSQL URL"),
    ],
)
def test_unreachable_store_is_reported_in_a_sentence(keepstep, store, said):
    store = {
        "NO DATABASE": session_dsn().rpartition("/")[0] + "/nothing_there",
        "NO SCHEMA": session_dsn() + "?schema=nobody_made_it",
    }.get(store, store)
    for words in (("list",), ("signal", "r", "x")):
        told = keepstep(*words, "--store", store)
        assert told.code in (errors.STORE, errors.USAGE, errors.FAILED), told
        assert said in told.err + told.out
        assert "s3cret" not in told.err + told.out


SLOW = """
import asyncio
from pathlib import Path

import keepstep as ks


@ks.step
async def price(name: str, number: int) -> int:
    Path(f"{name}{number}").touch()
    await asyncio.sleep(0.5)
    return number


@ks.workflow
async def seq(name: str) -> int:
    return sum([await price(name, number) for number in range(6)])
"""


@pytest.mark.crash
def test_worker_until_idle_waits_for_a_server_that_went_away(keepstep, spawn, folder):
    (folder / "shop.py").write_text(SLOW, encoding="utf-8")
    server = Server.make()
    try:
        for name in ("a", "b"):
            assert keepstep("start", "shop.py:seq", name, "--id", name, "--store", server.dsn).code == 0
        worker = spawn("worker", "shop.py", "--until-idle", "--store", server.dsn)
        wait_for(lambda: (folder / "a1").exists() and (folder / "b1").exists())
        server.kill()
        time.sleep(6)  # longer than a commit is tried again
        assert worker.poll() is None
        server.start_again()
        _, err = worker.communicate(timeout=60)
        assert worker.returncode == 0, err
        for name in ("a", "b"):
            shown = keepstep("show", name, "--store", server.dsn, "--json")
            assert shown.json["status"] == "completed", err
        assert err.count("Connection refused") < 8, err  # once in ten seconds, and once for each run
    finally:
        server.remove()


def test_a_history_is_divided_once_and_other_stores_refuse(keepstep, url):
    schema = url.rpartition("schema=")[2]
    divided = url.replace(schema, f"{schema}_cli_divided")
    with psycopg.connect(session_dsn(), autocommit=True) as admin:
        try:
            assert keepstep("run", "program.py:total", "1", "--store", divided, "--id", "r1").code == 0
            assert "is divided from now on" in keepstep("divide", "--store", divided).out
            again = keepstep("divide", "--days", "30", "--store", divided, "--json").json
            assert again == {"divided": True, "new": False, "days": 30.0}
            assert keepstep("run", "program.py:total", "1", "--store", divided, "--id", "r2").code == 0
            assert keepstep("verify", "--store", divided).code == 0
            assert keepstep("purge", "--all", "--store", divided, "--json").json["parts"] == 0
        finally:
            admin.execute(f"DROP SCHEMA IF EXISTS {schema}_cli_divided CASCADE")
    assert keepstep("run", "program.py:total", "1", "--id", "r1").code == 0
    refused = keepstep("divide")
    assert refused.code != 0
    assert "only a PostgreSQL store divides it" in refused.err
