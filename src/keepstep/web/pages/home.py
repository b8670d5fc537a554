"""The front page: the health of the whole at a glance."""

from __future__ import annotations

from ...model import Run, RunQuery
from ...views.pulse import BAR_SECONDS, pulse_of
from .runs import redacted_whys
from .table import Look, Shown, page

#: Runs of each list on the front page.
FEW = 6


@page("/")
async def overview(look: Look) -> Shown:
    """Show the health of the whole."""
    pulse = await pulse_of(look.engine)
    needed = await _few(look, RunQuery(needs_person=True, limit=FEW)) if pulse.needs_person.number else ()
    failed = await _few(look, RunQuery(open_failure=True, limit=FEW)) if pulse.open_failures.number else ()
    shown = {run.id: run for run in (*needed, *failed)}
    data = {
        "pulse": pulse,
        "needed": needed,
        "failed": failed,
        "why": await redacted_whys(look, tuple(shown.values())),
        "highest": max(1, *(bar.all for bar in pulse.bars)),
        "minutes": BAR_SECONDS // 60,
        "is_empty": not pulse.in_flight.number and not shown and not any(bar.all for bar in pulse.bars),
        "any_run": bool(await _few(look, RunQuery(limit=1))),
    }
    return Shown("home.html", data)


async def _few(look: Look, query: RunQuery) -> tuple[Run, ...]:
    return (await look.engine.call(look.engine.store.list_runs, query)).runs
