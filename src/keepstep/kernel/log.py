"""Drafts: the records that a run passes to its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..ports import Answer, Send
from ..records.record import Record

if TYPE_CHECKING:
    from ..model import Status

T = TypeVar("T")


class Draft(msgspec.Struct, gc=False):
    """A record on its way into the journal, and what happens once it is durable.

    `call` is then settled in order, and `then` is called at once; `refused` is called if the store refused the change.
    `change` holds fields of the Advance beyond its rows: such a draft is committed by itself, unless it `takes_along`
    the plain ones before it. If the store refuses that, they are written without it. `packed` is the compressed value
    of the record, if there is one.
    """

    record: Record | None
    call: Any = None
    then: Callable[[Answer], None] | None = None
    refused: Callable[[Answer], None] | None = None
    change: dict[str, Any] | None = None
    packed: bytes | None = None
    takes_along: bool = False


class RecoveryPlan(msgspec.Struct):
    """The effect of a recovery handler's answer: records, signals, and the key of the step to skip.

    `again` are calls whose bodies run although they ran before, or may have.
    """

    records: list[Record] = []
    sends: list[Send] = []
    skips: str = ""
    again: tuple[str, ...] = ()


def head_move(
    status: Status | None, *, release: bool = False, due_at: Any = None, wakes: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """Return the fields of an Advance that move the head."""
    return {"status": status, "release": release, "due_at": due_at, "wakes": wakes, **more}


def fulfil(future: asyncio.Future[T], value: T) -> None:
    """Set the result of a future, unless it was cancelled."""
    if not future.done():
        future.set_result(value)
