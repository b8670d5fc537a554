"""Messages about common mistakes say what to write instead."""

from __future__ import annotations

import pytest

import keepstep as ks
from tests.engine.world import until_at_last_wait


@ks.step
def echo(text: str) -> str:
    return text


@ks.step
async def ask(client, question: str) -> str:
    return question


async def message_of(world, workflow, *args):
    run = await (await world.started()).start(workflow, *args)
    with pytest.raises(ks.RunFailed) as caught:
        await run.result()
    return str(caught.value)


@pytest.mark.one_store
async def test_plain_workflow_that_returns_a_call_is_told_of_result(world):
    @ks.workflow
    def plain():
        return echo("a")

    @ks.workflow
    async def awaiting():
        return echo("a")

    assert "did you forget `.result()`?" in await message_of(world, plain)
    assert "did you forget `await`?" in await message_of(world, awaiting)


@pytest.mark.one_store
async def test_call_inside_a_result_or_an_argument_is_named(world):
    @ks.workflow
    async def listing():
        return [echo("a"), echo("b")]

    @ks.workflow
    async def passing():
        return await echo(echo("a"))

    advice = "is a call that has not run; write `await` before it, or call its .result() in plain def code"
    assert f"result[0] {advice}" in await message_of(world, listing)
    assert f"argument 'text' {advice}" in await message_of(world, passing)


@pytest.mark.one_store
@pytest.mark.parametrize(
    "use",
    [lambda call: call.upper(), lambda call: call + "b", lambda call: call[0], list, len],
    ids=["attribute", "sum", "item", "iteration", "length"],
)
async def test_call_that_is_used_as_its_value_is_named(world, use):
    @ks.workflow
    def using():
        return use(echo("a"))

    @ks.workflow
    def sleeping():
        return use(ks.sleep(1))

    for workflow in (using, sleeping):
        assert "did you forget `await` or `.result()`?" in await message_of(world, workflow)


@pytest.mark.one_store
async def test_other_type_errors_are_left_alone(world):
    @ks.workflow
    async def adding():
        return "StepCall" + 1

    assert (await message_of(world, adding)).endswith('can only concatenate str (not "int") to str')


@pytest.mark.one_store
async def test_argument_that_cannot_be_stored_is_told_of_ignore(world):
    @ks.workflow
    async def asking():
        return await ask(object(), "why")

    @ks.workflow
    async def by_name():
        return await ask(client=object(), question="why")

    for workflow in (asking, by_name):
        message = await message_of(world, workflow)
        assert "pass plain data" in message
        assert message.endswith("or leave it out of the record with @ks.step(ignore=('client',))")


@pytest.mark.one_store
@pytest.mark.parametrize(
    "call, advice",
    [
        (lambda: ks.wait_for("go"), "graph.wait("),
        (lambda: ks.sleep(1), "graph.delay("),
        (ks.random, "call it in the workflow itself"),
    ],
    ids=["wait_for", "sleep", "random"],
)
async def test_step_of_a_graph_is_told_of_the_part_that_waits(world, call, advice):
    graph = ks.Graph("waiting graph")

    @graph.step
    async def only(state):
        call()

    graph.entry("only")
    graph.exit("only")
    assert advice in await message_of(world, graph)


@pytest.mark.one_store
@pytest.mark.live_only
async def test_changed_argument_is_told_of_recorded_times_and_chance(world):
    draws = iter(["first", "second"])

    @ks.workflow
    async def guessing():
        await echo(next(draws))
        await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    await engine.start(guessing, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine)
    with pytest.raises(ks.RunSetAside, match=r"ks\.now\(\), ks\.random\(\) and ks\.uuid\(\)"):
        await (await engine.get("r")).result(timeout=30)


def test_migrate_without_a_version_is_refused():
    with pytest.raises(ks.DefinitionError, match=r"'moving' has migrate= but no version=.* write version='2'"):

        @ks.workflow(migrate=lambda info: None)
        async def moving():
            pass
