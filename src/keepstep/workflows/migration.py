"""What a workflow's `migrate=` function is told of a run that was started under another definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MigrationInfo:
    """A run whose workflow has changed since it began, as it is now.

    `version`, `fingerprint` and `definition` are those it was started under, or migrated to last; a function has no
    text. `steps` are the keys of the calls that have a recorded outcome. For a graph, `state` is its state and `next`
    the step that comes next.
    """

    run: str
    version: str
    fingerprint: str
    definition: str = ""
    steps: tuple[str, ...] = ()
    state: Any = None
    next: str | None = None
