"""Words for people that every door uses: texts on one line, times, step names and waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from ..model.signal import callback_of
from .waits import Wait, WaitKind

if TYPE_CHECKING:
    from ..engine.schedules import ScheduleInfo
    from ..model import GateChange


def printable(text: str, *, lines: bool = True) -> str:
    """Return text without control characters, so that stored text cannot control a terminal."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else f"\\x{ord(c):02x}" for c in text)


def one_line(text: str, width: int = 0) -> str:
    """Return text on one line, cut at `width` if given."""
    flat = " ".join(text.split())
    flat = printable(flat[: width + 1] if width else flat, lines=False)
    return flat if not width or len(flat) <= width else flat[: max(width - 1, 0)] + "…"


def step_name(key: str) -> str:
    """Return a step's key for people: the number of the call appears only from the second call on."""
    return key.removesuffix("#1")


def duration(seconds: float) -> str:
    """Return a time span for people."""
    if seconds < 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes and hours < 10 else f"{hours} h"
    return f"{hours // 24} days"


def ago(at: datetime | None, now: datetime | None = None) -> str:
    """Return a time relative to now: "3 min ago", "in 2 h"."""
    if at is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(-seconds)}"


def waits_in_words(waits: Iterable[Wait], now: datetime | None = None) -> str:
    """Return a list of waits in words."""
    now = now or datetime.now(UTC)
    return " or ".join(_wait_in_words(wait, now) for wait in waits)


def _wait_in_words(wait: Wait, now: datetime) -> str:  # noqa: C901 - one case after the other
    ahead = duration((wait.until - now).total_seconds()) if wait.until is not None else ""
    match wait.kind:
        case WaitKind.RETRY | WaitKind.RESUME:
            return f"a person: keepstep {'resume' if wait.kind is WaitKind.RESUME else 'retry or cancel'}"
        case WaitKind.WORKER:
            return _worker_in_words(wait, ahead)
        case WaitKind.SIGNAL:
            callback = callback_of(wait.name)
            return f"signal {wait.name}" if callback is None else f"callback {callback}".rstrip()
        case WaitKind.CHILD:
            return f"child {step_name(wait.name)}"
        case WaitKind.VERDICT:
            return f"a decision on {step_name(wait.name)}"
        case WaitKind.READINESS:
            return f"{step_name(wait.name)} to be ready"
        case WaitKind.SERVICE:
            return f"{wait.name} ({wait.why})" if wait.why else wait.name
        case WaitKind.BREAKPOINT:
            return f"a person at the breakpoint {wait.name}: keepstep resume"
        case WaitKind.REPLY | WaitKind.MESSAGE | WaitKind.ROOM | WaitKind.BARRIER:
            return _message_in_words(wait)
        case WaitKind.TIME:
            return f"{ahead} to pass"


def _message_in_words(wait: Wait) -> str:
    if wait.kind is WaitKind.REPLY:  # the id of a question ends with the call that asks, and a number
        return f"the reply to {step_name(wait.name.rpartition(':')[0].rpartition(':ask:')[2])}"
    if wait.kind is WaitKind.BARRIER:
        return f"the other parties of barrier {wait.name}"
    if wait.kind is WaitKind.MESSAGE:
        return f"a message of topic {wait.name}"
    return f"room in topic {wait.name}: keepstep topics show {wait.name}"


def _worker_in_words(wait: Wait, ahead: str) -> str:
    if wait.why:
        return _QUEUE_WAITS[wait.why].format(wait.queue)
    return f"a worker{_which(wait)}{f' (handed back, due again in {ahead})' if ahead else ''}"


#: Words for a wait in a queue, by its reason.
_QUEUE_WAITS = {
    "unserved": "a worker that serves queue {} (no living one does)",
    "stopped": "queue {}, which is stopped (concurrency 0)",
    "concurrency": "a place in queue {} (concurrency)",
    "per_key": "its key in queue {} (per_key)",
    "rate": "its turn in queue {} (rate)",
}


def _which(wait: Wait) -> str:
    """Return which worker a run waits for, if the living ones have other versions."""
    there = ", ".join(wait.versions)
    return f" with version {wait.version} of {wait.name} (workers here have {there})" if there else ""


class Gate(Protocol):
    """A queue or a service, as far as its changes go."""

    @property
    def is_set(self) -> bool: ...

    @property
    def declared(self) -> object: ...

    @property
    def log(self) -> Sequence[GateChange]: ...


def changed_by(gate: Gate) -> str:
    """Return where the limits come from: the code, a person, or nobody."""
    if not gate.is_set:
        return "code" if gate.declared is not None else "nobody"
    last = next((one for one in reversed(gate.log) if one.act == "set"), None)
    return last.actor if last is not None else "a person"


def schedule_standing(one: ScheduleInfo) -> str:
    """Return how a schedule stands, in a few words."""
    if one.paused:
        return "paused"
    if not one.attended:
        return "no worker declares it" if one.declared else "no worker knows its workflow"
    if one.waiting and one.open:
        return f"waits for {one.open[0]}"
    return "active" if one.next else "has no further ticks"
