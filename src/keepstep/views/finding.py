"""Finds the run that a person means, and whether a worker can drive it."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import RunNotFound
from ..history.series import newest_run
from ..model import Run, RunQuery

if TYPE_CHECKING:
    from ..history.host import CommandHost
    from ..ports import Store

#: Length of the longest run id. Only this much of a mistyped id is compared.
MAX_ID = 200
#: Runs with a common prefix from which on only the nearest ids are suggested.
MANY = 4
#: Newest runs that a mistyped id is compared with.
NEWEST = 200


def near_ids(store: Store, run_id: str) -> tuple[str, ...]:
    """Return ids that resemble a mistyped one: those with the longest common prefix, or similar ones."""
    run_id = run_id[:MAX_ID]
    for length in range(len(run_id), max(len(run_id) // 2, 2), -1):
        found = [run.id for run in store.list_runs(RunQuery(id_prefix=run_id[:length], limit=MANY, system=True)).runs]
        if found:
            return tuple(found if len(found) < MANY else difflib.get_close_matches(run_id, found, n=3, cutoff=0.0))
    newest = [run.id for run in store.list_runs(RunQuery(limit=NEWEST)).runs]
    return tuple(difflib.get_close_matches(run_id, newest, n=3, cutoff=0.7))


async def successor_of(host: CommandHost, run: Run) -> Run | None:
    """Return the newest successor of a run in its series; None if there is none, or if it was removed."""
    if run.continued_as is None:
        return None
    try:
        return await host.ask(newest_run, run)
    except RunNotFound:
        return None


async def awaited_children(host: CommandHost, run: Run, keys: Collection[str]) -> tuple[tuple[str, Run], ...]:
    """Return the children whose calls have these keys, each with its key; of a series, the newest run."""
    found: dict[str, Run] = {}
    query = RunQuery(parent=run.id)
    while len(found) < len(keys):
        page = await host.call(host.store.list_runs, query)
        for child in page.runs:
            if child.parent_key is not None and child.parent_key in keys:
                found.setdefault(child.parent_key, child)
        if page.next is None:
            break
        query = replace(query, after=page.next)
    return tuple([(key, await successor_of(host, found[key]) or found[key]) for key in keys if key in found])


async def is_attended(host: CommandHost, workflow: str, version: str | None = None) -> bool:
    """Whether a living worker knows the workflow, and drives this version of it if one is given."""
    workers = await host.ask(lambda store: store.list_workers())
    if version is not None:
        return any(worker.drives(workflow, version) for worker in workers)
    return any(worker.claims and workflow in worker.workflows for worker in workers)


async def lacks_worker(host: CommandHost, run_id: str) -> bool:
    """Whether a run, or the newest of its series, should go on, but no living worker knows its workflow."""
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    if run.continued_as is not None:
        run = await host.ask(newest_run, run)
    return run.worker is None and not run.status.finished and not await is_attended(host, run.workflow, run.version)
