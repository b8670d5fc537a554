"""Durable waits: for a time, for a signal, or until a block of code has taken too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from ..errors import DefinitionError, TimedOut
from ..model import Kind, Outcome, Signal
from ..model.ids import check_name, new_id
from ..model.signal import RESERVED
from ..ports import instant
from ..stores.records import FORMAT_WITH_WAITS, Record, StoredError
from ..values import VALUES
from ..workflows.definition import Call
from ..workflows.options import LONGEST_SECONDS
from .branch import ASKED, CANCELLED, DONE, NEW, Branch, DurableCall, in_workflow
from .failure_point import mark_outcome
from .notes import note
from .wakeups import Wait, add_wait, end_wait, put_back, read_again

if TYPE_CHECKING:
    pass

T = TypeVar("T")
U = TypeVar("U")

_MISSING: Any = object()


def digest_of(seconds: float | None) -> str:
    """The digest of a time to wait: in six digits if they say it exactly, as older versions have all of them."""
    if seconds is None:
        return ""
    short = f"{seconds:g}"
    return short if float(short) == seconds else repr(seconds)


class TimedCall(DurableCall[T]):
    """A call that may wait for a time, counted from the moment at which the code asks: `seconds`, None for ever.

    What survives a restart is that moment, `began_at` in wall time. It is recorded when the run is put away, or has
    waited in memory for a while. A wait that ends before that leaves only its outcome.
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
        recorded = run.wait_starts.pop(self.key, None)
        self.is_recorded = recorded is not None
        if recorded is not None:
            self.began_at = recorded.timestamp()
        elif run.history is not None and run.parked_by_older:
            self.began_at = run.now_at.timestamp()  # older versions count from the newest outcome, and record no start
        else:
            self.began_at = run.engine.clock.now()
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
        add_wait(self.run, Wait(self, due, on_due, name, on_signal, longest=self.seconds, start=start))

    def _start(self) -> Record:
        """The record of when the wait began."""
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

    starts_over = False  # time that has passed has passed

    def __init__(self, branch: Branch, seconds: float) -> None:
        super().__init__(branch, "sleep", digest_of(seconds), seconds)

    def begin_live(self) -> None:
        self.wait(self._over)

    def _over(self) -> None:
        record = self.record(Kind.TIMER)
        # If the clock was set back, the run's own time still goes on by as much as it has slept.
        record.finished_at = self.run.time(self.now_at + timedelta(seconds=self.seconds or 0.0))
        self.run.append(record, self)


def sleep(seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> Call[None]:
    """Sleep durably: a run that sleeps long costs a row, not memory, and wakes in time after any crash."""
    total = seconds + 60 * minutes + 3600 * hours + 86_400 * days
    return SleepCall(in_workflow("sleep"), _span(total, "a sleep"))


def _span(seconds: float | timedelta, what: str) -> float:
    """A time to wait in seconds, or a clear error."""
    total = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
    if not 0 <= total < LONGEST_SECONDS:
        raise DefinitionError(f"{what} must take between 0 and {LONGEST_SECONDS:,.0f} s, not {total!r}")
    return float(total)


class Request:
    """What `ks.wait_for` gives when someone asked with `handle.ask`: the payload, and the way to reply."""

    def __init__(self, branch: Branch, question: str, payload: Any) -> None:
        self._branch, self._question = branch, question
        self.payload = payload

    def reply(self, value: Any = None) -> None:
        """Answer the one who asked, durably and once."""
        data = VALUES.encode(value, f"reply to {self._question}")
        self._branch.run.engine.censor.check(data, self._question, "reply to")
        note(self._branch, Kind.REPLY, f"reply:{self._question}", data, {"ask": self._question})

    def __repr__(self) -> str:
        return f"<request {self._question} {self.payload!r}>"


class HearingCall(TimedCall[Any]):
    """A call that a signal answers. Cancelled before it was told the answer, it leaves the signal unread."""

    __slots__ = ("heard", "name")

    def __init__(self, branch: Branch, call: str, digest: str, name: str, seconds: float | None = None) -> None:
        self.name = name
        self.heard: Signal | None = None
        super().__init__(branch, call, digest, seconds)

    def cancelled_by_code(self) -> None:
        asked = self.state == ASKED
        super().cancelled_by_code()
        if not asked or self.state != CANCELLED:
            return
        if self.heard is not None:
            put_back(self.run, self.heard)
        elif self.entry is not None and self.entry.signal:
            record, seq = self.entry.record, self.entry.signal
            if record is None:  # its value is not in memory
                self.run.engine.background(read_again(self.run, seq))
                return
            sender = (record.data or {}).get("sender", "")
            put_back(self.run, Signal(self.run.id, self.name, record.raw(), sender=sender, seq=seq))


class SignalCall(HearingCall):
    """A wait for a signal, for a while or for ever."""

    __slots__ = ("default",)

    def __init__(self, branch: Branch, name: str, seconds: float | None, default: Any) -> None:
        self.default = default
        super().__init__(branch, f"wait_for:{name}", digest_of(seconds), name, seconds)

    def begin_live(self) -> None:
        signal = self.run.inbox.take(self.name)
        if signal is not None:
            self._come(signal)
        else:
            self.wait(self._late, self.name, self._come)

    def _come(self, signal: Signal) -> None:
        self.heard = signal
        data = {"signal": signal.seq, "sender": signal.sender}
        self.run.append(self.record(Kind.SIGNAL, signal.payload, data=data), self)

    def _late(self) -> None:
        text = f"no signal {self.name!r} came within {self.seconds:g} s"
        error = StoredError("keepstep.TimedOut", text, "timeout", "ks:timed-out", id=new_id("error"))
        self.run.append(self.record(Kind.TIMER, outcome=Outcome.FAILURE.value, error=error), self)

    def failure(self, record: Record) -> BaseException:
        error = super().failure(record)
        return _Default(self.default) if self.default is not _MISSING and isinstance(error, TimedOut) else error

    def outcome(self) -> Any:
        if isinstance(self.error, _Default):
            return self.error.value
        return super().outcome()

    def decode(self, record: Record) -> Any:
        raw = bytes(record.value)  # type: ignore[arg-type]
        if raw.startswith(b'{"$":"ask"'):
            question, payload = msgspec.json.decode(raw, type=_Ask).v
            return Request(self.branch, question, VALUES.decode(bytes(payload), "question"))
        return VALUES.decode(raw, f"signal {self.name!r}")


class _Ask(msgspec.Struct):
    v: tuple[str, msgspec.Raw]


class _Default(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def wait_for(name: str, timeout: float | timedelta | None = None, default: Any = _MISSING) -> Call[Any]:
    """Wait for a signal and give its payload; one that was sent before is not lost.

    When the time is over it raises `TimedOut`, or gives `default` if there is one.
    """
    check_name(name, "signal")
    if name.startswith(RESERVED):
        raise DefinitionError(f"signal name {name!r} is refused: names that begin with {RESERVED!r} are Keepstep's own")
    seconds = None if timeout is None else _span(timeout, "a wait")
    return SignalCall(in_workflow("wait_for"), name, seconds, default)


class TimeoutCall(TimedCall[None]):
    """The clock of a `ks.timeout` block."""

    __slots__ = ("on_over", "rang")

    def __init__(self, branch: Branch, seconds: float, on_over: Callable[[], None]) -> None:
        self.on_over = on_over
        self.rang = 0  # the number of the record that says so
        super().__init__(branch, "timeout", digest_of(seconds), seconds)

    def begin_live(self) -> None:
        self.wait(self._over)

    def _over(self) -> None:
        self.run.append(self.record(Kind.TIMER), self)

    def settle(self, record: Record) -> bool:
        if self.state != ASKED:
            return False
        self.state = DONE
        self.rang = record.seq
        self.on_over()
        return True

    def withdraw(self) -> None:
        """The block ended in time; nothing is recorded of a clock that did not ring."""
        if self.state == ASKED:
            self.state = CANCELLED
            self.stop()
            if self.entry is None:
                self.run.asked.pop(self.key, None)
            self.run.watch()


class timeout:  # noqa: N801 - used like asyncio.timeout
    """`async with ks.timeout(seconds):` ends the block with `TimedOut` when its time is over, durably."""

    def __init__(self, seconds: float | timedelta) -> None:
        self._seconds = _span(seconds, "a block")
        self._expired = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._call = TimeoutCall(in_workflow("timeout"), self._seconds, self._ring)
        self._call.begin()
        return self

    def _ring(self) -> None:
        self._expired = True
        if self._task is not None:
            self._task.cancel()

    @property
    def expired(self) -> bool:
        """Whether the block was ended by the clock."""
        return self._expired

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._call.withdraw()
        if not self._expired or self._task is None:
            return
        others_cancelled_too = self._task.uncancel() > self._cancelling
        if kind is not None and issubclass(kind, asyncio.CancelledError) and not others_cancelled_too:
            late = TimedOut(f"the block took longer than {self._seconds:g} s", self._call.run.id)
            mark_outcome(late, self._call.rang)
            raise late from None
