"""Checks every unfinished run against the loaded code before a deployment, without changing anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ..errors import EncryptionError, KeepstepError
from ..kernel.namesakes import is_namesake, problem
from ..model import FINISHED, RunQuery, Status
from ..stores.reading import head_of
from .dry_replay import recorded, replayed

if TYPE_CHECKING:
    from ..model import Run
    from ..workflows.definition import Workflow
    from .host import CommandHost

#: Runs read in one query.
PAGE = 200
_UNFINISHED = frozenset(Status) - FINISHED


class Fit(StrEnum):
    """The effect of this code on a run."""

    FITS = "fits"
    MISMATCH = "mismatch"  # its code asks another question than the recorded one
    CHANGED = "changed"  # its definition changed, which the workflow's policy does not allow
    PINNED = "pinned"  # it waits for a worker that has its version
    UNKNOWN = "unknown"  # no workflow of its name is here, or only one of another module
    UNREADABLE = "unreadable"  # what is stored of it cannot be read
    LOCKED = "locked"  # it is encrypted with a key that is not here: a worker without it leaves the run alone

    @property
    def breaks(self) -> bool:
        """Whether a worker would set the run aside."""
        return self in (Fit.MISMATCH, Fit.CHANGED, Fit.UNREADABLE)


@dataclass(frozen=True, slots=True)
class Checked:
    """The finding about one run; `next` are the calls that a worker would begin."""

    run: str
    workflow: str
    version: str
    status: str
    fit: Fit
    why: str = ""
    next: tuple[str, ...] = ()


async def check(
    host: CommandHost, workflows: Mapping[str, Workflow[..., Any]], *, only: frozenset[str] = frozenset()
) -> AsyncIterator[Checked]:
    """Yield a finding for every unfinished run of the store, or of the workflows in `only`."""
    query = RunQuery(status=_UNFINISHED, limit=PAGE)
    while True:
        page = await host.call(host.store.list_runs, query)
        for name in page.unreadable:
            yield Checked(name, "", "", "", Fit.UNREADABLE, "its row is damaged")
        for run in page.runs:
            if not only or run.workflow in only:
                yield await _checked(host, run, workflows.get(run.workflow))
        if page.next is None:
            return
        query = replace(query, after=page.next)


async def _checked(host: CommandHost, run: Run, workflow: Workflow[..., Any] | None) -> Checked:
    found = Checked(run.id, run.workflow, run.version, run.status.value, Fit.FITS)
    if workflow is None:
        return replace(found, fit=Fit.UNKNOWN, why=f"no workflow {run.workflow!r} is loaded")
    if workflow.on_change == "pin" and workflow.version != run.version:
        why = f"it is pinned to version {run.version!r}, and the loaded code has {workflow.version!r}"
        return replace(found, fit=Fit.PINNED, why=why)
    try:
        whole = await host.call(head_of, host.store, run.id) or run
        result = await asyncio.to_thread(replayed, workflow, await recorded(host, whole))
    except EncryptionError as error:
        return replace(found, fit=Fit.LOCKED, why=str(error))
    except KeepstepError as error:
        return replace(found, fit=Fit.UNREADABLE, why=str(error))
    if result.fits and is_namesake(workflow, run):  # it fits, but a worker with this module leaves it alone
        return replace(found, fit=Fit.UNKNOWN, why=problem(workflow, run))
    if result.fits:
        return replace(found, next=result.asks)
    kinds = {"DefinitionChanged": Fit.CHANGED, "CheckpointCorrupt": Fit.UNREADABLE, "SchemaMismatch": Fit.UNREADABLE}
    return replace(found, fit=kinds.get(result.kind, Fit.MISMATCH), why=result.problem)
