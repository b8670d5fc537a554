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
from keepstep.executors.task import Begun, Done, Ended, Function, Given, Lost, Release, Run, Saved, Spent, Task
from keepstep.testing import executor_contract

from ..engine.world import until
from ..nightly import cases
from .ray_cluster import AUTH, RayCluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

#: Options of Ray for tests that wait for a silence.
IMPATIENT = {"silent_seconds": 3.0, "grace_seconds": 0.3}


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


def supervisors(node: dict[str, int]) -> set[int]:
    """Return the supervisors of all namespaces. Ray starts processes ahead, so the newest may have the lowest id."""
    return set(children(node["raylet"], b"ray::Supervisor"))


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

    def _setupAsyncioRunner(self):  # noqa: N802 - unittest's own name
        self._asyncioRunner = self.runner

    def _tearDownAsyncioRunner(self):  # noqa: N802 - as above
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
            return await variable.options(executor=Ray(runtime_env={"env_vars": {"KEEPSTEP_SEEN": "yes"}}))(
                "KEEPSTEP_SEEN"
            )

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


# -- the loss of parts -------------------------------------------------------------------------------------------------


async def test_a_body_on_a_lost_node_is_lost_and_tried_again_elsewhere(cluster, tmp_path):
    path = tmp_path / "effects"
    node = cluster.add_node("far")
    step = counting.options(executor=Ray(num_cpus=0.5, resources={"far": 0.1}))

    async def code() -> list[str]:
        first = await executor_contract._caught(step(str(path), 1000, 0.02))
        return [first, await counting.options(executor=Ray(num_cpus=0.5))(str(path), 1, 0.0)]

    async with ks.open("memory:") as engine:
        run = await engine.start(workflow(code))
        process = await pid_in(path)
        os.kill(node["raylet"], signal.SIGKILL)
        assert await run.result() == ["BodyLost", "end"]
    assert not is_alive(process)


@pytest.mark.parametrize("number", cases([signal.SIGKILL, signal.SIGSTOP], quick=[signal.SIGKILL]))
async def test_bodies_are_lost_with_the_supervisor_and_tried_again_with_the_next_one(cluster, tmp_path, number):
    path, done = tmp_path / "effects", tmp_path / "done"
    place, before = Ray(**IMPATIENT, namespace=f"impatient-{number}"), supervisors(cluster.nodes[0])

    async def code() -> list[int]:
        known = await pid_of.options(executor=place)(str(done))  # its outcome is recorded already
        retry = ks.Retry(attempts=2, base_seconds=0.01)
        begun = asyncio.create_task(_awaited(beating_twice.options(executor=place, retry=retry)(str(path))))
        return [known, await begun]

    async with ks.open("memory:") as engine:
        run = await engine.start(workflow(code))
        await until(lambda: len(lines(path)) > 2)
        process = int(lines(path)[0])
        (supervisor,) = supervisors(cluster.nodes[0]) - before
        os.kill(supervisor, number)
        assert (await run.result())[1] == 2
        (failed,) = [one for one in await run.checkpoints() if one.kind == "step failed"]
    assert failed.error.is_a(ks.BodyLost)
    await until(lambda: not is_alive(process))  # within seconds; the next attempt may begin before that
    assert lines(done) == ["began"]


async def _awaited(call):
    return await call


@ks.step
def beating_twice(path: str) -> int:
    """Append the process's id for as long as this is the first attempt."""
    while ks.attempt() == 1:
        note(path, str(os.getpid()))
        time.sleep(0.02)
    return ks.attempt()


async def test_the_next_worker_gets_the_outcome_of_an_at_most_once_body_that_ended_without_one(tmp_path):
    path, program = tmp_path / "effects", tmp_path / "program.py"
    text = f"""
        import keepstep as ks, sys
        from tests.executors.test_ray import once

        @ks.workflow
        async def work(path: str) -> str:
            return await once(path)

        if __name__ == "__main__":
            print(ks.run(work, sys.argv[1], url={str(tmp_path / "runs.db")!r}, run_id="r"))
    """
    program.write_text(textwrap.dedent(text))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(program), str(path)]
    worker = await asyncio.create_subprocess_exec(*command, env=environment)
    await until(lambda: "began" in lines(path))
    worker.kill()
    await worker.wait()
    await until(lambda: "end" in lines(path))
    again = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    shown, _ = await again.communicate()
    assert shown.decode().strip() == "done"
    assert lines(path) == ["began", "end"]


@ks.step(executor=Ray(), at_most_once=True)
def once(path: str) -> str:
    note(path, "began")
    time.sleep(1.5)
    note(path, "end")
    return "done"


@pytest.mark.nightly
async def test_a_cluster_that_is_not_there_loses_the_body_after_a_while():
    async def code() -> str:
        try:
            await variable.options(executor=Ray(address="127.0.0.1:1"))("HOME")
        except ks.StepFailed as failure:
            return f"{failure.error.type} {failure.error.message}"
        return ""

    async with ks.open("memory:") as engine:
        message = await (await engine.start(workflow(code))).result()
    assert "BodyLost" in message
    assert "cannot be reached on Ray at '127.0.0.1:1'" in message


async def test_ray_that_is_not_installed_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr("keepstep.executors.ray.find_spec", lambda name: None)

    async def code() -> str:
        try:
            await variable.options(executor=Ray())("HOME")
        except ks.StepFailed as failure:
            return failure.error.message
        return ""

    async with ks.open("memory:") as engine:
        message = await (await engine.start(workflow(code))).result()
    assert 'pip install "keepstep[ray]"' in message


@pytest.mark.nightly
async def test_bodies_are_lost_with_the_head_and_run_on_the_next_one(tmp_path):
    path = tmp_path / "effects"
    first = RayCluster()
    port = int(first.address.rpartition(":")[2])
    place = Ray(address=first.address, silent_seconds=5.0)

    async def code() -> int:
        return await beating_twice.options(executor=place, retry=ks.Retry(attempts=4, base_seconds=5.0))(str(path))

    async with ks.open("memory:") as engine:
        run = await engine.start(workflow(code))
        await until(lambda: len(lines(path)) > 2)
        process = int(lines(path)[0])
        for one in ("gcs_server", "raylet"):
            os.kill(first.nodes[0][one], signal.SIGKILL)
        await until(lambda: not is_alive(process), "the end of the body")
        await asyncio.to_thread(first.close)
        second = await asyncio.to_thread(RayCluster, port)
        assert second.address == first.address
        assert await run.result() >= 2
        failed = [one for one in await run.checkpoints() if one.kind == "step failed"]
    second.close()
    assert all(one.error.is_a(ks.BodyLost) for one in failed)


# -- names -------------------------------------------------------------------------------------------------------------


class Worker:
    """Orders bodies as a worker does, under a session of its own."""

    def __init__(self, cluster, session: str, **settings) -> None:
        given = {"address": cluster.address, "silent_seconds": 4.0, "namespace": "names", "session": session}
        self.messages: list = []
        self.line = Connection(self.messages.append, self.messages.append)
        self.line.start("ray", Given(0, settings=given | settings))

    def run(self, number: int, name: str, *args: object, may_begin: bool = True, **options: float) -> None:
        defaults = {"ray": {}, "grace_seconds": 0.1, "unasked_seconds": 600.0, "kept_seconds": 600.0}
        function = Function(counting.fn.__module__, "counting", __file__)
        data = executor_contract.json.dumps([list(args), {}]).encode()
        task = Task(name, function, data, "run", "flow", "counting#1", 1, name, may_begin=may_begin)
        self.line.send(Run(number, task, defaults | options))

    def of(self, number: int, kind) -> list:
        return [one for one in self.messages if isinstance(one, kind) and getattr(one, "body", 0) == number]

    async def ended(self, number: int):
        return (await until(lambda: self.of(number, Ended)))[0]

    async def close(self) -> None:
        self.line.kill()
        await self.line.gone.wait()


async def test_a_name_begins_once_and_is_forgotten_when_released(cluster, tmp_path):
    path, left = tmp_path / "effects", tmp_path / "left"
    first, second = Worker(cluster, "first"), Worker(cluster, "second")
    first.run(1, "name", str(path), 60, 0.05)
    first.run(2, "unasked", str(left), 1000, 0.02, unasked_seconds=1.0)
    await until(lambda: first.of(1, Begun) and first.of(2, Begun))
    await pid_in(left)
    await first.close()
    second.run(7, "name", str(path), 60, 0.05)
    assert isinstance(await second.ended(7), Done)
    assert lines(path).count("begin 1 1") == 1
    (begun,) = second.of(7, Begun)
    assert begun.seconds_ago > 0
    assert (len(second.of(7, Spent)), len(second.of(7, Saved))) == (1, 1)
    second.run(8, "name", may_begin=False)
    assert isinstance(await second.ended(8), Done)
    second.line.send(Release(8))
    second.run(9, "name", may_begin=False)
    lost = await second.ended(9)
    assert isinstance(lost, Lost)
    assert "is not known to the cluster" in lost.why
    size = -1
    while size != len(lines(left)):  # its process may be used for other bodies
        size = len(lines(left))
        await asyncio.sleep(0.3)
    assert size < 1000
    await second.close()
