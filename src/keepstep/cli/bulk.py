"""Commands on every run that a filter selects: they are counted first, and changed only with `--yes`."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from . import errors
from .filters import filters, is_filtered, query_of
from .settings import Settings, shown_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from ..engine.engine import Engine
    from ..model import Run, Status

#: Runs that are changed at once, so that a thousand take seconds and no store is flooded.
AT_ONCE = 16
#: Runs that could not be changed and are named at most.
_NAMED = 20
#: Changed runs that are looked at again, to find out whether a worker is missing.
_LOOKED_AT = 100


class Deed(NamedTuple):
    """A command in words: its name, its participle, and the statuses of the runs that it can change."""

    name: str
    participle: str
    statuses: frozenset[Status]


def bulk(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add an optional run, the options that select runs, and those that confirm the change."""
    options = (
        click.argument("run_id", metavar="[RUN]", default=""),
        filters,
        click.option("--limit", type=click.IntRange(1), metavar="N", help="At most this many runs, the newest."),
        click.option("--yes", is_flag=True, help="Change the selected runs without asking."),
        click.option("--dry-run", is_flag=True, help="Only count the selected runs."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def is_bulk(run_id: str, given: dict[str, Any], deed: str) -> bool:
    """Whether runs are selected by filters; refuse a run together with them, and neither of them."""
    confirming = {name: given[name] for name in ("limit", "yes", "dry_run")}
    narrow = is_filtered({name: value for name, value in given.items() if name not in confirming})
    if run_id and narrow:
        raise click.UsageError("give a RUN, or options that select runs, not both")
    if run_id and is_filtered(confirming):
        raise click.UsageError("--limit, --yes and --dry-run are for selected runs, not for a single RUN")
    if not run_id and not narrow:
        raise click.UsageError(f"name the RUN to {deed}, or select runs, for example with --workflow NAME")
    return narrow


def change_all(
    settings: Settings,
    deed: Deed,
    given: dict[str, Any],
    act: Callable[[Engine, Run], Awaitable[bool]],
    asked: str = "",
) -> int:
    """Count the selected runs, ask for confirmation, and change each; `act` returns whether the change is complete.

    `asked` is the participle for a change that a worker completes. A run that cannot be changed is named, and does not
    stop the others.
    """
    from dataclasses import replace

    from . import formatting

    limit, yes, dry_run = given.pop("limit"), given.pop("yes"), given.pop("dry_run")
    query = query_of(**given)
    if query.status - deed.statuses:
        wrong = ", ".join(sorted(query.status - deed.statuses))
        raise click.UsageError(
            f"a run that is {wrong} cannot be {deed.participle} (only {', '.join(sorted(deed.statuses))})"
        )
    query = replace(query, status=query.status or deed.statuses)
    found, unreadable, url = settings.talk(lambda engine: _select(engine, query, limit))
    if unreadable and not settings.json:
        click.echo(errors.unreadable(map(formatting.one_line, unreadable)), err=True)
    text = _counted(found)
    value: dict[str, Any] = {"matched": len(found), "dry_run": dry_run, "changed": 0, "asked": 0, "refused": []}
    value |= {"unreadable": unreadable, "statuses": dict(Counter(run.status.value for run in found))}
    value |= {"workflows": dict(Counter(run.workflow for run in found))}
    if not found or dry_run:
        settings.answer(value, text or f"no run in {url} matches that can be {deed.participle}")
        return errors.STORE if unreadable else errors.OK
    if not yes:
        _confirm(settings, deed, text)
    done, refused, unattended = settings.talk(lambda engine: _change(engine, found, act))
    value |= {"changed": done.count(True), "asked": done.count(False), "refused": _as_json(refused)}
    settings.answer(value, lambda: "\n".join(_summary(deed, done, refused, asked)))
    if unattended and not settings.json:
        click.echo(f"no worker drives {', '.join(unattended)} now: {errors.line('worker', 'FILE.py')}", err=True)
    if refused:
        return errors.CONFLICT
    return errors.STORE if unreadable else errors.OK


async def _select(engine: Engine, query: Any, limit: int | None) -> tuple[list[Run], list[str], str]:
    """Return the selected runs, the ids of runs that cannot be read and may belong to them, and the store's URL."""
    from dataclasses import replace

    found: list[Run] = []
    unreadable: list[str] = []
    while True:
        page = await engine.list(query)
        found += page.runs
        unreadable += page.unreadable
        if page.next is None or (limit is not None and len(found) >= limit):
            return found[:limit], unreadable, shown_url(engine.store)
        query = replace(query, after=page.next)


def _counted(found: list[Run]) -> str:
    from . import formatting

    if not found:
        return ""
    statuses = Counter(run.status.value for run in found)
    counts = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()))
    lines = [f"{formatting.count(len(found), 'run')} selected ({counts})"]
    names = Counter(run.workflow for run in found)
    return "\n".join([*lines, *(f"  {formatting.one_line(name)}: {number}" for name, number in sorted(names.items()))])


def _confirm(settings: Settings, deed: Deed, text: str) -> None:
    if settings.json or not sys.stdin.isatty():
        raise errors.Refused(f"{text}\nnothing was changed", f"add --yes to {deed.name} them, --dry-run to only count")
    click.echo(text, err=True)
    if not click.confirm(f"{deed.name} them?", err=True):
        raise errors.Refused("nothing was changed", code=errors.INTERRUPTED)


async def _change(
    engine: Engine, found: list[Run], act: Callable[[Engine, Run], Awaitable[bool]]
) -> tuple[list[bool], list[tuple[str, str]], list[str]]:
    """Change the runs; return what became of each, those that refused, and workflows that lack a worker for it."""
    import asyncio

    from ..errors import KeepstepError
    from ..model import FINISHED, RunQuery
    from ..views.finding import is_attended

    done: list[bool] = []
    refused: list[tuple[str, str]] = []
    for start in range(0, len(found), AT_ONCE):
        runs = found[start : start + AT_ONCE]
        answers = await asyncio.gather(*(act(engine, run) for run in runs), return_exceptions=True)
        for run, answer in zip(runs, answers, strict=True):
            if isinstance(answer, KeepstepError):
                refused.append((run.id, str(answer)))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                done.append(answer)
    page = await engine.list(
        RunQuery(ids=frozenset(run.id for run in found[:_LOOKED_AT]), limit=_LOOKED_AT, system=True)
    )
    open_ = sorted({run.workflow for run in page.runs if run.status not in FINISHED})
    return done, refused, [name for name in open_ if not await is_attended(engine, name)]


def _as_json(refused: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"run": run, "message": message} for run, message in refused]


def _summary(deed: Deed, done: list[bool], refused: list[tuple[str, str]], asked: str) -> Iterator[str]:
    from . import formatting

    if done.count(True) or not done.count(False):
        yield f"{formatting.count(done.count(True), 'run')} {deed.participle}"
    if done.count(False):
        yield f"{formatting.count(done.count(False), 'run')} {asked}"
    for _, message in refused[:_NAMED]:
        yield f"{click.style('refused', fg='red', bold=True)}: {formatting.one_line(message)}"
    if len(refused) > _NAMED:
        yield f"... and {len(refused) - _NAMED} more"
