"""The topics of a store, for people and programs: publish a message, see who has read how far, and who waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from ..checks import seconds_of
from ..errors import CheckpointCorrupt, RunNotFound, StoreError, TimedOut
from ..kernel.keeper import newest_state
from ..kernel.messages import Topic, checked_messages, create_keeper
from ..kernel.topic import FULL_AT, Act, TopicKeeper, TopicState, act_of
from ..model import FINISHED, Run, Signal, Status
from ..model.ids import new_id
from ..model.keepers import TELL, TOPIC_WORKFLOW, topic_id, topic_name
from ..ports import Answer, Send, Verdict, instant
from ..values import VALUES
from .declaring import all_keepers

if TYPE_CHECKING:
    from .process import Process

log = logging.getLogger("keepstep")

#: Signals that are looked through at most for the newest messages.
MOST_LOOKED_AT = 1000


@dataclass(frozen=True, slots=True)
class SubscriberInfo:
    """A subscriber of a topic: its run and that run's status, the number of the last message that it has read.

    A subscriber tells the topic about every fiftieth message that it reads, and more often when many are unread.
    """

    run: str
    status: Status | None
    read: int
    unread: int
    read_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class PublisherInfo:
    """A run that waits until it may publish."""

    run: str
    since: datetime


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as it is now. `published` is the number of its last message, `unread` counts those not read by all.

    `unheard` counts the messages that came while nobody had subscribed.
    """

    name: str
    status: Status
    published: int
    unread: int
    unheard: int = 0
    subscribers: tuple[SubscriberInfo, ...] = ()
    publishers: tuple[PublisherInfo, ...] = ()


class Topics:
    """The topics of a store."""

    def __init__(self, engine: Process) -> None:
        self._engine = engine

    async def publish(self, name: str, *values: Any, timeout: float | timedelta | None = None) -> None:  # noqa: ASYNC109
        """Publish messages, at most 200. While a subscriber has 800 unread ones, wait, or raise `TimedOut`."""
        engine, seconds = self._engine, seconds_of(timeout)
        Topic(name)  # checks the name
        data = [await engine.encode(value, "message", name, "message to topic") for value in checked_messages(values)]
        await engine.encryption.check_sending(engine, topic_id(name))
        at, key = instant(engine.clock.now()), new_id("message")
        signals = [
            Signal(topic_id(name), TELL, act_of("publish", value=msgspec.Raw(one)), f"{key}:{place}", engine.actor, at)
            for place, one in enumerate(data)
        ]
        try:
            async with asyncio.timeout(seconds):
                await self._send(name, signals)
        except TimeoutError:
            raise TimedOut(
                f"topic {name!r} has a subscriber with {FULL_AT} unread messages, for over {seconds:g} s; "
                f"see who: keepstep topics show {name}",
                topic_id(name),
            ) from None

    async def _send(self, name: str, signals: Sequence[Signal]) -> None:
        engine, run_id = self._engine, topic_id(name)
        with engine.waiting.reader(run_id) as reader:
            while signals:
                sends = (engine.journal.write(Send(signal, room=FULL_AT)) for signal in signals)
                answers: list[Answer] = await asyncio.gather(*sends)  # all in one commit, and accepted up to the first
                for answer in answers:
                    if answer.error is not None:
                        raise answer.error
                done = (Verdict.DONE, Verdict.EXISTS)
                refused = [place for place, answer in enumerate(answers) if answer.verdict not in done]
                engine.signalled(run_id)
                signals = [signals[place] for place in refused]
                if not signals:
                    return
                if answers[refused[0]].verdict is Verdict.FULL:
                    while await self._is_full(run_id):
                        await reader.changed()
                else:
                    engine.encryption.check_writing()
                    await create_keeper(engine, run_id, TOPIC_WORKFLOW, {"name": name}, engine.actor)

    async def _is_full(self, run_id: str) -> bool:
        run = await self._engine.stored_run(run_id)
        return run is not None and run.status not in FINISHED and run.signals - (run.signals_read or 0) >= FULL_AT

    async def list(self) -> Sequence[TopicInfo]:
        """Return all topics, by name, with their subscribers. Those that cannot be read here are left out."""
        found = []
        for run in await all_keepers(self._engine):
            name = topic_name(run.id)
            if name is not None and run.status not in FINISHED:
                try:
                    found.append(await self._info(name, run))
                except StoreError as error:
                    log.warning("topic %s cannot be read: %s", name, error)
        return sorted(found, key=lambda one: one.name)

    async def get(self, name: str) -> TopicInfo:
        """Return one topic, with its subscribers and the publishers that wait."""
        run = await self._engine.stored_run(topic_id(name))
        if run is None or run.status in FINISHED:
            raise await self._not_found(name)
        return await self._info(name, run)

    async def recent(self, name: str, limit: int = 10) -> Sequence[Any]:
        """Return the newest messages that are still stored, the oldest of them first."""
        return [VALUES.decode(one, "message") for one in await self.recent_raw(name, limit)]

    async def recent_raw(self, name: str, limit: int = 10) -> Sequence[bytes]:
        """Return the newest messages as stored, for a reader without their types."""
        run = await self._engine.stored_run(topic_id(name))
        if run is None or run.status in FINISHED:
            raise await self._not_found(name)
        after = max(run.signals - MOST_LOOKED_AT, run.signals_from - 1, 0)
        found: list[bytes] = []
        while signals := await self._engine.signals(run.id, after):
            after = signals[-1].seq
            found += [bytes(value) for one in signals if (value := _message(one)) is not None]
        return found[-limit:] if limit > 0 else []

    async def _info(self, name: str, run: Run) -> TopicInfo:
        state: TopicState
        state, _ = await newest_state(self._engine, run, TopicKeeper())
        subscribers = tuple(
            [
                SubscriberInfo(one.run, await self._status(one.run), one.read, state.published - one.read, one.read_at)
                for one in state.subscribers
            ]
        )
        publishers = tuple(PublisherInfo(one.run, one.since) for one in state.publishers)
        return TopicInfo(name, run.status, state.published, state.unread(), state.unheard, subscribers, publishers)

    async def _status(self, run_id: str) -> Status | None:
        try:
            run = await self._engine.newest_of_series(run_id)
        except CheckpointCorrupt:
            return None
        return None if run is None else run.status

    async def _not_found(self, name: str) -> RunNotFound:
        known = ", ".join(one.name for one in await self.list()) or "none"
        return RunNotFound(f"no topic {name!r} in {self._engine.store.url}; there are: {known}", topic_id(name))


def _message(signal: Signal) -> msgspec.Raw | None:
    """Return the message that a signal to a topic publishes, or None."""
    try:
        found = msgspec.json.decode(signal.payload, type=Act) if signal.name == TELL else None
    except msgspec.ValidationError:
        return None
    return found.value if found is not None and found.do == "publish" else None
