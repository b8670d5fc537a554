"""The suite that every executor must pass: the tests of an executor subclass it, with the executor that they made.

    class TestMyExecutor(ExecutorContract):
        executor = my_package.MyExecutor(address="…")      # as `@ks.step(executor=…)` takes it
        lacks = {"kills": "a body cannot be stopped there"}

The bodies stand in this module, so the processes of the executor must be able to import it. They write to files of this
machine, which the tests read. The class needs no fixtures and no plugin. `lacks` names abilities that the executor does
not have, each with the reason, which is printed. `LACKABLE` lists them.
"""

# ruff: noqa: ASYNC240, D103 - files are small, and the bodies are named after what they do

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

from ..engine.engine import Engine
from ..errors import BodyLost, Permanent, RetryAfter, StepFailed, StepInDoubt
from ..kernel.budget import spend
from ..kernel.combine import map as map_items
from ..kernel.context import attempt, idempotency_key, in_step, run_id
from ..kernel.context import log as run_log
from ..kernel.naming import acting
from ..kernel.publish import emit, progress, publish, save_progress, saved_progress
from ..model import Kind, Status
from ..policies import Retry
from ..values import Secret
from ..workflows.dag import Dag
from ..workflows.definition import Step, Workflow
from ..workflows.graph import Goto, Graph

#: Abilities that an executor may lack.
LACKABLE = {
    "kills": "a timeout or a cancel ends the body",
    "crashes": "a body that crashes affects only its own attempt",
    "secrets": "a revealed secret stays in the process of the body",
    "own process": "the body runs in another process than its worker",
}
#: Seconds that a test waits for a moment before it reports that the moment never came.
PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.01
#: Looks at a file of effects, three a second, after which a stopped body counts as going on.
STOP_LOOKS = 20
#: A secret that bodies reveal, and its value.
_SECRET = "KEEPSTEP_CONTRACT_SECRET"  # noqa: S105 - the name of a variable
_REVEALED = "the-contract-secret-4711"


# -- bodies ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parcel:
    """A value of a class of its own, with parts that JSON does not have."""

    weight: Decimal
    sent_at: datetime
    tags: frozenset[str]
    data: bytes = b""


class Broken(Exception):
    """An exception with an attribute, and arguments that are not its message."""

    def __init__(self, part: str, code: int) -> None:
        super().__init__(f"{part} is broken ({code})")
        self.part, self.status_code = part, code


def note(path: str, text: str) -> None:
    """Append a line to a file of effects."""
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - appended to by several processes
        file.write(f"{text}\n")


@Step
def double(number: int) -> int:
    return 2 * number


@Step
async def double_async(number: int) -> int:
    await asyncio.sleep(0.001)
    return 2 * number


@Step
def weighed(parcel: Parcel, *more: Any, **named: Any) -> tuple[Parcel, Any, Any]:
    return parcel, more, named


@Step
def doubled_text(text: str) -> str:
    return 2 * text


@Step
def pid() -> int:
    return os.getpid()


@Step
def counted(upto: int) -> Iterator[int]:
    yield from range(upto)


@Step
async def counted_async(upto: int) -> AsyncIterator[int]:
    for number in range(upto):
        yield number


@Step
def reporting(path: str) -> dict[str, Any]:
    """Use all that a body may use of its run."""
    with acting("inspector"):
        emit("first")
        emit({"second": 2})
        publish("seen", [1, 2])
    progress(0.5, "half-way")
    spend(0.25, 7, model="small")
    run_log.warning("a word of the body")
    note(path, idempotency_key())
    return {"run": run_id(), "attempt": attempt(), "in_step": in_step()}


@Step
def flaky(path: str, failures: int) -> int:
    """Fail a few times, and go on from the saved progress."""
    note(path, f"{attempt()} {saved_progress(0)} {idempotency_key()}")
    save_progress(saved_progress(0) + 10)
    if attempt() <= failures:
        raise ConnectionError(f"attempt {attempt()}")
    return attempt()


@Step
def broken() -> None:
    raise Broken("the wheel", 503)


@Step
def hopeless(path: str) -> None:
    note(path, "tried")
    raise Permanent("never")


@Step
def later(path: str) -> str:
    note(path, "tried")
    if attempt() == 1:
        raise RetryAfter(0.05, "busy")
    return "done"


@Step
def leaving() -> None:
    sys.exit(3)


@Step
def crashing(path: str, way: str) -> str:
    """Crash in the first attempt."""
    note(path, way)
    if attempt() > 1:
        return "survived"
    if way == "exit":
        os._exit(3)
    elif way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        ctypes.string_at(0)
    return "?"


@Step
def beating(path: str, seconds: float) -> str:
    """Append a line every few milliseconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        note(path, str(os.getpid()))
        time.sleep(0.01)
    note(path, "end")
    return "end"


@Step
async def beating_async(path: str, seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        note(path, str(os.getpid()))
        await asyncio.sleep(0.01)
    return "end"


@Step
def revealing(fails: bool) -> str:
    text = Secret(_SECRET).reveal()
    if fails:
        raise ValueError(f"{text} is wrong")
    run_log.warning("the secret is %s", text)
    return text


async def _moment(found: Callable[[], Any]) -> Any:
    """Wait until a function returns something true, and return that."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        value = found()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"the moment never came: {found}")
        await asyncio.sleep(_LOOK_SECONDS)


_BEATING: tuple[Any, ...] = (beating, beating_async)


class _Captured(logging.Handler):
    """Log records of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class ExecutorContract(unittest.IsolatedAsyncioTestCase):
    """What holds for a step's body wherever it runs."""

    #: The executor, as a step takes it; None is the worker's own process.
    executor: ClassVar[Any] = None
    #: Abilities that it lacks, each with the reason.
    lacks: ClassVar[dict[str, str]] = {}
    #: Whether bodies outlive their worker, and are found again by the next one.
    adopts: ClassVar[bool] = False
    #: What `executor` is in a program of its own: an expression, with `ks` imported.
    expression: ClassVar[str] = ""

    def setUp(self) -> None:
        if type(self) is ExecutorContract:
            self.skipTest("it is for subclasses")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        os.environ[_SECRET] = _REVEALED

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)
        self._engine: Engine | None = None

    async def asyncTearDown(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    # -- helpers

    def needs(self, ability: str) -> None:
        """Skip the test if the executor lacks an ability."""
        assert ability in LACKABLE, ability
        if ability in self.lacks:
            self.skipTest(f"no {ability}: {self.lacks[ability]}")

    def here(self, step: Any, **options: Any) -> Any:
        """Return a step on the executor."""
        return step.options(**options) if self.executor is None else step.options(executor=self.executor, **options)

    def path(self) -> str:
        """Return the path of a file of effects."""
        return str(self.folder / "effects")

    def effects(self) -> list[str]:
        """Return the lines of the file of effects."""
        file = Path(self.path())
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    async def opened(self) -> Engine:
        """Return an engine on a store of its own."""
        if self._engine is None:
            self._engine = Engine("memory:", workflows=[], stop_seconds=0.2)
            self._engine._given = {}  # noqa: SLF001 - workflows of a test are added as they are made
            await self._engine.open()
        return self._engine

    async def begun(self, workflow: Workflow[..., Any], *args: Any, **named: Any) -> Any:
        """Start a workflow that only this engine knows."""
        engine = await self.opened()
        engine._given[workflow.name] = workflow  # type: ignore[index]  # noqa: SLF001 - as above
        return await engine.start(workflow, *args, **named)

    async def result(self, code: Callable[[], Awaitable[Any]]) -> Any:
        """Run some code as a workflow."""
        return await (await self.begun(Workflow(code, name=f"code-{time.monotonic_ns()}"))).result()

    # -- values

    async def test_plain_and_async_bodies_return_their_results(self) -> None:
        async def code() -> Any:
            return [await self.here(double)(4), await self.here(double_async)(5)]

        assert await self.result(code) == [8, 10]

    async def test_values_cross_exactly(self) -> None:
        parcel = Parcel(Decimal("1.50"), datetime(2026, 1, 2, tzinfo=UTC), frozenset("ab"), b"\x00\xff")

        async def code() -> Any:
            return await self.here(weighed)(parcel, (1, 2), None, 0, "", key={"a": [True]})

        assert await self.result(code) == (parcel, ((1, 2), None, 0, ""), {"key": {"a": [True]}})

    async def test_large_values_cross(self) -> None:
        text = "ä" * 600_000

        async def code() -> Any:
            return len(await self.here(doubled_text)(text))

        assert await self.result(code) == 1_200_000

    async def test_bodies_that_yield_emit_their_items_live(self) -> None:
        async def code() -> Any:
            return [await self.here(counted)(3), await self.here(counted_async)(2)]

        run = await self.begun(Workflow(code, name="yielding"))
        assert await run.result() == [[0, 1, 2], [0, 1]]
        tokens = [json.loads(one.value) for one in await run.checkpoints() if one.kind == Kind.EMITTED]
        assert [item for part in tokens for item in part] == [0, 1, 2, 0, 1]

    async def test_many_bodies_run_at_once_and_keep_their_order(self) -> None:
        async def code() -> Any:
            return await map_items(self.here(double), list(range(40)), concurrency=20)

        assert await self.result(code) == [2 * number for number in range(40)]

    async def test_the_body_runs_in_another_process(self) -> None:
        self.needs("own process")

        async def code() -> Any:
            return await self.here(pid)()

        assert await self.result(code) != os.getpid()

    async def test_steps_of_graphs_and_dags_run_there(self) -> None:
        graph = Graph("contract-graph")
        graph.add(self.here(_graph_step), "first")
        graph.add(self.here(_graph_goto), "second")
        graph.add(self.here(_graph_step), "third")
        graph.edge("first", "second")
        graph.edge("second", "third")
        graph.entry("first")
        graph.exit("third")
        run = await self.begun(graph, {"n": 1})
        assert await run.result() == {"n": 4, "list": [1, 2, 3]}
        dag = Dag("contract-dag")
        dag.add(self.here(double), "twice")
        dag.add(self.here(_summed), "total", needs=["twice"])
        run = await self.begun(dag, number=4)
        assert (await run.result())["total"] == 9

    # -- the run

    async def test_a_body_uses_its_run(self) -> None:
        path, captured = self.path(), _Captured()
        logger = logging.getLogger("keepstep.run")
        logger.addHandler(captured)
        self.addCleanup(logger.removeHandler, captured)

        async def code() -> Any:
            return await self.here(reporting)(path)

        run = await self.begun(Workflow(code, name="telling"))
        assert await run.result() == {"run": run.id, "attempt": 1, "in_step": True}
        records = await run.checkpoints()
        emitted = [one for one in records if one.kind == Kind.EMITTED]
        assert [token for one in emitted for token in json.loads(one.value)] == ["first", {"second": 2}]
        assert {one.agent for one in emitted} == {"inspector"}
        assert await run.published() == {"seen": [1, 2]}
        spent = await run.spent()
        assert (spent.cost, spent.tokens, list(spent.by_model)) == (0.25, 7, ["small"])
        (record,) = [one for one in captured.records if "a word of the body" in one.getMessage()]
        assert (record.levelname, record.run_id, record.step) == ("WARNING", run.id, "reporting#1")  # type: ignore[attr-defined]

    async def test_attempts_share_the_idempotency_key_and_the_saved_progress(self) -> None:
        path = self.path()

        async def code() -> Any:
            return await self.here(flaky, retry=Retry(attempts=3, base_seconds=0.01))(path, 2)

        assert await self.result(code) == 3
        lines = [line.split() for line in self.effects()]
        assert [(number, saved) for number, saved, _ in lines] == [("1", "0"), ("2", "10"), ("3", "20")]
        assert len({key for _, _, key in lines}) == 1

    # -- failures

    async def test_an_exception_is_recorded_with_its_class_and_its_lines(self) -> None:
        async def code() -> Any:
            try:
                await self.here(broken)()
            except StepFailed as failure:
                error = failure.error
                assert error is not None
                lines = f"in {broken.fn.__name__}\n" in (error.traceback or "")
                return [error.type, error.message, error.error_class, error.code, lines]

        found = await self.result(code)
        name = f"{Broken.__module__}.Broken"
        assert found == [name, "the wheel is broken (503)", "transient", "503", True]

    async def test_errors_steer_the_retry(self) -> None:
        path = self.path()

        async def code() -> Any:
            done = await self.here(later, retry=Retry(attempts=3, base_seconds=30.0))(path)
            try:
                await self.here(hopeless, retry=Retry(attempts=3, base_seconds=0.01))(path)
            except StepFailed as failure:
                return [done, failure.error and failure.error.error_class]

        assert await self.result(code) == ["done", "permanent"]
        assert self.effects() == ["tried"] * 3

    async def test_an_exit_of_the_body_fails_its_step_only(self) -> None:
        async def code() -> Any:
            try:
                await self.here(leaving)()
            except StepFailed:
                return await self.here(double)(1)

        assert await self.result(code) == 2

    async def test_a_crash_of_a_body_ends_one_attempt(self) -> None:
        self.needs("crashes")
        for way in ("exit", "kill", "fault"):
            with self.subTest(way):
                path = str(self.folder / way)

                async def code(path: str = path, way: str = way) -> Any:
                    return await self.here(crashing, retry=Retry(attempts=2, base_seconds=0.01))(path, way)

                run = await self.begun(Workflow(code, name=f"crash-{way}"))
                assert await run.result() == "survived"
                (failed,) = [one for one in await run.checkpoints() if one.kind == Kind.STEP_FAILED]
                assert failed.error is not None
                assert failed.error.is_a(BodyLost)
                assert failed.error.error_class == "transient"
                assert Path(path).read_text(encoding="utf-8").split() == [way] * 2

    async def test_neighbours_of_a_crash_go_on(self) -> None:
        self.needs("crashes")
        path, other = self.path(), str(self.folder / "other")

        async def code() -> Any:
            first = asyncio.create_task(_caught(self.here(crashing)(path, "kill")))
            second = asyncio.create_task(_caught(self.here(beating)(other, 0.3)))
            return [await first, await second]

        assert await self.result(code) == ["BodyLost", "end"]
        assert len(Path(other).read_text(encoding="utf-8").split("end")) == 2

    # -- time

    async def test_a_timeout_ends_the_body(self) -> None:
        self.needs("kills")
        for step in _BEATING:
            with self.subTest(step.name):
                path = str(self.folder / step.name)

                async def code(path: str = path, step: Any = step) -> Any:
                    return await _caught(self.here(step, timeout=0.3)(path, 60.0))

                assert await self.result(code) == "StepTimedOut"
                await self._assert_silent(path)

    async def test_a_cancel_ends_the_body(self) -> None:
        self.needs("kills")
        for step in _BEATING:
            with self.subTest(step.name):
                path = str(self.folder / step.name)

                async def code(path: str = path, step: Any = step) -> Any:
                    return await self.here(step)(path, 60.0)

                run = await self.begun(Workflow(code, name=f"cancelled-{step.name}"))
                await _moment(Path(path).exists)
                await run.cancel("enough")
                await run.reached(Status.CANCELLED)
                await self._assert_silent(path)

    async def _assert_silent(self, path: str) -> None:
        """Assert that soon nobody appends to a file any more. The body is stopped while its run goes on or ends."""
        file, sizes = Path(path), [-1]
        while (size := file.stat().st_size if file.exists() else 0) != sizes[-1]:
            assert len(sizes) < STOP_LOOKS, "the body goes on"
            sizes.append(size)
            await asyncio.sleep(0.3)

    # -- at most once

    async def test_a_lost_body_of_an_at_most_once_step_is_in_doubt(self) -> None:
        self.needs("crashes")
        path = self.path()
        step = self.here(_crashing_once)

        async def code() -> Any:
            return await step(path, "kill")

        run = await self.begun(Workflow(code, name="doubtful"))
        await run.resolve(f"{step.name}#1", "result", "it arrived")  # kept until the step is in doubt
        assert await run.result() == "it arrived"
        assert self.effects() == ["kill"]

    # -- what cannot be sent, and what must not come back

    async def test_a_revealed_secret_does_not_leave_its_process(self) -> None:
        self.needs("secrets")
        captured = _Captured()
        logger = logging.getLogger("keepstep.run")
        logger.addHandler(captured)
        self.addCleanup(logger.removeHandler, captured)

        async def code() -> Any:
            found = []
            for fails in (False, True):
                try:
                    await self.here(revealing)(fails)
                except StepFailed as failure:
                    found.append(failure.error.message if failure.error else "")
            return found

        refused, redacted = await self.result(code)
        assert "revealed secret" in refused
        assert redacted == "[redacted] is wrong"
        assert not [one for one in captured.records if _REVEALED in one.getMessage()]

    async def test_a_function_that_cannot_be_found_is_refused(self) -> None:
        self.needs("own process")
        if getattr(self.executor, "pickled", False):
            self.skipTest("the cluster pickles functions")

        @Step
        def inner() -> int:
            return 1

        async def code() -> Any:
            try:
                await self.here(inner)()
            except StepFailed as failure:
                return failure.error and failure.error.message

        message = await self.result(code)
        assert "defined inside another function" in message
        assert "executor='thread'" in message

    # -- the end of the worker

    async def test_a_killed_worker_leaves_one_effect(self) -> None:
        """A body that outlives its worker is adopted by the next one; any other ends with it and is repeated."""
        self.needs("own process")
        program = self.folder / "program.py"
        text = f"""
            import keepstep as ks, sys
            from keepstep.testing.executor_contract import beating

            @ks.workflow
            async def work(path: str) -> str:
                return await beating.options(executor={self.expression or f"ks.executors.{self.executor!r}"})(path, 2.0)

            if __name__ == "__main__":
                print(ks.run(work, sys.argv[1], url={str(self.folder / "runs.db")!r}, run_id="r"))
        """
        program.write_text(textwrap.dedent(text), encoding="utf-8")
        command = [sys.executable, str(program), self.path()]
        worker = subprocess.Popen(command)  # noqa: ASYNC220, S603 - a program of this test
        await _moment(lambda: len(self.effects()) > 20)
        worker.kill()
        worker.wait()
        first = self.effects()[0]
        if not self.adopts:
            await self._assert_silent(self.path())
        again = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        shown, _ = await asyncio.wait_for(again.communicate(), PATIENCE_SECONDS)
        assert shown.decode().strip() == "end"
        lines = self.effects()
        assert lines.count("end") == 1
        assert len(set(lines) - {"end"}) == (1 if self.adopts else 2)
        assert lines[0] == first


@Step
def _graph_step(state: Any) -> dict[str, Any]:
    return {"n": state["n"] + 1, "list": [*state.get("list", []), state["n"]]}


@Step
def _summed(twice: int) -> int:
    return twice + 1


@Step
def _graph_goto(state: Any) -> Goto:
    return Goto("third", n=state["n"] + 1, list=[*state["list"], state["n"]])


def _crash(path: str, way: str) -> str:
    note(path, way)
    os.kill(os.getpid(), signal.SIGKILL)
    return "?"


_crashing_once: Step[..., Any] = Step(_crash, at_most_once=True)


async def _caught(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except (StepFailed, StepInDoubt) as error:
        return type(error).__name__
