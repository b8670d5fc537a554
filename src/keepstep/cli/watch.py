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


@command("watch")
@RUN
@click.option("--after", type=click.IntRange(0), default=0, metavar="SEQ", help="Only events after this record.")
@click.option("--full", is_flag=True, help="Include whole values and errors.")
def watch(settings: Settings, *, run_id: str, after: int, full: bool) -> int:
    """Print the events of a run until it ends; the exit code says how it ended.

    With --json, one object per line.
    """
    from ..views.plain import event_data

    async def follow(engine: Engine) -> Status:
        handle = await find(engine, run_id)
        async for event in handle.watch(after):
            text = json.dumps(event_data(event), ensure_ascii=False) if settings.json else _as_line(event, full=full)
            click.echo(text)
        return await handle.status()

    status = settings.talk(follow)
    ends = {"failed": errors.FAILED, "cancelled": errors.CANCELLED, "set aside": errors.SET_ASIDE}
    return ends.get(status.value, errors.OK)


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
