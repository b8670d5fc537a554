"""A run that missed its deadline can be retried like any other that failed."""

import pytest

import keepstep as ks


@ks.step
async def note(what: str) -> str:
    return what


@ks.workflow(name="slower-than-its-deadline")
async def slow() -> str:
    await note("before")
    await ks.sleep(0.5)
    return "ok"


def test_a_run_that_missed_its_deadline_can_be_retried():
    with ks.open("memory:") as engine:
        run = engine.start(slow, deadline=0.2)
        with pytest.raises(ks.RunTimedOut):
            run.result(timeout=60)
        run.retry("more time")
        assert run.result(timeout=60) == "ok"
