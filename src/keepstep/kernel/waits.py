"""Durable waits: for a time, for a signal, or until a block of code has taken too long."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import msgspec

from ..checks import check_name, seconds_of
from ..errors import DefinitionError, KeepstepError, NotSerializable, StepFailed, TimedOut, WaitFailed
from ..model import Kind, Outcome, Signal
from ..model.ids import new_id
from ..model.signal import BEAT, REPLY, RESERVED
from ..model.text import one_line
from ..ports import Answer, Verdict, instant
from ..records.data import ReplyData, SignalData, data_of, new_data
from ..records.record import FORMAT_WITH_WAITS, Record, StoredError
from ..values import VALUES
from ..workflows.call import Call
from ..workflows.options import LONGEST_SECONDS
from ..workflows.schema import as_written, values_for
from .call_states import ASKED, CANCELLED, DONE, NEW
from .calls import Branch, DurableCall, current_branch
from .failure_point import mark_outcome
from .inbox import Wait
from .publish import note
from .wakeups import add_wait, end_wait, put_back, read_again

if TYPE_CHECKING:
    from .code_thread import Code

T = TypeVar("T")
U = TypeVar("U")

log = logging.getLogger("keepstep")

#: Stands for a default that was not given.
MISSING: Any = object()


def digest_of(seconds: float | None) -> str:
    """Return the digest of a time to wait: with six digits if they are exact, as in older versions."""
    if seconds is None:
        return ""
    short = f"{seconds:g}"
    return short if float(short) == seconds else repr(seconds)


class TimedCall(DurableCall[T]):
    """A call that may wait for `seconds`, counted from the moment of the call; None means forever.

    That moment, `began_at` in wall time, survives a restart. It is recorded when the run is parked, or after some time
    in memory. A wait that ends earlier leaves only its outcome.
    """

    __slots__ = ("began_at", "is_recorded", "now_at", "seconds")

    #: Whether the wait gets its whole time again when a person lets the run go on while it is open.
    starts_over = True

    def __init__(self, branch: Branch, call: str, digest: str, seconds: float | None) -> None:
        self.seconds = seconds
        super().__init__(branch, call, digest)

    def begin(self) -> None:
        if self.state == NEW and self.entry is None and self.seconds is not None:
            self._begin_clock()
        super().begin()

    def _begin_clock(self) -> None:
        run = self.run
        self.now_at = run.now_at
        recorded = run.take_wait_start(self.key)
        self.is_recorded = recorded is not None
        if recorded is not None:
            self.began_at = recorded.timestamp()
        elif run.history is not None and run.parked_by_older:
            self.began_at = run.now_at.timestamp()  # older versions count from the newest outcome, and record no start
        else:
            self.began_at = run.host.clock.now()
        if self.starts_over and run.retried_at is not None:
            self.began_at = max(self.began_at, run.retried_at.timestamp())

    def wait(
        self,
        on_due: Callable[[], None] | None,
        name: str | None = None,
        on_signal: Callable[[Signal], None] | None = None,
        *,
        mine: Callable[[Signal], bool] | None = None,
    ) -> None:
        """Wait for the time or a signal, whichever comes first."""
        if self.seconds is None:
            add_wait(self.run, Wait(self, None, None, name, on_signal, mine=mine))
            return
        due, start = self.began_at + self.seconds, None if self.is_recorded else self._start
        add_wait(self.run, Wait(self, due, on_due, name, on_signal, longest=self.seconds, mine=mine, start=start))

    def _start(self) -> Record:
        """Return the record of the wait's start."""
        self.is_recorded = True
        return self.record(Kind.WAIT_STARTED, started_at=instant(self.began_at), format=FORMAT_WITH_WAITS)

    def stop(self) -> None:
        super().stop()
        end_wait(self.run, self)

    def was_asked_as(self, digest: str) -> bool:
        return self.seconds is not None and not self.run.exact_time and digest == f"{self.seconds:g}"


class SleepCall(TimedCall[None]):
    """A durable sleep."""

    __slots__ = ()

    starts_over = False  # elapsed time stays elapsed

    def __init__(self, branch: Branch, seconds: float, name: str = "sleep") -> None:
        super().__init__(branch, name, digest_of(seconds), seconds)

    def begin_live(self) -> None:
        self.wait(self._over)

    def _over(self) -> None:
        record = self.record(Kind.TIMER)
        # If the clock was set back, the run's own time still advances by the time that it has slept.
        record.finished_at = self.run.time(self.now_at + timedelta(seconds=self.seconds or 0.0))
        self.run.append(record, self)


def sleep(
    seconds: float | timedelta = 0.0,
    *,
    minutes: float = 0.0,
    hours: float = 0.0,
    days: float = 0.0,
    name: str = "sleep",
) -> Call[None]:
    """Sleep durably: a run that sleeps long uses a row, not memory, and wakes in time after any crash.

    `seconds` may be a timedelta. `name` stands in the record in place of `sleep`.
    """
    check_name(name, "sleep")
    parts = zip((seconds_of(seconds), minutes, hours, days), (1, 60, 3600, 86_400), strict=True)
    total = sum(_number(count, "a sleep") * unit for count, unit in parts)
    return SleepCall(current_branch("sleep"), _span(total, "a sleep"), name)


def _number(count: Any, what: str) -> float:
    if not isinstance(count, Real):
        raise DefinitionError(f"{what} must be a number, got {count!r}")
    return float(count)


def _span(seconds: float | timedelta, what: str) -> float:
    """Return a time to wait in seconds, or raise a clear error."""
    total = _number(seconds_of(seconds), what)
    if not 0 <= total < LONGEST_SECONDS:
        raise DefinitionError(f"{what} must be between 0 and {LONGEST_SECONDS:,.0f} s, got {total!r}")
    return float(total)


class Request:
    """The result of `ks.wait_for` for a question of `handle.ask` or `ks.ask`: the payload, and the way to reply."""

    def __init__(self, branch: Branch, question: str, payload: Any, asker: str = "") -> None:
        self._branch, self._question, self._asker = branch, question, asker
        self.payload = payload

    def reply(self, value: Any = None) -> None:
        """Answer the question, durably and once."""
        data = VALUES.encode_shown(value, f"reply to {self._question}")
        self._branch.run.host.redaction.check(data, self._question, "reply to")
        reply = new_data(ReplyData, ask=self._question)
        note(self._branch, Kind.REPLY, f"reply:{self._question}", data, reply, signal=self._answer(data))

    def _answer(self, data: bytes) -> Signal | None:
        """Return the signal with the reply to a run that asks; None if a program asks, which reads the record."""
        run, question = self._branch.run, self._question
        if not self._asker:
            return None
        return Signal(self._asker, f"{REPLY}{question}", data, f"reply:{question}", f"run {run.id}", run.time())

    def __repr__(self) -> str:
        return f"<request {self._question} {self.payload!r}>"


class SignalWait(TimedCall[Any]):
    """A call that a signal answers. If it is cancelled before the delivery, the signal stays unread."""

    __slots__ = ("name", "received")

    def __init__(self, branch: Branch, call: str, digest: str, name: str, seconds: float | None = None) -> None:
        self.name = name
        self.received: Signal | None = None
        super().__init__(branch, call, digest, seconds)

    def cancelled_by_code(self) -> None:
        asked = self.state == ASKED
        super().cancelled_by_code()
        if asked and self.state == CANCELLED:
            self.leave_unread()

    def leave_unread(self) -> None:
        """Return the signal of this wait to the inbox, if there is one."""
        if self.received is not None:
            put_back(self.run, self.received)
        elif self.entry is not None and self.entry.signal:
            record, seq = self.entry.record, self.entry.signal
            if record is None:  # its value is not in memory
                self.run.host.background(read_again(self.run, seq))
                return
            sender = data_of(record, SignalData).get("sender", "")
            payload = record.raw() if record.error is None else report(record.error)
            put_back(self.run, Signal(self.run.id, self.name, payload, sender=sender, seq=seq))


class SignalCall(SignalWait):
    """A wait for a signal, with or without a timeout and a longest time between two heartbeats.

    A signal that does not fit its type stays unread.
    """

    __slots__ = ("default", "heard_at", "heartbeat", "refused", "type")

    def __init__(  # noqa: PLR0917 - the options of `ks.wait_for`
        self,
        branch: Branch,
        name: str,
        seconds: float | None,
        default: Any,
        type_: Any = None,
        heartbeat: float | None = None,
        call: str = "",
    ) -> None:
        self.default, self.type = default, type_
        self.refused: set[int] = set()  # the signals that a warning has named
        self.heartbeat = heartbeat
        self.heard_at = 0.0  # when the heartbeat was sent from which the silence counts
        super().__init__(branch, call or f"wait_for:{name}", digest_of(seconds), name, seconds)

    @property
    def subject(self) -> str:
        """The awaited thing, as messages name it."""
        return f"signal {self.name!r}"

    def begin(self) -> None:
        if self.heartbeat is not None and self.seconds is None and self.state == NEW and self.entry is None:
            self._begin_clock()
        super().begin()

    def begin_live(self) -> None:
        signal = self.run.inbox.take(self.name, self._fits)
        if signal is not None:
            self._come(signal)
        elif self.heartbeat is None:
            self.wait(self._late, self.name, self._come, mine=self._fits)
        else:
            self._listen(self.heartbeat)

    def _fits(self, signal: Signal) -> bool:
        """Whether the payload can be read as the type of the wait. A warning names each signal that cannot."""
        if reported_in(signal.payload) is not None or (self.type is None and b'"$"' not in signal.payload):
            return True
        try:
            self._payload(signal.payload)
        except KeepstepError as error:
            if signal.seq not in self.refused:
                self.refused.add(signal.seq)
                why = one_line(f"signal {signal.seq} from {signal.sender} stays unread: {error}")
                log.warning("run %s: %s", self.run.id, why)
            return False
        return True

    def _listen(self, heartbeat: float) -> None:
        """Wait for the signal until the time is over, or until no heartbeat has come for too long."""
        now, self.heard_at = self.run.host.clock.now(), self.run.inbox.beats.get(self.name, 0.0)
        silent_at = min(max(self.began_at, self.heard_at), now) + heartbeat  # a sender's clock may be ahead
        late_at = math.inf if self.seconds is None else self.began_at + self.seconds
        due, then = (silent_at, self._silent) if silent_at < late_at else (late_at, self._late)
        start, longest = None if self.is_recorded else self._start, max(due - now, 0.0)
        wait = Wait(self, due, then, self.name, self._come, longest=longest, start=start, mine=self._fits)
        add_wait(self.run, wait)

    def _silent(self) -> None:
        assert self.heartbeat is not None  # noqa: S101 - only such a wait can miss one
        if self.run.inbox.beats.get(self.name, 0.0) > self.heard_at:
            self._listen(self.heartbeat)
        else:
            self._over(f"no heartbeat for {self.subject} came within {self.heartbeat:g} s")

    def _come(self, signal: Signal) -> None:
        self.received = signal
        data = new_data(SignalData, signal=signal.seq, sender=signal.sender)
        error = reported_in(signal.payload)
        if error is None:
            self.run.append(self.record(Kind.SIGNAL, signal.payload, data=data), self)
        else:
            error.id = new_id("error")
            failed = Outcome.FAILURE.value
            self.run.append(self.record(Kind.SIGNAL, outcome=failed, attempt=1, error=error, data=data), self)

    def _late(self) -> None:
        self._over(f"no {self.subject} came within {self.seconds:g} s")

    def _over(self, text: str) -> None:
        error = StoredError("keepstep.TimedOut", text, "timeout", "ks:timed-out", id=new_id("error"))
        self.run.append(self.record(Kind.TIMER, outcome=Outcome.FAILURE.value, error=error), self)

    def failure(self, record: Record) -> BaseException:
        error = super().failure(record)
        if type(error) is StepFailed and error.error is not None:
            reason = f"{error.error.type}: {error.error.message}"
            what = self.subject.removeprefix("signal ")
            error = WaitFailed(f"the wait for {what} failed: {reason}", self.key, error.error, record.seq)
        return _Default(self.default) if self.default is not MISSING and isinstance(error, TimedOut) else error

    def outcome(self) -> Any:
        if isinstance(self.error, _Default):
            return self.error.value
        return super().outcome()

    def decode(self, record: Record) -> Any:
        asked, payload = self._payload(bytes(record.value))  # type: ignore[arg-type]
        return payload if asked is None else Request(self.branch, asked.v[0], payload, asked.by)

    def _payload(self, raw: bytes) -> tuple[_Ask | None, Any]:
        """Return the question, if it is one, and the payload as the type of the wait."""
        asked, where = None, self.subject
        if raw.startswith(b'{"$":"ask"'):
            asked = msgspec.json.decode(raw, type=_Ask)
            raw, where = bytes(asked.v[1]), f"question {self.name!r}"
        if self.type is not None:
            return asked, as_written(values_for(self.type).decode(raw, where), self.type, where)
        try:
            return asked, VALUES.decode(raw, where)
        except NotSerializable:
            return asked, self.run.workflow.reach.decode(raw, where)


#: Beginning of the payload of a signal that reports an error. No value of a user is encoded like this.
_REPORT = b'{"$":"fail"'


class _Report(msgspec.Struct):
    v: StoredError


def report(error: StoredError) -> bytes:
    """Return the payload of a signal that fails the wait for it."""
    return msgspec.json.encode({"$": "fail", "v": error})


def reported_in(payload: bytes) -> StoredError | None:
    """Return the error that a signal reports, or None."""
    return msgspec.json.decode(payload, type=_Report).v if payload.startswith(_REPORT) else None


class _Ask(msgspec.Struct):
    """A question: its id and payload, and the run that asks; none for a program, which reads the reply's record."""

    v: tuple[str, msgspec.Raw]
    by: str = ""


def question(question_id: str, payload: bytes, asker: str = "") -> bytes:
    """Return the payload of a signal that asks."""
    asked = {"$": "ask", "v": [question_id, msgspec.Raw(payload)]}
    return msgspec.json.encode({**asked, "by": asker} if asker else asked)


class _Default(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@overload
def wait_for(
    name: str, timeout: float | timedelta | None = None, *, heartbeat: float | timedelta | None = None
) -> Call[Any]: ...
@overload
def wait_for(
    name: str,
    timeout: float | timedelta | None = None,
    *,
    type: type[T],
    heartbeat: float | timedelta | None = None,
) -> Call[T]: ...
@overload
def wait_for(
    name: str,
    timeout: float | timedelta | None,
    default: U,
    *,
    type: type[T],
    heartbeat: float | timedelta | None = None,
) -> Call[T | U]: ...
@overload
def wait_for(
    name: str,
    timeout: float | timedelta | None = None,
    *,
    default: U,
    type: type[T],
    heartbeat: float | timedelta | None = None,
) -> Call[T | U]: ...
@overload
def wait_for(
    name: str,
    timeout: float | timedelta | None = None,
    default: Any = ...,
    *,
    type: Any = None,
    heartbeat: float | timedelta | None = None,
) -> Call[Any]: ...
def wait_for(
    name: str,
    timeout: float | timedelta | None = None,
    default: Any = MISSING,
    *,
    type: Any = None,  # noqa: A002 - the word users know
    heartbeat: float | timedelta | None = None,
) -> Call[Any]:
    """Wait for a signal and return its payload; an earlier signal is not lost.

    After the timeout it raises `TimedOut`, or returns `default` if given. With `heartbeat`, so it does when no `beat`
    has come for that long. With a `type`, plain data becomes that type; a signal that does not fit stays unread, with a
    warning, and the wait goes on. An error that the sender reports with `fail` is raised as `WaitFailed`.
    """
    signal_name(name)
    if isinstance(type, str):
        raise DefinitionError(f"ks.wait_for takes a class or another annotation as type=, not the text {type!r}")
    branch = current_branch("wait_for")
    return SignalCall(branch, name, timeout_seconds(timeout), default, type, heartbeat_seconds(heartbeat))


def signal_name(name: str) -> str:
    """Return the name of a signal; refuse one that a user may not use."""
    check_name(name, "signal")
    if name.startswith(RESERVED):
        raise DefinitionError(f"signal name must not begin with {RESERVED!r}, which Keepstep reserves, got {name!r}")
    return name


def timeout_seconds(timeout: float | timedelta | None) -> float | None:
    """Return the longest time to wait in seconds, or raise a clear error."""
    return None if timeout is None else _span(timeout, "a wait")


def interval_seconds(every: float | timedelta) -> float:
    """Return the time between two checks in seconds, or raise a clear error."""
    seconds = _span(every, "every")
    if seconds == 0:
        raise DefinitionError("every must be longer than 0 s")
    return seconds


def heartbeat(name: str, now: float) -> tuple[str, bytes, str]:
    """Return the name, the payload and the id of a heartbeat signal; at most ten a second are stored."""
    return f"{BEAT}{name}", b"true", f"{BEAT}{name}:{now:.1f}"


def heartbeat_seconds(heartbeat: float | timedelta | None) -> float | None:
    """Return the longest time between two heartbeats in seconds, or raise a clear error."""
    seconds = None if heartbeat is None else _span(heartbeat, "a heartbeat")
    if seconds == 0:
        raise DefinitionError("a heartbeat must be longer than 0 s; None means that the wait needs none")
    return seconds


class TimeoutCall(TimedCall[None]):
    """The clock of a `ks.timeout` block."""

    __slots__ = ("holds", "on_over", "rang")

    def __init__(self, branch: Branch, seconds: float, on_over: Callable[[], None]) -> None:
        self.on_over = on_over
        self.rang = 0  # the number of the record that says so
        self.holds = False  # whether it keeps other calls from beginning
        super().__init__(branch, "timeout", digest_of(seconds), seconds)

    def begin_live(self) -> None:
        if self.seconds:
            self.wait(self._over)
            return
        self.holds = True
        self.run.cancel_begun()  # the block is over before anything in it begins
        self._over()

    def _over(self) -> None:
        self.run.append(self.record(Kind.TIMER), self)

    def settle(self, record: Record) -> bool:
        if self.state != ASKED:
            return False
        self.state = DONE
        self.rang = record.seq
        self.on_over()
        self._let_begin()
        return True

    def _let_begin(self) -> None:
        """Let calls begin again, once the code has cancelled those that it made in the block."""
        if self.holds:
            self.holds = False
            self.run.loop.call_soon(self.run.cancel_recorded, Answer(Verdict.DONE), context=self.run.host.context)

    def withdraw(self) -> None:
        """End the clock of a block that finished in time; nothing is recorded."""
        if self.state == ASKED:
            self.state = CANCELLED
            self.stop()
            self._let_begin()
            if self.entry is None:
                self.run.drop_asked(self.key)
            self.run.watch()


class timeout:  # noqa: N801 - used like asyncio.timeout
    """`async with ks.timeout(seconds):` ends the block with `TimedOut` when its time is over, durably.

    In a plain def workflow it is a plain `with`.
    As with `asyncio.timeout`, 0 seconds end it at its first call, before a step begins.
    """

    def __init__(self, seconds: float | timedelta) -> None:
        self._seconds = _span(seconds, "a block")
        self._expired = False
        self._code: Code | None = None

    async def __aenter__(self) -> Self:
        self._begin(current_branch("timeout"), asyncio.current_task())
        return self

    def __enter__(self) -> Self:
        branch = current_branch("timeout")
        self._code = code = branch.run.thread.here()
        if code is None:
            raise DefinitionError("use `async with ks.timeout(...)` here; a plain `with` is for a plain def workflow")
        code.ask(partial(self._begin, branch, code.task))
        return self

    def _begin(self, branch: Branch, task: asyncio.Task[Any] | None) -> None:
        self._task = task
        self._cancelling = 0 if task is None else task.cancelling()
        self._call = TimeoutCall(branch, self._seconds, self._ring)
        self._call.begin()

    def _ring(self) -> None:
        self._expired = True
        if self._task is not None:
            self._task.cancel()

    @property
    def expired(self) -> bool:
        """Whether the clock ended the block."""
        return self._expired

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._end(kind)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._code is not None:
            self._code.ask(partial(self._end, kind))

    def _end(self, kind: type[BaseException] | None) -> None:
        self._call.withdraw()
        if not self._expired or self._task is None:
            return
        others_cancelled_too = self._task.uncancel() > self._cancelling
        if kind is not None and issubclass(kind, asyncio.CancelledError) and not others_cancelled_too:
            late = TimedOut(f"the block took longer than {self._seconds:g} s", self._call.run.id)
            mark_outcome(late, self._call.rang)
            raise late from None
