# ruff: noqa: DTZ001 - naive datetimes are stored too
"""What the codec stores and how, what it refuses, and what it says then."""

from __future__ import annotations

import collections
import copy
import decimal
import enum
import json
import math
import pickle
import re
import subprocess
import sys
import textwrap
import typing
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import cached_property
from ipaddress import ip_address, ip_network
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest

from keepstep.errors import DefinitionError, DuplicateName, NotSerializable
from keepstep.values import DEFAULTS, MAX_DEPTH, VALUES, Redactor, Secret, Values, register, set_secret_resolver

BERLIN = ZoneInfo("Europe/Berlin")


class Colour(enum.Enum):
    RED = 1
    GREEN = (2, "g")
    ROUGE = 1  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.StrEnum):
    FAST = "fast"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    name: str
    at: Point | None = None
    tags: tuple[str, ...] = ()


@dataclass
class Counter:
    start: InitVar[int]
    count: int = field(init=False)
    never: int = field(init=False)
    made: int = 0

    def __post_init__(self, start: int) -> None:
        self.count = start
        self.made += 1


class Pair(NamedTuple):
    left: int
    right: Colour = Colour.RED


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    a: int
    b: list[Point] = []
    c: int | msgspec.UnsetType = msgspec.UNSET


class Growing(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        self.n += 1


class Address(pydantic.BaseModel):
    city: str


class User(pydantic.BaseModel):
    name: str
    age: int = 3
    address: Address | None = None
    level: Level = Level.LOW
    home: pydantic.HttpUrl | None = None
    _visits: int = pydantic.PrivateAttr(default=0)


class Open(pydantic.BaseModel, extra="allow"):
    a: int


class Shouting(pydantic.BaseModel):
    text: str

    @pydantic.field_validator("text")
    @classmethod
    def louder(cls, text: str) -> str:
        return text + "!"


class Row(TypedDict):
    user: User
    note: typing.NotRequired[Pair]


T = TypeVar("T")


@dataclass
class Box(Generic[T]):
    item: T


@dataclass
class PointBox(Box[Point]):
    pass


@dataclass
class Node:
    value: Colour
    next: Node | None = None


class Plain:
    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return type(other) is Plain and other.n == self.n

    def __hash__(self) -> int:
        return self.n


EVERYTHING = Values(
    [Colour, Level, Mode, Right, Point, Sealed, Counter, Pair, Struct, Growing, Address, User, Open, Box, Node]
)


def there_and_back(value: Any, codec: Values = EVERYTHING) -> Any:
    back = codec.decode(codec.encode(value))
    assert type(back) is type(value)
    return back


# -- what is stored, and how it looks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (2**64, "18446744073709551616"),
        (-(10**40), "-1" + "0" * 40),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        ("ä\n", '"ä\\n"'),
        ([1, "a", None], '[1,"a",null]'),
        ({"b": 1, "a": [2.5]}, '{"b":1,"a":[2.5]}'),
        (math.inf, '{"$":"float","v":"inf"}'),
        ((1, (2,)), '{"$":"tuple","v":[1,{"$":"tuple","v":[2]}]}'),
        ({3, 1, 2}, '{"$":"set","v":[1,2,3]}'),
        (frozenset({"b", "a"}), '{"$":"frozenset","v":["a","b"]}'),
        (b"\x00\xff", '{"$":"bytes","v":"AP8="}'),
        (bytearray(b"a"), '{"$":"bytearray","v":"YQ=="}'),
        ({1: "a", None: 2}, '{"$":"dict","v":[[1,"a"],[null,2]]}'),
        ({"$": "tuple", "v": [1]}, '{"$":"dict","v":[["$","tuple"],["v",[1]]]}'),
        ("\ud800a\\", '{"$":"str","v":"\\\\ud800a\\\\\\\\"}'),
        ({"\udfff": 1}, '{"$":"dict","v":[[{"$":"str","v":"\\\\udfff"},1]]}'),
        (date(2026, 1, 2), '{"$":"date","v":"2026-01-02"}'),
        (datetime(2026, 1, 2, 3, 4, 5, 6), '{"$":"datetime","v":"2026-01-02T03:04:05.000006"}'),
        (datetime(2026, 1, 2, tzinfo=UTC), '{"$":"datetime","v":"2026-01-02T00:00:00+00:00"}'),
        (
            datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
            '{"$":"datetime","v":{"at":"2026-10-25T02:30:00","zone":"Europe/Berlin","fold":1}}',
        ),
        (time(1, 2, tzinfo=timezone(timedelta(hours=-5))), '{"$":"time","v":"01:02:00-05:00"}'),
        (timedelta(days=-1, microseconds=3), '{"$":"timedelta","v":[-1,0,3]}'),
        (Decimal("-0E+5"), '{"$":"decimal","v":"-0E+5"}'),
        (UUID(int=5), '{"$":"uuid","v":"00000000-0000-0000-0000-000000000005"}'),
        (complex(1, -0.0), '{"$":"complex","v":[1.0,-0.0]}'),
        (range(1, 10, 3), '{"$":"range","v":[1,10,3]}'),
        (Path("/a/b"), '{"$":"path","v":"/a/b"}'),
        (PurePosixPath("a"), '{"$":"posixpath","v":"a"}'),
        (PureWindowsPath("C:\\a"), '{"$":"windowspath","v":"C:\\\\a"}'),
        (ip_address("::1"), '{"$":"ipv6address","v":"::1"}'),
        (ip_network("10.0.0.0/8"), '{"$":"ipv4network","v":"10.0.0.0/8"}'),
        (Secret("KEY"), '{"$":"secret","v":"KEY"}'),
        (Colour.ROUGE, '{"$":"Colour","v":"RED"}'),
        (Level.HIGH, '{"$":"Level","v":"HIGH"}'),
        (Mode.FAST, '{"$":"Mode","v":"FAST"}'),
        (Right.READ | Right.WRITE, '{"$":"Right","v":3}'),
        (Point(1), '{"$":"Point","v":{"x":1,"y":0}}'),
        (Sealed(name="a", at=Point(1, 2)), None),
        (Pair(1, Colour.GREEN), '{"$":"Pair","v":{"left":1,"right":{"$":"Colour","v":"GREEN"}}}'),
        (Struct(a=1, b=[Point(2)]), None),
        (User(name="a", address=Address(city="b"), home="https://a.b/c"), None),
        (Address(city="b"), '{"$":"Address","v":{"city":"b"}}'),
        (User(name="a"), None),
        (Box([Colour.RED]), None),
        (Node(Colour.RED, Node(Colour.GREEN)), None),
    ],
)
def test_a_value_comes_back_as_it_was_and_reads_well(value, text):
    data = EVERYTHING.encode(value)
    json.loads(data)
    if text is not None:
        assert data.decode() == text
    assert there_and_back(value) == value
    assert EVERYTHING.copy(value) == value


def test_details_that_equality_ignores_come_back_too():
    assert math.isnan(there_and_back(math.nan))
    assert str(there_and_back([1.5, math.nan, math.inf])) == "[1.5, nan, inf]"
    for offset in (timedelta(microseconds=1), timedelta(hours=-5, microseconds=-1)):
        assert there_and_back(datetime(2026, 1, 1, tzinfo=timezone(offset))).utcoffset() == offset
        assert there_and_back(time(1, tzinfo=timezone(offset, "x"))).tzinfo == timezone(offset, "x")
    assert math.copysign(1, there_and_back(-0.0)) == -1
    assert str(there_and_back(Decimal("sNaN12"))) == "sNaN12"
    assert str(there_and_back(Decimal("1.00"))) == "1.00"
    assert list(there_and_back({"b": 1, "a": 2})) == ["b", "a"]
    assert list(there_and_back({2: 1, 1: 2})) == [2, 1]
    assert there_and_back(datetime(2026, 1, 1, tzinfo=BERLIN)).tzinfo is BERLIN
    assert there_and_back(datetime(2026, 1, 1, tzinfo=UTC)).tzinfo is UTC
    assert there_and_back(datetime(2026, 1, 1, fold=1)).fold == 1
    assert there_and_back(time(1, fold=1, tzinfo=BERLIN)).fold == 1
    named = timezone(timedelta(hours=1, seconds=1), "home")
    assert there_and_back(datetime(2026, 1, 1, tzinfo=named)).tzname() == "home"
    assert there_and_back(time(1, tzinfo=named)).tzname() == "home"
    assert there_and_back(time(1, tzinfo=named)).utcoffset() == timedelta(hours=1, seconds=1)


@pytest.mark.parametrize("digits", [600, 617, 640, 641, 4300, 4301, 5000])
@pytest.mark.parametrize("limit", [640, 4300, 0])
def test_an_integer_of_any_length_comes_back(digits, limit):
    number = -(10**digits) + 1
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    try:
        assert VALUES.copy([number]) == [number]
        data = VALUES.encode({"n": [number]})
        assert VALUES.decode(data) == {"n": [number]}
        assert VALUES.digest([number]) != VALUES.digest([number + 1])
        digests = VALUES.digest([number]), VALUES.digest_call((), {"n": number})
    finally:
        sys.set_int_max_str_digits(before)
    again = VALUES.digest([number]), VALUES.digest_call((), {"n": number})
    assert again == digests
    assert VALUES.decode(data) == {"n": [number]}  # what one process wrote, any other can read


def test_a_dataclass_is_restored_without_running_its_init():
    counter = Counter(5)
    counter.made = 7
    back = there_and_back(counter)
    assert (back.count, back.made) == (5, 7)
    assert not hasattr(back, "never")


def test_a_struct_is_restored_as_it_was_whatever_its_post_init_does():
    assert there_and_back(Growing(1)).n == 2


def test_a_pydantic_model_is_restored_exactly():
    user = User(name="a", level=Level.LOW)
    user._visits = 4
    back = there_and_back(user)
    assert back == user
    assert back.model_fields_set == {"name", "level"}
    assert back._visits == 4
    assert type(back.level) is Level
    invalid = User.model_construct(name=5)  # never validated: comes back the same
    assert there_and_back(invalid).name == 5
    assert there_and_back(Open(a=1, z=[2])).model_extra == {"z": [2]}
    assert there_and_back(Open(a=1)).model_extra == {}
    assert there_and_back(Shouting(text="a"), Values([Shouting])).text == "a!"
    assert there_and_back(Address(city="b")).__pydantic_private__ is None
    half = User.model_construct(age=1, _fields_set={"name", "zzz"})  # what was never set is not there afterwards
    del half._visits
    back = there_and_back(half)
    assert back.__dict__ == half.__dict__
    assert "name" not in back.__dict__
    assert back.model_fields_set == {"name", "zzz"}
    assert not hasattr(back, "_visits")


class Names(pydantic.RootModel[list[Colour]]):
    pass


class Counted(pydantic.RootModel[dict[str, int]]):
    _visits: int = pydantic.PrivateAttr(default=0)


def test_a_root_model_is_restored_exactly_and_can_be_stored_again():
    names, counted = Names([Colour.RED]), Counted({"a": 1})
    counted._visits = 4
    codec = Values([Names, Counted, Colour])
    for model in (names, counted):
        back = codec.decode(codec.encode(model))
        assert back == model
        assert back.__dict__ == model.__dict__
        assert codec.encode(back) == codec.encode(model)
    assert codec.decode(codec.encode(counted))._visits == 4


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]

    @pydantic.computed_field
    @cached_property
    def size(self) -> int:
        return len(self.items)


@pydantic.dataclasses.dataclass
class Checked:
    point: Point
    many: list[int] = pydantic.Field(default_factory=list)


@pytest.mark.parametrize(
    "annotation, value",
    [
        (Names, Names([Colour.RED])),
        (Page[Address], Page[Address](items=[Address(city="a")])),
        (Page[Colour] | None, Page[Colour](items=[Colour.RED])),
        (Checked, Checked(Point(1), [2])),
    ],
)
def test_other_shapes_of_pydantic_come_back(annotation, value):
    codec = VALUES.for_annotation(annotation)
    assert there_and_back(value, codec) == value
    if isinstance(value, Page):
        assert value.size == 1
        assert there_and_back(value, codec).size == 1


def test_a_restored_pydantic_model_works_like_any_other():
    back = there_and_back(Open(a=1, z=2))
    back.y = 3
    assert back.model_dump() == {"a": 1, "z": 2, "y": 3}
    user = there_and_back(User(name="a"))
    user._visits += 1
    assert user.model_copy(update={"name": "b"}).name == "b"


# -- digests -----------------------------------------------------------------------------------------------------------


def test_digests_are_equal_for_equal_values():
    assert re.fullmatch("[0-9a-f]{32}", VALUES.digest(None))
    assert VALUES.digest({"a": 1, "b": {"c": 2, "d": 3}}) == VALUES.digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert VALUES.digest({1: 2, (3,): 4}) == VALUES.digest({(3,): 4, 1: 2})
    assert VALUES.digest({1: 2, 3: 4}) == VALUES.digest({3: 4, 1: 2})
    words = [str(n) for n in range(50)]
    assert VALUES.digest(set(words)) == VALUES.digest({*reversed(words)})
    assert VALUES.digest({"\ud800": 1, "a": 2}) == VALUES.digest({"a": 2, "\ud800": 1})


def test_digests_distinguish_types():
    values = [1, True, 1.0, "1", b"1", None, "null", [1], (1,), {1}, frozenset({1}), {"1": 1}, {1: 1}, Decimal(1)]
    values += [complex(1), [], {}, "", (), "\\ud800", "\ud800", {"$": "tuple", "v": [1]}, math.nan, "nan", 0.0, -0.0]
    values += [Secret("a"), "a", bytearray(b"1"), datetime(2026, 1, 1), date(2026, 1, 1), 10**5000, hex(10**5000)]
    digests = [VALUES.digest(value) for value in values]
    assert len(set(digests)) == len(values)


def test_digests_do_not_change_between_versions():
    """They are stored with every step: a change here makes every recorded run a mismatch."""
    assert VALUES.digest({"b": (1, 2.5), "a": {3, 4}}) == "5f30c289ad369bae61dcf097facfc178"
    assert VALUES.digest_call((1, "a"), {"k": [None]}) == "6fd9b17c179e52a00b6e1cdd199d28db"


def test_digest_of_a_call_depends_on_its_arguments_only():
    digest = VALUES.digest_call
    assert digest((1,), {"b": 1, "a": 2}) == digest((1,), {"a": 2, "b": 1})
    calls = [
        ((1, 2), {}),
        ((1,), {"b": 2}),
        (([1, 2],), {}),
        ((True, 2), {}),
        ((), {}),
        (((1, 2),), {}),
        ((math.nan,), {}),
    ]
    assert len({digest(*call) for call in calls}) == len(calls)
    assert digest((10**5000,), {"a": "\ud800"}) == digest((10**5000,), {"a": "\ud800"})
    assert digest((10**5000,), {}) != digest((hex(10**5000),), {})


@pytest.mark.parametrize("call", [VALUES.digest_call, VALUES.copy_call])
def test_a_bad_argument_is_named(call):
    with pytest.raises(NotSerializable, match=r"^step 'f#1': argument 'url'\['x'\] is an object"):
        call((1, {"x": object()}), {}, "step 'f#1'", ("n", "url"))
    with pytest.raises(NotSerializable, match=r"^argument 1 is an object"):
        call((object(),), {})
    with pytest.raises(NotSerializable, match=r"argument 'key'\[0\] is an object"):
        call((), {"key": [object()]}, "step")


def test_argument_whose_name_is_not_text_is_refused():
    with pytest.raises(NotSerializable):
        VALUES.digest_call((), {"\ud800": 1})


# -- nothing is shared -------------------------------------------------------------------------------------------------


def test_copies_share_nothing_that_can_change():
    value = {"a": [1, {"b": 2}], "c": (1, [2])}
    copy = VALUES.copy(value)
    assert copy == value
    value["a"][1]["b"] = 3
    value["c"][1].append(4)
    assert copy == {"a": [1, {"b": 2}], "c": (1, [2])}
    args, kwargs = ([1], (2, [3])), {"k": {"a": 1}}
    copied_args, copied_kwargs = VALUES.copy_call(args, kwargs)
    args[0].append(9)
    args[1][1].append(9)
    kwargs["k"]["a"] = 9
    kwargs["new"] = 9
    assert (copied_args, copied_kwargs) == (([1], (2, [3])), {"k": {"a": 1}})
    flat = {"k": 1}
    _, copied = VALUES.copy_call((1,), flat)
    assert copied == flat
    assert copied is not flat


def test_immutable_value_is_not_copied():
    text = "a" * 100
    assert VALUES.copy(text) is text
    args = (text, 1, None, 2.5, b"x")
    assert VALUES.copy(args) is args
    assert VALUES.copy_call(args, {})[0] is args


# -- refusals ----------------------------------------------------------------------------------------------------------


class Zone(tzinfo):
    def utcoffset(self, when):
        return timedelta(0)

    def dst(self, when):
        return timedelta(0)


class Text(str):
    __slots__ = ()


@dataclass
class DictRecord(dict):
    x: int = 0


async def forgotten() -> None: ...


@pytest.mark.parametrize(
    "value, why",
    [
        (object(), "is an object, which cannot be stored"),
        (lambda: 1, "is a function"),
        (open, "is a builtin_function"),
        (int, "is a type"),
        (sys, "is a module"),
        (ValueError("x"), "is a ValueError"),
        (iter([]), "is a list_iterator"),
        (memoryview(b"a"), "is a memoryview"),
        (re.compile("a"), "is a re.Pattern"),
        (collections.OrderedDict(), r"is a collections.OrderedDict, a subclass of dict .*dict\(\.\.\.\)"),
        (collections.defaultdict(int), "subclass of dict"),
        (collections.Counter(), "subclass of dict"),
        (collections.deque(), "is a collections.deque"),
        (Text("a"), "subclass of str"),
        (Level.LOW, r"is a .*Level, which is not known here; annotate it, or ks.register\(Level\)"),
        (Point(1), "which is not known here"),
        (Pair(1), "which is not known here"),
        (Struct(a=1), "which is not known here"),
        (User(name="a"), "which is not known here"),
        (DictRecord(), "subclass of dict"),
        (datetime(2026, 1, 1, tzinfo=Zone()), "has a time zone of type .*Zone"),
        (pydantic.SecretStr("a"), "use ks.Secret"),
        (msgspec.Raw(b"1"), "is a msgspec.Raw"),
    ],
)
def test_value_that_would_not_come_back_is_refused(value, why):
    for shape, path in ((value, ""), ({"pages": [1, value]}, r"\['pages'\]\[1\]"), ((1, {2: value}), r"\[1\]\[2\]")):
        for act in (VALUES.encode, VALUES.digest, VALUES.copy):
            with pytest.raises(NotSerializable, match=rf"^step 'a#1': result{path} .*{why}"):
                act(shape, "step 'a#1': result")


def test_numpy_scalars_are_refused():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(NotSerializable, match=r"numpy.float64, a subclass of float .*float\(\.\.\.\)"):
        VALUES.encode([numpy.float64(1)])
    with pytest.raises(NotSerializable):
        VALUES.encode(numpy.arange(3))


def test_a_forgotten_await_is_recognised():
    coroutine = forgotten()
    with pytest.raises(NotSerializable, match="was an await forgotten"):
        VALUES.encode(coroutine)
    coroutine.close()


def test_the_path_goes_through_records():
    with pytest.raises(NotSerializable, match=r"^result\[0\]\.at\.x is an object"):
        EVERYTHING.encode([Sealed(name="a", at=Point(object()))], "result")  # type: ignore[arg-type]
    with pytest.raises(NotSerializable, match=r"^value\['k'\]\[\(1, 2\)\] is an object"):
        VALUES.encode({"k": {(1, 2): object()}})


@dataclass
class Cached:
    x: int

    @cached_property
    def double(self) -> int:
        return self.x * 2


class Slotted:
    __slots__ = ("hidden",)


@dataclass
class OnSlots(Slotted):
    x: int = 0


class CachedModel(pydantic.BaseModel):
    x: int

    @cached_property
    def double(self) -> int:
        return self.x * 2


class FatPair(Pair):
    pass


def test_attribute_beside_the_fields_is_refused():
    codec = Values([Cached, OnSlots, FatPair, Point, CachedModel])
    point = Point(1)
    point.z = 3  # type: ignore[attr-defined]
    slotted = OnSlots()
    slotted.hidden = 1
    fat = FatPair(1)
    fat.extra = 1
    for value, name in ((point, "z"), (slotted, "hidden"), (fat, "extra")):
        with pytest.raises(NotSerializable, match=rf"with the attribute '{name}', which is not one of its fields"):
            codec.encode(value)
    for value in (OnSlots(), FatPair(1)):
        assert there_and_back(value, codec) == value
    for cached in (Cached(2), CachedModel(x=2)):
        assert cached.double == 4
        assert there_and_back(cached, codec).double == 4


def test_an_object_that_lacks_a_field_is_refused():
    point = Point(1)
    del point.x
    with pytest.raises(NotSerializable, match="lacks its field 'x'"):
        EVERYTHING.encode(point)
    short = tuple.__new__(Pair, (1,))
    with pytest.raises(NotSerializable, match="could not be taken apart"):
        EVERYTHING.encode(short)


def test_key_that_is_too_long_to_show_is_abbreviated():
    with pytest.raises(NotSerializable, match=r"^value\[a int\] is an object"):
        VALUES.encode({10**5000: object()})
    with pytest.raises(NotSerializable, match=r"^value\['x{59}\.\.\.\] is an object"):
        VALUES.encode({"x" * 1000: object()})


def test_values_that_contain_themselves_are_refused():
    loop: list[Any] = []
    loop.append(loop)
    table: dict[Any, Any] = {}
    table[1] = table
    knot: dict[str, Any] = {"a": ()}
    knot["a"] = (knot, knot)
    node = Node(Colour.RED)
    node.next = node
    for value in (loop, table, knot, node):
        with pytest.raises(NotSerializable, match="contains itself"):
            EVERYTHING.encode(value)
        with pytest.raises(NotSerializable, match="contains itself"):
            EVERYTHING.digest(value)


WRAPPERS = {
    "list": lambda inner: [inner],
    "dict": lambda inner: {"a": inner},
    "tuple": lambda inner: (inner,),
    "pairs": lambda inner: {1: inner},
    "frozenset": lambda inner: frozenset({inner}),
    "record": Box,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_deep_value_is_stored_and_one_too_deep_is_refused(wrap):
    value: Any = 1
    for _ in range(MAX_DEPTH + 1):
        value = wrap(value)
    assert EVERYTHING.encode(EVERYTHING.decode(EVERYTHING.encode(value))) == EVERYTHING.encode(value)
    assert EVERYTHING.digest(value)
    with pytest.raises(NotSerializable, match="nested more than"):
        EVERYTHING.encode(wrap(value))


def test_nearly_full_stack_is_a_refusal():
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = (value,)
    data = VALUES.encode(value)

    def deeper(act):
        try:
            return deeper(act)
        except RecursionError:
            with pytest.raises(NotSerializable, match="too deeply"):
                act()
            raise

    for act in (lambda: VALUES.encode(value), lambda: VALUES.digest(value), lambda: VALUES.decode(data)):
        with pytest.raises((RecursionError, pytest.fail.Exception)):
            deeper(act)


# -- hostile text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "nope",
        "1 2",
        "NaN",
        "[Infinity]",
        "1e999",
        '"\\ud800"',
        "1" * 5000,
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"$":"tuple","v":' * 400 + "[]" + "}" * 400,
        '{"a":1,"a":2}',
        '[{"a":{"b":1,"b":1}}]',
        '{"$":"tuple","$":"set","v":[]}',
        '{"$":"tuple"}',
        '{"$":"tuple","v":[],"w":1}',
        '{"$":"tuple","w":[]}',
        '{"$":"tuple","v":[],"more":{}}',
        '{"$":"tuple","v":{}}',
        '{"$":"tuple","v":"ab"}',
        '{"$":["tuple"],"v":[]}',
        '{"$":null,"v":[]}',
        '{"$":"os.system","v":"true"}',
        '{"$":"builtins.eval","v":"1"}',
        '{"$":"Unknown","v":{}}',
        '{"$":"set","v":[1,1]}',
        '{"$":"set","v":[1,true]}',
        '{"$":"set","v":[[1]]}',
        '{"$":"dict","v":[[1]]}',
        '{"$":"dict","v":[1]}',
        '{"$":"dict","v":["ab"]}',
        '{"$":"dict","v":[[1,2],[1,3]]}',
        '{"$":"dict","v":[[[],2]]}',
        '{"$":"float","v":"1"}',
        '{"$":"float","v":1.5}',
        '{"$":"int","v":5}',
        '{"$":"int","v":"zz"}',
        '{"$":"str","v":"\\\\x"}',
        '{"$":"str","v":"ä"}',
        '{"$":"str","v":"\\\\u0061"}',
        '{"$":"bytes","v":"?"}',
        '{"$":"bytes","v":"AP8=AP8="}',
        '{"$":"datetime","v":"yesterday"}',
        '{"$":"datetime","v":"2026-01-01"}',
        '{"$":"datetime","v":{"at":"2026-01-01T00:00:00","zone":"../../etc/passwd"}}',
        '{"$":"datetime","v":{"at":"2026-01-01T00:00:00","zone":"/etc/passwd"}}',
        '{"$":"datetime","v":{"at":"2026-01-01T00:00:00","zone":"Europe"}}',
        '{"$":"datetime","v":{"at":"2026-01-01T00:00:00","zone":"Mars/Olympus"}}',
        '{"$":"datetime","v":{"at":"2026-01-01T00:00:00","name":"x"}}',
        '{"$":"datetime","v":{"at":"2026-01-01T00:00:00","fold":2}}',
        '{"$":"datetime","v":{"at":"2026-01-01T00:00:00","fold":true}}',
        '{"$":"datetime","v":{"at":"2026-01-01T00:00:00","other":2}}',
        '{"$":"datetime","v":{"zone":"UTC"}}',
        '{"$":"date","v":20260101}',
        '{"$":"timedelta","v":[1,2]}',
        '{"$":"timedelta","v":[999999999999,0,0]}',
        '{"$":"timedelta","v":[1.5,0,0]}',
        '{"$":"decimal","v":"x"}',
        '{"$":"decimal","v":"1E+99999999999999999999"}',
        '{"$":"decimal","v":1}',
        '{"$":"uuid","v":"x"}',
        '{"$":"complex","v":[1.0]}',
        '{"$":"range","v":[1,2,0]}',
        '{"$":"path","v":1}',
        '{"$":"ipv4address","v":"1.2.3"}',
        '{"$":"secret","v":""}',
        '{"$":"secret","v":5}',
        '{"$":"unset","v":5}',
        '{"$":"Colour","v":"BLUE"}',
        '{"$":"Colour","v":1}',
        '{"$":"Right","v":64}',
        '{"$":"Right","v":"READ"}',
        '{"$":"Point","v":[1]}',
        '{"$":"Point","v":{"y":1}}',
        '{"$":"Point","v":{"x":1,"z":1}}',
        '{"$":"Point","v":{"x":1,"__class__":1}}',
        '{"$":"Pair","v":{}}',
        '{"$":"Pair","v":{"left":1,"middle":2}}',
        '{"$":"Struct","v":{}}',
        '{"$":"Struct","v":{"a":1,"z":1}}',
        '{"$":"User","v":{}}',
        '{"$":"User","v":{"name":"a","z":1}}',
        '{"$":"User","v":{"name":"a"},"more":{"extra":{"z":1}}}',
        '{"$":"User","v":{"name":"a"},"more":{"private":{"z":1}}}',
        '{"$":"User","v":{"name":"a"},"more":{"private":[]}}',
        '{"$":"User","v":{"name":"a"},"more":{"unset":[[]]}}',
        '{"$":"User","v":{"name":"a"},"more":{"other":1}}',
        '{"$":"User","v":{"name":"a"},"more":[]}',
    ],
    ids=lambda text: text[:60],
)
def test_text_that_was_never_written_is_a_clear_error(text):
    for shape in (text, f'{{"k":[{text}]}}'):
        with pytest.raises(NotSerializable, match=r"^the place"):
            EVERYTHING.decode(shape.encode(), "the place")


@pytest.mark.parametrize("data", [b"", b"\xff", b'"\xed\xa0\x80"', None, 5])
def test_bytes_that_are_no_text_are_a_clear_error(data):
    with pytest.raises(NotSerializable):
        VALUES.decode(data)


def test_depth_that_is_read_does_not_depend_on_the_stack():
    for levels, start, end in ((200, '{"$":"tuple","v":[', "]}"), (320, '{"$":"path","v":', "}")):
        with pytest.raises(NotSerializable, match=r"is nested too deeply$"):
            VALUES.decode((start * levels + "1" + end * levels).encode())


def test_a_zone_is_looked_for_only_among_zones():
    for name in ("../UTC", "/etc/localtime", "os.path/UTC", "", "a//b"):
        with pytest.raises(NotSerializable, match="is not the name of a time zone"):
            VALUES.decode(json.dumps({"$": "time", "v": {"at": "01:00:00", "zone": name}}).encode())


def test_a_context_without_traps_makes_no_number_of_a_word():
    with decimal.localcontext() as context:
        context.traps[decimal.InvalidOperation] = False
        with pytest.raises(NotSerializable, match="'word' is not a decimal number"):
            VALUES.decode(b'{"$":"decimal","v":"word"}')


def test_text_that_someone_wrote_by_hand_is_read():
    assert VALUES.decode(b' { "a" : 1.50, "b": "\\u0041" } ') == {"a": 1.5, "b": "A"}
    assert VALUES.decode(b'{"\\u0024": "tuple", "v": [1]}') == (1,)
    assert EVERYTHING.decode(b'{"v": {"y": 2, "x": 1}, "$": "Point"}') == Point(1, 2)


def test_an_unknown_tag_says_what_to_do():
    data = Values([Point]).encode({"a": [Point(1)]})
    with pytest.raises(NotSerializable, match=r"^result\['a'\]\[0\] was stored as 'Point', .*annotate.*ks.register"):
        VALUES.decode(data, "result")


def test_a_class_that_has_changed_says_how():
    for text, why in (
        (b'{"$":"Point","v":{"x":1,"z":2}}', "Point has no field 'z' any more"),
        (b'{"$":"Point","v":{"y":1}}', "Point now requires 'x', which was not stored"),
        (b'{"$":"User","v":{"age":1}}', "User now requires 'name', which was not stored"),
        (b'{"$":"User","v":{"name":"a","nick":"b"}}', "User has no field 'nick' any more"),
        (b'{"$":"Colour","v":"BLUE"}', "Colour has no member 'BLUE'"),
    ):
        with pytest.raises(NotSerializable, match=why):
            EVERYTHING.decode(text)


def test_a_field_that_is_new_gets_its_default():
    assert EVERYTHING.decode(b'{"$":"Point","v":{"x":1}}') == Point(1)
    assert EVERYTHING.decode(b'{"$":"Pair","v":{"left":1}}') == Pair(1)
    user = EVERYTHING.decode(b'{"$":"User","v":{"name":"a"}}')
    assert (user, user.model_fields_set, user._visits) == (User(name="a"), {"name"}, 0)
    assert EVERYTHING.decode(b'{"$":"Struct","v":{"a":1}}') == Struct(a=1)


def test_reading_runs_nothing_and_imports_nothing():
    code = """
        import sys
        from keepstep.values import VALUES
        from keepstep.errors import NotSerializable
        assert not {"pydantic", "zoneinfo", "pickle", "yaml"} & set(sys.modules), "imported for nothing"
        before = set(sys.modules)
        for tag in ("antigravity", "this", "os.system", "keepstep.errors.Permanent", "wave.Error"):
            try:
                VALUES.decode(b'{"$":"%s","v":{}}' % tag.encode())
            except NotSerializable:
                continue
            raise SystemExit(tag)
        assert {"json"} >= {name for name in set(sys.modules) - before if "." not in name}
    """
    run_python(code)


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env={"PYTHONPATH": str(SOURCE)})


SOURCE = Path(__file__).parent.parent / "src"


# -- known types -------------------------------------------------------------------------------------------------------


def test_registered_types_come_back():
    codec = Values()
    assert codec.register(Plain, to=lambda plain: {"n": (plain.n,)}, back=lambda stored: Plain(stored["n"][0])) is Plain
    assert codec.encode(Plain(3)) == b'{"$":"Plain","v":{"n":{"$":"tuple","v":[3]}}}'
    assert codec.decode(codec.encode({Plain(3): [Plain(4)]})) == {Plain(3): [Plain(4)]}
    child = Values(parent=codec)
    assert child.decode(child.encode(Plain(1))) == Plain(1)
    codec.register(Point)  # a child sees what its parent learns later
    assert child.decode(child.encode(Point(1))) == Point(1)
    with pytest.raises(NotSerializable):
        VALUES.encode(Plain(3))


def test_registered_subclass_of_a_builtin_type_comes_back():
    codec = Values()
    codec.register(collections.OrderedDict, to=lambda od: list(od.items()), back=collections.OrderedDict)
    value = collections.OrderedDict([("b", 1), (2, 3)])
    assert there_and_back(value, codec) == value


def test_registration_that_cannot_work_is_refused():
    codec = Values([Point])

    class Other:
        pass

    with pytest.raises(DefinitionError, match=r"register\(.*Other, to=\.\.\., back=\.\.\.\)"):
        codec.register(Other)
    with pytest.raises(DefinitionError, match="both"):
        codec.register(Other, to=str)
    with pytest.raises(DefinitionError, match="stored as it is"):
        codec.register(list, to=list, back=list)
    with pytest.raises(DefinitionError, match="takes a class"):
        codec.register(Point(1))  # type: ignore[type-var]
    for name in ("tuple", "secret"):
        with pytest.raises(DuplicateName, match="reserved"):
            codec.register(Address, name)
    with pytest.raises(DuplicateName, match=r"Point.*Address.*are called 'Point'"):
        codec.register(Address, "Point")
    with pytest.raises(DuplicateName):
        Values(parent=codec).register(Address, "Point")
    assert codec.register(Point) is Point  # twice is once
    with pytest.raises(DefinitionError):
        Values().register(DictRecord)


def test_a_registered_class_brings_what_its_fields_need():
    codec = Values([User])
    value = User(name="a", address=Address(city="b"), level=Level.HIGH, home="https://a.b")
    assert there_and_back(value, codec) == value
    codec.register(Address, "Place")  # a name given by hand wins, whenever it is given
    assert b'"$":"Place"' in codec.encode(value)
    assert there_and_back(value, codec) == value
    assert codec.decode(b'{"$":"Address","v":{"city":"b"}}') == Address(city="b")


def test_class_defined_again_at_the_prompt_replaces_the_old_one():
    code = """
        import dataclasses
        from keepstep.values import VALUES, register
        for n in range(2):
            @register
            @dataclasses.dataclass
            class Inner:
                n: int
            @register
            @dataclasses.dataclass
            class Outer:
                inner: Inner
            assert VALUES.copy([Outer(Inner(n))]) == [Outer(Inner(n))]
    """
    run_python(code)


def test_a_class_that_was_renamed_is_read_under_both_names():
    codec = Values([Point])
    codec.register(Point, "Dot")
    assert codec.decode(b'{"$":"Dot","v":{"x":1}}') == codec.decode(b'{"$":"Point","v":{"x":1}}') == Point(1)
    assert codec.encode(Point(1)).startswith(b'{"$":"Point"')


def test_a_conversion_that_fails_is_a_refusal():
    codec = Values()

    def fail(value: Any) -> Any:
        raise OSError("broken")

    codec.register(Plain, to=fail, back=fail)
    with pytest.raises(NotSerializable, match=r"value\[0\] is a .*Plain that could not be taken apart: .*broken"):
        codec.encode([Plain(1)])
    with pytest.raises(NotSerializable, match=r"value\[0\] cannot be restored as Plain: broken"):
        codec.decode(b'[{"$":"Plain","v":1}]')
    endless = Values()
    endless.register(Plain, to=lambda plain: plain, back=lambda plain: plain)
    with pytest.raises(NotSerializable, match="contains itself"):
        endless.encode(Plain(1))


def test_the_default_codec_is_what_register_adds_to():
    class Default(enum.Enum):
        A = 1

    assert register(Default, "tests.Default") is Default
    assert VALUES.copy([Default.A]) == [Default.A]


UserId = NewType("UserId", Point)


@pytest.mark.parametrize(
    "annotation, value",
    [
        (Point, Point(1)),
        (list[Point], [Point(1)]),
        (dict[str, tuple[Point, ...]], {"a": (Point(1),)}),
        (Point | None, Point(1)),
        (typing.Optional[Point], Point(1)),  # noqa: UP045 - the old way of writing it
        (typing.Union[int, typing.List[Colour]], [Colour.RED]),  # noqa: UP006, UP007
        (Annotated[Point, "meta", []], Point(1)),
        (Sealed, Sealed(name="a", at=Point(1))),
        (Box[Colour], Box(Colour.RED)),
        (PointBox, PointBox(Point(1))),
        (Node, Node(Colour.RED, Node(Colour.GREEN))),
        (Row, {"user": User(name="a"), "note": Pair(1)}),
        (Struct, Struct(a=1, b=[Point(1)])),
        (User, User(name="a", address=Address(city="b"), home="https://a.b")),
        (Literal[Level.LOW], Level.LOW),
        (UserId, Point(1)),
        (TypeVar("Bound", bound=Point), Point(1)),
        (type("Sub", (Open,), {}), None),
        (collections.abc.Callable[[Point], Colour], [Point(1), Colour.RED]),
    ],
    ids=str,
)
def test_an_annotation_makes_its_classes_known(annotation, value):
    codec = VALUES.for_annotation(annotation)
    assert codec.decode(codec.encode(value)) == value
    if value is not None:
        with pytest.raises(NotSerializable):
            VALUES.encode(value)


@pytest.mark.parametrize("annotation", [None, int, Any, dict, object])
def test_an_annotation_without_classes_needs_no_codec(annotation):
    assert VALUES.for_annotation(annotation) is VALUES


def test_codecs_of_annotations_are_kept():
    assert VALUES.for_annotation(list[Point]) is VALUES.for_annotation(list[Point])
    assert VALUES.for_annotation(Annotated[int, []]).encode(1) == b"1"


@pytest.mark.parametrize(
    "annotation",
    [
        "Nowhere",
        "1 +",
        5,
        ...,
        [int],
        type,
        tuple[()],
        typing.Self,
        typing.NoReturn,
        typing.Protocol,
        typing.ParamSpec("P"),
        re.Pattern[str],
        enum.Enum,
        msgspec.Struct,
        pydantic.BaseModel,
    ],
    ids=str,
)
def test_a_strange_annotation_does_no_harm(annotation):
    codec = VALUES.for_annotation(annotation)
    with pytest.raises(NotSerializable):
        codec.encode(Point(1))
    assert codec.encode((1,)) == b'{"$":"tuple","v":[1]}'


def test_an_annotation_that_cannot_be_resolved_is_named():
    def step(a: Nowhere, b: Colour) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    codec = VALUES.for_callable(step)
    assert codec.copy([Colour.RED]) == [Colour.RED]
    with pytest.raises(NotSerializable, match=r"the annotation 'Nowhere' could not be resolved"):
        codec.encode(Point(1))


def test_a_class_may_be_defined_after_its_annotation_is_read():
    def step() -> Later: ...  # type: ignore[name-defined]  # noqa: F821

    codec = VALUES.for_callable(step)
    with pytest.raises(NotSerializable):
        codec.encode(Point(1))
    globals()["Later"] = Point
    try:
        assert codec.copy(Point(1)) == Point(1)
    finally:
        del globals()["Later"]


def test_the_classes_of_a_function_are_known():
    @dataclass
    class Local:
        x: int

    @dataclass
    class Hidden:
        y: int

    def step(point: Point, *, how: Local) -> list[Colour]:
        return [Local(1), point, how]  # type: ignore[list-item]

    def unseen(a: Hidden) -> None: ...

    codec = VALUES.for_callable(step)
    for value in (Point(1), Local(1), Colour.RED):
        assert codec.copy([value]) == [value]
    assert VALUES.for_callable(unseen, {"Hidden": Hidden}).copy([Hidden(1)]) == [Hidden(1)]


def namesake() -> type:
    @dataclass
    class Twin:
        x: int

    return Twin


def test_two_classes_of_one_name_are_distinguished_or_refused():
    one, two = namesake(), namesake()
    codec = VALUES.for_annotation(tuple[one, two, Point])
    assert codec.copy([Point(1)]) == [Point(1)]
    for cls in (one, two):
        with pytest.raises(DuplicateName, match="one of them under another name"):
            codec.encode(cls(1))
    with pytest.raises(DuplicateName):
        codec.decode(b'{"$":"namesake.<locals>.Twin","v":{"x":1}}')
    parent = Values()
    parent.register(two, "second")
    codec = parent.for_annotation(one | two)
    parent.register(one, "first")
    for cls in (one, two):
        assert codec.decode(codec.encode(cls(1))) == cls(1)


def test_a_parent_that_takes_a_name_later_is_noticed():
    one, two = namesake(), namesake()
    parent = Values()
    child = parent.for_annotation(one)
    data = child.encode(one(1))
    parent.register(two)
    with pytest.raises(DuplicateName):
        child.encode(one(1))
    with pytest.raises(DuplicateName):
        child.decode(data)


def test_class_named_like_a_tag_comes_back():
    secret = enum.Enum("secret", ["A"], module=__name__)
    codec = VALUES.for_annotation(secret)
    assert codec.copy([secret.A, Secret("x")]) == [secret.A, Secret("x")]


def test_a_registered_name_wins_over_that_of_an_annotation():
    parent = Values()
    child = parent.for_annotation(Point)
    assert child.encode(Point(1)).startswith(b'{"$":"Point"')
    parent.register(Point, "geo.Point")
    assert child.encode(Point(1)).startswith(b'{"$":"geo.Point"')
    assert child.decode(b'{"$":"Point","v":{"x":1}}') == Point(1)


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_secret_is_stored_as_a_name(monkeypatch):
    monkeypatch.setenv("KEEPSTEP_TEST_KEY", "hunter2")
    secret = VALUES.copy([Secret("KEEPSTEP_TEST_KEY")])[0]
    assert "hunter2" not in f"{secret} {secret!r} {VALUES.encode(secret)!r}"
    assert secret.reveal() == "hunter2"
    assert secret == Secret("KEEPSTEP_TEST_KEY") != Secret("OTHER")
    assert len({secret, Secret("KEEPSTEP_TEST_KEY")}) == 1
    assert copy.deepcopy(secret) == pickle.loads(pickle.dumps(secret)) == secret
    monkeypatch.setenv("KEEPSTEP_TEST_KEY", "changed")
    assert secret.reveal() == "changed"
    with pytest.raises(AttributeError):
        secret.name = "x"
    with pytest.raises(DefinitionError, match="'NOT_THERE' is not set"):
        Secret("NOT_THERE").reveal()
    for name in ("", 5):
        with pytest.raises(DefinitionError):
            Secret(name)


def test_secrets_can_come_from_elsewhere():
    old = set_secret_resolver(lambda name: name.upper() + "!")
    try:
        assert Secret("abc").reveal() == "ABC!"
    finally:
        set_secret_resolver(old)
    with pytest.raises(DefinitionError):
        Secret("abc").reveal()


SECRETS = {
    "openai": "sk-proj-abcdefghij0123456789",
    "stripe": "sk_live_abcdefghij0123456789",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "github": "ghp_abcdefghijABCDEFGHIJ0123456789",
    "github fine": "github_pat_abcdefghijABCDEFGHIJ0123456789",
    "slack": "xoxb-0123456789-abcdefghij",
    "google": "AIza" + "a" * 35,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "bearer": "Authorization: Bearer abcdef0123456789abcdef",
    "url": "postgresql://me:hunter22@db.example/x",
    "query": "https://x.example/?a=1&api_key=hunter22&b=2",
    "dsn": "host=db password=hunter22 dbname=x",
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----",
}


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_secrets_are_redacted_in_texts(secret):
    redactor = Redactor()
    text = redactor.text(f"before {secret} after")
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert "[redacted]" in text
    assert not {"hunter22", "MIIB", "abcdef0123456789abcdef", secret} & set(re.split(r"[\s:@=&]+", text))
    assert redactor.text(text) == text or "[redacted]" in redactor.text(text)
    for shape, path in (
        (secret, ""),
        ({"a": [1, secret]}, "['a'][1]"),
        ({"k": {"x": (secret,)}}, "['k']['x'][0]"),
        ({secret: 1}, "[a key]"),
        ([secret.encode()], "[0]"),
    ):
        assert redactor.hit(shape) == path
        assert redactor.hit(VALUES.encode(shape)) == path


def test_only_the_secret_part_of_a_text_is_redacted():
    text = Redactor().text
    assert text(SECRETS["url"]) == "postgresql://me:[redacted]@db.example/x"
    assert text(SECRETS["query"]) == "https://x.example/?a=1&api_key=[redacted]&b=2"
    assert text(SECRETS["dsn"]) == "host=db password=[redacted] dbname=x"
    assert text(SECRETS["bearer"]) == "Authorization: Bearer [redacted]"
    assert text(f"<{SECRETS['aws']}>") == "<[redacted]>"
    assert Redactor([r"a(?P<secret>b+)c"]).text("abbc abc") == "a[redacted]c a[redacted]c"


def test_ordinary_texts_are_left_alone():
    redactor = Redactor()
    for text in (
        "the password is wrong",
        'connect(password=os.environ["PASSWORD"], password=None, password=get_password(), password=password)',
        "a basic internationalization, a bearer authentication-scheme",
        "sk-toggleable__label-arrow sk-text-repr-fallback",
        "https://example.com:8080/path?q=1&page_token=3",
        "a bearer of news",
        "task-12345678901234567890",
        "12:30 me@example.com",
        "-----BEGIN CERTIFICATE-----",
    ):
        assert redactor.text(text) == text
        assert redactor.hit({"a": text}) is None


def test_secrets_are_found_in_stored_values_of_every_kind():
    codec = Values([Point]).for_annotation(Sealed)
    redactor = Redactor([*DEFAULTS, re.compile("hush")])
    assert redactor.hit(codec.encode([Secret("ghp_abcdefghijABCDEFGHIJ0123456789")])) is None  # a name, as it looks
    for value, path in (
        ({"token": SECRETS["openai"]}, "['token']"),
        ({1: ["", "hush hush"]}, "[0][1][1]"),
        (Point(SECRETS["aws"]), "['x']"),  # type: ignore[arg-type]
        ([SECRETS["aws"].encode()], "[0]"),
        (Sealed(name=SECRETS["aws"]), "['name']"),
    ):
        assert redactor.hit(codec.encode(value)) == path
    assert redactor.hit(codec.encode({"$": "secret", "v": SECRETS["aws"]})) is not None
    assert redactor.hit(codec.encode({"token": "fine"})) is None


def test_a_revealed_secret_is_known_from_then_on(monkeypatch):
    monkeypatch.setattr(Secret, "revealed", {})
    monkeypatch.setenv("PASSPHRASE", 'correct "horse"\n\u00fc')
    monkeypatch.setenv("PIN", "1234")
    redactor, text = Redactor(), 'so correct "horse"\n\u00fc it is'
    assert redactor.hit(VALUES.encode({"a": text})) is None
    secret = Secret("PASSPHRASE").reveal()
    for shape in ({"a": text}, {"a": text.encode()}, {"a": [text]}):
        assert str(redactor.hit(VALUES.encode(shape))).startswith("['a']") or isinstance(shape["a"], bytes)
    assert redactor.hit(VALUES.encode({secret: 1})) == "[a key]"
    assert redactor.text(text) == "so [redacted] it is"
    Secret("PIN").reveal()  # too short: it would be found in ordinary texts
    assert redactor.hit(VALUES.encode("12345")) is None
    for number in range(150):
        monkeypatch.setenv("MANY", f"secret number {number}")
        Secret("MANY").reveal()
    assert len(Secret.revealed) == 100
    assert redactor.hit(VALUES.encode("secret number 149")) == ""
    assert redactor.hit(VALUES.encode("secret number 7.")) is None


def test_a_value_that_changes_while_it_is_stored_is_refused():
    value: dict[Any, Any] = {}
    codec = Values()
    codec.register(Plain, to=lambda plain: value.update({plain.n: 1}), back=lambda stored: Plain(0))
    value["a"] = Plain(5)
    with pytest.raises(NotSerializable, match=r"^input changed while it was being stored"):
        codec.encode(value, "input")


@pytest.mark.parametrize(
    "text", ["a" * 300_000, "eyJ-" * 75_000, "://:" * 75_000, "-----BEGIN " * 30_000, "sk-" * 90_000]
)
@pytest.mark.timeout(60)  # a search that goes back and forth would take hours
def test_redaction_takes_no_longer_than_the_text(text):
    Redactor().text(text)


# -- exceptions --------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """An exception whose constructor takes other arguments than its `args`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"refused: {why}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("part",)


@dataclass
class Listed(Exception):
    items: tuple[int, ...]


class GatewayDown(ConnectionError):
    pass


def _slotted():
    error = Slotted("no")
    error.part = Decimal(1)
    return error


@pytest.mark.parametrize(
    "error, attributes",
    [
        (Refused(7, "no"), ["code"]),
        (_slotted(), ["part"]),
        (Listed((1, 2)), ["items"]),
        (GatewayDown(5, "cut", "a.txt"), ["errno", "strerror", "filename"]),
        (ValueError("no", (1, 2)), []),
        (OSError(2, "gone"), ["errno"]),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), ["start", "reason", "object"]),
        (StopAsyncIteration(), []),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_registered_exception_comes_back_with_its_arguments_and_attributes(error, attributes):
    values = Values([type(error)])
    error.add_note("seen at noon")
    back = values.decode(values.encode(error))
    assert type(back) is type(error)
    assert (back.args, str(back), back.__notes__) == (error.args, str(error), ["seen at noon"])
    assert [getattr(back, name) for name in attributes] == [getattr(error, name) for name in attributes]


def test_exception_comes_back_without_its_constructor():
    class Counted(Exception):
        made = 0

        def __init__(self) -> None:
            Counted.made += 1

    values = Values([Counted])
    values.decode(values.encode(Counted()))
    assert Counted.made == 1


def test_marks_of_the_engine_are_not_stored_with_an_exception():
    error = Refused(1, "no")
    error.__keepstep_seq__ = 5
    assert b"keepstep" not in Values([Refused]).encode(error)


def test_group_of_exceptions_needs_to_and_back():
    with pytest.raises(DefinitionError, match="to="):
        Values([ExceptionGroup])


@pytest.mark.parametrize(
    "stored",
    [
        b'{"$":"Refused","v":{"args":5}}',
        b'{"$":"Refused","v":{"args":[],"attributes":[]}}',
        b'{"$":"Refused","v":{"args":[],"more":1}}',
        b'{"$":"Refused","v":[]}',
    ],
)
def test_malformed_exception_is_refused(stored):
    with pytest.raises(NotSerializable):
        Values([Refused]).decode(stored)
