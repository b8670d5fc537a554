"""Steps on Dask: what is adopted, what is lost, and that no body begins twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

import keepstep as ks
from keepstep.executors import Dask
from keepstep.testing import executor_contract

from ..dask_cluster import Cluster
from ..engine.world import until
from .dask_program import hungry, once, told
from .test_process import is_alive, workflow

pytest.importorskip("distributed", reason="Dask is not installed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that no test breaks."""
    os.environ["KEEPSTEP_CONTRACT_SECRET"] = "the-contract-secret-4711"  # of its workers
    found = Cluster(tmp_path_factory.mktemp("dask"))
    found.add("one", "--resources", "place=1", threads=2)
    yield found
    found.close()


@pytest.fixture
def broken(tmp_path):
    """A cluster of a test's own."""
    (tmp_path / "dask").mkdir()
    found = Cluster(tmp_path / "dask")
    yield found
    found.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "effects"


@pytest.fixture
def go_on(tmp_path):
    return tmp_path / "go-on"


class TestContract(executor_contract.ExecutorContract):
    adopts = True
    executor: ClassVar[Any]

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster) -> None:
        type(self).executor = Dask(address=cluster.address, grace_seconds=0.2)


def effects(path: Path, word: str = "") -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line != "beat" and line.startswith(word)]


def body_of(path: Path) -> int:
    """Return the process of the body that began last."""
    return int(effects(path, "begin")[-1].split()[2])


def bridge_of() -> int:
    """Return the process that speaks to Dask for this one."""
    (found,) = (
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and is_alive(int(entry.name))
        and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
        and b"keepstep.bodies.dask " in (entry / "cmdline").read_bytes()
    )
    return found


async def started(engine, body, *args, **options):
    async def code():
        return await body(*args)

    return await engine.start(workflow(code), **options)


async def tokens(run) -> list[Any]:
    parts = [json.loads(one.value) for one in await run.checkpoints() if one.kind == "emitted"]
    return [token for part in parts for token in part]


# -- the end of a worker of Keepstep -----------------------------------------------------------------------------------


def program(tmp_path, cluster, name, path, go_on, **options):
    given = [f"{tmp_path}/runs.db", cluster.address, name, str(path), str(go_on)]
    return subprocess.Popen([sys.executable, "-m", f"{__package__}.dask_program", *given], text=True, **options)


@pytest.mark.parametrize(
    "name, ends",
    [
        ("told", "before"),
        ("once", "after"),
        pytest.param("told", "after", marks=pytest.mark.nightly),
        pytest.param("once", "before", marks=pytest.mark.nightly),
    ],
)
async def test_the_next_worker_adopts_a_body_with_all_that_it_has_reported(tmp_path, cluster, path, name, ends):
    """Also one that has ended meanwhile, and one that happens at most once."""
    go_on = tmp_path / "go-on"
    first = program(tmp_path, cluster, name, path, go_on)
    await until(lambda: effects(path, "told" if name == "told" else "begin"))
    first.kill()
    first.wait()
    if ends == "before":
        go_on.touch()
        await until(lambda: effects(path, "end"))
    again = program(tmp_path, cluster, name, path, go_on, stdout=subprocess.PIPE)
    if ends == "after":
        await asyncio.sleep(1.0)
        go_on.touch()
    shown, _ = await asyncio.to_thread(again.communicate)
    assert shown.split() == ["done", "0.75" if name == "told" else "0.0"]
    assert len(effects(path, "begin")) == len(effects(path, "end")) == 1


async def test_a_body_is_adopted_by_the_next_process_that_speaks_to_dask(cluster, path, go_on):
    async with ks.open("memory:") as engine:
        run = await started(engine, told.options(executor=Dask(address=cluster.address)), str(path), str(go_on))
        await until(lambda: effects(path, "told"))
        os.kill(bridge_of(), signal.SIGKILL)
        go_on.touch()
        assert await run.result() == "done"
        assert (await run.spent()).cost == 0.75
        assert await tokens(run) == ["before", "after"]
    assert len(effects(path, "begin")) == 1


async def test_a_body_that_nobody_asks_for_ends(cluster, path, go_on):
    executor = Dask(address=cluster.address, abandoned_seconds=1.0)
    async with ks.open("memory:", stop_seconds=0.1) as engine:
        await started(engine, told.options(executor=executor), str(path), str(go_on))
        await until(lambda: effects(path, "told"))
    assert is_alive(body_of(path))
    size = -1
    while path.stat().st_size != size:
        size = path.stat().st_size
        await asyncio.sleep(0.3)
    assert not effects(path, "end")


# -- the end of a Dask worker ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [pytest.param("kill", marks=pytest.mark.nightly), "kill with a nanny", "ask"])
async def test_a_body_ends_with_its_dask_worker_and_the_next_attempt_runs_elsewhere(broken, path, go_on, way):
    """Dask itself would run it again at once, under the same attempt."""
    broken.add("one", threads=1, nanny="nanny" in way)
    async with ks.open("memory:") as engine:
        run = await started(engine, told.options(executor=Dask(address=broken.address)), str(path), str(go_on))
        await until(lambda: effects(path, "told"))
        await until(lambda: engine.live[run.id].saved_progress("told#1"))  # all earlier reports have arrived, too
        broken.add("two", threads=1)
        first = body_of(path)
        if way == "ask":
            os.killpg(broken.workers["one"].pid, signal.SIGTERM)
        else:
            broken.kill("one")
        await until(lambda: len(effects(path, "told")) == 2)
        assert not is_alive(first)
        go_on.touch()
        assert await run.result() == "done"
        (failed,) = [one for one in await run.checkpoints() if one.kind == "step failed"]
        assert failed.error.is_a(ks.BodyLost)
        assert "Dask worker" in failed.error.message
        assert (await run.spent()).cost == 1.25
    assert [line.split()[1] for line in effects(path, "begin")] == ["1", "2"]


@pytest.mark.nightly
async def test_a_suspended_dask_worker_counts_as_lost(tmp_path, path, go_on):
    """As soon as its scheduler gives it up, which takes five minutes by default."""
    (tmp_path / "dask").mkdir()
    broken = Cluster(tmp_path / "dask", DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL="1s")
    try:
        broken.add("one", threads=1)
        async with ks.open("memory:") as engine:
            run = await started(engine, told.options(executor=Dask(address=broken.address)), str(path), str(go_on))
            await until(lambda: effects(path, "told"))
            broken.add("two", threads=1)
            os.killpg(broken.workers["one"].pid, signal.SIGSTOP)
            await until(lambda: len(effects(path, "told")) == 2)
            go_on.touch()
            assert await run.result() == "done"
        assert [line.split()[1] for line in effects(path, "begin")] == ["1", "2"]
    finally:
        broken.close()


# -- the end of the scheduler ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["kill", pytest.param("suspend", marks=pytest.mark.nightly)])
async def test_bodies_are_lost_with_their_scheduler(tmp_path, broken, path, go_on, way):
    """The next attempt runs on the next scheduler of the address."""
    broken.add("one", threads=1)
    executor = Dask(address=broken.address, lost_seconds=10.0 if way == "kill" else 1.0)
    async with ks.open("memory:") as engine:
        body = told if way == "kill" else told.options(retry=ks.Retry(attempts=1))
        run = await started(engine, body.options(executor=executor), str(path), str(go_on))
        await until(lambda: effects(path, "told"))
        if way == "suspend":
            os.kill(broken.scheduler.pid, signal.SIGSTOP)
            with pytest.raises(ks.RunFailed, match="BodyLost"):
                await run.result()
            return
        first, port = body_of(path), broken.port
        broken.scheduler.kill()
        broken.scheduler.wait()
        following = Cluster(broken.folder, port)
        try:
            following.add("two", threads=1)
            await until(lambda: len(effects(path, "told")) == 2)
            go_on.touch()
            assert await run.result() == "done"
            assert [line.split()[1] for line in effects(path, "begin")] == ["1", "2"]
            await until(lambda: not is_alive(first))  # it ended with its Dask worker
        finally:
            following.close()


async def test_an_at_most_once_body_that_the_scheduler_does_not_know_is_in_doubt(tmp_path, broken, path, go_on):
    broken.add("one", threads=1)
    first = program(tmp_path, broken, "once", path, go_on)
    await until(lambda: effects(path, "begin"))
    first.kill()
    first.wait()
    broken.close()
    following = Cluster(broken.folder, broken.port)
    try:
        following.add("two", threads=1)

        @ks.workflow(name="dask-program")
        async def flow() -> str:
            return await once.options(executor=Dask(address=following.address))(str(path), str(go_on))

        async with ks.open(f"{tmp_path}/runs.db", workflows=[flow]) as engine:
            run = await engine.start(flow, run_id="r")
            await run.resolve("once#1", "result", "it arrived")  # kept until the step is in doubt
            assert await run.result() == "it arrived"
    finally:
        following.close()
    assert len(effects(path, "begin")) == 1


# -- options -----------------------------------------------------------------------------------------------------------


async def test_resources_and_workers_choose_the_dask_worker(cluster, path, go_on):
    """A body that waits for a place never begins after its cancel."""
    step, never = str(path), str(path.with_name("never"))
    taken = Dask(address=cluster.address, resources={"place": 1}, workers=["one"])
    async with ks.open("memory:") as engine:
        first = await started(engine, told.options(executor=taken), step, str(go_on))
        await until(lambda: effects(path, "told"))
        second = await started(engine, told.options(executor=taken), never, str(go_on))
        third = await started(engine, told.options(executor=Dask(address=cluster.address, workers=["two"])), never, "")
        assert await (await started(engine, hungry.options(executor=Dask(address=cluster.address)), 1)).result() == 1
        for waits in (second, third):
            await waits.cancel()
            with pytest.raises(ks.RunCancelled):
                await waits.result()
        go_on.touch()
        assert await first.result() == "done"
        assert await (await started(engine, hungry.options(executor=taken), 1)).result() == 1
    assert not effects(Path(never))


async def test_memory_beyond_the_limit_is_an_error_of_the_body(cluster):
    small = hungry.options(executor=Dask(address=cluster.address, memory_bytes=256 << 20))
    async with ks.open("memory:") as engine:
        with pytest.raises(ks.RunFailed, match="MemoryError"):
            await (await started(engine, small, 1 << 30)).result()


async def test_a_pickled_function_needs_no_name(cluster):
    base = 40

    @ks.step(executor=Dask(address=cluster.address, pickled=True))
    def inner(number: int) -> int:
        return base + number

    async with ks.open("memory:") as engine:
        assert await (await started(engine, inner, 2)).result() == 42


async def test_a_scheduler_that_is_not_there_fails_the_attempt():
    away = hungry.options(executor=Dask(address="tcp://127.0.0.1:1", lost_seconds=1.0))
    async with ks.open("memory:") as engine:
        with pytest.raises(ks.RunFailed, match=r"cannot reach the Dask scheduler at tcp://127.0.0.1:1"):
            await (await started(engine, away, 1)).result()


async def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    with pytest.raises(ks.DefinitionError, match="DASK_SCHEDULER_ADDRESS"):
        Dask().open(None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ks.DefinitionError, match=r'pip install "keepstep\[dask\]"'):
        Dask(address="tcp://127.0.0.1:1").open(None)


def test_specs_are_values():
    one, other = (Dask(address="tcp://a:1", resources={"b": 2, "a": 1}, workers=["w"]) for _ in range(2))
    assert one == other
    assert len({one, other, Dask(address="tcp://a:1")}) == 2
    assert one.workers == ("w",)
    with pytest.raises(ks.DefinitionError, match="several names"):
        Dask(workers="w")
