"""What a schema promises: whoever writes a state, a step, a start, an edit or a fork, its values are of its types."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pydantic
import pytest

import keepstep as ks
from keepstep import errors
from keepstep.workflows.schema import Schema
from tests.engine.world import until_status


class Speed(Enum):
    FAST = "fast"
    SLOW = "slow"


class Line(pydantic.BaseModel):
    sku: str
    count: int = 1


class Order(pydantic.BaseModel):
    id: int
    speed: Literal["fast", "slow"] = "slow"
    lines: list[Line] = []
    total: Annotated[int, pydantic.Field(ge=0)] = 0


@dataclass
class Point:
    x: int


@dataclass
class Deep(Point):
    z: int = 0


class Meta(TypedDict):
    author: str


class Doc(TypedDict, total=False):
    at: datetime
    speed: Speed
    speeds: list[Speed]
    point: Point
    points: list[Point]
    meta: Meta
    tags: list[str]
    count: int
    free: Any


def ordering(returned, **options):
    graph = ks.Graph("ordering", schema=Order, **options)

    @graph.step
    async def pick(state):
        return returned

    @graph.step
    async def ship(state):
        return {"total": state["total"] + 1} if "total" in state else None

    graph.edge("pick", "ship")
    graph.entry("pick")
    graph.exit("ship")
    return graph


@pytest.mark.parametrize("whole", [False, True], ids=["change", "state"])
async def test_a_pydantic_schema_stores_what_it_made_of_a_value(world, whole):
    change = {"total": "4", "lines": [{"sku": "a", "count": "2"}]}
    graph = ordering(ks.State(id=1).merge(change) if whole else change)
    async with world.engine() as engine:
        run = await engine.start(graph, id="1")
        left = {} if whole else {"speed": "slow"}  # a whole state replaces all
        assert await run.result() == {"id": 1, "total": 5, "lines": [Line(sku="a", count=2)], **left}
        assert (await run.state(1))["id"] == 1


async def test_start_with_an_equivalent_input_is_the_same_run(world):
    async with world.engine() as engine:
        graph = ordering(None)
        await (await engine.start(graph, {"total": "4"}, id="1", run_id="r")).result()
        again = await engine.start(graph, {"total": 4}, id=1, run_id="r")
        assert (await again.result())["id"] == 1


async def test_merged_results_of_branches_are_held_to_the_schema(world):
    class Sums(pydantic.BaseModel):
        many: list[int] = []

    graph = ks.Graph("sums", schema=Sums, reducers={"many": "append"})

    @graph.step
    async def start(state):
        return {"many": ["1"]}

    @graph.step
    async def left(state):
        return {"many": ["2"]}

    @graph.step
    async def right(state):
        return {"many": ["3"]}

    @graph.step
    async def done(state):
        return None

    graph.edge("start", "fan")
    graph.parallel("fan", ["left", "right"], join="done")
    graph.entry("start")
    graph.exit("done")
    async with world.engine() as engine:
        assert await (await engine.start(graph)).result() == {"many": [1, 2, 3]}


@pytest.mark.parametrize(
    "given, stored",
    [
        ({"at": "2026-01-02T03:04:05Z"}, {"at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)}),
        ({"speed": "fast"}, {"speed": Speed.FAST}),
        ({"speeds": ["fast", Speed.SLOW]}, {"speeds": [Speed.FAST, Speed.SLOW]}),
        ({"point": {"x": 1}}, {"point": Point(1)}),
        ({"points": [Deep(1, 2), {"x": 3}]}, {"points": [Deep(1, 2), Point(3)]}),
        ({"meta": {"author": "a", "more": 1}}, {"meta": {"author": "a", "more": 1}}),
        ({"free": {"x": "1"}}, {"free": {"x": "1"}}),
    ],
)
def test_plain_data_becomes_what_the_annotations_say_and_loses_nothing(given, stored):
    made = Schema(Doc).converted(given, "it")
    assert made == stored
    assert [type(value) for value in made.values()] == [type(value) for value in stored.values()]


@pytest.mark.parametrize("given", [{"count": "4"}, {"count": True}, {"speed": "warp"}, {"point": {"x": "1"}}])
def test_a_text_where_a_number_belongs_is_refused(given):
    with pytest.raises(ks.DefinitionError, match="does not fit Doc"):
        Schema(Doc).converted(given, "it")


def test_what_fits_already_stays_the_same_object():
    tags, points = ["a", "b"], [Point(1)]
    made = Schema(Doc).converted({"tags": tags, "points": points}, "it")
    assert made["tags"] is tags
    assert made["points"] is points
    lines = [Line(sku="a"), Line(sku="b")]
    assert Schema(Order).converted({"lines": lines}, "it")["lines"] is lines


def test_a_struct_as_a_schema_converts_too():
    class Box(msgspec.Struct):
        points: list[Point]
        line: Line

    made = Schema(Box).converted({"points": [{"x": 1}], "line": {"sku": "a"}}, "it")
    assert made == {"points": [Point(1)], "line": Line(sku="a")}


# -- edits and forks ---------------------------------------------------------------------------------------------------


async def test_a_result_of_a_fork_is_held_to_the_schema(world):
    async with world.engine() as engine:
        run = await engine.start(ordering({"speed": "slow"}), id=1, run_id="r")
        await run.result()
        for wrong in ({"speed": "warp"}, {"nokey": 2}):
            with pytest.raises(ks.DefinitionError, match="edited result of 'pick'"):
                await engine.fork("r", results={"pick": wrong})
        fork = await engine.fork("r", results={"pick": {"total": "7"}})
        assert (await fork.result())["total"] == 8


async def stopped(world):
    """A run of a graph with a schema that waits at its breakpoint, and its graph."""
    graph = ordering({"speed": "slow"}, interrupt_before=["ship"])
    async with world.engine() as engine:
        run = await engine.start(graph, id=1, run_id="r")
        await until_status(run, "waiting")
    return graph


async def test_without_the_code_an_edit_of_a_state_with_a_schema_is_refused(world):
    await stopped(world)
    async with world.engine(worker=False, workflows=[]) as stranger:
        run = await stranger.get("r")
        for act in (
            run.edit({"speed": "warp"}),
            stranger.fork("r", state={"id": "nine"}),
            stranger.fork("r", results={"pick": {"speed": "warp"}}),
        ):
            with pytest.raises(ks.DefinitionError, match="the values must be checked with Order"):
                await act
        await run.edit(next="pick")  # needs no schema
        fork = await stranger.fork("r")
        with pytest.raises(ks.DefinitionError, match="the values must be checked with Order"):
            await stranger.fork(fork.id, state={"id": 2})


@pytest.mark.parametrize("values", [{"speed": "warp"}, {"id": "4"}, {"nokey": 1}], ids=["value", "text", "key"])
async def test_an_edit_that_got_past_the_schema_sets_the_run_aside(world, monkeypatch, values):
    """A process of an older version does not know of the schema, and writes what it is told."""
    graph = await stopped(world)

    async def unchecked(engine, run, values, where, state):
        return values

    monkeypatch.setattr("keepstep.history.state_edits.fitting", unchecked)
    async with world.engine(worker=False, workflows=[]) as stranger:
        await (await stranger.get("r")).edit(values)
    monkeypatch.undo()
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        with pytest.raises(errors.RunSetAside, match="edit the run again"):
            await run.result()
        await run.edit({key: 2 for key in values if key == "id"}, remove=[*values.keys() - {"id"}])
        await until_status(run, "waiting")
        await run.resume()
        assert (await run.result())["id"] == (2 if "id" in values else 1)


async def test_an_edit_is_converted_as_a_step_is(world):
    graph = await stopped(world)
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.get("r")
        await run.edit({"id": "7"})
        assert (await run.state())["id"] == 7
        await until_status(run, "waiting")
        with pytest.raises(ks.DefinitionError, match="does not fit Order"):
            await run.edit({"total": -1})


# -- results of steps that are given by a person -----------------------------------------------------------------------


def judging():
    @ks.step
    async def critic() -> Point:
        return Point(1)

    @ks.workflow
    async def inner() -> Point:
        return Point(2)

    @ks.workflow
    async def job() -> list[int]:
        child = await ks.start(inner)
        return [(await critic()).x, (await child.result()).x]

    return job


@pytest.mark.parametrize("given", [Point(9), {"x": 9}], ids=["instance", "plain data"])
async def test_a_given_result_comes_back_as_the_type_of_the_annotation(world, given):
    async with world.engine() as engine:
        run = await engine.start(judging(), run_id="r")
        assert await run.result() == [1, 2]
        fork = await engine.fork("r", results={"critic": given})
        assert await fork.result() == [9, 2]


async def test_a_given_result_of_a_child_is_typed_too(world):
    async with world.engine() as engine:
        run = await engine.start(judging(), run_id="r")
        await run.result()
        key = next(one.step for one in await run.checkpoints() if one.kind == "child" and "result" in one.step)
        fork = await engine.fork("r", results={key: {"x": 8}})
        assert await fork.result() == [1, 8]


async def test_a_name_that_several_steps_have_is_refused_with_their_keys(world):
    @ks.step
    async def turn(number: int) -> int:
        return number

    @ks.workflow
    async def turns() -> list[int]:
        return [await turn(number) for number in range(3)]

    async with world.engine() as engine:
        await (await engine.start(turns, run_id="r")).result()
        with pytest.raises(ks.DefinitionError, match=r"3 recorded results of 'turn' .* turn#1, turn#2, turn#3"):
            await engine.fork("r", results={"turn": 9})
        fork = await engine.fork("r", results={"turn#2": 9})
        assert await fork.result() == [0, 9, 2]
