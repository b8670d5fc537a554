"""A KeyboardInterrupt in a step or workflow ends the program; the run is handed back, and goes on the next time."""

import asyncio
import threading

import pytest

import keepstep as ks

interrupts = []
may_interrupt = threading.Event()


def interrupt_once():
    if interrupts:
        interrupts.pop()
        raise KeyboardInterrupt
    return "done"


@ks.step
def in_thread():
    return interrupt_once()


@ks.step
async def in_task():
    return interrupt_once()


@ks.step
async def in_task_of_a_step():
    async def inner():
        return interrupt_once()

    return await asyncio.create_task(inner())


@ks.workflow
async def of_thread_step():
    return await in_thread()


@ks.workflow
async def of_async_step():
    return await in_task()


@ks.step
async def when_allowed():
    await asyncio.to_thread(may_interrupt.wait, 30)
    return interrupt_once()


@ks.workflow
async def of_step_when_allowed():
    return await when_allowed()


@ks.workflow
async def of_a_steps_task():
    return await in_task_of_a_step()


@ks.workflow
async def of_code():
    return interrupt_once()


@ks.workflow
async def of_branch():
    async def branch():
        return interrupt_once()

    return await asyncio.create_task(branch())


@ks.workflow
def of_def_code():
    return interrupt_once()


EVERY_PLACE = [of_thread_step, of_async_step, of_a_steps_task, of_code, of_branch, of_def_code]


@pytest.fixture(autouse=True)
def _one_interrupt():
    interrupts[:] = [1]
    may_interrupt.clear()


@pytest.mark.parametrize("workflow", EVERY_PLACE, ids=lambda one: one.name)
def test_blocking_caller_is_interrupted_and_the_run_goes_on_later(tmp_path, workflow):
    url = str(tmp_path / "runs.db")
    with pytest.raises(KeyboardInterrupt):
        ks.run(workflow, url=url, run_id="r")
    assert ks.run(workflow, url=url, run_id="r") == "done"


@pytest.mark.parametrize("workflow", EVERY_PLACE, ids=lambda one: one.name)
def test_async_program_is_interrupted_and_the_run_goes_on_later(tmp_path, workflow):
    async def main():
        async with ks.open(str(tmp_path / "runs.db")) as engine:
            return await (await engine.start(workflow, run_id="r")).result(30)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert asyncio.run(main()) == "done"


def test_interrupted_engine_refuses_more_work(tmp_path):
    with ks.open(str(tmp_path / "runs.db")) as engine:
        run = engine.start(of_step_when_allowed, run_id="r")  # else `start` itself might be interrupted
        may_interrupt.set()
        with pytest.raises(KeyboardInterrupt):
            run.result(30)
        with pytest.raises(ks.DefinitionError, match="KeyboardInterrupt; leave the `with` block"):
            run.result(30)


def test_interrupt_while_no_caller_waits_reaches_the_next_one(tmp_path):
    with ks.open(str(tmp_path / "runs.db")) as engine:
        run = engine.start(of_step_when_allowed, run_id="r")  # else `start` itself might be interrupted
        may_interrupt.set()
        while not engine._interrupted:
            pass
        with pytest.raises(KeyboardInterrupt):
            run.result(30)
