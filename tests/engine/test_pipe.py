"""The seams of a step: gates before an attempt, executors for its body, a tracer around it."""

import asyncio
from contextlib import contextmanager
from contextvars import ContextVar

import pytest

import keepstep as ks
from keepstep.engine.parts import Parts
from keepstep.executors.thread import ThreadExecutor, ThreadPool
from keepstep.kernel.attempt import Attempt
from keepstep.kernel.gates import leave_gates, pass_gates
from keepstep.ports import Admission

INSIDE = ContextVar("inside", default=())


class Recorder:
    """A tracer that records the spans that surround each span."""

    def __init__(self):
        self.spans = []
        self.errors = []

    @contextmanager
    def around(self, span):
        name = f"attempt {span.attempt}" if span.attempt else span.step or f"run {span.workflow}"
        self.spans.append((*INSIDE.get(), name))
        token = INSIDE.set((*INSIDE.get(), name))
        try:
            yield
        except Exception as error:
            self.errors.append((name, type(error).__name__))
            raise
        finally:
            INSIDE.reset(token)


def traced(effects):
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0.0))
    async def flaky():
        effects.append(INSIDE.get())
        if len(effects) == 1:
            raise ConnectionError("no")
        return 1

    @ks.step
    def plain(number):
        effects.append(INSIDE.get())
        return number + 1

    @ks.workflow(name="traced")
    async def program():
        return await plain(await flaky())

    return program


@pytest.mark.live_only
async def test_tracer_surrounds_run_step_and_attempt(world, effects):
    tracer = Recorder()
    async with world.engine(tracer=tracer) as engine:
        assert await (await engine.start(traced(effects))).result(30) == 2
    run = "run traced"
    bodies = [(run, "flaky#1", "attempt 1"), (run, "flaky#1", "attempt 2"), (run, "plain#1", "attempt 1")]
    assert effects == bodies
    assert tracer.spans == [(run,), (run, "flaky#1"), *bodies[:2], (run, "plain#1"), bodies[2]]
    assert tracer.errors == [("attempt 1", "ConnectionError")]


@pytest.mark.live_only
async def test_tracer_surrounds_a_def_workflow(world, effects):
    tracer = Recorder()

    @ks.workflow(name="blocking")
    def program():
        return INSIDE.get()

    async with world.engine(tracer=tracer) as engine:
        assert await (await engine.start(program)).result(30) == ("run blocking",)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("moment", ["around", "enter", "exit"])
@pytest.mark.live_only
async def test_failing_tracer_leaves_the_run_alone(world, effects, logged, moment, error):
    class Broken:
        def around(self, span):
            if moment == "around":
                raise error("no exporter")
            return self

        def __enter__(self):
            if moment == "enter":
                raise error("no exporter")

        def __exit__(self, *_):
            raise error("no exporter")

    async with world.engine(tracer=Broken()) as engine:
        assert await (await engine.start(traced(effects))).result(30) == 2
    assert len(effects) == 3
    assert any("the tracer failed" in line for line in logged())


@pytest.mark.live_only
async def test_bodies_run_in_the_executor_of_their_step(world, effects):
    class Counting(ThreadExecutor):
        async def execute(self, work, seconds):
            effects.append(work.key)
            return await super().execute(work, seconds)

    @ks.step
    def plain():
        return 1

    @ks.step
    async def inline():
        return 2

    @ks.workflow(name="executed")
    async def program():
        return await plain() + await inline()

    parts = Parts(executors={"thread": Counting(ThreadPool(4, "counting"))})
    async with world.engine(parts=parts) as engine:
        assert await (await engine.start(program)).result(30) == 3
    assert effects == ["plain#1"]


class Door:
    """A gate that answers as told, one answer an entry."""

    def __init__(self, name, log, *answers):
        self.name, self.log, self.answers = name, log, list(answers)

    async def enter(self, attempt):
        answer = self.answers.pop(0) if self.answers else Admission.ADMITTED
        self.log.append(f"{self.name} {answer.value}")
        return answer

    def leave(self, attempt):
        self.log.append(f"{self.name} left")


def passing(*gates):
    attempt = Attempt(None, None, "step#1", gates=gates)
    return asyncio.run(pass_gates(attempt)), attempt


def test_attempt_that_waited_passes_every_gate_again():
    log = []
    admitted, attempt = passing(Door("a", log), Door("b", log, Admission.WAITED))
    assert admitted
    assert log == ["a admitted", "b waited", "a left", "a admitted", "b admitted"]
    leave_gates(attempt)
    assert log[-2:] == ["a left", "b left"]


def test_refused_attempt_leaves_the_gates_it_has_passed():
    log = []
    admitted, _ = passing(Door("a", log), Door("b", log, Admission.REFUSED), Door("c", log))
    assert not admitted
    assert log == ["a admitted", "b refused", "a left"]
