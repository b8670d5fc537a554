"""Properties of the codec: exact round trips, digests that follow equality, and no surprise from any text."""

from __future__ import annotations

import copy
import enum
import json
import math
import random
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta, timezone
from decimal import Decimal
from ipaddress import IPv4Address
from pathlib import PurePath, PurePosixPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import pydantic
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keepstep.errors import NotSerializable
from keepstep.values import Secret, Values
from tests import nightly


def examples(number: int) -> settings:
    """A third of so many examples, or all of them nightly, however long each takes."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=nightly.examples(number // 3, number), deadline=None, suppress_health_check=slow)


class Suit(enum.Enum):
    HEARTS = "h"
    SPADES = ("s", 1)


@dataclass(frozen=True, slots=True)
class Record:
    left: Any
    right: Any = None


@dataclass
class Loose:
    item: Any


class Named(NamedTuple):
    one: Any
    two: Any = ()


class Packed(msgspec.Struct):
    item: Any
    other: Any = None


class Model(pydantic.BaseModel, extra="allow"):
    item: Any
    other: Any = 5
    _private: Any = pydantic.PrivateAttr(default=None)


CODEC = Values([Suit, Record, Loose, Named, Packed, Model])


def model(item: Any, extra: dict[str, Any], private: Any) -> Model:
    made = Model.model_construct(item=item, **extra)
    made._private = private
    return made


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
OFFSETS = st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59))
ZONES = st.one_of(
    st.none(),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Etc/GMT+1"]).map(ZoneInfo),
    OFFSETS.map(timezone),
    st.builds(timezone, OFFSETS, st.text(max_size=5)),
)
NUMBERS = st.one_of(st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(), st.complex_numbers())
HASHABLE_LEAVES = st.one_of(
    st.none(),
    NUMBERS,
    st.sampled_from([2**64, 2**63, -(2**63) - 1, -0.0, 5e-324, 1.7976931348623157e308]),
    st.integers(-5, 5).map(lambda number: 2**2048 + number),
    ANY_TEXT,
    st.sampled_from(["$", "v", '"$"', "more", "\ud83d\ude00", "\\ud800", "\ud800"]),
    st.binary(max_size=8),
    st.datetimes(timezones=ZONES, allow_imaginary=True),
    st.times(timezones=ZONES),
    st.dates(),
    st.timedeltas(),
    st.decimals().filter(lambda number: not number.is_snan()),
    st.uuids(),
    st.builds(range, st.integers(), st.integers(), st.sampled_from([1, 3, -2])),
    ANY_TEXT.map(PurePosixPath),
    st.integers(0, 2**32 - 1).map(IPv4Address),
    st.sampled_from(Suit),
    st.text(min_size=1, max_size=5).map(Secret),
)
HASHABLE = st.recursive(
    HASHABLE_LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        st.builds(Record, inner, inner),
        st.builds(Named, inner, inner),
    ),
    max_leaves=5,
)
LEAVES = st.one_of(HASHABLE, st.binary(max_size=5).map(bytearray), st.just(Decimal("sNaN")))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(ANY_TEXT, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "v", "more", "a"]), inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.sets(HASHABLE, max_size=4),
        st.builds(Record, inner, inner),
        st.builds(Loose, inner),
        st.builds(Named, inner, inner),
        st.builds(Packed, inner, inner),
        st.builds(model, inner, st.dictionaries(st.sampled_from(["x", "$", "y z"]), inner, max_size=2), inner),
    ),
    max_leaves=12,
)


def shape(value: Any) -> Any:  # noqa: C901, PLR0912 - one line for each type
    """A value as something that is equal exactly if types, values and orders are."""
    cls = type(value)
    if cls is float:
        return cls, "nan" if math.isnan(value) else value.hex()
    if cls is complex:
        return cls, shape(value.real), shape(value.imag)
    if cls is Decimal:
        return cls, str(value)
    if cls in (list, tuple):
        return cls, [shape(item) for item in value]
    if cls in (set, frozenset):
        return cls, sorted((shape(item) for item in value), key=repr)
    if cls is dict:
        return cls, [(shape(key), shape(item)) for key, item in value.items()]
    if cls is Named:
        return cls, [shape(item) for item in value]
    if is_dataclass(cls):
        return cls, [shape(getattr(value, field.name)) for field in fields(cls)]
    if cls is Packed:
        return cls, shape(value.item), shape(value.other)
    if cls is Model:
        state = (value.__dict__, value.__pydantic_extra__, value.__pydantic_private__)
        return cls, [shape(part) for part in state], value.__pydantic_fields_set__
    if hasattr(value, "tzinfo"):
        zone = value.tzinfo
        named = zone.__getinitargs__() if type(zone) is timezone else str(zone)
        return cls, value.replace(tzinfo=None), value.fold, type(zone), named
    if cls is range:
        return cls, value.start, value.stop, value.step
    if isinstance(value, PurePath):
        return cls, str(value)
    return cls, value


@examples(400)
@given(VALUES)
@example({"$": "tuple", "v": [1]})
@example(["\ud83d", "\ude00", "\ud83d\ude00"])
@example({math.nan: 1, float("nan"): 2})
def test_every_value_comes_back_exactly(value):
    data = CODEC.encode(value)
    back = CODEC.decode(data)
    assert shape(back) == shape(value)
    assert shape(CODEC.copy(value)) == shape(value)
    assert CODEC.encode(back) == data
    json.loads(data)


@examples(250)
@given(VALUES)
def test_the_digest_survives_the_round_trip(value):
    assert CODEC.digest(value) == CODEC.digest(CODEC.decode(CODEC.encode(value)))


def shuffled(value: Any, chance: random.Random) -> Any:
    """An equal value, with the keys of its dictionaries in another order."""
    cls = type(value)
    if cls is dict:
        pairs = [(key, shuffled(item, chance)) for key, item in value.items()]
        chance.shuffle(pairs)
        return dict(pairs)
    if cls in (list, tuple):
        return cls(shuffled(item, chance) for item in value)
    if cls is set:
        items = list(value)
        chance.shuffle(items)
        return set(items)
    if cls is Record:
        return Record(shuffled(value.left, chance), shuffled(value.right, chance))
    return value


@examples(250)
@given(VALUES, st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_order(value, chance):
    assert CODEC.digest(shuffled(value, chance)) == CODEC.digest(value)


def unordered(value: Any) -> str:
    """The shape of a value without the order of dictionaries."""

    def plain(part: Any) -> Any:
        if isinstance(part, tuple) and len(part) == 2 and part[0] is dict:
            return (dict, sorted(repr(plain(pair)) for pair in part[1]))
        if isinstance(part, (list, tuple)):
            return type(part)(plain(item) for item in part)
        return part

    return repr(plain(shape(value)))


@examples(400)
@given(VALUES, VALUES)
@example(1, True)
@example(0.0, -0.0)
@example({1: 2}, {"1": 2})
@example([1, 2], (1, 2))
@example("\ud800", "\\ud800")
def test_digests_are_equal_exactly_if_the_values_are(one, two):
    assert (CODEC.digest(one) == CODEC.digest(two)) == (unordered(one) == unordered(two))


@examples(150)
@given(st.lists(VALUES, max_size=3).map(tuple), st.dictionaries(st.sampled_from("abc$"), VALUES, max_size=3))
def test_copied_call_has_the_same_digest_and_another_call_has_not(args, kwargs):
    digest = CODEC.digest_call(args, kwargs)
    copied_args, copied_kwargs = CODEC.copy_call(args, kwargs)
    assert shape([copied_args, copied_kwargs]) == shape([args, kwargs])
    assert CODEC.digest_call(copied_args, dict(reversed(copied_kwargs.items()))) == digest
    assert CODEC.digest_call((*args, 1), kwargs) != digest
    assert CODEC.digest_call(args, {**kwargs, "d": 1}) != digest


def spoil(value: Any) -> None:  # noqa: C901 - one line for each type
    """Change everything in a value that can be changed."""
    cls = type(value)
    if cls is list:
        for item in value:
            spoil(item)
        value.append("spoilt")
    elif cls is tuple:
        for item in value:
            spoil(item)
    elif cls is dict:
        for item in value.values():
            spoil(item)
        value["spoilt"] = 1
    elif cls is set:
        value.add("spoilt")
    elif cls is bytearray:
        value.extend(b"spoilt")
    elif cls in (Loose, Packed, Model):
        spoil(value.item)
        value.item = "spoilt"
    elif cls is Record:
        spoil(value.left)
        spoil(value.right)


@examples(250)
@given(VALUES)
def test_nothing_that_can_change_is_shared(value):
    before = shape(copy.deepcopy(value))
    data, copied = CODEC.encode(value), CODEC.copy(value)
    first = CODEC.decode(data)
    (args, _), (_, kwargs) = CODEC.copy_call((value,), {}), CODEC.copy_call((), {"a": value})
    spoil(value)
    assert shape(copied) == shape(CODEC.decode(data)) == shape(args[0]) == shape(kwargs["a"]) == before
    spoil(first)
    assert shape(CODEC.decode(data)) == before


# -- hostile text ------------------------------------------------------------------------------------------------------

TAGS = st.sampled_from(
    [
        "int",
        "str",
        "float",
        "tuple",
        "set",
        "frozenset",
        "dict",
        "bytes",
        "bytearray",
        "datetime",
        "date",
        "time",
        "timedelta",
        "decimal",
        "uuid",
        "complex",
        "range",
        "path",
        "posixpath",
        "windowspath",
        "ipv4address",
        "ipv6network",
        "secret",
        "unset",
        "Suit",
        "Record",
        "Loose",
        "Named",
        "Packed",
        "Model",
        "os",
    ]
)
WORDS = st.sampled_from(
    ["nan", "-inf", "0x1f", "\\ud800", "AAAA", "2026-01-01T00:00:00", "2026-01-01", "01:02:03", "1E+5", "HEARTS"]
)
KEYS = st.sampled_from(["$", "v", "more", "at", "zone", "fold", "name", "item", "left", "extra", "private", "unset"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | WORDS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4),
        st.fixed_dictionaries({"$": TAGS | inner, "v": inner}),
        st.fixed_dictionaries({"$": TAGS, "v": inner, "more": inner}),
        st.fixed_dictionaries({"$": TAGS, "v": st.dictionaries(KEYS, inner, max_size=3)}),
        st.fixed_dictionaries({"$": TAGS, "v": st.lists(st.integers(-5, 5) | inner, min_size=2, max_size=3)}),
    ),
    max_leaves=15,
)


@examples(800)
@given(JSON)
def test_any_json_is_read_or_refused(plain):
    data = json.dumps(plain).encode()
    try:
        value = CODEC.decode(data, "there")
    except NotSerializable:
        return
    assert shape(CODEC.decode(CODEC.encode(value))) == shape(value)


@examples(300)
@given(st.binary() | st.text(alphabet='{}[]:,"$v01-e.\\u', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(data):
    with suppress(NotSerializable):
        CODEC.decode(data)


@examples(300)
@given(VALUES, st.data())
def test_text_that_was_damaged_is_read_or_refused(value, data):
    text = bytearray(CODEC.encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    with suppress(NotSerializable):
        CODEC.decode(bytes(text))
