"""Counts what one step costs a reader: Python calls, and hops between modules, from `await step()` to its result.

Every call of a function of Keepstep on the loop's thread counts; resuming a coroutine is a call, too. A hop is a call
into another module than the call before, and the call from the workflow into the first module counts as one.

`python -m tests.house.hops` prints the figures; with `--trace` every call as well.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import keepstep as ks
from keepstep.engine import journal

PACKAGE = str(Path(ks.__file__).parent)
#: Steps before the measured ones: caches are filled, and the first record of the lease is written.
WARM_UP = 5
#: Measured steps. A timer of the loop or a heartbeat can fall into one of them, so the smallest figures count.
MEASURED = 20


@dataclass(frozen=True)
class Walk:
    """The calls of one step, in order, each as the module's path in the package and the function's name."""

    calls: tuple[tuple[str, str], ...]

    @property
    def hops(self) -> int:
        before = ("", *(module for module, _ in self.calls))
        return sum(module != last for last, (module, _) in zip(before, self.calls, strict=False))

    @property
    def modules(self) -> int:
        return len({module for module, _ in self.calls})

    @property
    def functions(self) -> int:
        return len(set(self.calls))

    def __str__(self) -> str:
        figures = (len(self.calls), self.hops, self.modules, self.functions)
        return "{} calls, {} hops, {} modules, {} functions".format(*figures)


class Tracer:
    """Records the calls of Keepstep's functions between `start` and `stop`, on the current thread."""

    def __init__(self) -> None:
        self._codes: list[CodeType] = []

    def start(self) -> None:
        self._codes.clear()
        sys.setprofile(self._profile)

    def stop(self) -> Walk:
        sys.setprofile(None)
        ours = [code for code in self._codes if code.co_filename.startswith(PACKAGE)]
        return Walk(tuple((code.co_filename[len(PACKAGE) + 1 : -3], code.co_qualname) for code in ours))

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._codes.append(frame.f_code)


@ks.step
async def fetch(text: str) -> str:
    return text + "c"


def workflow_into(walks: list[Walk]) -> Any:
    """Return a workflow that traces its steps after a warm-up."""

    @ks.workflow(name="hops")
    async def hops() -> str:
        tracer, text = Tracer(), ""
        for _ in range(WARM_UP):
            text = await fetch(text)
        for _ in range(MEASURED):
            tracer.start()
            text = await fetch(text)
            walks.append(tracer.stop())
        return text

    return hops


async def measure(folder: Path) -> Walk:
    """Run a workflow on SQLite and return the shortest walk among its measured steps."""
    walks: list[Walk] = []
    workflow = workflow_into(walks)
    # A slow disk must not move the commits to a thread, where they are not traced.
    with mock.patch.object(journal, "SLOW_COMMIT_SECONDS", math.inf):
        async with ks.open(f"sqlite:///{folder / 'hops.db'}", workflows=[workflow]) as engine:
            run = await engine.start(workflow)
            assert len(await run.result()) == WARM_UP + MEASURED
    traced = [walk for walk in walks if any(module.startswith("stores/") for module, _ in walk.calls)]
    return min(traced, key=lambda walk: (walk.hops, len(walk.calls)))


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        walk = asyncio.run(measure(Path(folder)))
    if "--trace" in arguments:
        last = ""
        for module, function in walk.calls:
            print("→" if module != last else " ", f"{module:32}", function)
            last = module
    print(walk)


if __name__ == "__main__":
    main(sys.argv[1:])
