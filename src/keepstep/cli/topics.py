"""The command `topics`: lists topics, shows who has read how far, and publishes a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from . import errors
from .settings import Settings, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..engine.engine import Engine
    from ..engine.topics import TopicInfo


@command("topics")
@click.argument("act", default="list", type=click.Choice(["list", "show", "publish"]), metavar="[ACT]")
@click.argument("name", required=False, metavar="[NAME]")
@click.argument("message", required=False, metavar="[JSON]")
@click.option("--limit", type=click.IntRange(0), default=5, show_default=True, help="Newest messages to show.")
@click.option("--timeout", type=float, default=30.0, show_default=True, help="Seconds to wait while it is full.")
def topics(settings: Settings, *, act: str, name: str | None, message: str | None, limit: int, timeout: float) -> None:
    """List the topics of the store, show one, or publish a message.

    ACT is list, show or publish. A message is JSON. The first message creates the topic; it reaches the runs that
    have subscribed by then.
    """
    from .target import read_json

    if act != "list" and name is None:
        raise click.UsageError(f"name the topic: keepstep topics {act} NAME")
    if message is not None and act != "publish":
        raise click.UsageError(f"a message is given with publish: keepstep topics publish {name} JSON")
    if act == "list":
        _list(settings, name)
    elif act == "show":
        _show(settings, name or "", limit)
    elif message is None:
        raise click.UsageError(f"give a message as JSON: keepstep topics publish {name} JSON")
    else:
        value = read_json(message, "the message")
        settings.talk(lambda engine: engine.publish(name or "", value, timeout=timeout))
        settings.answer({"topic": name, "published": True}, f"published to {name}")


def _list(settings: Settings, name: str | None) -> None:
    from ..views import plain
    from . import formatting

    async def look(engine: Engine) -> list[TopicInfo]:
        return [one for one in await engine.topics.list() if name in (None, one.name)]

    found = settings.look(look)

    def shown() -> str:
        if not found:
            return "no topic; the first run that uses a ks.Topic(...) creates it"
        rows = [
            (
                one.name,
                one.status.value,
                str(one.published),
                str(len(one.subscribers)),
                str(one.unread),
                str(len(one.publishers)),
            )
            for one in found
        ]
        return formatting.table(("TOPIC", "STATE", "PUBLISHED", "SUBSCRIBERS", "UNREAD", "WAITING"), rows)

    settings.answer({"topics": [plain.topic_data(one) for one in found]}, shown)


def _show(settings: Settings, name: str, limit: int) -> None:
    from ..errors import RunNotFound
    from ..views import plain

    async def look(engine: Engine) -> tuple[TopicInfo, Sequence[bytes]]:
        try:
            return await engine.topics.get(name), await engine.topics.recent_raw(name, limit)
        except RunNotFound:
            known = ", ".join(one.name for one in await engine.topics.list())
            hint = f"known: {known}" if known else "the first run that uses a ks.Topic(...) creates it"
            raise errors.Refused(f"no topic {name!r}", hint, errors.NOT_FOUND) from None

    topic, recent = settings.look(look)
    settings.answer(plain.topic_data(topic, recent), lambda: _shown(topic, recent))


def _shown(topic: TopicInfo, recent: Sequence[bytes]) -> str:
    from ..views import plain
    from . import formatting

    lines = [
        formatting.facts(
            (
                ("topic", topic.name),
                ("published", f"{topic.published}, of which nobody had subscribed to {topic.unheard}"),
                ("unread", f"{topic.unread} by the slowest subscriber; from 800 on publishers wait"),
            )
        )
    ]
    if topic.subscribers:
        rows = [
            (
                one.run,
                "gone" if one.status is None else one.status.value,
                str(one.read),
                str(one.unread),
                formatting.ago(one.read_at),
            )
            for one in topic.subscribers
        ]
        lines += ["", formatting.table(("SUBSCRIBER", "STATUS", "READ", "UNREAD", "LAST READ"), rows)]
    if topic.publishers:
        waiting = [(one.run, formatting.ago(one.since)) for one in topic.publishers]
        lines += ["", formatting.table(("PUBLISHER", "WAITS SINCE"), waiting)]
    if recent:
        lines += ["", "newest messages", *(f"  {formatting.brief(plain.value_of(one), 100)}" for one in recent)]
    return "\n".join(lines)
