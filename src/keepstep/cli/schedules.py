"""The commands `schedules list`, `show`, `add`, `pause`, `resume`, `trigger`, `backfill` and `remove`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .filters import instant_of
from .settings import MODULE, REASON, Settings, command, common_options

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from ..engine.engine import Engine
    from ..engine.schedules import ScheduleInfo
    from ..policies import Schedule

NAME = click.argument("name", metavar="SCHEDULE")

_ACTS = ("list", "show", "add", "pause", "resume", "trigger", "backfill", "remove")


class _Schedules(click.Group):
    """The group, which lists the schedules if it is called without a command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _ACTS and not args[0].startswith("-"):
            raise click.UsageError(f"no command 'schedules {args[0]}'{errors.nearest(args[0], _ACTS)}", ctx)
        return super().resolve_command(ctx, args)


def _shared() -> list[click.Parameter]:
    found = common_options()
    for option in found:
        if isinstance(option, click.Option):
            option.envvar = None  # the group `keepstep` has read the variable
    return found


@click.group("schedules", cls=_Schedules, params=_shared(), invoke_without_command=True)
@click.pass_context
def schedules(ctx: click.Context) -> None:
    """List and change what workers start by themselves."""
    if ctx.invoked_subcommand is None:
        _list(ctx.obj)


@command("list")
def list_(settings: Settings) -> None:
    """List schedules, with their next ticks."""
    _list(settings)


def _list(settings: Settings) -> None:
    from ..views import plain, wording
    from . import formatting

    async def look(engine: Engine) -> list[ScheduleInfo]:
        return await engine.schedules.list()

    found = settings.look(look)

    def text() -> str:
        if not found:
            return "no schedules"
        rows = [
            (
                formatting.one_line(one.name),
                formatting.one_line(one.workflow),
                formatting.one_line(str(one.when)),
                formatting.one_line(wording.schedule_standing(one)),
                formatting.local(one.next[0]) if one.next and not one.paused else "-",
            )
            for one in found
        ]
        return formatting.table(("SCHEDULE", "WORKFLOW", "WHEN", "STATUS", "NEXT"), rows)

    settings.answer({"schedules": [plain.schedule_data(one) for one in found]}, text)


@command("show")
@NAME
@click.option("--ticks", type=click.IntRange(0, 1000), default=5, show_default=True, help="Number of next ticks.")
def show(settings: Settings, *, name: str, ticks: int) -> None:
    """Show one schedule: its next ticks, its last ones, and its changes."""
    from ..views import plain, wording
    from . import formatting

    async def look(engine: Engine) -> ScheduleInfo:
        return await engine.schedules.get(name, ticks=ticks)

    one = settings.look(look)

    def text() -> str:
        recent = "\n".join(
            f"{formatting.local(past.tick)}  {formatting.one_line(past.run or f'no run: {past.why}')}"
            for past in reversed(one.recent)
        )
        changes = "\n".join(
            formatting.one_line(
                f"{formatting.local(made.at)}  {made.act} by {made.actor}{f': {made.reason}' if made.reason else ''}"
            )
            for made in reversed(one.changes)
        )
        rules = [f"catch up: {one.when.catch_up}", f"overlap: {one.when.overlap}"]
        rules += [f"jitter: {one.when.jitter:g} s"] if one.when.jitter else []
        rules += [f"until: {formatting.local(one.when.until)}"] if one.when.until else []
        return formatting.facts(
            (
                ("schedule", formatting.one_line(one.name)),
                ("workflow", formatting.one_line(one.workflow)),
                ("when", formatting.one_line(f"{one.when}; {', '.join(rules)}")),
                ("status", formatting.one_line(wording.schedule_standing(one))),
                ("declared", "in code" if one.declared else "by hand"),
                ("ticks", f"{one.fired} started a run, {one.skipped} did not"),
                ("open", formatting.one_line(", ".join(one.open))),
                ("waiting", formatting.one_line(", ".join(map(formatting.local, one.waiting)))),
                ("next", "\n".join(map(formatting.local, one.next))),
                ("last", recent),
                ("changes", changes),
            )
        )

    settings.answer(plain.schedule_data(one), text)


# -- changing --------------------------------------------------------------------------------------------------------


@command("add")
@NAME
@click.argument("target", metavar="FILE.py:WORKFLOW|FILE.yaml")
@click.argument("words", nargs=-1, metavar="[ARGUMENT...]")
@click.option("--cron", metavar="EXPRESSION", help='Five fields, such as "0 7 * * mon-fri".')
@click.option("--tz", default=None, metavar="ZONE", help="Time zone of --cron, such as Europe/Berlin.  [default: UTC]")
@click.option("--every", type=float, metavar="SECONDS", help="Tick at equal distances instead.")
@click.option("--jitter", type=float, default=0.0, metavar="SECONDS", help="Delay each tick by up to this.")
@click.option("--until", type=instant_of, default=None, metavar="DATE", help="Make no tick after it.")
@click.option("--catch-up", type=click.Choice(["one", "all", "skip"]), default="one", show_default=True)
@click.option("--overlap", type=click.Choice(["skip", "queue", "cancel", "allow"]), default="skip", show_default=True)
@click.option("--input", "text", metavar="JSON", help="The input as JSON, @file, or - for standard input.")
@MODULE
def add(
    settings: Settings,
    *,
    name: str,
    target: str,
    words: tuple[str, ...],
    text: str | None,
    module: tuple[str, ...],
    **given: Any,
) -> None:
    """Let workers start a workflow at the ticks of a schedule, or change a schedule that was added before."""
    from ..views import plain
    from ..views.finding import is_attended
    from .target import load_workflow, read_input

    when = _schedule(**given)
    workflow = load_workflow(target, modules=module, debug=settings.debug)
    args, kwargs = read_input(workflow, text, words)

    async def make() -> tuple[ScheduleInfo, bool]:
        async with settings.engine(create=True) as engine:
            await engine.schedules.add(name, workflow, when, args, kwargs)
            return await engine.schedules.get(name), await is_attended(engine, workflow.name)

    one, attended = asyncio.run(make())
    following = when.after(one.last)
    from . import formatting

    settings.answer(
        {"schedule": name, "workflow": workflow.name, "next": plain.iso(following)},
        f"{name} starts {workflow.name}; the next tick is {formatting.local(following)}",
    )
    if not attended and not settings.json:
        where = target.rpartition(":")[0] or target
        click.echo(f"no worker drives {workflow.name!r} yet: {errors.line('worker', where)}", err=True)


def _schedule(*, cron: str | None, tz: str | None, every: float | None, **options: Any) -> Schedule:
    from ..policies import Cron, Every

    if (cron is None) == (every is None):
        raise click.UsageError("use either --cron or --every")
    if cron is not None:
        return Cron(cron, tz=tz or "UTC", **options)
    if tz is not None:
        raise click.UsageError("--tz is the time zone of --cron; --every counts in UTC")
    return Every(every or 0.0, **options)


@command("pause")
@NAME
@REASON
def pause(settings: Settings, *, name: str, reason: str) -> None:
    """Let a schedule make no ticks until it is resumed. Its runs go on."""
    _change(settings, name, "paused", lambda engine: engine.schedules.pause(name, reason))


@command("resume")
@NAME
@REASON
def resume(settings: Settings, *, name: str, reason: str) -> None:
    """Let a paused schedule go on."""
    _change(settings, name, "resumed", lambda engine: engine.schedules.resume(name, reason))


@command("trigger")
@NAME
@REASON
def trigger(settings: Settings, *, name: str, reason: str) -> None:
    """Start a run of a schedule now, and print its id."""

    async def start(engine: Engine) -> str:
        return await engine.schedules.trigger(name, reason)

    run = settings.talk(start)
    settings.answer({"schedule": name, "run": run}, run)


@command("backfill")
@NAME
@click.option("--from", "first", type=instant_of, required=True, metavar="AGE|DATE", help="The first tick, or before.")
@click.option("--to", "last", type=instant_of, default="0s", metavar="AGE|DATE", help="The last tick.  [default: now]")
@REASON
def backfill(settings: Settings, *, name: str, first: datetime, last: datetime, reason: str) -> None:
    """Start the runs of past ticks that do not exist."""

    async def start(engine: Engine) -> int:
        return await engine.schedules.backfill(name, first, last, reason)

    from . import formatting

    ticks = settings.talk(start)
    settings.answer({"schedule": name, "ticks": ticks}, f"{name}: {formatting.count(ticks, 'tick')} backfilled")


@command("remove")
@NAME
@REASON
def remove(settings: Settings, *, name: str, reason: str) -> None:
    """Remove a schedule. Its runs go on."""
    _change(settings, name, "removed", lambda engine: engine.schedules.remove(name, reason))


def _change(settings: Settings, name: str, done: str, change: Callable[[Engine], Awaitable[None]]) -> None:
    settings.talk(change)
    settings.answer({"schedule": name, "done": done}, f"{done} {name}")


for _one in (list_, show, add, pause, resume, trigger, backfill, remove):
    schedules.add_command(_one)
