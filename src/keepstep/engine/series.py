"""Following a series from any of its runs to the next and to the newest."""

from __future__ import annotations

from ..errors import RunNotFound
from ..model import Run, RunQuery
from ..model.ids import is_id
from ..model.series import SERIES, first_of, is_successor, number_of
from ..ports import Store

#: Looks for the newest run of a series: it may go on, and be removed, between two reads of one look.
LOOKS = 3


def next_run(store: Store, run: Run) -> Run | None:
    """The run that continues another, or None at the end of the series.

    If a purge has removed it, the newest run of the series; `RunNotFound` if there is none.
    """
    if run.continued_as is None:
        return None
    for _ in range(LOOKS):
        found = store.get_run(run.continued_as)
        if found is not None and is_successor(found, run):
            return found
        page = store.list_runs(RunQuery(workflow=run.workflow, tags={SERIES: first_of(run)}, limit=1))
        found = store.get_run(page.runs[0].id) if page.runs else None
        if found is not None and number_of(found) > number_of(run):
            return found
    raise RunNotFound(
        f"run {run.id!r} was continued as {run.continued_as!r}, which has been removed from {store.url}", run.id
    )


def newest_run(store: Store, run: Run) -> Run:
    """The newest run of a series, found from any earlier one.

    A series numbers its runs, so the way leads far ahead first: 1,000 runs take about 20 reads.
    """
    first, step, grows = first_of(run), 2, True
    while run.continued_as is not None:
        ahead = _link(store, first, number_of(run) + step) if step > 1 else next_run(store, run)
        if ahead is not None:
            run = ahead
        else:
            grows = False
        step = step * 2 if grows else max(step // 2, 1)
    return run


def _link(store: Store, first: str, number: int) -> Run | None:
    """The run of a series with this number, if it has the id that is usual and says that it belongs there."""
    name = f"{first}~{number}"
    found = store.get_run(name) if is_id(name) else None
    return found if found is not None and found.tags.get(SERIES) == first else None
