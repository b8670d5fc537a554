"""The keeper of a topic: it passes each message to all subscribers in order, and lets publishers wait for slow ones."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from ..model import Status
from ..model.keepers import TELL
from ..model.signal import CANCEL, MESSAGES, PAUSE, RESUME, ROOM
from ..records.record import StoredError
from .keeper import Message, Moment, Reaction
from .waits import report

#: Messages that a subscriber may have unread, at most.
MOST_UNREAD = 1000
#: Unread messages of the slowest subscriber from which on publishers wait. One publish has at most the difference.
FULL_AT = 800
MOST_AT_ONCE = MOST_UNREAD - FULL_AT
#: Unread messages from which on a subscriber reports with each batch how far it has read, and the number of messages
#: after which it does so before.
REPORT_AT = FULL_AT // 2
REPORT_EVERY = 50
#: Subscribers of a topic at most: one commit sends a batch to each of them.
MOST_SUBSCRIBERS = 500
#: Seconds after which the keeper looks for slow subscribers that have ended, while publishers wait for them.
LOOK_SECONDS = 15.0


class Subscriber(msgspec.Struct, omit_defaults=True):
    """A run that gets the messages, by the id of its series, and the number of the last message that it has read."""

    id: str
    run: str
    read: int
    read_at: datetime | None = None


class Publisher(msgspec.Struct):
    """A run that waits until it may publish."""

    run: str
    since: datetime


class TopicState(msgspec.Struct, omit_defaults=True):
    """All that a topic knows: the number of its last message, the cursors of its subscribers, who waits for room."""

    name: str
    paused: bool = False
    published: int = 0
    #: Messages that came while nobody had subscribed.
    unheard: int = 0
    subscribers: list[Subscriber] = []
    publishers: list[Publisher] = []

    def unread(self) -> int:
        """Return the number of messages that the slowest subscriber has not read."""
        return max((self.published - one.read for one in self.subscribers), default=0)


class Act(msgspec.Struct, omit_defaults=True):
    """The payload of a signal to a topic: what to do, with a message, for a run, up to a number."""

    do: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")
    id: str = ""
    run: str = ""
    number: int = 0


class Batch(msgspec.Struct):
    """Messages on their way to a subscriber: the number of the first, and what was unread when they were sent."""

    first: int
    unread: int
    messages: list[msgspec.Raw]

    @property
    def last(self) -> int:
        """The number of the last message."""
        return self.first + len(self.messages) - 1


_encode = msgspec.json.Encoder().encode
_decode_state = msgspec.json.Decoder(TopicState).decode
batch_in = msgspec.json.Decoder(Batch).decode


class TopicKeeper:
    """Answers for one topic. The messages themselves are signals, so the state stays small."""

    version = 1
    payload = Act
    follows = True

    def begin(self, given: Any, at: datetime) -> TopicState:
        """Return the first state."""
        return msgspec.convert(given, TopicState)

    def read(self, version: int, data: bytes) -> TopicState:
        """Return a stored state."""
        return _decode_state(data)

    def watched(self, state: TopicState) -> list[str]:
        """Return the slow subscribers, if publishers wait for them: each may have ended."""
        slow = [one for one in state.subscribers if state.published - one.read >= REPORT_AT]
        return [one.run for one in slow] if state.publishers else []

    def react(self, state: TopicState, moment: Moment) -> Reaction:
        """Pass new messages on, move cursors, and let publishers go on while there is room."""
        return _Answer(state, moment).reaction()


class _Answer:
    def __init__(self, state: TopicState, moment: Moment) -> None:
        self._state, self._moment = state, moment
        self._first = state.published + 1
        self._messages: list[msgspec.Raw] = []
        self._joined: dict[str, int] = {}  # the last message before a new subscriber
        self._result = Reaction(state)

    def reaction(self) -> Reaction:
        state, result = self._state, self._result
        for message in self._moment.messages:
            self._take(message)
        state.subscribers = [one for one in state.subscribers if one.run not in self._moment.ended]
        self._deliver()
        result.unread = state.unread()
        if result.end is not None:
            return result
        self._let_publish(FULL_AT - result.unread)
        result.paused = result.gathers = state.paused
        if state.publishers and not state.paused:
            result.wake_at = self._moment.now + timedelta(seconds=LOOK_SECONDS)
        return result

    def _take(self, message: Message) -> None:
        act, state = message.payload, self._state
        if message.name == CANCEL:
            self._end()
        elif message.name in (PAUSE, RESUME):
            state.paused = message.name == PAUSE
        elif message.name == TELL and isinstance(act, Act):
            acts = {
                "publish": self._publish,
                "subscribe": self._subscribe,
                "leave": self._leave,
                "read": self._read,
                "wait": self._wait,
            }
            if act.do in acts:
                acts[act.do](act, message.at)

    def _publish(self, act: Act, _: datetime) -> None:
        self._state.published += 1
        self._messages.append(act.value)
        self._state.unheard += not self._state.subscribers

    def _leave(self, act: Act, _: datetime) -> None:
        self._state.subscribers = [one for one in self._state.subscribers if one.id != act.id]

    def _read(self, act: Act, at: datetime) -> None:
        for one in self._state.subscribers:
            if one.id == act.id and act.number > one.read:
                one.read, one.read_at = min(act.number, self._state.published), at

    def _wait(self, act: Act, at: datetime) -> None:
        publishers = self._state.publishers
        if all(one.run != act.run for one in publishers):
            publishers.append(Publisher(act.run, at))

    def _subscribe(self, act: Act, at: datetime) -> None:
        state = self._state
        known = next((one for one in state.subscribers if one.id == act.id), None)
        if known is not None:  # it goes on as another run
            known.run = act.run
        elif len(state.subscribers) >= MOST_SUBSCRIBERS:
            self._fail(act.run, f"topic {state.name!r} has {MOST_SUBSCRIBERS} subscribers already")
        else:
            state.subscribers.append(Subscriber(act.id, act.run, state.published, at))
            self._joined[act.id] = state.published

    def _deliver(self) -> None:
        """Send each subscriber the messages that came since it has subscribed, as one signal."""
        if not self._messages:
            return
        state, before = self._state, self._first - 1
        made: dict[tuple[int, int], msgspec.Raw] = {}
        for one in state.subscribers:
            joined = self._joined.get(one.id, before)
            if joined < state.published:
                key = joined, state.published - one.read
                if key not in made:
                    batch = Batch(joined + 1, key[1], self._messages[joined - before :])
                    made[key] = msgspec.Raw(_encode(batch))
                self._result.sends.append((one.run, f"{MESSAGES}{state.name}", made[key]))

    def _let_publish(self, room: int) -> None:
        """Wake as many publishers as there is room for, those that have waited longest first."""
        state = self._state
        if room > 0 and state.publishers:
            awake, state.publishers = state.publishers[:room], state.publishers[room:]
            self._result.sends += [(one.run, f"{ROOM}{state.name}", True) for one in awake]

    def _end(self) -> None:
        state = self._state
        for one in state.subscribers:
            self._fail(one.run, f"topic {state.name!r} was cancelled")
        self._let_publish(len(state.publishers))
        state.subscribers = []
        self._result.end = Status.CANCELLED

    def _fail(self, run: str, text: str) -> None:
        error = StoredError("keepstep.WaitFailed", text, "permanent")
        self._result.sends.append((run, f"{MESSAGES}{self._state.name}", msgspec.Raw(report(error))))


def act_of(name: str, **details: Any) -> bytes:
    """Return the payload of a signal to a topic."""
    return _encode(Act(name, **details))
