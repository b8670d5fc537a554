"""The commands `aside list`, `retry`, `edit` and `drop`, for runs that are set aside and wait for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import errors
from .bulk import Deed, bulk, change_all, is_bulk
from .filters import filters, query_of
from .settings import REASON, Settings, command, common_options, find_run, handle_on, shown_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..engine.engine import Engine
    from ..model import Run
    from ..views.aside import AsidePage, AsideRun

_ACTS = ("list", "retry", "edit", "drop")
#: The phases in which a worker takes up a run, in words.
_PHASES = {
    "load": "when its records were loaded",
    "validate": "when it was validated",
    "rebuild": "when its state was rebuilt",
    "handler": "when its recovery handler was asked",
    "resume": "when its code was called",
}
#: Runs that are listed at most, because the history of each is read.
_LIMIT = 20


class _Aside(click.Group):
    """The group, which lists the runs if it is called without a command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _ACTS and not args[0].startswith("-"):
            raise click.UsageError(f"no command 'aside {args[0]}'{errors.nearest(args[0], _ACTS)}", ctx)
        return super().resolve_command(ctx, args)


def _shared() -> list[click.Parameter]:
    found = common_options()
    for option in found:
        if isinstance(option, click.Option):
            option.envvar = None  # the group `keepstep` has read the variable
    return found


@click.group("aside", cls=_Aside, params=_shared(), invoke_without_command=True)
@click.pass_context
def aside(ctx: click.Context) -> int:
    """List runs that are set aside, and retry, edit or drop them."""
    if ctx.invoked_subcommand is not None:
        return errors.OK
    return _list(ctx.obj, _LIMIT, None, {})


@command("list")
@filters
@click.option("--limit", type=click.IntRange(1, 1000), default=_LIMIT, show_default=True)
@click.option("--after", metavar="CURSOR", help="Continue after the previous page.")
def list_(settings: Settings, *, limit: int, after: str | None, **given: Any) -> int:
    """List runs that are set aside: the reason, the last error, and how often each was tried.

    Exit code 6 if some rows are damaged; they are named.
    """
    return _list(settings, limit, after, given)


def _list(settings: Settings, limit: int, after: str | None, given: dict[str, Any]) -> int:
    from dataclasses import replace

    from ..model import Status
    from ..views import plain
    from ..views.aside import asides
    from . import formatting

    query = query_of(**given)
    if query.status - {Status.SET_ASIDE}:
        raise click.UsageError("only runs that are set aside are listed; use `keepstep list` for others")
    query = replace(query, status=frozenset({Status.SET_ASIDE}), limit=limit, after=after)

    async def look(engine: Engine) -> tuple[AsidePage, str]:
        return await asides(engine, query), shown_url(engine.store)

    page, url = settings.look(look)
    value = {
        "runs": [plain.aside_data(one) for one in page.runs],
        "next": page.next,
        "unreadable": list(page.unreadable),
    }

    def text() -> str:
        if not page.runs:
            return f"no run in {url} is set aside"
        lines = [line for one in page.runs for line in _lines(one)]
        return "\n".join(
            [*lines, *([f"more: {errors.line('aside', 'list', '--after', page.next)}"] if page.next else [])]
        )

    settings.answer(value, text)
    if not page.unreadable:
        return errors.OK
    if not settings.json:
        click.echo(errors.unreadable(map(formatting.one_line, page.unreadable)), err=True)
    return errors.STORE


def _lines(one: AsideRun) -> list[str]:
    from . import formatting

    tried = f"set aside {formatting.count(one.attempts, 'time')}" if one.attempts > 1 else "set aside"
    head = f"{formatting.one_line(one.run.id)}  {formatting.one_line(one.run.workflow)}  {tried}"
    lines = [f"{head}, {formatting.ago(one.since)}"]
    phase = f" ({_PHASES.get(one.phase, one.phase)})" if one.phase else ""
    lines += [f"  {formatting.one_line(reason)}" for reason in one.problems or (f"{one.reason}{phase}",)]
    if one.last_error:
        lines.append(f"  last error: {formatting.step_name(one.failed)}: {formatting.one_line(one.last_error)}")
    return lines


def _act(
    settings: Settings,
    run_id: str,
    given: dict[str, Any],
    deed: Deed,
    act: Callable[[Engine, Run], Awaitable[Any]],
) -> int:
    """Change one run that is set aside, or all that are selected."""
    from ..model import Status

    async def act_on_one(engine: Engine) -> tuple[Any, str]:
        from .control import alone

        run = await find_run(engine, run_id)
        if run.status is not Status.SET_ASIDE:
            hint = f"{errors.line('show', run_id)} tells what can be done with it"
            raise errors.Refused(f"run {run_id!r} is {run.status.value}, not set aside", hint, errors.CONFLICT)
        answer = await act(engine, run)
        return answer, "" if deed.name == "drop" else await alone(engine, run_id)

    async def act_on_each(engine: Engine, run: Run) -> bool:
        await act(engine, run)
        return True

    if is_bulk(run_id, given, deed.name):
        return change_all(settings, deed, given, act_on_each)
    answer, later = settings.talk(act_on_one)
    left = answer or []
    more = f"; not undone: {', '.join(left)}" if left else ""
    value = {"run": run_id, deed.participle: True, **({"not_undone": left} if left else {})}
    settings.answer(value, f"{run_id} is {deed.participle}{more}{later}")
    return errors.OK


def _deed(name: str, participle: str) -> Deed:
    from ..model import Status

    return Deed(name, participle, frozenset({Status.SET_ASIDE}))


@command("retry")
@bulk
@REASON
@click.option("--force", is_flag=True, help="Also a run that was handed over to another store and is lost there.")
def retry(settings: Settings, *, run_id: str, reason: str, force: bool, **given: Any) -> int:
    """Let a run that is set aside, or all that are selected, go on from where they stopped.

    Selected runs are counted first, and retried with --yes or after a question. Exit code 7 if some could not be
    retried.
    """

    async def act(engine: Engine, run: Run) -> None:
        await handle_on(engine, run).retry(reason, force=force)

    return _act(settings, run_id, given, _deed("retry", "retried"), act)


@command("edit")
@bulk
@click.option("--set", "values", multiple=True, metavar="KEY=JSON", help="A new value in the state; repeatable.")
@click.option("--remove", multiple=True, metavar="KEY", help="A key to remove from the state; repeatable.")
@click.option("--next", "next_step", metavar="STEP", help="The step that comes next.")
@REASON
def edit(
    settings: Settings,
    *,
    run_id: str,
    values: tuple[str, ...],
    remove: tuple[str, ...],
    next_step: str | None,
    reason: str,
    **given: Any,
) -> int:
    """Change the state of a graph's run that is set aside, or of all that are selected, and let them go on.

    Selected runs are counted first, and changed with --yes or after a question. Exit code 7 if some could not be
    changed. A run of a function has no state: `keepstep recover RUN --handler "skip step"` gives a step its result.
    """
    from .state import value_of

    change = dict(map(value_of, values))
    if not change and not remove and next_step is None:
        raise errors.Refused("nothing to change", "use --set KEY=JSON, --remove KEY or --next STEP")

    async def act(engine: Engine, run: Run) -> None:
        await handle_on(engine, run).edit(change, remove=remove, next=next_step, reason=reason)

    return _act(settings, run_id, given, _deed("edit", "edited"), act)


@command("drop")
@bulk
@REASON
def drop(settings: Settings, *, run_id: str, reason: str, **given: Any) -> int:
    """Give up a run that is set aside, or all that are selected: each ends as cancelled. This is final.

    Its code does not run, and its history is kept. Steps that are not undone are named. Selected runs are counted
    first, and dropped with --yes or after a question. Exit code 7 if some could not be dropped.
    """

    async def act(engine: Engine, run: Run) -> list[str]:
        from ..history.commands import cancel_now

        return await cancel_now(engine, run.id, reason, engine.actor)

    return _act(settings, run_id, given, _deed("drop", "dropped"), act)


for _one in (list_, retry, edit, drop):
    aside.add_command(_one)
