"""A signal: a durable message to a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

#: Names that begin so are the engine's own; a user's signal may not use them.
RESERVED = "ks:"
CANCEL = "ks:cancel"
PAUSE = "ks:pause"
RESUME = "ks:resume"
RESOLVE = "ks:resolve"
GO = "ks:go:"
CHILD = "ks:child:"
#: What wakes a run that was started with a delay: a cancel does not wait until it is due.
WAKES_DELAYED = (CANCEL,)
#: No signal at all: among the wake-ups of a parked run it says which step is not ready.
BLOCKED = "ks:blocked:"


def breakpoint_call(key: str, when: str) -> str:
    """The key of the call with which a graph waits at a breakpoint, before or after the step of this key."""
    return f"{key}.{when}/wait_for:{GO}{key}.{when}#1"


def stop_at(name: str) -> str:
    """The breakpoint that a signal lets a run go on from, in words: `before pay#1`."""
    key, _, when = name.removeprefix(GO).rpartition(".")
    return f"{when} {key}"


@dataclass(frozen=True, slots=True)
class Signal:
    """A message to one run. The store gives `seq`, gapless per run, and the `checksum`; `payload` is JSON text.

    Two signals to one run with the same `id` are one: the second is not stored.
    """

    run: str
    name: str
    payload: bytes = b"true"
    id: str = ""
    sender: str = ""
    sent_at: datetime | None = None
    seq: int = 0
    checksum: str = ""
