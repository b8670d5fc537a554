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

    `workflows` are the workflows that a run may have, `not_workflows` those that it may not have. `awaits` is the name
    of a signal that a parked run waits for. `needs_person` selects runs that a person can move on: they wait for a
    signal, a verdict or at a breakpoint, are paused, or are set aside. `open_failure` selects runs that failed or are
    set aside, unless they were handed over to another store or a fork of them completed.

    With `count_to`, the page tells how many runs match, whatever `limit` and `after` are, and stops counting there.
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
    workflows: frozenset[str] = frozenset()
    not_workflows: frozenset[str] = frozenset()
    queue: str | None = None
    updated_after: datetime | None = None
    awaits: str | None = None
    needs_person: bool = False
    open_failure: bool = False
    count_to: int = 0


@dataclass(frozen=True, slots=True)
class RunPage:
    """One page of runs; `next` continues the list, None ends it.

    `unreadable` names the damaged runs of this page, which are not in `runs`. `count` is the number of runs that match,
    up to the query's `count_to`; None without it.
    """

    runs: tuple[Run, ...] = ()
    next: str | None = None
    unreadable: tuple[str, ...] = ()
    count: int | None = None


@dataclass(frozen=True, slots=True)
class News:
    """The runs of a worker with new signals since the last `cursor`; `changed` is true after any write.

    `due` tells whether the worker should claim because runs may be due; None leaves it to `changed`.
    """

    cursor: int = 0
    runs: tuple[str, ...] = ()
    changed: bool = False
    due: bool | None = None
