"""Using the token of a callback: find its run and its record, check the secret, and end or prolong the wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import AlreadyFinished, RunError
from ..kernel.callback import Token, signal_of, unknown
from ..kernel.replay import Superseded, unsealed
from ..kernel.stored_errors import reported_error
from ..kernel.waits import heartbeat, report, reported_in
from ..model import Kind, Signal
from ..ports import Send, Verdict, instant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..records.record import Record
    from .process import Process


class _Open(NamedTuple):
    """A callback: its run, the signal that ends its wait, the record that it has ended with, and which records count.

    `generation` grows with every retry and rewind of the run, after which the callback may be open again.
    """

    run: str
    name: str
    answer: Record | None
    generation: int


async def complete(engine: Process, token: str, value: Any) -> None:
    """End the wait of a callback with a value. The same value again changes nothing; another one is refused."""
    found = await _find(engine, token)
    await _end(engine, found, await engine.encode(value, f"callback {found.name!r}", found.name, "signal"))


async def fail(engine: Process, token: str, error: BaseException | str, kind: str) -> None:
    """End the wait of a callback with an error. The same error again changes nothing; another one is refused."""
    found = await _find(engine, token)
    await _end(engine, found, report(reported_error(error, kind, engine.redaction.redact)))


async def beat(engine: Process, token: str) -> None:
    """Prolong the wait of a callback that has a heartbeat."""
    found = await _find(engine, token)
    if found.answer is not None:
        raise _used(found)
    await _send(engine, found, *heartbeat(found.name, engine.clock.now()))


async def _find(engine: Process, text: str) -> _Open:
    """Return the callback with this token; raise `UnknownToken` if there is none."""
    token = Token.read(text)
    record: Record | None = None
    if await engine.stored_run(token.run) is not None:
        rows = await engine.read(engine.store.list_checkpoints, token.run, token.seq - 1, 1)
        async for first, _ in unsealed(engine, rows, token.run, token.seq - 1):
            record = first
    if record is None or not token.fits(record):
        raise unknown()
    gone, name, answer = Superseded(), signal_of(record), None
    async for one in _records(engine, token.run, 0, Kind.SUPERSEDED):
        gone.add(one)
    if token.seq in gone:
        raise unknown()
    async for one in _records(engine, token.run, token.seq, Kind.SIGNAL, Kind.STEP_CANCELLED):
        if one.seq not in gone and f"wait_for:{name}#" in one.step:
            answer = one if one.kind == Kind.SIGNAL else None  # a cancelled wait leaves its signal unread
    return _Open(token.run, name, answer, gone.generation)


async def _records(engine: Process, run: str, after: int, *kinds: Kind) -> AsyncIterator[Record]:
    wanted = tuple(kind.value for kind in kinds)
    while rows := await engine.read(engine.store.list_checkpoints, run, after, 1000, wanted):
        for row in rows:
            after = row.seq
            async for record, _ in unsealed(engine, [row], run, row.seq - 1):
                yield record


async def _end(engine: Process, found: _Open, payload: bytes) -> None:
    if found.answer is None:
        signal_id = f"{found.name}:{found.generation}"
        if await _send(engine, found, found.name, payload, signal_id):
            return
        before = await _payload_of(engine, found.run, signal_id)
    else:
        error = found.answer.error
        before = found.answer.raw() if error is None else report(error)
    if _meaning(before) != _meaning(payload):
        raise _used(found)


async def _send(engine: Process, found: _Open, name: str, payload: bytes, signal_id: str) -> bool:
    """Send a signal to the run of a callback. Return False if it has one with this id."""
    await engine.encryption.check_sending(engine, found.run)
    sent_at = instant(engine.clock.now())
    answer = await engine.journal.write(Send(Signal(found.run, name, payload, signal_id, engine.actor, sent_at)))
    if answer.error is not None:
        raise answer.error
    if answer.verdict is Verdict.NOT_FOUND:
        raise unknown()
    if answer.verdict is Verdict.FINISHED:  # a successor has callbacks of its own
        raise AlreadyFinished(f"run {found.run!r} has ended, so callback {found.name!r} is closed", found.run)
    engine.signalled(found.run)
    return answer.verdict is not Verdict.EXISTS


async def _payload_of(engine: Process, run: str, signal_id: str) -> bytes:
    after = 0
    while page := await engine.signals(run, after):
        after = page[-1].seq
        for signal in page:
            if signal.id == signal_id:
                return signal.payload
    return b""


def _meaning(payload: bytes) -> object:
    """Return what a payload says: a value as it is, or the class and the message of an error."""
    error = reported_in(payload)
    return payload if error is None else (error.type, error.message)


def _used(found: _Open) -> RunError:
    return AlreadyFinished(f"callback {found.name!r} of run {found.run!r} has been answered otherwise", found.run)
