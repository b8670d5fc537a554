"""The command `watch`: prints the events of a run as they happen."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from . import errors
from .settings import RUN, Settings, command, find

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..model import Event, Status
    from .progress import Maps


@command("watch")
@RUN
@click.option("--after", type=click.IntRange(0), default=0, metavar="SEQ", help="Only events after this record.")
@click.option("--full", is_flag=True, help="Include whole values and errors.")
def watch(settings: Settings, *, run_id: str, after: int, full: bool) -> int:
    """Print the events of a run until it ends; the exit code says how it ended.

    With --json, one object per line. Without it and --full, one line now and then tells of many items of a map.
    """
    from ..model.checkpoint import map_of
    from ..records.progress import maps_in
    from ..views.plain import event_data
    from .progress import Maps

    async def follow(engine: Engine) -> Status:
        handle, maps = await find(engine, run_id), Maps()
        async for event in handle.watch(after):
            if settings.json:
                click.echo(json.dumps(event_data(event), ensure_ascii=False))
                continue
            if full or not maps.take(event):
                _tell(maps, all_of_them=map_of(event.step) is None)
                click.echo(_as_line(event, full=full))
            elif maps.is_due():
                maps.totals(maps_in((await handle.run()).progress))
                _tell(maps)
        _tell(maps, all_of_them=True)
        return await handle.status()

    status = settings.talk(follow)
    ends = {"failed": errors.FAILED, "cancelled": errors.CANCELLED, "set aside": errors.SET_ASIDE}
    return ends.get(status.value, errors.OK)


def _tell(maps: Maps, *, all_of_them: bool = False) -> None:
    for _, text in maps.lines(all_of_them=all_of_them):
        click.echo(text)


def _as_line(event: Event, *, full: bool) -> str:
    from ..views import plain
    from . import formatting

    width = 0 if full else formatting.BRIEF
    clock = event.at.astimezone().strftime("%H:%M:%S")
    colour = {"failure": "red", "cancelled": "yellow"}.get(str(event.data.get("outcome")))
    name = click.style(f"{event.name:<16}", fg=colour)
    parts = [formatting.one_line(formatting.step_name(event.step))] if event.step else []
    if named := formatting.names(event.agent, event.stage):
        parts.append(named)
    if event.attempt > 1:
        parts.append(f"attempt {event.attempt}")
    if "error" in event.data:
        parts.append(formatting.one_line(str(event.data["error"]), width))
    elif "value" in event.data:
        value = event.data["value"]
        parts.append(formatting.brief(plain.value_of(json.dumps(value).encode()), width))
    line = f"{clock} {event.seq:>5}  {name}  {'  '.join(parts)}".rstrip()
    return line if full else formatting.on_terminal(line)
