"""What a workflow may ask about itself: the time, chance and ids, each the same on every replay."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from ..errors import DefinitionError
from ..ports import CURRENT
from .branch import in_workflow

if TYPE_CHECKING:
    pass

T = TypeVar("T")
U = TypeVar("U")


def now() -> datetime:
    """The time of the newest outcome that the run has seen: the same on every replay."""
    scope = CURRENT.get()
    if scope is None or scope.in_step:
        return datetime.now().astimezone()
    return scope.now()  # type: ignore[no-any-return]


def random() -> float:
    """A random number from 0 up to 1, the same on every replay."""
    return in_workflow("random").generator().random()


def uuid() -> UUID:
    """A random UUID, the same on every replay."""
    return in_workflow("uuid").uuid()


def idempotency_key() -> str:
    """A key for outside services, the same for every attempt and recovery of this step."""
    scope = CURRENT.get()
    if scope is None or not scope.in_step:
        raise DefinitionError("ks.idempotency_key is called outside a step; it belongs to the step that uses it")
    return scope.idempotency_key()  # type: ignore[no-any-return]


def run_id() -> str | None:
    """The id of the current run, in a workflow or a step; None outside."""
    scope = CURRENT.get()
    return None if scope is None else scope.run.id
