"""Nothing on the event loop grows with a value or with a history: others have their turn meanwhile."""

import asyncio
import base64
import random
import threading

import pytest

import keepstep as ks
from keepstep.engine import attempt, censor, journal
from keepstep.stores import records
from tests.engine.world import until_status

#: A history of so many records is read.
RECORDS = 1_500
#: So many records may be read before others have the loop: twice what a reader allows itself, for the page's ends.
AT_ONCE = 250


class Turns:
    """How much of some work the loop's thread does between two turns of others."""

    def __init__(self):
        self.most = self.since = 0
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._turn()

    def _turn(self):
        self.since = 0
        if not self._over:
            self._loop.call_soon(self._turn)

    def work(self, function):
        def counted(*args, **kwargs):
            if threading.get_ident() == self._thread and not self._over:
                self.since += 1
                self.most = max(self.most, self.since)
            return function(*args, **kwargs)

        return counted

    def end(self):
        self._over = True
        return self.most


@pytest.mark.live_only
@pytest.mark.parametrize("reading", ["checkpoints", "audit", "info", "spent", "published", "state"])
async def test_a_long_history_is_read_in_pieces(world, monkeypatch, reading):
    graph = ks.Graph("long", max_iterations=2 * RECORDS, durability="every=50")

    @graph.step
    async def turn(state):
        return {"n": state["n"] + 1}

    graph.edge("turn", "turn", when=lambda state: state["n"] < RECORDS)
    graph.wait("word")
    graph.edge("turn", "word")
    graph.entry("turn")
    graph.exit("word")
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        turns = Turns()
        monkeypatch.setattr(records, "_decode", turns.work(records._decode))
        await getattr(run, reading)()
        assert turns.end() <= AT_ONCE


def chatter(size):
    return "".join(random.Random(size).choices("abc ", k=size))


async def test_a_large_result_is_searched_and_packed_beside_the_loop(world, monkeypatch):
    """And it is stored as it would have been; a small one takes no way round."""
    monkeypatch.setattr(attempt, "LARGE_BYTES", 200_000)
    loops, where = threading.get_ident(), []
    seen = {"check": censor.Censor.check, "pack": records.pack}

    def check(self, data, *names):
        where.append(("check", len(data) > 200_000, threading.get_ident() == loops))
        return seen["check"](self, data, *names)

    def pack(value):
        where.append(("pack", len(value) > 200_000, threading.get_ident() == loops))
        return seen["pack"](value)

    monkeypatch.setattr(censor.Censor, "check", check)
    monkeypatch.setattr(records, "pack", pack)
    monkeypatch.setattr("keepstep.engine.engine.pack", pack)
    text = chatter(300_000)

    @ks.step
    async def fetch(size):
        return text[:size]

    @ks.workflow
    async def pages():
        return [len(one) for one in await ks.gather(fetch(300_000), fetch(150_000), fetch(10))]

    async with world.engine() as engine:
        run = await engine.start(pages)
        assert await run.result() == [300_000, 150_000, 10]
        [large] = [one for one in await run.checkpoints() if one.kind == "step completed" and len(one.value) > 200_000]
        assert large.value == f'"{text}"'.encode()
    assert {one for one in where if one[1]} == {("check", True, False), ("pack", True, False)}


async def test_a_secret_in_a_large_result_is_still_refused(world, monkeypatch):
    monkeypatch.setattr(attempt, "LARGE_BYTES", 1_000)

    @ks.step
    async def leak():
        return chatter(5_000) + " password=hunter2-and-more"

    @ks.workflow
    async def leaking():
        return await leak()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="looks like a secret"):
            await (await engine.start(leaking)).result()


async def test_many_large_results_are_not_one_commit(world, monkeypatch):
    """Between them the others write, and are told."""
    monkeypatch.setattr(attempt, "LARGE_BYTES", 200_000)
    monkeypatch.setattr(journal, "ENOUGH_BYTES", 100_000)
    sizes = []
    answered = journal.Journal._answered

    def counted(self, batch, answers):
        sizes.append(batch.packed_bytes)
        return answered(self, batch, answers)

    monkeypatch.setattr(journal.Journal, "_answered", counted)
    blob = base64.b64encode(random.Random(1).randbytes(180_000)).decode()
    gate = asyncio.Event()

    @ks.step
    async def fetch(number):
        await gate.wait()
        return blob

    @ks.workflow
    async def page(number):
        return len(await fetch(number))

    async with world.engine() as engine:
        runs = [await engine.start(page, number) for number in range(6)]
        gate.set()
        assert [await run.result() for run in runs] == [240_000] * 6
    assert 0 < max(sizes) < 400_000
