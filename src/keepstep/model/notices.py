"""Notices: what channels tell people about, and the signals with which a commit tells a channel."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, get_args

from .keepers import TELL, channel_id
from .signal import Signal

Topic = Literal["failed", "set_aside", "in_doubt", "waiting", "breaker"]

#: Topic of a notice: the run failed; was set aside; holds a step in doubt; waits for a signal; a breaker has opened.
TOPICS: tuple[Topic, ...] = get_args(Topic)
#: Topics of a channel that names none. Waits are left out, because many are not for people.
DEFAULT_TOPICS: tuple[Topic, ...] = ("failed", "set_aside", "in_doubt", "breaker")
#: Characters of a text in a notice, such as the message of an error.
MOST_TEXT = 500


def notice_to(
    channel: str, topic: str, about: str, *, workflow: str = "", text: str = "", key: str = "", at: datetime | None
) -> Signal:
    """Return the signal that tells a channel about a run or a service, named `about`.

    A channel keeps one signal for each `key`, so a commit that is made again tells nothing twice.
    """
    notice = {"topic": topic, "about": about, "workflow": workflow, "text": text[:MOST_TEXT]}
    return _signal(channel, {"act": "notice", **notice}, f"{topic}:{about}:{key}", at)


def more_to(channel: str, counts: list[tuple[str, str, int]], key: str, at: datetime | None) -> Signal:
    """Return the signal with the numbers of notices that were left out, each by topic and workflow."""
    return _signal(channel, {"act": "more", "counts": counts}, f"more:{key}", at)


def _signal(channel: str, payload: dict[str, Any], key: str, at: datetime | None) -> Signal:
    import json  # noqa: PLC0415 - only with a channel

    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return Signal(channel_id(channel), TELL, text.encode("utf-8", "replace"), key, "keepstep", at)
