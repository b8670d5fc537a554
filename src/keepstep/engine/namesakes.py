"""Runs of a workflow that only has the same name: another program started them, and its code belongs to them."""

from __future__ import annotations

import logging
from typing import Any

from ..model import Run
from ..model.ids import module_in
from ..workflows.definition import Workflow
from ..workflows.place import is_same_module

log = logging.getLogger("keepstep")

#: Seconds until a run of another program is claimed again: doubled each time, up to the second number.
FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0


def is_namesake(workflow: Workflow[..., Any], run: Run) -> bool:
    """Whether a run was started by another workflow that happens to have the name of this one.

    A workflow whose name was given with `name=` takes every run of that name: that is how one is moved.
    """
    return not is_same_module(workflow.module, module_in(run.seed))


def problem(workflow: Workflow[..., Any], run: Run) -> str:
    """What is wrong and what to do about it, in a sentence."""
    return (
        f"run {run.id!r} was started by workflow {run.workflow!r} of module {module_in(run.seed)!r}, and here is "
        f"another of that name, in module {workflow.module!r}; give each a name of its own with "
        f"@ks.workflow(name=...), or give this one name={run.workflow!r} if it has moved here"
    )


class Namesakes:
    """The runs of other programs that a worker has met."""

    def __init__(self) -> None:
        self._met: dict[str, float] = {}
        self._told: set[tuple[str, str]] = set()

    def wait_seconds(self, workflow: Workflow[..., Any], run: Run) -> float:
        """How long to leave a run to workers that have its program; the first of each program is logged."""
        which = run.workflow, module_in(run.seed)
        if which not in self._told:
            self._told.add(which)
            log.error("%s. The run is left to other workers", problem(workflow, run))
        seconds = min(self._met.get(run.id, FIRST_SECONDS / 2) * 2, MOST_SECONDS)
        self._met[run.id] = seconds
        return seconds
