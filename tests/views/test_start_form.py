"""The form of a workflow's input: every kind of parameter, its defaults, and problems that name their field."""

import enum
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, Field

import keepstep as ks
from keepstep.views.start_form import Unfit, arguments_of, command_of, parameters_of, started_by, texts_of


class Size(enum.Enum):
    SMALL = (1, 2)
    LARGE = (3, 4)


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Address:
    city: str
    zip_code: str = "00000"


class Order(BaseModel):
    item: str = Field(description="What is ordered")
    count: int = 1


def every():
    @ks.workflow(name="every")
    async def every(  # noqa: PLR0917 - one of every kind
        text: str,
        number: int,
        share: float = 0.5,
        yes: bool = False,
        mode: Literal["fast", "slow", 3] = "fast",
        colour: Colour = Colour.BLUE,
        size: Size = Size.SMALL,
        day: date | None = None,
        at: datetime | None = None,
        address: Annotated[Address, msgspec.Meta(description="Where it goes")] = Address("Bonn"),  # noqa: B008
        order: Order | None = None,
        names: list[str] = [],  # noqa: B006
        anything: Any = None,
    ) -> None: ...

    return every


REQUIRED = {"text": "a", "number": "7"}


def test_each_type_has_its_kind_of_field():
    found = {one.name: one for one in parameters_of(every())}
    assert {name: one.kind for name, one in found.items()} == {
        "text": "text",
        "number": "integer",
        "share": "number",
        "yes": "boolean",
        "mode": "choice",
        "colour": "choice",
        "size": "choice",
        "day": "date",
        "at": "text",
        "address": "json",
        "order": "json",
        "names": "json",
        "anything": "any",
    }
    assert [one.name for one in found.values() if one.required] == ["text", "number"]
    assert found["share"].default == "0.5"
    assert found["mode"].default == '"fast"'
    assert found["colour"].choices == (('"red"', "RED"), ('"blue"', "BLUE"))
    assert found["colour"].default == '"blue"'
    assert found["size"].default == '"SMALL"'
    assert found["address"].about == "Where it goes"
    assert '"Bonn"' in found["address"].default
    assert found["order"].fields == (("item", "string", "What is ordered"), ("count", "integer, optional", ""))


@pytest.mark.parametrize(
    "texts, expected",
    [
        ({}, {}),
        ({"share": "0.5", "mode": '"fast"'}, {}),
        ({"share": "2"}, {"share": 2.0}),
        ({"number": "123456789012345678901"}, {"number": 123456789012345678901}),
        ({"yes": "true"}, {"yes": True}),
        ({"mode": "3"}, {"mode": 3}),
        ({"colour": '"red"'}, {"colour": Colour.RED}),
        ({"size": '"LARGE"'}, {"size": Size.LARGE}),
        ({"day": "2026-01-31"}, {"day": date(2026, 1, 31)}),
        ({"day": ""}, {}),
        ({"address": '{"city": "Köln"}'}, {"address": Address("Köln")}),
        ({"order": '{"item": "tea"}'}, {"order": Order(item="tea")}),
        ({"names": '["a"]'}, {"names": ["a"]}),
        ({"anything": "plain words"}, {"anything": "plain words"}),
        ({"anything": '{"a": 1}'}, {"anything": {"a": 1}}),
    ],
)
def test_texts_become_values_of_their_types(texts, expected):
    args, kwargs = arguments_of(every(), {**REQUIRED, **texts})
    assert args == []
    assert kwargs == {"text": "a", "number": 7, **expected}


@pytest.mark.parametrize(
    "name, text, problem",
    [
        ("number", "7.5", "it must be a whole number, got '7.5'"),
        ("number", "", "it must be a whole number"),
        ("share", "much", "it must be a number, got 'much'"),
        ("yes", "maybe", "it must be true or false"),
        ("mode", '"other"', "it must be one of fast, slow, 3"),
        ("size", "5", "it must be one of SMALL, LARGE"),
        ("day", "yesterday", "it does not fit date"),
        ("at", "2026", "it does not fit datetime"),
        ("address", "{", "it must be JSON: "),
        ("address", '{"town": "Bonn"}', "missing required field `city`"),
        ("order", '{"count": 2}', "['item'] Field required"),
        ("names", "[1]", "Expected `str`, got `int`"),
        ("names", "[" * 100_000, "nested too deeply"),
        ("other", "1", "no such parameter"),
    ],
)
def test_problem_names_its_field_alone(name, text, problem):
    with pytest.raises(Unfit) as raised:
        arguments_of(every(), {**REQUIRED, name: text})
    assert raised.value.fields.keys() == {name}
    assert problem in raised.value.fields[name]


def test_all_problems_are_told_at_once():
    with pytest.raises(Unfit) as raised:
        started_by(every(), {"number": "x"}, {"priority": "high", "tags": "team", "delay": "-1", "queue": "1"})
    assert raised.value.fields.keys() == {"text", "number", "priority", "tags", "delay", "queue"}


def test_parameters_by_place_reach_the_workflow():
    @ks.workflow(name="places")
    async def places(first: int, /, second: int = 2, *rest: int, **more: str) -> None: ...

    assert arguments_of(places, {"first": "1"}) == ([1], {})
    assert arguments_of(places, {"first": "1", "second": "5"}) == ([1], {"second": 5})
    assert arguments_of(places, {"first": "1", "rest": "[8, 9]"}) == ([1, 2, 8, 9], {})
    assert arguments_of(places, {"first": "1", "more": '{"a": "b"}'}) == ([1], {"a": "b"})


def test_graph_takes_the_keys_of_its_schema():
    class State(TypedDict, total=False):
        topic: str
        count: int

    graph = ks.Graph("drafts", schema=State)

    @graph.step
    async def draft(state):
        return {"count": 1}

    graph.entry("draft")
    graph.exit("draft")
    assert [(one.name, one.kind, one.required) for one in parameters_of(graph)] == [
        ("topic", "text", False),
        ("count", "integer", False),
    ]
    assert arguments_of(graph, {"topic": "tea", "count": ""}) == ([], {"topic": "tea"})


def test_earlier_arguments_fill_the_form_again():
    texts = texts_of(every(), ["a"], {"number": 7, "yes": True, "colour": "red", "names": ["x"]})
    assert texts["text"] == "a"
    assert arguments_of(every(), texts)[1] == {
        "text": "a",
        "number": 7,
        "yes": True,
        "colour": Colour.RED,
        "names": ["x"],
    }


def test_command_line_starts_the_same_run():
    _, _, options = started_by(
        every(), REQUIRED, {"run_id": "o-1", "tags": "team=a b", "priority": "3", "delay": "1.5"}
    )
    line = command_of(every(), {**REQUIRED, "share": "0.5"}, options)
    assert line.startswith("keepstep start ")
    assert "--id o-1" in line
    assert "--tag 'team=a b'" in line
    assert "--delay 1.5" in line
    assert """--input '{"text": "a", "number": 7}'""" in line
