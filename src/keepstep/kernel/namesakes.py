"""Namesakes: runs of another program's workflow that happens to have the same name."""

from __future__ import annotations

import logging
from typing import Any

from ..model import Run
from ..model.ids import module_in
from ..workflows.definition import Workflow
from ..workflows.source import is_same_module

log = logging.getLogger("keepstep")

#: First and longest time in seconds until a run of another program is claimed again. It doubles each time.
FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0


def is_namesake(workflow: Workflow[..., Any], run: Run) -> bool:
    """Whether a run was started by another workflow that happens to have the name of this one.

    A workflow with an explicit `name=` accepts every run of that name, so that workflows can be moved.
    """
    return not is_same_module(workflow.module, module_in(run.seed))


def problem(workflow: Workflow[..., Any], run: Run) -> str:
    """Return a sentence with the problem and its fix."""
    return (
        f"run {run.id!r} was started by workflow {run.workflow!r} of module {module_in(run.seed)!r}, but this "
        f"process has one of that name in module {workflow.module!r}; give each its own name with "
        f"@ks.workflow(name=...), or set name={run.workflow!r} here if it has moved"
    )


class Namesakes:
    """The runs of other programs that a worker has met."""

    def __init__(self) -> None:
        self._met: dict[str, float] = {}
        self._logged: set[tuple[str, str]] = set()

    def wait_seconds(self, workflow: Workflow[..., Any], run: Run) -> float:
        """Return how long to leave a run to workers of its program; the first of each program is logged."""
        which = run.workflow, module_in(run.seed)
        if which not in self._logged:
            self._logged.add(which)
            log.error("%s. The run is left to other workers", problem(workflow, run))
        seconds = min(self._met.get(run.id, FIRST_SECONDS / 2) * 2, MOST_SECONDS)
        self._met[run.id] = seconds
        return seconds
