"""The seams of a step: gates before an attempt, executors for its body, a tracer for its context."""

import asyncio
from contextvars import ContextVar

import pytest

import keepstep as ks
from keepstep.engine.parts import Parts
from keepstep.executors.thread import ThreadExecutor, ThreadPool
from keepstep.kernel.attempt import Attempt
from keepstep.kernel.gates import leave_gates, pass_gates
from keepstep.ports import Admission

INSIDE = ContextVar("inside", default="")


class Recorder:
    """A tracer whose context is the place that it was told of."""

    def __init__(self):
        self.spans = []

    def enter(self, run, step, attempt):
        name = f"{run.workflow} {step} {attempt}" if step else f"run {run.workflow}"
        self.spans.append(name)
        INSIDE.set(name)

    def traceparent(self, run):
        return f"00-{run.trace}-00f067aa0ba902b7-01"

    def observe(self, *_):
        """Take no notice of events and records."""

    recorded = repeat = read_from = observe

    def flush(self):
        """Hold nothing."""


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
async def test_tracer_is_told_of_run_and_attempts(world, effects):
    tracer = Recorder()
    async with world.engine(observers=tracer) as engine:
        assert await (await engine.start(traced(effects))).result(30) == 2
    assert effects == ["traced flaky#1 1", "traced flaky#1 2", "traced plain#1 1"]
    assert tracer.spans == ["run traced", *effects]


@pytest.mark.live_only
async def test_context_of_the_run_holds_in_a_def_workflow(world, effects):
    @ks.workflow(name="blocking")
    def program():
        return INSIDE.get()

    async with world.engine(observers=Recorder()) as engine:
        assert await (await engine.start(program)).result(30) == "run blocking"


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("moment", ["enter", "traceparent", "observe", "recorded", "read_from", "flush"])
@pytest.mark.live_only
async def test_failing_tracer_leaves_the_run_alone(world, effects, logged, moment, error):
    def fail(*_):
        raise error("no exporter")

    @ks.workflow
    async def parent():
        return await (await ks.start(inner))

    inner, tracer = traced(effects), Recorder()
    setattr(tracer, moment, fail)
    async with world.engine(observers=tracer) as engine:
        assert await (await engine.start(parent)).result(30) == 2
    assert len(effects) == 3
    if moment in ("enter", "traceparent"):
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
