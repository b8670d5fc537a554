"""The argument of a workflow's `migrate=` function: a run that was started under another definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MigrationInfo:
    """A run whose workflow has changed since the run began, in its current state.

    `version`, `fingerprint` and `definition` are those of the run's start, or of its last migration; a function has no
    definition text. `steps` are the keys of the calls with a recorded outcome. For a graph, `state` is the current
    state and `next` the next step.
    """

    run: str
    version: str
    fingerprint: str
    definition: str = ""
    steps: tuple[str, ...] = ()
    state: Any = None
    next: str | None = None
