"""Stores and archives as every released Keepstep wrote them: read, verified, brought up to date, and gone on with."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
from pathlib import Path

import apsw
import psycopg
import pytest

import keepstep as ks
from keepstep.care.archive import FORMAT
from keepstep.care.copying import copy_runs
from keepstep.care.transfer import check_archive, export_runs, import_runs
from keepstep.care.verify import verify
from keepstep.model import Status
from keepstep.ports import ClaimRequest, SystemClock
from keepstep.stores.files.entry import LAYOUT
from keepstep.stores.memory import MemoryStore
from keepstep.stores.migrations import scripts
from keepstep.stores.open import open_store
from keepstep.workflows.definition import Workflow
from tests.postgres import session_dsn, store_url

FOLDER = Path(__file__).parents[1] / "fixtures"
SCHEMAS = sorted(FOLDER.glob("sqlite_schema_*.sql"))
ON_SERVER = sorted(FOLDER.glob("postgres_schema_*.sql"))
LAYOUTS = sorted(FOLDER.glob("files_layout_*"))
ARCHIVES = sorted(FOLDER.glob("archive_format_*.jsonl"))


@ks.step
async def add(a: int, b: int) -> int:
    return a + b


@ks.step
async def large(size: int) -> str:
    return "x" * size


@ks.step
async def fragile() -> str:
    return "mended"


async def total(*numbers: int) -> int:
    found = 0
    for number in numbers:
        found = await add(found, number)
    return found


async def patient(size: int) -> list:
    text = await large(size)
    first = await ks.wait_for("first")
    return [len(text), first, await ks.wait_for("second")]


async def breaking() -> str:
    await add(1, 1)
    return await fragile()


WORKFLOWS = [Workflow(one, name=f"fixture {one.__name__}") for one in (total, patient, breaking)]


def loaded(source, path):
    """A store of one schema or layout, as it was written."""
    if source.is_dir():
        shutil.copytree(source, path)
        return f"files:{path}"
    database = apsw.Connection(str(path))
    database.execute(source.read_text(encoding="utf-8"))
    database.close()
    return path


@contextlib.contextmanager
def on_server(source):
    """The same on PostgreSQL, in a schema of its own."""
    schema = f"fixture_{os.getpid()}"
    with psycopg.connect(session_dsn(), autocommit=True) as database:
        database.execute(f"CREATE SCHEMA {schema}; SET search_path TO {schema}")
        database.execute(source.read_bytes())
        try:
            yield store_url(schema)
        finally:
            database.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture(params=[*SCHEMAS, *LAYOUTS, *ON_SERVER], ids=lambda path: path.stem)
def path(request, tmp_path):
    if request.param not in ON_SERVER:
        yield loaded(request.param, tmp_path / "runs.db")
        return
    with on_server(request.param) as url:
        yield url


def test_there_is_a_store_of_every_schema_and_an_archive_of_every_format():
    assert len(SCHEMAS) == len(scripts("sqlite")), "python - tests/fixtures < tests/fixtures/make.py makes a new one"
    assert len(ON_SERVER) == len(scripts("postgres")), "the same, with the URL of a database as a second argument"
    assert len(LAYOUTS) == LAYOUT
    assert len(ARCHIVES) == FORMAT


def test_an_old_store_is_read_and_verified(path):
    store = open_store(path)
    found = verify(store)
    runs = {run.id: run.status for run in store.list_runs(ks.RunQuery()).runs}
    output = store.get_run("done").output
    store.close()
    assert found.sound, (found.damaged, found.flaws)
    assert runs == {
        "done": Status.COMPLETED,
        "failed": Status.FAILED,
        "waits": Status.WAITING,
        "packed": Status.WAITING,
        "later": Status.QUEUED,
    }
    assert output == b"6"


def test_every_run_of_an_old_store_is_read_audited_and_forked(path):
    """One that never began, too."""
    asyncio.run(_look_at_all(path))


async def _look_at_all(path):
    async with ks.open(path, worker=False, workflows=WORKFLOWS) as engine:
        for run_id in ("done", "failed", "waits", "packed", "later"):
            run = await engine.get(run_id)
            assert len(await run.checkpoints()) == (await run.run()).seq
            assert (await run.audit())[0].what == "created"
            copy = await engine.fork(run_id, at=1 if run_id == "failed" else None)
            assert await copy.input() == await run.input()


def test_the_first_schema_is_legacy_and_the_newest_is_not(tmp_path):
    def counts(source):
        store = open_store(loaded(source, tmp_path / f"{source.stem}.db"))
        found = verify(store)
        store.close()
        return found

    oldest, newest = counts(SCHEMAS[0]), counts(SCHEMAS[-1])
    assert (oldest.records.legacy, oldest.signals.legacy) == (oldest.records.total, oldest.signals.total)
    assert (newest.records.legacy, newest.signals.legacy, newest.runs.legacy) == (0, 0, 0)


class Tomorrow(SystemClock):
    """A clock by which everything that was kept is due."""

    def now(self):
        return super().now() + 86_400


async def go_on(store):
    async with ks.open(store, workflows=WORKFLOWS, linger_seconds=0.05, clock=Tomorrow()) as engine:
        assert await (await engine.get("done")).result() == 6
        for name, size in (("waits", 10), ("packed", 120_000)):
            handle = await engine.get(name)
            if await handle.status() is Status.SET_ASIDE:
                await handle.retry()
            await handle.signal("second", "end")
            assert await handle.result(60) == [size, {"yes": True}, "end"]
        later = await engine.get("later")  # its chain begins now, if it was made before chains began with something
        if await later.status() is Status.SET_ASIDE:
            await later.retry()
        assert await later.result(60) == 9
        assert len(await later.checkpoints()) == (await later.run()).seq
        failed = await engine.get("failed")
        with pytest.raises(ks.RunFailed):
            await failed.result()
        await failed.retry("the step is mended")
        assert await failed.result(60) == "mended"


def test_runs_of_an_old_store_go_on(path):
    asyncio.run(go_on(path))
    store = open_store(path)
    assert verify(store).sound
    store.close()


#: A run of an older store that is put into another queue, for a person of its own, and its head if that has a queue.
TO_MAIL = "UPDATE keepstep_run SET queue = 'mail', key = 'ann' WHERE id = 'later'"
HEAD_TO_MAIL = "UPDATE keepstep_head SET queue = 'mail' WHERE run = 'later'"


def claimed_in_mail(url):
    """Claim a run by its queue; its id, and that the store is as it should be."""
    store = open_store(url, clock=Tomorrow())
    request = ClaimRequest("w", frozenset({"fixture total"}), 9, queues=frozenset({"mail"}))
    found = [(claim.run.id, claim.run.key) for claim in store.claim_runs(request).claims]
    flaws = store.check()
    store.close()
    assert flaws == []
    return found


@pytest.mark.parametrize("source", SCHEMAS[:4], ids=lambda path: path.stem)
def test_head_of_an_older_store_learns_its_queue_and_key(source, tmp_path):
    path = loaded(source, tmp_path / "runs.db")
    database = apsw.Connection(str(path))
    database.execute(f"{TO_MAIL}; {HEAD_TO_MAIL}")
    database.close()
    assert claimed_in_mail(path) == [("later", "ann")]


@pytest.mark.parametrize("source", ON_SERVER[:2], ids=lambda path: path.stem)
def test_head_of_an_older_store_on_a_server_learns_its_queue_and_key(source):
    with on_server(source) as url, psycopg.connect(url.partition("?")[0], autocommit=True) as database:
        database.execute(f"SET search_path TO fixture_{os.getpid()}")
        database.execute(TO_MAIL)
        # A repair has put a head aside before.
        database.execute("CREATE TABLE keepstep_aside_head (put_aside_at timestamptz NOT NULL, LIKE keepstep_head)")
        assert claimed_in_mail(url) == [("later", "ann")]
        database.execute("DELETE FROM keepstep_run WHERE id = 'done'")
        store = open_store(url)
        assert (
            "put aside in keepstep_aside_head" in {flaw.about: flaw for flaw in store.check(mend=True)}["done"].mended
        )
        store.close()


def test_queued_run_of_an_old_store_can_be_handed_over(path):
    store, target = open_store(path), MemoryStore()
    for _ in range(2):  # the second time finds what the first has done
        done = copy_runs(store, target, ["later"], actor="ann", unfinished=True)
        assert done.whole, done
    assert verify(store).sound
    assert verify(target).sound
    store.close()


def test_an_old_store_can_be_exported(path):
    store, file = open_store(path), io.BytesIO()
    assert export_runs(store, file).whole
    store.close()
    assert check_archive(io.BytesIO(file.getvalue()), "x") == 5


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.stem)
def test_an_old_archive_is_taken_up_and_goes_on(archive, tmp_path):
    store = open_store(tmp_path / "runs.db")
    with archive.open("rb") as file:
        assert import_runs(store, file, archive.name, actor="ann").written == 5
    assert verify(store).sound
    store.close()
    asyncio.run(go_on(tmp_path / "runs.db"))
