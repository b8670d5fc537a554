"""Queries to a store, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from .run import Run, Status


@dataclass(frozen=True, slots=True)
class RunQuery:
    """A filter of runs, listed newest first. `after` is the `next` of the previous page.

    Keepers, such as those of schedules, are left out unless `system` is set. The runs' `input` is empty unless
    `with_input` is set, because a page of large inputs may take gigabytes.
    """

    workflow: str | None = None
    status: frozenset[Status] = frozenset()
    parent: str | None = None
    worker: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    created_before: datetime | None = None
    created_after: datetime | None = None
    updated_before: datetime | None = None
    id_prefix: str | None = None
    limit: int = 100
    after: str | None = None
    with_input: bool = False
    ids: frozenset[str] | None = None
    system: bool = False
    version: str | None = None


@dataclass(frozen=True, slots=True)
class RunPage:
    """One page of runs; `next` continues the list, None ends it.

    `unreadable` names the damaged runs of this page, which are not in `runs`.
    """

    runs: tuple[Run, ...] = ()
    next: str | None = None
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class News:
    """The runs of a worker with new signals since the last `cursor`; `changed` is true after any write."""

    cursor: int = 0
    runs: tuple[str, ...] = ()
    changed: bool = False
