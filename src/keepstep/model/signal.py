"""A signal: a durable message to a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

#: Prefix of the engine's own signals; a user's signal may not use it.
RESERVED = "ks:"
CANCEL = "ks:cancel"
PAUSE = "ks:pause"
RESUME = "ks:resume"
RESOLVE = "ks:resolve"
GO = "ks:go:"
CHILD = "ks:child:"
#: Prefix of the reply to a question of a run. The id of the question follows, which names the asking call.
REPLY = "ks:reply:"
#: Prefixes of the signals of a topic, whose name follows: its messages, and the notice that it has room for more.
MESSAGES = "ks:messages:"
ROOM = "ks:room:"
#: Prefix of the outcome of a barrier, whose name follows, and then the call that waits for it.
BARRIER = "ks:barrier:"
#: Prefix of a heartbeat for the wait for a signal. It wakes no parked run: the run looks for it when its time is over.
BEAT = "ks:beat:"
#: Signals that wake a run before its start delay has passed, so that a cancel takes effect at once.
WAKES_DELAYED = (CANCEL,)
#: Prefix of a wake-up that names a step that is not ready. It is never sent as a signal.
BLOCKED = "ks:blocked:"
#: Prefix of a wake-up that names a service for whose places the run waits. It is never sent as a signal.
AT_SERVICE = "ks:service:"


def at_service(service: str, why: str) -> str:
    """Return the wake-up of a run that waits for a place at a service, and why it waits."""
    return f"{AT_SERVICE}{why}:{service}"


#: The signal that completes a callback: `callback:NAME:SEQ`, or `callback:SEQ` without a name.
_CALLBACK = re.compile(r"callback(?::(?P<name>.+))?:[1-9][0-9]*", re.DOTALL)


def callback_of(name: str) -> str | None:
    """Return the name of the callback that a signal completes, which may be empty; None for other signals.

    The name has no number of a record, which may be another one after a crash.
    """
    found = _CALLBACK.fullmatch(name)
    return None if found is None else found["name"] or ""


def breakpoint_call(key: str, when: str) -> str:
    """Return the key of the call with which a graph waits at a breakpoint before or after the step `key`."""
    return f"{key}.{when}/wait_for:{GO}{key}.{when}#1"


def stop_at(name: str) -> str:
    """Return the breakpoint that a signal resumes, in words: `before pay#1`."""
    key, _, when = name.removeprefix(GO).rpartition(".")
    return f"{when} {key}"


@dataclass(frozen=True, slots=True)
class Signal:
    """A message to one run. The store assigns `seq`, gapless per run, and `checksum`; `payload` is JSON text.

    A run keeps only the first of several signals with the same `id`.
    """

    run: str
    name: str
    payload: bytes = b"true"
    id: str = ""
    sender: str = ""
    sent_at: datetime | None = None
    seq: int = 0
    checksum: str = ""


#: Unread signals of a run from which on a user's signal is refused. It bounds the memory that the run needs to load.
MAX_UNREAD = 10_000
