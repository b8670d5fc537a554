"""Durable waits: for a time, for a signal, or until a block of code has taken too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from ..errors import DefinitionError, TimedOut
from ..model import Kind, Outcome, Signal
from ..model.ids import check_name, new_id
from ..model.signal import RESERVED
from ..stores.records import Record, StoredError
from ..values import VALUES
from ..workflows.definition import Call
from ..workflows.options import LONGEST_SECONDS
from .branch import ASKED, CANCELLED, DONE, Branch, DurableCall, in_workflow
from .failure_point import mark_outcome
from .notes import note
from .wakeups import Wait, add_wait, end_wait, put_back, read_again

if TYPE_CHECKING:
    pass

T = TypeVar("T")
U = TypeVar("U")

_MISSING: Any = object()


class SleepCall(DurableCall[None]):
    """A durable sleep."""

    __slots__ = ("seconds",)

    def __init__(self, branch: Branch, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(branch, "sleep", f"{seconds:g}")

    def begin_live(self) -> None:
        due = self.asked_at.timestamp() + self.seconds
        add_wait(self.run, Wait(self, due, self._over, longest=self.seconds))

    def _over(self) -> None:
        record = self.record(Kind.TIMER)
        due = self.asked_at + timedelta(seconds=self.seconds)
        if record.finished_at is None or record.finished_at < due:  # the clock was set back: the run's own goes on
            record.finished_at = due
        self.run.append(record, self)

    def stop(self) -> None:
        super().stop()
        end_wait(self.run, self)


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


def _began(call: DurableCall[Any]) -> float:
    """When the time of a limited wait began: at the call, or when a person let the run go on with the wait open."""
    retried_at = call.run.retried_at
    began = call.asked_at if retried_at is None else max(call.asked_at, retried_at)
    return began.timestamp()


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


class HearingCall(DurableCall[Any]):
    """A call that a signal answers. Cancelled before it was told the answer, it leaves the signal unread."""

    __slots__ = ("heard", "name")

    def __init__(self, branch: Branch, call: str, digest: str, name: str) -> None:
        self.name = name
        self.heard: Signal | None = None
        super().__init__(branch, call, digest)

    def stop(self) -> None:
        super().stop()
        end_wait(self.run, self)

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

    __slots__ = ("default", "seconds")

    def __init__(self, branch: Branch, name: str, seconds: float | None, default: Any) -> None:
        self.seconds, self.default = seconds, default
        super().__init__(branch, f"wait_for:{name}", "" if seconds is None else f"{seconds:g}", name)

    def begin_live(self) -> None:
        signal = self.run.inbox.take(self.name)
        if signal is not None:
            self._come(signal)
            return
        due = None if self.seconds is None else _began(self) + self.seconds
        longest = math.inf if self.seconds is None else self.seconds
        add_wait(self.run, Wait(self, due, self._late, self.name, self._come, longest=longest))

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


class TimeoutCall(DurableCall[None]):
    """The clock of a `ks.timeout` block."""

    __slots__ = ("on_over", "rang", "seconds")

    def __init__(self, branch: Branch, seconds: float, on_over: Callable[[], None]) -> None:
        self.seconds, self.on_over = seconds, on_over
        self.rang = 0  # the number of the record that says so
        super().__init__(branch, "timeout", f"{seconds:g}")

    def begin_live(self) -> None:
        add_wait(self.run, Wait(self, _began(self) + self.seconds, self._over, longest=self.seconds))

    def _over(self) -> None:
        self.run.append(self.record(Kind.TIMER), self)

    def settle(self, record: Record) -> bool:
        if self.state != ASKED:
            return False
        self.state = DONE
        self.rang = record.seq
        self.on_over()
        return True

    def stop(self) -> None:
        super().stop()
        end_wait(self.run, self)

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
