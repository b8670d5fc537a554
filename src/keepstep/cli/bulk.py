"""Commands on every run that a filter selects: they are counted first, and changed only with `--yes`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from . import errors
from .filters import filters, is_filtered, query_of
from .settings import Settings, shown_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from ..engine.engine import Engine
    from ..model import Run, Status
    from ..views.many import Selection

#: Runs that could not be changed and are named at most.
_NAMED = 20


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

    from ..views.many import change, select
    from . import formatting

    limit, yes, dry_run = given.pop("limit"), given.pop("yes"), given.pop("dry_run")
    query = query_of(**given)
    if query.status - deed.statuses:
        wrong = ", ".join(sorted(query.status - deed.statuses))
        raise click.UsageError(
            f"a run that is {wrong} cannot be {deed.participle} (only {', '.join(sorted(deed.statuses))})"
        )
    query = replace(query, status=query.status or deed.statuses)

    async def look(engine: Engine) -> tuple[Selection, str]:
        return await select(engine, query, limit), shown_url(engine.store)

    chosen, url = settings.talk(look)
    found, unreadable = chosen.runs, chosen.unreadable
    if unreadable and not settings.json:
        click.echo(errors.unreadable(map(formatting.one_line, unreadable)), err=True)
    text = _counted(chosen)
    value: dict[str, Any] = {"matched": len(found), "dry_run": dry_run, "changed": 0, "asked": 0, "refused": []}
    value |= {"unreadable": list(unreadable), "statuses": chosen.statuses, "workflows": chosen.workflows}
    if not found or dry_run:
        settings.answer(value, text or f"no run in {url} matches that can be {deed.participle}")
        return errors.STORE if unreadable else errors.OK
    if not yes:
        _confirm(settings, deed, text)
    made = settings.talk(lambda engine: change(engine, found, lambda run: act(engine, run)))
    done, refused, unattended = made.done, made.refused, made.unattended
    value |= {"changed": done.count(True), "asked": done.count(False), "refused": _as_json(refused)}
    settings.answer(value, lambda: "\n".join(_summary(deed, done, refused, asked)))
    if unattended and not settings.json:
        click.echo(f"no worker drives {', '.join(unattended)} now: {errors.line('worker', 'FILE.py')}", err=True)
    if refused:
        return errors.CONFLICT
    return errors.STORE if unreadable else errors.OK


def _counted(chosen: Selection) -> str:
    from . import formatting

    if not chosen.runs:
        return ""
    counts = ", ".join(f"{number} {status}" for status, number in sorted(chosen.statuses.items()))
    lines = [f"{formatting.count(len(chosen.runs), 'run')} selected ({counts})"]
    names = sorted(chosen.workflows.items())
    return "\n".join([*lines, *(f"  {formatting.one_line(name)}: {number}" for name, number in names)])


def _confirm(settings: Settings, deed: Deed, text: str) -> None:
    if settings.json or not sys.stdin.isatty():
        raise errors.Refused(f"{text}\nnothing was changed", f"add --yes to {deed.name} them, --dry-run to only count")
    click.echo(text, err=True)
    if not click.confirm(f"{deed.name} them?", err=True):
        raise errors.Refused("nothing was changed", code=errors.INTERRUPTED)


def _as_json(refused: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"run": run, "message": message} for run, message in refused]


def _summary(deed: Deed, done: Sequence[bool], refused: Sequence[tuple[str, str]], asked: str) -> Iterator[str]:
    from . import formatting

    if done.count(True) or not done.count(False):
        yield f"{formatting.count(done.count(True), 'run')} {deed.participle}"
    if done.count(False):
        yield f"{formatting.count(done.count(False), 'run')} {asked}"
    for _, message in refused[:_NAMED]:
        yield f"{click.style('refused', fg='red', bold=True)}: {formatting.one_line(message)}"
    if len(refused) > _NAMED:
        yield f"... and {len(refused) - _NAMED} more"
