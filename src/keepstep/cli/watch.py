"""The command `watch`: what happens in a run, as it happens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from . import exits
from .frame import RUN, Settings, command, find

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..model import Event, Status


@command("watch")
@RUN
@click.option("--after", type=click.IntRange(0), default=0, metavar="SEQ", help="Only what was recorded after this.")
@click.option("--full", is_flag=True, help="With the whole of each value and error.")
def watch(settings: Settings, *, run_id: str, after: int, full: bool) -> int:
    """Print what happens in a run until it ends; the exit code says how it ended.

    With --json, one object per line.
    """

    async def follow(engine: Engine) -> Status:
        handle = await find(engine, run_id)
        async for event in handle.watch(after):
            click.echo(_as_json(event) if settings.json else _as_line(event, full=full))
        return await handle.status()

    status = settings.talk(follow)
    ends = {"failed": exits.FAILED, "cancelled": exits.CANCELLED, "set aside": exits.SET_ASIDE}
    return ends.get(status.value, exits.OK)


def _as_json(event: Event) -> str:
    from . import words

    value: dict[str, Any] = {
        "name": event.name,
        "run": event.run,
        "seq": event.seq,
        "at": words.iso(event.at),
        "step": event.step,
        "attempt": event.attempt,
        "worker": event.worker,
        "data": event.data,
    }
    return json.dumps(value, ensure_ascii=False)


def _as_line(event: Event, *, full: bool) -> str:
    from . import words

    width = 0 if full else words.BRIEF
    clock = event.at.astimezone().strftime("%H:%M:%S")
    colour = {"failure": "red", "cancelled": "yellow"}.get(str(event.data.get("outcome")))
    name = click.style(f"{event.name:<16}", fg=colour)
    parts = [words.one_line(words.step_name(event.step))] if event.step else []
    if event.attempt > 1:
        parts.append(f"attempt {event.attempt}")
    if "error" in event.data:
        parts.append(words.one_line(str(event.data["error"]), width))
    elif "value" in event.data:
        value = event.data["value"]
        parts.append(words.brief(words.plain(json.dumps(value).encode()), width))
    line = f"{clock} {event.seq:>5}  {name}  {'  '.join(parts)}".rstrip()
    return line if full else words.on_terminal(line)
