"""The command `queues`: lists the queues with limits, shows one, and changes its limits while workers go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .limits import LIMIT, RATE, log_table, unknown_gate
from .settings import REASON, Settings, command

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.queues import QueueInfo


@command("queues")
@click.argument("act", default="list", type=click.Choice(["list", "show", "set", "reset"]), metavar="[ACT]")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--concurrency", type=LIMIT, metavar="N", help="Runs that workers drive at once, or none.")
@click.option("--per-worker", type=LIMIT, metavar="N", help="Runs that one worker drives at once, or none.")
@click.option("--per-key", type=LIMIT, metavar="N", help="Runs of one key that have begun and not ended, or none.")
@click.option("--rate", type=RATE, metavar="N/SECONDS[/BURST]", help="How often runs begin, or none.")
@click.option("--max-waiting", type=LIMIT, metavar="N", help="Runs that may wait to begin, or none.")
@click.option("--when-full", type=click.Choice(["fail", "wait"]), help="What a start does in a full queue.")
@REASON
def queues(settings: Settings, *, act: str, name: str | None, reason: str, **options: Any) -> None:
    """List the queues with limits, or show, set or reset one.

    ACT is list, show, set or reset. A limit that is set holds until it is reset, even if the code declares another one.
    It holds within a second; a lower limit holds as places fall free.
    """
    from ..views import plain

    given = {option: None if value == "none" else value for option, value in options.items() if value is not None}
    if given and act != "set":
        raise click.UsageError(f"limits are given with set: keepstep queues set {name or 'NAME'} …")
    if act != "list" and name is None:
        raise click.UsageError(f"name the queue: keepstep queues {act} NAME")
    if act == "list":
        _list(settings, name)
        return
    if act == "set" and not given:
        raise click.UsageError("name a limit to set, for example --concurrency 10")

    async def change(engine: Engine) -> tuple[QueueInfo, list[QueueInfo]]:
        if act == "set":
            info = await engine.queues.set(name or "", reason=reason, **given)
        elif act == "reset":
            info = await engine.queues.reset(name or "", reason=reason)
        else:
            info = await engine.queues.get(name or "")
        return info, await engine.queues.list()

    info, known = settings.talk(change)
    settings.answer(plain.queue_data(info), lambda: _shown(info))
    if info.declared is None and not info.counts.driven and not info.counts.waiting and not settings.json:
        click.echo(unknown_gate("queue", info.name, (one.name for one in known)), err=True)


def _list(settings: Settings, name: str | None) -> None:
    from ..views import plain, wording
    from . import formatting

    async def look(engine: Engine) -> list[QueueInfo]:
        return [one for one in await engine.queues.list() if name in (None, one.name)]

    found = settings.look(look)

    def shown() -> str:
        if not found:
            return "no queue has limits; declare one with ks.Queue(...), or set some with keepstep queues set NAME"
        rows = [
            (one.name, str(one.counts.driven), str(one.counts.waiting), str(one.limits), wording.changed_by(one))
            for one in found
        ]
        return formatting.table(("QUEUE", "DRIVEN", "WAITING", "LIMITS", "FROM"), rows)

    settings.answer({"queues": [plain.queue_data(one) for one in found]}, shown)


def _shown(info: QueueInfo) -> str:
    from ..views import wording
    from . import formatting

    lines = [f"queue    {info.name}", f"limits   {info.limits}"]
    if info.is_set:
        lines.append(f"set by   {wording.changed_by(info)}; the code declares: {info.declared or 'nothing'}")
    lines.append(f"runs     {info.counts.driven} driven, {info.counts.waiting} waiting to begin")
    if info.counts.keys:
        lines.append(
            "keys     " + ", ".join(f"{formatting.one_line(key)} ({count})" for key, count in info.counts.keys)
        )
    return "\n".join([*lines, *log_table(info.log, _change)])


def _change(limits: dict[str, Any] | None) -> str:
    from ..policies.queue import Limits

    return "" if limits is None else str(Limits.of(limits))
