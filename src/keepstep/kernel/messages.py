"""Topics in the code of workflows: publishing, subscribing, and reading messages in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

import msgspec

from ..checks import check_id, check_name
from ..errors import DefinitionError, StepFailed, StoreError
from ..model import FINISHED, Kind, Outcome, Signal
from ..model.ids import new_id
from ..model.keepers import TELL, TOPIC_WORKFLOW, topic_id
from ..model.series import first_of
from ..model.signal import MESSAGES, ROOM
from ..ports import Answer, Send, Verdict, instant
from ..records.data import SignalData, StepCompletedData, data_of, new_data
from ..records.record import Record, StoredError
from ..values import VALUES
from ..workflows.call import Call
from .asking import encoded
from .call_states import ContinueAs, Detached
from .calls import Branch, DurableCall, Task, current_branch
from .keeper import birth
from .topic import FULL_AT, MOST_AT_ONCE, REPORT_AT, REPORT_EVERY, Batch, act_of, batch_in
from .waits import MISSING, SignalCall, reported_in, timeout_seconds

T = TypeVar("T")


class KeeperCall(DurableCall[T]):
    """A call that sends signals to a keeper, in one commit, and creates the keeper if there is none."""

    __slots__ = ("keeper",)

    #: The workflow of the keeper.
    workflow = TOPIC_WORKFLOW
    #: Whether a keeper that has ended needs not be told, so that none is created for it.
    optional = False

    def __init__(self, branch: Branch, call: str, digest: str, keeper: str) -> None:
        self.keeper = keeper
        super().__init__(branch, call, digest)

    def payloads(self) -> Sequence[bytes]:
        """Return the payloads of the signals."""
        raise NotImplementedError

    def begin_live(self) -> None:
        self.write(self.payloads())

    def write(self, payloads: Sequence[bytes], value: bytes | None = None, room: int | None = None) -> None:
        """Write the record of the call with this value, and the signals."""
        run = self.run
        key, sender, at = f"{run.id}:{self.key}:{run.generation}", f"run {run.id}", run.time()
        sends = [
            Send(Signal(self.keeper, TELL, payload, f"{key}:{number}", sender, at), self.optional, room)
            for number, payload in enumerate(payloads)
        ]
        record = self.record(Kind.STEP_COMPLETED, value, attempt=1, data=new_data(StepCompletedData, to=self.keeper))
        again = partial(self.write, payloads, value, room)
        run.append_special(record, {"sends": sends}, self._sent, partial(self._refused, again), self)

    def _sent(self, _: Answer) -> None:
        self.run.host.signalled(self.keeper)

    def _refused(self, again: partial[None], answer: Answer) -> None:
        if answer.verdict in (Verdict.NOT_FOUND, Verdict.FINISHED):
            self.run.host.background(self._create(again))
        elif answer.verdict is Verdict.FULL:
            self.full()
        else:
            kind = "StoreError" if answer.error is None else type(answer.error).__name__
            error = StoredError(
                f"keepstep.{kind}", f"{answer.error or answer.verdict}", "permanent", id=new_id("error")
            )
            failed = Outcome.FAILURE.value
            self.run.append(self.record(Kind.STEP_FAILED, outcome=failed, attempt=1, error=error), self)

    def full(self) -> None:
        """Go on without sending: the keeper has no room."""

    def given(self) -> Any:
        """Return the first state of a new keeper."""
        raise NotImplementedError

    async def _create(self, again: partial[None]) -> None:
        run, host = self.run, self.run.host
        run.work_began()  # the run must not be parked before the answer
        try:
            await create_keeper(host, self.keeper, self.workflow, self.given(), f"run {run.id}")
            if not run.stop.detached:
                again()
        except StoreError as error:
            run.halt(error)
        finally:
            run.work_ended()
            run.watch()

    def failure(self, record: Record) -> BaseException:
        error = record.error
        info = None if error is None else error.info()
        return StepFailed("" if error is None else error.message, self.key, info, record.seq)


async def create_keeper(host: Any, keeper: str, workflow: str, given: Any, actor: str) -> None:
    """Create a keeper, or a new one in place of one that has ended. Another process may have been faster."""
    run = await host.stored_run(keeper)
    if run is not None and run.status not in FINISHED:
        return
    at, over = instant(host.clock.now()), None if run is None else run.epoch
    await host.journal.write(birth(host, keeper, workflow, given, actor=actor, at=at, over=over, waits=True))


class TopicCall(KeeperCall[T]):
    """A call that sends signals to a topic."""

    __slots__ = ("topic",)

    def __init__(self, branch: Branch, verb: str, topic: str, digest: str = "") -> None:
        self.topic = topic
        super().__init__(branch, f"topic.{verb}:{topic}", digest, topic_id(topic))

    def given(self) -> Any:
        return {"name": self.topic}

    @property
    def subscriber(self) -> str:
        """The id under which the run subscribes: that of its series."""
        return first_of(self.run.run)


class PublishCall(TopicCall[bool]):
    """Messages to a topic in one commit. It is false if there is no room; the run is then told when there is."""

    __slots__ = ("messages",)

    def __init__(self, branch: Branch, topic: str, messages: Sequence[bytes]) -> None:
        self.messages = messages
        super().__init__(branch, "publish", topic, VALUES.digest(tuple(messages), "message"))

    def begin_live(self) -> None:
        self.write([act_of("publish", value=msgspec.Raw(one)) for one in self.messages], b"true", FULL_AT)

    def full(self) -> None:
        self.write([act_of("wait", run=self.run.id)], b"false")


class RoomCall(SignalCall):
    """The wait until a topic has room."""

    __slots__ = ()

    def __init__(self, branch: Branch, topic: str) -> None:
        super().__init__(branch, f"{ROOM}{topic}", None, MISSING, call=f"topic.room:{topic}")


class SubscribeCall(TopicCall[str]):
    """The subscription of a run. Its value is the id of the run, by which a fork sees that it is not its own."""

    __slots__ = ()

    def begin_live(self) -> None:
        self.write([act_of("subscribe", id=self.subscriber, run=self.run.id)], msgspec.json.encode(self.run.id))


class LeaveCall(TopicCall[None]):
    """The end of a subscription."""

    __slots__ = ()

    optional = True

    def payloads(self) -> Sequence[bytes]:
        return [act_of("leave", id=self.subscriber)]


class BatchCall(SignalCall):
    """The wait for the next messages. The commit of its record also tells the topic how far the run has read."""

    __slots__ = ("messages",)

    def __init__(self, branch: Branch, messages: Messages, seconds: float | None, default: Any = MISSING) -> None:
        self.messages = messages
        name = messages.topic.name
        super().__init__(branch, f"{MESSAGES}{name}", seconds, default, call=f"topic.next:{name}")

    @property
    def subject(self) -> str:
        return f"message of topic {self.messages.topic.name!r}"

    def begin_live(self) -> None:
        run, messages = self.run, self.messages
        if messages.subscribed_by != run.id:  # it was forked from the subscriber
            messages.subscribed_by = run.id
            subscribe = act_of("subscribe", id=first_of(run.run), run=run.id)
            self._tell(None, subscribe, f"{run.id}:subscribe:{run.generation}")
        super().begin_live()

    def _tell(self, record: Record | None, payload: bytes, signal_id: str) -> None:
        """Write a record, and tell the topic something in the same commit."""
        run, keeper = self.run, topic_id(self.messages.topic.name)
        signal = Signal(keeper, TELL, payload, signal_id, f"run {run.id}", run.time())
        change: dict[str, Any] = {"sends": [Send(signal, optional=True)]}
        if record is None:
            change["progress"] = False

        def sent(_: Answer) -> None:
            run.host.signalled(keeper)

        def refused(_: Answer) -> None:  # the topic cannot be told here, because its key is missing
            if record is not None:
                run.append(record, self)

        run.append_special(record, change, sent, refused, None if record is None else self)

    def _come(self, signal: Signal) -> None:
        if reported_in(signal.payload) is not None:
            super()._come(signal)
            return
        batch, messages = batch_in(signal.payload), self.messages
        self.received = signal
        record = self.record(
            Kind.SIGNAL, signal.payload, data=new_data(SignalData, signal=signal.seq, sender=signal.sender)
        )
        if batch.last - messages.reported < REPORT_EVERY and batch.unread < REPORT_AT:
            self.run.append(record, self)
            return
        messages.reported = batch.last
        run = self.run
        payload = act_of("read", id=first_of(run.run), number=batch.last)
        self._tell(record, payload, f"{run.id}:{self.key}:{run.generation}")

    def decode(self, record: Record) -> list[Any]:
        batch = batch_in(bytes(record.value))  # type: ignore[arg-type]
        self.messages.newest = batch, data_of(record, SignalData).get("signal", 0)
        decode = self.run.workflow.reach.decode
        return [decode(bytes(one), self.subject) for one in batch.messages]


class Messages:
    """The messages of a topic for one run, in order, each once: a loop over them, or one at a time."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        #: The batch that was read last, and the number of its signal.
        self.newest: tuple[Batch, int] | None = None
        #: The run that has subscribed, and the last number that it has reported to the topic.
        self.subscribed_by = ""
        self.reported = 0
        self._read: deque[Any] = deque()
        self._is_awaited = False

    def next(self, timeout: float | timedelta | None = None, default: Any = MISSING) -> Call[Any]:
        """Wait for the next message. After the timeout it raises `TimedOut`, or returns `default` if given."""
        branch = current_branch("Topic.subscribe")
        return Task(branch, self._next(timeout_seconds(timeout), default))

    async def _next(self, seconds: float | None, default: Any) -> Any:
        while not self._read:
            none = object()
            found = await self._await(seconds, MISSING if default is MISSING else none)
            if found is none:
                return default
            self._read.extend(found)
        return self._read.popleft()

    async def _await(self, seconds: float | None, default: Any) -> Any:
        """Wait for a batch. Of two tasks that wait, one would get all of it, and the other would wait on."""
        if self._is_awaited:
            raise DefinitionError(
                f"messages of topic {self.topic.name!r} are awaited by another task of this run; read them in one task"
            )
        self._is_awaited = True
        try:
            return await BatchCall(current_branch("Topic.subscribe"), self, seconds, default)
        finally:
            self._is_awaited = False

    def batch(self, timeout: float | timedelta | None = None, default: Any = MISSING) -> Call[list[Any]]:
        """Wait for messages, and return all that have come together, as a list."""
        branch = current_branch("Topic.subscribe")
        return Task(branch, self._batch(timeout_seconds(timeout), default))

    async def _batch(self, seconds: float | None, default: Any) -> Any:
        if not self._read:
            return await self._await(seconds, default)
        found = list(self._read)
        self._read.clear()
        return found

    def pass_on(self) -> None:
        """Make the messages that were read with others, and not given to the code, unread for the next run."""
        if self.newest is not None and self._read:
            batch, seq = self.newest
            rest = Batch(batch.last - len(self._read) + 1, batch.unread, batch.messages[-len(self._read) :])
            run = current_branch("Topic.subscribe").run
            signal = Signal(run.id, f"{MESSAGES}{self.topic.name}", msgspec.json.encode(rest), seq=seq)
            code = run.thread.here()
            if code is None:
                run.inbox.add(signal)
            else:
                code.ask(partial(run.inbox.add, signal))

    def __aiter__(self) -> Self:
        """Iterate over the messages as they come, without an end."""
        return self

    async def __anext__(self) -> Any:
        return self._read.popleft() if self._read else await self._next(None, MISSING)

    def __iter__(self) -> Self:
        """Iterate over the messages in plain code."""
        return self

    def __next__(self) -> Any:
        return self._read.popleft() if self._read else self.next().result()


class Subscription:
    """A block of code in which a run gets the messages of a topic; use it with `async with` or, in plain code, `with`.

    The messages count from the beginning of the block. At its end the run gets no more, unless it continues as another
    run: that one subscribes again and goes on where this one was.
    """

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._messages = Messages(topic)

    def _subscribe(self) -> SubscribeCall:
        return SubscribeCall(current_branch("Topic.subscribe"), "subscribe", self._topic.name)

    def _leave(self, kind: type[BaseException] | None) -> LeaveCall | None:
        """Return the call that ends the subscription; None if the run goes on elsewhere."""
        if kind is not None and issubclass(kind, ContinueAs):
            self._messages.pass_on()
            return None
        if kind is not None and issubclass(kind, Detached):
            return None
        return LeaveCall(current_branch("Topic.subscribe"), "leave", self._topic.name)

    async def __aenter__(self) -> Messages:
        self._messages.subscribed_by = await self._subscribe()
        return self._messages

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        call = self._leave(kind)
        if call is not None:
            await call

    def __enter__(self) -> Messages:
        self._messages.subscribed_by = self._subscribe().result()
        return self._messages

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        call = self._leave(kind)
        if call is not None:
            call.result()


class Topic:
    """A named topic: each message that a run publishes reaches all runs that have subscribed, in order and once.

    The first publisher or subscriber creates it. A subscriber gets the messages from its subscription on.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        check_id(topic_id(check_name(name, "topic")), "topic name")
        self.name = name

    def publish(self, *values: Any) -> Call[None]:
        """Publish messages in one commit, at most 200. While a subscriber has 800 unread ones, it waits durably."""
        branch = current_branch("Topic.publish")
        messages = [encoded(branch.run, value, self.name, "message to topic") for value in checked_messages(values)]
        return Task(branch, self._publish(messages))

    async def _publish(self, messages: Sequence[bytes]) -> None:
        while not await PublishCall(current_branch("Topic.publish"), self.name, messages):
            await RoomCall(current_branch("Topic.publish"), self.name)

    def subscribe(self) -> Subscription:
        """Subscribe to the messages: `async with topic.subscribe() as messages: async for message in messages: ...`."""
        return Subscription(self)

    def __repr__(self) -> str:
        return f"ks.Topic({self.name!r})"


def checked_messages(values: Sequence[Any]) -> Sequence[Any]:
    """Return the messages of one publish, or raise a clear error."""
    if not values:
        raise DefinitionError("publish needs a message; give at least one value")
    if len(values) > MOST_AT_ONCE:
        raise DefinitionError(
            f"publish takes at most {MOST_AT_ONCE} messages at once, got {len(values):,}; publish them in parts"
        )
    return values
