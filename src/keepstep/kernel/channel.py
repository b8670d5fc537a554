"""The keeper of a channel: it gathers notices, and starts one run that delivers them together."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from ..model import Status
from ..model.keepers import TELL, TELLS, channel_id, delivery_workflow
from ..model.signal import CANCEL, PAUSE, RESUME
from .keeper import MOST_SIGNALS, Message, Moment, Reaction, Start

#: Notices that a digest holds in full; all others are counted.
MOST_NOTICES = 20
#: Topics and workflows that a digest counts apart; others are counted together.
MOST_COUNTS = 50
#: How many times the gathering may be prolonged while notices come in faster than they are read.
MOST_PROLONGED = 6
#: Time after which a channel goes on without a delivery that has neither ended nor failed, such as one set aside.
LONGEST_DELIVERY = timedelta(hours=1)
#: Failed deliveries that a channel names, the newest ones.
MOST_FAILED = 5
_OTHERS = "…"


class Notice(msgspec.Struct, omit_defaults=True):
    """One notice: its topic, the run or service that it is about, and details in words."""

    topic: str
    about: str
    at: datetime
    workflow: str = ""
    text: str = ""


class Count(msgspec.Struct):
    """Number of notices of one topic about runs of one workflow."""

    topic: str
    workflow: str
    count: int


class ChannelState(msgspec.Struct, omit_defaults=True):
    """All that a channel knows: what it has gathered since when, and the delivery that has not ended."""

    name: str
    paused: bool = False
    since: datetime | None = None
    total: int = 0
    notices: list[Notice] = []
    counts: list[Count] = []
    open: str = ""
    opened_at: datetime | None = None
    #: Deliveries so far, which number their runs, and notices in those that have ended well.
    deliveries: int = 0
    delivered: int = 0
    #: Notices in the delivery that has not ended, and in all that did not end well.
    sent: int = 0
    undelivered: int = 0
    #: Deliveries that did not end well, and the newest of them.
    failures: int = 0
    failed: list[str] = []


_decode_state = msgspec.json.Decoder(ChannelState).decode


class ChannelKeeper:
    """Answers for one channel. The process that drives it gives the time for which notices are gathered."""

    version = 1
    payload = Any
    follows = False

    def __init__(self, gather_seconds: float) -> None:
        self._gather = timedelta(seconds=gather_seconds)

    def begin(self, given: Any, at: datetime) -> ChannelState:
        """Return the first state."""
        return msgspec.convert(given, ChannelState)

    def read(self, version: int, data: bytes) -> ChannelState:
        """Return a stored state."""
        return _decode_state(data)

    def watched(self, state: ChannelState) -> list[str]:
        """Return the delivery that has not ended; the next one waits for it."""
        return [state.open] if state.open else []

    def react(self, state: ChannelState, moment: Moment) -> Reaction:
        """Take new notices, and start a delivery if they were gathered for long enough."""
        result = Reaction(state)
        for message in moment.messages:
            self._take(state, message, moment, result)
        _follow_clock(state, moment.now)
        if state.open in moment.ended or _is_overdue(state, moment.now):
            _settle(state, ended_well=state.open in moment.ended and state.open not in moment.failed)
        result.paused = state.paused
        if result.end is not None or state.paused or state.since is None:
            return result
        due = state.since + self._gather
        is_over = moment.now >= due + (MOST_PROLONGED - 1) * self._gather
        if moment.now >= due and not state.open and (is_over or len(moment.messages) < MOST_SIGNALS):
            self._deliver(state, moment, result)
            return result
        # The end of a delivery wakes nobody who gathers, so it is looked for.
        result.wake_at = due if due > moment.now else moment.now + self._gather
        result.gathers = True
        return result

    def _take(self, state: ChannelState, message: Message, moment: Moment, result: Reaction) -> None:
        payload = message.payload if isinstance(message.payload, dict) else {}
        act = payload.get("act", "") if message.name == TELL else message.name
        if act == CANCEL:
            result.end = Status.CANCELLED
        elif act in (PAUSE, RESUME):
            state.paused = act == PAUSE
        elif act == "notice":
            notice = Notice(payload["topic"], payload["about"], message.at, payload["workflow"], payload["text"])
            if len(state.notices) < MOST_NOTICES:
                state.notices.append(notice)
            _add(state, notice.topic, notice.workflow, 1, moment.now)
        elif act == "more":
            for topic, workflow, count in payload["counts"]:
                _add(state, topic, workflow, count, moment.now)

    def _deliver(self, state: ChannelState, moment: Moment, result: Reaction) -> None:
        """Start the run that delivers all that was gathered, and forget it."""
        number = state.deliveries + 1
        workflow = delivery_workflow(state.name)
        while (run := f"{workflow}:{number}") in moment.taken:
            number += 1
        digest = {
            "channel": state.name,
            "number": number,
            "since": state.since,
            "until": moment.now,
            "total": state.total,
            "counts": state.counts,
            "notices": state.notices,
        }
        payload = msgspec.json.encode([[digest], {}])
        result.starts.append(Start(run, workflow, payload, {TELLS: channel_id(state.name)}))
        state.deliveries, state.sent = number, state.total
        state.open, state.opened_at = run, moment.now
        state.since, state.total, state.notices, state.counts = None, 0, [], []


def _add(state: ChannelState, topic: str, workflow: str, count: int, now: datetime) -> None:
    state.since = state.since or now
    state.total += count
    found = next((one for one in state.counts if (one.topic, one.workflow) == (topic, workflow)), None)
    if found is None and len(state.counts) >= MOST_COUNTS:
        topic = workflow = _OTHERS
        found = next((one for one in state.counts if one.topic == _OTHERS), None)
    if found is None:
        state.counts.append(Count(topic, workflow, count))
    else:
        found.count += count


def _follow_clock(state: ChannelState, now: datetime) -> None:
    """Bring times that lie ahead back to now. A clock that was set back would otherwise hold notices up."""
    if state.since is not None:
        state.since = min(state.since, now)
    if state.opened_at is not None:
        state.opened_at = min(state.opened_at, now)


def _settle(state: ChannelState, *, ended_well: bool) -> None:
    """Count the notices of the open delivery, and forget it."""
    if ended_well:
        state.delivered += state.sent
    elif state.open:
        state.undelivered += state.sent
        state.failures += 1
        state.failed = [*state.failed, state.open][-MOST_FAILED:]
    state.open, state.opened_at, state.sent = "", None, 0


def _is_overdue(state: ChannelState, now: datetime) -> bool:
    return state.opened_at is not None and now - state.opened_at > LONGEST_DELIVERY
