"""A schema holds from the first state on: defaults, required keys, validators, instances and reducers."""

import operator
import uuid
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, NotRequired, TypedDict

import msgspec
import pydantic
import pytest

import keepstep as ks
from tests.engine.world import until_status


def chain(name, schema, *functions, **options):
    """A graph that passes the functions in turn."""
    graph = ks.Graph(name, schema=schema, **options)
    for function in functions:
        graph.step(function)
    names = [function.__name__ for function in functions]
    for one, other in pairwise(names):
        graph.edge(one, other)
    graph.entry(names[0])
    graph.exit(names[-1])
    return graph


class Model(pydantic.BaseModel):
    topic: str
    round: int = 0
    notes: list[str] = []


@dataclass
class Data:
    topic: str
    round: int = 0
    notes: list[str] = field(default_factory=list)


class Struct(msgspec.Struct):
    topic: str
    round: int = 0
    notes: list[str] = []


class Typed(TypedDict):
    topic: str
    round: NotRequired[int]


CLASSES = pytest.mark.parametrize("cls", [Model, Data, Struct])


@CLASSES
async def test_defaults_are_in_the_first_state_and_required_keys_are_demanded(world, cls):
    async def count(state):
        return {"round": state["round"] + 1, "notes": [*state["notes"], state["topic"]]}

    graph = chain("defaults", cls, count)
    async with world.engine() as engine:
        run = await engine.start(graph, topic="x", run_id="r")
        assert await run.result() == {"topic": "x", "round": 1, "notes": ["x"]}
        assert (await run.state(1)) == {"topic": "x", "round": 0, "notes": []}
        with pytest.raises(ks.DefinitionError, match=f"'defaults': its first state: {cls.__name__} requires 'topic'"):
            await engine.start(graph, round=1)
        assert len((await engine.list()).runs) == 1


async def test_required_keys_of_a_typed_dict_are_demanded_and_others_are_not(world):
    async def same(state):
        return {"round": state.get("round", 0) + 1}

    graph = chain("typed", Typed, same)
    async with world.engine() as engine:
        assert await (await engine.start(graph, topic="x")).result() == {"topic": "x", "round": 1}
        with pytest.raises(ks.DefinitionError, match="requires 'topic'; pass it, or make it NotRequired in Typed"):
            await engine.start(graph)


@CLASSES
async def test_an_instance_is_passed_in_taken_and_returned(world, cls):
    async def mutate(state: cls):
        assert type(state) is cls
        state.round += 1
        state.notes = [*state.notes, f"{state.topic} {state.round}"]
        return state

    async def change(state):
        return {"round": state.round + 1} if state.topic == "x" else None

    graph = ks.Graph("instances", schema=cls)
    graph.step(mutate)
    graph.step(change)
    graph.edge("mutate", "change")
    graph.edge("change", "mutate", when=lambda state: state.round < 4)
    graph.entry("mutate")
    graph.exit("change")
    async with world.engine() as engine:
        run = await engine.start(graph, cls(topic="x"))
        assert await run.result() == {"topic": "x", "round": 4, "notes": ["x 1", "x 3"]}
        assert (await run.state()).notes == ["x 1", "x 3"]


async def test_each_attempt_gets_its_own_instance(world):
    tries = []

    async def count(state: Data):
        state.round += 1
        tries.append(state.round)
        if len(tries) == 1:
            raise OSError("once")
        return state

    graph = ks.Graph("attempts", schema=Data)
    graph.step(count, retry=ks.Retry(attempts=2, base_seconds=0.001))
    graph.entry("count")
    graph.exit("count")
    async with world.engine() as engine:
        assert (await (await engine.start(graph, Data("x"))).result())["round"] == 1
    assert tries[:2] == [1, 1]


@pytest.mark.live_only
async def test_an_instance_that_is_returned_stores_only_its_difference(world):
    class Chat(pydantic.BaseModel):
        topic: str = "x" * 500
        messages: list[dict[str, str]] = []

    async def say(state: Chat):
        return state.model_copy(update={"messages": [*state.messages, {"text": f"message {len(state.messages)}"}]})

    graph = ks.Graph("chat", schema=Chat)
    graph.step(say)
    graph.edge("say", "say", when=lambda state: len(state.messages) < 30)
    graph.entry("say")
    graph.exit("say")
    async with world.engine() as engine:
        run = await engine.start(graph)
        assert len((await run.result())["messages"]) == 30
        changes = [one.value for one in await run.checkpoints() if one.kind == "step completed"]
        assert [*msgspec.json.decode(changes[-1])] == ["appended"]
        assert len(changes[-1]) < 100


async def test_methods_and_properties_of_the_class_work_on_a_state(world):
    @dataclass
    class Score:
        points: int = 1

        @property
        def twice(self):
            return 2 * self.points

        def above(self, limit):
            return self.points > limit

    async def double(state):
        return {"points": state.twice}

    graph = ks.Graph("methods", schema=Score)
    graph.step(double)
    graph.edge("double", "double", when=lambda state: not state.above(20))
    graph.entry("double")
    graph.exit("double")
    async with world.engine() as engine:
        assert await (await engine.start(graph)).result() == {"points": 32}


def test_an_attribute_that_is_no_key_is_an_error_that_names_the_keys():
    with pytest.raises(AttributeError, match="the state has no key 'scor'; it has score, text"):
        _ = ks.State(score=1, text="").scor


def test_a_graph_with_its_class_in_brackets_is_the_same():
    graph = ks.Graph[Data]("brackets", schema=Data)
    assert graph.place.file == __file__
    assert graph.schema.cls is Data


# -- validators --------------------------------------------------------------------------------------------------------


class Range(pydantic.BaseModel):
    low: int
    high: int
    name: str = ""

    @pydantic.field_validator("name")
    @classmethod
    def _short(cls, name):
        if len(name) > 5:
            raise ValueError("too long")
        return name.upper()

    @pydantic.model_validator(mode="after")
    def _ordered(self):
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


@dataclass
class Window:
    low: int
    high: int
    name: str = ""

    def __post_init__(self):
        if len(self.name) > 5:
            raise ValueError("too long")
        self.name = self.name.upper()
        if self.low > self.high:
            raise ValueError("low is above high")


VALIDATING = pytest.mark.parametrize("cls", [Range, Window])


@VALIDATING
async def test_validators_run_on_the_first_state_and_on_each_change(world, cls):
    async def shift(state):
        return {"low": state["low"] + 10, "high": state["high"] + 10, "name": "abc"}

    async def wrong(state):
        return {"low": state["high"] + 1}

    async with world.engine() as engine:
        fine = chain("fine", cls, shift)
        assert await (await engine.start(fine, low=1, high=2)).result() == {"low": 11, "high": 12, "name": "ABC"}
        with pytest.raises(ks.DefinitionError, match="low is above high"):
            await engine.start(fine, low=3, high=2)
        with pytest.raises(ks.DefinitionError, match="too long"):
            await engine.start(fine, low=1, high=2, name="a" * 6)
        run = await engine.start(chain("wrong", cls, shift, wrong), low=1, high=2)
        with pytest.raises(ks.ExecutionError, match=r"step 'wrong#1'.*low is above high"):
            await run.result()


@VALIDATING
async def test_validators_run_on_edits_and_results_of_forks(world, cls):
    async def shift(state):
        return {"high": state["high"] + 10}

    async def end(state):
        return None

    graph = chain("edited", cls, shift, end, interrupt_before=["end"])
    async with world.engine() as engine:
        run = await engine.start(graph, low=1, high=2, run_id="r")
        await until_status(run, "waiting")
        for wrong in ({"low": 13}, {"name": "a" * 6}):
            with pytest.raises(ks.DefinitionError, match=r"low is above high|too long"):
                await run.edit(wrong)
            with pytest.raises(ks.DefinitionError, match=r"low is above high|too long"):
                await engine.fork("r", state=wrong)
        with pytest.raises(ks.DefinitionError, match="low is above high"):
            await engine.fork("r", results={"shift": {"high": 0}})
        with pytest.raises(ks.DefinitionError, match=f"'high' cannot be removed; {cls.__name__} requires it"):
            await run.edit(remove=["high"])
        fork = await engine.fork("r", results={"shift": cls(low=5, high=9, name="f")}, run_id="f")
        await until_status(fork, "waiting")
        await fork.resume()
        assert await fork.result() == {"low": 5, "high": 9, "name": "F"}
        await run.edit(cls(low=3, high=4, name="e"))
        await until_status(run, "waiting")
        await run.resume()
        assert await run.result() == {"low": 3, "high": 4, "name": "E"}


async def test_a_required_key_cannot_be_removed_by_a_step(world):
    async def drop(state):
        return state.without("topic")

    async with world.engine() as engine:
        run = await engine.start(chain("drop", Data, drop), topic="x")
        with pytest.raises(ks.ExecutionError, match="'topic' cannot be removed; Data requires it"):
            await run.result()


# -- defaults and idempotent starts -----------------------------------------------------------------------------------


class Named(pydantic.BaseModel):
    topic: str
    round: int = 0
    token: str = pydantic.Field(default_factory=lambda: uuid.uuid4().hex)


async def test_a_default_that_is_made_anew_keeps_a_start_idempotent(world):
    async def same(state):
        return {"round": state["round"] + 1}

    graph = chain("named", Named, same)
    async with world.engine() as engine:
        first = await (await engine.start(graph, topic="x", run_id="r")).result()
        assert await (await engine.start(graph, topic="x", run_id="r")).result() == first
        assert await (await engine.start(graph, Named(topic="x", token=first["token"]), run_id="r")).result() == first
        for other in ({"topic": "y"}, {"topic": "x", "round": 1}, {"topic": "x", "token": "other"}):
            with pytest.raises(ks.RunConflict):
                await engine.start(graph, run_id="r", **other)


# -- reducers in the annotations ---------------------------------------------------------------------------------------


def latest(old: list[dict], new: list[dict]) -> list[dict]:
    """As LangGraph's add_messages: an item of a known id replaces the old one."""
    ids = {one["id"] for one in new}
    return [*(one for one in old if one["id"] not in ids), *new]


class Log(TypedDict):
    log: Annotated[list[str], operator.add]
    best: Annotated[int, max]
    messages: Annotated[list[dict], latest]
    plain: Annotated[NotRequired[str], "a note"]


async def test_reducers_in_the_annotations_combine_the_values_of_steps(world):
    async def one(state):
        return {"log": ["one"], "best": 3, "messages": [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]}

    async def two(state):
        return {"log": ["two"], "best": 2, "messages": [{"id": 1, "text": "c"}]}

    graph = chain("log", Log, one, two)
    async with world.engine() as engine:
        assert await (await engine.start(graph)).result() == {
            "log": ["one", "two"],
            "best": 3,
            "messages": [{"id": 2, "text": "b"}, {"id": 1, "text": "c"}],
        }
        assert (await (await engine.start(graph, log=["zero"])).result())["log"] == ["zero", "one", "two"]
    assert "reducer log add" in graph.definition()


class Sums(pydantic.BaseModel):
    many: Annotated[list[int], operator.add] = []


@dataclass
class SumsData:
    many: Annotated[list[int], operator.add] = field(default_factory=list)


@pytest.mark.parametrize("cls", [Sums, SumsData])
async def test_reducers_in_the_annotations_join_branches(world, cls):
    async def start(state):
        return {"many": [1]}

    async def left(state):
        return {"many": [2]}

    async def right(state):
        return {"many": [3]}

    async def done(state: cls):
        assert state.many == [1, 2, 3]
        return {"many": [4]}

    graph = ks.Graph("sums", schema=cls)
    for function in (start, left, right, done):
        graph.step(function)
    graph.edge("start", "fan")
    graph.parallel("fan", ["left", "right"], join="done")
    graph.entry("start")
    graph.exit("done")
    async with world.engine() as engine:
        run = await engine.start(graph)
        assert await run.result() == {"many": [1, 2, 3, 4]}


@pytest.mark.live_only
async def test_a_reducer_in_the_annotation_stores_only_the_appended_tail(world):
    async def one(state):
        return {"log": [f"line {len(state['log'])}"]}

    graph = ks.Graph("tail", schema=Log)
    graph.step(one)
    graph.edge("one", "one", when=lambda state: len(state["log"]) < 20)
    graph.entry("one")
    graph.exit("one")
    async with world.engine() as engine:
        run = await engine.start(graph)
        await run.result()
        changes = [one.value for one in await run.checkpoints() if one.kind == "step completed"]
        assert msgspec.json.decode(changes[-1]) == {"appended": {"log": ["line 19"]}}


def test_a_given_reducer_wins_over_the_annotation():
    graph = ks.Graph("wins", schema=Log, reducers={"log": "merge"})
    assert graph.reducers["log"] is not operator.add
    assert graph.reducers["best"] is max
