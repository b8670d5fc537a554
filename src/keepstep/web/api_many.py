"""Routes of the API that steer many runs at once; each counts the runs first, and changes them only when told to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from ..engine.handle import RunHandle
from ..history.commands import cancel_now
from ..model import FINISHED, Run, RunQuery, Status
from ..views.many import Selection, change, select
from .api_runs import RunFilter
from .api_steering import Reason
from .routes import Ask, NotJson, Role, post

#: Runs that one request changes at most, so that its answer does not take minutes.
MOST_CHANGED = 1000
#: Refused runs that an answer names at most.
MOST_NAMED = 20


class Many(msgspec.Struct, forbid_unknown_fields=True):
    """The ids of runs, or a filter that selects them; without any condition it needs `all`. `dry_run` only counts."""

    ids: Annotated[list[str], msgspec.Meta(max_length=MOST_CHANGED)] = []
    filter: RunFilter | None = None
    all: bool = False
    reason: Reason = ""
    dry_run: bool = True


class Selected(msgspec.Struct, kw_only=True):
    """The runs that an act fits, what became of them, and whether more are left than one request changes."""

    act: str
    matched: int
    more: bool
    statuses: dict[str, int]
    workflows: dict[str, int]
    dry_run: bool
    changed: int = 0
    asked: int = 0
    refused: list[dict[str, str]] = []
    unattended: list[str] = []


_UNFINISHED = frozenset(Status) - FINISHED


@post("/many/retry", Selected, body=Many)
async def retry_many(ask: Ask) -> Selected:
    """Let failed and set-aside runs go on from where they failed."""

    async def act(run: Run) -> bool:
        await _handle(ask, run).retry(ask.body.reason)
        return True

    return await _change(ask, "retry", frozenset({Status.FAILED, Status.SET_ASIDE}), act)


@post("/many/pause", Selected, body=Many)
async def pause_many(ask: Ask) -> Selected:
    """Stop runs at their next steps."""

    async def act(run: Run) -> bool:
        await _handle(ask, run).pause(ask.body.reason)
        return False

    return await _change(ask, "pause", _UNFINISHED - {Status.PAUSED, Status.SET_ASIDE}, act)


@post("/many/resume", Selected, body=Many)
async def resume_many(ask: Ask) -> Selected:
    """Let paused runs go on."""

    async def act(run: Run) -> bool:
        await _handle(ask, run).resume(ask.body.reason)
        return True

    return await _change(ask, "resume", frozenset({Status.PAUSED}), act)


@post("/many/cancel", Selected, body=Many, role=Role.ADMIN)
async def cancel_many(ask: Ask) -> Selected:
    """Cancel runs, with their steps, waits and children. This is final."""

    async def act(run: Run) -> bool:
        if run.status is Status.SET_ASIDE:
            await cancel_now(ask.engine, run.id, ask.body.reason, ask.actor)
            return True
        handle = _handle(ask, run)
        await handle.cancel(ask.body.reason)
        return await handle.status() is Status.CANCELLED

    return await _change(ask, "cancel", _UNFINISHED, act)


def _handle(ask: Ask, run: Run) -> RunHandle[Any]:
    return RunHandle(ask.engine, run.id, ask.engine.workflows.get(run.workflow)).by(ask.actor)


async def _change(ask: Ask, name: str, fits: frozenset[Status], act: Callable[[Run], Awaitable[bool]]) -> Selected:
    body: Many = ask.body
    if bool(body.ids) == (body.filter is not None):
        raise NotJson("give either ids or a filter")
    if body.filter == RunFilter() and not body.all:
        raise NotJson("the filter has no condition; give all=true to mean every run")
    query = RunQuery(ids=frozenset(body.ids)) if body.filter is None else body.filter.query()
    status = (query.status & fits) if query.status else fits
    query = replace(query, status=status, limit=500, after=None, system=False)
    found = await select(ask.engine, query, MOST_CHANGED) if status else Selection((), ())
    answer = Selected(
        act=name,
        matched=len(found.runs),
        more=found.more,
        statuses=found.statuses,
        workflows=found.workflows,
        dry_run=body.dry_run,
    )
    if not body.dry_run:
        made = await change(ask.engine, found.runs, act)
        answer.changed, answer.asked = made.done.count(True), made.done.count(False)
        answer.refused = [{"run": run, "message": message} for run, message in made.refused[:MOST_NAMED]]
        answer.unattended = list(made.unattended)
    return answer
