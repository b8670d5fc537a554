"""Checks every unfinished run against the code that is loaded here, before that is deployed; nothing is changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ..errors import KeepstepError
from ..model import FINISHED, RunQuery, Status
from .dry import recorded, replayed
from .verify import head_of

if TYPE_CHECKING:
    from ..model import Run
    from ..workflows.definition import Workflow
    from .engine import Engine

#: Runs that are asked for at once.
PAGE = 200
_UNFINISHED = frozenset(Status) - FINISHED


class Fit(StrEnum):
    """What a worker with this code would do with a run."""

    FITS = "fits"
    MISMATCH = "mismatch"  # its code asks another question than the recorded one
    CHANGED = "changed"  # its definition changed, which the workflow's policy does not allow
    PINNED = "pinned"  # it waits for a worker that has its version
    UNKNOWN = "unknown"  # no workflow of its name is here
    UNREADABLE = "unreadable"  # what is stored of it cannot be read

    @property
    def breaks(self) -> bool:
        """A worker would set the run aside."""
        return self in (Fit.MISMATCH, Fit.CHANGED, Fit.UNREADABLE)


@dataclass(frozen=True, slots=True)
class Checked:
    """One run, what would become of it, and why; `next` are the calls that a worker would begin."""

    run: str
    workflow: str
    version: str
    status: str
    fit: Fit
    why: str = ""
    next: tuple[str, ...] = ()


async def check(
    engine: Engine, workflows: Mapping[str, Workflow[..., Any]], *, only: frozenset[str] = frozenset()
) -> AsyncIterator[Checked]:
    """Every unfinished run of the store, or only of some workflows, page by page."""
    query = RunQuery(status=_UNFINISHED, limit=PAGE)
    while True:
        page = await engine.call(engine.store.list_runs, query)
        for name in page.unreadable:
            yield Checked(name, "", "", "", Fit.UNREADABLE, "its row is damaged")
        for run in page.runs:
            if not only or run.workflow in only:
                yield await _checked(engine, run, workflows.get(run.workflow))
        if page.next is None:
            return
        query = replace(query, after=page.next)


async def _checked(engine: Engine, run: Run, workflow: Workflow[..., Any] | None) -> Checked:
    found = Checked(run.id, run.workflow, run.version, run.status.value, Fit.FITS)
    if workflow is None:
        return replace(found, fit=Fit.UNKNOWN, why=f"no workflow {run.workflow!r} is here")
    if workflow.on_change == "pin" and workflow.version != run.version:
        why = f"it is pinned to version {run.version!r}, and this is {workflow.version!r}"
        return replace(found, fit=Fit.PINNED, why=why)
    try:
        whole = await engine.call(head_of, engine.store, run.id) or run
        told = await asyncio.to_thread(replayed, workflow, await recorded(engine, whole))
    except KeepstepError as error:
        return replace(found, fit=Fit.UNREADABLE, why=str(error))
    if told.fits:
        return replace(found, next=told.asks)
    kinds = {"DefinitionChanged": Fit.CHANGED, "CheckpointCorrupt": Fit.UNREADABLE, "SchemaMismatch": Fit.UNREADABLE}
    return replace(found, fit=kinds.get(told.kind, Fit.MISMATCH), why=told.problem)
