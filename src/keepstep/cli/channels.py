"""The command `channels`: lists the channels that tell people about runs, and tests one."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

import click

from . import errors
from .settings import Settings, command

if TYPE_CHECKING:
    from ..engine.channels import ChannelInfo
    from ..engine.engine import Engine


@command("channels")
@click.argument("act", default="list", type=click.Choice(["list", "test"]), metavar="[ACT]")
@click.argument("name", required=False, metavar="[NAME]")
@click.argument("text", required=False, metavar="[TEXT]")
def channels(settings: Settings, *, act: str, name: str | None, text: str | None) -> None:
    """List the channels of the store, or test one.

    ACT is list or test. A test sends the channel a notice, with a TEXT if one is given; a worker whose code declares
    the channel delivers it.
    """
    from ..views import plain
    from . import formatting

    if act == "test":
        if name is None:
            raise click.UsageError("name the channel: keepstep channels test NAME")
        chosen = name

        async def send(engine: Engine) -> None:
            known = [one.name for one in await engine.channels.list()]
            if chosen not in known:
                hint = f"known: {', '.join(known)}" if known else "a worker whose code has ks.Channel(...) creates it"
                raise errors.Refused(f"no channel {chosen!r}", hint, errors.NOT_FOUND)
            await engine.channels.test(chosen, *(() if text is None else (engine.redaction.redact(text),)))

        settings.talk(send)
        settings.answer({"channel": name, "sent": True}, f"sent; its worker delivers the notice to {name} in a moment")
        return

    if text is not None:
        raise click.UsageError("only a test has a text: keepstep channels test NAME TEXT")

    async def look(engine: Engine) -> list[ChannelInfo]:
        return [one for one in await engine.channels.list() if name in (None, one.name)]

    found = settings.look(look)

    def shown() -> str:
        if not found:
            return "no channel; declare one with ks.Channel(...) in the code of a worker"
        rows = [
            (one.name, _state(one), str(one.gathered), str(one.delivered), str(one.undelivered), one.open or "-")
            for one in found
        ]
        table = formatting.table(("CHANNEL", "STATE", "GATHERED", "DELIVERED", "UNDELIVERED", "UNDER WAY"), rows)
        return "\n".join([table, *(_failed(one) for one in found if one.failures)])

    settings.answer({"channels": [plain.channel_data(one) for one in found]}, shown)


def _state(channel: ChannelInfo) -> str:
    return channel.status.value if channel.attended else "no worker declares it"


def _failed(channel: ChannelInfo) -> str:
    last = channel.failed[-1]
    many = "1 delivery has" if channel.failures == 1 else f"{channel.failures} deliveries have"
    return (
        f"{channel.name}: {many} failed, last {last}; keepstep show {quote(last)} tells why, and keepstep retry "
        f"{quote(last)} delivers its notices"
    )
