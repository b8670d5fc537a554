"""Bodies in processes: what ends with them, what outlives them, and how the pool is used."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.executors import Process
from keepstep.executors.failures import described, made_again
from keepstep.executors.far import Body
from keepstep.executors.task import Begun, Frames, Function, Task, framed

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
    """Not even if a process that the worker has forked goes on."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import asyncio, os, sys, time
        import keepstep as ks

        @ks.step(executor="process")
        def body(path: str) -> None:
            open(path, "a").write(f"{os.getpid()}\\n")
            time.sleep(60)

        @ks.workflow
        async def flow(path: str) -> None:
            body_ends = asyncio.create_task(one(body(path)))
            await fork_of_the_worker(path)
            await body_ends

        async def one(call):
            return await call

        @ks.step
        def fork_of_the_worker(path: str) -> None:
            while not os.path.exists(path):
                time.sleep(0.01)
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            open(path, "a").write(f"{child}\\n")

        if __name__ == "__main__":
            ks.run(flow, sys.argv[1], url="memory:")
        """)
    )
    path = tmp_path / "effects"
    worker = subprocess.Popen([sys.executable, str(program), str(path)])
    end = time.monotonic() + 60
    while len(lines(path)) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    worker.send_signal(way)
    worker.wait()
    body, forked = map(int, lines(path))
    while is_alive(body) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(forked, signal.SIGKILL)
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


async def test_a_body_that_was_sent_ahead_is_settled_when_the_pool_closes():
    """Its process ends before it has begun, and no other one takes it."""
    outcome = asyncio.get_running_loop().create_future()
    async with ks.open("memory:") as engine:
        pool = POOL.open(engine)
        pool._average = 0.001  # short bodies are sent ahead
        first, second = (Sent(number, outcome if number == 2 else asyncio.Future()) for number in (1, 2))
        for body in (first, second):
            pool.submit(body)
        (child,) = pool._children
        assert list(child.bodies) == [first, second]
        await pool.close()
        assert outcome.result().why == "was stopped, because the engine closed"


class Sent(Body):
    """A body of no attempt."""

    def __init__(self, number, outcome):
        self.number, self.outcome, self.began_at, self.place = number, outcome, None, None
        self.task = Task("ks-x", Function("time", "sleep"), b"[[60],{}]", "r", "w", "s#1", 1, "k")

    def may_begin(self):
        return True


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


@ks.step(executor=POOL)
def interrupted() -> None:
    raise KeyboardInterrupt


async def test_an_interrupted_body_is_lost_and_its_worker_goes_on():
    async def code() -> str:
        try:
            await interrupted()
        except ks.BodyLost as lost:
            await pid()
            return str(lost)
        return ""

    async with ks.open("memory:") as engine:
        assert "was interrupted" in await (await engine.start(workflow(code))).result()


def fail_like(how: str) -> None:
    match how:
        case "file":
            open("/nowhere/at all")  # noqa: SIM115, PTH123 - it fails
        case "path":
            open(Path("/nowhere"))  # noqa: SIM115, PTH123 - it fails
        case "two files":
            os.rename("/nowhere", "/there")  # noqa: PTH104 - it fails
        case "text":
            b"\xff".decode()
        case "program":
            subprocess.run(["false"], check=True)
        case "group":
            raise BaseExceptionGroup("several", [ConnectionError("down"), BaseExceptionGroup("inner", [SystemExit(3)])])


@pytest.mark.parametrize("how", ["file", "path", "two files", "text", "program", "group"])
def test_exceptions_of_python_cross_with_class_and_message(how):
    with pytest.raises((OSError, UnicodeError, subprocess.SubprocessError, BaseExceptionGroup)) as caught:
        fail_like(how)
    error = caught.value
    made = made_again(described(error))
    assert type(made).__mro__[-len(type(error).__mro__) :] == type(error).__mro__
    assert str(made) == str(error)
    if how == "group":
        assert [str(one) for one in made.exceptions] == [str(one) for one in error.exceptions]
        assert made.exceptions[1].exceptions[0].args == (3,)


@ks.step(executor=POOL)
def forks(path: str) -> str:
    child = os.fork()
    if child == 0:
        try:
            ks.emit("of the fork")
        except ks.DefinitionError as error:
            note(path, type(error).__name__)
        return "of the fork"
    os.waitpid(child, 0)
    return "of the body"


@ks.step(executor=POOL)
def forks_and_terminates() -> int | None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    child.terminate()
    child.join(5)
    code = child.exitcode
    child.kill()
    return code


@ks.step(executor=POOL)
def crashes_after_a_fork() -> None:
    if os.fork() == 0:
        time.sleep(30)
    os._exit(5)


async def test_a_process_that_a_body_forks_does_not_speak_for_it(tmp_path):
    path = tmp_path / "effects"

    async def code() -> list:
        found = [await forks(str(path)), await forks_and_terminates()]
        try:
            await crashes_after_a_fork()
        except ks.BodyLost as lost:
            found.append(str(lost))
        return found

    async with ks.open("memory:") as engine:
        first, second, third = await (await engine.start(workflow(code))).result()
    assert (first, second, lines(path)) == ("of the body", -signal.SIGTERM, ["DefinitionError"])
    assert third.endswith("ended with exit code 5")


@ks.step(executor=POOL)
def leaves_a_thread(gate: str, path: str) -> None:
    def late() -> None:
        while not Path(gate).exists():
            time.sleep(0.01)
        ks.publish("late", 1)
        note(path, "published")

    threading.Thread(target=contextvars.copy_context().run, args=(late,), daemon=True).start()


@ks.step(executor=POOL)
def opens_the_gate(gate: str, path: str) -> None:
    Path(gate).touch()
    wait_for_file.fn(path)


async def test_a_thread_that_outlives_its_body_does_not_speak_for_the_next(tmp_path):
    gate, path = str(tmp_path / "gate"), str(tmp_path / "effects")

    async def code() -> None:
        await leaves_a_thread(gate, path)
        await opens_the_gate(gate, path)

    async with ks.open("memory:") as engine:
        run = await engine.start(workflow(code))
        await run.result()
        assert await run.published() == {}


@ks.step(executor=POOL, timeout=0.4)
async def emits_for_ever(path: str) -> None:
    try:
        while True:
            ks.emit("x" * 200_000)
            await asyncio.sleep(0)
    finally:
        note(path, "cleaned")


@ks.step(executor=POOL)
def sets_a_handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


async def test_a_body_is_stopped_while_it_sends_and_after_one_that_has_set_a_handler(tmp_path):
    sent, slept = tmp_path / "sent", tmp_path / "slept"

    async def code() -> None:
        await sets_a_handler()
        for call in (emits_for_ever(str(sent)), clean.options(timeout=0.3)(str(slept))):
            with contextlib.suppress(ks.StepTimedOut):
                await call

    async with ks.open("memory:") as engine:
        await (await engine.start(workflow(code))).result()
    assert (lines(sent), lines(slept)) == (["cleaned"], ["began", "cleaned"])


@ks.step(executor=POOL)
def emits_a_secret() -> None:
    secret = ks.Secret("KEEPSTEP_TEST_TOKEN").reveal()
    ks.emit({"said": secret})
    ks.emit(secret)


async def test_a_secret_that_a_body_reveals_is_redacted_in_its_tokens(monkeypatch):
    monkeypatch.setenv("KEEPSTEP_TEST_TOKEN", "hunter-and-gatherer")

    async def code() -> None:
        await emits_a_secret()

    async with ks.open("memory:") as engine:
        run = await engine.start(workflow(code))
        await run.result()
        values = b"".join(one.value or b"" for one in await run.checkpoints())
    assert b"hunter" not in values
    assert values.count(b"[redacted]") == 2


HOARD: list[bytearray] = []
SMALL = Process(workers=1, memory_bytes=256 << 20)


@ks.step(executor=SMALL)
def hoards() -> None:
    with contextlib.suppress(MemoryError):
        while True:
            HOARD.append(bytearray(1 << 20))


@ks.step(executor=SMALL, retry=ks.Retry(attempts=2, base_seconds=0.01))
def takes(data: str) -> int:
    return len(data)


async def test_a_process_without_memory_for_the_next_body_is_replaced():
    async def code() -> int:
        await hoards()
        return await takes("x" * 2_500_000)

    async with ks.open("memory:") as engine:
        assert await (await engine.start(workflow(code))).result() == 2_500_000


PROGRAM = """
import multiprocessing, os, sys, time
import keepstep as ks

class Mine(Exception):
    pass

@ks.step(executor="process")
def first() -> int:
    return 1

@ks.step(executor="process", retry=ks.Retry(attempts=3, base_seconds=0.01, on=Mine))
def second() -> int:
    if ks.attempt() < 3:
        raise Mine("again")
    return ks.attempt()

@ks.workflow
async def flow() -> list[int]:
    return [await first(), await second()]

if __name__ == "__main__":
    print(ks.run(flow, url="memory:"))
"""


@pytest.mark.parametrize("way", [["shelf/program.py"], ["-m", "shelf.program"]])
def test_a_program_may_import_multiprocessing_and_name_its_own_errors(tmp_path, way):
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf/program.py").write_text(PROGRAM)
    ended = subprocess.run([sys.executable, *way], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stdout == "[1, 3]\n", ended.stderr


def test_functions_of_a_program_without_a_file_stay():
    code = PROGRAM.replace('(executor="process")', "").replace('executor="process", ', "")
    code = code.replace("ks.workflow", 'ks.workflow(executor="process")')
    ended = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, check=False)
    assert ended.stdout == "[1, 3]\n", ended.stderr
