"""A store that lets runs be claimed and refuses their records: no body is performed again and again."""

from __future__ import annotations

import asyncio
import contextlib
import time

import psycopg
import pytest

import keepstep as ks
from keepstep.errors import StoreError
from keepstep.kernel import driver
from keepstep.ports import Advance
from keepstep.stores.files.store import FilesStore
from keepstep.stores.memory import MemoryStore
from keepstep.stores.postgres.store import PostgresStore
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.workflows.definition import Step, Workflow
from tests.postgres import empty_store, session_dsn

SECONDS = 60.0


class Refusing:
    """A store that refuses every record while `refuses` is set, as one whose table of records has no room does."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.refuses = False
        self.claims = 0
        self.claimed = asyncio.Event()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    begin_commit = None

    def commit(self, changes, *, wait=True):
        if self.refuses and any(isinstance(change, Advance) and change.rows for change in changes):
            raise StoreError("no permission for the table of records")
        return self.inner.commit(changes, wait=wait)

    def claim_runs(self, request):
        found = self.inner.claim_runs(request)
        self.claims += len(found.claims)
        return found


@contextlib.contextmanager
def opened(kind, folder):
    with contextlib.ExitStack() as stack:
        if kind == "memory":
            store = MemoryStore()
        elif kind == "sqlite":
            store = SQLiteStore(folder / "runs.db", power_loss="may_lose_last")
        elif kind == "files":
            store = FilesStore(folder / "runs", power_loss="may_lose_last")
        else:
            store = PostgresStore(stack.enter_context(empty_store()))
        try:
            yield Refusing(store)
        finally:
            store.close()


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(driver, "REFUSED_SECONDS", 0.001)
    monkeypatch.setattr(driver, "LONGEST_REFUSED_SECONDS", 0.002)


def paying():
    paid: list[int] = []

    async def pay(cents: int) -> int:
        paid.append(cents)
        return cents

    step = Step(pay, name="pay")

    async def shop() -> list[int]:
        return [await step(1), await step(2)]

    return Workflow(shop, name="refused shop"), paid


async def claimed_again(store, times):
    """Come back when runs have been claimed so many times more."""
    wanted, ends = store.claims + times, time.monotonic() + SECONDS
    while store.claims < wanted:
        assert time.monotonic() < ends, f"claimed {store.claims} times"
        await asyncio.sleep(0.005)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("kind", ["memory", "sqlite", "files", "postgres"])
def test_body_waits_for_a_record_after_its_own_was_refused(kind, tmp_path):
    async def main() -> None:
        shop, paid = paying()
        with opened(kind, tmp_path) as store:
            async with ks.open(store, workflows=[shop], worker=False) as client:
                run = await client.start(shop, run_id="order")
                store.refuses = True
                async with ks.open(store, workflows=[shop]), ks.open(store, workflows=[shop]):
                    await claimed_again(store, 4)
                    assert paid == [1]
                    store.refuses = False
                    assert await run.result(timeout=SECONDS) == [1, 2]
        assert paid == [1, 1, 2]

    asyncio.run(main())


@pytest.mark.usefixtures("quickly")
def test_run_with_records_waits_for_its_next_record_too(tmp_path):
    async def main() -> None:
        shop, paid = paying()
        with opened("memory", tmp_path) as store:
            async with ks.open(store, workflows=[shop], worker=False) as client:
                first = True

                async def refuse_after_first(cents: int) -> int:
                    nonlocal first
                    store.refuses = not first
                    first = False
                    paid.append(cents)
                    return cents

                step = Step(refuse_after_first, name="pay")

                async def twice() -> list[int]:
                    return [await step(1), await step(2)]

                flow = Workflow(twice, name="refused twice")
                run = await client.start(flow, run_id="order")
                async with ks.open(store, workflows=[flow]):
                    await claimed_again(store, 4)
                    assert paid == [1, 2]
                    store.refuses = False
                    first = True
                    assert await run.result(timeout=SECONDS) == [1, 2]
                audit = await (await client.get("order")).audit()
                assert any("recorded nothing" in entry.reason for entry in audit)
        assert paid == [1, 2, 2]

    asyncio.run(main())


def test_pauses_between_refused_records_grow():
    from types import SimpleNamespace

    pauses: list[float] = []
    engine = SimpleNamespace(
        events=SimpleNamespace(observe=lambda *_, **__: None),
        give_back_later=lambda _, pause: pauses.append(pause),
    )
    for unrecorded, claimed in ((0, None), (0, 1), (1, 1), (2, 1), (50, 1), (5_000, 1)):
        run = SimpleNamespace(id="order", host=engine, detach=lambda _: None, unrecorded=unrecorded, claimed=claimed)
        driver.RunDriver.halt(run, StoreError("full"))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 60.0, 60.0]


@pytest.mark.usefixtures("quickly")
def test_role_that_may_not_insert_records_repeats_no_step():
    role = "keepstep_no_insert"

    async def main(url: str, schema: str, server) -> None:
        shop, paid = paying()
        async with ks.open(url, workflows=[shop], worker=False) as client:
            run = await client.start(shop, run_id="order")
            server.execute(
                f"GRANT USAGE ON SCHEMA {schema} TO {role};"
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};"
                f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role};"
                f"REVOKE INSERT ON {schema}.keepstep_checkpoint FROM {role}"
            )
            async with ks.open(url.replace("postgres@", f"{role}@"), workflows=[shop]):
                epoch, ends = 0, time.monotonic() + SECONDS
                while epoch < 4:
                    assert time.monotonic() < ends
                    await asyncio.sleep(0.01)
                    ((epoch,),) = server.execute(f"SELECT epoch FROM {schema}.keepstep_head").fetchall()
                assert paid == [1]
                server.execute(f"GRANT INSERT ON {schema}.keepstep_checkpoint TO {role}")
                assert await run.result(timeout=SECONDS) == [1, 2]

    with empty_store() as url, psycopg.connect(session_dsn(), autocommit=True) as server:
        server.execute(f"CREATE ROLE {role} LOGIN")
        try:
            asyncio.run(main(url, url.rpartition("schema=")[2], server))
        finally:
            server.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
