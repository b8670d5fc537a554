"""What is said when an engine is opened, or a run waits, is refused at once if it cannot be meant."""

import pytest

import keepstep as ks


@ks.workflow(name="options plain")
async def plain():
    return 1


@pytest.mark.parametrize(
    "options, told",
    [
        ({"max_runs": 0}, "max_runs must be an integer of at least 1, got 0; .* worker=False"),
        ({"max_runs": "5"}, "max_runs must be an integer of at least 1, got '5'"),
        ({"retain": 5}, r"retain= takes a ks.Retain\(...\), or False, not 5"),
        ({"lease_seconds": -1}, "lease_seconds must be a number of seconds of at least 0, got -1"),
        ({"lease_seconds": "3"}, "lease_seconds must be a number of seconds of at least 0, got '3'"),
        ({"lease_seconds": 0}, "lease_seconds must be greater than 0"),
        ({"busy_seconds": float("nan")}, "busy_seconds must be a number of seconds of at least 0, got nan"),
        ({"linger_seconds": -3}, "linger_seconds must be a number of seconds of at least 0, got -3"),
        ({"workflows": plain}, "workflows= must be a list of workflows, got <workflow options plain"),
        ({"workflows": 5}, "workflows= must be a list of workflows, got 5"),
        ({"queues": "mail"}, "queues= takes a list of queues or their names, not 'mail'"),
        ({"queues": []}, "queues= names no queue; .* worker=False"),
        ({"queues": ["mail"], "worker": False}, "queues= is for a worker and has no effect with worker=False"),
        ({"retain": ks.Retain(), "worker": False}, "retain= is for a worker and has no effect with worker=False"),
        ({"queues": ["no/name"]}, "queue name 'no/name' is refused"),
        ({"workflows": [max]}, "workflows= must hold only workflows, got <built-in function max>; decorate it"),
    ],
)
async def test_an_option_that_cannot_be_meant_is_refused(tmp_path, options, told):
    with pytest.raises(ks.DefinitionError, match=told):
        async with ks.open(tmp_path / "runs.db", **options):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wait", [lambda: ks.sleep("3"), lambda: ks.sleep(hours="1"), lambda: ks.wait_for("x", "3")])
async def test_a_wait_that_is_not_a_number_says_so(wait):
    @ks.workflow
    async def waits():
        await wait()

    async with ks.open("memory:", workflows=[waits]) as engine:
        with pytest.raises(ks.RunFailed, match=r"must be a number, got '[13]'"):
            await (await engine.start(waits)).result(30)


async def test_a_status_that_there_is_not_is_refused():
    async with ks.open("memory:", workflows=[plain]) as engine:
        run = await engine.start(plain)
        with pytest.raises(ks.DefinitionError, match="'done' is not a valid Status; choose from queued, running"):
            await run.reached("done")
