"""A topic and a barrier of real processes that are killed: each message once, in order, and all parties together."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepstep.engine.engine import Engine
from keepstep.model import Status
from tests import postgres
from tests.nightly import cases, examples

pytestmark = pytest.mark.crash

ROOT = Path(__file__).parents[2]
#: Messages to each subscriber, and meetings of the parties; processes are killed until all of it is done.
MESSAGES = examples(300, 2000)
MEETINGS = examples(6, 40)
#: Seconds after which something is lost, on a busy machine.
PATIENCE_SECONDS = 240.0
WORKER = """
import asyncio, sys
import keepstep as ks

news = ks.Topic("news")

@ks.workflow
async def reads(count, seen=()):
    seen = list(seen)
    async with news.subscribe() as messages:
        ks.publish("subscribed", True)
        for _ in range(97):
            seen.append(await messages.next())
            if len(seen) == count:
                break
        else:
            ks.continue_as(count, seen)
    return seen

@ks.workflow
async def writes(first, last):
    for number in range(first, last):
        await news.publish(number)

@ks.workflow
async def meets(count):
    return [await ks.barrier("start", parties=3, group="g", timeout=None) for _ in range(count)]

async def main():
    async with ks.open(sys.argv[1], lease_seconds=2.0):
        await asyncio.sleep(3600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def worker(url):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen([sys.executable, "-c", WORKER, url], env=env, stdout=subprocess.DEVNULL)


async def play(url, processes):
    """Start readers, writers and parties, and kill processes until all have ended; return their results."""
    known = {"__name__": "programs"}
    exec(compile(WORKER, "programs", "exec"), known)
    chance, kills, end = random.Random(11), 0, time.monotonic() + PATIENCE_SECONDS
    async with Engine(url, worker=False) as engine:
        readers = [await engine.start(known["reads"], MESSAGES) for _ in range(3)]
        parties = [await engine.start(known["meets"], MEETINGS) for _ in range(3)]
        while not all([await one.published() for one in readers]):
            await engine.changed(0.2)
        half = MESSAGES // 2
        writers = [await engine.start(known["writes"], *part) for part in ((0, half), (half, MESSAGES))]

        async def are_over():
            newest = [await one.latest() for one in (*readers, *parties, *writers)]
            return all([(await one.run()).status.finished for one in newest])

        while not await are_over():
            assert time.monotonic() < end, "something is lost"
            await asyncio.sleep(0.2 + 0.6 * chance.random())
            place = chance.randrange(len(processes))
            processes[place].send_signal(signal.SIGKILL)
            processes[place].wait()
            processes[place] = worker(url)
            kills += 1
        results = [[await one.result() for one in some] for some in (readers, parties)]
        topic = await (await engine.get("ks:topic:news")).run()
        report = await engine.care.verify()
    return *results, [one.id for one in parties], topic, report, kills


@pytest.mark.parametrize("which", cases(["sqlite", "files", "postgres"], ["sqlite", "postgres"]))
def test_messages_and_meetings_survive_whoever_is_killed(tmp_path, which):
    url = {"sqlite": str(tmp_path / "runs.db"), "files": f"files:{tmp_path / 'runs'}"}.get(which)
    if url is None:
        with postgres.empty_store() as url:
            pass
    processes = [worker(url) for _ in range(2)]
    try:
        read, met, parties, topic, report, kills = asyncio.run(play(url, processes))
    finally:
        for one in processes:
            one.kill()
            one.wait()
    assert kills, "nobody was killed"
    half = MESSAGES // 2
    for seen in read:
        assert seen == read[0], "two subscribers got another order"
        assert sorted(seen) == list(range(MESSAGES))
        assert [one for one in seen if one < half] == list(range(half))
        assert [one for one in seen if one >= half] == list(range(half, MESSAGES))
    assert met == [[sorted(parties)] * MEETINGS] * 3
    assert topic.status in {Status.WAITING, Status.RUNNING, Status.RECOVERING, Status.QUEUED}
    assert report.sound
