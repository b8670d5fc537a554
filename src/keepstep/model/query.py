"""What may be asked of a store, and the pages it answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from .run import Run, Status


@dataclass(frozen=True, slots=True)
class RunQuery:
    """Which runs to list, newest first. `after` is the `next` of the page before.

    Their `input` is empty unless `with_input` asks for it: a page of large inputs may take gigabytes.
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


@dataclass(frozen=True, slots=True)
class RunPage:
    """One page of runs; `next` continues the list, None ends it.

    `unreadable` names the runs of this page whose rows are damaged: they are not among `runs`, and not kept back.
    """

    runs: tuple[Run, ...] = ()
    next: str | None = None
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class News:
    """Which of a worker's runs have new signals since `cursor` was read; `changed` says that anything was written."""

    cursor: int = 0
    runs: tuple[str, ...] = ()
    changed: bool = False
