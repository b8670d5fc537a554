"""What a test can do with a workflow, it can do with one whose bodies run in other processes."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.history.virtual_time import VirtualClock, VirtualLoop
from keepstep.testing import crashproof, crashtest, stub
from keepstep.testing.virtual import attend
from tests.nightly import case

from . import far_steps

#: Draws, for two moments, one at which the process of the body dies alone.
SEED = 7


def errors(report):
    return [finding for finding, _ in report.findings if finding.severity == "error"]


# -- crash tests -------------------------------------------------------------------------------------------------------


@pytest.mark.crash
def test_a_body_dies_with_its_process_and_with_its_worker_and_its_doubled_effect_is_found():
    report = crashtest(far_steps.doubles, life_seconds=60)
    [found] = errors(report)
    assert (found.code, found.step) == ("doubled", "charge")
    lines = Path(far_steps.__file__).read_text(encoding="utf-8").splitlines()
    assert found.line == f"{far_steps.__file__}:{1 + next(at for at, one in enumerate(lines) if '# doubled' in one)}"
    assert [(crash.where, crash.ok) for crash in report.crashes if crash.step] == [
        ("before its body begins (its process alone)", True),
        ("as its body begins (its process alone)", True),
        ("as its body begins", True),
        ("before its effect 1: charge order-1 (its process alone)", True),
        ("before its effect 1: charge order-1", True),
        ("after its body, before its result is recorded (its process alone)", False),
        ("after its body, before its result is recorded", False),
        ("after its outcome, before that is recorded (its process alone)", True),
    ]
    assert all(crash.reached for crash in report.crashes)
    assert [len(crash.repeated) for crash in report.crashes if crash.step] == [0, 0, 0, 1, 1, 1, 1, 0]


@pytest.mark.crash
@pytest.mark.parametrize("at_most", [case(3, id="few", nightly=False), case(500, id="all", nightly=True)])
@pytest.mark.parametrize("workflow", [far_steps.keyed, far_steps.at_most_once], ids=lambda one: one.name)
def test_a_key_or_at_most_once_survives_the_death_of_the_process(workflow, at_most):
    report = crashtest(workflow, at_most=at_most, life_seconds=60)
    assert report.ok, str(report)
    notes = {finding.code: finding.message for finding, _ in report.findings}
    if workflow is far_steps.keyed:
        assert "'ray' ran in processes of this machine" in notes["here-instead"]
    else:
        assert "in-doubt" in notes


@pytest.mark.crash
def test_a_step_without_another_attempt_does_not_survive_the_death_of_its_process():
    report = crashtest(far_steps.unretried, at_most=2, seed=SEED, life_seconds=60)
    [found] = errors(report)
    assert (found.code, found.step) == ("lost", "only_once_tried")
    assert "BodyLost" in found.message
    assert "retry=" in found.advice


@crashproof(at_most=1, life_seconds=60, executor="process")
def test_a_workflow_with_bodies_elsewhere_is_crashproof():
    return far_steps.keyed.bind()


# -- everything else ---------------------------------------------------------------------------------------------------


@ks.workflow(name="far:alone")
async def alone(path: str) -> int:
    return await far_steps.released(path)


def test_a_stub_runs_here_instead(tmp_path):
    asyncio.run(_stubbed(tmp_path / "file"))


async def _stubbed(path):
    async with ks.Engine("memory:", workflows=[alone]) as engine:
        with stub(far_steps.released, returns=7) as stubbed:
            assert await (await engine.start(alone.bind(str(path)))).result() == 7
        assert len(stubbed.calls) == 1
        assert not path.exists()
        assert engine.executors.at_work == engine.executors.lines == 0
        assert await (await engine.start(alone.bind(str(path)))).result() != os.getpid()
        assert path.exists()


@ks.workflow(name="far:both")
async def both(path: str, release: str) -> int:
    body = asyncio.ensure_future(far_steps.begun(path, release))
    await far_steps.noted(path)
    await far_steps.release_now(release)
    return await body


def test_a_body_elsewhere_outlives_a_run_that_is_forgotten_after_every_record(tmp_path):
    """The outcome of one step forgets the run, while the body of the other is in its process."""
    asyncio.run(_forgotten(tmp_path / "begun", tmp_path / "release"))


async def _forgotten(path, release):
    async with ks.Engine("memory:", workflows=[both], replay_always=True, linger_seconds=0.05) as engine:
        run = await engine.start(both.bind(str(path), str(release)))
        assert await run.result() != os.getpid()
        assert path.read_text(encoding="utf-8") == "begun\n"
        [ended] = [one for one in await run.checkpoints() if one.step == "begun#1"]
        assert ended.started_at < ended.finished_at


@ks.workflow(name="far:virtual")
async def virtual(seconds: float) -> list[object]:
    spent = []
    for timeout in (3600.0, 0.3):
        began = ks.now()
        try:
            await far_steps.sleeping.options(timeout=timeout)(seconds)
        except ks.StepFailed as failure:
            spent.append(type(failure).__name__)
        spent.append((ks.now() - began).total_seconds())
        await ks.sleep(days=30)
    return spent


def test_virtual_time_passes_for_bodies_elsewhere_as_real_time_does():
    """The clock does not jump over the timeout of a body, and a process without one does not stop it."""

    async def main() -> object:
        loop = asyncio.get_running_loop()
        async with ks.Engine("memory:", clock=VirtualClock(), workflows=[virtual]) as engine:
            attend(loop, engine)
            return await (await engine.start(virtual.bind(1.0))).result()

    began = time.monotonic()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        first, failed, second = runner.run(main())
    assert time.monotonic() - began < 60
    assert 1.0 <= first < 60
    assert failed == "StepTimedOut"
    assert 0.3 <= second < 60
