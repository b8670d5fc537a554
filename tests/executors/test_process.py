"""Bodies in processes: what ends with them, what outlives them, and how the pool is used."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.executors import Process
from keepstep.executors.task import Begun, Frames, framed

from ..engine.world import until

POOL = Process(workers=1, grace_seconds=0.1)


@ks.step(executor=POOL)
def pid() -> int:
    return os.getpid()


@ks.step(executor=POOL, retry=ks.Retry(attempts=2, base_seconds=0.01))
def hungry(size: int) -> int:
    return len(bytearray(size))


@ks.step(executor=POOL)
def clean(path: str) -> None:
    try:
        note(path, "began")
        time.sleep(30)
    finally:
        note(path, "cleaned")


@ks.step(executor=POOL)
def deaf(path: str) -> None:
    """Ignore every attempt to stop it."""
    note(path, str(os.getpid()))
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(30)


@ks.step(executor=POOL)
def with_child(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    note(path, str(child.pid))
    time.sleep(60)


@ks.step(executor=POOL, timeout=0.6)
def short(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


@ks.step(executor=POOL)
def wait_for_file(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.01)
    return "there"


def note(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(text + "\n")


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def workflow(code):
    return ks.workflow(name=f"processes-{time.monotonic_ns()}")(code)


async def test_processes_are_kept_warm_and_shared_by_runs():
    async def code() -> int:
        return await pid()

    async with ks.open("memory:") as engine:
        flow = workflow(code)
        first = await (await engine.start(flow)).result()
        assert await (await engine.start(flow)).result() == first
    await until(lambda: not is_alive(first))


async def test_memory_beyond_the_limit_is_an_error_of_the_body():
    small = hungry.options(executor=Process(workers=1, memory_bytes=256 << 20))

    async def code() -> str:
        assert await small(1 << 20) == 1 << 20
        try:
            await small(1 << 30)
        except ks.StepFailed as failure:
            return failure.error.error_class
        return ""

    async with ks.open("memory:") as engine:
        assert await (await engine.start(workflow(code))).result() == "resource exhausted"


async def test_a_stopped_body_cleans_up_and_its_process_is_used_again(tmp_path):
    path = tmp_path / "effects"

    async def code() -> int:
        before = await pid()
        try:
            await clean.options(timeout=0.5)(str(path))
        except ks.StepTimedOut:
            return int(before == await pid())
        return -1

    async with ks.open("memory:") as engine:
        assert await (await engine.start(workflow(code))).result() == 1
    assert lines(path) == ["began", "cleaned"]


async def test_a_body_that_does_not_stop_is_killed_with_its_process(tmp_path):
    path = tmp_path / "effects"

    async def code() -> str:
        try:
            await deaf.options(timeout=0.3)(str(path))
        except ks.StepTimedOut:
            return "late"
        return ""

    async with ks.open("memory:") as engine:
        assert await (await engine.start(workflow(code))).result() == "late"
        assert not is_alive(int(lines(path)[0]))


async def test_processes_that_a_body_has_started_end_with_it(tmp_path):
    path = tmp_path / "effects"

    async def code() -> None:
        await with_child(str(path))

    async with ks.open("memory:") as engine:
        run = await engine.start(workflow(code))
        await until(lambda: lines(path))
    await until(lambda: not is_alive(int(lines(path)[0])))
    assert run.id


async def test_time_counts_from_the_beginning_of_a_body(tmp_path):
    gate = tmp_path / "gate"

    async def code() -> list[str]:
        first = asyncio.create_task(one(wait_for_file(str(gate))))
        await ks.sleep(0.01)  # the first body is given away before the second
        return [await short(0.01), await first]

    async def one(call):
        return await call

    async with ks.open("memory:") as engine:
        run = await engine.start(workflow(code))
        pool = engine.executors._open
        await until(lambda: POOL in pool and pool[POOL].at_work == 2)
        await asyncio.sleep(0.8)  # longer than the time of the body that waits for the process
        gate.touch()
        assert await run.result() == ["done", "there"]


async def test_a_body_that_waits_too_long_for_a_process_times_out_with_its_step(tmp_path):
    gate = tmp_path / "gate"

    async def code() -> str:
        first = asyncio.create_task(one(wait_for_file(str(gate))))
        await ks.sleep(0.01)  # the first body is given away before the second
        try:
            await short.options(timeout=ks.Timeout(step_seconds=0.3))(0.0)
        except ks.StepTimedOut:
            gate.touch()
        return await first

    async def one(call):
        return await call

    async with ks.open("memory:") as engine:
        assert await (await engine.start(workflow(code))).result() == "there"


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM])
def test_no_body_outlives_its_worker(tmp_path, way):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import os, sys, time
        import keepstep as ks

        @ks.step(executor="process")
        def body(path: str) -> None:
            open(path, "a").write(f"{os.getpid()}\\n")
            time.sleep(60)

        @ks.workflow
        async def flow(path: str) -> None:
            await body(path)

        if __name__ == "__main__":
            ks.run(flow, sys.argv[1], url="memory:")
        """)
    )
    path = tmp_path / "effects"
    worker = subprocess.Popen([sys.executable, str(program), str(path)])
    end = time.monotonic() + 60
    while not lines(path) and time.monotonic() < end:
        time.sleep(0.01)
    worker.send_signal(way)
    worker.wait()
    body = int(lines(path)[0])
    while is_alive(body) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_alive(body)


async def test_a_suspended_process_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("keepstep.executors.process.LOOK_SECONDS", 0.05)
    quick = wait_for_file.options(executor=Process(workers=1, suspended_seconds=0.1))
    path = tmp_path / "never"

    async def code() -> str:
        try:
            await quick(str(path))
        except ks.BodyLost as lost:
            return str(lost)
        return ""

    async with ks.open("memory:") as engine:
        run = await engine.start(workflow(code))
        await until(lambda: any(getattr(one, "at_work", 0) for one in engine.executors._open.values()))
        (pool,) = [one for one in engine.executors._open.values() if getattr(one, "is_far", False)]
        await until(lambda: pool._children[0].line.is_ready and pool._children[0].bodies[0].began_at)
        os.kill(pool._children[0].line.pid, signal.SIGSTOP)
        assert "was killed by SIGKILL" in await run.result()


async def test_processes_that_cannot_start_fail_their_bodies(monkeypatch):
    monkeypatch.setattr("keepstep.executors.connection._START", "raise SystemExit(9) # {module}")

    async def code() -> str:
        try:
            await pid()
        except ks.BodyLost as lost:
            return str(lost)
        return ""

    async with ks.open("memory:") as engine:
        message = await (await engine.start(workflow(code))).result()
    assert "ended with exit code 9 before it was ready" in message


async def test_a_module_that_crashes_when_it_is_imported_fails_its_bodies(tmp_path, monkeypatch):
    (tmp_path / "crashing_module.py").write_text(
        "import os, sys\nif not hasattr(sys, 'is_worker'):\n    os._exit(4)\ndef body() -> int:\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "is_worker", True, raising=False)
    step = ks.step(importlib.import_module("crashing_module").body, executor=POOL)

    async def code() -> str:
        try:
            await step()
        except ks.BodyLost as lost:
            return str(lost)
        return ""

    async with ks.open("memory:") as engine:
        assert "ended with exit code 4" in await (await engine.start(workflow(code))).result()


async def test_an_idle_process_is_ended(monkeypatch):
    monkeypatch.setattr("keepstep.executors.process.LOOK_SECONDS", 0.02)
    quick = pid.options(executor=Process(workers=1, idle_seconds=0.05))

    async def code() -> int:
        return await quick()

    async with ks.open("memory:") as engine:
        process = await (await engine.start(workflow(code))).result()
        await until(lambda: not is_alive(process))


async def test_defaults_send_plain_functions_that_can_be_found():
    def inner() -> int:
        return os.getpid()

    async def code() -> list[bool]:
        mine = os.getpid()
        local = await ks.step(inner)()
        return [await plain() != mine, await awaited() == mine, local == mine]

    for where in ("worker", "workflow"):
        options = {"executor": POOL} if where == "worker" else {}
        flow = ks.workflow(name=f"default-{where}", executor=POOL if where == "workflow" else None)(code)
        async with ks.open("memory:", **options) as engine:
            assert await (await engine.start(flow)).result() == [True, True, True], where


@ks.step
def plain() -> int:
    return os.getpid()


@ks.step
async def awaited() -> int:
    return os.getpid()


async def test_a_name_of_the_worker_is_an_executor():
    async def code() -> bool:
        return await plain.options(executor="mine")() != os.getpid()

    async with ks.open("memory:", executors={"mine": POOL}) as engine:
        assert await (await engine.start(workflow(code))).result()


async def test_an_unknown_executor_fails_the_step_with_the_names_there_are():
    async def code() -> str:
        try:
            await plain.options(executor="proces")()
        except ks.StepFailed as failure:
            return failure.error.message
        return ""

    async with ks.open("memory:") as engine:
        message = await (await engine.start(workflow(code))).result()
    assert "no executor 'proces'; did you mean 'process'?" in message


async def test_an_unknown_default_is_refused_when_the_engine_opens():
    with pytest.raises(ks.DefinitionError, match="no executor 'gpu'"):
        async with ks.open("memory:", executor="gpu"):
            pass


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: ks.step(plain.fn, executor=3), "takes a name"),
        (lambda: ks.step(plain.fn, executor=Process), r"Process\(\.\.\.\)"),
        (lambda: ks.step(plain.fn, executor="inline"), "plain function"),
        (lambda: ks.step(awaited.fn, executor="thread"), "async function"),
        (lambda: ks.step(short.fn, executor="process", ignore="seconds"), "ignore="),
        (lambda: ks.step(short.fn, executor="process", transactional=True), "transactional="),
        (lambda: Process(workers=0), "workers"),
        (lambda: Process(memory_bytes=10), "memory_bytes"),
        (lambda: Process(grace_seconds=-1), "grace_seconds"),
    ],
)
def test_options_that_cannot_hold_are_refused(make, why):
    with pytest.raises(ks.DefinitionError, match=why):
        make()


def test_messages_are_cut_wherever_the_bytes_are():
    data = b"".join(framed(Begun(number)) for number in range(5))
    for size in (1, 3, 7, len(data)):
        frames = Frames()
        found = [one for at in range(0, len(data), size) for one in frames.take(data[at : at + size])]
        assert len(found) == 5
