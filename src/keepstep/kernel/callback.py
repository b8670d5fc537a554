"""Callbacks: a secret token with which somebody outside ends one wait of a run.

The secret is drawn once and recorded, so that it is the same on replay and cannot be derived from public ids. The token
also names the run and the record, so that a sender finds both without a search.
"""

from __future__ import annotations

import re
from datetime import timedelta
from hmac import compare_digest
from typing import Any, NamedTuple

import msgspec

from ..checks import check_name
from ..errors import DefinitionError, UnknownToken
from ..model import Kind, ids
from ..model.signal import callback_of
from ..records.record import Record
from ..workflows.call import Call
from .calls import Branch, DurableCall, current_branch
from .waits import MISSING, SignalCall, heartbeat_seconds, timeout_seconds

#: Random bytes in a token: 192 bits cannot be guessed.
SECRET_BYTES = 24
#: Beginning of every token, by which logs and scanners can recognise one.
PREFIX = "cb_"
_TOKEN = re.compile(rf"{PREFIX}(?P<secret>[0-9a-f]+)\.(?P<seq>[1-9][0-9]{{0,17}})\.(?P<run>.+)", re.DOTALL)


class Token(NamedTuple):
    """The parts of a token: its secret, the record that holds the secret, and the run."""

    secret: str
    seq: int
    run: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.secret}.{self.seq}.{self.run}"

    @classmethod
    def read(cls, text: Any) -> Token:
        """Return the parts of a token; raise `UnknownToken` if it cannot be one."""
        found = _TOKEN.fullmatch(text) if isinstance(text, str) else None
        if found is None or not ids.is_id(found["run"]):
            raise unknown()
        return cls(found["secret"], int(found["seq"]), found["run"])

    def fits(self, record: Record) -> bool:
        """Whether the record holds the secret of this token."""
        if record.kind != Kind.STEP_COMPLETED or record.seq != self.seq:
            return False
        held = msgspec.json.decode(record.raw())
        return isinstance(held, str) and compare_digest(held.encode(), self.secret.encode())


#: Name of the call that draws a token; the name of the callback may follow it.
CALL = "callback"


def unknown() -> UnknownToken:
    """Return the error for a token that no callback has; it tells nothing about the run."""
    return UnknownToken("no callback has this token; it may be mistyped, or its run was removed or rewound")


def signal_of(record: Record) -> str:
    """Return the name of the signal that ends the wait of a callback: unique in its run by the number of its record."""
    return f"{record.step.rpartition('/')[2].partition('#')[0]}:{record.seq}"


class Callback:
    """A wait that the holder of its `token` ends with `complete` or `fail`, or keeps alive with `beat`."""

    def __init__(self, token: Token, name: str) -> None:
        self.token = str(token)
        #: The signal that ends the wait. Those who may open the store need no token: `run.signal(name, value)`. It has
        #: the number of a record, which may be another one after a crash: keep it out of results and of arguments.
        self.name = name
        self._answer: _CallbackWait | None = None

    def wait(
        self,
        timeout: float | timedelta | None = None,
        default: Any = MISSING,
        *,
        type: Any = None,  # noqa: A002 - the word users know
        heartbeat: float | timedelta | None = None,
    ) -> Call[Any]:
        """Wait until the token is used; the options are those of `ks.wait_for`. After a timeout it may wait again."""
        if self._answer is not None and self._answer.has_come:
            raise DefinitionError(f"{_words(self.name)} was completed before; make another one with ks.callback()")
        branch = current_branch("callback")
        seconds = timeout_seconds(timeout)
        self._answer = _CallbackWait(branch, self.name, seconds, default, type, heartbeat_seconds(heartbeat))
        return self._answer

    def __repr__(self) -> str:
        return f"<{_words(self.name)}>"


def _words(signal: str) -> str:
    """Return the callback that a signal completes, in words that are the same after a crash."""
    name = callback_of(signal)
    return f"callback {name!r}" if name else "the callback"


class _CallbackWait(SignalCall):
    """The wait of a callback."""

    __slots__ = ("has_come",)

    def __init__(self, *args: Any) -> None:
        self.has_come = False
        super().__init__(*args)

    @property
    def subject(self) -> str:
        return _words(self.name)

    def _late(self) -> None:
        self._over(f"{self.subject} was not completed within {self.seconds:g} s")

    def settle(self, record: Record) -> bool:
        self.has_come = record.kind == Kind.SIGNAL
        return super().settle(record)


class CallbackCall(DurableCall[Callback]):
    """Draws and records the secret of a callback. The code gets it when it is durable, so that it may be sent out."""

    __slots__ = ()

    def __init__(self, branch: Branch, name: str) -> None:
        super().__init__(branch, f"{CALL}:{name}" if name else CALL, "")

    def begin_live(self) -> None:
        secret = msgspec.json.encode(ids.draw(SECRET_BYTES).hex())
        self.run.append_special(self.record(Kind.STEP_COMPLETED, secret, attempt=1), {}, call=self)

    def decode(self, record: Record) -> Callback:
        secret = msgspec.json.decode(record.raw(), type=str)
        return Callback(Token(secret, record.seq, self.run.id), signal_of(record))


def callback(name: str = "") -> Call[Callback]:
    """Make a callback: `cb = await ks.callback()`, send `cb.token` out in a step, then `await cb.wait()`.

    The holder of the token calls `engine.complete(token, value)`, `engine.fail(token, error)` or `engine.beat(token)`.
    """
    if name:
        check_name(name, "callback")
    return CallbackCall(current_branch("callback"), name)
