"""Those who await results share their reads of the store: few while nothing happens, one when something does."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import keepstep as ks
from keepstep.engine import waiting
from keepstep.model import News
from keepstep.stores.open import open_store
from keepstep.workflows.definition import Workflow
from tests.postgres import empty_store

SECONDS = 60.0
WAITERS = 50


async def approval() -> object:
    return await ks.wait_for("approved")


APPROVAL = Workflow(approval, name="waiting approval")


class Counting:
    """Counts the reads; with `is_deaf`, the store tells of no change."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.reads = 0
        self.polls = 0
        self.is_deaf = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def get_run(self, run_id):
        self.reads += 1
        return self.inner.get_run(run_id)

    def list_runs(self, query):
        self.reads += 1
        return self.inner.list_runs(query)

    def news(self, worker, cursor):
        self.polls += 1
        news = self.inner.news(worker, cursor)
        return News(news.cursor) if self.is_deaf else news


@contextlib.contextmanager
def opened(kind, folder):
    if kind == "postgres":
        with empty_store() as url:
            store = open_store(url)
            try:
                yield Counting(store)
            finally:
                store.close()
        return
    store = open_store({"memory": "memory:", "sqlite": f"{folder}/runs.db", "files": f"files:{folder}/runs"}[kind])
    try:
        yield Counting(store)
    finally:
        store.close()


every_store = pytest.mark.parametrize("kind", ["memory", "sqlite", "files", "postgres"])


async def waiters_of(client, count):
    runs = [await client.start(APPROVAL) for _ in range(count)]
    return runs, [asyncio.create_task(run.result(timeout=SECONDS)) for run in runs]


@every_store
def test_a_client_polls_from_its_first_wait_on(kind, tmp_path):
    async def main(store) -> None:
        async with ks.open(store, workflows=[APPROVAL], worker=False) as client:
            run = await client.start(APPROVAL)
            await run.signal("approved", 1)
            await run.run()
            await asyncio.sleep(0.1)  # at 20 ms each, there would have been some
            assert store.polls == 0
            result = asyncio.create_task(run.result(timeout=SECONDS))
            async with ks.open(store.inner, workflows=[APPROVAL]):
                assert await result == 1
            assert store.polls > 0

    with opened(kind, tmp_path) as store:
        asyncio.run(main(store))


@every_store
def test_a_change_before_the_first_poll_is_not_missed(kind, tmp_path):
    async def main(store) -> None:
        async with ks.open(store, workflows=[APPROVAL], worker=False) as client:
            run = await client.start(APPROVAL)
            async with ks.open(store.inner, workflows=[APPROVAL], worker=False) as other:
                await other.signal(run.id, "approved", 1)
            assert await client.changed(SECONDS)

    with opened(kind, tmp_path) as store:
        asyncio.run(main(store))


@every_store
def test_awaited_results_are_read_less_and_less_often(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.02)

    async def main(store) -> None:
        async with ks.open(store, workflows=[APPROVAL], worker=False) as client:
            runs, results = await waiters_of(client, WAITERS)
            await asyncio.sleep(0.02 * (1 + 2 + 4))  # three looks, each after twice the pause of the one before
            before = store.reads
            await asyncio.sleep(0.4)  # at first these would have been twenty
            assert store.reads - before <= 4
            async with ks.open(store, workflows=[APPROVAL]):
                for run in runs:
                    await run.signal("approved", 1)
                assert await asyncio.gather(*results) == [1] * WAITERS

    with opened(kind, tmp_path) as store:
        asyncio.run(main(store))


@every_store
def test_a_change_costs_those_who_wait_one_read(kind, monkeypatch, tmp_path):
    """However many they are."""

    async def main(store) -> None:
        async with ks.open(store, workflows=[APPROVAL], worker=False) as client:
            _, results = await waiters_of(client, WAITERS)
            looks: asyncio.Queue[int] = asyncio.Queue()
            whole = waiting.Waiting._look

            async def look(self):
                before = store.reads
                await whole(self)
                looks.put_nowait(store.reads - before)

            monkeypatch.setattr(waiting.Waiting, "_look", look)
            while len(client.waiting._awaited) < WAITERS:
                await looks.get()
            await looks.get()
            for _ in range(5):
                client.notify_waiters()
                assert await looks.get() == 1
            for one in results:
                one.cancel()

    with opened(kind, tmp_path) as store:
        asyncio.run(main(store))


@every_store
def test_a_lost_notification_delays_a_result_by_little(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "LONGEST_LOOK_SECONDS", 0.2)

    async def main(store) -> None:
        async with ks.open(store, workflows=[APPROVAL], worker=False) as client:
            store.is_deaf = True
            [run], [result] = await waiters_of(client, 1)
            async with ks.open(store.inner, workflows=[APPROVAL]):
                await run.signal("approved", 1)
                assert await result == 1

    with opened(kind, tmp_path) as store:
        asyncio.run(main(store))


@every_store
def test_a_run_that_is_removed_while_its_result_is_awaited_is_missed(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "LONGEST_LOOK_SECONDS", 0.2)

    async def main(store) -> None:
        async with ks.open(store, workflows=[APPROVAL], worker=False) as client:
            [run, _], [result, other] = await waiters_of(client, 2)
            await asyncio.sleep(0)
            store.delete_runs([run.id])
            with pytest.raises(ks.RunNotFound):
                await result
            assert not other.done()
            other.cancel()

    with opened(kind, tmp_path) as store:
        asyncio.run(main(store))


async def test_those_who_wait_hear_that_the_engine_is_closed():
    async with ks.open("memory:", workflows=[APPROVAL], worker=False) as client:
        _, results = await waiters_of(client, 3)
        await asyncio.sleep(0.05)
    for one in results:
        with pytest.raises(ks.DefinitionError, match="closed"):
            await one
