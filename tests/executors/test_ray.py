"""Bodies on Ray: the contract of executors, and what is adopted, ended or lost with each part of a cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import ClassVar

import pytest

import keepstep as ks
from keepstep.executors import Ray
from keepstep.executors.connection import Connection
from keepstep.executors.task import Begun, Done, Ended, Function, Given, Lost, Ready, Release, Run, Saved, Spent, Task
from keepstep.testing import executor_contract

from ..engine.world import until
from .ray_cluster import AUTH, RayCluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

#: Options of Ray for tests that wait for a silence.
IMPATIENT = {"silent_seconds": 3.0, "grace_seconds": 0.3, "namespace": "impatient"}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        secret = {executor_contract._SECRET: executor_contract._REVEALED}  # the machines of a cluster have it
        for name, value in (AUTH | secret).items():
            patch.setenv(name, value)
        made = RayCluster()
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.close()


# -- bodies ------------------------------------------------------------------------------------------------------------


def note(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(text + "\n")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@ks.step
def counting(path: str, count: int, seconds: float) -> str:
    """Use the run, then append the process's id some times, each with a token."""
    ks.spend(0.5, 10)
    ks.save_progress(ks.attempt())
    note(path, f"begin {ks.attempt()} {ks.saved_progress(0)}")
    for number in range(count):
        ks.emit(number)
        note(path, str(os.getpid()))
        time.sleep(seconds)
    note(path, "end")
    return "end"


@ks.step
def pid_of(path: str) -> int:
    note(path, "began")
    return os.getpid()


@ks.step
def variable(name: str) -> str | None:
    return os.environ.get(name)


@ks.step
def alone(path: str) -> None:
    note(path, "in")
    time.sleep(0.3)
    note(path, "out")


# -- processes ---------------------------------------------------------------------------------------------------------


def stat(process: int) -> list[str]:
    """Return state and parent of a process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


def children(parent: int, word: bytes) -> list[int]:
    """Return the processes of a parent whose command has a word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if stat(int(folder.name))[1] == str(parent):
            try:
                if word in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def supervisor(node: dict[str, int]) -> int:
    (process,) = [one for one in children(node["raylet"], b"ray::Supervisor") if stat(one)[0] != "T"]
    return process


def is_alive(process: int) -> bool:
    return stat(process)[0] not in "ZX"


async def pid_in(path: Path) -> int:
    """Return the first process that a body of `counting` has noted."""
    return int(next(one for one in await until(lambda: len(lines(path)) > 2 and lines(path)) if one.isdigit()))


def workflow(code):
    return ks.workflow(name=f"ray-{time.monotonic_ns()}")(code)


# -- the contract ------------------------------------------------------------------------------------------------------


class TestContract(executor_contract.ExecutorContract):
    """With one engine for all tests, because each engine takes seconds to connect."""

    executor = Ray()
    adopts = True
    expression: ClassVar = "ks.executors.Ray()"

    @classmethod
    def setUpClass(cls):
        cls.runner, cls.engine = asyncio.Runner(), None

    @classmethod
    def tearDownClass(cls):
        if cls.engine is not None:
            cls.runner.run(cls.engine.close())
        cls.runner.close()

    def _setupAsyncioRunner(self):
        self._asyncioRunner = self.runner

    def _tearDownAsyncioRunner(self):
        pass

    async def asyncSetUp(self):
        await super().asyncSetUp()
        self._engine = self.engine

    async def asyncTearDown(self):
        type(self).engine = self._engine

    async def test_inner_functions_cross_pickled(self):
        factor = 3

        @ks.step(executor=Ray(pickled=True))
        def inner(number: int) -> int:
            return factor * number

        async def code() -> int:
            return await inner(4)

        assert await self.result(code) == 12

    async def test_bodies_get_the_resources_and_the_environment_that_they_ask_for(self):
        both = alone.options(executor=Ray(num_cpus=2))
        path = self.path()

        async def code() -> str | None:
            await ks.map(both, [path] * 3)
            return await variable.options(executor=Ray(runtime_env={"env_vars": {"KEEPSTEP_SEEN": "yes"}}))("KEEPSTEP_SEEN")

        assert await self.result(code) == "yes"
        assert self.effects() == ["in", "out"] * 3

    async def test_a_suspended_body_is_killed_when_its_time_is_over(self):
        path = Path(self.path())
        step = counting.options(executor=Ray(grace_seconds=0.1), timeout=1.0)

        async def code() -> str:
            return await executor_contract._caught(step(str(path), 1000, 0.01))

        run = await self.begun(workflow(code))
        process = await pid_in(path)
        os.kill(process, signal.SIGSTOP)
        assert await run.result() == "StepTimedOut"
        await until(lambda: not is_alive(process))

    async def test_the_next_process_beside_the_worker_finds_the_body_again(self):
        path = Path(self.path())

        async def code() -> str:
            return await self.here(counting)(str(path), 100, 0.02)

        run = await self.begun(workflow(code))
        await pid_in(path)
        (beside,) = children(os.getpid(), b"keepstep.bodies.ray ")
        os.kill(beside, signal.SIGKILL)
        assert await run.result() == "end"
        assert lines(path).count("begin 1 1") == 1
        tokens = [one for part in await run.checkpoints() if part.kind == "emitted" for one in _tokens(part)]
        assert tokens == list(range(100))
        assert (await run.spent()).tokens == 10


def _tokens(checkpoint) -> list[int]:
    return executor_contract.json.loads(checkpoint.value)
