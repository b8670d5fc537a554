"""A program of the tests of Dask: the bodies of its steps, and a worker that is killed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import keepstep as ks


def note(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


@ks.step(retry=ks.Retry(attempts=3, base_seconds=0.01))
def told(path: str, go_on: str) -> str:
    """Report to the run, wait for a file, and report again."""
    note(path, f"begin {ks.attempt()} {os.getpid()}")
    ks.emit("before")
    ks.spend(0.5, 3)
    ks.save_progress("half")
    note(path, "told")
    while not Path(go_on).exists():
        note(path, "beat")
        time.sleep(0.02)
    ks.emit("after")
    ks.spend(0.25, 1)
    note(path, "end")
    return "done"


@ks.step(at_most_once=True)
def once(path: str, go_on: str) -> str:
    note(path, f"begin {ks.attempt()} {os.getpid()}")
    while not Path(go_on).exists():
        time.sleep(0.02)
    note(path, "end")
    return "done"


@ks.step
def hungry(size: int) -> int:
    return len(bytearray(size))


BODIES = {"told": told, "once": once}


async def main(url: str, address: str, name: str, path: str, go_on: str) -> None:
    body = BODIES[name].options(executor=ks.executors.Dask(address=address))

    @ks.workflow(name="dask-program")
    async def flow() -> str:
        return await body(path, go_on)

    async with ks.open(url, workflows=[flow]) as engine:
        run = await engine.start(flow, run_id="r")
        print(await run.result(), (await run.spent()).cost, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
