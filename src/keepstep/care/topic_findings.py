"""Findings of the doctor about topics: subscribers that do not read, and publishers that wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from shlex import quote

from ..kernel.topic import REPORT_AT, TopicState
from .queue_findings import Concern

#: Time for which a subscriber with many unread messages may read none before it is reported.
UNREAD = timedelta(minutes=10)
#: Time for which a publisher may wait for room before it is reported.
FULL = timedelta(minutes=1)


def topic_concerns(state: TopicState, now: datetime) -> Iterator[Concern]:
    """Yield the findings about one topic."""
    slow = [one for one in state.subscribers if state.published - one.read >= REPORT_AT]
    shows = f"keepstep topics show {quote(state.name)} names all"
    for one in slow:
        if one.read_at is not None and now - one.read_at > UNREAD:
            unread = state.published - one.read
            text = f"topic {state.name!r}: run {one.run} has {unread} unread messages, and has read none for 10 minutes"
            advice = f"keepstep show {quote(one.run)} tells what it waits for; {shows}"
            yield Concern("topic-unread", text, advice, (one.run,))
    waiting = [one for one in state.publishers if now - one.since > FULL]
    if waiting:
        runs = tuple(one.run for one in waiting)
        many = f"run {runs[0]} waits" if len(runs) == 1 else f"{len(runs)} runs wait"
        whom = f", because run {slow[0].run} does not read" if slow else ""
        text = f"topic {state.name!r} is full: {many} to publish{whom}"
        advice = f"let its subscribers read, or cancel the one that does not; {shows}"
        yield Concern("topic-full", text, advice, runs)
