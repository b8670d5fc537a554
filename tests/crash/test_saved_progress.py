"""A process that is killed in the middle of a long step: the next one goes on where it was."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.crash

#: Counts in one step, and writes down each number beside the store.
PROGRAM = """
import asyncio
import sys
import keepstep as ks

COUNT = int(sys.argv[2])

@ks.step
async def count():
    begin = ks.saved_progress(0)
    with open(sys.argv[1] + ".numbers", "a") as file:
        for number in range(begin, COUNT):
            print(number, file=file, flush=True)
            ks.save_progress(number + 1)
            await asyncio.sleep(0.01)

@ks.workflow
async def counting():
    await count()

async def main():
    async with ks.open(sys.argv[1]) as engine:
        await (await engine.start(counting, run_id="counting")).result()

asyncio.run(main())
"""


def test_killed_process_loses_less_than_a_second_of_a_step(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    store, numbers = tmp_path / "runs.db", tmp_path / "runs.db.numbers"
    command = [sys.executable, str(tmp_path / "program.py"), str(store)]

    def counted():
        return [int(line) for line in numbers.read_text().splitlines()] if numbers.exists() else []

    with subprocess.Popen([*command, "100000"]) as process:
        deadline = time.monotonic() + 60
        while not (counted() and counted()[-1] >= 200) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    before = counted()
    subprocess.run([*command, str(before[-1] + 10)], check=True, timeout=60)
    after = counted()[len(before) :]
    assert 100 <= after[0] <= before[-1] + 1
    assert after == list(range(after[0], before[-1] + 10))
