"""`record_input=True`: the arguments of a step are stored beside its outcome."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

import keepstep as ks
from keepstep.kernel.calls import MOST_INPUT_BYTES
from tests.engine.world import World


@ks.step(record_input=True)
async def add(a, b=2, *more, **named):
    return a + b + sum(more) + sum(named.values())


@ks.step
async def double(number):
    return 2 * number


def inputs_of(checkpoints):
    """The recorded arguments by step, of every record that has them."""
    return {one.step: json.loads(one.data["input"]) for one in checkpoints if "input" in one.data}


async def ran(world, workflow, *args):
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow, *args)
        with suppress(ks.RunFailed):
            await run.result()
        return await run.checkpoints()


async def test_arguments_are_stored_by_name(world):
    @ks.workflow(name="w")
    async def workflow():
        await add(1)
        await add(1, b=3)
        await add(1, 2, 3, 4, x=5)
        await double(7)

    found = inputs_of(await ran(world, workflow))
    assert found == {
        "add#1": {"a": 1},
        "add#2": {"a": 1, "b": 3},
        "add#3": {"a": 1, "b": 2, "more": {"$": "tuple", "v": [3, 4]}, "named": {"x": 5}},
    }


async def test_workflow_records_the_inputs_of_all_its_steps_unless_one_refuses(world):
    @ks.step(record_input=False)
    async def private(word):
        return len(word)

    @ks.step(transactional=True)
    def write(tx, row):
        return row

    @ks.workflow(name="inner")
    async def inner():
        await double(4)

    @ks.workflow(name="outer", record_input=True)
    async def outer():
        await double(1)
        await private("quiet")
        await ks.gather(double(2), double(3))
        await ks.map(double, [8, 9])
        await inner()
        if world.kind == "sqlite":
            await write("a row")

    found = inputs_of(await ran(world, outer))
    assert {key.rpartition("/")[2]: value for key, value in found.items() if "private" in key} == {}
    given = sorted(value["number"] for value in found.values() if "number" in value)
    assert given == [1, 2, 3, 4, 8, 9]
    assert [value for key, value in found.items() if key == "write#1"] == [{"row": "a row"}] * (world.kind == "sqlite")


async def test_called_workflow_records_the_inputs_of_its_own_steps_only(world):
    @ks.workflow(name="inner", record_input=True)
    async def inner():
        await double(4)

    @ks.workflow(name="outer")
    async def outer():
        await double(1)
        await inner()
        await double(2)

    assert list(inputs_of(await ran(world, outer)).values()) == [{"number": 4}]


async def test_input_is_stored_as_it_was_before_the_body(world):
    @ks.step(record_input=True)
    async def grow(items):
        items.append(2)
        return items

    @ks.workflow(name="w")
    async def workflow():
        return await grow([1])

    found = await ran(world, workflow)
    assert inputs_of(found) == {"grow#1": {"items": [1]}}


async def test_last_failure_holds_the_input(world):
    @ks.step(record_input=True, retry=ks.Retry(attempts=2, base_seconds=0))
    async def fail(items):
        items.append(1)
        raise ValueError("no")

    @ks.workflow(name="w")
    async def workflow():
        await fail([])

    found = await ran(world, workflow)
    failed = [one for one in found if one.kind == "step failed"]
    assert ["input" in one.data for one in failed] == [False, True]
    assert json.loads(failed[-1].data["input"]) == {"items": []}


async def test_ignored_parameters_and_the_object_of_a_method_are_left_out(world):
    class Client:
        @ks.step(record_input=True)
        async def fetch(self, page):
            return page

    @ks.step(record_input=True, ignore=("client",))
    async def load(client, page):
        return page

    @ks.workflow(name="w")
    async def workflow():
        await load(object(), 3)
        await Client().fetch(4)

    assert list(inputs_of(await ran(world, workflow)).values()) == [{"page": 3}, {"page": 4}]


async def test_of_a_large_input_only_the_size_is_stored(world):
    @ks.step(record_input=True)
    async def measure(text):
        return len(text)

    @ks.workflow(name="w")
    async def workflow():
        await measure("x" * (MOST_INPUT_BYTES - 20))
        await measure("x" * MOST_INPUT_BYTES)

    first, second = [one.data for one in await ran(world, workflow) if one.kind == "step completed"]
    assert len(json.loads(first["input"])["text"]) == MOST_INPUT_BYTES - 20
    assert "input" not in second
    assert second["input_bytes"] == MOST_INPUT_BYTES + len('{"text":""}')


@pytest.mark.plaintext
async def test_secret_in_a_recorded_input_is_refused_before_the_body(world, monkeypatch):
    monkeypatch.setenv("RECORDED_TEST_KEY", "sk-verysecretvalue-123456")
    bodies = []

    @ks.step(record_input=True)
    async def use(key):
        bodies.append(key)

    @ks.workflow(name="w")
    async def workflow():
        await use(ks.Secret("RECORDED_TEST_KEY").reveal())

    found = await ran(world, workflow)
    assert bodies == []
    [failed] = [one for one in found if one.kind == "step failed"]
    assert "input of step 'use#1'" in failed.error.message


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_recorded_input_is_encrypted(kind, tmp_path):
    world = World(kind, "live", tmp_path / "runs.db", encrypted=True)

    @ks.step(record_input=True)
    async def use(word):
        return len(word)

    @ks.workflow(name="w")
    async def workflow():
        await use("my private word")

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow, run_id="r")
        await run.result()
        assert inputs_of(await run.checkpoints()) == {"use#1": {"word": "my private word"}}
        assert not any(b"private" in row.record for row in engine.store.inner.list_checkpoints("r"))


async def test_fork_copies_recorded_inputs(world):
    @ks.workflow(name="w")
    async def workflow():
        await add(1)
        await double(2)

    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow)
        await run.result()
        copied = await engine.fork(run.id, step="add#1")
        await copied.result()
        assert inputs_of(await copied.checkpoints()) == {"add#1": {"a": 1}}


async def test_dag_records_the_inputs_of_its_steps(world):
    dag = ks.Dag("d", record_input=True)
    dag.step(double, name="twice")

    @dag.step(needs=["twice"])
    async def show(twice):
        return twice

    async with world.engine(workflows=[dag]) as engine:
        run = await engine.start(dag, number=3)
        await run.result()
        assert list(inputs_of(await run.checkpoints()).values()) == [{"number": 3}, {"twice": 6}]


def test_graph_refuses_a_step_that_records_its_input():
    graph = ks.Graph("g")
    with pytest.raises(ks.DefinitionError, match="its input is the state, which the history holds"):
        graph.step(add)


async def test_nothing_is_stored_by_default(world):
    @ks.workflow(name="w")
    async def workflow():
        await double(7)

    for one in await ran(world, workflow):
        assert not {"input", "input_bytes"} & set(one.data)
