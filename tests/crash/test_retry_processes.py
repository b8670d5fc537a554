"""Attempts and their backoff survive SIGKILL: a worker that is killed again and again does not try for ever."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAIT = 0.6

PROGRAM = """
import asyncio, sys, time
from pathlib import Path
import keepstep as ks

place = Path(sys.argv[1])

@ks.step(retry=ks.Retry(attempts=3, base_seconds=0.6, factor=1.0, jitter=0.0))
def fetch():
    with (place / "attempts").open("a") as file:
        file.write(f"{ks.attempt()} {time.time()}\\n")
    raise ConnectionError("the service is away")

@ks.workflow
async def job():
    await fetch()

async def main():
    async with ks.open(place / "runs.db", recovery_limit=10) as engine:
        run = await engine.start(job, run_id="job")
        while not [one for one in await run.checkpoints(failed=True)][int(sys.argv[2]):]:
            await asyncio.sleep(0.01)
        (place / f"recorded-{sys.argv[2]}").touch()
        try:
            await run.result()
        except ks.RunFailed as error:
            print(error)

asyncio.run(main())
"""


def test_attempts_and_their_backoff_survive_sigkill(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for life in range(3):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(life)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        if life < 2:
            until = time.monotonic() + 60
            while not (tmp_path / f"recorded-{life}").exists() and time.monotonic() < until:
                time.sleep(0.01)
            process.kill()
        said, _ = process.communicate(timeout=60)
    assert "failed after 3 attempts" in said
    attempts = [line.split() for line in (tmp_path / "attempts").read_text().splitlines()]
    assert [number for number, _ in attempts] == ["1", "2", "3"]
    times = [float(at) for _, at in attempts]
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= WAIT - 0.01
