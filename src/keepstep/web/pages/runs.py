"""The list of runs: filters in the address, presets with capped counts, and the way to one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from ...model import Run, RunQuery, Status
from ...views.commands import list_command
from ...views.counts import Count, count, counts
from ...views.pulse import IN_FLIGHT
from ...views.waits import waits_of
from ...views.wording import one_line, waits_in_words
from ..api_runs import RunFilter
from .table import Look, Moved, Shown, page

if TYPE_CHECKING:
    from ...ports import Store

#: Spans of the filter by age, in seconds.
SINCE = {"15m": 900, "1h": 3600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000}
_SINCES = [
    ("", "any time"),
    ("15m", "last 15 minutes"),
    ("1h", "last hour"),
    ("24h", "last day"),
    ("7d", "last week"),
    ("30d", "last 30 days"),
]
#: Characters of the error of a run in the list.
_LONGEST_WHY = 120


class PageFilter(RunFilter, forbid_unknown_fields=True):
    """Filters of the page: those of the API, and an age instead of an instant."""

    since: str = ""

    def query(self) -> RunQuery:
        """Return the query to the store."""
        found = super().query()
        if self.since in SINCE:
            return replace(found, created_after=datetime.now(UTC) - timedelta(seconds=SINCE[self.since]))
        return found


@dataclass(frozen=True, slots=True)
class Preset:
    """A filter that many people need, and the number of runs that it selects."""

    name: str
    parameters: dict[str, Any]
    query: RunQuery
    count: Count | None = None
    is_on: bool = False


PRESETS = (
    Preset("All", {}, RunQuery()),
    Preset("In flight", {"status": sorted(one.value for one in IN_FLIGHT)}, RunQuery(status=IN_FLIGHT)),
    Preset("Needs you", {"needs_person": "true"}, RunQuery(needs_person=True)),
    Preset("Failed and still open", {"open_failure": "true"}, RunQuery(open_failure=True)),
    Preset("Completed", {"status": ["completed"]}, RunQuery(status=frozenset({Status.COMPLETED}))),
)


@page("/runs", query=PageFilter)
async def list_runs(look: Look) -> Shown:
    """Show runs, newest first."""
    asked: PageFilter = look.query
    query, engine = asked.query(), look.engine
    found = await engine.call(engine.store.list_runs, query)
    numbers = await counts(engine, [one.query for one in PRESETS])
    given = {name: value for name, value in _parameters(asked).items() if value}
    data = {
        "runs": found.runs,
        "tags": await look.redacted({run.id: dict(run.tags) for run in found.runs}),
        "next": found.next,
        "unreadable": found.unreadable,
        "why": await redacted_whys(look, found.runs),
        "matching": await count(engine, query),
        "presets": [
            replace(one, count=number, is_on=one.parameters == given)
            for one, number in zip(PRESETS, numbers, strict=True)
        ],
        "filters": asked,
        "parameters": given,
        "query": msgspec.json.encode(_sent(asked, query)).decode(),
        "command": list_command(query).line(),
        "is_filtered": bool(given),
        "is_later": asked.after is not None,
        "has_more": any(getattr(asked, name) for name in _RARE),
        "statuses": list(Status),
        "since": asked.since,
        "sinces": _SINCES,
        "workflows": sorted(await _known(look)),
    }
    return Shown("runs.html", data)


#: Filters that are folded away until one of them is used.
_RARE = ("tag", "not_workflow", "queue", "awaits", "worker", "version", "parent")


#: Parameters of the page that are not filters of the API.
_PAGING = frozenset({"after", "limit", "system", "since"})


def _parameters(asked: PageFilter) -> dict[str, Any]:
    found = {name: value for name, value in msgspec.to_builtins(asked).items() if name not in _PAGING - {"since"}}
    return {name: "true" if value is True else value for name, value in found.items()}


def _sent(asked: PageFilter, query: RunQuery) -> dict[str, Any]:
    """Return the filter as the API takes it."""
    found = {name: value for name, value in msgspec.to_builtins(asked).items() if value and name not in _PAGING}
    return found if query.created_after is None else found | {"created_after": query.created_after.isoformat()}


async def redacted_whys(look: Look, runs: Sequence[Run]) -> dict[str, str]:
    """Return why each run is where it is, without secrets."""
    return await look.redacted(await look.engine.call(whys, look.engine.store, runs))


def whys(store: Store, runs: Sequence[Run]) -> dict[str, str]:
    """Return for each run on one line what it waits for, or with which error it ended. A list has no errors."""
    now = datetime.now(UTC)
    found = {}
    for run in runs:
        text = waits_in_words(waits_of(run, now), now)
        if run.status in (Status.FAILED, Status.SET_ASIDE):
            whole = store.get_run(run.id)
            text = whole.error.summary if whole is not None and whole.error is not None else text
        found[run.id] = one_line(text, _LONGEST_WHY)
    return found


async def _known(look: Look) -> set[str]:
    """Return the names of the workflows that this server or a living worker knows."""
    workers = await look.engine.workers()
    here = {name for name, one in look.engine.workflows.items() if not one.is_built_in}
    return here | {name for worker in workers if worker.alive for name in worker.known}


class Jump(msgspec.Struct, forbid_unknown_fields=True):
    """The id of a run, or its beginning."""

    q: str = ""


@page("/go", query=Jump)
async def go(look: Look) -> Shown | Moved:
    """Open the run with an id, or list those whose ids begin with it."""
    text = look.query.q.strip()
    if text and await look.engine.call(look.engine.store.get_run, text) is not None:
        return Moved(f"/runs/{quote(text, safe='')}")
    found = await look.engine.call(look.engine.store.list_runs, RunQuery(id_prefix=text, limit=2)) if text else None
    if found is not None and len(found.runs) == 1:
        return Moved(f"/runs/{quote(found.runs[0].id, safe='')}")
    return Moved(f"/runs?id_prefix={quote(text, safe='')}" if text else "/runs")
