"""Types and workflows that what is fuzzed is decoded against."""

# No `from __future__ import annotations`: text would be evaluated when it is looked at, which is what is watched for.

import enum
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pydantic

from keepstep.values import Values
from keepstep.workflows.definition import Workflow


class Suit(enum.Enum):
    HEARTS = "h"
    SPADES = ("s", 1)


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Order:
    item: str
    count: int = 1
    price: Decimal = Decimal(0)
    at: datetime | None = None
    parts: list["Order"] = field(default_factory=list)


class Point(NamedTuple):
    x: float
    y: float = 0.0


class Packed(msgspec.Struct):
    key: UUID
    left: Any = None


class Model(pydantic.BaseModel, extra="allow"):
    suit: Suit = Suit.HEARTS
    rights: Rights = Rights.READ
    item: Any = None
    _private: Any = pydantic.PrivateAttr(default=None)


class Odd:
    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


CODEC = Values([Suit, Rights, Order, Point, Packed, Model])
CODEC.register(Odd, to=lambda odd: odd.text, back=Odd)


# -- workflows whose input is read from a command line -----------------------------------------------------------------


async def nothing() -> None: ...


async def anything(*args: Any, **kwargs: Any) -> None: ...


async def plain(name: str, count: int = 1, ratio: float = 1.0, flag: bool = False) -> None: ...


async def rich(
    order: Order,
    at: datetime | None = None,
    *,
    day: date | None = None,
    span: timedelta = timedelta(),
    suit: Suit = Suit.HEARTS,
    by_id: dict[UUID, set[int]] | None = None,
) -> None: ...


async def packed(packed: Packed, point: Point | None = None) -> None: ...


async def model(model: Model, models: list[Model] | None = None) -> None: ...


async def odd(odd: Odd) -> None: ...


WORKFLOWS = [Workflow(fn, name=f"fuzz {fn.__name__}") for fn in (nothing, anything, plain, rich, packed, model, odd)]
