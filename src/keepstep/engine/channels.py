"""The channels of an engine: their keepers in the store, and the notices that its commits send them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError, StoreError
from ..kernel.channel import ChannelKeeper, ChannelState
from ..kernel.keeper import birth, newest_state
from ..model import FINISHED, Run, Status
from ..model.ids import new_id
from ..model.keepers import channel_id, channel_name, channel_workflow, is_reserved
from ..model.notices import Topic, more_to, notice_to
from ..ports import Send, Verdict, instant
from ..values import Secret
from ..workflows.channel import CHANNELS, Channel
from .declaring import all_keepers

if TYPE_CHECKING:
    from .process import Process

log = logging.getLogger("keepstep")

#: Notices that a process sends one by one in each span of time; others are counted, and their numbers sent together.
#: This bounds the load that many failing runs put on a channel.
MOST_SENT = 100
SPAN_SECONDS = 5.0
#: Seconds for which a channel is told once about the breaker of a service, which opens again after each failed probe.
AGAIN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ChannelInfo:
    """A channel as it is now.

    `declared` tells whether this process declares it, and `attended` whether a living worker does: without one, its
    notices wait. `gathered` counts the notices that wait, `delivered` those that have been delivered, and
    `undelivered` those in deliveries that did not end well. `deliveries` counts all that were started, `failures` those
    that did not end well, and `failed` names the newest of these. `open` is the run of the delivery that has not ended,
    or empty.
    """

    name: str
    status: Status
    declared: bool
    attended: bool
    gathered: int
    delivered: int
    deliveries: int
    open: str = ""
    undelivered: int = 0
    failures: int = 0
    failed: tuple[str, ...] = ()


class Channels:
    """The channels of a store."""

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        self._span_ends = 0.0
        self._sent = 0
        self._left_out: Counter[tuple[str, Topic, str]] = Counter()

    # -- for the engine ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Create the keepers of the channels that this process has declared, unless they exist."""
        for channel in list(CHANNELS.values()):
            _check_secrets(channel)
            await self._create(channel)

    async def _create(self, channel: Channel) -> None:
        engine, run_id = self._engine, channel_id(channel.name)
        run = await engine.stored_run(run_id)
        if run is not None and run.status not in FINISHED:
            return
        engine.encryption.check_writing()
        given = {"name": channel.name}
        at = instant(engine.clock.now())
        over = None if run is None else run.epoch  # it was cancelled before
        workflow = channel_workflow(channel.name)
        create = birth(engine, run_id, workflow, given, actor=engine.actor, at=at, over=over, waits=True)
        await engine.journal.write(create)  # another process may have been faster

    def notices(self, topic: Topic, run: Run, *, text: str, key: str, at: datetime | None) -> list[Send]:
        """Return the signals with which a commit also tells channels about a run; none for Keepstep's own runs."""
        if is_reserved(run.workflow):
            return []
        return self._sends(topic, run.id, workflow=run.workflow, text=text, key=key, at=at)

    def breaker_opened(self, service: str) -> None:
        """Tell channels in the background about a breaker that this process has opened."""
        now = self._engine.clock.now()
        key = f"{now // AGAIN_SECONDS:.0f}"
        text = f"the breaker of service {service} has opened: calls have failed too often"
        for send in self._sends("breaker", service, text=text, key=key, at=instant(now)):
            self._engine.background(self._write(send))

    def _sends(
        self, topic: Topic, about: str, *, workflow: str = "", text: str, key: str, at: datetime | None
    ) -> list[Send]:
        names = [channel.name for channel in tuple(CHANNELS.values()) if topic in channel.on]
        if not names:
            return []
        now = self._engine.loop.time()
        if now >= self._span_ends:
            self._span_ends, self._sent = now + SPAN_SECONDS, 0
        self._sent += 1
        if self._sent <= MOST_SENT:
            text = self._engine.redaction.redact(text)
            made = (notice_to(name, topic, about, workflow=workflow, text=text, key=key, at=at) for name in names)
            return [Send(signal, optional=True) for signal in made]
        if not self._left_out:
            self._engine.loop.call_later(self._span_ends - now, self._send_rest, context=self._engine.context)
        self._left_out.update((name, topic, workflow) for name in names)
        return []

    def _send_rest(self) -> None:
        if not self._engine.closed:
            for send in self._rest():
                self._engine.background(self._write(send))

    def _rest(self) -> list[Send]:
        """Return the signals with the numbers of notices that were left out."""
        counts: dict[str, list[tuple[str, str, int]]] = {}
        for (name, topic, workflow), count in self._left_out.items():
            counts.setdefault(name, []).append((topic, workflow, count))
        self._left_out.clear()
        at = instant(self._engine.clock.now())
        return [Send(more_to(name, some, new_id("notices"), at), optional=True) for name, some in counts.items()]

    async def close(self) -> None:
        """Send the numbers of notices that were left out and not yet sent."""
        for send in self._rest():
            await self._write(send)

    async def _write(self, send: Send) -> None:
        try:
            answer = await self._engine.journal.write(send)
        except StoreError as error:
            self._engine.outage.log(f"a notice to {send.signal.run} is lost", error)
            return
        if answer.verdict not in (Verdict.DONE, Verdict.EXISTS):
            log.warning("a notice to %s is lost: %s", send.signal.run, answer.verdict)

    # -- for people ----------------------------------------------------------------------------------------------------

    async def list(self) -> list[ChannelInfo]:
        """Return the channels of the store, by name. Those that cannot be read here are left out."""
        engine = self._engine
        workers = await engine.call(engine.store.list_workers)
        served = {one for worker in workers if worker.claims for one in worker.workflows}
        found = []
        for run in await all_keepers(engine):
            name = channel_name(run.id)
            if name is not None and run.status not in FINISHED:
                try:
                    state = await channel_state(engine, run)
                except StoreError as error:
                    log.warning("channel %s cannot be read: %s", name, error)
                    continue
                found.append(_info(name, run, state, served))
        return sorted(found, key=lambda one: one.name)

    async def test(self, name: str, text: str = "this is a test") -> None:
        """Send a channel a notice of the topic `test`, which is delivered like any other."""
        at = instant(self._engine.clock.now())
        signal = notice_to(name, "test", "keepstep", text=text, key=new_id("notice"), at=at)
        answer = await self._engine.journal.write(Send(signal))
        if answer.error is not None:
            raise answer.error
        if answer.verdict is not Verdict.DONE:
            raise DefinitionError(f"no channel {name!r}: a worker whose code declares ks.Channel({name!r}) creates it")


def _check_secrets(channel: Channel) -> None:
    """Log the secrets of a channel that cannot be looked up here: its deliveries would fail."""
    for secret in (channel.webhook, channel.secret):
        if isinstance(secret, Secret):
            try:
                secret.reveal()
            except Exception as error:  # noqa: BLE001 - a resolver of the program may raise anything
                log.warning(
                    "channel %r cannot deliver notices from here: %s; set the secret, and start this worker again",
                    *(channel.name, error),
                )


async def channel_state(engine: Any, run: Run) -> ChannelState:
    """Return the newest state of a channel."""
    state: ChannelState
    state, _ = await newest_state(engine, run, ChannelKeeper(1.0))
    return state


def _info(name: str, run: Run, state: ChannelState, served: Iterable[str]) -> ChannelInfo:
    return ChannelInfo(
        name,
        run.status,
        name in CHANNELS,
        channel_workflow(name) in set(served),
        state.total,
        state.delivered,
        state.deliveries,
        state.open,
        state.undelivered,
        state.failures,
        tuple(state.failed),
    )
