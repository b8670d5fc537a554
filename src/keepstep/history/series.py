"""Finds the next and the newest run of a series from any of its runs."""

from __future__ import annotations

from ..errors import RunNotFound
from ..model import Run, RunQuery
from ..model.ids import is_id
from ..model.series import SERIES, first_of, is_successor, number_of
from ..ports import Store


def next_run(store: Store, run: Run) -> Run | None:
    """Return the successor of a run, or None at the end of the series.

    If a purge has removed it, return the newest run of the series; raise `RunNotFound` if there is none.
    """
    if run.continued_as is None:
        return None
    found = store.get_run(run.continued_as)
    if found is not None and is_successor(found, run):
        return found
    series = RunQuery(workflow=run.workflow, tags={SERIES: first_of(run)}, limit=1)
    removed = ""  # the newest run of an earlier read, which was continued and removed before it could be read
    while (
        (newest := store.list_runs(series).runs) and newest[0].id != removed and number_of(newest[0]) > number_of(run)
    ):
        if (found := store.get_run(newest[0].id)) is not None:
            return found
        removed = newest[0].id
    raise RunNotFound(
        f"run {run.id!r} was continued as {run.continued_as!r}, which has been removed from {store.url}", run.id
    )


def newest_run(store: Store, run: Run) -> Run:
    """Return the newest run of a series, found from any earlier one.

    Runs of a series are numbered, so the search takes large steps first: 1,000 runs take about 20 reads.
    """
    step, grows = 2, True
    while run.continued_as is not None:
        ahead = _link(store, run, number_of(run) + step) if step > 1 else next_run(store, run)
        if ahead is not None:
            run = ahead
        else:
            grows = False
        step = step * 2 if grows else max(step // 2, 1)
    return run


def _link(store: Store, run: Run, number: int) -> Run | None:
    """Return the run of a series with this number, if it has the usual id and belongs to the series."""
    first = first_of(run)
    name = f"{first}~{number}"
    found = store.get_run(name) if is_id(name) else None
    return found if found is not None and found.tags.get(SERIES) == first and not _is_older(found, run) else None


def _is_older(found: Run, run: Run) -> bool:
    """Whether a run belongs to an earlier series of the same id, whose first run was removed.

    No run is created before its predecessor, whatever the clocks say.
    """
    return found.created_at < run.created_at
