"""Deterministic values for workflows: the time, random numbers and ids, the same on every replay."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from ..ports import CURRENT
from .calls import current_branch


def now() -> datetime:
    """Return the time of the newest outcome that the run has seen: the same on every replay."""
    scope = CURRENT.get()
    if scope is None or scope.in_step:
        return datetime.now().astimezone()
    return scope.now()  # type: ignore[no-any-return]


def random() -> float:
    """Return a random number from 0 up to 1, the same on every replay."""
    return current_branch("random").generator().random()


def uuid() -> UUID:
    """Return a random UUID, the same on every replay."""
    return current_branch("uuid").uuid()
